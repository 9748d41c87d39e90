"""Files of an import's source: the same rows in each format, or a refusal with file and line."""

import bz2
import csv
import gzip
import io
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.orc as orc
import pyarrow.parquet as pq
import pytest
from lakes import new_stream
from pyiceberg.io.pyarrow import PyArrowFileIO

from anabranch.common.errors import Refused, Transient
from anabranch.iceberg import other_tables
from anabranch.iceberg.files import Stored
from anabranch.iceberg.other_tables import FilePart, Part
from anabranch.lifecycle.importing import files
from anabranch.lifecycle.importing.files import maker, split_form

DDL = (
    "id STRING NOT NULL, n INT, x DOUBLE, price DECIMAL(9,2), day DATE, at TIMESTAMP, "
    "days ARRAY<DATE>, part STRUCT<text: STRING, day: DATE>"
)
STREAM = new_stream(schema=DDL)
NAMES = [column.name for column in STREAM.columns]
AT = datetime(2026, 11, 21, 1, 0, 0, 250_000, tzinfo=UTC)
ROW = {
    "id": "a", "n": 1, "x": 2.0, "price": Decimal("1.50"), "day": date(2026, 11, 21), "at": AT,
    "days": [date(2026, 11, 22)], "part": {"text": "é", "day": date(2026, 11, 23)},
}  # fmt: skip
GOOD = (
    b'{"id":"a","n":1,"x":2,"price":1.5,"day":"2026-11-21","at":"2026-11-21T03:00:00.25+02:00",'
    b'"days":["2026-11-22"],"part":{"text":"\xc3\xa9","day":"2026-11-23","other":0},"other":{}}'
)


def parts(path: Path, form: str | None = None, stream: Any = STREAM) -> list[Part]:
    stored = Stored(f"file://{path}", path.stat().st_size, datetime.now(UTC))
    return list(maker(form, stream)(PyArrowFileIO(), stored, path.name))


def read(path: Path, columns: Iterable[str] = NAMES, **given: Any) -> list[dict[str, Any]]:
    batches = (
        batch for part in parts(path, **given)
        for batch in part.iter_batches(2, [c for c in columns if c in part.schema_arrow.names])
    )  # fmt: skip
    return [row for batch in batches for row in batch.to_pylist()]


def lines(path: Path, content: bytes, columns: Iterable[str] = NAMES) -> list[dict[str, Any]]:
    compress = {".gz": gzip.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(content))
    return read(path, columns)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl.gz", "a.ndjson.bz2"])
def test_lines_of_json_are_read_as_records_are(tmp_path: Path, name: str) -> None:
    more = b'{"at":"2026-11-21 03:00:00","id":"b"}\r\n \n{"id":"c"}'
    rows = lines(tmp_path / name, GOOD + b"\n\n" + more)
    assert rows[0] == ROW
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    later = dict.fromkeys(NAMES) | {"id": "b", "at": datetime(2026, 11, 21, 3, tzinfo=UTC)}
    assert rows[1] == later
    assert lines(tmp_path / name, GOOD, ["id"]) == [{"id": "a"}]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"id":"a","n":"1"}', "n: expected int, found 1;"),
        (b'{"id":"a","n":1.5}', "n: expected int, found 1.5;"),
        (b'{"id":"a","n":3000000000}', "n: expected int, found 3000000000;"),
        (b'{"id":"a","day":"2026-02-30"}', "day: expected date, found 2026-02-30;"),
        (b'{"id":"a","part":{"day":"x"}}', "part.day: expected date, found x;"),
        (b'{"id":"a","at":1700000000}', "at: expected timestamp, found 1700000000;"),
        (b'{"n":1}', "id: expected string NOT NULL, found null"),
        (b'{"id":"a"', "expected one JSON object"),
        (b'{"id":"a"} {"id":"b"}', "expected one JSON object"),
        (b'{"id":"\xff"}', "UTF-8"),
        (b'["a"]', "expected a JSON object"),
    ],
)
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: bytes, found: str) -> None:
    content = b"\n".join([GOOD, b"", GOOD, line, GOOD])
    for columns in (NAMES, ["id"]):
        with pytest.raises(Refused, match=r"a\.json: line 4: ") as error:
            lines(tmp_path / "a.json", content, columns)
        assert found in str(error.value)


@pytest.mark.parametrize("line", [b"[1]", b"3", b'{"id"'])
def test_a_first_line_that_is_no_object_is_named(tmp_path: Path, line: bytes) -> None:
    with pytest.raises(Refused, match=r"a\.json: line 2: expected an object of JSON"):
        lines(tmp_path / "a.json", b"\n" + line)


