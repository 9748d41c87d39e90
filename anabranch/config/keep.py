"""Retention of a stream's data."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from anabranch.config.base import Frozen
from anabranch.config.plain import parse_duration

_LEAST = timedelta(days=1)


def _parse(value: object) -> timedelta | None:
    if value is None or value == "for ever":
        return None
    try:
        return parse_duration(value)
    except ValueError as error:
        raise ValueError(f"{error}, or 'for ever'") from None


def _at_least_a_day(value: timedelta | None) -> timedelta | None:
    if value is not None and value < _LEAST:
        raise ValueError("expected 1 day or more, or 'for ever'")
    return value


KeptFor = Annotated[timedelta | None, BeforeValidator(_parse), AfterValidator(_at_least_a_day)]


class Keep(Frozen):
    """Retention; None is for ever."""

    rows: KeptFor = Field(
        default=None,
        description=(
            "How long rows are kept, counted from the end of their ingest hour; at least a day "
            "longer than `batch.lookback_hours`. `keep: 30 days` sets it for rows and dead letters."
        ),
    )
    dead_letters: KeptFor = Field(default=None, description="How long dead letters are kept.")
    ledger: KeptFor = Field(
        default=None,
        description=(
            "How long the ledger keeps the account of an hour; at least as long as `keep.rows` "
            "and `keep.dead_letters`. Whole quarters of a year expire."
        ),
    )


class Archive(Frozen):
    """The archive of a stream's records as Kafka delivered them: its retention from the end of
    their ingest hour; None is for ever."""

    raw: KeptFor = Field(
        description=(
            "How long the batch layer keeps each hour's raw records, 1 day or more, or `for "
            "ever`. Default: no archive."
        )
    )


def parse_keep(value: object) -> object:
    """Convert a single duration to the retention of rows and dead letters."""
    return {"rows": value, "dead_letters": value} if isinstance(value, str) else value
