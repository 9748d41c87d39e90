"""The size of random and large tests: small in `make test`, full with TEST_BUDGET=full."""

import os
from typing import Any

import pytest

FULL = os.environ.get("TEST_BUDGET") == "full"


def budget(quick: int, full: int) -> int:
    """Return the number of examples, walks, values or records to test."""
    return full if FULL else quick


def full(*values: Any) -> Any:
    """Return a test's parameters that only `make test-full` runs."""
    return pytest.param(*values, marks=pytest.mark.full)
