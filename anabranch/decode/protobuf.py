"""Protobuf: messages of a type as the stream's columns, by exact name of the fields.

Source: https://protobuf.dev/programming-guides/encoding/. Values are read by protobuf's own library
(upb); `schemas` are sets of file descriptors, the last file's messages first in the wire format.

docs/reference/formats.md lists the types that a column reads. Missing fields of a message are null.

A wrapper (google.protobuf.Int32Value and the like) is read as its value. A field with presence
(`optional`, a message, a member of a oneof) that is not set is null; one without has its value, as
it is by default if it was not sent. A message may have fields that its type does not have.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    json_format,
    message_factory,
    timestamp_pb2,
)
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from anabranch.config.columns import Column
from anabranch.decode import values
from anabranch.decode.avro import Malformed, read_long, same, text_of
from anabranch.decode.avro_names import Incompatible
from anabranch.decode.inputs import DESCRIPTOR, WriterSchema, split
from anabranch.decode.values import (
    FIRST_MICROS,
    LAST_MICROS,
    MICROS,
    Errors,
    Reading,
    Unreadable,
    columns_of,
    found,
    spread,
    verdict,
    within,
)

TIMESTAMP, DATE = "google.protobuf.Timestamp", "google.type.Date"
WRAPPERS = frozenset(
    f"google.protobuf.{kind}Value"
    for kind in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
DOCUMENTS = frozenset(f"google.protobuf.{kind}" for kind in ("Struct", "Value", "ListValue"))
"""Messages of JSON, which contain themselves."""
F = FieldDescriptor
INT32 = (F.TYPE_INT32, F.TYPE_SINT32, F.TYPE_SFIXED32)
INT64 = (F.TYPE_INT64, F.TYPE_SINT64, F.TYPE_SFIXED64, F.TYPE_UINT32, F.TYPE_FIXED32)
UINT64 = (F.TYPE_UINT64, F.TYPE_FIXED64)
_INTEGERS = (*INT32, *INT64, *UINT64)

# The methods of messages; by its own name a message would give its field of that name.
_BASE: Any = timestamp_pb2.Timestamp.__base__
_has: Callable[[Any, str], bool] = _BASE.HasField
_NO_MOMENT = timestamp_pb2.Timestamp()
_OTHER = "a value of another type"

_Convert = Callable[[Any], Any]
Key = tuple[int, ...]
"""The path to a message's type in its file: the indexes of the wire format."""
Records = tuple[list[int], list[bytes]]
"""The indexes of records, and their encoded messages."""


