"""The columns of a stream with `schema: registry`, decided from its table, its subject and its
file. Pure.

Both layers read by the table's columns. A subject adds and widens columns; it never drops, narrows
or requires one. So records of older and newer versions of the subject are read by the same columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from pyiceberg.schema import Schema
from pyiceberg.types import (
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StructType,
)

from anabranch.common.errors import Refused
from anabranch.config import RESERVED_COLUMNS, TAKEN_COLUMNS, Stream
from anabranch.config.columns import MOST_DIGITS, RESCUED, Column
from anabranch.decode import avro, protobuf
from anabranch.decode.avro_names import Incompatible
from anabranch.decode.values import columns_of
from anabranch.iceberg.schema_evolution import type_words
from anabranch.iceberg.table_schemas import iceberg_type
from anabranch.kafka.schema_registry import SubjectVersion
from anabranch.subjects.columns import (
    NotAColumn,
    NotAName,
    NotReadable,
    avro_fields,
    json_schema_fields,
    protobuf_fields,
    require_names,
)
from anabranch.subjects.schemas import whole_schema

# The narrower types that a column also reads: a subject's field that becomes narrower changes
# nothing.
_NARROWER: dict[type[IcebergType], tuple[type[IcebergType], ...]] = {
    LongType: (IntegerType,),
    FloatType: (IntegerType, LongType),
    DoubleType: (IntegerType, LongType, FloatType),
}


MOST_COLUMNS = 1_000
"""Maximum number of columns that a subject gives a table: each file of it describes them all."""


def plan_columns(
    stream: Stream, version: SubjectVersion, have: Schema | None = None
) -> tuple[Column, ...]:
    """Return the columns that the stream's table should have, by its file and a version of its
    subject; existing columns of the table come first.

    A column of the table stays, with a type at least as wide. The table may be unable to take up
    the type: `plan_evolution` then refuses. Columns of the key are NOT NULL, and those that the
    file declares so. Raises Refused, with the field's path, for a field that cannot be a column or
    differs from one of the table only by case, for a type in the file as which the subject's
    field cannot be read, and for a key column that the subject lacks.
    """
    rules = stream.subject_schema
    assert rules is not None
    declared = {column.name: column for column in rules.columns}
    where = f"stream {stream.name}, subject {version.subject} version {version.version}"
    try:
        types = {name: column.type for name, column in declared.items()}
        of_subject = dict(_fields(stream, version, dict.fromkeys(rules.exclude) | types))
        subject_types = of_subject | types
        require_names("", list(subject_types))
        if taken := next(
            (name for name in subject_types if name.lower() in _taken_names(stream)), None
        ):
            raise NotAName(taken, f"names other than {', '.join(_taken_names(stream))}", taken)
    except NotReadable as error:
        raise Refused(
            f"{where}: {error}; no record of it can be read, whichever fields are left out: "
            "change the subject, or keep the bytes of its records with `format: raw`"
        ) from error
    except NotAColumn as error:
        # No type of a column reads what is refused of Avro and Protobuf.
        given = "leave it out of its record (`schema: {columns: NAME STRUCT<...>}`)"
        if version.type == "JSON":
            given = "give the column a type (`schema: {columns: NAME TYPE}`)"
        if isinstance(error, NotAName) and version.type != "PROTOBUF":
            other = "{OTHER: {type: TYPE, from: NAME}}"
            given = f"choose another name (`schema: {{columns: {other}, exclude: [NAME]}}`)"
        raise Refused(
            f"{where}: {error}; change the subject, or in the stream's file {given} or leave the "
            "column out (`schema: {exclude: [NAME]}`)"
        ) from error
    try:
        _require_readable(stream, version, (c for c in rules.columns if c.name in of_subject))
    except Incompatible as error:
        raise Refused(
            f"{where}: {error}; correct `schema: {{columns: ...}}` in the stream's file, or leave "
            "the field out (`schema: {exclude: [NAME]}`)"
        ) from None
    if missing := [name for name in stream.key if name not in subject_types]:
        raise Refused(
            f"{where}: key: expected a field {missing[0]}, found {', '.join(subject_types)}; "
            "correct `key:` or the subject"
        )
    known = {column.name: column for column in table_columns(have)} if have is not None else {}
    try:
        columns = tuple(_merge(stream, declared, known, subject_types))
    except NotAColumn as error:
        raise Refused(
            f"{where}: {error}, of the table and the subject; give the field its former name in "
            "the subject, or leave it out in the stream's file (`schema: {exclude: "
            "[NAME]}`)"
        ) from None
    if len(columns) > max(MOST_COLUMNS, len(known)):
        raise Refused(
            f"{where}: expected at most {MOST_COLUMNS} columns of a table, found {len(columns)}; "
            "reduce the fields of the subject, or leave columns out in the stream's file "
            "(`schema: {exclude: [NAME]}`)"
        )
    return tuple(
        column for column in columns if stream.unknown != "rescue" or column.name != RESCUED.name
    )


def _merge(
    stream: Stream,
    declared: Mapping[str, Column],
    known: Mapping[str, Column],
    subject_types: Mapping[str, str],
) -> Iterator[Column]:
    """Yield the table's columns, then those that subject or file add. Raises NotAColumn for names,
    also in a struct, that differ only by case: Spark does not distinguish them."""
    names = list(dict.fromkeys((*known, *subject_types)))
    require_names("", names)
    for name in names:
        before, column = known.get(name), declared.get(name)
        kind = column.type if column is not None else subject_types.get(name)
        if before is not None and column is None:
            kind = before.type if kind is None else widened(name, before.type, kind)
        assert kind is not None
        is_key = name in stream.key and (before is None or not before.nullable)
        yield Column(name, kind, column.nullable if column is not None else not is_key)


def table_columns(schema: Schema) -> tuple[Column, ...]:
    """Return the stream's columns of its table, without RESERVED_COLUMNS."""
    return tuple(
        Column(f.name, type_words(f.field_type, in_order=True), not f.required)
        for f in schema.fields
        if f.name not in RESERVED_COLUMNS
    )


