"""A finding of the doctor, its kind and its severity."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """The severity of a finding. `error`: a job cannot run, or data may be lost. `warning`: jobs
    run now and may fail later. `info`: no action needed."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Issue(StrEnum):
    """The kinds of findings; docs/runbooks.md has an entry for each."""

    NOT_EXAMINED = "not-examined"
    NO_ANSWER = "no-answer"
    JAVA = "local.java"
    USER = "local.user"
    TEMPORARY = "local.temporary"
    JARS = "local.jars"
    JARS_DIFFER = "local.jars-differ"
    PYTHON = "local.python"
    PACKED = "local.packed"
    UNENCRYPTED = "local.unencrypted"
    DISK = "local.disk"
    KAFKA_AWAY = "kafka.away"
    KAFKA_RIGHTS = "kafka.rights"
    GROUP_RIGHTS = "kafka.group-rights"
    KAFKA_CODEC = "kafka.codec"
    TOPIC_IDS = "kafka.topic-ids"
    TOPIC_MISSING = "kafka.topic-missing"
    TOPIC_COMPACTED = "kafka.compacted"
    TIMESTAMP_TYPE = "kafka.timestamp-type"
    RETENTION_TIME = "kafka.retention-time"
    RETENTION_BYTES = "kafka.retention-bytes"
    REPLICATION = "kafka.replication"
    MIN_INSYNC = "kafka.min-insync"
    S3_AWAY = "s3.away"
    S3_RIGHTS = "s3.rights"
    BUCKET_MISSING = "s3.bucket-missing"
    VERSIONING = "s3.versioning"
    LIFECYCLE = "s3.lifecycle"
    OBJECT_LOCK = "s3.object-lock"
    CLOCK = "s3.clock"
    CATALOG_AWAY = "catalog.away"
    CATALOG_RIGHTS = "catalog.rights"
    CATALOG_LOCKED = "catalog.locked"
    NOT_APPLIED = "tables.not-applied"
    TABLE_MISSING = "tables.missing"
    METADATA_GONE = "tables.metadata-gone"
    BRANCH_MISSING = "tables.branch-missing"
    ANOTHER_STREAMS_TABLE = "tables.another-streams"
    FORMAT = "tables.format"
    COLUMNS = "tables.columns"
    PROPERTIES = "tables.properties"
    OPTIMIZER = "tables.optimizer"
    REF_AGE = "tables.ref-age"
    TOPIC_RECREATED = "stream.topic-recreated"
    UNEXPLAINED = "stream.unexplained"
    REFUSED = "stream.refused"
    DEAD_LETTERS = "stream.dead-letters"
    CONFLICTS = "stream.conflicts"
    LATE = "stream.late"
    BACKLOG = "stream.backlog"
    OVERDUE = "stream.overdue"
    MAINTENANCE = "stream.maintenance"
    ERASURE = "stream.erasure"
    EGRESS = "stream.egress"
    LEDGER = "stream.ledger"
    LOST_FILE = "stream.lost-file"
    REGISTRY_AWAY = "registry.away"
    REGISTRY_RIGHTS = "registry.rights"
    SUBJECT_MISSING = "registry.subject-missing"
    AIRFLOW_AWAY = "airflow.away"
    AIRFLOW_SCHEDULER = "airflow.scheduler"
    AIRFLOW_IMPORT = "airflow.import-error"
    AIRFLOW_DAG_MISSING = "airflow.dag-missing"
    AIRFLOW_PAUSED = "airflow.paused"
    AIRFLOW_POOL = "airflow.pool"


@dataclass(frozen=True)
class Finding:
    """A problem. `remedy`: a complete command, or a setting and its value."""

    check: Issue
    severity: Severity
    subject: str
    expected: str
    found: str
    remedy: str


def error(check: Issue, subject: str, expected: str, found: str, remedy: str) -> Finding:
    return Finding(check, Severity.ERROR, subject, expected, found, remedy)


def warning(check: Issue, subject: str, expected: str, found: str, remedy: str) -> Finding:
    return Finding(check, Severity.WARNING, subject, expected, found, remedy)


def info(check: Issue, subject: str, expected: str, found: str, remedy: str) -> Finding:
    return Finding(check, Severity.INFO, subject, expected, found, remedy)


def dev_up(key: str) -> str:
    """Return the remedy for a service of this machine that does not answer at the address `key`."""
    return f"anabranch dev up  # if it is up already: {key} in anabranch.yaml"
