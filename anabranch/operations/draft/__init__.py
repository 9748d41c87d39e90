"""Draft a stream's file from records of its topic, or from its subject.

1. Find the format: of the registry, else JSON, CSV, text or bytes, and the envelope.
2. Guess the columns (`anabranch.decode.guessed`).
3. Decode the records with the draft, as the jobs would, and make a column that refuses a value
   STRING, which refuses none.
4. Choose key and event time from the rows.
5. Check the file as `anabranch check` does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from anabranch.common.errors import ConfigurationError, NotYet
from anabranch.config import Environment, Stream
from anabranch.config.columns import Column, Notation
from anabranch.config.loading import parse_stream
from anabranch.config.mistakes import similar
from anabranch.config.plain import NAME
from anabranch.decode import Decoded
from anabranch.decode.guessed import snake
from anabranch.kafka.client import KafkaAdapter
from anabranch.kafka.schema_registry import open_registry
from anabranch.operations.check import (
    RECORDS,
    Check,
    batch_of,
    check_of,
    count_duplicates,
    decode_sample,
)
from anabranch.operations.draft import forms
from anabranch.operations.draft.forms import Sketch, text_of
from anabranch.operations.draft.subjects import SELECTED, sketch_of_registry, with_columns
from anabranch.protocol.ledger_row import is_too_many

_KEY_TYPES = re.compile(r"string|int|bigint|decimal\(\d+,0\)")
_ALONE = frozenset(("id", "_id", "uuid", "guid", "event_id", "event_uuid", "message_id"))
_COUNTED = frozenset(("key", "number", "no", "nr"))
_ID = re.compile(r"(?:^|_)(?:id|uuid|guid|ulid|key|number|no|nr|delivery)$")
# Identities of what has many events: as a key they would make events duplicates.
_OF_OTHERS = re.compile(
    r"(?:^|_)(?:user|customer|client|account|member|person|player|visitor|anonymous|pseudo|tenant|"
    r"actor|owner|driver|patient|device|sensor|machine|vehicle|host|node|meter|session|thread|"
    r"process|product|item|article|store|shop|site|game|campaign|category|group|team|trace|parent)$"
)
# Fields of changes of a table's rows: of Debezium's without its envelope, of Canal's.
_OF_A_CHANGE = re.compile(r"__(?:deleted|op|db|table|lsn|ts_ms|source_\w+)|isDdl")
_UUID = re.compile("[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
# So many records without a repetition, for a field whose name alone does not make it an event's.
_ENOUGH = 100
_TIMES = (
    re.compile(r"(?:^|_)(?:event_?time|occurred\w*|observed\w*)$"),
    re.compile(r"^_?(?:time|timestamp|ts|at|datetime|date_time|when)$"),
    re.compile(r"time|stamp|_ts$|^ts_|created|placed|sent|_at$"),
)
_OTHER_TIMES = re.compile(r"birth|expir|until|(?:^|_)(?:end|exp|due|valid|next|deadline)")
_COUNTED_FIELDS = "Later fields of a STRUCT are counted; STRING has the whole value"
_REASONS = 3
# Of the first records too: a header, and values of the topic's whole time.
_OLDEST = 200


@dataclass(frozen=True)
class Draft:
    """A stream's file, and its account of the records from which it was made."""

    stream: str
    topic: str
    file: str
    check: Check


def topics_of(kafka: KafkaAdapter, wanted: str) -> list[str]:
    """Return the topic of this name, else the topics whose whole names match it as a regular
    expression. Raises ConfigurationError, NotYet without any, Transient."""
    names = kafka.topic_names()
    if wanted in names:
        return [wanted]
    try:
        pattern = re.compile(wanted)
    except re.error as error:
        raise ConfigurationError(
            f"draft: expected a topic or a regular expression, found {wanted!r} ({error})"
        ) from None
    found = sorted(n for n in names if pattern.fullmatch(n) and not n.startswith("__"))
    if not found:
        near = similar(wanted, names)
        but = f", but {near}" if near is not None else ""
        raise NotYet(
            f"draft: expected topics that match {wanted}, found none{but}; name another, or create "
            "one first"
        )
    return found


