"""The DAG file under a real Airflow, in a process of its own: Airflow configures itself, and logging, when imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from openlineage.client.uuid import generate_static_uuid

from anabranch.config import stream_names

DAGS = Path(__file__).resolve().parents[3] / "dags"

_SCRIPT = """
import importlib.util, json, os, sys, threading, time, types
from datetime import datetime, timezone
from pathlib import Path
from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.standard.sensors.date_time import DateTimeSensorAsync
from airflow.utils.types import DagRunType
from airflow.sdk import DAG, Asset, BaseOperator, CronDataIntervalTimetable, Param

folder, up_file, conf = sys.argv[1:]
sys.path.insert(0, folder)

def load():
    sys.modules.pop("anabranch_operators", None)
    parsed = []
    for file in sorted(Path(folder).glob("*.py")):
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        parsed += [value for name, value in vars(module).items() if isinstance(value, DAG) and not name.startswith("_")]
    return parsed

shipped = load()
os.environ["ANABRANCH_CONF"] = conf
os.environ["ANABRANCH_ON_FAILURE"] = "os.path.basename"
before = set(sys.modules)
start = time.perf_counter()
dags = load()
seconds = time.perf_counter() - start
heavy = ("pyspark", "pyiceberg", "kafka", "anabranch", "pyarrow")
import anabranch_operators

def run(script, kill_at=None):
    os.environ["ANABRANCH_COMMAND"] = "sh -c '" + script + "' sh" if script else "/no/such/command"
    operator = anabranch_operators.AnabranchOperator(task_id="t", arguments=["batch", "", "s"])
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
        return [[kind.__name__ for kind in type(error).__mro__], str(error)]
    return [[], ""]

AT = datetime(2026, 11, 21, 4, tzinfo=timezone.utc)
parents = []
def rebuild(cleared=0, run_type="scheduled", **params):
    os.environ['ANABRANCH_COMMAND'] = '''sh -c 'printf "%s|" "$@" > ''' + up_file + ".said' sh"
    operator = anabranch_operators.RebuildOperator(task_id="t", stream="s")
    run = types.SimpleNamespace(run_id="it", run_type=run_type, clear_number=cleared, logical_date=AT, run_after=AT)
    task = types.SimpleNamespace(dag_id="d", task_id="t", try_number=cleared + 1, map_index=-1)
    operator.execute({"params": params, "dag_run": run, "ti": task})
    *said, parent, root = Path(up_file + ".said").read_text().split("|")[4:-1]
    parents.append([parent, root])
    return said

