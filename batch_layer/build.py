"""The build of one hour: read its cut, decode, drop duplicates, stage, and prove the account.

Nothing here publishes. Duplicates are dropped against the rows that `main` will serve in the
look-back. Hours rebuilt together therefore see each other's staged rows instead of the rows that
`main` still serves.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch import records
from anabranch.common.fail_points import Step, reach
from anabranch.common.logs import note
from anabranch.config import Stream
from anabranch.config.stream import RESERVED_COLUMNS
from anabranch.iceberg.hour_files import files_by_hour, files_of
from anabranch.iceberg.parquet_writer import has_columns, has_own_layout, target_of
from anabranch.iceberg.physical_design import sort_order_id
from anabranch.iceberg.snapshots import Staged
from anabranch.iceberg.staging import by_own_spec, read_staged, stage, stage_files
from anabranch.iceberg.table_schemas import rows_columns
from anabranch.job import Job
from anabranch.offsets import hours
from anabranch.offsets.hours import Cut
from anabranch.offsets.position import Offsets
from anabranch.protocol import coverage, dead_letters, ledger, shares
from anabranch.protocol.erasure_filter import load_filter
from anabranch.protocol.ledger_row import Diff, HourAccount, UnknownFields
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import State
from anabranch.records.erased import find_erased, without
from anabranch.records.packed_files import WriteSpec, dropped_places, write_files
from anabranch.records.reshape import fit_to_table
from batch_layer.archive import write_archive
from batch_layer.balance import (
    EXPLAINED,
    GONE,
    Balance,
    Counted,
    Gaps,
    classify_erased,
    classify_gaps,
    classify_unheld,
    conflicts_of,
    has_missing,
    plus,
)
from batch_layer.cached import cached, released_at_the_end
from batch_layer.duplicates import (
    Duplicates,
    bloom_filter_settings,
    find_conflicts,
    find_duplicates,
    find_few_duplicates,
    names_event,
    no_duplicates,
    without_empty_texts,
)
from batch_layer.lost_files import LostFiles
from batch_layer.offset_counts import (
    ReadCounts,
    count,
    count_few,
    count_few_read,
    missing_offsets,
    split_missing,
)
from batch_layer.packed_rows import PLACE_COLUMNS
from batch_layer.passes import Passes
from batch_layer.quality.gate import run_suite
from batch_layer.quality.row_counts import RowCountBaseline
from batch_layer.sizes import SMALL, in_one_task, shuffle_partitions, write_tasks
from batch_layer.sources import HourReader, HourRecords
from batch_layer.unknown_fields import count_unknown
from serving_layer.layer_diff import spark as layer_diff
from serving_layer.layer_diff.duckdb import compare_hashes

_SHUFFLES = "spark.sql.shuffle.partitions"


@dataclass(frozen=True)
class Built:
    """An hour's staged rows and dead letters, its account, and the reasons against publishing it.

    `problems`: reasons why the account does not close. `objections`: violations of the stream's
    rules, which an operator may accept. `seconds`: time to build.
    """

    hour: str
    cut: Cut
    before: int
    rows: Staged
    dead: Staged | None
    account: HourAccount = field(default_factory=HourAccount)
    problems: tuple[str, ...] = ()
    objections: tuple[str, ...] = ()
    seconds: float = 0.0


RebuiltHours = Mapping[str, Built]


@dataclass(frozen=True)
class _Frames:
    """An hour's records in Spark: the records read without erased ones, their counts (`held` counts
    erased ones too), and the places of duplicates among the good ones. `erased`: the places of
    erased records, if an erasure applies. `served`: the rows that `main` will serve in the
    look-back."""

    read: HourRecords
    counts: ReadCounts
    duplicates: Duplicates
    erased: DataFrame | None = None
    served: tuple[DataFrame, ...] = ()

    @property
    def places(self) -> DataFrame:
        places = self.read.places.select(*PLACE_COLUMNS)
        return places if self.erased is None else places.unionByName(self.erased)


@dataclass(frozen=True)
class _Unheld:
    """Offsets whose record neither Kafka nor the table has: duplicates of the accepted revision
    and conflicts among them, gaps by class, erased records, and ranges where Kafka's log does
    contain a record."""

    duplicate: Offsets
    gaps: Gaps
    present_at: Mapping[int, tuple[tuple[int, int], ...]]
    erased: Offsets = field(default_factory=dict)
    conflicts: Offsets = field(default_factory=dict)


class HourBuilder:
    def __init__(self, job: Job, spark: SparkSession, lost: LostFiles) -> None:
        self._job, self._spark, self._lost = job, spark, lost
        self._stream: Stream = job.stream
        self._catalog = job.environment.catalog.name
        self.reader = HourReader(job, spark, self._lost)
        self.passes = Passes(spark)

    def use(self, spark: SparkSession) -> None:
        self._spark = spark
        self.reader.use(spark)

    def follow(self, job: Job) -> None:
        """Continue with the stream's new columns."""
        self._job, self._stream = job, job.stream
        self.reader = HourReader(job, self._spark, self._lost)

    def build(self, hour: str, cut: Cut, before: int, state: State) -> Built:
        """Stage and check an hour over its revision `before`. Raises PositionError for a recreated
        topic."""
        began = time.monotonic()
        with self.passes.for_hour(hour), released_at_the_end():
            # Steps 1 and 2 of `batch_layer.rebuild`: read and decode, find duplicates.
            frames = self._frames(hour, cut, state, {})
            reach(Step.BATCH_DECODED)
            if frames.read.to_archive is not None:
                self.passes.begin("write the archive")
                # Decision 55: before the rows, so that a refused hour is archived too, and Kafka
                # may delete its records.
                whole = frames.read.to_archive
                write_archive(self._job, self._spark, self._lost, whole, hour, cut, state)
            # Steps 2 to 5: stage, then check the staged files.
            built = self._checked(frames, self._stage(frames, hour, cut, before, state), state)
        return replace(built, seconds=time.monotonic() - began)

    def recheck_duplicates(
        self,
        hour: str,
        cut: Cut,
        before: int,
        state: State,
        together: RebuiltHours,
    ) -> Built | None:
        """Rebuild an accepted hour after hours of its look-back were rebuilt. Return None if it
        keeps the same rows."""
        began = time.monotonic()
        with self.passes.for_hour(hour), released_at_the_end():
            frames = self._frames(hour, cut, state, together)
            batch = self._read_table(state.heads["batch"], [hour]).select(*PLACE_COLUMNS)
            kept = frames.duplicates.leave_out(frames.read.good(self._stream, PLACE_COLUMNS))
            if kept.exceptAll(batch).isEmpty() and batch.exceptAll(kept).isEmpty():
                return None
            built = self._checked(frames, self._stage(frames, hour, cut, before, state), state)
        return replace(built, seconds=time.monotonic() - began)

    def changes_events(self, built: Built, state: State) -> bool:
        """Return True if the hour's events, by the stream's key, differ from those that `main`
        serves."""
        key = self._stream.key
        if not key:
            return False
        # Their events are unknown, and later hours may have dropped an event that they had.
        if self._lost.of_hour(built.hour, "main"):
            return True
        new = read_staged(self._spark, self._catalog, self._stream.table, built.rows)
        old = self._read_table(state.heads["main"], [built.hour])
        new, old = (
            without_empty_texts(rows, key).where(names_event(key)).select(*key)
            for rows in (new, old)
        )
        return not (new.subtract(old).isEmpty() and old.subtract(new).isEmpty())

    def lookback(self, hour: str) -> list[str]:
        """Return the hours in which duplicates are looked for, oldest first."""
        return [hours.shift(hour, -i) for i in range(self._stream.lookback_hours, 0, -1)]

    def _frames(self, hour: str, cut: Cut, state: State, together: RebuiltHours) -> _Frames:
        if _SHUFFLES not in self._job.environment.spark.conf:
            at_once = self._spark.sparkContext.defaultParallelism
            self._spark.conf.set(_SHUFFLES, str(shuffle_partitions(cut.offsets, at_once)))
        for key, value in bloom_filter_settings(cut.offsets).items():
            self._spark.conf.set(key, value)
        self.passes.begin("read and decode")
        left_out = load_filter(
            self._job.environment,
            self._job.stream,
            self._job.ledger,
            state,
            cut.topic_id,
            {hour: cut.ranges},
        )
        read = self.reader.read(hour, cut, state, is_packed=left_out is None)
        rows_served = self._served(hour, state, together)
        served = (
            reduce(
                lambda one, other: one.unionByName(other),
                (rows.select(*self._stream.key) for rows in rows_served[1:]),
                rows_served[0].select(*self._stream.key),
            )
            if rows_served
            else None
        )
        is_small = cut.offsets <= SMALL

        def count_records(read: HourRecords) -> tuple[ReadCounts, pa.Table | None]:
            """Count the records. Read the places and hashes of a small hour into the driver's
            memory."""
            if not is_small:
                return read.counts(cut.ranges), None
            few = read.read_few(self._stream, served)
            return count_few_read(few, cut.ranges), few

        self.passes.begin("count what was read")
        counts, few = count_records(read)
        if has_missing(cut.ranges, counts.held):
            self.passes.begin("look for records missing in Kafka")
            # Decision 41: fill from the archive and the table before an offset counts as a gap.
            # Else a restatement would drop rows that `main` has and Kafka has deleted.
            filled = self.reader.fill(read, hour, cut, state)
            if filled.decoded is not read.decoded:
                counts, few = count_records(filled)
            read = filled
        erased = None
        if left_out is not None:
            self.passes.begin("leave out erased records")
            erased = cached(find_erased(read.decoded, left_out))
            whole = read.to_archive
            read = replace(
                read,
                decoded=cached(without(read.decoded, erased)),
                to_archive=without(whole, erased) if whole is not None else None,
            )
            rest_counts, few = count_records(read)
            # `held` counts erased records too: without them, their offsets would look missing in
            # Kafka.
            counts = replace(rest_counts, held=counts.held)
        # Step 2 of `batch_layer.rebuild`, first half. Erased records are left out before: an erased
        # original would otherwise remove a row that has to stay.
        self.passes.begin("find duplicates")
        named = in_one_task(
            read.good(self._stream, [*PLACE_COLUMNS, *self._stream.key]), cut.offsets
        )
        if not self._stream.key:
            duplicates = no_duplicates(named)
        elif few is not None:
            duplicates = find_few_duplicates(few, named, self._stream.key, served)
        else:
            duplicates = find_duplicates(named, self._stream.key, served)
        return _Frames(read, counts, duplicates, erased, rows_served)

    def _served(self, hour: str, state: State, together: RebuiltHours) -> tuple[DataFrame, ...]:
        """Return the rows that `main` will serve in the look-back: its own, then staged ones."""
        lookback = self.lookback(hour)
        if not lookback:
            return ()
        staged = [
            together[h]
            for h in lookback
            if h in together and state.overrides.get(h, "batch") == "batch"
        ]
        # Hours that are rebuilt together are read as staged, not as `main` serves them: an event
        # that a new revision drops there would be dropped here too, and be in no hour.
        not_rebuilt = [h for h in lookback if h not in {b.hour for b in staged}]
        return (
            self._read_table(state.heads["main"], not_rebuilt),
            *(read_staged(self._spark, self._catalog, self._stream.table, b.rows) for b in staged),
        )

    def _read_table(self, snapshot_id: int, hours: Sequence[str]) -> DataFrame:
        return self._lost.read(self._spark, self._stream.table, snapshot_id, hours)

    def _stage(self, frames: _Frames, hour: str, cut: Cut, before: int, state: State) -> Built:
        stream, lake = self._stream, self._job.lake
        sort = stream.files.sort
        times = (stream.event_time.column,) if stream.event_time else ()
        order = list(
            dict.fromkeys(("event_date", *sort, *times, "kafka_partition", "kafka_offset"))
        )
        at_once = self._spark.sparkContext.defaultParallelism
        files = write_tasks(
            frames.counts.good, files_of(state.table, "speed", hour), at_once, stream.files.target
        )
        # If whole partitions of the topic make enough files, write them without a shuffle. A
        # stream's sort order needs a shuffle, so that files do not overlap.
        is_unmoved = files == 1 or (files <= frames.read.partitions and not sort)
        # Step 2, second half: stage. Readers do not see the files before the publish.
        self.passes.begin("write the rows")
        # Rows are sorted by date within one hour, so a task has one open file at a time. Without
        # these settings Iceberg would sort by date alone.
        options = {
            "use-table-distribution-and-ordering": "false",
            "fanout-enabled": "false",
            "target-file-size-bytes": str(stream.files.target),
        }
        staged = self._stage_by_workers(frames, order, files, state) if is_unmoved else None
        if staged is None:
            kept = frames.duplicates.leave_out(frames.read.good(stream))
            kept = fit_to_table(kept, self._catalog, state.table, rows_columns(stream))
            rows = kept.coalesce(files) if is_unmoved else kept.repartitionByRange(files, *order)
            row_options = options | {"output-sort-order-id": str(sort_order_id(state.table, sort))}
            row_options |= by_own_spec(state.table)
            staged = stage(
                rows.sortWithinPartitions(*order),
                lake,
                self._catalog,
                stream.table,
                new_id(),
                row_options,
            )
        note(attempt=staged.wap_id)
        reach(Step.BATCH_ROWS_STAGED)
        dead = None
        if frames.counts.dead:
            self.passes.begin("write the dead letters")
            letters = records.dead(frames.read.decoded, cut.topic_id, "batch")
            one = letters.coalesce(1).sortWithinPartitions("kafka_partition", "kafka_offset")
            dead = stage(
                one,
                lake,
                self._catalog,
                stream.dead_letters_table,
                new_id(),
                options | by_own_spec(lake.load(stream.dead_letters_table)),
                # Decision 42: a branch keeps the snapshot while a publish names it. Without the
                # branch, another program's expiry would delete dead letters that are not published
                # yet.
                protected=True,
            )
        reach(Step.BATCH_STAGED)
        return Built(hour, cut, before, staged, dead)

    def _stage_by_workers(
        self, frames: _Frames, order: Sequence[str], files: int, state: State
    ) -> Staged | None:
        """Stage the rows without Spark's writer. Return None if only Spark can write them, if too
        many rows are duplicates, or if workers failed on a cluster."""
        certain, table, stream = frames.read.certain, state.table, self._stream
        if certain is None or stream.files.sort or has_own_layout(table):
            return None
        target = target_of(table) if has_columns(table, rows_columns(stream).schema) else None
        dropped = frames.duplicates.few
        if target is None or dropped is None:
            return None
        others = (
            records.good(frames.read.decoded, stream)
            if frames.counts.good > certain.count
            else None
        )
        spec = WriteSpec(target, tuple(order), dropped_places(dropped))
        return stage_files(
            self._job.lake,
            stream.table,
            new_id(),
            lambda: write_files(certain.pieces, others, files, spec, table),
        )

    def _checked(self, frames: _Frames, built: Built, state: State) -> Built:
        cut, duplicates = built.cut, frames.duplicates
        rows = in_one_task(
            read_staged(self._spark, self._catalog, self._stream.table, built.rows), cut.offsets
        )
        # Step 3: close the balance over the files, not over the frames that they were written from.
        # Else a row that the writer lost or wrote twice would be accepted.
        self.passes.begin("count what was staged")
        of_speed = files_of(state.table, "speed", built.hour)
        layers = self._layers(frames, rows, built.hour, state, of_speed)
        # After the topic was recreated, the speed layer may have more rows than the cut has
        # offsets.
        is_small = max(cut.offsets, sum(file.record_count for file in of_speed)) <= SMALL
        hashes = layer_diff.read_hashes(*layers) if is_small else None
        good = count_few(hashes[1], cut.ranges) if hashes is not None else count(rows, cut.ranges)
        balance = self._balance(frames, good, built, state)
        problems = [f"the balance does not close: {p}" for p in balance.problems()]
        objections = balance.disallowed(self._stream.batch.allow_gaps)
        objections += self._too_many(balance, built)
        objections += self._lost_records(balance, built.hour)
        reach(Step.BATCH_BALANCED)
        # Step 4: compare. The account records a difference; only an expectation of step 5 on the
        # number of rows can refuse the hour for it.
        self.passes.begin("compare with the speed layer")
        unread = coverage.unread_ranges(state, built.hour, cut)
        if self._lost.of_hour(built.hour, "speed"):
            # Which of its rows are gone is not known.
            unread = dict(cut.ranges)
        if hashes is not None and duplicates.few is not None:
            differing = compare_hashes(*hashes, duplicates.few, unread)
        else:
            differing = layer_diff.compare(*layers, duplicates.places, unread)
        # Step 5: judge the staged rows, which are those that the publish adds.
        self.passes.begin("judge the quality")
        quality = run_suite(
            rows,
            self._stream.expectations,
            self._row_count_baseline(built.hour, balance, differing.diff, state),
        )
        objections += [f"quality: {failed['message']}" for failed in quality.failed]
        self.passes.begin("count unknown fields")
        unknown = self._unknown_fields(frames)
        reach(Step.BATCH_CHECKED)
        account = replace(
            balance.counts,
            partitions=balance.partitions,
            sources=frames.counts.sources,
            speed_rows=differing.speed_rows,
            diff=differing.diff,
            quality=quality,
            unknown=unknown,
        )
        return replace(
            built,
            account=account,
            problems=tuple(problems),
            objections=tuple(objections),
        )

    def _too_many(self, balance: Balance, built: Built) -> list[str]:
        """Return objections to shares of records that the stream does not allow."""
        counts, quality = balance.counts, self._stream.quality
        dead, conflicts = counts.dead or 0, counts.conflicts or 0
        records, found = (counts.good or 0) + dead + (counts.duplicate or 0), []
        if text := shares.objection("dead letters", dead, records, quality.max_dead):
            assert built.dead is not None
            io = self._job.lake.load(self._stream.dead_letters_table).io
            often = dead_letters.frequent_reason(io, built.dead.files)
            found.append(f"{text}; most often {often}")
        what = f"duplicates by {', '.join(self._stream.key)} with other content"
        if text := shares.objection(what, conflicts, records, quality.max_conflicts):
            found.append(f"{text}; correct `key`, or accept that they are dropped")
        return found

    def _lost_records(self, balance: Balance, hour: str) -> list[str]:
        """Return an objection to records that only lost files can have had."""
        lost = self._lost.of_hour(hour)
        number = sum(sum(balance.gaps.get(name, {}).values()) for name in GONE)
        if not lost or not number:
            return []
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        return [
            f"lost files: expected {lost[0].words}{more}, found none in storage, and {number} "
            "records that neither Kafka nor another file has; restore the file from a backup or "
            "from the bucket's versions, then run it again; else publish the hour without them: "
            f"`anabranch batch {self._stream.name} --hour {hour} --restate --accept --why TEXT`"
        ]

    def _layers(
        self,
        frames: _Frames,
        rows: DataFrame,
        hour: str,
        state: State,
        of_speed: Sequence[DataFile],
    ) -> tuple[DataFrame, DataFrame]:
        """Return the speed layer's rows of an hour, in the files `of_speed`, and the staged `rows`,
        both in the schema of the comparison."""
        speed = rows.limit(0)
        if of_speed:
            speed = self._read_table(state.heads["speed"], [hour])
            speed = speed if frames.erased is None else without(speed, frames.erased)
        return layer_diff.to_common_schema(speed, rows, state.table, of_speed)

    def _unknown_fields(self, frames: _Frames) -> UnknownFields | None:
        if self._stream.unknown == "ignore" or not self._stream.format.names_fields:
            return None
        return count_unknown(frames.read.decoded, frames.counts.drifting)

    def _row_count_baseline(
        self, hour: str, balance: Balance, diff: Diff, state: State
    ) -> RowCountBaseline:

        def previous(days: int) -> list[int]:
            before = [hours.shift(hour, -24 * day) for day in range(1, days + 1)]
            newest = ledger.newest(self._job.ledger.history(before, ledger.BULKY))
            rows = [newest[h] for h in before if h in newest]
            return [
                row.good
                for row in rows
                if row.decision in ("accepted", "expired") and row.good is not None
            ]

        why = coverage.uncovered_reason(state, "speed", hour)
        if why is None and self._lost.of_hour(hour, "speed"):
            why = "files of the speed layer are gone"
        if why is not None:
            return RowCountBaseline(why=why, previous=previous)
        # Rows that the batch layer drops as duplicates are no difference, so leave them out.
        good = sum(balance.good.distinct.values())
        return RowCountBaseline(good - diff.missing + diff.extra, previous=previous)

    def _balance(self, frames: _Frames, good: Counted, built: Built, state: State) -> Balance:
        cut = built.cut
        dead = Counted()
        if built.dead is not None:
            letters = read_staged(
                self._spark, self._catalog, self._stream.dead_letters_table, built.dead
            )
            dead = count(in_one_task(letters, cut.offsets), cut.ranges)
        duplicate = frames.duplicates.offsets(cut.ranges)
        conflicts = self._conflicts(frames, built, state).offsets(cut.ranges)
        unheld = self._unheld(frames, built, duplicate, conflicts, state)
        erased = plus(self._erased(frames, cut), unheld.erased)
        return Balance(
            cut,
            good,
            dead,
            plus(duplicate, unheld.duplicate),
            unheld.gaps,
            unheld.present_at,
            erased,
            plus(conflicts, unheld.conflicts),
        )

    def _conflicts(self, frames: _Frames, built: Built, state: State) -> Duplicates:
        """Return the duplicates whose content no row that they may repeat has, compared in the
        columns that every file of those rows has."""
        if frames.duplicates.is_empty:
            return frames.duplicates
        self.passes.begin("compare the content of duplicates")
        kept = read_staged(self._spark, self._catalog, self._stream.table, built.rows)
        files = files_by_hour(state.table, "main", self.lookback(built.hour)).values()
        schema = layer_diff.common_schema(
            kept.schema,
            list(state.table.schemas().values()),
            state.table.schema(),
            [file for of_hour in files for file in of_hour.values()],
        )
        read = frames.read.good(self._stream)
        dropped = fit_to_table(
            read.join(F.broadcast(frames.duplicates.places), PLACE_COLUMNS, "left_semi")
            if frames.duplicates.few is not None
            else read.join(frames.duplicates.places, PLACE_COLUMNS, "left_semi"),
            self._catalog,
            state.table,
            rows_columns(self._stream),
        )
        hashed = cached(
            layer_diff.with_content(dropped, schema, RESERVED_COLUMNS), StorageLevel.MEMORY_AND_DISK
        )
        originals = reduce(
            lambda one, other: one.unionByName(other),
            (
                layer_diff.with_content(rows, schema, RESERVED_COLUMNS)
                for rows in (kept, *frames.served)
            ),
        )
        return find_conflicts(frames.duplicates, hashed, originals)

    def _erased(self, frames: _Frames, cut: Cut) -> Offsets:
        """Return the number of records that were read and left out as erased, by partition."""
        return count(frames.erased, cut.ranges).distinct if frames.erased is not None else {}

    def _unheld(
        self, frames: _Frames, built: Built, duplicate: Offsets, conflicts: Offsets, state: State
    ) -> _Unheld:
        """Classify the offsets that neither Kafka nor the table has, by Kafka's log and the
        accepted revision's account."""
        cut, read = built.cut, frames.read
        incomplete = {
            p: (s, e) for p, (s, e) in cut.ranges.items() if e - s > frames.counts.held.get(p, 0)
        }
        if not incomplete:
            return _Unheld({}, {}, {})
        self.passes.begin("explain missing offsets by Kafka's log")
        lost, missing = split_missing(missing_offsets(frames.places, incomplete), read.in_kafka)
        seen = self._job.kafka.explain_missing(self._stream.topic, missing) if missing else {}
        # Ask again after the log was read: if the topic was recreated meanwhile, the classes are
        # those of another log's batches, and lost records would count as allowed gaps.
        if missing:
            self.reader.require_topic(cut)
        counts = {name: {p: of.counts.get(name, 0) for p, of in seen.items()} for name in EXPLAINED}
        gaps = classify_gaps({p: of.count for p, of in missing.items()}, counts)
        # Decision 41: an offset without a source keeps the class of the accepted revision. Else a
        # restatement would count that revision's duplicates and erased records as gaps.
        before = self._job.ledger.partitions_before(state, built.hour)
        stored = count(read.accepted, cut.ranges).distinct if read.accepted is not None else {}
        erased, lost, gaps = classify_erased(lost, gaps, before, self._erased(frames, cut))
        repeated, gaps = classify_unheld(lost, gaps, before, stored, duplicate)
        others = conflicts_of(repeated, before, conflicts)
        present_at = {p: of.present_at for p, of in seen.items()}
        return _Unheld(repeated, gaps, present_at, erased, others)
