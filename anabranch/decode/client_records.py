"""Records of a Kafka client in Python as a batch for a decoder, for reads without Spark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from anabranch.decode.headers import text_of
from anabranch.decode.values import FIRST_MICROS, LAST_MICROS, MICROS

BATCH_RECORDS, BATCH_BYTES = 10_000, 16 * 2**20
"""Limits of a batch that a decoder reads, in Spark's workers too."""


def split_records(records: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the records in parts of at most BATCH_RECORDS, which end once they have more than
    BATCH_BYTES. Pure."""
    part, size = list[Any](), 0
    for record in records:
        if len(part) == BATCH_RECORDS or size > BATCH_BYTES:
            yield part
            part, size = [], 0
        part.append(record)
        size += len(record.value or b"") + len(record.key or b"")
    if part:
        yield part


def batch_of(records: Sequence[Any]) -> pa.RecordBatch:
    """Return kafka-python's records as a decoder's batch, without `ingest_hour`, in their order. A
    timestamp outside of the calendar is null, as for both layers. Pure."""
    stamps = [
        micros if FIRST_MICROS <= (micros := r.timestamp * 1000) <= LAST_MICROS else None
        for r in records
    ]
    return pa.record_batch(
        {
            "key": pa.array([r.key for r in records], pa.binary()),
            "value": pa.array([r.value for r in records], pa.binary()),
            "partition": pa.array([r.partition for r in records], pa.int32()),
            "offset": pa.array([r.offset for r in records], pa.int64()),
            "timestamp": pa.array(stamps, pa.int64()).cast(MICROS),
            "headers": pa.array([text_of(r.headers) for r in records], pa.binary()),
        }
    )
