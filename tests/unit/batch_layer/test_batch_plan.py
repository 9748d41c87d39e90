"""Decisions of the batch layer on a staged hour, from the state at the time of the publish."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker
from lakes import FIRST, StreamLake, new_environment, new_lake, new_state, new_stream
from no_spark import NO_SPARK

from anabranch import config, protocol
from anabranch.iceberg import commits, snapshots
from anabranch.job import Job
from anabranch.lifecycle.maintenance import plan_dead_letters
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.offsets.position import Position
from anabranch.protocol.ledger_row import HourAccount, Kind, LedgerRow
from anabranch.protocol.state import (
    DECISIONS,
    MAX_MAIN_ONLY_HOURS,
    Accepted,
    State,
    main_only_hours,
)
from anabranch.protocol.watermarks import COMPLETE_THROUGH, complete_through
from batch_layer import plan, rebuild

H0, H1 = FIRST, shift(FIRST, 1)
NOW = datetime(2026, 11, 21, 3, tzinfo=UTC)
CUT = Cut("t", {0: (0, 3)})
EMPTY = Cut("t", {0: (3, 3)})
ROWS = [(H0, 0, o) for o in range(3)]


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """Two sealed hours, the second without records; the speed layer has published the first."""
    opened = Timeline(H0, shift(H0, 2), {0: 3}, sealed={H0: CUT, H1: EMPTY})
    made = new_lake(tmp_path, timeline=opened)
    made.serve(ROWS, {0: 3})
    return made


def verdict(
    lake: StreamLake,
    staged: snapshots.Staged,
    before: int = 0,
    lookback: frozenset[str] = frozenset(),
    age: timedelta = timedelta(0),
) -> plan.PublishCheck:
    now = datetime.now(UTC) + age
    return plan.check_publish(
        lake.state(), H0, CUT, before, staged.wap_id, frozenset(), lookback, now
    )


def accept(lake: StreamLake, staged: snapshots.Staged, revision: int) -> commits.Outcome:
    state = lake.state()
    rebuilt = plan.Rebuilt(H0, Accepted(revision, CUT), staged, (), HourAccount())
    return lake.publish(plan.plan_publish(state, [rebuilt], NOW), state)


def test_hours_of_which_another_program_expired_one_are_not_published(lake: StreamLake) -> None:
    """The hazard: an expiry moves no head, and deletes files of it after the publish names them."""
    state, staged = lake.state(), [lake.stage(ROWS), lake.stage([])]
    both = zip([(H0, CUT), (H1, EMPTY)], staged, strict=True)
    rebuilt = [plan.Rebuilt(h, Accepted(1, cut), s, (), HourAccount()) for (h, cut), s in both]
    lake.lake.discard(lake.name, staged[1])
    assert lake.publish(plan.plan_publish(state, rebuilt, NOW), state) is commits.Outcome.REFUSED
    assert lake.state().accepted == {}


def test_a_staged_hour_is_published_in_place_of_the_speed_layers_rows(lake: StreamLake) -> None:
    staged = lake.stage(ROWS)
    assert verdict(lake, staged) is plan.PublishCheck.PUBLISH
    assert accept(lake, staged, 1) is commits.Outcome.LANDED
    state = lake.state()
    assert lake.rows("main") == ROWS
    assert state.accepted == {H0: Accepted(1, CUT)}
    assert plan.waiting_hours(state) == [H1]
    assert [d.decision_id for d in state.decisions] == [f"{staged.wap_id}-{H0}"]


def test_what_happened_since_the_staging_is_noticed(lake: StreamLake, tmp_path: Path) -> None:
    staged = lake.stage(ROWS)
    lake.lake.discard(lake.name, staged)
    assert verdict(lake, staged) is plan.PublishCheck.GONE
    assert (
        verdict(lake, lake.stage(ROWS), lookback=frozenset({"replaced"})) is plan.PublishCheck.MOVED
    )
    mine, theirs = lake.stage(ROWS), lake.stage(ROWS)
    assert accept(lake, theirs, 1) is commits.Outcome.LANDED
    assert verdict(lake, mine) is plan.PublishCheck.OVERTAKEN
    assert plan.revision_now(lake.state(), H0, 0) == 1
    assert verdict(lake, mine, before=1) is plan.PublishCheck.PUBLISH, "as a restatement"
    # The hazard: the hour is accepted before it is sealed, and then cut a second time.
    unsealed = new_lake(tmp_path / "unsealed")
    assert verdict(unsealed, unsealed.stage(ROWS)) is plan.PublishCheck.UNSEALED


def test_an_hour_that_waited_longer_than_its_dead_letters_is_staged_again(lake: StreamLake) -> None:
    """The hazard: a suspended process publishes an hour whose staged dead letters alone expired."""
    staged, dead = lake.stage(ROWS[:2]), lake.stage_dead(ROWS[2:], "batch")
    table, day = lake.lake.load(lake.stream.dead_letters_table), timedelta(hours=24, minutes=1)
    removed = plan_dead_letters(table, lake.state(), (), "id", datetime.now(UTC) + day)
    assert dead.snapshot_id in removed.expire
    assert verdict(lake, staged, age=day) is plan.PublishCheck.GONE
    assert verdict(lake, staged, age=day / 3) is plan.PublishCheck.PUBLISH


def test_hours_without_records_are_accepted_together_and_once(lake: StreamLake) -> None:
    state = lake.state()
    assert plan.empty_hours(state, [H0, H1]) == [H1]
    publish = plan.plan_acceptance_of_empty(state, [H1], "id", NOW)
    assert publish is not None
    lake.land(publish, state)
    assert lake.state().accepted == {H1: Accepted(1, EMPTY)}
    assert plan.plan_acceptance_of_empty(lake.state(), [H1], "id", NOW) is None


def of_empty_hours(folder: Path, count: int) -> tuple[StreamLake, list[str]]:
    """A lake of so many sealed hours without records."""
    run = [shift(H0, i) for i in range(count)]
    opened = Timeline(H0, shift(H0, count), {0: 0}, sealed=dict.fromkeys(run, EMPTY))
    return new_lake(folder, timeline=opened), run


def test_hours_without_records_move_main_alone_until_it_lists_a_days(tmp_path: Path) -> None:
    lake, run = of_empty_hours(tmp_path, MAX_MAIN_ONLY_HOURS + 3)
    moved = []
    for hour in run:
        before = lake.state()
        publish = plan.plan_acceptance_of_empty(before, [hour], f"of {hour}", NOW)
        assert publish is not None and lake.publish(publish, before) is commits.Outcome.LANDED
        said = lake.state().branch_properties["main"][COMPLETE_THROUGH]
        assert complete_through(lake.state()) == said == hour
        moved.append({b for b, head in lake.state().heads.items() if head != before.heads[b]})
    assert moved == [{"main"}] * MAX_MAIN_ONLY_HOURS + [{*snapshots.BRANCHES}] + [{"main"}] * 2
    assert set(lake.state().accepted) == set(run)
    assert main_only_hours(lake.state().branch_properties) == tuple(run[-2:])


def test_a_long_run_of_hours_without_records_is_accepted_so_many_at_a_time(tmp_path: Path) -> None:
    lake, run = of_empty_hours(tmp_path, 2 * plan.ACCEPTED_AT_ONCE + 1)
    job = Job(new_environment(tmp_path), lake.stream, lake.lake, Broker().adapter)
    results = rebuild.Rebuilder(job, NO_SPARK).accept_empty(run)
    assert [r.hour for r in results] == run
    state = lake.state()
    assert plan.waiting_hours(state) == []
    waiting = json.loads(state.branch_properties["main"][DECISIONS])
    assert len(waiting) == 1, "expected those of the last commit alone to wait"
    rows = lake.ledger.history()
    assert [(r.hour, r.decision, r.revision) for r in rows] == [(h, "accepted", 1) for h in run]


def test_a_replaced_revision_is_tagged_where_it_is_for_a_week_from_now(lake: StreamLake) -> None:
    """The hazards: `main` may show the speed layer's rows of it; ages count from its making."""
    assert accept(lake, lake.stage(ROWS), 1) is commits.Outcome.LANDED
    state = lake.state()
    later = NOW + timedelta(days=30)
    for overrides, branch in (({}, "main"), ({H0: "speed"}, "batch")):
        chosen = replace(state, overrides=overrides)
        rebuilt = plan.Rebuilt(H0, Accepted(2, CUT), lake.stage(ROWS), (), HourAccount())
        [tag] = plan.plan_publish(chosen, [rebuilt], later).tags
        assert (tag.name, tag.snapshot_id) == (f"{H0}-r1", state.heads[branch])
        made = state.table.metadata.snapshot_by_id(tag.snapshot_id)
        assert made is not None
        ends = datetime.fromtimestamp((made.timestamp_ms + (tag.max_age_ms or 0)) / 1000, UTC)
        assert abs(ends - later - timedelta(days=7)) < timedelta(seconds=1)


