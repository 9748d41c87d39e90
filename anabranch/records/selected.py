"""The columns of a stream's `select`, computed from a record, as Spark SQL.

Expressions do not depend on the session's settings: they are analyzed with ANSI mode off and in
UTC, and Spark keeps both in the analyzed expression.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.types import DataType

from anabranch.common.errors import ConfigurationError
from anabranch.config import Stream
from anabranch.config.select import KAFKA, SelectedColumn, as_text, is_time
from anabranch.decode.values import FIRST_MICROS, LAST_MICROS
from anabranch.records.safe_sql import unsafe

_BLOCK = 64  # bytes, of SHA-256
_KEYS = "_mask"
_SETTINGS = {"spark.sql.ansi.enabled": "false", "spark.sql.session.timeZone": "UTC"}
_SETTINGS_LOCK = threading.Lock()
# SQL types of the columns of a decoded record that come from Kafka.
_KAFKA_TYPES = {f"kafka_{name}": kind for name, kind in KAFKA.items()} | {
    "kafka_partition": "int",
    "kafka_offset": "bigint",
    "kafka_timestamp": "timestamp",
}
_checked: set[tuple[object, ...]] = set()


def project(
    judged: DataFrame, stream: Stream, secret: bytes | None, others: Sequence[str]
) -> DataFrame:
    """Return the columns of the stream's `select`, then `others`. Raises ConfigurationError, with
    the column, for an expression that Spark cannot analyze or that has another type, and for a hash
    without a secret."""
    spark = judged.sparkSession
    check_selected(spark, stream)
    columns = [f"{_sql(one)} AS `{one.name}`" for one in stream.select or ()]
    with _analysis_settings(spark):
        judged = judged.selectExpr("*", *_times(stream))
        if stream.masks:
            judged = judged.select("*", _keys(spark, stream, secret))
        return judged.selectExpr(*columns, *others)


def _times(stream: Stream) -> list[str]:
    """Return SQL for the times and dates of a record, null outside the calendar."""
    used = {name for one in stream.select or () for name in one.fields}
    times = (c for c in stream.record_columns if c.name in used and is_time(c))
    return [f"{_in_calendar(f'`_row_{c.name}`', c.type)} AS `_at_{c.name}`" for c in times]


def _keys(spark: SparkSession, stream: Stream, secret: bytes | None) -> Column:
    """Return the two keys of HMAC (RFC 2104) as a scalar subquery, so that they are not in Spark's
    plans, UI, event logs and errors, as a literal would be."""
    if secret is None:
        masked = next(one.name for one in stream.select or () if one.masks)
        raise ConfigurationError(
            f"streams/{stream.name}.yaml: select.{masked}.hash: expected masking.secret in "
            "anabranch.yaml, found none"
        )
    key = (hashlib.sha256(secret).digest() if len(secret) > _BLOCK else secret).ljust(_BLOCK, b"\0")
    inner, outer = (bytes(b ^ mask for b in key) for mask in (0x36, 0x5C))
    keys = pa.table({_KEYS: pa.array([{"inner": inner, "outer": outer}])})
    return spark.createDataFrame(keys).scalar().alias(_KEYS)


def check_selected(spark: SparkSession, stream: Stream) -> None:
    """Check the stream's expressions, once a process. Raises ConfigurationError."""
    key = (stream.name, stream.select, stream.record_columns)
    if key in _checked:
        return
    with _analysis_settings(spark):
        fields = (f"CAST(NULL AS {c.type}) AS `_row_{c.name}`" for c in stream.record_columns)
        empty = spark.range(0).selectExpr(
            *fields, *(f"CAST(NULL AS {k}) AS {n}" for n, k in _KAFKA_TYPES.items())
        )
        # Times are separate columns, so that expressions refer to them.
        empty = empty.selectExpr("*", *_times(stream))
        for one in stream.select or ():
            _check(empty, stream, one)
    _checked.add(key)


def _check(empty: DataFrame, stream: Stream, one: SelectedColumn) -> None:
    where = f"streams/{stream.name}.yaml: select.{one.name}"
    try:
        made = empty.selectExpr(f"{one.sql} AS made")
        found, plan = made.schema["made"].dataType, made._jdf.queryExecution().analyzed()
    except (AnalysisException, ParseException) as error:
        raise ConfigurationError(
            f"{where}: expected an expression that Spark can analyze, found: "
            f"{str(error).splitlines()[0]}"
        ) from None
    expected = DataType.fromDDL(one.type)
    if one.is_checked and found != expected:
        raise ConfigurationError(
            f"{where}: expected an expression of type {expected.simpleString().upper()}, found "
            f"{found.simpleString().upper()}; change its type, or convert it with CAST(... AS TYPE)"
        )
    if one.kind in ("sql", "hash", "truncate") and (problem := unsafe(plan.expressions().apply(0))):
        raise ConfigurationError(f"{where}: expected {problem}, found: {one.sql}")


@contextmanager
def _analysis_settings(spark: SparkSession) -> Iterator[None]:
    """Analyze expressions in the block with ANSI mode off and in UTC."""
    with _SETTINGS_LOCK:
        before = {key: str(spark.conf.get(key)) for key in _SETTINGS}
        changed = {key: value for key, value in _SETTINGS.items() if before[key] != value}
        for key, value in changed.items():
            spark.conf.set(key, value)
        try:
            yield
        finally:
            for key in changed:
                spark.conf.set(key, before[key])


def _sql(one: SelectedColumn) -> str:
    if one.masks:
        # HMAC-SHA-256 (RFC 2104), as 64 hexadecimal digits; null for null.
        inner = f"unhex(sha2(concat({_KEYS}.inner, {one.sql}), 256))"
        return f"sha2(concat({_KEYS}.outer, {inner}), 256)"
    return _bounded(one) if one.is_checked else one.sql


def _bounded(one: SelectedColumn) -> str:
    """Return SQL for an expression's value, null if other programs could not read it."""
    sql = one.sql
    if one.type == "string":
        return as_text(sql)
    if one.type in ("timestamp", "date"):
        return _in_calendar(sql, one.type)
    if one.type in ("double", "float"):
        return f"IF({sql} - {sql} = 0, {sql}, NULL)"
    return sql


def _in_calendar(sql: str, kind: str) -> str:
    if kind == "timestamp":
        # Not BETWEEN: Spark plans an extra column for it, which is computed in all branches.
        at = f"unix_micros({sql})"
        return f"IF({at} >= {FIRST_MICROS}L AND {at} <= {LAST_MICROS}L, {sql}, NULL)"
    return f"IF({sql} >= DATE'0001-01-01' AND {sql} <= DATE'9999-12-31', {sql}, NULL)"
