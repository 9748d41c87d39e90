"""Changes of columns that `apply` makes or refuses, on real tables with rows of both schemas."""

import re
import shlex
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from brokers import Broker
from lakes import FIRST, StreamLake, new_lake, new_stream, table_of
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import IntegerType, NestedField, StringType
from queries import run_query

from anabranch.common.errors import Refused, Terminal
from anabranch.config import Stream
from anabranch.iceberg import schema_evolution
from anabranch.iceberg.commits import Change, Outcome
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.schema_evolution import Columns, evolve, plan_evolution
from anabranch.iceberg.table_schemas import rows_columns
from anabranch.protocol import apply as tables
from anabranch.protocol.apply import ROLLED_BACK, require_columns, roll_back
from anabranch.protocol.publish import Publish

OWN = ["kafka_partition", "kafka_offset", "kafka_timestamp", "ingest_hour", "event_date"]
BEFORE = (
    "id STRING NOT NULL, n INT NOT NULL, f FLOAT, d DECIMAL(10,2), "
    "s STRUCT<a: INT, deep: STRUCT<x: INT>>, "
    "tags ARRAY<INT>, items ARRAY<STRUCT<a: INT>>, scores MAP<STRING, INT>"
)
AFTER = (
    "id STRING NOT NULL, colour STRING, n BIGINT, f DOUBLE, d DECIMAL(12,2), "
    "s STRUCT<a: BIGINT, deep: STRUCT<x: INT, y: STRING>, b: STRING>, "
    "tags ARRAY<BIGINT>, items ARRAY<STRUCT<a: BIGINT, b: STRING>>, scores MAP<STRING, BIGINT>"
)


def stream_of(ddl: str, key: Any = "id") -> Stream:
    return new_stream(schema=ddl, key=key)


def append(lake: Lake, **values: Any) -> None:
    table = lake.load("games.other")
    own = {"kafka_partition": 0, "kafka_offset": 1, "ingest_hour": "2026-11-21T00", "event_date": 1}
    schema = schema_to_pyarrow(table.schema())
    table.append(pa.Table.from_pylist([own | {"id": "x", "n": 1} | values], schema=schema))


def sample(kind: pa.DataType) -> Any:
    """A value of a type."""
    if pa.types.is_struct(kind):
        return {field.name: sample(field.type) for field in kind}
    if pa.types.is_map(kind):
        return [(sample(kind.key_type), sample(kind.item_type))]
    if pa.types.is_large_list(kind) or pa.types.is_list(kind):
        return [sample(kind.value_type)]
    if pa.types.is_decimal(kind):
        return Decimal(1)
    return "x" if pa.types.is_large_string(kind) or pa.types.is_string(kind) else 1


def append_values(lake: Lake) -> None:
    """A row with a value in each column."""
    schema = schema_to_pyarrow(lake.load("games.other").schema())
    append(lake, **{f.name: sample(f.type) for f in schema if f.name not in OWN})


def publish_row(one: StreamLake) -> None:
    """A row of the speed layer, which `main` does not serve."""
    staged, timeline = one.stage([(FIRST, 0, 1)]), one.state().timeline
    files = (Change("speed", staged.files), Change("main"))
    publish = Publish(staged.wap_id, files, timeline, staged={staged.wap_id: staged.snapshot_id})
    one.land(publish)


def refused(folder: Path, before: str, after: str, key: Any = "id") -> str:
    lake, _ = table_of(folder, before)
    append_values(lake)
    table = lake.load("games.other")
    with pytest.raises(Refused) as error:
        evolve(lake, "games.other", rows_columns(stream_of(after, key)))
    # No change is half applied, and the table is still the old stream's.
    assert lake.load("games.other").metadata_location == table.metadata_location
    return str(error.value)


