"""The checks of the audit: compare an hour's ledger row with new counts from data files and Kafka.

The audit does not trust stored counts: it counts rows and dead letters in the files of `main` and
`batch`, and reads Kafka again as far as the log still contains the hour. Each disagreement is one
sentence with hour, partition, expected and found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any

from anabranch.common.json_values import to_json
from anabranch.kafka.batches import ABORTED, CONTROL
from anabranch.offsets.hours import IMPORTED, Cut, Timeline, shift
from anabranch.operations.audit.count import GONE, Recount
from anabranch.protocol.ledger_row import COUNTS, TERMS, HourAccount, Layer, LedgerRow, accounted

_WORDS = {"rows": "rows of main", "batch": "rows of branch batch", "dead": "dead letters of main"}


@dataclass(frozen=True)
class Disagreement:
    """A disagreement about an hour. `partition` is None if it concerns the whole hour."""

    hour: str
    partition: int | None
    what: str
    expected: str
    found: str

    @property
    def message(self) -> str:
        where = f"hour {self.hour}" + (
            f", partition {self.partition}" if self.partition is not None else ""
        )
        return f"{where}: {self.what}: expected {self.expected}, found {self.found}"

    def as_dict(self) -> dict[str, Any]:
        return vars(self) | {"message": self.message}


@dataclass(frozen=True)
class Audited:
    """An audited hour: its state in table and ledger, and the counts.

    `cut` and `revision` are the table's; None and 0 if it no longer lists the hour. `row`: the
    ledger's newest row. `foreign`: the number of files in `main` that are not in the serving layer;
    `absent`: the number of the serving layer's files that are not in `main`. `gone`: files that are
    missing or damaged in storage, and what was found. `unrepeated`: the number of rows that batch
    removed although they repeat no row; None if not checked. `lookback`: the look-back in hours.
    `kafka`: why Kafka was not read; None if it was. `letters_expired`: the hour's dead letters have
    expired. `was_erased`: rows of the hour were erased since its acceptance.
    """

    hour: str
    served: Layer
    accepted: bool
    revision: int
    cut: Cut | None
    row: LedgerRow | None
    partitions: Mapping[int, Recount]
    foreign: int = 0
    absent: int = 0
    gone: Mapping[str, str] = field(default_factory=dict)
    unrepeated: int | None = None
    lookback: int = 1
    kafka: str | None = None
    letters_expired: bool = False
    was_erased: bool = False

    @property
    def account(self) -> HourAccount:
        return self.row or HourAccount()

    @property
    def is_compacted(self) -> bool:
        """Whether Kafka's log lost records from the middle of the hour."""
        return any(r.kafka is not None and r.kafka.is_compacted for r in self.partitions.values())

    @property
    def is_held(self) -> bool:
        """Whether Kafka's log still contains the whole hour."""
        live = [r for r in self.partitions.values() if r.cut[0] < r.cut[1]]
        return self.kafka is None and all(
            r.kafka is not None and r.kafka.in_kafka == r.cut for r in live
        )

    @property
    def read_of_kafka(self) -> str:
        """How much of the hour was read from Kafka: `whole`, `part` or `not read`."""
        if self.kafka:
            return "not read"
        return "whole" if self.is_held else "part"

    def differs(
        self, what: str, expected: object, found: object, partition: int | None = None
    ) -> Disagreement:
        return Disagreement(self.hour, partition, what, str(expected), str(found))

    def as_dict(self) -> dict[str, Any]:
        return {
            "hour": self.hour,
            "served": self.served,
            "revision": self.revision or (self.row.revision if self.row is not None else 0),
            "ledger": {name: getattr(self.account, name) for name in COUNTS},
            "partitions": {str(p): _partition_dict(r) for p, r in self.partitions.items()},
            "kafka": self.read_of_kafka,
            "kafka_reason": self.kafka,
        }


def find_disagreements(audited: Audited) -> list[Disagreement]:
    """Return all disagreements about one hour: ledger, files, Kafka. Pure."""
    checks = (_check_ledger, _check_files, _check_partitions, _check_totals, _check_kafka)
    return [one for check in checks for one in check(audited)]


