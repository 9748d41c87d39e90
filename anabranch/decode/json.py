"""JSON: one object a record; its fields are the stream's columns, by exact name or path.

- STRING takes a text, and any other JSON value as its text as sent. Other types take values of
  their own JSON type only (`anabranch.decode.values` has the texts of times, numbers and bytes; a
  DECIMAL may be in quotes): a number in quotes, `3.5` for INT or `1e999` for DOUBLE is
  `wrong_type`.
- A byte order mark before the object is ignored (RFC 8259, section 8.1).
- A name that an object repeats counts once, at every level: the last one.
- A column's path leads through objects. Where one is missing or null, so is the column.
- Values are read by a typed decoder of msgspec, in one pass. A record that it refuses is read again
  field by field (`_Fields`), for its values or for the reason. Both read a field with the same
  types, so that no value depends on the way.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET, Meta, Raw

from anabranch.common.arrays import grouped
from anabranch.config.columns import Column, Notation
from anabranch.decode import notations, values
from anabranch.decode.field_tree import (
    REFUSED,
    Node,
    Others,
    as_json,
    names_below,
    object_type,
    tree_of,
    unread_part,
)
from anabranch.decode.inputs import WriterSchema, split
from anabranch.decode.values import MICROS, Errors, Reading, Unreadable, found

MAX_DEPTH = 100
"""Maximum nesting of objects and arrays; deeper is `too_deep`."""

MOST_LEARNED = 64
"""Maximum fields without a column that the typed decoder reads by name."""

_MALFORMED = (
    "expected one JSON object, found text that is not JSON, is cut off, or goes on after the object"
)
_OTHER_THAN_OBJECT = re.compile(rb"\s*(\[|\"|-?[0-9]|true\b|false\b|null\b)")
_NOT_A_TIME = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|[\[{].*", re.DOTALL)
_NOT_A_NUMBER = re.compile(r"true|false|[\[{].*", re.DOTALL)
_FRACTION = re.compile(rb"-?[0-9]+[.eE][0-9.eE+-]*")
# The escape of a UTF-16 surrogate without its partner, after an even number of backslashes.
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*+(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F])"
)
# A text without an end is one token, so that no text is scanned repeatedly.
_TEXT_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)
_WRONG = re.compile(
    r"Expected `([^`|]+?)(?: \| null)?`(?:, got `(.+?)`| [<>]= .*?)?(?: - at `\$(.*)`)?$"
)
_NO_NUMBER = re.compile(rb"-?(?:NaN|Infinity|nan|inf)\b")
# msgspec takes no other names of fields.
_CAN_BE_LEARNED = re.compile(r'[^"\\\x00-\x1f]*')

Unknown = dict[str, Raw | None]
"""A record's fields without a column by name: the value of one of the record's own fields, None for
a field inside others."""

_AN_OBJECT = "an object"
_PART = 65_536
_DIGITS = frozenset(b"%c" % one for one in b"-0123456789")


class JsonReader:
    """A reader of one stream's values, used by one process. `names_unknown`: list the fields
    without a column; `rescues`: also keep them as JSON. `schemas`: for payloads of Confluent's wire
    format, the registry's schemas by id; objects are not validated against them, as Confluent's
    deserializers do not by default."""

    def __init__(
        self,
        columns: Sequence[Column],
        names_unknown: bool = False,
        rescues: bool = False,
        schemas: Mapping[int, WriterSchema] | None = None,
    ) -> None:
        self._schemas = schemas
        self._columns = {column.name: column for column in columns}
        self._kinds = {column.name: values.arrow_type(column.type) for column in columns}
        self._tops = grouped(columns, lambda column: column.field[0])
        self._root = tree_of(columns) if names_unknown or rescues else None
        self._rescues = rescues
        self._fields = _Fields(columns, self._kinds)
        # What records have taught: STRING columns with other values than texts, and the number of
        # fields without a column.
        self._any_value: set[str] = set()
        self._learned = 0
        self._build()

    def _build(self) -> None:
        # The attributes that lead to the value of a column that shares its field with no other.
        self._ways: dict[str, tuple[str, ...]] = {}
        types = dict[str, Any]()
        for i, (top, of_top) in enumerate(self._tops.items()):
            node = _below(self._root, top)
            if _share(of_top):
                types[top] = Raw
                if node is not None:
                    for _, one in [("", node), *node.every()]:
                        if one is not None:
                            one.is_raw = True
            else:
                types[top] = self._type(of_top, (f"c{i}",), node)
        self._record = object_type(types, self._root)
        self._decoder = msgspec.json.Decoder(self._record)

    def _type(self, columns: Sequence[Column], way: tuple[str, ...], node: Node | None) -> Any:
        """Return the type of the field at the end of `way`, which is a column or has columns."""
        column, depth = columns[0], len(way)
        if len(column.field) == depth:
            self._ways[column.name] = way
            any_value = column.name in self._any_value
            kind = self._kinds[column.name]
            if any_value:
                return Raw
            if notations.has_unit(kind, column.notation):
                return int | str | None
            return _or_null(_wire(kind, column.notation, node=node))
        below = grouped(columns, lambda column: column.field[depth])
        types = {
            name: self._type(of_field, (*way, f"c{i}"), _below(node, name))
            for i, (name, of_field) in enumerate(below.items())
        }
        return object_type(types, node) | None

    def read(self, batch: pa.RecordBatch) -> Reading:
        """Read `value` of a batch. Bytes of any kind give a reading. Raises UnlistedSchema."""
        errors, value = Errors(), batch.column("value")
        if self._schemas is not None:
            value, _ = split(value, self._schemas, "JSON", errors)
        data = value.to_pylist()
        for i, code, text in _unreadable(value, data):
            errors.add(i, Errors.WHOLE, code, text)
        rows, one_by_one, unknown = self._rows(data, errors)
        read = self._values(rows, one_by_one, errors)
        columns: dict[str, pa.Array] = {}
        for place, (name, kind) in enumerate(self._kinds.items()):
            columns[name], bad = _column(read[name], kind, self._columns[name].notation)
            for i, error in bad.items():
                errors.add(i, place, *self._verdict(name, error))
        return Reading(
            columns,
            errors,
            lambda name, i: _shown(read[name][i]),
            {i: sorted(fields) for i, fields in unknown.items()},
            {i: self._left(data[i], fields) for i, fields in unknown.items()}
            if self._rescues
            else {},
        )

    def _left(self, one: bytes | None, fields: Unknown) -> str:
        """Return a record's fields without a column as JSON."""
        if None not in fields.values():
            return as_json(fields)
        assert self._root is not None and one is not None
        return as_json(unread_part(one.removeprefix(BOM_UTF8), self._root, {}))

    def _values(
        self, rows: Sequence[Any], one_by_one: Mapping[int, Mapping[str, Any]], errors: Errors
    ) -> dict[str, list[Any]]:
        """Return the values of each column, as msgspec read them."""
        read: dict[str, list[Any]] = {}
        # The objects on the columns' ways.
        known: dict[tuple[str, ...], Sequence[Any]] = {(): rows}
        for name, way in self._ways.items():
            for depth in range(1, len(way)):
                if way[:depth] not in known:
                    known[way[:depth]] = _each(known[way[: depth - 1]], way[depth - 1])
            objects = known[way[:-1]]
            raw = list(map(attrgetter(way[0]), rows)) if len(way) == 1 else _each(objects, way[-1])
            if name in self._any_value:
                raw = [_text(one) if type(one) is Raw else one for one in raw]
            read[name] = raw
        for at, (top, columns) in enumerate(self._tops.items()):
            if columns[0].name not in self._ways:
                for column in columns:
                    read[column.name] = [None] * len(rows)
                for i, raw_top in enumerate(map(attrgetter(f"c{at}"), rows)):
                    if raw_top is not None:
                        found_here, bad, _ = self._fields.read({top: raw_top}, columns)
                        for name, one in found_here.items():
                            read[name][i] = one
                        self._refuse(i, bad, errors)
        for i, of_record in one_by_one.items():
            for name, column_values in read.items():
                column_values[i] = of_record.get(name)
        return read

    def _rows(
        self, data: Sequence[bytes | None], errors: Errors
    ) -> tuple[list[Any], dict[int, dict[str, Any]], dict[int, Unknown]]:
        """Return each value's record, the columns read field by field, and fields without one."""
        while True:
            nothing = self._record()
            decode, rows, refused = self._decoder.decode, list[Any](), list[int]()
            for i, one in enumerate(data):
                try:
                    rows.append(decode(one))  # type: ignore[arg-type]
                except (*REFUSED, TypeError):
                    rows.append(nothing)
                    refused.append(i)
            unknown: dict[int, Unknown] = {}
            if self._root is not None:
                for n, name in enumerate(self._root.others):
                    for i, raw in enumerate(map(attrgetter(f"u{n}"), rows)):
                        if raw is not UNSET:
                            unknown.setdefault(i, {})[name] = raw
                for name, records in names_below(self._root, range(len(rows)), rows):
                    for i in records:
                        unknown.setdefault(i, {})[name] = None
            one_by_one = self._read_again(data, refused, unknown, errors)
            if one_by_one is not None:
                return rows, one_by_one, unknown

    def _read_again(
        self,
        data: Sequence[bytes | None],
        refused: Sequence[int],
        unknown: dict[int, Unknown],
        errors: Errors,
    ) -> dict[int, dict[str, Any]] | None:
        """Read the refused records field by field. Return None if a record taught what lets the
        typed decoder read it; then nothing else was done."""
        one_by_one = {}
        for i in refused:
            if errors.is_whole(i):
                continue
            one = data[i]
            assert one is not None
            one = one.removeprefix(BOM_UTF8)
            try:
                fields = _OBJECT.decode(one)
            except REFUSED as error:
                errors.add(i, Errors.WHOLE, *_broken(one, error))
                continue
            others = Others()
            if self._root is not None:
                unread_part(one, self._root, others)
            read, bad, any_value = self._fields.read(fields, self._columns.values())
            if not bad and self._learn(others, any_value):
                return None
            one_by_one[i] = read
            if others:
                # A field's name may be the path of another one, whose None counts (`_left`).
                own_first = sorted(others.items(), key=lambda one: one[0][0] is not self._root)
                unknown[i] = {
                    node.name_of(name): raw if node is self._root else None
                    for (node, name), raw in own_first
                }
            self._refuse(i, bad, errors)
        return one_by_one

    def _refuse(self, i: int, bad: Mapping[str, Unreadable], errors: Errors) -> None:
        for name, why in bad.items():
            errors.add(i, list(self._columns).index(name), *self._verdict(name, why))

    def _learn(self, others: Others, any_value: set[str]) -> bool:
        new = [(node, name) for node, name in others if not node.is_raw and name not in node.others]
        if self._learned + len(new) > MOST_LEARNED or not all(
            _CAN_BE_LEARNED.fullmatch(name) for _, name in new
        ):
            new = []
        if not new and any_value <= self._any_value:
            return False
        for node, name in new:
            node.others.append(name)
        self._learned += len(new)
        self._any_value |= any_value
        self._build()
        return True

    def _verdict(self, name: str, error: Unreadable) -> tuple[str, str]:
        column, kind = self._columns[name], self._kinds[name]
        expected = error.expected if error.path else notations.words(column.type, column.notation)
        other = _NOT_A_NUMBER if notations.has_unit(kind, column.notation) else _NOT_A_TIME
        is_time = (
            (kind == MICROS or pa.types.is_date(kind))
            and error.expected != _AN_OBJECT
            and not other.fullmatch(error.found)
        )
        code = "unreadable_timestamp" if is_time else "wrong_type"
        return code, f"{name}{error.path}: {found(expected, error.found)}"