print("RESULT" + json.dumps({
    "rebuilds": {
        "scheduled": rebuild(restate=False, accept=False, why=None, hour=None),
        "cleared": rebuild(cleared=1),
        "backfill": rebuild(run_type=DagRunType.BACKFILL_JOB),
        "by choice": rebuild(accept=True, why="late and known"),
        "restated by hand": rebuild(restate=True, why="because"),
        "cleared with a reason": rebuild(cleared=2, accept=True, why="seen"),
    },
    "parents": parents[:2],
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
            "schedule": getattr(dag.timetable, "expression", None),
            "timetable": type(dag.timetable).__name__,
            "start": dag.start_date.isoformat(),
            "catchup": dag.catchup,
            "max_active_runs": dag.max_active_runs,
            "tags": sorted(dag.tags),
            "doc": dag.doc_md,
            "owners": sorted({task.owner for task in dag.tasks}),
            "params": sorted(dag.params),
            "callbacks": sorted({len(task.on_failure_callback) for task in dag.tasks}),
            "outlets": [outlet.uri for task in dag.tasks for outlet in task.outlets],
            "waits": [task.target_time for task in dag.tasks if hasattr(task, "target_time")],
            "bash": [task.bash_command for task in dag.tasks if hasattr(task, "bash_command")],
        }
        for dag in dags
    },
    "runs": {
        "done": run("test $1,$2 = batch,s -a -n $ANABRANCH_CONF"),
        "refused": run("seq 1 30; echo quality gate failed >&2; exit 1"),
        "usage": run("exit 2"),
        "broken": run("echo OverflowError; exit 70"),
        "transient": run("echo grace has not passed; exit 75"),
        "signal": run("kill -9 $$"),
        "killed": run("sleep 60 & echo up > " + up_file + "; wait", up_file),
        "missing": run(None),
    },
}))
"""

_GAME_EVENTS = """
batch: {grace: 5 minutes}
airflow: {owner: platform, start: "2026-11-20T00", speed_restart: systemctl restart speed, speed_late_after: 1 minute}
egress: [{name: export, type: folder}, {name: feed}, {name: "not; a name"}, 7]
"""


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("airflow")
    conf = home / "conf"
    (conf / "streams").mkdir(parents=True)
    for name in ("flights.yaml", "game_events.expectations.yaml", "notes.txt"):
        (conf / "streams" / name).write_text("neither valid: nor: read", encoding="utf-8")
    (conf / "streams" / "game_events.yaml").write_text(_GAME_EVENTS, encoding="utf-8")
    env = {key: value for key, value in os.environ.items() if not key.startswith(("AIRFLOW", "ANABRANCH"))}
    env |= {"AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False", "OPENLINEAGE_NAMESPACE": "team/a"}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(DAGS), str(home / "up"), str(conf)],
        env=env, cwd=home, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.rpartition("RESULT")[2])
    assert {dag_id.partition("__")[2] for dag_id in result["dags"]} - {""} == set(stream_names(conf))
    return result


def test_each_stream_file_has_its_dags(parsed: Any) -> None:
    assert set(parsed["dags"]) == {
        f"anabranch_{kind}__{stream}"
        for kind in ("hourly", "maintenance", "speed_watch")
        for stream in ("flights", "game_events")
    } | {"anabranch_example_consumer"}
    for dag in parsed["dags"].values():
        assert (dag["max_active_runs"] == 1 or "example" in dag["tags"]) and not dag["past"]
        assert dag["doc"]


def test_an_hour_is_waited_for_sealed_rebuilt_merged_and_verified(parsed: Any) -> None:
    dag = parsed["dags"]["anabranch_hourly__flights"]
    hour = "{{ params.hour or data_interval_start.strftime('%Y-%m-%dT%H') }}"
    assert dag["downstream"] == {
        "grace": ["seal"],
        "seal": ["rebuild", "verify"],
        "rebuild": ["merge", "verify"],
        "merge": ["verify"],
        "verify": [],
    }
    assert dag["arguments"]["seal"] == ["batch", "flights", "--hour", hour, "--seal-only"]
    assert dag["arguments"]["rebuild"] == ["batch", "flights", "--hour", hour]
    assert dag["arguments"]["merge"] == ["merge", "flights"]
    assert dag["arguments"]["verify"] == ["audit", "flights", "--hours", hour, "--no-kafka"]
    # A refused hour is still merged, and its run still fails.
    assert dag["rules"] == {t: "all_done" if t == "merge" else "all_success" for t in dag["downstream"]}
    assert (dag["timetable"], dag["schedule"], dag["catchup"]) == ("CronDataIntervalTimetable", "0 * * * *", False)
    assert dag["retries"] == [8]
    assert dag["params"] == ["accept", "hour", "restate", "why"]
    assert dag["outlets"] == ["anabranch://hours/flights"]
    assert (dag["tags"], dag["owners"], dag["callbacks"]) == (["anabranch", "flights"], ["anabranch"], [1])


def test_each_target_of_a_streams_file_is_delivered_to_behind_the_verification(parsed: Any) -> None:
    dag = parsed["dags"]["anabranch_hourly__game_events"]
    assert dag["downstream"]["verify"] == ["egress__export", "egress__feed"]
    assert dag["arguments"]["egress__feed"] == ["egress", "game_events", "--target", "feed"]
    assert {dag["rules"][f"egress__{name}"] for name in ("export", "feed")} == {"all_success"}


def test_a_run_that_was_cleared_and_a_backfill_restate_and_say_why(parsed: Any) -> None:
    assert parsed["rebuilds"] == {
        "scheduled": [],
        "cleared": ["--restate", "--why", "Airflow run it"],
        "backfill": ["--restate", "--why", "Airflow run it"],
        "by choice": ["--accept", "--why", "late and known"],
        "restated by hand": ["--restate", "--why", "because"],
        "cleared with a reason": ["--restate", "--accept", "--why", "seen"],
    }


def test_a_rebuild_names_its_task_and_its_dag_run_as_airflows_openlineage_provider_does(parsed: Any) -> None:
    """That the provider does so itself: tests/external/marquez."""
    at = datetime(2026, 11, 21, 4, tzinfo=UTC)

    def run(name: str) -> str:
        return str(generate_static_uuid(at, name.encode()))

    assert parsed["parents"] == [
        [f"--parent-run=team/a/d.t/{run('team/a.d.t.1.-1')}", f"--root-run=team/a/d/{run('team/a.d.0')}"],
        [f"--parent-run=team/a/d.t/{run('team/a.d.t.2.-1')}", f"--root-run=team/a/d/{run('team/a.d.1')}"],
    ]


def test_airflow_does_not_look_for_dags_in_what_they_share() -> None:
    assert (DAGS / ".airflowignore").read_text("utf-8").split() == ["anabranch_operators.py"]
    assert (DAGS / "anabranch_operators.py").is_file()


def test_a_streams_file_says_what_airflow_does_with_it(parsed: Any) -> None:
    hourly = parsed["dags"]["anabranch_hourly__game_events"]
    assert (hourly["catchup"], hourly["start"]) == (True, "2026-11-20T00:00:00+00:00")
    assert hourly["owners"] == ["platform"]
    assert "seconds=300" in hourly["waits"][0]
    watch = parsed["dags"]["anabranch_speed_watch__game_events"]
    assert watch["arguments"]["watch"] == ["status", "game_events", "--late-after", "1 minute"]
    assert (watch["bash"], watch["rules"]["restart"]) == (["systemctl restart speed\n"], "one_failed")
    assert parsed["dags"]["anabranch_speed_watch__flights"]["bash"] == []


def test_the_scheduler_parses_the_files_quickly_and_imports_nothing_of_ours(parsed: Any) -> None:
    assert parsed["heavy"] == []
    assert parsed["seconds"] < 2


def test_without_a_folder_the_streams_are_those_beside_the_dags(parsed: Any) -> None:
    shipped = {f"anabranch_hourly__{name}" for name in stream_names(DAGS.parent / "conf")}
    assert shipped and shipped <= set(parsed["shipped"])


def test_success_is_exit_code_0_alone(parsed: Any) -> None:
    assert parsed["runs"]["done"] == [[], ""]


@pytest.mark.parametrize("run", ["refused", "usage", "broken", "missing"])
def test_what_is_terminal_is_not_tried_again(parsed: Any, run: str) -> None:
    assert "AirflowFailException" in parsed["runs"][run][0]


def test_a_refusal_can_be_told_from_other_errors(parsed: Any) -> None:
    assert [run for run, (kinds, _) in parsed["runs"].items() if "Refused" in kinds] == ["refused"]


def test_what_broke_is_said_to_be_no_refusal(parsed: Any) -> None:
    kinds, message = parsed["runs"]["broken"]
    assert "Unexpected" in kinds and "Refused" not in kinds
    assert message.startswith("not refused, but broken by an unexpected error; an operator has to look: ")
    assert "expected exit code 0, found 70\nOverflowError" in message


@pytest.mark.parametrize("run", ["transient", "signal", "killed"])
def test_what_is_transient_may_be_tried_again(parsed: Any, run: str) -> None:
    assert parsed["runs"][run][0][0] == "AirflowException"


def test_the_error_holds_the_last_lines_of_the_output(parsed: Any) -> None:
    message = parsed["runs"]["refused"][1]
    assert "expected exit code 0, found 1\n" in message
    assert message.endswith("\n29\n30\nquality gate failed")
    assert "\n11\n" not in message
    assert "found -15" in parsed["runs"]["killed"][1]
    assert "set ANABRANCH_COMMAND" in parsed["runs"]["missing"][1]
