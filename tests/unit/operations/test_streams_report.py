"""`anabranch status --list`: every stream of the folder, whether its table is there, and what is wrong
with its file."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from conf_folders import write_environment
from lakes import new_environment

from anabranch.cli import main
from anabranch.iceberg import admin
from anabranch.iceberg.lake import Lake
from anabranch.protocol.ledger import LEDGER_SCHEMA


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    write_environment(tmp_path)
    for name, group in (("a", "small"), ("b", "small"), ("c", "large")):
        stream = {
            "topic": f"t-{name}", "table": f"raw.{name}", "key": "id", "schema": "id STRING",
            "group": group,
        }  # fmt: skip
        (tmp_path / "streams" / f"{name}.yaml").write_text(yaml.safe_dump(stream))
    return tmp_path


def run(conf: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["status", "--list", *arguments, "--conf", str(conf)])


def as_json(conf: Path, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(conf, *arguments, "--output", "json").stdout)
    return found


def test_every_stream_is_listed_with_its_table(conf: Path) -> None:
    assert admin.create(Lake(new_environment(conf)), "raw.a", LEDGER_SCHEMA, (), {})
    found = as_json(conf)
    assert [(s["stream"], s["group"], s["topic"], s["table"], s["state"]) for s in found] == [
        ("a", "small", "t-a", "raw.a", "ready"),
        ("b", "small", "t-b", "raw.b", "new"),
        ("c", "large", "t-c", "raw.c", "new"),
    ]
    assert run(conf).exit_code == 0


def test_a_wrong_file_is_named_beside_the_others(conf: Path) -> None:
    (conf / "streams" / "b.yaml").write_text("group: small\ntopic: t\n")
    result = run(conf, "--group", "small")
    assert result.exit_code == 1
    assert "streams/b.yaml: table: required key, found none" in result.stdout
    assert [(s["stream"], s["group"], s["state"]) for s in as_json(conf, "--group", "small")] == [
        ("a", "small", "new"),
        ("b", "small", "broken"),
    ]


def test_a_table_of_two_streams_is_broken_for_the_second(conf: Path) -> None:
    text = (conf / "streams" / "a.yaml").read_text()
    (conf / "streams" / "b.yaml").write_text(text)
    found = {s["stream"]: s for s in as_json(conf)}
    assert {name: s["state"] for name, s in found.items()} == {
        "a": "new",
        "b": "broken",
        "c": "new",
    }
    assert "expected a table of its own" in found["b"]["error"]


def test_a_catalog_that_does_not_answer_is_named(conf: Path) -> None:
    environment = yaml.safe_load((conf / "anabranch.yaml").read_text())
    environment["catalog"] |= {"type": "rest", "uri": "http://127.0.0.1:1"}
    (conf / "anabranch.yaml").write_text(yaml.safe_dump(environment))
    found = as_json(conf, "a")
    assert (found[0]["state"], found[0]["topic"]) == ("unknown", "t-a")
    assert "catalog" in found[0]["error"]
    assert run(conf, "a").exit_code == 1
