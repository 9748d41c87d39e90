"""The partitions of rows, by the spec that `apply` made: values as in manifests, and the folders of
files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote_plus

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyiceberg.partitioning import PartitionField, PartitionSpec, partition_record_value
from pyiceberg.schema import Schema
from pyiceberg.table.locations import LocationProvider, load_location_provider
from pyiceberg.transforms import BucketTransform, IdentityTransform, Transform, TruncateTransform

from anabranch.config.sections import parse_field
from anabranch.iceberg.manifests import own_spec_id

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyiceberg.table import Table

OF_TIME = ("event_date", "ingest_hour")
"""The partition fields that each table of rows has."""

_LONGEST = 64
"""Characters of a value in a file's path: a system limits the length of a path, and a record may
have any value."""

_PLACES = {"write.data.path", "write.object-storage.path", "write.folder-storage.path"}
_FLAT = "write.object-storage.partitioned-paths"
_KINDS = (IdentityTransform, BucketTransform, TruncateTransform)


@dataclass(frozen=True)
class Partitioning:
    """How a table's rows are divided into files. `is_flat`: paths lack the partition. Picklable."""

    spec: PartitionSpec
    schema: Schema
    places: LocationProvider
    is_flat: bool

    def columns(self, rows: pa.Table, without: Sequence[str] = ()) -> list[pa.ChunkedArray]:
        """Return the partition values of rows by field, except the fields `without`."""
        return [self._column(rows, f) for f in self.spec.fields if f.name not in without]

    def split(self, rows: pa.Table) -> Iterator[tuple[tuple[Any, ...], NDArray[np.int64] | None]]:
        """Yield each partition's values and its rows' indexes, ascending; None for all rows."""
        if not len(rows):
            return
        columns = self.columns(rows)
        groups = _groups(columns, len(rows))
        for chosen in groups:
            first = 0 if chosen is None else int(chosen[0])
            values = zip(self.spec.fields, columns, strict=True)
            yield (
                tuple(
                    partition_record_value(field, column[first].as_py(), self.schema)
                    for field, column in values
                ),
                chosen,
            )

    def path(self, values: Sequence[Any], name: str) -> str:
        """Return the path of a file of a partition, in the folders of Iceberg's own writers."""
        if self.is_flat:
            return str(self.places.new_data_location(name))
        kinds = self.spec.partition_type(self.schema).fields
        texts = (
            field.transform.to_human_string(kind.field_type, value)
            for field, kind, value in zip(self.spec.fields, kinds, values, strict=True)
        )
        folders = (
            f"{quote_plus(field.name, safe='')}={quote_plus(text, safe='')[:_LONGEST]}"
            for field, text in zip(self.spec.fields, texts, strict=True)
        )
        return str(self.places.new_data_location("/".join((*folders, name))))

    def _column(self, rows: pa.Table, field: PartitionField) -> pa.ChunkedArray:
        source = self.schema.find_field(field.source_id)
        values = rows.column(source.name)
        transformed = field.transform.pyarrow_transform(source.field_type)(values)
        if isinstance(transformed, pa.ChunkedArray):
            return transformed
        return pa.chunked_array([transformed])


def partitioning_of(table: Table) -> Partitioning | None:
    """Return how our writers divide a table's rows; None if only Iceberg's own can."""
    spec = table.specs()[own_spec_id(table)]
    if not all(isinstance(f.transform, _KINDS) for f in spec.fields):
        return None
    properties = table.metadata.properties
    has_objects, has_folders = (
        properties.get(name, default).lower() == "true"
        for name, default in (("write.object-storage.enabled", "false"), (_FLAT, "true"))
    )
    # There Iceberg puts the table's name into each path, by which orphans of a folder that tables
    # share are found; PyIceberg does not.
    if has_objects and _PLACES & properties.keys():
        return None
    places = load_location_provider(table.metadata.location, properties)
    return Partitioning(spec, table.schema(), places, has_objects and not has_folders)


def spec_of(schema: Schema, by: Iterable[str]) -> PartitionSpec:
    """Return a new table's spec, of fields as in `partition:` of a stream's file."""
    return PartitionSpec(
        *(
            PartitionField(
                schema.find_field(field.column).field_id, 1000 + i, _transform(field), field.name
            )
            for i, field in enumerate(map(parse_field, by))
        )
    )


def fields_of(table: Table) -> tuple[str, ...]:
    """Return the fields of the spec that `apply` made, as `spec_of` takes them."""
    schema, made = table.schema(), []
    for field in table.specs()[own_spec_id(table)].fields:
        name, transform = schema.find_column_name(field.source_id), field.transform
        if isinstance(transform, BucketTransform):
            made.append(f"bucket({transform.num_buckets}, {name})")
        elif isinstance(transform, TruncateTransform):
            made.append(f"truncate({transform.width}, {name})")
        else:
            made.append(str(name))
    return tuple(made)


def spark_columns(table: Table, catalog: str) -> list[str]:
    """Return Spark's expressions of the partition fields by other columns than those of time."""
    found = []
    for field in map(parse_field, fields_of(table)):
        if field.number:
            found.append(f"{catalog}.system.{field.transform}({field.number}, `{field.column}`)")
        elif field.column not in OF_TIME:
            found.append(f"`{field.column}`")
    return found


def _transform(field: Any) -> Transform[Any, Any]:
    if field.transform == "bucket":
        return BucketTransform(field.number)
    return TruncateTransform(field.number) if field.number else IdentityTransform()


def _groups(columns: Sequence[pa.ChunkedArray], rows: int) -> list[NDArray[np.int64]] | list[None]:
    """Return the row indexes of each combination of values, ascending; one None for a single."""
    codes: NDArray[np.int64] | None = None
    for column in columns:
        encoded = column.combine_chunks().dictionary_encode(null_encoding="encode")
        if len(encoded.dictionary) < 2:
            continue
        own = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        # Numbered again after each column, so that no product overflows.
        codes = own if codes is None else codes * len(encoded.dictionary) + own
        codes = np.unique(codes, return_inverse=True)[1]
    if codes is None:
        return [None]
    order = np.argsort(codes, kind="stable")
    ends = np.flatnonzero(np.diff(codes[order])) + 1
    return np.split(order, ends)
