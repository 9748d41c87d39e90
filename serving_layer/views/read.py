"""A view for DuckDB and Spark: SQL over the partials of some hours and the rows of the others, each
from one snapshot."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import duckdb

from anabranch.config import Stream, View
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.snapshots import heads
from anabranch.offsets.hours import spans_of
from anabranch.protocol.state import State
from serving_layer.query import Derived, source
from serving_layer.query.datasets import plan_files
from serving_layer.views.hours import partial_hours
from serving_layer.views.sql import DUCKDB, HOUR, SPARK, view_sql


def derive(
    lake: Lake,
    stream: Stream,
    view: View,
    state: State,
    snapshot_id: int | None = None,
    hours: Collection[str] | None = None,
) -> Derived:
    """Return a view of `main` in `state`, for all hours or for `hours`; for another snapshot, from
    rows only. Raises Terminal when `apply` has not created the table of its partials, Refused,
    Transient."""
    name = stream.view_table(view)
    rows, stored = f"{name} rows", f"{name} partials"
    if snapshot_id is not None:
        sql = view_sql(DUCKDB, stream, view, state, None, source(rows))
        return Derived(
            sql,
            {rows: plan_files(stream.table, state.table, snapshot_id, hours)},
            functions_of(stream, view),
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
    return Derived(sql, files, functions_of(stream, view))


def functions_of(stream: Stream, view: View) -> Callable[[duckdb.DuckDBPyConnection], None] | None:
    """Return a function that registers the functions that a view's SQL needs besides DuckDB's own;
    None if it needs none."""
    if all(partial.kind != "sketch" for partial in stream.partials(view)):
        return None
    from serving_layer.views.sketches import add_functions

    return add_functions


def spark_sql(lake: Lake, stream: Stream, view: View, state: State) -> str:
    """Return the same view in Spark SQL, for a session that has the catalog under its configured
    name. It reads fixed snapshots, so its result does not change while they are kept. Raises
    Terminal, Transient."""
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
