"""Egress by its command to real S3 and Kafka: every accepted record once at the other end."""

import json
import secrets
from collections.abc import Iterator, Mapping
from contextlib import closing
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from budget import full
from commands import paused_at, run_into
from kafka import TopicPartition
from kafka.partitioner.default import murmur2
from waiting import wait_for
from world import ERASURE, Make, World, event, past_hour, spread

from anabranch import config
from anabranch.common.errors import Refused
from anabranch.common.fail_points import Step
from anabranch.common.output import plain
from anabranch.iceberg.s3 import ObjectStore, open_store
from anabranch.kafka.client import create_topic
from anabranch.kafka.transactions import Outgoing, RecordTooLarge, TransactionalProducer
from anabranch.offsets.hours import start_of
from anabranch.protocol.deliveries import Delivery
from serving_layer import egress as room

BUCKET = "tests"
EIGHT = "import serving_layer.egress as topic; topic.TRANSACTION_ROWS = 8"
"""Python that a process of `egress` runs first: transactions of eight records."""
ONE = "import serving_layer.egress as topic; topic.TRANSACTION_BYTES = 1"
"""The same, of one record each, by their bytes."""


def store_of(one: World) -> ObjectStore:
    return open_store(one.job.environment.s3)


def names(one: World, prefix: str) -> set[str]:
    return {key.rpartition("/")[2] for key, _, _ in store_of(one).list_objects(BUCKET, prefix)}


def exported(one: World, hour: str) -> list[tuple[int, int, str]]:
    """The rows that a reader by `_SUCCESS` reads of an hour's folder, as the manifest says."""
    prefix = f"exports/{one.name}/date={hour[:10]}/hour={hour[11:]}/"
    store = store_of(one)
    manifest: dict[str, Any] = json.loads(store.get(BUCKET, f"{prefix}_manifest.json"))
    assert store.get(BUCKET, f"{prefix}_SUCCESS").decode().strip() == manifest["delivery"]
    files = names(one, prefix) - {"_manifest.json", "_SUCCESS"}
    assert files == {file["name"] for file in manifest["files"]}
    contents = [store.get(BUCKET, prefix + name) for name in sorted(files)]
    tables = [pq.read_table(pa.BufferReader(content)) for content in contents]
    rows = [row for table in tables for row in table.to_pylist()]
    return [(r["kafka_partition"], r["kafka_offset"], r["event_id"]) for r in rows]


def ends_of(one: World, topic: str) -> dict[int, int]:
    described = one.kafka.describe(topic)
    assert described is not None
    return one.kafka.stable_ends(described)


def sent(
    one: World, topic: str, since: Mapping[int, int] | None = None
) -> list[tuple[bytes, bytes | None]]:
    """All records of a topic, or those behind the offsets `since`, as a reader of committed ones is
    given them: in the order of each partition."""
    starts = {p: (since or {}).get(p, 0) for p in ends_of(one, topic)}
    ranges = {p: (starts[p], end) for p, end in ends_of(one, topic).items() if end > starts[p]}
    given = one.kafka.read_records(topic, ranges) if ranges else ()
    return [(r.key, r.value) for _, records in given for r in records]


def newest_values(one: World, topic: str) -> dict[bytes, dict[str, Any]]:
    """Return the value that a compacted topic leaves of each key."""
    newest = dict(sent(one, topic))
    return {key: json.loads(value) for key, value in newest.items() if value is not None}


def expected_values(one: World, *hours: str) -> dict[bytes, dict[str, Any]]:
    """The same of what `main` serves of the hours."""
    rows, id = [r for r in one.rows() if r["ingest_hour"] in hours], one.described.id
    return {f"{id}:{r['kafka_partition']}:{r['kafka_offset']}".encode(): plain(r) for r in rows}


def recorded(one: World, target: str) -> list[str]:
    """The hours that the table of deliveries has of a target, in their order."""
    table = one.lake.load(one.job.stream.egress_table).scan().to_arrow().sort_by("sequence")
    return [row["hour"] for row in table.to_pylist() if row["target"] == target]


