"""Code that tests keep as text, for other processes: what it imports exists. A run of the suites
that use it takes hours, and comes late."""

import ast
import importlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
IMPORT = re.compile(r"from ((?:anabranch|\w+_layer)\b[\w.]*) import (\w+(?:, \w+)*)")


def imports() -> Iterator[tuple[str, str, str]]:
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for module, names in IMPORT.findall(node.value):
                    for name in names.split(", "):
                        yield f"{file.relative_to(ROOT)}:{node.lineno}", module, name


def test_imports_in_texts_exist() -> None:
    found = list(imports())
    assert len(found) > 20
    missing = [
        f"{where}: {module}.{name}"
        for where, module, name in found
        if not hasattr(importlib.import_module(module), name)
        and find_spec(f"{module}.{name}") is None
    ]
    assert missing == []
