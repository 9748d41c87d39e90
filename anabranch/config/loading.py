"""Read configuration files into immutable models. A mistake raises ConfigurationError, which names
file and key."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from anabranch.common.errors import ConfigurationError, remember
from anabranch.config import plain
from anabranch.config.columns import RESCUED, columns_ddl
from anabranch.config.environment import Environment
from anabranch.config.mistakes import INTERNAL_FIELDS, explain_mistakes, secrets_of
from anabranch.config.plain import DEFAULTS, NAME, StreamFile, merge, resolve_folder
from anabranch.config.schema import is_of_a_subject, parse_schema
from anabranch.config.select import parse_select
from anabranch.config.stream import Stream, SubjectSchema

LOG = logging.getLogger(__name__)

M = TypeVar("M", bound=BaseModel)

FROM_REGISTRY = "registry"
"""The value of `schema` for a stream whose columns come from a subject of the schema registry."""


def load_environment(folder: str | Path | None = None) -> Environment:
    """Read `anabranch.yaml` of the configuration folder. Raises ConfigurationError."""
    path = resolve_folder(folder) / "anabranch.yaml"
    with as_configuration_errors(path):
        raw = plain.read(path)
        data = plain.substitute(path, raw)
    environment = validated(lambda key: path, Environment, data, raw)
    remember(secrets_of(environment))
    return environment


def stream_names(folder: str | Path | None = None) -> tuple[str, ...]:
    """Return the sorted names of the streams that have a file of their own."""
    return tuple(n for n, is_family in plain.names(resolve_folder(folder)) if not is_family)


def family_names(folder: str | Path | None = None) -> tuple[str, ...]:
    """Return the sorted names of the families: files with `topics` in place of `topic`."""
    return tuple(n for n, is_family in plain.names(resolve_folder(folder)) if is_family)


def stream_file_stamp(name: str, folder: str | Path | None = None) -> tuple[int, ...] | None:
    """Return a value that changes with the stream's file or the defaults: modification times (ns)
    and sizes (bytes). None if the stream has no file."""
    folder = resolve_folder(folder)
    own = _stamp(folder / "streams" / f"{name}.yaml")
    return None if own is None else (*own, *(_stamp(folder / DEFAULTS) or ()))


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size


def shared_tables(
    streams: Iterable[Stream], folder: str | Path | None = None
) -> dict[str, ConfigurationError]:
    """Return an error by stream for each stream that has a table of an earlier one; tables include
    the ledger and the names of views."""
    owners: dict[str, str] = {}
    shared: dict[str, ConfigurationError] = {}
    files = resolve_folder(folder) / "streams"
    for stream in streams:
        views = [stream.view_table(view) for view in stream.views]
        for table in (stream.table, *stream.branched_tables, *stream.plain_tables, *views):
            if (other := owners.setdefault(table.casefold(), stream.name)) != stream.name:
                error = ConfigurationError(
                    f"{files / stream.name}.yaml: table: expected a table of its own, found "
                    f"{table}, which {files / other}.yaml names too: a table belongs to one "
                    "stream; give one of them another name, or delete the file that was renamed"
                )
                shared.setdefault(stream.name, error)
    return shared


def load_stream(name: str, folder: str | Path | None = None) -> Stream:
    """Read `streams/<name>.yaml` of the configuration folder. Raises ConfigurationError."""
    folder = resolve_folder(folder)
    if not NAME.fullmatch(name):
        raise ConfigurationError(
            f"stream: expected a name of letters, digits and underscores, found {name!r} "
            f"({_known_streams(folder)})"
        )
    path = folder / "streams" / f"{name}.yaml"
    if path.is_file() and plain.is_family(path):
        raise ConfigurationError(
            f"stream {name!r}: expected a stream, found that {path} is a family; name one of its "
            "streams, which `anabranch status --list` lists"
        )
    if not path.is_file():
        raise ConfigurationError(
            f"stream {name!r}: expected the file {path}, found none ({_known_streams(folder)})"
        )
    return parse_stream(name, folder)


def _known_streams(folder: Path) -> str:
    return f"known streams: {', '.join(stream_names(folder)) or 'none'}"


def parse_stream(name: str, folder: str | Path | None, text: str | None = None) -> Stream:
    """Read a stream's file, or `text` as its file. Raises ConfigurationError."""
    folder = resolve_folder(folder)
    with as_configuration_errors(folder / "streams" / f"{name}.yaml"):
        file = plain.read_stream_file(folder, name, text=text)
    stream = build_stream(file, {"name": name})
    require_services(stream, folder)
    return stream


def require_services(stream: Stream, folder: Path) -> None:
    """Raise ConfigurationError if the environment lacks a schema registry that the format needs, or
    the secret of hashed columns."""
    if not (stream.masks or stream.format.needs_registry):
        return
    environment = load_environment(folder)
    if stream.masks and environment.masking_secret is None:
        raise ConfigurationError(
            f"{folder / 'anabranch.yaml'}: masking.secret: expected the secret of the columns that "
            f"stream {stream.name} hashes (select), found none"
        )
    if stream.format.needs_registry and environment.registry is None:
        raise ConfigurationError(
            f"{folder / 'anabranch.yaml'}: registry: expected the url of a schema registry, which "
            f"format {stream.format.type} of stream {stream.name} needs, found none"
        )


