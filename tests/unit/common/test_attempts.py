"""Trying again within seconds: how often, how long, and with which pauses. Nothing here sleeps."""

from itertools import islice, repeat
from pathlib import Path

import pytest

from anabranch.common import retry as attempts_module
from anabranch.common.errors import Transient
from anabranch.common.retry import attempts, doubling, jitter
from anabranch.common.temporary import locked
from anabranch.config import Kafka
from anabranch.kafka.client import KafkaAdapter
from anabranch.spark import jars


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


def test_a_loop_that_succeeds_at_once_pauses_never(clock: Clock) -> None:
    for number in attempts(repeat(1.0), seconds=10):
        assert number == 1
        break
    assert clock.pauses == []


def test_the_last_attempt_begins_within_the_time_or_a_pause_behind_it(clock: Clock) -> None:
    assert list(attempts(doubling(1.0, 4.0), seconds=10)) == [1, 2, 3, 4, 5]
    assert clock.pauses == [1, 2, 4, 4]


def test_the_duration_of_an_attempt_counts(clock: Clock) -> None:
    numbers = []
    for number in attempts(repeat(1.0), seconds=10):
        numbers.append(number)
        clock.now += 6
    assert (numbers, clock.pauses) == ([1, 2], [1])


def test_there_is_one_attempt_whatever_the_time(clock: Clock) -> None:
    assert list(attempts(repeat(1.0), seconds=0)) == [1]


def test_no_pause_follows_the_last_of_so_many(clock: Clock) -> None:
    assert list(attempts(doubling(2.0), at_most=4)) == [1, 2, 3, 4]
    assert clock.pauses == [2, 4, 8]


def test_pauses() -> None:
    assert list(islice(doubling(0.05, 0.3), 5)) == [0.05, 0.1, 0.2, 0.3, 0.3]
    assert list(islice(doubling(2.0), 3)) == [2, 4, 8]
    pauses = list(islice(jitter(0.1), 200))
    assert all(0 <= pause <= 0.1 for pause in pauses)
    assert len(set(pauses)) > 100


def test_a_lock_is_awaited_up_to_a_deadline(clock: Clock, tmp_path: Path) -> None:
    calls: list[bool] = []
    with (
        locked(tmp_path / "lock", 5),
        pytest.raises(Transient, match=r"lock .*lock: expected it within 1 s"),
        locked(tmp_path / "lock", 1, lambda: calls.append(True)),
    ):
        pytest.fail("two have one lock")
    assert calls == [True], "reported once"
    assert sum(clock.pauses) == pytest.approx(1.0, abs=0.11)
    with locked(tmp_path / "lock", 1, lambda: calls.append(True)):
        assert calls == [True]


@pytest.mark.parametrize("failures", [0, 3, 4])
def test_jars_are_requested_four_times(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    answers, lines = iter([["no network"]] * failures + [None]), list[str]()
    monkeypatch.setattr(jars, "_run_ivy", lambda *_: next(answers))
    if failures < jars.ATTEMPTS:
        jars._retrieve(tmp_path, tmp_path, tmp_path, tmp_path, 1, lines.append)
    else:
        with pytest.raises(Transient, match=r"in 4 attempts.*\n.*no network"):
            jars._retrieve(tmp_path, tmp_path, tmp_path, tmp_path, 1, lines.append)
    pauses = [2, 4, 8][:failures]
    assert clock.pauses == pauses
    assert [line for line in lines if "failed" in line] == [
        f"download failed: no network; next try in {pause} s" for pause in pauses
    ]


@pytest.mark.parametrize(("doubtful", "attempts"), [(0, 1), (2, 3), (1_000, 11)])
def test_a_doubtful_answer_is_requested_again_over_new_connections_for_five_seconds(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, doubtful: int, attempts: int
) -> None:
    adapter, answers, closed = (
        KafkaAdapter(Kafka(bootstrap_servers="127.0.0.1:1")),
        list[int](),
        list[int](),
    )
    monkeypatch.setattr(adapter, "close", lambda: closed.append(len(answers)))

    def question() -> int:
        answers.append(len(answers))
        return answers[-1]

    assert adapter._confirmed(question, lambda answer: answer < doubtful) == attempts - 1
    assert closed == list(range(1, attempts)), (
        "before each further question, and not after the last"
    )
    assert clock.pauses == [0.5] * (attempts - 1)
