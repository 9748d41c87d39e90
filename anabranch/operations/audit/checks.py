"""The audit: an hour's account, counted again from the data files and from Kafka, against what the ledger says.

Nothing here trusts a count that was stored: rows and dead letters are counted in the files that `main` and `batch`
name, and Kafka is read again as far as it still holds the hour. What disagrees is one sentence with hour, partition,
what was expected and what was found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.common.output import print_json, print_table
from anabranch.kafka.batches import ABORTED, CONTROL, PRESENT
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.operations.audit.count import GONE, Recount
from anabranch.protocol.ledger_row import HourAccount, Layer, LedgerRow

_WORDS = {"rows": "rows of main", "batch": "rows of branch batch", "dead": "dead letters of main"}
_CLOSES = ("good", "dead", "duplicate", "gap")


@dataclass(frozen=True)
class Disagreement:
    """Something about an hour that is not as it has to be. `partition` is None for what concerns the whole hour."""

    hour: str
    partition: int | None
    what: str
    expected: str
    found: str

    @property
    def message(self) -> str:
        where = f"hour {self.hour}" + (f", partition {self.partition}" if self.partition is not None else "")
        return f"{where}: {self.what}: expected {self.expected}, found {self.found}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "partition": self.partition,
            "what": self.what,
            "expected": self.expected,
            "found": self.found,
            "message": self.message,
        }


@dataclass(frozen=True)
class Audited:
    """One hour: what table and ledger say, and what was counted.

    `cut` and `revision` are the table's own, None and 0 where it no longer remembers the hour by itself; `row` is the
    ledger's newest. `strange` are files of `main` that the serving layer does not have, `lacking` files of that
    layer that `main` does not, `gone` files that storage does not have. `unrepeated` are rows that batch removed and
    that repeat nothing, None when that was not asked. `kafka` says why it was not read, or None.
    """

    hour: str
    served: Layer
    accepted: bool
    revision: int
    cut: Cut | None
    row: LedgerRow | None
    partitions: Mapping[int, Recount]
    strange: int = 0
    lacking: int = 0
    gone: tuple[str, ...] = ()
    unrepeated: int | None = None
    lookback: int = 1
    kafka: str | None = None

    @property
    def account(self) -> HourAccount:
        """What the ledger counted."""
        return self.row or HourAccount()

    @property
    def is_compacted(self) -> bool:
        """Whether Kafka's log lost records from the middle of the hour."""
        return any(r.kafka is not None and r.kafka.is_compacted for r in self.partitions.values())

    @property
    def is_held(self) -> bool:
        """Whether Kafka still holds all of the hour."""
        live = [r for r in self.partitions.values() if r.cut[0] < r.cut[1]]
        return self.kafka is None and all(r.kafka is not None and r.kafka.in_kafka == r.cut for r in live)


def find_disagreements(audited: Audited) -> list[Disagreement]:
    """All that disagrees about one hour, the ledger first, then files, then Kafka. Pure."""
    disagreements = [*_of_ledger(audited), *_of_files(audited)]
    disagreements += [
        d for p, counted in sorted(audited.partitions.items()) for d in _of_partition(audited, p, counted)
    ]
    return [*disagreements, *_of_totals(audited), *_of_kafka(audited)]


