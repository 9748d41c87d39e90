"""Calls side by side with one deadline: each answer, and who gave none."""

import threading
import time
from collections.abc import Callable

import pytest

from anabranch.common.deadline import Note, ask_all
from anabranch.common.errors import NoAnswer, Terminal


@pytest.fixture
def never() -> Callable[[Note], int]:
    """Waits for longer than any test."""

    def wait(note: Note) -> int:
        note("Kafka")
        return int(threading.Event().wait(60))

    return wait


def _refuse(note: Note) -> int:
    raise Terminal("no table")


def test_all_are_called_side_by_side_and_answer_in_their_order() -> None:
    answers = ask_all({"b": lambda note: 1, "a": _refuse, "c": lambda note: 0}, 30, 2)
    assert list(answers) == ["b", "a", "c"] and (answers["b"], answers["c"]) == (1, 0)
    assert isinstance(answers["a"], Terminal) and "no table" in str(answers["a"])
    lock, running, most = threading.Lock(), 0, 0
    met = threading.Barrier(3)

    def call(note: Note) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        met.wait(30)  # fails unless three are called at once
        with lock:
            running -= 1
        return 1

    assert list(ask_all({str(i): call for i in range(6)}, 60, 3).values()) == [1] * 6
    assert most == 3


def test_streams_that_hang_and_those_behind_them_are_named(never: Callable[[Note], int]) -> None:
    began = time.monotonic()
    answers = ask_all({"slow": never, "quick": lambda note: 1}, 0.5, 2, "stream")
    assert time.monotonic() - began < 5
    assert answers["quick"] == 1 and isinstance(answers["slow"], NoAnswer)
    why = "expected an answer within 0.5 s, found none from Kafka; try again once it answers"
    assert str(answers["slow"]) == f"stream slow: {why}"
    asks = {"a": never, "b": never, "c": never}
    answers = ask_all(asks, 0.3, 2, "stream")
    assert "found none from Kafka" in str(answers["b"])
    assert "stream c: not asked within 0.3 s" in str(answers["c"])


def test_with_a_limit_of_silence_many_get_their_time(never: Callable[[Note], int]) -> None:
    def slow(note: Note) -> int:
        time.sleep(0.2)
        return 1

    asks = {"hangs": never} | {str(i): slow for i in range(6)}
    assert sum(answer == 1 for answer in ask_all(asks, 0.5, 2).values()) < 6
    answers = ask_all(asks, 0.5, 2, "stream", since_last_answer=True)
    assert [answers[str(i)] for i in range(6)] == [1] * 6
    why = "stream hangs: expected an answer within 0.5 s, found none from Kafka"
    assert why in str(answers["hangs"])
