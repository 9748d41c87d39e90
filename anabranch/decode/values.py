"""Values of columns: Arrow types, and the conversion of text to times, numbers and bytes.

One notation for all formats of text. A text that is not of its type is unreadable, never null and
never another value:

- INT, BIGINT: digits with an optional minus. FLOAT, DOUBLE, DECIMAL: JSON's numbers, with at
  most 1,000 digits on each side of the point and three of an exponent; a DECIMAL is rounded half
  up, as SQL does.
- TIMESTAMP: `2026-11-21T03:04:05.678+01:00`: `T` or a blank, up to nine digits of a fraction (cut
  to microseconds), a zone `Z`, `+01:00`, `+0100` or `+01`; UTC without one. DATE: `2026-11-21`.
  Years 1 to 9999 (UTC).
- BINARY: Base64 with padding.

The result of reading a batch of values, with the errors of its records, and what readers share
whose values have a schema.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_UP, Context, Decimal, InvalidOperation
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.config.columns import Column, parts_of

FIRST_MICROS, LAST_MICROS = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999 (UTC), in microseconds since 1970; dates of every reader include them."""

MICROS = pa.timestamp("us", "UTC")

SIMPLE = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "timestamp": MICROS,
    "date": pa.date32(),
    "binary": pa.binary(),
}
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,999})(?:\.[0-9]{1,1000})?(?:[eE][+-]?[0-9]{1,3})?")
INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,18})")
BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_TIME = re.compile(
    r"([0-9]{4}-[0-9]{2}-[0-9]{2})[T ]([0-9]{2}:[0-9]{2}:[0-9]{2})(?:\.([0-9]{1,9}))?"
    r"(Z|[+-][0-9]{2}(?::?[0-5][0-9])?)?"
)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
# What PyArrow's cast reads alike, over a whole array; a zone may still lead outside of the years.
_DAY = (
    "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
)
_CLOCK = "[T ]([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,6})?"
_PLAIN = {MICROS: f"^{_DAY}{_CLOCK}(Z|[+-](0[0-9]|1[0-7]):[0-5][0-9])$", pa.date32(): f"^{_DAY}$"}
_LOCAL = f"^{_DAY}{_CLOCK}$"
# Of a number that its type surely has, without the first.
_WHOLE_DIGITS = {pa.int32(): 8, pa.int64(): 17}
_LATE_DAY = "^[0-9]{4}-[0-9]{2}-(29|30|31)"
LARGEST_FLOAT, LARGEST_DOUBLE = (2 - 2**-23) * 2.0**127, sys.float_info.max
# Enough for every DECIMAL: a number of 1,000 digits before the point is refused by its column.
CONTEXT = Context(prec=2_100, rounding=ROUND_HALF_UP)
# The last digit of a DECIMAL, by its scale.
_STEPS = [Decimal((0, (1,), -scale)) for scale in range(39)]


class Unreadable(ValueError):
    """A value that is not of its type, with the `expected` type, the text `found`, and its `path`
    in the column (`.a[0]`)."""

    def __init__(self, expected: str, found: str, path: str = "") -> None:
        super().__init__(expected, found, path)
        self.expected, self.found, self.path = expected, found, path

    def inside(self, step: str) -> Unreadable:
        return Unreadable(self.expected, self.found, step + self.path)


def arrow_type(kind: str) -> pa.DataType:
    """Return the Arrow type of a column's type (`anabranch.config.columns.Column.type`)."""
    name, parts = parts_of(kind)
    if not parts:
        return SIMPLE[name]
    if name == "decimal":
        return pa.decimal128(int(parts[0]), int(parts[1]))
    if name == "array":
        return pa.list_(pa.field("element", arrow_type(parts[0])))
    if name == "map":
        return pa.map_(arrow_type(parts[0]), arrow_type(parts[1]))
    fields = (part.partition(":") for part in parts)
    return pa.struct([(field, arrow_type(of)) for field, _, of in fields])


def name_of(kind: pa.DataType) -> str:
    """Return the column's type as in a stream's file."""
    if pa.types.is_list(kind):
        return f"array<{name_of(kind.value_type)}>"
    if pa.types.is_map(kind):
        return f"map<{name_of(kind.key_type)},{name_of(kind.item_type)}>"
    if pa.types.is_struct(kind):
        return f"struct<{','.join(f'{f.name}:{name_of(f.type)}' for f in kind)}>"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return next(name for name, simple in SIMPLE.items() if simple == kind)


