"""Print a maintenance report."""

from __future__ import annotations

from typing import Any

from anabranch.cli.render.expiry import print_expiry, print_ledger_expiry
from anabranch.common.output import print_table
from anabranch.operations.reports.maintenance import COLUMNS, Maintenance, last_run_words


def print_maintained(stream: str, done: dict[str, Any], known: Maintenance | None, dry_run: bool) -> None:
    """Print what a run deleted, or would delete, and what else is known of the stream's maintenance."""
    would = "would be " if dry_run else ""
    hours = ", ".join(done["speed_hours"]) or "none"
    print(f"{stream}: speed rows {would}dropped of hours: {hours}")
    print_expiry(stream, "rows", done["rows"], dry_run)
    print_expiry(stream, "dead letters", done["letters"], dry_run)
    print_ledger_expiry(stream, done["ledger"], dry_run)
    for table, orphans in done["orphans"].items():
        print(
            f"{stream}: {table}: {done['expired'][table]} snapshots {would}expired, "
            f"{orphans['files']} orphan files {would}deleted, {orphans['bytes']} bytes"
        )
    for folder, did in done["folders"].items():
        print(f"{stream}: {folder}: {did.gone.files} files {would}deleted, {did.gone.bytes} bytes")
    if known is not None:
        print_maintenance(known)


def print_maintenance(view: Maintenance) -> None:
    """Print the last run, and the growth and pending work by table."""
    print(f"last run: {last_run_words(view)}")
    rows = [
        [
            name,
            t.metadata_bytes,
            t.snapshots,
            t.expirable,
            t.tags,
            t.manifests,
            t.files,
            t.rows,
            size.files if (size := view.spared.get(name)) is not None else None,
        ]
        for name, t in view.tables.items()
    ]
    print_table(COLUMNS, rows)
    for name, why in view.unread.items():
        print(f"could not read {name}: {why}")
    if view.speed_files:
        hour, files = max(view.speed_files.items(), key=lambda pair: pair[1])
        print(f"files of the speed layer in main: {sum(view.speed_files.values())}, most in {hour}: {files}")
    if view.letters_wait_since is not None:
        print(f"dead letters pending since {view.letters_wait_since.isoformat(timespec='seconds')}")
