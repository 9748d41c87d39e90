"""`schema` of a stream's file: Spark DDL, or a mapping of columns, which may also have where a
column's field is in a record and how its values are written.

`TimePattern` is the form of a time as text, in the directives of Python's strptime, but stricter: a
blank is a blank, digits are ASCII, and a number next to another one has all its digits. `%f` takes
up to nine digits. Without `%z` a time is in UTC.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError

from anabranch.config.base import Frozen
from anabranch.config.columns import (
    NO_COLUMNS,
    Column,
    Notation,
    column_name,
    parse_columns,
    type_ddl,
)
from anabranch.config.mistakes import explain_mistakes

_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September"),
    *("October", "November", "December"),
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_TWO = "[0-9]{2}"
# Numbers that may have one digit, unless a number is next to them.
_SHORT = {"m": "[0-9]{1,2}", "d": "(?: [0-9]|[0-9]{1,2})"} | dict.fromkeys("HIMS", "[0-9]{1,2}")
_FORMS = {
    "Y": "[0-9]{4}",
    **dict.fromkeys("ymdHIMS", _TWO),
    "f": "[0-9]{1,9}",
    "z": "Z|[+-][0-9]{2}(?::?[0-9]{2})?",
    "p": "(?i:AM|PM)",
    "b": f"(?i:{'|'.join(name[:3] for name in _MONTHS)})",
    "B": f"(?i:{'|'.join(_MONTHS)})",
    "a": f"(?i:{'|'.join(name[:3] for name in _DAYS)})",
    "A": f"(?i:{'|'.join(_DAYS)})",
}
_DIGITS = frozenset("YymdHIMSf")
_CLOCK = frozenset("HIMSfzp")
_MONTH_OF = {name[:3].upper(): f"{i:02}" for i, name in enumerate(_MONTHS, 1)}
_NEEDED = (("Y", "y"), ("m", "b", "B"), ("d",))


@dataclass(frozen=True)
class TimePattern:
    """`has_clock`: it has more than a day."""

    _text: re.Pattern[str]
    has_clock: bool

    def iso(self, text: str) -> str | None:
        """Return a text of this form as ISO 8601, a day if the pattern has no clock; None for any
        other text. The result may be no time: `2026-02-30`."""
        match = self._text.fullmatch(text)
        if match is None:
            return None
        part = match.groupdict()
        year = part.get("Y") or f"{19 if part['y'] >= '69' else 20}{part['y']}"
        month = part.get("m") or _MONTH_OF[(part.get("b") or part.get("B") or "")[:3].upper()]
        day = f"{year}-{month:0>2}-{part['d'].strip():0>2}"
        if not self.has_clock:
            return day
        hour = part.get("H", "00")
        if "I" in part:
            if not 1 <= int(part["I"]) <= 12:
                return None
            hour = str(int(part["I"]) % 12 + 12 * (part["p"].upper() == "PM"))
        clock = f"{hour:0>2}:{part.get('M', '00'):0>2}:{part.get('S', '00'):0>2}"
        zone = part.get("z", "Z").replace(":", "")
        zone = zone if zone == "Z" else f"{zone[:3]}:{zone[3:] or '00'}"
        return f"{day}T{clock}.{part.get('f', '0')[:6]}{zone}"


@lru_cache(maxsize=256)
def parse_pattern(pattern: str) -> TimePattern:
    """Raises ValueError, with what was expected and found."""
    pieces = re.findall(r"%.?|[^%]", pattern, re.DOTALL)
    names = [piece[1:] if piece[0] == "%" and piece != "%%" else "" for piece in pieces]
    known = ", ".join(f"%{name}" for name in _FORMS)
    for name, piece in zip(names, pieces, strict=True):
        if piece[0] == "%" and piece != "%%" and name not in _FORMS:
            raise ValueError(f"expected the directives {known}, found {piece}")
        if name and names.count(name) > 1:
            raise ValueError(f"expected each directive once, found %{name} twice")
    for choice in _NEEDED:
        if len(set(choice) & set(names)) != 1:
            raise ValueError(
                f"expected one of {', '.join(f'%{name}' for name in choice)}, found {pattern!r}"
            )
    if ("I" in names) != ("p" in names) or {"H", "I"} <= set(names):
        raise ValueError(f"expected %H, or %I with %p, found {pattern!r}")
    if set(names) & _CLOCK and not {"H", "I"} & set(names):
        raise ValueError(f"expected %H or %I beside minutes and zone, found {pattern!r}")
    text = ""
    for i, (name, piece) in enumerate(zip(names, pieces, strict=True)):
        beside = {names[i - 1] if i else "", names[i + 1] if i + 1 < len(names) else ""}
        is_free = not beside & _DIGITS and not _is_digit(pieces, i)
        form = _SHORT[name] if is_free and name in _SHORT else _FORMS.get(name, "")
        text += f"(?P<{name}>{form})" if name else re.escape(piece[-1])
    return TimePattern(re.compile(text), bool(set(names) & _CLOCK))


def _is_digit(pieces: list[str], i: int) -> bool:
    """Return whether a literal digit is next to a piece."""
    return any(pieces[at].isdigit() for at in (i - 1, i + 1) if 0 <= at < len(pieces))


_SUBJECT_KEYS = frozenset({"columns", "exclude"})
_KEYS = {"pattern": "format"}
_NUMBERS = frozenset({"int", "bigint", "float", "double", "decimal"})
# A type that is no name of a STRUCT's field.
_KIND = re.compile(r"(?:^|[<,:])([a-z]+)(?=[,>(]|$)")


def is_of_a_subject(schema: object) -> bool:
    """Return whether `schema` has the columns of a registry's subject."""
    return isinstance(schema, Mapping) and bool(schema) and _SUBJECT_KEYS.issuperset(schema)