def _taken_names(stream: Stream) -> Sequence[str]:
    return (*TAKEN_COLUMNS, RESCUED.name) if stream.unknown == "rescue" else TAKEN_COLUMNS


def _require_readable(stream: Stream, version: SubjectVersion, columns: Iterable[Column]) -> None:
    """Raise Incompatible for a type in the file as which the subject's field cannot be read: each
    record would become a dead letter."""
    nullable = tuple(replace(column, nullable=True) for column in columns)
    if nullable and version.type == "AVRO":
        avro.plan(whole_schema(version), nullable)
    if nullable and version.type == "PROTOBUF":
        protobuf.plan(whole_schema(version), stream.format.message or (0,), columns_of(nullable))


def _fields(
    stream: Stream, version: SubjectVersion, given: Mapping[str, str | None]
) -> Iterable[tuple[str, str]]:
    expected = {"avro": "AVRO", "json_schema": "JSON", "protobuf": "PROTOBUF"}[stream.format.type]
    if version.type != expected:
        raise NotReadable("", f"type {expected} with format {stream.format.type}", version.type)
    if version.type == "JSON" and version.references:
        raise NotReadable("", "a schema that stands alone", "references to other subjects")
    try:
        text = whole_schema(version)
    except Incompatible as error:
        raise NotReadable("", "a schema that can be read", str(error)) from None
    if version.type == "PROTOBUF":
        return protobuf_fields(text, stream.format.message, given)
    return (avro_fields if version.type == "AVRO" else json_schema_fields)(text, given)


def widened(path: str, old_type: str, new_type: str) -> str:
    """Return the type of a table's column after a change of the subject: widened if the subject is
    wider, never narrowed. Raises NotAColumn as `_merge`."""
    ids = [0]
    wider = _wider(path, iceberg_type(old_type, ids), iceberg_type(new_type, ids))
    return type_words(wider, in_order=True)


def _wider(path: str, old_type: IcebergType, new_type: IcebergType) -> IcebergType:
    if isinstance(old_type, StructType) and isinstance(new_type, StructType):
        new = {f.name: f.field_type for f in new_type.fields}
        old = {f.name: f.field_type for f in old_type.fields}
        require_names(path, list(dict.fromkeys((*old, *new))))
        kinds = {
            name: _wider(f"{path}.{name}", kind, new[name]) if name in new else kind
            for name, kind in old.items()
        }
        kinds |= {name: kind for name, kind in new.items() if name not in old}
        return StructType(
            *(NestedField(i, name, kind) for i, (name, kind) in enumerate(kinds.items(), 1))
        )
    if isinstance(old_type, ListType) and isinstance(new_type, ListType):
        return ListType(
            1,
            _wider(f"{path}[]", old_type.element_type, new_type.element_type),
            element_required=False,
        )
    if isinstance(old_type, MapType) and isinstance(new_type, MapType):
        return MapType(
            1,
            old_type.key_type,
            2,
            _wider(f"{path}{{}}", old_type.value_type, new_type.value_type),
            value_required=False,
        )
    if isinstance(old_type, DecimalType) and isinstance(new_type, DecimalType):
        digits = max(new_type.precision - new_type.scale, old_type.precision - old_type.scale)
        reads_both = new_type.scale <= old_type.scale and digits + old_type.scale <= MOST_DIGITS
        return DecimalType(digits + old_type.scale, old_type.scale) if reads_both else new_type
    return old_type if isinstance(new_type, _NARROWER.get(type(old_type), ())) else new_type
