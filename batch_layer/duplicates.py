"""Duplicates: of the records that a stream's key makes the same event, the earliest is kept. DataFrame -> DataFrame.

Within the hour the record with the smallest (offset, partition) wins; an event that `main` serves in the look-back was
earlier still, so every record of it goes. Null parts of a key equal each other; a record whose key is null in every
part names no event, so it repeats none. Everything is a shuffle that spills, so memory does not grow with the hour.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def drop_duplicates(rows: DataFrame, key: Sequence[str], served: DataFrame | None) -> DataFrame:
    """The rows to keep, in the same columns. `served` holds the key's columns of what `main` serves in the look-back.

    Deterministic: the same rows give the same result, whatever the partitioning.
    """
    alone = F.when(~names_event(key), F.struct("kafka_partition", "kafka_offset"))
    first = Window.partitionBy(*key, alone).orderBy("kafka_offset", "kafka_partition")
    kept = rows.withColumn("_rank", F.row_number().over(first)).where("_rank = 1").drop("_rank")
    if served is None:
        return kept
    known = served.where(names_event(key)).select(*(F.col(c).alias(f"_served_{c}") for c in key)).distinct()
    return kept.join(known, _same(kept, known, key), "left_anti")


def names_event(key: Sequence[str]) -> Column:
    """Whether a row's key says which event it is: not where it is null in every part."""
    return reduce(lambda one, other: one | other, (F.col(f"`{c}`").isNotNull() for c in key))


def _same(rows: DataFrame, known: DataFrame, key: Sequence[str]) -> Column:
    condition = F.lit(True)
    for column in key:
        condition = condition & rows[column].eqNullSafe(known[f"_served_{column}"])
    return condition
