"""The options with which Spark reads Kafka."""

from __future__ import annotations

from typing import Any, cast

from pyspark.sql import SparkSession

from anabranch import config
from anabranch.kafka.source import read_ranges, read_topics

KAFKA = config.Kafka(bootstrap_servers="127.0.0.1:1")


class Recorded:
    """Takes a reader's options, and reads nothing."""

    def __init__(self) -> None:
        self.options_: dict[str, str] = {}
        self.read = self

    def format(self, name: str) -> Recorded:
        return self

    def options(self, **given: str) -> Recorded:
        self.options_ |= given
        return self

    def option(self, name: str, value: str) -> Recorded:
        self.options_[name] = value
        return self

    def load(self) -> Any:
        return self.options_


def test_a_partition_that_does_not_answer_delays_many_topics_for_less_than_a_topic_alone() -> None:
    spark = cast(SparkSession, Recorded())
    alone: Any = read_ranges(spark, KAFKA, "t", {0: (0, 1)})
    assert alone["kafkaConsumer.pollTimeoutMs"] == "60000"
    joint: Any = read_topics(spark, KAFKA, {"t": {0: (0, 1)}}, "g")
    waits = int(joint["kafkaConsumer.pollTimeoutMs"])
    # A request that is lost is sent again in the meantime.
    assert int(joint["kafka.request.timeout.ms"]) < waits <= 15_000
