"""docs/tutorial.md: its commands exist, and its files are valid."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import click
import yaml

from anabranch.cli import main
from anabranch.config import load_stream

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
FIRST, OWN = PAGE.split("## 7. A topic of your own")


def commands(text: str) -> list[str]:
    return [
        line.strip().removeprefix("$ ")
        for line in text.splitlines()
        if line.strip().startswith("$ anabranch ")
    ]


def block(kind: str) -> str:
    found = re.search(rf"^   ```{kind}\n(.*?)^   ```$", OWN, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def test_every_command_exists_and_takes_these_arguments() -> None:
    assert len(commands(PAGE)) > 15
    for line in commands(PAGE):
        program, *arguments = shlex.split(line.replace("HOUR", "2026-11-21T03"))
        command: click.Command = main
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command), arguments.pop(0))
            assert found is not None, line
            command = found
        if command.name != "send":  # Its argument is a file that exists.
            command.make_context(program, arguments)


def test_the_stream_of_your_own_is_valid_and_its_record_has_its_columns(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "conf", tmp_path / "conf")
    text = block("yaml")
    (tmp_path / "conf" / "streams" / "orders.yaml").write_text(text)
    stream = load_stream("orders", tmp_path / "conf")
    assert stream.topic == yaml.safe_load(text)["topic"] == "shop.orders"
    assert json.loads(block("json")).keys() == {column.name for column in stream.columns}
