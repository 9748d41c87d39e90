"""A service as a process that outlives the command that started it. Later commands find it by its
command line alone: no file can be lost, stale or of another machine."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from anabranch.common.errors import ConfigurationError, Terminal, Transient

HOST = "127.0.0.1"
_POLL_SECONDS = 0.1
# After SIGKILL, a process that waits for a disk ends only when the disk has answered.
_KILL_SECONDS = 20.0

# Children of this process; `start` reaps those that have ended, which would stay zombies.
_children: list[subprocess.Popen[bytes]] = []


class Found(NamedTuple):
    """A running service, and its port."""

    process: psutil.Process
    port: int


@dataclass(frozen=True)
class Daemon:
    """One service of one home. Its command line contains a marker: its name, port and home."""

    name: str
    title: str
    home: Path

    def marker(self, port: int) -> str:
        return f"-Danabranch.dev={self.name}:{port}:{self.home}"

    @property
    def port_file(self) -> Path:
        """File with the port of the last start, for the next one."""
        return self.home / "run" / f"{self.name}.port"

    @property
    def log(self) -> Path:
        return self.home / "logs" / f"{self.name}.log"

    def last_port(self) -> int | None:
        """Return the port of the last start; None if it is not recorded."""
        try:
            return int(self.port_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None

    def find(self) -> Found | None:
        """Return the running process."""
        before, after = self.marker(0).split(":0:", 1)
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                for argument in process.cmdline():
                    port = argument.removeprefix(f"{before}:").removesuffix(f":{after}")
                    if port.isdigit() and argument == self.marker(int(port)) and is_alive(process):
                        return Found(process, int(port))
        return None

    def process(self) -> psutil.Process | None:
        found = self.find()
        return None if found is None else found.process

    def start(
        self, command: Sequence[str], port: int, environment: Mapping[str, str]
    ) -> psutil.Process:
        """Start `command` in a session of its own, so that Ctrl-C in the terminal does not reach
        it.

        Its output goes to the log. The log of the previous run is kept as `.1`.
        """
        for folder in (self.port_file.parent, self.log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_name(self.log.name + ".1"))
        self.port_file.write_text(f"{port}\n", encoding="utf-8")
        _children[:] = [child for child in _children if child.poll() is None]
        with self.log.open("wb") as log:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.home,
                env=dict(environment),
                start_new_session=True,
            )
        _children.append(child)
        return psutil.Process(child.pid)

    def await_answer(
        self, process: psutil.Process, answers: Callable[[], bool], seconds: float
    ) -> None:
        """Wait for `answers()`. Raises Terminal if the process ends, Transient after `seconds`."""
        deadline = time.monotonic() + seconds
        while not answers():
            if not is_alive(process):
                raise Terminal(f"{self.title} ended while it was starting. {self._log_tail()}")
            if time.monotonic() >= deadline:
                raise Transient(
                    f"{self.title} (pid {process.pid}) has not answered for {seconds:.0f} s. "
                    f"{self._log_tail()}"
                )
            time.sleep(_POLL_SECONDS)

    def _log_tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        return f"The end of {self.log}:" + "".join(f"\n  {line[:300]}" for line in lines)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. False for a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def stop_all(processes: Sequence[psutil.Process], seconds: float) -> tuple[int, ...]:
    """Send SIGTERM to all, and SIGKILL to those that are alive after `seconds`. Return the killed
    pids. Raises Transient if a process does not end."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    stubborn = _await_end(processes, seconds)
    for process in stubborn:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if immortal := _await_end(stubborn, _KILL_SECONDS):
        raise Transient(
            f"Processes {[process.pid for process in immortal]} do not end even after SIGKILL; "
            "try again."
        )
    return tuple(process.pid for process in stubborn)


def _await_end(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    deadline = time.monotonic() + seconds
    living = [process for process in processes if is_alive(process)]
    while living and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        living = [process for process in living if is_alive(process)]
    return living


def free_port(*avoid: int) -> int:
    """Return a port that was free a moment ago and is not in `avoid`."""
    while True:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port: int = probe.getsockname()[1]
        if port not in avoid:
            return port


def require_free_port(port: int, title: str, flag: str) -> None:
    """Raise ConfigurationError unless `port` can be bound."""
    with socket.socket() as client, socket.socket() as probe:
        client.settimeout(2)
        # Without it, a connection in TIME_WAIT would count as a listener.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            # A bind alone succeeds on macOS beside a listener on all addresses.
            if client.connect_ex((HOST, port)) == 0:
                raise OSError("another process listens there")
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigurationError(
                f"{title} needs port {port} of {HOST}, found: {error.strerror or error}. Stop what "
                f"'lsof -i :{port}' shows, or choose another port with {flag}."
            ) from None


def properties_text(values: Mapping[str, object]) -> str:
    """Return a Java properties file in ASCII. Java reads the escapes of a JSON string."""
    return "".join(f"{key}={json.dumps(str(value))[1:-1]}\n" for key, value in values.items())


def write_private(file: Path, text: str) -> None:
    """Write a file that only its owner may read, at any time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(
        os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as handle:
        handle.write(text)
