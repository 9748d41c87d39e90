"""Where the time of a record goes: `make bench WHAT=sinks ARGS=--parts`.

Each step adds a part to the one before: Spark reads the records, makes the headers text, passes
them to Python, decodes them, and writes Parquet to memory. Without S3 and commits. CPU time of all
processes, of the last of several rounds, since a new JVM compiles its code in the first ones.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from peer import session
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from shapes import SHAPES, fill

from anabranch.common.output import print_table
from anabranch.config import EventTime
from anabranch.config.columns import parse_columns
from anabranch.decode import Decoder, DecodeSpec
from anabranch.decode.inputs import assign_hours
from anabranch.dev.services import running
from anabranch.offsets.hours import HourRange
from anabranch.records import INPUT
from anabranch.spark.workers import SETTINGS

Batches = Iterable[pa.RecordBatch]
_SHAPE, _RECORDS = SHAPES["json_440"], 2_000_000
_SPEC = DecodeSpec(parse_columns(_SHAPE.schema), EventTime(column="event_time"), "json")


def _in_python(use: Callable[[Decoder, pa.RecordBatch], object]) -> Callable[[Batches], Batches]:
    def run(batches: Batches) -> Batches:
        decoder = Decoder(_SPEC)
        for batch in batches:
            use(decoder, batch)
        yield from ()

    return run


def _decode(decoder: Decoder, batch: pa.RecordBatch) -> pa.Table:
    return decoder.decode(assign_hours(batch, (HourRange("2026-11-21T00", None),))).rows


def _write(decoder: Decoder, batch: pa.RecordBatch) -> None:
    pq.write_table(_decode(decoder, batch), pa.BufferOutputStream(), compression="zstd")


def _steps(raw: DataFrame) -> dict[str, tuple[str, DataFrame]]:
    """Return each step, with the one before it."""
    client, headers, python, decode = "client, Spark's rows", "headers", "to Python", "decode"
    read = raw.selectExpr(*INPUT)
    schema = _SHAPE.schema.replace(" NOT NULL", "")
    steps: dict[str, tuple[str, DataFrame]] = {
        client: ("", raw.select(*INPUT[:-1])),
        headers: (client, read),
    }
    before = headers
    for name, use in ((python, lambda *_: None), (decode, _decode), ("Parquet", _write)):
        steps[name] = before, read.mapInArrow(_in_python(use), "none INT")
        before = name
    parsed = F.from_json(raw.value.cast("string"), schema)
    return steps | {"Spark's from_json": (client, raw.select(parsed))}


def _cpu(services: set[psutil.Process]) -> float:
    me = psutil.Process()
    ours = {me, *me.children(recursive=True)} - services
    return sum(sum(one.cpu_times()[:2]) for one in ours)


def measure_parts(rounds: int) -> None:
    """Print the microseconds of each part."""
    conf = " ".join(f"--conf {key}={value}" for key, value in SETTINGS.items())
    os.environ |= {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_SUBMIT_ARGS": f"{conf} pyspark-shell",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-bench-") as name,
        running(Path(name) / "services") as services,
    ):
        fill(services.bootstrap_servers, _SHAPE, _RECORDS)
        others = set(psutil.Process().children(recursive=True))
        spark = session("noop", Path(name), None)
        source = (
            spark.read.format("kafka")
            .option("subscribe", _SHAPE.name)
            .option("includeHeaders", "true")
        )
        raw = source.option("kafka.bootstrap.servers", services.bootstrap_servers).load()
        for number in range(rounds):
            micros = {"": 0.0}
            rows = []
            for step, (before, frame) in _steps(raw).items():
                began = _cpu(others)
                frame.write.format("noop").mode("overwrite").save()
                micros[step] = (_cpu(others) - began) / _RECORDS * 1e6
                rows.append((step, f"{micros[step] - micros[before]:.1f}", f"{micros[step]:.1f}"))
            print(f"round {number + 1}")
            print_table(("part", "microseconds", "sum"), rows)
        spark.stop()
