"""The adapter for boto3: the bucket of a warehouse, its objects, and the object store's clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import IO, Any

from botocore.exceptions import BotoCoreError, ClientError, ConnectTimeoutError, ReadTimeoutError

from anabranch import config
from anabranch.common.counters import S3_BYTES, S3_REQUESTS, TALLY
from anabranch.common.errors import ConfigurationError, NoAnswer, NotOffered, Transient
from anabranch.common.remote_errors import explain
from anabranch.iceberg.vended import KeySource


def elapsed_seconds() -> float:
    """Return the seconds of the monotonic clock; Linux counts also while the machine sleeps."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


@dataclass(frozen=True)
class Compared:
    """One comparison: the other clock's time, and the monotonic clock in seconds at that moment."""

    time: datetime
    elapsed: float

    def says(self, elapsed: float) -> datetime:
        """Return the other clock's time when the monotonic clock is at `elapsed` seconds."""
        return self.time + timedelta(seconds=elapsed - self.elapsed)


# S3's own limit for one request.
_DELETED_AT_ONCE = 1000

_PART_BYTES = 16 * 2**20

# The time for which an answer's time is extrapolated by the monotonic clock, which drifts by far
# less than a second meanwhile.
_TIME_KEPT_SECONDS = 60

# AWS's shared credential files, by the environment variable that replaces the path.
_SHARED_FILES = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}


def bucket_and_key(path: str) -> tuple[str, str] | None:
    """Return bucket and key of a path on S3 (`s3://`, Hadoop's `s3a://`), else None. Pure."""
    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    return (bucket, key) if scheme in ("s3", "s3a") else None


def bucket_of(warehouse: str) -> str | None:
    """Return the bucket of an `s3://` warehouse; None for `file://`. Pure."""
    found = bucket_and_key(warehouse)
    return found[0] if found is not None else None


@dataclass(frozen=True)
class Version:
    """A noncurrent version of an object: it was replaced or deleted."""

    bucket: str
    key: str
    id: str
    written: datetime

    @property
    def path(self) -> str:
        """The object's path, without the version."""
        return f"s3://{self.bucket}/{self.key}"


@dataclass(frozen=True)
class LifecycleRule:
    """An enabled lifecycle rule of a bucket, with the parts that concern files in use.
    `is_narrowed`: it applies only to tagged objects or some sizes. `deletes_after`: a number of
    days, or a date. `moves_to`: a storage class. `clears_versions`: it removes noncurrent
    versions."""

    name: str
    prefix: str
    is_narrowed: bool = False
    deletes_after: str | None = None
    moves_to: str | None = None
    clears_versions: bool = False


def open_store(s3: config.S3) -> ObjectStore:
    """Return the object store, with the process's shared client: a new one takes a tenth of a
    second. A change of AWS's shared credential files opens a new client."""
    # A forked process must not use its parent's connections.
    return _opened(os.getpid(), s3, shared_files())


