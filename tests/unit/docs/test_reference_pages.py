"""The generated pages are what the code says, and saying it does not depend on the machine."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from inspect import cleandoc
from pathlib import Path

import click
import pytest
import reference_pages as reference
from click.testing import CliRunner

from anabranch.cli import SECTIONS, main
from anabranch.operations import doctor, finding
from anabranch.operations.reports.status import GateSummary, HourSummary
from anabranch.protocol.ledger_row import Counts, Diff, HourShare
from serving_layer.changes import HourChange


def test_the_check_distinguishes_a_stale_page_from_a_fresh_one(tmp_path: Path) -> None:
    run = CliRunner().invoke
    for name in reference.pages():
        page = tmp_path / name
        assert run(reference.generate, ["--check", "--out", str(tmp_path)]).exit_code == 1
        assert run(reference.generate, ["--out", str(tmp_path)]).exit_code == 0
        assert run(reference.generate, ["--check", "--out", str(tmp_path)]).exit_code == 0
        page.write_text(page.read_text(encoding="utf-8") + "stale\n", encoding="utf-8")


@pytest.mark.parametrize("name", reference.pages())
def test_the_pages_are_up_to_date(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The terminal does not change them.
    monkeypatch.setenv("COLUMNS", "30")
    page = (reference.FOLDER / name).read_text(encoding="utf-8")
    assert page == reference.pages()[name], "run: make docs"


def test_the_help_has_every_command_once_uncut(monkeypatch: pytest.MonkeyPatch) -> None:
    context = click.Context(main)
    names = [name for section in SECTIONS.values() for name in section]
    # An option may have a line of its own, such as `dead-letters --replay`.
    assert sorted(name for name in names if " " not in name) == main.list_commands(context)
    monkeypatch.setenv("COLUMNS", "80")
    for arguments in (["--help"], ["dev", "--help"]):
        shown = CliRunner().invoke(main, arguments).output
        assert "..." not in shown.partition("Options:")[2] and "…" not in shown
        assert max(map(len, shown.splitlines())) <= 80
    text = CliRunner().invoke(main, ["--help"]).output
    for title, names in SECTIONS.items():
        rows = text.partition(f"{title}:\n")[2].partition("\n\n")[0].splitlines()
        # One line each: a description that is too long would go on in a second one.
        assert [row.split("  ")[1] for row in rows] == list(names), title


@pytest.mark.parametrize(
    ("command", "classes", "beside"),
    [
        ("doctor", (finding.Finding, doctor.Examined), {"ready", "next", "findings", "examined"}),
        ("hours", (HourSummary, Counts, Diff, GateSummary, HourShare), {"start", "end"}),
        ("changes", (HourChange,), {"files"}),
    ],
)
def test_the_page_has_every_key_of_a_result(
    command: str, classes: tuple[type, ...], beside: set[str]
) -> None:
    [row] = re.findall(
        rf"^\| `{command}` \|.*?(`.*?\{{.*?`)", reference.markdown(main), re.MULTILINE
    )
    # Results leave out a difference's sample.
    known = {field.name for one in classes for field in fields(one)} - {"sample"}
    assert set(re.findall(r"[a-z_]+", row)) == known | beside


def _leaves(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield name, command
        return
    for child, found in command.commands.items():
        yield from _leaves(found, f"{name} {child}")


@pytest.mark.parametrize(("name", "command"), [*_leaves(main, "anabranch")])
def test_the_help_begins_with_a_short_clause_and_examples_that_parse(
    name: str, command: click.Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("values.txt", "orders.jsonl"):
        (tmp_path / file).touch()
    clause, examples = [part.strip() for part in cleandoc(command.help or "").split("\n\n")[:2]]
    assert len(clause.split()) <= 10 and clause.endswith(".")
    lines = examples.removeprefix("\b").strip().splitlines()
    assert 1 <= len(lines) <= 2
    for line in lines:
        assert line.startswith(f"{name} ") or line == name
        with command.make_context(name, shlex.split(line)[len(name.split()) :]):
            pass
