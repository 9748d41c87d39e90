"""Logging: our own events from INFO on, of everybody else only warnings."""

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from lakes import FIRST, new_lake

from anabranch.common import logs
from anabranch.common.logs import configure_logging, fields, note, of_process

LOG = logging.getLogger("anabranch.test")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = before
    logs._PROCESS_FIELDS.clear()


@pytest.mark.parametrize(
    ("name", "heard"), [("__main__", True), ("speed_layer.job", True), ("kafka.net", False)]
)
def test_a_job_is_heard_as_the_module_that_spark_submit_runs_too(name: str, heard: bool) -> None:
    configure_logging()
    assert logging.getLogger(name).isEnabledFor(logging.INFO) is heard


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_an_event_has_its_processs_and_threads_fields(capsys: pytest.CaptureFixture[str]) -> None:
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
    events = {
        str(line["message"]): {
            k: v for k, v in line.items() if k not in ("at", "level", "logger", "message")
        }
        for line in lines(capsys)
    }
    assert events == {
        "beside": ours,
        "inside": ours | {"hour": FIRST, "attempt": "a", "offsets": {"0": [0, 3]}, "publish": "p"},
        "around": ours | {"hour": FIRST, "attempt": "a"},
        "behind": ours,
    }


def test_a_field_never_replaces_a_field_of_every_event(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(as_json=True)
    with fields(message="mine", level="mine"):
        LOG.info("said")
    [line] = lines(capsys)
    assert (line["message"], line["level"]) == ("said", "INFO")


def test_a_publish_is_found_by_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lake = new_lake(tmp_path)
    staged = lake.stage([(FIRST, 0, 0)])
    publish = lake.speed(staged, {0: 1})
    configure_logging(as_json=True)
    with fields():
        lake.land(publish)
        LOG.info("published")
    event = lines(capsys)[-1]
    refs = lake.table().metadata.refs
    assert event["publish"] == publish.id
    assert event["snapshots"] == {branch: refs[branch].snapshot_id for branch in ("main", "speed")}