def _share(columns: Sequence[Column]) -> bool:
    """Return whether a column's field is that of another one, or contains it."""
    paths = [column.field for column in columns]
    return any(a == b[: len(a)] for i, a in enumerate(paths) for j, b in enumerate(paths) if i != j)


def _each(objects: Sequence[Any], attribute: str) -> list[Any]:
    get = attrgetter(attribute)
    return [None if one is None else get(one) for one in objects]


def _unreadable(value: pa.Array, data: Sequence[bytes | None]) -> Iterator[tuple[int, str, str]]:
    """Yield the records that are no JSON text whatever their fields: index, code and text."""
    for i in pc.indices_nonzero(value.is_null()).to_pylist() if value.null_count else ():
        yield i, "null_value", found("a JSON object", "a null value")
    for i in values.texts(value)[1]:
        yield i, "invalid_utf8", found("UTF-8", "bytes that are not")
    many_brackets, has_escapes = _brackets_and_escapes(value)
    for i in many_brackets:
        if _depth(deep := data[i] or b"") > MAX_DEPTH:
            if _OTHER_THAN_OBJECT.match(deep):
                yield i, "not_an_object", found("a JSON object", deep.decode(errors="replace"))
            yield i, "too_deep", found(f"at most {MAX_DEPTH} levels of nesting", "more")
    if has_escapes:
        for i, one in enumerate(data):
            if one is None or not (b"\\ud" in one or b"\\uD" in one):
                continue
            if _LONE_SURROGATE.search(one):
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
    # Python, JavaScript and C write these; most readers refuse them.
    if (at := re.search(r"byte ([0-9]+)", str(error))) is not None:
        number = _NO_NUMBER.search(one, max(0, int(at[1]) - 1))
        if number is not None and number.start() <= int(at[1]):
            text = found("one JSON object, which has no such numbers", number[0].decode())
            return "malformed_json", f"{text} ({error})"
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


