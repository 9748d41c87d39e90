"""The roll-up of small files: which become one, with the same rows, and when it commits."""

import math
import queue
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lakes import FIRST, StreamLake, new_lake, new_state, new_stream
from lakes import stage as stage_rows
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.common.errors import Terminal, Transient
from anabranch.iceberg import admin, manifests, rewriting, schema_evolution, table_schemas
from anabranch.iceberg import lake as iceberg_lake
from anabranch.iceberg.rewriting import (
    Rewritten,
    group_by_schema,
    is_same,
    rewrite,
    rewrite_kept,
    schema_text,
)
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol.publish import land, new_id
from anabranch.protocol.publish_queue import join_queue, remove_turn
from anabranch.protocol.state import Accepted
from speed_layer import compaction
from speed_layer import compaction as planning
from speed_layer.compaction import (
    PASS_AFTER,
    Compaction,
    has_ended,
    is_stale,
    plan_compaction,
    plan_replacement,
    should_wait,
)

NEXT = shift(FIRST, 1)
NOW = datetime(2026, 11, 21, tzinfo=UTC)
MB = 2**20


# What becomes one file


@dataclass(frozen=True)
class Small:
    """Stands where PyIceberg's DataFile would."""

    file_path: str
    record_count: int
    partition: tuple[object, ...] = (date(2026, 11, 21), FIRST)
    bytes_a_row: int = 60
    spec_id: int = 0
    column_sizes: dict[int, int] = field(default_factory=lambda: {1: 1})
    value_counts: dict[int, int] = field(default_factory=dict)

    @property
    def file_size_in_bytes(self) -> int:
        return self.record_count * self.bytes_a_row


def plan(
    files: list[Small], has_ended: bool = False, apart: dict[str, str] | None = None
) -> list[tuple[Small, ...]]:
    return [*plan_compaction(files, has_ended, apart)]  # type: ignore[arg-type, list-item]


def step(
    files: list[Small], has_ended: bool, written: Counter[str], whence: dict[str, list[str]]
) -> list[Small]:
    """Files after a step. `whence`: by first files; `written`: how often each of those."""
    for group in plan(files, has_ended):
        name = new_id()
        whence[name] = [first for f in group for first in whence.get(f.file_path, [f.file_path])]
        written.update(whence[name])
        gone = {f.file_path for f in group}
        files = [f for f in files if f.file_path not in gone]
        rows = sum(f.record_count for f in group)
        files.append(replace(group[0], file_path=name, record_count=rows))
    return files


@pytest.mark.parametrize(("dates", "each"), [(1, 12), (3, 4)])
@pytest.mark.parametrize("rows", [3, 800])
def test_a_reader_of_the_running_hour_opens_at_most_100(dates: int, each: int, rows: int) -> None:
    files: list[Small] = []
    written: Counter[str] = Counter()
    whence: dict[str, list[str]] = {}
    most, new = 0, 0
    for batch in range(900):
        for back in range(dates):
            partition = (date(2026, 11, 21 - back), FIRST)
            files += [Small(f"{batch}-{back}-{i}", rows + i, partition) for i in range(each)]
        new += dates * each
        most = max(most, len(files))
        if new >= PASS_AFTER:
            files, new = step(files, False, written, whence), 0
    assert most <= 100 - dates * each, "a look takes a micro-batch to be committed"
    found = max(written.values())
    assert found <= math.log(sum(f.record_count for f in files), planning._GROWTH_OF_MANY)
    while len(after := step(files, True, written, whence)) < len(files):
        files = after
    size = sum(f.file_size_in_bytes for f in files)
    why = "an ended hour is left in few files"
    assert len(files) <= dates + size // (planning._TARGET_BYTES // 2), why


