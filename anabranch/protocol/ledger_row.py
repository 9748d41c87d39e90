"""A row of the ledger: one decision about one hour, the account that it is based on, and the
operator's act from which it follows.

It has two other forms: the ledger's columns, and the JSON that waits in a branch's properties until
the row has been found in the ledger. A field without a value is None here, null in the ledger, and
absent from the JSON. `Counts` is an account in numbers, for reports: its fields are the keys of the
JSON, in this order.

User and host of an act are as the operating system reports them: a record for colleagues, not a
proof of identity.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from anabranch.common.errors import ConfigurationError
from anabranch.common.json_values import JsonFields, from_json, to_json
from anabranch.offsets.hours import Cut
from anabranch.offsets.position import Ranges, ranges_from_keys, ranges_to_keys

ActName = Literal[
    "restate",
    "accept",
    "replay",
    "override",
    "adopt",
    "redeliver",
    "hold",
    "release",
    "erase",
    "import",
    "undo",
]


@dataclass(frozen=True, slots=True)
class Act(JsonFields):
    """An act of an operator. `why` is None if the operator gave no reason."""

    name: ActName
    user: str
    host: str
    at: datetime
    why: str | None = None


def act_now(name: ActName, why: str | None = None) -> Act:
    """Return an act of this process's user at the current time (UTC). Raises ConfigurationError for
    an empty reason, and for one that the ledger cannot store: bytes that are not UTF-8."""
    if why is not None and not why.strip():
        raise ConfigurationError("--why: expected a reason, found none; nothing was changed")
    try:
        (why or "").encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"--why: expected UTF-8 text, found {why!a}; nothing was changed"
        ) from None
    return Act(name, _user(), socket.gethostname(), datetime.now(UTC), why)


def _user() -> str:
    # In a container whose user id has no name, getpass finds it in LOGNAME or USER.
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


Layer = Literal["speed", "batch"]
Kind = Literal[
    "sealed",
    "accepted",
    "refused",
    "served",
    "expired",
    "erased",
    "undone",
    "redelivered",
    "held",
    "released",
    "erasing",
]

NOTES: tuple[Kind, ...] = ("redelivered", "held", "released", "erasing")
"""The kinds of rows that record an operator's act and decide nothing about their hour."""

Entries = tuple[Mapping[str, Any], ...]
"""Values stored as JSON: expectations, and rows by their position."""


@dataclass(frozen=True, slots=True)
class Account(JsonFields):
    """One partition's part of a balance. `conflicts`: those of `duplicate` with other content."""

    offsets: int
    good: int
    dead: int
    duplicate: int
    gaps: Mapping[str, int]
    erased: int | None = None
    conflicts: int | None = None

    @property
    def gap(self) -> int:
        return sum(self.gaps.values())

    @property
    def total(self) -> int:
        return self.good + self.dead + self.duplicate + self.gap + (self.erased or 0)


@dataclass(frozen=True, slots=True)
class Diff(JsonFields):
    """The difference of speed from batch in rows by kind. `missing`: in batch, not in speed.
    `extra`: in speed, not read by batch. `changed`: with different content. `duplicate`: removed by
    batch as duplicates, which is no difference. `unread`: missing rows at offsets that the speed
    layer's rows did not account for at the time of the comparison. `missing_dead`, `extra_dead`:
    missing and extra rows that the layer without the row has as dead letters."""

    missing: int
    extra: int
    changed: int
    duplicate: int
    unread: int
    sample: Entries | None = None
    missing_dead: int = 0
    extra_dead: int = 0


@dataclass(frozen=True, slots=True)
class QualityResult(JsonFields):
    """The result of the quality gate, with its expectations as JSON."""

    passed: bool
    failed: Entries = ()
    warnings: Entries = ()
    evaluated: int = 0
    suite: str | None = None
    met: Entries = ()
    not_applicable: Entries = ()


@dataclass(frozen=True, slots=True)
class RunFacts(JsonFields):
    """The run that reached a decision: its start, Spark version, number of files and bytes.
    `parent` and `root` are the scheduler's run that started it and the outermost run of that one,
    as OpenLineage clients write them: NAMESPACE/JOB/RUN ID."""

    began: datetime
    spark: str | None = None
    files: int | None = None
    bytes: int | None = None
    parent: str | None = None
    root: str | None = None


@dataclass(frozen=True, slots=True)
class UnknownField:
    """A field that the schema does not contain, and the number of an hour's good records with it.
    `first` and `last` are (partition, offset), ordered by partition, then offset. `sample` is the
    shape of a value as truncated JSON text, `type` the column type of the sampled values; None if
    no value was sampled or all were null."""

    name: str
    records: int
    first: tuple[int, int]
    last: tuple[int, int]
    sample: str | None = None
    type: str | None = None


