"""Files that `anabranch init` writes, and their places: a newcomer's first minutes."""

import json
import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from anabranch.cli import docs, main

README = Path(docs.__file__).resolve().parents[1] / "starter_files" / "README.md"


def init(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["init", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_current_folder_is_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = init()
    assert (tmp_path / "conf" / "anabranch.yaml").is_file()
    assert (tmp_path / "README.md").read_bytes() == README.read_bytes()
    assert "edit: conf/streams/game_events.yaml is one topic" in said
    assert "edit: conf/anabranch.yaml has the addresses of Kafka, S3 and the catalog" in said
    assert "next: anabranch dev up, anabranch apply" in said
    again = CliRunner().invoke(main, ["init"])
    assert (again.exit_code, "expected none of its files" in again.output) == (2, True)


def test_this_wheel_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: an image of a version that no index has."""
    init(str(tmp_path / "of a checkout"))
    assert [one.name for one in (tmp_path / "of a checkout" / "wheels").iterdir()] == ["README"]
    wheel = tmp_path / "my dist" / "anabranch-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"a wheel")
    origin = {"url": wheel.as_uri(), "archive_info": {}}

    class Installed:
        def read_text(self, name: str) -> str | None:
            return json.dumps(origin) if name == "direct_url.json" else None

    monkeypatch.setattr("importlib.metadata.distribution", lambda _: Installed())
    init(str(tmp_path / "of a wheel"))
    assert (tmp_path / "of a wheel" / "wheels" / wheel.name).read_bytes() == b"a wheel"


def test_an_existing_readme_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a lake").mkdir()
    (tmp_path / "a lake" / "README.md").write_text("mine")
    said = init(str(tmp_path / "a lake"))
    assert (tmp_path / "a lake" / "README.md").read_text() == "mine"
    assert "README.md\n" not in said
    assert f"cd {shlex.quote(str(tmp_path / 'a lake'))}, anabranch dev up" in said


def test_the_readme_names_existing_commands_files_and_keys(tmp_path: Path) -> None:
    init(str(tmp_path))
    text = README.read_text(encoding="utf-8")
    for place in re.findall(r"^\| (.*?) \|", text, re.MULTILINE)[1:]:
        for name in re.findall(r"`(.*?)`", place):
            assert (tmp_path / name).exists(), name
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    typed = [line for line in lines if line.startswith("anabranch ")]
    typed += [name for name in re.findall(r"`(anabranch .*?)`", text) if "PAGE" not in name]
    assert len(typed) > 15
    for line in typed:
        command: click.Command = main
        arguments = shlex.split(line.partition(" > ")[0])[1:]
        if arguments == ["--help"]:
            continue
        while isinstance(command, click.Group):
            found = command.get_command(click.Context(command), arguments.pop(0))
            assert found is not None, line
            command = found
        if "send" not in line:
            command.make_context("anabranch", arguments)