def _of_ledger(a: Audited) -> list[Disagreement]:
    row, account, disagreements = a.row, a.account, list[Disagreement]()

    def differs(what: str, expected: object, is_found: object) -> None:
        disagreements.append(Disagreement(a.hour, None, what, str(expected), str(is_found)))

    if a.accepted and (row is None or row.decision != "accepted"):
        again = "a restatement" if row is not None else "`anabranch apply`"
        differs("ledger", "a row that accepts it, as branch batch does", f"none ({again} writes it again)")
        return disagreements
    if not a.accepted:
        differs(
            "table",
            "branch batch to hold it as accepted, as the ledger says",
            "that it does not (the next batch run rebuilds it)",
        )
    revision = row.revision if row is not None else None
    if a.revision and revision != a.revision:
        differs("revision", f"{a.revision}, as branch batch says", f"{revision} in the ledger")
    cut = row.cut if row is not None else None
    if a.cut is not None and cut is not None and cut != a.cut:
        differs("cut", f"{a.cut.as_dict()}, as the table says", f"{cut.as_dict()} in the ledger")
    ranges = {p: r.cut for p, r in a.partitions.items()}
    size = sum(e - s for s, e in ranges.values())
    if account.offsets is not None and account.offsets != size:
        differs("ledger", f"{size} offsets, the size of its cut", account.offsets)
    counts = [getattr(account, name) for name in _CLOSES]
    if None not in counts and sum(n or 0 for n in counts) != size:
        words = " + ".join(f"{n} {name}" for name, n in zip(_CLOSES, counts, strict=True))
        differs("balance of the ledger", f"{size} offsets", f"{sum(n or 0 for n in counts)}: {words}")
    gaps = account.gaps
    if gaps is not None and account.gap is not None and sum(gaps.values()) != account.gap:
        differs("gaps of the ledger", f"{account.gap} in all classes", f"{sum(gaps.values())}: {gaps}")
    return disagreements


def _of_files(a: Audited) -> list[Disagreement]:
    disagreements = [Disagreement(a.hour, None, "storage", f"the data file {path}", "none") for path in a.gone]
    if a.strange or a.lacking:
        actual = (
            f"{a.lacking} of its files missing and {a.strange} others in their place (`anabranch merge` puts it right)"
        )
        disagreements.append(
            Disagreement(a.hour, None, "main", f"the files of the {a.served} layer, which serves it", actual)
        )
    return disagreements


def _of_partition(a: Audited, p: int, counted: Recount) -> list[Disagreement]:
    disagreements = []
    start, end = counted.cut
    for source, n in counted.outside.items():
        disagreements.append(Disagreement(a.hour, p, _WORDS[source], f"none outside the cut [{start}, {end})", f"{n}"))
    for source, n in counted.twice.items():
        disagreements.append(Disagreement(a.hour, p, _WORDS[source], "each offset once", f"{n} rows more"))
    for source, n in counted.misplaced.items():
        disagreements.append(
            Disagreement(a.hour, p, _WORDS[source], "rows of this hour alone", f"{n} that name another")
        )
    if counted.both:
        actual = f"{counted.both} that are both"
        disagreements.append(Disagreement(a.hour, p, "rows and dead letters", "each offset to be one of them", actual))
    if counted.kafka is not None and counted.kafka.not_explained:
        actual = f"{counted.kafka.not_explained} kept that it does not give: {_spans(counted.kafka.not_given_at)}"
        actual += _classes(counted.kafka.classes)
        disagreements.append(Disagreement(a.hour, p, "Kafka", "all offsets that are kept", actual))
    if counted.kafka is not None and (hidden := counted.kafka.silent_classes.get(PRESENT)):
        expected = "to be given every record of its log"
        disagreements.append(Disagreement(a.hour, p, "Kafka", expected, f"{hidden} in its log that it did not give"))
    return disagreements


def _of_totals(a: Audited) -> list[Disagreement]:
    """The ledger's counts against the files'."""
    account, disagreements = a.account, []
    counted = list(a.partitions.values())
    good, duplicate = account.good, account.duplicate
    # The speed layer keeps duplicates.
    rows = good if a.served == "batch" or good is None or duplicate is None else good + duplicate
    expected = (
        ("rows", rows, sum(r.rows for r in counted)),
        ("batch", good, sum(r.batch for r in counted)),
        ("dead", account.dead, sum(r.dead for r in counted)),
    )
    for source, wanted, n in expected:
        if wanted is not None and wanted != n and a.accepted:
            disagreements.append(
                Disagreement(a.hour, None, _WORDS[source], f"{wanted}, as the ledger says", f"{n} offsets")
            )
    if a.unrepeated:
        words = f"a row of the hour or of the {a.lookback} before it"
        actual = f"{a.unrepeated} that repeat nothing"
        disagreements.append(Disagreement(a.hour, None, "rows that batch removed", f"each to repeat {words}", actual))
    return disagreements


