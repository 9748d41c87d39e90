"""A new catalog is opened by several clients at once, as by `anabranch doctor` on day one."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from lakes import new_environment, new_lake
from pyiceberg.serializers import FromInputFile

from anabranch.common.errors import MetadataGone
from anabranch.iceberg import admin
from anabranch.iceberg import lake as lakes_module
from anabranch.iceberg.admin import TABLE_PROPERTIES
from anabranch.iceberg.lake import Lake

AT_ONCE = 8


def open_at_once(lakes: list[Lake]) -> list[object]:
    barrier = Barrier(len(lakes))

    def opened(lake: Lake) -> object:
        barrier.wait(60)
        return lake.catalog

    with ThreadPoolExecutor(len(lakes)) as pool:
        return list(pool.map(opened, lakes))


def test_clients_that_create_the_tables_of_one_catalog_at_once_all_open_it(tmp_path: Path) -> None:
    """The hazard: "table iceberg_tables already exists"."""
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        open_at_once([Lake(new_environment(folder)) for _ in range(AT_ONCE)])


def test_clients_create_one_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: two streams applied for the first time at once; a UNIQUE constraint failed."""
    environment = new_environment(tmp_path)
    one, other = Lake(environment), Lake(environment)
    looked = one.catalog.namespace_exists

    def overtaken(namespace: str) -> bool:
        """Between the look and the insert, the other client creates it."""
        found = looked(namespace)
        monkeypatch.setattr(one.catalog, "namespace_exists", looked)
        admin._ensure_namespace(other, f"{namespace}.events")
        return found

    monkeypatch.setattr(one.catalog, "namespace_exists", overtaken)
    admin._ensure_namespace(one, "games.events")
    assert looked("games")


def test_streams_of_a_client_open_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, load = list[str](), lakes_module.load_catalog

    def counted(name: str, **properties: Any) -> Any:
        opened.append(name)
        return load(name, **properties)

    monkeypatch.setattr(lakes_module, "load_catalog", counted)
    shared = Lake(new_environment(tmp_path))
    found = open_at_once([Lake(shared.environment, shared=shared) for _ in range(AT_ONCE)])
    assert len(opened) == 1
    assert len({id(one) for one in found}) == 1


# A table is loaded while its metadata file goes: others publish, and the log drops the oldest.

KEPT = int(TABLE_PROPERTIES["write.metadata.previous-versions-max"])


def test_a_metadata_file_that_publishes_of_others_deleted_meanwhile_is_no_lost_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, real, read = new_lake(tmp_path), FromInputFile.table_metadata, list[Path]()

    def paused(file: Any, *given: Any) -> Any:
        """Between the catalog's answer and the read of the file that it names, others publish."""
        read.append(Path(file.location.removeprefix("file://")))
        if len(read) == 1:
            for _ in range(KEPT + 2):
                lake.move("speed")
            assert not read[0].exists(), "the hazard did not happen"
        return real(file, *given)

    monkeypatch.setattr(FromInputFile, "table_metadata", paused)
    assert lake.table().metadata_location.removeprefix("file://") == str(read[-1])


@pytest.mark.parametrize("content", [None, b"", b'{"format-version": 2', b"{}"])
def test_a_missing_file_is_one_that_is_named_twice(tmp_path: Path, content: bytes | None) -> None:
    """And a damaged one as a missing one."""
    lake = new_lake(tmp_path)
    file = Path(lake.table().metadata_location.removeprefix("file://"))
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    with pytest.raises(MetadataGone, match="--register"):
        lake.table()


def test_a_damaged_table_is_none_that_is_gone(tmp_path: Path) -> None:
    """The hazard: a live table, perhaps of a later format, whose files the maintenance of one that
    shares its folder would delete."""
    lake = new_lake(tmp_path)
    file = Path(lake.table().metadata_location.removeprefix("file://"))
    found = {table.name() for table in lake.lake.every_table()}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format-version": 9}))
    with pytest.raises(MetadataGone, match="TableMetadataWrapper"):
        list(lake.lake.every_table())
    file.unlink()
    assert found - {table.name() for table in lake.lake.every_table()} == {("games", "events")}
