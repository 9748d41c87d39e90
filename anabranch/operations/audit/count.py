"""Recounting an hour: which offsets of its cut the data files hold, and which Kafka gives, found by reading them.

A byte for each offset of the cut and source, whole columns at a time: an hour of 40 million offsets takes 160 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.dataset as ds

from anabranch.common.remote_errors import explain
from anabranch.kafka.batches import COMPACTED, RETENTION, Missing, Seen
from anabranch.offsets.position import Ranges

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import NDArray
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

_COLUMNS = ["kafka_partition", "kafka_offset", "ingest_hour"]
_MOST = 255

GONE = (COMPACTED, RETENTION)
"""The classes of records that Kafka held once."""
Explain = Callable[[Mapping[int, Missing]], Mapping[int, Seen]]


class OffsetCounts:
    """How often each offset of a cut was found, by partition, and how many rows lay outside of it."""

    def __init__(self, ranges: Ranges) -> None:
        self.starts = {p: s for p, (s, _) in ranges.items()}
        self.counts = {p: np.zeros(max(0, e - s), np.uint8) for p, (s, e) in ranges.items()}
        self.outside: dict[int, int] = {}
        self.twice: dict[int, int] = {}

    def add(self, partitions: NDArray[Any], offsets: NDArray[Any]) -> None:
        """Mark rows by their place."""
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
            self.outside[partition] = self.outside.get(partition, 0) + len(offsets) - len(within)
        if marks is None or not len(within):
            return
        distinct, times = np.unique(within, return_counts=True)
        # Whatever is found again, here or since an earlier file, is once too often each time.
        more = int(times.sum()) - int((marks[distinct] == 0).sum())
        if more:
            self.twice[partition] = self.twice.get(partition, 0) + more
        marks[distinct] = np.minimum(marks[distinct].astype(np.int64) + times, _MOST)

    def distinct(self, partition: int) -> int:
        marks = self.counts.get(partition)
        return 0 if marks is None else int(np.count_nonzero(marks))


@dataclass
class Counted:
    """What data files hold of an hour: marks, rows that say another hour, files that storage does not have."""

    marks: OffsetCounts
    misplaced: dict[int, int] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)


def count_files(
    table: Table, hour: str, ranges: Ranges, by_source: Mapping[str, Iterable[DataFile]]
) -> dict[str, Counted]:
    """Count the files of each source; one that several share is read once. Raises Transient when storage is away."""
    counted = {source: Counted(OffsetCounts(ranges)) for source in by_source}
    sources: dict[str, list[str]] = {}
    for source, files in by_source.items():
        for data_file in files:
            sources.setdefault(data_file.file_path, []).append(source)
    for path, of in sorted(sources.items()):
        try:
            for batch in _batches(table, path):
                for source in of:
                    _count(counted[source], batch, hour)
        except FileNotFoundError:
            for source in of:
                counted[source].gone.append(path)
        except OSError as error:
            raise explain(f"read {path}", error) from error
    return counted


def _batches(table: Table, path: str) -> Iterator[pa.RecordBatch]:
    """A file's places as the file itself has them, not as its partition in the metadata says."""
    io: Any = table.io
    scheme, netloc, name = io.parse_location(path, io.properties)
    fragment = ds.ParquetFileFormat().make_fragment(name, io.fs_by_scheme(scheme, netloc))
    yield from fragment.to_batches(columns=_COLUMNS, batch_size=1_000_000)


def _count(counted: Counted, batch: pa.RecordBatch, hour: str) -> None:
    partitions, offsets = batch["kafka_partition"].to_numpy(), batch["kafka_offset"].to_numpy()
    counted.marks.add(partitions, offsets)
    other = pc.not_equal(batch["ingest_hour"], hour)
    if pc.any(other).as_py():
        for pair in pc.value_counts(batch["kafka_partition"].filter(other)).to_pylist():
            partition = int(pair["values"])
            counted.misplaced[partition] = counted.misplaced.get(partition, 0) + int(pair["counts"])


def mark_given(ranges: Ranges, given: Iterable[tuple[int, list[int]]]) -> OffsetCounts:
    """Mark what Kafka gives."""
    marks = OffsetCounts(ranges)
    for partition, offsets in given:
        if offsets:
            marks.add(np.full(len(offsets), partition, np.int32), np.asarray(offsets, np.int64))
    return marks


