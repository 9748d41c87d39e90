"""Records made to keep an expression busy: each is judged in time that its length explains."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from typing import Any

import pytest
import worst
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from anabranch import records
from anabranch.config import Environment, Stream
from anabranch.config.columns import parse_columns
from anabranch.records.formats import open_format

HOUR = "2026-11-21T03"
SOURCE = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "timestampType int"
)
DEADLINE = 300.0
"""Seconds for all cases together, which take some ten; one that is quadratic in a megabyte takes an
hour alone."""

STREAMS = {
    "json": ("json", worst.JSON_DDL, worst.json_cases),
    "json, decimals in arrays": ("json", worst.ARRAYS_DDL, worst.arrays_cases),
    "csv": ("csv", worst.CSV_DDL, worst.csv_cases),
}


@pytest.mark.parametrize(
    "name", ["json", pytest.param("json, decimals in arrays", marks=pytest.mark.full), "csv"]
)
def test_the_worst_of_a_megabyte_is_judged(
    spark: SparkSession, name: str, environment: dict[str, Any]
) -> None:
    form, ddl, build = STREAMS[name]
    cases = build()
    stream = Stream.model_validate(
        {
            "name": "e",
            "topic": "e",
            "table": "l.e",
            "schema": ddl,
            "columns": parse_columns(ddl),
            "key": "id",
            "format": form,
        }
    )
    at = datetime(2026, 11, 21, 3, tzinfo=UTC)
    rows = [
        (b"k", bytearray(value or b""), "e", 0, i, at, 0)
        for i, (value, _, _) in enumerate(cases.values())
    ]
    frame = spark.createDataFrame(rows, SOURCE).withColumn("ingest_hour", F.lit(HOUR))
    decoded = records.decode(
        frame, stream, open_format(Environment.model_validate(environment), stream)
    )
    names, judged = list(cases), dict[str, tuple[str | None, str]]()

    def judge() -> None:
        for row in decoded.select("kafka_offset", "error_code", "error_text").toLocalIterator():
            judged[names[row.kafka_offset]] = (row.error_code, row.error_text or "")

    working = threading.Thread(target=judge, daemon=True)
    working.start()
    working.join(DEADLINE)
    assert not working.is_alive(), (
        f"expected every verdict, found none yet of {sorted(set(names) - set(judged))}"
    )
    wrong = {
        case: (judged.get(case), code)
        for case, (_, code, words) in cases.items()
        if case not in judged or judged[case][0] != code or words not in judged[case][1]
    }
    assert not wrong
