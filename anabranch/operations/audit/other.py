"""The audit of a table that another program writes: which records of a topic it lacks, and which it
has twice, by hour. Reads the table and Kafka, writes nothing, and needs no stream and no Spark.

The hours are cut as a stream's are (`anabranch.protocol.sealing`). Kafka's record batches show of
each offset whether it is a record that a `read_committed` consumer receives. Offsets are compared
in slices, so memory does not grow with the table, the topic, or an hour.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from anabranch.common.errors import ConfigurationError, Refused
from anabranch.common.logs import Progress
from anabranch.config import Environment
from anabranch.iceberg.other_tables import OtherTable, ParquetPart, Part, open_other
from anabranch.kafka.batches import ABORTED, CODES, CONTROL, PRESENT, RETENTION, spans
from anabranch.kafka.client import KafkaAdapter
from anabranch.offsets import hour_ends
from anabranch.offsets.hours import hour_of, hours_between, plan_boundary, shift
from anabranch.offsets.position import Offsets, Ranges, Topic, clip
from anabranch.operations.reports.dead_letters import shown
from anabranch.protocol.sealing import answer_hours
from serving_layer.query.datasets import connected
from serving_layer.query.place_columns import PlaceColumns, find_columns, locate

LOG = logging.getLogger(__name__)

BEFORE = "before"
"""The name of the offsets before the first hour that has a time, in place of an hour."""

_SLICE = 4_000_000
_RANGES = 1_000
_LONGEST = 200
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class AuditRequest:
    """A table and its topic. Columns are found if None. `hours`: the first and last to audit,
    whole; None for the table's. `records`: how many missing ones to read."""

    table: str
    topic: str
    partition_column: str | None = None
    offset_column: str | None = None
    time_column: str | None = None
    hours: tuple[str, str] | None = None
    with_kafka: bool = True
    records: int = 10


@dataclass(frozen=True)
class PartitionCounts:
    """The offsets of one partition in an hour, `[start, end)`.

    `rows` of the table; `twice`: rows that repeat an offset; `missing`: records of Kafka without a
    row; `gaps`: other offsets without a row, by class of `anabranch.kafka.batches`; `uncommitted`:
    rows of aborted transactions. The first ranges of missing and repeated offsets are in `…_at`.
    """

    start: int
    end: int
    rows: int = 0
    twice: int = 0
    missing: int = 0
    gaps: Mapping[str, int] = field(default_factory=dict)
    uncommitted: int = 0
    missing_at: Spans = ()
    twice_at: Spans = ()

    def plus(self, other: PartitionCounts) -> PartitionCounts:
        """Return the counts of this slice and the one after it."""
        return PartitionCounts(
            self.start,
            other.end,
            self.rows + other.rows,
            self.twice + other.twice,
            self.missing + other.missing,
            Counter(self.gaps) + Counter(other.gaps),
            self.uncommitted + other.uncommitted,
            _joined(self.missing_at, other.missing_at),
            _joined(self.twice_at, other.twice_at),
        )


@dataclass(frozen=True)
class HourCounts:
    """An hour, or `BEFORE`, by partition."""

    hour: str
    partitions: Mapping[int, PartitionCounts]

    def total(self, name: str) -> int:
        return sum(getattr(counts, name) for counts in self.partitions.values())

    @property
    def offsets(self) -> int:
        return self.total("end") - self.total("start")

    @property
    def gaps(self) -> Counter[str]:
        return sum((Counter(c.gaps) for c in self.partitions.values()), Counter[str]())

    def as_dict(self) -> dict[str, Any]:
        names = ("rows", "twice", "missing", "uncommitted")
        counts = {name: self.total(name) for name in names}
        partitions = {str(p): vars(one) for p, one in self.partitions.items()}
        return {
            "hour": self.hour,
            "offsets": self.offsets,
            **counts,
            "gaps": dict(self.gaps),
            "partitions": partitions,
        }


