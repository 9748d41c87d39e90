"""Draft a stream's file from records of its topic, or from its subject.

1. Find the format: of the registry, else JSON, CSV, text or bytes, and the envelope.
2. Guess the columns (`anabranch.decode.guessed`).
3. Decode the records with the draft, as the jobs would, and make a column that refuses a value
   STRING, which refuses none.
4. Choose key and event time from the rows.
5. Check the file as `anabranch check` does.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa

from anabranch.common.errors import ConfigurationError, NotYet, Refused
from anabranch.config import Environment, Stream
from anabranch.config.columns import Column, Notation
from anabranch.config.loading import parse_stream
from anabranch.config.plain import NAME
from anabranch.config.schema import columns_mapping
from anabranch.decode import Decoded
from anabranch.decode.avro import Malformed
from anabranch.decode.avro_names import Incompatible
from anabranch.decode.guessed import Guess, guess, snake
from anabranch.decode.inputs import PREFIX_BYTES, schema_ids
from anabranch.decode.protobuf import Key, indexes, message_of
from anabranch.kafka.client import KafkaAdapter
from anabranch.kafka.schema_registry import SchemaRegistryClient, SubjectVersion, open_registry
from anabranch.operations.check import (
    RECORDS,
    Check,
    batch_of,
    check_of,
    count_duplicates,
    decode_sample,
)
from anabranch.operations.draft import forms
from anabranch.operations.draft.forms import Sketch, add_change, text_of, time_of
from anabranch.protocol.ledger_row import is_too_many
from anabranch.subjects.columns import (
    NotAColumn,
    NotAName,
    avro_fields,
    json_schema_fields,
    protobuf_fields,
)
from anabranch.subjects.plan import plan_columns
from anabranch.subjects.schemas import whole_schema

_FORMATS = {"AVRO": "avro", "JSON": "json_schema", "PROTOBUF": "protobuf"}
_MOST_EXCLUDED = 100
_SELECTED = "are in no column; `select` reads them, from columns in `schema`"


def sketch_of_registry(
    environment: Environment, topic: str, records: pa.RecordBatch
) -> Sketch | None:
    """Return the sketch of a topic by the subject of its values; None if the environment has no
    registry, or most records have no schema id of it. Without records, the topic's own subject is
    that of its values. Raises Transient and ConfigurationError of the registry."""
    if environment.registry is None:
        return None
    registry = SchemaRegistryClient(environment.registry)
    ids = Counter(id for id in schema_ids(records.column("value")).tolist() if id > 0)
    given = len(records) - records.column("value").null_count
    known = {id: n for id, n in ids.items() if registry.schema(id) is not None}
    if given and 2 * sum(known.values()) < given:
        return None
    own = f"{topic}-value"
    version = registry.latest(own)
    subjects = {id: registry.subjects(id) for id in known}
    names = Counter[str]()
    for id, n in known.items():
        names.update(dict.fromkeys(subjects[id], n))
    if version is not None and (not names or own in names):
        return _of_version(topic, registry, version, records, known)

    def rank(name: str) -> tuple[int, bool, str]:
        # Of a schema with several subjects, that of this topic.
        return -names[name], not name.startswith(topic), name

    own, *others = sorted({min(of, key=rank) for of in subjects.values() if of}, key=rank) or [own]
    version = registry.latest(own)
    if version is None:
        return None
    if others and (merged := _of_subjects(registry, [own, *others], records, known)) is not None:
        return merged
    sketch = _of_version(topic, registry, version, records, known)
    sketch.format = {**sketch.form, "subject": own}
    if others:
        listed = ", ".join(others[:5])
        sketch.comments.append(f"Records of other subjects are dead letters: {listed}")
    return sketch


def _of_subjects(
    registry: SchemaRegistryClient,
    subjects: Sequence[str],
    records: pa.RecordBatch,
    ids: Collection[int],
) -> Sketch | None:
    """Return the sketch of records of several subjects, with the fields of all; None if a field has
    no column, or two types."""
    versions = [version for name in subjects if (version := registry.latest(name)) is not None]
    kinds = {version.type for version in versions}
    if kinds == {"PROTOBUF"}:
        return _of_messages(_messages_of(registry, records, ids), records)
    if kinds == {"JSON"}:
        sketch = Sketch("json_schema", has_states=True)
        sketch.add_fields(_payloads(records), forms.stamps_of(records))
        return _with_fields(sketch, subjects, records)
    if kinds == {"AVRO"}:
        return _merged("avro", subjects, map(whole_schema, versions), avro_fields, records)
    return None


def _of_messages(messages: Mapping[str, str], records: pa.RecordBatch) -> Sketch | None:
    """Return the sketch of records of several messages; None as in `_of_subjects`."""

    def fields_of(name: str) -> Sequence[tuple[str, str]]:
        return protobuf_fields(messages[name], name)

    sketch = _merged("protobuf", [*messages], messages, fields_of, records)
    # No column has another name than its field.
    return None if sketch is None or any(column.path for column in sketch.columns) else sketch


def _merged(
    form: str,
    names: Sequence[str],
    schemas: Iterable[str],
    fields_of: Callable[[str], Sequence[tuple[str, str]]],
    records: pa.RecordBatch,
) -> Sketch | None:
    types = dict[str, str]()
    for schema in schemas:
        try:
            fields = fields_of(schema)
        except NotAColumn:
            return None
        if any(types.setdefault(name, kind) != kind for name, kind in fields):
            return None
    # One event's identity may be in records of each type.
    sketch = Sketch(form, has_states=True)
    for name, kind in types.items():
        sketch.add(Guess(kind), name, (name,))
    return _with_fields(sketch, names, records)


def _with_fields(sketch: Sketch, names: Sequence[str], records: pa.RecordBatch) -> Sketch | None:
    if not sketch.columns:
        return None
    forms.add_metadata(sketch, records, lambda _: None)
    sketch.comments.append(f"With the fields of {', '.join(names[:5])}")
    return sketch


def _of_version(
    topic: str,
    registry: SchemaRegistryClient,
    version: SubjectVersion,
    records: pa.RecordBatch,
    ids: Collection[int],
) -> Sketch:
    sketch = Sketch(_FORMATS.get(version.type, "avro"))
    if version.type == "AVRO":
        row = _row_of(version)
        if row is not None:
            return _of_changes(topic, registry, version, row)
    if version.type == "PROTOBUF":
        messages = _messages_of(registry, records, ids)
        if len(messages) > 1 and (merged := _of_messages(messages, records)) is not None:
            return merged
        message, *more = messages or [""]
        if message:
            sketch.format = {"type": "protobuf", "message": message}
        if more:
            listed = ", ".join(more[:5])
            sketch.comments.append(f"Records of other messages are dead letters: {listed}")
    # Columns that the file declares, and fields that get none under their own names.
    declared, excluded = Sketch(), list[str]()
    if version.type == "AVRO" and _is(record := json.loads(version.text)):
        for name, time in _times_of(record).items():
            declared.columns.append(Column(name, time.type, True, notation=time.notation))
    for _ in range(_MOST_EXCLUDED):
        stream = Stream.model_validate(
            {
                "name": "draft", "topic": topic, "table": "draft.draft", "key": "none",
                "format": {**sketch.form, "subject": version.subject}, "columns": (),
                "schema": "registry",
                "subject_schema": {"exclude": excluded, "columns": tuple(declared.columns)},
            }
        )  # fmt: skip
        try:
            planned = stream.with_columns(plan_columns(stream, version)).columns
            if version.type == "JSON":
                objects = _payloads(records)
                if exact := _exact(planned, objects):
                    given = {column.name for column in exact}
                    kept = [column for column in declared.columns if column.name not in given]
                    declared.columns = [*kept, *exact]
                    continue
                read = {column.field[0] for column in planned}
                sketch.rescues = any(one.keys() - read for one in objects)
            if forms.has_events(records):
                # `select` takes columns of the file.
                sketch.columns = [*planned]
                forms.add_metadata(sketch, records, lambda _: None)
                return sketch
            break
        except Refused as error:
            cause = error.__cause__
            name = cause.field if isinstance(cause, NotAColumn) else ""
            if version.type == "JSON" and not name and (objects := _payloads(records)):
                sketch = Sketch(sketch.format, comments=[f"Without the subject's columns: {cause}"])
                sketch.add_fields(objects, forms.stamps_of(records))
                return sketch
            if not name or name in excluded:
                sketch.comments.append(f"The subject is refused: {error}")
                break
            if isinstance(cause, NotAName) and version.type != "PROTOBUF" and forms.is_usable(name):
                types = _types_of(version, excluded, declared)
                notations = {one.name: one.notation for one in declared.columns}
                declared.columns = [one for one in declared.columns if one.name != name]
                others = [Column(of, "string", True) for of in types if of != name]
                named = Sketch(columns=[*others, *declared.columns])
                named.add(Guess(types[name], notations.get(name, Notation())), name, (name,))
                declared.columns.append(named.columns[-1])
                excluded.append(name)
            elif version.type == "JSON" and not isinstance(cause, NotAName):
                declared.columns.append(Column(name, "string", True))
                sketch.comments.append(f"As its text: {cause}")
            else:
                excluded.append(name)
                sketch.comments.append(f"Left out: {cause}")
    parts = {"columns": columns_mapping(declared.columns), "exclude": excluded}
    sketch.schema = {key: value for key, value in parts.items() if value} or "registry"
    if names := forms.headers_in_all(records)[1][:10]:
        sketch.comments.append(f"Headers {_SELECTED}: {', '.join(names)}")
    return sketch


def _exact(columns: Sequence[Column], objects: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return columns in place of the DOUBLE ones that have not all digits of their numbers."""
    found = []
    for column in columns:
        if column.type == "double":
            values = [one.get(column.field[0]) for one in objects]
            numbers = [n for n in values if isinstance(n, int | Decimal)]
            if any(Decimal(repr(float(Decimal(n)))) != n for n in numbers):
                kind = getattr(guess(numbers), "type", "string")
                is_exact = kind == "bigint" or kind.startswith("decimal")
                found.append(replace(column, type=kind if is_exact else "string"))
    return found


