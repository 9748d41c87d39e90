"""A family on real services: new topics, tables that `apply` creates, a deleted topic."""

from datetime import UTC, datetime

from commands import call, shown
from pyspark.sql import SparkSession
from running import running_beside
from waiting import wait_for
from world import SCHEMA, Make, World, event

from anabranch.config import Kafka
from anabranch.job import StreamFolder
from anabranch.kafka.client import create_topic, new_producer
from speed_layer.group import GroupJob


def _streams(one: World) -> dict[str, tuple[str, str | None, str]]:
    """Return topic, table and state of family `fam` by stream, as `anabranch status --list` lists them."""
    return {
        s["stream"]: (s["topic"], s["table"], s["state"])
        for s in shown(one, "status", "--list")
        if s["family"] == "fam"
    }


def test_a_familys_topics_become_streams_and_none_is_dropped(world: Make) -> None:
    one = world()
    topics = {"pattern": f"{one.name}-([a-z.]+)", "exclude": ".*[.]dlq"}
    one.write_family(topics=topics, schema=SCHEMA)
    kafka = one.job.environment.kafka
    for end in ("orders", "user.events", "orders.dlq"):
        create_topic(kafka, f"{one.name}-{end}", 1, {})
    table = f"{one.name}_raw"
    orders, events = f"{one.name}-orders", f"{one.name}-user.events"
    assert _streams(one) == {
        "fam_orders": (orders, f"{table}.orders", "new"),
        "fam_user_events": (events, f"{table}.user_events", "new"),
    }

    printed = call(one, "apply", "--group", "small")
    [first, second, third, *done] = printed.splitlines()
    assert first == "families: 2 new of 2 streams"
    assert second == f"family fam: topic {orders}: stream fam_orders, table {table}.orders"
    assert third.startswith(f"family fam: topic {events}: ")
    assert f"fam_orders: created table {table}.orders" in done
    assert f"fam_user_events: created table {table}.user_events" in done
    assert shown(one, "status", "fam_orders")["topic"] == orders

    with one.admin() as admin:
        admin.delete_topics([events])
        wait_for(lambda: events not in admin.list_topics(), "the topic is deleted", 120)
    states = {name: state for name, (_, _, state) in _streams(one).items()}
    assert states == {"fam_orders": "ready", "fam_user_events": "gone"}
    assert call(one, "apply", "fam_user_events").endswith("fam_user_events: nothing to change\n")
    assert "stream 'fam_other'" in call(one, "status", "fam_other", expect=2)


def test_a_topic_becomes_a_groups_stream(world: Make, spark: SparkSession) -> None:
    one = world()
    one.write_family(schema=SCHEMA, speed={"trigger": "1 second"})
    one.configure(group="small")
    one.create()
    folder = StreamFolder(str(one.folder), group="small")
    assert list(folder.jobs()) == [one.name]
    with running_beside(GroupJob(spark, one.job.environment.kafka, folder.jobs), "group") as group:
        one.send_now(10, "a")
        one.await_published(10)
        new = f"{one.name}-new"
        create_topic(one.job.environment.kafka, new, 1, {})
        send(one.job.environment.kafka, new, [event(f"b-{i}", datetime.now(UTC)) for i in range(7)])
        table = f"{one.name}_raw.new"
        wait_for(lambda: one.lake.exists(table), "the new topic's table to be created", 60)
        wait_for(lambda: rows(one, table) == list(range(7)), "its records to be published", 60)
        one.send_now(10, "c")
        one.await_published(20)
        assert group.failures == {}


def rows(one: World, table: str) -> list[int]:
    """The offsets of a table's rows."""
    return sorted(one.lake.load(table).scan().to_arrow()["kafka_offset"].to_pylist())


def send(kafka: Kafka, topic: str, values: list[bytes]) -> None:
    producer = new_producer(kafka)
    for value in values:
        producer.send(topic, value, key=b"k")
    producer.flush()
    producer.close()
