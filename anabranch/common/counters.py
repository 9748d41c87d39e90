"""Counters of a process: requests, bytes, failed attempts, refusals. Its publishes record them
(`anabranch.protocol.measured`).

In a process of many streams each stream's threads count into a tally of its own too (`counting`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

Counts = Mapping[tuple[str, str], int]
"""By name and label."""

RETRIES = "retries"
"""Tries of a job that failed and were followed by another, by what they asked."""
REFUSED = "refused_publishes"
"""Publishes that were decided again because another landed first."""
S3_REQUESTS = "s3_requests"
"""Requests of this process to S3, by S3's names of the operations."""
S3_BYTES = "s3_bytes"
"""Bytes of objects that this process has `read` from S3 and `written` to it; of rows, what the
jobs' tasks wrote."""
COMMITS = "commits"
"""Commits of this process that landed, to any table of a stream: publishes, ledger rows, dead
letters."""
CPU = "cpu_ms"
"""CPU time of a job's processes on its own machine, in milliseconds (`anabranch.common.cpu`)."""


class Tally:
    """Counts that only grow, from any thread."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._alone = threading.Lock()

    def count(self, name: str, label: str = "", n: int = 1) -> None:
        with self._alone:
            self._counts[name, label] += n

    def totals(self) -> Counter[tuple[str, str]]:
        """All that was counted since the process began."""
        with self._alone:
            return self._counts.copy()


_OF_STREAM: ContextVar[Tally | None] = ContextVar("tally", default=None)


class _ProcessTally(Tally):
    """Counts also into the tally of the stream that a thread works for."""

    def count(self, name: str, label: str = "", n: int = 1) -> None:
        super().count(name, label, n)
        if (own := _OF_STREAM.get()) is not None and own is not self:
            own.count(name, label, n)


TALLY: Tally = _ProcessTally()
"""The process's own."""


@contextmanager
def counting(tally: Tally) -> Iterator[None]:
    """What this thread counts inside is counted into `tally` too. Threads that it starts do not:
    see `count_into`."""
    token = _OF_STREAM.set(tally)
    try:
        yield
    finally:
        _OF_STREAM.reset(token)


def count_into(tally: Tally) -> None:
    """The same for the whole life of a thread: the initializer of a stream's pool."""
    _OF_STREAM.set(tally)
