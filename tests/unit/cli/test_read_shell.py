"""The shell of `anabranch query` on a real terminal of its own, as an analyst types into it."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner
from conf_folders import write_environment

from anabranch.cli import main


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    write_environment(tmp_path)
    return tmp_path


class Terminal:
    """The typed and the shown text."""

    def __init__(self, descriptor: int, process: int) -> None:
        self._descriptor, self._process = descriptor, process
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def wait_for(self, text: str, interrupting: bool = False) -> None:
        """Return once the text is shown, behind what was waited for before. `interrupting`: with
        what a terminal does of Ctrl-C after a second in which nothing is shown, and again after
        ten: readline sleeps on when it comes just before it waits, and a second one while the shell
        still answers the first would end it."""
        deadline, silence = time.monotonic() + 240, 1
        while text not in self.shown:
            assert time.monotonic() < deadline, (
                f"expected {text!r} within four minutes, found {self.shown!r}"
            )
            if select.select([self._descriptor], [], [], silence)[0]:
                self.shown += os.read(self._descriptor, 65_536).decode(errors="replace")
            elif interrupting:
                os.kill(self._process, signal.SIGINT)
                silence = 10
        self.shown = self.shown.partition(text)[2]


@contextmanager
def _shell(conf: Path) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    environment = os.environ | {
        "HOME": str(conf),
        "XDG_CONFIG_HOME": str(conf / "config"),
        "TERM": "xterm",
    }
    command = [sys.executable, "-m", "anabranch.cli", "query", "--conf", str(conf)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    try:
        yield Terminal(ours, process.pid)
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_statements_are_answered_errors_end_nothing_and_history_is_kept(conf: Path) -> None:
    with _shell(conf) as terminal:
        terminal.wait_for("anabranch> ")
        terminal.type("SELECT 40 + 2\n")
        terminal.wait_for("..> ")
        terminal.type("AS answer;\n")
        terminal.wait_for(" 42 ")
        terminal.wait_for("anabranch> ")
        terminal.type("SELECT nothing;\n")
        terminal.wait_for("not found")
        terminal.wait_for("anabranch> ")
        terminal.type("SELECT\n")
        terminal.wait_for("..> ")
        terminal.wait_for("anabranch> ", interrupting=True)
        terminal.type("SELECT 17 * 3 AS product;\n")
        terminal.wait_for(" 51 ")
        terminal.wait_for("anabranch> ")
        terminal.type("exit\n")
    with _shell(conf) as terminal:
        terminal.wait_for("anabranch> ")
        terminal.type("\x1b[A\x1b[A\n")
        terminal.wait_for(" 51 ")
        terminal.wait_for("anabranch> ")
        terminal.type("\x04")


def test_without_a_terminal_sql_is_expected(conf: Path) -> None:
    done = CliRunner().invoke(main, ["query", "--conf", str(conf)], input="SELECT 1;")
    assert done.exit_code == 2
    assert "expected SQL" in done.output
