"""The rows of a source in the columns of a table: their numbers by hour, and their values, which
are validated. Duplicates among them, and rows that the table has, by the stream's key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from numpy.typing import NDArray

from anabranch.common.arrays import find_sorted, grouped
from anabranch.common.errors import Refused
from anabranch.iceberg.other_tables import Part
from anabranch.offsets.hours import from_number
from anabranch.protocol.imported import HOUR_BITS, first_offset
from serving_layer.query.datasets import connected, key_part, quoted
from serving_layer.query.place_columns import Column, PlaceColumns, find_columns, locate

NUMBER = "_import_number"
TIME = "_import_time"
PLACE = ("_import_partition", "_import_offset")
"""Columns of rows: their number, which is their offset in the table and has their hour of import
(`hours_of`), the time of that hour, and the record's partition and offset in Kafka, null if the
source does not have them."""

OF_KAFKA = "_import_of_kafka"
"""A column: whether a row's time is the time at which Kafka received the record."""

READ_FROM_KAFKA = 2**40
"""The hour of rows whose offsets the stream reads from Kafka."""

_MICROS = 3_600_000_000
_BATCH_ROWS = 65_536
# The years 1 to 9999, in microseconds since 1970.
_CALENDAR = (-62_135_596_800_000_000, 253_402_300_800_000_000)
_INSTANT = pa.timestamp("us", "UTC")


@dataclass(frozen=True)
class CountedPart:
    """A part of the source and its number of rows by hour, in hours since 1970. If it has Kafka's
    offsets: `ends` has the offset after its last record, by partition, and `early` is the number of
    rows at offsets that the stream reads although they are older than the hour before the stream's
    first. `elsewhere`: the number of rows of other topics, which do not count. `lacking`: the
    table's columns that it does not have."""

    part: Part
    rows: Mapping[int, int]
    ends: Mapping[int, int] | None = None
    early: int = 0
    elsewhere: int = 0
    lacking: tuple[str, ...] = ()


@dataclass(frozen=True)
class Seam:
    """The beginning of the stream in Kafka: offsets by partition, and the hour before its first, in
    hours since 1970. Rows of files without Kafka's offsets keep the hour of their time."""

    begins: Mapping[int, int]
    last: int

    def hours(self, times: NDArray[np.int64], places: pa.Table) -> NDArray[np.int64]:
        """Return the hour of each row; READ_FROM_KAFKA at offsets that the stream reads."""
        partitions, offsets = (places[name].to_numpy() for name in PLACE)
        is_read = np.ones(len(times), bool)
        for partition, begin in self.begins.items():
            is_read &= (partitions != partition) | (offsets >= begin)
        return np.where(is_read, READ_FROM_KAFKA, np.minimum(times, self.last))


@cache
def first_number(hour: int) -> int:
    """Return the number of the first row of an hour, which is in hours since 1970."""
    return first_offset(from_number(hour))


