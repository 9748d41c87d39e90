"""The account of the model: where every record is, what is decided of every hour, and what is lost
and said to be.

These promises are of worlds that follow decisions and dead letters. What a publish of rows names
counts as done, as it will be by the next process: so an offset is a row or a dead letter, never
both and never neither, at every moment.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache

from eraser import is_erased, outstanding
from small_world import File, Kafka, Lake, Row, Violation, World, ledger_row

from anabranch.iceberg.snapshots import BRANCHES
from anabranch.offsets.hours import Cut, hours_between
from anabranch.offsets.position import Ranges, ranges_from_keys
from anabranch.protocol import dead_letters, erasure, retention
from anabranch.protocol.ledger import newest, with_waiting
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.state import LOST

Place = tuple[int, int]


def check(world: World) -> None:
    """The invariants of every moment. Raises Violation."""
    named = _named_files(world)
    _check_letters(world.letters)
    _check_decisions(world.lake, world.ledger, world.restored > 0)
    _check_offsets(world.lake, world.letters, named, world.ledger, world.kafka)


def check_kept(before: World, after: World) -> None:
    """No step takes a record from what `main` served, rows and dead letters. Or a Violation."""
    if after.lake is before.lake and after.letters is before.letters:
        return
    expired, letters = after.lake.state.expired, retention.letters_expired(after.letters.table)
    worlds = [_of_main(world) for world in (before, after)]
    kept = {h for of in worlds for h in of if h not in expired and h not in letters}
    rows = [{row for h, of_hour in of.items() if h in kept for row in of_hour} for of in worlds]
    kafka, state = after.kafka, after.lake.state
    gone = [r for r in rows[0] - rows[1] if not is_erased(kafka, state, state.timeline.open, r)]
    if gone:
        raise Violation(f"main served {sorted(gone)}, and does not any more")


def _named_files(world: World) -> frozenset[File]:
    """The staged dead letters that a publish of rows names."""
    named = dead_letters.named_files(world.lake.state)
    return frozenset(f for f in world.storage if f.file_path in named)


def _of_main(world: World) -> dict[str, list[Row]]:
    return served(world.lake, world.letters, _named_files(world))


def check_rest(world: World) -> None:
    """The invariants once all actors are at rest. Raises Violation."""
    lake, letters = world.lake, world.letters
    known = {row.decision_id for row in map(ledger_row, world.ledger)}
    if left := [row.decision_id for row in lake.state.decisions if row.decision_id not in known]:
        raise Violation(f"at rest, the ledger lacks {left}")
    if left := [item["id"] for item in outstanding(lake.state, letters)]:
        raise Violation(f"at rest, the dead letters {left} are not published")
    main = served(lake, letters, frozenset())
    expired = _expired(lake, letters, world.ledger)
    there = {row for rows in main.values() for row in rows}
    lacks = {row for row in world.kafka.rows if row not in there and row[:2] not in expired}
    now = lake.state.timeline.open
    lacks = {row for row in lacks if not is_erased(world.kafka, lake.state, now, row)}
    if not_taken := lacks - world.kafka.taken:
        raise Violation(f"at rest, main and its dead letters lack {sorted(not_taken)}")
    lost = _said_lost(lake, main, world.ledger)
    # The length of an ended log behind the last cut is unknown: the adoption records the loss.
    seals = [row for row in map(ledger_row, world.ledger) if row.decision == "sealed"]
    cut = {(_cut(row).topic_id, place) for row in seals for place in _places(_cut(row).ranges)}
    others = (*world.kafka.past, *world.kafka.elsewhere)
    unknown = {row for row, id in others if (id, row[:2]) not in cut}
    # The account of an hour counts what compaction took before anybody read it.
    read = sorted(lacks - unknown - world.kafka.compacted)
    if untold := [row for row in read if row[:2] not in lost]:
        raise Violation(f"at rest, {untold} are lost, and nothing says so")


@cache
def served(lake: Lake, letters: Lake, named: frozenset[File]) -> dict[str, list[Row]]:
    """Return `main`'s rows and dead letters by hour, once those in files `named` are published."""
    state = lake.state
    hours = {b: letters.files_by_hour(b).items() for b in BRANCHES}
    branches = {b: {h: list(files.values()) for h, files in of} for b, of in hours.items()}
    for item in outstanding(lake.state, letters):
        files = tuple(f for f in named if f.file_path in item["paths"])
        hour_of = {f.file_path: f.hour for f in files}
        # type: ignore[arg-type]
        for change in dead_letters.plan_changes(state, item, files, hour_of):
            branch = branches[change.branch]
            copied = {hour: [*branches[of].get(hour, [])] for hour, of in change.copy.items()}
            branch.update({hour: [] for hour in change.clear} | copied)
            for file in change.add:
                known = branch.get(file.hour, [])  # type: ignore[attr-defined]
                branch[file.hour] = [*known, file]  # type: ignore[attr-defined, list-item]
    by_hour: dict[str, list[Row]] = {}
    for file in (*lake.files("main"), *(f for fs in branches["main"].values() for f in fs)):
        by_hour.setdefault(file.hour, []).extend(file.rows)
    return by_hour


