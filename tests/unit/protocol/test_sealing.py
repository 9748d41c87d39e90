"""Decisions on Kafka's answers, and on a table that moved on since the questions were asked."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from brokers import Broker
from click.testing import CliRunner, Result
from lakes import StreamLake, new_lake, new_state
from no_spark import NO_SPARK

from anabranch.cli import main
from anabranch.common import errors, fail_points
from anabranch.iceberg.clock import Clock
from anabranch.iceberg.commits import Change
from anabranch.job import Job
from anabranch.offsets.hours import Cut, Timeline, hour_of, shift, start_of
from anabranch.offsets.position import Position, Topic
from anabranch.protocol import sealing, state
from anabranch.protocol.state import State
from anabranch.protocol.watermarks import complete_through
from batch_layer.rebuild import Rebuilder, RebuildRequest
from batch_layer.stream_run import StreamRun

H0, H1 = "2026-11-21T00", "2026-11-21T01"
NOW = datetime(2026, 11, 21, 1, 10, tzinfo=UTC)


def kafka(*counts: int, topic_id: str = "t") -> Broker:
    """A topic with so many records in its partitions, none after the hour."""
    return Broker(topic_id, {p: [0] * count for p, count in enumerate(counts)})


def state_of(offsets: dict[int, int], timeline: Timeline | None = None) -> State:
    return new_state(timeline or Timeline(H0, H0, dict.fromkeys(offsets, 0)), offsets)


def _job(lake: StreamLake, *stamps: int) -> Job:
    return Job(lake.environment, lake.stream, lake.lake, Broker(log={0: [*stamps]}).adapter)


def asked(state: State, kafka: Broker) -> sealing.KafkaOffsets:
    return sealing.ask(kafka.adapter, "events", state, NOW, timedelta(0))


def test_a_partition_that_was_published_meanwhile_is_requested_again() -> None:
    """The hazard: an older answer stops the stream, as if Kafka had lost the partition."""
    before, after = state_of({0: 2}), state_of({0: 2, 1: 1})
    assert sealing.resolve_state(after, asked(before, kafka(2))) is None
    decided = sealing.resolve_state(after, asked(after, kafka(2, 1)))
    assert decided is not None
    assert decided.timeline.boundaries == {H0: {0: 2, 1: 1}}
    # So is a topic that was adopted meanwhile.
    old = asked(state_of({0: 2}), kafka(2))
    adopted = new_state(Timeline(H0, H0, {0: 0}), {0: 0}, position=Position("other", {0: 0}))
    assert sealing.resolve_state(adopted, old) is None


@pytest.mark.parametrize("broker", [kafka(2), kafka(2, 1, topic_id="other")])
def test_a_topic_that_lost_a_partition_or_was_recreated_still_stops(broker: Broker) -> None:
    with pytest.raises(errors.PositionError):
        asked(state_of({0: 2, 1: 1}), broker)


def test_hours_that_ended_meanwhile_are_requested_again() -> None:
    sealed = Timeline(H0, H1, {0: 2})
    old = sealing.KafkaOffsets(Topic("events", "t", (0,)), NOW, NOW, {}, {}, {})
    assert sealing.resolve_state(state_of({0: 2}), old) is None
    assert sealing.resolve_state(state_of({0: 2}, sealed), old) is not None
    # Nothing to seal is no publish.
    state = state_of({0: 2}, sealed)
    decided = sealing.resolve_state(state, asked(state, kafka(2)))
    assert decided is not None
    assert sealing.plan_sealing(decided, timedelta(0), "id") is None


def test_a_backlog_is_sealed_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: what waits for the ledger is the whole backlog, in every snapshot."""
    monkeypatch.setattr(sealing, "SEALED_AT_ONCE", 3)
    first = hour_of(datetime.now(UTC) - timedelta(hours=8))
    lake = new_lake(tmp_path, timeline=Timeline(first, first, {0: 0}))
    waited: list[int] = []

    def watched(name: fail_points.Step) -> None:
        if name is fail_points.Step.SEAL_PUBLISHED:
            waited.append(len(lake.state().decisions))
        if name is fail_points.Step.SEAL_RECORDED and len(waited) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(sealing, "reach", watched)
    kafka = Broker(log={0: []}).adapter
    with pytest.raises(KeyboardInterrupt):
        sealing.seal(lake.publisher, kafka)
    assert lake.state().timeline.open == shift(first, 6), "cut short after two commits"
    sealed = sealing.seal(lake.publisher, kafka).hours
    assert sealed[0] == shift(first, 6)
    assert waited[:2] == [3, 3]
    assert max(waited) <= 3
    rows = lake.ledger.history()
    assert [r.hour for r in rows] == [shift(first, i) for i in range(6 + len(sealed))]


def _ended(lake: StreamLake, hour: str, *stamps: int) -> Rebuilder:
    """Half an hour behind the end of `hour`, with records of these timestamps."""
    ahead = start_of(hour) + timedelta(minutes=90) - datetime.now(UTC)
    lake.lake.__dict__["clock"] = Clock(None, lambda: datetime.now(UTC) + ahead)
    return Rebuilder(_job(lake, *stamps), NO_SPARK)


