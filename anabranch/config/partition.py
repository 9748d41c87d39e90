"""`partition:` of a stream's file, as in `PARTITIONED BY` of Spark."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FIELD = re.compile(
    r"(?:(bucket|truncate) *\( *([1-9]\d{0,5}) *, *)?([A-Za-z_]\w*)( *\))?", re.ASCII
)
_COMMA = re.compile(r",(?![^(]*\))")

# Types whose partition values are equal in Spark, PyIceberg and PyArrow, also after a type widens.
TYPES = {
    "identity": ("string", "int", "bigint", "date", "boolean"),
    "bucket": ("string", "int", "bigint", "date", "timestamp"),
    # The transform of an integer overflows near the smallest one, and readers would miss the row.
    "truncate": ("string",),
}


@dataclass(frozen=True)
class PartitionField:
    """A partition field: a transform of a column, with its number of buckets or its width."""

    column: str
    transform: str = "identity"
    number: int = 0

    def __str__(self) -> str:
        if not self.number:
            return self.column
        return f"{self.transform}({self.number}, {self.column})"

    @property
    def name(self) -> str:
        """The field's name in the table, as `ADD PARTITION FIELD` would give it."""
        words = {"bucket": "bucket", "truncate": "trunc"}
        if self.number:
            return "_".join((self.column, words[self.transform], str(self.number)))
        return self.column


def parse_field(text: str) -> PartitionField:
    """Raises ValueError."""
    found = _FIELD.fullmatch(text.strip())
    if found is None or bool(found[1]) != bool(found[4]):
        raise ValueError(
            f"expected a column, bucket(NUMBER, column) or truncate(WIDTH, column), found {text!r}"
        )
    return PartitionField(found[3], found[1] or "identity", int(found[2] or 0))


def parse_partition(value: object) -> object:
    """Parse a text or list to partition fields, each once."""
    if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
        # YAML ends an entry of a list at each comma, also inside of parentheses.
        value = ",".join(value)
    if not isinstance(value, str):
        return value
    fields = tuple(str(parse_field(text)) for text in _COMMA.split(value))
    if len(set(fields)) < len(fields):
        raise ValueError("expected each partition field once")
    return fields
