"""A group of streams that runs in a thread of a test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from anabranch.config import Kafka
from speed_layer.group import GroupJob, Streams


@contextmanager
def running(spark: SparkSession, kafka: Kafka, streams: Streams) -> Iterator[GroupJob]:
    """A group for the length of a `with`; at its end it is stopped, and what it raised is raised."""
    group = GroupJob(spark, kafka, streams)
    raised: list[BaseException] = []

    def run() -> None:
        try:
            group.run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="group")
    thread.start()
    try:
        yield group
    finally:
        group.stop()
        thread.join(120)
    assert not thread.is_alive(), "expected the group to stop within two minutes"
    if raised:
        raise raised[0]