@dataclass(frozen=True)
class MissingRecord:
    """A record of Kafka without a row, for display."""

    hour: str
    partition: int
    offset: int
    timestamp_ms: int
    key: str | None
    value: str | None


@dataclass(frozen=True)
class OtherAudit:
    """The result. `unproven`: why nothing is proven; then `hours` is empty, and `by_time` has the
    rows by the hour of their time.

    `unplaced`: rows without partition or offset; `elsewhere`: rows of other topics; `unknown`: rows
    at places that the topic's log never had. `before` and `behind`: offsets of Kafka before the
    table's first row and after its last one, by partition. `without_rows`: partitions with offsets
    in the table's hours, and no row at all. `cut_off`: partitions of which Kafka may have deleted
    records of the named hours. `kafka`: whether Kafka was read.
    """

    table: str
    topic: str
    columns: tuple[str, ...]
    rows: int
    unplaced: int = 0
    elsewhere: int = 0
    unknown: int = 0
    hours: tuple[HourCounts, ...] = ()
    before: Offsets = field(default_factory=dict)
    behind: Offsets = field(default_factory=dict)
    without_rows: tuple[int, ...] = ()
    cut_off: tuple[int, ...] = ()
    records: tuple[MissingRecord, ...] = ()
    unproven: str | None = None
    by_time: Mapping[str, int] = field(default_factory=dict)
    kafka: bool = True

    @property
    def is_exact(self) -> bool:
        """Whether nothing was found to be missing or doubled."""
        wrong = ("missing", "twice", "uncommitted")
        return not (self.unplaced or self.unknown) and not any(
            hour.total(name) for hour in self.hours for name in wrong
        )

    @property
    def is_proven(self) -> bool:
        """Whether the table has each record of the audited offsets once, and a row of each
        partition: of another one, nothing in the table's first and last hour is audited. Of named
        hours, only if the log shows that they are whole."""
        gone = any(hour.gaps[RETENTION] for hour in self.hours)
        is_whole = self.is_exact and not (gone or self.without_rows or self.cut_off)
        return self.kafka and bool(self.hours) and is_whole

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"exact": self.is_proven}


@dataclass(frozen=True)
class _Log:
    """The topic's log when the table had been read: first offsets and ends of all accepted records
    by partition, and the ends of its hours, oldest first; the running hour ends at the last stable
    offsets. Empty without Kafka."""

    topic: Topic | None = None
    starts: Offsets = field(default_factory=dict)
    ends: Offsets = field(default_factory=dict)
    hours: Mapping[str, Offsets] = field(default_factory=dict)


def audit_other(environment: Environment, request: AuditRequest) -> OtherAudit:
    """Audit a table. Raises ConfigurationError, TableMissing, Refused, Transient."""
    with KafkaAdapter(environment.kafka) as kafka:
        topic = kafka.describe(request.topic) if request.with_kafka else None
        if request.with_kafka and topic is None:
            raise ConfigurationError(
                f"topic {request.topic}: expected it in Kafka, found none; --no-kafka counts the "
                "rows of a topic that is gone"
            )
        table = open_other(environment, request.table)
        columns = _columns_of(table, request)
        with read_places(table, columns, request.topic) as places:
            audit = OtherAudit(
                table.what,
                request.topic,
                tuple(column.name for column in columns.all),
                places.rows,
                places.unplaced,
                places.elsewhere,
                kafka=request.with_kafka,
            )
            if columns.partition is None:
                return replace(audit, unplaced=0, **_unproven(places))
            if places.rows == places.elsewhere and request.hours is None:
                others = f", but {places.elsewhere} of other topics" if places.elsewhere else ""
                raise Refused(
                    f"audit {request.table}: expected rows of topic {request.topic}, found none"
                    f"{others}; check both names; with --hours A..B, all records of hours are "
                    "audited without any row"
                )
            # After the table was read: no row can be later than these ends.
            log = _read_log(kafka, topic, places.spans, request.hours) if topic else _Log()
            return _compare(kafka, audit, places, log, request)


