"""Adoption: continue in another log than the position's, or in the same log after it lost its end.

The current hour is sealed at the position, so that no hour mixes two logs; the next one begins in
the new log. Published rows stay served. The table remembers where reading of the old log ended: if
its topic id comes back, the stream continues there. For a topic id that was never read and has
records, the operator must choose where to begin.

The start that an operator chooses in a log that the stream never read: its earliest record, its
end, a time, or offsets. Only an operator can choose: a topic that was deleted and recreated is read
from its earliest record, but a mirror of a topic that was read repeats its records, so it is read
from where reading of that topic ended.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from anabranch.common.errors import ConfigurationError, PositionError, Refused
from anabranch.common.fail_points import Step, reach
from anabranch.iceberg.commits import Change
from anabranch.iceberg.owner import OWNER, Owner
from anabranch.iceberg.snapshots import published_since
from anabranch.kafka.client import KafkaAdapter
from anabranch.offsets import hour_ends, hours
from anabranch.offsets.hours import (
    Adoption,
    Cut,
    Timeline,
    end_of,
    hours_between,
    plan_remembered,
    shift,
)
from anabranch.offsets.position import (
    Offsets,
    Position,
    Ranges,
    Stamped,
    Topic,
    ranges_to_keys,
    size,
    to_keys,
)
from anabranch.protocol import ledger, merge
from anabranch.protocol.ledger_row import Act, act_now
from anabranch.protocol.publish import Decision, Publish, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.sealing import check_clock, first_after
from anabranch.protocol.state import LOST, POSITION, State, load_state, lost_entries

_OFFSETS = re.compile(r"\d+=\d+(,\d+=\d+)*")


@dataclass(frozen=True)
class Log:
    """A topic's log in Kafka: oldest available and last stable offset by partition."""

    topic: Topic
    starts: Offsets
    ends: Offsets

    @property
    def records(self) -> int:
        """The log's offsets: records, compacted and aborted ones, transaction markers."""
        return sum(max(0, end - self.starts.get(p, 0)) for p, end in self.ends.items())


@dataclass(frozen=True)
class StartChoice:
    """The value of `--from`: `when` for the kind `time`, `offsets` for the kind `offsets`."""

    kind: Literal["earliest", "latest", "time", "offsets"]
    when: datetime | None = None
    offsets: Offsets | None = None


def parse_start(text: str) -> StartChoice:
    """Parse `earliest`, `latest`, a time such as `2026-11-21T03:15:00Z` (UTC without a zone), or
    offsets such as `0=120,1=98`. Raises ConfigurationError."""
    if text == "earliest":
        return StartChoice("earliest")
    if text == "latest":
        return StartChoice("latest")
    if _OFFSETS.fullmatch(text):
        pairs = [pair.split("=") for pair in text.split(",")]
        offsets = {int(p): int(o) for p, o in pairs}
        if len(offsets) == len(pairs):
            return StartChoice("offsets", offsets=offsets)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(
            "--from: expected earliest, latest, a time such as 2026-11-21T03:15:00Z, or the "
            f"offset of each partition once, such as 0=120,1=98, found {text!r}"
        ) from None
    return StartChoice("time", when=when if when.tzinfo is not None else when.replace(tzinfo=UTC))


def read_log(kafka: KafkaAdapter, topic: Topic, reached: Offsets) -> Log:
    """Read the topic's log. An end below `reached` is believed only if the brokers repeat it."""
    # A replaced leader that does not know it yet returns an earlier end, and the log would look as
    # if it had lost published records.
    return Log(topic, kafka.log_starts(topic), kafka.stable_ends(topic, reached))


def resolve_start(choice: StartChoice, kafka: KafkaAdapter, log: Log) -> Offsets:
    """Return the offset of a choice in each partition. A time is the first record with it or later,
    else the log's end. Raises Refused for offsets that the log lacks."""
    if choice.kind == "earliest":
        return dict(log.starts)
    if choice.kind == "latest":
        return dict(log.ends)
    if choice.when is not None:
        first = kafka.first_from(log.topic, choice.when)
        return {
            p: stamped.offset if (stamped := first.get(p)) is not None else end
            for p, end in log.ends.items()
        }
    offsets = choice.offsets or {}
    if offsets.keys() != set(log.topic.partitions) or any(
        not log.starts.get(p, 0) <= o <= log.ends.get(p, 0) for p, o in offsets.items()
    ):
        ranges = ", ".join(
            f"{p}={log.starts.get(p, 0)}..{log.ends.get(p, 0)}" for p in log.topic.partitions
        )
        raise Refused(
            f"adopt topic {log.topic.name}: expected --from with an offset of each partition "
            f"within {ranges}, found {to_text(offsets)}; nothing was changed: run it again with "
            "offsets that are there"
        )
    return offsets


