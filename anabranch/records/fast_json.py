"""Read JSON records that are certain to be good as Arrow columns, several times as fast as Spark.

For every record that `CertainRows.read` takes, `anabranch.records.decode` gives the same row and
the verdict "good". All others are left to `decode`, which alone separates good records from dead
letters. So this module may accept less JSON than `decode` does, never more. Decision 21
explains why its rows are correct.

It runs in Spark's Python workers, and does not import Spark.
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
"""Maximum bytes of a value. The limits of Spark's parser for texts are far above."""

MOST_DIGITS = 1_000
"""Maximum digits of a number in Spark's parser."""

LONGEST_NAME = 50_000
"""Maximum bytes of a field's name. Spark's parser (Jackson, `StreamReadConstraints`) limits names
to this many UTF-16 units, each of which takes at least a byte of UTF-8."""

_TOO_MANY = b"0" * (MOST_DIGITS + 1)
_TENTHS_OF_TOO_MANY = b"0" * ((MOST_DIGITS + 1) // 10)
# A table for `bytes.translate`: all characters of numbers become zeros.
_OF_NUMBERS = bytes.maketrans(b"123456789.+-eE", b"0" * 14)

# Lines read at once after a failed reading, which wastes the lines that it had read; and the number
# of lines up to which all are left if the reading does not report the failed one.
_AT_ONCE, _SMALLEST = 512, 16
# The readings of a batch, in multiples of its lines, after which unread lines are left; and the
# cost of a reading in lines. A few odd records in a hundred are found; where there are more,
# `decode` is as fast.
_MOST_READINGS, _A_READING = 4, 70
# PyArrow's report of the row that failed. Only a hint: `decode` reads the lines that are left.
_ROW = re.compile(r" in row (\d+)")
# Maximum unknown fields that are read and dropped.
_MOST_UNKNOWN = 64
_DAY = (
    "([1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
)
_TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]([.][0-9]{1,6})?"
_ZONE = "(Z|[+-](0[0-9]|1[0-7]):[0-5][0-9])"
_DATE = f"^{_DAY}$"
_TIMESTAMP, _LOCAL = f"^{_DAY}[T ]{_TIME}{_ZONE}$", f"^{_DAY}[T ]{_TIME}$"
# Days that some months do not have.
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
"""The type to read and the type of the column, for each of `anabranch.config.columns.WORKER_TYPES`.
`decode` reads other types."""


@dataclass(frozen=True)
class Read:
    """The rows that are certain, and the ascending indexes in the batch of the records that were
    left."""

    rows: pa.Table
    left: pa.Array


class CertainRows:
    """A reader of one stream's values, used by one process."""

    def __init__(
        self, columns: Sequence[Column], event_time: EventTime | None, takes_unknown: bool = True
    ) -> None:
        self._columns, self._event_time = tuple(columns), event_time
        self._known = pa.schema([(c.name, _TYPES[c.type][0]) for c in columns if not c.rescues])
        # Unknown fields with their types. They are read, so that a repeated one fails, and dropped;
        # not if a record with unknown fields is no ordinary row.
        self._most_unknown = (
            _MOST_UNKNOWN if takes_unknown and len(self._known) == len(self._columns) else 0
        )
        self._unknown: dict[str, pa.DataType] = {}

    def read(self, batch: pa.RecordBatch) -> Read:
        """Read `value`; the batch also has `partition`, `offset`, `timestamp` of Spark's Kafka
        source, and `ingest_hour`.

        The rows have the columns of the stream's table, in the order of the records: the stream's
        own, `kafka_partition`, `kafka_offset`, `kafka_timestamp`, `ingest_hour`, `event_date`.
        """
        places = pc.indices_nonzero(self._candidates(batch)).cast(pa.int64())
        value = batch.column("value")
        read, pieces = self._parsed(value if len(places) == len(value) else value.take(places))
        places = places.take(pieces)
        records = batch if len(places) == len(batch) else batch.take(places)
        rows, is_certain = self._rows(read, records)
        if not _all_true(is_certain):
            rows, places = rows.filter(is_certain), places.filter(is_certain)
        left = pa.array([], pa.int64())
        if len(places) < len(batch):
            every = pa.array(range(len(batch)), pa.int64())
            left = every.filter(pc.invert(pc.is_in(every, value_set=places)))
        return Read(rows, left)

    def _candidates(self, batch: pa.RecordBatch) -> pa.Array:
        """Return which values begin and end as an object, with a length that Spark's parser
        accepts."""
        value = batch.column("value")
        looks = pc.and_(pc.starts_with(value, b"{"), pc.ends_with(value, b"}"))
        looks = pc.and_(looks, pc.less_equal(pc.binary_length(value), LONGEST))
        # Without a time in the calendar, a record takes its date and bounds from elsewhere.
        return pc.fill_null(pc.and_(looks, in_the_calendar(batch.column("timestamp"))), False)

    def _parsed(self, values: pa.Array) -> tuple[pa.Table, pa.Array]:
        """Return the objects of the values that can be read, and the values' indexes."""
        places = pa.array(range(len(values)), pa.int64())
        try:
            text = values.cast(pa.string())
        except pa.ArrowInvalid:
            is_text = pa.array([is_utf8(v.as_buffer().to_pybytes()) for v in values], pa.bool_())
            places = places.filter(is_text)
            text = values.filter(is_text).cast(pa.string())
        # `decode` judges escapes of half a character (UTF-16 surrogates). JSON text has no NUL.
        whole = _bytes(text)
        for odd in ("\0", *(("\\ud", "\\uD") if b"\\" in whole else ())):
            if odd.encode() in whole:
                is_odd = pc.match_substring(text, odd)
                text, places = text.filter(pc.invert(is_odd)), places.filter(pc.invert(is_odd))
        # A JSON string cannot contain a line break, so no record continues in the next line.
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
        """Yield tables of consecutive lines with the index of the first, without lines that cannot
        be read. If a reading reports the failed line, that line is left; otherwise the lines are
        split."""
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
            # Not only the first line of a few: it may have none of the new fields.
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
        """Return the objects of lines, a row for each line; None unless each line is one object
        with known fields, none twice. Then also return the failed line if it is reported."""
        data = _buffer(lines)
        schema = pa.schema([*self._known, *self._unknown.items()])
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
        """Add the unknown fields of a line to the fields that are read; return whether it has new
        ones."""
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            return False
        if not isinstance(value, dict):
            return False
        new = {
            name: _kind(v)
            for name, v in value.items()
            if name not in self._known.names and name not in self._unknown
        }
        kinds = {
            name: kind
            for name, kind in new.items()
            if kind is not None and len(name.encode()) <= LONGEST_NAME
        }
        if (
            not kinds
            or len(kinds) < len(new)
            or len(self._unknown) + len(kinds) > self._most_unknown
        ):
            return False
        self._unknown |= kinds
        return True

    def _rows(self, read: pa.Table, records: pa.RecordBatch) -> tuple[pa.Table, pa.Array]:
        """Return the rows of a reading, and which of them are certain to be good."""
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
                    certain if _all_true(is_sure) else pc.and_(certain, pc.fill_null(is_sure, True))
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
    """Return the rows with the columns that every table has, and which of the `certain` ones are
    within the bounds of the event time."""
    at, hours = records.column("timestamp").cast(_MICROS), records.column("ingest_hour")
    event_time = at
    if bounds is not None:
        event_time = rows[bounds.column]
        # The column's own check decides on nulls.
        certain = pc.and_(certain, pc.fill_null(_is_near(event_time, hours, bounds), True))
        event_time = pc.coalesce(event_time, at) if event_time.null_count else event_time
    # Dates of rows that are not certain are never used.
    days = pc.cast(pc.cast(event_time, pa.timestamp("us")), pa.date32())
    kafka_columns = {
        "kafka_partition": records.column("partition").cast(pa.int32()),
        "kafka_offset": records.column("offset").cast(pa.int64()),
        "kafka_timestamp": at,
        "ingest_hour": hours,
        "event_date": days,
    }
    return pa.table({**rows, **kafka_columns}), certain


