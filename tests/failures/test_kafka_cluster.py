"""Three brokers with three replicas and ACLs move leaders, restart and die, refuse producers, throttle,
lead readers to followers, and wait for a leader that has all records: no row is lost."""

import re
import time
from datetime import UTC, datetime, timedelta

import pytest
from cluster_feed import Feed, assert_exact, assert_exact_through_both_layers, middle_of, progress
from commands import call, run, started
from confluent_kafka import KafkaError, Producer
from kafka import KafkaConsumer
from kafka_cluster import KafkaCluster, rack
from running import lines, speed_running
from waiting import wait_for
from world import Make, World, past_hour

from anabranch.common.errors import Transient
from anabranch.kafka.batches import CODES, PRESENT
from anabranch.kafka.security import kafka_python_settings
from batch_layer import stream_run

PAST, BEFORE = 1, 2  # hours ago

NO_LEADER = re.compile("it has no leader: no replica that has all records is there")
LOST_END = "Kafka lost published records: {'0': [100, 150]}"


@pytest.mark.timeout(1500)
def test_brokers_that_move_or_die_cost_no_row(on_cluster: Make, cluster: KafkaCluster) -> None:
    """Rolling restarts, killed leaders, a broker lost for good; hours are rebuilt meanwhile."""
    # A micro-batch may take half a minute on a busy machine, and must not fall behind the feed.
    one = on_cluster(speed={"trigger": "1 second", "max_offsets_per_trigger": 20_000})
    before, past = past_hour(BEFORE), past_hour(PAST)
    feed = Feed(cluster, one.name, rate=30)
    feed.send(400, "before", middle_of(BEFORE))
    feed.send(400, "past", middle_of(PAST))
    seen = [cluster.leaders(one.name)]
    with started(one, "speed", one.name) as speed, feed:
        progress(one, feed, speed)
        # A rolling restart: each node's leaders move, and move back.
        with started(one, "batch", one.name, "--hour", before) as batch:
            for node in cluster.ports:
                cluster.stop(node)
                seen.append(cluster.leaders(one.name))
                cluster.start(node)
                cluster.await_in_sync(one.name, 3)
            assert batch.wait(900) == 0, batch.log[-4000:]
        progress(one, feed, speed)
        # Leaders that die without a word.
        for _ in range(2):
            leader = cluster.leaders(one.name)[0]
            cluster.kill(leader)
            progress(one, feed, speed)
            seen.append(cluster.leaders(one.name))
            cluster.start(leader)
            cluster.await_in_sync(one.name, 3)
        # One of three is gone for good; two replicas in sync are enough to produce.
        with started(one, "batch", one.name, "--hour", past) as batch:
            cluster.lose(cluster.leaders(one.name)[1])
            cluster.await_in_sync(one.name, 2)
            assert batch.wait(900) == 0, batch.log[-4000:]
        seen.append(cluster.leaders(one.name))
        progress(one, feed, speed)
    assert len({*map(tuple, seen)}) >= 4, f"the hazard did not happen: leaders stayed {seen}"
    run(one, "speed", one.name, "--available-now")
    assert_exact(one, feed)
    run(one, "audit", one.name)


