"""The retry policy: pauses, limits, what passes at once, and the log line of each failure."""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import islice, repeat
from pathlib import Path

import pytest
from running import TRIED_AGAIN

from anabranch import config, spark
from anabranch.common import counters, remote_errors, temporary
from anabranch.common import retry as attempts_module
from anabranch.common.errors import (
    ConfigurationError,
    NotYet,
    Terminal,
    Transient,
    Unexpected,
    Unexplained,
)
from anabranch.common.retry import UNEXPLAINED_TRIES, Retry, attempts, doubling, jitter
from anabranch.kafka.client import KafkaAdapter

QUICK = timedelta(milliseconds=10)


def _failing(*errors: Exception) -> Callable[[], str]:
    """An action that raises each error once, then works."""
    left: Iterator[Exception] = iter(errors)

    def action() -> str:
        if error := next(left, None):
            raise error
        return "done"

    return action


def _retry(limit: timedelta | None = None, pause: timedelta = QUICK) -> Retry:
    return Retry(limit, threading.Event(), pause)


def _away(times: int) -> Callable[[], str]:
    return _failing(*[Transient("away")] * times)


def _growing(failing: Callable[[], str], grows: Callable[[], bool]) -> str:
    """Call what fails; what it publishes grows before."""
    published = [0]

    def action() -> str:
        published[0] += 10 * grows()
        return failing()

    return _retry().call("stream s", action, lambda: published[0])


def test_each_failure_is_one_line_that_names_the_next_try(caplog: pytest.LogCaptureFixture) -> None:
    assert _retry().call("stream s", _failing()) == "done"
    assert not caplog.records
    none = Transient("ask Kafka: none")
    assert _retry().call("stream s", _failing(none, none)) == "done"
    assert [re.sub(r"in [0-9.]+ s", "in P s", r.getMessage()) for r in caplog.records] == [
        "stream s: try 1 failed: ask Kafka: none; try 2 in P s (no time limit)",
        "stream s: try 2 failed: ask Kafka: none; try 3 in P s (no time limit)",
    ]
    assert {r.levelno for r in caplog.records} == {logging.WARNING}
    _retry(timedelta(minutes=15)).call("stream s", _failing(Transient("away")))
    assert re.search(r"try 2 in [0-9.]+ s \(until \d\d:\d\d:\d\d UTC\)", caplog.text)


@pytest.mark.parametrize(
    ("message", "service"),
    [
        ("ask Kafka for the end of topic events: KafkaTimeoutError (transient, try again)", "kafka"),
        ("read s3://lake/warehouse/kafka/metadata.json: SlowDown (transient, try again)", "s3"),
        ("load table games.events: (sqlite3.OperationalError) database is locked", "catalog"),
        ("ask the schema registry for http://registry/schemas/ids/1: none", "registry"),
        ("hour 2026-11-21T00: expected its staged snapshot, found it gone; try again", "other"),
    ],
)  # fmt: skip
def test_each_failure_is_counted_by_its_service(message: str, service: str) -> None:
    before, error = counters.TALLY.totals(), Transient(message)
    assert _retry().call("stream s", _failing(error, error)) == "done"
    assert counters.TALLY.totals() - before == {(counters.RETRIES, service): 2}


def test_the_class_of_a_java_exception_names_the_service() -> None:
    error = Transient("publish a micro-batch: it may pass")
    cause = "Caused by: software.amazon.awssdk.services.s3.model.S3Exception: (Status Code: 503)"
    error.__cause__ = RuntimeError(cause)
    assert remote_errors.asked_service(error) == "s3"


