"""A note of the offsets of a stream that a process reads, for the next start: if the process dies,
one of their records may be the cause. And a warning: the running hour has more dead letters than
the stream allows.

The note is a file in the temporary folder, which outlives a restart of a container. If it is lost,
the next start reads these offsets as any others.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pyiceberg.manifest import DataFile

from anabranch.common.errors import AnabranchError
from anabranch.common.json_values import parse
from anabranch.config import Stream
from anabranch.iceberg.lake import Lake
from anabranch.kafka.large_records import AHEAD
from anabranch.offsets.position import Offsets, Ranges
from anabranch.protocol.dead_letters import frequent_reason
from anabranch.protocol.ledger_row import HourShare, is_too_many

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Noted:
    """The offsets that a process read last, and how many processes in a row died before."""

    ranges: dict[int, tuple[int, int]] = field(default_factory=dict)
    deaths: int = 0

    def suspects(self, position: Offsets, ends: Offsets) -> Ranges:
        """Return the unpublished offsets, of which one may have ended the process. Pure."""
        found = {
            p: (max(start, position[p]), min(end + AHEAD, ends.get(p, 0)))
            for p, (start, end) in self.ranges.items()
            if p in position and position[p] < end
        }
        return {p: (start, end) for p, (start, end) in found.items() if start < end}


class ReadingNote:
    """The note of one table's speed layer. `before`: what the last process left, if it died."""

    def __init__(self, table: str) -> None:
        name = hashlib.sha256(table.encode()).hexdigest()[:24]
        self._file = Path(tempfile.gettempdir()) / f"anabranch-reading-{os.getuid()}-{name}"
        self.before = self._load()
        self._is_written = False

    def write(self, ranges: Ranges, deaths: int) -> None:
        """Note that these offsets are read now. A failure is only logged, at debug level."""
        self._is_written = True
        part = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        try:
            part.unlink(missing_ok=True)
            with part.open("x", encoding="utf-8") as file:
                json.dump(asdict(Noted(dict(ranges), deaths)), file)
            part.replace(self._file)
        except OSError as error:
            LOG.debug("note of the offsets that are read: not written: %s", error)

    def remove(self) -> None:
        """Remove the note: the process ends by itself. The note of the process before stays until
        its offsets are read again: without it, the next start would die of the same record."""
        if not self._is_written:
            return
        try:
            self._file.unlink(missing_ok=True)
        except OSError as error:
            LOG.debug("note of the offsets that were read: not removed: %s", error)

    def _load(self) -> Noted:
        try:
            # Another user's file would name other offsets.
            if self._file.lstat().st_uid == os.getuid():
                return parse(Noted, self._file.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            LOG.debug("note of the offsets that were read: not read: %s", error)
        return Noted()


class DeadShare:
    """The dead letters of the newest hour, as far as this process published its records."""

    def __init__(self, lake: Lake, stream: Stream) -> None:
        self._lake, self._stream = lake, stream
        self._hour, self._share, self._warned = "", HourShare(0, 0), 0

    def published(self, hour: str, rows: int, letters: Sequence[DataFile]) -> None:
        """Count a micro-batch; warn of too many dead letters, again at each doubling."""
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
        """Return the most frequent reason. An error must not end the job: it has published."""
        try:
            io = self._lake.load(self._stream.dead_letters_table).io
            return str(frequent_reason(io, letters))
        except AnabranchError as error:
            return f"unknown: {error}"
