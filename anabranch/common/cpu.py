"""CPU time of a job: of its own process, its JVM, and the JVM's Python workers on this machine."""

from __future__ import annotations

import threading
import time

import psutil

from anabranch.common.counters import CPU, TALLY

_EVERY_SECONDS = 10.0
"""Minimum time between two readings: one takes some milliseconds, a publish may come each
second."""

_alone = threading.Lock()
_counted, _at = 0, float("-inf")


def count_cpu() -> None:
    """Add the CPU time since the previous call to the process's tally; at the first call, the time
    since the processes began. Do nothing within ten seconds of the previous reading: a later call
    counts that time."""
    global _counted, _at
    with _alone:
        if time.monotonic() - _at < _EVERY_SECONDS:
            return
        now = cpu_ms()
        TALLY.count(CPU, n=max(0, now - _counted))
        _counted, _at = max(now, _counted), time.monotonic()


def cpu_ms() -> int:
    """Return the CPU time of the job's processes since they began, in milliseconds, including
    workers that have ended. Executors on other machines are not included."""
    own = psutil.Process()
    parent = own.parent()
    # spark-submit starts the driver's Python from the JVM; PySpark starts the JVM from Python.
    root = parent if parent is not None and parent.name() == "java" else own
    return round(1000 * sum(map(_seconds, [root, *root.children(recursive=True)])))


def _seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process and of its ended children, in seconds; 0 if the process has
    ended."""
    try:
        used = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return used.user + used.system + used.children_user + used.children_system
