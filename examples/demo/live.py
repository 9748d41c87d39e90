"""Live events that a thread sends at a rate until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING

from anabranch.common.deadline import start
from anabranch.common.errors import Terminal
from anabranch.dev.producers.events import Ack, Sent
from anabranch.dev.producers.produce import produce_events

if TYPE_CHECKING:
    from anabranch.job import Job


class Live:
    """A thread that sends game events in real time; `dirty`: also duplicate, late and malformed
    ones."""

    def __init__(self, job: Job, rate: float, seed: int = 2, dirty: bool = True) -> None:
        self._job, self._rate, self._seed, self._dirty = job, rate, seed, dirty
        self._stop = threading.Event()
        self._count = 0
        self._sent = Future[Sent]()

    def count(self) -> int:
        """Return the number of acknowledged events so far."""
        return self._count

    @property
    def sent(self) -> Sent:
        """The account of the events, after the thread has ended. Raises Terminal if it failed."""
        if (failure := self._sent.exception(0)) is not None:
            raise Terminal(
                f"the live events: expected all to be sent, found {failure}"
            ) from failure
        return self._sent.result()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send until the end of the `with`."""
        self._sent = start("live events", self._send)
        try:
            yield
        finally:
            self._stop.set()
            wait([self._sent], 150)

    def _send(self) -> Sent:
        def on_ack(ack: Ack) -> None:
            self._count += 1

        return produce_events(
            self._job.environment.kafka,
            self._job.stream.topic,
            events=None,
            rate=self._rate,
            seed=self._seed,
            dirty=self._dirty,
            stop=self._stop,
            on_ack=on_ack,
        )
