"""Find erased values: rows by the values of a column, other records by a search of their bytes.

Files whose bounds exclude every value are not opened. From the others, the search reads the column
and the rows' places, in row groups whose Bloom filters do not exclude every value.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.conversions import from_bytes
from pyiceberg.types import IntegerType, LongType, PrimitiveType, StringType

from anabranch.common.errors import ConfigurationError
from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.bloom_filters import groups_that_may_hold
from anabranch.iceberg.manifests import hour_of_file
from anabranch.iceberg.rewriting import opened, read_batches
from anabranch.lifecycle.erasure.payloads import Payloads
from anabranch.lifecycle.erasure.words import Words
from anabranch.protocol.erased import Erasure
from anabranch.protocol.erasure import log_of
from anabranch.protocol.state import State

if TYPE_CHECKING:
    import pyarrow.parquet as pq
    from pyiceberg.manifest import DataFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table

_AT_ONCE = 8
# One of 100 other values seems to be in a filter, and 100,000 take 50 ms a file.
_MOST_FILTERED = 1_000
_PLACES = ("kafka_partition", "kafka_offset")
_FIELD_ID = b"PARQUET:field_id"
_NUMBER = re.compile("0|-?[1-9][0-9]*", re.ASCII)

Place = tuple[int, int]
"""Partition and offset."""

Covered = Callable[[int], tuple[int, int]]
"""Returns the offsets [start, end) of a partition that an erasure covers."""


@dataclass(frozen=True)
class Values:
    """The values of a column to search for, as texts; if only their hashes are known, `texts` is
    empty and `matches` tests a value."""

    column: str
    texts: frozenset[str]
    matches: Callable[[str], bool]

    @staticmethod
    def of(column: str, texts: Collection[str]) -> Values:
        known = frozenset(texts)
        return Values(column, known, known.__contains__)

    @cached_property
    def array(self) -> pa.StringArray:
        return pa.array(self.ordered, pa.string())

    @cached_property
    def ordered(self) -> list[str]:
        return sorted(self.texts)

    @cached_property
    def words(self) -> Words:
        return Words(self.texts)

    @cached_property
    def numbers(self) -> list[int]:
        """The texts of a column of whole numbers, as sorted numbers."""
        return sorted(map(int, self.texts))


def require_column(schema: Schema, name: str, stream: str) -> None:
    """Raise ConfigurationError if the table lacks the column, or its type is not text or a whole
    number."""
    found = next((field for field in schema.fields if field.name == name), None)
    if found is None or not isinstance(found.field_type, StringType | IntegerType | LongType):
        fitting = [
            f.name
            for f in schema.fields
            if isinstance(f.field_type, StringType | IntegerType | LongType)
        ]
        raise ConfigurationError(
            f"stream {stream}: --by {name}: expected a column of type STRING, INT or BIGINT, "
            f"found {'no such column' if found is None else found.field_type}; columns: "
            f"{', '.join(fitting)}"
        )


def require_values(schema: Schema, values: Values) -> None:
    """Raise ConfigurationError for values that are not the text of a whole number, if the column
    has whole numbers: no row would match."""
    if isinstance(schema.find_field(values.column).field_type, StringType):
        return
    if other := [text for text in values.ordered if _NUMBER.fullmatch(text) is None]:
        raise ConfigurationError(
            "--values: expected whole numbers without leading zeros, such as 4711, for column "
            f"{values.column}, found "
            f"{other[0]!r}{f' and {len(other) - 1} others' if other[1:] else ''}"
        )


def may_hold(schema: Schema, data_file: DataFile, values: Values) -> bool:
    """Return whether a file may contain one of the values, by its bounds; True if it has no bounds.
    Pure."""
    found = schema.find_field(values.column)
    assert isinstance(found.field_type, PrimitiveType)
    lower = (data_file.lower_bounds or {}).get(found.field_id)
    upper = (data_file.upper_bounds or {}).get(found.field_id)
    if lower is None or upper is None or not values.texts:
        return True
    least, most = (from_bytes(found.field_type, bound) for bound in (lower, upper))
    ordered: list[Any] = (
        values.ordered if isinstance(found.field_type, StringType) else values.numbers
    )
    at = bisect_left(ordered, least)
    return at < len(ordered) and ordered[at] <= most


def covered_of(state: State, one: Erasure, data_file: DataFile) -> Covered:
    """Return the offsets that an erasure covers in a file of the stream's rows, by the log of its
    hour. Pure."""
    hour = hour_of_file(state.table, data_file)
    return partial(one.offsets, hour, log_of(state, hour))


def find_rows(
    state: State, one: Erasure, values: Values, files: Iterable[DataFile]
) -> dict[str, dict[int, int]]:
    """Return the numbers of the erasure's rows by path and partition; only files with such rows.
    Raises Transient."""
    found = find_places(state, one, values, files)
    return {
        path: dict(Counter(partition for partition, _ in places)) for path, places in found.items()
    }


def find_places(
    state: State, one: Erasure, values: Values, files: Iterable[DataFile]
) -> dict[str, list[Place]]:
    """Return the places of the erasure's rows by path; only files with such rows. Raises
    Transient."""
    table, schema = state.table, state.table.schema()
    candidates = [f for f in files if may_hold(schema, f, values)]

    def find(data_file: DataFile) -> list[Place]:
        places: list[Place] = []
        with opened(table, data_file) as parquet:
            name = column_of(parquet.schema_arrow, schema, values.column)
            if name is None:
                return []
            groups = _groups(table, data_file, parquet.metadata, name, values)
            for batch in parquet.iter_batches(
                row_groups=groups, columns=[name, *_PLACES], use_threads=False
            ):
                places += _places(
                    batch.filter(
                        erased_mask(batch, name, values, covered_of(state, one, data_file))
                    )
                )
        return places

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = zip(candidates, pool.map(find, candidates), strict=True)
        return {f.file_path: places for f, places in found if places}


def places_in(table: Table, data_file: DataFile) -> set[Place]:
    """Return the places of a file's records. Raises Transient."""
    with opened(table, data_file) as parquet:
        return {
            place
            for batch in parquet.iter_batches(columns=_PLACES, use_threads=False)
            for place in _places(batch)
        }


