"""Durations as configuration and options write them."""

from __future__ import annotations

import re
from datetime import timedelta

_DURATION = re.compile(r"^\s*(\d+)\s*(second|minute|hour|day|week|year)s?\s*$")


def parse_duration(value: object) -> timedelta:
    """`"2 seconds"`, `"30 days"` … -> timedelta; a year has 365 days. Raises ValueError for anything else."""
    if isinstance(value, timedelta):
        return value
    match = _DURATION.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a duration such as '2 seconds', '5 minutes' or '30 days'")
    number, unit = int(match.group(1)), match.group(2)
    return timedelta(days=365 * number) if unit == "year" else timedelta(**{unit + "s": number})
