"""Paths that the documentation names are there: a page that leads nowhere is worse than none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])
_ROOMS = "anabranch|speed_layer|batch_layer|serving_layer|dags|tests|conf|scripts"
_FILE = re.compile(rf"`((?:{_ROOMS})/(?:[\w.-]+/)*[\w-]*\.?\w*)[`:]")
_PLACE = re.compile(r"`([\w.]+)` in `([\w/]+\.py)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    text = page.read_text("utf-8")
    named = [ROOT / name for name in _FILE.findall(text)] + [page.parent / link for link in _LINK.findall(text)]
    assert [str(path.relative_to(ROOT)) for path in named if not path.resolve().exists()] == []


def test_every_answer_of_the_ten_questions_is_defined_where_it_is_said_to_be() -> None:
    places = _PLACE.findall((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert len(places) >= 6
    for name, file in places:
        defined = rf"(def|class) {name.rpartition('.')[2]}\("
        assert re.search(defined, (ROOT / file).read_text("utf-8")), f"{name} in {file}"
