"""The bytes of records in which erased values are searched: Avro is decoded."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import Lock
from typing import Any

from anabranch.config import Environment, Stream
from anabranch.decode.avro import Malformed, value_reader
from anabranch.decode.avro_names import Incompatible, parse
from anabranch.kafka.schema_registry import open_registry
from anabranch.subjects.whole_schema import whole_schema

_HEADER = struct.Struct(">xI")  # Confluent's wire format: a zero byte, the schema's id


class Payloads:
    """Decodes keys, values and headers in Avro by the writers' schemas of the stream's registry,
    whatever their subject and fields. Other bytes stay as they are."""

    def __init__(self, environment: Environment, stream: Stream) -> None:
        needs_registry = stream.format.needs_registry
        self._registry = open_registry(environment, stream) if needs_registry else None
        self._subject = stream.format.subject
        self._readers: dict[int, Callable[[bytes], Any] | None] = {}
        self._lock = Lock()

    def of(self, row: Mapping[str, Any]) -> list[bytes]:
        """Return the bytes of a record's key, value and headers. Raises Transient if the registry
        does not answer, ConfigurationError if it refuses."""
        headers = (
            part for h in row["headers"] or () for part in (str(h["key"]).encode(), h["value"])
        )
        parts = (row["key"], row["value"], *headers)
        return [self._texts(part) for part in parts if part is not None]

    def _texts(self, part: bytes) -> bytes:
        if self._registry is None or len(part) < _HEADER.size or part[0] != 0:
            return part
        reader = self._reader(*_HEADER.unpack_from(part))
        try:
            return b"\n".join(_leaves(reader(part[_HEADER.size :]))) if reader is not None else part
        except Malformed:
            return part

    def _reader(self, id: int) -> Callable[[bytes], Any] | None:
        """Return the reader of a schema; None if the registry has no such schema of Avro, or one
        that no decoder reads."""
        assert self._registry is not None
        with self._lock:
            if id not in self._readers:
                schema = self._registry.schema(id, self._subject)
                try:
                    self._readers[id] = (
                        value_reader(parse(whole_schema(schema)))
                        if schema is not None and schema.type == "AVRO"
                        else None
                    )
                except Incompatible:
                    self._readers[id] = None
            return self._readers[id]


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
