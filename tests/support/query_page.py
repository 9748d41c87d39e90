"""docs/how-to/query.md: its code by section, a stream for its queries, the results in Python."""

import json
import os
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml
from programs import output_of
from world import Make, World, event

from anabranch.iceberg.catalog_settings import catalog_properties
from anabranch.offsets.hours import start_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "query.md"
SCHEMA = "event_id STRING NOT NULL, player_id STRING NOT NULL, event_time TIMESTAMP NOT NULL"
DAY = "2026-11-21"

# Runs the blocks of each section in order, and prints the answer of each.
RUN = """
import json, sys
from anabranch.common.output import plain

def rows_of(answer):
    if isinstance(answer, int):
        return [[answer]]
    if hasattr(answer, "to_arrow_table"):
        answer = answer.to_arrow_table()
    if hasattr(answer, "to_pylist"):
        return [list(row.values()) for row in answer.to_pylist()]
    return answer.values.tolist()

answers = {}
for section, blocks in json.load(sys.stdin).items():
    names = {}
    for block in blocks:
        exec(block, names)
        answers.setdefault(section, []).append(plain(rows_of(names["answer"])))
json.dump(answers, sys.stdout)
"""


def queried_world(world: Make) -> tuple[World, str]:
    """Return a stream with published records, and their day, which replaces the page's day."""
    day = (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%d")
    one = world(schema=SCHEMA, partitions=2)
    _send(one, day)
    one.serve()
    return one, day


def sections_of_page(one: World, day: str) -> dict[str, list[str]]:
    """Return the code blocks of each section by heading, for this stream and day."""
    text = PAGE.read_text("utf-8").replace("games.game_events", one.job.stream.table)
    text = text.replace('open("game_events")', f'open("{one.name}")').replace(DAY, day)
    parts = re.split(r"^## (.*)\n", text, flags=re.MULTILINE)
    found = [re.findall(r"^```\w+\n(.*?)^```", body, re.M | re.S) for body in parts[2::2]]
    return {title: of for title, of in zip(parts[1::2], found, strict=True) if of}


def _send(world: World, day: str) -> None:
    """Send events of three hours, some late, and one player's at the ends of time windows."""
    values = []
    for i in range(240):
        at = start_of(f"{day}T09") + timedelta(minutes=i * 45 / 60, seconds=i % 7)
        happened = at - timedelta(days=1) if i % 19 == 0 else at
        values.append((i % 2, at, event(f"e{i:03}", happened, player_id=f"p{i % (5 + i % 9)}")))
    for i, second in enumerate((0, 600, 1799, 1800)):
        at = start_of(f"{day}T10") + timedelta(seconds=second)
        received = start_of(f"{day}T11") + timedelta(minutes=59, seconds=i)
        values.append((0, received, event(f"x{i}", at, player_id="p7")))
    world.send(sorted(values, key=lambda value: value[1]))


def run_python(one: World, sections: dict[str, list[str]]) -> dict[str, list[list[list[Any]]]]:
    """Run sections in another process, with PyIceberg's own catalog file and file system."""
    properties = catalog_properties(one.job.environment)
    properties = {k: v for k, v in properties.items() if k != "py-io-impl"}
    (one.folder / ".pyiceberg.yaml").write_text(yaml.safe_dump({"catalog": {"lake": properties}}))
    names = ("PYICEBERG_HOME", "ANABRANCH_CONF")
    environment = os.environ | dict.fromkeys(names, str(one.folder))
    given = json.dumps(sections)
    return dict(json.loads(output_of(sys.executable, "-c", RUN, input=given, env=environment)))
