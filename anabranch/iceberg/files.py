"""The files under a warehouse, wherever it is: listed with size and age, deleted many at a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG

from anabranch.common.errors import Transient
from anabranch.config import Environment
from anabranch.iceberg.s3 import bucket_and_key, open_store

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


def local_path(path: str) -> Path:
    """The file or folder of this machine that a `file:` location names. Such a location is no URI: `#`, `?`, `%` and
    spaces are part of names, as PyArrow and Hadoop write them."""
    rest = path.removeprefix("file://")
    return Path(rest if rest != path else path.removeprefix("file:"))


def list_files(environment: Environment, folder: str) -> Iterator[Stored]:
    """Every file under `folder`, at any depth; a folder whose name only begins alike is another. Raises Transient."""
    folder = folder.rstrip("/") + "/"
    if (on_s3 := bucket_and_key(folder)) is not None:
        bucket, prefix = on_s3
        for key, size, modified in open_store(environment.s3).list_objects(bucket, prefix):
            yield Stored(f"s3://{bucket}/{key}", size, modified)
        return
    yield from _below(folder, local_path(folder))


def _below(folder: str, path: Path) -> Iterator[Stored]:
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _below(folder, Path(entry.path))
                    continue
                with suppress(FileNotFoundError):  # deleted since it was seen
                    status = entry.stat()
                    if S_ISREG(status.st_mode):
                        at = datetime.fromtimestamp(status.st_mtime, UTC)
                        yield Stored(f"file://{entry.path}", status.st_size, at)
    except FileNotFoundError:
        return
    except OSError as error:
        raise Transient(
            f"list {folder}: expected the right to look at {error.filename or path}, found {error}; run it again once "
            "it can be"
        ) from error


def delete_files(environment: Environment, paths: Iterable[str]) -> int:
    """Delete files; one that is gone already is fine. Returns how many were asked for. Raises Transient: of those that
    cannot be deleted, once all others are."""
    by_bucket: dict[str, list[str]] = {}
    done = 0
    left: list[tuple[str, OSError]] = []
    for path in paths:
        done += 1
        if (on_s3 := bucket_and_key(path)) is not None:
            bucket, key = on_s3
            by_bucket.setdefault(bucket, []).append(key)
            continue
        try:
            local_path(path).unlink(missing_ok=True)
        except OSError as error:
            left.append((path, error))
    for bucket, keys in by_bucket.items():
        open_store(environment.s3).delete_objects(bucket, keys)
    if left:
        path, first = left[0]
        raise Transient(
            f"delete {done} files: expected the right to, found {len(left)} left, first {path}: {first}; all others "
            "are gone: run it again as a user that may delete these"
        ) from first
    return done
