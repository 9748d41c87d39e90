"""Parallel calls with a time limit, so that a service that hangs does not block the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from anabranch.common.errors import AnabranchError, NoAnswer
from anabranch.common.remote_errors import explain

T = TypeVar("T")


def start(name: str, call: Callable[[], T]) -> Future[T]:
    """Start the call in a daemon thread, for which the process does not wait at its end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def call_within(seconds: float, name: str, call: Callable[[], T], no_answer: AnabranchError) -> T:
    """Return the call's value, or raise its error. Raises `no_answer` after `seconds`; the call's
    thread is then abandoned."""
    future = start(name, call)
    if not wait([future], seconds).done:
        raise no_answer
    return future.result()


@dataclass
class Answers:
    """The time, by `time.monotonic`, of a service's last answer to a request of a reading."""

    last: float = 0.0

    def note(self) -> None:
        self.last = time.monotonic()


class TimedRead(Generic[T]):
    """A reading that starts when created, in a daemon thread: the process does not wait."""

    def __init__(
        self,
        name: str,
        read: Callable[[], T],
        limit: float = threading.TIMEOUT_MAX,
        doing: str = "examine",
        answers: Answers | None = None,
    ) -> None:
        self.name, self.doing = name, doing
        self._read, self._limit = read, limit
        self._began = time.monotonic()
        self._answers = answers or Answers()
        self._took: float | None = None
        self.is_given_up = False
        self._answer = start(f"read-{name}", self._run)

    def _run(self) -> T | AnabranchError:
        try:
            return self._read()
        except Exception as error:
            return explain(f"{self.doing} {self.name}", error)
        finally:
            self._took = time.monotonic() - self._began

    @property
    def has_ended(self) -> bool:
        return self._answer.done()

    @property
    def last_sign(self) -> float:
        """The time, by `time.monotonic`, at which the reading ended, else of its service's last
        answer, else of its start."""
        return max(self._began + (self._took or 0.0), self._answers.last)

    def give_up(self) -> None:
        """Stop waiting for the reading, unless it has ended."""
        if not self.has_ended:
            self.is_given_up = True
            self._limit = time.monotonic() - self._began

    def wait(self) -> None:
        """Wait until the reading ends, or `limit` seconds have passed since it began."""
        wait([self._answer], max(0.0, self._began + self._limit - time.monotonic()))

    def facts(self) -> T | AnabranchError:
        """Return the result or the reader's error; NoAnswer if the reading was given up or did not
        end within `limit` seconds of its start."""
        self.wait()
        if not self.has_ended:
            self.is_given_up = True
            return NoAnswer(
                f"{self.doing} {self.name}: expected a result within {self._limit:.0f} s, found "
                "none; check that it answers"
            )
        return self._answer.result()

    @property
    def seconds(self) -> float:
        """Duration of the reading so far, until it ended, or until it was given up."""
        if self._took is None and self.is_given_up:
            return self._limit
        return self._took if self._took is not None else time.monotonic() - self._began


def wait_for_all(readings: Sequence[TimedRead[T]], seconds: float) -> None:
    """Wait until all readings have ended. If `seconds` pass in which none ended or noted an answer,
    give up the rest. Many readings, and slow services that answer, thus get the time that they
    need; a service that hangs costs `seconds`."""
    while waiting := [
        reading for reading in readings if not (reading.has_ended or reading.is_given_up)
    ]:
        rest = max(reading.last_sign for reading in readings) + seconds - time.monotonic()
        if rest <= 0:
            for reading in waiting:
                reading.give_up()
            return
        wait([reading._answer for reading in waiting], rest, FIRST_COMPLETED)


Note = Callable[[str], None]
"""A function that takes the name of the service waited for from now on, such as `KAFKA`."""

LAKE, KAFKA = "the catalog or the store", "Kafka"


def ask_all(
    asks: Mapping[str, Callable[[Note], T]],
    limit: float,
    at_once: int,
    doing: str = "ask",
    since_last_answer: bool = False,
) -> dict[str, T | AnabranchError]:
    """Call all, at most `at_once` in parallel, and return each value or error by name, in the given
    order. A call without an answer after `limit` seconds gets a NoAnswer, which names the service
    that it waits for.

    With `since_last_answer`, the limit restarts at each answer of any call: many calls get the time
    that they need. Calls run in daemon threads, for which neither the caller nor the process waits.
    """
    ended = time.monotonic() + limit
    answers: dict[str, T | AnabranchError] = {}
    waits_for: dict[str, str] = {}
    left = iter(asks.items())
    changed = threading.Condition()

    def work() -> None:
        nonlocal ended
        while True:
            with changed:
                name, ask = next(left, (None, None))
                if name is None or ask is None or time.monotonic() >= ended:
                    return
                waits_for[name] = "it"
            try:
                answer: T | AnabranchError = ask(partial(waits_for.__setitem__, name))
            except Exception as error:
                answer = explain(f"{doing} {name}", error)
            with changed:
                answers[name] = answer
                if since_last_answer:
                    ended = time.monotonic() + limit
                changed.notify()

    for i in range(min(at_once, len(asks))):
        threading.Thread(target=work, name=f"{doing}-{i}", daemon=True).start()
    with changed:
        while len(answers) < len(asks) and (wait := ended - time.monotonic()) > 0:
            changed.wait(wait)
        return {
            name: answers[name]
            if name in answers
            else _no_answer(doing, name, waits_for.get(name), limit)
            for name in asks
        }


def _no_answer(doing: str, name: str, waits_for: str | None, limit: float) -> NoAnswer:
    seconds = f"{round(limit, 1):g} s"
    if waits_for is None:
        return NoAnswer(
            f"{doing} {name}: not asked within {seconds}, because the streams before it did not "
            "answer; try again once they do"
        )
    return NoAnswer(
        f"{doing} {name}: expected an answer within {seconds}, found none from {waits_for}; try "
        "again once it answers"
    )
