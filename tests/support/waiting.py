"""Polling of a condition, with a deadline."""

import time
from collections.abc import Callable


def wait_for(
    condition: Callable[[], bool], what: str, seconds: float = 90, pause: float = 0.05
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"expected {what} within {seconds} s"
        time.sleep(pause)