def _path(value: object) -> object:
    """Return the names of a path: a text is split at its dots."""
    return tuple(value.split(".")) if isinstance(value, str) else value


def _names(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value or not all(re.fullmatch(r'[^"\\\x00-\x1f]+', name) for name in value):
        raise ValueError(
            "expected names of fields, not empty and without quotes, backslashes and control "
            "characters"
        )
    return value


def _pattern(value: str) -> str:
    parse_pattern(value)
    return value


class ColumnSettings(Frozen):
    """A column of `schema` in the long form. `unit`, `format` and `decimal` apply to the column's
    values at every level."""

    type: str = Field(description="The type, with NOT NULL if needed.", examples=["TIMESTAMP"])
    path: Annotated[tuple[str, ...], BeforeValidator(_path), AfterValidator(_names)] = Field(
        default=(),
        alias="from",
        description=(
            "The field, or a path with dots; a list for names with dots. Default: the column's "
            "name."
        ),
        examples=["payload.after.id", '["event.action"]'],
    )
    unit: Literal["seconds", "millis", "micros", "nanos", "days"] | None = Field(
        default=None, description=("TIMESTAMPs are numbers of this unit since 1970, DATEs of days.")
    )
    format: Annotated[str, AfterValidator(_pattern)] | None = Field(
        default=None,
        description="Times are text of this form, as for Python's strptime.",
        examples=["%d/%b/%Y:%H:%M:%S %z"],
    )
    decimal: Literal[".", ",", "base64"] | None = Field(
        default=None,
        description=(
            "Numbers may be in quotes, with this decimal sign; `base64`: DECIMALs of Kafka Connect."
        ),
    )


def parse_schema(value: object) -> tuple[Column, ...]:
    """Parse Spark DDL, or a mapping of columns. Raises ValueError with expected and found."""
    if not isinstance(value, Mapping):
        return parse_columns(value)
    if not value:
        raise ValueError(f"{NO_COLUMNS}, found none")
    settings = {name: _settings(name, one) for name, one in value.items()}
    # Each alone first: a type with a comma of its own would be another column.
    ddl = [_ddl(str(name), one.type) for name, one in settings.items()]
    columns = parse_columns(", ".join(ddl))
    return tuple(map(_column, columns, settings.values()))


def _ddl(name: str, kind: str) -> str:
    ddl = f"`{name}` {kind}"
    try:
        [_] = parse_columns(ddl)
    except ValueError as error:
        if str(error).startswith("column "):
            raise
        expected = "expected a type, perhaps with NOT NULL"
        raise ValueError(f"column {name}: {expected}, found {kind!r}") from None
    return ddl


def columns_mapping(columns: Iterable[Column]) -> dict[str, Any]:
    """Return columns as a mapping of `schema`."""
    mapping: dict[str, Any] = {}
    for column in columns:
        written = vars(column.notation).items()
        more: dict[str, Any] = {_KEYS.get(key, key): value for key, value in written if value}
        if column.path:
            has_dots = any("." in name for name in column.path)
            more["from"] = list(column.path) if has_dots else ".".join(column.path)
        kind = type_ddl(column)
        mapping[column.name] = {"type": kind, **more} if more else kind
    return mapping


def _column(column: Column, one: ColumnSettings) -> Column:
    kinds, found = set(_KIND.findall(column.type)), f"found {column.type.upper()}"
    times = kinds & {"timestamp", "date"}
    wrong = ""
    if one.unit is not None and one.format is not None:
        wrong, found = "unit or format", "found both"
    elif (
        one.unit is not None
        and (need := "date" if one.unit == "days" else "timestamp") not in kinds
    ):
        wrong = f"unit {one.unit} with a {need.upper()}"
    elif one.format is not None and not times:
        wrong = "format with a TIMESTAMP or DATE"
    elif one.format is not None and "date" in times and parse_pattern(one.format).has_clock:
        wrong, found = "a format without a clock with a DATE", f"found {one.format}"
    elif one.decimal == "base64" and "decimal" not in kinds:
        wrong = "decimal base64 with a DECIMAL"
    elif one.decimal is not None and not kinds & _NUMBERS:
        wrong = "decimal with a number's type"
    if wrong:
        raise ValueError(f"column {column.name}: expected {wrong}, {found}")
    notation = Notation(one.unit or "", one.format or "", one.decimal or "")
    return replace(column, path=one.path, notation=notation)


def _settings(name: object, value: Any) -> ColumnSettings:
    column_name(str(name))
    if isinstance(value, str):
        value = {"type": value}
    if not isinstance(value, Mapping):
        raise ValueError(f"column {name}: expected a type or a mapping of keys, found {value!r}")
    try:
        return ColumnSettings.model_validate(value)
    except ValidationError as error:
        [(_, line), *_] = explain_mistakes(ColumnSettings, value, error)
        raise ValueError(
            f"column {name}{': ' if line.startswith('expected') else '.'}{line}"
        ) from None
