"""The form of a topic's values without a registry: JSON in an envelope or without, CSV, or text and
bytes.

Schemas of Kafka Connect are as its JSON converters write them beside each value
(org.apache.kafka.connect.json.JsonSchema), with Debezium's semantic types
(https://debezium.io/documentation/reference/stable/connectors/postgresql.html#postgresql-data-types).
Lines of logs are taken apart with `select`; a part that a line lacks is null.

A `Sketch` has the parts of a draft; `text_of` writes it as a stream's file.
"""

from __future__ import annotations

import json
import re
import unicodedata
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import yaml

from anabranch.common.output import text as one_line
from anabranch.config import TAKEN_COLUMNS
from anabranch.config.columns import MOST_DIGITS, RESCUED, Column, Notation
from anabranch.config.plain import NAME, REFERENCE
from anabranch.config.schema import columns_mapping
from anabranch.decode import csv, values
from anabranch.decode.avro_names import CONNECT_TIMES
from anabranch.decode.guessed import (
    STRING,
    Guess,
    are_names,
    common_notation,
    group_digits,
    guess,
    guess_text,
)
from anabranch.decode.inputs import headers_of

MOST_COLUMNS = 300
_MANY = 100
_NOT_ROWS = "null values and headers"
_NO_NAME = re.compile(r'["\\\x00-\x1f]')
_NO_VALUE = Guess("string", note="null in each record")


@dataclass
class Sketch:
    """A stream without name, topic and table. `schema`: in place of `columns`, that of a subject.
    `implied`: the path before a column's own name that needs no `from`. `notes`: what a person must
    decide, by column; `key_note` and `time_note`: of the key and the event time; `comments`: of the
    whole. `keys`: what the format or envelope says of an event's identity, in order; `time`: of its
    time. `has_states`: a record replaces the earlier one of its key, as in a compacted topic.
    `max_dead`: of `quality`, in percent."""

    format: object = "json"
    columns: list[Column] = field(default_factory=list)
    schema: object = None
    implied: tuple[str, ...] = ()
    select: list[object] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    comments: list[str] = field(default_factory=list)
    keys: list[list[str]] = field(default_factory=list)
    time: str = ""
    key_note: str = ""
    time_note: str = ""
    rescues: bool = False
    has_states: bool = False
    max_dead: int = 0

    @property
    def form(self) -> Mapping[str, Any]:
        """The format as a mapping, also if it is a type alone."""
        return self.format if isinstance(self.format, Mapping) else {"type": self.format}

    def add(self, of: Guess, wanted: str, path: tuple[str, ...] = ()) -> str:
        """Add a column, and return its name: `wanted`, if none has it. `path`: its field."""
        taken = {RESCUED.name, *TAKEN_COLUMNS, *(c.name.lower() for c in self.columns)}
        name = wanted
        if not NAME.fullmatch(name) or name.lower() in taken:
            plain = unicodedata.normalize("NFKD", wanted.replace("ß", "ss"))
            plain = "".join(c for c in plain if not unicodedata.combining(c))
            name = re.sub(r"[^A-Za-z0-9_]+", "_", plain).strip("_") or "field"
            name = f"_{name}" if name[0].isdigit() else name
            base, number = name, 2
            while name.lower() in taken:
                name, number = f"{base}_{number}", number + 1
        path = () if path == (*self.implied, name) else path
        self.columns.append(Column(name, of.type, True, False, path, of.notation))
        if of.note:
            self.notes[name] = of.note
        return name

    def add_fields(
        self,
        objects: Sequence[Mapping[str, Any]],
        stamps: Sequence[int],
        path: tuple[str, ...] = (),
    ) -> None:
        """Add a column for each field of objects; fields that cannot be columns are rescued."""
        counts: dict[str, int] = {}
        for one in objects:
            for name in one:
                counts[name] = counts.get(name, 0) + 1
        usable = [name for name in counts if is_usable(name)]
        # The stable sort keeps the fields' order among those of equal frequency.
        chosen = set(sorted(usable, key=lambda name: -counts[name])[:MOST_COLUMNS])
        self.rescues |= len(chosen) < len(counts) or _is_rare(counts.values(), len(objects))
        # Names that need no other come first, so that each keeps its own.
        for name in sorted((n for n in counts if n in chosen), key=lambda n: not NAME.fullmatch(n)):
            found = [one.get(name) for one in objects]
            inner = list[str]()
            while wrapper := _wrapper(found):
                found = [one and one[wrapper] for one in found]
                inner.append(wrapper)
            of = guess(found, name, stamps) or _NO_VALUE
            self.rescues |= "struct<" in of.type and _has_rare(found)
            self.add(of, name, (*path, name, *inner))

    def replace(self, column: Column, note: str) -> None:
        self.columns[[c.name for c in self.columns].index(column.name)] = column
        self.notes[column.name] = note


