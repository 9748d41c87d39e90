"""The DAG file under a real Airflow, in a process of its own: Airflow configures itself, and logging, when imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from anabranch.config import stream_names

DAG_FILE = Path(__file__).resolve().parents[2] / "dags" / "anabranch_hourly.py"

_SCRIPT = """
import importlib.util, json, os, sys, threading, time
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, BaseOperator, CronDataIntervalTimetable

dag_file, up_file, conf = sys.argv[1:]

def load():
    spec = importlib.util.spec_from_file_location("anabranch_hourly", dag_file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, [value for value in vars(module).values() if isinstance(value, DAG)]

_, shipped = load()
os.environ["ANABRANCH_CONF"] = conf
before = set(sys.modules)
start = time.perf_counter()
module, dags = load()
seconds = time.perf_counter() - start
heavy = ("pyspark", "pyiceberg", "kafka", "anabranch", "pyarrow")

def run(script, kill_at=None):
    os.environ["ANABRANCH_COMMAND"] = "sh -c '" + script + "' sh" if script else "/no/such/command"
    operator = module.AnabranchOperator(task_id="t", arguments=["batch", "s"])
    if kill_at:
        def kill():
            deadline = time.monotonic() + 20
            while not os.path.exists(kill_at) and time.monotonic() < deadline:
                time.sleep(0.02)
            operator.on_kill()
        threading.Thread(target=kill, daemon=True).start()
    try:
        operator.execute({})
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["", ""]

print("RESULT" + json.dumps({
    "shipped": [dag.dag_id for dag in shipped],
    "seconds": seconds,
    "heavy": sorted(n for n in set(sys.modules) - before if n.split(".")[0] in heavy),
    "dags": {
        dag.dag_id: {
            "downstream": {task.task_id: sorted(task.downstream_task_ids) for task in dag.tasks},
            "arguments": {task.task_id: list(getattr(task, "arguments", [])) for task in dag.tasks},
            "rules": {task.task_id: task.trigger_rule.value for task in dag.tasks},
            "retries": sorted({task.retries for task in dag.tasks}),
            "past": any(task.depends_on_past for task in dag.tasks),
            "cron": dag.timetable.expression,
            "timezone": str(dag.timetable.timezone),
            "timetable": type(dag.timetable).__name__,
            "catchup": dag.catchup,
            "max_active_runs": dag.max_active_runs,
            "tags": sorted(dag.tags),
            "doc": dag.doc_md,
        }
        for dag in dags
    },
    "runs": {
        "done": run("test $1,$2 = batch,s -a -n $ANABRANCH_CONF"),
        "refused": run("seq 1 30; echo quality gate failed >&2; exit 1"),
        "usage": run("exit 2"),
        "transient": run("echo grace has not passed; exit 75"),
        "signal": run("kill -9 $$"),
        "killed": run("sleep 60 & echo up > " + up_file + "; wait", up_file),
        "missing": run(None),
    },
}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("airflow")
    conf = home / "conf"
    (conf / "streams").mkdir(parents=True)
    for name in ("flights.yaml", "game_events.yaml", "game_events.expectations.yaml", "notes.txt"):
        (conf / "streams" / name).write_text("neither valid: nor: read", encoding="utf-8")
    env = {key: value for key, value in os.environ.items() if not key.startswith(("AIRFLOW", "ANABRANCH"))}
    env |= {"AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(DAG_FILE), str(home / "up"), str(conf)],
        env=env, cwd=home, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.rpartition("RESULT")[2])
    assert {dag_id.partition("__")[2] for dag_id in result["dags"]} == set(stream_names(conf))
    return result


def test_each_stream_file_is_a_dag_of_seal_rebuild_merge(found: Any) -> None:
    assert set(found["dags"]) == {"anabranch_hourly__flights", "anabranch_hourly__game_events"}
    dag = found["dags"]["anabranch_hourly__flights"]
    hour = "{{ data_interval_start.strftime('%Y-%m-%dT%H') }}"
    assert dag["downstream"] == {
        "seal": ["outcome", "rebuild"],
        "rebuild": ["merge", "outcome"],
        "merge": ["outcome"],
        "outcome": [],
    }
    assert dag["arguments"] == {
        "seal": ["batch", "flights", "--hour", hour, "--seal-only"],
        "rebuild": ["batch", "flights", "--hour", hour],
        "merge": ["merge", "flights"],
        "outcome": [],
    }
    # A refused hour is still merged, and its run still fails.
    assert dag["rules"] == {t: "all_done" if t == "merge" else "all_success" for t in dag["downstream"]}
    assert (dag["timetable"], dag["cron"], dag["timezone"]) == ("CronDataIntervalTimetable", "0 * * * *", "UTC")
    assert (dag["catchup"], dag["max_active_runs"], dag["past"]) == (False, 1, False)
    assert dag["retries"] == [8]
    assert dag["tags"] == ["anabranch", "flights"]
    assert "anabranch hours flights" in dag["doc"]


def test_the_scheduler_parses_the_file_quickly_and_imports_nothing_of_ours(found: Any) -> None:
    assert found["heavy"] == []
    assert found["seconds"] < 2


def test_without_a_folder_the_streams_are_those_beside_the_dags(found: Any) -> None:
    expected = [f"anabranch_hourly__{name}" for name in stream_names(DAG_FILE.parents[1] / "conf")]
    assert expected
    assert found["shipped"] == expected


def test_success_is_exit_code_0_alone(found: Any) -> None:
    assert found["runs"]["done"] == ["", ""]


@pytest.mark.parametrize("run", ["refused", "usage", "missing"])
def test_what_is_terminal_is_not_tried_again(found: Any, run: str) -> None:
    assert found["runs"][run][0] == "AirflowFailException"


@pytest.mark.parametrize("run", ["transient", "signal", "killed"])
def test_what_is_transient_may_be_tried_again(found: Any, run: str) -> None:
    assert found["runs"][run][0] == "AirflowException"


def test_the_error_holds_the_last_lines_of_the_output(found: Any) -> None:
    message = found["runs"]["refused"][1]
    assert "expected exit code 0, found 1\n" in message
    assert message.endswith("\n29\n30\nquality gate failed")
    assert "\n11\n" not in message
    assert "found -15" in found["runs"]["killed"][1]
    assert "set ANABRANCH_COMMAND" in found["runs"]["missing"][1]
