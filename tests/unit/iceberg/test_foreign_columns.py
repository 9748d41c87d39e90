"""Columns that another program drops or renames come back with their values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from brokers import Broker
from lakes import FIRST, StreamLake, new_lake, new_stream, stage
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema, index_name_by_id
from pyiceberg.table.update.schema import UpdateSchema
from pyiceberg.types import IcebergType, IntegerType, LongType, NestedField, StringType, StructType

from anabranch.common.errors import Refused, Terminal
from anabranch.config import Stream
from anabranch.iceberg.foreign_columns import plan_foreign_changes, restored
from anabranch.protocol import apply as tables
from anabranch.protocol.apply import require_columns

DDL = "id STRING NOT NULL, n INT, s STRUCT<a: INT, b: STRING>, items ARRAY<STRUCT<x: INT, y: INT>>"
VALUES = {"id": "e", "n": 7, "s": {"a": 1, "b": "two"}, "items": [{"x": 3, "y": 4}]}


def apply(one: StreamLake, stream: Stream, rolled_back: bool = False) -> list[str]:
    return tables.apply(
        one.environment, stream, one.lake, Broker().adapter, rolled_back=rolled_back
    )


def publish(one: StreamLake, offset: int, **values: Any) -> None:
    own = {"kafka_partition": 0, "kafka_offset": offset, "ingest_hour": FIRST, "event_date": 1}
    staged = stage(one.lake, one.name, [own | values])
    one.land(one.speed(staged, {0: offset + 1}))


@pytest.fixture
def one(tmp_path: Path) -> StreamLake:
    made = new_lake(tmp_path)
    apply(made, new_stream(schema=DDL))
    publish(made, 1, **VALUES)
    return made


def alter(one: StreamLake, name: str, change: Callable[[UpdateSchema], Any]) -> None:
    """A change of the schema by another program."""
    with one.lake.catalog.load_table(name).update_schema(allow_incompatible_changes=True) as update:
        change(update)


def content(one: StreamLake) -> list[dict[str, Any]]:
    rows = one.table().scan().to_arrow().to_pylist()
    return [{name: row[name] for name in VALUES} for row in sorted(rows, key=lambda r: r["id"])]


CHANGES: dict[str, tuple[Callable[[UpdateSchema], Any], str]] = {
    "dropped": (lambda u: u.delete_column("n"), "dropped column n"),
    "renamed": (lambda u: u.rename_column("n", "m"), "renamed column n of games.events to m"),
    "a field dropped": (lambda u: u.delete_column("s.b"), "dropped column s.b"),
    "a field renamed": (lambda u: u.rename_column("s.a", "z"), "renamed column s.a of games.events to s.z"),
    "a field of an array dropped": (lambda u: u.delete_column("items.element.y"), "dropped column items.element.y"),
    "a struct dropped": (lambda u: u.delete_column("s"), "dropped column s of"),
    "a column of ours renamed": (lambda u: u.rename_column("kafka_timestamp", "at"), "renamed column kafka_timestamp of games.events to at"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_apply_undoes_what_another_program_did(one: StreamLake, name: str) -> None:
    change, words = CHANGES[name]
    before = one.table().schema()
    alter(one, one.name, change)

    with pytest.raises(Terminal) as ended:
        require_columns(one.table(), new_stream(schema=DDL))
    assert f"another program {words}" in str(ended.value)
    assert "run `anabranch apply events`" in str(ended.value)
    assert "nothing is lost" not in str(ended.value)

    [done] = apply(one, new_stream(schema=DDL))
    assert "another program had " in done
    require_columns(one.table(), new_stream(schema=DDL))
    after = one.table().schema()
    assert {f.name: f.field_id for f in after.fields} == {f.name: f.field_id for f in before.fields}
    assert content(one) == [VALUES]
    publish(one, 2, **(VALUES | {"id": "f"}))
    assert content(one) == [VALUES, VALUES | {"id": "f"}]
    assert apply(one, new_stream(schema=DDL)) == []


@pytest.mark.parametrize(
    ("name", "added"),
    [
        ("n", None), ("s", None), ("s.b", None), ("kafka_offset", None), ("id", StringType()),
        ("kafka_offset", LongType()),
    ],
)  # fmt: skip
def test_columns_without_rows_return(tmp_path: Path, name: str, added: IcebergType | None) -> None:
    """`added`: the other program added it again, without its NOT NULL."""
    one = new_lake(tmp_path)
    apply(one, new_stream(schema=DDL))
    before = one.table().schema()
    alter(one, one.name, lambda u: u.delete_column(name))
    if added is not None:
        alter(one, one.name, lambda u: u.add_column(name, added))
    with pytest.raises(Terminal, match=f"another program dropped column {name}"):
        require_columns(one.table(), new_stream(schema=DDL))
    assert "brought column" in apply(one, new_stream(schema=DDL))[0]
    after = one.table().schema()
    assert index_name_by_id(after) == index_name_by_id(before)
    found = {f.name for f in after.fields if f.required}
    assert found == {f.name for f in before.fields if f.required}
    publish(one, 1, **VALUES)
    assert content(one) == [VALUES]


def test_a_column_that_was_dropped_and_added_again_has_its_values_again(one: StreamLake) -> None:
    """The other program added it again."""
    alter(one, one.name, lambda u: u.delete_column("n"))
    alter(one, one.name, lambda u: u.add_column("n", IntegerType()))
    assert [row["n"] for row in content(one)] == [None]
    with pytest.raises(Terminal, match="another program dropped column n"):
        require_columns(one.table(), new_stream(schema=DDL))
    assert apply(one, new_stream(schema=DDL)) != []
    assert content(one) == [VALUES]


def test_a_column_is_brought_back_and_widened(one: StreamLake) -> None:
    wider = new_stream(schema=DDL.replace("n INT", "n BIGINT") + ", new STRING")
    alter(one, one.name, lambda u: u.delete_column("n"))
    done = apply(one, wider)
    assert [line.split(" column ")[0] for line in done] == ["brought", "widened", "added"]
    assert content(one) == [VALUES] and isinstance(one.table().schema().find_type("n"), LongType)


@pytest.mark.parametrize("ddl", [DDL, DDL.replace("id STRING", "id BIGINT")])
def test_a_column_never_null_comes_back_before_any_row(tmp_path: Path, ddl: str) -> None:
    """As a new column it would be refused, though no row lacks it."""
    one = new_lake(tmp_path)
    apply(one, new_stream(schema=DDL))
    alter(one, one.name, lambda u: u.delete_column("id"))
    with pytest.raises(Terminal, match="another program dropped column id"):
        require_columns(one.table(), new_stream(schema=DDL))
    assert apply(one, new_stream(schema=ddl)) != []
    require_columns(one.table(), new_stream(schema=ddl))
    assert one.table().schema().find_field("id").required
    assert apply(one, new_stream(schema=ddl)) == []


def test_a_rename_that_the_file_follows_is_none_to_undo(one: StreamLake) -> None:
    """The file has the new name too: old rows have their values by it."""
    alter(one, one.name, lambda u: u.rename_column("n", "level"))
    followed = new_stream(schema=DDL.replace("n INT", "level INT"))
    require_columns(one.table(), followed)
    assert apply(one, followed) == []
    assert one.table().scan().to_arrow()["level"].to_pylist() == [7]


@pytest.mark.parametrize("name", ["dropped", "a field dropped", "a struct dropped"])
def test_what_the_file_lacks_comes_back_with_the_file(one: StreamLake, name: str) -> None:
    older = {
        "dropped": DDL.replace("n INT, ", ""),
        "a field dropped": DDL.replace(", b: STRING", ""),
        "a struct dropped": DDL.replace("s STRUCT<a: INT, b: STRING>, ", ""),
    }[name]
    apply(one, new_stream(schema=older), rolled_back=True)
    alter(one, one.name, CHANGES[name][0])
    apply(one, new_stream(schema=older))
    require_columns(one.table(), new_stream(schema=older))
    publish(one, 2, id="f", items=VALUES["items"])
    with pytest.raises(Terminal, match=f"another program {CHANGES[name][1]}"):
        require_columns(one.table(), new_stream(schema=DDL))
    assert "brought column" in apply(one, new_stream(schema=DDL))[0]
    assert content(one)[0] == VALUES


def test_values_under_the_new_id_refuse_it_and_name_the_restatement(one: StreamLake) -> None:
    alter(one, one.name, lambda u: u.delete_column("n"))
    alter(one, one.name, lambda u: u.add_column("n", IntegerType()))
    schema = schema_to_pyarrow(one.table().schema())
    own = {"kafka_partition": 0, "kafka_offset": 5, "ingest_hour": FIRST, "event_date": 1}
    rows = pa.Table.from_pylist([own | VALUES | {"id": "g", "n": 9}], schema=schema)
    one.lake.catalog.load_table(one.name).append(rows)
    with pytest.raises(Refused, match="restate the hours with rows before the change"):
        apply(one, new_stream(schema=DDL))


def test_tables_beside_the_rows_get_their_columns_back(one: StreamLake) -> None:
    name = one.stream.dead_letters_table
    before = one.lake.load(name).schema()
    alter(one, name, lambda u: u.rename_column("error_text", "reason"))
    alter(one, name, lambda u: u.delete_column(("headers",)))
    done = apply(one, new_stream(schema=DDL))
    assert "brought column headers of" in done[0]
    assert f"renamed column reason of {name} back to error_text" in done[1]
    after = one.lake.load(name).schema()
    assert after.find_field("error_text").field_id == before.find_field("error_text").field_id


def test_the_outermost_change_is_named_and_undone() -> None:
    inner = StructType(NestedField(3, "a", IntegerType()), NestedField(4, "b", StringType()))
    published = Schema(NestedField(1, "id", StringType()), NestedField(2, "s", inner))
    now = Schema(
        NestedField(1, "key", StringType()),
        NestedField(2, "t", StructType(NestedField(3, "z", IntegerType()))),
        schema_id=1,
    )
    changes = plan_foreign_changes(published, now, published)
    assert [(c.path, c.now) for c in changes] == [("id", "key"), ("s", "t")]
    again = restored(now, changes)
    assert [f.name for f in again.fields] == ["id", "s"]
    left = plan_foreign_changes(published, again, published)
    assert [(c.path, c.now) for c in left] == [("s.a", "s.z"), ("s.b", None)]
    assert restored(again, left).as_struct() == published.as_struct()
