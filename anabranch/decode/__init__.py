"""Decoding: from a record's bytes to its row, or to the reason why it has none.

One decoder for both layers, groups and clusters, and for commands without Spark. It runs over Arrow
data in Spark's Python workers and does not import Spark. A verdict depends only on the record's
bytes, the stream's file, the ingest hour and, with a schema registry, the schema of the record's
id: not on the layer, the time, the batch or the process. No bytes make it fail.

`Decoder.decode`:

1. read the values by the stream's format (`json`, `avro`, `protobuf`, `csv`, `raw`);
2. refuse records that lack a NOT NULL column;
3. compute the columns of `select`, and refuse records for which an expression fails;
4. refuse records whose event time is out of bounds, and date the others;
5. refuse records with unknown fields, if the stream says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from anabranch.common.errors import ConfigurationError
from anabranch.decode.inputs import UnlistedSchema, WriterSchema, headers_of
from anabranch.decode.values import MICROS, Errors, Reading, dates_of, found, in_the_calendar, texts
from anabranch.offsets.hour_ends import millis
from anabranch.offsets.hours import start_of

__all__ = ["DecodeSpec", "Decoded", "Decoder", "UnlistedSchema", "WriterSchema", "decode_spec"]

if TYPE_CHECKING:
    from anabranch.config import EventTime, Stream
    from anabranch.config.columns import Column
    from anabranch.config.select import SelectedColumn
    from anabranch.decode.select import Selection

REFUSED_FIELD = "unknown_field"
"""The error code of a record with unknown fields and no other error, if the stream refuses such
fields."""

ERROR_TEXT_LENGTH = 300
"""Maximum characters of an error's text."""

HOUR_MICROS = 3_600_000_000

_NO_TEXT = found("UTF-8", "bytes that are not")

# After the columns' own errors, which have the columns' places.
_REQUIRED, _SELECT, _EVENT_TIME, _UNKNOWN = 1 << 20, 1 << 21, 1 << 22, 1 << 23


class Reader(Protocol):
    def read(self, batch: pa.RecordBatch) -> Reading:
        """Read `value` (and `key`, for raw) of a batch of records."""
        ...


@dataclass(frozen=True)
class DecodeSpec:
    """The part of a stream's settings that a decoder needs. Picklable.

    `columns`: the fields that are read from a record. `select`: the columns of the table, if they
    are not these, with the `secret` of hashes. `topic`: of all records. `message`: the name of
    Protobuf's type. `schemas`: the writers' schemas by id, for a format with schemas. `rescued`:
    the column for the fields without a column, if any. `lists_unknown`: whether the names of such
    fields are returned. `header`: the names of CSV's fields. `envelope`: of JSON values.
    """

    columns: tuple[Column, ...]
    event_time: EventTime | None
    format: str
    topic: str = ""
    select: tuple[SelectedColumn, ...] | None = None
    secret: bytes | None = field(default=None, repr=False)
    delimiter: str = ","
    message: str | None = None
    schemas: Mapping[int, WriterSchema] = field(default_factory=dict)
    rescued: str | None = None
    refuses_unknown: bool = False
    lists_unknown: bool = False
    header: tuple[str, ...] = ()
    envelope: str | None = None


def decode_spec(
    stream: Stream,
    schemas: Mapping[int, WriterSchema] | None = None,
    lists_unknown: bool = False,
    secret: bytes | None = None,
) -> DecodeSpec:
    """Return what a decoder of the stream needs. `lists_unknown`: return the names of unknown
    fields too, if the stream does not ignore them. `secret` hashes columns of `select`. Raises
    ConfigurationError if it is needed and missing."""
    if stream.masks and secret is None:
        raise ConfigurationError(
            f"stream {stream.name}: select: expected masking.secret in anabranch.yaml, found none"
        )
    return DecodeSpec(
        stream.read_columns,
        stream.event_time,
        stream.format.type,
        stream.topic,
        stream.select,
        secret if stream.masks else None,
        stream.format.delimiter,
        stream.format.message,
        dict(schemas or {}),
        next((column.name for column in stream.columns if column.rescues), None),
        stream.unknown == "refuse",
        lists_unknown and stream.unknown != "ignore",
        stream.format.header,
        stream.format.envelope,
    )


