"""Takeover: another program's metadata and columns of places, a file sink without a whole log."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from brokers import Broker
from killed import kill_at
from lakes import FIRST, StreamLake, new_lake, new_stream
from test_importing import LAST, NOW, OLDEST, STEPS, ids, job_of, with_places, write

from anabranch.common.errors import Refused
from anabranch.common.fail_points import Step
from anabranch.lifecycle.importing import run
from anabranch.lifecycle.importing.files import stated
from anabranch.offsets.hours import Timeline, start_of
from anabranch.protocol.publisher import Publisher

PLACES = [("a", OLDEST, 0, 1), ("b", LAST, 0, 2), ("c", FIRST, 0, 3), ("e", FIRST, 0, 5)]


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """A stream that began at offset 5 and read two records; Kafka had deleted those before."""
    lake = new_lake(tmp_path, timeline=Timeline(FIRST, FIRST, {0: 5}))
    lake.serve([(FIRST, 0, 5), (FIRST, 0, 6)], {0: 7}, read_until=NOW)
    return lake


def take_over(folder: Path, **order: Any) -> run.Imported:
    job = replace(job_of(folder), kafka=Broker(log={0: [0] * 7}).adapter)
    request = run.ImportRequest(f"{folder}/source", None, takeover=True, **order)
    return run.run(job, Publisher(job.lake, job.stream), request)


def sink(lake: StreamLake) -> Path:
    """A file sink of three micro-batches, one of which was written twice and listed once."""
    folder = lake.folder / "source"
    (folder / "_spark_metadata").mkdir(parents=True)
    for n, places in enumerate((PLACES[:2], PLACES[2:3], PLACES[3:])):
        name = f"part-0000{n}-7a0e7d06-8c0e-4b9e-9c0e-000000000000-c000.snappy.parquet"
        with_places(folder / name, places)
        entry = {"path": f"file://{folder}/{name}", "size": (folder / name).stat().st_size}
        log = json.dumps(entry | {"action": "add"})
        (folder / f"_spark_metadata/{n}").write_text(f"v1\n{log}")
    with_places(folder / "part-00009-7a0e7d06-8c0e-4b9e-9c0e-000000000000-c000.parquet", PLACES[:1])
    return folder


@pytest.mark.parametrize(
    "damage", ["whole", "truncated", "last truncated", "version", "deleted", "compaction missing"]
)
def test_a_file_sink_is_taken_over_whatever_its_log(lake: StreamLake, damage: str) -> None:
    log = sink(lake) / "_spark_metadata"
    if damage == "truncated":
        (log / "1").write_text("v1\n{")
    elif damage == "last truncated":
        # Kafka has deleted its records: nothing else has them.
        (log / "2").unlink()
        (log / "1").write_text("v1\n{")
    elif damage == "version":
        (log / "2").write_text((log / "2").read_text().replace("v1", "v2", 1))
    elif damage == "deleted":
        for file in log.iterdir():
            file.unlink()
        log.rmdir()
    elif damage == "compaction missing":
        (log / "0").unlink()
        (log / "1").unlink()
        (log / "2").rename(log / "3")
        (log / "1").write_text("v1\n")
    before = {path: path.read_bytes() for path in sink_files(lake)}
    done = take_over(lake.folder)
    assert ids(lake, "main") == {OLDEST: ["a"], LAST: ["b", "c"], FIRST: ["0-5", "0-6"]}
    assert (done.good, done.plan.after) == (3, 1)
    assert done.duplicate == (0 if damage == "whole" else 1)
    # Offset 4, a gap within the source, is counted by the audit of the source.
    assert not any("in neither" in note for note in done.plan.notes)
    assert before == {path: path.read_bytes() for path in sink_files(lake)}
    assert take_over(lake.folder).hours == ()


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.label)
def test_a_takeover_that_is_killed_at_a_step_is_continued(lake: StreamLake, step: Step) -> None:
    log = sink(lake) / "_spark_metadata"
    (log / "1").write_text("v1\n{")
    kill_at(f"{step.label}:1", take_over, lake.folder)
    take_over(lake.folder)
    assert ids(lake, "main") == {OLDEST: ["a"], LAST: ["b", "c"], FIRST: ["0-5", "0-6"]}
    assert ids(lake, "batch") == {OLDEST: ["a"], LAST: ["b", "c"]}


def sink_files(lake: StreamLake) -> Sequence[Path]:
    return sorted(path for path in (lake.folder / "source").rglob("*") if path.is_file())


def test_an_import_refuses_a_log_that_a_takeover_reads_past(lake: StreamLake) -> None:
    (sink(lake) / "_spark_metadata/1").write_text("v1\n{")
    job = job_of(lake.folder)
    with pytest.raises(Refused, match="expected a line v1 and lines of JSON"):
        run.plan(job, run.ImportRequest(f"{lake.folder}/source", OLDEST))


def test_offsets_that_neither_has_are_counted(lake: StreamLake) -> None:
    with_places(lake.folder / "source/a.parquet", PLACES[:2])
    expected = "2 offsets between the last row and the first record"
    assert expected in take_over(lake.folder).plan.notes[-1]


def nested(rows: pa.Table) -> dict[str, Any]:
    """The columns of programs with Kafka's places: those of the file, by program."""
    p, o = (rows[name].combine_chunks() for name in ("partition", "offset"))
    at = rows["timestamp"].combine_chunks()
    millis = at.cast(pa.int64()).to_numpy() // 1000
    topics = pa.array(["events"] * (len(rows) - 1) + ["others"])
    pairs = zip(p.to_pylist(), o.to_pylist(), millis.tolist(), strict=True)
    texts = [json.dumps({"partition": a, "offset": b, "CreateTime": t}) for a, b, t in pairs]
    return {
        "connect": {
            "_kafka_metadata_topic": topics,
            "_kafka_metadata_partition": p,
            "_kafka_metadata_offset": o,
            "_kafka_metadata_timestamp": pa.array(millis),
        },
        "redpanda": {
            "redpanda": pa.StructArray.from_arrays([p, o, at], ["partition", "offset", "timestamp"])
        },
        "snowflake": {"RECORD_METADATA": pa.array(texts)},
    }