@contextmanager
def as_configuration_errors(path: Path) -> Iterator[None]:
    """Raise ConfigurationError in place of any other error: whatever a file contains, it must not
    end a process that has other streams too."""
    try:
        yield
    except ConfigurationError:
        raise
    except plain.Mistake as mistake:
        raise ConfigurationError(str(mistake)) from None
    except Exception as error:
        # Without the error's text, which may have a secret of the file.
        LOG.debug("%s", path, exc_info=True)
        raise ConfigurationError(
            f"{path}: expected a valid file, found a value that cannot be read "
            f"({type(error).__name__})"
        ) from None


def build_stream(
    file: StreamFile, given: Mapping[str, Any], values: Mapping[str, Any] | None = None
) -> Stream:
    """Build the stream of a file, or of `values` instead of the file's; `given` adds values that no
    file has. Raises ConfigurationError."""
    with as_configuration_errors(file.path):
        return _build_stream(file, given, values)


def _build_stream(
    file: StreamFile, given: Mapping[str, Any], values: Mapping[str, Any] | None
) -> Stream:
    values = file.values if values is None else values
    if internal := sorted(INTERNAL_FIELDS & values.keys()):
        raise ConfigurationError(
            f"{file.source(internal[:1])}: {internal[0]}: expected no such key, found it; remove it"
        )
    data = {**values, **given}
    if data.get("schema") == FROM_REGISTRY or is_of_a_subject(data.get("schema")):
        return _build_without_columns(file, data)
    try:
        # Without a schema the key may be misspelt; validation reports it with all other mistakes.
        fields = columns = parse_schema(data["schema"]) if "schema" in data else ()
        if data.get("unknown") == "rescue":
            if taken := [c.name for c in fields if c.name.lower() == RESCUED.name]:
                raise ValueError(
                    f"expected names other than {RESCUED.name} with unknown: rescue, found "
                    f"{taken[0]}"
                )
            columns = (*fields, RESCUED)
    except ValueError as error:
        raise ConfigurationError(f"{file.source(['schema'])}: schema: {error}") from None
    if "select" in data:
        try:
            selected = parse_select(data["select"], fields)
        except ValueError as error:
            raise ConfigurationError(f"{file.source(['select'])}: select: {error}") from None
        data |= {"select": selected, "fields": fields}
        columns = (*(s.column for s in selected), *(c for c in columns if c.rescues))
    data["columns"] = columns
    if isinstance(data.get("schema"), Mapping):
        data["schema"] = columns_ddl(fields)
    return _validated_stream(file, data)


def _build_without_columns(file: StreamFile, data: dict[str, Any]) -> Stream:
    """Build the stream of a file with `schema: registry`; its columns are read from its table."""
    if "select" in data:
        raise ConfigurationError(
            f"{file.source(['select'])}: select: expected columns in schema, found registry; name "
            "the fields in schema"
        )
    declared = data["schema"] if isinstance(data["schema"], Mapping) else {}
    source, raw = file.source(["schema"]), merge(file.defaults, file.own)["schema"]
    try:
        schema = validated(
            lambda _: source, SubjectSchema, declared, raw if isinstance(raw, Mapping) else {}
        )
    except ConfigurationError as error:
        text = str(error).replace(f"{source}: ", f"{source}: schema.")
        raise ConfigurationError(text) from None
    return _validated_stream(
        file, {**data, "schema": FROM_REGISTRY, "subject_schema": schema, "columns": ()}
    )


def _validated_stream(file: StreamFile, data: dict[str, Any]) -> Stream:
    if isinstance(data.get("expectations"), str):
        path = _beside(file, ["expectations"], data["expectations"])
        data["expectations"] = path
    form = data.get("format")
    if isinstance(form, Mapping) and isinstance(form.get("descriptor"), str):
        path = _beside(file, ["format", "descriptor"], form["descriptor"])
        data["format"] = {**form, "descriptor": path}
    stream = validated(file.source, Stream, data, merge(file.defaults, file.own))
    remember(secrets_of(stream))
    return stream


def _beside(file: StreamFile, key: Sequence[str], name: str) -> Path:
    """Return the path of a file that a key names, in the folder of the file with the key. Raises
    ConfigurationError if there is none."""
    source = file.source(list(key))
    path = source.parent / name
    if not path.is_file():
        raise ConfigurationError(f"{source}: {'.'.join(key)}: expected the file {path}, found none")
    return path


def load_mapping(path: Path, expected: str) -> dict[str, Any]:
    """Read a file of keys, `expected` in messages. Raises ConfigurationError."""
    with as_configuration_errors(path):
        return plain.read(path, expected)


def validated(
    source: Callable[[Sequence[Any]], Path],
    model: type[M],
    data: Mapping[str, Any],
    raw: Mapping[str, Any],
) -> M:
    """Validate `data` as a model. Raises ConfigurationError with all mistakes; `source` returns the
    file that has a key."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        mistakes = "\n".join(
            f"{source(key)}: {line}" for key, line in explain_mistakes(model, raw, error)
        )
        raise ConfigurationError(mistakes) from None
