"""The columns of streams that follow subjects while a service is silent; which calls wait."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
from answering_registry import Answering, answering_registry
from conf_folders import write_environment, write_stream
from lakes import StreamLake, new_lake, new_stream
from waiting import wait_for

from anabranch import config, subjects
from anabranch.common.errors import AnabranchError, ConfigurationError, Transient
from anabranch.config import Stream, SubjectSchema
from anabranch.config.columns import parse_columns
from anabranch.config.sections import FormatSettings
from anabranch.iceberg.lake import Lake
from anabranch.job import FollowedJob, Job, StreamFolder, open_job
from anabranch.subjects.follow import ColumnsFollower, SubjectReader, plan_table, register_table

LAKE: Any = None


def stream(name: str = "events", **values: Any) -> Stream:
    given: dict[str, Any] = {
        "schema": "registry", "columns": (), "subject_schema": SubjectSchema(), "format": "avro",
    }  # fmt: skip
    return new_stream(**(given | {"name": name} | values))


@dataclass
class Tables:
    """The answers to reads: columns, or an error; with `hangs`, no answer until it is set."""

    answers: dict[str, str | AnabranchError] = field(default_factory=dict)
    hangs: dict[str, threading.Event] = field(default_factory=dict)
    reads: int = 0

    def read(self, of: Stream, lake: Lake) -> Stream:
        self.reads += 1
        if of.name in self.hangs:
            self.hangs[of.name].wait(30)
        answer = self.answers[of.name]
        if isinstance(answer, AnabranchError):
            raise answer
        return of.with_columns(parse_columns(answer))


def names(found: Stream | AnabranchError) -> list[str] | str:
    return [c.name for c in found.columns] if isinstance(found, Stream) else str(found)


def asked(follower: ColumnsFollower, *streams: Stream) -> dict[str, list[str] | str]:
    found = follower.follow({s.name: (s, LAKE) for s in streams})
    return {name: names(one) for name, one in found.items()}


def test_columns_are_read_again_and_those_of_a_changed_file_at_once() -> None:
    tables = Tables({"events": "id STRING NOT NULL"})
    follower = ColumnsFollower(tables.read, every=0.0)
    plain = new_stream(name="plain")
    assert asked(follower, stream(), plain) == {"events": ["id"], "plain": ["id", "n"]}
    tables.answers["events"] = "id STRING NOT NULL, colour STRING"
    both = ["id", "colour"]
    wait_for(lambda: asked(follower, stream())["events"] == both, "the new columns", 120)
    tables = Tables({"events": "id STRING NOT NULL"})
    follower = ColumnsFollower(tables.read, every=3600.0)
    assert asked(follower, stream())["events"] == ["id"]
    tables.answers["events"] = ConfigurationError("key: expected a column of the schema")
    changed = stream(key="missing")
    said = str(tables.answers["events"])
    wait_for(lambda: asked(follower, changed)["events"] == said, "its error", 120)


def test_known_columns_stay_while_they_cannot_be_read() -> None:
    tables = Tables({"events": "id STRING NOT NULL"})
    follower = ColumnsFollower(tables.read, every=0.0)
    assert asked(follower, stream())["events"] == ["id"]

    def is_read(beyond: int) -> bool:
        assert asked(follower, stream())["events"] == ["id"]
        return tables.reads > beyond

    for error in (Transient("away"), ConfigurationError("columns that contradict the file")):
        tables.answers["events"] = error
        wait_for(partial(is_read, tables.reads + 1), "more reads", 10)


def test_a_hanging_stream_delays_no_other_nor_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects.follow, "WAIT_S", 0.5)
    same = "id STRING NOT NULL"
    tables = Tables({"events": same, "other": same}, {"events": threading.Event()})
    follower = ColumnsFollower(tables.read, every=0.0)
    assert "is still being read" in asked(follower, stream(), stream("other"))["events"]
    assert "is still being read" in asked(follower, stream(), stream("other"))["events"]
    tables.hangs["events"].set()
    both = {"events": ["id"], "other": ["id"]}
    wait_for(lambda: asked(follower, stream(), stream("other")) == both, "both streams", 120)


# A table takes up its subject's versions, and jobs follow it, by real tables.

ID, N = {"name": "id", "type": "string"}, {"name": "n", "type": "long"}
COLOUR = {"name": "colour", "type": ["null", "string"]}
NO_LAKE = cast(Lake, None)


@pytest.fixture
def registry() -> Iterator[Answering]:
    with answering_registry() as server:
        yield server


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    return new_lake(tmp_path, ddl="id STRING NOT NULL, n BIGINT")


def answer(registry: Answering, version: int, *fields: dict[str, Any]) -> None:
    """The latest version of the stream's subject."""
    schema = {"type": "record", "name": "E", "fields": list(fields)}
    body = {"subject": "events-value", "version": version, "schema": json.dumps(schema)}
    registry.answers["/subjects/events-value/versions/latest"] = (200, json.dumps(body))


