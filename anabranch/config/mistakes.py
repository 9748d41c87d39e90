"""Messages for mistakes in configuration files: key, expected, and found unless it may be a secret;
and the secrets of a configuration, for redaction.

A message repeats a value only if it is a scalar, its key is not of a secret, and the file itself
has it: a value from the environment is named by its variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args
from urllib.parse import unquote

from pydantic import BaseModel, SecretStr, ValidationError

from anabranch.config.columns import NO_COLUMNS
from anabranch.config.kafka_security import TAGS
from anabranch.config.plain import REFERENCE

# Values under these keys never appear in a message.
_SECRETS = frozenset({"properties", "conf", "erasure"})
_SECRET = re.compile(
    r"pass|secret|token|credential|access.?key|api.?key|private|jaas", re.IGNORECASE
)
_LONGEST = 200
# The least similarity of a name and its misspelling; topics of one family are less similar.
_ALIKE = 0.8
# Greedy up to the last @, since a password may contain a slash or an @.
_USER = re.compile(r"//.*@", re.DOTALL)
# Replacements of Pydantic's messages by error type; first those of a scalar in place of more.
_OF_COLLECTIONS = {
    **dict.fromkeys(
        ("dict_type", "model_type", "model_attributes_type", "union_tag_not_found"),
        "expected a mapping of keys",
    ),
    **dict.fromkeys(("tuple_type", "list_type"), "expected a list"),
}
_MESSAGES = _OF_COLLECTIONS | {
    "missing": "required key, found none",
    "string_type": "expected a text",
}
# Of lists, and of secrets, whose items are characters.
_ITEMS = re.compile(r"(items?) after validation, not \d+")
_SHOULD = re.compile(r"^\w+ should (?:have |be |match )?")
_FORMS = {
    "table": "expected namespace.table, such as shop.orders, of letters, digits and underscores",
    "topic": "expected a topic's name of letters, digits, '.', '_' and '-', 249 at most",
    "location": "expected s3://BUCKET/FOLDER or file:///FOLDER without a slash at its end",
    "warehouse": "expected s3://BUCKET/FOLDER or file:///FOLDER",
    "index": "expected an index's name of lower-case letters, digits, '.', '_' and '-'",
    "name": "expected a name of letters, digits and underscores",
}
INTERNAL_FIELDS = frozenset({"columns", "subject_schema", "fields", "family"})
"""Fields of a stream, beside its name, that are not keys of a file."""


def is_secret(key: str) -> bool:
    """Return whether a key's name is that of a secret. Pure."""
    return _SECRET.search(key) is not None


def without_user(address: str) -> str:
    """Return an address without user and password, whatever characters they contain. Pure."""
    return _USER.sub("//…@", address)


def explain_mistakes(
    model: type[BaseModel], raw: Mapping[str, Any], error: ValidationError
) -> list[tuple[tuple[Any, ...], str]]:
    """Return the key and a line for each mistake, unknown keys first: a missing key is often a
    misspelt one. `raw` is the file before variables were replaced. Pure."""
    problems = sorted(
        error.errors(include_url=False, include_context=False),
        key=lambda p: p["type"] != "extra_forbidden",
    )
    return [(tuple(problem["loc"]), _explain(model, raw, problem)) for problem in problems]


def _explain(model: type[BaseModel], raw: Mapping[str, Any], problem: Mapping[str, Any]) -> str:
    loc, kind = tuple(part for part in problem["loc"] if part not in TAGS), problem["type"]
    key = ".".join(map(str, loc))
    where = f"{key}: " if key else ""
    if kind == "extra_forbidden":
        return unknown_key(str(loc[-1]), _known(model, problem["loc"][:-1]), key)
    message = _MESSAGES.get(kind, problem["msg"].removeprefix("Value error, "))
    if kind == "missing" and loc == ("schema",):
        message = f"{NO_COLUMNS}, found none"
    if kind == "string_pattern_mismatch":
        message = _FORMS.get(
            str(loc[-1]), message.replace("String should match pattern", "expected the form")
        )
    message = _SHOULD.sub("expected ", message)
    message = _ITEMS.sub("characters" if isinstance(problem["input"], str) else r"\1", message)
    written = _written(raw, loc)
    if kind == "value_error":
        for name, value in _substituted(written):
            message = message.replace(value, f"${{{name}}}")
    found = (
        ""
        if kind == "missing" or not key or (kind == "value_error" and ", found " in message)
        else f", found {_found(loc, kind, problem['input'], written)}"
    )
    return f"{where}{message}{found}"


