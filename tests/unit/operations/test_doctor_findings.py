"""The doctor's deciders, over facts alone; and what it reads of this machine."""

import io
import json
import os
import re
import tarfile
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from foreign_programs import rewrite
from lakes import new_environment, new_lake, new_stream

from anabranch.cli import main
from anabranch.common.deadline import Answers, TimedRead, wait_for_all
from anabranch.common.errors import (
    AnabranchError,
    CodecMissing,
    ConfigurationError,
    MetadataGone,
    MissingRight,
    NoAnswer,
    NoTopicIds,
    Transient,
)
from anabranch.config import S3, Slo
from anabranch.iceberg.s3 import LifecycleRule
from anabranch.kafka.client import TopicSettings
from anabranch.offsets.hours import Cut, Timeline
from anabranch.operations.doctor import (
    airflow,
    kafka,
    local,
    s3,
    services,
    streams,
    tables,
)
from anabranch.operations.doctor.finding import Finding, Issue, Severity
from anabranch.operations.reports.status import Lag, StreamStatus
from anabranch.protocol.ledger_row import HourShare
from anabranch.protocol.retention import Overdue
from anabranch.spark.jars import JOBS
from anabranch.spark.settings import ARCHIVE, VERSIONS, installed

ROOT = Path(__file__).parents[3]
NOW = datetime(2026, 11, 21, 12, 30, tzinfo=UTC)
STREAM = new_stream()
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
    refused=(), hours={}, unexplained={}, dead_letters=0, lost={}, accepted_at=None,
    waiting_since=None,
)  # fmt: skip


def checks(findings: list[Finding]) -> dict[Issue, Severity]:
    return {finding.check: finding.severity for finding in findings}


def of_topic(unread: kafka.Unread | None = UNREAD, **settings: object) -> dict[Issue, Severity]:
    facts = replace(FACTS, settings=replace(SETTINGS, **settings))  # type: ignore[arg-type]
    return checks(kafka.findings(BROKERS, STREAM, facts, unread, NOW))


def test_every_finding_has_its_entry_in_the_operators_page() -> None:
    page = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
    section = page[page.index("## What the doctor finds") :].split("\n## ")[0]
    assert re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE) == [str(check) for check in Issue]


def test_a_group_that_may_not_be_committed_to_is_a_warning() -> None:
    facts = replace(
        FACTS, group_refused=MissingRight("denied", "kafka-acls.sh --operation Read --group g")
    )
    [finding] = kafka.findings(BROKERS, STREAM, facts, UNREAD, NOW)
    assert (finding.check, finding.severity) == (Issue.GROUP_RIGHTS, Severity.WARNING)
    assert finding.remedy == "kafka-acls.sh --operation Read --group g"


def test_an_hour_with_too_many_dead_letters_is_an_error() -> None:
    hour, share = "2026-11-21T12", HourShare(30, 40)
    status = replace(STATUS, dead_shares={hour: share}, too_many_dead=[hour])
    [finding] = streams.findings(STREAM, streams.StreamFacts(status, {}))
    assert (finding.check, finding.severity) == (Issue.DEAD_LETTERS, Severity.ERROR)
    assert finding.expected == "at most 5 % dead letters (quality.max_dead)"
    assert finding.found == "30 of 40 records (75 %)"
    assert finding.remedy == f"anabranch dead-letters events --hours {hour}"


