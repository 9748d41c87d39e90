"""Egress to folders: every accepted record once at the other end, whatever ends in between."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from accepted_hours import HOURS, accept, erase, expire, four_hours, lost_commits
from brokers import Broker
from killed import kill_at
from lakes import FIRST, StreamLake, new_environment, new_stream
from run_books import printed

from anabranch.common.errors import ConfigurationError, Refused, Transient
from anabranch.common.fail_points import Step
from anabranch.common.temporary import locked
from anabranch.config.sections import Target
from anabranch.iceberg import admin, snapshots
from anabranch.iceberg.lake import Lake
from anabranch.job import Job
from anabranch.kafka.client import KafkaAdapter
from anabranch.operations.doctor import streams
from anabranch.operations.finding import Issue
from anabranch.operations.reports.status import status
from anabranch.protocol import acts, deliveries
from serving_layer import egress as room
from serving_layer.egress.folder import (
    LocalStorage,
    Manifest,
    SmallFile,
    Todo,
    _parts,
    open_storage,
    plan_folder,
)

FOLDER_STEPS = [
    Step.EGRESS_BEGUN, Step.EGRESS_WRITTEN, Step.EGRESS_NAMED, Step.EGRESS_CLEARED,
    Step.EGRESS_DELIVERED, Step.LEDGER_PREPARED, Step.LEDGER_APPENDED, Step.EGRESS_RECORDED,
]  # fmt: skip


def test_every_step_of_egress_is_killed_at() -> None:
    # tests/integration/test_egress_targets.py and tests/external/search/test_in_search.py
    elsewhere = {Step.EGRESS_SENT, Step.EGRESS_COMMITTED, Step.EGRESS_INDEXED}
    assert {s for s in Step if s.label.startswith("egress.")} <= elsewhere | {*FOLDER_STEPS}


def job_of(folder: Path) -> Job:
    """A job whose stream is delivered to a folder beside the lake's."""
    environment = new_environment(folder)
    stream = new_stream(egress=[{"name": "export", "root": f"file://{folder}/export"}])
    return Job(environment, stream, Lake(environment), KafkaAdapter(environment.kafka))


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    one = four_hours(tmp_path)
    add_deliveries(one)
    return one


def add_deliveries(lake: StreamLake) -> None:
    """Create the table of deliveries, which names none."""
    name, schema = lake.stream.egress_table, deliveries.DELIVERIES_SCHEMA
    admin.create(lake.lake, name, schema, (), admin.TABLE_PROPERTIES)


def folder_of(folder: Path, hour: str = FIRST) -> Path:
    return folder / "export" / f"date={hour[:10]}" / f"hour={hour[11:]}"


def run(folder: Path) -> list[deliveries.Delivery]:
    """Deliver all that is to be delivered."""
    job = job_of(folder)
    return [d for target in room.targets_of(job, None) for d in room.deliver(job, target)]


