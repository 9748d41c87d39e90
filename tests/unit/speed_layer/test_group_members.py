"""A group's streams with real tables, without Spark: one fails, stops or waits."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from brokers import Broker
from lakes import StreamLake, new_lake
from pyspark.sql import SparkSession
from waiting import wait_for

from anabranch import config, offsets
from anabranch.common.errors import AnabranchError, ConfigurationError, MissingRight, Transient
from anabranch.common.health import PATIENCE
from anabranch.job import Job
from anabranch.offsets.position import Position, Ranges, Topic
from speed_layer import starting
from speed_layer.group import GroupJob, Member, Work, _Turns
from speed_layer.plan import Waiting


class Session:
    """The settings of a Spark session, and no Spark."""

    def __init__(self) -> None:
        self.conf = self
        self.sparkContext = self
        self.master = "local[2]"

    def newSession(self) -> Session:
        return self

    def set(self, key: str, value: str) -> None:
        pass


SPARK = cast(SparkSession, Session())
SLOW = config.Speed(trigger=timedelta(seconds=30))


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    hour = offsets.hours.hour_of(datetime.now(UTC))
    return new_lake(tmp_path, timeline=offsets.hours.Timeline(hour, hour, {0: 0}))


@pytest.fixture
def members() -> Iterator[list[Member]]:
    """Members to stop at the end."""
    made: list[Member] = []
    yield made
    for one in made:
        one.stop()
    for one in made:
        if one._thread.ident is not None:
            one.join(60)


Make = Callable[..., Member]


@pytest.fixture
def member(lake: StreamLake, members: list[Member]) -> Make:
    """A stream of the group; `is_started` with its thread, which has started from the table."""

    def make(is_started: bool = True, **values: Any) -> Member:
        stream = lake.stream.model_copy(update=values)
        now = int(datetime.now(UTC).timestamp() * 1000)
        job = Job(lake.environment, stream, lake.again(), Broker(log={0: [now] * 9}).adapter)
        one = Member(job, SPARK, _Turns(8, 1.0), available_now=False)
        if is_started:
            members.append(one)
            one.start()
            wait_for(lambda: one.is_ready, "the stream to start")
        else:
            one._continue_from(one.batches.decide({0: (0, 0)}))
        return one

    return make


def group_of(**members: Member) -> GroupJob:
    group = GroupJob(SPARK, next(iter(members.values())).job.environment.kafka, dict)
    group._members = dict(members)
    return group


def handed(one: Member) -> Work:
    """The work that waits for a stream whose thread is not started."""
    work = one._inbox.get_nowait()
    assert work is not None and one._inbox.empty()
    return work


RANGES: Ranges = {0: (0, 5)}


@pytest.mark.parametrize(
    ("failure", "free"), [(None, 7), (ConfigurationError("topic events: gone"), 8)]
)
def test_a_stream_that_was_set_aside_takes_no_turn_to_start(
    member: Make, monkeypatch: pytest.MonkeyPatch, failure: AnabranchError | None, free: int
) -> None:
    one = member(is_started=False)
    one.failure = failure

    def start() -> None:
        # Confirming that a topic is gone takes seconds.
        raise ConfigurationError(f"free turns: {one._turns._free._value}")

    monkeypatch.setattr(one._start, "run", start)
    with pytest.raises(ConfigurationError, match=f"free turns: {free}"):
        one._try()


def test_a_decision_is_made_only_where_the_last_ends(lake: StreamLake, member: Make) -> None:
    # Only Iceberg's own writer knows the property, so Spark writes the rows.
    with lake.lake.load(lake.stream.table).transaction() as change:
        change.set_properties({"write.parquet.compression-level": "3"})
    one = member(is_started=False)
    group = group_of(events=one)
    group._publish({"events": Waiting(RANGES, True)}, 2.0)
    work = handed(one)
    assert (work.ranges, work.only_decide, work.prepared) == (RANGES, False, None)
    decided = one.batches._decided
    assert decided is not None
    one.batches._decided = dataclasses.replace(decided, now=decided.now - timedelta(hours=1))
    group._publish({"events": Waiting(RANGES, True)}, 9.0)
    assert handed(one).only_decide and one.last is None
    # Decided again, and an hour has ended again: it is not asked a third time.
    group._publish({"events": Waiting(RANGES, True)}, 10.0)
    assert not handed(one).only_decide


def test_a_stream_that_failed_reads_alone(member: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, staged = member(), list[str]()
    group = group_of(events=one)
    monkeypatch.setattr(group, "_stage", lambda prepared, due, asked: staged.extend(prepared))
    group._publish({"events": Waiting(RANGES, True)}, 2.0)
    assert staged == ["events"]

    def fail(*_: object, **__: object) -> int:
        raise Transient("fetch a topic: expected records, found none")

    with monkeypatch.context() as patched:
        patched.setattr(one.batches, "publish", fail)
        one.hand(Work(RANGES))
        wait_for(lambda: one.reads_alone and one.is_ready, "the stream to start again")
    published = list[Ranges]()

    def publish(read: object, ranges: Ranges, **_: object) -> int:
        published.append(ranges)
        return 5

    monkeypatch.setattr(one.batches, "publish", publish)
    group._publish({"events": Waiting(RANGES, True)}, 9.0)
    wait_for(lambda: one.is_ready, "its own read to be published")
    assert (staged, published, one.reads_alone) == (["events"], [RANGES], False)
    group._publish({"events": Waiting({0: (5, 6)}, True)}, 20.0)
    assert staged == ["events", "events"]


def test_the_longer_waiting_of_two_is_first_and_an_error_is_its_own(
    member: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, staged = member(is_started=False), member(is_started=False), list[str]()
    first.last, second.last = 5.0, 1.0
    group = group_of(first=first, second=second)
    monkeypatch.setattr(group, "_stage", lambda prepared, due, asked: staged.extend(prepared))
    waiting = Waiting(RANGES, True)
    for now in (6.0, 7.0):
        group._publish({"first": waiting, "second": waiting}, now)
    assert staged == ["second", "first"]
    one, other = member(is_started=False), member(is_started=False, topic="other")
    staged = list[str]()
    monkeypatch.setattr(one.batches, "prepare", lambda *_: [][0])
    group = group_of(one=one, other=other)
    monkeypatch.setattr(group, "_stage", lambda prepared, due, asked: staged.extend(prepared))
    group._publish(dict.fromkeys(("one", "other"), Waiting(RANGES, True)), 2.0)
    assert isinstance(handed(one).error, IndexError)
    assert staged == ["other"]


def test_an_idle_stream_makes_progress_and_one_whose_records_wait_does_not(member: Make) -> None:
    one, ends = member(is_started=False, speed=SLOW), {0: 0}
    one.last = time.monotonic()  # so that nothing is due
    group, topic = group_of(events=one), Topic("events", "t", (0,))
    described = {"describe_all": lambda _: {"events": topic}}
    of_topic = described | {"stable_ends_of": lambda _: {"events": dict(ends)}}
    group._kafka = cast(Any, SimpleNamespace(**of_topic))
    for end, progress in ((0, 1), (5, 1), (5, 1), (0, 2)):
        ends[0] = end
        assert group._publish_due() and one.progress == progress


def test_a_stream_that_only_retries_and_one_that_does_not_end_are_named_as_set_aside(
    member: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    retrying, leaving = member(), member(is_started=False)
    waiting = member(is_started=False, speed=SLOW)

    def fail(*_: object, **__: object) -> int:
        raise Transient("load table games.events: no answer")

    monkeypatch.setattr(retrying.batches, "publish", fail)
    retrying.hand(Work(RANGES))
    what = "a try that fails, and another start"
    wait_for(lambda: retrying._tried is not None and retrying.is_ready, what)
    group = group_of(retrying=retrying, waiting=waiting)
    group._leaving = {"leaving": leaving}
    assert group.set_aside == {}
    # A wait of the trigger is not a stall.
    for one in (retrying, leaving, waiting):
        one._moved -= PATIENCE.total_seconds() + 10
    said = group.set_aside
    assert sorted(said) == ["leaving", "retrying"] and group.failures == {}
    assert said["retrying"].endswith("its last error: load table games.events: no answer")
    assert said["leaving"].endswith("its current step has not ended")
    retrying.note_progress()
    assert list(group.set_aside) == ["leaving"]


@pytest.mark.parametrize(
    "error", [MissingRight("describe topic events"), ConfigurationError("user or password")]
)
def test_what_brokers_refuse_sets_streams_aside(member: Make, error: AnabranchError) -> None:
    def refuse(_: object) -> None:
        raise error

    group = group_of(events=member())
    group._kafka = cast(Any, SimpleNamespace(stable_ends_of=refuse))
    assert not group._publish_due()
    wait_for(lambda: "events" in group.failures, "the stream to be set aside")
    assert group.failures == {"events": error}


@pytest.mark.parametrize("available_now", [True, False])
def test_only_a_run_of_what_is_there_ends_without_its_topic(
    lake: StreamLake, members: list[Member], monkeypatch: pytest.MonkeyPatch, available_now: bool
) -> None:
    """The hazard: `speed --all --available-now` never ends, for one topic without records."""
    state = dataclasses.replace(lake.state(), position=Position("", {}))
    monkeypatch.setattr(starting, "load_state", lambda *_: state)
    job = Job(lake.environment, lake.stream, lake.again(), Broker(id=None).adapter)
    one = Member(job, SPARK, _Turns(8, 1.0), available_now)
    members.append(one)
    one.start()
    wait_for(lambda: one._tried is not None, "the stream to find no topic")
    assert "expected it to exist, found none yet" in str(one._tried)
    if available_now:
        wait_for(lambda: one.has_ended, "the stream to end")
        assert one.failure is one._tried
    else:
        time.sleep(0.1)
        assert not one.has_ended and one.failure is None


def test_a_new_streams_registry_ends_no_process(lake: StreamLake, members: list[Member]) -> None:
    # The process has read anabranch.yaml before the registry and the stream were added.
    stream = lake.stream.model_copy(update={"format": config.sections.FormatSettings(type="avro")})
    job = Job(lake.environment, stream, lake.again(), Broker(log={0: []}).adapter)
    group = GroupJob(SPARK, lake.environment.kafka, lambda: {"events": job})
    group._follow_files()
    members.extend(group._members.values())
    wait_for(lambda: "events" in group.failures, "the stream to be set aside")
    assert "expected the url of a schema registry" in str(group.failures["events"])


def test_a_stop_that_comes_while_old_work_is_dropped_ends_the_stream(member: Make) -> None:
    one = member()
    inbox = one._inbox

    class StoppedMeanwhile:
        """The inbox, and a stop between the two questions of the loop that empties it."""

        def empty(self) -> bool:
            if not one._stop.is_set():
                one.stop()
            return inbox.empty()

        def __getattr__(self, name: str) -> Any:
            return getattr(inbox, name)

    one._inbox = cast(Any, StoppedMeanwhile())
    inbox.put(Work(RANGES, error=Transient("the table moved")))
    wait_for(lambda: one.has_ended, "the stream to end", 30)
