"""The difference between the two layers for one hour: row by row on (partition, offset), by a hash
of the content, in a common schema, since the table's schema may have evolved.

A file has its writer's columns. So both layers are compared in the columns that every file of the
hour has, in the table's current types. A DOUBLE that once was FLOAT is compared as FLOAT, the
precision of the old rows. `KIND` defines the kind of a row, for the batch job and for `anabranch
explain --rows`.

The batch job compares files in tasks (`compare_files`): digests of blocks of offsets first, then
the rows of blocks that differ. Where the layers agree, the driver reads one row for each 1,024
offsets of a file.

Reports compare without Spark: DuckDB reads the files of the branches, and finds which rows differ,
and which row each duplicate repeats. The speed layer keeps duplicates, so removed records are found
among its rows that the batch layer lacks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import duckdb
import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import FloatType, ListType, MapType, NestedField, StructType

from anabranch.common.arrays import groups_by_size
from anabranch.common.logs import Progress
from anabranch.common.output import text
from anabranch.config.stream import RESERVED_COLUMNS
from anabranch.iceberg.manifests import files_of
from anabranch.iceberg.rewriting import RowReader
from anabranch.iceberg.snapshots import heads
from anabranch.offsets.hours import shift
from anabranch.offsets.position import Ranges
from anabranch.protocol.ledger_row import Diff
from anabranch.records import within
from anabranch.records.hashes import PLACE, digest_files, hash_files, in_duckdb
from serving_layer.query.datasets import connected, key_part, plan_files, quoted, reading_failures

LOG = logging.getLogger(__name__)


def common_fields(schemas: Sequence[Schema], files: Sequence[DataFile]) -> set[int]:
    """Return the ids of the fields that all of `files` contain. Fields in all of the table's
    `schemas` are in every file. A field that was added later is left out if a file lacks it: the
    rows of that file are null only for that reason."""
    by_id = [_fields(schema) for schema in schemas]
    known = set.intersection(*by_id)
    return known | {
        id
        for fields in by_id
        for id in fields
        if all(id in f.column_sizes or id in f.value_counts for f in files)
    }


def former_floats(schemas: Sequence[Schema]) -> set[int]:
    """Return the ids of the fields that were FLOAT in one of the table's schemas."""
    return {
        id
        for schema in schemas
        for id in _fields(schema)
        if isinstance(schema.find_field(id).field_type, FloatType)
    }


def _fields(schema: Schema) -> set[int]:
    return {schema.find_field(name).field_id for name in schema.column_names}


SAMPLE = 5

# Columns: `speed` and `batch` (hash of the content, null without a row), `removed` (batch dropped
# the record as a duplicate), `unread` (the speed layer's rows do not account for the offset) and
# `dead` (a layer has the record as a dead letter).
KIND = """CASE
    WHEN speed IS NULL AND unread THEN 'unread'
    WHEN speed IS NULL AND dead THEN 'missing_dead'
    WHEN speed IS NULL THEN 'missing'
    WHEN batch IS NULL AND removed THEN 'duplicate'
    WHEN batch IS NULL AND dead THEN 'extra_dead'
    WHEN batch IS NULL THEN 'extra'
    WHEN speed <> batch THEN 'changed'
    ELSE 'same'
END"""
# The kinds in samples, in their order: unexplained kinds first.
SHOWN = ("changed", "extra", "missing", "unread")


@dataclass(frozen=True)
class Difference:
    """The numbers of speed's and, with each place once, of batch's rows; their difference."""

    speed_rows: int
    batch_rows: int
    diff: Diff


def to_difference(counts: Mapping[str, int], sample: Sequence[dict[str, Any]]) -> Difference:
    """Return the difference, from the number of rows of each `KIND`. Pure."""
    of = Counter(counts)
    missing = of["missing"] + of["missing_dead"] + of["unread"]
    extra, both = of["extra"] + of["extra_dead"], of["changed"] + of["same"]
    diff = Diff(
        missing=missing,
        extra=extra,
        changed=of["changed"],
        duplicate=of["duplicate"],
        unread=of["unread"],
        sample=tuple(sample),
        missing_dead=of["missing_dead"],
        extra_dead=of["extra_dead"],
    )
    return Difference(extra + of["duplicate"] + both, missing + both, diff)


_MEMORY = "2GB"  # larger results spill to disk
KINDS = (*SHOWN, "missing_dead", "extra_dead", "duplicate")


