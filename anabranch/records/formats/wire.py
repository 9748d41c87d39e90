"""Confluent's wire format: a zero byte, a schema id of four bytes (big endian), then the payload.

Source:
https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/index.html#wire-format.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.sql import DataFrame

from anabranch.common.remote_errors import full_text
from anabranch.kafka.schema_registry import RegisteredSchema, SchemaRegistryClient
from anabranch.records.checks import Check, error, expected_found, literal

PAYLOAD = "substring(value, 6)"

MOST_KEPT = 16
"""Maximum number of schema ids in a list that keeps earlier ids: Spark's plan grows with each."""

_UNLISTED = "expected it among those listed"

_SCHEMA_ID = (
    "IF(length(value) >= 5 AND substring(value, 1, 1) = X'00', "
    "CAST(conv(hex(substring(value, 2, 4)), 16, 10) AS BIGINT), NULL)"
)


@dataclass(frozen=True)
class Wired:
    """Records with `_schema_id` (null: not in the wire format), the registry's schemas of their
    ids, and the checks that refuse records."""

    frame: DataFrame
    schemas: Mapping[int, RegisteredSchema]
    checks: tuple[Check, ...]


class Wire:
    """The wire format of a stream: values of `kind`, of `subject` if it is not None.

    With `cache_ids`, later queries reuse the first list of schema ids, provided that the registry
    has a schema of this kind and subject for each of them. A record with another id then fails the
    query, which `is_unlisted_schema_id` detects; the caller then calls `list_again`.
    """

    def __init__(
        self, registry: SchemaRegistryClient, kind: str, subject: str | None, cache_ids: bool
    ) -> None:
        self._registry, self._kind, self._subject, self._cache_ids = (
            registry,
            kind,
            subject,
            cache_ids,
        )
        self._cached: list[int] = []
        self._before: list[int] = []

    def list_again(self) -> None:
        """List the schema ids with the next query. Earlier ids stay listed: producers with an older
        schema go on, and each micro-batch with another id would fail."""
        self._before, self._cached = self._cached or self._before, []

    def look_up(self, records: DataFrame) -> Wired:
        """List the schema ids of the records with a separate query, and load unknown schemas from
        the registry.

        `schemas` contains the ids of the stream's kind and subject. The checks mark records with
        other ids, and records that are not in the wire format. Raises Transient if the registry is
        down, ConfigurationError if it rejects the request.
        """
        frame = records.selectExpr("*", f"{_SCHEMA_ID} AS _schema_id")
        ids = self._cached
        if not ids:
            found = frame.select("_schema_id").distinct().collect()
            new = {row[0] for row in found if row[0] is not None}
            every = new.union(self._before)
            ids = sorted(every if len(every) <= MOST_KEPT else new)
        schemas: dict[int, RegisteredSchema] = {}
        unknown: list[int] = []
        refused: list[Check] = []
        for schema_id in ids:
            match self.schema(schema_id):
                case None:
                    unknown.append(schema_id)
                case Check() as check:
                    refused.append(check)
                case schema:
                    schemas[schema_id] = schema
        if self._cache_ids and len(schemas) == len(ids):
            self._cached = ids
        null = f"'expected a value in {self._kind} wire format, found a null value'"
        header = expected_found(
            "expected a zero byte and a schema id of four bytes",
            "hex(substring(kafka_value, 1, 5))",
        )
        nowhere = (
            "concat('schema id ', _schema_id, ': expected it in the schema registry, found none')"
        )
        unlisted = (
            f"CAST(raise_error(concat('schema id ', _schema_id, ': {_UNLISTED}')) AS BOOLEAN)"
        )
        checks = [
            Check("value IS NULL", error("null_value", null)),
            Check("_schema_id IS NULL", error("not_wire_format", header)),
            # Fails only for cached ids: the same offsets return the same records each time they are
            # read.
            Check(f"IF(NOT {among(ids)}, {unlisted}, false)", error("unknown_schema", nowhere)),
            *([Check(among(unknown), error("unknown_schema", nowhere))] if unknown else []),
            *refused,
        ]
        return Wired(frame, schemas, tuple(checks))

    def schema(self, schema_id: int) -> RegisteredSchema | Check | None:
        """Return the schema of an id; a Check that refuses it if it is of another subject or kind;
        None if the registry has none. Raises as `look_up`."""
        schema = self._registry.schema(schema_id)
        if schema is None:
            return None
        if self._subject is not None and not self._registry.belongs(schema_id, self._subject):
            return refuse(
                schema_id,
                "wrong_subject",
                f"expected a schema of subject {self._subject}, found another",
            )
        if schema.type != self._kind:
            return refuse(
                schema_id, "incompatible_schema", f"expected type {self._kind}, found {schema.type}"
            )
        return schema


def is_unlisted_schema_id(error: BaseException) -> bool:
    """Return whether a query failed because a record has a schema id that is not in the cached
    list. Pure."""
    return _UNLISTED in full_text(error)


def refuse(schema_id: int, code: str, why: str) -> Check:
    """Return the verdict on all records of a schema id."""
    return Check(f"_schema_id = {schema_id}", error(code, literal(f"schema id {schema_id}: {why}")))


def among(ids: list[int]) -> str:
    return f"_schema_id IN ({', '.join(map(str, ids))})" if ids else "false"