def test_all_that_may_change_changes_in_one_commit_and_is_read(
    tmp_path: Path, recorded: Callable[[Any], None]
) -> None:
    lake, table = table_of(tmp_path, BEFORE)
    old = {
        "n": 7, "f": 0.5, "d": Decimal("1.50"), "s": {"a": 1, "deep": {"x": 2}}, "tags": [1, 2],
        "items": [{"a": 3}], "scores": {"k": 4},
    }  # fmt: skip
    append(lake, **old)
    recorded(evolve(lake, "games.other", rows_columns(stream_of(AFTER))))
    evolved = lake.load("games.other")
    assert len(evolved.metadata.schemas) == len(table.metadata.schemas) + 1
    require_columns(evolved, stream_of(AFTER))
    assert evolved.schema().column_names[-5:] == OWN
    big = 2**40
    append(
        lake, id="y", n=None, f=0.1, d=Decimal("9999999999.99"), colour="red", tags=[big],
        items=[{"a": big, "b": "z"}], s={"a": big, "deep": {"x": 1, "y": "w"}, "b": "v"},
        scores={"k": big},
    )  # fmt: skip
    reloaded = lake.load("games.other")
    wanted = [
        old | {
            "id": "x", "colour": None, "s": {"a": 1, "deep": {"x": 2, "y": None}, "b": None},
            "items": [{"a": 3, "b": None}],
        },
        {
            "id": "y", "n": None, "f": 0.1, "d": Decimal("9999999999.99"), "colour": "red",
            "tags": [big], "items": [{"a": big, "b": "z"}],
            "s": {"a": big, "deep": {"x": 1, "y": "w"}, "b": "v"}, "scores": {"k": big},
        },
    ]  # fmt: skip

    def plain(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        own = [{k: v for k, v in row.items() if k not in OWN} for row in rows]
        own = [r | {"scores": dict(r["scores"])} for r in own]
        return sorted(own, key=lambda row: str(row["id"]))

    assert plain(reloaded.scan().to_arrow().to_pylist()) == wanted
    found = plain(run_query("SELECT * FROM games.other", {"games.other": reloaded}).to_pylist())
    assert found == wanted
    # Old files' bounds are of the narrow type: a filter on the wide one reads them all the same.
    for condition, sql, ids in (("n == 7", "n = 7", ["x"]), ("f > 0.4", "f > 0.4", ["x"])):
        assert reloaded.scan(row_filter=condition).to_arrow()["id"].to_pylist() == ids
        rows = run_query(f"SELECT id FROM games.other WHERE {sql}", {"games.other": reloaded})
        assert rows["id"].to_pylist() == ids


def test_evolving_again_changes_nothing(tmp_path: Path) -> None:
    lake, _ = table_of(tmp_path, BEFORE)
    evolve(lake, "games.other", rows_columns(stream_of(AFTER)))
    before = lake.load("games.other").metadata_location
    assert evolve(lake, "games.other", rows_columns(stream_of(AFTER))) == []
    assert lake.load("games.other").metadata_location == before


def test_the_order_of_the_columns_is_of_no_account(tmp_path: Path) -> None:
    lake, _ = table_of(tmp_path, "id STRING NOT NULL, n INT, s STRUCT<a: INT, b: INT>")
    again = stream_of("s STRUCT<b: INT, a: INT>, n INT, id STRING NOT NULL")
    assert evolve(lake, "games.other", rows_columns(again)) == []
    require_columns(lake.load("games.other"), again)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("n INT", "m INT"),
        ("n INT, s STRUCT<a: INT>", "n INT, s STRUCT<b: INT>"),
        ("n BIGINT", "n INT"),
        ("n INT", "n DOUBLE"),
        ("n INT", "n STRING"),
        ("n FLOAT", "n DECIMAL(10,2)"),
        ("n DECIMAL(10,2)", "n DECIMAL(12,3)"),
        ("n DECIMAL(10,2)", "n DECIMAL(8,2)"),
        ("n DATE", "n TIMESTAMP"),
        ("n INT", "n ARRAY<INT>"),
        ("n STRUCT<a: INT>", "n STRUCT<a: STRING>"),
        ("n ARRAY<BIGINT>", "n ARRAY<INT>"),
        ("n MAP<STRING, BIGINT>", "n MAP<STRING, INT>"),
        ("n MAP<INT, INT>", "n MAP<BIGINT, INT>"),
        ("n INT", "n INT NOT NULL"),
        ("n INT", "n INT, m INT NOT NULL"),
    ],
)
def test_a_loss_is_refused(
    tmp_path: Path, before: str, after: str, recorded: Callable[[Any], None]
) -> None:
    # Beside it a change that is allowed, which must not be made alone.
    of_both = "id STRING NOT NULL, w INT, ", "id STRING NOT NULL, w BIGINT, z INT, "
    message = refused(tmp_path, of_both[0] + before, of_both[1] + after)
    assert message.startswith("table games.other, stream events (`schema:`), column ")
    recorded(message)


