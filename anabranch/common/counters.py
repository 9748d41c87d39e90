"""Counters of a process: requests, failed attempts, refusals. Its publishes record them
(`anabranch.protocol.measured`)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

Counts = Mapping[tuple[str, str], int]
"""By name and label."""

RETRIES = "retries"
"""Tries of a job that failed and were followed by another, by what they asked."""
REFUSED = "refused_publishes"
"""Publishes that were decided again because another landed first."""
S3_REQUESTS = "s3_requests"
"""Requests of this process to S3, by S3's names of the operations."""


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


TALLY = Tally()
"""The process's own."""