@dataclass(frozen=True)
class Decoded:
    """The records of a batch, in its order.

    `rows` has the stream's fields, `kafka_partition`, `kafka_offset`, `kafka_timestamp`,
    `ingest_hour` and `event_date` of every record; those with an error have whatever could be read.
    `errors`: code and text by index. `unknown`: names of fields without a column, by index.
    """

    rows: pa.Table
    errors: Mapping[int, tuple[str, str]]
    unknown: Mapping[int, Sequence[str]]

    @property
    def good(self) -> pa.Table:
        """The rows of the records without an error."""
        if not self.errors:
            return self.rows
        is_good = pa.array([i not in self.errors for i in range(len(self.rows))], pa.bool_())
        return self.rows.filter(is_good)


class Decoder:
    """A decoder of one stream's records, used by one process."""

    def __init__(self, spec: DecodeSpec) -> None:
        self._spec = spec
        self._reader = _reader(spec)
        self._selection: Selection | None = None
        if spec.select is not None:
            # Imported here: few streams need DuckDB.
            from anabranch.decode.select import Selection

            self._selection = Selection(spec.select, spec.topic, spec.secret)

    def decode(self, batch: pa.RecordBatch) -> Decoded:
        """Decode a batch with `key`, `value`, `partition`, `offset`, `timestamp` of Spark's Kafka
        source, `headers` as text (`decode.inputs`), and `ingest_hour`. Raises UnlistedSchema."""
        # Step 1: read the values.
        reading = self._reader.read(batch)
        errors = reading.errors
        # Step 2: NOT NULL.
        for place, column in enumerate(self._spec.columns):
            if not column.nullable:
                for i in _nulls(reading.columns[column.name]):
                    text = found(f"{column.type} NOT NULL", "null or no such field")
                    errors.add(i, _REQUIRED + place, "missing_required", f"{column.name}: {text}")
        hours = batch.column("ingest_hour")
        at = batch.column("timestamp").cast(MICROS)
        if not _all(is_in := in_the_calendar(at)):
            # Python's dates, and so those of most readers, have no other years.
            at = pc.if_else(is_in, at, None)
        # Step 3: the columns of `select`.
        columns = self._selected(batch, at, reading)
        # Step 4: the event time.
        days = self._event_time(columns, reading, at, _starts(hours))
        # Step 5: unknown fields.
        if self._spec.refuses_unknown:
            for i, names in reading.unknown.items():
                text = found("no fields beside those of the schema", ", ".join(names))
                errors.add(i, _UNKNOWN, REFUSED_FIELD, text)
        if self._spec.rescued is not None:
            kept = [reading.rescued.get(i) for i in range(len(batch))] if reading.rescued else None
            columns[self._spec.rescued] = (
                pa.array(kept, pa.string()) if kept else pa.nulls(len(batch), pa.string())
            )
        rows = pa.table(
            {
                **columns,
                "kafka_partition": batch.column("partition").cast(pa.int32()),
                "kafka_offset": batch.column("offset").cast(pa.int64()),
                "kafka_timestamp": at,
                "ingest_hour": hours,
                "event_date": days,
            }
        )
        return Decoded(
            rows,
            errors.first(ERROR_TEXT_LENGTH),
            reading.unknown if self._spec.lists_unknown else {},
        )

    def _selected(
        self, batch: pa.RecordBatch, at: pa.Array, reading: Reading
    ) -> dict[str, pa.Array]:
        """Return the table's columns. Refuse records for which an expression has no value."""
        if self._selection is None:
            return dict(reading.columns)
        columns, bad = self._selection.columns(batch, at, reading.columns)
        for place, one in enumerate(self._spec.select or ()):
            for i in bad.get(one.name, ()):
                if one.kind in ("kafka", "header"):
                    text = f"{one.name}: {_NO_TEXT}"
                    reading.errors.add(i, _SELECT + place, "invalid_utf8", text)
                    continue
                of = ", ".join(f"{name} = {reading.shown(name, i)}" for name in one.fields)
                expected = f"a {one.type.upper()} of {one.source}"
                text = f"{one.name}: {found(expected, of)}"
                reading.errors.add(i, _SELECT + place, "select_failed", text)
        return columns

    def _event_time(
        self, columns: Mapping[str, pa.Array], reading: Reading, at: pa.Array, starts: pa.Array
    ) -> pa.Array:
        """Refuse records whose event time is out of bounds. Return the dates of all records.

        Bounds are measured from the start and end of the ingest hour, so every rebuild gives the
        same verdict.
        """
        event_time, bounds = at, self._spec.event_time
        if bounds is not None:
            event_time = columns[bounds.column].cast(MICROS)
            since = event_time.cast(pa.int64())
            near = in_the_calendar(event_time)
            if bounds.past is not None:
                near = pc.and_(
                    near, pc.greater_equal(since, pc.subtract(starts, micros(bounds.past)))
                )
            if bounds.future is not None:
                last = pc.add(starts, HOUR_MICROS + micros(bounds.future))
                near = pc.and_(near, pc.less_equal(since, last))
            for i in _falses(near):
                is_read = bounds.column in reading.columns
                shown = reading.shown(bounds.column, i) if is_read else str(event_time[i])
                text = found("a time near the ingest hour", shown)
                errors_text = f"{bounds.column}: {text}"
                reading.errors.add(i, _EVENT_TIME, "event_time_out_of_bounds", errors_text)
            if not _all(near):
                event_time = pc.if_else(in_the_calendar(event_time), event_time, None)
        if event_time.null_count:
            event_time = pc.coalesce(event_time, at, starts.cast(MICROS))
        return dates_of(event_time)


