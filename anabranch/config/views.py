"""A stream's views: the declared windowed aggregates and the partials that they are computed from.
Independent of any engine.

A view's partials are the contribution of one ingest hour to each window and group, in columns that
merge over hours: counts and sums by addition, minima and maxima by comparison, sketches of distinct
values by union. Aggregates may share partials, as an average shares a sum and a count.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError

from anabranch.config.base import (
    Duration,
    Frozen,
    Name,
    more_than_nothing,
    one_or_many,
    repeated_name,
)
from anabranch.config.columns import Column, require_column
from anabranch.config.mistakes import unknown_key
from anabranch.config.plain import parse_name

Function = Literal["count", "sum", "min", "max", "average", "approx_distinct"]
PartialKind = Literal["count", "sum", "min", "max", "sketch"]

WINDOW_START, COMPLETE, LATE = "window_start", "complete", "late"

# Names that a view's columns and tables cannot have.
_TAKEN_COLUMNS = (WINDOW_START, COMPLETE, LATE)
_TAKEN_VIEWS = ("dead_letters", "hours", "egress", "archive")
PARTIALS = "_partials"

_FUNCTIONS: dict[str, Function] = {function: function for function in get_args(Function)}
_CALL = re.compile(r"\s*([a-z_]+)\s*(?:\(\s*([A-Za-z_][A-Za-z0-9_]*)\s*\))?\s*")
_WHOLE = ("int", "bigint")
_NUMBERS = (*_WHOLE, "decimal", "float", "double")
_GROUPED = (*_WHOLE, "decimal", "string", "boolean", "date", "timestamp")
_ORDERED = (*_NUMBERS, "string", "boolean", "date", "timestamp")
_TAKES = {
    "sum": _NUMBERS,
    "average": _NUMBERS,
    "min": _ORDERED,
    "max": _ORDERED,
    "approx_distinct": (*_WHOLE, "string"),
}

# The version of the computation of partials; a new version recomputes all of them.
_VERSION = 1


@dataclass(frozen=True)
class Aggregate:
    """A column of a view: a function of a column, or the number of rows without a column."""

    name: str
    function: Function
    column: str | None = None


@dataclass(frozen=True)
class Partial:
    """A column of a view's partials: name, Spark type, kind, and the column that it aggregates."""

    name: str
    type: str
    kind: PartialKind
    column: str


def parse_aggregate(name: str, text: object) -> Aggregate:
    """Parse `count` or `FUNCTION(COLUMN)`. Raises ValueError for anything else."""
    match = _CALL.fullmatch(text) if isinstance(text, str) else None
    function_name, column = match.groups() if match is not None else (None, None)
    function = _FUNCTIONS.get(str(function_name))
    if function is None or (column is None and function != "count"):
        known = ", ".join(f"{f}(COLUMN)" for f in _FUNCTIONS)
        raise ValueError(f"expected count, or one of {known}, found {text!r}")
    return Aggregate(name, function, column)


def _aggregates(value: object) -> object:
    if not isinstance(value, dict) or not value:
        raise ValueError(
            "expected names with what each is, such as {events: count, spent: sum(amount)}"
        )
    found = []
    for name, text in value.items():
        try:
            found.append(parse_aggregate(str(parse_name(name)), text))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return tuple(found)


class View(Frozen):
    """A windowed aggregate over a stream's rows: one row for each window of event time and group.

    Windows are aligned to 1970-01-01 00:00 UTC. A record is late if its ingest hour began after
    the end of its window, or at it.
    """

    name: Name
    window: Annotated[Duration, more_than_nothing("expected a window longer than nothing")] = Field(
        description="The length of a window."
    )
    group: Annotated[tuple[Name, ...], BeforeValidator(one_or_many)] = Field(
        default=(), description="The columns by which rows are grouped."
    )
    aggregates: Annotated[tuple[Aggregate, ...], BeforeValidator(_aggregates)] = Field(
        description=(
            "The columns of the view: `count`, or `sum`, `min`, `max`, `average`, "
            "`approx_distinct` of a column."
        ),
        examples=["{orders: count, spent: sum(total)}"],
    )


