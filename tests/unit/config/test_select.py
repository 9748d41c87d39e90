"""`select` of a stream's file: the columns of its table, and the expressions that it allows."""

from pathlib import Path
from typing import Any

import duckdb
import pytest
from conf_folders import write_environment, write_stream

from anabranch import config
from anabranch.common.errors import ConfigurationError
from anabranch.config.columns import parse_columns
from anabranch.config.select import REFUSED_FUNCTIONS, connection, functions, parse_select

DDL = (
    "id STRING NOT NULL, at TIMESTAMP NOT NULL, email STRING, level INT, tags ARRAY<STRING>, "
    "geo STRUCT<country: STRING>"
)
# Each selected column: its name, type and nullability, and the fields that it reads.
SELECT: list[tuple[Any, tuple[str, str, bool, tuple[str, ...]]]] = [
    ("id", ("id", "string", False, ("id",))),
    ("at", ("at", "timestamp", False, ("at",))),
    ({"player": "level"}, ("player", "int", True, ("level",))),
    ({"mail": {"hash": "lower(email)"}}, ("mail", "string", True, ("email",))),
    ({"initial": {"truncate": "email", "to": 1}}, ("initial", "string", True, ("email",))),
    ({"hour": {"truncate": '"AT"', "to": "hour"}}, ("hour", "timestamp", True, ("at",))),
    ({"country": {"sql": "upper(geo.country)", "type": "STRING"}}, ("country", "string", True, ("geo",))),
    ({"key": {"kafka": "key", "type": "STRING"}}, ("key", "string", True, ())),
    ({"headers": {"kafka": "headers"}}, ("headers", "array<struct<key:string,value:binary>>", True, ())),
    ({"trace": {"header": "trace-id"}}, ("trace", "string", True, ())),
]  # fmt: skip


def test_the_columns_of_a_table_are_those_of_its_select(tmp_path: Path) -> None:
    selected = parse_select([written for written, _ in SELECT], parse_columns(DDL))
    found = [(s.name, s.type, s.nullable, s.fields) for s in selected]
    assert found == [column for _, column in SELECT]
    assert [s.name for s in selected if s.masks] == ["mail"]
    written_ones = [written for written, _ in SELECT]
    masking, time = {"secret": "0123456789abcdef"}, {"column": "at"}
    write_environment(tmp_path, masking=masking)
    values = {"select": written_ones, "unknown": "rescue", "event_time": time}
    write_stream(tmp_path, "events", schema=DDL, **values)
    stream = config.load_stream("events", tmp_path)
    assert [c.name for c in stream.columns] == [*[column[0] for _, column in SELECT], "rescued"]
    assert [c.name for c in stream.record_columns] == [c.name for c in parse_columns(DDL)]
    assert stream.masks


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


def test_functions_are_deterministic_and_reach_no_file() -> None:
    rows = connection().sql(
        "SELECT DISTINCT function_name FROM duckdb_functions() "
        "WHERE stability <> 'CONSISTENT' OR function_type NOT IN ('scalar', 'macro')"
    )
    assert not functions() & {name for (name,) in rows.fetchall()}
    assert not functions() & REFUSED_FUNCTIONS
    assert {"lower", "strptime", "regexp_extract", "json_extract", "+", "list_sum"} < functions()
    read, copy = "SELECT * FROM '/etc/passwd'", "COPY (SELECT 1) TO 'x'"
    for sql in (read, "SET memory_limit = '1TB'", copy):
        with pytest.raises(duckdb.Error):
            connection().execute(sql)


def test_a_secret_is_long_enough_and_in_no_message(tmp_path: Path) -> None:
    write_environment(tmp_path, masking={"secret": "too short"})
    with pytest.raises(ConfigurationError, match=r"masking\.secret") as error:
        config.load_environment(tmp_path)
    assert "too short" not in str(error.value)
