"""The DAG file under a real Airflow in a process of its own: importing configures Airflow."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from anabranch.config import stream_names

Recorded = Callable[[Any], None]
DAGS = Path(__file__).resolve().parents[3] / "dags"


def test_the_dags_folder_has_the_packages_file_and_ignores_shared_modules() -> None:
    """Airflow's workers do not have the package: a copy would differ from it in time."""
    file = DAGS / "anabranch_conf.py"
    assert file.is_symlink()
    assert file.resolve() == DAGS.parent / "anabranch" / "config" / "plain.py"
    shared = (DAGS / ".airflowignore").read_text("utf-8").split()
    dags = {file.name for file in DAGS.glob("*.py") if "DAG(" in file.read_text("utf-8")}
    assert {*shared} == {file.name for file in DAGS.glob("*.py")} - dags


_SCRIPT = """
import importlib.util, json, os, sys, threading, time, types
from datetime import datetime, timezone
from pathlib import Path
from airflow.providers.standard.sensors.date_time import DateTimeSensorAsync
from airflow.utils.types import DagRunType
from airflow.sdk.exceptions import AirflowTaskTimeout
from airflow.sdk.execution_time.timeout import timeout
from airflow.sdk import DAG, Asset, BaseOperator, CronDataIntervalTimetable, Param

folder, up_file, conf = sys.argv[1:]
sys.path.insert(0, folder)

def load():
    for name in [name for name in sys.modules if name.startswith("anabranch_")]:
        del sys.modules[name]
    parsed = []
    shared = Path(folder, ".airflowignore").read_text("utf-8").split()
    for file in sorted(file for file in Path(folder).glob("*.py") if file.name not in shared):
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

def failure(error):
    return [[kind.__name__ for kind in type(error).__mro__], str(error)]

# What an operator's run returns, and its error.
def attempt(operator, **context):
    try:
        return operator.execute(context), ""
    except Exception as error:
        return None, failure(error)

# The error of an operator's run: its classes and its text, both empty without one.
def executed(operator):
    return attempt(operator)[1] or [[], ""]

def kill_when(operator, is_due):
    def kill():
        deadline = time.monotonic() + 20
        while not is_due() and time.monotonic() < deadline:
            time.sleep(0.02)
        operator.on_kill()
    threading.Thread(target=kill, daemon=True).start()

def run(script, kill_at=None):
    os.environ["ANABRANCH_COMMAND"] = "sh -c '" + script + "' sh" if script else "/no/such/command"
    operator = anabranch_operators.AnabranchOperator(task_id="t", arguments=["batch", "", "s"])
    if kill_at == "start":
        operator.on_kill()
    elif kill_at:
        kill_when(operator, lambda: os.path.exists(kill_at))
    return executed(operator)

# What a command does after Airflow's `execution_timeout`: the error, and whether the command was ended.
def time_out():
    os.environ["ANABRANCH_COMMAND"] = "sh -c 'echo up; sleep 40' sh"
    operator = anabranch_operators.AnabranchOperator(task_id="t", arguments=["batch", "s"])
    try:
        with timeout(1):
            operator.execute({})
    except AirflowTaskTimeout:
        return ["timeout", operator._process.returncode]
    return ["none", operator._process.returncode]

AT = datetime(2026, 11, 21, 4, tzinfo=timezone.utc)
# As Airflow's OpenLineage provider names them: tests/external/marquez.
sys.modules["airflow.providers.openlineage.plugins.macros"] = types.SimpleNamespace(
    lineage_parent_id=lambda task: f"team/a/{task.dag_id}.{task.task_id}/{task.try_number}",
    lineage_root_parent_id=lambda task: f"team/a/{task.dag_id}",
)
def rebuild(cleared=0, run_type="scheduled", **params):
    os.environ['ANABRANCH_COMMAND'] = '''sh -c 'printf "%s|" "$@" > ''' + up_file + ".said' sh"
    operator = anabranch_operators.RebuildOperator(task_id="t", stream="s")
    run = types.SimpleNamespace(run_id="it", run_type=run_type, clear_number=cleared, logical_date=AT, run_after=AT)
    task = types.SimpleNamespace(dag_id="d", task_id="t", try_number=cleared + 1, map_index=-1)
    operator.execute({"params": params, "dag_run": run, "ti": task})
    return Path(up_file + ".said").read_text().split("|")[6:-3]

VIEW = {"stream": "orders", "exit_code": 0, "error": None, "hours": []}
def outcome(cleared=0, **view):
    return anabranch_operators.group_outcome(VIEW | view, HOUR, cleared)

HOUR = "2026-11-21T03"
AIRFLOW_RUN = dict(run_id="it", run_type="scheduled", logical_date=AT, run_after=AT)
TASK = dict(dag_id="d", task_id="t", try_number=1)

# Part of a command that prints this.
def prints(name, value):
    Path(f"{up_file}.{name}").write_text(json.dumps(value))
    return f"cat {up_file}.{name}"

def command(script):
    Path(up_file + ".sh").write_text(script)
    Path(up_file + ".ran").write_text("")
    os.environ["ANABRANCH_COMMAND"] = "sh " + up_file + ".sh"

def ran():
    lines = Path(up_file + ".ran").read_text().splitlines()
    return [" ".join(word for word in line.split() if "-run=" not in word) for line in lines]

# What a group's rebuild makes of a command that prints these views: its result, or its error; and the command.
def rebuild_group(*views, code=0, cleared=0):
    answer = prints("views", {"streams": list(views)}) if views else "echo no JSON"
    command(f"echo $* > {up_file}.ran; echo logged >&2; {answer}; exit {code}")
    operator = anabranch_operators.GroupRebuildOperator(task_id="t", group="small")
    operator.arguments[4] = operator.hour = HOUR
    run = types.SimpleNamespace(clear_number=cleared, **AIRFLOW_RUN)
    task = types.SimpleNamespace(map_index=-1, **TASK)
    done, error = attempt(operator, params={}, dag_run=run, ti=task)
    return [error or done, ran()]

class Events(dict):
    def __missing__(self, asset):
        made = types.SimpleNamespace(extra={}, keys=[])
        made.add_partitions = made.keys.append
        self[asset] = made
        return made

# What one stream's task runs, its error, and the events that it sets.
def stream_of_group(outcome, cleared=0, code=0, states=(), state="accepted"):
    explained = {"state": state, "revision": outcome["revision"], "counts": {"good": 7}, "snapshot_id": 5}
    explained["refusals"] = [{"reason": "r"}]
    rows = [{"hour": f"2026-11-21T{h:02}", "state": state} for h, state in enumerate(states)]
    answers = f"explain) {prints('explain', explained)};; hours) {prints('hours', rows)};; batch) exit {code};;"
    command(f"echo $* >> {up_file}.ran; case $1 in {answers} esac")
    operator = anabranch_operators.StreamOfGroupOperator(task_id="t", outcome=outcome)
    operator.hour, operator.rebuild = HOUR, ["batch", "s", "--hour", HOUR]
    operator.arguments = ["audit", "s", "--hours", HOUR, "--no-kafka"]
    kept, events = {}, Events()
    run = types.SimpleNamespace(clear_number=cleared, **AIRFLOW_RUN)
    task = types.SimpleNamespace(map_index=0, xcom_push=lambda key, value: kept.update({key: value}), **TASK)
    _, error = attempt(operator, params={}, dag_run=run, ti=task, outlet_events=events)
    said = {asset.name: [event.extra, event.keys] for asset, event in events.items()}
    outlets = [asset.name for asset in operator.outlets]
    return {"ran": ran(), "error": error, "kept": kept, "events": said, "outlets": outlets}

# What the last task of a group's run does with this answer of `complete`: its result, or its error; the events.
def hour_of_group(through, code=0, **streams):
    answer = {"complete_through": through, "streams": streams, "errors": {}}
    command(f"echo $* >> {up_file}.ran; {prints('through', answer)}; echo none >&2; exit {code}")
    operator, events = anabranch_operators.GroupHourOperator(task_id="t", group="small"), Events()
    operator.hour = HOUR
    done, error = attempt(operator, outlet_events=events)
    return [error or done, ran(), {asset.name: [event.extra, event.keys] for asset, event in events.items()}]

# What the task that looks for earlier hours makes of this status: its error.
def backlog(*views, code=0):
    command(f"{prints('status', views[0] if len(views) == 1 else views)}; exit {code}")
    operator = anabranch_operators.BacklogOperator(task_id="t", arguments=["s"])
    operator.hour = HOUR
    return executed(operator)

# What the task of a family runs, where the listing and the commands end with these exit codes: its error, the commands.
def family(state="ready", listed=0, code=0, file="ready"):
    said = {"family": "app", "error": "the catalog did not answer"}
    rows = [said | {"stream": "app_gone", "state": "gone"}, said | {"stream": "app_x", "state": state}]
    rows += [said | {"stream": "app: app-x.y", "state": "broken"}, said | {"stream": "app_new", "state": "new"}]
    rows += [said | {"family": None, "stream": "other", "state": "ready"}]
    if file == "broken":
        rows = [said | {"family": None, "stream": "app", "state": file, "error": "app.yaml: a mistake"}]
    command(
        f"echo $* >> {up_file}.ran; case $1,$2 in status,*) {prints('streams', rows)}; exit {listed};;"
        f" maintain,app_gone) exit {code};; maintain,app_x) exit {1 if code else 0};; esac"
    )
    operator = anabranch_operators.FamilyOperator(task_id="t", family="app", arguments=["maintain", "STREAM"])
    return [attempt(operator)[1], ran()]

# What the watch makes of the command's exit code, and of the JSON that it prints, if any.
def watch(code, view=None):
    answer = prints("status", view) if view else "true"
    command(f"echo $* > {up_file}.ran; {answer}; echo why >&2; exit {code}")
    operator = anabranch_operators.WatchOperator(task_id="t", arguments=["status", "s"])
    return (executed(operator)[0] or ["done"])[0]

# What the task of a family runs that Airflow ends during the first stream's command: its error, the commands.
def family_ended():
    rows = [{"family": "app", "stream": name, "state": "ready", "error": None} for name in ("app_x", "app_y")]
    command(f"echo $* >> {up_file}.ran; case $1 in status) {prints('streams', rows)};; *) sleep 10;; esac")
    operator = anabranch_operators.FamilyOperator(task_id="t", family="app", arguments=["maintain", "STREAM"])
    kill_when(operator, lambda: len(ran()) > 1 and "maintain" in operator._process.args)
    return [executed(operator), ran()]

ROW = {"hour": HOUR, "state": "accepted", "revision": 1, "reason": None}
DONE, REFUSED = outcome(hours=[ROW]), outcome(exit_code=1, hours=[ROW | {"state": "refused", "reason": "too few"}])
AWAY = outcome(exit_code=75, error="Kafka did not answer")
BROKEN, AGAIN = outcome(exit_code=70, error="a bug"), outcome(hours=[ROW | {"revision": 2}])
# A mapped task of the group's DAG, as a worker makes it.
[group_dag] = [dag for dag in dags if dag.dag_id == "anabranch_hourly_group__small"]
instance = group_dag.task_dict["stream"].unmap({"outcome": DONE | {"stream": "orders"}})
LATER = outcome(hours=[ROW | {"state": "before the first", "reason": "later"}])
print("RESULT" + json.dumps({
    "group": {
        "done": rebuild_group(VIEW | {"hours": [ROW]}, VIEW | {"stream": "t", "exit_code": 1, "error": None}, code=1),
        "cleared": rebuild_group(VIEW | {"hours": [ROW]}, cleared=2),
        "away": rebuild_group(VIEW | {"exit_code": 75, "error": "away"}, code=75),
        "no output": rebuild_group(code=75),
        "wrong": rebuild_group(code=2),
    },
    "hour": {
        "complete": hour_of_group(HOUR, a=HOUR, b="2026-11-21T04"),
        "late": hour_of_group("2026-11-21T05", a="2026-11-21T05"),
        "long ago": hour_of_group("2026-11-25T05", a="2026-11-25T05"),
        "behind": hour_of_group("2026-11-21T02", a=HOUR, b="2026-11-21T02"),
        "none": hour_of_group(None, code=1, a=HOUR, b=None),
        "away": hour_of_group(None, code=75),
    },
    "stream": {
        "done": stream_of_group(DONE),
        "refused": stream_of_group(REFUSED),
        "away": stream_of_group(AWAY),
        "still away": stream_of_group(AWAY, code=75),
        "broken": stream_of_group(BROKEN),
        "later": stream_of_group(LATER),
        "not accepted": stream_of_group(DONE, state="refused"),
        "of a family": stream_of_group(outcome(stream="app_orders", hours=[ROW])),
        "cleared with all": stream_of_group(outcome(cleared=1, hours=[ROW | {"revision": 2}]), cleared=1),
        "cleared alone": stream_of_group(DONE, cleared=1),
        "cleared alone and refused": stream_of_group(DONE, cleared=1, code=1),
        "restated day": stream_of_group(AGAIN, states=["accepted"] * 24),
        "restated in an open day": stream_of_group(AGAIN, states=["accepted"] * 23 + ["waiting"]),
    },
    "family": {
        "done": family(), "away": family(listed=1, code=75), "unknown": family(state="unknown", listed=1),
        "broken": family(file="broken", listed=1), "ended": family_ended(),
    },
    "backlog": {
        "none": backlog({"stream": "s", "backlog": [HOUR, "2026-11-21T04"]}, code=1),
        "earlier": backlog({"stream": "s", "backlog": ["2026-11-20T23", "2026-11-21T02", HOUR]}),
        "of a group": backlog({"stream": "a", "backlog": []}, {"stream": "b", "backlog": ["2026-11-21T02"]}),
        "away": backlog({"stream": "s", "backlog": []}, {"stream": "b", "error": "away"}, code=75),
    },
    "watch": {
        "in time": watch(0, {"late": None}), "late": watch(1, {"late": "no publish for an hour"}),
        "layers differ": watch(1, {"late": None}), "refused": watch(1), "away": watch(75),
    },
    "instance": [instance.stream, [asset.name for asset in instance.outlets]],
    "rebuilds": {
        "scheduled": rebuild(restate=False, accept=False, why=None, hour=None),
        "cleared": rebuild(cleared=1),
        "backfill": rebuild(run_type=DagRunType.BACKFILL_JOB),
        "by choice": rebuild(accept=True, why="late and known"),
        "restated by hand": rebuild(restate=True, why="because"),
        "cleared with a reason": rebuild(cleared=2, accept=True, why="seen"),
    },
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
            "owner of": {task.task_id: task.owner for task in dag.tasks},
            "mistakes": [executed(task) for task in dag.tasks if hasattr(task, "mistake")],
            "params": sorted(dag.params),
            "callbacks": sorted({len(task.on_failure_callback) for task in dag.tasks}),
            "outlets": [outlet.uri for task in dag.tasks for outlet in task.outlets],
            "waits": [task.target_time for task in dag.tasks if hasattr(task, "target_time")],
        }
        for dag in dags
    },
    "timeout": time_out(),
    "runs": {
        "done": run("test $1,$2 = batch,s -a -n $ANABRANCH_CONF"),
        "refused": run("seq 1 30; echo quality gate failed >&2; exit 1"),
        "usage": run("exit 2"),
        "broken": run("echo OverflowError; exit 70"),
        "transient": run("echo grace has not passed; exit 75"),
        "signal": run("kill -9 $$"),
        "killed": run("sleep 60 & echo up > " + up_file + "; wait", up_file),
        "killed at its start": run("sleep 20", "start"),
        "missing": run(None),
    },
}))
"""


