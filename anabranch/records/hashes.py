"""Keys of events, and their hashes, equal for equal keys: only candidates for duplicates are found
by hashes; the keys themselves decide. And hashes of the rows of data files, in tasks: what the
comparison of the layers needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyiceberg.manifest import DataFile
from pyspark.sql import DataFrame

from anabranch.common.arrays import find_sorted
from anabranch.iceberg.rewriting import RowReader

HASH = "key-hash"
"""The column with the hash of a key. No column of a stream can have this name."""


def hash_keys(rows: pa.Table, key: Sequence[str]) -> pa.ChunkedArray:
    """Return the hash of each row's key; null for a key without a part, which names no event. Types
    that a column can be widened to hash alike, and so do an empty text and null."""
    parts = key_parts(rows, key)
    sql = f"SELECT CASE WHEN {_names_event(parts)} THEN hash({', '.join(parts)}) END FROM keys"
    hashes = in_duckdb(sql, keys=rows.select(key)).column(0)
    return pa.chunked_array([chunk.view(pa.int64()) for chunk in hashes.chunks], pa.int64())


def key_parts(rows: pa.Table, key: Sequence[str]) -> list[str]:
    """Return SQL for the parts of a key, whose values are equal if the keys are."""
    return [_part('"' + c.replace('"', '""') + '"', rows.schema.field(c).type) for c in key]


def _names_event(parts: Sequence[str]) -> str:
    """Return the SQL condition that a key with these parts names an event."""
    return " OR ".join(f"{part} IS NOT NULL" for part in parts)


def find_keys(
    reader: RowReader,
    files: Sequence[DataFile],
    key: Sequence[str],
    hashes: NDArray[np.int64],
    most: int,
) -> pa.Table:
    """Return the keys of the rows of files with their HASH, if it is one of these (sorted). If more
    than `most` have one, return only some of them, more than `most` too."""
    source = reader.read(files, key)
    found = [_with_hash(source.schema.empty_table(), key)]
    for batch in source:
        rows = _with_hash(pa.table(batch), key)
        found.append(rows.filter(pa.array(find_sorted(rows.column(HASH).to_numpy(), hashes) >= 0)))
        if sum(map(len, found)) > most:
            break
    return pa.concat_tables(found)


def _with_hash(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return the rows whose key names an event, with its hash."""
    rows = rows.append_column(HASH, hash_keys(rows, key))
    return rows.filter(rows.column(HASH).is_valid())


def keys_at(
    reader: RowReader, files: Sequence[DataFile], key: Sequence[str], places: pa.Table
) -> pa.Table:
    """Return the keys of the rows at these places."""
    columns = [*dict.fromkeys((*places.column_names, *key))]
    at = ", ".join(places.column_names)
    sql = f"FROM rows WHERE ({at}) IN (SELECT ({at}) FROM places)"
    return in_duckdb(sql, rows=reader.read(files, columns), places=places)


def have_same_keys(
    reader: RowReader, files: Sequence[DataFile], others: Sequence[DataFile], key: Sequence[str]
) -> bool:
    """Return whether files' rows name the same events as others'. Reads keys into memory."""
    one, other = (reader.read(of, key).read_all() for of in (files, others))
    parts = key_parts(one, key)
    named = _names_event(parts)
    # Null equals null in EXCEPT, as in a part of a key.
    first, second = (f"(SELECT {', '.join(parts)} FROM {t} WHERE {named})" for t in ("a", "b"))
    sql = f"({first} EXCEPT {second}) UNION ALL ({second} EXCEPT {first}) LIMIT 1"
    return not len(in_duckdb(sql, a=one, b=other))


def in_duckdb(sql: str, **tables: pa.Table | pa.RecordBatchReader) -> pa.Table:
    """Return the result of a query of these tables, on one core."""
    with _connection().cursor() as cursor:
        for name, table in tables.items():
            cursor.register(name, table)
        return cursor.sql(sql).to_arrow_table()


@lru_cache(maxsize=1)
def _connection() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(config={"threads": 1})
    # A nested time is hashed by its text, which must not depend on the machine. GLOBAL: cursors do
    # not take over what is set for this connection alone.
    connection.execute("SET GLOBAL TimeZone = 'UTC'")
    # The size of a stream of rows is unknown: a join would keep them all in memory, not the other
    # side.
    connection.execute("SET disabled_optimizers = 'join_order,build_side_probe_side'")
    return connection


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
    if pa.types.is_timestamp(kind):
        return f"epoch_us({name})"
    # By its text, since its precision can grow.
    return f"CAST({name} AS VARCHAR)" if pa.types.is_decimal(kind) else name


