"""docs/tutorial.md: its commands exist, and its files are valid.
tests/integration/test_tutorial_run.py runs them."""

import json
import shlex
import shutil
from pathlib import Path

import click
import tutorial_page

from anabranch.cli import main
from anabranch.config import load_stream

ROOT = Path(__file__).resolve().parents[3]


def test_every_command_exists_and_takes_these_arguments() -> None:
    assert len(tutorial_page.commands()) > 12
    for line in tutorial_page.commands():
        program, *arguments = shlex.split(line.replace("HOUR", "2026-11-21T03"))
        command: click.Command = main
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command), arguments.pop(0))
            assert found is not None, line
            command = found
        if command.name != "send":  # Its argument is a file that exists.
            command.make_context(program, arguments)


def test_the_stream_of_your_own_is_valid_and_its_records_have_its_columns(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    (tmp_path / "conf" / "streams" / "orders.yaml").write_text(tutorial_page.block("yaml"))
    stream = load_stream("orders", tmp_path / "conf")
    for line in tutorial_page.block("json").splitlines():
        assert json.loads(line).keys() == {column.name for column in stream.columns}
