"""Bloom filters of Parquet files, as PyArrow and DuckDB write them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from anabranch.lifecycle.erasure.search import groups_that_may_hold

ROWS, GROUP = 4_000, 1_000
Write = Callable[[pa.Table, Path], None]


def by_pyarrow(table: pa.Table, path: Path) -> None:
    pq.write_table(
        table, path, row_group_size=GROUP, bloom_filter_options={"id": {"ndv": GROUP, "fpp": 0.01}}
    )


def by_duckdb(rows: pa.Table, path: Path) -> None:
    # DuckDB writes filters of columns with a dictionary, in row groups of a multiple of 2,048.
    assert rows.num_rows == ROWS
    duckdb.sql(
        f"COPY (FROM rows) TO '{path}' (FORMAT parquet, ROW_GROUP_SIZE 2048, "
        "DICTIONARY_SIZE_LIMIT 4096)"
    )


def groups(path: Path, *values: Any) -> list[int]:
    metadata = pq.ParquetFile(path).metadata
    return groups_that_may_hold(lambda: path.open("rb"), metadata, "id", values)


def holders(path: Path, value: Any) -> list[int]:
    """The row groups that hold a value, by reading them."""
    file = pq.ParquetFile(path)
    return [
        g
        for g in range(file.num_row_groups)
        if value in file.read_row_group(g, ["id"])["id"].to_pylist()
    ]


@pytest.mark.parametrize("write", [by_pyarrow, by_duckdb])
@pytest.mark.parametrize("kind", [pa.string(), pa.int32(), pa.int64()])
def test_most_row_groups_are_skipped(tmp_path: Path, write: Write, kind: Any) -> None:
    path = tmp_path / "file.parquet"
    order = random.Random(7).sample(range(ROWS * 3), ROWS)
    ids = pa.array([f"player-{i}" for i in order] if kind == pa.string() else order, kind)
    write(pa.table({"other": pa.array(order), "id": ids}), path)
    for value in random.Random(8).sample(ids.to_pylist(), 300):
        assert set(holders(path, value)) <= set(groups(path, value))
    absent = sorted(set(range(ROWS * 3)) - set(order))[:500]
    kept = sum(len(groups(path, f"player-{i}" if kind == pa.string() else i)) for i in absent)
    # One in a hundred, by how they were written.
    assert kept < len(absent) * pq.ParquetFile(path).num_row_groups * 0.05


def test_several_values_are_asked_for_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file.parquet"
    by_pyarrow(pa.table({"id": pa.array(range(ROWS))}), path)
    assert groups(path, 1, 3_999) == [0, 3]
    # No column of 64 bits can have the second one.
    assert groups(path, 2_500, 2**80) == [2]
    assert groups(path) == []


def test_a_file_without_filters_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "file.parquet"
    pq.write_table(pa.table({"id": pa.array(["a"])}), path)

    def refuse() -> Any:
        raise AssertionError("the file was opened")

    assert groups_that_may_hold(refuse, pq.ParquetFile(path).metadata, "id", ["b"]) == [0]


@pytest.mark.parametrize("at", ["number of bytes", "kind"])
def test_a_filter_of_another_kind_excludes_nothing(tmp_path: Path, at: str) -> None:
    path = tmp_path / "file.parquet"
    by_pyarrow(pa.table({"id": pa.array(range(ROWS))}), path)
    offset = pq.ParquetFile(path).metadata.row_group(1).column(0).bloom_filter_offset
    content = bytearray(path.read_bytes())
    assert groups(path, -5) == []
    content[offset + (0 if at == "number of bytes" else 4)] ^= 0x10
    path.write_bytes(content)
    assert groups(path, -5) == [1]