@pytest.fixture
def hours() -> list[str]:
    first = hour_of(datetime.now(UTC) - timedelta(hours=3))
    return [shift(first, i) for i in range(6)]


def _closed_hours(folder: Path, hours: list[str]) -> tuple[StreamLake, Rebuilder]:
    """Four ended hours, the second with a record; the clock is in the middle of the next."""
    lake = new_lake(folder, timeline=Timeline(hours[0], hours[0], {0: 0}))
    second = int((start_of(hours[0]) + timedelta(minutes=90)).timestamp() * 1000)
    return lake, _ended(lake, hours[3], second)


def test_hours_without_records_are_accepted_by_the_commit_that_seals_them(
    tmp_path: Path, hours: list[str]
) -> None:
    empty = [hours[0], *hours[2:4]]
    apart, rebuilder = _closed_hours(tmp_path / "apart", hours)
    sealing.seal(rebuilder.publisher, rebuilder._job.kafka)
    assert [result.hour for result in rebuilder.accept_empty(empty)] == empty
    joined, rebuilder = _closed_hours(tmp_path / "joined", hours)
    before = len(joined.state().table.metadata.metadata_log)
    assert rebuilder.seal(None).hours == tuple(hours[:4])
    shown = [(r.hour, r.decision, r.revision) for r in rebuilder.accepted_with_seal]
    assert shown == [(hour, "accepted", 1) for hour in empty]
    assert len(joined.state().table.metadata.metadata_log) == before + 1
    # The joint publish equals the separate publishes of the seal and the acceptance.
    expected, found = apart.state(), joined.state()
    same = ("timeline", "position", "accepted", "settled_before", "overrides", "retained_hours")
    for name in same:
        assert getattr(found, name) == getattr(expected, name), name
    assert found.is_merged and complete_through(found) == complete_through(expected) == hours[0]
    histories = (lake.ledger.history() for lake in (apart, joined))
    rows = [sorted((r.hour, r.decision, r.offsets) for r in history) for history in histories]
    assert rows[0] == rows[1] and len(rows[1]) == 7
    of_an_hour = [r.decision for r in joined.ledger.history(hours[:1])]
    assert of_an_hour == ["sealed", "accepted"], "the newest row is the hour's state"
    # Nothing is left to do, and nothing is decided twice.
    assert rebuilder.seal(None).hours == () and rebuilder.accept_empty(empty) == []
    assert len(joined.ledger.history()) == 7


def _moved(lake: StreamLake, before: State) -> set[str]:
    return {b for b, head in lake.state().heads.items() if head != before.heads[b]}


@pytest.mark.parametrize("lost", ["", "speed", "batch", "main"])
def test_hours_without_records_outlast_a_branch_set_back(
    tmp_path: Path, hours: list[str], lost: str
) -> None:
    lake, _ = _closed_hours(tmp_path, hours)
    _ended(lake, hours[3]).seal([])
    before = lake.state()
    assert len(before.timeline.sealed) == 4
    assert len(_ended(lake, hours[5]).seal(None).hours) == 2
    after = lake.state()
    assert _moved(lake, before) == {"main"}
    assert set(after.accepted) == {*hours[4:]}
    if lost:
        lake.set_back(lost, before.heads[lost])
    found = lake.state()
    assert (found.timeline, found.accepted) == (after.timeline, after.accepted)
    assert {row.hour for row in found.decisions} >= {*hours[4:]}


def test_a_seal_with_records_or_a_new_topic_moves_the_speed_branch(
    tmp_path: Path, hours: list[str]
) -> None:
    lake, rebuilder = _closed_hours(tmp_path / "records", hours)
    before = lake.state()
    rebuilder.seal(None)
    assert _moved(lake, before) == {"speed", "main"}
    lake, _ = _closed_hours(tmp_path / "topic", hours)
    rebuilder, unbound = _ended(lake, hours[3]), Position("", lake.state().position.offsets)
    lake.change(Change("speed"), Change("main"), position=unbound)
    before = lake.state()
    assert before.position.topic_id == ""
    assert len(rebuilder.seal(None).hours) == len(rebuilder.accepted_with_seal) == 4
    assert lake.state().position.topic_id == "t"
    assert _moved(lake, before) == {"speed", "main"}


def test_a_seal_with_more_empty_hours_than_main_lists_alone_moves_each_branch_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hours: list[str]
) -> None:
    monkeypatch.setattr(state, "MAX_MAIN_ONLY_HOURS", 2)
    lake, rebuilder = _closed_hours(tmp_path, hours)
    before = lake.state()
    assert len(rebuilder.seal(None).hours) == 4 and len(rebuilder.accepted_with_seal) == 3
    assert _moved(lake, before) == {"speed", "batch", "main"}
    assert len(lake.state().table.snapshots()) == len(before.table.snapshots()) + 3