def test_a_topic_that_is_kept_well_has_no_finding() -> None:
    assert of_topic() == {}
    assert of_topic(retention=timedelta(days=7), retention_bytes=8_000) == {}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"retention": timedelta(hours=2)}, {Issue.RETENTION_TIME: Severity.ERROR}),
        ({"retention": timedelta(hours=20)}, {Issue.RETENTION_TIME: Severity.WARNING}),
        # 40 of 100 offsets wait, so 4,000 of 10,000 bytes.
        ({"retention_bytes": 3_999}, {Issue.RETENTION_BYTES: Severity.ERROR}),
        ({"retention_bytes": 7_999}, {Issue.RETENTION_BYTES: Severity.WARNING}),
        ({"retention_bytes": 7_999, "unread": None}, {Issue.RETENTION_BYTES: Severity.INFO}),
        ({"cleanup_policy": "compact,delete"}, {Issue.TOPIC_COMPACTED: Severity.ERROR}),
        (
            {"cleanup_policy": "compact", "compaction_lag": timedelta(hours=20)},
            {Issue.TOPIC_COMPACTED: Severity.ERROR},
        ),
        ({"cleanup_policy": "compact", "compaction_lag": timedelta(hours=40)}, {}),
        ({"timestamp_type": "CreateTime"}, {Issue.TIMESTAMP_TYPE: Severity.INFO}),
        ({"replicas": 1}, {Issue.REPLICATION: Severity.WARNING}),
        ({"min_insync": 1}, {Issue.MIN_INSYNC: Severity.WARNING}),
    ],
)
def test_a_topic_kept_wrongly(settings: dict[str, object], expected: dict[Issue, Severity]) -> None:
    assert of_topic(**settings) == expected  # type: ignore[arg-type]


def test_one_replica_of_the_one_broker_of_this_machine_is_no_finding() -> None:
    here = BROKERS.model_copy(update={"bootstrap_servers": "127.0.0.1:19092"})
    elsewhere = BROKERS.model_copy(update={"bootstrap_servers": "kafka.example.com:9092"})
    facts = replace(FACTS, settings=replace(SETTINGS, replicas=1, brokers=1))
    assert [*kafka.findings(here, STREAM, facts, UNREAD, NOW)] == []
    assert checks(kafka.findings(elsewhere, STREAM, facts, UNREAD, NOW)) == {
        Issue.REPLICATION: Severity.INFO
    }
    facts = replace(FACTS, settings=replace(SETTINGS, replicas=1, brokers=3))
    assert checks(kafka.findings(here, STREAM, facts, UNREAD, NOW)) == {
        Issue.REPLICATION: Severity.WARNING
    }


def test_a_retention_that_covers_the_backlog_is_proposed() -> None:
    facts = replace(FACTS, settings=replace(SETTINGS, retention=timedelta(days=7)))
    late = kafka.Unread("2026-11-11T12", {0: 0})
    [finding] = kafka.findings(BROKERS, STREAM, facts, late, NOW)
    assert finding.severity is Severity.ERROR
    # Ten days and half an hour wait, and a day to spare.
    assert finding.remedy.endswith(f"--add-config retention.ms={12 * 86_400_000}")


def test_compaction_that_the_stream_allows_for_is_no_error() -> None:
    batch = STREAM.batch.model_copy(update={"allow_gaps": ("compacted",)})
    stream = STREAM.model_copy(update={"batch": batch})
    facts = replace(FACTS, settings=replace(SETTINGS, cleanup_policy="compact"))
    assert checks(kafka.findings(BROKERS, stream, facts, UNREAD, NOW)) == {
        Issue.TOPIC_COMPACTED: Severity.INFO
    }


def test_the_remedy_of_compaction_changes_no_policy_and_deletes_nothing() -> None:
    """`cleanup.policy=delete` has retention take what a compacted topic kept for years."""
    facts = replace(FACTS, settings=replace(SETTINGS, cleanup_policy="compact"))
    [finding] = kafka.findings(BROKERS, STREAM, facts, kafka.Unread("2026-11-11T12", {0: 0}), NOW)
    assert finding.remedy.endswith(f"--add-config min.compaction.lag.ms={12 * 86_400_000}")
    assert "cleanup.policy" not in finding.remedy


