"""The tables of docs/reference/configuration.md, from the models of `anabranch.config`."""

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ByteSize, SecretStr
from pydantic.fields import FieldInfo

from anabranch.config import Environment, FamilyKeys, Stream
from anabranch.config.mistakes import models_of
from anabranch.config.schema import ColumnSettings
from anabranch.config.sections import FormatSettings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "configuration.md"
FILES: dict[str, type[BaseModel]] = {
    "environment": Environment, "stream": Stream, "family": FamilyKeys, "column": ColumnSettings,
}  # fmt: skip
# What a file has where the model has another type.
_WRITTEN = {
    "schema": "text, or mapping", "schema.columns": "text, or mapping", "from": "text, or list",
    "quality.max_dead": "share", "quality.max_conflicts": "share", "views": "mapping",
    "views.NAME.aggregates": "mapping",
}  # fmt: skip
_PREFIXES = {"subject_schema": "schema", "views": "views.NAME"}
_TYPES: dict[Any, str] = {
    str: "text", int: "whole number", float: "number", bool: "`true`, `false`",
    timedelta: "duration", ByteSize: "size", Path: "file", SecretStr: "secret", dict: "mapping",
    tuple: "list",
}  # fmt: skip
_LIMITS = {"gt": "more than {:,}", "ge": "{:,} or more", "le": "{:,} at most"}
_UNITS = {"day": 86_400, "hour": 3_600, "minute": 60, "second": 1}


def page() -> str:
    """Return the page with the tables of the present models."""
    tables = re.compile(r"(<!-- keys: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    text = PAGE.read_text("utf-8")
    return tables.sub(lambda of: f"{of[1]}\n{_table(FILES[of[2]])}\n{of[3]}", text)


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield each key of a file and its field; one without description is a section or no key."""
    for name, info in model.model_fields.items():
        key = f"{prefix}{info.alias or name}"
        if info.description is not None:
            yield key, info
        for inner in models_of(info):
            yield from keys(inner, f"{_PREFIXES.get(name, key)}.")


def _table(model: type[BaseModel]) -> str:
    lines = ["| key | meaning | values | default |", "|---|---|---|---|"]
    for key, info in keys(model):
        examples = "".join(f" Example: `{example}`" for example in info.examples or ())
        meaning = f"{info.description}{examples}".replace("|", "\\|")
        values = _WRITTEN.get(key) or _values(info)
        lines.append(f"| `{key}` | {meaning} | {values} | {_default(info)} |")
    return "\n".join(lines) + "\n"


def _values(info: FieldInfo) -> str:
    parts = list(_parts(info.annotation))
    if choices := [c for part in parts if get_origin(part) is Literal for c in get_args(part)]:
        return ", ".join(f"`{choice}`" for choice in choices)
    kind = next((_TYPES[part] for part in parts if part in _TYPES), "mapping")
    if kind == "mapping" and SecretStr in parts:
        kind = "mapping of secrets"
    limits = [(words, getattr(of, n, None)) for of in info.metadata for n, words in _LIMITS.items()]
    return ", ".join([kind, *(words.format(n) for words, n in limits if n is not None)])


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield a type, and those that it is made of."""
    origin = get_origin(annotation)
    yield annotation if origin in (None, Literal) else origin
    if annotation is FormatSettings:
        yield from _parts(FormatSettings.model_fields["type"].annotation)
    for part in get_args(annotation) if origin is not Literal else ():
        yield from _parts(part)


def _default(info: FieldInfo) -> str:
    value = info.default
    if info.is_required():
        return "**required**"
    if value is None or value in ("", (), {}):
        return "none"
    if isinstance(value, timedelta):
        seconds = int(value.total_seconds())
        unit, size = next((u, s) for u, s in _UNITS.items() if seconds % s == 0)
        value = f"{seconds // size} {unit}{'s' if seconds != size else ''}"
    elif isinstance(value, float):
        value = f"{value:.0%}"
    elif isinstance(value, ByteSize):
        value = f"{value // 1_000_000} MB"
    elif isinstance(value, tuple):
        value = f"[{', '.join(value)}]"
    elif isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, BaseModel):
        value = getattr(value, "type", "none")
    return f"`{value}`"
