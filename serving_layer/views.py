"""A view for DuckDB and Spark: SQL over the partials of some hours and the rows of the others, each
from one snapshot.

Hours are read from partials that were computed from exactly the rows that `main` serves. Only
accepted hours that the batch layer serves have partials. Partials record their inputs: the
acceptance of the hour, its files, and the view's definition. If the ledger and the branches have
one acceptance of the served revision and the partials record it, they are current. If there are
several acceptances (a branch was rolled back, an old hour was restated) or the partials record
another one, the hour's files decide. Any other hour is computed from its rows. So a view always
equals its rows, whatever the order of commits and whichever process is killed.

`partials_sql` computes partials, both those that are stored and those of hours read from rows;
`view_sql` merges both.

`fill` computes the partials of hours accepted or restated since a view was last filled.

1. Find accepted hours for which the view has no partials of the rows that `main` serves; take
   some at a time, oldest first.
2. Compute the partials with DuckDB from the hours' files in that snapshot.
3. Replace these hours' partials in the view's table, in one commit on its head.

Filling is optional: readers compute an hour without partials from its rows.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import duckdb
import pyarrow as pa
from datasketches import hll_sketch, hll_union, tgt_hll_type
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.common.errors import AnabranchError, Terminal, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.common.logs import Progress
from anabranch.common.remote_errors import lake_errors
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
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.expiry import plan_expiry
from anabranch.iceberg.file_io import write_files
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import files_by_hour
from anabranch.iceberg.snapshots import heads
from anabranch.offsets.hours import hours_between, spans_of
from anabranch.protocol.ledger import Acceptance, Ledger
from anabranch.protocol.partials import PROVENANCE_COLUMNS, digest_of, filled_hours
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import State, load_state
from anabranch.protocol.watermarks import plan_open_spans
from serving_layer.query import Derived, source
from serving_layer.query.datasets import connected, plan_files, quoted, reading_failures

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
# of `serving_layer.views`.
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
    """Return SQL for the view: a row for each window and group, of the partials in `stored` (a
    table or condition) and other hours' `rows`. `state`: which hours are accepted."""
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


@dataclass(frozen=True)
class PartialHours:
    """A view's hours in one load of both tables. `taken`: the hours to read from partials, with
    their files. `lacking`: the accepted hours without current partials. `decisions`: the acceptance
    of each hour that has only one known."""

    partials: Table
    taken: Mapping[str, Collection[DataFile]]
    lacking: tuple[str, ...]
    decisions: Mapping[str, str]


def serves_accepted(state: State, hour: str) -> bool:
    """Return whether `main` serves the hour's accepted revision."""
    is_there = state.is_accepted(hour) and not state.is_expired(hour)
    return is_there and state.served_by(hour) == "batch" and hour not in state.retained_hours


def plan_known(
    state: State, acceptances: Iterable[Acceptance], hours: Iterable[str]
) -> dict[str, str]:
    """Return the decision that accepted each of `hours`, which `main` serves as accepted; without
    hours that have several possible decisions, or whose rows an erasure changed since.
    `acceptances`: from a ledger that was loaded after the state. Pure."""
    waiting = {
        Acceptance(d.hour, d.revision, d.decision_id)
        for d in state.decisions
        if d.decision in ("accepted", "erased")
    }
    by_hour: dict[str, set[str]] = defaultdict(set)
    for one in {*acceptances, *waiting}:
        remembered = state.accepted.get(one.hour)
        if remembered is None or remembered.revision == one.revision:
            by_hour[one.hour].add(one.decision_id)
    return {h: next(iter(ids)) for h in hours if len(ids := by_hour[h]) == 1}


def partial_hours(lake: Lake, stream: Stream, view: View, state: State) -> PartialHours:
    """Return which hours of a view are read from its partials, for `main` in `state`. Raises
    Terminal when `apply` has not created the partials' table, Transient."""
    partials = lake.load(stream.partials_table(view))
    # If main is not merged from its current branches, only its rows are known.
    if not state.is_merged:
        return PartialHours(partials, {}, (), {})
    timeline = state.timeline
    served = [h for h in hours_between(timeline.first, timeline.open) if serves_accepted(state, h)]
    known = plan_known(state, Ledger(lake, stream.hours_table).acceptances(), served)
    definition = stream.definition(view)
    files_of = files_by_hour(partials, "main")
    filled = {
        h: f for h, f in filled_hours(partials, files_of).items() if f.definition == definition
    }
    taken = {h for h in served if h in filled and filled[h].decision == known.get(h)}
    if doubtful := [h for h in served if h in filled and h not in taken]:
        files = files_by_hour(state.table, "main", doubtful)
        taken |= {h for h in doubtful if digest_of(files.get(h, ())) == filled[h].files}
    lacking = tuple(h for h in served if h not in taken)
    return PartialHours(partials, {h: files_of[h].values() for h in taken}, lacking, known)


