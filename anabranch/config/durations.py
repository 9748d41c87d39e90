"""Durations in configuration and options."""

from __future__ import annotations

import re
from datetime import timedelta

# Longer durations lead to times outside the calendar.
_MOST_YEARS = 1000
_YEAR = timedelta(days=365)
_DURATION = re.compile(r"^\s*(\d+)\s*(second|minute|hour|day|week|year)s?\s*$")


def parse_duration(value: object) -> timedelta:
    """Parse a duration such as `"2 seconds"` or `"30 days"`; a year has 365 days. Raises ValueError
    for anything else, and for more than 1,000 years."""
    if isinstance(value, timedelta):
        return value
    match = _DURATION.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a duration such as '2 seconds', '5 minutes' or '30 days'")
    number, unit = int(match.group(1)), match.group(2)
    seconds = number * int(
        _YEAR.total_seconds() if unit == "year" else timedelta(**{unit + "s": 1}).total_seconds()
    )
    if seconds > _MOST_YEARS * _YEAR.total_seconds():
        raise ValueError(f"expected {_MOST_YEARS} years at most, found {value}")
    return timedelta(seconds=seconds)
