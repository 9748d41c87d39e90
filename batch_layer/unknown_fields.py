"""Fields that the stream's schema does not know: their names, the number of an hour's records with
each, and the shape of their values.

Names and values are arbitrary input of producers, so everything kept of them is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from anabranch.config.format_settings import UNKNOWN_NAME_LENGTH
from anabranch.decode.guessed import guess_type
from anabranch.protocol.ledger_row import UnknownField, UnknownFields
from anabranch.protocol.sample_shapes import shape_of
from anabranch.records import UNKNOWN
from batch_layer.offset_counts import DRIFTS

MOST_NAMES, MOST_OF_RECORD = 50, 200
"""Maximum number of names counted for an hour, and of names read from one record."""
SAMPLES, MOST_BYTES = 10_000, 65_536
"""Maximum number of an hour's offsets whose values are cached for samples, and of bytes of such a
value."""

_SAMPLE = 80  # characters

Place = tuple[int, int]


def count_unknown(decoded: DataFrame, drifting: int) -> UnknownFields:
    """Count the unknown fields of an hour's `drifting` records by name, the most frequent names
    first.

    Exact for each listed name, among the first names of each record. Samples come from the first
    and the last record whose value was cached; a rare field of a large hour may have none.
    """
    if not drifting:
        return UnknownFields(0)
    names = (
        f"transform(slice({UNKNOWN}, 1, {MOST_OF_RECORD}), name -> substring(name, 1, "
        f"{UNKNOWN_NAME_LENGTH}))"
    )
    places = {"first": "min({})", "last": "max({})", "first_kept": "min({}) FILTER (WHERE kept)"}
    places["last_kept"] = "max({}) FILTER (WHERE kept)"
    # Group by partition first: columns of a hash aggregation must not be structs.
    by_partition = (
        decoded.where(DRIFTS)
        .selectExpr(
            "kafka_partition",
            "kafka_offset",
            "kafka_value IS NOT NULL AS kept",
            f"explode(array_distinct({names})) AS name",
        )
        .groupBy("name", "kafka_partition")
        .agg(
            F.count("*").alias("n"),
            *(F.expr(of.format("kafka_offset")).alias(n) for n, of in places.items()),
        )
        .withColumn("kept", F.col("first_kept").isNotNull())
    )
    by_name = by_partition.groupBy("name").agg(
        F.sum("n").alias("n"),
        *(
            F.expr(of.format(f"struct(kafka_partition, {name})")).alias(name)
            for name, of in places.items()
        ),
    )
    top = by_name.orderBy(F.desc("n"), "name").limit(MOST_NAMES + 1).collect()
    others = by_name.count() - MOST_NAMES if len(top) > MOST_NAMES else 0
    kept = {
        row["name"]: [tuple(row[of]) for of in ("first_kept", "last_kept") if row[of]]
        for row in top[:MOST_NAMES]
    }
    values = _values(decoded, {at for of_name in kept.values() for at in of_name})

    def objects(name: str) -> list[Mapping[str, Any]]:
        return [values[at] for at in kept[name] if at in values]

    fields = tuple(
        sampled(
            UnknownField(r["name"], r["n"], tuple(r["first"]), tuple(r["last"])), objects(r["name"])
        )
        for r in top[:MOST_NAMES]
    )
    return UnknownFields(drifting, fields, others)


def _values(decoded: DataFrame, places: Iterable[Place]) -> dict[Place, Mapping[str, Any]]:
    if not (ordered := sorted(places)):
        return {}
    at = " OR ".join(f"(kafka_partition = {p} AND kafka_offset = {o})" for p, o in ordered)
    rows = (
        decoded.where(f"({at}) AND {DRIFTS}")
        .select("kafka_partition", "kafka_offset", "kafka_value")
        .collect()
    )
    objects = {(row[0], row[1]): parsed(bytes(row[2])) for row in rows if row[2] is not None}
    return {place: value for place, value in objects.items() if value is not None}


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