def _check_ledger(a: Audited) -> Iterator[Disagreement]:
    row, account = a.row, a.account
    if a.accepted and (row is None or row.decision != "accepted"):
        again = "a restatement" if row is not None else "`anabranch apply`"
        yield a.differs(
            "ledger",
            "a row that accepts the hour, as on branch batch",
            f"none ({again} writes it again)",
        )
        return
    if not a.accepted:
        expected = "the hour accepted on branch batch, as in the ledger"
        yield a.differs(
            "table", expected, "that it is not accepted there (the next batch run rebuilds it)"
        )
    revision = row.revision if row is not None else None
    if a.revision and revision != a.revision:
        yield a.differs(
            "revision", f"{a.revision}, as on branch batch", f"{revision} in the ledger"
        )
    cut = row.cut if row is not None else None
    if a.cut is not None and cut is not None and cut != a.cut:
        yield a.differs(
            "cut", f"{to_json(a.cut)}, as in the table", f"{to_json(cut)} in the ledger"
        )
    size = sum(r.cut[1] - r.cut[0] for r in a.partitions.values())
    if account.offsets is not None and account.offsets != size:
        yield a.differs("ledger", f"{size} offsets, the size of its cut", account.offsets)
    if (closed := accounted(account)) not in (None, size):
        words = " + ".join(f"{getattr(account, name)} {name}" for name in TERMS)
        words += f" + {account.erased} erased" if account.erased else ""
        yield a.differs("balance of the ledger", f"{size} offsets", f"{closed}: {words}")
    gaps = account.gaps
    if gaps is not None and account.gap is not None and sum(gaps.values()) != account.gap:
        yield a.differs(
            "gaps of the ledger", f"{account.gap} in all classes", f"{sum(gaps.values())}: {gaps}"
        )


def built_again(hour: str, is_accepted: bool) -> str:
    """Return the remedy for a lost or damaged file of an hour. Pure."""
    restate = " --restate" if is_accepted else ""
    return f" (`anabranch batch STREAM --hour {hour}{restate}` builds the hour again)"


def _check_files(a: Audited) -> Iterator[Disagreement]:
    for path, found in a.gone.items():
        found += built_again(a.hour, a.accepted)
        yield a.differs("storage", f"the data file {path}", found)
    if a.foreign or a.absent:
        found = (
            f"{a.absent} of its files missing and {a.foreign} other files instead (`anabranch "
            "merge` repairs it)"
        )
        yield a.differs("main", f"the files of the {a.served} layer, which serves it", found)


def _check_partitions(a: Audited) -> Iterator[Disagreement]:
    for p, counted in sorted(a.partitions.items()):
        yield from _check_partition(a, p, counted)


def _check_partition(a: Audited, p: int, counted: Recount) -> Iterator[Disagreement]:
    start, end = counted.cut
    for source, n in counted.outside.items():
        yield a.differs(_WORDS[source], f"none outside the cut [{start}, {end})", n, p)
    for source, n in counted.twice.items():
        yield a.differs(_WORDS[source], "each offset once", f"{n} repeated rows", p)
    for source, n in counted.misplaced.items():
        yield a.differs(_WORDS[source], "only rows of this hour", f"{n} of another hour", p)
    if counted.both:
        yield a.differs(
            "rows and dead letters",
            "each offset in only one of them",
            f"{counted.both} offsets in both",
            p,
        )
    if (kafka := counted.kafka) is None:
        return
    if kafka.not_explained:
        found = (
            f"{kafka.not_explained} stored offsets that Kafka does not return: "
            f"{_spans(kafka.not_given_at)}"
        )
        yield a.differs("Kafka", "all stored offsets", found + _classes(kafka.classes), p)


