"""`conf/streams/NAME.yaml`: one Kafka topic, its schema, its rules and its tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, model_validator

from anabranch.common.errors import ConfigurationError
from anabranch.config.base import (
    Duration,
    Frozen,
    Name,
    Names,
    Share,
    between,
    more_than_nothing,
    one_or_many,
    repeated_name,
)
from anabranch.config.columns import RESCUED, ROW, Column, columns_ddl, require_column
from anabranch.config.plain import GRACE, OWNER, parse_hour
from anabranch.config.schema import parse_schema
from anabranch.config.sections import (
    TYPES,
    WITH_REGISTRY,
    Archive,
    FormatSettings,
    Keep,
    PartitionField,
    Target,
    check_columns,
    check_targets,
    parse_field,
    parse_format,
    parse_keep,
    parse_partition,
)
from anabranch.config.select import SelectedColumn
from anabranch.config.views import (
    PARTIALS,
    Partial,
    View,
    check_view,
    definition_digest,
    parse_views,
    partials_of,
)

# Parquet has no Bloom filter for BOOLEAN. In FLOAT and DOUBLE, 0.0 equals -0.0, but a filter
# distinguishes them.
_BLOOM_TYPES = ("string", "int", "bigint", "decimal", "date", "timestamp", "binary")
_SORT_TYPES = (*_BLOOM_TYPES, "boolean", "float", "double")

RESERVED_COLUMNS = (
    "kafka_partition",
    "kafka_offset",
    "kafka_timestamp",
    "ingest_hour",
    "event_date",
)

TAKEN_COLUMNS = (
    *RESERVED_COLUMNS,
    *(
        "kafka_key",
        "kafka_value",
        "kafka_headers",
        "is_dead",
        "error_code",
        "error_text",
        "unknown_fields",
    ),
    *("_hash", "_rank", "_row"),
    *("_file", "_pos", "_deleted", "_spec_id", "_partition"),
    *("_row_id", "_last_updated_sequence_number"),
)
"""Names that a stream's columns cannot have: the reserved ones, those of columns that jobs compute,
and of Iceberg's metadata columns, beside which Spark reads no column of that name
(https://iceberg.apache.org/spec/#reserved-field-ids)."""


def _declared_columns(value: object) -> object:
    return parse_schema(value) if isinstance(value, str | Mapping) else value


class EventTime(Frozen):
    """The event's own time, at most `past` before and `future` after the record's ingest hour."""

    column: Name = Field(description="The TIMESTAMP column with the event's own time.")
    past: Duration | None = Field(
        default=None,
        description=(
            "How long before its ingest hour an event may be; older ones are dead letters. "
            "Default: unlimited."
        ),
    )
    future: Duration | None = Field(
        default=None,
        description="How long after its ingest hour an event may be; later ones are dead letters.",
    )


class SubjectSchema(Frozen):
    """`schema: registry`: the table has the columns, and takes up those of the subject."""

    columns: Annotated[tuple[Column, ...], BeforeValidator(_declared_columns)] = Field(
        default=(),
        description=(
            "Columns, as in `schema`, that override fields of the subject with the same names: "
            "another type, NOT NULL, or a column that the subject does not have."
        ),
    )
    exclude: Annotated[tuple[str, ...], BeforeValidator(one_or_many)] = Field(
        default=(),
        description="Fields of the subject that do not become columns.",
        examples=["[debug]"],
    )


class Speed(Frozen):
    """Settings of the speed layer."""

    trigger: Duration = Field(
        default=timedelta(seconds=2), description="The interval between starts of micro-batches."
    )
    max_offsets_per_trigger: int = Field(
        default=250_000, gt=0, description="The maximum number of offsets that a micro-batch reads."
    )
    lost_offsets: Literal["stop", "continue"] = Field(
        default="stop",
        description="The behavior when retention has deleted records after the position.",
    )
    roll_up: bool = Field(
        default=True, description="Whether small files of the running hour are compacted."
    )


Gap = Literal["control", "aborted", "compacted", "retention"]


class Batch(Frozen):
    """Settings of the batch layer."""

    grace: Duration = Field(
        default=GRACE,
        description=(
            "The time between the end of an hour and its sealing, for records that arrive late "
            "at the broker."
        ),
    )
    lookback_hours: int = Field(
        default=1,
        ge=0,
        le=168,
        description="The hours before an hour in which duplicates of its records are searched.",
    )
    allow_gaps: tuple[Gap, ...] = Field(
        default=("control", "aborted"),
        description="The kinds of missing offsets that an accepted hour may have.",
    )


class Quality(Frozen):
    """Shares of an hour's records above which the hour is refused, if they are at least
    `anabranch.protocol.ledger_row.LEAST` records. `max_dead`: dead letters.
    `max_conflicts`: duplicates whose content differs from every row that they repeat."""

    max_dead: Share = Field(
        default=0.05,
        description=(
            "The share of an hour's records that may be dead letters. The batch layer refuses an "
            "hour with more, unless they are fewer than 20 records; with 0 %, any dead letter "
            "refuses the hour."
        ),
        examples=["10 %"],
    )
    max_conflicts: Share = Field(
        default=0.01,
        description=(
            "The share of an hour's records that may be duplicates, by the key, whose content "
            "differs from every row that they repeat. The batch layer refuses an hour with more, "
            "unless they are fewer than 20 records; with 0 %, any refuses the hour."
        ),
        examples=["5 %"],
    )


class Files(Frozen):
    """How an hour's files are written."""

    target: Annotated[ByteSize, Field(ge=1_000_000)] = Field(
        default=ByteSize(256_000_000), description="The maximum size of a file of the batch layer."
    )
    sort: Names = Field(default=(), description="The columns by which rows are sorted in files.")
    bloom: Names = Field(default=(), description="Columns with Bloom filters.")


class Maintain(Frozen):
    """The ages at which `anabranch maintain` deletes."""

    orphans_after: Annotated[
        Duration,
        between(
            timedelta(days=1),
            timedelta.max,
            "expected 1 day or more: staged files may wait so long to be published",
        ),
    ] = Field(
        default=timedelta(days=3),
        description="The minimum age of an unreferenced file to be deleted; at least 1 day.",
    )
    speed_hours: Duration = Field(
        default=timedelta(days=1),
        description=(
            "The time after which the speed layer's rows of an hour that batch serves are dropped."
        ),
    )


class Airflow(Frozen):
    """Settings of the DAG files."""

    owner: str = Field(default=OWNER, description="The owner of the stream's DAGs.")
    start: Annotated[str, BeforeValidator(parse_hour)] | None = Field(
        default=None,
        description="The first hour that Airflow catches up; default: hours that end from now on.",
    )


Promised = Annotated[Duration, more_than_nothing("expected a duration longer than nothing")]


def _key(value: object) -> object:
    """Return the columns of a key: none for `none`."""
    if value == "none":
        return ()
    if value is None or value in ([], ()):
        raise ValueError("expected columns, or none for a stream without duplicates")
    return one_or_many(value)


class Slo(Frozen):
    """Promises to the stream's readers; None: no promise."""

    fresh: Promised | None = Field(
        default=None,
        description=(
            "The longest time from the acknowledgement of a record until it is in `main`; alerts "
            "use it."
        ),
    )
    complete: Promised | None = Field(
        default=None,
        description=(
            "The longest time from the end of an hour until it and all earlier hours are "
            "accepted; alerts use it."
        ),
    )


class Stream(Frozen):
    """One Kafka topic, its schema, its rules and its tables: one file under `conf/streams/`.

    `unknown` is the treatment of fields that the schema lacks. The batch layer counts them unless
    they are ignored; both layers keep them in the column `rescued`, or refuse records with any, if
    configured. With `select`, `fields` are the columns of the schema, and `columns` are computed
    from them. With `subject_schema`, `columns` are those of the stream's table, and empty until
    they are read (`with_columns`).
    """

    name: Name
    family: str | None = Field(default=None, exclude=True)
    """The family that has the stream, if any: no part of what determines an hour."""
    group: Name | None = Field(
        default=None,
        description=(
            "The group of the stream: one process can run all streams of a group, which commands "
            "select with `--group NAME`."
        ),
    )
    topic: str = Field(pattern=r"^[A-Za-z0-9._-]{1,249}$", description="The Kafka topic.")
    table: str = Field(
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*$",
        description=(
            "The serving table, `namespace.table`. Two more tables have its name with "
            "`_dead_letters` and `_hours`."
        ),
        examples=["shop.orders"],
    )
    location: str | None = Field(
        default=None,
        pattern=r"^(s3://|file:///)[^?#/]([^?#]*[^?#/])?$",
        description=(
            "The folder of the stream's tables, each in NAMESPACE/TABLE below it. Default: the "
            "catalog's choice, below its `warehouse`. A table is not moved later."
        ),
        examples=["s3://eu-data/lake"],
    )
    partition: Annotated[tuple[str, ...], BeforeValidator(parse_partition)] = Field(
        default=(),
        description=(
            "Partition fields of the table after the event's date and the ingest hour: a column "
            "with few values, `bucket(NUMBER, column)` or `truncate(WIDTH, column)` ("
            "[partition](tables.md#partition)). They are not changed later."
        ),
        examples=["[bucket(16, id)]"],
    )
    format: Annotated[FormatSettings, BeforeValidator(parse_format)] = Field(
        default=FormatSettings(),
        description="The encoding of values: a name, or a mapping with the keys below.",
    )
    ddl: str = Field(
        alias="schema",
        description=(
            "The columns, as [Spark DDL](#types-of-a-schema) or a [mapping of "
            "columns](#columns-of-a-schema). `registry`, with format avro, "
            "json_schema or protobuf: the columns of the subject in the schema registry, whose "
            "changes are applied ([change a schema]("
            "../how-to/change-a-schema.md#columns-from-the-schema-registry)); or a "
            "mapping with the keys below."
        ),
        examples=['"id STRING NOT NULL, placed_at TIMESTAMP, total DECIMAL(12,2)"'],
    )
    columns: tuple[Column, ...]
    subject_schema: SubjectSchema | None = None
    select: tuple[SelectedColumn, ...] | None = Field(
        default=None,
        description=(
            "The columns of the table, in order, each a field of the schema or derived from one: "
            "renamed, `sql`, `hash`, `truncate`, `kafka`, `header` "
            "([select-columns.md](../how-to/select-columns.md)). Default: all fields."
        ),
        examples=["[id, placed_at, {order_total: total}]"],
    )
    fields: tuple[Column, ...] = ()
    key: Annotated[tuple[Name, ...], BeforeValidator(_key)] = Field(
        description=(
            "The columns that identify an event: one, or a list. Records with equal values are "
            "duplicates; nulls and empty texts are equal to each other, and a record with nothing "
            "else in its key has no duplicate. `none`: no duplicates are searched."
        ),
        examples=["[id]"],
    )
    event_time: EventTime | None = None
    start: Literal["earliest", "latest"] = Field(
        default="earliest", description="The position at which a new stream starts in the topic."
    )
    unknown: Literal["ignore", "count", "rescue", "refuse"] = Field(
        default="count",
        description=(
            "The handling of fields that the schema does not have: "
            "[formats.md](formats.md#fields-that-the-schema-does-not-know)."
        ),
    )
    speed: Speed = Speed()
    batch: Batch = Batch()
    files: Files = Files()
    maintain: Maintain = Maintain()
    keep: Annotated[Keep, BeforeValidator(parse_keep)] = Keep()
    archive: Archive | None = None
    airflow: Airflow = Airflow()
    slo: Slo = Slo()
    egress: Annotated[tuple[Target, ...], AfterValidator(check_targets)] = Field(
        default=(),
        description=(
            "The targets of accepted hours: a list, each with a `name` and one place "
            "([deliver.md](../how-to/deliver.md))."
        ),
        examples=['[{name: export, root: "s3://exports/orders"}]'],
    )
    expectations: Path | None = Field(
        default=None,
        description=(
            "A Great Expectations suite that each hour must meet; a file in the folder of the "
            "stream's file."
        ),
    )
    quality: Quality = Quality()
    views: Annotated[tuple[View, ...], BeforeValidator(parse_views)] = Field(
        default=(),
        description=(
            "Windowed aggregates by name, each with the keys below "
            "([views.md](../how-to/views.md)); they need `event_time`."
        ),
        examples=[
            "{per_minute: {window: 1 minute, aggregates: {orders: count, spent: sum(total)}}}"
        ],
    )

    @property
    def dead_letters_table(self) -> str:
        return f"{self.table}_dead_letters"

    @property
    def hours_table(self) -> str:
        return f"{self.table}_hours"

    @property
    def archive_table(self) -> str:
        return f"{self.table}_archive"

    @property
    def branched_tables(self) -> tuple[str, ...]:
        """The tables whose branches commits require, except the table of rows: dead letters, views'
        partials, and the archive if configured."""
        archive = (self.archive_table,) if self.archive is not None else ()
        return (self.dead_letters_table, *map(self.partials_table, self.views), *archive)

    def view_table(self, view: View) -> str:
        """Return the name under which a view is read."""
        return f"{self.table}_{view.name}"

    def partials_table(self, view: View) -> str:
        return f"{self.view_table(view)}{PARTIALS}"

    def partials(self, view: View) -> tuple[Partial, ...]:
        """Return the partial columns from which a view's aggregates are computed."""
        return partials_of(view.aggregates, self.columns)

    def definition(self, view: View) -> str:
        """Return a digest of the definition of a view's partials."""
        return definition_digest(view, self.window_column, self.columns)

    @property
    def window_column(self) -> str:
        """The event time column, by which a stream's views form windows."""
        assert self.event_time is not None
        return self.event_time.column

    def column_type(self, name: str) -> str:
        return next(c.type for c in self.columns if c.name == name)

    @property
    def egress_table(self) -> str:
        return f"{self.table}_egress"

    @property
    def plain_tables(self) -> tuple[str, ...]:
        """The append-only tables: the ledger, and egress's deliveries if configured."""
        return (self.hours_table, self.egress_table) if self.egress else (self.hours_table,)

    @property
    def tables(self) -> tuple[str, ...]:
        """All table names of the stream, used or not, and the names under which views are read."""
        views = [
            name
            for view in self.views
            for name in (self.view_table(view), self.partials_table(view))
        ]
        return (
            self.table,
            self.dead_letters_table,
            self.hours_table,
            self.egress_table,
            self.archive_table,
            *views,
        )

    @property
    def lookback_hours(self) -> int:
        """The hours before an hour in which its duplicates are searched; 0 without a key."""
        return self.batch.lookback_hours if self.key else 0

    @property
    def most_event_dates(self) -> int | None:
        """Maximum number of dates of the events of one ingest hour; None if unbounded: a record
        without event time has the date that its producer stamped."""
        bounds = self.event_time
        if bounds is None or bounds.past is None or bounds.future is None:
            return None
        if any(c.nullable for c in self.columns if c.name == bounds.column):
            return None
        return (bounds.past + bounds.future + timedelta(hours=1)) // timedelta(days=1) + 2

    @property
    def record_columns(self) -> tuple[Column, ...]:
        """The fields that are read from a record."""
        if self.select is not None:
            return self.fields
        return tuple(c for c in self.columns if not c.rescues)

    @property
    def read_columns(self) -> tuple[Column, ...]:
        """`record_columns` with their whole paths: with Debezium's envelope, a column without
        `from`, or from `row.NAME`, is a field of the change's row."""
        if self.format.envelope is None:
            return self.record_columns
        return tuple(
            replace(c, path=(ROW, *(c.path[1:] if c.path else (c.name,))))
            if not c.path or c.path[0] == "row"
            else c
            for c in self.record_columns
        )

    @property
    def masks(self) -> bool:
        """Whether a column is hashed with the configured secret."""
        return any(selected.masks for selected in self.select or ())

    def source_of(self, column: str) -> str:
        """Return the file's definition of a column, as JSON: the name of a field, or `select`'s
        expression; with what determines the fields' values, if the file has it."""
        by_name = {one.name: one.definition for one in self.record_columns}
        for one in self.select or ():
            if one.name == column:
                more = {name: by_name[name] for name in one.fields if by_name[name] != name}
                whole = [json.loads(one.source), more]
                return json.dumps(whole, sort_keys=True) if more else one.source
        return json.dumps(by_name.get(column, column), sort_keys=True)

    @property
    def lacks_columns(self) -> bool:
        """Whether the columns still have to be read from the table."""
        return self.subject_schema is not None and not self.columns

    @property
    def subject(self) -> str:
        """The registry's subject of the stream's values."""
        return self.format.subject or f"{self.topic}-value"

    def with_columns(self, columns: Iterable[Column]) -> Stream:
        """Return the stream with the columns of its table, with `rescued` last if configured.
        Raises ConfigurationError for columns that contradict its file."""
        rescued = (RESCUED,) if self.unknown == "rescue" else ()
        declared = {c.name: c for c in self.subject_schema.columns} if self.subject_schema else {}
        own = tuple(
            replace(c, path=d.path, notation=d.notation) if (d := declared.get(c.name)) else c
            for c in columns
            if c.name not in {r.name for r in rescued}
        )
        stream = self.model_copy(update={"columns": (*own, *rescued), "ddl": columns_ddl(own)})
        try:
            stream._check_columns()
            stream._check_views()
        except ValueError as error:
            raise ConfigurationError(
                f"streams/{self.name}.yaml, with the columns of its subject: {error}"
            ) from None
        return stream

    def without_columns(self) -> Stream:
        """Return the stream as in its file, without columns if they are those of its table."""
        if self.subject_schema is not None:
            return self.model_copy(update={"columns": (), "ddl": "registry"})
        return self

    @model_validator(mode="after")
    def _columns_exist(self) -> Stream:
        if self.subject_schema is not None and not self.format.needs_registry:
            raise ValueError(
                f"schema: expected columns with format {self.format.type}, found registry; use "
                f"one of the formats {', '.join(WITH_REGISTRY)}"
            )
        if self.subject_schema is not None and self.format.envelope is not None:
            raise ValueError(
                "schema: expected columns with format.envelope, found registry; name the columns "
                "of the row"
            )
        if not self.lacks_columns:
            self._check_columns()
        return self

    def _check_columns(self) -> None:
        names = [column.name for column in self.columns]
        if taken := [name for name in names if name.lower() in TAKEN_COLUMNS]:
            raise ValueError(
                f"schema: expected names other than {', '.join(TAKEN_COLUMNS)}, found {taken[0]}; "
                "choose another, and read the field by `from` or `select`"
            )
        if self.unknown in ("rescue", "refuse") and not self.format.names_fields:
            raise ValueError(
                f"unknown: expected count or ignore with format {self.format.type}, whose values "
                f"name no fields, found {self.unknown}"
            )
        if self.unknown == "rescue" and self.format.type == "protobuf":
            raise ValueError(
                "unknown: expected count, refuse or ignore with format protobuf, whose values "
                "number fields that the schema does not have, found rescue"
            )
        check_columns(self.format, self.columns if self.select is None else self.fields)
        own = [column for column in self.columns if not column.rescues]
        for name in self.key:
            # Spark and DuckDB do not compare maps.
            if "map<" in (column := require_column("key", own, name)).type:
                raise ValueError(
                    f"key: expected columns that can be compared, found {name} "
                    f"{column.type.upper()}"
                )
        if taken := [t.name for t in self.egress if t.topic == self.topic]:
            raise ValueError(
                f"egress: expected other topics than the stream's own, found {self.topic!r} of "
                f"{taken[0]}"
            )
        if self.event_time is not None:
            require_column("event_time.column", own, self.event_time.column, ("timestamp",))
        for key, types in (("sort", _SORT_TYPES), ("bloom", _BLOOM_TYPES)):
            for name in getattr(self.files, key):
                require_column(f"files.{key}", self.columns, name, types)
        for field in self.partition_fields:
            use = f" for {field.transform}"
            require_column("partition", own, field.column, TYPES[field.transform], use)
            if field.number and field.name in names:
                raise ValueError(
                    f"partition: expected no column with the name of the field {field}, found "
                    f"{field.name}"
                )
        self._check_keep()

    def _check_keep(self) -> None:
        # Look-back hours must still exist when an hour is accepted on time.
        least = timedelta(hours=self.batch.lookback_hours) + timedelta(days=1)
        if self.keep.rows is not None and self.keep.rows < least:
            hours, found = (value / timedelta(hours=1) for value in (least, self.keep.rows))
            raise ValueError(
                "keep.rows: expected at least batch.lookback_hours and a day "
                f"({hours:.0f} hours), because duplicates are looked up in that time, found "
                f"{found:.0f} hours"
            )
        if self.keep.ledger is None:
            return
        for name in ("rows", "dead_letters"):
            value = getattr(self.keep, name)
            if value is None or self.keep.ledger < value:
                found_text = "for ever" if value is None else f"{value.days} days"
                raise ValueError(
                    f"keep.ledger: expected a time that is at least keep.{name}, since the ledger "
                    f"accounts for what is kept, found {self.keep.ledger.days} days and "
                    f"keep.{name}: {found_text}"
                )

    def place_of(self, table: str) -> str | None:
        """Return the location of a table of the stream; None if the catalog chooses it."""
        return f"{self.location}/{table.replace('.', '/')}" if self.location else None

    @property
    def partition_fields(self) -> tuple[PartitionField, ...]:
        return tuple(map(parse_field, self.partition))

    @model_validator(mode="after")
    def _views_are_of_columns(self) -> Stream:
        if self.views and self.event_time is None:
            raise ValueError(
                "views: expected event_time, whose column defines their windows, found none"
            )
        if repeated := repeated_name(view.name for view in self.views):
            raise ValueError(
                f"views: expected each name once (case does not count), found {repeated!r} twice"
            )
        if not self.lacks_columns:
            self._check_views()
        return self

    def _check_views(self) -> None:
        for view in self.views:
            try:
                check_view(view, self.columns)
            except ValueError as error:
                raise ValueError(f"views.{view.name}: {error}") from None