def test_a_job_for_named_hours_accepts_of_those_that_it_seals_these_alone(
    tmp_path: Path, hours: list[str]
) -> None:
    lake, rebuilder = _closed_hours(tmp_path, hours)
    rebuilder.seal(hours[1:3])
    assert list(lake.state().accepted) == [hours[2]]
    assert sorted(lake.state().timeline.sealed) == [hours[0], hours[1], hours[3]]


def batch(
    lake: StreamLake, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[Result, bool]:
    """`anabranch batch events ARGUMENTS` on a lake: what it says, and if it runs the job."""
    began: list[Sequence[str]] = []
    monkeypatch.setattr("anabranch.job.open_job", lambda stream, conf: _job(lake))
    monkeypatch.setattr("anabranch.job.main", lambda run, arguments: began.append(arguments))
    monkeypatch.setattr("anabranch.spark.submit.job_of", lambda *_: (lake.environment, ["events"]))
    return CliRunner().invoke(main, ["batch", "events", *arguments]), began == [["events"]]


@pytest.mark.parametrize("flags", [(), ("--seal-only",), ("--restate", "--why", "why")])
@pytest.mark.parametrize("span", ["{open}", "{ended}..{open}"])
def test_an_open_hour_is_refused_before_spark_starts_and_nothing_else_is_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, span: str, flags: tuple[str, ...]
) -> None:
    running = hour_of(datetime.now(UTC) + timedelta(minutes=5))
    ended = shift(running, -2)
    lake = new_lake(tmp_path, timeline=Timeline(ended, ended, {0: 0}))
    hour = span.format(open=running, ended=ended)
    done, is_submitted = batch(lake, monkeypatch, "--hour", hour, *flags)
    assert (done.exit_code, is_submitted) == (errors.NotYet.exit_code, False)
    expected = f"hour {running}: expected it to be sealed, found it open; it can be sealed from"
    assert expected in done.output
    assert lake.state().timeline.open == ended
    # So it is by the job, before it seals another.
    job = _job(lake)
    with pytest.raises(errors.NotYet, match=running):
        StreamRun(job, Rebuilder(job, NO_SPARK)).rebuild([running], RebuildRequest())
    assert lake.state().timeline.open == ended


def test_hours_that_ended_go_to_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = hour_of(datetime.now(UTC) + timedelta(minutes=5))
    sealed = {running: Cut("t", {0: (0, 0)})}
    lake = new_lake(tmp_path, timeline=Timeline(running, shift(running, 1), {0: 0}, sealed=sealed))
    for hour in (running, shift(running, -2)):
        done, is_submitted = batch(lake, monkeypatch, "--hour", hour)
        assert is_submitted, done.output


# The clock of the hours: Kafka's answer and the state may be of different times.

NOW_HOUR = hour_of(datetime.now(UTC))


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """A stream that began two hours ago; no hour is sealed."""
    before = shift(NOW_HOUR, -2)
    return new_lake(tmp_path, timeline=Timeline(before, before, {0: 0}))


def clock(lake: StreamLake, broker: Broker) -> sealing.BoundaryResolver:
    return sealing.BoundaryResolver(lake.stream, lake.again(), broker.adapter)


def bind(lake: StreamLake, position: Position) -> None:
    """Another publisher moves the position."""
    lake.change(Change("speed"), position=position)


def test_a_partition_added_before_the_load_is_no_contradiction(lake: StreamLake) -> None:
    """The hazard: the topic as described has fewer partitions than the position loaded after."""
    broker = Broker()

    def grow() -> None:
        broker.log[1] = []
        bind(lake, Position("t", {0: 0, 1: 0}))

    broker.after_describe.append(grow)
    decided = clock(lake, broker).decide()
    assert broker.after_describe == [], "the hazard did not happen"
    assert decided.position == Position("t", {0: 0, 1: 0})
    assert all(set(ends) == {0, 1} for ends in decided.timeline.boundaries.values())


def test_a_topic_that_was_adopted_since_the_last_load_is_no_contradiction(lake: StreamLake) -> None:
    broker = Broker()
    one = clock(lake, broker)
    one.decide()
    broker.id = "other"
    bind(lake, Position("other", {0: 0}))
    assert one.decide().position.topic_id == "other"


@pytest.mark.parametrize(
    ("id", "found"),
    [("other", r"deleted and made again.*anabranch adopt"), (None, "to exist, found none")],
    ids=["recreated", "missing"],
)
def test_another_topic_is_a_contradiction(lake: StreamLake, id: str | None, found: str) -> None:
    with pytest.raises(errors.PositionError, match=found):
        clock(lake, Broker(id=id)).decide()


def test_a_log_below_the_position_stops_before_a_cut_there(lake: StreamLake) -> None:
    """The hazard: the hour would be sealed up to a position that Kafka no longer reaches."""
    bind(lake, Position("t", {0: 5}))
    broker = Broker(log={0: [0] * 3})
    found = r"lost published records: {'0': \[3, 5\]}.*anabranch adopt"
    with pytest.raises(errors.PositionError, match=found):
        clock(lake, broker).decide()
    broker.log[0] += [0] * 2
    assert clock(lake, broker).decide().timeline.boundaries[shift(NOW_HOUR, -1)] == {0: 5}
