"""A streaming query of Spark's file sink, in a running session, or in a separate process that is
killed within a micro-batch.

`python file_sink_query.py FOLDER TOPIC SERVERS [EVENT_ID]` writes the records of the topic. With
EVENT_ID, the task that reads this event kills the JVM (SIGKILL), once another task of the
micro-batch has written its file.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from pyspark.sql import Column, SparkSession
from pyspark.sql import functions as F
from waiting import wait_for
from world import SCHEMA

from anabranch.spark.jars import ensure_jars
from anabranch.spark.java import FIRST_COMPILER

LOG = {
    "spark.sql.streaming.fileSink.log.compactInterval": "3",
    "spark.sql.streaming.fileSink.log.cleanupDelay": "1ms",
    "spark.sql.streaming.minBatchesToRetain": "1",
}
"""Every third micro-batch compacts the log; a later one deletes the earlier log files."""


def write(
    spark: SparkSession, folder: Path, topic: str, servers: str, killer: Column | None = None
) -> None:
    """Write the records of a topic, 40 per micro-batch: the fields of their values, and their
    partitions, offsets and timestamps. `killer`: a column that replaces `event_id`."""
    log = {"kafka.bootstrap.servers": servers, "subscribe": topic, "startingOffsets": "earliest"}
    read = spark.readStream.format("kafka").options(**log, maxOffsetsPerTrigger="40")
    records = read.load()
    value = F.from_json(F.col("value").cast("string"), SCHEMA.replace(" NOT NULL", ""))
    rows = records.select(value.alias("v"), "partition", "offset", "timestamp")
    rows = rows.select("v.*", "partition", "offset", "timestamp")
    if killer is not None:
        rows = rows.withColumn("event_id", killer)
    query = rows.writeStream.format("parquet").option("checkpointLocation", f"{folder}-checkpoint")
    query.trigger(availableNow=True).start(str(folder)).awaitTermination()


def unlisted_files(folder: Path) -> set[str]:
    """The complete Parquet files that no log file lists: those of unfinished micro-batches."""
    log = [path.read_text() for path in (folder / "_spark_metadata").glob("[0-9]*")]
    whole = (p for p in folder.glob("part-*.parquet") if p.read_bytes()[4:].endswith(b"PAR1"))
    return {path.name for path in whole if not any(path.name in text for text in log)}


def _killer(spark: SparkSession, folder: Path, event_id: str) -> Column:
    jvm: Any = spark._jvm
    process = int(jvm.java.lang.ProcessHandle.current().pid())
    before = unlisted_files(folder)

    def kill(found: str) -> str:
        if found == event_id:
            wait_for(lambda: unlisted_files(folder) > before, "a file of the other task")
            os.kill(process, signal.SIGKILL)
        return found

    return F.udf(kill)("event_id")


def main(folder: Path, topic: str, servers: str, event_id: str | None = None) -> None:
    jars = {"spark.driver.extraClassPath": ":".join(map(str, ensure_jars().spark))}
    java = {"spark.driver.extraJavaOptions": FIRST_COMPILER, "spark.ui.enabled": "false"}
    settings = LOG | jars | java | {"spark.sql.session.timeZone": "UTC"}
    spark = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    killer = _killer(spark, folder, event_id) if event_id is not None else None
    write(spark, folder, topic, servers, killer)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
