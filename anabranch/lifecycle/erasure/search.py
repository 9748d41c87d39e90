"""Find erased values: rows by the values of a column, other records by a search of their bytes, of
which Avro and Protobuf are decoded.

Files whose bounds exclude every value are not opened. From the others, the search reads the column
and the rows' places.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from threading import Lock
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.conversions import from_bytes
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import IntegerType, LongType, PrimitiveType, StringType

from anabranch.common.errors import ConfigurationError
from anabranch.config import Environment, Stream
from anabranch.decode.avro import Malformed, value_reader
from anabranch.decode.avro_names import Incompatible, parse
from anabranch.decode.protobuf import contents_reader
from anabranch.iceberg.manifests import hour_of_file
from anabranch.iceberg.rewriting import opened, read_batches
from anabranch.kafka.schema_registry import RegisteredSchema, open_registry
from anabranch.lifecycle.erasure.words import Words
from anabranch.protocol.erasure import log_of
from anabranch.protocol.registers import Erasure
from anabranch.protocol.state import State
from anabranch.subjects.schemas import read_descriptors, whole_schema

_AT_ONCE = 8
_PLACES = ("kafka_partition", "kafka_offset")
_FIELD_ID = b"PARQUET:field_id"
_NUMBER = re.compile("0|-?[1-9][0-9]*", re.ASCII)

Place = tuple[int, int]
"""Partition and offset."""

Covered = Callable[[int], tuple[int, int]]
"""Returns the offsets [start, end) of a partition that an erasure covers."""


@dataclass(frozen=True)
class Values:
    """The values of a column to search for, as texts; if only their hashes are known, `texts` is
    empty and `matches` tests a value."""

    column: str
    texts: frozenset[str]
    matches: Callable[[str], bool]

    @staticmethod
    def of(column: str, texts: Collection[str]) -> Values:
        known = frozenset(texts)
        return Values(column, known, known.__contains__)

    @cached_property
    def array(self) -> pa.StringArray:
        return pa.array(self.ordered, pa.string())

    @cached_property
    def ordered(self) -> list[str]:
        return sorted(self.texts)

    @cached_property
    def words(self) -> Words:
        return Words(self.texts)

    @cached_property
    def numbers(self) -> list[int]:
        """The texts of a column of whole numbers, as sorted numbers."""
        return sorted(map(int, self.texts))


def require_column(schema: Schema, name: str, stream: str) -> None:
    """Raise ConfigurationError if the table lacks the column, or it is no text or whole number."""
    found = next((field for field in schema.fields if field.name == name), None)
    if found is None or not isinstance(found.field_type, StringType | IntegerType | LongType):
        fitting = [
            f.name
            for f in schema.fields
            if isinstance(f.field_type, StringType | IntegerType | LongType)
        ]
        raise ConfigurationError(
            f"stream {stream}: --by {name}: expected a column of type STRING, INT or BIGINT, "
            f"found {'no such column' if found is None else found.field_type}; columns: "
            f"{', '.join(fitting)}"
        )


def require_values(schema: Schema, values: Values) -> None:
    """Raise ConfigurationError for values that are not the text of a whole number, if the column
    has whole numbers: no row would match."""
    if isinstance(schema.find_field(values.column).field_type, StringType):
        return
    if other := [text for text in values.ordered if _NUMBER.fullmatch(text) is None]:
        raise ConfigurationError(
            "--values: expected whole numbers without leading zeros, such as 4711, for column "
            f"{values.column}, found "
            f"{other[0]!r}{f' and {len(other) - 1} others' if other[1:] else ''}"
        )


def may_hold(schema: Schema, data_file: DataFile, values: Values) -> bool:
    """Return whether a file may contain a value, by its bounds; True without bounds. Pure."""
    found = schema.find_field(values.column)
    assert isinstance(found.field_type, PrimitiveType)
    lower = (data_file.lower_bounds or {}).get(found.field_id)
    upper = (data_file.upper_bounds or {}).get(found.field_id)
    if lower is None or upper is None or not values.texts:
        return True
    least, most = (from_bytes(found.field_type, bound) for bound in (lower, upper))
    ordered: list[Any] = (
        values.ordered if isinstance(found.field_type, StringType) else values.numbers
    )
    at = bisect_left(ordered, least)
    return at < len(ordered) and ordered[at] <= most


def covered_of(state: State, one: Erasure, data_file: DataFile) -> Covered:
    """Return the offsets that an erasure covers in a file of rows, by the log of its hour. Pure."""
    hour = hour_of_file(state.table, data_file)
    return partial(one.offsets, hour, log_of(state, hour))


def find_rows(
    state: State, one: Erasure, values: Values, files: Iterable[DataFile]
) -> dict[str, dict[int, int]]:
    """Return the erasure's rows by path and partition, of files with any. Raises Transient."""
    found = find_places(state, one, values, files)
    return {
        path: dict(Counter(partition for partition, _ in places)) for path, places in found.items()
    }


