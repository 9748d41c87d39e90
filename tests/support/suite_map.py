"""The map of the tests: tests/README.md maps each public feature to tests and targets, by hand.
A unit test (tests/unit/suite/test_suite_map.py) compares it with the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "tests" / "README.md"

QUICK_FOLDERS = ("unit", "model", "integration")
"""The folders that `make test` runs, except tests marked `full`. `make test-full` runs all tests of
all folders."""
QUICK, FULL = "make test", "make test-full"

FEATURES = "## Features"
_NAMED = re.compile(r"`((?:\w+/)?test_\w+\.py)(?:::(test_\w+))?`")


@dataclass(frozen=True)
class Row:
    """A row of a table of tests/README.md: the tested feature, its tests, and the smallest target
    that runs some of them."""

    what: str
    tests: str
    target: str

    @property
    def line(self) -> str:
        return f"| {self.what} | {self.tests} | {self.target} |"


@cache
def file_of(name: str) -> Path:
    """Return the test file of this name, or of `folder/name`, in any folder of tests. Raises
    ValueError unless there is exactly one."""
    found = sorted((ROOT / "tests").glob(f"**/{name}"))
    if len(found) != 1:
        raise ValueError(f"{name}: expected one file of tests, found {len(found)}")
    return found[0]


@cache
def functions(file: Path) -> dict[str, str]:
    """Return the tests of a file, each with its decorators as source text."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {
        node.name: " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def is_quick(file: Path, function: str) -> bool:
    """Return whether `make test` runs a test, or some of its parameters."""
    marks = functions(file)[function]
    whole = re.sub(r"pytest\.param\(.*?marks=pytest\.mark\.full\)", "", marks)
    return file.relative_to(ROOT).parts[1] in QUICK_FOLDERS and "mark.full" not in whole


def named(text: str) -> Iterator[tuple[Path, str]]:
    """Yield the tests that a cell names; a file without a test means all its tests. Raises
    ValueError for an unknown one."""
    for name, function in _NAMED.findall(text):
        file = file_of(name)
        if function and function not in functions(file):
            raise ValueError(f"{name}: expected the test {function}, found none")
        for one in [function] if function else functions(file):
            yield file, one


def target_of(text: str) -> str:
    """Return the target that runs the tests of a cell, or some of them."""
    return QUICK if any(is_quick(file, function) for file, function in named(text)) else FULL


def features() -> list[str]:
    """Return every public feature: commands, configuration keys, formats and DAGs."""
    import click

    from anabranch import config
    from anabranch.cli import main
    from anabranch.config.format_settings import FormatType

    def commands(command: click.Command, name: str) -> Iterator[str]:
        if not isinstance(command, click.Group):
            yield f"`{name}`"
            return
        context = click.Context(command)
        for one in command.list_commands(context):
            child = command.get_command(context, one)
            assert child is not None
            yield from commands(child, f"{name} {one}")

    stream = [field.alias or name for name, field in config.Stream.model_fields.items()]
    found = [
        *commands(main, "anabranch"),
        *(
            f"stream `{key}`"
            for key in stream
            if key not in ("name", "columns", "subject_schema", "fields")
        ),
        *(f"environment `{key}`" for key in config.Environment.model_fields),
        *(f"format `{one}`" for one in get_args(FormatType)),
        *(f"`{dag.name}`" for dag in sorted((ROOT / "dags").glob("*.py"))),
    ]
    return list(dict.fromkeys(found))


def rows(section: str) -> list[Row]:
    """Return the rows of a table of tests/README.md."""
    text = README.read_text(encoding="utf-8").partition(f"{section}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line][1:]
    return [Row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in lines]
