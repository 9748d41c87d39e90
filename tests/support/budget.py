"""How much the random and the large tests try: little in `make test`, all of it with
TEST_BUDGET=full."""

from __future__ import annotations

import os

FULL = os.environ.get("TEST_BUDGET") == "full"


def budget(quick: int, full: int) -> int:
    """How many to try: examples, walks, values, records."""
    return full if FULL else quick
