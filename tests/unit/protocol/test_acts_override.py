"""An operator's choice of the layer that serves an hour: complete or refused, honoured by all."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker
from conf_folders import said
from lakes import FIRST, StreamLake, at_next_commit, decide, new_lake, new_state

from anabranch.common.errors import ConfigurationError, Refused, Transient
from anabranch.iceberg import commits, files, manifests
from anabranch.job import Job
from anabranch.offsets.hours import Cut, Timeline, shift, start_of
from anabranch.operations.reports.acts import act_records, hours_words
from anabranch.operations.reports.status import HourSummary, hour_rows
from anabranch.protocol import apply, dead_letters, ledger_row
from anabranch.protocol.acts import Served, plan_override, serve_hour
from anabranch.protocol.ledger import decision, newest
from anabranch.protocol.merge import merge
from anabranch.protocol.state import Accepted, State
from batch_layer.plan import act_to_record

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
    letters = (dead_letters.waiting_speed(made.stage_dead(DEAD_SPEED, "speed"), now),)
    made.serve([*SPEED[0], *SPEED[1]], {0: 6}, dead_letters=letters)
    made.roll()
    accept(made, 1)
    return made


def accept(lake: StreamLake, revision: int) -> None:
    """The batch layer accepts or restates hour 0 as `Rebuilder`: an override holds for `main`."""
    state, accepted = lake.state(), Accepted(revision, CUTS[0])
    staged, dead = lake.stage(BATCH[0]), lake.stage_dead(DEAD_BATCH, "batch")
    letters = (dead_letters.waiting_batch(dead, H[0], revision, datetime.now(UTC)),)
    rest = replace(state.timeline, sealed={H[1]: CUTS[1]})
    publish = lake.accept(staged, H[0], accepted, timeline=rest, dead_letters=letters)
    if state.overrides.get(H[0], "batch") != "batch":
        publish = replace(publish, changes=(publish.changes[0], commits.Change("main")))
    lake.land(publish)
    lake.roll()


def choose(lake: StreamLake, choice: Any, i: int = 0, why: str = "the gate was wrong") -> Served:
    return serve_hour(lake.publisher, H[i], choice, why)


@pytest.mark.parametrize("table", ["rows", "dead letters"])
def test_a_layer_whose_files_are_gone_does_not_serve(lake: StreamLake, table: str) -> None:
    loaded = lake.table() if table == "rows" else lake.letters()
    paths = [*manifests.files_by_branch(loaded)["speed"][H[0]]]
    files.delete_files(loaded.io, paths)
    with pytest.raises(Refused, match=f"expected the speed layer's files .* {paths[0]}, which"):
        choose(lake, "speed")
    assert lake.rows("main") == BY_BATCH


def test_an_hour_is_given_to_the_speed_layer_and_back_in_one_swap_each(lake: StreamLake) -> None:
    assert (lake.rows("main"), lake.dead("main")) == (BY_BATCH, DEAD_BATCH)
    assert choose(lake, "speed") == Served(H[0], "speed", "speed", True)
    assert (lake.rows("main"), lake.dead("main")) == (BY_SPEED, DEAD_SPEED)
    assert (lake.rows("batch"), lake.dead("batch")) == (BATCH[0], DEAD_BATCH)
    assert lake.state().is_merged
    assert choose(lake, "auto", why="it was right") == Served(H[0], "batch", None, True)
    assert (lake.rows("main"), lake.dead("main")) == (BY_BATCH, DEAD_BATCH)
    decisions = [(r.decision, r.served, r.reason, r.revision) for r in lake.ledger.history()]
    reasons = (("speed", "the gate was wrong"), ("batch", "it was right"))
    assert decisions == [("served", *reason, 1) for reason in reasons]


def test_the_override_and_its_swap_land_in_one_commit(lake: StreamLake) -> None:
    """The hazard: in between, a merger undoes the swap, or `main` is not what it says."""
    before = {s.snapshot_id for s in lake.table().snapshots()}
    choose(lake, "speed")
    new = [s for s in lake.table().snapshots() if s.snapshot_id not in before]
    assert len({s.summary.get("anabranch.publish") for s in new if s.summary}) == 1
    assert merge(lake.lake, lake.stream, everything=True).swaps == []


def test_a_repeated_choice_changes_nothing_and_a_restatement_waits(lake: StreamLake) -> None:
    choose(lake, "speed")
    with lake.unmoved():
        assert not choose(lake, "speed").changed
        assert not choose(lake, "auto", 1).changed
    assert len(lake.ledger.history()) == 1
    # A restatement waits behind the override, and then serves.
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
    lake.change(commits.Change("speed"), timeline=replace(lake.state().timeline, skipped=(H[0],)))
    with lake.unmoved(), pytest.raises(Refused, match="batch keeps serving it"):
        choose(lake, "speed")
    assert lake.rows("main") == BY_BATCH
    assert lake.ledger.history() == []
    # Nor is an hour chosen that is not sealed, or never was.
    with pytest.raises(Transient, match="expected it to be sealed, found it open"):
        choose(lake, "speed", 2)
    with pytest.raises(ConfigurationError, match="where stream events begins"):
        serve_hour(lake.publisher, shift(FIRST, -1), "speed", "why")


def test_a_publish_that_comes_between_is_taken_in(lake: StreamLake) -> None:
    more, theirs = lake.stage([(H[2], 0, 6)]), lake.again()
    at_next_commit(lake.lake, lambda: lake.publish(lake.speed(more, {0: 7}), lake_=theirs))
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
    lake.roll(stale)
    assert lake.dead("main") == DEAD_BATCH


def test_an_hour_long_past_is_remembered_while_speed_is_chosen(lake: StreamLake) -> None:
    """The hazard: a batch branch that is lost afterwards would not show that it lacks the hour."""
    lake.ledger.record([decision(H[0], "accepted", 3, CUTS[0], datetime.now(UTC))])
    past = {"anabranch.accepted": "{}", "anabranch.settled-before": H[1]}
    lake.change(commits.Change("batch", properties=past), commits.Change("main"))
    assert lake.state().accepted == {}, "the hazard did not happen"
    choose(lake, "speed")
    assert lake.state().accepted == {H[0]: Accepted(3, CUTS[0])}
    assert lake.rows("main") == BY_SPEED


# What `hours` shows


def view(state: State, *rows: ledger_row.LedgerRow, at: str = H[2]) -> list[HourSummary]:
    return hour_rows(state, rows, start_of(at))


def test_every_hour_is_shown_up_to_the_running_one_whether_or_not_the_ledger_has_it() -> None:
    timeline = Timeline(FIRST, H[2], {0: 6}, sealed={H[1]: CUTS[1]})
    state = new_state(timeline, {0: 6}, accepted={H[0]: Accepted(2, CUTS[0])})
    assert [(v.hour, v.state, v.revision, v.served, v.cut) for v in view(state, at=H[3])] == [
        (H[0], "accepted", 2, "batch", CUTS[0].ranges),
        (H[1], "sealed", 0, "speed", CUTS[1].ranges),
        (H[2], "open", 0, "speed", None),
        (H[3], "open", 0, "speed", None),
    ]
    # The next hour of an adopted topic is open before its time.
    assert [v.hour for v in view(new_state(Timeline(H[1], H[2], {0: 0})), at=H[1])] == [H[1], H[2]]
    # The table shows whether an hour is accepted.
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
    job = Job(lake.environment, lake.stream, lake.lake, Broker().adapter)
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


# Each operator's act is in the ledger with user, host, time and reason; no other decision.

ACT = ledger_row.Act("restate", "ada", "ops-1", NOW, "late schema")


@pytest.fixture
def sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StreamLake:
    """Hour 0 sealed; the operator is ada."""
    monkeypatch.setenv("LOGNAME", "ada")
    made = new_lake(tmp_path, timeline=Timeline(FIRST, H[1], {0: 3}, sealed={FIRST: CUTS[0]}))
    made.publish(made.speed(made.stage([(FIRST, 0, o) for o in range(3)]), {0: 3}))
    return made


def test_an_act_is_the_same_waiting_and_read_back(sealed: StreamLake) -> None:
    row = decision(FIRST, "accepted", 2, CUTS[0], NOW, "one", served="batch", act=ACT)
    assert ledger_row.LedgerRow.from_waiting(row.as_waiting()).act == ACT
    sealed.ledger.record([row, decision(FIRST, "sealed", 0, CUTS[0], NOW, "zero")])
    assert [read.act for read in sealed.ledger.history() if read.decision_id == "one"] == [ACT]
    assert [read.decision_id for read in sealed.ledger.acts()] == ["one"]


def test_a_chosen_layer_is_recorded_with_its_operator_and_listed(
    sealed: StreamLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher, acts = sealed.publisher, ("history", "events", "--acts")
    assert "no operator's act yet" in run(sealed, monkeypatch, *acts)
    began = datetime.now(UTC)
    assert serve_hour(publisher, FIRST, "speed", "batch dropped too much").changed
    assert not serve_hour(publisher, FIRST, "speed", "again").changed
    [record] = act_records(sealed.ledger.acts())
    assert (record.act, record.user, record.why) == ("override", "ada", "batch dropped too much")
    assert record.host
    assert began <= record.at <= datetime.now(UTC)
    assert (record.hours, record.decisions) == ((FIRST,), {"served": 1})
    shown = said(*acts)
    for part in ("override", "ada", FIRST, "1 served", "batch dropped too much"):
        assert part in shown
    assert "no operator's act yet" in said(*acts, "--hour", H[1])
    assert "served" in said("history", "events", "--hour", FIRST)


@pytest.mark.parametrize(
    ("why", "found"),
    [
        # Python reads an argument that is no UTF-8 so. The ledger cannot store its row.
        ("caf\udce9", "--why: expected UTF-8 text, found 'caf.udce9'"),
        (" ", "--why: expected a reason, found none"),
    ],
    ids=["no UTF-8", "blank"],
)
def test_a_reason_that_is_no_text_is_not_published(lake: StreamLake, why: str, found: str) -> None:
    with lake.unmoved(), pytest.raises(ConfigurationError, match=found):
        choose(lake, "speed", why=why)
    lake.publisher.recover()


def test_an_act_over_many_hours_is_one_record(sealed: StreamLake) -> None:
    why = "the balance does not close"
    accepted = (
        decision(h, "accepted", 2, CUTS[0], NOW, h, act=ACT, reason=ACT.why) for h in (H[1], FIRST)
    )
    refused = decision(H[2], "refused", 2, CUTS[0], NOW, "r", act=ACT, reason=why)
    by_itself = decision(H[3], "accepted", 1, CUTS[0], NOW, "by itself")
    sealed.ledger.record([*accepted, refused, by_itself])
    [record] = act_records(sealed.ledger.acts())
    assert record.hours == (FIRST, H[1], H[2])
    assert record.decisions == {"accepted": 2, "refused": 1}
    assert record.reasons == (why,)
    assert hours_words(record) == f"{FIRST}..{H[2]} (3)"


def test_a_redelivery_does_not_change_the_ledger(sealed: StreamLake) -> None:
    sealed.ledger.record([decision(FIRST, "refused", 1, CUTS[0], NOW, "refused", reason="no")])
    before = newest(sealed.ledger.history())
    act = ledger_row.act_now("redeliver", "restored a backup")
    again = decision(FIRST, "redelivered", 0, None, act.at, reason="to lake", act=act)
    sealed.ledger.record([again])
    assert newest(sealed.ledger.history()) == before
    assert sealed.ledger.remarkable_hours() == {FIRST}
    assert [row.decision for row in sealed.ledger.history_since(0)] == ["refused"]
    assert [row.decision for row in sealed.ledger.acts()] == ["redelivered"]


def test_a_ledger_that_has_only_a_redelivery_of_an_hour_is_restored(sealed: StreamLake) -> None:
    sealed.ledger.record([decision(FIRST, "redelivered", 0, None, NOW, "only", act=ACT)])
    assert apply.restore_ledger(sealed.lake, sealed.stream) == 1
    assert [row.decision for row in sealed.ledger.history([FIRST])] == ["sealed"]


def test_an_hour_follows_from_an_act_that_batch_would_not_have_done() -> None:
    assert act_to_record(None, 1, ["a gap"], True) is None
    assert act_to_record(ACT, 0, [], False) is None
    assert act_to_record(ACT, 1, [], False) == ACT
    chosen = act_to_record(ACT, 0, ["a gap"], True)
    assert chosen is not None
    assert (chosen.name, chosen.user) == ("accept", "ada")
    # The current row of an hour has the act of its newest decision.
    first = decide(FIRST, "accepted", 2, CUTS[0], NOW, "a", act=ACT.as_dict())
    assert newest([first])[FIRST].act == ACT
    assert newest([first, decide(FIRST, "accepted", 3, CUTS[0], NOW, "b")])[FIRST].act is None