def moments(texts: pa.Array, kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    """Return text as times or dates, null where it is unreadable, and the indexes of these."""
    is_plain = pc.match_substring_regex(texts, _PLAIN[kind])
    if kind == MICROS and not _all(is_plain):
        is_local = pc.match_substring_regex(texts, _LOCAL)
        texts = pc.if_else(is_local, pc.binary_join_element_wise(texts, "Z", ""), texts)
        is_plain = pc.or_(is_plain, is_local)
    try:
        read = (texts if _all(is_plain) else pc.if_else(is_plain, texts, None)).cast(kind)
    except pa.ArrowInvalid:
        # A day that its month does not have.
        is_plain = pc.and_(is_plain, pc.invert(pc.match_substring_regex(texts, _LATE_DAY)))
        read = pc.if_else(is_plain, texts, None).cast(kind)
    if kind == MICROS and not _all(is_inside := in_the_calendar(read)):
        is_plain = pc.and_kleene(is_plain, is_inside)
    if _all(is_plain):
        return read, []
    found: dict[int, Any] = {}
    bad, one = [], timestamp if kind == MICROS else day
    for i in pc.indices_nonzero(pc.invert(is_plain)).to_pylist():
        try:
            found[i] = one(texts[i].as_py())
        except Unreadable:
            bad.append(i)
            found[i] = None
    mask = pa.array([i in found for i in range(len(texts))])
    return pc.replace_with_mask(read, mask, pa.array(found.values(), kind)), bad


def _all(mask: pa.Array) -> bool:
    """Return whether a mask is true everywhere, ignoring nulls."""
    return pc.all(mask, min_count=0).as_py() is not False


def timestamp(text: str) -> int:
    """Return microseconds since 1970. Raises Unreadable."""
    if (match := _TIME.fullmatch(text)) is not None:
        on, at, fraction, zone = match.groups()
        micros = (fraction or "")[:6].ljust(6, "0")
        try:
            return micros_of(datetime.fromisoformat(f"{on}T{at}.{micros}{zone or 'Z'}"))
        except (ValueError, OverflowError):
            pass
    raise Unreadable("timestamp", text)


def micros_of(at: datetime) -> int:
    since = at.astimezone(UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def day(text: str) -> date:
    """Raises Unreadable."""
    if _DATE.fullmatch(text):
        try:
            return date.fromisoformat(text)
        except ValueError:
            pass
    raise Unreadable("date", text)


def number(text: str, kind: pa.DataType) -> Any:
    """Return a number of any type in JSON's notation. Raises Unreadable."""
    if pa.types.is_decimal(kind):
        return decimal(text, kind)
    if pa.types.is_integer(kind) and INTEGER.fullmatch(text):
        whole = int(text)
        if -(2 ** (kind.bit_width - 1)) <= whole < 2 ** (kind.bit_width - 1):
            return whole
    if pa.types.is_floating(kind) and NUMBER.fullmatch(text):
        real = float(text)
        if abs(real) <= (LARGEST_FLOAT if pa.types.is_float32(kind) else LARGEST_DOUBLE):
            return real
    raise Unreadable(name_of(kind), text)


def numbers(
    given: pa.Array, kind: pa.DataType, convert: Callable[[int], Any]
) -> tuple[pa.Array, dict[int, Unreadable]]:
    """Return text as numbers, null where it is unreadable, and these errors by index. `convert`
    reads those, by their index, that PyArrow's cast may not read alike."""
    whole, fraction = _WHOLE_DIGITS.get(kind, 14), "([.][0-9]{1,40})?"
    if pa.types.is_decimal(kind):
        whole, fraction = kind.precision - kind.scale - 1, f"([.][0-9]{{1,{kind.scale}}})?"
    if pa.types.is_integer(kind) or fraction.endswith("{1,0})?"):
        fraction = ""
    digits = f"(0|[1-9][0-9]{{0,{whole}}})" if whole >= 0 else "0"
    is_plain = pc.match_substring_regex(given, f"^-?{digits}{fraction}$")
    # FLOAT by DOUBLE, as in all formats: PyArrow would round text once.
    by = pa.float64() if pa.types.is_float32(kind) else kind
    if _all(is_plain):
        return given.cast(by).cast(kind), {}
    rest = pc.indices_nonzero(pc.invert(is_plain)).to_pylist()
    others, bad = each(rest, kind, convert)
    mask = pc.fill_null(pc.invert(is_plain), False)
    read = pc.if_else(is_plain, given, None).cast(by).cast(kind)
    return pc.replace_with_mask(read, mask, others), {rest[i]: bad[i] for i in bad}


def decimal(text: str, kind: pa.Decimal128Type) -> Decimal:
    """Return a number of JSON, rounded half up to the column's scale. Raises Unreadable."""
    if NUMBER.fullmatch(text):
        return fitted(Decimal(text), kind, text)
    raise Unreadable(name_of(kind), text)


def unscaled(value: bytes, scale: int, kind: pa.Decimal128Type) -> Decimal:
    """Return the number of a decimal's bytes: a whole number, big-endian in two's complement, of
    which `scale` digits are after the point. Raises Unreadable."""
    whole = int.from_bytes(value, "big", signed=True)
    if whole.bit_length() > 2_000:
        # Its digits would take quadratic time.
        raise Unreadable(name_of(kind), f"a number of {len(value)} bytes")
    number = Decimal(whole).scaleb(-scale, CONTEXT)
    return fitted(number, kind, str(number))


def fitted(number: Decimal, kind: pa.Decimal128Type, text: str) -> Decimal:
    """Raises Unreadable for a number with more digits before the point than the column has."""
    try:
        rounded = number.quantize(_STEPS[kind.scale], context=CONTEXT)
    except InvalidOperation:
        rounded = Decimal("Infinity")
    if rounded.is_finite() and rounded.adjusted() < kind.precision - kind.scale:
        return rounded
    raise Unreadable(name_of(kind), text)


def dates_of(times: pa.Array) -> pa.Array:
    """Return the dates of times in UTC."""
    return pc.cast(pc.cast(times, pa.timestamp("us")), pa.date32())


def texts(value: pa.Array) -> tuple[pa.Array, list[int]]:
    """Return bytes as text, null where they are not UTF-8, and the indexes of these."""
    try:
        return value.cast(pa.string()), []
    except pa.ArrowInvalid:
        bad = [i for i, one in enumerate(value.to_pylist()) if one is not None and not is_utf8(one)]
        mask = pa.array([i in set(bad) for i in range(len(value))])
        return pc.if_else(mask, None, value).cast(pa.string()), bad


def is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True


def each(
    values: Sequence[Any], kind: pa.DataType, convert: Callable[[Any], Any]
) -> tuple[pa.Array, dict[int, Unreadable]]:
    """Return converted values, null where `convert` raises Unreadable, and the errors by index."""
    found, bad = [], {}
    for i, value in enumerate(values):
        try:
            found.append(None if value is None else convert(value))
        except Unreadable as error:
            bad[i] = error
            found.append(None)
    return pa.array(found, kind), bad


def in_the_calendar(at: pa.Array) -> pa.Array:
    """Return whether times are in the years 1 to 9999."""
    since = at.cast(pa.int64())
    return pc.and_(pc.greater_equal(since, FIRST_MICROS), pc.less_equal(since, LAST_MICROS))


FOUND_LENGTH = 80


class Errors:
    """The first error of each record: of the whole record, else of its first column."""

    WHOLE = -1

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, str, str]] = {}

    def add(self, record: int, column: int, code: str, text: str) -> None:
        known = self._found.get(record)
        if known is None or column < known[0]:
            self._found[record] = (column, code, text)

    def take(self, others: Errors, places: Sequence[int], but: str = "") -> None:
        """Add the errors of another reader, whose columns have these places, except a code."""
        for record, (column, code, text) in others._found.items():
            if code != but:
                self.add(record, column if column == self.WHOLE else places[column], code, text)

    def is_whole(self, record: int) -> bool:
        """Return whether nothing of the record can be read."""
        return record in self._found and self._found[record][0] == self.WHOLE

    def first(self, length: int) -> dict[int, tuple[str, str]]:
        """Return code and text, at most `length` characters, by record."""
        return {record: (code, text[:length]) for record, (_, code, text) in self._found.items()}


