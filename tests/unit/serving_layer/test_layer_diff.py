"""The difference of two layers by files: every kind of row, every type, evolved tables."""

import pickle
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from lakes import new_lake, new_stream
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.iceberg import admin, table_schemas
from anabranch.iceberg.rewriting import RowReader
from anabranch.iceberg.schema_evolution import evolve
from anabranch.offsets.position import Ranges
from anabranch.records.hashes import HASH, find_hashes, find_keys, hash_at, hash_keys, keys_at
from serving_layer import layer_diff as layer_files
from serving_layer.query.datasets import connected

NAME = "games.other"
PLACE = pa.schema([("kafka_partition", pa.int32()), ("kafka_offset", pa.int64())])
Values = dict[str, Any]
Place = tuple[int, int]


class Layers:
    """A table, and the files of the rows that each layer wrote."""

    def __init__(self, folder: Path, ddl: str) -> None:
        self._lake = new_lake(folder).lake
        admin.create(self._lake, NAME, table_schemas.rows_schema(new_stream(schema=ddl)), (), {})

    @property
    def table(self) -> Table:
        return self._lake.load(NAME)

    def evolve(self, ddl: str) -> None:
        evolve(self._lake, NAME, table_schemas.rows_columns(new_stream(schema=ddl)))

    def write(self, rows: Sequence[tuple[Place, Values]]) -> list[DataFile]:
        """Append rows; return the new files."""
        table = self.table
        before = {task.file.file_path for task in table.scan().plan_files()}
        own = {"ingest_hour": "2026-11-21T00", "event_date": 1, "id": "x"}
        full = [own | {"kafka_partition": p, "kafka_offset": o} | values for (p, o), values in rows]
        table.append(pa.Table.from_pylist(full, schema=schema_to_pyarrow(table.schema())))
        tasks = table.refresh().scan().plan_files()
        return [task.file for task in tasks if task.file.file_path not in before]

    def content(self, files: Sequence[DataFile]) -> dict[str, str]:
        table = self.table
        return layer_files.content_types(table.schema(), list(table.schemas().values()), files)

    def compare(
        self,
        speed: Sequence[DataFile],
        batch: Sequence[DataFile],
        removed: Sequence[Place] = (),
        unread: Ranges | None = None,
        erased: Sequence[Place] = (),
        letters: Sequence[DataFile] = (),
    ) -> layer_files.Difference:
        reader = RowReader.of(self.table)
        return layer_files.compare_files(
            speed, batch, reader, [*self.content(speed).values()], places(removed), places(erased),
            lambda: (reader, letters), unread or {}, in_tasks,
        )  # fmt: skip


def in_tasks(tasks: Sequence[Callable[[], pa.Table]]) -> list[pa.Table]:
    """As Spark's workers: functions and results are sent."""
    return [pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(task))())) for task in tasks]


def places(of: Sequence[Place]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip(PLACE.names, one, strict=True)) for one in of], PLACE)


def test_missing_extra_duplicate_and_unread_rows_are_distinguished(tmp_path: Path) -> None:
    layers = Layers(tmp_path, "id STRING NOT NULL")
    speed = layers.write([((0, o), {}) for o in (1, 2, 3, 7)])
    batch = layers.write([((0, 1), {}), ((0, 4), {})])
    found = layers.compare(speed, batch, removed=[(0, 2)], erased=[(0, 7)])
    diff = found.diff
    assert (found.speed_rows, found.batch_rows) == (3, 2)
    assert (diff.missing, diff.extra, diff.changed, diff.duplicate) == (1, 1, 0, 1)
    assert [(s["kind"], s["offset"]) for s in diff.sample or ()] == [("extra", 3), ("missing", 4)]
    batch = layers.write([((0, 1), {}), ((0, 2), {}), ((1, 2), {})])
    found = layers.compare([], batch, unread={0: (2, 9)})
    diff = found.diff
    assert (found.speed_rows, diff.missing, diff.unread, diff.extra) == (0, 3, 1, 0)
    sample = [(s["kind"], s["partition"]) for s in diff.sample or ()]
    assert sample == [("missing", 0), ("missing", 1), ("unread", 0)]
    assert layers.compare([], []).diff == layers.compare(batch, batch).diff