def find_places(
    state: State, one: Erasure, values: Values, files: Iterable[DataFile]
) -> dict[str, list[Place]]:
    """Return the places of the erasure's rows by path, of files with any. Raises Transient."""
    table, schema = state.table, state.table.schema()
    candidates = [f for f in files if may_hold(schema, f, values)]

    def find(data_file: DataFile) -> list[Place]:
        places: list[Place] = []
        with opened(table, data_file) as parquet:
            name = column_of(parquet.schema_arrow, schema, values.column)
            if name is None:
                return []
            for batch in parquet.iter_batches(columns=[name, *_PLACES], use_threads=False):
                places += _places(
                    batch.filter(
                        erased_mask(batch, name, values, covered_of(state, one, data_file))
                    )
                )
        return places

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = zip(candidates, pool.map(find, candidates), strict=True)
        return {f.file_path: places for f, places in found if places}


def places_in(table: Table, data_file: DataFile) -> set[Place]:
    """Return the places of a file's records. Raises Transient."""
    with opened(table, data_file) as parquet:
        return {
            place
            for batch in parquet.iter_batches(columns=_PLACES, use_threads=False)
            for place in _places(batch)
        }


def _places(batch: pa.RecordBatch) -> list[Place]:
    return list(zip(*(batch[name].to_pylist() for name in _PLACES), strict=True))


def column_of(file_schema: pa.Schema, schema: Schema, name: str) -> str | None:
    """Return a column's name in a file, by field id; None in a file older than the column."""
    id = str(schema.find_field(name).field_id).encode()
    return next((f.name for f in file_schema if (f.metadata or {}).get(_FIELD_ID) == id), None)


def erased_mask(
    batch: pa.RecordBatch, name: str, values: Values, covered: Covered
) -> pa.BooleanArray:
    texts = batch[name].cast(pa.string())
    wanted = values.array
    if not values.texts:
        distinct = texts.unique().drop_null().to_pylist()
        wanted = pa.array([text for text in distinct if values.matches(text)], pa.string())
    return pc.and_(pc.is_in(texts, wanted), _covered_mask(batch, covered))


def _covered_mask(batch: pa.RecordBatch, covered: Covered) -> pa.BooleanArray:
    partitions, offsets = batch["kafka_partition"], batch["kafka_offset"]
    mask = pa.repeat(False, len(batch))
    for p in partitions.unique().to_pylist():
        start, end = covered(p)
        of_range = pc.and_(pc.greater_equal(offsets, start), pc.less(offsets, end))
        mask = pc.or_(mask, pc.and_(pc.equal(partitions, p), of_range))
    return mask