@pytest.mark.parametrize(
    ("before", "after", "row"),
    [
        ("n TIMESTAMP NOT NULL", "n DOUBLE NOT NULL", None),
        ("n STRUCT<a: INT>", "n STRUCT<a: STRING>", None),
        ("n MAP<INT, INT>", "n STRING", None),
        ("n TIMESTAMP", "n DOUBLE", {"n": None}),
        ("n BIGINT", "n STRING", {"n": None, "w": 2}),
    ],
)
def test_a_type_of_which_no_row_was_published_may_change(
    tmp_path: Path, before: str, after: str, row: dict[str, Any] | None
) -> None:
    lake, table = table_of(tmp_path, f"id STRING NOT NULL, {before}, w INT")
    if row is not None:
        append(lake, **row)
    former = table.schema().find_field("n").field_id
    stream = stream_of(f"id STRING NOT NULL, {after}, w BIGINT")
    first, other = evolve(lake, "games.other", rows_columns(stream))
    assert first.startswith("changed column n of games.other from ")
    assert first.endswith(": no row had a value of it")
    assert other == "widened column w of games.other from int to bigint"
    table = lake.load("games.other")
    require_columns(table, stream)
    # A file of the old type, if any, has no such field.
    assert table.schema().find_field("n").field_id > former
    rows = table.scan().to_arrow().to_pylist()
    assert [(r["n"], r["w"]) for r in rows] == ([] if row is None else [(None, row.get("w"))])
    append_values(lake)
    assert evolve(lake, "games.other", rows_columns(stream)) == []
    again = stream_of(f"id STRING NOT NULL, {before}, w BIGINT")
    with pytest.raises(Refused, match=r"column n(\.a)?: expected "):
        evolve(lake, "games.other", rows_columns(again))


def test_values_of_any_branch_keep_the_type(tmp_path: Path) -> None:
    """The speed layer's rows of an hour that another layer serves."""
    one, other = new_lake(tmp_path), stream_of("id STRING NOT NULL, n STRING")
    publish_row(one)
    with pytest.raises(Refused, match="column n: expected int or bigint, found string"):
        apply(one, other)


def test_a_row_meanwhile_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = new_lake(tmp_path), stream_of("id STRING NOT NULL, n STRING")
    seen = schema_evolution.unused_columns

    def published_since(table: Table) -> Any:
        unused = seen(table)
        if unused >= {"n"}:
            publish_row(one)
        return unused

    monkeypatch.setattr(schema_evolution, "unused_columns", published_since)
    with pytest.raises(Refused, match="column n: expected int or bigint, found string"):
        apply(one, other)
    assert one.table().schema().find_type("n") == IntegerType()


@pytest.mark.parametrize(
    ("before", "after", "key", "reason"),
    [
        ("n INT NOT NULL", "n INT", ["id", "n"], "column n: expected the key's column to stay NOT NULL"),
        ("n FLOAT", "n DOUBLE", ["id", "n"], "column n: expected float, found double"),
        ("n INT", "n INT, m INT", ["id", "m"], "column m: expected a key of columns that the table has, found a new one"),
    ],
)  # fmt: skip
def test_the_key_still_distinguishes_old_events(
    tmp_path: Path, before: str, after: str, key: list[str], reason: str
) -> None:
    before, after = (f"id STRING NOT NULL, {ddl}" for ddl in (before, after))
    assert reason in refused(tmp_path, before, after, key)


def test_a_whole_number_of_the_key_may_widen(tmp_path: Path) -> None:
    lake, _ = table_of(tmp_path, "id INT NOT NULL")
    changes = evolve(lake, "games.other", rows_columns(stream_of("id BIGINT NOT NULL")))
    assert changes == ["widened column id of games.other from int to bigint"]


def test_a_column_of_another_version_of_the_code_stays_in_a_table_of_ours() -> None:
    have = Schema(NestedField(1, "a", IntegerType()), NestedField(2, "newer", StringType()))
    wanted = Columns(Schema(NestedField(1, "a", IntegerType())), "ours")
    assert plan_evolution("t", have, wanted) == []