def _reader(spec: DecodeSpec) -> Reader:
    # Imported here: a worker needs the library of its own format only.
    types = {column.name: column.type for column in spec.columns}
    if spec.format == "csv":
        from anabranch.decode.csv import CsvReader

        return CsvReader(spec.columns, spec.delimiter, spec.header)
    if spec.format == "raw":
        return RawReader(types)
    if spec.format == "avro":
        from anabranch.decode.avro import AvroReader

        return AvroReader(spec.columns, spec.schemas)
    names_unknown = spec.lists_unknown or spec.refuses_unknown
    if spec.format == "protobuf":
        from anabranch.decode.protobuf import ProtobufReader

        return ProtobufReader(spec.columns, spec.schemas, spec.message, names_unknown)
    if spec.envelope is not None:
        from anabranch.decode.debezium import DebeziumReader

        return DebeziumReader(spec.columns, names_unknown, spec.rescued is not None)
    from anabranch.decode.json import JsonReader

    schemas = spec.schemas if spec.format == "json_schema" else None
    return JsonReader(spec.columns, names_unknown, spec.rescued is not None, schemas)


def _starts(hours: pa.Array) -> pa.Array:
    """Return the start of each ingest hour in microseconds since 1970."""
    names = pc.unique(hours)
    starts = pa.array([millis(start_of(name)) * 1000 for name in names.to_pylist()], pa.int64())
    return starts.take(pc.index_in(hours, value_set=names))


def micros(delta: timedelta) -> int:
    return delta // timedelta(microseconds=1)


def _all(mask: pa.Array) -> bool:
    """Return whether a mask is true everywhere, ignoring nulls."""
    return pc.all(mask, min_count=0).as_py() is not False


def _falses(mask: pa.Array) -> list[int]:
    """Return the indexes at which a mask is false, and not null."""
    if _all(mask):
        return []
    places: list[int] = pc.indices_nonzero(pc.invert(pc.fill_null(mask, True))).to_pylist()
    return places


def _nulls(values: pa.Array) -> list[int]:
    return pc.indices_nonzero(values.is_null()).to_pylist() if values.null_count else []


class RawReader:
    """The record's value, and its key if there is a column for it, unchanged and unparsed.

    BINARY takes any bytes; STRING takes UTF-8. A null value is null like any other: NOT NULL of the
    column decides.
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._types = dict(columns)

    def read(self, batch: pa.RecordBatch) -> Reading:
        """Read `value` and `key` of a batch."""
        errors, columns = Errors(), {}
        for place, (name, type) in enumerate(self._types.items()):
            columns[name] = batch.column(name)
            if type == "string":
                columns[name], bad = texts(columns[name])
                for i in bad:
                    errors.add(i, place, "invalid_utf8", f"{name}: {_NO_TEXT}")
        return Reading(columns, errors, lambda name, i: str(columns[name][i].as_py()))


_KAFKA = ["kafka_partition", "kafka_offset", "kafka_timestamp", "ingest_hour"]


def letters_of(batch: pa.RecordBatch, decoded: Decoded, topic_id: str, layer: str) -> pa.Table:
    """Return the records of a batch (`Decoder.decode`) that have an error, in the columns of the
    dead letters table, with their bytes unchanged."""
    places = sorted(decoded.errors)
    at = pa.array(places, pa.int64())
    records, errors = batch.take(at), [decoded.errors[i] for i in places]
    kafka = decoded.rows.select(_KAFKA).take(at)
    return pa.table(
        {
            "topic_id": pa.repeat(topic_id, len(at)),
            **dict(zip(_KAFKA, kafka.columns, strict=True)),
            "key": records.column("key"),
            "value": records.column("value"),
            "headers": headers_of(records.column("headers")),
            "error_code": pa.array([code for code, _ in errors], pa.string()),
            "error_text": pa.array([text for _, text in errors], pa.string()),
            "layer": pa.repeat(layer, len(at)),
        }
    )
