"""The sketch of a topic whose values have schemas of a registry: of their subject, of Debezium's
changes, of several subjects or messages.
"""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa

from anabranch.common.errors import Refused
from anabranch.config import Environment, Stream
from anabranch.config.columns import Column, Notation, parts_of
from anabranch.config.schema import columns_mapping
from anabranch.decode import avro, protobuf
from anabranch.decode.avro import Malformed
from anabranch.decode.avro_names import Incompatible
from anabranch.decode.field_tree import Others, tree_of, unread_part
from anabranch.decode.guessed import Guess, guess
from anabranch.decode.inputs import PREFIX_BYTES, schema_ids
from anabranch.decode.protobuf import Key, indexes, message_of
from anabranch.decode.values import columns_of
from anabranch.kafka.schema_registry import (
    RegisteredSchema,
    SchemaRegistryClient,
    SubjectVersion,
)
from anabranch.operations.draft import forms
from anabranch.operations.draft.forms import Sketch, add_change
from anabranch.subjects.columns import (
    NotAColumn,
    NotAName,
    avro_fields,
    json_schema_fields,
    protobuf_fields,
)
from anabranch.subjects.plan import plan_columns, widened
from anabranch.subjects.schemas import whole_schema

_FORMATS = {"AVRO": "avro", "JSON": "json_schema", "PROTOBUF": "protobuf"}
_MOST_EXCLUDED = 100
SELECTED = "are in no column; `select` reads them, from columns in `schema`"
"""The words in a draft for headers and keys: `select` takes no columns of a subject."""


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
        sketch.add_fields(_objects(_payloads(records)), forms.stamps_of(records))
        return _with_fields(sketch, subjects, records)
    if kinds == {"AVRO"}:
        older = map(whole_schema, filter(None, map(registry.schema, ids)))
        latest = map(whole_schema, versions)
        return _merged("avro", subjects, latest, avro_fields, records, older)
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
    older: Iterable[str] = (),
) -> Sketch | None:
    types = dict[str, str]()
    for schema in schemas:
        try:
            fields = fields_of(schema)
        except NotAColumn:
            return None
        if any(types.setdefault(name, kind) != kind for name, kind in fields):
            return None
    for schema in older:
        with suppress(NotAColumn):
            for name, kind in fields_of(schema):
                types.setdefault(name, kind)
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
    key = registry.latest(f"{topic}-key")
    # The key of a table's row, as Kafka Connect writes it.
    has_states = key is not None and (key.type == "PROTOBUF" or _is(json.loads(key.text)))
    sketch = Sketch(_FORMATS.get(version.type, "avro"), has_states=has_states)
    if version.type == "AVRO":
        change = _change_of(version)
        if change is not None:
            changes = filter(None, map(_change_of, filter(None, map(registry.schema, ids))))
            return _of_changes(key, *change, [row for row, _ in changes])
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
    sent = _payloads(records) if version.type == "JSON" else []
    objects = _objects(sent)
    for _ in range(_MOST_EXCLUDED):
        stream = Stream.model_validate(
            {
                "name": "draft", "topic": topic, "table": "draft.draft", "key": "none",
                "format": {**sketch.form, "subject": version.subject}, "columns": (),
                "schema": "registry", "unknown": "rescue" if sketch.rescues else "count",
                "subject_schema": {"exclude": excluded, "columns": tuple(declared.columns)},
            }
        )  # fmt: skip
        try:
            planned = stream.with_columns(plan_columns(stream, version)).record_columns
            if version.type == "JSON":
                if exact := _exact(planned, objects):
                    # Of two of a name, the later one counts.
                    declared.columns += exact
                    continue
                if not sketch.rescues and _has_others(planned, sent):
                    sketch.rescues = True
                    continue
            elif older := _of_older(
                registry, version, ids, planned, sketch.form.get("message"), excluded
            ):
                replaced = {column.name for column in older}
                declared.columns = [c for c in declared.columns if c.name not in replaced] + older
                continue
            if forms.has_events(records):
                # `select` takes columns of the file.
                sketch.columns = [*planned]
                forms.add_metadata(sketch, records, lambda _: None)
                return sketch
            break
        except Refused as error:
            cause = error.__cause__
            name = cause.field if isinstance(cause, NotAColumn) else ""
            if objects and not name:
                comment = f"Without the subject's columns: {cause}"
                sketch = Sketch(sketch.format, has_states=has_states, comments=[comment])
                sketch.add_fields(objects, forms.stamps_of(records))
                return sketch
            if not isinstance(cause, NotAColumn) or not name or name in excluded:
                return _of_bytes(version, records, f"The subject is refused: {cause or error}")
            _declare_otherwise(cause, version, sketch, declared, excluded)
    else:
        return _of_bytes(version, records, f"The subject is refused: over {_MOST_EXCLUDED} fields")
    parts = {"columns": columns_mapping(declared.columns), "exclude": excluded}
    sketch.schema = {key: value for key, value in parts.items() if value} or "registry"
    if names := forms.headers_found(records)[1][:10]:
        sketch.comments.append(f"Headers {SELECTED}: {', '.join(names)}")
    return sketch


