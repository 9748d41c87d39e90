"""The ledger: every decision about every hour, append-only, ordered by the table's sequence
numbers.

A decision stays in the properties of its branch until its row has been found in the ledger. So the
next process writes a row that a crash prevented.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import attrgetter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.table import Table

from anabranch.common.errors import Refused, Transient
from anabranch.common.json_values import parse, read_stored
from anabranch.common.remote_errors import lake_errors
from anabranch.common.version import VERSION
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.ledger_files import (
    FIRST_HOUR,
    PerFile,
    Span,
    has_many,
    newest_ids,
    read,
    read_since,
    removed_through,
)
from anabranch.iceberg.snapshots import snapshots_by_commit
from anabranch.iceberg.table_schemas import schema_of
from anabranch.offsets.hours import Cut
from anabranch.protocol.ledger_row import (
    ACCOUNT_COLUMNS,
    NOTES,
    PARSED,
    Account,
    Act,
    Diff,
    HourAccount,
    Kind,
    Layer,
    LedgerRow,
    cut_from,
    unexplained_counts,
)
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import Accepted, State, load_state

LOG = logging.getLogger(__name__)

# The prefix of the reason of an hour that an operator accepted although rules failed.
BY_CHOICE = "accepted by choice"

LEDGER_SCHEMA = schema_of(
    ("sequence!", "long", "order of the decisions, by commit"),
    ("decision_id!", "string"),
    ("hour!", "string"),
    (
        "decision!",
        "string",
        "sealed, accepted, refused, served, expired, erased, undone; or an act",
    ),
    ("revision!", "int"),
    ("served", "string", "the layer that main serves the hour from"),
    ("topic_id", "string"),
    ("cut", "string", 'JSON {"partition": [start, end]}'),
    ("offsets", "long"),
    ("good", "long"),
    ("dead", "long"),
    ("duplicate", "long"),
    ("gap", "long"),
    ("gaps", "string", "JSON {class: offsets}"),
    ("speed_rows", "long"),
    (
        "diff",
        "string",
        "JSON {missing, extra, changed, duplicate, unread, sample, missing_dead, extra_dead}",
    ),
    ("quality", "string", "JSON {passed, failed, warnings, evaluated, suite, met}"),
    ("snapshot_id", "long", "of the publish, on main if it changed main"),
    ("reason", "string"),
    ("code_version!", "string"),
    ("recorded_at!", "timestamptz"),
    (
        "partitions",
        "string",
        'JSON {"partition": {offsets, good, dead, duplicate, gaps, erased, conflicts}}',
    ),
    ("sources", "string", "JSON {kafka, accepted, dead_letters, speed}: records by source"),
    ("run", "string", "JSON {began, spark, files, bytes, parent, root}"),
    (
        "unknown",
        "string",
        "JSON {records, fields, others}: fields that the schema does not contain",
    ),
    ("act", "string", "JSON {name, user, host, at, why}: the operator's act"),
    ("erased", "long", "offsets whose records were erased"),
    ("erasure", "string", "JSON: a request with keyed hashes, or what it removed of an hour"),
    ("imported", "string", "JSON {source, files, rows, checksum}: of an imported hour"),
    ("conflicts", "long", "duplicates whose content no row that they repeat has"),
)

_JSON = ("cut", *PARSED)
BULKY = ("partitions", "sources", "quality", "diff", "cut", "run", "unknown", "erasure", "imported")
"""The long columns, which many readers do not need."""

BULKY_EXCEPT_ERASURE = tuple(name for name in BULKY if name != "erasure")
"""The long columns that readers of erasures do not need."""

ACT_COLUMNS = (
    "sequence",
    "decision_id",
    "hour",
    "decision",
    "revision",
    "served",
    "reason",
    "code_version",
    "recorded_at",
    "act",
)
"""The columns that `Ledger.acts` reads."""

_OF_REQUESTS = (*ACT_COLUMNS, "erasure")
_ORDER = attrgetter("sequence", "recorded_at", "hour", "decision_id")
_AT_ONCE = 1_000  # decisions in one commit
# A decision is older than the append of its row, by clocks that differ by less than this.
_MAX_CLOCK_DIFFERENCE = timedelta(hours=2)
_NOTHING = HourAccount()
_ARROW = schema_to_pyarrow(LEDGER_SCHEMA)
_NOTES = pa.array(NOTES, pa.string())
_DECIDED = ("hour", "recorded_at", "decision")
# Decisions after which a refusal stays.
_DECIDE_NO_REFUSAL = pa.array(("sealed", "erased", *NOTES), pa.string())


def decision(
    hour: str,
    kind: Kind,
    revision: int,
    cut: Cut | None,
    now: datetime,
    id: str | None = None,
    *,
    served: Layer | None = None,
    reason: str | None = None,
    account: HourAccount = _NOTHING,
    act: Act | None = None,
    erasure: Mapping[str, Any] | None = None,
) -> LedgerRow:
    """Return a decision of the time `now`, with its cut's offset count if `account` has none."""
    counted = {name: getattr(account, name) for name in ACCOUNT_COLUMNS}
    if cut is not None and account.offsets is None:
        counted["offsets"] = cut.offsets
    return LedgerRow(
        hour=hour,
        decision=kind,
        revision=revision,
        decision_id=id or new_id(),
        recorded_at=now,
        code_version=VERSION,
        served=served,
        reason=reason,
        cut=cut,
        act=act,
        erasure=erasure,
        **counted,
    )