@pytest.mark.parametrize("damage", ["cut short", "another checksum", "not gzip"])
def test_a_compressed_file_that_is_damaged_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.json.gz"
    whole = gzip.compress(GOOD + b"\n")
    damaged = {"cut short": whole[:-9], "another checksum": whole[:-8] + bytes(8), "not gzip": GOOD}
    path.write_bytes(damaged[damage])
    with pytest.raises(Refused, match=r"a\.json\.gz: line \d: expected a complete file"):
        read(path)


def test_fields_of_the_first_line_may_be_times_and_places(tmp_path: Path) -> None:
    own = b'{"id":"a","timestamp":"2026-11-21T03:00:00Z","offset":3,"rest":{},"none":null}'
    [row] = lines(tmp_path / "a.json", own, ["id", "timestamp", "offset", "rest", "none"])
    assert row == {"id": "a", "timestamp": datetime(2026, 11, 21, 3, tzinfo=UTC), "offset": 3}
    assert lines(tmp_path / "a.json", b"") == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", b'{"id":"a","topic":"t","Partition":3,"offset":"4"}'),
        ("a.csv", b"id,topic,Partition,offset\na,t,3,4\n"),
    ],
)
def test_lines_have_topics_and_places(tmp_path: Path, name: str, content: bytes) -> None:
    """As Spark's file sink writes all columns of its Kafka source."""
    (tmp_path / name).write_bytes(content)
    [row] = read(tmp_path / name, ["id", "topic", "Partition", "offset"], stream=FLAT_STREAM)
    offset = "4" if name == "a.json" else 4
    assert row == {"id": "a", "topic": "t", "Partition": 3, "offset": offset}


FLAT = "id STRING NOT NULL, n INT, x DOUBLE, price DECIMAL(9,2), day DATE, at TIMESTAMP"
FLAT_STREAM = new_stream(schema=FLAT)


def test_csv_is_read_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["offset", "n", "id", "at", "timestamp", "rest"])
        writer.writerow([7, 1, 'a "b"\nc, d', "2026-11-21T03:00:00Z", "2026-11-21 04:00:00", "?"])
        writer.writerow([8, "", "e", "", "", ""])
    columns = ["id", "n", "at", "x", "offset", "timestamp"]
    rows = read(path, columns, stream=FLAT_STREAM)
    at = datetime(2026, 11, 21, 3, tzinfo=UTC)
    assert rows[0] == {
        "id": 'a "b"\nc, d', "n": 1, "at": at, "offset": 7, "timestamp": at.replace(hour=4),
    }  # fmt: skip
    assert rows[1] == {"id": "e", "n": None, "at": None, "offset": 8, "timestamp": None}
    path.write_text('id,n\na,1\n"b\nc",2\nd,x\n')
    with pytest.raises(Refused, match=r"a\.csv: line 5: .*n: expected int, found x;"):
        read(path, stream=FLAT_STREAM)
    path.write_text('id,n\na,1\n"b')
    with pytest.raises(Refused, match=r"a\.csv: line 3: .*found a quote that is not closed"):
        read(path, stream=FLAT_STREAM)
    path.write_text("id,id\na,1\n")
    with pytest.raises(Refused, match=r"a\.csv: line 1: expected a header with a name for each"):
        read(path, stream=FLAT_STREAM)


