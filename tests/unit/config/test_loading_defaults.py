"""conf/defaults.yaml: values for every stream's file, by key; a mistake names its own file."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from anabranch.common.errors import ConfigurationError
from anabranch.config import load_stream, select_streams, stream_file_stamp

STREAM: dict[str, Any] = {
    "topic": "t", "table": "raw.s", "key": "id", "schema": "id STRING NOT NULL",
}  # fmt: skip


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    (tmp_path / "streams").mkdir()
    return tmp_path


def write(conf: Path, defaults: dict[str, Any], **stream: Any) -> None:
    (conf / "defaults.yaml").write_text(yaml.safe_dump(defaults))
    values = {key: value for key, value in (STREAM | stream).items() if value != "left out"}
    (conf / "streams" / "s.yaml").write_text(yaml.safe_dump(values))


def refusal(conf: Path) -> str:
    with pytest.raises(ConfigurationError) as refused:
        load_stream("s", conf)
    return str(refused.value)


def test_a_default_is_that_of_a_key_which_the_stream_lacks(conf: Path) -> None:
    defaults = {
        "group": "small", "event_time": {"column": "at", "past": "1 day"}, "format": "csv",
        "schema": "id STRING, at TIMESTAMP", "archive": {"raw": "30 days"},
        "batch": {"allow_gaps": ["control", "compacted"], "grace": "1 hour"},
    }  # fmt: skip
    own = {"event_time": {"future": "1 hour"}, "format": "json", "batch": {"allow_gaps": ["retention"]}}  # fmt: skip
    write(conf, defaults, schema="left out", **own)
    stream = load_stream("s", conf)
    assert (stream.group, stream.format.type) == ("small", "json")
    assert [column.name for column in stream.columns] == ["id", "at"]
    assert stream.event_time is not None and stream.event_time.past == timedelta(days=1)
    assert stream.event_time.future == timedelta(hours=1)
    # A list replaces that of the defaults.
    assert stream.batch.allow_gaps == ("retention",)
    assert stream.batch.grace == timedelta(hours=1)
    # Null takes a default away.
    write(conf, defaults, schema="left out", archive=None, group=None)
    stream = load_stream("s", conf)
    assert (stream.archive, stream.group) == (None, None)


def test_a_mistake_names_the_file_of_its_value_and_keeps_the_group(conf: Path) -> None:
    write(conf, {"speed": {"trigger": "soon"}}, batch={"grace": "later"})
    said = refusal(conf).splitlines()
    expected = [f"{conf}/defaults.yaml: speed.trigger", f"{conf}/streams/s.yaml: batch.grace"]
    assert [line.partition(": expected")[0] for line in said] == expected
    write(conf, {"group": "small"}, keyy="id")
    assert list(select_streams(conf, group="small")) == ["s"]


def test_a_changed_default_is_a_change_of_the_stream(conf: Path) -> None:
    write(conf, {})
    before = stream_file_stamp("s", conf)
    os.utime(conf / "defaults.yaml", ns=(1, 1))
    assert stream_file_stamp("s", conf) != before
    assert stream_file_stamp("s", conf) == stream_file_stamp("s", conf)
    assert stream_file_stamp("t", conf) is None
