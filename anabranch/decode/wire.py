"""Confluent's wire format: a zero byte, a schema id of four bytes (big endian), then the payload.

Source:
https://docs.confluent.io/platform/current/schema-registry/fundamentals/serdes-develop/index.html#wire-format.
A record's headers are not read, so a schema id in a header cannot be used. No registry has an id
0: it is the beginning of an id of eight bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.decode.values import Errors, found

_HEADER = 5

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
    """The registry's schema of an id: its text, or the error of all records with the id: code and
    text."""

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
            text = found("a zero byte and a schema id of four bytes", one[:_HEADER].hex().upper())
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
    return pc.binary_slice(value, _HEADER, 2**31 - 1), ids


def schema_ids(value: pa.Array) -> np.ndarray:
    """Return the schema id of each value; -1 for a value that is not in the wire format."""
    ids = np.full(len(value), -1, np.int64)
    is_long = pc.fill_null(pc.greater_equal(pc.binary_length(value), _HEADER), False)
    places = np.flatnonzero(is_long.to_numpy(zero_copy_only=False))
    if len(places):
        heads = pc.binary_slice(value.take(pa.array(places)), 0, _HEADER)
        data = (
            np.frombuffer(b"".join(heads.to_pylist()), np.uint8)
            .reshape(-1, _HEADER)
            .astype(np.int64)
        )
        found_ids = data[:, 1:] @ np.array([2**24, 2**16, 2**8, 1])
        ids[places] = np.where((data[:, 0] == 0) & (found_ids > 0), found_ids, -1)
    return ids
