"""Fields that the stream's schema does not know: their names, the number of an hour's records with
each, and the shape of their values."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame

from anabranch.decode.guessed import guess_type
from anabranch.protocol.ledger_row import UnknownField, UnknownFields
from anabranch.protocol.sample_shapes import shape_of
from anabranch.records import UNKNOWN
from anabranch.records.unknown_names import FoundName, UnknownNames
from batch_layer.offset_counts import DRIFTS

MOST_NAMES = 50
"""Maximum number of names counted for an hour."""

_SAMPLE = 80  # characters


def sum_unknown(found: UnknownNames) -> UnknownFields:
    """Return the unknown fields that workers counted, the most frequent names first. Pure."""
    names = sorted(found.names.items(), key=lambda item: (-item[1].records, item[0]))

    def field_of(name: str, one: FoundName) -> UnknownField:
        objects = [parsed(value) for _, value in sorted(one.values.items())]
        field = UnknownField(name, one.records, one.first, one.last)
        return sampled(field, [value for value in objects if value is not None])

    fields = tuple(field_of(*item) for item in names[:MOST_NAMES])
    return UnknownFields(found.records, fields, max(0, len(names) - MOST_NAMES))


def count_unknown(decoded: DataFrame) -> UnknownNames:
    """Count the unknown fields of records that Spark has."""
    records = decoded.where(DRIFTS).select(
        "kafka_partition", "kafka_offset", UNKNOWN, "kafka_value"
    )

    def run(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        found = UnknownNames()
        for batch in batches:
            for partition, offset, names, value in zip(
                *(column.to_pylist() for column in batch.columns), strict=True
            ):
                found.add(names, (partition, offset), value)
        yield pa.RecordBatch.from_pydict({"found": [pickle.dumps(found)]})

    found = records.mapInArrow(run, "found BINARY").collect()
    return UnknownNames.sum(pickle.loads(bytes(row.found)) for row in found)


def parsed(value: bytes) -> Mapping[str, Any] | None:
    """Return the JSON object of a record, with or without a schema id before it; None if Python
    cannot read it. Pure."""
    try:
        # In the wire format, a zero and a schema id precede it.
        found = json.loads(value[5:] if value[:1] == b"\0" else value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def sampled(field: UnknownField, values: Sequence[Mapping[str, Any]]) -> UnknownField:
    """Return the field with the shape of one of these records' values, and with their common type.
    Pure."""
    held = [value[field.name] for value in values if field.name in value]
    if not held:
        return field
    text = shape_of(json.dumps(next((v for v in held if v is not None), None)))
    short = text if len(text) <= _SAMPLE else text[:_SAMPLE] + "…"
    return replace(field, sample=short, type=guess_type(held))
