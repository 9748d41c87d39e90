"""JSON records that are certain to be good, read as Arrow columns: several times as fast as Spark
reads them.

For every record that `CertainRows.read` takes, `anabranch.records.decode` has the same row and the
verdict "good". What it does not take is left to `decode`, which alone separates good records from
dead letters. So this module may know less JSON than `decode` does, and never more. Why what it
takes is right is in docs/decisions/0021.

It runs in Spark's Python workers, and imports no Spark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from anabranch.config import EventTime
from anabranch.config.columns import Column
from anabranch.offsets.hour_ends import millis
from anabranch.offsets.hours import start_of
from anabranch.records.checks import FIRST_MICROS, HOUR_MICROS, LAST_MICROS, micros

LONGEST = 1_000_000
"""How many bytes a value may have. Spark's parser has limits of its own for texts, far above."""

MOST_DIGITS = 1_000
"""Spark's parser reads no number with more digits."""

LONGEST_NAME = 50_000
"""How many bytes the name of a field may have: Spark's parser (Jackson, `StreamReadConstraints`)
reads no name of more UTF-16 units, of which each takes a byte of UTF-8 at least."""

_TOO_MANY = b"0" * (MOST_DIGITS + 1)
_TENTHS_OF_TOO_MANY = b"0" * ((MOST_DIGITS + 1) // 10)
# As a table for `bytes.translate`: all that a number is written with becomes a zero.
_OF_NUMBERS = bytes.maketrans(b"123456789.+-eE", b"0" * 14)

# How many lines are read at once behind a reading that failed, which costs something for all that
# it might have read; and of how few all are left.
_AT_ONCE, _SMALLEST = 512, 16
# How often a batch is read, in all, before what could not be read so far is left. A reading costs
# as much as so many lines, also of none: a few odd records in a hundred are found, and where there
# are more, `decode` is as fast.
_MOST_READINGS, _A_READING = 4, 70
# How PyArrow reports the row that failed. A hint only: `decode` reads the lines that it leaves.
_ROW = re.compile(r" in row (\d+)")
# How many fields that the stream does not know are read and left out.
_MOST_OTHERS = 64
_DAY = (
    "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
)
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,6})?"
_ZONE = "(Z|[+-](0[0-9]|1[0-7]):[0-5][0-9])"
_DATE = f"^{_DAY}$"
_TIMESTAMP, _LOCAL = f"^{_DAY}[T ]{_TIME}{_ZONE}$", f"^{_DAY}[T ]{_TIME}$"
# Days that not every month has.
_LATE_DAY = "^[0-9]{4}-[0-9]{2}-(29|30|31)"
_MICROS = pa.timestamp("us", "UTC")
_TYPES: dict[str, tuple[pa.DataType, pa.DataType]] = {
    "string": (pa.string(), pa.string()),
    "int": (pa.int32(), pa.int32()),
    "bigint": (pa.int64(), pa.int64()),
    "double": (pa.float64(), pa.float64()),
    "boolean": (pa.bool_(), pa.bool_()),
    "timestamp": (pa.string(), _MICROS),
    "date": (pa.string(), pa.date32()),
}
"""By Spark's name of a type: the type to read, and the type that it becomes. `decode` reads other
types."""


@dataclass(frozen=True)
class Read:
    """The rows that are certain, and the places (ascending) in the batch of the records that were
    left."""

    rows: pa.Table
    left: pa.Array


def can_read(columns: Sequence[Column]) -> bool:
    """Whether all of a stream's columns are of types that are read here."""
    return all(c.type in _TYPES for c in columns)


