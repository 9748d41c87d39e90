"""The streams of a running process by a folder's files: a mistake in a file stops no stream that runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from anabranch.common.errors import AnabranchError
from anabranch.job import Job, StreamFolder


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    (tmp_path / "streams").mkdir()
    catalog = {"name": "lake", "uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/lake"}
    environment = {"kafka": {"bootstrap_servers": "127.0.0.1:1"}, "catalog": catalog}
    (tmp_path / "anabranch.yaml").write_text(json.dumps(environment))
    (tmp_path / "defaults.yaml").write_text("group: small")
    write(tmp_path, "a", group="small")
    write(tmp_path, "b")
    write(tmp_path, "c", group="large")
    return tmp_path


def write(conf: Path, name: str, **more: object) -> None:
    file = {"topic": name, "table": f"games.{name}", "schema": "id STRING NOT NULL", "key": "id"} | more
    (conf / "streams" / f"{name}.yaml").write_text(json.dumps(file))


def kinds(found: Mapping[str, Job | AnabranchError]) -> dict[str, str]:
    return {name: "job" if isinstance(one, Job) else "error" for name, one in found.items()}


def test_a_file_of_a_group_that_is_no_yaml_for_a_moment_is_an_error_and_not_gone(conf: Path) -> None:
    folder = StreamFolder(str(conf), group="small", strict=False)
    assert kinds(folder.jobs()) == {"a": "job", "b": "job"}
    for name in ("a", "c"):
        (conf / "streams" / f"{name}.yaml").write_text("group: [")
    assert kinds(folder.jobs()) == {"a": "error", "b": "job"}
    write(conf, "a", group="large")
    assert kinds(folder.jobs()) == {"b": "job"}


def test_defaults_that_are_no_yaml_for_a_moment_take_no_stream_from_its_group(conf: Path) -> None:
    folder = StreamFolder(str(conf), group="small", strict=False)
    (conf / "defaults.yaml").write_text("group: [")
    assert kinds(folder.jobs()) == {"a": "error", "b": "error"}
    # A process that starts then knows no group of `b`.
    assert kinds(StreamFolder(str(conf), group="small", strict=False).jobs()) == {"a": "error", "b": "error"}
    (conf / "defaults.yaml").write_text("group: small")
    assert kinds(folder.jobs()) == {"a": "job", "b": "job"}