def kill(one: World, step: Step, target: str, number: int = 1, first: str = EIGHT) -> None:
    """Kill a delivery to a target when it reaches a step the how many-th time."""
    at = f"{step.label}:{number}"
    run_into(one, at, "egress", one.name, "--target", target, first=first)


def exporting(world: Make) -> tuple[World, str]:
    """A stream with a folder and a topic as targets of its accepted hours, and that topic."""
    one = world()
    root, topic = f"s3://{BUCKET}/exports/{one.name}", f"{one.name}-accepted"
    feed = {"name": "feed", "topic": topic}
    one.reconfigure(egress=[{"name": "export", "root": root}, feed])
    one.topic()
    create_topic(one.job.environment.kafka, topic, 2, {"cleanup.policy": "compact"})
    return one, topic


@pytest.mark.full
def test_hours_restated_between_kills_are_once_at_the_other_end(world: Make) -> None:
    one, topic = exporting(world)
    older, newer = past_hour(2), past_hour(1)
    at = start_of(older) + timedelta(minutes=59)
    long_ago = [(i % 2, at, event(f"late-{i}", at - timedelta(days=9))) for i in range(3)]
    one.send(spread(older, 17, "older") + long_ago + spread(newer, 12, "newer"))
    assert f"created table {one.job.stream.egress_table}" in one.apply()
    one.batch(older)

    # Three transactions. Killed before the second is committed, after it, and after the last one.
    kill(one, Step.EGRESS_SENT, "feed", 2)
    assert len(sent(one, topic)) == 8
    kill(one, Step.EGRESS_COMMITTED, "feed")
    assert len(sent(one, topic)) == 16
    kill(one, Step.EGRESS_DELIVERED, "feed")
    assert recorded(one, "feed") == []
    # A folder that is killed when its manifest names the files. The hazard: no marker shows that it
    # is complete.
    run_into(one, Step.EGRESS_NAMED.label, "egress", one.name)
    assert "_SUCCESS" not in names(one, f"exports/{one.name}/")
    assert len(deliver(one)) == 1
    assert exported(one, older) == one.contents(hour=older)
    assert len(sent(one, topic)) == 20, "no record twice, also for a reader of all"
    assert newest_values(one, topic) == expected_values(one, older)
    assert recorded(one, "feed") == recorded(one, "export") == [older]

    # Restated, three rows are dead letters now; beside it another hour.
    one.batch(newer)
    one.reconfigure(event_time={"column": "event_time", "past": "1 day", "future": "1 hour"})
    one.batch(older, restate=True)
    assert len(one.contents(hour=older)) == 17
    feed = ("egress", one.name, "--target", "feed")
    with paused_at(one, Step.EGRESS_SENT, *feed, first=EIGHT) as sleeper:
        assert [(d.target, d.hour) for d in deliver(one)] == [
            (target, hour) for target in ("export", "feed") for hour in (newer, older)
        ]  # fmt: skip
        sleeper.resume()
        assert sleeper.wait() == 75
        assert "another process has replaced it" in sleeper.log
    for hour in (older, newer):
        assert exported(one, hour) == one.contents(hour=hour)
    values = newest_values(one, topic)
    assert values == expected_values(one, older, newer)
    assert sum(value is None for _, value in sent(one, topic)) == 3
    assert deliver(one) == []

    # Kafka and the table have both forgotten: all is delivered again, and nothing is another.
    with one.admin() as admin:
        admin.delete_groups([f"anabranch.egress.{one.name}.{topic}"])
    one.lake.catalog.drop_table(one.job.stream.egress_table)
    one.apply()
    assert len(deliver(one)) == 4
    assert newest_values(one, topic) == values
    assert exported(one, older) == one.contents(hour=older)