def test_a_stray_quote_ends_a_large_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In linear time, and before the rest of the file is in memory."""
    path, found = tmp_path / "a.csv", r"a\.csv: line 3: .*found a quote that is not closed"
    path.write_bytes(b'id,n\na,1\n"b,2\n' + b"c,3\n" * 200_000)
    with pytest.raises(Refused, match=found):
        read(path, stream=FLAT_STREAM)
    path.write_bytes(b'id,n\na,1\n"b' + b"\n" * 1_000 + b'",2\n')
    assert len(read(path, stream=FLAT_STREAM)) == 2
    monkeypatch.setattr(files, "_BYTES", 1_000)
    with pytest.raises(Refused, match=found):
        read(path, stream=FLAT_STREAM)


def test_orc_is_read_stripe_by_stripe(tmp_path: Path) -> None:
    rows = pa.table({"id": ["a", "b"] * 40_000, "at": pa.array([AT] * 80_000)})
    orc.write_table(rows, str(tmp_path / "a.orc"), stripe_size=10_000)
    assert orc.ORCFile(str(tmp_path / "a.orc")).nstripes > 1
    found = read(tmp_path / "a.orc", ["id", "at"])
    assert found == [{"id": i, "at": AT} for i in ["a", "b"] * 40_000]
    (tmp_path / "a.orc").write_bytes(b"ORC and no end")
    with pytest.raises(Refused, match="expected a complete ORC file"):
        read(tmp_path / "a.orc")
    # As Hive has for "no end": nanoseconds end in the year 2262.
    far = pa.array([datetime(9999, 12, 31)], pa.timestamp("us"))
    orc.write_table(pa.table({"id": ["a"], "at": far}), str(tmp_path / "a.orc"))
    with pytest.raises(Refused, match=r"a\.orc: expected values that PyArrow reads.* out of range"):
        read(tmp_path / "a.orc", ["at"])


def test_avro_is_read_in_the_columns_of_the_stream(tmp_path: Path) -> None:
    time = {"type": "long", "logicalType": "timestamp-micros"}
    money = {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}
    day = {"type": "int", "logicalType": "date"}
    inner = {"type": "record", "name": "P", "fields": [{"name": "text", "type": "string"},
                                                      {"name": "day", "type": day}]}  # fmt: skip
    kinds = {
        "id": "string", "n": ["null", "int"], "x": "double", "price": money, "day": day, "at": time,
        "days": {"type": "array", "items": day}, "part": inner, "timestamp": time, "offset": "long",
    }  # fmt: skip
    schema = {"type": "record", "name": "R", "fields": [
        {"name": name, "type": kind} for name, kind in kinds.items()]}  # fmt: skip
    path = tmp_path / "a.avro"

    def write(*rows: dict[str, Any], schema: Any = schema) -> None:
        with path.open("wb") as file:
            fastavro.writer(file, schema, rows, codec="deflate")

    whole = ROW | {"timestamp": AT, "offset": 5}
    write(whole, whole | {"n": None})
    found = read(path, [*NAMES, "timestamp", "offset"])
    assert found == [whole, whole | {"n": None}]
    content = path.read_bytes()
    path.write_bytes(content[:-20])
    with pytest.raises(Refused, match=r"a\.avro: expected a complete Avro file"):
        read(path)
    for codec in ("deflate", "bzip2", "xz"):
        with path.open("wb") as file:
            fastavro.writer(file, schema, [whole], codec=codec)
        damaged = bytearray(path.read_bytes())
        damaged[-30:-20] = bytes(10)
        path.write_bytes(damaged)
        with pytest.raises(Refused, match=r"a\.avro: expected a complete Avro file"):
            read(path)
    nanos = {"type": "long", "logicalType": "timestamp-nanos"}
    write(schema=schema | {"fields": [{"name": "at", "type": nanos}]})
    with pytest.raises(Refused, match=r"a\.avro: .*found timestamp-nanos"):
        read(path)


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (OSError("connection reset"), Transient),
        (Transient("busy"), Transient),
        (MemoryError("no memory"), MemoryError),
    ],
)
def test_what_else_fails_is_no_damage_of_avro(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, known: type[Exception]
) -> None:
    path = tmp_path / "a.avro"
    with path.open("wb") as file:
        fastavro.writer(file, {"type": "record", "name": "R", "fields": []}, [])
    [part] = parts(path)

    class Away(io.BytesIO):
        def readinto(self, _: Any) -> int:
            raise error

    monkeypatch.setattr(files, "open_stream", lambda *_: nullcontext(Away()))
    with pytest.raises(known):
        list(part.iter_batches(2, NAMES))


def test_a_lack_of_memory_is_no_damage_of_a_file() -> None:
    class Large(FilePart):
        def own_batches(self, *_: Any) -> Iterator[pa.RecordBatch]:
            raise pa.ArrowMemoryError("malloc of size 64 failed")

    with pytest.raises(MemoryError, match="malloc of size 64 failed"):
        list(Large(PyArrowFileIO(), "a.orc", {}).iter_batches(2, NAMES))


def test_a_large_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": list(map(str, range(1000)))}), path, row_group_size=100)
    monkeypatch.setattr(other_tables, "_LARGE", 1_500)
    found = parts(path)
    assert 1 < len(found) <= 10
    assert [row["id"] for row in read(path, ["id"])] == list(map(str, range(1000)))


def test_formats_of_names_and_sources(tmp_path: Path) -> None:
    assert split_form("csv:s3://a/b") == ("csv", "s3://a/b")
    assert split_form("s3://a/b") == (None, "s3://a/b")
    assert split_form("iceberg:old.events") == ("iceberg", "old.events")
    path = tmp_path / "events.log"
    path.write_bytes(GOOD)
    with pytest.raises(Refused, match=r"expected a name that ends like its format"):
        parts(path)
    [row] = read(path, form="json")
    assert row == ROW
