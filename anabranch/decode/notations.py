"""Values in a notation that the stream's file states: times as numbers or by a pattern, numbers in
text, Base64 decimals. Arithmetic is exact; digits below a microsecond are cut, to the earlier
microsecond before 1970 too.
"""

from __future__ import annotations

import base64
from datetime import date, timedelta
from decimal import ROUND_FLOOR, Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.config.schema import parse_pattern
from anabranch.decode import values
from anabranch.decode.values import FIRST_MICROS, LAST_MICROS, MICROS, Unreadable

if TYPE_CHECKING:
    import numpy.typing as npt

    from anabranch.config.columns import Notation

PER_SECOND = {"seconds": 1, "millis": 1_000, "micros": 1_000_000, "nanos": 1_000_000_000}
"""The units of a timestamp that is a number."""

_DIGITS = {"seconds": 6, "millis": 3, "micros": 0, "nanos": -3}

FIRST_DAY, LAST_DAY = FIRST_MICROS // 86_400_000_000, LAST_MICROS // 86_400_000_000
_EPOCH = date(1970, 1, 1)
# What fits 64 bits. Others are read one by one.
_INTEGER = "^-?(0|[1-9][0-9]{0,17})$"
_FRACTION = "^(?P<whole>0|[1-9][0-9]{0,11})[.](?P<digits>[0-9]{1,9})$"


def words(type: str, notation: Notation) -> str:
    """Return a column's type and notation, for messages."""
    if notation.unit and type == ("date" if notation.unit == "days" else "timestamp"):
        return f"{type} in {notation.unit} since 1970"
    if notation.pattern and type in ("timestamp", "date"):
        return f"{type} of the form {notation.pattern}"
    if notation.decimal == "base64" and type.startswith("decimal"):
        return f"{type} in Base64"
    if notation.decimal in (".", ",") and type.startswith(
        ("decimal", "int", "bigint", "float", "double")
    ):
        return f"{type} with the decimal sign {notation.decimal}"
    return type


def has_unit(kind: pa.DataType, notation: Notation) -> bool:
    """Return whether times of this type are numbers."""
    return bool(notation.unit) and kind == (pa.date32() if notation.unit == "days" else MICROS)


def is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    )


