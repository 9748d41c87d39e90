"""A stream's columns by table, subject and file: a subject adds and widens alone."""

import json
from typing import Any

import pytest
from lakes import new_stream
from pyiceberg.schema import Schema

from anabranch.common.errors import ConfigurationError, Refused
from anabranch.config import EventTime, Stream, SubjectSchema
from anabranch.config.columns import columns_ddl, parse_columns
from anabranch.iceberg.schema_evolution import plan_evolution
from anabranch.iceberg.table_schemas import rows_columns, rows_schema
from anabranch.kafka.schema_registry import SubjectVersion
from anabranch.subjects.plan import plan_columns, table_columns


def stream(
    columns: str = "", exclude: tuple[str, ...] = (), kind: str = "avro", **more: Any
) -> Stream:
    said: dict[str, Any] = {"exclude": exclude} | ({"columns": columns} if columns else {})
    given = {"format": kind, "schema": "registry", "columns": (), "subject_schema": SubjectSchema(**said)}  # fmt: skip
    return new_stream(**given | more)


def version(*fields: tuple[str, Any], **more: Any) -> SubjectVersion:
    schema = {"type": "record", "name": "E", "fields": [{"name": n, "type": t} for n, t in fields]}
    return SubjectVersion("events-value", 1, "AVRO", json.dumps(schema), **more)


def table(ddl: str) -> Schema:
    return rows_schema(new_stream(schema=ddl))


def planned(of: Stream, subject: SubjectVersion, have: str | None = None) -> str:
    return columns_ddl(plan_columns(of, subject, table(have) if have is not None else None))


def refusal(of: Stream, subject: SubjectVersion, have: str | None = None) -> str:
    with pytest.raises(Refused) as refused:
        plan_columns(of, subject, table(have) if have is not None else None)
    return str(refused.value)


ID, KEY = ("id", "string"), "id STRING NOT NULL"
NESTED = {
    "type": "record", "name": "S", "fields": [{"name": "z", "type": "int"}, {"name": "a", "type": "long"}],
}  # fmt: skip


def test_a_new_table_has_the_fields_of_subject_and_file_in_a_bounded_number() -> None:
    assert planned(stream(), version(ID, ("n", ["null", "int"]))) == "id STRING NOT NULL, n INT"
    of = stream("n DOUBLE NOT NULL, legacy STRING NOT NULL, id STRING")
    columns = planned(of, version(ID, ("n", ["int", "float"])))
    assert columns == "id STRING, n DOUBLE NOT NULL, legacy STRING NOT NULL"
    found = planned(stream(exclude=("odd",)), version(ID, ("odd", ["int", "string"])))
    assert found == "id STRING NOT NULL"
    many = [(f"c{i}", "int") for i in range(1_000)]
    message = "version 1: expected at most 1000 columns of a table, found 1001; reduce the fields"
    assert message in refusal(stream(), version(ID, *many))
    # Also over several versions: a column of the table stays.
    assert message in refusal(stream(), version(ID, *many[500:]), columns_of(many[:500]))
    # A table that has more keeps them.
    assert planned(stream(), version(ID), columns_of(many)).count(",") == 1_000


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [
        (["null", "string", "long"], "n STRING", "n: expected a type readable as string, found long"),
        ("long", "n INT", "n: expected a type readable as int, found long"),
        ({"type": "array", "items": ["null"]}, "", "n[]: expected a type with values"),
    ],
)  # fmt: skip
def test_the_remedy_for_a_field_is_true(kind: Any, columns: str, message: str) -> None:
    """The hazard: a type in the file as which no record of the subject can be read."""
    said = refusal(stream(columns), version(ID, ("n", kind)))
    assert message in said and "exclude" in said and "NAME TYPE" not in said
    assert planned(stream(exclude=("n",)), version(ID, ("n", kind))) == KEY


@pytest.mark.parametrize(
    ("have", "fields", "wanted"),
    [
        ("id STRING NOT NULL, n INT", [ID, ("n", "int")], "id STRING NOT NULL, n INT"),
        (f"{KEY}, n INT", [ID, ("c", "string"), ("n", "long")], f"{KEY}, n BIGINT, c STRING"),
        (f"{KEY}, n BIGINT, d DOUBLE", [ID, ("n", "int"), ("d", "long")], f"{KEY}, n BIGINT, d DOUBLE"),
        (f"{KEY}, n INT NOT NULL", [ID], f"{KEY}, n INT"),
        ("id STRING, n INT", [ID], "id STRING, n INT"),
        (
            f"{KEY}, d DECIMAL(9,3)",
            [ID, ("d", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 1})], f"{KEY}, d DECIMAL(11,3)",
        ),
        (
            f"{KEY}, s STRUCT<a: INT, gone: STRING>, l ARRAY<BIGINT>",
            [ID, ("l", {"type": "array", "items": "int"}), ("s", NESTED)],
            f"{KEY}, s STRUCT<a:BIGINT,gone:STRING,z:INT>, l ARRAY<BIGINT>",
        ),
    ],
)  # fmt: skip
def test_a_table_takes_up_what_is_new_or_wider(have: str, fields: list[Any], wanted: str) -> None:
    before, of = table(have), stream()
    assert planned(of, version(*fields), have) == wanted
    after = of.with_columns(plan_columns(of, version(*fields), before))
    for change in plan_evolution("t", before, rows_columns(after)):
        assert change.plan_words("t")
    assert planned(of, version(*fields), after.ddl) == wanted