def _places(batch: pa.RecordBatch) -> list[Place]:
    return list(zip(*(batch[name].to_pylist() for name in _PLACES), strict=True))


def _groups(
    table: Table, data_file: DataFile, metadata: pq.FileMetaData, name: str, values: Values
) -> list[int]:
    """Return the row groups of a file that may have a value; all if only hashes are known, or so
    many values that each filter seems to have one. Raises Transient."""
    if not 0 < len(values.texts) <= _MOST_FILTERED:
        return list(range(metadata.num_row_groups))
    is_text = isinstance(table.schema().find_field(values.column).field_type, StringType)
    with lake_errors(f"read {data_file.file_path}"):
        return groups_that_may_hold(
            lambda: table.io.new_input(data_file.file_path).open(),
            metadata,
            name,
            values.ordered if is_text else values.numbers,
        )


def column_of(file_schema: pa.Schema, schema: Schema, name: str) -> str | None:
    """Return the name of a column in a file, by the field id; None if the file was written before
    the column existed."""
    id = str(schema.find_field(name).field_id).encode()
    return next((f.name for f in file_schema if (f.metadata or {}).get(_FIELD_ID) == id), None)


def erased_mask(
    batch: pa.RecordBatch, name: str, values: Values, covered: Covered
) -> pa.BooleanArray:
    texts = batch[name].cast(pa.string())
    wanted = values.array
    if not values.texts:
        distinct = texts.unique().drop_null().to_pylist()
        wanted = pa.array([text for text in distinct if values.matches(text)], pa.string())
    return pc.and_(pc.is_in(texts, wanted), _covered_mask(batch, covered))


def _covered_mask(batch: pa.RecordBatch, covered: Covered) -> pa.BooleanArray:
    partitions, offsets = batch["kafka_partition"], batch["kafka_offset"]
    mask = pa.repeat(False, len(batch))
    for p in partitions.unique().to_pylist():
        start, end = covered(p)
        of_range = pc.and_(pc.greater_equal(offsets, start), pc.less(offsets, end))
        mask = pc.or_(mask, pc.and_(pc.equal(partitions, p), of_range))
    return mask


def find_letters(
    payloads: Payloads, table: Table, one: Erasure, values: Values, files: Collection[DataFile]
) -> dict[str, set[Place]]:
    """Return the places of the erasure's records with one of the values in key, value or headers,
    by path; only files with such records. Raises the errors of `Payloads`."""

    def find(data_file: DataFile) -> set[Place]:
        found, hour = set[Place](), hour_of_file(table, data_file)
        for batch in read_batches(table, (data_file,)):
            rows = batch.select(["topic_id", *_PLACES, "key", "value", "headers"]).to_pylist()
            for row in rows:
                start, end = one.offsets(hour, row["topic_id"], row["kafka_partition"])
                if start <= row["kafka_offset"] < end and any(
                    map(values.words.are_in, payloads.of(row))
                ):
                    found.add((row["kafka_partition"], row["kafka_offset"]))
        return found

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        places = zip(files, pool.map(find, files), strict=True)
        return {f.file_path: found for f, found in places if found}


def places_by_hour(
    table: Table, files: Mapping[str, DataFile], places: Mapping[str, Collection[Place]]
) -> dict[str, set[Place]]:
    """Group places, given by the paths of their files, by the hours of these files. Pure."""
    by_hour: dict[str, set[Place]] = {}
    for path, of_file in places.items():
        by_hour.setdefault(hour_of_file(table, files[path]), set()).update(of_file)
    return by_hour
