"""Files of the configuration as plain values: their names, YAML, variables, defaults, durations.

Imports the standard library and PyYAML only. `dags/anabranch_conf.py` is this file, because the
Python environment of Airflow needs no `anabranch`: both read a file by the same rules.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import yaml

try:
    # libyaml parses a file ten times as fast as the parser in Python.
    from yaml import CSafeLoader as SafeLoader
except ImportError:
    from yaml import SafeLoader  # type: ignore[assignment]

DEFAULTS = "defaults.yaml"
"""The file of the configuration folder with default values for all streams' files."""

PER_STREAM_KEYS = ("topic", "topics", "table", "name")
"""Keys that streams cannot share."""

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
"""`${NAME}` or `${NAME:-default}`."""

UNREADABLE = "(unreadable)"
"""The group of a stream whose file cannot be read; no valid group has this name."""

OWNER, GRACE = "anabranch", timedelta(minutes=2)
"""Defaults of `airflow.owner` and `batch.grace`."""

T = TypeVar("T")

_TOPICS = re.compile(r"^[\"']?topics[\"']?\s*:", re.MULTILINE)
HOUR = "%Y-%m-%dT%H"
_HOUR = re.compile(r"\d{4}-\d\d-\d\dT\d\d")
_DEEPEST, _MOST_VALUES = 50, 100_000
# Longer durations lead to times outside the calendar.
_MOST_YEARS = 1000
_DURATION = re.compile(r"\s*(\d+)\s*(second|minute|hour|day|week|year)s?\s*")
_SECONDS = {
    "second": 1,
    "minute": 60,
    "hour": 3_600,
    "day": 86_400,
    "week": 7 * 86_400,
    "year": 365 * 86_400,
}
# Quoted text of the file in messages of YAML's parser, not single characters that it expected.
_QUOTED = re.compile(r"'(?!<)[^']{2,}'|\"[^\"]*\"")


class Mistake(ValueError):
    """A mistake in a file. The message names the file, the key, what was expected and found."""


class RepeatedKey(yaml.constructor.ConstructorError):
    """A repeated key, which the message names."""


class _Loader(SafeLoader):
    """Refuses repeated keys; YAML alone would silently keep the last value."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):
            # PyYAML raises Python's own errors for a scalar such as the date 2026-11-31.
            kind = node.tag.rpartition(":")[2]
            raise yaml.constructor.ConstructorError(
                None, None, f"no valid {kind}", node.start_mark
            ) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        known = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in known:
                    raise RepeatedKey(None, None, f"the key {key.value!r} twice", key.start_mark)
                known.add(key.value)
        return super().construct_mapping(node, deep)


def resolve_folder(folder: str | Path | None = None) -> Path:
    """Return the configuration folder: the argument, else `ANABRANCH_CONF`, else `conf`."""
    return Path(folder or os.environ.get("ANABRANCH_CONF") or "conf")


def names(folder: Path) -> list[tuple[str, bool]]:
    """Return the name of each file under `streams/`, sorted, and whether it is a family's:
    `topics` in place of `topic`."""
    paths = sorted((folder / "streams").glob("*.yaml"))
    return [(p.stem, is_family(p)) for p in paths if not p.stem.endswith(".expectations")]


def is_family(path: Path) -> bool:
    """Search the text only: parsing hundreds of files takes seconds."""
    try:
        return _TOPICS.search(path.read_text(encoding="utf-8")) is not None
    except (OSError, UnicodeDecodeError):
        return False  # Reading the file reports the error.


_YAML = "readable YAML"


def read(path: Path, expected: str = _YAML) -> dict[str, Any]:
    """Read a file of keys as written; `expected` is for messages. Raises Mistake."""
    try:
        data = _load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        # The error and its text contain lines of the file, which may be secret: neither is passed
        # on.
        raise Mistake(f"{path}: expected {expected}, found: {_explain(error)}") from None
    except FileNotFoundError:
        raise Mistake(
            f"{path}: expected {'a configuration file' if expected == _YAML else expected}, found "
            "none (choose the folder with --conf)"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise Mistake(f"{path}: expected {expected}, found: {error}") from error
    if not isinstance(data, dict):
        found = "nothing" if data is None else type(data).__name__
        raise Mistake(f"{path}: expected a mapping of keys, found {found}")
    return data


def _load(text: str) -> Any:
    # Before libyaml builds the values: it ends the process where they are nested too deeply.
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise yaml.MarkedYAMLError(
                problem=f"more than {_DEEPEST} levels of values",
                problem_mark=event.start_mark,  # type: ignore[arg-type]
            )
    data = yaml.load(text, _Loader)
    if _size(data, {}) > _MOST_VALUES:
        raise yaml.MarkedYAMLError(problem=f"aliases for more than {_MOST_VALUES:,} values")
    return data


def _size(value: Any, known: dict[int, float]) -> float:
    """Return the number of values in a value, those of each alias counted again."""
    if not isinstance(value, dict | list):
        return 1
    if (key := id(value)) not in known:
        known[key] = inf  # an alias within its own value
        parts = value.values() if isinstance(value, dict) else value
        known[key] = 1 + sum(_size(part, known) for part in parts)
    return known[key]


def _explain(error: yaml.YAMLError) -> str:
    """Return the place and reason of a YAML error, without text of the file. Pure."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    why = (
        " ".join(filter(None, (getattr(error, "context", None), getattr(error, "problem", None))))
        or "no YAML"
    )
    why = why if isinstance(error, RepeatedKey) else _QUOTED.sub("…", why)
    return f"line {mark.line + 1}, column {mark.column + 1}: {why}" if mark is not None else why


