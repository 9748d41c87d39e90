"""The adapter of boto3: the bucket of a warehouse, its objects, and the object store's clock."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, ConnectTimeoutError, ReadTimeoutError

from anabranch import config
from anabranch.common.counters import S3_BYTES, S3_REQUESTS, TALLY
from anabranch.common.elapsed import Compared, elapsed_seconds
from anabranch.common.errors import NoAnswer, Transient
from anabranch.common.remote_errors import explain

# S3's own limit for one request.
_DELETED_AT_ONCE = 1000

# An answer's time is used for this long: by the monotonic clock, which drifts by far less than a
# second meanwhile.
_TIME_KEPT_SECONDS = 60

# AWS's shared files with keys, by the variable that names another one.
_SHARED_FILES = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}


def bucket_and_key(path: str) -> tuple[str, str] | None:
    """The bucket and the key of a path on S3, as Hadoop spells it (`s3a://`) too; None for a path
    elsewhere."""
    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    return (bucket, key) if scheme in ("s3", "s3a") else None


def bucket_of(warehouse: str) -> str | None:
    """The bucket of an `s3://` warehouse; None for `file://`."""
    found = bucket_and_key(warehouse)
    return found[0] if found is not None else None


@dataclass(frozen=True)
class Upload:
    """A multipart upload that was neither completed nor aborted."""

    key: str
    id: str
    begun: datetime


@dataclass(frozen=True)
class Version:
    """A version of an object that was replaced or deleted since."""

    bucket: str
    key: str
    id: str
    written: datetime

    @property
    def path(self) -> str:
        """The object's path."""
        return f"s3://{self.bucket}/{self.key}"


@dataclass(frozen=True)
class LifecycleRule:
    """An enabled rule of a bucket's lifecycle, as far as it concerns files in use. `is_narrowed`:
    it applies only to tagged objects, or to some sizes. `deletes_after`: a number of days, or a
    date. `moves_to`: a storage class. `clears_versions`, `clears_uploads`: it removes replaced
    versions and incomplete uploads."""

    name: str
    prefix: str
    is_narrowed: bool = False
    deletes_after: str | None = None
    moves_to: str | None = None
    clears_versions: bool = False
    clears_uploads: bool = False


def open_store(s3: config.S3) -> ObjectStore:
    """The object store, over connections that the process shares; a new client takes a tenth of a
    second. Keys of AWS's shared files are read again once these change."""
    # A forked process must not use its parent's connections.
    return _opened(os.getpid(), s3, shared_files())


def shared_files() -> tuple[tuple[int, int], ...]:
    """Which versions of AWS's shared files with keys this machine has now.

    Clients of boto3 and PyArrow keep the keys that they read first. Who keeps a client opens
    another one for other versions, so that renewed keys are used at once.
    """
    return tuple(
        _version(os.environ.get(name) or default) for name, default in _SHARED_FILES.items()
    )


def _version(file: str) -> tuple[int, int]:
    try:
        found = Path(file).expanduser().stat()
    except (OSError, RuntimeError):
        return 0, 0
    return found.st_mtime_ns, found.st_ino


def is_open() -> bool:
    """Whether this process has opened an object store already, and so imported its client."""
    return _opened.cache_info().currsize > 0


@lru_cache(maxsize=16)
def _opened(process: int, s3: config.S3, keys: tuple[tuple[int, int], ...]) -> ObjectStore:
    return ObjectStore(s3)


