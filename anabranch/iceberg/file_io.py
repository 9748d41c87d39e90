"""PyIceberg's file access to a warehouse, by PyArrow, with few requests to S3. PyArrow alone would
open new connections with each load of a table, request a small file's length before a read and its
existence before a write, write it in parts (three requests), and write a folder marker when it
deletes a file.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from io import BytesIO
from tempfile import SpooledTemporaryFile
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import pyarrow as pa
from pyarrow import PythonFile
from pyarrow.fs import FileSystem, FileSystemHandler, PyFileSystem, S3FileSystem
from pyiceberg.io import (
    S3_RETRY_STRATEGY_IMPL,
    FileIO,
    InputFile,
    InputStream,
    OutputFile,
    OutputStream,
)
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table
from pyiceberg.typedef import EMPTY_DICT, Properties

from anabranch import config
from anabranch.common.counters import S3_BYTES, S3_REQUESTS, TALLY
from anabranch.common.errors import AnabranchError, NoAnswer, Transient
from anabranch.iceberg.manifests import own_spec_id
from anabranch.iceberg.private_api import open_file_system, retry_strategy, write_data_files
from anabranch.iceberg.s3 import ObjectStore, bucket_and_key, is_open, open_store, shared_files
from anabranch.iceberg.vended import KEY_NAMES, Vendor, keys_in, vendor_of

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
        # Our own client counts its requests.
        if self.location.startswith("s3") and isinstance(self._filesystem, S3FileSystem):
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
    process shares. `vendor`: where the keys of S3 are from, if the catalog vends them."""

    vendor: Vendor | None = None

    def __init__(self, properties: dict[str, str]) -> None:
        super().__init__(properties)
        self.fs_by_scheme = self._shared_fs

    def _shared_fs(self, scheme: str, netloc: str | None) -> FileSystem:
        if not scheme.startswith("s3"):
            return open_file_system(self, scheme, netloc)
        return self.s3(netloc) if self.vendor is None else PyFileSystem(_Renewing(self, netloc))

    def s3(self, bucket: str | None) -> FileSystem:
        """Return PyArrow's file system of S3, with keys that are valid now. Raises OSError, or
        ConfigurationError if the catalog refuses to renew them."""
        try:
            properties = self.access()
        except Transient as error:
            raise OSError(str(error)) from error
        # A forked process must not use its parent's connections.
        return _open_s3(os.getpid(), bucket, tuple(sorted(properties.items())), shared_files())

    def access(self) -> dict[str, str]:
        """Return the properties of S3, with keys that are valid now. Those of the table, which
        change with each publish, would open new connections. Raises as `Lake.load`."""
        own = _of_s3(self.properties)
        return own if self.vendor is None else own | self.vendor.current().as_properties()

    @staticmethod
    def parse_location(location: str, properties: Properties = EMPTY_DICT) -> tuple[str, str, str]:
        """Return scheme, host and path. A location is no URI: `#` and `?` are parts of names."""
        uri, *rest = re.split("(?=[#?])", location, maxsplit=1)
        scheme, host, path = PyArrowFileIO.parse_location(uri, properties)
        return scheme, host, "".join((path, *rest))

    def new_input(self, location: str) -> PyArrowFile:
        if location.endswith((".avro", ".json")):
            return self.whole(location)
        return super().new_input(location)

    def whole(self, location: str) -> PyArrowFile:
        """Return a file that is read completely into memory, by one request where possible."""
        scheme, netloc, path = self.parse_location(location, self.properties)
        file = _WholeFile(location, path, self.fs_by_scheme(scheme, netloc))
        # A command that only reads does not import the S3 client's library, unless PyArrow would
        # open new connections for each renewal.
        is_used = is_open() or self.vendor is not None
        file.on_s3 = self.on_s3(location) if is_used else None
        return file

    def new_output(self, location: str) -> PyArrowFile:
        scheme, netloc, path = self.parse_location(location, self.properties)
        return _NewFile(location, path, self.fs_by_scheme(scheme, netloc))

    def delete(self, location: str | InputFile | OutputFile) -> None:
        """Delete a file. Raises OSError; not for a missing file on S3."""
        path = location if isinstance(location, str) else location.location
        if (remembered := _REMEMBERED.get()) is not None:
            remembered.forget(path)
        on_s3 = self.on_s3(path)
        if on_s3 is None:
            super().delete(location)
            return
        store, bucket, key = on_s3
        try:
            store.delete_objects(bucket, [key])
        except AnabranchError as error:
            raise OSError(str(error)) from error

    def on_s3(self, location: str) -> tuple[ObjectStore, str, str] | None:
        """Return the store, bucket and key for our own requests; None for a file elsewhere, or if
        only PyArrow supports the S3 settings."""
        found = bucket_and_key(location)
        if found is None or self.properties.keys() & _PYARROW_ONLY:
            return None
        return store_of(self), *found

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.fs_by_scheme = self._shared_fs
        if self.vendor is not None:
            self.vendor.offer(self.properties)


def with_renewed_keys(table: Table) -> Table:
    """Return a loaded table whose file access renews the keys that the catalog vends."""
    if isinstance(table.io, LakeFileIO):
        table.io.vendor = vendor_of(table)
    return table


