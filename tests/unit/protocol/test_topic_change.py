"""Adoption: no hour mixes two logs, published rows stay served, and losses are reported."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker
from killed import kill_at
from lakes import StreamLake, new_environment, new_lake, new_stream
from no_spark import NO_SPARK

from anabranch.common.errors import ConfigurationError, PositionError, Refused
from anabranch.common.fail_points import Step
from anabranch.iceberg import admin
from anabranch.iceberg.commits import Change, Outcome
from anabranch.iceberg.lake import Lake
from anabranch.job import Job
from anabranch.offsets import hours
from anabranch.offsets.hours import REMEMBERED_LOGS, Adoption, Cut, Timeline, hour_of, shift
from anabranch.offsets.position import Position, Stamped, Topic
from anabranch.protocol import ledger, publisher, sealing, topic_change
from anabranch.protocol.merge import merge, uncovered_reason
from anabranch.protocol.state import LOST, REMEMBERED_HOURS, Accepted, accepted_properties
from anabranch.protocol.topic_change import Adopted, Log, StartChoice, gone_from_kafka, parse_start
from batch_layer.rebuild import Rebuilder, RebuildRequest
from batch_layer.stream_run import StreamRun
from speed_layer.plan import plan_catch_up

H = [shift("2026-11-21T00", i) for i in range(8)]
OLD, NEW = "t", "new"


FRESH = Timeline(H[0], H[0], {0: 0})
# The log of OLD was left behind offset 7 of partition 0, for that of another topic.
LEFT = Timeline(H[0], H[3], {0: 0}, adoptions=(Adoption(H[2], OLD, {0: 0}, {0: 7}, 5_000),))


def log(id: str, starts: dict[int, int], ends: dict[int, int]) -> Log:
    return Log(Topic("e", id, tuple(ends)), starts, ends)


FRESH_NEW = (FRESH, Position(OLD, {0: 7, 1: 3}), log(NEW, {0: 2, 1: 0, 2: 0}, {0: 9, 1: 4, 2: 0}))
# A partition that was added meanwhile begins at 0.
LEFT_OLD = (LEFT, Position(NEW, {0: 0}), log(OLD, {0: 0, 1: 0}, {0: 9, 1: 4}))
LEFT_SHORT = (LEFT, Position(NEW, {0: 0}), log(OLD, {0: 0}, {0: 5}))
SHORT = (FRESH, Position(OLD, {0: 7, 1: 8}), log(OLD, {0: 0, 1: 0}, {0: 9, 1: 5}))
SAME = log(OLD, {0: 0, 1: 0}, {0: 7, 1: 5})


@pytest.mark.parametrize(
    ("given", "unpublished", "choice", "begin"),
    [
        pytest.param(FRESH_NEW, {}, None, {0: 2, 1: 0, 2: 0}, id="a new log at its start"),
        pytest.param(FRESH_NEW, {}, {0: 5, 1: 3, 2: 0}, {0: 5, 1: 3, 2: 0}, id="where one decides"),
        # The hazard: read from its start, all that was published of it is published twice.
        pytest.param(LEFT_OLD, {}, None, {0: 7, 1: 0}, id="a log that was read before at its end"),
        pytest.param(LEFT_OLD, {}, {0: 8, 1: 2}, {0: 8, 1: 2}, id="the same where one decides"),
        # It lost its end while another was read: it continues as one that was not left.
        pytest.param(LEFT_SHORT, {}, None, {0: 5}, id="left and shorter"),
        pytest.param(LEFT_SHORT, {0: Stamped(3, 0)}, None, {0: 3}, id="left, unpublished before"),
        pytest.param(LEFT_SHORT, {0: Stamped(6, 0)}, None, {0: 5}, id="left, unpublished behind"),
        # It begins again at the first record that cannot be published.
        pytest.param(SHORT, {}, None, {1: 5}, id="shorter"),
        pytest.param(SHORT, {1: None}, None, {1: 5}, id="shorter, nothing unpublished"),
        pytest.param(SHORT, {1: Stamped(3, 0)}, None, {1: 3}, id="shorter, unpublished before"),
        pytest.param(
            SHORT, {0: Stamped(2, 0), 1: Stamped(9, 0)}, None, {1: 5}, id="shorter, behind"
        ),
        pytest.param((FRESH, Position(OLD, {0: 7}), SAME), {}, None, None, id="the same topic"),
        pytest.param((FRESH, Position("", {}), SAME), {}, None, None, id="no topic before"),
    ],
)  # fmt: skip
def test_where_a_log_begins(
    given: tuple[Timeline, Position, Log],
    unpublished: dict[int, Stamped | None],
    choice: dict[int, int] | None,
    begin: dict[int, int] | None,
) -> None:
    assert topic_change.plan_begins(*given, unpublished, choice) == begin


def test_a_log_cannot_begin_before_what_was_read_of_it() -> None:
    found = r"at or after 0=7,1=0.*ended with hour 2026-11-21T02, found 6 for partition 0"
    with pytest.raises(Refused, match=found):
        topic_change.plan_begins(*LEFT_OLD, {}, {0: 6, 1: 0})
    # For records of a log that was never read an operator must choose.
    without_record = (*FRESH_NEW[:2], log(NEW, {0: 4, 1: 0}, {0: 4, 1: 0}))
    given = (FRESH_NEW, without_record, LEFT_OLD, (FRESH, Position("", {}), SAME))
    assert [topic_change.must_choose(*one) for one in given] == [True, False, False, False]


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("earliest", StartChoice("earliest")),
        ("latest", StartChoice("latest")),
        ("0=120,1=98", StartChoice("offsets", offsets={0: 120, 1: 98})),
        ("2026-11-21T03:15:00Z", StartChoice("time", when=datetime(2026, 11, 21, 3, 15, tzinfo=UTC))),
        ("2026-11-21 03:15", StartChoice("time", when=datetime(2026, 11, 21, 3, 15, tzinfo=UTC))),
    ],
)  # fmt: skip
def test_the_start_has_four_forms(text: str, choice: StartChoice) -> None:
    assert parse_start(text) == choice


@pytest.mark.parametrize("text", ["", "first", "0=1,0=2", "0=1,", "0:1", "2026-11-21T25"])
def test_any_other_writing_is_a_wrong_usage(text: str) -> None:
    found = "--from: expected earliest, latest, a time such as"
    with pytest.raises(ConfigurationError, match=found):
        parse_start(text)


def test_the_end_of_a_log_is_remembered_once_and_of_the_newest_logs() -> None:
    many = [Adoption(shift(H[0], i), f"t{i % 20}", {0: 0}, {0: i}, i) for i in range(40)]
    kept = hours.plan_remembered(many)
    found = [(a.hour, a.topic_id, a.begins) for a in kept]
    assert found == [(a.hour, a.topic_id, a.begins) for a in many]
    shown = [a.topic_id for a in kept if a.ended]
    assert shown == [f"t{i}" for i in range(20 - REMEMBERED_LOGS, 20)]
    timeline = replace(FRESH, adoptions=kept)
    assert timeline.left_at("t19") == many[39]
    assert timeline.left_at("t0") is None


def plan(timeline: Timeline, position: dict[int, int], **values: Any) -> Adopted:
    given: dict[str, Any] = {"topic_id": NEW, "begins": {0: 0, 1: 0}, "accepted": {}, "read_ms": 5}
    return topic_change.plan_adopt(timeline, Position(OLD, position), **(given | values))


def test_the_hour_at_hand_is_sealed_at_the_position_and_the_next_begins_in_the_new_topic() -> None:
    adopted = plan(Timeline(H[2], H[3], {0: 10, 1: 10}), {0: 14, 1: 10})
    assert adopted.sealed == (H[3],)
    assert adopted.timeline.sealed == {H[3]: Cut(OLD, {0: (10, 14), 1: (10, 10)})}
    assert (adopted.timeline.open, adopted.timeline.start) == (H[4], {0: 0, 1: 0})
    assert adopted.position == Position(NEW, {0: 0, 1: 0})
    assert adopted.timeline.since == H[4]
    assert (adopted.lost, adopted.timeline.skipped, adopted.former_id) == ({}, (), OLD)
    assert adopted.timeline.left_at(OLD) == Adoption(H[3], OLD, {0: 0, 1: 0}, {0: 14, 1: 10}, 5)


def test_used_ends_stay_and_unread_offsets_before_them_are_lost() -> None:
    timeline = Timeline(H[3], H[3], {0: 0, 1: 0}, boundaries={H[3]: {0: 10, 1: 10}})
    adopted = plan(timeline, {0: 14, 1: 8})
    assert adopted.sealed == (H[3], H[4])
    assert adopted.timeline.sealed[H[3]].ranges == {0: (0, 10), 1: (0, 10)}
    assert adopted.timeline.sealed[H[4]].ranges == {0: (10, 14), 1: (10, 10)}
    assert adopted.lost == {H[3]: {1: (8, 10)}}
    assert adopted.timeline.skipped == (H[3],)
    left = adopted.timeline.left_at(OLD)
    why = "offsets of its sealed hours are not read as another log's"
    assert left is not None and left.ended == {0: 14, 1: 10}, why


def test_an_unread_sealed_hour_is_lost_and_an_accepted_one_is_not() -> None:
    sealed = {H[2]: Cut(OLD, {0: (5, 9)})}
    accepted = {H[1]: Cut(OLD, {0: (2, 5)})}
    timeline = Timeline(H[1], H[3], {0: 9}, sealed=sealed)
    adopted = plan(timeline, {0: 2}, accepted=accepted, begins={0: 0})
    assert adopted.lost == {H[2]: {0: (5, 9)}}
    assert adopted.timeline.skipped == (H[1], H[2])
    assert adopted.timeline.sealed[H[3]].ranges == {0: (9, 9)}


def test_where_a_log_lost_its_end_or_was_empty_old_hours_go_on() -> None:
    sealed = {H[1]: Cut(OLD, {0: (0, 4), 1: (0, 4)}), H[2]: Cut(OLD, {0: (4, 6), 1: (4, 9)})}
    timeline = Timeline(H[1], H[3], {0: 6, 1: 9}, sealed=sealed)
    adopted = plan(timeline, {0: 6, 1: 11}, topic_id=OLD, begins={1: 5})
    assert adopted.position == Position(OLD, {0: 6, 1: 5})
    assert adopted.timeline.sealed[H[3]].ranges == {0: (6, 6), 1: (9, 11)}
    timeline, cuts = adopted.timeline, adopted.timeline.sealed
    gone = {h: gone_from_kafka(timeline, OLD, h, c) is not None for h, c in cuts.items()}
    assert gone == {H[1]: False, H[2]: True, H[3]: True}
    assert adopted.lost == {}, "all of it is published"
    # An hour of a former topic without offsets needs no Kafka.
    adopted = plan(Timeline(H[3], H[3], {0: 5}), {0: 5})
    assert gone_from_kafka(adopted.timeline, NEW, H[3], adopted.timeline.sealed[H[3]]) is None


def test_the_reason_names_the_adoption_that_ended_the_hours_own_log() -> None:
    twice = (Adoption(H[1], "a", {0: 0}, {0: 3}, 7), Adoption(H[3], "b", {0: 0}, begins_ms=9))
    timeline = Timeline(H[0], H[4], {0: 0}, adoptions=twice)
    expected = "topic id a ended with hour " + H[1]
    assert expected in str(gone_from_kafka(timeline, "c", H[0], Cut("a", {0: (0, 3)})))
    words = "topic id b ended with hour " + H[3]
    assert words in str(gone_from_kafka(timeline, "c", H[2], Cut("b", {0: (0, 3)})))
    assert gone_from_kafka(timeline, "c", H[4], Cut("c", {0: (0, 3)})) is None
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_hours_of_a_log_that_comes_back_can_be_read_again_but_for_what_it_lost() -> None:
    away = Adoption(H[1], "a", {0: 0}, {0: 9}, 7)
    cuts = {H[0]: Cut("a", {0: (0, 5)}), H[1]: Cut("a", {0: (5, 9)})}

    def gone(*adoptions: Adoption, id: str) -> list[bool]:
        timeline = Timeline(H[0], H[4], {0: 0}, adoptions=adoptions)
        return [gone_from_kafka(timeline, id, h, c) is not None for h, c in cuts.items()]

    assert gone(away, id="b") == [True, True]
    assert gone(away, Adoption(H[2], "b", {0: 9}), id="a") == [False, False]
    why = "it lost its end meanwhile"
    assert gone(away, Adoption(H[2], "b", {0: 7}), id="a") == [False, True], why


# On a real lake

NOW_HOUR = hour_of(datetime.now(UTC))
BEFORE = shift(NOW_HOUR, -1)
ROWS = [(BEFORE, 0, 0), (NOW_HOUR, 0, 1), (NOW_HOUR, 0, 2)]


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """Offsets 0 to 2 published, the hour before sealed and waiting, the running one open."""
    timeline = Timeline(BEFORE, NOW_HOUR, {0: 1}, sealed={BEFORE: Cut(OLD, {0: (0, 1)})})
    made = new_lake(tmp_path, timeline=timeline)
    made.serve(ROWS, {0: 3})
    return made


def run(lake: StreamLake, broker: Broker, start: str | None = None) -> Adopted | None:
    return topic_change.adopt(
        lake.publisher, broker.adapter, choice=parse_start(start) if start else None
    )


def adopted_by(lake: StreamLake, broker: Broker, start: str | None = None) -> Adopted:
    adopted = run(lake, broker, start)
    assert adopted is not None
    return adopted


def decide(lake: StreamLake, broker: Broker) -> sealing.ResolvedState:
    return sealing.BoundaryResolver(lake.stream, lake.lake, broker.adapter).decide()


def test_adopting_a_recreated_topic_keeps_every_row_and_continues_at_0(lake: StreamLake) -> None:
    broker = Broker(id=NEW, log={0: [0, 0], 1: [0]})
    with pytest.raises(PositionError, match="run `anabranch adopt`"):
        decide(lake, broker)
    assert adopted_by(lake, broker, "earliest").sealed == (NOW_HOUR,)
    [row] = lake.ledger.acts()
    assert (row.hour, row.decision, row.act and row.act.name) == (NOW_HOUR, "sealed", "adopt")
    state = lake.state()
    assert state.position == Position(NEW, {0: 0, 1: 0})
    assert state.timeline.open == shift(NOW_HOUR, 1)
    assert lake.rows("main") == lake.rows("speed") == ROWS
    assert [uncovered_reason(state, "speed", h) for h in (BEFORE, NOW_HOUR)] == [None, None]
    assert decide(lake, broker).position == state.position
    assert merge(lake.lake, lake.stream, everything=True).swaps == []


def test_adopting_writes_the_ledger_and_adopting_again_does_nothing(lake: StreamLake) -> None:
    broker = Broker(id=NEW)
    assert run(lake, broker) is not None
    with lake.unmoved():
        assert run(lake, broker) is None
    (row,) = lake.ledger.history()
    assert (row.hour, row.decision, row.cut) == (NOW_HOUR, "sealed", Cut(OLD, {0: (1, 3)}))
    assert row.reason == f"sealed by adopting topic id {NEW} from 0=0"


def test_a_topic_named_wrongly_and_corrected_continues_at_its_position(lake: StreamLake) -> None:
    """The hazard: read from its start again, every row would be there twice."""
    right, wrong = Broker(log={0: [0] * 5}), Broker(id=NEW, log={0: []})
    for _ in range(2):
        assert run(lake, wrong) is not None
        assert adopted_by(lake, right).position == lake.state().position == Position(OLD, {0: 3})
    decided = decide(lake, right)
    assert plan_catch_up(decided.state, decided.position.offsets) is None
    hour = decided.timeline.open
    lake.serve([(hour, 0, 3), (hour, 0, 4)], {0: 5})
    assert [row[1:] for row in lake.rows("main")] == [(0, o) for o in range(5)]
    # Hours that were sealed before can be read again.
    state = lake.state()
    cuts = state.timeline.sealed
    assert [h for h, cut in cuts.items() if gone_from_kafka(state.timeline, OLD, h, cut)] == []


def test_an_unread_topic_with_records_is_adopted_only_with_from(lake: StreamLake) -> None:
    broker = Broker(id=NEW, log={0: [60_000, 70_000, 80_000, 90_000]})
    with lake.unmoved(), pytest.raises(Refused) as refused:
        run(lake, broker)
    holds = f"id {NEW} with 4 records, the oldest of 1970-01-01T00:01:00Z"
    choices = ("wrong topic or cluster", "adopt events --from earliest", "from 0=3", "from TIME")
    for words in (f"topic id {OLD}", holds, "nothing was changed", *choices):
        assert words in str(refused.value)
    found = r"an offset of each partition within 0=0\.\.4, found 0=5; nothing was changed"
    with lake.unmoved(), pytest.raises(Refused, match=found):
        run(lake, broker, "0=5")
    found = r"adopt topic events: expected it to exist, found none; create it"
    with lake.unmoved(), pytest.raises(PositionError, match=found):
        run(lake, Broker(id=None))


@pytest.mark.parametrize(
    ("start", "begins"),
    [("earliest", 0), ("latest", 4), ("0=3", 3), ("1970-01-01T00:01:15Z", 2), ("1971-01-01", 4)],
)
def test_an_operator_chooses_a_topics_begin(lake: StreamLake, start: str, begins: int) -> None:
    broker = Broker(id=NEW, log={0: [60_000, 70_000, 80_000, 90_000]})
    assert run(lake, broker, start) is not None
    assert lake.state().position == Position(NEW, {0: begins})
    assert run(lake, broker, start) is None, "the same command again changes nothing"


def _adopt(folder: Path) -> None:
    topic_change.adopt(
        publisher.Publisher(Lake(new_environment(folder)), new_stream()), Broker(id=NEW).adapter
    )


@pytest.mark.parametrize("step", [Step.ADOPT_DECIDED, Step.ADOPT_PUBLISHED])
def test_a_killed_adoption_is_done_once_by_the_next(lake: StreamLake, step: Step) -> None:
    kill_at(step.label, _adopt, lake.folder)
    landed = step is Step.ADOPT_PUBLISHED
    assert (lake.state().position.topic_id == NEW) is landed
    assert lake.ledger.history() == [], "the hazard did not happen"
    lake.publisher.recover()
    assert (run(lake, Broker(id=NEW)) is None) is landed
    assert len(lake.state().timeline.adoptions) == 1
    assert [row.hour for row in lake.ledger.history()] == [NOW_HOUR]
    # And back.
    assert adopted_by(lake, Broker(log={0: [0] * 5})).position == Position(OLD, {0: 3})


def test_unread_offsets_are_recorded_as_lost(lake: StreamLake) -> None:
    sealed = {BEFORE: Cut(OLD, {0: (0, 1)}), NOW_HOUR: Cut(OLD, {0: (1, 9)})}
    lake.change(
        Change("speed"), timeline=Timeline(BEFORE, shift(NOW_HOUR, 1), {0: 9}, sealed=sealed)
    )
    assert adopted_by(lake, Broker(id=NEW)).lost == {NOW_HOUR: {0: (3, 9)}}
    (entry,) = json.loads(lake.state().branch_properties["speed"][LOST])
    assert (entry["class"], entry["ranges"]) == ("retention", {"0": [3, 9]})
    assert entry["hours"] == [NOW_HOUR]
    found = uncovered_reason(lake.state(), "speed", NOW_HOUR)
    assert found == "the speed layer skipped it, wholly or in part"


def test_a_log_that_lost_its_end_continues_with_the_newer_records(lake: StreamLake) -> None:
    # An hour that waits for its end, so that the clock looks at the log.
    lake.change(Change("speed"), timeline=Timeline(BEFORE, BEFORE, {0: 0}))
    later = datetime.now(UTC) + timedelta(seconds=1)
    broker = Broker(log={0: [0, int(later.timestamp() * 1000)]})
    with pytest.raises(PositionError, match="Kafka lost published records"):
        decide(lake, broker)
    assert run(lake, broker) is not None
    why = "the record that came since is not the first to be read"
    assert lake.state().position == Position(OLD, {0: 1}), why
    assert run(lake, broker) is None
    assert lake.rows("main") == ROWS


def test_a_publish_that_comes_between_is_taken_in(lake: StreamLake) -> None:
    """The hazard: sealed at an older position, the hour lacks what came meanwhile."""
    more = lake.stage([(NOW_HOUR, 0, 3)])

    def publish() -> None:
        assert lake.publish(lake.speed(more, {0: 4}), lake_=lake.again()) is Outcome.LANDED

    hooks: list[Callable[[], None]] = [publish]
    adopted = adopted_by(lake, Broker(id=NEW, after_describe=hooks))
    assert hooks == [], "the hazard did not happen"
    assert adopted.timeline.sealed[NOW_HOUR].ranges == {0: (1, 4)}
    assert lake.rows("main") == [*ROWS, (NOW_HOUR, 0, 3)]


def test_a_speed_branch_dropped_after_adoption_begins_in_the_new(lake: StreamLake) -> None:
    assert run(lake, Broker(id=NEW)) is not None
    lake.table().manage_snapshots().remove_branch("speed").commit()
    assert admin.add_branches(lake.lake, lake.name, {}) == ["speed"]
    assert lake.state().position == Position(NEW, {0: 0})
    # Hours of the former topic are forgotten like any other. The hazard: compared with a position
    # that began again, they would be remembered forever.
    accepted, past = Accepted(1, Cut(OLD, {0: (0, 1)})), range(-REMEMBERED_HOURS - 2, 0)
    many = dict.fromkeys((shift(NOW_HOUR, i) for i in past), accepted)
    properties = accepted_properties(replace(lake.state(), accepted=many), {})
    assert len(json.loads(properties["anabranch.accepted"])) == REMEMBERED_HOURS


def test_hours_that_kafka_lost_are_refused_and_delay_no_other(lake: StreamLake) -> None:
    """The hazard: the first of them ends the run, and no hour after it is ever rebuilt."""
    broker = Broker(id=NEW)
    assert run(lake, broker) is not None
    # An hour of the new topic that ended without records waits behind them.
    state = lake.state()
    empty = {**state.timeline.sealed, state.timeline.open: Cut(NEW, {0: (0, 0)})}
    timeline = replace(state.timeline, sealed=empty, open=shift(state.timeline.open, 1))
    lake.change(Change("speed"), timeline=timeline)
    job = Job(new_environment(lake.folder), lake.stream, lake.lake, broker.adapter)
    rebuilder = Rebuilder(job, NO_SPARK)

    results = StreamRun(job, rebuilder).rebuild(None, RebuildRequest())

    assert [(r.hour, r.decision) for r in results] == [
        (BEFORE, "refused"), (NOW_HOUR, "refused"), (shift(NOW_HOUR, 1), "accepted"),
    ]  # fmt: skip
    expected = f"Kafka no longer has it: the log of topic id {OLD} ended with hour {NOW_HOUR}"
    assert expected in str(results[0].reason)
    assert lake.rows("main") == ROWS
    rows = ledger.newest(lake.ledger.history())
    found = [(rows[h].decision, rows[h].served) for h in (BEFORE, NOW_HOUR)]
    assert found == [("refused", "speed")] * 2
    # Trying again changes nothing, so they are refused once; asked for by name they say so again.
    assert StreamRun(job, rebuilder).rebuild(None, RebuildRequest()) == []
    shown = [r.decision for r in StreamRun(job, rebuilder).rebuild([BEFORE], RebuildRequest())]
    assert shown == ["refused"]
