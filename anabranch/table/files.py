"""The files under a warehouse, wherever it is: listed with size and age, deleted many at a time."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlparse

from anabranch.config import Environment
from anabranch.errors import Transient
from anabranch.table.s3 import bucket_and_key, open_store

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """A file as storage knows it."""

    path: str
    size: int
    modified: datetime


def same_file(path: str) -> str:
    """A path without what writers spell differently: the scheme (`s3`, `s3a`, `file`) and its slashes."""
    scheme, colon, rest = path.partition(":")
    return (rest if colon and "/" not in scheme else path).lstrip("/")


def list_files(environment: Environment, folder: str) -> Iterator[Stored]:
    """Every file under `folder`, at any depth; a folder whose name only begins alike is another. Raises Transient."""
    folder = folder.rstrip("/") + "/"
    if (on_s3 := bucket_and_key(folder)) is not None:
        bucket, prefix = on_s3
        for key, size, modified in open_store(environment.s3).list_objects(bucket, prefix):
            yield Stored(f"s3://{bucket}/{key}", size, modified)
        return
    for path in sorted(Path(urlparse(folder).path).rglob("*")):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue  # deleted since it was seen
        if path.is_file():
            yield Stored(f"file://{path}", status.st_size, datetime.fromtimestamp(status.st_mtime, UTC))


def delete_files(environment: Environment, paths: Iterable[str]) -> int:
    """Delete files; one that is gone already is fine. Returns how many were asked for. Raises Transient."""
    by_bucket: dict[str, list[str]] = {}
    done = 0
    for path in paths:
        done += 1
        if (on_s3 := bucket_and_key(path)) is not None:
            bucket, key = on_s3
            by_bucket.setdefault(bucket, []).append(key)
            continue
        try:
            Path(path.removeprefix("file://")).unlink(missing_ok=True)
        except OSError as error:
            raise Transient(f"delete {path}: expected the right to, found {error}; run it again") from error
    for bucket, keys in by_bucket.items():
        open_store(environment.s3).delete_objects(bucket, keys)
    return done
