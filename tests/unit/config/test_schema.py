"""`schema` as a mapping, and the forms of times."""

import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml
from conf_folders import write_environment, write_stream
from hypothesis import given
from hypothesis import strategies as st

from anabranch.config import Stream, SubjectSchema, load_family, load_stream
from anabranch.config.columns import Column, Notation, parse_columns
from anabranch.config.schema import columns_mapping, parse_pattern, parse_schema
from anabranch.decode import values

SCHEMA = {
    "id": "STRING NOT NULL",
    "at": {"type": "TIMESTAMP NOT NULL", "from": "@timestamp", "unit": "millis"},
    "action": {"type": "STRING", "from": ["event.action", "name"]},
    "logged": {"type": "STRUCT<date: TIMESTAMP>", "format": "%d/%b/%Y:%H:%M:%S %z"},
    "day": {"type": "DATE", "unit": "days", "from": "payload.after.day"},
    "total": {"type": "DECIMAL(12,2)", "decimal": ","},
}


def test_a_mapping_has_what_ddl_has_and_where_and_how() -> None:
    columns = parse_schema(SCHEMA)
    assert columns == (
        Column("id", "string", False),
        Column("at", "timestamp", False, False, ("@timestamp",), Notation(unit="millis")),
        Column("action", "string", True, False, ("event.action", "name")),
        Column("logged", "struct<date:timestamp>", True, False, (), Notation("", "%d/%b/%Y:%H:%M:%S %z")),
        Column("day", "date", True, False, ("payload", "after", "day"), Notation(unit="days")),
        Column("total", "decimal(12,2)", True, False, (), Notation(decimal=",")),
    )  # fmt: skip
    assert parse_schema(columns_mapping(columns)) == columns
    plain = {"id": "STRING NOT NULL", "n": {"type": "INT"}}
    assert parse_schema(plain) == parse_columns("id STRING NOT NULL, n INT")


def test_a_definition_has_where_and_how(tmp_path: Path) -> None:
    """The hazard: an erasure by a column that then reads another field would find no record."""
    write_environment(tmp_path)

    def load(**more: object) -> Stream:
        write_stream(tmp_path, "s", schema=SCHEMA, **more)
        return load_stream("s", tmp_path)

    plain = load()
    assert plain.ddl.startswith("id STRING NOT NULL, at TIMESTAMP NOT NULL, action STRING, ")
    assert plain.source_of("id") == '"id"'
    assert plain.source_of("at") == '{"from": ["@timestamp"], "unit": "millis"}'
    selected = load(select=["id", "at", {"why": {"sql": "lower(action)", "type": "STRING"}}])
    assert selected.source_of("id") == '"id"'
    assert selected.source_of("at") == '["at", {"at": {"from": ["@timestamp"], "unit": "millis"}}]'
    assert '{"action": {"from": ["event.action", "name"]}}' in selected.source_of("why")


FORMS = (
    "%d/%b/%Y:%H:%M:%S %z", "%Y-%m-%d %H:%M:%S.%f", "%Y%m%d%H%M%S", "%a, %d %B %Y %I:%M:%S %p",
    "%m/%d/%y %H:%M", "%A %d.%m.%Y",
)  # fmt: skip
ZONES = st.integers(-17 * 60, 17 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))


def micros(form: str, text: str) -> int | None:
    pattern = parse_pattern(form)
    iso = pattern.iso(text)
    try:
        return values.timestamp((iso or "") if pattern.has_clock else f"{iso}T00:00:00Z")
    except values.Unreadable:
        return None


def expected(form: str, text: str) -> int | None:
    try:
        at = datetime.strptime(text, form)
    except ValueError:
        return None
    return values.micros_of(at if at.tzinfo is not None else at.replace(tzinfo=UTC))


@given(
    st.sampled_from(FORMS),
    st.datetimes(datetime(1970, 1, 2), datetime(2068, 12, 30), timezones=ZONES),
)
def test_a_time_in_a_form_is_what_python_reads(form: str, at: datetime) -> None:
    text = at.strftime(form)
    assert micros(form, text) == expected(form, text) is not None


