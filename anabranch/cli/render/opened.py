"""Print the files that a query opened."""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.common.output import print_table
from serving_layer.query.opened import Opened


def print_opened(found: Iterable[Opened]) -> None:
    """To standard output."""
    columns = ("table", "files", "of files", "bytes", "of bytes", "bytes of columns", "columns", "condition")
    rows = [
        (o.table, o.files, o.all_files, o.bytes, o.all_bytes, o.column_bytes, " ".join(o.columns), o.condition)
        for o in found
    ]
    print_table(columns, rows)
