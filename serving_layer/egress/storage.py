"""Storage of a folder target, on S3, HDFS or this machine. Small files are written atomically, and
`replace` never overwrites another process's file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Protocol
from uuid import uuid4

from anabranch import config
from anabranch.common.errors import ConfigurationError, Transient
from anabranch.common.file_lock import locked
from anabranch.common.remote_errors import lake_errors
from anabranch.config.egress import HDFS
from anabranch.iceberg.catalog_settings import catalog_properties
from anabranch.iceberg.file_io import LakeFileIO
from anabranch.iceberg.files import delete_files, list_files, local_path
from anabranch.iceberg.s3 import ObjectStore, bucket_and_key, open_store
from serving_layer.egress.webhdfs import WebHdfs

_JSON = "application/json"


@dataclass(frozen=True)
class SmallFile:
    """The content of a small file; `tag` distinguishes it from any file that replaces it."""

    body: bytes
    tag: str


class Storage(Protocol):
    """The operations of a folder target on storage. Each raises Transient, or ConfigurationError
    for missing permissions."""

    def find(self, path: str) -> SmallFile | None:
        """Return a small file, whole; None if it does not exist."""

    def replace(self, path: str, body: bytes, before: SmallFile | None) -> bool:
        """Replace `before` by a small file, atomically; return False if another file is there by
        then."""

    def put(self, path: str, body: bytes) -> None:
        """Write a small file, atomically."""

    def output(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Open a stream to a new file: on S3 it appears complete at close, elsewhere as it grows.
        Once closed, it survives a machine failure."""

    def names(self, folder: str) -> frozenset[str]:
        """Return the names of the files in a folder."""

    def delete(self, folder: str, names: frozenset[str]) -> None:
        """Delete files; those that are already gone are ignored."""


@dataclass(frozen=True)
class _LakeStorage:
    """Storage of a kind that a lake may use too."""

    environment: config.Environment
    io: LakeFileIO

    def output(self, path: str) -> AbstractContextManager[IO[bytes]]:
        stream: Any = self.io.new_output(path).create(overwrite=True)
        return stream  # type: ignore[no-any-return]

    def names(self, folder: str) -> frozenset[str]:
        return frozenset(
            file.path.rpartition("/")[2] for file in list_files(self.environment, folder)
        )

    def delete(self, folder: str, names: frozenset[str]) -> None:
        delete_files(self.environment, [f"{folder}/{name}" for name in sorted(names)])


@dataclass(frozen=True)
class S3Storage(_LakeStorage):
    """Storage on S3, by conditional writes."""

    _store: ObjectStore

    def find(self, path: str) -> SmallFile | None:
        found = self._store.find(*_on_s3(path))
        return SmallFile(*found) if found is not None else None

    def replace(self, path: str, body: bytes, before: SmallFile | None) -> bool:
        return self._store.put_if(
            *_on_s3(path), body, _JSON, before.tag if before is not None else None
        )

    def put(self, path: str, body: bytes) -> None:
        self._store.put(*_on_s3(path), body, _JSON)


class HdfsStorage:
    """Storage on HDFS, by atomic renames and extended attributes that are set once. A small file is
    replaced in two steps: an attribute of the old file names its successor, once; then the
    successor is renamed to the file's name. A process that finds another's successor renames it
    itself, so no process waits for one that was killed between the steps. The rename succeeds once,
    since its source is gone afterwards."""

    def __init__(self, hdfs: WebHdfs) -> None:
        self._hdfs = hdfs

    def find(self, path: str) -> SmallFile | None:
        body = self._hdfs.read(_on_hdfs(path))
        return SmallFile(body, sha256(body).hexdigest()) if body is not None else None

    def replace(self, path: str, body: bytes, before: SmallFile | None) -> bool:
        place = _on_hdfs(path)
        written = self._write_aside(path, body)
        if before is None:
            self._hdfs.rename(written, place)
        else:
            # The attribute's name contains the tag: a file that replaced `before` meanwhile has
            # another tag, and its own attribute stays unset.
            successor = self._hdfs.set_once(place, f"user.after-{before.tag[:32]}", written)
            if successor is not None and self.find(path) == before:
                moved = self._hdfs.rename(successor, place, overwrite=True)
                if not moved and self.find(path) == before:
                    raise ConfigurationError(
                        f"replace {path}: expected its successor {successor}, found none: it was "
                        f"deleted; delete {path}, then run it again"
                    )
        now = self.find(path)
        if now is not None and now.body == body:
            return True
        self._hdfs.delete(written)
        return False

    def put(self, path: str, body: bytes) -> None:
        written = self._write_aside(path, body)
        if not self._hdfs.rename(written, _on_hdfs(path), overwrite=True):
            raise Transient(
                f"write {path}: expected {written} to be there, found it gone: another process "
                "delivers; run it again"
            )

    @contextmanager
    def output(self, path: str) -> Iterator[IO[bytes]]:
        with tempfile.TemporaryFile(prefix="anabranch-egress-") as file:
            yield file
            file.seek(0)
            self._hdfs.write(_on_hdfs(path), file)

    def names(self, folder: str) -> frozenset[str]:
        return self._hdfs.names(_on_hdfs(folder))

    def delete(self, folder: str, names: frozenset[str]) -> None:
        for name in sorted(names):
            self._hdfs.delete(_on_hdfs(f"{folder}/{name}"))

    def _write_aside(self, path: str, body: bytes) -> str:
        """Write the body under a unique name that readers skip, and return the path."""
        folder, _, name = _on_hdfs(path).rpartition("/")
        written = f"{folder}/_{name}.{uuid4().hex}"
        self._hdfs.write(written, body)
        return written


class LocalStorage(_LakeStorage):
    """Storage on this machine, for one process at a time (`opened`)."""

    def find(self, path: str) -> SmallFile | None:
        try:
            body = local_path(path).read_bytes()
        except FileNotFoundError:
            return None
        return SmallFile(body, sha256(body).hexdigest())

    def replace(self, path: str, body: bytes, before: SmallFile | None) -> bool:
        if self.find(path) != before:
            return False
        self.put(path, body)
        return True

    def put(self, path: str, body: bytes) -> None:
        target = local_path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        written = target.with_name(f".{target.name}.{os.getpid()}")
        written.write_bytes(body)
        _sync(written)
        written.rename(target)
        _sync(target.parent)

    @contextmanager
    def output(self, path: str) -> Iterator[IO[bytes]]:
        with super().output(path) as stream:
            yield stream
        _sync(local_path(path))


@contextmanager
def open_storage(environment: config.Environment, root: str) -> Iterator[Storage]:
    """Open the storage of a root. A root on this machine is for one process only: raises Transient
    while another has it open. Raises ConfigurationError for HDFS that the environment does not
    name."""
    if root.startswith(HDFS):
        if environment.hdfs is None:
            raise ConfigurationError(
                f"open {root}: expected `hdfs:` with the name node's url in anabranch.yaml, found "
                "none"
            )
        with closing(WebHdfs(environment.hdfs)) as hdfs:
            yield HdfsStorage(hdfs)
        return
    io = LakeFileIO(catalog_properties(environment))
    if bucket_and_key(root) is not None:
        yield S3Storage(environment, io, open_store(environment.s3))
        return
    folder = local_path(root)
    with lake_errors(f"open {root}"):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".anabranch.lock", seconds=1):
            yield LocalStorage(environment, io)


def _on_s3(path: str) -> tuple[str, str]:
    found = bucket_and_key(path)
    assert found is not None
    return found


def _on_hdfs(path: str) -> str:
    return path.removeprefix(HDFS)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
