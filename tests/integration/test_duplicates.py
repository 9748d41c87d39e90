"""Duplicates: which record of an event is kept, within the hour and against what `main` serves."""

import random
import re
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from budget import full
from numpy.typing import NDArray
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sessions import with_settings

from anabranch.records.hashes import HASH, hash_keys
from batch_layer import duplicates
from batch_layer.duplicates import (
    PLACE_COLUMNS,
    Duplicates,
    bloom_filter_settings,
    drop_duplicates,
    find_duplicates,
    find_few_duplicates,
    hash_candidates,
    without_empty_texts,
)

SCHEMA = "id STRING, part INT, kafka_partition INT, kafka_offset BIGINT, payload STRING"
Rows = list[tuple[str | None, int | None, int, int, str]]


def frame(spark: SparkSession, rows: Rows, slices: int = 1) -> DataFrame:
    return spark.createDataFrame(rows, SCHEMA).repartition(slices)


def places(rows: DataFrame) -> list[tuple[int, int]]:
    return sorted((r.kafka_partition, r.kafka_offset) for r in rows.collect())


def repeated(found: Duplicates) -> list[tuple[int, int]]:
    return sorted(zip(*found.table.to_pydict().values(), strict=True))


def find_few(
    rows: DataFrame, key: list[str], served: DataFrame | None, few: int | None = None
) -> Duplicates:
    """Duplicates by the hashes in the driver's memory. `few`: of so many different hashes."""
    columns = [*dict.fromkeys([*key, *PLACE_COLUMNS])]
    table = rows.select(*columns).toArrow()
    # As the table's files are read: in its types.
    old = rows.limit(0).select(*key) if served is None else served.select(*key)
    known = old.toArrow()

    def hashed(table: pa.Table) -> pa.ChunkedArray:
        found = hash_keys(table, key)
        if few is None:
            return found
        some = [None if one is None else one % few for one in found.to_pylist()]
        return pa.chunked_array([pa.array(some, pa.int64())])

    def find_served(hashes: NDArray[np.int64]) -> pa.Table:
        found = known.append_column(HASH, hashed(known))
        return found.filter(pc.is_in(found.column(HASH), pa.array(hashes)))

    facts = table.select(PLACE_COLUMNS).append_column("hash", hashed(table))
    at = list(PLACE_COLUMNS)
    found = find_few_duplicates(
        facts, key, lambda places: table.join(places, at, join_type="left semi"), find_served
    )
    return find_duplicates(rows, key, served) if found is None else found


def kept(
    rows: DataFrame, key: list[str], served: DataFrame | None, few: int | None = None
) -> list[tuple[int, int]]:
    """Return the rows that the rule keeps; the search by hashes finds the rest."""
    by_rule, every = places(drop_duplicates(rows, key, served)), places(rows)
    for find in (find_duplicates, partial(find_few, few=few)):
        found = find(rows, key, served)
        dropped = repeated(found)
        assert sorted([*by_rule, *dropped]) == every
        assert places(found.leave_out(rows)) == by_rule
        assert found.offsets(dict.fromkeys(range(8), (0, 100))) == Counter(p for p, _ in dropped)
        early = sum(p == 0 and 2 <= o < 5 for p, o in dropped)
        assert found.offsets({0: (2, 5)}).get(0, 0) == early
    return by_rule


def test_an_event_is_kept_once_unless_it_is_served(spark: SparkSession) -> None:
    rows: Rows = [
        # The smallest offset wins, then the smallest partition.
        ("a", 1, 0, 9, "late"),
        ("a", 1, 2, 5, "same offset, higher partition"),
        ("a", 1, 1, 5, "kept"),
        ("b", 1, 0, 1, "kept"),
        ("b", 2, 0, 2, "kept: another key by its second part"),
        # Nulls in a key equal each other.
        (None, 1, 0, 3, "kept"),
        (None, 1, 0, 4, ""),
        ("c", None, 0, 5, "kept"),
        ("c", None, 0, 6, ""),
        # Records without any key repeat nothing.
        (None, None, 0, 7, "kept"),
        (None, None, 0, 8, "kept"),
    ]
    key, made = ["id", "part"], frame(spark, rows)
    alone = [(0, 1), (0, 2), (0, 3), (0, 5), (0, 7), (0, 8), (1, 5)]
    assert kept(made, key, None) == alone
    result = drop_duplicates(made, key, None)
    assert {r.payload[:4] for r in result.collect()} == {"kept"}
    assert result.schema == made.schema
    # Of an event that is served, all records are dropped.
    served = [("a", 1), ("a", 1), ("b", 3), (None, 1), ("c", 2), (None, None)]
    known = frame(spark, [(id, part, 7, 0, "") for id, part in served])
    assert kept(made, key, known) == [place for place in alone if place not in ((1, 5), (0, 3))]
    # By one part of the key.
    assert kept(made, ["id"], known.where("id = 'a'").select("id")) == [
        (0, 1), (0, 3), (0, 4), (0, 5), (0, 7), (0, 8),
    ]  # fmt: skip
    assert kept(made.where("id IS NULL"), ["part"], known.where("part IS NULL OR part > 1")) == [
        (0, 3), (0, 7), (0, 8),
    ]  # fmt: skip


