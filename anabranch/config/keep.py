"""Retention of a stream's data."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from anabranch.config.base import Frozen, parse_retry_for

_LEAST = timedelta(days=1)


def _at_least_a_day(value: timedelta | None) -> timedelta | None:
    if value is not None and value < _LEAST:
        raise ValueError("expected 1 day or more, or 'for ever'")
    return value


KeptFor = Annotated[
    timedelta | None, BeforeValidator(parse_retry_for), AfterValidator(_at_least_a_day)
]


class Keep(Frozen):
    """Retention; None is for ever. `rows` and `dead_letters` count from the end of their ingest
    hour. `ledger`: its rows leave by whole quarters of a year of which no other data is left."""

    rows: KeptFor = None
    dead_letters: KeptFor = None
    ledger: KeptFor = None


class Archive(Frozen):
    """The archive of a stream's records as Kafka delivered them: its retention from the end of
    their ingest hour; None is for ever."""

    raw: KeptFor


def parse_keep(value: object) -> object:
    """Convert a single duration to the retention of rows and dead letters."""
    return {"rows": value, "dead_letters": value} if isinstance(value, str) else value