def _columns_of(table: OtherTable, request: AuditRequest) -> PlaceColumns:
    """Return the columns with Kafka's places, of the first file that has them: older files of a
    folder may lack them. Raises ConfigurationError for a name that no file has."""
    names = (request.partition_column, request.offset_column, request.time_column)
    with suppress(ConfigurationError):
        if (first := find_columns(table.schema, *names)).partition is not None:
            return first
    for part in table.parts:
        if not isinstance(part, ParquetPart) or part.rows is not None:
            break
        with suppress(ConfigurationError):
            if (found := find_columns(part.schema_arrow, *names)).partition is not None:
                return found
    return find_columns(table.schema, *names)


def _unproven(places: Places) -> dict[str, Any]:
    return {
        "by_time": dict(sorted(places.times.rows.items())),
        "unproven": (
            "the table has no columns with Kafka's partition and offset (--partition-column, "
            "--offset-column), so nothing is proven: a lost record and a doubled one leave the "
            "same count, and no count shows which record it is"
        ),
    }


def _read_log(
    kafka: KafkaAdapter, topic: Topic, have: Ranges, hours: tuple[str, str] | None
) -> _Log:
    now = datetime.now(UTC)
    starts, stable = kafka.log_starts(topic), kafka.stable_ends(topic)
    lows = {p: max(start, have.get(p, (start, 0))[0]) for p, start in starts.items()}
    if hours is not None:
        # Named hours are whole: they may begin before the table's first row.
        lows = starts
    windows = kafka.stamps_from(topic, lows, stable, hour_ends.WINDOW)
    oldest = [hour_ends.plan_oldest(w, hour_ends.millis(now)) for w in windows.values()]
    stamps = [one.timestamp_ms for one in oldest if one is not None]
    running = hour_of(now)
    first = hour_of(datetime.fromtimestamp(min(stamps) / 1000, UTC)) if stamps else running
    if hours is not None:
        first = max(first, shift(hours[0], -1))
    last = running if hours is None else min(running, shift(hours[1], 1))
    wanted = hours_between(first, last)
    ends: dict[str, Offsets] = {}
    progress = Progress(LOG, f"cut the hours of {topic.name}", "hours", len(wanted))
    for hour in wanted:
        [answers] = answer_hours(kafka, topic, [hour], {}, lows, stable, now).values()
        lows = {
            p: plan_boundary(answers.get(p), stable.get(p, 0), low, now) for p, low in lows.items()
        }
        ends[hour] = lows
        progress.step()
    if last == running:
        ends[running] = stable
    return _Log(topic, starts, kafka.accepted_ends(topic, stable), ends)


def plan_cuts(
    begins: Offsets, times: TimeCounts, starts: Offsets, of_kafka: Mapping[str, Offsets]
) -> list[tuple[str, Ranges]]:
    """Return the hours with their offset ranges, oldest first, from `begins` on. Pure.

    They end at Kafka's offsets (`of_kafka`) where it still has their records, and below `starts`
    before the first row of a later hour, by the rows' own times. Offsets before both are `BEFORE`.
    """
    ends: dict[str, Offsets] = {}
    later = dict(starts)
    for hour in sorted({*times.first, *of_kafka} - {""}, reverse=True):
        kafka = of_kafka.get(hour, {})
        ends[hour] = {
            p: kafka[p] if kafka.get(p, 0) > starts.get(p, 0) else end for p, end in later.items()
        }
        for p, offset in times.first.get(hour, {}).items():
            later[p] = min(offset, later.get(p, offset))
    low, cuts = dict(begins), list[tuple[str, Ranges]]()
    for hour, until in [(BEFORE, later), *sorted(ends.items())]:
        ranges = {p: (low[p], until[p]) for p in sorted(until) if low.get(p, until[p]) < until[p]}
        low |= {p: end for p, (_, end) in ranges.items()}
        if ranges:
            cuts.append((hour, ranges))
    return cuts