def test_an_empty_text_is_no_part_of_a_key(spark: SparkSession) -> None:
    rows: Rows = [
        ("", None, 0, 1, ""),
        ("", None, 0, 2, ""),
        (None, 1, 0, 3, ""),
        ("", 1, 0, 4, "the same key"),
        (" ", 1, 0, 5, "another key"),
    ]
    named = without_empty_texts(frame(spark, rows), ["id", "part"])
    served = frame(spark, [("", None, 0, 0, ""), ("", 2, 0, 0, "")])
    for known in (None, served):
        found = find_few(named, ["id", "part"], known)
        assert repeated(found) == [(0, 4)]
        found = find_duplicates(frame(spark, rows), ["id", "part"], known)
        assert repeated(found) == [(0, 4)]
    # By the text alone, no record has a key but the one with a space.
    assert find_duplicates(frame(spark, rows), ["id"], served).is_empty


@pytest.mark.full
def test_the_last_of_twelve_million_records_repeats_the_first() -> None:
    n = 12_000_000
    ids = np.arange(n)
    ids[-1] = 0
    at = {"kafka_partition": np.zeros(n, np.int32), "kafka_offset": np.arange(n)}
    table = pa.table({"id": ids, **at})
    facts = table.select(PLACE_COLUMNS).append_column("hash", hash_keys(table, ["id"]))
    found = find_few_duplicates(
        facts,
        ["id"],
        lambda places: table.join(places, list(PLACE_COLUMNS), join_type="left semi"),
        lambda _: table.slice(0, 0).append_column(HASH, pa.array([], pa.int64())),
    )
    assert found is not None and repeated(found) == [(0, n - 1)]


def test_rows_of_the_same_table_on_both_sides(spark: SparkSession) -> None:
    """Self-joins confuse columns of one origin: here both sides come from the same frame."""
    rows = frame(spark, [("a", 1, 0, 1, ""), ("b", 1, 0, 2, ""), ("b", 1, 0, 3, "")])
    assert kept(rows, ["id"], rows.where("id = 'a'")) == [(0, 2)]
    assert kept(rows, ["id"], rows.where("false")) == [(0, 1), (0, 2)]


def every_hash_alike(key: list[Any]) -> Any:
    return F.lit(7).cast("bigint")


def three_hashes(key: list[Any]) -> Any:
    return F.pmod(F.xxhash64(*key), F.lit(3))


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ("BIGINT", "INT"),
        full("INT", "BIGINT"),
        full("DECIMAL(20,2)", "DECIMAL(9,2)"),
        ("DECIMAL(9,2)", "DECIMAL(30,2)"),
    ],
)
def test_a_widened_key_equals_former_values(spark: SparkSession, mine: str, theirs: str) -> None:
    rows = frame(spark, [(n, None, 0, at, "") for at, n in enumerate(("1", "2", "2", "3"), 1)])
    served = frame(spark, [("3", None, 0, 0, ""), ("4", None, 0, 0, "")])
    rows = rows.withColumn("id", F.col("id").cast(mine))
    served = served.withColumn("id", F.col("id").cast(theirs))
    assert kept(rows, ["id"], served) == [(0, 1), (0, 2)]


