"""A separate Airflow for a test, on PostgreSQL: on SQLite its processes block each other."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import requests
from postgres import PASSWORD, USER, Postgres, running_postgres
from programs import ROOT, output_of
from servers import free_ports
from waiting import wait_for

from anabranch.dev.services.processes import HOST
from anabranch.offsets.hours import hour_of

Process = subprocess.Popen[bytes]
_DATABASE = "airflow"
_PATIENCE = 600


class Scheduler:
    """A running Airflow, by its command line, or by its database if there is no command."""

    def __init__(
        self, home: Path, database: Postgres, environment: Mapping[str, str], process: Process
    ) -> None:
        self._home, self._database = home, database
        self._environment, self._process = environment, process
        self._api = environment["AIRFLOW__API__BASE_URL"]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        try:
            wait_for(condition, what, _PATIENCE, 1)
        except AssertionError as late:
            raise AssertionError(f"{late}, found:\n{self.log[-6000:]}") from late

    @property
    def log(self) -> str:
        return (self._home / "standalone.log").read_text(encoding="utf-8", errors="replace")

    def command(self, *arguments: str) -> str:
        program = (sys.executable, "-m", "airflow")
        return output_of(*program, *arguments, env=dict(self._environment), seconds=180)

    def select(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            return self._database.execute(sql, _DATABASE, values)
        except psycopg2.errors.UndefinedTable:  # not migrated yet
            return []

    def runs(self, dag: str) -> dict[str, str]:
        """Return the state of runs by the hour of the data interval, oldest first."""
        found = "SELECT data_interval_start, state FROM dag_run WHERE dag_id = %s"
        rows = self.select(f"{found} ORDER BY data_interval_start", dag)
        return {hour_of(start): str(state) for start, state in rows}

    def tasks(self, dag: str, hour: str) -> dict[str, str]:
        """Return the state of each task of one run."""
        rows = self.instances("t.task_id, t.state", dag, hour)
        return {str(task): str(state) for task, state in rows}

    def instances(
        self, columns: str, dag: str, hour: str, also: str = "", *values: str
    ) -> list[tuple[Any, ...]]:
        """Return columns of the tasks `t` of one run `r`, of those that fulfil `also`."""
        tasks = "task_instance t JOIN dag_run r USING (dag_id, run_id)"
        run = "t.dag_id = %s AND r.data_interval_start = %s"
        sql = f"SELECT {columns} FROM {tasks} WHERE {run} {also}"
        return self.select(sql, dag, f"{hour}:00:00+00:00", *values)

    def events(self) -> list[dict[str, Any]]:
        """Return the extras of all events of `anabranch_hours__…`, oldest first."""
        return self.of_assets("e.extra", "LIKE", "anabranch_hours__%")

    def of_assets(self, column: str, how: str, name: str) -> list[Any]:
        """Return a column of the events `e` of assets by their name, oldest first."""
        events = "asset_event e JOIN asset a ON a.id = e.asset_id"
        sql = f"SELECT {column} FROM {events} WHERE a.name {how} %s ORDER BY e.id"
        return [value for (value,) in self.select(sql, name)]

    def mapped(self, dag: str, task: str, hour: str) -> dict[str, str]:
        """Return the state of each instance of a mapped task of one run, by name."""
        mapped = "AND t.task_id = %s AND t.map_index >= 0"
        rows = self.instances("t.rendered_map_index, t.state", dag, hour, mapped, task)
        return {str(name): str(state) for name, state in rows}

    def partition_events(self, asset: str) -> list[str]:
        """Return the partition keys of an asset's events, oldest first."""
        return [str(key) for key in self.of_assets("e.partition_key", "=", asset)]

    def partition_runs(self, dag: str) -> list[tuple[str, str]]:
        """Return partition key and state of the runs that assets triggered, oldest first."""
        found = "SELECT partition_key, state FROM dag_run WHERE dag_id = %s ORDER BY id"
        rows = self.select(found, dag)
        return [(str(key), str(state)) for key, state in rows]

    def xcom(self, dag: str, task: str, hour: str, key: str) -> Any:
        """Return a task's XCom with this key; None if there is none."""
        found = "SELECT x.value FROM xcom x JOIN dag_run r ON r.id = x.dag_run_id"
        of_task = "x.dag_id = %s AND x.task_id = %s AND x.key = %s AND r.data_interval_start = %s"
        at = f"{hour}:00:00+00:00"
        rows = self.select(f"{found} WHERE {of_task}", dag, task, key, at)
        return rows[0][0] if rows else None

    def backfill(self, dag: str, first: str, last: str) -> None:
        """Backfill hours, also completed ones, oldest first, as an operator does."""
        dates = ("--from-date", f"{first}:00:00+00:00", "--to-date", f"{last}:00:00+00:00")
        how = ("--reprocess-behavior", "completed", "--max-active-runs", "1")
        self.command("backfill", "create", "--dag-id", dag, *dates, *how)

    def is_backfilling(self) -> bool:
        """Return whether a backfill runs; the scheduler checks every 30 s whether it has ended."""
        return bool(self.select("SELECT id FROM backfill WHERE completed_at IS NULL"))

    def task_log(self, dag: str, task: str) -> str:
        """Return the logs of a task, of all its runs."""
        logs = self._home / "logs" / f"dag_id={dag}"
        files = sorted(logs.glob(f"run_id=*/task_id={task}/*.log"))
        return "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)

    def clear(self, dag: str, task: str, hour: str) -> None:
        """Clear a task of one run with what follows. `-t` matches any task with `task` in its name."""
        [logical] = {date.isoformat() for (date,) in self.instances("r.logical_date", dag, hour)}
        self.command("tasks", "clear", dag, "-t", task, "-d", "-y", "-s", logical, "-e", logical)

    def clear_mapped(self, dag: str, task: str, hour: str, name: str) -> None:
        """Clear one instance of a mapped task with its downstream tasks, as in the UI."""
        named = "AND t.task_id = %s AND t.rendered_map_index = %s"
        [(run, index)] = self.instances("t.run_id, t.map_index", dag, hour, named, task, name)
        token = requests.get(f"{self._api}/auth/token", timeout=60).json()["access_token"]
        body = {"dry_run": False, "only_failed": False, "include_downstream": True}
        body |= {"dag_run_id": run, "task_ids": [[task, index]]}
        url, by = f"{self._api}/api/v2/dags/{dag}", {"Authorization": f"Bearer {token}"}
        answer = requests.post(f"{url}/clearTaskInstances", json=body, timeout=60, headers=by)
        assert answer.ok, answer.text

    def stop(self) -> None:
        """Send SIGINT, which ends all processes; kill those that are left after a minute."""
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(self._process.pid).children(recursive=True)
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(60)
            _, alive = psutil.wait_procs(family, 10)
            for process in alive:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(alive, 10)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(30)