# Files with a mistake in what the DAGs use, and the message of each.
_WRONG = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))["mistakes"]


_DEFAULTS = 'batch: {grace: "${ANABRANCH_GRACE:-7 minutes}", lookback_hours: 3}\n'
_FILES = {
    "flights": "batch: {grace: 2 minutes}",
    "game_events": 'batch: {grace: 5 minutes}\nairflow: {owner: platform, start: "2026-11-20T00"}\n'
    "egress: [{name: export}, {name: feed}]\n",
    "flights copy": "topic: flights",
    "f" * 151: "topic: flights",
    "orders": "group: small\nbatch: {lookback_hours: 2}\negress: [{name: export}]\n"
    'topic: "${ANABRANCH_UNSET}"\n',
    "outlier": "group: small\nbatch: {grace: 999999999999 weeks}\n",
    "patient": "batch: {grace: 1 year}\n",
    "app": 'group: small\ntopics: {pattern: "app-(.*)"}\negress: [{name: feed}]\n',
    "refunds": 'group: "${ANABRANCH_GROUP}"\n'
    'airflow: {owner: "${ANABRANCH_OWNER}", start: "${ANABRANCH_START:-2026-11-21T05}"}\n',
}


def run_airflow(script: str, home: Path, *arguments: Path, **env: str) -> Any:
    """Return what the script prints, in a process with no other settings of Airflow or Anabranch."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "ANABRANCH"))}
    done = subprocess.run(
        [sys.executable, "-c", script, str(DAGS), *map(str, arguments)], cwd=home, check=False,
        env=ours | {"AIRFLOW_HOME": str(home)} | env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.rpartition("RESULT")[2].replace(str(home), "HOME"))


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("airflow")
    conf = home / "conf"
    (conf / "streams").mkdir(parents=True)
    for name in ("game_events.expectations.yaml", "notes.txt"):
        (conf / "streams" / name).write_text("neither valid: nor: read", encoding="utf-8")
    for name, text in (_FILES | {name: text for name, (text, _) in _WRONG.items()}).items():
        (conf / "streams" / f"{name}.yaml").write_text(text, encoding="utf-8")
    (conf / "defaults.yaml").write_text(_DEFAULTS, encoding="utf-8")
    env = {
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False", "ANABRANCH_GROUP": "small", "ANABRANCH_OWNER": "shop",
    }  # fmt: skip
    result = run_airflow(_SCRIPT, home, home / "up", conf, **env)
    named = {dag_id.partition("__")[2] for dag_id in result["dags"]} - {"", "small", "app"}
    assert named == {*stream_names(conf)} - {"flights copy", "f" * 151}
    return result


def test_each_stream_file_has_its_dags(parsed: Any) -> None:
    others = ("hourly_group__small", "maintenance__app", "example_consumer", "example_daily")
    assert set(parsed["dags"]) == {f"anabranch_{name}" for name in others} | {
        f"anabranch_{kind}__{stream}"
        for kind in ("hourly", "maintenance", "speed_watch")
        for stream in ("flights", "game_events", "orders", "outlier", "patient", "refunds", *_WRONG)
    }
    for dag in parsed["dags"].values():
        assert (dag["max_active_runs"] == 1 or "example" in dag["tags"]) and not dag["past"]
        assert dag["doc"]


@pytest.mark.parametrize("stream", _WRONG)
def test_the_dags_of_a_wrong_file_fail_with_the_mistake(parsed: Any, stream: str) -> None:
    """And those of the other streams are as their files say."""
    for kind in ("hourly", "maintenance", "speed_watch"):
        dag = parsed["dags"][f"anabranch_{kind}__{stream}"]
        assert (dag["downstream"], dag["catchup"]) == ({"configuration": []}, False)
        [[kinds, message]] = dag["mistakes"]
        assert kinds[0] == "AirflowFailException"
        assert f"{stream}.yaml: {_WRONG[stream][1]}" in message
    assert parsed["dags"][f"anabranch_hourly__{stream}"]["schedule"] == "0 * * * *"


SHOWN = (
    "downstream", "arguments", "rules", "retries", "timetable", "schedule", "catchup", "params",
    "outlets", "tags", "owners", "callbacks",
)  # fmt: skip


def test_an_hour_is_sealed_rebuilt_merged_and_verified(parsed: Any, recorded: Recorded) -> None:
    """A refused hour is still merged, and its run still fails."""
    dag = parsed["dags"]["anabranch_hourly__flights"]
    recorded({name: dag[name] for name in SHOWN})


def named_errors(value: Any) -> Any:
    """The same, with the class of an error in place of all of its classes."""
    match value:
        case [[kind, *_, "object"], str(message)]:
            return f"{kind}: {message}"
        case list():
            return [named_errors(item) for item in value]
        case dict():
            return {name: named_errors(item) for name, item in value.items()}
    return value


@pytest.mark.parametrize(
    "task", ["backlog", "rebuilds", "watch", "family", "hour", "group", "stream", "runs"]
)
def test_what_a_task_runs_and_how_it_ends(parsed: Any, recorded: Recorded, task: str) -> None:
    """A run is not green while an earlier hour waits. A cleared run and a backfill restate, with a
    reason. The watch fails when the speed layer is late, and when the command fails; not for a
    difference between the layers. An error of one stream of a family does not stop the others; a
    task that is ended starts no command of a further one. A group that is not complete has no event
    and fails no run; one that does not answer is asked again. A group's rebuild gives each stream's
    outcome and fails for none of them; each stream's task fails as its rebuild did, after it has
    merged its hour, and rebuilds it alone after a transient failure or when it was cleared. Only
    accepted hours have events, and those of an hour that was accepted late are of later hours too,
    of a day at most. A refusal is distinguished from other errors, and the last lines of a command's
    output are in the error."""
    recorded(named_errors(parsed[task]))


def test_a_task_that_takes_too_long_or_fails_for_good_ends(parsed: Any) -> None:
    assert parsed["timeout"] == ["timeout", -15]
    ended = [run for run, (kinds, _) in parsed["runs"].items() if "AirflowFailException" in kinds]
    assert ended == ["refused", "usage", "broken", "missing"]


def test_a_streams_file_configures_airflow_and_its_targets(parsed: Any) -> None:
    hourly = parsed["dags"]["anabranch_hourly__game_events"]
    assert (hourly["catchup"], hourly["start"]) == (True, "2026-11-20T00:00:00+00:00")
    assert hourly["owners"] == ["platform"] and "seconds=300" in hourly["waits"][0]
    watch = parsed["dags"]["anabranch_speed_watch__game_events"]
    assert watch["arguments"] == {"watch": ["status", "game_events", "--late-after", "10 minutes"]}
    dag = parsed["dags"]["anabranch_hourly__game_events"]
    assert dag["downstream"]["verify"] == ["backlog", "egress__export", "egress__feed"]
    assert dag["arguments"]["egress__feed"] == ["egress", "game_events", "--target", "feed"]
    assert {dag["rules"][f"egress__{name}"] for name in ("export", "feed")} == {"all_success"}


def test_files_are_parsed_quickly_and_by_default_those_beside_the_dags(parsed: Any) -> None:
    assert parsed["heavy"] == [] and parsed["seconds"] < 2
    shipped = {f"anabranch_hourly__{name}" for name in stream_names(DAGS.parent / "conf")}
    assert shipped and shipped <= set(parsed["shipped"])


def test_a_group_has_one_rebuild_and_a_mapped_task_each(parsed: Any, recorded: Recorded) -> None:
    dag = parsed["dags"]["anabranch_hourly_group__small"]
    # Its start is the earliest of its streams, and its grace the longest; `defaults.yaml` has it.
    recorded({name: dag[name] for name in (*SHOWN, "start", "waits", "owner of")})
    # The DAGs of its single streams are for runs by hand.
    by_hand = ("anabranch_hourly__orders", "anabranch_hourly__refunds")
    assert {parsed["dags"][name]["schedule"] for name in by_hand} == {None}
    # A variable that only the commands need may be unset here.
    assert parsed["dags"]["anabranch_maintenance__refunds"]["owners"] == ["shop"]
    assert parsed["dags"]["anabranch_maintenance__orders"]["owners"] == ["anabranch"]
    maintenance = parsed["dags"]["anabranch_maintenance__app"]
    assert maintenance["arguments"] == {"maintain": ["maintain", "STREAM"]}
    assert "anabranch_hourly__app" not in parsed["dags"]
    assert dag["downstream"]["configuration__outlier"] == []
    [[_, message]] = dag["mistakes"]
    assert "outlier.yaml: batch.grace: expected 1000 years at most" in message
    assert parsed["dags"]["anabranch_hourly__outlier"]["schedule"] is None
    assert f"seconds={365 * 86_400}" in parsed["dags"]["anabranch_hourly__patient"]["waits"][0]
    assets = [f"anabranch_{kind}__orders" for kind in ("hours", "partitions", "restated_days")]
    assert parsed["instance"] == ["orders", assets]


MOST = 9
_MANY = """
import importlib.util, json, sys, time
from pathlib import Path
import airflow.sdk, yaml
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.providers.standard.sensors.date_time import DateTimeSensorAsync
from airflow.sdk import DAG, Asset, BaseOperator, CronDataIntervalTimetable, Param, PartitionedAssetTimetable

