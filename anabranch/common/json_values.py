"""Dataclasses from their JSON values."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter

T = TypeVar("T")


def from_json(kind: type[T], value: Any) -> T:
    """Build a dataclass, with nested ones, from its JSON value, without keys of later versions.
    Raises ValueError for an invalid value."""
    made: T = _adapter(kind).validate_python(value)  # type: ignore[arg-type]
    return made


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
