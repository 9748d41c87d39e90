"""One speed process for many streams: each is exact, and feels nothing of the others."""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime

import psutil
import pytest
from pyspark.sql import SparkSession
from registry import SchemaRegistry, new_avro_stream
from running import running_beside
from waiting import wait_for
from wire import encode, varint, wired
from world import Make, World, event
from writers import BY_PYARROW, writers

from anabranch.common.errors import ConfigurationError, PositionError
from anabranch.job import Job, open_job
from speed_layer.group import GroupJob


def _jobs(*worlds: World) -> dict[str, Job | ConfigurationError]:
    """Jobs with connections of their own: a group uses and closes them."""
    return {one.name: open_job(one.name, str(one.folder)) for one in worlds}


@contextmanager
def _running(
    spark: SparkSession, streams: Mapping[str, Job | ConfigurationError]
) -> Iterator[GroupJob]:
    """A group that runs for the length of a `with`; what it raised is raised at the end."""
    kafka = next(one for one in streams.values() if isinstance(one, Job)).environment.kafka
    with running_beside(GroupJob(spark, kafka, lambda: streams), "group") as group:
        yield group


def _exact(one: World, dead: int = 0) -> None:
    sent = sorted((r.partition, r.offset) for r in one.sent)
    letters = one.dead_offsets()
    assert len(letters) == dead
    assert sorted([*one.offsets(), *letters]) == sent


def test_a_group_sets_a_failure_aside(world: Make, spark: SparkSession) -> None:
    first, second, third = (world(create=2) for _ in range(3))
    for one in (first, second, third):
        one.send_now(40, "a")
    streams = _jobs(first, second)
    with _running(spark, streams) as group:
        first.await_published(40)
        second.await_published(40)
        # A stream joins; another one gets records that are no rows.
        streams |= _jobs(third)
        now = datetime.now(UTC)
        first.send([(0, now, b"{"), (1, now, event("good", now)), (0, now, None)])
        first.await_published(43)
        third.await_published(40)
        assert group.failures == {}
        # Its topic is deleted and made again, with other records.
        second.delete_topic()
        second.topic()
        second.send_now(7, "other")
        wait_for(lambda: second.name in group.failures, "the recreated topic to be noticed")
        assert isinstance(group.failures[second.name], PositionError)
        first.send_now(30, "b")
        third.send_now(30, "b")
        first.await_published(73)
        third.await_published(70)
        # A stream leaves.
        del streams[third.name]
        third.send_now(5, "c")
        first.send_now(5, "c")
        first.await_published(78)
    assert list(group.failures) == [second.name]
    _exact(first, dead=2)
    assert len(second.rows()) == 40
    # What arrived after it left is published by the next process.
    third.speed()
    _exact(third)


def test_a_topic_at_which_sparks_reader_throws_fails_the_read_of_all_streams_once(
    world: Make, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    odd, plain = world(), world()
    odd.topic(1, **{"message.timestamp.after.max.ms": str(2**63 - 1), "retention.ms": "-1"})
    plain.topic()
    for one in (odd, plain):
        one.apply()
        one.send_now(4, "a", partitions=1)
    now = int(datetime.now(UTC).timestamp() * 1000)
    with _running(spark, _jobs(odd, plain)) as group:
        odd.await_published(4)
        plain.await_published(4)
        # Two of a producer that stamps in nanoseconds; the third of one that does not.
        for i, millis in enumerate((now * 1_000_000, now * 1_000_000 + 1, now)):
            odd.send_stamped([(0, millis, f"b-{i}")])
            odd.await_published(5 + i)
        assert caplog.text.count("one read of 1 topics failed, reading each alone") == 1
        plain.send_now(4, "b")
        odd.send_now(4, "b", partitions=1)
        odd.await_published(11)
        plain.await_published(8)
        assert group.failures == {}
    assert caplog.text.count("reading each alone") == 1
    _exact(odd)
    _exact(plain)


def test_a_group_that_stops_at_the_present_end_has_published_all_formats(
    world: Make, spark: SparkSession, registry: SchemaRegistry
) -> None:
    plain = world(speed={"trigger": "1 second", "max_offsets_per_trigger": 20}, create=2)
    subject = f"group-{uuid.uuid4().hex}-value"
    ddl = "event_id STRING NOT NULL, event_time TIMESTAMP NOT NULL"
    avro = world(registry.url, schema=ddl, format={"type": "avro", "subject": subject}, create=2)
    plain.send_now(90, "a")
    time = {"type": "long", "logicalType": "timestamp-micros"}
    fields = [{"name": "event_id", "type": "string"}, {"name": "event_time", "type": time}]
    schema = {"type": "record", "name": "event", "fields": fields}
    id, now = registry.register(subject, schema), datetime.now(UTC)
    value = wired(id, encode(schema, {"event_id": "a", "event_time": int(now.timestamp() * 1e6)}))
    avro.send([(i % 2, now, value) for i in range(30)])
    streams = _jobs(plain, avro)
    group = GroupJob(spark, plain.job.environment.kafka, lambda: streams, available_now=True)
    group.run()
    assert group.failures == {}
    _exact(plain)
    _exact(avro)


def test_a_stream_of_avro_takes_up_schemas_and_leaves_odd_records_to_spark(
    world: Make, spark: SparkSession, registry: SchemaRegistry
) -> None:
    one, subject = new_avro_stream(world, registry)

    def send(*values: bytes) -> None:
        one.send([(i % 2, datetime.now(UTC), value) for i, value in enumerate(values)])

    def register(**more: object) -> int:
        kinds = {"id": "string", **more}
        fields = [{"name": name, "type": kind} for name, kind in kinds.items()]
        return registry.register(subject, {"type": "record", "name": "event", "fields": fields})

    text, ids = varint(1) + b"a", [register()]
    send(*[wired(ids[0], text)] * 5)
    with _running(spark, _jobs(one)) as group:
        one.await_published(5)
        assert writers(one) == {BY_PYARROW: 2}
        # Spark lists the ids of what is left; the next ones have others.
        send(b"{", wired(ids[0], text + b"x"))
        one.await_published(7)
        ids.append(register(more=["null", "int"]))
        send(wired(ids[1], text + b"\0"), wired(ids[0], text))
        one.await_published(9)
        # Workers do not read records of this schema.
        ids.append(register(tags={"type": "array", "items": "int"}))
        send(wired(ids[2], text + b"\0"), wired(ids[0], text), wired(ids[1], text + b"\0"))
        one.await_published(12)
        assert group.failures == {}
    _exact(one, dead=2)


@pytest.mark.full
def test_a_kept_consumer_reads_the_rest(world: Make, spark: SparkSession) -> None:
    one = world(create=1)
    one.send_now(1, "a", partitions=1)
    broken = 5
    with _running(spark, _jobs(one)):
        one.await_published(1)
        before = _connections(spark, one)
        for i in range(broken):
            one.send([(0, datetime.now(UTC), b"{")])
            one.await_published(i + 2)
        # A consumer for each read would hold one connection at least.
        assert _connections(spark, one) - before < broken
    _exact(one, dead=broken)


def _connections(spark: SparkSession, one: World) -> int:
    """How many connections Spark's JVM has to the broker."""
    pid = spark.sparkContext._jvm.java.lang.ProcessHandle.current().pid()  # type: ignore[union-attr]
    port = int(one.job.environment.kafka.bootstrap_servers.rpartition(":")[2])
    connections = psutil.Process(pid).net_connections("tcp")
    return sum(bool(c.raddr) and c.raddr.port == port for c in connections)
