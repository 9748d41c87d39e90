"""Why an offset is not given, read from the bytes of record batches as a broker sends them."""

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.legacy_records import LegacyRecordBatchBuilder
from kafka.record.util import calc_crc32c

from anabranch.common.errors import Terminal, Transient
from anabranch.kafka import batches
from anabranch.kafka.batches import Explanation, Fetched, Missing, explain_missing

PRODUCER, OTHER = 7, 8
ABORT, COMMIT = 0, 1
NONE, GZIP = 0, 1
_ATTRIBUTES, _LAST_DELTA, _BASE, _CRC = 21, 23, 0, 17


@dataclass(frozen=True)
class Written:
    """A batch in a partition's log."""

    first: int
    end: int
    data: bytes


def batch(
    first: int, offsets: Iterable[int], end: int | None = None, producer: int | None = None, codec: int = NONE,
    control: int | None = None, headers: list[tuple[str, bytes]] | None = None,
) -> Written:  # fmt: skip
    """A batch of format 2 that begins at `first`, holds records of these offsets, and ends before
    `end`: as the broker stores it, also after compaction took records out of it."""
    held = list(offsets)
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=codec, is_transactional=producer is not None,
        producer_id=producer if producer is not None else -1, producer_epoch=0, base_sequence=0,
        batch_size=1 << 20,
    )  # fmt: skip
    for offset in held:
        key = struct.pack(">hh", 0, control) if control is not None else b"k" * 20
        builder.append(offset - first, timestamp=1, key=key, value=b"v" * 50, headers=headers or [])
    data = bytearray(builder.build())
    end = end if end is not None else held[-1] + 1
    struct.pack_into(">q", data, _BASE, first)
    struct.pack_into(">i", data, _LAST_DELTA, end - first - 1)
    if control is not None:
        data[_ATTRIBUTES + 1] |= 0x20
    struct.pack_into(">I", data, _CRC, calc_crc32c(memoryview(data)[_ATTRIBUTES:]))
    return Written(first, end, bytes(data))


def marker(offset: int, producer: int, what: int) -> Written:
    return batch(offset, [offset], producer=producer, control=what)


@dataclass
class Log:
    """A partition's log as a broker answers: whole batches, the first always, the last cut off."""

    batches: list[Written]
    aborted: tuple[tuple[int, int, int], ...] = ()
    start: int = 0
    stable_end: int = 0
    fetches: list[tuple[int, int]] = field(default_factory=list)
    fetched: int = 0

    def fetch(self, offset: int, size: int) -> Fetched:
        self.fetches.append((offset, size))
        if offset < self.start:
            return Fetched(log_start=self.start)
        behind = [b for b in self.batches if b.end > offset]
        data = b"".join(b.data for b in behind)[: max(size, len(behind[0].data) if behind else 0)]
        self.fetched += len(data)
        aborted = tuple((producer, at) for producer, at, last in self.aborted if last >= offset)
        end = self.stable_end or (self.batches[-1].end if self.batches else 0)
        return Fetched(data, aborted, self.start, end)


def seen(log: Log, missing: Iterable[int], start: int = 0) -> Explanation:
    offsets = list(missing)
    mask = np.zeros(max(offsets) + 1 - start, np.bool_)
    mask[[o - start for o in offsets]] = True
    return explain_missing(log.fetch, Missing(start, mask))


def test_control_and_aborted_records_are_seen_by_flag_and_by_the_list_of_the_fetch() -> None:
    log = Log(
        [
            batch(0, [0, 1], producer=PRODUCER), marker(2, PRODUCER, COMMIT),
            batch(3, [3, 4], producer=PRODUCER), batch(5, [5], producer=OTHER), marker(6, PRODUCER, ABORT),
            batch(7, [7], producer=PRODUCER), marker(8, PRODUCER, COMMIT), marker(9, OTHER, COMMIT),
        ],
        aborted=((PRODUCER, 3, 6),),
    )  # fmt: skip
    assert seen(log, [2, 3, 4, 6, 8, 9]) == Explanation({"control": 4, "aborted": 2})
    # What comes before and behind the aborted transaction of the same producer is to be read.
    assert seen(log, [0, 3, 7]) == Explanation({"aborted": 1, "present": 2}, ((0, 1), (7, 8)))
    written = [batch(0, [0, 1, 2, 3], producer=PRODUCER), marker(4, PRODUCER, ABORT)]
    log = Log(written, aborted=((PRODUCER, 0, 4),))
    assert seen(log, [2, 3], start=2) == Explanation({"aborted": 2})


