"""JSON: one object a record; its fields are the stream's columns, by exact name.

- STRING takes a text, and any other JSON value as its text as sent. Other types take values of
  their own JSON type only (`anabranch.decode.values` has the texts of times, numbers and bytes; a
  DECIMAL may be in quotes): a number in quotes, `3.5` for INT or `1e999` for DOUBLE is
  `wrong_type`.
- A name that an object repeats counts once, at every level: the last one.
- Values are read by a typed decoder of msgspec, in one pass. A record that it refuses is read again
  field by field (`_Fields`), for its values or for the reason. Both read a field with the same
  types, so that no value depends on the way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, TypedDict

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET, Meta, Raw

from anabranch.decode import values
from anabranch.decode.reading import Errors, Reading, found
from anabranch.decode.values import MICROS, Unreadable
from anabranch.decode.wire import WriterSchema, split

MAX_DEPTH = 100
"""Maximum nesting of objects and arrays; deeper is `too_deep`."""

MOST_LEARNED = 64
"""Maximum fields without a column that the typed decoder reads by name."""

_MALFORMED = (
    "expected one JSON object, found text that is not JSON, is cut off, or goes on after the object"
)
_OTHER_THAN_OBJECT = re.compile(rb"\s*(\[|\"|-?[0-9]|true\b|false\b|null\b)")
_NOT_A_TIME = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|[\[{].*", re.DOTALL)
# The escape of a UTF-16 surrogate without its partner, after an even number of backslashes.
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*+(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F])"
)
_TEXT_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_WRONG = re.compile(
    r"Expected `([^`|]+?)(?: \| null)?`(?:, got `(.+?)`| [<>]= .*?)?(?: - at `\$(.*)`)?$"
)
# msgspec takes no other names of fields.
_CAN_BE_LEARNED = re.compile(r'[^"\\\x00-\x1f]*')

# msgspec refuses a value of another type, a number out of range, or bytes that are not UTF-8.
_REFUSED = (msgspec.MsgspecError, UnicodeDecodeError)


class JsonReader:
    """A reader of one stream's values, used by one process. `names_unknown`: list the fields
    without a column; `rescues`: also keep them as JSON. `schemas`: for payloads of Confluent's wire
    format, the registry's schemas by id; objects are not validated against them, as Confluent's
    deserializers do not by default."""

    def __init__(
        self,
        columns: Mapping[str, str],
        names_unknown: bool = False,
        rescues: bool = False,
        schemas: Mapping[int, WriterSchema] | None = None,
    ) -> None:
        self._schemas = schemas
        self._types = dict(columns)
        self._kinds = {name: values.arrow_type(kind) for name, kind in columns.items()}
        self._names_unknown, self._rescues = names_unknown or rescues, rescues
        self._fields = _Fields(self._kinds)
        # What records have taught: STRING columns with other values than texts, and fields without
        # a column.
        self._any_value: set[str] = set()
        self._learned: list[str] = []
        self._build()

    def _build(self) -> None:
        self._attributes = {name: f"c{i}" for i, name in enumerate([*self._kinds, *self._learned])}
        fields: list[tuple[str, Any, Any]] = [
            (
                self._attributes[name],
                Raw | None if name in self._any_value else _wire(kind) | None,
                None,
            )
            for name, kind in self._kinds.items()
        ]
        fields += [(self._attributes[name], Raw, UNSET) for name in self._learned]
        self._record = msgspec.defstruct(
            "Record",
            fields,
            rename={attribute: name for name, attribute in self._attributes.items()},
            forbid_unknown_fields=self._names_unknown,
            gc=False,
        )
        self._decoder = msgspec.json.Decoder(self._record)

    def read(self, batch: pa.RecordBatch) -> Reading:
        """Read `value` of a batch. Bytes of any kind give a reading. Raises UnlistedSchema."""
        errors, value = Errors(), batch.column("value")
        if self._schemas is not None:
            value, _ = split(value, self._schemas, "JSON", errors)
        data = value.to_pylist()
        for i, code, text in _unreadable(value, data):
            errors.add(i, Errors.WHOLE, code, text)
        rows, unknown = self._rows(data, errors)
        columns: dict[str, pa.Array] = {}
        for place, (name, kind) in enumerate(self._kinds.items()):
            raw = list(map(attrgetter(self._attributes[name]), rows))
            if name in self._any_value:
                raw = [_text(one) if type(one) is Raw else one for one in raw]
            columns[name], bad = _column(raw, kind)
            for i, error in bad.items():
                errors.add(i, place, *self._verdict(name, kind, error))
        return Reading(
            columns,
            errors,
            lambda name, i: str(getattr(rows[i], self._attributes[name])),
            {i: sorted(fields) for i, fields in unknown.items()},
            {i: _object(fields) for i, fields in unknown.items()} if self._rescues else {},
        )

    def _rows(
        self, data: Sequence[bytes | None], errors: Errors
    ) -> tuple[list[Any], dict[int, dict[str, Raw]]]:
        """Return a record for each value, and its fields without a column."""
        while True:
            nothing = self._record()
            decode, rows, refused = self._decoder.decode, list[Any](), list[int]()
            for i, one in enumerate(data):
                try:
                    rows.append(decode(one))  # type: ignore[arg-type]
                except (*_REFUSED, TypeError, RecursionError):
                    rows.append(nothing)
                    refused.append(i)
            unknown: dict[int, dict[str, Raw]] = {}
            for i, one in enumerate(rows) if self._learned else ():
                of_record = {
                    n: raw
                    for n in self._learned
                    if (raw := getattr(one, self._attributes[n])) is not UNSET
                }
                if of_record:
                    unknown[i] = of_record
            if not self._read_again(data, refused, rows, unknown, errors):
                return rows, unknown

    def _read_again(
        self,
        data: Sequence[bytes | None],
        refused: Sequence[int],
        rows: list[Any],
        unknown: dict[int, dict[str, Raw]],
        errors: Errors,
    ) -> bool:
        """Read the refused records field by field. Return True if a record taught what lets the
        typed decoder read it; then nothing else was done."""
        for i in refused:
            if errors.is_whole(i):
                continue
            one = data[i]
            assert one is not None
            try:
                fields = _OBJECT.decode(one)
            except _REFUSED as error:
                errors.add(i, Errors.WHOLE, *_broken(one, error))
                continue
            others = {n: fields[n] for n in fields.keys() - self._kinds.keys()}
            read, bad, any_value = self._fields.read(fields)
            if not bad and self._learn(others, any_value):
                return True
            rows[i] = self._record(**{self._attributes[name]: v for name, v in read.items()})
            if others and self._names_unknown:
                unknown[i] = others
            for name, why in bad.items():
                place = list(self._kinds).index(name)
                errors.add(i, place, *self._verdict(name, self._kinds[name], why))
        return False

    def _learn(self, others: Mapping[str, Raw], any_value: set[str]) -> bool:
        new = sorted(others.keys() - set(self._learned)) if self._names_unknown else []
        if len(self._learned) + len(new) > MOST_LEARNED or not all(
            map(_CAN_BE_LEARNED.fullmatch, new)
        ):
            new = []
        if not new and any_value <= self._any_value:
            return False
        self._learned += new
        self._any_value |= any_value
        self._build()
        return True

    def _verdict(self, name: str, kind: pa.DataType, error: Unreadable) -> tuple[str, str]:
        expected = error.expected if error.path else self._types[name]
        is_time = (kind == MICROS or pa.types.is_date(kind)) and not _NOT_A_TIME.fullmatch(
            error.found
        )
        code = "unreadable_timestamp" if is_time else "wrong_type"
        return code, f"{name}{error.path}: {found(expected, error.found)}"


def _unreadable(value: pa.Array, data: Sequence[bytes | None]) -> Iterator[tuple[int, str, str]]:
    """Yield the records that are no JSON text whatever their fields: index, code and text."""
    for i in pc.indices_nonzero(value.is_null()).to_pylist() if value.null_count else ():
        yield i, "null_value", found("a JSON object", "a null value")
    for i in values.texts(value)[1]:
        yield i, "invalid_utf8", found("UTF-8", "bytes that are not")
    whole = _bytes(value)
    # Each record has a bracket of its own: with few more, none has too many levels.
    if whole.count(b"[") + whole.count(b"{") >= len(value) + MAX_DEPTH:
        for i, one in enumerate(data):
            if (
                one is not None
                and one.count(b"[") + one.count(b"{") > MAX_DEPTH
                and _depth(one) > MAX_DEPTH
            ):
                if _OTHER_THAN_OBJECT.match(one):
                    yield i, "not_an_object", found("a JSON object", one.decode(errors="replace"))
                yield i, "too_deep", found(f"at most {MAX_DEPTH} levels of nesting", "more")
    if b"\\ud" in whole or b"\\uD" in whole:
        for i, one in enumerate(data):
            if one is not None and _LONE_SURROGATE.search(one):
                yield (
                    i,
                    "lone_surrogate",
                    found("Unicode text", "the escape of a surrogate without its partner"),
                )


def _broken(one: bytes, error: Exception) -> tuple[str, str]:
    """Return the verdict on a value that is not one JSON object."""
    if not one.strip(b" \t\r\n"):
        return "empty_value", found("a JSON object", "no text")
    if _OTHER_THAN_OBJECT.match(one):
        return "not_an_object", found("a JSON object", one.decode(errors="replace"))
    return "malformed_json", f"{_MALFORMED} ({error})"


def _depth(one: bytes) -> int:
    depth = most = 0
    for token in _TEXT_OR_BRACKET.finditer(one):
        first = token[0][0]
        depth += (first in b"[{") - (first in b"]}")
        most = max(most, depth)
        if most > MAX_DEPTH:
            break
    return most


def _wire(kind: pa.DataType, text: Any = str) -> Any:
    """Return the type with which msgspec reads a column: times as text, DECIMAL as its bytes.
    `text`: the type for STRING."""
    if pa.types.is_string(kind):
        return text
    if kind == MICROS or pa.types.is_date(kind):
        return str
    if pa.types.is_integer(kind):
        half = 2 ** (kind.bit_width - 1)
        return Annotated[int, Meta(ge=-half, le=half - 1)]
    if pa.types.is_floating(kind):
        return float
    if pa.types.is_boolean(kind):
        return bool
    if pa.types.is_binary(kind):
        return bytes
    if pa.types.is_decimal(kind):
        return Raw
    if pa.types.is_list(kind):
        item = _or_null(_wire(kind.value_type, text))
        return list[item]  # type: ignore[valid-type]
    if pa.types.is_map(kind):
        key, item = _wire(kind.key_type), _or_null(_wire(kind.item_type, text))
        return dict[key, item]  # type: ignore[valid-type]
    fields = {f.name: _or_null(_wire(f.type, text)) for f in kind}
    return TypedDict("Struct", fields, total=False)  # type: ignore[operator]


def _or_null(kind: Any) -> Any:
    # Raw takes null itself.
    return kind if kind is Raw else kind | None


def _text(raw: Raw) -> str | None:
    """Return a JSON value as a STRING: a text's characters, any other value as it was sent."""
    sent = bytes(raw)
    if sent == b"null":
        return None
    return msgspec.json.decode(sent, type=str) if sent.startswith(b'"') else sent.decode()


