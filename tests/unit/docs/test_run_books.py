"""Run-books: one for each alert, finding and state of an hour; tests run all their commands."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import run_books
import yaml

from anabranch.operations.finding import Issue
from anabranch.operations.page.hour_view import LETTERS

ROOT = Path(__file__).resolve().parents[3]
LABELS = ["Means", "See", "Run", "Ignore"]
_RULES = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text(encoding="utf-8")
_GROUPS = yaml.safe_load(_RULES)["groups"]
ALERTS = {rule["alert"]: rule for group in _GROUPS for rule in group["rules"]}


def test_each_alert_finding_and_state_has_its_run_book_whose_commands_run() -> None:
    books = run_books.entries()
    assert {*books} == {*ALERTS, *(f"Hour {state}" for state in LETTERS)}
    assert {name: list(labels) for name, labels in books.items() if list(labels) != LABELS} == {}
    rows = run_books.findings()
    assert list(rows) == [str(check) for check in Issue]
    assert [name for name, cells in rows.items() if len(cells) != 3 or not all(cells)] == []
    files = (ROOT / "tests").glob("**/test_*.py")
    run = {command for file in files for command in _printed_in(file)}
    assert run == run_books.commands() and len(run) > 40


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_leads_to_its_run_book(alert: str) -> None:
    assert ALERTS[alert]["annotations"]["summary"]
    assert ALERTS[alert]["annotations"]["runbook"] == f"docs/runbooks.md#{alert.lower()}"


def _printed_in(file: Path) -> Iterator[str]:
    """Yield the arguments of `printed` in a file's tests. None of these tests may be skipped."""
    source = file.read_text(encoding="utf-8")
    if "from run_books import" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "printed":
            why = f"{file} may be skipped"
            assert "pytest.skip" not in source and "mark.skip" not in source, why
            [template] = node.args
            assert isinstance(template, ast.Constant), f"{file}:{node.lineno}: expected a command"
            yield str(template.value)
