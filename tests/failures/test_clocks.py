"""A machine whose clock is wrong names the clocks before it seals or publishes."""

import sys
import time
from pathlib import Path

import faketime
import pytest
from commands import started
from faketime import clock
from world import Make, past_hour, spread

from anabranch.protocol.sealing import check_clock


@pytest.fixture(scope="session")
def libfaketime() -> Path:
    return faketime.ensure()


@pytest.mark.parametrize("offset", ["+10m", "-10m", "+3y"])
def test_a_wrong_clock_seals_nothing(world: Make, libfaketime: Path, offset: str) -> None:
    one = world(partitions=1)
    one.begin(spread(past_hour(1), 10, "e", partitions=1))
    before = one.state
    with started(one, "batch", one.name, "--seal-only", **clock(libfaketime, offset)) as command:
        assert command.wait() == 75, command.log
        assert "clock: expected this machine" in command.log
        assert "NTP" in command.log
    after = one.state
    assert (after.heads, after.timeline) == (before.heads, before.timeline)
    # With the clock set right, the hours go on, and the table is readable by everybody.
    one.batch()
    assert one.contents() == one.acknowledged()
    assert one.spark.table(f"lake.{one.job.stream.table}").count() == 10


def test_a_wrong_clock_publishes_nothing(world: Make, libfaketime: Path, tmp_path: Path) -> None:
    one = world(partitions=1)
    one.begin(spread(past_hour(1), 10, "e", partitions=1))
    before = one.state.heads
    # The driver's Python alone, which decides and publishes.
    setting = " ".join(f"{name}={value}" for name, value in clock(libfaketime, "+10m").items())
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec env {setting} {sys.executable} "$@"\n')
    python.chmod(0o755)
    with started(one, "speed", one.name, PYSPARK_DRIVER_PYTHON=str(python)) as command:
        command.until(
            lambda: command.log.count("clock: expected this machine") >= 2,
            "it to stop twice at the clock",
        )
        assert "try 2 in " in command.log
        assert one.state.heads == before
    one.speed()
    assert one.contents() == one.acknowledged()


def test_a_clock_that_jumps_under_a_job_stamps_nothing(world: Make, tmp_path: Path) -> None:
    """The hazard: timestamps ten minutes ahead stop batch layer and readers for ten minutes."""
    one = world(create=1)
    one.send_now(10, "before", partitions=1)
    # The driver's Python alone, which decides and publishes; libfaketime breaks the sleep of a
    # process that goes on.
    ahead = tmp_path / "ahead"
    ahead.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(
        "import pathlib, time\n"
        f"real, ahead = time.time, pathlib.Path({str(ahead)!r})\n"
        "time.time = lambda: real() + float(ahead.read_text() or 0)\n"
    )
    python = tmp_path / "python"
    path = f'PYTHONPATH={tmp_path}:"$PYTHONPATH"'
    python.write_text(f'#!/bin/sh\nexec env {path} {sys.executable} "$@"\n')
    python.chmod(0o755)
    with started(one, "speed", one.name, PYSPARK_DRIVER_PYTHON=str(python)) as command:
        command.until(lambda: one.published == 10, "a first micro-batch")
        ahead.write_text("600")
        one.send_now(10, "meanwhile", partitions=1)
        command.until(
            lambda: command.log.count("clock: expected this machine") >= 2,
            "it to stop at its clock",
        )
        assert "and the object store" in command.log
        state = one.state
        assert one.published == 10
        assert state.table.metadata.last_updated_ms < (time.time() + 30) * 1000
        # Everybody else goes on: the batch layer's clock check, and Spark's readers.
        check_clock(one.lake, state)
        assert one.spark.table(f"lake.{one.job.stream.table}").count() == 10
        ahead.write_text("0")
        command.until(lambda: one.published == 20, "it to go on once its clock is right")
        assert command.terminate() == 0
    assert one.contents() == one.acknowledged()
