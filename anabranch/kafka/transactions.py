"""Transactions of Kafka that say how far their sender is, so that a process that goes on knows
which were committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from anabranch import config
from anabranch.common.deadline import call_within
from anabranch.common.errors import NoAnswer, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.kafka.client import KafkaAdapter, new_producer, position_to_commit
from anabranch.kafka.client_errors import explained

_TRANSACTION_MS = 30_000
_LARGEST_REQUEST = 64 << 20
# How brokers and the client say that another producer of the same name was opened.
_FENCED = ("ProducerFenced", "InvalidProducerEpoch", "INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED")


@dataclass(frozen=True)
class Outgoing:
    """A record to be sent; None as its value takes its key out of a compacted topic."""

    key: bytes
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class TransactionalProducer:
    """A producer of transactions that carry a position of their sender, in the offsets of a group
    of its name.

    To open one ends what another of its name has begun: that one's transaction is committed or
    aborted by then, and whatever it tries from there on is refused (KIP-98, KIP-129). Each call
    raises Transient within a minute when the brokers do not answer, and when another has been
    opened meanwhile; ConfigurationError for missing rights.
    """

    def __init__(self, kafka: config.Kafka, name: str) -> None:
        self._kafka, self._name = kafka, name
        self._producer: Any = new_producer(
            kafka,
            transactional_id=name,
            max_block_ms=_TRANSACTION_MS,
            max_request_size=_LARGEST_REQUEST,
        )
        try:
            self._do("begin", self._producer.init_transactions)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close; the next transaction of its name, or the brokers within a minute, abort an open
        one."""
        self._producer.close(timeout=0)

    def send(self, topic: str, records: Iterable[Outgoing], position: str) -> None:
        """Send records in one transaction with a position: readers of committed records see all or
        none of them, and `position` is then what `committed` says, or not."""

        def send_all() -> None:
            self._producer.begin_transaction()
            sent = [
                self._producer.send(topic, r.value, key=r.key, headers=list(r.headers))
                for r in records
            ]
            self._producer.flush(timeout=_TRANSACTION_MS / 1000)
            for future in sent:
                future.get(timeout=0)
            self._producer.send_offsets_to_transaction(
                position_to_commit(topic, position), self._name
            )

        self._do("send", send_all)
        reach(Step.EGRESS_SENT)
        self._do("commit", self._producer.commit_transaction)
        reach(Step.EGRESS_COMMITTED)

    def committed(self, topic: str, adapter: KafkaAdapter) -> str | None:
        """The position of the last transaction that was committed, of any producer of this name;
        None for none, and once the brokers have forgotten it (`offsets.retention.minutes`)."""
        return adapter.group_metadata(self._name, topic)

    def _do(self, what: str, call: Callable[[], None]) -> None:
        """A call, which kafka-python 3.0.12 lets wait without end, for a minute at most."""
        doing, began = f"{what} a transaction of {self._name}", time.monotonic()
        silent = NoAnswer(
            f"{doing} at {self._kafka.bootstrap_servers}: no answer (transient, try again)"
        )
        try:
            call_within(2 * _TRANSACTION_MS / 1000, what, call, silent)
        except NoAnswer:
            raise
        except Exception as error:
            if any(name in repr(error) for name in _FENCED):
                raise Transient(
                    f"{doing}: expected to be the only process, found that another was started "
                    "since, which goes on in its place; nothing is lost: stop one of the two"
                ) from error
            right = "--operation Write --operation Describe --topic TOPIC"
            raise explained(self._kafka, doing, error, began, right) from error