def _declare_otherwise(
    refused: NotAColumn,
    version: SubjectVersion,
    sketch: Sketch,
    declared: Sketch,
    excluded: list[str],
) -> None:
    """Declare the refused field under another name, as text or in part, or exclude it."""
    name = refused.field
    is_name = isinstance(refused, NotAName)
    if is_name and version.type != "PROTOBUF" and forms.is_usable(name):
        types = _types_of(version, excluded, declared)
        declared.columns = [one for one in declared.columns if one.name != name]
        others = [Column(of, "string", True) for of in types if of != name]
        named = Sketch(columns=[*others, *declared.columns])
        named.add(Guess(types[name]), name, (name,))
        declared.columns.append(named.columns[-1])
        excluded.append(name)
    elif version.type == "JSON" and not is_name:
        declared.columns.append(Column(name, "string", True))
        sketch.comments.append(f"As its text: {refused}")
    elif all(column.name != name for column in declared.columns) and (
        part := _part_of(version, sketch, name, excluded)
    ):
        declared.columns.append(Column(name, part[0], True))
        sketch.comments += [f"Left out: {error}" for error in part[1]]
    else:
        excluded.append(name)
        sketch.comments.append(f"Left out: {refused}")


def _part_of(
    version: SubjectVersion, sketch: Sketch, name: str, excluded: Sequence[str]
) -> tuple[str, Sequence[NotAColumn]] | None:
    """Return the type of a field without the parts of its records that have none, and their errors;
    None if it has no such part, or none that is left."""
    text, message = whole_schema(version), sketch.form.get("message")
    given: dict[str, str | None] = dict.fromkeys(excluded)
    while name not in given:
        left = list[NotAColumn]()
        try:
            if version.type == "PROTOBUF":
                types = dict(protobuf_fields(text, message, given, left))
            else:
                types = dict(avro_fields(text, given, left))
        except NotAColumn as error:
            given[error.field] = None
        else:
            of_name = [e for e in left if e.field.startswith((f"{name}.", f"{name}[", f"{name}{{"))]
            return (types[name], of_name) if of_name else None
    return None


def _of_bytes(version: SubjectVersion, records: pa.RecordBatch, comment: str) -> Sketch:
    """Return the sketch of values with a schema that no format reads: their bytes, of JSON also the
    text."""
    sketch = forms.raw("binary", records, [comment])
    if version.type == "JSON":
        names = [column.name for column in sketch.columns]
        sql = f"decode(value[{PREFIX_BYTES + 1}:])"
        sketch.select = [*(sketch.select or names), {"text": {"sql": sql, "type": "STRING"}}]
    return sketch


def _of_older(
    registry: SchemaRegistryClient,
    version: SubjectVersion,
    ids: Collection[int],
    planned: Sequence[Column],
    message: str | None,
    excluded: Collection[str],
) -> list[Column]:
    """Return columns for what records of other versions have and the latest one lacks: their own
    fields, and wider types."""
    latest = whole_schema(version)
    every, found = Sketch(columns=[*planned]), dict[str, Column]()
    for schema in filter(None, map(registry.schema, ids)):
        with suppress(NotAColumn, Incompatible):
            text = whole_schema(schema)
            is_avro = version.type == "AVRO"
            fields = _fields(text, []) if is_avro else protobuf_fields(text, message)
            known = {column.field[0]: column for column in every.columns}
            for name, kind in fields:
                column = known.get(name)
                if column is None and name not in excluded:
                    every.add(Guess(kind), name, (name,))
                    found[every.columns[-1].name] = every.columns[-1]
                elif column is not None and column.notation == Notation():
                    wider = replace(column, type=widened(name, column.type, kind))
                    columns = [wider if one is column else one for one in every.columns]
                    if wider != column and _are_read(version.type, latest, message, columns):
                        every.columns, found[wider.name] = columns, wider
    return list(found.values())


def _are_read(kind: str, text: str, message: str | None, columns: Sequence[Column]) -> bool:
    try:
        if kind == "AVRO":
            avro.plan(text, tuple(columns))
        else:
            protobuf.plan(text, message or (0,), columns_of(columns))
    except Incompatible:
        return False
    return True