@pytest.mark.parametrize(("first", "rows"), [(EIGHT, 8), full(ONE, 1)], ids=["rows", "bytes"])
def test_an_hour_between_kills_is_once_at_the_other_end(world: Make, first: str, rows: int) -> None:
    """The short form of the test above."""
    one, topic = exporting(world)
    hour = past_hour(1)
    one.begin(spread(hour, 20, "e"))
    one.batch(hour)
    # Killed before the second transaction is committed, and after it.
    kill(one, Step.EGRESS_SENT, "feed", 2, first)
    assert len(sent(one, topic)) == rows
    kill(one, Step.EGRESS_COMMITTED, "feed", first=first)
    assert len(sent(one, topic)) == 2 * rows
    # Killed when the folder's manifest names the files. The hazard: no _SUCCESS says that the
    # folder is whole.
    kill(one, Step.EGRESS_NAMED, "export")
    assert "_SUCCESS" not in names(one, f"exports/{one.name}/")
    assert len(deliver(one)) == 2
    assert exported(one, hour) == one.contents(hour=hour)
    assert len(sent(one, topic)) == 20, "no record twice, also for a reader of all"
    assert newest_values(one, topic) == expected_values(one, hour)
    assert recorded(one, "feed") == recorded(one, "export") == [hour]
    assert deliver(one) == []


def test_a_row_that_the_topic_refuses_is_named_and_delivered_once_it_fits(world: Make) -> None:
    """The hazard: "trying again does not help", without a place, for ever."""
    one = world()
    topic = f"{one.name}-accepted"
    one.reconfigure(egress=[{"name": "feed", "topic": topic}])
    one.topic(1)
    create_topic(one.job.environment.kafka, topic, 2, {"max.message.bytes": "20000"})
    hour = past_hour(1)
    at = start_of(hour)
    small = spread(hour, 200, "small", partitions=1)
    dense = event("dense", at, player="x" * 900_000)
    large = event("large", at, player=secrets.token_hex(50_000))
    one.send([(0, at, dense), *small[:150]])
    one.begin([(0, at, large), *small[150:]])
    one.batch(hour)
    [offset] = [r["kafka_offset"] for r in one.rows() if r["event_id"] == "large"]
    for _ in range(2):
        with pytest.raises(Refused) as error:
            list(room.deliver(one.job, one.job.stream.egress[0]))
        said, limit = str(error.value), "20000 bytes (max.message.bytes, compressed)"
        assert f"to topic {topic}: expected at most {limit}, found a record of 100" in said
        assert f"of partition 0, offset {offset}; the hour counts as not delivered" in said
        assert sent(one, topic) == []
    one.set_topic(topic, **{"max.message.bytes": "200000"})
    assert [d.rows for d in deliver(one)] == [202]
    assert len(sent(one, topic)) == 202
    assert newest_values(one, topic) == expected_values(one, hour)


def test_a_record_that_is_refused_while_others_are_sent_is_named(world: Make) -> None:
    """The hazard: the call that sends a later record fails, with an error that names none."""
    one = world()
    kafka, topic = one.job.environment.kafka, f"{one.name}-accepted"
    create_topic(kafka, topic, 1, {"max.message.bytes": "20000"})
    producer = TransactionalProducer(kafka, topic, 20_000)

    def records() -> Iterator[Outgoing]:
        yield Outgoing(b"k", b"small")
        yield Outgoing(b"k", secrets.token_bytes(100_000))
        has_error = producer._producer._transaction_manager.has_error
        wait_for(has_error, "the broker to refuse the record", 30)
        yield Outgoing(b"k", b"small")

    with closing(producer), pytest.raises(RecordTooLarge) as error:
        producer.send(topic, records(), "position")
    assert error.value.index == 1


