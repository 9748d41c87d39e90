"""Duplicates: keep the earliest of the records with the same key. DataFrame -> DataFrame.

Within the hour the record with the smallest (offset, partition) is kept. An event that `main`
serves in the look-back is earlier, so all its records are dropped. Nulls in a key equal each other,
and an empty text counts as null. A key of nulls only names no event, so its record is no
duplicate.

Few records of a usual hour are duplicates. So hashes of the keys select candidates first, and the
rule is applied only to these. The driver compares the hashes that workers report
(`find_few_duplicates`). Those of a large hour are shuffled and spill, so memory does not grow with
the hour (`find_duplicates`): one number of each row. Only the key of the look-back's rows is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.types import BinaryType, StringType

from anabranch.offsets.position import Offsets, Ranges
from anabranch.records.hashes import HASH, PLACE, in_duckdb, key_parts
from batch_layer.offset_counts import OffsetMasks
from batch_layer.passes import cached

PLACE_COLUMNS = [*PLACE]

MOST_BROADCAST = 500_000
"""Maximum number of rows that are broadcast instead of shuffled: some tens of megabytes."""

_PLACES_DDL = "kafka_partition INT, kafka_offset BIGINT"
_NO_PLACES = pa.schema(
    [("kafka_partition", pa.int32()), ("kafka_offset", pa.int64())]
).empty_table()


def drop_duplicates(rows: DataFrame, key: Sequence[str], served: DataFrame | None) -> DataFrame:
    """Return the rows to keep, in the same columns; empty texts of their keys are null. `served`:
    the key columns of the rows that `main` serves in the look-back. Deterministic: the same rows
    give the same result with any partitioning."""
    rows = without_empty_texts(rows, key)
    # Decision 10: records whose key is null in every part would count as one event, and all but one
    # of them would be lost.
    place_if_unnamed = F.when(~names_event(key), F.struct("kafka_partition", "kafka_offset"))
    # Offset and partition are unique, so each attempt and each partitioning keep the same record.
    first = Window.partitionBy(*key, place_if_unnamed).orderBy("kafka_offset", "kafka_partition")
    kept = rows.withColumn("_rank", F.row_number().over(first)).where("_rank = 1").drop("_rank")
    if served is None:
        return kept
    known = (
        without_empty_texts(served, key)
        .where(names_event(key))
        .select(*(F.col(c).alias(f"_served_{c}") for c in key))
        .distinct()
    )
    return kept.join(known, _same(kept, known, key), "left_anti")


@dataclass(frozen=True)
class Duplicates:
    """Partition and offset of the rows that the rule drops. `few`: all of them in the driver's
    memory, if they are at most MOST_BROADCAST; otherwise `many` reads the executors' cache."""

    few: pa.Table | None
    many: DataFrame | None = None

    @property
    def is_empty(self) -> bool:
        return self.few is not None and not len(self.few)

    @cached_property
    def table(self) -> pa.Table:
        """The places in the driver's memory, twelve bytes each."""
        if self.few is not None:
            return self.few
        assert self.many is not None
        return self.many.toArrow().cast(_NO_PLACES.schema)

    def leave_out(self, rows: DataFrame) -> DataFrame:
        if self.is_empty:
            return rows
        return rows.join(self._in(rows.sparkSession), PLACE_COLUMNS, "left_anti")

    def only(self, rows: DataFrame) -> DataFrame:
        return rows.join(self._in(rows.sparkSession), PLACE_COLUMNS, "left_semi")

    def offsets(self, ranges: Ranges) -> Offsets:
        """Return the number of distinct offsets inside the ranges, by partition."""
        return OffsetMasks.of([self.table], ranges).distinct

    def _in(self, spark: SparkSession) -> DataFrame:
        if self.few is None:
            assert self.many is not None
            return self.many
        return F.broadcast(spark.createDataFrame(self.few, _PLACES_DDL))


NO_DUPLICATES = Duplicates(_NO_PLACES)