@given(
    rows=st.lists(st.integers(1, 3_000_000), max_size=150),
    seed=st.integers(0, 9),
    has_ended=st.booleans(),
)
@settings(max_examples=60)
def test_each_file_is_in_one_group_of_one_kind(rows: list[int], seed: int, has_ended: bool) -> None:
    chance = random.Random(seed)

    def small(i: int, n: int) -> Small:
        day, sizes = chance.choice([20, 21]), chance.choice([{1: 1}, {1: 1}, {1: 1, 2: 1}])
        place = (date(2026, 11, day), FIRST)
        return Small(str(i), n, place, spec_id=chance.choice([0, 0, 1]), column_sizes=sizes)

    files = [small(i, n) for i, n in enumerate(rows)]
    apart = {str(i): "other" for i in range(0, len(rows), 7)}
    groups = plan(files, has_ended, apart)
    taken = [f.file_path for group in groups for f in group]
    assert len(taken) == len(set(taken))
    assert sum(map(len, groups)) <= 128
    for group in groups:
        assert len(group) > 1
        like = {(f.partition, f.spec_id, *f.column_sizes, apart.get(f.file_path)) for f in group}
        assert len(like) == 1
        assert all(f.file_size_in_bytes < 64 * MB for f in group)
        assert sum(f.file_size_in_bytes for f in group) <= 128 * MB


@given(st.lists(st.integers(1, 100_000), min_size=2, max_size=120))
@settings(max_examples=60)
def test_a_running_hour_has_a_few_files_of_each_size(rows: list[int]) -> None:
    growth = planning._GROWTH_OF_MANY if len(rows) > planning._MANY else planning._GROWTH
    files = [Small(str(i), n, bytes_a_row=1) for i, n in enumerate(rows)]
    groups = plan(files)
    gone = {f.file_path for group in groups for f in group}
    left = [f for f in files if f.file_path not in gone]
    for group in groups:
        size = planning._size_class(sum(f.record_count for f in group), growth)
        assert all(size > planning._size_class(f.record_count, growth) for f in group)
    by_size = Counter(planning._size_class(f.record_count, growth) for f in left)
    assert all(count < growth for count in by_size.values())


def test_an_hour_that_an_older_version_left_is_done_in_few_steps() -> None:
    files = [Small(str(i), 800) for i in range(20_000)]
    written: Counter[str] = Counter()
    whence: dict[str, list[str]] = {}
    steps = 0
    while plan(files, True):
        files = step(files, True, written, whence)
        steps += 1
    assert steps <= 40
    assert len(files) <= 20_000 * 800 * 60 // (64 * MB) + 1


# One file out of many


ALL_TYPES = (
    "id STRING NOT NULL, small DECIMAL(9,2), mid DECIMAL(18,3), large DECIMAL(38,4), at "
    "TIMESTAMP, day DATE, raw BINARY, f FLOAT, d DOUBLE, yes BOOLEAN, i INT, l BIGINT, list "
    "ARRAY<DOUBLE>, map MAP<STRING, STRUCT<x: FLOAT, y: ARRAY<BINARY>>>, deep STRUCT<a: STRUCT<b: "
    "DOUBLE>, c: ARRAY<ARRAY<INT>>>"
)


def value(i: int) -> dict[str, Any]:
    """A row of all types, with what compares badly: NaN, the negative zero, nulls, empty lists."""
    double = [math.nan, -0.0, 0.0, 1.5, None][i % 5]
    return {
        "id": f"{i}", "small": Decimal(i).scaleb(-2), "mid": Decimal(-i).scaleb(-3),
        "large": Decimal(10**20 + i), "at": datetime(2026, 11, 21, 1, 2, 3, i, tzinfo=UTC),
        "day": date(2026, 11, 1), "raw": bytes([i % 256, 0]), "f": double, "d": double,
        "yes": i % 3 == 0 if i % 4 else None, "i": i, "l": -(2**40) * i,
        "list": [double, None, 2.0][: i % 4] if i % 6 else None,
        "map": [(f"k{j}", {"x": double, "y": [b"z", None]} if j % 2 else None) for j in range(i % 3)],
        "deep": {"a": {"b": double} if i % 2 else None, "c": [[1, None], [], None][: i % 4]} if i % 7 else None,
        "kafka_partition": 0, "kafka_offset": i, "kafka_timestamp": None, "ingest_hour": FIRST,
        "event_date": date(2026, 11, 21),
    }  # fmt: skip