class CertainRows:
    """Reads the values of one stream, in a process of its own."""

    def __init__(
        self, columns: Sequence[Column], event_time: EventTime | None, takes_unknown: bool = True
    ) -> None:
        self._columns, self._event_time = tuple(columns), event_time
        self._known = pa.schema([(c.name, _TYPES[c.type][0]) for c in columns if not c.rescues])
        # Fields that the stream does not know, by the type that they were seen with. Read, so that
        # one that is there twice fails, and left out; unless a record is no ordinary row because it
        # has any.
        self._most_others = (
            _MOST_OTHERS if takes_unknown and len(self._known) == len(self._columns) else 0
        )
        self._others: dict[str, pa.DataType] = {}

    def read(self, batch: pa.RecordBatch) -> Read:
        """Read `value`, beside `partition`, `offset`, `timestamp` and `ingest_hour` of Spark's
        Kafka source.

        The rows are in the columns of the stream's table: the stream's own, `kafka_partition`,
        `kafka_offset`, `kafka_timestamp`, `ingest_hour`, `event_date`; in the order of the records.
        """
        places = pc.indices_nonzero(self._may_be(batch)).cast(pa.int64())
        value = batch.column("value")
        read, pieces = self._parsed(value if len(places) == len(value) else value.take(places))
        places = places.take(pieces)
        records = batch if len(places) == len(batch) else batch.take(places)
        rows, is_certain = self._judged(read, records)
        if not _all(is_certain):
            rows, places = rows.filter(is_certain), places.filter(is_certain)
        left = pa.array([], pa.int64())
        if len(places) < len(batch):
            every = pa.array(range(len(batch)), pa.int64())
            left = every.filter(pc.invert(pc.is_in(every, value_set=places)))
        return Read(rows, left)

    def _may_be(self, batch: pa.RecordBatch) -> pa.Array:
        """Which values begin and end as an object, and are of a length that Spark's parser
        takes."""
        value = batch.column("value")
        looks = pc.and_(pc.starts_with(value, b"{"), pc.ends_with(value, b"}"))
        looks = pc.and_(looks, pc.less_equal(pc.binary_length(value), LONGEST))
        # A record without a time that can be held has its date, and its bounds, from elsewhere.
        return pc.fill_null(pc.and_(looks, in_the_calendar(batch.column("timestamp"))), False)

    def _parsed(self, values: pa.Array) -> tuple[pa.Table, pa.Array]:
        """The objects of those values that can be read, and the values' places."""
        places = pa.array(range(len(values)), pa.int64())
        try:
            text = values.cast(pa.string())
        except pa.ArrowInvalid:
            is_text = pa.array([is_utf8(v.as_buffer().to_pybytes()) for v in values], pa.bool_())
            places = places.filter(is_text)
            text = values.filter(is_text).cast(pa.string())
        # Escapes of half a character (UTF-16's surrogates) are `decode`'s to judge. No line of JSON
        # has a NUL.
        whole = _bytes(text)
        for odd in ("\0", *(("\\ud", "\\uD") if b"\\" in whole else ())):
            if odd.encode() in whole:
                is_odd = pc.match_substring(text, odd)
                text, places = text.filter(pc.invert(is_odd)), places.filter(pc.invert(is_odd))
        # No text of JSON goes on in the next line, so no record's text goes on in the next record.
        lines = pc.binary_join_element_wise(text, "", "\n")
        found: list[pa.Table] = []
        spans: list[pa.Array] = []
        for start, table in self._pieces(lines):
            found.append(table)
            spans.append(places.slice(start, len(table)))
        if not found:
            return self._known.empty_table(), pa.array([], pa.int64())
        return pa.concat_tables(found), pa.concat_arrays(spans)

    def _pieces(self, lines: pa.Array) -> Iterator[tuple[int, pa.Table]]:
        """Tables of consecutive lines, with the place of the first; without those lines that cannot
        be read. A read that reports the failed line leaves that line; otherwise the lines are
        halved."""
        may_read = _MOST_READINGS * (len(lines) + _A_READING)
        is_first = True
        waiting = [(0, len(lines))]
        while waiting and may_read > 0:
            start, end = waiting.pop()
            if start == end:
                continue
            some = lines.slice(start, end - start)
            table, failed = self._table(some)
            may_read -= _A_READING + (len(some) if failed is None else failed)
            if table is not None:
                yield start, table
                continue
            suspects = some.slice(failed or 0, 1) if failed is not None or is_first else some
            # Each of a few lines: the first of a batch may have none of the fields that are new.
            has_learned = (
                len(suspects) <= _SMALLEST and sum(map(self._learn, suspects.to_pylist())) > 0
            )
            is_first = False
            if has_learned:
                waiting.append((start, end))
            elif len(some) > _AT_ONCE:
                waiting += [
                    (at, min(at + _AT_ONCE, end)) for at in reversed(range(start, end, _AT_ONCE))
                ]
            elif failed is not None:
                waiting += [(start + failed + 1, end), (start, start + failed)]
            elif len(some) > _SMALLEST:
                middle = (start + end) // 2
                waiting += [(middle, end), (start, middle)]

    def _table(self, lines: pa.Array) -> tuple[pa.Table | None, int | None]:
        """The objects of lines, a row for each line; None unless each is one object of known
        fields, none twice. Then also the line at which the read ended, if it is reported."""
        data = _buffer(lines)
        schema = pa.schema([*self._known, *self._others.items()])
        try:
            table = pj.read_json(
                pa.BufferReader(data),
                pj.ReadOptions(use_threads=False, block_size=data.size + 1),
                pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error"),
            )
        except pa.ArrowInvalid as error:
            at = _ROW.search(str(error))
            return None, min(int(at[1]), len(lines) - 1) if at is not None else None
        if table.num_rows != len(lines) or not _has_numbers(table) or not _has_short_numbers(lines):
            return None, None
        return table.select(self._known.names), None

    def _learn(self, line: str) -> bool:
        """Whether a line has fields that were not known yet, which are read from now on."""
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(value, dict):
            return False
        new = {
            name: _kind(v)
            for name, v in value.items()
            if name not in self._known.names and name not in self._others
        }
        kinds = {
            name: kind
            for name, kind in new.items()
            if kind is not None and len(name.encode()) <= LONGEST_NAME
        }
        if not kinds or len(kinds) < len(new) or len(self._others) + len(kinds) > self._most_others:
            return False
        self._others |= kinds
        return True

    def _judged(self, read: pa.Table, records: pa.RecordBatch) -> tuple[pa.Table, pa.Array]:
        """The rows of what was read, and which of them are certain to be good ones."""
        certain = pa.repeat(True, len(read))
        rows = {}
        for column in self._columns:
            if column.rescues:
                rows[column.name] = pa.nulls(len(read), pa.string())
                continue
            values = read.column(column.name).combine_chunks()
            if column.type in ("timestamp", "date"):
                values, is_read = _moments(values, column.type)
                certain = certain if is_read is None else pc.and_(certain, is_read)
            elif column.type == "double":
                # Spark reads `-0` as 0.0.
                is_sure = pc.not_equal(values.view(pa.int64()), -(2**63))
                certain = (
                    certain if _all(is_sure) else pc.and_(certain, pc.fill_null(is_sure, True))
                )
            if not column.nullable and values.null_count:
                certain = pc.and_(certain, values.is_valid())
            rows[column.name] = values
        return with_places(rows, certain, records, self._event_time)


