"""Moto's S3 and IAM in a separate process: it authorizes each request by its user's policies."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import requests
from servers import answering, serving

from anabranch.dev.services.processes import HOST, free_port

_ROOT = ("root", "root")


@dataclass(frozen=True)
class Aws:
    """A running server."""

    url: str

    def client(self, service: str, keys: tuple[str, str] = _ROOT) -> Any:
        by = {"aws_access_key_id": keys[0], "aws_secret_access_key": keys[1]}
        return boto3.client(service, endpoint_url=self.url, region_name="us-east-1", **by)

    def user(self, name: str, policy: str) -> tuple[str, str]:
        """Create a user with only this policy; return its access key and secret."""
        iam = self.client("iam")
        iam.create_user(UserName=name)
        iam.put_user_policy(UserName=name, PolicyName=name, PolicyDocument=policy)
        made = iam.create_access_key(UserName=name)["AccessKey"]
        return made["AccessKeyId"], made["SecretAccessKey"]

    def enforce(self) -> None:
        """Enforce policies from now on; root is then denied everything."""
        answer = requests.post(f"{self.url}/moto-api/reset-auth", "0", timeout=30)
        assert answer.json()["status"] == "ok"


@contextmanager
def running_aws(folder: Path) -> Iterator[Aws]:
    """Run a new server within a `with`."""
    aws = Aws(f"http://{HOST}:{free_port()}")
    command = [sys.executable, "-m", "moto.server", "-H", HOST, "-p", aws.url.rpartition(":")[2]]
    with serving(command, folder / "aws.log", answering(f"{aws.url}/moto-api/")):
        yield aws
