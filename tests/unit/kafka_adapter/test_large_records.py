"""Large records, found in the bytes of record batches as a broker sends them."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecordBatchBuilder
from kafka.record.util import calc_crc32c

from anabranch.kafka import batches, client
from anabranch.kafka.large_records import POLLED, Stretch, find_large

LIMIT = 100_000
CODECS = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
Value = bytes | None


class Log:
    """A partition's batches: each a base offset and the values of consecutive records."""

    def __init__(self, codec: int = 1) -> None:
        self.codec, self.end = codec, 0
        self.batches: list[tuple[int, int, bytes]] = []

    def add(self, *values: Value, aborted: bool = False, name: str = "h") -> Log:
        producer = 7 if aborted else -1
        builder = DefaultRecordBatchBuilder(2, self.codec, aborted, producer, 0, 0, 1 << 40)
        for delta, value in enumerate(values):
            builder.append(delta, 1_000 + delta, b"k%d" % delta, value, [(name, b"x"), ("n", None)])
        data = bytearray(builder.build())
        struct.pack_into(">q", data, 0, self.end)
        struct.pack_into(">I", data, 17, calc_crc32c(memoryview(data)[21:]))
        self.batches.append((self.end, self.end + len(values), bytes(data)))
        self.end += len(values)
        return self

    def fetch(self, offset: int, size: int) -> batches.Fetched:
        """A few batches at a time."""
        data = [data for _, end, data in self.batches if end > offset][:3]
        first = min((s for s, e, _ in self.batches if e > offset), default=0)
        return batches.Fetched(b"".join(data), ((7, first),), 0, self.end)


def find(log: Log, start: int = 0, end: int | None = None) -> list[Stretch]:
    return find_large(log.fetch, 3, start, log.end if end is None else end, LIMIT)


@pytest.mark.parametrize("codec", CODECS.values(), ids=[*CODECS])
def test_a_large_record_beside_others_is_found(codec: int) -> None:
    log = Log(codec)
    for _ in range(2 * POLLED):
        log.add(b"a")
    log.add(b"before", b"0" * (LIMIT + 1), b"after", None).add(b"b")
    base = 2 * POLLED
    [stretch] = find(log)
    assert (stretch.partition, stretch.start, stretch.end) == (3, base - POLLED, base + 4)
    records = {r.offset: r for r in stretch.records}
    assert [*records] == list(range(base - POLLED, base + 4))
    large = records[base + 1]
    assert large.size is not None and large.size > LIMIT and large.value is None
    assert {o for o, r in records.items() if r.size is not None} == {base + 1}
    assert (records[base].key, records[base].value) == (b"k0", b"before")
    assert records[base + 2].headers == (("h", b"x"), ("n", None))
    assert (records[base + 2].value, records[base + 3].value) == (b"after", None)
    assert records[base + 2].timestamp == 1_002


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        ("né\U0010ffff".encode(), "né\U0010ffff"),
        (b"\xffa", "\ufffda"),
        (b"\xe2\x82\xed\x9f\xbf", "\ufffd\ud7ff"),
        (b"\xed\xa0\x80\xed\xb0\x80a", "\ufffd\ufffda"),
        (b"\xed\xa0a", "\ufffda"),
        (b"a\xed\xa0", "a\ufffd"),
        (b"\xf4\x90\x80\x80", "\ufffd" * 4),
    ],
)
def test_a_headers_name_is_the_text_that_javas_client_reads(sent: bytes, name: str) -> None:
    assert client  # It corrects kafka-python.
    log = Log(codec=0).add(b"0" * (LIMIT + 1), b"small", name="n" * len(sent))
    [(start, end, data)] = log.batches
    data = data.replace(b"n" * len(sent), sent)
    log.batches = [(start, end, data)]
    [stretch] = find(log)
    of_client = [one.headers for one in MemoryRecords(data).next_batch()]
    assert [*map(dict, of_client)] == [{name: b"x", "n": None}] * 2
    assert stretch.records[1].headers == ((name, b"x"), ("n", None))


def test_small_records_of_a_large_batch_and_aborted_ones_are_none() -> None:
    assert find(Log().add(*[b"0" * (LIMIT // 2)] * 100)) == []
    assert find(Log().add(b"0" * (LIMIT + 1), aborted=True).add(b"a")) == []


def test_stretches_near_each_other_are_one_within_the_range() -> None:
    large = b"0" * (LIMIT + 1)
    log = Log().add(large).add(b"a").add(large)
    for _ in range(2 * POLLED):
        log.add(b"b")
    log.add(large)
    first, second = find(log)
    assert (first.start, first.end) == (0, 3)
    assert (second.start, second.end) == (log.end - 1 - POLLED, log.end)
    assert [r.size is not None for r in first.records] == [True, False, True]
    [stretch] = find(Log().add(b"a", b"0" * (LIMIT + 1), b"c"), 2, 3)
    assert (stretch.start, stretch.end) == (2, 3)
    assert [r.offset for r in stretch.records] == [2]


@pytest.mark.parametrize("codec", [CODECS["gzip"], CODECS["lz4"], CODECS["zstd"]])
def test_memory_does_not_grow_with_the_record(codec: int) -> None:
    log = Log(codec).add(b"0" * 200_000_000, b"after")
    tracemalloc.start()
    [stretch] = find(log)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [r.value for r in stretch.records] == [None, b"after"]
    assert most < 40_000_000
