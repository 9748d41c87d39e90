"""Read the configuration's files into frozen models. Every mistake is a ConfigurationError that names file and key."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from anabranch.common.errors import ConfigurationError
from anabranch.common.redaction import remember
from anabranch.config import strict_yaml
from anabranch.config.base import NAME
from anabranch.config.columns import RESCUED, parse_columns
from anabranch.config.environment import Environment
from anabranch.config.mistakes import REFERENCE, explain_mistakes, explain_yaml
from anabranch.config.secrets import secrets_of
from anabranch.config.stream import Stream

LOG = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)

UNREADABLE = "(unreadable)"
"""The group of a stream whose file cannot be read: no group has this name."""


def resolve_folder(folder: str | Path | None = None) -> Path:
    """The configuration folder: the argument, else `ANABRANCH_CONF`, else `conf`."""
    return Path(folder or os.environ.get("ANABRANCH_CONF") or "conf")


def load_environment(folder: str | Path | None = None) -> Environment:
    """Read `anabranch.yaml` of the configuration folder. Raises ConfigurationError."""
    path = resolve_folder(folder) / "anabranch.yaml"
    data, raw = _read(path)
    if "bounded" in data:
        del data["bounded"]
        _warn_of_bounded(path)
    environment = _validated(path, Environment, data, raw)
    remember(secrets_of(environment))
    return environment


@cache
def _warn_of_bounded(path: Path) -> None:
    LOG.warning(
        "%s: bounded: ignored: Anabranch no longer deletes files of other programs; rotate logs with logrotate or "
        "systemd-tmpfiles, set lifecycle rules on S3 prefixes, and remove the key",
        path,
    )


def stream_names(folder: str | Path | None = None) -> tuple[str, ...]:
    """The streams that the configuration folder holds, sorted."""
    paths = (resolve_folder(folder) / "streams").glob("*.yaml")
    return tuple(sorted(p.stem for p in paths if not p.stem.endswith(".expectations")))


def stream_file_stamp(name: str, folder: str | Path | None = None) -> tuple[int, int] | None:
    """What changes with the stream's file: when it was written, and its size; None where there is none."""
    try:
        found = (resolve_folder(folder) / "streams" / f"{name}.yaml").stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size


def require_different_tables(folder: str | Path | None = None) -> None:
    """That no two files of the configuration folder name one table. What else is wrong with a file is not looked at:
    loading it raises. Raises ConfigurationError."""
    for error in shared_tables(folder).values():
        raise error


def shared_tables(folder: str | Path | None = None) -> dict[str, ConfigurationError]:
    """By stream: an error for each file whose table the file of a stream before it names too. Files that cannot be read
    are left out."""
    streams = resolve_folder(folder) / "streams"
    files: dict[str, Path] = {}
    shared = {}
    for name in stream_names(folder):
        path = streams / f"{name}.yaml"
        try:
            table = _read(path)[0].get("table")
        except ConfigurationError:
            continue
        if isinstance(table, str) and (other := files.setdefault(table.casefold(), path)) != path:
            shared[name] = ConfigurationError(
                f"{path}: table: expected a table of its own, found {table}, which {other} names too: a table belongs "
                "to one stream; give one of them another name, or delete the file that was renamed"
            )
    return shared


def group_in_file(name: str, folder: str | Path | None = None) -> str | None:
    """The group that a stream's file names, whatever else is wrong with the file; UNREADABLE where
    the file cannot be read."""
    path = resolve_folder(folder) / "streams" / f"{name}.yaml"
    try:
        group = _substitute(path, "group", _parse(path).get("group"))
    except ConfigurationError:
        return UNREADABLE
    return group if isinstance(group, str) else None


def load_stream(name: str, folder: str | Path | None = None) -> Stream:
    """Read `streams/<name>.yaml` of the configuration folder. Raises ConfigurationError."""
    folder = resolve_folder(folder)
    if not NAME.fullmatch(name):
        raise ConfigurationError(f"stream: expected a name of letters, digits and underscores, found {name!r}")
    path = folder / "streams" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(stream_names(folder)) or "none"
        raise ConfigurationError(f"stream {name!r}: expected the file {path}, found none (known streams: {known})")
    data, raw = _read(path)
    try:
        # Without a schema its key may be misspelt, which is said with all other mistakes.
        columns = parse_columns(data["schema"]) if "schema" in data else ()
        if data.get("unknown") == "rescue":
            if taken := [c.name for c in columns if c.name.lower() == RESCUED.name]:
                raise ValueError(f"expected names other than {RESCUED.name} with unknown: rescue, found {taken[0]}")
            columns = (*columns, RESCUED)
    except ValueError as error:
        raise ConfigurationError(f"{path}: schema: {error}") from None
    data = data | {"name": name, "columns": columns}
    if isinstance(data.get("expectations"), str):
        data["expectations"] = path.parent / data["expectations"]
        if not data["expectations"].is_file():
            raise ConfigurationError(f"{path}: expectations: expected the file {data['expectations']}, found none")
    stream = _validated(path, Stream, data, raw)
    remember(secrets_of(stream))
    if stream.format.needs_registry and load_environment(folder).registry is None:
        raise ConfigurationError(
            f"{folder / 'anabranch.yaml'}: registry: expected the url of a schema registry, which format "
            f"{stream.format.type} of stream {name} needs, found none"
        )
    return stream


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A file with its variables replaced, and as it is written."""
    data = _parse(path)
    return _substitute(path, "", data), data


def _parse(path: Path) -> dict[str, Any]:
    """A file as it is written."""
    try:
        data = strict_yaml.load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(
            f"{path}: expected a configuration file, found none (choose the folder with --conf)"
        ) from None
    except yaml.YAMLError as error:
        # Neither its text nor the error itself goes on: both have lines of the file.
        raise ConfigurationError(f"{path}: expected readable YAML, found: {explain_yaml(error)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: expected readable YAML, found: {error}") from error
    if not isinstance(data, dict):
        raise ConfigurationError(f"{path}: expected a mapping of keys, found {type(data).__name__}")
    return data


def _substitute(path: Path, key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _substitute(path, f"{key}.{k}".lstrip("."), v) for k, v in value.items()}
    if isinstance(value, list):
        return [_substitute(path, f"{key}[{i}]", v) for i, v in enumerate(value)]
    if not isinstance(value, str):
        return value

    def lookup(match: re.Match[str]) -> str:
        name, default = match.groups()
        replacement = os.environ.get(name, default)
        if replacement is None:
            raise ConfigurationError(f"{path}: {key}: expected the environment variable {name}, found it unset")
        return replacement

    return REFERENCE.sub(lookup, value)


def _validated(path: Path, model: type[M], data: dict[str, Any], raw: Mapping[str, Any]) -> M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        mistakes = "\n".join(f"{path}: {line}" for line in explain_mistakes(model, raw, error))
        raise ConfigurationError(mistakes) from None
