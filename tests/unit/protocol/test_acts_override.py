"""An operator's choice of the layer that serves an hour: complete or refused, honoured by all."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker
from conf_folders import said
from lakes import FIRST, StreamLake, decide, new_environment, new_lake, new_state

from anabranch.common.errors import ConfigurationError, Refused, Transient
from anabranch.iceberg.commits import Change, Outcome
from anabranch.iceberg.files import delete_files
from anabranch.iceberg.manifests import files_by_branch
from anabranch.job import Job
from anabranch.offsets.hours import Cut, Timeline, shift, start_of
from anabranch.operations.reports.status import HourSummary, hour_rows
from anabranch.protocol import ledger
from anabranch.protocol.acts import Served, plan_override, serve_hour
from anabranch.protocol.dead_letters import roll_forward, waiting_batch, waiting_speed
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.merge import merge
from anabranch.protocol.state import Accepted, State

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
H = [shift(FIRST, i) for i in range(4)]
CUTS = [Cut("t", {0: (3 * i, 3 * i + 3)}) for i in range(4)]
SPEED = {i: [(H[i], 0, 3 * i + o) for o in range(3)] for i in range(2)}
BATCH = {0: SPEED[0][:2]}
BY_BATCH, BY_SPEED = [*BATCH[0], *SPEED[1]], [*SPEED[0], *SPEED[1]]
DEAD_SPEED, DEAD_BATCH = [(H[0], 0, 90)], [(H[0], 0, 91)]


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """Hour 0 accepted, 1 sealed, 2 open; the layers disagree about hour 0, dead letters too."""
    opened = Timeline(FIRST, H[2], {0: 6}, sealed={H[0]: CUTS[0], H[1]: CUTS[1]})
    made, now = new_lake(tmp_path, timeline=opened), datetime.now(UTC)
    letters = (waiting_speed(made.stage_dead(DEAD_SPEED, "speed"), now),)
    made.serve([*SPEED[0], *SPEED[1]], {0: 6}, dead_letters=letters)
    made.roll()
    accept(made, 1)
    return made


def accept(lake: StreamLake, revision: int) -> None:
    """The batch layer accepts or restates hour 0 as `Rebuilder`: an override holds for `main`."""
    state, accepted = lake.state(), Accepted(revision, CUTS[0])
    staged, dead = lake.stage(BATCH[0]), lake.stage_dead(DEAD_BATCH, "batch")
    letters = (waiting_batch(dead, H[0], revision, datetime.now(UTC)),)
    rest = replace(state.timeline, sealed={H[1]: CUTS[1]})
    publish = lake.accept(staged, H[0], accepted, timeline=rest, dead_letters=letters)
    if state.overrides.get(H[0], "batch") != "batch":
        publish = replace(publish, changes=(publish.changes[0], Change("main")))
    lake.land(publish)
    lake.roll()


def choose(lake: StreamLake, choice: Any, i: int = 0, why: str = "the gate was wrong") -> Served:
    return serve_hour(lake.publisher, H[i], choice, why)


@pytest.mark.parametrize("table", ["rows", "dead letters"])
def test_a_layer_whose_files_are_gone_does_not_serve(lake: StreamLake, table: str) -> None:
    name = lake.name if table == "rows" else lake.stream.dead_letters_table
    loaded = lake.lake.load(name)
    paths = [*files_by_branch(loaded)["speed"][H[0]]]
    delete_files(loaded.io, paths)
    with pytest.raises(Refused, match=f"expected the speed layer's files .* {paths[0]}, which"):
        choose(lake, "speed")
    assert lake.rows("main") == BY_BATCH


def history(lake: StreamLake) -> list[LedgerRow]:
    return lake.ledger.history()


def test_an_hour_is_given_to_the_speed_layer_and_back_in_one_swap_each(lake: StreamLake) -> None:
    assert (lake.rows("main"), lake.dead("main")) == (BY_BATCH, DEAD_BATCH)
    assert choose(lake, "speed") == Served(H[0], "speed", "speed", True)
    assert (lake.rows("main"), lake.dead("main")) == (BY_SPEED, DEAD_SPEED)
    assert (lake.rows("batch"), lake.dead("batch")) == (BATCH[0], DEAD_BATCH)
    assert lake.state().is_merged
    assert choose(lake, "auto", why="it was right") == Served(H[0], "batch", None, True)
    assert (lake.rows("main"), lake.dead("main")) == (BY_BATCH, DEAD_BATCH)
    decisions = [(r.decision, r.served, r.reason, r.revision) for r in history(lake)]
    expected = [
        ("served", "speed", "the gate was wrong", 1),
        ("served", "batch", "it was right", 1),
    ]
    assert decisions == expected


def test_the_override_and_its_swap_land_in_one_commit(lake: StreamLake) -> None:
    """The hazard: in between, a merger undoes the swap, or `main` is not what it says."""
    before = {s.snapshot_id for s in lake.table().snapshots()}
    choose(lake, "speed")
    new = [s for s in lake.table().snapshots() if s.snapshot_id not in before]
    assert len({s.summary.get("anabranch.publish") for s in new if s.summary}) == 1
    assert merge(lake.lake, lake.stream, everything=True).swaps == []


def test_repeating_a_choice_changes_nothing(lake: StreamLake) -> None:
    choose(lake, "speed")
    heads = lake.state().heads
    assert not choose(lake, "speed").changed
    assert not choose(lake, "auto", 1).changed
    assert lake.state().heads == heads
    assert len(history(lake)) == 1


def test_a_restatement_waits_behind_an_override_and_then_serves(lake: StreamLake) -> None:
    choose(lake, "speed")
    accept(lake, 2)
    assert (lake.rows("main"), lake.dead("main")) == (BY_SPEED, DEAD_SPEED)
    assert merge(lake.lake, lake.stream, everything=True).swaps == []
    choose(lake, "auto")
    assert (lake.rows("main"), lake.dead("main")) == (BY_BATCH, DEAD_BATCH)


def test_an_hour_chosen_for_speed_before_it_is_accepted_stays(lake: StreamLake) -> None:
    choose(lake, "speed", 1)
    state = lake.state()
    assert state.served_by(H[1]) == "speed"
    accepted = replace(state, accepted=state.accepted | {H[1]: Accepted(1, CUTS[1])})
    assert accepted.served_by(H[1]) == "speed"


@pytest.mark.parametrize(
    ("values", "choice", "reason"),
    [
        ({"offsets": {0: 2}}, "speed", "the speed layer has not read it to its end"),
        ({"skipped": (H[0],)}, "speed", "the speed layer skipped it, wholly or in part"),
        ({"covered_from": H[1]}, "speed", "the speed layer skipped it, wholly or in part"),
        ({"accepted": {}, "sealed": {H[0]: CUTS[0]}}, "batch", "the batch layer has not accepted it"),
    ],
)  # fmt: skip
def test_a_layer_without_it_is_refused(values: dict[str, Any], choice: Any, reason: str) -> None:
    timeline = Timeline(FIRST, H[2], {0: 6}, sealed=values.pop("sealed", {}))
    offsets = values.pop("offsets", {0: 6})
    accepted = values.pop("accepted", {H[0]: Accepted(1, CUTS[0])})
    state = new_state(replace(timeline, **values), offsets, accepted=accepted)
    found = f"expected the {choice} layer's rows to cover its cut, found that {reason}"
    with pytest.raises(Refused, match=found):
        plan_override(state, H[0], choice)


def test_a_refused_override_leaves_the_hour_whole(lake: StreamLake) -> None:
    state = lake.state()
    skipped = replace(state.timeline, skipped=(H[0],))
    lake.change(Change("speed"), timeline=skipped)
    heads = lake.state().heads
    with pytest.raises(Refused, match="batch keeps serving it"):
        choose(lake, "speed")
    assert lake.state().heads == heads
    assert lake.rows("main") == BY_BATCH
    assert history(lake) == []


def test_an_hour_that_is_not_sealed_or_never_was_is_not_chosen(lake: StreamLake) -> None:
    with pytest.raises(Transient, match="expected it to be sealed, found it open"):
        choose(lake, "speed", 2)
    with pytest.raises(ConfigurationError, match="where stream events begins"):
        serve_hour(lake.publisher, shift(FIRST, -1), "speed", "why")


def test_a_publish_that_comes_between_is_taken_in(lake: StreamLake) -> None:
    real, more = lake.lake.catalog.commit_table, lake.stage([(H[2], 0, 6)])

    def commit_table(*args: Any) -> Any:
        lake.lake.catalog.commit_table = real  # type: ignore[method-assign]
        assert lake.publish(lake.speed(more, {0: 7}), lake_=lake.again()) is Outcome.LANDED
        return real(*args)

    lake.lake.catalog.commit_table = commit_table  # type: ignore[method-assign]
    choose(lake, "speed")
    assert lake.rows("main") == [*BY_SPEED, (H[2], 0, 6)]


def test_letters_of_a_swap_that_a_crash_left_are_rolled_forward(lake: StreamLake) -> None:
    def die(*_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anabranch.protocol.acts.dead_letters.roll_forward", die)
        with pytest.raises(KeyboardInterrupt):
            choose(lake, "speed")
    served = (lake.rows("main"), lake.dead("main"))
    assert served == (BY_SPEED, DEAD_BATCH), "the hazard did not happen"
    stale = lake.state()
    for _ in range(2):
        lake.roll()
        assert lake.dead("main") == DEAD_SPEED
    choose(lake, "auto")
    # A process that read the first swap before the second must not undo the second.
    roll_forward(lake.lake, lake.stream.dead_letters_table, stale)
    assert lake.dead("main") == DEAD_BATCH


def test_an_hour_long_past_is_remembered_while_speed_is_chosen(lake: StreamLake) -> None:
    """The hazard: a batch branch that is lost afterwards would not show that it lacks the hour."""
    row = ledger.decision(H[0], "accepted", 3, CUTS[0], datetime.now(UTC))
    lake.ledger.record([row])
    past = {"anabranch.accepted": "{}", "anabranch.settled-before": H[1]}
    lake.change(Change("batch", properties=past), Change("main"))
    assert lake.state().accepted == {}, "the hazard did not happen"
    choose(lake, "speed")
    assert lake.state().accepted == {H[0]: Accepted(3, CUTS[0])}
    assert lake.rows("main") == BY_SPEED


# What `hours` shows


def view(state: State, *rows: LedgerRow, at: str = H[2]) -> list[HourSummary]:
    return hour_rows(state, rows, start_of(at))


def test_every_hour_is_shown_up_to_the_running_one_whether_or_not_the_ledger_has_it() -> None:
    timeline = Timeline(FIRST, H[2], {0: 6}, sealed={H[1]: CUTS[1]})
    state = new_state(timeline, {0: 6}, accepted={H[0]: Accepted(2, CUTS[0])})
    shown = [(v.hour, v.state, v.revision, v.served, v.cut) for v in view(state, at=H[3])]
    assert shown == [
        (H[0], "accepted", 2, "batch", CUTS[0].ranges),
        (H[1], "sealed", 0, "speed", CUTS[1].ranges),
        (H[2], "open", 0, "speed", None),
        (H[3], "open", 0, "speed", None),
    ]


def test_the_next_hour_of_an_adopted_topic_is_open_before_its_time() -> None:
    assert [v.hour for v in view(new_state(Timeline(H[1], H[2], {0: 0})), at=H[1])] == [H[1], H[2]]


def test_the_table_shows_whether_an_hour_is_accepted() -> None:
    state = new_state(Timeline(FIRST, H[2], {0: 6}, sealed={H[0]: CUTS[0], H[1]: CUTS[1]}), {0: 6})
    rows = [decide(H[0], "accepted", 1, None, NOW), decide(H[1], "refused", 1, None, NOW)]
    assert [v.state for v in view(state, *rows)] == ["sealed", "refused", "open"]


def test_the_reason_of_an_override_is_shown_while_it_is_in_force() -> None:
    rows = [
        decide(H[0], "refused", 1, None, NOW, reason="the gate"),
        decide(H[0], "served", 0, None, NOW, reason="why not", served="speed"),
    ]
    timeline = Timeline(FIRST, H[1], {0: 3}, sealed={H[0]: CUTS[0]})
    state = new_state(timeline, {0: 3}, overrides={H[0]: "speed"})
    (first, _) = view(state, *rows, at=H[1])
    assert first.state == "refused"
    assert first.reason == "served by speed by choice: why not; the gate"
    (first, _) = view(replace(state, overrides={}), *rows, at=H[1])
    assert first.reason == "the gate"


# The command


def run(lake: StreamLake, monkeypatch: pytest.MonkeyPatch, *arguments: str, expect: int = 0) -> str:
    job = Job(new_environment(lake.folder), lake.stream, lake.lake, Broker().adapter)
    monkeypatch.setattr("anabranch.job.open_job", lambda stream, conf: job)
    return said(*arguments, expect=expect)


def test_the_command_prints_and_refuses(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = ("override", "events", H[0], "--layer", "speed", "--why", "the gate was wrong")
    assert run(lake, monkeypatch, *chosen) == f"events: {H[0]} is now served by speed, by choice\n"
    assert run(lake, monkeypatch, *chosen) == f"events: {H[0]} is served by speed, by choice\n"
    lifted = ("override", "events", H[0], "--layer", "auto", "--why", "right", "--output", "json")
    assert json.loads(run(lake, monkeypatch, *lifted)) == {
        "stream": "events", "hour": H[0], "served": "batch", "override": None, "changed": True,
    }  # fmt: skip
    batch = ("override", "events", H[1], "--layer", "batch", "--why", "why")
    assert "the batch layer has not accepted it" in run(lake, monkeypatch, *batch, expect=1)
    found = "found 'yesterday'"
    assert found in run(lake, monkeypatch, "override", "events", "yesterday", *batch[3:], expect=2)


def test_merge_and_hours_show_the_choice(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(lake, "speed")
    assert f"{H[0]} is served by speed by choice" in run(lake, monkeypatch, "merge", "events")
    found = json.loads(run(lake, monkeypatch, "merge", "events", "--output", "json"))["overrides"]
    assert found == {H[0]: "speed"}
    first = json.loads(run(lake, monkeypatch, "hours", "events", "--output", "json"))[0]
    assert first["served"] == "speed"
    assert first["reason"] == "served by speed by choice: the gate was wrong"
