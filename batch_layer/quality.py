"""The quality gate: the Great Expectations suite that an hour must pass before it is published.

The file is in Great Expectations' own vocabulary: `name` and `expectations`, each a `type`, its `kwargs`, and perhaps a
`severity`: `critical` (also when omitted) refuses the hour, `warning` and `info` are recorded and let it pass. Great
Expectations itself logs and drops what it cannot load, so the file is checked here first: nothing is ever left out.

Its import takes seconds, hence only inside functions; it sends nothing and writes nothing to disk.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from anabranch.errors import ConfigurationError, Refused
from anabranch.neighbours import explain_text, is_away, telling_line

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

SEVERITIES = ("critical", "warning", "info")
SAMPLE = 5  # values of a failed expectation that are kept
_LONGEST = 200  # characters of a value or of an exception in a message
_SUITE_KEYS = {"name", "expectations", "meta", "notes"}
_ENTRY_KEYS = {"type", "kwargs", "severity", "meta", "notes", "description"}
# Great Expectations takes these among the kwargs too, where they would override what the entry or the gate says.
_NOT_KWARGS = {"id", "batch_id", "catch_exceptions", "rendered_content", "result_format", "windows"} | (
    _ENTRY_KEYS - {"type", "kwargs"}
)
_PLACE = "anabranch_place"  # in an expectation's meta: its place in the file


@dataclass(frozen=True)
class Expectation:
    """One entry of a suite's file, known to load."""

    type: str
    kwargs: Mapping[str, Any]
    severity: str = "critical"


@dataclass(frozen=True)
class Suite:
    """A suite's file: every entry of it, in the file's order; at least one."""

    name: str
    expectations: tuple[Expectation, ...]


@dataclass(frozen=True)
class FailedExpectation:
    """An expectation that the rows did not meet, or that could not be evaluated.

    `observed` is the value of an aggregate or up to SAMPLE unexpected values, `unexpected_count` the unexpected rows;
    either is None where Great Expectations gives none. `message` is one sentence for an operator.
    """

    type: str
    kwargs: Mapping[str, Any]
    observed: Any
    unexpected_count: int | None
    message: str

    def as_dict(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "kwargs": _json_safe(self.kwargs),
            "observed": _json_safe(self.observed),
            "unexpected_count": self.unexpected_count,
            "message": self.message,
        }


@dataclass(frozen=True)
class Quality:
    """The gate's verdict. `passed` is: no critical expectation failed."""

    passed: bool
    failed: tuple[FailedExpectation, ...] = ()
    warnings: tuple[FailedExpectation, ...] = ()
    evaluated: int = 0

    def as_dict(self) -> dict[str, Any]:
        """JSON-safe, for the ledger."""
        return {
            "passed": self.passed,
            "failed": [f.as_dict() for f in self.failed],
            "warnings": [f.as_dict() for f in self.warnings],
            "evaluated": self.evaluated,
        }


def load_suite(path: Path) -> Suite:
    """Read a suite's file. Raises ConfigurationError, naming file and entry, unless all of it loads."""
    data = _read(path)
    _only_keys(str(path), data, _SUITE_KEYS)
    name, entries = data.get("name"), data.get("expectations")
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"{path}: name: expected a text, found {name!r}")
    if not isinstance(entries, list) or not entries:
        raise ConfigurationError(f"{path}: expectations: expected a list of at least one, found {entries!r}")
    suite = Suite(name, tuple(_parse(f"{path}: expectations[{i}]", entry) for i, entry in enumerate(entries)))
    loaded = len(_build(suite.name, dict(enumerate(suite.expectations))).expectations)
    if loaded != len(entries):
        raise ConfigurationError(f"{path}: expectations: expected all {len(entries)} to load, found {loaded}")
    return suite


