"""The columns of streams that follow their subjects, while a service does not answer, and which
call waits."""

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
from lakes import new_stream
from waiting import wait_for

from anabranch.common.errors import AnabranchError, ConfigurationError, Transient
from anabranch.config import Stream, SubjectSchema
from anabranch.config.columns import parse_columns
from anabranch.iceberg.lake import Lake
from anabranch.subjects import follow
from anabranch.subjects.follow import ColumnsFollower

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
    return {
        name: names(one)
        for name, one in follower.follow({s.name: (s, LAKE) for s in streams}).items()
    }


def test_columns_are_read_at_first_and_again_and_a_stream_with_a_schema_is_as_it_is() -> None:
    tables = Tables({"events": "id STRING NOT NULL"})
    follower = ColumnsFollower(tables.read, every=0.0)
    plain = new_stream(name="plain")
    assert asked(follower, stream(), plain) == {"events": ["id"], "plain": ["id", "n"]}
    tables.answers["events"] = "id STRING NOT NULL, colour STRING"
    wait_for(
        lambda: asked(follower, stream())["events"] == ["id", "colour"], "the new columns", 120
    )


def test_known_columns_stay_while_they_cannot_be_read() -> None:
    tables = Tables({"events": "id STRING NOT NULL"})
    follower = ColumnsFollower(tables.read, every=0.0)
    assert asked(follower, stream())["events"] == ["id"]
    for error in (Transient("away"), ConfigurationError("columns that contradict the file")):
        tables.answers["events"], before = error, tables.reads
        wait_for(
            lambda before=before: asked(follower, stream()) and tables.reads > before + 1,
            "more reads",
            10,
        )  # type: ignore[misc]
        assert asked(follower, stream())["events"] == ["id"]


def test_a_changed_file_is_read_again_and_its_error_reported() -> None:
    tables = Tables({"events": "id STRING NOT NULL"})
    follower = ColumnsFollower(tables.read, every=3600.0)
    assert asked(follower, stream())["events"] == ["id"]
    tables.answers["events"] = ConfigurationError("key: expected a column of the schema")
    changed = stream(key="missing")
    wait_for(
        lambda: asked(follower, changed)["events"] == str(tables.answers["events"]),
        "its error",
        120,
    )


def test_a_hanging_stream_delays_no_other_nor_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "WAIT_S", 0.5)
    tables = Tables(
        {"events": "id STRING NOT NULL", "other": "id STRING NOT NULL"},
        {"events": threading.Event()},
    )
    follower = ColumnsFollower(tables.read, every=0.0)
    assert "is still being read" in asked(follower, stream(), stream("other"))["events"]
    assert "is still being read" in asked(follower, stream(), stream("other"))["events"]
    tables.hangs["events"].set()
    both = {"events": ["id"], "other": ["id"]}
    wait_for(lambda: asked(follower, stream(), stream("other")) == both, "both streams", 120)
