"""Avro: Confluent's wire format whose payload is one value in the writer's schema of its id.

Spark's `from_avro` takes the writer's schema as a literal, so each schema id of the records has its
own expression, with the writer's schema and a reader's schema that `avro_schema` derives from it
and the stream's columns.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame
from pyspark.sql.types import DataType, DateType, StringType, TimestampType

from anabranch.common.errors import Terminal
from anabranch.config import Stream
from anabranch.config.columns import Column
from anabranch.kafka.schema_registry import RegisteredSchema, SchemaRegistryClient
from anabranch.records.checks import Check, error, expected_found, utc
from anabranch.records.fast_avro import Fields, plan_fields
from anabranch.records.formats import Reading
from anabranch.records.formats.avro_schema import Projection, project
from anabranch.records.formats.wire import PAYLOAD, Wire, refuse
from anabranch.spark.settings import AVRO_LIMITS, AVRO_LONGEST_TEXT, AVRO_OPTIONS
from anabranch.subjects.avro_names import Incompatible

# 16 random bytes appended to the payload. No producer can predict them, so no payload contains
# them.
_END = f"X'{secrets.token_hex(16)}'"


class AvroFormat:
    def __init__(
        self, stream: Stream, registry: SchemaRegistryClient, cache_schema_ids: bool = False
    ) -> None:
        self.wire = Wire(registry, "AVRO", stream.format.subject, cache_schema_ids)
        self._required = [column.name for column in stream.record_columns if not column.nullable]
        self._projections: dict[int, Projection | Incompatible] = {}

    def read(self, records: DataFrame, types: Mapping[str, DataType]) -> Reading:
        """Read as `Format.read`. Each value is read once, with its writer's schema."""
        jvm: Any = records.sparkSession._jvm
        _require_limits(jvm)
        wired = self.wire.look_up(records)
        projections: dict[int, Projection] = {}
        refused: list[Check] = []
        for schema_id, schema in wired.schemas.items():
            projection = self._projections.get(schema_id) or self._project(schema, types, jvm)
            self._projections[schema_id] = projection
            if isinstance(projection, Incompatible):
                refused.append(refuse(schema_id, "incompatible_schema", str(projection)))
            else:
                projections[schema_id] = projection
        read = wired.frame.selectExpr(
            "*",
            *(
                f"IF(_schema_id = {i}, {_from_avro(p)}, NULL) AS _read_{i}"
                for i, p in projections.items()
            ),
        )
        rows = read.selectExpr(
            "*",
            *(f"{_row(name, kind, projections)} AS `_row_{name}`" for name, kind in types.items()),
        )
        checks = (*wired.checks, *refused, *_checks(types, projections))
        return Reading(rows, checks, lambda name: utc(f"`_row_{name}`"))

    def fields(self, schema_id: int, columns: Sequence[Column], jvm: Any) -> Fields | None:
        """Return how workers read records of a schema id; empty if Spark has to, None if the
        registry does not have the schema yet. Raises as `read`."""
        schema = self.wire.schema(schema_id)
        if not isinstance(schema, RegisteredSchema):
            return None if schema is None else ()
        types = {column.name: DataType.fromDDL(column.type) for column in columns}
        projection = self._projections.get(schema_id) or self._project(schema, types, jvm)
        self._projections[schema_id] = projection
        return (
            (plan_fields(schema.text, columns) or ()) if isinstance(projection, Projection) else ()
        )

    def _project(
        self, schema: RegisteredSchema, types: Mapping[str, DataType], jvm: Any
    ) -> Projection | Incompatible:
        if schema.has_references:
            return Incompatible(
                "expected a schema that stands alone, found references to other subjects"
            )
        try:
            projection = project(types, self._required, schema.text)
            for text in (projection.writer, projection.reader):
                # A schema that Avro itself refuses would fail the query.
                jvm.org.apache.avro.Schema.Parser().setValidateDefaults(False).parse(text)
        except Incompatible as incompatible:
            return incompatible
        except Py4JJavaError as failure:
            return Incompatible(
                "expected an Avro schema, found one that is not "
                f"({failure.java_exception.getMessage()})"
            )
        return projection


def _require_limits(jvm: Any) -> None:
    """Limit the sizes that a value may announce, in this JVM; `session_settings` limits executors.
    Raises Terminal if the limits have no effect."""
    for name, value in AVRO_LIMITS.items():
        jvm.java.lang.System.setProperty(name, str(value))
    try:
        # Avro reads the limits only once, when it is first used.
        jvm.org.apache.avro.SystemLimitException.checkMaxStringLength(AVRO_LONGEST_TEXT + 1)
    except Py4JJavaError:
        return
    raise Terminal(
        f"read Avro: expected the driver's JVM to have {AVRO_OPTIONS}, found that it has not; "
        "start the job by `anabranch`, or add them to spark.driver.extraJavaOptions"
    )


def _from_avro(projection: Projection) -> str:
    # In JSON, SQL's quote and Spark's variable sign occur only in texts, where an escape means the
    # same.
    writer, reader = (
        text.replace("'", r"\u0027").replace("$", r"\u0024")
        for text in (projection.writer, projection.reader)
    )
    options = f"map('mode', 'PERMISSIVE', 'avroSchema', r'{reader}')"
    return f"from_avro(concat({PAYLOAD}, {_END}), r'{writer}', {options})"


def _by_id(parts: Mapping[int, str]) -> str:
    return (
        f"CASE _schema_id {' '.join(f'WHEN {i} THEN {part}' for i, part in parts.items())} END"
        if parts
        else "NULL"
    )


def _read(schema_id: int, name: str) -> str:
    return f"_read_{schema_id}.value.`{name}`"


def _row(name: str, kind: DataType, projections: Mapping[int, Projection]) -> str:
    converted = {
        i: p.values[name].convert(_read(i, name))
        for i, p in projections.items()
        if name in p.values
    }
    return f"CAST({_by_id(converted)} AS {kind.simpleString()})"


def _checks(
    types: Mapping[str, DataType], projections: Mapping[int, Projection]
) -> Iterator[Check]:
    if not projections:
        return
    end = _by_id({i: f"_read_{i}.frame_end" for i in projections})
    malformed = (
        "concat('schema id ', _schema_id, ': expected one value of that schema, found invalid, "
        "truncated or additional bytes')"
    )
    yield Check(f"NOT coalesce({end} = {_END}, false)", error("malformed_avro", malformed))
    for name, kind in types.items():
        broken = {
            i: p.values[name].broken(_read(i, name))
            for i, p in projections.items()
            if name in p.values
        }
        if broken := {i: part for i, part in broken.items() if part}:
            expected = f"{name}: expected {kind.simpleString()}"
            if isinstance(kind, StringType):
                verdict = error(
                    "invalid_utf8", f"'{name}: expected UTF-8, found bytes that are not'"
                )
            elif isinstance(kind, (DateType, TimestampType)):
                number = _by_id({i: _read(i, name) for i in broken})
                verdict = error(
                    "unreadable_timestamp", expected_found(expected, f"CAST({number} AS STRING)")
                )
            else:
                verdict = error("wrong_type", f"'{expected}, found a value that is not'")
            yield Check(f"coalesce({_by_id(broken)}, false)", verdict)