def _exact(columns: Sequence[Column], objects: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return columns in place of those with a DOUBLE that has not all digits of its numbers."""
    found = []
    for column in columns:
        kind = _exact_type(column.type, [one.get(column.field[0]) for one in objects])
        if kind != column.type:
            found.append(replace(column, type=kind))
    return found


def _exact_type(kind: str, values: Sequence[Any]) -> str:
    name, parts = parts_of(kind)
    if kind == "double":
        numbers = [n for n in values if isinstance(n, int | Decimal)]
        if all(Decimal(repr(float(Decimal(n)))) == n for n in numbers):
            return kind
        exact = getattr(guess(numbers), "type", "string")
        return exact if exact == "bigint" or exact.startswith("decimal") else "string"
    objects = [one for one in values if isinstance(one, Mapping)]
    if name == "array":
        items = [item for one in values if isinstance(one, list) for item in one]
        return f"array<{_exact_type(parts[0], items)}>"
    if name == "map":
        items = [item for one in objects for item in one.values()]
        return f"map<{parts[0]},{_exact_type(parts[1], items)}>"
    if name == "struct":
        fields = [part.partition(":") for part in parts]
        inner = [f"{n}:{_exact_type(of, [one.get(n) for one in objects])}" for n, _, of in fields]
        return f"struct<{','.join(inner)}>"
    return kind


def _has_others(columns: Sequence[Column], sent: Sequence[bytes]) -> bool:
    """Return whether objects have fields that no column reads, at any level."""
    root, others = tree_of(columns), Others()
    for one in sent:
        unread_part(one, root, others)
    return bool(others)


def _types_of(
    version: SubjectVersion, excluded: Sequence[str], declared: Sketch
) -> Mapping[str, str]:
    given = dict.fromkeys(excluded) | {c.name: c.type for c in declared.columns}
    fields = avro_fields if version.type == "AVRO" else json_schema_fields
    return dict(fields(whole_schema(version), given))


def _payloads(records: pa.RecordBatch) -> list[bytes]:
    """Return what is in the wire format."""
    values = records.column("value").to_pylist()
    return [value[PREFIX_BYTES:].removeprefix(BOM_UTF8) for value in values if value is not None]


def _objects(sent: Sequence[bytes]) -> list[Mapping[str, Any]]:
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


def _change_of(
    version: RegisteredSchema | SubjectVersion,
) -> tuple[Mapping[str, Any], object] | None:
    """Return the record of Debezium's rows and the type of its source, of an envelope's schema;
    None for any other schema."""
    schema = json.loads(version.text) if version.type == "AVRO" else {}
    fields = {f["name"]: f["type"] for f in schema.get("fields", ())} if _is(schema) else {}
    if not {"before", "after", "op", "source"} <= fields.keys():
        return None
    before = fields["before"] if isinstance(fields["before"], list) else [fields["before"]]
    return next(((branch, fields["source"]) for branch in before if _is(branch)), None)


def _is(schema: object) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") in ("record", "object")


def _of_changes(
    key: SubjectVersion | None,
    latest: Mapping[str, Any],
    of_source: object,
    older: Iterable[Mapping[str, Any]],
) -> Sketch:
    sketch = Sketch({"type": "avro", "envelope": "debezium"}, implied=("row",))
    left, columns = list[NotAColumn](), dict[str, str]()
    for row in (latest, *older):
        for name, kind in _fields(json.dumps(row), left):
            columns.setdefault(name, kind)
    for name, kind in columns.items():
        sketch.add(Guess(kind), name, ("row", name))
    sketch.comments += dict.fromkeys(f"Left out: {error}" for error in left)
    names = {(column.path or ("row", column.name))[1]: column.name for column in sketch.columns}
    of_key = [name for name, _ in _fields(key.text, [])] if key is not None else []
    source = {name: Guess(kind) for name, kind in _fields(json.dumps(of_source), [])}
    add_change(sketch, [names[name] for name in of_key if name in names], source)
    return sketch


def _fields(text: str, left: list[NotAColumn]) -> Sequence[tuple[str, str]]:
    """Return the fields of a record that have a type; none of another schema. `left` takes the
    errors of what is left out."""
    given: dict[str, str | None] = {}
    while len(given) < _MOST_EXCLUDED:
        try:
            return avro_fields(text, given, left)
        except NotAColumn as error:
            if error.field in given:
                break
            given[error.field] = None
            left.append(error)
    return []


def with_columns(stream: Stream, registry: SchemaRegistryClient) -> Stream:
    """Return a stream with `schema: registry` with the columns of its subject's latest version."""
    version = registry.latest(stream.subject)
    assert version is not None
    return stream.with_columns(plan_columns(stream, version))