def parse_views(value: object) -> object:
    if not isinstance(value, dict):
        raise ValueError("expected a mapping of names to views")
    views, known = [], sorted(View.model_fields.keys() - {"name"})
    for name, given in value.items():
        if not isinstance(given, dict):
            raise ValueError(f"{name}: expected {', '.join(known)}, found {type(given).__name__}")
        if unknown := sorted(given.keys() - set(known)):
            raise ValueError(unknown_key(str(unknown[0]), known, f"{name}.{unknown[0]}"))
        try:
            views.append(View.model_validate(given | {"name": name}))
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(map(str, (name, *problem["loc"])))
            raise ValueError(f"{key}: {problem['msg'].removeprefix('Value error, ')}") from None
    return tuple(views)


def check_view(view: View, columns: Sequence[Column]) -> None:
    """Raise ValueError, with expected and found, for a view that the columns do not allow."""
    if view.name.lower() in _TAKEN_VIEWS or view.name.lower().endswith(PARTIALS):
        raise ValueError(
            f"expected a name other than {', '.join(_TAKEN_VIEWS)} and those that end with "
            f"{PARTIALS}"
        )
    for column in view.group:
        require_column("group", columns, column, _GROUPED)
    for aggregate in view.aggregates:
        if aggregate.column is not None:
            key, takes = f"aggregates.{aggregate.name}", _TAKES.get(aggregate.function, ())
            require_column(key, columns, aggregate.column, takes)
    if repeated := repeated_name(
        (*_TAKEN_COLUMNS, *view.group, *(a.name for a in view.aggregates))
    ):
        raise ValueError(
            f"expected each name once among group, aggregates, {', '.join(_TAKEN_COLUMNS)}, found "
            f"{repeated!r} twice"
        )


def group_column(column: str) -> str:
    """Return the name that a group column has among a view's partials."""
    return f"by_{column}"


def partials_of(aggregates: Sequence[Aggregate], columns: Sequence[Column]) -> tuple[Partial, ...]:
    """Return the aggregates' partial columns, each once, without the number of rows."""
    types = {column.name: column.type for column in columns}
    made = [
        p
        for a in aggregates
        if a.column is not None
        for p in _partials_for(a.function, a.column, types[a.column])
    ]
    return tuple(dict.fromkeys(made))


def _partials_for(function: Function, column: str, kind: str) -> Iterator[Partial]:
    if function in ("sum", "average"):
        yield Partial(f"sum_{column}", sum_type(kind), "sum", column)
    if function in ("count", "average"):
        yield Partial(f"count_{column}", "bigint", "count", column)
    if function == "min":
        yield Partial(f"min_{column}", kind, "min", column)
    if function == "max":
        yield Partial(f"max_{column}", kind, "max", column)
    if function == "approx_distinct":
        yield Partial(f"sketch_{column}", "binary", "sketch", column)


def sum_type(kind: str) -> str:
    """Return the type of a sum: for integers and decimals the widest decimal of their scale, which
    has room for 10^19 of the largest BIGINT and does not wrap; for floating point DOUBLE."""
    if kind in ("float", "double"):
        return "double"
    scale = kind.rstrip(")").rpartition(",")[2] if kind.startswith("decimal") else "0"
    return f"decimal(38,{scale})"


def definition_digest(view: View, event_time: str, columns: Sequence[Column]) -> str:
    """Return a digest of the definition of partials: partials of another digest cannot be used.
    Names of aggregates, and aggregates of the same partials, do not change it."""
    partials = sorted(p.name for p in partials_of(view.aggregates, columns))
    definition = [
        _VERSION,
        view.window // timedelta(microseconds=1),
        event_time,
        sorted(view.group),
        partials,
    ]
    return hashlib.sha256(json.dumps(definition).encode()).hexdigest()[:32]
