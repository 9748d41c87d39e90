"""Records that Python workers decode, as Arrow data in binary columns of a Spark frame.

A row of the frame (`PACKED`) is a piece of at most about a megabyte, of one kind:

- `ROWS`: certain rows (`anabranch.records.fast_json`) in the columns of the stream's table;
- `LEFT`: records as Kafka holds them that workers left to Spark;
- `COMPARED`: records as Kafka holds them whose certain rows are compared with what Spark decodes.

Spark stores and moves such pieces without converting their rows. `unpacked` converts the columns that are asked for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from anabranch.common.errors import Unexpected
from anabranch.records.fast_json import CertainRows, can_read

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from anabranch.config import EventTime, Stream
    from anabranch.config.columns import Column

Batches = Iterable[pa.RecordBatch]
Task = Callable[[Batches], Batches]

ROWS, LEFT, COMPARED = "rows", "left", "compared"
PACKED = "kind STRING, records BIGINT, data BINARY, keys BINARY"
RAW = (
    "key BINARY, value BINARY, partition INT, offset BIGINT, timestamp TIMESTAMP, ingest_hour STRING, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>"
)
"""The columns of a record as Kafka holds it, with its hour."""

PLACE = ("kafka_partition", "kafka_offset")
"""The columns of a row that say where it is in Kafka."""

BLOCK = 1_024
"""Offsets of a partition that are compared together."""

_RAW = ("key", "value", "partition", "offset", "timestamp", "ingest_hour", "headers")
_PIECE_BYTES = 2**20
_SCHEMA = pa.schema([("kind", pa.string()), ("records", pa.int64()), ("data", pa.binary()), ("keys", pa.binary())])


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


def pack_spec(stream: Stream, hour: str, one_in: int) -> PackSpec | None:
    """How workers read the hour's records; None where Spark must: another format, or other types.

    Records with fields that the schema does not have are certain only if the stream ignores such fields: Spark counts
    them.
    """
    if stream.format.type != "json" or not can_read(stream.columns):
        return None
    keys = (*PLACE, *stream.key)
    return PackSpec(stream.columns, stream.event_time, stream.unknown == "ignore", keys, hour, one_in)


def packed(raw: DataFrame, spec: PackSpec) -> DataFrame:
    """Records in the columns `RAW`, decoded by workers, as pieces. Lazy."""
    return raw.select(*_RAW).mapInArrow(_pack_task(spec), PACKED)


def unpacked(
    pieces: DataFrame, kind: str, ddl: str, columns: Sequence[str] | None = None, data: str = "data"
) -> DataFrame:
    """The rows of the pieces of a kind, in the `columns` of `ddl`; all by default. `data`: `keys` reads the columns
    that are kept apart. Lazy."""
    return pieces.where(f"kind = '{kind}'").select(data).mapInArrow(_unpack_task(columns), ddl)


def is_compared(hour: str, partition: int, block: int, one_in: int) -> bool:
    """Whether a block of a partition is compared: a choice by the hour's name, the same in each attempt. Pure."""
    return zlib.crc32(f"{hour} {partition} {block}".encode()) % one_in == 0


def _pack_task(spec: PackSpec) -> Task:
    def run(batches: Batches) -> Batches:
        rows = CertainRows(spec.columns, spec.event_time, spec.takes_unknown)
        for batch in batches:
            if not len(batch):
                continue
            read = rows.read(batch.select(["value", "partition", "offset", "timestamp", "ingest_hour"]))
            if len(read.rows) + len(read.left) != len(batch):
                raise Unexpected(
                    f"decode in a worker: expected each of {len(batch)} records as a row or left, found "
                    f"{len(read.rows)} and {len(read.left)}; nothing is published, report this"
                )
            yield from _pieces(ROWS, read.rows, spec.keys)
            yield from _pieces(LEFT, pa.table(batch.take(read.left)))
            yield from _pieces(COMPARED, pa.table(_compared(batch, read.left, spec)))

    return run


def _compared(batch: pa.RecordBatch, left: pa.Array, spec: PackSpec) -> pa.RecordBatch:
    """The records of compared blocks, without those left to Spark."""
    partitions = batch.column("partition").to_numpy()
    blocks = batch.column("offset").to_numpy() // BLOCK
    # Records come in the order of their offsets, so a batch has few runs of one block.
    is_first = (np.diff(blocks) != 0) | (np.diff(partitions) != 0)
    starts = np.concatenate(([0], np.flatnonzero(is_first) + 1))
    chosen = [is_compared(spec.hour, int(partitions[i]), int(blocks[i]), spec.one_in) for i in starts]
    mask = np.repeat(chosen, np.diff(np.append(starts, len(batch))))
    mask[left.to_numpy()] = False
    return batch.filter(pa.array(mask))


def _pieces(kind: str, table: pa.Table, keys: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    if not len(table):
        return
    number = max(1, table.nbytes // _PIECE_BYTES)
    step = -(-len(table) // number)
    for start in range(0, len(table), step):
        some = table.slice(start, step)
        apart = as_bytes(some.select(keys)) if keys else None
        columns = [pa.array([kind]), pa.array([len(some)], pa.int64())]
        columns += [pa.array([as_bytes(some)], pa.binary()), pa.array([apart], pa.binary())]
        yield pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)


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
