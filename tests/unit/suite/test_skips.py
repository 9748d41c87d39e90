"""No test is skipped, except where a machine lacks what it needs."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
MAY_SKIP = {
    "page/test_in_browser.py": "pictures are drawn on demand",
    "external/marquez/test_marquez.py": "Marquez is asked on demand",
    "external/marquez/test_provider.py": "its own suite brings the provider",
    "unit/cli/test_completion.py": "a machine without bash completes nothing",
    "unit/iceberg/test_parquet_writer.py": "macOS has no /dev/full",
}
NAMES = (
    "pytest.skip", "pytest.mark.skip", "pytest.mark.skipif", "pytest.mark.xfail",
    "pytest.importorskip",
)  # fmt: skip


def test_nothing_is_skipped() -> None:
    for file in sorted(TESTS.glob("**/test_*.py")):
        if str(file.relative_to(TESTS)) not in MAY_SKIP:
            found = skips(file.read_text(encoding="utf-8"))
            why = f"{file}: lines {found} skip: remove them, or add the file to MAY_SKIP"
            assert not found, why


@pytest.mark.parametrize("name", NAMES)
def test_a_skip_is_found(name: str) -> None:
    assert skips(f"import pytest\n\n@{name}('why')\ndef test_it(): ...\n") == [3]


def skips(text: str) -> list[int]:
    """Return the lines that skip a test, or expect it to fail."""
    if not any(name.rpartition(".")[2] in text for name in NAMES):
        return []
    attributes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Attribute)]
    return [node.lineno for node in attributes if ast.unparse(node) in NAMES]