@dataclass(frozen=True)
class Place:
    hour: str
    partition: int
    offset: int


@dataclass(frozen=True)
class Repeated:
    """A record that the batch layer removed: its place, its event's key, the first row that it
    repeats, and whether a row that it repeats has the same content."""

    partition: int
    offset: int
    key: Mapping[str, Any]
    repeats: Place
    is_equal: bool


@dataclass(frozen=True)
class Sample:
    """A row of one `kind`: its content in each layer, and the columns that differ."""

    kind: str
    partition: int
    offset: int
    columns: tuple[str, ...]
    speed: Mapping[str, Any] | None
    batch: Mapping[str, Any] | None


# Names that no column of a stream can have: some are beside its key.
_REPEATS, _IS_EQUAL = "the place repeated", "is equal"


class Comparison:
    """The rows of one hour in both layers. Opened by `open_comparison`."""

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, content: Mapping[str, str], key: Sequence[str]
    ) -> None:
        self._connection, self._key = connection, tuple(key)
        self._columns = frozenset(content)
        self._content = f"hash({', '.join(content.values())})"
        event = [sql for name, sql in content.items() if name not in RESERVED_COLUMNS]
        self._event = f"hash({', '.join(event)})"
        self._find_removed()

    def repeated(self, limit: int) -> tuple[int, list[Repeated]]:
        """Return how many of speed's rows batch lacks although they repeat a row of batch or of the
        look-back, and the first `limit` of them by (partition, offset)."""
        columns = "".join(f", {quoted(c)}" for c in self._key)
        rows = self._ask(
            f"SELECT {', '.join((*PLACE, quoted(_REPEATS), quoted(_IS_EQUAL)))}{columns} "
            f"FROM removed ORDER BY ALL LIMIT {limit}"
        )
        listed = [
            Repeated(
                row["kafka_partition"],
                row["kafka_offset"],
                {c: row[c] for c in self._key},
                Place(**row[_REPEATS]),
                row[_IS_EQUAL],
            )
            for row in rows
        ]
        return self._number("SELECT count(*) AS n FROM removed"), listed

    def compare(
        self, letters: pa.Table, unread: Ranges, each: int
    ) -> tuple[Difference, list[Sample]]:
        """Return the difference between the layers, and the first `each` rows of each kind by
        (partition, offset), unexplained kinds first. `letters`, `unread`: as in `kinds_of`."""
        self._connection.register("letters", letters)
        self._judge(unread)
        counts = {
            row["kind"]: row["n"]
            for row in self._ask("SELECT kind, count(*) AS n FROM judged GROUP BY kind")
        }
        of_speed = ("extra", "extra_dead", "changed", "duplicate")
        differing = sum(counts.get(kind, 0) for kind in of_speed)
        counts["same"] = self._number("SELECT count(*) AS n FROM speed") - differing
        return to_difference(counts, []), self._samples(each)

    def _samples(self, each: int) -> list[Sample]:
        chosen = [
            row
            for kind in KINDS
            for row in self._ask(
                f"SELECT {', '.join(PLACE)}, kind FROM judged WHERE kind = '{kind}' ORDER BY ALL "
                f"LIMIT {each}"
            )
        ]
        places = [(row["kafka_partition"], row["kafka_offset"]) for row in chosen]
        speed, batch = self._rows("speed", places), self._rows("batch", places)
        samples = []
        for row, place in zip(chosen, places, strict=True):
            one, other = speed.get(place), batch.get(place)
            differing = tuple(
                name for name in differing_columns(one, other) if name in self._columns
            )
            samples.append(Sample(row["kind"], *place, differing, one, other))
        return samples

    def unrepeated(self) -> int:
        """Return how many of speed's rows the batch layer lacks and that repeat no row."""
        return self._number(
            f"SELECT count(*) AS n FROM lacking ANTI JOIN removed USING ({', '.join(PLACE)})"
        )

    def _find_removed(self) -> None:
        key = ", ".join(quoted(c) for c in self._key)
        parts = [(key_part(f"l.{quoted(c)}"), key_part(f"o.{quoted(c)}")) for c in self._key]
        same = (
            " AND ".join(f"{mine} IS NOT DISTINCT FROM {other}" for mine, other in parts) or "false"
        )
        # A key whose parts are all null identifies no event (`batch_layer.duplicates`).
        named = " OR ".join(f"{mine} IS NOT NULL" for mine, _ in parts) or "false"
        event = quoted("its event")
        columns = ", ".join((*PLACE, *([key] if key else []), f"{self._event} AS {event}"))
        self._run(
            f"CREATE TEMP TABLE lacking AS SELECT {columns} FROM speed "
            "ANTI JOIN batch USING (kafka_partition, kafka_offset)"
        )
        self._run(f"""
            CREATE TEMP TABLE removed AS
            WITH origins AS (
                SELECT ingest_hour, {columns} FROM earlier
                UNION ALL SELECT ingest_hour, {columns} FROM batch
            )
            SELECT l.* EXCLUDE ({event}), bool_or(l.{event} = o.{event}) AS {quoted(_IS_EQUAL)},
            min({{
                'hour': o.ingest_hour, 'offset': o.kafka_offset, 'partition': o.kafka_partition
            }}) AS {quoted(_REPEATS)}
            FROM lacking l JOIN origins o ON {same} WHERE {named} GROUP BY ALL
        """)

    def _judge(self, unread: Ranges) -> None:
        self._connection.register("ranges", _table_of(unread))
        content = (
            f"SELECT {', '.join(PLACE)}, {self._content} AS hash FROM {layer}"
            for layer in ("speed", "batch")
        )
        self._run(
            f"CREATE TEMP TABLE judged AS SELECT * FROM ({_kinds_sql(*content)}) "
            "WHERE kind <> 'same'"
        )

    def _rows(
        self, layer: str, places: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], dict[str, Any]]:
        if not places:
            return {}
        ranges = " OR ".join(f"(kafka_partition = {p} AND kafka_offset = {o})" for p, o in places)
        rows = self._ask(f"SELECT * FROM {layer} WHERE {ranges}")
        return {(row["kafka_partition"], row["kafka_offset"]): row for row in rows}

    def _number(self, sql: str) -> int:
        return int(self._ask(sql)[0]["n"])

    def _ask(self, sql: str) -> list[dict[str, Any]]:
        with reading_failures("compare: expected to read every data file"):
            rows: list[dict[str, Any]] = self._connection.sql(sql).to_arrow_table().to_pylist()
            return rows

    def _run(self, sql: str) -> None:
        with reading_failures("compare: expected to read every data file"):
            self._connection.execute(sql)


