"""PyIceberg's file access to a warehouse, by PyArrow, with few requests to S3. PyArrow alone would
open new connections with each load of a table, request a small file's length before a read and its
existence before a write, write it in parts (three requests), and write a folder marker when it
deletes a file.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

from pyarrow.fs import FileSystem, S3FileSystem
from pyiceberg.io import (
    S3_RETRY_STRATEGY_IMPL,
    FileIO,
    InputFile,
    InputStream,
    OutputFile,
    OutputStream,
)
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from anabranch import config
from anabranch.common.counters import S3_BYTES, S3_REQUESTS, TALLY
from anabranch.common.errors import AnabranchError, NoAnswer
from anabranch.iceberg.manifests import own_spec_id
from anabranch.iceberg.private_api import open_file_system, retry_strategy, write_data_files
from anabranch.iceberg.s3 import ObjectStore, bucket_and_key, is_open, open_store, shared_files

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table

LOG = logging.getLogger(__name__)


class _Remembered:
    """One thread's cache of the metadata files on S3 that it read or wrote in the last seconds.

    A file has a unique name and is written once, so its content cannot change. A deletion by
    another program is noticed within `_REMEMBERED_SECONDS`.
    """

    def __init__(self) -> None:
        self._contents: dict[str, tuple[float, bytes]] = {}

    def get(self, location: str) -> bytes | None:
        since, content = self._contents.get(location, (0.0, None))
        return content if time.monotonic() - since < _REMEMBERED_SECONDS else None

    def put(self, location: str, content: bytes) -> None:
        now = time.monotonic()
        self._contents = {
            k: v for k, v in self._contents.items() if now - v[0] < _REMEMBERED_SECONDS
        }
        self._contents[location] = (now, content)

    def forget(self, location: str) -> None:
        self._contents.pop(location, None)


_REMEMBERED_SECONDS = 10.0
_REMEMBERED: ContextVar[_Remembered | None] = ContextVar("remembered", default=None)


@contextmanager
def remembering_files() -> Iterator[None]:
    """Cache metadata files on S3 inside the context, in this thread, for some seconds. The catalog
    is read each time, so a loaded table is the newest state."""
    token = _REMEMBERED.set(_Remembered())
    try:
        yield
    finally:
        _REMEMBERED.reset(token)


class _NewFile(PyArrowFile):
    """A file with a unique name: our names and PyIceberg's contain a UUID. A manifest or manifest
    list has its length once it is written: its writer requests it.
    """

    _length: int | None = None

    def create(self, overwrite: bool = False) -> OutputStream:
        stream = super().create(overwrite=True)
        if self.location.startswith("s3"):
            TALLY.count(S3_REQUESTS, "PutObject")
        # Parquet's writer accepts only PyArrow's own streams; its callers count the bytes.
        return _Counted(stream, self) if self.location.endswith((".avro", ".json")) else stream

    def __len__(self) -> int:
        return super().__len__() if self._length is None else self._length


class _WholeFile(PyArrowFile):
    """A small file, usually of metadata, read completely by one request if the process already has
    an S3 client. After an error PyArrow reads it instead, which retries, and whose errors callers
    handle. Raises TimeoutError at once: PyArrow would wait again for most of a command's half a
    minute.
    """

    on_s3: tuple[ObjectStore, str, str] | None = None
    """The store, the bucket and the key; None if only PyArrow can read the file."""

    def open(self, seekable: bool = True) -> InputStream:
        if self.on_s3 is not None:
            store, bucket, key = self.on_s3
            remembered = _REMEMBERED.get()
            if remembered is not None and (content := remembered.get(self.location)) is not None:
                return BytesIO(content)
            try:
                content = store.get(bucket, key)
                if remembered is not None:
                    remembered.put(self.location, content)
                return BytesIO(content)
            except NoAnswer as error:
                # The client's own message: the caller adds the operation and the remedy.
                raise TimeoutError(str(error.__cause__)) from error
            except AnabranchError as error:
                LOG.debug("%s", error)
        if self.location.startswith("s3"):
            TALLY.count(S3_REQUESTS, "GetObject")
        return super().open(seekable)


class _Counted(OutputStream):
    """A stream that sets its file's length, and counts its bytes, when it is closed."""

    def __init__(self, stream: OutputStream, file: _NewFile) -> None:
        self._stream, self._file, self._length, self._open = stream, file, 0, True
        self._remembered = _REMEMBERED.get() if file.location.startswith("s3") else None
        self._written: list[bytes] = []

    def write(self, b: bytes) -> int:
        written = self._stream.write(b)
        self._length += len(b)
        if self._remembered is not None:
            self._written.append(bytes(b))
        return written

    def tell(self) -> int:
        return self._length

    def close(self) -> None:
        if self._open:
            self._open = False
            self._stream.close()
            self._file._length = self._length
            if self._remembered is not None:
                self._remembered.put(self._file.location, b"".join(self._written))
            count_written([(self._file.location, self._length)])

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def count_written(files: Iterable[tuple[str, int]]) -> None:
    """Count the bytes of the files on S3 among written files, given as (path, bytes)."""
    if size := sum(size for path, size in files if path.startswith("s3")):
        TALLY.count(S3_BYTES, "written", size)