def shared_files() -> tuple[tuple[int, int], ...]:
    """Return the time (ns) and inode of each of AWS's shared credential files; zeros if missing.

    Clients of boto3 and PyArrow keep the keys that they read first. A cache of clients opens a new
    client once these values change, so that renewed keys are used at once.
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
    """Return whether this process has opened an object store, and so has imported boto3."""
    return _opened.cache_info().currsize > 0


@lru_cache(maxsize=16)
def _opened(process: int, s3: config.S3, keys: tuple[tuple[int, int], ...]) -> ObjectStore:
    return ObjectStore(s3)


# The keys that sign the requests of the context, in place of the client's.
_VENDED: ContextVar[KeySource | None] = ContextVar("vended", default=None)


class ObjectStore:
    """A client of the object store. Its keys come from the configuration, else from the standard
    AWS chain, unless it is `with_keys`. A request without an answer for `read_timeout` seconds is
    retried once, then raises NoAnswer.
    """

    _vended: KeySource | None = None

    def __init__(self, s3: config.S3, read_timeout: float = 8) -> None:
        # A command that only reads tables does not import boto3.
        import boto3
        from botocore.config import Config

        self._s3 = s3
        # boto3's default session would keep the keys that it read first.
        session = boto3.session.Session()
        self._client: Any = session.client(
            "s3",
            endpoint_url=s3.endpoint,
            region_name=s3.region,
            aws_access_key_id=s3.access_key.get_secret_value() if s3.access_key else None,
            aws_secret_access_key=s3.secret_key.get_secret_value() if s3.secret_key else None,
            verify=s3.ca,
            config=Config(
                # A command should fail within seconds; jobs retry and log it.
                connect_timeout=3,
                read_timeout=read_timeout,
                # The threads of all streams share the pool. Connections beyond its size would be
                # closed after each request.
                max_pool_connections=64,
                retries={"max_attempts": 1, "mode": "standard"},
                s3={"addressing_style": "path" if s3.endpoint else "auto"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

        events = self._client.meta.events
        events.register("before-sign.s3", _sign_by_vended_keys)
        if not s3.access_key and session.get_credentials() is None:
            # The refusal of an unsigned request contains the time.
            events.register("choose-signer.s3.HeadBucket", _leave_unsigned)
        events.register("before-send.s3", _count_request)
        events.register("after-call.s3", self._note_time)
        self._answered: Compared | None = None

    def with_keys(self, vended: KeySource) -> ObjectStore:
        """Return this store for requests that other keys sign, over the same connections."""
        other = copy(self)
        other._vended = vended
        return other

    def ensure_bucket(self, bucket: str) -> bool:
        """Create the bucket if it is missing; return whether it was created. Raises
        ConfigurationError (keys, permissions) or Transient."""
        if self.has_bucket(bucket):
            return False
        placed = {} if self._s3.region == "us-east-1" else {"LocationConstraint": self._s3.region}
        with self._errors(f"create bucket {bucket}"):
            self._client.create_bucket(
                Bucket=bucket, **({"CreateBucketConfiguration": placed} if placed else {})
            )
        return True

    def clock(self, bucket: str) -> datetime:
        """Return the store's time, in whole seconds. Raises ConfigurationError or Transient."""
        with self._errors(f"read the time from bucket {bucket}"):
            try:
                answer = self._client.head_bucket(Bucket=bucket)
            except ClientError as error:
                # S3 refuses the request of a wrong clock or without keys, and the refusal contains
                # the time.
                answer = error.response
                if "date" not in answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}):
                    raise
        return _date(answer["ResponseMetadata"]["HTTPHeaders"])

    def time_now(self, bucket: str) -> datetime:
        """Return the object store's time: from its last answer to any request if that is less than
        a minute old, else by `clock`. Raises as `clock`."""
        last, elapsed = self._answered, elapsed_seconds()
        if last is not None and elapsed - last.elapsed < _TIME_KEPT_SECONDS:
            return last.says(elapsed)
        return self.clock(bucket)

    def _note_time(self, http_response: Any, **_: Any) -> None:
        """Record the time of an answer. botocore calls it after each one."""
        if "date" in http_response.headers:
            self._answered = Compared(_date(http_response.headers), elapsed_seconds())

    def list_objects(self, bucket: str, prefix: str) -> Iterator[tuple[str, int, datetime]]:
        """Yield key, size (bytes) and time (UTC) of every object whose key begins with `prefix`.
        Raises Terminal (permissions) or Transient."""
        doing = f"list s3://{bucket}/{prefix}"
        for page in self._pages(doing, "list_objects_v2", bucket, prefix):
            for entry in page.get("Contents", ()):
                yield entry["Key"], entry["Size"], entry["LastModified"].astimezone(UTC)

    def get(self, bucket: str, key: str) -> bytes:
        """Return an object's contents. Raises ConfigurationError, Transient, Terminal (missing)."""
        with self._errors(f"read s3://{bucket}/{key}"):
            return self._body(Bucket=bucket, Key=key)[0]

    def put(self, bucket: str, key: str, body: bytes, content_type: str) -> None:
        """Write one object. Raises ConfigurationError (keys, rights, bucket) or Transient."""
        with self._errors(f"write s3://{bucket}/{key}"):
            self._client.put_object(Bucket=bucket, Key=key, Body=body, ContentType=content_type)

    def upload(self, bucket: str, key: str, content: IO[bytes]) -> None:
        """Write one object, a large one in parts. Raises as `put`."""
        from boto3.s3.transfer import TransferConfig

        # In this thread, whose context has the keys: each part is signed by the newest ones.
        config = TransferConfig(_PART_BYTES, multipart_chunksize=_PART_BYTES, use_threads=False)
        with self._errors(f"write s3://{bucket}/{key}"):
            self._client.upload_fileobj(content, bucket, key, Config=config)

    def find(self, bucket: str, key: str) -> tuple[bytes, str] | None:
        """Return an object's contents and entity tag; None without the object. Raises as `get`."""
        doing = f"read s3://{bucket}/{key}"
        get = partial(self._body, Bucket=bucket, Key=key)
        found: tuple[bytes, str] | None = self._ask(doing, {"NoSuchKey", "404"}, get)
        return found

    def put_if(
        self, bucket: str, key: str, body: bytes, content_type: str, tag: str | None
    ) -> bool:
        """Replace the object if it has this entity tag; for None, create it if it does not exist.
        Return False if the condition failed. Raises as `put`. Source: Amazon S3's conditional
        writes; a store without them writes in any case."""
        condition = {"IfMatch": tag} if tag is not None else {"IfNoneMatch": "*"}
        named = {"Bucket": bucket, "Key": key, "Body": body, "ContentType": content_type}
        put = partial(self._client.put_object, **named, **condition)
        # NoSuchKey: the object to replace is gone; 409: another write of it is in progress.
        return self._ask(f"write s3://{bucket}/{key}", {409, 412, "NoSuchKey"}, put) is not None

    def delete_objects(self, bucket: str, keys: Sequence[str]) -> None:
        """Delete objects, a thousand with each request. Raises Terminal (permissions), or Transient
        with some deleted: all that S3 accepts, unless it does not answer."""
        self._delete(bucket, [{"Key": key} for key in keys], "objects", "s3:DeleteObject")

    def _delete(self, bucket: str, named: Sequence[dict[str, str]], what: str, right: str) -> None:
        left: list[dict[str, str]] = []
        for i in range(0, len(named), _DELETED_AT_ONCE):
            some = named[i : i + _DELETED_AT_ONCE]
            with self._errors(f"delete {len(some)} {what} of bucket {bucket}"):
                answer = self._client.delete_objects(
                    Bucket=bucket, Delete={"Objects": some, "Quiet": True}
                )
            left += answer.get("Errors", ())
        if left:
            first = left[0]
            message = (
                f"delete {len(named)} {what} of bucket {bucket}: expected all to be deleted, found "
                f"{len(left)} left, first {first['Key']}: {first.get('Code')} "
                f"{first.get('Message')}"
            )
            if any(one.get("Code") == "AccessDenied" for one in left):
                raise ConfigurationError(f"{message}; allow {right} in the bucket's policy")
            raise Transient(f"{message}; run it again")

    def has_bucket(self, bucket: str) -> bool:
        """Return whether the bucket exists. Raises ConfigurationError or Transient."""
        look = partial(self._client.head_bucket, Bucket=bucket)
        return self._ask(f"look at bucket {bucket}", {404}, look) is not None

    def versioning(self, bucket: str) -> str | None:
        """Return whether versions of deleted and replaced objects are kept: `Enabled`, `Suspended`
        (former ones), or None, also for a server without versioning. Raises ConfigurationError
        (permissions) or Transient; the other methods for a bucket's settings raise these too."""
        ask = partial(self._client.get_bucket_versioning, Bucket=bucket)
        answer = self._ask(f"read the versioning of bucket {bucket}", {405, 501}, ask) or {}
        return answer.get("Status") or None

    def former_versions(self, bucket: str, prefix: str) -> Iterator[Version]:
        """Yield the noncurrent versions of keys with `prefix`. Raises Terminal or Transient."""
        doing = f"list the versions of s3://{bucket}/{prefix}"
        for page in self._pages(doing, "list_object_versions", bucket, prefix):
            for entry in page.get("Versions", ()):
                if not entry["IsLatest"]:
                    written = entry["LastModified"].astimezone(UTC)
                    yield Version(bucket, entry["Key"], entry["VersionId"], written)

    def get_version(self, version: Version) -> bytes:
        """Return the contents of a version. Raises as `get`."""
        with self._errors(f"read version {version.id} of {version.path}"):
            return self._body(Bucket=version.bucket, Key=version.key, VersionId=version.id)[0]

    def delete_versions(self, bucket: str, versions: Sequence[Version]) -> None:
        """Delete versions permanently. Raises as `delete_objects`."""
        named = [{"Key": version.key, "VersionId": version.id} for version in versions]
        self._delete(bucket, named, "versions", "s3:DeleteObjectVersion")

    def lifecycle(self, bucket: str) -> tuple[LifecycleRule, ...]:
        """Return the bucket's enabled lifecycle rules."""
        ask = partial(self._client.get_bucket_lifecycle_configuration, Bucket=bucket)
        doing = f"read the lifecycle rules of bucket {bucket}"
        rules = (self._ask(doing, {"NoSuchLifecycleConfiguration"}, ask) or {}).get("Rules", ())
        return tuple(_rule(rule) for rule in rules if rule.get("Status") == "Enabled")

    def lock(self, bucket: str) -> str | None:
        """Return the bucket's default object lock (`GOVERNANCE 30 days`); None without one."""
        ask = partial(self._client.get_object_lock_configuration, Bucket=bucket)
        doing = f"read the object lock of bucket {bucket}"
        answer = self._ask(doing, {"ObjectLockConfigurationNotFoundError"}, ask) or {}
        kept = answer.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention")
        if not kept:
            return None
        if "Days" in kept:
            return f"{kept.get('Mode')} {kept['Days']} days"
        return f"{kept.get('Mode')} {kept['Years']} years"

    def _pages(self, doing: str, operation: str, bucket: str, prefix: str) -> Iterator[Any]:
        """Yield the pages of a listing. Raises Terminal (permissions) or Transient."""
        paginator = self._client.get_paginator(operation)
        pages = iter(paginator.paginate(Bucket=bucket, Prefix=prefix))
        while True:
            # Only for the request: the keys of the caller's context stay its own.
            with self._errors(doing):
                page = next(pages, None)
            if page is None:
                return
            yield page

    def _body(self, **named: str) -> tuple[bytes, str]:
        answer = self._client.get_object(**named)
        body: bytes = answer["Body"].read()
        TALLY.count(S3_BYTES, "read", len(body))
        return body, answer["ETag"]

    def _ask(self, doing: str, absent: Set[str | int], ask: Callable[[], Any]) -> Any:
        """Return an answer; None after an error whose code or status is in `absent`."""
        with self._errors(doing):
            try:
                return ask()
            except ClientError as error:
                if absent.isdisjoint((_code(error), _status(error))):
                    raise
        return None

    @contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Sign with the store's keys; translate the client's errors, NoAnswer for a time-out."""
        used = _VENDED.set(self._vended)
        try:
            yield
        except (ClientError, BotoCoreError) as error:
            if isinstance(error, ClientError) and _code(error) == "ExpiredToken" and self._vended:
                self._vended.expire()
            explained = explain(
                f"{doing} at {self._s3.endpoint or f'AWS {self._s3.region}'}", error
            )
            if isinstance(error, ClientError) and _status(error) == 405:
                raise NotOffered(
                    f"{doing}: expected an object store that lists and deletes, found that it "
                    f"refuses this to all: {error}; leave unreferenced files to the service of a "
                    "table bucket, as of Amazon S3 Tables"
                ) from error
            is_silent = isinstance(error, (ConnectTimeoutError, ReadTimeoutError))
            raise (NoAnswer(str(explained)) if is_silent else explained) from error
        finally:
            _VENDED.reset(used)


def _sign_by_vended_keys(request: Any, **_: Any) -> None:
    """Sign a request with the keys of the context, if it has any."""
    from botocore.credentials import Credentials

    if (vended := _VENDED.get()) is not None:
        keys = vended.current()
        signing = request.context.setdefault("signing", {})
        signing["request_credentials"] = Credentials(keys.access, keys.secret, keys.token)


def _leave_unsigned(**_: Any) -> Any:
    from botocore import UNSIGNED

    return UNSIGNED if _VENDED.get() is None else None


def _count_request(event_name: str, **_: Any) -> None:
    """Count a request, retries included; `event_name` is like `before-send.s3.GetObject`."""
    TALLY.count(S3_REQUESTS, event_name.rpartition(".")[2])


def _date(headers: Mapping[str, str]) -> datetime:
    return parsedate_to_datetime(headers["date"]).astimezone(UTC)


def _code(error: ClientError) -> str:
    return str(error.response["Error"].get("Code"))


def _status(error: ClientError) -> int:
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])


def _rule(rule: Any) -> LifecycleRule:
    """Convert a rule of S3's answer. Its filter is a prefix, tag or size, or an `And` of them."""
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
    )