def find_letters(
    payloads: Payloads, table: Table, one: Erasure, values: Values, files: Collection[DataFile]
) -> dict[str, set[Place]]:
    """Return the places of the erasure's records with one of the values in key, value or headers,
    by path; only files with such records. Raises the errors of `Payloads`."""

    def find(data_file: DataFile) -> set[Place]:
        found, hour = set[Place](), hour_of_file(table, data_file)
        for batch in read_batches(table, (data_file,)):
            rows = batch.select(["topic_id", *_PLACES, "key", "value", "headers"]).to_pylist()
            for row in rows:
                start, end = one.offsets(hour, row["topic_id"], row["kafka_partition"])
                if start <= row["kafka_offset"] < end and any(
                    map(values.words.are_in, payloads.of(row))
                ):
                    found.add((row["kafka_partition"], row["kafka_offset"]))
        return found

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        places = zip(files, pool.map(find, files), strict=True)
        return {f.file_path: found for f, found in places if found}


def places_by_hour(
    table: Table, files: Mapping[str, DataFile], places: Mapping[str, Collection[Place]]
) -> dict[str, set[Place]]:
    """Group places, given by the paths of their files, by the hours of these files. Pure."""
    by_hour: dict[str, set[Place]] = {}
    for path, of_file in places.items():
        by_hour.setdefault(hour_of_file(table, files[path]), set()).update(of_file)
    return by_hour


_Read = Callable[[bytes], Any]
_HEADER = struct.Struct(">xI")  # Confluent's wire format: a zero byte, the schema's id


class Payloads:
    """Decodes keys, values and headers in Avro and Protobuf by the registry's writers' schemas,
    whatever their subject, or values by the descriptor file. Other bytes stay."""

    def __init__(self, environment: Environment, stream: Stream) -> None:
        needs_registry = stream.format.needs_registry
        self._registry = open_registry(environment, stream) if needs_registry else None
        self._subject = stream.format.subject
        self._readers: dict[int, _Read | None] = {}
        self._of_value: _Read | None = None
        if stream.format.descriptor is not None:
            self._of_value = contents_reader(read_descriptors(stream), stream.format.message)
        self._lock = Lock()

    def of(self, row: Mapping[str, Any]) -> list[bytes]:
        """Return the bytes of a record's key, value and headers. Raises Transient if the registry
        does not answer, ConfigurationError if it refuses."""
        headers = (
            part for h in row["headers"] or () for part in (str(h["key"]).encode(), h["value"])
        )
        value = row["value"]
        if self._of_value is not None and value is not None:
            value = _decoded(self._of_value, value, value)
        parts = (row["key"], value, *headers)
        return [self._texts(part) for part in parts if part is not None]

    def _texts(self, part: bytes) -> bytes:
        if self._registry is None or len(part) < _HEADER.size or part[0] != 0:
            return part
        reader = self._reader(*_HEADER.unpack_from(part))
        return _decoded(reader, part[_HEADER.size :], part) if reader is not None else part

    def _reader(self, id: int) -> _Read | None:
        """Return a schema's reader; None without it, for JSON, and if no decoder reads it."""
        assert self._registry is not None
        with self._lock:
            if id not in self._readers:
                schema = self._registry.schema(id, self._subject)
                try:
                    self._readers[id] = _reader_of(schema) if schema is not None else None
                except Incompatible:
                    self._readers[id] = None
            return self._readers[id]


def _reader_of(schema: RegisteredSchema) -> _Read | None:
    if schema.type == "AVRO":
        return value_reader(parse(whole_schema(schema)))
    return contents_reader(whole_schema(schema)) if schema.type == "PROTOBUF" else None


def _decoded(read: _Read, encoded: bytes, otherwise: bytes) -> bytes:
    try:
        return b"\n".join(_leaves(read(encoded)))
    except Malformed:
        return otherwise


def _leaves(value: Any) -> Iterator[bytes]:
    """Yield the texts, bytes and whole numbers of a value."""
    if isinstance(value, bytes):
        yield value
    elif isinstance(value, Mapping):
        # The keys of a map are bytes, those of a record are its fields' names.
        yield from (key for key in value if isinstance(key, bytes))
        yield from _leaves(value.values())
    elif isinstance(value, tuple):
        # Of a union: the number of the value's type is no content.
        yield from _leaves(value[1])
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for one in value:
            yield from _leaves(one)
    elif value is not None:
        yield str(value).encode()
