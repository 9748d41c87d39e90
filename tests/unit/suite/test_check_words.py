"""The word list of `make lint` finds its words in names, comments, messages and pages."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def words() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_words", ROOT / "scripts/check_words.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_words"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""One.\n\nWhoever asks waits."""', [(3, "Whoever")]),
        ('def f() -> None:\n    """Of an hour, its files."""', [(2, "Of")]),
        ("a = 1  # Nobody reads it anew.", [(1, "Nobody"), (1, "anew")]),
        ('raise ValueError(f"file {name} holds no rows")', [(1, "holds")]),
        ("def f(standing: int) -> None:\n    is_told = True", [(1, "standing"), (2, "_told")]),
        ('"""Readers are notified. What is a duplicate? See the glossary."""', []),
        ('size = sink.tell()\n"""A lock that a process holds."""', []),
        ("raise ValueError('expected a standalone cluster, found none')", []),
    ],
)
def test_a_finding_has_its_line(words: ModuleType, source: str, found: object) -> None:
    assert sorted((f.line, f.found) for f in words.check_python("a.py", source)) == found


def test_pages_are_checked_without_code_and_if_there(words: ModuleType, tmp_path: Path) -> None:
    page = "# Title\n\n```\nnobody\n```\n\n`told` is a name.\nThe table is read anew.\n"
    assert [(f.line, f.found) for f in words.check_page("a.md", page)] == [(8, "anew")]
    assert [f.found for f in words.check(["moved.md"], tmp_path)] == ["none"]
