"""`select` of a stream's file: which columns its table gets, and which expressions may be among
them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from anabranch import config
from anabranch.common.errors import ConfigurationError
from anabranch.config.columns import parse_columns
from anabranch.config.select import FUNCTIONS, parse_expression, parse_select

DDL = (
    "id STRING NOT NULL, at TIMESTAMP NOT NULL, email STRING, level INT, tags ARRAY<STRING>, "
    "geo STRUCT<country: STRING>"
)
FIELDS = {column.name: column for column in parse_columns(DDL)}
SELECT = [
    "id",
    "at",
    {"player": "level"},
    {"mail": {"hash": "lower(email)"}},
    {"initial": {"truncate": "email", "to": 1}},
    {"hour": {"truncate": "at", "to": "hour"}},
    {"country": {"sql": "upper(geo.country)", "type": "STRING"}},
    {"key": {"kafka": "key", "type": "STRING"}},
    {"headers": {"kafka": "headers"}},
    {"trace": {"header": "trace-id"}},
]


def test_the_columns_of_a_table_by_its_select() -> None:
    selected = parse_select(SELECT, parse_columns(DDL))
    assert [(s.name, s.type, s.nullable, s.fields) for s in selected] == [
        ("id", "string", False, ("id",)),
        ("at", "timestamp", False, ("at",)),
        ("player", "int", True, ("level",)),
        ("mail", "string", True, ("email",)),
        ("initial", "string", True, ("email",)),
        ("hour", "timestamp", True, ("at",)),
        ("country", "string", True, ("geo",)),
        ("key", "string", True, ()),
        ("headers", "array<struct<key:string,value:binary>>", True, ()),
        ("trace", "string", True, ()),
    ]
    assert [s.name for s in selected if s.masks] == ["mail"]


@pytest.mark.parametrize(
    ("text", "sql"),
    [
        ("lower(email)", "collate(lower(collate(`_row_email`, 'UNICODE')), 'UTF8_BINARY')"),
        ("EMAIL || 'email'", "`_row_email` || 'email'"),
        ("geo.country", "`_row_geo`.country"),
        ("tags[0]", "`_row_tags`[0]"),
        ("CAST(level AS DECIMAL(10, 2)) * 2.5", "CAST(`_row_level` AS DECIMAL(10, 2)) * 2.5"),
        ("CASE WHEN level > 3 THEN 'it''s' END", "CASE WHEN `_row_level` > 3 THEN 'it''s' END"),
        ("CAST(at AS DATE) >= DATE '2026-11-01'", "CAST(`_at_at` AS DATE) >= DATE '2026-11-01'"),
        (
            "coalesce(email, CAST(kafka_key AS STRING))",
            "coalesce(`_row_email`, try_validate_utf8(CAST(kafka_key AS STRING)))",
        ),
        (
            "TRY_CAST(CAST( (level) as string) || 'x' AS STRING)",
            "try_validate_utf8(TRY_CAST(try_validate_utf8(CAST( (`_row_level`) as string)) || 'x' "
            "AS STRING))",
        ),
        (
            "level IN (1, 2) AND NOT (email IS NULL)",
            "`_row_level` IN (1, 2) AND NOT (`_row_email` IS NULL)",
        ),
        ("left(email, 2)", "left(`_row_email`, 2)"),
    ],
)
def test_an_expression_is_kept_as_it_is_but_for_its_fields(text: str, sql: str) -> None:
    assert parse_expression(text, FIELDS).sql == sql


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("rand()", "found 'rand'"),
        ("current_timestamp()", "found 'current_timestamp'"),
        ("current_date", "found 'current_date'"),
        ("regexp_replace(email, '@.*', '')", "found 'regexp_replace'"),
        ("email LIKE '%a'", "found 'LIKE'"),
        ("raise_error('x')", "found 'raise_error'"),
        ("repeat(email, level)", "found 'repeat'"),
        ("reflect('java.lang.System', 'exit')", "found 'reflect'"),
        ("sum(level)", "found 'sum'"),
        ("row_number() OVER (ORDER BY id)", "row_number"),
        ("(SELECT 1)", "expected one expression"),
        ("*", "expected one expression"),
        ("count(*)", "expected one expression"),
        ("email AS other", "expected one expression"),
        ("id, email", "expected an expression of Spark SQL"),
        ("transform(tags, x -> x)", "expected one expression"),
        ("missing", "expected a field of the schema or one of"),
        ("CAST(email AS TIMESTAMP)", "expected a cast to one of"),
        ("email::int", "found '::'"),
        ("level -- all of it", "without '--'"),
        ("level /* x */", "without"),
        ('"email"', "without"),
        ("`email`", "without"),
        ("'${system:user.home}'", "without"),
        (r"'a\b'", "without"),
        ("lower(email", "expected an expression of Spark SQL"),
        ("INTERVAL 1 DAY", "INTERVAL"),
        ("", "expected an expression of Spark SQL"),
        (7, "expected an expression of Spark SQL"),
    ],
)
def test_what_no_expression_may_be(text: object, found: str) -> None:
    with pytest.raises(ValueError, match="(?s)" + found.replace("(", r"\(").replace("*", r"\*")):
        parse_expression(text, FIELDS)


def test_no_function_depends_on_the_present_or_on_chance_or_exhausts_the_stack() -> None:
    unsafe = """
        rand randn uuid now current_date current_timestamp regexp_extract regexp_replace rlike like repeat lpad rpad
        space sequence array_repeat replace element_at split_part timestamp_seconds add_months to_timestamp trunc
        substring_index date_add date_sub flatten try_to_binary decode session_user monotonically_increasing_id
    """
    assert not FUNCTIONS & {*unsafe.split()}


def test_a_truncated_field_is_found_whatever_its_case() -> None:
    [selected] = parse_select([{"a": {"truncate": "AT", "to": "day"}}], parse_columns(DDL))
    assert (selected.type, selected.fields) == ("timestamp", ("at",))


@pytest.mark.parametrize(
    ("select", "found"),
    [
        ([], "expected a list of columns"),
        ({"id": "id"}, "expected a list of columns"),
        (["id", {"ID": "id"}], "expected each column once, found 'id' twice"),
        (["missing"], "missing: expected a field of the schema, found 'missing'"),
        ([{"a": "lower(email)"}], "a: expected a field of the schema"),
        ([{"a": {"sql": "level"}}], "a: type: "),
        (
            [{"a": {"sql": "level", "type": "ARRAY<INT>"}}],
            "a: type: expected a type without fields",
        ),
        (
            [{"a": {"sql": "level", "type": "INT NOT NULL"}}],
            "a: type: expected a type without fields",
        ),
        ([{"a": {"hash": "at"}}], "a: hash: expected a STRING, BINARY, INT"),
        ([{"a": {"hash": "AT"}}], "a: hash: expected a STRING, BINARY, INT"),
        ([{"a": {"truncate": "level", "to": 2}}], "a: to: expected one of day, hour"),
        ([{"a": {"truncate": " LEVEL ", "to": 2}}], "a: to: expected one of day, hour"),
        ([{"a": {"truncate": "at", "to": "week"}}], "a: to: expected a number of characters, or"),
        ([{"a": {"truncate": "email", "to": 0}}], "a: to: expected a number of characters"),
        ([{"a": {"kafka": "offset"}}], "a: kafka: expected one of key, headers, topic"),
        ([{"a": {"kafka": "topic", "type": "STRING"}}], "a: type: expected none"),
        ([{"a": {"header": "it's"}}], "a: header: expected the name of a header"),
        ([{"a": {"hash": "email", "key": "x"}}], "a: expected hash, found 'key'"),
        ([{"a": {"hash": "email", "sql": "x"}}], "a: expected one of sql, hash"),
        ([{"rescued": "id"}], "expected names other than rescued"),
        ([{"a-b": "id"}], "expected a column name of letters"),
        ([{"a": "id", "b": "id"}], "expected a name, or one name with"),
    ],
)
def test_what_no_select_may_be(select: object, found: str) -> None:
    with pytest.raises(ValueError, match=found):
        parse_select(select, parse_columns(DDL))


def write(folder: Path, masking: dict[str, str] | None = None, **values: Any) -> Path:
    (folder / "streams").mkdir()
    kafka, catalog = (
        {"bootstrap_servers": "localhost:9092"},
        {"name": "lake", "uri": "sqlite:///x", "warehouse": "s3://l/w"},
    )
    environment: dict[str, Any] = {"kafka": kafka, "catalog": catalog} | (
        {"masking": masking} if masking else {}
    )
    (folder / "anabranch.yaml").write_text(yaml.safe_dump(environment))
    stream: dict[str, Any] = {
        "topic": "events",
        "table": "games.events",
        "schema": DDL,
        "key": "id",
    } | values
    (folder / "streams" / "events.yaml").write_text(yaml.safe_dump(stream))
    return folder


def test_a_streams_table_has_the_selected_columns_and_its_records_those_of_the_schema(
    tmp_path: Path,
) -> None:
    folder = write(
        tmp_path,
        {"secret": "0123456789abcdef"},
        select=SELECT,
        unknown="rescue",
        event_time={"column": "at"},
    )
    stream = config.load_stream("events", folder)
    assert [c.name for c in stream.columns] == [
        next(iter(s)) if isinstance(s, dict) else s for s in SELECT
    ] + ["rescued"]
    assert [c.name for c in stream.record_columns] == list(FIELDS)
    assert stream.masks


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"select": SELECT}, "masking.secret: expected the secret of the columns"),
        ({"select": ["at"]}, "key: expected a column of the schema, found 'id'"),
        (
            {"select": ["id", "missing"]},
            "events.yaml: select: missing: expected a field of the schema",
        ),
        ({"select": ["id", {"time": "at"}], "event_time": {"column": "at"}}, "event_time.column"),
        (
            {
                "select": ["id", {"at": {"truncate": "at", "to": "day"}}],
                "event_time": {"column": "at"},
            },
            "select: expected the event time at unchanged",
        ),
        ({"fields": []}, "events.yaml: fields: expected no such key, found it; remove it"),
        (
            {"select": ["id"], "schema": "registry", "format": "avro"},
            "select: expected columns in schema, found registry",
        ),
    ],
)
def test_what_no_stream_may_select(values: dict[str, Any], found: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=found):
        config.load_stream("events", write(tmp_path, **values))


def test_a_secret_is_long_enough_and_in_no_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"masking\.secret") as error:
        config.load_environment(write(tmp_path, {"secret": "too short"}))
    assert "too short" not in str(error.value)
