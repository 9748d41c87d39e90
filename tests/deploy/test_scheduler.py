"""A real Airflow catches up three hours by itself; one is refused, and restated by clearing its task."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from postgres import running_postgres
from scheduler import Scheduler, running_airflow
from world import World, past_hour, spread

PATIENCE = 600


def wait_for(airflow: Scheduler, condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"expected {what} within {PATIENCE} s, found:\n{airflow.log[-6000:]}"
        time.sleep(1)


def level_below(maximum: int) -> dict[str, Any]:
    return {"type": "expect_column_values_to_be_between", "kwargs": {"column": "level", "max_value": maximum}}


@pytest.mark.timeout(3600)
def test_three_hours_catch_up_oldest_first_and_a_refused_one_is_restated_by_clearing_its_task(
    world: Callable[..., World], tmp_path: Path
) -> None:
    one, hours = world(), [past_hour(3), past_hour(2), past_hour(1)]
    one.topic()
    for hour, count in zip(hours, (20, 60, 30), strict=True):
        one.send(spread(hour, count, hour))
    before = past_hour(4)
    one.configure(airflow={"start": before})
    # The second hour alone has levels above 40.
    one.expect(level_below(40))
    one.apply()
    one.speed()
    dag = f"anabranch_hourly__{one.name}"
    with (
        running_postgres() as postgres,
        running_airflow(tmp_path / "airflow", postgres, ANABRANCH_CONF=str(one.folder)) as airflow,
    ):

        def ended() -> bool:
            states = airflow.runs(dag)
            return {before, *hours} <= set(states) and all(states[h] in ("success", "failed") for h in (before, *hours))

        def revisions() -> list[int]:
            return [one.state.accepted[h].revision for h in hours]

        wait_for(airflow, ended, "three runs to end")
        # The hour before the stream's first has nothing to do.
        tasks = airflow.tasks(dag, before)
        assert {t for t, state in tasks.items() if state == "skipped"} == {"seal", "rebuild", "verify"}
        states = airflow.runs(dag)
        assert states[before] == "success"
        assert [states[h] for h in hours] == ["success", "failed", "success"]
        assert airflow.tasks(dag, hours[1]) == {
            "grace": "success", "seal": "success", "rebuild": "failed", "merge": "success", "verify": "upstream_failed",
        }  # fmt: skip
        assert "quality: expect_column_values_to_be_between(level)" in airflow.task_log(dag, "rebuild")
        refused = airflow.xcom(dag, "rebuild", hours[1], "refused")
        assert (refused["hour"], refused["revision"]) == (hours[1], 1)
        assert refused["reason"].startswith("quality: expect_column_values_to_be_between(level)")
        accepted = [row.hour for row in one.job.ledger.history() if row.decision == "accepted" and row.hour in hours]
        assert accepted == [hours[0], hours[2]]
        assert one.contents() == one.acknowledged()
        # What an operator does: mend the suite, and clear the task.
        one.expect(level_below(100))
        airflow.clear(dag, "rebuild", hours[1])
        wait_for(airflow, lambda: airflow.runs(dag)[hours[1]] == "success", "the refused hour to be accepted")
        assert one.state.accepted[hours[1]].revision == 1
        # And an hour that is accepted is restated by the same gesture.
        airflow.clear(dag, "rebuild", hours[0])
        wait_for(airflow, lambda: one.state.accepted[hours[0]].revision == 2, "the first hour to be restated")
        wait_for(airflow, lambda: airflow.runs(dag)[hours[0]] == "success", "its run to end")
        # A backfill restates just its hours, each time to the same rows.
        for again in (2, 3):
            airflow.backfill(dag, hours[1], hours[2])
            wait_for(airflow, lambda n=again: revisions() == [2, n, n], "two hours to be restated")
            wait_for(airflow, lambda: set(airflow.runs(dag).values()) == {"success"}, "its runs to end")
            wait_for(airflow, lambda: not airflow.is_backfilling(), "the backfill to end")
            assert one.contents() == one.acknowledged()
        events = [(e["hour"], e["revision"], e["rows"]) for e in airflow.events() if e["hour"] in hours]
    first, second, third = hours
    assert events == [
        (first, 1, 20), (third, 1, 30), (second, 1, 60), (first, 2, 20),
        (second, 2, 60), (third, 2, 30), (second, 3, 60), (third, 3, 30),
    ]  # fmt: skip
    assert {h: one.state.served_by(h) for h in hours} == dict.fromkeys(hours, "batch")
    assert one.contents() == one.acknowledged()
