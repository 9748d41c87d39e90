"""Erase records by the values of a column: `anabranch erase`, in steps that are repeated after a
kill until all is done (`anabranch.protocol.erasure`)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from anabranch.common.errors import ConfigurationError, Refused, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.iceberg.hour_files import (
    files_by_branch,
    files_by_hour,
    hours_on_branches,
    paths_by_hour,
)
from anabranch.iceberg.manifests import hour_of_file
from anabranch.iceberg.rewriting import rewrite_kept
from anabranch.iceberg.snapshot_writer import delete_quietly
from anabranch.job import Job
from anabranch.lifecycle.erasure.end import clear_partials, hours_of, replaced_files
from anabranch.lifecycle.erasure.former import find_former
from anabranch.lifecycle.erasure.search import (
    Covered,
    Place,
    Values,
    column_of,
    covered_of,
    find_letters,
    find_places,
    find_rows,
    mask_of,
    places_by_hour,
    places_in,
    require_column,
    require_values,
)
from anabranch.offsets.hours import hour_of
from anabranch.protocol import archive, erasure, ledger
from anabranch.protocol.acts import act_now
from anabranch.protocol.erased import Erasure, Erasures
from anabranch.protocol.erasure_filter import keys_of, source_of
from anabranch.protocol.keyed_hashes import Key
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.publish import Decision, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import State, check_topic, load_state

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table

    from anabranch.iceberg.commits import Commit

LOG = logging.getLogger(__name__)

MOST_VALUES = 100_000
"""The most values of one erasure: the ledger has their hashes in one row."""

_HOURS_AT_ONCE = 240
# Files that one commit replaces, so that they are written well within the age by which it has to
# land.
_FILES_A_COMMIT = 32
_ATTEMPTS = 20


@dataclass(frozen=True)
class ErasureRequest:
    """What an operator wants erased: values of a column, and by when nothing is to be left.
    `again`: also records that arrived since the request of the same values that is done.
    `in_spite`: why records of held hours too; None: not."""

    column: str
    values: frozenset[str]
    why: str
    until: timedelta = timedelta(days=30)
    again: bool = False
    in_spite: str | None = None

    @property
    def wanted(self) -> Values:
        return Values.of(self.column, self.values)


@dataclass(frozen=True)
class Found:
    """What has the values, on any branch: files and rows in each hour, and dead letters. `held`:
    those of its hours that an operator holds."""

    hours: tuple[str, ...] = ()
    files: int = 0
    rows: int = 0
    dead: int = 0
    held: tuple[str, ...] = ()

    def plus(self, other: Found) -> Found:
        """Both together; they share no file and no dead letter."""
        hours = tuple(sorted({*self.hours, *other.hours}))
        return Found(
            hours, self.files + other.files, self.rows + other.rows, self.dead + other.dead
        )


@dataclass(frozen=True)
class Erased:
    """An erasure, what this run removed, and why it is not done, if so. `was_done`: before this
    run."""

    erasure: Erasure
    removed: Found
    left: str | None = None
    was_done: bool = False


def erase(job: Job, publisher: Publisher, request: ErasureRequest) -> Erased:
    """Remove every record that a request is of from every branch, and keep both layers from
    bringing one back.

    Idempotent: the same request is the same erasure, which goes on where it was left. Raises
    ConfigurationError for a column or a key that does not fit; Refused for a new request while held
    hours have such records; Transient.
    """
    require(job, request)
    publisher.recover()
    one, values = _request(job, publisher, request), request.wanted
    # While the rows still show which archived records are theirs.
    _erase_archived(job, publisher, one, values)
    removed, letters = _erase_rows(job, publisher, one, values), set[tuple[str, Place]]()
    for _ in range(_ATTEMPTS):
        state = load_state(job.lake, job.stream.table)
        publisher.finish(state)
        archived = _erase_archived(job, publisher, one, values)
        if (gone := _erase_letters(job, publisher, one, values)) is not None:
            letters |= gone
            removed = replace(removed, dead=len(letters))
        current = state.erasures[one.id]
        if gone is not None or archived:
            continue
        if current.done is None:
            _record_former(job, publisher, one, values)
        clear_partials(job)
        reach(Step.ERASE_PARTIALS_CLEARED)
        if current.done is not None:
            return Erased(current, removed, was_done=True)
        if not erasure.is_read(state, current):
            return Erased(
                current,
                removed,
                "records from before the request are yet to be read; run the command again once "
                "the speed layer or the batch layer has read them",
            )
        reach(Step.ERASE_FOUND_NOTHING)
        done = erasure.plan_done(state, current, new_id(), job.lake.clock.now())
        if (landed := publisher.land(state, done, job.lake.clock.now())) is not None:
            LOG.info("stream %s: erasure %s is done", job.stream.name, one.id)
            return Erased(landed.state.erasures[one.id], removed)
    raise Transient(
        f"erase records of {job.stream.name}: expected no other publish in one of {_ATTEMPTS} "
        "attempts; run it again"
    )


def require(job: Job, request: ErasureRequest) -> None:
    """Raise ConfigurationError for a request that cannot be carried out."""
    require_column(job.lake.load(job.stream.table).schema(), request.column, job.stream.name)
    if "erasure" not in job.lake.load(job.stream.hours_table).schema().column_names:
        raise ConfigurationError(
            f"ledger {job.stream.hours_table}: expected a column erasure, found none; run "
            f"`anabranch apply {job.stream.name}`"
        )
    if not request.values or len(request.values) > MOST_VALUES:
        raise ConfigurationError(
            f"--values: expected 1 to {MOST_VALUES:,} values, one a line, found "
            f"{len(request.values):,}"
        )
    require_values(job.lake.load(job.stream.table).schema(), request.wanted)
    if job.environment.erasure is None:
        raise ConfigurationError(
            "erasure.key: expected a secret of 16 characters or more in conf/anabranch.yaml, "
            "found none: the ledger has erased values as hashes by this key"
        )


def find(job: Job, request: ErasureRequest) -> Found:
    """What `erase` would remove now; nothing is changed. Raises as `erase`, but for holds."""
    require(job, request)
    state = load_state(job.lake, job.stream.table)
    one = Erasure(
        "",
        request.column,
        job.lake.clock.now(),
        job.lake.clock.now(),
        state.timeline.since,
        *_ends(job, state),
    )
    found = _search(job, state, one, request.wanted, lambda _: True)
    return replace(found, held=tuple(h for h in found.hours if state.holds.of(h) is not None))


def _search(
    job: Job, state: State, one: Erasure, values: Values, is_wanted: Callable[[str], bool]
) -> Found:
    """What an erasure would remove of some hours."""
    hours, paths, rows = set[str](), set[str](), 0
    for part in _parts(state.table):
        there = files_by_branch(state.table, list(filter(is_wanted, part)))
        files = erasure.by_path(there)
        found = find_rows(state, one, values, files.values())
        hours |= paths_by_hour(state.table, [files[path] for path in found]).keys()
        paths |= found.keys()
        main = erasure.by_path({"main": there["main"]})
        rows += sum(sum(counts.values()) for path, counts in found.items() if path in main)
    of_letters = _find_letters(job.lake.load(job.stream.dead_letters_table), one, values)
    dead = {
        (h, place) for h, places in of_letters.by_hour.items() if is_wanted(h) for place in places
    }
    of_dead = {path for h, some in of_letters.paths.items() if is_wanted(h) for path in some}
    return Found(
        tuple(sorted(hours | {h for h, _ in dead})), len(paths) + len(of_dead), rows, len(dead)
    )


def _require_unheld(
    job: Job, publisher: Publisher, state: State, one: Erasure, request: ErasureRequest
) -> None:
    """Refuse a request while hours that an operator holds have such records, or records that are
    yet to be read may be of them. Raises Refused, Transient."""
    if not state.holds.holds or request.in_spite is not None:
        return
    # Dead letters that a publish names are in their table once that is finished.
    publisher.finish(state)

    def is_held(hour: str) -> bool:
        return state.holds.of(hour) is not None

    hours = {*_search(job, state, one, request.wanted, is_held).hours}
    if job.lake.exists(job.stream.archive_table):
        table = job.lake.load(job.stream.archive_table)
        files = {
            path: f for path, f in _archive_files(table).items() if is_held(hour_of_file(table, f))
        }
        archived = _archived_places(job, table, list(files.values()), one, request.wanted)
        hours |= {hour_of_file(table, files[path]) for path in archived}
    if (found := erasure.held_against(state, one, hours, job.lake.clock.now())) is not None:
        raise Refused(
            f"erase records of {job.stream.name}: expected no such records in hours that "
            f"operators keep, found {found}; release the hours (`anabranch hold {job.stream.name} "
            "HOURS --release --why TEXT`), or erase them in spite of it: --in-spite-of-hold TEXT"
        )


def _ends(job: Job, state: State) -> tuple[str, dict[int, int]]:
    """The id of the position's log and its ends; of a log that is gone, the position. Raises
    PositionError for a topic that was made again and not adopted: its records were accepted before
    the request too."""
    topic = job.kafka.describe(job.stream.topic, state.position)
    if topic is None:
        return state.position.topic_id, dict(state.position.offsets)
    check_topic(state.position, topic, job.stream.topic)
    # Records of open transactions were accepted too.
    ends = job.kafka.accepted_ends(topic, state.position.offsets)
    return topic.id, {p: max(e, state.position.offsets.get(p, 0)) for p, e in ends.items()}


def _request(job: Job, publisher: Publisher, request: ErasureRequest) -> Erasure:
    """The erasure of a request, recorded in the ledger and on each branch."""
    stream = job.stream
    keys = list(keys_of(job.environment).values())
    known, id = _last_request(load_state(job.lake, stream.table).erasures, keys, request)
    if known is not None and (known.done is None or not request.again):
        LOG.info("stream %s: erasure %s of %s goes on", stream.name, known.id, known.at.isoformat())
        return known
    key, hashes = keys[0], keys[0].hashes(request.column, request.values)
    why = (
        request.why
        if request.in_spite is None
        else f"{request.why}; although hours are kept: {request.in_spite}"
    )
    act = act_now("erase", why)

    def decide() -> Decision[Erasure]:
        state = load_state(job.lake, stream.table)
        now = job.lake.clock.now()
        one = Erasure(
            id, request.column, now, now + request.until, state.timeline.since, *_ends(job, state)
        )
        _require_unheld(job, publisher, state, one, request)
        said = {
            "id": id,
            "column": request.column,
            "key": key.id,
            "until": one.until.isoformat(),
            "hashes": list(hashes),
            "source": source_of(job.environment, stream, request.column),
        }
        row = ledger.decision(
            hour_of(now),
            "erasing",
            0,
            None,
            now,
            f"{id}-{hour_of(now)}",
            reason=why,
            act=act,
            erasure=said,
        )
        job.ledger.record([row])
        reach(Step.ERASE_REQUESTED)
        return Decision(state, erasure.plan_request(state, one, new_id()), one)

    published = publisher.run(decide, f"erase records of {stream.name}")
    one = published.state.erasures[id]
    reach(Step.ERASE_RECORDED)
    LOG.info(
        "stream %s: erasure %s recorded column=%s values=%d",
        stream.name,
        id,
        one.column,
        len(hashes),
    )
    return one


def _last_request(
    erasures: Erasures, keys: Sequence[Key], request: ErasureRequest
) -> tuple[Erasure | None, str]:
    """The newest request of the same values that the branches record, and the id of the next one,
    by the first key. One that is not done comes first, also by another key. Pure."""
    found, ids = list[Erasure](), list[str]()
    for key in keys:
        hashes, known, number = key.hashes(request.column, request.values), None, 0
        while (one := erasures.of(id := key.id_of(request.column, hashes, number))) is not None:
            known, number = one, number + 1
        found += [known] if known is not None and (known.done is None or key is keys[0]) else []
        ids.append(id)
    return min(found, key=lambda one: one.done is not None, default=None), ids[0]


def _parts(table: Table) -> Iterator[list[str]]:
    """The hours that any branch has files of, some at once, oldest first."""
    hours = sorted(hours_on_branches(table))
    for begin in range(0, len(hours), _HOURS_AT_ONCE):
        yield hours[begin : begin + _HOURS_AT_ONCE]


def _erase_rows(job: Job, publisher: Publisher, one: Erasure, values: Values) -> Found:
    removed = Found()
    for part in _parts(job.lake.load(job.stream.table)):
        for _ in range(_ATTEMPTS):
            state = load_state(job.lake, job.stream.table)
            files = erasure.by_path(files_by_branch(state.table, part))
            found = sorted(find_rows(state, one, values, files.values()).items())
            if not found:
                break
            for begin in range(0, len(found), _FILES_A_COMMIT):
                some = dict(found[begin : begin + _FILES_A_COMMIT])
                removed = removed.plus(
                    _rewrite_rows(job, publisher, one, values, some, state, files)
                )
        else:
            raise Transient(
                f"erase records of {job.stream.name}: expected the files of hours {part[0]} to "
                f"{part[-1]} to stay in one of {_ATTEMPTS} attempts, found others each time; run "
                "the command again"
            )
    return removed


def _rewrite_rows(
    job: Job,
    publisher: Publisher,
    one: Erasure,
    values: Values,
    found: Mapping[str, Mapping[int, int]],
    state: State,
    files: Mapping[str, DataFile],
) -> Found:
    """Replace the files of `found` on every branch in one commit; nothing where one of them left
    all of them meanwhile. `files`: by path, files of the table in a `state`."""
    stream, began, schema = job.stream, job.lake.clock.now(), state.table.schema()
    paths = paths_by_hour(state.table, [files[path] for path in found])
    written: dict[str, DataFile | None] = {}

    def decide(state: State) -> Decision[Found]:
        there, current = files_by_branch(state.table, paths), state.erasures[one.id]
        # A branch that was set back has files again whose rows the accounts have lost before.
        rows = _rows_erased(state, there, found)
        known = _replaced_before(job, state, current, paths)
        of_account = _rows_erased(
            state, there, {path: counts for path, counts in found.items() if path not in known}
        )
        decisions = _decisions(job, state, current, of_account, {}, paths)
        now = job.lake.clock.now()
        publish = erasure.plan_rewrite(
            state, current, written, there, decisions, new_id(), began, now
        )
        reach(Step.ERASE_DECIDED)
        counted = sum(sum(counts.values()) for counts in rows.values())
        return Decision(state, publish, Found(tuple(sorted(paths)), len(written), counted))

    for path in sorted(found):
        covered = covered_of(state, one, files[path])
        written[path] = rewrite_kept(
            state.table, files[path], partial(_kept, schema, values, covered)
        )
    reach(Step.ERASE_WRITTEN)
    published = publisher.run_merged(decide, f"erase records of {stream.name}")
    if published.landed is None:
        delete_quietly(state.table, [f.file_path for f in written.values() if f is not None])
        return Found()
    reach(Step.ERASE_PUBLISHED)
    publisher.record_decisions(published.state)
    done = published.result
    LOG.info(
        "stream %s: erased rows erasure=%s rows=%d files=%d hours=%d first=%s",
        stream.name,
        one.id,
        done.rows,
        done.files,
        len(done.hours),
        done.hours[0],
    )
    return done


def _kept(
    schema: Schema, values: Values, covered: Covered, batch: pa.RecordBatch
) -> pa.BooleanArray:
    name = column_of(batch.schema, schema, values.column)
    if name is None:
        return pa.repeat(True, len(batch))
    return pc.invert(pc.fill_null(mask_of(batch, name, values, covered), False))


def _replaced_before(job: Job, state: State, one: Erasure, hours: Collection[str]) -> set[str]:
    """The files of some hours that the erasure has replaced already, and counted."""
    history = job.ledger.history(set(hours))
    rows = [row for hour in hours for row in ledger.with_waiting(state, hour, history)]
    return replaced_files(
        (row for row in rows if not (row.erasure or {}).get(erasure.UNSERVED)), one
    )


def _rows_erased(
    state: State, there: Mapping[str, erasure.Files], found: Mapping[str, Mapping[int, int]]
) -> dict[str, dict[int, int]]:
    """By hour, how many rows its account loses, by partition: those of the layer whose account it
    is."""
    rows: dict[str, dict[int, int]] = {}
    for hour in {h for files in there.values() for h in files}:
        own = there["batch" if state.is_accepted(hour) else "speed"].get(hour, {})
        counts = Counter[int]()
        for path in own:
            counts.update(found.get(path, {}))
        rows[hour] = dict(counts)
    return rows


def _decisions(
    job: Job,
    state: State,
    one: Erasure,
    rows: Mapping[str, Mapping[int, int]],
    dead: Mapping[str, Collection[Place]],
    paths: Mapping[str, Collection[str]],
    accepted: Mapping[str, Collection[Place]] | None = None,
) -> list[LedgerRow]:
    """The ledger's rows of the part of an erasure in some hours; `paths`: by hour, the files that
    are replaced."""
    now, decided = job.lake.clock.now(), list[LedgerRow]()
    history = job.ledger.history({*rows, *dead})
    for hour in sorted({*rows, *dead}):
        row = ledger.newest(ledger.with_waiting(state, hour, history)).get(hour)
        before = row if row is not None and state.is_accepted(hour) else None
        places = dead.get(hour, ())
        # The account of an accepted hour is that of the batch layer.
        of_dead = dict(Counter(p for p, o in places if (p, o) in (accepted or {}).get(hour, ())))
        counts = rows.get(hour, {})
        decided.append(
            ledger.decision(
                hour,
                "erased",
                before.revision if before is not None else 0,
                None,
                now,
                account=erasure.plan_account(before, counts, of_dead),
                erasure=erasure.erased_of_hour(one, counts, places, paths.get(hour, ())),
            )
        )
    return decided


# Dead letters


@dataclass(frozen=True)
class _Letters:
    """Dead letters with erased values: by the path of their file, by hour, and by hour those of the
    batch layer. Their files: `files` by path, `paths` by hour."""

    by_path: Mapping[str, set[Place]]
    by_hour: Mapping[str, set[Place]]
    accepted: Mapping[str, set[Place]]
    files: Mapping[str, DataFile]
    paths: Mapping[str, set[str]]


def _find_letters(table: Table, one: Erasure, values: Values) -> _Letters:
    there = files_by_branch(table)
    files, batch = erasure.by_path(there), erasure.by_path({"batch": there["batch"]})
    found = find_letters(table, one, values, files.values())
    accepted = {path: places for path, places in found.items() if path in batch}
    paths = paths_by_hour(table, [files[path] for path in found])
    return _Letters(
        found,
        places_by_hour(table, files, found),
        places_by_hour(table, files, accepted),
        files,
        paths,
    )


def _erase_letters(
    job: Job, publisher: Publisher, one: Erasure, values: Values
) -> set[tuple[str, Place]] | None:
    """Remove the dead letters that have the values from every branch, some files in a commit;
    returns those that left, by hour and place, None where there were none."""
    table = job.lake.load(job.stream.dead_letters_table)
    found = _find_letters(table, one, values)
    if not found.by_path:
        return None
    _record_places(job, publisher, one, found)
    paths, gone = sorted(found.by_path), set[tuple[str, Place]]()
    for begin in range(0, len(paths), _FILES_A_COMMIT):
        gone |= _rewrite_letters(job, table, found, paths[begin : begin + _FILES_A_COMMIT])
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
    job: Job, table: Table, found: _Letters, paths: Sequence[str]
) -> set[tuple[str, Place]]:
    """Replace some files of dead letters on every branch in one commit; returns what left, nothing
    where a file left meanwhile."""
    lake, stream, began = job.lake, job.stream, job.lake.clock.now()
    hour_of_path = {path: hour_of_file(table, found.files[path]) for path in paths}
    written = {
        path: rewrite_kept(table, found.files[path], partial(_kept_letters, found.by_path[path]))
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


# The archive


def _erase_archived(job: Job, publisher: Publisher, one: Erasure, values: Values) -> int:
    """Remove archived records that have the values as words, and those of rows that have them;
    returns how many left.

    Moves the head of the archive once every file was searched: records that were read before the
    erasure was recorded are archived no more. Idempotent. Raises Transient.
    """
    lake, name = job.lake, job.stream.archive_table
    if not lake.exists(name):
        return 0
    searched, count = set[str](), 0
    for _ in range(_ATTEMPTS):
        table = lake.load(name)
        files = {path: f for path, f in _archive_files(table).items() if path not in searched}
        found = sorted(_archived_places(job, table, list(files.values()), one, values).items())
        searched |= files.keys() - dict(found).keys()
        for begin in range(0, len(found), _FILES_A_COMMIT):
            some = dict(found[begin : begin + _FILES_A_COMMIT])
            _record_unserved(
                job, publisher, one, paths_by_hour(table, [files[path] for path in some])
            )
            written = _rewrite_archived(job, table, files, some)
            if written is not None:
                searched |= written
                count += sum(map(len, some.values()))

        def plan(current: Table, searched: Collection[str] = frozenset(searched)) -> Commit | None:
            return archive.plan_searched(
                current, _archive_files(current), searched, new_id(), job.lake.clock.now()
            )

        if (
            lake.commit_until_landed(name, f"erase archived records of {job.stream.name}", plan)
            is not None
        ):
            break
    else:
        raise Transient(
            f"erase archived records of {job.stream.name}: expected no new file in one of "
            f"{_ATTEMPTS} attempts, found some each time; run the command again"
        )
    if count:
        LOG.info(
            "stream %s: erased archived records erasure=%s count=%d", job.stream.name, one.id, count
        )
    return count


def _archive_files(table: Table) -> dict[str, DataFile]:
    return erasure.by_path({"main": files_by_hour(table, "main")})


def _rewrite_archived(
    job: Job, table: Table, files: Mapping[str, DataFile], found: Mapping[str, Collection[Place]]
) -> set[str] | None:
    """Replace files of the archive by those without the places of `found`; returns the new paths,
    None if a file left meanwhile."""
    name, began = job.stream.archive_table, job.lake.clock.now()
    written = {
        path: rewrite_kept(table, files[path], partial(_kept_letters, found[path]))
        for path in found
    }
    reach(Step.ERASE_ARCHIVE_WRITTEN)

    def plan(current: Table) -> Commit | None:
        return archive.plan_erase(
            current, _archive_files(current), written, new_id(), began, job.lake.clock.now()
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


def _archived_places(
    job: Job, table: Table, files: Sequence[DataFile], one: Erasure, values: Values
) -> dict[str, set[Place]]:
    """By the path of a file of the archive, the places of records to erase."""
    state = load_state(job.lake, job.stream.table)
    found = find_letters(table, one, values, files)
    rows = erasure.by_path(files_by_branch(state.table, {hour_of_file(table, f) for f in files}))
    by_hour = places_by_hour(state.table, rows, find_places(state, one, values, rows.values()))
    for f in files:
        of_hour = by_hour.get(hour_of_file(table, f))
        if of_hour and (here := of_hour & places_in(table, f)):
            found.setdefault(f.file_path, set()).update(here)
    return found


def _record_former(job: Job, publisher: Publisher, one: Erasure, values: Values) -> None:
    """Record in the ledger the hours of which only former snapshots have such records, so that the
    status names their files and the deadline ends them. Idempotent."""
    state = load_state(job.lake, job.stream.table)
    history = [*job.ledger.history(None, ledger.BULKY_BUT_ERASURES), *state.decisions]
    found = find_former(job, state, one, values, hours_of(history, one))
    if found:
        reach(Step.ERASE_FORMER_FOUND)
        _record_unserved(job, publisher, one, found)
        reach(Step.ERASE_FORMER_RECORDED)
        LOG.info(
            "stream %s: former snapshots alone have erased records erasure=%s hours=%d files=%d",
            job.stream.name,
            one.id,
            len(found),
            sum(map(len, found.values())),
        )


def _record_unserved(
    job: Job, publisher: Publisher, one: Erasure, paths: Mapping[str, Collection[str]]
) -> None:
    """Record in the ledger, by hour, files with erased records that no branch of the rows has."""

    def decide(state: State) -> Decision[None]:
        current = state.erasures[one.id]
        decisions = _decisions(job, state, current, {hour: {} for hour in paths}, {}, paths)
        return Decision(
            state,
            erasure.plan_unserved(state, current, decisions, new_id(), job.lake.clock.now()),
            None,
        )

    published = publisher.run_merged(decide, f"erase records of {job.stream.name}")
    publisher.record_decisions(published.state)


def _kept_letters(places: Collection[Place], batch: pa.RecordBatch) -> pa.BooleanArray:
    at = zip(batch["kafka_partition"].to_pylist(), batch["kafka_offset"].to_pylist(), strict=True)
    return pa.array([place not in places for place in at], pa.bool_())


def _record_places(job: Job, publisher: Publisher, one: Erasure, found: _Letters) -> None:
    """Record the places of dead letters on each branch and in the ledger, before they leave their
    table."""

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
        decisions = _decisions(job, state, current, {}, new, found.paths, found.accepted)
        reach(Step.ERASE_PLACES_DECIDED)
        return Decision(state, erasure.plan_places(state, current, decisions, new_id()), None)

    published = publisher.run_merged(decide, f"erase dead letters of {job.stream.name}")
    if published.landed is not None:
        reach(Step.ERASE_PLACES_PUBLISHED)
        publisher.record_decisions(published.state)
