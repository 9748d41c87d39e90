"""Topics as companies have them, on three brokers: compacted, of a thousand partitions, filled by other
languages' clients, and mirrored to another cluster. Each is exact through both layers."""

from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from cluster_feed import Feed, assert_exact, assert_exact_through_both_layers, middle_of
from commands import call
from confluent_kafka import KafkaError, Message, Producer
from foreign_producers import ANY_HEADER_NAME, CLIENTS, Sent
from kafka import KafkaConsumer, TopicPartition
from kafka_cluster import KafkaCluster
from waiting import wait_for
from world import Make, World, event

from anabranch import config
from anabranch.common.errors import PositionError
from anabranch.kafka.client import create_topic
from anabranch.offsets.position import Ranges

PAST = 1  # hours ago


@pytest.mark.parametrize("partitions", [1, 1000])
def test_topics_of_any_partitions(on_cluster: Make, cluster: KafkaCluster, partitions: int) -> None:
    limits = {"trigger": "1 second", "max_offsets_per_trigger": 100_000}
    one = on_cluster(partitions, speed=limits)
    feed = Feed(cluster, one.name, partitions=partitions)
    feed.send(3000, "past", middle_of(PAST))
    assert_exact_through_both_layers(one, feed)


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
def test_rows_outlive_their_records(on_cluster: Make, cluster: KafkaCluster, policy: str) -> None:
    """Rows, and the dead letters of tombstones; no gap is allowed for, since none is there."""
    never = {"min.compaction.lag.ms": str(7 * 86_400_000), "retention.ms": "-1"}
    one = on_cluster(2, {"cleanup.policy": policy, "segment.ms": "1000", **never})
    feed = Feed(cluster, one.name, partitions=2, keys=10)
    for i in range(4):
        feed.send(50, f"past{i}", middle_of(PAST) + timedelta(minutes=i))
    feed.send(2, "now", datetime.now(UTC))
    one.speed()
    assert_exact(one, feed)
    ends = {p: max(o for q, o, _ in feed.rows if q == p) + 1 for p in (0, 1)}
    assert given(one, {p: (0, end) for p, end in ends.items()}) == feed.acknowledged
    cluster.compact_soon()
    soon = {
        "min.compaction.lag.ms": "0",
        "max.compaction.lag.ms": "1000",
        "min.cleanable.dirty.ratio": "0.01",
    }
    cluster.set_topic(one.name, **soon, **{"delete.retention.ms": "0", "retention.ms": "-1"})
    # The newest segment is never compacted: a later record begins another.
    feed.send(2, "later", datetime.now(UTC) + timedelta(seconds=2))
    wait_for(lambda: given(one, ranges_left(one, ends)) < 60, "the log cleaner to compact", 60, 1)
    if policy == "compact,delete":
        # The cleaner merges segments: one that is old enough may have the newest records too.
        one.speed()
        cluster.set_topic(one.name, **soon, **{"retention.ms": "1000"})
        wait_for(lambda: min(starts(one).values()) > 0, "retention to delete the past", 60, 1)
    assert_exact_through_both_layers(one, feed)


def starts(one: World) -> dict[int, int]:
    return one.kafka.log_starts(one.described)


def ranges_left(one: World, ends: dict[int, int]) -> Ranges:
    begins = starts(one)
    return {p: (begins[p], end) for p, end in ends.items() if begins[p] < end}


def given(one: World, ranges: Ranges) -> int:
    """How many records of the ranges a consumer is given."""
    records = one.kafka.read_records(one.name, ranges) if ranges else ()
    return sum(len(found) for _, found in records)


