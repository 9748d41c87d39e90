"""The quality gate: the Great Expectations suite that an hour must pass before it is published.

What a suite's file may say stands in `batch_layer.quality.suite`. Every expectation of it has a verdict; of those that
failed the values and a few rows are kept, so that an operator finds them in Kafka and in the table.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch.common.errors import Refused
from anabranch.common.remote_errors import explain_text, is_away, telling_line
from anabranch.protocol.ledger_row import QualityResult
from batch_layer.quality import one_pass
from batch_layer.quality.row_counts import TYPES, Bounds, RowCountBaseline, plan_bounds
from batch_layer.quality.suite import PLACE, Expectation, build, context, load_suite

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

SAMPLE = 5  # values and rows of a failed expectation that are kept
_LONGEST = 200  # characters of a value or of an exception in a message or in the ledger
_MOST = 20  # items of a list in the ledger
_AT = ("kafka_partition", "kafka_offset")

_VERDICTS = {"result_format": "BOOLEAN_ONLY"}
_VALUES = {"result_format": "SUMMARY", "partial_unexpected_count": SAMPLE}
_ROWS = _VALUES | {"unexpected_index_column_names": list(_AT)}


@dataclass(frozen=True)
class FailedExpectation:
    """An expectation that the rows did not meet, or that could not be evaluated.

    `observed` is the value of an aggregate or up to SAMPLE unexpected values, `unexpected_count` the unexpected rows of
    `element_count`; each is None where Great Expectations gives none. `rows` are up to SAMPLE unexpected rows: where
    they are and their values. `message` is one sentence for an operator; `raised` is why it could not be evaluated.
    """

    type: str
    kwargs: Mapping[str, Any]
    observed: Any
    unexpected_count: int | None
    message: str
    severity: str = "critical"
    element_count: int | None = None
    rows: tuple[Mapping[str, Any], ...] = ()
    raised: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "kwargs": _json_safe(self.kwargs),
            "severity": self.severity,
            "observed": _json_safe(self.observed),
            "unexpected_count": self.unexpected_count,
            "element_count": self.element_count,
            "rows": _json_safe(self.rows),
            "message": self.message,
        } | ({"raised": self.raised} if self.raised else {})


@dataclass(frozen=True)
class Quality:
    """The gate's verdict. `passed` is: no critical expectation failed.

    `met` are the expectations that passed, those in `not_applicable` among them: they had nothing to compare with, each
    for its reason.
    """

    passed: bool
    failed: tuple[FailedExpectation, ...] = ()
    warnings: tuple[FailedExpectation, ...] = ()
    evaluated: int = 0
    suite: str | None = None
    met: tuple[Expectation, ...] = ()
    not_applicable: tuple[tuple[Expectation, str], ...] = ()

    def recorded(self) -> QualityResult:
        """As the ledger keeps it: JSON-safe, and short, a few hundred bytes for each expectation."""
        met = tuple({"type": e.type, "kwargs": _json_safe(e.kwargs), "severity": e.severity} for e in self.met)
        return QualityResult(
            passed=self.passed,
            failed=tuple(f.as_dict() for f in self.failed),
            warnings=tuple(f.as_dict() for f in self.warnings),
            evaluated=self.evaluated,
            suite=self.suite,
            met=met if self.suite is not None else None,
            not_applicable=tuple({"type": e.type, "reason": why} for e, why in self.not_applicable) or None,
        )


def run_suite(frame: DataFrame, path: Path | None, known: RowCountBaseline | None = None) -> Quality:
    """Evaluate the suite of `path` on the rows of an hour; without a file everything passes. `known` is what its row
    count is compared with, where the suite asks for it.

    Each expectation has a verdict; one that raised has failed. Without rows, what speaks of each row passes, and what
    speaks of the columns or of an aggregate is decided as ever (an aggregate of nothing meets no bound). A second
    reading, for the values, is made only of what failed. Raises ConfigurationError as `load_suite`, Refused when Great
    Expectations leaves an expectation out, Transient when the rows could not be read.
    """
    if path is None:
        return Quality(passed=True)
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
            f"{path}: expected {len(suite.expectations)} verdicts of the suite, found {len(verdicts)}; nothing is "
            "published: look for expectations that repeat each other, and report this if there are none"
        )
    raised = {i: _exception(result) for i, result in verdicts.items()}
    unmet = {i: e for i, e in bound.items() if raised[i] or not verdicts[i].success}
    observed = _observed(frame, suite.name, {i: e for i, e in unmet.items() if not raised[i]})
    if sum(map(bool, raised.values())) > 1:
        # Great Expectations gives all that raised in one query the message of the last: ask each on its own.
        for i in filter(raised.get, unmet):
            raised[i] = _exception(_evaluate(frame, suite.name, {i: unmet[i]}, _VALUES)[i]) or raised[i]
    failed: list[FailedExpectation] = []
    warnings: list[FailedExpectation] = []
    for i, expectation in unmet.items():
        failure = _failed(expectation, observed.get(i, {}), raised[i], ours[i].basis if i in ours else None)
        (failed if expectation.severity == "critical" else warnings).append(failure)
        log.warning("quality: suite %s, %s: %s", suite.name, expectation.severity, failure.message)
    met = tuple(e for i, e in bound.items() if i not in unmet)
    without = tuple((bound[i], b.basis) for i, b in ours.items() if not b.applies)
    for expectation, why in without:
        log.info("quality: suite %s: %s does not apply: %s", suite.name, expectation.type, why)
    return Quality(not failed, tuple(failed), tuple(warnings), len(verdicts), suite.name, met, without)


def _bounded(expectation: Expectation, bounds: Bounds | None) -> Expectation:
    if bounds is None:
        return expectation
    return replace(expectation, kwargs={**expectation.kwargs, **bounds.as_kwargs()})


def _observed(frame: DataFrame, name: str, expectations: Mapping[int, Expectation]) -> dict[int, Mapping[str, Any]]:
    """What was found in place of what was expected, with rows where Great Expectations can name them."""
    results = _evaluate(frame, name, expectations, _ROWS)
    # Not every type can name rows: such a one is asked for its values alone.
    again = {i: expectations[i] for i, result in results.items() if _exception(result)}
    results |= _evaluate(frame, name, again, _VALUES)
    return {i: result.result for i, result in results.items()}


def _evaluate(
    frame: DataFrame, name: str, expectations: Mapping[int, Expectation], result_format: Mapping[str, Any]
) -> dict[int, Any]:
    """Great Expectations' result of each, by its place in the file (it returns them in an order of its own)."""
    if not expectations:
        return {}
    one_pass.source_type()
    # Persisted frames would stay in the executors' memory: nobody unpersists them.
    asset = context().data_sources.add_staged_rows("staged", persist=False).add_dataframe_asset("rows")
    batch = asset.add_batch_definition_whole_dataframe("all").get_batch(batch_parameters={"dataframe": frame})
    doing, suite = f"evaluate the suite {name}", build(name, expectations)
    try:
        one_pass.tell(batch, suite.expectation_configurations, result_format)
    except Exception as error:  # of one expectation, a regular expression for instance: evaluated, it says so itself
        _pass_on_if_away(doing, "".join(traceback.format_exception(error)))
    try:
        # Not a ValidationDefinition: it stores the result too, and fails when a value in it (a NumPy bool) is not JSON.
        validation = batch.validate(suite, result_format=dict(result_format))
    except Exception as error:
        _pass_on_if_away(doing, "".join(traceback.format_exception(error)))
        raise
    for result in validation.results:
        for info in _raised(result):
            # Great Expectations takes whatever is thrown for the expectation's own failure, also an S3 that is away.
            _pass_on_if_away(doing, f"{info.get('exception_message')}\n{info.get('exception_traceback')}")
    return {result.expectation_config.meta[PLACE]: result for result in validation.results}


