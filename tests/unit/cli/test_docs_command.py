"""`anabranch docs`: pages as links, comments and alerts name them."""

import json
import re
import shlex
from pathlib import Path

import pytest
from conf_folders import said

from anabranch.cli.docs import section_of

ROOT = Path(__file__).resolve().parents[3]
_NAMED = re.compile(r"docs/[\w/-]+\.md(?:#[\w-]+)?")


def named() -> set[str]:
    """Every page that what `init` writes names, with its section."""
    own = [*(ROOT / "conf").rglob("*.yaml"), *(ROOT / "deploy").rglob("*")]
    files = [ROOT / "docker-compose.yml", *(file for file in own if file.is_file())]
    return {name for file in files for name in _NAMED.findall(file.read_text(encoding="utf-8"))}


def commands() -> set[str]:
    """Every page that the README of a new folder prints by a command."""
    text = (ROOT / "anabranch" / "starter_files" / "README.md").read_text(encoding="utf-8")
    return {name for name in re.findall(r"`anabranch docs ([\w/-]+)`", text) if name != "PAGE"}


def test_pages_and_sections_are_listed_and_others_are_wrong_usage() -> None:
    assert re.search(r"^how-to/query +Query$", said("docs"), re.MULTILINE)
    assert "anabranch docs PAGE" in said("docs")
    assert "expected one of the pages" in said("docs", "nothing", expect=2)
    assert "expected a section of how-to/query.md" in said("docs", "query#nothing", expect=2)
    text = "# A\n## What's `b`?\nb\n```\n# code\n```\n### C\nc\n## D\nd\n"
    assert section_of(text, "whats-b") == "## What's `b`?\nb\n```\n# code\n```\n### C\nc\n"
    assert section_of(text, "d") == "## D\nd\n"
    assert section_of(text, "code") == ""
    names = ("formats", "formats.md", "docs/reference/formats.md")
    assert len({said("docs", name) for name in names}) == 1


@pytest.mark.parametrize("name", sorted(named()))
def test_comments_and_alerts_name_existing_output(name: str) -> None:
    page, _, section = name.partition("#")
    text = said("docs", name)
    whole = (ROOT / page).read_text(encoding="utf-8")
    assert text in whole and (len(text) < len(whole) / 2 if section else text == whole)


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_readme_of_a_new_folder_names_a_page(name: str) -> None:
    assert said("docs", name).startswith("# ")


# Files that `anabranch init` writes, and their places: a newcomer's first minutes.

README = ROOT / "anabranch" / "starter_files" / "README.md"


def test_a_folder_is_filled_but_no_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = said("init")
    assert (tmp_path / "conf" / "anabranch.yaml").is_file()
    assert (tmp_path / "README.md").read_bytes() == README.read_bytes()
    assert "edit: conf/streams/game_events.yaml is one topic" in printed
    assert "edit: conf/anabranch.yaml has the addresses of Kafka, S3 and the catalog" in printed
    assert "next: anabranch dev up, anabranch apply" in printed
    assert "expected none of its files" in said("init", expect=2)
    (tmp_path / "a lake").mkdir()
    (tmp_path / "a lake" / "README.md").write_text("mine")
    there = said("init", str(tmp_path / "a lake"))
    assert (tmp_path / "a lake" / "README.md").read_text() == "mine"
    assert "README.md\n" not in there
    assert f"cd {shlex.quote(str(tmp_path / 'a lake'))}, anabranch dev up" in there
    # docs/test_named_commands.py knows its commands.
    for place in re.findall(r"^\| (.*?) \|", README.read_text(encoding="utf-8"), re.MULTILINE)[1:]:
        for name in re.findall(r"`(.*?)`", place):
            assert (tmp_path / name).exists(), name


def test_this_wheel_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: an image of a version that no index has."""
    said("init", str(tmp_path / "of a checkout"))
    assert [one.name for one in (tmp_path / "of a checkout" / "wheels").iterdir()] == ["README"]
    wheel = tmp_path / "my dist" / "anabranch-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"a wheel")
    origin = {"url": wheel.as_uri(), "archive_info": {}}

    class Installed:
        def read_text(self, name: str) -> str | None:
            return json.dumps(origin) if name == "direct_url.json" else None

    monkeypatch.setattr("importlib.metadata.distribution", lambda _: Installed())
    said("init", str(tmp_path / "of a wheel"))
    assert (tmp_path / "of a wheel" / "wheels" / wheel.name).read_bytes() == b"a wheel"