class Ledger:
    """A stream's ledger. Each method loads it, and raises Transient without an answer."""

    def __init__(self, lake: Lake, name: str) -> None:
        self._lake, self._name = lake, name

    @property
    def name(self) -> str:
        return self._name

    def record_waiting(
        self, state: State, confirmed: frozenset[str] = frozenset()
    ) -> frozenset[str]:
        """Write the decisions that wait on the branches, each with the snapshot of its publish.

        Returns the ids found in the ledger, with those `confirmed` before.
        """
        waiting = [row for row in state.decisions if row.decision_id not in confirmed]
        made = snapshots_by_commit(state.table) if waiting else {}
        return confirmed | self.record(
            replace(row, snapshot_id=made.get(row.publish or "")) for row in waiting
        )

    def record(self, waiting: Iterable[LedgerRow]) -> frozenset[str]:
        """Write the decisions that the ledger does not contain yet; return the ids found in it.

        Compacts some files if there are very many.
        """
        wanted = sorted({row.decision_id: row for row in waiting}.values(), key=attrgetter("hour"))
        parts = [wanted[i : i + _AT_ONCE] for i in range(0, len(wanted), _AT_ONCE)]
        return frozenset[str]().union(
            *(self._record({r.decision_id: r for r in part}) for part in parts)
        )

    def _record(self, wanted: Mapping[str, LedgerRow]) -> frozenset[str]:
        known: set[str] = set()

        def missing(table: Table) -> pa.Table | None:
            # Every attempt computes it: another process may have restored the same rows.
            known.update(_known(table, wanted))
            rows = plan_missing(wanted, known)
            for row in rows:
                LOG.debug(
                    "ledger %s: %s %s revision %s", self._name, row.hour, row.decision, row.revision
                )
            return _to_arrow(rows, table.metadata.next_sequence_number()) if rows else None

        # Decision 12: an append whose answer is lost needs no fence. The next attempt requires the
        # same head, so one of the two is refused and looks for missing rows again.
        table = self._lake.append(self._name, missing)
        recorded = frozenset(wanted if known >= set(wanted) else _known(table, wanted))
        if has_many(table):
            try:
                self._lake.merge_files(self._name)
            except Transient as error:
                LOG.warning("ledger %s: compaction postponed: %s", self._name, error)
        return recorded

    def history(
        self, hours: Span | Collection[str] | None = None, without: Collection[str] = ()
    ) -> list[LedgerRow]:
        """Return the decisions about `hours`, or all if None, oldest first. Columns `without` are
        not read and are None.

        Opens only files that may contain one of the hours: pass the hours that are needed. Raises
        Transient.
        """
        if hours is not None and not isinstance(hours, Span) and not hours:
            return []
        return self._history(self._lake.load(self._name), hours, without)

    def history_and_state(
        self, rows_table: str, hours: Span | Collection[str] | None, without: Collection[str] = ()
    ) -> tuple[list[LedgerRow], State]:
        """Return the decisions as `history` does, followed by those that still wait on a branch of
        the stream's table (of any hour), and the state of that table. The state is the result of
        exactly these decisions. Raises Transient.

        Loads both tables again if the ledger changed meanwhile: a publish could have removed its
        newest decisions from the branches.
        """
        table = self._lake.load(self._name)
        while True:
            state = load_state(self._lake, rows_table)
            before, table = table, self._lake.load(self._name)
            # A publish removes confirmed decisions from the branches. Between two loads a decision
            # may have been in neither.
            if table.metadata.current_snapshot_id == before.metadata.current_snapshot_id:
                break
        return recorded_and_waiting(self._history(table, hours, without), state), state

    def _history(
        self, table: Table, hours: Span | Collection[str] | None, without: Collection[str]
    ) -> list[LedgerRow]:
        with lake_errors(f"read ledger {self._name}"):
            return _decisions(read(table, hours, _columns(without)))

    def history_since(self, sequence: int, without: Collection[str] = ()) -> list[LedgerRow]:
        """Return the decisions from this sequence number on, oldest first; else as `history`."""
        table = self._lake.load(self._name)
        with lake_errors(f"read ledger {self._name}"):
            return _decisions(read_since(table, sequence, _columns(without)))

    def acts(self) -> list[LedgerRow]:
        """Return the rows that follow from operators' acts, with rows that decide nothing, oldest
        first; only the columns in `ACT_COLUMNS`. Raises Transient."""
        table = self._lake.load(self._name)
        with lake_errors(f"read ledger {self._name}"):
            answers = _ACTS.ask(table).values()
        return sorted((row for rows in answers for row in rows), key=_ORDER)

    def requests(self, hours: Collection[str]) -> list[LedgerRow]:
        """Return the erasure requests under these hours, oldest first. Raises Transient."""
        table = self._lake.load(self._name)
        with lake_errors(f"read ledger {self._name}"):
            rows = read(table, hours, _OF_REQUESTS)
        return _in_order(rows.filter(pc.equal(rows["decision"], "erasing")))

    def first_hour(self) -> str:
        """Return the first hour that the ledger keeps; empty if it keeps all. Raises Transient."""
        return self._lake.load(self._name).properties.get(FIRST_HOUR, "")

    def removed_through(self) -> int:
        """Return the highest sequence of a removed row; 0 without one. Raises Transient."""
        return removed_through(self._lake.load(self._name))

    def remarkable_hours(self) -> frozenset[str]:
        """Return the hours whose newest decision is a refusal, and hours with offsets lost to
        retention or with an unexplained difference between the layers. Raises Transient."""
        with lake_errors(f"read ledger {self._name}"):
            answers = _REMARKABLE.ask(self._lake.load(self._name)).values()
        return _refused_last([decided for _, decided in answers]).union(
            *(hours for hours, _ in answers)
        )

    def acceptances(self) -> frozenset[Acceptance]:
        """Return all acceptances of hours and all erasures in the ledger. Raises Transient."""
        with lake_errors(f"read ledger {self._name}"):
            return frozenset[Acceptance]().union(
                *_ACCEPTANCES.ask(self._lake.load(self._name)).values()
            )

    def accepted(self, state: State, hour: str) -> Accepted | None:
        """Return the accepted revision of an hour, from the ledger if the state no longer lists it;
        None if the hour is not accepted.

        Raises Refused if the ledger does not have it.
        """
        if not state.is_accepted(hour) or hour in state.accepted:
            return state.accepted.get(hour)
        last = last_accepted(self.history([hour]))
        # Without its cut the hour would be built over other offsets than its accepted revision.
        if last is None:
            raise Refused(
                f"hour {hour}: expected its cut in the ledger {self._name}, found none; the hour "
                "is unchanged: roll the ledger back to a snapshot that has it"
            )
        return last

    def remembering(self, state: State, hours: Iterable[str]) -> State:
        """Return the state with all accepted hours of `hours` listed; hours that it no longer lists
        are read from the ledger.

        Raises Refused if the ledger does not have one.
        """
        return plan_remembering(state, hours, lambda hour: self.accepted(state, hour))


