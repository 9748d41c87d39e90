"""Dataclasses from their JSON values."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


def from_json(kind: type[T], value: Any) -> T:
    """A dataclass, with those in it, from its JSON value; keys of later versions are left out.
    Raises ValueError for a value that it cannot be of."""
    made: T = _adapter(kind).validate_python(value)  # type: ignore[arg-type]
    return made


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
