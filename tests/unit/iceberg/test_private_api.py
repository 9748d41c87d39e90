"""PyIceberg's private names: one module uses them, and each is there in the pinned version."""

import ast
import inspect
from pathlib import Path

import pyiceberg.avro.file
import pyiceberg.io.pyarrow
import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Transaction

from anabranch.iceberg import private_api

ROOT = Path(__file__).parents[3]
OURS = ("anabranch", "speed_layer", "batch_layer", "serving_layer")
OF_TRANSACTION = ("_updates", "_requirements")


@pytest.mark.parametrize(
    ("owner", "name", "parameters", "breaks"),
    [
        (pyiceberg.io.pyarrow, "_dataframe_to_data_files", ("table_metadata", "df", "io"), "the ledger and the views"),
        (pyiceberg.io.pyarrow, "_import_retry_strategy", ("impl",), "s3.retry-strategy-impl of catalog.properties"),
        (PyArrowFileIO, "_initialize_fs", ("self", "scheme", "netloc"), "every file on S3"),
    ],
)  # fmt: skip
def test_a_private_function_takes_what_we_give_it(
    owner: object, name: str, parameters: tuple[str, ...], breaks: str
) -> None:
    function = getattr(owner, name, None)
    assert function is not None, f"change private_api.py, which {breaks} need"
    found = tuple(inspect.signature(function).parameters)
    assert found[: len(parameters)] == parameters, f"change private_api.py ({breaks})"


@pytest.mark.parametrize("name", OF_TRANSACTION)
def test_a_transaction_has_its_updates_and_requirements(name: str) -> None:
    written = inspect.getsource(Transaction.__init__)
    assert f"self.{name} = ()" in written, "`anabranch apply` needs it (private_api.py)"


def test_no_other_module_uses_a_private_name() -> None:
    found = {
        f"{file.relative_to(ROOT)}: {name}"
        for package in OURS
        for file in sorted((ROOT / package).rglob("*.py"))
        if file != Path(private_api.__file__)
        for name in _private_names(file)
    }
    assert found == set(), "expected the private names of PyIceberg in private_api.py alone"


def _private_names(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8")
    if "pyiceberg" not in text:
        return []
    nodes = list(ast.walk(ast.parse(text)))
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom)]
    of_pyiceberg = [n for n in imports if (n.module or "").startswith("pyiceberg")]
    ours = [alias.name for node in of_pyiceberg for alias in node.names]
    names = [name for name in ours if name.startswith("_")]
    if not ours:
        return names
    private = (*OF_TRANSACTION, "_initialize_fs")
    used = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr in private]
    return names + [node.attr for node in used if not _is_of_self(node)]


def _is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"
