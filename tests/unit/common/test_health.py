"""The health of a speed job: what its file says, and what the check makes of it."""

import json
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from conf_folders import said

from anabranch.common import errors, health
from anabranch.common.health import HealthRecord, find_fault, health_file, record_start

TRIGGER = timedelta(seconds=2)
LIMIT = 304.0  # five minutes and two triggers


@pytest.mark.parametrize(
    ("record", "is_running", "fault"),
    [
        (None, False, "found none: the job has not started"),
        (HealthRecord(0, 2), True, "found none in 1000 s since the start"),
        (HealthRecord(0, 2, progress=999), True, None),
        (HealthRecord(0, 2, progress=1000 - LIMIT), True, None),
        (HealthRecord(0, 2, progress=1000 - LIMIT - 1), True, "within 304 s, found none for 305 s"),
        (HealthRecord(0, 300, progress=1000 - LIMIT - 1), True, None),
        (HealthRecord(0, 2, progress=999), False, "its process has ended"),
        (HealthRecord(0, 2, progress=999, restarts=(900,)), True, None),
        (HealthRecord(0, 2, progress=999, restarts=(700, 900)), True, "within 15 minutes, found 2"),
        (HealthRecord(0, 2, progress=999, restarts=(90, 900)), True, None),
        # The clock was set back.
        (HealthRecord(0, 2, progress=5000), True, None),
    ],
)
def test_a_job_is_healthy_with_recent_progress_and_few_restarts(
    record: HealthRecord | None, is_running: bool, fault: str | None
) -> None:
    found = find_fault(record, is_running, 1000.0)
    assert (found is None) if fault is None else (found is not None and fault in found)


def test_a_start_without_a_stop_is_a_restart_which_a_liveness_probe_ignores() -> None:
    first = record_start(None, 2, 0.0)
    assert first == HealthRecord(0.0, 2)
    second = record_start(first, 2, 120.0)
    third = record_start(second, 2, 240.0)
    assert (second.restarts, third.restarts) == ((120.0,), (120.0, 240.0))
    assert record_start(third, 2, 2000.0).restarts == (2000.0,)
    often = HealthRecord(0, 2, progress=990, restarts=(700, 800, 900))
    assert find_fault(often, True, 1000.0, ignore_restarts=True) is None
    expected = "expected a publish or an idle trigger within 5 s, found none for 10 s"
    assert find_fault(often, True, 1000.0, within=5, ignore_restarts=True) == expected


def crash(file: Path, now: float) -> None:
    """A process that makes progress and then ends with an error."""
    with suppress(RuntimeError), health_file(file, TRIGGER, lambda: now) as note:
        note()
        raise RuntimeError


def test_a_job_that_publishes_and_dies_again_is_unhealthy(tmp_path: Path) -> None:
    file = tmp_path / "speed"

    def fault(now: float) -> str | None:
        return find_fault(health.read_record(file), health.is_running(file), now)

    crash(file, 0.0)
    assert "has ended" in str(fault(1.0))
    crash(file, 120.0)
    with health_file(file, TRIGGER, lambda: 240.0) as note:
        assert "since the start" in str(fault(241.0))
        note()
        assert "found 2" in str(fault(241.0))
    # That one was stopped.
    assert not file.exists()
    with health_file(file, TRIGGER, lambda: 300.0) as note:
        note()
        assert fault(301.0) is None


def test_a_file_is_one_jobs_in_a_folder_that_may_be_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "_LOCK_SECONDS", 0.2)
    with (
        health_file(tmp_path / "speed", TRIGGER),
        pytest.raises(errors.Transient),
        health_file(tmp_path / "speed", TRIGGER),
    ):
        pass
    with health_file(None, TRIGGER) as note:
        note()
    with (
        pytest.raises(errors.ConfigurationError, match="--health"),
        health_file(tmp_path / "no" / "speed", TRIGGER),
    ):
        pass
    file, times = tmp_path / "speed", iter((0.0, 10.0, 20.0))
    with health_file(file, TRIGGER, lambda: next(times)) as note:
        (tmp_path / "speed.part").mkdir()
        note()
        note()
    assert caplog.text.count("cannot be written") == 1


def test_the_command_ends_with_1_for_an_unhealthy_job(tmp_path: Path) -> None:
    file = tmp_path / "speed"

    def run(*options: str, expect: int = 0) -> str:
        return said("health", str(file), *options, expect=expect)

    assert run(expect=1).startswith("unhealthy: expected a health file")
    with health_file(file, TRIGGER) as note:
        note()
        assert run().startswith("healthy: ")
        healthy = {"healthy": True, "fault": None, "set_aside": {}}
        assert json.loads(run("--output", "json")) == healthy
        aside = {"orders": "expected topic shop.orders"}
        note(aside)
        assert json.loads(run("--output", "json"))["set_aside"] == aside
        assert run().endswith("stream orders is set aside: expected topic shop.orders\n")
        # The stream runs again: written at once, not with the next second's progress.
        note({})
        assert run() == "healthy: the job makes progress\n"
    crash(file, 0.0)
    run("--liveness", expect=1)
    file.write_text("[]")
    assert "expected the health file" in run(expect=2)
