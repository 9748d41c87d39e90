"""Drafts of streams' files: what topics have is found at the first try, and no record becomes a dead
letter that another draft would make a row."""

import gzip
import json
import re
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pyarrow as pa
import pytest
import yaml
from answering_registry import answering_registry
from budget import budget
from hypothesis import example, given, settings
from hypothesis import strategies as st
from protos import HEAD, indexed, type_of
from strange_topics import TOPICS, without_maps
from wire import varint, wired

from anabranch.config import load_environment
from anabranch.config.loading import parse_stream
from anabranch.kafka.schema_registry import open_registry
from anabranch.operations.check import batch_of, decode_sample
from anabranch.operations.draft import Draft, finished, forms, names_of
from anabranch.operations.draft.subjects import sketch_of_registry, with_columns

NOW = datetime(2026, 11, 28, 10, 30, tzinfo=UTC)
AT = int(NOW.timestamp() * 1000)
TEN = datetime(2026, 11, 28, 10, tzinfo=UTC)
CONF = Path(__file__).parents[3] / "conf"
Recorded = Callable[[Any], None]


def as_read(offset: int, value: object, key: object = None, headers: Any = ()) -> Any:
    """A record as kafka-python has it."""
    place = {"partition": 0, "offset": offset, "timestamp": AT}
    return SimpleNamespace(**place, key=key, headers=headers or (), value=value)


def drafted(
    values: Sequence[object], topic: str = "shop.orders", **more: Any
) -> tuple[Draft, list[dict[str, Any]]]:
    """Return the draft of a topic with these values, and the rows that it makes of them."""
    keys, headers = (more.get(name) or [None] * len(values) for name in ("keys", "headers"))
    sent = [json.dumps(v) if not isinstance(v, bytes | str | None) else v for v in values]
    records = [
        as_read(i, v.encode() if isinstance(v, str) else v, keys[i], headers[i])
        for i, v in enumerate(sent)
    ]
    batch, environment = batch_of(records, NOW), load_environment(CONF)
    [(name, table)] = names_of([topic]).values()
    draft = finished(environment, CONF, forms.sketch_of(batch), batch, name, topic, table)
    stream = parse_stream(name, CONF, draft.file)
    decoded = decode_sample(environment, stream, batch)
    return draft, decoded.good.select([column.name for column in stream.columns]).to_pylist()


def file_of(values: Sequence[object], **more: Any) -> dict[str, Any]:
    draft, _ = drafted(values, **more)
    assert (draft.check.dead, draft.check.objections) == (0, []), draft.file
    file: dict[str, Any] = yaml.safe_load(draft.file)
    return file


def connect(*fields: object, **payload: object) -> dict[str, Any]:
    """A value with Kafka Connect's schema beside it."""
    return {"schema": {"type": "struct", "fields": list(fields)}, "payload": payload}


DECIMAL = "org.apache.kafka.connect.data.Decimal"


def decimal(field: str, scale: str | None, **parameters: str) -> dict[str, Any]:
    given = {"parameters": {"scale": scale, **parameters}} if scale else {}
    return {"type": "bytes", "field": field, "name": DECIMAL, **given}


MARK = b"\xef\xbb\xbf"


VALUES: dict[str, object] = {
    "numbers lose no digit": '{"a":12345678901234567.89,"b":1e400}',
    "a byte order mark is no part of a value": MARK + b'{"id": 5}',
    "a schema": connect(
        {"type": "int32", "field": "id"}, {"type": "array", "items": {"type": "string"}, "field": "tags"},
        {"type": "int32", "field": "day", "name": "org.apache.kafka.connect.data.Date"},
        id=1, tags=["a"], day=20785,
    ),
    "decimals may be numbers": connect(decimal("n", "2"), n=12.5),
    **{
        f"decimals of scale {scale}, which no column has, are text": connect(decimal("n", scale), n="BQ==")
        for scale in ("-2", "127", None)
    },
    "without a schema": {"schema": None, "payload": {"id": 5, "n": [5]}},
    "a schema of a text": {"schema": {"type": "string"}, "payload": "x"},
}  # fmt: skip


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_columns_of_values(value: object, recorded: Recorded) -> None:
    recorded(file_of([value, value])["schema"])
    recorded(repr(drafted([value, value])[1]))


def test_a_byte_order_mark_is_no_part_of_a_header() -> None:
    draft, rows = drafted([MARK + b"Id;on", b"1;28.11.2026", b"2;28.11.2026"])
    assert [reason.code for reason in draft.check.reasons] == ["header_line"]
    assert rows[0] == {"Id": 1, "on": date(2026, 11, 28)}


@pytest.mark.parametrize(
    ("value", "comment"),
    [
        (b'{"a": 1}\n{"a": 2}\n', "several objects of JSON, which queries take apart"),
        (b'[\n{"a": 1}]', "lists of JSON, which queries take apart"),
        (b'"{\\"a\\": 1}"', "JSON in a text of JSON, which queries take apart"),
        (gzip.compress(b'{"a": 1}', mtime=0), "compressed by gzip, which no format reads"),
    ],
)
def test_values_that_queries_or_producers_must_change_are_named(value: bytes, comment: str) -> None:
    draft, rows = drafted([value, value])
    assert comment in draft.file
    assert [row["value"] for row in rows] in ([value] * 2, [value.decode(errors="replace")] * 2)


def test_states_by_key_are_no_duplicates_and_keep_their_key() -> None:
    values = [{"id": i, "plan": "pro"} for i in range(8)]
    keys = [b"%d" % i for i in range(8)]
    # The value has its key.
    assert drafted(values, keys=keys)[0].file.count("record_key") == 0
    draft, rows = drafted([*values, None, None], keys=[*keys, b"1", b"2"])
    assert yaml.safe_load(draft.file)["key"] == "none"
    # Tombstones have no row; an hour of such records is accepted.
    assert draft.check.objections == [] and [r.code for r in draft.check.reasons] == ["null_value"]
    draft, rows = drafted([*[{"plan": "pro"}] * 8, None], keys=[*keys, b"1"])
    assert rows == [{"plan": "pro", "record_key": key.decode()} for key in keys]
    deep = '{"a":' + "[" * 400 + "]" * 400 + "}"
    assert "record_key" in drafted([deep, {"a": []}], keys=[b"1", b"2"])[0].file
    # Bytes are no text.
    for key in (b"\0\xff", b"\0\0\0\5"):
        assert "{record_key: {kafka: key}}" in drafted([{"a": 1}], keys=[key])[0].file


@pytest.mark.parametrize(
    ("value", "keys"),
    [
        # Rows without Debezium's envelope.
        ({"__deleted": "false", "__op": "u"}, None),
        ({"__source_lsn": 5}, None),
        # Of Canal.
        ({"data": [{"id": "5"}], "isDdl": False, "pkNames": ["id"], "type": "UPDATE"}, None),
        # Kafka Connect's keys are the key of a table's row.
        ({}, [b'{"id": 0}', b'{"schema": {}, "payload": {"id": 1}}']),
    ],
)
def test_rows_of_a_table_change(value: dict[str, object], keys: list[bytes] | None) -> None:
    more = {"keys": keys} if keys else {}
    assert file_of([{"id": i, **value} for i in range(2)], **more)["key"] == "none"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "cp1252"])
