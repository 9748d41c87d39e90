"""The soak of five minutes; ten kills from outside under load; and a soak on a cluster."""

import os
import random
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from budget import budget
from cluster import HOSTS, SparkCluster, running_cluster
from commands import ROOT, Command, run, started
from confluent_kafka import Message, Producer
from programs import output_of
from world import Make, World, past_hour, spread

SEED = 20261121
KILLS = 10
RATE = 5_000
PARTITIONS = 4
MINUTES = budget(2, 10)
PATIENT = 400.0  # seconds to wait for a job on a cluster


@pytest.mark.timeout(1500)
def test_a_soak_of_five_minutes_loses_and_repeats_nothing() -> None:
    command = [sys.executable, "-m", "soak", "--minutes", "5", "--seed", str(SEED)]
    folders = (ROOT / "tests" / "support", ROOT / "examples")
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    printed = output_of(*command, env=variables, seconds=1400)
    assert re.search(r"lost +0\n.*twice +0\n", printed), printed[-3000:]
    faults = re.search(r"(\d+) faults in all", printed)
    assert faults is not None and int(faults.group(1)) >= 5


@contextmanager
def load(one: World, rate: int = RATE) -> Iterator[dict[tuple[int, int], str]]:
    """Events by librdkafka, `rate` a second; the event id by acknowledged (partition, offset)."""
    acknowledged: dict[tuple[int, int], str] = {}
    failed: list[object] = []
    stop = threading.Event()
    servers = one.job.environment.kafka.bootstrap_servers
    producer = Producer({"bootstrap.servers": servers, "enable.idempotence": True})

    def go() -> None:
        began, number = time.monotonic(), 0
        while not stop.is_set():
            moment = datetime.now(UTC).isoformat()
            while number < (time.monotonic() - began) * rate:
                name = f"e{number}"

                def on_delivery(error: object, message: Message, name: str = name) -> None:
                    if error is not None:
                        failed.append(error)
                    else:
                        acknowledged[message.partition() or 0, message.offset() or 0] = name

                value = f'{{"event_id":"{name}","event_time":"{moment}","player":"p{number % 97}","level":{number % 9}}}'
                producer.produce(
                    one.name, value, partition=number % PARTITIONS, on_delivery=on_delivery
                )
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
def test_ten_kills_under_load_lose_and_repeat_nothing(world: Make) -> None:
    one = world(speed={"trigger": "1 second", "max_offsets_per_trigger": 40_000}, create=PARTITIONS)
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
    assert_exact(one, acknowledged)


def assert_exact(one: World, acknowledged: dict[tuple[int, int], str]) -> None:
    """Each acknowledged record is in `main` with its event, none twice."""
    table = one.lake.load(one.job.stream.table)
    rows = table.scan(selected_fields=("kafka_partition", "kafka_offset", "event_id")).to_arrow()
    names = ("kafka_partition", "kafka_offset", "event_id")
    served = Counter(zip(*(rows[name].to_pylist() for name in names), strict=True))
    expected = {(*place, event_id) for place, event_id in acknowledged.items()}
    lost, twice = expected - served.keys(), [row for row, times in served.items() if times > 1]
    print(f"{len(expected):,} records acknowledged, {len(lost)} lost, {len(twice)} twice")
    assert not lost and not twice, f"lost {sorted(lost)[:5]}, twice {sorted(twice)[:5]}"
    assert served.keys() == expected


@pytest.mark.timeout(60 * MINUTES + 1200)
def test_a_soak_on_two_workers_loses_and_repeats_nothing(world: Make) -> None:
    one = world(speed={"trigger": "1 second", "max_offsets_per_trigger": 40_000})
    spark = one.environment_file["spark"]
    one.set_environment(spark=spark | {"conf": spark["conf"] | {"spark.cores.max": "1"}})
    one.create(PARTITIONS)
    hours = [past_hour(ago) for ago in (4, 3, 2)]
    for hour in hours:
        one.send(spread(hour, 4_000, hour, PARTITIONS))
    past = {(partition, offset): event_id for partition, offset, event_id in one.acknowledged()}
    done = threading.Event()
    with (
        running_cluster() as cluster,
        started(one, "speed", one.name, "--master", cluster.master) as speed,
        ThreadPoolExecutor(1) as pool,
    ):
        with load(one, 1_000) as acknowledged:
            batch = pool.submit(rebuild, one, hours, cluster.master, done)
            try:
                kill_workers(one, cluster, speed)
            finally:
                done.set()
            rebuilt = batch.result(PATIENT)
        expected = past | acknowledged
        speed.until(lambda: one.published == len(expected), "the rest to be published", PATIENT)
        assert speed.terminate() == 0, speed.log[-4000:]
    state = one.state
    print(f"{MINUTES} workers killed, {rebuilt} hours rebuilt")
    assert {state.served_by(hour) for hour in hours[:rebuilt]} == {"batch"}
    assert sum(accepted.revision for accepted in state.accepted.values()) == rebuilt
    assert_exact(one, expected)


def rebuild(one: World, hours: list[str], master: str, done: threading.Event) -> int:
    """Rebuild one of the hours after the other, until `done`; returns how many were."""
    number = 0
    while not done.is_set():
        of = ["--hour", hours[number % len(hours)], *["--restate"] * (number >= len(hours))]
        run(one, "batch", one.name, *of, "--master", master)
        number += 1
    return number


def kill_workers(one: World, cluster: SparkCluster, speed: Command) -> None:
    """Each minute kill a worker with an executor, and start it; records are published after."""
    dice, began = random.Random(SEED), time.monotonic()
    for minute in range(1, MINUTES + 1):
        before = one.published
        speed.until(lambda b=before: one.published > b, "records to be published", PATIENT)  # type: ignore[misc]
        speed.until(lambda m=minute: time.monotonic() > began + 60 * m, "a minute to pass")  # type: ignore[misc]
        speed.until(lambda: any(map(cluster.executors, HOSTS)), "an executor")
        host = dice.choice([host for host in HOSTS if cluster.executors(host)])
        cluster.kill_worker(host)
        cluster.start_worker(host)
    before = one.published
    speed.until(lambda: one.published > before, "records after the last kill", PATIENT)
