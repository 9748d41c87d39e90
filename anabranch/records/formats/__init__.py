"""Formats: how a record's value becomes the stream's columns. One module for each, behind one small
interface.

| `format` | module | value |
|---|---|---|
| json | `json` (`json_sql`) | a JSON object |
| avro | `avro` (`avro_schema`) | Confluent's wire format, then Avro's binary encoding |
| json_schema | `json_schema` | Confluent's wire format, then a JSON object |
| csv | `csv` | one line of RFC 4180 |
| raw | `raw` | the bytes themselves |

`wire` is what the formats with a schema registry share, `anabranch.config.format_settings` what a
stream's file says. Both layers read through the same object, and `anabranch.records` alone calls
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from pyspark.sql import DataFrame
from pyspark.sql.types import DataType

from anabranch.config import Environment, Stream
from anabranch.records.checks import Check


@dataclass(frozen=True)
class Reading:
    """Records that were read.

    `frame` has gained `_row_<name>` for each column of the stream, of its exact type, null where
    the value has none or an unreadable one; `checks` say which, the first that holds counts.
    `shown` gives the SQL text of what a value says of a column, for a message. `unknown` is the SQL
    of the names of a value's fields that the stream has no column for, an array: empty or null
    where there is none, null where the value cannot be read; None for a format without field names.
    `rescued` is the SQL of these fields as JSON, for a value that has any; None likewise.
    """

    frame: DataFrame
    checks: tuple[Check, ...]
    shown: Callable[[str], str]
    unknown: str | None = None
    rescued: str | None = None


class Format(Protocol):
    """How a stream's values are read."""

    def read(self, records: DataFrame, types: Mapping[str, DataType]) -> Reading:
        """Read the column `value` as columns of `types`. No bytes make the frame throw.

        A verdict depends on the bytes, the stream and, with a schema registry, the schema of the
        value's id: never on a session's settings. Only a format with a registry sends requests: it
        raises Transient when the registry does not answer, ConfigurationError when it refuses.
        """
        ...


def open_format(environment: Environment, stream: Stream, cache_schema_ids: bool = False) -> Format:
    """The format of a stream; it keeps what it learns of schemas for as long as it lives.

    With `cache_schema_ids`, a format with a registry lists the schema ids of the first records
    only. A later query fails when it meets another id (`wire.is_unlisted_schema_id`); the caller
    then opens the format again.

    Raises ConfigurationError when it needs a registry and the environment names none.
    """
    # Imported here: who only reads a stream's file needs no Spark.
    from anabranch.kafka.schema_registry import open_registry
    from anabranch.records.formats.avro import AvroFormat
    from anabranch.records.formats.csv import CsvFormat
    from anabranch.records.formats.json import JsonFormat
    from anabranch.records.formats.json_schema import JsonSchemaFormat
    from anabranch.records.formats.raw import RawFormat

    settings = stream.format
    if settings.type == "avro":
        return AvroFormat(stream, open_registry(environment, stream), cache_schema_ids)
    if settings.type == "json_schema":
        return JsonSchemaFormat(stream, open_registry(environment, stream), cache_schema_ids)
    if settings.type == "csv":
        return CsvFormat(settings.delimiter)
    return RawFormat() if settings.type == "raw" else JsonFormat()