def for_tasks(io: FileIO) -> FileIO:
    """Return a file access that tasks may get. It contains secrets of the catalog only if tasks
    have to renew their keys. Raises as `Lake.load`."""
    if not isinstance(io, PyArrowFileIO):
        return io
    if not isinstance(io, LakeFileIO):
        return type(io)(_of_s3(io.properties))
    made = type(io)(io.access())
    made.vendor = io.vendor
    return made


def _of_s3(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties of S3, without those of table and catalog, such as a password. Pure."""
    own = {key: text for key, text in properties.items() if key.startswith(_OF_S3)}
    return own | ({"s3.region": own["client.region"]} if "client.region" in own else {})


def store_of(io: FileIO) -> ObjectStore:
    """Return the object store with the keys of a file access."""
    vendor = io.vendor if isinstance(io, LakeFileIO) else None
    keys = vendor or keys_in(io.properties, time.time())
    settings = {
        key: io.properties[name]
        for key, names in _STORE_KEYS.items()
        for name in names
        if name in io.properties and not (keys is not None and name in KEY_NAMES)
    }
    store = open_store(config.S3.model_validate(settings))
    return store if keys is None else store.with_keys(keys)


class _Renewing(FileSystemHandler):  # type: ignore[misc]
    """S3 with keys that a catalog vends. Each file is opened with keys that are valid then. Files
    are written by our own client, since a task may write one file for longer than keys live."""

    def __init__(self, io: LakeFileIO, bucket: str | None) -> None:
        self._io, self._bucket = io, bucket

    def get_type_name(self) -> str:
        return "s3"

    def normalize_path(self, path: str) -> str:
        return path

    def open_input_file(self, path: str) -> Any:
        return self._io.s3(self._bucket).open_input_file(path)

    def open_input_stream(self, path: str) -> Any:
        return self._io.s3(self._bucket).open_input_stream(path)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        on_s3 = self._io.on_s3(f"s3://{path}")
        if on_s3 is None:
            return self._io.s3(self._bucket).open_output_stream(path)
        return PythonFile(_Upload(*on_s3), mode="w")

    def get_file_info(self, paths: list[str]) -> Any:
        return self._io.s3(self._bucket).get_file_info(paths)

    def delete_file(self, path: str) -> None:
        self._io.s3(self._bucket).delete_file(path)

    def _unused(self, *_: Any) -> Any:
        raise NotImplementedError

    get_file_info_selector = create_dir = copy_file = move = open_append_stream = _unused
    delete_dir = delete_dir_contents = delete_root_dir_contents = _unused


class _Upload:
    """A new object, which is sent when it is closed; until then it is in memory, or if it is large
    in a temporary file, as in Iceberg's S3 client."""

    def __init__(self, store: ObjectStore, bucket: str, key: str) -> None:
        self._store, self._bucket, self._key = store, bucket, key
        # `close` closes it.
        self._content = SpooledTemporaryFile(_IN_MEMORY_BYTES)  # noqa: SIM115
        self.closed = False

    def write(self, data: bytes) -> int:
        return self._content.write(data)

    def tell(self) -> int:
        return self._content.tell()

    def flush(self) -> None:
        """Do nothing: a part of an object is of no use."""

    def close(self) -> None:
        """Send the object. Raises OSError."""
        if self.closed:
            return
        self.closed = True
        with self._content as content:
            content.seek(0)
            try:
                self._store.upload(self._bucket, self._key, content)
            except AnabranchError as error:
                raise OSError(str(error)) from error


def as_whole(io: FileIO, location: str) -> InputFile:
    """Return a small file of a table, to be read completely."""
    return io.whole(location) if isinstance(io, LakeFileIO) else io.new_input(location)


# Prefixes of the properties of S3.
_OF_S3 = ("s3.", "client.")
# PyIceberg's properties of each configuration key; the last one has precedence.
_STORE_KEYS = {
    "endpoint": ("s3.endpoint",),
    "region": ("s3.region", "client.region"),
    "access_key": ("s3.access-key-id",),
    "secret_key": ("s3.secret-access-key",),
    "ca": ("s3.ca",),
}
# S3 properties that only PyArrow supports: a role, a proxy.
_PYARROW_ONLY = {
    "s3.role-arn",
    "client.role-arn",
    "s3.proxy-uri",
    "s3.anonymous",
    "client.session-token",
}
_IN_MEMORY_BYTES = 8 * 2**20


def _environments_proxy(io: PyArrowFileIO) -> str | None:
    """Return the proxy of HTTPS_PROXY or HTTP_PROXY without NO_PROXY's hosts. boto3 and the AWS SDK
    for Java use these variables, PyArrow does not."""
    endpoint = urlsplit(io.properties.get("s3.endpoint") or "https://s3.amazonaws.com")
    if proxy_bypass(endpoint.hostname or ""):
        return None
    return getproxies().get(endpoint.scheme)


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
    if (given := io.properties.get("s3.proxy-uri")) or (given := _environments_proxy(io)):
        more["proxy_options"] = given
    # The options that PyArrow returns lack the retry strategy.
    if (name := io.properties.get(S3_RETRY_STRATEGY_IMPL)) and (strategy := retry_strategy(name)):
        more["retry_strategy"] = strategy
    rebuild, (options,) = opened.__reduce__()
    return rebuild(options | more)
