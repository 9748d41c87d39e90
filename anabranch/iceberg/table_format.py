"""Features of a table that our writers do not support: another program may turn them on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyiceberg.exceptions import ValidationError
from pyiceberg.serializers import FromInputFile

from anabranch.common.errors import ConfigurationError
from anabranch.iceberg.snapshots import BRANCHES

if TYPE_CHECKING:
    from pyiceberg.table import Table

VERSION = 2
SUPPORTED = f"format version {VERSION}, Parquet, Iceberg's own location providers, no encryption"
_FORMAT = "write.format.default"
# With a provider of its own, no listing finds a file without a reference.
_NEVER = ("encryption.key-id", "write.location-provider.impl", "write.py-location-provider.impl")


def unsupported_feature(table: Table) -> str | None:
    """Return the feature of a table that prevents us from writing it, as text; None if there is
    none. Version 3 includes deletion vectors and its types. Pure."""
    if table.format_version != VERSION:
        return f"format version {table.format_version}"
    key = _refused_property(table)
    return f"property {key}={table.properties[key]}" if key is not None else None


def _refused_property(table: Table) -> str | None:
    if table.properties.get(_FORMAT, "parquet").lower() != "parquet":
        return _FORMAT
    return next((key for key in _NEVER if key in table.properties), None)


def require_writable(table: Table) -> None:
    """Raise ConfigurationError for a table with a feature that our writers do not support, with the
    way back."""
    feature = unsupported_feature(table)
    if feature is None:
        return
    name = ".".join(table.name())
    raise ConfigurationError(
        f"table {name}: expected {SUPPORTED}, found {feature}, which another program set; nothing "
        f"is published; {_way_back(table, name)}"
    )


def _way_back(table: Table, name: str) -> str:
    if (key := _refused_property(table)) is not None and table.format_version == VERSION:
        return f"ALTER TABLE CATALOG.{name} UNSET TBLPROPERTIES ('{key}') and run it again"
    former = _last_metadata(table)
    if former is None:
        return (
            "Iceberg does not lower a version: restore catalog and bucket to a time before it, or "
            "give `table:` of the stream's file another name and read the topic again"
        )
    return (
        f"its rows are those of version {VERSION} still: in Spark, DROP TABLE CATALOG.{name} "
        f"without PURGE, then CALL CATALOG.system.register_table('{name}', '{former}')"
    )


def _last_metadata(table: Table) -> str | None:
    """Return the newest metadata file of the supported version, if its branches are the current
    ones."""
    heads = {b: table.metadata.refs[b].snapshot_id for b in BRANCHES if b in table.metadata.refs}
    for entry in reversed(table.metadata.metadata_log):
        try:
            before = FromInputFile.table_metadata(table.io.new_input(entry.metadata_file))
        except (OSError, ValueError, ValidationError):
            continue
        if before.format_version == VERSION:
            refs = {b: before.refs[b].snapshot_id for b in BRANCHES if b in before.refs}
            return entry.metadata_file if refs == heads else None
    return None
