"""Changes of a table's metadata copy none of its parts, and leave the metadata before them as it was."""

from __future__ import annotations

from pathlib import Path

from lakes import FIRST, new_lake
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
