"""Sealing: decide the ends of ended hours once, from the speed layer's publishes and Kafka's
answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import takewhile

from anabranch.common.errors import ConfigurationError, NotYet, PositionError
from anabranch.common.fail_points import Step, reach
from anabranch.config import Stream
from anabranch.iceberg.commits import Change
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.owner import owner_of
from anabranch.kafka.client import KafkaAdapter
from anabranch.offsets import hour_ends, hours
from anabranch.offsets.hours import Timeline
from anabranch.offsets.position import Offsets, Position, Stamped, Topic
from anabranch.protocol import ledger
from anabranch.protocol.publish import Decision, Landed, Publish, new_id, new_tag
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import State, check_log_end, check_topic, load_state

LOG = logging.getLogger(__name__)

SEALED_TAG = "main-"
"""The prefix of a seal's tag; the last sealed hour follows."""
# The most hours that one commit seals, so that few decisions wait for the ledger.
SEALED_AT_ONCE = 48


def check_clock(lake: Lake, state: State) -> None:
    """Compare this machine's clock with the object store's and with the table's last update.

    A fast clock would seal future hours and write future timestamps to the table. Raises Transient
    with all times if they differ by more than half a minute.
    """
    lake.clock.compare()
    lake.clock.now(state.table.metadata.last_updated_ms)


@dataclass(frozen=True)
class KafkaOffsets:
    """Kafka's answers at `now`, by the publisher's clock, about the hours that ended by `until`.

    `answers` has the hours that were wanted (`hours.plan_wanted`) for offsets up to `needed`, with
    the first record of the next hour by partition.
    """

    topic: Topic
    now: datetime
    until: datetime
    oldest: Mapping[int, Stamped | None]
    answers: Mapping[str, Mapping[int, Stamped | None]]
    ends: Offsets
    needed: Offsets | None = None


@dataclass(frozen=True)
class ResolvedState:
    """A loaded state, its position with the current topic, and a timeline with its ends."""

    state: State
    position: Position
    timeline: Timeline
    now: datetime


Seen = dict[tuple[str, int], dict[int, hour_ends.Window]]
"""Windows of the log that cannot change any more, by topic id and partition, then by offset."""

_SEEN_AT_MOST = 20_000


def ask(
    kafka: KafkaAdapter,
    topic_name: str,
    state: State,
    now: datetime,
    grace: timedelta,
    needed: Offsets | None = None,
    seen: Seen | None = None,
    at_most: int | None = None,
) -> KafkaOffsets:
    """Ask Kafka for ended hours' ends that `state` lacks, oldest first, at most `at_most`; none if
    offsets up to `needed` have hours with ends. Raises PositionError, Transient."""
    topic = kafka.describe(topic_name, state.position)
    position = check_topic(state.position, topic, topic_name, _read_from(state))
    assert topic is not None
    offsets = KafkaOffsets(topic, now, now - grace, {}, {}, {}, needed)
    if hours.is_untouched(state.timeline, position):
        windows = kafka.stamps_from(
            topic, position.offsets, kafka.stable_ends(topic, position.offsets), hour_ends.WINDOW
        )
        offsets = replace(
            offsets,
            oldest={p: hour_ends.plan_oldest(w, hour_ends.millis(now)) for p, w in windows.items()},
        )
    timeline = _with_first_hour(state, position, offsets)
    at_most = at_most or hours.max_hours_at_once(len(topic.partitions))
    wanted = hours.plan_wanted(timeline, position.offsets, offsets.until, needed, at_most)
    if not wanted:
        return offsets
    # The last stable offset: records of open transactions are not readable yet, and an hour that
    # ends after them would be built without them.
    ends = kafka.stable_ends(topic, position.offsets)
    check_log_end(position, ends, topic_name)
    # No end is below the position or below the hours that are already decided.
    before = [
        e.ends or {}
        for e in hours.decided_ends(timeline, position.offsets, offsets.until)
        if e.hour < wanted[0]
    ]
    start = before[-1] if before else timeline.start
    lows = {p: max(o, start.get(p, 0)) for p, o in position.offsets.items()}
    answers = answer_hours(kafka, topic, wanted, timeline.boundaries, lows, ends, now, seen)
    return replace(offsets, answers=answers, ends=ends)


