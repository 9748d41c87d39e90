"""Hashes of the rows of data files, in tasks: what the comparison of the layers needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.manifest import DataFile
from pyspark.sql import DataFrame

from anabranch.iceberg.rewriting import RowReader
from anabranch.records.key_hashes import in_duckdb

_BLOCK_BITS = 10
_AT = "kafka_partition, kafka_offset"
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
    """Return the place of each row in `blocks`, with the `hash` of its content; without those at
    `left_out`."""
    offsets = [n << _BLOCK_BITS for n in pc.min_max(blocks.column("block")).as_py().values()]
    at = pc.field("kafka_offset")
    return in_duckdb(
        f"""
        {hashes_sql(content)}
        WHERE (kafka_partition, {_BLOCK}) IN (SELECT (kafka_partition, block) FROM blocks)
            AND NOT {_is_at("left_out", left_out)}
        """,
        # PyArrow skips the parts of a file that have other offsets.
        rows=reader.read(
            files, condition=(at >= offsets[0]) & (at < offsets[1] + (1 << _BLOCK_BITS))
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
