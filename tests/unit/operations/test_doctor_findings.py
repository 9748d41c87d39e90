"""The doctor's deciders, over facts alone; and what it reads of this machine."""

import io
import json
import os
import re
import tarfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conf_folders import said, write_environment
from foreign_programs import rewrite
from lakes import new_environment, new_lake, new_stream

from anabranch import config
from anabranch.common import errors, output
from anabranch.common.deadline import Answers, TimedRead, wait_for_all
from anabranch.iceberg.s3 import LifecycleRule
from anabranch.kafka.client import TopicSettings
from anabranch.offsets.hours import Cut, Timeline
from anabranch.operations.doctor import airflow, kafka, local, s3, services, streams, tables
from anabranch.operations.finding import Finding, Issue, Severity
from anabranch.operations.reports.status import Lag, StreamStatus
from anabranch.protocol import ledger_row, retention
from anabranch.spark.jars import JOBS
from anabranch.spark.settings import ARCHIVE, VERSIONS, installed

ROOT = Path(__file__).parents[3]
NOW = datetime(2026, 11, 21, 12, 30, tzinfo=UTC)
STREAM = new_stream()
FRESH = new_stream(slo=config.Slo(fresh=timedelta(seconds=10)))
BROKERS = new_environment(Path("/nowhere")).kafka
SETTINGS = TopicSettings(None, None, "delete", timedelta(0), "LogAppendTime", 2, 3, 3)
FACTS = kafka.KafkaFacts(SETTINGS, {0: 0}, {0: 100}, {0: 10_000})
UNREAD = kafka.Unread("2026-11-21T10", {0: 60})
PLACE = s3.Warehouse("lake", "warehouse/")
STORE = s3.StoreFacts(True, NOW, NOW)
STATUS = StreamStatus(
    stream="events", topic="events", topic_id="t", topic_recreated=False, position={0: 5},
    position_since=NOW, late=None, lag=Lag(0, {}), last_publish={}, first_hour="2026-11-21T00",
    open_hour="2026-11-21T12", newest_accepted=None, complete_through=None, to_seal=(), backlog=(),
    refused=(), hours={}, unexplained={}, dead_letters=0, lost={}, accepted_at=None, waiting_since=None,
)  # fmt: skip


def checks(findings: list[Finding]) -> dict[Issue, Severity]:
    return {finding.check: finding.severity for finding in findings}


def of_kafka(
    unread: kafka.Unread | None = UNREAD,
    stream: config.Stream = STREAM,
    servers: str = "127.0.0.1:1",
    refused: errors.MissingRight | None = None,
    **settings: Any,
) -> list[Finding]:
    """Judge a topic with these settings."""
    facts = replace(FACTS, settings=replace(SETTINGS, **settings), group_refused=refused)
    brokers = BROKERS.model_copy(update={"bootstrap_servers": servers})
    return [*kafka.findings(brokers, stream, facts, unread, NOW)]


def no_topic(servers: str, similar: str | None = None) -> list[Finding]:
    brokers = BROKERS.model_copy(update={"bootstrap_servers": servers})
    facts = kafka.KafkaFacts(None, {}, {}, None, similar=similar)
    return [*kafka.findings(brokers, STREAM, facts, UNREAD, NOW)]


def of_stream(stream: config.Stream = STREAM, **status: Any) -> list[Finding]:
    return [*streams.findings(stream, streams.StreamFacts(replace(STATUS, **status), {}))]


def of_store(**facts: Any) -> list[Finding]:
    return [*s3.findings(PLACE, ("events",), replace(STORE, **facts))]


def of_tables(*missing: str, stream: config.Stream = STREAM, **facts: Any) -> list[Finding]:
    return [*tables.findings("lake", stream, tables.TableFacts(missing=missing, **facts))]


def of_airflow(*streams: config.Stream, family: str = "", **facts: Any) -> list[Finding]:
    chosen = [one.model_copy(update={"family": family or None}) for one in streams or [STREAM]]
    return [*airflow.findings(chosen, replace(WELL, **facts))]