@dataclass(frozen=True)
class AuditedRanges:
    """Each hour's offsets whose rows must exist, how many others surround them, and the partitions
    of these hours without any row."""

    hours: Sequence[tuple[str, Ranges]]
    before: Offsets = field(default_factory=dict)
    behind: Offsets = field(default_factory=dict)
    without_rows: tuple[int, ...] = ()


def plan_audited(
    cuts: Sequence[tuple[str, Ranges]], have: Ranges, hours: tuple[str, str] | None
) -> AuditedRanges:
    """Return the offsets of cut hours whose rows must exist. Pure.

    Those are whole hours if `hours` are named. Otherwise the first and the last hour with rows may
    be incomplete, since the table may begin within the first, and be behind in the last: there they
    are, in each partition, the offsets from the first to the last row (`have`).
    """
    if hours is not None:
        return AuditedRanges([cut for cut in cuts if hours[0] <= cut[0] <= hours[1]])
    with_rows = [i for i, (_, ranges) in enumerate(cuts) if clip(ranges, have)]
    if not with_rows:
        return AuditedRanges([])
    audited, before, behind = list[tuple[str, Ranges]](), Counter[int](), Counter[int]()
    for i, (hour, ranges) in enumerate(cuts):
        within: Ranges = {}
        for p, (start, end) in ranges.items():
            first, last = have.get(p, (end, start))
            if i < with_rows[0]:
                first = last = end
            elif i > with_rows[-1]:
                first = last = start
            elif with_rows[0] < i < with_rows[-1]:
                first, last = start, end
            elif i < with_rows[-1]:
                first, last = min(max(start, first), end), end
            elif i > with_rows[0] or first > last:
                first, last = start, max(start, min(end, last))
            else:
                first, last = max(start, first), min(end, last)
            within[p] = (first, last)
            before[p] += first - start
            behind[p] += end - last
        if with_rows[0] <= i <= with_rows[-1]:
            audited.append((hour, {p: (s, e) for p, (s, e) in within.items() if s < e}))
    there = {p for _, ranges in cuts[with_rows[0] : with_rows[-1] + 1] for p in ranges}
    return AuditedRanges(audited, dict(+before), dict(+behind), tuple(sorted(there - {*have})))


def plan_cut_off(
    cuts: Sequence[tuple[str, Ranges]], begins: Offsets, first: str
) -> tuple[int, ...]:
    """Return the partitions without offsets of an hour before `first`, and with deleted ones: some
    of these may be of `first` or later. Pure."""
    earlier = {p for hour, ranges in cuts if hour != BEFORE and hour < first for p in ranges}
    return tuple(sorted(p for p, begin in begins.items() if begin and p not in earlier))


def count_slice(
    start: int, counts: NDArray[np.int64], codes: NDArray[np.uint8] | None
) -> PartitionCounts:
    """Return the counts of offsets from `start` on: how many rows each has, and its class in Kafka
    (`CODES`; None: Kafka was not read). Pure."""
    there, several = counts > 0, counts > 1
    if codes is None:
        codes = np.full(len(counts), CODES[RETENTION], np.uint8)
    missing = ~there & (codes == CODES[PRESENT])
    gaps = {
        name: int(np.count_nonzero(~there & (codes == code)))
        for name, code in CODES.items()
        if name != PRESENT
    }
    uncommitted = there & ((codes == CODES[ABORTED]) | (codes == CODES[CONTROL]))
    return PartitionCounts(
        start,
        start + len(counts),
        int(counts.sum()),
        int(counts[several].sum() - np.count_nonzero(several)),
        int(np.count_nonzero(missing)),
        {name: n for name, n in gaps.items() if n},
        int(np.count_nonzero(uncommitted)),
        spans(missing, start, _RANGES),
        spans(several, start, _RANGES),
    )