def parquet_in(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.parquet")}


def by_manifest(folder: Path) -> list[tuple[int, int]] | None:
    """Return the offsets by the manifest of an hour's folder; None without one."""
    path = folder / "_manifest.json"
    if not path.exists():
        return None
    manifest = json.loads(path.read_text())
    assert len({f["name"].split("-r")[1].split("-")[0] for f in manifest["files"]}) <= 1
    tables = [pq.read_table(folder / f["name"]) for f in manifest["files"]]
    rows = [(r["kafka_partition"], r["kafka_offset"]) for t in tables for r in t.to_pylist()]
    assert len(rows) == manifest["rows"]
    return rows


def check(folder: Path, contents: dict[str, list[list[tuple[int, int]]]]) -> None:
    """At any moment, the manifest names one content, a folder with _SUCCESS holds one."""
    for hour, allowed in contents.items():
        own = folder_of(folder, hour)
        assert by_manifest(own) in (None, *allowed)
        if (own / "_SUCCESS").exists():
            listed = json.loads((own / "_manifest.json").read_text())["files"]
            assert parquet_in(own) == {f["name"] for f in listed}


def in_main(lake: StreamLake, hour: str) -> list[tuple[int, int]]:
    return [(p, o) for h, p, o in lake.rows("main") if h == hour]


def globbed(folder: Path, hour: str) -> list[tuple[int, int]]:
    """Return the offsets that a globbing reader reads after it has seen _SUCCESS."""
    own = folder_of(folder, hour)
    assert (own / "_SUCCESS").exists()
    rows = [r for path in sorted(own.glob("*.parquet")) for r in pq.read_table(path).to_pylist()]
    assert all(r["ingest_hour"] == hour for r in rows)
    return [(r["kafka_partition"], r["kafka_offset"]) for r in rows]


@pytest.mark.parametrize("step", FOLDER_STEPS, ids=lambda step: step.label)
def test_a_kill_anywhere_leaves_each_once(lake: StreamLake, step: Step) -> None:
    """Killed with an hour's first content, a restated one, and an erasure: never two mixed."""
    accept(lake, FIRST, 7)
    first = in_main(lake, FIRST)
    kill_at(step.label, run, lake.folder) if step is not Step.EGRESS_BEGUN else None
    check(lake.folder, {FIRST: [first]})
    run(lake.folder)
    assert globbed(lake.folder, FIRST) == first
    own = folder_of(lake.folder)
    if step is Step.EGRESS_NAMED:
        # It was only finished: nothing is left of the delivery that was killed.
        assert {p.name for p in own.iterdir()} == {*parquet_in(own), "_manifest.json", "_SUCCESS"}

    accept(lake, FIRST, 4)
    accept(lake, HOURS[2], 5)
    second = in_main(lake, FIRST)
    assert len(second) == 4
    kill_at(step.label, run, lake.folder)
    if step is Step.EGRESS_NAMED:
        # The hazard: both contents are there, and a glob would read both.
        assert len(parquet_in(own)) == 2 and not (own / "_SUCCESS").exists()
    check(lake.folder, {FIRST: [first, second], HOURS[2]: [in_main(lake, HOURS[2])]})
    kill_at(Step.EGRESS_RECORDED.label, run, lake.folder)
    run(lake.folder)
    assert globbed(lake.folder, FIRST) == second
    assert globbed(lake.folder, HOURS[2]) == in_main(lake, HOURS[2])
    assert run(lake.folder) == []

    erase(lake, 2)
    third = in_main(lake, FIRST)
    assert third == [row for row in second if row != (0, 2)]
    kill_at(step.label, run, lake.folder)
    check(lake.folder, {FIRST: [second, third]})
    run(lake.folder)
    assert globbed(lake.folder, FIRST) == third and run(lake.folder) == []


def test_hours_behind_a_hole_are_delivered_and_an_override_is_too(lake: StreamLake) -> None:
    accept(lake, HOURS[1], 3)
    accept(lake, HOURS[3], 2)
    assert [(d.hour, d.revision, d.served, d.rows, d.files) for d in run(lake.folder)] == [
        (HOURS[1], 1, "batch", 3, 1), (HOURS[3], 1, "batch", 2, 1)
    ]  # fmt: skip
    acts.serve_hour(lake.publisher, HOURS[1], "speed", "a test")
    assert [(d.hour, d.served, d.rows) for d in run(lake.folder)] == [(HOURS[1], "speed", 10)]
    assert globbed(lake.folder, HOURS[1]) == in_main(lake, HOURS[1])
    accept(lake, FIRST, 0)
    assert [(d.hour, d.rows, d.files) for d in run(lake.folder)] == [(FIRST, 0, 0)]
    assert globbed(lake.folder, FIRST) == []


def test_a_change_back_to_the_delivered_content_is_done_with(lake: StreamLake) -> None:
    """Else the hour would wait for its delivery, and its expiry for it."""
    accept(lake, HOURS[1], 3)
    [before] = run(lake.folder)
    for layer in ("speed", "batch"):
        acts.serve_hour(lake.publisher, HOURS[1], layer, "a test")  # type: ignore[arg-type]
    job = job_of(lake.folder)
    [target] = room.targets_of(job, None)
    assert room.undelivered_hours(job, target) == {HOURS[1]}
    [again] = run(lake.folder)
    assert (again.delivery_id, again.files) == (before.delivery_id, 1)
    assert room.undelivered_hours(job, target) == set()
    assert run(lake.folder) == []


def test_a_waiting_target_is_named_and_a_redelivery_ends(lake: StreamLake) -> None:
    """Else hours after it would wait for a delivery that each run repeats."""
    for hour in HOURS[:3]:
        accept(lake, hour, 3)
    job = replace(job_of(lake.folder), kafka=Broker(log={0: [0] * 40}).adapter)

    def remedies() -> list[str]:
        view = status(job)
        facts = streams.StreamFacts(view, {}, undelivered=streams.undelivered(job, view))
        found = streams.findings(job.stream, facts)
        return [finding.remedy for finding in found if finding.check is Issue.EGRESS]

    command = printed("anabranch egress STREAM --target NAME", STREAM="events", NAME="export")
    assert remedies() == [command]
    assert len(run(lake.folder)) == 3 and remedies() == []
    shutil.rmtree(folder_of(lake.folder))
    [target] = room.targets_of(job, None)
    assert len([*room.deliver(job, target, all_again=True)]) == 3
    assert room.undelivered_hours(job, target) == set() and run(lake.folder) == []
    assert globbed(lake.folder, FIRST) == in_main(lake, FIRST)


def test_a_lost_answer_is_recorded_once(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    accept(lake, FIRST, 3)
    real = Lake.append

    def repeated(self: Lake, name: str, rows: Any, **options: Any) -> Any:
        assert rows(real(self, name, rows, **options)) is None
        return real(self, name, rows, **options)

    monkeypatch.setattr(Lake, "append", repeated)
    run(lake.folder)
    assert len(lake.lake.load(job_of(lake.folder).stream.egress_table).scan().to_arrow()) == 1


def test_a_lost_position_is_found_and_nothing_written_twice(lake: StreamLake) -> None:
    for hour in HOURS[:2]:
        accept(lake, hour, 3)
    before = run(lake.folder)
    job = job_of(lake.folder)
    lake.lake.catalog.drop_table(job.stream.egress_table)
    add_deliveries(lake)
    again = zip(run(lake.folder), before, strict=True)
    assert [replace(d, delivered_at=b.delivered_at) for d, b in again] == before
    assert run(lake.folder) == []
    # Another root is another place: all hours are delivered there.
    found = deliveries.newest(job.lake, job.stream.egress_table, "export", "s3://elsewhere/x")
    assert found is None


@pytest.mark.parametrize("is_erased", [False, True], ids=["expired", "erased"])
def test_hours_are_planned_again_before_their_turn(lake: StreamLake, is_erased: bool) -> None:
    """The hazards: the snapshot of the changes expires, or has an erased row, and stays for a day."""
    for hour in HOURS[:3]:
        accept(lake, hour, 3)
    job, delivered = job_of(lake.folder), list[tuple[str, int]]()
    for delivery in room.deliver(job, job.stream.egress[0]):
        if not delivered and is_erased:
            erase(lake, 1, 11, 21)
        elif not delivered:
            accept(lake, HOURS[3], 1)
            expire(lake)
        delivered.append((delivery.hour, delivery.rows))
    expired = [(HOURS[1], 3), (HOURS[2], 3), (HOURS[3], 1)]
    again = [(FIRST, 2), (HOURS[1], 2), (HOURS[2], 2)] if is_erased else expired
    assert delivered == [(FIRST, 3), *again]
    assert all(globbed(lake.folder, hour) == in_main(lake, hour) for hour, _ in delivered)


def test_one_process_at_a_local_root_delivers_and_reports_progress(
    lake: StreamLake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept(lake, FIRST, 3)
    (root := lake.folder / "export").mkdir()
    lock = locked(root / ".anabranch.lock", seconds=0)
    with lock, pytest.raises(Transient, match="taken by another process"):
        run(lake.folder)
    assert len(run(lake.folder)) == 1
    monkeypatch.setattr("anabranch.common.logs._PATIENCE", 0.0)
    monkeypatch.setattr("serving_layer.egress.hour._BATCH_ROWS", 1)
    caplog.set_level("INFO")
    accept(lake, FIRST, 7)
    run(lake.folder)
    assert f"egress export of stream {lake.stream.name}: hour {FIRST}: 1 of 7 rows, " in caplog.text


def test_the_refused_deletes_its_files(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    accept(lake, FIRST, 3)
    run(lake.folder)
    accept(lake, FIRST, 4)
    before = parquet_in(own := folder_of(lake.folder))
    monkeypatch.setattr(LocalStorage, "replace", lambda *_: False)
    with pytest.raises(Transient, match="another delivered the hour meanwhile"):
        run(lake.folder)
    assert parquet_in(own) == before
    monkeypatch.undo()
    assert run(lake.folder) and globbed(lake.folder, FIRST) == in_main(lake, FIRST)


def test_a_manifest_in_doubt_is_kept(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store answers so when a client repeats a conditional write whose answer was lost. Runs
    twice: with new files, and for a delivery of another process, whose files the manifest names."""
    real = LocalStorage.replace

    def repeated(self: LocalStorage, path: str, body: bytes, before: SmallFile | None) -> bool:
        assert real(self, path, body, before)
        return real(self, path, body, before)

    monkeypatch.setattr(LocalStorage, "replace", repeated)
    accept(lake, FIRST, 3)
    assert len(run(lake.folder)) == 1 and globbed(lake.folder, FIRST) == in_main(lake, FIRST)
    (folder_of(lake.folder) / "_SUCCESS").unlink()
    lake.lake.catalog.drop_table(lake.stream.egress_table)
    add_deliveries(lake)
    assert len(run(lake.folder)) == 1 and globbed(lake.folder, FIRST) == in_main(lake, FIRST)


def test_another_processs_files_stay(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifest was replaced by one that found it without `_SUCCESS`: it is refused."""
    real = LocalStorage.replace

    def overtaken(self: LocalStorage, path: str, body: bytes, before: SmallFile | None) -> bool:
        assert real(self, path, body, before)
        other = replace(Manifest.decode(path, body), delivery="another")
        assert real(self, path, other.encode(), self.find(path))
        return False

    monkeypatch.setattr(LocalStorage, "replace", overtaken)
    accept(lake, FIRST, 3)
    with pytest.raises(Transient, match="another delivered the hour meanwhile"):
        run(lake.folder)
    assert by_manifest(folder_of(lake.folder)) == in_main(lake, FIRST)


@pytest.mark.parametrize("is_first", [False, True])
def test_another_processs_marker_stays(
    lake: StreamLake, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """This process listed the folder, and the other one delivered the hour before this one's next
    step: no later delivery would mark the folder again. Or it found no manifest, then a marker."""
    accept(lake, FIRST, 3)
    if not is_first:
        run(lake.folder)
        accept(lake, FIRST, 4)
    monkeypatch.setattr("serving_layer.egress.folder.locked", lambda *_, **__: nullcontext())
    real, others = LocalStorage.names, list[deliveries.Delivery]()

    def overtaken(self: LocalStorage, folder: str) -> frozenset[str]:
        found = real(self, folder)
        monkeypatch.setattr(LocalStorage, "names", real)
        others.extend(run(lake.folder) if not others else [])
        return real(self, folder) if is_first else found

    monkeypatch.setattr(LocalStorage, "names", overtaken)
    with pytest.raises(Transient, match="another delivered the hour meanwhile"):
        run(lake.folder)
    assert len(others) == 1 and run(lake.folder) == []
    assert globbed(lake.folder, FIRST) == in_main(lake, FIRST)


def test_files_of_a_later_delivery_stay(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process replaced the manifest and was paused: another one replaced it again."""
    accept(lake, FIRST, 3)
    monkeypatch.setattr("serving_layer.egress.folder.locked", lambda *_, **__: nullcontext())
    real = LocalStorage.replace

    def paused(self: LocalStorage, *given: Any) -> bool:
        monkeypatch.setattr(LocalStorage, "replace", real)
        is_done = real(self, *given)
        accept(lake, FIRST, 4)
        return is_done and len(run(lake.folder)) == 1

    monkeypatch.setattr(LocalStorage, "replace", paused)
    assert run(lake.folder) and by_manifest(folder_of(lake.folder)) == in_main(lake, FIRST)
    assert run(lake.folder) and globbed(lake.folder, FIRST) == in_main(lake, FIRST)


def test_the_manifest_decides_what_a_folder_lacks(lake: StreamLake) -> None:
    accept(lake, FIRST, 3)
    run(lake.folder)
    path = folder_of(lake.folder) / "_manifest.json"
    manifest = Manifest.decode(str(path), path.read_bytes())
    hour: Any = replace(manifest)
    done = f"{manifest.delivery}\n".encode()
    assert plan_folder("p", None, None, hour) is Todo.WRITE
    assert plan_folder("p", manifest, done, hour) is Todo.NOTHING
    assert plan_folder("p", manifest, None, hour) is Todo.FINISH
    assert plan_folder("p", manifest, b"another", hour) is Todo.FINISH
    newer: Any = replace(manifest, source="other", sequence=manifest.sequence + 1)
    assert plan_folder("p", manifest, done, newer) is Todo.WRITE
    object.__setattr__(newer, "snapshot_id", 1)
    with pytest.raises(ConfigurationError, match="hours of stream others, found some of events"):
        plan_folder("p", manifest, done, replace(newer, stream="others"))
    older: Any = replace(manifest, source="other", sequence=manifest.sequence - 1)
    object.__setattr__(older, "snapshot_id", 1)
    with pytest.raises(Refused, match="found a later reading"):
        plan_folder("p", manifest, done, older)
    with pytest.raises(ConfigurationError, match="expected a manifest of version 1"):
        Manifest.decode("p", b'{"version": 2}')


@pytest.mark.parametrize("sizes", [[], [3], [10], [10, 1], [4, 25, 0, 7], [30]])
def test_parts_contain_all_rows_in_order_and_each_but_the_last_is_full(sizes: list[int]) -> None:
    numbers: Iterator[int] = iter(range(1000))
    some = (pa.array([next(numbers) for _ in range(size)], pa.int64()) for size in sizes)
    batches = [pa.RecordBatch.from_pydict({"n": values}) for values in some]
    parts = [[n for batch in part for n in batch["n"].to_pylist()] for part in _parts(batches, 10)]
    assert [n for part in parts for n in part] == list(range(sum(sizes)))
    assert all(len(part) == 10 for part in parts[:-1])
    assert all(0 < len(part) <= 10 for part in parts)


@pytest.mark.parametrize(
    ("targets", "name", "found"),
    [
        ([("export", "file:///e")], "other", "expected the target 'other', found export"),
        ([], None, "has no `egress:`"),
        ([("in", "file://{}/warehouse/x")], None, "expected a place outside the tables' folder"),
    ],
)
def test_a_target_is_named_and_lies_outside_the_warehouse(
    tmp_path: Path, targets: list[tuple[str, str]], name: str | None, found: str
) -> None:
    egress = [Target(name=of, root=root.format(tmp_path)) for of, root in targets]
    job = replace(job_of(tmp_path), stream=new_stream(egress=egress))
    with pytest.raises(ConfigurationError, match=found):
        room.targets_of(job, name)


def test_a_first_delivery_deletes_no_others_files(lake: StreamLake, tmp_path: Path) -> None:
    """The hazard: a root that Spark's file sink has filled was emptied, hour by hour."""
    accept(lake, HOURS[0], 10)
    folder = folder_of(tmp_path, HOURS[0])
    folder.mkdir(parents=True)
    names = ["notes.txt", "part-00000-of-another-job.snappy.parquet"]
    for name in names:
        (folder / name).write_text("x")
    with pytest.raises(ConfigurationError, match=r"found notes\.txt, part-00000-of.*there: give"):
        run(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == names
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "_SUCCESS").touch()
    with pytest.raises(ConfigurationError, match="found _SUCCESS; nothing was changed there"):
        run(tmp_path)
    (folder / "_SUCCESS").unlink()
    assert [d.hour for d in run(tmp_path)] == [HOURS[0]]
    # Later too: the hour that comes again is not delivered beside what it did not write there.
    (folder / (copied := f"{HOURS[0]}-r1-{'0' * 16}-00000.parquet")).write_text("x")
    accept(lake, HOURS[0], 9)
    with pytest.raises(ConfigurationError, match=f"found {copied}; nothing was changed there"):
        run(tmp_path)
    assert (folder / "_SUCCESS").exists()


@pytest.mark.parametrize("is_absolute", [False, True])
def test_no_file_elsewhere_is_deleted(lake: StreamLake, tmp_path: Path, is_absolute: bool) -> None:
    """The hazard: a target's writer names files of the warehouse, which egress may delete."""
    accept(lake, HOURS[0], 10)
    folder = folder_of(tmp_path)
    run(tmp_path)
    accept(lake, HOURS[0], 9)
    others = [path for path in tmp_path.rglob("*.parquet") if not path.is_relative_to(folder)]
    names = [str(path) if is_absolute else os.path.relpath(path, folder) for path in others]
    text = json.loads((folder / "_manifest.json").read_text())
    text["files"] += [{"name": name, "rows": 1, "bytes": 1} for name in names]
    (folder / "_manifest.json").write_text(json.dumps(text))
    with pytest.raises(ConfigurationError, match=r"_manifest\.json: expected a manifest"):
        run(tmp_path)
    assert others and all(path.exists() for path in others)


def test_a_link_in_the_folder_is_not_written_through(tmp_path: Path) -> None:
    """The hazard: a link of the name of a small file before its rename, which can be guessed."""
    other, folder = tmp_path / "other.db", tmp_path / "export"
    other.write_text("kept")
    folder.mkdir()
    for number in (os.getpid(), os.getpid() + 1):
        (folder / f"._manifest.json.{number}").symlink_to(other)
    (folder / "_manifest.json").symlink_to(other)
    with open_storage(new_environment(tmp_path), f"file://{folder}") as storage:
        storage.put(f"file://{folder}/_manifest.json", b"new")
    assert (other.read_text(), (folder / "_manifest.json").read_text()) == ("kept", "new")
    assert not (folder / "_manifest.json").is_symlink()


@pytest.mark.parametrize("step", [Step.EGRESS_BEGUN, Step.EGRESS_WRITTEN, Step.EGRESS_NAMED])
def test_a_killed_deliverys_files_are_listed(lake: StreamLake, tmp_path: Path, step: Step) -> None:
    accept(lake, HOURS[0], 10)
    kill_at(step.label, run, tmp_path)
    accept(lake, HOURS[0], 9)
    run(tmp_path)
    folder = folder_of(tmp_path, HOURS[0])
    manifest = Manifest.decode("", (folder / "_manifest.json").read_bytes())
    assert (parquet_in(folder), manifest.rows) == (set(manifest.names), 9)


@pytest.mark.parametrize("killed", [False, True])
def test_a_lost_restatement_is_sent_again(lake: StreamLake, tmp_path: Path, killed: bool) -> None:
    """The hazards: the restored table lists its earlier content as delivered; an hour waits until new
    sequence numbers have passed the lost ones."""
    for hour in HOURS[:2]:
        accept(lake, hour, 7)
    run(tmp_path)
    with lost_commits(tmp_path):
        accept(lake, HOURS[2], 5)
        accept(lake, FIRST, 6)
        run(tmp_path)
        assert len(globbed(tmp_path, FIRST)) == 6
    restored = replace(lake, lake=lake.again())
    assert run(tmp_path) == [], "nothing shows the restore yet"
    accept(restored, HOURS[2], 4)
    if killed:
        # While every hour is delivered again: the first is, the others are not.
        kill_at(f"{Step.EGRESS_RECORDED.label}:1", run, tmp_path)
    assert {d.hour for d in run(tmp_path)} >= {HOURS[2]}
    for hour in HOURS[:3]:
        assert globbed(tmp_path, hour) == in_main(restored, hour)
    assert run(tmp_path) == []


def test_every_hour_is_delivered_again_on_request(lake: StreamLake, tmp_path: Path) -> None:
    """A restore needs this if the lost commits delivered hours that are not accepted again."""
    accept(lake, FIRST, 7)
    run(tmp_path)
    with lost_commits(tmp_path):
        accept(lake, FIRST, 6)
        run(tmp_path)
    restored = replace(lake, lake=lake.again())
    assert run(tmp_path) == [], "the hazard did not happen"
    job = job_of(tmp_path)
    room.record_redelivery(job, job.stream.egress, "the backup of Sunday")
    assert [d.hour for d in room.deliver(job, job.stream.egress[0], all_again=True)] == [FIRST]
    assert globbed(tmp_path, FIRST) == in_main(restored, FIRST)
    [row] = job.ledger.acts()
    assert (row.decision, row.act and row.act.name) == ("redelivered", "redeliver")
    assert (row.act and row.act.why) == "the backup of Sunday"
    assert run(tmp_path) == [], "a redelivery is a change to no consumer"


def test_a_redelivery_is_refused_until_main_is_merged(lake: StreamLake, tmp_path: Path) -> None:
    """The hazard: no hour was delivered, and no later run delivered any."""
    accept(lake, FIRST, 7)
    before = snapshots.heads(lake.table())["batch"]
    accept(lake, HOURS[0], 10)
    run(tmp_path)
    lake.set_back("batch", before)
    job = job_of(tmp_path)
    assert list(room.deliver(job, job.stream.egress[0], all_again=True)) == []
    with pytest.raises(Refused, match=r"expected main to be merged .*`anabranch merge events`"):
        room.record_redelivery(job, job.stream.egress, "the backup of Sunday")
    assert job.ledger.acts() == []
