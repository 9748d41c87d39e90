"""Duplicates among imported rows, and rows that the table has, by the stream's key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from anabranch.common.arrays import find_sorted
from anabranch.protocol.imported import HOUR_BITS
from serving_layer.query.datasets import connected, key_part, quoted

if TYPE_CHECKING:
    import pyarrow.dataset as ds
    from numpy.typing import NDArray

HOUR = "_import_hour"
"""A column: the hour of import, in hours since 1970."""

_MEMORY = "2GB"
_AT = "_import_at"
# Odd numbers of 64 bits (SplitMix64), by which a multiplication spreads neighbours.
_MIX = np.array([-7046029254386353131, -4658895280553007687, -7723592293110705685], np.int64)


def find_duplicates(
    rows: pa.Table, key: Iterable[str], lookback: int, later: pa.Table
) -> NDArray[Any]:
    """Return the mask of `rows`, ordered by hour, that repeat another row's key: an earlier row in
    the same hour or the `lookback` hours before, or a row of `later` in the same hour or the
    `lookback` hours after. `later` are rows of the table, with the key and `HOUR`.

    Null parts of a key equal each other, and empty texts are null. A row whose key is null in every
    part is no duplicate.
    """
    names = list(key)
    if not names:
        return np.zeros(len(rows), bool)
    columns = ", ".join(map(quoted, names))
    return _mask(
        rows.select([*names, HOUR]),
        later.select([*names, HOUR]).append_column(_AT, pa.nulls(len(later), pa.int64())),
        f"""
        SELECT {_AT} FROM (
            SELECT {_AT},
                lag({HOUR}) OVER (
                    PARTITION BY {columns}, {_AT} IS NULL ORDER BY {HOUR}, {_AT}
                ) AS before,
                min(CASE WHEN {_AT} IS NULL THEN {HOUR} END) OVER (
                    PARTITION BY {columns} ORDER BY {HOUR}
                    RANGE BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING
                ) AS after,
                {HOUR}
            FROM (SELECT {_parts(names)} FROM (FROM ours UNION ALL FROM theirs))
            WHERE {_is_key(names)}
        )
        WHERE {_AT} IS NOT NULL AND (before >= {HOUR} - {lookback} OR after <= {HOUR} + {lookback})
        """,
    )


def find_repeated_places(
    numbers: NDArray[np.int64], partitions: NDArray[np.int64], offsets: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return the mask of rows at the place of an earlier one of the same hour, of Kafka's partition
    and offset. `numbers`: in ascending order."""
    mask, hours = np.zeros(len(numbers), bool), numbers >> HOUR_BITS
    # Hashes of places select the rows to sort by three columns, which takes long: few, mostly.
    hashes = (offsets * _MIX[0]) ^ (partitions * _MIX[1]) ^ (hours * _MIX[2])
    ordered = np.sort(hashes)
    several = np.unique(ordered[1:][np.diff(ordered) == 0])
    at = np.flatnonzero(find_sorted(hashes, several) >= 0)
    places = [values[at] for values in (hours, partitions, offsets)]
    order = np.lexsort((numbers[at], *places))
    same = np.ones(max(0, len(order) - 1), bool)
    for values in places:
        same &= np.diff(values[order]) == 0
    mask[at[order[1:][same]]] = True
    return mask


def has_key(rows: pa.Table, key: Iterable[str]) -> NDArray[Any]:
    """Return the mask of `rows` whose key is not null, or an empty text, in every part."""
    names = list(key)
    query = f"SELECT {_AT} FROM (SELECT {_parts(names)} FROM ours) WHERE {_is_key(names)}"
    return _mask(rows.select(names), rows.select(names).slice(0, 0), query)


def find_known(rows: pa.Table, key: Iterable[str], known: pa.Table | ds.Dataset) -> NDArray[Any]:
    """Return the mask of `rows` whose key is in `known`; other columns are not read. Null parts of
    a key equal each other; a key that is null in every part never matches. Empty texts are null."""
    names = list(key)
    if not names:
        return np.zeros(len(rows), bool)
    columns = ", ".join(map(quoted, names))
    equal = " AND ".join(
        f"ours.{quoted(name)} IS NOT DISTINCT FROM t.{quoted(name)}" for name in names
    )
    return _mask(
        rows.select(names),
        known,
        f"""
        WITH named AS (SELECT {_parts(names)} FROM ours)
        SELECT {_AT} FROM (SELECT * FROM named WHERE {_is_key(names)}) ours
        SEMI JOIN (
            SELECT DISTINCT {columns}
            FROM (SELECT {_parts(names)} FROM (SELECT {columns} FROM theirs))
        ) t ON {equal}
        """,
    )


def _parts(names: Iterable[str]) -> str:
    return f"* REPLACE ({', '.join(f'{key_part(quoted(n))} AS {quoted(n)}' for n in names)})"


def _is_key(names: Iterable[str]) -> str:
    return " OR ".join(f"{quoted(name)} IS NOT NULL" for name in names)


def _mask(ours: pa.Table, theirs: pa.Table | ds.Dataset, query: str) -> NDArray[Any]:
    """Return the mask of the rows of `ours` that a query of `ours` and `theirs` returns, by their
    row numbers (column `_AT`)."""
    numbered = ours.append_column(_AT, pa.array(np.arange(len(ours)), pa.int64()))
    with connected(_MEMORY) as connection:
        connection.register("ours", numbered)
        connection.register("theirs", theirs)
        found = connection.sql(query).fetchnumpy()[_AT]
    mask = np.zeros(len(ours), bool)
    mask[np.asarray(found, np.int64)] = True
    return mask
