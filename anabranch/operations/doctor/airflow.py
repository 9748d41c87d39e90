"""Check Airflow by its command line, if this machine has one (AIRFLOW_HOME is set)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from anabranch.common.errors import ConfigurationError
from anabranch.config import Stream
from anabranch.operations.finding import Finding, Issue, error, warning

HOME = "AIRFLOW_HOME"
POOL, _SLOTS = "default_pool", 128
_ANSWER_SECONDS = 120
_NOT_REBUILT, _NOT_MAINTAINED = "hours are not rebuilt", "nothing is maintained"


@dataclass(frozen=True)
class AirflowFacts:
    """Airflow's state: paused state by DAG id, import error by file, the pool's slots (None without
    the pool), and whether a scheduler is alive."""

    dags: Mapping[str, bool]
    broken: Mapping[str, str]
    slots: int | None
    is_scheduled: bool


def is_configured() -> bool:
    return bool(os.environ.get(HOME))


def read() -> AirflowFacts:
    """Run Airflow's commands in parallel, since each takes seconds. Raises ConfigurationError if
    one fails."""
    with ThreadPoolExecutor(4, "doctor-airflow") as pool:
        questions = (["dags", "list"], ["dags", "list-import-errors"], ["pools", "list"])
        dags, broken, pools = pool.map(_listed, questions)
        alive = pool.submit(_ask, "jobs", "check", "--job-type", "SchedulerJob")
        is_scheduled = alive.result().returncode == 0
    return AirflowFacts(
        dags={dag["dag_id"]: str(dag["is_paused"]) == "True" for dag in dags},
        broken={one["filepath"]: str(one["error"]).strip().splitlines()[-1] for one in broken},
        slots=next((int(one["slots"]) for one in pools if one["pool"] == POOL), None),
        is_scheduled=is_scheduled,
    )


def _command() -> list[str]:
    found = shutil.which("airflow")
    if found is None and find_spec("airflow") is None:
        raise ConfigurationError(
            f"{HOME}={os.environ[HOME]}: expected the command airflow, found none on the path"
        )
    return [found] if found is not None else [sys.executable, "-m", "airflow"]


def _ask(*question: str) -> subprocess.CompletedProcess[str]:
    command = [*_command(), *question]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise ConfigurationError(
            f"airflow {' '.join(question)}: expected an answer within {_ANSWER_SECONDS} s, found "
            "none; check that Airflow's database answers"
        ) from late


def _listed(question: list[str]) -> list[dict[str, Any]]:
    done = _ask(*question, "--output", "json")
    # Airflow prints warnings first, on the same stream; its exit code is 1 if it lists errors.
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if not lines:
        said = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
        raise ConfigurationError(f"airflow {' '.join(question)}: expected a list, found {said[0]}")
    found: list[dict[str, Any]] = json.loads(lines[-1])
    return found


def failed(why: str) -> Finding:
    expected = "a working airflow command, since AIRFLOW_HOME is set"
    return error(Issue.AIRFLOW_AWAY, "airflow", expected, why, "airflow db migrate")


def findings(streams: Sequence[Stream], facts: AirflowFacts) -> Iterator[Finding]:
    """Judge Airflow's state. Pure."""
    yield from (
        error(
            Issue.AIRFLOW_IMPORT,
            file,
            "a DAG file that can be imported",
            why,
            "airflow dags list-import-errors",
        )
        for file, why in facts.broken.items()
    )
    if not facts.is_scheduled:
        yield error(
            Issue.AIRFLOW_SCHEDULER,
            "airflow",
            "a scheduler that is alive",
            "none",
            "airflow scheduler",
        )
    if not facts.slots:
        found = "no such pool" if facts.slots is None else "0"
        remedy = f"airflow pools set {POOL} {_SLOTS} 'Default pool'"
        yield error(
            Issue.AIRFLOW_POOL, "airflow", f"slots in {POOL} for the DAGs' tasks", found, remedy
        )
    for (kind, name), ids in _dags(streams).items():
        if missing := [id for id in ids if id not in facts.dags]:
            expected = f"the DAGs of {kind} {name}"
            found = f"no {', '.join(missing)}"
            yield error(
                Issue.AIRFLOW_DAG_MISSING, "airflow", expected, found, "airflow dags reserialize"
            )
        if paused := [id for id in ids if facts.dags.get(id)]:
            found = "; ".join(f"{id} is paused: {ids[id]}" for id in paused)
            remedy = (
                f"airflow dags unpause --yes --treat-dag-id-as-regex '^anabranch_.+__({name})$'"
            )
            yield warning(
                Issue.AIRFLOW_PAUSED, "airflow", f"the DAGs of {kind} {name} to run", found, remedy
            )


def _dags(streams: Sequence[Stream]) -> dict[tuple[str, str], dict[str, str]]:
    """Return the DAG ids of each group, family and stream, with the effect of pausing the DAG."""
    dags = {}
    for stream in streams:
        name, group, family = stream.name, stream.group, stream.family
        if group is not None:
            dags["group", group] = {f"anabranch_hourly_group__{group}": _NOT_REBUILT}
        if family is not None:
            dags["family", family] = {f"anabranch_maintenance__{family}": _NOT_MAINTAINED}
            continue
        # The DAG of a group rebuilds the hours of its streams.
        hourly = _NOT_REBUILT if group is None else "manual runs do not start"
        dags["stream", name] = {
            f"anabranch_hourly__{name}": hourly,
            f"anabranch_maintenance__{name}": _NOT_MAINTAINED,
            f"anabranch_speed_watch__{name}": "the speed layer is not monitored",
        }
    return dags
