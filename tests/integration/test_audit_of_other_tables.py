"""The audit of tables that Spark writes by itself finds what was taken out and doubled."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import call, shown
from deltalake import write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from world import Make, World, add_catalog, past_hour, spread

TAKEN, DOUBLED, ABORTED = ((0, 35), (0, 36), (1, 40)), ((0, 50), (1, 41)), 3


@pytest.fixture
def one(world: Make) -> World:
    """No tables: 3 hours of 60 records in two partitions, an aborted transaction in one."""
    one = world(partitions=2)
    for ago in (5, 4, 3):
        one.send(spread(past_hour(ago), 60, f"h{ago}"))
        if ago == 4:
            at = spread(past_hour(ago), 1, "x")[0][1]
            aborted = [(0, at, b"aborted-%d" % number) for number in range(ABORTED)]
            one.send_transactions((False, aborted))
    return one


def records(one: World, spark: SparkSession, isolation: str = "read_committed") -> DataFrame:
    """The topic as a streaming job writes it that loses and doubles records."""
    read = spark.readStream.format("kafka").option("subscribe", one.name)
    read = read.option("kafka.bootstrap.servers", one.job.environment.kafka.bootstrap_servers)
    read = read.option("kafka.isolation.level", isolation).option("maxOffsetsPerTrigger", 70)
    rows = read.option("startingOffsets", "earliest").load()

    def is_any(places: tuple[tuple[int, int], ...]) -> Any:
        found = F.lit(False)
        for partition, offset in places:
            found = found | ((F.col("partition") == partition) & (F.col("offset") == offset))
        return found

    times = F.when(is_any(DOUBLED), F.array(F.lit(1), F.lit(2))).otherwise(F.array(F.lit(1)))
    return rows.where(~is_any(TAKEN)).withColumn("copy", F.explode(times)).drop("copy")


def write(rows: DataFrame, kind: str, target: str, checkpoint: Path) -> None:
    query = rows.writeStream.format(kind).trigger(availableNow=True)
    query = query.option("checkpointLocation", str(checkpoint))
    started = query.start(target) if kind == "parquet" else query.toTable(target)
    started.awaitTermination()


def audited(one: World, table: str, expect: int, *options: str) -> Any:
    return shown(one, "audit", "--table", table, "--topic", one.name, *options, expect=expect)


def test_an_audit_finds_losses_and_doubles(one: World, spark: SparkSession, tmp_path: Path) -> None:
    session = spark.newSession()
    add_catalog(session, one.job.environment)
    catalog = one.job.environment.catalog.name
    session.sql(f"CREATE NAMESPACE IF NOT EXISTS {catalog}.{one.name}")
    sink, table, delta = str(tmp_path / "sink"), f"{one.name}.raw", str(tmp_path / "delta")
    write(records(one, session), "parquet", sink, tmp_path / "c1")
    write(records(one, session), "iceberg", f"{catalog}.{table}", tmp_path / "c2")
    batch = session.read.parquet(sink).select("partition", "offset", "timestamp", "value")
    write_deltalake(delta, batch.toArrow(), partition_by=["partition"])
    # A file that no micro-batch has committed is no part of the sink's table.
    batch.coalesce(1).write.parquet(str(tmp_path / "again"))
    [again] = (tmp_path / "again").glob("part-*.parquet")
    again.rename(Path(sink) / again.name)
    for name in (sink, table, delta):
        found = audited(one, name, 1)
        hours = {h["hour"]: h for h in found["hours"]}
        assert list(hours) == [past_hour(5), past_hour(4), past_hour(3)], name
        hour = hours[past_hour(4)]
        assert (hour["offsets"], hour["rows"]) == (64, 60 - len(TAKEN) + len(DOUBLED))
        assert (hour["missing"], hour["twice"], hour["uncommitted"]) == (3, 2, 0)
        assert hour["gaps"] == {"aborted": ABORTED, "control": 1}
        at = hour["partitions"]
        assert (at["0"]["missing_at"], at["1"]["missing_at"]) == ([[35, 37]], [[40, 41]])
        assert (at["0"]["twice_at"], at["1"]["twice_at"]) == ([[50, 51]], [[41, 42]])
        sent = {(r.partition, r.offset): r.value for r in one.sent}
        assert {(r["partition"], r["offset"]): r["value"].encode() for r in found["records"]} == {
            place: sent[place] for place in TAKEN
        }
        for other in (hours[past_hour(5)], hours[past_hour(3)]):
            counts = [other[name] for name in ("offsets", "rows", "missing", "twice")]
            assert counts == [60, 60, 0, 0] and other["gaps"] == {}
        assert found["before"] == found["behind"] == {} and not found["unknown"]
        assert audited(one, name, 0, "--hours", past_hour(3))["exact"]


@pytest.mark.full
def test_aborted_and_foreign_rows_show(one: World, spark: SparkSession, tmp_path: Path) -> None:
    """Spark's reader receives aborted records unless it is configured otherwise."""
    session, sink = spark.newSession(), str(tmp_path / "sink")
    write(records(one, session, "read_uncommitted"), "parquet", sink, tmp_path / "c")
    found = audited(one, sink, 1)
    assert sum(h["uncommitted"] for h in found["hours"]) == ABORTED
    assert sum(h["missing"] for h in found["hours"]) == len(TAKEN)
    text = call(one, "audit", "--table", sink, "--topic", one.name, expect=1)
    assert "partition 0: 2 missing: offsets 35 to 36" in text
    assert f"partition 0: {ABORTED} rows of aborted transactions" in text
    assert f"{one.name}: 3 hours, 184 offsets: 3 records missing, 2 rows too many" in text
    # Kafka deletes records; what the table lacks of them cannot be proven any more.
    one.delete_records({0: 40})
    found = audited(one, sink, 1)
    gaps = [h["gaps"].get("retention", 0) for h in found["hours"]]
    assert [h["missing"] for h in found["hours"]] == [0, 1, 0] and gaps == [0, 2, 0]
    # The topic is recreated, with fewer records than the table has.
    one.delete_topic()
    one.topic()
    one.send(spread(past_hour(3), 20, "new"))
    assert audited(one, sink, 1)["unknown"] == 184 - 1 - len(TAKEN) + len(DOUBLED) - 20


