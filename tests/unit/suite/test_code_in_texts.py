"""Code that tests keep as text for other processes: what it imports exists."""

import ast
import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
IMPORT = re.compile(r"from ((?:anabranch|\w+_layer)\b[\w.]*) import (\w+(?:, \w+)*)")


def imports() -> Iterator[tuple[str, str]]:
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for module, names in IMPORT.findall(node.value):
                    yield from ((module, name) for name in names.split(", "))


def test_imports_in_texts_exist() -> None:
    found = list(imports())
    assert len(found) > 20
    for module, name in found:
        has_it = hasattr(importlib.import_module(module), name)
        assert has_it or find_spec(f"{module}.{name}") is not None, (module, name)