def test_text_that_is_not_utf8_is_named(encoding: str) -> None:
    draft, _ = drafted([f'{{"id": "ü{i}"}}'.encode(encoding) for i in range(2)])
    name = "in UTF-16" if "16" in encoding else "that is not UTF-8"
    assert f"# text {name}, which no format reads" in draft.file


def test_the_topic_of_the_tutorial(recorded: Recorded) -> None:
    values = [
        {"id": f"o-{i}", "placed_at": "2026-11-28T10:00:00Z", "total": 12.5, "items": [{"sku": "a", "n": i}]}
        for i in range(3)
    ]  # fmt: skip
    draft, rows = drafted(values)
    recorded(yaml.safe_load(draft.file))
    recorded(rows[2])
    assert draft.file.startswith("# conf/streams/shop_orders.yaml\n# A draft from 3 records ")
    assert "# Later fields of a STRUCT are counted; STRING has the whole value" in draft.file


SECONDS = 1795860000


@pytest.mark.parametrize(
    ("name", "found", "column", "value"),
    [
        ("ts", [SECONDS, None], {"type": "TIMESTAMP", "unit": "seconds"}, TEN),
        ("other", [SECONDS], {"type": "TIMESTAMP", "unit": "seconds"}, TEN),
        ("other", [SECONDS - 10**8], "BIGINT", SECONDS - 10**8),
        ("orderId", [SECONDS * 1000], "BIGINT", SECONDS * 1000),
        ("id", [str(SECONDS)], "STRING", str(SECONDS)),
        ("response_time", [SECONDS - 10**8], "BIGINT", SECONDS - 10**8),
        ("downtime", [10**8], "BIGINT", 10**8),
        ("started", [1795860000.5], {"type": "TIMESTAMP", "unit": "seconds"}, TEN.replace(microsecond=500_000)),
        ("ts", [SECONDS * 1000, 0], {"type": "TIMESTAMP", "unit": "millis"}, TEN),
        ("createdAt", [str(SECONDS * 10**6)], {"type": "TIMESTAMP", "unit": "micros"}, TEN),
        ("timeUnixNano", [str(SECONDS * 10**9)], {"type": "TIMESTAMP", "unit": "nanos"}, TEN),
        ("ts", [SECONDS, SECONDS * 1000], "BIGINT", SECONDS),
        ("ts", [SECONDS, "soon"], "STRING", str(SECONDS)),
        ("t", ["2026-11-28T10:00:00", "2026-11-28 10:00:00+01"], "TIMESTAMP", TEN),
        ("t", ["28/Nov/2026:11:00:00 +0100"], {"type": "TIMESTAMP", "format": "%d/%b/%Y:%H:%M:%S %z"}, TEN),
        ("t", ["2026/11/28 10:00:00.00"], {"type": "TIMESTAMP", "format": "%Y/%m/%d %H:%M:%S.%f"}, TEN),
        ("t", ["28.11.2026 10:00"], {"type": "TIMESTAMP", "format": "%d.%m.%Y %H:%M"}, TEN),
        ("t", ["Sat, 28 Nov 2026 10:00:00 GMT"], {"type": "TIMESTAMP", "format": "%a, %d %b %Y %H:%M:%S GMT"}, TEN),
        ("t", ["11/28/2026 10:00 AM"], {"type": "TIMESTAMP", "format": "%m/%d/%Y %I:%M %p"}, TEN),
        ("t", ["Sat Nov 28 10:00:00 2026"], {"type": "TIMESTAMP", "format": "%a %b %d %H:%M:%S %Y"}, TEN),
        ("t", ["2026-11-28T10:00Z"], {"type": "TIMESTAMP", "format": "%Y-%m-%dT%H:%M%z"}, TEN),
        ("t", ["01/02/2026"], "STRING", "01/02/2026"),
        ("t", ["11/11/2026 10:00"], "STRING", "11/11/2026 10:00"),
        # As Spark's log has it.
        ("t", ["26/11/28 10:00:00"], "STRING", "26/11/28 10:00:00"),
        ("t", ["2026-11-28", ""], "STRING", "2026-11-28"),
        ("d", ["2026-11-28"], "DATE", TEN.date()),
        ("d", ["28.11.2026"], {"type": "DATE", "format": "%d.%m.%Y"}, TEN.date()),
        ("id", [2**64], "DECIMAL(38,0)", Decimal(2**64)),
        ("n", [1, 2.5], "DOUBLE", 1.0),
        ("n", [1, "2"], "STRING", "1"),
        ("total", ["12,50", "7"], {"type": "DECIMAL(18,2)", "decimal": ","}, Decimal("12.50")),
        # Versions.
        ("os", ["17.4.1"], "STRING", "17.4.1"),
        ("build", ["10.11.12"], "STRING", "10.11.12"),
        ("release", ["2026.11.2", "2026.10.1"], "STRING", "2026.11.2"),
        ("d", ["28.11.26", "01.02.26"], {"type": "DATE", "format": "%d.%m.%y"}, TEN.date()),
        ("order_date", ["28.11.26"], {"type": "DATE", "format": "%d.%m.%y"}, TEN.date()),
        ("d", ["28.11.26 10:00"], {"type": "TIMESTAMP", "format": "%d.%m.%y %H:%M"}, TEN),
        # The comma may group digits.
        ("total", ["1,234", "7", "-12,345"], "STRING", "1,234"),
        ("total", ["1,234", "0,500"], {"type": "DECIMAL(18,3)", "decimal": ","}, Decimal("1.234")),
        ("total", ["1,234", "1234,567"], {"type": "DECIMAL(18,3)", "decimal": ","}, Decimal("1.234")),
        ("total", ["12.50", "7.00"], "DECIMAL(18,2)", Decimal("12.50")),
        ("version", ["1.0", "2.0"], "STRING", "1.0"),
        ("user_pseudo_id", ["12345.1795860000"], "STRING", "12345.1795860000"),
        ("client_id", ["12,50"], "STRING", "12,50"),
        ("zip", ["01234", "99999"], "STRING", "01234"),
        ("flag", [True, None, False], "BOOLEAN", True),
        ("nothing", [None], "STRING", None),
        ("codes", [{"2xx": 5}, {"3xx": 6}], "MAP<STRING,BIGINT>", [("2xx", 5)]),
        ("podLabels", [{"day": "2026-11-28"}], "MAP<STRING,STRING>", [("day", "2026-11-28")]),
        ("tags", [[{"Key": "a", "Value": "b"}]], "ARRAY<STRUCT<Key:STRING,Value:STRING>>", [{"Key": "a", "Value": "b"}]),
        ("labels", [{"a": "x", "n": 1}], "STRUCT<a:STRING,n:BIGINT>", {"a": "x", "n": 1}),
        ("mixed", [{"a": 1}, [1], "x"], "STRING", '{"a": 1}'),
        ("deep", [[[1, 2], []], []], "ARRAY<ARRAY<BIGINT>>", [[1, 2], []]),
        ("o", [{"not": 1, "end": {"b": "x"}}], "STRUCT<`not`:BIGINT,end:STRUCT<b:STRING>>", {"not": 1, "end": {"b": "x"}}),
        ("o", [{"ts": SECONDS, "at": "2026-11-28T10:00:00Z"}], "STRUCT<ts:BIGINT,at:TIMESTAMP>", {"ts": SECONDS, "at": TEN}),
        ("logs", [[{"timeUnixNano": str(SECONDS * 10**9), "n": "5"}]],
         {"type": "ARRAY<STRUCT<timeUnixNano:TIMESTAMP,n:STRING>>", "unit": "nanos"}, [{"timeUnixNano": TEN, "n": "5"}]),
    ],
)  # fmt: skip
def test_a_column(name: str, found: list[object], column: object, value: object) -> None:
    values = [{name: one} for one in found]
    assert file_of(values)["schema"][name] == column
    assert drafted(values)[1][0][name] == value


