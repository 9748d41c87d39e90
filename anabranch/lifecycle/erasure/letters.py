"""Erase dead letters, whose places stay in the ledger, and archived records; find files with erased
records that only former snapshots have; and repair erasures whose rows the ledger lost: another
program dropped it, or set it back."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.common.errors import Transient
from anabranch.common.fail_points import Step, reach
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.commits import Commit
from anabranch.iceberg.manifests import (
    files_by_branch,
    files_by_hour,
    hour_of_file,
    list_manifests,
    paths_by_hour,
    read_entries,
)
from anabranch.iceberg.rewriting import rewrite_kept
from anabranch.iceberg.snapshot_writer import delete_quietly
from anabranch.iceberg.snapshots import BRANCHES, heads
from anabranch.job import Job
from anabranch.lifecycle.erasure import rows
from anabranch.lifecycle.erasure.rows import decisions_of, record_unserved
from anabranch.lifecycle.erasure.search import (
    Payloads,
    Place,
    Values,
    find_letters,
    find_places,
    places_by_hour,
    places_in,
)
from anabranch.offsets.hours import hour_of
from anabranch.protocol import archive, erasure, ledger
from anabranch.protocol.erasure import Key, by_path, keys_of, source_of
from anabranch.protocol.ledger_row import Act, LedgerRow, act_now
from anabranch.protocol.publish import Decision, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.registers import Erasure
from anabranch.protocol.state import State, load_state

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
    for _ in range(rows.ATTEMPTS):
        table = lake.load(name)
        files = {path: f for path, f in archive_files(table).items() if path not in searched}
        found = sorted(archived_places(job, table, list(files.values()), one, values).items())
        searched |= files.keys() - dict(found).keys()
        for begin in range(0, len(found), rows.FILES_A_COMMIT):
            some = dict(found[begin : begin + rows.FILES_A_COMMIT])
            record_unserved(
                job, publisher, one, paths_by_hour(table, [files[path] for path in some])
            )
            written = _rewrite(job, table, _ARCHIVED, files, some)
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
            f"{rows.ATTEMPTS} attempts, found some each time; run the command again"
        )
    if count:
        LOG.info(
            "stream %s: erased archived records erasure=%s count=%d", job.stream.name, one.id, count
        )
    return count


def archive_files(table: Table) -> dict[str, DataFile]:
    return erasure.by_path({"main": files_by_hour(table, "main")})


@dataclass(frozen=True)
class _Records:
    """A table of records, whose `branches` may have files, and the steps of a rewrite there."""

    what: str
    branches: tuple[str, ...]
    written: Step
    published: Step


_LETTERS = _Records(
    "dead letters", BRANCHES, Step.ERASE_LETTERS_WRITTEN, Step.ERASE_LETTERS_PUBLISHED
)
_ARCHIVED = _Records(
    "archived records", ("main",), Step.ERASE_ARCHIVE_WRITTEN, Step.ERASE_ARCHIVE_PUBLISHED
)


def _rewrite(
    job: Job,
    table: Table,
    of: _Records,
    files: Mapping[str, DataFile],
    found: Mapping[str, Collection[Place]],
) -> set[str] | None:
    """Replace files by files without the places of `found`, on every branch in one commit. Return
    the new paths; None if a file left all branches meanwhile."""
    stream, began = job.stream, job.lake.clock.now()
    hours = {hour_of_file(table, files[path]) for path in found}
    written = {
        path: rewrite_kept(table, files[path], partial(without_places, found[path]))
        for path in found
    }
    new = {f.file_path for f in written.values() if f is not None}
    reach(of.written)

    def plan(current: Table) -> Commit | None:
        state = load_state(job.lake, stream.table)
        there = {branch: files_by_hour(current, branch, hours) for branch in of.branches}
        now = job.lake.clock.now()
        removed = archive.removed_now(now) if of is _ARCHIVED else None
        return erasure.plan_letters(current, state, written, there, new_id(), began, now, removed)

    doing = f"erase {of.what} of {stream.name}"
    if job.lake.commit_until_landed(".".join(table.name()), doing, plan) is None:
        delete_quietly(table, new)
        return None
    reach(of.published)
    return new


def archived_places(
    job: Job, table: Table, files: Sequence[DataFile], one: Erasure, values: Values
) -> dict[str, set[Place]]:
    """Return the places of archived records to erase, by the path of their file."""
    state = load_state(job.lake, job.stream.table)
    found = find_letters(Payloads(job.environment, job.stream), table, one, values, files)
    served = erasure.by_path(files_by_branch(state.table, {hour_of_file(table, f) for f in files}))
    by_hour = places_by_hour(state.table, served, find_places(state, one, values, served.values()))
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
    for begin in range(0, len(paths), rows.FILES_A_COMMIT):
        some = {p: found.by_path[p] for p in paths[begin : begin + rows.FILES_A_COMMIT]}
        if _rewrite(job, table, _LETTERS, found.files, some) is not None:
            by_hour = places_by_hour(table, found.files, some)
            gone |= {(hour, place) for hour, places in by_hour.items() for place in places}
    hours = len({hour for hour, _ in gone})
    LOG.info(
        "stream %s: erased dead letters erasure=%s count=%d hours=%d",
        job.stream.name,
        one.id,
        len(gone),
        hours,
    )
    return gone


def record_places(job: Job, publisher: Publisher, one: Erasure, found: ErasedLetters) -> None:
    """Record the places of dead letters on each branch and in the ledger before their removal."""

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


def find_former(
    job: Job, state: State, one: Erasure, values: Values, known: Collection[str]
) -> dict[str, set[str]]:
    """Return the paths of files with erased records that only former snapshots and tags reference,
    since their hour has expired or was rebuilt without the records: files of rows, dead letters and
    archived records by hour, except for hours in `known`. Raises Transient."""
    lake, stream = job.lake, job.stream
    former, payloads = list_former(state.table, known), Payloads(job.environment, stream)
    with_values: Collection[str] = find_places(state, one, values, former)
    found = paths_by_hour(state.table, [f for f in former if f.file_path in with_values])
    for table in (
        lake.load(name)
        for name in (stream.dead_letters_table, stream.archive_table)
        if lake.exists(name)
    ):
        records = list_former(table, known)
        with_values = find_letters(payloads, table, one, values, records)
        for hour, paths in paths_by_hour(
            table, [f for f in records if f.file_path in with_values]
        ).items():
            found.setdefault(hour, set()).update(paths)
    return found


def list_former(table: Table, known: Collection[str]) -> list[DataFile]:
    """Return the files that only snapshots have, except for hours in `known`. Raises Transient."""
    with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
        current = {
            m.manifest.manifest_path
            for id in heads(table).values()
            if (head := table.snapshot_by_id(id)) is not None
            for m in list_manifests(table, head)[0]
        }
        listed = (m for snapshot in table.snapshots() for m in list_manifests(table, snapshot)[0])
        others = {m.manifest.manifest_path: m.manifest for m in listed if m.hour not in known}
        entries = read_entries(
            table.io, [manifest for path, manifest in others.items() if path not in current]
        )
        files = {e.data_file.file_path: e.data_file for of_manifest in entries for e in of_manifest}
    files = {path: f for path, f in files.items() if hour_of_file(table, f) not in known}
    hours = {hour_of_file(table, f) for f in files.values()}
    live = by_path(files_by_branch(table, hours)) if hours else {}
    return [f for path, f in sorted(files.items()) if path not in live]


def request_row(
    job: Job, one: Erasure, key: Key, hashes: Sequence[str], why: str, act: Act
) -> LedgerRow:
    recorded = {
        "id": one.id,
        "column": one.column,
        "key": key.id,
        "until": one.until.isoformat(),
        "hashes": list(hashes),
        "source": source_of(job.environment, job.stream, one.column),
    }
    hour = hour_of(one.at)
    id = f"{one.id}-{hour}"
    return ledger.decision(
        hour, "erasing", 0, None, one.at, id, reason=why, act=act, erasure=recorded
    )


def repair(job: Job, publisher: Publisher, values: Values, why: str) -> None:
    """Record again what the ledger lost of these values' erasures: the request, and places of dead
    letters that former snapshots have. They are open again. Idempotent. Raises Transient."""
    state = load_state(job.lake, job.stream.table)
    for key in keys_of(job.environment).values():
        hashes, number = key.hashes(values.column, values.texts), 0
        while (one := state.erasures.of(key.id_of(values.column, hashes, number))) is not None:
            number += 1
            if is_lacking(job, state, one):
                _record_places(job, publisher, one, values)
                _expect_recorded(job, publisher, one)
                # The last step: a run that was killed before it is repeated.
                row = request_row(job, one, key, hashes, why, act_now("erase", why))
                job.ledger.record([row])


def is_lacking(job: Job, state: State, one: Erasure) -> bool:
    """Whether the ledger lost rows about an erasure. Raises Transient."""
    requests = job.ledger.requests({hour_of(one.at)})
    if one.id not in {row.erasure["id"] for row in requests if row.erasure is not None}:
        return True
    recorded = _rows(job, state)
    return erasure.lacks_rows(recorded, one) or erasure.lacks_places(recorded, one)


def _record_places(job: Job, publisher: Publisher, one: Erasure, values: Values) -> None:
    table = job.lake.load(job.stream.dead_letters_table)
    files = {f.file_path: f for f in list_former(table, ())}
    payloads = Payloads(job.environment, job.stream)
    found = find_letters(payloads, table, one, values, list(files.values()))
    record_places(job, publisher, one, letters_of(table, found, files))


def _expect_recorded(job: Job, publisher: Publisher, one: Erasure) -> None:
    def decide() -> Decision[bool]:
        state = load_state(job.lake, job.stream.table)
        recorded = _rows(job, state)
        is_lost = erasure.lacks_places(recorded, one)
        publish = erasure.plan_repair(state, state.erasures[one.id], recorded, is_lost, new_id())
        return Decision(state, publish, is_lost)

    is_lost = publisher.run(decide, f"repair erasure {one.id}").result
    LOG.warning("stream %s: repaired erasure=%s lost=%s", job.stream.name, one.id, is_lost)


def _rows(job: Job, state: State) -> list[LedgerRow]:
    return [*job.ledger.history(None, ledger.BULKY_EXCEPT_ERASURE), *state.decisions]
