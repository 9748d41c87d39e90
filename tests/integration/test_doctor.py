"""Each finding of the doctor is caused, and its remedy, run as it is printed, clears it."""

import json
import os
import shlex
import sqlite3
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aws import running_aws
from click.testing import CliRunner
from commands import call
from programs import output_of
from pydantic import SecretStr
from pyiceberg.table import Transaction
from pyspark.sql import SparkSession
from run_books import printed
from world import SCHEMA, World, past_hour, spread

from anabranch import config
from anabranch.cli import main
from anabranch.operations.doctor import s3 as store
from anabranch.operations.finding import Finding, Issue
from anabranch.spark import jars
from anabranch.spark.java import require_java

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the commands that remedies name beside ours: Kafka's."""
    folder = tmp_path_factory.mktemp("tools")
    java, class_path = require_java(), ":".join(map(str, jars.ensure_jars().broker))
    command = f"{java} -XX:TieredStopAtLevel=1 -cp {class_path} kafka.admin.ConfigCommand"
    (folder / "kafka-configs.sh").write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    (folder / "kafka-configs.sh").chmod(0o755)
    return folder


class Patient:
    """An examined stream, its accepted `hour`, and an operator who runs the remedies."""

    def __init__(self, one: World, tools: Path, hour: str) -> None:
        self.one, self.tools, self.hour = one, tools, hour

    def report(self) -> dict[str, Any]:
        done = CliRunner().invoke(
            main, ["doctor", self.one.name, "--conf", str(self.one.folder), "--output", "json"]
        )
        report: dict[str, Any] = json.loads(done.stdout)
        assert done.exit_code == (0 if report["ready"] else 1), done.output
        assert any(f["severity"] == "error" for f in report["findings"]) is not report["ready"]
        assert "anabranch-local" not in done.output, "a secret is shown"
        return report

    def findings(self, check: Issue) -> list[dict[str, Any]]:
        return [f for f in self.report()["findings"] if f["check"] == check]

    def finding(self, check: Issue) -> dict[str, Any]:
        found = self.findings(check)
        assert found, f"expected {check}, found {self.report()['findings']}"
        return found[0]

    def checks(self) -> set[str]:
        return {f["check"] for f in self.report()["findings"]}

    def cured(self, check: Issue) -> dict[str, Any]:
        """The finding, whose remedy clears it."""
        finding = self.finding(check)
        self.run(finding["remedy"])
        assert self.findings(check) == []
        return finding

    def run(self, remedy: str) -> None:
        """The remedy in a shell, or in Spark's; a command of ours in this process."""
        if remedy.startswith("ALTER TABLE"):
            self.one.spark.sql(remedy)
            return
        program, *arguments = shlex.split(remedy)
        if program == "anabranch":
            mine = CliRunner().invoke(main, arguments, env={"ANABRANCH_CONF": str(self.one.folder)})
            assert mine.exit_code == 0, f"{remedy}: {mine.output}\n{mine.exception!r}"
            return
        environment = os.environ | {"PATH": f"{self.tools}{os.pathsep}{os.environ['PATH']}"}
        output_of(remedy, shell=True, env=environment)

    def set(self, key: str, value: str) -> None:
        """A setting of the topic, changed by another client."""
        self.one.set_topic(**{key: value})


@pytest.fixture(scope="module")
def patient(
    environment: dict[str, Any],
    spark: SparkSession,
    tools: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Patient]:
    """A stream with an accepted hour, and records of the running one."""
    one = World(tmp_path_factory.mktemp("doctor") / "conf", environment, spark)
    one.topic()
    hour = past_hour(1)
    one.begin(spread(hour, 20, "e"))
    assert [(r.hour, r.decision) for r in one.batch()] == [(hour, "accepted")]
    one.speed()
    one.send_now(20, "now")
    one.speed()
    yield Patient(one, tools, hour)
    one.kafka.close()


def test_a_stream_in_order_is_ready_and_is_left_as_it_was(patient: Patient) -> None:
    before = patient.one.state.heads
    report = patient.report()
    assert (report["ready"], report["next"]) == (True, f"anabranch hours {patient.one.name}")
    assert {f["severity"] for f in report["findings"]} <= {"info"}
    names = [one["name"] for one in report["examined"]]
    assert names[:3] == ["this machine", "s3", "catalog"]
    assert names[3:] == [f"{what} {patient.one.name}" for what in ("kafka", "tables", "stream")]
    assert patient.one.state.heads == before
    text = call(patient.one, "doctor", patient.one.name)
    assert text.endswith(f"\nready; next: anabranch hours {patient.one.name}\n")
    assert all(len(line) <= 80 or "remedy" in line for line in text.splitlines())


