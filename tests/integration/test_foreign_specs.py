"""Another program changes the partition spec of a stream's tables: both layers go on."""

from datetime import timedelta

import pytest
from world import Make, event, past_hour, spread

from anabranch.offsets.hours import start_of


@pytest.mark.parametrize(
    "change", ["ADD PARTITION FIELD bucket(4, player)", "DROP PARTITION FIELD ingest_hour"]
)
def test_another_default_spec_stops_no_layer(world: Make, change: str) -> None:
    one, hours = world(files={"sort": ["event_id"]}, partitions=1), [past_hour(2), past_hour(1)]
    one.send([*spread(hours[0], 20, "a", partitions=1), (0, start_of(hours[0]), b"no JSON")])
    at = start_of(hours[1])
    dates = [at - timedelta(days=i % 2) for i in range(20)]
    good = [(0, at + timedelta(seconds=i), event(f"b{i}", date)) for i, date in enumerate(dates)]
    one.serve([*good, (0, at, b"no JSON"), (0, at, b"[]")])
    assert [r.decision for r in one.batch(hours[0])] == ["accepted"]
    catalog = one.job.environment.catalog.name
    one.spark.sql(f"ALTER TABLE {catalog}.{one.job.stream.table} {change}")
    letters = f"{catalog}.{one.job.stream.dead_letters_table}"
    one.spark.sql(f"ALTER TABLE {letters} ADD PARTITION FIELD bucket(4, error_code)")

    one.send_now(5, "now", partitions=1)
    one.speed()
    [first] = one.batch(hours[0], restate=True)
    [second] = one.batch(hours[1])
    assert [first.decision, second.decision] == ["accepted", "accepted"], (first, second)
    places = {(r.partition, r.offset) for r in one.sent if b"event_id" in (r.value or b"")}
    assert sorted(one.offsets()) == sorted(places) and len(places) == 45
    assert len(one.dead()) == 3
    table = one.lake.load(one.job.stream.table)
    assert {file.file.spec_id for file in table.scan().plan_files()} == {0}
