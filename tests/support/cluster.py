"""A Spark standalone cluster on this machine: a master, and two workers on two host names."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from servers import free_ports
from waiting import wait_for

from anabranch.spark.java import spark_home

# Spark runs a second attempt of a task on another host only, so the workers need two host names.
HOSTS = ("localhost", "127.0.0.1")
CORES = 1  # of each worker
_DEPLOY = "org.apache.spark.deploy"


@dataclass
class SparkCluster:
    """`processes`: master and workers by host name; each leads a session with its executors."""

    folder: Path
    port: int
    ui: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def master(self) -> str:
        return f"spark://127.0.0.1:{self.port}"

    def start_master(self) -> None:
        at = ("--host", "127.0.0.1", "--port", str(self.port), "--webui-port", str(self.ui))
        self._start("master", f"{_DEPLOY}.master.Master", *at)

    def start_worker(self, host: str) -> None:
        """Start a worker, and wait until it is registered."""
        if host in self.processes and self.processes[host].poll() is None:
            os.killpg(self.processes[host].pid, signal.SIGKILL)  # a decommissioned worker
            self.processes[host].wait(30)
        size = ("--cores", str(CORES), "--memory", "1g", "--webui-port", "0")
        at = ("--host", host, "--work-dir", str(self.folder / host))
        self._start(host, f"{_DEPLOY}.worker.Worker", *at, *size, self.master)
        wait_for(lambda: host in self.alive(), f"worker {host} (see {self.folder})")

    def view(self) -> dict[str, Any]:
        """The master's JSON view of workers and applications; empty if it does not answer."""
        with (
            suppress(OSError, ValueError),
            urllib.request.urlopen(f"http://127.0.0.1:{self.ui}/json/", timeout=5) as answer,
        ):
            state: dict[str, Any] = json.load(answer)
            return state
        return {"workers": [], "activeapps": [], "completedapps": []}

    def alive(self) -> dict[str, Any]:
        """Return the workers that are ALIVE for the master, by host."""
        workers = self.view()["workers"]
        return {worker["host"]: worker for worker in workers if worker["state"] == "ALIVE"}

    def cores_used(self) -> int:
        return sum(int(worker["coresused"]) for worker in self.alive().values())

    def executors(self, host: str) -> list[psutil.Process]:
        """Return the running child processes of a worker: its executors."""
        children = psutil.Process(self.processes[host].pid).children(recursive=True)
        return [p for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def pause_executors(self, host: str) -> None:
        """Send SIGSTOP to a worker's executors, so that their tasks cannot end."""
        self._signal_all(self.executors(host), signal.SIGSTOP)

    def resume_executors(self, host: str) -> None:
        self._signal_all(self.executors(host), signal.SIGCONT)

    def kill_worker(self, host: str) -> None:
        """Send SIGKILL to a worker and its executors at once, as if their machine failed."""
        lost = self.executors(host)
        assert lost, f"expected an executor on {host}, found none"
        worker = self.processes[host]
        os.killpg(worker.pid, signal.SIGKILL)
        worker.wait(30)
        # Python workers are in a separate process group.
        self._signal_all(lost, signal.SIGKILL)
        _, left = psutil.wait_procs(lost, 30)
        assert not left, f"expected the executors of {host} to end with it, found {left}"

    def decommission(self, host: str) -> None:
        """Decommission a worker, as a spot instance: executors migrate their blocks and exit."""
        os.kill(self.processes[host].pid, signal.SIGPWR)
        wait_for(lambda: host not in self.alive(), f"{host} to be given up (see {self.folder})")

    def stop(self) -> None:
        for process in self.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)

    @staticmethod
    def _signal_all(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _start(self, name: str, *arguments: str) -> None:
        command = [str(spark_home() / "bin" / "spark-class"), *arguments]
        options = "-Dspark.decommission.enabled=true"
        # On another machine, the environment lacks the keys of a job.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, cwd=self.folder,
                env=environment | {"SPARK_HOME": str(spark_home()), "SPARK_DAEMON_JAVA_OPTS": options},
            )  # fmt: skip


@contextmanager
def running_cluster(hosts: Sequence[str] = HOSTS) -> Iterator[SparkCluster]:
    """Run a cluster with one registered worker for each host name within a `with`. The work folders
    are then removed: they contain a copy of all jars for each executor."""
    folder = Path(tempfile.mkdtemp(prefix="anabranch-cluster-"))
    cluster = SparkCluster(folder, *free_ports(2))
    try:
        cluster.start_master()
        for host in hosts:
            cluster.start_worker(host)
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)
