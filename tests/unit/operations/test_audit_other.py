"""The audit of a table of another program, without Kafka: its columns, hours and counts."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conf_folders import said, write_environment
from deltalake import write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.cli.render.hours import other_text
from anabranch.common.errors import AnabranchError, ConfigurationError, Refused, TableMissing
from anabranch.config import Environment, load_environment
from anabranch.iceberg import lake
from anabranch.iceberg.other_tables import OtherTable, open_other
from anabranch.kafka.batches import CODES
from anabranch.operations.audit import other
from anabranch.operations.audit.other import BEFORE, AuditRequest, audit_other, plan_audited
from serving_layer.query import place_columns
from serving_layer.query.place_columns import find_columns

H = [f"2026-11-21T0{number}" for number in range(6)]
STRUCT = pa.struct({"partition": pa.int32(), "offset": pa.int64(), "timestamp": pa.timestamp("us")})


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    write_environment(tmp_path / "conf", tmp_path)
    return load_environment(str(tmp_path / "conf"))


def audit(environment: Environment, folder: Path, **more: Any) -> other.OtherAudit:
    return audit_other(environment, AuditRequest(str(folder), "t", with_kafka=False, **more))


def rows(offsets: list[int], partition: int = 0, hour: int = 0, **more: Any) -> pa.Table:
    at = datetime(2026, 11, 21, hour, tzinfo=UTC)
    count = len(offsets)
    own = {
        "partition": pa.array([partition] * count, pa.int32()), "offset": offsets,
        "timestamp": pa.array([at] * count, pa.timestamp("us", "UTC")),
    }  # fmt: skip
    return pa.table(own | {name: [value] * count for name, value in more.items()})


def write(folder: Path, name: str, table: pa.Table) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / name)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        (
            {f"_kafka_metadata_{n}": pa.int64() for n in ("partition", "offset", "timestamp")},
            ("_kafka_metadata_partition", "_kafka_metadata_offset", "_kafka_metadata_timestamp"),
        ),
        ({"redpanda": STRUCT}, ("redpanda.partition", "redpanda.offset", "redpanda.timestamp")),
        (
            {"RECORD_METADATA": pa.string()},
            tuple(f"RECORD_METADATA.{n}" for n in ("partition", "offset", "CreateTime", "topic")),
        ),
        (
            {"kafka_partition": pa.int32(), "kafka_offset": pa.int64(), "offset": pa.int64()},
            ("kafka_partition", "kafka_offset"),
        ),
        ({"Partition": pa.int32(), "offset": pa.int64()}, ("partition", "offset")),
        ({"partition": pa.int32(), "id": pa.string()}, ()),
    ],
)
def test_columns_of_known_programs(fields: dict[str, pa.DataType], found: tuple[str, ...]) -> None:
    columns = find_columns(pa.schema(fields), None, None, None)
    assert tuple(column.name for column in columns.all) == found


def places_of(table: pa.Table) -> AbstractContextManager[Any]:
    columns = find_columns(table.schema, None, None, None)
    return other.read_places(OtherTable("", table.schema, [Pieces(table)]), columns, "t")


def test_times_out_of_range_are_none() -> None:
    table = pa.table({"partition": [0, 0], "offset": [0, 1], "timestamp": [2**62, 0]})
    with places_of(table) as read:
        assert dict(read.times.rows) == {"": 1, "1970-01-01T00": 1}


OF_TEXT = ["0", "1.5", "-1", "four", "", None, "9007199254740993"]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (pa.array(OF_TEXT), [0, *[None] * 5, 2**53 + 1]),
        (pa.array([0.0, 1.4, 2.0, math.nan, math.inf, -3.0]), [0, None, 2, None, None, None]),
        (pa.array([0, -1, None]), [0, None, None]),
        (pa.array([Decimal("0.0"), Decimal("1.5"), Decimal("2.0")]), [0, None, 2]),
        (pa.array(["7", "8"]).dictionary_encode(), [7, 8]),
        (pa.array([b"7"]), [None]),
        (pa.array([7], pa.timestamp("us")), [None]),
    ],
)
def test_a_place_is_a_whole_number_from_0_on(values: pa.Array, found: list[int | None]) -> None:
    """Another one would be taken for the place of another record."""
    table = pa.table({"partition": values, "offset": values})
    there = place_columns.locate(table, find_columns(table.schema, None, None, None), "t")
    assert there["o"].to_pylist() == found
    assert there["p"].to_pylist() == [None if (n or 0) > 2**31 else n for n in found]


def test_text_that_is_no_json_has_no_place(environment: Environment, tmp_path: Path) -> None:
    texts = ['{"partition":0,"offset":7}', "", "{not", "[]", "null", None]
    write(tmp_path / "t", "a.parquet", pa.table({"record_metadata": texts}))
    found = audit(environment, tmp_path / "t")
    assert (found.rows, found.unplaced) == (6, 5) and found.hours[0].offsets == 1


AT = datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
LATER = AT.replace(year=2026)
TIMES = [AT, None, LATER]


@pytest.mark.parametrize(
    ("batch", "there"),
    [
        ({}, {}),
        ({"timestamp": pa.array(TIMES, pa.timestamp("ns", "Europe/Berlin"))}, {}),
        ({"timestamp": pa.array(TIMES, pa.timestamp("ms", "UTC"))}, {}),
        ({"timestamp": pa.array([1, None, 2], pa.int64())}, {}),
        ({"partition": pa.array([0, None, 1], pa.int32()), "offset": pa.array([1, 2, None])}, {}),
        # A file has other types than the table, or lacks columns.
        ({"partition": pa.array([0, 2**40, 1]), "offset": pa.array([1, 2, 3])}, {}),
        ({"topic": pa.array(["t", "u", None])}, {"partition": pa.int32(), "offset": pa.int64()}),
    ],
)
def test_places_are_the_same_with_and_without_duckdb(
    batch: dict[str, pa.Array], there: dict[str, pa.DataType], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pa.table({"other": [1, 2, 3], **batch})
    kinds = {name: pa.int32() if name == "partition" else of.type for name, of in batch.items()}
    columns = find_columns(pa.schema({**kinds, **there}), None, None, None)
    found = place_columns.locate(rows, columns, "t")
    monkeypatch.setattr(place_columns, "_typed", lambda *_: None)
    assert found.equals(place_columns.locate(rows, columns, "t"))


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
def test_nanoseconds_in_a_struct_are_times(zone: str | None) -> None:
    at = pa.array([LATER, None], pa.timestamp("us", "UTC")).cast(pa.int64())
    nanos = pa.array([n and n * 1000 + 1 for n in at.to_pylist()]).cast(pa.timestamp("ns", zone))
    own = pa.StructArray.from_arrays([pa.array([0, 1]), pa.array([2, 3]), nanos], STRUCT.names)
    table = pa.table({"redpanda": own})
    there = place_columns.locate(table, find_columns(table.schema, None, None, None), "t")
    assert there["time"].to_pylist() == [LATER.replace(tzinfo=None), None]
    assert there["o"].to_pylist() == [2, 3]


def test_an_offset_in_a_text_counts() -> None:
    texts = [
        "2026-11-20T03:00:00+02:00", "2026-11-20 01:00:00Z", "2026-11-20T01:00", "1795136400000",
    ]  # fmt: skip
    table = pa.table({"partition": [0] * 6, "offset": [*range(6)], "timestamp": [*texts, "x", None]})  # fmt: skip
    there = place_columns.locate(table, find_columns(table.schema, None, None, None), "t")
    assert there["time"].to_pylist() == [*[datetime(2026, 11, 20, 1)] * 4, None, None]


def test_a_struct_of_any_name_has_places() -> None:
    """The hazard: DuckDB takes the columns beside a struct that is named like its own table."""
    table = pa.table({"rows": [{"p": "1", "o": "2"}], "p": ["8"], "o": ["7"]})
    there = place_columns.locate(table, find_columns(table.schema, "rows.p", "rows.o", None), "t")
    assert (there["p"].to_pylist(), there["o"].to_pylist()) == ([1], [2])


@pytest.mark.parametrize("kind", [pa.float64(), pa.bool_(), pa.time64("us"), pa.list_(pa.int64())])
def test_other_types_are_no_times(kind: pa.DataType) -> None:
    table = pa.table({"partition": [0], "offset": [1], "timestamp": pa.nulls(1, kind)})
    there = place_columns.locate(table, find_columns(table.schema, None, None, None), "t")
    assert there["time"].to_pylist() == [None]


@pytest.mark.parametrize("topics", [[5, None], [{"a": "t"}, None], [["t"], None], [b"no", b"t"]])
def test_a_topic_that_is_no_text_is_another(topics: list[Any]) -> None:
    table = pa.table({"partition": [0, 0], "offset": [1, 2], "topic": topics})
    there = place_columns.locate(table, find_columns(table.schema, None, None, None), "t")
    assert there["own"].to_pylist() == [False, True]


def test_a_named_column_must_exist() -> None:
    with pytest.raises(ConfigurationError, match=r"--offset-column meta\.o: expected a column"):
        find_columns(pa.schema({"p": pa.int32(), "meta": STRUCT}), "p", "meta.o", None)


@pytest.mark.parametrize("form", ["struct", "json", "text"])
def test_offsets_in_structs_and_text(environment: Environment, tmp_path: Path, form: str) -> None:
    places = [{"partition": 1, "offset": o, "timestamp": None} for o in (3, 4, 4)]
    folder, names = tmp_path / "t", dict[str, Any]()
    if form == "struct":
        table = pa.table({"redpanda": pa.array(places, STRUCT)})
    elif form == "json":
        table = pa.table({"record_metadata": [json.dumps(p | {"topic": "t"}) for p in places]})
    else:
        table = pa.table({"p": ["1", "1", "1"], "o": ["3", "4", "four"]})
        names = {"partition_column": "p", "offset_column": "o"}
    write(folder, "a.parquet", table)
    found = audit(environment, folder, **names)
    [hour] = found.hours
    assert "Kafka was not read, " in "".join(map(str, other_text(found))) and not found.is_proven
    assert (hour.hour, found.rows, found.unplaced) == (BEFORE, 3, form == "text")
    assert hour.partitions[1].twice_at == (() if form == "text" else ((4, 5),))
    assert not found.is_exact


def test_all_formats_count_alike(environment: Environment, tmp_path: Path) -> None:
    """Three offsets are missing, two doubled, one row has none, one is of another topic."""
    parts = [
        rows([0, 1, 2, 4, 5, 5], topic="t"),
        rows([6, 7, 9, 9, 10], hour=1, topic="t"),
        rows([12], hour=2, topic="t"),
        rows([3], topic="other"),
    ]
    lost = parts[2].set_column(1, "offset", pa.array([None], pa.int64()))
    every = [*parts, lost]
    catalog = lake.Lake(environment).catalog
    catalog.create_namespace("n")
    table = catalog.create_table("n.t", schema=parts[0].schema)
    for number, part in enumerate(every):
        write(tmp_path / "parquet", f"day={number}/{number}.parquet", part)
        write_deltalake(tmp_path / "delta", part, mode="append", partition_by=["partition"])
        table.append(part)
    names = [str(tmp_path / "parquet"), str(tmp_path / "delta"), "n.t", table.metadata_location]
    for name in names:
        found = audit_other(environment, AuditRequest(name, "t", with_kafka=False))
        assert (found.rows, found.unplaced, found.elsewhere) == (14, 1, 1), name
        counted = [(h.hour, h.offsets, h.total("rows"), h.total("twice")) for h in found.hours]
        assert counted == [(H[0], 6, 6, 1), (H[1], 6, 5, 1), (H[2], 1, 1, 0)], name
        assert [dict(h.gaps) for h in found.hours] == [{"retention": 1}, {"retention": 2}, {}]


def test_an_iceberg_table_is_read_whole_or_refused(
    environment: Environment, tmp_path: Path
) -> None:
    catalog = lake.Lake(environment).catalog
    catalog.create_namespace("n")
    write(tmp_path / "files", "a.parquet", rows([0, 1]))
    table = catalog.create_table("n.t", schema=rows([0]).schema)
    table.add_files([f"file://{tmp_path}/files/a.parquet"])
    assert audit_other(environment, AuditRequest("n.t", "t", with_kafka=False)).rows == 2

    def refuse(name: str, words: str) -> None:
        with pytest.raises(Refused, match=words):
            audit_other(environment, AuditRequest(name, "t", with_kafka=False))

    table.transaction().remove_properties("schema.name-mapping.default").commit_transaction()
    refuse("n.t", r"a\.parquet: .*does not have field-ids.*; write the table's rows as Parquet")
    (tmp_path / "files" / "a.parquet").unlink()
    refuse("n.t", r"a\.parquet: .*; restore it, or name the newest …metadata\.json")
    metadata = table.metadata_location
    shutil.move(table.location().removeprefix("file://"), tmp_path / "moved")
    refuse(str(tmp_path / "moved"), r"moved/metadata/.*: expected each file .*; restore it")
    refuse(metadata, r"\.metadata\.json: expected each file .*; restore it, or name the newest")


def test_files_outside_a_log_do_not_count(environment: Environment, tmp_path: Path) -> None:
    folder = tmp_path / "sink"
    for name, offsets in (("a", [0, 1]), ("b", [1, 2]), ("_c", [3])):
        write(folder, f"{name}.parquet", rows(offsets))
    size = (folder / "a.parquet").stat().st_size
    entry = json.dumps({"path": f"file://{folder}/a.parquet", "size": size, "action": "add"})
    (folder / "_spark_metadata").mkdir()
    (folder / "_spark_metadata" / "0").write_text(f"v1\n{entry}")
    found = audit(environment, folder)
    assert found.rows == 2 and found.is_exact
    assert "1 files that the log does not list do not count" in found.table
    # A log whose first file is gone; whose last one is cut short, or of a newer Spark; without any.
    for name, text in (("0", None), ("1", "v1\n{"), ("1", f"v2\n{entry}"), (".0.crc", "")):
        shutil.rmtree(folder / "_spark_metadata")
        (folder / "_spark_metadata").mkdir()
        if name == "1":
            (folder / "_spark_metadata" / "0").write_text(f"v1\n{entry}")
        (folder / "_spark_metadata" / (name if text is not None else "3")).write_text(text or "v1")
        broken = audit(environment, folder)
        assert broken.rows == 4 and "its log is damaged" in broken.table, name


def test_unreadable_tables_are_refused(environment: Environment, tmp_path: Path) -> None:
    for name in ("no.such", "such"):
        with pytest.raises(TableMissing, match="found none; a folder has a /"):
            open_other(environment, name)
    with pytest.raises(Refused, match="expected files of rows, found none"):
        open_other(environment, str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refused, match="expected files of rows, found none"):
        open_other(environment, str(tmp_path / "empty"))
    (tmp_path / "empty" / "a.json.gz").write_bytes(b"")
    with pytest.raises(Refused, match=r"expected Parquet files, the only ones .* a\.json\.gz"):
        open_other(environment, str(tmp_path / "empty"))
    (tmp_path / "empty" / "a.json.gz").unlink()
    write(tmp_path / "csv", "a.csv.parquet", rows([0]))
    assert audit(environment, tmp_path / "csv").rows == 1
    (tmp_path / "empty" / "link.parquet").symlink_to(tmp_path / "gone")
    with pytest.raises(Refused, match="which is none"):
        open_other(environment, str(tmp_path / "empty"))


def test_files_behind_a_link_count(environment: Environment, tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", "a.parquet", rows([0]))
    write(tmp_path / "t", "b.parquet", rows([1]).set_column(1, "offset", pa.array([1], pa.int32())))
    write(tmp_path / "t", "c.parquet", pa.table({"id": [7]}))
    (tmp_path / "t" / "linked").symlink_to(tmp_path / "elsewhere")
    found = audit(environment, tmp_path / "t")
    assert (found.rows, found.unplaced) == (3, 1) and found.hours[0].offsets == 2


def test_columns_are_found_in_each_file(environment: Environment, tmp_path: Path) -> None:
    """Older files may lack them, or have names in letters of another case."""
    folder, names = tmp_path / "t", ["Partition", "OFFSET", "timestamp"]
    write(folder, "a.parquet", pa.table({"id": [7]}))
    write(folder, "b.parquet", rows([0, 1]))
    write(folder, "c.parquet", rows([2, 3]).rename_columns(names))
    found = audit(environment, folder)
    assert (found.rows, found.unplaced) == (5, 1) and found.hours[0].offsets == 4
    write(tmp_path / "n", "a.parquet", pa.table({"id": [7]}))
    for name, offset in (("b", "Offset"), ("c", "offset")):
        places = [{"partition": 0, offset: o} for o in (0, 1)]
        write(tmp_path / "n", f"{name}.parquet", pa.table({"redpanda": places}))
    found = audit(environment, tmp_path / "n")
    assert (found.rows, found.unplaced) == (5, 1) and found.hours[0].total("twice") == 2


@pytest.mark.parametrize("prefix", ["", "kafka_", "redpanda."])
def test_topics_are_in_each_file(environment: Environment, tmp_path: Path, prefix: str) -> None:
    """The hazard: a row of another topic, in a later file, is taken for a lost record."""
    names = [f"{prefix}{name}" for name in ("partition", "offset", "timestamp", "topic")]
    for file, table in {"a": rows([0, 2]), "b": rows([1], topic="u"), "c": rows([3])}.items():
        table = table.rename_columns(names[: table.num_columns])
        if "." in prefix:
            named = table.rename_columns([name.partition(".")[2] for name in table.column_names])
            table = pa.table({"redpanda": named.to_struct_array()})
        write(tmp_path / "t", f"{file}.parquet", table)
    found = audit(environment, tmp_path / "t")
    assert (found.rows, found.elsewhere, found.hours[0].total("rows")) == (4, 1, 3)


@pytest.mark.parametrize("order", [1, -1])
def test_a_column_of_the_very_name_is_taken(order: int) -> None:
    names = ["offset", "Offset", "OFFSET"][::order]
    schema = pa.schema([("partition", pa.int32()), *((name, pa.int64()) for name in names)])
    columns = find_columns(schema, None, None, None)
    assert columns.offset is not None and columns.offset.reads == "offset"
    nested = pa.schema([("m", pa.struct([(name, pa.int64()) for name in names]))])
    found = find_columns(nested, "m.Offset", "m.OFFSET", None)
    assert found.reads == ["m.Offset", "m.OFFSET"]


def test_names_may_have_dots_and_topics_differ(environment: Environment, tmp_path: Path) -> None:
    table = pa.concat_tables([rows([0, 1], topic="t"), rows([0], topic="other")])
    write(tmp_path / "t", "a.parquet", table.rename_columns(["k.p", "k.o", "time", "k.topic"]))
    found = audit(environment, tmp_path / "t", partition_column="k.p", offset_column="k.o")
    assert (found.rows, found.unplaced, found.elsewhere) == (3, 0, 1) and found.is_exact


def test_a_table_of_no_row_of_the_topic_is_refused(
    environment: Environment, tmp_path: Path
) -> None:
    for table, others in ((rows([0, 1], topic="other"), ", but 2 of other topics"), (rows([]), "")):
        write(tmp_path / "t", "a.parquet", table)
        with pytest.raises(Refused, match=f"found none{others}; check both names"):
            audit(environment, tmp_path / "t")
        found = audit(environment, tmp_path / "t", hours=(H[0], H[1]))
        assert found.hours == () and not found.is_proven


@pytest.mark.parametrize("name", ["_day=1/a b#1?.parquet", "t=10%3A00/100%.parquet"])
def test_files_of_any_name_count(environment: Environment, tmp_path: Path, name: str) -> None:
    write(tmp_path / "t", name, rows([0, 1]))
    (tmp_path / "t" / "b.parquet._COPYING_").write_bytes(b"PAR1")
    assert audit(environment, tmp_path / "t").rows == 2


def test_a_folder_that_cannot_be_read_is_named(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "t", "a.parquet", rows([0]))
    write(tmp_path / "t", "closed/b.parquet", rows([1]))
    scan = os.scandir

    def denied(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(AnabranchError, match="Permission denied"):
        audit(environment, tmp_path / "t")


def test_without_columns_time_is_counted(environment: Environment, tmp_path: Path) -> None:
    write(tmp_path / "t", "a.parquet", rows([0, 1]).drop_columns(["offset"]))
    write(tmp_path / "t", "b.parquet", rows([0, 1], hour=2).drop_columns(["offset"]))
    found = audit(environment, tmp_path / "t")
    assert found.by_time == {H[0]: 2, H[2]: 2} and found.hours == ()
    assert found.unproven is not None and "nothing is proven" in found.unproven
    assert found.as_dict()["exact"] is False
    write(tmp_path / "bare", "a.parquet", pa.table({"id": [1, 2, 3]}))
    assert audit(environment, tmp_path / "bare").by_time == {"": 3}


def test_hours_of_kafka_end_at_its_offsets_and_earlier_ones_at_the_rows() -> None:
    times = other.TimeCounts(
        {}, {H[0]: {0: 2, 1: 0}, H[1]: {0: 10}, H[2]: {0: 20, 1: 5}, "": {0: 0}}
    )
    cuts = other.plan_cuts(
        {0: 0, 1: 0}, times, {0: 15, 1: 5}, {H[1]: {0: 20, 1: 5}, H[2]: {0: 25, 1: 9}}
    )
    assert cuts == [
        (BEFORE, {0: (0, 2)}),
        (H[0], {0: (2, 10), 1: (0, 5)}),
        (H[1], {0: (10, 20)}),
        (H[2], {0: (20, 25), 1: (5, 9)}),
    ]


OFFSETS = st.integers(0, 30)


@given(
    ends=st.lists(st.tuples(OFFSETS, OFFSETS), min_size=1, max_size=5),
    spans=st.dictionaries(st.integers(0, 1), st.tuples(OFFSETS, st.integers(1, 9))),
)
def test_no_offset_is_left(ends: list[tuple[int, int]], spans: dict[int, tuple[int, int]]) -> None:
    low, cuts = {0: 0, 1: 0}, list[tuple[str, dict[int, tuple[int, int]]]]()
    for hour, pair in zip(H, ends, strict=False):
        until = {p: max(low[p], end) for p, end in enumerate(pair)}
        cuts.append((hour, {p: (low[p], until[p]) for p in low if low[p] < until[p]}))
        low = until
    have = {p: (s, min(s + n, low[p])) for p, (s, n) in spans.items() if s < low[p]}
    audited = plan_audited(cuts, have, None)
    counted = {p: sum(r[p][1] - r[p][0] for _, r in audited.hours if p in r) for p in low}
    inside = {p: counted[p] + audited.before.get(p, 0) + audited.behind.get(p, 0) for p in low}
    assert inside == (low if have else {0: 0, 1: 0})
    # Every row is audited, and in a whole hour between others everything is.
    for p, (start, end) in have.items():
        of_p = [r[p] for _, r in audited.hours if p in r]
        assert all(any(s <= o < e for s, e in of_p) for o in range(start, end))
    found = [h for h, _ in audited.hours]
    assert found == [h for h, _ in cuts if found and found[0] <= h <= found[-1]]
    for cut in cuts[1:-1]:
        if audited.hours and audited.hours[0][0] < cut[0] < audited.hours[-1][0]:
            assert cut in audited.hours


def test_whole_hours_are_audited_when_they_are_named() -> None:
    cuts = [(H[0], {0: (0, 9)}), (H[1], {0: (9, 12), 1: (0, 5)})]
    outer = [(H[0], {0: (3, 9)}), (H[1], {0: (9, 10)})]
    assert plan_audited(cuts, {0: (3, 10)}, None).hours == outer
    assert plan_audited(cuts, {0: (3, 10)}, (H[1], H[5])).hours == cuts[1:]


def test_nothing_is_proven_of_a_partition_without_a_row() -> None:
    cuts = [(H[0], {0: (0, 9), 1: (0, 2)}), (H[1], {0: (9, 12), 1: (2, 5)}), (H[2], {2: (0, 3)})]
    for until in (8, 10):
        planned = plan_audited(cuts, {0: (3, until)}, None)
        assert planned.without_rows == (1,), "partition 2 is of an hour after the table's last one"
        of_hours = tuple(
            other.HourCounts(h, {0: other.PartitionCounts(*r[0])}) for h, r in planned.hours
        )
        found = other.OtherAudit("", "t", (), 1, hours=of_hours, without_rows=planned.without_rows)
        assert found.is_exact and not found.is_proven
        assert replace(found, without_rows=()).is_proven
    assert plan_audited(cuts, {0: (3, 10), 1: (0, 1)}, None).without_rows == ()
    assert plan_audited(cuts, {0: (3, 10)}, (H[0], H[2])).without_rows == ()


def test_a_named_hour_is_whole_only_if_the_log_begins_before_it() -> None:
    """The hazard: Kafka has deleted the hour's first records, which the table lacks."""
    cuts = [
        (BEFORE, {3: (2, 4)}), (H[0], {0: (7, 9)}), (H[1], {0: (9, 12), 1: (5, 6), 2: (0, 5)}),
        (H[2], {3: (4, 9), 4: (8, 9)}),
    ]  # fmt: skip
    begins = {0: 7, 1: 5, 2: 0, 3: 2, 4: 8, 5: 6, 6: 0}
    assert other.plan_cut_off(cuts, begins, H[1]) == (1, 3, 4, 5)
    assert other.plan_cut_off(cuts, begins, H[2]) == (3, 4, 5)
    hours = (other.HourCounts(H[1], {0: other.PartitionCounts(9, 12, 3)}),)
    found = other.OtherAudit("", "t", (), 3, hours=hours, cut_off=(1,))
    assert found.is_exact and not found.is_proven and not found.as_dict()["exact"]
    words = " ".join(map(str, other_text(found)))
    assert "has deleted some: 1; that none" in words and "once" not in words


