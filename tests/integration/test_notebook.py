"""docs/notebook/events_by_minute.ipynb, from its first cell to its picture, over hours of each kind.

With `PAGE_PICTURES=docs/images` it draws the picture of the documentation.
"""

import base64
import math
import os
import random
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from lakes import FIRST, StreamLake, new_lake
from nbclient import NotebookClient
from proofs import accept, event, stage_rows

from anabranch.iceberg.commits import Outcome
from anabranch.offsets.hours import Cut, Timeline, hour_of, shift, start_of

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "notebook" / "events_by_minute.ipynb"
HOURS = [shift(FIRST, n) for n in range(4)]
UNTIL = start_of(HOURS[-1]) + timedelta(minutes=24, seconds=40)


def _rows() -> list[dict[str, Any]]:
    """Events of three hours and a part of the fourth, in waves."""
    dice, rows = random.Random(7), []
    minute = start_of(FIRST)
    while minute < UNTIL:
        seconds = min(60.0, (UNTIL - minute).total_seconds())
        waves = 40 + 16 * math.sin(minute.timestamp() / 2000) + dice.gauss(0, 4)
        for at in sorted(dice.uniform(0, seconds) for _ in range(int(waves * seconds / 60))):
            moment = minute + timedelta(seconds=at)
            rows.append(event(0, len(rows), hour_of(moment), kafka_timestamp=moment))
        minute += timedelta(minutes=1)
    return rows


@pytest.fixture
def one(tmp_path: Path) -> StreamLake:
    """The first two hours are accepted, the third is sealed, the fourth is the running one."""
    rows = _rows()
    by_hour = {hour: [row for row in rows if row["ingest_hour"] == hour] for hour in HOURS}
    ends, cuts = 0, {}
    for hour in HOURS[:-1]:
        start, ends = ends, ends + len(by_hour[hour])
        cuts[hour] = Cut("t", {0: (start, ends)})
    timeline = Timeline(FIRST, HOURS[-1], {0: ends}, sealed=cuts)
    made = new_lake(tmp_path, 1, timeline, owner="game_events")
    published = made.speed(stage_rows(made, rows), {0: len(rows)}, read_until=UNTIL)
    assert made.publish(published) is Outcome.LANDED
    for hour in HOURS[:2]:
        accept(made, hour, cuts[hour], by_hour[hour])
    catalog = {
        "name": "lake",
        "uri": f"sqlite:///{tmp_path}/catalog.db",
        "warehouse": f"file://{tmp_path}/warehouse",
    }
    stream = {
        "topic": "events", "table": made.name, "format": "json", "key": "id",
        "schema": "id STRING NOT NULL, n INT",
    }  # fmt: skip
    (tmp_path / "streams").mkdir()
    environment = {"kafka": {"bootstrap_servers": "127.0.0.1:1"}, "catalog": catalog}
    (tmp_path / "anabranch.yaml").write_text(yaml.safe_dump(environment), "utf-8")
    (tmp_path / "streams" / "game_events.yaml").write_text(yaml.safe_dump(stream), "utf-8")
    return made


def test_the_notebook_has_its_picture(one: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_CONF", str(one.folder))
    monkeypatch.setenv("IPYTHONDIR", str(one.folder / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = [cell.outputs[-1]["data"] for cell in notebook.cells if cell.cell_type == "code"]
    assert len(shown) == 4
    assert f"complete_through='{HOURS[1]}'" in shown[0]["text/plain"]
    assert repr(UNTIL.astimezone(UTC)) in shown[0]["text/plain"]
    assert "not accepted yet" in shown[1]["text/plain"]
    assert "the hour is not sealed" in shown[1]["text/plain"]
    picture = base64.b64decode(shown[-1]["image/png"])
    assert picture.startswith(b"\x89PNG")
    if folder := os.environ.get("PAGE_PICTURES"):
        (Path(folder) / "events-by-minute.png").write_bytes(picture)
