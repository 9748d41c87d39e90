"""Shared by the DAG files: the streams, an operator for one `anabranch` command, and a stream's settings for Airflow.
Defines no DAG.

`ANABRANCH_CONF` names the configuration folder (default: `conf` beside `dags`), whose files under `streams/` are the
streams. `ANABRANCH_COMMAND` is how the command is called (default `anabranch`), for one that lives in an environment of
its own. `ANABRANCH_ON_FAILURE` names a callback, `module.function`, for a task that failed for good.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml
from airflow.configuration import conf
from airflow.sdk import Asset, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

REFUSED, UNEXPECTED, TRANSIENT = 1, 70, 75
LAST_LINES = 20
CONF = Path(os.environ.get("ANABRANCH_CONF") or Path(__file__).resolve().parents[1] / "conf")
# The hour of a run: given by an operator, else the run's data interval.
HOUR = "{{ params.hour or data_interval_start.strftime('%Y-%m-%dT%H') }}"


def streams() -> list[str]:
    """The streams of the configuration folder, sorted."""
    return sorted(f.stem for f in (CONF / "streams").glob("*.yaml") if not f.stem.endswith(".expectations"))


def settings(stream: str) -> dict[str, Any]:
    """The sections `airflow` and `batch` of the stream's file; empty if it cannot be read, since each task reports
    that."""
    sections = {key: _document(stream).get(key) for key in ("airflow", "batch")}
    return {key: value for key, value in sections.items() if isinstance(value, dict)}


def targets(stream: str) -> list[str]:
    """The names of the stream's `egress` targets; none if its file cannot be read."""
    listed = _document(stream).get("egress")
    names = [target.get("name") for target in listed if isinstance(target, dict)] if isinstance(listed, list) else []
    return [name for name in names if isinstance(name, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name)]


