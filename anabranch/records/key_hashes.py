"""Hashes of the keys of events, equal for equal keys. Only candidates for duplicates are found by
them; the keys themselves decide."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import duckdb
import pyarrow as pa


def hash_keys(rows: pa.Table, key: Sequence[str]) -> pa.ChunkedArray:
    """Return the hash of each row's key; null for a key without a part, which names no event. Types
    that a column can be widened to hash alike, and so do an empty text and null."""
    parts = [_part(f"c{i}", rows.schema.field(name).type) for i, name in enumerate(key)]
    columns = {f"c{i}": _plain(rows.column(name)) for i, name in enumerate(key)}
    is_named = " OR ".join(f"{part} IS NOT NULL" for part in parts)
    sql = f"SELECT CASE WHEN {is_named} THEN hash({', '.join(parts)}) END FROM keys"
    hashes = in_duckdb(sql, keys=pa.table(columns)).column(0)
    return pa.chunked_array([chunk.view(pa.int64()) for chunk in hashes.chunks], pa.int64())


def in_duckdb(sql: str, **tables: pa.Table | pa.RecordBatchReader) -> pa.Table:
    """Return the result of a query of these tables, on one core."""
    with _connection().cursor() as cursor:
        for name, table in tables.items():
            cursor.register(name, table)
        return cursor.sql(sql).to_arrow_table()


@lru_cache(maxsize=1)
def _connection() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(config={"threads": 1})
    # A nested time is hashed by its text, which must not depend on the machine.
    connection.execute("SET TimeZone = 'UTC'")
    # The size of a stream of rows is unknown: a join would keep them all in memory, not the other
    # side.
    connection.execute("SET disabled_optimizers = 'join_order,build_side_probe_side'")
    return connection


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column


def _part(name: str, kind: pa.DataType) -> str:
    """Return SQL for a part of a key: an empty text is null, and a narrower type as the widest."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return f"nullif({name}, '')"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return f"CASE WHEN octet_length({name}) > 0 THEN {name} END"
    if pa.types.is_integer(kind):
        return f"CAST({name} AS BIGINT)"
    if pa.types.is_floating(kind):
        return f"CAST({name} AS DOUBLE)"
    # By its text, since its precision can grow.
    return f"CAST({name} AS VARCHAR)" if pa.types.is_decimal(kind) else name
