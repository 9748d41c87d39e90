"""Undo of an import: the table is as before it, whatever is killed, unless anything rests on it."""

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from killed import kill_at
from lakes import FIRST, StreamLake
from test_importing import IMPORTED, LAST, NOW, OLDEST, ids, import_in, job_of, lake

from anabranch.cli import main
from anabranch.common.errors import Refused
from anabranch.common.fail_points import Step
from anabranch.iceberg import admin
from anabranch.iceberg.snapshots import heads
from anabranch.lifecycle.importing import undo
from anabranch.offsets.hours import Cut, hours_between, shift
from anabranch.operations.audit import audit
from anabranch.protocol import deliveries, ledger
from anabranch.protocol.acts import hold
from anabranch.protocol.decisions import decisions
from anabranch.protocol.ledger_row import HourAccount
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import Accepted
from anabranch.protocol.watermarks import complete_through
from serving_layer.changes import Token, poll
from serving_layer.egress.hour import cut_of, open_hour, places

__all__ = ["lake"]

OF_KAFKA = {FIRST: ["0-0", "0-1"]}


def undo_in(folder: Path) -> undo.Undone:
    job = job_of(folder)
    return undo.undo(job, Publisher(job.lake, job.stream), "a wrong time zone")


def undo_hour_by_hour(folder: Path) -> None:
    undo._HOURS_A_COMMIT = 1
    undo_in(folder)


def assert_as_before(lake: StreamLake) -> None:
    state = lake.state()
    assert (state.timeline.first, state.timeline.adoptions) == (FIRST, ())
    assert ids(lake, "main") == ids(lake, "speed") == OF_KAFKA and ids(lake, "batch") == {}
    assert complete_through(state) is None
    report = audit(job_of(lake.folder), None, with_kafka=True)
    assert report.agrees and not report.hours, report.disagreements
    facts = decisions(lake.lake, lake.stream, OLDEST)
    assert facts[-1].decision == "undone" and facts[-1].act is not None
    assert {one.query for one in facts} == {None}


def test_the_table_is_as_before_and_the_import_can_be_repeated(lake: StreamLake) -> None:
    import_in(lake.folder)
    assert undo_in(lake.folder) == undo.Undone(tuple(hours_between(OLDEST, FIRST)), 3)
    assert_as_before(lake)
    assert undo_in(lake.folder) == undo.Undone()
    # The second import may be another one.
    (lake.folder / "source/part/b.parquet").unlink()
    import_in(lake.folder)
    assert ids(lake, "main") == IMPORTED | OF_KAFKA and ids(lake, "batch") == IMPORTED
    rows = ledger.newest(lake.ledger.history())
    assert {rows[hour].revision for hour in hours_between(OLDEST, FIRST)} == {3}
    assert audit(job_of(lake.folder), None, with_kafka=True).agrees


@pytest.mark.parametrize("step", [Step.UNDO_DECIDED, Step.UNDO_PUBLISHED, Step.COMMIT_LANDED])
@pytest.mark.parametrize("number", [1, 2])
def test_an_undo_that_is_killed_is_continued(lake: StreamLake, step: Step, number: int) -> None:
    import_in(lake.folder)
    kill_at(f"{step.label}:{number}", undo_hour_by_hour, lake.folder)
    taken = number - (step is Step.UNDO_DECIDED)
    assert lake.state().timeline.first == shift(OLDEST, taken)
    undo_in(lake.folder)
    assert_as_before(lake)
    undone = [row.hour for row in lake.ledger.history() if row.decision == "undone"]
    assert undone == hours_between(OLDEST, FIRST)


def deliver(lake: StreamLake, hour: str) -> None:
    name = lake.stream.egress_table
    admin.create(lake.lake, name, deliveries.DELIVERIES_SCHEMA, (), admin.TABLE_PROPERTIES)
    row = deliveries.Delivery("d", hour, "partner", "p", 1, "batch", 1, 2, 1, "token", NOW)
    deliveries.record(lake.lake, name, row)


def accept_without_a_duplicate(lake: StreamLake) -> None:
    state, cut = lake.state(), Cut("t", {0: (0, 2)})
    account = HourAccount(duplicate=1)
    row = ledger.decision(FIRST, "accepted", 1, cut, NOW, served="batch", account=account)
    timeline = replace(state.timeline, open=shift(FIRST, 1), start={0: 2})
    staged = lake.stage([(FIRST, 0, 0)])
    lake.publish(lake.accept(staged, FIRST, Accepted(1, cut), decisions=(row,), timeline=timeline))


