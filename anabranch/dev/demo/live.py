"""Live events that a thread sends at a rate until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from anabranch.common.errors import Terminal
from anabranch.dev.producers.events import Ack, Sent
from anabranch.dev.producers.produce import produce_events

if TYPE_CHECKING:
    from anabranch.job import Job


class Live:
    """A thread that sends game events in real time, also duplicate, late and malformed ones."""

    def __init__(self, job: Job, rate: float, seed: int = 2) -> None:
        self._job, self._rate, self._seed = job, rate, seed
        self._stop = threading.Event()
        self._count = 0
        self._failure: BaseException | None = None
        self._sent: Sent | None = None

    def count(self) -> int:
        """Return the number of acknowledged events so far."""
        return self._count

    @property
    def sent(self) -> Sent:
        """The account of the events, after the thread has ended. Raises Terminal if it failed."""
        if self._failure is not None:
            raise Terminal(
                f"the live events: expected all to be sent, found {self._failure}"
            ) from self._failure
        assert self._sent is not None
        return self._sent

    @contextmanager
    def running(self) -> Iterator[None]:
        """Send until the end of the `with`."""
        thread = threading.Thread(target=self._send, name="live events", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(150)

    def _send(self) -> None:
        def on_ack(ack: Ack) -> None:
            self._count += 1

        try:
            self._sent = produce_events(
                self._job.environment.kafka,
                self._job.stream.topic,
                events=None,
                rate=self._rate,
                seed=self._seed,
                dirty=True,
                stop=self._stop,
                on_ack=on_ack,
            )
        except BaseException as error:
            self._failure = error
