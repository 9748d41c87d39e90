"""The ledger: every decision about every hour, append-only, in the order of the table's own sequence.

A decision stays in the properties of the branch that it was published on until its row has been read back, so
whoever runs next restores a row that a crash kept from being written.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, LongType, NestedField, StringType, TimestamptzType

from anabranch import __version__
from anabranch.errors import Refused, Transient
from anabranch.hours import Cut
from anabranch.position import ranges_to_keys
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import Accepted, State
from anabranch.remote_errors import asked
from anabranch.table.lake import Lake
from anabranch.table.ledger_files import PerFile, Span, has_many, read
from anabranch.table.snapshots import snapshots_by_commit

if TYPE_CHECKING:
    from pyiceberg.table import Table

LOG = logging.getLogger(__name__)

# How the reason of an hour begins that an operator accepted in spite of its rules.
BY_CHOICE = "accepted by choice"

LEDGER_SCHEMA = Schema(
    NestedField(1, "sequence", LongType(), required=True, doc="order of the decisions, no clock's"),
    NestedField(2, "decision_id", StringType(), required=True),
    NestedField(3, "hour", StringType(), required=True),
    NestedField(4, "decision", StringType(), required=True, doc="sealed, accepted, refused or served"),
    NestedField(5, "revision", IntegerType(), required=True),
    NestedField(6, "served", StringType(), doc="the layer that main serves the hour from"),
    NestedField(7, "topic_id", StringType()),
    NestedField(8, "cut", StringType(), doc='JSON {"partition": [start, end]}'),
    NestedField(9, "offsets", LongType()),
    NestedField(10, "good", LongType()),
    NestedField(11, "dead", LongType()),
    NestedField(12, "duplicate", LongType()),
    NestedField(13, "gap", LongType()),
    NestedField(14, "gaps", StringType(), doc="JSON {class: offsets}"),
    NestedField(15, "speed_rows", LongType()),
    NestedField(16, "diff", StringType(), doc="JSON {missing, extra, changed, duplicate, unread, sample}"),
    NestedField(17, "quality", StringType(), doc="JSON {passed, failed, warnings, evaluated, suite, met}"),
    NestedField(18, "snapshot_id", LongType(), doc="of the publish, on main where it changed main"),
    NestedField(19, "reason", StringType()),
    NestedField(20, "code_version", StringType(), required=True),
    NestedField(21, "recorded_at", TimestamptzType(), required=True),
    NestedField(22, "partitions", StringType(), doc='JSON {"partition": {offsets, good, dead, duplicate, gaps}}'),
    NestedField(23, "sources", StringType(), doc="JSON {kafka, accepted, dead_letters, speed}: records by where from"),
)

_JSON = ("cut", "gaps", "diff", "quality", "partitions", "sources")
BULKY = ("partitions", "sources", "quality", "diff", "cut")
"""Columns that are long, for readers that need none of them."""

_AT_ONCE = 1_000  # decisions in one commit
_ARROW = schema_to_pyarrow(LEDGER_SCHEMA)


def decision(
    hour: str, kind: str, revision: int, cut: Cut | None, now: datetime, id: str | None = None, **values: Any
) -> dict[str, Any]:
    """A ledger row. `id` and `at` make it a waiting decision in a branch's properties until it is read back."""
    row: dict[str, Any] = {
        "id": id or new_id(), "at": now.isoformat(), "hour": hour, "decision": kind, "revision": revision,
        "code_version": __version__,
    }  # fmt: skip
    if cut is not None:
        row |= {"topic_id": cut.topic_id, "cut": ranges_to_keys(cut.ranges), "offsets": cut.offsets}
    return row | values


def cut_of(row: Mapping[str, Any]) -> Cut | None:
    """The cut that a row tells of, if it does."""
    if row.get("cut") is None:
        return None
    return Cut.from_dict({"topic_id": row.get("topic_id") or "", "ranges": row["cut"]})


def record_waiting(
    lake: Lake, table_name: str, state: State, confirmed: frozenset[str] = frozenset()
) -> frozenset[str]:
    """Write the decisions that wait on the branches, each with its publish's snapshot; returns those that are there.
    Those `confirmed` were read back already."""
    waiting = [d for d in state.decisions if d["id"] not in confirmed]
    made = snapshots_by_commit(state.table) if waiting else {}
    written = record(lake, table_name, [d | {"snapshot_id": made.get(d.get("publish", ""))} for d in waiting])
    return confirmed | written


