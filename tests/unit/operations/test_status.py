"""When the speed layer is late, and since when a record waits."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import time_machine
import yaml
from brokers import Broker
from click.testing import CliRunner, Result
from conf_folders import said, write_environment, write_stream
from lakes import StreamLake, decide, new_environment, new_lake, new_stream
from proofs import BEFORE, CUT, HOUR, NEXT, accept, event, job, new_proof, read
from proofs import NOW as START
from report_hours import LATER, kafka

from anabranch.cli import main, reports
from anabranch.cli.report import Table
from anabranch.config import Slo
from anabranch.iceberg import admin, lake
from anabranch.iceberg.commits import Change
from anabranch.offsets.position import Position
from anabranch.operations.reports.status import Lag, StreamStatus, late_after, late_reason, status
from anabranch.protocol import ledger, measured, state, watermarks
from anabranch.protocol.publish import Publish, new_id

NOW = datetime(2026, 11, 21, 3, tzinfo=UTC)
PATIENCE = timedelta(minutes=10)


@pytest.mark.parametrize(
    ("lag", "behind", "waits_for", "late"),
    [
        (0, timedelta(days=1), None, None),
        (5, timedelta(days=1), None, None),
        (5, timedelta(minutes=10), timedelta(minutes=10), None),
        # After an idle night the first record waits for seconds; a backlog is read at full speed.
        (5, timedelta(hours=8), timedelta(seconds=30), None),
        (5, timedelta(seconds=2), timedelta(hours=8), None),
        (
            5, timedelta(hours=8), timedelta(minutes=10, seconds=1),
            "5 offsets wait, the oldest for 0:10:01, and the position has not moved for 8:00:00",
        ),
    ],
)  # fmt: skip
def test_a_speed_layer_is_late_when_a_record_waits_and_nothing_moves(
    lag: int, behind: timedelta, waits_for: timedelta | None, late: str | None
) -> None:
    waiting = NOW - waits_for if waits_for is not None else None
    assert late_reason(lag, NOW - behind, waiting, PATIENCE, NOW) == late


def test_the_fresh_through_promise_shows_a_late_speed_layer() -> None:
    second = timedelta(seconds=10)
    for fresh, expected in ((None, PATIENCE), (second, second), (timedelta(hours=1), PATIENCE)):
        assert late_after(new_stream(slo=Slo(fresh=fresh)), PATIENCE) == expected


MS = int(NOW.timestamp() * 1000)


@pytest.mark.parametrize(
    ("stamps", "since"),
    [
        ([], None),
        ([MS - 5_000, MS - 9_000], NOW - timedelta(seconds=9)),
        # What main is fresh through bounds what an old stamp says; nothing was received later.
        ([MS - 3_600_000], NOW - timedelta(minutes=1)),
        ([-1], NOW - timedelta(minutes=1)),
        ([MS + 60_000], NOW),
        ([2**63 - 1], NOW),
    ],
)
def test_a_record_waits_since_kafka_received_it(stamps: list[int], since: datetime | None) -> None:
    assert watermarks.waiting_since(stamps, NOW - timedelta(minutes=1), NOW) == since
    if stamps and since == NOW - timedelta(minutes=1):
        stamp = datetime.fromtimestamp(max(0, stamps[0]) / 1000, UTC)
        assert watermarks.waiting_since(stamps, None, NOW) == stamp


def of_batch_alone(folder: Path) -> StreamLake:
    """Two accepted hours up to offset 10, which the speed layer has not read."""
    with time_machine.travel(START, tick=False):
        one = new_proof(folder)
        accept(one, HOUR, BEFORE, [event(0, o, HOUR) for o in range(4)])
        accept(one, NEXT, CUT, [event(0, o) for o in range(4, 10)])
    return one


def viewed(one: StreamLake, end: int, **slo: timedelta) -> StreamStatus:
    """The status while the log of partition 0 ends at `end`."""
    asked = SimpleNamespace(**vars(kafka()) | {"stable_ends": lambda topic: {0: end, 1: 0}})
    of = replace(job(one), kafka=asked)  # type: ignore[arg-type]
    stream = of.stream.model_copy(update={"slo": Slo(**slo)})
    return status(replace(of, stream=stream), timedelta(seconds=1))


@time_machine.travel(LATER, tick=False)
@pytest.mark.parametrize(
    ("id", "end", "lag"),
    [(None, 4, "no such topic"), ("another", 4, "topic recreated"), ("t", 3, "log cut off")],
)
def test_a_topic_that_jobs_refuse_to_read_is_named(
    id: str | None, end: int, lag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: by a wrong name of its topic, after another took its name, or after an unclean
    election, both jobs have ended, and a stream has no lag, and is in order."""
    one = new_proof(tmp_path)
    read(one, [event(0, o, HOUR) for o in range(4)], {0: 4})
    of = replace(job(one), kafka=Broker(id, {0: [0] * end, 1: []}).adapter)
    view = status(of, PATIENCE)
    assert (view.topic_missing, view.topic_recreated) == (id is None, id == "another")
    assert view.unreadable is not None and view.late == view.unreadable
    [table] = [one for one in reports.statuses_text({"events": view}) if isinstance(one, Table)]
    assert next(iter(table.rows))[1] == lag
    monkeypatch.setattr("anabranch.job.open_job", lambda *_: of)
    assert f"found {view.unreadable}" in said("status", "events", expect=1)


