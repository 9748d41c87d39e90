"""Our DAGs name a task's try and its DAG run as Airflow's own OpenLineage provider reports them."""

import json
import os
import sys
from pathlib import Path

import pytest
from dag_runs import DAGS, new_airflow, run_hourly
from lineage_receiver import running_receiver
from programs import output_of

pytest.importorskip(
    "airflow.providers.openlineage", reason="make test-suite WHAT=marquez brings the provider"
)

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


def test_the_parent_of_a_rebuild_is_the_run_that_the_provider_reports(tmp_path: Path) -> None:
    """A real DAG run with the provider on; the command is one that stores its arguments."""
    reported, command = tmp_path / "reported", tmp_path / "command"
    explained = {"state": "accepted", "revision": 1, "counts": {"good": 1}, "snapshot_id": 1}
    command.write_text(f"#!/bin/sh\necho \"$@\" >> {reported}\necho '{json.dumps(explained)}'\n")
    command.chmod(0o755)
    conf = tmp_path / "conf" / "streams"
    conf.mkdir(parents=True)
    (conf / "events.yaml").write_text("batch: {grace: 0 seconds}\n")
    with running_receiver(is_strict=False) as receiver:
        own = {
            "AIRFLOW__OPENLINEAGE__TRANSPORT": json.dumps({"type": "http", "url": receiver.url}),
            "AIRFLOW__OPENLINEAGE__NAMESPACE": "team/a",
            "ANABRANCH_COMMAND": str(command),
            "ANABRANCH_CONF": str(tmp_path / "conf"),
        }
        environment = new_airflow(tmp_path / "airflow", **own)
        output = run_hourly("events", "2026-11-21T04:00:00+00:00", environment)
    assert "'rebuild': 'success'" in output
    [rebuild] = [line for line in reported.read_text().splitlines() if "--parent-run" in line]
    given = dict(word.lstrip("-").split("=", 1) for word in rebuild.split() if "=" in word)
    jobs = [(event["job"], event["run"]["runId"]) for event in receiver.events]
    known = {f"{job['namespace']}/{job['name']}/{run_id}" for job, run_id in jobs}
    assert given["parent-run"] in known
    rebuilds = [e["run"] for e in receiver.events if e["job"]["name"].endswith(".rebuild")]
    parents = [run["facets"]["parent"] for run in rebuilds]
    assert {p["run"]["runId"] for p in parents} == {given["root-run"].rpartition("/")[2]}