def _decimal(kind: pa.DataType, raw: Raw) -> Any:
    text = _text(raw)
    return None if text is None else values.decimal(text, kind)


def _converter(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return how a value that msgspec read becomes one of Arrow; None if it is one."""
    if pa.types.is_decimal(kind):
        return partial(_decimal, kind)
    if kind == MICROS:
        return values.timestamp
    if pa.types.is_date(kind):
        return values.day
    if pa.types.is_float32(kind):
        return values.float32
    if pa.types.is_list(kind) and (of_item := _converter(kind.value_type)) is not None:
        return partial(_items, of_item)
    if pa.types.is_map(kind) and (of_item := _converter(kind.item_type)) is not None:
        return partial(_members, {}, of_item)
    if pa.types.is_struct(kind):
        of_fields = {f.name: one for f in kind if (one := _converter(f.type)) is not None}
        return partial(_members, of_fields, None) if of_fields else None
    return None


def _items(convert: Callable[[Any], Any], read: Sequence[Any]) -> list[Any]:
    return [_at(f"[{i}]", convert, one) for i, one in enumerate(read)]


def _members(
    by_name: Mapping[str, Callable[[Any], Any]],
    default: Callable[[Any], Any] | None,
    read: Mapping[str, Any],
) -> dict[str, Any]:
    converted = dict(read)
    for name, one in read.items():
        if (convert := by_name.get(name, default)) is not None:
            converted[name] = _at(f".{name}", convert, one)
    return converted


def _at(step: str, convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return None if value is None else convert(value)
    except Unreadable as error:
        raise error.inside(step) from None


def _column(raw: Sequence[Any], kind: pa.DataType) -> tuple[pa.Array, dict[int, Unreadable]]:
    """Return a column of values that msgspec read, null where one is unreadable, and why."""
    if kind == MICROS or pa.types.is_date(kind):
        texts = pa.array(raw, pa.string())
        read, bad = values.moments(texts, kind)
        return read, {i: Unreadable(str(kind), raw[i]) for i in bad}
    if (convert := _converter(kind)) is not None:
        return values.each(raw, kind, convert)
    return pa.array(raw, kind), {}


class _Fields:
    """The reader of single fields: of records that the typed decoder refuses."""

    def __init__(self, kinds: Mapping[str, pa.DataType]) -> None:
        self._kinds = kinds
        self._decoders = {
            name: msgspec.json.Decoder(_or_null(_wire(kind, Raw))) for name, kind in kinds.items()
        }

    def read(
        self, fields: Mapping[str, Raw]
    ) -> tuple[dict[str, Any], dict[str, Unreadable], set[str]]:
        """Return the values of the columns as the typed decoder reads them, the errors of those
        that are not of their type, and the STRING columns that have another value than a text."""
        read: dict[str, Any] = {}
        bad: dict[str, Unreadable] = {}
        any_value = set()
        for name, kind in self._kinds.items():
            if (raw := fields.get(name)) is None:
                continue
            try:
                read[name] = _as_texts(self._decoders[name].decode(raw), kind)
            except (*_REFUSED, RecursionError) as error:
                bad[name] = _why(str(error), raw)
                continue
            if pa.types.is_string(kind) and bytes(raw)[:1] not in (b'"', b"n"):
                any_value.add(name)
        return read, bad, any_value


def _as_texts(value: Any, kind: pa.DataType) -> Any:
    """Return a value whose texts were read as bytes with texts."""
    if value is None:
        return None
    if pa.types.is_string(kind):
        return _text(value)
    if pa.types.is_list(kind):
        return [_as_texts(one, kind.value_type) for one in value]
    if pa.types.is_map(kind):
        return {key: _as_texts(one, kind.item_type) for key, one in value.items()}
    if pa.types.is_struct(kind):
        return {name: _as_texts(one, kind.field(name).type) for name, one in value.items()}
    return value


def _why(refusal: str, raw: Raw) -> Unreadable:
    """Return the error of a value that msgspec refused, with the path in it."""
    match = _WRONG.search(refusal)
    if match is None or not match[3]:
        sent = bytes(raw)
        text = sent.decode(errors="replace")
        if sent.startswith(b'"'):
            text = msgspec.json.decode(sent, type=str)
        return Unreadable(match[1] if match else "another value", text)
    return Unreadable(match[1], match[2] or "a number out of range", match[3])


def _object(fields: Mapping[str, Raw]) -> str:
    """Return fields as a JSON object, in the order of their names, with their values as sent."""
    members = (
        f"{msgspec.json.encode(n).decode()}:{bytes(fields[n]).decode()}" for n in sorted(fields)
    )
    return "{" + ",".join(members) + "}"


def _bytes(value: pa.Array) -> bytes:
    """Return the concatenated bytes of all values."""
    _, offsets, data = value.buffers()
    if data is None or not len(value):
        return b""
    places = memoryview(offsets).cast("i")
    start, end = places[value.offset], places[value.offset + len(value)]
    return bytes(memoryview(data)[start:end])


_OBJECT = msgspec.json.Decoder(dict[str, Raw])
