"""The Iceberg schemas of a stream's tables (rows, dead letters, archive, a view's partials), and
the physical design: the table's settings for file writers, from `files:` of the stream's file.

Sort order, Bloom filters and statistics are Iceberg's own settings, which its writers follow
(decision 26). A table property records the settings that we made. So they are removed once the
stream's file no longer has them, and an operator's own settings stay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from pyiceberg.schema import Schema
from pyiceberg.table import Table, Transaction
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER_ID, NullOrder, SortDirection, SortField
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import (
    BinaryType,
    BooleanType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StringType,
    StructType,
    TimestamptzType,
)

from anabranch.common.json_values import parse, read_property
from anabranch.config import Stream, View
from anabranch.config.columns import parts_of
from anabranch.config.views import WINDOW_START, group_column
from anabranch.iceberg import admin
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.schema_evolution import Columns

_PRIMITIVES: dict[str, IcebergType] = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "boolean": BooleanType(),
    "date": DateType(),
    "timestamp": TimestamptzType(),
    "binary": BinaryType(),
}

FROM_KAFKA = (
    ("kafka_partition", IntegerType()),
    ("kafka_offset", LongType()),
    ("kafka_timestamp", TimestamptzType()),
    ("ingest_hour", StringType()),
    ("event_date", DateType()),
)
"""The provenance columns of a row, which follow the stream's own columns."""


def iceberg_type(kind: str, ids: list[int]) -> IcebergType:
    """Return the Iceberg type of `Column.type`, with ids after `ids[0]`, which is advanced."""

    def next_id() -> int:
        ids[0] += 1
        return ids[0]

    name, parts = parts_of(kind)
    if name == "array":
        return ListType(next_id(), iceberg_type(parts[0], ids), element_required=False)
    if name == "map":
        key, value = next_id(), next_id()
        return MapType(key, iceberg_type(parts[0], ids), value, iceberg_type(parts[1], ids), False)
    if name == "struct":
        fields = (part.partition(":") for part in parts)
        return StructType(
            *(NestedField(next_id(), name, iceberg_type(of, ids)) for name, _, of in fields)
        )
    if name == "decimal":
        return DecimalType(int(parts[0]), int(parts[1]))
    return _PRIMITIVES[name]


# Iceberg's `write.metadata.metrics.max-inferred-column-defaults`.
_FIELDS_WITH_BOUNDS = 100


# Cached for all streams of a process.
@lru_cache(maxsize=1 << 12)
def rows_schema(stream: Stream) -> Schema:
    """Return the schema of the stream's table: its own columns, then the provenance columns."""
    fields: list[NestedField] = []
    ids = [1000]
    for column in stream.columns:
        kind = iceberg_type(column.type, ids)
        fields.append(NestedField(len(fields) + 1, column.name, kind, required=not column.nullable))
    for name, kind in FROM_KAFKA:
        fields.append(NestedField(len(fields) + 1, name, kind, required=name != "kafka_timestamp"))
    return Schema(*fields)


def schema_of(*columns: tuple[str, str] | tuple[str, str, str]) -> Schema:
    """Return a schema of columns: a name (with `!` if it is required), Iceberg's name of the type,
    and a doc. Their ids are their places: a new column is the last one."""
    return Schema(
        *(
            NestedField(i, name.rstrip("!"), kind, name.endswith("!"), *doc)
            for i, (name, kind, *doc) in enumerate(columns, 1)
        )
    )


def rows_columns(stream: Stream) -> Columns:
    """Return the columns of the stream's table, and how they may change."""
    source = f"subject {stream.subject}" if stream.subject_schema is not None else "`schema:`"
    return Columns(
        rows_schema(stream),
        f"stream {stream.name} ({source})",
        stream.key,
        True,
        before="kafka_partition",
    )


def rows_design(stream: Stream) -> PhysicalDesign:
    """Return the physical design of the stream's table. Event time and provenance columns, which
    readers filter by, have bounds in a wide table too: Iceberg keeps those of 100 fields."""
    if len(rows_schema(stream).field_ids) <= _FIELDS_WITH_BOUNDS:
        return PhysicalDesign(stream.files.sort, stream.files.bloom)
    times = (stream.event_time.column,) if stream.event_time is not None else ()
    bounded = (*times, *(name for name, _ in FROM_KAFKA))
    return PhysicalDesign(stream.files.sort, stream.files.bloom, bounded)


def dead_letters_schema() -> Schema:
    header = StructType(
        NestedField(12, "key", StringType()), NestedField(13, "value", BinaryType())
    )
    return Schema(
        NestedField(1, "topic_id", StringType(), required=True),
        NestedField(2, "kafka_partition", IntegerType(), required=True),
        NestedField(3, "kafka_offset", LongType(), required=True),
        NestedField(4, "kafka_timestamp", TimestamptzType()),
        NestedField(5, "ingest_hour", StringType(), required=True),
        NestedField(6, "key", BinaryType()),
        NestedField(7, "value", BinaryType()),
        NestedField(8, "headers", ListType(11, header, element_required=False)),
        NestedField(9, "error_code", StringType(), required=True),
        NestedField(10, "error_text", StringType()),
        NestedField(14, "layer", StringType(), required=True),
    )


def archive_schema() -> Schema:
    """Return the columns of dead letters without those of the error: a record as Kafka has it."""
    own = ("error_code", "error_text", "layer")
    return Schema(*(field for field in dead_letters_schema().fields if field.name not in own))


