"""Outcomes of a stream's run in a job of many streams."""

import threading
from pathlib import Path
from typing import Any

import pytest
from lakes import new_lake
from no_spark import NO_SPARK

from anabranch.common.errors import Refused
from anabranch.job import Job
from anabranch.kafka.client import KafkaAdapter
from batch_layer.job import run_stream
from batch_layer.stream_run import StreamRun


class Connection:
    """One that throws while it is closed, as a client whose broker is gone may."""

    def close(self, **_: Any) -> None:
        raise OSError("no route to host")


@pytest.mark.parametrize("error", [None, Refused("hour: refused")])
def test_a_run_ends_with_its_outcome_in_any_case(tmp_path: Path, error: Refused | None) -> None:
    lake = new_lake(tmp_path)
    adapter = KafkaAdapter(lake.environment.kafka)
    adapter._admin = adapter._consumer = Connection()
    job = Job(lake.environment, lake.stream, lake.again(), adapter)

    def work(run: StreamRun) -> None:
        if error is not None:
            raise error

    outcome = run_stream(job, NO_SPARK, work, threading.Event())
    assert (outcome.stream, outcome.results, outcome.error) == (lake.stream.name, (), error)
    assert adapter._admin is adapter._consumer is None
