"""The secrets of a configuration, for redaction from messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from pydantic import BaseModel, SecretStr

from anabranch.config.mistakes import is_secret


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
