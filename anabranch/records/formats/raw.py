"""Raw bytes: the record's value, and its key if there is a column for it, unchanged and unparsed.

BINARY takes any bytes; STRING takes UTF-8. A null value is null like any other: NOT NULL of the
column decides.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame
from pyspark.sql.types import DataType, StringType

from anabranch.records.checks import Check, error
from anabranch.records.formats import Reading


class RawFormat:
    def read(self, records: DataFrame, types: Mapping[str, DataType]) -> Reading:
        """Read as `Format.read`."""
        frame = records.selectExpr(
            "*",
            *(
                f"CAST(kafka_{name} AS {kind.simpleString()}) AS `_row_{name}`"
                for name, kind in types.items()
            ),
        )
        checks = tuple(
            Check(
                f"NOT is_valid_utf8(`_row_{name}`)",
                error("invalid_utf8", f"'{name}: expected UTF-8, found bytes that are not'"),
            )
            for name, kind in types.items()
            if isinstance(kind, StringType)
        )
        return Reading(frame, checks, lambda name: f"`_row_{name}`")
