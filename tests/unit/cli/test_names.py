"""Names from files and command lines never leave their place in SQL, paths or arguments."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from conf_folders import said, write_environment, write_stream

from anabranch.common.errors import ConfigurationError
from anabranch.config import load_environment, load_stream
from anabranch.offsets.hours import start_of

HOSTILE = [
    "", " ", "a b", "a-b", "a\n", "a\x00b", "a;b", "a'b", 'a"b', "a`b", "a/b", "../a", "..",
    "/etc/passwd", "${HOME}", "%s", "a' OR 1=1 --", "a`; DROP TABLE events; --", "-rf", "--conf",
    "\uff41", "1a",
]  # fmt: skip
CATALOG = {"uri": "sqlite:///none.db", "warehouse": "s3://none/warehouse"}
COMMANDS = [
    "apply", "speed", "batch", "merge", "hours", "history", "status", "complete", "check",
    "erasures", "adopt", "maintain", "audit", "dead-letters",
]  # fmt: skip


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    folder = tmp_path / "conf"
    write_environment(folder)
    change(folder)
    # What a path that leaves its folder would find.
    for place in (tmp_path, folder):
        shutil.copy(folder / "streams" / "events.yaml", place / "a.yaml")
    # The base case is valid.
    assert load_stream("events", folder).columns and load_environment(folder)
    return folder


def change(conf: Path, **values: Any) -> None:
    write_stream(conf, "events", **{"schema": "id STRING NOT NULL, at TIMESTAMP"} | values)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_stream_a_table_a_key_a_column_and_the_catalog(conf: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match="expected a name"):
        load_stream(name, conf)
    tables = ({"table": f"games.{name}"}, {"table": f"{name}.events"})
    for values in (*tables, {"key": name}, {"event_time": {"column": name}}):
        change(conf, **values)
        with pytest.raises(ConfigurationError):
            load_stream("events", conf)
    write_environment(conf, catalog=CATALOG | {"name": name})
    with pytest.raises(ConfigurationError):
        load_environment(conf)


@pytest.mark.parametrize("name", [name for name in HOSTILE if name and not name.startswith("-")])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_stream_of_a_command_line(conf: Path, command: str, name: str) -> None:
    assert "expected a name" in said(command, name, "--conf", str(conf), expect=2)


@pytest.mark.parametrize(
    "name", [n for n in HOSTILE if n not in ("a-b", "..", "1a", "--conf", "-rf")]
)
def test_a_topic(conf: Path, name: str) -> None:
    change(conf, topic=name)
    with pytest.raises(ConfigurationError):
        load_stream("events", conf)


@pytest.mark.parametrize(
    "name", [name for name in HOSTILE if "`" not in name and "\x00" not in name]
)
@pytest.mark.parametrize(
    "ddl", ["`{}` STRING", "a STRUCT<`{}`: INT>", "a ARRAY<STRUCT<b: STRUCT<`{}`: INT>>>"]
)
def test_a_column_however_deep(conf: Path, ddl: str, name: str) -> None:
    change(conf, schema=f"id STRING NOT NULL, {ddl.format(name)}")
    with pytest.raises(ConfigurationError):
        load_stream("events", conf)


@pytest.mark.parametrize(
    "hour",
    [
        *HOSTILE, "2026-11-21", "2026-11-21T3", "2026-11-21T24", "2026-11-21T03:00", "yesterday",
        "2026-11-21T03\n", "2026-11-21T03' OR '1'='1",
        "\uff12\uff10\uff12\uff16-11-21T03",
    ],
)  # fmt: skip
def test_an_hour(conf: Path, hour: str) -> None:
    with pytest.raises(ConfigurationError, match="expected a UTC hour"):
        start_of(hour)
    _refuse(conf, hour, "expected a UTC hour")


def test_an_hour_at_the_end_of_time(conf: Path) -> None:
    """As the end of A..B, where an operator wants all later hours."""
    _refuse(conf, "2026-11-21T03..9999-12-31T23", "expected one that ends, found 9999-12-31T23")


def _refuse(conf: Path, hour: str, message: str) -> None:
    for command in (["batch", "events", "--hour", hour], ["audit", "events", "--hours", hour]):
        assert message in said(*command, "--conf", str(conf), expect=2)