def _below(node: Node | None, name: str) -> Node | None:
    return node.fields[name] if node is not None else None


def _wire(kind: pa.DataType, notation: Notation, text: Any = str, node: Node | None = None) -> Any:
    """Return the type with which msgspec reads a column: times as text, DECIMAL as its bytes, and
    so other numbers and times that may be numbers or text. `text`: the type for STRING. `node`: of
    the column, where objects with other fields are refused."""
    if pa.types.is_string(kind):
        return text
    if notations.has_unit(kind, notation):
        return Raw
    if notation.decimal and notations.is_number(kind):
        return Raw
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
        item = _or_null(_wire(kind.value_type, notation, text, node and node.items))
        return list[item]  # type: ignore[valid-type]
    if pa.types.is_map(kind):
        is_real = pa.types.is_floating(kind.key_type)
        # msgspec reads `nan` in a name as a number.
        key = str if is_real else _wire(kind.key_type, Notation())
        item = _or_null(_wire(kind.item_type, notation, text, node and node.items))
        return dict[key, item]  # type: ignore[valid-type]
    types = {f.name: _or_null(_wire(f.type, notation, text, _below(node, f.name))) for f in kind}
    return object_type(types, node)


def _or_null(kind: Any) -> Any:
    # Raw takes null itself. In a union msgspec refuses what only it takes.
    return kind if kind is Raw else kind | None


