"""A real Airflow catches up three hours by itself; one is refused, and restated by clearing its
task. It runs a group's hour by one rebuild, and a day's DAG once the day's hours are accepted."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from expectations import entry
from scheduler import Scheduler, running_airflow
from world import Make, past_hour, spread

from anabranch.offsets.hours import start_of

DAGS = Path(__file__).resolve().parents[2] / "dags"


def dags_folder(folder: Path, name: str, text: str) -> Path:
    """A folder with the product's DAGs and another one."""
    folder.mkdir()
    for file in (DAGS / ".airflowignore", *DAGS.glob("*.py")):
        (folder / file.name).symlink_to(file)
    (folder / name).write_text(text)
    return folder


def level_below(maximum: int) -> dict[str, Any]:
    return entry("expect_column_values_to_be_between", column="level", max_value=maximum)


@pytest.mark.timeout(3600)
def test_hours_catch_up_and_a_refused_one_too(world: Make, tmp_path: Path) -> None:
    one, hours = world(partitions=2), [past_hour(3), past_hour(2), past_hour(1)]
    for hour, count in zip(hours, (20, 60, 30), strict=True):
        one.send(spread(hour, count, hour))
    before = past_hour(4)
    one.configure(airflow={"start": before})
    # The second hour alone has levels above 40.
    one.expect(level_below(40))
    one.serve()
    dag = f"anabranch_hourly__{one.name}"
    with running_airflow(tmp_path / "airflow", ANABRANCH_CONF=str(one.folder)) as airflow:

        def ended() -> bool:
            states = airflow.runs(dag)
            return all(states.get(h) in ("success", "failed") for h in (before, *hours))

        def revisions() -> list[int]:
            return [one.state.accepted[h].revision for h in hours]

        airflow.wait_for(ended, "three runs to end")
        # The hour before the stream's first has nothing to do.
        tasks = airflow.tasks(dag, before)
        skipped = {task for task, state in tasks.items() if state == "skipped"}
        assert skipped == {"seal", "rebuild", "verify", "backlog"}
        states = airflow.runs(dag)
        assert states[before] == "success"
        # The third hour is accepted; its run's last task says that the second waits.
        assert [states[h] for h in hours] == ["success", "failed", "failed"]
        last = airflow.tasks(dag, hours[2])
        assert {task for task, state in last.items() if state != "success"} == {"backlog"}
        assert f"{one.name}: 1 from {hours[1]}" in airflow.task_log(dag, "backlog")
        assert airflow.tasks(dag, hours[1]) == {
            "grace": "success", "seal": "success", "rebuild": "failed", "merge": "success",
            "verify": "upstream_failed", "backlog": "upstream_failed",
        }  # fmt: skip
        log = airflow.task_log(dag, "rebuild")
        assert "quality: expect_column_values_to_be_between(level)" in log
        refused = airflow.xcom(dag, "rebuild", hours[1], "refused")
        assert (refused["hour"], refused["revision"]) == (hours[1], 1)
        assert refused["reason"].startswith("quality: expect_column_values_to_be_between(level)")
        rows = [row for row in one.job.ledger.history() if row.decision == "accepted"]
        accepted = [row.hour for row in rows if row.hour in hours]
        assert accepted == [hours[0], hours[2]]
        assert one.contents() == one.acknowledged()
        # What an operator does: fix the suite, and clear the task.
        one.expect(level_below(100))
        airflow.clear(dag, "rebuild", hours[1])
        airflow.wait_for(lambda: airflow.runs(dag)[hours[1]] == "success", "its acceptance")
        assert one.state.accepted[hours[1]].revision == 1
        airflow.clear(dag, "backlog", hours[2])
        airflow.wait_for(lambda: airflow.runs(dag)[hours[2]] == "success", "no hour to wait")
        # And an hour that is accepted is restated by the same gesture.
        airflow.clear(dag, "rebuild", hours[0])
        airflow.wait_for(lambda: one.state.accepted[hours[0]].revision == 2, "its restatement")
        airflow.wait_for(lambda: airflow.runs(dag)[hours[0]] == "success", "its run to end")
        # A backfill restates just its hours, each time to the same rows.
        for again in (2, 3):
            airflow.backfill(dag, hours[1], hours[2])
            airflow.wait_for(lambda n=again: revisions() == [2, n, n], "two hours to be restated")
            airflow.wait_for(lambda: {*airflow.runs(dag).values()} == {"success"}, "its runs")
            airflow.wait_for(lambda: not airflow.is_backfilling(), "the backfill to end")
            assert one.contents() == one.acknowledged()
        found = [e for e in airflow.events() if e["hour"] in hours]
        events = [(e["hour"], e["revision"], e["rows"]) for e in found]
    first, second, third = hours
    assert events == [
        (first, 1, 20), (third, 1, 30), (second, 1, 60), (first, 2, 20),
        (second, 2, 60), (third, 2, 30), (second, 3, 60), (third, 3, 30),
    ]  # fmt: skip
    assert {h: one.state.served_by(h) for h in hours} == dict.fromkeys(hours, "batch")
    assert one.contents() == one.acknowledged()


