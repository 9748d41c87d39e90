"""Queries of tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pyarrow as pa

from anabranch.iceberg.time_travel import find_snapshot
from serving_layer.query import Selected, open_query

if TYPE_CHECKING:
    from pyiceberg.table import Table


def run_query(
    sql: str, tables: Mapping[str, Table], *, catalog: str = "lake", as_of: str | None = None
) -> pa.Table:
    """Return the whole result of `open_query`, with each table as it is, or as of a tag, branch,
    snapshot id or time."""

    def select(name: str, table: Table) -> Selected:
        return Selected(find_snapshot(table, as_of)) if as_of is not None else Selected()

    with open_query(sql, tables, catalog=catalog, select=select) as answer:
        return answer.rows.read_all()
