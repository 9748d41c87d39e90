"""Kafka as it is: retention, compaction, new partitions, open transactions, false timestamps."""

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from commands import started
from kafka import KafkaProducer
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from waiting import wait_for
from world import SAME, Make, Record, Value, World, event, past_hour, spread

from anabranch.common.errors import PositionError
from anabranch.iceberg import state_properties
from anabranch.kafka.source import read_ranges
from anabranch.offsets.hours import Timeline, end_of, max_hours_at_once, start_of
from anabranch.operations.audit import audit
from anabranch.protocol import ledger
from anabranch.protocol.state import LOST, TIMELINE

# Kafka 4 turns away what is stamped more than an hour ahead; older brokers and other topics do not.
ANY_TIME = {"message.timestamp.after.max.ms": "9223372036854775807"}
# Kafka deletes by the stamps too.
FOR_EVER = {"retention.ms": "-1"}
COMPACT = {
    "cleanup.policy": "compact", "segment.ms": "1000", "min.cleanable.dirty.ratio": "0.01",
    "max.compaction.lag.ms": "1000",
}  # fmt: skip


def now_values(count: int, prefix: str, partitions: int = 1) -> list[Value]:
    at = datetime.now(UTC)
    return [(i % partitions, at, event(f"{prefix}-{i}", at)) for i in range(count)]


def wait_until_compacted(one: World, end: int, records: int) -> None:
    def is_compacted() -> bool:
        kafka, ranges = one.job.environment.kafka, {0: (0, end)}
        return read_ranges(one.spark, kafka, one.name, ranges).count() < records

    wait_for(is_compacted, "the log cleaner to compact", 120, 1)


@pytest.mark.parametrize("choice", ["stop", "continue"])
def test_retention_past_the_position_stops_or_is_a_gap(world: Make, choice: str) -> None:
    one = world(speed={"trigger": "1 second", "lost_offsets": choice}, create=1)
    one.send(now_values(20, "read"))
    one.speed()
    one.send(now_values(30, "more"))
    # The hazard: ten unread records are gone from Kafka.
    one.delete_records({0: 30})
    if choice == "stop":
        gone = r"retention deleted \{0: \[20, 30\]\}.*lost_offsets: continue"
        with pytest.raises(PositionError, match=gone):
            one.speed()
        assert one.contents() == one.acknowledged()[:20]
        return
    one.speed()
    assert one.contents() == [r for r in one.acknowledged() if not 20 <= r[1] < 30]
    [gap] = json.loads(one.state.branch_properties["speed"][LOST])
    assert (gap["class"], gap["ranges"]) == ("retention", {"0": [20, 30]})
    one.speed()
    assert len(json.loads(one.state.branch_properties["speed"][LOST])) == 1


def test_retention_that_overtook_an_hour_refuses_it_or_is_an_allowed_gap(world: Make) -> None:
    one = world(partitions=1)
    one.begin(spread(past_hour(1), 20, "e", partitions=1))
    one.delete_records({0: 5})
    [refused] = one.batch(past_hour(1))
    assert (refused.decision, refused.account.gaps) == ("refused", {"retention": 5})
    assert "found 5 retention" in (refused.reason or "")
    assert one.rows() == []
    one.reconfigure(batch={"grace": "0 seconds", "allow_gaps": ["control", "aborted", "retention"]})
    [accepted] = one.batch(past_hour(1))
    assert (accepted.decision, accepted.account.good, accepted.account.gap) == ("accepted", 15, 5)
    assert one.contents() == one.acknowledged()[5:]


def test_added_partitions_begin_at_their_first_offset(world: Make) -> None:
    one = world(create=1)
    one.send(now_values(20, "one"))
    with started(one, "speed", one.name) as speed:
        speed.until(lambda: len(one.rows()) == 20, "the first rows")
        with one.admin() as admin:
            admin.create_partitions({one.name: 3})
        wait_for(lambda: len(one.described.partitions) == 3, "three partitions")
        one.send(now_values(30, "three", partitions=3))
        speed.until(lambda: len(one.rows()) >= 50, "the rows of the new partitions")
        assert speed.terminate() == 0
    assert one.contents() == one.acknowledged()
    assert one.state.position.offsets == {0: 30, 1: 10, 2: 10}


def test_partitions_added_before_a_seal_are_cut_too(world: Make) -> None:
    one = world(partitions=1)
    one.serve(spread(past_hour(2), 10, "a", partitions=1))
    with one.admin() as admin:
        admin.create_partitions({one.name: 2})
    one.send([(1, t, v) for _, t, v in spread(past_hour(1), 10, "b", partitions=1)])
    one.batch()
    assert one.state.cuts[past_hour(1)].ranges[1] == (0, 10)
    one.speed()
    assert one.contents() == one.acknowledged()