def type_of(column: Column) -> pa.DataType:
    """Return the Arrow type of a column that workers read."""
    return _TYPES[column.type][1]


def _has_numbers(table: pa.Table) -> bool:
    """Return whether all numbers are finite: PyArrow also accepts `NaN` and `Infinity`."""
    return all(_all_true(pc.is_finite(c)) for c in table.columns if c.type == pa.float64())


def _has_short_numbers(lines: pa.Array) -> bool:
    """Return whether no number has more than MOST_DIGITS digits, judged by the longest run of
    characters of numbers."""
    if pc.max(pc.binary_length(lines)).as_py() <= MOST_DIGITS:
        return True
    data = _bytes(lines)
    # Every tenth byte first: a tenth of such a run is among them.
    if _TENTHS_OF_TOO_MANY not in data[::10].translate(_OF_NUMBERS):
        return True
    return _TOO_MANY not in data.translate(_OF_NUMBERS)


def _moments(text: pa.Array, kind: str) -> tuple[pa.Array, pa.Array | None]:
    """Convert text to times or dates, null if the meaning is not certain. Also return where it is
    certain or null; None if everywhere."""
    target = _TYPES[kind][1]
    is_read = pc.fill_null(
        pc.match_substring_regex(text, _TIMESTAMP if kind == "timestamp" else _DATE), True
    )
    whole = _all_true(is_read)
    if not whole and kind == "timestamp":
        # Without a zone, a time is UTC.
        is_local = pc.match_substring_regex(text, _LOCAL)
        text = pc.if_else(is_local, pc.binary_join_element_wise(text, "Z", ""), text)
        is_read = pc.or_(is_read, pc.fill_null(is_local, True))
        whole = _all_true(is_read)
    if not whole:
        text = pc.if_else(is_read, text, None)
    try:
        read = text.cast(target)
    except pa.ArrowInvalid:
        whole, is_late = False, pc.match_substring_regex(text, _LATE_DAY)
        is_read = pc.and_(is_read, pc.fill_null(pc.invert(is_late), True))
        read = pc.if_else(is_read, text, None).cast(target)
    # A zone can lead outside the years.
    if kind == "timestamp" and not _all_true(is_inside := in_the_calendar(read)):
        whole, is_read = False, pc.and_(is_read, pc.fill_null(is_inside, True))
    return read, None if whole else is_read


def in_the_calendar(at: pa.Array) -> pa.Array:
    """Return whether times are in the years 1 to 9999."""
    since = at.cast(pa.int64())
    return pc.and_(pc.greater_equal(since, FIRST_MICROS), pc.less_equal(since, LAST_MICROS))


def _is_near(at: pa.Array, hours: pa.Array, bounds: EventTime) -> pa.Array:
    """Return whether times are within the stream's bounds of their ingest hour; null or True for a
    null."""
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
    """Return the type with which an unknown field is read; None for a value that is not a
    scalar."""
    match value:
        case bool():
            return pa.bool_()
        case int() | float():
            return pa.float64()
        case str():
            return pa.string()
    return None


def _all_true(mask: pa.Array | pa.ChunkedArray) -> bool:
    """Return whether a mask is true everywhere, ignoring nulls."""
    return pc.all(mask, min_count=0).as_py() is not False


def _buffer(text: pa.Array) -> pa.Buffer:
    """Return the concatenated bytes of all texts of an array."""
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
