"""Physical design: the table's settings for file writers, from `files:` of the stream's file. Sort
order, Bloom filters and statistics are Iceberg's own settings, which its writers follow
(decision 26). A table property records the settings that we made. So they are removed once
the stream's file no longer has them, and an operator's own settings stay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pyiceberg.table.sorting import UNSORTED_SORT_ORDER_ID, NullOrder, SortDirection, SortField
from pyiceberg.transforms import IdentityTransform

from anabranch.common.json_values import parse, read_property
from anabranch.iceberg import admin

if TYPE_CHECKING:
    from pyiceberg.table import Table, Transaction

    from anabranch.iceberg.lake import Lake

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