def test_an_open_transaction_delays_its_own_records_and_nothing_else(world: Make) -> None:
    one = world(partitions=2)
    hour = past_hour(1)
    at = start_of(hour) + timedelta(minutes=10)
    servers = one.job.environment.kafka.bootstrap_servers
    open_ = KafkaProducer(
        bootstrap_servers=servers,
        transactional_id=f"{one.name}-open",
        transaction_timeout_ms=600_000,
    )
    open_.init_transactions()
    one.send([(p, at, event(f"before-{p}", at)) for p in (0, 1)])
    open_.begin_transaction()
    millis = int(at.timestamp() * 1000)
    future = open_.send(one.name, event("held", at), partition=0, timestamp_ms=millis)
    open_.flush()
    one.begin([(p, at, event(f"after-{p}", at)) for p in (0, 1)])
    # The hazard: the first partition's log goes on behind a transaction that is still open.
    assert one.ends == {0: 1, 1: 2}
    one.speed()
    one.batch()
    cut = one.state.cuts[hour]
    assert cut.ranges == {0: (0, 1), 1: (0, 2)}
    assert {name for _, _, name in one.contents()} == {"before-0", "before-1", "after-1"}
    open_.commit_transaction()
    message = future.get(timeout=30)
    open_.close()
    one.sent.append(Record(0, message.offset, event("held", at)))
    one.speed()
    assert one.contents() == one.acknowledged()


def test_a_compacted_topic_closes_with_gaps_of_its_class(world: Make) -> None:
    one = world(batch={"grace": "0 seconds", "allow_gaps": ["control", "compacted"]})
    one.compact_soon()
    one.topic(1, **COMPACT)
    hour = past_hour(1)
    # One by one: a segment ends between two batches, and the newest is never compacted.
    for value in spread(hour, 10, "e", partitions=1):
        one.send([value])
    one.apply()
    wait_until_compacted(one, 10, 10)
    [result] = [r for r in one.batch() if r.hour == hour]
    left = result.account.good
    assert (result.decision, result.account.gaps) == ("accepted", {"compacted": 10 - left})
    assert 0 < left < 10
    # The last record of a key is never compacted away.
    assert one.contents()[-1] == one.acknowledged()[-1]
    assert set(one.contents()) <= set(one.acknowledged())


def test_records_that_compaction_takes_after_they_were_served_stay_rows(world: Make) -> None:
    """Served by the speed layer, then gone from the middle of the log: at the first acceptance, a
    restatement, without compaction any more, and where the log begins in the middle of the hour."""
    allowed = ["control", "aborted", "compacted"]
    one, hour = world(batch={"grace": "0 seconds", "allow_gaps": allowed}), past_hour(1)
    one.compact_soon()
    one.topic(1)
    values = spread(hour, 8, "e", partitions=1)
    one.send_transactions(*((i != 3, [value]) for i, value in enumerate(values)))
    one.apply()
    ends = one.use_whole_log(hour)
    # Eight records of one key, each with the control record of its transaction.
    assert ends == {0: 16}
    one.speed()
    served = one.contents()
    assert served == one.acknowledged()
    assert len(served) == 7
    # The topic is compacted only now: the log cleaner must not take records before the speed layer
    # has read them.
    one.set_topic(**COMPACT)
    # A record stamped later ends the segment of the others: the newest one is never compacted.
    later = datetime.now(UTC) + timedelta(minutes=30)
    one.send([(0, later, event("later", datetime.now(UTC)))], key=b"other")
    wait_until_compacted(one, 16, 7)
    [result] = one.batch(hour)
    assert (result.decision, result.reason) == ("accepted", None)
    assert one.contents() == served
    row = ledger.newest(one.job.ledger.history())[hour]
    # The hazard: what Kafka no longer gives would pass for control records, of which it says itself
    # how many there are.
    assert row.sources is not None
    assert row.sources["speed"] == 7 - row.sources["kafka"] > 0
    assert (row.good, row.gap) == (7, 9)
    assert (row.gaps or {})["control"] == 8
    assert row.diff is not None
    assert (row.diff.missing, row.diff.extra, row.diff.changed) == (0, 0, 0)
    assert audit(one.job, (hour, hour), with_kafka=True).agrees
    # A topic is not what it was: its policy says nothing of the log.
    one.set_topic(**{"cleanup.policy": "delete"})
    [again] = one.batch(hour, restate=True, why="its policy was changed")
    assert (again.decision, again.account.good, again.account.gaps) == ("accepted", 7, row.gaps)
    assert one.contents() == served
    one.delete_records({0: 5})
    [again] = one.batch(hour, restate=True, why="its beginning was deleted")
    assert (again.decision, again.account.good, again.account.gap) == ("accepted", 7, 9)
    assert one.contents() == served
    assert audit(one.job, (hour, hour), with_kafka=True).agrees


