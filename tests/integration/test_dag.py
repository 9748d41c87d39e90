"""The Airflow DAG under `dag.test()`, against the real services, in a process of its own."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lineage_receiver import LineageReceiver, running_receiver
from programs import output_of
from world import Make, past_hour, spread

from anabranch.offsets.hours import end_of

ROOT = Path(__file__).resolve().parents[2]

_SCRIPT = """
import importlib.util, sys
from datetime import datetime
dag_file, dag_id, at = sys.argv[1:]
sys.path.insert(0, dag_file.rpartition("/")[0])
spec = importlib.util.spec_from_file_location("anabranch_hourly", dag_file)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
run = getattr(module, dag_id).test(logical_date=datetime.fromisoformat(at))
print("STATES", run.state, {t.task_id: str(t.state) for t in run.get_task_instances()})
sys.exit(0 if run.state == "success" else 1)
"""


@pytest.fixture
def airflow(tmp_path: Path) -> dict[str, str]:
    home = tmp_path / "airflow"
    environment = os.environ | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "ANABRANCH_COMMAND": f"{sys.executable} -m anabranch.cli",
    }
    home.mkdir()
    output_of(sys.executable, "-m", "airflow", "db", "migrate", env=environment)
    return environment


@pytest.fixture
def receiver() -> Iterator[LineageReceiver]:
    with running_receiver() as one:
        yield one


@pytest.mark.full
def test_the_hourly_dag_seals_rebuilds_merges_verifies_and_delivers(
    world: Make, airflow: dict[str, str], receiver: LineageReceiver
) -> None:
    one = world()
    export = one.folder / "export"
    one.configure(egress=[{"name": "export", "root": f"file://{export}"}])
    one.set_environment(lineage={"url": receiver.url})
    one.topic()
    hour = past_hour(1)
    one.begin(spread(hour, 20, "e"))
    command = [sys.executable, "-c", _SCRIPT, str(ROOT / "dags" / "anabranch_hourly.py")]
    # A run after an interval is named by its end: the data interval is the hour before.
    command += [f"anabranch_hourly__{one.name}", end_of(hour).isoformat()]
    environment = airflow | {"ANABRANCH_CONF": str(one.folder)}
    assert "STATES success" in output_of(*command, env=environment, seconds=400)
    assert one.state.is_accepted(hour)
    assert one.contents() == one.acknowledged()
    assert receiver.problems == []
    assert [event["eventType"] for event in receiver.events] == ["START", "COMPLETE"]
    # Airflow has no OpenLineage provider here, which would name the task's run.
    assert "parent" not in receiver.events[-1]["run"]["facets"]
    assert (export / f"date={hour[:10]}" / f"hour={hour[11:]}" / "_SUCCESS").exists()
