"""Send events to a topic, and account for each: sent by kind, acknowledged, failed; or the lines of
a file."""

from __future__ import annotations

import logging
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import Any

from anabranch import config
from anabranch.common.errors import ConfigurationError, Transient
from anabranch.common.process import in_own_thread
from anabranch.dev.producers.events import (
    Ack,
    ProducerRecord,
    Sent,
    generate,
    generate_live,
    sha256,
)
from anabranch.kafka.client import KafkaAdapter, create_topic, new_producer

log = logging.getLogger(__name__)

STREAM = "game_events"
TOPIC_CONFIGS = {"message.timestamp.type": "CreateTime"}
# Maximum of unacknowledged records; the producer's own buffer has no bound.
_IN_FLIGHT = 100_000
# Longer than the producer's delivery timeout of two minutes, so that each send has ended.
_FLUSH_SECONDS = 130.0
_STOPPED_FLUSH_SECONDS = 15.0

Pending = deque[tuple[ProducerRecord, Any]]


def produce_events(
    kafka: config.Kafka,
    topic: str,
    *,
    events: int | None,
    rate: float | None = None,
    hours: float = 0,
    until: datetime | None = None,
    seed: int = 1,
    dirty: bool = False,
    partitions: int = 3,
    stop: threading.Event | None = None,
    on_ack: Callable[[Ack], None] | None = None,
) -> Sent:
    """Send `events` game events, or until `stop` if None, as `send_records` does.

    With `hours`, the Kafka timestamps are spread over [until - hours, until), where `until`
    defaults to now; otherwise each is the time of its send. A record with an earlier timestamp than
    one already in the topic belongs to the open hour: it does not reopen an earlier one. Raises
    ValueError for contradictory arguments.
    """
    if events is None and hours:
        raise ValueError("hours need a number of events to spread over them")
    if events is None and not rate:
        raise ValueError("an endless run needs a rate")

    def records(now: datetime) -> Iterator[ProducerRecord]:
        if events is not None and hours:
            end = until or now
            return generate(events, seed, end - timedelta(hours=hours), end, dirty)
        return generate_live(events, seed, now, _now, dirty)

    return send_records(
        kafka, topic, records, rate=rate, partitions=partitions, stop=stop, on_ack=on_ack
    )


def send_records(
    kafka: config.Kafka,
    topic: str,
    records_from: Callable[[datetime], Iterator[ProducerRecord]],
    *,
    rate: float | None = None,
    partitions: int = 3,
    stop: threading.Event | None = None,
    on_ack: Callable[[Ack], None] | None = None,
) -> Sent:
    """Send the records that `records_from` returns for the time of the start. Return once each is
    acknowledged or has failed.

    `rate` is in records per second, of all kinds together; without it, records are sent as fast as
    possible. The topic is created if missing. `on_ack` is called in this thread, soon after each
    acknowledgement. May run in any thread; `stop` ends the run early, after records sent so far are
    flushed and counted.

    Raises Transient if the broker cannot be reached at the start; later failures are counted.
    """
    stop = stop or threading.Event()
    sent = Sent(topic, on_ack=on_ack)
    # Step 1: create the topic and the producer. Compression saves time: the producer's largest cost
    # is the checksum, in pure Python, of the bytes that it sends.
    create_topic(kafka, topic, partitions, TOPIC_CONFIGS)
    producer = new_producer(kafka, compression_type="gzip", metrics_enabled=False)
    try:
        count = len(producer.partitions_for(topic))
        # Step 2: send. Timestamps count from here, so that the last ones are as new as possible.
        records = records_from(datetime.now(UTC))
        pending: Pending = deque()
        started = time.monotonic()
        for _ in _paced(rate, started, stop):
            record = next(records, None)
            if record is None:
                break
            sent.sent[record.kind] += 1
            try:
                future = producer.send(
                    topic,
                    key=record.key,
                    value=record.value,
                    timestamp_ms=record.timestamp_ms,
                    # One player, one partition. Not the client's murmur2, which is a quarter of the
                    # cost of a send.
                    partition=zlib.crc32(
                        record.key if record.key is not None else record.value or b""
                    )
                    % count,
                )
            except Exception as error:  # after any error here the record is not in the topic
                sent.fail(error)
                continue
            pending.append((record, future))
            _count_ended(pending, sent)
            while len(pending) >= _IN_FLIGHT and not stop.wait(0.01):
                _count_ended(pending, sent)
        # Step 3: wait for every acknowledgement.
        _flush(producer, pending, sent, stop)
    finally:
        producer.close(timeout=5)
    return sent


