"""JSON lines of an import: read as the columns of a table, or refused with their file and line."""

from __future__ import annotations

import gzip
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.io.pyarrow import PyArrowFileIO

from anabranch.common.errors import Refused
from anabranch.lifecycle.importing.json_lines import JsonLines, is_json_lines

SCHEMA = pa.schema(
    [
        pa.field("id", pa.large_string(), nullable=False),
        pa.field("n", pa.int32()),
        pa.field("x", pa.float64()),
        pa.field("price", pa.decimal128(9, 2)),
        pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")),
        pa.field("days", pa.large_list(pa.date32())),
        pa.field("part", pa.struct([("text", pa.large_string()), ("day", pa.date32())])),
    ]
)
GOOD = (
    b'{"id":"a","n":1,"x":2,"price":1.5,"day":"2026-11-21","at":"2026-11-21T03:00:00.25+02:00","days":["2026-11-22"],'
    b'"part":{"text":"\xc3\xa9","day":"2026-11-23","other":0},"other":{}}'
)


def read(path: Path, content: bytes, columns: list[str] = SCHEMA.names) -> list[dict[str, Any]]:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    lines = JsonLines(PyArrowFileIO(), f"file://{path}", SCHEMA)
    batches = list(lines.iter_batches(2, columns))
    assert all(batch.schema.names == columns for batch in batches)
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz"])
def test_lines_are_read_as_the_columns_of_the_table(tmp_path: Path, name: str) -> None:
    rows = read(
        tmp_path / name, GOOD + b"\n\n" + b'{"at":"2026-11-21 03:00:00","id":"b"}\r\n \n{"id":"c"}'
    )
    assert rows[0] == {
        "id": "a", "n": 1, "x": 2.0, "price": Decimal("1.50"), "day": date(2026, 11, 21),
        "at": datetime(2026, 11, 21, 1, 0, 0, 250_000, tzinfo=UTC), "days": [date(2026, 11, 22)],
        "part": {"text": "é", "day": date(2026, 11, 23)},
    }  # fmt: skip
    assert [row["id"] for row in read(tmp_path / name, GOOD, ["id"])] == ["a"]
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert rows[1] == dict.fromkeys(SCHEMA.names) | {
        "id": "b",
        "at": datetime(2026, 11, 21, 3, tzinfo=UTC),
    }


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"id":"a","n":"1"}', r"Column\(/n\) changed from number to string;"),
        (b'{"id":"a","n":1.5}', "int32, couldn't parse:1.5"),
        (b'{"id":"a","n":3000000000}', "int32, couldn't parse:3000000000"),
        (b'{"id":"a","price":1.555}', "requires scale 3"),
        (b'{"id":"a","day":"2026-02-30"}', "'2026-02-30' as a scalar of type date32"),
        (b'{"id":"a","day":20000}', r"Column\(/day\) changed from string to number"),
        (b'{"id":"a","part":{"day":"x"}}', "'x' as a scalar of type date32"),
        (b'{"id":"a","at":1700000000}', r"Column\(/at\) changed from string to number"),
        (b'{"n":1}', "no id;"),
        (b'{"id":null}', "no id;"),
        (b'{"id":"a","id":"b"}', "was specified twice"),
        (b'{"id":"a"', "Missing a comma or '}'"),
        (b'{"id":"a"} {"id":"b"}', "2 objects in 1 lines"),
        (b'{"id":"\\ud800"}', "surrogate"),
        (b'{"id":"\xff"}', "can't decode byte 0xff"),
        (b'["a"]', "from object to array"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: bytes, found: str) -> None:
    content = b"\n".join([GOOD, b"", GOOD, line, GOOD])
    with pytest.raises(
        Refused, match=rf"a\.json: line 4: expected an object of JSON .*, found .*{found}"
    ):
        read(tmp_path / "a.json", content, SCHEMA.names)
    with pytest.raises(Refused, match=r"a\.json: line 4: "):
        read(tmp_path / "a.json", content, ["id"])


def test_an_object_of_two_lines_is_named(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"a\.json: line 2: "):
        read(tmp_path / "a.json", GOOD + b'\n{"id":\n"a"}')


@pytest.mark.parametrize("line", [b"[1]", b"3", b'{"id"'])
def test_a_first_line_that_is_no_object_is_named(tmp_path: Path, line: bytes) -> None:
    with pytest.raises(Refused, match=r"a\.json: line 2: expected an object of JSON"):
        read(tmp_path / "a.json", b"\n" + line)


def test_a_batch_has_as_many_lines_as_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\n".join([GOOD] * 5))
    lines = JsonLines(PyArrowFileIO(), f"file://{path}", SCHEMA)
    assert [len(batch) for batch in lines.iter_batches(2, ["id"])] == [2, 2, 1]


@pytest.mark.parametrize(
    ("damage", "line"), [("cut short", 2), ("another checksum", 2), ("not gzip", 1)]
)
def test_a_compressed_file_that_is_damaged_is_refused(
    tmp_path: Path, damage: str, line: int
) -> None:
    path = tmp_path / "a.json.gz"
    whole = gzip.compress(GOOD + b"\n")
    damaged = {"cut short": whole[:-9], "another checksum": whole[:-8] + bytes(8), "not gzip": GOOD}
    path.write_bytes(damaged[damage])
    lines = JsonLines(PyArrowFileIO(), f"file://{path}", SCHEMA)
    with pytest.raises(Refused, match=rf"a\.json\.gz: line {line}: .*an incomplete gzip file"):
        list(lines.iter_batches(2, ["id"]))


def test_the_columns_of_a_file_are_the_tables_and_fields_that_may_be_times_and_places(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.json"

    def types(content: bytes, *elsewhere: str) -> dict[str, str]:
        path.write_bytes(content)
        schema = JsonLines(PyArrowFileIO(), f"file://{path}", SCHEMA, elsewhere).schema_arrow
        return {field.name: str(field.type) for field in schema}

    columns = {field.name: str(field.type) for field in SCHEMA}
    own = b'\n{"id":"a","timestamp":"2026-11-21T03:00:00Z","offset":3,"rest":{},"none":null}'
    assert types(own) == columns | {"timestamp": "timestamp[us, tz=UTC]", "offset": "int64"}
    assert "n" not in types(own, "n", "id") and "id" in types(own, "n", "id")
    assert types(b"") == columns


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_binary(),
        pa.map_(pa.string(), pa.int64()),
        pa.list_(pa.struct([("bytes", pa.binary())])),
    ],
)
def test_a_column_of_a_type_that_json_lacks_is_refused(tmp_path: Path, kind: pa.DataType) -> None:
    (tmp_path / "a.json").write_bytes(GOOD)
    lines = JsonLines(
        PyArrowFileIO(), f"file://{tmp_path}/a.json", SCHEMA.append(pa.field("odd", kind))
    )
    with pytest.raises(
        Refused, match=r"a\.json: column odd: expected a type that values of JSON have, found "
    ):
        list(lines.iter_batches(2, ["id"]))


def test_names_of_files() -> None:
    names = [
        "a.json",
        "a.jsonl",
        "b/c.ndjson",
        "a.json.gz",
        "a.parquet",
        "a.csv",
        "json",
        "a.json.zst",
    ]
    assert [name for name in names if is_json_lines(name)] == [
        "a.json",
        "a.jsonl",
        "b/c.ndjson",
        "a.json.gz",
    ]