def answer_hours(
    kafka: KafkaAdapter,
    topic: Topic,
    wanted: Iterable[str],
    decided: Mapping[str, Offsets],
    lows: Offsets,
    ends: Offsets,
    now: datetime,
    seen: Seen | None = None,
) -> dict[str, Mapping[int, Stamped | None]]:
    """Return the first record after each of the `wanted` hours (in order), by partition, within
    `[lows, ends)`; `ends` are the last stable offsets, `decided` ends that were used before."""
    lows = dict(lows)
    answers: dict[str, Mapping[int, Stamped | None]] = {}
    stamps: Mapping[int, Stamped | None] = {}
    for hour in wanted:
        # The first record at or after a time is the answer for every time up to its timestamp.
        moment = hour_ends.millis(hours.end_of(hour))
        if not stamps or not all(
            s is not None and s.timestamp_ms >= moment for s in stamps.values()
        ):
            stamps = kafka.first_from(topic, hours.end_of(hour))
        answers[hour] = _correct_answers(
            kafka, topic, hours.end_of(hour), stamps, lows, ends, now, seen
        )
        # Decision 2: an end that was used stays. Another end would put its offsets into two hours,
        # or into none.
        known = decided.get(hour, {})
        for p, low in lows.items():
            lows[p] = (
                known[p]
                if p in known
                else hours.plan_boundary(answers[hour].get(p), ends.get(p, 0), low, now)
            )
    return answers


def _correct_answers(
    kafka: KafkaAdapter,
    topic: Topic,
    moment: datetime,
    stamps: Mapping[int, Stamped | None],
    lows: Offsets,
    ends: Offsets,
    now: datetime,
    seen: Seen | None,
) -> dict[int, Stamped | None]:
    """Return, by partition, the first record received at `moment` or later, by the majority of the
    timestamps around it; the result has `moment` as its timestamp. `stamps`: the answers of Kafka's
    time index. The search is within `[lows, ends)`; `ends` are the last stable offsets.
    """
    seen = {} if seen is None else seen
    if sum(map(len, seen.values())) > _SEEN_AT_MOST:
        seen.clear()
    known = {p: seen.setdefault((topic.id, p), {}) for p in topic.partitions}
    starts = {p: max(s.offset, lows.get(p, 0)) for p, s in stamps.items() if s is not None}
    moment_ms, clock = hour_ends.millis(moment), hour_ends.millis(now)
    searched = {p: o for p, o in starts.items() if o < ends.get(p, 0)}
    exact = {p: s for p, s in stamps.items() if s is not None and searched.get(p) == s.offset}
    confirmed = hour_ends.find_confirmed_ends(
        exact, ends, clock, lambda wants: kafka.first_later(topic, wants)
    )
    searches = {
        p: hour_ends.find_end(moment_ms, o, ends[p], clock, known[p])
        for p, o in searched.items()
        if p not in confirmed
    }
    offsets = confirmed | hour_ends.find_ends(
        searches,
        lambda wants: kafka.stamps_from(topic, wants, ends, hour_ends.WINDOW),
        lambda p, offset, window: known[p].setdefault(offset, window),
    )
    return {p: None if (o := offsets.get(p)) is None else Stamped(o, moment_ms) for p in stamps}


def first_after(kafka: KafkaAdapter, topic: Topic, moment: datetime) -> dict[int, Stamped | None]:
    """Return, by partition, the first record from which on the log was received at `moment` or
    later, by the majority of timestamps.

    Timestamps later than the clock count too: a record received since must not be skipped.
    """
    ends, clock = kafka.stable_ends(topic), datetime.max.replace(tzinfo=UTC)
    return _correct_answers(
        kafka, topic, moment, kafka.first_from(topic, moment), {}, ends, clock, None
    )