def run_suite(frame: DataFrame, path: Path | None) -> Quality:
    """Evaluate the suite of `path` on the rows; without a file everything passes.

    Each expectation has a verdict; one that raised has failed. Without rows, what speaks of each row passes, and what
    speaks of the columns or of an aggregate is decided as ever (an aggregate of nothing meets no bound). A second
    reading, for the values, is made only of what failed. Raises ConfigurationError as `load_suite`, Refused when Great
    Expectations leaves an expectation out, Transient when the rows could not be read.
    """
    if path is None:
        return Quality(passed=True)
    suite = load_suite(path)
    verdicts = _evaluate(frame, suite.name, dict(enumerate(suite.expectations)), {"result_format": "BOOLEAN_ONLY"})
    if len(verdicts) != len(suite.expectations):
        raise Refused(f"{path}: expected {len(suite.expectations)} verdicts of the suite, found {len(verdicts)}")
    raised = {i: _exception(result) for i, result in verdicts.items()}
    unmet = {i: e for i, e in enumerate(suite.expectations) if raised[i] or not verdicts[i].success}
    values = {"result_format": "SUMMARY", "partial_unexpected_count": SAMPLE}
    observed = _evaluate(frame, suite.name, {i: e for i, e in unmet.items() if not raised[i]}, values)
    if sum(map(bool, raised.values())) > 1:
        # Great Expectations gives all that raised in one query the message of the last: ask each on its own.
        for i in filter(raised.get, unmet):
            raised[i] = _exception(_evaluate(frame, suite.name, {i: unmet[i]}, values)[i]) or raised[i]
    failed: list[FailedExpectation] = []
    warnings: list[FailedExpectation] = []
    for i, expectation in unmet.items():
        found = _failed(expectation, observed[i].result if i in observed else {}, raised[i])
        (failed if expectation.severity == "critical" else warnings).append(found)
        log.warning("quality: suite %s, %s: %s", suite.name, expectation.severity, found.message)
    return Quality(not failed, tuple(failed), tuple(warnings), len(verdicts))


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice is an error; elsewhere the second silently replaces the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"the key {twice!r} twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path}: expected a readable suite of expectations, found: {error}") from error
    if not isinstance(data, dict):
        raise ConfigurationError(f"{path}: expected a mapping of keys, found {type(data).__name__}")
    return data


def _only_keys(where: str, data: Mapping[Any, Any], known: Iterable[str]) -> None:
    unknown = sorted(str(key) for key in data if key not in known)
    if unknown:
        raise ConfigurationError(f"{where}: expected only the keys {', '.join(sorted(known))}, found {unknown[0]}")


def _parse(where: str, entry: Any) -> Expectation:
    """One entry, checked by Great Expectations' own model of its type."""
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
        raise ConfigurationError(f"{where}: expected a type and its kwargs, found {entry!r}")
    where = f"{where} ({entry['type']})"
    _only_keys(where, entry, _ENTRY_KEYS)
    kwargs, severity = entry.get("kwargs"), entry.get("severity", "critical")
    if severity not in SEVERITIES:
        raise ConfigurationError(f"{where}: severity: expected one of {', '.join(SEVERITIES)}, found {severity!r}")
    if not isinstance(kwargs, dict):
        raise ConfigurationError(f"{where}: kwargs: expected a mapping, found {kwargs!r}")
    misplaced = sorted(_NOT_KWARGS.intersection(kwargs))
    if misplaced:
        raise ConfigurationError(f"{where}: kwargs: expected none but the expectation's own, found {misplaced[0]}")
    parameters = [k for k, value in kwargs.items() if isinstance(value, dict) and "$PARAMETER" in value]
    if parameters:
        raise ConfigurationError(f"{where}: kwargs: {parameters[0]}: expected a value, found a suite parameter")
    expectation = Expectation(entry["type"], kwargs, severity)
    gx = _great_expectations()
    try:
        _configuration(expectation).to_domain_obj()
    except gx.exceptions.ExpectationNotFoundError:
        raise ConfigurationError(
            f"{where}: type: expected one that Great Expectations {gx.__version__} knows, found {expectation.type!r}"
        ) from None
    except Exception as error:  # pydantic's, Python's and its own: there is no common base
        raise ConfigurationError(
            f"{where}: kwargs: expected what this type accepts, found {kwargs!r}: {_reason(error)}"
        ) from error
    return expectation


def _reason(error: Exception) -> str:
    errors = getattr(error, "errors", None)
    if callable(errors):  # a pydantic error: the place and the complaint, without its types
        return "; ".join(f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in errors())
    return str(error)


@cache
def _great_expectations() -> Any:
    """The library, imported quiet: no analytics, no log lines of its own (each failure is logged here instead)."""
    os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read at import
    import great_expectations
    from great_expectations.validator import validation_graph

    logging.getLogger("great_expectations").setLevel(logging.CRITICAL)
    # It reads the rows three times when a reading fails, unheard; whoever rebuilds the hour tries again, and says so.
    validation_graph.MAX_METRIC_COMPUTATION_RETRIES = 1
    return great_expectations


def _configuration(expectation: Expectation, place: int = 0) -> Any:
    _great_expectations()
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration

    kwargs = copy.deepcopy(dict(expectation.kwargs))
    return ExpectationConfiguration(expectation.type, kwargs, severity=expectation.severity, meta={_PLACE: place})