@pytest.mark.parametrize("kind", ["INT", "MAP<STRING, INT>", "STRUCT<key: STRING, value: INT>"])
def test_columns_of_any_name_are_beside_nested_ones(tmp_path: Path, kind: str) -> None:
    """The hazard: DuckDB takes a column, such as one of i1 to i13 of Criteo's data, for the item of
    a list or map: it fails, or compares the column in place of the item."""
    names = ", ".join(f"i{id} {kind}" for id in range(1, 25))
    nested = "m MAP<STRING, INT>, l ARRAY<STRUCT<a: INT>>"
    layers = Layers(tmp_path, f"id STRING NOT NULL, {nested}, {names}")
    rows = [((0, o), {"m": [("k", o)], "l": [{"a": o}]}) for o in (1, 2, 3)]
    others = ({"m": [("k", 5)], "l": [{"a": 2}]}, {"m": [("k", 3)], "l": [{"a": 5}]})
    changed = [rows[0], *(((0, o), values) for o, values in enumerate(others, 2))]
    assert layers.compare(layers.write(rows), layers.write(changed)).diff.changed == 2


@pytest.mark.parametrize("name", ["rows", "speed", "removed", "left_out"])
def test_a_struct_of_any_name_is_compared(tmp_path: Path, name: str) -> None:
    """The hazard: DuckDB takes the column beside the struct, since its own table has that name."""
    layers = Layers(tmp_path, f"id STRING NOT NULL, n INT, {name} STRUCT<n: INT>")
    rows = [((0, o), {"n": 1, name: {"n": o}}) for o in (1, 2)]
    changed = [rows[0], ((0, 2), {"n": 1, name: {"n": 5}})]
    assert layers.compare(layers.write(rows), layers.write(changed)).diff.changed == 1


@pytest.mark.parametrize("key", ["event", "repeats", "is_equal", "hash", "l", "o"])
def test_a_key_of_any_name_has_repeated_rows(key: str) -> None:
    layers = {"speed": [(1, "a"), (2, "a"), (3, "b")], "batch": [(1, "a"), (3, "b")], "earlier": []}
    with connected() as connection:
        for layer, rows in layers.items():
            columns = {"ingest_hour": ["h"] * len(rows), "n": [9] * len(rows),
                       "kafka_partition": pa.array([0] * len(rows), pa.int32()),
                       "kafka_offset": pa.array([o for o, _ in rows], pa.int64()),
                       key: pa.array([value for _, value in rows], pa.string())}  # fmt: skip
            connection.register(layer, pa.table(columns))
        compared = layer_files.Comparison(connection, {"n": "n", key: f'"{key}"'}, [key])
        number, [found] = compared.repeated(5)
    assert (number, found.offset, found.repeats.offset) == (1, 2, 1)
    assert (found.key, found.is_equal) == ({key: "a"}, True)