def test_digits_that_are_cut_are_named() -> None:
    at, note = "2026-11-28T10:00:00.123456", "digits below a microsecond are cut"
    assert note in drafted([{"at": f"{at}Z"}, {"at": f"{at}789Z"}])[0].file
    assert note not in drafted([{"at": f"{at}Z"}, {"at": f"{at}000+01:00"}])[0].file


def test_fields_that_few_records_have_are_not_all_fields() -> None:
    kinds = [{"id": i, "o": {"n": i}} for i in range(200)]
    assert "unknown" not in file_of(kinds)
    assert "unknown" not in file_of([*kinds, *[{"id": 5, "refund": 5}] * 5])
    rare = ({"refund": 5}, {"o": {"refund": 5}}, {"l": [{"n": 1}] * 199 + [{"m": 1}]})
    for one in rare:
        draft, _ = drafted([*kinds, {"id": 200, **one}])
        assert yaml.safe_load(draft.file)["unknown"] == "rescue"
        assert "Later fields of a STRUCT" not in draft.file


def test_names_that_are_no_columns(recorded: Recorded) -> None:
    names = [
        "@timestamp", "event.action", "ID", "id", "kafka_offset", "_deleted", "9", "ключ", "on", "${A}", '"',
        "a\nb",
    ]  # fmt: skip
    values = [dict.fromkeys(names, "x")]
    recorded(file_of(values))
    [row] = drafted(values)[1]
    rescued = json.loads(row.pop("rescued"))
    assert set(row.values()) == {"x"} and rescued.keys() == {"${A}", '"', "a\nb"}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ([{"id": "a"}, {"id": "b"}], "id"),
        # A record that was sent again is a duplicate.
        ([{"id": "a", "n": 1}, {"id": "a", "n": 1}], "id"),
        ([{"id": "a", "n": 1}, {"id": "a", "n": 2}], "none"),
        ([{"id": "a"}, {"id": ""}], "none"),
        ([{"id": "a"}, {"n": 1}], "none"),
        # The customer is not the event.
        ([{"order_id": 1}, {"order_id": 2}], "order_id"),
        ([{"invoice_no": n} for n in range(200)], "invoice_no"),
        ([{"seq": n} for n in range(200)], "none"),
        ([{"number": n} for n in range(200)], "none"),
        ([{"customer_id": n} for n in range(200)], "none"),
        ([{"name": f"n{n}", "value": n / 3} for n in range(200)], "none"),
        ([{"x": f"{n:08}-0000-4000-8000-000000000000"} for n in range(5)], "x"),
    ],
)  # fmt: skip
def test_a_key_is_of_the_event_and_repeats_no_other_content(values: list[object], key: str) -> None:
    assert file_of(values)["key"] == key


def test_event_time_is_the_events_own() -> None:
    at = "2026-11-28T10:00:00Z"
    both = {"expires_at": at, "updated_at": at, "occurred_at": at, "birth_date": at}
    assert file_of([both])["event_time"] == {"column": "occurred_at"}
    assert "event_time" not in file_of([{"expires_at": at}])
    assert "event_time" not in file_of([{"time": at}, {"n": 1}, {"n": 2}])


def test_a_value_that_differs_beyond_the_first_is_text() -> None:
    # A number of more digits than Python reads.
    draft, rows = drafted([*[{"n": 1}] * 3, '{"n": %s}' % ("9" * 5_000)])
    assert draft.check.dead == 0 and yaml.safe_load(draft.file)["schema"] == {"n": "STRING"}
    assert rows[3]["n"] == "9" * 5_000
    # Dead letters of any draft are counted.
    draft, _ = drafted([{"id": 1}, {"id": 2}, b"{", None])
    assert draft.check.dead == 2
    assert "# 1 would be dead letters: malformed_json: " in draft.file


def test_csv(recorded: Recorded) -> None:
    lines = ["1,2026-11-28,true,+40.9,a", '2,2026-11-29,false,1,"b, c"', "3,,,,"]
    recorded(file_of(lines))
    recorded(drafted(lines)[1])


def test_csv_with_a_header(recorded: Recorded) -> None:
    lines = [f"{i};28.11.2026 10:00:00;{i},50;x" for i in range(3)]
    draft, rows = drafted(["Id;placed at;total;city\n", *lines])
    recorded(yaml.safe_load(draft.file))
    assert [reason.code for reason in draft.check.reasons] == ["header_line"]
    assert rows[1] == {"Id": 1, "total": Decimal("1.50"), "city": "x", "placed_at": TEN}
    # A line of other text among values is none.
    assert "header" not in drafted([*lines, "Id;placed at;total;city"])[0].file
    # Hours with many headers are accepted.
    files = [["id;name", *(f"{10 * n + i};a" for i in range(9))] for n in range(3)]
    draft, rows = drafted([line for file in files for line in file])
    assert (draft.check.dead, len(rows), draft.check.objections) == (3, 27, [])
    assert "max_dead: 50 %} # null values and headers are dead letters" in draft.file
    # Delimiters at the end of lines.
    draft, rows = drafted(["id;name;;", "1;a;;", "2;c;;"])
    assert [reason.code for reason in draft.check.reasons] == ["header_line"]
    assert rows == [{"id": 1, "name": "a"}, {"id": 2, "name": "c"}]
    # A field that has values needs a name.
    assert "header" not in drafted(["id;name;;", "1;a;;", "2;c;;x"])[0].file


def test_points_beside_decimal_commas_group_digits() -> None:
    lines = ["Nr;Menge;Rate;Preis", "1;1.234;1.5;12,50", "2;12.345;1.25;7,00"]
    draft, _ = drafted([*lines, *(f"{n};7;0.125;1,00" for n in range(3, 30))])
    schema = yaml.safe_load(draft.file)["schema"]
    assert (schema["Menge"], schema["Rate"]) == ("STRING", "DOUBLE")
    assert file_of(["1.234,12.5", "2.345,1.5"])["schema"] == {"c1": "DOUBLE", "c2": "DOUBLE"}


def test_numbers_of_csv_that_may_be_codes_are_text() -> None:
    schema = file_of(["10001,200,2026", "10002,404,2026"])["schema"]
    assert schema == {"c1": "STRING", "c2": "BIGINT", "c3": "BIGINT"}
    # 1.1 and 1.10 are two.
    _, rows = drafted(["version,article_no,price", "1.1,5.20,1.5", "1.10,5.2,2"])
    assert rows == [
        {"version": "1.1", "article_no": "5.20", "price": 1.5},
        {"version": "1.10", "article_no": "5.2", "price": 2.0},
    ]