def plan_missing(wanted: Mapping[str, LedgerRow], known: Collection[str]) -> list[LedgerRow]:
    """Return the decisions of `wanted` (by id) whose ids are not in `known`. Pure."""
    return [row for id, row in wanted.items() if id not in known]


def _known(table: Table, wanted: Mapping[str, LedgerRow]) -> set[str]:
    """Return the ids of `wanted` that the ledger contains. Files are read only for ids whose append
    the metadata may no longer list; a decision is always among the rows of its hour."""
    named, since = newest_ids(table)
    older = {
        row.hour
        for id, row in wanted.items()
        # A decision is made before its row is appended, and by another clock: without the margin, a
        # row just before `since` would be appended twice.
        if id not in named and row.recorded_at < since + _MAX_CLOCK_DIFFERENCE
    }
    if not older:
        return set(wanted) & named
    with lake_errors(f"read ledger {'.'.join(table.name())}"):
        return set(wanted) & (named | _union(_IDS.ask(table, older)))


def _columns(without: Collection[str]) -> tuple[str, ...]:
    return tuple(name for name in LEDGER_SCHEMA.column_names if name not in without)


def _decisions(rows: pa.Table) -> list[LedgerRow]:
    """Return the rows that decide something about an hour."""
    return _in_order(rows.filter(pc.invert(pc.is_in(rows["decision"], _NOTES))))