def test_a_log_append_time_topic_is_cut_by_the_brokers_clock(world: Make) -> None:
    one = world()
    one.topic(1, **{"message.timestamp.type": "LogAppendTime"})
    one.serve(spread(past_hour(5), 20, "e", partitions=1))
    assert one.contents() == one.acknowledged()
    # Whatever the producer's clock said, Kafka received them in the running hour.
    assert {row["ingest_hour"] for row in one.rows()} == {past_hour(0)}


def test_records_out_of_order_are_in_one_hour_of_both(world: Make) -> None:
    one = world(partitions=2)
    boundary = end_of(past_hour(2))
    values: list[Value] = []
    for i in range(60):
        # The records go to and fro across the boundary, two minutes either way.
        at = boundary + timedelta(seconds=(i * 37) % 240 - 120)
        values.append((i % 2, at, event(f"e-{i}", at)))
    one.send(values)
    one.serve(spread(past_hour(1), 10, "later"))
    by_speed = {(r["kafka_partition"], r["kafka_offset"]): r["ingest_hour"] for r in one.rows()}
    one.batch()
    by_batch = {(r["kafka_partition"], r["kafka_offset"]): r["ingest_hour"] for r in one.rows()}
    assert by_batch == by_speed
    assert one.contents() == one.acknowledged()
    cuts = one.state.cuts
    assert cuts[past_hour(2)].ends == cuts[past_hour(1)].starts
    # The hazard: by their own stamps, some records would lie in the other hour.
    of_first = [row for row in one.rows() if row["kafka_partition"] == 0]
    stamped = {row["kafka_offset"]: row["kafka_timestamp"] < boundary for row in of_first}
    assert any(early != (by_batch[0, o] == past_hour(2)) for o, early in stamped.items())
    accepted = [h for h in one.hours() if h["state"] == "accepted"]
    assert len(accepted) == 2
    assert all(h["diff"].items() >= SAME.items() for h in accepted)


@pytest.mark.parametrize(
    "ahead",
    [timedelta(days=1), timedelta(days=-1), timedelta(days=1200)],
    ids=["a day ahead", "a day behind", "2030"],
)
@pytest.mark.parametrize("speed_is_alive", [True, False], ids=["speed alive", "speed down"])
def test_a_wrong_clock_stops_no_hour(world: Make, ahead: timedelta, speed_is_alive: bool) -> None:
    one = world(event_time=None)
    one.topic(1, **ANY_TIME)
    lie = start_of(past_hour(3)) + ahead if ahead < timedelta(0) else datetime.now(UTC) + ahead
    for ago in (3, 2):
        one.send(spread(past_hour(ago), 10, f"h{ago}", partitions=1))
        one.send([(0, lie, event(f"lie-{ago}", lie))])
    one.begin(spread(past_hour(1), 10, "h1", partitions=1))
    if speed_is_alive:
        one.speed()
        assert one.contents() == one.acknowledged()
    results = one.batch()
    assert {r.decision for r in results} == {"accepted"}
    assert one.state.timeline.open == past_hour(0)
    one.speed()
    assert one.contents() == one.acknowledged()


@pytest.mark.parametrize("speed_is_alive", [True, False], ids=["speed first", "batch first"])
def test_a_record_stamped_years_ahead_hides_no_hour(world: Make, speed_is_alive: bool) -> None:
    """The hazard: Kafka's time index answers for every later hour with that record, so all fall
    into one hour, whose bounds of event time make good records dead letters."""
    one = world()
    one.topic(2, **ANY_TIME, **FOR_EVER)
    ahead = datetime(2036, 1, 1, tzinfo=UTC)
    first = start_of(past_hour(6))
    one.send([(0, ahead, event("lie", first))])
    for ago in (6, 5, 4, 3, 2, 1):
        one.send(spread(past_hour(ago), 60, f"h{ago}"))
        one.send([(1, first - timedelta(days=9), event(f"late-{ago}", start_of(past_hour(ago))))])
    answer = one.kafka.first_from(one.described, end_of(past_hour(6)))[0]
    assert answer is not None and answer.offset == 0, "the hazard did not happen"
    one.apply()
    if speed_is_alive:
        one.speed()
    assert {r.decision for r in one.batch()} == {"accepted"}
    one.speed()
    assert one.contents() == one.acknowledged()
    assert one.dead() == []
    rightly = [r for r in one.rows() if r["event_id"].startswith("h")]
    assert {(r["event_id"].split("-")[0], r["ingest_hour"]) for r in rightly} == {
        (f"h{ago}", past_hour(ago)) for ago in (6, 5, 4, 3, 2, 1)
    }


