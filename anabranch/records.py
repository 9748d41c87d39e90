"""Records: from Kafka's bytes to the stream's columns, once, for both layers.

`assign_hours` says which ingest hour a record belongs to, `decode` reads its value and gives a verdict, `good` and
`dead` split by it. All are DataFrame -> DataFrame and lazy. A verdict depends on the record's bytes, the stream and
the ingest hour alone: not on the layer, the present, or a session's settings (ANSI mode, time zone). No bytes make
`decode` throw; whatever cannot become a row gets one of `CODES` and a sentence.

How JSON becomes columns:

- Fields are found by exact name; fields that the schema does not have are ignored.
- STRING takes a JSON string, and any other JSON value as its text (`1.50` arrives as `1.5`).
- INT and BIGINT take JSON integers in range; FLOAT and DOUBLE JSON numbers in range; BOOLEAN `true` and `false`;
  DECIMAL a number, also in quotes, rounded half up to its scale; BINARY a string in Base64. Anything else is
  `wrong_type`, never null: a number in quotes, `3.5` for INT, `1e999` for DOUBLE.
- TIMESTAMP takes ISO 8601 in years 1 to 9999 (`2026-11-21T03:04:05.678+01:00`, `T` or a blank, fraction
  optional, its digits after the sixth dropped), UTC where no zone is given. DATE takes `2026-11-21`.
- An object that names a field twice is `duplicate_key`; inside nested values the last one counts.
- A number of more than 1,000 digits is `malformed_json`: nothing reads it in reasonable time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ArrayType,
    DataType,
    DateType,
    DoubleType,
    FloatType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from anabranch.config import EventTime, Stream
from anabranch.hours import HourRange

CODES = (
    "null_value",
    "empty_value",
    "invalid_utf8",
    "malformed_json",
    "too_deep",
    "not_an_object",
    "duplicate_key",
    "wrong_type",
    "unreadable_timestamp",
    "missing_required",
    "event_time_out_of_bounds",
    "lone_surrogate",
)
MAX_DEPTH = 100
"""How deep objects and arrays may be nested; deeper is `too_deep`."""

ERROR_TEXT_LENGTH = 300
_FOUND_LENGTH = 80
# Far enough to tell "too deep" from "malformed", near enough to cost no memory.
_DEPTH_TO_TELL = 10_000
_HOUR_MICROS = 3_600_000_000
_KAFKA_COLUMNS = ("kafka_partition", "kafka_offset", "kafka_timestamp", "ingest_hour")
# A cast of a binary to text copies nothing and checks nothing.
_TEXT = "CAST(value AS STRING)"
_HEADERS = "array<struct<key:string,value:binary>>"

# Regular expressions of Java; none holds a quote, so that r'...' is their SQL.
_TIMESTAMP = r"^(?!0000)\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(\.\d{1,9})?(Z|[+-]\d{2}(:?\d{2})?)?$"
_DATE = r"^(?!0000)\d{4}-\d{2}-\d{2}$"
_ZONE = r"(Z|[+-]\d{2}(:?\d{2})?)$"
_OTHER_THAN_OBJECT = r"^\s*(\[|\x22|-?\d|true\b|false\b|null\b)"
_NOT_TEXT = r"^(-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false|[\[{][\s\S]*)$"
# The escape of a UTF-16 surrogate without its partner, after an even number of backslashes.
_LONE_SURROGATE = (
    r"(?<!\\)(?:\\\\)*+(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    r"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F])"
)


def assign_hours(frame: DataFrame, hours: Sequence[HourRange]) -> DataFrame:
    """Add `ingest_hour`: the first of `hours` (oldest first) whose end for the record's partition is above its offset.

    A partition that an hour's `ends` lacks has no record in that hour (it was added later). The hour with
    `ends=None` takes the rest and comes last. Without one, a record that belongs to none of the hours fails the
    query, so trim the frame to the hours first. Raises ValueError for hours that contradict each other.
    """
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
                    f"hours: {entry.hour}: expected an end of at least {end} for partition {partition}, "
                    f"found {entry.ends.get(partition)}"
                )
        known |= entry.ends
        previous = entry.hour
    closed = [entry for entry in hours if entry.ends is not None]
    if hours[-1].ends is None:
        rest = f"'{hours[-1].hour}'"
    else:
        rest = (
            f"raise_error(concat('partition ', partition, ', offset ', offset, ': expected an offset of the hours "
            f"{hours[0].hour} to {hours[-1].hour}'))"
        )
    # One dense array for each hour, indexed by partition: the plan stays flat for hundreds of partitions.
    cases = " ".join(f"WHEN offset < {_by_partition(entry.ends)} THEN '{entry.hour}'" for entry in closed if entry.ends)
    return frame.withColumn("ingest_hour", F.expr(f"CASE {cases} ELSE {rest} END" if cases else rest))


def trim(frame: DataFrame, ranges: Mapping[int, tuple[int, int]]) -> DataFrame:
    """Only the records whose offset lies inside `[start, end)` of their partition; other partitions have none."""
    if not ranges:
        return frame.where(F.lit(False))
    starts = _by_partition({p: s for p, (s, _) in ranges.items()})
    ends = _by_partition({p: e for p, (_, e) in ranges.items()})
    return frame.where(F.expr(f"offset >= {starts} AND offset < {ends}"))


def _by_partition(offsets: Mapping[int, int]) -> str:
    if any(p < 0 for p in offsets):
        raise ValueError(f"partitions: expected 0 or more, found {min(offsets)}")
    values = ",".join(f"{offsets[p]}L" if p in offsets else "CAST(NULL AS BIGINT)" for p in range(max(offsets) + 1))
    return f"get(array({values}), partition)"


def decode(frame: DataFrame, stream: Stream) -> DataFrame:
    """Read Kafka's `value` as the stream's columns and judge it.

    `frame` has the columns of Spark's Kafka source and `ingest_hour`. The result has the stream's columns (exact
    types), `kafka_partition`, `kafka_offset`, `kafka_timestamp`, `ingest_hour`, `event_date`, then `error_code` (null:
    the record is good) and `error_text`, then `key`, `value` and `headers` as they came. Where there is an
    `error_code`, the stream's columns hold whatever could be read.
    """
    types = {c.name: DataType.fromDDL(c.type) for c in stream.columns}
    headers = "headers" if "headers" in frame.columns else f"CAST(NULL AS {_HEADERS}) AS headers"
    records = frame.selectExpr(
        "CAST(partition AS INT) AS kafka_partition",
        "CAST(offset AS BIGINT) AS kafka_offset",
        "CAST(timestamp AS TIMESTAMP) AS kafka_timestamp",
        "ingest_hour",
        "key",
        "value",
        headers,
        "CAST(xxhash64(value) AS STRING) AS _hash",
    )
    as_read = StructType([StructField(name, _as_read(kind)) for name, kind in types.items()])
    parsed = records.selectExpr("*", f"{_parse(as_read)} AS _parsed")
    rows = parsed.selectExpr(
        "*",
        f"{_intact('_parsed')} AS _intact",
        f"json_object_keys({_TEXT}) AS _names",
        "unix_micros(try_cast(concat(ingest_hour, ':00:00Z') AS TIMESTAMP)) AS _hour_start",
        *(f"{_converted(_raw(name), kind)} AS `_row_{name}`" for name, kind in types.items()),
    )
    # Not deterministic in name only: so that no filter on the verdict is pushed below, to parse every value twice.
    judged = rows.selectExpr("*", f"IF(spark_partition_id() < 0, NULL, {_judge(stream, types)}) AS _error")
    event_time = "kafka_timestamp"
    if stream.event_time is not None:
        event_time = f"coalesce(`_row_{stream.event_time.column}`, kafka_timestamp)"
    return judged.selectExpr(
        *(f"`_row_{name}` AS `{name}`" for name in types),
        *_KAFKA_COLUMNS,
        f"{_utc_date(event_time)} AS event_date",
        "_error.code AS error_code",
        f"substring(_error.text, 1, {ERROR_TEXT_LENGTH}) AS error_text",
        "key",
        "value",
        "headers",
    )


def good(decoded: DataFrame, stream: Stream) -> DataFrame:
    """The rows of the table: good records only, the table's columns in the table's order."""
    names = [column.name for column in stream.columns]
    return decoded.where("error_code IS NULL").select(*names, *_KAFKA_COLUMNS, "event_date")


def dead(decoded: DataFrame, topic_id: str, layer: str) -> DataFrame:
    """The dead letters: the records with a verdict, their bytes as they came."""
    return decoded.where("error_code IS NOT NULL").select(
        F.lit(topic_id).alias("topic_id"),
        *_KAFKA_COLUMNS,
        "key",
        "value",
        "headers",
        "error_code",
        "error_text",
        F.lit(layer).alias("layer"),
    )


# What follows writes SQL, not Column objects: building hundreds of those costs a micro-batch a second.


def _parse(shape: StructType, depth: int = MAX_DEPTH) -> str:
    """Read `{"m": [{"#": <hash>}, <value>, {"#": <hash>}]}`, the hash being the value's own.

    Spark's parser stops at the end of the first object and never sees what follows it. No value can name its own
    hash, so whatever closes the wrapper early, or adds to it, shows: `m` is no longer these three elements.
    """
    mark = "'{\"#\":', _hash, '}'"
    element = StructType([*shape.fields, StructField("#", StringType())])
    schema = StructType([StructField("m", ArrayType(element)), StructField("corrupt", StringType())])
    options = {
        "mode": "PERMISSIVE",
        "columnNameOfCorruptRecord": "corrupt",
        "allowNonNumericNumbers": "false",
        "allowSingleQuotes": "false",
        "timeZone": "UTC",
        "maxNestingDepth": str(depth + 2),  # the wrapper is two levels of its own
    }
    pairs = ", ".join(f"'{key}', '{value}'" for key, value in options.items())
    wrapped = f"concat('{{\"m\":[', {mark}, ',', {_TEXT}, ',', {mark}, ']}}')"
    return f"from_json({wrapped}, '{_ddl(schema)}', map({pairs}))"


def _ddl(schema: StructType) -> str:
    return ", ".join(f"`{f.name}` {_sql_type(f.dataType)}" for f in schema.fields)


def _sql_type(kind: DataType) -> str:
    if isinstance(kind, StructType):
        return "struct<" + ",".join(f"`{f.name}`:{_sql_type(f.dataType)}" for f in kind.fields) + ">"
    if isinstance(kind, ArrayType):
        return f"array<{_sql_type(kind.elementType)}>"
    if isinstance(kind, MapType):
        return f"map<{_sql_type(kind.keyType)},{_sql_type(kind.valueType)}>"
    return kind.simpleString()


def _intact(parsed: str) -> str:
    """Whether the value was read as one JSON value of the expected shape, nothing left over. Never null."""
    return (
        f"coalesce({parsed}.corrupt IS NULL AND size({parsed}.m) = 3 "
        f"AND get({parsed}.m, 0).`#` = _hash AND get({parsed}.m, 2).`#` = _hash, false)"
    )


def _raw(name: str) -> str:
    return f"get(_parsed.m, 1).`{name}`"


def _as_read(kind: DataType) -> DataType:
    """What the parser reads for a type: text for dates and timestamps, whose own reading is too lenient."""
    if isinstance(kind, (TimestampType, DateType)):
        return StringType()
    if isinstance(kind, ArrayType):
        return ArrayType(_as_read(kind.elementType))
    if isinstance(kind, MapType):
        return MapType(kind.keyType, _as_read(kind.valueType))
    if isinstance(kind, StructType):
        return StructType([StructField(f.name, _as_read(f.dataType)) for f in kind.fields])
    return kind


def _converted(read: str, kind: DataType, level: int = 0) -> str:
    """From what `_as_read` gave to the type itself; text that cannot be read becomes null."""
    if _as_read(kind) == kind:
        return read
    if isinstance(kind, DateType):
        return f"IF({read} RLIKE r'{_DATE}', try_cast({read} AS DATE), NULL)"
    if isinstance(kind, TimestampType):
        # The zone is always written out, so the session's own never counts.
        zoned = f"IF(endswith({read}, 'Z') OR {read} RLIKE r'{_ZONE}', {read}, concat({read}, 'Z'))"
        at = f"try_cast({zoned} AS TIMESTAMP)"
        # Only on the first day and the last can the zone lead out of the years.
        edge = f"startswith({read}, '0001-01-01') OR startswith({read}, '9999-12-31')"
        inside = f"{at} BETWEEN TIMESTAMP'0001-01-01 00:00:00Z' AND TIMESTAMP'9999-12-31 23:59:59.999999Z'"
        return f"IF({read} RLIKE r'{_TIMESTAMP}' AND (NOT ({edge}) OR {inside}), {at}, NULL)"
    item = f"x{level}"
    if isinstance(kind, ArrayType):
        return f"transform({read}, {item} -> {_converted(item, kind.elementType, level + 1)})"
    if isinstance(kind, MapType):
        return f"transform_values({read}, (k{level}, {item}) -> {_converted(item, kind.valueType, level + 1)})"
    assert isinstance(kind, StructType)
    fields = ", ".join(f"'{f.name}', {_converted(f'{read}.`{f.name}`', f.dataType, level)}" for f in kind.fields)
    return f"IF({read} IS NULL, NULL, named_struct({fields}))"


def _judge(stream: Stream, types: Mapping[str, DataType]) -> str:
    """The verdict on a record, null or a struct of code and text: the first condition that holds."""
    null = _error("null_value", "'expected a JSON object, found a null value'")
    not_utf8 = _error("invalid_utf8", "'expected UTF-8, found bytes that are not'")
    checks = [
        ("get(_parsed.m, 1) IS NULL", "not_an_object", "'expected a JSON object, found null'"),
        (
            rf"contains({_TEXT}, r'\u') AND {_TEXT} RLIKE r'{_LONE_SURROGATE}'",
            "lone_surrogate",
            "'expected Unicode text, found the escape of a surrogate without its partner'",
        ),
        (
            "size(array_distinct(_names)) < size(_names)",
            "duplicate_key",
            "concat('expected each field once, found ', array_join(_names, ', '))",
        ),
        *(check for name, kind in types.items() for check in _judge_column(name, kind)),
        *(
            (
                f"`_row_{c.name}` IS NULL",
                "missing_required",
                f"'{c.name}: expected {c.type} NOT NULL, found null or no such field'",
            )
            for c in stream.columns
            if not c.nullable
        ),
        *(_judge_event_time(stream.event_time) if stream.event_time is not None else ()),
    ]
    cases = " ".join(f"WHEN {test} THEN {_error(code, text)}" for test, code, text in checks)
    return (
        f"CASE WHEN value IS NULL THEN {null} WHEN NOT is_valid_utf8({_TEXT}) THEN {not_utf8} "
        f"WHEN NOT _intact THEN {_judge_broken(types)} {cases} END"
    )


def _judge_broken(types: Mapping[str, DataType]) -> str:
    """Why a value is not intact. It is read again, twice, which only bad records cost."""
    deep = _parse(StructType([]), _DEPTH_TO_TELL)
    texts = _parse(StructType([StructField(name, StringType()) for name in types]))
    culprits = []
    for name, kind in types.items():
        text = f"get(b.texts.m, 1).`{name}`"
        found = _found(f"{name}: expected {kind.simpleString()}", text)
        culprits.append(f"IF({text} IS NOT NULL AND {_raw(name)} IS NULL, {found}, NULL)")
    # Where the parser gives up a whole record for one field (a setting of Spark's), there is no telling which.
    unknown = "'expected the types of the schema, found another'"
    culprit = f"IF(get(_parsed.m, 1) IS NULL, {unknown}, coalesce({', '.join(culprits)}, {unknown}))"
    malformed = "'expected one JSON object, found text that is not JSON, is cut off, or goes on after the object'"
    too_deep = f"'expected at most {MAX_DEPTH} levels of nesting, found more'"
    empty = _error("empty_value", "'expected a JSON object, found no text'")
    not_an_object = _error("not_an_object", _found("expected a JSON object", _TEXT))
    verdict = (
        rf"CASE WHEN NOT {_TEXT} RLIKE r'\S' THEN {empty} "
        f"WHEN {_TEXT} RLIKE r'{_OTHER_THAN_OBJECT}' THEN {not_an_object} "
        f"WHEN NOT {_intact('b.deep')} THEN {_error('malformed_json', malformed)} "
        f"WHEN NOT {_intact('b.texts')} THEN {_error('too_deep', too_deep)} "
        f"ELSE {_error('wrong_type', culprit)} END"
    )
    # A lambda over one element: the way to evaluate an expression once and name it.
    return f"get(transform(array(named_struct('deep', {deep}, 'texts', {texts})), b -> {verdict}), 0)"


def _error(code: str, text: str) -> str:
    return f"struct('{code}' AS code, {text} AS text)"


def _judge_column(name: str, kind: DataType) -> Iterator[tuple[str, str, str]]:
    raw = _raw(name)
    text = _found(f"{name}: expected {kind.simpleString()}", f"CAST({raw} AS STRING)")
    if isinstance(kind, (TimestampType, DateType)):
        unreadable = f"{raw} IS NOT NULL AND `_row_{name}` IS NULL"
        yield f"{unreadable} AND {raw} RLIKE r'{_NOT_TEXT}'", "wrong_type", text
        yield unreadable, "unreadable_timestamp", text
    elif unreadable := _unreadable(raw, kind):
        yield unreadable, "wrong_type", text


def _unreadable(read: str, kind: DataType, level: int = 0) -> str:
    """Whether a value that the parser let pass is not of its type after all; empty where that cannot be."""
    item = f"y{level}"
    if isinstance(kind, (FloatType, DoubleType)):
        return f"abs({read}) = double('Infinity')"
    if isinstance(kind, (TimestampType, DateType)):
        return f"({read} IS NOT NULL AND {_converted(read, kind)} IS NULL)"
    if isinstance(kind, StructType):
        parts = [_unreadable(f"{read}.`{f.name}`", f.dataType, level) for f in kind.fields]
        return " OR ".join(f"coalesce({part}, false)" for part in parts if part)
    if isinstance(kind, (ArrayType, MapType)):
        inner = _unreadable(item, kind.elementType if isinstance(kind, ArrayType) else kind.valueType, level + 1)
        items = read if isinstance(kind, ArrayType) else f"map_values({read})"
        return f"exists({items}, {item} -> coalesce({inner}, false))" if inner else ""
    return ""


def _judge_event_time(bounds: EventTime) -> Iterator[tuple[str, str, str]]:
    """The bounds are measured from the ingest hour's start and end, so every rebuild gives the same verdict."""
    at = f"unix_micros(`_row_{bounds.column}`)"
    text = _found(f"{bounds.column}: expected a time near the ingest hour", _raw(bounds.column))
    if bounds.past is not None:
        yield f"{at} < _hour_start - {_micros(bounds.past)}L", "event_time_out_of_bounds", text
    if bounds.future is not None:
        yield f"{at} > _hour_start + {_HOUR_MICROS + _micros(bounds.future)}L", "event_time_out_of_bounds", text


def _found(expected: str, found: str) -> str:
    return f"concat('{expected}, found ', coalesce(substring({found}, 1, {_FOUND_LENGTH}), 'null'))"


def _micros(delta: timedelta) -> int:
    return delta // timedelta(microseconds=1)


def _utc_date(moment: str) -> str:
    """The UTC date of a timestamp, whatever the session's time zone."""
    seconds = f"unix_seconds({moment})"
    return f"date_from_unix_date(CAST(({seconds} - pmod({seconds}, 86400)) div 86400 AS INT))"
