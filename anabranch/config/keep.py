"""How long a stream's data is kept."""

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
    """How long data is kept; None: for ever. `rows` and `dead_letters` are counted from the end of
    their ingest hour, `docs`, the pages of the quality gate, from when they were written. `ledger`:
    the rows of the ledger, in whole quarters of a year of which nothing else is left."""

    rows: KeptFor = None
    dead_letters: KeptFor = None
    ledger: KeptFor = None
    docs: KeptFor = timedelta(days=30)


class Archive(Frozen):
    """The archive of a stream's records as Kafka gave them: how long, from the end of their ingest
    hour; None: for ever."""

    raw: KeptFor


def parse_keep(value: object) -> object:
    """A duration alone is that of rows and dead letters."""
    return {"rows": value, "dead_letters": value} if isinstance(value, str) else value