def _has_rare(found: Iterable[Any], levels: int = 12) -> bool:
    """Return whether few of the objects in values have a field."""
    nested = [one for value in found for one in (value if isinstance(value, list) else [value])]
    objects = [one for one in nested if isinstance(one, Mapping)]
    inner = dict[str, list[Any]]()
    for one in objects:
        for name, value in one.items():
            inner.setdefault(name, []).append(value)
    return _is_rare(map(len, inner.values()), len(objects)) or any(
        levels and _has_rare(values, levels - 1) for values in inner.values()
    )


def _is_rare(counts: Iterable[int], of: int) -> bool:
    """Return whether few of many objects have a field: beside it are others, which none of these
    has."""
    return of >= _MANY and min(counts, default=of) * 100 <= of


def _wrapper(values: Sequence[Any]) -> str:
    """Return the one name in all objects that MongoDB writes for a value: `{"$oid": "5f"}`."""
    given = [value for value in values if value is not None]
    names = {tuple(value) if isinstance(value, Mapping) else () for value in given}
    only = names.pop() if len(names) == 1 else ()
    return only[0] if len(only) == 1 and only[0].startswith("$") and is_usable(only[0]) else ""


def is_usable(name: str) -> bool:
    """Return whether a file can name a field: no text of a file contains `${NAME}`."""
    return bool(name) and not _NO_NAME.search(name) and not REFERENCE.search(name)


def text_of(
    sketch: Sketch, name: str, topic: str, table: str, key: Sequence[str], time: str = ""
) -> str:
    """Return the sketch as the file of stream `name`. Pure."""
    lines = [
        f"# conf/streams/{name}.yaml",
        *(f"# {one_line(comment)}" for comment in sketch.comments),
    ]
    lines += _entries({"topic": topic, "table": table, "format": sketch.format})
    if sketch.schema is not None:
        lines += _entries({"schema": sketch.schema})
    else:
        lines.append("schema:")
        for column in sketch.columns:
            note = sketch.notes.get(column.name, "")
            [line] = _entries(columns_mapping([column]))
            lines.append(f"  {line}{_comment(note)}")
    if sketch.select:
        lines.append("select:")
        lines += [f"  - {line}" for one in sketch.select for line in [_flow(one)]]
    keys = "none" if not key else key[0] if len(key) == 1 else list(key)
    [line] = _entries({"key": keys})
    lines.append(f"{line}{_comment(sketch.key_note)}")
    if time:
        [line] = _entries({"event_time": {"column": time}})
        lines.append(f"{line}{_comment(sketch.time_note)}")
    if sketch.rescues:
        lines.append("unknown: rescue # fields without a column, in the column rescued")
    if sketch.max_dead:
        lines.append(f"quality: {{max_dead: {sketch.max_dead} %}} # {_NOT_ROWS} are dead letters")
    return "\n".join(lines) + "\n"


def _comment(note: str) -> str:
    return f" # {one_line(note)}" if note else ""


def _entries(values: Mapping[str, object]) -> Iterable[str]:
    return [f"{_flow(key)}: {_flow(value)}" for key, value in values.items()]


def _flow(value: object) -> str:
    """Return a value in YAML's flow style, on one line."""
    dumped = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=2**31
    )
    return dumped.removesuffix("...\n").strip("\n")


_JSON = msgspec.json.Decoder(float_hook=Decimal)
_DELIMITERS = (",", ";", "\t", "|")
_OPERATIONS = frozenset("crudtm")
_DOCUMENTS = {list: "lists of JSON", str: "JSON in a text of JSON", dict: "several objects of JSON"}
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1f]")
# Beside separators and terminals' escapes: bytes of formats with a schema may be UTF-8 too.
_NO_TEXT = re.compile(rb"[\x00\x02-\x08\x0e-\x1a]")
_ID_HEADER = "__value_schema_id"
_COMPRESSED = {b"\x1f\x8b": "compressed by gzip", b"\x28\xb5\x2f\xfd": "compressed by zstd"}
# Fields of a change's source that place it, in the order of databases' logs.
_POSITIONS = (
    *("lsn", "file", "pos", "row", "ord", "scn", "rs_id", "ssn", "change_lsn", "event_serial_no"),
)
_OF_CHANGE = frozenset(
    ("before", "after", "row", "source", "op", "ts_ms", "ts_us", "ts_ns", "transaction", "schema")
)
_KEY = "record_key"
_HEADER_TIME = "CAST(decode(kafka_headers['ce_time']) AS TIMESTAMPTZ)"
_MILLIS = Guess("timestamp", Notation(unit="millis"))
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)