def partials_schema(stream: Stream, view: View) -> Schema:
    """Return the schema of a view's partials: an hour's partial of one window and group, and its
    inputs: acceptance, digests of files and of the view's definition."""
    ids = [1000]
    fields = [
        NestedField(1, "ingest_hour", StringType(), required=True),
        NestedField(2, WINDOW_START, TimestamptzType()),
    ]
    columns = [
        ("decision", "string"),
        ("files", "string"),
        ("definition", "string"),
        ("records", "bigint"),
    ]
    columns += [(group_column(name), stream.column_type(name)) for name in view.group]
    columns += [(partial.name, partial.type) for partial in stream.partials(view)]
    for name, kind in columns:
        fields.append(NestedField(len(fields) + 1, name, iceberg_type(kind, ids)))
    return Schema(*fields)


DESIGN = "anabranch.physical-design"

_METRICS = "write.metadata.metrics"
_BLOOM = "write.parquet.bloom-filter"
# Exact for fixed-width types, and for texts as long as an id or a digest. Not `full`: an engine
# that takes min() and max() from bounds (Spark) would then use an older file's truncated bounds of
# 16 characters.
_BOUNDS = "truncate(64)"
# A look-up reads at least one row group; Iceberg's default of 128 MB would be half a file.
_ROW_GROUP_BYTES = 32 * 2**20


@dataclass(frozen=True)
class PhysicalDesign:
    """The sort columns of files, the columns with Bloom filters, and those with bounds in manifests
    besides the sort columns and Iceberg's first 100 (`bounded`)."""

    sort: tuple[str, ...] = ()
    bloom: tuple[str, ...] = ()
    bounded: tuple[str, ...] = ()

    @property
    def properties(self) -> dict[str, str]:
        """The table properties of the design."""
        settings = {}
        if self.sort or self.bloom:
            settings["write.parquet.row-group-size-bytes"] = str(_ROW_GROUP_BYTES)
        if self.bloom:
            # Size filters by the row group's distinct values, instead of one megabyte each.
            settings[f"{_BLOOM}-adaptive-enabled"] = "true"
        settings |= {f"{_BLOOM}-enabled.column.{name}": "true" for name in self.bloom}
        return settings | {
            f"{_METRICS}.column.{name}": _BOUNDS for name in (*self.sort, *self.bounded)
        }

    def words(self) -> str:
        parts = [
            f"{what} {', '.join(names)}"
            for what, names in (
                ("sort order", self.sort),
                ("Bloom filters of", self.bloom),
                ("bounds of", self.bounded),
            )
            if names
        ]
        return "; ".join(parts) or "no physical design"


@dataclass(frozen=True)
class DesignChange:
    """The changes of a table to a design: properties to set (`values`) and to remove, and the new
    sort columns (empty: unsorted; None: unchanged)."""

    values: Mapping[str, str]
    remove: tuple[str, ...]
    sort: tuple[str, ...] | None

    def __bool__(self) -> bool:
        return bool(self.values or self.remove or self.sort is not None)


def plan_design(
    properties: Mapping[str, str], sorted_by: Sequence[str] | None, wanted: PhysicalDesign
) -> DesignChange:
    """Return the changes from a table with these properties to the wanted design. `sorted_by`: the
    columns of its sort order; None for an order that no design has. Pure.
    """
    before = read_property(properties, DESIGN, partial(parse, dict[str, list[str]]))
    settings = wanted.properties
    if wanted != PhysicalDesign():
        settings[DESIGN] = json.dumps({"sort": wanted.sort, "properties": sorted(settings)})
    ours = (*before.get("properties", ()), DESIGN)
    sort = None
    if wanted.sort:
        sort = wanted.sort if sorted_by is None or tuple(sorted_by) != wanted.sort else None
    elif sorted_by and list(sorted_by) == before.get("sort"):
        sort = ()
    return DesignChange(
        {name: value for name, value in settings.items() if properties.get(name) != value},
        tuple(name for name in ours if name in properties and name not in settings),
        sort,
    )


def apply_design(lake: Lake, name: str, wanted: PhysicalDesign) -> list[str]:
    """Set a table's design in one commit; return sentences that describe the changes. Idempotent.
    Rewrites no file. Raises Transient."""
    changed: list[str] = []

    def write(table: Table, tx: Transaction) -> None:
        change = plan_design(table.properties, _sorted_by(table), wanted)
        if not change:
            return
        changed[:] = [f"from now on batch files of {name} have {wanted.words()}"]
        if change.values:
            tx.set_properties(dict(change.values))
        if change.remove:
            tx.remove_properties(*change.remove)
        if change.sort is not None:
            with tx.update_sort_order() as order:
                for column in change.sort:
                    order.asc(column, IdentityTransform(), NullOrder.NULLS_FIRST)

    admin.change_table(lake, name, "physical design", write)
    return changed


def sort_order_id(table: Table, columns: Sequence[str]) -> int:
    """Return the sort order id for files sorted by `columns`: the table's if its sort order is
    exactly this one, else the id of unsorted files."""
    if columns and _sorted_by(table) == tuple(columns):
        return table.sort_order().order_id
    return UNSORTED_SORT_ORDER_ID


def _sorted_by(table: Table) -> tuple[str, ...] | None:
    schema, names = table.schema(), []
    for field in table.sort_order().fields:
        name = schema.find_column_name(field.source_id)
        if name is None or field != SortField(
            field.source_id, IdentityTransform(), SortDirection.ASC, NullOrder.NULLS_FIRST
        ):
            return None
        names.append(name)
    return tuple(names)
