"""A warning of the speed layer: the running hour has more dead letters than the stream allows."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pyiceberg.manifest import DataFile

from anabranch.common.errors import AnabranchError
from anabranch.config import Stream
from anabranch.iceberg.lake import Lake
from anabranch.protocol.dead_letters import frequent_reason
from anabranch.protocol.shares import HourShare, is_too_many

LOG = logging.getLogger(__name__)


class DeadShare:
    """The dead letters of the newest hour, as far as this process published its records."""

    def __init__(self, lake: Lake, stream: Stream) -> None:
        self._lake, self._stream = lake, stream
        self._hour, self._share, self._warned = "", HourShare(0, 0), 0

    def published(self, hour: str, rows: int, letters: Sequence[DataFile]) -> None:
        """Count a micro-batch. Log a warning when too many are dead letters, and again each time
        their number has doubled."""
        dead = sum(file.record_count for file in letters)
        if hour != self._hour:
            self._hour, self._share, self._warned = hour, HourShare(0, 0), 0
        share = self._share = HourShare(self._share.dead + dead, self._share.records + dead + rows)
        if not letters or share.dead < 2 * self._warned:
            return
        if not is_too_many(share.dead, share.records, self._stream.quality.max_dead):
            return
        self._warned = share.dead
        LOG.warning(
            "stream %s: many dead letters, the batch layer refuses such an hour hour=%s share=%s "
            "most often %s; run `anabranch dead-letters %s`",
            self._stream.name,
            hour,
            share.words,
            self._reason(letters),
            self._stream.name,
        )

    def _reason(self, letters: Sequence[DataFile]) -> str:
        """Return the most frequent reason. The micro-batch is published, so an error must not end
        the job."""
        try:
            io = self._lake.load(self._stream.dead_letters_table).io
            return str(frequent_reason(io, letters))
        except AnabranchError as error:
            return f"unknown: {error}"
