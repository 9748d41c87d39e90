"""Records that Python workers decode, as Arrow data in binary columns of a Spark frame.

A row of the frame (`PACKED`) is of one kind:

- `ROWS`: good rows in the columns of the stream's table;
- `LEFT`: records without a row or with unknown fields, as Kafka delivered them;
- `REPORT`: the report of a task, as JSON (`Reports`).

Rows and records are in pieces of about a megabyte. Spark stores and moves them without converting
their rows; `unpacked` converts only the requested columns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame

from anabranch.common.errors import Unexpected
from anabranch.config import Stream
from anabranch.decode import Decoder, DecodeSpec, decode_spec
from anabranch.decode.headers import headers_of
from anabranch.offsets.position import Offsets, Ranges
from anabranch.records import INPUT
from anabranch.subjects.schemas import Schemas

Batches = Iterable[pa.RecordBatch]
Task = Callable[[Batches], Batches]

ROWS, LEFT, REPORT = "rows", "left", "report"
PACKED = "kind STRING, data BINARY, keys BINARY"
RAW = (
    "key BINARY, value BINARY, partition INT, offset BIGINT, timestamp TIMESTAMP, ingest_hour "
    "STRING, headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
"""The columns of a record as Kafka delivered it, with its hour."""

PLACE = ("kafka_partition", "kafka_offset")
"""The columns of a row with its place in Kafka."""

_RAW = ("key", "value", "partition", "offset", "timestamp", "ingest_hour", "headers")
_PIECE_BYTES = 2**20
_SCHEMA = pa.schema([("kind", pa.string()), ("data", pa.binary()), ("keys", pa.binary())])


@dataclass(frozen=True)
class PackSpec:
    """The parameters of a task. `keys`: columns that are also stored apart, to be read alone.
    Picklable."""

    decode: DecodeSpec
    keys: tuple[str, ...]
    hour: str


@dataclass
class Reports:
    """Counts of the records that tasks read: `rows` and `left` by partition, and runs of ascending
    offsets `(partition, first, last)`."""

    rows: Counter[int] = field(default_factory=Counter)
    left: Counter[int] = field(default_factory=Counter)
    runs: list[tuple[int, int, int]] = field(default_factory=list)

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
        return total


def pack_spec(stream: Stream, schemas: Schemas, hour: str, secret: bytes | None) -> PackSpec:
    """Return the parameters for workers to read the hour's records."""
    spec = decode_spec(stream, schemas.known, lists_unknown=True, secret=secret)
    return PackSpec(spec, (*PLACE, *stream.key), hour)


def packed(records: DataFrame, spec: PackSpec) -> DataFrame:
    """Decode the hour's records, in the columns of Spark's Kafka source, in workers; return pieces.
    Lazy."""
    return records.selectExpr(*INPUT).mapInArrow(_pack_task(spec), PACKED)


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
        decoder, report = Decoder(spec.decode), Reports()
        for batch in batches:
            if not len(batch):
                continue
            records = batch.append_column("ingest_hour", pa.repeat(spec.hour, len(batch)))
            decoded = decoder.decode(records)
            is_row = np.ones(len(batch), bool)
            is_row[[*decoded.errors, *decoded.unknown]] = False
            rows = decoded.rows if is_row.all() else decoded.rows.filter(pa.array(is_row))
            partitions, offsets = (
                records.column(name).to_numpy() for name in ("partition", "offset")
            )
            _require_rows(rows, partitions[is_row], offsets[is_row])
            report.add_places(partitions, offsets)
            _count(report.rows, partitions[is_row])
            _count(report.left, partitions[~is_row])
            yield from _pieces(ROWS, rows, spec.keys)
            yield from _pieces(LEFT, _as_read(records, pa.array(np.flatnonzero(~is_row))))
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


def _as_read(records: pa.RecordBatch, places: pa.Array) -> pa.Table:
    """Return the records at `places` in the columns of `RAW`."""
    some = pa.table(records.take(places))
    headers = headers_of(some.column("headers").combine_chunks())
    some = some.set_column(some.column_names.index("headers"), "headers", headers)
    return some.select(_RAW)


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
