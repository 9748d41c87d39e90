"""The speed layer's decisions, as pure functions: a micro-batch's hours and next step, its publish,
and how the job catches up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum

from pyiceberg.manifest import DataFile

from anabranch.config import Speed
from anabranch.iceberg.commits import Change
from anabranch.iceberg.manifests import oldest_timestamps
from anabranch.iceberg.snapshots import Staged
from anabranch.iceberg.staging import MOST_OPEN_FILES, Written, is_staged, is_young
from anabranch.offsets.hours import Cut, HourRange, hour_of, hour_ranges
from anabranch.offsets.position import (
    Offsets,
    Position,
    RangeRelation,
    Ranges,
    advance,
    classify,
    clip,
    ranges_between,
    ranges_to_keys,
    size,
    trim,
)
from anabranch.protocol.dead_letters import waiting_speed
from anabranch.protocol.merge import needs_merge
from anabranch.protocol.publish import Publish
from anabranch.protocol.sealing import ResolvedState
from anabranch.protocol.state import LOST, State, lost_entries
from anabranch.protocol.watermarks import Watermarks, waiting_since


@dataclass(frozen=True)
class StagedBatch:
    """Staged rows and dead letters, with their topic id, ranges by hour and the seconds that
    staging took. `erasures`: marks of the erasures that staging applied."""

    topic_id: str
    by_hour: dict[str, Ranges]
    rows: Staged | Written
    dead: Staged | None
    seconds: float = 0.0
    erasures: frozenset[str] = frozenset()

    @property
    def attempt(self) -> str:
        return self.rows.id if isinstance(self.rows, Written) else self.rows.wap_id


class Next(Enum):
    DONE = "its offsets are already published"
    RESTART = "it lies ahead of the position, or in a partition that the position lacks"
    STAGE = "nothing is staged, or the staged rows are outdated"
    DECIDE = "its hours are not decided yet: publish the boundaries of the hours before it first"
    MERGE = "main needs a merge first"
    PUBLISH = "publish the staged rows"


@dataclass(frozen=True)
class Plan:
    """A micro-batch's next step, and for STAGE, MERGE and PUBLISH its remaining offsets by hour.
    `whole` is false if offsets after the decided hours are left for a later publish."""

    next: Next
    todo: Ranges
    trimmed: bool
    hours: list[HourRange]
    by_hour: dict[str, Ranges]
    whole: bool = True


def plan_micro_batch(
    decided: ResolvedState, ranges: Ranges, staged: StagedBatch | None, now: datetime | None = None
) -> Plan:
    """Plan the next step for the offsets of `ranges`, given the micro-batch in `staged`. Pure.
    `now`: the clock, read after the state was loaded, to judge the age of files without a snapshot.
    The decision's own time is earlier."""
    state, position = decided.state, decided.position
    if not ranges.keys() <= position.offsets.keys():
        # The broker that answered does not know the new partition yet, so no hour could end there.
        return Plan(Next.RESTART, {}, False, [], {})
    relation = classify(ranges, position.offsets)
    if relation in (RangeRelation.PUBLISHED, RangeRelation.AHEAD):
        # A range ahead of the position leaves offsets out. To publish it would move the position
        # past them.
        step = Next.DONE if relation is RangeRelation.PUBLISHED else Next.RESTART
        return Plan(step, {}, False, [], {})
    # Offsets below the position are published. A restart, or Spark's own retry, may read them
    # again.
    left = trim(ranges, position.offsets)
    hours = hour_ranges(decided.timeline, state.cuts, position.offsets, decided.now)
    # Only offsets of decided hours: an hour that is guessed may end elsewhere, and the row would be
    # in another hour than in the batch layer's cut.
    todo = within_hours(left, hours)
    if not todo:
        return Plan(Next.DECIDE, {}, False, hours, {}, whole=False)
    by_hour = assign(todo, hours)
    # Keep only the micro-batch's own hours, usually one: each hour costs a comparison per record.
    hours = [h for h in hours if h.ends is None or h.hour in by_hour]
    matches = staged is not None and _matches_decision(staged, state, position, by_hour)
    # Decision 20: early staging is a guess. Rows that were staged for another topic, split or set
    # of erasures, or whose files may be gone, are staged again.
    if staged is None or not matches or not _still_exists(state, staged, now):
        step = Next.STAGE
    else:
        step = Next.MERGE if needs_merge(state) else Next.PUBLISH
    return Plan(
        step,
        todo,
        relation is RangeRelation.OVERLAPPING or todo != left,
        hours,
        by_hour,
        todo == left,
    )