def test_of_dead_letters_places_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: the bytes of an hour of dead letters, which do not fit into memory."""
    layers = Layers(tmp_path, "id STRING NOT NULL")
    batch, letters = layers.write([((0, 1), {})]), layers.write([((0, 1), {})])
    paths, asked, read = [file.file_path for file in letters], list[Any](), RowReader.read

    def noted(self: RowReader, files: Sequence[DataFile], *given: Any, **named: Any) -> Any:
        rows = read(self, files, *given, **named)
        asked.extend(rows.schema.names for file in files if file.file_path in paths)
        return rows

    monkeypatch.setattr(RowReader, "read", noted)
    assert layers.compare([], batch, letters=letters).diff.missing_dead == 1
    assert asked == [PLACE.names]


@pytest.mark.parametrize("at_once", [4_096, 1])
def test_every_kind_is_counted_wherever_among_the_offsets_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Against a plain count, over blocks and files: most alike, some with a thing or several."""
    monkeypatch.setattr(layer_files, "_BLOCKS", at_once)
    monkeypatch.setattr(layer_files, "_TASK_ROWS", 2_500)
    dice, layers = random.Random(7), Layers(tmp_path, "id STRING NOT NULL, v STRING")
    differ = ["missing", "missing_dead", "extra", "extra_dead", "changed", "duplicate"]
    kinds = ["same"] * 400 + [*differ, "absent", "dead"]
    speed, batch, removed, dead, counted = [], [], [], [], Counter[str]()
    for offset in range(6_000):
        kind = dice.choice(kinds) if offset % 1_500 > 300 else "same"
        # Unread offsets are a range.
        kind = "unread" if 2_000 <= offset < 2_200 else kind
        counted[kind] += 1
        if kind in ("same", "extra", "extra_dead", "changed", "duplicate"):
            speed.append(((1, offset), {"v": f"v{offset % 7}"}))
        if kind in ("same", "missing", "missing_dead", "unread", "changed"):
            batch.append(((1, offset), {"v": f"v{offset % 7}" if kind != "changed" else "other"}))
        if kind == "duplicate":
            removed.append((1, offset))
        if "dead" in kind:
            # A dead letter of both layers is one of each.
            dead += [((1, offset), {})] * (2 if kind == "dead" else 1)
    # Two that changed places, and a row three times: what a digest alone would not see.
    speed[0], speed[1] = (speed[0][0], speed[1][1]), (speed[1][0], speed[0][1])
    speed += [speed[200], speed[200]]
    assert all(counted[kind] > 1 for kind in (*differ, "unread", "dead")), counted
    dice.shuffle(speed)
    dice.shuffle(batch)
    of_speed = [file for i in range(4) for file in layers.write(speed[i::4])]
    of_batch = [file for i in range(3) for file in layers.write(batch[i::3])]
    letters = [file for i in range(2) for file in layers.write(dead[i::2])]
    found = layers.compare(of_speed, of_batch, removed, {1: (2_000, 2_200)}, letters=letters)
    diff = found.diff
    assert found.speed_rows == len(speed)
    assert diff.missing == counted["missing"] + counted["missing_dead"] + counted["unread"]
    assert diff.extra == counted["extra"] + counted["extra_dead"]
    dead_of = (diff.missing_dead, diff.extra_dead)
    assert dead_of == (counted["missing_dead"], counted["extra_dead"])
    assert diff.unread == counted["unread"]
    # The row that the speed layer has three times counts three times.
    assert found.batch_rows == len(batch) + 2
    assert diff.changed == counted["changed"] + 2
    assert diff.duplicate == counted["duplicate"]
    assert [s["offset"] for s in (diff.sample or ())[:2]] == [0, 1]


NESTED = (
    "id STRING NOT NULL, a INT, b INT, tags ARRAY<STRING>, scores MAP<STRING, DOUBLE>, nested "
    "STRUCT<n: INT, m: MAP<STRING, INT>>"
)
CHANGES: list[tuple[Values, Values]] = [
    ({"a": 1}, {"b": 1}),
    ({"tags": ["a"]}, {"tags": ["b"]}),
    ({"tags": [None]}, {"tags": []}),
    ({"tags": []}, {}),
    ({"scores": {"k": 1.0}}, {"scores": {"k": 2.0}}),
    ({"scores": {"k": None}}, {"scores": {}}),
    ({"nested": {"n": 1, "m": {"k": 1}}}, {"nested": {"n": None, "m": {"k": 1}}}),
    ({"nested": {"n": None, "m": None}}, {}),
]


def test_other_content_is_seen_in_every_type(tmp_path: Path) -> None:
    layers = Layers(tmp_path, NESTED)
    # Far apart: no block of offsets has two changes.
    sides = (
        [((0, 10_000 * i), values) for i, values in enumerate(side)]
        for side in zip(*CHANGES, strict=True)
    )
    one, other = map(layers.write, sides)
    for files in (one, other):
        assert layers.compare(files, files).diff.changed == 0
    diff = layers.compare(one, other).diff
    assert (diff.missing, diff.extra, diff.changed) == (0, 0, len(CHANGES))
    sample = [(s["kind"], s["offset"]) for s in diff.sample or ()]
    assert sample == [("changed", 10_000 * i) for i in range(layer_files.SAMPLE)]


BEFORE = (
    "id STRING NOT NULL, n INT, f FLOAT, s STRUCT<a: INT>, items ARRAY<STRUCT<a: FLOAT>>, m "
    "MAP<STRING, INT>"
)
AFTER = (
    "id STRING NOT NULL, n BIGINT, f DOUBLE, s STRUCT<a: BIGINT, b: STRING>, items "
    "ARRAY<STRUCT<a: DOUBLE, b: INT>>, m MAP<STRING, BIGINT>, colour STRING, home STRUCT<city: "
    "STRING>, g DOUBLE"
)
OLD: Values = {"n": 1, "f": 0.1, "s": {"a": 1}, "items": [{"a": 0.1}], "m": {"k": 1}}
NEW: Values = {
    **OLD, "s": {"a": 1, "b": "b"}, "items": [{"a": 0.1, "b": 1}], "colour": "red",
    "home": {"city": "Ulm"}, "g": 1.0,
}  # fmt: skip


