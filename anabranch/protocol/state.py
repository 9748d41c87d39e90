"""The state of a stream's table, read from one load of its metadata. Each branch is authoritative
for its own rows: `speed` for the position, `batch` for accepted hours, `main` for overrides and for
accepted hours without records. `main` has a copy of the state of all branches, from which a lost
branch is recreated. Every publish writes the timeline of hours; the newest one counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, lru_cache, partial
from typing import TYPE_CHECKING, Any

from anabranch.common.errors import PositionError, Refused, Terminal
from anabranch.common.json_values import dump, parse, read_property, read_stored
from anabranch.iceberg import snapshots
from anabranch.iceberg.commits import Change
from anabranch.iceberg.snapshots import CONTENT, MERGED
from anabranch.offsets.hours import Cut, Timeline, hours_between, shift
from anabranch.offsets.position import Offsets, Position, Topic, ranges_to_keys, to_keys
from anabranch.protocol.ledger_row import Layer, LedgerRow
from anabranch.protocol.registers import ERASURES, EXPIRED, Erasures, Expired, Holds

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from anabranch.iceberg.lake import Lake


POSITION = "anabranch.position"
TIMELINE = "anabranch.timeline"
ACCEPTED = "anabranch.accepted"
SETTLED = "anabranch.settled-before"
OVERRIDES = "anabranch.overrides"
DECISIONS = "anabranch.decisions"
DEAD_LETTERS = "anabranch.dead-letters"
KEPT = "anabranch.kept"
TURN = "anabranch.turn."
"""The prefix of the publish queue's properties; a turn's id follows."""
LOST = "anabranch.lost"
IMPORTED_FROM = "anabranch.imported-from"


@dataclass(frozen=True)
class Accepted:
    """An accepted hour of the batch branch. `by_choice`: an operator accepted it although rules
    failed. `unread`: the hours of its look-back that the speed layer served but had not read to
    their ends when duplicates were dropped; the hour is rebuilt after they are read."""

    revision: int
    cut: Cut
    by_choice: bool = False
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """The state of a stream's table from one load: everything that a decision needs, and the heads
    that its commit requires. `retained_hours`: the hours whose rows in `main` the last merge kept,
    because the layer that should serve them does not cover them; the rows are of the other layer.
    """

    table: Table
    heads: dict[str, int]
    position: Position
    timeline: Timeline
    accepted: dict[str, Accepted]
    settled_before: str
    overrides: dict[str, Layer]
    decisions: tuple[LedgerRow, ...]
    dead_letters: tuple[dict[str, Any], ...]
    merged: dict[str, str]
    retained_hours: tuple[str, ...]
    content: dict[str, str]
    branch_properties: dict[str, dict[str, str]]
    expired: Expired = field(default_factory=Expired)
    holds: Holds = field(default_factory=Holds)
    erasures: Erasures = field(default_factory=Erasures)

    @cached_property
    def cuts(self) -> dict[str, Cut]:
        """The cuts of all sealed hours that the branches still list."""
        return {h: a.cut for h, a in self.accepted.items()} | self.timeline.sealed

    def is_sealed(self, hour: str) -> bool:
        return self.timeline.first <= hour < self.timeline.open

    def is_accepted(self, hour: str) -> bool:
        if hour in self.accepted or self.is_expired(hour):
            return True
        return (
            self.is_sealed(hour) and hour < self.settled_before and hour not in self.timeline.sealed
        )

    @property
    def unaccepted(self) -> list[str]:
        """The sealed hours that are not accepted, oldest first. Looks only at hours that the
        branches list, and at those since `settled_before`."""
        settled = max(self.timeline.first, self.settled_before)
        listed = {*self.timeline.sealed, *hours_between(settled, self.timeline.open)}
        return sorted(h for h in listed if self.is_sealed(h) and not self.is_accepted(h))

    def is_expired(self, hour: str) -> bool:
        """Whether retention has removed the rows of an accepted hour from every branch."""
        return self.timeline.first <= hour and hour in self.expired

    @property
    def removed_at(self) -> datetime | None:
        """The time (UTC) of the last expiry or erasure, or None; older snapshots may have the
        rows."""
        return max(
            (at for at in (self.expired.at, self.erasures.changed) if at is not None), default=None
        )

    def served_by(self, hour: str) -> Layer:
        """Return the layer that serves the hour: an operator's override, else batch if it has
        accepted the hour, else speed."""
        return self.overrides.get(hour) or ("batch" if self.is_accepted(hour) else "speed")

    @property
    def waiting_letters(self) -> frozenset[str]:
        """The ids of the dead letters that are not published yet."""
        return frozenset(str(item["id"]) for item in self.dead_letters)

    @property
    def is_merged(self) -> bool:
        """Whether `main` was merged from the current rows of the other two branches."""
        return all(self.merged.get(b, "") == self.content[b] for b in ("speed", "batch"))

    def require_merged(self, what: str, stream: str) -> None:
        """Raise Refused unless `main` is merged. `what` names the refused work in the message."""
        if not self.is_merged:
            raise Refused(
                f"{what}: expected main to be merged from its current branches, found that it is "
                f"not; run `anabranch merge {stream}`"
            )


@dataclass(frozen=True)
class Confirmed:
    """The ids of waiting decisions that were found in the ledger, and of waiting dead letters that
    were found published. A decision and dead letters may have the same id."""

    decisions: frozenset[str] = frozenset()
    letters: frozenset[str] = frozenset()

    def __or__(self, other: Confirmed) -> Confirmed:
        return Confirmed(self.decisions | other.decisions, self.letters | other.letters)


NOTHING_CONFIRMED = Confirmed()


def plan_after(
    state: State, changes: Iterable[Change], timeline: Timeline, position: Position | None
) -> State:
    """Return the state after a publish of these changes: position, timeline, accepted and retained
    hours, overrides, expiry, erasures; else unchanged. Pure."""
    said = {change.branch: change.properties for change in changes}
    batch, main = said.get("batch", {}), said.get("main", {})
    lists = batch if ACCEPTED in batch else main
    return replace(
        state,
        position=position or state.position,
        timeline=timeline,
        accepted=_accepted(lists) if ACCEPTED in lists else state.accepted,
        settled_before=batch.get(SETTLED, state.settled_before),
        overrides=_overrides(main) if OVERRIDES in main else state.overrides,
        retained_hours=_kept(main) if KEPT in main else state.retained_hours,
        expired=Expired.from_properties(main) if EXPIRED in main else state.expired,
        erasures=Erasures.from_properties(main) if ERASURES in main else state.erasures,
    )


def load_state(lake: Lake, table_name: str) -> State:
    """Load a table and return its state. Raises Terminal without a position, Transient."""
    return read_state(lake.load(table_name))


def read_state(table: Table) -> State:
    """Return the state of a loaded table. Raises Terminal for a table without a position."""
    properties = {b: snapshots.branch_properties(table, b) for b in snapshots.BRANCHES}
    if POSITION not in properties["speed"]:
        name = ".".join(table.name())
        raise Terminal(
            f"table {name}: expected a position on branch speed, found none; run `anabranch apply`"
        )
    publishes = {b: snapshots.newest_publish(table, b) for b in snapshots.BRANCHES}
    newest = max(
        properties,
        key=lambda b: (
            TIMELINE in properties[b],
            (p.sequence_number or 0) if (p := publishes[b]) else 0,
        ),
    )
    # Every publish writes the timeline, and the newest one counts: a branch that is set back loses
    # no seal, no end of an hour and no adoption (decision 36).
    timeline = _with_imported(
        read_property(properties[newest], TIMELINE, Timeline.from_json), properties["batch"]
    )
    accepted, waiting = read_accepted(properties)
    # Decision 50: the furthest of the three branches counts, so a branch that is set back restores
    # no expired hour.
    expired = Expired.of_branches(properties.values())
    waiting = {hour: cut for hour, cut in waiting.items() if hour not in expired}
    # A `batch` that was set back and forward again lists hours that wait in the timeline.
    sealed = {
        hour: cut for hour, cut in (timeline.sealed | waiting).items() if hour not in accepted
    }
    if sealed != timeline.sealed:
        timeline = replace(timeline, sealed=sealed)
    return State(
        table=table,
        heads=snapshots.heads(table),
        position=read_property(properties["speed"], POSITION, Position.from_json),
        timeline=timeline,
        accepted=accepted,
        settled_before=properties["batch"].get(SETTLED, timeline.first),
        overrides=_overrides(properties["main"]),
        # From all branches, each id once: a publish writes its decisions on each branch that it
        # moves, and one of them may be set back before the ledger has the row.
        decisions=tuple(map(waiting_row, _union(properties.values(), DECISIONS))),
        dead_letters=_union(properties.values(), DEAD_LETTERS),
        merged=read_property(properties["main"], MERGED, partial(parse, dict[str, str])),
        retained_hours=_kept(properties["main"]),
        content={b: properties[b].get(CONTENT, "") for b in ("speed", "batch")},
        branch_properties=properties,
        expired=expired,
        # The newest record of the three counts: a branch that is set back releases no hold, and
        # undoes no erasure (decisions 50 and 51).
        holds=Holds.of_branches(properties.values()),
        erasures=Erasures.of_branches(properties.values()),
    )


def _with_imported(timeline: Timeline, batch: Mapping[str, str]) -> Timeline:
    """Return the timeline from the batch branch's first imported hour on. A branch that was set
    back to before an import lacks imported hours, and no rebuild restores them."""
    if not timeline.imported_through:
        return timeline
    return replace(timeline, first=batch.get(IMPORTED_FROM, timeline.first_of_kafka))


def state_of(table: Table, snapshot_id: int) -> State:
    """Return the state in a snapshot of `main`, with other branches as far as recorded. Raises
    Terminal without one. For readers, not for decisions."""
    properties = snapshots.snapshot_properties(table, snapshot_id)
    if not properties.keys() >= {POSITION, TIMELINE}:
        raise Terminal(
            f"table {'.'.join(table.name())}: expected snapshot {snapshot_id} to be one of main, "
            "found no state of hours in it; name a tag or a snapshot of main"
        )
    timeline = read_property(properties, TIMELINE, Timeline.from_json)
    return State(
        table=table,
        heads=dict.fromkeys(snapshots.BRANCHES, snapshot_id),
        position=read_property(properties, POSITION, Position.from_json),
        timeline=timeline,
        accepted=_accepted(properties),
        settled_before=properties.get(SETTLED, timeline.first),
        overrides=_overrides(properties),
        decisions=(),
        dead_letters=(),
        merged=read_property(properties, MERGED, partial(parse, dict[str, str])),
        retained_hours=_kept(properties),
        content={},
        branch_properties={"main": properties},
        expired=Expired.from_properties(properties),
        erasures=Erasures.from_properties(properties),
    )


def read_accepted(
    properties: Mapping[str, Mapping[str, str]],
) -> tuple[dict[str, Accepted], dict[str, Cut]]:
    """Return the accepted hours whose rows the batch branch contains, and the cuts of hours that it
    lost and that are to be rebuilt.

    `main` lists the accepted hours too. A batch branch recreated from `main` contains the rows that
    `main` served: hours stay accepted, except hours that an override had assigned to the speed
    layer. A branch that was rolled back lacks the hours accepted since, except hours without
    records, which only `main` may list.
    """
    batch, settled = _accepted(properties["batch"]), properties["batch"].get(SETTLED, "")
    known = _accepted(properties["main"]) | batch
    # `main` has the rows of the speed layer of an hour with such an override: on a recreated
    # `batch` they would count as accepted rows.
    recreated = snapshots.is_recreated(properties["batch"])
    overridden = _overrides(properties["batch"]) if recreated else {}
    accepted = {h: a for h, a in batch.items() if overridden.get(h) != "speed"}
    accepted |= {h: known[h] for h in main_only_hours(properties)}
    # Their cuts stay, so that the hours are rebuilt within the same offsets.
    lost = {h for h in known if h not in accepted and (h >= settled or h in batch)}
    return accepted, {h: known[h].cut for h in lost}


def main_only_hours(properties: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """Return the accepted hours without records that only `main` lists, oldest first."""
    batch, settled = _accepted(properties["batch"]), properties["batch"].get(SETTLED, "")
    listed = _accepted(properties["main"])
    return tuple(
        h for h in sorted(listed) if h not in batch and h >= settled and not listed[h].cut.offsets
    )


def _accepted(properties: Mapping[str, str]) -> dict[str, Accepted]:
    return dict(read_property(properties, ACCEPTED, _accepted_of))


def _overrides(properties: Mapping[str, str]) -> dict[str, Layer]:
    return read_property(properties, OVERRIDES, partial(parse, dict[str, Layer]))


def _kept(properties: Mapping[str, str]) -> tuple[str, ...]:
    return read_property(properties, KEPT, partial(parse, tuple[str, ...]), "[]")


def read_waiting(properties: Mapping[str, str], key: str) -> list[dict[str, Any]]:
    """Return the entries that wait under `key` on a branch. Raises Terminal."""

    def read(text: str) -> list[dict[str, Any]]:
        entries = parse(list[dict[str, Any]], text)
        # Each has an id and a time.
        if not all(isinstance(entry["id"], str) and entry["at"] for entry in entries):
            raise ValueError("an entry without an id or a time")
        return entries

    return read_property(properties, key, read, "[]")


def waiting_row(item: Mapping[str, Any]) -> LedgerRow:
    """Return a decision that waits for the ledger. Raises Terminal."""
    return read_stored(
        f"property {DECISIONS}", json.dumps(item), lambda _: LedgerRow.from_waiting(item)
    )


# Enough for the three branches of every stream of a process.
@lru_cache(maxsize=1 << 10)
def _accepted_of(text: str) -> Mapping[str, Accepted]:
    return parse(dict[str, Accepted], text)


# The accepted hours that a branch lists individually; the ledger has all of them.
REMEMBERED_HOURS = 48


# The most accepted hours that only `main` lists; `anabranch maintain` adds them to `batch` daily.
MAX_MAIN_ONLY_HOURS = 36


def empty_hours_changes(
    state: State, hours: Mapping[str, Accepted], measured: Mapping[str, str]
) -> tuple[Change, ...]:
    """Return the changes of a publish that accepts `hours`, which have no records. Pure.

    Only `main` moves, unless it alone would then list more than MAX_MAIN_ONLY_HOURS. In that case
    all branches move: `batch` lists the hours too, and recorded decisions are removed from `batch`
    and `speed`. `measured`: the measurements that the publish writes to `main`.
    """
    # Decision 52: a bound for what only one branch knows.
    if len(main_only_hours(state.branch_properties)) + len(hours) > MAX_MAIN_ONLY_HOURS:
        batch = Change("batch", properties=accepted_properties(state, hours))
        return Change("speed"), batch, Change("main", properties=measured)
    return (
        Change("main", properties={**measured, ACCEPTED: _to_json(state.accepted | dict(hours))}),
    )


def list_on_batch(state: State) -> tuple[Change, ...]:
    """Return the change that adds the hours that only `main` lists to `batch`, for a publish of
    every branch; empty without such hours. Pure."""
    hours = main_only_hours(state.branch_properties)
    return (Change("batch", properties=accepted_properties(state, {})),) if hours else ()


def _to_json(accepted: Mapping[str, Accepted]) -> str:
    return dump(dict(sorted(accepted.items())), dict[str, Accepted])


def accepted_properties(state: State, hours: Mapping[str, Accepted]) -> dict[str, str]:
    """Return the batch branch's properties after it accepted `hours`: the hours that it lists, and
    the hour before which all others are accepted.

    Hours older than the newest REMEMBERED_HOURS are removed from the list; their revisions are then
    read from the ledger. An hour stays on the list

    - in the publish that accepts or restates it, and while its dead letters or decisions wait,
    - until the speed layer has read it to its end,
    - while an override assigns it to the speed layer, since a batch branch recreated from `main`
      would lack its rows,
    - while it waits to be rebuilt, which the ledger does not record.
    """
    accepted = state.accepted | dict(hours)
    settled = state.settled_before
    waits = (
        {str(item.get("hour")) for item in state.dead_letters}
        | {row.hour for row in state.decisions}
        | set(hours)
    )
    waits |= {h for h, a in accepted.items() if a.unread or state.overrides.get(h) == "speed"}
    old = [h for h in sorted(accepted)[:-REMEMBERED_HOURS] if h not in waits]
    # In order, up to the first hour that has to stay: all hours before SETTLED count as accepted.
    for hour in old:
        ends = accepted[hour].cut.ends
        behind = hour >= state.timeline.since and any(
            state.position.offsets.get(p, 0) < e for p, e in ends.items()
        )
        if hour in state.timeline.sealed or behind:
            break
        del accepted[hour]
        settled = max(settled, shift(hour, 1))
    return {ACCEPTED: _to_json(accepted), SETTLED: settled}


# The most losses that a branch lists individually.
REMEMBERED_LOSSES = 200


def lost_entries(state: State, new: Sequence[Mapping[str, Any]]) -> str:
    """Return the losses recorded on the speed branch and the new ones as JSON, oldest first. Pure.

    The list stays short: beyond the newest REMEMBERED_LOSSES, losses of the same hours become one
    entry with the span and the count of their offsets, and losses of accepted hours are removed,
    since the ledger has their account.
    """
    lost = state.branch_properties["speed"]
    entries = [*read_property(lost, LOST, partial(parse, list[dict[str, Any]]), "[]"), *new]
    folded: dict[tuple[str, ...], dict[str, Any]] = {}
    for entry in entries[:-REMEMBERED_LOSSES]:
        hours = tuple(entry["hours"])
        if hours and all(state.is_accepted(h) for h in hours):
            continue
        known = folded.setdefault((entry["class"], *hours), {**entry, "ranges": {}, "offsets": 0})
        known["offsets"] += entry.get("offsets", sum(e - s for s, e in entry["ranges"].values()))
        for p, (start, end) in entry["ranges"].items():
            low, high = known["ranges"].get(p, (start, end))
            known["ranges"][p] = [min(low, start), max(high, end)]
    return json.dumps([*folded.values(), *entries[-REMEMBERED_LOSSES:]])


def _union(properties: Iterable[Mapping[str, str]], key: str) -> tuple[dict[str, Any], ...]:
    """Return the entries that wait under `key` on any branch, each id once, oldest first."""
    items: dict[str, dict[str, Any]] = {}
    for branch in properties:
        for item in read_waiting(branch, key):
            items.setdefault(item["id"], item)
    return tuple(sorted(items.values(), key=lambda item: str(item["at"])))


def check_topic(
    position: Position, topic: Topic | None, name: str, read_from: str = ""
) -> Position:
    """Return the position with the topic's id and partitions; new partitions begin at offset 0.

    `read_from` is the id of the cluster that the position's topic was in, if known. Raises
    PositionError if the topic was recreated, is gone, or has fewer partitions than the position.
    """
    if topic is None:
        raise PositionError(
            f"topic {name}: expected it to exist, found none; create it, or correct `topic:` in "
            "the stream's file"
        )
    if position.topic_id not in ("", topic.id):
        raise PositionError(_another_log(position, topic, name, read_from))
    # Kafka never removes partitions: this is another topic, and its offsets would be read as the
    # next ones of the position's log.
    if lost := sorted(set(position.offsets) - set(topic.partitions)):
        raise PositionError(
            f"topic {name}: expected partition {lost[0]}, found only {len(topic.partitions)} "
            "partitions; Kafka never removes partitions: check that kafka.bootstrap_servers names "
            "the cluster that the stream was read from"
        )
    bound = Position(topic.id, position.offsets)
    return bound.with_partitions(topic.partitions)


def _another_log(position: Position, topic: Topic, name: str, read_from: str) -> str:
    records = f", which has {topic.records} records" if topic.records is not None else ""
    moved = topic.cluster_id and read_from and topic.cluster_id != read_from
    cluster, former = (
        (f" in cluster {topic.cluster_id}", f" in cluster {read_from}") if moved else ("", "")
    )
    return (
        f"topic {name}: expected id {position.topic_id}{former}, read up to "
        f"{sum(position.offsets.values())} offsets in {len(position.offsets)} partitions, found "
        f"id {topic.id}{cluster}{records}: it was deleted and made again, or `topic:` or "
        "kafka.bootstrap_servers name the wrong topic or cluster; none of it is read, and "
        "published rows stay served. If the wrong one is named: correct the configuration and "
        "start the job again. Else: run `anabranch adopt`, which shows the topic's offsets and "
        "asks where to begin"
    )


def check_log_end(position: Position, ends: Offsets, name: str, what: str = "the position") -> None:
    """Raise PositionError with the lost offsets if a partition's log ends below `position`, which
    `what` names in the message. `ends` must be read after the position was loaded."""
    # Decision 48: a log that lost its end gives new records the offsets of published ones. To read
    # on from the position would skip them.
    lost = {p: (ends[p], o) for p, o in position.offsets.items() if ends.get(p, o) < o}
    if lost:
        raise PositionError(
            f"topic {name}: expected its log to reach {what} {to_keys(position.offsets)}, found "
            f"that Kafka lost published records: {ranges_to_keys(lost)}; their rows stay served, "
            "and nothing is read, since new records get their offsets: run `anabranch adopt` to "
            "continue at the first new record"
        )