def test_an_hour_with_gaps_is_tied_to_how_far_the_speed_layer_has_read_it(tmp_path: Path) -> None:
    """The hazard: the speed layer publishes a record that it had staged before Kafka lost it, and
    the hour that was built without it takes its place."""
    lake = new_lake(tmp_path, timeline=Timeline(H0, H1, {0: 3}, sealed={H0: CUT}))
    before = lake.state()

    def ties(gaps: dict[str, int] | None) -> bool:
        of_hour = {H0: (CUT, gaps)}
        return plan.may_yet_be_served(before, of_hour) != plan.may_yet_be_served(
            lake.state(), of_hour
        )

    lake.serve(ROWS[:2], {0: 2})
    assert ties({"compacted": 1}) and ties({"control": 5, "retention": 1})
    # No micro-batch can read offsets that the log shows to be no records, or that were not missing.
    assert not ties({"control": 5, "aborted": 2, "compacted": 0}) and not ties(None)
    before = lake.state()
    assert not ties({"compacted": 1})


# When a refused hour is rebuilt by itself, and when its refusal is said again.

FAR, BEFORE, HOUR, AFTER = "2026-11-20T20", "2026-11-21T02", "2026-11-21T03", "2026-11-21T04"
REFUSED_CUT, REFUSED_AT = Cut("t", {0: (10, 20)}), datetime(2026, 11, 21, 5, tzinfo=UTC)
STREAM, OF_HOUR = new_stream(), Accepted(1, REFUSED_CUT)