WELL = airflow.AirflowFacts(
    {f"anabranch_{name}__events": False for name in ("hourly", "maintenance", "speed_watch")},
    {}, 128, True,
)  # fmt: skip
NOWHERE = new_environment(Path("/nowhere"))
LONG = kafka.Unread("2026-11-11T12", {0: 0})
DENIED, AWAY = errors.ConfigurationError("denied"), errors.Transient("away")
CERTIFICATE = "SSL validation failed for https://s3.example.com/b [SSL: CERTIFICATE_VERIFY_FAILED]"
BATCH_WITH_GAPS = STREAM.batch.model_copy(update={"allow_gaps": ("compacted",)})
ALLOWED = STREAM.model_copy(update={"batch": BATCH_WITH_GAPS})
ARCHIVED = new_stream(archive={"raw": "90 days"})
NAMES = ("games.events", "games.events_dead_letters", "games.events_hours")
DRIFT = tables.PropertyDrift(NAMES[0], "commit.retry.num-retries", "30", None)
HOUR, OTHER, H11 = "2026-11-21T03", "2026-11-21T05", "2026-11-21T11"
DAYS_30 = LifecycleRule("r", "", deletes_after="30 days")
OF_GROUP = new_stream(group="small")
OF_FAMILY = [new_stream(name=f"tenants_{one}", group="small") for one in "ab"]
FAMILY_DAGS = {"anabranch_maintenance__tenants": False, "anabranch_hourly_group__small": False}
FOUND = {
    "well": of_kafka(),
    "well, and small": of_kafka(retention=timedelta(days=7), retention_bytes=8_000),
    "deleted early": of_kafka(retention=timedelta(hours=2)),
    "deleted soon": of_kafka(retention=timedelta(hours=20)),
    "deleted before the backlog": of_kafka(LONG, retention=timedelta(days=7)),
    # 40 of 100 offsets wait, so 4,000 of 10,000 bytes.
    "bytes": of_kafka(retention_bytes=3_999),
    "twice the bytes": of_kafka(retention_bytes=7_999),
    "bytes, nothing waits": of_kafka(None, retention_bytes=7_999),
    "compacted and deleted": of_kafka(cleanup_policy="compact,delete"),
    # `cleanup.policy=delete` has retention take what a compacted topic kept for years.
    "compacted": of_kafka(LONG, cleanup_policy="compact"),
    "compacted soon": of_kafka(cleanup_policy="compact", compaction_lag=timedelta(hours=20)),
    "compacted late": of_kafka(cleanup_policy="compact", compaction_lag=timedelta(hours=40)),
    "compacted by choice": of_kafka(stream=ALLOWED, cleanup_policy="compact"),
    "producers' times": of_kafka(timestamp_type="CreateTime"),
    "one replica": of_kafka(replicas=1),
    "one replica, one broker here": of_kafka(replicas=1, brokers=1),
    "one replica, one broker": of_kafka(servers="kafka.example.com:9092", replicas=1, brokers=1),
    "one in sync": of_kafka(min_insync=1),
    "the group": of_kafka(refused=errors.MissingRight("denied", "kafka-acls.sh --operation Read")),
    **{f"no topic at {of}": no_topic(of) for of in ("localhost:9092", "kafka.example.com:9092")},
    "no topic, another": no_topic("localhost:9092", "event"),
    "kafka away": [kafka.failed(BROKERS, STREAM, AWAY)],
    "kafka denied": [kafka.failed(BROKERS, STREAM, DENIED)],
    "kafka right": [kafka.failed(BROKERS, STREAM, errors.MissingRight("denied", "kafka-acls.sh --add"))],
    "kafka codec": [kafka.failed(BROKERS, STREAM, errors.CodecMissing("lz4"))],
    "kafka ids": [kafka.failed(BROKERS, STREAM, errors.NoTopicIds("none"))],
    "s3 away": [s3.failed(NOWHERE, PLACE, errors.NoAnswer("away"))],
    "s3 denied": [s3.failed(NOWHERE, PLACE, DENIED)],
    "s3 untrusted": [s3.failed(NOWHERE, PLACE, errors.ConfigurationError(CERTIFICATE))],
    "catalog away": [services.catalog_failed(NOWHERE.catalog, AWAY)],
    "catalog denied": [services.catalog_failed(NOWHERE.catalog, DENIED)],
    "catalog locked": [services.catalog_failed(NOWHERE.catalog, errors.Transient("database is locked"))],
    "metadata gone": [tables.failed(STREAM, errors.MetadataGone("gone"))],
    "registry away": [services.registry_failed(STREAM, AWAY)],
    "registry denied": [services.registry_failed(STREAM, DENIED)],
    "subject": [*services.subject_findings(STREAM, True)],
    "no subject": [*services.subject_findings(STREAM, False)],
    "no tables": of_tables(*NAMES),
    "no tables, an archive": of_tables(*NAMES, ARCHIVED.archive_table, stream=ARCHIVED),
    "no tables but the archive": of_tables(*NAMES, stream=ARCHIVED),
    "other tables": of_tables(
        NAMES[2], branches=((NAMES[0], "batch"),), columns="column n is missing", drifts=(DRIFT,)
    ),
    "refused columns": of_tables(columns="`anabranch apply events` fails with: put it back", apply_refuses=True),
    "recreated": of_stream(unreadable="another id", late="another id"),
    "missing": of_stream(unreadable="none", topic_missing=True, late="none"),
    "unexplained": of_stream(unexplained={HOUR: {"missing": 2}}),
    "refused": of_stream(refused=[HOUR], backlog=[HOUR]),
    "a refused restatement": of_stream(refused_restatements=[OTHER]),
    "late": of_stream(late="5 offsets wait"),
    "late, to begin": of_stream(late="5 offsets wait", speed_has_begun=False, lag=Lag(5, {0: 5})),
    "late as promised": of_stream(FRESH, late="5 wait"),
    "late as promised, with batch jobs alone": of_stream(FRESH, late="5 wait", speed_has_begun=False, newest_accepted=HOUR),
    "a backlog": of_stream(backlog=[H11], to_seal=["2026-11-21T12", "2026-11-21T13"]),
    "two hours wait": of_stream(backlog=[H11], to_seal=["2026-11-21T12"]),
    # It fails at each run, between accepted ones.
    "one hour waits long": of_stream(backlog=["2026-11-21T09"]),
    "unmaintained": of_stream(unmaintained="no run recorded"),
    "overdue": of_stream(overdue=retention.Overdue(3, "2026-11-01T00", None)),
    "dead letters": of_stream(dead_shares={HOUR: ledger_row.HourShare(30, 40)}, too_many_dead=[HOUR]),
    "no bucket": of_store(has_bucket=False),
    "no right to delete": of_store(denied=("s3:DeleteObject", "AccessDenied")),
    "a clock 31 s off": of_store(store_time=NOW + timedelta(seconds=31)),
    "a clock 29 s off": of_store(store_time=NOW + timedelta(seconds=29)),
    "versions": of_store(versioned=True),
    "versions, cleared": of_store(versioned=True, rules=(LifecycleRule("r", "", clears_versions=True),)),
    "versions, cleared elsewhere": of_store(versioned=True, rules=(LifecycleRule("", "a/", clears_versions=True),)),
    "objects deleted": of_store(rules=(DAYS_30,)),
    "objects deleted, no rule in force": of_store(rules=(LifecycleRule("r", "", True, deletes_after="30 days"),)),
    "objects deleted elsewhere": of_store(rules=(replace(DAYS_30, prefix="logs/"),)),
    "objects in the ice": of_store(rules=(LifecycleRule("r", "warehouse/games", moves_to="GLACIER"),)),
    "objects moved": of_store(rules=(LifecycleRule("r", "", moves_to="STANDARD_IA"),)),
    "locked": of_store(lock="GOVERNANCE 30 days"),
    "locked, no checksum": of_store(lock="GOVERNANCE 30 days", denied=("s3:PutObject", "no checksum")),
    "unreadable": of_store(unreadable=((Issue.OBJECT_LOCK, "AccessDenied"),)),
    "airflow well": of_airflow(dags=WELL.dags | {"anabranch_hourly__other": True, "theirs": True}),
    "no dag": of_airflow(dags={}),
    "a paused dag": of_airflow(dags=WELL.dags | {"anabranch_hourly__events": True}),
    "a broken file": of_airflow(broken={"odd.py": "ValueError: odd"}),
    "no pool": of_airflow(slots=None),
    "an empty pool": of_airflow(slots=0),
    "no scheduler": of_airflow(is_scheduled=False),
    # A family has one DAG, and a group its own.
    "a family and a group": of_airflow(*OF_FAMILY, family="tenants", dags=FAMILY_DAGS),
    "no dags of a family and a group": of_airflow(*OF_FAMILY, family="tenants", dags={}),
    # The streams of a group have their own DAGs, of manual runs.
    "paused dags of a group": of_airflow(OF_GROUP, dags=dict.fromkeys([*WELL.dags, "anabranch_hourly_group__small"], True)),
}  # fmt: skip


