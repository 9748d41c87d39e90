"""A workspace: a temporary folder with its own configuration, Kafka and S3, in which `anabranch`
commands run.

Closing it ends every process that it started, and removes the folder; after a failure the folder is
kept for its logs.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import psutil
import yaml

from anabranch.common.errors import AnabranchError, Terminal, Transient
from anabranch.config import load_environment
from anabranch.dev import services
from anabranch.dev.services.processes import HOST, is_alive
from anabranch.iceberg.lake import Lake
from anabranch.job import Job, open_job
from anabranch.spark.jars import jvm_folder
from anabranch.spark.java import FIRST_COMPILER
from demo.story import Story, poll

_CLI = "anabranch.cli"
_COMMAND_SECONDS = 1800.0
_END_SECONDS = 60.0
_EVENT = re.compile(r"\d\d:\d\d:\d\d (INFO|WARNING|ERROR) ")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Running:
    """An `anabranch` command, or another `module`, as a process in a session of its own, which
    contains only its JVM and Python processes."""

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: dict[str, str],
        log: Path,
        module: str = _CLI,
    ) -> None:
        self.arguments, self.log, self.out = tuple(arguments), log, log.with_suffix(".out")
        log.parent.mkdir(exist_ok=True)
        self._seen = log.stat().st_size if log.exists() else 0
        with log.open("ab") as errors, self.out.open("wb") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def require_alive(self) -> None:
        """Raise Terminal, with the end of the log, if the process has ended."""
        if self.code is not None:
            raise Terminal(
                f"anabranch {' '.join(self.arguments)}: expected it to run, found that it ended "
                f"with exit code {self.code}; the end of {self.log}:\n{self.log_tail(15)}"
            )

    def log_lines(self) -> list[str]:
        """Return the log so far, and standard output, where spark-submit writes Python's log."""
        with self.log.open("rb") as file:
            file.seek(self._seen)
            text = file.read() + self.out.read_bytes()
        return text.decode("utf-8", "replace").splitlines()

    def events(self) -> list[str]:
        """Return Anabranch's log lines so far, without their time of day."""
        return [line[9:] for line in self.log_lines() if _EVENT.match(line)]

    def printed(self) -> str:
        """Return the output so far, without log lines."""
        lines = self.out.read_text(encoding="utf-8").splitlines()
        return "\n".join(line for line in lines if not _EVENT.match(line))

    def log_tail(self, lines: int) -> str:
        return "\n".join(f"  {line[:300]}" for line in self.log_lines()[-lines:])

    def kill(self) -> list[int]:
        """Send SIGKILL to every process of the session at once, so that none can clean up. Return
        their pids."""
        members = self._members()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(_END_SECONDS)
        poll(
            lambda: None if any(map(is_alive, members)) else True,
            "the killed processes to end",
            _END_SECONDS,
        )
        return [process.pid for process in members]

    def pause(self) -> None:
        """Send SIGSTOP to every process of the session, as if the machine hung."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)

    def terminate(self) -> int:
        """Send SIGTERM, as an operator or a supervisor does, and return the exit code. Raises
        Transient if the process does not end."""
        self._process.terminate()
        try:
            return self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            raise Transient(
                f"anabranch {' '.join(self.arguments)}: expected it to end within "
                f"{_END_SECONDS:.0f} s of SIGTERM, found it alive; the end of "
                f"{self.log}:\n{self.log_tail(15)}"
            ) from None

    def _members(self) -> list[psutil.Process]:
        members = []
        for process in psutil.process_iter():
            with contextlib.suppress(ProcessLookupError, PermissionError, psutil.Error):
                if os.getsid(process.pid) == self._process.pid:
                    members.append(process)
        return members


class ServiceProxy(Protocol):
    """A proxy of a service: clients connect to `port`, and it forwards to `upstream_port`."""

    port: int
    upstream_port: int


@dataclass(frozen=True)
class ExternalServices:
    """External services: the addresses of a Spark master and a catalog, None for the workspace's
    own; running proxies through which the workspace connects to its Kafka and S3."""

    master: str | None = None
    catalog: str | None = None
    kafka_proxy: ServiceProxy | None = None
    s3_proxy: ServiceProxy | None = None


_NO_EXTERNAL_SERVICES = ExternalServices()


class Workspace:
    """Runs `anabranch` commands in the folder with its configuration, and keeps track of their
    processes."""

    def __init__(
        self,
        folder: Path,
        running_services: services.Services,
        stream: str,
        story: Story,
        external: ExternalServices,
    ) -> None:
        self.folder, self.services, self.story, self._external = (
            folder,
            running_services,
            story,
            external,
        )
        self.conf, self.logs = folder / "conf", folder / "logs"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._started: list[Running] = []
        self._changes: dict[str, dict[str, Any]] = {}
        self._write_configuration(stream)
        java = (
            f"{os.environ.get('JDK_JAVA_OPTIONS', '')} -Djava.io.tmpdir={self.temporary} "
            f"{FIRST_COMPILER}"
        )
        self._environment = dict(os.environ) | {
            "ANABRANCH_CONF": str(self.conf),
            "TMPDIR": str(self.temporary),
            "SPARK_LOCAL_DIRS": str(self.temporary),
            "JDK_JAVA_OPTIONS": java.strip(),
        }
        for name in ("ANABRANCH_LOG", "ANABRANCH_FAIL_AT", "ANABRANCH_PAUSE_AT", "SPARK_CONF_DIR"):
            self._environment.pop(name, None)

    def job(self, stream: str) -> Job:
        """Open the stream's job, for reads in this process."""
        return open_job(stream, str(self.conf))

    def run(self, *arguments: str, show: bool = True, log: str | None = None) -> str:
        """Run a command to its end, and return its output; also print it unless `show` is False.

        Raises Terminal, with the end of its log, if its exit code is not 0.
        """
        self.story.command(arguments)
        running = self.start(*arguments, log=log)
        began = time.monotonic()
        with self.story.awaiting(f"anabranch {arguments[0]}") as report:

            def ended() -> bool | None:
                newest = [event[8:].split(": ", 1)[-1] for event in running.events()[-1:]]
                report(", ".join([f"{time.monotonic() - began:.0f} s", *newest]))
                return None if running.code is None else True

            poll(ended, f"anabranch {arguments[0]} to end", _COMMAND_SECONDS)
        if running.code != 0:
            running.require_alive()
        text = running.printed()
        if show:
            self.story.output(text)
        return text

    def start(
        self, *arguments: str, log: str | None = None, module: str = _CLI, **environment: str
    ) -> Running:
        file = self.logs / f"{log or arguments[0]}.log"
        running = Running(arguments, self.folder, self._environment | environment, file, module)
        self._started.append(running)
        return running

    def checkpoints(self) -> list[Path]:
        return sorted(self.temporary.glob("anabranch-checkpoint-*"))

    def set_speed(self, stream: str, **speed: Any) -> None:
        """Change the `speed` settings for the next start; without arguments, restore the shipped
        ones."""
        self.set_stream(stream, speed=self.shipped(stream)["speed"] | speed)

    def set_stream(self, stream: str, **keys: Any) -> None:
        """Change keys of the stream's file, in addition to earlier changes."""
        changes = self._changes.setdefault(stream, {})
        changes |= keys
        _write(self.conf / "streams" / f"{stream}.yaml", self.shipped(stream) | changes)

    @property
    def catalog_file(self) -> Path:
        """The file of the embedded catalog."""
        return self.folder / ".anabranch" / "catalog.db"

    def shipped(self, stream: str) -> dict[str, Any]:
        """Return the shipped file of the stream."""
        return _read(_shipped() / "streams" / f"{stream}.yaml")

    def close(self) -> None:
        for running in self._started:
            running.kill()
        if self._external.catalog is not None:
            self._drop_tables()

    def _drop_tables(self) -> None:
        """Drop the workspace's tables in an external catalog."""
        catalog = Lake(load_environment(self.conf)).catalog
        for namespace in catalog.list_namespaces():
            for table in catalog.list_tables(namespace):
                catalog.drop_table(table)
            catalog.drop_namespace(namespace)

    def _write_configuration(self, stream: str) -> None:
        (self.conf / "streams").mkdir(parents=True)
        for file in (_shipped() / "streams").glob(f"{stream}.*"):
            shutil.copy(file, self.conf / "streams" / file.name)
        environment = _read(_shipped() / "anabranch.yaml")
        kafka, s3 = self._external.kafka_proxy, self._external.s3_proxy
        bootstrap_servers = (
            f"{HOST}:{kafka.port}" if kafka is not None else self.services.bootstrap_servers
        )
        environment["kafka"]["bootstrap_servers"] = bootstrap_servers
        environment["catalog"] |= {
            "uri": f"sqlite:///{self.folder}/.anabranch/catalog.db",
            "warehouse": "s3://anabranch/warehouse",
        }
        endpoint = f"http://{HOST}:{s3.port}" if s3 is not None else self.services.s3_endpoint
        environment["s3"] |= {
            "endpoint": endpoint,
            "access_key": self.services.access_key,
            "secret_key": self.services.secret_key,
        }
        environment["spark"]["master"] = self._external.master or "local[*]"
        if self._external.catalog is not None:
            # A name of its own, since that catalog may contain tables of an earlier workspace.
            own = f"demo_{secrets.token_hex(4)}"
            environment["catalog"] |= {"name": own, "uri": self._external.catalog}
        _write(self.conf / "anabranch.yaml", environment)


