"""The newest records of a topic, decoded with a stream's file as the jobs would, without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from anabranch.config import Environment, Stream
from anabranch.decode import Decoded, Decoder, decode_spec
from anabranch.decode.headers import text_of
from anabranch.decode.values import LAST_MICROS, MICROS
from anabranch.decode.wire import schema_ids
from anabranch.offsets.hours import hour_of
from anabranch.subjects.schemas import open_schemas

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def decode_sample(environment: Environment, stream: Stream, records: pa.RecordBatch) -> Decoded:
    """Decode records of `batch_of`. Raises Transient and ConfigurationError of the registry."""
    schemas = open_schemas(environment, stream)
    if stream.format.needs_registry:
        schemas.learn({int(id) for id in schema_ids(records.column("value")) if id > 0})
    spec = decode_spec(stream, schemas.known, True, environment.masking_secret)
    return Decoder(spec).decode(records)


def batch_of(records: Sequence[Any], now: datetime) -> pa.RecordBatch:
    """Return kafka-python's records as a decoder's batch, oldest first. The ingest hour is that of
    the record's timestamp, or of `now` if it has none that is a time. Pure."""
    ordered = sorted(records, key=lambda r: (r.timestamp, r.offset, r.partition))
    is_time = [0 <= r.timestamp <= LAST_MICROS // 1000 for r in ordered]
    hours = [
        hour_of(_EPOCH + timedelta(milliseconds=r.timestamp) if known else now)
        for r, known in zip(ordered, is_time, strict=True)
    ]
    stamps = [
        r.timestamp * 1000 if known else None for r, known in zip(ordered, is_time, strict=True)
    ]
    return pa.record_batch(
        {
            "key": pa.array([r.key for r in ordered], pa.binary()),
            "value": pa.array([r.value for r in ordered], pa.binary()),
            "partition": pa.array([r.partition for r in ordered], pa.int32()),
            "offset": pa.array([r.offset for r in ordered], pa.int64()),
            "timestamp": pa.array(stamps, pa.int64()).cast(MICROS),
            "ingest_hour": pa.array(hours, pa.string()),
            "headers": pa.array([text_of(r.headers) for r in ordered], pa.binary()),
        }
    )
