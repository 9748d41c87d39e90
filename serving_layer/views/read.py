"""A view for DuckDB and Spark: SQL over the partials of some hours and the rows of the others, each
from one snapshot.

Hours are read from partials that were computed from exactly the rows that `main` serves. Only
accepted hours that the batch layer serves have partials. Partials record their inputs: the
acceptance of the hour, its files, and the view's definition. If the ledger and the branches have
one acceptance of the served revision and the partials record it, they are current. If there are
several acceptances (a branch was rolled back, an old hour was restated) or the partials record
another one, the hour's files decide. Any other hour is computed from its rows. So a view always
equals its rows, whatever the order of commits and whichever process is killed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import duckdb
from datasketches import hll_sketch, hll_union, tgt_hll_type
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.config import Stream, View
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import files_by_hour
from anabranch.iceberg.snapshots import heads
from anabranch.offsets.hours import hours_between, spans_of
from anabranch.protocol.ledger import Acceptance, Ledger
from anabranch.protocol.partials import digest_of, filled_hours
from anabranch.protocol.state import State
from serving_layer.query import Derived, source
from serving_layer.query.datasets import plan_files
from serving_layer.views.sql import (
    DUCKDB,
    ESTIMATE,
    HOUR,
    LG_K,
    SKETCH_TEXT,
    SKETCH_WHOLE,
    SPARK,
    view_sql,
)


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
            add_functions=functions_of(stream, view),
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
    return Derived(sql, files, add_functions=functions_of(stream, view))


def functions_of(stream: Stream, view: View) -> Callable[[duckdb.DuckDBPyConnection], None] | None:
    """Return a function that registers the functions that a view's SQL needs besides DuckDB's own;
    None if it needs none."""
    if all(partial.kind != "sketch" for partial in stream.partials(view)):
        return None
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


# Sketches of distinct values (HLL of Apache DataSketches, as in Spark) as functions of DuckDB.


def sketch(values: Sequence[str] | Sequence[int]) -> bytes:
    """Return a sketch of values, in the bytes that Spark's `hll_union_agg` reads: text as UTF-8,
    integers as 64 bits."""
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
    """Register the functions of `serving_layer.views.sql` with a connection."""
    connection.create_function(SKETCH_TEXT, sketch, ["VARCHAR[]"], "BLOB")
    connection.create_function(SKETCH_WHOLE, sketch, ["BIGINT[]"], "BLOB")
    connection.create_function(ESTIMATE, estimate, ["BLOB[]"], "BIGINT")
