"""Spark's own second attempts: a task that fails once, and one that runs twice at once."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from cluster import SparkCluster, running_cluster
from commands import run
from pyspark import TaskContext
from world import Make, World, past_hour, spread

from anabranch import records
from anabranch.iceberg.manifests import files_by_hour
from anabranch.offsets.hours import start_of
from anabranch.records import staged
from batch_layer import sources
from batch_layer.passes import SMALL
from speed_layer import micro_batch

_SLOW_ONCE = '''
"""Loaded by every Python process of the test: the first attempt of the first task of each decoding step is slow."""
import os, sys, time, threading

# A step's module, its function of a frame, and what the module defines last.
_STEPS = (
    ("anabranch.records", "decode", "dead"),
    ("speed_layer.micro_batch", "stage_certain", "_count"),
    ("batch_layer.sources", "stage_certain", "HourReader"),
)

def _slowed(step):
    # A function of a function is sent to the workers by value.
    def slow(batches):
        from pyspark import TaskContext
        context, folder = TaskContext.get(), "@MARKS@"
        open(f"{folder}/{context.partitionId()}-{context.attemptNumber()}-{context.stageId()}", "w").close()
        if context.partitionId() == 0 and context.attemptNumber() == 0:
            time.sleep(15)
        yield from batches

    return lambda frame, *rest, **named: step(frame.mapInArrow(slow, frame.schema), *rest, **named)

def _wrap():
    waiting = list(_STEPS)
    while waiting:
        for one in list(waiting):
            module, step, last = one
            if hasattr(sys.modules.get(module), last):
                setattr(sys.modules[module], step, _slowed(getattr(sys.modules[module], step)))
                waiting.remove(one)
        time.sleep(0.01)

if b"worker_daemon" not in open("/proc/self/cmdline", "rb").read():
    threading.Thread(target=_wrap, daemon=True).start()
'''


def with_a_broken_record(world: Make) -> World:
    one = world(partitions=2)
    one.send(spread(past_hour(1), 60, "e"))
    one.begin([(0, start_of(past_hour(1)) + timedelta(minutes=59), b"{broken")])
    return one


@pytest.fixture
def failing_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_spark: None) -> Path:
    """Every decoding task fails at its first attempt, after it has let half of its rows through."""
    marks = tmp_path / "marks"
    marks.mkdir()

    def fail_once(batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        for batch in batches:
            yield batch.slice(0, len(batch) // 2)
            if context.attemptNumber() == 0:
                (marks / f"{context.stageId()}-{context.partitionId()}").touch()
                raise OSError("the first attempt fails")
            yield batch.slice(len(batch) // 2)

    def failing(read: Callable[..., Any]) -> Callable[..., Any]:
        return lambda frame, *rest, **named: read(
            frame.mapInArrow(fail_once, frame.schema), *rest, **named
        )

    monkeypatch.setattr(records, "decode", failing(records.decode))
    for layer in (micro_batch, sources):
        monkeypatch.setattr(layer, "stage_certain", failing(layer.stage_certain))
    return marks


def test_a_task_that_fails_once_duplicates_no_row(world: Make, failing_once: Path) -> None:
    one = with_a_broken_record(world)
    one.speed()
    one.sent.pop()
    by_speed = len(list(failing_once.iterdir()))
    # The hazard: tasks did fail, and were tried again.
    assert by_speed >= 2
    assert one.contents() == one.acknowledged()
    assert len(one.dead()) == 1
    [result] = one.batch()
    assert len(list(failing_once.iterdir())) > by_speed
    assert (result.decision, result.account.good, result.account.dead) == ("accepted", 60, 1)
    assert one.contents() == one.acknowledged()


@pytest.fixture
def killed_after_writing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, by_spark: None) -> Path:
    """Every worker dies at its task's first attempt, after it has closed the files."""
    marks = tmp_path / "marks"
    marks.mkdir()
    made = staged._certain_task

    def task(spec: staged.TaskSpec) -> Callable[[Any], Iterator[Any]]:
        run = made(spec)

        def killed(batches: Iterator[Any]) -> Iterator[Any]:
            context, reports = TaskContext.get(), list(run(batches))
            assert context is not None
            if context.attemptNumber() == 0:
                (marks / f"{context.stageId()}-{context.partitionId()}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield from reports

        return killed

    monkeypatch.setattr(staged, "_certain_task", task)
    return marks


def test_files_of_a_killed_task_do_not_count(world: Make, killed_after_writing: Path) -> None:
    one = with_a_broken_record(world)
    [result] = one.batch()
    one.sent.pop()
    killed = len(list(killed_after_writing.iterdir()))
    assert killed
    assert (result.decision, result.account.good, result.account.dead) == ("accepted", 60, 1)
    assert one.contents() == one.acknowledged()
    assert len(one.dead()) == 1
    named = [path for of in files_by_hour(one.state.table, "main").values() for path in of]
    assert result.account.run is not None
    assert len(named) == result.account.run.files == killed


@pytest.fixture(scope="module")
def cluster() -> Iterator[SparkCluster]:
    with running_cluster() as spark_cluster:
        yield spark_cluster


def test_speculative_execution_duplicates_no_row(
    world: Make, cluster: SparkCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = world(speed={"trigger": "1 second", "max_offsets_per_trigger": 100_000}, partitions=2)
    hour = past_hour(1)
    # Spark reads the hour.
    one.begin(spread(hour, SMALL + 2, "e"))
    spark = {
        "master": cluster.master,
        "conf": {
            "spark.driver.memory": "1g",
            "spark.executor.memory": "512m",
            "spark.cores.max": "2",
            "spark.speculation": "true",
            "spark.speculation.interval": "100ms",
            "spark.speculation.quantile": "0.5",
            "spark.speculation.multiplier": "1.1",
            "spark.speculation.minTaskRuntime": "500ms",
            # The batch layer reads the hour in one task, which has no other to be slower than.
            "spark.speculation.task.duration.threshold": "2s",
        },
    }
    one.set_environment(spark=spark)
    marks, inject = tmp_path / "marks", tmp_path / "inject"
    marks.mkdir()
    inject.mkdir()
    (inject / "sitecustomize.py").write_text(_SLOW_ONCE.replace("@MARKS@", str(marks)))
    monkeypatch.setenv("PYTHONPATH", f"{inject}:{':'.join(p for p in sys.path if 'support' in p)}")
    for layer in (("speed", one.name, "--available-now"), ("batch", one.name, "--hour", hour)):
        run(one, *layer)
        assert one.contents() == one.acknowledged()
        # The hazard: a second attempt of a task that had not failed ran beside the first.
        attempts = {tuple(mark.name.split("-")) for mark in marks.iterdir()}
        assert any(attempt == "1" for _, attempt, _ in attempts), (layer, attempts)
        for mark in marks.iterdir():
            mark.unlink()
    assert one.state.is_accepted(hour)
