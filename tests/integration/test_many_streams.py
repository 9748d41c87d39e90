"""Many streams in one batch job: each has its exact rows and its own outcome."""

import json
import logging
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
from budget import budget
from expectations import entry
from world import Make, World, hours_of_now, past_hour, spread

from anabranch.common.errors import ConfigurationError, PositionError, Terminal, Transient
from anabranch.job import Job, open_jobs
from anabranch.offsets.hours import start_of
from anabranch.spark.session import LazySpark
from batch_layer import stream_run
from batch_layer.job import StreamOutcome, run_streams
from batch_layer.rebuild import RebuildRequest
from batch_layer.stream_run import StreamRun

HOURS = [past_hour(3), past_hour(2), past_hour(1)]
hours_of_each_test = hours_of_now(globals(), HOURS=(3, 2, 1))


def send_hours(one: World, *hours: str, rows: int = 12) -> None:
    """In each hour `rows` good records, a duplicate of the first one and a dead letter."""
    for hour in hours:
        good = spread(hour, rows, f"{one.name}-{hour}")
        one.send([*good, good[0], (0, start_of(hour), b"no json")])


def exact(one: World) -> list[str]:
    """The events that Kafka acknowledged, once each, sorted."""
    values = [json.loads(record.value) for record in one.sent if record.value != b"no json"]
    return sorted({value["event_id"] for value in values})


def rebuild(stream: StreamRun) -> None:
    stream.rebuild(None, RebuildRequest())


def run(
    one: World, jobs: list[Job], work: Callable[[StreamRun], None] = rebuild
) -> dict[str, StreamOutcome]:
    spark = LazySpark.of(one.spark)
    return {o.stream: o for o in run_streams(jobs, spark, work, threading.Event(), at_once=2)}


@pytest.mark.full
def test_streams_are_rebuilt_side_by_side_and_each_ends_as_it_would_alone(
    world: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_run, "RETRY_FOR", timedelta(seconds=3))
    caplog.set_level(logging.INFO)
    backlog = world()
    small, refused, gone, away = (world(beside=backlog) for _ in range(4))
    every = {one.name: one for one in (backlog, small, refused, gone, away)}
    refused.expect(entry("expect_column_values_to_be_between", column="level", max_value=5))
    for one in every.values():
        one.topic()
        send_hours(one, *(HOURS if one is backlog else HOURS[-1:]))
        one.apply()
    for one in (refused, gone, away):
        one.speed()
    gone.delete_topic()
    gone.topic()
    (backlog.folder / "streams" / "broken.yaml").write_text("topic: [")
    _, jobs, broken = open_jobs(str(backlog.folder), (), None, True)
    assert set(broken) == {"broken"}
    assert isinstance(broken["broken"], ConfigurationError)
    [cut_off] = [job for job in jobs if job.stream.name == away.name]
    # Its brokers do not answer: what it asks of them fails, and is tried again.
    cut_off.kafka.close()
    nowhere = {"bootstrap_servers": "127.0.0.1:1"}
    cut_off.kafka._kafka = cut_off.kafka._kafka.model_copy(update=nowhere)

    before = backlog.spark.sparkContext._jsc.getPersistentRDDs().size()
    outcomes = run(backlog, jobs)

    def decided(one: World) -> list[tuple[str, str]]:
        return [(r.hour, r.decision) for r in outcomes[one.name].results]

    assert set(outcomes) == set(every)
    assert decided(backlog) == [(hour, "accepted") for hour in HOURS]
    assert decided(small) == [(HOURS[-1], "accepted")]
    assert decided(refused) == [(HOURS[-1], "refused")]
    assert {
        name: o.error for name, o in outcomes.items() if name not in (gone.name, away.name)
    } == dict.fromkeys((backlog.name, small.name, refused.name))
    assert isinstance(outcomes[gone.name].error, PositionError)
    assert isinstance(outcomes[away.name].error, Transient)
    assert "given up after" in str(outcomes[away.name].error)
    # A stream with a backlog does not make another wait for all of it.
    accepted = [r.getMessage() for r in caplog.records if " accepted hour=" in r.getMessage()]
    assert [small.name in line for line in accepted].index(True) < len(accepted) - 1
    for one in (backlog, small):
        assert one.ids() == exact(one)
        assert {h: one.state.served_by(h) for h in HOURS if one.state.is_accepted(h)} == {
            h: "batch" for h, _ in decided(one)
        }
        assert sorted((row["ingest_hour"], row["error_code"]) for row in one.dead("batch")) == [
            (h, "malformed_json") for h, _ in decided(one)
        ]
    for one in (refused, away):
        assert not one.state.accepted
        # What the speed layer published stays served.
        assert sorted(set(one.ids())) == exact(one)
    # Each thread released the records that it had cached.
    assert backlog.spark.sparkContext._jsc.getPersistentRDDs().size() == before


def test_hours_of_many_streams_are_exact_if_one_fails(world: Make) -> None:
    old = world()
    new = world(beside=old)
    # It has neither a topic nor tables.
    missing = world(beside=old)
    for one, hours in ((old, HOURS[:2]), (new, HOURS[1:2])):
        one.topic()
        send_hours(one, *hours)
        one.apply()

    for revision in range(1, budget(1, 2) + 1):
        order = RebuildRequest(revision > 1, why="a test" if revision > 1 else None)

        def work(stream: StreamRun, order: RebuildRequest = order) -> None:
            stream.rebuild(frozenset(HOURS[:2]), order)

        _, jobs, _ = open_jobs(str(old.folder), (missing.name, old.name, new.name), None, False)
        outcomes = run(old, jobs, work)
        assert outcomes[old.name].error is None and outcomes[new.name].error is None
        assert isinstance(outcomes[missing.name].error, Terminal)
        assert "run `anabranch apply`" in str(outcomes[missing.name].error)
        of_old, of_new = (outcomes[one.name].results for one in (old, new))
        assert [(r.decision, r.revision) for r in of_old] == [("accepted", revision)] * 2
        # A stream that begins later has nothing to do for an earlier hour.
        assert [(r.hour, r.decision) for r in of_new] == [
            (HOURS[0], "before the first"), (HOURS[1], "accepted"),
        ]  # fmt: skip
    assert (old.ids(), new.ids()) == (exact(old), exact(new))


@pytest.mark.full
def test_a_signal_ends_all_streams_and_the_next_run_continues(world: Make) -> None:
    one = world()
    other = world(beside=one)
    for stream in (one, other):
        stream.topic()
        send_hours(stream, *HOURS[1:])
        stream.apply()
    stop = threading.Event()

    def work_once(stream: StreamRun) -> None:
        stop.set()
        rebuild(stream)

    _, jobs, _ = open_jobs(str(one.folder), (), None, True)
    stopped = run_streams(jobs, LazySpark.of(one.spark), work_once, stop, at_once=1)
    assert [type(o.error) for o in stopped] == [Transient, Transient]
    assert all("stop requested" in str(o.error) for o in stopped)
    _, jobs, _ = open_jobs(str(one.folder), (), None, True)
    assert {o.error for o in run(one, jobs).values()} == {None}
    assert (one.ids(), other.ids()) == (exact(one), exact(other))