_CONSUMER = """
from datetime import datetime, timezone
from airflow.sdk import DAG, PartitionedAssetTimetable, task
from anabranch_assets import group_hours_asset

schedule = PartitionedAssetTimetable(assets=group_hours_asset("small"))
with DAG("consumer", schedule=schedule, start_date=datetime(2026, 1, 1, tzinfo=timezone.utc), max_active_runs=1):

    @task
    def count(dag_run=None):
        import anabranch

        tables = {name: anabranch.open(name, only_accepted=True) for name in NAMES}
        rows = {"columns": ["event_id"], "hours": dag_run.partition_key}
        return {name: table.arrow(**rows).num_rows for name, table in tables.items()}

    count()
"""


def counted(airflow: Scheduler) -> list[tuple[str, dict[str, int]]]:
    """The hour and the result of each run of the consumer that has ended, oldest first."""
    rows = airflow.select(
        "SELECT r.partition_key, x.value FROM dag_run r JOIN xcom x ON r.id = x.dag_run_id WHERE "
        "r.dag_id = 'consumer' AND x.key = 'return_value' AND r.state = 'success' ORDER BY r.id"
    )
    return [(str(key), value) for key, value in rows]


@pytest.mark.timeout(1800)
def test_a_groups_streams_fail_each_alone(world: Make, tmp_path: Path) -> None:
    hour, before = past_hour(1), past_hour(2)
    one = world(group="small", airflow={"start": hour})
    refused = world(beside=one, group="small", airflow={"start": hour})
    later = world(beside=one, group="small", airflow={"start": hour})
    for stream in (one, refused):
        stream.topic()
        stream.send(spread(before, 4, "before"))
        stream.send(spread(hour, 20, stream.name))
    # Its first hour is the one that is open.
    later.topic()
    later.send_now(5, "now")
    refused.expect(level_below(10))
    for stream in (one, refused, later):
        stream.apply()
    dag, asset = "anabranch_hourly_group__small", "anabranch_group_hours__small"
    consumer = _CONSUMER.replace("NAMES", repr([one.name, refused.name]))
    folder = dags_folder(tmp_path / "dags", "consumer.py", consumer)
    own = {"ANABRANCH_CONF": str(one.folder), "AIRFLOW__CORE__DAGS_FOLDER": str(folder)}
    with running_airflow(tmp_path / "airflow", **own) as airflow:
        airflow.wait_for(lambda: airflow.runs(dag).get(hour) == "failed", "the group's run to end")
        assert airflow.mapped(dag, "stream", hour) == {
            one.name: "success", refused.name: "failed", later.name: "skipped",
        }  # fmt: skip
        tasks = airflow.tasks(dag, hour)
        assert (tasks["rebuild"], tasks["accepted"]) == ("success", "upstream_failed")
        reason = airflow.xcom(dag, "stream", hour, "refused")
        assert (reason["hour"], reason["revision"]) == (hour, 1)
        assert reason["reason"].startswith("quality: expect_column_values_to_be_between(level)")
        assert airflow.task_log(dag, "rebuild").count("running ") == 1
        assert one.state.accepted[hour].revision == 1
        assert not refused.state.is_accepted(hour)
        # What an operator does: fix the suite, and clear the task of this stream alone.
        refused.expect(level_below(100))
        airflow.clear_mapped(dag, "stream", hour, refused.name)
        airflow.wait_for(lambda: refused.state.is_accepted(hour), "the refused hour's acceptance")

        def state_of_refused() -> str:
            return str(airflow.mapped(dag, "stream", hour)[refused.name])

        airflow.wait_for(lambda: state_of_refused() == "success", "its task to end")
        assert one.state.accepted[hour].revision == refused.state.accepted[hour].revision == 1
        assert {e["hour"] for e in airflow.events()} == {hour}
        events = {
            name: airflow.partition_events(f"anabranch_partitions__{name}")
            for name in (one.name, refused.name)
        }
        assert events == {one.name: [hour], refused.name: [hour]}
        # The streams' own DAGs run by hand only.
        assert airflow.runs(f"anabranch_hourly__{one.name}") == {}
        # The group is not complete: its third stream has no hour yet.
        airflow.wait_for(lambda: airflow.tasks(dag, hour)["accepted"] == "skipped", "no event")
        assert airflow.partition_events(asset) == []
        later.configure(group="later")
        # The run accepted the hour before as well.
        assert one.state.is_accepted(before) and refused.state.is_accepted(before)
        airflow.clear(dag, "accepted", hour)
        airflow.wait_for(lambda: len(counted(airflow)) == 1, "the consumer to read the hour")
        assert airflow.partition_events(asset) == [hour]
        rows = {one.name: 20, refused.name: 20}
        assert counted(airflow) == [(hour, rows)]
        # A restated hour: its event once more.
        airflow.clear_mapped(dag, "stream", hour, one.name)
        airflow.wait_for(lambda: len(counted(airflow)) == 2, "the restated hour to be read")
        assert one.state.accepted[hour].revision == 2
        assert airflow.partition_events(asset) == [hour, hour]
        assert counted(airflow)[-1] == (hour, rows)
    for stream in (one, refused):
        assert stream.contents() == stream.acknowledged()


