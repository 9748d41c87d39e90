"""Counters of a process: requests, bytes, failed attempts, refusals. Each publish records them
(`anabranch.protocol.measured`).

In a process of many streams, each stream's threads also count into a tally of the stream
(`counting`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

Counts = Mapping[tuple[str, str], int]
"""Counts by name and label."""

RETRIES = "retries"
"""Failed attempts that were retried, by service (`anabranch.common.remote_errors.SERVICES`)."""
REFUSED = "refused_publishes"
"""Publishes that were planned again because another one landed first."""
S3_REQUESTS = "s3_requests"
"""Requests of this process to S3, by S3's operation names."""
S3_BYTES = "s3_bytes"
"""Bytes of S3 objects that this process has `read` and `written`; for rows, the bytes that the
jobs' tasks wrote."""
COMMITS = "commits"
"""Commits of this process that landed, on any table of a stream: publishes, ledger rows, dead
letters."""
CPU = "cpu_ms"
"""CPU time of a job's processes on the driver's machine, in milliseconds
(`anabranch.protocol.measured`)."""


class Tally:
    """Counts that only grow. Thread-safe."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._alone = threading.Lock()

    def count(self, name: str, label: str = "", n: int = 1) -> None:
        with self._alone:
            self._counts[name, label] += n

    def totals(self) -> Counter[tuple[str, str]]:
        """Return all counts since the process began."""
        with self._alone:
            return self._counts.copy()


_STREAM_TALLY: ContextVar[Tally | None] = ContextVar("tally", default=None)


class _ProcessTally(Tally):
    """The process's tally; also counts into the tally of the current thread's stream."""

    def count(self, name: str, label: str = "", n: int = 1) -> None:
        super().count(name, label, n)
        if (own := _STREAM_TALLY.get()) is not None and own is not self:
            own.count(name, label, n)


TALLY: Tally = _ProcessTally()
"""The tally of this process."""


@contextmanager
def counting(tally: Tally) -> Iterator[None]:
    """Also count into `tally` what this thread, not those that it starts, counts in the block."""
    token = _STREAM_TALLY.set(tally)
    try:
        yield
    finally:
        _STREAM_TALLY.reset(token)


def count_into(tally: Tally) -> None:
    """Also count into `tally` what this thread counts: the initializer of a stream's pool."""
    _STREAM_TALLY.set(tally)
