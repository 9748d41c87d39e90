"""An operator's first day, at a terminal of 80 columns, with each command as
tests/first_day/first-day.md has it.

`make first-day WRITE=1` writes the page; without WRITE the commands and their exit codes are
compared with it.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from first_day_page import FILE, Part, Step, render, skeleton

from anabranch.offsets.hours import hour_of, shift

COLUMNS = 80
_PIECES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\r\n|\r|\n|[^\x1b\r\n]+")


@dataclass
class Terminal:
    """A folder to type commands in, and the environment of its shell."""

    folder: Path
    environment: dict[str, str]

    def type(self, command: str, interrupt_at: str | None = None, seconds: float = 240) -> Step:
        """Return the terminal output and the exit code of a command. Send Ctrl-C once
        `interrupt_at` was printed twice."""
        ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        # A session of its own replaces a terminal's: its processes end with it.
        process = subprocess.Popen(
            f"exec {command}",
            shell=True,
            cwd=self.folder,
            env=self.environment,
            stdin=its,
            stdout=its,
            stderr=its,
            start_new_session=True,
        )
        os.close(its)
        printed, deadline = b"", time.monotonic() + seconds
        try:
            while True:
                assert time.monotonic() < deadline, (
                    f"{command}: expected it to end, found {printed.decode()[-2000:]}"
                )
                if select.select([ours], [], [], 0.2)[0]:
                    try:
                        piece = os.read(ours, 65536)
                    except OSError:
                        break
                    if not piece:
                        break
                    printed += piece
                    if interrupt_at is not None and printed.count(interrupt_at.encode()) >= 2:
                        interrupt_at = None
                        os.killpg(process.pid, signal.SIGINT)
                elif process.poll() is not None:
                    # A process that outlives the command, such as a service, may keep the terminal
                    # open.
                    break
            code = process.wait(30)
        finally:
            os.close(ours)
            with suppress(ProcessLookupError):
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        return Step(
            command,
            tuple(line.replace(str(self.folder), "~/lake") for line in shown(printed.decode())),
            code,
        )


def shown(printed: str) -> list[str]:
    """The lines that are visible in the end, of a process's output to a terminal."""
    lines, at = [""], 0
    for piece in _PIECES.findall(printed):
        if piece in ("\n", "\r\n"):
            at += 1
            lines += [""] * (at + 1 - len(lines))
        elif piece == "\r" or piece == "\x1b[2K":
            lines[at] = ""
        elif piece == "\x1b[1A":
            at -= 1
        elif not piece.startswith("\x1b"):
            lines[at] += piece
    return "\n".join(line.rstrip() for line in lines).strip("\n").split("\n")


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    folder = tmp_path / "lake"
    folder.mkdir()
    own = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "TERM": "xterm-256color",
        "NO_COLOR": "1",
    }
    terminal = Terminal(folder, os.environ | own)
    try:
        yield terminal
    finally:
        terminal.type("anabranch dev down")


@pytest.mark.timeout(1200)
def test_a_first_day(terminal: Terminal, steady_hour: None) -> None:
    parts: list[Part] = []

    def part(title: str, says: str, *commands: str, **more: str) -> None:
        parts.append(
            Part(title, says, tuple(terminal.type(command, **more) for command in commands))
        )

    hour = shift(hour_of(datetime.now(UTC)), -1)
    part(
        "A folder", "Nothing runs yet. The doctor is the first thing to run, whatever is wrong.",
        "anabranch init .", "anabranch doctor",
    )  # fmt: skip
    part(
        "Services and tables",
        "What it said first.",
        "anabranch dev up",
        "anabranch apply game_events",
    )
    part(
        "Records", (
            "Two hours and a half, malformed records and duplicates among them; then all of it is "
            "published."
        ),
        "anabranch dev produce game_events --events 2500 --hours 2.5 --dirty",
        "anabranch speed game_events --available-now", "anabranch status game_events",
    )  # fmt: skip
    part(
        "Hours",
        "What the scheduler does each hour.",
        "anabranch batch game_events",
        "anabranch hours game_events",
        f"anabranch explain game_events {hour}",
        f"anabranch audit game_events --hours {hour}",
    )
    part(
        "Answers", "For analysts, and for who asks where a record is.",
        'anabranch query "SELECT game, count(*) AS events FROM games.game_events GROUP BY 1 ORDER '
        'BY 1"',
        "anabranch dead-letters game_events", f"anabranch explain game_events {hour} --rows",
    )  # fmt: skip
    part(
        "Mistakes",
        "Each says what was wrong, where, and what to do.",
        "anabranch status game_evnets",
        "anabranch history game_events --hour yesterday",
        "anabranch batch game_events --hour 2026-01-01T00",
        f"anabranch batch game_events --hour {shift(hour, 1)}",
        'anabranch query "SELECT level, sum(amuont) FROM games.game_events GROUP BY 1"',
        f"anabranch override game_events {hour} --layer speed",
    )
    part(
        "Watching", "Until Ctrl-C.", "anabranch status game_events --watch --every '2 seconds'",
        interrupt_at="again every",
    )  # fmt: skip
    part(
        "The night", "Kafka and S3 are gone.", "anabranch dev down", "anabranch status game_events",
        "anabranch doctor game_events",
    )  # fmt: skip

    steps = [step for one in parts for step in one.steps]
    for step in (
        step for step in steps if step.command.split()[1] in ("status", "hours") and step.code == 0
    ):
        wide = [line for line in step.lines if len(line) > COLUMNS]
        assert not wide, f"{step.command}: expected lines of {COLUMNS} columns, found {wide}"
    if os.environ.get("WRITE"):
        FILE.write_text(render(parts), encoding="utf-8")
    assert skeleton(render(parts)) == skeleton(FILE.read_text(encoding="utf-8"))