def _check_totals(a: Audited) -> Iterator[Disagreement]:
    account, counted = a.account, list(a.partitions.values())
    good, duplicate = account.good, account.duplicate
    # The speed layer keeps duplicates.
    rows = good
    if a.served == "speed" and good is not None and duplicate is not None:
        rows = good + duplicate - _erased_duplicates(a)
    totals = (
        ("rows", rows, sum(r.rows for r in counted)),
        ("batch", good, sum(r.batch for r in counted)),
        ("dead", 0 if a.letters_expired else account.dead, sum(r.dead for r in counted)),
    )
    for source, expected, n in totals:
        if expected is not None and expected != n and a.accepted:
            yield a.differs(_WORDS[source], f"{expected}, as in the ledger", f"{n} offsets")
    if a.unrepeated:
        expected_repeat = f"each to repeat a row of the hour or of the {a.lookback} before it"
        yield a.differs(
            "rows that batch removed", expected_repeat, f"{a.unrepeated} that repeat no row"
        )


def _check_kafka(a: Audited) -> Iterator[Disagreement]:
    """Compare Kafka's offsets with the stored ones: only duplicates and erased records may be
    missing from the table, and only gaps from Kafka."""
    if a.kafka is not None or not a.accepted:
        return
    account = a.account
    given = {p: r.kafka for p, r in sorted(a.partitions.items()) if r.kafka is not None}
    nowhere = sum(k.kept_nowhere for k in given.values())
    duplicate = account.duplicate if a.served == "batch" else _erased_duplicates(a)
    if duplicate is not None and a.letters_expired:
        duplicate += account.dead or 0
    if duplicate is not None:
        duplicate += account.erased or 0
    exact = a.is_held and not a.is_compacted
    if duplicate is not None and _is_off(nowhere, duplicate, exact):
        expected = (
            f"{_at_most(exact)}{duplicate} of its offsets neither rows nor dead letters, the "
            "duplicates"
        )
        expected += " and what was erased" if account.erased else ""
        at = "; ".join(
            f"partition {p}: {_spans(k.kept_nowhere_at)}"
            for p, k in given.items()
            if k.kept_nowhere
        )
        yield a.differs("Kafka", expected, f"{nowhere} ({at})" if at else nowhere)
    silent = sum(k.in_kafka[1] - k.in_kafka[0] - k.offsets for k in given.values())
    gap = account.gap
    stored = any(k.not_given for k in given.values())
    if gap is not None and not a.is_compacted and not stored and _is_off(silent, gap, a.is_held):
        yield a.differs(
            "Kafka",
            f"{_at_most(a.is_held)}{gap} offsets that Kafka does not return, the gaps",
            silent,
        )
    if not exact or account.gaps is None:
        return
    for name in (CONTROL, ABORTED):
        number = sum(k.silent_classes.get(name, 0) for k in given.values())
        recorded = account.gaps.get(name, 0)
        if recorded != number:
            yield a.differs(
                "Kafka",
                f"{recorded} offsets of class {name}, as in the ledger",
                f"{number} in its log",
            )


def _erased_duplicates(a: Audited) -> int:
    """Return how many of the duplicates that the speed layer keeps were erased. An erasure removes
    them from its rows but not from the account, which is the batch layer's."""
    good, duplicate = a.account.good, a.account.duplicate
    if a.served == "batch" or not a.was_erased or good is None or duplicate is None:
        return 0
    missing = good + duplicate - sum(r.rows for r in a.partitions.values())
    return min(max(missing, 0), duplicate)


def _is_off(found: int, expected: int, exact: bool) -> bool:
    return found != expected if exact else found > expected


def _at_most(exact: bool) -> str:
    return "" if exact else "at most "


def _classes(classes: Mapping[str, int]) -> str:
    known = [f"{n} {name}" for name, n in classes.items() if n and name not in GONE]
    return f" (its log shows {', '.join(known)})" if known else ""


def _spans(spans: Sequence[tuple[int, int]]) -> str:
    words = [str(s) if e == s + 1 else f"{s} to {e - 1}" for s, e in spans]
    return f"offsets {', '.join(words)}" + (", …" if len(spans) > 2 else "")


