"""The end of an erasure in a bucket that keeps versions: those of files with erased records are
deleted once the deadline has passed, and the status names a missing right."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aws import Aws, running_aws
from people import ORDER, People
from pydantic import SecretStr

from anabranch import config
from anabranch.common.errors import AnabranchError, ConfigurationError
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.s3 import Version, open_store
from anabranch.job import Job
from anabranch.lifecycle.erasure import end
from anabranch.lifecycle.erasure.status import ErasureStatus, read_statuses
from anabranch.lifecycle.maintenance import maintain

POLICIES = Path(__file__).resolve().parents[2] / "deploy" / "s3"
# AWS judges a look at a bucket as s3:ListBucket, moto by a name of its own.
NAMES = {"BUCKET": "lake", '"s3:ListBucket"': '["s3:ListBucket", "s3:HeadBucket"]'}
ALL = json.dumps(
    {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
)


def policy(*without: str) -> str:
    """Return the policy of `anabranch maintain`, without some of its statements."""
    text = (POLICIES / "maintain.json").read_text()
    for name, value in NAMES.items():
        text = text.replace(name, value)
    read = json.loads(text)
    kept = [one for one in read["Statement"] if one["Sid"] not in without]
    return json.dumps(read | {"Statement": kept})


def settings(aws: Aws, keys: tuple[str, str]) -> config.S3:
    return config.S3(endpoint=aws.url, access_key=SecretStr(keys[0]), secret_key=SecretStr(keys[1]))


def versions_with(aws: Any, name: str) -> list[str]:
    """The keys of all Parquet files of the bucket that have a person, whichever version."""
    found = []
    for page in aws.get_paginator("list_object_versions").paginate(Bucket="lake"):
        for one in page.get("Versions", ()):
            if one["Key"].endswith(".parquet") and "/events/data" in one["Key"]:
                place = {"Key": one["Key"], "VersionId": one["VersionId"]}
                body = aws.get_object(Bucket="lake", **place)["Body"].read()
                if name in pq.read_table(pa.BufferReader(body))["id"].to_pylist():
                    found.append(one["Key"])
    return found


def versions(aws: Any) -> set[tuple[str, str]]:
    """All versions that are not current, by key and id."""
    pages = aws.get_paginator("list_object_versions").paginate(Bucket="lake")
    found = [v for page in pages for v in page.get("Versions", ()) if not v["IsLatest"]]
    return {(v["Key"], v["VersionId"]) for v in found}


def objects(aws: Any) -> list[str]:
    pages = aws.get_paginator("list_objects_v2").paginate(Bucket="lake")
    return [one["Key"] for page in pages for one in page["Contents"]]


def run_into_versions(job: Job, later: datetime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maintenance that ends before it deletes versions."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(end, "end_versions", interrupted)
        maintain(job, later)


def test_a_version_that_may_not_be_deleted_ends_the_deletion_with_the_right(tmp_path: Path) -> None:
    with running_aws(tmp_path) as aws:
        everything = aws.user("everything", ALL)
        root = aws.client("s3")
        root.create_bucket(Bucket="lake", ObjectLockEnabledForBucket=True)
        locked = {
            "ObjectLockMode": "COMPLIANCE",
            "ObjectLockRetainUntilDate": datetime.now(UTC) + timedelta(days=1),
        }
        for key, lock in (("free", {}), ("locked", locked)):
            root.put_object(Bucket="lake", Key=key, Body=b"", **lock)
        store = open_store(settings(aws, everything))
        listed = root.list_object_versions(Bucket="lake")["Versions"]
        some = [Version("lake", v["Key"], v["VersionId"], v["LastModified"]) for v in listed]
        with pytest.raises(ConfigurationError, match=r"1 left, first locked: .*s3:DeleteObjectVer"):
            store.delete_versions("lake", some)
        left = root.list_object_versions(Bucket="lake")["Versions"]
    assert [v["Key"] for v in left] == ["locked"]


def test_the_policy_allows_to_read_the_versions_that_a_scan_searches(tmp_path: Path) -> None:
    with running_aws(tmp_path) as aws:
        root = aws.client("s3")
        root.create_bucket(Bucket="lake")
        root.put_bucket_versioning(Bucket="lake", VersioningConfiguration={"Status": "Enabled"})
        for body in (b"old", b"new"):
            root.put_object(Bucket="lake", Key="warehouse/file", Body=body)
        store = open_store(settings(aws, aws.user("maintain", policy())))
        aws.enforce()
        [former] = store.former_versions("lake", "warehouse/")
        assert store.get_version(former) == b"old"


def test_old_versions_end_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_aws(tmp_path) as aws:
        root = aws.client("s3")
        root.create_bucket(Bucket="lake")
        root.put_bucket_versioning(Bucket="lake", VersioningConfiguration={"Status": "Enabled"})
        everything = aws.user("everything", ALL)
        # Moto judges the deletion of several versions by s3:DeleteObject.
        without = aws.user("without", policy("Delete", "DeleteVersions"))
        blind = aws.user("blind", policy("FindVersions"))
        aws.enforce()
        people = People(tmp_path, s3=settings(aws, everything))
        people.erase(replace(ORDER, until=timedelta(days=2)))
        people.erase(replace(ORDER, values=frozenset({"carl"}), until=timedelta(days=20)))
        later = datetime.now(UTC) + timedelta(days=3)
        s3 = aws.client("s3", everything)
        assert versions_with(s3, "anna") != []

        def job_with(keys: tuple[str, str]) -> Job:
            environment = people.job.environment.model_copy(update={"s3": settings(aws, keys)})
            return replace(people.job, environment=environment, lake=Lake(environment))

        def status_with(keys: tuple[str, str]) -> ErasureStatus:
            return next(one for one in read_statuses(job_with(keys), later) if one.until < later)

        # The hazard: the files are deleted, and the versions stay.
        run_into_versions(job_with(everything), later, monkeypatch)
        named = versions_with(s3, "anna")
        assert not [key for key in objects(s3) if "/events/data" in key and key in named]
        assert versions_with(s3, "anna") != []
        with pytest.raises(AnabranchError, match=r"AccessDenied|s3:DeleteObject"):
            maintain(job_with(without), later)
        status = status_with(without)
        said = "\n".join(status.left)
        assert status.versions and "versions of deleted files are stored" in said
        assert "the last `anabranch maintain` could not delete versions:" in said
        status = status_with(blind)
        assert status.versions is None
        assert "allow s3:GetBucketVersioning and s3:ListBucketVersions" in "\n".join(status.left)

        before = versions(s3)
        assert before
        maintain(job_with(everything), later)
        assert versions_with(s3, "anna") == []
        # But for what the run itself has replaced since.
        assert not before & versions(s3)
        assert all(key.endswith(".metadata.json") for key, _ in versions(s3))
        assert people.names("main") == ["bert", "bert"]
