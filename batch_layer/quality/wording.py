"""Descriptions of failed expectations, for messages and for the ledger. Pure.

Neither has a value of a row: the ledger outlives rows that are erased or expire. Positions lead to
the values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from batch_layer.quality.suite import Expectation

SAMPLE = 5  # rows named of a failed expectation
_LONGEST = 200  # characters of an argument or of an exception in a message or in the ledger
_MOST = 20  # items of a list in the ledger
POSITION = ("kafka_partition", "kafka_offset")

Rows = tuple[Mapping[str, Any], ...]

# Expectations whose observed value is computed from all rows. The observed value of others, such as
# a maximum, is a value of a row.
_STATISTICS = re.compile(
    "expect_table_|expect_column_(mean|sum|stdev|unique_value_count|proportion_of|kl_divergence)|unexpected_rows_"
)
# Exceptions have values in quotes, which may contain quotes or be cut short, and numbers without
# quotes.
_VALUES = re.compile(r"""'.*['…]|".*["…]|(?<!\w)[-+]?\d(?:[\w.,:+-]*\w)?""", re.DOTALL)


@dataclass(frozen=True)
class FailedExpectation:
    """An expectation that the rows did not meet, or that could not be evaluated.

    `observed`: a count or another statistic. `unexpected_count`: the number of unexpected rows
    among `element_count` rows. Each is None if Great Expectations gives none. `rows`: the positions
    of up to SAMPLE unexpected rows. `message`: one sentence for an operator. `raised`: why it could
    not be evaluated.
    """

    type: str
    kwargs: Mapping[str, Any]
    observed: Any
    unexpected_count: int | None
    message: str
    severity: str = "critical"
    element_count: int | None = None
    rows: Rows = ()
    raised: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "kwargs": json_safe(self.kwargs),
            "severity": self.severity,
            "observed": json_safe(self.observed),
            "unexpected_count": self.unexpected_count,
            "element_count": self.element_count,
            "rows": json_safe(self.rows),
            "message": self.message,
        } | ({"raised": self.raised} if self.raised else {})


def describe_met(expectation: Expectation) -> dict[str, Any]:
    """Return the ledger's entry of an expectation that the rows met. Pure."""
    kwargs = json_safe(expectation.kwargs)
    return {"type": expectation.type, "kwargs": kwargs, "severity": expectation.severity}


def describe_failure(
    expectation: Expectation, result: Mapping[str, Any], raised: str | None, why: str | None = None
) -> FailedExpectation:
    """Describe an unmet expectation for an operator. `why`: the source of its bounds. Pure."""
    kwargs = expectation.kwargs
    count, rows = result.get("unexpected_count"), _rows(result)
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
    elements = result.get("element_count")
    return FailedExpectation(
        expectation.type,
        kwargs,
        observed,
        count,
        message,
        expectation.severity,
        elements,
        rows,
        raised,
    )


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
    """Return an exception's text without possible values of a row: numbers, and quoted texts other
    than a column's name."""
    named = {f"{quote}{column}{quote}" for column in columns for quote in "'\""}
    return _VALUES.sub(lambda found: found[0] if found[0] in named else "'…'", raised)


def _rows(result: Mapping[str, Any]) -> Rows:
    rows = list(result.get("partial_unexpected_index_list") or [])[:SAMPLE]
    return tuple({"partition": row[POSITION[0]], "offset": row[POSITION[1]]} for row in rows)


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
    """Return the value in JSON's types, with long texts and lists shortened; other types (time,
    decimal, NaN) as text."""
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