def _pass_on_if_away(doing: str, text: str) -> None:
    """Raises what the text of an exception means when it speaks of a service and not of the rows."""
    if is_away(text):
        raise explain_text(doing, text)


def _raised(result: Any) -> list[Mapping[str, Any]]:
    """What an evaluation raised, if it did. Some expectations give it flat, others by the id of each metric."""
    info = result.exception_info or {}
    infos = [info] if "raised_exception" in info else [i for i in info.values() if isinstance(i, dict)]
    return [i for i in infos if i.get("raised_exception")]


def _exception(result: Any) -> str | None:
    messages = [str(i.get("exception_message")) for i in _raised(result)]
    return "; ".join(dict.fromkeys(_short(telling_line(m)) for m in messages)) or None


def _failed(
    expectation: Expectation, result: Mapping[str, Any], raised: str | None, why: str | None = None
) -> FailedExpectation:
    """Pure: an unmet expectation in words. `why` says where its bounds come from."""
    kwargs = expectation.kwargs
    count, sample = result.get("unexpected_count"), list(result.get("partial_unexpected_list") or [])
    observed = result.get("observed_value", sample or None)
    rows = _rows(result)
    if rows:
        # The values and the rows are two readings, which may take others: the first row shows its own value.
        values = rows[0]["values"]
        sample = [next(iter(values.values())) if len(values) == 1 else values or None]
    if raised:
        outcome = f"could not be evaluated: {raised}"
    elif count is not None and "element_count" in result:
        such_as = f", such as {_short(_words(sample[0]))}" if sample and sample[0] is not None else ""
        at = f" (partition {rows[0]['partition']}, offset {rows[0]['offset']})" if rows else ""
        outcome = f"found {count} of {result['element_count']} rows otherwise{such_as}{at}"
    elif observed is not None:
        outcome = f"found {_short(_words(observed))}"
    elif count is not None:
        outcome = f"found {count} otherwise"
    else:
        outcome = "found no value" if "observed_value" in result else "found otherwise"
    columns = (
        kwargs.get("column_list")
        or kwargs.get("column_set")
        or [kwargs[k] for k in ("column", "column_A", "column_B") if k in kwargs]
    )
    subject = f"({', '.join(str(c) for c in columns)})" if columns else ""
    message = f"{expectation.type}{subject}: expected {_expected(expectation)}, {outcome}{f' ({why})' if why else ''}"
    elements = result.get("element_count")
    return FailedExpectation(
        expectation.type, kwargs, observed, count, message, expectation.severity, elements, rows, raised
    )