def _of_kafka(a: Audited) -> list[Disagreement]:
    """What Kafka gives against what is kept: nothing may be in neither but duplicates, and nothing be gone but gaps."""
    if a.kafka is not None or not a.accepted:
        return []
    account, disagreements = a.account, []
    given = {p: r.kafka for p, r in a.partitions.items() if r.kafka is not None}
    nowhere = sum(k.kept_nowhere for k in given.values())
    duplicate = account.duplicate if a.served == "batch" else 0
    exact = a.is_held and not a.is_compacted
    if duplicate is not None and (nowhere != duplicate if exact else nowhere > duplicate):
        at = "; ".join(
            f"partition {p}: {_spans(k.kept_nowhere_at)}" for p, k in sorted(given.items()) if k.kept_nowhere
        )
        expected = (
            f"{'' if exact else 'at most '}{duplicate} offsets of it in neither rows nor dead letters, the duplicates"
        )
        disagreements.append(Disagreement(a.hour, None, "Kafka", expected, f"{nowhere}" + (f" ({at})" if at else "")))
    silent = sum(k.in_kafka[1] - k.in_kafka[0] - k.offsets for k in given.values())
    gap = account.gap
    kept = any(k.not_given for k in given.values())
    if gap is not None and not a.is_compacted and not kept and (silent != gap if a.is_held else silent > gap):
        expected = f"{'' if a.is_held else 'at most '}{gap} offsets that it does not give, the gaps"
        disagreements.append(Disagreement(a.hour, None, "Kafka", expected, f"{silent}"))
    shown = {name: sum(k.silent_classes.get(name, 0) for k in given.values()) for name in (CONTROL, ABORTED)}
    for name, number in shown.items():
        told = (account.gaps or {}).get(name, 0)
        if exact and account.gaps is not None and told != number:
            expected = f"{told} offsets of class {name}, as the ledger says"
            disagreements.append(Disagreement(a.hour, None, "Kafka", expected, f"{number} in its log"))
    return disagreements


def _classes(classes: Mapping[str, int]) -> str:
    known = [f"{n} {name}" for name, n in classes.items() if n and name not in GONE]
    return f" (its log shows {', '.join(known)})" if known else ""


def _spans(spans: Sequence[tuple[int, int]]) -> str:
    return (
        "offsets " + ", ".join(str(s) if e == s + 1 else f"{s} to {e - 1}" for s, e in spans) + ", …" * (len(spans) > 2)
    )


def check_adjacent_cuts(cuts: Mapping[str, Cut], timeline: Timeline) -> list[Disagreement]:
    """Where an hour does not begin at the end of the hour before it, in the same log. Pure."""
    adopted = {adoption.hour for adoption in timeline.adoptions}
    disagreements = []
    for hour, cut in sorted(cuts.items()):
        before = cuts.get(shift(hour, -1))
        if before is None or shift(hour, -1) in adopted or before.topic_id != cut.topic_id:
            continue
        for p, (start, _) in sorted(cut.ranges.items()):
            if p in before.ranges and before.ranges[p][1] != start:
                words = f"{before.ranges[p][1]}, the end of hour {shift(hour, -1)}"
                disagreements.append(Disagreement(hour, p, "begin of the cut", words, str(start)))
    return disagreements


