"""Kafka transactions that carry the position of their sender, so that a process that resumes knows
which were committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from kafka import errors

from anabranch import config
from anabranch.common.deadline import call_within
from anabranch.common.errors import AnabranchError, NoAnswer, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.kafka.client import KafkaAdapter, new_producer, position_to_commit
from anabranch.kafka.kafka_python import explained

_TRANSACTION_MS = 30_000
_LARGEST_REQUEST = 64 << 20
_LARGEST_BATCH = 256 << 10
_TOO_LARGE = (errors.MessageSizeTooLargeError, errors.RecordListTooLargeError)
# Names of the errors of a producer that another one of the same name has fenced.
_FENCED = ("ProducerFenced", "InvalidProducerEpoch", "INVALID_PRODUCER_EPOCH", "PRODUCER_FENCED")


@dataclass(frozen=True)
class Outgoing:
    """A record to send; value None is a tombstone: it deletes the key from a compacted topic."""

    key: bytes
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()

    @property
    def size(self) -> int:
        """The bytes of key, value and headers, before compression."""
        headers = sum(len(name.encode()) + len(value) for name, value in self.headers)
        return len(self.key) + len(self.value or b"") + headers


class RecordTooLarge(Exception):
    """The brokers, or the largest request, do not take the record at `index` of a transaction."""

    def __init__(self, index: int, limit: int) -> None:
        super().__init__(index, limit)
        self.index, self.limit = index, limit


class TransactionalProducer:
    """A transactional producer whose transactions carry the sender's position, in the committed
    offsets of a consumer group with the producer's name.

    Records are compressed with zstd. Opening a producer fences an earlier one of the same name: its
    transaction is then committed or aborted, and brokers refuse its later requests (KIP-98,
    KIP-129). Each call raises Transient within a minute if the brokers do not answer, Transient if
    this producer was fenced, and ConfigurationError for missing rights.
    """

    def __init__(self, kafka: config.Kafka, name: str, largest_record: int) -> None:
        """`largest_record`: the topic's `max.message.bytes`."""
        self._kafka, self._name = kafka, name
        self._largest = min(largest_record, _LARGEST_REQUEST)
        self._producer: Any = new_producer(
            kafka,
            transactional_id=name,
            max_block_ms=_TRANSACTION_MS,
            max_request_size=_LARGEST_REQUEST,
            compression_type="zstd",
            # A batch of several records is never too large, so a refusal is that of one record.
            batch_size=min(_LARGEST_BATCH, self._largest),
        )
        try:
            self._do("begin", self._producer.init_transactions)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the producer. An open transaction is aborted by the next producer of the name, or
        by the brokers within a minute."""
        self._producer.close(timeout=0)

    def send(self, topic: str, records: Iterable[Outgoing], position: str) -> None:
        """Send records and a position in one transaction: `read_committed` consumers see all
        records or none, and `committed` returns `position` only with them. Raises RecordTooLarge;
        the producer can then only be closed."""

        def send_all() -> None:
            self._producer.begin_transaction()
            until = time.monotonic() + _TRANSACTION_MS / 1000
            sent: list[Any] = []
            refused: list[int] = []

            def note(index: int, error: BaseException) -> None:
                if isinstance(error, _TOO_LARGE):
                    refused.append(index)

            try:
                for index, r in enumerate(records):
                    with self._of_record(index):
                        sent.append(
                            self._producer.send(topic, r.value, key=r.key, headers=list(r.headers))
                        )
                    sent[-1].add_errback(note, index)
                for index, future in enumerate(sent):
                    with self._of_record(index):
                        future.get(timeout=max(0.0, until - time.monotonic()))
            except (errors.KafkaError, RecordTooLarge) as error:
                for future in sent:
                    with suppress(errors.KafkaError):
                        future.get(timeout=max(0.0, until - time.monotonic()))
                # After a refusal, kafka-python fails the records that wait with the same error: the
                # first to fail is the one refused. Its future may be done before `note` is called.
                failed = [n for n, f in enumerate(sent) if isinstance(f.exception, _TOO_LARGE)]
                if at := refused or failed:
                    raise RecordTooLarge(at[0], self._largest) from error
                raise
            self._producer.send_offsets_to_transaction(
                position_to_commit(topic, position), self._name
            )

        self._do("send", send_all)
        reach(Step.EGRESS_SENT)
        self._do("commit", self._producer.commit_transaction)
        reach(Step.EGRESS_COMMITTED)

    @contextmanager
    def _of_record(self, index: int) -> Iterator[None]:
        try:
            yield
        except _TOO_LARGE as error:
            raise RecordTooLarge(index, self._largest) from error
        except errors.KafkaTimeoutError as error:
            raise NoAnswer(
                f"send a transaction of {self._name}: record {index} was not acknowledged within "
                f"{_TRANSACTION_MS / 1000:.0f} s (transient, try again)"
            ) from error

    def committed(self, topic: str, adapter: KafkaAdapter) -> str | None:
        """Return the position of the last committed transaction of any producer of this name; None
        if there is none, or if brokers have expired it (`offsets.retention.minutes`)."""
        return adapter.group_metadata(self._name, topic)

    def _do(self, what: str, call: Callable[[], None]) -> None:
        """Call for a minute at most; kafka-python 3.0.12 may wait forever."""
        doing, began = f"{what} a transaction of {self._name}", time.monotonic()
        silent = NoAnswer(
            f"{doing} at {self._kafka.bootstrap_servers}: no answer (transient, try again)"
        )
        try:
            call_within(2 * _TRANSACTION_MS / 1000, what, call, silent)
        except (AnabranchError, RecordTooLarge):
            raise
        except Exception as error:
            if any(name in repr(error) for name in _FENCED):
                raise Transient(
                    f"{doing}: expected to be the only process, found that another process has "
                    "replaced it (fenced its producer); nothing is lost: stop one of the two"
                ) from error
            right = "--operation Write --operation Describe --topic TOPIC"
            raise explained(self._kafka, doing, error, began, right) from error