def _in_order(rows: pa.Table) -> list[LedgerRow]:
    # The hour orders rows of the same commit and time, in whatever files they are.
    return sorted(_from_arrow(rows), key=_ORDER)


def recorded_and_waiting(recorded: Sequence[LedgerRow], state: State) -> list[LedgerRow]:
    """Return the ledger's decisions, then those that wait on a branch, of any hour. Pure."""
    ids = {row.decision_id for row in recorded}
    waiting = (row for row in state.decisions if row.decision_id not in ids)
    return [*recorded, *(row for row in waiting if row.decision not in NOTES)]


def open_refusals(rows: Iterable[LedgerRow]) -> dict[str, LedgerRow]:
    """Return, by hour, the refusal without a later acceptance, override or expiry. Pure."""
    refusals: dict[str, LedgerRow] = {}
    for row in rows:
        if row.decision == "refused":
            refusals[row.hour] = row
        elif row.decision in ("accepted", "served", "expired"):
            refusals.pop(row.hour, None)
    return refusals


def _refused_last(decided: Sequence[pa.Table]) -> frozenset[str]:
    """Return the hours whose newest decision is a refusal, from the decisions in all files."""
    rows = pa.concat_tables(decided) if decided else _ARROW.empty_table()
    ever = rows["hour"].filter(pc.equal(rows["decision"], "refused"))
    # Few hours were ever refused, whatever the age of the ledger.
    some = rows.filter(pc.is_in(rows["hour"], ever.combine_chunks()))
    last: dict[str, tuple[datetime, str]] = {}
    for hour, at, decision in zip(*(some[name].to_pylist() for name in _DECIDED), strict=True):
        last[hour] = max(last.get(hour, (at, decision)), (at, decision))
    return frozenset(hour for hour, (_, decision) in last.items() if decision == "refused")