@pytest.mark.parametrize(
    ("key", "value", "check", "severity", "run_book"),
    [
        (
            "cleanup.policy", "compact", Issue.TOPIC_COMPACTED, "error",
            printed(
                "kafka-configs.sh --bootstrap-server BROKERS --alter --topic TOPIC "
                "--add-config min.compaction.lag.ms=172800000"
            ),
        ),
        pytest.param(
            "retention.ms", "14400000", Issue.RETENTION_TIME, "warning",
            printed(
                "kafka-configs.sh --bootstrap-server BROKERS --alter --topic TOPIC "
                "--add-config retention.ms=604800000"
            ),
            marks=pytest.mark.full,
        ),
        (
            "retention.bytes", "100", Issue.RETENTION_BYTES, "error",
            printed(
                "kafka-configs.sh --bootstrap-server BROKERS --alter --topic TOPIC "
                "--add-config retention.bytes=-1"
            ),
        ),
        pytest.param(
            "message.timestamp.type", "CreateTime", Issue.TIMESTAMP_TYPE, "info",
            printed(
                "kafka-configs.sh --bootstrap-server BROKERS --alter --topic TOPIC "
                "--add-config message.timestamp.type=LogAppendTime"
            ),
            marks=pytest.mark.full,
        ),
    ],
)  # fmt: skip
def test_a_topic_kept_otherwise_than_the_layers_need(
    patient: Patient, key: str, value: str, check: Issue, severity: str, run_book: str
) -> None:
    patient.set(key, value)
    finding = patient.cured(check)
    assert (finding["severity"], finding["subject"]) == (severity, patient.one.name)
    servers = patient.one.job.environment.kafka.bootstrap_servers
    run_book = run_book.replace("BROKERS", servers).replace("TOPIC", patient.one.name)
    assert finding["remedy"] == run_book


def test_a_table_that_is_missing(patient: Patient) -> None:
    patient.one.lake.catalog.drop_table(patient.one.job.stream.hours_table)
    finding = patient.cured(Issue.TABLE_MISSING)
    assert (finding["subject"], finding["remedy"]) == (
        patient.one.job.stream.hours_table,
        printed("anabranch apply STREAM", STREAM=patient.one.name),
    )


def test_a_branch_that_is_missing(patient: Patient) -> None:
    table = patient.one.lake.load(patient.one.job.stream.table)
    table.manage_snapshots().remove_branch("batch").commit()
    finding = patient.cured(Issue.BRANCH_MISSING)
    assert (finding["severity"], finding["expected"]) == ("error", "branch batch")


def test_a_property_that_drifted(patient: Patient) -> None:
    with Transaction(patient.one.lake.load(patient.one.job.stream.table), autocommit=True) as tx:
        tx.set_properties({"write.wap.enabled": "false"})
    finding = patient.cured(Issue.PROPERTIES)
    assert (finding["severity"], finding["found"]) == ("error", "false")
    assert finding["remedy"] == printed(
        "ALTER TABLE lake.NAMESPACE.NAME SET TBLPROPERTIES ('KEY' = 'VALUE')",
        NAMESPACE=patient.one.name, NAME="events", KEY="write.wap.enabled", VALUE="true",
    )  # fmt: skip


def test_a_column_that_is_not_applied(patient: Patient) -> None:
    patient.one.reconfigure(schema=f"{SCHEMA}, guild STRING")
    assert "guild" in patient.cured(Issue.COLUMNS)["found"]


def test_a_ledger_that_differs_from_the_table(patient: Patient) -> None:
    one, hour = patient.one, patient.hour
    [row] = [r for r in one.job.ledger.history({hour}) if r.decision == "accepted"][-1:]
    wrong = replace(row, decision_id=uuid.uuid4().hex, good=(row.good or 0) + 1)
    one.job.ledger.record([wrong])
    finding = patient.finding(Issue.LEDGER)
    assert (finding["severity"], finding["subject"]) == ("error", f"{one.name} {hour}")
    assert finding["remedy"] == printed(
        "anabranch batch STREAM --hour HOUR --restate", STREAM=one.name, HOUR=hour
    )
    # This does what its command does, in this process.
    assert [r.decision for r in one.batch(hour, restate=True)] == ["accepted"]
    assert patient.findings(Issue.LEDGER) == []


