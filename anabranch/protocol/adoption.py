"""Adoption: going on where Kafka's offsets begin anew, in a recreated topic or a log that lost its end.

The hour at hand is sealed at the position, so that no hour mixes two logs; the next one begins in the new log. What is
published stays served. What the old log held beyond the position is lost, and said to be.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime

from anabranch import hours
from anabranch.config import Stream
from anabranch.errors import PositionError
from anabranch.hours import Adoption, Cut, Timeline, end_of, hours_between, shift
from anabranch.kafka.client import KafkaAdapter
from anabranch.position import Offsets, Position, Ranges, Stamped, Topic, ranges_to_keys, size
from anabranch.protocol import coverage, ledger
from anabranch.protocol.publish import Decision, Publish, new_id, run
from anabranch.protocol.sealing import check_clock, first_after
from anabranch.protocol.state import LOST, POSITION, State, load_state, lost_entries
from anabranch.table.commits import Change
from anabranch.table.lake import Lake
from anabranch.table.snapshots import published_since

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adopted:
    """What an adoption decides: where the stream goes on, the hours that it seals, and what no one holds, by hour."""

    timeline: Timeline
    position: Position
    sealed: tuple[str, ...]
    lost: dict[str, Ranges]

    @property
    def former_id(self) -> str:
        return self.timeline.adoptions[-1].topic_id


def plan_begins(
    position: Position, topic: Topic, ends: Offsets, unpublished: Mapping[int, Stamped | None]
) -> Offsets | None:
    """Where offsets begin anew, by partition: 0 everywhere in a topic of another id; else, where the log ends below
    the position, the first record that cannot have been published (`unpublished`), or the log's end without one. None
    when there is nothing to adopt.
    """
    if position.topic_id == "":
        return None
    if position.topic_id != topic.id:
        return dict.fromkeys(topic.partitions, 0)
    begins = {}
    for p, end in ends.items():
        if end < position.offsets.get(p, 0):
            first = unpublished.get(p)
            begins[p] = min(first.offset, end) if first is not None else end
    return begins or None


def plan_adopt(
    timeline: Timeline, position: Position, topic_id: str, begins: Offsets, accepted: Mapping[str, Cut]
) -> Adopted:
    """Seal the hour at hand, and those before it, by what is published; the next hour begins at `begins`. Pure.

    Ends that were used stay. In a log that only lost its end, a partition that lost nothing goes on behind the hours
    that are sealed now. Hours that the speed layer has not read to their ends count as skipped from now on: their
    offsets can no longer be compared with the position.
    """
    # What is published stands under the first hour without an end, or before it.
    at_hand = shift(max(timeline.boundaries), 1) if timeline.boundaries else timeline.open
    until = end_of(at_hand)
    nothing: dict[str, dict[int, Stamped | None]] = {h: {} for h in hours_between(timeline.open, shift(at_hand, 1))}
    ended = hours.plan_boundaries(timeline, position.offsets, nothing, {}, until, until)
    closed, sealed = hours.plan_seal(ended, position.topic_id, until)
    goes_on = begins if topic_id != position.topic_id else closed.start | begins
    comparable = {h: c for h, c in {**accepted, **closed.sealed}.items() if h >= timeline.since}
    unread = {h: part for h, c in sorted(comparable.items()) if (part := coverage.behind(c, position.offsets))}
    adopted = replace(
        closed,
        start=dict(goes_on),
        skipped=tuple(sorted({*closed.skipped, *unread})),
        adoptions=(*timeline.adoptions, Adoption(at_hand, position.topic_id, dict(goes_on))),
    )
    lost = {h: part for h, part in unread.items() if h not in accepted and gone_from_kafka(adopted, h, comparable[h])}
    return Adopted(adopted, Position(topic_id, dict(goes_on)), tuple(sealed), lost)


def gone_from_kafka(timeline: Timeline, hour: str, cut: Cut) -> str | None:
    """Why Kafka can no longer give an hour's cut, or None: offsets began anew below one of its ends."""
    for adoption in timeline.adoptions:
        if hour <= adoption.hour and any(s < e and e > adoption.begins.get(p, 0) for p, (s, e) in cut.ranges.items()):
            return (
                f"Kafka no longer holds it: the log of topic id {adoption.topic_id} ended with hour {adoption.hour} "
                "(`anabranch adopt`)"
            )
    return None


