"""Two expectations of Anabranch for Great Expectations, which compare an hour's row count with
other sources.

- `expect_table_row_count_to_be_close_to_speed_layer`: kwargs `min_ratio`, `max_ratio`. Against the
  speed layer's rows of the hour, without those that the batch layer dropped as duplicates. Does not
  apply to an hour that the speed layer does not cover.
- `expect_table_row_count_to_be_close_to_previous_days`: kwargs `min_ratio`, `max_ratio`, `days`
  (7), `min_days` (3). Against the median of the same hour of the `days` days before, as accepted;
  does not apply while fewer than `min_days` of them are known.

Each becomes bounds of the row count, which Great Expectations then evaluates. Without bounds any
count passes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

SPEED = "expect_table_row_count_to_be_close_to_speed_layer"
PREVIOUS = "expect_table_row_count_to_be_close_to_previous_days"
TYPES = (SPEED, PREVIOUS)
DAYS, MIN_DAYS = 7, 3


@dataclass(frozen=True)
class RowCountBaseline:
    """The expected row count of an hour, from other sources.

    `speed_rows` is None, with the reason `why`, if the speed layer does not cover the hour.
    `previous` returns the accepted row counts of the same hour on the given number of days before,
    as far as the ledger has them; called only when needed.
    """

    speed_rows: int | None = None
    why: str = "the speed layer's rows are unknown"
    previous: Callable[[int], Sequence[int]] = lambda days: ()


@dataclass(frozen=True)
class Bounds:
    """The row counts that pass (None: any), and a clause with their source, or why there are
    none."""

    min_value: int | None
    max_value: int | None
    basis: str
    applies: bool = True

    def as_kwargs(self) -> dict[str, int]:
        bounds = {"min_value": self.min_value, "max_value": self.max_value}
        return {k: v for k, v in bounds.items() if v is not None}


def plan_bounds(type: str, kwargs: Mapping[str, Any], known: RowCountBaseline) -> Bounds:
    """Return the bounds of one of these expectations for an hour. Pure, except for calls of
    `known`."""
    if type == SPEED:
        if known.speed_rows is None:
            return Bounds(None, None, known.why, applies=False)
        return _around(
            Fraction(known.speed_rows), kwargs, f"the speed layer has {known.speed_rows}"
        )
    days, least = kwargs.get("days", DAYS), kwargs.get("min_days")
    if least is None:
        least = min(MIN_DAYS, days)
    counts = list(known.previous(days))
    if len(counts) < least:
        return Bounds(
            None,
            None,
            f"row counts of {least} previous days are needed, {len(counts)} of {days} are known",
            applies=False,
        )
    median = statistics.median(counts)
    return _around(
        Fraction(median), kwargs, f"the median of {len(counts)} days before is {median:g}"
    )


def _around(count: Fraction, kwargs: Mapping[str, Any], basis: str) -> Bounds:
    # Exact: 0.07 times 100 rows are 7, not a little more.
    low, high = (
        None if kwargs.get(k) is None else Fraction(str(kwargs[k]))
        for k in ("min_ratio", "max_ratio")
    )
    return Bounds(
        None if low is None else math.ceil(low * count),
        None if high is None else math.floor(high * count),
        basis,
    )


@cache
def register() -> None:
    """Register both types with Great Expectations, which checks their kwargs."""
    from great_expectations.compatibility import pydantic
    from great_expectations.expectations.core import ExpectTableRowCountToBeBetween

    # A class of Great Expectations is a type that a suite may name, so do not add a common base
    # class.
    class ExpectTableRowCountToBeCloseToSpeedLayer(ExpectTableRowCountToBeBetween):  # type: ignore[misc]
        """Expect as many rows as the speed layer has of the hour."""

        min_ratio: float | None = pydantic.Field(default=None, ge=0, lt=math.inf)
        max_ratio: float | None = pydantic.Field(default=None, ge=0, lt=math.inf)

        @pydantic.root_validator(skip_on_failure=True)  # type: ignore[untyped-decorator]
        def _some(cls, values: dict[str, Any]) -> dict[str, Any]:
            low, high = values["min_ratio"], values["max_ratio"]
            if low is None and high is None:
                raise ValueError("expected min_ratio, max_ratio or both, found neither")
            if low is not None and high is not None and low > high:
                raise ValueError(f"expected min_ratio up to max_ratio, found {low} above {high}")
            return values

    class ExpectTableRowCountToBeCloseToPreviousDays(ExpectTableRowCountToBeCloseToSpeedLayer):
        """Expect as many rows as the same hour of previous days had."""

        days: int = pydantic.Field(default=DAYS, ge=1, le=366)
        min_days: int | None = pydantic.Field(default=None, ge=1)

        @pydantic.root_validator(skip_on_failure=True)  # type: ignore[untyped-decorator]
        def _enough(cls, values: dict[str, Any]) -> dict[str, Any]:
            if values["min_days"] is not None and values["min_days"] > values["days"]:
                raise ValueError(
                    f"expected min_days up to days ({values['days']}), found {values['min_days']}"
                )
            return values