def test_a_dead_kafka_hides_nothing_else(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.kafka.client._BOOTSTRAP_MS", 1_000)
    one = patient.one
    kafka = one.environment_file["kafka"]
    one.set_environment(
        kafka={"bootstrap_servers": "127.0.0.1:1"},
        s3=one.environment_file["s3"] | {"secret_key": "wrong"},
    )
    try:
        report = patient.report()
        found = {f["check"]: f for f in report["findings"]}
        assert found[Issue.KAFKA_AWAY]["remedy"].startswith("anabranch dev up ")
        assert found[Issue.S3_RIGHTS]["severity"] == "error"
        assert [one["name"] for one in report["examined"]][:3] == ["this machine", "s3", "catalog"]
        assert "wrong" not in json.dumps(report)
    finally:
        one.set_environment(
            kafka=kafka, s3=one.environment_file["s3"] | {"secret_key": "${AWS_SECRET_ACCESS_KEY}"}
        )
    assert not {Issue.KAFKA_AWAY, Issue.S3_RIGHTS} & patient.checks()


@pytest.mark.parametrize("transaction", ["IMMEDIATE", "EXCLUSIVE"])
def test_a_locked_catalog(patient: Patient, environment: dict[str, Any], transaction: str) -> None:
    """The catalog cannot even be opened while another process holds an exclusive lock."""
    holder = sqlite3.connect(environment["catalog"]["uri"].removeprefix("sqlite:///"))
    holder.execute(f"BEGIN {transaction}")
    try:
        assert patient.finding(Issue.CATALOG_LOCKED)["severity"] == "error"
    finally:
        holder.close()
    assert patient.findings(Issue.CATALOG_LOCKED) == []


@pytest.mark.usefixtures("single_broker")
def test_a_recreated_topic(patient: Patient) -> None:
    patient.one.delete_topic()
    patient.one.topic()
    finding = patient.cured(Issue.TOPIC_RECREATED)
    assert finding["remedy"] == printed("anabranch adopt STREAM", STREAM=patient.one.name)


@pytest.mark.usefixtures("single_broker")
def test_the_first_thing_to_run(
    environment: dict[str, Any], spark: SparkSession, tools: Path, tmp_path: Path
) -> None:
    """Each remedy leads to the next and the end is ready; at first there is nothing at all."""
    bucket = f"doctor-{uuid.uuid4().hex[:8]}"
    settings = environment | {
        "catalog": environment["catalog"]
        | {"uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"s3://{bucket}/warehouse"}
    }
    one = World(tmp_path / "conf", settings, spark)
    patient = Patient(one, tools, past_hour(1))
    try:
        report = patient.report()
        found = {f["check"]: f for f in report["findings"]}
        assert found[Issue.NOT_APPLIED]["remedy"] == found[Issue.BUCKET_MISSING]["remedy"]
        assert (report["ready"], report["next"]) == (False, found[Issue.TOPIC_MISSING]["remedy"])
        assert report["next"] == printed("anabranch dev topic TOPIC --partitions 3", TOPIC=one.name)
        patient.run(report["next"])
        report = patient.report()
        assert (report["ready"], report["next"]) == (True, f"anabranch apply {one.name}")
        patient.run(report["next"])
        assert not {Issue.NOT_APPLIED, Issue.BUCKET_MISSING} & patient.checks()
        one.send_now(2, "e")
        assert patient.report()["next"] == f"anabranch speed {one.name}"
    finally:
        one.kafka.close()


_AWS = """
import json, re, sys
import boto3
operation, options = sys.argv[2], sys.argv[3:]
pairs = zip((o.removeprefix("--") for o in options[::2]), options[1::2])
values = {"".join(word.title() for word in name.split("-")): value for name, value in pairs}
values = {name: json.loads(value) if value.startswith("{") else value for name, value in values.items()}
getattr(boto3.client("s3"), operation.replace("-", "_"))(**values)
"""


def empty(s3: Any, bucket: str) -> None:
    """Remove every version: moto changes the lock of an empty bucket only."""
    listed = s3.list_object_versions(Bucket=bucket)
    for one in (*listed.get("Versions", ()), *listed.get("DeleteMarkers", ())):
        version = {"Key": one["Key"], "VersionId": one["VersionId"]}
        s3.delete_object(Bucket=bucket, BypassGovernanceRetention=True, **version)


def test_a_bucket_whose_settings_delete_keep_or_refuse(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tools / "aws.py").write_text(_AWS)
    (tools / "aws").write_text(f'#!/bin/sh\nexec {sys.executable} {tools / "aws.py"} "$@"\n')
    (tools / "aws").chmod(0o755)
    where = store.Warehouse("lake", "warehouse/")
    with running_aws(tmp_path) as aws:
        settings = config.Environment(
            kafka=config.Kafka(bootstrap_servers="127.0.0.1:1"),
            catalog=config.Catalog(
                name="lake", uri=f"sqlite:///{tmp_path}/c.db", warehouse="s3://lake/warehouse"
            ),
            s3=config.S3(
                endpoint=aws.url, access_key=SecretStr("root"), secret_key=SecretStr("root")
            ),
        )
        for name, value in {
            "AWS_ENDPOINT_URL": aws.url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "root",
            "AWS_SECRET_ACCESS_KEY": "root",
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
        }.items():
            monkeypatch.setenv(name, value)

        def found() -> dict[Issue, Finding]:
            facts = store.read(settings, where, lambda: None)
            return {f.check: f for f in store.findings(where, ("events",), facts)}

        def run(remedy: str) -> None:
            output_of(remedy, shell=True)

        s3 = aws.client("s3")
        assert found().keys() == {Issue.BUCKET_MISSING}
        s3.create_bucket(Bucket="lake", ObjectLockEnabledForBucket=True)
        # A bucket that can lock has versions.
        assert found().keys() == {Issue.VERSIONING}
        rule = {
            "ID": "old", "Status": "Enabled", "Filter": {"Prefix": ""}, "Expiration": {"Days": 30},
            "NoncurrentVersionExpiration": {"NoncurrentDays": 7},
        }  # fmt: skip
        lifecycle = {"Rules": [rule]}
        s3.put_bucket_lifecycle_configuration(Bucket="lake", LifecycleConfiguration=lifecycle)
        assert {check: f.severity for check, f in found().items()} == {Issue.LIFECYCLE: "error"}
        del rule["Expiration"]
        s3.put_bucket_lifecycle_configuration(Bucket="lake", LifecycleConfiguration=lifecycle)
        assert found() == {}

        kept = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 30}}
        lock = {"ObjectLockEnabled": "Enabled", "Rule": kept}
        empty(s3, "lake")
        s3.put_object_lock_configuration(Bucket="lake", ObjectLockConfiguration=lock)
        [locked] = found().values()
        # An object without a checksum is refused then.
        assert (locked.check, locked.severity) == (Issue.OBJECT_LOCK, "error")
        assert locked.remedy == printed(
            "aws s3api put-object-lock-configuration --bucket BUCKET "
            """--object-lock-configuration '{"ObjectLockEnabled": "Enabled"}'""",
            BUCKET="lake",
        )
        assert locked.found.startswith("GOVERNANCE 30 days; write s3://lake/warehouse/")
        empty(s3, "lake")
        run(locked.remedy)
        assert found() == {}

        assert s3.list_objects_v2(Bucket="lake").get("Contents") is None, (
            "the doctor leaves nothing behind"
        )

        policy = json.loads(
            (ROOT / "deploy" / "s3" / "reader.json").read_text().replace("BUCKET", "lake")
        )
        policy["Statement"].append({"Effect": "Allow", "Action": "s3:HeadBucket", "Resource": "*"})
        access, secret = aws.user("reader", json.dumps(policy))
        aws.enforce()
        reader = config.S3(
            endpoint=aws.url, access_key=SecretStr(access), secret_key=SecretStr(secret)
        )
        facts = store.read(settings.model_copy(update={"s3": reader}), where, lambda: None)
        findings = store.findings(where, ("events",), facts)
        [denied] = [f for f in findings if f.severity == "error"]
        assert denied.check == Issue.S3_RIGHTS and "s3:PutObject" in denied.remedy