def resolve_state(state: State, offsets: KafkaOffsets) -> ResolvedState | None:
    """Add Kafka's answers to a state that was loaded after them. Pure.

    None if the table has changed and needs answers that were not requested.
    """
    if not _fits(state.position, offsets.topic):
        # Another process published offsets newer than the answers, or Kafka contradicts the
        # position; `ask` checks which.
        return None
    position = check_topic(state.position, offsets.topic, offsets.topic.name, _read_from(state))
    timeline = _with_first_hour(state, position, offsets)
    wanted = hours.plan_wanted(
        timeline, position.offsets, offsets.until, offsets.needed, len(offsets.answers) or 1
    )
    # An hour without an answer ends the list: hours are decided in order.
    answers = {h: offsets.answers[h] for h in takewhile(offsets.answers.__contains__, wanted)}
    if wanted and not answers:
        return None
    planned = hours.plan_boundaries(
        timeline, position.offsets, answers, offsets.ends, offsets.until, offsets.now
    )
    return ResolvedState(state, position, planned, offsets.now)


def _with_first_hour(state: State, position: Position, offsets: KafkaOffsets) -> Timeline:
    waiting = [
        s
        for p, s in offsets.oldest.items()
        if s is not None and s.offset >= position.offsets.get(p, 0)
    ]
    oldest = min(waiting, key=lambda s: s.timestamp_ms, default=None)
    return hours.plan_first_hour(state.timeline, position, oldest, offsets.now)


class BoundaryResolver:
    """A resolver of the ends of hours. It asks Kafka before it loads the heads, so that little time
    passes between that load and the commit."""

    def __init__(self, stream: Stream, lake: Lake, kafka: KafkaAdapter) -> None:
        self._stream, self._lake, self._kafka = stream, lake, kafka
        self._last: State | None = None
        self._seen: Seen = {}

    def start_from(self, state: State) -> None:
        """Use a loaded state for the next requests to Kafka; the decision loads a fresh one."""
        self._last = state

    def decide(
        self, grace: timedelta = timedelta(0), needed: Offsets | None = None
    ) -> ResolvedState:
        """Load the state and add the ends of hours that ended `grace` ago: of the oldest
        `hours.max_hours_at_once` without ends, or of none if offsets up to `needed` are inside
        hours with ends. Publishes nothing.

        Raises PositionError for a recreated topic, Transient if Kafka or the lake does not answer.
        """
        fresh = self._last is None
        state = self._last or load_state(self._lake, self._stream.table)
        while True:
            try:
                now = self._lake.clock.now()
                offsets = ask(
                    self._kafka, self._stream.topic, state, now, grace, needed, self._seen
                )
            except PositionError:
                # The state may be older than an adoption: only a description after a fresh load
                # contradicts it.
                if fresh:
                    raise
                state, fresh = load_state(self._lake, self._stream.table), True
                continue
            # Load after Kafka has answered: these heads are what the commit requires, so a publish
            # between the answers and this load is seen, not overwritten.
            state = self._last = load_state(self._lake, self._stream.table)
            fresh = True
            if (decided := resolve_state(state, offsets)) is not None:
                return decided


def plan_sealing(decided: ResolvedState, grace: timedelta, id: str) -> Publish | None:
    """Return the publish that seals the hours whose end and grace have passed, at most
    SEALED_AT_ONCE, with a decision for each, oldest first; None if there is no such hour. Pure."""
    state, position, now = decided.state, decided.position, decided.now
    planned, sealed = hours.plan_seal(
        decided.timeline, position.topic_id, now - grace, SEALED_AT_ONCE
    )
    if not sealed:
        return None
    rows = tuple(
        ledger.decision(
            h, "sealed", 0, planned.sealed[h], now, id=f"{id}-{h}", served=state.served_by(h)
        )
        for h in sealed
    )
    tag = new_tag(state, f"{SEALED_TAG}{sealed[-1]}", "main", now)
    tags = (tag,) if tag.name not in state.table.metadata.refs else ()
    bound = replace(state.position, topic_id=position.topic_id)
    return Publish(id, (Change("speed"),), planned, bound, decisions=rows, tags=tags)


