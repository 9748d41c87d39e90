"""Kafka's records as Spark frames: exactly the ranges asked for, or a stream from a position. Both layers read so."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from anabranch.config import Kafka
from anabranch.position import Offsets, Ranges, to_keys
from anabranch.spark import kafka_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_ranges(spark: SparkSession, kafka: Kafka, topic: str, ranges: Ranges, uncommitted: bool = False) -> DataFrame:
    """Kafka's records of `ranges` (none empty), the partitions assigned by name. Lazy; each action reads again.

    With `uncommitted` also the records of aborted and open transactions (KIP-98).
    """
    isolation = {"kafka.isolation.level": "read_uncommitted"} if uncommitted else {}
    return (
        spark.read.format("kafka")
        .options(**(kafka_options(kafka) | isolation))
        .option("assign", json.dumps({topic: sorted(ranges)}))
        .option("startingOffsets", json.dumps({topic: to_keys({p: s for p, (s, _) in ranges.items()})}))
        .option("endingOffsets", json.dumps({topic: to_keys({p: e for p, (_, e) in ranges.items()})}))
        .option("includeHeaders", "true")
        .load()
    )


def read_stream(spark: SparkSession, kafka: Kafka, topic: str, position: Offsets, max_offsets: int) -> DataFrame:
    """An endless frame of the topic from `position` on, at most `max_offsets` a micro-batch; lost data fails it."""
    return (
        spark.readStream.format("kafka")
        .options(**kafka_options(kafka))
        .option("subscribe", topic)
        .option("startingOffsets", json.dumps({topic: to_keys(position)}))
        .option("maxOffsetsPerTrigger", max_offsets)
        .option("failOnDataLoss", "true")
        .option("includeHeaders", "true")
        .load()
    )


def no_records(spark: SparkSession) -> DataFrame:
    """What `read_ranges` gives for nothing: no record, in the same columns."""
    return spark.createDataFrame(
        [],
        "key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, timestampType INT, "
        "headers ARRAY<STRUCT<key: STRING, value: BINARY>>",
    )