def micros_of(numbers: npt.NDArray[np.int64], per_second: int) -> tuple[Any, Any]:
    """Return times as microseconds since 1970, and whether each is in the years 1 to 9999."""
    if per_second > 1_000_000:
        return numbers // (per_second // 1_000_000), np.ones(len(numbers), bool)
    factor = 1_000_000 // per_second
    is_in = (numbers >= FIRST_MICROS // factor) & (numbers <= LAST_MICROS // factor)
    return np.where(is_in, numbers, 0) * factor, is_in


def moments(given: pa.Array, kind: pa.DataType, notation: Notation) -> tuple[pa.Array, list[int]]:
    """Return text, or integers of the notation's unit, as times or dates, null where they are
    unreadable, and the indexes of these."""
    if has_unit(kind, notation):
        return _of_unit(given, kind, notation)
    if notation.pattern:
        # Times of logs repeat.
        texts = given.dictionary_encode()
        iso = [_iso(one, kind, notation) for one in texts.dictionary.to_pylist()]
        given = pa.array(iso, pa.string()).take(texts.indices)
    return values.moments(given, kind)


def _of_unit(given: pa.Array, kind: pa.DataType, notation: Notation) -> tuple[pa.Array, list[int]]:
    is_given = given.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_integer(given.type):
        is_whole, whole = is_given, given.fill_null(0).to_numpy()
    else:
        is_integer = pc.match_substring_regex(given, _INTEGER).fill_null(False)
        whole = pc.if_else(is_integer, given, "0").cast(pa.int64()).to_numpy()
        is_whole = is_integer.to_numpy(zero_copy_only=False)
    if kind == MICROS:
        read, is_in = micros_of(whole, PER_SECOND[notation.unit])
    else:
        is_in = (whole >= FIRST_DAY) & (whole <= LAST_DAY)
        read = np.where(is_in, whole, 0).astype(np.int32)
    is_read = is_whole & is_in
    rest = np.flatnonzero(is_given & ~is_read)
    if kind == MICROS and len(rest) and pa.types.is_string(given.type):
        rest = _fractions(given, rest, read, is_read, notation.unit)
    bad = []
    for i in rest.tolist():
        try:
            found = moment(str(given[i].as_py()), kind, notation)
            read[i] = found if kind == MICROS else (found - _EPOCH).days
            is_read[i] = True
        except Unreadable:
            bad.append(i)
    return pa.array(read, mask=~is_read).cast(kind), bad


def _fractions(texts: pa.Array, rest: Any, read: Any, is_read: Any, unit: str) -> Any:
    """Read the numbers with a fraction that is short. Return the indexes of the others."""
    parts = pc.extract_regex(texts.take(pa.array(rest)), _FRACTION)
    is_short = parts.is_valid().to_numpy(zero_copy_only=False)
    if not is_short.any():
        return rest
    parts = parts.drop_null()
    found = pc.struct_field(parts, "whole").cast(pa.int64()).to_numpy()
    micros, is_in = micros_of(found, PER_SECOND[unit])
    if (digits := {"seconds": 6, "millis": 3}.get(unit)) is not None:
        fraction = pc.utf8_rpad(pc.struct_field(parts, "digits"), digits, "0")
        fraction = pc.utf8_slice_codeunits(fraction, 0, digits)
        micros = micros + fraction.cast(pa.int64()).to_numpy()
    read[rest[is_short]], is_read[rest[is_short]] = micros, is_in
    return np.concatenate([rest[~is_short], rest[is_short][~is_in]])


def moment(text: str, kind: pa.DataType, notation: Notation) -> Any:
    """Return microseconds since 1970, or a date. Raises Unreadable."""
    try:
        if has_unit(kind, notation):
            return _of_number(text, kind, notation.unit)
        iso = _iso(text, kind, notation) if notation.pattern else text
        return values.timestamp(iso) if kind == MICROS else values.day(iso)
    except Unreadable as error:
        raise Unreadable(words(error.expected, notation), text) from None


def _of_number(text: str, kind: pa.DataType, unit: str) -> Any:
    if kind != MICROS:
        if values.INTEGER.fullmatch(text) and FIRST_DAY <= int(text) <= LAST_DAY:
            return _EPOCH + timedelta(int(text))
        raise Unreadable("date", text)
    if values.NUMBER.fullmatch(text):
        number = Decimal(text)
        # No number of so many digits is a time in any unit; the next steps would build it.
        if number.adjusted() < 25:
            exact = number.scaleb(_DIGITS[unit], values.CONTEXT)
            micros = exact.to_integral_value(ROUND_FLOOR)
            if FIRST_MICROS <= micros <= LAST_MICROS:
                return int(micros)
    raise Unreadable("timestamp", text)


def _iso(text: str, kind: pa.DataType, notation: Notation) -> str:
    """Return a text of the pattern as ISO 8601, and any other as a text that is no time."""
    pattern = parse_pattern(notation.pattern)
    iso = pattern.iso(text)
    if iso is None:
        return ""
    return iso if pattern.has_clock or kind != MICROS else f"{iso}T00:00:00Z"


def number(text: str, kind: pa.DataType, notation: Notation) -> Any:
    """Return a number in text. Raises Unreadable."""
    try:
        if notation.decimal == "base64" and pa.types.is_decimal(kind):
            return _unscaled(text, kind)
        if notation.decimal == ",":
            if "." in text:
                raise Unreadable(values.name_of(kind), text)
            return values.number(text.replace(",", "."), kind)
        return values.number(text, kind)
    except Unreadable as error:
        raise Unreadable(words(error.expected, notation), text) from None


def _unscaled(text: str, kind: pa.Decimal128Type) -> Decimal:
    if text and values.BASE64.fullmatch(text):
        return values.unscaled(base64.b64decode(text), kind.scale, kind)
    raise Unreadable(values.name_of(kind), text)
