"""Progress of long work in the log: done, rate and remaining time.

A line is logged when a part of the work is done, or when its current step changes: after two
seconds, then after four more, up to once a minute.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

LOG = logging.getLogger(__name__)

_PATIENCE = 2.0
_LONGEST_PAUSE = 60.0
_SPANS = (("a second", 1), ("a minute", 60), ("an hour", 3600))


class Progress:
    """The progress of a piece of work of `total` units (None: unknown), or of units of the given
    `sizes` in `contents`, from which the remaining time is estimated."""

    def __init__(
        self,
        log: logging.Logger,
        doing: str,
        units: str,
        total: int | None = None,
        sizes: tuple[int, ...] = (),
        contents: str = "",
    ) -> None:
        self._log, self._doing, self._units, self._sizes = log, doing, units, sizes
        self._contents, self._total = contents, len(sizes) if contents else total
        self._done = self._contained = 0
        self._began = self._logged = time.monotonic()
        self._pause, self._beside = _PATIENCE, ""

    def expect(self, total: int) -> None:
        """Set the number of units once it is known."""
        self._total = total

    def part(self, contained: int) -> None:
        """Add contents done of the current unit."""
        most = sum(self._sizes[: self._done + 1])
        self._contained = min(most, self._contained + contained)
        self._log_at_times()

    def step(self, units: int = 1) -> None:
        """Add units done."""
        self._done += units
        self._contained = sum(self._sizes[: self._done])
        if self._done != self._total:
            self._log_at_times()

    def beside(self, text: str) -> None:
        """Set the name of the current step, shown beside the progress; empty for none."""
        self._beside = text
        if text:
            self._log_at_times()

    def line(self) -> str:
        """Return the progress as of now. Rate and remaining time appear once something is done."""
        seconds, contents = time.monotonic() - self._began, self._contents
        parts = [f"{_part(self._done, self._total)} {self._units}"]
        done, whole = self._done, self._total
        if contents:
            done, whole = self._contained, sum(self._sizes)
            parts.append(f"{_part(done, whole)} {contents}")
        if done and seconds > 0:
            parts.append(_rate(done / seconds))
            if whole is not None:
                left = (whole - done) / done * seconds
                parts.append(f"about {timedelta(seconds=round(left))} left")
        else:
            parts.append(f"{timedelta(seconds=int(seconds))} so far")
        return f"{self._doing}: {', '.join(parts)}" + (f"; {self._beside}" if self._beside else "")

    def _log_at_times(self) -> None:
        now = time.monotonic()
        if now - self._logged >= self._pause:
            self._logged, self._pause = now, min(_LONGEST_PAUSE, 2 * self._pause)
            self._log.info("%s", self.line())


def _part(done: int, whole: int | None) -> str:
    return f"{done:,}" if whole is None else f"{done:,} of {whole:,}"


def _rate(a_second: float) -> str:
    span, seconds = next((s for s in _SPANS if a_second * s[1] >= 1), _SPANS[-1])
    each = a_second * seconds
    return f"{each:,.0f} {span}" if each >= 10 else f"{each:.1f} {span}".replace(".0 ", " ")


@contextmanager
def repeating(update: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call `update` every `seconds` in a thread until the block ends, or `update` fails."""
    ended = threading.Event()

    def run() -> None:
        try:
            while not ended.wait(seconds):
                update()
        except Exception:
            LOG.debug("progress updates ended", exc_info=True)

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(seconds)
