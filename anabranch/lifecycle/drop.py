"""Drop a stream: its tables, with all their files, and so its state."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from anabranch.common.errors import Refused, Transient
from anabranch.iceberg import admin
from anabranch.iceberg.files import delete_files, list_table, own_files, references, same_file
from anabranch.iceberg.owner import read_owner
from anabranch.protocol.state import load_state

if TYPE_CHECKING:
    from collections.abc import Collection

    from pyiceberg.table import Table

    from anabranch.job import Job

LOG = logging.getLogger(__name__)


def tables_of(job: Job) -> list[str]:
    """Return the stream's tables that the catalog has, the table of rows last. Raises Transient."""
    return [name for name in reversed(job.stream.tables) if job.lake.exists(name)]


def drop(job: Job) -> list[str]:
    """Drop the tables of a stream and delete their files; return a description of each step.

    The table of rows, which has the state, is the last one, so that a run that was killed is
    continued by the next one. Raises Refused for another stream's table and while an operator holds
    hours, Transient.
    """
    lake, stream = job.lake, job.stream
    tables = {name: lake.load(name) for name in tables_of(job)}
    for name, table in tables.items():
        owner = read_owner(table)
        if owner is not None and owner.stream != stream.name:
            raise Refused(
                f"table {name}: expected a table of stream {stream.name}, found one of stream "
                f"{owner.stream}; nothing was dropped; give the stream its own `table`"
            )
    if stream.table in tables:
        holds = load_state(lake, stream.table).holds.holds
        if holds:
            raise Refused(
                f"stream {stream.name}: expected no hours that an operator keeps, found "
                f"{holds[0].first} to {holds[0].last}, {holds[0].reason}; nothing was dropped; "
                "release them with "
                f"`anabranch hold {stream.name} {holds[0].first}..{holds[0].last} --release`"
            )
    done = []
    for name, table in tables.items():
        files, current = _files_of(job, table), table.metadata_location
        # While the catalog has the table, the next run finds what this one did not delete.
        delete_files(table.io, [path for path in files if path != current])
        admin.forget(lake, name)
        delete_files(table.io, [current])
        LOG.warning("stream %s: dropped table %s files=%d", stream.name, name, len(files))
        done.append(f"dropped table {name} and its {len(files):,} files")
    return done


def _files_of(job: Job, table: Table) -> Collection[str]:
    """Return the files that a table's metadata names, and those that its writers left in its
    folders. A run that was killed may have deleted manifests."""
    named = list[str]()
    try:
        named += references(table)
    except Transient as error:
        LOG.warning("%s; files outside the table's folders may stay", error)
    own = own_files(job.lake, table, named)
    files = {same_file(file.path): file.path for file in list_table(own)}
    return (files | {same_file(path): path for path in named}).values()
