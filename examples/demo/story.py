"""The output of a demo: numbered steps with the elapsed time, and a spinner during a wait.

Without a terminal, progress is printed every 10 seconds instead. A brief story fits on one screen:
no details, no progress.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TypeVar

from rich.console import Console
from rich.markup import escape

from anabranch.common.errors import Transient
from anabranch.common.output import print_table

T = TypeVar("T")

_POLL_SECONDS = 0.5
_SAY_EVERY_SECONDS = 10.0


class Story:
    """Prints the steps of a demo to standard output."""

    def __init__(self, is_brief: bool = False) -> None:
        self.is_brief = is_brief
        self._console = Console(highlight=False, soft_wrap=True)
        self._began = time.monotonic()
        self._steps = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def title(self, text: str) -> None:
        self._print(f"[bold]{escape(text)}[/]")

    def step(self, text: str) -> None:
        self._steps += 1
        gap = "" if self.is_brief else "\n"
        self._print(f"{gap}[bold cyan]{self._clock()}  {self._steps}. {escape(text)}[/]")

    def say(self, text: str, style: str = "none") -> None:
        self._print(f"      [{style}]{escape(text)}[/]")

    def detail(self, text: str) -> None:
        """Print a line, unless the story is brief."""
        if not self.is_brief:
            self.say(text)

    def command(self, arguments: Sequence[str]) -> None:
        self.say(
            "$ anabranch " + " ".join(f'"{a}"' if " " in a else a for a in arguments), "bold green"
        )

    def output(self, text: str) -> None:
        """Print the output of a command, indented."""
        for line in text.rstrip().splitlines():
            self.say(line, "dim" if self._console.is_terminal else "none")

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        with redirect_stdout(io.StringIO()) as text:
            print_table(columns, rows)
        self.output(text.getvalue())

    @contextmanager
    def awaiting(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show the name of a wait, and provide a function that updates its details."""
        printed_at = time.monotonic()

        def show(detail: str) -> None:
            nonlocal printed_at
            if self._console.is_terminal:
                status.update(escape(f"{what}: {detail}"))
            elif not self.is_brief and time.monotonic() - printed_at >= _SAY_EVERY_SECONDS:
                printed_at = time.monotonic()
                self.say(f"… {what}: {detail}")

        if self._console.is_terminal:
            with self._console.status(escape(what)) as status:
                yield show
        else:
            yield show

    def _clock(self) -> str:
        minutes, seconds = divmod(int(self.seconds), 60)
        return f"{minutes}:{seconds:02}"

    def _print(self, markup: str) -> None:
        self._console.print(markup)
        sys.stdout.flush()


def poll(
    question: Callable[[], T | None],
    awaited: str,
    seconds: float,
    check: Callable[[], None] | None = None,
) -> T:
    """Call `question` until its result is not None, and return that. `check` may raise when waiting
    is useless.

    Raises Transient, with `awaited`, after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        if check is not None:
            check()
        if (answer := question()) is not None:
            return answer
        if time.monotonic() > deadline:
            raise Transient(
                f"expected {awaited} within {seconds:.0f} s, found that it has not happened; try "
                "again"
            )
        time.sleep(_POLL_SECONDS)