def test_rows_of_an_earlier_schema_differ_by_value_and_not_by_type_or_name(tmp_path: Path) -> None:
    layers = Layers(tmp_path, BEFORE)
    speed = layers.write([((0, 1), OLD), ((0, 2), OLD), ((0, 3), {}), ((0, 4), OLD)])
    layers.evolve(AFTER)
    other = NEW | {"s": {"a": 2, "b": "b"}}
    batch = layers.write([((0, 1), NEW), ((0, 2), NEW | {"n": 2}), ((0, 3), {}), ((0, 4), other)])
    diff = layers.compare(speed, batch).diff
    assert (diff.missing, diff.extra, diff.changed) == (0, 0, 2)
    assert [s["offset"] for s in diff.sample or ()] == [2, 4]
    # In the hour in which columns were added, and where a file lacks nothing.
    later = layers.write([((0, 5), NEW)])
    batch = [*batch, *layers.write([((0, 5), NEW | {"colour": "blue"})])]
    assert layers.compare([*speed, *later], batch).diff.changed == 2
    assert layers.compare(later, batch).diff.changed == 1
    assert {"colour", "home", "g"}.isdisjoint(layers.content([*speed, *later]))
    assert {"colour", "home", "g"} <= layers.content(later).keys()
    renamed = Layers(tmp_path / "renamed", "id STRING NOT NULL, n INT")
    before = renamed.write([((0, 1), {"n": 1}), ((0, 2), {"n": 2})])
    with renamed.table.update_schema() as update:
        update.rename_column("n", "m")
    after = renamed.write([((0, 1), {"m": 1}), ((0, 2), {"m": 3})])
    assert RowReader.of(renamed.table).metadata is not None
    assert renamed.compare(before, after).diff.changed == 1


def test_the_content_of_dropped_rows_is_looked_up(tmp_path: Path) -> None:
    layers = Layers(tmp_path, "id STRING NOT NULL, v STRING")
    files = layers.write([((0, o), {"v": v}) for o, v in enumerate("xxyz")])
    served = layers.write([((1, 7), {"v": "y"}), ((1, 8), {"v": "x"})])
    reader, content = RowReader.of(layers.table), [layers.content(files)["v"]]
    dropped = hash_at(reader, files, content, places([(0, 1), (0, 2), (0, 3)]))
    assert sorted(dropped.column("kafka_offset").to_pylist()) == [1, 2, 3]
    found = {*find_hashes(reader, served, content, dropped).column("hash").to_pylist()}
    assert [row["kafka_offset"] for row in dropped.to_pylist() if row["hash"] not in found] == [3]


def test_keys_are_found_by_their_hashes_and_by_their_places(tmp_path: Path) -> None:
    layers = Layers(tmp_path, "id STRING NOT NULL, n INT")
    rows = [((0, o), {"id": id}) for o, id in enumerate(["a", "b", "a", "", "c"])]
    files = [file for part in (rows[:2], rows[2:]) for file in layers.write(part)]
    reader, key = RowReader.of(layers.table), ["id", "n"]
    wanted = pa.table({"id": ["a", "c", "z"], "n": pa.array([None] * 3, pa.int32())})
    hashes = np.sort(hash_keys(wanted, key).to_numpy())
    found = find_keys(reader, files, key, hashes, 9)
    assert sorted(found.column("id").to_pylist()) == ["a", "a", "c"]
    assert {*found.column(HASH).to_pylist()} < {*hashes.tolist()}
    # The first and the last of the sorted hashes count as well.
    ends = np.sort(hash_keys(wanted.slice(0, 2), key).to_numpy())
    assert len(find_keys(reader, files, key, ends, 9)) == 3
    # A key without a part names no event.
    none = hash_keys(wanted, ["n"]).fill_null(0).to_numpy()
    assert len(find_keys(reader, files, key, none, 9)) == 0
    assert 0 < len(find_keys(reader, files, key, hashes, 0)) < 3
    at = keys_at(reader, files, key, places([(0, 1), (0, 3), (1, 4)])).to_pylist()
    assert sorted((row["kafka_offset"], row["id"]) for row in at) == [(1, "b"), (3, "")]
    assert len(find_keys(reader, [], key, hashes, 9)) == 0
    assert len(keys_at(reader, [], key, places([]))) == 0
