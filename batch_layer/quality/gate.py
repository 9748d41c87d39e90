"""The quality gate: the Great Expectations suite that an hour must pass before it is published.

`batch_layer.quality.suite` defines the suite's file. Each expectation gets a verdict. A failed one
names a few rows by their positions, so that an operator finds them in Kafka and in the table. No
value of a row is kept.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from anabranch.common.errors import Refused
from anabranch.common.remote_errors import cause_line, explain_text, is_away
from anabranch.protocol.ledger_row import QualityResult
from batch_layer.quality.row_counts import TYPES, Bounds, RowCountBaseline, plan_bounds
from batch_layer.quality.suite import PLACE, Expectation, build, context, load_suite
from batch_layer.quality.wording import (
    POSITION,
    SAMPLE,
    describe_failure,
    describe_met,
    shorten,
)

LOG = logging.getLogger(__name__)

# Great Expectations keeps its project in global variables, so only one hour is evaluated at a time.
_LOCK = threading.Lock()

_VERDICTS = {"result_format": "BOOLEAN_ONLY"}
_VALUES = {"result_format": "SUMMARY", "partial_unexpected_count": SAMPLE}
_ROWS = _VALUES | {"unexpected_index_column_names": list(POSITION)}


def run_suite(frame: DataFrame, path: Path, known: RowCountBaseline | None = None) -> QualityResult:
    """Evaluate the suite of `path` on an hour's rows. The result has a few hundred bytes for each
    expectation, and no value of a row.

    `known`: the baseline for expectations on the row count. Each expectation gets a verdict; one
    that raised has failed. Without rows, expectations on each row pass, and those on columns or
    aggregates are evaluated as usual (an aggregate of no rows meets no bound). Only failed
    expectations are evaluated a second time, for their rows. Raises ConfigurationError like
    `load_suite`, Refused if Great Expectations omits an expectation, Transient if the rows could
    not be read.
    """
    with _LOCK:
        return _run_suite(frame, path, known)


def _run_suite(frame: DataFrame, path: Path, known: RowCountBaseline | None) -> QualityResult:
    suite = load_suite(path)
    ours = {
        i: plan_bounds(e.type, e.kwargs, known or RowCountBaseline())
        for i, e in enumerate(suite.expectations)
        if e.type in TYPES
    }
    bound = {i: _bounded(e, ours.get(i)) for i, e in enumerate(suite.expectations)}
    verdicts = _evaluate(frame, suite.name, bound, _VERDICTS)
    if len(verdicts) != len(suite.expectations):
        raise Refused(
            f"{path}: expected {len(suite.expectations)} verdicts of the suite, found "
            f"{len(verdicts)}; nothing is published; remove repeated expectations, and report "
            "this if there are none"
        )
    raised = {i: _exception(result) for i, result in verdicts.items()}
    unmet = {i: e for i, e in bound.items() if raised[i] or not verdicts[i].success}
    observed = _observed(frame, suite.name, {i: e for i, e in unmet.items() if not raised[i]})
    if sum(map(bool, raised.values())) > 1:
        # Great Expectations reports the last message for all expectations that raised in one query:
        # evaluate each on its own.
        for i in filter(raised.get, unmet):
            raised[i] = (
                _exception(_evaluate(frame, suite.name, {i: unmet[i]}, _VALUES)[i]) or raised[i]
            )
    failed: list[dict[str, Any]] = []
    warnings: list[dict[str, Any]] = []
    for i, expectation in unmet.items():
        failure = describe_failure(
            expectation, observed.get(i, {}), raised[i], ours[i].basis if i in ours else None
        )
        (failed if expectation.severity == "critical" else warnings).append(failure.as_dict())
        LOG.warning(
            "quality gate: expectation not met suite=%s severity=%s: %s",
            suite.name,
            expectation.severity,
            failure.message,
        )
    not_applicable = [
        {"type": bound[i].type, "reason": b.basis} for i, b in ours.items() if not b.applies
    ]
    for entry in not_applicable:
        LOG.info(
            "quality gate: expectation does not apply suite=%s type=%s reason=%s",
            suite.name,
            entry["type"],
            entry["reason"],
        )
    return QualityResult(
        passed=not failed,
        failed=tuple(failed),
        warnings=tuple(warnings),
        evaluated=len(verdicts),
        suite=suite.name,
        met=tuple(describe_met(e) for i, e in bound.items() if i not in unmet),
        not_applicable=tuple(not_applicable),
    )


def _bounded(expectation: Expectation, bounds: Bounds | None) -> Expectation:
    if bounds is None:
        return expectation
    return replace(expectation, kwargs={**expectation.kwargs, **bounds.as_kwargs()})


def _observed(
    frame: DataFrame, name: str, expectations: Mapping[int, Expectation]
) -> dict[int, Mapping[str, Any]]:
    """Return counts and statistics, with rows for the types where Great Expectations can name
    them."""
    results = _evaluate(frame, name, expectations, _ROWS)
    # Some types cannot name rows: evaluate these again without them.
    again = {i: expectations[i] for i, result in results.items() if _exception(result)}
    results |= _evaluate(frame, name, again, _VALUES)
    return {i: result.result for i, result in results.items()}


def _evaluate(
    frame: DataFrame,
    name: str,
    expectations: Mapping[int, Expectation],
    result_format: Mapping[str, Any],
) -> dict[int, Any]:
    """Return Great Expectations' result of each expectation, by its place in the file: the library
    returns them in another order."""
    if not expectations:
        return {}
    # Persisted frames would stay in the executors' memory.
    asset = context().data_sources.add_spark("staged", persist=False).add_dataframe_asset("rows")
    batch = asset.add_batch_definition_whole_dataframe("all").get_batch(
        batch_parameters={"dataframe": frame}
    )
    doing, suite = f"evaluate the suite {name}", build(name, expectations)
    try:
        # A ValidationDefinition also stores the result, and fails on values that are not JSON (a
        # NumPy bool).
        validation = batch.validate(suite, result_format=dict(result_format))
    except Exception as error:
        _raise_if_unreachable(doing, "".join(traceback.format_exception(error)))
        raise
    for result in validation.results:
        for info in _raised(result):
            # Great Expectations counts any exception as the expectation's failure, even if S3 is
            # down.
            _raise_if_unreachable(
                doing, f"{info.get('exception_message')}\n{info.get('exception_traceback')}"
            )
    return {result.expectation_config.meta[PLACE]: result for result in validation.results}


def _raise_if_unreachable(doing: str, text: str) -> None:
    """Raise the classified error if an exception's text is about a service, not about the rows."""
    if is_away(text):
        raise explain_text(doing, text)


def _raised(result: Any) -> list[Mapping[str, Any]]:
    """Return the exceptions of an evaluation. Some expectations list them flat, others by metric
    id."""
    info = result.exception_info or {}
    infos = (
        [info] if "raised_exception" in info else [i for i in info.values() if isinstance(i, dict)]
    )
    return [i for i in infos if i.get("raised_exception")]


def _exception(result: Any) -> str | None:
    messages = [str(i.get("exception_message")) for i in _raised(result)]
    return "; ".join(dict.fromkeys(shorten(cause_line(m)) for m in messages)) or None
