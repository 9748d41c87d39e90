"""The bytes of records in which erased values are searched: Avro and Protobuf are decoded."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Lock
from typing import Any

from anabranch.config import Environment, Stream
from anabranch.decode.avro import Malformed, value_reader
from anabranch.decode.avro_names import Incompatible, parse
from anabranch.decode.protobuf import contents_reader
from anabranch.kafka.schema_registry import RegisteredSchema, open_registry
from anabranch.subjects.whole_schema import read_descriptors, whole_schema

_Read = Callable[[bytes], Any]
_HEADER = struct.Struct(">xI")  # Confluent's wire format: a zero byte, the schema's id


class Payloads:
    """Decodes keys, values and headers in Avro and Protobuf by the writers' schemas of the stream's
    registry, whatever their subject and fields, or values by its descriptor file. Other bytes stay
    as they are."""

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
        """Return the reader of a schema; None if the registry has none, one of JSON, or one that no
        decoder reads."""
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
