"""A subject that changes while jobs run: each takes up what its table can, and no process is
restarted."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from commands import call
from pyspark.sql import SparkSession
from running import running_beside
from waiting import wait_for
from wire import encode, wired
from world import World, past_hour

from anabranch.common.errors import ColumnsChanged
from anabranch.job import FollowedJob, StreamFolder, open_job
from anabranch.kafka.client import create_topic, new_producer
from anabranch.offsets.hours import start_of
from anabranch.protocol.apply import require_columns
from anabranch.spark.session import LazySpark
from anabranch.subjects.follow import take_up
from batch_layer.job import run_stream
from batch_layer.rebuild import Rebuilder, RebuildRequest
from batch_layer.stream_run import StreamRun
from speed_layer.group import GroupJob
from speed_layer.job import SpeedRuns

if TYPE_CHECKING:
    from registry import SchemaRegistry

Make = Callable[..., World]

DEADLINE = 300.0
"""In seconds, of a machine that runs other tests too."""
COLOUR = {"name": "colour", "type": ["null", "string"], "default": None}
LEVEL = {"name": "level", "type": "int"}
SIZE = {"name": "size", "type": ["null", "int"], "default": None}


def avro(*fields: dict[str, Any]) -> dict[str, Any]:
    """A schema of its own: equal ones share an id."""
    name = f"E{uuid.uuid4().hex[:12]}"
    return {
        "type": "record",
        "name": name,
        "fields": [{"name": "event_id", "type": "string"}, *fields],
    }


class Topic:
    """A topic with its subject in the registry."""

    def __init__(self, one: World, registry: SchemaRegistry, name: str = "") -> None:
        self.one, self.registry, self.name = one, registry, name or one.name
        self.id, self.schema = 0, dict[str, Any]()

    def register(self, *fields: dict[str, Any]) -> None:
        """A new version of the subject, by which records are sent from now on."""
        self.write_by(*fields)
        self.registry.register(f"{self.name}-value", self.schema)

    def write_by(self, *fields: dict[str, Any]) -> None:
        """Send records by a schema that the registry has, and not yet as a version of the
        subject."""
        self.schema = avro(*fields)
        self.id = self.registry.register(f"{self.name}-next", self.schema)

    def send(self, event_id: str, at: datetime | None = None, **values: Any) -> None:
        value = wired(self.id, encode(self.schema, {"event_id": event_id, **values}))
        stamp = int((at or datetime.now(UTC)).timestamp() * 1000)
        producer = new_producer(self.one.job.environment.kafka)
        producer.send(self.name, value, key=b"k", partition=0, timestamp_ms=stamp)
        producer.flush()
        producer.close()


def rows(one: World, table: str, *columns: str) -> list[tuple[Any, ...]]:
    """The rows of `main`; a column that the table does not have is absent."""
    read = one.lake.load(table).scan().to_arrow().to_pylist()
    return sorted(tuple(row.get(name, "absent") for name in ("event_id", *columns)) for row in read)


def has_columns(one: World, table: str, *names: str) -> bool:
    return set(names) <= set(one.lake.load(table).schema().column_names)


@pytest.fixture
def topic(world: Make, registry: SchemaRegistry) -> Topic:
    """A stream of its subject's columns, with its tables."""
    one = world(registry.url, schema="registry", format="avro", event_time=None, partitions=1)
    made = Topic(one, registry)
    made.register(LEVEL)
    call(one, "apply", one.name)
    one.reopen()
    return made


