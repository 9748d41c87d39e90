"""Drift from the ledger's rows alone: merged by name, bounded, and safe to print with any names."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from anabranch.cli.render.rows import drift_text
from anabranch.cli.report import print_text
from anabranch.config import Stream, SubjectSchema, load_stream
from anabranch.config.schema import parse_schema
from anabranch.config.sections import FormatSettings
from anabranch.decode.guessed import combine, guess_type
from anabranch.offsets.hours import Cut
from anabranch.operations.reports.drift import drift_of
from anabranch.protocol import ledger
from anabranch.protocol.ledger_row import HourAccount, LedgerRow, UnknownField, UnknownFields
from anabranch.records.staged import UnknownNames
from batch_layer.offset_counts import parsed, sampled, shape_of, sum_unknown

CONF = Path(__file__).parents[3] / "conf"
NOW = datetime(2026, 11, 21, 5, tzinfo=UTC)


def stream() -> Stream:
    return load_stream("game_events", CONF)


def field(
    name: str, records: int = 1, sample: str | None = '"a"', kind: str | None = "STRING"
) -> UnknownField:
    return UnknownField(name, records, (0, 0), (0, 9), sample, kind)


def row(hour: str, start: int, *fields: UnknownField, others: int = 0) -> LedgerRow:
    account = HourAccount(unknown=UnknownFields(9, fields, others))
    cut = Cut("t", {0: (start, start + 10)})
    return ledger.decision(hour, "accepted", 1, cut, NOW, account=account)


def test_hours_are_merged_by_name_and_those_still_in_kafka_are_restated() -> None:
    rows = [
        row("2026-11-21T00", 0, field("colour", 2), field("size", 5, "1", "BIGINT")),
        row("2026-11-21T01", 10, field("size", 1, "1.5", "DOUBLE"), others=4),
        row("2026-11-21T02", 20),
    ]
    view = drift_of(stream(), rows, "t", {0: 10})
    expected = [("size", 6, 2, "DOUBLE", ["1", "1.5"]), ("colour", 2, 1, "STRING", ['"a"'])]
    assert [(f.name, f.records, f.hours, f.type, f.samples) for f in view.fields] == expected
    assert view.schema is not None
    assert view.schema.endswith("platform STRING, size DOUBLE, colour STRING")
    assert (view.restate, view.gone, view.others) == (["2026-11-21T01"], ["2026-11-21T00"], 4)
    assert [c.split()[1] for c in view.commands] == ["apply", "batch"]
    command = "anabranch batch game_events --hour 2026-11-21T01 --restate --why"
    assert view.commands[1].startswith(command)
    # Hours that follow each other are restated by one command.
    held = [row(f"2026-11-21T{n:02}", n, field("size")) for n in (1, 2, 3, 5)]
    commands = drift_of(stream(), held, "t", {0: 0}).commands[1:]
    assert [c.split()[4] for c in commands] == ["2026-11-21T01..2026-11-21T03", "2026-11-21T05"]
    # Another topic holds none of them.
    assert drift_of(stream(), rows, "other", {}).restate == []


def test_a_schema_of_other_fields_is_a_mapping(capsys: pytest.CaptureFixture[str]) -> None:
    schema = {"id": "STRING NOT NULL", "at": {"type": "TIMESTAMP", "from": "@ts", "unit": "nanos"}}
    nested = {"level": {"type": "INT", "from": "payload.level"}}
    of = stream().model_copy(update={"columns": parse_schema(schema | nested)})
    fields = [field(name) for name in ("new", "@ts", "payload", "level")]
    view = drift_of(of, [row("2026-11-21T00", 0, *fields)], "t", {})
    assert {f.name: (f.taken_up, f.obstacle) for f in view.fields} == {
        "new": (False, None), "@ts": (True, None), "payload": (True, None),
        "level": (False, "the column of that name reads another field"),
    }  # fmt: skip
    print_text(drift_text(view))
    [line] = [one for one in capsys.readouterr().out.splitlines() if one.startswith("schema: ")]
    assert yaml.safe_load(line) == {"schema": schema | nested | {"new": "STRING"}}


def test_fields_of_rows_in_an_envelope() -> None:
    op, x = {"type": "STRING", "from": "op"}, {"type": "INT", "from": "row.y"}
    schema = {"id": "BIGINT", "op": op, "x": x}
    changes = {"columns": parse_schema(schema), "format": FormatSettings(envelope="debezium")}
    names = ("id", "op", "x", "y", "new")
    rows = [row("2026-11-21T00", 0, *map(field, names))]
    view = drift_of(stream().model_copy(update=changes), rows, "t", {})
    other = "the column of that name reads another field"
    assert {f.name: (f.taken_up, f.obstacle) for f in view.fields} == {
        "id": (True, None), "op": (False, other), "x": (False, other), "y": (True, None), "new": (False, None),
    }  # fmt: skip
    assert view.schema == schema | {"new": "STRING"}


def test_fields_inside_others() -> None:
    level = {"type": "INT", "from": "payload.level"}
    schema = {"items": "ARRAY<STRUCT<n: INT>>", "m": "MAP<STRING, INT>", "level": level}
    of = stream().model_copy(update={"columns": parse_schema(schema)})
    names = ("items[].x", "items[].n", "m{}.x", "payload.of.x", "payload.x", "payload.level.x")
    view = drift_of(of, [row("2026-11-21T00", 0, *map(field, names))], "t", {0: 0})
    assert {f.name: f.obstacle for f in view.fields if not f.taken_up} == {
        "items[].x": "add it to the STRUCT at items[]",
        "payload.of.x": "add it to the STRUCT at payload, or a column with `from: payload.of.x`",
        "payload.x": "add it to the STRUCT at payload, or a column with `from: payload.x`",
        # Or a field whose own name is `payload.level.x`, which no restatement takes up.
        "payload.level.x": "if it is inside payload.level, restate its hours: a column reads all of that",
        "m{}.x": "if it is inside m, restate its hours: a column reads all of that",
    }
    assert view.schema is None and [c.split()[1] for c in view.commands] == ["batch"]
    columns, envelope = parse_schema({"s": "STRUCT<a: INT>"}), FormatSettings(envelope="debezium")
    of = stream().model_copy(update={"format": envelope, "columns": columns})
    [one] = drift_of(of, [row("2026-11-21T00", 0, field("s.x"))], "t", {}).fields
    assert one.obstacle == "add it to the STRUCT at s, or a column with `from: row.s.x`"


def test_names_unfit_for_columns_are_listed_with_why(capsys: pytest.CaptureFixture[str]) -> None:
    names = [
        "n" * 100, "a b", "x'; --", "Level", "KAFKA_OFFSET", "_Deleted", "kafka_key", "esc\x1b[2J\n", "new", "NEW",
    ]  # fmt: skip
    fields = (*(field(n, 11 - i) for i, n in enumerate(names)), field("level"))
    view = drift_of(stream(), [row("2026-11-21T00", 0, *fields)], "t", {})
    assert [f.name for f in view.fields if f.obstacle is None] == ["new", "level"]
    assert [f.name for f in view.fields if f.taken_up] == ["level"]
    assert view.schema is not None and view.schema.endswith(", new STRING")
    print_text(drift_text(view))
    said = capsys.readouterr().out
    assert "\x1b" not in said and r"esc\x1b[2J\n" in said


def test_the_column_that_rescues_is_no_field(tmp_path: Path) -> None:
    streams = tmp_path / "streams"
    streams.mkdir()
    text = (CONF / "streams" / "game_events.yaml").read_text()
    rescued = text.replace("expectations:", "unknown: rescue\n# ")
    (streams / "game_events.yaml").write_text(rescued)
    rescuing = load_stream("game_events", tmp_path)
    assert rescuing.columns[-1].name == "rescued"
    view = drift_of(rescuing, [row("2026-11-21T00", 0, field("rescued"), field("new"))], "t", {})
    assert [(f.name, f.taken_up, f.obstacle is None) for f in view.fields] == [
        ("new", False, True), ("rescued", False, False),
    ]  # fmt: skip
    assert view.schema is not None and view.schema.endswith("platform STRING, new STRING")


def test_without_drift_nothing_is_to_be_done(capsys: pytest.CaptureFixture[str]) -> None:
    counted, before = row("2026-11-21T00", 0), replace(row("2026-11-21T01", 10), unknown=None)
    view = drift_of(stream(), [counted, before], "t", {})
    assert (view.fields, view.schema, view.commands) == ([], None, [])
    print_text(drift_text(view))
    assert "no unknown fields" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, None), (True, "BOOLEAN"), (1, "BIGINT"), (2**63, "DECIMAL(38,0)"), (1.0, "DOUBLE"),
        ("x", "STRING"), ("2026-11-21T03:00:00Z", "TIMESTAMP"), ("2026-11-21", "DATE"),
        ([1, 2.5, None], "ARRAY<DOUBLE>"), ([], "ARRAY<STRING>"),
        ([[1], ["x"]], "ARRAY<ARRAY<STRING>>"), ({"a": 1}, "STRING"), (1795860000, "BIGINT"),
        ("28.11.2026", "STRING"),
    ],
)  # fmt: skip
def test_a_type_is_guessed_wide(value: object, kind: str | None) -> None:
    assert guess_type([value]) == kind


def test_types_that_differ_are_text() -> None:
    pairs = (("BIGINT", "DOUBLE"), (None, "DATE"), ("BIGINT", "STRING"))
    assert [combine(*pair) for pair in pairs] == ["DOUBLE", "DATE", "STRING"]


@pytest.mark.parametrize("form", ["object", "payload", "text", "before"])
def test_samples_of_rows_in_an_envelope_are_of_the_row(form: str) -> None:
    of_row = {"id": 1, "source": "web", "ts_ms": "noon", "new": 5}
    change: dict[str, Any] = {"after": of_row, "op": "c", "source": {"lsn": 5}, "ts_ms": 1}
    if form == "text":
        change["after"] = json.dumps(of_row)
    if form == "before":
        change = {**change, "before": of_row, "after": None}
    sent = {"schema": {}, "payload": change} if form == "payload" else change
    found = UnknownNames()
    found.add(["source", "ts_ms", "new"], {(0, 1): pa.scalar(json.dumps(sent).encode())})
    counted = sum_unknown(found, "debezium").fields
    assert {one.name: (one.sample, one.type) for one in counted} == {
        "new": ("9", "BIGINT"), "source": ('"aaa"', "STRING"), "ts_ms": ('"aaaa"', "STRING"),
    }  # fmt: skip


def test_samples_are_short_and_need_no_readable_value() -> None:
    one = UnknownField("a", 2, (0, 0), (0, 9))
    taken = sampled(one, [{"a": None}, {"b": 1}, {"a": "x" * 1000}])
    assert taken.sample is not None and len(taken.sample) == 81 and taken.type == "STRING"
    assert sampled(one, [{"b": 1}]) == one
    inside = replace(one, name="a.b[].c{}.d.e")
    taken = sampled(inside, [{"a": 1}, {"a": {"b": [None, {"c": {"k": {"d.e": 5}, "l": 1}}]}}])
    assert (taken.sample, taken.type) == ("9", "BIGINT")
    # A secret does not reach the ledger.
    auth = UnknownField("auth", 1, (0, 0), (0, 0))
    taken = sampled(auth, [{"auth": {"token": "hunter2", "pin": 4711}}])
    assert taken.sample == '{"token": "aaaaaa9", "pin": 9999}' and taken.type is not None
    assert parsed(b'\0\0\0\0\x01{"a": 1}') == {"a": 1}
    assert [parsed(value) for value in (b"", b"[1]", b"\xff", b"[" * 100_000)] == [None] * 4


@pytest.mark.parametrize(
    ("sample", "shape"),
    [
        ('"eyJhbGciOiJIUzI1NiJ9.x-1"', '"aaAaaAaaAaAAAaA9AaA9.a-9"'),
        ('"2026-11-21T03:00:00Z"', '"9999-99-99A99:99:99A"'),
        ('"\\u00e9\\n\\"\\\\ \u00c9"', '"a\\n\\"\\\\ A"'),
        ("-12.5e-3", "-99.9e-9"),
        ("true", "true"),
        ("null", "null"),
        (
            '{"password": "hunter2", "n": [1, null, {"k": "x"}]}',
            '{"password": "aaaaaa9", "n": [9, null, {"k": "a"}]}',
        ),
        ('"hunter2 cut sho\u2026', '"aaaaaa9 aaa aaa\u2026'),
    ],
)
def test_a_sample_shows_the_shape_of_a_value_and_not_the_value(sample: str, shape: str) -> None:
    assert shape_of(sample) == shape == shape_of(shape)


def test_the_ledger_keeps_them() -> None:
    reported = row("2026-11-21T00", 0, field("a"), field("b", sample=None, kind=None), others=3)
    assert LedgerRow.from_waiting(reported.as_waiting()) == reported


def test_a_field_that_the_subject_lacks_is_added_by_the_subject_alone() -> None:
    of_subject = stream().model_copy(update={"subject_schema": SubjectSchema()})
    view = drift_of(of_subject, [row("2026-11-21T00", 0, field("new"), field("level"))], "t", {})
    why = f"register a version of subject {of_subject.topic}-value that has the field"
    assert {f.name: f.obstacle for f in view.fields} == {"new": why, "level": None}
    assert view.schema is None and [c.split()[1] for c in view.commands] == ["batch"]
