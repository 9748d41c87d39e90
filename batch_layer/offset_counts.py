"""Count an hour's offsets, those of its ranges in the staged files and those that were read, and
the fields of its records that the stream's schema does not know.

Offsets are counted as bits: one number for 64 neighbours, combined by OR. An offset that occurs
twice counts once, exactly. At most a sixtieth of the rows is shuffled, since neighbours are read
together.

Unknown fields have a name, the number of an hour's records with it, and the shape of their values.
The shape is without a value's contents: the ledger stores it, and the value may be a secret.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F

from anabranch.decode import REFUSED_FIELD
from anabranch.decode.debezium import row_of
from anabranch.decode.guessed import guess_type
from anabranch.decode.inputs import PREFIX_BYTES
from anabranch.kafka.batches import Missing
from anabranch.offsets.position import Offsets, Ranges
from anabranch.protocol.ledger_row import UnknownField, UnknownFields
from anabranch.records import UNKNOWN, inside
from anabranch.records.hashes import PLACE
from anabranch.records.staged import FoundName, UnknownNames
from batch_layer.balance import Counted

DRIFTS = f"size({UNKNOWN}) > 0 AND (NOT is_dead OR error_code = '{REFUSED_FIELD}')"
"""SQL condition: a decoded record has fields unknown to the schema, and is a row or would be a row
without them."""


def count(rows: DataFrame, ranges: Ranges) -> Counted:
    """Count distinct offsets inside the ranges by partition, all rows, and rows outside."""
    counts = _counts(rows, ranges, {"rows": "count(*)"})
    return Counted(
        distinct={row["kafka_partition"]: row["offsets"] for row in counts if row["within"]},
        rows=sum(row["rows"] for row in counts),
        outside=sum(row["rows"] for row in counts if not row["within"]),
    )


@dataclass(frozen=True)
class OffsetMasks:
    """Offsets of ranges by partition, a byte each: `start + i` is among them if its mask is True.
    `outside`: the number of places outside the ranges."""

    masks: dict[int, Missing]
    outside: int = 0

    @staticmethod
    def of(places: Iterable[pa.Table], ranges: Ranges) -> OffsetMasks:
        masks = {p: np.zeros(max(0, e - s), bool) for p, (s, e) in ranges.items()}
        outside = 0
        for table in places:
            partitions, offsets = (table.column(name).to_numpy() for name in PLACE)
            for p in np.unique(partitions).tolist():
                start, end = ranges.get(p, (0, 0))
                of = offsets[partitions == p]
                within = of[(start <= of) & (of < end)]
                outside += len(of) - len(within)
                if len(within):
                    masks[p][within - start] = True
        return OffsetMasks({p: Missing(ranges[p][0], mask) for p, mask in masks.items()}, outside)

    @property
    def distinct(self) -> Offsets:
        return {p: of.count for p, of in self.masks.items() if of.count}

    def lacks(self, places: Iterable[pa.Table]) -> bool:
        """Return whether one of `places`, inside the ranges, is not among the offsets."""
        ranges = {p: (of.start, of.start + len(of.mask)) for p, of in self.masks.items()}
        others = OffsetMasks.of(places, ranges).masks
        return any((others[p].mask & ~of.mask).any() for p, of in self.masks.items())

    def missing(self) -> dict[int, Missing]:
        """Return the other offsets of the ranges, by partition."""
        others = {p: Missing(of.start, ~of.mask) for p, of in self.masks.items()}
        return {p: of for p, of in others.items() if of.count}


def count_places(places: Iterable[pa.Table], rows: int, ranges: Ranges) -> Counted:
    """Count like `count`: places in the driver's memory, of `rows` rows."""
    found = OffsetMasks.of(places, ranges)
    return Counted(found.distinct, rows, found.outside)


@dataclass(frozen=True)
class ReadCounts:
    """Counts of the records read: distinct offsets inside the cut by partition, good and dead
    records, and all records by source."""

    held: Offsets = field(default_factory=dict)
    good: int = 0
    dead: int = 0
    sources: dict[str, int] = field(default_factory=dict)


def count_read(decoded: DataFrame, ranges: Ranges, sources: Sequence[str]) -> ReadCounts:
    """Count decoded records from `sources`, in one pass."""
    source_sums = {source: f"count_if(source = '{source}')" for source in sources}
    sums = {"good": "count_if(NOT is_dead)", "dead": "count_if(is_dead)", **source_sums}
    counts = _counts(decoded, ranges, sums)
    by_source = {source: sum(row[source] for row in counts) for source in sorted(sources)}
    return ReadCounts(
        held={row["kafka_partition"]: row["offsets"] for row in counts if row["within"]},
        good=sum(row["good"] for row in counts),
        dead=sum(row["dead"] for row in counts),
        sources={source: number for source, number in by_source.items() if number},
    )


def _counts(rows: DataFrame, ranges: Ranges, sums: Mapping[str, str]) -> list[Row]:
    """Return the distinct `offsets` and the `sums`, by partition and inside or not."""
    by_neighbours = (
        rows.withColumn("within", F.expr(inside(ranges)))
        .groupBy(
            "kafka_partition", "within", F.expr("shiftright(kafka_offset, 6)").alias("neighbours")
        )
        .agg(
            F.expr("bit_or(shiftleft(1L, CAST(kafka_offset & 63 AS INT)))").alias("bits"),
            *(F.expr(sql).alias(name) for name, sql in sums.items()),
        )
    )
    return (
        by_neighbours.groupBy("kafka_partition", "within")
        .agg(
            F.expr("sum(bit_count(bits))").alias("offsets"),
            *(F.sum(name).alias(name) for name in sums),
        )
        .collect()
    )


