"""One Kafka broker and one S3 server for all processes of a test run; the last stops them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import boto3
import psutil
import pytest
from servers import free_ports

from anabranch.common.temporary import locked
from anabranch.dev.services import ACCESS_KEY, SECRET_KEY, Home, Services, down, up
from anabranch.spark.java import FIRST_COMPILER

BUCKET = "tests"
"""The bucket of the tests' warehouse."""

_LOCK_SECONDS = 300.0


def _others(users: Path) -> list[str]:
    """Return the user files of other running processes; remove those of ended ones."""
    living = []
    for user in users.iterdir():
        if user.name == str(os.getpid()):
            continue
        if psutil.pid_exists(int(user.name)):
            living.append(user.name)
        else:
            user.unlink(missing_ok=True)
    return living


@contextmanager
def shared_services(folder: Path) -> Iterator[Services]:
    """Use the services of `folder` within a `with`."""
    home, users = Home(folder), folder / "users"
    users.mkdir(parents=True, exist_ok=True)
    lock, user = folder / "users.lock", users / str(os.getpid())
    with locked(lock, _LOCK_SECONDS), pytest.MonkeyPatch.context() as patch:
        # The serial collector as in sessions.py: small heaps, and no core to spare.
        patch.setenv("JDK_JAVA_OPTIONS", f"{FIRST_COMPILER} -XX:+UseSerialGC")
        if home.kafka.last_port() is None:
            services = up(home, *free_ports(2), access_key=ACCESS_KEY, secret_key=SECRET_KEY)
            # Otherwise two processes that apply their first streams at once would both create it.
            by = {"aws_access_key_id": ACCESS_KEY, "aws_secret_access_key": SECRET_KEY}
            store = boto3.client("s3", "us-east-1", endpoint_url=services.s3_endpoint, **by)
            # A repetition of the last test of a run starts the services again.
            with suppress(store.exceptions.BucketAlreadyOwnedByYou):
                store.create_bucket(Bucket=BUCKET)
        else:
            services = up(home, access_key=ACCESS_KEY, secret_key=SECRET_KEY)
        user.touch()
    try:
        yield services
    finally:
        with locked(lock, _LOCK_SECONDS):
            user.unlink(missing_ok=True)
            if not _others(users):
                down(home)


def stop_leftovers(folder: Path) -> None:
    """Stop services whose users ended without stopping them, as killed processes do."""
    if (folder / "users").is_dir():
        down(Home(folder))