LINES = {
    "an access log": ['10.0.0.1 - bob [28/Nov/2026:11:00:00 +0100] "GET /a?b HTTP/1.1" 200 512 "-" "curl/8 (x, y)"'],
    "what a client sends may look like a status, and contain quotes; before it may be a host": [
        r'www.a.b:443 10.0.0.1 - b b [28/Nov/2026:10:00:00 +0000] "GET /\" 404 5 HTTP/1.1" 200 7 "-" "a \"b\" c"'
    ],
    "an access without a request": ['10.0.0.1:80 - - [28/Nov/2026:10:00:00 +0000] "" 400 -'],
    "an access that timed out": ['::1 - - [28/Nov/2026:10:00:00 +0000] "-" 408 -', "broken"],
    "syslog": ["<34>1 2026-11-28T10:00:00.000Z web-1 nginx 12 ID47 - it, works"],
    "earlier syslog": ["Nov  8 10:00:00 web-1 sshd[12]: Failed, again"],
    "a comma before milliseconds": ["2026-11-28 10:00:00,123 INFO a message", "2026-11-28 10:00:00,123 INFO b"],
    "an offset": ["2026-11-28 18:00:00.000 +08 [12] LOG: a"],
    "GMT and UTC": ["2026-11-28 10:00:00.000 GMT [12] LOG: a", "2026-11-28 10:00:00 UTC a"],
    # Of other zones a log may have few lines, and most at another time of the year.
    **{
        f"the zone {zone}": [f"2026-11-28 10:00:00 {zone} a", *["2026-11-28 10:00:00 a"] * 2]
        for zone in ("BST", "CEST", "MSK", "(CET)", "PM")
    },
    "brackets": ["[2026-11-28 10:00:00.5] POST /a", "2026-11-28 10:00:00 a"],
    "a list of JSON": ['[{"a": 1}, {"a": 2}]'],
    "words": ["just words, and more"],
}  # fmt: skip


@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
def test_lines_of_text(lines: list[object], recorded: Recorded) -> None:
    file = file_of(lines)
    assert (file["format"], file["schema"], file["key"]) == ("raw", {"value": "STRING"}, "none")
    [found, *_] = drafted(lines)[1]
    assert found.get("line", found.get("value")) == lines[0]
    recorded(found)


def test_bytes() -> None:
    draft, rows = drafted([b"\xff\x00", b"\x80"], keys=[b"k", None])
    assert yaml.safe_load(draft.file)["schema"] == {"value": "BINARY", "key": "STRING"}
    assert rows == [{"value": b"\xff\x00", "key": "k"}, {"value": b"\x80", "key": None}]
    assert "set registry.url" in drafted([b"\0\0\0\0\1abc"])[0].file
    # Avro whose first field is null, or a text of two characters, is no UTF-16.
    for value in (b"\0\4o0\0", b"\0\4o00\0", b"\4\0ab"):
        headers = [[("__value_schema_id", b"\0\0\0\1")]]
        file = drafted([value], headers=headers)[0].file
        assert "# the schema's id is in the header __value_schema_id" in file
        assert "UTF-16" not in drafted([value])[0].file
    # Protobuf may be UTF-8.
    draft, _ = drafted([b"\n\3o-1\x10\5"] * 5)
    assert "# no text: perhaps a format with a schema" in draft.file
    assert yaml.safe_load(draft.file)["schema"] == {"value": "BINARY"}
    for text in (b"8=FIX.4.4\x0135=D\x01", b"from C\0"):
        assert file_of([text])["schema"] == {"value": "STRING"}


def test_cloud_events(recorded: Recorded) -> None:
    events = [
        {
            "specversion": "1.0", "id": str(i), "source": "/s", "type": "t", "time": "2026-11-28T10:00:00Z",
            "data": {"n": i, "id": 7},
        }
        for i in range(3)
    ]  # fmt: skip
    recorded(file_of(events))
    # In binary mode the attributes are headers.
    headers = [("ce_id", b"1"), ("ce_source", b"/s"), ("ce_time", b"2026-11-28T11:00:00+01:00")]
    draft, rows = drafted([{"n": 1}], headers=[[*headers, ("trace", b"\xff")]])
    recorded([yaml.safe_load(draft.file), rows])
    assert "# Headers are in no column; `select` reads them: trace" in draft.file
    # Some events have more than others.
    headers = [headers, [*headers[:2], ("ce_x", b"y"), ("z", b"")]]
    draft, rows = drafted([{"n": 1}] * 2, headers=headers)
    assert [(row["ce_x"], row["ce_time"]) for row in rows] == [(None, TEN), ("y", None)]
    assert "`select` reads them: z" in draft.file


@pytest.mark.parametrize("value", [b"\0\4o0\0", b"words", b"2026-11-28 10:00:00 INFO words"])
def test_cloud_events_of_any_data_have_their_attributes(value: bytes) -> None:
    headers = [("ce_id", b"1"), ("ce_source", b"/s"), ("trace", b"5")]
    draft, [row] = drafted([value], headers=[headers], keys=[b"k"])
    assert yaml.safe_load(draft.file)["key"] == ["ce_source", "ce_id"]
    assert (row["ce_id"], row["ce_source"], row["key"]) == ("1", "/s", "k")
    assert "# Headers are in no column; `select` reads them: trace" in draft.file


def test_columns_beside_a_value_have_names_that_it_lacks() -> None:
    headers = [("ce_id", b"1"), ("ce_source", b"/s"), ("ce_time", b"now")]
    values, keys = [{"ce_id": n, "record_key": 0} for n in range(100)], [b"k%d" % n for n in range(100)]  # fmt: skip
    _, rows = drafted(values, headers=[headers] * 100, keys=keys)
    beside = {"ce_id_2": "1", "ce_source": "/s", "ce_time": "now", "record_key_2": "k0"}
    assert rows[0] == {"ce_id": 0, "record_key": 0, **beside}
    # A column of no value is no event's identity by its name.
    assert file_of([{"n": 0}] * 100, keys=keys)["key"] == "none"


def change(i: int, op: str, **source: object) -> dict[str, Any]:
    row = {"id": 5, "total": "AeJA", "made-at": 1795860000000001 + i}
    return {
        "before": row if op in "ud" else None, "after": None if op == "d" else row, "op": op,
        "source": {"ts_ms": 1795860000000, **source}, "ts_ms": 1795860000500,
    }  # fmt: skip


KEY = b'{"id":5}'


def test_debezium_without_schema(recorded: Recorded) -> None:
    values = [change(i, op, lsn=42 + i) for i, op in enumerate("cud")]
    draft, rows = drafted([*values, None], keys=[KEY] * 4)
    assert draft.check.dead == 0, draft.file
    recorded(yaml.safe_load(draft.file))
    assert [row["op"] for row in rows] == ["c", "u", "d", None]
    assert [row["source_lsn"] for row in rows] == [42, 43, 44, None]
    # After a truncation no row is named.
    gone = {"op": "t", "source": {"lsn": 45, "ts_ms": 1795860000000}, "ts_ms": 1795860000500}
    _, rows = drafted([*values, gone], keys=[*[KEY] * 3, None])
    assert rows[3] == dict.fromkeys(rows[0]) | {"op": "t", "source_lsn": 45, "source_ts": TEN}