def _paced(rate: float | None, started: float, stop: threading.Event) -> Iterator[int]:
    """Yield a number for each send at its time, until `stop`."""
    number = 0
    while not stop.is_set():
        if rate:
            ahead = started + number / rate - time.monotonic()
            if ahead > 0 and stop.wait(ahead):
                return
        yield number
        number += 1


def _count_ended(pending: Pending, sent: Sent) -> None:
    """Remove and count the oldest sends that are acknowledged or have failed."""
    while pending and pending[0][1].is_done:
        record, future = pending.popleft()
        if future.failed():
            sent.fail(future.exception)
            continue
        done = future.value
        sent.acknowledge(
            Ack(done.partition, done.offset, record.kind, sha256(record.value), done.timestamp)
        )


def _flush(producer: Any, pending: Pending, sent: Sent, stop: threading.Event) -> None:
    """Wait until all sends have ended. After the deadline, the others count as failed."""
    began = time.monotonic()
    while pending:
        waited = time.monotonic() - began
        if waited > (_STOPPED_FLUSH_SECONDS if stop.is_set() else _FLUSH_SECONDS):
            # Otherwise `close` would wait for them again, raise, and leave its thread running.
            producer._sender.force_close()
            producer._sender.join(5)
            _count_ended(pending, sent)
            break
        try:
            producer.flush(timeout=0.2)
        except Exception as error:  # timeout: some are not acknowledged yet
            log.debug(
                "%d records of topic %s are not acknowledged yet: %s",
                len(pending),
                sent.topic,
                error,
            )
        before = len(pending)
        _count_ended(pending, sent)
        if len(pending) == before:
            time.sleep(0.01)  # the futures are set a moment after the flush
    for _ in pending:
        sent.fail(Transient("no acknowledgement in time"))


@contextmanager
def stopped_by_signals() -> Iterator[tuple[threading.Event, list[int]]]:
    """Provide an event that Ctrl-C or SIGTERM sets, and the received signals. A second Ctrl-C
    raises KeyboardInterrupt."""
    stop = threading.Event()
    received: list[int] = []
    request_stop = in_own_thread(stop.set)

    def handle(signum: int, frame: FrameType | None) -> None:
        if received and signum == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(signum)
        request_stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop, received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def send_lines(kafka: config.Kafka, topic: str, lines: Iterable[bytes]) -> int:
    """Send each line that is not blank, without its line ending, with the time of its send as
    timestamp. Return the number of records.

    Every record is acknowledged when this returns. Raises ConfigurationError if the topic does not
    exist, and as `require_acknowledged`.
    """
    with KafkaAdapter(kafka) as adapter:
        if adapter.describe(topic) is None:
            raise ConfigurationError(
                f"dev send: expected topic {topic} at {kafka.bootstrap_servers}, found none; run "
                f"`anabranch dev topic {topic}`"
            )
    values = (value for line in lines if (value := line.rstrip(b"\r\n")).strip())
    sent = send_records(
        kafka, topic, lambda _: (ProducerRecord("good", None, value, _now()) for value in values)
    )
    require_acknowledged("dev send", sent)
    return sent.acknowledged


def _now() -> int:
    return time.time_ns() // 1_000_000


def require_acknowledged(doing: str, sent: Sent) -> None:
    """Raise Transient if a record was not acknowledged."""
    if sent.failed:
        raise Transient(
            f"{doing}: expected {sent.sent.total()} acknowledgements, found {sent.acknowledged}; "
            f"the first failure: {sent.first_error}. 'anabranch dev up' starts a broker that does "
            "not run."
        )