@contextmanager
def running_airflow(home: Path, **environment: str) -> Iterator[Scheduler]:
    """Run `airflow standalone` with Anabranch's DAGs within a `with`, on its own PostgreSQL."""
    with running_postgres() as database:
        yield from _run(home, database, environment)


def _run(home: Path, database: Postgres, environment: Mapping[str, str]) -> Iterator[Scheduler]:
    database.execute(f"CREATE DATABASE {_DATABASE}", "postgres")
    address = f"postgresql+psycopg2://{USER}:{PASSWORD}@{HOST}:{database.port}/{_DATABASE}"
    port, log_port, trigger_port = free_ports(3)
    settings = os.environ | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": address,
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__PARALLELISM": "4",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://{HOST}:{port}/execution/",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__HOST": HOST,
        "AIRFLOW__API__BASE_URL": f"http://{HOST}:{port}",
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(log_port),
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(trigger_port),
        "AIRFLOW__WORKERS__MIN_HEARTBEAT_INTERVAL": "1",
        "ANABRANCH_COMMAND": f"{sys.executable} -m anabranch.cli",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        **environment,
    }
    home.mkdir()
    with (home / "standalone.log").open("ab") as log:
        command = [sys.executable, "-m", "airflow", "standalone"]
        how: Any = {"stdout": log, "stderr": log, "start_new_session": True}
        process = subprocess.Popen(command, env=settings, cwd=ROOT, **how)
    scheduler = Scheduler(home, database, settings, process)
    try:
        yield scheduler
    finally:
        scheduler.stop()
