"""Output of the commands: exact values, on a terminal and through a pipe."""

import csv
import io
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.cells import cell_len

from anabranch.common import errors, output


@dataclass(frozen=True)
class Cut:
    end: int
    at: datetime


@dataclass(frozen=True)
class Report:
    end: int | None

    def as_dict(self) -> dict[str, object]:
        return {} if self.end is None else {"end": self.end}


RESULT = pa.table(
    {
        "n": pa.array([1, None], pa.int64()),
        "name": ["two\nlines", "日本"],
        "price": [Decimal("1.50"), Decimal("2.00")],
        "total": pa.array([Decimal(7), None], pa.decimal128(38, 0)),
        "tags": pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int32())),
        "at": pa.array([0, 1], pa.timestamp("us", "UTC")),
        "raw": [b"\x00\xff", b""],
        "share": [float("inf"), 0.5],
    }
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (datetime(2026, 11, 21, 3, tzinfo=UTC), "2026-11-21T03:00:00Z"),
        (datetime(2026, 11, 21, 3, tzinfo=timezone(timedelta(hours=2))), "2026-11-21T01:00:00Z"),
        (date(2026, 11, 21), "2026-11-21"),
        (timedelta(seconds=90), 90.0),
        (Decimal("1.50"), "1.50"),
        (Decimal(12345678901234567890), 12345678901234567890),
        (Decimal("NaN"), "NaN"),
        (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"),
        (b"\x00\xff", "AP8="),
        ({3: {"b", "a"}}, {"3": ["a", "b"]}),
        (Cut(5, datetime(2026, 11, 21, tzinfo=UTC)), {"end": 5, "at": "2026-11-21T00:00:00Z"}),
        ([Report(5), Report(None)], [{"end": 5}, {}]),
        ((Path("a/b"), True, None), ["a/b", True, None]),
    ],
)
def test_plain_keeps_the_value(value: object, expected: object) -> None:
    assert output.plain(value) == expected
    json.dumps(output.plain(value), allow_nan=False)


def test_plain_and_text_keep_a_value_or_refuse_its_type() -> None:
    with pytest.raises(TypeError, match="found object"):
        output.plain(object())
    assert output.text("a\nb\x1b[31m") == "a\\nb\\x1b[31m" and output.text(None) == ""
    assert output.text({"a": [1]}) == '{"a": [1]}'


def test_a_piped_table_is_aligned_and_never_cut(capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 300
    output.print_table(["hour", "count"], [["2026-11-21T03", 7], ["[bold]日本", None], [long, 12]])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hour" + " " * 296 + "  count"
    assert lines[2] == "2026-11-21T03" + " " * 287 + "      7"
    assert lines[3] == "[bold]日本" and lines[4] == long + "     12"
    hours = [("2026-11-21T03", 5), ("2026-11-21T04", 1200), ("2026-11-21T05", "")]
    output.print_table(("hour", "rows"), hours)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("   5") and lines[3].endswith("1200")


def test_a_table_on_a_terminal_folds_and_reads_no_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    output.print_table(["a"], [["y" * 100], ["[red]z[/red]"]])
    shown = capsys.readouterr().out
    assert shown.count("y") == 100 and "[red]z[/red]" in shown and "…" not in shown


WIDE = ("hour", "state", "served", "good", "dead", "reason")
ROWS = [
    ("2026-11-21T03", "accepted", "batch", 36_000_000, 5, None),
    ("2026-11-21T04", "refused", "speed", 7, 0, "why " * 30),
]


@pytest.mark.parametrize("width", [24, 40, 80, 300])
def test_a_table_fits_every_terminal_and_cuts_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    output.print_table(WIDE, ROWS)
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(cell_len, lines)) <= width
    shown = " ".join(" ".join(lines).split())
    for word in ("2026-11-21T03", "accepted", "36000000", "refused", "speed"):
        assert shown.count(word) == 1, word
    assert shown.count("why") == 30 and "…" not in shown
    assert (lines[0] == "2026-11-21T03") is (width < 300)
    if width == 80:
        assert lines[1] == "  state accepted  served batch  good 36000000  dead 5"


@pytest.mark.parametrize("wants_none", [False, True])
def test_a_state_has_a_colour_unless_none_is_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wants_none: bool
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    # Rich takes an empty variable for none.
    monkeypatch.setenv("NO_COLOR", "1" if wants_none else "")
    output.print_table(WIDE, ROWS)
    shown = capsys.readouterr().out
    assert ("\x1b[31m" in shown) is not wants_none and "refused" in shown