def write_files(table: Table, rows: pa.Table, properties: Mapping[str, str]) -> list[DataFile]:
    """Write rows with the table's columns into files of their partitions; no snapshot refers to
    them yet. `properties` override the table's properties. Raises OSError."""
    metadata = table.metadata.model_copy(
        update={
            "properties": {**table.metadata.properties, **properties},
            "default_spec_id": own_spec_id(table),
        }
    )
    files = list(write_data_files(metadata, rows, table.io))
    count_written((file.file_path, file.file_size_in_bytes) for file in files)
    for file in files:
        file.spec_id = metadata.default_spec_id
    return files


class LakeFileIO(PyArrowFileIO):
    """PyIceberg's file access by PyArrow; on S3 with fewer requests, over connections that the
    process shares."""

    def __init__(self, properties: dict[str, str]) -> None:
        super().__init__(properties)
        self.fs_by_scheme = self._shared_fs

    def _shared_fs(self, scheme: str, netloc: str | None) -> FileSystem:
        if not scheme.startswith("s3"):
            return open_file_system(self, scheme, netloc)
        # A forked process must not use its parent's connections.
        return _open_s3(os.getpid(), netloc, tuple(sorted(self.properties.items())), shared_files())

    def new_input(self, location: str) -> PyArrowFile:
        return (
            self.whole(location)
            if location.endswith((".avro", ".json"))
            else super().new_input(location)
        )

    def whole(self, location: str) -> PyArrowFile:
        """Return a file that is read completely into memory, by one request where possible."""
        scheme, netloc, path = self.parse_location(location, self.properties)
        file = _WholeFile(location, path, self.fs_by_scheme(scheme, netloc))
        # A command that only reads does not import the S3 client's library.
        file.on_s3 = self._on_s3(location) if is_open() else None
        return file

    def new_output(self, location: str) -> PyArrowFile:
        scheme, netloc, path = self.parse_location(location, self.properties)
        return _NewFile(location, path, self.fs_by_scheme(scheme, netloc))

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file. Raises OSError; not for a missing file on S3."""
        path = location if isinstance(location, str) else location.location
        if (remembered := _REMEMBERED.get()) is not None:
            remembered.forget(path)
        on_s3 = self._on_s3(path)
        if on_s3 is None:
            super().delete(location)
            return
        store, bucket, key = on_s3
        try:
            store.delete_objects(bucket, [key])
        except AnabranchError as error:
            raise OSError(str(error)) from error

    def _on_s3(self, location: str) -> tuple[ObjectStore, str, str] | None:
        """Return the store, bucket and key for our own requests; None for a file elsewhere, or if
        only PyArrow supports the S3 settings."""
        found = bucket_and_key(location)
        if found is None or self.properties.keys() & _PYARROW_ONLY:
            return None
        keys = {
            key: self.properties[f"s3.{name}"]
            for key, name in _STORE_KEYS.items()
            if f"s3.{name}" in self.properties
        }
        return open_store(config.S3.model_validate(keys)), *found

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.fs_by_scheme = self._shared_fs


def as_whole(io: FileIO, location: str) -> InputFile:
    """Return a small file of a table, to be read completely."""
    return io.whole(location) if isinstance(io, LakeFileIO) else io.new_input(location)


# PyIceberg's property of each configuration key, without `s3.`.
_STORE_KEYS = {
    "endpoint": "endpoint",
    "region": "region",
    "access_key": "access-key-id",
    "secret_key": "secret-access-key",
    "ca": "ca",
}
# S3 properties that only PyArrow supports: a catalog's temporary credentials, a role, a proxy.
_PYARROW_ONLY = {
    "s3.session-token",
    "s3.role-arn",
    "client.role-arn",
    "s3.proxy-uri",
    "s3.anonymous",
    "client.session-token",
}


@lru_cache(maxsize=16)
def _open_s3(
    process: int,
    netloc: str | None,
    properties: tuple[tuple[str, str], ...],
    keys: tuple[tuple[int, int], ...],
) -> FileSystem:
    io = PyArrowFileIO(dict(properties))
    opened = open_file_system(io, "s3", netloc)
    if not isinstance(opened, S3FileSystem):
        return opened
    # PyIceberg has no properties for these options. With allow_delayed_open, a file of one part is
    # written by one request.
    more: dict[str, Any] = {
        "allow_delayed_open": True,
        "tls_ca_file_path": io.properties.get("s3.ca"),
    }
    # The options that PyArrow returns lack the retry strategy.
    if (name := io.properties.get(S3_RETRY_STRATEGY_IMPL)) and (strategy := retry_strategy(name)):
        more["retry_strategy"] = strategy
    rebuild, (options,) = opened.__reduce__()
    return rebuild(options | more)