def test_the_findings(recorded: Callable[[Any], None]) -> None:
    recorded(output.plain(FOUND))


def test_reads_of_a_lake_after_apply(tmp_path: Path) -> None:
    made = new_lake(tmp_path)
    facts = tables.read(made.environment, made.stream, made.lake)
    assert [*tables.findings("lake", made.stream, facts)] == []
    assert facts.unread == kafka.Unread(made.state().timeline.open, {0: 0})
    gone = new_stream(schema="n INT", key="n")
    assert tables.read(made.environment, gone, made.lake).apply_refuses
    services.read_catalog(made.environment)  # SQLite has no lock that is held.
    # The batch layer reads the oldest hour that is not accepted next.
    sealed = {"2026-11-21T03": Cut("t", {0: (4, 9)}), "2026-11-21T04": Cut("t", {0: (9, 11)})}
    opened = Timeline("2026-11-21T03", "2026-11-21T05", {0: 11}, sealed=sealed)
    state = replace(made.state(), timeline=opened)
    assert tables.find_unread(state) == kafka.Unread("2026-11-21T03", {0: 4})


def test_another_programs_maintenance_is_recognised_by_snapshots(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    assert tables.find_optimizers(lake.table()) == []
    lake.move("main")
    assert tables.find_optimizers(lake.table()) == [], "our own publishes are none of another's"
    with lake.table().transaction() as tx:
        ages = ("history.expire.max-snapshot-age-ms", "history.expire.max-ref-age-ms")
        tx.set_properties(dict(zip(ages, "12", strict=True)))
    rewrite(lake, "main")
    named, snapshots = tables.find_optimizers(lake.table())
    assert named == "its property history.expire.max-snapshot-age-ms"
    assert snapshots.startswith("1 snapshots that rewrote files or manifests, the newest of 20")
    optimizers = ((lake.name, named), (lake.name, snapshots))
    facts = tables.TableFacts(optimizers=optimizers, ref_ages=((lake.name, "2"),))
    found = [*tables.findings("lake", STREAM, facts)]
    assert checks(found) == {Issue.REF_AGE: "error", Issue.OPTIMIZER: "info"}
    expected = f"ALTER TABLE lake.{lake.name} UNSET TBLPROPERTIES ('history.expire.max-ref-age-ms')"
    assert found[0].remedy == expected
    assert found[1].found == f"{named}; {snapshots}"


def test_the_next_step_of_an_hour() -> None:
    def after(status: StreamStatus) -> str:
        return streams.next_command(STREAM, streams.StreamFacts(status, {}))

    assert streams.next_command(STREAM, None) == "anabranch apply events"
    assert after(replace(STATUS, lag=Lag(3, {0: 3}))) == "anabranch speed events"
    assert after(replace(STATUS, to_seal=["2026-11-21T03"])) == "anabranch batch events"
    assert after(STATUS) == "anabranch hours events"


def store_of(objects: dict[str, bytes], **answers: Any) -> SimpleNamespace:
    """A store of one bucket with these objects."""
    given = {
        "has_bucket": lambda bucket: True, "clock": lambda bucket: NOW,
        "put": lambda bucket, key, body, type: objects.update({key: body}),
        "list_objects": lambda bucket, prefix: [(key, 0, NOW) for key in objects],
        "get": lambda bucket, key: objects[key],
        "delete_objects": lambda bucket, keys: objects.clear(), "versioning": lambda bucket: None,
        "lifecycle": lambda bucket: (), "lock": lambda bucket: None,
    }  # fmt: skip
    return SimpleNamespace(**(given | answers))


@pytest.mark.parametrize(
    ("code", "unread"), [("NotImplemented", []), ("AccessDenied", [Issue.LIFECYCLE])]
)
def test_a_setting_that_a_server_does_not_implement_is_no_finding(
    monkeypatch: pytest.MonkeyPatch, code: str, unread: list[Issue]
) -> None:
    objects: dict[str, bytes] = {}

    def refuse(bucket: str) -> None:
        raise errors.Transient(f"read the lifecycle rules of bucket {bucket}: ClientError: {code}")

    store = store_of(objects, lifecycle=refuse)
    monkeypatch.setattr(s3, "open_store", lambda settings: store)
    answers: list[str] = []
    facts = s3.read(new_environment(Path("/nowhere")), PLACE, lambda: answers.append(code))
    assert [check for check, _ in facts.unreadable] == unread
    assert (facts.denied, facts.rules, len(answers)) == (None, (), 9)


@pytest.mark.parametrize("policy", ["jobs", "maintain", "egress"])
def test_a_policy_suffices_for_the_doctor(monkeypatch: pytest.MonkeyPatch, policy: str) -> None:
    document = json.loads((ROOT / "deploy" / "s3" / f"{policy}.json").read_text(encoding="utf-8"))
    objects: dict[str, bytes] = {}
    used: list[tuple[str, str]] = []

    def put(bucket: str, key: str, body: bytes, type: str) -> None:
        used.append(("s3:PutObject", key))
        objects[key] = body

    def delete(bucket: str, keys: list[str]) -> None:
        used.extend(("s3:DeleteObject", key) for key in keys)

    store = store_of(objects, put=put, delete_objects=delete)
    monkeypatch.setattr(s3, "open_store", lambda settings: store)
    s3.read(new_environment(Path("/nowhere")), PLACE, lambda: None)
    assert [right for right, _ in used] == ["s3:PutObject", "s3:DeleteObject"]
    for right, key in used:
        allowed = [one["Resource"] for one in document["Statement"] if right in one["Action"]]
        patterns = [part for one in allowed for part in ([one] if isinstance(one, str) else one)]
        assert any(fnmatchcase(f"arn:aws:s3:::BUCKET/{key}", one) for one in patterns), right


def test_java_is_missed_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = new_environment(tmp_path)
    with monkeypatch.context() as changed:
        changed.delenv("JAVA_HOME", raising=False)
        changed.setenv("PATH", str(tmp_path))
        assert Issue.JAVA in checks(local.findings(local.read(environment)))
    assert Issue.JAVA not in checks(local.findings(local.read(environment)))


def test_a_nameless_user_and_a_bad_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = new_environment(tmp_path)
    found = checks(local.findings(local.read(environment)))
    assert not {Issue.USER, Issue.TEMPORARY} & found.keys()
    monkeypatch.setattr(os, "getuid", lambda: 54_321_000)
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", f"-Djava.io.tmpdir={tmp_path / 'gone'}")
    refused = [f for f in local.findings(local.read(environment)) if f.severity == "error"]
    assert {f.check for f in refused} >= {Issue.USER, Issue.TEMPORARY}
    entry = f"anabranch:x:54321000:{os.getgid()}::/tmp:/bin/sh"
    remedy = f"add an entry: echo '{entry}' >> /etc/passwd (or nss_wrapper)"
    assert [f.remedy for f in refused if f.check is Issue.USER] == [remedy]


def test_a_workers_python_cannot_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = new_environment(tmp_path)
    monkeypatch.setenv("PYSPARK_PYTHON", str(tmp_path / "python"))
    [finding] = [f for f in local.findings(local.read(environment)) if f.check is Issue.PYTHON]
    variable = finding.remedy.removeprefix("unset ")
    monkeypatch.delenv(variable)
    assert Issue.PYTHON not in checks(local.findings(local.read(environment)))


def test_an_archive_of_other_packages_than_the_drivers(tmp_path: Path) -> None:
    file = tmp_path / "packed.tar.gz"
    environment = new_environment(tmp_path)
    conf = environment.spark.conf | {"spark.archives": f"/another.zip, {file}#{ARCHIVE}"}
    on_cluster = environment.spark.model_copy(update={"conf": conf, "master": "spark://host:7077"})
    environment = environment.model_copy(update={"spark": on_cluster})

    def found(versions: dict[str, str]) -> list[Finding]:
        with tarfile.open(file, "w:gz") as archive:
            content = json.dumps(versions).encode()
            entry = tarfile.TarInfo(VERSIONS)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        return [f for f in local.findings(local.read(environment)) if f.check is Issue.PACKED]

    assert found(installed()) == []
    [finding] = found(installed() | {"pyarrow": "1.0"})
    assert (finding.severity, finding.remedy) == ("error", f"anabranch pack --to {tmp_path}")
    assert finding.found.endswith("found 1.0")
    assert "found none" in found({})[0].found
    file.write_bytes(b"no archive")
    [finding] = [f for f in local.findings(local.read(environment)) if f.check is Issue.PACKED]
    assert finding.found.startswith("cannot be read")


def test_keys_that_reach_executors_unencrypted(tmp_path: Path) -> None:
    made = new_environment(tmp_path)
    keys = config.S3.model_validate({"access_key": "known", "secret_key": "hidden"})

    def found(master: str, s3: config.S3 = keys, **conf: str) -> list[Finding]:
        spark = made.spark.model_copy(update={"master": master, "conf": made.spark.conf | conf})
        catalog = made.catalog.model_copy(update={"warehouse": "s3://b/w"})
        environment = made.model_copy(update={"spark": spark, "s3": s3, "catalog": catalog})
        return [f for f in local.findings(local.read(environment)) if f.check is Issue.UNENCRYPTED]

    [finding] = found("spark://host:7077")
    assert finding.severity == "warning"
    assert "spark.sql.catalog.lake.s3.secret-access-key" in finding.found
    assert "hidden" not in str(finding)
    settings = dict(re.findall(r"(spark\.[\w.]+): (true)", finding.remedy))
    assert settings and found("spark://host:7077", **settings) == []
    assert found("k8s://https://host:6443", config.S3()) == []
    assert found("local[2]") == []


@pytest.mark.parametrize(("megabytes", "severity"), [(512, None), (511, "warning"), (63, "error")])
def test_a_disk_without_room(tmp_path: Path, megabytes: int, severity: str | None) -> None:
    here = local.read(new_environment(tmp_path))
    facts = replace(here, free=megabytes << 20, temporary="/a folder")
    found = [f for f in local.findings(facts) if f.check is Issue.DISK]
    assert [f.severity for f in found] == ([severity] if severity else [])
    assert all(f.remedy == "du -xhd1 '/a folder'" for f in found)


def test_jars_that_are_missing_or_altered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_CACHE", str(tmp_path))
    facts = local.read(new_environment(tmp_path))
    assert checks(local.findings(facts))[Issue.JARS] is Severity.WARNING
    jar = Path(facts.folder) / JOBS[0] / "altered.jar"
    jar.parent.mkdir(parents=True)
    jar.write_bytes(b"x")
    found = checks(local.findings(local.read(new_environment(tmp_path))))[Issue.JARS_DIFFER]
    assert found is Severity.ERROR


def test_a_reader_that_does_not_end_is_given_up_and_the_others_are_heard() -> None:
    end = threading.Event()
    stuck, quick = TimedRead("stuck", end.wait, 0.1), TimedRead("quick", lambda: 7, 60)
    broken = TimedRead("broken", lambda: 1 // 0, 60)
    assert quick.facts() == 7
    assert isinstance(stuck.facts(), errors.NoAnswer) and stuck.is_given_up
    assert isinstance(broken.facts(), errors.AnabranchError) and not broken.is_given_up
    end.set()


def test_readers_of_one_service_are_given_up_once_none_of_them_ends() -> None:
    never = threading.Event()
    # One ends each tenth of a second, the last after 1.2 s.
    slow = [TimedRead(f"slow {i}", partial(never.wait, i / 10)) for i in range(13)]
    stuck = TimedRead("stuck", never.wait)
    wait_for_all([*slow, stuck], 1.0)
    assert [reading.name for reading in (*slow, stuck) if reading.is_given_up] == ["stuck"]
    assert isinstance(stuck.facts(), errors.NoAnswer)
    assert [reading.facts() for reading in slow] == [False] * 13
    never.set()


def test_a_reader_whose_service_answers_slowly_is_heard() -> None:
    never, answers = threading.Event(), Answers()

    def read() -> int:
        for _ in range(8):
            never.wait(0.2)
            answers.note()
        return 7

    slow = TimedRead("slow", read, answers=answers)
    silent = TimedRead("silent", never.wait)
    began = time.monotonic()
    wait_for_all([slow, silent], 1.0)
    assert time.monotonic() - began > 1.6
    assert slow.facts() == 7 and silent.is_given_up
    never.set()


def test_a_folder_without_streams_is_wrong_configuration(tmp_path: Path) -> None:
    write_environment(tmp_path)
    assert "anabranch init" in said("doctor", "--conf", str(tmp_path), expect=2)


def test_airflow_is_checked_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(airflow.HOME, raising=False)
    assert not airflow.is_configured()
    monkeypatch.setenv(airflow.HOME, "/nowhere")
    assert airflow.is_configured()


def test_a_silent_airflow_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent = tmp_path / "airflow"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(airflow, "_ANSWER_SECONDS", 0.2)
    found = r"airflow \w+ .*: expected an answer within 0.2 s"
    with pytest.raises(errors.ConfigurationError, match=found):
        airflow.read()
