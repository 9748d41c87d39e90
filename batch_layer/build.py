"""The build of one hour: read its cut, decode, drop duplicates, stage, and prove the account.

Nothing here publishes. Duplicates are dropped against the rows that `main` will serve in the
look-back. Hours rebuilt together therefore see each other's staged rows instead of the rows that
`main` still serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce

import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch import records
from anabranch.common.fail_points import Step, reach
from anabranch.common.logs import note
from anabranch.config import Stream
from anabranch.config.stream import RESERVED_COLUMNS
from anabranch.iceberg.manifests import files_by_hour, files_of
from anabranch.iceberg.parquet_writer import data_file_of, has_own_layout, spark_columns
from anabranch.iceberg.rewriting import RowReader
from anabranch.iceberg.snapshots import Staged
from anabranch.iceberg.staging import Written, by_own_spec, read_staged, stage, stage_written
from anabranch.iceberg.table_schemas import rows_columns, sort_order_id
from anabranch.job import Job
from anabranch.kafka.batches import Missing
from anabranch.offsets import hours
from anabranch.offsets.hours import Cut
from anabranch.offsets.position import Offsets, Ranges
from anabranch.protocol import dead_letters, ledger, ledger_row, merge
from anabranch.protocol.erasure import load_filter
from anabranch.protocol.ledger_row import Diff, HourAccount, QualityResult, UnknownFields
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import State
from anabranch.records.erased import find_erased, fit_to_table, without
from anabranch.records.hashes import (
    find_hashes,
    find_keys,
    hash_at,
    hash_frame,
    have_same_keys,
    keys_at,
)
from anabranch.records.staged import UnknownNames, is_at, read_facts, rewrite_file, run_in_tasks
from anabranch.spark.session import LazySpark
from batch_layer.archive import LostFiles, write_archive
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
from batch_layer.duplicates import (
    MOST_BROADCAST,
    NO_DUPLICATES,
    PLACE_COLUMNS,
    Duplicates,
    bloom_filter_settings,
    by_partition,
    find_duplicates,
    find_few_duplicates,
    names_event,
    without_empty_texts,
)
from batch_layer.offset_counts import (
    OffsetMasks,
    ReadCounts,
    count,
    count_places,
    count_unknown,
    missing_offsets,
    split_missing,
    sum_unknown,
)
from batch_layer.passes import (
    SMALL,
    Passes,
    cached,
    in_one_task,
    released_at_the_end,
    shuffle_partitions,
    write_tasks,
)
from batch_layer.quality.gate import run_suite
from batch_layer.quality.suite import RowCountBaseline
from batch_layer.sources import HourReader, HourRecords, StagedHour
from serving_layer.layer_diff import Difference, Run, by_task, compare_files, content_types

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
class _Served:
    """The rows that `main` will serve in the look-back: those of `hours` in a snapshot, and staged
    ones; and all their files."""

    snapshot_id: int
    hours: Sequence[str]
    staged: Sequence[Staged]
    files: tuple[DataFile, ...]


@dataclass(frozen=True)
class _Frames:
    """An hour's records in Spark: its good `rows` with duplicates, their counts (`held` counts
    erased ones too), and the places of duplicates. `places`: of all good and dead records.
    `in_kafka`: the part of the cut in Kafka's log. `accepted`: the accepted revision's offsets, if
    they were read. `served`: the files of the rows that `main` will serve in the look-back.

    `staged`: the records as workers staged them. Otherwise Spark `read` them; `erased`: the places
    of erased records, if an erasure applies."""

    rows: Callable[[], DataFrame]
    counts: ReadCounts
    duplicates: Duplicates
    in_kafka: Ranges
    accepted: DataFrame | None
    served: tuple[DataFile, ...] = ()
    staged: StagedHour | None = None
    read: HourRecords | None = None
    erased: DataFrame | None = None

    def missing(self, ranges: Ranges) -> dict[int, Missing]:
        """Return the offsets of ranges that neither Kafka nor the table has, by partition."""
        if self.staged is not None:
            return self.staged.masks(ranges).missing()
        assert self.read is not None
        places = self.read.decoded.select(*PLACE_COLUMNS)
        places = places if self.erased is None else places.unionByName(self.erased)
        return missing_offsets(places, ranges)


@dataclass(frozen=True)
class _Unheld:
    """Offsets whose record neither Kafka nor the table has: the accepted revision's duplicates,
    conflicts among them, gaps by class, erased ones, and ranges that Kafka's log does have."""

    duplicate: Offsets
    gaps: Gaps
    present_at: Mapping[int, tuple[tuple[int, int], ...]]
    erased: Offsets = field(default_factory=dict)
    conflicts: Offsets = field(default_factory=dict)


