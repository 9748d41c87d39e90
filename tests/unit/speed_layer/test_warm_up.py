"""When the decoder of the few records that workers leave is warmed up: a broken record is not to be
what Spark compiles it for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest
from lakes import new_lake

from anabranch.job import FollowedJob, Job
from anabranch.kafka.client import KafkaAdapter
from speed_layer import job as speed_layer_job
from speed_layer.job import SpeedJob, SpeedRuns

SPARK = cast(Any, object())
WITHIN = 30.0


def job_of(folder: Path) -> Job:
    one = new_lake(folder)
    return Job(one.environment, one.stream, one.lake, KafkaAdapter(one.environment.kafka))


@pytest.fixture
def warmed(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the decoder is warmed up, which needs no JVM here."""
    event = threading.Event()
    monkeypatch.setattr(speed_layer_job, "_SETTLED_SECONDS", 0.0)
    monkeypatch.setattr(
        "speed_layer.micro_batch.MicroBatches.warm_up", lambda self, spark: event.set()
    )
    return event


def test_it_is_warmed_up_behind_the_first_publish(tmp_path: Path, warmed: threading.Event) -> None:
    speed = SpeedJob(job_of(tmp_path), SPARK, available_now=False)
    waiting = threading.Thread(target=speed.warm_up)
    waiting.start()
    assert not warmed.wait(0.5)
    speed._count(3)
    assert warmed.wait(WITHIN)
    waiting.join(WITHIN)


def test_a_stop_ends_the_wait(tmp_path: Path, warmed: threading.Event) -> None:
    speed = SpeedJob(job_of(tmp_path), SPARK, available_now=False)
    waiting = threading.Thread(target=speed.warm_up)
    waiting.start()
    speed.stop()
    waiting.join(WITHIN)
    assert not waiting.is_alive() and not warmed.is_set()


@pytest.mark.parametrize("available_now", [False, True])
def test_a_job_that_goes_on_warms_up_while_it_runs(
    tmp_path: Path, warmed: threading.Event, monkeypatch: pytest.MonkeyPatch, available_now: bool
) -> None:
    """One that ends with what is there has no time to spare for it."""

    def publish(speed: SpeedJob) -> None:
        speed._count(3)
        warmed.wait(WITHIN if not available_now else 0.5)

    monkeypatch.setattr(SpeedJob, "run", publish)
    SpeedRuns(FollowedJob(job_of(tmp_path)), SPARK, available_now, lambda *_: None).run()
    assert warmed.is_set() is not available_now
