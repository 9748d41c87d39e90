"""`--watch`: repeat a report until interrupted."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from anabranch.cli.options import DURATION


def watch_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--watch` and `--every` to a command."""
    every = click.option(
        "--every",
        "interval",
        default="5 seconds",
        show_default=True,
        type=DURATION,
        help="Interval of --watch.",
    )
    return click.option("--watch", is_flag=True, help="Repeat until stopped.")(every(command))


def watched(
    watch: bool, every: timedelta, read: Callable[[], Any], show: Callable[[Any], None]
) -> Any:
    """Read, show and return the value once, or repeat at an interval until interrupted.

    On a terminal, a new report replaces the previous one once it has been read. A Transient error
    is printed instead of a report, and the next read follows: watching is most useful during an
    outage.
    """
    from anabranch.common.errors import Transient

    pause = max(0.1, every.total_seconds())
    if not watch:
        value = read()
        show(value)
        return value
    # An interrupt is the normal end of --watch.
    with suppress(KeyboardInterrupt):
        while True:
            try:
                value, failure = read(), None
            except Transient as error:
                value, failure = None, str(error)
            if sys.stdout.isatty():
                click.clear()
                at = datetime.now(UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
                click.echo(f"{at} UTC, again every {pause:g} s; Ctrl-C ends", err=True)
            if failure is None:
                show(value)
            else:
                click.echo(failure, err=True)
            time.sleep(pause)
    return None
