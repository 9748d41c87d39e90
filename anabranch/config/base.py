"""The base class of the configuration's models, and types of their values."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import timedelta
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict

from anabranch.config.plain import parse_duration, parse_name

# The authority is a host, in brackets if it is an address of IPv6, and perhaps a port.
_WEB_ADDRESS = re.compile(
    r"https?://([^/?#@]*@)?([\w.-]+|\[[0-9a-fA-F:.]+\])(:[0-9]{1,5})?([/?#]\S*)?$"
)
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


class Frozen(BaseModel):
    """An immutable model that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def parse_share(value: object) -> float:
    """Parse a share such as `"5 %"` to a number between 0 and 1. Raises ValueError otherwise."""
    match = _SHARE.fullmatch(value) if isinstance(value, str) else None
    if match is None or (percent := float(match[1])) > 100:
        raise ValueError("expected a share of 0 % to 100 %, such as '5 %'")
    return percent / 100


def one_or_many(value: object) -> object:
    """Convert a text to a tuple of one."""
    return (value,) if isinstance(value, str) else value


def repeated_name(names: Iterable[str]) -> str | None:
    """Return the first repeated name, ignoring case, in lower case; None if there is none."""
    lower = [name.lower() for name in names]
    return next((name for name in lower if lower.count(name) > 1), None)


def _each_once(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) < len(value):
        raise ValueError("expected each column once")
    return value


def between(least: timedelta, most: timedelta, expected: str) -> AfterValidator:
    """Return a validator that refuses durations outside these inclusive bounds with `expected`."""

    def check(value: timedelta) -> timedelta:
        if not least <= value <= most:
            raise ValueError(expected)
        return value

    return AfterValidator(check)


def more_than_nothing(expected: str) -> AfterValidator:
    """Return a validator that refuses a zero duration with `expected`."""
    return between(timedelta.resolution, timedelta.max, expected)


def web_address(
    example: str, secrets: str, optional: bool = False, several: bool = False
) -> AfterValidator:
    """Return a validator that refuses anything but a URL such as `example`, and secrets in the URL;
    `secrets` names the keys for them. `several`: URLs with commas between them."""

    def check(value: str) -> str:
        if optional and not value:
            return value
        if several and "," in value:
            return ",".join(check(one.strip()) for one in value.split(","))
        if not _WEB_ADDRESS.match(value):
            raise ValueError(f"expected a URL such as '{example}'")
        parts = urlsplit(value)
        if "@" in value or parts.query or parts.fragment:
            raise ValueError(f"expected a URL without user, query or fragment ({secrets})")
        return value.rstrip("/")

    return AfterValidator(check)


Duration = Annotated[timedelta, BeforeValidator(parse_duration)]
Share = Annotated[float, BeforeValidator(parse_share)]
Name = Annotated[str, BeforeValidator(parse_name)]
Names = Annotated[tuple[Name, ...], BeforeValidator(one_or_many), AfterValidator(_each_once)]
