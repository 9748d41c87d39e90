"""Sections of a stream's file: `partition`, `keep`, `archive`, `egress`, `format`. No Spark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from anabranch.config.base import Frozen
from anabranch.config.columns import Column
from anabranch.config.plain import parse_duration, parse_target

_FIELD = re.compile(
    r"(?:(bucket|truncate) *\( *([1-9]\d{0,5}) *, *)?([A-Za-z_]\w*)( *\))?", re.ASCII
)
_COMMA = re.compile(r",(?![^(]*\))")

# Types whose partition values are equal in Spark, PyIceberg and PyArrow, also after a type widens.
TYPES = {
    "identity": ("string", "int", "bigint", "date", "boolean"),
    "bucket": ("string", "int", "bigint", "date", "timestamp"),
    # The transform of an integer overflows near the smallest one, and readers would miss the row.
    "truncate": ("string",),
}


@dataclass(frozen=True)
class PartitionField:
    """A partition field: a transform of a column, with its number of buckets or its width."""

    column: str
    transform: str = "identity"
    number: int = 0

    def __str__(self) -> str:
        if not self.number:
            return self.column
        return f"{self.transform}({self.number}, {self.column})"

    @property
    def name(self) -> str:
        """The field's name in the table, as `ADD PARTITION FIELD` would give it."""
        words = {"bucket": "bucket", "truncate": "trunc"}
        if self.number:
            return "_".join((self.column, words[self.transform], str(self.number)))
        return self.column


def parse_field(text: str) -> PartitionField:
    """Raises ValueError."""
    found = _FIELD.fullmatch(text.strip())
    if found is None or bool(found[1]) != bool(found[4]):
        raise ValueError(
            f"expected a column, bucket(NUMBER, column) or truncate(WIDTH, column), found {text!r}"
        )
    return PartitionField(found[3], found[1] or "identity", int(found[2] or 0))


def parse_partition(value: object) -> object:
    """Parse a text or list to partition fields, each once."""
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        # YAML ends an entry of a list at each comma, also inside of parentheses.
        value = ",".join(value)
    if not isinstance(value, str):
        return value
    fields = tuple(str(parse_field(text)) for text in _COMMA.split(value))
    if len(set(fields)) < len(fields):
        raise ValueError("expected each partition field once")
    return fields


_LEAST_KEPT = timedelta(days=1)


def _kept_for(value: object) -> timedelta | None:
    if value is None or value == "for ever":
        return None
    try:
        return parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{error}, or 'for ever'") from None


def _at_least_a_day(value: timedelta | None) -> timedelta | None:
    if value is not None and value < _LEAST_KEPT:
        raise ValueError("expected 1 day or more, or 'for ever'")
    return value


KeptFor = Annotated[timedelta | None, BeforeValidator(_kept_for), AfterValidator(_at_least_a_day)]


class Keep(Frozen):
    """Retention; None is for ever."""

    rows: KeptFor = Field(
        default=None,
        description=(
            "How long rows are kept, counted from the end of their ingest hour; at least a day "
            "longer than `batch.lookback_hours`. `keep: 30 days` sets it for rows and dead letters."
        ),
    )
    dead_letters: KeptFor = Field(default=None, description="How long dead letters are kept.")
    ledger: KeptFor = Field(
        default=None,
        description=(
            "How long the ledger keeps the account of an hour; at least as long as `keep.rows` "
            "and `keep.dead_letters`. Whole quarters of a year expire."
        ),
    )


class Archive(Frozen):
    """The archive of a stream's records as Kafka delivered them: its retention from the end of
    their ingest hour; None is for ever."""

    raw: KeptFor = Field(
        description=(
            "How long the batch layer keeps each hour's raw records, 1 day or more, or `for "
            "ever`. Default: no archive."
        )
    )


def parse_keep(value: object) -> object:
    """Convert a single duration to the retention of rows and dead letters."""
    return {"rows": value, "dead_letters": value} if isinstance(value, str | int) else value


_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]+/[^\s?#*]+")
_LOCAL = re.compile(r"file:///[^\s?#*]+")

Kind = Literal["root", "topic", "index"]
KINDS: tuple[Kind, ...] = ("root", "topic", "index")


def _root(value: str) -> str:
    if not any(kind.fullmatch(value) for kind in (_S3, _LOCAL)) or ".." in value.split("/"):
        raise ValueError("expected s3://BUCKET/FOLDER or file:///FOLDER")
    return value.rstrip("/")


class Target(Frozen):
    """A destination: folders of Parquet files, another topic, or an index of a search cluster."""

    name: Annotated[str, BeforeValidator(parse_target)] = Field(
        description="The target's name.", examples=["export"]
    )
    root: Annotated[str, AfterValidator(_root)] | None = Field(
        default=None,
        description="The folder of its Parquet files, `ROOT/date=…/hour=…/`: "
        "`s3://BUCKET/FOLDER` or `file:///FOLDER`.",
        examples=["s3://exports/orders"],
    )
    topic: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9._-]{1,249}$",
        description="Instead of `root`: another topic of the same Kafka.",
        examples=["orders_accepted"],
    )
    index: str | None = Field(
        default=None,
        pattern=r"^[a-z0-9][a-z0-9._-]{0,199}$",
        description="Instead of `root`: an index of the environment's `search`.",
        examples=["orders"],
    )

    @model_validator(mode="after")
    def _one_place(self) -> Target:
        if len([kind for kind in KINDS if getattr(self, kind) is not None]) != 1:
            raise ValueError("expected one of root, topic and index")
        return self

    @property
    def kind(self) -> Kind:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def place(self) -> str:
        """The folder, topic or index."""
        place: str = getattr(self, self.kind)
        return place


def check_targets(targets: tuple[Target, ...]) -> tuple[Target, ...]:
    """Check that no two targets share a name, and no two places overlap. Raises ValueError."""
    for what, values in (
        ("name", [("name", t.name) for t in targets]),
        ("place", [(str(t.kind), t.place) for t in targets]),
    ):
        if twice := next((value for value in values if values.count(value) > 1), None):
            raise ValueError(f"expected each {what} once, found {twice[1]!r} twice")
    places = [f"{t.place}/" for t in targets]
    for one in places:
        if inside := next(
            (other for other in places if other != one and other.startswith(one)), None
        ):
            raise ValueError(
                f"expected no target's folder within another's, found {inside} in {one}"
            )
    return targets


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
    # A line that ends with its delimiter has a field without a name.
    names = [name for name in value if name]
    if not names or len(set(names)) < len(names):
        raise ValueError("expected names, each once")
    return value


class FormatSettings(Frozen):
    """`format` of a stream's file: `format: avro`, or `format: {type: avro, subject: a-value}`."""

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
    """Raise ValueError, with expected and found, for a column that the format cannot fill."""
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