def of_all_types(lake: StreamLake) -> tuple[str, tuple[DataFile, ...]]:
    stream = new_stream(schema=ALL_TYPES, table="games.all_types")
    name, schema = stream.table, table_schemas.rows_schema(stream)
    admin.create(lake.lake, name, schema, ("event_date", "ingest_hour"), {"format-version": "2"})
    files: list[DataFile] = []
    for start in range(0, 60, 12):
        files += stage_rows(lake.lake, name, [value(i) for i in range(start, start + 12)]).files
    return name, tuple(files)


def read(lake: StreamLake, table: Any, data_file: DataFile) -> pq.ParquetFile:
    return rewriting.opened(table, data_file)


def test_one_file_holds_many_ones_rows_in_every_type_exactly(lake: StreamLake) -> None:
    name, files = of_all_types(lake)
    table = lake.lake.load(name)
    assert group_by_schema(table, files).same_schema == files
    made = rewrite(table, files).file
    assert made.record_count == 60
    before = [row for f in files for row in read(lake, table, f).read().to_pylist()]
    assert repr(read(lake, table, made).read().to_pylist()) == repr(before)
    assert schema_text(read(lake, table, made)) == schema_text(read(lake, table, files[0]))
    assert (made.partition, made.spec_id) == (files[0].partition, files[0].spec_id)
    for counts in ("value_counts", "null_value_counts"):
        ids = getattr(files[0], counts)
        expected = {id: sum(getattr(f, counts)[id] for f in files) for id in ids}
        assert getattr(made, counts) == expected
    assert made.column_sizes.keys() == files[0].column_sizes.keys()
    offset = table.schema().find_field("kafka_offset").field_id
    assert made.lower_bounds[offset] == files[0].lower_bounds[offset]
    assert made.upper_bounds[offset] == files[-1].upper_bounds[offset]
    assert made.lower_bounds.keys() == files[0].lower_bounds.keys()


@pytest.mark.parametrize("changed", ["d", "f", "list", "map", "deep"])
def test_values_are_compared_bit_by_bit(lake: StreamLake, changed: str) -> None:
    name, files = of_all_types(lake)
    rows = read(lake, lake.lake.load(name), files[0]).read()
    assert is_same(rows.to_batches(max_chunksize=5), rows.to_batches(max_chunksize=7))
    assert not is_same(rows.to_batches(), rows.slice(1).to_batches())
    values = rows.to_pylist()
    # The eleventh row has the negative zero.
    values[11] |= {
        changed: {
            "d": 0.0,
            "f": None,
            "list": [0.0, None, 2.0],
            "map": [("k0", None), ("k1", {"x": 0.0, "y": [b"z", None]})],
            "deep": {"a": {"b": 0.0}, "c": [[1, None], [], None]},
        }[changed]
    }
    other = pa.Table.from_pylist(values, schema=rows.schema)
    assert not is_same(rows.to_batches(), other.to_batches())


def test_files_of_different_columns_or_types_are_not_put_together(lake: StreamLake) -> None:
    before = [lake.stage([(FIRST, 0, i)]).files[0] for i in range(2)]
    stream = new_stream(schema="id STRING NOT NULL, n BIGINT, more STRING")
    schema_evolution.evolve(lake.lake, lake.name, table_schemas.rows_columns(stream))
    after = [lake.stage([(FIRST, 0, i)]).files[0] for i in range(2, 5)]
    table = lake.table()
    groups = group_by_schema(table, [*before, *after])
    assert groups.same_schema == tuple(after)
    assert groups.other_schemas.keys() == {f.file_path for f in before}
    assert group_by_schema(table, before).same_schema == tuple(before)
    assert rewrite(table, before).file.column_sizes.keys() == before[0].column_sizes.keys()


