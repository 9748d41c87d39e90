"""The fields of a subject's schema as columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import TypeVar

T = TypeVar("T")

NOTHING: Mapping[str, str | None] = MappingProxyType({})


class NotAColumn(Exception):
    """A field of a subject's schema that has no column type; the message begins with the field's
    path."""

    def __init__(self, path: str, expected: str, found: str) -> None:
        where = f"{path}: " if path else ""
        super().__init__(f"{where}expected {expected}, found {found}")


class NotReadable(NotAColumn):
    """A schema whose records cannot be read, whichever fields become columns."""


def fields_of(
    fields: Mapping[str, T], given: Mapping[str, str | None], read: Callable[[T, str], str]
) -> list[tuple[str, str]]:
    """Return the name and type of each field. `given` has types by name that replace those of the
    schema; None leaves a field out. Raises NotAColumn."""
    kept = ((str(name), field) for name, field in fields.items() if given.get(name, "") is not None)
    return [(name, given.get(name) or read(field, name)) for name, field in kept]


def struct_type(path: str, fields: Collection[tuple[str, str]]) -> str:
    """Return the type of a nested record. Raises NotAColumn for one without fields."""
    if not fields:
        raise NotAColumn(path, "a record with fields", "one without any")
    require_names(path, [name for name, _ in fields])
    return f"struct<{','.join(f'{name}:{kind}' for name, kind in fields)}>"


def require_names(path: str, names: Collection[str]) -> None:
    """Raise NotAColumn for a name that no column can have, and for two names that differ only by
    case."""
    seen: dict[str, str] = {}
    for name in names:
        at = f"{path}.{name}" if path else name
        if not name.isascii() or not name.isidentifier():
            raise NotAColumn(
                at, "a name of letters, digits and underscores, no digit first", repr(name)
            )
        if (other := seen.setdefault(name.lower(), name)) != name:
            raise NotAColumn(at, "names that differ by more than case", f"{other} and {name}")
