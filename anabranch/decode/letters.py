"""The dead letters of a decoded batch."""

from __future__ import annotations

import pyarrow as pa

from anabranch.decode import Decoded
from anabranch.decode.headers import headers_of

_KAFKA = ["kafka_partition", "kafka_offset", "kafka_timestamp", "ingest_hour"]


def letters_of(batch: pa.RecordBatch, decoded: Decoded, topic_id: str, layer: str) -> pa.Table:
    """Return the records of a batch (`Decoder.decode`) that have an error, in the columns of the
    dead letters table, with their bytes unchanged."""
    places = sorted(decoded.errors)
    at = pa.array(places, pa.int64())
    records, errors = batch.take(at), [decoded.errors[i] for i in places]
    kafka = decoded.rows.select(_KAFKA).take(at)
    return pa.table(
        {
            "topic_id": pa.repeat(topic_id, len(at)),
            **dict(zip(_KAFKA, kafka.columns, strict=True)),
            "key": records.column("key"),
            "value": records.column("value"),
            "headers": headers_of(records.column("headers")),
            "error_code": pa.array([code for code, _ in errors], pa.string()),
            "error_text": pa.array([text for _, text in errors], pa.string()),
            "layer": pa.repeat(layer, len(at)),
        }
    )
