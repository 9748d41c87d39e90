"""A container without an engine: bubblewrap gives a process a root, a user, a host name and process ids of its own.

All containers of a `Network` share one network in which nothing else is: each has a name and an address of its own, so
that who listens at 127.0.0.1 alone is not reached by the others. Docker gives each a network stack; here two containers
cannot take the same port.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_PATH = "/base/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ETC = ("alternatives", "java-17-openjdk", "ld.so.cache", "localtime", "nsswitch.conf", "services", "ssl")
_PYTHON = Path(sys.base_prefix)


def ensure_programs() -> None:
    """bubblewrap, and tini, which our image runs; installed by apt-get if root may. Raises RuntimeError otherwise."""
    missing = [package for program, package in (("bwrap", "bubblewrap"), ("tini", "tini")) if not shutil.which(program)]
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise RuntimeError(f"expected bwrap and tini on the PATH; install {' and '.join(missing)}")
    quiet = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
        subprocess.run(["apt-get", "-qq", *command], env=quiet, check=True, capture_output=True, timeout=600)


@dataclass(frozen=True)
class User:
    name: str
    uid: int
    home: str


@dataclass(frozen=True)
class Box:
    """What a process finds around it: `folders`, which it may write to, and `readable` are paths of its own -> folders
    or files of this machine, `programs` commands on its PATH."""

    host: str
    user: User
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "/"
    folders: Mapping[str, Path] = field(default_factory=dict)
    readable: Mapping[str, Path] = field(default_factory=dict)
    programs: Mapping[str, Path] = field(default_factory=dict)

    def command(self, scratch: Path, arguments: Sequence[str], hosts: Path | None = None) -> list[str]:
        """The command line that runs `arguments` in it; without `hosts`, its /etc/hosts, in this machine's network."""
        user = scratch / f"{self.user.name}.passwd"
        user.write_text(f"{self.user.name}:x:{self.user.uid}:{self.user.uid}::{self.user.home}:/bin/bash\n")
        group = scratch / f"{self.user.name}.group"
        group.write_text(f"{self.user.name}:x:{self.user.uid}:\n")
        ids = ["--unshare-user", "--uid", str(self.user.uid), "--gid", str(self.user.uid)]
        line = [
            "bwrap",
            *ids,
            "--unshare-pid",
            "--as-pid-1",
            "--unshare-ipc",
            "--unshare-uts",
            "--hostname",
            self.host,
        ]
        line += ["--die-with-parent", "--new-session", "--ro-bind", "/usr", "/usr"]
        for name in ("bin", "sbin", "lib", "lib64"):
            line += ["--symlink", f"usr/{name}", f"/{name}"]
        for name in _ETC:
            line += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        line += ["--ro-bind", str(user), "/etc/passwd", "--ro-bind", str(group), "/etc/group"]
        for name in ("hosts", "resolv.conf") if hosts is None else ():
            line += ["--ro-bind", f"/etc/{name}", f"/etc/{name}"]
        line += ["--ro-bind", str(hosts), "/etc/hosts"] if hosts is not None else []
        line += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/dev/shm", "--tmpfs", "/tmp", "--dir", self.user.home]
        if not _PYTHON.is_relative_to("/usr"):
            line += ["--ro-bind", str(_PYTHON), str(_PYTHON)]
        python = _PYTHON / "bin" / f"python3.{sys.version_info.minor}"
        for name in ("python", "python3"):
            line += ["--symlink", str(python), f"/base/bin/{name}"]
        for name, program in self.programs.items():
            line += ["--ro-bind", str(program), f"/base/bin/{name}"]
        # A folder before what is mounted inside it.
        for target, source in sorted(self.folders.items()):
            line += ["--bind", str(source), target]
        for target, source in sorted(self.readable.items()):
            line += ["--ro-bind", str(source), target]
        line += ["--clearenv", "--chdir", self.cwd]
        for key, value in ({"PATH": _PATH, "HOME": self.user.home} | dict(self.environment)).items():
            line += ["--setenv", key, value.replace("$PATH", _PATH) if key == "PATH" else value]
        return [*line, "--", *arguments]


class Container:
    """A running command in a box."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def code(self) -> int | None:
        """The exit code, as a shell counts it; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int:
        return self._process.wait(seconds)

    def signal(self, number: signal.Signals) -> None:
        """To its first process, as an engine does."""
        for first in psutil.Process(self._process.pid).children():
            first.send_signal(number)

    def kill(self) -> None:
        """All of it: its process ids end with the first."""
        self._process.kill()
        self._process.wait(30)


class Network:
    """Names with an address each, where nothing else listens."""

    def __init__(self, scratch: Path, names: Sequence[str]) -> None:
        self._scratch = scratch
        self.hosts = scratch / "hosts"
        addresses = {name: f"127.0.1.{i}" for i, name in enumerate(names, 1)}
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
        self.hosts.write_text("\n".join(lines) + "\n")
        # It ends with its standard input, and the network with the last process in it.
        self._holder = subprocess.Popen(
            ["unshare", "--user", "--map-root-user", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n", "expected a network of our own, found none: it needs a right"

    def command(self, box: Box, arguments: Sequence[str]) -> list[str]:
        """The command line that runs `arguments` in the box and in this network."""
        enter = ["nsenter", "--target", str(self._holder.pid), "--user", "--net"]
        return [*enter, *box.command(self._scratch, arguments, self.hosts)]

    def run(self, box: Box, arguments: Sequence[str], seconds: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command to its end; a timeout is exit code 124."""
        try:
            return subprocess.run(
                self.command(box, arguments),
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, errors="replace",
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            return subprocess.CompletedProcess(late.cmd, 124, "", f"not ended after {seconds} s")

    def close(self) -> None:
        assert self._holder.stdin is not None
        assert self._holder.stdout is not None
        self._holder.stdin.close()
        self._holder.wait(10)
        self._holder.stdout.close()


@contextmanager
def running_network(scratch: Path, names: Sequence[str]) -> Iterator[Network]:
    network = Network(scratch, names)
    try:
        yield network
    finally:
        network.close()
