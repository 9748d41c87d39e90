"""Erase dead letters, whose places stay in the ledger, and archived records."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from anabranch.common.errors import Transient
from anabranch.common.fail_points import Step, reach
from anabranch.iceberg.hour_files import files_by_branch, files_by_hour, paths_by_hour
from anabranch.iceberg.manifests import hour_of_file
from anabranch.iceberg.rewriting import rewrite_kept
from anabranch.iceberg.snapshot_writer import delete_quietly
from anabranch.job import Job
from anabranch.lifecycle.erasure import steps
from anabranch.lifecycle.erasure.payloads import Payloads
from anabranch.lifecycle.erasure.search import (
    Place,
    Values,
    find_letters,
    find_places,
    places_by_hour,
    places_in,
)
from anabranch.lifecycle.erasure.steps import decisions_of, record_unserved
from anabranch.protocol import archive, erasure, ledger
from anabranch.protocol.erased import Erasure
from anabranch.protocol.publish import Decision, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import State, load_state

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

    from anabranch.iceberg.commits import Commit


LOG = logging.getLogger(__name__)


def erase_archived(job: Job, publisher: Publisher, one: Erasure, values: Values) -> int:
    """Remove archived records that contain a value as a word, and those of rows with a value.
    Return the number of removed records.

    Moves the head of the archive after every file was searched: then a writer that read records
    before the erasure was recorded cannot archive them. Idempotent. Raises Transient.
    """
    lake, name = job.lake, job.stream.archive_table
    if not lake.exists(name):
        return 0
    searched, count = set[str](), 0
    for _ in range(steps.ATTEMPTS):
        table = lake.load(name)
        files = {path: f for path, f in archive_files(table).items() if path not in searched}
        found = sorted(archived_places(job, table, list(files.values()), one, values).items())
        searched |= files.keys() - dict(found).keys()
        for begin in range(0, len(found), steps.FILES_A_COMMIT):
            some = dict(found[begin : begin + steps.FILES_A_COMMIT])
            record_unserved(
                job, publisher, one, paths_by_hour(table, [files[path] for path in some])
            )
            written = _rewrite_archived(job, table, files, some)
            if written is not None:
                searched |= written
                count += sum(map(len, some.values()))

        def plan(current: Table, searched: Collection[str] = frozenset(searched)) -> Commit | None:
            return archive.plan_searched(
                current, archive_files(current), searched, new_id(), job.lake.clock.now()
            )

        if (
            lake.commit_until_landed(name, f"erase archived records of {job.stream.name}", plan)
            is not None
        ):
            break
    else:
        raise Transient(
            f"erase archived records of {job.stream.name}: expected no new file in one of "
            f"{steps.ATTEMPTS} attempts, found some each time; run the command again"
        )
    if count:
        LOG.info(
            "stream %s: erased archived records erasure=%s count=%d", job.stream.name, one.id, count
        )
    return count


def archive_files(table: Table) -> dict[str, DataFile]:
    return erasure.by_path({"main": files_by_hour(table, "main")})


def _rewrite_archived(
    job: Job, table: Table, files: Mapping[str, DataFile], found: Mapping[str, Collection[Place]]
) -> set[str] | None:
    """Replace files of the archive with files without the places of `found`. Return the new paths;
    None if a file left the archive meanwhile."""
    name, began = job.stream.archive_table, job.lake.clock.now()
    written = {
        path: rewrite_kept(table, files[path], partial(without_places, found[path]))
        for path in found
    }
    reach(Step.ERASE_ARCHIVE_WRITTEN)

    def plan(current: Table) -> Commit | None:
        return archive.plan_erase(
            current, archive_files(current), written, new_id(), began, job.lake.clock.now()
        )

    new = {f.file_path for f in written.values() if f is not None}
    if (
        job.lake.commit_until_landed(name, f"erase archived records of {job.stream.name}", plan)
        is None
    ):
        delete_quietly(table, list(new))
        return None
    reach(Step.ERASE_ARCHIVE_PUBLISHED)
    return new


def archived_places(
    job: Job, table: Table, files: Sequence[DataFile], one: Erasure, values: Values
) -> dict[str, set[Place]]:
    """Return the places of archived records to erase, by the path of their file."""
    state = load_state(job.lake, job.stream.table)
    found = find_letters(Payloads(job.environment, job.stream), table, one, values, files)
    rows = erasure.by_path(files_by_branch(state.table, {hour_of_file(table, f) for f in files}))
    by_hour = places_by_hour(state.table, rows, find_places(state, one, values, rows.values()))
    for f in files:
        of_hour = by_hour.get(hour_of_file(table, f))
        if of_hour and (here := of_hour & places_in(table, f)):
            found.setdefault(f.file_path, set()).update(here)
    return found


@dataclass(frozen=True)
class ErasedLetters:
    """Places of dead letters with erased values: `by_path` of their files, `by_hour`, and
    `accepted`: those of the batch layer by hour. `files` has all files by path, `paths` by hour the
    paths of files with such dead letters."""

    by_path: Mapping[str, set[Place]]
    by_hour: Mapping[str, set[Place]]
    accepted: Mapping[str, set[Place]]
    files: Mapping[str, DataFile]
    paths: Mapping[str, set[str]]


def find_letters_of(job: Job, table: Table, one: Erasure, values: Values) -> ErasedLetters:
    there = files_by_branch(table)
    files, batch = erasure.by_path(there), erasure.by_path({"batch": there["batch"]})
    found = find_letters(Payloads(job.environment, job.stream), table, one, values, files.values())
    return letters_of(table, found, files, batch)


def letters_of(
    table: Table,
    found: Mapping[str, set[Place]],
    files: Mapping[str, DataFile],
    batch: Collection[str] = (),
) -> ErasedLetters:
    """Group places, given by the path of their file. `batch`: paths of the batch layer. Pure."""
    accepted = {path: places for path, places in found.items() if path in batch}
    return ErasedLetters(
        found,
        places_by_hour(table, files, found),
        places_by_hour(table, files, accepted),
        files,
        paths_by_hour(table, [files[path] for path in found]),
    )


def erase_letters(
    job: Job, publisher: Publisher, one: Erasure, values: Values
) -> set[tuple[str, Place]] | None:
    """Remove the dead letters with the values from every branch, some files in a commit. Return the
    hours and places of the removed ones; None if no dead letter has the values."""
    table = job.lake.load(job.stream.dead_letters_table)
    found = find_letters_of(job, table, one, values)
    if not found.by_path:
        return None
    record_places(job, publisher, one, found)
    paths, gone = sorted(found.by_path), set[tuple[str, Place]]()
    for begin in range(0, len(paths), steps.FILES_A_COMMIT):
        gone |= _rewrite_letters(job, table, found, paths[begin : begin + steps.FILES_A_COMMIT])
    hours = len({hour for hour, _ in gone})
    LOG.info(
        "stream %s: erased dead letters erasure=%s count=%d hours=%d",
        job.stream.name,
        one.id,
        len(gone),
        hours,
    )
    return gone


def _rewrite_letters(
    job: Job, table: Table, found: ErasedLetters, paths: Sequence[str]
) -> set[tuple[str, Place]]:
    """Replace some files of dead letters on every branch in one commit. Return the hours and places
    of the removed dead letters; empty if a file left all branches meanwhile."""
    lake, stream, began = job.lake, job.stream, job.lake.clock.now()
    hour_of_path = {path: hour_of_file(table, found.files[path]) for path in paths}
    written = {
        path: rewrite_kept(table, found.files[path], partial(without_places, found.by_path[path]))
        for path in paths
    }
    reach(Step.ERASE_LETTERS_WRITTEN)

    def plan(current: Table) -> Commit | None:
        state = load_state(lake, stream.table)
        there = files_by_branch(current, set(hour_of_path.values()))
        return erasure.plan_letters(
            current, state, written, there, new_id(), began, job.lake.clock.now()
        )

    landed = lake.commit_until_landed(
        stream.dead_letters_table, f"erase dead letters of {stream.name}", plan
    )
    if landed is None:
        delete_quietly(table, [f.file_path for f in written.values() if f is not None])
        return set()
    reach(Step.ERASE_LETTERS_PUBLISHED)
    return {(hour_of_path[path], place) for path in paths for place in found.by_path[path]}


def record_places(job: Job, publisher: Publisher, one: Erasure, found: ErasedLetters) -> None:
    """Record the places of dead letters on each branch and in the ledger, before they are removed
    from their table."""

    def decide(state: State) -> Decision[None]:
        history = job.ledger.history(set(found.by_hour))
        new: dict[str, Sequence[Place]] = {}
        for hour, places in found.by_hour.items():
            known = erasure.places_of(ledger.with_waiting(state, hour, history)).get(hour, set())
            if unplaced := sorted(places - known):
                new[hour] = unplaced
        if not new:
            return Decision(state, None, None)
        current = state.erasures[one.id]
        decisions = decisions_of(job, state, current, {}, new, found.paths, found.accepted)
        reach(Step.ERASE_PLACES_DECIDED)
        return Decision(state, erasure.plan_places(state, current, decisions, new_id()), None)

    published = publisher.run_merged(decide, f"erase dead letters of {job.stream.name}")
    if published.landed is not None:
        reach(Step.ERASE_PLACES_PUBLISHED)
        publisher.record_decisions(published.state)


def without_places(places: Collection[Place], batch: pa.RecordBatch) -> pa.BooleanArray:
    at = zip(batch["kafka_partition"].to_pylist(), batch["kafka_offset"].to_pylist(), strict=True)
    return pa.array([place not in places for place in at], pa.bool_())