@dataclass(frozen=True)
class Given:
    """What Kafka gives of one partition of an hour, in the part of the cut that it still holds.

    `not_given` are offsets that are kept and that it does not give, `silent` those that it does not give and that are
    not kept; `classes` and `silent_classes` are how many of them its log explains, by class, once it was looked at.
    """

    in_kafka: tuple[int, int]
    offsets: int
    kept_nowhere: int
    kept_nowhere_at: tuple[tuple[int, int], ...]
    not_given: int
    not_given_at: tuple[tuple[int, int], ...]
    missing: Missing = field(compare=False, repr=False)
    silent: Missing = field(compare=False, repr=False)
    classes: Mapping[str, int] = field(default_factory=dict)
    silent_classes: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_compacted(self) -> bool:
        """Whether its log has lost any of it: then it gives less from day to day."""
        return any(counts.get(name) for counts in (self.classes, self.silent_classes) for name in GONE)

    @property
    def not_explained(self) -> int:
        """How many offsets are kept, and its log shows something else than that their records are gone."""
        return self.not_given - sum(self.classes.get(name, 0) for name in GONE)


@dataclass(frozen=True)
class Recount:
    """One partition of an hour, counted: distinct offsets of the cut by source, and what should not be.

    `rows` and `dead` are of `main`, `batch` of the batch branch. `both`: offsets that are a row and a dead letter.
    """

    cut: tuple[int, int]
    rows: int
    batch: int
    dead: int
    twice: Mapping[str, int]
    outside: Mapping[str, int]
    misplaced: Mapping[str, int]
    both: int
    kafka: Given | None


def recount(
    ranges: Ranges, counted: Mapping[str, Counted], given: OffsetCounts | None, in_kafka: Ranges
) -> dict[int, Recount]:
    """By partition, what was counted of `rows`, `batch` and `dead`, compared with what Kafka gave of `in_kafka`."""
    named = {p for c in counted.values() for p in (*c.marks.outside, *c.misplaced)}
    recounts = {}
    for p in sorted({*ranges, *named}):
        rows, dead = (counted[source].marks.counts.get(p, np.zeros(0, np.uint8)) > 0 for source in ("rows", "dead"))
        recounts[p] = Recount(
            cut=ranges.get(p, (0, 0)),
            rows=counted["rows"].marks.distinct(p),
            batch=counted["batch"].marks.distinct(p),
            dead=counted["dead"].marks.distinct(p),
            twice={source: c.marks.twice[p] for source, c in counted.items() if p in c.marks.twice},
            outside={source: c.marks.outside[p] for source, c in counted.items() if p in c.marks.outside},
            misplaced={source: c.misplaced[p] for source, c in counted.items() if p in c.misplaced},
            both=int(np.count_nonzero(rows & dead)),
            kafka=_given(p, ranges[p], rows | dead, given, in_kafka[p])
            if given is not None and p in in_kafka
            else None,
        )
    return recounts


def _given(
    partition: int, cut: tuple[int, int], kept: NDArray[Any], given: OffsetCounts, in_kafka: tuple[int, int]
) -> Given:
    """`given` is marked over its own ranges, of which `in_kafka` is a part."""
    low, high = in_kafka
    there = given.counts[partition][low - given.starts[partition] : high - given.starts[partition]] > 0
    kept = kept[low - cut[0] : high - cut[0]]
    return Given(
        in_kafka=in_kafka,
        offsets=int(np.count_nonzero(there)),
        kept_nowhere=int(np.count_nonzero(there & ~kept)),
        kept_nowhere_at=spans(there & ~kept, low),
        not_given=int(np.count_nonzero(kept & ~there)),
        not_given_at=spans(kept & ~there, low),
        missing=Missing(low, kept & ~there),
        silent=Missing(low, ~kept & ~there),
    )


def explained(recounts: Mapping[int, Recount], explain: Explain) -> dict[int, Recount]:
    """The same with the classes of what Kafka does not give, which `explain` reads from its log."""
    given = {p: r.kafka for p, r in recounts.items() if r.kafka is not None}
    kept = explain({p: k.missing for p, k in given.items() if k.missing.count})
    silent = explain({p: k.silent for p, k in given.items() if k.silent.count})
    done = dict(recounts)
    for p, k in given.items():
        classes = kept[p].counts if p in kept else {}
        silent_classes = silent[p].counts if p in silent else {}
        done[p] = replace(recounts[p], kafka=replace(k, classes=classes, silent_classes=silent_classes))
    return done


def spans(mask: NDArray[Any], start: int, most: int = 3) -> tuple[tuple[int, int], ...]:
    """The first `most` half-open ranges of offsets that are set."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    pairs = edges.reshape(-1, 2)[:most] + start
    return tuple((int(low), int(high)) for low, high in pairs)
