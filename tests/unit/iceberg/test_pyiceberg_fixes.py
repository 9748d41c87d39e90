"""Changes of a table's metadata copy none of its parts, and leave the metadata before them as it
was; what PyIceberg builds for each file is built once for each schema, and is what it was."""

import inspect
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from uuid import uuid4

import pyiceberg.avro.file
import pyiceberg.io.pyarrow
import pyiceberg.manifest
import pytest
from lakes import FIRST, decide, new_lake
from named_files import named_files
from pyiceberg.avro.file import AvroFileHeader, AvroOutputFile
from pyiceberg.avro.resolver import construct_reader
from pyiceberg.manifest import ManifestEntry, read_manifest_list
from pyiceberg.table.metadata import (
    TableMetadataV1,
    TableMetadataV2,
    TableMetadataV3,
    TableMetadataWrapper,
)
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.statistics import StatisticsFile
from pyiceberg.table.update import SetPropertiesUpdate, SetStatisticsUpdate, update_table_metadata
from pyiceberg.utils.schema_conversion import AvroSchemaConversion
from scale import ScaledStream

from anabranch.common.errors import FileGone, MetadataGone
from anabranch.iceberg import pyiceberg_fixes
from anabranch.iceberg.files import find_lost_files
from anabranch.iceberg.pyiceberg_fixes import LISTS_OF_PARTS, PARTS
from anabranch.iceberg.snapshot_writer import ManifestWriter
from anabranch.iceberg.snapshots import head
from anabranch.offsets.hours import Timeline


def test_the_shared_parts_of_metadata_are_frozen() -> None:
    assert all(part.model_config["frozen"] for part in PARTS)


def test_an_update_shares_the_parts_of_the_metadata_and_leaves_it_unchanged(tmp_path: Path) -> None:
    one = new_lake(tmp_path)
    one.serve([(FIRST, 0, 0)], {0: 1})
    before = one.table().metadata
    written = before.model_dump_json()
    after = update_table_metadata(before, (SetPropertiesUpdate(updates={"a": "b"}),))
    lists = (
        "schemas", "partition_specs", "sort_orders", "snapshots", "snapshot_log", "metadata_log",
    )  # fmt: skip
    pairs = [
        *(p for of in lists for p in zip(getattr(before, of), getattr(after, of), strict=True)),
        *((before.refs[name], after.refs[name]) for name in before.refs),
    ]
    assert len(pairs) > 10
    assert all(one is other for one, other in pairs)
    # Lists and properties are its own.
    after.snapshots.clear()
    after.properties.clear()
    assert before.model_dump_json() == written


@pytest.mark.parametrize("kind", [TableMetadataV1, TableMetadataV2, TableMetadataV3])
def test_the_lists_of_parts_are_fields_of_metadata(kind: Any) -> None:
    renamed = "PyIceberg has renamed a field: change pyiceberg_fixes.py"
    assert set(LISTS_OF_PARTS) <= set(kind.model_fields), renamed
    # A new field of another kind is copied deeply.
    found = {name for name, field in kind.model_fields.items() if _is_of_parts(field.annotation)}
    assert found <= set(LISTS_OF_PARTS)


def _is_of_parts(kind: Any) -> bool:
    names = [f"{before}{part.__name__}]" for part in PARTS for before in ("[", ".")]
    return any(name in str(kind) for name in names)


def test_what_is_no_part_is_copied(tmp_path: Path) -> None:
    one = new_lake(tmp_path)
    one.serve([(FIRST, 0, 0)], {0: 1})
    [snapshot, *_] = one.table().snapshots()
    statistics: dict[str, Any] = {
        "snapshot-id": snapshot.snapshot_id, "statistics-path": "a", "file-size-in-bytes": 1,
        "file-footer-size-in-bytes": 1, "blob-metadata": [],
    }  # fmt: skip
    added = {"action": "set-statistics", "statistics": statistics}
    update = SetStatisticsUpdate.model_validate(added)
    before = update_table_metadata(one.table().metadata, (update,))
    after = update_table_metadata(before, (SetPropertiesUpdate(updates={"a": "b"}),))
    assert after.statistics == before.statistics == [StatisticsFile.model_validate(statistics)]
    assert after.statistics is not before.statistics
    after.statistics[0].blob_metadata.append(None)  # type: ignore[arg-type]
    assert before.statistics[0].blob_metadata == []


