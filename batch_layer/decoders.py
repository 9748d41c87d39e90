"""Two decoders of an hour: Python workers decode certain records, Spark the others, and some of the certain ones again.

What workers decode of a block of offsets is compared, value by value, with what Spark decodes. Which blocks are
compared follows from the hour's name, so each attempt compares the same ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F

from anabranch import records
from anabranch.protocol.ledger_row import Decoders
from anabranch.records.packed import COMPARED, LEFT, RAW, ROWS, unpacked

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from anabranch.config import Stream

AT = ["kafka_partition", "kafka_offset"]

SMALL = 50_000
"""Of an hour of at most so many offsets, all certain records are compared."""

_SAMPLE = 5
_KAFKA_TYPES = {
    "kafka_partition": "INT",
    "kafka_offset": "BIGINT",
    "kafka_timestamp": "TIMESTAMP",
    "ingest_hour": "STRING",
    "event_date": "DATE",
}


class Decoding(Enum):
    """What decodes an hour: workers and Spark, and how many certain records are compared; or Spark alone."""

    SAMPLED = "some blocks are compared"
    AUDITED = "all blocks are compared"
    SPARK = "Spark decodes all records"


@dataclass(frozen=True)
class CertainRecords:
    """An hour's records as workers decoded them (`anabranch.records.packed`), and their counts."""

    pieces: DataFrame
    types: dict[str, str]
    keys: frozenset[str]
    count: int
    left_count: int
    compared_count: int

    def rows(self, columns: Sequence[str]) -> DataFrame:
        """Some columns of the certain rows."""
        data = "keys" if self.keys.issuperset(columns) else "data"
        ddl = ", ".join(f"`{name}` {self.types[name]}" for name in columns)
        return unpacked(self.pieces, ROWS, ddl, columns, data)

    @property
    def left(self) -> DataFrame:
        """The records that workers left, as Kafka holds them."""
        return unpacked(self.pieces, LEFT, RAW)

    @property
    def compared(self) -> DataFrame:
        """The certain records that are compared, as Kafka holds them."""
        return unpacked(self.pieces, COMPARED, RAW)


@dataclass(frozen=True)
class Compared:
    """The result of a comparison: the number of records, of those that differ, and the first of these by place with
    the columns in which they differ."""

    count: int
    differing: int = 0
    sample: tuple[dict[str, Any], ...] = ()

    def problems(self, expected: int) -> list[str]:
        """Why the hour may not be published."""
        if self.count != expected:
            return [f"decoders: expected {expected} records to compare, found {self.count}"]
        if not self.differing:
            return []
        shown = "; ".join(
            f"partition {s['partition']}, offset {s['offset']}: {', '.join(s['columns'])}" for s in self.sample
        )
        return [
            f"decoders: expected equal values from Python workers and Spark in {self.count} records, found "
            f"{self.differing} that differ: {shown}; the next run decodes the hour by Spark; report this"
        ]


def read_certain(pieces: DataFrame, stream: Stream) -> CertainRecords:
    """The records of cached pieces, counted."""
    # One row for each piece of a megabyte.
    counts: Counter[str] = Counter()
    for row in pieces.select("kind", "records").collect():
        counts[row["kind"]] += row["records"]
    types = {column.name: column.type for column in stream.columns} | _KAFKA_TYPES
    return CertainRecords(pieces, types, frozenset((*AT, *stream.key)), counts[ROWS], counts[LEFT], counts[COMPARED])


def decoders_of(certain: CertainRecords, compared: Compared) -> Decoders:
    """The counts for the ledger."""
    return Decoders(certain.count, certain.left_count, compared.count, compared.sample or None)


def compare_decoders(certain: CertainRecords, decoded: DataFrame, stream: Stream) -> Compared:
    """Compare certain rows with `decoded`: what Spark decodes of them, in the columns of `records.decode`."""
    if not certain.compared_count:
        return Compared(0)
    names = [name for name in certain.types if name not in AT]
    spark = decoded.select(
        *AT, "is_dead", F.col(records.UNKNOWN).alias("_unknown"), *(F.col(f"`{n}`").alias(f"_spark_{n}") for n in names)
    )
    of_workers = certain.rows([*AT, *names])
    both = spark.join(of_workers, AT, "left")
    differs = {name: ~_is_same(F.col(f"`{name}`"), F.col(f"_spark_{name}"), certain.types[name]) for name in names}
    verdict = F.col("is_dead")
    if stream.unknown != "ignore":
        verdict = verdict | (F.coalesce(F.size("_unknown"), F.lit(0)) > 0)
    differs["verdict"] = verdict | F.col("ingest_hour").isNull()
    columns = F.array_compact(F.array(*(F.when(is_so, F.lit(name)) for name, is_so in differs.items())))
    judged = both.select(*AT, columns.alias("columns"))
    counts = judged.agg(F.count("*").alias("all"), F.count_if(F.size("columns") > 0).alias("differing")).collect()[0]
    if not counts["differing"]:
        return Compared(counts["all"])
    first = judged.where(F.size("columns") > 0).orderBy(*AT).limit(_SAMPLE).collect()
    sample = ({"partition": r[0], "offset": r[1], "columns": list(r[2])} for r in first)
    return Compared(counts["all"], counts["differing"], tuple(sample))


def _is_same(one: Column, other: Column, kind: str) -> Column:
    # As text, 0.0 and -0.0 differ.
    if kind == "double":
        one, other = one.cast("string"), other.cast("string")
    return one.eqNullSafe(other)
