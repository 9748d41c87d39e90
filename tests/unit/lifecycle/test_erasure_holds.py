"""Erasures and holds: neither undoes the other, whichever comes first."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lakes import FIRST
from people import NEXT, ORDER, People, job_of

from anabranch.cli import main
from anabranch.common.errors import Refused
from anabranch.iceberg.snapshots import heads
from anabranch.lifecycle.erasure import run
from anabranch.offsets.hours import hour_of, shift
from anabranch.operations.reports.acts import act_records
from anabranch.protocol.acts import Held, hold
from anabranch.protocol.publisher import Publisher


def publisher_of(people: People) -> Publisher:
    return people.lake.publisher


def hold_in(people: People, first: str, last: str | None = None, release: bool = False) -> Held:
    return hold(publisher_of(people), first, last or first, "case 7", release)


@pytest.fixture
def people(tmp_path: Path) -> People:
    return People(tmp_path)


@pytest.mark.parametrize("hour", [FIRST, NEXT])
def test_records_of_held_hours_are_not_erased(people: People, hour: str) -> None:
    """One of them is accepted, the other one only the speed layer has."""
    hold_in(people, hour)
    before, history = heads(people.lake.table()), people.lake.ledger.history()
    found = rf"found some of hour {hour}, kept by .*: case 7; release the hours"
    with pytest.raises(Refused, match=found):
        people.erase()
    assert (heads(people.lake.table()), people.lake.ledger.history()) == (before, history)
    assert people.lake.state().erasures.all == ()
    hold_in(people, hour, release=True)
    assert people.erase().left is None


def test_dead_letters_of_held_hours_are_not_erased(people: People) -> None:
    hold_in(people, FIRST)
    with pytest.raises(Refused, match=f"found some of hour {FIRST}"):
        people.erase(replace(ORDER, values=frozenset({"annabel"})))


def test_archived_records_of_held_hours_are_not_erased(tmp_path: Path) -> None:
    """The refusal covers records found by a word of the archive alone, and those of rows."""
    people = People(tmp_path, archive=True)
    hold_in(people, FIRST)
    with pytest.raises(Refused, match=f"found some of hour {FIRST}"):
        people.erase(replace(ORDER, values=frozenset({"again"})))
    assert people.erase(replace(ORDER, values=frozenset({"dora"}))).left is None


def test_holds_of_hours_without_such_records_refuse_nothing(people: People) -> None:
    hold_in(people, shift(FIRST, -48), shift(FIRST, -1))
    hold_in(people, shift(hour_of(people.lake.lake.clock.now()), 9), "9999-12-31T23")
    assert people.erase().removed.rows == 4


def test_records_that_are_yet_to_be_read_may_be_of_a_held_hour(people: People) -> None:
    now = hour_of(people.lake.lake.clock.now())
    hold_in(people, now)
    job = job_of(people.lake.environment, people.lake.lake, records=13)
    found = r"found records that are yet to be read, which may be of hours kept by .*case 7"
    with pytest.raises(Refused, match=found):
        run.erase(job, publisher_of(people), ORDER)
    # Once all of them were read, and none is of it:
    assert people.erase().left is None


def test_an_operator_erases_in_spite_of_a_hold(people: People) -> None:
    hold_in(people, FIRST)
    done = people.erase(replace(ORDER, in_spite="order of the court"))
    assert (done.removed.rows, done.left) == (4, None)
    acts = [(act.act, act.why) for act in act_records(people.lake.ledger.acts())]
    why = "case 4711; although hours are kept: order of the court"
    assert acts == [("hold", "case 7"), ("erase", why)]
    # The same command finds nothing to do; a request again is one of its own.
    assert people.erase().was_done
    people._speed([(NEXT, 12)], 13, None)
    hold_in(people, NEXT)
    job = job_of(people.lake.environment, people.lake.lake, records=13)
    with pytest.raises(Refused, match=f"found some of hour {NEXT}"):
        run.erase(job, publisher_of(people), replace(ORDER, again=True))


def test_a_hold_beside_a_request_wins(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    require: Callable[..., None] = run._require_unheld
    seen = list[str]()

    def meanwhile(*given: Any) -> None:
        require(*given)
        seen.append("decided")
        if len(seen) == 1:
            hold_in(people, NEXT)

    monkeypatch.setattr(run, "_require_unheld", meanwhile)
    with pytest.raises(Refused, match=f"found some of hour {NEXT}"):
        people.erase()
    # The hazard: the request had been decided without it.
    assert seen == ["decided"]
    assert people.lake.state().erasures.all == () and people.names("main").count("anna") == 4


def test_a_hold_does_not_stop_an_erasure_that_was_requested_before(people: People) -> None:
    job = people.job
    one = run._record_request(job, publisher_of(people), ORDER)
    assert hold_in(people, FIRST).erasures == (one.id,)
    assert hold_in(people, FIRST, release=True).erasures == ()
    hold_in(people, FIRST)
    assert people.erase().left is None
    assert "anna" not in people.names("main")
    assert hold_in(people, NEXT).erasures == ()


def test_the_commands(people: People, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("anabranch.job.open_job", lambda *_: people.job)
    hold_in(people, FIRST)
    values = tmp_path / "values"
    values.write_text("anna\n")
    given = ["erase", "events", "--by", "id", "--values", str(values), "--why", "case 4711"]

    def output(*arguments: str) -> str:
        return CliRunner().invoke(main, arguments, catch_exceptions=False).output

    kept = f"1 of these hours are kept by operators, {FIRST} to {FIRST}: refused without "
    assert f"{kept}--in-spite-of-hold TEXT" in output(*given, "--dry-run")
    refused = CliRunner().invoke(main, given)
    assert (refused.exit_code, f"found some of hour {FIRST}" in refused.output) == (1, True)
    order = replace(ORDER, in_spite="yes", until=timedelta(0))
    run._record_request(people.job, publisher_of(people), order)
    expected = "was requested before and is not done: these hours lose its records"
    assert expected in output("hold", "events", NEXT, "--why", "case 8")
    expected = "removed 4 rows and 2 dead letters of 2 hours"
    assert expected in output(*given, "--in-spite-of-hold", "yes")
