"""Changes of a table's metadata copy none of its parts, and manifests of one schema share a reader."""

from __future__ import annotations

from pathlib import Path

import pytest
from lakes import FIRST, new_lake
from pyiceberg.avro import resolver
from pyiceberg.avro.file import AvroFile
from pyiceberg.io import InputFile
from pyiceberg.manifest import MANIFEST_LIST_FILE_SCHEMAS, ManifestFile
from pyiceberg.table.update import SetPropertiesUpdate, update_table_metadata

from anabranch.iceberg.commits import Outcome
from anabranch.iceberg.pyiceberg_fixes import PARTS


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


def test_manifest_lists_share_a_reader_and_keep_their_own_manifests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = new_lake(tmp_path)
    for offset in range(2):
        assert one.publish(one.speed(one.stage([(FIRST, 0, offset)]), {0: offset + 1})) is Outcome.LANDED
    table = one.table()
    lists = sorted({s.manifest_list for s in table.snapshots()})
    assert len(lists) > 2
    opened = [open_list(table.io.new_input(lists[0]))]
    with monkeypatch.context() as patched:
        patched.delattr(resolver, "visit_with_partner")
        opened += [open_list(table.io.new_input(path)) for path in lists[1:]]
    assert len({id(file.schema) for file, _ in opened}) == 1
    assert len({tuple(m.manifest_path for m in manifests) for _, manifests in opened}) > 2
    assert one.rows("main") == [(FIRST, 0, 0), (FIRST, 0, 1)]
    # A reader of other columns is another one.
    with AvroFile(table.io.new_input(lists[0])) as whole:
        assert whole.reader is not opened[0][0].reader


def open_list(file: InputFile) -> tuple[AvroFile[ManifestFile], list[ManifestFile]]:
    with AvroFile[ManifestFile](file, MANIFEST_LIST_FILE_SCHEMAS[2], {-1: ManifestFile}) as opened:
        return opened, list(opened)