# Commits


def publish(lake: StreamLake, count: int, hour: str = FIRST) -> None:
    """So many micro-batches of one row and one file each."""
    for _ in range(count):
        at = lake.state().position.offsets[0]
        lake.serve([(hour, 0, at)], {0: at + 1})


def files(lake: StreamLake, branch: str = "main", hour: str = FIRST) -> set[str]:
    return {f.file_path for f in manifests.files_of(lake.table(), branch, hour)}


def stored(lake: StreamLake) -> set[str]:
    return {p.name for p in (lake.folder / "warehouse").rglob("rolled-*.parquet")}


@pytest.fixture
def rolling(lake: StreamLake) -> Iterator[Compaction]:
    made = Compaction(lake.lake, lake.stream)
    yield made
    made.close()


def written(rolling: Compaction) -> None:
    """Look, and have written what is due; nothing is committed."""
    rolling.begin()
    rolling._start_pass()
    assert rolling._work is not None
    rolling._work.result()
    rolling._take_pass()
    assert rolling._waiting


def test_many_micro_batches_leave_few_files(lake: StreamLake, rolling: Compaction) -> None:
    most = 0
    for _ in range(5):
        publish(lake, 10)
        for _ in range(10):
            rolling.published(1)
        most = max(most, len(files(lake)))
    rolling.finish()
    publish(lake, 1)
    before = lake.state()
    rolling.begin()
    rolling.finish()
    state = lake.state()
    assert lake.rows("main") == lake.rows("speed") == [(FIRST, 0, i) for i in range(51)]
    assert files(lake) == files(lake, "speed") and len(files(lake)) < 16
    assert len(stored(lake)) >= 1
    assert (state.position, state.timeline, state.content, state.merged, state.accepted) == (
        before.position, before.timeline, before.content, before.merged, before.accepted,
    )  # fmt: skip
    assert state.is_merged


def test_an_ended_hour_that_waits_is_one_file(lake: StreamLake, rolling: Compaction) -> None:
    publish(lake, 5)
    state = lake.state()
    sealed = replace(state.timeline, open=NEXT, start={0: 5}, sealed={FIRST: Cut("t", {0: (0, 5)})})
    lake.serve([(NEXT, 0, 5)], {0: 6}, timeline=sealed)
    assert has_ended(lake.state(), FIRST) and not has_ended(lake.state(), NEXT)
    rolling.finish()
    assert len(files(lake)) == len(files(lake, "speed")) == 1
    assert lake.rows("main") == [*((FIRST, 0, i) for i in range(5)), (NEXT, 0, 5)]


def test_an_hour_accepted_meanwhile_is_not_rolled_up(lake: StreamLake, rolling: Compaction) -> None:
    publish(lake, 10)
    written(rolling)
    assert stored(lake)
    accepted = lake.stage([(FIRST, 0, i) for i in range(10)])
    lake.land(lake.accept(accepted, FIRST, Accepted(1, Cut("t", {0: (0, 10)}))))
    rolling.published(0)
    assert not stored(lake), "no commit knows of it"
    assert files(lake) == {accepted.files[0].file_path}
    assert lake.rows("main") == lake.rows("speed") == [(FIRST, 0, i) for i in range(10)]


def test_one_of_two_compactions_of_an_hour_lands(lake: StreamLake, rolling: Compaction) -> None:
    publish(lake, 10)
    other = Compaction(lake.again(), lake.stream)
    written(rolling)
    written(other)
    assert len(stored(lake)) == 2
    other.published(0)
    rolling.published(0)
    other.close()
    assert len(files(lake)) == len(stored(lake)) == 1
    assert lake.rows("main") == lake.rows("speed") == [(FIRST, 0, i) for i in range(10)]


