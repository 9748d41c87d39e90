"""The runbooks and other pages for operators: their entries, and every command of a page."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("runbooks", "how-to/change-a-schema", "how-to/deploy/monitoring", "reference/quality-gate")
"""The pages whose commands a test runs as printed."""
PAGE = (ROOT / "docs" / "runbooks.md").read_text("utf-8")
TEXT = "\n".join((ROOT / "docs" / f"{page}.md").read_text("utf-8") for page in PAGES)

_PROGRAMS = (
    r"airflow|anabranch|kafka-[a-z]+\.sh|aws|du|fuser|jq|openssl|rm|unset|ALTER TABLE|CALL|SELECT"
)
_COMMAND = re.compile(rf"(?:{_PROGRAMS}) .+")
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)


def commands() -> set[str]:
    """Return every command of the pages, on one line. Output of programs (```text) does not count,
    nor a mere name such as `anabranch audit` if a longer command begins with it."""
    blocks = [body for kind, body in _FENCE.findall(TEXT) if kind != "text"]
    fenced = [line.strip() for body in blocks for line in body.splitlines()]
    spans = re.findall(r"`([^`]+)`", _FENCE.sub("", TEXT))
    found = {" ".join(span.split()) for span in (*fenced, *spans)}
    found = {span for span in found if _COMMAND.fullmatch(span)}
    return {
        c
        for c in found
        if len(c.split()) > 2 or not any(other.startswith(f"{c} ") for other in found)
    }


def printed(command: str, **values: str) -> str:
    """Return a command of a page with words in capitals replaced. tests/unit/docs/test_run_books.py
    reads the calls, and fails for a command of a page that no test uses."""
    assert command in commands(), f"docs: expected a page with the command {command}, found none"
    for name, value in values.items():
        replaced = re.sub(rf"\b{name}\b", lambda _, v=value: v, command)  # type: ignore[misc]
        assert replaced != command, f"{command}: expected {name} in it, found none"
        command = replaced
    return command


def words(command: str) -> list[str]:
    """Return the arguments of an `anabranch` command, for `anabranch.cli.main`."""
    program, *arguments = shlex.split(command)
    assert program == "anabranch", command
    return arguments


def entries() -> dict[str, dict[str, str]]:
    """Return the entries of the section of alerts and states by heading: text by label."""
    section = PAGE[PAGE.index("\n## Alerts and states of an hour\n") :].split("\n## ")[1]
    found = {}
    for part in section.split("\n### ")[1:]:
        heading, _, body = part.partition("\n")
        found[heading] = {label: " ".join(text.split()) for label, text in _labelled(body)}
    return found


def _labelled(body: str) -> list[tuple[str, str]]:
    return re.findall(r"^- \*\*(\w+)\*\*: (.*?)(?=^- \*\*|\Z)", body, re.DOTALL | re.MULTILINE)


def findings() -> dict[str, list[str]]:
    """Return the doctor's table by finding: meaning, command to run, and what to ignore."""
    section = PAGE[PAGE.index("\n## What the doctor finds\n") :].split("\n## ")[1]
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", section, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split(" | ")] for name, rest in rows}
