"""Changes of a table's metadata copy none of its parts, and leave the metadata before them as it was; metadata of one
schema shares a reader."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyiceberg.avro.file
import pytest
from lakes import FIRST, new_lake
from pyiceberg.avro.file import AvroFileHeader
from pyiceberg.avro.resolver import construct_reader
from pyiceberg.manifest import read_manifest_list
from pyiceberg.table.update import SetPropertiesUpdate, update_table_metadata
from scale import ScaledStream

from anabranch.iceberg import pyiceberg_fixes
from anabranch.iceberg.commits import Outcome
from anabranch.iceberg.pyiceberg_fixes import PARTS
from anabranch.offsets.hours import Timeline


def test_the_shared_parts_of_metadata_are_frozen() -> None:
    assert all(part.model_config["frozen"] for part in PARTS)


def test_an_update_shares_the_parts_of_the_metadata_and_leaves_it_unchanged(tmp_path: Path) -> None:
    one = new_lake(tmp_path)
    assert one.publish(one.speed(one.stage([(FIRST, 0, 0)]), {0: 1})) is Outcome.LANDED
    before = one.table().metadata
    written = before.model_dump_json()
    after = update_table_metadata(before, (SetPropertiesUpdate(updates={"a": "b"}),))
    pairs = [
        *zip(before.schemas, after.schemas, strict=True),
        *zip(before.partition_specs, after.partition_specs, strict=True),
        *zip(before.sort_orders, after.sort_orders, strict=True),
        *zip(before.snapshots, after.snapshots, strict=True),
        *zip(before.snapshot_log, after.snapshot_log, strict=True),
        *zip(before.metadata_log, after.metadata_log, strict=True),
        *((before.refs[name], after.refs[name]) for name in before.refs),
    ]
    assert len(pairs) > 10
    assert all(one is other for one, other in pairs)
    # Lists and properties are its own.
    after.snapshots.clear()
    after.properties.clear()
    assert before.model_dump_json() == written


def test_a_reader_of_metadata_is_made_once_for_each_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hour = "2026-11-21T03"
    scaled = ScaledStream(new_lake(tmp_path, 2, Timeline(hour, hour, {0: 0, 1: 0})), 2)
    for _ in range(3):
        scaled.micro_batch(hour)
    made, resolve = [], pyiceberg_fixes.resolve_reader

    def counted(*of: Any) -> Any:
        made.append(of)
        return resolve(*of)

    def read() -> list[str]:
        table = scaled.lake.table()
        lists = [table.io.new_input(snapshot.manifest_list) for snapshot in table.snapshots()]
        manifests = [manifest for file in lists for manifest in read_manifest_list(file)]
        read = [of for manifest in manifests for of in (manifest, *manifest.fetch_manifest_entry(table.io))]
        return [re.sub(r"<.*? object at \w+>", "", repr(one)) for one in read]

    monkeypatch.setattr(pyiceberg_fixes, "_readers", {})
    monkeypatch.setattr(pyiceberg_fixes, "resolve_reader", counted)
    found = read()
    assert len(found) > 10
    # Of headers, manifest lists and manifests: in vain for each of a dozen files.
    assert 0 < len(made) <= 4, "expected pyiceberg.avro.file to use our readers: change pyiceberg_fixes.py"
    monkeypatch.setattr(AvroFileHeader, "get_schema", pyiceberg_fixes._get_schema_once)
    monkeypatch.setattr(pyiceberg.avro.file, "resolve_reader", resolve)
    monkeypatch.setattr(pyiceberg.avro.file, "construct_reader", construct_reader)
    assert read() == found