def hold_an_hour(lake: StreamLake) -> None:
    hold(lake.publisher, LAST, LAST, "a lawsuit")


REFUSALS = {
    f"egress delivered hour {OLDEST} to partner": lambda lake: deliver(lake, OLDEST),
    f"hour {FIRST} was accepted after the import without 1 duplicates": accept_without_a_duplicate,
    f"hour {LAST} is kept by": hold_an_hour,
}


@pytest.mark.parametrize("found", REFUSALS)
def test_what_rests_on_an_import_keeps_it(lake: StreamLake, found: str) -> None:
    import_in(lake.folder)
    REFUSALS[found](lake)
    before = heads(lake.table())
    with pytest.raises(Refused, match=f"on which nothing rests, found that {found}"):
        undo_in(lake.folder)
    with pytest.raises(Refused, match=found):
        undo.plan(job_of(lake.folder))
    assert heads(lake.table()) == before and ids(lake, "batch").items() >= IMPORTED.items()


def test_a_waiting_note_on_a_branch_is_no_decision(lake: StreamLake) -> None:
    import_in(lake.folder)
    for release in (False, True):
        hold(lake.publisher, OLDEST, OLDEST, "a lawsuit", release)
    assert any(row.decision == "released" for row in lake.state().decisions), "none waits"
    undo_in(lake.folder)
    row = ledger.newest(lake.ledger.history())[OLDEST]
    assert (row.decision, row.revision, row.cut is not None) == ("undone", 2, True)


def test_what_was_there_before_an_import_does_not_rest_on_it(lake: StreamLake) -> None:
    accept_without_a_duplicate(lake)
    lake.publisher.recover()
    done = import_in(lake.folder)
    assert undo_in(lake.folder).rows == done.good > 0


def test_a_consumer_loses_hours_and_gets_them_again(lake: StreamLake) -> None:
    """The hazard: egress reads an hour, and delivers it after it was taken back."""
    import_in(lake.folder)
    job = job_of(lake.folder)
    token = Token.decode(list(poll(job, Token("events")))[-1].token)
    undo_in(lake.folder)
    gone = list(poll(job, token))
    found = [(c.hour, c.kind, c.revision, c.rows) for c in gone]
    assert found == [(hour, "replaced", 2, 0) for hour in hours_between(OLDEST, FIRST)]
    # Each place that may have been sent is cleared.
    hour = open_hour(job, gone[0])
    assert hour is not None
    cut, identity = cut_of(job, hour)
    with hour.batches("target") as batches:
        cleared = [(identity.topic_id, row) for *_, row in places(batches.rows(), cut)]
    assert cleared == [("import", None)] * 2
    import_in(lake.folder)
    again = list(poll(job, Token.decode(gone[-1].token)))
    assert [(c.revision, c.rows) for c in again] == [(3, 2), (3, 1), (3, 0)]
    # A new consumer gets each hour once.
    assert len(list(poll(job, Token("events")))) == 3


@pytest.mark.parametrize("branch", ["main", "batch"])
def test_a_branch_that_is_set_back_brings_no_row_back(lake: StreamLake, branch: str) -> None:
    import_in(lake.folder)
    before = heads(lake.table())[branch]
    undo_in(lake.folder)
    lake.set_back(branch, before)
    lake.publisher.recover()
    assert ids(lake, "main") == OF_KAFKA and lake.state().timeline.first == FIRST
    import_in(lake.folder)
    assert ids(lake, "main") == IMPORTED | OF_KAFKA and ids(lake, "batch") == IMPORTED


def test_rows_that_main_alone_has_since_batch_was_set_back_are_taken_back(lake: StreamLake) -> None:
    before = heads(lake.table())["batch"]
    import_in(lake.folder)
    lake.set_back("batch", before)
    assert undo_in(lake.folder).rows == 3
    assert_as_before(lake)


def test_the_command_names_what_it_takes(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    import_in(lake.folder)
    monkeypatch.setattr("anabranch.cli.lifecycle.open_stream", lambda name: job_of(lake.folder))

    def call(*given: str) -> str:
        return CliRunner().invoke(main, ["import", "events", *given]).output

    span = f"3 imported hours back, {OLDEST} to {LAST}, with 3 rows"
    assert f"events: would take {span}" in call("--undo", "--dry-run")
    assert "--undo: expected no source" in call("--undo", "--from", "x")
    assert "expected --from [FORMAT:]PATH|TABLE, or --undo" in call("--hours", f"{OLDEST}..")
    assert f"events: took {span}" in call("--undo")
    assert "events: took 0 imported hours back, with 0 rows" in call("--undo")
