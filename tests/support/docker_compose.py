"""Docker Compose as a user runs it: a separate project in a clean checkout, with free ports."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servers import free_ports

PORTS = ("KAFKA_PORT", "S3_PORT", "AIRFLOW_PORT", "SPARK_PORT", "PROMETHEUS_PORT", "GRAFANA_PORT")


def docker(
    *arguments: str, seconds: float = 120, cwd: Path | None = None, **environment: str
) -> str:
    """Run Docker's client; return its standard output. Raises AssertionError with the output."""
    done = run(*arguments, seconds=seconds, cwd=cwd, **environment)
    found = f"docker {' '.join(arguments)}: expected exit code 0, found {done.returncode}"
    assert done.returncode == 0, f"{found}:\n{done.stdout[-3000:]}{done.stderr[-5000:]}"
    return done.stdout


def run(
    *arguments: str, seconds: float = 120, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    how: Any = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": seconds}
    how |= {"cwd": cwd, "env": os.environ | environment, "text": True, "errors": "replace"}
    return subprocess.run(["docker", *arguments], **how)


def find_missing() -> str | None:
    """Return the first missing requirement of these tests, with the remedy; None if all are met."""
    for arguments, what in (
        ("version", "a Docker daemon that this user may use (start one, or set DOCKER_HOST)"),
        ("buildx version", "the Docker plugin buildx (apt-get install docker-buildx)"),
        ("compose version", "the Docker plugin compose (apt-get install docker-compose-v2)"),
    ):
        try:
            done = run(*arguments.split(), seconds=60)
        except FileNotFoundError:
            return f"expected {what}, found no `docker` on the PATH"
        if done.returncode != 0:
            return f"expected {what}, found: {(done.stderr or done.stdout).strip()[-300:]}"
    return None


class Project:
    """The compose file of a folder, with its own project name, image name and ports."""

    def __init__(self, folder: Path, name: str, without: Sequence[str] = ()) -> None:
        self.folder, self.name, self.image = folder, name, f"{name}:test"
        ports = zip(PORTS, map(str, free_ports(len(PORTS))), strict=True)
        own = {"COMPOSE_PROJECT_NAME": name, "ANABRANCH_IMAGE": self.image}
        self._environment = own | dict(ports)
        settings = json.loads(self.compose("config", "--format", "json"))
        services: dict[str, Any] = settings["services"]
        self.services = {name: what for name, what in services.items() if name not in without}

    def compose(self, *arguments: str, seconds: float = 120) -> str:
        return docker("compose", *arguments, seconds=seconds, cwd=self.folder, **self._environment)

    def execute(self, service: str, *command: str, seconds: float = 120) -> str:
        """Run a command in a running container, as its user."""
        return self.compose("exec", "-T", service, *command, seconds=seconds)

    def printed_json(self, *arguments: str) -> Any:
        """Run `anabranch` in a container that no kill of a service reaches; its JSON output."""
        command = ("anabranch", *arguments, "--output", "json")
        run = ("run", "--rm", "--no-deps", "-T", "apply")
        return json.loads(self.compose(*run, *command, seconds=300))

    def containers(self, *services: str) -> list[dict[str, Any]]:
        """The containers that `docker compose ps` lists for services, without those of `run`."""
        lines = self.compose("ps", "--all", "--format", "json", *services).splitlines()
        run = "com.docker.compose.oneoff=True"
        return [one for one in map(json.loads, lines) if run not in one["Labels"]]

    def states(self) -> dict[str, list[tuple[str, int]]]:
        """Return health (or else state) and exit code of each container, by service."""
        found: dict[str, list[tuple[str, int]]] = {}
        for one in self.containers():
            state = one["Health"] or one["State"]
            found.setdefault(one["Service"], []).append((state, one["ExitCode"]))
        return found

    def inspect(self, *services: str) -> list[dict[str, Any]]:
        """Return the output of `docker inspect` for each container of the services."""
        ids = [one["ID"] for one in self.containers(*services)]
        return list(json.loads(docker("inspect", *ids)))