ODD_STAMPS = {
    "micros": 1_790_000_000_000_000,
    "nanos": 1_790_000_000_000_000_000,
    "the last that Spark supports": 9_223_372_036_854_775,
    "the first that Spark does not support": 9_223_372_036_854_776,
    "the last of all": 2**63 - 1,
    "negative": -86_400_000,
    "far negative": -9_223_372_036_854_775,
    "the first of all": -(2**63),
    "seconds": 1_790_000_000,
}


@pytest.mark.parametrize("speed_is_alive", [True, False], ids=["speed first", "batch first"])
def test_any_timestamp_is_served_by_both_layers(world: Make, speed_is_alive: bool) -> None:
    """The hazard: a record at which Spark's Kafka reader throws in every read."""
    gaps = {"allow_gaps": ["control", "aborted"]}
    one = world(batch={"grace": "0 seconds", "lookback_hours": 1, **gaps})
    one.topic(2, **ANY_TIME, **FOR_EVER)
    one.send(spread(past_hour(1), 20, "before"))
    one.send_stamped([(i % 2, stamp, name) for i, (name, stamp) in enumerate(ODD_STAMPS.items())])
    with pytest.raises((PySparkException, Py4JError), match="long overflow"):
        ranges = {0: (10, 15), 1: (10, 14)}
        read_ranges(one.spark, one.job.environment.kafka, one.name, ranges).collect()
    one.begin(spread(past_hour(1), 20, "after"))
    if speed_is_alive:
        one.speed()
        assert one.contents() == one.acknowledged()
    assert {r.decision for r in one.batch()} == {"accepted"}
    one.speed()
    assert one.contents() == one.acknowledged()
    assert one.dead() == []
    timestamps = {r["event_id"]: r["kafka_timestamp"] for r in one.rows()}
    assert timestamps["nanos"] is timestamps["micros"] is timestamps["the first of all"] is None
    assert timestamps["negative"] == datetime(1969, 12, 31, tzinfo=UTC)
    if speed_is_alive:
        [hour] = [h for h in one.hours() if h["state"] == "accepted"]
        assert hour["diff"].items() >= SAME.items()


def test_a_long_past_is_cut_into_all_its_hours_in_commits_of_bounded_size(world: Make) -> None:
    """The hazard: the first hour gets all older records, which its bounds of time refuse."""
    one = world()
    one.topic(1, **FOR_EVER)
    ago = [24 * 40, 24 * 35, 24 * 34, 24 * 33, 24 * 2, 1]
    for hours_ago in ago:
        one.send(spread(past_hour(hours_ago), 5, f"h{hours_ago}", partitions=1))
    one.serve()
    assert one.contents() == one.acknowledged()
    assert {r["ingest_hour"] for r in one.rows()} == {past_hour(hours_ago) for hours_ago in ago}
    table = one.lake.load(one.job.stream.table)
    summaries = [s.summary.additional_properties for s in table.snapshots() if s.summary]
    texts = [state_properties.look_up(table, dict(summary), TIMELINE) for summary in summaries]
    timelines = [text for text in texts if text is not None]
    steps = sorted(len(Timeline.from_json(text).boundaries) for text in timelines)
    assert max(b - a for a, b in pairwise(steps)) <= max_hours_at_once(1) < 24 * 40 <= steps[-1]
    assert {r.decision for r in one.batch()} == {"accepted"}
    assert one.contents("batch") == one.contents() == one.acknowledged()
    assert one.dead() == []
    assert one.state.timeline.open == past_hour(0)


def test_empty_partitions_and_an_idle_topic_cost_nothing_and_stop_nothing(world: Make) -> None:
    one = world(partitions=4)
    one.serve([(2, t, v) for _, t, v in spread(past_hour(2), 10, "e", partitions=1)])
    one.batch()
    heads = one.state.heads
    for _ in range(2):
        one.speed()
        assert one.batch() == []
    assert one.state.heads == heads
    assert one.contents() == one.acknowledged()
    assert Counter(h["state"] for h in one.hours()) == {"accepted": 2, "open": 1}


def test_a_topic_that_does_not_exist_yet_begins_with_its_first_record(world: Make) -> None:
    one = world()
    one.apply()
    one.topic(1)
    one.send(now_values(5, "first"))
    one.speed()
    assert one.contents() == one.acknowledged()