class HourBuilder:
    def __init__(self, job: Job, spark: LazySpark, lost: LostFiles) -> None:
        self._job, self._session, self._lost = job, spark, lost
        self._stream: Stream = job.stream
        self._catalog = job.environment.catalog.name
        self._offsets = 0
        self.reader = HourReader(job, lambda: self._spark, self._lost)
        self.passes = Passes(spark)

    def use(self, spark: LazySpark) -> None:
        self._session = spark

    def follow(self, job: Job) -> None:
        """Continue with the stream's new columns."""
        self._job, self._stream = job, job.stream
        self.reader = HourReader(job, lambda: self._spark, self._lost)

    @property
    def _spark(self) -> SparkSession:
        """The session, with the settings of the current hour; opened at its first use."""
        spark = self._session()
        if _SHUFFLES not in self._job.environment.spark.conf:
            at_once = spark.sparkContext.defaultParallelism
            spark.conf.set(_SHUFFLES, str(shuffle_partitions(self._offsets, at_once)))
        for key, value in bloom_filter_settings(self._offsets).items():
            spark.conf.set(key, value)
        # The Spark jobs of one stream form a pool, and the pools of many share the cores.
        spark.sparkContext.setLocalProperty("spark.scheduler.pool", self._stream.name)
        return spark

    def build(self, hour: str, cut: Cut, before: int, state: State) -> Built:
        """Stage and check an hour over its revision `before`. Raises PositionError."""
        began = time.monotonic()
        with self.passes.for_hour(hour), released_at_the_end():
            # Steps 1 and 2 of `batch_layer.rebuild`: read and decode, find duplicates.
            frames = self._frames(hour, cut, state, {})
            reach(Step.BATCH_DECODED)
            if frames.read is not None and frames.read.to_archive is not None:
                self.passes.begin("write the archive")
                # Decision 55: before the rows, so that a refused hour is archived too, and Kafka
                # may delete its records.
                whole = frames.read.to_archive
                write_archive(self._job, self._spark, self._lost, whole, hour, cut, state)
            built = self._built(frames, hour, cut, before, state)
        return replace(built, seconds=time.monotonic() - began)

    def recheck_duplicates(
        self,
        hour: str,
        cut: Cut,
        before: int,
        state: State,
        together: RebuiltHours,
    ) -> Built | None:
        """Rebuild an hour after hours of its look-back; None if it keeps the same rows."""
        began = time.monotonic()
        with self.passes.for_hour(hour), released_at_the_end():
            frames = self._frames(hour, cut, state, together)
            batch = self._read_table(state.heads["batch"], [hour]).select(*PLACE_COLUMNS)
            kept = frames.duplicates.leave_out(frames.rows().select(*PLACE_COLUMNS))
            if kept.exceptAll(batch).isEmpty() and batch.exceptAll(kept).isEmpty():
                if frames.staged is not None:
                    self._job.lake.discard(self._stream.table, frames.staged.rows)
                return None
            built = self._built(frames, hour, cut, before, state)
        return replace(built, seconds=time.monotonic() - began)

    def _built(self, frames: _Frames, hour: str, cut: Cut, before: int, state: State) -> Built:
        """Run steps 2 to 5: stage what is not staged yet, then check the staged files."""
        built = self._checked(frames, self._stage(frames, hour, cut, before, state), state)
        if frames.staged is not None and frames.staged.rows is not built.rows:
            # Read until now: the rows with duplicates.
            self._job.lake.discard(self._stream.table, frames.staged.rows)
        return built

    def changes_events(self, built: Built, state: State) -> bool:
        """Return whether the hour's events, by key, differ from those that `main` serves."""
        key = self._stream.key
        if not key:
            return False
        # Their events are unknown, and later hours may have dropped an event that they had.
        if self._lost.of_hour(built.hour, "main"):
            return True
        of_main = files_of(state.table, "main", built.hour)
        if sum(file.record_count for file in (*built.rows.files, *of_main)) <= SMALL:
            reader = RowReader.of(state.table)
            return not have_same_keys(reader, built.rows.files, of_main, key)
        new = self._read_staged(self._stream.table, built.rows)
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
        self._offsets = cut.offsets
        self.passes.begin("read, decode and write")
        left_out = load_filter(
            self._job.environment,
            self._job.stream,
            self._job.ledger,
            state,
            cut.topic_id,
            {hour: cut.ranges},
        )
        served = self._served(hour, state, together)
        if not left_out and (staged := self._staged(hour, cut, state, served)) is not None:
            return staged
        read = self.reader.read(hour, cut, state)
        self.passes.begin("count what was read")
        counts = read.counts(cut.ranges)
        if has_missing(cut.ranges, counts.held):
            self.passes.begin("look for records missing in Kafka")
            # Decision 41: fill from the archive and the table before an offset counts as a gap.
            # Else a restatement would drop rows that `main` has and Kafka has deleted.
            filled = self.reader.fill(read, hour, cut, state)
            if filled.decoded is not read.decoded:
                counts = filled.counts(cut.ranges)
            read = filled
        erased = None
        if left_out:
            self.passes.begin("leave out erased records")
            erased = cached(find_erased(read.decoded, left_out))
            whole = read.to_archive
            read = replace(
                read,
                decoded=cached(without(read.decoded, erased)),
                to_archive=without(whole, erased) if whole is not None else None,
            )
            # `held` counts erased records too: without them, their offsets would look missing in
            # Kafka.
            counts = replace(read.counts(cut.ranges), held=counts.held)
        # Step 2 of `batch_layer.rebuild`, first half. Erased records are left out before: an erased
        # original would otherwise remove a row that has to stay.
        self.passes.begin("find duplicates")
        rows = records.good(read.decoded, self._stream)
        duplicates = self._duplicates(rows, cut, served)
        return _Frames(
            lambda: rows,
            counts,
            duplicates,
            read.in_kafka,
            read.accepted,
            served.files,
            read=read,
            erased=erased,
        )

    def _staged(self, hour: str, cut: Cut, state: State, served: _Served) -> _Frames | None:
        """Read the hour in one pass. Return None if Spark has to read its records."""
        staged = self.reader.stage(hour, cut, state, self._order)
        if staged is None:
            return None

        def rows() -> DataFrame:
            return in_one_task(self._read_staged(self._stream.table, staged.rows), cut.offsets)

        counts, accepted = staged.counts(cut.ranges), None
        if has_missing(cut.ranges, counts.held) and (
            cut.offsets > SMALL
            or self.reader.may_have_stored(staged.masks(cut.ranges), hour, state)
        ):
            self.passes.begin("look for records missing in Kafka")
            places = rows().select(*PLACE_COLUMNS)
            if staged.letters:
                dead = pa.concat_tables(staged.letters)
                places = places.union(self._spark.createDataFrame(dead, places.schema))
            stored = self.reader.find_stored(places, hour, cut, state)
            # Decision 41: fill from the table before an offset counts as a gap.
            if not stored.places.isEmpty():
                self._job.lake.discard(self._stream.table, staged.rows)
                return None
            accepted = stored.accepted
        self.passes.begin("find duplicates")
        duplicates = self._few_duplicates(staged, state, served)
        if duplicates is None:
            duplicates = self._duplicates(rows(), cut, served)
        return _Frames(
            rows, counts, duplicates, staged.in_kafka, accepted, served.files, staged=staged
        )

    def _few_duplicates(
        self, staged: StagedHour, state: State, served: _Served
    ) -> Duplicates | None:
        """Find duplicates by the hashes of keys, if workers reported them."""
        key = self._stream.key
        if not key or not staged.rows.files:
            return NO_DUPLICATES
        if not staged.is_hashed:
            return None
        reader = RowReader.of(state.table)

        def read(task: Callable[..., pa.Table], files: Sequence[DataFile], of: object) -> pa.Table:
            tasks = [partial(task, reader, some, key, of) for some in by_task(files)]
            return pa.concat_tables(self._run(sum(f.record_count for f in files))(tasks))

        return find_few_duplicates(
            staged.facts,
            key,
            lambda places: read(keys_at, staged.rows.files, places),
            lambda hashes: read(partial(find_keys, most=MOST_BROADCAST), served.files, hashes),
        )

    def _duplicates(self, rows: DataFrame, cut: Cut, served: _Served) -> Duplicates:
        key = self._stream.key
        if not key:
            return NO_DUPLICATES
        frames = [self._read_table(served.snapshot_id, served.hours)] if served.hours else []
        frames += [self._read_staged(self._stream.table, staged) for staged in served.staged]
        known = (
            reduce(DataFrame.unionByName, (of.select(*key) for of in frames)) if frames else None
        )
        return find_duplicates(
            in_one_task(rows.select(*PLACE_COLUMNS, *key), cut.offsets), key, known
        )

    def _served(self, hour: str, state: State, together: RebuiltHours) -> _Served:
        """Return the rows that `main` will serve in the look-back: its own, and staged ones."""
        lookback = self.lookback(hour) if self._stream.key else []
        rebuilt = [
            together[h]
            for h in lookback
            if h in together and state.overrides.get(h, "batch") == "batch"
        ]
        # Hours that are rebuilt together are read as staged, not as `main` serves them: an event
        # that a new revision drops there would be dropped here too, and be in no hour.
        hours = [h for h in lookback if h not in {b.hour for b in rebuilt}]
        of_main = files_by_hour(state.table, "main", hours).values()
        return _Served(
            state.heads["main"],
            hours,
            [b.rows for b in rebuilt],
            (
                *self._lost.without(file for files in of_main for file in files.values()),
                *(file for b in rebuilt for file in b.rows.files),
            ),
        )

    def _read_table(self, snapshot_id: int, hours: Sequence[str]) -> DataFrame:
        return self._lost.read(self._spark, self._stream.table, snapshot_id, hours)

    def _read_staged(self, table: str, staged: Staged) -> DataFrame:
        return read_staged(self._spark, self._catalog, table, staged)

    @property
    def _order(self) -> list[str]:
        """The columns by which a task sorts rows."""
        times = (self._stream.event_time.column,) if self._stream.event_time else ()
        sort = self._stream.files.sort
        return list(dict.fromkeys(("event_date", *sort, *times, *PLACE_COLUMNS)))

    def _stage(self, frames: _Frames, hour: str, cut: Cut, before: int, state: State) -> Built:
        stream, lake, order = self._stream, self._job.lake, self._order
        # Step 2, second half: stage. Readers do not see the files before the publish.
        self.passes.begin("write the rows")
        # Rows are sorted by date within one hour, so a task has one open file at a time. Without
        # these settings Iceberg would sort by date alone.
        options = {
            "use-table-distribution-and-ordering": "false",
            "fanout-enabled": "false",
            "target-file-size-bytes": str(stream.files.target),
        }
        rows = self._without_duplicates(frames, state)
        if rows is None:
            rows = self._stage_by_spark(frames, order, options, hour, state)
        note(attempt=rows.wap_id)
        reach(Step.BATCH_ROWS_STAGED)
        dead, name = None, stream.dead_letters_table
        # Decision 42: a branch keeps the snapshot while a publish names it. Without the branch,
        # another program's expiry would delete dead letters that are not published yet.
        if frames.staged is not None and frames.counts.dead:
            dead = stage_written(lake, name, frames.staged.certain.letters, protected=True)
        elif frames.read is not None and frames.counts.dead:
            self.passes.begin("write the dead letters")
            letters = records.dead(frames.read.decoded, cut.topic_id, "batch")
            one = letters.coalesce(1).sortWithinPartitions(*PLACE_COLUMNS)
            own = options | by_own_spec(lake.load(name))
            dead = stage(one, lake, self._catalog, name, new_id(), own, protected=True)
        reach(Step.BATCH_STAGED)
        return Built(hour, cut, before, rows, dead)

    def _stage_by_spark(
        self,
        frames: _Frames,
        order: Sequence[str],
        options: Mapping[str, str],
        hour: str,
        state: State,
    ) -> Staged:
        stream = self._stream
        sort, at_once = stream.files.sort, self._spark.sparkContext.defaultParallelism
        files = write_tasks(
            frames.counts.good, files_of(state.table, "speed", hour), at_once, stream.files.target
        )
        kept = fit_to_table(
            frames.duplicates.leave_out(frame := frames.rows()),
            self._catalog,
            state.table,
            rows_columns(stream),
        )
        # If whole tasks of the read make enough files, write them without a shuffle. A stream's
        # sort order needs a shuffle, so that files do not overlap.
        is_unmoved = files == 1 or (not sort and files <= frame.rdd.getNumPartitions())
        # The date is the first partition field; a writer has one partition's file open at a time.
        partitions = [F.expr(column) for column in spark_columns(state.table, self._catalog)]
        ordered = [F.col(order[0]), *partitions, *map(F.col, order[1:])]
        rows = kept.coalesce(files) if is_unmoved else kept.repartitionByRange(files, *ordered)
        own = {"output-sort-order-id": str(sort_order_id(state.table, sort))}
        return stage(
            rows.sortWithinPartitions(*ordered),
            self._job.lake,
            self._catalog,
            stream.table,
            new_id(),
            {**options, **own, **by_own_spec(state.table)},
        )

    def _without_duplicates(self, frames: _Frames, state: State) -> Staged | None:
        """Stage the files of workers without duplicates; only files that contain one are written
        again. Return None if only Spark can write them, or if too many rows are duplicates."""
        hour, dropped = frames.staged, frames.duplicates.few
        if hour is None or dropped is None or self._stream.files.sort:
            return None
        if has_own_layout(state.table):
            return None
        if not len(dropped):
            return hour.rows
        offsets = by_partition(dropped)
        again = [
            path
            for path, output in hour.outputs.items()
            if is_at(read_facts(output.facts), offsets).any()
        ]
        tasks = [partial(rewrite_file, path, offsets, hour.target) for path in again]
        outputs = [output for of_task in self._run(hour.rows.rows)(tasks) for output in of_task]
        hour.outputs.update({output.path: output for output in outputs})
        written = hour.certain.written
        kept = (file for file in written.files if file.file_path not in set(again))
        files = (*kept, *(data_file_of(state.table, output) for output in outputs))
        rows = Written(new_id(), written.began, files)
        return stage_written(self._job.lake, self._stream.table, rows)

    def _checked(self, frames: _Frames, built: Built, state: State) -> Built:
        cut = built.cut
        # Step 3: close the balance over the files, not over the frames that they were written from.
        # Else a row that the writer lost or wrote twice would be accepted.
        self.passes.begin("count what was staged")
        good = self._count(frames, built, state.table)
        balance = self._balance(frames, good, built, state)
        problems = [f"the balance does not close: {p}" for p in balance.problems()]
        objections = balance.disallowed(self._stream.batch.allow_gaps)
        objections += self._too_many(balance, built)
        objections += self._lost_records(balance, built.hour)
        reach(Step.BATCH_BALANCED)
        # Step 4: compare. The account records a difference; only an expectation of step 5 on the
        # number of rows can refuse the hour for it.
        self.passes.begin("compare with the speed layer")
        unread = merge.unread_ranges(state, built.hour, cut)
        if self._lost.of_hour(built.hour, "speed"):
            # Which of its rows are gone is not known.
            unread = dict(cut.ranges)
        differing = self._compared(frames, built, state, unread)
        # The account may know the rows from the tasks that wrote them; here the files were read. A
        # row that a task passed to Parquet and no reader finds would be lost.
        if differing.batch_rows < (expected := sum(good.distinct.values())):
            problems.append(
                f"the balance does not close: rows: expected {expected} in the staged files, as "
                f"their tasks reported, found {differing.batch_rows}"
            )
        # Step 5: judge the staged rows, which are those that the publish adds.
        self.passes.begin("judge the quality")
        quality = QualityResult(passed=True)
        if (suite := self._stream.expectations) is not None:
            staged = in_one_task(self._read_staged(self._stream.table, built.rows), cut.offsets)
            baseline = self._row_count_baseline(built.hour, balance, differing.diff, state)
            quality = run_suite(staged, suite, baseline)
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

    def _count(self, frames: _Frames, built: Built, table: Table) -> Counted:
        """Count the staged rows: by the places that workers passed to Parquet for each file and the
        rows of its footer, or by the files if one has no report."""
        outputs = frames.staged.outputs if frames.staged is not None else {}
        files, ranges = built.rows.files, built.cut.ranges
        if not outputs.keys() >= {file.file_path for file in files}:
            return _count_files(table, built.rows, ranges)
        facts = (read_facts(outputs[file.file_path].facts) for file in files)
        return count_places(facts, built.rows.rows, ranges)

    def _too_many(self, balance: Balance, built: Built) -> list[str]:
        """Return objections to shares of records that the stream does not allow."""
        counts, quality = balance.counts, self._stream.quality
        dead, conflicts = counts.dead or 0, counts.conflicts or 0
        records, found = (counts.good or 0) + dead + (counts.duplicate or 0), []
        if text := ledger_row.objection("dead letters", dead, records, quality.max_dead):
            assert built.dead is not None
            io = self._job.lake.load(self._stream.dead_letters_table).io
            often = dead_letters.frequent_reason(io, built.dead.files)
            found.append(f"{text}; most often {often}")
        what = f"duplicates by {', '.join(self._stream.key)} with other content"
        if text := ledger_row.objection(what, conflicts, records, quality.max_conflicts):
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

    def _compared(self, frames: _Frames, built: Built, state: State, unread: Ranges) -> Difference:
        """Compare the staged rows with those of the speed layer."""
        of_speed = self._lost.without(files_of(state.table, "speed", built.hour))
        content = self._content(state.table, of_speed)
        duplicates = frames.duplicates.table.select(PLACE_COLUMNS)
        erased = duplicates.slice(0, 0)
        if frames.erased is not None:
            erased = frames.erased.select(*PLACE_COLUMNS).toArrow()
        return compare_files(
            of_speed,
            built.rows.files,
            RowReader.of(state.table),
            [*content.values()],
            duplicates,
            erased,
            partial(self._letters, built),
            unread,
            # After the topic was recreated, the speed layer may have more rows than the cut has
            # offsets.
            self._run(max(built.cut.offsets, sum(file.record_count for file in of_speed))),
        )

    def _letters(self, built: Built) -> tuple[RowReader, Sequence[DataFile]]:
        """Return the files of both layers' dead letters of an hour, and how they are read."""
        table = self._job.lake.load(self._stream.dead_letters_table)
        of_batch = built.dead.files if built.dead is not None else ()
        files = (*files_of(table, "speed", built.hour), *of_batch)
        return RowReader.of(table), self._lost.without(files)

    def _run(self, rows: int) -> Run:
        """Return how functions run that read so many rows: in the driver, or in workers."""
        if rows <= SMALL:
            return lambda tasks: [task() for task in tasks]
        return partial(run_in_tasks, self._spark)

    def _content(self, table: Table, files: Sequence[DataFile]) -> dict[str, str]:
        """Return SQL for the columns in which rows in `files` are compared with the hour's."""
        return content_types(table.schema(), list(table.schemas().values()), files)

    def _unknown_fields(self, frames: _Frames) -> UnknownFields | None:
        if self._stream.unknown == "ignore" or not self._stream.format.names_fields:
            return None
        if frames.read is not None:
            found = count_unknown(frames.read.decoded)
        else:
            assert frames.staged is not None
            found = UnknownNames.sum(r.unknown for r in frames.staged.certain.reports)
        return sum_unknown(found, self._stream.format.envelope)

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

        why = merge.uncovered_reason(state, "speed", hour)
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
        if built.dead is not None and frames.staged is not None:
            dead = count_places(frames.staged.letters, built.dead.rows, cut.ranges)
        elif built.dead is not None:
            letters = self._job.lake.load(self._stream.dead_letters_table)
            dead = _count_files(letters, built.dead, cut.ranges)
        duplicate = frames.duplicates.offsets(cut.ranges)
        conflicts = self._conflicts(frames, built, state)
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

    def _conflicts(self, frames: _Frames, built: Built, state: State) -> Offsets:
        """Return the number of duplicates whose content no row that they may repeat has, compared
        in the columns that every file of those rows has, by partition."""
        if frames.duplicates.is_empty:
            return {}
        self.passes.begin("compare the content of duplicates")
        content = self._content(state.table, frames.served)
        event = [sql for name, sql in content.items() if name not in RESERVED_COLUMNS]
        places, reader = frames.duplicates.table, RowReader.of(state.table)
        run = self._run(built.cut.offsets + sum(file.record_count for file in frames.served))
        if frames.staged is not None:
            of_task = by_task(frames.staged.rows.files)
            dropped = run([partial(hash_at, reader, files, event, places) for files in of_task])
        else:
            rows = frames.duplicates.only(frames.rows())
            columns = rows_columns(self._stream)
            rows = fit_to_table(rows, self._catalog, state.table, columns)
            dropped = [hash_frame(rows, event)]
        hashes = pa.concat_tables(dropped)
        of_task = by_task([*built.rows.files, *frames.served])
        found = run([partial(find_hashes, reader, files, event, hashes) for files in of_task])
        others = hashes.join(pa.concat_tables(found), "hash", join_type="left anti")
        return OffsetMasks.of([others], built.cut.ranges).distinct

    def _erased(self, frames: _Frames, cut: Cut) -> Offsets:
        """Return the number of records that were read and left out as erased, by partition."""
        return count(frames.erased, cut.ranges).distinct if frames.erased is not None else {}

    def _unheld(
        self, frames: _Frames, built: Built, duplicate: Offsets, conflicts: Offsets, state: State
    ) -> _Unheld:
        """Classify offsets that neither Kafka nor table has, by log and accepted account."""
        cut = built.cut
        incomplete = {
            p: (s, e) for p, (s, e) in cut.ranges.items() if e - s > frames.counts.held.get(p, 0)
        }
        if not incomplete:
            return _Unheld({}, {}, {})
        self.passes.begin("explain missing offsets by Kafka's log")
        lost, missing = split_missing(frames.missing(incomplete), frames.in_kafka)
        seen = self._job.kafka.explain_missing(self._stream.topic, missing) if missing else {}
        # Ask again after the log was read: if the topic was recreated meanwhile, the classes are
        # those of another log's batches, and lost records would count as allowed gaps.
        if missing:
            self.reader.require_topic(cut)
        counts = {name: {p: of.counts.get(name, 0) for p, of in seen.items()} for name in EXPLAINED}
        gaps = classify_gaps({p: of.count for p, of in missing.items()}, counts)
        # Decision 41: an offset without a source keeps the class of the accepted revision. Else a
        # restatement would count that revision's duplicates and erased records as gaps.
        before = ledger.partitions_before(state, built.hour, self._job.ledger.history([built.hour]))
        accepted = frames.accepted
        stored = count(accepted, cut.ranges).distinct if accepted is not None else {}
        erased, lost, gaps = classify_erased(lost, gaps, before, self._erased(frames, cut))
        repeated, gaps = classify_unheld(lost, gaps, before, stored, duplicate)
        others = conflicts_of(repeated, before, conflicts)
        present_at = {p: of.present_at for p, of in seen.items()}
        return _Unheld(repeated, gaps, present_at, erased, others)


def _count_files(table: Table, staged: Staged, ranges: Ranges) -> Counted:
    """Count the places in staged files."""
    batches = RowReader.of(table).read(staged.files, PLACE_COLUMNS)
    return count_places((pa.table(batch) for batch in batches), staged.rows, ranges)