@pytest.mark.parametrize(
    ("have", "field", "message"),
    [
        (f"{KEY}, n INT", ("n", "string"), "column n: expected int or bigint, found string"),
        (f"{KEY}, n ARRAY<INT>", ("n", {"type": "array", "items": "string"}), "column n.element"),
        (f"{KEY}, n INT", ("n", {"type": "map", "values": "int"}), "column n: expected int"),
    ],
)
def test_a_type_of_no_column_is_refused(have: str, field: Any, message: str) -> None:
    of = stream()
    wanted = of.with_columns(plan_columns(of, version(ID, field), table(have)))
    with pytest.raises(Refused) as refused:
        plan_evolution("games.events", table(have), rows_columns(wanted))
    assert message in str(refused.value) and "subject events-value" in str(refused.value)


def columns_of(fields: list[tuple[str, str]]) -> str:
    return ", ".join([KEY, *(f"{name} INT" for name, _ in fields)])


def test_what_is_no_column_and_a_key_that_is_not_there_are_refused_with_the_subject() -> None:
    of_json = SubjectVersion("s", 1, "JSON", "{}", (("other.json", "{}"),))
    where = "stream events, subject events-value version 1: "
    json_stream = stream(kind="json_schema")
    for of, subject, message in (
        (stream(), version(ID, ("odd", ["null"])), f"{where}odd: expected a type with values, found a union of null"),
        (stream(), version(("n", "int")), f"{where}key: expected a field id, found n"),
        (stream(), version(ID, ("Kafka_Offset", "int")), "Kafka_Offset: expected names other"),
        (
            stream(), version(ID, ("Kafka_Offset", "int")),
            "{columns: {OTHER: {type: TYPE, from: NAME}}, exclude: [NAME]}",
        ),
        (stream(), version(ID, ("ID", "int")), "ID: expected names that differ by more than case"),
        (json_stream, of_json, "expected a schema that stands alone"),
        (json_stream, version(ID), "expected type JSON with format json_schema, found AVRO"),
    ):  # fmt: skip
        assert message in refusal(of, subject)
    inner = {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]}  # fmt: skip
    # A field that is left out has to be read over all the same.
    for of in (stream(), stream(exclude=("odd",))):
        recursive = refusal(of, version(ID, ("odd", inner)))
        assert "expected no type that contains itself, found Node" in recursive
        assert recursive.endswith("with `format: raw`") and "exclude" not in recursive
    rescues = stream(kind="json_schema", unknown="rescue")
    properties = {"id": {"type": "string"}, "Rescued": {"type": "string"}}
    schema = json.dumps({"type": "object", "properties": properties})
    assert "Rescued: expected names other" in refusal(rescues, SubjectVersion("s", 1, "JSON", schema))  # fmt: skip


def test_a_field_that_differs_from_one_of_the_table_by_case_alone_is_refused() -> None:
    amount = refusal(stream(), version(ID, ("amount", "int")), f"{KEY}, Amount INT")
    found = (
        "expected names that differ by more than case, found Amount and amount, of the table and"
    )
    assert f"amount: {found}" in amount and "(`schema: {exclude: [NAME]}`)" in amount
    inner = {"type": "record", "name": "S", "fields": [{"name": "A", "type": "int"}]}
    for kind, have, path in (
        (inner, "struct<a:int>", "s.A"),
        ({"type": "array", "items": inner}, "array<struct<a:int>>", "s[].A"),
        ({"type": "map", "values": inner}, "map<string,struct<a:int>>", "s{}.A"),
    ):
        said = refusal(stream(), version(ID, ("s", kind)), f"{KEY}, s {have}")
        assert f"{path}: expected names that differ by more than case, found a and A" in said
    # Left out of the subject, the column of the table stays.
    excluded, subject = stream(exclude=("amount",)), version(ID, ("amount", "int"))
    assert planned(excluded, subject, f"{KEY}, Amount INT") == f"{KEY}, Amount INT"


def test_the_columns_of_a_table_are_the_streams_with_the_rescued_one() -> None:
    ddl = "id STRING NOT NULL, n DECIMAL(9,2), s STRUCT<Z:INT,a:ARRAY<MAP<STRING,DATE>>>"
    assert columns_ddl(table_columns(table(ddl))) == ddl
    assert stream().with_columns(table_columns(table(ddl))).ddl == ddl
    of = stream(event_time=EventTime(column="at"))
    assert of.lacks_columns
    found = r"event_time\.column: expected a column of type TIMESTAMP, found at STRING"
    with pytest.raises(ConfigurationError, match=found):
        of.with_columns(parse_columns("id STRING NOT NULL, at STRING"))
    assert not of.with_columns(parse_columns("id STRING NOT NULL, at TIMESTAMP")).lacks_columns
    rescuing = stream(kind="json_schema", unknown="rescue")
    schema = {"type": "object", "properties": {"id": {"type": "string"}}}
    subject = SubjectVersion("s", 1, "JSON", json.dumps(schema))
    first = rescuing.with_columns(plan_columns(rescuing, subject))
    assert [c.name for c in first.columns] == ["id", "rescued"]
    assert (
        rescuing.with_columns(plan_columns(rescuing, subject, rows_schema(first))).columns
        == first.columns
    )