def record(lake: Lake, table_name: str, waiting: Iterable[Mapping[str, Any]]) -> frozenset[str]:
    """Write the decisions that the ledger does not hold yet; returns the ids that it was read back to hold.

    Whoever finds many files when it has written merges some of them.
    """
    wanted = sorted({str(item["id"]): item for item in waiting}.values(), key=lambda item: str(item["hour"]))
    parts = [wanted[i : i + _AT_ONCE] for i in range(0, len(wanted), _AT_ONCE)]
    return frozenset[str]().union(*(_record(lake, table_name, {str(d["id"]): d for d in part}) for part in parts))


def plan_missing(wanted: Mapping[str, Mapping[str, Any]], known: Collection[str]) -> list[Mapping[str, Any]]:
    """The decisions, of `wanted` by id, that a ledger which knows these ids lacks. Pure."""
    return [item for id, item in wanted.items() if id not in known]


def _record(lake: Lake, table_name: str, wanted: Mapping[str, Mapping[str, Any]]) -> frozenset[str]:
    known: set[str] = set()

    def missing(table: Table) -> pa.Table | None:
        # Asked again by every attempt: whoever was first may have restored the same rows.
        known.update(_known(table, wanted))
        items = plan_missing(wanted, known)
        for item in items:
            LOG.debug("ledger %s: %s %s revision %s", table_name, item["hour"], item["decision"], item["revision"])
        return _to_arrow(items, table.metadata.next_sequence_number()) if items else None

    table = lake.append(table_name, missing)
    held = frozenset(wanted if known >= set(wanted) else _known(table, wanted))
    if has_many(table):
        try:
            lake.merge_files(table_name)
        except Transient as error:
            LOG.warning("ledger %s: files are merged another time: %s", table_name, error)
    return held


