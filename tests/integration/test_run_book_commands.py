"""The commands of the operators' pages that need no Spark of their own, as printed, on one lake with all
states of an hour. The doctor's are in test_doctor.py, those that start something in tests/failures."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from commands import call
from expectations import entry
from run_books import printed, words
from world import SCHEMA, Make, World, event, hours_of_now, past_hour, spread

from anabranch.cli import main

PROVEN, REFUSED, WAITING = (past_hour(ago) for ago in (3, 2, 1))
hours_of_each_test = hours_of_now(globals(), PROVEN=3, REFUSED=2, WAITING=1)


def run(one: World, command: str, *more: str, expect: int = 0) -> str:
    """Run a command as an operator types it, with this world's configuration; its output."""
    here = {"ANABRANCH_CONF": str(one.folder)}
    done = CliRunner().invoke(main, [*words(command), *more], env=here)
    assert done.exit_code == expect, (
        f"{command}: {done.exit_code}\n{done.output}\n{done.exception!r}"
    )
    return str(done.stdout)


@pytest.fixture
def night(world: Make) -> World:
    """An hour to be accepted, with a duplicate and a malformed record; one that its gate refuses;
    one that waits; and records of the running one. Read by the speed layer, and not sealed."""
    one = world()
    level = entry("expect_column_values_to_be_between", column="level", max_value=50)
    one.expect(level | {"severity": "critical"})
    one.topic()
    proven = spread(PROVEN, 20, "proven")
    malformed = (0, proven[-1][1], b"{not json")
    bad = [(p, at, event(f"bad-{at}", at, level=99)) for p, at, _ in spread(REFUSED, 20, "bad")]
    for values in ([*proven, proven[3], malformed], bad, spread(WAITING, 20, "waiting")):
        one.send(values)
    one.send_now(4, "now")
    name = one.name
    doctor = run(one, printed("anabranch doctor STREAM", STREAM=name), "--output", "json")
    assert "apply" in json.loads(doctor)["next"]
    assert "created table" in run(one, printed("anabranch apply STREAM", STREAM=name))
    one.speed()
    return one


def test_an_operators_commands_to_an_hours_acceptance(night: World, tmp_path: Path) -> None:
    one, name = night, night.name

    def explained(hour: str) -> str:
        return run(one, printed("anabranch explain STREAM HOUR", STREAM=name, HOUR=hour))

    def shown(command: str) -> Any:
        return json.loads(run(one, command, "--output", "json"))

    # Open and ended, sealed and waiting.
    running = past_hour(0)
    assert f"{running} of {name} is open" in explained(running)
    assert "has ended and is not sealed yet" in explained(PROVEN)
    assert "ended, to be sealed" in run(one, printed("anabranch status STREAM", STREAM=name))
    sealed = run(one, printed("anabranch batch STREAM --seal-only", STREAM=name))
    assert f"sealed {PROVEN}" in sealed
    assert "is sealed and waits for the batch layer" in explained(WAITING)
    backlog = run(one, printed("anabranch doctor STREAM --limit 120", STREAM=name))
    assert "stream.backlog" in backlog

    # Accepted, and refused.
    assert [r.decision for r in one.batch(PROVEN)] == ["accepted"]
    assert [r.decision for r in one.batch(REFUSED)] == ["refused"]
    assert "is accepted as revision 1" in explained(PROVEN)
    assert "is refused; the speed layer still serves it" in explained(REFUSED)
    assert f"anabranch batch {name} --hour {REFUSED}" in explained(REFUSED)
    listed = run(one, printed("anabranch hours STREAM", STREAM=name)).splitlines()[1:]
    states = {line.split()[0]: line.split()[1] for line in listed}
    states_of = [states[hour] for hour in (PROVEN, REFUSED, WAITING, running)]
    assert states_of == ["accepted", "refused", "sealed", "open"]
    hours = json.loads(run(one, printed("anabranch hours STREAM --output json", STREAM=name)))
    assert [h["counts"]["duplicate"] for h in hours if h["hour"] == PROVEN] == [1]
    assert "expect_column_values_to_be_between" in run(
        one, printed("anabranch history STREAM --hour HOUR", STREAM=name, HOUR=REFUSED)
    )

    # Their content.
    rows = shown(printed("anabranch explain STREAM HOUR --rows", STREAM=name, HOUR=PROVEN))
    assert rows["duplicates"]["found"] == 1
    assert "not json" in run(one, printed("anabranch dead-letters STREAM", STREAM=name))
    of_hour = printed("anabranch dead-letters STREAM --hours A..B", STREAM=name, A=PROVEN, B=PROVEN)
    assert "not json" in run(one, of_hour)
    compared = rows["difference"]
    assert (compared["speed_rows"], compared["batch_rows"], compared["unexplained"]) == (21, 20, {})
    audit = printed("anabranch audit STREAM --hours A..B", STREAM=name, A=PROVEN, B=WAITING)
    assert shown(audit)["agrees"]

    # Commands that change who serves an hour, and what is left behind.
    run(one, f"anabranch override {name} {PROVEN} --layer speed --why rule")
    values = {"STREAM": name, "HOUR": PROVEN, "TEXT": "'it was right'"}
    lift = printed("anabranch override STREAM HOUR --layer auto --why TEXT", **values)
    assert "served by batch, by the rule" in run(one, lift)
    assert run(one, printed("anabranch merge STREAM", STREAM=name))
    assert run(one, printed("anabranch maintain STREAM", STREAM=name))
    assert "last run: all steps completed" in run(
        one, printed("anabranch maintain STREAM --dry-run", STREAM=name)
    )
    assert Path(run(one, printed("anabranch jars")).strip()).is_dir()
    assert len(one.contents()) == 20 + 20 + 20 + 4


