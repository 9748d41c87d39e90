"""Logging: one line an event, readable on a terminal, JSON when `ANABRANCH_LOG=json` (deployed).

In JSON an event has the fields of docs/reference/cli.md, "Output and logs", from the enclosing
`fields` blocks and `note` calls. These belong to the thread; `stream` and `layer` to the process.

`Progress` logs long work: done, rate and remaining time. A line is logged when a part of the work
is done, or when its current step changes: after two seconds, then after four more, up to once a
minute.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TextIO

from anabranch.common.errors import redact

_PROCESS_FIELDS: dict[str, Any] = {}
_THREAD_FIELDS: ContextVar[dict[str, Any] | None] = ContextVar(
    "anabranch.common.logs", default=None
)


def of_process(**values: Any) -> None:
    """Add these fields to every event of this process, in all threads."""
    _PROCESS_FIELDS.update(values)


@contextmanager
def fields(**values: Any) -> Iterator[None]:
    """Add these fields to every event that this thread logs inside the block."""
    token = _THREAD_FIELDS.set((_THREAD_FIELDS.get() or {}) | values)
    try:
        yield
    finally:
        _THREAD_FIELDS.reset(token)


def note(**values: Any) -> None:
    """Add fields to later events of the enclosing `fields` block; do nothing outside of one."""
    if (around := _THREAD_FIELDS.get()) is not None:
        around.update(values)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        now = _PROCESS_FIELDS | (_THREAD_FIELDS.get() or {})
        line |= {key: value for key, value in now.items() if key not in line}
        if record.exc_info:
            line["exception"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, default=str)


class _Plain(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


def configure_logging(as_json: bool = False) -> None:
    """Log our own events to standard error, and only warnings of other libraries. Idempotent."""
    handler = logging.StreamHandler(_standard_error())
    handler.setFormatter(
        _Json() if as_json or os.environ.get("ANABRANCH_LOG") == "json" else _Plain()
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # A job that spark-submit runs logs as __main__.
    for name in ("__main__", "anabranch", "speed_layer", "batch_layer", "serving_layer"):
        logging.getLogger(name).setLevel(logging.INFO)


def _standard_error() -> TextIO:
    """Return the stream to log to. spark-submit joins a Python job's standard error to its standard
    output, which is for results: so our command line names its own, used if it can be opened."""
    named = os.environ.get("ANABRANCH_STDERR")
    if named is not None:
        with suppress(OSError):
            return Path(named).open("a", encoding="utf-8", buffering=1)
    return sys.stderr


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

    def more(self, units: int) -> None:
        """Add units to those expected."""
        self._total = (self._total or 0) + units

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
        """Set the current step's name, shown beside the progress; empty: none. Thread-safe."""
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
