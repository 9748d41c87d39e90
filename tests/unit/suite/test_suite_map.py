"""tests/README.md maps each public feature to tests that some target runs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import suite_map
from full_run import suite_of
from suite_map import FEATURES, FULL, QUICK, README, ROOT, Row

MAY_SKIP = {
    "page/test_in_browser.py": "pictures are drawn on demand",
    "external/marquez/test_marquez.py": "Marquez is asked on demand",
    "external/marquez/test_provider.py": "its own target brings the provider",
    "unit/cli/test_completion.py": "a machine without bash completes nothing",
    "unit/iceberg/test_parquet_writer.py": "macOS has no /dev/full",
}


def test_each_feature_has_its_line() -> None:
    found = [row.what for row in suite_map.rows(FEATURES)]
    missing = [
        Row(one, "`test_….py::test_…`", QUICK).line
        for one in suite_map.features()
        if one not in found
    ]
    assert not missing, f"{README}, {FEATURES}: add, with the tests that guard it\n" + "\n".join(
        missing
    )
    old = [one for one in found if one not in suite_map.features()]
    assert not old, (
        f"{README}, {FEATURES}: remove the lines of {', '.join(old)}: there is no such feature"
    )
    twice = [one for one in found if found.count(one) > 1]
    assert not twice, f"{README}, {FEATURES}: expected each feature once, found {twice}"


@pytest.mark.parametrize("row", suite_map.rows(FEATURES), ids=lambda row: row.what)
def test_the_target_of_a_feature_runs_its_tests(row: Row) -> None:
    assert list(suite_map.named(row.tests)), f"{row.what}: expected tests, found {row.tests!r}"
    target = suite_map.target_of(row.tests)
    assert row.target == target, (
        f"{README}: expected the line\n{Row(row.what, row.tests, target).line}"
    )


def test_each_folder_of_tests_has_its_own_target_and_each_test_is_run_by_one_of_the_two() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for file in sorted((ROOT / "tests").glob("**/test_*.py")):
        folder = suite_of(str(file.relative_to(ROOT)))
        assert re.search(rf"pytest\b.* tests/{folder}(\s|$)", makefile, re.MULTILINE), (
            f"Makefile: no target of {folder}"
        )
        marked = [name for name, marks in suite_map.functions(file).items() if "mark.full" in marks]
        assert not marked or folder in suite_map.QUICK_FOLDERS, (
            f"{file}: {FULL} runs all of {folder}: no mark is needed"
        )
    recipe = re.search(r"^test: .*\n(?:\t.*\n)*?(\t.* -m pytest .*)", makefile, re.MULTILINE)
    assert recipe is not None and "-m 'not full'" in recipe[1]
    assert re.findall(r"tests/(\w+)", recipe[1]) == list(suite_map.QUICK_FOLDERS)


@pytest.mark.parametrize(
    "name", ["Makefile", ".github/workflows/ci.yml", ".github/workflows/nightly.yml", ".ci/run"]
)
def test_the_script_of_every_target_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"\b[\w/-]+/[\w-]+\.py\b", text)
    gone = [path for path in named if not (ROOT / path).exists()]
    assert gone == [], f"{name}: expected files that exist, found {', '.join(gone)}"


def test_each_file_of_tests_has_its_own_name() -> None:
    """pytest imports a file by its name alone, and so are files named in tables."""
    names = [file.name for file in (ROOT / "tests").glob("**/test_*.py")]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert twice == [], (
        f"expected each name once, found two files of {', '.join(twice)}: rename one"
    )


def test_nothing_is_skipped() -> None:
    for file in sorted((ROOT / "tests").glob("**/test_*.py")):
        if str(file.relative_to(ROOT / "tests")) in MAY_SKIP:
            continue
        remedy = "remove it, or add the file to MAY_SKIP with the machines that lack what it needs"
        assert not skips(file), (
            f"{file}: expected no skip, found one in line {skips(file)}: {remedy}"
        )


def skips(file: Path) -> list[int]:
    """The lines of a file that skip a test, or expect it to fail."""
    names = (
        "pytest.skip",
        "pytest.mark.skip",
        "pytest.mark.skipif",
        "pytest.mark.xfail",
        "pytest.importorskip",
    )
    text = file.read_text(encoding="utf-8")
    if not any(name.rpartition(".")[2] in text for name in names):
        return []
    tree = ast.parse(text)
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in names
    ]