@contextmanager
def open_workspace(
    story: Story, stream: str, external: ExternalServices = _NO_EXTERNAL_SERVICES
) -> Iterator[Workspace]:
    """Open a workspace with running services. The end of the `with` stops everything that was
    started in it; signals that arrive meanwhile are ignored."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    # Resolved, since the services' marker and Spark's file URLs contain it.
    folder = Path(tempfile.mkdtemp(prefix="anabranch-demo-")).resolve()
    failed = False
    try:
        kafka, s3 = external.kafka_proxy, external.s3_proxy
        advertised = kafka.port if kafka is not None else None
        with services.running(
            folder / ".anabranch", progress=lambda text: None, advertised_port=advertised
        ) as running_services:
            for proxy, port in (
                (kafka, running_services.kafka_port),
                (s3, running_services.s3_port),
            ):
                if proxy is not None:
                    proxy.upstream_port = port
            space = Workspace(folder, running_services, stream, story, external)
            try:
                yield space
            finally:
                # A second Ctrl-C must not interrupt the shutdown.
                for number in _SIGNALS:
                    signal.signal(number, signal.SIG_IGN)
                space.close()
    except Exception:
        failed = True
        raise
    finally:
        if failed:
            story.say(f"Stopped everything; logs and data are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def main(run: Callable[[Story], None], is_brief: bool = False) -> int:
    """Run a story, and return the exit code: 0 for success, the error's, or 130 after Ctrl-C."""
    # A shell that starts this in the background has set SIGINT to be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _SIGNALS[1:]:
        signal.signal(number, _interrupt)
    story = Story(is_brief)
    try:
        run(story)
        return 0
    except AnabranchError as error:
        story.say(str(error), "bold red")
        return error.exit_code
    except (KeyboardInterrupt, SystemExit) as stopped:
        story.say("Interrupted: everything that was started is stopped, and nothing is left.")
        if isinstance(stopped, SystemExit) and isinstance(stopped.code, int):
            return stopped.code
        return 130


def _interrupt(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _shipped() -> Path:
    return jvm_folder().parent


def _read(file: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return document


def _write(file: Path, content: dict[str, Any]) -> None:
    # A running job reads the old or the new content, never a part.
    part = file.with_name(f".{file.name}.part")
    part.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    part.replace(file)
