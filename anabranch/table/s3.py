"""The one place that speaks boto3: the bucket of a warehouse, its objects, and the object store's clock."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError, ConnectTimeoutError, ReadTimeoutError

from anabranch import config
from anabranch.errors import AnabranchError, NoAnswer, Transient
from anabranch.remote_errors import explain

# S3's own limit for one request.
_DELETED_AT_ONCE = 1000


def bucket_and_key(path: str) -> tuple[str, str] | None:
    """The bucket and the key of an `s3://` path; None for a path elsewhere."""
    scheme, _, rest = path.partition("://")
    bucket, _, key = rest.partition("/")
    return (bucket, key) if scheme == "s3" else None


def bucket_of(warehouse: str) -> str | None:
    """The bucket of an `s3://` warehouse; None for `file://`."""
    found = bucket_and_key(warehouse)
    return found[0] if found is not None else None


def open_store(s3: config.S3) -> ObjectStore:
    """The object store, over connections that the process shares; a client of its own takes a tenth of a second."""
    # A forked process must not use its parent's connections.
    return _opened(os.getpid(), s3)


def is_open() -> bool:
    """Whether this process has asked for an object store already, and so imported what speaks to it."""
    return _opened.cache_info().currsize > 0


@lru_cache(maxsize=16)
def _opened(process: int, s3: config.S3) -> ObjectStore:
    return ObjectStore(s3)


class ObjectStore:
    """Questions to the object store. Its keys come from configuration, else from the standard AWS chain.

    One that has no answer for `read_timeout` seconds is asked once more, then given up as NoAnswer.
    """

    def __init__(self, s3: config.S3, read_timeout: float = 8) -> None:
        # Imported here: a command that only reads tables has no need of it.
        import boto3
        from botocore.config import Config

        self._s3 = s3
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=s3.endpoint,
            region_name=s3.region,
            aws_access_key_id=s3.access_key.get_secret_value() if s3.access_key else None,
            aws_secret_access_key=s3.secret_key.get_secret_value() if s3.secret_key else None,
            config=Config(
                # The caller tries again, and says so: a command is to fail within seconds.
                connect_timeout=3,
                read_timeout=read_timeout,
                retries={"max_attempts": 1, "mode": "standard"},
                s3={"addressing_style": "path" if s3.endpoint else "auto"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def ensure_bucket(self, bucket: str) -> bool:
        """Create the bucket if it is missing; True if it was created. Raises ConfigurationError (keys, rights)
        or Transient."""
        try:
            self._client.head_bucket(Bucket=bucket)
            return False
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise self._failed(f"look at bucket {bucket}", error) from error
        except BotoCoreError as error:
            raise self._failed(f"look at bucket {bucket}", error) from error
        placed = {} if self._s3.region == "us-east-1" else {"LocationConstraint": self._s3.region}
        try:
            self._client.create_bucket(Bucket=bucket, **({"CreateBucketConfiguration": placed} if placed else {}))
        except (ClientError, BotoCoreError) as error:
            raise self._failed(f"create bucket {bucket}", error) from error
        return True

    def clock(self, bucket: str) -> datetime:
        """What time the object store says it is (to the second). Raises ConfigurationError or Transient."""
        try:
            answer = self._client.head_bucket(Bucket=bucket)
        except (ClientError, BotoCoreError) as error:
            # A clock that is far off is turned away for it, and the refusal says what time it is.
            answer = error.response if isinstance(error, ClientError) else {}
            if "date" not in answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}):
                raise self._failed(f"ask the time by bucket {bucket}", error) from error
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).astimezone(UTC)

    def list_objects(self, bucket: str, prefix: str) -> Iterator[tuple[str, int, datetime]]:
        """Key, size and time of every object whose key begins with `prefix`. Raises Terminal (rights) or Transient."""
        try:
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
                for entry in page.get("Contents", ()):
                    yield entry["Key"], entry["Size"], entry["LastModified"].astimezone(UTC)
        except (ClientError, BotoCoreError) as error:
            raise self._failed(f"list s3://{bucket}/{prefix}", error) from error

    def get(self, bucket: str, key: str) -> bytes:
        """One object, whole. Raises ConfigurationError (keys, rights), Transient, Terminal (no such object)."""
        try:
            body: bytes = self._client.get_object(Bucket=bucket, Key=key)["Body"].read()
        except (ClientError, BotoCoreError) as error:
            raise self._failed(f"read s3://{bucket}/{key}", error) from error
        return body

    def put(self, bucket: str, key: str, body: bytes, content_type: str) -> None:
        """Write one object. Raises ConfigurationError (keys, rights, no such bucket) or Transient."""
        try:
            self._client.put_object(Bucket=bucket, Key=key, Body=body, ContentType=content_type)
        except (ClientError, BotoCoreError) as error:
            raise self._failed(f"write s3://{bucket}/{key}", error) from error

    def delete_objects(self, bucket: str, keys: Sequence[str]) -> None:
        """Delete objects, a thousand a request. Raises Terminal (rights) or Transient, with some of them deleted."""
        for i in range(0, len(keys), _DELETED_AT_ONCE):
            some = [{"Key": key} for key in keys[i : i + _DELETED_AT_ONCE]]
            try:
                answer = self._client.delete_objects(Bucket=bucket, Delete={"Objects": some, "Quiet": True})
            except (ClientError, BotoCoreError) as error:
                raise self._failed(f"delete {len(some)} objects of bucket {bucket}", error) from error
            if failed := answer.get("Errors"):
                first = f"{failed[0]['Key']}: {failed[0].get('Code')} {failed[0].get('Message')}"
                raise Transient(
                    f"delete {len(some)} objects of bucket {bucket}: expected all to go, found {len(failed)} left, "
                    f"first {first}; check the policy (s3:DeleteObject), then run it again"
                )

    def _failed(self, doing: str, error: Exception) -> AnabranchError:
        explained = explain(f"{doing} at {self._s3.endpoint or f'AWS {self._s3.region}'}", error)
        is_silent = isinstance(error, (ConnectTimeoutError, ReadTimeoutError))
        return NoAnswer(str(explained)) if is_silent else explained
