"""A scan of a stream's tables for erased values: each object, and each version that the bucket
keeps.

Parquet files are decoded: in the stream's rows the scan searches the column, in other tables every
text. It also searches the bounds in manifests of the stream's rows, and all other files as text. It
searches for whole numbers only in the stream's rows and bounds. Texts have a value wherever its
bytes are, also within a longer word: it shares no rule with `erase`.
"""

from __future__ import annotations

import gzip
import json
import re
import unicodedata
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.conversions import from_bytes
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import DataFile, ManifestFile
from pyiceberg.types import PrimitiveType, StringType

from anabranch.common.errors import Terminal
from anabranch.common.remote_errors import lake_errors
from anabranch.common.temporary import temporary_folder
from anabranch.iceberg.files import list_files, list_versions
from anabranch.iceberg.s3 import Version, open_store
from anabranch.iceberg.state_properties import unpack
from anabranch.lifecycle.erasure.end import tables_of
from anabranch.lifecycle.erasure.search import Values, column_of, require_column, require_values

if TYPE_CHECKING:
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table

    from anabranch.job import Job


_AT_ONCE = 8
# Iceberg's writers truncate the bounds of texts to this many characters.
_BOUND = 16


@dataclass(frozen=True)
class Hit:
    """An object, or a version of one, that has an erased value, and the part that has it."""

    path: str
    where: str
    version: str | None = None


@dataclass(frozen=True)
class ScanResult:
    objects: int
    versions: int
    bytes: int
    hits: tuple[Hit, ...] = ()


@dataclass(frozen=True)
class _Object:
    path: str
    version: Version | None = None

    def hit(self, where: str) -> Hit:
        return Hit(self.path, where, self.version.id if self.version is not None else None)


def scan(job: Job, values: Values, beside: Sequence[bytes] = ()) -> ScanResult:
    """Search every object of the stream's tables, versions included, for the values. `beside`:
    longer words of other records that have a value within. Raises ConfigurationError for an unsuitable column, Terminal without the right to list versions or for
    a file that cannot be read, Transient."""
    objects, versions, size, hits = 0, 0, 0, list[Hit]()
    schema = job.lake.load(job.stream.table).schema()
    require_column(schema, values.column, job.stream.name)
    require_values(schema, values)
    for name in tables_of(job):
        table = job.lake.load(name)
        search = ValueSearch(schema, values, name == job.stream.table, beside)
        found = list(_objects(job, table))
        read = partial(_search, job, table, search)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for one, (content, where) in zip(found, pool.map(read, found), strict=True):
                objects += one.version is None
                versions += one.version is not None
                size += content
                hits += [one.hit(each) for each in where]
    ordered = sorted(hits, key=lambda h: (h.path, h.version or "", h.where))
    return ScanResult(objects, versions, size, tuple(ordered))


def _objects(job: Job, table: Table) -> Iterator[_Object]:
    """Yield all objects below the table's location and the paths in its properties."""
    paths = {v for k, v in table.properties.items() if re.fullmatch(r"write\..*\.?path", k)}
    for folder in sorted({table.location(), *paths}):
        yield from (_Object(stored.path) for stored in list_files(table.io, folder))
        yield from (_Object(version.path, version) for version in list_versions(table.io, folder))


def _search(job: Job, table: Table, search: ValueSearch, one: _Object) -> tuple[int, list[str]]:
    content = _read(job, table, one)
    return (len(content), search.find_in(one.path, content)) if content is not None else (0, [])


def _read(job: Job, table: Table, one: _Object) -> bytes | None:
    """Return the content; None if the file was deleted since it was listed."""
    if one.version is not None:
        return open_store(job.environment.s3).get_version(one.version)
    with lake_errors(f"read {one.path}"):
        try:
            with table.io.new_input(one.path).open() as source:
                return bytes(source.read())
        except FileNotFoundError:
            return None


