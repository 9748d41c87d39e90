"""Records as Spark's Kafka source hands them to a worker, with columns that workers read."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pyarrow as pa

from anabranch.config.columns import Column

HOUR = "2026-11-21T03"
START = datetime(2026, 11, 21, 3, tzinfo=UTC)
AT = START + timedelta(minutes=10)
COLUMNS = (
    Column("id", "string", False),
    Column("at", "timestamp", True),
    Column("level", "int", True),
    Column("total", "bigint", True),
    Column("amount", "double", True),
    Column("ok", "boolean", True),
    Column("day", "date", True),
    Column("name", "string", True),
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)


def micros(at: datetime | None) -> int | None:
    return None if at is None else (at - EPOCH) // MICROSECOND


def new_batch(
    values: Sequence[bytes | None],
    stamps: Sequence[int | None] | None = None,
    hours: Sequence[str] | None = None,
    partitions: Sequence[int] | None = None,
) -> pa.RecordBatch:
    """Records as Spark's Kafka source hands them to a task, at offsets from 100 on."""
    count = len(values)
    stamps = stamps if stamps is not None else [micros(AT)] * count
    return pa.record_batch(
        {
            "partition": pa.array(partitions or [3] * count, pa.int32()),
            "offset": pa.array(range(100, 100 + count), pa.int64()),
            "timestamp": pa.array(stamps, pa.int64()).cast(pa.timestamp("us", "UTC")),
            "value": pa.array(values, pa.binary()),
            "ingest_hour": pa.array(hours or [HOUR] * count, pa.string()),
        }
    )
