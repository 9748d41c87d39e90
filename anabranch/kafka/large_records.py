"""Records that are too large to be read: one of a few hundred kilobytes in the log may have a value
of hundreds of megabytes.

Java's consumer decompresses it as a whole, and one such record ends the process, at every start. So
where a reader died, the driver reads the record batches first. It decompresses them piece by piece,
and never has a large record in memory. Spark then reads the offsets around the batches with large
records, and the driver the other records of these batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pyarrow as pa
from kafka.codec import snappy_decode
from kafka.record.default_records import DefaultRecordBatch as Batch

from anabranch.common.errors import Transient
from anabranch.kafka.batches import Fetched, classified_batches
from anabranch.kafka.kafka_python import header_name

TOO_LARGE = "too_large"
"""The error code of the dead letter of such a record."""

AHEAD = 1000
"""Spark's consumers decompress records after the offsets that they read, at most this many."""

POLLED = 10
"""`max.poll.records` of Spark's consumers near a large record: they decompress up to this number of
records ahead, so the driver reads as many before a large one."""

_FETCH = 4 << 20
_PIECE = 1 << 20
_STREAMED = {Batch.CODEC_GZIP: "gzip", Batch.CODEC_LZ4: "lz4", Batch.CODEC_ZSTD: "zstd"}
# The largest ratio of each format; Zstandard has none.
_MOST = {Batch.CODEC_NONE: 1, Batch.CODEC_GZIP: 1032, Batch.CODEC_SNAPPY: 32, Batch.CODEC_LZ4: 256}


@dataclass(frozen=True)
class LogRecord:
    """A record of the log, with the names of kafka-python's. `size`: its bytes without compression,
    if it is too large; it then has no value and no headers, and no key."""

    partition: int
    offset: int
    timestamp: int
    timestamp_type: int
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    size: int | None = None


@dataclass(frozen=True)
class Stretch:
    """A range of a partition that only the driver may read, and its records."""

    partition: int
    start: int
    end: int
    records: tuple[LogRecord, ...]


def find_large(
    fetch: Callable[[int, int], Fetched], partition: int, start: int, end: int, limit: int
) -> list[Stretch]:
    """Return the stretches of `[start, end)` with a record of more than `limit` bytes, or with the
    records before one, in order. Reads the whole range. Raises Transient if the log ends before."""
    found: list[tuple[int, int]] = []
    # The batches before, as (base offset, number of records).
    before = deque[tuple[int, int]]()
    for batch in chain(_visible(fetch, start, end), _ahead(fetch, end)):
        if _has_larger(batch, limit):
            low = max(start, before[0][0] if before else batch.base_offset)
            if found and found[-1][1] >= low:
                low, _ = found.pop()
            if low < end:
                found.append((low, min(end, batch.next_offset)))
            before.clear()
            continue
        before.append((batch.base_offset, batch.records_count))
        while sum(count for _, count in before) - before[0][1] >= POLLED:
            before.popleft()
    return [
        Stretch(partition, low, high, tuple(_records(fetch, partition, low, high, limit)))
        for low, high in found
    ]


def _records(
    fetch: Callable[[int, int], Fetched], partition: int, start: int, end: int, limit: int
) -> Iterator[LogRecord]:
    for batch in _visible(fetch, start, end):
        yield from (r for r in _parsed(batch, partition, limit) if start <= r.offset < end)


def _ahead(fetch: Callable[[int, int], Fetched], end: int) -> Iterator[Any]:
    """Yield the batches from `end` on whose records a consumer of the range before may get."""
    at, records = end, 0
    while records < POLLED:
        batches = list(classified_batches(fetch(at, _FETCH), at))
        if not batches:
            return
        for batch, kind in batches:
            if kind is None and batch.base_offset >= end:
                yield batch
                records += batch.records_count
        at = batches[-1][0].next_offset


def _visible(fetch: Callable[[int, int], Fetched], start: int, end: int) -> Iterator[Any]:
    """Yield the batches of a range whose records a consumer receives."""
    at = start
    while at < end:
        fetched, reached = fetch(at, _FETCH), at
        for batch, kind in classified_batches(fetched, at):
            if batch.base_offset >= end:
                return
            if kind is None:
                yield batch
            reached = max(reached, batch.next_offset)
        reached = max(reached, min(end, fetched.log_start))
        if reached == at:
            if fetched.stable_end <= at:
                raise Transient(
                    f"read record batches from offset {at} on: expected them up to {end}, found "
                    f"the last stable offset at {fetched.stable_end}; try again"
                )
            # Compaction removed all batches up to there.
            reached = min(end, fetched.stable_end)
        at = reached


def _has_larger(batch: Any, limit: int) -> bool:
    ratio = _MOST.get(batch.compression_type)
    if ratio is not None and batch.size_in_bytes * ratio <= limit:
        return False
    whole = 0
    for piece in _pieces(batch):
        whole += len(piece)
        if whole > limit:
            break
    else:
        return False
    read = _Bytes(_pieces(batch))
    for _ in range(batch.records_count):
        if (length := read.varint()) > limit:
            return True
        read.skip(length)
    return False


def _parsed(batch: Any, partition: int, limit: int) -> Iterator[LogRecord]:
    """Yield the records of a batch (format 2), the large ones without their bytes."""
    read = _Bytes(_pieces(batch))
    kind = batch.timestamp_type
    for _ in range(batch.records_count):
        length = read.varint()
        rest = read.at + length
        read.skip(1)  # attributes
        at = batch.first_timestamp + read.varint()
        offset = batch.base_offset + read.varint()
        at = batch.max_timestamp if kind == Batch.LOG_APPEND_TIME else at
        if length > limit:
            read.skip(rest - read.at)
            yield LogRecord(partition, offset, at, kind, size=length)
            continue
        key, value = read.sized(), read.sized()
        headers = tuple(
            (header_name(read.sized() or b""), read.sized()) for _ in range(read.varint())
        )
        yield LogRecord(partition, offset, at, kind, key, value, headers)


class _Bytes:
    """Reads bytes from an iterator of pieces. `at`: the number of bytes read or skipped."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._piece, self._place, self.at = pieces, b"", 0, 0

    def read(self, size: int) -> bytes:
        parts = []
        while size:
            part = self._some(size)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def skip(self, size: int) -> None:
        while size:
            size -= len(self._some(size))

    def varint(self) -> int:
        """Read a signed number in Kafka's zigzag encoding."""
        shift = number = 0
        while True:
            [byte] = self.read(1)
            number |= (byte & 0x7F) << shift
            if not byte & 0x80:
                return (number >> 1) ^ -(number & 1)
            shift += 7

    def sized(self) -> bytes | None:
        """Read bytes after their length; None for a negative one."""
        length = self.varint()
        return self.read(length) if length >= 0 else None

    def _some(self, size: int) -> bytes:
        while self._place == len(self._piece):
            self._piece, self._place = next(self._pieces), 0
        part = self._piece[self._place : self._place + size]
        self._place += len(part)
        self.at += len(part)
        return part


def _pieces(batch: Any) -> Iterator[bytes]:
    """Yield the bytes of a batch's records, decompressed."""
    data, codec = bytes(batch._buffer[batch._pos : batch.size_in_bytes]), batch.compression_type
    if codec in _STREAMED:
        stream = pa.CompressedInputStream(pa.BufferReader(data), _STREAMED[codec])
        while piece := stream.read(_PIECE):
            yield piece
    else:
        # Snappy expands a batch at most some twenty times.
        yield snappy_decode(data) if codec == Batch.CODEC_SNAPPY else data
