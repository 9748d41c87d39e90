"""Fail points: named, counted, deadly when armed and nothing otherwise."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from anabranch.common import errors, fail_points
from anabranch.common.fail_points import Step, parse, reach


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    fail_points._armed.cache_clear()
    yield
    fail_points._armed.cache_clear()


def test_unarmed_steps_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[signal.Signals] = []
    monkeypatch.setattr(fail_points, "_signal", sent.append)
    monkeypatch.delenv(fail_points.FAIL_AT, raising=False)
    monkeypatch.delenv(fail_points.PAUSE_AT, raising=False)
    for step in Step:
        reach(step)
    assert sent == []
    # The hazard: one of the same calls, armed, ends the process.
    fail_points._armed.cache_clear()
    monkeypatch.setenv(fail_points.FAIL_AT, Step.SEAL_DECIDED.label)
    for step in Step:
        reach(step)
    assert sent == [signal.SIGKILL]


@pytest.mark.parametrize(
    "value", ["speed.nowhere", "", ":2", "speed.staged:0", "speed.staged:x", "speed.staged:-1"]
)
def test_an_unknown_step_is_an_error_with_the_known_steps(value: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=r"ANABRANCH_FAIL_AT: expected"):
        parse(value)


def test_a_step_is_armed_by_itself_at_its_nth_time(monkeypatch: pytest.MonkeyPatch) -> None:
    armed = parse("speed.staged:2")
    reached = (Step.SPEED_STAGED, Step.SEAL_DECIDED, Step.SPEED_STAGED, Step.SPEED_STAGED)
    assert [armed.is_now(step) for step in reached] == [False, False, True, False]
    monkeypatch.setenv(fail_points.FAIL_AT, "commit.answer-lost")
    reach(Step.COMMIT_REQUEST_LOST)
    with pytest.raises(ConnectionError, match=r"commit\.answer-lost"):
        reach(Step.COMMIT_ANSWER_LOST)
    reach(Step.COMMIT_ANSWER_LOST)
    fail_points._armed.cache_clear()
    monkeypatch.setenv(fail_points.FAIL_AT, "commit.request-lost,commit.answer-lost:2")
    with pytest.raises(ConnectionError, match=r"commit\.request-lost"):
        reach(Step.COMMIT_REQUEST_LOST)
    reach(Step.COMMIT_REQUEST_LOST)
    reach(Step.COMMIT_ANSWER_LOST)
    with pytest.raises(ConnectionError, match=r"commit\.answer-lost"):
        reach(Step.COMMIT_ANSWER_LOST)


def test_the_process_ends_as_kill_9_would() -> None:
    script = """
import atexit
from anabranch.common.fail_points import Step, reach
atexit.register(lambda: print("tidied up", flush=True))
try:
    reach(Step.SEAL_DECIDED)
    print("once", flush=True)
    reach(Step.SEAL_DECIDED)
finally:
    print("tidied up", flush=True)
"""
    environment = os.environ | {fail_points.FAIL_AT: "seal.decided:2"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "once\n")
    assert "fail point seal.decided" in done.stderr


def test_a_paused_process_continues() -> None:
    script = "from anabranch.common.fail_points import Step, reach; reach(Step.SEAL_DECIDED); print('went on')"
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True,
        env=os.environ | {fail_points.PAUSE_AT: "seal.decided"},
    )  # fmt: skip
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=300)[0] == "went on\n"
    finally:
        process.kill()