@pytest.mark.parametrize(
    ("servers", "command"),
    [
        ("127.0.0.1:19092", "anabranch dev topic events --partitions 3"),
        ("localhost:9092", "anabranch dev topic events --partitions 3"),
        (
            "kafka.example.com:9092",
            "kafka-topics.sh --bootstrap-server kafka.example.com:9092 --create --topic events "
            "--partitions 3",
        ),
    ],
)
def test_a_missing_topic_hides_nothing_and_can_be_created(servers: str, command: str) -> None:
    facts = kafka.KafkaFacts(None, {}, {}, None)
    [finding] = kafka.findings(
        BROKERS.model_copy(update={"bootstrap_servers": servers}), STREAM, facts, UNREAD, NOW
    )
    assert (finding.check, finding.severity) == (Issue.TOPIC_MISSING, Severity.ERROR)
    assert finding.remedy == command


@pytest.mark.parametrize(
    ("made", "check"),
    [
        (kafka.failed(BROKERS, STREAM, Transient("away")), Issue.KAFKA_AWAY),
        (kafka.failed(BROKERS, STREAM, ConfigurationError("denied")), Issue.KAFKA_RIGHTS),
        (kafka.failed(BROKERS, STREAM, CodecMissing("lz4")), Issue.KAFKA_CODEC),
        (kafka.failed(BROKERS, STREAM, NoTopicIds("none")), Issue.TOPIC_IDS),
        (s3.failed(new_environment(Path("/nowhere")), PLACE, NoAnswer("away")), Issue.S3_AWAY),
        (
            s3.failed(new_environment(Path("/nowhere")), PLACE, ConfigurationError("denied")),
            Issue.S3_RIGHTS,
        ),
        (
            services.catalog_failed(new_environment(Path("/nowhere")).catalog, Transient("away")),
            Issue.CATALOG_AWAY,
        ),
        (
            services.catalog_failed(
                new_environment(Path("/nowhere")).catalog, ConfigurationError("denied")
            ),
            Issue.CATALOG_RIGHTS,
        ),
        (
            services.catalog_failed(
                new_environment(Path("/")).catalog, Transient("database is locked")
            ),
            Issue.CATALOG_LOCKED,
        ),
        (tables.failed(STREAM, MetadataGone("gone")), Issue.METADATA_GONE),
        (services.registry_failed(STREAM, Transient("away")), Issue.REGISTRY_AWAY),
        (services.registry_failed(STREAM, ConfigurationError("denied")), Issue.REGISTRY_RIGHTS),
    ],
)
def test_an_unreachable_service_is_no_refusal(made: Finding, check: Issue) -> None:
    assert (made.check, made.severity) == (check, Severity.ERROR)


def test_a_missing_right_is_granted_by_its_own_command() -> None:
    """And not by one that grants what the user has already."""
    command = (
        "kafka-acls.sh --add --allow-principal User:NAME --operation DescribeConfigs --topic events"
    )
    made = kafka.failed(BROKERS, STREAM, MissingRight("denied", command))
    assert (made.check, made.remedy) == (Issue.KAFKA_RIGHTS, command)


def test_a_speed_layer_that_is_later_than_promised_is_an_error() -> None:
    promised = new_stream(slo=Slo(fresh=timedelta(seconds=10)))
    late = streams.StreamFacts(replace(STATUS, late="2,900 offsets wait"), {})
    [finding] = streams.findings(promised, late)
    assert (finding.check, finding.severity) == (Issue.LATE, Severity.ERROR)
    assert finding.expected == "a speed layer without lag within 0:00:10"
    assert finding.remedy == "anabranch speed events"


def test_reads_of_a_lake_after_apply(tmp_path: Path) -> None:
    made = new_lake(tmp_path)
    facts = tables.read(made.environment, made.stream, made.lake)
    assert [*tables.findings("lake", made.stream, facts)] == []
    assert facts.unread == kafka.Unread(made.state().timeline.open, {0: 0})
    # SQLite has no lock that is held.
    services.read_catalog(made.environment)


