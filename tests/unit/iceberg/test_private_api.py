"""PyIceberg's private names: one module uses them, and each is there in the pinned version."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import pyiceberg.avro.file
import pyiceberg.io.pyarrow
import pytest
from lakes import new_lake
from pyiceberg.avro.file import AvroFileHeader
from pyiceberg.avro.resolver import construct_reader
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import read_manifest_list
from pyiceberg.table import Transaction
from scale import ScaledStream

from anabranch.iceberg import private_api
from anabranch.offsets.hours import Timeline

ROOT = Path(__file__).parents[3]
OURS = ("anabranch", "speed_layer", "batch_layer", "serving_layer")
OF_TRANSACTION = ("_updates", "_requirements")


@pytest.mark.parametrize(
    ("owner", "name", "parameters", "breaks"),
    [
        (pyiceberg.io.pyarrow, "_dataframe_to_data_files", ("table_metadata", "df", "io"), "the ledger and the views"),
        (pyiceberg.io.pyarrow, "_import_retry_strategy", ("impl",), "s3.retry-strategy-impl of catalog.properties"),
        (PyArrowFileIO, "_initialize_fs", ("self", "scheme", "netloc"), "every file on S3 and HDFS"),
    ],
)
def test_a_private_function_takes_what_we_give_it(
    owner: object, name: str, parameters: tuple[str, ...], breaks: str
) -> None:
    function = getattr(owner, name, None)
    assert function is not None, f"PyIceberg has no {name} any more: change private_api.py, which {breaks} need"
    found = tuple(inspect.signature(function).parameters)
    assert found[: len(parameters)] == parameters, f"{name} has other parameters: change private_api.py ({breaks})"


@pytest.mark.parametrize("name", OF_TRANSACTION)
def test_a_transaction_has_its_updates_and_requirements(name: str) -> None:
    written = inspect.getsource(Transaction.__init__)
    assert f"self.{name} = ()" in written, f"a Transaction has no {name}: `anabranch apply` needs it (private_api.py)"


def test_a_reader_of_metadata_is_made_once_for_each_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hour = "2026-11-21T03"
    scaled = ScaledStream(new_lake(tmp_path, 2, Timeline(hour, hour, {0: 0, 1: 0})), 2)
    for _ in range(3):
        scaled.micro_batch(hour)
    made, resolve = [], private_api.resolve_reader

    def counted(*of: Any) -> Any:
        made.append(of)
        return resolve(*of)

    def read() -> list[str]:
        table = scaled.lake.table()
        lists = [table.io.new_input(snapshot.manifest_list) for snapshot in table.snapshots()]
        manifests = [manifest for file in lists for manifest in read_manifest_list(file)]
        read = [of for manifest in manifests for of in (manifest, *manifest.fetch_manifest_entry(table.io))]
        return [re.sub(r"<.*? object at \w+>", "", repr(one)) for one in read]

    monkeypatch.setattr(private_api, "_readers", {})
    monkeypatch.setattr(private_api, "resolve_reader", counted)
    found = read()
    assert len(found) > 10
    # Of headers, manifest lists and manifests: in vain for each of a dozen files.
    assert len(made) <= 4, "expected pyiceberg.avro.file to use our readers: change private_api.py"
    monkeypatch.setattr(AvroFileHeader, "get_schema", private_api._get_schema_once)
    monkeypatch.setattr(pyiceberg.avro.file, "resolve_reader", resolve)
    monkeypatch.setattr(pyiceberg.avro.file, "construct_reader", construct_reader)
    assert read() == found


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
    tree = ast.parse(file.read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    ours = [alias.name for node in imports if (node.module or "").startswith("pyiceberg") for alias in node.names]
    names = [name for name in ours if name.startswith("_")]
    if not ours:
        return names
    private = (*OF_TRANSACTION, "_initialize_fs")
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in private]
    return names + [node.attr for node in attributes if not _is_of_self(node)]


def _is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"
