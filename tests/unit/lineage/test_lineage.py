"""The ledger's decisions as OpenLineage runs: sent, repeated, and refused by receivers."""

import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accepted_hours import HOURS, accept, cut, four_hours
from click.testing import CliRunner, Result
from conf_folders import said, write_environment, write_stream
from lakes import StreamLake
from lineage_receiver import LineageReceiver, problems, running_receiver
from openlineage.client.serde import Serde
from proofs import NOW
from pydantic import SecretStr

from anabranch import config, lineage
from anabranch.cli.jobs import batch
from anabranch.common import errors
from anabranch.config.columns import parse_columns
from anabranch.config.select import parse_select
from anabranch.iceberg.lake import Lake
from anabranch.job import Job
from anabranch.kafka.client import KafkaAdapter
from anabranch.lineage import receiver as receiver_module
from anabranch.lineage import reporting as reporting_module
from anabranch.lineage.events import Name, catalog_address, catalog_name, table_name, topic_name
from anabranch.lineage.receiver import Receiver
from anabranch.lineage.reporting import report_lineage
from anabranch.protocol import ledger
from anabranch.protocol.ledger_row import Diff, HourAccount, LedgerRow, QualityResult, RunFacts

TASK = "team/a/anabranch_hourly__events.rebuild/019aa2f0-0000-7000-8000-000000000001"
DAG = "team/a/anabranch_hourly__events/019aa2f0-0000-7000-8000-000000000002"
BEGAN = NOW - timedelta(seconds=40)
UNIQUE = {"type": "expect_column_values_to_be_unique", "kwargs": {"column": "id"}, "severity": "critical"}  # fmt: skip
NOT_NULL = {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": "n"}, "severity": "warning"}  # fmt: skip
NULLS = NOT_NULL | {
    "observed": None, "unexpected_count": 2, "element_count": 8, "message": "expect_column_values_to_not_be_null(n): 2",
}  # fmt: skip
ACCOUNT = HourAccount(
    offsets=10, good=8, dead=1, duplicate=1, gap=0, gaps={}, sources={"kafka": 10}, speed_rows=9,
    diff=Diff(0, 0, 0, 1, 0, ({"kind": "duplicate", "partition": 0, "offset": 8},)),
    quality=QualityResult(True, (), (NULLS,), 2, "events", (UNIQUE,)),
    run=RunFacts(BEGAN, "4.1.3", 2, 4321, TASK, DAG),
)  # fmt: skip


@pytest.fixture
def receiver() -> Iterator[LineageReceiver]:
    with running_receiver() as one:
        yield one


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    return four_hours(tmp_path)


def job_of(lake: StreamLake, url: str) -> Job:
    environment = lake.environment.model_copy(update={"lineage": config.Lineage(url=url)})
    return Job(environment, lake.stream, Lake(environment), KafkaAdapter(environment.kafka))


def record(lake: StreamLake, *rows: LedgerRow) -> None:
    lake.ledger.record(rows)


def accepted(
    hour: str, revision: int = 1, account: HourAccount = ACCOUNT, **values: Any
) -> LedgerRow:
    given = {"served": "batch", "account": account}
    row = ledger.decision(hour, "accepted", revision, cut(hour), NOW, **given)  # type: ignore[arg-type]
    return replace(row, **values)


def refused(hour: str, reason: str, at: datetime = NOW) -> LedgerRow:
    failed = UNIQUE | {
        "observed": ["7"], "unexpected_count": 2, "element_count": 8, "rows": [], "message": reason,
    }  # fmt: skip
    account = replace(ACCOUNT, quality=QualityResult(False, (failed,), (), 1, "events", ()))
    facts: Any = {"reason": reason, "served": "speed", "account": account}
    return ledger.decision(hour, "refused", 1, cut(hour), at, **facts)


def send(lake: StreamLake, url: str, *arguments: str) -> Result:
    """`anabranch batch events --lineage-only`, as a user runs it."""
    conf = lake.folder / "conf"
    write_environment(conf, lake.folder, lineage={"url": url, "api_key": "s3cret"})
    write_stream(conf, "events", table=lake.name, schema=lake.stream.ddl)
    return CliRunner().invoke(batch, ["events", "--lineage-only", *arguments, "--conf", str(conf)])


def command(first: str, last: str) -> str:
    """The end of the log's line that has the command."""
    return f"anabranch batch events --lineage-only --hour {first}..{last}"


def events_of(lake: StreamLake) -> list[dict[str, Any]]:
    """The events of all decisions, oldest first."""
    job = job_of(lake, "http://127.0.0.1:1")
    subject = reporting_module.subject_of(job)
    decisions = reporting_module.decisions_of(job, None)
    return [json.loads(Serde.to_json(e)) for row in decisions for e in subject.events(row)]


def test_an_accepted_hour(
    lake: StreamLake, receiver: LineageReceiver, recorded: Callable[[Any], None]
) -> None:
    snapshot = lake.state().heads["main"]
    with report_lineage(job_of(lake, receiver.url)):
        record(lake, accepted(HOURS[0], snapshot_id=snapshot))
    start, end = receiver.events
    assert receiver.problems == []
    assert start["run"]["runId"] == end["run"]["runId"]
    assert start["run"]["facets"]["parent"]["run"]["runId"] == TASK.rpartition("/")[2]
    assert start["run"]["facets"]["parent"]["root"]["run"]["runId"] == DAG.rpartition("/")[2]
    text = json.dumps(receiver.events).replace(str(snapshot), "SNAPSHOT")
    changing = {
        lake.table().location().removeprefix("file://"): "TABLE", str(lake.folder): "FOLDER",
        start["run"]["runId"]: "RUN", version("anabranch"): "VERSION",
    }  # fmt: skip
    for found, name in changing.items():
        text = text.replace(found, name)
    recorded(json.loads(text))


def test_the_balance_of_an_hour_with_erased_or_unknown_records(lake: StreamLake) -> None:
    record(lake, accepted(HOURS[0], account=replace(ACCOUNT, good=6, erased=2)))
    end = events_of(lake)[1]
    assert problems(end) == []
    assert end["run"]["facets"]["anabranch_hour"]["balance"] == {
        "offsets": 10, "good": 6, "dead": 1, "duplicate": 1, "gap": 0, "gaps": {}, "erased": 2,
    }  # fmt: skip
    assertions = end["outputs"][0]["facets"]["dataQualityAssertions"]["assertions"]
    [balance] = [a for a in assertions if a["assertion"] == "balance"]
    assert (balance["success"], balance["expected"], balance["actual"]) == (True, "10", "10")
    record(lake, accepted(HOURS[1], account=replace(ACCOUNT, dead=None, duplicate=None)))
    end = events_of(lake)[3]
    assert problems(end) == []
    assert "balance" not in end["run"]["facets"]["anabranch_hour"]
    assertions = end["outputs"][0]["facets"]["dataQualityAssertions"]["assertions"]
    assert "balance" not in {a["assertion"] for a in assertions}


def test_selected_columns_are_made_of_fields(lake: StreamLake, receiver: LineageReceiver) -> None:
    fields = parse_columns("id STRING NOT NULL, level INT, points INT, rest STRING")
    select = parse_select(["id", {"n": {"sql": "level + points", "type": "INT"}}], fields)
    job = job_of(lake, receiver.url)
    stream = lake.stream.model_copy(update={"select": select, "fields": fields})
    with report_lineage(replace(job, stream=stream)):
        record(lake, accepted(HOURS[0]))
    assert receiver.problems == []
    topic, table = (receiver.events[-1][kind][0]["facets"] for kind in ("inputs", "outputs"))
    assert [f["name"] for f in topic["schema"]["fields"]] == [column.name for column in fields]
    made_of = {
        name: [(f["field"], f["transformations"][0]["subtype"]) for f in of["inputFields"]]
        for name, of in table["columnLineage"]["fields"].items()
    }
    assert made_of["id"] == [("id", "IDENTITY")]
    assert made_of["n"] == [("level", "TRANSFORMATION"), ("points", "TRANSFORMATION")]


def test_a_restatement_is_another_run(lake: StreamLake, receiver: LineageReceiver) -> None:
    job = job_of(lake, receiver.url)
    with report_lineage(job):
        record(lake, accepted(HOURS[0]), accepted(HOURS[1]))
    first = list(receiver.events)
    assert send(lake, receiver.url).exit_code == 0
    assert [e | {"producer": ""} for e in receiver.events[4:]] == [e | {"producer": ""} for e in first]  # fmt: skip
    assert len(receiver.runs()) == 2
    with report_lineage(job):
        record(lake, accepted(HOURS[0], 2, recorded_at=NOW + timedelta(hours=1)))
    assert len(receiver.runs()) == 3
    assert len({e["job"]["name"] for e in receiver.events}) == 1
    # The id is derived from table, hour and revision; this one was recorded from a sent event.
    again = four_hours(lake.folder / "other")
    with report_lineage(job_of(again, receiver.url)):
        record(again, accepted(HOURS[0]))
    assert len(receiver.runs()) == 4


def test_refused_then_accepted_are_two_runs(lake: StreamLake, receiver: LineageReceiver) -> None:
    with report_lineage(job_of(lake, receiver.url)):
        reason = "quality: expect_column_values_to_be_unique(id): found 2 of 8 rows otherwise"
        record(lake, refused(HOURS[0], reason))
        record(lake, accepted(HOURS[0]))
    assert receiver.problems == []
    assert list(receiver.runs().values()) == [["START", "FAIL"], ["START", "COMPLETE"]]
    fail, _ = receiver.ended()
    message = fail["run"]["facets"]["errorMessage"]["message"]
    assert message.startswith("quality: expect_column_values_to_be_unique(id)")
    [table] = fail["outputs"]
    assert "outputStatistics" not in table.get("outputFacets", {})
    assert "version" not in table["facets"]
    assertions = table["facets"]["dataQualityAssertions"]["assertions"]
    assert [a["success"] for a in assertions] == [True, False]


def test_hours_without_a_recorded_run_are_sent(lake: StreamLake, receiver: LineageReceiver) -> None:
    before = replace(ACCOUNT, run=None, quality=None, diff=None, sources=None)
    nothing = HourAccount(offsets=0, good=0, dead=0, duplicate=0, gap=0, gaps={}, speed_rows=0)
    with report_lineage(job_of(lake, receiver.url)):
        record(lake, accepted(HOURS[0], account=before), accepted(HOURS[1], account=nothing))
    assert receiver.problems == []
    assert {e["eventTime"] for e in receiver.events} == {NOW.isoformat()}
    assert all("parent" not in e["run"]["facets"] for e in receiver.events)
    assert len(receiver.ended()) == 2


@pytest.mark.parametrize(("status", "message"), [(503, "transient"), (422, "see its log")])
def test_a_receiver_that_refuses_fails_no_hour_and_gets_the_events_later(
    lake: StreamLake, receiver: LineageReceiver, caplog: pytest.LogCaptureFixture, status: int, message: str
) -> None:  # fmt: skip
    receiver.status = status
    with caplog.at_level(logging.WARNING), report_lineage(job_of(lake, receiver.url)):
        for hour in HOURS[1:]:
            accept(lake, hour, 8)
    assert receiver.asked == 1
    assert [r for r in caplog.messages if "lineage not sent: " in r and message in r]
    assert caplog.messages[-1].endswith(command(HOURS[1], HOURS[3]))
    receiver.recover()
    done = send(lake, receiver.url, "--hour", f"{HOURS[2]}..{HOURS[3]}")
    assert done.exit_code == 0
    assert [line.split()[1] for line in done.stdout.splitlines()] == HOURS[2:]
    assert {h["Authorization"] for h in receiver.headers} == {"Bearer s3cret"}
    assert send(lake, receiver.url).exit_code == 0
    whole = ["START", "COMPLETE"]
    assert list(receiver.runs().values()) == [whole * 2, whole * 2, whole]


def test_a_receiver_that_hangs_or_is_not_there_is_waited_for_once(
    lake: StreamLake,
    receiver: LineageReceiver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(receiver_module, "_SECONDS", 0.3)
    receiver.hang()
    with report_lineage(job_of(lake, receiver.url)):
        for hour in HOURS[:3]:
            accept(lake, hour, 8)
    hours = f"hours=3 first={HOURS[0]} last={HOURS[2]}"
    assert caplog.messages[-1].endswith(f"{hours}; to send it: {command(HOURS[0], HOURS[2])}")
    assert receiver.asked <= 1 and receiver.events == []
    with report_lineage(job_of(lake, "http://127.0.0.1:1")):
        accept(lake, HOURS[3], 8)
    assert caplog.messages[-1].endswith(command(HOURS[3], HOURS[3]))
    slow = Receiver(config.Lineage(url=receiver.url))

    over = threading.Event()

    def endless() -> Iterator[Any]:
        over.wait(60)
        yield from ()

    with pytest.raises(errors.NoAnswer, match=r"no answer within 0\.3 s"):
        slow.send(endless())
    over.set()


def test_many_hours_are_sent_up_to_the_deadline(
    lake: StreamLake, receiver: LineageReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    clock = iter(range(0, 1000, 15))
    monkeypatch.setattr(reporting_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with report_lineage(job_of(lake, receiver.url)):  # for 30 s
        record(lake, *(accepted(hour) for hour in HOURS))
    assert [e["run"]["facets"]["anabranch_hour"]["hour"] for e in receiver.ended()] == HOURS[:1]
    assert caplog.messages[-1].endswith(command(HOURS[1], HOURS[3]))


def test_a_failure_of_the_job_sends_and_one_of_the_lake_fails_no_hour(
    lake: StreamLake, receiver: LineageReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(errors.Unexpected), report_lineage(job_of(lake, receiver.url)):
        accept(lake, HOURS[0], 8)
        raise errors.Unexpected("rebuild hour: an overflow")
    assert list(receiver.runs().values()) == [["START", "COMPLETE"]]
    asked = receiver.asked
    monkeypatch.setattr(ledger.Ledger, "history_since", lambda *_: 1 / 0)
    with report_lineage(job_of(lake, receiver.url)):
        accept(lake, HOURS[1], 8)
    assert receiver.asked == asked


def test_an_environment_without_the_client_names_the_package_and_fails_no_hour(
    lake: StreamLake, receiver: LineageReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    of_client = ("openlineage", "anabranch.lineage.events", "anabranch.lineage.receiver")
    for name in [n for n in sys.modules if n.startswith(of_client)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "openlineage", None)
    with report_lineage(job_of(lake, receiver.url)):
        accept(lake, HOURS[0], 8)
    remedy = "; run `pip install 'anabranch[lineage]'`"
    assert caplog.messages[-1].startswith("stream events: lineage disabled for this job: ")
    assert caplog.messages[-1].endswith(remedy)
    assert str(send(lake, receiver.url).exception).endswith(remedy)
    assert receiver.asked == 0


def test_without_address_nothing_is_sent(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lake, "load", lambda *_: pytest.fail("expected no load"))
    with report_lineage(job_of(lake, "")):
        pass
    done = send(lake, "")
    assert isinstance(done.exception, errors.ConfigurationError)
    assert "lineage.url: expected the address of a receiver" in str(done.exception)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (500, errors.Transient), (429, errors.Transient), (403, errors.ConfigurationError), (405, errors.ConfigurationError),
        (400, errors.Refused),
    ],
)  # fmt: skip
def test_the_receivers_answer_decides_the_exit_code(
    lake: StreamLake, receiver: LineageReceiver, status: int, kind: type[errors.AnabranchError]
) -> None:
    accept(lake, HOURS[0], 8)
    receiver.status = status
    done = send(lake, receiver.url)
    assert isinstance(done.exception, kind) and done.exception.exit_code == kind.exit_code


@pytest.mark.parametrize(
    "spoil",
    [
        lambda e: e["run"].pop("runId"),
        lambda e: e["run"].update(runId="1"),
        lambda e: e.update(eventType="ENDED"),
        lambda e: e["inputs"][0].pop("namespace"),
        lambda e: e["run"]["facets"]["anabranch_hour"].pop("hour"),
        lambda e: e["run"]["facets"]["anabranch_hour"]["balance"].update(good=-1),
        lambda e: e["outputs"][0]["facets"].update(quality=e["outputs"][0]["facets"]["schema"]),
        lambda e: e["outputs"][0]["outputFacets"]["outputStatistics"].update(rowCount="8"),
    ],
)
def test_a_wrong_event_is_found(lake: StreamLake, spoil: Callable[[dict[str, Any]], None]) -> None:
    record(lake, accepted(HOURS[0]))
    event = events_of(lake)[1]
    assert problems(event) == []
    spoil(event)
    assert problems(event) != []


def test_datasets_and_runs_have_the_names_that_others_give_them() -> None:
    several = config.Kafka(bootstrap_servers="SASL_SSL://broker-1:9093, broker-2:9093")
    assert topic_name(several, "t") == Name("kafka://broker-1:9093", "t")
    in_bucket = table_name("s3://lake/warehouse/games/events")
    assert in_bucket == Name("s3://lake", "warehouse/games/events")
    in_folder = table_name("file:///data/warehouse/games/events/")
    assert in_folder == Name("file", "/data/warehouse/games/events")
    named: dict[str, Any] = {"name": "lake", "warehouse": "s3://lake/w"}
    secret = config.Catalog(uri="postgresql+psycopg2://u:p%40ss@db:5432/catalog?sslmode=x", **named)
    assert catalog_address(secret) == "postgresql+psycopg2://db:5432/catalog"
    rest = config.Catalog(type="rest", uri="https://catalog/api", **named)
    glue = config.Catalog(type="glue", properties={"glue.id": SecretStr("123")}, **named)
    of_glue = Name("arn:aws:glue:eu-central-1:123", "table/games/events")
    for catalog, name in (
        (secret, None), (rest, Name("https://catalog/api", "games.events")), (glue, of_glue),
    ):  # fmt: skip
        assert catalog_name(catalog, "eu-central-1", "games.events") == name
    assert catalog_address(glue) is None
    assert lineage.parse_run(f"team/a/dag.task/{ID}") == ("team/a", "dag.task", ID)


# Runs of a scheduler, as they are given to the batch job.

ID = "019aa2f0-0000-7000-8000-000000000001"


@pytest.mark.parametrize("text", ["", "a/b", f"/b/{ID}", "a/b/1", f"a//{ID}"])
def test_an_invalid_run_of_a_scheduler_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAMESPACE/JOB/RUN ID"):
        lineage.parse_run(text)


@pytest.mark.parametrize("option", ["--parent-run", "--root-run"])
def test_a_wrong_parent_is_wrong_usage_before_anything_is_begun(option: str) -> None:
    expected = f"{option}: expected NAMESPACE/JOB/RUN ID, the id a UUID, found 'airflow/task'"
    assert expected in said("batch", "events", option, "airflow/task", expect=2)
