"""The failure table (tests/failures/README.md): each row names tests that exist and that nothing skips."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_NAMED = re.compile(r"`(test_\w+\.py)(?:::(test_\w+))?`")


def rows() -> list[tuple[str, str]]:
    """Failure and tests of each row."""
    text = (ROOT / "tests" / "failures" / "README.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line][1:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert len(cells) >= 27
    return [(row[0], row[2]) for row in cells]


@cache
def source_of(file_name: str) -> str:
    """The text of the one file of tests that has this name."""
    [file] = (ROOT / "tests").glob(f"**/{file_name}")
    return file.read_text(encoding="utf-8")


@pytest.mark.parametrize(("failure", "tests"), rows(), ids=[failure[:40] for failure, _ in rows()])
def test_each_row_names_tests_that_exist_and_that_nothing_skips(failure: str, tests: str) -> None:
    named = _NAMED.findall(tests)
    assert named, f"{failure}: expected a test, found {tests!r}"
    assert "open" not in re.sub(r"`[^`]*`", "", tests).split(), f"{failure}: {tests}"
    for file_name, function in named:
        source = source_of(file_name)
        marked = [line for line in source.splitlines() if line.startswith("pytestmark")]
        assert not [line for line in marked if "skip" in line], f"{file_name} is skipped"
        assert "pytest.skip" not in source, f"{file_name} may be skipped"
        if function:
            tree = ast.parse(source).body
            [found] = [n for n in tree if isinstance(n, ast.FunctionDef) and n.name == function]
            marks = " ".join(ast.unparse(decorator) for decorator in found.decorator_list)
            assert "skip" not in marks and "xfail" not in marks, f"{function} is skipped"
