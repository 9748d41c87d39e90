"""Values in Confluent's wire format, encoded by Avro's own Java library."""

from __future__ import annotations

import json
from typing import Any

from pyspark.sql import SparkSession


def wired(schema_id: int, payload: bytes) -> bytes:
    """Return the wire format: a zero byte, the schema id, and the payload."""
    return b"\0" + schema_id.to_bytes(4, "big") + payload


def encode(spark: SparkSession, schema: Any, value: Any) -> bytes:
    """Return a value in Avro's binary encoding. `value`: in Avro's JSON encoding (`{"string": "a"}`
    in a union)."""
    jvm: Any = spark._jvm
    avro = jvm.org.apache.avro
    parsed = avro.Schema.Parser().parse(json.dumps(schema))
    decoder = avro.io.DecoderFactory.get().jsonDecoder(parsed, json.dumps(value))
    datum = avro.generic.GenericDatumReader(parsed).read(None, decoder)
    out = jvm.java.io.ByteArrayOutputStream()
    encoder = avro.io.EncoderFactory.get().binaryEncoder(out, None)
    avro.generic.GenericDatumWriter(parsed).write(datum, encoder)
    encoder.flush()
    return bytes(out.toByteArray())


def varint(number: int) -> bytes:
    """Return the encoding of an Avro int or long."""
    rest, out = (number << 1) ^ (number >> 63), b""
    while rest > 127:
        out, rest = out + bytes([rest & 127 | 128]), rest >> 7
    return out + bytes([rest])