def check_adjacent_cuts(cuts: Mapping[str, Cut], timeline: Timeline) -> list[Disagreement]:
    """Return a disagreement for each hour and partition that does not start where the previous hour
    of the same log ends. Pure."""
    adopted = {adoption.hour for adoption in timeline.adoptions}
    disagreements = []
    for hour, cut in sorted(cuts.items()):
        before = cuts.get(shift(hour, -1))
        if (
            before is None
            or cut.topic_id == IMPORTED
            or shift(hour, -1) in adopted
            or before.topic_id != cut.topic_id
        ):
            continue
        for p, (start, _) in sorted(cut.ranges.items()):
            if p in before.ranges and before.ranges[p][1] != start:
                words = f"{before.ranges[p][1]}, the end of hour {shift(hour, -1)}"
                disagreements.append(Disagreement(hour, p, "start of the cut", words, str(start)))
    return disagreements


def check_expired(
    hours: Sequence[str], rows: Mapping[str, LedgerRow], files: Mapping[str, Mapping[str, Sized]]
) -> list[Disagreement]:
    """Return disagreements about expired hours: the newest ledger row's account does not close, or
    a branch still has files of the hour. Pure."""
    found = []
    for hour in hours:
        row = rows.get(hour) or HourAccount()
        if row.offsets is not None and (n := accounted(row)) not in (None, row.offsets):
            found.append(
                Disagreement(hour, None, "balance of the ledger", f"{row.offsets} offsets", str(n))
            )
        for branch, by_hour in files.items():
            if number := len(by_hour.get(hour, ())):
                expected = "no rows of an expired hour (`anabranch maintain` removes them)"
                found.append(Disagreement(hour, None, branch, expected, f"{number} files"))
    return found


@dataclass(frozen=True)
class AuditReport:
    """The audited hours of a stream, and all disagreements: about these hours, then about others.
    `expired`: the number of expired hours, which have no rows to count."""

    stream: str
    hours: tuple[Audited, ...]
    disagreements: list[Disagreement]
    expired: int = 0

    @property
    def agrees(self) -> bool:
        return not self.disagreements

    def of_hour(self, hour: str) -> list[Disagreement]:
        return [d for d in self.disagreements if d.hour == hour]

    def as_dict(self) -> dict[str, Any]:
        known = {audited.hour for audited in self.hours}
        hours = [
            one.as_dict() | {"disagreements": [_without_hour(d) for d in self.of_hour(one.hour)]}
            for one in self.hours
        ]
        return {
            "stream": self.stream,
            "agrees": self.agrees,
            "expired": self.expired,
            "hours": hours,
            "other_disagreements": [d.as_dict() for d in self.disagreements if d.hour not in known],
        }


def build_report(
    stream: str, audited: Sequence[Audited], more: Sequence[Disagreement], expired: int = 0
) -> AuditReport:
    """Return the report. `more`: disagreements across hours, also of hours not audited. Pure."""
    known = {a.hour for a in audited}
    found = [
        d for a in audited for d in (*find_disagreements(a), *(m for m in more if m.hour == a.hour))
    ]
    found += [d for d in more if d.hour not in known]
    return AuditReport(stream, tuple(audited), found, expired)


def _without_hour(disagreement: Disagreement) -> dict[str, Any]:
    return {key: value for key, value in disagreement.as_dict().items() if key != "hour"}


def _partition_dict(counted: Recount) -> dict[str, Any]:
    kafka = None
    if counted.kafka is not None:
        kafka = {
            "held": list(counted.kafka.in_kafka),
            "given": counted.kafka.offsets,
            "kept_nowhere": counted.kafka.kept_nowhere,
            "not_given": counted.kafka.not_given,
        }
    return {
        "cut": list(counted.cut),
        "rows": counted.rows,
        "batch": counted.batch,
        "dead": counted.dead,
        "twice": sum(counted.twice.values()),
        "outside": sum(counted.outside.values()),
        "misplaced": sum(counted.misplaced.values()),
        "kafka": kafka,
    }