@dataclass
class Reading:
    """The values of a batch as columns.

    `columns` has an array for each column, of its type, with a value for each record: null where
    the record has none, or none that is readable. `unknown`: the names of a record's fields without
    a column, by index. `rescued`: these fields as a JSON object. `shown` returns the text of a
    column's value, for messages.
    """

    columns: dict[str, pa.Array]
    errors: Errors
    shown: Callable[[str, int], str]
    unknown: dict[int, list[str]] = field(default_factory=dict)
    rescued: dict[int, str] = field(default_factory=dict)


def found(expected: str, text: str | None) -> str:
    """Return `expected …, found …`, with the text shortened."""
    return f"expected {expected}, found {'null' if text is None else text[:FOUND_LENGTH]}"


def columns_of(columns: Iterable[Column]) -> tuple[tuple[str, str, bool], ...]:
    return tuple((column.name, column.type, not column.nullable) for column in columns)


def verdict(name: str, kind: str, error: Unreadable) -> tuple[str, str]:
    """Return code and text of a value that the column cannot have. `kind`: its type in words."""
    if error.expected == "UTF-8":
        return "invalid_utf8", f"{name}{error.path}: {found('UTF-8', error.found)}"
    expected = error.expected if error.path else kind
    is_time = error.expected.startswith(("timestamp", "date"))
    code = "unreadable_timestamp" if is_time else "wrong_type"
    return code, f"{name}{error.path}: {found(expected, error.found)}"


def within(step: str, convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return None if value is None else convert(value)
    except Unreadable as error:
        raise error.inside(step) from None


def spread(parts: list[tuple[np.ndarray, pa.Array]], kind: pa.DataType, length: int) -> pa.Array:
    """Return a column of `length` records with each part's values at its places, else null."""
    if len(parts) == 1 and len(parts[0][0]) == length:
        return parts[0][1]
    chosen = np.full(length, -1)
    start = 0
    for places, _ in parts:
        chosen[places] = np.arange(start, start + len(places))
        start += len(places)
    read = pa.concat_arrays([pa.array([], kind), *(part for _, part in parts)])
    return read.take(pa.array(chosen, mask=chosen < 0))
