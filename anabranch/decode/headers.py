"""A record's headers in a batch.

They are text there: Spark adds up the sizes of all columns for every record, which takes several
times as long for an array as for all others. Most records have no headers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import pyarrow as pa

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

AS_TEXT = (
    "CAST(to_json(transform(headers, h -> struct(hex(h.key) AS key, hex(h.value) AS value))) AS "
    "BINARY) AS headers"
)
"""Spark SQL for the text of the headers of Spark's Kafka source."""


def text_of(headers: Sequence[tuple[str, bytes | None]]) -> bytes | None:
    """Return the same text of one record's headers; None without any."""
    pairs = [
        {"key": key.encode().hex(), "value": None if value is None else value.hex()}
        for key, value in headers
    ]
    return json.dumps(pairs).encode() if pairs else None


def headers_of(texts: pa.Array) -> pa.Array:
    """Return the headers of `AS_TEXT`, as Kafka delivered them."""
    if texts.null_count == len(texts):
        return pa.nulls(len(texts), HEADERS)
    return pa.array(
        (None if text is None else [*_pairs(text)] for text in texts.to_pylist()), HEADERS
    )


def _pairs(text: bytes) -> Iterator[dict[str, object]]:
    for header in json.loads(text):
        # A null value is null or absent, depending on `spark.sql.jsonGenerator.ignoreNullFields`.
        value = header.get("value")
        yield {
            "key": bytes.fromhex(header["key"]).decode(),
            "value": None if value is None else bytes.fromhex(value),
        }