def test_a_compaction_refused_by_a_moved_head_is_committed_later(
    lake: StreamLake, rolling: Compaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(lake, 10)
    written(rolling)
    moved = iter([True])

    def another_publisher_first(*given: Any) -> Any:
        if next(moved, False):
            publish(lake, 1)
        return land(*given)

    monkeypatch.setattr(compaction, "land", another_publisher_first)
    rolling.published(1)
    assert len(files(lake)) == 11
    rolling.published(0)
    assert len(files(lake)) == 2
    assert lake.rows("main") == lake.rows("speed") == [(FIRST, 0, i) for i in range(11)]


@pytest.mark.parametrize("lands", [True, False])
@pytest.mark.parametrize("is_found", [True, False])
def test_a_file_of_a_requested_commit_is_never_deleted(
    lake: StreamLake,
    rolling: Compaction,
    monkeypatch: pytest.MonkeyPatch,
    lands: bool,
    is_found: bool,
) -> None:
    publish(lake, 10)
    written(rolling)
    with monkeypatch.context() as patch:
        real: Callable[..., Any] = lake.lake.catalog.commit_table

        def lose(*given: Any) -> Any:
            if lands:
                real(*given)
            raise ConnectionError("the answer is lost")

        def away(*given: Any) -> Any:
            raise Transient("the lake does not answer")

        patch.setattr(lake.lake.catalog, "commit_table", lose)
        patch.setattr(iceberg_lake, "_RETRIES_WITHIN_SECONDS", 1.0)
        if not is_found:
            patch.setattr(lake.lake, "_settle", away)
        rolling.published(0)
    assert len(files(lake)) == (1 if lands else 10)
    rolling.published(0)
    assert len(files(lake)) == len(stored(lake)) == 1
    rolling.close()
    assert lake.rows("main") == lake.rows("speed") == [(FIRST, 0, i) for i in range(10)]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda rows: rows.slice(1), r"expected to read the same rows .*roll_up: false"),
        (lambda rows: rows.take([*range(len(rows))][::-1]), "found others"),
    ],
    ids=["fewer", "in another order"],
)
def test_rows_that_are_not_read_back_as_they_were_are_not_published(
    lake: StreamLake, rolling: Compaction, monkeypatch: pytest.MonkeyPatch,
    change: Callable[[pa.Table], pa.Table], found: str
) -> None:  # fmt: skip
    publish(lake, 10)
    before, real = files(lake), rewriting.groups_by_size

    def changed(*given: Any) -> Iterator[list[pa.RecordBatch]]:
        for group in real(*given):
            yield change(pa.Table.from_batches(group)).to_batches()

    monkeypatch.setattr(rewriting, "groups_by_size", changed)
    with pytest.raises(Terminal, match=found):
        rolling.finish()
    assert files(lake) == before and not stored(lake)


def test_a_file_with_other_rows_than_its_manifest_entry_is_not_copied(lake: StreamLake) -> None:
    """The hazard: the copy and the rows that it is compared with are read alike, so only the
    manifest has the number of rows."""
    publish(lake, 3)
    sources = manifests.files_of(lake.table(), "speed", FIRST)
    path = Path(sources[1].file_path.removeprefix("file://"))
    pq.write_table(pq.ParquetFile(path).read().slice(1), path)
    wrong = rf"{path}: expected the 1 rows of its manifest entry, found 0; nothing was published"
    with pytest.raises(Terminal, match=wrong):
        rewrite(lake.table(), sources)
    with pytest.raises(Terminal, match=wrong):
        rewrite_kept(lake.table(), sources[1], lambda batch: pa.array([True] * len(batch)))
    assert not stored(lake)