def test_zeros_of_both_signs_and_every_nan_are_one_key(spark: SparkSession) -> None:
    values = [0.0, -0.0, float("nan"), -float("nan"), 1.5]
    made = [(v, 0, i, "") for i, v in enumerate(values)]
    rows = spark.createDataFrame(made, SCHEMA.replace("id STRING, part INT", "id DOUBLE"))
    assert kept(rows, ["id"], None) == [(0, 0), (0, 2), (0, 4)]
    assert kept(rows, ["id"], rows.where("kafka_offset IN (1, 3)")) == [(0, 4)]


@pytest.mark.parametrize("sent", [0, 500_000], ids=["shuffled", "sent"])
@pytest.mark.parametrize("hashes", [None, full(three_hashes), every_hash_alike])
@pytest.mark.parametrize("slices", [full(1), 5])
def test_same_result_whatever_the_partitioning_the_hashes_and_how_many_repeat(
    spark: SparkSession, slices: int, hashes: Any, sent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hashes is not None:
        monkeypatch.setattr(duplicates, "_hash", hashes)
    monkeypatch.setattr(duplicates, "MOST_BROADCAST", sent)
    rng = random.Random(7)
    rows: Rows = [(f"e{rng.randrange(60)}", None, p, o, "") for p in range(3) for o in range(70)]
    known = {f"e{i}" for i in range(0, 60, 7)}
    first: dict[str | None, tuple[int, int]] = {}
    for key, _, p, o, _ in rows:
        first[key] = min(first.get(key, (o, p)), (o, p))
    expected = sorted((p, o) for key, (o, p) in first.items() if key not in known)
    rng.shuffle(rows)
    served = frame(spark, [(key, None, 0, 0, "") for key in known], slices)
    few = {None: None, three_hashes: 3, every_hash_alike: 1}[hashes]
    assert kept(frame(spark, rows, slices), ["id"], served, few) == expected


def test_only_hashes_are_shuffled(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(*_: object) -> None:
        raise AssertionError("the rule is applied to rows that repeat nothing")

    monkeypatch.setattr(duplicates, "drop_duplicates", rule)
    monkeypatch.setattr(duplicates, "_dropped", rule)
    rows = frame(spark, [(f"e{i}", None, 0, i, "") for i in range(50)], 3)
    for find in (find_duplicates, find_few):
        found = find(rows, ["id"], frame(spark, [("f", None, 0, 0, "")]))
        assert found.is_empty and repeated(found) == []
        assert places(found.leave_out(rows)) == places(rows)


def test_keys_that_a_filter_excludes_are_not_shuffled(spark: SparkSession, tmp_path: Path) -> None:
    hashed = F.xxhash64("id").alias("_hash")
    # As Kafka's rows: of no known size, which Spark takes for the largest that there is.
    rows = frame(spark, [(f"e{i}", None, 0, i, "") for i in range(50)], 3)
    named = rows.select("*", hashed).localCheckpoint()
    ids = spark.range(10, 5_000).select(F.format_string("e%d", "id").alias("id"))
    ids.write.parquet(f"{tmp_path}/served")
    served = spark.read.parquet(f"{tmp_path}/served").select("id", hashed)
    # So few rows would be sent to every task.
    settings = bloom_filter_settings(50) | {"spark.sql.autoBroadcastJoinThreshold": "-1"}
    with with_settings(spark, settings):
        found = hash_candidates(served, named)
        shown = plan(found)
        assert re.search(r"might_contain.*\n(.*\n)*.*bloom_filter_agg\(.*, 50, 500", shown), shown
        assert sorted(row.id for row in found.collect()) == sorted(f"e{i}" for i in range(10, 50))


def plan(result: DataFrame) -> str:
    return str(result._jdf.queryExecution().executedPlan().toString())


def test_joins_by_key_not_by_comparing_all_pairs(spark: SparkSession) -> None:
    rows = frame(spark, [("a", 1, 0, 1, "")])
    every_pair = re.compile("NestedLoop|Cartesian")
    # The hazard: a comparison by either of two columns has no key to join by.
    either = rows.alias("a").join(rows.alias("b"), F.expr("a.id = b.id OR a.part = b.part"))
    assert every_pair.search(plan(either))
    joined = plan(drop_duplicates(rows, ["id", "part"], rows))
    assert not every_pair.search(joined)
    assert re.search(r"(SortMerge|BroadcastHash|ShuffledHash)Join \[[^]]*id", joined)
