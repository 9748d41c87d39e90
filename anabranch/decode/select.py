"""The columns of a stream's `select`, computed from a batch of decoded records by DuckDB.

A record whose expression fails, or has a value that other programs could not read, is a dead letter
with the column's name. So is one with a key or header that is no UTF-8, for a STRING.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from anabranch.config.select import KAFKA_NAMES, SelectedColumn, connection
from anabranch.decode import values
from anabranch.decode.inputs import headers_of
from anabranch.decode.values import MICROS

_HEADERS = values.arrow_type(KAFKA_NAMES["kafka_headers"])

_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896  # days since 1970, of the years 1 to 9999


class Selection:
    """The selected columns of one stream, computed by one process."""

    def __init__(
        self, selected: Sequence[SelectedColumn], topic: str, secret: bytes | None
    ) -> None:
        self._selected, self._topic, self._secret = selected, topic, secret
        self._computed = [one for one in selected if one.kind in ("sql", "hash", "truncate")]
        self._connection = connection() if self._computed else None
        self._reads_headers = any("kafka_headers" in one.sql.lower() for one in self._computed)
        self._fields = dict.fromkeys(name for one in self._computed for name in one.fields)

    def columns(
        self, batch: pa.RecordBatch, at: pa.Array, read: Mapping[str, pa.Array]
    ) -> tuple[dict[str, pa.Array], dict[str, list[int]]]:
        """Return the selected columns of a batch, from the values `read` of its fields and its
        timestamps `at`; and by column the indexes of the records for which it has no value."""
        computed, bad = self._compute(batch, at, read)
        columns = dict[str, pa.Array]()
        for one in self._selected:
            if one.kind == "field":
                columns[one.name] = read[one.sql]
            elif one.name in computed:
                columns[one.name] = computed[one.name]
            else:
                columns[one.name], no_text = self._of_kafka(one, batch)
                if no_text:
                    bad[one.name] = no_text
        return columns, bad

    def _of_kafka(self, one: SelectedColumn, batch: pa.RecordBatch) -> tuple[pa.Array, list[int]]:
        """Return values of Kafka's metadata, and the indexes of those that are no text."""
        if one.kind == "header":
            headers = headers_of(batch.column("headers")).to_pylist()
            return values.texts(pa.array([_last(of, one.sql) for of in headers], pa.binary()))
        if one.sql == "headers":
            return headers_of(batch.column("headers")), []
        if one.sql == "topic":
            return pa.repeat(self._topic, len(batch)), []
        key = batch.column("key")
        return values.texts(key) if one.type == "string" else (key, [])

    def _compute(
        self, batch: pa.RecordBatch, at: pa.Array, read: Mapping[str, pa.Array]
    ) -> tuple[dict[str, pa.Array], dict[str, list[int]]]:
        if self._connection is None:
            return {}, {}
        kafka = dict(
            zip(
                KAFKA_NAMES,
                (
                    batch.column("key"),
                    pa.repeat(self._topic, len(batch)),
                    batch.column("partition"),
                    batch.column("offset"),
                    at,
                    self._headers(batch),
                ),
                strict=True,
            )
        )
        records = pa.table({name: read[name] for name in self._fields} | kafka)
        found = self._query(records, [one.sql for one in self._computed])
        columns, bad = dict[str, pa.Array](), dict[str, list[int]]()
        for i, one in enumerate(self._computed):
            value, failed = (found[i], []) if found is not None else self._each(records, one.sql)
            if one.kind == "hash":
                value = self._hashed(value)
            value = value.cast(values.arrow_type(one.type))
            columns[one.name], unreadable = _readable(value)
            if failed := sorted({*failed, *unreadable}):
                bad[one.name] = failed
        return columns, bad

    def _headers(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the headers by name, the last of each, if an expression reads them."""
        if not self._reads_headers:
            return pa.nulls(len(batch), _HEADERS)
        pairs = (
            None if of is None else list({h["key"]: h["value"] for h in of}.items())
            for of in headers_of(batch.column("headers")).to_pylist()
        )
        return pa.array(pairs, _HEADERS)

    def _query(self, records: pa.Table, expressions: Sequence[str]) -> list[pa.Array] | None:
        """Return the values of expressions for all records; None if one of them fails."""
        import duckdb

        assert self._connection is not None
        # A name that no column has: DuckDB would take a field of a struct of the same name for a
        # column of the table.
        self._connection.register("all records", records)
        columns = ", ".join(f"{sql} AS c{i}" for i, sql in enumerate(expressions))
        try:
            found = self._connection.sql(f'SELECT {columns} FROM "all records"').to_arrow_table()
        except (duckdb.Error, UnicodeDecodeError):
            # DuckDB cuts a value in an error's text, perhaps within a character.
            return None
        return [_whole(column) for column in found.columns]

    def _each(self, records: pa.Table, sql: str) -> tuple[pa.Array, list[int]]:
        """Return an expression's values, null where it fails, and the indexes of these records."""
        if (found := self._query(records, [sql])) is not None:
            return found[0], []
        # One query each: DuckDB computes what two columns share outside of both TRY.
        tried = self._query(records, [f"TRY({sql})"])
        has_value = self._query(records, [f"TRY(({sql}) IS NULL)"])
        if tried is not None and has_value is not None:
            return tried[0], pc.indices_nonzero(has_value[0].is_null()).to_pylist()
        # TRY does not catch every error, such as one of memory.
        if len(records) == 1:
            none = self._query(records.slice(0, 0), [sql])
            assert none is not None
            return pa.nulls(1, none[0].type), [0]
        half = len(records) // 2
        left, of_left = self._each(records.slice(0, half), sql)
        right, of_right = self._each(records.slice(half), sql)
        return pa.concat_arrays([left, right]), [*of_left, *(half + i for i in of_right)]

    def _hashed(self, value: pa.Array) -> pa.Array:
        """Return HMAC-SHA-256 (RFC 2104) as hexadecimal digits; null for null."""
        assert self._secret is not None
        secret = self._secret
        hashes = (
            None if one is None else hmac.digest(secret, one, "sha256").hex()
            for one in value.cast(pa.binary()).to_pylist()
        )
        return pa.array(hashes, pa.string())


def _readable(value: pa.Array) -> tuple[pa.Array, list[int]]:
    """Return the values that every program can read, null in place of others, and the indexes of
    these: no number, or outside the years 1 to 9999, at any level."""
    bad = _unreadable(value)
    if not len(bad):
        return value, []
    is_good = np.ones(len(value), bool)
    is_good[bad] = False
    return pc.if_else(pa.array(is_good), value, None), bad.tolist()


def _unreadable(value: pa.Array) -> NDArray[np.int64]:
    kind = value.type
    if pa.types.is_struct(kind):
        return np.unique(np.concatenate([_unreadable(field) for field in value.flatten()]))
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        items = [value.keys, value.items] if pa.types.is_map(kind) else [value.values]
        bad = np.concatenate([_unreadable(one) for one in items])
        places = np.unique(np.searchsorted(value.offsets.to_numpy(), bad, side="right") - 1)
        return places[(places >= 0) & (places < len(value))]
    if pa.types.is_floating(kind):
        is_good = pc.is_finite(value)
    elif kind == MICROS:
        is_good = values.in_the_calendar(value)
    elif pa.types.is_date(kind):
        days = value.cast(pa.int32())
        is_good = pc.and_(pc.greater_equal(days, _FIRST_DAY), pc.less_equal(days, _LAST_DAY))
    else:
        return np.zeros(0, np.int64)
    return np.flatnonzero(~pc.fill_null(is_good, True).to_numpy(zero_copy_only=False))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _last(headers: Sequence[Mapping[str, Any]] | None, name: str) -> bytes | None:
    """Return the value of the last header of a name."""
    return next((h["value"] for h in reversed(headers or ()) if h["key"] == name), None)
