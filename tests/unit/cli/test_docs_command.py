"""`anabranch docs`: pages as links, comments and alerts name them."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from anabranch.cli import main
from anabranch.cli.docs import section_of

ROOT = Path(__file__).resolve().parents[3]
_NAMED = re.compile(r"docs/[\w/-]+\.md(?:#[\w-]+)?")


def named() -> set[str]:
    """Every page that what `init` writes names, with its section."""
    files = [
        *(ROOT / "conf").rglob("*.yaml"),
        *(ROOT / "deploy").rglob("*"),
        ROOT / "docker-compose.yml",
    ]
    return {
        name
        for file in files
        if file.is_file()
        for name in _NAMED.findall(file.read_text(encoding="utf-8"))
    }


def commands() -> set[str]:
    """Every page that the README of a new folder prints by a command."""
    text = (ROOT / "anabranch" / "starter_files" / "README.md").read_text(encoding="utf-8")
    return {name for name in re.findall(r"`anabranch docs ([\w/-]+)`", text) if name != "PAGE"}


def docs(*arguments: str, expect: int = 0) -> str:
    done = CliRunner().invoke(main, ["docs", *arguments])
    assert done.exit_code == expect, done.output
    return done.output


def test_the_pages_are_listed_with_their_titles() -> None:
    assert re.search(r"^how-to/query +Query$", docs(), re.MULTILINE)
    assert "anabranch docs PAGE" in docs()


@pytest.mark.parametrize("name", sorted(named()))
def test_comments_and_alerts_name_existing_output(name: str) -> None:
    page, _, section = name.partition("#")
    text = docs(name)
    whole = (ROOT / page).read_text(encoding="utf-8")
    assert text in whole and (len(text) < len(whole) / 2 if section else text == whole)


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_readme_of_a_new_folder_names_a_page(name: str) -> None:
    assert docs(name).startswith("# ")


def test_a_section_ends_with_the_next_of_its_rank_and_code_has_no_headings() -> None:
    text = "# A\n## What's `b`?\nb\n```\n# code\n```\n### C\nc\n## D\nd\n"
    assert section_of(text, "whats-b") == "## What's `b`?\nb\n```\n# code\n```\n### C\nc\n"
    assert section_of(text, "d") == "## D\nd\n"
    assert section_of(text, "code") == ""
    assert docs("formats") == docs("formats.md") == docs("docs/reference/formats.md")


def test_a_page_or_section_that_is_not_there_is_wrong_usage() -> None:
    assert "expected one of the pages" in docs("nothing", expect=2)
    assert "expected a section of how-to/query.md" in docs("query#nothing", expect=2)
