"""A stream with partition fields and a location, through its whole life: exact."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from budget import full
from commands import run_into
from queries import sources
from world import ERASURE, Make, World, event, past_hour

from anabranch.common.errors import ConfigurationError
from anabranch.common.fail_points import Step
from anabranch.iceberg.manifests import files_by_hour
from anabranch.iceberg.rewriting import opened as opened_file
from anabranch.lifecycle.maintenance import maintain
from anabranch.offsets.hours import start_of
from anabranch.operations.audit import audit
from serving_layer.query import open_query
from serving_layer.query.datasets import opened

SCHEMA = (
    "event_id STRING NOT NULL, player STRING, event_time TIMESTAMP NOT NULL, level INT, region "
    "STRING"
)
REGIONS = ("eu", "us", None, "", "a/b")
FIELDS = ["bucket(4, player)", "truncate(2, player)", "region"]
BY_SPARK = {
    "files": {"sort": ["player"], "bloom": ["event_id"]},
    "event_time": {"column": "event_time"},
}


def send(one: World, hour: str, count: int, prefix: str) -> None:
    records = []
    for i in range(count):
        at = start_of(hour) + timedelta(seconds=i)
        value = event(f"{prefix}-{i}", at, player=f"p{i % 7}", level=i, region=REGIONS[i % 5])
        records.append((i % 2, at, value))
    one.send(records)


@pytest.mark.full
def test_a_speed_job_that_died_between_its_files_and_their_publish(world: Make) -> None:
    one, hour = world(schema=SCHEMA, partition=FIELDS, create=2), past_hour(1)
    send(one, hour, 70, "e")
    run_into(one, Step.SPEED_STAGED.label, "speed", one.name)
    assert one.rows() == []
    one.speed()
    assert one.contents() == one.acknowledged()
    require_own_partitions(one)


def require_own_partitions(one: World) -> None:
    """Require that each file of each branch has only rows of its partition."""
    table = one.state.table
    schema, spec = table.schema(), table.specs()[0]
    for branch in ("speed", "batch", "main"):
        for files in files_by_hour(table, branch).values():
            for file in files.values():
                with opened_file(table, file) as parquet:
                    rows = parquet.read().to_pylist()
                for i, field in enumerate(spec.fields):
                    source = schema.find_field(field.source_id)
                    transform = field.transform.transform(source.field_type)
                    found = {transform(row[source.name]) for row in rows}
                    value: Any = file.partition[i]
                    if field.name == "event_date":
                        value = date(1970, 1, 1) + timedelta(days=value)
                    assert found == {value}, (branch, field.name, file.file_path)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("more", [{}, full(BY_SPARK)], ids=["workers", "spark"])
def test_a_whole_life_is_exact(world: Make, more: dict[str, Any]) -> None:
    one = world(schema=SCHEMA, partition=FIELDS, **more)
    place = f"{one.job.environment.catalog.warehouse}-elsewhere"
    one.configure(location=place)
    one.set_environment(erasure=ERASURE)
    hours = [past_hour(2), past_hour(1)]
    one.create()
    name = one.job.stream.table
    assert one.state.table.location() == f"{place}/{one.name}/events"
    if more:
        one.spark.sql(
            f"ALTER TABLE lake.{name} SET TBLPROPERTIES ('write.parquet.compression-level'='3', "
            "'write.object-storage.enabled'='true')"
        )
    for i, hour in enumerate(hours):
        send(one, hour, 70, f"h{i}")
    late = start_of(hours[1]) + timedelta(minutes=30)
    first = one.sent[0].value
    [repeated, _] = one.send([(0, late, first), (1, late, b"{")])
    one.sent = one.sent[:-2]
    one.speed()
    send(one, past_hour(0), 70, "now")
    one.speed()
    doubled = (repeated.partition, repeated.offset, "h0-0")
    assert one.contents() == one.contents("speed") == sorted([*one.acknowledged(), doubled])
    require_own_partitions(one)
    files = [path for of in files_by_hour(one.state.table, "speed").values() for path in of]
    # The small files of the ended hours were compacted, each with others of its partition.
    assert any("/rolled-" in path for path in files)
    assert all(path.startswith(place) for path in files)

    assert [r.decision for r in one.batch(hours[0])] == ["accepted"]
    assert [r.decision for r in one.batch(hours[1])] == ["accepted"]
    assert one.contents() == one.acknowledged() and len(one.dead()) == 1
    assert [r.decision for r in one.batch(hours[1], restate=True)] == ["accepted"]
    require_own_partitions(one)

    expected = [r for r in one.rows() if r["player"] == "p3" and r["region"] == "eu"]
    condition = "player = 'p3' AND region = 'eu'"
    assert one.spark.table(f"lake.{name}").where(condition).count() == len(expected) > 0
    table = one.state.table
    every = len(list(table.scan().plan_files()))
    scan = table.scan("player = 'p3' and region = 'eu'")
    assert scan.to_arrow().num_rows == len(expected)
    assert len(list(scan.plan_files())) < every / 4
    with open_query(f"SELECT * FROM {name} WHERE {condition}", sources({name: table})) as answer:
        assert answer.rows.read_all().num_rows == len(expected)
        [planned] = opened(answer.files)
    assert planned.files < planned.all_files / 4

    before = one.contents()
    maintain(one.job, datetime.now(UTC) + timedelta(days=4), False)
    assert one.contents() == before
    one.erase("p3")
    kept = sorted((r.partition, r.offset) for r in one.sent if b'"p3"' not in (r.value or b""))
    assert one.offsets() == kept and len(kept) < len(before)
    require_own_partitions(one)
    assert audit(one.job, None, with_kafka=True).disagreements == []

    one.reconfigure(partition=["region"])
    with pytest.raises(ConfigurationError, match="Partition fields are not changed later"):
        one.apply()
