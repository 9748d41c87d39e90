"""The sketch of a topic whose values have schemas of the registry."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from anabranch.common.errors import Refused
from anabranch.config import Environment, Stream
from anabranch.decode.guessed import Guess
from anabranch.decode.wire import schema_ids
from anabranch.kafka.schema_registry import SchemaRegistryClient, SubjectVersion
from anabranch.operations.draft.forms import add_change, time_of
from anabranch.operations.draft.sketch import Sketch
from anabranch.subjects.columns import NotAColumn, avro_fields
from anabranch.subjects.plan import plan_columns

_FORMATS = {"AVRO": "avro", "JSON": "json_schema", "PROTOBUF": "protobuf"}
_MOST_EXCLUDED = 100


def sketch_of(environment: Environment, topic: str, records: pa.RecordBatch) -> Sketch | None:
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
    names = Counter[str]()
    for id, n in known.items():
        names.update(dict.fromkeys(registry.subjects(id), n))
    if (version is None or (names and own not in names)) and names:
        [(own, _), *_] = names.most_common(1)
        version = registry.latest(own)
    if version is None:
        return None
    sketch = _of_version(topic, registry, version)
    if own != f"{topic}-value":
        of = sketch.format if isinstance(sketch.format, dict) else {"type": sketch.format}
        sketch.format = {**of, "subject": own}
        if len(names) > 1:
            others = ", ".join(sorted(names.keys() - {own})[:5])
            sketch.comments.append(f"Records of other subjects are dead letters: {others}")
    return sketch


def _of_version(topic: str, registry: SchemaRegistryClient, version: SubjectVersion) -> Sketch:
    sketch = Sketch(_FORMATS.get(version.type, "avro"), schema="registry")
    if version.type == "AVRO":
        row = _row_of(version)
        if row is not None:
            return _of_changes(topic, registry, version, row)
    excluded: list[str] = []
    while len(excluded) < _MOST_EXCLUDED:
        stream = Stream.model_validate(
            {
                "name": "draft", "topic": topic, "table": "draft.draft", "key": "none",
                "format": {"type": sketch.format, "subject": version.subject}, "columns": (),
                "subject_schema": {"exclude": excluded}, "schema": "registry",
            }
        )  # fmt: skip
        try:
            plan_columns(stream, version)
            break
        except Refused as error:
            cause = error.__cause__
            field = re.match(r"\w+", str(cause)) if isinstance(cause, NotAColumn) else None
            if field is None or field[0] in excluded:
                sketch.comments.append(f"The subject is refused: {error}")
                break
            excluded.append(field[0])
            sketch.comments.append(f"Left out: {cause}")
    if excluded:
        sketch.schema = {"exclude": excluded}
    return sketch


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
    raw = {field["name"]: field["type"] for field in row["fields"]}
    for name, kind in _fields(json.dumps(row)):
        of = Guess(kind)
        for branch in raw[name] if isinstance(raw[name], list) else [raw[name]]:
            is_number = isinstance(branch, Mapping) and branch.get("type") in ("int", "long")
            if is_number and branch.get("logicalType") is None:
                of = time_of(branch.get("connect.name")) or of
        sketch.add(of, name, ("row", name))
    key = registry.latest(f"{topic}-key")
    names = {(column.path or ("row", column.name))[1]: column.name for column in sketch.columns}
    of_key = [name for name, _ in _fields(key.text)] if key is not None else []
    source = {name: Guess(kind) for name, kind in _fields(_of_source(version))}
    add_change(sketch, [names[name] for name in of_key if name in names], source)
    return sketch


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