@lru_cache(maxsize=256)
def _file(text: str) -> tuple[Any, Any]:
    """Return the pool of a set of file descriptors (Base64) and its last. Raises Incompatible."""
    pool, added = descriptor_pool.DescriptorPool(), set[str]()
    try:
        files = descriptor_pb2.FileDescriptorSet.FromString(base64.b64decode(text)).file
        by_name = {file.name: file for file in files}

        def add(name: str) -> None:
            if name not in added:
                added.add(name)
                for dependency in by_name[name].dependency:
                    add(dependency)
                pool.Add(by_name[name])

        for name in by_name:
            add(name)
        return pool, pool.FindFileByName(files[-1].name)
    except KeyError as error:
        why = f"expected a set of file descriptors with its imports, found none of {error}"
        raise Incompatible(why) from None
    except (DecodeError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise Incompatible(f"expected a set of file descriptors, found none: {error}") from None


def message_of(text: str, at: str | Key) -> Descriptor:
    """Return the type of a message, by its full name or its indexes in the last file, of a set of
    file descriptors (Base64). Raises Incompatible."""
    pool, last = _file(text)
    if isinstance(at, str):
        try:
            return pool.FindMessageTypeByName(at)
        except KeyError:
            raise Incompatible(f"expected a message {at}, found none") from None
    found, inner = None, last.message_types_by_name
    for place in at:
        types = list(inner.values())
        if place >= len(types):
            raise Incompatible(f"expected the message at indexes {list(at)}, found none")
        found, inner = types[place], types[place].nested_types_by_name
    return found


class Plan:
    """How messages of a type are read as columns. Raises Incompatible."""

    def __init__(self, message: Descriptor, columns: tuple[tuple[str, str, bool], ...]) -> None:
        fields = dict(message.fields_by_name)
        names = {name for name, _, _ in columns}
        if missing := sorted(n for n, _, required in columns if required and n not in fields):
            raise Incompatible(
                f"{missing[0]}: expected a field for the NOT NULL column, found none"
            )
        if not names & fields.keys():
            raise Incompatible(f"expected a field of {', '.join(names)}, found none")
        self.parse = message_factory.GetMessageClass(message).FromString
        self.fields = {
            name: _Field(values.arrow_type(kind), fields[name])
            for name, kind, _ in columns
            if name in fields
        }
        self._numbers = {fields[name].number: fields[name] for name in self.fields}
        self._others, self._names = bool(fields.keys() - names or message.is_extendable), names

    def others(
        self, messages: Sequence[Any]
    ) -> Iterator[tuple[int, list[str], FieldDescriptor | None]]:
        """Yield the messages with other fields than columns: the index, the names of fields without
        a column and the numbers of those that the type does not have, and a field with a column
        that is among these (`_left`)."""
        if not self._others and not any(map(len, map(UnknownFieldSet, messages))):
            return
        for i, message in enumerate(messages):
            unknown = UnknownFieldSet(message)
            names = [f"#{number}" for number in sorted({one.field_number for one in unknown})]
            if self._others:
                set_fields = (
                    field.full_name if field.is_extension else field.name
                    for field, _ in _BASE.ListFields(message)
                )
                names += [name for name in set_fields if name not in self._names]
            if names:
                yield i, names, _left(unknown, self._numbers)


@lru_cache(maxsize=256)
def plan(text: str, at: str | Key, columns: tuple[tuple[str, str, bool], ...]) -> Plan:
    """Return the plan of a message, by its full name or its indexes, for columns as of
    `avro.plan`. Raises Incompatible."""
    return Plan(message_of(text, at), columns)


class ProtobufReader:
    """A reader of one stream's values, used by one process. `schemas`: the descriptors by schema
    id, or only those of a file, for values without a schema id. `message`: the full name of the
    type; without it, that of a record's indexes."""

    def __init__(
        self,
        columns: Sequence[Column],
        schemas: Mapping[int, WriterSchema],
        message: str | None = None,
        names_unknown: bool = False,
    ) -> None:
        self._columns = columns_of(columns)
        self._kinds = {name: values.arrow_type(kind) for name, kind, _ in self._columns}
        self._types = {name: kind for name, kind, _ in self._columns}
        self._schemas, self._message, self._names_unknown = schemas, message, names_unknown

    def read(self, batch: pa.RecordBatch) -> Reading:
        """Read `value` of a batch. Bytes of any kind give a reading. Raises UnlistedSchema."""
        errors, unknown = Errors(), dict[int, list[str]]()
        parts: list[tuple[np.ndarray, dict[str, pa.Array]]] = []
        for (id, at), records in self._by_type(batch.column("value"), errors).items():
            try:
                of_type = self._plan(id, at)
            except Incompatible as error:
                for i in records[0]:
                    text = f"schema id {id}: {error}" if id != DESCRIPTOR else str(error)
                    errors.add(i, Errors.WHOLE, "incompatible_schema", text)
                continue
            places, read = _parsed(of_type.parse, *records, errors)
            for i, names, left in of_type.others(read):
                if self._names_unknown:
                    unknown[places[i]] = names
                if left is not None:
                    place, text = list(self._kinds).index(left.name), found(describe(left), _OTHER)
                    errors.add(places[i], place, "wrong_type", f"{left.name}: {text}")
            parts.append((np.array(places, np.int64), self._read(read, of_type, places, errors)))
        columns = {
            name: spread([(places, read[name]) for places, read in parts], kind, len(batch))
            for name, kind in self._kinds.items()
        }
        return Reading(columns, errors, lambda name, i: str(columns[name][i].as_py()), unknown)

    def _by_type(self, value: pa.Array, errors: Errors) -> dict[tuple[int, Key], Records]:
        """Return the encoded messages by schema id and type."""
        if DESCRIPTOR in self._schemas:
            for i in np.flatnonzero(value.is_null()).tolist():
                errors.add(i, Errors.WHOLE, "null_value", found("a message", "a null value"))
            places = np.flatnonzero(value.is_valid())
            return {(DESCRIPTOR, ()): (places.tolist(), value.take(places).to_pylist())}
        payload, ids = split(value, self._schemas, "PROTOBUF", errors)
        # A zero byte is the short form of the first message.
        is_first = pc.fill_null(pc.equal(pc.binary_slice(payload, 0, 1), b"\0"), False)
        others = np.flatnonzero((ids >= 0) & ~(is_first := np.asarray(is_first)))
        messages, by_type = pc.binary_slice(payload, 1, 2**31 - 1), dict[tuple[int, Key], Records]()
        for id in np.unique(ids[(ids >= 0) & is_first]).tolist():
            places = np.flatnonzero((ids == id) & is_first)
            by_type[id, (0,)] = places.tolist(), messages.take(places).to_pylist()
        for i, one in zip(others.tolist(), payload.take(others).to_pylist(), strict=True):
            try:
                key, start = indexes(one)
            except (IndexError, ValueError, Malformed):
                text = found("the indexes of a message", one[:10].hex().upper() or "no bytes")
                errors.add(i, Errors.WHOLE, "malformed_protobuf", f"schema id {ids[i]}: {text}")
                continue
            records = by_type.setdefault((int(ids[i]), key), ([], []))
            records[0].append(i)
            records[1].append(one[start:])
        return by_type

    def _plan(self, id: int, key: Key) -> Plan:
        text = self._schemas[id].text
        if key and self._message is not None:
            name = message_of(text, key).full_name
            if name != self._message:
                raise Incompatible(f"expected message {self._message}, found {name}")
        return plan(text, key or self._message or "", self._columns)

    def _read(
        self, read: Sequence[Any], plan: Plan, places: Sequence[int], errors: Errors
    ) -> dict[str, pa.Array]:
        columns = {}
        for place, (name, kind) in enumerate(self._kinds.items()):
            if (field := plan.fields.get(name)) is None:
                columns[name] = pa.nulls(len(read), kind)
                continue
            columns[name], bad = field.column(read)
            for i, error in bad.items():
                errors.add(places[i], place, *verdict(name, self._types[name], error))
        return columns


def contents_reader(text: str, message: str | None = None) -> Callable[[bytes], list[Any]]:
    """Return a function that reads the values in a message: texts, bytes, numbers and names of an
    enum's values, also of fields that its type does not have. `text`: descriptors (Base64).
    `message`: its full name; without it, the indexes before a message name it. The function raises
    Malformed."""

    def read(payload: bytes) -> list[Any]:
        try:
            at: str | Key = message or (0,)
            if message is None:
                at, start = indexes(payload)
                payload = payload[start:]
            of = message_factory.GetMessageClass(message_of(text, at))
            return list(_contents(of.FromString(payload)))
        except (IndexError, ValueError, Incompatible, DecodeError):
            raise Malformed from None

    return read


def _contents(message: Any) -> Iterator[Any]:
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not _has(message, field.name):
            continue
        value, inner = attrgetter(field.name)(message), field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            yield from value
            of_value = inner.fields_by_name["value"]
            yield from chain.from_iterable(_content(of_value, value[key]) for key in value)
        else:
            every = value if field.is_repeated else [value]
            yield from chain.from_iterable(_content(field, one) for one in every)
    if len(unknown := UnknownFieldSet(message)):
        yield from _unknown(unknown)
        # Bytes that are no message may be one by chance, with a text as a number.
        yield message.SerializeToString()


def _content(field: FieldDescriptor, value: Any) -> Iterator[Any]:
    if field.message_type is not None:
        yield from _contents(value)
    elif field.enum_type is not None:
        yield _Enum(field.enum_type).names.get(value, value)
    else:
        yield value


def _unknown(fields: Any) -> Iterator[Any]:
    """Yield numbers, bytes (texts or messages), and those in groups."""
    for one in fields:
        yield from [one.data] if isinstance(one.data, int | bytes) else _unknown(one.data)


def indexes(payload: bytes) -> tuple[Key, int]:
    """Return the indexes before a message, and its start; a zero byte is the short form of those of
    the first. Raises IndexError, ValueError, Malformed."""
    if payload[:1] == b"\0":
        return (0,), 1
    count, at = read_long(payload, 0)
    # Types are nested at most so deep; a larger count would be read from the message.
    if not 0 < count <= 32:
        raise ValueError
    key = []
    for _ in range(count):
        place, at = read_long(payload, at)
        key.append(place)
    if min(key) < 0:
        raise ValueError
    return tuple(key), at


def _parsed(
    parse: Callable[[bytes], Any], places: list[int], data: list[bytes], errors: Errors
) -> tuple[list[int], list[Any]]:
    """Return the indexes of the records that are messages, and these."""
    try:
        return places, list(map(parse, data))
    except DecodeError:
        good, read = list[int](), list[Any]()
    for i, one in zip(places, data, strict=True):
        try:
            read.append(parse(one))
            good.append(i)
        except DecodeError as error:
            errors.add(i, Errors.WHOLE, *_broken(str(error)))
    return good, read


def _broken(text: str) -> tuple[str, str]:
    if "UTF-8" in text:
        return "invalid_utf8", found("UTF-8", "a string that is not")
    if "MaxDepth" in text:
        return "too_deep", found("at most 100 levels of nesting", "more")
    return "malformed_protobuf", found("one message of its type", "invalid or truncated bytes")


def _left(unknown: Any, numbers: Mapping[int, FieldDescriptor]) -> FieldDescriptor | None:
    """Return a field whose value is encoded as another type, or is none of its enum: the library
    leaves it with the fields that it does not know, as if it were not set."""
    return next((numbers[f.field_number] for f in unknown if f.field_number in numbers), None)


class _Field:
    """How a message's field becomes values of a column. Raises Incompatible, naming its path."""

    def __init__(self, kind: pa.DataType, field: FieldDescriptor, path: str = "") -> None:
        self._kind, self._name, self._get = kind, field.name, attrgetter(field.name)
        self._has_presence = field.has_presence
        # Whether only a value that is empty may be that of a field that is not set.
        self._is_empty_unset = field.message_type is None and not field.default_value
        self._convert = _converter(kind, field, f"{path}.{field.name}" if path else field.name)

    def of(self, message: Any) -> Any:
        """Raises Unreadable."""
        if self._has_presence and not _has(message, self._name):
            return None
        return self._convert(self._get(message))

    def column(self, messages: Sequence[Any]) -> tuple[pa.Array, dict[int, Unreadable]]:
        """Return a column, null where a value is unreadable, and these errors by index."""
        read = list(map(self._get, messages))
        if self._has_presence:
            name, is_empty_unset = self._name, self._is_empty_unset
            read = [
                one if (is_empty_unset and one) or _has(of, name) else None
                for one, of in zip(read, messages, strict=True)
            ]
        if self._convert is same:
            return pa.array(read, self._kind), {}
        if self._convert is list:
            ends = np.cumsum([0, *map(len, read)], dtype=np.int32)
            items = pa.array(list(chain.from_iterable(read)), self._kind.value_type)
            return pa.ListArray.from_arrays(ends, items, self._kind), {}
        if self._convert is _moment and (found := _moments(read)) is not None:
            return found, {}
        if isinstance(self._convert, _Enum):
            names = list(map(self._convert.names.get, read))
            if names.count(None) == read.count(None):
                return pa.array(names, self._kind), {}
        return values.each(read, self._kind, self._convert)


def _converter(kind: pa.DataType, field: FieldDescriptor, path: str) -> _Convert:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        # Two integers may be one FLOAT or DOUBLE.
        if pa.types.is_map(kind) and not pa.types.is_floating(kind.key_type):
            of_key, of_item = (
                _value(of, inner.fields_by_name[part], f"{path}{{}}")
                for of, part in ((kind.key_type, "key"), (kind.item_type, "value"))
            )
            return lambda found: [
                (of_key(key), within(f".{key}", of_item, found[key])) for key in found
            ]
    elif field.is_repeated:
        if pa.types.is_list(kind):
            item = _value(kind.value_type, field, f"{path}[]")
            if item is same:
                return list
            return lambda found: [within(f"[{i}]", item, one) for i, one in enumerate(found)]
    else:
        return _value(kind, field, path)
    raise Incompatible(
        f"{path}: expected a type readable as {values.name_of(kind)}, found {describe(field)}"
    )


def _value(kind: pa.DataType, field: FieldDescriptor, path: str) -> _Convert:
    """Return how one value of a field's type becomes one of a column's."""
    inner = field.message_type
    if inner is not None:
        if inner.full_name in WRAPPERS:
            convert = _value(kind, inner.fields_by_name["value"], path)
            return lambda found: convert(found.value or _known(found).value)
        if inner.full_name in DOCUMENTS and pa.types.is_string(kind):
            return _json
        if inner.full_name == TIMESTAMP and kind == MICROS:
            return _moment
        if inner.full_name == DATE and pa.types.is_date(kind):
            return _day
        if inner.full_name == "confluent.type.Decimal" and pa.types.is_decimal(kind):
            return lambda found: _decimal(found, kind)
        if pa.types.is_struct(kind):
            fields = inner.fields_by_name
            read = {f.name: _Field(f.type, fields[f.name], path) for f in kind if f.name in fields}
            if read:
                return _struct(read, {fields[name].number: fields[name] for name in read})
    elif field.enum_type is not None and pa.types.is_string(kind):
        return _Enum(field.enum_type)
    elif pa.types.is_decimal(kind) and field.type in _INTEGERS:
        return lambda found: values.fitted(Decimal(found), kind, str(found))
    elif field.type in (of_kind := _SCALARS.get(kind, {})):
        convert = of_kind[field.type]
        return same if convert is _string and _is_proto3(field) else convert
    raise Incompatible(
        f"{path}: expected a type readable as {values.name_of(kind)}, found {describe(field)}"
    )


def _struct(fields: Mapping[str, _Field], numbers: Mapping[int, FieldDescriptor]) -> _Convert:
    def struct(message: Any) -> dict[str, Any]:
        if (left := _left(UnknownFieldSet(message), numbers)) is not None:
            raise Unreadable(describe(left), _OTHER, f".{left.name}")
        return {name: within(f".{name}", field.of, message) for name, field in fields.items()}

    return struct


def _string(value: str | bytes) -> str:
    # The library gives the bytes of a string that is not UTF-8, which proto2 allows.
    return value if isinstance(value, str) else text_of(value)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _signed(value: int) -> int:
    if value < 2**63:
        return value
    raise Unreadable("bigint", str(value))


class _Enum:
    def __init__(self, enum: Any) -> None:
        # Of several names of a number, the first is its name in Protobuf's JSON.
        self.names: dict[int, str] = {one.number: one.name for one in reversed(enum.values)}
        self._enum = enum.name

    def __call__(self, number: int) -> str:
        if (name := self.names.get(number)) is not None:
            return name
        raise Unreadable(f"a value of enum {self._enum}", str(number))


def _known(message: Any) -> Any:
    """Return a message. Raises Unreadable if one of its fields has a value of another type, as if
    it were not set."""
    fields = message.DESCRIPTOR.fields_by_number
    if (left := _left(UnknownFieldSet(message), fields)) is not None:
        raise Unreadable(describe(left), _OTHER, f".{left.name}")
    return message


def _json(of: Any) -> str:
    size = of.ByteSize()
    of.DiscardUnknownFields()
    if of.ByteSize() != size:
        raise Unreadable("JSON", _OTHER)
    try:
        # A message's map has no order.
        text: str = json_format.MessageToJson(of, indent=None, sort_keys=True, ensure_ascii=False)
    except (json_format.Error, ValueError) as error:
        raise Unreadable("JSON", str(error)) from None
    return text


def _moment(at: Any) -> int:
    if not (at.seconds and at.nanos):
        _known(at)
    micros: int = at.seconds * 1_000_000 + at.nanos // 1_000
    if 0 <= at.nanos < 1_000_000_000 and FIRST_MICROS <= micros <= LAST_MICROS:
        return micros
    raise Unreadable("timestamp", f"{at.seconds} seconds and {at.nanos} nanoseconds")


def _decimal(of: Any, kind: pa.Decimal128Type) -> Decimal:
    _known(of)
    if abs(of.scale) > 1_000:
        raise Unreadable(values.name_of(kind), f"a number of scale {of.scale}")
    return values.unscaled(of.value, of.scale, kind)


def _day(of: Any) -> date:
    try:
        return date(of.year, of.month, of.day)
    except ValueError:
        raise Unreadable("date", f"{of.year}-{of.month}-{of.day}") from None


def _moments(read: Sequence[Any]) -> pa.Array | None:
    """Return messages of Timestamp as times; None if one is none."""
    given = [_NO_MOMENT if at is None else at for at in read]
    seconds, nanos = (
        np.array(list(map(attrgetter(part), given)), np.int64) for part in ("seconds", "nanos")
    )
    is_in = (seconds >= FIRST_MICROS // 1_000_000) & (seconds <= LAST_MICROS // 1_000_000)
    if not np.all(is_in & (nanos >= 0) & (nanos < 1_000_000_000)):
        return None
    # A value of another type is read as 0.
    if any(len(UnknownFieldSet(given[i])) for i in np.flatnonzero((seconds == 0) | (nanos == 0))):
        return None
    is_null = np.array([at is None for at in read], bool)
    return pa.array(seconds * 1_000_000 + nanos // 1_000, mask=is_null).cast(MICROS)


# How a column's type is read from those of Protobuf.
_SCALARS: dict[pa.DataType, dict[int, _Convert]] = {
    pa.string(): {F.TYPE_STRING: _string, F.TYPE_BYTES: text_of},
    pa.binary(): {F.TYPE_STRING: _bytes, F.TYPE_BYTES: same},
    pa.bool_(): {F.TYPE_BOOL: same},
    pa.int32(): dict.fromkeys((*INT32, F.TYPE_ENUM), same),
    pa.int64(): dict.fromkeys((*INT32, *INT64, F.TYPE_ENUM), same) | dict.fromkeys(UINT64, _signed),
    pa.float32(): {**dict.fromkeys(_INTEGERS, float), F.TYPE_FLOAT: same},
    pa.float64(): {**dict.fromkeys(_INTEGERS, float), F.TYPE_FLOAT: same, F.TYPE_DOUBLE: same},
}


def _is_proto3(field: FieldDescriptor) -> bool:
    """Return whether the library refuses messages with strings that are not UTF-8."""
    file = descriptor_pb2.FileDescriptorProto()
    field.file.CopyToProto(file)
    return bool(file.syntax == "proto3")


def describe(field: FieldDescriptor) -> str:
    """Return a field's type in words, for a message."""
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        return f"map of {describe(inner.fields_by_name['value'])}"
    kind = descriptor_pb2.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    named = inner or field.enum_type
    return f"{'repeated ' * field.is_repeated}{named.full_name if named is not None else kind}"