class ValueSearch:
    """Searches contents for values, by the rows' `schema` if `is_rows`; `beside` as for `scan`."""

    def __init__(
        self, schema: Schema, values: Values, is_rows: bool, beside: Sequence[bytes] = ()
    ) -> None:
        self._beside = beside
        self._schema, self._values, self._is_rows = schema, values, is_rows
        self._field = schema.find_field(values.column)
        is_text = isinstance(self._field.field_type, StringType)
        # Whole numbers are not searched as words: they occur everywhere.
        self._words = _encoded(values.ordered) if is_text else set[bytes]()

    def find_in(self, path: str, content: bytes) -> list[str]:
        """Return the parts of a file that have a value; Terminal if it cannot be read."""
        name = path.rpartition("/")[2]
        try:
            if name.endswith(".parquet"):
                return self._parquet(content)
            if name.endswith(".avro"):
                is_list = name.startswith("snap-")
                return self._bounds(content) if self._is_rows and not is_list else []
            return ["text"] if self._has_word(_text_of(name, content)) else []
        except (pa.ArrowException, ValueError, OSError, zlib.error) as error:
            raise Terminal(
                f"scan {path}: expected a readable file, found {type(error).__name__}: {error}; "
                "if another program wrote it, move it away, then run it again"
            ) from error

    def _parquet(self, content: bytes) -> list[str]:
        with pq.ParquetFile(pa.BufferReader(content)) as parquet:
            if not self._is_rows:
                return sorted({name for of in parquet.iter_batches() for name in self._texts(of)})
            name = column_of(parquet.schema_arrow, self._schema, self._values.column)
            batches = parquet.iter_batches(columns=[name]) if name is not None else ()
            texts = (batch[name].cast(pa.string()) for batch in batches)
            found = any(pc.any(pc.is_in(of, self._values.array)).as_py() for of in texts)
        return [f"column {name}"] if found else []

    def _texts(self, batch: pa.RecordBatch) -> Iterator[str]:
        """Yield the columns of a batch that have one of the values."""
        for name in batch.schema.names:
            if self._has_word(b"\0".join(_leaves(batch[name].to_pylist()))):
                yield f"column {name}"

    def _has_word(self, content: bytes) -> bool:
        for other in self._beside:
            content = content.replace(other, b"\0")
        return any(word in content for word in self._words)

    def _bounds(self, content: bytes) -> list[str]:
        # PyIceberg reads manifests from files only.
        with temporary_folder("scan") as folder:
            path = folder / "manifest.avro"
            path.write_bytes(content)
            manifest = ManifestFile.from_args(
                manifest_path=str(path), partition_spec_id=0, sequence_number=0, added_snapshot_id=0
            )
            entries = manifest.fetch_manifest_entry(PyArrowFileIO(), discard_deleted=False)
        return ["bounds"] if any(self._has_bound(entry.data_file) for entry in entries) else []

    def _has_bound(self, data_file: DataFile) -> bool:
        kind, id = self._field.field_type, self._field.field_id
        assert isinstance(kind, PrimitiveType)
        ends = (data_file.lower_bounds, data_file.upper_bounds)
        bounds = [bound for end in ends if (bound := (end or {}).get(id))]
        return any(self._is_bound_of_value(str(from_bytes(kind, bound))) for bound in bounds)

    def _is_bound_of_value(self, bound: str) -> bool:
        """Whether a bound is a value, or a truncated one (an upper one's last character is + 1)."""
        if bound in self._values.texts:
            return True
        longer = [text for text in self._values.texts if len(text) > _BOUND]
        return len(bound) == _BOUND and any(text.startswith(bound[:-1]) for text in longer)


def _encoded(values: Iterable[str]) -> set[bytes]:
    """Values in every encoding and normal form that a certificate is of."""
    normal = unicodedata.normalize
    forms = {form for value in values for form in (normal("NFC", value), normal("NFD", value))}
    encodings = ("utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be", "cp1252")
    return {form.encode(encoding, "ignore") for form in forms for encoding in encodings} - {b""}


def _leaves(value: Any) -> Iterator[bytes]:
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, str):
        yield value.encode()
    elif isinstance(value, Mapping):
        yield from (leaf for each in value.values() for leaf in _leaves(each))
    elif isinstance(value, Iterable):
        yield from (leaf for each in value for leaf in _leaves(each))


def _text_of(name: str, content: bytes) -> bytes:
    """Return a file's text, with its compressed parts decompressed."""
    if not name.endswith(".metadata.json"):
        return content
    text = gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content
    packed = re.findall(rb'"(zlib:(?:[^"\\]|\\.)*)"', text)
    return b"\0".join([text, *(unpack(json.loads(b'"' + one + b'"')).encode() for one in packed)])