def question(stream: str, kafka: KafkaAdapter, position: Position, log: Log) -> str:
    """Return why an operator has to choose where to begin, and when each choice applies."""
    now_ms = int(datetime.now(UTC).timestamp() * 1000)
    stamp = kafka.oldest_stamp(log.topic, log.starts, log.ends, 0, now_ms)
    oldest = (
        f"{datetime.fromtimestamp(stamp / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
        if stamp is not None
        else "unknown"
    )
    mirrored = {
        p: max(log.starts.get(p, 0), min(position.offsets.get(p, 0), log.ends.get(p, 0)))
        for p in log.topic.partitions
    }
    return (
        f"adopt topic {log.topic.name}: expected topic id {position.topic_id}, which was read up "
        f"to {to_text(position.offsets)}, or an id that was read before, found id {log.topic.id} "
        f"with {log.records} records, the oldest of {oldest}; nothing was changed. If `topic:` or "
        "kafka.bootstrap_servers name the wrong topic or cluster: correct them. Otherwise choose "
        f"where to begin: `anabranch adopt {stream} --from earliest` when the topic was deleted "
        f"and made again and all of it is new; `--from {to_text(mirrored)}` when it mirrors the "
        "former topic offset by offset; `--from TIME` when it mirrors it otherwise; `--from "
        "latest` when none of its records are wanted"
    )


def to_text(offsets: Offsets) -> str:
    """Format offsets as `--from` accepts them."""
    return ",".join(f"{p}={o}" for p, o in to_keys(offsets).items())


LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adopted:
    """An adoption: where the stream continues, the hours that it seals, the lost offsets."""

    timeline: Timeline
    position: Position
    sealed: tuple[str, ...]
    lost: dict[str, Ranges]

    @property
    def former_id(self) -> str:
        return self.timeline.adoptions[-1].topic_id


def plan_begins(
    timeline: Timeline,
    position: Position,
    log: Log,
    unpublished: Mapping[int, Stamped | None],
    chosen: Offsets | None = None,
) -> Offsets | None:
    """Return where the stream continues in `log`, by partition; None if there is nothing to adopt.
    Pure.

    - The position's log: for each partition that ends below the position, the first record that
      cannot have been published (`unpublished`), or the log's end if there is none.
    - A log that was read before: the ends of its sealed hours, by the same rule if the log ends
      below them, or later offsets if the operator has `chosen` them.
    - A log that was never read: the offsets that the operator has chosen, else its start.

    Raises Refused for a choice that would publish records twice.
    """
    if position.topic_id == "":
        return None
    if position.topic_id == log.topic.id:
        return _lost_ends(position.offsets, log.ends, unpublished) or None
    left = timeline.left_at(log.topic.id)
    if left is None:
        return dict(chosen or log.starts)
    begins = {p: left.ended.get(p, 0) for p in log.topic.partitions}
    # Decision 36: a log that lost its end meanwhile has new records below the ends of its sealed
    # hours; they would be skipped.
    begins |= _lost_ends(begins, log.ends, unpublished)
    if below := sorted(p for p, o in (chosen or {}).items() if o < begins[p]):
        raise Refused(
            f"adopt topic {log.topic.name}: expected --from at or after {to_text(begins)}, where "
            f"reading topic id {log.topic.id} ended with hour {left.hour}, found "
            f"{(chosen or {})[below[0]]} for partition {below[0]}: records would be published "
            "twice; nothing was changed: leave out --from to continue there"
        )
    return begins | (chosen or {})


def _lost_ends(
    reached: Offsets, ends: Offsets, unpublished: Mapping[int, Stamped | None]
) -> Offsets:
    begins = {}
    for p, end in ends.items():
        if end < reached.get(p, 0):
            first = unpublished.get(p)
            begins[p] = min(first.offset, end) if first is not None else end
    return begins


def must_choose(timeline: Timeline, position: Position, log: Log) -> bool:
    """Whether an operator has to choose where to begin: an unread log with records. Pure."""
    is_new = position.topic_id not in ("", log.topic.id) and timeline.left_at(log.topic.id) is None
    return is_new and log.records > 0