def _rows(result: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The unexpected rows that Great Expectations names: where each is, and its values of the columns concerned."""
    return tuple(
        {
            "partition": row[_AT[0]],
            "offset": row[_AT[1]],
            "values": {k: v for k, v in row.items() if k not in _AT},
        }
        for row in list(result.get("partial_unexpected_index_list") or [])[:SAMPLE]
    )


def _expected(expectation: Expectation) -> str:
    kwargs = {k: v for k, v in expectation.kwargs.items() if not k.startswith("column") and v is not None}
    low, high, mostly = kwargs.pop("min_value", None), kwargs.pop("max_value", None), kwargs.pop("mostly", None)
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
    return _short(text) + (f", mostly {mostly}" if mostly is not None else "")


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{k} {_words(v)}" for k, v in value.items()) + ")"
    if isinstance(value, list | tuple | set):
        return ", ".join(_words(v) for v in value)
    return str(value)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def _json_safe(value: Any) -> Any:
    """The value in JSON's own types, long texts and lists cut short; what JSON has no word for (a time, a decimal,
    not-a-number) as text."""
    if isinstance(value, Mapping):
        return {str(k): _json_safe(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        items = [_json_safe(v) for v in list(value)[:_MOST]]
        return items if len(value) <= _MOST else [*items, f"… {len(value)} in all"]
    if isinstance(value, str):
        return _short(value)
    if value is None or isinstance(value, bool | int):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else _short(str(value))
