"""Paths that the documentation names are there: a page that leads nowhere is worse than none."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from anabranch.cli.docs import section_of

ROOT = Path(__file__).resolve().parents[3]
_OWN = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "tests/README.md", "tests/failures/README.md",
)  # fmt: skip
PAGES = sorted([*(ROOT / name for name in _OWN), *ROOT.glob("docs/**/*.md")])
_ROOMS = "anabranch|speed_layer|batch_layer|serving_layer|dags|tests|conf|scripts"
_FILE = re.compile(rf"`((?:{_ROOMS})/(?:[\w.-]+/)*[\w-]*\.?\w*)[`:]")
_PLACE = re.compile(r"`([\w.]+)` in `([\w/]+\.py)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
_SECTION = re.compile(r"\]\((?!https?:)([^)#]*)#([^)]+)\)")
_YAML = re.compile(r"^```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
_TEXTS = (".py", ".yaml", ".yml", ".md", ".json", ".conf")
_NAMED = re.compile(r"docs/[\w/-]+\.md")
_CODE = ("anabranch", "speed_layer", "batch_layer", "serving_layer")
_BESIDE = ("dags", "examples", "benchmarks", "tests")
_MODULE = re.compile(r"`(?:[\w.]+/)*(\w+\.py)[`:]")
_SHORT_PAGE = re.compile(r"\b(?:how-to|reference|explanation)/[\w/-]+")
_TEST = re.compile(r"`(test_\w+)`")
_PRIVATE = re.compile(r"\b_[a-z]\w+")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_file_and_section_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    named = [ROOT / name for name in _FILE.findall(text)]
    named += [page.parent / link for link in _LINK.findall(text)]
    assert [str(path.relative_to(ROOT)) for path in named if not path.resolve().exists()] == []
    links = _SECTION.findall(page.read_text("utf-8"))
    sections = [(page.parent / link if link else page, name) for link, name in links]
    assert [
        (to, name) for to, name in sections if not section_of(to.read_text("utf-8"), name)
    ] == []


def test_every_module_and_test_that_a_page_names_exists() -> None:
    files = [file for folder in (*_CODE, *_BESIDE) for file in (ROOT / folder).rglob("*.py")]
    modules = {file.name for file in files}
    tests = {
        name
        for file in files
        if file.name.startswith("test_")
        for name in re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)
    }
    for page in PAGES:
        text = page.read_text("utf-8")
        assert {*_MODULE.findall(text)} <= modules, page
        # The beginning of a test's name is enough.
        short = [name for name in _TEST.findall(text) if not any(t.startswith(name) for t in tests)]
        assert short == [], page


def test_pages_that_starter_files_and_the_index_name_exist() -> None:
    text = (ROOT / "anabranch" / "starter_files" / "README.md").read_text("utf-8")
    named = {name.removesuffix(".md") for name in _SHORT_PAGE.findall(text)}
    assert len(named) > 4
    assert [name for name in named if not (ROOT / "docs" / f"{name}.md").exists()] == []
    docs = ROOT / "docs"
    links = _LINK.findall((docs / "index.md").read_text("utf-8"))
    linked = {docs / "index.md", *((docs / link).resolve() for link in links)}
    pages = {page for page in docs.rglob("*.md") if "decisions" not in page.parts}
    assert sorted(str(page) for page in pages - linked) == []


def test_the_table_of_private_names_has_those_that_the_code_uses() -> None:
    """A name of decision 1 is in its module, and a name that no code of ours defines is in it."""
    table = (ROOT / "docs/decisions/0001-direct-catalog-commits.md").read_text("utf-8")
    listed = set[tuple[str, str]]()
    for row in (line.split("|") for line in table.splitlines() if line.startswith("| ")):
        files = re.findall(r"`([\w/]+\.py)`", row[3])
        listed |= {(name, file) for name in _PRIVATE.findall(row[1]) for file in files}
    used, defined = set[tuple[str, str]](), set[str]()
    for folder in _CODE:
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    defined.add(node.name)
                elif isinstance(node, ast.Attribute):
                    is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                    if is_own or isinstance(node.ctx, ast.Store):
                        defined.add(node.attr)
                    if re.fullmatch(r"_[a-z]\w*", node.attr):
                        used.add((node.attr, str(file.relative_to(ROOT))))
    known = {"_asdict", "_exit", "_replace"}
    assert {one for one in used if one[0] not in defined | known} <= listed
    texts = {file: (ROOT / file).read_text("utf-8") for _, file in listed}
    assert [one for one in listed if one[0] not in texts[one[1]]] == []


def test_every_answer_to_the_thirteen_questions_is_defined_in_its_file() -> None:
    places = _PLACE.findall((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    assert len(places) >= 10
    for name, file in places:
        defined = rf"(def|class) {name.rpartition('.')[2]}\("
        assert re.search(defined, (ROOT / file).read_text("utf-8")), f"{name} in {file}"


def test_every_block_of_yaml_can_be_read_and_every_page_of_code_exists() -> None:
    blocks = [(page, block) for page in PAGES for block in _YAML.findall(page.read_text("utf-8"))]
    assert len(blocks) > 20
    for page, block in blocks:
        assert isinstance(yaml.safe_load(block), dict), f"{page.relative_to(ROOT)}: {block}"
    code = "anabranch speed_layer batch_layer serving_layer dags conf deploy tests benchmarks"
    own = ("Makefile", "docker-compose.yml", ".env.example", "pyproject.toml")
    found = [file for folder in code.split() for file in (ROOT / folder).rglob("*")]
    files = [*(ROOT / name for name in own), *(f for f in found if f.suffix in _TEXTS)]
    named = {name for file in files for name in _NAMED.findall(file.read_text("utf-8"))}
    assert len(named) > 10
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
