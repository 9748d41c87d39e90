"""Sealing: deciding where ended hours end, over what the speed layer has published and what Kafka says, once."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from anabranch import hours, ledger
from anabranch.config import Environment, Stream
from anabranch.errors import ConfigurationError, Transient
from anabranch.fail_points import Step, reach
from anabranch.hours import Timeline
from anabranch.kafka import KafkaAdapter
from anabranch.lake import Change, Lake, Tag
from anabranch.position import Offsets, Position, Stamped, Topic
from anabranch.publish import TAG_AGE, Publish, new_id, run
from anabranch.s3 import ObjectStore, bucket_of
from anabranch.state import State, check_topic, load_state

LOG = logging.getLogger(__name__)

MAX_CLOCK_SKEW = timedelta(seconds=30)


def check_clock(environment: Environment, state: State) -> None:
    """Compare this machine's clock with the object store's and the table's last update.

    A clock ahead would seal hours to come and stamp the table into the future. Raises Transient, naming all, when they
    are more than half a minute apart.
    """
    now = datetime.now(UTC)
    updated = datetime.fromtimestamp(state.table.metadata.last_updated_ms / 1000, UTC)
    if updated - now > MAX_CLOCK_SKEW:
        raise Transient(
            f"clock: expected this machine not to be behind the table's last update {updated.isoformat()}, found "
            f"{now.isoformat()}; set the clocks (NTP) of the machines that publish"
        )
    bucket = bucket_of(environment.catalog.warehouse)
    if bucket is None:
        return
    stored = ObjectStore(environment.s3).clock(bucket)
    if abs(stored - datetime.now(UTC)) > MAX_CLOCK_SKEW:
        raise Transient(
            f"clock: expected this machine ({now.isoformat()}) and the object store ({stored.isoformat()}) within "
            f"{MAX_CLOCK_SKEW}, the table was last updated {updated.isoformat()}; set this machine's clock (NTP)"
        )


@dataclass(frozen=True)
class Decided:
    """A load of the state, the position bound to the topic as it is now, and a timeline with the ends it needs."""

    state: State
    position: Position
    timeline: Timeline
    now: datetime


class HourClock:
    """Asks Kafka where ended hours end before the heads are loaded, so that the window between the two is short."""

    def __init__(self, stream: Stream, lake: Lake, kafka: KafkaAdapter) -> None:
        self._stream, self._lake, self._kafka = stream, lake, kafka
        self._last: State | None = None

    def decide(self, grace: timedelta = timedelta(0)) -> Decided:
        """A fresh state in which every hour that ended `grace` ago has its ends. Nothing is published here.

        Raises PositionError for a recreated topic, Transient when a neighbour does not answer.
        """
        state = self._last or load_state(self._lake, self._stream.table)
        while True:
            now = datetime.now(UTC)
            until = now - grace
            topic = self._kafka.describe(self._stream.topic)
            position = check_topic(state.position, topic, self._stream.topic)
            assert topic is not None
            timeline = self._with_first_hour(state.timeline, topic, position, now)
            answers: dict[str, dict[int, Stamped | None]] = {}
            ends: Offsets = {}
            if wanted := hours.undecided(timeline, position.offsets, until):
                answers = {h: self._kafka.first_from(topic, hours.end_of(h)) for h in wanted}
                ends = self._kafka.stable_ends(topic)
            state = self._last = load_state(self._lake, self._stream.table)
            position = check_topic(state.position, topic, self._stream.topic)
            timeline = self._with_first_hour(state.timeline, topic, position, now)
            if set(hours.undecided(timeline, position.offsets, until)) <= set(answers):
                planned = hours.plan_boundaries(timeline, position.offsets, answers, ends, until, now)
                return Decided(state, position, planned, now)

    def _with_first_hour(self, timeline: Timeline, topic: Topic, position: Position, now: datetime) -> Timeline:
        if not hours.is_untouched(timeline, position):
            return timeline
        found = self._kafka.first_from(topic, datetime.fromtimestamp(0, UTC))
        waiting = [s for p, s in found.items() if s is not None and s.offset >= position.offsets.get(p, 0)]
        return hours.plan_first_hour(timeline, position, min(waiting, key=lambda s: s.timestamp_ms, default=None), now)


def seal(environment: Environment, stream: Stream, lake: Lake, kafka: KafkaAdapter) -> list[str]:
    """Seal every hour whose end and grace have passed, in one commit; returns the hours sealed, oldest first.

    Waiting decisions of earlier publishes are written to the ledger first, those of this one after it.
    """
    before = load_state(lake, stream.table)
    check_clock(environment, before)
    confirmed = ledger.record(lake, stream.hours_table, before.decisions)
    clock = HourClock(stream, lake, kafka)
    sealed: list[str] = []

    def decide() -> tuple[State, Publish | None]:
        nonlocal sealed
        decided = clock.decide(stream.batch.grace)
        state, position, now = decided.state, decided.position, decided.now
        planned, sealed = hours.plan_seal(decided.timeline, position.topic_id, now - stream.batch.grace)
        if not sealed:
            return state, None
        reach(Step.SEAL_DECIDED)
        rows = tuple(
            ledger.decision(h, "sealed", 0, planned.sealed[h], now, served=state.serving_layer(h)) for h in sealed
        )
        tag = Tag(f"main-{sealed[-1]}", state.heads["main"], int(TAG_AGE.total_seconds() * 1000))
        tags = (tag,) if tag.name not in state.table.metadata.refs else ()
        bound = replace(state.position, topic_id=position.topic_id)
        changes = (Change("speed"),)
        return state, Publish(new_id(), changes, planned, bound, decisions=rows, confirmed=confirmed, tags=tags)

    published = run(lake, stream.table, decide, f"seal {stream.name}", take_turns=True)
    if published is not None:
        reach(Step.SEAL_PUBLISHED)
        LOG.info("stream %s: sealed %s", stream.name, f"{sealed[0]} to {sealed[-1]}" if len(sealed) > 1 else sealed[0])
        ledger.record(lake, stream.hours_table, published.decisions)
        reach(Step.SEAL_RECORDED)
    return sealed


def require_sealed(lake: Lake, stream: Stream, hour: str) -> State:
    """The state, in which `hour` is sealed. Raises ConfigurationError for an hour before the first, Transient for one
    that has not ended, grace included."""
    state = load_state(lake, stream.table)
    if hour < state.timeline.first:
        raise ConfigurationError(
            f"hour {hour}: expected an hour from {state.timeline.first} on, where stream {stream.name} begins"
        )
    if not state.is_sealed(hour):
        ready = hours.end_of(hour) + stream.batch.grace
        raise Transient(
            f"hour {hour}: expected it to be sealed, found it open; it can be sealed from {ready:%F %T} UTC on"
        )
    return state
