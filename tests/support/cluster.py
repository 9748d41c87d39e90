"""A Spark standalone cluster on this machine: one master and two workers, on two names of it, as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from anabranch.dev.processes import free_port
from anabranch.dev.spark_home import spark_home

# Spark never runs two attempts of a task on one host, so the workers need two names.
HOSTS = ("localhost", "127.0.0.1")


@contextmanager
def running_cluster(folder: Path) -> Iterator[str]:
    """Its address, once both workers are registered."""
    port = free_port()
    ui = free_port(port)
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> None:
        log = (folder / f"{name}.log").open("wb")
        environment = os.environ | {"SPARK_HOME": str(spark_home()), "SPARK_WORKER_DIR": str(folder / "work")}
        command = [str(spark_home() / "bin" / "spark-class"), *arguments]
        started.append(
            subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True, cwd=folder)
        )
        log.close()

    try:
        master = f"spark://127.0.0.1:{port}"
        package = "org.apache.spark.deploy"
        start("master", f"{package}.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", str(ui))
        for host in HOSTS:
            size = ("--cores", "1", "--memory", "1g", "--webui-port", "0")
            start(f"worker-{host}", f"{package}.worker.Worker", "--host", host, *size, master)
        deadline = time.monotonic() + 90
        while _workers(ui) < len(HOSTS):
            assert time.monotonic() < deadline, f"expected two workers within 90 s, see {folder}"
            time.sleep(0.2)
        yield master
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def _workers(port: int) -> int:
    with suppress(OSError, ValueError), urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=2) as answer:
        return sum(worker["state"] == "ALIVE" for worker in json.load(answer)["workers"])
    return 0
