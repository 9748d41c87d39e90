"""Compute the counts of a suite's expectations in one pass over the rows.

Great Expectations evaluates metrics. It queries the rows for their number, for the aggregates of
single columns, for the unexpected values of single columns, and twice for each expectation of
several columns. Here its own expressions run in one query, and its execution engine gets the values
before it evaluates the suite. The engine computes all other metrics itself: types outside TYPES,
rows chosen by `row_condition`, missing columns, and expressions that Spark rejects.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, reduce
from operator import and_, or_
from typing import Any, ClassVar, Literal

from pyspark.sql import Column
from pyspark.sql import functions as F

from batch_layer.quality import row_counts
from batch_layer.quality.suite import great_expectations

TYPES = frozenset(
    {
        "expect_column_max_to_be_between",
        "expect_column_mean_to_be_between",
        "expect_column_min_to_be_between",
        "expect_column_pair_values_a_to_be_greater_than_b",
        "expect_column_pair_values_to_be_equal",
        "expect_column_pair_values_to_be_in_set",
        "expect_column_proportion_of_non_null_values_to_be_between",
        "expect_column_stdev_to_be_between",
        "expect_column_sum_to_be_between",
        "expect_column_to_exist",
        "expect_column_value_lengths_to_be_between",
        "expect_column_value_lengths_to_equal",
        "expect_column_values_to_be_between",
        "expect_column_values_to_be_in_set",
        "expect_column_values_to_be_null",
        "expect_column_values_to_match_regex",
        "expect_column_values_to_match_regex_list",
        "expect_column_values_to_not_be_in_set",
        "expect_column_values_to_not_be_null",
        "expect_column_values_to_not_match_regex",
        "expect_column_values_to_not_match_regex_list",
        "expect_multicolumn_sum_to_equal",
        "expect_multicolumn_values_to_be_equal",
        "expect_select_column_values_to_be_unique_within_record",
        "expect_table_column_count_to_be_between",
        "expect_table_column_count_to_equal",
        "expect_table_columns_to_match_ordered_list",
        "expect_table_columns_to_match_set",
        "expect_table_row_count_to_be_between",
        "expect_table_row_count_to_equal",
        *row_counts.TYPES,
    }
)
"""The types whose counts are computed in the one pass. A test compares each with Great
Expectations' own execution."""

_ROW_COUNT = "table.row_count"
_UNEXPECTED, _FILTERED = ".unexpected_count", ".filtered_row_count"
_READ_NO_ROW = (
    ".condition",
    ".aggregate_fn",
    ".value_length.map",
    "table.columns",
    "table.column_types",
)
_DOMAIN = {"batch_id", "ignore_row_if"}


