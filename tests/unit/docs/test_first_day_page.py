"""tests/first_day/first-day.md types commands that exist; `make first-day` compares what they
print."""

from __future__ import annotations

import shlex

import click
from first_day_page import FILE, Part, Step, render, skeleton

from anabranch.cli import main


def test_each_command_of_the_page_is_one() -> None:
    typed = skeleton(FILE.read_text(encoding="utf-8"))
    assert len(typed) >= 20 and {code for _, code in typed} >= {0, 1, 2, 75}
    for line, code in typed:
        program, *arguments = shlex.split(line.replace("HOUR", "2026-11-21T03"))
        assert program == "anabranch"
        command: click.Command = main
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command), arguments.pop(0))
            assert found is not None, line
            command = found
        if code != 2:
            command.make_context(program, arguments)


def test_a_page_that_is_written_is_read_again() -> None:
    steps = (
        Step("anabranch hours s", ("2026-11-21T03",), 0),
        Step("anabranch explain s 2026-11-21T03", ("x",), 1),
    )
    assert skeleton(render([Part("Hours", "All.", steps)])) == [
        ("anabranch hours s", 0), ("anabranch explain s HOUR", 1),
    ]  # fmt: skip