def adopt(stream: Stream, lake: Lake, kafka: KafkaAdapter, confirmed: frozenset[str] = frozenset()) -> Adopted | None:
    """Go on with the topic as Kafka has it now, in one commit; None when there is nothing to adopt. Idempotent.

    Raises PositionError when the topic does not exist, Transient when Kafka or the lake does not answer.
    """
    check_clock(lake, load_state(lake, stream.table))
    adopted: Adopted | None = None

    def decide() -> Decision:
        nonlocal adopted
        # The state first: a position that moves after Kafka was asked moves a head, and the publish is refused.
        state = load_state(lake, stream.table)
        position, adopted = state.position, None
        topic = kafka.describe(stream.topic, position)
        if topic is None:
            raise PositionError(
                f"adopt topic {stream.topic}: expected it to exist, found none; create it, or correct `topic:` in the "
                "stream's file, then run `anabranch adopt` again"
            )
        since = published_since(state.table, "speed", POSITION)
        begins = plan_begins(
            position, topic, kafka.stable_ends(topic, position.offsets), first_after(kafka, topic, since)
        )
        if begins is None:
            return state, None
        accepted = {h: a.cut for h, a in state.accepted.items()}
        adopted = plan_adopt(state.timeline, position, topic.id, begins, accepted)
        return state, plan_publish(state, adopted, new_id(), lake.clock.now(), confirmed)

    landed = run(lake, stream.table, decide, f"adopt topic {stream.topic}", take_turns=True)
    if landed is None or adopted is None:
        return None
    ledger.record_waiting(lake, stream.hours_table, landed.state)
    LOG.warning(
        "stream %s: adopted topic id %s in place of %s: sealed %s, going on with hour %s from %s", stream.name,
        adopted.position.topic_id, adopted.former_id, ", ".join(adopted.sealed), adopted.timeline.open,
        adopted.position.to_json(),
    )  # fmt: skip
    for hour, ranges in adopted.lost.items():
        LOG.error(
            "stream %s: hour %s: %d offsets were never read and are lost: %s", stream.name, hour, size(ranges),
            ranges_to_keys(ranges),
        )  # fmt: skip
    return adopted


def plan_publish(state: State, adopted: Adopted, id: str, now: datetime, confirmed: frozenset[str]) -> Publish:
    """The publish of an adoption: what it seals and where it goes on, and what is lost, in one commit. Pure."""
    rows = tuple(
        ledger.decision(
            h, "sealed", 0, adopted.timeline.sealed[h], now, f"{id}-{h}", served=state.served_by(h),
            reason=_reason(adopted, h),
        )
        for h in adopted.sealed
    )  # fmt: skip
    lost = [
        {"at": now.isoformat(), "class": "retention", "ranges": ranges_to_keys(part), "hours": [hour]}
        for hour, part in adopted.lost.items()
    ]
    properties = {LOST: lost_entries(state, lost)} if lost else {}
    # On `main` too: a speed branch that is lost begins again there, and must not fall back to the old log.
    changes = (Change("speed", properties=properties), Change("main"))
    return Publish(id, changes, adopted.timeline, adopted.position, decisions=rows, confirmed=confirmed)


def _reason(adopted: Adopted, hour: str) -> str:
    reason = f"sealed by adopting topic id {adopted.position.topic_id}"
    if hour in adopted.lost:
        reason += f"; never read and lost: {json.dumps(ranges_to_keys(adopted.lost[hour]))}"
    return reason
