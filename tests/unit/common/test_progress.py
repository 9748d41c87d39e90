"""Progress of long work, on a terminal and in a log."""

from __future__ import annotations

import errno
import io
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from anabranch.common.logs import configure_logging, readable_handler
from anabranch.common.progress import HowFar, Progress, repeating

LOG = logging.getLogger("anabranch.tests.progress")


@pytest.mark.parametrize(
    ("at", "seconds", "since", "brief", "said"),
    [
        (
            HowFar("hours", 48, "offsets", 48_000_000, 12, 12_000_000),
            600.0,
            0.0,
            False,
            "12 of 48 hours, 12,000,000 of 48,000,000 offsets, 20,000 a second, about 0:30:00 left",
        ),
        (
            HowFar("hours", 48, "offsets", 48_000_000, 12, 12_000_000),
            600.0,
            60.0,
            True,
            "12 of 48 hours, 20,000 offsets a second, about 0:29:00 left",
        ),
        # Refused at once, as an hour that Kafka lost.
        (HowFar("hours", 2, "offsets", 10, 1), 0.1, 0.0, False, "1 of 2 hours, 0 of 10 offsets"),
        (
            HowFar("hours", 9, done=3),
            540.0,
            0.0,
            False,
            "3 of 9 hours, 20 an hour, about 0:18:00 left",
        ),
        (
            HowFar("hours", 9, done=3),
            60.0,
            0.0,
            False,
            "3 of 9 hours, 3 a minute, about 0:02:00 left",
        ),
        # Later than it was reckoned.
        (
            HowFar("files", 4, done=2),
            1.5,
            8.5,
            False,
            "2 of 4 files, 12 a minute, about 0:00:10 left",
        ),
        (
            HowFar("files", 4, done=4),
            2.0,
            2.0,
            False,
            "4 of 4 files, 1 a second, about 0:00:00 left",
        ),
        (HowFar("files", done=34_000), 10.0, 0.0, False, "34,000 files, 3,400 a second"),
    ],
)
def test_progress_shows_position_rate_and_remaining_time(
    at: HowFar, seconds: float, since: float, brief: bool, said: str
) -> None:
    assert at.text(seconds, since, brief) == said


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("anabranch.common.progress.time.monotonic", lambda: self.now)