def plan_adopt(
    timeline: Timeline,
    position: Position,
    topic_id: str,
    begins: Offsets,
    accepted: Mapping[str, Cut],
    read_ms: int = 0,
    begins_ms: int = 0,
) -> Adopted:
    """Seal the current hour and all earlier ones at the position; the next hour begins at `begins`.
    Pure.

    Ends that were used are kept. If the log only lost its end, partitions that lost nothing
    continue at the end of the hours that are sealed now. Hours that the speed layer has not read to
    their ends count as skipped from now on: their offsets can no longer be compared with the
    position. The adoption records where the sealed hours of the log that is left end. `read_ms` and
    `begins_ms` are the times of the last publish from that log and from the log that the stream
    continues in, in milliseconds since the epoch.
    """
    # Published offsets belong to the first hour without an end or to an earlier one. Decision 36:
    # this hour is sealed, so that no hour has offsets of two logs.
    current_hour = shift(max(timeline.boundaries), 1) if timeline.boundaries else timeline.open
    until = end_of(current_hour)
    no_answers: dict[str, dict[int, Stamped | None]] = {
        h: {} for h in hours_between(timeline.open, shift(current_hour, 1))
    }
    ended = hours.plan_boundaries(timeline, position.offsets, no_answers, {}, until, until)
    closed, sealed = hours.plan_seal(ended, position.topic_id, until)
    is_left = topic_id != position.topic_id
    continues_at = begins if is_left else closed.start | begins
    comparable = {h: c for h, c in {**accepted, **closed.sealed}.items() if h >= timeline.since}
    unread = {
        h: part
        for h, c in sorted(comparable.items())
        if (part := merge.unread_part(c, position.offsets))
    }
    before = (
        closed.start
        if not is_left
        else known.ended
        if (known := timeline.left_at(topic_id)) is not None
        else {}
    )
    replaced = {p: end for p, end in sorted(before.items()) if continues_at.get(p, end) < end}
    left = Adoption(
        current_hour, position.topic_id, dict(continues_at), begins_ms=begins_ms, replaced=replaced
    )
    if is_left:
        # Decision 36: the ends of the sealed hours, not the position. The offsets between the two
        # belong to sealed hours, which the batch layer builds; read from the position on, they
        # would be in a second hour.
        left = replace(left, ended=dict(closed.start), read_ms=read_ms)
    adopted = replace(
        closed,
        start=dict(continues_at),
        skipped=tuple(sorted({*closed.skipped, *unread})),
        adoptions=plan_remembered([*timeline.adoptions, left]),
    )
    lost = {
        h: part
        for h, part in unread.items()
        if h not in accepted and gone_from_kafka(adopted, topic_id, h, comparable[h])
    }
    return Adopted(adopted, Position(topic_id, dict(continues_at)), tuple(sealed), lost)


def gone_from_kafka(timeline: Timeline, topic_id: str, hour: str, cut: Cut) -> str | None:
    """Return why Kafka no longer has an hour's cut for a stream that reads `topic_id`: it is of
    another log, or the log restarted below one of the cut's ends. Else None."""
    if not cut.offsets:
        return None
    if cut.topic_id != topic_id:
        left = [a for a in timeline.adoptions if a.topic_id == cut.topic_id and hour <= a.hour]
        return _gone(left[-1]) if left else None
    following = [*(a.topic_id for a in timeline.adoptions[1:]), topic_id]
    for adoption, after in zip(timeline.adoptions, following, strict=False):
        if after != topic_id or hour > adoption.hour:
            continue
        if any(s < e and e > adoption.begins.get(p, 0) for p, (s, e) in cut.ranges.items()):
            return _gone(adoption)
    return None


def _gone(adoption: Adoption) -> str:
    if adoption.topic_id == hours.IMPORTED:
        return "Kafka never had it: it was imported (`anabranch import`)"
    return (
        f"Kafka no longer has it: the log of topic id {adoption.topic_id} ended with hour "
        f"{adoption.hour} (`anabranch adopt`)"
    )


