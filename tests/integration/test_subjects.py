"""Columns from a subject of the real registry: what `apply` does and refuses; and a subject that changes
while jobs run: each takes up what its table can, and no process is restarted."""

from __future__ import annotations

import json
import threading
import uuid
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
from commands import call, shown
from pyspark.sql import SparkSession
from running import running_beside
from waiting import wait_for
from wire import encode, wired
from world import Make, World, past_hour

from anabranch.common.errors import ColumnsChanged
from anabranch.job import FollowedJob, StreamFolder, open_job
from anabranch.kafka.client import create_topic, new_producer
from anabranch.offsets.hours import start_of
from anabranch.protocol.apply import require_columns
from anabranch.spark.session import LazySpark
from anabranch.subjects.follow import take_up
from anabranch.subjects.plan import table_columns
from batch_layer.job import run_stream
from batch_layer.rebuild import Rebuilder, RebuildRequest
from batch_layer.stream_run import StreamRun
from speed_layer.group import GroupJob
from speed_layer.job import SpeedRuns

if TYPE_CHECKING:
    from registry import SchemaRegistry


DEADLINE = 300.0
"""In seconds, of a machine that runs other tests too."""
ID = {"name": "event_id", "type": "string"}
COLOUR = {"name": "colour", "type": ["null", "string"], "default": None}
LEVEL = {"name": "level", "type": "int"}
SIZE = {"name": "size", "type": ["null", "int"], "default": None}


def avro(*fields: dict[str, Any]) -> dict[str, Any]:
    """A schema of its own: equal ones share an id."""
    return {"type": "record", "name": f"E{uuid.uuid4().hex[:12]}", "fields": [ID, *fields]}


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
        """Send records by a schema that is not yet a version of the subject."""
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


def await_columns(one: World, table: str, *names: str) -> None:
    wait_for(lambda: has_columns(one, table, *names), f"{table} to have {names}", DEADLINE)


def await_row(one: World, table: str, row: tuple[Any, ...], *columns: str) -> None:
    """Wait until a table exists and has a row with its event id and these columns."""
    wait_for(
        lambda: one.lake.exists(table) and row in rows(one, table, *columns), str(row), DEADLINE
    )


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

    runs = SpeedRuns(FollowedJob(one.job), one.spark, False, lambda: None)
    with running_beside(runs, f"speed-{one.name}"):
        await_columns(one, table, "colour")
        topic.register({"name": "level", "type": "long"}, COLOUR, SIZE)
        await_columns(one, table, "size")
        topic.send("c", level=2**40, colour={"string": "blue"}, size={"int": 3})
        one.await_published(3, DEADLINE)
        assert ("c", 2**40, "blue", 3) in rows(one, table, "level", "colour", "size")

        topic.register({"name": "level", "type": "string"}, {"name": "more", "type": "int"})
        topic.send("d", level="high", more=1)
        topic.register(COLOUR, {"name": "odd", "type": "null"})
        topic.send("e", colour={"string": "green"}, odd=None)
        one.await_published(5, DEADLINE)
    assert ("e", None, "green") in rows(one, table, "level", "colour")
    _, dead = one.dead()
    assert dead["kafka_offset"] == 3
    assert dead["error_code"] == "incompatible_schema"
    assert dead["error_text"].startswith("schema id")
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
    one.write_family(format="avro", schema="registry", speed={"trigger": "1 second"})
    first, late = (Topic(one, registry, f"{one.name}-{end}") for end in "ab")
    kafka = one.job.environment.kafka
    create_topic(kafka, first.name, 1, {})
    first.register(LEVEL)
    first.send("a", level=1)
    a, b = f"{one.name}_raw.a", f"{one.name}_raw.b"
    folder = StreamFolder(str(one.folder), group="small", takes_up=True)
    with running_beside(GroupJob(spark, kafka, folder.jobs), "group") as group:
        await_row(one, a, ("a", 1), "level")
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
        await_row(one, b, ("c", "red"), "colour")
        first.register(LEVEL, COLOUR)
        await_columns(one, a, "colour")
        first.send("d", level=3, colour={"string": "blue"})
        await_row(one, a, ("d", 3, "blue"), "level", "colour")
        assert group.failures == {}
    assert [row[0] for row in rows(one, a)] == ["a", "b", "d"]


