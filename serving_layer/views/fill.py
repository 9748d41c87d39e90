"""Fill views: compute the partials of hours accepted or restated since a view was last filled.

1. Find accepted hours for which the view has no partials of the rows that `main` serves; take
   some at a time, oldest first.
2. Compute the partials with DuckDB from the hours' files in that snapshot.
3. Replace these hours' partials in the view's table, in one commit on its head.

Filling is optional: readers compute an hour without partials from its rows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import duckdb
import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow

from anabranch.common.errors import AnabranchError, Terminal, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.common.progress import Progress
from anabranch.common.remote_errors import lake_errors
from anabranch.config import Stream, View
from anabranch.config.views import WINDOW_START
from anabranch.iceberg.commits import Change, Commit
from anabranch.iceberg.expiry import plan_expiry
from anabranch.iceberg.file_io import write_files
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import files_by_hour
from anabranch.iceberg.snapshots import heads
from anabranch.protocol.partials import PROVENANCE_COLUMNS, digest_of
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import State, load_state
from serving_layer.query.datasets import connected, plan_files, quoted, reading_failures
from serving_layer.views.read import PartialHours, functions_of, partial_hours
from serving_layer.views.sql import DUCKDB, HOUR, RECORDS, partials_sql

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
    """Return how far each view of a stream is filled whose table `apply` has created. Raises
    Terminal, Transient."""
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
        if (add_functions := functions_of(stream, view)) is not None:
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
