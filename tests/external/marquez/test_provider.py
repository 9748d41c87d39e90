"""Our DAGs name a task's try and its DAG run as Airflow's own OpenLineage provider reports them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lineage_receiver import running_receiver
from programs import output_of

pytest.importorskip(
    "airflow.providers.openlineage", reason="make test-suite WHAT=marquez brings the provider"
)

DAGS = Path(__file__).resolve().parents[3] / "dags"

_SCRIPT = """
import importlib, json, sys, types
from datetime import datetime, timezone
sys.path.insert(0, sys.argv[1])
import anabranch_operators as ours
from airflow.providers.openlineage.plugins.adapter import OpenLineageAdapter
runs = []
for logical, cleared, attempt, mapped in (
    (datetime(2026, 11, 21, 4, tzinfo=timezone.utc), 0, 1, -1),
    (datetime(2026, 11, 21, 5, 0, 0, 123456, tzinfo=timezone.utc), 2, 3, 4),
    (None, 0, 1, -1),
):
    after = datetime(2026, 11, 21, 6, 7, 8, tzinfo=timezone.utc)
    run = types.SimpleNamespace(logical_date=logical, run_after=after, clear_number=cleared, conf={}, run_id="r")
    task = types.SimpleNamespace(
        dag_id="anabranch_hourly__events", task_id="rebuild", try_number=attempt, map_index=mapped, dag_run=run,
        get_template_context=lambda run=run: {"dag_run": run},
    )
    parent, root = ours.lineage_options(task)
    runs.append([parent, root])
    at = logical or after
    assert parent.endswith(OpenLineageAdapter.build_task_instance_run_id(
        dag_id=task.dag_id, task_id=task.task_id, try_number=attempt, logical_date=at, map_index=mapped))
print("RUNS" + json.dumps(runs))
"""


def test_a_rebuild_names_the_runs_of_airflows_provider(tmp_path: Path) -> None:
    environment = os.environ | {
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__OPENLINEAGE__NAMESPACE": "team/a",
    }
    printed = output_of(sys.executable, "-c", _SCRIPT, DAGS, env=environment)
    reported = json.loads(printed.rpartition("RUNS")[2])
    assert len(reported) == 3
    for parent, root in reported:
        assert parent.startswith("--parent-run=team/a/anabranch_hourly__events.rebuild/")
        assert root.startswith("--root-run=team/a/anabranch_hourly__events/")


_RUN = """
import importlib.util, sys
from datetime import datetime
dag_file, dag_id, at = sys.argv[1:]
sys.path.insert(0, dag_file.rpartition("/")[0])
spec = importlib.util.spec_from_file_location("anabranch_hourly", dag_file)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
run = getattr(module, dag_id).test(logical_date=datetime.fromisoformat(at))
print("STATES", {t.task_id: str(t.state) for t in run.get_task_instances()})
"""


def test_the_parent_of_a_rebuild_is_the_run_that_the_provider_reports(tmp_path: Path) -> None:
    """A real DAG run with the provider on; the command is one that stores its arguments."""
    reported, command = tmp_path / "reported", tmp_path / "command"
    explained = {"state": "accepted", "revision": 1, "counts": {"good": 1}, "snapshot_id": 1}
    command.write_text(f"#!/bin/sh\necho \"$@\" >> {reported}\necho '{json.dumps(explained)}'\n")
    command.chmod(0o755)
    conf = tmp_path / "conf" / "streams"
    conf.mkdir(parents=True)
    (conf / "events.yaml").write_text("batch: {grace: 0 seconds}\n")
    home = tmp_path / "airflow"
    home.mkdir()
    with running_receiver(is_strict=False) as receiver:
        environment = os.environ | {
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(DAGS),
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
            "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps({"type": "http", "url": receiver.url}),
            "AIRFLOW__OPENLINEAGE__NAMESPACE": "team/a",
            "ANABRANCH_COMMAND": str(command),
            "ANABRANCH_CONF": str(tmp_path / "conf"),
        }
        migrate = (sys.executable, "-m", "airflow", "db", "migrate")
        output_of(*migrate, env=environment, cwd=tmp_path)
        run = [
            sys.executable, "-c", _RUN, str(DAGS / "anabranch_hourly.py"),
            "anabranch_hourly__events",
        ]  # fmt: skip
        done = subprocess.run(
            [*run, "2026-11-21T04:00:00+00:00"], env=environment, cwd=tmp_path, capture_output=True,
            text=True, timeout=200,
        )  # fmt: skip
    assert "'rebuild': 'success'" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    [rebuild] = [line for line in reported.read_text().splitlines() if "--parent-run" in line]
    given = dict(word.lstrip("-").split("=", 1) for word in rebuild.split() if "=" in word)
    jobs = [(event["job"], event["run"]["runId"]) for event in receiver.events]
    known = {f"{job['namespace']}/{job['name']}/{run_id}" for job, run_id in jobs}
    assert given["parent-run"] in known
    rebuilds = [e["run"] for e in receiver.events if e["job"]["name"].endswith(".rebuild")]
    parents = [run["facets"]["parent"] for run in rebuilds]
    assert {p["run"]["runId"] for p in parents} == {given["root-run"].rpartition("/")[2]}
