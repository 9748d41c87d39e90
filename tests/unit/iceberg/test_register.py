"""A catalog without its tables, a bucket without what it names: noticed, registered again."""

import shutil
import sqlite3
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import pytest
from brokers import Broker
from lakes import FIRST, StreamLake, new_environment, new_lake
from pyiceberg.exceptions import TableAlreadyExistsError
from pyiceberg.table.update import SetLocationUpdate

from anabranch.common.errors import ConfigurationError, MetadataGone
from anabranch.iceberg import admin
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.register import Candidate, newest_first
from anabranch.iceberg.snapshots import has_landed
from anabranch.iceberg.table_schemas import rows_schema
from anabranch.protocol import apply as tables
from anabranch.protocol import ledger
from anabranch.protocol.publish import Publish


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """Three publishes of one row each."""
    made = new_lake(tmp_path)
    for offset in range(3):
        publish_one(made, offset)
    return made


def publish_one(lake: StreamLake, offset: int) -> None:
    lake.serve([(FIRST, 0, offset)], {0: offset + 1})


def rows(count: int) -> list[tuple[str, int, int]]:
    return [(FIRST, 0, offset) for offset in range(count)]


def lose_catalog(lake: StreamLake) -> StreamLake:
    (lake.folder / "catalog.db").unlink()
    return replace(lake, lake=lake.again())


def apply(lake: StreamLake, register: bool = False) -> list[str]:
    environment = new_environment(lake.folder)
    return tables.apply(environment, lake.stream, lake.lake, Broker().adapter, register)


def warehouse(lake: StreamLake) -> Path:
    return lake.folder / "warehouse"


def test_a_lost_catalog_is_not_recreated(lake: StreamLake) -> None:
    newest = lake.table().metadata_location
    lost = lose_catalog(lake)
    with pytest.raises(ConfigurationError) as error:
        apply(lost)
    assert error.value.exit_code == 2
    assert f"found its files up to {newest}" in str(error.value)
    assert f"below {lake.folder.as_uri()}/warehouse/games/events" in str(error.value)
    assert "`anabranch apply events --register`" in str(error.value)
    assert not lost.lake.exists(lost.name)


def test_a_lost_catalog_is_registered_unchanged_and_continues(lake: StreamLake) -> None:
    names = (lake.stream.table, lake.stream.dead_letters_table, lake.stream.hours_table)
    before = {name: lake.lake.load(name) for name in names}
    lost = lose_catalog(lake)
    found = [f"registered table {name} by {t.metadata_location}" for name, t in before.items()]
    assert apply(lost, register=True) == found
    for name, table in before.items():
        assert lost.lake.load(name).metadata == table.metadata
    publish_one(lost, 3)
    assert lost.rows("main") == lost.rows("speed") == rows(4)
    assert apply(lost) == apply(lost, register=True) == []


def test_dead_letters_that_the_catalog_lost_are_not_recreated_either(lake: StreamLake) -> None:
    admin.forget(lake.lake, lake.stream.dead_letters_table)
    found = r"table games\.events_dead_letters: expected nothing below"
    with pytest.raises(ConfigurationError, match=found):
        apply(lake)
    registered = "registered table games.events_dead_letters by "
    assert apply(lake, register=True)[0].startswith(registered)


def test_a_dropped_ledger_is_registered_with_all_of_its_rows(lake: StreamLake) -> None:
    row = ledger.decision(
        FIRST, "refused", 0, None, datetime.now(UTC), reason="only the ledger knows"
    )
    lake.ledger.record([row])
    admin.forget(lake.lake, lake.stream.hours_table)
    assert len(apply(lake, register=True)) == 1
    assert [r.reason for r in lake.ledger.history()] == ["only the ledger knows"]