sys.path.insert(0, sys.argv[1])
ratios = {}
texts = [file.read_text("utf-8") for file in Path(sys.argv[2]).glob("*.yaml")]
start = time.process_time()
for text in texts:
    yaml.safe_load(text)
reference = time.process_time() - start
shared = Path(sys.argv[1], ".airflowignore").read_text("utf-8").split()
for file in sorted(file for file in Path(sys.argv[1]).glob("anabranch_*.py") if file.name not in shared):
    for name in [name for name in sys.modules if name.startswith("anabranch_")]:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    start = time.process_time()
    spec.loader.exec_module(module)
    ratios[file.stem] = (time.process_time() - start) / reference
print("RESULT" + json.dumps(ratios))
"""


@pytest.mark.full
def test_parsing_a_file_is_in_proportion_to_reading_200_streams(tmp_path: Path) -> None:
    """In CPU time, against PyYAML's own reader; Airflow parses each file in a process of its own."""
    streams = tmp_path / "conf" / "streams"
    streams.mkdir(parents=True)
    text = (DAGS.parent / "conf" / "streams" / "game_events.yaml").read_text(encoding="utf-8")
    for number in range(200):
        group = f"group: g{number % 3}\n" if number % 2 else ""
        (streams / f"s{number}.yaml").write_text(group + text, encoding="utf-8")
    ratios = run_airflow(_MANY, tmp_path, streams, ANABRANCH_CONF=str(streams.parent))
    assert {name: ratio for name, ratio in ratios.items() if ratio >= MOST} == {}
