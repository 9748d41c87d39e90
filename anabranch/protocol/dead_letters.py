"""Dead letters: a commit to their own table follows the publish of rows, which names the staged
files.

The two tables cannot change in one commit. The rows' commit is authoritative; the commit of the
dead letters records their id, and the next process makes a missing one. Staged dead letters wait
without a time limit: a branch protects their snapshot from expiry. If the snapshot is gone anyway,
copies of its files are published, since the program that expired it deletes the files. Missing
files do not block publishes: the loss is logged once, and the batch layer restates its hours that
lack them.
"""

from __future__ import annotations

import json
import logging
import posixpath
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, Literal

import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import parquet_file_to_data_file
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.common.errors import Transient
from anabranch.common.json_values import parse, read_property
from anabranch.common.remote_errors import lake_errors
from anabranch.config import Stream
from anabranch.iceberg.commits import Change, Commit, Outcome
from anabranch.iceberg.expiry import plan_expiry
from anabranch.iceberg.lake import Lake, until_landed
from anabranch.iceberg.manifests import files_by_hour, hour_of_file, own_spec_id
from anabranch.iceberg.snapshots import (
    BRANCHES,
    Staged,
    branch_properties,
    find_staged,
    heads,
    staged_snapshot,
)
from anabranch.iceberg.staging import is_young
from anabranch.protocol.ledger_row import Layer
from anabranch.protocol.publish import new_id
from anabranch.protocol.registers import Expired
from anabranch.protocol.state import State, load_state

LOG = logging.getLogger(__name__)

DONE = "anabranch.dead-letters-done"
LOST = "anabranch.dead-letters-lost"
_REMEMBERED = 200
_CHUNK = 1 << 20
_COUNTED = 100_000
_REASON = ["error_code", "error_text", "kafka_partition", "kafka_offset"]


def waiting_speed(staged: Staged, now: datetime) -> dict[str, Any]:
    """Return the entry of a speed publish for the dead letters of its micro-batch."""
    return {
        "id": staged.wap_id,
        "at": now.isoformat(),
        "layer": "speed",
        "paths": [f.file_path for f in staged.files],
    }


def waiting_batch(
    staged: Staged | None, hour: str, revision: int, now: datetime, id: str | None = None
) -> dict[str, Any]:
    """Return the entry of a batch publish for the dead letters of its hour. If `staged` is None,
    the entry has `id` and removes the hour's earlier dead letters."""
    paths = [f.file_path for f in staged.files] if staged is not None else []
    wap_id = staged.wap_id if staged is not None else id or new_id()
    return {
        "id": wap_id,
        "at": now.isoformat(),
        "layer": "batch",
        "hour": hour,
        "revision": revision,
        "paths": paths,
    }


def waiting_served(hour: str, layer: Layer, now: datetime, id: str | None = None) -> dict[str, Any]:
    """Return the entry of a swap: `main` gets the dead letters of the hour's new layer."""
    return {
        "id": id or new_id(),
        "at": now.isoformat(),
        "layer": "main",
        "hour": hour,
        "served": layer,
        "paths": [],
    }


def is_due(state: State, item: Mapping[str, Any]) -> bool:
    """Whether a set of dead letters is to be published: the rows' table, loaded after the dead
    letters table, still names it, and its revision or swap was not replaced. Pure.

    A set that is no longer named was published, or its publish of rows was rolled back.
    """
    is_named = item["id"] in state.waiting_letters
    if is_named and item["layer"] == "main":
        return bool(state.served_by(item["hour"]) == item["served"])
    if not is_named or item["layer"] != "batch":
        return is_named
    # A newer revision has its own set; this one would replace it by dead letters of the former
    # revision.
    accepted = state.accepted.get(item["hour"])
    return accepted is not None and bool(accepted.revision == item["revision"])


