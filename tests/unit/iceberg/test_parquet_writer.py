"""Files that PyArrow writes for a later publish: one for each partition, and nothing lost."""

import pickle
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlparse

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from lakes import FIRST, StreamLake, new_lake, new_stream
from pyiceberg.conversions import from_bytes
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.table import Table, Transaction
from pyiceberg.table.update.spec import UpdateSpec
from pyiceberg.transforms import BucketTransform, DayTransform, VoidTransform
from rest_stand_in import running_rest

from anabranch.iceberg import admin, parquet_writer, table_schemas, vended
from anabranch.iceberg.commits import Change
from anabranch.iceberg.file_io import LakeFileIO, write_files
from anabranch.iceberg.manifests import own_spec_id
from anabranch.iceberg.parquet_writer import FileWriter, Output, data_file_of, target_of, write_all
from anabranch.iceberg.snapshots import heads
from anabranch.iceberg.staging import MOST_OPEN_FILES, Written, by_own_spec
from anabranch.offsets.hours import shift
from anabranch.offsets.position import Position
from anabranch.protocol.publish import Publish

WIDE = (
    "id STRING NOT NULL, at TIMESTAMP NOT NULL, level INT, total BIGINT, amount DOUBLE, "
    "ok BOOLEAN, day DATE, never STRING"
)
NEXT = shift(FIRST, 1)
DAY = date(2026, 11, 21)
AT = datetime(2026, 11, 21, 0, 30, tzinfo=UTC)
BEGAN = datetime(2026, 11, 21, 5, tzinfo=UTC)


def wide_table(lake: StreamLake, ddl: str = WIDE, **properties: str) -> Table:
    """A table of a stream with other columns, beside the lake's own."""
    stream = new_stream(schema=ddl)
    by, properties = ("event_date", "ingest_hour"), admin.TABLE_PROPERTIES | properties
    admin.create(lake.lake, "games.wide", table_schemas.rows_schema(stream), by, properties)
    return lake.lake.load("games.wide")


