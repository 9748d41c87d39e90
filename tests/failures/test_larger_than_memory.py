"""A small record whose value is larger than Java's memory ends a process once: a dead letter."""

import pytest
from commands import run, started
from world import Make, Record, World, past_hour, spread

from anabranch.kafka.client import new_producer
from anabranch.kafka.large_records import TOO_LARGE
from anabranch.offsets.hours import start_of
from anabranch.operations.audit import audit
from batch_layer.passes import SMALL

MEMORY, SIZE = "512m", 250_000_000


def send_bomb(one: World, hour: str) -> int:
    """Send a record of a quarter of a megabyte whose value has a quarter of a gigabyte."""
    producer = new_producer(
        one.job.environment.kafka,
        max_request_size=2**31 - 1,
        compression_type="gzip",
        request_timeout_ms=60_000,
    )
    try:
        at = int(start_of(hour).timestamp() * 1000) + 1
        sent = producer.send(one.name, b"0" * SIZE, b"k", [], 0, at).get(timeout=120)
    finally:
        producer.close()
    return int(sent.offset)


def run_to_its_end(one: World, *arguments: str) -> str:
    """Run a command that dies, since Java has no memory left."""
    with started(one, *arguments) as command:
        code = command.wait()
        assert code != 0 and "OutOfMemoryError" in command.log, (code, command.log[-3000:])
        return command.log


def exact(one: World, bomb: int, sent: list[Record]) -> None:
    assert one.offsets() == sorted((r.partition, r.offset) for r in sent)
    [letter] = one.dead()
    assert (letter["kafka_offset"], letter["error_code"]) == (bomb, TOO_LARGE)
    assert letter["value"] is None and str(SIZE // 10**6) in letter["error_text"]


@pytest.fixture
def one(world: Make) -> World:
    """A stream whose jobs have little memory."""
    made = world()
    conf = made.environment_file["spark"]["conf"] | {"spark.driver.memory": MEMORY}
    made.set_environment(spark=made.environment_file["spark"] | {"conf": conf})
    made.create(1)
    return made


def send_around_bomb(one: World, hour: str, records: int = 30) -> int:
    one.send(spread(hour, records, "a", partitions=1))
    bomb = send_bomb(one, hour)
    one.send(spread(hour, records, "b", partitions=1))
    return bomb


def test_a_huge_record_ends_a_group_once(one: World, world: Make) -> None:
    hour, other = past_hour(1), world(beside=one, create=1)
    bomb = send_around_bomb(one, hour)
    other.send(spread(hour, 20, "c", partitions=1))

    run_to_its_end(one, "speed", "--all", "--available-now")
    log = run(one, "speed", "--all", "--available-now")

    assert f"offset={bomb} bytes=2500" in log, log[-3000:]
    exact(one, bomb, one.sent)
    assert other.offsets() == sorted((r.partition, r.offset) for r in other.sent)


@pytest.mark.parametrize("records", [30, SMALL])
def test_a_record_larger_than_memory_ends_one_rebuild_of_its_hour(one: World, records: int) -> None:
    """Only Spark's rebuild of a large hour ends the process."""
    hour = past_hour(1)
    bomb = send_around_bomb(one, hour, records)

    if records > 30:
        run_to_its_end(one, "batch", one.name)
    run(one, "batch", one.name)

    exact(one, bomb, one.sent)
    assert one.state.accepted[hour].revision == 1
    assert audit(one.job, None, with_kafka=False).disagreements == []
    # Once Kafka has deleted its hour, the record comes from the table, without its bytes.
    one.delete_records({0: bomb + 5})
    [again] = one.batch(hour, restate=True)
    assert (again.decision, again.account.dead) == ("accepted", 1)
    exact(one, bomb, one.sent)