def test_too_few_replicas_stop_no_job(on_cluster: Make, cluster: KafkaCluster) -> None:
    """Without `min.insync.replicas` nothing is acknowledged by all; what the leader alone
    acknowledged comes with the replicas. Other hours are accepted meanwhile; of a leader that was
    elected then nothing can be read, and the error says for what it waits."""
    one = on_cluster(configs={"min.insync.replicas": "3"}, replicas=(1, 2, 3))
    other = on_cluster(1, configs={"min.insync.replicas": "3"}, replicas=(1, 2, 3))
    of_other = Feed(cluster, other.name, partitions=1, acks="1")
    of_other.send(100, "past", middle_of(PAST))
    feed = Feed(cluster, one.name)
    leader_alone = Feed(cluster, one.name, acks="1")
    feed.send(300, "before", middle_of(BEFORE))
    # Brokers create the topic of groups' offsets at the first question.
    one.kafka.check_commits(f"anabranch-{one.name}")
    with started(one, "speed", one.name) as speed:
        progress(one, feed, speed)
        # No process joins a consumer group; the speed layer commits offsets for lag monitors alone.
        own = [(f"anabranch-{one.name}", "EMPTY")]
        wait_for(lambda: groups(cluster, one.name) == own, f"the groups to be {own}", 60, 1)
        cluster.stop(3)
        cluster.await_in_sync(one.name, 2)
        assert refusal(cluster, one.name) == KafkaError.NOT_ENOUGH_REPLICAS
        of_other.send(50, "leader", middle_of(PAST))
        cluster.lead_by(other.name, 2, 1, 3)
        topic = other.kafka.describe(other.name)
        assert topic is not None
        too_few = r"too few of its replicas are in sync.*min\.insync\.replicas"
        with pytest.raises(Transient, match=too_few):
            other.kafka.stable_ends(topic)
        leader_alone.send(50, "leader", middle_of(PAST))
        progress(one, feed, speed)
        assert [r.decision for r in one.batch(past_hour(BEFORE))] == ["accepted"]
        assert speed.code is None, speed.log[-3000:]
        cluster.start(3)
        cluster.await_in_sync(one.name, 3)
        feed.send(50, "after", middle_of(PAST))
        feed.add(leader_alone)
        progress(one, feed, speed)
        assert speed.terminate() == 0
    assert_exact_through_both_layers(one, feed)
    other.speed()
    assert_exact(other, of_other)


def groups(cluster: KafkaCluster, topic: str) -> list[tuple[str, str]]:
    """The consumer groups that may be of a stream, those that Spark names too; their states."""
    with cluster.admin() as admin:
        found = [(g["group_id"], str(g["group_state"]).upper()) for g in admin.list_groups()]
    return [(name, state) for name, state in found if topic in name or "spark" in name]


def refusal(cluster: KafkaCluster, topic: str) -> int | None:
    """The code with which brokers refuse a record for all replicas; None when they take it."""
    settings = {"acks": "all", "retries": 0, "message.timeout.ms": 20_000}
    refused: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": cluster.super_servers, **settings})
    producer.produce(topic, b"refused", partition=0, on_delivery=lambda e, _: refused.append(e))
    assert producer.flush(30) == 0
    [error] = refused
    return None if error is None else error.code()


def test_a_throttled_reader_waits_and_is_exact(on_cluster: Make, cluster: KafkaCluster) -> None:
    """A quota of a twentieth of what is to be read: answers ten seconds late, no time-out."""
    one = on_cluster(replicas=(1, 2, 3))
    feed = Feed(cluster, one.name, size=1000)
    feed.send(400, "past", middle_of(PAST))
    with cluster.quota("consumer_byte_rate", 20_000):
        with started(one, "speed", one.name, "--available-now") as speed:
            assert speed.wait() == 0, speed.log[-3000:]
        assert throttled_seconds(one) > 1, "the hazard did not happen"
        with started(one, "batch", one.name) as batch:
            assert batch.wait() == 0, batch.log[-3000:]
        for command in (speed, batch):
            assert "transient, try again" not in command.log and "unknown cause" not in command.log
        assert_exact(one, feed)
        call(one, "audit", one.name)


def throttled_seconds(one: World) -> float:
    """For how long the brokers throttle a consumer of the stream's user that reads the topic."""
    settings = kafka_python_settings(one.job.environment.kafka)
    consumer = KafkaConsumer(one.name, **settings, auto_offset_reset="earliest", group_id=None)
    longest, deadline = 0.0, time.monotonic() + 30
    while longest == 0 and time.monotonic() < deadline:
        consumer.poll(timeout_ms=1000)
        throttled = [of.get("throttle-time-max", 0.0) for of in consumer.metrics().values()]
        longest = max([0.0, *(value for value in throttled if value == value)])
    consumer.close()
    return longest / 1000