def state(**values: Any) -> State:
    return new_state(Timeline(FAR, AFTER, {0: 20}), {0: 25}, **values)


def basis(
    stream: config.Stream = STREAM, suite: bytes = b"", cut: Cut = REFUSED_CUT, **values: Any
) -> str:
    return plan.refusal_basis(stream, suite, state(**values), HOUR, cut)


def test_a_basis_is_that_of_its_inputs_and_of_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert basis() == basis(new_stream())
    # Of no account for how an hour is judged.
    assert basis() == basis(new_stream(speed={"trigger": "9 seconds"}, airflow={"owner": "me"}))
    assert basis() == basis(accepted={FAR: OF_HOUR})
    before = basis()
    monkeypatch.setattr(plan, "VERSION", "9.9.9")
    assert basis() != before


@pytest.mark.parametrize(
    "changed",
    [
        basis(new_stream(batch={"allow_gaps": ["retention"]})),
        basis(new_stream(event_time=None, start="latest")),
        basis(suite=b"expectations: []"),
        basis(cut=Cut("t", {0: (10, 21)})),
        basis(cut=Cut("other", {0: (10, 20)})),
        basis(accepted={BEFORE: OF_HOUR}),
        basis(accepted={BEFORE: replace(OF_HOUR, revision=2)}),
        basis(accepted={AFTER: OF_HOUR}),
        basis(overrides={BEFORE: "speed"}),
        basis(position=Position("t", {0: 15})),
    ],
)
def test_a_verdict_contains_its_inputs(changed: str) -> None:
    assert changed != basis()


def row(kind: Kind, id: str | None = None) -> LedgerRow:
    id = id or plan.decision_id("id", basis())
    return protocol.ledger.decision(HOUR, kind, 1, REFUSED_CUT, REFUSED_AT, id, reason="no")


def test_a_refusal_is_valid_and_written_once_while_its_inputs_are_unchanged() -> None:
    refusal = row("refused")
    assert plan.is_still_valid(
        refusal, basis(), REFUSED_AT + plan.REBUILD_AFTER - timedelta(seconds=1)
    )
    assert not plan.is_still_valid(refusal, basis(), REFUSED_AT + plan.REBUILD_AFTER)
    assert not plan.is_still_valid(refusal, basis(suite=b"another"), REFUSED_AT)
    assert not plan.is_still_valid(None, basis(), REFUSED_AT)
    assert not plan.should_record(refusal, basis(), 1, "no", REFUSED_AT)
    assert plan.should_record(refusal, basis(), 1, "another reason", REFUSED_AT)
    assert plan.should_record(refusal, basis(), 2, "no", REFUSED_AT)
    assert plan.should_record(refusal, basis(suite=b"another"), 1, "no", REFUSED_AT)
    assert plan.should_record(refusal, basis(), 1, "no", REFUSED_AT + plan.REBUILD_AFTER)
    assert plan.should_record(None, basis(), 1, "no", REFUSED_AT)


def test_a_refusal_is_the_newest_decision_and_an_acceptance_may_name_one() -> None:
    sealed, refused, accepted = row("sealed"), row("refused"), row("accepted")
    assert plan.last_refusal([sealed, refused], HOUR) is refused
    assert plan.last_refusal([sealed, refused, row("served")], HOUR) is refused
    assert plan.last_refusal([sealed, accepted, refused], HOUR) is refused
    assert plan.last_refusal([refused, accepted], HOUR) is None
    assert plan.last_refusal([sealed], HOUR) is None
    assert plan.last_refusal([sealed, refused], BEFORE) is None
    reason = plan.acceptance_reason(["quality: too few"], True, "known")
    assert reason == "accepted by choice: known; in spite of: quality: too few"
    assert plan.acceptance_reason([], True, "known") == "known"
    assert plan.acceptance_reason([], False, None) is None
