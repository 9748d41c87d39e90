"""docs/tutorial.md for tests: its commands with the output that it shows, and its files."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"


def commands() -> list[str]:
    """Return the `anabranch` commands of the page, in order."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [line.removeprefix("$ ") for line in lines if line.startswith("$ anabranch ")]


def block(kind: str) -> str:
    """Return the page's first block of a language."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^```{kind}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found is not None, f"{PAGE}: expected a block of {kind}, found none"
    return found[1]