def _text(raw: Raw) -> str | None:
    """Return a JSON value as a STRING: a text's characters, any other value as it was sent."""
    sent = bytes(raw)
    if sent == b"null":
        return None
    try:
        return msgspec.json.decode(sent, type=str) if sent.startswith(b'"') else sent.decode()
    except REFUSED:
        # A record with an error as a whole: msgspec does not look at the characters of Raw.
        return sent.decode(errors="replace")


def _scalar(raw: Any) -> tuple[str | None, bool]:
    """Return a number or text, and whether it is a text. Raises Unreadable."""
    if type(raw) is not Raw:
        return str(raw), type(raw) is str
    text = _text(raw)
    if text is not None and bytes(raw)[:1] not in b'"-0123456789':
        raise Unreadable("", text)
    return text, bytes(raw).startswith(b'"')


def _number(kind: pa.DataType, notation: Notation, raw: Raw) -> Any:
    try:
        if (sent := bytes(raw))[:1] in _DIGITS and notation.decimal != "base64":
            return values.number(sent.decode(), kind)
        text, is_text = _scalar(raw)
        if text is None:
            return None
        if notation.decimal == "base64" and not is_text and pa.types.is_decimal(kind):
            raise Unreadable("", text)
        return notations.number(text, kind, notation) if is_text else values.number(text, kind)
    except Unreadable as error:
        raise Unreadable(notations.words(values.name_of(kind), notation), error.found) from None


def _column(
    raw: Sequence[Any], kind: pa.DataType, notation: Notation
) -> tuple[pa.Array, dict[int, Unreadable]]:
    """Return a column of values of msgspec, null where one is unreadable, and why. Nested values
    are built from columns of their parts: objects for parts would take longest."""
    if kind == MICROS or pa.types.is_date(kind):
        return _times(raw, kind, notation)
    if pa.types.is_decimal(kind) or (notation.decimal and notations.is_number(kind)):
        return _numbers(raw, kind, notation)
    if pa.types.is_float32(kind):
        read = pa.array(raw, pa.float64())
        over = pc.indices_nonzero(pc.greater(pc.abs(read), values.LARGEST_FLOAT)).to_pylist()
        wrong = {i: Unreadable("float", repr(raw[i])) for i in over}
        return read.cast(kind), wrong
    if pa.types.is_nested(kind):
        build = _struct if pa.types.is_struct(kind) else _list
        read, wrong = build(raw, kind, notation)
        if wrong:
            read, _ = build([None if i in wrong else v for i, v in enumerate(raw)], kind, notation)
        return read, wrong
    return pa.array(raw, kind), {}


