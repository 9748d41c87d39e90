"""Other ways to write a Kafka topic to Parquet: `peer.py WAY TOPIC BROKER FOLDER S3 SCHEMA LIMIT
AVRO`.

Prints a line of JSON for each micro-batch: the number of records, and the time of its end (seconds
since the epoch). WAY is

- noop: read and parse, and write nothing: the cost of the engine itself;
- file_sink: Spark's Parquet file sink, to local files or with Hadoop's S3A;
- iceberg: Iceberg's streaming sink (`toTable`);
- append: `foreachBatch` with an append to the Iceberg table;
- delta: Delta Lake's sink.

Each uses `from_json` with the same columns, or `from_avro` with the schema AVRO after the five
bytes of the wire format's header, the same partitions, Zstandard, and the heap and collector of
Anabranch.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.avro.functions import from_avro

from anabranch.spark.jars import ensure_jars, jvm_folder

WAYS = ("noop", "file_sink", "iceberg", "append", "delta")
DELTA = "io.delta:delta-spark_4.1_2.13:4.1.0"
HADOOP_AWS = "org.apache.hadoop:hadoop-aws:3.4.2"
AVRO = "org.apache.spark:spark-avro_2.13:4.1.1"
BUCKET = "anabranch"
"""The bucket of all data on S3."""
MASTER = "ANABRANCH_SPARK_MASTER"
"""The environment variable with Spark's master for every way; default `local[2]`."""
_KEYS = ("anabranch", "anabranch-local")


def spark_master() -> tuple[str, dict[str, str]]:
    """Return the master, and the Spark configuration for two executors of one core on it."""
    master = os.environ.get(MASTER, "local[2]")
    executors = {"spark.cores.max": "2", "spark.executor.cores": "1", "spark.executor.memory": "1g"}
    return master, {} if master.startswith("local") else executors


def session(way: str, folder: Path, s3: str | None, reads_avro: bool = False) -> SparkSession:
    log4j = f"-Dlog4j2.configurationFile=file:{jvm_folder() / 'log4j2-spark.properties'}"
    master, conf = spark_master()
    jars = [str(jar) for jar in ensure_jars().spark]
    builder: Any = (
        SparkSession.builder.master(master)
        .appName(way)
        .config("spark.driver.memory", "2g")
        .config(
            "spark.driver.extraJavaOptions", f"{log4j} -XX:+UseParallelGC -Djava.io.tmpdir={folder}"
        )
        .config("spark.driver.extraClassPath", ":".join(jars))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.local.dir", str(folder))
        .config("spark.sql.warehouse.dir", str(folder / "hive"))
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.streaming.numRecentProgressUpdates", "1000")
    )
    if conf and way == "file_sink" and s3 is not None:
        # With `spark.jars.packages`, executors would only get the session's own `spark.jars`.
        conf["spark.executor.extraClassPath"] = ":".join(jars)
    elif conf:
        conf["spark.jars"] = ",".join(jars)
    for key, value in conf.items():
        builder = builder.config(key, value)
    if way in ("iceberg", "append"):
        lake = {
            "": "org.apache.iceberg.spark.SparkCatalog",
            ".type": "jdbc",
            ".uri": f"jdbc:sqlite:{folder}/catalog.db",
            ".jdbc.schema-version": "V1",
            ".warehouse": f"file://{folder}/warehouse",
        }
        if s3 is not None:
            lake |= {
                ".warehouse": f"s3://{BUCKET}/{folder.name}",
                ".io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
                ".s3.endpoint": s3,
                ".s3.path-style-access": "true",
                ".s3.access-key-id": _KEYS[0],
                ".s3.secret-access-key": _KEYS[1],
                ".client.region": "us-east-1",
            }
        builder = builder.config(
            "spark.sql.extensions",
            "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
        )
        for key, value in lake.items():
            builder = builder.config(f"spark.sql.catalog.lake{key}", value)
    packages = [AVRO] if reads_avro else []
    if way == "file_sink" and s3 is not None:
        packages.append(HADOOP_AWS)
        builder = (
            builder.config("spark.hadoop.fs.s3a.endpoint", s3)
            .config("spark.hadoop.fs.s3a.endpoint.region", "us-east-1")
            .config("spark.hadoop.fs.s3a.path.style.access", "true")
            .config("spark.hadoop.fs.s3a.access.key", _KEYS[0])
            .config("spark.hadoop.fs.s3a.secret.key", _KEYS[1])
        )
    if way == "delta":
        packages.append(DELTA)
        builder = builder.config(
            "spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension"
        ).config(
            "spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        )
    if packages:
        builder = builder.config("spark.jars.packages", ",".join(packages))
    spark: SparkSession = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def records(
    spark: SparkSession, topic: str, broker: str, schema: str, limit: int, avro: str
) -> DataFrame:
    source = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", broker)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", limit)
        .load()
    )
    value = F.from_json(F.col("value").cast("string"), schema.replace(" NOT NULL", ""))
    if avro:
        value = from_avro(F.expr("substring(value, 6)"), avro)
    parsed = source.select(
        value.alias("j"),
        "partition", "offset", "timestamp",
    )  # fmt: skip
    return parsed.select(
        "j.*",
        F.to_date("j.event_time").alias("event_date"),
        F.date_format("timestamp", "yyyy-MM-dd'T'HH").alias("ingest_hour"),
        F.col("partition").alias("kafka_partition"),
        F.col("offset").alias("kafka_offset"),
        F.col("timestamp").alias("kafka_timestamp"),
    )


def main(arguments: list[str]) -> None:
    way, topic, broker, name, s3, schema, limit, avro = arguments
    folder = Path(name)
    spark = session(way, folder, s3 or None, bool(avro))
    frame = records(spark, topic, broker, schema, int(limit), avro)
    if way in ("iceberg", "append"):
        spark.sql("CREATE NAMESPACE lake.db")
        columns = ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in frame.schema.fields)
        spark.sql(
            f"CREATE TABLE lake.db.events ({columns}) USING iceberg PARTITIONED BY (event_date, "
            "ingest_hour) TBLPROPERTIES ('write.distribution-mode'='none', "
            "'write.parquet.compression-codec'='zstd')"
        )
    writer = frame.writeStream.option("checkpointLocation", f"file://{folder}/checkpoint").trigger(
        availableNow=True
    )
    parts = ("event_date", "ingest_hour")
    match way:
        case "noop":
            query = writer.format("noop").start()
        case "file_sink":
            out = f"s3a://{BUCKET}/{folder.name}/out" if s3 else f"file://{folder}/out"
            files = writer.format("parquet").option("path", out).option("compression", "zstd")
            query = files.partitionBy(*parts).start()
        case "iceberg":
            query = (
                writer.format("iceberg").option("fanout-enabled", "true").toTable("lake.db.events")
            )
        case "append":
            query = writer.foreachBatch(
                lambda batch, _: (
                    batch.writeTo("lake.db.events").option("fanout-enabled", "true").append()
                )
            ).start()
        case "delta":
            query = (
                writer.format("delta").option("path", f"{folder}/out").partitionBy(*parts).start()
            )
        case _:
            raise ValueError(f"expected one of {', '.join(WAYS)}, found {way}")
    query.awaitTermination()
    for progress in query.recentProgress:
        if progress["numInputRows"]:
            began = datetime.fromisoformat(progress["timestamp"].replace("Z", "+00:00")).astimezone(
                UTC
            )
            ended = began + timedelta(milliseconds=progress["durationMs"]["triggerExecution"])
            print(
                json.dumps({"records": progress["numInputRows"], "ended": ended.timestamp()}),
                flush=True,
            )
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