def hours_of(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the hours of rows, in hours since 1970, from their numbers."""
    return numbers >> HOUR_BITS


def counts_by_hour(hours: NDArray[Any]) -> dict[int, int]:
    values, counts = pa.array(hours, pa.int64()).value_counts().flatten()
    return dict(zip(values.to_pylist(), counts.to_pylist(), strict=True))


@dataclass(frozen=True)
class Numbers:
    """The numbers of a part's rows: an hour's begin after the `before` rows of earlier parts.
    `late`: the rows' numbers, ascending, that are numbered from `late_from` on instead."""

    before: Mapping[int, int]
    late: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    late_from: int = 0

    def assign(self, hours: NDArray[np.int64], seen: Counter[int]) -> NDArray[np.int64]:
        """Return each row's number, from its hour's first one on. `seen`: rows so far, added to."""
        # Stable: the rows of an hour keep their order.
        order = np.argsort(hours, kind="stable")
        is_first = np.ones(len(hours), bool)
        is_first[1:] = np.diff(hours[order]) != 0
        begins = np.flatnonzero(is_first)
        found = hours[order[begins]].tolist()
        firsts = [first_number(hour) + self.before.get(hour, 0) + seen[hour] for hour in found]
        counts = np.diff(begins, append=len(hours))
        seen.update(dict(zip(found, counts.tolist(), strict=True)))
        numbers = np.zeros(len(hours), np.int64)
        numbers[order] = np.repeat(firsts - begins, counts) + np.arange(len(hours))
        if len(self.late):
            at = find_sorted(numbers, self.late)
            numbers = np.where(at >= 0, self.late_from + at, numbers)
        return numbers


@dataclass(frozen=True)
class SourceReader:
    """A reader of a source in the columns of a table: `schema` has the stream's columns with the
    table's types.

    `topic`: of the rows, where the source has a column for it. `time`: the column with the time of
    a row's hour; None for the one with the time at which Kafka received it, if it is not the
    stream's own (`serving_layer.query.place_columns`), else the stream's event time, `event_time`.
    A time without a time zone is UTC. `seam`: None to ignore Kafka's partitions and offsets.
    """

    schema: pa.Schema
    topic: str = ""
    time: str | None = None
    event_time: str | None = None
    seam: Seam | None = None

    def count(self, part: Part) -> CountedPart:
        """Return the numbers of a part's rows by hour. Raises Refused if its columns do not fit the
        table's, or a row has no time; Transient."""
        rows, ends, early, read = Counter[int](), dict[int, int](), 0, Counter[str]()
        if getattr(part, "is_empty", False):
            return CountedPart(part, rows, None if self.seam is None else ends)
        there = part.schema_arrow
        own = self._own_names(part, there)
        self._require_columns(part, there, own)
        # Any line of JSON may have a field, so that only its values show a column that is missing.
        empty = {*own} if getattr(part, "form", None) == "json" else set[str]()
        for batch, found in self._batches(part, [*empty], read):
            rows.update(counts_by_hour(found))
            empty -= {name for name in empty if batch[name].null_count < len(batch)}
            if self.seam is None or batch[PLACE[0]].null_count:
                continue
            is_early = (found == READ_FROM_KAFKA) & (_hours(batch[TIME]) < self.seam.last)
            early += int(is_early.sum())
            last = batch.select([*PLACE]).group_by(PLACE[0], use_threads=False)
            for place in last.aggregate([(PLACE[1], "max")]).to_pylist():
                partition, end = place[PLACE[0]], place[f"{PLACE[1]}_max"] + 1
                ends[partition] = max(end, ends.get(partition, 0))
        expected = getattr(part, "rows", None)
        if expected is not None and read["rows"] != expected:
            raise Refused(
                f"import {part.path}: expected {expected} rows, as its table's log says, "
                f"found {read['rows']}; restore the file"
            )
        has_places = self.seam is not None and self._columns_of(there).partition is not None
        ends_ = ends if has_places else None
        lacking = tuple(n for n in self.schema.names if n not in own or (rows and n in empty))
        return CountedPart(part, rows, ends_, early, read["rows"] - rows.total(), lacking)

    def read(
        self, part: Part, numbers: Numbers, columns: Sequence[str], first: int, last: int
    ) -> Iterator[pa.Table]:
        """Yield the rows of hours `first` to `last` (since 1970) with `columns`, `NUMBER`, `TIME`,
        `OF_KAFKA` and `PLACE`, in the part's order. Raises the errors of `count`."""
        seen = Counter[int]()
        for batch, hours in self._batches(part, columns):
            known = np.flatnonzero(hours != READ_FROM_KAFKA)
            numbered = numbers.assign(hours[known], seen)
            inside = (numbered >= first_number(first)) & (numbered < first_number(last + 1))
            if inside.any():
                rows = batch if len(known) == len(batch) else batch.take(pa.array(known))
                rows = rows if inside.all() else rows.filter(pa.array(inside))
                yield rows.append_column(NUMBER, pa.array(numbered[inside]))

    def _own_names(self, part: Part, there: pa.Schema) -> dict[str, str]:
        """Return the part's names of the stream's columns that it has: as for Spark, in letters of
        any case. Raises Refused if it has several of them."""
        found, by_letters = dict[str, str](), grouped(there.names, str.lower)
        for column in self.schema:
            equal = by_letters.get(column.name.lower(), [])
            same = [name for name in equal if name == column.name] or equal
            if len(same) > 1:
                raise _mismatch(part, column, f"found {len(same)}: {', '.join(same)}")
            if same:
                found[column.name] = same[0]
        return found

    def _columns_of(self, there: pa.Schema) -> PlaceColumns:
        """Return the columns with a row's place and time in Kafka: none of the stream's own."""
        # An event may reach Kafka long after a time of its own, and would be searched around it.
        names = {name.lower() for name in self.schema.names}
        others = pa.schema([column for column in there if column.name.lower() not in names])
        return find_columns(others, None, None, None)

    def _time_of(self, part: Part, there: pa.Schema, received: Column | None) -> Column:
        """Return the part's column with the time of a row's hour. Raises Refused without one."""
        if self.time is None and received is not None:
            return received
        wanted = self.time or self.event_time
        wanted = self._own_names(part, there).get(wanted or "", wanted)
        if wanted is None or wanted not in there.names:
            tried = " or ".join(
                filter(None, (self.time or "kafka_timestamp or timestamp", self.event_time))
            )
            raise Refused(
                f"import {part.path}: expected a column {tried} with the time at which each row "
                f"was received, found {', '.join(there.names)}; name the column by --time"
            )
        return Column(wanted, wanted, wanted, "", there.field(wanted).type)

    def _require_columns(self, part: Part, there: pa.Schema, own: Mapping[str, str]) -> None:
        folder = getattr(part, "folder", {})
        for column in self.schema:
            if column.name in own:
                kind = there.field(own[column.name]).type
                is_text_of_folder = own[column.name] in folder and pa.types.is_string(kind)
                if not may_become(kind, column.type) and not is_text_of_folder:
                    raise _mismatch(part, column, f"found {kind}")
            elif not column.nullable:
                raise _mismatch(part, column, "found no such column")

    def _batches(
        self, part: Part, columns: Sequence[str], read: Counter[str] | None = None
    ) -> Iterator[tuple[pa.Table, NDArray[np.int64]]]:
        """Yield the topic's rows with `columns` in the table's types, `TIME`, `OF_KAFKA` and
        `PLACE`, and the hour of each. `read` counts the rows of all topics."""
        there = part.schema_arrow
        own_names, places = self._own_names(part, there), self._columns_of(there)
        time = self._time_of(part, there, places.time)
        asked = [time.reads, *places.reads]
        wanted = dict.fromkeys([*(own_names[c] for c in columns if c in own_names), *asked])
        for batch in part.iter_batches(_BATCH_ROWS, list(wanted)):
            at = locate(pa.table(batch), places, self.topic)
            if read is not None:
                read["rows"] += len(at)
            is_plain = time.reads in batch.schema.names and pa.types.is_timestamp(time.kind)
            if time is places.time and not is_plain:
                times = at["time"].combine_chunks()
            else:
                times = batch[time.reads]
            own = at["own"].combine_chunks()
            found = pa.table(
                {
                    **{c: self._column(part, batch, c, own_names.get(c)) for c in columns},
                    TIME: self._times(part, time.name, times),
                    OF_KAFKA: pa.repeat(time is places.time, batch.num_rows),
                    **self._places(part, places, at),
                }
            )
            if own.true_count < len(own):
                found = found.filter(own)
            hours = _hours(found[TIME])
            if self.seam is not None and places.partition is not None:
                hours = self.seam.hours(hours, found)
            yield found, hours

    def _places(self, part: Part, columns: PlaceColumns, at: pa.Table) -> dict[str, pa.Array]:
        if self.seam is None or columns.partition is None or columns.offset is None:
            return {name: pa.nulls(len(at), pa.int64()) for name in PLACE}
        found = dict(zip(PLACE, (at["p"], at["o"]), strict=True))
        for values, column in zip(found.values(), (columns.partition, columns.offset), strict=True):
            missing = pc.sum(pc.and_(values.is_null(), at["own"])).as_py()
            if missing:
                raise Refused(
                    f"import {part.path}: column {column.name}: expected the place of each record "
                    f"in Kafka, found {column.kind} with {missing} that are no whole number; use "
                    "--seam key"
                )
        return {name: values.cast(pa.int64()) for name, values in found.items()}

    def _column(self, part: Part, batch: pa.RecordBatch, name: str, own: str | None) -> pa.Array:
        column = self.schema.field(name)
        is_there = own in batch.schema.names
        found = batch[own] if is_there else pa.nulls(batch.num_rows, column.type)
        if not column.nullable and found.null_count:
            raise _mismatch(part, column, f"found null in {found.null_count} rows or more")
        try:
            made = to_type(found, column.type)
            # Text that is not UTF-8 ends each later delivery and query of an accepted hour.
            made.validate(full=True)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
            raise _mismatch(part, column, f"found {error}") from error
        if not _is_in_calendar(made):
            raise _mismatch(part, column, "found values outside of the years 1 to 9999")
        return made

    def _times(self, part: Part, name: str, found: pa.Array) -> pa.Array:
        if not pa.types.is_timestamp(found.type):
            raise Refused(
                f"import {part.path}: column {name}: expected a timestamp, from which a row's "
                f"hour follows, found {found.type}; name another column by --time"
            )
        if found.null_count:
            raise Refused(
                f"import {part.path}: column {name}: expected the time of each row, from which "
                f"its hour follows, found null in {found.null_count} rows or more; name another "
                "column by --time"
            )
        try:
            # Nanoseconds are cut; a time that overflows could become another one of the calendar.
            times = pc.cast(found, options=pc.CastOptions(_INSTANT, allow_time_truncate=True))
        except pa.ArrowInvalid:
            times = None
        if times is None or not _is_in_calendar(times):
            raise Refused(
                f"import {part.path}: column {name}: expected times of the years 1 to 9999, found "
                "others: their unit may be another than the file says; name another column by "
                "--time, or write the file again"
            )
        return times


def _hours(times: pa.ChunkedArray) -> NDArray[np.int64]:
    micros: NDArray[np.int64] = times.cast(pa.int64()).to_numpy()
    return micros // _MICROS


def _is_in_calendar(values: pa.Array) -> bool:
    """Return whether all times and dates, nested ones too, are of the years 1 to 9999. Pure."""
    t, kind = pa.types, values.type
    if t.is_map(kind):
        return _is_in_calendar(values.keys) and _is_in_calendar(values.items)
    if t.is_list(kind) or t.is_large_list(kind):
        return _is_in_calendar(values.flatten())
    if t.is_struct(kind):
        return all(map(_is_in_calendar, values.flatten()))
    if not (t.is_timestamp(kind) or t.is_date32(kind)) or values.null_count == len(values):
        return True
    unit = 24 * _MICROS if t.is_date32(kind) else 1
    span = pc.min_max(values.cast(pa.int32() if t.is_date32(kind) else pa.int64())).as_py()
    return bool(_CALENDAR[0] <= span["min"] * unit and span["max"] * unit < _CALENDAR[1])


def _mismatch(part: Part, column: pa.Field, found: str) -> Refused:
    needed = "" if column.nullable else " in each row"
    return Refused(
        f"import {part.path}: column {column.name}: expected {column.type}{needed}, as the table "
        f"has it, {found}; correct the file, or the stream's schema"
    )


def may_become(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether values of a file's type keep their meaning in a table's type. An integer type
    may be wider than the table's: `to_type` checks each value."""
    t = pa.types
    if t.is_dictionary(kind):
        return may_become(kind.value_type, wanted)
    if t.is_struct(kind) and t.is_struct(wanted):
        # A field that an old file lacks is null.
        there = [field for field in wanted if kind.get_field_index(field.name) >= 0]
        letters = {field.name.lower() for field in kind} & {field.name.lower() for field in wanted}
        return len(letters) == len(there) and all(
            may_become(kind.field(field.name).type, field.type) for field in there
        )
    if t.is_map(kind) and t.is_map(wanted):
        pairs = ((kind.key_type, wanted.key_type), (kind.item_type, wanted.item_type))
        return all(may_become(*pair) for pair in pairs)
    if _is_list(kind) and _is_list(wanted):
        return may_become(kind.value_type, wanted.value_type)
    same = (
        t.is_integer,
        t.is_boolean,
        t.is_date,
        t.is_timestamp,
        t.is_decimal,
        lambda k: t.is_string(k) or t.is_large_string(k) or t.is_string_view(k),
        lambda k: t.is_binary(k) or t.is_large_binary(k) or t.is_fixed_size_binary(k),
    )
    if t.is_floating(kind) and t.is_floating(wanted):
        return bool(kind.bit_width <= wanted.bit_width)
    if t.is_integer(kind) and t.is_decimal(wanted):
        return True
    return t.is_null(kind) or any(is_one(kind) and is_one(wanted) for is_one in same)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def to_type(found: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Cast values to a table's type. Raises ArrowInvalid for a value that does not fit."""
    if pa.types.is_dictionary(found.type):
        found = found.dictionary_decode()
    if pa.types.is_string(found.type) and pa.types.is_timestamp(wanted):
        found = pc.cast(found, pa.timestamp("us"))  # the name of a folder, without a zone
    return found if found.type == wanted else pc.cast(found, wanted)


HOUR = "_import_hour"
"""A column: the hour of import, in hours since 1970."""

_MEMORY = "2GB"
_AT = "_import_at"


def find_duplicates(
    rows: pa.Table, key: Iterable[str], lookback: int, later: pa.Table
) -> NDArray[Any]:
    """Return the mask of `rows`, ordered by hour, that repeat another row's key: an earlier row in
    the same hour or the `lookback` hours before, or a row of `later` in the same hour or the
    `lookback` hours after. `later` are rows of the table, with the key and `HOUR`.

    Null parts of a key equal each other, and empty texts are null. A row whose key is null in every
    part is no duplicate.
    """
    names = list(key)
    columns = ", ".join(map(quoted, names))
    return _mask(
        rows.select([*names, HOUR]),
        later.select([*names, HOUR]).append_column(_AT, pa.nulls(len(later), pa.int64())),
        f"""
        SELECT {_AT} FROM (
            SELECT {_AT},
                lag({HOUR}) OVER (
                    PARTITION BY {columns}, {_AT} IS NULL ORDER BY {HOUR}, {_AT}
                ) AS before,
                min(CASE WHEN {_AT} IS NULL THEN {HOUR} END) OVER (
                    PARTITION BY {columns} ORDER BY {HOUR}
                    RANGE BETWEEN CURRENT ROW AND UNBOUNDED FOLLOWING
                ) AS after,
                {HOUR}
            FROM (SELECT {_parts(names, rows.schema)} FROM (FROM ours UNION ALL FROM theirs))
            WHERE {_is_key(names)}
        )
        WHERE {_AT} IS NOT NULL AND (before >= {HOUR} - {lookback} OR after <= {HOUR} + {lookback})
        """,
    )


def find_repeated_places(
    partitions: NDArray[np.int64], offsets: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return the mask of rows at the place of an earlier one, Kafka's partition and offset: also of
    another hour, if their time is not Kafka's."""
    # Stable: of the rows at a place, the first one stays first.
    order = np.lexsort((offsets, partitions))
    mask = np.zeros(len(order), bool)
    mask[order[1:]] = (np.diff(partitions[order]) == 0) & (np.diff(offsets[order]) == 0)
    return mask


def find_known(rows: pa.Table, key: Iterable[str], known: pa.Table | ds.Dataset) -> NDArray[Any]:
    """Return the mask of `rows` whose key is in `known`; other columns are not read. Null parts of
    a key equal each other; a key that is null in every part never matches. Empty texts are null.
    Maps are equal in any order: another program may have written a row's in another one."""
    names = list(key)
    columns = ", ".join(map(quoted, names))
    equal = " AND ".join(
        f"ours.{quoted(name)} IS NOT DISTINCT FROM t.{quoted(name)}" for name in names
    )
    return _mask(
        rows.select(names),
        known,
        f"""
        WITH named AS (SELECT {_parts(names, rows.schema)} FROM ours)
        SELECT {_AT} FROM (SELECT * FROM named WHERE {_is_key(names)}) ours
        SEMI JOIN (
            SELECT DISTINCT {columns}
            FROM (SELECT {_parts(names, rows.schema)} FROM (SELECT {columns} FROM theirs))
        ) t ON {equal}
        """,
    )


def _parts(names: Iterable[str], schema: pa.Schema) -> str:
    """Return SQL for the parts of a key, with maps in any order."""
    parts = []
    for name in names:
        kind, column = schema.field(name).type, quoted(name)
        own = _ordered(column, kind) if _has_map(kind) else key_part(column)
        parts.append(f"{own} AS {column}")
    return f"* REPLACE ({', '.join(parts)})"


def _has_map(kind: pa.DataType) -> bool:
    if not pa.types.is_nested(kind):
        return False
    fields = (kind.field(i).type for i in range(kind.num_fields))
    return pa.types.is_map(kind) or any(map(_has_map, fields))


def _ordered(value: str, kind: pa.DataType, depth: int = 0) -> str:
    """Return SQL for a value whose maps are lists of their entries, ordered by key. Pure."""
    if not _has_map(kind):
        return value
    # DuckDB prefers a column of the item's name to the item, so no column can have this one.
    item, inner = quoted(f"item {depth}"), depth + 1
    if pa.types.is_map(kind):
        own = _ordered(f"{item}.value", kind.item_type, inner)
        entry = f"struct_pack(k := {item}.key, v := {own})"
        return f"list_sort(list_transform(map_entries({value}), lambda {item}: {entry}))"
    if pa.types.is_struct(kind):
        parts = ((quoted(f.name), f.type) for f in kind)
        fields = (f"{n} := {_ordered(f'({value}).{n}', of, depth)}" for n, of in parts)
        return f"CASE WHEN {value} IS NOT NULL THEN struct_pack({', '.join(fields)}) END"
    return f"list_transform({value}, lambda {item}: {_ordered(item, kind.value_type, inner)})"


def _is_key(names: Iterable[str]) -> str:
    return " OR ".join(f"{quoted(name)} IS NOT NULL" for name in names)


def _mask(ours: pa.Table, theirs: pa.Table | ds.Dataset, query: str) -> NDArray[Any]:
    """Return the mask of rows of `ours` that a query returns by row number (`_AT`)."""
    numbered = ours.append_column(_AT, pa.array(np.arange(len(ours)), pa.int64()))
    with connected(_MEMORY) as connection:
        connection.register("ours", numbered)
        connection.register("theirs", theirs)
        found = connection.sql(query).fetchnumpy()[_AT]
    mask = np.zeros(len(ours), bool)
    mask[np.asarray(found, np.int64)] = True
    return mask