def wide_rows(table: Table, count: int, first: int = 0) -> pa.Table:
    """Rows of two hours and two days, with nulls among them."""
    values = [
        {
            "id": f"é{i:05}", "at": AT + timedelta(microseconds=i), "level": None if i % 3 else -i,
            "total": 2**40 + i, "amount": None if i % 5 == 0 else i / 3, "ok": bool(i % 2),
            "day": date(1900, 1, 1) + timedelta(days=i), "never": None, "kafka_partition": 3,
            "kafka_offset": i, "kafka_timestamp": AT, "ingest_hour": (FIRST, NEXT)[i % 2],
            "event_date": DAY - timedelta(days=i // 2 % 2),
        }
        for i in range(first, first + count)
    ]  # fmt: skip
    schema = schema_to_pyarrow(table.schema(), include_field_ids=False)
    return pa.Table.from_pylist(values, schema=schema)


def narrow_rows(partitions: list[tuple[date, str]], first: int = 0) -> pa.Table:
    """Rows of the lake's own table, one for each of `partitions`; columns in another order."""
    count = len(partitions)
    return pa.table(
        {
            "event_date": pa.array([day for day, _ in partitions], pa.date32()),
            "ingest_hour": [hour for _, hour in partitions],
            "kafka_offset": pa.array(range(first, first + count), pa.int64()),
            "kafka_partition": pa.array([0] * count, pa.int32()),
            "kafka_timestamp": pa.array([AT] * count, pa.timestamp("us", "UTC")),
            "n": pa.array(range(first, first + count), pa.int32()),
            "id": [f"0-{i}" for i in range(first, first + count)],
            "of no column": [None] * count,
        }
    )


def write(table: Table, *rows: pa.Table) -> list[Output]:
    target = target_of(table)
    assert target is not None
    writer = FileWriter(target)
    for some in rows:
        assert writer.write(some) is None
    return writer.close()


def on_disk(path: str) -> Path:
    return Path(urlparse(path).path)


def publish(lake: StreamLake, files: tuple[DataFile, ...]) -> None:
    state = lake.state()
    changes = (Change("speed", files), Change("main", files))
    position = Position("t", {0: sum(f.record_count for f in files)})
    made = Publish("attempt", changes, state.timeline, position)
    lake.land(made, state)


def test_rows_of_several_partitions_go_to_a_file_in_each_folder(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    before = DAY - timedelta(days=1)
    partitions = [
        (DAY, FIRST), (before, FIRST), (DAY, NEXT), (DAY, FIRST), (date(1969, 12, 31), NEXT),
    ]  # fmt: skip
    outputs = write(lake.table(), narrow_rows(partitions), narrow_rows(partitions[:1], first=5))

    folder = f"{lake.table().location()}/data"
    expected = Counter(f"{folder}/event_date={day}/ingest_hour={hour}" for day, hour in partitions)
    assert len(outputs) == len(expected) == 4
    assert {o.path.rpartition("/")[0] for o in outputs} == set(expected)
    rows = {o.path.rpartition("/")[0]: pq.ParquetFile(on_disk(o.path)).read() for o in outputs}
    found = {name: len(table) for name, table in rows.items()}
    assert found == expected | Counter({f"{folder}/event_date={DAY}/ingest_hour={FIRST}": 3})
    wanted = ["0-0", "0-3", "0-5"]
    assert rows[f"{folder}/event_date={DAY}/ingest_hour={FIRST}"]["id"].to_pylist() == wanted
    assert sorted(o.partition for o in outputs) == [
        (-1, NEXT), ((before - date(1970, 1, 1)).days, FIRST), (20_778, FIRST), (20_778, NEXT),
    ]  # fmt: skip
    described = [data_file_of(lake.table(), o) for o in outputs]
    shown = [(f.partition[0], f.partition[1], f.spec_id) for f in described]
    assert shown == [(*o.partition, 0) for o in outputs]


@pytest.mark.parametrize("length", [16, 64])
def test_an_upper_bound_steps_over_surrogates(tmp_path: Path, length: int) -> None:
    """U+D7FF is the last character before them: by its successor, the bound is no text."""
    limit = {"write.metadata.metrics.column.id": f"truncate({length})"}
    table = wide_table(new_lake(tmp_path), **limit)
    letters = "a" * (length - 1)
    for text, bound in (
        (f"{letters}\ud7ffb", f"{letters}\ue000"),
        ("\ud7ff" * (length + 1), "\ud7ff" * (length - 1) + "\ue000"),
        (f"{letters}\ud7ff", f"{letters}\ud7ff"),
        (f"{letters[1:]}b\U0010ffffc", f"{letters[1:]}c\U0010ffff"),
        ("\U0010ffff" * (length + 1), None),
    ):
        rows = wide_rows(table, 1)
        rows = rows.set_column(0, rows.schema.field(0), pa.array([text], pa.large_string()))
        [output] = write(table, rows)
        file = data_file_of(table, output)
        upper = (file.upper_bounds or {}).get(table.schema().find_field("id").field_id)
        assert (upper.decode() if upper is not None else None) == bound
        assert bound is None or text.encode() <= bound.encode()


def add_bucket(update: UpdateSpec) -> None:
    update.add_field("id", BucketTransform(4), "id_bucket")


def remove_hour(update: UpdateSpec) -> None:
    update.remove_field("ingest_hour")


@pytest.mark.parametrize("change", [add_bucket, remove_hour])
def test_files_follow_the_spec_of_apply_after_another_program_set_another(
    tmp_path: Path, change: Callable[[UpdateSpec], None]
) -> None:
    lake = new_lake(tmp_path)
    with lake.lake.catalog.load_table(lake.name).update_spec() as update:
        change(update)
    table = lake.table()
    assert table.spec().spec_id == 1 and own_spec_id(table) == 0
    assert by_own_spec(table) == {"output-spec-id": "0"}
    assert target_of(table) is not None
    files = tuple(data_file_of(table, o) for o in write(table, narrow_rows([(DAY, FIRST)])))
    assert [file.spec_id for file in files] == [0]
    publish(lake, files)
    assert lake.rows("main") == [(FIRST, 0, 0)]
    # The ledger and dead letters too, which PyIceberg writes.
    name = lake.stream.dead_letters_table
    with lake.lake.catalog.load_table(name).update_spec() as update:
        update.add_field("error_code", BucketTransform(4), "code_bucket")
    letters = lake.lake.load(name)
    letter = {
        "topic_id": "t", "kafka_partition": 0, "kafka_offset": 1, "ingest_hour": FIRST,
        "error_code": "malformed", "layer": "speed",
    }  # fmt: skip
    rows = pa.Table.from_pylist([letter], schema=schema_to_pyarrow(letters.schema()))
    [file] = write_files(letters, rows, {})
    assert file.spec_id == 0 and f"ingest_hour={FIRST}/" in file.file_path
    assert "code_bucket" not in file.file_path


def test_no_two_writers_write_to_the_same_file(tmp_path: Path) -> None:
    """The hazard: retried tasks and later attempts write the same rows beside earlier ones."""
    lake = new_lake(tmp_path)
    paths = {write(lake.table(), narrow_rows([(DAY, FIRST)]))[0].path for _ in range(20)}
    assert len(paths) == 20
    assert all(on_disk(path).is_file() for path in paths)


def test_a_file_is_reported_once_it_is_closed(tmp_path: Path) -> None:
    """The hazard: an object store has nothing of a file that is not closed."""
    target = target_of(new_lake(tmp_path).table())
    assert target is not None
    writer = FileWriter(target)
    writer.write(narrow_rows([(DAY, FIRST), (DAY, NEXT)]))
    sinks = [each.sink for each in writer._open.values()]
    assert len(writer.close()) == len(sinks) == 2
    assert all(sink.closed for sink in sinks)


def test_a_read_after_a_publish_returns_the_published_state(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    partitions = [(DAY - timedelta(days=i % 3), (FIRST, NEXT)[i % 2]) for i in range(30)]
    rows = narrow_rows(partitions)
    table = lake.table()
    outputs = write(table, rows.slice(0, 11), rows.slice(11))
    publish(lake, tuple(data_file_of(table, o) for o in outputs))

    expected = sorted((hour, 0, i) for i, (_, hour) in enumerate(partitions))
    assert lake.rows("main") == lake.rows("speed") == expected
    table = lake.table()
    read = table.scan(snapshot_id=heads(table)["main"]).to_arrow().sort_by("kafka_offset")
    assert read.to_pylist() == rows.select(read.column_names).to_pylist()
    # A reader that asks for a part is led by partitions and bounds.
    part = f"ingest_hour = '{NEXT}' AND n > 20"
    some = table.scan(part, snapshot_id=heads(table)["main"]).to_arrow()
    assert sorted(some["n"].to_pylist()) == [21, 23, 25, 27, 29]


def test_a_file_is_described_as_it_is(tmp_path: Path) -> None:
    table = wide_table(new_lake(tmp_path))
    rows = wide_rows(table, 200)
    outputs = write(table, rows.slice(0, 70), rows.slice(70))
    assert len(outputs) == 4
    ids = {f.name: f.field_id for f in table.schema().fields}
    types = {f.name: f.field_type for f in table.schema().fields}
    for output in outputs:
        day, hour = output.partition
        same_hour = pc.equal(rows["ingest_hour"], hour)
        mine = rows.filter(pc.and_(same_hour, pc.equal(rows["event_date"].cast("int32"), day)))
        file = data_file_of(table, output)
        assert (file.file_path, file.file_format) == (output.path, FileFormat.PARQUET)
        assert file.file_size_in_bytes == output.size == on_disk(output.path).stat().st_size
        assert file.record_count == len(mine) == 50
        assert pq.ParquetFile(on_disk(output.path)).metadata.num_rows == 50
        for name, column in zip(mine.column_names, mine.columns, strict=True):
            assert file.value_counts[ids[name]] == 50
            assert file.null_value_counts[ids[name]] == column.null_count, name
            if name == "never":
                assert ids[name] not in file.lower_bounds and ids[name] not in file.upper_bounds
                continue
            of_file = (file.lower_bounds, file.upper_bounds)
            bounds = (from_bytes(types[name], b[ids[name]]) for b in of_file)
            times = dict.fromkeys(("at", "kafka_timestamp"), "int64")
            days = dict.fromkeys(("day", "event_date"), "int32")
            raw = column.cast((times | days).get(name, column.type))
            assert tuple(bounds) == (pc.min(raw).as_py(), pc.max(raw).as_py()), name
        assert list(file.split_offsets or []) == [4]


def test_the_statistics_are_those_that_pyiceberg_gives_the_same_rows(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    # The statistics of a text contain only its start.
    table = wide_table(lake, **{"write.metadata.metrics.column.never": "none"})
    rows = wide_rows(table, 40).set_column(0, "id", pa.array([f"{'x' * 40}{i}" for i in range(40)]))
    tx = Transaction(table)
    tx.append(rows.cast(schema_to_pyarrow(table.schema())))
    lake.lake.catalog.commit_table(table, tuple(tx._requirements), tuple(tx._updates))
    theirs = {
        tuple(t.file.partition[i] for i in (0, 1)): t.file
        for t in lake.lake.load("games.wide").scan().plan_files()
    }
    ours = {o.partition: data_file_of(table, o) for o in write(table, rows)}
    assert ours.keys() == theirs.keys() and len(ours) == 4
    for partition, mine in ours.items():
        their = theirs[partition]
        for name in (
            "record_count",
            "value_counts",
            "null_value_counts",
            "lower_bounds",
            "upper_bounds",
        ):
            assert getattr(mine, name) == getattr(their, name), name


def test_a_file_has_the_field_ids_and_the_nullability_of_the_table(tmp_path: Path) -> None:
    table = wide_table(new_lake(tmp_path))
    [output, *_] = write(table, wide_rows(table, 9))
    parquet = pq.ParquetFile(on_disk(output.path))
    assert b"ARROW:schema" not in (parquet.metadata.metadata or {})
    schema = parquet.schema_arrow
    found = {f.name: (int(f.metadata[b"PARQUET:field_id"]), not f.nullable) for f in schema}
    assert found == {f.name: (f.field_id, f.required) for f in table.schema().fields}
    shown = {parquet.metadata.row_group(0).column(i).compression for i in range(len(schema))}
    assert shown == {"ZSTD"}


@pytest.mark.parametrize(
    "codec, expected",
    [("zstd", "ZSTD"), ("gzip", "GZIP"), ("snappy", "SNAPPY"), ("uncompressed", "UNCOMPRESSED")],
)
def test_a_file_has_the_tables_compression(tmp_path: Path, codec: str, expected: str) -> None:
    table = wide_table(new_lake(tmp_path), **{"write.parquet.compression-codec": codec})
    [output, *_] = write(table, wide_rows(table, 9))
    found = pq.ParquetFile(on_disk(output.path)).metadata.row_group(0).column(0).compression
    assert found == expected


def test_a_target_can_be_sent_to_another_process(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    target = target_of(lake.table())
    writer = FileWriter(pickle.loads(pickle.dumps(target)))
    writer.write(narrow_rows([(DAY, FIRST)]))
    [output] = pickle.loads(pickle.dumps(writer.close()))
    publish(lake, (data_file_of(lake.table(), output),))
    assert lake.rows("main") == [(FIRST, 0, 0)]


def test_tasks_get_what_files_need_and_no_secret_of_the_catalog(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    table = lake.table()
    files = {
        "s3.endpoint": "https://h", "s3.secret-access-key": "k", "s3.ca": "/ca.pem",
        "client.region": "r", "s3.region": "r",
    }  # fmt: skip
    table.io = LakeFileIO(
        files | {"uri": "postgresql+psycopg2://u:p@h/db", "token": "t", "credential": "id:secret"}
    )
    target = target_of(table)
    assert target is not None
    assert (type(target.io), target.io.properties) == (LakeFileIO, files)


def test_tasks_get_keys_that_are_valid_and_the_means_to_renew_them(tmp_path: Path) -> None:
    with running_rest(tmp_path) as rest:
        of_s3 = {"py-io-impl": "anabranch.iceberg.file_io.LakeFileIO"}
        lake = new_lake(tmp_path, type="rest", uri=rest.url, properties=of_s3)
        ends = {"s3.session-token-expires-at-ms": str(int(1000 * (time.time() + 3600)))}
        rest.config = {"s3.access-key-id": "a", "s3.secret-access-key": "b"} | ends
        rest.config |= {"s3.session-token": "first"}
        # A stream without records for hours still has the old token.
        table = lake.table()
        ends = {"s3.session-token-expires-at-ms": str(int(1000 * (time.time() + 7200)))}
        rest.config |= {"s3.session-token": "second"} | ends
        first = target_of(table)
        with pytest.MonkeyPatch.context() as later:
            later.setattr(vended, "time", SimpleNamespace(time=lambda: time.time() + 3500))
            second = target_of(table)
        for target, token in ((first, "first"), (second, "second")):
            assert target is not None and isinstance(target.io, LakeFileIO)
            assert target.io.properties["s3.session-token"] == token
            assert isinstance(table.io, LakeFileIO) and target.io.vendor == table.io.vendor


def _days(count: int, first: int = 0) -> list[tuple[date, str]]:
    return [(DAY - timedelta(days=first + i), FIRST) for i in range(count)]


MOST = MOST_OPEN_FILES


@pytest.mark.parametrize(
    ("partitions", "left"),
    [
        # Each partition twice, with those of others between.
        ([_days(MOST + 6) * 2], [12]),
        # Partitions of open and other files; of other files only; of open files only.
        ([_days(MOST), _days(4, MOST - 2), _days(3, MOST), _days(5)], [0, 2, 3, 0]),
        # A batch of one partition waits.
        ([_days(MOST), _days(1, MOST) * 3], [0, 3]),
    ],
)
def test_rows_of_more_partitions_than_open_files_are_left(
    tmp_path: Path, partitions: list[list[tuple[date, str]]], left: list[int]
) -> None:
    lake = new_lake(tmp_path)
    target = target_of(lake.table())
    assert target is not None
    writer, waiting, count = FileWriter(target), list[list[int]](), 0
    for some in partitions:
        rows = narrow_rows(some, first=count)
        mask = writer.write(rows)
        waiting.append([] if mask is None else rows.filter(mask)["kafka_offset"].to_pylist())
        count += len(rows)
    outputs = writer.close()
    assert (len(outputs), [*map(len, waiting)]) == (MOST, left)
    publish(lake, tuple(data_file_of(lake.table(), o) for o in outputs))
    read = [offset for _, _, offset in lake.rows("main")]
    assert sorted([*read, *(o for some in waiting for o in some)]) == list(range(count))


def test_rows_of_many_partitions_few_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: two thousand dates, a file open for each, which takes a megabyte and a handle."""
    lake = new_lake(tmp_path)
    target = target_of(lake.table())
    assert target is not None
    most = 0
    opened = FileWriter._file

    def counted(self: FileWriter, partition: tuple[Any, ...]) -> Any:
        nonlocal most
        found = opened(self, partition)
        most = max(most, len(self._open))
        return found

    monkeypatch.setattr(FileWriter, "_file", counted)
    batches = [narrow_rows(_days(2 * MOST_OPEN_FILES + 9))]
    for n, first in ((1, 0), (70, 60), (1, 999)):
        batches.append(narrow_rows(_days(n, first), 100 * n + 500))
    files, outputs = FileWriter(target), list[Output]()
    for rows in batches:
        outputs += write_all(files, rows)
    outputs += files.close()
    assert len({output.path for output in outputs}) == len(outputs)
    assert most == MOST_OPEN_FILES
    publish(lake, tuple(data_file_of(lake.table(), output) for output in outputs))
    expected = sorted(offset for rows in batches for offset in rows["kafka_offset"].to_pylist())
    assert sorted(offset for _, _, offset in lake.rows("main")) == expected


def test_waiting_rows_become_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = new_lake(tmp_path)
    table = lake.table()
    batches = [narrow_rows([(DAY, FIRST), (DAY, NEXT)] * 500, first=1_000 * i) for i in range(6)]

    def row_groups() -> set[int]:
        outputs = write(table, *batches)
        files = [pq.ParquetFile(on_disk(o.path)) for o in outputs]
        assert [f.metadata.num_rows for f in files] == [3_000, 3_000]
        assert [data_file_of(table, o).record_count for o in outputs] == [3_000, 3_000]
        written_ = pa.concat_tables([f.read() for f in files])["kafka_offset"].to_pylist()
        assert sorted(written_) == list(range(6_000))
        return {f.metadata.num_row_groups for f in files}

    assert row_groups() == {1}
    size = batches[0].select(table.schema().column_names).nbytes
    monkeypatch.setattr(parquet_writer, "_WAITING_BYTES", int(1.5 * size))
    assert row_groups() == {3}
    monkeypatch.setattr(parquet_writer, "_WAITING_BYTES", 0)
    assert row_groups() == {6}


@pytest.mark.parametrize(
    "properties",
    [
        {"write.parquet.compression-level": "19"},
        # Iceberg's writers put the table's name into such paths.
        {"write.object-storage.enabled": "true", "write.data.path": "file:///elsewhere"},
    ],
)
def test_a_table_packed_otherwise_is_icebergs(tmp_path: Path, properties: dict[str, str]) -> None:
    lake = new_lake(tmp_path)
    assert target_of(wide_table(lake)) is not None
    lake.lake.catalog.drop_table("games.wide")
    assert target_of(wide_table(lake, **properties)) is None


def test_files_are_written_to_the_tables_data_path(tmp_path: Path) -> None:
    folder = f"file://{tmp_path}/elsewhere"
    table = wide_table(new_lake(tmp_path), **{"write.data.path": f"{folder}/"})
    outputs = write(table, wide_rows(table, 4))
    assert {o.path.partition("/event_date=")[0] for o in outputs} == {folder}


@pytest.mark.parametrize("by", ["no date", "no hour", "another order", "one more"])
def test_a_table_of_other_partitions_is_written_by_apply(tmp_path: Path, by: str) -> None:
    lake = new_lake(tmp_path)
    wide_table(lake)
    with lake.lake.load("games.wide").update_spec() as spec:
        if by != "one more":
            spec.remove_field("ingest_hour" if by == "no hour" else "event_date")
        else:
            spec.add_field("id", BucketTransform(4), "of_id")
    if by == "another order":
        with lake.lake.load("games.wide").update_spec() as spec:
            spec.add_identity("event_date")
    table = lake.lake.load("games.wide")
    assert table.spec().spec_id > 0
    [output] = write(table, wide_rows(table, 1))
    assert f"/event_date={DAY}/ingest_hour={FIRST}/" in output.path
    assert data_file_of(table, output).spec_id == 0


@pytest.mark.parametrize("transform", [DayTransform(), VoidTransform()], ids=str)
def test_a_table_of_other_transforms_is_left_to_iceberg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transform: Any
) -> None:
    table = wide_table(new_lake(tmp_path))
    date_, hour = table.spec().fields
    # Iceberg lets no field but an identity have a column's name, as of today.
    other = PartitionSpec(date_.model_copy(update={"transform": transform}), hour)
    monkeypatch.setattr(table, "specs", lambda: {0: other})
    assert target_of(table) is None


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("FLOAT", 0.5),
        ("DECIMAL(9,2)", Decimal("1.25")),
        ("BINARY", b"x"),
        ("ARRAY<STRING>", ["a", None]),
        ("STRUCT<a: INT, b: MAP<STRING, TIMESTAMP>>", {"a": 1, "b": [("k", AT)]}),
    ],
)
def test_columns_of_every_type_are_written(tmp_path: Path, kind: str, value: Any) -> None:
    lake = new_lake(tmp_path)
    table = wide_table(lake, ddl=f"id STRING NOT NULL, other {kind}")
    own = {"id": "a", "other": value, "kafka_partition": 0, "kafka_offset": 7}
    given = own | {"kafka_timestamp": AT, "ingest_hour": FIRST, "event_date": DAY}
    target = target_of(table)
    assert target is not None
    [output] = write(table, pa.Table.from_pylist([given], schema=target.schema))
    data_file = data_file_of(table, output)
    assert data_file.record_count == 1
    written = pq.read_table(output.path.removeprefix("file://"))
    assert written["other"].to_pylist() == [value]


def test_a_folder_that_cannot_be_written_to_is_an_os_error(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    # No rights keep root out; a file in a folder's place keeps everybody out.
    data = on_disk(f"{lake.table().location()}/data")
    data.mkdir(parents=True)
    (data / f"event_date={DAY}").write_text("")
    with pytest.raises(OSError):
        write(lake.table(), narrow_rows([(DAY, FIRST)]))
    (data / f"event_date={DAY}").unlink()
    assert len(write(lake.table(), narrow_rows([(DAY, FIRST)]))) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("rows", [1, 400_000], ids=["at the end", "in the midst"])
def test_a_full_disks_os_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """The hazard: the file is reported, and is not complete."""
    lake = new_lake(tmp_path)
    monkeypatch.setattr(parquet_writer, "_WAITING_BYTES", 2**20)
    target = target_of(lake.table())
    assert target is not None
    writer = FileWriter(target)
    folder = on_disk(f"{lake.table().location()}/data/event_date={DAY}/ingest_hour={FIRST}")
    folder.mkdir(parents=True)
    monkeypatch.setattr(parquet_writer.uuid, "uuid4", lambda: type("Full", (), {"hex": "full"}))
    (folder / "full.parquet").symlink_to("/dev/full")
    with pytest.raises(OSError):
        writer.write(narrow_rows([(DAY, FIRST)] * rows))
        writer.close()


def test_the_rows_of_an_attempt_are_those_of_its_files(tmp_path: Path) -> None:
    table = new_lake(tmp_path).table()
    outputs = write(table, narrow_rows([(DAY, FIRST), (DAY, NEXT), (DAY, NEXT)]))
    assert Written("attempt", BEGAN, tuple(data_file_of(table, o) for o in outputs)).rows == 3
