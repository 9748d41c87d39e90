"""A separate Airflow for a test, on PostgreSQL: on SQLite its processes block each other."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg2
import requests
from postgres import PASSWORD, USER, Postgres, running_postgres

from anabranch.dev.services.processes import HOST, free_port
from anabranch.offsets.hours import hour_of

ROOT = Path(__file__).resolve().parents[2]
_DATABASE = "airflow"
_PATIENCE = 600


class Scheduler:
    """A running Airflow, by its command line, or by its database if there is no command."""

    def __init__(
        self,
        home: Path,
        database: Postgres,
        environment: Mapping[str, str],
        process: subprocess.Popen[bytes],
    ) -> None:
        self._home, self._database, self._environment, self._process = (
            home, database, environment, process,
        )  # fmt: skip
        self._api = environment["AIRFLOW__API__BASE_URL"]

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while not condition():
            late = f"expected {what} within {_PATIENCE} s, found:\n{self.log[-6000:]}"
            assert time.monotonic() < deadline, late
            time.sleep(1)

    @property
    def log(self) -> str:
        return (self._home / "standalone.log").read_text(encoding="utf-8", errors="replace")

    def command(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "airflow", *arguments],
            env=dict(self._environment), cwd=ROOT, capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    def select(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            return self._database.execute(sql, _DATABASE, values)
        except psycopg2.errors.UndefinedTable:  # not migrated yet
            return []

    def runs(self, dag: str) -> dict[str, str]:
        """Return the state of runs by the hour of the data interval, oldest first."""
        rows = self.select(
            "SELECT data_interval_start, state FROM dag_run WHERE dag_id = %s ORDER BY "
            "data_interval_start",
            dag,
        )
        return {hour_of(start): str(state) for start, state in rows}

    def tasks(self, dag: str, hour: str) -> dict[str, str]:
        """Return the state of each task of one run."""
        rows = self.select(
            "SELECT t.task_id, t.state FROM task_instance t JOIN dag_run r USING (dag_id, run_id) "
            "WHERE t.dag_id = %s AND r.data_interval_start = %s",
            dag, f"{hour}:00:00+00:00",
        )  # fmt: skip
        return {str(task): str(state) for task, state in rows}

    def events(self) -> list[dict[str, Any]]:
        """Return the extras of all events of `anabranch_hours__…`, oldest first."""
        rows = self.select(
            "SELECT e.extra FROM asset_event e JOIN asset a ON a.id = e.asset_id "
            "WHERE a.name LIKE 'anabranch_hours__%%' ORDER BY e.id"
        )
        return [extra for (extra,) in rows]

    def mapped(self, dag: str, task: str, hour: str) -> dict[str, str]:
        """Return the state of each instance of a mapped task of one run, by name."""
        rows = self.select(
            "SELECT t.rendered_map_index, t.state FROM task_instance t JOIN dag_run r USING "
            "(dag_id, run_id) WHERE t.dag_id = %s AND t.task_id = %s AND r.data_interval_start = "
            "%s AND t.map_index >= 0",
            dag, task, f"{hour}:00:00+00:00",
        )  # fmt: skip
        return {str(name): str(state) for name, state in rows}

    def partition_events(self, asset: str) -> list[str]:
        """Return the partition keys of an asset's events, oldest first."""
        rows = self.select(
            "SELECT e.partition_key FROM asset_event e JOIN asset a ON a.id = e.asset_id "
            "WHERE a.name = %s ORDER BY e.id",
            asset,
        )  # fmt: skip
        return [str(key) for (key,) in rows]

    def partition_runs(self, dag: str) -> list[tuple[str, str]]:
        """Return partition key and state of the runs that assets triggered, oldest first."""
        rows = self.select(
            "SELECT partition_key, state FROM dag_run WHERE dag_id = %s ORDER BY id", dag
        )
        return [(str(key), str(state)) for key, state in rows]

    def xcom(self, dag: str, task: str, hour: str, key: str) -> Any:
        """Return a task's XCom with this key; None if there is none."""
        rows = self.select(
            "SELECT x.value FROM xcom x JOIN dag_run r ON r.id = x.dag_run_id "
            "WHERE x.dag_id = %s AND x.task_id = %s AND x.key = %s AND r.data_interval_start = %s",
            dag, task, key, f"{hour}:00:00+00:00",
        )  # fmt: skip
        return rows[0][0] if rows else None

    def backfill(self, dag: str, first: str, last: str) -> None:
        """Backfill hours, also completed ones, oldest first, as an operator does."""
        self.command(
            "backfill", "create", "--dag-id", dag, "--from-date", f"{first}:00:00+00:00",
            "--to-date", f"{last}:00:00+00:00", "--reprocess-behavior", "completed",
            "--max-active-runs", "1",
        )  # fmt: skip

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
        [(logical,)] = self.select(
            "SELECT logical_date FROM dag_run WHERE dag_id = %s AND data_interval_start = %s",
            dag, f"{hour}:00:00+00:00",
        )  # fmt: skip
        self.command(
            "tasks", "clear", dag, "-t", task, "-d", "-y", "-s", logical.isoformat(), "-e",
            logical.isoformat(),
        )  # fmt: skip

    def clear_mapped(self, dag: str, task: str, hour: str, name: str) -> None:
        """Clear one instance of a mapped task with its downstream tasks, as in the UI."""
        [(run, index)] = self.select(
            "SELECT t.run_id, t.map_index FROM task_instance t JOIN dag_run r USING (dag_id, "
            "run_id) WHERE t.dag_id = %s AND t.task_id = %s AND r.data_interval_start = %s AND "
            "t.rendered_map_index = %s",
            dag, task, f"{hour}:00:00+00:00", name,
        )  # fmt: skip
        token = requests.get(f"{self._api}/auth/token", timeout=60).json()["access_token"]
        body = {
            "dry_run": False, "dag_run_id": run, "task_ids": [[task, index]], "only_failed": False,
            "include_downstream": True,
        }  # fmt: skip
        answer = requests.post(
            f"{self._api}/api/v2/dags/{dag}/clearTaskInstances", json=body, timeout=60,
            headers={"Authorization": f"Bearer {token}"},
        )  # fmt: skip
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
    port = free_port()
    log_port = free_port(port)
    trigger_port = free_port(port, log_port)
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
        process = subprocess.Popen(
            [sys.executable, "-m", "airflow", "standalone"],
            env=settings, cwd=ROOT, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    scheduler = Scheduler(home, database, settings, process)
    try:
        yield scheduler
    finally:
        scheduler.stop()
