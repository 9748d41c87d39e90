"""The SQL of a view: computing an hour's partials from rows, and merging partials. Pure, for DuckDB
and Spark.

`partials_sql` computes partials, both those that are stored and those of hours read from rows;
`view_sql` merges both.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from anabranch.config import Stream, View
from anabranch.config.views import (
    COMPLETE,
    LATE,
    WINDOW_START,
    Aggregate,
    Partial,
    group_column,
    sum_type,
)
from anabranch.protocol.state import State
from anabranch.protocol.watermarks import plan_open_spans

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)

HOUR, RECORDS = "ingest_hour", "records"

LG_K = 12
"""Base-2 logarithm of a sketch's registers: 4,096 of one byte, for estimates within 1.6 per cent
(one standard error)."""
SKETCH_TEXT, SKETCH_WHOLE, ESTIMATE = "sketch_text", "sketch_whole", "sketch_estimate"


@dataclass(frozen=True)
class Dialect:
    """Differences between the engines' SQL: quotes, timestamp types, timestamps as microseconds,
    and sketches of distinct values (of text, of integers, and their union)."""

    quote: str
    moment: str
    to_micros: str
    from_micros: str
    sketch_text: str
    sketch_whole: str
    estimate: str

    def quoted(self, name: str) -> str:
        return f"{self.quote}{name}{self.quote}"

    def micros(self, moment: str) -> str:
        return self.to_micros.format(moment)

    def start_of_window(self, moment: str, width: int) -> str:
        """Return the start of a timestamp's window; windows are aligned to 1970."""
        at = self.micros(moment)
        # The remainder is negative before 1970.
        return self.from_micros.format(f"{at} - (({at} % {width}) + {width}) % {width}")

    def typed(self, expression: str, kind: str) -> str:
        return f"CAST({expression} AS {self.moment if kind == 'timestamp' else kind.upper()})"


_DISTINCT = "list(DISTINCT {0}) FILTER (WHERE {0} IS NOT NULL)"

# DuckDB's connections are in UTC: the cast reads a TIMESTAMP as UTC. The sketch functions are those
# of `serving_layer.views.read`.
DUCKDB = Dialect(
    quote='"',
    moment="TIMESTAMPTZ",
    to_micros="epoch_us({})",
    from_micros="CAST(make_timestamp({}) AS TIMESTAMPTZ)",
    sketch_text=f"{SKETCH_TEXT}({_DISTINCT})",
    sketch_whole=f"{SKETCH_WHOLE}({_DISTINCT})",
    estimate=f"{ESTIMATE}(list({{0}}) FILTER (WHERE {{0}} IS NOT NULL))",
)
SPARK = Dialect(
    quote="`",
    moment="TIMESTAMP",
    to_micros="unix_micros({})",
    from_micros="timestamp_micros({})",
    sketch_text=f"hll_sketch_agg({{}}, {LG_K})",
    sketch_whole=f"hll_sketch_agg({{}}, {LG_K})",
    estimate="hll_sketch_estimate(hll_union_agg({}))",
)


def partial_columns(stream: Stream, view: View) -> tuple[str, ...]:
    return (
        HOUR,
        WINDOW_START,
        *map(group_column, view.group),
        RECORDS,
        *(p.name for p in stream.partials(view)),
    )


def partials_sql(dialect: Dialect, stream: Stream, view: View, rows: str) -> str:
    """Return SQL for the partials of each ingest hour in `rows` (a table, with or without a
    condition), by window and group."""
    q = dialect.quoted
    width = view.window // _MICROSECOND
    keys = [
        q(HOUR),
        dialect.start_of_window(q(stream.window_column), width),
        *(q(name) for name in view.group),
    ]
    names = [HOUR, WINDOW_START, *map(group_column, view.group)]
    columns = [f"{key} AS {q(name)}" for key, name in zip(keys, names, strict=True)]
    columns.append(f"count(*) AS {q(RECORDS)}")
    columns += [
        f"{_partial(dialect, stream, partial)} AS {q(partial.name)}"
        for partial in stream.partials(view)
    ]
    return f"SELECT {', '.join(columns)} FROM {rows} GROUP BY {', '.join(keys)}"


