"""Texts of reports on rows and records: differences, duplicates, dead letters, unknown fields,
queries."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from anabranch.cli.report import Table, Text, table_of
from anabranch.common.output import plain, text
from anabranch.protocol.ledger_row import percent

if TYPE_CHECKING:
    from anabranch.operations.check import Check
    from anabranch.operations.reports.dead_letters import (
        DeadLetters,
        HourDifference,
        HourDuplicates,
        Letter,
    )
    from anabranch.operations.reports.drift import DriftedField, SchemaDrift
    from serving_layer.layer_diff import Sample
    from serving_layer.query.datasets import Opened
    from serving_layer.reader.selection import Provenance
    from serving_layer.reader.topic_tail import TopicTail

# Maximum characters in a line of text: of a row's value, and of a dead letter's key or value.
_VALUE, _LETTER = 100, 160
_YES = {True: "yes", False: "no"}
_KINDS = {
    "changed": "different content",
    "extra": "in speed, not in batch",
    "missing": "in batch, not in speed",
    "unread": "in batch, not read by speed",
    "missing_dead": "in batch, a dead letter of speed",
    "extra_dead": "in speed, a dead letter of batch",
    "duplicate": "in speed, removed by batch",
}


def difference_text(view: HourDifference) -> Text:
    from anabranch.operations.reports.status import unexplained_words

    counts = Counter(view.diff.as_dict())
    counts["missing"] -= counts["unread"] + counts["missing_dead"]
    counts["extra"] -= counts["extra_dead"]
    yield (
        f"{view.stream}: hour {view.hour}: {view.speed_rows} rows in speed, {view.batch_rows} in "
        "batch"
    )
    yield Table(
        ("rows", ""),
        [(counts[k], f"{k}: {_KINDS[k]}") for k in _KINDS],
    )
    if view.uncovered:
        yield f"{view.uncovered}; rows missing for that reason are no fault"
    for sample in view.samples:
        yield from _sample(sample)
    if view.when_accepted is not None and view.when_accepted != view.diff:
        counted = [f"{n} {k}" for k, n in view.when_accepted.as_dict().items() if n]
        yield f"at acceptance: {', '.join(counted) or 'no difference'}"
    if view.unexplained:
        yield f"nothing explains {unexplained_words(view.unexplained)}"
    else:
        yield "all differences are explained"


def _sample(sample: Sample) -> Text:
    speed, batch = sample.speed, sample.batch
    yield (
        f"\n{sample.kind} ({_KINDS[sample.kind]}): partition {sample.partition}, offset "
        f"{sample.offset}"
    )
    if speed is not None and batch is not None:
        yield Table(
            ("column", "speed", "batch"),
            [(c, _shown(speed[c]), _shown(batch[c])) for c in sample.columns],
        )
    else:
        row = {
            k: v
            for k, v in (speed or batch or {}).items()
            if v is not None and not k.startswith("kafka_")
        }
        yield "  " + ", ".join(f"{k} {_shown(v)}" for k, v in row.items())


def duplicates_text(view: HourDuplicates) -> Text:
    if view.duplicates:
        names = list(view.duplicates[0].key)
        yield Table(
            ("partition", "offset", *names, "repeats hour", "partition", "offset", "content"),
            [
                (
                    *(d.partition, d.offset, *map(_shown, d.key.values())),
                    *vars(d.repeats).values(),
                    "equal" if d.is_equal else "OTHER",
                )
                for d in view.duplicates
            ],
        )
    counted = "an unknown number of" if view.counted is None else view.counted
    more = f", the first {view.listed} listed (--limit)" if view.listed < view.found else ""
    yield f"{view.stream}: hour {view.hour}: {counted} duplicates counted, {view.found} found{more}"
    if view.untold:
        yield view.untold


def letters_text(view: DeadLetters) -> Text:
    """Return the number of dead letters for each reason, and samples."""
    span = f" of the hours {view.hours[0]} to {view.hours[1]}" if view.hours else ""
    if not view.reasons:
        yield f"{view.stream}: no dead letters{span}"
        return
    yield Table(
        ("reason", "dead letters", "first hour", "last hour"),
        [(r.reason, r.count, r.first_hour, r.last_hour) for r in view.reasons],
    )
    for reason in view.reasons:
        for letter in reason.samples:
            yield from _letter(reason.reason, letter)
    yield f"\n{view.stream}: {view.dead} dead letters{span}"


def _letter(reason: str, letter: Letter) -> Text:
    at = f", stamped {text(letter.timestamp)}" if letter.timestamp is not None else ""
    place = f"hour {letter.hour}, partition {letter.partition}, offset {letter.offset}{at}"
    yield f"\n{reason}: {place}: {text(letter.text)}"
    for name, data in (("key", letter.key), ("value", letter.value)):
        line = "null" if data is None else _cut(text(data), _LETTER)
        is_sized = name == "value" and letter.value_bytes is not None
        yield f"  {name}: {line}{f' ({letter.value_bytes} bytes)' if is_sized else ''}"


def tail_text(tail: TopicTail) -> Text:
    """Return the account of a topic's records in an answer."""
    counts = tail.counts
    without = {"dead letters": counts.dead, "erased": counts.erased, "lost by Kafka": counts.lost}
    left = ", ".join(f"{n} {what}" for what, n in without.items() if n)
    yield (
        f"{tail.stored.name}: snapshot {tail.seam.snapshot_id}, then {counts.rows} records of the "
        f"topic{f' (left out: {left})' if left else ''}"
    )