def to_view(stream: str, audited: Sequence[Audited], more: Sequence[Disagreement]) -> dict[str, Any]:
    """As JSON shows it. `more` are disagreements that were found beside the hours' own. Pure."""
    known = {a.hour for a in audited}
    hours = []
    for a in audited:
        disagreements = [*find_disagreements(a), *(d for d in more if d.hour == a.hour)]
        hours.append(
            {
                "hour": a.hour,
                "served": a.served,
                "revision": a.revision or (a.row.revision if a.row is not None else 0),
                "ledger": {name: getattr(a.account, name) for name in ("offsets", *_CLOSES)},
                "partitions": {str(p): _partition_view(r) for p, r in a.partitions.items()},
                "kafka": "not read" if a.kafka else "whole" if a.is_held else "part",
                "kafka_reason": a.kafka,
                "disagreements": [d.as_dict() for d in disagreements],
            }
        )
    others = [d.as_dict() | {"hour": d.hour} for d in more if d.hour not in known]
    agrees = not others and not any(h["disagreements"] for h in hours)
    return {"stream": stream, "agrees": agrees, "hours": hours, "other_disagreements": others}


def _partition_view(counted: Recount) -> dict[str, Any]:
    kafka = counted.kafka
    return {
        "cut": list(counted.cut),
        "rows": counted.rows,
        "batch": counted.batch,
        "dead": counted.dead,
        "twice": sum(counted.twice.values()),
        "outside": sum(counted.outside.values()),
        "misplaced": sum(counted.misplaced.values()),
        "kafka": None
        if kafka is None
        else {
            "held": list(kafka.in_kafka),
            "given": kafka.offsets,
            "kept_nowhere": kafka.kept_nowhere,
            "not_given": kafka.not_given,
        },
    }


def print_audit(view: Mapping[str, Any], output: str) -> None:
    if output == "json":
        print_json(view)
        return
    if not view["hours"] and view["agrees"]:
        print(f"{view['stream']}: no accepted hour to audit")
        return
    names = ("hour", "served", "offsets", "rows", "dead", "duplicate", "gap", "batch", "kafka", "")
    print_table(names, [_cells(hour) for hour in view["hours"]])
    for hour in view["hours"]:
        for disagreement in hour["disagreements"]:
            print(disagreement["message"])
    for disagreement in view["other_disagreements"]:
        print(disagreement["message"])
    offsets = sum(p["cut"][1] - p["cut"][0] for hour in view["hours"] for p in hour["partitions"].values())
    of = f"{view['stream']}: {len(view['hours'])} accepted hours, {offsets} offsets"
    number = sum(len(h["disagreements"]) for h in view["hours"]) + len(view["other_disagreements"])
    unread = [hour for hour in view["hours"] if hour["kafka"] != "whole"]
    if number:
        print(f"{of}: {number} disagreements")
    elif unread:
        whole = len(view["hours"]) - len(unread)
        print(f"{of}: ledger and files agree, and Kafka as far as it was read ({whole} hours whole)")
    else:
        print(f"{of}: ledger, files and Kafka agree")


def _cells(hour: Mapping[str, Any]) -> list[object]:
    """Counted from the files; duplicates and gaps are what Kafka tells, else the ledger's."""
    partitions = hour["partitions"].values()
    total = {name: sum(p[name] for p in partitions) for name in ("rows", "dead", "batch")}
    kafka = [p["kafka"] for p in partitions if p["kafka"] is not None]
    in_kafka, given = sum(k["held"][1] - k["held"][0] for k in kafka), sum(k["given"] for k in kafka)
    ledger = {name: "" if n is None else n for name, n in hour["ledger"].items()}
    read = f"{given} of {in_kafka} given" if hour["kafka"] != "not read" else hour["kafka_reason"]
    verdict = f"{len(hour['disagreements'])} disagree" if hour["disagreements"] else "agrees"
    return [
        hour["hour"],
        hour["served"],
        sum(p["cut"][1] - p["cut"][0] for p in partitions),
        total["rows"],
        total["dead"],
        ledger["duplicate"],
        ledger["gap"],
        total["batch"],
        read,
        verdict,
    ]
