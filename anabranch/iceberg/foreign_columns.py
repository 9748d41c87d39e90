"""Columns that another program dropped or renamed since the newest publish of a table.

The schema of the newest publish has the ids of the fields in our files. Iceberg reads a field by
its id, so a column that is added again under its old name is null in all old rows. `apply`
therefore brings a field back under its old id, which Iceberg allows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema, index_by_id, index_name_by_id
from pyiceberg.table import Table
from pyiceberg.table.update import (
    AddSchemaUpdate,
    AssertCurrentSchemaId,
    SetCurrentSchemaUpdate,
    TableRequirement,
    TableUpdate,
)
from pyiceberg.types import IcebergType, ListType, MapType, NestedField, StructType

from anabranch.common.errors import Refused
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg import admin
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.manifests import read_entries
from anabranch.iceberg.snapshots import BRANCHES, PUBLISHED


@dataclass(frozen=True)
class ForeignChange:
    """A field that another program changed. `path`: its name in our newest publish; `now`: since,
    None if dropped; `field`: as it was. `replaced_by`: the id that has its name now."""

    path: str
    now: str | None
    field: NestedField
    replaced_by: int | None = None

    def words(self, table: str) -> str:
        """Return what another program did, and the command or statement that undoes it."""
        if self.now is None:
            return f"another program dropped column {self.path} of {table}"
        former = self.path.rpartition(".")[2]
        return (
            f"another program renamed column {self.path} of {table} to {self.now} (`ALTER TABLE "
            f"CATALOG.{table} RENAME COLUMN {self.now} TO {former}` undoes it)"
        )

    def done_words(self, table: str) -> str:
        """Return a description of the change that was undone."""
        if self.now is None:
            return f"brought column {self.path} of {table} back: another program had dropped it"
        return (
            f"renamed column {self.now} of {table} back to {self.path}: another program had "
            "renamed it"
        )


def published_schema(table: Table) -> Schema | None:
    """Return the schema of the newest publish; None without one. Pure."""
    refs = table.metadata.refs
    ids = {refs[name].snapshot_id for b in BRANCHES for name in (PUBLISHED + b, b) if name in refs}
    tagged = {refs[PUBLISHED + b].snapshot_id for b in BRANCHES if PUBLISHED + b in refs}
    known = [s for s in table.snapshots() if s.snapshot_id in (tagged or ids)]
    newest = max(known, key=lambda s: s.sequence_number or 0, default=None)
    if newest is None or newest.schema_id is None:
        return None
    return table.schemas().get(newest.schema_id)


def find_foreign_changes(table: Table, wanted: Schema) -> list[ForeignChange]:
    """Return the wanted fields that another program dropped or renamed since the newest publish,
    or dropped before it, while the stream's file lacked them. Reads manifests only for a field
    whose name another has now: one without values is not missed, `apply` may have given it another
    type. Raises Transient."""
    published = published_schema(table)
    if published is None:
        return []
    former = sorted(table.schemas().values(), key=lambda s: s.schema_id, reverse=True)
    changes = plan_foreign_changes(published, table.schema(), wanted, former)
    replaced = [c for c in changes if c.now is None and c.replaced_by is not None]
    if not replaced:
        return changes
    files = data_files(table)

    def is_missed(change: ForeignChange) -> bool:
        # Iceberg adds NOT NULL to no column, so only the old field can be what is wanted.
        now = table.schema().find_field(change.path)
        if wanted.find_field(change.path).required and not now.required:
            return True
        # Under a new id, all old rows would have null in the column.
        return has_values(files, _leaves(change.field))

    return [c for c in changes if c not in replaced or is_missed(c)]


def plan_foreign_changes(
    published: Schema, now: Schema, wanted: Schema, former: Sequence[Schema] = ()
) -> list[ForeignChange]:
    """Return the outermost wanted fields that have an id in the published schema, or had in
    `former` ones (newest first) one that none has now, and are missing now. Pure."""
    ids, ids_now = _ids(published), _ids(now)
    fields, names_now = dict(index_by_id(published)), index_name_by_id(now)
    for schema in former:
        known = _ids(schema)
        for name in known.keys() - ids.keys() - ids_now.keys():
            parent = _parent(name)
            if known[name] not in names_now and known.get(parent) == ids_now.get(parent):
                ids[name] = known[name]
                fields[known[name]] = index_by_id(schema)[known[name]]
    changes: list[ForeignChange] = []
    for name in sorted(_ids(wanted), key=lambda name: name.count(".")):
        id = ids.get(name)
        if id is None or ids_now.get(name) == id:
            continue
        if any(name.startswith(f"{change.path}.") for change in changes):
            continue
        changes.append(ForeignChange(name, names_now.get(id), fields[id], ids_now.get(name)))
    return changes


def restore_columns(lake: Lake, name: str, wanted: Schema) -> list[str]:
    """Bring back columns that another program dropped or renamed, under their old ids, in one
    commit; return descriptions of the changes. Raises Refused if rows have values under the new id
    of such a column, Transient."""
    sentences: list[str] = []

    def plan(table: Table) -> tuple[Sequence[TableRequirement], Sequence[TableUpdate]]:
        changes = find_foreign_changes(table, wanted)
        sentences[:] = [change.done_words(name) for change in changes] or sentences
        if not changes:
            return (), ()
        _require_unused(table, name, changes)
        schema, known = restored(table.schema(), changes), table.schemas()
        required = (AssertCurrentSchemaId(current_schema_id=table.schema().schema_id),)
        # A catalog does not add a schema that the table has.
        if (former := next((i for i, s in known.items() if s == schema), None)) is not None:
            return required, (SetCurrentSchemaUpdate(schema_id=former),)
        added = schema.model_copy(update={"schema_id": max(known) + 1})
        return required, (AddSchemaUpdate(schema_=added), SetCurrentSchemaUpdate(schema_id=-1))

    admin.commit_updates(lake, name, "schema", plan)
    return sentences


def restored(now: Schema, changes: Sequence[ForeignChange]) -> Schema:
    """Return a schema with the changes undone. Pure."""
    by_path = {change.path: change for change in changes}
    taken = {change.replaced_by for change in changes} - {None}
    names = {change.field.field_id: change.field.name for change in changes}

    def fields(path: str, have: Sequence[NestedField]) -> tuple[NestedField, ...]:
        back = [c.field for c in by_path.values() if c.now is None and _parent(c.path) == path]
        kept = [_renamed(f, path, names) for f in have if f.field_id not in taken]
        # Before the provenance columns, where new columns are inserted too.
        at = next((i for i, f in enumerate(kept) if f.name == "kafka_partition"), len(kept))
        return (*kept[:at], *back, *kept[at:])

    def _renamed(f: NestedField, path: str, names: Mapping[int, str]) -> NestedField:
        name = names.get(f.field_id, f.name)
        return f.model_copy(
            update={"name": name, "field_type": kind(_join(path, name), f.field_type)}
        )

    def kind(path: str, t: IcebergType) -> IcebergType:
        if isinstance(t, StructType):
            return StructType(*fields(path, t.fields))
        if isinstance(t, ListType):
            inner = kind(f"{path}.element", t.element_type)
            return ListType(t.element_id, inner, element_required=t.element_required)
        if isinstance(t, MapType):
            value = kind(f"{path}.value", t.value_type)
            return MapType(t.key_id, t.key_type, t.value_id, value, value_required=t.value_required)
        return t

    return Schema(*fields("", now.fields), identifier_field_ids=now.identifier_field_ids)


def data_files(table: Table) -> list[DataFile]:
    """Return the data files with rows of all branches. Raises Transient."""
    heads = {ref.snapshot_id for name, ref in table.metadata.refs.items() if name in BRANCHES}
    with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
        manifests = {
            manifest.manifest_path: manifest
            for snapshot in table.snapshots()
            if snapshot.snapshot_id in heads
            for manifest in snapshot.manifests(table.io)
        }
        return [
            entry.data_file
            for entries in read_entries(table.io, list(manifests.values()))
            for entry in entries
            if entry.data_file.record_count
        ]


def has_values(files: Sequence[DataFile], ids: Collection[int]) -> bool:
    """Return whether, by the files' metrics, a row may have a value of one of the fields. Pure."""
    for file in files:
        values, nulls = file.value_counts or {}, file.null_value_counts or {}
        if not values:
            return True
        # A file has the sizes of all its columns, and counts of those with metrics.
        counted = [id for id in ids if id in values or id in (file.column_sizes or {})]
        if any(values.get(id, -1) != nulls.get(id, -2) for id in counted):
            return True
    return False


def _require_unused(table: Table, name: str, changes: Sequence[ForeignChange]) -> None:
    fields, files = index_by_id(table.schema()), None
    for change in changes:
        if change.replaced_by is None:
            continue
        files = data_files(table) if files is None else files
        # The old field comes back under its id, so values under the new id would be hidden.
        if has_values(files, _leaves(fields[change.replaced_by])):
            raise Refused(
                f"{change.words(name)}, and rows were written to a new column of this name: "
                "expected no values in it, found some; restate the hours with rows before the "
                "change while Kafka has their records: `anabranch batch STREAM --hour A..B "
                "--restate`"
            )


def _leaves(field: NestedField) -> list[int]:
    return [id for id, f in index_by_id(Schema(field)).items() if f.field_type.is_primitive]


def _ids(schema: Schema) -> dict[str, int]:
    """Return the ids of a schema's fields by their full names, such as `items.element.x`."""
    return {name: id for id, name in index_name_by_id(schema).items()}


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
