"""`schema` of a stream's file: Spark DDL, or a mapping of columns, which may also have where a
column's field is in a record and how its values are written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
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
from anabranch.config.time_pattern import parse_pattern

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
    """Parse Spark DDL, or a mapping of columns. Raises ValueError with what was expected and
    found."""
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
