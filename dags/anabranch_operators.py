"""Operators for `anabranch` commands. Defines no DAG.

`ANABRANCH_COMMAND` is the command to run (default `anabranch`), for one in another Python
environment.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from typing import IO, Any

from airflow.sdk import Asset, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException
from anabranch_assets import group_hours_asset, hours_asset, partitions_asset, restated_days_asset
from anabranch_streams import CONF, Stream, streams

REFUSED, UNEXPECTED, TRANSIENT = 1, 70, 75
LAST_LINES = 20
# The most earlier hours that a run rebuilds too.
BACKLOG = ["--backlog", "24"]
# The most hours of a group for which one run notifies downstream DAGs.
MOST_EVENTS = 24
# The hour of a run: its param `hour`, else the run's data interval.
HOUR = "{{ params.hour or data_interval_start.strftime('%Y-%m-%dT%H') }}"


class Mistaken(BaseOperator):
    """Fails with the mistake in a stream's file that keeps the DAG files from reading it."""

    def __init__(self, *, mistake: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.mistake = mistake

    def execute(self, context: Any) -> None:
        raise AirflowFailException(self.mistake)


def reports_mistake(stream: Stream, task_id: str = "configuration") -> bool:
    """Return whether the stream's file has a mistake in a key that the DAG files read. The DAG of
    the context gets a task then that fails with the mistake."""
    if stream.mistake is None:
        return False
    Mistaken(task_id=task_id, mistake=stream.mistake)
    return True


class CommandRefused(AirflowFailException):
    """A command ended with exit code 1: refused, or a check failed."""


class CommandBroken(AirflowFailException):
    """A command ended with exit code 70: an unexpected error, not a refusal."""


class AnabranchOperator(BaseOperator):
    """Runs one `anabranch` command and streams its output into the task's log.

    Arguments that render empty are omitted. Exit code 0 is success. 75, or an end by a signal, is
    transient: the task fails and may be retried. Any other code fails the task without a retry; 70
    is reported as unexpected, not as refused. The error has the last lines of the output.
    """

    template_fields: Sequence[str] = ("arguments",)

    def __init__(self, *, arguments: Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.arguments = arguments
        self._process: subprocess.Popen[str] | None = None
        self._is_killed = False

    def execute(self, context: Any) -> Any:
        self.run_command([argument for argument in self.arguments if argument])

    def run_command(self, arguments: Sequence[str]) -> None:
        """Run a command to its end, and log its output line by line."""
        command = _command(arguments)
        _require_success(command, *self._run(command, subprocess.PIPE, subprocess.STDOUT))

    def _run(
        self, command: Sequence[str], stdout: int | IO[str], stderr: int
    ) -> tuple[int, deque[str]]:
        """Run a command to its end, and log the one of its outputs that is a pipe line by line.
        Return its exit code, and the last lines of the log."""
        self.log.info("running %s", shlex.join(command))
        last: deque[str] = deque(maxlen=LAST_LINES)
        with self._started(command, stdout, stderr) as process:
            for line in process.stdout or process.stderr or ():
                last.append(line.rstrip())
                self.log.info("%s", last[-1])
        return process.returncode, last

    def ask(self, arguments: Sequence[str], codes: Sequence[int] = (0,)) -> Any:
        """Run a command that only reads, and return its JSON output. Raises AirflowException for an
        exit code other than `codes`, or without output."""
        command = _command([*arguments, "--output", "json"])
        with self._started(command, subprocess.PIPE, subprocess.PIPE) as process:
            printed, logged = process.communicate()
        if process.returncode not in codes or not printed:
            _require_success(command, process.returncode, logged.splitlines()[-LAST_LINES:])
        return json.loads(printed)

    @contextmanager
    def _started(
        self, command: Sequence[str], stdout: int | IO[str], stderr: int
    ) -> Iterator[subprocess.Popen[str]]:
        """Start a command, and wait for its end. An exception in the block ends it: Airflow calls
        `on_kill` after `execution_timeout` only once `execute` has ended."""
        with _start(command, stdout, stderr) as process:
            self._process = process
            try:
                # Killed while the process started, when `on_kill` could not end it yet.
                if self._is_killed:
                    self.on_kill()
                yield process
            except BaseException:
                self.on_kill()
                raise

    def on_kill(self) -> None:
        self._is_killed = True
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)


class FamilyOperator(AnabranchOperator):
    """Runs one command for each stream of a family of topics that has its tables; the argument
    `STREAM` is replaced by the stream's name.

    The error of one stream does not stop the others. The task then fails with the first transient
    error, so that it is retried, else with the first error.
    """

    def __init__(self, *, family: str, arguments: Sequence[str], **kwargs: Any) -> None:
        super().__init__(arguments=arguments, **kwargs)
        self.family = family

    def execute(self, context: Any) -> None:
        failed: list[AirflowException] = []
        for stream in self._streams():
            if self._is_killed:
                raise AirflowException(f"family {self.family}: ended before stream {stream}")
            try:
                self.run_command(
                    [stream if argument == "STREAM" else argument for argument in self.arguments]
                )
            except AirflowException as error:
                failed.append(error)
        if failed:
            raise next(
                (one for one in failed if not isinstance(one, AirflowFailException)), failed[0]
            )

    def _streams(self) -> list[str]:
        # Exit code 1 also if another stream's file is wrong, or if Kafka does not list the topics.
        listed = self.ask(["status", "--list"], codes=(0, REFUSED))
        rows = [row for row in listed if row["family"] == self.family]
        # A family whose file is wrong has no streams, and a row of its own.
        for row in listed:
            if (row["stream"], row["family"]) == (self.family, None):
                raise AirflowFailException(row["error"])
        if unknown := next((row["error"] for row in rows if row["state"] == "unknown"), None):
            raise AirflowException(f"family {self.family}: expected its streams, found: {unknown}")
        return [row["stream"] for row in rows if row["state"] in ("ready", "gone")]


def _command(arguments: Sequence[str]) -> list[str]:
    return [*shlex.split(os.environ.get("ANABRANCH_COMMAND") or "anabranch"), *arguments]


def _start(command: Sequence[str], stdout: int | IO[str], stderr: int) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            env=os.environ | {"ANABRANCH_CONF": str(CONF), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # so that on_kill reaches Spark's JVM too
        )
    except OSError as error:
        raise AirflowFailException(
            f"expected to run {command[0]}, found: {error} (set ANABRANCH_COMMAND)"
        ) from error


def _require_success(command: Sequence[str], code: int, last: Iterable[str]) -> None:
    if code == 0:
        return
    message = "\n".join([f"{shlex.join(command)}: expected exit code 0, found {code}", *last])
    # A negative code is a signal (out of memory, or the task was stopped): treat it as transient.
    if code == TRANSIENT or code < 0:
        raise AirflowException(message)
    if code == UNEXPECTED:
        raise CommandBroken(
            f"not refused, but broken by an unexpected error; an operator has to look: {message}"
        )
    raise CommandRefused(message) if code == REFUSED else AirflowFailException(message)


class WatchOperator(AnabranchOperator):
    """Runs `anabranch status --late-after`, and fails if the speed layer is late."""

    def execute(self, context: Any) -> None:
        # Exit code 1 also if the layers differ in an hour.
        if late := self.ask(self.arguments, codes=(0, REFUSED))["late"]:
            raise CommandRefused(late)
        self.log.info("the speed layer is not late")


class HourOperator(AnabranchOperator):
    """Runs one command for the hour of its run, and can read the hour's state."""

    template_fields: Sequence[str] = ("arguments", "hour")

    def __init__(self, *, stream: str, arguments: Sequence[str], **kwargs: Any) -> None:
        super().__init__(arguments=arguments, **kwargs)
        self.stream = stream
        self.hour = HOUR

    def explain(self) -> Any:
        return self.ask(["explain", self.stream, self.hour])

    def rebuild_hour(self, arguments: Sequence[str], context: Any) -> None:
        """Rebuild the hour as a child of this task's run in lineage. After a refusal, push the XCom
        `refused` with `hour`, `revision`, `reason` and `at`."""
        try:
            self.run_command([*arguments, *_rebuild_arguments(self, context)])
        except CommandRefused:
            self.push_refusal(context["ti"])
            raise

    def push_refusal(self, instance: Any) -> None:
        try:
            refusals = self.explain()["refusals"]
        except AirflowException:
            self.log.exception(
                "reading the refusal of hour %s failed; the log above has it", self.hour
            )
            return
        if refusals:
            instance.xcom_push(key="refused", value={"hour": self.hour, **refusals[-1]})


class SealOperator(HourOperator):
    """Seals an hour. An hour before the stream's first is skipped, with the following tasks."""

    def __init__(self, *, stream: str, **kwargs: Any) -> None:
        super().__init__(
            stream=stream, arguments=["batch", stream, "--hour", HOUR, "--seal-only"], **kwargs
        )

    def execute(self, context: Any) -> None:
        try:
            super().execute(context)
        except (CommandRefused, CommandBroken):
            raise
        except AirflowFailException as error:
            if (first := self._first_hour_after()) is not None:
                raise AirflowSkipException(
                    f"the stream {self.stream} begins with hour {first}"
                ) from error
            raise

    def _first_hour_after(self) -> str | None:
        try:
            facts = self.explain()
        except AirflowException:
            return None  # the caller raises the error of the seal
        return str(facts["first_hour"]) if facts["state"] == "before the first" else None


def rebuild_options(
    params: Mapping[str, Any], run_id: str, run_type: str, cleared: int
) -> list[str]:
    """Return the options of a rebuild; a cleared run and a backfill restate. Pure."""
    again = cleared > 0 or run_type == "backfill"
    why = params.get("why") or (f"Airflow run {run_id}" if again else "")
    flags = {"--restate": params.get("restate") or again, "--accept": params.get("accept")}
    return [*(flag for flag, given in flags.items() if given), *(["--why", why] if why else [])]


def lineage_options(instance: Any) -> list[str]:
    """Return the options that name a task's try and DAG run, by the ids of Airflow's OpenLineage
    provider; none without it, which then sends no event of them."""
    try:
        macros = importlib.import_module("airflow.providers.openlineage.plugins.macros")
    except ImportError:
        return []
    return [
        f"--parent-run={macros.lineage_parent_id(instance)}",
        f"--root-run={macros.lineage_root_parent_id(instance)}",
    ]


class RebuildOperator(HourOperator):
    """Rebuilds an hour with the `rebuild_options` of its run."""

    def __init__(self, *, stream: str, **kwargs: Any) -> None:
        arguments = ["batch", stream, "--hour", HOUR, *BACKLOG]
        super().__init__(stream=stream, arguments=arguments, **kwargs)

    def execute(self, context: Any) -> None:
        self.rebuild_hour(self.arguments, context)


def _rebuild_arguments(operator: AnabranchOperator, context: Any) -> list[str]:
    """Return the `rebuild_options` of a task's run, and its parent runs for lineage."""
    run = context["dag_run"]
    options = rebuild_options(context["params"], run.run_id, run.run_type, run.clear_number or 0)
    try:
        return [*options, *lineage_options(context["ti"])]
    except Exception:
        operator.log.exception("lineage will not name this task; nothing else depends on it")
        return options


class BacklogOperator(AnabranchOperator):
    """Fails while an hour before that of the run waits, in a stream or in one of a group: its own
    run failed, or there was none, because the DAG was paused."""

    template_fields: Sequence[str] = ("arguments", "hour")

    def __init__(self, *, arguments: Sequence[str], **kwargs: Any) -> None:
        super().__init__(arguments=["status", *arguments], **kwargs)
        self.hour = HOUR

    def execute(self, context: Any) -> None:
        # Exit code 1 also if the layers differ in an hour.
        answer = self.ask(self.arguments, codes=(0, REFUSED))
        views = answer if isinstance(answer, list) else [answer]
        waiting = {
            view["stream"]: hours
            for view in views
            if (hours := [hour for hour in view.get("backlog", ()) if hour < self.hour])
        }
        if waiting:
            found = "; ".join(
                f"{stream}: {len(hours)} from {min(hours)}" for stream, hours in waiting.items()
            )
            raise AirflowFailException(
                f"expected no hour before {self.hour} to wait, found {found}; `anabranch explain "
                "STREAM HOUR` has the reason"
            )


class VerifyOperator(HourOperator):
    """Verifies an hour, and notifies downstream DAGs with asset events. The extra of each event has
    `hour`, `revision`, `rows` and `snapshot_id`."""

    def __init__(self, *, stream: str, **kwargs: Any) -> None:
        arguments = ["audit", stream, "--hours", HOUR, "--no-kafka"]
        # Airflow also passes `outlets` when it creates a mapped task.
        super().__init__(
            stream=stream, arguments=arguments, **kwargs | {"outlets": _outlets(stream)}
        )

    def execute(self, context: Any) -> Any:
        super().execute(context)
        return self.announce(context)

    def announce(self, context: Any) -> dict[str, Any]:
        """Set this task's asset events, and return their extra. Raises AirflowFailException unless
        the hour is accepted."""
        facts = self.explain()
        if facts["state"] != "accepted":
            raise AirflowFailException(
                f"hour {self.hour} of {self.stream}: expected it to be accepted, found it "
                f"{facts['state']}"
            )
        extra = {
            "hour": self.hour,
            "revision": facts["revision"],
            "rows": facts["counts"]["good"],
            "snapshot_id": facts["snapshot_id"],
        }
        if self.stream not in {stream.name for stream in streams()}:
            # A family's stream: Airflow knows only the assets of streams with a DAG of their own.
            self.outlets = []
            return extra
        hours, partitions, restated_days = _outlets(self.stream)
        events, day = context["outlet_events"], self.hour[:10]
        events[hours].extra = events[partitions].extra = extra
        events[partitions].add_partitions(self.hour)
        if facts["revision"] > 1 and self._is_accepted(day):
            events[restated_days].extra = extra
            events[restated_days].add_partitions(day)
        else:
            # Airflow emits an event for each outlet that the task has at its end.
            self.outlets = [hours, partitions]
        return extra

    def _is_accepted(self, day: str) -> bool:
        states = {row["hour"]: row["state"] for row in self.ask(["hours", self.stream])}
        return all(states.get(f"{day}T{hour:02}") == "accepted" for hour in range(24))


def _outlets(stream: str) -> list[Asset]:
    return [hours_asset(stream), partitions_asset(stream), restated_days_asset(stream)]


class GroupRebuildOperator(AnabranchOperator):
    """Seals and rebuilds an hour of all streams of a group in one Spark job.

    Returns a list of outcomes, one for each stream, over which `StreamOfGroupOperator` is mapped. A
    stream that is refused or fails does not fail this task. The task fails when there are no
    outcomes, or when all are transient.
    """

    template_fields: Sequence[str] = ("arguments", "hour")

    def __init__(self, *, group: str, **kwargs: Any) -> None:
        arguments = ["batch", "--group", group, "--hour", HOUR, *BACKLOG]
        super().__init__(arguments=arguments, **kwargs)
        self.hour = HOUR

    def execute(self, context: Any) -> list[dict[str, Any]]:
        cleared = context["dag_run"].clear_number or 0
        command = _command(
            [*self.arguments, *_rebuild_arguments(self, context), "--output", "json"]
        )
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            code, last = self._run(command, output, subprocess.PIPE)
            output.seek(0)
            printed = output.read()
        try:
            views = json.loads(printed[printed.index("{") :])["streams"]
        except (ValueError, KeyError):
            _require_success(command, code, [*last, *printed.splitlines()[-LAST_LINES:]])
            raise AirflowFailException(
                f"{shlex.join(command)}: expected JSON with streams, found none"
            ) from None
        outcomes = [group_outcome(view, self.hour, cleared) for view in views]
        for outcome in outcomes:
            self.log.info("stream %(stream)s: %(state)s %(reason)s", outcome)
        if all(outcome["exit_code"] == TRANSIENT for outcome in outcomes):
            _require_success(command, TRANSIENT, last)
        return outcomes


def group_outcome(view: Mapping[str, Any], hour: str, cleared: int) -> dict[str, Any]:
    """Return the outcome of an hour from a stream's part of the group's output. `cleared`: how
    often the run was cleared. Pure."""
    rows = {row["hour"]: row for row in view["hours"]}
    row = rows.get(hour, {"state": "failed", "revision": 0, "reason": None})
    reason = view["error"] or row["reason"] or ""
    return {
        "stream": view["stream"],
        "exit_code": view["exit_code"],
        "state": row["state"],
        "revision": row["revision"],
        "reason": str(reason)[:2000],
        "cleared": cleared,
    }


class StreamOfGroupOperator(VerifyOperator):
    """Processes one stream's hour in a group's run: merges it, then fails as its rebuild failed, or
    verifies the hour and notifies downstream DAGs.

    `outcome` is the stream's element of the result of `GroupRebuildOperator`. After a transient
    failure, and when only this task was cleared, the task rebuilds the hour of its stream itself; a
    cleared task restates an accepted hour.
    """

    template_fields: Sequence[str] = ("arguments", "hour", "rebuild")

    def __init__(self, *, outcome: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(stream=outcome["stream"], **kwargs)
        self.outcome = outcome
        self.rebuild = ["batch", self.stream, "--hour", HOUR]

    def execute(self, context: Any) -> Any:
        if self.outcome["state"] == "before the first":
            raise AirflowSkipException(self.outcome["reason"])
        try:
            self._require_rebuilt(context)
        finally:
            self.run_command(["merge", self.stream])
        return super().execute(context)

    def _require_rebuilt(self, context: Any) -> None:
        cleared, code = context["dag_run"].clear_number or 0, self.outcome["exit_code"]
        if cleared != self.outcome["cleared"] or code == TRANSIENT:
            self.rebuild_hour(self.rebuild, context)
        elif code == REFUSED:
            self.push_refusal(context["ti"])
            raise CommandRefused(f"hour {self.hour} of {self.stream}: {self.outcome['reason']}")
        elif code != 0:
            raise AirflowFailException(
                f"hour {self.hour} of {self.stream}: exit code {code}: {self.outcome['reason']}"
            )


def _hours_through(first: str, last: str) -> list[str]:
    """Return the hours from `first` to `last`, both included, of the form 2026-11-21T03."""
    form = "%Y-%m-%dT%H"
    begin = datetime.strptime(first, form)
    count = (datetime.strptime(last, form) - begin) // timedelta(hours=1) + 1
    return [(begin + timedelta(hours=i)).strftime(form) for i in range(count)]


class GroupHourOperator(AnabranchOperator):
    """Notifies downstream DAGs with an event of `group_hours_asset` for the run's hour and for each
    later hour that is complete, at most MOST_EVENTS.

    Skipped while the group is not complete through the run's hour: an earlier hour of a stream
    waits, and its own run has failed. Once that hour is accepted, its run emits the events of both.
    """

    template_fields: Sequence[str] = ("arguments", "hour")

    def __init__(self, *, group: str, **kwargs: Any) -> None:
        super().__init__(
            arguments=["complete", "--group", group],
            **kwargs | {"outlets": [group_hours_asset(group)]},
        )
        self.hour, self.group = HOUR, group

    def execute(self, context: Any) -> list[str]:
        try:
            view = self.ask(self.arguments)
        except CommandRefused as error:
            raise AirflowSkipException(
                f"group {self.group}: a stream has no complete hour yet: {error}"
            ) from error
        through, behind = (
            view["complete_through"],
            [n for n, h in view["streams"].items() if h < self.hour],
        )
        if behind:
            raise AirflowSkipException(
                f"group {self.group}: expected it complete through {self.hour}, found {through}; "
                f"streams behind: {', '.join(behind[:3])}"
            )
        hours = _hours_through(self.hour, through)[:MOST_EVENTS]
        event = context["outlet_events"][group_hours_asset(self.group)]
        event.extra = {"complete_through": through, "streams": len(view["streams"])}
        for hour in hours:
            event.add_partitions(hour)
        return hours
