"""Each error says what failed, where, and what to do; by reading every place that raises one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.common import errors

ROOT = Path(__file__).parents[3]
_OURS = {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, Exception)
}
_WHAT_TO_DO = re.compile(
    r"\bagain\b|\brestarting\b|`[a-z]|[;:,(] *(?:to |then |only )?[^;:]*?"
    r"\b(?:run|set|check|put|leave|create|name|choose|install|report|stop|roll|go back|read|record|look|let|compare|"
    r"keep|restore|move|remove|write|correct|use)\b"
)
_PASSING = {name for name in _OURS if issubclass(getattr(errors, name), errors.Transient)}
# Said by what it is made of.
_WRAPS = re.compile(
    r"^\{[^{}]*\}$|^(?!.*expected ).*\{(error|failed|found|message|broken\[0\]|difference)\}|\{_REMEDY\}|"
    r"\{_WRITE_SUMS\}|\{_REPAIR\}"
)


def _text(node: ast.expr) -> str:
    match node:
        case ast.Constant():
            return str(node.value)
        case ast.JoinedStr():
            return "".join(_text(value) for value in node.values)
        case ast.BinOp(op=ast.Add()):
            return _text(node.left) + _text(node.right)
        case ast.FormattedValue():
            return f"{{{ast.unparse(node.value)}}}"
    return f"{{{ast.unparse(node)}}}"


def _raised() -> Iterator[tuple[str, str, str]]:
    """Where, which and what, of every error of ours that code for operators makes."""
    for room in ("anabranch", "speed_layer", "batch_layer", "serving_layer"):
        for file in sorted((ROOT / room).rglob("*.py")):
            # A finding of the doctor's has its remedy beside it.
            if {"dev", "dev.py", "doctor"} & {*file.relative_to(ROOT).parts}:
                continue
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                    continue
                if node.func.id in _OURS and node.args:
                    where = f"{file.relative_to(ROOT)}:{node.lineno}"
                    yield where, node.func.id, _text(node.args[0])


def faults(kind: str, text: str) -> list[str]:
    """The parts missing in an error's text. Pure."""
    if re.fullmatch(r"\{[^}]*\}", text):
        return []
    if _WRAPS.search(text):
        return []
    subject, expected, _ = text.partition("expected ")
    lacking = []
    # A service that did not answer has only failed.
    if not expected and kind not in _PASSING:
        lacking.append("the expected value")
    if not subject.strip():
        lacking.append("where")
    # For a configuration the expected value is the remedy.
    if kind not in ("ConfigurationError", "MetadataGone") and not _WHAT_TO_DO.search(
        text[max(0, text.find("found")) :]
    ):
        lacking.append("what to do")
    return lacking


@pytest.mark.parametrize(
    ("kind", "text", "lacking"),
    [
        ("Terminal", "table {name}: expected a position, found none; run `anabranch apply`", []),
        ("Transient", "{doing}: {status} (transient, try again)", []),
        ("ConfigurationError", "registry: expected the url of a schema registry, found none", []),
        ("Terminal", "{error}", []),
        ("Terminal", "table {name}: expected a position, found none", ["what to do"]),
        ("Refused", "the hour is gone; run `anabranch hours`", ["the expected value"]),
        ("ConfigurationError", "expected a url, found none", ["where"]),
        ("Transient", "stopped", ["what to do"]),
    ],
)
def test_missing_parts_of_an_error_are_found(kind: str, text: str, lacking: list[str]) -> None:
    assert faults(kind, text) == lacking


def test_every_error_has_the_failure_the_place_and_a_remedy() -> None:
    raised = list(_raised())
    assert len(raised) > 150, "expected to find the places that raise errors"
    found = [(at, kind, text, faults(kind, text)) for at, kind, text in raised]
    lacking = [f"{at}: {kind}({t!r}) lacks {' and '.join(f)}" for at, kind, t, f in found if f]
    assert not lacking, "\n".join(lacking)