def _types_of(
    version: SubjectVersion, excluded: Sequence[str], declared: Sketch
) -> Mapping[str, str]:
    given = dict.fromkeys(excluded) | {c.name: c.type for c in declared.columns}
    fields = avro_fields if version.type == "AVRO" else json_schema_fields
    return dict(fields(whole_schema(version), given))


def _payloads(records: pa.RecordBatch) -> Sequence[Mapping[str, Any]]:
    """Return the objects of JSON in the wire format."""
    sent = [
        value[PREFIX_BYTES:] for value in records.column("value").to_pylist() if value is not None
    ]
    return [one for one in map(forms.read, sent) if isinstance(one, Mapping)]


def _messages_of(
    registry: SchemaRegistryClient, records: pa.RecordBatch, ids: Collection[int]
) -> dict[str, str]:
    """Return the records' messages, the most frequent first, with their schemas; none if all
    records have the first message of their file, which is the default."""
    found = Counter[tuple[int, Key]]()
    for value, id in zip(
        records.column("value").to_pylist(), schema_ids(records.column("value")), strict=True
    ):
        with suppress(IndexError, ValueError, Malformed):
            if int(id) in ids:
                found[int(id), indexes(value[PREFIX_BYTES:])[0]] += 1
    names, texts = Counter[str](), dict[str, str]()
    for (id, key), n in found.items():
        with suppress(Incompatible):
            if (schema := registry.schema(id)) is not None:
                name = str(message_of(whole_schema(schema), key).full_name)
                names[name] += n
                texts[name] = whole_schema(schema)
    is_first = len(names) < 2 and all(key == (0,) for _, key in found)
    return {} if is_first else {name: texts[name] for name, _ in names.most_common()}


