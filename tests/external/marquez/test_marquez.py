"""A running Marquez (`make test-suite WHAT=marquez MARQUEZ=http://127.0.0.1:5000`) shows the events that it
received."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import pytest
import requests
from accepted_hours import HOURS, cut, four_hours
from expectations import entry
from lakes import StreamLake
from openlineage.client import event_v2
from openlineage.client.event_v2 import RunEvent, RunState
from proofs import NOW
from waiting import wait_for

from anabranch import config
from anabranch.iceberg.lake import Lake
from anabranch.job import Job
from anabranch.kafka.client import KafkaAdapter
from anabranch.lineage.events import table_name
from anabranch.lineage.receiver import Receiver
from anabranch.lineage.reporting import report_lineage, subject_of
from anabranch.protocol import ledger
from anabranch.protocol.ledger_row import HourAccount, QualityResult, RunFacts
from anabranch.protocol.publish import new_id

MARQUEZ = os.environ.get("MARQUEZ", "")

pytestmark = pytest.mark.skipif(not MARQUEZ, reason="expected MARQUEZ, a running Marquez's address")

AIRFLOW, TASK = f"airflow-{new_id()[:12]}", "anabranch_hourly__events.rebuild"


def task_started(run_id: str) -> RunEvent:
    """Return the event that Airflow's provider sends when the task begins."""
    job, at = event_v2.Job(AIRFLOW, TASK), (NOW - timedelta(minutes=1)).isoformat()
    return RunEvent(eventType=RunState.START, eventTime=at, job=job, run=event_v2.Run(run_id))


def ask(path: str) -> Any:
    answer = requests.get(f"{MARQUEZ}/api/v1/{path}", timeout=30)
    answer.raise_for_status()
    return answer.json()


def account(parent: str) -> HourAccount:
    unique = entry("expect_column_values_to_be_unique", column="id") | {"severity": "critical"}
    began, of_task = NOW - timedelta(seconds=30), f"{AIRFLOW}/{TASK}/{parent}"
    return HourAccount(
        offsets=10, good=9, dead=1, duplicate=0, gap=0, gaps={}, sources={"kafka": 10},
        speed_rows=9, quality=QualityResult(True, (), (), 1, "events", (unique,)),
        run=RunFacts(began, "4.1.3", 1, 1234, of_task, None),
    )  # fmt: skip


def test_hours_are_runs_of_one_job_from_the_topic_to_the_table(tmp_path: Path) -> None:
    lake: StreamLake = four_hours(tmp_path)
    settings = config.Lineage(url=MARQUEZ, namespace=f"tests-{new_id()[:12]}")
    environment = lake.environment.model_copy(update={"lineage": settings})
    job = Job(environment, lake.stream, Lake(environment), KafkaAdapter(environment.kafka))
    parent = str(uuid4())
    served = {"served": "batch", "account": account(parent)}
    refused = {"reason": "quality: no", "account": account(parent)}
    rows = [
        ledger.decision(HOURS[0], "accepted", 1, cut(HOURS[0]), NOW, **served),
        ledger.decision(HOURS[1], "refused", 1, cut(HOURS[1]), NOW, **refused),
        ledger.decision(HOURS[0], "accepted", 2, cut(HOURS[0]), NOW, **served),
    ]
    Receiver(settings).send([task_started(parent)])
    with report_lineage(job):
        lake.ledger.record(rows)

    recorded = [r for r in lake.ledger.history() if r.decision != "sealed"]
    ends = [subject_of(job).events(row)[1] for row in recorded]
    # Marquez shows a job under the name of its parent.
    path = f"namespaces/{settings.namespace}/jobs/{TASK}.{lake.stream.name}.batch"
    wait_for(lambda: len(ask(f"{path}/runs")["runs"]) == 3, "three runs", 60, 0.2)
    shown = {run["id"]: run for run in ask(f"{path}/runs")["runs"]}
    assert {end.run.runId: shown[end.run.runId]["state"] for end in ends} == {
        end.run.runId: "FAILED" if row.decision == "refused" else "COMPLETED"
        for end, row in zip(ends, recorded, strict=True)
    }
    one = ask(f"jobs/runs/{ends[0].run.runId}")
    assert one["args"]["nominal_start_time"] == f"{recorded[0].hour}:00Z"
    assert one["facets"]["anabranch_hour"]["balance"]["good"] == 9
    assert one["facets"]["parent"]["run"]["runId"] == parent

    found = ask(path)
    assert (found["simpleName"], found["parentJobName"]) == (f"{lake.stream.name}.batch", TASK)
    assert ask(f"namespaces/{AIRFLOW}/jobs/{TASK}")["latestRun"]["id"] == parent
    assert found["inputs"] == [{"namespace": "kafka://127.0.0.1:1", "name": "events"}]
    where = table_name(lake.table().location())
    assert where._asdict() in found["outputs"]
    path_of_table = "namespaces/{}/datasets/{}".format(*(quote(part, safe="") for part in where))
    table, versions = ask(path_of_table), ask(f"{path_of_table}/versions")["versions"]
    # A run is one version, as both of its events name the columns; only versions keep their order.
    by_run = [(v["createdByRun"]["id"], [f["name"] for f in v["fields"]]) for v in versions]
    columns = list(lake.table().schema().column_names)
    assert sorted(v for v in by_run if v[0] in shown) == [(id, columns) for id in sorted(shown)]
    assertions = table["facets"]["dataQualityAssertions"]["assertions"]
    assert {a["assertion"]: a["success"] for a in assertions}["balance"] is True

    # Sent again, no run is there twice.
    for row in recorded:
        Receiver(settings).send(subject_of(job).events(row))
    again = {run["id"]: run["state"] for run in ask(f"{path}/runs")["runs"]}
    assert again == {id: run["state"] for id, run in shown.items()}
