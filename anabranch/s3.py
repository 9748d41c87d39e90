"""The one place that speaks boto3: the bucket of a warehouse, and the object store's clock."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlparse

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from anabranch import config
from anabranch.errors import Terminal, Transient


def bucket_of(warehouse: str) -> str | None:
    """The bucket of an `s3://` warehouse; None for `file://`."""
    parsed = urlparse(warehouse)
    return parsed.netloc if parsed.scheme == "s3" else None


class ObjectStore:
    """Questions to the object store. Its keys come from configuration, else from the standard AWS chain."""

    def __init__(self, s3: config.S3) -> None:
        self._s3 = s3
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=s3.endpoint,
            region_name=s3.region,
            aws_access_key_id=s3.access_key.get_secret_value() if s3.access_key else None,
            aws_secret_access_key=s3.secret_key.get_secret_value() if s3.secret_key else None,
            config=Config(
                connect_timeout=5,
                read_timeout=20,
                retries={"max_attempts": 4, "mode": "standard"},
                s3={"addressing_style": "path" if s3.endpoint else "auto"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )

    def ensure_bucket(self, bucket: str) -> bool:
        """Create the bucket if it is missing; True if it was created. Raises Terminal (rights) or Transient."""
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
        """What time the object store says it is (to the second)."""
        try:
            answer = self._client.head_bucket(Bucket=bucket)
        except (ClientError, BotoCoreError) as error:
            raise self._failed(f"ask the time by bucket {bucket}", error) from error
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).astimezone(UTC)

    def _failed(self, doing: str, error: Exception) -> Terminal | Transient:
        where = self._s3.endpoint or f"AWS {self._s3.region}"
        status = error.response["ResponseMetadata"]["HTTPStatusCode"] if isinstance(error, ClientError) else None
        message = f"{doing} at {where}: expected an answer, found {error}"
        if status in (401, 403):
            return Terminal(f"{message}; check the keys and the policy, then run the command again")
        return Transient(f"{message}; is the object store up? `anabranch dev status` tells for the embedded one")
