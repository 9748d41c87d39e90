"""Calls that run in parallel, with a time limit, so that one service that hangs does not block the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from anabranch.common.errors import AnabranchError, NoAnswer
from anabranch.common.remote_errors import explain

T = TypeVar("T")


class Reading(Generic[T]):
    """Begins to read at once, in a thread that the process does not wait for when it ends."""

    def __init__(self, name: str, read: Callable[[], T], limit: float, doing: str = "examine") -> None:
        self.name, self.doing = name, doing
        self._read, self._limit = read, limit
        self._began = time.monotonic()
        self._took: float | None = None
        self.is_given_up = False
        self._value: T | None = None
        self._error: AnabranchError | None = None
        self._thread = threading.Thread(target=self._run, name=f"read-{name}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._read()
        except Exception as error:
            self._error = explain(f"{self.doing} {self.name}", error)
        self._took = time.monotonic() - self._began

    @property
    def has_ended(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait until it has ended, or `limit` seconds have passed since it began."""
        self._thread.join(max(0.0, self._began + self._limit - time.monotonic()))

    def facts(self) -> T | AnabranchError:
        """The result, or why there is none: the reader's error, or NoAnswer when `limit` seconds have
        passed since it began."""
        self.wait()
        if self._thread.is_alive():
            self.is_given_up = True
            return NoAnswer(f"{self.doing} {self.name}: found no end within {self._limit:.0f} s")
        if self._error is not None:
            return self._error
        assert self._value is not None
        return self._value

    @property
    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        return self._took if self._took is not None else time.monotonic() - self._began
