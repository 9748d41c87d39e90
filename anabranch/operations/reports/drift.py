"""Schema drift of a stream: fields of records that are not in the schema, and commands that add
them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from anabranch.config import TAKEN_COLUMNS, Stream
from anabranch.config.columns import ROW, Column, columns_ddl
from anabranch.config.schema import columns_mapping
from anabranch.config.sections import UNKNOWN_NAME_LENGTH
from anabranch.decode.field_tree import Node, tree_of
from anabranch.decode.guessed import combine
from anabranch.job import Job
from anabranch.offsets.hours import spans_of
from anabranch.offsets.position import Offsets
from anabranch.protocol import ledger
from anabranch.protocol.ledger_row import LedgerRow, UnknownField

_COLUMN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_WITHOUT = tuple(name for name in ledger.BULKY if name not in ("unknown", "cut"))
_SAMPLES = 3


@dataclass(frozen=True)
class DriftedField:
    """A field that was not in the schema when its hours were counted. `type`: a guess from values;
    None if every sample was null. `taken_up`: the schema has the field now, but these hours lack
    its values. `obstacle`: why the field cannot be added under its name; None if it can."""

    name: str
    records: int
    hours: int
    first_hour: str
    last_hour: str
    samples: Sequence[str]
    type: str | None
    taken_up: bool
    obstacle: str | None


@dataclass(frozen=True)
class SchemaDrift:
    """The drift of a stream. `others`: the largest number of further field names in one hour.
    `schema`: the stream's schema with the fields that can be added, as in its file: DDL, or a
    mapping if it has more than types; None if there are none.
    `restate`: accepted hours with addable or added fields that Kafka still has completely; `gone`:
    those that it no longer has. `commands`: the commands to run, in order."""

    stream: str
    fields: Sequence[DriftedField]
    others: int
    schema: str | Mapping[str, Any] | None
    restate: Sequence[str]
    gone: Sequence[str]
    commands: Sequence[str]


def drift(job: Job) -> SchemaDrift:
    """Return the drift in the ledger. Raises Transient when Kafka or the lake is unreachable."""
    rows = ledger.newest(job.ledger.history(without=_WITHOUT))
    topic = job.kafka.describe(job.stream.topic)
    starts = job.kafka.log_starts(topic) if topic is not None else {}
    return drift_of(job.stream, rows.values(), topic.id if topic is not None else None, starts)


def drift_of(
    stream: Stream, rows: Iterable[LedgerRow], topic_id: str | None, log_starts: Offsets
) -> SchemaDrift:
    """Return the drift. `rows`: the newest row of each hour, oldest first; `log_starts`: the start
    offsets of Kafka's log. Pure."""
    drifting = [row for row in rows if row.unknown is not None and row.unknown.fields]
    fields = _merged(stream, drifting)
    new = [f for f in fields if not f.taken_up and f.obstacle is None]
    added = tuple(Column(field.name, field.type or "STRING", True) for field in new)
    wanted = {f.name for f in fields if f.obstacle is None}
    hours = [
        row for row in drifting if row.unknown and wanted & {f.name for f in row.unknown.fields}
    ]
    accepted = [row for row in hours if row.decision == "accepted"]
    in_kafka = [row.hour for row in accepted if _is_in_kafka(row, topic_id, log_starts)]
    commands = [f"anabranch apply {stream.name}"] if new else []
    commands += [
        (
            f"anabranch batch {stream.name} --hour "
            f"{first if first == last else f'{first}..{last}'} --restate --why 'take up new "
            "fields'"
        )
        for first, last in spans_of(in_kafka)
    ]
    return SchemaDrift(
        stream=stream.name,
        fields=fields,
        others=max((row.unknown.others for row in drifting if row.unknown), default=0),
        schema=_schema(stream, added) if new else None,
        restate=in_kafka,
        gone=[row.hour for row in accepted if row.hour not in in_kafka],
        commands=commands,
    )