def test_a_file_that_cannot_be_compacted_does_not_stop_the_stream(
    lake: StreamLake, rolling: Compaction, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(lake, 10)

    def fail(*given: Any) -> Any:
        raise pa.ArrowInvalid("no such encoding")

    monkeypatch.setattr(rewriting, "groups_by_size", fail)
    rolling.finish()
    rolling.published(PASS_AFTER)
    assert rolling._work is None, "it looks no more"
    assert len(files(lake)) == 10 and not stored(lake)


def test_two_streams_compact_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go, original = queue.SimpleQueue[str](), threading.Event(), rewriting.rewrite

    def held(table: Table, *given: Any) -> Rewritten:
        entered.put(table.location())
        assert go.wait(60)
        return original(table, *given)

    monkeypatch.setattr(compaction, "rewrite", held)
    lakes = []
    for i in range(4):
        (tmp_path / str(i)).mkdir()
        lakes.append(new_lake(tmp_path / str(i)))
    streams = [Compaction(one.lake, one.stream) for one in lakes]
    for one in lakes:
        publish(one, 10)
    for rolling in streams:
        rolling.published(PASS_AFTER)
    try:
        first = {entered.get(timeout=300), entered.get(timeout=300)}
        streams[3].close()
        assert entered.empty(), "a stream that waits for a thread has begun nothing"
    finally:
        go.set()
    for rolling in streams[:3]:
        rolling.finish()
        rolling.close()
    assert [len(files(one)) for one in lakes] == [1, 1, 1, 10]
    assert entered.get_nowait() not in first
    assert entered.empty()


def test_switched_off_nothing_is_rolled_up(lake: StreamLake) -> None:
    publish(lake, 10)
    speed = lake.stream.speed.model_copy(update={"roll_up": False})
    rolling = Compaction(lake.lake, lake.stream.model_copy(update={"speed": speed}))
    rolling.published(PASS_AFTER)
    rolling.finish()
    rolling.close()
    assert len(files(lake)) == 10


@pytest.mark.parametrize("by_clock", [False, True], ids=["this process", "the table's clock"])
def test_an_old_one_is_discarded(lake: StreamLake, rolling: Compaction, by_clock: bool) -> None:
    ahead = timedelta()
    if by_clock:
        lake.lake.__dict__["clock"] = SimpleNamespace(now=lambda *_: datetime.now(UTC) + ahead)
    publish(lake, 10)
    written(rolling)
    ahead = timedelta(minutes=11)
    rolling._began -= timedelta(minutes=0 if by_clock else 10)
    rolling.published(0)
    assert not stored(lake) and len(files(lake)) == 10
    assert is_stale(NOW, NOW + timedelta(minutes=10))
    assert is_stale(NOW, NOW - timedelta(seconds=1)), "a clock that was set back says nothing"
    assert not is_stale(NOW, NOW + timedelta(minutes=9))


def test_it_waits_for_a_queue_or_a_merge(lake: StreamLake, rolling: Compaction) -> None:
    publish(lake, 10)
    written(rolling)
    turn = join_queue(lake.lake, lake.name, "batch")
    assert turn is not None
    assert should_wait(lake.state(), rolling._began, datetime.now(UTC))
    rolling.published(0)
    assert len(files(lake)) == 10
    remove_turn(lake.lake, lake.name, turn.id)
    rolling.published(0)
    assert len(files(lake)) == 1


def test_an_hour_that_main_serves_otherwise_or_keeps_is_left_alone() -> None:
    timeline = Timeline(FIRST, NEXT, {0: 5}, sealed={FIRST: Cut("t", {0: (0, 5)})})
    same = {"speed": "a", "batch": "b"}
    defaults: dict[str, Any] = {"content": same, "merged": same}
    source = Small("source", 5)
    there: Any = {FIRST: {"source": source}}
    done: Any = [rewriting.Rewritten(Small("new", 5), (source,))]  # type: ignore[arg-type]

    def planned(**values: Any) -> Any:
        state = new_state(timeline, {0: 5}, **(defaults | values))
        return plan_replacement(state, done, there, NOW, NOW, "id")

    assert planned() is not None and planned(retained_hours=(FIRST,)) is None
    assert planned(overrides={FIRST: "batch"}) is None and planned(merged={}) is None
    assert planned(accepted={FIRST: Accepted(1, Cut("t", {0: (0, 5)}))}) is None
    there = {FIRST: {}}
    assert planned() is None