def names_of(topics: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a stream's name and table for each topic, each once, as are the tables beside it.
    Pure."""
    found, names, tables = dict[str, tuple[str, str]](), set[str](), set[str]()
    for topic in topics:
        for number in count(1):
            end = f"_{number}" if number > 1 else ""
            name = _name(topic) + end
            table = _table(topic, _name(topic)) + end
            own = {f"{table}{of}".lower() for of in ("", "_dead_letters", "_hours")}
            if name.lower() not in names and not own & tables:
                break
        names.add(name.lower())
        tables |= own
        found[topic] = name, table
    return found


def draft(
    environment: Environment, folder: Path, kafka: KafkaAdapter, name: str, topic: str, table: str
) -> Draft:
    """Return a file for stream `name` that reads the topic into the table. Writes nothing. Raises
    NotYet without records, ConfigurationError, Transient."""
    described = kafka.describe(topic)
    if described is None:
        raise NotYet(
            f"topic {topic}: expected its records, found no topic of this name; create it first"
        )
    is_compacted = False
    # Without the right to see a topic's settings.
    with suppress(ConfigurationError):
        settings = kafka.settings(topic)
        is_compacted = settings is not None and "compact" in settings.cleanup_policy
    found = kafka.newest_records(described, RECORDS, _OLDEST)
    records = batch_of(found, datetime.now(UTC))
    sketch = sketch_of_registry(environment, topic, records)
    if sketch is None:
        if records.column("value").null_count == len(records):
            raise NotYet(
                f"topic {topic}: expected records with values, found none; send some, and run it "
                "again"
            )
        sketch = forms.sketch_of(records)
    sketch.has_states |= is_compacted
    return finished(environment, folder, sketch, records, name, topic, table)


def finished(
    environment: Environment,
    folder: Path,
    sketch: Sketch,
    records: pa.RecordBatch,
    name: str,
    topic: str,
    table: str,
) -> Draft:
    """Return a sketch as a file that decodes the records, of `operations.check.batch_of`."""

    def read(key: Sequence[str] = (), time: str = "") -> tuple[str, Stream, Decoded]:
        text = text_of(sketch, name, topic, table, key, time)
        stream = parse_stream(name, folder, text)
        if stream.lacks_columns:
            stream = with_columns(stream, open_registry(environment, stream))
        return text, stream, decode_sample(environment, stream, records)

    sent = zip(*(records.column(name).to_pylist() for name in ("key", "value")), strict=True)
    sketch.has_states |= any(key is not None and value is None for key, value in sent)
    given = [key for key in records.column("key").to_pylist() if key is not None]
    # The key of a table's row, as Kafka Connect writes it.
    sketch.has_states |= bool(given) and all(isinstance(forms.read(k), Mapping) for k in given)
    _, stream, decoded = read()
    while _widen(sketch, decoded):
        _, stream, decoded = read()
    if sketch.schema is None and sketch.form["type"] in ("json", "json_schema"):
        left = {name for names in decoded.unknown.values() for name in names}
        # Kafka Connect's schema beside a value says no more than its columns.
        if left - {"schema"} and not sketch.rescues:
            sketch.rescues = True
            _, stream, decoded = read()
        elif not sketch.rescues and any("struct<" in column.type for column in sketch.columns):
            sketch.comments.append(_COUNTED_FIELDS)
    rows = decoded.good.to_pylist()
    key = _key(sketch, stream, rows)
    time = _time(sketch, stream, rows)
    _, stream, decoded = read(key, time)
    found = check_of(stream, records, decoded)
    nulls = sum(r.records for r in found.reasons if r.code in ("null_value", "header_line"))
    most, total = stream.quality.max_dead, found.records
    if is_too_many(found.dead, total, most, 1) and not is_too_many(
        found.dead - nulls, total, most, 1
    ):
        # Of an hour, another share may be null, or headers.
        sketch.max_dead = max(50, min(95, 200 * nulls // total))
        _, stream, decoded = read(key, time)
        found = check_of(stream, records, decoded)
    if sketch.schema is not None and forms.are_texts(given):
        columns = decoded.rows.select([column.name for column in stream.columns])
        if not forms.has_keys(records.column("key").to_pylist(), columns.to_pylist()):
            sketch.comments.append(f"Keys {SELECTED}")
    sketch.comments = [*_account(found), *sketch.comments]
    return Draft(name, topic, text_of(sketch, name, topic, table, key, time), found)


def _account(found: Check) -> list[str]:
    if not found.records:
        return [f"A draft from the subject of topic {found.topic}, which has no records"]
    lines = [
        f"A draft from {found.records:,} records of topic {found.topic}: {found.good:,} would be "
        f"rows, {found.dead:,} dead letters, {found.duplicates:,} duplicates"
    ]
    reasons = found.reasons[:_REASONS]
    return [*lines, *(f"{r.records:,} would be dead letters: {r.code}: {r.text}" for r in reasons)]


def _widen(sketch: Sketch, decoded: Decoded) -> bool:
    """Widen each column that refuses a value; return whether there was one."""
    columns = {column.name: column for column in sketch.columns if column.type != "string"}
    widened = False
    for code, text in decoded.errors.values():
        match = re.match(r"\w+", text)
        if match is None or code not in ("wrong_type", "unreadable_timestamp"):
            continue
        if sketch.schema is not None:
            kind = decoded.rows.schema.field(match[0]).type
            is_time = code == "unreadable_timestamp" and not pa.types.is_nested(kind)
            widened |= _declare_wider(sketch, match[0], is_time)
        elif (column := columns.pop(match[0], None)) is not None:
            wider = _wider(column, sketch.form["type"])
            if wider is not None:
                other = wider.type != column.type
                note = f"{column.type.upper()} in most records" if other else ""
                sketch.replace(wider, note)
                widened = True
    return widened


def _wider(column: Column, form: str) -> Column | None:
    """Return the column that takes more values; None if none does. In Avro a time is a number; in
    Avro and Protobuf no other type is read as text."""
    if form in ("avro", "protobuf"):
        is_number = form == "avro" and column.type in ("timestamp", "date")
        return replace(column, type="bigint") if is_number else None
    if column.notation.decimal == "base64":
        # With `decimal.format: numeric` of Kafka Connect they are numbers.
        return replace(column, notation=replace(column.notation, decimal=""))
    return replace(column, type="string", notation=Notation())


def _declare_wider(sketch: Sketch, name: str, is_time: bool) -> bool:
    """Make a column of a subject take more values, if one does; return whether it is another."""
    schema = sketch.schema if isinstance(sketch.schema, dict) else {}
    columns: dict[str, Any] = schema.get("columns", {})
    declared = columns.get(name, {})
    more = declared if isinstance(declared, dict) else {"type": declared}
    is_number = sketch.form["type"] == "avro" and is_time
    kind = "BIGINT" if is_number else "STRING"
    if not is_number and (sketch.form["type"] != "json_schema" or more.get("type") == kind):
        return False
    wider = {"type": kind, "from": more["from"]} if "from" in more else kind
    sketch.schema = {**schema, "columns": {**columns, name: wider}}
    as_what = "number" if is_number else "text"
    sketch.comments.append(f"As its {as_what}: {name}: some values are of another type")
    return True


def _key(sketch: Sketch, stream: Stream, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns that are an event's identity, by the rows: none if no column is."""
    names = [column.name for column in stream.columns]
    maps = {column.name for column in stream.columns if "map<" in column.type}
    for key in sketch.keys:
        if not maps & set(key) and not count_duplicates(key, names, rows)[1]:
            return key
    if sketch.has_states or any(_OF_A_CHANGE.fullmatch(c.field[-1]) for c in stream.columns):
        sketch.key_note = "a later record of the same key is no duplicate"
        return []
    candidates = []
    computed = {name for one in sketch.select if isinstance(one, dict) for name in one}
    for column in stream.columns if sketch.format != "raw" else ():
        if column.name in computed:
            continue
        values = [row[column.name] for row in rows]
        if not _KEY_TYPES.fullmatch(column.type) or not rows or not all(map(_is_given, values)):
            continue
        rank = _rank(snake(column.name), values, stream.topic)
        is_unique = len(set(values)) == len(values)
        if is_unique or (rank < 2 and not count_duplicates([column.name], names, rows)[1]):
            candidates.append((rank, column.name))
    best = min(candidates, default=(9, ""))[0]
    chosen = next((name for rank, name in candidates if rank == best < 2), None)
    if chosen is None and len(rows) >= _ENOUGH:
        chosen = next((name for rank, name in candidates if rank == 2), None)
    others = [name for _, name in candidates if name != chosen][:5]
    if chosen is not None:
        note = "unique in these records"
        sketch.key_note = f"{note}; so is {', '.join(others)}" if others else note
        return [chosen]
    words = f"; unique in these records: {', '.join(others)}" if others else ""
    sketch.key_note = f"no duplicates are searched{words}"
    return []


def _is_given(value: object) -> bool:
    return value is not None and value != ""


def _rank(name: str, values: Sequence[object], topic: str) -> int:
    """Return how well a name fits an event's identity: 0, 1 alone, 2 with many rows, 3 not."""
    if name in _ALONE:
        return 0
    match = _ID.search(name)
    if match is None:
        return 1 if all(_UUID.fullmatch(str(value)) for value in values) else 3
    of = name[: match.start()]
    if _OF_OTHERS.search(of) and not re.search(rf"{of}s?$", snake(topic)):
        return 3
    # `number` alone may be that of what has many events.
    if not of and name in _COUNTED:
        return 3
    # `order_id` in the topic `shop.orders`.
    return 1 if of and of.rstrip("s") in snake(topic) else 2


def _time(sketch: Sketch, stream: Stream, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the column of the event's own time; empty if none is."""
    names = [column.name for column in stream.columns if column.type == "timestamp"]
    found = []
    for name in names:
        given = sum(row[name] is not None for row in rows)
        if 2 * given <= len(rows) or _OTHER_TIMES.search(snake(name)):
            continue
        rank = next((i for i, form in enumerate(_TIMES) if form.search(snake(name))), len(_TIMES))
        found.append((name != sketch.time, given < len(rows), rank, names.index(name)))
    if not found:
        return ""
    chosen = names[min(found)[-1]]
    if others := [name for name in names if name != chosen]:
        sketch.time_note = f"or {', '.join(others[:5])}"
    return chosen


def _name(text: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_]+", "_", text).strip("_") or "topic"
    return name if NAME.fullmatch(name) else f"t_{name}"


def _table(topic: str, name: str) -> str:
    """Return `shop.orders` for the topic of that name, `raw.orders` for one without a dot."""
    namespace, _, rest = topic.partition(".")
    if rest and NAME.fullmatch(namespace):
        return f"{namespace}.{_name(rest)}"
    return f"raw.{name}"


def write(folder: Path, draft: Draft) -> Path:
    """Write a draft's file, and return its path. Raises ConfigurationError if there is one."""
    path = folder / "streams" / f"{draft.stream}.yaml"
    path.parent.mkdir(exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(draft.file)
    except FileExistsError:
        raise ConfigurationError(
            f"draft: expected no file {path}, found one; move it away, or run without --write"
        ) from None
    return path
