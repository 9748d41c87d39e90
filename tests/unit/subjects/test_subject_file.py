"""`schema: registry` in a stream's file: its forms, and its mistakes by file and key."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from anabranch.config import Stream, load_family, load_stream
from anabranch.config.columns import Column

STREAM: dict[str, Any] = {
    "topic": "shop.orders", "table": "shop.orders", "format": "avro", "key": "id",
}  # fmt: skip


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    (tmp_path / "streams").mkdir()
    environment = {
        "kafka": {"bootstrap_servers": "k:1"},
        "catalog": {"name": "lake", "uri": "sqlite:////tmp/c.db", "warehouse": "file:///tmp/w"},
        "registry": {"url": "http://r:1"},
    }
    (tmp_path / "anabranch.yaml").write_text(yaml.safe_dump(environment))
    return tmp_path


def load(conf: Path, **values: Any) -> Stream:
    (conf / "streams" / "orders.yaml").write_text(yaml.safe_dump(STREAM | values))
    return load_stream("orders", conf)


def test_its_forms(conf: Path) -> None:
    plain = load(conf, schema="registry", event_time={"column": "at"}, files={"sort": "at"})
    assert plain.lacks_columns and plain.subject == "shop.orders-value"
    rules = {"columns": "at TIMESTAMP NOT NULL", "exclude": "debug"}
    stream = load(conf, schema=rules, format={"type": "json_schema", "subject": "s"})
    assert stream.subject_schema is not None and stream.subject == "s"
    assert stream.subject_schema.columns == (Column("at", "timestamp", False),)
    assert stream.subject_schema.exclude == ("debug",)
    assert not load(conf, schema="id STRING").lacks_columns


def test_defaults_and_families_have_it_too(conf: Path) -> None:
    (conf / "defaults.yaml").write_text(yaml.safe_dump({"schema": {"exclude": ["debug"]}}))
    own = load(conf, schema={"columns": "n INT"}).subject_schema
    assert own is not None and own.exclude == ("debug",) and own.columns[0].name == "n"
    family = {
        "topics": {"pattern": "app-(.*)"}, "table": "raw.{1}", "format": "avro", "key": "id",
        "schema": "registry",
    }  # fmt: skip
    (conf / "streams" / "app.yaml").write_text(yaml.safe_dump(family))
    assert load_family("app", conf).build("app-a.b").subject == "app-a.b-value"