def test_csv_reads_back_and_a_spreadsheet_gets_no_formula(tmp_path: Path) -> None:
    output.write_result(RESULT.to_reader(), "csv", tmp_path / "r.csv")
    rows = list(csv.DictReader(io.StringIO((tmp_path / "r.csv").read_text(encoding="utf-8"))))
    assert rows[0] == {
        "n": "1", "name": "two\nlines", "price": "1.50", "total": "7", "tags": '{"k": 1}',
        "at": "1970-01-01T00:00:00Z", "raw": "AP8=", "share": "Infinity",
    }  # fmt: skip
    assert rows[1]["n"] == ""
    formulas = ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", "\t=1", "\r=1", "\n=1"]
    others = ["a=1", "", " x", "'"]
    table = pa.table({"=1+1": [*formulas, *others], "n": pa.array([-1.5] * 11, pa.float64())})
    read = {}
    for form in ("csv", "spreadsheet"):
        output.write_result(table.to_reader(), form, tmp_path / form)  # type: ignore[arg-type]
        text = (tmp_path / form).read_bytes().decode()
        read[form] = list(csv.reader(io.StringIO(text, newline="")))
    assert read["csv"] == [["=1+1", "n"], *([text, "-1.5"] for text in [*formulas, *others])]
    safe = [*(f"'{text}" for text in formulas), *others]
    assert read["spreadsheet"] == [["'=1+1", "n"], *([text, "-1.5"] for text in safe)]


def test_json_and_parquet_are_the_table(
    capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    output.write_result(RESULT.to_reader(), "json")
    rows = json.loads(capsysbinary.readouterr().out)
    assert rows[0]["total"] == 7
    assert rows[1] == {
        "n": None, "name": "日本", "price": "2.00", "total": None, "tags": {},
        "at": "1970-01-01T00:00:00.000001Z", "raw": "", "share": 0.5,
    }  # fmt: skip
    output.write_result(RESULT.to_reader(), "parquet", tmp_path / "r.parquet")
    assert pq.read_table(tmp_path / "r.parquet").equals(RESULT)
    output.write_result(RESULT.to_reader(), "parquet")
    assert pq.read_table(io.BytesIO(capsysbinary.readouterr().out)).equals(RESULT)


def test_a_place_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with pytest.raises(errors.ConfigurationError, match="found a terminal"):
        output.write_result(RESULT.to_reader(), "parquet")
    with pytest.raises(errors.ConfigurationError, match=r"nowhere/r\.csv"):
        output.write_result(RESULT.to_reader(), "csv", tmp_path / "nowhere" / "r.csv")
    months = pa.array([(1, 0, 0)], pa.month_day_nano_interval())
    with pytest.raises(errors.ConfigurationError, match=r"Parquet: .*interval.*CAST"):
        output.write_result(pa.table({"n": months}).to_reader(), "parquet", tmp_path / "r")


def test_two_results_for_one_file_leave_one_of_them_whole(tmp_path: Path) -> None:
    out, other = tmp_path / "r.csv", pa.table({"n": [7]})

    def batches() -> Iterator[pa.RecordBatch]:
        first, second = pa.table({"n": [1]}), pa.table({"n": [2]})
        yield from first.to_batches()
        # Of a job that began later, such as that of the next minute.
        output.write_result(other.to_reader(), "csv", out)
        yield from second.to_batches()

    output.write_result(pa.RecordBatchReader.from_batches(other.schema, batches()), "csv", out)
    assert out.read_text() == "n\n1\n2\n"
    assert [*tmp_path.iterdir()] == [out]


@pytest.mark.parametrize("form", ["table", "csv", "json"])
@pytest.mark.parametrize(
    "value",
    [
        pa.scalar(2**62, pa.timestamp("us")),
        pa.scalar(2**30, pa.date32()),
        pa.scalar([([1], 2)], pa.map_(pa.list_(pa.int64()), pa.int64())),
    ],
)
def test_a_value_without_a_form_is_named(value: pa.Scalar, form: Any, tmp_path: Path) -> None:
    result = pa.table({"n": [1], "far": pa.repeat(value, 1)})
    with pytest.raises(errors.ConfigurationError, match=r"column far: .*CAST"):
        output.write_result(result.to_reader(), form, tmp_path / "r")
