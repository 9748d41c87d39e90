"""A topic: an hour as records in transactions, each with its sender's position. The key is the
record's identity, so the newest value of a key is that record in `main`, and a compacted topic has
each accepted record once. A place of the hour without a row gets a null value. Opening the topic
fences the process that had it open (`TransactionalProducer`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from anabranch.common.errors import ConfigurationError, Refused
from anabranch.config.sections import Target
from anabranch.job import Job
from anabranch.kafka.transactions import Outgoing, RecordTooLarge, TransactionalProducer
from anabranch.protocol import deliveries
from anabranch.protocol.deliveries import Delivery
from anabranch.protocol.publish import new_id
from serving_layer.changes import Token, pending_hours
from serving_layer.egress.hour import (
    Hour,
    LastPlace,
    SenderPosition,
    chunks,
    cut_of,
    places,
    value_of,
)

LOG = logging.getLogger(__name__)

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
