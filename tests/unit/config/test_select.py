"""`select` of a stream's file: which columns its table gets, and which expressions may be among
them."""

from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml

from anabranch import config
from anabranch.common.errors import ConfigurationError
from anabranch.config.columns import parse_columns
from anabranch.config.select import REFUSED_FUNCTIONS, connection, functions, parse_select

DDL = (
    "id STRING NOT NULL, at TIMESTAMP NOT NULL, email STRING, level INT, tags ARRAY<STRING>, "
    "geo STRUCT<country: STRING>"
)
SELECT = [
    "id",
    "at",
    {"player": "level"},
    {"mail": {"hash": "lower(email)"}},
    {"initial": {"truncate": "email", "to": 1}},
    {"hour": {"truncate": '"at"', "to": "hour"}},
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
    ("text", "kind", "fields"),
    [
        ("lower(email)", "STRING", ["email"]),
        ("EMAIL || 'email' -- a comment", "STRING", ["email"]),
        ("geo.country", "STRING", ["geo"]),
        ("tags[1]", "STRING", ["tags"]),
        ("list_sum([level, 1])", "BIGINT", ["level"]),
        ("list_transform(tags, lambda t: t || email)", "ARRAY<STRING>", ["tags", "email"]),
        ("[upper(t) for t in tags if t <> '']", "ARRAY<STRING>", ["tags"]),
        ("{'level': level}", "STRUCT<level: INT>", ["level"]),
        ("regexp_extract(email, '@(.*)', 1)", "STRING", ["email"]),
        ("strptime(email, '%d/%b/%Y:%H:%M:%S %z')", "TIMESTAMP", ["email"]),
        ("make_timestamp(level)", "TIMESTAMP", ["level"]),
        ('"at" + INTERVAL 1 DAY', "TIMESTAMP", ["at"]),
        ("email ->> '$.name'", "STRING", ["email"]),
        ("email::JSON -> '$.name'", "STRING", ["email"]),
        ("level", "BIGINT", ["level"]),
        ("kafka_offset + kafka_partition", "INT", []),
        ("CASE WHEN level > 3 THEN 'it''s' END", "STRING", ["level"]),
        ("coalesce(email, decode(kafka_key), kafka_topic)", "STRING", ["email"]),
    ],
)
def test_an_expression_reads_fields_and_has_a_type(text: str, kind: str, fields: list[str]) -> None:
    [selected] = parse_select([{"x": {"sql": text, "type": kind}}], parse_columns(DDL))
    assert list(selected.fields) == fields


def test_what_duckdb_calls_not_deterministic_is_no_function() -> None:
    rows = connection().sql(
        "SELECT DISTINCT function_name FROM duckdb_functions() "
        "WHERE stability <> 'CONSISTENT' OR function_type NOT IN ('scalar', 'macro')"
    )
    assert not functions() & {name for (name,) in rows.fetchall()}
    assert not functions() & REFUSED_FUNCTIONS
    assert {"lower", "strptime", "regexp_extract", "json_extract", "+", "list_sum"} < functions()


def test_expressions_reach_no_file_and_no_setting() -> None:
    for sql in (
        "SELECT * FROM '/etc/passwd'",
        "SET memory_limit = '1TB'",
        "COPY (SELECT 1) TO 'x'",
    ):
        with pytest.raises(duckdb.Error):
            connection().execute(sql)


def test_a_truncated_field_is_found_whatever_its_case() -> None:
    [selected] = parse_select([{"a": {"truncate": '"AT"', "to": "day"}}], parse_columns(DDL))
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
        "topic": "events", "table": "games.events", "schema": DDL, "key": "id",
    } | values  # fmt: skip
    (folder / "streams" / "events.yaml").write_text(yaml.safe_dump(stream))
    return folder


def test_a_table_has_the_selected_columns_and_records_the_schemas(tmp_path: Path) -> None:
    folder = write(
        tmp_path, {"secret": "0123456789abcdef"}, select=SELECT, unknown="rescue",
        event_time={"column": "at"},
    )  # fmt: skip
    stream = config.load_stream("events", folder)
    assert [c.name for c in stream.columns] == [
        next(iter(s)) if isinstance(s, dict) else s for s in SELECT
    ] + ["rescued"]
    assert [c.name for c in stream.record_columns] == [c.name for c in parse_columns(DDL)]
    assert stream.masks


def test_a_secret_is_long_enough_and_in_no_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"masking\.secret") as error:
        config.load_environment(write(tmp_path, {"secret": "too short"}))
    assert "too short" not in str(error.value)