def derive(
    lake: Lake,
    stream: Stream,
    view: View,
    state: State,
    snapshot_id: int | None = None,
    hours: Collection[str] | None = None,
) -> Derived:
    """Return a view of `main` in `state`, for all hours or `hours`; another snapshot's from rows
    only. Raises Terminal without its partials' table, Refused, Transient."""
    name = stream.view_table(view)
    rows, stored = f"{name} rows", f"{name} partials"
    if snapshot_id is not None:
        sql = view_sql(DUCKDB, stream, view, state, None, source(rows))
        return Derived(
            sql,
            {rows: plan_files(stream.table, state.table, snapshot_id, hours)},
            add_functions=add_functions,
        )
    pinned = partial_hours(lake, stream, view, state)
    taken = frozenset(pinned.taken).intersection(pinned.taken if hours is None else hours)
    files = {rows: plan_files(stream.table, state.table, heads(state.table)["main"], hours, taken)}
    if taken:
        known = [file for hour in sorted(taken) for file in pinned.taken[hour]]
        files[stored] = replace(
            plan_files(stream.partials_table(view), pinned.partials, None, taken), listed=known
        )
    sql = view_sql(DUCKDB, stream, view, state, source(stored) if taken else None, source(rows))
    return Derived(sql, files, add_functions=add_functions)


def spark_sql(lake: Lake, stream: Stream, view: View, state: State) -> str:
    """Return the view in Spark SQL, for a session with the catalog under its configured name. It
    reads fixed snapshots: the result stays while they do. Raises Terminal, Transient."""
    pinned = partial_hours(lake, stream, view, state)
    main = heads(state.table)["main"]
    rows = f"{lake.catalog_name}.{stream.table} VERSION AS OF {main}"
    if not pinned.taken:
        return view_sql(SPARK, stream, view, state, None, f"(SELECT * FROM {rows})")
    within = " OR ".join(
        f"{HOUR} BETWEEN '{first}' AND '{last}'" for first, last in spans_of(pinned.taken)
    )
    stored = (
        f"{lake.catalog_name}.{stream.partials_table(view)} VERSION AS OF "
        f"{heads(pinned.partials)['main']}"
    )
    return view_sql(
        SPARK,
        stream,
        view,
        state,
        f"{stored} WHERE {within}",
        f"(SELECT * FROM {rows} WHERE NOT ({within}))",
    )


# Sketches of distinct values (HLL of Apache DataSketches, as in Spark) as functions of DuckDB.


def sketch(values: Sequence[str] | Sequence[int]) -> bytes:
    """Return a sketch in the bytes of Spark's `hll_union_agg`: UTF-8, integers of 64 bits."""
    made = hll_sketch(LG_K, tgt_hll_type.HLL_8)
    for value in values:
        made.update(value)
    return bytes(made.serialize_compact())


def estimate(sketches: Sequence[bytes]) -> int:
    """Return the estimated number of distinct values in several sketches, from their union."""
    union = hll_union(LG_K)
    for one in sketches:
        union.update(hll_sketch.deserialize(bytes(one)))
    estimated: float = union.get_result(tgt_hll_type.HLL_8).get_estimate()
    return round(estimated)


def add_functions(connection: duckdb.DuckDBPyConnection) -> None:
    """Register the functions of `serving_layer.views` with a connection."""
    connection.create_function(SKETCH_TEXT, sketch, ["VARCHAR[]"], "BLOB")
    connection.create_function(SKETCH_WHOLE, sketch, ["BIGINT[]"], "BLOB")
    connection.create_function(ESTIMATE, estimate, ["BLOB[]"], "BIGINT")


LOG = logging.getLogger(__name__)

_HOURS_A_COMMIT = 24
_REFUSALS = 20
_UNKNOWN = "unknown"
_ROWS = "rows of the hours"
# Readers get the inputs of partials from the bounds of these columns.
_WRITE = {f"write.metadata.metrics.column.{name}": "full" for name in PROVENANCE_COLUMNS}


@dataclass(frozen=True)
class FilledView:
    """A view with the number of accepted hours read from partials (`filled`), and the accepted
    hours computed from rows (`lacking`)."""

    view: str
    table: str
    filled: int
    lacking: tuple[str, ...]


def fill_status(lake: Lake, stream: Stream) -> list[FilledView]:
    """Return how far a stream's views are filled, if created. Raises Terminal, Transient."""
    state = load_state(lake, stream.table)
    views = [view for view in stream.views if lake.exists(stream.partials_table(view))]
    hours = {view: partial_hours(lake, stream, view, state) for view in views}
    return [
        FilledView(v.name, stream.view_table(v), len(h.taken), h.lacking) for v, h in hours.items()
    ]