def plan_ahead(decided: ResolvedState, ranges: Ranges, now: datetime) -> Plan | None:
    """Plan how to stage `ranges` by the last decision, while the offsets before them are still
    being published. Pure.

    The plan is a guess: `plan_micro_batch` later accepts the staged rows or requests staging again.
    Returns None if the guess is likely wrong: an hour has ended since, or a partition is new.
    """
    if hour_of(now) != hour_of(decided.now):
        return None
    position = decided.position
    before = {p: ranges[p][0] if p in ranges else o for p, o in position.offsets.items()}
    guess = plan_micro_batch(
        replace(decided, position=Position(position.topic_id, before)), ranges, None
    )
    return guess if guess.next is Next.STAGE and guess.whole else None


def plan_write(dates: int | None, hours: int) -> dict[str, str]:
    """Return Iceberg write options for rows of `dates` event dates (None: unbounded) and `hours`
    hours. Pure.

    For few table partitions: fanout, with an open file for each. Otherwise each task sorts its rows
    by partition and has one file open at a time. The table's sort order is the batch layer's, so
    the files do not claim it.
    """
    if dates is not None and dates * hours <= MOST_OPEN_FILES:
        return {"fanout-enabled": "true", "use-table-distribution-and-ordering": "false"}
    return {"fanout-enabled": "false", "distribution-mode": "none", "output-sort-order-id": "0"}


def _matches_decision(
    staged: StagedBatch, state: State, position: Position, by_hour: Mapping[str, Ranges]
) -> bool:
    has_same_split = staged.topic_id == position.topic_id and staged.by_hour == by_hour
    return has_same_split and staged.erasures == erasure_marks(state, position.topic_id, by_hour)


def erasure_marks(state: State, topic_id: str, by_hour: Mapping[str, Ranges]) -> frozenset[str]:
    """Return the marks of the erasures that staging must apply to a micro-batch. Pure."""
    return frozenset(
        m for hour, ranges in by_hour.items() for m in state.erasures.marks(hour, topic_id, ranges)
    )


def _still_exists(state: State, staged: StagedBatch, now: datetime | None) -> bool:
    assert now is not None, "the age of files needs a clock that is read after the state"
    # Decision 21: no snapshot refers to workers' files, so only their age excludes that orphan
    # removal deleted them.
    if isinstance(staged.rows, Written):
        return is_young(staged.rows.began, now)
    return is_staged(state.table, staged.rows.wap_id, now)


def plan_publish(
    decided: ResolvedState,
    plan: Plan,
    staged: StagedBatch,
    hour_of: Mapping[str, str],
    read_until: datetime | None = None,
    measured: Mapping[str, str] | None = None,
) -> Publish:
    """Plan the publish of a staged micro-batch. Pure.

    `hour_of` maps each staged file's path to its hour. `read_until`: the log ended at the
    micro-batch's end at this time or later. `measured`: properties for `main`. Rows of hours that
    the batch layer serves are published to `speed` only. So are rows of an hour whose rows in
    `main` a merge retained: `main` may contain the same offsets already, and gets the hour once the
    speed layer covers it. Rows of expired hours are not published.
    """
    # Rows of an hour that batch accepted and that has expired since are not published.
    files = tuple(
        f for f in staged.rows.files if not decided.state.is_expired(hour_of[f.file_path])
    )
    to_main = _files_for_main(decided.state, staged, hour_of)
    return Publish(
        # The id of the attempt identifies the publish after a lost answer, and expires its staged
        # snapshot.
        id=staged.attempt,
        changes=(Change("speed", files), Change("main", to_main, properties=measured or {})),
        timeline=decided.timeline,
        # In the commit of the rows: in a second one, a crash between the two would publish the
        # offsets twice or lose them.
        position=advance(decided.position, plan.todo),
        dead_letters=(waiting_speed(staged.dead, decided.now),) if staged.dead else (),
        # The log ended after the whole range, not after this part of it.
        read_until=read_until if plan.whole else None,
        # Decision 42: refused if another program has expired the snapshot since the load.
        staged={staged.rows.wap_id: staged.rows.snapshot_id}
        if isinstance(staged.rows, Staged)
        else {},
    )


def _files_for_main(
    state: State, staged: StagedBatch, hour_of: Mapping[str, str]
) -> tuple[DataFile, ...]:
    # An hour that `batch` serves has these records already, and so may `main` in a retained hour:
    # its rows would be there twice.
    direct = {
        h
        for h in hour_of.values()
        if state.served_by(h) == "speed" and h not in state.retained_hours
    }
    return tuple(f for f in staged.rows.files if hour_of[f.file_path] in direct)