def test_every_table_of_a_stream_gets_the_columns_that_it_lacks(tmp_path: Path) -> None:
    one = new_lake(tmp_path)
    for name in (one.stream.hours_table, one.stream.dead_letters_table):
        table = one.lake.load(name)
        later = NestedField(90, "later", StringType())
        wanted = Columns(Schema(*table.schema().fields, later), "ours")
        assert evolve(one.lake, name, wanted) == [f"added column later to {name}"]
        assert one.lake.load(name).schema().column_names[-1] == "later"


def test_the_second_of_two_processes_finds_nothing_to_change(tmp_path: Path) -> None:
    one = new_lake(tmp_path)
    wanted = rows_columns(stream_of("id STRING NOT NULL, n BIGINT"))
    stale, load = one.table(), one.lake.load
    loads = iter([stale])
    expected = [f"widened column n of {one.name} from int to bigint"]
    assert evolve(one.again(), one.name, wanted) == expected
    # The hazard: a plan made on the table as it was, refused by the catalog and made again.
    one.lake.load = lambda name: next(loads, None) or load(name)  # type: ignore[method-assign]
    evolve(one.lake, one.name, wanted)
    assert next(loads, None) is None
    assert len(one.table().metadata.schemas) == len(stale.metadata.schemas) + 1


def test_a_publish_that_was_decided_before_it_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    """The hazard: columns checked when the publish was decided, others when it lands."""
    one = new_lake(tmp_path)
    staged = one.stage([("2026-11-21T00", 0, 5)])
    state = one.state()
    require_columns(state.table, one.stream)
    wanted = rows_columns(stream_of("id STRING NOT NULL, n BIGINT, colour STRING"))
    assert len(evolve(one.lake, one.name, wanted)) == 2
    assert one.state().heads == state.heads, "the hazard did not happen"
    assert one.publish(one.speed(staged, {0: 6}, state), state) is Outcome.REFUSED
    assert one.rows("main") == []
    with pytest.raises(Terminal, match="expected column"):
        require_columns(one.state().table, one.stream)
    # A publisher that decides again with the current columns publishes what was staged before.
    one.land(one.speed(staged, {0: 6}))
    assert one.rows("main") == one.rows("speed") == [("2026-11-21T00", 0, 5)]
    assert one.table().schema().column_names[:3] == ["id", "n", "colour"]
    assert [r["n"] for r in one.table().scan().to_arrow().to_pylist()] == [5]


# The printed remedies work, and a file may be restored


def apply(one: StreamLake, stream: Stream, rolled_back: bool = False) -> list[str]:
    kafka = Broker(None).adapter
    return tables.apply(one.environment, stream, one.lake, kafka, rolled_back=rolled_back)


def remedies(text: str) -> list[list[str]]:
    """The commands that a message names."""
    return [shlex.split(command) for command in re.findall(r"`anabranch ([^`]+)`", text)]


def follow(one: StreamLake, stream: Stream, command: list[str]) -> list[str]:
    assert command[:2] == ["apply", stream.name] and command[2:] in ([], ["--rolled-back"]), command
    return apply(one, stream, "--rolled-back" in command)


# The columns of a stream before, and the columns in the file of a job.
BOTH = "id STRING NOT NULL, n INT"
WIDER = "id STRING NOT NULL, n BIGINT, colour STRING, s STRUCT<a: INT, b: STRING>"


@pytest.mark.parametrize(
    "ddl",
    [
        f"{BOTH}, colour STRING",  # a column that the table does not have yet
        "id STRING NOT NULL, n BIGINT",  # a type that is wider by now
        "n INT, id STRING",  # not for the key, and yet NOT NULL given up
    ],
)
def test_the_remedy_of_a_job_whose_table_is_behind_its_file_works(tmp_path: Path, ddl: str) -> None:
    one, stream = new_lake(tmp_path), stream_of(ddl, key="n")
    with pytest.raises(Terminal) as ended:
        require_columns(one.table(), stream)
    [command] = remedies(str(ended.value))
    assert follow(one, stream, command)
    require_columns(one.table(), stream)


