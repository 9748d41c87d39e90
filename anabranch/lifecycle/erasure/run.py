"""`anabranch erase`: erase records by the values of a column, in idempotent steps that a killed run
repeats (`anabranch.protocol.erasure`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from anabranch.common.errors import ConfigurationError, Refused, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.iceberg.files import list_files
from anabranch.iceberg.manifests import files_by_branch, hour_of_file, paths_by_hour
from anabranch.job import Job
from anabranch.lifecycle.erasure import rows
from anabranch.lifecycle.erasure.end import clear_partials, hours_of, log_starts, remember_folders
from anabranch.lifecycle.erasure.letters import (
    archive_files,
    archived_places,
    erase_archived,
    erase_letters,
    find_former,
    find_letters_of,
    repair,
    request_row,
)
from anabranch.lifecycle.erasure.rows import Found, erase_rows, hours_in_parts, record_unserved
from anabranch.lifecycle.erasure.search import (
    Place,
    Values,
    find_rows,
    require_column,
    require_values,
)
from anabranch.lifecycle.erasure.words import normal_forms
from anabranch.protocol import erasure, ledger
from anabranch.protocol.erasure import Key, keys_of
from anabranch.protocol.ledger_row import act_now
from anabranch.protocol.publish import Decision, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.registers import Erasure, Erasures
from anabranch.protocol.state import State, check_topic, load_state

LOG = logging.getLogger(__name__)

MOST_VALUES = 100_000
"""The maximum number of values of one erasure: the ledger has their hashes in one row."""


@dataclass(frozen=True)
class ErasureRequest:
    """An operator's request: values of a column, and the time after which no copy may be left.
    The values are searched in both normal forms of Unicode.
    `again`: erase also records that arrived since a completed request of the same values.
    `in_spite`: the reason to erase records of held hours too; None to refuse them."""

    column: str
    values: frozenset[str]
    why: str
    until: timedelta = timedelta(days=30)
    again: bool = False
    in_spite: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", normal_forms(self.values))

    @property
    def wanted(self) -> Values:
        return Values.of(self.column, self.values)


@dataclass(frozen=True)
class Erased:
    """The result of a run: the erasure and the removed records. `left`: why it is not done; None if
    it is. `was_done`: whether it was done before this run."""

    erasure: Erasure
    removed: Found
    left: str | None = None
    was_done: bool = False


def erase(job: Job, publisher: Publisher, request: ErasureRequest) -> Erased:
    """Remove every record with the requested values from every branch, and prevent both layers from
    publishing one again.

    Idempotent: the same request is the same erasure, and a run continues it. Raises
    ConfigurationError for an unsuitable column or key, Refused for a new request while held hours
    have such records, Transient.
    """
    require_valid(job, request)
    publisher.recover()
    # Else the copies in unreferenced files would be neither found nor deleted.
    table = job.lake.load(job.stream.table)
    next(list_files(table.io, f"{table.location()}/metadata"), None)
    remember_folders(job)
    values = request.wanted
    repair(job, publisher, values, request.why)
    one = _record_request(job, publisher, request)
    # First: the rows still show which archived records belong to them.
    erase_archived(job, publisher, one, values)
    removed, letters = erase_rows(job, publisher, one, values), set[tuple[str, Place]]()
    for _ in range(rows.ATTEMPTS):
        state = load_state(job.lake, job.stream.table)
        publisher.finish(state)
        archived = erase_archived(job, publisher, one, values)
        if (gone := erase_letters(job, publisher, one, values)) is not None:
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
        if current.is_lost and erasure.may_come_back(state, current, log_starts(job, state)):
            return Erased(
                current,
                removed,
                "the ledger lost the places of erased dead letters, which come back if an hour is "
                "rebuilt from Kafka; run the command again after that, and once Kafka has deleted "
                "the records from before the request",
            )
        reach(Step.ERASE_FOUND_NOTHING)
        done = erasure.plan_done(state, current, new_id(), job.lake.clock.now())
        if (landed := publisher.land(state, done, job.lake.clock.now())) is not None:
            LOG.info("stream %s: erasure %s is done", job.stream.name, one.id)
            return Erased(landed.state.erasures[one.id], removed)
    raise Transient(
        f"erase records of {job.stream.name}: expected no other publish in one of {rows.ATTEMPTS} "
        "attempts; run it again"
    )


def require_valid(job: Job, request: ErasureRequest) -> None:
    """Raise ConfigurationError if the request cannot be carried out."""
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
    """Return what `erase` would remove now. Raises the errors of `erase`, except for holds."""
    require_valid(job, request)
    state = load_state(job.lake, job.stream.table)
    one = Erasure(
        "",
        request.column,
        job.lake.clock.now(),
        job.lake.clock.now(),
        state.timeline.since,
        *_log_ends(job, state),
    )
    found = _search(job, state, one, request.wanted, lambda _: True)
    return replace(found, held=tuple(h for h in found.hours if state.holds.of(h) is not None))


def _search(
    job: Job, state: State, one: Erasure, values: Values, is_wanted: Callable[[str], bool]
) -> Found:
    """Return the records that an erasure would remove from the hours that `is_wanted` selects."""
    hours, paths, count = set[str](), set[str](), 0
    for part in hours_in_parts(state.table):
        there = files_by_branch(state.table, list(filter(is_wanted, part)))
        files = erasure.by_path(there)
        found = find_rows(state, one, values, files.values())
        hours |= paths_by_hour(state.table, [files[path] for path in found]).keys()
        paths |= found.keys()
        main = erasure.by_path({"main": there["main"]})
        count += sum(sum(counts.values()) for path, counts in found.items() if path in main)
    of_letters = find_letters_of(job, job.lake.load(job.stream.dead_letters_table), one, values)
    dead = {
        (h, place) for h, places in of_letters.by_hour.items() if is_wanted(h) for place in places
    }
    of_dead = {path for h, some in of_letters.paths.items() if is_wanted(h) for path in some}
    return Found(
        tuple(sorted(hours | {h for h, _ in dead})), len(paths) + len(of_dead), count, len(dead)
    )


def _require_unheld(
    job: Job, publisher: Publisher, state: State, one: Erasure, request: ErasureRequest
) -> None:
    """Raise Refused if held hours have records with the values, or if unread records may belong to
    such hours. Raises Transient."""
    if not state.holds.holds or request.in_spite is not None:
        return
    # Finish the publish first: its dead letters are in their table only then.
    publisher.finish(state)

    def is_held(hour: str) -> bool:
        return state.holds.of(hour) is not None

    hours = {*_search(job, state, one, request.wanted, is_held).hours}
    if job.lake.exists(job.stream.archive_table):
        table = job.lake.load(job.stream.archive_table)
        files = {
            path: f for path, f in archive_files(table).items() if is_held(hour_of_file(table, f))
        }
        archived = archived_places(job, table, list(files.values()), one, request.wanted)
        hours |= {hour_of_file(table, files[path]) for path in archived}
    if (found := erasure.held_against(state, one, hours, job.lake.clock.now())) is not None:
        raise Refused(
            f"erase records of {job.stream.name}: expected no such records in hours that "
            f"operators keep, found {found}; release the hours (`anabranch hold {job.stream.name} "
            "HOURS --release --why TEXT`), or erase the records anyway: --in-spite-of-hold TEXT"
        )


def _log_ends(job: Job, state: State) -> tuple[str, dict[int, int]]:
    """Return the topic id of the position and the log end offsets; the position's offsets if the
    topic is gone. Raises PositionError for a recreated topic that was not adopted: its records were
    accepted before the request too."""
    topic = job.kafka.describe(job.stream.topic, state.position)
    if topic is None:
        return state.position.topic_id, dict(state.position.offsets)
    check_topic(state.position, topic, job.stream.topic)
    # Not the last stable offsets: Kafka has accepted records of open transactions too.
    ends = job.kafka.accepted_ends(topic, state.position.offsets)
    return topic.id, {p: max(e, state.position.offsets.get(p, 0)) for p, e in ends.items()}


def _record_request(job: Job, publisher: Publisher, request: ErasureRequest) -> Erasure:
    """Record the erasure of a request in the ledger and on each branch, and return it. Returns the
    existing erasure if the request continues one."""
    stream = job.stream
    keys = list(keys_of(job.environment).values())
    known, id = _last_request(load_state(job.lake, stream.table).erasures, keys, request)
    if known is not None and (known.done is None or not request.again):
        LOG.info(
            "stream %s: continuing erasure %s of %s", stream.name, known.id, known.at.isoformat()
        )
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
            id,
            request.column,
            now,
            now + request.until,
            state.timeline.since,
            *_log_ends(job, state),
        )
        _require_unheld(job, publisher, state, one, request)
        row = request_row(job, one, key, hashes, why, act)
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
    """Return the newest recorded erasure of the same values, and the id of the next one by the
    first key. An erasure that is not done is preferred, also one by another key. Pure."""
    found, ids = list[Erasure](), list[str]()
    for key in keys:
        hashes, known, number = key.hashes(request.column, request.values), None, 0
        while (one := erasures.of(id := key.id_of(request.column, hashes, number))) is not None:
            known, number = one, number + 1
        found += [known] if known is not None and (known.done is None or key is keys[0]) else []
        ids.append(id)
    return min(found, key=lambda one: one.done is not None, default=None), ids[0]


def _record_former(job: Job, publisher: Publisher, one: Erasure, values: Values) -> None:
    """Record in the ledger the hours whose records with the values are only in former snapshots.
    Then the status names their files, and they are deleted after the deadline. Idempotent."""
    state = load_state(job.lake, job.stream.table)
    history = [*job.ledger.history(None, ledger.BULKY_EXCEPT_ERASURE), *state.decisions]
    found = find_former(job, state, one, values, hours_of(history, one))
    if found:
        reach(Step.ERASE_FORMER_FOUND)
        record_unserved(job, publisher, one, found)
        reach(Step.ERASE_FORMER_RECORDED)
        LOG.info(
            "stream %s: former snapshots alone have erased records erasure=%s hours=%d files=%d",
            job.stream.name,
            one.id,
            len(found),
            sum(map(len, found.values())),
        )
