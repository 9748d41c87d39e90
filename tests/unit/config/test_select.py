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


def test_a_secret_is_long_enough_and_in_no_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"masking\.secret") as error:
        config.load_environment(write(tmp_path, {"secret": "too short"}))
    assert "too short" not in str(error.value)
