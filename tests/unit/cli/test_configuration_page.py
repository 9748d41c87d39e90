"""docs/reference/configuration.md has every key that the models know, and its examples are
valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from configuration_page import (
    KeyDocumentation,
    documented_keys,
    environment_keys,
    family_keys,
    page,
    stream_keys,
)

from anabranch import config

ENVIRONMENT, STREAM, FAMILY = documented_keys()
_ENVIRONMENT = {
    "kafka": {"bootstrap_servers": "127.0.0.1:1"},
    "catalog": {"name": "lake", "uri": "sqlite:///c.db", "warehouse": "file:///w"},
    "registry": {"url": "https://registry.example.com"},
}
_STREAM = {
    "topic": "orders",
    "table": "shop.orders",
    "key": "id",
    "schema": "id STRING NOT NULL, placed_at TIMESTAMP, total DECIMAL(12,2)",
    "event_time": {"column": "placed_at"},
}
# What a key needs beside it.
_BESIDE: dict[str, dict[str, Any]] = {
    "erasure.former_keys": {"erasure": {"key": "a-secret-of-this-test-alone"}},
    "catalog.type": {"catalog": {"uri": "https://catalog.example.com"}},
    "search.user": {"search": {"password": "of-this-test-alone"}},
    "format.subject": {"format": {"type": "avro"}},
    "format.delimiter": {"format": {"type": "csv"}},
    "keep.ledger": {"keep": {"rows": "30 days", "dead_letters": "30 days"}},
    "schema.from": {"format": "avro", "schema": {}},
    "schema.columns": {"format": "avro", "schema": {}},
    "schema.exclude": {"format": "avro", "schema": {}},
}
_WITH_URL = ("search",)


def _put(data: dict[str, Any], path: list[str], value: Any) -> dict[str, Any]:
    """The same with a value at a path; other values stay."""
    first, *rest = path
    before = data.get(first) if isinstance(data.get(first), dict) else {}
    return data | {first: _put(before or {}, rest, value) if rest else value}


def _examples(of_keys: dict[str, KeyDocumentation]) -> list[str]:
    return [key for key, (_, example) in of_keys.items() if example]


def _example(of_keys: dict[str, KeyDocumentation], key: str) -> Any:
    return yaml.safe_load(of_keys[key].example)


def test_every_key_is_described_and_no_other() -> None:
    assert [key.name for key in environment_keys()] == list(ENVIRONMENT)
    assert [key.name for key in stream_keys()] == list(STREAM)
    assert [key.name for key in family_keys()] == list(FAMILY)
    text = page()
    for key in (
        "`speed.trigger` |",
        "| `2 seconds` |",
        "`egress[topic].topic` |",
        "| **required** |",
    ):
        assert key in text


@pytest.mark.parametrize("key", _examples(ENVIRONMENT))
def test_an_example_of_the_environment_is_valid(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KAFKA_PASSWORD", "CATALOG_TOKEN"):
        monkeypatch.setenv(name, "of-this-test-alone")
    monkeypatch.setenv("CATALOG_URI", "postgresql+psycopg2://catalog@db/lake")
    part = key.partition(".")[0]
    data: dict[str, Any] = dict(_ENVIRONMENT)
    if part in _WITH_URL:
        data |= {part: {"url": f"https://{part}.example.com"}}
    for path, value in (_BESIDE.get(key) or {}).items():
        data = data | {path: data.get(path, {}) | value}
    data = _put(data, key.split("."), _example(ENVIRONMENT, key))
    (tmp_path / "anabranch.yaml").write_text(yaml.safe_dump(data))
    assert config.load_environment(tmp_path)


@pytest.mark.parametrize("key", _examples(STREAM))
def test_an_example_of_a_stream_is_valid(key: str, tmp_path: Path) -> None:
    (tmp_path / "streams").mkdir()
    (tmp_path / "anabranch.yaml").write_text(yaml.safe_dump(_ENVIRONMENT))
    (tmp_path / "streams" / "orders.expectations.yaml").write_text("expectations: []")
    data = dict(_STREAM) | (_BESIDE.get(key) or {})
    prefix, _, last = key.rpartition(".")
    if prefix.startswith("egress["):
        own = {
            k.rpartition(".")[2]: _example(STREAM, k) for k in STREAM if k.startswith(f"{prefix}.")
        }
        data["egress"] = [own]
        assert last in own
    elif prefix == "views.NAME":
        whole = {
            k.rpartition(".")[2]: _example(STREAM, k) for k in STREAM if k.startswith("views.NAME.")
        }
        data["views"] = {"per_minute": whole}
    else:
        data = _put(data, key.split("."), _example(STREAM, key))
    (tmp_path / "streams" / "orders.yaml").write_text(yaml.safe_dump(data))
    assert config.load_stream("orders", tmp_path).name == "orders"


@pytest.mark.parametrize("key", _examples(FAMILY))
def test_an_example_of_a_family_is_valid(key: str, tmp_path: Path) -> None:
    (tmp_path / "streams").mkdir()
    (tmp_path / "anabranch.yaml").write_text(yaml.safe_dump(_ENVIRONMENT))
    data = {**_STREAM, "topics": {"pattern": "shop-(.*)"}, "table": "shop.{1}"}
    del data["topic"]
    data = _put(data, key.split("."), _example(FAMILY, key))
    (tmp_path / "streams" / "shop.yaml").write_text(yaml.safe_dump(data))
    members = config.expand([config.load_family("shop", tmp_path)], ["shop-a", "app-a"])
    assert members and all(isinstance(member.found, config.Stream) for member in members.values())
