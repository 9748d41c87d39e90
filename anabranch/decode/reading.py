"""The result of reading a batch of values, with the errors of its records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

FOUND_LENGTH = 80


class Errors:
    """The first error of each record: of the whole record, else of its first column."""

    WHOLE = -1

    def __init__(self) -> None:
        self._found: dict[int, tuple[int, str, str]] = {}

    def add(self, record: int, column: int, code: str, text: str) -> None:
        known = self._found.get(record)
        if known is None or column < known[0]:
            self._found[record] = (column, code, text)

    def is_whole(self, record: int) -> bool:
        """Return whether nothing of the record can be read."""
        return record in self._found and self._found[record][0] == self.WHOLE

    def first(self, length: int) -> dict[int, tuple[str, str]]:
        """Return code and text, at most `length` characters, by record."""
        return {record: (code, text[:length]) for record, (_, code, text) in self._found.items()}


@dataclass
class Reading:
    """The values of a batch as columns.

    `columns` has an array for each column, of its type, with a value for each record: null where
    the record has none, or none that is readable. `unknown`: the names of a record's fields without
    a column, by index. `rescued`: these fields as a JSON object. `shown` returns the text of a
    column's value, for messages.
    """

    columns: dict[str, pa.Array]
    errors: Errors
    shown: Callable[[str, int], str]
    unknown: dict[int, list[str]] = field(default_factory=dict)
    rescued: dict[int, str] = field(default_factory=dict)


def found(expected: str, text: str | None) -> str:
    """Return `expected …, found …`, with the text shortened."""
    return f"expected {expected}, found {'null' if text is None else text[:FOUND_LENGTH]}"