class ObjectStore:
    """Requests to the object store. Its keys come from configuration, or from the standard AWS
    chain. A request without an answer for `read_timeout` seconds is repeated once, then raises
    NoAnswer.
    """

    def __init__(self, s3: config.S3, read_timeout: float = 8) -> None:
        # Imported here: a command that only reads tables does not need it.
        import boto3
        from botocore.config import Config

        self._s3 = s3
        # Not boto3's session of the process, which keeps the keys that it read first.
        self._client: Any = boto3.session.Session().client(
            "s3",
            endpoint_url=s3.endpoint,
            region_name=s3.region,
            aws_access_key_id=s3.access_key.get_secret_value() if s3.access_key else None,
            aws_secret_access_key=s3.secret_key.get_secret_value() if s3.secret_key else None,
            verify=s3.ca,
            config=Config(
                # The caller retries and logs it: a command should fail within seconds.
                connect_timeout=3,
                read_timeout=read_timeout,
                # The threads of a process of many streams share them; more would be opened and
                # closed at once.
                max_pool_connections=64,
                retries={"max_attempts": 1, "mode": "standard"},
                s3={"addressing_style": "path" if s3.endpoint else "auto"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

        self._client.meta.events.register("before-send.s3", _count_request)
        self._client.meta.events.register("after-call.s3", self._note_time)
        self._answered: Compared | None = None

    def ensure_bucket(self, bucket: str) -> bool:
        """Create the bucket if it is missing; True if it was created. Raises ConfigurationError
        (keys, rights) or Transient."""
        if self.has_bucket(bucket):
            return False
        placed = {} if self._s3.region == "us-east-1" else {"LocationConstraint": self._s3.region}
        with self._errors(f"create bucket {bucket}"):
            self._client.create_bucket(
                Bucket=bucket, **({"CreateBucketConfiguration": placed} if placed else {})
            )
        return True

    def clock(self, bucket: str) -> datetime:
        """The object store's time (to the second). Raises ConfigurationError or Transient."""
        with self._errors(f"read the time from bucket {bucket}"):
            try:
                answer = self._client.head_bucket(Bucket=bucket)
            except ClientError as error:
                # A request with a wrong clock is refused, and the refusal contains the time.
                answer = error.response
                if "date" not in answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}):
                    raise
        return _date(answer["ResponseMetadata"]["HTTPHeaders"])

    def time_now(self, bucket: str) -> datetime:
        """The object store's time, by its last answer to any request if that is at most a minute
        old, else as `clock` asks for it."""
        last, elapsed = self._answered, elapsed_seconds()
        if last is not None and elapsed - last.elapsed < _TIME_KEPT_SECONDS:
            return last.says(elapsed)
        return self.clock(bucket)

    def _note_time(self, http_response: Any, **_: Any) -> None:
        """Called by botocore after each answer."""
        if "date" in http_response.headers:
            self._answered = Compared(_date(http_response.headers), elapsed_seconds())

    def list_objects(self, bucket: str, prefix: str) -> Iterator[tuple[str, int, datetime]]:
        """Key, size and time of every object whose key begins with `prefix`. Raises Terminal
        (rights) or Transient."""
        with self._errors(f"list s3://{bucket}/{prefix}"):
            for page in self._client.get_paginator("list_objects_v2").paginate(
                Bucket=bucket, Prefix=prefix
            ):
                for entry in page.get("Contents", ()):
                    yield entry["Key"], entry["Size"], entry["LastModified"].astimezone(UTC)

    def get(self, bucket: str, key: str) -> bytes:
        """The contents of an object. Raises ConfigurationError (keys, rights), Transient, Terminal
        (no such object)."""
        with self._errors(f"read s3://{bucket}/{key}"):
            body: bytes = self._client.get_object(Bucket=bucket, Key=key)["Body"].read()
        TALLY.count(S3_BYTES, "read", len(body))
        return body

    def put(self, bucket: str, key: str, body: bytes, content_type: str) -> None:
        """Write one object. Raises ConfigurationError (keys, rights, no such bucket) or
        Transient."""
        with self._errors(f"write s3://{bucket}/{key}"):
            self._client.put_object(Bucket=bucket, Key=key, Body=body, ContentType=content_type)

    def find(self, bucket: str, key: str) -> tuple[bytes, str] | None:
        """One object with its entity tag; None where there is none. Raises as `get` does."""
        with self._errors(f"read s3://{bucket}/{key}"):
            try:
                answer = self._client.get_object(Bucket=bucket, Key=key)
                return answer["Body"].read(), answer["ETag"]
            except ClientError as error:
                if _code(error) not in ("NoSuchKey", "404"):
                    raise
        return None

    def put_if(
        self, bucket: str, key: str, body: bytes, content_type: str, tag: str | None
    ) -> bool:
        """Replace the object with this entity tag, or create it for None; False when another is
        there by then. Raises as `put` does. Source: Amazon S3's conditional writes; a store without
        them writes in any case."""
        condition = {"IfMatch": tag} if tag is not None else {"IfNoneMatch": "*"}
        with self._errors(f"write s3://{bucket}/{key}"):
            try:
                self._client.put_object(
                    Bucket=bucket, Key=key, Body=body, ContentType=content_type, **condition
                )
                return True
            except ClientError as error:
                # 404: the object to replace is gone; 409: another write of it is in progress.
                if _status(error) not in (409, 412) and _code(error) != "NoSuchKey":
                    raise
        return False

    def delete_objects(self, bucket: str, keys: Sequence[str]) -> None:
        """Delete objects, a thousand a request. Raises Terminal (rights) or Transient, with some of
        them deleted: all that can be, unless S3 does not answer."""
        self._delete(bucket, [{"Key": key} for key in keys], "objects", "s3:DeleteObject")

    def _delete(self, bucket: str, named: Sequence[dict[str, str]], what: str, right: str) -> None:
        left: list[str] = []
        for i in range(0, len(named), _DELETED_AT_ONCE):
            some = named[i : i + _DELETED_AT_ONCE]
            with self._errors(f"delete {len(some)} {what} of bucket {bucket}"):
                answer = self._client.delete_objects(
                    Bucket=bucket, Delete={"Objects": some, "Quiet": True}
                )
            left += [
                f"{e['Key']}: {e.get('Code')} {e.get('Message')}" for e in answer.get("Errors", ())
            ]
        if left:
            raise Transient(
                f"delete {len(named)} {what} of bucket {bucket}: expected all to go, found "
                f"{len(left)} left, first {left[0]}; check the policy ({right}), then run it again"
            )

    def has_bucket(self, bucket: str) -> bool:
        """Whether the bucket is there. Raises ConfigurationError (keys, rights) or Transient."""
        with self._errors(f"look at bucket {bucket}"):
            try:
                self._client.head_bucket(Bucket=bucket)
                return True
            except ClientError as error:
                if _status(error) != 404:
                    raise
        return False

    def is_versioned(self, bucket: str) -> bool:
        """Whether the bucket keeps versions of deleted and replaced objects. Raises
        ConfigurationError or Transient, also for a server without versioning; so do the other
        methods for a bucket's settings."""
        with self._errors(f"ask for the versioning of bucket {bucket}"):
            return self._versioning(bucket) == "Enabled"

    def had_versions(self, bucket: str) -> bool:
        """Whether the bucket keeps versions, or has kept some; False for a server without
        versioning. Raises ConfigurationError (rights) or Transient."""
        with self._errors(f"ask for the versioning of bucket {bucket}"):
            try:
                return self._versioning(bucket) is not None
            except ClientError as error:
                if _status(error) not in (405, 501):
                    raise
        return False

    def _versioning(self, bucket: str) -> str | None:
        status = self._client.get_bucket_versioning(Bucket=bucket).get("Status")
        return str(status) if status else None

    def former_versions(self, bucket: str, prefix: str) -> Iterator[Version]:
        """The versions of objects whose keys begin with `prefix`, without those that are current.
        Raises Terminal (rights) or Transient."""
        with self._errors(f"list the versions of s3://{bucket}/{prefix}"):
            for page in self._client.get_paginator("list_object_versions").paginate(
                Bucket=bucket, Prefix=prefix
            ):
                for entry in page.get("Versions", ()):
                    if not entry["IsLatest"]:
                        written = entry["LastModified"].astimezone(UTC)
                        yield Version(bucket, entry["Key"], entry["VersionId"], written)

    def get_version(self, version: Version) -> bytes:
        """The contents of a version. Raises as `get` does."""
        with self._errors(f"read version {version.id} of {version.path}"):
            answer = self._client.get_object(
                Bucket=version.bucket, Key=version.key, VersionId=version.id
            )
            body: bytes = answer["Body"].read()
        TALLY.count(S3_BYTES, "read", len(body))
        return body

    def delete_versions(self, bucket: str, versions: Sequence[Version]) -> None:
        """Delete versions, for ever. Raises as `delete_objects` does."""
        named = [{"Key": version.key, "VersionId": version.id} for version in versions]
        self._delete(bucket, named, "versions", "s3:DeleteObjectVersion")

    def lifecycle(self, bucket: str) -> tuple[LifecycleRule, ...]:
        """The enabled rules of the bucket's lifecycle."""
        with self._errors(f"ask for the lifecycle of bucket {bucket}"):
            try:
                rules = self._client.get_bucket_lifecycle_configuration(Bucket=bucket).get(
                    "Rules", ()
                )
            except ClientError as error:
                if _code(error) != "NoSuchLifecycleConfiguration":
                    raise
                return ()
        return tuple(_rule(rule) for rule in rules if rule.get("Status") == "Enabled")

    def lock(self, bucket: str) -> str | None:
        """The mode and the duration of the bucket's object lock (`GOVERNANCE 30 days`); None
        without one."""
        with self._errors(f"ask for the object lock of bucket {bucket}"):
            try:
                lock = self._client.get_object_lock_configuration(Bucket=bucket).get(
                    "ObjectLockConfiguration", {}
                )
            except ClientError as error:
                if _code(error) != "ObjectLockConfigurationNotFoundError":
                    raise
                return None
        kept = lock.get("Rule", {}).get("DefaultRetention")
        if not kept:
            return None
        return (
            f"{kept.get('Mode')} {kept['Days']} days"
            if "Days" in kept
            else f"{kept.get('Mode')} {kept['Years']} years"
        )

    def uploads(self, bucket: str, prefix: str) -> tuple[Upload, ...]:
        """The incomplete uploads under `prefix`."""
        with self._errors(f"list the unfinished uploads of s3://{bucket}/{prefix}"):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=bucket, Prefix=prefix
            )
            return tuple(
                Upload(entry["Key"], entry["UploadId"], entry["Initiated"].astimezone(UTC))
                for page in pages
                for entry in page.get("Uploads", ())
            )

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Turn the client's errors into errors of ours."""
        try:
            yield
        except (ClientError, BotoCoreError) as error:
            explained = explain(
                f"{doing} at {self._s3.endpoint or f'AWS {self._s3.region}'}", error
            )
            is_silent = isinstance(error, (ConnectTimeoutError, ReadTimeoutError))
            raise (NoAnswer(str(explained)) if is_silent else explained) from error