@cache
def source_type() -> Any:
    """Return Great Expectations' source of Spark frames, with an execution engine that accepts
    precomputed metrics."""
    great_expectations()
    from great_expectations.datasource.fluent import SparkDatasource
    from great_expectations.execution_engine import SparkDFExecutionEngine

    class PrecomputedEngine(SparkDFExecutionEngine):  # type: ignore[misc]
        """An engine that computes only metrics that were not precomputed."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.precomputed: dict[Any, Any] = {}

        def resolve_metrics(
            self,
            metrics_to_resolve: Iterable[Any],
            metrics: Any = None,
            runtime_configuration: Any = None,
        ) -> dict[Any, Any]:
            metrics_to_resolve = list(metrics_to_resolve)
            precomputed = {
                m.id: self.precomputed[m.id] for m in metrics_to_resolve if m.id in self.precomputed
            }
            rest = [m for m in metrics_to_resolve if m.id not in precomputed]
            return dict(super().resolve_metrics(rest, metrics, runtime_configuration)) | precomputed

    class StagedRows(SparkDatasource):  # type: ignore[misc]
        type: Literal["staged_rows"] = "staged_rows"
        execution_engine_override: ClassVar[Any] = PrecomputedEngine

    return StagedRows


def precompute_counts(
    batch: Any, configurations: Iterable[Any], result_format: Mapping[str, Any]
) -> None:
    """Compute the counts of the expectations of TYPES in one query over `batch`, a batch of
    StagedRows, and pass them to its engine.

    Reads no row if there is nothing to count. Raises Spark's errors if the query fails; the engine
    then gets no counts and computes all of them itself.
    """
    great_expectations()
    from great_expectations.execution_engine.execution_engine import MetricComputationConfiguration

    engine, domain = batch.data.execution_engine, {"batch_id": batch.id}
    engine.batch_manager.load_batch_list([batch])
    bundle: dict[Any, Any] = {}
    for configuration in configurations:
        if configuration.type not in TYPES or configuration.kwargs.get("row_condition"):
            continue
        try:
            counts = {
                m.id: (m, column)
                for m, column in _counts(engine, batch.id, configuration, result_format)
            }
            if counts:
                batch.data.dataframe.agg(
                    *(column for _, column in counts.values())
                )  # analysed, not run
        except Exception:  # the engine's evaluation raises and reports it again
            continue
        for key, (metric, column) in counts.items():
            bundle[key] = MetricComputationConfiguration(metric, column, {}, domain, {})
    engine.precomputed |= engine.resolve_metric_bundle(list(bundle.values()))


def _counts(
    engine: Any, batch_id: str, configuration: Any, result_format: Mapping[str, Any]
) -> Iterator[tuple[Any, Column]]:
    """Return the metrics of an expectation that are aggregates of the rows, each with its
    expression."""
    from great_expectations.validator.validation_graph import ValidationGraph

    runtime = {"result_format": dict(result_format)}
    configuration = copy.deepcopy(configuration)
    configuration.kwargs["batch_id"] = batch_id
    needed = configuration.to_domain_obj().get_validation_dependencies(engine, runtime)
    for metric in needed.get_metric_configurations():
        ValidationGraph(engine).build_metric_dependency_graph(metric, runtime)
        yield from _aggregates(engine, metric)


def _aggregates(engine: Any, metric: Any) -> Iterator[tuple[Any, Column]]:
    needs = dict(metric.metric_dependencies)
    if "metric_partial_fn" in needs:
        yield metric, _expression(engine, needs["metric_partial_fn"])[0]
    elif metric.metric_name.endswith((_UNEXPECTED, _FILTERED)):
        condition = _expression(engine, needs["unexpected_condition"])
        yield metric, _count_of_columns(metric.metric_name.endswith(_FILTERED), *condition)
    for other in needs.values():  # the row count, which every metric names
        yield from _aggregates(engine, other)


def _expression(engine: Any, metric: Any) -> tuple[Column, Mapping[str, Any], Mapping[str, Any]]:
    """Return an aggregate or a condition as Great Expectations makes it, with its domain. Raises
    ValueError if the domain is not all rows, or if a metric that reads rows is needed."""
    column, domain, accessor = _without_rows(engine, metric)
    if beyond := {key for key, value in domain.items() if value} - _DOMAIN:
        raise ValueError(
            f"{metric.metric_name}: expected all rows, found {', '.join(sorted(beyond))}"
        )
    return column, domain, accessor


def _without_rows(engine: Any, metric: Any) -> Any:
    """Return a metric's value. Also pass it to the engine, so that it builds no expression
    twice."""
    if not metric.metric_name.endswith(_READ_NO_ROW):
        raise ValueError(f"{metric.metric_name}: expected a metric that reads no row")
    if metric.id not in engine.precomputed:
        # Each of them depends on the row count, and none uses it.
        needs = {k: m for k, m in metric.metric_dependencies.items() if m.metric_name != _ROW_COUNT}
        metric.metric_dependencies = needs
        values = {m.id: _without_rows(engine, m) for m in needs.values()}
        engine.precomputed |= engine.resolve_metrics([metric], values)
    return engine.precomputed[metric.id]


def _count_of_columns(
    filtered: bool, unexpected: Column, domain: Mapping[str, Any], accessor: Mapping[str, Any]
) -> Column:
    """Return an expression that counts the rows that an expectation of several columns considers,
    or, unless `filtered`, the unexpected ones among them."""
    columns = accessor.get("column_list") or (accessor["column_A"], accessor["column_B"])
    nulls = [F.col(name).isNull() for name in columns]
    every, some, none = ~reduce(and_, nulls), ~reduce(or_, nulls), F.lit(True)
    kept = {
        "both_values_are_missing": every,
        "all_values_are_missing": every,
        "either_value_is_missing": some,
        "any_value_is_missing": some,
        "neither": none,
        "never": none,
    }[domain["ignore_row_if"]]
    return F.count(F.when(kept if filtered else kept & unexpected, True))