def roll_forward(lake: Lake, table_name: str, state: State) -> frozenset[str]:
    """Publish every set of dead letters that a publish of rows named; return the ids of all sets
    that are published.

    Each set is published once, by any process: the snapshots of the dead letters table record the
    ids. Raises Transient.
    """
    rows_table = ".".join(state.table.name())
    # Decide on the table after the previous set; after a refusal, on a fresh load.
    loaded: list[Table] = []
    for item in state.dead_letters:

        def attempt(item: Mapping[str, Any] = item) -> Table | Literal[Outcome.REFUSED]:
            table = loaded.pop() if loaded else lake.load(table_name)
            return _publish(lake, table, rows_table, item) or Outcome.REFUSED

        loaded.append(until_landed(f"dead letters {item['id']} of {table_name}", attempt))
    return frozenset(str(item["id"]) for item in state.dead_letters)


def is_done(table: Table, item: Mapping[str, Any]) -> bool:
    """Whether the dead letters table records a set as published. Pure."""
    return item["id"] in _remembered(table)[item["layer"]]


def plan_changes(
    state: State, item: Mapping[str, Any], files: tuple[DataFile, ...], hour_of: Mapping[str, str]
) -> tuple[Change, ...]:
    """Return the changes of a due set of dead letters: `files` are its own, `hour_of` maps their
    paths to hours. Pure.
    """
    layer, hour = item["layer"], item.get("hour")
    if layer == "main":
        return (Change("main", copy={str(hour): item["served"]}),)
    if hour:
        batch = Change("batch", files, clear=(hour,))
        if state.served_by(hour) == "batch":
            return (batch, Change("main", files, clear=(hour,)))
        return (batch,)
    by_speed = tuple(f for f in files if state.served_by(hour_of[f.file_path]) == "speed")
    return Change("speed", files), Change("main", by_speed)


def plan_commit(
    table: Table,
    state: State,
    item: Mapping[str, Any],
    changes: Sequence[Change],
    lacks: bool,
    now: datetime,
) -> Commit:
    """Return the commit of a set's changes; the branches record the set as published. Staged files
    of other waiting sets never expire. `lacks`: whether files of the set are gone. Pure."""
    id, hour = str(item["id"]), item.get("hour")
    remembered, staged = _remembered(table), staged_snapshot(table, id)
    waiting = frozenset(str(other["id"]) for other in state.dead_letters) - {id}
    lost = _lost(table)
    now_lost = {h: r for h, r in lost.items() if h != hour} | (
        {str(hour): item["revision"]} if hour and lacks else {}
    )

    def properties_of(branch: str) -> dict[str, str]:
        done = {DONE: json.dumps(remembered_ids(remembered[branch], id, waiting))}
        return done | (
            {LOST: json.dumps(now_lost)} if branch == "batch" and now_lost != lost else {}
        )

    return Commit(
        # The set's own id: it identifies the commit after a lost answer, and in each process that
        # finds the set unpublished.
        id=id,
        heads=heads(table),
        changes=tuple(replace(c, properties=properties_of(c.branch)) for c in changes),
        expire=plan_expiry(table, id, now, waiting=waiting),
        # Decision 42: refused if another program has expired the snapshot since the load. The next
        # attempt then copies the files that are left.
        staged={id: staged.snapshot_id} if staged is not None else {},
    )


def named_files(state: State) -> frozenset[str]:
    """Return the files of dead letters that publishes of rows name and that wait. Pure."""
    return frozenset(path for item in state.dead_letters for path in item["paths"])


def is_named(state: State, staged: Staged) -> bool:
    """Whether a publish of rows names these staged dead letters. Pure."""
    return any(item["id"] == staged.wap_id for item in state.dead_letters)


