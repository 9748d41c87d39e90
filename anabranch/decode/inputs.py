"""The input of a decoder: records of a Kafka client in Python as a batch, their headers, the ingest
hour of each record, by its partition and offset, and the schema ids of values.

Headers are text in a batch: Spark adds up the sizes of all columns for every record, which takes
several times as long for an array as for all others. Most records have no headers.

Confluent's wire format: a zero byte, a schema id of four bytes (big endian), then the payload.

Source:
https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/index.html#wire-format.
A record's headers are not read, so a schema id in a header cannot be used. No registry has an id
0: it is the beginning of an id of eight bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.common.arrays import groups_by_size
from anabranch.decode.values import FIRST_MICROS, LAST_MICROS, MICROS, Errors, found
from anabranch.offsets.hours import HourRange

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


BATCH_RECORDS, BATCH_BYTES = 10_000, 16 * 2**20
"""Limits of a batch that a decoder reads, in Spark's workers too."""


def split_records(records: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Yield the records in parts of at most BATCH_RECORDS and BATCH_BYTES. Pure."""

    def size(record: Any) -> int:
        return len(record.value or b"") + len(record.key or b"")

    return groups_by_size(records, size, BATCH_BYTES, BATCH_RECORDS)


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


def assign_hours(batch: pa.RecordBatch, hours: Sequence[HourRange]) -> pa.RecordBatch:
    """Return the batch with `ingest_hour`: the first of `hours` (oldest first, `check_hours`) whose
    end for the record's partition is above its offset.

    A partition that an hour's `ends` lacks was added later and has no record in that hour. The hour
    with `ends=None` comes last and takes the rest. Without it, a record outside all hours raises
    ValueError. Pure.
    """
    names = [entry.hour for entry in hours]
    closed = [entry.ends for entry in hours if entry.ends is not None]
    partitions, offsets = (batch.column(name).to_numpy() for name in ("partition", "offset"))
    places = np.zeros(len(batch), np.int64)
    for p in np.unique(partitions):
        of = partitions == p
        # An offset's hour is the first whose end is above it. Its index is the number of ends at or
        # below the offset: ends never decrease.
        ends = np.asarray([entry.get(int(p), 0) for entry in closed], np.int64)
        places[of] = np.searchsorted(ends, offsets[of], side="right")
    # An offset after the last decided hour has no hour, and must not get the last one: it would be
    # in another hour than in the batch layer's cut.
    if len(places) and places.max() >= len(names):
        at = int(places.argmax())
        raise ValueError(
            f"partition {partitions[at]}, offset {offsets[at]}: expected an offset of the hours "
            f"{names[0]} to {names[-1]}"
        )
    return batch.append_column("ingest_hour", pa.array(names).take(pa.array(places)))


def check_hours(hours: Sequence[HourRange]) -> tuple[HourRange, ...]:
    """Return the hours. Raises ValueError for none, or hours that contradict each other."""
    if not hours:
        raise ValueError("hours: expected at least one, found none")
    known: dict[int, int] = {}
    previous = ""
    for i, entry in enumerate(hours):
        if entry.hour <= previous:
            raise ValueError(f"hours: expected oldest first, found {entry.hour} after {previous}")
        if entry.ends is None:
            if i != len(hours) - 1:
                raise ValueError(f"hours: expected only the last without ends, found {entry.hour}")
            continue
        for partition, end in known.items():
            if entry.ends.get(partition, -1) < end:
                raise ValueError(
                    f"hours: {entry.hour}: expected an end of at least {end} for partition "
                    f"{partition}, found {entry.ends.get(partition)}"
                )
        known |= entry.ends
        previous = entry.hour
    return tuple(hours)


PREFIX_BYTES = 5
"""The length of a zero byte and a schema id, before a payload."""

DESCRIPTOR = 0
"""The key of the schema of values without a schema id, since no registry has this id."""

ID_PLACES = (
    "Producers must write the id before the payload, in four bytes, not in a header (Confluent: "
    "__value_schema_id) nor in eight bytes (Apicurio)"
)
"""The remedy for records whose schema id is elsewhere."""

UNLISTED = re.compile(r"schema id ([0-9]+): expected it among those listed")


@dataclass(frozen=True)
class WriterSchema:
    """The registry's schema of an id: its text, or the error (code, text) of its records."""

    text: str = ""
    error: tuple[str, str] | None = None


class UnlistedSchema(Exception):
    """Records have schema ids of which the decoder was given neither schema nor error: `ids`."""

    def __init__(self, ids: list[int]) -> None:
        super().__init__("; ".join(f"schema id {id}: expected it among those listed" for id in ids))
        self.ids = ids


def split(
    value: pa.Array, schemas: Mapping[int, WriterSchema], kind: str, errors: Errors
) -> tuple[pa.Array, np.ndarray]:
    """Return each value's payload and schema id; -1, with an error, for a value that is not in the
    wire format or whose id has an error. Raises UnlistedSchema."""
    ids = schema_ids(value)
    for i in np.flatnonzero(ids < 0).tolist():
        one = value[i].as_py()
        if one is None:
            errors.add(
                i,
                Errors.WHOLE,
                "null_value",
                found(f"a value in {kind} wire format", "a null value"),
            )
        else:
            text = found(
                "a zero byte and a schema id of four bytes", one[:PREFIX_BYTES].hex().upper()
            )
            errors.add(i, Errors.WHOLE, "not_wire_format", f"{text}. {ID_PLACES}")
    every = np.unique(ids[ids >= 0]).tolist()
    if unlisted := [id for id in every if id not in schemas]:
        raise UnlistedSchema(unlisted)
    for id in every:
        if (error := schemas[id].error) is not None:
            for i in np.flatnonzero(ids == id).tolist():
                errors.add(i, Errors.WHOLE, error[0], f"schema id {id}: {error[1]}")
            ids[ids == id] = -1
    # An end is given because Arrow 26 fails without one.
    return pc.binary_slice(value, PREFIX_BYTES, 2**31 - 1), ids


def schema_ids(value: pa.Array) -> np.ndarray:
    """Return the schema id of each value; -1 for a value that is not in the wire format."""
    ids = np.full(len(value), -1, np.int64)
    is_long = pc.fill_null(pc.greater_equal(pc.binary_length(value), PREFIX_BYTES), False)
    places = np.flatnonzero(is_long.to_numpy(zero_copy_only=False))
    if len(places):
        heads = pc.binary_slice(value.take(pa.array(places)), 0, PREFIX_BYTES)
        data = (
            np.frombuffer(b"".join(heads.to_pylist()), np.uint8)
            .reshape(-1, PREFIX_BYTES)
            .astype(np.int64)
        )
        found_ids = data[:, 1:] @ np.array([2**24, 2**16, 2**8, 1])
        ids[places] = np.where((data[:, 0] == 0) & (found_ids > 0), found_ids, -1)
    return ids
