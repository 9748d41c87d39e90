"""Listing (with size and time) and deletion of a warehouse's files, on any storage."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG

from pyiceberg.io import FileIO

from anabranch.common.errors import Refused, Transient
from anabranch.iceberg.file_io import store_of
from anabranch.iceberg.s3 import Version, bucket_and_key


@dataclass(frozen=True)
class Stored:
    """A file in storage, with its bytes and the time of its last change (UTC)."""

    path: str
    size: int
    modified: datetime


def same_file(path: str) -> str:
    """Return a path without the parts that differ between writers: the scheme (`s3`, `s3a`, `file`)
    and its slashes."""
    scheme, colon, rest = path.partition(":")
    return (rest if colon and "/" not in scheme else path).lstrip("/")


def local_path(path: str) -> Path:
    """Return the local path of a `file:` location. Such a location is not a URI: `#`, `?`, `%` and
    spaces are parts of names, as PyArrow and Hadoop write them."""
    rest = path.removeprefix("file://")
    return Path(rest if rest != path else path.removeprefix("file:"))


def list_files(io: FileIO, folder: str) -> Iterator[Stored]:
    """Yield every file under `folder`, at any depth, but none of a folder that only shares the
    prefix. `io`: a file access with keys for it. Raises Transient."""
    folder = folder.rstrip("/") + "/"
    if (on_s3 := bucket_and_key(folder)) is not None:
        bucket, prefix = on_s3
        for key, size, modified in store_of(io).list_objects(bucket, prefix):
            yield Stored(f"s3://{bucket}/{key}", size, modified)
        return
    yield from _below(folder, local_path(folder))


def root_of(folder: str) -> str:
    """Return the beginning that the paths of a folder's files share. Pure."""
    return same_file(folder).rstrip("/") + "/"


def files_by_name(io: FileIO, folder: str) -> dict[str, Stored]:
    """Return the files of a folder that is only read, also those behind links, by their names
    within it. Raises Refused for a link whose file would be left out, or read twice; Transient."""
    root = root_of(folder)
    return {same_file(f.path).removeprefix(root): f for f in _list_following_links(io, folder)}


def _list_following_links(io: FileIO, folder: str) -> Iterator[Stored]:
    if bucket_and_key(folder) is not None:
        yield from list_files(io, folder)
        return
    seen = set[str]()
    for at, _, names in os.walk(local_path(folder), followlinks=True):
        paths = [Path(at) / name for name in names]
        gone = [path for path in paths if not path.is_file()]
        real = os.path.realpath(at)
        # Rows of a disk that is not mounted would be missing, and nothing would show it.
        if gone or real in seen:
            found = f"{gone[0]}, which is none" if gone else f"{at}, a link to another one of them"
            raise Refused(
                f"read {folder}: expected files and folders, each once, found {found}: its rows "
                "would be missing or doubled; repair or remove the link"
            )
        seen.add(real)
        for path in paths:
            status = path.stat()
            at_time = datetime.fromtimestamp(status.st_mtime, UTC)
            yield Stored(f"file://{path}", status.st_size, at_time)


def list_versions(io: FileIO, folder: str) -> Iterator[Version]:
    """Yield the versions of deleted and replaced files under `folder`; none if the bucket or the
    storage keeps none. Raises Terminal without the permission to list them, Transient."""
    if (on_s3 := bucket_and_key(folder.rstrip("/") + "/")) is None:
        return
    store = store_of(io)
    if store.had_versions(on_s3[0]):
        yield from store.former_versions(*on_s3)


def _below(folder: str, path: Path) -> Iterator[Stored]:
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from _below(folder, Path(entry.path))
                    continue
                with suppress(FileNotFoundError):  # deleted since it was listed
                    status = entry.stat()
                    if S_ISREG(status.st_mode):
                        at = datetime.fromtimestamp(status.st_mtime, UTC)
                        yield Stored(f"file://{entry.path}", status.st_size, at)
    except FileNotFoundError:
        return
    except OSError as error:
        raise Transient(
            f"list {folder}: expected permission to read {error.filename or path}, found {error}; "
            "grant it, then run it again"
        ) from error


def delete_files(io: FileIO, paths: Iterable[str]) -> int:
    """Delete files; ignore missing ones. Return the number of paths. Raises Transient for files
    that cannot be deleted, after deleting all others."""
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
        store_of(io).delete_objects(bucket, keys)
    if left:
        path, first = left[0]
        raise Transient(
            f"delete {done} files: expected permission, found {len(left)} left, first {path}: "
            f"{first}; all others are deleted: run it again as a user that may delete these"
        ) from first
    return done
