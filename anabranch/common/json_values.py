"""Dataclasses from and to their JSON values, and JSON texts that a table stores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from anabranch.common.errors import Terminal

if TYPE_CHECKING:
    from pydantic import TypeAdapter

T = TypeVar("T")


def from_json(kind: type[T], value: Any) -> T:
    """Build a dataclass, with nested ones, from JSON. Raises ValueError for an invalid value."""
    made: T = _adapter(kind).validate_python(value)  # type: ignore[arg-type]
    return made


def parse(kind: type[T], text: str | bytes) -> T:
    """Parse JSON as `kind`, with nested dataclasses, without unknown keys. Raises ValueError for
    any other text, whatever its types, numbers and depth."""
    made: T = _adapter(kind).validate_json(text)  # type: ignore[arg-type]
    return made


def dump(value: Any, kind: Any = None) -> str:
    """Return a dataclass, with nested ones, or a value of another `kind`, as the JSON text that
    `parse` reads: without fields that have their default."""
    made: bytes = _adapter(kind or type(value)).dump_json(  # type: ignore[arg-type]
        value, exclude_defaults=True, warnings=False
    )
    return made.decode()


def read_property(
    properties: Mapping[str, str], key: str, read: Callable[[str], T], default: str = "{}"
) -> T:
    """Return `read` of a table's property. Raises Terminal as `read_stored`."""
    return read_stored(f"property {key}", properties.get(key, default), read)


def read_stored(what: str, text: str, read: Callable[[str], T]) -> T:
    """Return `read` of a text that Anabranch wrote. Raises Terminal, which names it as `what`, for
    every other text: another program has changed it."""
    try:
        return read(text)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise Terminal(
            f"{what}: expected the text that Anabranch wrote, found {text[:100]!r} "
            f"({type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}); "
            'restore it from an earlier metadata file: docs/runbooks.md, "The state of a branch '
            'is gone"'
        ) from error
    except RecursionError as error:
        raise Terminal(
            f"{what}: expected the text that Anabranch wrote, found one of many levels; restore it "
            'from an earlier metadata file: docs/runbooks.md, "The state of a branch is gone"'
        ) from error


def to_json(value: Any) -> Any:
    """Return a dataclass, with nested ones, as JSON: without None, times as ISO 8601 text."""
    match value:
        case datetime():
            return value.isoformat()
        case Mapping():
            return {str(key): to_json(item) for key, item in value.items()}
        case list() | tuple():
            return [to_json(item) for item in value]
    if is_dataclass(value):
        values = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {name: to_json(item) for name, item in values if item is not None}
    return value


class JsonFields:
    """The base of a dataclass whose output is its JSON value."""

    __slots__ = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that have a value, as JSON values."""
        fields_of_self: dict[str, Any] = to_json(self)
        return fields_of_self


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    # Spark's Python workers import this module, and pydantic takes long to import.
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
