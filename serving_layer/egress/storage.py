"""Storage of a folder target, on S3 or this machine. Small files are written atomically, and
`replace` never overwrites another process's file."""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from anabranch import config
from anabranch.common.remote_errors import lake_errors
from anabranch.common.temporary import locked
from anabranch.iceberg.catalog_settings import catalog_properties
from anabranch.iceberg.file_io import LakeFileIO, store_of
from anabranch.iceberg.files import delete_files, list_files, local_path
from anabranch.iceberg.s3 import ObjectStore, bucket_and_key

_JSON = "application/json"


@dataclass(frozen=True)
class SmallFile:
    """The content of a small file; `tag` distinguishes it from any file that replaces it."""

    body: bytes
    tag: str


@dataclass(frozen=True)
class Storage(ABC):
    """The operations of a folder target on storage. Each raises Transient, or ConfigurationError
    for missing permissions."""

    io: LakeFileIO

    @abstractmethod
    def find(self, path: str) -> SmallFile | None:
        """Return a small file, whole; None if it does not exist."""

    @abstractmethod
    def replace(self, path: str, body: bytes, before: SmallFile | None) -> bool:
        """Replace `before` by a small file, atomically; return False if another file is there by
        then."""

    @abstractmethod
    def put(self, path: str, body: bytes) -> None:
        """Write a small file, atomically."""

    def output(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Open a stream to a new file: on S3 it appears complete at close, on this machine as it
        grows. Once closed, it survives a machine failure."""
        stream: Any = self.io.new_output(path).create(overwrite=True)
        return stream  # type: ignore[no-any-return]

    def names(self, folder: str) -> frozenset[str]:
        return frozenset(file.path.rpartition("/")[2] for file in list_files(self.io, folder))

    def delete(self, folder: str, names: frozenset[str]) -> None:
        """Delete files; those that are already gone are ignored."""
        delete_files(self.io, [f"{folder}/{name}" for name in sorted(names)])


@dataclass(frozen=True)
class S3Storage(Storage):
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


class LocalStorage(Storage):
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
        # A new file, whose name no process can guess: else a link of that name, by another user of
        # the folder, would direct the bytes to any file that this process may write.
        written = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        with written.open("xb") as new:
            new.write(body)
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
    while another has it open."""
    io = LakeFileIO(catalog_properties(environment))
    if bucket_and_key(root) is not None:
        yield S3Storage(io, store_of(io))
        return
    folder = local_path(root)
    with lake_errors(f"open {root}"):
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".anabranch.lock", seconds=1):
            yield LocalStorage(io)


def _on_s3(path: str) -> tuple[str, str]:
    found = bucket_and_key(path)
    assert found is not None
    return found


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
