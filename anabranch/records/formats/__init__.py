"""Formats: how a record's value is read as the stream's columns. Each is a module with the same
interface.

| `format` | module | value |
|---|---|---|
| json | `json` (`json_sql`) | a JSON object |
| avro | `avro` (`avro_schema`) | Confluent's wire format, then Avro's binary encoding |
| json_schema | `json_schema` | Confluent's wire format, then a JSON object |
| csv | `csv` | one line of RFC 4180 |
| raw | `raw` | the bytes themselves |

Formats with a schema registry share `wire`; `anabranch.config.format_settings` has the settings of
a stream's file. Both layers read through the same object, which only `anabranch.records` calls.
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
    """The result of reading records.

    `frame` has an additional column `_row_<name>` for each column of the stream, of its exact type,
    null if the value has none or it is unreadable. The first true check in `checks` gives the
    error. `shown` returns SQL for the text of a column's value, for messages. `unknown` is SQL for
    an array of the names of a value's fields without a column: empty or null if there are none,
    null if the value cannot be read. `rescued` is SQL for these fields as JSON, for a value that
    has any. Both are None for a format without field names.
    """

    frame: DataFrame
    checks: tuple[Check, ...]
    shown: Callable[[str], str]
    unknown: str | None = None
    rescued: str | None = None


class Format(Protocol):
    """The format of a stream's values."""

    def read(self, records: DataFrame, types: Mapping[str, DataType]) -> Reading:
        """Read the column `value` as columns of `types`. No bytes make the frame fail.

        A verdict depends only on the bytes, the stream and, with a schema registry, the schema of
        the value's id: never on a session's settings. Only a format with a registry sends requests:
        it raises Transient if the registry does not answer, ConfigurationError if it refuses.
        """
        ...


def open_format(environment: Environment, stream: Stream, cache_schema_ids: bool = False) -> Format:
    """Return the format of a stream; it caches schemas for its lifetime.

    With `cache_schema_ids`, a format with a registry lists the schema ids of the first records
    only. A later query fails if it finds another id (`wire.is_unlisted_schema_id`); the caller then
    calls `wire.list_again`.

    Raises ConfigurationError if it needs a registry and the environment has none.
    """
    # Imported here: callers that only read a stream's file need no Spark.
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