def try_fill(lake: Lake, stream: Stream) -> None:
    """Fill every view at the end of a job; log a failure and leave it to the next run."""
    for view in stream.views:
        try:
            fill(lake, stream, view)
        except AnabranchError as error:
            LOG.warning(
                "view %s: not filled, hours are read from rows until the next batch run: %s",
                stream.view_table(view),
                error,
            )


def fill(lake: Lake, stream: Stream, view: View) -> int:
    """Fill a view until every accepted hour has partials, and return the number of hours filled.

    Several processes may do so at once. Raises Terminal for values that cannot be aggregated, and
    when `apply` has not created the view's table for its definition; Transient.
    """
    done = refusals = 0
    progress = Progress(LOG, f"view {stream.view_table(view)}", "hours")
    while refusals < _REFUSALS:
        state = load_state(lake, stream.table)
        hours = partial_hours(lake, stream, view, state)
        if not (some := hours.lacking[:_HOURS_A_COMMIT]):
            return done
        progress.expect(done + len(hours.lacking))
        partials = compute(stream, view, state, hours, some)
        reach(Step.VIEW_COMPUTED)
        if not _replace(lake, stream, view, hours, partials):
            refusals += 1
            continue
        reach(Step.VIEW_FILLED)
        done, refusals = done + len(some), 0
        LOG.info(
            "view %s: filled hours first=%s last=%s", stream.view_table(view), some[0], some[-1]
        )
        progress.step(len(some))
    raise Transient(
        f"fill view {stream.view_table(view)}: expected to commit in {_REFUSALS} attempts, "
        "found each refused; run it again"
    )


def compute(
    stream: Stream, view: View, state: State, hours: PartialHours, some: tuple[str, ...]
) -> pa.Table:
    """Return the partials of some hours, in the columns of the view's table. An hour without
    records gets one row, which records that it was computed. Raises Terminal, Transient."""
    table = hours.partials
    files = files_by_hour(state.table, "main", some)
    provenance = [
        (h, hours.decisions.get(h, _UNKNOWN), digest_of(files.get(h, ())), stream.definition(view))
        for h in some
    ]
    schema = schema_to_pyarrow(table.schema(), include_field_ids=False)
    rows = plan_files(stream.table, state.table, heads(state.table)["main"], some)
    doing = (
        f"compute the partials of view {stream.view_table(view)} of hours {some[0]} to {some[-1]}"
    )
    with connected() as connection:
        connection.register(_ROWS, rows.dataset())
        add_functions(connection)
        connection.register(
            "provenance",
            pa.table(
                dict(zip((HOUR, *PROVENANCE_COLUMNS), zip(*provenance, strict=True), strict=True))
            ),
        )
        partials = partials_sql(DUCKDB, stream, view, quoted(_ROWS))
        sql = (
            f"SELECT provenance.*, p.* EXCLUDE ({HOUR}, {RECORDS}), coalesce(p.{RECORDS}, 0) AS "
            f"{RECORDS} FROM provenance LEFT JOIN ({partials}) p ON p.{HOUR} = provenance.{HOUR} "
            f"ORDER BY provenance.{HOUR}, {WINDOW_START}"
        )
        try:
            with reading_failures(f"{doing}: expected to read every data file"):
                computed = connection.sql(sql).to_arrow_table()
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            raise Terminal(
                f"{doing}: expected values that can be aggregated, found: {error}; change the "
                "view in the stream's file, then run `anabranch apply`"
            ) from error
    if lacking := [name for name in computed.column_names if name not in schema.names]:
        name = ".".join(table.name())
        raise Terminal(
            f"table {name}: expected column {lacking[0]}, found none; run `anabranch apply "
            f"{stream.name}`"
        )
    # Columns of an older definition are null.
    columns = [
        computed[f.name].cast(f.type)
        if f.name in computed.column_names
        else pa.nulls(len(computed), f.type)
        for f in schema
    ]
    return pa.table(columns, schema=schema)


def _replace(
    lake: Lake, stream: Stream, view: View, hours: PartialHours, partials: pa.Table
) -> bool:
    """Replace the partials of their hours; return False if another process committed first."""
    table, id = hours.partials, new_id()
    some = tuple(partials[HOUR].unique().to_pylist())
    now = lake.clock.now(table.metadata.last_updated_ms)
    with lake_errors(f"write the partials of view {stream.view_table(view)}"):
        files = write_files(table, partials, _WRITE)
    reach(Step.VIEW_WRITTEN)
    change = Change("main", tuple(files), clear=some)
    return (
        lake.land(table, Commit(id, heads(table), (change,), expire=plan_expiry(table, id, now)))
        is not None
    )
