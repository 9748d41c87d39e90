"""Holds: hours that an operator keeps do not expire, and the ledger has the operator's act."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from conf_folders import said
from killed import kill_at
from lakes import new_environment, new_lake, new_stream
from test_retention import FIRST, LATER, H, Past, accepted_state, due_hours

from anabranch.common.errors import ConfigurationError, Refused
from anabranch.common.fail_points import Step
from anabranch.iceberg.commits import Outcome
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.snapshots import BRANCHES
from anabranch.operations.reports.acts import act_records
from anabranch.protocol import archive
from anabranch.protocol.acts import hold, plan_hold
from anabranch.protocol.ledger_row import Act
from anabranch.protocol.publish import to_commit
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.registers import HOLDS, Expired, Hold, Holds, parse_hours, span_words
from anabranch.protocol.retention import plan_due, plan_expire, plan_expire_letters

AT = datetime(2026, 11, 21, tzinfo=UTC)
ACT = Act("hold", "ada", "host", AT, "case 7")


def one(first: str, last: str, why: str = "case 7") -> Hold:
    return Hold(first, last, "ada@host", AT, why)


def test_a_held_hour_does_not_expire() -> None:
    holds = Holds((one(H[3], H[5]), one(H[5], H[6], "case 8")), AT)
    due = plan_due(accepted_state(holds=holds), timedelta(days=2), LATER, 1, {})
    assert list(due.kept) == H[3:7]
    assert due.kept[H[5]] == "kept by ada@host since 2026-11-21 00:00:00 UTC: case 7"
    assert due.leaving == (*H[:3], *H[7:60])
    assert due_hours(accepted_state(), LATER) == tuple(H[:60])


def test_a_release_leaves_what_lies_on_either_side() -> None:
    holds = Holds().plus(one(H[1], H[8])).plus(one(H[20], H[21]))
    left = holds.without(H[3], H[4], AT)
    assert [(h.first, h.last) for h in left.holds] == [(H[1], H[2]), (H[5], H[8]), (H[20], H[21])]
    assert left.without(H[0], H[30], AT).holds == ()
    assert [h for h in H[:10] if left.of(h) is not None] == [*H[1:3], *H[5:9]]
    expected = f"{H[1]}..{H[2]}: kept by ada@host since 2026-11-21 00:00:00 UTC: case 7"
    assert span_words(left.holds)[0] == expected


def test_the_newest_record_of_any_branch_counts() -> None:
    held = Holds((one(H[1], H[1]),), AT)
    released = held.without(H[1], H[1], AT + timedelta(hours=1))
    said = [{HOLDS: held.to_json()}, {HOLDS: released.to_json()}, {}]
    assert Holds.of_branches(said) == Holds.of_branches(said[::-1]) == released
    assert Holds.from_properties({HOLDS: held.to_json()}) == held
    assert Holds.of_branches([{}]) == Holds()


def test_what_a_hold_with_or_without_an_end_and_a_release_change() -> None:
    state = accepted_state(expired=Expired(H[10], ()))
    held = plan_hold(state, H[12], H[14], ACT, False)
    assert held is not None and held.holds == (one(H[12], H[14]),)
    assert plan_hold(replace(state, holds=held), H[12], H[14], ACT, False) is None
    assert plan_hold(state, H[12], H[14], ACT, True) is None
    with pytest.raises(Refused, match=f"found that {H[9]} has expired"):
        plan_hold(state, H[9], H[12], ACT, False)
    state = accepted_state(expired=Expired(H[3], ((H[1], H[1]),)))
    held = plan_hold(state, H[3], "9999-12-31T23", ACT, release=False)
    assert held is not None and held.of("2300-01-01T00") is not None
    for first, gone in ((H[1], H[2]), (H[2], H[2])):
        found = f"expected hours whose rows are kept, found that {gone} has expired"
        with pytest.raises(Refused, match=found):
            plan_hold(state, first, "9999-12-31T23", ACT, release=False)
    with pytest.raises(Refused, match=f"found that {H[2]} has expired"):
        plan_hold(state, H[1], H[2], ACT, release=False)
    assert plan_hold(state, H[1], H[1], ACT, release=False) is not None


@pytest.mark.parametrize(
    ("text", "hours"),
    [
        ("2026-11-01T03", (H[3], H[3])),
        ("2026-11-01T03..2026-11-01T05", (H[3], H[5])),
        ("2026-11-01", (FIRST, H[23])),
    ],
)
def test_hours_as_an_operator_writes_them(text: str, hours: tuple[str, str]) -> None:
    assert parse_hours(text) == hours


@pytest.mark.parametrize(
    "text", ["yesterday", "2026-11", "2026-11-01T03..", "2026-11-01..2026-11-02", "2026-11-1T3"]
)
def test_hours_that_are_none(text: str) -> None:
    with pytest.raises(ConfigurationError, match="HOURS: expected an hour such as"):
        parse_hours(text)


def test_hours_that_are_held_stay_until_they_are_released(tmp_path: Path) -> None:
    past = Past(tmp_path, 48 + 8, "2 days")
    publisher = past.lake.publisher
    first, last = past.hours[2], past.hours[4]
    assert hold(publisher, first, last, "case 7").changed
    assert not hold(publisher, first, last, "case 7").changed
    gone = past.maintain().rows
    assert set(gone.kept) == set(past.hours[2:5]) and set(gone.hours).isdisjoint(gone.kept)
    assert past.hours_of("main")[:3] == past.hours[2:5]
    # A branch that is set back to before it loses no hold.
    before = past.lake.state().heads["main"]
    hold(publisher, past.hours[50], past.hours[50], "case 8")
    past.lake.set_back("main", before)
    assert len(past.lake.state().holds.holds) == 2
    released = hold(publisher, first, last, "closed", release=True)
    assert [h.first for h in released.holds] == [past.hours[50]]
    assert past.maintain().rows.hours == tuple(past.hours[2:5])
    acts = [(act.act, act.why) for act in act_records(past.lake.ledger.acts())]
    assert acts == [("hold", "case 7"), ("hold", "case 8"), ("release", "closed")]
    # They decide nothing about an hour.
    assert {row.decision for row in past.lake.ledger.history([past.hours[50]])} == {"accepted"}


def test_an_expiry_that_was_decided_before_a_hold_does_not_land(tmp_path: Path) -> None:
    past = Past(tmp_path, 48 + 8, "2 days")
    state, now = past.lake.state(), datetime.now(UTC)
    publish = plan_expire(state, past.hours[:3], (), {}, "", "expire", now)
    hold(past.lake.publisher, past.hours[1], past.hours[1], "case 7")
    assert past.lake.lake.land(state.table, to_commit(state, publish, now)) is None
    assert all(past.hours[1] in past.hours_of(b) for b in BRANCHES if b != "speed")


def test_letters_and_archived_records_stay_under_a_hold(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    name, letters = lake.add_archive(), lake.stream.dead_letters_table
    state, now = lake.state(), datetime.now(UTC)
    of_letters, of_archive = lake.lake.load(letters), lake.lake.load(name)
    commit = plan_expire_letters(of_letters, state, [FIRST], {FIRST}, "letters", now, 240)
    other = archive.plan_remove(of_archive, (FIRST,), "archive", now)
    assert commit is not None and other is not None
    hold(lake.publisher, FIRST, FIRST, "case 7")
    assert lake.lake.commit(of_letters, commit) is Outcome.REFUSED
    assert lake.lake.commit(of_archive, other) is Outcome.REFUSED


def hold_in(folder: Path) -> None:
    lake = Lake(new_environment(folder))
    hold(Publisher(lake, new_stream()), FIRST, FIRST, "case 7")


@pytest.mark.parametrize(
    "step", [Step.HOLD_PUBLISHED, Step.HOLD_MOVED], ids=lambda step: step.label
)
def test_a_killed_hold_is_completed_by_the_same_command(tmp_path: Path, step: Step) -> None:
    lake = new_lake(tmp_path)
    letters, state = lake.lake.load(lake.stream.dead_letters_table), lake.state()
    now = datetime.now(UTC)
    commit = plan_expire_letters(letters, state, [FIRST], {FIRST}, "letters", now, 240)
    assert commit is not None
    kill_at(step.label, hold_in, tmp_path)
    # The hazard: the branches have the hold, the ledger does not.
    assert lake.state().holds.of(FIRST) is not None and act_records(lake.ledger.acts()) == []
    hold_in(tmp_path)
    assert len(lake.state().holds.holds) == 1
    assert lake.lake.commit(letters, commit) is Outcome.REFUSED
    lake.publisher.recover()
    assert [(act.act, act.why) for act in act_records(lake.ledger.acts())] == [("hold", "case 7")]


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    past = Past(tmp_path, 30, "2 days")
    monkeypatch.setattr("anabranch.job.open_job", lambda *_: past.job)
    hold = ("hold", "events", past.hours[3], "--why")
    held = said(*hold, "case 7")
    assert f"events: {past.hours[3]}: kept by " in held and "case 7" in held
    answer = json.loads(said(*hold, "case 7", "--output", "json"))
    assert (answer["changed"], [h["first"] for h in answer["holds"]]) == (False, [past.hours[3]])
    released = said(*hold, "closed", "--release")
    assert released.strip().endswith("events: no hours are kept beyond their time")
