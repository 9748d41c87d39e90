"""Durations as configuration and options write them."""

from __future__ import annotations

import re
from datetime import timedelta

_DURATION = re.compile(r"^\s*(\d+)\s*(second|minute|hour|day|week)s?\s*$")


def parse_duration(value: object) -> timedelta:
    """`"2 seconds"`, `"30 days"` … -> timedelta. Raises ValueError for anything else."""
    if isinstance(value, timedelta):
        return value
    match = _DURATION.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a duration such as '2 seconds', '5 minutes' or '30 days'")
    return timedelta(**{match.group(2) + "s": int(match.group(1))})
