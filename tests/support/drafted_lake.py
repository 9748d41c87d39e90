"""A configuration folder of drafted streams, with the commands and jobs of its operator."""

import threading
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner
from pyspark.sql import SparkSession
from world import add_catalog, past_hour

from anabranch import config
from anabranch.cli import main
from anabranch.common.errors import ConfigurationError
from anabranch.job import Job, open_jobs
from anabranch.kafka.client import create_topic, new_producer
from anabranch.offsets.hours import start_of
from anabranch.spark.session import LazySpark
from batch_layer.job import run_streams
from batch_layer.rebuild import RebuildRequest
from batch_layer.stream_run import StreamRun
from speed_layer.group import GroupJob


class Lake:
    """A configuration folder, and a producer for its Kafka."""

    def __init__(self, folder: Path, environment: dict[str, Any]) -> None:
        self.folder, self.prefix = folder, f"d{uuid.uuid4().hex[:10]}"
        (folder / "streams").mkdir(parents=True)
        (folder / "anabranch.yaml").write_text(yaml.safe_dump(environment))
        (folder / "defaults.yaml").write_text("batch: {grace: 0 seconds}\n")
        self.kafka = config.load_environment(folder).kafka

    def call(self, *arguments: str, expect: int = 0) -> str:
        done = CliRunner().invoke(main, [*arguments, "--conf", str(self.folder)])
        assert done.exit_code == expect, f"{arguments}: {done.output}\n{done.exception!r}"
        return str(done.stdout)

    @contextmanager
    def sending(self, topic: str, partitions: int = 2) -> Iterator[Any]:
        """Create a topic, and yield what sends values to it, stamped in the hour before this."""
        create_topic(self.kafka, topic, partitions, {})
        count = 0

        def send(value: bytes | None, key: bytes | None = None, headers: Any = ()) -> None:
            nonlocal count
            producer.send(topic, value, key, [*headers], count % partitions, self.stamp)
            count += 1

        with closing(new_producer(self.kafka)) as producer:
            yield send
            producer.flush()

    @property
    def stamp(self) -> int:
        """The start of the hour before this one, in milliseconds since 1970."""
        return int(start_of(past_hour(1)).timestamp() * 1000)

    def jobs(self) -> list[Job]:
        _, jobs, broken = open_jobs(str(self.folder), (), None, True)
        assert broken == {}
        return jobs

    def speed(self, spark: SparkSession) -> None:
        """Publish the present records of all streams in one process."""
        add_catalog(spark, config.load_environment(self.folder))
        jobs: dict[str, Job | ConfigurationError] = {job.stream.name: job for job in self.jobs()}
        group = GroupJob(spark, self.kafka, lambda: jobs, available_now=True)
        group.run()
        assert group.failures == {}

    def batch(self, spark: SparkSession) -> None:
        """Rebuild the hour before this one for all streams in one process; it is accepted."""

        def work(stream: StreamRun) -> None:
            stream.rebuild(None, RebuildRequest())

        outcomes = run_streams(self.jobs(), LazySpark.of(spark), work, threading.Event(), at_once=2)
        for outcome in outcomes:
            decided = [(r.hour, r.decision) for r in outcome.results]
            assert (outcome.error, decided) == (None, [(past_hour(1), "accepted")]), outcome