def test_debezium_with_schema(recorded: Recorded) -> None:
    fields = [
        {"type": "int64", "field": "id"}, decimal("total", "2", **{"connect.decimal.precision": "12"}),
        {"type": "int64", "field": "made-at", "name": "io.debezium.time.MicroTimestamp"},
    ]  # fmt: skip
    row = {"type": "struct", "fields": fields, "optional": True}
    beside = connect(row | {"field": "before"}, row | {"field": "after"})
    values = [beside | {"payload": change(i, "c", file="b.1", pos=i, row=0)} for i in range(2)]
    recorded(file_of(values, keys=[b'{"schema":{},"payload":%s}' % KEY] * 2))
    assert drafted(values)[1][0]["total"] == Decimal("1234.56")


@pytest.mark.parametrize(
    ("source", "key"),
    [
        ({"scn": "5", "rs_id": "0x1", "ssn": 0}, ["id", "source_scn", "source_rs_id", "source_ssn"]),
        # Two changes of a row may be in one millisecond.
        ({"vgtid": "[]"}, "none"),
    ],
)  # fmt: skip
def test_the_key_of_changes_is_their_place_in_a_log(source: dict[str, object], key: object) -> None:
    assert file_of([change(1, "c", **source)], keys=[KEY])["key"] == key


def test_debezium_of_documents() -> None:
    document = json.dumps({"_id": {"$oid": "5f"}, "n": 1})
    values = [
        change(0, "c", ord=1) | {"after": document}, change(1, "d", ord=2) | {"before": None},
    ]  # fmt: skip
    key = b'{"id":"{\\"$oid\\": \\"5f\\"}"}'
    file = file_of(values, keys=[key, key])
    # `ord` counts within a second.
    assert file["key"] == ["_id", "id", "source_ord", "source_ts"]
    first, second = drafted(values, keys=[key, key])[1]
    assert (first["_id"], first["n"]) == ("5f", 1)
    assert second["id"] == '{"$oid": "5f"}'
    # Updates without the whole document have their part beside it.
    part = {"updatedFields": '{"n": 2}', "removedFields": None}
    update = change(1, "u", ord=3) | {"after": None, "before": None, "updateDescription": part}
    _, [*_, third] = drafted([*values, update], keys=[key] * 3)
    assert third["updateDescription"] == part and third["id"] == '{"$oid": "5f"}'


@pytest.mark.parametrize("name", TOPICS)
def test_a_topic_of_the_field(name: str) -> None:
    sent = list(TOPICS[name]())
    keys, headers = [one.key for one in sent], [one.headers for one in sent]
    draft, rows = drafted([one.value for one in sent], keys=keys, headers=headers)
    expected = [one.expected for one in sent if one.expected is not None]
    assert draft.check.objections == []
    assert len(rows) == len(expected), draft.file
    for row, want in zip(rows, expected, strict=True):
        assert without_maps({name: row[name] for name in want}) == want, draft.file


def test_the_page_takes_the_lists_of_otlp_apart() -> None:
    sent = list(TOPICS["otlp"]())
    _, rows = drafted([one.value for one in sent])
    placed = [row | {"kafka_partition": 0, "kafka_offset": i} for i, row in enumerate(rows)]
    logs = pa.Table.from_pylist(placed)
    page = (CONF.parent / "docs" / "reference" / "formats.md").read_text(encoding="utf-8")
    [view] = re.findall(r"```sql\n(CREATE VIEW.*?)```", page, re.DOTALL)
    with duckdb.connect() as lake:
        lake.register("sent", logs)
        lake.execute("CREATE SCHEMA otel; CREATE TABLE otel.logs AS FROM sent")
        lake.execute(view)
        sql = "SELECT kafka_offset, logged_at, severity FROM otel.log_records"
        found = lake.sql(sql).fetchall()
    first = datetime(2026, 11, 28, 10, tzinfo=UTC)
    each = [(i, first + timedelta(seconds=i), 9) for i in range(len(sent))]
    assert sorted(found) == sorted([*each, *each])


def test_fields_of_older_schemas_beside_the_values_are_columns_too() -> None:
    def sent(**fields: str) -> object:
        listed = [{"type": kind, "field": name} for name, kind in fields.items()]
        values = {name: 1 if kind.startswith("int") else "x" for name, kind in fields.items()}
        return connect(*listed, **values)

    values = [sent(id="int32", old="string", n="int32"), sent(id="int64", new="string", n="string")]
    schema = file_of(values)["schema"]
    assert {name: column["type"] for name, column in schema.items()} == {
        "id": "BIGINT", "new": "STRING", "n": "STRING", "old": "STRING",
    }  # fmt: skip
    assert [row["old"] for row in drafted(values)[1]] == ["x", None]

    # Those of objects are rescued.
    def within(name: str) -> object:
        o = {"type": "struct", "field": "o", "fields": [{"type": "int32", "field": name}]}
        return connect(o, o={name: 5})

    _, rows = drafted([within("old"), within("new")])
    assert [row["o"] for row in rows] == [{"new": None}, {"new": 5}]
    rescued = [json.loads(row["rescued"]) for row in rows]
    assert [one.get("payload") for one in rescued] == [{"o": {"old": 5}}, None]
    assert "rescue" not in drafted([within("new")])[0].file


@pytest.mark.parametrize(
    "field",
    [
        5, {"field": ["n"]}, {"type": ["int"], "field": "n"}, {"type": "array", "items": 5, "field": "n"},
        {"type": "map", "keys": "string", "field": "n"}, {"name": "org.apache.kafka.connect.data.Decimal", "parameters": 5, "field": "n"},
        {"type": "struct", "field": "n", "fields": [{"type": "int32", "field": name} for name in ("Id", "id")]},
        {"type": "struct", "field": "n", "fields": "x"},
    ],
)  # fmt: skip
def test_odd_schemas_beside_the_values_are_text(field: object) -> None:
    found = file_of([connect(field, n={"Id": 1, "id": 2})])["schema"]["n"]["type"]
    assert found in ("STRING", "MAP<STRING,BIGINT>")
    after = {"type": "struct", "field": "after", "fields": [field]}
    changed = connect(after, op="c", after={"n": "x"}, source={})
    assert "n" in file_of([changed])["schema"]


