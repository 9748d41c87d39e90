"""Cost of decoding a JSON record, compared with Spark's own `from_json` of the same columns: `make
bench WHAT=decode`.

Reports the CPU microseconds per record of one task, as Spark counts them in its event log; values
are cached and the rows are discarded. Then measures a Python worker on the same values:
`anabranch.records.fast_json` reads them, also where some are odd, and
`anabranch.iceberg.parquet_writer` writes them. All cases take turns. The result is the minimum of
several rounds, since other load on the machine only adds to it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from anabranch import records
from anabranch.common.output import print_table
from anabranch.config import Stream
from anabranch.config.columns import parse_columns
from anabranch.iceberg.parquet_writer import FileWriter, Target
from anabranch.offsets.hours import HourRange
from anabranch.records.fast_json import CertainRows
from anabranch.records.formats.json import JsonFormat
from anabranch.spark.jars import ensure_jars, jvm_folder

RECORDS, AT_ONCE, ROUNDS = 200_000, 10_000, int(os.environ.get("BENCH_ROUNDS", "5"))
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
MORE = """concat(substring(CAST(value AS STRING), 1, length(CAST(value AS STRING)) - 1), ',"more":1}')"""
KAFKA = (
    f"CAST({EVENT} AS BINARY) AS value",
    "CAST(CAST(id AS STRING) AS BINARY) AS key",
    "0 AS partition",
    "id AS offset",
    "timestamp_micros(1763740000000000 + id * 1000) AS timestamp",
    "CAST(NULL AS array<struct<key:string,value:binary>>) AS headers",
)


STREAM = Stream.model_validate(
    {
        "name": "events", "topic": "events", "table": "lake.events", "schema": COLUMNS,
        "columns": parse_columns(COLUMNS), "key": "event_id",
        "event_time": {"column": "event_time", "past": "30 days", "future": "1 hour"},
    }
)  # fmt: skip
HOUR = "2025-11-21T15"


def ways(source: DataFrame) -> dict[str, Callable[[], DataFrame]]:
    """The compared columns: the rows alone, Spark's own parser, the product's whole verdict, and
    that with the names of unknown fields, of records that have none and of records that have one
    (`more`)."""
    open_hour = [HourRange(HOUR, None)]
    shape = COLUMNS.replace(" NOT NULL", "")
    more = source.withColumn("value", F.expr(f"CAST({MORE} AS BINARY)"))

    def decode(frame: DataFrame, counting: bool) -> DataFrame:
        hours = records.assign_hours(frame, open_hour)
        decoded = records.decode(hours, STREAM, JsonFormat(), with_unknown=counting)
        rows = records.good(decoded, STREAM)
        return (
            decoded.where("NOT is_dead").select(*rows.columns, records.UNKNOWN)
            if counting
            else rows
        )

    return {
        "value": lambda: source.select("value"),
        "from_json": lambda: source.select(
            F.from_json(F.expr("CAST(value AS STRING)"), shape).alias("j")
        ).select("j.*"),
        "decode": lambda: decode(source, False),
        "decode, counting": lambda: decode(source, True),
        "decode more": lambda: decode(more, False),
        "decode more, counting": lambda: decode(more, True),
    }


def cpu_by_description(logs: Path) -> dict[str, float]:
    """Executors' CPU nanoseconds by job description, from an event log."""
    stages, cpu = {}, defaultdict(float)
    for file in logs.iterdir():
        for line in file.open():
            event = json.loads(line)
            if event["Event"] == "SparkListenerJobStart":
                stages |= dict.fromkeys(
                    event["Stage IDs"], event["Properties"].get("spark.job.description", "")
                )
            elif event["Event"] == "SparkListenerTaskEnd":
                cpu[stages[event["Stage ID"]]] += event["Task Metrics"]["Executor CPU Time"]
    return cpu


def with_odd(values: pa.Table, every: int) -> pa.Table:
    """The same records, each so-manieth with a text where its number belongs."""
    texts = [
        value.replace(b'"level":', b'"level":"5","_":') if i % every == 0 else value
        for i, value in enumerate(values["value"].to_pylist())
    ]
    return with_values(values, texts)


def with_values(values: pa.Table, texts: list[bytes]) -> pa.Table:
    return values.set_column(
        values.schema.get_field_index("value"), "value", pa.array(texts, pa.binary())
    )


def in_a_worker(values: pa.Table, folder: str) -> list[tuple[str, float, str]]:
    """Return the CPU microseconds per record and the number of records left, for reading in several
    cases and for writing the rows that were read."""
    unknown = [value[:-1] + b',"more":1}' for value in values["value"].to_pylist()]
    cases = {
        "ordinary records": values,
        "with a field that the stream has not": with_values(values, unknown),
        "one odd in a thousand": with_odd(values, 1000),
        "one odd in a hundred": with_odd(values, 100),
        "all odd": with_odd(values, 1),
    }
    results = []
    for name, table in cases.items():
        batches, spent = table.to_batches(max_chunksize=AT_ONCE), []
        for _ in range(ROUNDS):
            rows = CertainRows(STREAM.columns, STREAM.event_time)
            began = time.process_time()
            left = sum(len(rows.read(batch).left) for batch in batches)
            spent.append(time.process_time() - began)
        results.append((f"read, {name}", min(spent) * 1e6 / RECORDS, f"{left:,}"))
    reader = CertainRows(STREAM.columns, STREAM.event_time)
    found = [reader.read(batch).rows for batch in values.to_batches(max_chunksize=AT_ONCE)]
    spent = []
    for _ in range(ROUNDS):
        files = FileWriter(Target(PyArrowFileIO(), folder, found[0].schema, "zstd"))
        began = time.process_time()
        for rows_read in found:
            files.write(rows_read)
        files.close()
        spent.append(time.process_time() - began)
    return [*results, ("write as Parquet", min(spent) * 1e6 / RECORDS, "")]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="anabranch-decode-") as name:
        logs = Path(name) / "events"
        logs.mkdir()
        log4j = f"-Dlog4j2.configurationFile=file:{jvm_folder() / 'log4j2-spark.properties'}"
        spark = (
            SparkSession.builder.master("local[1]")
            .config("spark.driver.memory", "3g")
            .config(
                "spark.driver.extraClassPath", ":".join(str(jar) for jar in ensure_jars().spark)
            )
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
        columns = ("partition", "offset", "timestamp", "value", f"'{HOUR}' AS ingest_hour")
        values = source.selectExpr(*columns).toArrow()
        spark.stop()
        worker = in_a_worker(values, f"{name}/rows")
        cpu = cpu_by_description(logs)
    least = {
        way: min(cpu[f"{way} {number}"] for number in range(ROUNDS)) / 1000 / RECORDS
        for way in compared
    }
    net = {way: value - least["value"] for way, value in least.items()}
    rows = [
        (way, f"{least[way]:.2f}", f"{net[way]:.2f}", f"{net[way] / net['from_json']:.2f}")
        for way in compared
    ]
    assert size is not None
    print(f"{RECORDS:,} records of {size[0]:.0f} bytes, {ROUNDS} rounds; CPU microseconds a record")
    print_table(("what", "in all", "net", "of from_json"), rows)
    print(f"in a Python worker, {AT_ONCE:,} at once")
    print_table(
        ("what", "CPU", "of from_json", "left"),
        [
            (what, f"{spent:.2f}", f"{spent / net['from_json']:.2f}", left)
            for what, spent, left in worker
        ],
    )


if __name__ == "__main__":
    main()