def by_partition(places: pa.Table) -> dict[int, np.ndarray]:
    """Return the offsets of places by partition."""
    partitions, offsets = (places.column(name).to_numpy() for name in PLACE)
    return {p: offsets[partitions == p] for p in np.unique(partitions).tolist()}


def find_duplicates(rows: DataFrame, key: Sequence[str], served: DataFrame | None) -> Duplicates:
    """Return the rows that `drop_duplicates` drops. Computed once."""
    rows = without_empty_texts(rows, key)
    served = without_empty_texts(served, key) if served is not None else None
    hashed = key_hash(rows, key, served)
    named = rows.where(names_event(key)).select(*key, *PLACE_COLUMNS, hashed)
    several = named.groupBy("_hash").count().where("count > 1").select("_hash")
    known = None
    if served is not None:
        candidates = hash_candidates(served.where(names_event(key)).select(*key, hashed), named)
        found = cached(candidates, StorageLevel.MEMORY_AND_DISK, is_lazy=True)
        several, known = several.union(found.select("_hash")), found.select(*key)
    several, few = _computed(several.distinct())
    if few is not None and not len(few):
        # Spark plans no work for limit(0).
        return NO_DUPLICATES
    # A few rows are broadcast, so that the other side is not shuffled.
    side = F.broadcast(several) if few is not None else several
    suspects = cached(named.join(side, "_hash", "left_semi"), is_lazy=True)
    # Decision 22: the rule compares keys. By hashes, two events with one hash would become one row.
    kept = drop_duplicates(suspects.drop("_hash"), key, known)
    many, few = _computed(
        suspects.select(*PLACE_COLUMNS).join(
            kept.select(*PLACE_COLUMNS), PLACE_COLUMNS, "left_anti"
        )
    )
    return Duplicates(few, many)


def find_few_duplicates(
    facts: pa.Table,
    key: Sequence[str],
    read_keys: Callable[[pa.Table], pa.Table],
    find_served: Callable[[NDArray[np.int64]], pa.Table],
) -> Duplicates | None:
    """Find duplicates as `find_duplicates`, in the driver's memory, by the `facts` of the rows:
    places, and the `hash` of each key (`anabranch.records.staged.facts_of`). `read_keys`: returns
    the keys of the rows at places. `find_served`: returns the keys in the look-back with one of
    these hashes (`anabranch.records.hashes.find_keys`). Return None if more than MOST_BROADCAST
    rows, of the hour or of the look-back, are candidates."""
    named = facts.filter(facts.column("hash").is_valid())
    hashes, numbers = np.unique(named.column("hash").to_numpy(), return_counts=True)
    if not len(hashes):
        return NO_DUPLICATES
    # Bounded, since the driver gets them: an hour may repeat all of its look-back.
    served = find_served(hashes)
    if len(served) > MOST_BROADCAST:
        return None
    several = np.union1d(hashes[numbers > 1], served.column(HASH).to_numpy())
    suspected = named.filter(pc.is_in(named.column("hash"), pa.array(several, pa.int64())))
    if not len(suspected):
        return NO_DUPLICATES
    if len(suspected) > MOST_BROADCAST:
        return None
    suspects = read_keys(suspected.select(PLACE_COLUMNS).cast(_NO_PLACES.schema))
    return Duplicates(_dropped(suspects, served, key).cast(_NO_PLACES.schema))


def _dropped(suspects: pa.Table, served: pa.Table, key: Sequence[str]) -> pa.Table:
    """Return the places of the rows that `drop_duplicates` drops, all with keys that name an event.
    Decision 22: it compares keys. By hashes, two events with one hash would become one row."""
    names, at = [f"k{i}" for i in range(len(key))], ", ".join(PLACE_COLUMNS)

    def parts(of: pa.Table) -> str:
        return ", ".join(f"{p} AS {n}" for p, n in zip(key_parts(of, key), names, strict=True))

    # By place, so that a row that was written twice is not dropped twice: the account would close
    # although the row is lost. Null equals null in a part of the key: else a repeated event with
    # such a part would stay a row in both hours.
    same = " AND ".join(f"s.{name} IS NOT DISTINCT FROM o.{name}" for name in names)
    return in_duckdb(
        f"""
        SELECT {at} FROM (
            SELECT *, row_number() OVER (
                PARTITION BY {", ".join(names)} ORDER BY kafka_offset, kafka_partition
            ) AS number FROM (SELECT {at}, {parts(suspects)} FROM suspects)
        ) s LEFT JOIN (SELECT DISTINCT {parts(served)}, true AS is_served FROM served) o ON {same}
        GROUP BY ALL HAVING min(number) > 1 OR coalesce(bool_or(is_served), false)
        """,
        suspects=suspects,
        served=served,
    )