@time_machine.travel(LATER, tick=False)
def test_a_topic_that_is_not_there_yet_is_not_late(tmp_path: Path) -> None:
    one = new_lake(tmp_path, 2)
    one.land(Publish(new_id(), (Change("speed"),), one.state().timeline, Position("", {})))
    view = status(replace(job(one), kafka=Broker(None).adapter), PATIENCE)
    assert (view.topic_missing, view.unreadable, view.late) == (True, None, None)
    late = replace(view, topic_missing=False, lag=Lag(5, {0: 5}), late="5 offsets wait")
    [_, why] = reports.statuses_text({"events": late})
    assert why == "events: no job has published yet: 5 offsets wait; `anabranch speed events`"


def test_maintenance_that_completes_no_run_for_two_days_is_late(tmp_path: Path) -> None:
    one = new_lake(tmp_path)
    of = replace(job(one), kafka=Broker(log={0: []}).adapter)
    began = START - timedelta(hours=2)

    def words(after: timedelta) -> str | None:
        with time_machine.travel(began + after, tick=False):
            return status(of).unmaintained

    def record(after: timedelta, **failed: str) -> None:
        at = began + after
        measured.record_run(one.lake, one.name, measured.MaintenanceRun(at, at, 0, {}, failed))

    day = timedelta(days=1)
    # A stream may begin with hours that are older than itself.
    assert words(9 * day) is None
    first = one.state().timeline.first
    one.ledger.record([decide(first, "accepted", 1, None, began, "a")])
    assert words(2 * day) is None
    assert words(2.1 * day) == "no run recorded"
    record(2.2 * day)
    assert words(4.1 * day) is None
    record(3.2 * day, orphans="S3 did not answer")
    assert "steps failed" in str(words(4.3 * day)) and "S3 did not" in str(words(4.3 * day))


@time_machine.travel(LATER, tick=False)
def test_records_that_only_the_batch_layer_read_wait_for_main_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = of_batch_alone(tmp_path)
    view = viewed(one, end=10)
    assert (view.lag, view.waiting_since, view.late) == (Lag(0, {0: 0, 1: 0}), None, None)
    # Those of the running hour wait, and are late if freshness was promised.
    view = viewed(one, end=12)
    assert view.lag.partitions == {0: 2, 1: 0}
    assert (view.waiting_since, view.late) == (datetime(2026, 11, 21, 2, tzinfo=UTC), None)
    assert "2 offsets wait" in str(viewed(one, end=12, fresh=timedelta(seconds=10)).late)
    # An hour that main lacks still waits.
    monkeypatch.setattr(state.State, "is_merged", False)
    assert viewed(one, end=10).lag.offsets == 10


# `anabranch status --list`: every stream of the folder, its table, what its file lacks.


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    write_environment(tmp_path)
    for name, group in (("a", "small"), ("b", "small"), ("c", "large")):
        write_stream(tmp_path, name, topic=f"t-{name}", table=f"raw.{name}", group=group)
    return tmp_path


def run(conf: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["status", "--list", *arguments, "--conf", str(conf)])


def as_json(conf: Path, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(conf, *arguments, "--output", "json").stdout)
    return found


def test_every_stream_is_listed_with_its_table(conf: Path) -> None:
    assert admin.create(lake.Lake(new_environment(conf)), "raw.a", ledger.LEDGER_SCHEMA, (), {})
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
    found = [(s["stream"], s["group"], s["state"]) for s in as_json(conf, "--group", "small")]
    assert found == [("a", "small", "new"), ("b", "small", "broken")]
    # A table of two streams is broken for the second.
    text = (conf / "streams" / "a.yaml").read_text()
    (conf / "streams" / "b.yaml").write_text(text)
    of_all = {s["stream"]: s for s in as_json(conf)}
    expected = {"a": "new", "b": "broken", "c": "new"}
    assert {name: s["state"] for name, s in of_all.items()} == expected
    assert "expected a table of its own" in of_all["b"]["error"]


def test_a_catalog_that_does_not_answer_is_named(conf: Path) -> None:
    environment = yaml.safe_load((conf / "anabranch.yaml").read_text())
    environment["catalog"] |= {"type": "rest", "uri": "http://127.0.0.1:1"}
    (conf / "anabranch.yaml").write_text(yaml.safe_dump(environment))
    found = as_json(conf, "a")
    assert (found[0]["state"], found[0]["topic"]) == ("unknown", "t-a")
    assert "catalog" in found[0]["error"]
    assert run(conf, "a").exit_code == 1