def kinds_of(
    speed: pa.Table, batch: pa.Table, removed: pa.Table, letters: pa.Table, unread: Ranges
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Return the number of rows of each kind, and the first rows that differ. `speed` and `batch`:
    places with the `hash` of the content. `removed`: places of records that the batch layer dropped
    as duplicates. `letters`: places of both layers' dead letters. `unread`: offsets that the speed
    layer's rows do not account for. Pure."""
    tables = {"speed": speed, "batch": batch, "removed": removed, "letters": letters}
    tables["ranges"] = _table_of(unread)
    with connected(_MEMORY) as connection:
        for name, table in tables.items():
            connection.register(name, table)
        connection.execute(f"CREATE TEMP TABLE judged AS {_kinds_sql('FROM speed', 'FROM batch')}")
        counts = dict(
            connection.execute("SELECT kind, count(*) FROM judged GROUP BY kind").fetchall()
        )
        shown = connection.execute(
            f"SELECT kind, {', '.join(PLACE)} FROM judged WHERE kind IN {SHOWN} ORDER BY ALL LIMIT "
            f"{SAMPLE}"
        ).fetchall()
    return Counter(counts), [{"kind": kind, "partition": p, "offset": o} for kind, p, o in shown]


def _kinds_sql(speed: str, batch: str) -> str:
    """Return SQL for the place and the kind of each row. `speed` and `batch`: SQL for the layers'
    places with a `hash`. Reads `removed`, `letters` and `ranges` of the connection."""
    at = ", ".join(PLACE)
    return f"""
        SELECT {at}, {KIND} AS kind FROM (
            SELECT {at}, speed, batch, {within("kafka_offset", "first", "behind")} AS unread,
                ({at}) IN (SELECT ({at}) FROM removed) AS removed,
                ({at}) IN (SELECT ({at}) FROM letters) AS dead
            FROM (SELECT {at}, hash AS speed FROM ({speed}))
            FULL JOIN (SELECT {at}, hash AS batch FROM ({batch})) USING ({at})
            LEFT JOIN ranges ON ranges.partition = kafka_partition
        )
    """


def _table_of(ranges: Ranges) -> pa.Table:
    """Return ranges as a table: as a condition, thousands would take seconds to plan."""
    bounds = [{"partition": p, "first": s, "behind": e} for p, (s, e) in ranges.items()]
    return pa.Table.from_pylist(
        bounds, pa.schema({"partition": pa.int32(), "first": pa.int64(), "behind": pa.int64()})
    )


@contextmanager
def open_comparison(
    table: Table, hour: str, key: Sequence[str], lookback: int
) -> Iterator[Comparison]:
    """Compare an hour's rows on a loaded table's branches, with the look-back's rows in `main`.
    Raises Refused for delete files, Transient for an unreadable file."""
    at = heads(table)
    earlier = [shift(hour, -i) for i in range(1, lookback + 1)]
    progress = Progress(LOG, f"compare hour {hour}", "files")
    with connected(_MEMORY) as connection:
        for view, branch, hours in (
            ("speed", "speed", [hour]),
            ("batch", "batch", [hour]),
            ("earlier", "main", earlier),
        ):
            planned = plan_files(".".join(table.name()), table, at[branch], hours)
            connection.register(view, planned.dataset(progress))
        schemas = list(table.schemas().values())
        files = files_of(table, "speed", hour)
        yield Comparison(connection, content_types(table.schema(), schemas, files), key)


def has_same_rows(table: Table, hour: str, one: str, other: str) -> bool:
    """Return whether two branches have the same rows of an hour, each equally often, in whatever
    files. Raises Refused for delete files, Transient for an unreadable file."""
    at, name = heads(table), ".".join(table.name())
    progress = Progress(LOG, f"compare hour {hour}", "files")
    with connected(_MEMORY) as connection:
        for view, branch in (("one", one), ("other", other)):
            connection.register(view, plan_files(name, table, at[branch], [hour]).dataset(progress))
        with reading_failures(
            f"compare hour {hour} of {name}: expected its rows", "; run it again"
        ):
            [(n,)] = connection.execute(
                "SELECT count(*) FROM ((FROM one EXCEPT ALL FROM other) UNION ALL (FROM other "
                "EXCEPT ALL FROM one))"
            ).fetchall()
    return bool(n == 0)


def differing_columns(
    one: Mapping[str, Any] | None, other: Mapping[str, Any] | None
) -> tuple[str, ...]:
    """Return the columns in which two rows differ; empty if one of the rows is None. Pure."""
    if one is None or other is None:
        return ()
    return tuple(
        name
        for name in one
        if text(one[name]) != text(other[name]) or type(one[name]) is not type(other[name])
    )


def content_types(
    now: Schema, schemas: Sequence[Schema], files: Sequence[DataFile]
) -> dict[str, str]:
    """Return, by column, the SQL expression by which two rows of an hour are compared. `files`: the
    files whose rows are compared. Nested values are compared as text. Pure."""
    known, floats = common_fields(schemas, files), former_floats(schemas)
    content = {}
    for field in now.fields:
        sql = _compared(quoted(field.name), field, known, floats)
        if field.name not in PLACE and sql is not None:
            nested = not field.field_type.is_primitive
            content[field.name] = f"to_json({sql})::VARCHAR" if nested else sql
    return content


def _compared(
    value: str, field: NestedField, known: Collection[int], floats: Collection[int]
) -> str | None:
    """Return SQL for the part of a value that is compared; None if a file lacks all of it."""
    # DuckDB prefers a column of the item's name to the item, so no column can have this one.
    kind, item = field.field_type, quoted(f"item {field.field_id}")
    if isinstance(kind, StructType):
        # In brackets: else a table of the struct's name is taken, and a column for its field.
        fields = {
            f.name: _compared(f"({value}).{quoted(f.name)}", f, known, floats) for f in kind.fields
        }
        parts = [f"{quoted(name)} := {sql}" for name, sql in fields.items() if sql is not None]
        whole = f"CASE WHEN {value} IS NOT NULL THEN struct_pack({', '.join(parts)}) END"
        return whole if parts else None
    if isinstance(kind, ListType):
        element = _compared(item, kind.element_field, known, floats)
        return element and f"list_transform({value}, lambda {item}: {element})"
    if isinstance(kind, MapType):
        part = _compared(f"{item}.value", kind.value_field, known, floats)
        pair = f"struct_pack(k := {item}.key, v := {part})"
        return part and f"list_transform(map_entries({value}), lambda {item}: {pair})"
    if field.field_id not in known:
        return None
    return f"{value}::FLOAT" if field.field_id in floats else value


T = TypeVar("T")


class Run(Protocol):
    """Runs functions in tasks, and returns their results in order."""

    def __call__(self, tasks: Sequence[Callable[[], T]], /) -> Sequence[T]: ...


# Rows that a task reads, if it has several files; blocks whose rows the driver compares at once.
_TASK_ROWS, _BLOCKS = 500_000, 4_096


def compare_files(
    speed: Sequence[DataFile],
    batch: Sequence[DataFile],
    reader: RowReader,
    content: Sequence[str],
    removed: pa.Table,
    left_out: pa.Table,
    letters: Callable[[], tuple[RowReader, Sequence[DataFile]]],
    unread: Ranges,
    run: Run,
) -> Difference:
    """Compare the rows in the files of both layers. `content`: SQL of the compared columns.
    `removed`: places of records that the batch layer dropped as duplicates. `left_out`: places of
    rows of the speed layer to ignore. `letters`: how the dead letters of both layers are read;
    called if rows differ. `unread`: the offsets that the speed layer's rows do not account for
    (`anabranch.protocol.merge`)."""
    nothing = left_out.slice(0, 0)

    def read(task: Callable[..., pa.Table], *of_layers: tuple[pa.Table, ...]) -> list[pa.Table]:
        tasks = [
            [partial(task, reader, some, content, *more) for some in by_task(files)]
            for files, more in zip((speed, batch), of_layers, strict=True)
        ]
        found, of_speed = run([*tasks[0], *tasks[1]]), len(tasks[0])
        return [pa.concat_tables(found[:of_speed]), pa.concat_tables(found[of_speed:])]

    digests = read(digest_files, (removed, left_out), (nothing, nothing))
    others, counts = _equal_blocks(*digests)
    shown = []
    letter_reader, of_letters = letters() if len(others) else (reader, ())
    for start in range(0, len(others), _BLOCKS):
        some = others.slice(start, _BLOCKS)
        ours, theirs = read(hash_files, (some, left_out), (some, nothing))
        at = [
            partial(hash_files, letter_reader, files, (), some, nothing)
            for files in by_task(of_letters)
        ]
        dead = [found.select(PLACE) for found in (run(at) if of_letters else [])]
        kinds, first = kinds_of(
            ours, theirs, removed, pa.concat_tables([nothing.select(PLACE), *dead]), unread
        )
        counts += kinds
        shown += first
    shown.sort(key=lambda one: (one["kind"], one["partition"], one["offset"]))
    return to_difference(counts, shown[:SAMPLE])


def by_task(files: Sequence[DataFile]) -> list[Sequence[DataFile]]:
    """Return files in groups, one for each task; at least one group."""
    return [*groups_by_size(files, lambda file: file.record_count, _TASK_ROWS)] or [()]


def _equal_blocks(speed: pa.Table, batch: pa.Table) -> tuple[pa.Table, Counter[str]]:
    """Return the blocks whose rows differ, apart from removed ones, by partition and block; and the
    kinds of the rows in all other blocks."""
    sums = "sum(rows) AS rows, sum(removed) AS removed, sum(high) AS high, sum(low) AS low"
    sides = (
        f"(SELECT kafka_partition, block, {sums} FROM {of} GROUP BY ALL)"
        for of in ("speed", "batch")
    )
    same = " AND ".join(f"coalesce(s.{n}, 0) = coalesce(b.{n}, 0)" for n in ("rows", "high", "low"))
    blocks = in_duckdb(
        f"""
        SELECT kafka_partition, block, {same} AS is_equal, coalesce(b.rows, 0)::BIGINT AS same,
            coalesce(s.removed, 0)::BIGINT AS duplicate
        FROM {next(sides)} s FULL JOIN {next(sides)} b USING (kafka_partition, block)
        ORDER BY ALL
        """,
        speed=speed,
        batch=batch,
    )
    equal, others = (
        blocks.filter(m) for m in (blocks["is_equal"], pa.compute.invert(blocks["is_equal"]))
    )
    counts = {kind: sum(equal[kind].to_pylist()) for kind in ("same", "duplicate")}
    return others.select(["kafka_partition", "block"]), Counter(counts)
