"""The soak of five minutes, as `make soak` runs it; and ten kills from outside under load."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from commands import ROOT, started
from confluent_kafka import Message, Producer
from world import World

SEED = 20261121
KILLS = 10
RATE = 5_000
PARTITIONS = 4


@pytest.mark.timeout(1500)
def test_a_soak_of_five_minutes_loses_and_repeats_nothing() -> None:
    command = [sys.executable, "-m", "anabranch.dev.soak", "--minutes", "5", "--seed", str(SEED)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"lost +0\n.*twice +0\n", done.stdout), done.stdout[-3000:]
    faults = re.search(r"(\d+) faults in all", done.stdout)
    assert faults is not None and int(faults.group(1)) >= 5


@contextmanager
def load(one: World) -> Iterator[dict[tuple[int, int], str]]:
    """RATE events a second by librdkafka; gives what Kafka acknowledged: (partition, offset) -> event id."""
    acknowledged: dict[tuple[int, int], str] = {}
    failed: list[object] = []
    stop = threading.Event()
    producer = Producer({"bootstrap.servers": one.job.environment.kafka.bootstrap_servers, "enable.idempotence": True})

    def go() -> None:
        began, number = time.monotonic(), 0
        while not stop.is_set():
            moment = datetime.now(UTC).isoformat()
            while number < (time.monotonic() - began) * RATE:
                name = f"e{number}"

                def on_delivery(error: object, message: Message, name: str = name) -> None:
                    if error is not None:
                        failed.append(error)
                    else:
                        acknowledged[message.partition() or 0, message.offset() or 0] = name

                value = (
                    f'{{"event_id":"{name}","event_time":"{moment}","player":"p{number % 97}","level":{number % 9}}}'
                )
                producer.produce(one.name, value, partition=number % PARTITIONS, on_delivery=on_delivery)
                number += 1
            producer.poll(0)
            stop.wait(0.02)
        assert producer.flush(120) == 0

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    try:
        yield acknowledged
    finally:
        stop.set()
        thread.join(150)
    assert not failed


@pytest.mark.timeout(1500)
def test_ten_kills_from_outside_under_load_lose_and_repeat_nothing(world: Callable[..., World]) -> None:
    one = world(speed={"trigger": "1 second", "max_offsets_per_trigger": 40_000})
    one.topic(PARTITIONS)
    one.apply()
    dice = random.Random(SEED)

    with load(one) as acknowledged:
        for _ in range(KILLS):
            before = one.published
            with started(one, "speed", one.name) as speed:
                speed.until(lambda b=before: one.published > b, "a first micro-batch")  # type: ignore[misc]
                ends = time.monotonic() + dice.uniform(0, 4)
                speed.until(lambda e=ends: time.monotonic() > e, "a moment to pass")  # type: ignore[misc]
                # The hazard: events are coming in, and it is killed wherever it is.
                assert one.published < len(acknowledged)
                speed.kill()
    one.speed()
    table = one.lake.load(one.job.stream.table)
    rows = table.scan(selected_fields=("kafka_partition", "kafka_offset", "event_id")).to_arrow()
    records = list(zip(*(rows[name].to_pylist() for name in rows.column_names), strict=True))
    assert rows.column_names == ["event_id", "kafka_partition", "kafka_offset"]
    assert len(records) == len(acknowledged)
    assert {(p, o): name for name, p, o in records} == acknowledged