def test_metadata_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = new_lake(tmp_path)
    parsed, parse = [], pyiceberg_fixes._parse

    def counted(text: str) -> Any:
        parsed.append(text)
        return parse(text)

    monkeypatch.setattr(pyiceberg_fixes, "_parse", counted)
    first, again = one.table(), one.again().load(one.name)
    assert again.metadata is first.metadata
    assert len(parsed) == 1
    said = first.metadata.model_dump_json()
    # What this process wrote is not parsed.
    one.serve([(FIRST, 0, 0)], {0: 1})
    table = one.table()
    assert table.metadata is not first.metadata
    assert first.metadata.model_dump_json() == said
    assert len(parsed) == 1
    file = Path(urlparse(table.metadata_location).path)
    written = file.read_text(encoding="utf-8")
    assert table.metadata == TableMetadataWrapper.model_validate_json(written).root
    # A file that was replaced, as by a restore, is found out as before.
    without = written.replace('"write.wap.enabled":"true"', '"write.wap.enabled":"false"')
    file.write_text(without, encoding="utf-8")
    assert one.table().properties["write.wap.enabled"] == "false"
    assert len(parsed) == 2
    file.unlink()
    with pytest.raises(MetadataGone):
        one.table()


def test_the_newest_metadata_of_each_table_is_kept_once() -> None:
    parsed = pyiceberg_fixes._Parsed()
    count = pyiceberg_fixes._MOST_TABLES + 1
    tables = [TableMetadataV2(**_minimal_metadata(str(uuid4()))) for _ in range(count)]
    texts = [table.model_dump_json() for table in tables]
    for text, table in zip(texts[:-1], tables, strict=False):
        parsed.keep(text, table)
    assert all(parsed.of(text) is table for text, table in zip(texts[:-1], tables, strict=False))
    newer = tables[0].model_copy(update={"last_column_id": 7})
    parsed.keep(newer.model_dump_json(), newer)
    assert set(parsed._known) == {newer.model_dump_json(), *texts[1:-1]}, "one text of each table"
    parsed.keep(texts[-1], tables[-1])
    expected = {newer.model_dump_json(), *texts[2:]}
    assert set(parsed._known) == expected, "the table that was used longest ago is gone"
    parsed = pyiceberg_fixes._Parsed()
    table = TableMetadataV2(**_minimal_metadata(str(uuid4())))
    text = table.model_dump_json()
    first = parsed.of(text)
    assert first is not table
    assert first.model_dump_json() == text
    assert parsed.of(text) is first


def _minimal_metadata(uuid: str) -> dict[str, Any]:
    return {
        "location": "s3://lake/table", "table-uuid": uuid, "last-column-id": 0,
        "last-partition-id": 999, "schemas": [{"type": "struct", "schema-id": 0, "fields": []}],
        "current-schema-id": 0, "partition-specs": [{"spec-id": 0, "fields": []}],
        "sort-orders": [{"order-id": 0, "fields": []}],
    }  # fmt: skip


def test_a_summary_is_read_as_before() -> None:
    text = '{"operation": "append", "a": "1", "Operation-b": "2"}'
    for summary in (
        Summary(Operation.APPEND, **{"a": "1", "Operation-b": "2"}),
        Summary.model_validate_json(text),
    ):
        assert summary.additional_properties == {"a": "1", "Operation-b": "2"}
        assert [summary[name] for name in ("operation", "OPERATION", "a", "A", "Operation-b")] == [
            Operation.APPEND, Operation.APPEND, "1", None, "2",
        ]  # fmt: skip
        assert (summary.get("a"), summary.get("b", "c")) == ("1", None)
        summary["a"] = "3"
        assert (summary["a"], summary.additional_properties["a"]) == ("3", "3")
        assert summary.model_dump() == {"operation": "append", "a": "3", "Operation-b": "2"}


def test_a_schemas_reader_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        read = [x for m in manifests for x in (m, *m.fetch_manifest_entry(table.io))]
        return [re.sub(r"<.*? object at \w+>", "", repr(one)) for one in read]

    afresh = pyiceberg_fixes._once(inspect.unwrap(pyiceberg_fixes._resolved))
    monkeypatch.setattr(pyiceberg_fixes, "_resolved", afresh)
    monkeypatch.setattr(pyiceberg_fixes, "resolve_reader", counted)
    found = read()
    assert len(found) > 10
    # Of headers, manifest lists and manifests: in vain for each of a dozen files.
    unused = "expected pyiceberg.avro.file to use our readers: change pyiceberg_fixes.py"
    assert 0 < len(made) <= 4, unused
    monkeypatch.setattr(AvroFileHeader, "get_schema", pyiceberg_fixes._get_schema_once)
    monkeypatch.setattr(pyiceberg.avro.file, "resolve_reader", resolve)
    monkeypatch.setattr(pyiceberg.avro.file, "construct_reader", construct_reader)
    assert read() == found