def _read_from(state: State) -> str:
    """Return the id of the Kafka cluster that the table was read from; empty without a table."""
    return owner_of(state.table).cluster_id if state.table is not None else ""


def _fits(position: Position, topic: Topic) -> bool:
    """Whether the described topic can be the position's."""
    return position.topic_id in ("", topic.id) and set(position.offsets) <= set(topic.partitions)


Extend = Callable[[State, Publish], Publish]
"""Return the publish of a seal with further decisions, given the state that it was decided on."""


@dataclass(frozen=True)
class Sealed:
    """The result of a seal: the sealed hours, oldest first, and the state after it."""

    hours: tuple[str, ...]
    state: State


def seal(
    publisher: Publisher,
    kafka: KafkaAdapter,
    extend: Extend = lambda _, publish: publish,
    on_landed: Callable[[Landed], None] = lambda _: None,
) -> Sealed:
    """Seal every hour whose end and grace have passed, in commits of bounded size.

    Writes waiting decisions to the ledger before and after each commit, and publishes waiting dead
    letters before the first. Calls `on_landed` after each commit. If interrupted, the next call
    continues where it ended.
    """
    lake, stream = publisher.lake, publisher.stream
    state = load_state(lake, stream.table)
    resolver = BoundaryResolver(stream, lake, kafka)
    sealed: tuple[str, ...] = ()

    def decide() -> Decision[None]:
        decided = resolver.decide(stream.batch.grace)
        publish = plan_sealing(decided, stream.batch.grace, new_id())
        if publish is not None:
            publish = extend(decided.state, publish)
            reach(Step.SEAL_DECIDED)
        return Decision(decided.state, publish, None)

    # A fast clock would seal hours whose records are still arriving.
    check_clock(lake, state)
    # Before the first seal: decisions of a crashed publish come first in the ledger, whose order
    # consumers follow (decision 23).
    publisher.finish(state)
    resolver.start_from(state)
    while (published := publisher.run(decide, f"seal {stream.name}")).landed is not None:
        reach(Step.SEAL_PUBLISHED)
        on_landed(published.landed)
        rows = published.landed.publish.decisions
        now = tuple(row.hour for row in rows if row.decision == "sealed")
        LOG.info(
            "stream %s: sealed %s",
            stream.name,
            f"{now[0]} to {now[-1]}" if len(now) > 1 else now[0],
        )
        state, sealed = published.state, (*sealed, *now)
        # After each commit, so that few decisions wait on a branch.
        publisher.record_decisions(state)
        reach(Step.SEAL_RECORDED)
        check_clock(lake, state)
        resolver.start_from(state)
    return Sealed(sealed, published.state)


def require_ended(stream: Stream, lake: Lake, named: Iterable[str]) -> None:
    """Raise NotYet if an hour of `named` is not over, grace included, and not sealed. Needs no
    Kafka and changes nothing.

    Loads the table only for hours that are not over by the clock: `anabranch adopt` may have sealed
    them early.
    """
    now = lake.clock.now()
    running = [hour for hour in sorted(named) if _sealable_from(stream, hour) > now]
    if not running:
        return
    state = load_state(lake, stream.table)
    for hour in running:
        if not state.is_sealed(hour):
            raise _open(stream, hour)


def _sealable_from(stream: Stream, hour: str) -> datetime:
    return hours.end_of(hour) + stream.batch.grace


def _open(stream: Stream, hour: str) -> NotYet:
    return NotYet(
        f"hour {hour}: expected it to be sealed, found it open; it can be sealed from "
        f"{_sealable_from(stream, hour):%F %T} UTC: run it again then"
    )


def require_sealed(state: State, stream: Stream, hour: str) -> None:
    """Require that `hour` is sealed. Raises ConfigurationError for an hour before the first, NotYet
    for any other hour that is not sealed."""
    if hour < state.timeline.first:
        raise ConfigurationError(
            f"hour {hour}: expected an hour from {state.timeline.first} on, where stream "
            f"{stream.name} begins"
        )
    if not state.is_sealed(hour):
        raise _open(stream, hour)
