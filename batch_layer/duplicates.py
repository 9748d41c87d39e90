"""Duplicates: of the records that a stream's key makes the same event, the earliest is kept. DataFrame -> DataFrame.

Within the hour the record with the smallest (offset, partition) wins; an event that `main` serves in the look-back was
earlier still, so every record of it goes. Null parts of a key equal each other; a record whose key is null in every
part names no event, so it repeats none. Everything is a shuffle that spills, so memory does not grow with the hour.

Of a usual hour few records repeat an event. So hashes of the keys tell first which may, and the rule is applied to
those alone: what is shuffled of the others is one number. The look-back's rows are read once, their key alone, and what
a Bloom filter of the hour's hashes excludes is not shuffled at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from batch_layer.sources import AT

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# How many rows are sent to every task in place of a shuffle: some tens of megabytes.
_SENT = 500_000


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


def find_duplicates(rows: DataFrame, key: Sequence[str], served: DataFrame | None) -> DataFrame:
    """Where the rows are that `drop_duplicates` leaves out: partition and offset. Computed once, and kept."""
    # Equal values of an old type and a wider one have different hashes.
    kinds = (rows if served is None else rows.select(*key).union(served.select(*key))).schema
    hashed = _hash([F.col(f"`{c}`").cast(kinds[c].dataType) for c in key]).alias("_hash")
    named = rows.where(names_event(key)).select(*key, *AT, hashed)
    several = named.groupBy("_hash").count().where("count > 1").select("_hash")
    known = None
    if served is not None:
        found = alike(served.where(names_event(key)).select(*key, hashed), named).localCheckpoint()
        several, known = several.union(found.select("_hash")).distinct(), found.select(*key)
    several = several.localCheckpoint()
    if several.isEmpty():
        return rows.select(*AT).limit(0)
    suspects = _matching(named, several, "left_semi", "_hash")
    kept = drop_duplicates(suspects.drop("_hash"), key, known)
    return suspects.select(*AT).join(kept.select(*AT), AT, "left_anti").localCheckpoint()


def leave_out(rows: DataFrame, duplicates: DataFrame) -> DataFrame:
    """The rows without those that `find_duplicates` found."""
    return rows if duplicates.isEmpty() else _matching(rows, duplicates, "left_anti", *AT)


def bloom_filter_settings(records: int) -> dict[str, str]:
    """Spark's settings for an hour of so many records, by which it filters a look-back of any size before a shuffle:
    ten bits a record are wrong about one of a hundred others, in at most 32 MB."""
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


def alike(known: DataFrame, named: DataFrame) -> DataFrame:
    """The rows of the look-back with the hash of one of the hour's."""
    # Every offset is: Spark makes a Bloom filter only of what a comparison has chosen.
    chosen = named.where("kafka_offset >= 0").select("_hash")
    return known.join(chosen, "_hash", "left_semi")


def _matching(rows: DataFrame, few: DataFrame, how: str, *on: str) -> DataFrame:
    """A join with rows that are few as a rule, and then sent to every task: none of `rows` is moved."""
    return rows.join(F.broadcast(few) if few.count() <= _SENT else few, list(on), how)


def _hash(key: Sequence[Column]) -> Column:
    return F.xxhash64(*key)


def names_event(key: Sequence[str]) -> Column:
    """Whether a row's key says which event it is: not where it is null in every part."""
    return reduce(lambda one, other: one | other, (F.col(f"`{c}`").isNotNull() for c in key))


def _same(rows: DataFrame, known: DataFrame, key: Sequence[str]) -> Column:
    condition = F.lit(True)
    for column in key:
        condition = condition & rows[column].eqNullSafe(known[f"_served_{column}"])
    return condition
