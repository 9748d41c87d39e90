"""No line of prose in the documentation is longer than 120 characters: tables, code and images may
be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted(
    [
        *(
            ROOT / n
            for n in (
                "README.md",
                "CHANGELOG.md",
                "CONTRIBUTING.md",
                "tests/README.md",
                "benchmarks/RESULTS.md",
            )
        ),
        ROOT / "anabranch" / "starter_files" / "README.md",
        *ROOT.glob("docs/**/*.md"),
    ]
)
WIDTH = 120


def too_wide(text: str) -> Iterator[int]:
    """The numbers of lines that are too long and could be wrapped."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and is_too_wide(line):
            yield number


def is_too_wide(line: str) -> bool:
    is_prose = not line.lstrip().startswith(("|", "![", "#", "<!--"))
    return is_prose and len(line) > WIDTH > max(map(len, line.split()))


def test_long_lines_are_found_outside_of_tables_and_code() -> None:
    long = "word " * 30
    assert list(too_wide(f"{long}\n```\n{long}\n```\n| {long} |\n- {long}\nshort")) == [1, 6]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_line_of_prose_is_too_long(page: Path) -> None:
    assert list(too_wide(page.read_text("utf-8"))) == [], (
        f"{page}: wrap these lines at {WIDTH} characters"
    )