@dataclass(frozen=True, slots=True)
class UnknownFields(JsonFields):
    """The number of an hour's good records with fields that the schema does not contain, and the
    most frequent of these fields by name; `others` counts the remaining names."""

    records: int
    fields: tuple[UnknownField, ...] = ()
    others: int = 0


@dataclass(frozen=True, kw_only=True)
class HourAccount:
    """The counts of an hour, the sources of its records, the results of its checks, and the run
    that produced them. `erased` is None if nothing of the hour was erased.
    `conflicts`: the duplicates, among `duplicate`, whose content no row that they repeat has; None
    if they were not counted. `imported` is None for
    records of Kafka; for an imported hour it has the source and checksum of its rows
    (`anabranch.protocol.imported`)."""

    offsets: int | None = None
    good: int | None = None
    dead: int | None = None
    duplicate: int | None = None
    gap: int | None = None
    erased: int | None = None
    conflicts: int | None = None
    gaps: Mapping[str, int] | None = None
    partitions: Mapping[int, Account] | None = None
    sources: Mapping[str, int] | None = None
    speed_rows: int | None = None
    diff: Diff | None = None
    quality: QualityResult | None = None
    run: RunFacts | None = None
    unknown: UnknownFields | None = None
    imported: Mapping[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that have a value, as JSON values."""
        values = ((name, getattr(self, name)) for name in ACCOUNT_COLUMNS)
        return {name: to_json(value) for name, value in values if value is not None}


@dataclass(frozen=True, kw_only=True)
class LedgerRow(HourAccount):
    """A decision about an hour. While it waits for its ledger row, `sequence` and `snapshot_id` are
    None and `publish` is the id of its publish. `act` is the operator's act that it follows from,
    `erasure` the part of an erasure that it records (`anabranch.protocol.erasure`). Columns that
    were not read are None too."""

    hour: str
    decision: Kind
    revision: int
    decision_id: str
    recorded_at: datetime
    code_version: str
    served: Layer | None = None
    reason: str | None = None
    cut: Cut | None = None
    act: Act | None = None
    erasure: Mapping[str, Any] | None = None
    snapshot_id: int | None = None
    sequence: int | None = None
    publish: str | None = None

    @staticmethod
    def of(values: Mapping[str, Any]) -> LedgerRow:
        """Return a row with these fields. A year has some 20,000 rows, and the frozen `__init__`
        takes six times as long."""
        row = object.__new__(LedgerRow)
        vars(row).update(values)
        return row

    def as_waiting(self) -> dict[str, Any]:
        """Return the JSON of the row for a branch's properties."""
        row = self.as_columns()
        own = {"id": row.pop("decision_id"), "at": row.pop("recorded_at").isoformat()}
        row |= {"publish": self.publish}
        return own | {name: value for name, value in row.items() if value is not None}

    @staticmethod
    def from_waiting(data: Mapping[str, Any]) -> LedgerRow:
        cut = cut_from(data.get("topic_id"), data["cut"]) if "cut" in data else None
        values = {name: data[name] for name in _WAITING if data.get(name) is not None}
        return LedgerRow(
            decision_id=data["id"],
            recorded_at=datetime.fromisoformat(data["at"]),
            cut=cut,
            **{n: PARSED[n](value) if n in PARSED else value for n, value in values.items()},
        )

    def as_columns(self) -> dict[str, Any]:
        """Return the ledger's columns with JSON values, without the sequence of the append."""
        act = {"act": to_json(self.act)} if self.act is not None else {}
        erasure = {"erasure": self.erasure} if self.erasure is not None else {}
        own = {name: getattr(self, name) for name in _OWN_COLUMNS}
        return own | _cut_columns(self.cut) | self.as_dict() | act | erasure


ACCOUNT_COLUMNS = tuple(f.name for f in fields(HourAccount))
_NO_COLUMNS = ("cut", "act", "erasure", "sequence", "publish")  # or columns of JSON
_OWN_COLUMNS = tuple(
    f.name for f in fields(LedgerRow) if f.name not in (*ACCOUNT_COLUMNS, *_NO_COLUMNS)
)
_WAITING = {*ACCOUNT_COLUMNS, *_OWN_COLUMNS, "act", "erasure", "publish"}


def cut_from(topic_id: str | None, ranges: Mapping[str, Any]) -> Cut:
    """Return the cut of a row from its two columns."""
    return Cut(topic_id or "", ranges_from_keys(ranges))


def _cut_columns(cut: Cut | None) -> dict[str, Any]:
    return {"topic_id": cut.topic_id, "cut": ranges_to_keys(cut.ranges)} if cut is not None else {}


PARSED: dict[str, Callable[[Any], Any]] = {
    "gaps": partial(from_json, dict[str, int]),
    "sources": partial(from_json, dict[str, int]),
    "imported": partial(from_json, dict[str, Any]),
    "erasure": partial(from_json, dict[str, Any]),
    "partitions": partial(from_json, dict[int, Account]),
    "diff": partial(from_json, Diff),
    "quality": partial(from_json, QualityResult),
    "run": partial(from_json, RunFacts),
    "unknown": partial(from_json, UnknownFields),
    "act": partial(from_json, Act),
}
"""Parsers of the JSON columns by name, apart from `cut`, which needs its topic id."""


@dataclass(frozen=True)
class Counts:
    """An hour's account in numbers; None if the ledger has no value. JSON has `erased` and
    `conflicts`, the duplicates with other content, only if they are not 0."""

    offsets: int | None
    good: int | None
    dead: int | None
    duplicate: int | None
    gap: int | None
    erased: int | None = None
    conflicts: int | None = None

    @staticmethod
    def of(account: HourAccount) -> Counts:
        return Counts(*(getattr(account, field.name) for field in fields(Counts)))

    def as_dict(self) -> dict[str, int | None]:
        rare = {"erased": self.erased, "conflicts": self.conflicts}
        return {name: getattr(self, name) for name in COUNTS} | {
            name: number for name, number in rare.items() if number
        }

    @property
    def cells(self) -> list[object]:
        return [getattr(self, name) for name in COUNTS]


TERMS = ("good", "dead", "duplicate", "gap")
COUNTS = ("offsets", *TERMS)


def accounted(account: HourAccount | Counts) -> int | None:
    """Return the offsets that the account's terms cover; None if one is not recorded. Pure."""
    terms = [getattr(account, name) for name in TERMS]
    return sum(terms) + (account.erased or 0) if None not in terms else None


def ranges_of(cut: Cut | None) -> Ranges | None:
    """Return a cut's ranges, ordered by partition."""
    return dict(sorted(cut.ranges.items())) if cut is not None else None


LEAST = 20
"""Fewer records of an hour than these are never too many, unless the stream allows none."""


@dataclass(frozen=True)
class HourShare:
    """Dead letters among an hour's records."""

    dead: int
    records: int

    @staticmethod
    def of(account: HourAccount) -> HourShare | None:
        """Return the share in an hour's account; None without records, or without counts."""
        terms = (account.good, account.dead, account.duplicate)
        dead = account.dead or 0
        return HourShare(dead, sum(n or 0 for n in terms)) if any(terms) else None

    @property
    def share(self) -> float:
        return self.dead / self.records if self.records else 0.0

    @property
    def words(self) -> str:
        return f"{self.dead:,} of {self.records:,} records ({percent(self.share)})"


def is_too_many(count: int, records: int, most: float, least: int = LEAST) -> bool:
    """Return True if `count` of an hour's records are more than the share `most`. Pure."""
    # Decision 64: one bad record in a quiet night must not refuse an hour; 0 % allows none at all.
    return count > most * records and (count >= least or not most)


def objection(what: str, count: int, records: int, most: float, least: int = LEAST) -> str | None:
    """Return an objection to an hour, or a sample, with too many records of a kind; None if there
    is none. Fewer than `least` are never too many, unless the stream allows none. Pure."""
    if not is_too_many(count, records, most, least):
        return None
    return (
        f"{what}: expected at most {percent(most)} of {records:,} records, found {count:,} "
        f"({percent(count / records)})"
    )


def percent(share: float) -> str:
    """Return a share as text, such as `5 %` or `0.3 %`; never 0 % or 100 % for a part. Pure."""
    value = 100 * share
    if 0 < value < 0.1:
        return "less than 0.1 %"
    if 99.9 < value < 100:
        return "more than 99.9 %"
    return f"{value:.1f}".removesuffix(".0") + " %"


# Classes of gaps: offsets that Kafka once had and the batch layer could no longer read.
_GONE = ("compacted", "retention")


def unexplained_counts(diff: Diff | None, gaps: Mapping[str, int] | None) -> dict[str, int]:
    """Return the unexplained counts of a ledger's `diff`, by kind; empty if all are explained.
    Pure. Duplicates that batch removed are not a difference. Missing rows are explained by offsets
    that the speed layer had not read at the time. Extra rows are explained by offsets that Kafka no
    longer had for the batch layer. Both are explained by a dead letter of the other layer: the
    stream's file changed between the layers. Changed content is never explained."""
    if diff is None:
        return {}
    gone = sum((gaps or {}).get(name, 0) for name in _GONE)
    left = {
        "missing": diff.missing - diff.unread - diff.missing_dead,
        "extra": diff.extra - diff.extra_dead - gone,
        "changed": diff.changed,
    }
    return {kind: n for kind, n in left.items() if n > 0}