def check_text(view: Check) -> Text:
    """Return the account of a topic's newest records, the reasons of dead letters, and rows."""
    yield from checked_text(view)
    if not view.records:
        return
    kinds = {
        "good": view.good,
        "dead letters": view.dead,
        "duplicates with equal content": view.duplicates - view.conflicts,
        "duplicates with OTHER content": view.conflicts,
    }
    counts = [(name, n, percent(n / view.records)) for name, n in kinds.items()]
    yield Table((view.stream, "records", "share"), counts)
    for reason in view.reasons:
        yield (
            f"{reason.records:,} of {view.records:,} would be dead letters: {text(reason.text)} "
            f"({reason.code}; partition {reason.partition}, offset {reason.offset})"
        )
    yield table_of({name: _shown(value) for name, value in row.items()} for row in view.rows)


def checked_text(view: Check) -> Text:
    """Return one line on a topic's newest records, and the objections to them."""
    if not view.records:
        yield f"topic {view.topic} has no records to check"
        return
    yield (
        f"of the newest {view.records:,} records of topic {view.topic}, {view.good:,} would be "
        f"rows, {view.dead:,} dead letters, {view.duplicates:,} duplicates"
    )
    for objection in view.objections:
        yield f"warning: {text(objection)}"


def drift_text(view: SchemaDrift) -> Text:
    """Return a line for each field, then the change of the stream's file and the commands."""
    if not view.fields:
        yield f"{view.stream}: no unknown fields in the hours that were counted"
        return
    yield table_of(map(_field_cells, view.fields))
    if view.others:
        yield f"\nand up to {view.others} more names in an hour, which are not counted by name"
    if view.schema is not None:
        yield (
            f"\nTo add the fields, change the file of stream {view.stream} (the types are "
            "guesses):\n"
        )
        yield f"schema: {json.dumps(view.schema)}"
    if view.commands:
        yield "\nThen run in order:\n"
        yield from view.commands
    if view.gone:
        yield (
            f"\nKafka no longer has all records of {text(', '.join(view.gone))}: their rows stay "
            "without the fields."
        )


def _field_cells(field: DriftedField) -> dict[str, object]:
    taken_up = "in the schema now: restate its hours" if field.taken_up else ""
    return {
        "field": field.name,
        "records": field.records,
        "hours": field.hours,
        "first hour": field.first_hour,
        "last hour": field.last_hour,
        "type": field.type or "",
        "samples": ", ".join(field.samples),
        "note": field.obstacle or taken_up,
    }


def opened_text(found: Iterable[Opened]) -> Text:
    """Return the files and bytes that a query read."""
    yield table_of(
        {
            "table": o.table,
            "files": o.files,
            "of files": o.all_files,
            "bytes": o.bytes,
            "of bytes": o.all_bytes,
            "bytes of columns": o.column_bytes,
            "columns": " ".join(o.columns),
            "condition": o.condition,
        }
        for o in found
    )


def provenance_text(found: Sequence[Provenance]) -> Text:
    """Return the hours that a query read, and whether they are complete."""
    if not found:
        yield "no rows of a stream were read"
    for one in found:
        yield f"{one.table} as of {one.as_of.isoformat()} (snapshot {one.snapshot_id})"
        yield Table(
            ("ingest hour", "layer", "revision", "complete", "files", "rows", "note"),
            [
                (h.hour, h.layer, h.revision, _YES[h.complete], h.files, h.rows, h.note)
                for h in one.hours
            ],
        )


def _shown(value: object) -> str:
    return _cut(text(plain(value)), _VALUE)


def _cut(line: str, longest: int) -> str:
    return line if len(line) <= longest else line[:longest] + "…"