@pytest.mark.parametrize("program", ["connect", "redpanda", "snowflake"])
def test_columns_of_other_programs_are_the_exact_seam(lake: StreamLake, program: str) -> None:
    path = lake.folder / "source/a.parquet"
    with_places(path, [*PLACES, ("z", OLDEST, 0, 1)])
    rows = pq.read_table(path)
    own = {name: rows[name] for name in ("id", "n")}
    pq.write_table(pa.table(own | nested(rows)[program]), path)
    done = take_over(lake.folder)
    assert ids(lake, "main") == {OLDEST: ["a"], LAST: ["b", "c"], FIRST: ["0-5", "0-6"]}
    assert done.duplicate == (program != "connect")
    elsewhere = "1 rows are of other topics, and do not count"
    assert (elsewhere in done.plan.notes) == (program == "connect")
    [row] = lake.table().scan(row_filter="id = 'a'").to_arrow().to_pylist()
    assert row["kafka_timestamp"] == start_of(OLDEST)


def test_without_places_and_key_the_seam_is_the_content(tmp_path: Path) -> None:
    ddl = "id STRING, n INT"
    lake = new_lake(tmp_path, ddl=ddl)
    lake.serve([(FIRST, 0, 0), (FIRST, 0, 1)], {0: 2}, read_until=NOW)
    [known, _] = sorted(lake.table().scan().to_arrow().to_pylist(), key=lambda r: r["kafka_offset"])
    rows = [(known["id"], known["n"], FIRST, 1), ("old", 1, OLDEST, 1), ("gone", 1, FIRST, 2)]
    write(tmp_path / "source/a.parquet", [*rows, rows[1]])
    job = replace(job_of(tmp_path), stream=new_stream(schema=ddl, key="none"))
    request = run.ImportRequest(f"{tmp_path}/source", None, takeover=True)
    done = run.run(job, Publisher(job.lake, job.stream), request)
    assert (done.good, ids(lake, "main")[OLDEST]) == (3, ["old", "old"])
    assert ids(lake, "main")[LAST] == ["gone"]
    assert "by id, n in 1 files; 1 of their rows are of hours" in done.plan.notes[-2]
    assert done.plan.notes[-1].startswith("rows of 1 files that repeat another")


def test_a_checkpoint_states_its_last_micro_batch(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    environment = job_of(tmp_path).environment
    folder = tmp_path / "checkpoint"

    def says() -> list[str]:
        return stated(environment, f"{tmp_path}/source", str(folder), "events")

    for kind in ("offsets", "commits"):
        (folder / kind).mkdir(parents=True)
    assert says() == ["the checkpoint has no offsets: it was deleted, or the folder is another"]
    for n, end in ((7, 30), (8, 40)):
        lines = ["v1", json.dumps({"batchWatermarkMs": 0}), json.dumps({"events": {"0": end}})]
        (folder / f"offsets/{n}").write_text("\n".join(lines))
    (folder / "commits/7").write_text('v1\n{"nextBatchWatermarkMs":0}')
    assert says() == [
        "the checkpoint committed micro-batch 7: partition 0 up to offset 30",
        "the checkpoint began micro-batch 8 and did not commit it: files of it may be in the "
        "folder",
    ]
    timeline = tmp_path / "source/.hoodie/timeline"
    timeline.mkdir(parents=True)
    metadata = {"extraMetadata": {"streamer.checkpoint.key.v2": "events,0:41,1:7"}}
    (timeline / "20260101000000000_20260101000001000.commit").write_text(json.dumps(metadata))
    assert says()[-1] == "Hudi's commit 20260101000000000 has all records up to 0:41, 1:7"


def test_snapshots_of_connect_and_flink_state_what_they_can(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    catalog = lake.lake.catalog
    catalog.create_namespace("old")
    table = catalog.create_table("old.events", pa.schema([("id", pa.string())]))
    rows = pa.table({"id": ["a"]})
    offsets = {"kafka.connect.offsets.control.cg-control-sink": '{"0":12}'}
    through = {"kafka.connect.valid-through-ts": "2026-11-21T03:00:00Z"}
    table.append(rows, snapshot_properties=offsets | through)
    environment = job_of(tmp_path).environment
    words = stated(environment, "old.events", None, "events")
    assert words[0].endswith("of Kafka Connect has all records up to 2026-11-21T03:00:00Z")
    assert words[1].endswith("offsets of its control topic control, and none of the records' topic")
    table.append(rows, snapshot_properties={"flink.max-committed-checkpoint-id": "9"})
    [only] = stated(environment, table.location(), None, "events")
    assert only.endswith("of Flink's checkpoint 9, whose offsets only Flink's state has")