def readable_after(
    state: State, staged: StagedBatch, hour_of: Mapping[str, str], now: datetime
) -> float | None:
    """Return the seconds that the oldest of a micro-batch's rows for `main` has waited, if readable
    now. Pure.

    Returns None without rows for `main`, or if the files lack the statistics. Measured from the
    Kafka timestamp, but never from before the time that `main` is fresh through, whatever timestamp
    a producer set.
    """
    stamps = oldest_timestamps(
        state.table, _files_for_main(state, staged, hour_of), "kafka_timestamp"
    )
    fresh_through = Watermarks.from_properties(state.branch_properties["main"]).fresh_through
    since = waiting_since(stamps, fresh_through, now)
    return (now - since).total_seconds() if since is not None else None


def plan_boundary_publish(decided: ResolvedState, id: str) -> Publish:
    """Plan the publish of hour boundaries alone, for hours before a micro-batch. Pure."""
    return Publish(id, (Change("speed"),), decided.timeline, decided.position)


def within_hours(ranges: Ranges, hours: Sequence[HourRange]) -> Ranges:
    """Return the part of `ranges` in `hours` (oldest first); all if the last is open. Pure."""
    ends = hours[-1].ends if hours else {}
    return ranges if ends is None else clip(ranges, {p: (0, ends.get(p, 0)) for p in ranges})


@dataclass(frozen=True)
class Skip:
    """Hours that `main` serves from the batch layer; reading continues after them, at `to`."""

    hours: tuple[str, ...]
    to: Offsets

    @property
    def why(self) -> str:
        match self.hours:
            case ():
                return "earlier hours are covered by the batch layer"
            case (hour,):
                return f"hour {hour} is covered by the batch layer"
            case many:
                return f"hours {', '.join(many)} are covered by the batch layer"


@dataclass(frozen=True)
class HourToRead:
    """The unread rest of a sealed hour before hours to skip; the stream reads it up to its cut."""

    hour: str
    ranges: Ranges


def assign(ranges: Ranges, hours: Sequence[HourRange]) -> dict[str, Ranges]:
    """Split a micro-batch's ranges by ingest hour (oldest first, the last open). Pure."""
    assigned: dict[str, Ranges] = {}
    left = {p: (s, e) for p, (s, e) in ranges.items() if s < e}
    for entry in hours:
        if not left:
            break  # a long backlog has many more hours
        ends = entry.ends
        until = {p: e if ends is None else min(e, ends.get(p, 0)) for p, (_, e) in left.items()}
        if part := {p: (s, until[p]) for p, (s, _) in left.items() if s < until[p]}:
            assigned[entry.hour] = part
        left = {p: (max(s, until[p]), e) for p, (s, e) in left.items() if until[p] < e}
    return assigned


def plan_catch_up(state: State, position: Offsets) -> Skip | HourToRead | None:
    """Plan the next step of catching up: skip hours that batch serves, or read an hour before them
    up to its cut. Return None if the stream can read the rest. Pure. A refused hour between two
    accepted ones is never skipped."""
    if (unlisted := _skip_unlisted(state, position)) is not None:
        return unlisted
    cuts = _comparable_cuts(state)
    remaining = [(h, c) for h, c in cuts if any(e > position.get(p, 0) for p, e in c.ends.items())]
    served = [state.served_by(h) == "batch" for h, _ in remaining]
    if not any(served):
        return None
    if not served[0]:
        hour, cut = remaining[0]
        return HourToRead(hour, trim(cut.ranges, position))
    hours: list[str] = []
    to = dict(position)
    for (hour, cut), by_batch in zip(remaining, served, strict=True):
        # Never skip an hour that `batch` does not serve: `main` would have no rows of it until it
        # is accepted.
        if not by_batch:
            break
        hours.append(hour)
        to |= {p: max(e, to.get(p, 0)) for p, e in cut.ends.items()}
    return Skip(tuple(hours), to)


def plan_skip(decided: ResolvedState, skip: Skip, id: str) -> Publish | None:
    """Plan the publish that moves the position past hours that the batch layer serves. Return None
    if the next step has changed meanwhile: a position never moves back. Pure."""
    # Planned again from the fresh state: the position may have moved, and must not move back to
    # published offsets.
    if plan_catch_up(decided.state, decided.position.offsets) != skip:
        return None
    to = Position(decided.position.topic_id, skip.to)
    timeline = replace(
        decided.timeline, skipped=tuple(sorted({*decided.timeline.skipped, *skip.hours}))
    )
    return Publish(id, (Change("speed"),), timeline, to)