def test_a_speed_job_takes_up_a_field_and_refuses_what_does_not_fit(topic: Topic) -> None:
    one, table = topic.one, topic.one.job.stream.table
    hour = past_hour(1)
    topic.send("a", start_of(hour) + timedelta(minutes=1), level=1)
    topic.register({"name": "level", "type": "long"}, COLOUR)
    topic.send("b", start_of(hour) + timedelta(minutes=2), level=2, colour={"string": "red"})
    # A job that has not taken up the subject yet: the second record does not fit its columns.
    one.speed()
    assert rows(one, table, "level", "colour") == [("a", 1, "absent")]
    assert [letter["kafka_offset"] for letter in one.dead()] == [1]

    with running_beside(
        SpeedRuns(FollowedJob(one.job), one.spark, False, lambda: None), f"speed-{one.name}"
    ):
        wait_for(
            lambda: has_columns(one, table, "colour"), "the table to have the new column", DEADLINE
        )
        topic.register({"name": "level", "type": "long"}, COLOUR, SIZE)
        wait_for(
            lambda: has_columns(one, table, "size"),
            "the table to have the running job's column",
            DEADLINE,
        )
        topic.send("c", level=2**40, colour={"string": "blue"}, size={"int": 3})
        wait_for(
            lambda: one.published == 3, "a record of the new columns to be published", DEADLINE
        )
        assert ("c", 2**40, "blue", 3) in rows(one, table, "level", "colour", "size")

        topic.register({"name": "level", "type": "string"}, {"name": "more", "type": "int"})
        topic.send("d", level="high", more=1)
        topic.register(COLOUR, {"name": "odd", "type": ["int", "string"]})
        topic.send("e", colour={"string": "green"}, odd={"int": 1})
        wait_for(
            lambda: one.published == 5, "records of the refused versions to be published", DEADLINE
        )
    assert ("e", None, "green") in rows(one, table, "level", "colour")
    _, dead = sorted(one.dead(), key=lambda letter: letter["kafka_offset"])
    assert dead["kafka_offset"] == 3
    assert dead["error_code"] == "incompatible_schema" and dead["error_text"].startswith(
        "schema id"
    )
    assert not has_columns(one, table, "more") and not has_columns(one, table, "odd")
    # What came before the column was there: the batch layer reads it by the columns of now.
    assert [r.decision for r in one.batch(hour)] == ["accepted"]
    accepted = [row for row in rows(one, table, "level", "colour") if row[0] in ("a", "b")]
    assert accepted == [("a", 1, None), ("b", 2, "red")]


@pytest.mark.full
def test_a_new_topic_and_a_new_field_of_its_subject_appear_in_a_running_group(
    world: Make, registry: SchemaRegistry, spark: SparkSession
) -> None:
    one = world(registry.url)
    family: dict[str, Any] = {
        "topics": {"pattern": f"{one.name}-(.*)"}, "table": f"{one.name}_raw.{{1}}",
        "format": "avro", "schema": "registry", "key": "event_id", "group": "small",
        "speed": {"trigger": "1 second"},
    }  # fmt: skip
    (one.folder / "streams" / "fam.yaml").write_text(yaml.safe_dump(family))
    first, late, kafka = (
        Topic(one, registry, f"{one.name}-a"),
        Topic(one, registry, f"{one.name}-b"),
        one.job.environment.kafka,
    )
    create_topic(kafka, first.name, 1, {})
    first.register(LEVEL)
    first.send("a", level=1)
    a, b = f"{one.name}_raw.a", f"{one.name}_raw.b"
    folder = StreamFolder(str(one.folder), group="small", takes_up=True)
    with running_beside(GroupJob(spark, kafka, folder.jobs), "group") as group:
        wait_for(
            lambda: one.lake.exists(a) and rows(one, a, "level") == [("a", 1)],
            "the first topic's row",
            DEADLINE,
        )
        create_topic(kafka, late.name, 1, {})
        # Its producer registers the schema later: until then the stream waits, and no other stream
        # does.
        wait_for(
            lambda: "in the schema registry, found none" in str(group.failures),
            "the new topic to wait",
            DEADLINE,
        )
        first.send("b", level=2)
        wait_for(lambda: len(rows(one, a)) == 2, "the first topic's second row", DEADLINE)
        late.register(COLOUR)
        late.send("c", colour={"string": "red"})
        wait_for(
            lambda: one.lake.exists(b) and rows(one, b, "colour") == [("c", "red")],
            "the new topic's row",
            DEADLINE,
        )
        first.register(LEVEL, COLOUR)
        wait_for(
            lambda: has_columns(one, a, "colour"), "the table to have the new column", DEADLINE
        )
        first.send("d", level=3, colour={"string": "blue"})
        wait_for(
            lambda: ("d", 3, "blue") in rows(one, a, "level", "colour"),
            "a row of the new column",
            DEADLINE,
        )
        assert group.failures == {}
    assert [row[0] for row in rows(one, a)] == ["a", "b", "d"]


