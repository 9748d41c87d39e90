"""Print the files that a query opened, and the provenance of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anabranch.common.output import print_table
from serving_layer.query.opened import Opened
from serving_layer.reader.provenance import Provenance


def print_opened(found: Iterable[Opened]) -> None:
    """Print to standard output."""
    columns = (
        "table",
        "files",
        "of files",
        "bytes",
        "of bytes",
        "bytes of columns",
        "columns",
        "condition",
    )
    rows = [
        (
            o.table,
            o.files,
            o.all_files,
            o.bytes,
            o.all_bytes,
            o.column_bytes,
            " ".join(o.columns),
            o.condition,
        )
        for o in found
    ]
    print_table(columns, rows)


def print_provenance(found: Sequence[Provenance]) -> None:
    """Print to standard output."""
    if not found:
        print("no rows of a stream were read")
    for one in found:
        print(f"{one.table} as of {one.as_of.isoformat()} (snapshot {one.snapshot_id})")
        print_table(
            ("ingest hour", "layer", "revision", "complete", "files", "rows", "note"),
            [
                (h.hour, h.layer, h.revision, _yes(h.complete), h.files, h.rows, h.note)
                for h in one.hours
            ],
        )
        print_table(
            ("event date", "hours", "complete", "files", "rows", "note"),
            [
                (d.event_date, d.hours, _yes(d.complete), d.files, d.rows, d.note)
                for d in one.event_dates
            ],
        )


def _yes(value: bool) -> str:
    return "yes" if value else "no"