def test_a_table_without_a_row_of_a_partition_is_not_exact(one: World, tmp_path: Path) -> None:
    of_hour = [r for r in one.sent if r.partition == 0 and b"h3" in (r.value or b"")]
    rows = {"partition": [0] * len(of_hour), "offset": [r.offset for r in of_hour]}
    table = tmp_path / "table"
    table.mkdir()
    pq.write_table(pa.table(rows), table / "rows.parquet")
    found = audited(one, str(table), 0)
    assert found["hours"][0]["rows"] == len(of_hour) > 0
    assert (found["exact"], found["without_rows"]) == (False, [1])
    said = call(one, "audit", "--table", str(table), "--topic", one.name)
    assert "partitions without a row, of which nothing is proven: 1" in said
    assert "each record" not in said
    # Whole hours are audited, of all partitions.
    named = audited(one, str(table), 1, "--hours", past_hour(3))
    assert named["hours"][0]["missing"] == 30 and not named["exact"]
    # What Kafka has deleted of an hour before the table's rows is not shown by any offset.
    of_both = [r for r in one.sent if b"h3" in (r.value or b"")]
    begin = of_hour[10].offset
    kept = [r for r in of_both if r.partition or r.offset >= begin]
    rows = {"partition": [r.partition for r in kept], "offset": [r.offset for r in kept]}
    pq.write_table(pa.table(rows), table / "rows.parquet")
    one.delete_records({0: begin})
    found = audited(one, str(table), 0, "--hours", past_hour(3))
    assert found["hours"][0]["rows"] == len(kept) == len(of_both) - 10
    assert (found["exact"], found["cut_off"]) == (False, [0])
