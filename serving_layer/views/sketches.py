"""Sketches of distinct values (HLL of Apache DataSketches, as in Spark) as DuckDB functions."""

from __future__ import annotations

from collections.abc import Sequence

import duckdb
from datasketches import hll_sketch, hll_union, tgt_hll_type

from serving_layer.views.sql import ESTIMATE, LG_K, SKETCH_TEXT, SKETCH_WHOLE


def sketch(values: Sequence[str] | Sequence[int]) -> bytes:
    """Return a sketch of values, in the bytes that Spark's `hll_union_agg` reads: text as UTF-8,
    integers as 64 bits."""
    made = hll_sketch(LG_K, tgt_hll_type.HLL_8)
    for value in values:
        made.update(value)
    return bytes(made.serialize_compact())


def estimate(sketches: Sequence[bytes]) -> int:
    """Return the estimated number of distinct values in several sketches, from their union."""
    union = hll_union(LG_K)
    for one in sketches:
        union.update(hll_sketch.deserialize(bytes(one)))
    estimated: float = union.get_result(tgt_hll_type.HLL_8).get_estimate()
    return round(estimated)


def add_functions(connection: duckdb.DuckDBPyConnection) -> None:
    """Register the functions of `serving_layer.views.sql` with a connection."""
    connection.create_function(SKETCH_TEXT, sketch, ["VARCHAR[]"], "BLOB")
    connection.create_function(SKETCH_WHOLE, sketch, ["BIGINT[]"], "BLOB")
    connection.create_function(ESTIMATE, estimate, ["BLOB[]"], "BIGINT")