def test_a_certificate_of_s3_that_is_not_trusted_is_no_missing_right() -> None:
    said = (
        "look at bucket b: SSL validation failed for https://s3.example.com/b [SSL: "
        "CERTIFICATE_VERIFY_FAILED]"
    )
    finding = s3.failed(new_environment(Path("/nowhere")), PLACE, ConfigurationError(said))
    assert (finding.check, finding.severity) == (Issue.S3_AWAY, "error")
    assert finding.remedy.startswith("s3.ca in anabranch.yaml")


def test_tables_that_differ() -> None:
    names = ("games.events", "games.events_dead_letters", "games.events_hours")
    assert checks(tables.findings("lake", STREAM, tables.TableFacts(missing=names))) == {
        Issue.NOT_APPLIED: "info"
    }
    archived = new_stream(archive={"raw": "90 days"})
    facts = tables.TableFacts(missing=(*names, archived.archive_table))
    assert checks(tables.findings("lake", archived, facts)) == {Issue.NOT_APPLIED: "info"}
    facts = tables.TableFacts(missing=names)
    assert checks(tables.findings("lake", archived, facts)) == {Issue.TABLE_MISSING: "error"}
    drift = tables.PropertyDrift(names[0], "commit.retry.num-retries", "30", None)
    facts = tables.TableFacts(
        missing=names[2:],
        branches=((names[0], "batch"),),
        columns="column n is missing",
        drifts=(drift,),
    )
    found = [*tables.findings("lake", STREAM, facts)]
    assert checks(found) == {
        Issue.TABLE_MISSING: "error", Issue.BRANCH_MISSING: "error", Issue.COLUMNS: "error",
        Issue.PROPERTIES: "warning",
    }  # fmt: skip
    assert found[-1].remedy == (
        "ALTER TABLE lake.games.events SET TBLPROPERTIES ('commit.retry.num-retries' = '30')"
    )


def test_another_programs_maintenance_is_recognised_by_snapshots(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    assert tables.find_optimizers(lake.table()) == []
    lake.move("main")
    assert tables.find_optimizers(lake.table()) == [], (
        "our own publishes are none of another program's"
    )
    with lake.table().transaction() as tx:
        tx.set_properties(
            {"history.expire.max-snapshot-age-ms": "1", "history.expire.max-ref-age-ms": "2"}
        )
    rewrite(lake, "main")
    named, snapshots = tables.find_optimizers(lake.table())
    assert named == "its property history.expire.max-snapshot-age-ms"
    assert snapshots.startswith("1 snapshots that rewrote files or manifests, the newest of 20")
    facts = tables.TableFacts(
        optimizers=((lake.name, named), (lake.name, snapshots)), ref_ages=((lake.name, "2"),)
    )
    found = [*tables.findings("lake", STREAM, facts)]
    assert checks(found) == {Issue.REF_AGE: "error", Issue.OPTIMIZER: "info"}
    expected = f"ALTER TABLE lake.{lake.name} UNSET TBLPROPERTIES ('history.expire.max-ref-age-ms')"
    assert found[0].remedy == expected
    assert found[1].found == f"{named}; {snapshots}"


def test_the_batch_layer_reads_the_oldest_unaccepted_hour_next(tmp_path: Path) -> None:
    sealed = {"2026-11-21T03": Cut("t", {0: (4, 9)}), "2026-11-21T04": Cut("t", {0: (9, 11)})}
    made = new_lake(
        tmp_path, timeline=Timeline("2026-11-21T03", "2026-11-21T05", {0: 11}, sealed=sealed)
    )
    assert tables.find_unread(made.state()) == kafka.Unread("2026-11-21T03", {0: 4})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"unreadable": "another id", "late": "another id"}, {Issue.TOPIC_RECREATED: "error"}),
        ({"unreadable": "none", "topic_missing": True, "late": "none"}, {}),
        ({"unexplained": {"2026-11-21T03": {"missing": 2}}}, {Issue.UNEXPLAINED: "error"}),
        ({"refused": ["2026-11-21T03"], "backlog": ["2026-11-21T03"]}, {Issue.REFUSED: "warning"}),
        ({"late": "5 offsets wait"}, {Issue.LATE: "warning"}),
        ({"late": "5 offsets wait", "speed_has_begun": False}, {}),
        ({"refused_restatements": ["2026-11-21T05"]}, {Issue.REFUSED: "warning"}),
        (
            {"backlog": ["2026-11-21T11"], "to_seal": ["2026-11-21T12", "2026-11-21T13"]},
            {Issue.BACKLOG: "warning"},
        ),
        ({"backlog": ["2026-11-21T11"], "to_seal": ["2026-11-21T12"]}, {}),
        # One hour that fails at each run, between accepted ones.
        ({"backlog": ["2026-11-21T09"]}, {Issue.BACKLOG: "warning"}),
        ({"overdue": Overdue(3, "2026-11-01T00", None)}, {Issue.OVERDUE: "warning"}),
        ({"unmaintained": "no run recorded"}, {Issue.MAINTENANCE: "warning"}),
    ],
)
def test_the_state_of_a_stream(changes: dict[str, object], expected: dict[Issue, str]) -> None:
    status = replace(STATUS, **changes)  # type: ignore[arg-type]
    assert checks(streams.findings(STREAM, streams.StreamFacts(status, {}))) == expected