def _joined(one: Spans, other: Spans) -> Spans:
    """Return the ranges of two adjacent slices, the first `_RANGES` of them. Pure."""
    if one and other and one[-1][1] == other[0][0]:
        one, other = one[:-1], ((one[-1][0], other[0][1]), *other[1:])
    return (*one, *other)[:_RANGES]


def _compare(
    kafka: KafkaAdapter, audit: OtherAudit, places: Places, log: _Log, request: AuditRequest
) -> OtherAudit:
    begins = {p: first for p, (first, _) in places.spans.items()}
    if log.topic is not None:
        begins = {p: min(start, begins.get(p, start)) for p, start in log.starts.items()}
    starts = log.starts or {p: end for p, (_, end) in places.spans.items()}
    cuts = plan_cuts(begins, places.times, starts, log.hours)
    audited = plan_audited(cuts, places.spans, request.hours)
    counted = _count_hours(kafka, places, log, audited.hours, f"audit {request.table}")
    # Rows outside of named hours are not part of the audit.
    whole = request.hours is None
    return replace(
        audit,
        unplaced=audit.unplaced if whole else 0,
        unknown=places.outside(log.ends) if log.topic is not None and whole else 0,
        hours=tuple(counted),
        before=audited.before,
        behind=audited.behind,
        without_rows=audited.without_rows,
        cut_off=() if request.hours is None else plan_cut_off(cuts, begins, request.hours[0]),
        records=tuple(_missing_records(kafka, request, counted)),
    )


def _count_hours(
    kafka: KafkaAdapter,
    places: Places,
    log: _Log,
    audited: Sequence[tuple[str, Ranges]],
    doing: str,
) -> list[HourCounts]:
    by_hour: dict[str, dict[int, PartitionCounts]] = {hour: {} for hour, _ in audited}
    partitions = sorted({p for _, ranges in audited for p in ranges})
    of = {p: [(hour, *ranges[p]) for hour, ranges in audited if p in ranges] for p in partitions}
    sizes = tuple(sum(end - start for _, start, end in pieces) for pieces in of.values())
    progress = Progress(LOG, doing, "partitions", sizes=sizes, contents="offsets")
    for p, pieces in of.items():
        for some in plan_slices(pieces):
            first, last = some[0][1], some[-1][2]
            counts, codes = places.count(p, first, last), None
            if log.topic is not None:
                codes = kafka.classify(log.topic.name, p, first, last)
            for hour, start, end in some:
                part = slice(start - first, end - first)
                one = count_slice(start, counts[part], None if codes is None else codes[part])
                known = by_hour[hour].get(p)
                by_hour[hour][p] = one if known is None else known.plus(one)
            progress.part(last - first)
        progress.step()
    return [HourCounts(hour, found) for hour, found in by_hour.items()]


def plan_slices(pieces: Sequence[tuple[str, int, int]]) -> Iterator[list[tuple[str, int, int]]]:
    """Yield the hours of a partition, with start and end, in slices of at most `_SLICE` offsets. A
    longer hour is divided. Pure."""
    some, number = list[tuple[str, int, int]](), 0
    for hour, start, end in pieces:
        while start < end:
            if some and (number >= _SLICE or some[-1][2] != start):
                yield some
                some, number = [], 0
            until = min(end, start + _SLICE - number)
            some.append((hour, start, until))
            start, number = until, number + until - start
    if some:
        yield some


def _missing_records(
    kafka: KafkaAdapter, request: AuditRequest, counted: Sequence[HourCounts]
) -> Iterator[MissingRecord]:
    left = request.records
    for hour in counted:
        for p, counts in hour.partitions.items():
            for start, end in counts.missing_at:
                if left <= 0:
                    return
                end = min(end, start + left)
                for _, records in kafka.read_records(request.topic, {p: (start, end)}):
                    for r in records:
                        left -= 1
                        key, value = shown(r.key, _LONGEST), shown(r.value, _LONGEST)
                        yield MissingRecord(hour.hour, p, r.offset, r.timestamp, key, value)