def test_manifests_are_as_if_unshared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = new_lake(tmp_path)
    one.serve([(FIRST, 0, 0), (FIRST, 0, 1)], {0: 2})
    one.ledger.record([decide(FIRST, "sealed", 0, None, datetime.now(UTC))])
    # One with partitions and one without.
    tables = [one.table(), one.lake.load(one.stream.hours_table)]
    assert [len(table.spec().fields) for table in tables] == [2, 0]
    found = [table.snapshot_by_name("main") for table in tables]
    parents = [snapshot for snapshot in found if snapshot is not None]
    # The bytes between blocks, else at random.
    monkeypatch.setattr("pyiceberg.avro.file.os.urandom", bytes)

    def write() -> list[bytes]:
        written = list[bytes]()
        for table, parent in zip(tables, parents, strict=True):
            manifests = parent.manifests(table.io)
            entries = [e for m in manifests for e in m.fetch_manifest_entry(table.io)]
            assert entries
            for _ in range(2):
                writer = ManifestWriter(table, 1)
                monkeypatch.setattr(writer, "_commit", "commit")
                monkeypatch.setattr(writer, "_snapshot_id", 7)
                manifest = writer.write_manifest(table.metadata.default_spec_id, entries)
                writer.write_snapshot(parent, [manifest], Summary(Operation.APPEND))
                written += [Path(urlparse(path).path).read_bytes() for path in writer.written]
        return written

    made = []
    resolve = pyiceberg_fixes.resolve_writer

    def counted(*of: Any, **named: Any) -> Any:
        made.append(of)
        return resolve(*of, **named)

    monkeypatch.setattr("pyiceberg.avro.file.resolve_writer", pyiceberg_fixes._once(counted))
    shared = write()
    assert len(shared) == 8
    # Of manifests with a partition, of those without, and of manifest lists.
    why = "expected pyiceberg.avro.file to use our writers: change pyiceberg_fixes.py"
    assert len(made) == 3, why
    for owner, name in (
        (pyiceberg.manifest, "data_file_with_partition"),
        (pyiceberg.manifest, "manifest_entry_schema_with_data_file"),
        (pyiceberg.avro.file, "construct_writer"),
        (pyiceberg.avro.file, "resolve_writer"),
    ):
        monkeypatch.setattr(owner, name, getattr(pyiceberg_fixes, name))
    monkeypatch.setattr(AvroSchemaConversion, "iceberg_to_avro", pyiceberg_fixes._convert)
    assert write() == shared


def test_a_manifests_entries_are_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = new_lake(tmp_path)
    table = one.table()
    files = named_files(one, FIRST, 100)

    def written() -> tuple[int, list[ManifestEntry]]:
        writer = ManifestWriter(table, 1)
        monkeypatch.setattr(writer, "_snapshot_id", 7)
        manifest = writer.write_manifest(table.metadata.default_spec_id, (), files)
        return manifest.manifest_length, manifest.fetch_manifest_entry(table.io)

    length, entries = written()
    monkeypatch.setattr(AvroOutputFile, "write_block", pyiceberg_fixes._write_block)
    length_before, entries_before = written()
    assert entries == entries_before and len(entries) == 100
    assert 3 * length < length_before, "PyIceberg writes blocks by itself: remove write_one_block"


@pytest.mark.parametrize("is_list", [True, False], ids=["list", "manifest"])
@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda whole: b"", "a file that begins with b''"),
        (lambda whole: b"<html>" + whole, "a file that begins with b'<html>Ob'"),
        (lambda whole: whole[:-10], "a file that was cut short"),
        (lambda whole: whole.replace(b"deflate", b"deflatx"), "ValueError: Unsupported codec: d"),
    ],
    ids=["empty", "another", "cut short", "of another codec"],
)
def test_a_damaged_manifest_is_named(
    tmp_path: Path, is_list: bool, damage: Callable[[bytes], bytes], found: str
) -> None:
    one = new_lake(tmp_path)
    one.serve([(FIRST, 0, o) for o in range(9)], {0: 9})
    table = one.table()
    snapshot = head(table, "main")
    [manifest, *_] = snapshot.manifests(table.io)
    path = snapshot.manifest_list if is_list else manifest.manifest_path
    file = Path(urlparse(path).path)
    file.write_bytes(damage(file.read_bytes()))
    expected = f"{path}: expected a whole manifest, or list of them, found {found}"
    with pytest.raises(FileGone, match=re.escape(expected)) as raised:
        find_lost_files(table)
    assert raised.value.exit_code == 2