def test_the_next_step_of_an_hour() -> None:
    def after(status: StreamStatus) -> str:
        return streams.next_command(STREAM, streams.StreamFacts(status, {}))

    assert streams.next_command(STREAM, None) == "anabranch apply events"
    assert after(replace(STATUS, lag=Lag(3, {0: 3}))) == "anabranch speed events"
    assert after(replace(STATUS, to_seal=["2026-11-21T03"])) == "anabranch batch events"
    assert after(STATUS) == "anabranch hours events"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"has_bucket": False}, {Issue.BUCKET_MISSING: "warning"}),
        ({"denied": ("s3:DeleteObject", "AccessDenied")}, {Issue.S3_RIGHTS: "error"}),
        ({"store_time": NOW + timedelta(seconds=31)}, {Issue.CLOCK: "error"}),
        ({"store_time": NOW + timedelta(seconds=29)}, {}),
        ({"versioned": True}, {Issue.VERSIONING: "warning"}),
        ({"versioned": True, "rules": (LifecycleRule("r", "", clears_versions=True),)}, {}),
        (
            {"versioned": True, "rules": (LifecycleRule("", "a/", clears_versions=True),)},
            {Issue.VERSIONING: "warning"},
        ),
        ({"rules": (LifecycleRule("r", "", deletes_after="30 days"),)}, {Issue.LIFECYCLE: "error"}),
        (
            {"rules": (LifecycleRule("r", "warehouse/games", moves_to="GLACIER"),)},
            {Issue.LIFECYCLE: "error"},
        ),
        ({"rules": (LifecycleRule("r", "", moves_to="STANDARD_IA"),)}, {}),
        (
            {"rules": (LifecycleRule("r", "", True, deletes_after="30 days"),)},
            {Issue.LIFECYCLE: "warning"},
        ),
        ({"rules": (LifecycleRule("r", "logs/", deletes_after="30 days"),)}, {}),
        ({"lock": "GOVERNANCE 30 days"}, {Issue.OBJECT_LOCK: "warning"}),
        (
            {"lock": "GOVERNANCE 30 days", "denied": ("s3:PutObject", "no checksum")},
            {Issue.OBJECT_LOCK: "error"},
        ),
        ({"unreadable": ((Issue.OBJECT_LOCK, "AccessDenied"),)}, {Issue.OBJECT_LOCK: "info"}),
    ],
)
def test_a_bucket(changes: dict[str, object], expected: dict[Issue, str]) -> None:
    assert checks(s3.findings(PLACE, ("events",), replace(STORE, **changes))) == expected  # type: ignore[arg-type]