@pytest.mark.parametrize(
    "evolved",
    [f"{BOTH}, colour STRING", "id STRING NOT NULL, n BIGINT", f"{BOTH}, s STRUCT<a: INT>"],
)
def test_the_remedy_of_a_table_ahead_of_its_file(tmp_path: Path, evolved: str) -> None:
    """The hazard: the remedy that is named is refused."""
    one, older, newer = new_lake(tmp_path), stream_of(BOTH), stream_of(evolved)
    assert apply(one, newer)
    with pytest.raises(Terminal) as ended:
        require_columns(one.table(), older)
    again, back = remedies(str(ended.value))
    # The first is for a job with the newer file: nothing is left to do, and it starts.
    assert follow(one, newer, again) == []
    require_columns(one.table(), newer)
    # The older file is refused with the message of the job.
    with pytest.raises(Refused) as refused:
        follow(one, older, again)
    assert remedies(str(refused.value)) == [back]
    assert follow(one, older, back)
    require_columns(one.table(), older)
    assert one.table().schema() == one.lake.load(one.name).schema()


def test_a_file_that_cannot_become_the_tables_schema_is_refused_at_once(tmp_path: Path) -> None:
    one, other = new_lake(tmp_path), stream_of("id STRING NOT NULL, n STRING")
    publish_row(one)
    with pytest.raises(Refused) as refused:
        apply(one, other)
    with pytest.raises(Terminal) as ended:
        require_columns(one.table(), other)
    assert str(refused.value) in str(ended.value)
    assert "--rolled-back" not in str(ended.value)
    with pytest.raises(Refused, match="put the type back"):
        apply(one, other, rolled_back=True)
    # Follow the message: put the type back and add a column beside it.
    back = stream_of(f"{BOTH}, text STRING")
    assert apply(one, back) == ["added column text to games.events"]
    require_columns(one.table(), back)


def test_a_file_is_rolled_back_and_forward(tmp_path: Path) -> None:
    one, older, newer = new_lake(tmp_path), stream_of(BOTH), stream_of(WIDER)
    apply(one, newer)
    columns = one.table().schema()
    left = "left games.events unchanged, ahead of the stream's file in n, colour, s: new rows have null or narrower values there"
    assert apply(one, older, rolled_back=True) == [left]
    # An ordinary `apply` of the same file, as every deployment runs it, leaves it so.
    assert apply(one, older) == apply(one, older, rolled_back=True) == []
    assert one.table().schema() == columns
    require_columns(one.table(), older)
    # Jobs of the newer file may still run; those of a third one end.
    require_columns(one.table(), newer)
    with pytest.raises(Terminal, match="--rolled-back"):
        require_columns(one.table(), stream_of("id STRING NOT NULL, n BIGINT"))
    # Forward again.
    assert apply(one, newer) == ["games.events is no longer ahead of the stream's file"]
    require_columns(one.table(), newer)
    with pytest.raises(Terminal, match="--rolled-back"):
        require_columns(one.table(), older)
    assert apply(one, newer) == []
    # The table can also go on to a third schema in one step.
    apply(one, older, rolled_back=True)
    third = stream_of(f"{WIDER}, size INT")
    assert apply(one, third) == [
        "games.events is no longer ahead of the stream's file",
        "added column size to games.events",
    ]


def test_going_back_needs_a_table_that_is_ahead(tmp_path: Path) -> None:
    one = new_lake(tmp_path)
    assert apply(one, stream_of(BOTH), rolled_back=True) == []
    with pytest.raises(Refused, match="found more; run `anabranch apply` without --rolled-back"):
        apply(one, stream_of(f"{BOTH}, colour STRING"), rolled_back=True)
    assert one.table().properties.keys().isdisjoint({ROLLED_BACK})


def test_a_column_that_is_required_by_now_is_none_to_leave_out(tmp_path: Path) -> None:
    """NOT NULL cannot be added, so only a table of another program has it."""
    lake, table = table_of(tmp_path, f"{BOTH}, m INT NOT NULL")
    with pytest.raises(Terminal) as ended:
        require_columns(table, stream_of(BOTH))
    assert "--rolled-back" not in str(ended.value)
    with pytest.raises(Refused, match="column m: expected it in the schema"):
        roll_back(lake, "games.other", rows_columns(stream_of(BOTH)))