_DAYS = """
from datetime import datetime, timedelta, timezone
from airflow.sdk import DAG, CronDataIntervalTimetable, task
from anabranch_assets import day_schedule
from anabranch_operators import VerifyOperator

with DAG(
    "verify", schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC"), catchup=True, max_active_runs=4,
    start_date=datetime({first}, tzinfo=timezone.utc), end_date=datetime({last}, tzinfo=timezone.utc),
    params={{"hour": None}}, default_args={{"retries": 8, "retry_delay": timedelta(seconds=2)}},
) as verify:
    VerifyOperator(task_id="verify", stream="{stream}")

with DAG("daily", schedule=day_schedule("{stream}"), start_date=datetime(2026, 1, 1, tzinfo=timezone.utc)) as daily:

    @task
    def summarize(dag_run=None):
        return dag_run.partition_key

    summarize()
"""


@pytest.mark.timeout(1800)
def test_a_days_dag_starts_with_its_last_hour(world: Make, tmp_path: Path) -> None:
    """The schedule is the product's `day_schedule`; the product's last task announces hours."""
    one = world()
    day = (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%d")
    hours = [f"{day}T{hour:02}" for hour in range(24)]
    one.topic()
    for hour, count in ((hours[0], 4), (hours[7], 30), (hours[23], 4)):
        one.send(spread(hour, count, hour))
    # The eighth hour alone has levels above 10.
    one.expect(level_below(10))
    one.apply()
    one.batch()
    assert [h for h in hours if not one.state.is_accepted(h)] == [hours[7]]
    folder = tmp_path / "dags"
    folder.mkdir()
    ignored = (DAGS / ".airflowignore").read_text("utf-8").split()
    for name in (*ignored, ".airflowignore"):
        (folder / name).symlink_to(DAGS / name)
    begin = start_of(hours[0])
    ends = (begin, begin + timedelta(hours=23))
    first, last = (f"{at.year}, {at.month}, {at.day}, {at.hour}" for at in ends)
    (folder / "days.py").write_text(_DAYS.format(stream=one.name, first=first, last=last))
    own = {"ANABRANCH_CONF": str(one.folder), "AIRFLOW__CORE__DAGS_FOLDER": str(folder)}
    with running_airflow(tmp_path / "airflow", **own) as airflow:
        partitions = f"anabranch_partitions__{one.name}"

        def ended() -> bool:
            states = airflow.runs("verify")
            return set(states) == set(hours) and set(states.values()) <= {"success", "failed"}

        airflow.wait_for(ended, "an hourly run for each hour of the day to end")
        assert [h for h, state in airflow.runs("verify").items() if state == "failed"] == [hours[7]]
        assert sorted(airflow.partition_events(partitions)) == [h for h in hours if h != hours[7]]
        # 23 of 24: the day's DAG has not started.
        assert airflow.partition_runs("daily") == []
        one.expect(level_below(100))
        assert [r.decision for r in one.batch(hours[7])] == ["accepted"]
        airflow.clear("verify", "verify", hours[7])
        runs = [(day, "success")]
        airflow.wait_for(lambda: airflow.partition_runs("daily") == runs, "the day's run")
        # A restated hour of a whole day: the day once more.
        [again] = one.batch(hours[0], restate=True)
        assert (again.decision, again.revision) == ("accepted", 2)
        airflow.clear("verify", "verify", hours[0])
        airflow.wait_for(lambda: airflow.partition_runs("daily") == runs * 2, "the second run")
        assert airflow.partition_events(f"anabranch_restated_days__{one.name}") == [day]
        events = [(e["hour"], e["revision"]) for e in airflow.events()]
    assert sorted(events) == sorted([*((h, 1) for h in hours), (hours[0], 2)])
    assert one.contents() == one.acknowledged()