def _times(
    raw: Sequence[Any], kind: pa.DataType, notation: Notation
) -> tuple[pa.Array, dict[int, Unreadable]]:
    unread: dict[int, str] = {}
    if notations.has_unit(kind, notation):
        try:
            given = pa.array(raw, pa.int64())
        except (ValueError, TypeError, OverflowError):
            given, wrong = values.each(raw, pa.string(), lambda one: _scalar(one)[0])
            unread = {i: error.found for i, error in wrong.items()}
    else:
        given = pa.array(raw, pa.string())
    read, bad = notations.moments(given, kind, notation)
    unread |= {i: str(given[i].as_py()) for i in bad}
    expected = notations.words(values.name_of(kind), notation)
    return read, {i: Unreadable(expected, text) for i, text in unread.items()}


def _numbers(
    raw: Sequence[Any], kind: pa.DataType, notation: Notation
) -> tuple[pa.Array, dict[int, Unreadable]]:
    if notation.decimal == "base64" and pa.types.is_decimal(kind):
        return values.each(raw, kind, partial(_number, kind, notation))
    sent = pa.array([None if one is None else bytes(one) for one in raw], pa.binary())
    texts, _ = values.texts(sent)
    texts = pc.if_else(pc.equal(texts, "null"), None, texts)
    if notation.decimal != ",":
        texts = pc.utf8_trim(texts, '"')
    return values.numbers(texts, kind, lambda i: _number(kind, notation, raw[i]))


def _struct(
    raw: Sequence[Any], kind: pa.StructType, notation: Notation
) -> tuple[pa.Array, dict[int, Unreadable]]:
    wrong: dict[int, Unreadable] = {}
    columns = []
    for i, field in enumerate(kind):
        column, bad = _column(_each(raw, f"c{i}"), field.type, notation)
        columns.append(column)
        for at, error in bad.items():
            wrong.setdefault(at, error.inside(f".{field.name}"))
    is_null = pa.array([one is None for one in raw], pa.bool_())
    return pa.StructArray.from_arrays(columns, fields=[*kind], mask=is_null), wrong


def _list(
    raw: Sequence[Any], kind: pa.ListType | pa.MapType, notation: Notation
) -> tuple[pa.Array, dict[int, Unreadable]]:
    """Return a column of lists or of maps."""
    lengths = [0 if one is None else len(one) for one in raw]
    bounds = np.cumsum([0, *lengths])
    # A list whose first place is null is null.
    is_null = [*(one is None for one in raw), False]
    places = pa.array(bounds, pa.int32(), mask=np.array(is_null))
    given = [one for one in raw if one is not None]
    if pa.types.is_map(kind):
        names = [name for one in given for name in one]
        keys, bad = _keys(names, kind.key_type, lengths)
        items, of_items = _column(
            [v for one in given for v in one.values()], kind.item_type, notation
        )
        bad = {j: error.inside(f".{names[j]}") for j, error in (bad | of_items).items()}
        read = pa.MapArray.from_arrays(places, keys, items, type=kind)
    else:
        items, bad = _column([v for one in given for v in one], kind.value_type, notation)
        read = pa.ListArray.from_arrays(places, items, type=kind)
    wrong: dict[int, Unreadable] = {}
    for j in sorted(bad):
        i = int(np.searchsorted(bounds, j, side="right")) - 1
        step = "" if pa.types.is_map(kind) else f"[{j - bounds[i]}]"
        wrong.setdefault(i, bad[j].inside(step))
    return read, wrong


def _keys(
    names: Sequence[Any], kind: pa.DataType, lengths: Sequence[int]
) -> tuple[pa.Array, dict[int, Unreadable]]:
    """Return the keys of maps with so many names, and why a name is none, or names one twice."""
    is_real = pa.types.is_floating(kind)
    if not (is_real or kind == MICROS or pa.types.is_date(kind)):
        return _column(names, kind, Notation())
    if is_real:
        given = pa.array(names, pa.string())
        keys, bad = values.numbers(given, kind, lambda j: values.number(names[j], kind))
    else:
        keys, bad = _column(names, kind, Notation())
    # Arrow refuses null, and the records with such keys are dead letters.
    keys = keys.fill_null(pa.scalar(0, kind))
    good = np.setdiff1d(np.arange(len(names)), [*bad])
    maps, found = np.repeat(np.arange(len(lengths)), lengths)[good], keys.to_numpy(False)[good]
    order = np.lexsort((found, maps))
    maps, found = maps[order], found[order]
    for j in good[order[1:][(maps[1:] == maps[:-1]) & (found[1:] == found[:-1])]].tolist():
        bad[j] = Unreadable("each key once", names[j])
    return keys, bad