@pytest.mark.full
def test_a_batch_job_takes_up_what_its_table_has(topic: Topic, registry: SchemaRegistry) -> None:
    one, table = topic.one, topic.one.job.stream.table
    first, second = past_hour(3), past_hour(2)
    topic.register(LEVEL, COLOUR)
    topic.send("a", start_of(first) + timedelta(minutes=1), level=1, colour={"string": "red"})
    topic.write_by(LEVEL, COLOUR, SIZE)
    values = {"colour": {"string": "blue"}, "size": {"int": 7}}
    topic.send("b", start_of(second) + timedelta(minutes=1), level=1, **values)
    stale = open_job(one.name, str(one.folder))
    order, spark = RebuildRequest(), LazySpark.of(one.spark)
    job = open_job(one.name, str(one.folder))
    outcome = run_stream(job, spark, lambda run: run.rebuild([first], order), threading.Event())
    assert outcome.error is None and [r.decision for r in outcome.results] == ["accepted"]
    assert rows(one, table, "colour") == [("a", "red")]

    # The table changes under a job that has read its columns: they are read again before the next
    # hour.
    registry.register(f"{one.name}-value", topic.schema)
    taken = take_up(one.job.environment, one.job.stream.without_columns(), one.lake)
    assert [c.name for c in stale.stream.columns] == ["event_id", "level"]
    again = "nothing is lost: the next attempt uses the table's columns"
    with pytest.raises(ColumnsChanged, match=again):
        require_columns(one.lake.load(table), stale.stream)
    require_columns(one.lake.load(table), taken)
    results = StreamRun(stale, Rebuilder(stale, spark)).rebuild(None, order)
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


def columns(one: World, table: str) -> dict[str, str]:
    """The columns of a table, without those of where a row came from."""
    own = table_columns(one.lake.load(table).schema())
    return {c.name: c.type if c.nullable else f"{c.type} NOT NULL" for c in own}


def test_apply_takes_up_what_a_subject_adds(world: Make, registry: SchemaRegistry) -> None:
    one = world(registry.url, schema="registry", format="avro", event_time=None, partitions=1)
    table, subject = f"{one.name}.events", f"{one.name}-value"
    missing = call(one, "apply", one.name, expect=75)
    assert f"expected subject {subject} in the schema registry, found none" in missing
    assert not one.lake.exists(table)

    registry.register(
        subject, avro({"name": "level", "type": "int"}, {"name": "old", "type": "string"})
    )
    printed = call(one, "apply", one.name).splitlines()
    of = f"{one.name}: subject {subject} version"
    first = "event_id STRING NOT NULL, level INT, old STRING"
    assert printed[0] == f"{of} 1: new table {table} with {first}"
    assert f"{one.name}: created table {table}" in printed
    assert columns(one, table) == {"event_id": "string NOT NULL", "level": "int", "old": "string"}

    micros = {"type": "long", "logicalType": "timestamp-micros"}
    at = {"name": "at", "type": ["null", micros], "default": None}
    registry.register(subject, avro({"name": "level", "type": "long"}, at))
    assert call(one, "apply", one.name).splitlines() == [
        f"{of} 2: column level of {table} becomes bigint",
        f"{of} 2: new column at of {table}, timestamp",
        f"{one.name}: widened column level of {table} from int to bigint",
        f"{one.name}: added column at to {table}",
    ]
    taken_up = {
        "event_id": "string NOT NULL", "level": "bigint", "old": "string", "at": "timestamp",
    }  # fmt: skip
    assert columns(one, table) == taken_up
    assert call(one, "apply", one.name) == f"{one.name}: nothing to change\n"

    registry.register(
        subject, avro({"name": "level", "type": "string"}, {"name": "more", "type": "int"})
    )
    refused = call(one, "apply", one.name, expect=1)
    level = f"stream {one.name} (subject {subject}), column level"
    assert f"{level}: expected bigint, found string" in refused
    following = {"name": "next", "type": ["null", "node"], "default": None}
    node = {"type": "record", "name": "node", "fields": [following]}
    registry.register(subject, avro({"name": "odd", "type": node}))
    refused = call(one, "apply", one.name, expect=1)
    assert "version 4: expected an Avro schema" in refused
    assert "contains itself, found node" in refused
    assert columns(one, table) == taken_up

    registry.register(subject, avro({"name": "odd", "type": ["int", "string"]}))
    union = "struct<member_int:int,member_string:string>"
    assert f"{of} 5: new column odd of {table}, {union}" in call(one, "apply", one.name)
    assert columns(one, table) == taken_up | {"odd": union}


def test_each_topic_of_a_family_has_its_columns(world: Make, registry: SchemaRegistry) -> None:
    one = world(registry.url)
    schema = {"columns": "at TIMESTAMP NOT NULL"}
    one.write_family(format="json_schema", schema=schema, event_time={"column": "at"})
    for end, fields in (
        ("a", {"n": {"type": "integer"}}),
        ("b", {"tags": {"type": "array", "items": {"enum": ["x"]}}}),
    ):
        create_topic(one.job.environment.kafka, f"{one.name}-{end}", 1, {})
        properties = {"event_id": {"type": "string"}, "at": {"type": "string"}, **fields}
        subject = {"type": "object", "properties": properties}
        registry.register(f"{one.name}-{end}-value", json.dumps(subject), kind="JSON")
    call(one, "apply", "--group", "small")
    ours = {"event_id": "string NOT NULL", "at": "timestamp NOT NULL"}
    assert columns(one, f"{one.name}_raw.a") == ours | {"n": "bigint"}
    assert columns(one, f"{one.name}_raw.b") == ours | {"tags": "array<string>"}
    [a, b] = shown(one, "status", "--group", "small")
    assert (a["topic"], b["topic"]) == (f"{one.name}-a", f"{one.name}-b")
