"""Confluent's wire format: a zero byte, a schema id of four bytes (big endian), then the payload.

Facts: https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/index.html#wire-format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anabranch.kafka.schema_registry import RegisteredSchema, Registry
from anabranch.records.checks import Check, error, expected_found, literal

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

CODES = ("null_value", "not_wire_format", "unknown_schema", "wrong_subject", "incompatible_schema")

PAYLOAD = "substring(value, 6)"

_SCHEMA_ID = (
    "IF(length(value) >= 5 AND substring(value, 1, 1) = X'00', "
    "CAST(conv(hex(substring(value, 2, 4)), 16, 10) AS BIGINT), NULL)"
)


@dataclass(frozen=True)
class Wired:
    """Records with `_schema_id` (null: not in the wire format), and what the registry says of the ids they name."""

    frame: DataFrame
    schemas: Mapping[int, RegisteredSchema]
    checks: tuple[Check, ...]


def look_up(records: DataFrame, registry: Registry, kind: str, subject: str | None) -> Wired:
    """List the schema ids of the records, in a reading of their own, and ask for those that are not known yet.

    `schemas` holds the ids that are of `kind` and `subject`; the checks judge records of all others, and whatever is
    not in the wire format. Raises Transient when the registry is away, ConfigurationError when it refuses.
    """
    frame = records.selectExpr("*", f"{_SCHEMA_ID} AS _schema_id")
    ids = sorted(row[0] for row in frame.select("_schema_id").distinct().collect() if row[0] is not None)
    schemas: dict[int, RegisteredSchema] = {}
    unknown: list[int] = []
    refused: list[Check] = []
    for schema_id in ids:
        schema = registry.schema(schema_id)
        if schema is None:
            unknown.append(schema_id)
        elif subject is not None and not registry.belongs(schema_id, subject):
            refused.append(refuse(schema_id, "wrong_subject", f"expected a schema of subject {subject}, found another"))
        elif schema.type != kind:
            refused.append(refuse(schema_id, "incompatible_schema", f"expected type {kind}, found {schema.type}"))
        else:
            schemas[schema_id] = schema
    header = expected_found("expected a zero byte and a schema id of four bytes", "hex(substring(kafka_value, 1, 5))")
    nowhere = "concat('schema id ', _schema_id, ': expected it in the schema registry, found none')"
    checks = [
        Check("value IS NULL", error("null_value", f"'expected a value in {kind} wire format, found a null value'")),
        Check("_schema_id IS NULL", error("not_wire_format", header)),
        # Never so: the same offsets hold the same records, whenever they are read.
        Check(f"NOT {among(ids)}", "raise_error(concat('schema id ', _schema_id, ': expected it among those listed'))"),
        *([Check(among(unknown), error("unknown_schema", nowhere))] if unknown else []),
        *refused,
    ]
    return Wired(frame, schemas, tuple(checks))


def refuse(schema_id: int, code: str, why: str) -> Check:
    """The verdict on every record of an id."""
    return Check(f"_schema_id = {schema_id}", error(code, literal(f"schema id {schema_id}: {why}")))


def among(ids: list[int]) -> str:
    """Whether a record's id is one of `ids`."""
    return f"_schema_id IN ({', '.join(map(str, ids))})" if ids else "false"