_MEMORY = "512MB"
_BATCH_ROWS = 1 << 20


@dataclass(frozen=True)
class TimeCounts:
    """Rows by the hour of their time; `first` has the first offset of each hour by partition. A row
    without a time counts for the hour ''."""

    rows: dict[str, int]
    first: dict[str, Offsets]


class Places:
    """The rows of a table by partition and offset. Opened by `read_places`.

    `unplaced`: rows whose partition or offset is null; `elsewhere`: rows of other topics."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, topic: str) -> None:
        self._connection, self._topic = connection, topic
        self.rows = self.unplaced = self.elsewhere = 0
        self.spans: Ranges = {}
        self.times = TimeCounts(Counter(), {})
        connection.execute("CREATE TABLE places (p INTEGER, o BIGINT)")

    def add(self, batch: pa.RecordBatch, columns: PlaceColumns) -> None:
        self._connection.register("located", locate(pa.table(batch), columns, self._topic))
        self._connection.execute(
            "CREATE OR REPLACE TEMP TABLE one AS SELECT p, o, own, "
            "coalesce(strftime(time, '%Y-%m-%dT%H'), '') AS hour FROM located"
        )
        self._connection.execute(
            "INSERT INTO places SELECT p, o FROM one WHERE own AND p IS NOT NULL AND o IS NOT NULL"
        )
        self._summarize()

    def _summarize(self) -> None:
        found = self._ask(
            "SELECT p, hour, own, min(o), max(o), count(*), count(o) FROM one GROUP BY ALL"
        )
        for p, hour, own, low, high, rows, placed in found:
            self.rows += rows
            if not own:
                self.elsewhere += rows
                continue
            self.times.rows[hour] += rows
            if p is None or low is None:
                self.unplaced += rows
                continue
            self.unplaced += rows - placed
            start, end = self.spans.get(p, (low, high + 1))
            self.spans[p] = (min(start, low), max(end, high + 1))
            first = self.times.first.setdefault(hour, {})
            first[p] = min(low, first.get(p, low))

    def count(self, partition: int, start: int, end: int) -> NDArray[np.int64]:
        """Return how many rows each offset in `[start, end)` of a partition has."""
        offsets = self._connection.execute(
            "SELECT o FROM places WHERE p = ? AND o >= ? AND o < ?", [partition, start, end]
        ).fetchnumpy()["o"]
        counts: NDArray[np.int64] = np.bincount(offsets - start, minlength=end - start)
        return counts

    def outside(self, ends: Offsets) -> int:
        """Return how many rows have a partition or an offset that the topic's log never had."""
        known = " OR ".join(f"(p = {p} AND o >= 0 AND o < {end})" for p, end in ends.items())
        [(number,)] = self._ask(f"SELECT count(*) FROM places WHERE NOT ({known or 'false'})")
        return int(number)

    def _ask(self, sql: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql).fetchall()


@contextmanager
def read_places(table: OtherTable, columns: PlaceColumns, topic: str) -> Iterator[Places]:
    """Read the places of a table's rows. Raises Refused, Transient."""
    with connected(_MEMORY) as connection:
        places = Places(connection, topic)
        at = Progress(LOG, f"read {table.what.partition(',')[0]}", "files", len(table.parts))
        for part in table.parts:
            # A copy: no part keeps its schema.
            for batch, own in _batches(copy(part), columns, table.schema.names[:1]):
                places.add(batch, own)
            at.step()
        yield places


def _batches(
    part: Part, columns: PlaceColumns, other: list[str]
) -> Iterator[tuple[pa.RecordBatch, PlaceColumns]]:
    """Yield the rows of a part with its columns. Without such columns the rows are counted by any
    `other` one."""
    # A file may lack columns, have the topic besides, or have names in letters of another case.
    own = columns.of(part.schema_arrow)
    for batch in part.iter_batches(_BATCH_ROWS, own.reads or other):
        yield batch, own
