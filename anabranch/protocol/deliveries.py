"""Deliveries of accepted hours to targets of egress: an append-only table beside the stream's
tables.

The newest row of a target is its position: the token of the changes (`serving_layer.changes`) to
continue from. Repeating a delivery restores a row that a crash prevented, or a lost table, and
changes nothing at the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow

from anabranch.common.errors import Transient
from anabranch.common.remote_errors import lake_errors
from anabranch.common.version import VERSION
from anabranch.iceberg.ledger_files import Span, has_many, read, read_since
from anabranch.iceberg.table_schemas import schema_of
from anabranch.protocol.ledger_row import Layer

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from anabranch.iceberg.lake import Lake

DELIVERIES_SCHEMA = schema_of(
    ("sequence!", "long", "order of the deliveries, by commit"),
    ("delivery_id!", "string"),
    ("hour!", "string"),
    ("target!", "string", "its name in the stream's file"),
    ("place!", "string", "the folder's root, or the topic and its id"),
    ("revision!", "int"),
    ("served!", "string", "the layer whose rows they are"),
    ("snapshot_id!", "long", "of main, from which the rows were read"),
    ("rows!", "long"),
    ("files!", "int", "at the target; 0 for a topic"),
    ("token!", "string", "of the changes, to continue from"),
    ("code_version!", "string"),
    ("delivered_at!", "timestamptz"),
)

_ARROW = schema_to_pyarrow(DELIVERIES_SCHEMA)
_COLUMNS = tuple(f.name for f in DELIVERIES_SCHEMA.fields if f.name != "code_version")
# The newest commits, which are searched first for the newest delivery to a target.
_RECENT = 200


@dataclass(frozen=True)
class Delivery:
    """An hour that is complete at a target. `token` is the position in the changes after it."""

    delivery_id: str
    hour: str
    target: str
    place: str
    revision: int
    served: Layer
    snapshot_id: int
    rows: int
    files: int
    token: str
    delivered_at: datetime


def record(lake: Lake, name: str, delivery: Delivery) -> None:
    """Write a delivery, once. One that the table has already becomes the newest: a folder may have
    the content of a change from an earlier delivery. Raises Transient, Terminal without the
    table."""
    first: int | None = None

    def missing(table: Table) -> pa.Table | None:
        nonlocal first
        sequence = table.metadata.next_sequence_number()
        if first is None:
            first = sequence
        else:
            with lake_errors(f"read table {name}"):
                # An earlier attempt may have landed.
                of_hour = read(table, [delivery.hour], ("delivery_id", "sequence", "hour"))
            own_id, since = delivery.delivery_id, first
            if any(
                r["delivery_id"] == own_id and r["sequence"] >= since for r in of_hour.to_pylist()
            ):
                return None
        own = {"sequence": sequence, "code_version": VERSION}
        return pa.Table.from_pylist([vars(delivery) | own], schema=_ARROW)

    if has_many(lake.append(name, missing)):
        try:
            lake.merge_files(name)
        except Transient:
            return  # maintenance merges them


def targets_of(lake: Lake, name: str, hours: Span) -> dict[str, str]:
    """Return a target to which each of some hours was ever delivered. Raises Transient."""
    if not lake.exists(name):
        return {}
    table = lake.load(name)
    with lake_errors(f"read table {name}"):
        rows = read(table, hours, ("hour", "target")).to_pylist()
    return {row["hour"]: row["target"] for row in rows}


def newest(lake: Lake, name: str, target: str, place: str | None = None) -> Delivery | None:
    """Return the newest delivery to a target, at `place` or at any of its places; None if there is
    none. Raises Transient, or Terminal for a missing table."""
    table = lake.load(name)
    recent = max(0, table.metadata.next_sequence_number() - _RECENT)
    with lake_errors(f"read table {name}"):
        for since in (recent, 0) if recent else (0,):
            rows: list[dict[str, Any]] = read_since(table, since, _COLUMNS).to_pylist()
            if own := [
                row for row in rows if row["target"] == target and place in (None, row["place"])
            ]:
                last = max(own, key=itemgetter("sequence"))
                return Delivery(**{key: value for key, value in last.items() if key != "sequence"})
    return None