def discard(lake: Lake, stream: Stream, staged: Staged) -> None:
    """Discard staged dead letters without a publisher, unless a publish of rows names them."""
    # Decision 12: the publish of rows that names them may have landed after its answer was lost.
    # Without these files its dead letters would be lost.
    if is_named(load_state(lake, stream.table), staged):
        LOG.info(
            "dead letters %s of %s: kept, since a publish refers to them",
            staged.wap_id,
            stream.dead_letters_table,
        )
        return
    lake.discard(stream.dead_letters_table, staged)


def lost_hours(lake: Lake, stream: Stream, state: State) -> dict[str, int]:
    """Return the hours whose accepted revision lacks dead letters, with that revision: their files
    were lost before they were published. Raises Transient."""
    if not any(accepted.cut.offsets for accepted in state.accepted.values()):
        return {}
    return plan_lost(lake.load(stream.dead_letters_table), state)


def plan_lost(table: Table, state: State) -> dict[str, int]:
    """Return the result of `lost_hours` from a loaded dead letters table. Pure."""
    lost = _lost(table)
    return {
        h: r for h, r in lost.items() if h in state.accepted and state.accepted[h].revision == r
    }


def frequent_reason(io: FileIO, files: Iterable[DataFile]) -> str | None:
    """Return the most frequent reason among dead letters, without values of records, and the place
    of its first one; None without any. Counts the first `_COUNTED` dead letters only. Raises
    Transient when a file cannot be read."""
    counts, places, seen = Counter[str](), dict[str, tuple[int, int]](), 0
    for file in files:
        with lake_errors(f"read {file.file_path}"), io.new_input(file.file_path).open() as stream:
            for batch in pq.ParquetFile(stream).iter_batches(columns=_REASON):
                for letter in batch.to_pylist():
                    # The text after it has the value that was found.
                    text = str(letter["error_text"]).partition(", found ")[0]
                    reason = f"{letter['error_code']}: {text}"
                    counts[reason] += 1
                    place = (letter["kafka_partition"], letter["kafka_offset"])
                    places[reason] = min(places.get(reason, place), place)
                seen += batch.num_rows
                if seen >= _COUNTED:
                    break
        if seen >= _COUNTED:
            break
    if not counts:
        return None
    reason = min(counts, key=lambda one: (-counts[one], one))
    partition, offset = places[reason]
    return f"{reason} (the first: partition {partition}, offset {offset})"


def _publish(lake: Lake, table: Table, rows_table: str, item: Mapping[str, Any]) -> Table | None:
    """Publish a set of dead letters if it is due; return the table after it, or None if the publish
    was refused or has to be decided again."""
    layer, hour = item["layer"], item.get("hour")
    # Its id is in the snapshots of this table: a second publish would repeat its records.
    if is_done(table, item):
        return table
    # Load the rows' state after the dead letters table: a later acceptance then changes that table,
    # and this publish is refused.
    state = load_state(lake, rows_table)
    if not is_due(state, item):
        LOG.info(
            "dead letters %s: layer %s, hour %s: already published, or replaced since",
            item["id"],
            layer,
            hour,
        )
        return table
    # Before the copies are written, since their age counts from here.
    began = lake.clock.now(table.metadata.last_updated_ms)
    files, gone = _files(table, item)
    expired = Expired.of_branches(branch_properties(table, branch) for branch in BRANCHES)
    # Decision 50: dead letters that were staged before their hour expired would come back.
    files = tuple(f for f in files if hour_of_file(table, f) not in expired)
    # The branches record a limited number of ids. A set that is older than these is found by its
    # files, or their copies.
    if files and not hour and _is_published(table, layer, files, item["paths"]):
        LOG.info("dead letters %s: already published on branch %s", item["id"], layer)
        return table
    changes = plan_changes(state, item, files, {f.file_path: hour_of_file(table, f) for f in files})
    now = lake.clock.now(table.metadata.last_updated_ms)
    if not is_young(began, now):
        # Orphan removal may have deleted copies that no snapshot names.
        return None
    landed = lake.land(table, plan_commit(table, state, item, changes, bool(gone), now))
    if landed is None:
        return None
    if gone:
        LOG.error(
            "dead letters %s of %s: expected %d files, found %d gone (%s); published without "
            "them: %s",
            item["id"],
            ".".join(table.name()),
            len(item["paths"]),
            len(gone),
            gone[0],
            f"the batch layer restates hour {hour} at its next run (at once: `anabranch batch "
            f"STREAM --hour {hour} --restate`)"
            if hour
            else "the batch layer publishes them when it rebuilds their hours",
        )
    if layer != "main" and (count := sum(f.record_count for f in files)):
        LOG.info("dead letters %s: %d records of layer %s published", item["id"], count, layer)
    return landed