Object = Mapping[str, Any]


def sketch_of(records: pa.RecordBatch) -> Sketch:
    """Return the sketch of a topic's records, of `operations.check.batch_of`. Pure."""
    given = [value for value in records.column("value").to_pylist() if value is not None]
    stamps = stamps_of(records)
    if given and all(map(_is_utf16, given)):
        comment = "text in UTF-16, which no format reads: let the producer send UTF-8"
        return raw("binary", records, [comment])
    objects = [one for one in map(read, given) if isinstance(one, Mapping)]
    if 2 * len(objects) >= len(given):
        sketch = _of_objects(objects, stamps, records)
        if sketch.columns:
            return sketch
    texts = [one for one in given if values.is_utf8(one) and not _NO_TEXT.search(one.rstrip(b"\0"))]
    lines = [one.decode("utf-8-sig") for one in texts]
    if 2 * len(lines) > len(given):
        found = None if form_of(lines) else _of_csv(lines, stamps, _firsts(records))
        if found is None:
            return _of_text(lines, records)
        mark = found.form.get("delimiter", ",")
        add_metadata(
            found, records, lambda one: csv.split((one or b"").decode(errors="replace"), mark)
        )
        return found
    comment = "no text: perhaps a format with a schema (avro, protobuf)"
    if not any(map(_CONTROL.search, given)):
        comment = "text that is not UTF-8, which no format reads: let the producer send UTF-8"
    for start, name in _COMPRESSED.items():
        if all(value.startswith(start) for value in given):
            comment = f"{name}, which no format reads: let Kafka compress (compression.type)"
    if all(value[:1] == b"\0" for value in given):
        comment = (
            "values begin with a zero byte, as with a schema registry: set registry.url to the one "
            "that has their ids, of four bytes"
        )
    if _ID_HEADER in headers_found(records)[1]:
        comment = (
            f"the schema's id is in the header {_ID_HEADER}: let the producer write it before the "
            "payload (value.schema.id.serializer)"
        )
    return raw("binary", records, [comment])


def _is_utf16(value: bytes) -> bool:
    encoding = json.detect_encoding(value)
    try:
        return encoding.startswith("utf-16") and not _NO_TEXT.search(
            value.decode(encoding).encode()
        )
    except UnicodeError:
        return False