def store_of(objects: dict[str, bytes], **answers: Any) -> SimpleNamespace:
    """A store of one bucket with these objects."""
    given = {
        "has_bucket": lambda bucket: True,
        "clock": lambda bucket: NOW,
        "put": lambda bucket, key, body, type: objects.update({key: body}),
        "list_objects": lambda bucket, prefix: [(key, 0, NOW) for key in objects],
        "get": lambda bucket, key: objects[key],
        "delete_objects": lambda bucket, keys: objects.clear(),
        "versioning": lambda bucket: None,
        "lifecycle": lambda bucket: (),
        "lock": lambda bucket: None,
    }
    return SimpleNamespace(**(given | answers))


@pytest.mark.parametrize(
    ("code", "unread"), [("NotImplemented", []), ("AccessDenied", [Issue.LIFECYCLE])]
)
def test_a_setting_that_a_server_does_not_implement_is_no_finding(
    monkeypatch: pytest.MonkeyPatch, code: str, unread: list[Issue]
) -> None:
    objects: dict[str, bytes] = {}

    def refuse(bucket: str) -> None:
        raise Transient(f"read the lifecycle rules of bucket {bucket}: ClientError: {code}")

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


def test_a_subject_that_is_missing() -> None:
    assert checks(services.subject_findings(STREAM, False)) == {Issue.SUBJECT_MISSING: "warning"}
    assert services.subject_findings(STREAM, True) == []


def test_java_is_missed_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = new_environment(tmp_path)
    with monkeypatch.context() as changed:
        changed.delenv("JAVA_HOME", raising=False)
        changed.setenv("PATH", str(tmp_path))
        assert Issue.JAVA in checks(local.findings(local.read(environment)))
    assert Issue.JAVA not in checks(local.findings(local.read(environment)))


def test_a_user_without_a_name_and_a_temporary_folder_without_execution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = new_environment(tmp_path)
    found = checks(local.findings(local.read(environment)))
    assert not {Issue.USER, Issue.TEMPORARY} & found.keys()
    monkeypatch.setattr(os, "getuid", lambda: 54_321_000)
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", f"-Djava.io.tmpdir={tmp_path / 'gone'}")
    refused = [f for f in local.findings(local.read(environment)) if f.severity == "error"]
    assert {f.check for f in refused} >= {Issue.USER, Issue.TEMPORARY}
    assert [f.remedy for f in refused if f.check is Issue.USER] == [
        f"add an entry: echo 'anabranch:x:54321000:{os.getgid()}::/tmp:/bin/sh' >> /etc/passwd (or "
        "nss_wrapper)"
    ]


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
    keys = S3.model_validate({"access_key": "known", "secret_key": "hidden"})

    def found(master: str, s3: S3 = keys, **conf: str) -> list[Finding]:
        spark = made.spark.model_copy(update={"master": master, "conf": made.spark.conf | conf})
        environment = made.model_copy(
            update={
                "spark": spark,
                "s3": s3,
                "catalog": made.catalog.model_copy(update={"warehouse": "s3://b/w"}),
            }
        )
        return [f for f in local.findings(local.read(environment)) if f.check is Issue.UNENCRYPTED]

    [finding] = found("spark://host:7077")
    assert finding.severity == "warning"
    assert "spark.sql.catalog.lake.s3.secret-access-key" in finding.found
    assert "hidden" not in str(finding)
    settings = dict(re.findall(r"(spark\.[\w.]+): (true)", finding.remedy))
    assert settings and found("spark://host:7077", **settings) == []
    assert found("k8s://https://host:6443", S3()) == []
    assert found("local[2]") == []


@pytest.mark.parametrize(("megabytes", "severity"), [(512, None), (511, "warning"), (63, "error")])
def test_a_disk_without_room(tmp_path: Path, megabytes: int, severity: str | None) -> None:
    facts = replace(
        local.read(new_environment(tmp_path)), free=megabytes << 20, temporary="/a folder"
    )
    found = [f for f in local.findings(facts) if f.check is Issue.DISK]
    assert [f.severity for f in found] == ([severity] if severity else [])
    assert all(f.remedy == "du -xhd1 '/a folder'" for f in found)