def similar(name: str, known: Iterable[str]) -> str | None:
    """Return the name that `name` may be a misspelling of, if any. Pure."""
    return next(iter(get_close_matches(name, sorted(known), 1, _ALIKE)), None)


def unknown_key(key: str, known: Sequence[str], where: str) -> str:
    near = get_close_matches(key, known, 1, 0.5)
    meant = (
        f"did you mean {near[0]!r}?"
        if near
        else f"expected one of {', '.join(sorted(known))}"
        if known
        else "remove it"
    )
    return f"{where}: unknown key {key!r}, {meant}"


def _found(loc: Sequence[Any], kind: str, value: Any, written: Any) -> str:
    # A scalar in place of a mapping or list may be any of its values, secrets included.
    if kind in _OF_COLLECTIONS or any(
        str(part) in _SECRETS or is_secret(str(part)) for part in loc
    ):
        return type(value).__name__
    several = list(value) if isinstance(value, list | tuple) else [value]
    if not all(item is None or isinstance(item, str | int | float) for item in several):
        return type(value).__name__
    if isinstance(written, list) and any(
        isinstance(item, str) and REFERENCE.search(item) for item in written
    ):
        return type(value).__name__
    if isinstance(written, str) and (names := [match[1] for match in REFERENCE.finditer(written)]):
        return f"{'nothing' if value == '' else 'the value'} of ${{{'}, ${'.join(names)}}}"
    text = without_user(repr(value))
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _written(raw: Any, loc: Sequence[Any]) -> Any:
    """Return the file's value at a location, skipping parts of the location that are not keys but
    select a model."""
    for part in loc:
        has_it = (
            part in raw
            if isinstance(raw, Mapping)
            else isinstance(raw, list) and part in range(len(raw))
        )
        raw = raw[part] if has_it else raw
    return raw


def _substituted(written: Any) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each variable in a part of the file, except values of up to three
    characters, which may be ordinary words."""
    import os

    if isinstance(written, Mapping):
        written = list(written.values())
    if isinstance(written, list):
        for item in written:
            yield from _substituted(item)
    if isinstance(written, str):
        for match in REFERENCE.finditer(written):
            value = os.environ.get(match[1], match[2]) or ""
            if len(value) > 3:
                yield match[1], value


def _known(model: type[BaseModel], loc: Sequence[Any]) -> list[str]:
    """Return the keys of the models at a location."""
    models = [model]
    for part in loc:
        inner = [
            m
            for one in models
            for name, f in one.model_fields.items()
            if part in (name, f.alias)
            for m in models_of(f)
        ]
        models = inner or [m for m in models if m is TAGS.get(part)] or models
    names = {field.alias or name for one in models for name, field in one.model_fields.items()}
    is_stream = models == [model] and model.model_fields.keys() >= INTERNAL_FIELDS
    return sorted(names - INTERNAL_FIELDS - {"name"} if is_stream else names)


def models_of(field: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in a field's annotation."""
    waiting = [field.annotation]
    while waiting:
        annotation = waiting.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        waiting += get_args(annotation)


def secrets_of(model: BaseModel) -> set[str]:
    """Return the passwords and keys of a model and of the models in it. Pure."""
    return {
        text
        for name in type(model).model_fields
        for text in _secrets_in(name, getattr(model, name))
        if text
    }


def _secrets_in(key: str, value: Any) -> Iterator[str]:
    match value:
        case BaseModel():
            yield from secrets_of(value)
        case Mapping():
            for name, item in value.items():
                if is_secret(str(name)):
                    yield from _secrets_in(str(name), item)
        case tuple() | list():
            for item in value:
                yield from _secrets_in(key, item)
        # An access key id is public.
        case SecretStr() if key != "access_key":
            yield from _forms(key, value.get_secret_value())
        case str() if key == "uri" or is_secret(key):
            yield from _forms(key, value)


def _forms(key: str, text: str) -> Iterator[str]:
    """Yield the forms in which a secret, or the secret in an address, may appear."""
    if key == "uri":
        if "@" in text:
            _, _, password = text.partition("://")[2].rpartition("@")[0].partition(":")
            yield from (password, unquote(password))
    else:
        yield text
