"""A compose file's services as processes: each in a container of its own (container.py), in the order of `depends_on`,
with the command, environment, volumes, health check and stop signal that the file gives it."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from container import Box, Container, Network, running_network
from dockerfile import Built
from images import Image, image
from waiting import wait_for

_PATIENCE = 300.0  # for what a service waits for; the machine may be busy with other things
_GRACE = 10.0  # an engine's default


class Composition:
    """The services of a resolved file, without those of `without`."""

    def __init__(self, services: Mapping[str, Any], built: Built, scratch: Path, network: Network) -> None:
        self._services, self._scratch, self._network = services, scratch, network
        self._images: dict[str, Image] = {
            name: image(service["image"], scratch / name, built) for name, service in services.items()
        }
        self._running: dict[str, Container] = {}
        self.completed: list[str] = []

    def up(self, *names: str) -> None:
        """Start these services, or all that do not run yet, each once what it depends on has come true; returns when
        they are healthy."""
        wanted = {name: self._services[name] for name in names or self._services}
        waiting = {name: service for name, service in wanted.items() if self._hosts(name)[0] not in self._running}
        while waiting:
            ready = [n for n, s in waiting.items() if all(o not in waiting for o in s.get("depends_on") or {})]
            assert ready, f"expected no circle among {sorted(waiting)}"
            for name in ready:
                self._await_dependencies(name)
                self._start(name)
                del waiting[name]
        for name, service in wanted.items():
            if "healthcheck" in service:
                self.await_healthy(name)

    def await_healthy(self, name: str) -> None:
        """Run the health check of each of the service's containers until it ends with 0."""
        for host in self._hosts(name):
            wait_for(partial(self._is_healthy, name, host), f"{host} to be healthy", _PATIENCE, pause=0.5)

    def execute(self, name: str, *arguments: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command beside a service's own, as `docker compose exec` does."""
        return self._network.run(self._box(name, self._hosts(name)[0]), arguments, seconds)

    def log(self, host: str) -> str:
        return self._running[host].log

    def down(self) -> dict[str, tuple[float, int]]:
        """Stop every service, the last that was started first: the stop signal, and SIGKILL after its time of
        grace. Returns how many seconds each took, and its exit code; one that was killed has code 137."""
        took = {}
        for host, container in reversed(self._running.items()):
            if container.code is None:
                took[host] = self._stop(next(n for n in self._services if host in self._hosts(n)), container)
        self._running.clear()
        return took

    def kill(self) -> None:
        for container in self._running.values():
            container.kill()

    def _stop(self, name: str, container: Container) -> tuple[float, int]:
        service, began = self._services[name], time.monotonic()
        container.signal(signal.Signals[service.get("stop_signal", self._images[name].stop_signal)])
        try:
            code = container.wait(
                seconds_of(service["stop_grace_period"]) if "stop_grace_period" in service else _GRACE
            )
        except subprocess.TimeoutExpired:
            container.kill()
            code = 137
        return time.monotonic() - began, code

    def _await_dependencies(self, name: str) -> None:
        for other, wanted in (self._services[name].get("depends_on") or {}).items():
            if wanted["condition"] == "service_healthy":
                self.await_healthy(other)
            else:
                assert wanted["condition"] == "service_completed_successfully"
                assert other in self.completed, f"{name} waits for {other} to end, which never does"

    def _start(self, name: str) -> None:
        service = self._services[name]
        for host in self._hosts(name):
            base = self._images[name]
            arguments = [*base.entrypoint, *(service["command"] or base.command)]
            line = self._network.command(self._box(name, host), arguments)
            tries = int((re.fullmatch(r"on-failure:(\d+)", service["restart"]) or [0, 0])[1])
            self._running[host] = Container(line, self._scratch / f"{host}.log")
            while tries:
                code = self._running[host].wait(_PATIENCE)
                if code == 0:
                    self.completed.append(name)
                    break
                tries -= 1
                assert tries, f"expected {name} to end with 0, found {code}:\n{self.log(host)[-3000:]}"
                self._running[host] = Container(line, self._scratch / f"{host}.log")

    def _is_healthy(self, name: str, host: str) -> bool:
        check, code = self._services[name]["healthcheck"], self._running[host].code
        assert code is None, f"expected {host} to run, found that it ended with {code}:\n{self.log(host)[-4000:]}"
        kind, *arguments = check["test"]
        assert kind == "CMD"
        return self._network.run(self._box(name, host), arguments, seconds_of(check["timeout"])).returncode == 0

    def _hosts(self, name: str) -> list[str]:
        return hosts_of(name, self._services[name])

    def _box(self, name: str, host: str) -> Box:
        service, base = self._services[name], self._images[name]
        folders, readable = dict(base.folders), dict(base.readable)
        for volume in service.get("volumes") or []:
            if volume["type"] == "volume":
                source = self._scratch / "volumes" / volume["source"]
                source.mkdir(parents=True, exist_ok=True)
                folders[volume["target"]] = source
            else:
                assert volume["read_only"], volume
                readable[volume["target"]] = Path(volume["source"])
        environment = dict(base.environment) | (service.get("environment") or {})
        return Box(host, base.user, environment, base.cwd, folders, readable, base.programs)


def hosts_of(name: str, service: Mapping[str, Any]) -> list[str]:
    """The names of a service's containers: its own, or one for each replica."""
    replicas = (service.get("deploy") or {}).get("replicas", 1)
    return [name] if replicas == 1 else [f"{name}-{i + 1}" for i in range(replicas)]


def seconds_of(duration: str) -> float:
    """`1m30s` in seconds."""
    units = {"h": 3600, "m": 60, "s": 1}
    return float(sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", duration)))


@contextmanager
def running_composition(
    services: Mapping[str, Any], built: Built, scratch: Path, without: Sequence[str] = ()
) -> Iterator[Composition]:
    """The services, none started yet; whatever still runs at the end of the `with` is killed."""
    wanted = {name: service for name, service in services.items() if name not in without}
    hosts = [host for name, service in wanted.items() for host in hosts_of(name, service)]
    with running_network(scratch, hosts) as network:
        composition = Composition(wanted, built, scratch, network)
        try:
            yield composition
        finally:
            composition.kill()