def test_jars_that_are_not_there_are_a_warning_and_other_bytes_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    assert isinstance(stuck.facts(), NoAnswer) and stuck.is_given_up
    assert isinstance(broken.facts(), AnabranchError) and not broken.is_given_up
    end.set()


def test_readers_of_one_service_are_given_up_once_none_of_them_ends() -> None:
    never = threading.Event()
    # One ends each tenth of a second, the last after 1.2 s.
    slow = [TimedRead(f"slow {i}", partial(never.wait, i / 10)) for i in range(13)]
    stuck = TimedRead("stuck", never.wait)
    wait_for_all([*slow, stuck], 1.0)
    assert [reading.name for reading in (*slow, stuck) if reading.is_given_up] == ["stuck"]
    assert isinstance(stuck.facts(), NoAnswer)
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
    (tmp_path / "anabranch.yaml").write_text(
        "kafka: {bootstrap_servers: '127.0.0.1:1'}\n"
        f"catalog: {{name: lake, uri: 'sqlite:///{tmp_path}/c.db', warehouse: 'file://{tmp_path}/w'}}\n"
    )
    done = CliRunner().invoke(main, ["doctor", "--conf", str(tmp_path)])
    assert done.exit_code == 2
    assert "anabranch init" in done.output


WELL = airflow.AirflowFacts(
    {f"anabranch_{name}__events": False for name in ("hourly", "maintenance", "speed_watch")},
    {},
    128,
    True,
)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {}),
        ({"dags": {}}, {Issue.AIRFLOW_DAG_MISSING: Severity.ERROR}),
        (
            {"dags": WELL.dags | {"anabranch_hourly__events": True}},
            {Issue.AIRFLOW_PAUSED: Severity.WARNING},
        ),
        ({"dags": WELL.dags | {"anabranch_hourly__other": True, "theirs": True}}, {}),
        ({"broken": {"odd.py": "ValueError: odd"}}, {Issue.AIRFLOW_IMPORT: Severity.ERROR}),
        ({"slots": None}, {Issue.AIRFLOW_POOL: Severity.ERROR}),
        ({"slots": 0}, {Issue.AIRFLOW_POOL: Severity.ERROR}),
        ({"is_scheduled": False}, {Issue.AIRFLOW_SCHEDULER: Severity.ERROR}),
    ],
)
def test_problems_that_keep_airflow_from_running_a_streams_dags(
    changed: dict[str, Any], expected: dict[Issue, Severity]
) -> None:
    found = [*airflow.findings([new_stream()], {}, replace(WELL, **changed))]
    assert checks(found) == expected


def test_a_family_has_one_dag_and_a_group_its_own() -> None:
    streams = [new_stream(name=f"tenants_{one}", group="small") for one in "ab"]
    families = dict.fromkeys(("tenants_a", "tenants_b"), "tenants")
    dags = {"anabranch_maintenance__tenants": False, "anabranch_hourly_group__small": False}
    assert [*airflow.findings(streams, families, replace(WELL, dags=dags))] == []
    [missing, other] = airflow.findings(streams, families, replace(WELL, dags={}))
    assert missing.expected == "the DAGs of group small"
    assert missing.found == "no anabranch_hourly_group__small"
    assert other.expected == "the DAGs of family tenants"
    assert other.found == "no anabranch_maintenance__tenants"


def test_a_paused_dag_of_a_group_is_found_and_its_streams_own_have_manual_runs() -> None:
    dags = dict.fromkeys([*WELL.dags, "anabranch_hourly_group__small"], True)
    [of_group, of_stream] = airflow.findings(
        [new_stream(group="small")], {}, replace(WELL, dags=dags)
    )
    assert of_group.found == "anabranch_hourly_group__small is paused: hours are not rebuilt"
    assert of_group.remedy.endswith("'^anabranch_.+__(small)$'")
    assert "anabranch_hourly__events is paused: manual runs do not start" in of_stream.found


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
    with pytest.raises(ConfigurationError, match=found):
        airflow.read()