_BLOCK_BITS = 10
PLACE = ("kafka_partition", "kafka_offset")
"""The columns of a row with its place in Kafka."""

_AT = ", ".join(PLACE)
_BLOCK = f"kafka_offset >> {_BLOCK_BITS}"


def digest_files(
    reader: RowReader,
    files: Sequence[DataFile],
    content: Sequence[str],
    removed: pa.Table,
    left_out: pa.Table,
) -> pa.Table:
    """Return the number of `rows` of each block of 1,024 offsets, and the sums of the halves of
    their hashes (`high`, `low`). Rows at the places `removed` count in `removed` alone, rows at
    `left_out` in nothing. `content`: SQL of the compared columns."""
    # With the place, so that two swapped rows differ.
    hashed = f"hash({', '.join([_AT, *content])})"
    return in_duckdb(
        f"""
        SELECT kafka_partition, {_BLOCK} AS block, count_if(NOT is_removed)::BIGINT AS rows,
            count_if(is_removed)::BIGINT AS removed,
            coalesce(sum(hashed >> 32) FILTER (NOT is_removed), 0)::BIGINT AS high,
            coalesce(sum(hashed & 4294967295) FILTER (NOT is_removed), 0)::BIGINT AS low
        FROM (
            SELECT {_AT}, {hashed} AS hashed, {_is_at("removed", removed)} AS is_removed
            FROM rows WHERE NOT {_is_at("left_out", left_out)}
        ) GROUP BY ALL
        """,
        rows=reader.read(files),
        removed=removed,
        left_out=left_out,
    )


def hash_files(
    reader: RowReader,
    files: Sequence[DataFile],
    content: Sequence[str],
    blocks: pa.Table,
    left_out: pa.Table,
) -> pa.Table:
    """Return each row's place in `blocks`, and its content's `hash`; not those at `left_out`."""
    offsets = [n << _BLOCK_BITS for n in pc.min_max(blocks.column("block")).as_py().values()]
    at = pc.field("kafka_offset")
    return in_duckdb(
        f"""
        {hashes_sql(content)}
        WHERE (kafka_partition, {_BLOCK}) IN (SELECT (kafka_partition, block) FROM blocks)
            AND NOT {_is_at("left_out", left_out)}
        """,
        # PyArrow skips the parts of a file that have other offsets.
        # Without content, the bytes of dead letters would take memory for nothing.
        rows=reader.read(
            files,
            None if content else PLACE,
            (at >= offsets[0]) & (at < offsets[1] + (1 << _BLOCK_BITS)),
        ),
        blocks=blocks,
        left_out=left_out,
    )


def hash_at(
    reader: RowReader, files: Sequence[DataFile], content: Sequence[str], places: pa.Table
) -> pa.Table:
    """Return the rows at these places, each with the `hash` of its content."""
    sql = f"{hashes_sql(content)} WHERE {_is_at('places', places)}"
    return in_duckdb(sql, rows=reader.read(files), places=places)


def hash_frame(rows: DataFrame, content: Sequence[str]) -> pa.Table:
    """Return `hash_at` of rows in Spark, all of them."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from in_duckdb(hashes_sql(content), rows=pa.table(batch)).to_batches()

    return rows.mapInArrow(run, "kafka_partition INT, kafka_offset BIGINT, hash BIGINT").toArrow()


def find_hashes(
    reader: RowReader, files: Sequence[DataFile], content: Sequence[str], hashes: pa.Table
) -> pa.Table:
    """Return those of the hashes (`hash`) that the content of a row has."""
    sql = f"SELECT DISTINCT hash FROM ({hashes_sql(content)}) WHERE hash IN (FROM hashes)"
    return in_duckdb(sql, rows=reader.read(files), hashes=hashes.select(["hash"]))


def hashes_sql(content: Sequence[str]) -> str:
    """Return SQL for the places of the table `rows`, each with the `hash` of its content."""
    # 63 bits, since Spark has no unsigned numbers.
    return f"SELECT {_AT}, (hash({', '.join(content) or '0'}) >> 1)::BIGINT AS hash FROM rows"


def _is_at(name: str, places: pa.Table) -> str:
    """Return SQL for whether a row is at one of the places of a table."""
    return f"(({_AT}) IN (SELECT ({_AT}) FROM {name}))" if len(places) else "false"