class _Fields:
    """The reader of single fields: of records that the typed decoder refuses, and of fields that
    several columns share."""

    def __init__(self, columns: Sequence[Column], kinds: Mapping[str, pa.DataType]) -> None:
        self._kinds = kinds
        self._decoders = {
            c.name: msgspec.json.Decoder(_or_null(_wire(kinds[c.name], c.notation, Raw)))
            for c in columns
        }

    def read(
        self, fields: Mapping[str, Raw], columns: Iterable[Column]
    ) -> tuple[dict[str, Any], dict[str, Unreadable], set[str]]:
        """Return the values of the columns as the typed decoder reads them, the errors of those
        that are not of their type, and the STRING columns that have another value than a text."""
        read: dict[str, Any] = {}
        bad: dict[str, Unreadable] = {}
        any_value = set()
        for column in columns:
            name, kind = column.name, self._kinds[column.name]
            try:
                raw = _at_the_end(fields, column.field)
            except Unreadable as error:
                bad[name] = error
                continue
            if raw is None:
                continue
            try:
                read[name] = _as_texts(self._decoders[name].decode(raw), kind)
            except REFUSED as error:
                bad[name] = _why(str(error), raw)
                continue
            is_other = pa.types.is_string(kind) and bytes(raw)[:1] not in (b'"', b"n")
            if is_other or (
                notations.has_unit(kind, column.notation) and _FRACTION.fullmatch(bytes(raw))
            ):
                any_value.add(name)
        return read, bad, any_value


def _at_the_end(fields: Mapping[str, Raw], path: Sequence[str]) -> Raw | None:
    """Return the value at the end of a path through objects; None if an object is missing or null.
    Raises Unreadable for another value on the way."""
    raw = fields.get(path[0])
    for depth, name in enumerate(path[1:], 1):
        if raw is None or (sent := bytes(raw)) == b"null":
            return None
        try:
            raw = _OBJECT.decode(sent).get(name)
        except REFUSED:
            text = sent.decode(errors="replace")
            raise Unreadable(_AN_OBJECT, text, f" at {'.'.join(path[:depth])}") from None
    return raw


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
        for i, field in enumerate(kind):
            setattr(value, f"c{i}", _as_texts(getattr(value, f"c{i}"), field.type))
    return value


def _why(refusal: str, raw: Raw) -> Unreadable:
    """Return the error of a value that msgspec refused, with the path in it."""
    match = _WRONG.search(refusal)
    if match is None or not match[3]:
        sent = bytes(raw)
        text = sent.decode(errors="replace")
        if sent.startswith(b'"'):
            # A record with an error as a whole may have texts that are none.
            with suppress(*REFUSED):
                text = msgspec.json.decode(sent, type=str)
        return Unreadable(match[1] if match else "another value", text)
    return Unreadable(match[1], match[2] or "a number out of range", match[3])


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list, msgspec.Struct)):
        return msgspec.json.encode(value).decode(errors="replace")
    return bytes(value).decode(errors="replace") if type(value) is Raw else str(value)


def _brackets_and_escapes(value: pa.Array) -> tuple[list[int], bool]:
    """Return the values with more than MAX_DEPTH opening brackets, and whether there is a
    backslash."""
    _, offsets, data = value.buffers()
    if data is None or not len(value):
        return [], False
    bounds = np.frombuffer(offsets, np.int32)[value.offset : value.offset + len(value) + 1]
    characters = np.frombuffer(data, np.uint8)[bounds[0] : bounds[-1]]
    opened, has_escapes = 0, False
    # In parts that stay in the processor's cache.
    for begin in range(0, len(characters), _PART):
        part = characters[begin : begin + _PART]
        # [ and { differ in one bit.
        opened += int(np.count_nonzero((part | 0x20) == ord("{")))
        has_escapes = has_escapes or bool((part == ord("\\")).any())
    # Each record has a bracket of its own: with few more, none has too many levels.
    if opened < len(value) + MAX_DEPTH:
        return [], has_escapes
    brackets = np.flatnonzero((characters | 0x20) == ord("{"))
    of_each = np.diff(np.searchsorted(brackets, bounds - bounds[0]))
    return np.flatnonzero(of_each > MAX_DEPTH).tolist(), has_escapes


_OBJECT = msgspec.json.Decoder(dict[str, Raw])