def _build(name: str, expectations: Mapping[int, Expectation]) -> Any:
    gx = _great_expectations()
    return gx.ExpectationSuite(name=name, expectations=[_configuration(e, place) for place, e in expectations.items()])


def _evaluate(
    frame: DataFrame, name: str, expectations: Mapping[int, Expectation], result_format: Mapping[str, Any]
) -> dict[int, Any]:
    """Great Expectations' result of each, by its place in the file (it returns them in an order of its own)."""
    if not expectations:
        return {}
    # Persisted frames would stay in the executors' memory: nobody unpersists them.
    asset = _context().data_sources.add_spark("staged", persist=False).add_dataframe_asset("rows")
    batch = asset.add_batch_definition_whole_dataframe("all").get_batch(batch_parameters={"dataframe": frame})
    doing = f"evaluate the suite {name}"
    try:
        # Not a ValidationDefinition: it stores the result too, and fails when a value in it (a NumPy bool) is not JSON.
        found = batch.validate(_build(name, expectations), result_format=dict(result_format))
    except Exception as error:
        _pass_on_if_away(doing, "".join(traceback.format_exception(error)))
        raise
    for result in found.results:
        for info in _raised(result):
            # Great Expectations takes whatever is thrown for the expectation's own failure, also an S3 that is away.
            _pass_on_if_away(doing, f"{info.get('exception_message')}\n{info.get('exception_traceback')}")
    return {result.expectation_config.meta[_PLACE]: result for result in found.results}


def _context() -> Any:
    """A context in memory alone: the default one would make a folder for a documentation site."""
    gx = _great_expectations()
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


def _pass_on_if_away(doing: str, text: str) -> None:
    """Raises what the text of an exception means when it speaks of a neighbour and not of the rows."""
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


def _failed(expectation: Expectation, result: Mapping[str, Any], raised: str | None) -> FailedExpectation:
    """Pure: an unmet expectation in words."""
    kwargs = expectation.kwargs
    count, sample = result.get("unexpected_count"), list(result.get("partial_unexpected_list") or [])
    observed = result.get("observed_value", sample or None)
    if raised:
        found = f"could not be evaluated: {raised}"
    elif count is not None and "element_count" in result:
        such_as = f", such as {_short(_words(sample[0]))}" if sample and sample[0] is not None else ""
        found = f"found {count} of {result['element_count']} rows otherwise{such_as}"
    elif observed is not None:
        found = f"found {_short(_words(observed))}"
    elif count is not None:
        found = f"found {count} otherwise"
    else:
        found = "found no value" if "observed_value" in result else "found otherwise"
    columns = (
        kwargs.get("column_list")
        or kwargs.get("column_set")
        or [kwargs[k] for k in ("column", "column_A", "column_B") if k in kwargs]
    )
    subject = f"({', '.join(str(c) for c in columns)})" if columns else ""
    message = f"{expectation.type}{subject}: expected {_expected(expectation)}, {found}"
    return FailedExpectation(expectation.type, kwargs, observed, count, message)


def _expected(expectation: Expectation) -> str:
    kwargs = {k: v for k, v in expectation.kwargs.items() if not k.startswith("column") and v is not None}
    low, high, mostly = kwargs.pop("min_value", None), kwargs.pop("max_value", None), kwargs.pop("mostly", None)
    if low is not None and high is not None:
        said = f"{_words(low)} to {_words(high)}"
    elif low is not None or high is not None:
        said = f"at least {_words(low)}" if low is not None else f"at most {_words(high)}"
    elif "value_set" in kwargs and "_not_be_in_set" not in expectation.type:
        said = f"one of {_words(kwargs.pop('value_set'))}"
    else:  # expect_column_values_to_not_be_null
        said = "to " + (expectation.type.partition("_to_")[2] or "pass").replace("_", " ")
    for key, value in kwargs.items():
        name = key.replace("_", " ").strip()
        said += f" {_words(value)}" if said.endswith(f" {name}") else f", {name} {_words(value)}"
    return _short(said) + (f", mostly {mostly}" if mostly is not None else "")


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{k} {_words(v)}" for k, v in value.items()) + ")"
    if isinstance(value, list | tuple | set):
        return ", ".join(_words(v) for v in value)
    return str(value)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "…"


def _json_safe(value: Any) -> Any:
    """The value in JSON's own types; what JSON has no word for (a time, a decimal, not-a-number) as text."""
    if isinstance(value, Mapping):
        return {str(k): _json_safe(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_json_safe(v) for v in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    return value if isinstance(value, float) and math.isfinite(value) else str(value)
