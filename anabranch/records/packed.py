"""Records that Python workers decode, as Arrow data in binary columns of a Spark frame.

A row of the frame (`PACKED`) is of one kind:

- `ROWS`: certain rows (`anabranch.records.fast_json`) in the columns of the stream's table;
- `LEFT`: records that workers left to Spark: as Kafka holds them, or as Spark decoded them, if it decodes all records;
- `REPORT`: what a task read and compared, as JSON (`Reports`).

Rows and records are in pieces of about a megabyte. Spark stores and moves them without converting their rows;
`unpacked` converts the columns that are asked for.

Of the records of compared blocks, Spark hands its own decoding to the worker, which compares the two.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.common.errors import Unexpected
from anabranch.records import UNKNOWN
from anabranch.records.fast_json import CertainRows, can_read

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

    from anabranch.config import EventTime, Stream
    from anabranch.config.columns import Column
    from anabranch.offsets.position import Offsets, Ranges

Batches = Iterable[pa.RecordBatch]
Task = Callable[[Batches], Batches]

ROWS, LEFT, REPORT = "rows", "left", "report"
PACKED = "kind STRING, data BINARY, keys BINARY"
RAW = (
    "key BINARY, value BINARY, partition INT, offset BIGINT, timestamp TIMESTAMP, ingest_hour STRING, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
"""The columns of a record as Kafka holds it, with its hour."""

PLACE = ("kafka_partition", "kafka_offset")
"""The columns of a row that say where it is in Kafka."""

BLOCK = 1_024
"""Offsets of a partition that are compared together."""

SAMPLE = 5
"""Of so many differing records, the first, the columns are reported."""

RECORD = "_record"
"""The column of a task's input with the columns of `RAW`, and `is_compared`; Spark's decoding is beside it."""

_RAW = ("key", "value", "partition", "offset", "timestamp", "ingest_hour", "headers")
_PIECE_BYTES = 2**20
_SCHEMA = pa.schema([("kind", pa.string()), ("data", pa.binary()), ("keys", pa.binary())])


@dataclass(frozen=True)
class PackSpec:
    """What a task needs of the stream and the hour. `keys`: columns to keep apart, which are read alone. `one_in`: of
    so many blocks one is compared. Picklable."""

    columns: tuple[Column, ...]
    event_time: EventTime | None
    takes_unknown: bool
    keys: tuple[str, ...]
    hour: str
    one_in: int

    @property
    def compares_all(self) -> bool:
        """Whether all records are compared, so that Spark decodes all of them."""
        return self.one_in == 1


@dataclass
class Reports:
    """What tasks read: `rows` and `left` by partition, and runs of ascending offsets `(partition, first, last)`. Of the
    rows, `compared` were compared with what Spark decodes; `differing` differ, and `sample` has places and columns of
    some, the first of each task."""

    rows: Counter[int] = field(default_factory=Counter)
    left: Counter[int] = field(default_factory=Counter)
    runs: list[tuple[int, int, int]] = field(default_factory=list)
    compared: int = 0
    differing: int = 0
    sample: list[dict[str, Any]] = field(default_factory=list)

    def is_each_once(self, ranges: Ranges) -> bool:
        """Whether each offset that was read is inside the ranges, and was read once."""
        ends: Offsets = {}
        for p, first, last in sorted(self.runs):
            start, end = ranges.get(p, (0, 0))
            if first < ends.get(p, start) or last >= end:
                return False
            ends[p] = last + 1
        return True

    def add_places(self, partitions: np.ndarray, offsets: np.ndarray) -> None:
        """Add the places of the next records that were read."""
        begins = np.flatnonzero((np.diff(partitions) != 0) | (np.diff(offsets) <= 0)) + 1
        for some in np.split(np.arange(len(offsets)), begins):
            p, first, last = (int(n) for n in (partitions[some[0]], offsets[some[0]], offsets[some[-1]]))
            if self.runs and self.runs[-1][0] == p and self.runs[-1][2] < first:
                first = self.runs.pop()[1]
            self.runs.append((p, first, last))

    def as_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(vars(self)).encode()

    @staticmethod
    def of(reports: Iterable[bytes]) -> Reports:
        """The sum of tasks' reports."""
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
    """How workers read the hour's records; None where Spark must: another format, other types, or
    selected columns.

    Records with fields that the schema does not have are certain only if the stream ignores such fields: Spark counts
    them.
    """
    if stream.format.type != "json" or stream.select is not None or not can_read(stream.columns):
        return None
    keys = (*PLACE, *stream.key)
    return PackSpec(stream.columns, stream.event_time, stream.unknown == "ignore", keys, hour, one_in)


def with_compared(raw: DataFrame, spec: PackSpec) -> DataFrame:
    """Records in the columns `RAW`, and the column `RECORD`. `value` is null in blocks that are not compared, so that
    Spark does not decode it. Lazy."""
    record = f"struct({', '.join(_RAW)}, {is_compared(spec.hour, spec.one_in)} AS is_compared) AS {RECORD}"
    return raw.selectExpr(*_RAW, record).selectExpr(
        *(f"IF({RECORD}.is_compared, value, NULL) AS value" if name == "value" else name for name in (*_RAW, RECORD))
    )


