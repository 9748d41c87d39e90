"""Rows of imported hours: duplicates, checksum, and files, which are read back."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.typedef import Record

from anabranch.common.errors import Refused, Terminal
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.manifests import own_spec_id
from anabranch.iceberg.partitions import fields_of, partitioning_of
from anabranch.iceberg.rewriting import is_same, read_batches, write_file
from anabranch.iceberg.snapshot_writer import delete_quietly
from anabranch.lifecycle.importing.sources import HOUR, OF_KAFKA, PLACE, TIME
from anabranch.offsets.hours import from_number
from anabranch.protocol.imported import PARTITION, first_offset
from serving_layer.query.datasets import connected, key_part, quoted

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from numpy.typing import NDArray
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

_ROW_GROUP = 1_000_000
_MEMORY = "2GB"
_AT = "_import_at"


def offsets(hours: NDArray[Any]) -> NDArray[Any]:
    """Return the offset of each row, from its hour's first one on; rows of an hour are
    consecutive."""
    starts = (
        np.flatnonzero(np.diff(hours, prepend=hours[:1] - 1))
        if len(hours)
        else np.zeros(0, np.int64)
    )
    counts = np.diff(starts, append=len(hours))
    first = [first_offset(from_number(hour)) for hour in hours[starts].tolist()]
    within = np.arange(len(hours), dtype=np.int64) - np.repeat(starts, counts)
    return within + np.repeat(np.array(first, np.int64), counts)


def find_duplicates(
    rows: pa.Table, key: Iterable[str], lookback: int, later: pa.Table
) -> NDArray[Any]:
    """Return the mask of `rows`, ordered by hour, that repeat another row's key: an earlier row in
    the same hour or the `lookback` hours before, or a row of `later` in the same hour or the
    `lookback` hours after. `later` are rows of the table, with the key and `HOUR`.

    Null parts of a key equal each other, and empty texts are null. A row whose key is null in every
    part is no duplicate.
    """
    names = list(key)
    if not names:
        return np.zeros(len(rows), bool)
    columns = ", ".join(map(quoted, names))
    return _mask(
        rows.select([*names, HOUR]),
        later.select([*names, HOUR]).append_column(_AT, pa.nulls(len(later), pa.int64())),
        f"""
        SELECT {_AT} FROM (
            SELECT {_AT},
                lag({HOUR}) OVER (
                    PARTITION BY {columns}, {_AT} IS NULL ORDER BY {HOUR}, {_AT}
                ) AS before,
                min(CASE WHEN {_AT} IS NULL THEN {HOUR} END) OVER (
                    PARTITION BY {columns} ORDER BY {HOUR}
                    RANGE BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING
                ) AS after,
                {HOUR}
            FROM (SELECT {_parts(names)} FROM (FROM ours UNION ALL FROM theirs))
            WHERE {_is_key(names)}
        )
        WHERE {_AT} IS NOT NULL AND (before >= {HOUR} - {lookback} OR after <= {HOUR} + {lookback})
        """,
    )


def has_key(rows: pa.Table, key: Iterable[str]) -> NDArray[Any]:
    """Return the mask of `rows` whose key is not null, or an empty text, in every part."""
    names = list(key)
    query = f"SELECT {_AT} FROM (SELECT {_parts(names)} FROM ours) WHERE {_is_key(names)}"
    return _mask(rows.select(names), rows.select(names).slice(0, 0), query)


def find_known(rows: pa.Table, key: Iterable[str], known: pa.Table | ds.Dataset) -> NDArray[Any]:
    """Return the mask of `rows` whose key is in `known`; other columns are not read. Null parts of
    a key equal each other; a key that is null in every part never matches. Empty texts are null."""
    names = list(key)
    if not names:
        return np.zeros(len(rows), bool)
    columns = ", ".join(map(quoted, names))
    equal = " AND ".join(
        f"ours.{quoted(name)} IS NOT DISTINCT FROM t.{quoted(name)}" for name in names
    )
    return _mask(
        rows.select(names),
        known,
        f"""
        WITH named AS (SELECT {_parts(names)} FROM ours)
        SELECT {_AT} FROM (SELECT * FROM named WHERE {_is_key(names)}) ours
        SEMI JOIN (
            SELECT DISTINCT {columns}
            FROM (SELECT {_parts(names)} FROM (SELECT {columns} FROM theirs))
        ) t ON {equal}
        """,
    )


def _parts(names: Iterable[str]) -> str:
    return f"* REPLACE ({', '.join(f'{key_part(quoted(n))} AS {quoted(n)}' for n in names)})"


def _is_key(names: Iterable[str]) -> str:
    return " OR ".join(f"{quoted(name)} IS NOT NULL" for name in names)


def _mask(ours: pa.Table, theirs: pa.Table | ds.Dataset, query: str) -> NDArray[Any]:
    """Return the mask of the rows of `ours` that a query of `ours` and `theirs` returns, by their
    row numbers (column `_AT`)."""
    numbered = ours.append_column(_AT, pa.array(np.arange(len(ours)), pa.int64()))
    with connected(_MEMORY) as connection:
        connection.register("ours", numbered)
        connection.register("theirs", theirs)
        found = connection.sql(query).fetchnumpy()[_AT]
    mask = np.zeros(len(ours), bool)
    mask[np.asarray(found, np.int64)] = True
    return mask


def checksum(rows: pa.Table) -> str:
    """Return a checksum of the rows' values in their order: the first 128 bits of SHA-256, as
    hexadecimal digits."""
    digest = hashlib.sha256()
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        digest.update(f"{name} {len(column)} ".encode())
        _add(
            digest,
            pa.concat_arrays(column.chunks) if column.num_chunks else pa.nulls(0, column.type),
        )
    return digest.hexdigest()[:32]


def _add(digest: Any, values: pa.Array) -> None:
    kind, t = values.type, pa.types
    digest.update(np.packbits(values.is_valid().to_numpy(zero_copy_only=False)).tobytes())
    if t.is_struct(kind):
        for field in range(kind.num_fields):
            _add(digest, pc.struct_field(values, [field]))
        return
    present = values.drop_null()
    if t.is_map(kind):
        digest.update(repr(present.to_pylist()).encode())
    elif t.is_list(kind) or t.is_large_list(kind):
        digest.update(pc.list_value_length(present).cast(pa.int64()).to_numpy().tobytes())
        _add(digest, pc.list_flatten(present))
    elif t.is_boolean(kind):
        digest.update(present.cast(pa.uint8()).to_numpy().tobytes())
    elif t.is_decimal(kind):
        _add(digest, present.cast(pa.string()))
    elif t.is_temporal(kind):
        digest.update(
            present.view(pa.int32() if kind.bit_width == 32 else pa.int64()).to_numpy().tobytes()
        )
    elif t.is_integer(kind) or t.is_floating(kind):
        digest.update(present.to_numpy().tobytes())
    else:
        binary = present.cast(pa.large_binary())
        digest.update(pc.binary_length(binary).cast(pa.int64()).to_numpy().tobytes())
        digest.update(b"".join(binary.to_pylist()))


@dataclass(frozen=True)
class TableRows:
    """A writer of source rows as rows of a table. `event_time`: the column of the event time; None
    if there is none."""

    table: Table
    event_time: str | None

    def converted(self, rows: pa.Table, offsets: NDArray[Any]) -> pa.Table:
        """Return source rows as rows of the table, with their offsets."""
        hours, times = rows[HOUR].to_numpy(), rows[TIME]
        distinct, index = np.unique(hours, return_inverse=True)
        ingest = pa.array([from_number(n) for n in distinct.tolist()], pa.large_string()).take(
            pa.array(index)
        )
        at = times if self.event_time is None else pc.coalesce(rows[self.event_time], times)
        columns = {
            **{
                name: rows[name]
                for name in rows.column_names
                if name not in (HOUR, TIME, OF_KAFKA, *PLACE)
            },
            "kafka_partition": pa.array(np.full(len(rows), PARTITION, np.int32)),
            "kafka_offset": pa.array(offsets),
            "kafka_timestamp": pc.if_else(rows[OF_KAFKA], times, None),
            "ingest_hour": ingest,
            "event_date": pc.cast(pc.floor_temporal(at, unit="day"), pa.date32()),
        }
        schema = schema_to_pyarrow(self.table.schema())
        return pa.table([columns[name] for name in schema.names], schema=schema)

    def write(self, rows: pa.Table) -> list[DataFile]:
        """Write rows of the table to one file for each partition, and read each back. Deletes
        all files after an error. Raises Terminal if the rows read back differ, Transient."""
        partitions = partitioning_of(self.table)
        if partitions is None:
            raise Refused(
                f"import into {'.'.join(self.table.name())}: expected partition fields as `apply` "
                f"makes them, found {', '.join(fields_of(self.table))}; nothing was written"
            )
        written: list[DataFile] = []
        paths: list[str] = []
        try:
            for partition, chosen in partitions.split(rows):
                paths.append(partitions.path(partition, f"imported-{uuid.uuid4().hex}.parquet"))
                some = rows if chosen is None else rows.take(chosen)
                written.append(self._write(paths[-1], Record(*partition), some))
        except BaseException:
            delete_quietly(self.table, paths)
            raise
        return written

    def _write(self, path: str, partition: Record, rows: pa.Table) -> DataFile:
        table = self.table
        groups = (rows.slice(at, _ROW_GROUP) for at in range(0, len(rows), _ROW_GROUP))
        with lake_errors(f"write {path}"):
            data_file = write_file(table, path, rows.schema, groups, partition, own_spec_id(table))
            if not is_same(read_batches(table, (data_file,)), iter(rows.to_batches())):
                raise Terminal(
                    f"import: expected to read the {len(rows)} rows that were written to {path}, "
                    "found others; the file was deleted, nothing was published; report this"
                )
        return data_file
