"""Recount an hour: which offsets of its cut are in the data files, and which are records of Kafka's
log, by its record batches.

Uses one byte for each offset and source: an hour of 40 million offsets takes 160 MB.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.common.remote_errors import explain, lake_errors, one_line
from anabranch.kafka.batches import CODES, COMPACTED, PRESENT, RETENTION, spans
from anabranch.offsets.position import Ranges

_COLUMNS = ["kafka_partition", "kafka_offset", "ingest_hour"]
_MAX_COUNT = 255

GONE = (COMPACTED, RETENTION)
"""Classes of missing records that were once in Kafka's log."""
Codes = NDArray[np.uint8]
"""The class of each offset of a range in Kafka's log (`anabranch.kafka.batches.CODES`)."""


class OffsetCounts:
    """How often each offset of a cut was found, by partition (at most 255). `outside`: rows outside
    the cut; `twice`: rows that repeat an offset."""

    def __init__(self, ranges: Ranges) -> None:
        self.starts = {p: s for p, (s, _) in ranges.items()}
        self.counts = {p: np.zeros(max(0, e - s), np.uint8) for p, (s, e) in ranges.items()}
        self.outside, self.twice = Counter[int](), Counter[int]()

    def add(self, partitions: NDArray[Any], offsets: NDArray[Any]) -> None:
        """Count rows by partition and offset."""
        order = np.lexsort((offsets, partitions))
        partitions, offsets = partitions[order], offsets[order]
        names, firsts = np.unique(partitions, return_index=True)
        for name, part in zip(names, np.split(offsets, firsts[1:]), strict=True):
            self._add(int(name), part)

    def _add(self, partition: int, offsets: NDArray[Any]) -> None:
        marks = self.counts.get(partition)
        places = offsets - self.starts.get(partition, 0)
        within = places[(places >= 0) & (places < (0 if marks is None else len(marks)))]
        if len(within) < len(offsets):
            self.outside[partition] += len(offsets) - len(within)
        if marks is None or not len(within):
            return
        distinct, times = np.unique(within, return_counts=True)
        # Each repeated offset, in this file or an earlier one, counts as one row too many.
        if more := int(times.sum()) - int((marks[distinct] == 0).sum()):
            self.twice[partition] += more
        marks[distinct] = np.minimum(marks[distinct].astype(np.int64) + times, _MAX_COUNT)

    def distinct(self, partition: int) -> int:
        marks = self.counts.get(partition)
        return 0 if marks is None else int(np.count_nonzero(marks))


@dataclass
class FileCounts:
    """The content of an hour's data files: offsets, rows of another hour, and what was found
    in place of a missing or damaged file."""

    marks: OffsetCounts
    misplaced: Counter[int] = field(default_factory=Counter)
    gone: dict[str, str] = field(default_factory=dict)


def count_files(
    table: Table, hour: str, ranges: Ranges, by_source: Mapping[str, Iterable[DataFile]]
) -> dict[str, FileCounts]:
    """Count each source's files; read a shared one once. Raises Transient."""
    counted = {source: FileCounts(OffsetCounts(ranges)) for source in by_source}
    sources: dict[str, list[str]] = {}
    for source, files in by_source.items():
        for data_file in files:
            sources.setdefault(data_file.file_path, []).append(source)
    for path, of in sorted(sources.items()):
        try:
            for batch in _batches(table, path):
                for source in of:
                    _count(counted[source], batch, hour)
        except (OSError, pa.ArrowInvalid) as error:
            is_gone = isinstance(error, FileNotFoundError)
            if (found := "none" if is_gone else _damage(table, path)) is None:
                raise explain(f"read {path}", error) from error
            for source in of:
                counted[source].gone[path] = found
    return counted


def _damage(table: Table, path: str) -> str | None:
    """Return why a file whose bytes can be read has no rows; None if it has them: for damaged pages
    and for the network, PyArrow raises the same OSError. Raises Transient."""
    with lake_errors(f"read {path}"), table.io.new_input(path).open() as file:
        whole = file.read()
    try:
        pq.read_table(pa.BufferReader(whole), columns=_COLUMNS, partitioning=None)
    except (OSError, pa.ArrowInvalid) as error:
        return one_line(error)
    return None


def _batches(table: Table, path: str) -> Iterator[pa.RecordBatch]:
    """Read partition, offset and hour from the file itself, not from its partition values."""
    io: Any = table.io
    scheme, netloc, name = io.parse_location(path, io.properties)
    fragment = ds.ParquetFileFormat().make_fragment(name, io.fs_by_scheme(scheme, netloc))
    yield from fragment.to_batches(columns=_COLUMNS, batch_size=1_000_000)