def stamps_of(records: pa.RecordBatch) -> list[int]:
    """Return the records' timestamps in milliseconds since 1970."""
    stamps = records.column("timestamp").cast(pa.int64()).to_pylist()
    return [micros // 1000 for micros in stamps if micros]


def read(value: bytes | None) -> Any:
    """Return a value's JSON; None if it is none."""
    try:
        return _JSON.decode((value or b"null").removeprefix(BOM_UTF8))
    except _UNREADABLE:
        return None


def _object(value: bytes | None) -> Object | None:
    found = read(value)
    return found if isinstance(found, Mapping) else None


def _of_objects(
    objects: Sequence[Object], stamps: Sequence[int], records: pa.RecordBatch
) -> Sketch:
    changes = [_change(one) for one in objects]
    keys = [_payload(read(key)) for key in records.column("key").to_pylist()]
    if all(change is not None for change in changes):
        return _of_changes(objects, [c for c in changes if c], keys, stamps)
    sketch = Sketch()
    if all(one.keys() == {"schema", "payload"} for one in objects):
        _add_connect(sketch, objects, stamps)
    elif all({"specversion", "id", "source", "type"} <= one.keys() for one in objects):
        _add_cloud_event(sketch, objects, stamps)
    else:
        sketch.add_fields(objects, stamps)
    add_metadata(sketch, records, _object)
    return sketch


def _change(one: Object) -> Object | None:
    """Return Debezium's change in a value, perhaps beside its schema; None for any other object."""
    change = one if "op" in one else one.get("payload")
    is_one = (
        isinstance(change, Mapping)
        and str(change.get("op")) in _OPERATIONS
        and (bool({"before", "after"} & change.keys()) or change["op"] == "t")
        and ("source" in change or "ts_ms" in change)
    )
    return change if is_one else None


def _payload(key: Any) -> Any:
    is_beside = isinstance(key, Mapping) and key.keys() == {"schema", "payload"}
    return key["payload"] if is_beside else key


def _of_changes(
    objects: Sequence[Object], changes: Sequence[Object], keys: Sequence[Any], stamps: Sequence[int]
) -> Sketch:
    sketch = Sketch({"type": "json", "envelope": "debezium"}, implied=("row",))
    schema = _schema_of(objects, "after") or _schema_of(objects, "before")
    rows = [one for one in map(_row, changes) if one is not None]
    if schema and not any(isinstance(change.get("after"), str) for change in changes):
        for name, of_row in schema.items():
            sketch.add(of_row, name, ("row", name))
    else:
        sketch.add_fields(rows, stamps, ("row",))
        sketch.comments.append(
            "Without Debezium's schema, dates are numbers of days (unit: days), and decimals are "
            "texts (decimal: base64) or numbers: compare with the database's table"
        )
    names = {(column.path or ("row", column.name))[1]: column.name for column in sketch.columns}
    of_keys = [key for key in keys if isinstance(key, Mapping)]
    fields = list(of_keys[0]) if of_keys else []
    for name in fields:
        if name not in names and is_usable(name):
            # MongoDB's deletes have only their key.
            of_key = guess([key.get(name) for key in of_keys], name, stamps) or STRING
            names[name] = sketch.add(of_key, name, ("row", name))
    # MongoDB's `updateDescription` has what an update without a document sets.
    others = dict.fromkeys(name for change in changes for name in change if name not in _OF_CHANGE)
    for name in filter(is_usable, others):
        more = guess([change.get(name) for change in changes], name, stamps)
        if more is not None:
            sketch.add(more, name, (name,))
    if fields == ["id"] and "_id" in names:
        fields = ["_id", "id"]
    sources = [s for change in changes if isinstance(s := change.get("source"), Mapping)]
    source = {
        name: of
        for name in (*_POSITIONS, "ts_ms")
        if (of := guess([one.get(name) for one in sources], name)) is not None
    }
    add_change(sketch, [names[name] for name in fields if name in names], source)
    return sketch


def _row(change: Object) -> Object | None:
    row = change.get("after")
    row = change.get("before") if row is None else row
    # MongoDB's documents are text.
    row = read(row.encode()) if isinstance(row, str) else row
    return row if isinstance(row, Mapping) else None


def add_change(sketch: Sketch, key: Sequence[str], source: Mapping[str, Guess]) -> None:
    """Add the fields of Debezium's change itself. `key`: the columns of the row's key; `source`:
    the fields of the change's source."""
    sketch.add(STRING, "op", ("op",))
    positions = [
        sketch.add(source[name], f"source_{name}", ("source", name))
        for name in _POSITIONS
        if name in source
    ]
    if "ts_ms" in source:
        sketch.time = sketch.add(_MILLIS, "source_ts", ("source", "ts_ms"))
    if "ord" in source and sketch.time:
        # It counts the changes of a second.
        positions.append(sketch.time)
    if key and positions:
        sketch.keys.append([*key, *positions])
    sketch.has_states = True


def _schema_of(objects: Sequence[Object], field: str = "") -> dict[str, Guess]:
    """Return the columns of the schemas beside values, or of their `field`; of each name that of
    the newest, and STRING if another contradicts it."""
    found = dict[str, Guess]()
    for one in reversed(objects):
        schema = one.get("schema")
        if not isinstance(schema, Mapping) or schema.get("type") != "struct":
            continue
        parts = _fields_in(schema)
        for name, part in (_fields_in(parts.get(field)) if field else parts).items():
            if is_usable(name) and _contradict(found.setdefault(name, column_of(part)), part):
                found[name] = Guess("string", note="schemas beside the values differ")
    return found


def _contradict(newest: Guess, other: object) -> bool:
    """Return whether values of another schema would be other times or decimals in a column."""
    of = column_of(other)
    if newest.notation == Notation() or newest == of:
        return False
    if "<" in newest.type and "<" in of.type:
        scales, others = _scales(newest.type), _scales(of.type)
        has_other = any(others.get(name, scale) != scale for name, scale in scales.items())
        return has_other or of.notation not in (newest.notation, Notation())
    return of.notation != newest.notation or _scales(newest.type) != _scales(of.type)


def _scales(kind: str) -> dict[str, str]:
    """Return the digits after the point of decimals, by the names of their fields."""
    return dict(re.findall(r"(\w*):?decimal\(\d+,(\d+)\)", kind))


def _fields_in(schema: Any) -> dict[str, Any]:
    """Return the fields of a schema of Kafka Connect by name; none of anything else."""
    parts = schema.get("fields") if isinstance(schema, Mapping) else None
    given = [part for part in parts if isinstance(part, Mapping)] if isinstance(parts, list) else []
    return {name: part for part in given if isinstance(name := part.get("field"), str)}


def _add_connect(sketch: Sketch, objects: Sequence[Object], stamps: Sequence[int]) -> None:
    """Add the fields of Kafka Connect's payloads, by the schema beside them if there is one."""
    payloads = [one["payload"] for one in objects if one["payload"] is not None]
    for name, of in _schema_of(objects).items():
        sketch.add(of, name, ("payload", name))
    if not sketch.columns and all(isinstance(one, Mapping) for one in payloads):
        sketch.add_fields(payloads, stamps, ("payload",))
    if not sketch.columns:
        sketch.add(guess(payloads, "", stamps) or STRING, "payload")


def _add_cloud_event(sketch: Sketch, objects: Sequence[Object], stamps: Sequence[int]) -> None:
    data = [one["data"] for one in objects if one.get("data") is not None]
    fields = {name for one in data if isinstance(one, Mapping) for name in one}
    is_flat = (
        all(isinstance(one, Mapping) for one in data)
        and 0 < len(fields) <= 100
        and all(map(is_usable, fields))
    )
    without = [{k: v for k, v in one.items() if k != "data" or not is_flat} for one in objects]
    sketch.add_fields(without, stamps)
    if is_flat:
        sketch.add_fields(data, stamps, ("data",))
    names = {column.field: column.name for column in sketch.columns}
    sketch.keys.append([names[("source",)], names[("id",)]])
    sketch.time = names.get(("time",), "")


def add_metadata(
    sketch: Sketch, records: pa.RecordBatch, value_of: Callable[[bytes | None], Any]
) -> None:
    """Select the attributes of CloudEvents in headers (binary mode), and the records' keys if their
    values lack them. `value_of` reads a value."""
    columns = Sketch(columns=list(sketch.columns))
    headers, sent_names = headers_found(records)
    found = list[object]()
    if has_events(records):
        names = {of: columns.add(STRING, of) for of in sent_names if of.startswith("ce_")}
        for header, name in names.items():
            texts = [of[header].decode(errors="replace") for of in headers if header in of]
            if header == "ce_time" and _is_time(guess(texts)):
                found.append({name: {"sql": _HEADER_TIME, "type": "TIMESTAMP"}})
                sketch.time = name
            else:
                found.append({name: {"header": header}})
        sketch.keys.insert(0, [names["ce_source"], names["ce_id"]])
    sent = records.column("key").to_pylist()
    given = [key for key in sent if key]
    if given and not has_keys(sent, map(value_of, records.column("value").to_pylist())):
        if are_texts(given):
            found.append({columns.add(STRING, _KEY): {"kafka": "key", "type": "STRING"}})
        else:
            sketch.comments.append(
                "Keys are bytes in no column; `select` reads them: {record_key: {kafka: key}}"
            )
    if found:
        sketch.select = [*(column.name for column in sketch.columns), *found]
    if others := [name for name in sent_names if not name.startswith("ce_")]:
        sketch.comments.append(
            f"Headers are in no column; `select` reads them: {', '.join(others[:10])}"
        )


def has_events(records: pa.RecordBatch) -> bool:
    """Return whether all headers have what makes a record a CloudEvent, in binary mode."""
    headers, _ = headers_found(records)
    return bool(headers) and all({"ce_id", "ce_source"} <= of.keys() for of in headers)


def headers_found(records: pa.RecordBatch) -> tuple[list[dict[str, bytes]], list[str]]:
    """Return the headers of each record, and the names in any."""
    headers = [dict(_pairs(of)) for of in headers_of(records.column("headers")).to_pylist()]
    return headers, sorted({name for of in headers for name in of})


def _is_time(of: Guess | None) -> bool:
    return of is not None and (of.type, of.notation) == ("timestamp", Notation())


def _pairs(headers: Sequence[Mapping[str, Any]] | None) -> Iterator[tuple[str, bytes]]:
    for header in headers or ():
        if header["value"] is not None:
            yield header["key"], header["value"]


def are_texts(keys: Iterable[bytes]) -> bool:
    """Return whether keys are text. Numbers in four bytes may be, with control characters."""
    return all(values.is_utf8(key) and key.decode().isprintable() for key in keys)


def has_keys(keys: Sequence[bytes | None], found: Iterable[Any]) -> bool:
    """Return whether most values contain what is in their records' keys."""
    pairs = [(k, v) for k, v in zip(keys, found, strict=True) if k and v is not None]
    found_in = sum(_parts(_payload(_of_key(k))) <= _parts(v) for k, v in pairs)
    return 2 * found_in > len(pairs) or not pairs


def _of_key(key: bytes) -> Any:
    found = read(key)
    return key.decode(errors="replace") if found is None else found


def _parts(value: Any, levels: int = 4) -> set[str]:
    """Return the texts and numbers in a value, as text, of its first levels."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return {part for one in value if levels for part in _parts(one, levels - 1)}
    return set() if value is None else {str(value)}


def _firsts(records: pa.RecordBatch) -> list[str]:
    """Return the first value of each partition, if it is text."""
    places = zip(
        *(records.column(name).to_pylist() for name in ("partition", "offset", "value")),
        strict=True,
    )
    first = {p: value for p, _, value in sorted(places, key=lambda place: place[1], reverse=True)}
    return [
        value.decode("utf-8-sig") for value in first.values() if value and values.is_utf8(value)
    ]


def _of_csv(lines: Sequence[str], stamps: Sequence[int], firsts: Sequence[str]) -> Sketch | None:
    """Return the sketch of lines of CSV; None if they are not."""
    best = ("", 1)
    for delimiter in _DELIMITERS:
        fields = [csv.split(line, delimiter) or [] for line in lines]
        widths = [len(row) for row in fields]
        width = max(set(widths), key=widths.count)
        # A comma and a blank are prose.
        prose = 2 * sum(any((f or "").startswith(" ") for f in row) for row in fields) > len(lines)
        if widths.count(width) * 10 >= 9 * len(widths) and width > best[1] and not prose:
            best = delimiter, width
    delimiter, width = best
    if width < 2:
        return None
    rows = [r for line in lines if len(r := csv.split(line, delimiter) or []) == width]
    heads = [csv.split(line, delimiter) or [] for line in firsts]
    header = next((row for row in heads if len(row) == width and _names(row, rows)), None)
    rows = [row for row in rows if row != header]
    more: dict[str, Any] = {} if delimiter == "," else {"delimiter": delimiter}
    sketch = Sketch()
    if header is not None:
        more["header"] = [name or "" for name in header]
        sketch.comments.append("A record that repeats the header is a dead letter, header_line")
    else:
        sketch.comments.append("The fields have no names: name the columns")
    sketch.format = {"type": "csv", **more} if more else "csv"
    found = list[tuple[Guess, str, int]]()
    for place in range(width):
        name = header[place] if header is not None else f"c{place + 1}"
        of = guess_text([row[place] for row in rows], name or "", stamps)
        if name:
            found.append((of or Guess("string", note="empty in each record"), name, place))
    has_commas = any(of.notation.decimal == "," for of, _, _ in found)
    for of, name, place in found:
        texts = [text for row in rows if (text := row[place]) is not None]
        if has_commas and of.type != "string" and group_digits(texts, "."):
            of = Guess("string", note="the point may group digits, beside decimal commas")
        sketch.add(of, name, (name,))
    return sketch


def _names(row: Sequence[str | None], rows: Sequence[Sequence[str | None]]) -> bool:
    """Return whether a line is a header: names that no other line has, above values of which some
    are no text, or not like names. Fields without a name, as after a last delimiter, are empty."""
    names = [name for name in row if name]
    if len(set(names)) < len(names) or not all(
        is_usable(name) and len(name) <= 100 and guess_text([name]) == STRING for name in names
    ):
        return False
    others = [other for other in rows if other != row]
    for i, name in enumerate(row):
        found = {other[i] for other in others}
        if name in found if name else found - {None}:
            return False
    kinds = [guess_text([other[i] for other in others]) for i in range(len(row))]
    if any(kind is not None and kind != STRING for kind in kinds):
        return True
    return bool(others) and all(name.isidentifier() and name == name.lower() for name in names)


def _of_text(lines: Sequence[str], records: pa.RecordBatch) -> Sketch:
    kinds = Counter(map(_documents, lines))
    for kind, name in _DOCUMENTS.items():
        if 2 * kinds[kind] > len(lines):
            comment = f"Values are {name}, which queries take apart"
            return raw("string", records, [comment])
    form = form_of(lines)
    sketch = raw("string", records, [f"Lines of {form.name}"] if form else [])
    if form is not None:
        kept = [name for name in ("key",) if len(sketch.columns) > 1]
        parts = [{n: {"sql": sql, "type": kind}} for n, (sql, kind) in form.parts.items()]
        events = [one for one in sketch.select if isinstance(one, Mapping)]
        sketch.select = [{"line": "value"}, *parts, *kept, *events]
        sketch.time = form.time
    return sketch


def _documents(line: str) -> type | None:
    """Return the type of a text's JSON, of each line if it has several; None if it is no JSON."""
    whole = read(line.encode())
    of = [whole] if whole is not None else [read(part.encode()) for part in line.splitlines()]
    kinds = set(map(type, of))
    return kinds.pop() if len(kinds) == 1 else None


def raw(kind: str, records: pa.RecordBatch, comments: list[str]) -> Sketch:
    sketch = Sketch("raw", comments=comments)
    sketch.add(Guess(kind), "value")
    keys = [key for key in records.column("key").to_pylist() if key is not None]
    if keys:
        sketch.add(STRING if all(map(values.is_utf8, keys)) else Guess("binary"), "key")
    add_metadata(sketch, records, lambda _: None)
    return sketch


_PLAIN = {
    "boolean": "boolean",
    "int8": "int",
    "int16": "int",
    "int32": "int",
    "int64": "bigint",
    "float": "float",
    "double": "double",
    "string": "string",
    "bytes": "binary",
}
_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_ZONED = "io.debezium.time.ZonedTimestamp"


def time_of(name: object) -> Guess | None:
    """Return the column of a time by its semantic type; None for any other type."""
    if name == _ZONED:
        return Guess("timestamp")
    if (unit := CONNECT_TIMES.get(str(name))) is None:
        return None
    return Guess("date" if unit == "days" else "timestamp", Notation(unit=unit))


def column_of(schema: Any) -> Guess:
    """Return the column of values of a schema; STRING for what no column reads. Pure."""
    if not isinstance(schema, Mapping):
        return STRING
    if (time := time_of(schema.get("name"))) is not None:
        return time
    kind = str(schema.get("type"))
    if schema.get("name") == _DECIMAL:
        return _decimal(schema.get("parameters"))
    if kind == "array":
        item = column_of(schema.get("items"))
        return Guess(f"array<{item.type}>", item.notation)
    keys = schema.get("keys")
    if kind == "map" and isinstance(keys, Mapping) and keys.get("type") == "string":
        item = column_of(schema.get("values"))
        return Guess(f"map<string,{item.type}>", item.notation)
    if kind == "struct":
        parts = {name: column_of(part) for name, part in _fields_in(schema).items()}
        notation = common_notation(parts.values())
        if parts and notation is not None and are_names(parts):
            return Guess(f"struct<{','.join(f'{n}:{p.type}' for n, p in parts.items())}>", notation)
    return Guess(_PLAIN[kind]) if kind in _PLAIN else STRING


def _decimal(parameters: Any) -> Guess:
    given = parameters if isinstance(parameters, Mapping) else {}
    scale, precision = (
        int(text) if re.fullmatch("[0-9]{1,2}", text := str(given.get(key, ""))) else -1
        for key in ("scale", "connect.decimal.precision")
    )
    digits = min(precision if precision > 0 else MOST_DIGITS, MOST_DIGITS)
    # By another scale than the source's, which may be negative, each value would be another.
    if not 0 <= scale <= digits:
        return STRING
    return Guess(f"decimal({digits},{scale})", Notation(decimal="base64"))


@dataclass(frozen=True)
class Form:
    """A form of lines: their expression, the SQL and type of each part, and the event's time."""

    name: str
    line: re.Pattern[str]
    parts: dict[str, tuple[str, str]]
    time: str = ""


def _part(pattern: str, kind: str = "STRING") -> tuple[str, str]:
    text = f"nullif(regexp_extract(value, '{pattern}', 1), '')"
    if kind != "STRING":
        text = f"TRY_CAST({text} AS {'TIMESTAMPTZ' if kind == 'TIMESTAMP' else kind})"
    return text, kind


_STAMP = r"\[\d\d/[A-Z][a-z]{2}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4}\]"
# Before the client may be the name and port of a virtual host.
_HOST = r"^(?:[^\s:]+:\d+ )?"
# Clients choose the quoted texts, which contain quotes with a backslash.
_QUOTED = r'"(?:[^"\\]|\\.)*"'
_REQUEST = rf"\] {_QUOTED} "
_SENT = rf"{_REQUEST}\d{{3}} \S+ "
_TIME = (
    r"^\W{0,2}(\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z| ?[+-]\d\d(?::?\d\d)?\b)?)"
    r"[\])]?"
)
# What makes it another time than one of UTC.
_ZONE = (
    r" \(?(?:(?:[A-Z]|A[CEKW]|[CEMW]E|NZ|SA)[SD]T|[CEMW]ET|[CEW]AT|HKT|SGT|PKT|BRT|ART|CLT|ICT|"
    r"MS[DK]|WIB|WITA?|[AaPp][Mm])\b"
)
FORMS = (
    Form(
        "an access log",
        re.compile(rf'{_HOST}\S+ \S+ \S.*? {_STAMP} "'),
        {
            "client": _part(rf"{_HOST}(\S+) \S+ \S.*? {_STAMP} "),
            "user_name": _part(rf"{_HOST}\S+ \S+ (\S.*?) {_STAMP} "),
            "ts": (
                rf"try_strptime(regexp_extract(value, '{_STAMP}'), '[%d/%b/%Y:%H:%M:%S %z]')",
                "TIMESTAMP",
            ),
            "method": _part(r'\] "([A-Z]+) '),
            "path": _part(r'\] "[A-Z]+ (\S+)'),
            "status": _part(rf"{_REQUEST}(\d{{3}}) ", "INT"),
            "bytes": _part(rf"{_REQUEST}\d{{3}} (\d+)", "BIGINT"),
            "referer": _part(rf'{_SENT}"((?:[^"\\]|\\.)*)"'),
            "agent": _part(rf'{_SENT}{_QUOTED} "((?:[^"\\]|\\.)*)"'),
        },
        "ts",
    ),
    Form(
        "syslog (RFC 5424)",
        re.compile(r"<\d{1,3}>\d \S+ \S+ \S+ \S+ \S+ "),
        {
            "priority": _part(r"^<(\d+)>", "INT"),
            "ts": _part(r"^<\d+>\d+ (\S+)", "TIMESTAMP"),
            "host": _part(r"^<\d+>\d+ \S+ (\S+)"),
            "app": _part(r"^<\d+>\d+ \S+ \S+ (\S+)"),
        },
        "ts",
    ),
    Form(
        "syslog (RFC 3164), whose times have no year",
        re.compile(r"(?:<\d{1,3}>)?[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ "),
        {
            "priority": _part(r"^<(\d+)>", "INT"),
            "time_text": _part(r"^(?:<\d+>)?(\w{3} [ \d]\d \S+) "),
            "host": _part(r"^(?:<\d+>)?\w{3} [ \d]\d \S+ (\S+)"),
            "program": _part(r"^(?:<\d+>)?\w{3} [ \d]\d \S+ \S+ ([^:\[ ]+)"),
        },
    ),
    Form(
        "a log that begin with a time, UTC without a zone",
        re.compile(rf"{_TIME}(?!{_ZONE}) .*[A-Za-z]"),
        {
            "ts": (
                rf"CASE WHEN NOT regexp_matches(value, '^[-/:.,T\d\[( ]*[\])]?{_ZONE}') THEN "
                f"TRY_CAST(regexp_replace(translate(regexp_extract(value, '{_TIME}', 1), ',/', "
                r"'.-'), ' ([+-])', '\1') AS TIMESTAMPTZ) END",
                "TIMESTAMP",
            )
        },
        "ts",
    ),
)


def form_of(lines: Sequence[str]) -> Form | None:
    """Return the form of most lines; None if they have none of these."""
    for form in FORMS:
        if _are(form.line, lines):
            return form
    return None


def _are(pattern: re.Pattern[str], lines: Sequence[str]) -> bool:
    return 2 * sum(pattern.match(line) is not None for line in lines) >= len(lines)