def _known(table: Table, wanted: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Which of the decisions the ledger holds; a decision can only be among the rows of its hour."""
    with asked(f"read ledger {'.'.join(table.name())}"):
        found = read(table, {str(d["hour"]) for d in wanted.values()}, ("decision_id", "hour"))
    return set(found["decision_id"].to_pylist()) & set(wanted)


def history(
    lake: Lake, table_name: str, hours: Span | Collection[str] | None = None, without: Collection[str] = ()
) -> list[dict[str, Any]]:
    """The decisions about `hours`, or all, oldest first; JSON columns as values. Of columns `without` nothing is read.

    Only files that may hold one of the hours are opened: whoever needs some asks for these. Raises Transient.
    """
    if hours is not None and not isinstance(hours, Span) and not hours:
        return []
    table = lake.load(table_name)
    columns = tuple(c for c in table.schema().column_names if c not in without)
    with asked(f"read ledger {table_name}"):
        rows = read(table, hours, columns).to_pylist()
    # Rows of one commit that are of one moment: by their hours, in whatever files they are.
    rows.sort(key=lambda row: (row["sequence"], row["recorded_at"], row["hour"]))
    said = [key for key in _JSON if key not in without]
    return [row | {key: json.loads(row[key]) if row.get(key) else None for key in said} for row in rows]


def known_hours(lake: Lake, table_name: str) -> frozenset[str]:
    """The hours that the ledger has a decision about. Raises Transient."""
    with asked(f"read ledger {table_name}"):
        return _HOURS.ask(lake.load(table_name))


def remarkable_hours(lake: Lake, table_name: str) -> frozenset[str]:
    """The hours of which a decision tells of offsets that retention took, or of a difference of the layers that is not
    explained by what the speed layer had not read. Raises Transient."""
    with asked(f"read ledger {table_name}"):
        return _REMARKABLE.ask(lake.load(table_name))


def _all_hours(rows: pa.Table) -> frozenset[str]:
    return frozenset(rows["hour"].unique().to_pylist())


def _remarkable(rows: pa.Table) -> frozenset[str]:
    # Most rows say one of few things.
    diffs = {said for said in rows["diff"].unique().to_pylist() if said and _differs(json.loads(said))}
    gaps = {said for said in rows["gaps"].unique().to_pylist() if said and json.loads(said).get("retention")}
    columns = (rows[name].to_pylist() for name in ("hour", "diff", "gaps"))
    return frozenset(hour for hour, diff, gap in zip(*columns, strict=True) if diff in diffs or gap in gaps)


def _differs(diff: Mapping[str, int]) -> bool:
    return diff["missing"] > (diff.get("unread") or 0) or diff["extra"] > 0 or diff["changed"] > 0


_HOURS = PerFile(("hour",), _all_hours)
_REMARKABLE = PerFile(("hour", "diff", "gaps"), _remarkable)


def accepted(lake: Lake, table_name: str, state: State, hour: str) -> Accepted | None:
    """What is accepted of an hour; of one that is no longer remembered one by one, as the ledger has it.

    Raises Refused when the ledger has not.
    """
    if not state.is_accepted(hour) or hour in state.accepted:
        return state.accepted.get(hour)
    found = last_accepted(history(lake, table_name, [hour]))
    if found is None:
        raise Refused(f"hour {hour}: expected its cut in the ledger {table_name}, found none; it stays as it is")
    return found


def last_accepted(rows: Iterable[Mapping[str, Any]]) -> Accepted | None:
    """The newest accepted revision that rows of one hour tell of, with its cut. Pure."""
    found = [r for r in rows if r["decision"] == "accepted" and r["cut"]]
    if not found:
        return None
    last = max(found, key=lambda r: int(r["revision"]))
    cut = cut_of(last)
    assert cut is not None
    return Accepted(last["revision"], cut, by_choice=str(last["reason"] or "").startswith(BY_CHOICE))


def remembering(lake: Lake, table_name: str, state: State, hours: Iterable[str]) -> State:
    """The state in which each accepted one of `hours` is remembered one by one, forgotten ones as the ledger has them.

    Raises Refused when the ledger has not.
    """
    return plan_remembering(state, hours, lambda hour: accepted(lake, table_name, state, hour))


def plan_remembering(state: State, hours: Iterable[str], read: Callable[[str], Accepted | None]) -> State:
    """The state in which each accepted one of `hours` is remembered: `read` is asked for those that are forgotten."""
    forgotten = [h for h in hours if h not in state.accepted and state.is_accepted(h)]
    found = {h: a for h in forgotten if (a := read(h)) is not None}
    return replace(state, accepted=state.accepted | found) if found else state


def accepted_partitions(lake: Lake, table_name: str, hour: str) -> Mapping[str, Any]:
    """The account of each partition in the accepted revision of an hour; nothing when the ledger does not say."""
    return newest(history(lake, table_name, [hour])).get(hour, {}).get("partitions") or {}


def newest(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By hour, what the ledger says of it now.

    The newest decision of an hour decides; what it does not speak of (counts, quality) is of the newest that does. A
    refusal after an acceptance changes nothing about what is accepted, so only its reason is taken over; who serves an
    hour changes nothing else about it.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        before = found.get(row["hour"], {})
        said = {k: v for k, v in row.items() if v is not None}
        if row["decision"] == "served":
            said = {k: v for k, v in said.items() if k in ("served", "sequence") or not (before or k == "reason")}
        elif before.get("decision") == "accepted" and row["decision"] in ("refused", "sealed"):
            said = {k: v for k, v in said.items() if k in ("served", "reason", "sequence")}
        elif row["decision"] == "accepted":
            before = {k: v for k, v in before.items() if k != "reason"}
        found[row["hour"]] = before | said
    return dict(sorted(found.items()))


def _to_arrow(items: list[Mapping[str, Any]], sequence: int) -> pa.Table:
    rows = []
    for item in items:
        row = {field.name: item.get(field.name) for field in LEDGER_SCHEMA.fields}
        row |= {key: json.dumps(item[key]) if item.get(key) is not None else None for key in _JSON}
        row |= {
            "sequence": sequence,
            "decision_id": item["id"],
            "recorded_at": datetime.fromisoformat(str(item["at"])).astimezone(UTC),
        }
        rows.append(row)
    return pa.Table.from_pylist(rows, schema=_ARROW)
