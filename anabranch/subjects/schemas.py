"""The writers' schemas of a stream's records, by schema id. The driver asks the registry for them
and passes them to the workers."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from anabranch.common.remote_errors import full_text
from anabranch.config import Environment, Stream
from anabranch.decode import avro
from anabranch.decode.avro_names import Incompatible
from anabranch.decode.wire import DESCRIPTOR, ID_PLACES, UNLISTED, WriterSchema
from anabranch.kafka.schema_registry import SchemaRegistryClient, open_registry
from anabranch.subjects.whole_schema import read_descriptors, whole_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LOG = logging.getLogger(__name__)

_KINDS = {"avro": "AVRO", "json_schema": "JSON", "protobuf": "PROTOBUF"}
_SCHEMA_ID = (
    "IF(length(value) >= 5 AND substring(value, 1, 1) = X'00', "
    "NULLIF(CAST(conv(hex(substring(value, 2, 4)), 16, 10) AS BIGINT), 0), NULL)"
)


class Schemas:
    """The schemas that records of a stream had so far, each with its text or the error of all its
    records. Without ids for a format that has no registry; with that of the descriptor file of
    plain Protobuf. Raises ConfigurationError for a descriptor file that cannot be used."""

    def __init__(self, stream: Stream, registry: SchemaRegistryClient | None) -> None:
        self._stream, self._registry = stream, registry
        self.known: dict[int, WriterSchema] = {}
        if stream.format.descriptor is not None:
            self.known[DESCRIPTOR] = WriterSchema(read_descriptors(stream))

    def learn(self, ids: Iterable[int]) -> bool:
        """Ask the registry for schemas that are not known yet. Return whether there are any.

        Raises Transient if the registry does not answer, ConfigurationError if it refuses.
        """
        new = sorted(set(ids) - self.known.keys())
        for schema_id in new:
            self.known[schema_id] = self._load(schema_id)
        return bool(new)

    def learn_from(self, records: DataFrame) -> None:
        """Learn the schema ids of records, with a query of its own. Raises as `learn`."""
        if self._registry is not None:
            self.forget_missing()
            found = records.selectExpr(f"{_SCHEMA_ID} AS id").distinct().collect()
            self.learn(row.id for row in found if row.id is not None)

    def forget_missing(self) -> None:
        """Forget ids that the registry did not have: it may have them by now."""
        missing = [
            i for i, one in self.known.items() if one.error and one.error[0] == "unknown_schema"
        ]
        for schema_id in missing:
            del self.known[schema_id]

    def _load(self, schema_id: int) -> WriterSchema:
        assert self._registry is not None
        kind, subject = _KINDS[self._stream.format.type], self._stream.format.subject
        schema = self._registry.schema(schema_id, subject)
        if schema is None:
            why = f"expected it in the schema registry, found none. {ID_PLACES}"
            return WriterSchema(error=("unknown_schema", why))
        if subject is not None and not self._registry.belongs(schema_id, subject):
            why = f"expected a schema of subject {subject}, found another"
            return WriterSchema(error=("wrong_subject", why))
        if schema.type != kind:
            why = f"expected type {kind}, found {schema.type}"
            return WriterSchema(error=("incompatible_schema", why))
        try:
            text = whole_schema(schema)
            if kind == "AVRO":
                avro.plan(text, self._stream.read_columns)
        except Incompatible as incompatible:
            return WriterSchema(error=("incompatible_schema", str(incompatible)))
        return WriterSchema(text)


def open_schemas(environment: Environment, stream: Stream) -> Schemas:
    """Raises ConfigurationError if the stream's format needs a registry and the environment has
    none."""
    needs_one = stream.format.needs_registry
    return Schemas(stream, open_registry(environment, stream) if needs_one else None)


def unlisted_ids(error: BaseException) -> list[int]:
    """Return the schema ids, of records that failed a query, that its decoder was not given; none
    for another error. Pure."""
    return [int(number) for number in UNLISTED.findall(full_text(error))]
