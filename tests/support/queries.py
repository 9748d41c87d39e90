"""Queries of tests."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from serving_layer.query import Selected, SelectedRows, Source, open_query
from serving_layer.reader.selection import find_snapshot

if TYPE_CHECKING:
    from pyiceberg.table import Table


def run_query(
    sql: str, tables: Mapping[str, Table], *, catalog: str = "lake", as_of: str | None = None
) -> pa.Table:
    """Return all of `open_query`, tables as of now, or of a tag, branch, snapshot id or time."""
    with open_query(sql, sources(tables, as_of), catalog=catalog) as answer:
        return answer.rows.read_all()


def sources(tables: Mapping[str, Table], as_of: str | None = None) -> dict[str, Source]:
    """Return the sources of `open_query` for tables, each taken from the mapping by its source."""

    def rows(name: str) -> SelectedRows:
        def select() -> Selected:
            return Selected(find_snapshot(tables[name], as_of) if as_of is not None else None)

        return SelectedRows(name, tables[name], select)

    return {name: partial(rows, name) for name in tables}