@pytest.mark.parametrize(
    "error", [Terminal("no"), ConfigurationError("no"), NotYet("not yet"), Unexpected("no")]
)
def test_a_permanent_error_is_raised(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(type(error)) as raised:
        _retry().call("stream s", _failing(error))
    assert raised.value is error
    assert not caplog.records


def test_after_the_limit_the_last_failure_ends_it_with_exit_code_75() -> None:
    def always() -> str:
        raise Transient("ask S3: none")

    began = time.monotonic()
    found = r"stream s: given up after \d+ tries within 0:00:01: ask S3"
    with pytest.raises(Transient, match=found):
        _retry(timedelta(seconds=1), timedelta(milliseconds=200)).call("stream s", always)
    assert time.monotonic() - began < 2


def test_pauses_are_random_capped_and_ended_by_a_stop(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _retry(pause=timedelta(milliseconds=50)).call("stream s", _failing(*[Transient("away")] * 12))
    pauses = [float(value) for value in re.findall(r"in ([0-9.]+) s \(", caplog.text)]
    assert len(pauses) == 12 and max(pauses) <= 0.1
    monkeypatch.setattr("random.uniform", lambda _, high: high)
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    began = time.monotonic()
    with pytest.raises(Transient, match="stop requested"):
        Retry(None, stop).call("stream s", _failing(*[Transient("away")] * 9))
    assert time.monotonic() - began < 0.9


def test_progress_between_two_failures_forgets_the_first(caplog: pytest.LogCaptureFixture) -> None:
    _growing(_away(4), lambda: len(caplog.records) == 2)
    assert re.findall(r"try (\d) failed", caplog.text) == ["1", "2", "1", "2"]


def test_progress_resets_the_count_of_unexplained_errors_and_an_outage_does_not() -> None:
    """The worst moment: an outage hides that an unknown error comes back after each pause."""
    unknown = Unexplained("who knows")
    with pytest.raises(Unexpected, match="who knows"):
        _retry().call("stream s", _failing(*[unknown, Transient("away")] * (UNEXPLAINED_TRIES + 1)))
    assert _growing(_failing(*[unknown] * (3 * UNEXPLAINED_TRIES)), lambda: True) == "done"


def test_a_permanent_or_unexplained_error_ends_the_job(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(Unexpected, match="OverflowError: date value out of range"):
        _retry().call("stream s", _failing(OverflowError("date value out of range")))
    assert not caplog.records
    tries: list[int] = []

    def always() -> str:
        tries.append(1)
        raise KeyError("an unknown name")

    found = r"stream s: given up after 5 tries.*KeyError: 'an unknown name'"
    with pytest.raises(Unexpected, match=found) as raised:
        _retry().call("stream s", always)
    assert (len(tries), raised.value.exit_code) == (UNEXPLAINED_TRIES, 70)
    assert "(unexplained 4 of 5, no time limit)" in caplog.text


def test_any_error_during_a_stop_is_transient() -> None:
    stop = threading.Event()

    def stopped_in_the_middle() -> str:
        stop.set()
        raise RuntimeError("a query that is being stopped says anything")

    with pytest.raises(Transient) as raised:
        Retry(None, stop).call("stream s", stopped_in_the_middle)
    assert raised.value.exit_code == 75


@pytest.mark.parametrize("limit", [None, timedelta(minutes=1)])
def test_the_line_of_a_next_try(caplog: pytest.LogCaptureFixture, limit: timedelta | None) -> None:
    """Else what asserts that nothing was tried again could not fail."""
    action = _failing(Transient("s3: away"), Unexplained("what?"))
    Retry(limit, threading.Event(), longest_pause=QUICK).call("stream s", action)
    assert [bool(TRIED_AGAIN.search(line)) for line in caplog.messages] == [True, True]


# Trying again within seconds: how often, how long, and with which pauses. Nothing here sleeps.


class Clock:
    """A time that only what is done takes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(attempts_module, "time", made)
    return made


def test_the_last_attempt_begins_within_the_time_of_all_attempts(clock: Clock) -> None:
    assert list(attempts(doubling(1.0, 4.0), seconds=10)) == [1, 2, 3, 4, 5]
    assert clock.pauses == [1, 2, 4, 4]
    numbers = []
    for number in attempts(repeat(1.0), seconds=10):
        numbers.append(number)
        clock.now += 6
    assert (numbers, clock.pauses[4:]) == ([1, 2], [1])


def test_pauses_are_random_capped_and_one_where_there_is_no_time(clock: Clock) -> None:
    assert list(islice(doubling(0.05, 0.3), 5)) == [0.05, 0.1, 0.2, 0.3, 0.3]
    assert list(islice(doubling(2.0), 3)) == [2, 4, 8]
    pauses = list(islice(jitter(0.1), 200))
    assert all(0 <= pause <= 0.1 for pause in pauses) and len(set(pauses)) > 100
    assert list(attempts(repeat(1.0), seconds=0)) == [1]


def test_a_lock_is_awaited_up_to_a_deadline(clock: Clock, tmp_path: Path) -> None:
    calls: list[bool] = []
    with (
        temporary.locked(tmp_path / "lock", 5),
        pytest.raises(Transient, match=r"lock .*lock: expected it within 1 s"),
        temporary.locked(tmp_path / "lock", 1, lambda: calls.append(True)),
    ):
        pytest.fail("two have one lock")
    assert calls == [True], "reported once"
    assert sum(clock.pauses) == pytest.approx(1.0, abs=0.11)
    with temporary.locked(tmp_path / "lock", 1, lambda: calls.append(True)):
        assert calls == [True]


@pytest.mark.parametrize("failures", [0, 3, 4])
def test_jars_are_requested_four_times(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    answers, lines = iter([["no network"]] * failures + [None]), list[str]()
    monkeypatch.setattr(spark.jars, "_run_ivy", lambda *_: next(answers))
    if failures < spark.jars.ATTEMPTS:
        spark.jars._retrieve(tmp_path, tmp_path, tmp_path, tmp_path, 1, lines.append)
    else:
        with pytest.raises(Transient, match=r"in 4 attempts.*\n.*no network"):
            spark.jars._retrieve(tmp_path, tmp_path, tmp_path, tmp_path, 1, lines.append)
    pauses = [2, 4, 8][:failures]
    assert clock.pauses == pauses
    named = [f"download failed: no network; next try in {pause} s" for pause in pauses]
    assert [line for line in lines if "failed" in line] == named


@pytest.mark.parametrize(("doubtful", "attempts"), [(0, 1), (2, 3), (1_000, 11)])
def test_a_doubtful_answer_is_requested_again_over_new_connections_for_five_seconds(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, doubtful: int, attempts: int
) -> None:
    adapter, steps = KafkaAdapter(config.Kafka(bootstrap_servers="127.0.0.1:1")), list[str]()
    monkeypatch.setattr(adapter, "close", lambda: steps.append("close"))

    def question() -> int:
        steps.append("ask")
        return steps.count("ask") - 1

    assert adapter._confirmed(question, lambda answer: answer < doubtful) == attempts - 1
    # Before each further question, and not after the last.
    assert steps == ["ask", *["close", "ask"] * (attempts - 1)]
    assert clock.pauses == [0.5] * (attempts - 1)