def _row_of(version: SubjectVersion) -> Mapping[str, Any] | None:
    """Return the record of Debezium's rows in an envelope's schema; None for any other schema."""
    schema = json.loads(version.text)
    fields = {f["name"]: f["type"] for f in schema.get("fields", ())} if _is(schema) else {}
    if not {"before", "after", "op", "source"} <= fields.keys():
        return None
    before = fields["before"] if isinstance(fields["before"], list) else [fields["before"]]
    return next((branch for branch in before if _is(branch)), None)


def _is(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "record"


def _of_changes(
    topic: str, registry: SchemaRegistryClient, version: SubjectVersion, row: Mapping[str, Any]
) -> Sketch:
    sketch = Sketch({"type": "avro", "envelope": "debezium"}, implied=("row",))
    times = _times_of(row)
    for name, kind in _fields(json.dumps(row)):
        sketch.add(times.get(name, Guess(kind)), name, ("row", name))
    key = registry.latest(f"{topic}-key")
    names = {(column.path or ("row", column.name))[1]: column.name for column in sketch.columns}
    of_key = [name for name, _ in _fields(key.text)] if key is not None else []
    source = {name: Guess(kind) for name, kind in _fields(_of_source(version))}
    add_change(sketch, [names[name] for name in of_key if name in names], source)
    return sketch


def _times_of(record: Mapping[str, Any]) -> dict[str, Guess]:
    """Return the columns of numbers that Kafka Connect names as times."""
    found = dict[str, Guess]()
    for field in record["fields"]:
        kind = field["type"]
        for branch in kind if isinstance(kind, list) else [kind]:
            is_number = isinstance(branch, Mapping) and branch.get("type") in ("int", "long")
            time = time_of(branch.get("connect.name")) if is_number else None
            if time is not None and branch.get("logicalType") is None:
                found[field["name"]] = time
    return found


def _of_source(version: SubjectVersion) -> str:
    fields = {f["name"]: f["type"] for f in json.loads(version.text)["fields"]}
    return json.dumps(fields["source"])


def _fields(text: str) -> Sequence[tuple[str, str]]:
    """Return the fields of a record that have a type; none of another schema."""
    found: list[tuple[str, str]] = []
    given: dict[str, str | None] = {}
    while len(given) < _MOST_EXCLUDED:
        try:
            return avro_fields(text, given)
        except NotAColumn as error:
            if (field := re.match(r"\w+", str(error))) is None or field[0] in given:
                return found
            given[field[0]] = None
    return found


def with_columns(stream: Stream, registry: SchemaRegistryClient) -> Stream:
    """Return a stream with `schema: registry` with the columns of its subject's latest version."""
    version = registry.latest(stream.subject)
    assert version is not None
    return stream.with_columns(plan_columns(stream, version))


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
        raise NotYet(f"draft: expected topics that match {wanted}, found none; create one first")
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
            sketch.comments.append(f"Keys {_SELECTED}")
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
            widened |= _declare_wider(sketch, match[0])
        elif (column := columns.pop(match[0], None)) is not None:
            wider = _wider(column, sketch.form["type"])
            if wider is not None:
                other = wider.type != column.type
                note = f"{column.type.upper()} in most records" if other else ""
                sketch.replace(wider, note)
                widened = True
    return widened


def _wider(column: Column, form: str) -> Column | None:
    """Return the column that takes more values; None if none does. In Avro and Protobuf a time is
    a number, and no other type is read as text."""
    if form in ("avro", "protobuf"):
        return replace(column, type="bigint", notation=Notation()) if column.notation.unit else None
    if column.notation.decimal == "base64":
        # With `decimal.format: numeric` of Kafka Connect they are numbers.
        return replace(column, notation=replace(column.notation, decimal=""))
    return replace(column, type="string", notation=Notation())


def _declare_wider(sketch: Sketch, name: str) -> bool:
    """Make a column of a subject take more values, if one does; return whether it is another."""
    schema = sketch.schema if isinstance(sketch.schema, dict) else {}
    columns: dict[str, Any] = schema.get("columns", {})
    declared = columns.get(name, {})
    more = declared if isinstance(declared, dict) else {"type": declared}
    is_number = sketch.form["type"] == "avro" and "unit" in more
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
