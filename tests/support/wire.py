"""Values in Confluent's wire format."""

import io
import json
from typing import Any

import fastavro


def wired(schema_id: int, payload: bytes) -> bytes:
    """Return the wire format: a zero byte, the schema id, and the payload."""
    return b"\0" + schema_id.to_bytes(4, "big") + payload


def plain(schema: Any) -> Any:
    """Return a schema without logical types: values as the numbers and bytes that are written."""
    if isinstance(schema, dict):
        kept = {k: v for k, v in schema.items() if k not in ("logicalType", "precision", "scale")}
        return {k: v if k in ("symbols", "name") else plain(v) for k, v in kept.items()}
    return [plain(branch) for branch in schema] if isinstance(schema, list) else schema


def encode(schema: Any, value: Any) -> bytes:
    """Return a value in Avro's binary encoding, of Avro's JSON encoding of it."""
    [read] = fastavro.json_reader(io.StringIO(json.dumps(value)), plain(schema))
    return written(schema, read)


def written(schema: Any, value: Any) -> bytes:
    """Return a value in Avro's binary encoding: of logical types, as the numbers and bytes."""
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(plain(schema)), value)
    return out.getvalue()


def varint(number: int) -> bytes:
    """Return the encoding of an Avro int or long."""
    rest, out = (number << 1) ^ (number >> 63), b""
    while rest > 127:
        out, rest = out + bytes([rest & 127 | 128]), rest >> 7
    return out + bytes([rest])