def with_places(
    rows: Mapping[str, pa.Array],
    certain: pa.Array,
    records: pa.RecordBatch,
    bounds: EventTime | None,
) -> tuple[pa.Table, pa.Array]:
    """The rows with the columns that every table has, and which of those that are `certain` keep
    the bounds."""
    at, hours = records.column("timestamp").cast(_MICROS), records.column("ingest_hour")
    event_time = at
    if bounds is not None:
        event_time = rows[bounds.column]
        # Of a null the column says whether it may be.
        certain = pc.and_(certain, pc.fill_null(_is_near(event_time, hours, bounds), True))
        event_time = pc.coalesce(event_time, at) if event_time.null_count else event_time
    # The days of what is not certain are never looked at.
    days = pc.cast(pc.cast(event_time, pa.timestamp("us")), pa.date32())
    of_kafka = {
        "kafka_partition": records.column("partition").cast(pa.int32()),
        "kafka_offset": records.column("offset").cast(pa.int64()),
        "kafka_timestamp": at,
        "ingest_hour": hours,
        "event_date": days,
    }
    return pa.table({**rows, **of_kafka}), certain


def type_of(column: Column) -> pa.DataType:
    """The type of a column that `can_read` takes."""
    return _TYPES[column.type][1]


def _has_numbers(table: pa.Table) -> bool:
    """Whether each number is one: PyArrow takes `NaN` and `Infinity` too."""
    return all(_all(pc.is_finite(c)) for c in table.columns if c.type == pa.float64())