@pytest.mark.parametrize("codec", [NONE, GZIP])
def test_a_record_missing_in_its_batch_was_compacted_away(codec: int) -> None:
    # The first and the last record of a batch are taken like any other; the batch keeps its range.
    log = Log([batch(0, [1, 3], end=6, codec=codec), batch(6, [], end=9), batch(9, [9])])
    assert seen(log, [0, 2, 4, 5, 6, 7, 8]) == Explanation({"compacted": 7})
    # What the batch does hold is not explained by the others.
    assert seen(log, [0, 1]) == Explanation({"compacted": 1, "present": 1}, ((1, 2),))


def test_what_compaction_took_is_explained_also_at_the_logs_end() -> None:
    log = Log([batch(5, [5]), batch(10, [10])], stable_end=14)
    assert seen(log, [0, 4, 6, 9, 11, 13]) == Explanation({"compacted": 6})
    written = batch(0, [0, 2], end=4, headers=[("name", b"v")])
    log = Log([Written(0, 4, written.data.replace(b"name", b"\xff\xfe\xff\xfe"))])
    assert seen(log, [1, 3]) == Explanation({"compacted": 2})


def test_offsets_before_the_logs_start_are_retention_and_an_early_end_transient() -> None:
    log = Log([batch(0, range(10)), marker(10, PRODUCER, COMMIT)], start=4)
    assert seen(log, [2, 3, 10]) == Explanation({"retention": 2, "control": 1})
    # The batch still has their records, which no consumer receives.
    log = Log([batch(0, [0, 2, *range(4, 9)], end=10)], start=5)
    counts = {"retention": 5, "present": 4, "compacted": 1}
    assert seen(log, range(10)) == Explanation(counts, ((5, 9),))
    with pytest.raises(Transient, match="from offset 3 on: expected that offset to be decided"):
        seen(Log([batch(0, [0])], stable_end=3), [3])


@pytest.mark.parametrize("magic", [0, 1])
def test_an_older_message_format_is_refused(magic: int) -> None:
    builder = LegacyRecordBatchBuilder(magic=magic, compression_type=NONE, batch_size=1 << 20)
    builder.append(4, timestamp=1, key=b"k", value=b"v")
    log = Log([batch(0, [0, 2]), Written(4, 5, bytes(builder.build()))])
    with pytest.raises(Terminal, match=f"from offset 3 on: expected message format 2, .*{magic}"):
        seen(log, [1, 3])


def test_fetches_are_few_around_rare_and_dense_markers() -> None:
    log = Log([])
    for first in range(0, 8010, 801):
        starts = range(first, first + 800, 20)
        log.batches += [batch(start, range(start, start + 20)) for start in starts]
        log.batches.append(marker(first + 800, PRODUCER, COMMIT))
    assert seen(log, range(800, 8010, 801)) == Explanation({"control": 10})
    assert len(log.fetches) == 10
    assert log.fetched < sum(len(b.data) for b in log.batches) / 3
    log = Log([])
    for at in range(0, 40_000, 2):
        log.batches += [batch(at, [at], producer=PRODUCER), marker(at + 1, PRODUCER, COMMIT)]
    total = sum(len(b.data) for b in log.batches)
    assert seen(log, range(1, 40_000, 2)) == Explanation({"control": 20_000})
    assert len(log.fetches) < 20
    assert max(size for _, size in log.fetches) <= batches._LARGE
    assert total > 4_000_000
