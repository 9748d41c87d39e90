"""`dataclasses.replace` for the model's values, which an exploration replaces hundreds of thousands
of times."""

import dataclasses
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    """The fields of a dataclass whose instances may be made from their fields alone; none of any
    other."""
    fields = dataclasses.fields(kind)
    plain = (
        not hasattr(kind, "__post_init__")
        and not hasattr(kind, "__slots__")
        and all(f.init for f in fields)
    )
    return tuple(f.name for f in fields) if plain else ()


def replace(value: T, **changes: Any) -> T:
    """The same as `dataclasses.replace`, in a third of its time."""
    names = _names(type(value))
    if not changes.keys() <= set(names):
        return dataclasses.replace(value, **changes)  # type: ignore[type-var]
    own = value.__dict__
    new = object.__new__(type(value))
    # Not what `cached_property` keeps there.
    fields = own if len(own) == len(names) else {name: own[name] for name in names}
    object.__setattr__(new, "__dict__", fields | changes)
    return new
