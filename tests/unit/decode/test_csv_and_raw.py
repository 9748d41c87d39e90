"""CSV, raw bytes, and JSON in Confluent's wire format: a row or a verdict for each value."""

from datetime import UTC, date, datetime
from decimal import Decimal
from functools import partial
from types import SimpleNamespace

import format_cases
import pyarrow as pa
import pytest
import worst
from budget import budget
from cases import codes, decoded, expect, spec_of
from format_cases import CSV_DDL, EVENT_TIME, RAW_DDL
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kafka_batches import START, new_batch
from wire import wired

from anabranch.decode import Decoder, UnlistedSchema, WriterSchema, csv, values


def test_lines_of_csv() -> None:
    cases = format_cases.csv_cases(START)
    result = expect(spec_of(CSV_DDL, "csv", EVENT_TIME, delimiter=";"), cases)
    read = dict(zip(cases, result.rows.to_pylist(), strict=True))
    plain, quoted = read["plain"], read["quoted"]
    assert plain.items() >= {
        "event_id": "a", "level": 7, "amount": 1.5, "ok": True, "price": Decimal("2.35"),
        "day": date(2024, 2, 29), "raw": b"hi", "small": 0.5, "total": 9007199254740993,
    }.items()  # fmt: skip
    text = {"event_id": 'b;"quoted"\n line', "level": 7, "raw": b"", "total": None}
    assert quoted.items() >= text.items()
    ids = {"byte order mark": "m", "blanks are text": " d ", "empty text in NOT NULL": ""}
    for name, id in (ids | {"1 MB of quotes": '"' * 500_000}).items():
        assert read[name]["event_id"] == id


def test_the_worst_lines_of_a_megabyte() -> None:
    expect(spec_of(worst.CSV_DDL, "csv"), worst.csv_cases())


@settings(max_examples=budget(100, 1_000), derandomize=True)
@given(st.text("a, \r\n", max_size=8))
def test_a_line_without_quotes_has_the_fields_of_one_with(line: str) -> None:
    fields = csv.split(f'"",{line}', ",")
    assert csv.split(line, ",") == (fields if fields is None else fields[1:])


ABOVE_A_TIE = "1.0000000596046447753906250001"


@settings(max_examples=budget(100, 1_000), derandomize=True)
@given(
    st.lists(
        st.none()
        | st.from_regex(r"-?(0|[1-9][0-9]{0,20})(\.[0-9]{1,20})?(e[0-9])?", fullmatch=True)
        | st.text("0129.-+eE_ \n\u0661", max_size=24),
        max_size=6,
    ),
    st.sampled_from(
        ["int", "bigint", "float", "double", "decimal(9,2)", "decimal(3,3)", "decimal(38,0)"]
    ),
)
# Rounded once, it is above 1: PyArrow's cast of text to FLOAT.
@example([ABOVE_A_TIE], "float")
@example([ABOVE_A_TIE, "1e0"], "float")
def test_numbers_are_those_of_each_text(texts: list[str | None], kind: str) -> None:
    convert = partial(values.number, kind=values.arrow_type(kind))
    given = pa.array(texts, pa.string())
    read, bad = values.numbers(given, values.arrow_type(kind), lambda i: convert(texts[i]))
    each, errors = values.each(texts, values.arrow_type(kind), convert)
    assert (str(read), list(bad)) == (str(each), list(errors))


@pytest.mark.parametrize("delimiter", [",", "\t", "|", "\\", "'", ".", "]", "^", "-", "é", "😀"])
def test_any_delimiter(delimiter: str) -> None:
    spec = spec_of("a STRING, b STRING, c INT", "csv", delimiter=delimiter)
    fields = (("x", f'"{delimiter}"', "1"), ("", "", ""))
    result = decoded(spec, [delimiter.join(each).encode() for each in fields])
    assert not result.errors
    found = [list(row.values())[:3] for row in result.rows.to_pylist()]
    assert found == [["x", delimiter, 1], [None] * 3]


def test_columns_by_the_names_of_a_header() -> None:
    schema = {
        "total": {"type": "DECIMAL(8,2)", "from": "sum €", "decimal": ","},
        "id": "STRING NOT NULL",
        "at": {"type": "TIMESTAMP", "from": "time", "unit": "millis"},
        "day": {"type": "DATE", "format": "%d.%m.%Y"},
    }
    spec = spec_of(schema, "csv", delimiter=";", header=("id", "other", "time", "sum €", "day"))
    expect(
        spec,
        {
            "good": (b'a;x;1500;"1,5";28.11.2026', None, ""),
            "empty": (b"a;;;;", None, ""),
            "header": ("id;other;time;sum €;day\n".encode(), "header_line", "found the header"),
            "quoted header": ('"id";other;time;"sum €";day'.encode(), "header_line", ""),
            "no header": ("id;other;time;sum €;29.02.2026".encode(), "wrong_type", "found sum €"),
            "short": (b"id;other", "wrong_field_count", "expected 5 fields, found 2"),
            "sign": (b"a;;;1.5;", "wrong_type", "total: expected decimal(8,2) with the decimal sign ,, found 1.5"),
            "day": (b"a;;;;29.02.2026", "unreadable_timestamp", "day: expected date of the form %d.%m.%Y, found 29.02.2026"),
            "time": (b"a;;noon;;", "unreadable_timestamp", "at: expected timestamp in millis since 1970, found noon"),
        },
    )  # fmt: skip
    [row] = decoded(spec, [b"a;x;1500.5;1,5;28.11.2026"]).rows.select(list(schema)).to_pylist()
    at = datetime(1970, 1, 1, 0, 0, 1, 500_500, UTC)
    assert row == {"total": Decimal("1.5"), "id": "a", "at": at, "day": date(2026, 11, 28)}


def test_raw_bytes() -> None:
    cases: dict[str, format_cases.Case] = {
        "any bytes": (bytes(range(256)), None, ""),
        "no bytes": (b"", None, ""),
        "null": (None, "missing_required", "value"),
    }
    keys = pa.array([b"k", b"\xff", None], pa.binary())
    batch = new_batch([value for value, _, _ in cases.values()]).append_column("key", keys)
    result = Decoder(spec_of(RAW_DDL, "raw")).decode(batch)
    assert result.rows["value"].to_pylist() == [value for value, _, _ in cases.values()]
    assert result.rows["key"].to_pylist() == ["k", None, None]
    missing = "value: expected binary NOT NULL, found null or no such field"
    not_utf8 = ("invalid_utf8", "key: expected UTF-8, found bytes that are not")
    assert result.errors == {1: not_utf8, 2: ("missing_required", missing)}
    texts = Decoder(spec_of("key STRING, value STRING", "raw")).decode(batch)
    assert codes(texts) == dict.fromkeys((0, 1), "invalid_utf8")
    assert texts.rows["value"].to_pylist() == [None, "", None]


def test_json_with_schema_ids() -> None:
    other = WriterSchema(error=format_cases.FOREIGN)
    missing = WriterSchema(error=format_cases.MISSING)
    schemas = {6: WriterSchema("{}"), 1: other, 2**31 - 1: missing}
    spec = spec_of(format_cases.DDL, "json_schema", EVENT_TIME, schemas=schemas, lists_unknown=True)
    expect(spec, format_cases.json_schema_cases(SimpleNamespace(json=6, v1=1), START))
    with pytest.raises(UnlistedSchema, match="schema id 9: expected it among those listed"):
        decoded(spec, [wired(9, b"{}")])
