"""JSON Schema: Confluent's wire format whose payload is a JSON object.

The id must be of a schema of type JSON in the registry, and of the stream's subject if configured.
The object is read as in format json, by the stream's columns. It is not validated against the
schema, as Confluent's deserializers do not by default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType

from anabranch.config import Stream
from anabranch.kafka.schema_registry import SchemaRegistryClient
from anabranch.records.formats import Reading
from anabranch.records.formats.json import JsonFormat
from anabranch.records.formats.wire import PAYLOAD, Wire


class JsonSchemaFormat:
    def __init__(
        self, stream: Stream, registry: SchemaRegistryClient, cache_schema_ids: bool = False
    ) -> None:
        self.wire = Wire(registry, "JSON", stream.format.subject, cache_schema_ids)

    def read(self, records: DataFrame, types: Mapping[str, DataType]) -> Reading:
        """Read as `Format.read`."""
        wired = self.wire.look_up(records)
        reading = JsonFormat().read(wired.frame.withColumn("value", F.expr(PAYLOAD)), types)
        return replace(reading, checks=(*wired.checks, *reading.checks))
