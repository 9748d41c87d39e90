"""Safety of an analyzed Spark expression: whether some value of a record makes it fail, exhaust
memory or read beyond its buffer.

`anabranch.config.select` checks functions by name before; this module checks what depends on types
and on conversions that Spark inserts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_OVERFLOWS = frozenset({"DateAdd", "DateSub", "TruncDate", "AddMonths"})
_ROUNDS = frozenset({"Round", "BRound", "RoundCeil", "RoundFloor"})
_NESTED_ACCESS = frozenset(
    {"GetStructField", "GetArrayItem", "GetMapValue", "ElementAt", "GetArrayStructFields"}
)
_MOST_DIGITS = re.compile(r"-?\d{1,2}")


def unsafe(expression: Any) -> str | None:
    """Return what is expected instead if the Catalyst expression is not safe; else None."""
    return next(
        (found for node, parent in _nodes(expression) if (found := _refusal(node, parent))), None
    )


def _nodes(node: Any, parent: str = "") -> Iterator[tuple[Any, str]]:
    yield node, parent
    name, children = _class(node), node.children()
    for i in range(children.size()):
        yield from _nodes(children.apply(i), name)


def _refusal(node: Any, parent: str) -> str | None:
    name, kind = _class(node), _type(node)
    if name == "Cast":
        return _refused_cast(_type(node.child()), kind, parent)
    if name in _OVERFLOWS or "interval" in kind:
        return "no arithmetic of dates, which can overflow"
    if name in _NESTED_ACCESS and kind in ("date", "timestamp"):
        return "a date or time that is a field of the record, not part of another field"
    if name in _ROUNDS and not _MOST_DIGITS.fullmatch(node.children().apply(1).toString()):
        return "a number of 1 or 2 digits to round to"
    if name == "ConcatWs" and not node.children().apply(0).foldable():
        return "a text in quotes as separator, because the result may be very long"
    if name == "ArrayJoin" and not all(
        node.children().apply(i).foldable() for i in range(1, node.children().size())
    ):
        return "a text in quotes as separator, because the result may be very long"
    return None


def _refused_cast(source: str, target: str, parent: str) -> str | None:
    # Spark adds the current date to a text without one.
    if target == "timestamp" and source != "void":
        return (
            "no conversion of a text or date to TIMESTAMP (compare dates: CAST(at AS DATE) >= "
            "DATE '2026-11-01')"
        )
    # Spark takes minutes for a text with a large exponent.
    if target.startswith("decimal") and source.startswith("string"):
        return "no conversion of a text to DECIMAL (use CAST(CAST(... AS DOUBLE) AS DECIMAL(p,s)))"
    if (
        target.startswith("string")
        and source == "binary"
        and parent not in ("TryValidateUTF8", "StaticInvoke", "Cast")
    ):
        return "bytes converted to text by CAST(... AS STRING)"
    return None


def _class(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _type(node: Any) -> str:
    return str(node.dataType().simpleString())
