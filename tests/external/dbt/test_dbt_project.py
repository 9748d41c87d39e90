"""The dbt project of docs/how-to/dbt.md: what its models hold is what the table serves.

`make test-suite WHAT=dbt` runs it, in an environment that has dbt-duckdb beside the project's own.
"""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml
from lakes import StreamLake
from proofs import BEFORE, CUT, HOUR, NEXT, accept, event, new_proof, read

from anabranch.offsets.hours import end_of, shift
from anabranch.protocol import acts
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.watermarks import Watermarks

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "dbt.md"
OPEN = shift(NEXT, 1)
PROJECT = """
name: warehouse
profile: warehouse
flags: {send_anonymous_usage_stats: false}
"""


@dataclass(frozen=True)
class Project:
    """The page's files, over a lake whose stream is the page's."""

    one: StreamLake
    folder: Path

    def dbt(self, *arguments: str) -> None:
        """Run a command of dbt's that must succeed."""
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "ANABRANCH_CONF": str(self.one.folder),
            "DBT_PROFILES_DIR": str(self.folder),
        }
        command = ["dbt", *arguments, "--vars", "{day: '2026-11-21'}"]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip

    def ask(self, sql: str) -> list[tuple[Any, ...]]:
        with duckdb.connect(str(self.folder / "warehouse.duckdb"), read_only=True) as connection:
            return connection.sql(sql).fetchall()

    def held(self) -> list[tuple[Any, ...]]:
        columns = "ingest_hour, kafka_partition, kafka_offset, n"
        return self.ask(f"select {columns} from complete_events order by all")

    def served(self, *hours: str) -> list[tuple[Any, ...]]:
        """The rows that `main` has of these hours."""
        columns = ("ingest_hour", "kafka_partition", "kafka_offset", "n")
        rows = self.one.table().scan(selected_fields=columns).to_arrow().to_pylist()
        return sorted(tuple(row[c] for c in columns) for row in rows if row["ingest_hour"] in hours)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """HOUR is accepted with 4 rows, NEXT is sealed and read with 6, the open hour has one."""
    one = new_proof(tmp_path / "lake", name="game_events")
    read(one, [event(0, o, HOUR) for o in range(4)], {0: 4})
    accept(one, HOUR, BEFORE, [event(0, o, HOUR) for o in range(4)])
    read(one, [event(0, o) for o in range(4, 10)], {0: 10})
    read(one, [event(0, 10, OPEN)], {0: 11})
    conf: dict[str, dict[str, Any]] = {
        "anabranch.yaml": {
            "kafka": {"bootstrap_servers": "127.0.0.1:1"},
            "catalog": {
                "name": "lake",
                "uri": f"sqlite:///{one.folder}/catalog.db",
                "warehouse": f"file://{one.folder}/warehouse",
            },
        },
        "streams/game_events.yaml": {
            "topic": one.stream.topic, "table": one.name, "format": "json", "key": "id",
            "schema": "id STRING NOT NULL, n INT",
        },
    }  # fmt: skip
    (one.folder / "streams").mkdir()
    for name, content in conf.items():
        (one.folder / name).write_text(yaml.safe_dump(content), "utf-8")
    folder = tmp_path / "warehouse"
    (folder / "models").mkdir(parents=True)
    (folder / "dbt_project.yml").write_text(PROJECT, "utf-8")
    text = PAGE.read_text("utf-8")
    files = re.findall(r"^```\w+\n(?:#|--) (\S+)\n(.*?)^```", text, re.M | re.S)
    assert len(files) == 6
    for name, content in files:
        (folder / name).write_text(content, "utf-8")
    return Project(one, folder)


def restate(one: StreamLake, revision: int, rows: list[dict[str, Any]]) -> None:
    accept(one, HOUR, BEFORE, rows, revision=revision)


def test_the_models_contain_the_tables_rows_through_restatements(project: Project) -> None:
    one = project.one
    project.dbt("run")
    assert project.held() == project.served(HOUR)
    assert project.ask("from events_by_hour") == [(HOUR, 4)]
    assert sorted(project.ask("from events_of_day")) == [(HOUR, 4), (NEXT, 6), (OPEN, 1)]
    loaded = project.ask("select distinct loaded_at from complete_events")

    # Nothing new: nothing is written. Then a restated hour, an accepted one, and one without rows.
    project.dbt("run", "--select", "complete_events")
    assert project.ask("select distinct loaded_at from complete_events") == loaded
    restate(one, 2, [event(0, 0, HOUR, n=7)])
    accept(one, NEXT, CUT, [event(0, o) for o in range(4, 9)])
    project.dbt("run")
    assert project.held() == project.served(HOUR, NEXT)
    assert project.ask("from events_by_hour order by all") == [(HOUR, 1), (NEXT, 5)]
    restate(one, 3, [])
    acts.serve_hour(Publisher(one.lake, one.stream), NEXT, "speed", "the rule is wrong")
    project.dbt("run")
    assert project.held() == project.served(HOUR, NEXT) == project.served(NEXT)
    assert project.ask("from events_by_hour") == [(NEXT, 6)]


def test_freshness_is_that_of_the_tables_promise(project: Project) -> None:
    """Days ago, which is more than what the page allows."""
    promised = Watermarks.from_properties(project.one.table().properties).fresh_through
    assert promised == end_of(NEXT)
    done = project.run("source", "freshness")
    assert (done.returncode, "ERROR STALE" in done.stdout) == (1, True), done.stdout + done.stderr
    [found] = json.loads((project.folder / "target" / "sources.json").read_text("utf-8"))["results"]
    assert (datetime.fromisoformat(found["max_loaded_at"]), found["status"]) == (promised, "error")