def file_of(lake: StreamLake) -> Stream:
    """The stream's file with `schema: registry`."""
    of_registry = {"subject_schema": SubjectSchema(), "columns": ()}
    return lake.stream.model_copy(update=of_registry | {"format": FormatSettings(type="avro")})


def environment_of(lake: StreamLake, registry: Answering) -> config.Environment:
    settings = config.Registry.model_validate({"url": registry.url})
    return lake.environment.model_copy(update={"registry": settings})


def test_a_lost_table_is_first(lake: StreamLake, registry: Answering, tmp_path: Path) -> None:
    file = file_of(lake)
    # A version without a column that the table has.
    answer(registry, 1, ID, COLOUR)
    (tmp_path / "catalog.db").unlink()
    lost = lake.again()
    [change] = register_table(file, lost)
    assert change.startswith(f"registered table {file.table} by ")
    planned = plan_table(environment_of(lake, registry), file, lost)
    assert names(planned.stream) == ["id", "n", "colour"]
    new = f"subject events-value version 1: new column colour of {file.table}, string"
    assert planned.changes == (new,)
    assert register_table(file, lost) == [] and register_table(lake.stream, lost) == []


def test_a_table_takes_a_version_up_once_and_is_not_read_again(
    lake: StreamLake, registry: Answering, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="anabranch")
    file, reader = file_of(lake), SubjectReader(environment_of(lake, registry))
    answer(registry, 1, ID, N)
    first = reader.read(file, lake.lake)
    assert names(first) == ["id", "n"] and reader.read(file, NO_LAKE) is first
    answer(registry, 2, ID, COLOUR)
    assert names(reader.read(file, lake.lake)) == ["id", "n", "colour"]
    assert "added column colour to games.events" in caplog.text
    assert lake.table().schema().find_field("colour").optional
    # Another process that has read the columns before.
    again = SubjectReader(environment_of(lake, registry))
    assert names(again.read(file, lake.lake)) == ["id", "n", "colour"]


def test_a_version_that_is_refused_and_a_registry_that_is_away_change_nothing_and_are_logged_once(
    lake: StreamLake, registry: Answering, caplog: pytest.LogCaptureFixture
) -> None:
    file, reader = file_of(lake), SubjectReader(environment_of(lake, registry))
    answer(registry, 1, ID, N | {"type": "string"}, COLOUR)
    assert [names(reader.read(file, lake.lake)) for _ in range(2)] == [["id", "n"]] * 2
    assert caplog.text.count("column n: expected bigint, found string") == 1
    answer(registry, 2, ID, N)
    known = reader.read(file, lake.lake)
    registry.answers["/subjects/events-value/versions/latest"] = (503, "{}")
    assert reader.read(file, NO_LAKE) is known and reader.read(file, NO_LAKE) is known
    assert caplog.text.count("503 Service Unavailable") == 1
    del registry.answers["/subjects/events-value/versions/latest"]
    assert names(reader.read(file, lake.lake)) == ["id", "n"]


@pytest.fixture
def conf(lake: StreamLake, registry: Answering, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration folder of the stream."""
    monkeypatch.setattr(subjects.follow, "POLL_S", 0.0)
    monkeypatch.setattr("anabranch.job.TABLES_POLL_S", 0.0)
    answer(registry, 1, ID, N)
    write_environment(lake.folder, registry={"url": registry.url})
    write_stream(lake.folder, "events", format="avro", schema="registry")
    return lake.folder


def test_a_folders_job_is_another_with_other_columns(conf: Path, registry: Answering) -> None:
    folder = StreamFolder(str(conf), takes_up=True)
    reporting = StreamFolder(str(conf))
    [first], [reported] = folder.jobs().values(), reporting.jobs().values()
    assert isinstance(first, Job) and names(first.stream) == ["id", "n"]
    assert folder.jobs()["events"] is first
    assert isinstance(reported, Job) and names(reported.stream) == ["id", "n"]
    answer(registry, 2, ID, N, COLOUR)

    def columns(of: StreamFolder) -> list[str]:
        job = of.jobs()["events"]
        return names(job.stream) if isinstance(job, Job) else [str(job)]

    wide = ["id", "n", "colour"]
    wait_for(lambda: columns(folder) == wide, "the job with the new column", 120)
    second = folder.jobs()["events"]
    assert second is not first and folder.jobs()["events"] is second
    wait_for(lambda: columns(reporting) == wide, "the report with the new column", 120)


def test_a_streams_job_is_another_with_other_columns(conf: Path, registry: Answering) -> None:
    opened = open_job("events", str(conf))
    assert names(opened.stream) == ["id", "n"]
    followed = FollowedJob(opened)
    assert followed.current() is opened
    answer(registry, 2, ID, N, COLOUR)
    wait_for(lambda: followed.current() is not opened, "a job with the new column", 120)
    second = followed.current()
    assert names(second.stream) == ["id", "n", "colour"] and second.kafka is opened.kafka
    opened.kafka.close()