def _count_request(event_name: str, **_: Any) -> None:
    """Called by botocore before each request, also one that is a repetition:
    `before-send.s3.GetObject`."""
    TALLY.count(S3_REQUESTS, event_name.rpartition(".")[2])


def _date(headers: Mapping[str, str]) -> datetime:
    return parsedate_to_datetime(headers["date"]).astimezone(UTC)


def _code(error: ClientError) -> str:
    return str(error.response["Error"].get("Code"))


def _status(error: ClientError) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])


def _rule(rule: Any) -> LifecycleRule:
    """A rule as S3 gives it: its filter is a prefix, a tag, a size, or several of them under
    `And`."""
    filters = rule.get("Filter", {})
    expiration = rule.get("Expiration", {})
    after = f"{expiration['Days']} days" if "Days" in expiration else expiration.get("Date")
    moves = [move.get("StorageClass") for move in rule.get("Transitions", ())]
    return LifecycleRule(
        name=str(rule.get("ID", "")),
        prefix=filters.get("Prefix")
        or filters.get("And", {}).get("Prefix")
        or rule.get("Prefix")
        or "",
        is_narrowed=bool(
            filters.keys() - {"Prefix", "And"} or filters.get("And", {}).keys() - {"Prefix"}
        ),
        deletes_after=str(after) if after is not None else None,
        moves_to=next((str(kind) for kind in moves if kind), None),
        clears_versions="NoncurrentVersionExpiration" in rule,
        clears_uploads="AbortIncompleteMultipartUpload" in rule,
    )