@pytest.mark.full
def test_a_batch_job_takes_up_what_its_table_has(topic: Topic, registry: SchemaRegistry) -> None:
    one, table = topic.one, topic.one.job.stream.table
    first, second = past_hour(3), past_hour(2)
    topic.register(LEVEL, COLOUR)
    topic.send("a", start_of(first) + timedelta(minutes=1), level=1, colour={"string": "red"})
    topic.write_by(LEVEL, COLOUR, {"name": "size", "type": ["null", "int"], "default": None})
    topic.send(
        "b", start_of(second) + timedelta(minutes=1), level=1, colour={"string": "blue"},
        size={"int": 7},
    )  # fmt: skip
    stale = open_job(one.name, str(one.folder))
    order, stop = RebuildRequest(), threading.Event()
    outcome = run_stream(
        open_job(one.name, str(one.folder)),
        LazySpark.of(one.spark),
        lambda run: run.rebuild([first], order),
        stop,
    )
    assert outcome.error is None and [r.decision for r in outcome.results] == ["accepted"]
    assert rows(one, table, "colour") == [("a", "red")]

    # The table changes under a job that has read its columns: they are read again before the next
    # hour.
    registry.register(f"{one.name}-value", topic.schema)
    taken = take_up(one.job.environment, one.job.stream.without_columns(), one.lake)
    assert [c.name for c in stale.stream.columns] == ["event_id", "level"]
    with pytest.raises(
        ColumnsChanged, match="nothing is lost: the next attempt uses the table's columns"
    ):
        require_columns(one.lake.load(table), stale.stream)
    require_columns(one.lake.load(table), taken)
    results = StreamRun(stale, Rebuilder(stale, LazySpark.of(one.spark))).rebuild(None, order)
    stale.kafka.close()
    assert not any(r.refused for r in results)
    assert rows(one, table, "colour", "size") == [("a", "red", None), ("b", "blue", 7)]


def test_a_lost_table_comes_back_and_takes_up_the_subject(topic: Topic) -> None:
    one, stream = topic.one, topic.one.job.stream
    topic.register(LEVEL, COLOUR)
    call(one, "apply", one.name)
    one.reopen()
    topic.send("a", level=1, colour={"string": "red"})
    one.speed()
    # The subject's next version lacks a column that the table has.
    topic.register({"name": "level", "type": "long"}, SIZE)
    for name in (stream.table, stream.dead_letters_table, *stream.plain_tables):
        one.lake.catalog.drop_table(name)
    assert f"`anabranch apply {one.name} --register`" in call(one, "apply", one.name, expect=2)
    printed = call(one, "apply", one.name, "--register").splitlines()
    assert printed[0].startswith(f"{one.name}: registered table {stream.table} by ")
    source = f"{one.name}: subject {topic.name}-value version 3"
    assert printed[1:3] == [
        f"{source}: column level of {stream.table} becomes bigint",
        f"{source}: new column size of {stream.table}, int",
    ]
    one.reopen()
    topic.send("b", level=2**40, size={"int": 3})
    one.speed()
    assert rows(one, stream.table, "level", "colour", "size") == [
        ("a", 1, "red", None),
        ("b", 2**40, None, 3),
    ]