@cache
def _check_letters(letters: Lake) -> None:
    expired = retention.letters_expired(letters.table)
    for branch in BRANCHES:
        if back := sorted({f.hour for f in letters.files(branch) if f.hour in expired}):
            raise Violation(f"the dead letters of {branch} have rows of {back}, which have expired")
        files = letters.files(branch)
        if twice := [row for row, count in Counter(letters.rows(branch)).items() if count > 1]:
            raise Violation(f"the dead letters of {branch} have {twice} more than once: {files}")


@cache
def _check_decisions(lake: Lake, ledger: tuple[str, ...], restored: bool) -> None:
    """Every seal and revision of an hour has one row, in the ledger or waiting for it."""
    state, recorded = lake.state, [ledger_row(text) for text in ledger]
    counts = Counter(row.decision_id for row in recorded)
    if twice := [id for id, count in counts.items() if count > 1]:
        raise Violation(f"the ledger has {twice} more than once")
    known = {row.decision_id for row in recorded}
    waiting = [row for row in state.decisions if row.decision_id not in known]
    rows = [*recorded, *waiting]
    for hour in hours_between(state.timeline.first, state.timeline.open):
        of_hour = [row for row in rows if row.hour == hour]
        revisions = sorted(row.revision for row in of_hour if row.decision == "accepted")
        accepted = state.accepted[hour].revision if hour in state.accepted else len(revisions)
        if revisions != list(range(1, accepted + 1)) or bool(revisions) != state.is_accepted(hour):
            said = f"{hour} is accepted as revision {accepted}"
            raise Violation(f"{said}, the ledger says {revisions}")
        seals = [row.cut for row in of_hour if row.decision == "sealed"]
        if len(seals) != 1 and not restored:
            raise Violation(f"{hour} is sealed, the ledger says so {len(seals)} times")
        if any(row.cut != seals[0] for row in of_hour if row.decision == "accepted" and seals):
            raise Violation(f"{hour} is accepted by another cut than {seals[0]}")