def test_a_log_hears_of_it_after_two_seconds_and_then_ever_more_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    caplog.set_level(logging.INFO)
    with Progress(LOG, "audit s", "hours", 10_000) as progress:
        for _ in range(9_999):
            clock.now += 0.5
            progress.step()
        clock.now += 60
        progress.step()
    lines = caplog.messages
    assert lines[0] == "audit s: 4 of 10,000 hours, 2 a second, about 1:23:18 left"
    # At 2, 6, 14, 30 and 62 seconds, and once a minute from then on; that all is done the result
    # says.
    assert [int(line.split()[2].replace(",", "")) // 2 for line in lines[:6]] == [
        2,
        6,
        14,
        30,
        62,
        122,
    ]
    assert len(lines) == 5 + (9_999 // 2 - 62) // 60


def test_quick_work_shows_no_progress(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with Progress(LOG, "audit s", "hours", 3) as progress:
        for _ in range(3):
            progress.step()
    assert caplog.messages == []


def test_a_part_of_a_unit_counts_and_never_beyond_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with Progress(LOG, "audit s", "hours", sizes=(100, 300), contents="offsets") as progress:
        clock.now += 1
        assert progress.line() == "audit s: 0 of 2 hours, 0:00:01 so far"
        clock.now += 1
        progress.part(50)
        assert progress.line() == "audit s: 0 of 2 hours, 25 offsets a second, about 0:00:14 left"
        progress.part(90)
        assert progress.line() == "audit s: 0 of 2 hours, 50 offsets a second, about 0:00:06 left"
        progress.step()
        progress.part(150)
        clock.now += 2
        assert progress.line() == "audit s: 1 of 2 hours, 62 offsets a second, about 0:00:02 left"


def test_the_current_step_is_shown_beside_progress_and_logged_as_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock(monkeypatch)
    caplog.set_level(logging.INFO)
    with Progress(LOG, "stream s", "hours", 2) as progress:
        for done in range(60):
            clock.now += 1
            progress.beside(f"hour 3: read, {done} of 60 tasks")
        assert (
            progress.line()
            == "stream s: 0 of 2 hours, 0:01:00 so far; hour 3: read, 59 of 60 tasks"
        )
        progress.beside("")
        assert progress.line() == "stream s: 0 of 2 hours, 0:01:00 so far"
        progress.step()
        clock.now += 60
        progress.beside("hour 4: read, 1 of 60 tasks")
    assert caplog.messages == [
        "stream s: 0 of 2 hours, 0:00:02 so far; hour 3: read, 1 of 60 tasks",
        "stream s: 0 of 2 hours, 0:00:06 so far; hour 3: read, 5 of 60 tasks",
        "stream s: 0 of 2 hours, 0:00:14 so far; hour 3: read, 13 of 60 tasks",
        "stream s: 0 of 2 hours, 0:00:30 so far; hour 3: read, 29 of 60 tasks",
        "stream s: 1 of 2 hours, 1 a minute, about 0:00:00 left; hour 4: read, 1 of 60 tasks",
    ]


class Screen(io.StringIO):
    """A terminal; `shown` is set once it is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if "of 4 hours" in text:
            self.shown.set()
        return super().write(text)


@contextmanager
def logging_to(screen: io.StringIO) -> Iterator[None]:
    root, before = logging.getLogger(), list(logging.getLogger().handlers)
    try:
        configure_logging()
        handler = readable_handler()
        assert handler is not None
        handler.setStream(screen)
        yield
    finally:
        root.handlers[:] = before


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.common.progress._PATIENCE", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.usefixtures("soon")
def test_progress_on_a_terminal_is_the_last_line_below_the_log_and_is_removed() -> None:
    screen = Screen()
    with logging_to(screen):
        with Progress(LOG, "audit s", "hours", 4) as progress:
            assert screen.shown.wait(20), "expected the line within 20 s"
            long = "a line of the log that is longer than the terminal is wide: " + "x" * 100
            LOG.info(long)
            progress.step()
        LOG.info("and then")
    said = screen.getvalue()
    # It was wiped out before the log's line, which is whole, and at the end.
    assert "\x1b[2K" in said[: said.index(long)]
    assert said.endswith(" and then\n") and "\x1b[2K" in said[said.index(long) + len(long) :]
    # No line of the log says the same.
    assert "INFO    audit s" not in said


@pytest.mark.usefixtures("soon")
def test_a_terminal_that_cannot_go_back_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen = Screen()
    with logging_to(screen), Progress(LOG, "audit s", "hours", 4) as progress:
        deadline = time.monotonic() + 20
        while not screen.shown.is_set() and time.monotonic() < deadline:
            progress.expect(4)
            progress.step(0)
    assert "INFO    audit s: 0 of 4 hours" in screen.getvalue()
    assert "\x1b" not in screen.getvalue()


def test_an_error_restores_the_terminal(soon: None) -> None:
    screen = Screen()
    with logging_to(screen):
        with pytest.raises(ValueError, match="broken"), Progress(LOG, "audit s", "hours", 4):
            assert screen.shown.wait(20)
            raise ValueError("broken")
        handler = readable_handler()
        assert handler is not None and handler.stream is screen
    assert os.environ["TERM"] == "xterm" and screen.getvalue().count(
        "\x1b[?25l"
    ) == screen.getvalue().count("\x1b[?25h")


@pytest.mark.usefixtures("soon")
def test_a_closed_terminal_does_not_stop_the_work() -> None:
    class Gone(Screen):
        def write(self, text: str) -> int:
            if self.shown.is_set():
                raise OSError(errno.EIO, "Input/output error")
            return super().write(text)

    screen, done = Gone(), []
    with logging_to(screen), Progress(LOG, "audit s", "hours", 4) as progress:
        assert screen.shown.wait(20)
        for hour in range(4):
            progress.step()
            done.append(hour)
    assert done == [0, 1, 2, 3]


@pytest.mark.usefixtures("soon")
def test_a_log_that_is_closed_costs_the_work_nothing() -> None:
    closed = io.StringIO()
    closed.close()
    with logging_to(closed), Progress(LOG, "audit s", "hours", 4) as progress:
        progress.step(4)
    assert "4 of 4 hours" in progress.line()


def test_updates_repeat_until_the_end() -> None:
    count, enough = 0, threading.Event()

    def update() -> None:
        nonlocal count
        count += 1
        if count == 3:
            enough.set()

    with repeating(update, 0.001):
        assert enough.wait(10)
    assert "progress" not in {thread.name for thread in threading.enumerate()}


def test_an_update_that_fails_ends_the_updates_alone() -> None:
    count, called = 0, threading.Event()

    def update() -> None:
        nonlocal count
        count += 1
        called.set()
        raise OSError("closed")

    with repeating(update, 0.001):
        assert called.wait(10)
    assert count == 1
