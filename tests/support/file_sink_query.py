"""A streaming query of Spark's file sink."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from world import SCHEMA

LOG = {
    "spark.sql.streaming.fileSink.log.compactInterval": "3",
    "spark.sql.streaming.fileSink.log.cleanupDelay": "1ms",
    "spark.sql.streaming.minBatchesToRetain": "1",
}
"""Every third micro-batch compacts the log; a later one deletes the log files before it."""


def write(spark: SparkSession, folder: Path, topic: str, servers: str) -> None:
    """Write the records that a topic has, 40 in a micro-batch: the fields of their values, and their partitions,
    offsets and times."""
    read = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    records = read.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", "40").load()
    value = F.from_json(F.col("value").cast("string"), SCHEMA.replace(" NOT NULL", ""))
    rows = records.select(value.alias("v"), "partition", "offset", "timestamp")
    rows = rows.select("v.*", "partition", "offset", "timestamp")
    query = rows.writeStream.format("parquet").option("checkpointLocation", f"{folder}-checkpoint")
    query.trigger(availableNow=True).start(str(folder)).awaitTermination()