def _schema(stream: Stream, added: tuple[Column, ...]) -> str | Mapping[str, Any]:
    if any(column.definition != column.name for column in stream.record_columns):
        return columns_mapping((*stream.record_columns, *added))
    return f"{stream.ddl.strip().rstrip(',')}, {columns_ddl(added)}"


def _merged(stream: Stream, rows: Sequence[LedgerRow]) -> list[DriftedField]:
    found: dict[str, list[tuple[str, UnknownField]]] = {}
    for row in rows:
        for field in row.unknown.fields if row.unknown is not None else ():
            found.setdefault(field.name, []).append((row.hour, field))
    read = _read_fields(stream)
    merged = [_field(name, of_hours, stream, read) for name, of_hours in found.items()]
    merged.sort(key=lambda f: (-f.records, f.name))
    return _mark_spellings(merged)


def _read_fields(stream: Stream) -> dict[str, Node | None]:
    """Return the fields that columns read, by name; None where they take whatever there is."""
    columns = stream.read_columns
    if stream.format.envelope is not None:
        # The fields of rows are counted.
        columns = tuple(replace(c, path=c.path[1:]) for c in columns if c.field[0] == ROW)
    return dict(tree_of(columns).every())


def _field(
    name: str,
    of_hours: Sequence[tuple[str, UnknownField]],
    stream: Stream,
    read: Mapping[str, Node | None],
) -> DriftedField:
    samples = dict.fromkeys(field.sample for _, field in of_hours if field.sample is not None)
    hours = [hour for hour, _ in of_hours]
    return DriftedField(
        name=name,
        records=sum(field.records for _, field in of_hours),
        hours=len(hours),
        first_hour=min(hours),
        last_hour=max(hours),
        samples=list(samples)[:_SAMPLES],
        type=reduce(combine, (field.type for _, field in of_hours)),
        taken_up=name in read,
        obstacle=None if name in read else _obstacle(name, read, stream),
    )


def _obstacle(name: str, read: Mapping[str, Node | None], stream: Stream) -> str | None:
    columns = [column.name for column in stream.record_columns]
    above = [at for at in read if name.startswith((f"{at}.", f"{at}[]", f"{at}{{}}"))]
    reserved = {*TAKEN_COLUMNS, *(column.name for column in stream.columns if column.rescues)}
    if whole := [at for at in above if read[at] is None]:
        # A name may have dots of its own, so that a restatement may change nothing.
        return f"if it is inside {whole[0]}, restate its hours: a column reads all of that"
    if above and stream.subject_schema is None:
        row = "" if stream.format.envelope is None else "row."
        other = "" if re.search(r"\[\]|\{\}", name) else f", or a column with `from: {row}{name}`"
        return f"add it to the STRUCT at {max(above, key=len)}{other}"
    if name in columns:
        return "the column of that name reads another field"
    if len(name) >= UNKNOWN_NAME_LENGTH:
        return "the name is too long to be stored completely"
    if not above and not _COLUMN.fullmatch(name):
        return "a column's name may contain only letters, digits and underscores"
    if name.lower() in reserved:
        return "Anabranch or Iceberg has a column of that name"
    if name.lower() in {column.lower() for column in columns}:
        return "the schema has a column of that name in another case"
    if stream.subject_schema is None:
        return None
    # The columns of a stream with a subject come only from the subject's versions.
    return f"register a version of subject {stream.subject} that has the field"


def _mark_spellings(fields: Sequence[DriftedField]) -> list[DriftedField]:
    """Mark fields whose names differ only in case: only the first can become a column."""
    spellings: set[str] = set()
    result = []
    for field in fields:
        if field.obstacle is None and not field.taken_up:
            if field.name.lower() in spellings:
                field = replace(
                    field, obstacle="a more frequent field has that name in another case"
                )
            spellings.add(field.name.lower())
        result.append(field)
    return result


def _is_in_kafka(row: LedgerRow, topic_id: str | None, log_starts: Mapping[int, int]) -> bool:
    cut = row.cut
    if cut is None or cut.topic_id != topic_id:
        return False
    return all(s >= log_starts.get(p, 0) for p, (s, e) in cut.ranges.items() if s < e)