def plan_skip_lost(
    decided: ResolvedState, log_starts: Offsets, id: str
) -> tuple[Publish, Ranges] | None:
    """Plan the publish that moves the position to the log's starts and records the lost ranges.
    None if undecided hours have all of them: publish boundaries first. Pure."""
    position = decided.position
    lost = {
        p: (position.offsets.get(p, 0), s)
        for p, s in log_starts.items()
        if s > position.offsets.get(p, 0)
    }
    known = hour_ranges(decided.timeline, decided.state.cuts, position.offsets, decided.now)
    # The next call records the rest, once its hours are decided.
    lost = within_hours(lost, known)
    if not lost:
        return None
    hours = assign(lost, known)
    entry = {
        "at": decided.now.isoformat(),
        "class": "retention",
        "ranges": ranges_to_keys(lost),
        "hours": sorted(hours),
    }
    # In the commit that moves the position, so no offset is passed over without a record of it.
    properties = {LOST: lost_entries(decided.state, [entry])}
    timeline = replace(decided.timeline, skipped=tuple(sorted({*decided.timeline.skipped, *hours})))
    moved = advance(position, lost)
    return Publish(id, (Change("speed", properties=properties),), timeline, moved), lost


def _comparable_cuts(state: State) -> list[tuple[str, Cut]]:
    """Return the cuts that refer to the position's log, oldest first."""
    return [(h, c) for h, c in sorted(state.cuts.items()) if h >= state.timeline.since]


def _skip_unlisted(state: State, position: Offsets) -> Skip | None:
    """Plan a skip from a position in accepted hours that the state no longer lists to the first
    hour that it lists. Return None at other positions."""
    cuts = _comparable_cuts(state)
    start = cuts[0][1].starts if cuts else state.timeline.start
    if size(ranges_between(position, start)) == 0 or state.timeline.open == state.timeline.first:
        return None
    return Skip((), dict(position) | {p: max(s, position.get(p, 0)) for p, s in start.items()})


def reaches_log_end(ranges: Ranges, at_most: int) -> bool:
    """Return True if a Spark micro-batch of at most `at_most` offsets reaches the log end that
    Spark read. Pure. If more offsets are available, Spark rounds each partition's share down."""
    return size(ranges) <= at_most - len(ranges)


def chunks(ranges: Ranges, at_most: int) -> list[Ranges]:
    """Split ranges into pieces of at most `at_most` offsets, by partition in order. Pure."""
    pieces: list[Ranges] = []
    room = 0
    for p, (start, end) in sorted(ranges.items()):
        while start < end:
            if room == 0:
                pieces.append({})
                room = at_most
            step = min(room, end - start)
            pieces[-1][p] = (start, start + step)
            start, room = start + step, room - step
    return pieces


@dataclass(frozen=True)
class Waiting:
    """A stream's unread offsets in Kafka. `whole`: the ranges end at the log's end."""

    ranges: Ranges
    whole: bool


def plan_waiting(position: Offsets, ends: Offsets, at_most: int) -> Waiting | None:
    """Return the next micro-batch's offsets, at most `at_most` but at least one per partition with
    unread offsets; None if there are none. Pure. Partitions share the limit in proportion to their
    unread offsets, as in Spark's source."""
    waiting = {p: end - position[p] for p, end in ends.items() if end > position.get(p, end)}
    if not waiting:
        return None
    total = sum(waiting.values())
    if total > at_most:
        waiting = {p: max(1, count * at_most // total) for p, count in waiting.items()}
    ranges = {p: (position[p], position[p] + count) for p, count in waiting.items()}
    return Waiting(ranges, total == sum(waiting.values()))


def is_due(last: float | None, speed: Speed, now: float) -> bool:
    """Return True if a stream's next micro-batch is due; its last one began at `last`. Pure."""
    return last is None or now - last >= speed.trigger.total_seconds()


def is_behind(position: Offsets, ends: Offsets) -> bool:
    """Return whether a log ends before the position: recreated, or a lagging broker. Pure."""
    return any(end < position.get(p, 0) for p, end in ends.items())


def partitions_changed(position: Offsets, partitions: tuple[int, ...] | None) -> bool:
    """Return True if a topic is gone (None), or has other partitions than the position. Pure."""
    return partitions is None or set(partitions) != set(position)


def unique_topics(topics: Mapping[str, str]) -> list[str]:
    """Return each topic's first stream: a read cannot have two ranges of a topic. Pure."""
    first: dict[str, str] = {}
    for name, topic in topics.items():
        first.setdefault(topic, name)
    return list(first.values())
