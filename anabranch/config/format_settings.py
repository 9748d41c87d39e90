"""`format` of a stream's file, and the columns that each format can fill. Independent of Spark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from anabranch.config.base import Frozen
from anabranch.config.columns import Column

FormatType = Literal["json", "avro", "json_schema", "protobuf", "csv", "raw"]
WITH_REGISTRY = ("avro", "json_schema", "protobuf")
_KEYS = {
    "avro": frozenset(("string",)),
    "protobuf": frozenset(("string", "int", "bigint", "boolean")),
}
_RAW = {"key": ("binary", "string"), "value": ("binary", "string")}

UNKNOWN_NAME_LENGTH = 100
"""Maximum characters kept of an unknown field's name."""


def _each_once(value: tuple[str, ...]) -> tuple[str, ...]:
    if not all(value) or len(set(value)) < len(value):
        raise ValueError("expected names that are not empty, each once")
    return value


class FormatSettings(Frozen):
    """`format` of a stream's file: `format: avro`, or `format: {type: avro, subject:
    events-value}`."""

    type: FormatType = Field(default="json", description="The format's name, in a mapping.")
    subject: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "With avro, json_schema or protobuf: the subject that every schema id must belong to."
        ),
    )
    descriptor: Path | None = Field(
        default=None,
        description=(
            "With protobuf: a file of descriptors (`protoc --include_imports "
            "--descriptor_set_out`) in the folder of the stream's file, for values without a "
            "schema id."
        ),
    )
    message: str | None = Field(
        default=None,
        min_length=1,
        description=(
            "With protobuf: the full name of the message; by default, with a schema registry, that "
            "which the record names."
        ),
        examples=["shop.Order"],
    )
    delimiter: str = Field(
        default=",", pattern=r'^[^"\r\n]$', description="With csv: the separator of fields."
    )

    header: Annotated[tuple[str, ...], AfterValidator(_each_once)] = Field(
        default=(),
        description=(
            "With csv: the names of all fields in order, by which columns are then matched. A "
            "record that repeats them is a dead letter."
        ),
        examples=["[id, placed_at, total]"],
    )

    envelope: Literal["debezium"] | None = Field(
        default=None,
        description=(
            "With json or avro: values are [changes of Debezium](formats.md#debezium), whose rows "
            "have the columns."
        ),
    )

    @model_validator(mode="after")
    def _keys_belong_to_the_type(self) -> FormatSettings:
        if self.subject is not None and self.type not in WITH_REGISTRY:
            raise ValueError(f"expected subject only with {' or '.join(WITH_REGISTRY)}")
        if (self.descriptor or self.message) is not None and self.type != "protobuf":
            raise ValueError("expected descriptor and message only with protobuf")
        if self.descriptor is not None and (self.message is None or self.subject is not None):
            raise ValueError("expected message, and no subject, with descriptor")
        if "delimiter" in self.model_fields_set and self.type != "csv":
            raise ValueError("expected delimiter only with csv")
        if self.envelope is not None and self.type not in ("json", "avro"):
            raise ValueError("expected envelope only with json or avro")
        if self.header and self.type != "csv":
            raise ValueError("expected header only with csv")
        return self

    @property
    def names_fields(self) -> bool:
        """Whether values name or number their fields, so that unknown fields are counted."""
        return self.type in ("json", "json_schema", "protobuf")

    @property
    def needs_registry(self) -> bool:
        return self.type in WITH_REGISTRY and self.descriptor is None


def parse_format(value: object) -> object:
    """Convert `avro` to `{type: avro}`. Raises ValueError for an unknown format."""
    if not isinstance(value, str):
        return value
    if value not in get_args(FormatType):
        raise ValueError(f"expected one of {', '.join(get_args(FormatType))}")
    return {"type": value}


_WITH_NOTATIONS = ("json", "json_schema", "avro", "csv")


def check_columns(settings: FormatSettings, columns: Sequence[Column]) -> None:
    """Raise ValueError, with what was expected and found, for a column that the format cannot
    fill."""
    names = {column.name for column in columns}
    for column in columns:
        actual = f"found {column.name} {column.type.upper()}"
        if column.definition != column.name and settings.type not in _WITH_NOTATIONS:
            raise ValueError(
                f"schema: expected from, unit, format and decimal with format "
                f"{' or '.join(_WITH_NOTATIONS)}, found {column.name} with format {settings.type}"
            )
        if settings.type == "csv":
            _check_place(settings, column)
        if settings.envelope is not None and column.path == ("row",):
            raise ValueError(
                f"schema: expected a field of the row, such as row.id, found {column.name} from row"
            )
        if settings.type == "raw" and column.type not in _RAW.get(column.name, ()):
            raise ValueError(
                "schema: expected with format raw the column value, BINARY or STRING, and at most "
                f"a column key beside it, {actual}"
            )
        keys = _KEYS.get(settings.type)
        if keys is not None and not keys.issuperset(re.findall(r"map<(\w+)", column.type)):
            raise ValueError(
                f"schema: expected with format {settings.type} only "
                f"{', '.join(sorted(keys)).upper()} as a MAP's key, {actual}"
            )
    if settings.type == "raw" and "value" not in names:
        raise ValueError(
            f"schema: expected with format raw the column value, found {', '.join(sorted(names))}"
        )


def _check_place(settings: FormatSettings, column: Column) -> None:
    """Raise ValueError for a column that no field of a line of CSV can fill."""
    if re.match(r"(array|map|struct)<", column.type):
        actual = f"found {column.name} {column.type.upper()}"
        raise ValueError(f"schema: expected with format csv no ARRAY, MAP or STRUCT, {actual}")
    field = ".".join(column.field)
    if column.path and not settings.header:
        raise ValueError(
            f"schema: expected with format csv from only beside format.header, found {column.name} "
            f"from {field}"
        )
    if settings.header and column.field not in {(name,) for name in settings.header}:
        raise ValueError(
            f"schema: expected fields of format.header, found {column.name} from {field}"
        )