@given(
    st.sampled_from(FORMS),
    st.datetimes(datetime(1970, 1, 2), datetime(2068, 12, 30)),
    st.integers(0, 40),
    st.sampled_from([*"0123456789: ./-+aZ\n\u0663", ""]),
)
def test_other_text_is_what_python_reads(form: str, at: datetime, place: int, more: str) -> None:
    text = at.replace(tzinfo=UTC).strftime(form)
    text = text[:place] + more + text[place + (not more) :]
    # Python takes six digits of a fraction, this nine, of which it cuts three.
    as_python = re.sub(r"([.][0-9]{6})[0-9]{1,3}$", r"\1", text)
    assert micros(form, text) in (None, expected(form, as_python))


@pytest.mark.parametrize(
    ("form", "text", "iso"),
    [
        ("%d/%m/%Y", "1/2/2026", "2026-02-01"),
        ("%b %d %Y %H:%M:%S", "Nov  8 2026 03:04:05", "2026-11-08T03:04:05.0Z"),
        ("%Y-%m-%dT%H:%M:%S,%f", "2026-11-08T03:04:05,123456789", "2026-11-08T03:04:05.123456Z"),
        ("%d %B %Y 100%% %H h %z", "8 november 2026 100% 7 h +01", "2026-11-08T07:00:00.0+01:00"),
        ("%I %p %d %b %y", "12 am 8 Nov 69", "1969-11-08T00:00:00.0Z"),
        ("%Y%m%d", "2026118", None),
        ("%d/%m/%Y", "01/02/2026 ", None),
        ("%d/%m/%Y", "\u0660\u0661/02/2026", None),
        ("%I %p %d %b %y", "13 am 8 Nov 69", None),
    ],
)
def test_forms(form: str, text: str, iso: str | None) -> None:
    assert parse_pattern(form).iso(text) == iso


# `schema: registry` in a stream's file: its forms, and its mistakes by file and key.


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    write_environment(tmp_path, registry={"url": "http://r:1"})
    return tmp_path


def load(conf: Path, **values: Any) -> Stream:
    write_stream(conf, "orders", **{"topic": "shop.orders", "format": "avro"} | values)
    return load_stream("orders", conf)


def test_a_registry_is_the_schema_of_files_defaults_and_families(conf: Path) -> None:
    plain = load(conf, schema="registry", event_time={"column": "at"}, files={"sort": "at"})
    assert plain.lacks_columns and plain.subject == "shop.orders-value"
    rules = {"columns": "at TIMESTAMP NOT NULL", "exclude": "debug"}
    stream = load(conf, schema=rules, format={"type": "json_schema", "subject": "s"})
    assert stream.subject_schema is not None and stream.subject == "s"
    assert stream.subject_schema.columns == (Column("at", "timestamp", False),)
    assert stream.subject_schema.exclude == ("debug",)
    assert not load(conf, schema="id STRING").lacks_columns
    (conf / "defaults.yaml").write_text(yaml.safe_dump({"schema": {"exclude": ["debug"]}}))
    own = load(conf, schema={"columns": "n INT"}).subject_schema
    assert own is not None and own.exclude == ("debug",) and own.columns[0].name == "n"
    family = {
        "topics": {"pattern": "app-(.*)"}, "table": "raw.{1}", "format": "avro", "key": "id",
        "schema": "registry",
    }  # fmt: skip
    (conf / "streams" / "app.yaml").write_text(yaml.safe_dump(family))
    assert load_family("app", conf).build("app-a.b").subject == "app-a.b-value"
    columns = {"at": {"type": "TIMESTAMP", "from": "ts", "unit": "millis"}}
    subject = SubjectSchema.model_validate({"columns": columns})
    plain_file = {"name": "s", "topic": "t", "table": "a.b", "key": "id", "schema": "registry", "columns": ()}  # fmt: skip
    of_subject = {"subject_schema": subject, "format": {"type": "json_schema"}}
    given = Stream.model_validate(plain_file | of_subject)
    read = given.with_columns(parse_columns("id STRING NOT NULL, at TIMESTAMP"))
    assert read.columns == parse_schema({"id": "STRING NOT NULL", **columns})
