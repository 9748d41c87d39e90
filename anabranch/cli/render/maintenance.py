"""Print a maintenance report."""

from __future__ import annotations

from anabranch.common.output import print_table
from anabranch.operations.reports.maintenance import COLUMNS, Maintenance, last_run_words


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
