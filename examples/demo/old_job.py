"""The job of another team: Spark's Parquet file sink of a topic, as `python -m demo.old_job FOLDER
TOPIC SERVERS SCHEMA`, until it has all records."""

from __future__ import annotations

import os
import sys

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from anabranch.spark.jars import ensure_jars

EACH = 20_000
"""Records of a micro-batch."""


def main(folder: str, topic: str, servers: str, schema: str) -> None:
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    jars = ":".join(map(str, ensure_jars().spark))
    builder = SparkSession.builder.master("local[2]").appName("another team's job")
    for key, value in {
        "spark.driver.extraClassPath": jars,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
    }.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    read = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers)
    read = read.option("subscribe", topic).option("startingOffsets", "earliest")
    records = read.option("maxOffsetsPerTrigger", EACH).load()
    fields = F.from_json(F.col("value").cast("string"), schema).alias("v")
    rows = records.select(fields, "partition", "offset", "timestamp")
    rows = rows.select("v.*", "partition", "offset", "timestamp")
    query = rows.writeStream.format("parquet").option("checkpointLocation", f"{folder}-checkpoint")
    query.trigger(availableNow=True).start(folder).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