@dataclass(frozen=True)
class Acceptance:
    """An accepted revision of an hour, or an erasure in it, with the unique id of the decision."""

    hour: str
    revision: int
    decision_id: str


def _acceptances(rows: pa.Table) -> frozenset[Acceptance]:
    accepted = rows.filter(pc.is_in(rows["decision"], pa.array(["accepted", "erased"])))
    columns = (accepted[name].to_pylist() for name in ("hour", "revision", "decision_id"))
    return frozenset(Acceptance(*values) for values in zip(*columns, strict=True))


def _act_rows(rows: pa.Table) -> tuple[LedgerRow, ...]:
    return tuple(_from_arrow(rows.filter(pc.is_valid(rows["act"]))))


def _union(answers: Mapping[str, frozenset[str]]) -> frozenset[str]:
    return frozenset[str]().union(*answers.values())


def _ids(rows: pa.Table) -> frozenset[str]:
    return frozenset(rows["decision_id"].to_pylist())


def _remarkable(rows: pa.Table) -> tuple[frozenset[str], pa.Table]:
    """Return the hours with losses or differences, and all decisions about hours."""
    # Most rows have one of few values.
    diffs = [
        text
        for text in rows["diff"].unique().to_pylist()
        if text
        and unexplained_counts(read_stored("ledger, diff", text, partial(parse, Diff)), None)
    ]
    gaps = [
        text
        for text in rows["gaps"].unique().to_pylist()
        if text
        and read_stored("ledger, gaps", text, partial(parse, dict[str, int])).get("retention")
    ]
    found = [
        pc.is_in(rows[name], pa.array(texts, rows[name].type))
        for name, texts in (("diff", diffs), ("gaps", gaps))
    ]
    hours = rows["hour"].filter(pc.or_(*found))
    decides = pc.invert(pc.is_in(rows["decision"], _DECIDE_NO_REFUSAL))
    return frozenset(hours.to_pylist()), rows.select(_DECIDED).filter(decides)


_IDS = PerFile(("decision_id",), _ids)
_REMARKABLE = PerFile(("hour", "decision", "recorded_at", "diff", "gaps"), _remarkable)
_ACCEPTANCES = PerFile(("hour", "decision", "revision", "decision_id"), _acceptances)
_ACTS = PerFile(ACT_COLUMNS, _act_rows)


def last_accepted(rows: Iterable[LedgerRow]) -> Accepted | None:
    """Return the newest accepted revision in the rows of one hour, with its cut. Pure."""
    revisions = [
        Accepted(row.revision, row.cut, by_choice=(row.reason or "").startswith(BY_CHOICE))
        for row in rows
        if row.decision == "accepted" and row.cut is not None and row.cut.ranges
    ]
    return max(revisions, key=attrgetter("revision"), default=None)


def with_waiting(state: State, hour: str, recorded: Iterable[LedgerRow]) -> list[LedgerRow]:
    """Return the decisions about an hour: the ledger's, then those that wait on a branch. Pure."""
    rows = {row.decision_id: row for row in (*recorded, *state.decisions) if row.hour == hour}
    return [row for row in rows.values() if row.decision not in NOTES]


def partitions_before(
    state: State, hour: str, recorded: Iterable[LedgerRow]
) -> Mapping[int, Account]:
    """Return the account of each partition in the accepted revision of an hour, from its rows;
    empty if there is none. For an hour that is not accepted, the erased offsets. Pure."""
    rows = with_waiting(state, hour, recorded)
    if state.is_accepted(hour):
        row = newest(rows).get(hour)
        return (row.partitions if row is not None else None) or {}
    counts = Counter[int]()
    for row in rows:
        if row.decision == "erased" and row.erasure is not None:
            counts.update({int(p): n for p, n in row.erasure["partitions"].items()})
    return {p: Account(n, 0, 0, 0, {}, n) for p, n in sorted(counts.items())}