@pytest.mark.parametrize(
    ("one", "other", "column"),
    [
        (("bytes", DECIMAL, "2"), ("bytes", DECIMAL, "4"), "STRING"),
        (("int64", "io.debezium.time.Timestamp", ""), ("int64", "io.debezium.time.MicroTimestamp", ""), "STRING"),
        (("int32", "", ""), ("int64", "io.debezium.time.Timestamp", ""), "STRING"),
        (("int32", "", ""), ("int64", "", ""), "BIGINT"),
        (("bytes", DECIMAL, "2", "9"), ("bytes", DECIMAL, "2", "12"), "DECIMAL(12,2)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_turned", [False, True])
def test_times_and_decimals_that_schemas_write_otherwise_are_text(
    one: tuple[str, ...], other: tuple[str, ...], column: str, is_turned: bool
) -> None:
    def sent(kind: str, name: str, scale: str, digits: str = "") -> object:
        parameters = {"scale": scale, "connect.decimal.precision": digits}
        field = {"type": kind, "field": "n", "name": name, "parameters": parameters}
        return connect(field, n="AeJA" if scale else 1795860000000)

    kinds = [other, one] if is_turned and column == "STRING" else [one, other]
    assert file_of([sent(*kind) for kind in kinds])["schema"]["n"]["type"] == column


def of_subjects(
    folder: Path, schemas: dict[str, tuple[str, str]], values: list[bytes], topic: str, **more: Any
) -> tuple[Draft, list[dict[str, Any]]]:
    """Return the draft of a topic whose values have the schemas of these subjects, by their place,
    and its rows. `older`: former schemas of the last subject, with the next ids."""
    with answering_registry() as registry:
        older = [(subject, one) for subject in list(schemas)[-1:] for one in more.get("older", ())]
        for id, (subject, (kind, schema)) in enumerate([*older, *schemas.items()], 1):
            body = {"schema": schema, "schemaType": kind}
            version = {"subject": subject, "version": 1}
            for path, answer in (
                (f"schemas/ids/{id}", body),
                (f"schemas/ids/{id}/versions?deleted=true", [version, {**version, "subject": f"x.{id}"}]),
                (f"subjects/{subject}/versions/latest", {**body, **version}),
            ):  # fmt: skip
                registry.answers[f"/{path}"] = (200, json.dumps(answer))
        text = (CONF / "anabranch.yaml").read_text(encoding="utf-8")
        (folder / "anabranch.yaml").write_text(f"{text}\nregistry: {{url: '{registry.url}'}}\n")
        environment = load_environment(folder)
        beside = more.get("key"), more.get("headers")
        batch = batch_of([as_read(i, value, *beside) for i, value in enumerate(values)], NOW)
        sketch = sketch_of_registry(environment, topic, batch)
        assert sketch is not None
        draft = finished(environment, folder, sketch, batch, "a", topic, "a.b")
        stream = parse_stream("a", folder, draft.file)
        if stream.lacks_columns:
            stream = with_columns(stream, open_registry(environment, stream))
        decoded = decode_sample(environment, stream, batch)
        return draft, decoded.good.select([c.name for c in stream.columns]).to_pylist()


def record(name: str, **fields: object) -> tuple[str, str]:
    """A subject's kind and schema: a record of these fields."""
    return "AVRO", json.dumps(of_fields(name, **fields))


def of_fields(name: str, **fields: object) -> dict[str, Any]:
    listed = [{"name": field, "type": kind} for field, kind in fields.items()]
    return {"type": "record", "name": name, "fields": listed}


def test_records_of_several_subjects_are_rows_of_all_their_fields(
    tmp_path: Path, recorded: Recorded
) -> None:
    schemas = {
        "shop.Placed": record("Placed", id="string", total="int"),
        "shop.Shipped": record("Shipped", id="string", carrier="string"),
    }
    values = [wired(1, b"\2a\x0a"), wired(2, b"\2a\6DHL"), wired(1, b"\2b\x0c")]
    draft, rows = of_subjects(tmp_path, schemas, values, "shop.events")
    recorded([yaml.safe_load(draft.file), rows])
    assert "# With the fields of shop.Placed, shop.Shipped" in draft.file
    # Its schema has another subject too, which is of another topic.
    one = {"z.events-Placed": schemas["shop.Placed"]}
    assert len(of_subjects(tmp_path, one, values[:1], "z.events")[1]) == 1
    former = record("Shipped", id="string", carrier="string", weight="int")
    sent = [wired(1, b"\2a\6DHL\4"), wired(2, b"\2a\x0a")]
    _, rows = of_subjects(tmp_path, schemas, sent, "shop.events", older=[former])
    assert rows[0] == {"id": "a", "total": None, "carrier": "DHL", "weight": 2}
    # A column has one type.
    schemas["shop.Shipped"] = record("Shipped", id="string", total="string")
    draft, rows = of_subjects(tmp_path, schemas, values, "shop.events")
    assert rows == [{"id": "a", "total": 5}, {"id": "b", "total": 6}]
    assert yaml.safe_load(draft.file)["format"] == {"type": "avro", "subject": "shop.Placed"}
    assert "# Records of other subjects are dead letters: shop.Shipped" in draft.file
    # JSON of several subjects has the fields of the records.
    properties = {"id": {"type": "integer"}}
    schema = "JSON", json.dumps({"type": "object", "properties": properties})
    values = [wired(1, b'{"id": 5}'), wired(2, b'{"id": 6, "n": 1.5}')]
    of_json = {"shop.A": schema, "shop.B": schema}
    draft, rows = of_subjects(tmp_path, of_json, values, "shop.events")
    assert rows == [{"id": 5, "n": None}, {"id": 6, "n": 1.5}]
    assert (draft.check.dead, yaml.safe_load(draft.file)["key"]) == (0, "none")


def of_subject(
    folder: Path, kind: str, schema: str, values: list[bytes], dead: int = 0, **more: Any
) -> tuple[Draft, list[dict[str, Any]]]:
    """Return the draft of a topic whose values have schema id 1, and its rows."""
    schemas = {"shop.orders-value": (kind, schema)}
    draft, rows = of_subjects(folder, schemas, values, "shop.orders", **more)
    assert (draft.check.dead, draft.check.objections) == (dead, []), draft.file
    return draft, rows


def test_fields_of_json_schema_without_a_type_are_text(tmp_path: Path, recorded: Recorded) -> None:
    properties = {
        "id": {"type": "integer"}, "@timestamp": {"type": "string", "format": "date-time"},
        "more": {"type": "object"}, "either": {"type": ["string", "number"]}, "event_date": {"type": "string"},
        "ID": {"type": "string"}, "-": {"type": "array"}, "late": {"type": "string", "format": "date-time"},
    }  # fmt: skip
    value = (
        b'{"id": 5, "@timestamp": "2026-11-28T10:00:00Z", "more": {"a": 1.50}, "either": 7, '
        b'"event_date": "x", "ID": "y", "late": "soon", "-": [1]}'
    )
    schema = json.dumps({"properties": properties})
    draft, rows = of_subject(tmp_path, "JSON", schema, [wired(1, value)])
    recorded(rows)
    assert "# As its text: more: expected an object with properties" in draft.file
    # A subject without properties says nothing of the columns.
    draft, rows = of_subject(tmp_path, "JSON", '{"type": "object"}', [wired(1, value)])
    assert rows[0]["id"] == 5 and rows[0]["timestamp"] == TEN
    assert draft.file.count("# Without the subject's columns: expected an object with prop") == 1


def test_json_schema_says_less_than_its_records_have(tmp_path: Path) -> None:
    numbers = {name: {"type": "number"} for name in ("price", "big", "x", "-y")}
    schema = json.dumps({"type": "object", "properties": {"id": {"type": "integer"}, **numbers}})
    value = (
        b'{"id": 5, "price": 12345678901234567.89, "big": 9007199254740993, "x": 1.5, "-y": 1e-400}'
    )
    draft, rows = of_subject(tmp_path, "JSON", schema, [wired(1, value)])
    price = Decimal("12345678901234567.89")
    assert rows == [{"id": 5, "x": 1.5, "price": price, "big": 9007199254740993, "y": "1e-400"}]
    assert "rescue" not in draft.file
    value = b'{"id": 5, "more": [1], "x": 2}'
    _, rows = of_subject(tmp_path, "JSON", schema, [wired(1, value)])
    expected = {"id": 5, "price": None, "big": None, "x": 2.0, "y": None, "rescued": '{"more":[1]}'}
    assert rows == [expected]
    schema = json.dumps({"type": "object", "properties": {"rescued": {"type": "integer"}}})
    of_event = [("ce_id", b"1"), ("ce_source", b"/s")]
    for headers in ([], of_event):
        value = wired(1, b'{"rescued": 5, "more": 1}')
        _, [row] = of_subject(tmp_path, "JSON", schema, [value], headers=headers)
        beside = {name: sent.decode() for name, sent in headers}
        assert row == {"rescued_2": 5, "rescued": '{"more":1}', **beside}
    # Digits and fields within objects are kept.
    number = {"type": "number"}
    item = {"type": "object", "properties": {"x": number, "y": number}}
    one_map = {"type": "object", "additionalProperties": number}
    properties = {"l": {"type": "array", "items": item}, "m": one_map}
    schema = json.dumps({"properties": properties})
    value = (
        b'{"l": [{"x": 12345678901234567.89, "y": 1.5, "more": 1}], "m": {"k": 9007199254740993}}'
    )
    _, rows = of_subject(tmp_path, "JSON", schema, [wired(1, value)])
    read = {"x": Decimal("12345678901234567.89"), "y": 1.5}
    assert rows == [{"l": [read], "m": [("k", 9007199254740993)], "rescued": '{"l":[{"more":1}]}'}]


@pytest.mark.parametrize(
    ("kind", "schema", "sent", "text"),
    [
        ("JSON", '{"type": "array", "items": {"type": "integer"}}', b"[5]", "[5]"),
        ("JSON", '{"type": "string"}', b'"x"', '"x"'),
        ("AVRO", '"string"', b"\2x", None),
        (*record("r", next=["null", "r"]), b"\0", None),
    ],
)  # fmt: skip
def test_values_of_a_subject_that_no_format_reads_are_kept(
    tmp_path: Path, kind: str, schema: str, sent: bytes, text: str | None
) -> None:
    value = wired(1, sent)
    draft, rows = of_subject(tmp_path, kind, schema, [value], key=b"k")
    read = {} if text is None else {"text": text}
    assert rows == [{"value": value, "key": "k", **read}]
    assert "# The subject is refused: expected a" in draft.file


def test_a_subject_of_several_records_has_a_column_of_each(tmp_path: Path) -> None:
    schema = json.dumps([of_fields("A", a="string"), of_fields("B", b="string")])
    _, rows = of_subject(tmp_path, "AVRO", schema, [wired(1, b"\0\2x"), wired(1, b"\2\2y")])
    assert rows == [{"A": {"a": "x"}, "B": None}, {"A": None, "B": {"b": "y"}}]


def test_times_that_debezium_names_are_times_without_its_envelope(tmp_path: Path) -> None:
    def typed(kind: str, of: str) -> dict[str, str]:
        return {"type": kind, "connect.name": f"io.debezium.time.{of}"}

    row = of_fields(
        "r", id="long", event_date=typed("int", "Date"), at=["null", typed("long", "MicroTimestamp")],
        t=typed("int", "Time"), u=["string", typed("long", "MicroTimestamp")],
        l={**typed("long", "Timestamp"), "logicalType": "timestamp-micros"},
    )  # fmt: skip
    schema = json.dumps(row)
    micros = SECONDS * 10**6 + 7
    value = wired(1, varint(5) + varint(20785) + varint(1) + varint(micros) + b"\2\2\4\4")
    draft, rows = of_subject(tmp_path, "AVRO", schema, [value])
    read = {"at": TEN.replace(microsecond=7), "t": 1, "event_date_2": date(2026, 11, 28)}
    read["l"] = datetime(1970, 1, 1, 0, 0, 0, 2, tzinfo=UTC)
    assert rows == [{"id": 5, **read, "u": {"member_string": None, "member_long": read["l"]}}]
    assert yaml.safe_load(draft.file)["event_time"] == {"column": "at"}
    # PostgreSQL's infinity is no time.
    infinite = wired(1, varint(5) + varint(20785) + varint(1) + varint(2**63 - 1) + b"\2\2\4\4")
    draft, rows = of_subject(tmp_path, "AVRO", schema, [value, infinite])
    assert [row["at"] for row in rows] == [SECONDS * 10**6 + 7, 2**63 - 1]
    part = of_fields("s", lsn="long")
    change = {"before": ["null", row], "after": ["null", "r"], "source": part, "op": "string"}
    values = [wired(1, b"\0\2" + v[5:] + b"\2\2c") for v in (value, infinite)]
    draft, rows = of_subject(tmp_path, *record("e", **change), values)
    assert [row["at"] for row in rows] == [SECONDS * 10**6 + 7, 2**63 - 1]
    row["fields"] += of_fields("", no="null", o=of_fields("i", no="null", n="int"))["fields"]
    values = [wired(1, b"\0\2" + value[5:] + b"\2" + b"\2\2c")]
    draft, rows = of_subject(tmp_path, *record("e", **change), values)
    assert rows[0]["o"] == {"n": 1}
    for path in ("no", "o.no"):
        assert f"# Left out: {path}: expected a type with values, found null" in draft.file


@pytest.mark.parametrize(
    ("of_key", "key"), [(record("k", id="string"), "none"), (("AVRO", '"string"'), "id")]
)
def test_rows_of_a_table_by_an_avro_key(tmp_path: Path, of_key: tuple[str, str], key: str) -> None:
    schemas = {"shop.orders-value": record("r", id="string"), "shop.orders-key": of_key}
    values = [wired(1, b"\2a"), wired(1, b"\2b")]
    draft, _ = of_subjects(tmp_path, schemas, values, "shop.orders", key=wired(2, b"\2a"))
    assert yaml.safe_load(draft.file)["key"] == key


def test_fields_of_older_versions_of_a_subject_are_columns_too(tmp_path: Path) -> None:
    def inner(*names: str) -> Any:
        return of_fields("i", **dict.fromkeys(names, "int"))

    older = [
        record("r", id="long", Old="string", o=inner("a", "b"), x="string", no="null"),
        record("r", id="int", old="int", o=inner("b"), x="int"),
        record("r", id="int", old="long", o=inner("b"), x="int"),
    ]
    latest = record("r", id="int", o=inner("c", "b"), x="int")
    values = [
        wired(1, varint(2**40) + b"\2y\2\4\2z"), wired(2, b"\2\4\6\10"), wired(4, b"\2\4\6\10"),
        wired(3, b"\2" + varint(2**40) + b"\6\10"),
    ]  # fmt: skip
    schemas = {"shop.orders-value": latest}
    draft, rows = of_subjects(tmp_path, schemas, values, "shop.orders", older=older)
    assert draft.check.dead == 1 and "incompatible_schema: schema id 1: x: expected" in draft.file
    second = {"id": 1, "Old": None, "old_2": 2, "o": {"c": None, "b": 3, "a": None}, "x": 4}
    latest_row = second | {"old_2": None, "o": {"c": 2, "b": 3, "a": None}}
    assert rows == [second, latest_row, second | {"old_2": 2**40}]
    text = HEAD + "message Order { string id = 1; } message Other { int32 n = 1; }"
    former = HEAD + "message Order { string id = 1; int32 old = 2; }"
    schemas = {"shop.orders-value": ("PROTOBUF", text)}
    order = type_of(former, "shop.Order")(id="a", old=5)
    of_protobuf = [indexed(1, order), indexed(2, b"\n\1b")]
    older = [("PROTOBUF", former)]
    _, rows = of_subjects(tmp_path, schemas, of_protobuf, "shop.orders", older=older)
    assert rows == [{"id": "a", "old": 5}, {"id": "b", "old": None}]


def test_the_message_of_protobuf_is_that_of_the_records(tmp_path: Path) -> None:
    text = HEAD + "message Item { string sku = 1; } message Order { message Id { int64 n = 1; } }"
    value = indexed(1, type_of(text, "shop.Order.Id")(n=7), 1, 0)
    draft, rows = of_subject(tmp_path, "PROTOBUF", text, [value])
    assert rows == [{"n": 7}]
    assert yaml.safe_load(draft.file)["format"] == {"type": "protobuf", "message": "shop.Order.Id"}


def test_a_part_that_no_column_reads_is_left_out_of_its_record(tmp_path: Path) -> None:
    listed = {"type": "array", "items": of_fields("i", a="string", no="null")}
    schema = record("r", id="string", o=["null", listed], p=["null", "i"], no="null")
    draft, rows = of_subject(tmp_path, *schema, [wired(1, b"\2a\2\2\2b\0\0")])
    assert rows == [{"id": "a", "o": [{"a": "b"}], "p": None}]
    for path in ("o[].no", "p.no", "no"):
        why = f"# Left out: {path}: expected a type with values, found null"
        assert draft.file.count(why) == 1
    text = HEAD + "message Order { Part o = 1; message Part { int32 n = 1; Part inner = 3; } }"
    order = type_of(text, "shop.Order")()
    order.o.n = 5
    draft, rows = of_subject(tmp_path, "PROTOBUF", text, [indexed(1, order)])
    assert rows == [{"o": {"n": 5}}]
    assert "# Left out: o.inner: expected no message that contains itself" in draft.file


def test_what_is_beside_a_subjects_values_is_selected_or_named(
    tmp_path: Path, recorded: Recorded
) -> None:
    schema = record("r", id="string", ID="string")
    ce = [("ce_id", b"1"), ("ce_source", b"/s"), ("ce_time", b"2026-11-28T10:00:00Z")]
    value = wired(1, b"\2a\2b")
    draft, rows = of_subject(tmp_path, *schema, [value], headers=[*ce, ("trace", b"5")])
    recorded([yaml.safe_load(draft.file), rows])
    assert "# Headers are in no column; `select` reads them: trace" in draft.file
    headers, key = [("trace", b"5")], b"k-1"
    draft, _ = of_subject(tmp_path, *schema, [value], headers=headers, key=key)
    expected = "# Headers are in no column; `select` reads them, from columns in `schema`: trace"
    assert expected in draft.file
    assert "# Keys are in no column; `select` reads them, from columns in `schema`" in draft.file
    for key in (b"a", wired(2, b"\2c")):
        assert "Keys are" not in of_subject(tmp_path, *schema, [value], key=key)[0].file


def test_records_of_several_messages_are_rows_of_all_their_fields(tmp_path: Path) -> None:
    def sent(text: str) -> list[bytes]:
        order, refund = type_of(text, "shop.Order"), type_of(text, "shop.Refund")
        return [*[indexed(1, order(id="a"))] * 30, indexed(1, refund(id="a"), 1)]

    text = HEAD + "message Order { string id = 1; } message Refund { string id = 1; int32 n = 2; }"
    draft, rows = of_subject(tmp_path, "PROTOBUF", text, sent(text))
    assert rows == [{"id": "a", "n": None}] * 30 + [{"id": "a", "n": 0}]
    file = yaml.safe_load(draft.file)
    assert (file["format"], file["key"]) == ("protobuf", "none")
    assert "# With the fields of shop.Order, shop.Refund" in draft.file
    # A column has one type, and the name of its field.
    for of_order, of_refund in (("int64 n", "int32 n"), ("int64 n", "int32 _pos")):
        text = (
            f"{HEAD} message Order {{ string id = 1; {of_order} = 3; }} "
            f"message Refund {{ string id = 1; {of_refund} = 2; }}"
        )
        draft, rows = of_subject(tmp_path, "PROTOBUF", text, sent(text), dead=1)
        assert rows == [{"id": "a", "n": 0}] * 30
        assert yaml.safe_load(draft.file)["format"] == {"type": "protobuf", "message": "shop.Order"}
        assert "# Records of other messages are dead letters: shop.Refund" in draft.file


def test_names_of_streams_and_tables(recorded: Recorded) -> None:
    topics = [
        "shop.orders", "shop-orders", "1", "a" * 5, "shop.Orders", "shop.orders_hours", "shop.ord-ers", "shop.ord_ers",
    ]  # fmt: skip
    # The table that shop.orders_hours is named like has the hours of shop.orders.
    recorded({topic: [*names] for topic, names in names_of(topics).items()})
    assert yaml.safe_load(drafted([{"a": 1}], topic="orders")[0].file)["table"] == "raw.orders"


TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "5", "007", "12,5", "1.50", "2026-11-28", "2026-11-28T10:00:00Z", "28.11.2026", "1e5",
        "1795860000", "20261128", "01/02/2026", "true", "null", "10:00", "28/Nov/2026:11:00:00 +0100"]
    ),
)  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXTS,
    st.sampled_from([0, SECONDS, SECONDS * 1000, SECONDS * 10**9, 2**63, -(2**63), 1e300, 0.1, 1.5]),
)  # fmt: skip
NAMES = st.one_of(
    st.sampled_from(["id", "ts", "n", "at", "date", "not", "rescued", "@t", "a.b", "op", "x-y"]),
    st.text(max_size=6),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=budget(30, 1_000), derandomize=True)
@given(st.lists(st.dictionaries(NAMES, JSON, max_size=5), min_size=1, max_size=6))
@example([{"": 1}])
@example([{"a": {"b": None}}, {"a": {"B": 1, "b": 2}}])
@example([{"a": [None, [], {}]}])
def test_a_draft_loads_and_no_object_is_a_dead_letter(objects: list[dict[str, Any]]) -> None:
    draft, rows = drafted([json.dumps(one) for one in objects])
    assert draft.check.dead == 0, draft.file
    assert not draft.check.conflicts and len(rows) == len(objects)


@settings(max_examples=budget(15, 500), derandomize=True)
@given(
    st.lists(st.lists(TEXTS, min_size=3, max_size=3), min_size=2, max_size=6),
    st.sampled_from([",", ";", "\t", "|"]),
)
def test_a_draft_of_lines_refuses_none_but_the_header(rows: list[list[str]], mark: str) -> None:
    quoted = [['"' + field.replace('"', '""') + '"' for field in row] for row in rows]
    draft, _ = drafted([mark.join(row) for row in quoted])
    assert {reason.code for reason in draft.check.reasons} <= {"header_line"}, draft.file