@pytest.mark.parametrize("client", CLIENTS)
def test_each_languages_records(on_cluster: Make, cluster: KafkaCluster, client: str) -> None:
    """Null keys, keys and headers of any bytes, tombstones; each client with its own codec."""
    one = on_cluster(3)
    at = middle_of(PAST)
    records, names = [], {}
    any_name = b"\xff\xfe\x00id" if client in ANY_HEADER_NAME else "caf\u00e9".encode()
    for i in range(60):
        name = None if i % 10 == 7 else f"{client}-{i}"
        key = [None, b"", b"\x00\xff\xfe", b"k%d" % i][i % 4]
        headers = [
            (),
            ((any_name, b"\xff\x00"), (b"n", b"")),
            ((b"again", b"1"), (b"none", b"\xc3")),
        ][i % 3]
        value = None if name is None else event(name, at, player="\u4e16\u754c" * 50)
        records.append(Sent(i % 3, int(at.timestamp() * 1000) + i, key, value, headers))
        names[i] = name
    places = CLIENTS[client](cluster.super_servers, one.name, records)
    assert len(places) == len(records)
    feed = Feed(cluster, one.name)
    named = list(zip(places, names.values(), strict=True))
    feed.rows = [(*place, name) for place, name in named if name is not None]
    feed.tombstones = [place for place, name in named if name is None]
    assert (len(feed.rows), len(feed.tombstones)) == (54, 6)
    assert_exact_through_both_layers(one, feed)


def test_a_mirrored_topic_of_other_offsets_is_continued(
    on_cluster: Make, cluster: KafkaCluster, kafka: config.Kafka
) -> None:
    """A failover to the tests' single broker, whose copy begins at 0 where the source did not."""
    one = on_cluster(2)
    feed = Feed(cluster, one.name, partitions=2)
    feed.send(60, "deleted", middle_of(3))
    one.speed()
    with cluster.admin() as admin:
        admin.delete_records({TopicPartition(one.name, p): 30 for p in (0, 1)})
    feed.send(100, "past", middle_of(PAST))
    assert_exact_through_both_layers(one, feed)
    position = dict(one.state.position.offsets)
    assert position == {0: 80, 1: 80}
    # Acknowledged and mirrored, and not read from the source any more.
    unread = Feed(cluster, one.name, partitions=2)
    unread.send(40, "unread", middle_of(0))
    create_topic(kafka, one.name, 2)
    offsets = mirror(cluster.super_servers, kafka, one.name)
    assert offsets[0, 80] == (0, 50)
    one.set_environment(kafka={"bootstrap_servers": kafka.bootstrap_servers})
    with pytest.raises(PositionError, match="anabranch adopt"):
        one.speed()
    assert "--from" in call(one, "adopt", one.name, expect=1)
    translated = ",".join(f"{p}={offsets[p, o][1]}" for p, o in position.items())
    call(one, "adopt", one.name, "--from", translated)
    expected = feed.rows + [(*offsets[p, o], name) for p, o, name in unread.rows]
    dead = feed.tombstones + [offsets[p, o] for p, o in unread.tombstones]
    one.speed()
    assert one.contents() == sorted(expected)
    assert one.dead_offsets() == sorted(dead)
    at = datetime.now(UTC)
    [record] = one.send([(0, at, event("behind the failover", at))])
    one.speed()
    assert one.contents() == sorted([*expected, (0, record.offset, "behind the failover")])


def mirror(source: str, target: config.Kafka, topic: str) -> dict[tuple[int, int], tuple[int, int]]:
    """Copy every record that the source has, as MirrorMaker does: all of it stays but the offset.
    Returns by place in the source the place in the target."""
    places: dict[tuple[int, int], tuple[int, int]] = {}
    own = {"auto_offset_reset": "earliest", "group_id": None}
    consumer = KafkaConsumer(bootstrap_servers=source.split(","), **own)
    producer = Producer({"bootstrap.servers": target.bootstrap_servers, "acks": "all"})

    def delivered(error: KafkaError | None, message: Message, partition: int, offset: int) -> None:
        assert error is None, error
        places[partition, offset] = (message.partition() or 0, message.offset() or 0)

    try:
        parts = [TopicPartition(topic, p) for p in consumer.partitions_for_topic(topic)]
        consumer.assign(parts)
        ends = consumer.end_offsets(parts)
        while any(consumer.position(part) < end for part, end in ends.items()):
            for records in consumer.poll(timeout_ms=1000).values():
                for r in records:
                    producer.produce(
                        topic,
                        r.value,
                        r.key,
                        r.partition,
                        timestamp=r.timestamp,
                        headers=list(r.headers),
                        on_delivery=partial(delivered, partition=r.partition, offset=r.offset),
                    )
        assert producer.flush(60) == 0
    finally:
        consumer.close()
    return places
