"""What it costs to decode a JSON record, against Spark's own `from_json` of the same columns: `make bench-decode`.

CPU microseconds a record of one task, as Spark counts them in its event log; values are cached, the rows go nowhere.
The three take turns; the least of some rounds is told, since whatever else runs only adds to it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch import records
from anabranch.config import Stream
from anabranch.config.columns import parse_columns
from anabranch.hours import HourRange
from anabranch.output import print_table
from anabranch.records.formats.json import JsonFormat
from anabranch.spark.jars import ensure_jars, jvm_folder

RECORDS, ROUNDS = 200_000, int(os.environ.get("BENCH_ROUNDS", "5"))
COLUMNS = (
    "event_id STRING NOT NULL, event_type STRING NOT NULL, game STRING, player_id STRING, "
    "event_time TIMESTAMP NOT NULL, level INT, amount DOUBLE, platform STRING, payload STRING"
)
EVENT = """to_json(named_struct(
    'event_id', concat('ev-', id), 'event_type', concat('t', id % 5), 'game', concat('g', id % 40),
    'player_id', concat('p', id % 99991),
    'event_time', date_format(timestamp_micros(1763740000000000 + id * 1000), "yyyy-MM-dd'T'HH:mm:ss.SSSSSS'Z'"),
    'level', CAST(id % 90 AS INT), 'amount', (id % 1000) / 7, 'platform', 'ios',
    'payload', repeat(sha2(CAST(id % 997 AS STRING), 256), 3)))"""
KAFKA = (
    f"CAST({EVENT} AS BINARY) AS value", "CAST(CAST(id AS STRING) AS BINARY) AS key", "0 AS partition", "id AS offset",
    "timestamp_micros(1763740000000000 + id * 1000) AS timestamp",
    "CAST(NULL AS array<struct<key:string,value:binary>>) AS headers",
)  # fmt: skip


def ways(source: DataFrame) -> dict[str, Callable[[], DataFrame]]:
    """What is compared: the rows alone, Spark's own parser, and the product's whole verdict."""
    stream = Stream.model_validate(
        {
            "name": "events", "topic": "events", "table": "lake.events", "schema": COLUMNS,
            "columns": parse_columns(COLUMNS), "key": "event_id",
            "event_time": {"column": "event_time", "past": "30 days", "future": "1 hour"},
        }
    )  # fmt: skip
    open_hour = [HourRange("2025-11-21T15", None)]
    shape = COLUMNS.replace(" NOT NULL", "")
    return {
        "value": lambda: source.select("value"),
        "from_json": lambda: source.select(F.from_json(F.expr("CAST(value AS STRING)"), shape).alias("j")).select(
            "j.*"
        ),
        "decode": lambda: records.good(
            records.decode(records.assign_hours(source, open_hour), stream, JsonFormat()), stream
        ),
    }


def cpu_by_description(logs: Path) -> dict[str, float]:
    """Executors' CPU nanoseconds by job description, from an event log."""
    stages, cpu = {}, defaultdict(float)
    for file in logs.iterdir():
        for line in file.open():
            event = json.loads(line)
            if event["Event"] == "SparkListenerJobStart":
                stages |= dict.fromkeys(event["Stage IDs"], event["Properties"].get("spark.job.description", ""))
            elif event["Event"] == "SparkListenerTaskEnd":
                cpu[stages[event["Stage ID"]]] += event["Task Metrics"]["Executor CPU Time"]
    return cpu


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="anabranch-decode-") as name:
        logs = Path(name) / "events"
        logs.mkdir()
        log4j = f"-Dlog4j2.configurationFile=file:{jvm_folder() / 'log4j2-spark.properties'}"
        spark = (
            SparkSession.builder.master("local[1]")
            .config("spark.driver.memory", "3g")
            .config("spark.driver.extraClassPath", ":".join(str(jar) for jar in ensure_jars().spark))
            .config("spark.driver.extraJavaOptions", log4j)
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.local.dir", name)
            .config("spark.sql.warehouse.dir", f"{name}/warehouse")
            .config("spark.eventLog.enabled", "true")
            .config("spark.eventLog.dir", f"file://{logs}")
            .config("spark.eventLog.rolling.enabled", "false")
            .config("spark.eventLog.compress", "false")
            .config("spark.sql.session.timeZone", "UTC")
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("ERROR")
        source = spark.range(RECORDS).repartition(1).selectExpr(*KAFKA).cache()
        size = source.agg(F.avg(F.octet_length("value"))).first()
        compared = ways(source)
        for number in range(ROUNDS):
            for way, frame in compared.items():
                spark.sparkContext.setJobDescription(f"{way} {number}")
                frame().write.format("noop").mode("overwrite").save()
        spark.stop()
        cpu = cpu_by_description(logs)
    least = {way: min(cpu[f"{way} {number}"] for number in range(ROUNDS)) / 1000 / RECORDS for way in compared}
    net = {way: value - least["value"] for way, value in least.items()}
    rows = [(way, f"{least[way]:.2f}", f"{net[way]:.2f}", f"{net[way] / net['from_json']:.2f}") for way in compared]
    assert size is not None
    print(f"{RECORDS:,} records of {size[0]:.0f} bytes, {ROUNDS} rounds; CPU microseconds a record")
    print_table(("what", "in all", "net", "of from_json"), rows)


if __name__ == "__main__":
    main()
