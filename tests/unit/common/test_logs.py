"""Logging: our own events from INFO on, of everybody else only warnings."""

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lakes import FIRST, new_lake

from anabranch.common import logs
from anabranch.common.logs import Progress, configure_logging, fields, note, of_process, repeating

LOG = logging.getLogger("anabranch.test")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    logs._PROCESS_FIELDS.clear()


@pytest.mark.parametrize(
    ("name", "heard"), [("__main__", True), ("speed_layer.job", True), ("kafka.net", False)]
)
def test_a_job_is_heard_as_the_module_that_spark_submit_runs_too(name: str, heard: bool) -> None:
    configure_logging()
    assert logging.getLogger(name).isEnabledFor(logging.INFO) is heard


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_an_event_has_fields_of_process_thread_and_all(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(as_json=True)
    of_process(stream="events", layer="batch")

    def other() -> None:
        LOG.info("beside")

    with fields(hour=FIRST):
        note(attempt="a")
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with fields(offsets={"0": [0, 3]}):
            note(publish="p")
            LOG.info("inside")
        LOG.info("around")
    note(attempt="nobody's")
    LOG.info("behind")
    ours = {"stream": "events", "layer": "batch"}
    every = ("at", "level", "logger", "message")
    logged = [(str(line["message"]), line) for line in lines(capsys)]
    events = {said: {k: v for k, v in line.items() if k not in every} for said, line in logged}
    around = ours | {"hour": FIRST, "attempt": "a"}
    inside = around | {"offsets": {"0": [0, 3]}, "publish": "p"}
    assert events == {"beside": ours, "inside": inside, "around": around, "behind": ours}
    with fields(message="mine", level="mine"):
        LOG.info("said")
    [last] = lines(capsys)
    assert (last["message"], last["level"]) == ("said", "INFO")


def test_a_publish_is_found_by_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake = new_lake(tmp_path)
    publish = lake.speed(lake.stage([(FIRST, 0, 0)]), {0: 1})
    configure_logging(as_json=True)
    with fields():
        lake.land(publish)
        LOG.info("published")
    event = lines(capsys)[-1]
    refs = lake.table().metadata.refs
    assert event["publish"] == publish.id
    assert event["snapshots"] == {branch: refs[branch].snapshot_id for branch in ("main", "speed")}


# Progress of long work in a log.


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> list[float]:
    """Seconds that pass when a test says so."""
    caplog.set_level(logging.INFO)
    now = [100.0]
    monkeypatch.setattr("anabranch.common.logs.time.monotonic", lambda: now[0])
    return now


SIZES = (1_000_000,) * 48


@pytest.mark.parametrize(
    ("units", "of", "done", "seconds", "said"),
    [
        (
            "hours", {"sizes": SIZES, "contents": "offsets"}, 12, 600,
            "12 of 48 hours, 12,000,000 of 48,000,000 offsets, 20,000 a second, about 0:30:00 left",
        ),
        # Refused at once, as an hour that Kafka lost.
        ("hours", {"sizes": (0, 10), "contents": "offsets"}, 1, 0.1, "1 of 2 hours, 0 of 10 offsets, 0:00:00 so far"),
        ("hours", {"total": 9}, 3, 540, "3 of 9 hours, 20 an hour, about 0:18:00 left"),
        ("hours", {"total": 9}, 3, 60, "3 of 9 hours, 3 a minute, about 0:02:00 left"),
        ("files", {"total": 4}, 4, 4, "4 of 4 files, 1 a second, about 0:00:00 left"),
        ("files", {}, 34_000, 10, "34,000 files, 3,400 a second"),
    ],
)  # fmt: skip
def test_progress_shows_position_rate_and_remaining_time(
    clock: list[float], units: str, of: Any, done: int, seconds: float, said: str
) -> None:
    progress = Progress(LOG, "audit s", units, **of)
    clock[0] += seconds
    progress.step(done)
    assert progress.line() == f"audit s: {said}"


def test_a_log_hears_ever_more_seldom(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress(LOG, "audit s", "hours", 10_000)
    for _ in range(9_999):
        clock[0] += 0.5
        progress.step()
    clock[0] += 60
    progress.step()
    lines = caplog.messages
    assert lines[0] == "audit s: 4 of 10,000 hours, 2 a second, about 1:23:18 left"
    # Once a minute in the end; that all is done the result says.
    seconds = [int(line.split()[2].replace(",", "")) // 2 for line in lines]
    assert seconds == [2, 6, 14, 30, 62, *range(122, 5_000, 60)]


def test_quick_work_shows_no_progress_and_a_part_counts_within_its_unit(
    caplog: pytest.LogCaptureFixture, clock: list[float]
) -> None:
    caplog.set_level(logging.INFO)
    progress = Progress(LOG, "audit s", "hours", 3)
    for _ in range(3):
        progress.step()
    assert caplog.messages == []
    slow = Progress(LOG, "audit s", "hours", sizes=(100, 300), contents="offsets")
    clock[0] += 2
    slow.part(50)
    assert " 0 of 2 hours, 50 of 400 offsets, 25 a second, about 0:00:14 left" in slow.line()
    slow.part(90)
    assert " 0 of 2 hours, 100 of 400 offsets" in slow.line()
    slow.step()
    slow.part(150)
    assert " 1 of 2 hours, 250 of 400 offsets" in slow.line()


def test_the_step_is_shown_and_logged(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress(LOG, "stream s", "hours", 2)
    for done in range(60):
        clock[0] += 1
        progress.beside(f"hour 3: read, {done} of 60 tasks")
    progress.beside("")
    assert progress.line() == "stream s: 0 of 2 hours, 0:01:00 so far"
    progress.step()
    clock[0] += 60
    progress.beside("hour 4: read, 1 of 60 tasks")
    *waiting, last = caplog.messages
    so_far = "stream s: 0 of 2 hours, 0:00:{:02} so far; hour 3: read, {} of 60 tasks"
    assert waiting == [so_far.format(s, s - 1) for s in (2, 6, 14, 30)]
    left = "30 an hour, about 0:02:00 left"
    assert last == f"stream s: 1 of 2 hours, {left}; hour 4: read, 1 of 60 tasks"


def test_updates_repeat_until_the_end_or_the_first_that_fails() -> None:
    count, enough = 0, threading.Event()

    def update() -> None:
        nonlocal count
        count += 1
        if count == 3:
            enough.set()

    with repeating(update, 0.001):
        assert enough.wait(10)
    assert "progress" not in {thread.name for thread in threading.enumerate()}
    count, called = 0, threading.Event()

    def fail() -> None:
        nonlocal count
        count += 1
        called.set()
        raise OSError("closed")

    with repeating(fail, 0.001):
        assert called.wait(10)
    assert count == 1
