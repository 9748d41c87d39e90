"""Records: from Kafka's bytes to the stream's columns, with the same code for both layers.

`assign_hours` adds a record's ingest hour, `decode` reads its value and gives a verdict, `good` and
`dead` split records by it. All are DataFrame -> DataFrame and lazy. A verdict depends only on the
record's bytes, the stream and the ingest hour (with a schema registry also on the schema of the
record's id, which never changes): not on the layer, the current time, or a session's settings (ANSI
mode, time zone). No bytes make `decode` fail; a record that cannot become a row gets an error code
and text.

`anabranch.records.formats` reads each format as columns, `anabranch.records.checks` gives the
verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType

from anabranch.config import Stream
from anabranch.config.columns import Column
from anabranch.offsets.hours import HourRange
from anabranch.offsets.partition_sql import MAX_OFFSET, arrays, inside, texts
from anabranch.offsets.position import Ranges
from anabranch.records.checks import Check, error, in_the_calendar, judge, opaque, utc_date
from anabranch.records.formats import Format
from anabranch.records.selected import project

ERROR_TEXT_LENGTH = 300
_KAFKA_COLUMNS = ("kafka_partition", "kafka_offset", "kafka_timestamp", "ingest_hour")
BYTES = ("kafka_key", "kafka_value", "kafka_headers")
"""The columns of a decoded record with Kafka's own data, for dead letters."""

UNKNOWN = "unknown_fields"
"""The column of a decoded record with the names of its fields that have no column in the stream;
empty or null if there are none."""

REFUSED_FIELD = "unknown_field"
"""The error code of a record with unknown fields and no other error, if the stream refuses such
fields."""

_HEADERS = "array<struct<key:string,value:binary>>"
_NO_NAMES = "CAST(NULL AS array<string>)"


def assign_hours(frame: DataFrame, hours: Sequence[HourRange]) -> DataFrame:
    """Add `ingest_hour`: the first of `hours` (oldest first) whose end for the record's partition
    is above its offset.

    A partition that an hour's `ends` lacks was added later and has no record in that hour. The hour
    with `ends=None` comes last and takes the rest. Without it, a record outside all hours fails the
    query, so trim the frame to the hours first. Raises ValueError for hours that contradict each
    other.
    """
    _check(hours)
    closed = [(entry.hour, entry.ends) for entry in hours if entry.ends is not None]
    # A binary search with one small projection a step, so that the plan grows with the logarithm of
    # the number of hours.
    steps = len(closed).bit_length()
    places = 2**steps
    ends = {p: [e.get(p, 0) for _, e in closed] for _, e in closed for p in e}
    rest = [MAX_OFFSET] * (places - len(closed))
    by_partition = arrays({p: [*of_hours, *rest] for p, of_hours in ends.items()})
    searched = frame.selectExpr("*", f"get({by_partition}, partition) AS _ends", "0 AS _place")
    for step in (2**i for i in reversed(range(steps))):
        is_before = f"offset < get(_ends, _place + {step - 1})"
        searched = searched.withColumn("_place", F.expr(f"_place + IF({is_before}, 0, {step})"))
    names = [hour for hour, _ in closed]
    if hours[-1].ends is None:
        hour = f"get({texts([*names, *[hours[-1].hour] * (places - len(names))])}, _place)"
    else:
        hour = (
            f"coalesce(get({texts(names)}, _place), raise_error(concat('partition ', partition, "
            f"', offset ', offset, ': expected an offset of the hours {names[0]} to "
            f"{names[-1]}')))"
        )
    return searched.withColumn("ingest_hour", F.expr(hour)).drop("_ends", "_place")


def _check(hours: Sequence[HourRange]) -> None:
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


def trim(frame: DataFrame, ranges: Ranges) -> DataFrame:
    """Keep only records with offsets in `[start, end)` of their partition; other partitions have
    none."""
    return frame.where(F.expr(inside(ranges, "partition", "offset")))


