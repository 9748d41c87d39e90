"""A table with a feature that our writers do not support is refused, with the way back."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlparse

import pytest
from lakes import FIRST, StreamLake, new_lake
from pyiceberg.manifest import FileFormat
from pyiceberg.table.update import RemovePropertiesUpdate, SetPropertiesUpdate

from anabranch.common.errors import ConfigurationError, Terminal
from anabranch.iceberg import admin
from anabranch.iceberg.commits import Change
from anabranch.iceberg.rewriting import opened
from anabranch.operations.doctor import tables as doctor
from anabranch.operations.finding import Issue, Severity
from anabranch.protocol import apply
from anabranch.protocol.apply import require_columns
from anabranch.protocol.publish import Publish, new_id


@pytest.fixture
def one(tmp_path: Path) -> StreamLake:
    made = new_lake(tmp_path)
    made.serve([(FIRST, 0, 1)], {0: 2})
    return made


def change(one: StreamLake, name: str, update: Any) -> None:
    table = one.lake.catalog.load_table(name)
    one.lake.catalog.commit_table(table, (), (update,))


def upgrade(one: StreamLake) -> None:
    """Set `format-version` 3 as Spark does; PyIceberg itself cannot."""
    table = one.table()
    former = Path(urlparse(table.metadata_location).path)
    metadata = json.loads(former.read_text())
    metadata |= {"format-version": 3, "next-row-id": 0}
    entry = {"metadata-file": table.metadata_location, "timestamp-ms": metadata["last-updated-ms"]}
    metadata["metadata-log"] = [*metadata.get("metadata-log", []), entry]
    file = former.with_name("00099-upgraded.metadata.json")
    file.write_text(json.dumps(metadata))
    admin.forget(one.lake, one.name)
    admin.register(one.lake, one.name, f"file://{file}")


def test_a_table_of_version_3_is_refused_and_comes_back_by_its_last_file(one: StreamLake) -> None:
    before = one.table().metadata_location
    upgrade(one)
    with pytest.raises(ConfigurationError, match="found format version 3, which another") as error:
        require_columns(one.table(), one.stream)
    with pytest.raises(ConfigurationError, match="found format version 3"):
        one.lake.stage(one.name, "attempt", ())
    with pytest.raises(ConfigurationError, match="found format version 3"):
        one.publish(Publish(new_id(), (Change("main"),), one.state().timeline))
    kafka: Any = SimpleNamespace(cluster_id=lambda: "k", describe=lambda *_: None)
    with pytest.raises(ConfigurationError, match="found format version 3"):
        apply.apply(one.environment, one.stream, one.lake, kafka)
    facts = doctor.read(one.environment, one.stream, one.lake)
    [finding] = [f for f in doctor.findings("lake", one.stream, facts) if f.check is Issue.FORMAT]
    assert (finding.subject, finding.severity) == (one.name, Severity.ERROR)

    # As the message says.
    [file] = re.findall(r"register_table\('games.events', '([^']+)'\)", str(error.value))
    assert file == before
    admin.forget(one.lake, one.name)
    admin.register(one.lake, one.name, file)
    require_columns(one.table(), one.stream)
    assert one.rows("main") == [(FIRST, 0, 1)]
    one.serve([(FIRST, 0, 3)], {0: 4})


def test_rows_that_were_written_since_need_a_restore(one: StreamLake) -> None:
    upgrade(one)
    refs = one.table().metadata.refs
    refs["main"] = refs["main"].model_copy(update={"snapshot_id": 4711})
    table = one.table()
    table.metadata.refs["main"] = refs["main"]
    with pytest.raises(ConfigurationError, match="restore catalog and bucket"):
        require_columns(table, one.stream)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("encryption.key-id", "k"),
        ("write.format.default", "orc"),
        ("write.format.default", "AVRO"),
        ("write.location-provider.impl", "org.example.Placed"),
    ],
)
def test_an_unknown_property_is_refused_everywhere(one: StreamLake, key: str, value: str) -> None:
    name = one.stream.dead_letters_table
    change(one, name, SetPropertiesUpdate(updates={key: value}))
    unset = rf"UNSET TBLPROPERTIES \('{key}'\) and run it again"
    with pytest.raises(ConfigurationError, match=f"found property {key}={value}, .*{unset}"):
        one.lake.stage(name, "attempt", ())
    facts = doctor.read(one.environment, one.stream, one.lake)
    assert facts.features == ((name, f"property {key}={value}"),)
    change(one, name, SetPropertiesUpdate(updates={"write.format.default": "PARQUET"}))
    change(one, name, RemovePropertiesUpdate(removals=[] if "format" in key else [key]))
    assert not doctor.read(one.environment, one.stream, one.lake).features


def test_a_data_file_of_another_format_is_named(one: StreamLake) -> None:
    """One that was written before the property was removed."""
    [file] = one.stage([(FIRST, 0, 5)]).files
    file._data[2] = FileFormat.ORC
    with pytest.raises(Terminal, match=r"expected Parquet, found ORC.*write\.format\.default"):
        opened(one.table(), file)