def adopt(
    publisher: Publisher,
    kafka: KafkaAdapter,
    choice: StartChoice | None = None,
    why: str | None = None,
) -> Adopted | None:
    """Continue with the topic as it is in Kafka now, in one commit; return None if there is nothing
    to adopt. Idempotent.

    Raises PositionError if the topic does not exist, Refused if the operator has to choose where to
    begin and `choice` is None or would publish records twice, Transient if Kafka or the lake does
    not answer.
    """
    lake, stream = publisher.lake, publisher.stream
    act = act_now("adopt", why)
    check_clock(lake, load_state(lake, stream.table))

    def decide() -> Decision[Adopted | None]:
        # Load the state first: a position that moves after Kafka was asked also moves a head, so
        # the publish is refused.
        state = load_state(lake, stream.table)
        position, timeline = state.position, state.timeline
        topic = kafka.describe(stream.topic, position)
        if topic is None:
            raise PositionError(
                f"adopt topic {stream.topic}: expected it to exist, found none; create it, or "
                "correct `topic:` in the stream's file, then run `anabranch adopt` again"
            )
        if position.topic_id == "":
            return Decision(state, None, None)
        read_ms = last_read_ms(state)
        is_same, left = position.topic_id == topic.id, timeline.left_at(topic.id)
        reached = position.offsets if is_same else left.ended if left is not None else {}
        log = read_log(kafka, topic, reached)
        chosen = resolve_start(choice, kafka, log) if choice is not None and not is_same else None
        # Decision 36: Kafka does not distinguish a recreated topic from a mirror. Read from its
        # start, a mirror would be published a second time.
        if chosen is None and must_choose(timeline, position, log):
            raise Refused(question(stream.name, kafka, position, log))
        # Records received after the last publish from the log cannot have been published.
        since = read_ms if is_same else left.read_ms if left is not None else 0
        unpublished = (
            first_after(kafka, topic, datetime.fromtimestamp(since / 1000, UTC)) if since else {}
        )
        begins = plan_begins(timeline, position, log, unpublished, chosen)
        if begins is None:
            return Decision(state, None, None)
        accepted = {h: a.cut for h, a in state.accepted.items()}
        adopted = plan_adopt(timeline, position, topic.id, begins, accepted, read_ms, since)
        reach(Step.ADOPT_DECIDED)
        publish = plan_publish(state, adopted, new_id(), lake.clock.now(), act)
        owner = Owner(stream.name, stream.topic, kafka.cluster_id())
        return Decision(state, replace(publish, set_properties={OWNER: owner.to_json()}), adopted)

    published = publisher.run(decide, f"adopt topic {stream.topic}")
    adopted = published.result
    if adopted is None:
        return None
    reach(Step.ADOPT_PUBLISHED)
    publisher.record_decisions(published.state)
    LOG.warning(
        "stream %s: adopted topic id %s in place of %s: sealed %s, continuing with hour %s from %s",
        stream.name,
        adopted.position.topic_id,
        adopted.former_id,
        ", ".join(adopted.sealed),
        adopted.timeline.open,
        adopted.position.to_json(),
    )
    for hour, ranges in adopted.lost.items():
        LOG.error(
            "stream %s: hour %s: %d offsets were never read, and are lost unless topic id %s "
            "comes back: %s",
            stream.name,
            hour,
            size(ranges),
            adopted.former_id,
            ranges_to_keys(ranges),
        )
    return adopted


def last_read_ms(state: State) -> int:
    """Return the time of the last publish from the position's log, or a later time, in milliseconds
    since the epoch. Pure.

    If nothing was read since an adoption, its own publish does not count: it has no records.
    """
    newest = state.timeline.adoptions[-1] if state.timeline.adoptions else None
    offsets = state.position.offsets.items()
    if (
        # Decision 36: an adoption is a publish, but not of records. By its time, a record of a log
        # that lost its end between check and adoption would count as published, and be lost.
        newest is not None
        and newest.begins_ms
        and all(o == newest.begins.get(p, 0) for p, o in offsets)
    ):
        return newest.begins_ms
    return hour_ends.millis(published_since(state.table, "speed", POSITION))


def plan_publish(
    state: State, adopted: Adopted, id: str, now: datetime, act: Act | None = None
) -> Publish:
    """Return an adoption's publish: sealed hours, timeline, position and lost offsets. Pure."""
    rows = tuple(
        ledger.decision(
            h,
            "sealed",
            0,
            adopted.timeline.sealed[h],
            now,
            f"{id}-{h}",
            served=state.served_by(h),
            reason=_reason(adopted, h),
            act=act,
        )
        for h in adopted.sealed
    )
    lost = [
        {
            "at": now.isoformat(),
            "class": "retention",
            "ranges": ranges_to_keys(part),
            "hours": [hour],
            "topic_id": state.position.topic_id,
        }
        for hour, part in adopted.lost.items()
    ]
    properties = {LOST: lost_entries(state, lost)} if lost else {}
    # On `main` too: a lost speed branch is recreated from it and must not return to the old log.
    changes = (Change("speed", properties=properties), Change("main"))
    return Publish(id, changes, adopted.timeline, adopted.position, decisions=rows)


def _reason(adopted: Adopted, hour: str) -> str:
    position = adopted.position
    reason = f"sealed by adopting topic id {position.topic_id} from {to_text(position.offsets)}"
    if hour in adopted.lost:
        reason += f"; never read and lost: {json.dumps(ranges_to_keys(adopted.lost[hour]))}"
    return reason