def decode(
    frame: DataFrame,
    stream: Stream,
    form: Format,
    with_errors: bool = True,
    with_unknown: bool = False,
    beside: Sequence[str] = (),
    secret: bytes | None = None,
) -> DataFrame:
    """Read Kafka's `value` as the stream's columns, by its format and `select`, and judge it.

    `frame` has the columns of Spark's Kafka source and `ingest_hour`. The result has the stream's
    columns (exact types), `kafka_partition`, `kafka_offset`, `kafka_timestamp`, `ingest_hour`,
    `event_date` and `is_dead`. If `is_dead`, the stream's columns contain whatever could be read.

    `with_errors` adds `error_code` and `error_text`, null for good records, and `kafka_key`,
    `kafka_value` and `kafka_headers` unchanged; without them Spark has less to plan. `with_unknown`
    adds `unknown_fields`, the names of a value's fields that have no column in the stream: empty or
    null if there are none, and always null if the stream ignores them. `beside` names columns of
    the frame to append unchanged. `secret` hashes columns of `select`. A format with a schema
    registry first queries the frame's schema ids, and raises as `Format.read`.
    """
    fields = types_of(stream.record_columns)
    headers = "headers" if "headers" in frame.columns else f"CAST(NULL AS {_HEADERS})"
    records = frame.selectExpr(
        "CAST(partition AS INT) AS kafka_partition",
        "CAST(offset AS BIGINT) AS kafka_offset",
        # Python's dates, and so those of most readers, have no other years.
        f"IF({in_the_calendar('unix_micros(CAST(timestamp AS TIMESTAMP))')}, CAST(timestamp AS "
        "TIMESTAMP), NULL) AS kafka_timestamp",
        "ingest_hour",
        "key AS kafka_key",
        "value AS kafka_value",
        f"{headers} AS kafka_headers",
        *((f"'{stream.topic}' AS kafka_topic",) if stream.select is not None else ()),
        "value",
        "unix_micros(try_cast(concat(ingest_hour, ':00:00Z') AS TIMESTAMP)) AS _hour_start",
        *beside,
    )
    reading = form.read(records, fields)
    read, unknown = reading.frame, reading.unknown if stream.unknown != "ignore" else None
    if unknown is not None and stream.unknown != "count":
        read, unknown = read.selectExpr("*", f"{unknown} AS _unknown"), "_unknown"
    verdict = judge(stream, reading.checks, reading.shown, tuple(_refusal(stream)))
    rescued = (
        f"IF(size(_unknown) > 0, {reading.rescued}, NULL) AS `_row_{c.name}`"
        for c in stream.columns
        if c.rescues
    )
    judged = read.selectExpr("*", *rescued, f"{opaque(verdict.is_dead)} AS is_dead")
    errors: tuple[str, ...] = ()
    if with_errors:
        judged = judged.selectExpr("*", f"IF(is_dead, {verdict.error}, NULL) AS _error")
        errors = (
            "_error.code AS error_code",
            f"substring(_error.text, 1, {ERROR_TEXT_LENGTH}) AS error_text",
            *BYTES,
        )
    event_time = "coalesce(kafka_timestamp, timestamp_micros(_hour_start))"
    if stream.event_time is not None:
        event_time = (
            f"coalesce(`_row_{stream.event_time.column}`, kafka_timestamp, "
            "timestamp_micros(_hour_start))"
        )
    rest = (
        *_KAFKA_COLUMNS,
        f"{utc_date(event_time)} AS event_date",
        "is_dead",
        *errors,
        *((f"{unknown or _NO_NAMES} AS {UNKNOWN}",) if with_unknown else ()),
        *beside,
    )
    if stream.select is not None:
        rescues = (f"`_row_{c.name}` AS `{c.name}`" for c in stream.columns if c.rescues)
        return project(judged, stream, secret, (*rescues, *rest))
    return judged.selectExpr(*(f"`_row_{c.name}` AS `{c.name}`" for c in stream.columns), *rest)


def _refusal(stream: Stream) -> Iterator[Check]:
    if stream.unknown == "refuse":
        found = (
            "concat('expected no fields beside those of the schema, found ', array_join(_unknown, "
            "', '))"
        )
        yield Check("size(_unknown) > 0", error(REFUSED_FIELD, found))


def types_of(columns: Iterable[Column]) -> dict[str, DataType]:
    return {c.name: DataType.fromDDL(c.type) for c in columns}


def as_decoded(rows: DataFrame, stream: Stream) -> DataFrame:
    """Return rows of the table with the columns of `decode`, as good records without their
    bytes."""
    names = [column.name for column in stream.columns]
    unknown = {
        "error_code": "STRING",
        "error_text": "STRING",
        "kafka_key": "BINARY",
        "kafka_value": "BINARY",
        "kafka_headers": _HEADERS,
        UNKNOWN: "array<string>",
    }
    return rows.selectExpr(
        *(f"`{name}`" for name in names),
        *_KAFKA_COLUMNS,
        "event_date",
        "false AS is_dead",
        *(f"CAST(NULL AS {kind}) AS {name}" for name, kind in unknown.items()),
    )


def good(decoded: DataFrame, stream: Stream) -> DataFrame:
    """Return the rows of the table: good records with the table's columns in the table's order."""
    names = [column.name for column in stream.columns]
    return decoded.where("NOT is_dead").select(*names, *_KAFKA_COLUMNS, "event_date")


def dead(decoded: DataFrame, topic_id: str, layer: str) -> DataFrame:
    """Return the dead letters: the records with a verdict, with their bytes unchanged."""
    return decoded.where("is_dead").select(
        F.lit(topic_id).alias("topic_id"),
        *_KAFKA_COLUMNS,
        *(F.col(name).alias(name.removeprefix("kafka_")) for name in BYTES),
        "error_code",
        "error_text",
        F.lit(layer).alias("layer"),
    )