def test_records_are_read_from_the_rack(on_cluster: Make, cluster: KafkaCluster) -> None:
    """`kafka.client_rack`: the follower is read, and the leader when the follower goes."""
    one = on_cluster(replicas=(1, 2, 3), kafka={"client_rack": rack(3)})
    feed = Feed(cluster, one.name, size=1000)
    feed.send(2000, "past", middle_of(PAST))
    before = {node: cluster.sent_bytes(node) for node in (1, 3)}
    assert_exact_through_both_layers(one, feed)
    sent = {node: cluster.sent_bytes(node) - before[node] for node in before}
    is_read = sent[3] > 4_000_000 and sent[1] < 1_000_000
    assert is_read, f"expected node 3 to be read, found bytes sent: {sent}"
    # The leader lets a record be read before the follower hears of that.
    topic = one.kafka.describe(one.name)
    assert topic is not None
    for at in range(20):
        feed.send(30, f"late-{at}", middle_of(PAST))
        for p, end in one.kafka.stable_ends(topic).items():
            assert one.kafka.classify(one.name, p, end - 1, end) == [CODES[PRESENT]]
    with started(one, "speed", one.name) as speed, feed:
        progress(one, feed, speed)
        cluster.kill(3)
        progress(one, feed, speed)
        cluster.start(3)
        cluster.await_in_sync(one.name, 3)
        progress(one, feed, speed)
    one.speed()
    assert_exact(one, feed)


@pytest.mark.timeout(1500)
def test_without_a_clean_leader_a_partition_waits_and_no_record_is_lost(
    on_cluster: Make,
    cluster: KafkaCluster,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leader dies with records that its follower lacks: no leader by default, both jobs wait."""
    monkeypatch.setattr(stream_run, "RETRY_FOR", timedelta(seconds=3))
    one = on_cluster(1, {"min.insync.replicas": "1"}, replicas=(1, 2), batch={"grace": "0 seconds"})
    feed = Feed(cluster, one.name, partitions=1)
    feed.send(100, "kept", middle_of(PAST))
    with speed_running(one):
        publish(one, feed)
        lose_the_end(cluster, one, feed)
        wait_for(lambda: cluster.leaders(one.name) == [-1], "a partition without leader", 90, 0.3)
        wait_for(lambda: bool(lines(caplog, NO_LEADER)), "the job to name what it waits for", 400)
    with pytest.raises(Transient, match=NO_LEADER):
        one.batch()
    cluster.start(1)
    cluster.await_in_sync(one.name, 2)
    feed.send(20, "later", datetime.now(UTC))
    assert_exact_through_both_layers(one, feed)


@pytest.mark.timeout(1500)
def test_after_an_unclean_election_adopt_continues(on_cluster: Make, cluster: KafkaCluster) -> None:
    """A follower that lacks 50 published records leads, and new records get their offsets."""
    hour = past_hour(PAST)
    configs = {"min.insync.replicas": "1", "unclean.leader.election.enable": "true"}
    one = on_cluster(1, configs, replicas=(1, 2), batch={"grace": "0 seconds"})
    feed = Feed(cluster, one.name, partitions=1)
    feed.send(100, "kept", middle_of(PAST))
    cluster.stop(2)
    cluster.await_in_sync(one.name, 1)
    feed.send(50, "lost", middle_of(PAST))
    with started(one, "speed", one.name) as speed:
        progress(one, feed, speed)
        cluster.kill(1)
        cluster.start(2)
        wait_for(lambda: cluster.leaders(one.name) == [2], "node 2 to be elected", 400, 0.3)
        assert speed.wait(400) == 1 and LOST_END in speed.log, speed.log[-3000:]
    with started(one, "batch", one.name) as batch:
        assert batch.wait(400) == 1 and LOST_END in batch.log, batch.log[-3000:]
    cluster.start(1)
    cluster.await_in_sync(one.name, 2)
    call(one, "adopt", one.name)
    # The sequence numbers of the first producer's records are lost too.
    later = Feed(cluster, one.name, partitions=1)
    later.send(20, "later", datetime.now(UTC))
    feed.add(later)
    one.speed()
    assert_exact(one, feed)
    # Kafka's records at these offsets are others, so the hour stays with the speed layer.
    [refused] = [result for result in one.batch() if result.hour == hour]
    assert refused.decision == "refused", refused
    assert str(refused.reason).startswith("Kafka no longer has it"), refused
    assert_exact(one, feed)
    call(one, "audit", one.name)


def publish(one: World, feed: Feed) -> None:
    wait_for(lambda: one.published >= feed.acknowledged, "all offsets to be published", 400, 0.3)


def lose_the_end(cluster: KafkaCluster, one: World, feed: Feed) -> None:
    """Have node 1 acknowledge and publish 50 records that node 2 lacks; let node 2 lead."""
    cluster.stop(2)
    cluster.await_in_sync(one.name, 1)
    feed.send(50, "lost", middle_of(PAST))
    publish(one, feed)
    cluster.kill(1)
    cluster.start(2)
