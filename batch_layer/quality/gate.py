"""The quality gate: the Great Expectations suite that an hour must pass before it is published.

`batch_layer.quality.suite` defines the suite's file. Each expectation gets a verdict, with a
description for messages and for the ledger. A failed one names a few rows by their positions, so
that an operator finds them in Kafka and in the table. No description has a value of a row: the
ledger outlives rows that are erased or expire.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame

from anabranch.common.errors import Refused
from anabranch.common.remote_errors import cause_line, explain_text, is_away
from anabranch.protocol.ledger_row import QualityResult
from batch_layer.quality.suite import (
    PLACE,
    TYPES,
    Expectation,
    RowCountBaseline,
    build,
    context,
    load_suite,
    plan_bounds,
)

SAMPLE = 5  # rows named of a failed expectation
_LONGEST = 200  # characters of an argument or of an exception in a message or in the ledger
_MOST = 20  # items of a list in the ledger
POSITION = ("kafka_partition", "kafka_offset")

Rows = list[dict[str, Any]]

# Expectations whose observed value is computed from all rows. The observed value of others, such as
# a maximum, is a value of a row.
_STATISTICS = re.compile(
    "expect_table_|expect_column_(mean|sum|stdev|unique_value_count|proportion_of|kl_divergence)|unexpected_rows_"
)
# Exceptions have values in quotes, which may contain quotes or be cut short, and numbers without
# quotes.
_WITH_VALUES = re.compile(r"""'.*['…]|".*["…]|(?<!\w)[-+]?\d(?:[\w.,:+-]*\w)?""", re.DOTALL)


def describe_met(expectation: Expectation) -> dict[str, Any]:
    """Return the ledger's entry of an expectation that the rows met. Pure."""
    kwargs = json_safe(expectation.kwargs)
    return {"type": expectation.type, "kwargs": kwargs, "severity": expectation.severity}


def describe_failure(
    expectation: Expectation, result: Mapping[str, Any], raised: str | None, why: str | None = None
) -> dict[str, Any]:
    """Return the ledger's entry of an unmet expectation, or of one that could not be evaluated.

    `why`: the source of its bounds. `observed`: a count or another statistic. `unexpected_count`:
    the number of unexpected rows among `element_count` rows. Each is None if Great Expectations
    gives none. `rows`: the positions of up to SAMPLE unexpected rows. `message`: one sentence for
    an operator. `raised`: why it could not be evaluated. Pure.
    """
    kwargs = expectation.kwargs
    rows = _rows(result)
    observed = result.get("observed_value") if _STATISTICS.match(expectation.type) else None
    columns = (
        kwargs.get("column_list")
        or kwargs.get("column_set")
        or [kwargs[k] for k in ("column", "column_A", "column_B") if k in kwargs]
    )
    raised = _without_values(raised, columns) if raised is not None else None
    outcome = _outcome(result, raised, rows, observed)
    subject = f"({', '.join(str(c) for c in columns)})" if columns else ""
    message = (
        f"{expectation.type}{subject}: expected {_expected(expectation)}, "
        f"{outcome}{f' ({why})' if why else ''}"
    )
    return {
        **describe_met(expectation),
        "observed": json_safe(observed),
        "unexpected_count": result.get("unexpected_count"),
        "element_count": result.get("element_count"),
        "rows": rows,
        "message": message,
    } | ({"raised": raised} if raised else {})


def _outcome(result: Mapping[str, Any], raised: str | None, rows: Rows, observed: Any) -> str:
    count = result.get("unexpected_count")
    if raised:
        return f"could not be evaluated: {raised}"
    if count is not None and "element_count" in result:
        at = (
            f" (the first: partition {rows[0]['partition']}, offset {rows[0]['offset']})"
            if rows
            else ""
        )
        return f"found {count} of {result['element_count']} rows otherwise{at}"
    if observed is not None:
        return f"found {shorten(_words(observed))}"
    if count is not None:
        return f"found {count} otherwise"
    return "found no value" if result.get("observed_value", "") is None else "found otherwise"


def _without_values(raised: str, columns: Iterable[object]) -> str:
    """Return an exception's text without possible values of a row (numbers, quoted texts)."""
    named = {f"{quote}{column}{quote}" for column in columns for quote in "'\""}
    return _WITH_VALUES.sub(lambda found: found[0] if found[0] in named else "'…'", raised)


def _rows(result: Mapping[str, Any]) -> Rows:
    rows = list(result.get("partial_unexpected_index_list") or [])[:SAMPLE]
    return [{"partition": row[POSITION[0]], "offset": row[POSITION[1]]} for row in rows]


def _expected(expectation: Expectation) -> str:
    kwargs = {
        k: v for k, v in expectation.kwargs.items() if not k.startswith("column") and v is not None
    }
    low, high, mostly = (
        kwargs.pop("min_value", None),
        kwargs.pop("max_value", None),
        kwargs.pop("mostly", None),
    )
    if low is not None and high is not None:
        text = f"{_words(low)} to {_words(high)}"
    elif low is not None or high is not None:
        text = f"at least {_words(low)}" if low is not None else f"at most {_words(high)}"
    elif "value_set" in kwargs and "_not_be_in_set" not in expectation.type:
        text = f"one of {_words(kwargs.pop('value_set'))}"
    else:  # expect_column_values_to_not_be_null
        text = "to " + (expectation.type.partition("_to_")[2] or "pass").replace("_", " ")
    for key, value in kwargs.items():
        name = key.replace("_", " ").strip()
        text += f" {_words(value)}" if text.endswith(f" {name}") else f", {name} {_words(value)}"
    return shorten(text) + (f", mostly {mostly}" if mostly is not None else "")


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{k} {_words(v)}" for k, v in value.items()) + ")"
    if isinstance(value, list | tuple | set):
        return ", ".join(_words(v) for v in value)
    return str(value)


def shorten(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def json_safe(value: Any) -> Any:
    """Return the value in JSON's types, long ones shortened, other types as text."""
    if isinstance(value, Mapping):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        items = [json_safe(v) for v in list(value)[:_MOST]]
        return items if len(value) <= _MOST else [*items, f"… {len(value)} in all"]
    if isinstance(value, str):
        return shorten(value)
    if value is None or isinstance(value, bool | int):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else shorten(str(value))


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
    bound = dict(enumerate(suite.expectations))
    for i, b in ours.items():
        kwargs = bound[i].kwargs | b.as_kwargs()
        bound[i] = bound[i].model_copy(update={"kwargs": kwargs})
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
        (failed if expectation.severity == "critical" else warnings).append(failure)
        LOG.warning(
            "quality gate: expectation not met suite=%s severity=%s: %s",
            suite.name,
            expectation.severity,
            failure["message"],
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


def _observed(
    frame: DataFrame, name: str, expectations: Mapping[int, Expectation]
) -> dict[int, Mapping[str, Any]]:
    """Return counts and statistics, with rows where Great Expectations can name them."""
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
    """Return an evaluation's exceptions: listed flat, or by metric id."""
    info = result.exception_info or {}
    infos = (
        [info] if "raised_exception" in info else [i for i in info.values() if isinstance(i, dict)]
    )
    return [i for i in infos if i.get("raised_exception")]


def _exception(result: Any) -> str | None:
    messages = [str(i.get("exception_message")) for i in _raised(result)]
    return "; ".join(dict.fromkeys(shorten(cause_line(m)) for m in messages)) or None
