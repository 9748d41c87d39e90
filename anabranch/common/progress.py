"""Progress of long work: done, rate and remaining time, from its third second on.

On a terminal it is the last line, below the log's lines, and disappears with the work. Elsewhere it
is a log line when a part of the work is done, or when the current unit changes: after two seconds,
then after four more, up to once a minute. If nothing can be written, as on a closed terminal, the
work continues without progress.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from anabranch.common.logs import readable_handler

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

LOG = logging.getLogger(__name__)

_PATIENCE = 2.0
_LONGEST_PAUSE = 60.0
_SPANS = (("a second", 1), ("a minute", 60), ("an hour", 3600))


@dataclass(frozen=True)
class HowFar:
    """`done` of `total` units (None: unknown). For units of different sizes, `contained` of `whole`
    `contents`, from which the remaining time is estimated."""

    units: str
    total: int | None = None
    contents: str = ""
    whole: int | None = None
    done: int = 0
    contained: int = 0

    def text(self, seconds: float, since: float = 0.0, brief: bool = False) -> str:
        """Format the progress after `seconds` of work, with the last update `since` seconds ago.
        Rate and remaining time appear once something is done; an overdue update lowers the rate.
        `brief` leaves out the counts of contents. Pure."""
        of = "" if self.total is None else f" of {self.total:,}"
        parts = [f"{self.done:,}{of} {self.units}"]
        if self.contents and not brief:
            of = "" if self.whole is None else f" of {self.whole:,}"
            parts.append(f"{self.contained:,}{of} {self.contents}")
        done, whole = (self.contained, self.whole) if self.contents else (self.done, self.total)
        if done and seconds > 0:
            rest = None if whole is None else (whole - done) / done
            is_late = rest is not None and rest * seconds < since
            rate = done / (seconds + since if is_late else seconds)
            parts.append(_rate(rate, self.contents if brief else ""))
            if rest is not None:
                left = done * rest / rate - (0 if is_late else since)
                parts.append(f"about {timedelta(seconds=round(left))} left")
        return ", ".join(parts)


def _rate(a_second: float, contents: str) -> str:
    span, seconds = next((s for s in _SPANS if a_second * s[1] >= 1), _SPANS[-1])
    each = a_second * seconds
    shown = f"{each:,.0f}" if each >= 10 else f"{each:.1f}".removesuffix(".0")
    return f"{shown} {contents} {span}" if contents else f"{shown} {span}"


class Progress:
    """Context manager that shows the progress of a piece of work.

    The work has `total` units, or units of the given `sizes` in `contents`. A piece inside another
    one is shown, on a terminal, by log lines.
    """

    def __init__(
        self,
        log: logging.Logger,
        doing: str,
        units: str,
        total: int | None = None,
        sizes: tuple[int, ...] = (),
        contents: str = "",
    ) -> None:
        self._log, self._doing, self._sizes = log, doing, sizes
        self._at = HowFar(
            units, len(sizes) if contents else total, contents, sum(sizes) if contents else None
        )
        self._began = self._news = time.monotonic()
        self._reported, self._pause = self._began, _PATIENCE
        self._in_place = False
        self._beside = ""
        self._open = ExitStack()

    def __enter__(self) -> Progress:
        handler = readable_handler()
        if handler is not None and _can_overwrite(handler.stream):
            self._in_place = True
            self._open.enter_context(_LastLine(handler, self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._open.close()

    def expect(self, total: int) -> None:
        """Set the number of units once it is known."""
        self._at = replace(self._at, total=total)

    def part(self, contained: int) -> None:
        """Add contents done of the current unit."""
        before = sum(self._sizes[: self._at.done])
        most = before + (self._sizes[self._at.done] if self._at.done < len(self._sizes) else 0)
        self._report(replace(self._at, contained=min(most, self._at.contained + contained)))

    def step(self, units: int = 1) -> None:
        """Add units done."""
        done = self._at.done + units
        self._report(replace(self._at, done=done, contained=sum(self._sizes[:done])))

    def beside(self, text: str) -> None:
        """Set the name of the current step, shown beside the progress; empty for none.
        Thread-safe."""
        self._beside = text
        if text and self._may_log(time.monotonic()):
            self._log.info("%s", self.line())

    def line(self) -> str:
        """Return the terminal's last line as of now."""
        now = time.monotonic()
        if self._at.done or self._at.contained:
            text = self._at.text(self._news - self._began, now - self._news, brief=True)
        else:
            text = (
                f"{self._at.text(0, brief=True)}, {timedelta(seconds=int(now - self._began))} so "
                "far"
            )
        return f"{self._doing}: {text}" + (f"; {self._beside}" if self._beside else "")

    def _report(self, at: HowFar) -> None:
        self._at, self._news = at, time.monotonic()
        if at.done != at.total and self._may_log(self._news):
            self._log.info("%s: %s", self._doing, at.text(self._news - self._began))

    def _may_log(self, now: float) -> bool:
        """Return whether a line may be logged now; if so, start the next pause."""
        if self._in_place or now - self._reported < self._pause:
            return False
        self._reported, self._pause = now, min(_LONGEST_PAUSE, 2 * self._pause)
        return True


@contextmanager
def repeating(update: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call `update` every `seconds` in a thread until the block ends. An error in `update` ends the
    calls only."""
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


def _can_overwrite(stream: TextIO) -> bool:
    """Return whether the stream is a terminal whose last line can be overwritten."""
    if os.environ.get("TERM", "dumb") in ("dumb", ""):
        return False
    with suppress(ValueError):  # It is closed.
        return stream.isatty()
    return False


class _LastLine:
    """The last line of a terminal, from the third second on; log lines appear above it."""

    def __init__(self, handler: logging.StreamHandler[Any], progress: Progress) -> None:
        from rich.console import Console
        from rich.live import Live

        self._handler, self._progress = handler, progress
        self._console = Console(file=handler.stream, highlight=False, markup=False, emoji=False)
        # Standard output is for results, and may be another file.
        self._live = Live(
            get_renderable=self._line,
            console=self._console,
            transient=True,
            refresh_per_second=4,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._timer = threading.Timer(_PATIENCE, self._show)
        self._timer.daemon = True
        self._alone = threading.Lock()
        self._ended = False

    def __enter__(self) -> None:
        self._stream = self._handler.stream
        self._handler.setStream(_LinesAbove(self._console))
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._alone:
            self._ended = True
            with suppress(OSError, ValueError):
                self._live.stop()
        self._handler.setStream(self._stream)

    def _show(self) -> None:
        with self._alone:
            if not self._ended:
                with suppress(OSError, ValueError):
                    self._live.start(refresh=True)

    def _line(self) -> Text:
        from rich.text import Text

        return Text(self._progress.line(), no_wrap=True, overflow="ellipsis")


class _LinesAbove(io.TextIOBase):
    """A stream whose lines appear above a terminal's last line."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        if line := text.removesuffix("\n"):
            self._console.print(line, soft_wrap=True)
        return len(text)
