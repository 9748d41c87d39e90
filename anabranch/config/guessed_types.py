"""Guess the column type for values of a JSON field, as in a stream's file. Independent of Spark.

Guesses are wide rather than narrow: a value that does not fit makes its record a dead letter.
"""

from __future__ import annotations

import re

_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_DEEPEST = 5


def guess(value: object, depth: int = 0) -> str | None:
    """Return the type of one value, None for null. Objects and deep lists are STRING. Pure."""
    match value:
        case None:
            return None
        case bool():
            return "BOOLEAN"
        case int():
            return "BIGINT" if -(2**63) <= value < 2**63 else "STRING"
        case float():
            return "DOUBLE"
        case str():
            return "TIMESTAMP" if _TIMESTAMP.fullmatch(value) else "STRING"
        case list() if depth < _DEEPEST and value:
            kind: str | None = None
            for item in value[:100]:
                kind = combine(kind, guess(item, depth + 1))
            return f"ARRAY<{kind or 'STRING'}>"
    return "STRING"


def combine(one: str | None, other: str | None) -> str | None:
    """Return a type for values of both types; None is the type of null. Pure."""
    if one is None or other is None or one == other:
        return one or other
    return "DOUBLE" if {one, other} == {"BIGINT", "DOUBLE"} else "STRING"