def _count(counted: FileCounts, batch: pa.RecordBatch, hour: str) -> None:
    partitions, offsets = batch["kafka_partition"].to_numpy(), batch["kafka_offset"].to_numpy()
    counted.marks.add(partitions, offsets)
    other = pc.not_equal(batch["ingest_hour"], hour)
    for pair in pc.value_counts(batch["kafka_partition"].filter(other)).to_pylist():
        counted.misplaced[pair["values"]] += pair["counts"]


@dataclass(frozen=True)
class KafkaRecount:
    """The offsets of one partition of an hour that Kafka returns to a `read_committed` consumer, in
    the part of the cut that its log still has (`in_kafka`).

    `kept_nowhere`: returned offsets that are not stored. `not_given`: stored offsets that Kafka
    does not return. `classes` and `silent_classes`: how many of these, and of the offsets neither
    returned nor stored, Kafka's log explains, by class.
    """

    in_kafka: tuple[int, int]
    offsets: int
    kept_nowhere: int
    kept_nowhere_at: tuple[tuple[int, int], ...]
    not_given: int
    not_given_at: tuple[tuple[int, int], ...]
    classes: Mapping[str, int]
    silent_classes: Mapping[str, int]

    @property
    def is_compacted(self) -> bool:
        """Whether Kafka deleted records: it then returns fewer over time."""
        return any(
            counts.get(name) for counts in (self.classes, self.silent_classes) for name in GONE
        )

    @property
    def not_explained(self) -> int:
        """How many stored offsets Kafka lacks although its log does not show their deletion."""
        return self.not_given - sum(self.classes.get(name, 0) for name in GONE)


@dataclass(frozen=True)
class Recount:
    """The counts of one partition of an hour: distinct offsets of the cut by source, and
    irregularities.

    `rows` and `dead` are from `main`, `batch` from the batch branch. `both`: offsets that are both
    a row and a dead letter.
    """

    cut: tuple[int, int]
    rows: int
    batch: int
    dead: int
    twice: Mapping[str, int]
    outside: Mapping[str, int]
    misplaced: Mapping[str, int]
    both: int
    kafka: KafkaRecount | None


def recount(
    ranges: Ranges,
    counted: Mapping[str, FileCounts],
    in_kafka: Ranges,
    codes: Mapping[int, Codes],
) -> dict[int, Recount]:
    """Return the counts of `rows`, `batch` and `dead` by partition, compared with the classes of
    the offsets of `in_kafka`. Pure."""

    def is_in(source: str, p: int) -> NDArray[Any]:
        return counted[source].marks.counts.get(p, np.zeros(0, np.uint8)) > 0

    def of_source(counts: str, p: int) -> dict[str, int]:
        found = {source: (vars(c) | vars(c.marks))[counts] for source, c in counted.items()}
        return {source: of[p] for source, of in found.items() if p in of}

    named = {p for c in counted.values() for p in (*c.marks.outside, *c.misplaced)}
    recounts = {}
    for p in sorted({*ranges, *named}):
        cut, kafka = ranges.get(p, (0, 0)), None
        if p in in_kafka:
            part = slice(*(offset - cut[0] for offset in in_kafka[p]))
            stored = (is_in("rows", p) | is_in("dead", p))[part]
            kafka = _compare_with_kafka(stored, codes[p], in_kafka[p])
        recounts[p] = Recount(
            cut=cut,
            rows=counted["rows"].marks.distinct(p),
            batch=counted["batch"].marks.distinct(p),
            dead=counted["dead"].marks.distinct(p),
            twice=of_source("twice", p),
            outside=of_source("outside", p),
            misplaced=of_source("misplaced", p),
            both=int(np.count_nonzero(is_in("rows", p) & is_in("dead", p))),
            kafka=kafka,
        )
    return recounts


def _compare_with_kafka(
    stored: NDArray[Any], codes: Codes, in_kafka: tuple[int, int]
) -> KafkaRecount:
    """Compare stored offsets with their classes in Kafka's log, both from `in_kafka`'s start."""
    returned, start = codes == CODES[PRESENT], in_kafka[0]
    nowhere, missing = returned & ~stored, stored & ~returned

    def classes(offsets: NDArray[Any]) -> dict[str, int]:
        numbers = np.bincount(codes[offsets], minlength=len(CODES) + 1)
        return {name: int(numbers[code]) for name, code in CODES.items() if numbers[code]}

    return KafkaRecount(
        in_kafka=in_kafka,
        offsets=int(np.count_nonzero(returned)),
        kept_nowhere=int(np.count_nonzero(nowhere)),
        kept_nowhere_at=spans(nowhere, start),
        not_given=int(np.count_nonzero(missing)),
        not_given_at=spans(missing, start),
        classes=classes(missing),
        silent_classes=classes(~stored & ~returned),
    )
