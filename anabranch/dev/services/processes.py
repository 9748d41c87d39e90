"""A service as a process that outlives the command that started it, and that later commands
find."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from anabranch.common.errors import ConfigurationError, Terminal, Transient

HOST = "127.0.0.1"
# A start time is of the wall clock, which may be stepped while the service runs. The marker then
# identifies the process.
_START_TOLERANCE_SECONDS = 60.0
_POLL_SECONDS = 0.1
# After SIGKILL, a process that waits for a disk ends only when the disk has answered.
_KILL_SECONDS = 20.0

# Children of this process, which it has to reap when they end.
_children: dict[int, subprocess.Popen[bytes]] = {}


def replace_file(file: Path, text: str) -> None:
    """Replace a file atomically: readers see the old or the new content."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


@dataclass(frozen=True)
class PidFile:
    """The content of a pid file. `started`: the process's start time by the kernel, in seconds
    since the epoch."""

    pid: int
    started: float
    port: int


@dataclass(frozen=True)
class Daemon:
    """One service of one home.

    Its command line contains a marker with the home's path. The marker rules out a process with a
    recycled pid, or with the pid of another machine's file, and finds a service whose pid file is
    lost.
    """

    name: str
    title: str
    home: Path

    @property
    def marker(self) -> str:
        return f"-Danabranch.dev={self.name}:{self.home}"

    @property
    def pid_file(self) -> Path:
        return self.home / "run" / f"{self.name}.json"

    @property
    def port_file(self) -> Path:
        """File with the port of the last start. It is kept for the next start."""
        return self.home / "run" / f"{self.name}.port"

    @property
    def log(self) -> Path:
        return self.home / "logs" / f"{self.name}.log"

    def recorded(self) -> PidFile | None:
        """Return the content of the pid file; None if it is missing or invalid."""
        try:
            content = json.loads(self.pid_file.read_text(encoding="utf-8"))
            return PidFile(int(content["pid"]), float(content["started"]), int(content["port"]))
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return None

    def last_port(self) -> int | None:
        """Return the current or last port of the service; None if it is not recorded."""
        if (recorded := self.recorded()) is not None:
            return recorded.port
        try:
            return int(self.port_file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return None

    def process(self) -> psutil.Process | None:
        """Return the running process: that of the pid file, if it still is the service, else a
        process with the marker."""
        _reap()
        recorded = self.recorded()
        if recorded is not None:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(recorded.pid)
                same_start = (
                    abs(process.create_time() - recorded.started) < _START_TOLERANCE_SECONDS
                )
                if same_start and self._is_ours(process):
                    return process
        for process in psutil.process_iter():
            if self._is_ours(process):
                return process
        return None

    def start(
        self, command: Sequence[str], port: int, environment: Mapping[str, str]
    ) -> psutil.Process:
        """Start `command` in a session of its own, so that Ctrl-C in the terminal does not reach
        it.

        Its output goes to the log. The log of the previous run is kept as `.1`.
        """
        for folder in (self.pid_file.parent, self.log.parent):
            folder.mkdir(parents=True, exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_name(self.log.name + ".1"))
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
        _children[child.pid] = child
        process = psutil.Process(child.pid)
        content = json.dumps(asdict(PidFile(child.pid, process.create_time(), port)))
        replace_file(self.pid_file, content + "\n")
        replace_file(self.port_file, f"{port}\n")
        return process

    def await_answer(
        self, process: psutil.Process, answers: Callable[[], bool], seconds: float
    ) -> None:
        """Wait until `answers()` is True. Raises Terminal if the process ends first, Transient
        after `seconds`."""
        deadline = time.monotonic() + seconds
        while not answers():
            if not is_alive(process):
                raise Terminal(f"{self.title} ended while it was starting. {self.log_tail()}")
            if time.monotonic() >= deadline:
                raise Transient(
                    f"{self.title} (pid {process.pid}) has not answered for {seconds:.0f} s. "
                    f"{self.log_tail()}"
                )
            time.sleep(_POLL_SECONDS)

    def log_tail(self, lines: int = 15) -> str:
        """Return the end of the log, for a message."""
        try:
            content = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return f"There is no log {self.log}."
        shown = "".join(f"\n  {line[:300]}" for line in content[-lines:]) or " (empty)"
        return f"The end of {self.log}:{shown}"

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return self.marker in process.cmdline() and is_alive(process)
        except psutil.Error:
            return False


def _reap() -> None:
    """Reap ended children, also those that another process stopped: they would stay zombies."""
    for pid, child in tuple(_children.items()):
        if child.poll() is not None:
            _children.pop(pid, None)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process runs. False for a zombie."""
    _reap()
    if process.pid in _children:
        return True
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
    """Return a port that was free a moment ago and is not in `avoid`, the ports that other services
    are about to use."""
    while True:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            port: int = probe.getsockname()[1]
        if port not in avoid:
            return port


def require_free_port(port: int, title: str, flag: str) -> None:
    """Raise ConfigurationError unless `port` can be bound. The error names the process that
    listens, if the system reports it."""
    with socket.socket() as client:
        client.settimeout(2)
        taken = client.connect_ex((HOST, port)) == 0
    if not taken:
        with socket.socket() as probe:
            # Without it, a connection in TIME_WAIT would count as a listener.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except PermissionError:
                raise ConfigurationError(
                    f"{title} may not use port {port}; choose one above 1023 with {flag}."
                ) from None
            except OSError:
                taken = True
    if taken:
        raise ConfigurationError(
            f"{title} needs port {port} of {HOST}, but {listener_of(port)} listens there. Stop it, "
            f"or choose another port with {flag}."
        )


def listener_of(port: int) -> str:
    """Return the process that listens on `port`, as text, as far as the user may see it."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections(kind="tcp"):
            # An address is (host, port), or empty for a socket that has none.
            listens_on = connection.laddr[1:] if connection.status == psutil.CONN_LISTEN else ()
            if port in listens_on and connection.pid:
                # On one line, even if an argument contains line breaks.
                command = " ".join(" ".join(psutil.Process(connection.pid).cmdline()).split())
                return f"process {connection.pid} ({command[:120]})"
    return "another process"


def properties_text(values: Mapping[str, object]) -> str:
    """Return a Java properties file in printable ASCII; other characters are escaped as
    java.util.Properties defines."""
    return "".join(f"{key}={_escaped(str(value))}\n" for key, value in values.items())


def _escaped(value: str) -> str:
    # Escapes are UTF-16 code units: characters beyond the first plane need two.
    units = value.encode("utf-16-be")
    codes = [int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2)]
    return "".join(
        chr(code) if 32 < code < 127 and chr(code) != "\\" else f"\\u{code:04x}" for code in codes
    )


def write_private(file: Path, text: str) -> None:
    """Write a file that only its owner may read, at any time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(
        os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as handle:
        handle.write(text)
