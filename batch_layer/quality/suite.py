"""A suite's file, in Great Expectations' vocabulary: loaded completely or not at all.

It has a `name` and `expectations`, each a `type`, its `kwargs`, and perhaps a `severity`:
`critical` (also when omitted) refuses the hour, `warning` and `info` are recorded and let it pass.
Two types of Anabranch's own compare row counts (`batch_layer.quality.row_counts`). Great
Expectations itself logs and drops an expectation that it cannot load, so the file is checked here
first: nothing is ever left out.

The import of Great Expectations takes seconds, so only functions import it. It sends nothing and
writes nothing to disk.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from anabranch.common import process
from anabranch.common.errors import ConfigurationError
from anabranch.config.loading import load_mapping
from anabranch.config.mistakes import unknown_key
from batch_layer.quality import row_counts

SEVERITIES = ("critical", "warning", "info")
_SUITE_KEYS = {"name", "expectations", "meta", "notes"}
_ENTRY_KEYS = {"type", "kwargs", "severity", "meta", "notes", "description"}
# Great Expectations also accepts these as kwargs, which would override the entry or the gate.
_NOT_KWARGS = {
    "id",
    "batch_id",
    "catch_exceptions",
    "rendered_content",
    "result_format",
    "windows",
} | (_ENTRY_KEYS - {"type", "kwargs"})
PLACE = "anabranch_place"  # in an expectation's meta: its place in the file


@dataclass(frozen=True)
class Expectation:
    """One entry of a suite's file; it is known to load."""

    type: str
    kwargs: Mapping[str, Any]
    severity: str = "critical"


@dataclass(frozen=True)
class Suite:
    """A suite's file: all its entries, at least one, in the file's order."""

    name: str
    expectations: tuple[Expectation, ...]


def load_suite(path: Path) -> Suite:
    """Read a suite's file. Raises ConfigurationError, naming file and entry, unless all of it
    loads."""
    data = load_mapping(path, "a readable suite of expectations")
    _only_keys(str(path), data, _SUITE_KEYS)
    name, entries = data.get("name"), data.get("expectations")
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"{path}: name: expected a text, found {name!r}")
    if not isinstance(entries, list) or not entries:
        raise ConfigurationError(
            f"{path}: expectations: expected a list of at least one, found {entries!r}"
        )
    suite = Suite(
        name, tuple(_parse(f"{path}: expectations[{i}]", entry) for i, entry in enumerate(entries))
    )
    loaded = len(build(suite.name, dict(enumerate(suite.expectations))).expectations)
    if loaded != len(entries):
        raise ConfigurationError(
            f"{path}: expectations: expected all {len(entries)} to load, found {loaded}"
        )
    return suite


def _only_keys(where: str, data: Mapping[Any, Any], known: Iterable[str]) -> None:
    unknown = sorted(str(key) for key in data if key not in known)
    if unknown:
        raise ConfigurationError(unknown_key(unknown[0], sorted(known), where))


def _parse(where: str, entry: Any) -> Expectation:
    """Parse one entry. Great Expectations' own model of its type checks it. Raises
    ConfigurationError."""
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
        raise ConfigurationError(f"{where}: expected a type and its kwargs, found {entry!r}")
    where = f"{where} ({entry['type']})"
    _only_keys(where, entry, _ENTRY_KEYS)
    kwargs, severity = entry.get("kwargs"), entry.get("severity", "critical")
    if severity not in SEVERITIES:
        raise ConfigurationError(
            f"{where}: severity: expected one of {', '.join(SEVERITIES)}, found {severity!r}"
        )
    if not isinstance(kwargs, dict):
        raise ConfigurationError(f"{where}: kwargs: expected a mapping, found {kwargs!r}")
    misplaced = sorted(_NOT_KWARGS.intersection(kwargs))
    if misplaced:
        raise ConfigurationError(
            f"{where}: kwargs: expected only the expectation's own arguments, found {misplaced[0]}"
        )
    if entry["type"] in row_counts.TYPES and (
        given := sorted({"min_value", "max_value"} & set(kwargs))
    ):
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
    expectation = Expectation(entry["type"], kwargs, severity)
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
    return expectation


def _reason(error: Exception) -> str:
    errors = getattr(error, "errors", None)
    if callable(errors):  # a pydantic error: the place and the complaint, without its types
        return "; ".join(
            f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in errors()
        )
    return str(error)


@cache
def great_expectations() -> Any:
    """Return the library, imported without analytics and without its own log lines: the gate logs
    each failure instead."""
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
    row_counts.register()
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
    """Return a context in memory only: the default one would make a folder for a documentation
    site."""
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
