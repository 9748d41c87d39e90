"""The newest records of a topic, decoded with a stream's file as the jobs would, without Spark."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa

from anabranch.config import Environment, Stream
from anabranch.decode import Decoded, Decoder, client_records, decode_spec
from anabranch.decode.wire import schema_ids
from anabranch.offsets.hours import hour_of
from anabranch.subjects.schemas import open_schemas


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
    batch = client_records.batch_of(ordered)
    hours = [
        hour_of(now if at is None or r.timestamp < 0 else at)
        for r, at in zip(ordered, batch.column("timestamp").to_pylist(), strict=True)
    ]
    return batch.append_column("ingest_hour", pa.array(hours, pa.string()))
