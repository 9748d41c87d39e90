"""A suite's file, in Great Expectations' vocabulary: loaded completely or not at all.

It has a `name` and `expectations`, each a `type`, its `kwargs`, and perhaps a `severity`:
`critical` (also when omitted) refuses the hour, `warning` and `info` are recorded and let it pass.
Great Expectations itself logs and drops an expectation that it cannot load, so the file is checked
here first: nothing is ever left out.

The import of Great Expectations takes seconds, so only functions import it. It sends nothing and
writes nothing to disk.

Two types of Anabranch's own compare an hour's row count with other sources:

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

import copy
import logging
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from anabranch.common import process
from anabranch.common.errors import ConfigurationError
from anabranch.config.base import Frozen
from anabranch.config.loading import load_mapping, validated

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
    """The row counts that pass (None: any), and their source, or why there are none."""

    min_value: int | None
    max_value: int | None
    basis: str
    applies: bool = True

    def as_kwargs(self) -> dict[str, int]:
        bounds = {"min_value": self.min_value, "max_value": self.max_value}
        return {k: v for k, v in bounds.items() if v is not None}


def plan_bounds(type: str, kwargs: Mapping[str, Any], known: RowCountBaseline) -> Bounds:
    """Return the bounds of such an expectation for an hour. Pure, except for calls of `known`."""
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


PLACE = "anabranch_place"  # in an expectation's meta: its place in the file


class Expectation(Frozen):
    """One entry of a suite's file."""

    type: str
    kwargs: dict[Any, Any]
    severity: Literal["critical", "warning", "info"] = "critical"
    meta: Any = None
    notes: Any = None
    description: Any = None


# Great Expectations also accepts these as kwargs, which would override the entry or the gate.
_NOT_KWARGS = {
    "id",
    "batch_id",
    "catch_exceptions",
    "rendered_content",
    "result_format",
    "windows",
} | (Expectation.model_fields.keys() - {"type", "kwargs"})


class Suite(Frozen):
    """A suite's file: all its entries, at least one, in the file's order."""

    name: str = Field(min_length=1)
    expectations: tuple[Expectation, ...] = Field(min_length=1)
    meta: Any = None
    notes: Any = None


def load_suite(path: Path) -> Suite:
    """Read a suite's file. Raises ConfigurationError unless all of it loads."""
    data = load_mapping(path, "a readable suite of expectations")
    suite = validated(lambda key: path, Suite, data, data)
    for i, expectation in enumerate(suite.expectations):
        _require_loadable(f"{path}: expectations[{i}] ({expectation.type})", expectation)
    loaded = len(build(suite.name, dict(enumerate(suite.expectations))).expectations)
    if loaded != len(suite.expectations):
        raise ConfigurationError(
            f"{path}: expectations: expected all {len(suite.expectations)} to load, found {loaded}"
        )
    return suite


def _require_loadable(where: str, expectation: Expectation) -> None:
    """Raise ConfigurationError for arguments that Great Expectations' model of the type refuses, or
    that are not the expectation's own."""
    kwargs = expectation.kwargs
    if misplaced := sorted(_NOT_KWARGS.intersection(kwargs)):
        raise ConfigurationError(
            f"{where}: kwargs: expected only the expectation's own arguments, found {misplaced[0]}"
        )
    if expectation.type in TYPES and (given := sorted({"min_value", "max_value"} & set(kwargs))):
        raise ConfigurationError(
            f"{where}: kwargs: expected ratios (min_ratio, max_ratio), found {given[0]}"
        )
    parameters = [
        k for k, value in kwargs.items() if isinstance(value, dict) and "$PARAMETER" in value
    ]
    if parameters:
        raise ConfigurationError(
            f"{where}: kwargs: {parameters[0]}: expected a value, found a suite parameter"
        )
    gx = great_expectations()
    try:
        configuration(expectation).to_domain_obj()
    except gx.exceptions.ExpectationNotFoundError:
        raise ConfigurationError(
            f"{where}: type: expected one that Great Expectations {gx.__version__} knows, found "
            f"{expectation.type!r}"
        ) from None
    except Exception as error:  # pydantic's, Python's and its own: there is no common base
        raise ConfigurationError(
            f"{where}: kwargs: expected what this type accepts, found {kwargs!r}: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    errors = getattr(error, "errors", None)
    if callable(errors):  # a pydantic error: the place and the complaint, without its types
        return "; ".join(
            f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in errors()
        )
    return str(error)


@cache
def great_expectations() -> Any:
    """Return the library without analytics and its own log lines: the gate logs failures."""
    os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read at import
    # Few types of expectations use these, which take two of six seconds of the import. The gate's
    # lock keeps them to one thread.
    with process.importing("scipy.stats", "altair"):
        import great_expectations
        from great_expectations.validator import validation_graph

    logging.getLogger("great_expectations").setLevel(logging.CRITICAL)
    # Do not retry here: the library would read the rows up to three times without a log line. The
    # batch job retries, and logs it.
    validation_graph.MAX_METRIC_COMPUTATION_RETRIES = 1
    register()
    return great_expectations


def configuration(expectation: Expectation, place: int = 0) -> Any:
    great_expectations()
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration

    kwargs = copy.deepcopy(dict(expectation.kwargs))
    return ExpectationConfiguration(
        expectation.type, kwargs, severity=expectation.severity, meta={PLACE: place}
    )


def build(name: str, expectations: Mapping[int, Expectation]) -> Any:
    gx = great_expectations()
    return gx.ExpectationSuite(
        name=name, expectations=[configuration(e, place) for place, e in expectations.items()]
    )


def context() -> Any:
    """Return a context in memory: the default one would make a folder for a site."""
    gx = great_expectations()
    from great_expectations.data_context.types.base import (
        DataContextConfig,
        InMemoryStoreBackendDefaults,
        ProgressBarsConfig,
    )

    config = DataContextConfig(
        analytics_enabled=False,
        progress_bars=ProgressBarsConfig(globally=False, metric_calculations=False),
        store_backend_defaults=InMemoryStoreBackendDefaults(init_temp_docs_sites=False),
    )
    return gx.get_context(project_config=config, mode="ephemeral")