def _computed(rows: DataFrame) -> tuple[DataFrame, pa.Table | None]:
    """Return the rows, computed once, and a copy in memory up to MOST_BROADCAST."""
    kept = cached(rows, StorageLevel.MEMORY_AND_DISK, is_lazy=True)
    few = kept.limit(MOST_BROADCAST + 1).toArrow()
    if len(few) > MOST_BROADCAST:
        return kept, None
    # PySpark cannot make a frame of an empty table.
    return rows.sparkSession.createDataFrame(few, rows.schema) if len(few) else rows.limit(0), few


def bloom_filter_settings(records: int) -> dict[str, str]:
    """Return Spark settings for an hour of `records`, so that a Bloom filter filters a look-back
    before the shuffle: ten bits a record, one false positive in 100, at most 32 MB."""
    settings = {
        "enabled": "true",
        "applicationSideScanSizeThreshold": "0",
        "creationSideThreshold": f"{2**63 - 1}b",
        "expectedNumItems": str(records),
        "maxNumItems": str(2**62),
        "numBits": str(10 * records),
        "maxNumBits": str(2**28),
    }
    return {
        f"spark.sql.optimizer.runtime.bloomFilter.{name}": value for name, value in settings.items()
    }


def hash_candidates(known: DataFrame, named: DataFrame) -> DataFrame:
    """Return the rows of the look-back whose hash is one of the hour's hashes."""
    # The filter is true for every offset: Spark builds a Bloom filter only from a filtered side.
    chosen = named.where("kafka_offset >= 0").select("_hash")
    return known.join(chosen, "_hash", "left_semi")


def key_hash(rows: DataFrame, key: Sequence[str], served: DataFrame | None) -> Column:
    """Return the column `_hash`, the hash of a row's key. Keys are hashed in the common type of
    both sides, so that equal keys of an old and a wider type have equal hashes."""
    # By its own type, an old row of a narrower type would have another hash, and its duplicate
    # would not be found.
    kinds = (rows if served is None else rows.select(*key).union(served.select(*key))).schema
    return _hash([F.col(f"`{c}`").cast(kinds[c].dataType) for c in key]).alias("_hash")


def _hash(key: Sequence[Column]) -> Column:
    return F.xxhash64(*key)


def without_empty_texts(rows: DataFrame, key: Sequence[str]) -> DataFrame:
    """Return the rows with null for each empty text in a column of the key. Idempotent."""
    kinds = rows.schema
    texts = [c for c in key if isinstance(kinds[c].dataType, (StringType, BinaryType))]
    empty = {c: F.when(F.length(f"`{c}`") > 0, F.col(f"`{c}`")) for c in texts}
    return rows.withColumns(empty) if empty else rows


def names_event(key: Sequence[str]) -> Column:
    """Return a condition: a row's key names an event, since at least one part is not null."""
    parts = (F.col(f"`{c}`").isNotNull() for c in key)
    return reduce(lambda one, other: one | other, parts, F.lit(False))


def _same(rows: DataFrame, known: DataFrame, key: Sequence[str]) -> Column:
    condition = F.lit(True)
    for column in key:
        # Null equals null in a part of the key, as in the window: else a repeated event with such a
        # part would stay a row in both hours.
        condition = condition & rows[column].eqNullSafe(known[f"_served_{column}"])
    return condition
