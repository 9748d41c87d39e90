"""The Airflow DAG under `dag.test()`, against the real services, in a process of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from dag_runs import new_airflow, run_hourly
from lineage_receiver import LineageReceiver, running_receiver
from world import Make, past_hour, spread

from anabranch.offsets.hours import end_of


@pytest.fixture
def receiver() -> Iterator[LineageReceiver]:
    with running_receiver() as one:
        yield one


@pytest.mark.full
def test_the_hourly_dag_seals_rebuilds_merges_verifies_and_delivers(
    world: Make, tmp_path: Path, receiver: LineageReceiver
) -> None:
    one = world()
    export = one.folder / "export"
    one.configure(egress=[{"name": "export", "root": f"file://{export}"}])
    one.set_environment(lineage={"url": receiver.url})
    one.topic()
    hour = past_hour(1)
    one.begin(spread(hour, 20, "e"))
    environment = new_airflow(tmp_path / "airflow", ANABRANCH_CONF=str(one.folder))
    assert "STATES success" in run_hourly(one.name, end_of(hour).isoformat(), environment)
    assert one.state.is_accepted(hour)
    assert one.contents() == one.acknowledged()
    assert receiver.problems == []
    assert [event["eventType"] for event in receiver.events] == ["START", "COMPLETE"]
    # Airflow has no OpenLineage provider here, which would name the task's run.
    assert "parent" not in receiver.events[-1]["run"]["facets"]
    assert (export / f"date={hour[:10]}" / f"hour={hour[11:]}" / "_SUCCESS").exists()
