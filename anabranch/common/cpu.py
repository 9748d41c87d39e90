"""CPU time of a job: of its own process, of the JVM beside it, and of the JVM's Python workers on this machine."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from anabranch.common.counters import CPU, TALLY

_PROCESSES = Path("/proc")
_EVERY_SECONDS = 10.0
"""Reading it takes some milliseconds; a publish may come each second."""

_alone = threading.Lock()
_counted, _at = 0, float("-inf")


def count_cpu() -> None:
    """Count the CPU time since the last call into the process's tally; since the processes began at the first call.
    Within ten seconds of another call it does nothing: a later call counts that time."""
    global _counted, _at
    with _alone:
        if time.monotonic() - _at < _EVERY_SECONDS:
            return
        now = cpu_ms()
        TALLY.count(CPU, n=max(0, now - _counted))
        _counted, _at = max(now, _counted), time.monotonic()


def cpu_ms() -> int:
    """CPU time of the job's processes since they began, in milliseconds, with that of workers that have ended. Without
    Linux's /proc, that of this process alone. Executors on other machines are not included."""
    ticks = os.sysconf("SC_CLK_TCK")
    stats = _read_all()
    own = os.getpid()
    if own not in stats:
        return round(1000 * sum(os.times()[:4]))
    # spark-submit starts the driver's Python from the JVM; PySpark starts the JVM from Python.
    parent = stats[own][0]
    root = parent if parent in stats and stats[parent][1] == "java" else own
    children: dict[int, list[int]] = {}
    for pid, (of, _, _) in stats.items():
        children.setdefault(of, []).append(pid)
    total, left = 0, [root]
    while left:
        pid = left.pop()
        total += stats[pid][2]
        left += children.get(pid, [])
    return total * 1000 // ticks


def _read_all() -> dict[int, tuple[int, str, int]]:
    """By process: its parent, its name, and its clock ticks with those of its children that have ended."""
    found = {}
    for folder in _PROCESSES.glob("[0-9]*"):
        try:
            text = (folder / "stat").read_text()
        except OSError:
            continue
        name = text[text.index("(") + 1 : text.rindex(")")]
        fields = text[text.rindex(")") + 2 :].split()
        found[int(folder.name)] = (int(fields[1]), name, sum(map(int, fields[11:15])))
    return found