def test_an_older_bucket_is_registered_by_its_newest_file(lake: StreamLake, tmp_path: Path) -> None:
    shutil.copytree(warehouse(lake), tmp_path / "then")
    for offset in (3, 4):
        publish_one(lake, offset)
    named = lake.table().metadata_location
    shutil.rmtree(warehouse(lake))
    (tmp_path / "then").rename(warehouse(lake))
    for ask in (lake.table, lambda: apply(lake), lambda: lake.lake.exists(lake.name)):
        with pytest.raises(MetadataGone) as error:
            ask()
        assert error.value.exit_code == 2
        assert Path(named).name in str(error.value)
        assert "`anabranch apply STREAM --register`" in str(error.value)
    assert any(f"registered table {lake.name}" in change for change in apply(lake, register=True))
    assert lake.rows("main") == rows(3)
    assert lake.state().position.offsets == {0: 3}
    publish_one(lake, 3)
    assert lake.rows("main") == rows(4)


def test_a_damaged_metadata_file_is_passed_over(lake: StreamLake) -> None:
    before = lake.rows("main")
    publish_one(lake, 3)
    Path(lake.table().metadata_location.removeprefix("file://")).write_bytes(b'{"format-vers')
    with pytest.raises(MetadataGone):
        lake.table()
    assert any(f"registered table {lake.name}" in change for change in apply(lake, register=True))
    assert lake.rows("main") == before
    publish_one(lake, 3)


def test_a_commit_that_never_reached_the_catalog_is_as_good_as_landed(lake: StreamLake) -> None:
    """Its metadata file is whole: the rows with the position, on the heads that were the newest."""
    publish = unlanded(lake, 3)
    assert lake.rows("main") == rows(3)
    lost = lose_catalog(lake)
    apply(lost, register=True)
    assert lost.rows("main") == rows(4)
    assert lost.state().position.offsets == {0: 4}
    # The next publisher finds it published.
    assert has_landed(lost.table(), publish.id)


def test_a_commit_that_never_landed_gives_way_to_one_that_did(lake: StreamLake) -> None:
    unlanded(lake, 3)
    publish_one(lake, 3)
    newest = lake.table().metadata
    lost = lose_catalog(lake)
    apply(lost, register=True)
    assert lost.table().metadata == newest
    assert lost.rows("main") == rows(4)


class Killed(Exception):
    """The process ends here."""


def metadata_files(lake: StreamLake) -> list[Path]:
    return sorted(warehouse(lake).glob("games/events/metadata/*.metadata.json"))