def _partial(dialect: Dialect, stream: Stream, partial: Partial) -> str:
    column = dialect.quoted(partial.column)
    if partial.kind == "sketch" and stream.column_type(partial.column) == "string":
        return dialect.sketch_text.format(column)
    if partial.kind == "sketch":
        return dialect.sketch_whole.format(dialect.typed(column, "bigint"))
    if partial.kind == "count":
        return f"count({column})"
    if partial.kind == "sum":
        return _sum(dialect, column, partial.type)
    return f"{partial.kind}({column})"


def _sum(dialect: Dialect, expression: str, kind: str) -> str:
    return dialect.typed(f"sum({dialect.typed(expression, kind)})", kind)


def view_sql(
    dialect: Dialect, stream: Stream, view: View, state: State, stored: str | None, rows: str
) -> str:
    """Return SQL for the view: one row for each window and group, from the partials in `stored` (a
    table, with or without a condition) and the `rows` of hours without partials. `state`: which
    hours are accepted."""
    q = dialect.quoted
    columns = ", ".join(map(q, partial_columns(stream, view)))
    sources = [f"SELECT {columns} FROM ({partials_sql(dialect, stream, view, rows)})"]
    if stored is not None:
        # Every accepted hour has a row with its provenance, even without records.
        sources.insert(0, f"SELECT {columns} FROM (SELECT * FROM {stored}) WHERE {q(RECORDS)} > 0")
    start = dialect.micros(q(WINDOW_START))
    keys = [q(WINDOW_START), *(q(group_column(name)) for name in view.group)]
    names = [WINDOW_START, *view.group]
    results = [f"{key} AS {q(name)}" for key, name in zip(keys, names, strict=True)]
    results += [f"{_merged(dialect, stream, a)} AS {q(a.name)}" for a in view.aggregates]
    results += [
        f"{_complete(stream, view, state, start)} AS {q(COMPLETE)}",
        f"{_late(dialect, view, start)} AS {q(LATE)}",
    ]
    return (
        f"SELECT {', '.join(results)} FROM ({' UNION ALL '.join(sources)}) GROUP BY "
        f"{', '.join(keys)}"
    )


def _merged(dialect: Dialect, stream: Stream, aggregate: Aggregate) -> str:
    q = dialect.quoted
    name, function = aggregate.column, aggregate.function
    if name is None:
        return _total(dialect, RECORDS)
    if function == "count":
        return _total(dialect, f"count_{name}")
    if function in ("min", "max"):
        return f"{function}({q(f'{function}_{name}')})"
    if function == "approx_distinct":
        return f"coalesce({dialect.estimate.format(q(f'sketch_{name}'))}, 0)"
    kind = sum_type(stream.column_type(name))
    added = _sum(dialect, q(f"sum_{name}"), kind)
    if function == "sum":
        return added
    return f"{dialect.typed(added, 'double')} / nullif({_total(dialect, f'count_{name}')}, 0)"


def _total(dialect: Dialect, name: str) -> str:
    return dialect.typed(f"sum({dialect.quoted(name)})", "bigint")


def _complete(stream: Stream, view: View, state: State, start: str) -> str:
    """Return SQL: whether every hour that can contain events of the window is accepted."""
    assert stream.event_time is not None
    spans = plan_open_spans(stream.event_time, state)
    if spans is None:
        return "false"
    width = view.window // _MICROSECOND
    touched = [
        f"({start} + {width} > {_micros(begin)}"
        + (f" AND {start} <= {_micros(end)})" if end is not None else ")")
        for begin, end in spans
    ]
    return f"coalesce(NOT ({' OR '.join(touched)}), false)"


def _late(dialect: Dialect, view: View, start: str) -> str:
    """Return SQL: the number of records received after the window had ended."""
    begin = dialect.micros(dialect.typed(f"concat({dialect.quoted(HOUR)}, ':00:00Z')", "timestamp"))
    after = view.window // _MICROSECOND
    counted = f"CASE WHEN {begin} >= {start} + {after} THEN {dialect.quoted(RECORDS)} ELSE 0 END"
    return dialect.typed(f"sum({counted})", "bigint")


def _micros(moment: datetime) -> int:
    return (moment - _EPOCH) // _MICROSECOND
