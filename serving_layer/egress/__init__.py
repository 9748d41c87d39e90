"""Egress: deliver accepted hours to other systems, as a consumer of the changes.

1. Read the position: the newest delivery in the stream's table of deliveries
   (`anabranch.protocol.deliveries`).
2. List the changes after it: hours that were completed or restated, or whose rows were erased.
3. Deliver each hour completely, in place of the target's rows of it, then record the delivery.

A process that ends between two steps delivers that hour again, which leaves the target as after one
delivery: docs/how-to/deliver.md for each kind of target, decision 28 for the reason. When a target
shows that the table was restored to an earlier time, every hour is delivered again (decision 43).

A topic: an hour as records in transactions, each with its sender's position. The key is the
record's identity, so the newest value of a key is that record in `main`, and a compacted topic has
each accepted record once. A place of the hour without a row gets a null value. Opening the topic
fences the process that had it open (`TransactionalProducer`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, replace

from anabranch.common.errors import AnabranchError, ConfigurationError, Refused, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.config.sections import Target
from anabranch.job import Job
from anabranch.kafka.transactions import Outgoing, RecordTooLarge, TransactionalProducer
from anabranch.offsets.hours import shift
from anabranch.protocol import deliveries
from anabranch.protocol.deliveries import Delivery
from anabranch.protocol.ledger import decision
from anabranch.protocol.ledger_row import act_now
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import load_state
from serving_layer import changes as feed
from serving_layer.changes import Token, pending_hours
from serving_layer.egress.folder import Folder, open_folder
from serving_layer.egress.hour import (
    Hour,
    LastPlace,
    Restored,
    SenderPosition,
    chunks,
    cut_of,
    open_hour,
    places,
    value_of,
)
from serving_layer.egress.search import Search, open_search

LOG = logging.getLogger(__name__)

# On a busy stream an hour's snapshot expires in minutes, but not right after the changes listed it.
_TRIES = 5


@dataclass(frozen=True)
class Failed:
    """A target whose delivery failed, and the reason. Earlier deliveries stay."""

    target: str
    error: AnabranchError


def targets_of(job: Job, name: str | None) -> tuple[Target, ...]:
    """Return the stream's targets, or the one named `name`. Raises ConfigurationError if there is
    none, and for a folder in the warehouse, where maintenance would delete its files as orphans."""
    stream, warehouse = job.stream, job.environment.catalog.warehouse
    chosen = tuple(t for t in stream.egress if name in (None, t.name))
    if not chosen:
        known = (
            ", ".join(t.name for t in stream.egress) or "none: the stream's file has no `egress:`"
        )
        wanted = f"the target {name!r}" if name is not None else "a target"
        raise ConfigurationError(
            f"egress of stream {stream.name}: expected {wanted}, found {known}"
        )
    for target in chosen:
        for tables in filter(None, (warehouse.rstrip("/"), stream.location)):
            if f"{target.place}/".startswith(f"{tables}/"):
                raise ConfigurationError(
                    f"egress.{target.name}: expected a place outside the tables' folder {tables}/, "
                    f"found {target.place}"
                )
    return chosen


def record_redelivery(job: Job, targets: tuple[Target, ...], why: str | None) -> None:
    """Record in the ledger, before any delivery, that an operator requested a new delivery of every
    accepted hour: one row, at the newest sealed hour. Raises Refused while `main` is not merged,
    since no hour would be delivered; Transient."""
    act, state = act_now("redeliver", why), load_state(job.lake, job.stream.table)
    state.require_merged(f"egress of stream {job.stream.name}", job.stream.name)
    hour = max(state.timeline.first, shift(state.timeline.open, -1))
    reason = f"every accepted hour again to {', '.join(target.name for target in targets)}"
    job.ledger.record([decision(hour, "redelivered", 0, None, act.at, reason=reason, act=act)])


def egress(
    job: Job, targets: tuple[Target, ...], all_again: bool = False
) -> Iterator[Delivery | Failed]:
    """Deliver the missing hours, or with `all_again` every hour, to each target, and yield each
    delivery or failure. A failed target blocks no other; unexpected errors are raised."""
    for target in targets:
        try:
            yield from deliver(job, target, all_again)
        except AnabranchError as error:
            LOG.error("egress %s of stream %s: %s", target.name, job.stream.name, error)
            yield Failed(target.name, error)


def deliver(job: Job, target: Target, all_again: bool = False) -> Iterator[Delivery]:
    """Deliver the hours after a target's position, in the order of the changes; every hour with
    `all_again`, and when the table was restored to an earlier time. Raises Transient,
    ConfigurationError, Terminal for a stream to which `egress:` was added and not applied."""
    lake, stream = job.lake, job.stream
    with _open(job, target) as outlet:
        last = outlet.last()
        token = (
            Token.decode(last.token) if last is not None and not all_again else Token(stream.name)
        )
        tried = 0
        while tried < _TRIES:
            for change in feed.poll(job, token):
                hour = open_hour(job, change)
                if hour is None:
                    # Its snapshot expired, or rows were erased, while earlier hours were delivered:
                    # load the changes again.
                    tried += 1
                    break
                try:
                    delivery = outlet.deliver(hour, change.token, all_again)
                except Restored:
                    LOG.warning(
                        "egress %s of stream %s: the target has a later reading of hour %s than "
                        "the table, so the table was restored to an earlier time; delivering "
                        "every hour again",
                        target.name,
                        stream.name,
                        hour.name,
                    )
                    token, all_again = Token(stream.name), True
                    break
                reach(Step.EGRESS_DELIVERED)
                deliveries.record(lake, stream.egress_table, delivery)
                reach(Step.EGRESS_RECORDED)
                token, tried = Token.decode(change.token), 0
                yield delivery
            else:
                return
    raise Transient(
        f"egress {target.name} of stream {stream.name}: expected to open an hour's snapshot once "
        f"in {_TRIES} tries, found that it had expired, or that rows had been erased since, each "
        "time; run it again"
    )


def undelivered_hours(job: Job, target: Target) -> set[str] | None:
    """Return the hours that are not delivered to a target yet, from the table of deliveries; None
    for all hours. Does not contact the target. Raises Transient, Terminal for a stream to which
    `egress:` was added and not applied."""
    last = deliveries.newest(job.lake, job.stream.egress_table, target.name)
    return feed.pending_hours(job, Token.decode(last.token)) if last is not None else None


def _open(job: Job, target: Target) -> AbstractContextManager[Folder | TopicSender | Search]:
    if target.kind == "root":
        return open_folder(job, target)
    return open_search(job, target) if target.kind == "index" else open_topic(job, target)


TRANSACTION_ROWS = 10_000
"""Maximum number of records of a transaction."""

TRANSACTION_BYTES = 8 * 1024 * 1024
"""Maximum size of a transaction before compression; a single record may be larger."""


@dataclass
class TopicSender:
    """An open topic target. Its place has the topic's id: a recreated topic is another."""

    job: Job
    target: Target
    producer: TransactionalProducer
    position: SenderPosition

    def last(self) -> Delivery | None:
        """Return the newest delivery, from Kafka, or from the table once Kafka has forgotten it;
        None when the topic has a part of an hour whose change the restored table has lost, so that
        every hour is delivered again. Records in the table a delivery whose row a crash prevented.
        Raises Transient, Terminal if the table of deliveries does not exist."""
        lake, name = self.job.lake, self.job.stream.egress_table
        recorded = deliveries.newest(lake, name, self.target.name, self.position.place)
        if (done := self.position.done) is None:
            self.position = replace(self.position, done=recorded)
        elif recorded is None or recorded.delivery_id != done.delivery_id:
            deliveries.record(lake, name, done)
        return self.position.done if not self._has_lost_part() else None

    def _has_lost_part(self) -> bool:
        """Return whether the table was restored to before the change of the partly sent hour. It
        may then also lack the last delivery's change, with no change after it."""
        done, at = self.position.done, self.position.at
        if (
            done is None
            or at is None
            or at.hour in pending_hours(self.job, Token.decode(done.token))
        ):
            return False
        LOG.warning(
            "egress %s of stream %s: the topic has a part of hour %s that the table has not "
            "changed, so the table was restored to an earlier time; delivering every hour again",
            self.target.name,
            self.job.stream.name,
            at.hour,
        )
        return True

    def deliver(self, hour: Hour, token: str, all_again: bool) -> Delivery:
        """Send the hour's records that were not sent with this content. Kafka's position reveals a
        restored table (`last`), and the changes then contain every hour again. Raises Transient,
        also when another process was started for this topic, and Refused for a record that is too
        large for the topic."""
        place = self.position.place
        delivery = hour.delivered(self.target.name, place, new_id(), 0, token)
        cut, identity = cut_of(self.job, hour)
        at = self.position.at
        if at is not None and (at.hour, at.source) == (hour.name, hour.source):
            LOG.info(
                "hour %s continues after partition %d, offset %d",
                hour.name,
                at.partition,
                at.offset,
            )
            sent = (at.partition, at.offset)
        else:
            sent = (-1, -1)
        with hour.batches(self.target.name) as batches:
            headers = (("hour", hour.name.encode()), ("revision", str(hour.revision).encode()))
            left = (
                (
                    p,
                    o,
                    Outgoing(
                        identity.key_of(p, o), value_of(row) if row is not None else None, headers
                    ),
                )
                for p, o, row in places(batches.rows(), cut)
                if (p, o) > sent
            )
            for chunk, is_last in chunks(
                left, TRANSACTION_ROWS, TRANSACTION_BYTES, lambda one: one[2].size
            ):
                if is_last:
                    position = SenderPosition(place, delivery)
                else:
                    position = SenderPosition(
                        place, self.position.done, LastPlace(hour.name, hour.source, *chunk[-1][:2])
                    )
                try:
                    self.producer.send(
                        self.target.place, [one for _, _, one in chunk], position.encode()
                    )
                except RecordTooLarge as error:
                    p, o, refused = chunk[error.index]
                    raise Refused(
                        f"egress.{self.target.name}: send hour {hour.name} to topic "
                        f"{self.target.place}: expected at most {error.limit} bytes "
                        f"(max.message.bytes, compressed), found a record of {refused.size} bytes "
                        f"before compression, of partition {p}, offset {o}; the hour counts as not "
                        "delivered: raise max.message.bytes of the topic, 64 MB at most, then run "
                        "it again"
                    ) from error
                self.position = position
        return delivery


@contextmanager
def open_topic(job: Job, target: Target) -> Iterator[TopicSender]:
    """Open a topic target until the end of the `with` block. Raises ConfigurationError if the topic
    does not exist, Transient."""
    described = job.kafka.describe(target.place)
    if described is None:
        raise ConfigurationError(
            f"egress.{target.name}: expected the topic {target.place}, found none; create it, with "
            "cleanup.policy=compact where its readers want each record's newest value"
        )
    place = f"{target.place} ({described.id})"
    name = f"anabranch.egress.{job.stream.name}.{target.place}"
    largest = job.kafka.largest_record(target.place)
    with closing(TransactionalProducer(job.environment.kafka, name, largest)) as producer:
        # Read the position after all other producers are fenced.
        text = producer.committed(target.place, job.kafka)
        position = SenderPosition.decode(text) if text is not None else SenderPosition(place)
        yield TopicSender(
            job, target, producer, position if position.place == place else SenderPosition(place)
        )