def is_compared(hour: str, one_in: int) -> str:
    """SQL for whether a record's block is compared: a choice by the hour's name, the same in each attempt. Pure."""
    if one_in == 1:
        return "true"
    return f"crc32(CAST(concat_ws(' ', '{hour}', partition, offset div {BLOCK}) AS BINARY)) % {one_in} = 0"


def packed(decoded: DataFrame, spec: PackSpec) -> DataFrame:
    """Records decoded by workers, as pieces. `decoded`: what `anabranch.records.decode` makes of `with_compared`, with
    names of unknown fields and `RECORD`, and with errors if all records are compared. Lazy."""
    return decoded.mapInArrow(_pack_task(spec), PACKED)


def unpacked(
    pieces: DataFrame, kind: str, schema: StructType | str, columns: Sequence[str] | None = None, data: str = "data"
) -> DataFrame:
    """The rows of the pieces of a kind, in the `columns` of `schema`; all by default. `data`: `keys` reads the columns
    that are kept apart. Lazy."""
    return pieces.where(f"kind = '{kind}'").select(data).mapInArrow(_unpack_task(columns), schema)


def _pack_task(spec: PackSpec) -> Task:
    def run(batches: Batches) -> Batches:
        rows, report = CertainRows(spec.columns, spec.event_time, spec.takes_unknown), Reports()
        for batch in batches:
            if not len(batch):
                continue
            record = pa.RecordBatch.from_struct_array(batch.column(RECORD))
            read = rows.read(record.select(["value", "partition", "offset", "timestamp", "ingest_hour"]))
            is_certain = np.ones(len(batch), bool)
            is_certain[read.left.to_numpy()] = False
            places = [record.column(name).to_numpy() for name in ("partition", "offset")]
            _require_rows(read.rows, *(of[is_certain] for of in places))
            report.add_places(*places)
            _count(report.rows, places[0][is_certain])
            _count(report.left, places[0][~is_certain])
            _compare(read.rows, batch, is_certain, record.column("is_compared"), spec, report)
            yield from _pieces(ROWS, read.rows, spec.keys)
            left = batch.drop_columns([RECORD]) if spec.compares_all else record.select(_RAW)
            yield from _pieces(LEFT, pa.table(left.take(read.left)))
        yield _piece(REPORT, report.as_bytes())

    return run


def _require_rows(rows: pa.Table, partitions: np.ndarray, offsets: np.ndarray) -> None:
    """Raises Unexpected unless there is a row for each record that was not left, in order."""
    found = [rows.column(name).to_numpy() for name in PLACE]
    if not all(map(np.array_equal, found, (partitions, offsets))):
        raise Unexpected(
            f"decode in a worker: expected a row for each of {len(offsets)} records that are not left, found "
            f"{len(rows)} rows, or rows of other records; nothing is published, report this"
        )


def _count(counts: Counter[int], partitions: np.ndarray) -> None:
    for p, n in zip(*np.unique(partitions, return_counts=True), strict=True):
        counts[int(p)] += int(n)


def _compare(
    rows: pa.Table,
    decoded: pa.RecordBatch,
    is_certain: np.ndarray,
    is_compared: pa.Array,
    spec: PackSpec,
    report: Reports,
) -> None:
    """Compare rows, which are those of the certain records, with what Spark decoded of all records."""
    chosen = np.flatnonzero(is_certain & np.asarray(is_compared))
    if not len(chosen):
        return
    ours, of_spark = rows.take(np.cumsum(is_certain)[chosen] - 1), decoded.take(pa.array(chosen))
    differs = {name: _differs(ours.column(name), of_spark.column(name)) for name in rows.column_names}
    verdict = of_spark.column("is_dead")
    if not spec.takes_unknown:
        unknown = pc.fill_null(pc.list_value_length(of_spark.column(UNKNOWN)), 0)
        verdict = pc.or_(verdict, pc.greater(unknown, 0))
    differs["verdict"] = np.asarray(verdict)
    places = np.flatnonzero(np.logical_or.reduce(list(differs.values())))
    report.compared += len(chosen)
    report.differing += len(places)
    for i in places[: SAMPLE - len(report.sample)]:
        partition, offset = (ours.column(name)[int(i)].as_py() for name in PLACE)
        columns = [name for name, of in differs.items() if of[i]]
        report.sample.append({"partition": partition, "offset": offset, "columns": columns})


def _differs(one: pa.ChunkedArray, other: pa.Array) -> np.ndarray:
    """Where values differ. Doubles are compared by their bits, by which 0.0 and -0.0 differ."""
    values, others = one.combine_chunks(), other.cast(one.type)
    if pa.types.is_floating(one.type):
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
    """A table as Arrow's stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue())


def tables(batches: Batches) -> Iterator[pa.Table]:
    """The rows of pieces, given their data."""
    for batch in batches:
        for data in batch.column(0):
            yield pa.ipc.open_stream(data.as_buffer()).read_all()


def _unpack_task(columns: Sequence[str] | None) -> Task:
    def run(batches: Batches) -> Batches:
        for table in tables(batches):
            yield from (table if columns is None else table.select(columns)).to_batches()

    return run