def substitute(path: Path, value: Any, key: str = "") -> Any:
    """Replace variables in the texts of a value from the process environment; `path` and `key` name
    it in messages. Raises Mistake for an unset variable without a default."""
    if isinstance(value, dict):
        return {k: substitute(path, v, f"{key}.{k}".lstrip(".")) for k, v in value.items()}
    if isinstance(value, list):
        return [substitute(path, v, f"{key}[{i}]") for i, v in enumerate(value)]
    if not isinstance(value, str):
        return value

    def lookup(match: re.Match[str]) -> str:
        name, default = match.groups()
        replacement = os.environ.get(name, default)
        if replacement is None:
            raise Mistake(
                f"{path}: {key}: expected the environment variable {name}, found it unset"
            )
        return replacement

    return REFERENCE.sub(lookup, value)


def merge(defaults: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Merge mappings key by key; any other value of `own` replaces the default. Pure."""
    merged = dict(defaults)
    for key, value in own.items():
        default = merged.get(key)
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            value = merge(default, value)
        merged[key] = value
    return merged


@dataclass(frozen=True)
class StreamFile:
    """A stream's file and the defaults: `values` is both merged, with variables replaced; `own` and
    `defaults` are as written."""

    path: Path
    own: Mapping[str, Any]
    defaults_path: Path
    defaults: Mapping[str, Any]
    values: Mapping[str, Any]

    def source(self, key: Sequence[Any]) -> Path:
        """Return the file that a key comes from; the stream's own file if neither has it."""
        return (
            self.defaults_path if _depth(self.defaults, key) > _depth(self.own, key) else self.path
        )

    def value(self, key: Sequence[str | int], parse: Callable[[Any], T], default: T) -> T:
        """Return a value of the file as `parse` reads it; `default` for a missing one or null. A
        number in `key` is a place in a list. Raises Mistake where `parse` raises ValueError."""
        found: Any = self.values
        for depth, part in enumerate(key):
            if isinstance(part, str) and not isinstance(found, dict):
                raise self._mistake(
                    key[:depth], f"expected a mapping of keys, found {type(found).__name__}"
                )
            found = found.get(part) if isinstance(part, str) else found[part]
            if found is None:
                return default
        try:
            return parse(found)
        except ValueError as error:
            shown = "" if ", found " in str(error) else f", found {found!r}"
            raise self._mistake(key, f"{error}{shown}") from None

    def _mistake(self, key: Sequence[str | int], message: str) -> Mistake:
        where = "".join(f".{part}" if isinstance(part, str) else f"[{part}]" for part in key)
        return Mistake(f"{self.source(key)}: {where.lstrip('.')}: {message}")


def read_stream_file(
    folder: Path, name: str, only: Container[str] | None = None, text: str | None = None
) -> StreamFile:
    """Read a stream's file, or `text` as one, and the defaults if that file exists; with `only`,
    the variables and values of these keys alone. Raises Mistake."""
    path, defaults_path = folder / "streams" / f"{name}.yaml", folder / DEFAULTS
    defaults = read(defaults_path) if defaults_path.is_file() else {}
    if taken := [key for key in PER_STREAM_KEYS if key in defaults]:
        raise Mistake(
            f"{defaults_path}: {taken[0]}: expected keys that streams share, found one that each "
            "stream has for itself; move it to the stream's file"
        )
    own = read(path) if text is None else _load(text)
    default_values, own_values = (
        substitute(of, {k: v for k, v in written.items() if only is None or k in only})
        for of, written in ((defaults_path, defaults), (path, own))
    )
    return StreamFile(path, own, defaults_path, defaults, merge(default_values, own_values))


def _depth(values: Any, key: Sequence[Any]) -> int:
    """Return how many leading parts of a key a file has."""
    for depth, part in enumerate(key):
        if not isinstance(values, Mapping) or part not in values:
            return depth
        values = values[part]
    return len(key)


def group_in_file(name: str, folder: str | Path | None = None) -> str | None:
    """Return the group in a stream's file, whatever else is wrong with the file; UNREADABLE if the
    file cannot be read."""
    folder = resolve_folder(folder)
    try:
        for path in (folder / "streams" / f"{name}.yaml", folder / DEFAULTS):
            if path.is_file() and "group" in (written := read(path)):
                group = substitute(path, written["group"], "group")
                return group if isinstance(group, str) else None
    except Mistake:
        return UNREADABLE
    return None


def parse_duration(value: object) -> timedelta:
    """Parse a duration such as `"2 seconds"` or `"30 days"`; a year has 365 days. Raises ValueError
    for anything else, and for more than 1,000 years."""
    if isinstance(value, timedelta):
        return value
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a duration such as '2 seconds', '5 minutes' or '30 days'")
    seconds = int(match[1]) * _SECONDS[match[2]]
    if seconds > _MOST_YEARS * _SECONDS["year"]:
        raise ValueError(f"expected {_MOST_YEARS} years at most, found {value}")
    return timedelta(seconds=seconds)


def parse_hour(value: object) -> str:
    """Return an hour such as `2026-11-21T03`. Raises ValueError for anything else."""
    with suppress(ValueError):
        if isinstance(value, str) and _HOUR.fullmatch(value) and datetime.strptime(value, HOUR):
            return value
    raise ValueError("expected an hour such as 2026-11-21T03")


def parse_name(value: object) -> str:
    """Return a name of letters, digits and underscores. Raises ValueError for anything else."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise ValueError("expected a name of letters, digits and underscores")
    return value


def parse_target(value: object) -> str:
    """Return the name of an egress target. Raises ValueError for anything else."""
    if not isinstance(value, str) or not NAME.fullmatch(value) or len(value) > 64:
        raise ValueError("expected a name of at most 64 letters, digits and underscores")
    return value
