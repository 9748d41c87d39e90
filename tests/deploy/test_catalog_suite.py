"""The demands of the protocol on any catalog: commits of several branches with requirements, staged
snapshots, tags, expiry, large properties, lists over several pages, files beside the tables.

Real servers: an SQLite file, moto's Glue, the server of Iceberg's REST compatibility kit, and
SeaweedFS, whose table buckets have the shape of Amazon S3 Tables.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from glue import running_glue
from lakes import FIRST, StreamLake, new_lake
from pyiceberg.table import Table, Transaction
from rest_catalog import running_rest_catalog
from seaweedfs import running_seaweedfs
from vending import Vending, running_vending

from anabranch.common.errors import ConfigurationError
from anabranch.config import S3
from anabranch.dev.services import ACCESS_KEY, SECRET_KEY
from anabranch.dev.services.processes import HOST
from anabranch.iceberg import admin
from anabranch.iceberg.commits import Outcome
from anabranch.iceberg.files import delete_files, list_table, own_files
from anabranch.iceberg.snapshots import heads

KEYS = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY}


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of the local servers, in AWS's chain."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


@pytest.fixture(params=["SQLite", "Glue", "REST", "SeaweedFS"])
def lake(request: pytest.FixtureRequest, tmp_path: Path, keys: None) -> Iterator[StreamLake]:
    """A stream's tables in a catalog."""
    with ExitStack() as running:
        if request.param == "SQLite":
            yield new_lake(tmp_path, uri=f"sqlite:///{tmp_path}/own.db")
        elif request.param == "Glue":
            glue = running.enter_context(running_glue())
            yield new_lake(tmp_path, type="glue", properties={"glue.endpoint": glue.url})
        elif request.param == "REST":
            rest = running.enter_context(running_rest_catalog(tmp_path, f"file://{tmp_path}"))
            pages = {"rest-page-size": "5"}
            yield new_lake(tmp_path, type="rest", uri=rest.url, properties=pages)
        else:
            server = running.enter_context(running_seaweedfs(tmp_path))
            s3 = S3.model_validate({"endpoint": server.s3} | KEYS)
            yield new_lake(tmp_path, s3=s3, **server.settings)


def test_a_catalog_has_what_the_protocol_needs(lake: StreamLake) -> None:
    # Step 1: the speed branch and `main` move in one commit; a stale publisher changes nothing.
    staged = [lake.stage([(FIRST, 0, offset)]) for offset in range(7)]
    old = lake.state()
    assert set(heads(old.table)) >= {"main", "speed", "batch"}
    assert lake.publish(lake.speed(staged[0], {0: 1}, old), old) is Outcome.LANDED
    now = heads(lake.table())
    assert {name for name in now if now[name] != old.heads.get(name)} >= {"main", "speed"}
    assert lake.publish(lake.speed(staged[1], {0: 2}, old), old, lake.again()) is Outcome.REFUSED
    # Step 2: a required head that the commit does not write.
    state = lake.state()
    lake.move("batch")
    assert lake.publish(lake.speed(staged[1], {0: 2}, state), state) is Outcome.REFUSED
    # Step 3: of six publishers at once, one lands.
    state, outcomes = lake.state(), list[Outcome]()

    def publish(number: int) -> None:
        change = lake.speed(staged[number], {0: number + 1}, state)
        outcomes.append(lake.publish(change, state, lake.again()))

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert outcomes.count(Outcome.LANDED) == 1 and len(outcomes) == 6
    assert len(lake.rows("main")) == 2
    # Step 4: a snapshot without a branch moves none, and expires; `main` has all of its rows.
    before = heads(lake.table())
    staged_one = lake.stage([(FIRST, 0, 9)])
    assert heads(lake.table()) == before
    lake.lake.discard(lake.name, staged_one)
    assert lake.table().metadata.snapshot_by_id(staged_one.snapshot_id) is None
    # Step 5: properties, also large ones.
    large = {"anabranch.large": "x" * 300_000, "anabranch.small": "1"}

    def write(_: Table, tx: Transaction) -> None:
        tx.set_properties(large)

    admin.change_table(lake.lake, lake.name, "properties", write)
    assert large.items() <= lake.table().properties.items()

    def remove(_: Table, tx: Transaction) -> None:
        tx.remove_properties(*large)

    admin.change_table(lake.lake, lake.name, "properties", remove)
    assert not large.keys() & lake.table().properties.keys()
    # Step 6: lists of tables over several pages.
    schema = lake.table().schema()
    for number in range(12):
        admin.create(lake.lake, f"games.page{number}", schema, (), admin.TABLE_PROPERTIES)
    assert {f"games.page{number}" for number in range(12)} <= lake.lake.table_names("games")
    assert len([*lake.lake.every_table()]) >= 15
    # Step 7: files beside the tables are found and deleted, those of the table stay.
    table = lake.table()
    orphan = f"{table.location()}/metadata/orphan.avro"
    with table.io.new_output(orphan).create() as stream:
        stream.write(b"abc")
    listed = {file.path for file in list_table(own_files(lake.lake, table))}
    assert any(path.endswith("/orphan.avro") for path in listed)
    delete_files(table.io, [orphan])
    assert not table.io.new_input(orphan).exists()
    assert len(lake.rows("main")) == 2


@pytest.fixture
def vending(tmp_path: Path, keys: None) -> Iterator[Vending]:
    with running_vending(tmp_path, 900, 900) as vending:
        yield vending


def test_a_catalog_that_ignores_branches_is_refused_first(vending: Vending, tmp_path: Path) -> None:
    vending.drops_refs = True
    s3 = S3(endpoint=f"http://{HOST}:{vending.s3.port}")
    with pytest.raises(ConfigurationError, match="it ignores branches, as Nessie's does"):
        new_lake(tmp_path, s3=s3, **vending.catalog)
    vending.drops_refs = False
    # The table without rows that was left is no obstacle to a catalog that has branches.
    lake = new_lake(tmp_path, s3=s3, **vending.catalog)
    assert set(heads(lake.table())) >= {"main", "speed", "batch"}


def test_a_catalog_that_may_only_be_read_is_read(vending: Vending, tmp_path: Path) -> None:
    s3 = S3(endpoint=f"http://{HOST}:{vending.s3.port}")
    lake = new_lake(tmp_path, s3=s3, **vending.catalog)
    staged = lake.stage([(FIRST, 0, 0)])
    assert lake.publish(lake.speed(staged, {0: 1})) is Outcome.LANDED
    vending.read_only = True
    assert lake.rows("main") == [(FIRST, 0, 0)]
    with pytest.raises(ConfigurationError, match=r"catalog\.properties: token or credential"):
        admin.create(lake.lake, "games.other", lake.table().schema(), (), {})