def test_a_record_that_is_refused_while_others_wait_is_named(world: Make) -> None:
    """The hazard: waiting records fail with the error of another, and one of them is named."""
    one = world()
    kafka, topic = one.job.environment.kafka, f"{one.name}-accepted"
    create_topic(kafka, topic, 2, {"max.message.bytes": "20000"})
    producer = TransactionalProducer(kafka, topic, 20_000)
    waiting, sent = Outgoing(b"0", b"small"), Outgoing(b"1", secrets.token_bytes(100_000))
    places = [(murmur2(one.key) & 0x7FFFFFFF) % 2 for one in (waiting, sent)]
    assert places[0] != places[1]
    # As while an earlier request of the partition is on its way.
    producer._producer._accumulator.muted.add(TopicPartition(topic, places[0]))
    with closing(producer), pytest.raises(RecordTooLarge) as error:
        producer.send(topic, [waiting, waiting, sent], "position")
    assert error.value.index == 2


def test_erased_records_leave_the_targets_between_kills(world: Make) -> None:
    one, topic = exporting(world)
    one.set_environment(erasure=ERASURE)
    hour = past_hour(1)
    one.begin(spread(hour, 20, "e"))
    one.batch(hour)
    described = one.described

    def erase_player(name: str) -> set[bytes]:
        """Erase a player's records; returns the keys of those."""
        rows = [row for row in one.rows() if row["player"] == name]
        assert one.erase(name).removed.rows == len(rows) == 3
        return {f"{described.id}:{r['kafka_partition']}:{r['kafka_offset']}".encode() for r in rows}

    # Erased in the middle of a delivery: the topic has some of the records by then.
    kill(one, Step.EGRESS_SENT, "feed", 2)
    gone = erase_player("p3")
    assert gone & {key for key, value in sent(one, topic) if value is not None}
    kill(one, Step.EGRESS_NAMED, "export")
    assert len(deliver(one)) == 2
    assert newest_values(one, topic) == expected_values(one, hour)
    assert exported(one, hour) == one.contents(hour=hour)

    # And after it: every place of the hour is sent once more, with null for those of both players.
    gone |= erase_player("p5")
    before = ends_of(one, topic)
    kill(one, Step.EGRESS_NAMED, "export")
    kill(one, Step.EGRESS_SENT, "feed", 2)
    kill(one, Step.EGRESS_COMMITTED, "feed")
    assert sent(one, topic, before) != []
    assert [(d.target, d.hour, d.revision, d.rows) for d in deliver(one)] == [
        ("export", hour, 1, 14), ("feed", hour, 1, 14),
    ]  # fmt: skip
    again = sent(one, topic, before)
    assert len(again) == len(dict(again)) == 20, "no record twice, also for a reader of all"
    assert {key for key, value in again if value is None} == gone
    assert newest_values(one, topic) == expected_values(one, hour)
    assert exported(one, hour) == one.contents(hour=hour)
    assert recorded(one, "feed") == recorded(one, "export") == [hour, hour]
    assert deliver(one) == []


def deliver(one: World) -> list[Delivery]:
    """Deliver what is to be delivered, in this process."""
    done = list(room.egress(one.job, room.targets_of(one.job, None)))
    assert all(isinstance(d, Delivery) for d in done), done
    return [d for d in done if isinstance(d, Delivery)]


def test_one_of_two_writers_of_a_small_file_is_refused(world: Make) -> None:
    """The store's own answer keeps two processes at one folder apart."""
    store = ObjectStore(config.S3.model_validate(world().job.environment.s3.model_dump()))
    store.ensure_bucket(BUCKET)
    key = "exports/one-or-the-other"
    assert store.find(BUCKET, key) is None
    assert store.put_if(BUCKET, key, b"1", "text/plain", None)
    assert not store.put_if(BUCKET, key, b"2", "text/plain", None)
    found = store.find(BUCKET, key)
    assert found is not None
    assert found[0] == b"1"
    assert store.put_if(BUCKET, key, b"3", "text/plain", found[1])
    assert not store.put_if(BUCKET, key, b"4", "text/plain", found[1])
    assert not store.put_if(BUCKET, f"{key}-gone", b"5", "text/plain", found[1])
