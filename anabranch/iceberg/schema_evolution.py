"""Schema evolution: the changes from a table's schema to the wanted one, in one commit, or the
reason for a refusal. A change is allowed if every row stays readable with its meaning (Iceberg
specification, "Schema Evolution"): a new nullable column, a wider type (INT to BIGINT, FLOAT to
DOUBLE, more digits of a DECIMAL before its point), NOT NULL removed; and the same inside structs,
arrays and map values. Any other change is refused, and the error names the alternative.
A column of which no published row has a value may get any type: a first type may be a mistake.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from pyiceberg.schema import Schema
from pyiceberg.table import Table, Transaction
from pyiceberg.table.update import AssertRefSnapshotId, TableRequirement
from pyiceberg.types import (
    DecimalType,
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    StructType,
)

from anabranch.common.errors import Refused
from anabranch.iceberg import admin
from anabranch.iceberg.foreign_columns import data_files, has_values, restore_columns
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.snapshots import BRANCHES


class Kind(Enum):
    ADDED = "added"
    WIDENED = "widened"
    OPTIONAL = "made optional"
    RETYPED = "retyped"


@dataclass(frozen=True)
class SchemaChange:
    """One change of one column. `path`: its name, or the names of the structs around it, with
    `element` for arrays and `value` for maps."""

    kind: Kind
    path: tuple[str, ...]
    before: IcebergType | None
    after: IcebergType
    required: bool = False

    def plan_words(self, table: str) -> str:
        """Return a description of the planned change."""
        column = ".".join(self.path)
        if self.kind is Kind.ADDED:
            return f"new column {column} of {table}, {type_words(self.after)}"
        if self.kind in (Kind.WIDENED, Kind.RETYPED):
            return f"column {column} of {table} becomes {type_words(self.after)}"
        return f"column {column} of {table} becomes optional"

    def words(self, table: str) -> str:
        """Return a description of the change that was made."""
        column = ".".join(self.path)
        if self.kind is Kind.ADDED:
            return f"added column {column} to {table}"
        if self.kind is Kind.WIDENED:
            assert self.before is not None
            return (
                f"widened column {column} of {table} from {type_words(self.before)} to "
                f"{type_words(self.after)}"
            )
        if self.kind is Kind.RETYPED:
            assert self.before is not None
            return (
                f"changed column {column} of {table} from {type_words(self.before)} to "
                f"{type_words(self.after)}: no row had a value of it"
            )
        return f"made column {column} of {table} optional"


@dataclass(frozen=True)
class Columns:
    """The wanted columns of a table, and their roles. `key`: columns that distinguish events.
    `complete`: an additional column of the table is an error; otherwise it is from another version
    of the code, and stays. `before`: the column before which new columns are inserted. `unused`:
    columns of which no published row has a value, so that they may get another type.
    """

    schema: Schema
    source: str
    key: Collection[str] = ()
    complete: bool = False
    before: str | None = None
    unused: Collection[str] = ()


def plan_evolution(table: str, have: Schema, wanted: Columns) -> list[SchemaChange]:
    """Return the changes from `have` to the wanted columns; the order of columns does not matter.
    Raises Refused, naming table and column, for the first change that would lose, hide or alter
    values. Pure.
    """
    where = f"table {table}, {wanted.source}"
    return list(_fields(where, (), have.fields, wanted.schema.fields, wanted))


def plan_table_evolution(table: Table, wanted: Columns) -> list[SchemaChange]:
    """Return `plan_evolution` of a loaded table. If refused, read which columns no published row
    has a value of; these may get another type. Raises Refused, Transient."""
    name = ".".join(table.name())
    try:
        return plan_evolution(name, table.schema(), wanted)
    except Refused:
        unused = unused_columns(table)
        if not unused:
            raise
        return plan_evolution(name, table.schema(), replace(wanted, unused=unused))


def unused_columns(table: Table) -> frozenset[str]:
    """Return the columns of which no row on a branch has a value, by the files' metrics: all
    columns of a table without rows. Raises Transient."""
    files = data_files(table)
    unused = [
        f.name
        for f in table.schema().fields
        if not files
        or (f.field_type.is_primitive and not f.required and not has_values(files, [f.field_id]))
    ]
    return frozenset(unused)


def evolve(lake: Lake, name: str, wanted: Columns) -> list[str]:
    """Evolve a table's schema to the wanted one, in one commit; return descriptions of the changes.
    Idempotent, also after a lost answer. Raises Refused, Transient.
    """
    sentences: list[str] = []

    def write(table: Table, tx: Transaction) -> Sequence[TableRequirement]:
        changes = plan_table_evolution(table, wanted)
        sentences[:] = [change.words(name) for change in changes] or sentences
        retyped = [change.path for change in changes if change.kind is Kind.RETYPED]
        if retyped:
            # By itself: PyIceberg finds a column to move by its name.
            with tx.update_schema(allow_incompatible_changes=True) as update:
                for path in retyped:
                    update.delete_column(path)
        with tx.update_schema(allow_incompatible_changes=bool(retyped)) as update:
            for change in changes:
                if change.kind in (Kind.ADDED, Kind.RETYPED):
                    update.add_column(change.path, change.after, required=change.required)
                    if wanted.before is not None and len(change.path) == 1:
                        update.move_before(change.path, wanted.before)
                elif change.kind is Kind.WIDENED:
                    update.update_column(change.path, field_type=change.after)
                else:
                    update.make_column_optional(change.path)
        refs = table.metadata.refs
        # A publish that lands first may have values of the old type.
        return [
            AssertRefSnapshotId(ref=branch, snapshot_id=refs[branch].snapshot_id)
            for branch in (BRANCHES if retyped else ())
            if branch in refs
        ]

    found = restore_columns(lake, name, wanted.schema)
    admin.change_table(lake, name, "schema", write)
    return [*found, *sentences]


def _fields(
    where: str,
    path: tuple[str, ...],
    have: Collection[NestedField],
    wanted: Collection[NestedField],
    columns: Columns,
) -> Iterator[SchemaChange]:
    known, names = {f.name: f for f in have}, {f.name for f in wanted}
    if gone := [f.name for f in have if f.name not in names and columns.complete]:
        raise Refused(
            f"{where}, column {'.'.join((*path, gone[0]))}: expected it in the schema, found it "
            "gone; put it back: rows that have it would lose it (to rename a column, add the new "
            "name beside the old one)"
        )
    for f in wanted:
        at = (*path, f.name)
        column = f"{where}, column {'.'.join(at)}"
        existing = known.get(f.name)
        if existing is None:
            if f.required:
                raise Refused(
                    f"{column}: expected the new column to be nullable, found NOT NULL; leave out "
                    "NOT NULL: old rows do not have it"
                )
            if f.name in columns.key and not path:
                raise Refused(
                    f"{column}: expected a key of columns that the table has, found a new one; "
                    "keep the key, or make a new stream with its own table: old records without "
                    "the column would all be one event"
                )
            yield SchemaChange(Kind.ADDED, at, None, f.field_type)
            continue
        if f.required and not existing.required:
            raise Refused(
                f"{column}: expected it to stay nullable, found NOT NULL; leave out NOT NULL: "
                "rows may have null there (to refuse hours for it: "
                "expect_column_values_to_not_be_null in the quality gate)"
            )
        is_key = f.name in columns.key and not path
        try:
            yield from _types(where, at, existing.field_type, f.field_type, columns, is_key)
        except Refused:
            if path or f.name not in columns.unused:
                raise
            yield SchemaChange(
                Kind.RETYPED,
                at,
                existing.field_type,
                f.field_type,
                existing.required and f.required,
            )
            continue
        if existing.required and not f.required:
            if is_key:
                raise Refused(
                    f"{column}: expected the key's column to stay NOT NULL, found it nullable; "
                    "put NOT NULL back: records without it would all be one event"
                )
            yield SchemaChange(Kind.OPTIONAL, at, existing.field_type, f.field_type)


def _types(
    where: str,
    path: tuple[str, ...],
    have: IcebergType,
    wanted: IcebergType,
    columns: Columns,
    is_key: bool = False,
) -> Iterator[SchemaChange]:
    if isinstance(have, StructType) and isinstance(wanted, StructType):
        yield from _fields(where, path, have.fields, wanted.fields, columns)
    elif isinstance(have, ListType) and isinstance(wanted, ListType):
        yield from _types(
            where, (*path, "element"), have.element_type, wanted.element_type, columns
        )
    elif (
        isinstance(have, MapType)
        and isinstance(wanted, MapType)
        and type_words(have.key_type) == type_words(wanted.key_type)
    ):
        yield from _types(where, (*path, "value"), have.value_type, wanted.value_type, columns)
    elif have == wanted:
        return
    elif is_wider(wanted, have) and not (is_key and isinstance(have, FloatType)):
        yield SchemaChange(Kind.WIDENED, path, have, wanted)
    else:
        raise Refused(
            f"{where}, column {'.'.join(path)}: expected {_or_wider(have, is_key)}, found "
            f"{type_words(wanted)}; put the type back with a field that no record has (`from: "
            f"no_{path[0]}`), and add a column of the other type (`from: {path[0]}`), or make a "
            "new stream with its own table"
        )


def is_wider(wide: IcebergType, narrow: IcebergType) -> bool:
    """Return whether Iceberg reads values of type `narrow` as `wide` (format v2). Pure."""
    if isinstance(narrow, DecimalType):
        return (
            isinstance(wide, DecimalType)
            and wide.scale == narrow.scale
            and wide.precision > narrow.precision
        )
    return (type(narrow), type(wide)) in {(IntegerType, LongType), (FloatType, DoubleType)}


def _or_wider(kind: IcebergType, is_key: bool) -> str:
    """Return the types that a column may have. A key's FLOAT read as DOUBLE would differ."""
    if isinstance(kind, DecimalType):
        return f"{type_words(kind)} or more digits before the point (decimal(N,{kind.scale}))"
    wider = (
        "bigint"
        if isinstance(kind, IntegerType)
        else "double"
        if isinstance(kind, FloatType)
        else None
    )
    if wider and not (is_key and wider == "double"):
        return f"{type_words(kind)} or {wider}"
    return type_words(kind)


def type_words(kind: IcebergType, in_order: bool = False) -> str:
    """Return a type as in the stream's file (`bigint`, `array<int>`), without Iceberg's ids. The
    fields of a struct are sorted by name, since their order does not matter, or `in_order`. Pure.
    """
    if isinstance(kind, StructType):
        fields = [f"{f.name}:{type_words(f.field_type, in_order)}" for f in kind.fields]
        return f"struct<{','.join(fields if in_order else sorted(fields))}>"
    if isinstance(kind, ListType):
        return f"array<{type_words(kind.element_type, in_order)}>"
    if isinstance(kind, MapType):
        key, value = type_words(kind.key_type, in_order), type_words(kind.value_type, in_order)
        return f"map<{key},{value}>"
    if isinstance(kind, DecimalType):
        return f"decimal({kind.precision},{kind.scale})"
    return {"long": "bigint", "timestamptz": "timestamp"}.get(str(kind), str(kind))