def plan_remembering(
    state: State, hours: Iterable[str], read: Callable[[str], Accepted | None]
) -> State:
    """Return the state with all accepted hours of `hours` listed; `read` returns the revision of an
    hour that the state no longer lists."""
    forgotten = [h for h in hours if h not in state.accepted and state.is_accepted(h)]
    recalled = {h: a for h in forgotten if (a := read(h)) is not None}
    return replace(state, accepted=state.accepted | recalled) if recalled else state


def newest(rows: Iterable[LedgerRow]) -> dict[str, LedgerRow]:
    """Return the current row of each hour in the ledger.

    The newest decision of an hour counts; fields that it lacks (counts, quality) come from the
    newest decision that has them. A refusal after an acceptance changes only the reason, since the
    accepted revision stays. A change of the serving layer changes only that layer, an erasure only
    the account. An expired hour keeps the account of its accepted revision. Before an undone import
    nothing counts.
    """
    by_hour: dict[str, LedgerRow] = {}
    for row in rows:
        by_hour[row.hour] = _fold(by_hour.get(row.hour), row)
    return dict(sorted(by_hour.items()))


def _fold(before: LedgerRow | None, row: LedgerRow) -> LedgerRow:
    if before is None or row.decision == "undone":
        return replace(row, reason=None) if row.decision in ("served", "erased") else row
    values = {k: v for k, v in vars(row).items() if v is not None}
    if row.decision == "served":
        values = {k: v for k, v in values.items() if k in ("served", "sequence")}
    elif row.decision == "erased":
        values = {k: v for k, v in values.items() if k in _ERASED}
    elif row.decision == "expired":
        values = {
            k: v
            for k, v in values.items()
            if k in ("decision", "reason", "recorded_at", "sequence")
        }
    elif before.decision == "accepted" and row.decision in ("refused", "sealed"):
        values = {k: v for k, v in values.items() if k in ("served", "reason", "sequence")}
    elif row.decision == "accepted":
        values = {"reason": None, "erased": None, "conflicts": None} | values
    return LedgerRow.of(vars(before) | values | {"act": row.act})


_ERASED = ("good", "dead", "erased", "partitions", "sequence")


def _from_arrow(table: pa.Table) -> list[LedgerRow]:
    columns = {name: table[name].to_pylist() for name in table.column_names}
    topic_ids = columns.pop("topic_id", ())
    for name in (name for name in PARSED if name in columns):
        read = _reader(PARSED[name])
        # Most rows have one of few values.
        values = {
            text: read_stored(f"ledger, {name}", text, read)
            for text in table[name].unique().to_pylist()
            if text
        }
        columns[name] = [values.get(text) for text in columns[name]]
    if "cut" in columns:
        cuts: dict[tuple[str | None, str | None], Cut | None] = {(None, None): None}
        columns["cut"] = [_cut(cuts, key) for key in zip(topic_ids, columns["cut"], strict=True)]
    names = tuple(columns)
    return [
        LedgerRow.of(dict(zip(names, values, strict=True)))
        for values in zip(*columns.values(), strict=True)
    ]


def _cut(
    known: dict[tuple[str | None, str | None], Cut | None], key: tuple[str | None, str | None]
) -> Cut | None:
    """Return the cut of the topic id and ranges in `key`; `known` caches it."""
    if key not in known:
        topic_id, ranges = key
        known[key] = (
            read_stored("ledger, cut", ranges, _reader(partial(cut_from, topic_id)))
            if ranges
            else None
        )
    return known[key]


def _reader(parse: Callable[[Any], Any]) -> Callable[[str], Any]:
    """Return a reader of the JSON text of what `parse` takes."""
    return lambda text: parse(json.loads(text))


def _to_arrow(rows: Iterable[LedgerRow], sequence: int) -> pa.Table:
    values = []
    for row in rows:
        columns = row.as_columns()
        columns |= {key: json.dumps(columns[key]) for key in _JSON if key in columns}
        values.append(
            columns | {"sequence": sequence, "recorded_at": row.recorded_at.astimezone(UTC)}
        )
    return pa.Table.from_pylist(values, schema=_ARROW)
