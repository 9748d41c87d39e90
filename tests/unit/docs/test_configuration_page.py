"""docs/reference/configuration.md: every key of the models has a meaning, and the examples are
valid. Other pages name keys that exist."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from conf_folders import write_environment, write_stream
from configuration_page import FILES, keys, page

from anabranch import config
from anabranch.config.plain import merge
from anabranch.operations.finding import Issue

_ENVIRONMENT: dict[str, Any] = {
    "kafka": {"bootstrap_servers": "127.0.0.1:1"}, "registry": {"url": "https://registry.example.com"},
    "catalog": {"name": "lake", "uri": "sqlite:///c.db", "warehouse": "file:///w"},
}  # fmt: skip
_STREAM: dict[str, Any] = {
    "topic": "orders", "table": "shop.orders", "key": "id", "event_time": {"column": "placed_at"},
    "schema": "id STRING NOT NULL, placed_at TIMESTAMP, total DECIMAL(12,2)",
}  # fmt: skip
_OF_FAMILY = {"topics": {"pattern": "shop-(.*)"}, "table": "shop.{1}"}
_FAMILY = {k: v for k, v in _STREAM.items() if k != "topic"} | _OF_FAMILY
_EXAMPLES = [
    (file, key, example)
    for file, model in FILES.items()
    for key, info in keys(model)
    for example in info.examples or ()
]
# What a key needs beside it.
_BESIDE: dict[str, Any] = {
    "views.NAME.aggregates": {"views": {"NAME": {"window": "1 minute"}}},
    "schema.exclude": {"format": "avro"},
    "format.message": {"format": {"type": "protobuf"}},
    "format.header": {"format": {"type": "csv"}},
}
_NAMED = re.compile(r"`([a-z0-9_]+\.[a-z_]+)(?:: [^`]*)?`")
# Fields that are no keys of a file.
_INTERNAL = {"name", "columns", "subject_schema", "fields", "family"}


def test_every_field_is_a_described_key_or_a_section_and_every_named_key_exists() -> None:
    described = {key.partition(".")[0] for key, _ in keys(config.Stream)}
    fields = {info.alias or name for name, info in config.Stream.model_fields.items()}
    assert fields - described == _INTERNAL
    text = page()
    assert "| `speed.trigger` | The interval between starts of micro-batches." in text
    assert "| duration | `2 seconds` |" in text and "| **required** |" in text
    known = {key for model in FILES.values() for key, _ in keys(model)}
    sections = {key.partition(".")[0] for key in known if "." in key} - {"spark"}
    root = Path(__file__).resolve().parents[3]
    for file in (root / "README.md", *(root / "docs").rglob("*.md")):
        named = set(_NAMED.findall(file.read_text("utf-8"))) - {str(check) for check in Issue}
        ours = {n for n in named if n.partition(".")[0] in sections and not n.endswith(".yaml")}
        assert ours <= known, file


@pytest.mark.parametrize(("file", "key", "example"), _EXAMPLES, ids=[e[1] for e in _EXAMPLES])
def test_an_example_is_valid(
    file: str, key: str, example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KAFKA_PASSWORD", "CATALOG_TOKEN"):
        monkeypatch.setenv(name, "of-this-test-alone")
    files: dict[str, Any] = {"environment": _ENVIRONMENT, "stream": _STREAM, "family": _FAMILY}
    _, of_list, last = key.partition("egress.")
    # A key of a column is at home in the schema of a stream.
    value = example if file == "column" and key == "format" else yaml.safe_load(example)
    if file == "column":
        column = {"type": "TIMESTAMP", key: value}
        columns = {"id": "STRING NOT NULL", "placed_at": "TIMESTAMP", "other": column}
        file, key, value = "stream", "schema", columns
    target = {"name": "a", last: value} | ({"root": "file:///x"} if last == "name" else {})
    data = {"egress": [target]} if of_list else _nested(key, value)
    files[file] = merge(files[file] | _BESIDE.get(key, {}), data)
    write_environment(tmp_path, **files["environment"])
    write_stream(tmp_path, "orders", **files["stream"])
    write_stream(tmp_path, "shop", topic=None, **files["family"])
    assert config.load_environment(tmp_path) and config.load_stream("orders", tmp_path)
    members = config.expand([config.load_family("shop", tmp_path)], ["shop-a", "app-a"])
    assert all(isinstance(member.found, config.Stream) for member in members.values())


def _nested(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: _nested(rest, value) if rest else value}