def test_a_deployment_that_is_rolled_back_and_a_catalog_that_lost_its_tables(night: World) -> None:
    one, name = night, night.name
    before = one.contents()
    one.configure(schema=f"{SCHEMA}, guild STRING")
    assert "added column guild" in run(one, printed("anabranch apply STREAM", STREAM=name))
    one.reconfigure(schema=SCHEMA)
    with pytest.raises(Exception, match="expected column guild"):
        one.speed()
    run(one, printed("anabranch apply STREAM --rolled-back", STREAM=name))
    one.send_now(2, "later")
    one.speed()
    assert len(one.contents()) == len(before) + 2

    stream = one.job.stream
    for table in (stream.table, stream.dead_letters_table, stream.hours_table):
        one.lake.catalog.drop_table(table)
    assert "--register" in call(one, "apply", name, expect=2)
    run(one, printed("anabranch apply STREAM --register", STREAM=name))
    one.reopen()
    assert len(one.contents()) == len(before) + 2


@pytest.mark.full
def test_a_branch_without_its_state_is_recreated_from_main(night: World) -> None:
    one, sql = night, night.spark.sql
    one.batch(PROVEN)
    before = one.contents()
    table = {"NAMESPACE": one.name, "NAME": "events"}
    listed = sql(printed("SELECT * FROM lake.NAMESPACE.NAME.refs", **table)).collect()
    refs = {r["name"]: r["snapshot_id"] for r in listed}
    assert {"main", "speed", "batch"} <= refs.keys()
    sql(printed("ALTER TABLE lake.NAMESPACE.NAME DROP BRANCH speed", **table))
    assert "created branch speed" in run(one, printed("anabranch apply STREAM", STREAM=one.name))
    edges = sql(f"SELECT snapshot_id, parent_id FROM lake.{one.name}.events.snapshots").collect()
    parents = {r["snapshot_id"]: r["parent_id"] for r in edges}
    back = {"ID": str(parents[refs["main"]]), **table}
    sql(printed("CALL lake.system.rollback_to_snapshot('NAMESPACE.NAME', ID)", **back))
    assert one.contents() != before, "the acceptance was taken back"
    run(one, printed("anabranch merge STREAM", STREAM=one.name))
    assert one.contents() == before
    one.send_now(1, "later")
    one.speed()
    assert len(one.contents()) == len(before) + 1