@cache
def _check_offsets(
    lake: Lake, letters: Lake, named: frozenset[File], ledger: tuple[str, ...], kafka: Kafka
) -> None:  # fmt: skip
    """Every offset is a row or a dead letter of `main`, or said to be lost."""
    state, main = lake.state, served(lake, letters, named)
    if state.retained_hours:
        # The speed layer's rows replace what a merge kept as soon as they cover the hour.
        return
    counts = Counter(row for rows in main.values() for row in rows)
    gone = retention.letters_expired(letters.table)
    if twice := [row for row, count in counts.items() if count > 1]:
        raise Violation(f"main and its dead letters have {twice} more than once: {main}")
    for hour, row in _newest_accepted(lake, ledger).items():
        if state.served_by(hour) != "batch" or state.is_expired(hour) or hour in gone:
            continue
        placed = erasure.places_of(_rows_of(lake, ledger, hour)).get(hour, set())
        # Dead letters whose places are recorded are counted as erased.
        cut, places = _places(_cut(row).ranges), {row[:2] for row in main.get(hour, ())} - placed
        erased = current.erased or 0 if (current := _current(lake, ledger, hour)) is not None else 0
        if _cut(row).topic_id == kafka.id:
            unheld = [(p, o) for p, o in cut - places if o < len(kafka.log[p])]
            controls = sum(kafka.shown(p, o) == "control" for p, o in unheld)
            if (row.gaps or {}).get("control", 0) > controls:
                found = f"the log has {controls} control records"
                raise Violation(f"{hour} is accepted with {row.gaps} in gaps, {found}")
        if places - cut or len(cut - places) != (row.gap or 0) + erased:
            said = f"{hour} is accepted as {sorted(cut)} with {row.gap or 0} in gaps and {erased}"
            raise Violation(f"{said} erased, main and its dead letters have {sorted(places)}")
        others = [row for row in kafka.rows if row[:2] in cut - places]
        absent = {row[:2] for row in others if is_erased(kafka, state, hour, row)}
        if len(absent) != erased:
            raise Violation(f"{hour} is accepted with {erased} erased, {sorted(absent)} are")
    # Before an adoption the position says nothing of a log that is another one.
    if kafka.is_read_at(state.position):
        read = [row for row in kafka.present if row[1] < state.position.offsets.get(row[0], 0)]
        lost = _said_lost(lake, main, ledger)
        expired = _expired(lake, letters, ledger)
        given = [row for row in read if row not in kafka.compacted and row[:2] not in expired]
        given = [row for row in given if not is_erased(kafka, state, state.timeline.open, row)]
        if missing := [row for row in given if row not in counts and row[:2] not in lost]:
            said = f"the position is {state.position.offsets}"
            raise Violation(f"{said}, main and its dead letters lack {missing}")


def _expired(lake: Lake, letters: Lake, ledger: tuple[str, ...]) -> set[Place]:
    """The places of the hours whose rows, or dead letters, have expired."""
    accepted = _newest_accepted(lake, ledger).items()
    gone = retention.letters_expired(letters.table)
    hours = {hour for hour, _ in accepted if lake.state.is_expired(hour) or hour in gone}
    return {place for hour, row in accepted if hour in hours for place in _places(_cut(row).ranges)}


def _said_lost(
    lake: Lake, main: Mapping[str, Iterable[Row]], ledger: tuple[str, ...]
) -> set[Place]:
    """The places said to be lost: by the speed layer, or in the ledger as an hour's gaps."""
    lost = json.loads(lake.state.branch_properties["speed"].get(LOST, "[]"))
    places = {place for entry in lost for place in _places(ranges_from_keys(entry["ranges"]))}
    for hour, row in _newest_accepted(lake, ledger).items():
        lacks = _places(_cut(row).ranges) - {row[:2] for row in main.get(hour, ())}
        if len(lacks) == (row.gap or 0):
            places |= lacks
    return places


def _newest_accepted(lake: Lake, ledger: tuple[str, ...]) -> dict[str, LedgerRow]:
    """Return what was decided of the newest revision of each accepted hour, recorded or not."""
    newest: dict[str, LedgerRow] = {}
    for row in (*map(ledger_row, ledger), *lake.state.decisions):
        if row.decision == "accepted" and row.revision >= newest.get(row.hour, row).revision:
            newest[row.hour] = row
    return newest


def _rows_of(lake: Lake, recorded: tuple[str, ...], hour: str) -> list[LedgerRow]:
    """The decisions about an hour, recorded or not."""
    return with_waiting(lake.state, hour, map(ledger_row, recorded))


def _current(lake: Lake, recorded: tuple[str, ...], hour: str) -> LedgerRow | None:
    """Return what the ledger says of an hour now."""
    return newest(_rows_of(lake, recorded, hour)).get(hour)


def _cut(row: LedgerRow) -> Cut:
    return row.cut


def _places(ranges: Ranges) -> set[Place]:
    return {(p, o) for p, (s, e) in ranges.items() for o in range(s, e)}


def forget() -> None:
    """Forget what was computed."""
    for computed in (served, _check_letters, _check_decisions, _check_offsets):
        computed.cache_clear()