def unlanded(lake: StreamLake, offset: int) -> Publish:
    """A publish wrote its metadata file, found the catalog locked, and was killed at its look."""
    uri = f"sqlite:///{lake.folder}/catalog.db?timeout=0.1"
    impatient = Lake(new_environment(lake.folder, uri=uri))
    publish = lake.speed(lake.stage([(FIRST, 0, offset)]), {0: offset + 1})
    state = lake.state()
    before = len(metadata_files(lake))
    holder = sqlite3.connect(lake.folder / "catalog.db", isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    try:
        with mock.patch.object(impatient, "_settle", side_effect=Killed), pytest.raises(Killed):
            lake.publish(publish, state, impatient)
    finally:
        holder.close()
    after = len(metadata_files(lake))
    assert after == before + 1, "the hazard: a metadata file that the catalog does not know"
    return publish


def test_a_metadata_file_with_missing_files_is_skipped_and_reported(lake: StreamLake) -> None:
    unlanded(lake, 3)
    newest = metadata_files(lake)[-1]
    head = admin.read_metadata(lake.table().io, str(newest)).current_snapshot()
    assert head is not None
    Path(head.manifest_list.removeprefix("file://")).unlink()
    (newest.parent / "00099-cut-off.metadata.json").write_text('{"format-version": 2, "locat')
    known = lake.table().metadata
    lost = lose_catalog(lake)
    lines = apply(lost, register=True)
    skipped = [line for line in lines if "skipped" in line]
    assert any(newest.name in line and head.manifest_list in line for line in skipped)
    assert lost.table().metadata == known


@pytest.mark.parametrize("register", [False, True])
@pytest.mark.parametrize("of", ["table", "dead_letters_table", "hours_table"])
def test_a_renamed_table_is_not_registered(lake: StreamLake, of: str, register: bool) -> None:
    """The hazard: one set of files has two names, and maintenance of one deletes the other's."""
    name = getattr(lake.stream, of)
    lake.lake.catalog.create_namespace("elsewhere")
    lake.lake.catalog.rename_table(name, "elsewhere.former")
    again = replace(lake, lake=lake.again())
    statement = f"ALTER TABLE lake.elsewhere.former RENAME TO lake.{name}"
    with pytest.raises(ConfigurationError, match=statement):
        apply(again, register)
    assert not again.lake.exists(name)
    again.lake.catalog.rename_table("elsewhere.former", name)
    apply(again, register)
    assert again.rows("main") == rows(3)


def test_a_second_entry_that_was_moved_elsewhere_is_found_by_its_uuid(lake: StreamLake) -> None:
    file = lake.table().metadata_location
    admin.forget(lake.lake, lake.name)
    admin.register(lake.lake, "games.second", file)
    table = lake.lake.load("games.second")
    moved = SetLocationUpdate(location=f"{table.location()}-moved")
    lake.lake.catalog.commit_table(table, (), (moved,))
    found = r"found that the catalog has them as table games\.second"
    with pytest.raises(ConfigurationError, match=found):
        apply(lake, register=True)


@pytest.mark.parametrize("is_there", [True, False])
def test_files_elsewhere_are_looked_for_there(lake: StreamLake, is_there: bool) -> None:
    folder = lake.folder / "elsewhere"
    with lake.table().transaction() as tx:
        tx.set_properties({"write.data.path": f"file://{folder}"})
    publish_one(lake, 3)
    [file] = folder.rglob("*.parquet")
    if not is_there:
        file.unlink()
    lost = lose_catalog(lake)
    lines = apply(lost, register=True)
    assert any(f"expected file://{file}, found none" in line for line in lines) != is_there
    assert lost.rows("main") == rows(4 if is_there else 3)


def test_a_table_without_rows_is_not_rolled_back_to_an_empty_snapshot(lake: StreamLake) -> None:
    for data in warehouse(lake).glob("games/events/data/**/*.parquet"):
        data.unlink()
    lost = lose_catalog(lake)
    with pytest.raises(ConfigurationError, match=r"with all its files, found none .*skipped"):
        apply(lost, register=True)
    assert not lost.lake.exists(lost.name)


def test_a_warehouse_that_was_only_copied_elsewhere_is_not_registered(lake: StreamLake) -> None:
    lost = lose_catalog(lake)
    elsewhere = lake.folder / "elsewhere"
    elsewhere.mkdir()
    shutil.move(warehouse(lake), elsewhere / "warehouse")
    moved = replace(lost, folder=elsewhere, lake=Lake(new_environment(elsewhere)))
    with pytest.raises(ConfigurationError, match="rewrite_table_path"):
        apply(moved, register=True)


def candidate(number: int, updated: int, *past: int) -> Candidate:
    path, *others = (f"s3://b/t/metadata/{n:05}-x.metadata.json" for n in (number, *past))
    return Candidate(path, updated, frozenset(p.removeprefix("s3://") for p in others))


def test_a_file_precedes_its_previous_ones_and_the_chain_that_was_written_last_is_first() -> None:
    ordered = newest_first([candidate(1, 900), candidate(2, 950, 1), candidate(3, 400, 1, 2)])
    assert [c.number for c in ordered] == [3, 2, 1]
    past = ((5, 500, 1, 2, 3), (4, 700, 2, 30), (2, 200, 1), (30, 600, 2))
    ordered = newest_first([candidate(*of) for of in past])
    assert [(c.number, c.updated_ms) for c in ordered] == [(4, 700), (30, 600), (5, 500), (2, 200)]
    broken = replace(candidate(9, 0), broken="cut off")
    assert newest_first([broken, candidate(1, 10)])[-1] is broken


def test_a_file_of_a_failed_creation_is_not_the_table(lake: StreamLake) -> None:
    before = lake.table().metadata
    files = set(warehouse(lake).rglob("*.metadata.json"))
    assert apply(lake) == []
    assert set(warehouse(lake).rglob("*.metadata.json")) == files
    # As two who apply at once do.
    with pytest.raises(TableAlreadyExistsError):
        lake.lake.catalog.create_table(lake.name, rows_schema(lake.stream))
    assert len(set(warehouse(lake).rglob("*.metadata.json")) - files) == 1
    lost = lose_catalog(lake)
    apply(lost, register=True)
    assert lost.table().metadata == before
