"""Raw bytes: the record's value, and its key if there is a column for it, unchanged and unparsed.

BINARY takes any bytes; STRING takes UTF-8. A null value is null like any other: NOT NULL of the
column decides.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from anabranch.decode.reading import Errors, Reading, found
from anabranch.decode.values import texts


class RawReader:
    def __init__(self, columns: Mapping[str, str]) -> None:
        self._types = dict(columns)

    def read(self, batch: pa.RecordBatch) -> Reading:
        """Read `value` and `key` of a batch."""
        errors, columns = Errors(), {}
        for place, (name, type) in enumerate(self._types.items()):
            columns[name] = batch.column(name)
            if type == "string":
                columns[name], bad = texts(columns[name])
                for i in bad:
                    errors.add(
                        i, place, "invalid_utf8", f"{name}: {found('UTF-8', 'bytes that are not')}"
                    )
        return Reading(columns, errors, lambda name, i: str(columns[name][i].as_py()))