def missing_offsets(held: DataFrame, ranges: Ranges) -> dict[int, Missing]:
    """Return the offsets of the ranges that are missing in `held`, by partition. Takes a byte of
    driver memory for each offset."""
    words = (
        held.where(inside(ranges))
        .groupBy("kafka_partition", F.expr("shiftright(kafka_offset, 6)").alias("word"))
        .agg(F.expr("bit_or(shiftleft(1L, CAST(kafka_offset & 63 AS INT)))").alias("bits"))
        .toArrow()
    )
    partitions, at, bits = (words[name].to_numpy() for name in ("kafka_partition", "word", "bits"))
    missing = {}
    for p, (start, end) in ranges.items():
        first, in_partition = start >> 6, partitions == p
        present = np.zeros((((end - 1) >> 6) - first + 1, 64), np.uint8)
        present[at[in_partition] - first] = np.unpackbits(
            bits[in_partition].astype("<i8").view(np.uint8).reshape(-1, 8),
            axis=1,
            bitorder="little",
        )
        mask = present.reshape(-1)[start - (first << 6) : end - (first << 6)] == 0
        if mask.any():
            missing[p] = Missing(start, mask)
    return missing


def split_missing(
    missing: Mapping[int, Missing], in_kafka: Ranges
) -> tuple[Offsets, dict[int, Missing]]:
    """Split missing offsets into the number before Kafka's log start and the offsets after it, by
    partition."""
    lost, rest = {}, {}
    for p, offsets in missing.items():
        begins = in_kafka.get(p, (offsets.start + len(offsets.mask), 0))[0]
        before, after = (
            offsets.mask[: begins - offsets.start],
            Missing(begins, offsets.mask[begins - offsets.start :]),
        )
        if before.any():
            lost[p] = int(np.count_nonzero(before))
        if after.count:
            rest[p] = after
    return lost, rest


# A JSON string, which may be truncated, and whether it is a key; or a digit of a number.
_PART = re.compile(r'"((?:\\.|[^"\\])*)("?)(\s*:)?|[0-9]', re.DOTALL)
# A character of a JSON string, with its escape.
_CHARACTER = re.compile(r"\\u[0-9a-fA-F]{4}|\\.|[^\\]", re.DOTALL)


def shape_of(sample: str) -> str:
    """Replace letters of values in a JSON text by `a` or `A`, digits by `9`: `"2026-11-21T03Z"` is
    `"9999-99-99A99A"`. Names of fields, true, false, null stay. Idempotent. Pure."""
    return _PART.sub(_masked, sample)


def _masked(part: re.Match[str]) -> str:
    text, end, colon = part.groups()
    if text is None:
        return "9"
    if colon is not None:
        return part.group()
    return f'"{_CHARACTER.sub(lambda c: _class(c.group()), text)}{end}'


def _class(character: str) -> str:
    if len(character) == 6:
        return "a"
    if len(character) == 2 or not character.isalnum():
        return character
    return "9" if character.isdigit() else "A" if character.isupper() else "a"


MOST_NAMES = 50
"""Maximum number of names counted for an hour."""

_SAMPLE = 80  # characters


def sum_unknown(found: UnknownNames, envelope: str | None = None) -> UnknownFields:
    """Return the unknown fields that workers counted, the most frequent names first. `envelope`: of
    the records, whose rows have the fields. Pure."""
    names = sorted(found.names.items(), key=lambda item: (-item[1].records, item[0]))

    def field_of(name: str, one: FoundName) -> UnknownField:
        values = (value for _, value in sorted(one.values.items()))
        objects = [parsed(value if envelope is None else row_of(value)) for value in values]
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
            for partition, offset, names, value in zip(*batch.columns, strict=True):
                found.add(names.as_py(), {(partition.as_py(), offset.as_py()): value})
        yield pa.RecordBatch.from_pydict({"found": [pickle.dumps(found)]})

    found = records.mapInArrow(run, "found BINARY").collect()
    return UnknownNames.sum(pickle.loads(bytes(row.found)) for row in found)


def parsed(value: bytes) -> Mapping[str, Any] | None:
    """Return a record's JSON object, also after a schema id; None if Python cannot. Pure."""
    try:
        # In the wire format, a zero and a schema id precede it.
        found = json.loads(value[PREFIX_BYTES:] if value[:1] == b"\0" else value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def sampled(field: UnknownField, values: Sequence[Mapping[str, Any]]) -> UnknownField:
    """Return the field with the shape of one of these records' values and their type. Pure."""
    held = [one for value in values for one in _values_at(value, field.name)]
    if not held:
        return field
    text = shape_of(json.dumps(next((v for v in held if v is not None), None)))
    short = text if len(text) <= _SAMPLE else text[:_SAMPLE] + "…"
    return replace(field, sample=short, type=guess_type(held))


def _values_at(value: Any, path: str) -> Iterator[Any]:
    """Yield the values of a field in a record, by its name (`anabranch.decode.field_tree`)."""
    if not path:
        yield value
    elif path[:2] in ("[]", "{}") and isinstance(value, dict if path[0] == "{" else list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _values_at(one, path[2:])
    elif isinstance(value, dict):
        path = path.removeprefix(".")
        for name, one in value.items():
            # Of a name with dots, the parts may be names too.
            if path.startswith(name) and path[len(name) : len(name) + 1] in ("", ".", "[", "{"):
                yield from _values_at(one, path[len(name) :])
