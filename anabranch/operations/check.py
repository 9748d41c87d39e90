"""The newest records of a topic by a stream's file, before the stream reads any."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from anabranch.common.arrays import grouped
from anabranch.common.errors import NotYet
from anabranch.config import Environment, Stream
from anabranch.config.mistakes import similar
from anabranch.decode import Decoded, Decoder, decode_spec, inputs
from anabranch.decode.inputs import schema_ids
from anabranch.kafka.client import KafkaAdapter
from anabranch.offsets.hours import hour_of
from anabranch.protocol import ledger_row
from anabranch.subjects.schemas import open_schemas

RECORDS = 1_000
"""The number of records that are checked by default."""

_ROWS = 5
_FIELDS = 5
# Seconds of these years, read as milliseconds, are in January 1970.
_UNIT_TOO_SMALL = datetime(1970, 3, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Reason:
    """Dead letters that differ only in the value that was found, and the first of them."""

    records: int
    code: str
    text: str
    partition: int
    offset: int


@dataclass(frozen=True)
class Check:
    """The account of a sample. `good`: without dead letters and duplicates. `conflicts`: the part
    of the `duplicates` with other content than the row that they repeat. `rows`: the first rows.
    `objections`: why the batch layer would refuse an hour of such records."""

    stream: str
    topic: str
    records: int
    good: int
    dead: int
    duplicates: int
    conflicts: int
    reasons: Sequence[Reason]
    rows: Sequence[Mapping[str, Any]]
    objections: Sequence[str]


def check(
    environment: Environment, stream: Stream, kafka: KafkaAdapter, count: int = RECORDS
) -> Check:
    """Decode the newest records of the stream's topic, with the columns of its file. Writes
    nothing. Raises NotYet without a topic, Transient, ConfigurationError."""
    topic = kafka.describe(stream.topic)
    if topic is None:
        raise NotYet(
            f"topic {stream.topic}: expected its records, found no topic of this name; check "
            f"`topic:` in streams/{stream.name}.yaml, or send the first record"
        )
    records = batch_of(kafka.newest_records(topic, count), datetime.now(UTC))
    return check_of(stream, records, decode_sample(environment, stream, records))


def check_of(stream: Stream, records: pa.RecordBatch, decoded: Decoded) -> Check:
    names = [column.name for column in stream.columns]
    rows = decoded.good.select([*names, "kafka_partition", "kafka_offset"]).to_pylist()
    repeated, conflicts = count_duplicates(stream.key, names, rows)
    reasons, quality = _reasons(records, decoded), stream.quality
    total, dead = len(records), len(decoded.errors)
    objections = []
    if text := ledger_row.objection("dead letters", dead, total, quality.max_dead, least=1):
        objections.append(f"{text}; most often {reasons[0].text}")
    what = f"duplicates by {', '.join(stream.key)} with other content"
    if text := ledger_row.objection(what, len(conflicts), total, quality.max_conflicts, least=1):
        first = f"the first: {conflicts[0]}"
        objections.append(f"{text}; {first}; correct `key`, or accept that they are dropped")
    unknown = {name for names in decoded.unknown.values() for name in names}
    objections += _meaningless(stream, rows, unknown)
    return Check(
        stream=stream.name,
        topic=stream.topic,
        records=total,
        good=total - dead - repeated,
        dead=dead,
        duplicates=repeated,
        conflicts=len(conflicts),
        reasons=reasons,
        rows=[{name: row[name] for name in names} for row in rows[:_ROWS]],
        objections=objections,
    )


def count_duplicates(
    key: Sequence[str], names: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> tuple[int, list[str]]:
    """Return the number of duplicates, by the rule of the batch layer, and the places of those with
    other content than the row that they repeat."""
    kept, repeated, conflicts = dict[str, tuple[str, str]](), 0, list[str]()
    for row in sorted(rows, key=lambda row: (row["kafka_offset"], row["kafka_partition"])):
        event = [None if row[name] == "" else row[name] for name in key]
        if all(part is None for part in event):
            continue
        content = repr([row[name] for name in names])
        place = f"partition {row['kafka_partition']}, offset {row['kafka_offset']}"
        first, of_first = kept.setdefault(repr(event), (place, content))
        if first != place:
            repeated += 1
            conflicts += [f"{place}, has the key of {first}"] if of_first != content else []
    return repeated, conflicts


def _meaningless(
    stream: Stream, rows: Sequence[Mapping[str, Any]], without_column: Collection[str]
) -> list[str]:
    """Return an objection to each column that no row fills while a field has nearly its name, to
    most columns that no row fills, to each time whose unit is too small for all rows, and to a key
    that no row has."""
    if not rows:
        return []
    found, empty = list[str](), list[str]()
    for column in stream.columns if stream.select is None else ():
        read = [row[column.name] for row in rows if row[column.name] is not None]
        field = ".".join(column.field)
        if not read and (other := _meant(field, without_column)):
            found.append(
                f"column {column.name}: expected field {field}, found {other}; correct the name, "
                f"or write `from: {other}`"
            )
        elif not read:
            empty.append(column.name)
        unit = column.notation.unit if column.type == "timestamp" else ""
        if unit and read and (latest := max(read)) < _UNIT_TOO_SMALL:
            found.append(
                f"column {column.name}: expected times of these years, found {latest:%F %T} as "
                f"the latest; correct `unit: {unit}`"
            )
    if without_column and 2 * len(empty) > len(stream.columns):
        fields = ", ".join(sorted(without_column)[:_FIELDS])
        found.append(
            f"columns {', '.join(empty)}: expected values, found none, and fields without a "
            f"column: {fields}; correct the names, write `from` with the path, or `format` with "
            "the envelope"
        )
    if stream.key and all(row[name] in (None, "") for row in rows for name in stream.key):
        key = ", ".join(stream.key)
        found.append(f"key: expected a value of {key}, found none; no duplicates would be found")
    return found


def _meant(field: str, without_column: Collection[str]) -> str | None:
    """Return the field that has the same letters, or nearly the same name. Pure."""
    same = (name for name in sorted(without_column) if _letters(name) == _letters(field))
    return next(same, None) or similar(field, without_column)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name)).casefold()


def _reasons(records: pa.RecordBatch, decoded: Decoded) -> list[Reason]:
    """Return the reasons of dead letters, the most frequent first."""
    places = {name: records.column(name).to_pylist() for name in ("partition", "offset")}
    # The text after `found` has the value that was found.
    texts = {
        i: f"{code}: {text.partition(', found ')[0]}" for i, (code, text) in decoded.errors.items()
    }
    alike = grouped(sorted(texts), texts.__getitem__).values()
    return [
        Reason(1 + len(more), *decoded.errors[i], places["partition"][i], places["offset"][i])
        for i, *more in sorted(alike, key=len, reverse=True)
    ]


def decode_sample(environment: Environment, stream: Stream, records: pa.RecordBatch) -> Decoded:
    """Decode records of `batch_of`. Raises Transient and ConfigurationError of the registry."""
    schemas = open_schemas(environment, stream)
    if stream.format.needs_registry:
        schemas.learn({int(id) for id in schema_ids(records.column("value")) if id > 0})
    spec = decode_spec(stream, schemas.known, True, environment.masking_secret)
    return Decoder(spec).decode(records)


def batch_of(records: Sequence[Any], now: datetime) -> pa.RecordBatch:
    """Return kafka-python's records as a decoder's batch, oldest first. The ingest hour is that of
    the record's timestamp, or of `now` if it has none that is a time. Pure."""
    ordered = sorted(records, key=lambda r: (r.timestamp, r.offset, r.partition))
    batch = inputs.batch_of(ordered)
    hours = [
        hour_of(now if at is None or r.timestamp < 0 else at)
        for r, at in zip(ordered, batch.column("timestamp").to_pylist(), strict=True)
    ]
    return batch.append_column("ingest_hour", pa.array(hours, pa.string()))