def _remembered(table: Table) -> dict[str, list[str]]:
    read = partial(parse, list[str])
    return {b: read_property(branch_properties(table, b), DONE, read, "[]") for b in BRANCHES}


def _lost(table: Table) -> dict[str, int]:
    return read_property(branch_properties(table, "batch"), LOST, partial(parse, dict[str, int]))


def _files(table: Table, item: Mapping[str, Any]) -> tuple[tuple[DataFile, ...], tuple[str, ...]]:
    """Return the staged files of a set, else copies of its files that storage still has; and the
    paths of the missing files. Raises Transient."""
    paths: list[str] = item["paths"]
    if not paths:
        return (), ()
    staged = _staged(table, str(item["id"]))
    if staged is not None:
        return staged.files, ()
    name = ".".join(table.name())
    with lake_errors(f"copy the dead letters that {item['id']} names in {name}"):
        copies = {path: copy for path in paths if (copy := _copy(table, path)) is not None}
    LOG.warning(
        "dead letters %s of %s: expected the staged snapshot, found none; publishing copies of "
        "the %d files that are there",
        item["id"],
        name,
        len(copies),
    )
    with lake_errors(f"read the dead letters that {item['id']} names in {name}"):
        files = tuple(_from_footer(table, copy) for copy in copies.values())
    return files, tuple(path for path in paths if path not in copies)


def _copy(table: Table, path: str) -> str | None:
    """Copy a file to a name derived from its path, which no other program's list of files to delete
    contains. Returns the new path, or None if the file is gone."""
    copy = _copy_of(path)
    try:
        with (
            table.io.new_input(path).open() as source,
            table.io.new_output(copy).create(overwrite=True) as target,
        ):
            shutil.copyfileobj(source, target, _CHUNK)
    except FileNotFoundError:
        return None
    return copy


def _copy_of(path: str) -> str:
    stem, extension = posixpath.splitext(path)
    return f"{stem}-copy{extension}"


def _from_footer(table: Table, path: str) -> DataFile:
    """Return the manifest entry of a file, with partition, counts and bounds from its footer."""
    data_file = parquet_file_to_data_file(table.io, table.metadata, path)
    data_file.spec_id = own_spec_id(table)
    return data_file


def _staged(table: Table, id: str) -> Staged | None:
    """Return the staged snapshot of an id; None if there is none or storage lacks its manifests."""
    try:
        return find_staged(table, id)
    except Transient as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def _is_published(
    table: Table, branch: str, files: tuple[DataFile, ...], paths: Collection[str]
) -> bool:
    """Whether a branch has a file of a set, or its copy. The files of a set are published together;
    a second publish would repeat their records."""
    have = files_by_hour(table, branch, {hour_of_file(table, f) for f in files})
    names = {name for path in paths for name in (path, _copy_of(path))}
    return any(not names.isdisjoint(of_hour) for of_hour in have.values())


def remembered_ids(before: list[str], id: str, waiting: Collection[str]) -> list[str]:
    """Return the ids published after `id`: the newest _REMEMBERED, and all waiting. Pure."""
    ids = [*before, id]
    # A set that still waits on a branch is published again if its id is forgotten.
    return [i for n, i in enumerate(ids) if i in waiting or n >= len(ids) - _REMEMBERED]
