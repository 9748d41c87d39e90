"""Records that Python workers decode, as Arrow data in binary columns of a Spark frame.

A row of the frame (`PACKED`) is of one kind:

- `ROWS`: certain rows (`anabranch.records.fast_json`) in the columns of the stream's table;
- `LEFT`: records that workers left to Spark, as Kafka delivered them;
- `COMPARED`: certain records of compared blocks, as Kafka delivered them, each with its row
  (`ROW`);
- `REPORT`: the report of a task, as JSON (`Reports`).

Rows and records are in pieces of about a megabyte. Spark stores and moves them without converting
their rows; `unpacked` converts only the requested columns.

Spark decodes the records that were left and those of compared blocks. For the latter, workers
compare its result with their rows (`compared`).
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from anabranch.common.errors import Unexpected
from anabranch.config import EventTime, Stream
from anabranch.config.columns import Column, can_workers_read
from anabranch.offsets.position import Offsets, Ranges
from anabranch.records import UNKNOWN
from anabranch.records.fast_json import CertainRows

Batches = Iterable[pa.RecordBatch]
Task = Callable[[Batches], Batches]

ROWS, LEFT, COMPARED, REPORT = "rows", "left", "compared", "report"
PACKED = "kind STRING, data BINARY, keys BINARY"
RAW = (
    "key BINARY, value BINARY, partition INT, offset BIGINT, timestamp TIMESTAMP, ingest_hour "
    "STRING, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
"""The columns of a record as Kafka delivered it, with its hour."""

PLACE = ("kafka_partition", "kafka_offset")
"""The columns of a row with its place in Kafka."""

BLOCK = 1_024
"""Number of offsets of a partition that are compared together."""

SAMPLE = 5
"""Maximum number of differing records that a task reports with their columns."""

ROW = "_row"
"""The column beside those of `RAW` with the row of a compared record; null for a record that was
left."""

# Headers are text here: Spark adds up the sizes of all columns for every record, which takes
# several times as long for an array as for all others. Most records have no headers.
_INPUT = (
    "key",
    "value",
    "partition",
    "offset",
    "timestamp",
    "CAST(to_json(transform(headers, h -> struct(hex(h.key) AS key, hex(h.value) AS value))) AS "
    "BINARY) AS headers",
)
_RAW = ("key", "value", "partition", "offset", "timestamp", "ingest_hour", "headers")
_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
_PIECE_BYTES = 2**20
_SCHEMA = pa.schema([("kind", pa.string()), ("data", pa.binary()), ("keys", pa.binary())])


@dataclass(frozen=True)
class PackSpec:
    """The parameters of a task. `keys`: columns that are also stored apart, to be read alone.
    `one_in`: one in this many blocks is compared. Picklable."""

    columns: tuple[Column, ...]
    event_time: EventTime | None
    takes_unknown: bool
    keys: tuple[str, ...]
    hour: str
    one_in: int


@dataclass
class Reports:
    """Counts of the records that tasks read: `rows` and `left` by partition, and runs of ascending
    offsets `(partition, first, last)`. `compared` rows are compared with Spark's, `differing` of
    them differ, and `sample` has places and columns of each task's first differing records."""

    rows: Counter[int] = field(default_factory=Counter)
    left: Counter[int] = field(default_factory=Counter)
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    compared: int = 0
    differing: int = 0
    sample: list[dict[str, Any]] = field(default_factory=list)

    def is_each_once(self, ranges: Ranges) -> bool:
        """Return whether each offset that was read is inside the ranges and was read once."""
        ends: Offsets = {}
        for p, first, last in sorted(self.runs):
            start, end = ranges.get(p, (0, 0))
            if first < ends.get(p, start) or last >= end:
                return False
            ends[p] = last + 1
        return True

    def add_places(self, partitions: np.ndarray, offsets: np.ndarray) -> None:
        """Add the places of the next records."""
        begins = np.flatnonzero((np.diff(partitions) != 0) | (np.diff(offsets) <= 0)) + 1
        for some in np.split(np.arange(len(offsets)), begins):
            p, first, last = (
                int(n) for n in (partitions[some[0]], offsets[some[0]], offsets[some[-1]])
            )
            if self.runs and self.runs[-1][0] == p and self.runs[-1][2] < first:
                first = self.runs.pop()[1]
            self.runs.append((p, first, last))

    def as_bytes(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @staticmethod
    def of(reports: Iterable[bytes]) -> Reports:
        """Return the sum of tasks' reports."""
        total = Reports()
        for report in map(json.loads, reports):
            total.rows.update({int(p): n for p, n in report["rows"].items()})
            total.left.update({int(p): n for p, n in report["left"].items()})
            total.runs += map(tuple, report["runs"])
            total.compared += report["compared"]
            total.differing += report["differing"]
            total.sample += report["sample"]
        return total


def pack_spec(stream: Stream, hour: str, one_in: int) -> PackSpec | None:
    """Return the parameters for workers to read the hour's records; None if Spark has to, because
    of another format, other types or selected columns.

    Records with fields that the schema lacks are certain only if the stream ignores such fields:
    otherwise Spark counts them.
    """
    is_read_by_spark = stream.format.type != "json" or stream.select is not None
    if is_read_by_spark or not can_workers_read(stream.columns):
        return None
    keys = (*PLACE, *stream.key)
    return PackSpec(
        stream.columns, stream.event_time, stream.unknown == "ignore", keys, hour, one_in
    )


def is_compared(hour: str, partitions: np.ndarray, offsets: np.ndarray, one_in: int) -> np.ndarray:
    """Return for each record whether its block is compared. The choice depends on the hour, the
    partition and the block, so every attempt makes the same one. Pure."""
    if not len(offsets):
        return np.zeros(0, bool)
    blocks = offsets // BLOCK
    begins = np.flatnonzero(np.r_[True, (np.diff(partitions) != 0) | (np.diff(blocks) != 0)])
    places = zip(partitions[begins].tolist(), blocks[begins].tolist(), strict=True)
    is_chosen = [zlib.crc32(f"{hour} {p} {block}".encode()) % one_in == 0 for p, block in places]
    return np.repeat(is_chosen, np.diff(np.r_[begins, len(offsets)]))


def packed(records: DataFrame, spec: PackSpec) -> DataFrame:
    """Decode the hour's records, in the columns of Spark's Kafka source, in workers; return pieces.
    Lazy."""
    return records.selectExpr(*_INPUT).mapInArrow(_pack_task(spec), PACKED)


def compared(decoded: DataFrame, spec: PackSpec) -> DataFrame:
    """Compare the workers' rows (`ROW`) with Spark's rows of the same records, decoded with names
    of unknown fields. Return a report of each task, as JSON in the column `data`. Lazy."""
    names = decoded.select(f"{ROW}.*").columns
    columns = (f"`{name}`" for name in (*names, "is_dead", UNKNOWN, ROW))
    return (
        decoded.where(f"{ROW} IS NOT NULL")
        .selectExpr(*columns)
        .mapInArrow(_compare_task(spec), "data BINARY")
    )


def unpacked(
    pieces: DataFrame,
    kinds: Sequence[str],
    ddl: str,
    columns: Sequence[str] | None = None,
    data: str = "data",
) -> DataFrame:
    """Return the rows of pieces of these kinds, in the `columns` of `ddl`, by default all. With
    `data="keys"`, read the columns that are kept apart. Lazy."""
    of_kinds = pieces.where(f"kind IN ({', '.join(map(repr, kinds))})")
    return of_kinds.select(data).mapInArrow(_unpack_task(columns), ddl)


def _pack_task(spec: PackSpec) -> Task:
    def run(batches: Batches) -> Batches:
        rows, report = CertainRows(spec.columns, spec.event_time, spec.takes_unknown), Reports()
        for batch in batches:
            if not len(batch):
                continue
            records = batch.append_column("ingest_hour", pa.repeat(spec.hour, len(batch)))
            read = rows.read(
                records.select(["value", "partition", "offset", "timestamp", "ingest_hour"])
            )
            is_certain = np.ones(len(batch), bool)
            is_certain[read.left.to_numpy()] = False
            partitions, offsets = (
                records.column(name).to_numpy() for name in ("partition", "offset")
            )
            _require_rows(read.rows, partitions[is_certain], offsets[is_certain])
            report.add_places(partitions, offsets)
            _count(report.rows, partitions[is_certain])
            _count(report.left, partitions[~is_certain])
            chosen = np.flatnonzero(
                is_certain & is_compared(spec.hour, partitions, offsets, spec.one_in)
            )
            report.compared += len(chosen)
            yield from _pieces(ROWS, read.rows, spec.keys)
            without_rows = pa.nulls(len(read.left), pa.struct(read.rows.schema))
            yield from _pieces(LEFT, _as_read(records, read.left, without_rows))
            its_rows = read.rows.take(np.cumsum(is_certain)[chosen] - 1)
            yield from _pieces(
                COMPARED, _as_read(records, pa.array(chosen), its_rows.to_struct_array())
            )
        yield _piece(REPORT, report.as_bytes())

    return run


def _require_rows(rows: pa.Table, partitions: np.ndarray, offsets: np.ndarray) -> None:
    """Raise Unexpected unless there is a row for each record that was not left, in order."""
    found = [rows.column(name).to_numpy() for name in PLACE]
    if not all(map(np.array_equal, found, (partitions, offsets))):
        raise Unexpected(
            f"decode in a worker: expected a row for each of {len(offsets)} records that are not "
            f"left, found {len(rows)} rows, or rows of other records; nothing is published, "
            "report this"
        )


def _count(counts: Counter[int], partitions: np.ndarray) -> None:
    for p, n in zip(*np.unique(partitions, return_counts=True), strict=True):
        counts[int(p)] += int(n)


def _as_read(
    records: pa.RecordBatch, places: pa.Array, rows: pa.Array | pa.ChunkedArray
) -> pa.Table:
    """Return the records at `places` in the columns of `RAW`, each with its row or null."""
    some = pa.table(records.take(places))
    headers = pa.array(map(_headers, some.column("headers").to_pylist()), _HEADERS)
    some = some.set_column(some.column_names.index("headers"), "headers", headers)
    return some.select(_RAW).append_column(ROW, rows)


def _headers(text: bytes | None) -> list[dict[str, Any]] | None:
    """Parse a record's headers from the text in `_INPUT`."""
    if text is None:
        return None
    # A null value is null or absent, depending on `spark.sql.jsonGenerator.ignoreNullFields`.
    found = (
        (bytes.fromhex(header["key"]).decode(), header.get("value")) for header in json.loads(text)
    )
    return [
        {"key": key, "value": bytes.fromhex(value) if value is not None else None}
        for key, value in found
    ]


def _compare_task(spec: PackSpec) -> Task:
    def run(batches: Batches) -> Batches:
        report = Reports()
        for batch in batches:
            if len(batch):
                rows = pa.RecordBatch.from_struct_array(batch.column(ROW))
                _compare(rows, batch, spec, report)
        yield pa.RecordBatch.from_pydict({"data": pa.array([report.as_bytes()], pa.binary())})

    return run


def _compare(
    ours: pa.RecordBatch, of_spark: pa.RecordBatch, spec: PackSpec, report: Reports
) -> None:
    """Compare workers' rows with Spark's rows of the same records in the same order."""
    differs = {
        name: _differs(ours.column(name), of_spark.column(name)) for name in ours.schema.names
    }
    verdict = of_spark.column("is_dead")
    if not spec.takes_unknown:
        unknown = pc.fill_null(pc.list_value_length(of_spark.column(UNKNOWN)), 0)
        verdict = pc.or_(verdict, pc.greater(unknown, 0))
    differs["verdict"] = np.asarray(verdict)
    places = np.flatnonzero(np.logical_or.reduce(list(differs.values())))
    report.compared += len(ours)
    report.differing += len(places)
    for i in places[: SAMPLE - len(report.sample)]:
        partition, offset = (ours.column(name)[int(i)].as_py() for name in PLACE)
        columns = [name for name, mask in differs.items() if mask[i]]
        report.sample.append({"partition": partition, "offset": offset, "columns": columns})


def _differs(values: pa.Array, other: pa.Array) -> np.ndarray:
    """Return where values differ. Doubles are compared by their bits: 0.0 and -0.0 differ."""
    others = other.cast(values.type)
    if pa.types.is_floating(values.type):
        values, others = values.view(pa.int64()), others.view(pa.int64())
    is_same = pc.fill_null(pc.equal(values, others), False)
    both_null = pc.and_(values.is_null(), others.is_null())
    return np.asarray(pc.invert(pc.or_(is_same, both_null)))


def _pieces(kind: str, table: pa.Table, keys: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    if not len(table):
        return
    number = max(1, table.nbytes // _PIECE_BYTES)
    step = -(-len(table) // number)
    for start in range(0, len(table), step):
        some = table.slice(start, step)
        yield _piece(kind, as_bytes(some), as_bytes(some.select(keys)) if keys else None)


def _piece(kind: str, data: bytes, keys: bytes | None = None) -> pa.RecordBatch:
    columns = [pa.array([kind]), pa.array([data], pa.binary()), pa.array([keys], pa.binary())]
    return pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


def as_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def tables(batches: Batches) -> Iterator[pa.Table]:
    """Yield the rows of pieces as tables, from the first column of the batches."""
    for batch in batches:
        for data in batch.column(0):
            yield pa.ipc.open_stream(data.as_buffer()).read_all()


def _unpack_task(columns: Sequence[str] | None) -> Task:
    def run(batches: Batches) -> Batches:
        for table in tables(batches):
            yield from (table if columns is None else table.select(columns)).to_batches()

    return run
