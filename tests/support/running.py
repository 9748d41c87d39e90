"""The speed layer in a thread of a test's process."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import pytest
from pyiceberg.table.snapshots import Operation
from waiting import wait_for
from world import World

from anabranch.iceberg.snapshots import PUBLISH_ID, ancestors_to_last_publish
from speed_layer.job import SpeedJob

TRIED_AGAIN = re.compile(
    r"try \d+ failed: .*; try \d+ in [0-9.]+ s \((.*, )?(no time limit|until \S+ UTC)\)"
)
PUBLISHED = re.compile(r"published \d+ offsets as")


class Runnable(Protocol):
    """A job that runs until it is stopped."""

    def run(self) -> None: ...

    def stop(self) -> None: ...


J = TypeVar("J", bound=Runnable)


@contextmanager
def running_beside(job: J, name: str) -> Iterator[J]:
    """Run a job in a thread within a `with`. The end stops the job, and raises the job's error."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            job.run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    try:
        yield job
    finally:
        job.stop()
        thread.join(timeout=120)
    assert not thread.is_alive(), f"expected {name} to stop within two minutes"
    if raised:
        raise raised[0]


@contextmanager
def speed_running(
    one: World, note_progress: Callable[[], None] = lambda: None
) -> Iterator[SpeedJob]:
    """Run the speed job of a stream within a `with`."""
    job = SpeedJob(one.job, one.spark, False, note_progress)
    with running_beside(job, f"speed-{one.name}"):
        yield job


def lines(caplog: pytest.LogCaptureFixture, pattern: re.Pattern[str]) -> list[str]:
    """Return the logged lines that match, in order."""
    messages = [record.getMessage() for record in list(caplog.records)]
    return [message for message in messages if pattern.search(message)]


def await_failure(caplog: pytest.LogCaptureFixture) -> None:
    """Wait until a failure is logged with its next try."""
    wait_for(lambda: bool(lines(caplog, TRIED_AGAIN)), "a failure to be logged with its next try")


def publishes(one: World, branch: str = "speed") -> list[Any]:
    """Return the snapshots of a branch that added rows: one for each publish, no compaction."""
    table = one.lake.load(one.job.stream.table)
    snapshots, link = [], ancestors_to_last_publish(table, branch)[0]
    while True:
        summary = link.summary
        assert summary is not None
        is_compaction = summary.operation is Operation.REPLACE
        if int(summary.get("added-records") or 0) and not is_compaction and summary.get(PUBLISH_ID):
            snapshots.append(link)
        parent = table.metadata.snapshot_by_id(link.parent_snapshot_id or 0)
        if parent is None:
            return snapshots
        link = parent
