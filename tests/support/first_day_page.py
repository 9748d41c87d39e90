"""Write and read the transcript tests/first_day/first-day.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "tests" / "first_day" / "first-day.md"

_HEAD = """# An operator's first day

A transcript: each command was typed at a terminal of 80 columns, in an empty folder, with `NO_COLOR` set, and this is
what it printed. `make first-day` does it again and compares commands and exit codes with this page; `make first-day
WRITE=1` writes it. What to do when something is wrong has [a page of its own](../../docs/runbooks.md).
"""
_HOUR = re.compile(r"\d{4}-\d\d-\d\dT\d\d")
_EXIT = re.compile(r"^\(exit code (\d+)\)$")


@dataclass(frozen=True)
class Step:
    """A command, its output, and its exit code."""

    command: str
    lines: tuple[str, ...]
    code: int


@dataclass(frozen=True)
class Part:
    """A section of the page: title, text and commands."""

    title: str
    says: str
    steps: tuple[Step, ...]


def render(parts: Sequence[Part]) -> str:
    """Return the page. Pure."""
    text = [_HEAD]
    for part in parts:
        text += [f"## {part.title}\n", f"{part.says}\n"]
        for step in part.steps:
            end = [f"(exit code {step.code})"] if step.code else []
            text += ["```console", f"$ {step.command}", *step.lines, *end, "```\n"]
    return "\n".join(text)


def skeleton(page: str) -> list[tuple[str, int]]:
    """Return the commands of a page, with hours replaced by HOUR, and their exit codes. Pure."""
    found: list[tuple[str, int]] = []
    for line in page.splitlines():
        if line.startswith("$ "):
            found.append((_HOUR.sub("HOUR", line[2:]), 0))
        elif (ended := _EXIT.match(line)) is not None:
            found[-1] = (found[-1][0], int(ended[1]))
    return found
