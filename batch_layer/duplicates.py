"""Duplicates: of the records with the same key, keep the earliest. DataFrame -> DataFrame.

Within the hour the record with the smallest (offset, partition) is kept. An event that `main` serves in the look-back
is earlier, so every record of it is dropped. Null parts of a key equal each other; a record with a key of nulls only
names no event, so it is no duplicate. All steps are shuffles that spill, so memory does not grow with the hour.

Few records of a usual hour are duplicates. So hashes of the keys select candidates first, and the rule is applied to
these alone: of the others, one number is shuffled. Only the key of the look-back's rows is read, and rows that a Bloom
filter of the hour's hashes excludes are not shuffled.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

from pyspark import StorageLevel
from pyspark.sql import Window
from pyspark.sql import functions as F

from batch_layer.cached import cached
from batch_layer.decoders import AT

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

SENT = 500_000
"""Up to this many rows are broadcast instead of shuffled: some tens of megabytes."""


def drop_duplicates(rows: DataFrame, key: Sequence[str], served: DataFrame | None) -> DataFrame:
    """The rows to keep, in the same columns. `served`: the key columns of what `main` serves in the look-back.

    Deterministic: the same rows give the same result with any partitioning.
    """
    alone = F.when(~names_event(key), F.struct("kafka_partition", "kafka_offset"))
    first = Window.partitionBy(*key, alone).orderBy("kafka_offset", "kafka_partition")
    kept = rows.withColumn("_rank", F.row_number().over(first)).where("_rank = 1").drop("_rank")
    if served is None:
        return kept
    known = served.where(names_event(key)).select(*(F.col(c).alias(f"_served_{c}") for c in key)).distinct()
    return kept.join(known, _same(kept, known, key), "left_anti")


def find_duplicates(rows: DataFrame, key: Sequence[str], served: DataFrame | None) -> DataFrame:
    """Partition and offset of the rows that `drop_duplicates` drops. Computed once and cached."""
    # Equal values of an old and a wider type have different hashes.
    kinds = (rows if served is None else rows.select(*key).union(served.select(*key))).schema
    hashed = _hash([F.col(f"`{c}`").cast(kinds[c].dataType) for c in key]).alias("_hash")
    named = rows.where(names_event(key)).select(*key, *AT, hashed)
    several = named.groupBy("_hash").count().where("count > 1").select("_hash")
    known = None
    if served is not None:
        candidates = hash_candidates(served.where(names_event(key)).select(*key, hashed), named)
        found = cached(candidates, StorageLevel.MEMORY_AND_DISK)
        several, known = several.union(found.select("_hash")).distinct(), found.select(*key)
    several = cached(several, StorageLevel.MEMORY_AND_DISK)
    if several.isEmpty():
        return rows.select(*AT).limit(0)
    suspects = _matching(named, several, "left_semi", "_hash")
    kept = drop_duplicates(suspects.drop("_hash"), key, known)
    dropped = suspects.select(*AT).join(kept.select(*AT), AT, "left_anti")
    return cached(dropped, StorageLevel.MEMORY_AND_DISK)


def leave_out(rows: DataFrame, duplicates: DataFrame) -> DataFrame:
    """The rows without those found by `find_duplicates`."""
    return rows if duplicates.isEmpty() else _matching(rows, duplicates, "left_anti", *AT)


def bloom_filter_settings(records: int) -> dict[str, str]:
    """Spark settings for an hour of `records` records, so that a Bloom filter filters any look-back before the shuffle.

    Ten bits a record give one false positive in a hundred, in at most 32 MB.
    """
    settings = {
        "enabled": "true",
        "applicationSideScanSizeThreshold": "0",
        "creationSideThreshold": f"{2**63 - 1}b",
        "expectedNumItems": str(records),
        "maxNumItems": str(2**62),
        "numBits": str(10 * records),
        "maxNumBits": str(2**28),
    }
    return {f"spark.sql.optimizer.runtime.bloomFilter.{name}": value for name, value in settings.items()}


def hash_candidates(known: DataFrame, named: DataFrame) -> DataFrame:
    """The rows of the look-back whose hash is one of the hour's hashes."""
    # True for every offset: Spark builds a Bloom filter only from a filtered side.
    chosen = named.where("kafka_offset >= 0").select("_hash")
    return known.join(chosen, "_hash", "left_semi")


def _matching(rows: DataFrame, few: DataFrame, how: str, *on: str) -> DataFrame:
    """A join with `few` rows, broadcast if few enough: none of `rows` is shuffled."""
    return rows.join(F.broadcast(few) if few.count() <= SENT else few, list(on), how)


def _hash(key: Sequence[Column]) -> Column:
    return F.xxhash64(*key)


def names_event(key: Sequence[str]) -> Column:
    """Whether a row's key names an event: at least one part is not null."""
    return reduce(lambda one, other: one | other, (F.col(f"`{c}`").isNotNull() for c in key))


def _same(rows: DataFrame, known: DataFrame, key: Sequence[str]) -> Column:
    condition = F.lit(True)
    for column in key:
        condition = condition & rows[column].eqNullSafe(known[f"_served_{column}"])
    return condition