def _has_short_numbers(lines: pa.Array) -> bool:
    """Whether no number has more than MOST_DIGITS: nowhere do so many characters of numbers follow
    each other."""
    if pc.max(pc.binary_length(lines)).as_py() <= MOST_DIGITS:
        return True
    data = _bytes(lines)
    # Of so many in a row each tenth is one of them: these are looked at first.
    if _TENTHS_OF_TOO_MANY not in data[::10].translate(_OF_NUMBERS):
        return True
    return _TOO_MANY not in data.translate(_OF_NUMBERS)


def _moments(text: pa.Array, kind: str) -> tuple[pa.Array, pa.Array | None]:
    """Text as times or days, null where it is not certain what it says; and where it is, or null.
    None: all is."""
    target = _TYPES[kind][1]
    is_read = pc.fill_null(
        pc.match_substring_regex(text, _TIMESTAMP if kind == "timestamp" else _DATE), True
    )
    whole = _all(is_read)
    if not whole and kind == "timestamp":
        # Where no zone is given, it is UTC.
        is_local = pc.match_substring_regex(text, _LOCAL)
        text = pc.if_else(is_local, pc.binary_join_element_wise(text, "Z", ""), text)
        is_read = pc.or_(is_read, pc.fill_null(is_local, True))
        whole = _all(is_read)
    if not whole:
        text = pc.if_else(is_read, text, None)
    try:
        read = text.cast(target)
    except pa.ArrowInvalid:
        whole, is_late = False, pc.match_substring_regex(text, _LATE_DAY)
        is_read = pc.and_(is_read, pc.fill_null(pc.invert(is_late), True))
        read = pc.if_else(is_read, text, None).cast(target)
    # A zone can lead out of the years.
    if kind == "timestamp" and not _all(is_inside := in_the_calendar(read)):
        whole, is_read = False, pc.and_(is_read, pc.fill_null(is_inside, True))
    return read, None if whole else is_read


def in_the_calendar(at: pa.Array) -> pa.Array:
    """Whether times lie in the years 1 to 9999."""
    since = at.cast(pa.int64())
    return pc.and_(pc.greater_equal(since, FIRST_MICROS), pc.less_equal(since, LAST_MICROS))


def _is_near(at: pa.Array, hours: pa.Array, bounds: EventTime) -> pa.Array:
    """Whether times lie within the stream's bounds of their ingest hour; of a null, null or
    True."""
    near, since = pa.repeat(True, len(at)), at.cast(pa.int64())
    names = pc.unique(hours)
    starts = pa.array([millis(start_of(name)) * 1000 for name in names.to_pylist()], pa.int64())
    start = starts[0] if len(starts) == 1 else starts.take(pc.index_in(hours, value_set=names))
    if bounds.past is not None:
        near = pc.and_(near, pc.greater_equal(since, pc.subtract(start, micros(bounds.past))))
    if bounds.future is not None:
        near = pc.and_(
            near, pc.less_equal(since, pc.add(start, HOUR_MICROS + micros(bounds.future)))
        )
    return near


def _kind(value: object) -> pa.DataType | None:
    """The type that a field is read with, which the stream does not know; None for what is no
    single value."""
    match value:
        case bool():
            return pa.bool_()
        case int() | float():
            return pa.float64()
        case str():
            return pa.string()
    return None


def _all(mask: pa.Array | pa.ChunkedArray) -> bool:
    """Whether a mask holds everywhere, what is null aside."""
    return pc.all(mask, min_count=0).as_py() is not False


def _buffer(text: pa.Array) -> pa.Buffer:
    """The bytes of all texts of an array, one after the other."""
    _, offsets, data = text.buffers()
    places = memoryview(offsets).cast("i")
    start, end = places[text.offset], places[text.offset + len(text)]
    return data.slice(start, end - start) if data is not None else pa.py_buffer(b"")


def _bytes(text: pa.Array) -> bytes:
    return _buffer(text).to_pybytes() if len(text) else b""


def is_utf8(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return True