def _document(stream: str) -> dict[str, Any]:
    try:
        document = yaml.safe_load((CONF / "streams" / f"{stream}.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return document if isinstance(document, dict) else {}


def duration(value: object, otherwise: timedelta) -> timedelta:
    """Parse `2 minutes` and the like; `otherwise` for other text, which the commands refuse."""
    match = re.fullmatch(r"\s*(\d+)\s*(second|minute|hour|day|week)s?\s*", str(value))
    return timedelta(**{f"{match[2]}s": int(match[1])}) if match else otherwise


def default_args(stream: str) -> dict[str, Any]:
    """Settings of every task of a stream."""
    callback = os.environ.get("ANABRANCH_ON_FAILURE")
    return {
        "owner": settings(stream).get("airflow", {}).get("owner", "anabranch"),
        "depends_on_past": False,
        "retries": 8,
        "retry_delay": timedelta(minutes=1),
        "retry_exponential_backoff": 2.0,
        "max_retry_delay": timedelta(minutes=10),
        **({"on_failure_callback": _imported(callback)} if callback else {}),
    }


def hours_asset(stream: str) -> Asset:
    """Its event is an authoritative hour of the stream: accepted, served by batch, and verified."""
    return Asset(name=f"anabranch_hours__{stream}", uri=f"anabranch://hours/{stream}", group="anabranch")


def _imported(name: str) -> Callable[..., None]:
    module, _, function = name.rpartition(".")
    imported: Callable[..., None] = getattr(importlib.import_module(module), function)
    return imported


class Refused(AirflowFailException):
    """A command ended with exit code 1: refused, or a check failed."""


class Unexpected(AirflowFailException):
    """A command ended with exit code 70: an unexpected error, not a refusal."""


class AnabranchOperator(BaseOperator):
    """Runs one `anabranch` command and streams its output into the task's log.

    Arguments that render empty are left out. Exit code 0 is success. 75 is transient: the task fails and may be
    retried. Any other code fails the task for good; 70 is reported as unexpected, not as refused. The error has the
    last lines of the output.
    """

    template_fields: Sequence[str] = ("arguments",)

    def __init__(self, *, arguments: Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.arguments = arguments
        self._process: subprocess.Popen[str] | None = None

    def execute(self, context: Any) -> Any:
        self.run_command([argument for argument in self.arguments if argument])

    def run_command(self, arguments: Sequence[str]) -> None:
        """Run a command to its end, and log its output line by line."""
        command = _command(arguments)
        self.log.info("running %s", shlex.join(command))
        last: deque[str] = deque(maxlen=LAST_LINES)
        with _started(command, subprocess.STDOUT) as self._process:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                last.append(line.rstrip())
                self.log.info("%s", last[-1])
        _require_success(command, self._process.returncode, last)

    def ask(self, arguments: Sequence[str]) -> Any:
        """The JSON output of a command that only reads."""
        command = _command([*arguments, "--output", "json"])
        with _started(command, subprocess.PIPE) as self._process:
            printed, logged = self._process.communicate()
        _require_success(command, self._process.returncode, logged.splitlines()[-LAST_LINES:])
        return json.loads(printed)

    def on_kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)


def _command(arguments: Sequence[str]) -> list[str]:
    return [*shlex.split(os.environ.get("ANABRANCH_COMMAND") or "anabranch"), *arguments]


def _started(command: Sequence[str], stderr: int) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            env=os.environ | {"ANABRANCH_CONF": str(CONF), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # so that on_kill reaches Spark's JVM too
        )
    except OSError as error:
        raise AirflowFailException(f"expected to run {command[0]}, found: {error} (set ANABRANCH_COMMAND)") from error


def _require_success(command: Sequence[str], code: int, last: Iterable[str]) -> None:
    if code == 0:
        return
    message = "\n".join([f"{shlex.join(command)}: expected exit code 0, found {code}", *last])
    # A negative code is a signal (out of memory, or the task was stopped): treat it as transient.
    if code == TRANSIENT or code < 0:
        raise AirflowException(message)
    if code == UNEXPECTED:
        raise Unexpected(f"not refused, but broken by an unexpected error; an operator has to look: {message}")
    raise Refused(message) if code == REFUSED else AirflowFailException(message)


class HourOperator(AnabranchOperator):
    """Runs one command on its run's hour, and can read the hour's state."""

    template_fields: Sequence[str] = ("arguments", "hour")

    def __init__(self, *, stream: str, arguments: Sequence[str], **kwargs: Any) -> None:
        super().__init__(arguments=arguments, **kwargs)
        self.stream = stream
        self.hour = HOUR

    def explain(self) -> Any:
        return self.ask(["explain", self.stream, self.hour])


class SealOperator(HourOperator):
    """Seals an hour. An hour before the stream's first is skipped, with the following tasks."""

    def __init__(self, *, stream: str, **kwargs: Any) -> None:
        super().__init__(stream=stream, arguments=["batch", stream, "--hour", HOUR, "--seal-only"], **kwargs)

    def execute(self, context: Any) -> None:
        try:
            super().execute(context)
        except (Refused, Unexpected):
            raise
        except AirflowFailException as error:
            if (first := self._first_hour_after()) is not None:
                raise AirflowSkipException(f"the stream {self.stream} begins with hour {first}") from error
            raise

    def _first_hour_after(self) -> str | None:
        try:
            facts = self.explain()
        except AirflowException:
            return None  # the error is logged and raised
        return str(facts["first_hour"]) if facts["state"] == "before the first" else None


def rebuild_options(params: Mapping[str, Any], run_id: str, run_type: str, cleared: int) -> list[str]:
    """Options of a rebuild, by the run's params; a cleared run and a backfill restate. Pure."""
    again = cleared > 0 or run_type == "backfill"
    why = params.get("why") or (f"Airflow run {run_id}" if again else "")
    flags = {"--restate": params.get("restate") or again, "--accept": params.get("accept")}
    return [*(flag for flag, given in flags.items() if given), *(["--why", why] if why else [])]


def lineage_parents(instance: Any, run: Any) -> tuple[str, str]:
    """A task's try and its DAG run as OpenLineage's clients write them, NAMESPACE/JOB/RUN ID, with the ids that
    Airflow's OpenLineage provider gives them: by the provider itself where it is installed."""
    try:
        macros = importlib.import_module("airflow.providers.openlineage.plugins.macros")
    except ImportError:
        namespace = conf.get("openlineage", "namespace", fallback="") or os.environ.get(
            "OPENLINEAGE_NAMESPACE", "default"
        )
        return derived_parents(namespace, instance, run)
    return macros.lineage_parent_id(instance), macros.lineage_root_parent_id(instance)


def derived_parents(namespace: str, instance: Any, run: Any) -> tuple[str, str]:
    """The same ids as the provider derives them. Pure."""
    dag, task, at = instance.dag_id, instance.task_id, run.logical_date or run.run_after
    of_try = _static_uuid(at, f"{namespace}.{dag}.{task}.{instance.try_number}.{instance.map_index}")
    of_run = _static_uuid(at, f"{namespace}.{dag}.{run.clear_number}")
    return f"{namespace}/{dag}.{task}/{of_try}", f"{namespace}/{dag}/{of_run}"


def _static_uuid(instant: datetime, name: str) -> uuid.UUID:
    """A UUID of version 7 whose random bits are a digest, as OpenLineage's `generate_static_uuid` makes it."""
    at = instant.astimezone(UTC)
    digest = int.from_bytes(hashlib.sha1(at.isoformat().encode() + name.encode()).digest(), "big") >> 84
    value = (int(at.timestamp() * 1000) & 0xFFFFFFFFFFFF) << 80 | digest & 0xFFFFFFFFFFFFFFFFFFFF
    return uuid.UUID(int=value & ~(0xF000 << 64) & ~(0xC000 << 48) | 7 << 76 | 0x8000 << 48)


class RebuildOperator(HourOperator):
    """Rebuilds an hour, by `rebuild_options`, as a child of this task's run in lineage. The reason of a refusal stays
    on the run: the XCom `refused` of this task, with `hour`, `revision`, `reason` and `at`."""

    def __init__(self, *, stream: str, **kwargs: Any) -> None:
        super().__init__(stream=stream, arguments=["batch", stream, "--hour", HOUR], **kwargs)

    def execute(self, context: Any) -> None:
        run = context["dag_run"]
        more = rebuild_options(context["params"], run.run_id, run.run_type, run.clear_number or 0)
        try:
            self.run_command([*self.arguments, *more, *self._parents(context["ti"], run)])
        except Refused:
            self._keep_reason(context["ti"])
            raise

    def _parents(self, instance: Any, run: Any) -> list[str]:
        try:
            parent, root = lineage_parents(instance, run)
        except Exception:
            self.log.exception("lineage of hour %s will not name this task; nothing else depends on it", self.hour)
            return []
        return [f"--parent-run={parent}", f"--root-run={root}"]

    def _keep_reason(self, instance: Any) -> None:
        try:
            refusals = self.explain()["refusals"]
        except AirflowException:
            self.log.exception("why hour %s was refused could not be asked; it is in the log above", self.hour)
            return
        if refusals:
            instance.xcom_push(key="refused", value={"hour": self.hour, **refusals[-1]})


class VerifyOperator(HourOperator):
    """Verifies an hour, and notifies downstream DAGs.

    The asset event's extra has `hour`, `revision`, `rows` and `snapshot_id`.
    """

    def __init__(self, *, stream: str, **kwargs: Any) -> None:
        self.asset = hours_asset(stream)
        arguments = ["audit", stream, "--hours", HOUR, "--no-kafka"]
        super().__init__(stream=stream, arguments=arguments, outlets=[self.asset], **kwargs)

    def execute(self, context: Any) -> Any:
        super().execute(context)
        facts = self.explain()
        extra = {
            "hour": self.hour,
            "revision": facts["revision"],
            "rows": facts["counts"]["good"],
            "snapshot_id": facts["snapshot_id"],
        }
        context["outlet_events"][self.asset].extra = extra
        return extra
