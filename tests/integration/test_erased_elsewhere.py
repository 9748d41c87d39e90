"""Files that Iceberg's properties place elsewhere: maintenance and erasure find them."""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from budget import full
from commands import call
from world import ERASURE, Make, World, past_hour, spread

from anabranch.common.errors import ConfigurationError
from anabranch.iceberg.s3 import open_store
from anabranch.lifecycle.erasure.status import read_statuses
from anabranch.lifecycle.maintenance import maintain

ELSEWHERE = {"write.data.path": "s3://tests/elsewhere/FOLDER"}
HASH = re.compile("/[01]{4}/[01]{4}/[01]{4}/")
OBJECTS = {"write.object-storage.enabled": "true"}


def set_properties(one: World, **properties: str) -> None:
    with one.lake.load(one.job.stream.table).transaction() as tx:
        tx.set_properties(properties)


def keys_with(one: World, player: str) -> list[str]:
    """The keys of all Parquet files of the stream that have a player."""
    store, found = open_store(one.job.environment.s3), []
    for key, _, _ in store.list_objects("tests", ""):
        if one.name in key and key.endswith(".parquet"):
            rows = pq.read_table(pa.BufferReader(store.get("tests", key)))
            if "player" in rows.column_names and player in rows["player"].to_pylist():
                found.append(key)
    return found


@pytest.mark.parametrize(
    "properties",
    [full(ELSEWHERE), full(OBJECTS), ELSEWHERE | OBJECTS],
    ids=("data", "objects", "data, objects"),
)
def test_no_file_of_a_value_stays(world: Make, tmp_path: Path, properties: dict[str, str]) -> None:
    one = world()
    one.set_environment(erasure=ERASURE)
    one.create()
    placed = {key: value.replace("FOLDER", one.name) for key, value in properties.items()}
    set_properties(one, **placed)
    for ago in (3, 2):
        one.send(spread(past_hour(ago), 20, past_hour(ago)))
    one.speed()
    assert {row.decision for row in one.batch()} == {"accepted"}
    keys = keys_with(one, "p3")
    assert keys and (OBJECTS.keys() <= placed.keys()) == all(map(HASH.search, keys))
    values = tmp_path / "values.txt"
    values.write_text("p3\n")
    order = ("--by", "player", "--values", str(values), "--until", "2 days", "--why", "case 4711")
    assert "done on every branch" in call(one, "erase", one.name, *order)
    others = set(one.contents())
    # The hazard: only former snapshots have them.
    assert keys_with(one, "p3")
    for days in (3, 4):
        maintain(one.job, datetime.now(UTC) + timedelta(days=days))
    assert keys_with(one, "p3") == []
    [status] = read_statuses(one.job, datetime.now(UTC) + timedelta(days=4))
    assert status.is_certificate
    assert set(one.contents()) == others and keys_with(one, "p4")


def test_no_file_of_another_format_is_published(world: Make) -> None:
    one = world(create=2)
    set_properties(one, **{"write.format.default": "orc"})
    one.send(spread(past_hour(2), 20, past_hour(2)))
    before = one.state.heads
    with pytest.raises(ConfigurationError, match=r"found property write\.format\.default=orc"):
        one.speed()
    assert one.state.heads == before
    set_properties(one, **{"write.format.default": "parquet"})
    one.speed()
    assert len(one.contents()) == 20
