"""Commands of `anabranch` as processes: run to their end, into a fail point, or until killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from click.testing import CliRunner, Result
from world import World

from anabranch.cli import main
from anabranch.common.fail_points import FAIL_AT, PAUSE_AT, Step

ROOT = Path(__file__).resolve().parents[2]
KILLED = -signal.SIGKILL
Environment = Mapping[str, str]


class Command:
    """One running command in its own session. `kill` and `pause` signal all its processes: the JVM,
    the Python driver, and the Python workers, which are in a separate process group."""

    def __init__(
        self, one: World, arguments: Sequence[str], environment: Environment, code: Path, first: str
    ) -> None:
        self.temporary = one.folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        self._log = one.folder / f"{arguments[0]}-{time.monotonic_ns()}.log"
        run = ["-c", f"{first}; from anabranch.cli import run; run()"]
        run = run if first else ["-m", "anabranch.cli"]
        command = [sys.executable, *run, *arguments, "--conf", str(one.folder)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=code, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {"TMPDIR": str(self.temporary)} | environment,
            )  # fmt: skip

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    @property
    def code(self) -> int | None:
        return self._process.poll()

    def wait(self, seconds: float = 300) -> int:
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"expected it to end within {seconds} s, found it alive:\n{self.log[-3000:]}"
            ) from None

    def kill_jvm(self) -> None:
        """Kill only the JVM; the Python driver has to notice."""
        self._process.kill()
        self._process.wait(30)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self._process.wait(30)

    def pause(self) -> None:
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to each of its processes, as a terminal does."""
        for process in self._processes():
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _processes(self) -> Iterator[psutil.Process]:
        """Yield every process of the session."""
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == self._process.pid:
                    yield process

    def is_stopped(self) -> bool:
        """Return whether every process of the command is stopped (SIGSTOP)."""
        return set(self._states().values()) == {psutil.STATUS_STOPPED}

    def _states(self) -> dict[str, str]:
        """Return the state of each running process, by name and pid."""
        states = {}
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    states[f"{process.name()} {process.pid}"] = process.status()
        return states

    def command_lines(self) -> set[str]:
        """Return the command line of each running process, as `ps` shows it."""
        lines = set()
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                lines.add(" ".join(process.cmdline()))
        return lines

    def is_alive(self) -> bool:
        """Return whether any process of the command runs."""
        return bool(self._states())

    def terminate(self, seconds: float = 90) -> int:
        self._process.terminate()
        return self.wait(seconds)

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 150) -> None:
        """Wait for a condition while the command runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            found = f"expected {what}, found that it ended with {self.code}"
            assert self.code is None, f"{found}:\n{self.log[-3000:]}"
            if time.monotonic() > deadline:
                details = f"found {self._states()}:\n{self.log[-3000:]}"
                raise AssertionError(f"expected {what} within {seconds} s, {details}")
            time.sleep(0.1)


@contextmanager
def started(
    one: World, *arguments: str, code: Path = ROOT, first: str = "", **environment: str
) -> Iterator[Command]:
    """Start a command, and kill it at the end of the `with`. `code`: the folder of the code that it
    runs. `first`: Python that its process runs before, to set a constant."""
    command = Command(one, arguments, environment, code, first)
    try:
        yield command
    finally:
        command.kill()


def call(one: World, *arguments: str, expect: int | None = 0) -> str:
    """Run a command that needs no Spark in this process, which saves a second of CPU. Return its
    standard output; if `expect` is another code than 0, also standard error. None: any code."""
    done = _invoked(one, arguments, expect)
    return str(done.output if expect else done.stdout)


def shown(one: World, *arguments: str, expect: int = 0) -> Any:
    """Run such a command with JSON as its output, and return that."""
    return json.loads(_invoked(one, (*arguments, "--output", "json"), expect).stdout)


def _invoked(one: World, arguments: tuple[str, ...], expect: int | None) -> Result:
    done = CliRunner().invoke(main, [*arguments, "--conf", str(one.folder)])
    found = f"{arguments}: {done.exit_code}\n{done.output}\n{done.exception!r}"
    assert expect in (None, done.exit_code), found
    return done


def run(one: World, *arguments: str, expect: int = 0) -> str:
    """Run a command to its end in a separate process; return its output and log."""
    with started(one, *arguments) as command:
        code = command.wait()
        found = f"{arguments}: expected exit code {expect}, found {code}"
        assert code == expect, f"{found}:\n{command.log[-4000:]}"
        return command.log


def run_into(one: World, fail_at: str, *arguments: str, first: str = "") -> str:
    """Run a command into a fail point, assert that it was reached, and return the log."""
    with started(one, *arguments, first=first, **{FAIL_AT: fail_at}) as command:
        code = command.wait()
        label = fail_at.rpartition(",")[2].partition(":")[0]
        end = f"\n{command.log[-4000:]}"
        assert f"fail point {label}: " in command.log, f"expected {fail_at}, found:{end}"
        expected = 0 if label.endswith("-lost") else KILLED
        assert code == expected, f"{fail_at}: found exit code {code}:{end}"
        return command.log


@contextmanager
def paused_at(
    one: World, step: Step, *arguments: str, first: str = "", seconds: float = 150
) -> Iterator[Command]:
    """Start a command, and wait until it is stopped at a step; the test resumes it."""
    with started(one, *arguments, first=first, **{PAUSE_AT: step.label}) as command:
        pauses, what = f"pause point {step.label}: ", f"it to pause at {step.label}"
        command.until(lambda: pauses in command.log, what, seconds)
        # The step stops Java and the driver. Stop the workers too, as on a machine that sleeps.
        command.pause()
        command.until(command.is_stopped, "the whole command to be stopped")
        yield command