def test_an_offset_counts_by_its_rows_and_by_its_class() -> None:
    names = ("present", "present", "present", "control", "aborted", "aborted", "compacted")
    codes = np.array([CODES[name] for name in names], np.uint8)
    one = other.count_slice(10, np.array([1, 0, 3, 0, 0, 1, 1]), codes)
    assert (one.rows, one.twice, one.missing, one.uncommitted) == (6, 2, 1, 1)
    assert one.gaps == {"control": 1, "aborted": 1}
    assert (one.missing_at, one.twice_at) == (((11, 12),), ((12, 13),))
    after = other.count_slice(17, np.array([0, 2]), np.full(2, CODES["present"], np.uint8))
    both = one.plus(after)
    assert (both.start, both.end, both.rows, both.missing) == (10, 19, 8, 2)
    assert both.missing_at == ((11, 12), (17, 18)) and both.twice_at == ((12, 13), (18, 19))
    last = other.count_slice(19, np.zeros(1, np.int64), np.full(1, CODES["present"], np.uint8))
    assert after.plus(last).missing_at == ((17, 18), (19, 20))


class Pieces:
    """A part in small batches."""

    def __init__(self, table: pa.Table) -> None:
        self.table, self.schema_arrow = table, table.schema

    def iter_batches(self, batch_size: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        yield from self.table.select(columns).to_batches(max_chunksize=7)


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=60))
def test_counts_are_those_of_a_plain_loop(places: list[tuple[int, int]]) -> None:
    partitions, offsets = zip(*places, strict=True) if places else ((), ())
    of = {"partition": pa.array(partitions, pa.int32()), "offset": pa.array(offsets, pa.int64())}
    with places_of(pa.table(of)) as read:
        for p in range(3):
            own = [o for q, o in places if q == p]
            assert read.spans.get(p) == ((min(own), max(own) + 1) if own else None)
            inside = [o for o in own if 5 <= o < 30]
            assert read.count(p, 5, 30).tolist() == [inside.count(o) for o in range(5, 30)]


@given(st.lists(st.integers(0, 12), max_size=6), st.integers(1, 9))
def test_slices_cover_each_offset_once(sizes: list[int], most: int) -> None:
    pieces, low = list[tuple[str, int, int]](), 3
    for hour, n in zip(H, sizes, strict=False):
        pieces.append((hour, low, low + n))
        low += n + (n == 5)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(other, "_SLICE", most)
        slices = list(other.plan_slices(pieces))
    wanted = [(hour, o) for hour, start, end in pieces for o in range(start, end)]
    assert [(h, o) for some in slices for h, s, e in some for o in range(s, e)] == wanted
    for some in slices:
        assert some[-1][2] - some[0][1] == sum(e - s for _, s, e in some) <= most


def test_the_command_names_what_it_needs() -> None:
    for arguments, expected in (
        (["--table", "a.b"], "--table with --topic"),
        (["--table", "a.b", "--topic", "t", "stream"], "no stream"),
        (["--table", "a.b", "--topic", "t", "--offset-column", "o"], "--partition-column with"),
        (["--offset-column", "o"], "--table and --topic"),
    ):
        assert expected in said("audit", *arguments, expect=2)
