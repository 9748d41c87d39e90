"""The result of reading a batch of values, with the errors of its records, and what readers share
whose values have a schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from anabranch.decode.values import Unreadable

if TYPE_CHECKING:
    from anabranch.config.columns import Column

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

    def take(self, others: Errors, places: Sequence[int], but: str = "") -> None:
        """Add the errors of another reader, whose columns have these places, except a code."""
        for record, (column, code, text) in others._found.items():
            if code != but:
                self.add(record, column if column == self.WHOLE else places[column], code, text)

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


def columns_of(columns: Iterable[Column]) -> tuple[tuple[str, str, bool], ...]:
    return tuple((column.name, column.type, not column.nullable) for column in columns)


def verdict(name: str, kind: str, error: Unreadable) -> tuple[str, str]:
    """Return code and text of a value that cannot be read as the column. `kind`: its type, in
    words."""
    if error.expected == "UTF-8":
        return "invalid_utf8", f"{name}{error.path}: {found('UTF-8', error.found)}"
    expected = error.expected if error.path else kind
    is_time = error.expected.startswith(("timestamp", "date"))
    code = "unreadable_timestamp" if is_time else "wrong_type"
    return code, f"{name}{error.path}: {found(expected, error.found)}"


def within(step: str, convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return None if value is None else convert(value)
    except Unreadable as error:
        raise error.inside(step) from None


def spread(parts: list[tuple[np.ndarray, pa.Array]], kind: pa.DataType, length: int) -> pa.Array:
    """Return a column of `length` records with each part's values at its places, else null."""
    if len(parts) == 1 and len(parts[0][0]) == length:
        return parts[0][1]
    chosen = np.full(length, -1)
    start = 0
    for places, _ in parts:
        chosen[places] = np.arange(start, start + len(places))
        start += len(places)
    read = pa.concat_arrays([pa.array([], kind), *(part for _, part in parts)])
    return read.take(pa.array(chosen, mask=chosen < 0))
