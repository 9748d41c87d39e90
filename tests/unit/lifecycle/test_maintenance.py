"""Maintenance removes unreferenced files and no others, with any publisher beside it."""

import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from brokers import Broker
from conf_folders import said
from lakes import (
    StreamLake,
    add_snapshots,
    limit_commits,
    new_environment,
    new_lake,
    new_state,
    new_stream,
    record,
    rows,
    snapshots,
    stage,
)
from pyiceberg.io.pyarrow import schema_to_pyarrow

from anabranch.cli.render.changes import maintenance_text
from anabranch.cli.report import print_text
from anabranch.common.errors import Refused, Transient
from anabranch.common.fail_points import Step
from anabranch.iceberg import expiry, ledger_files, table_schemas
from anabranch.iceberg import lake as lakes_module
from anabranch.iceberg.commits import Change, Outcome, Tag
from anabranch.iceberg.files import Stored, plan_orphans, references, same_file
from anabranch.iceberg.s3 import bucket_and_key
from anabranch.iceberg.snapshots import BRANCHES, Staged, find_staged
from anabranch.job import Job
from anabranch.lifecycle import maintenance
from anabranch.lifecycle.erasure import end
from anabranch.lifecycle.maintenance import Maintained, plan_drop
from anabranch.offsets.hours import Cut, Timeline, hour_of, shift
from anabranch.operations.reports.maintenance import last_run_words, read_maintenance
from anabranch.protocol import ledger
from anabranch.protocol.acts import serve_hour
from anabranch.protocol.dead_letters import waiting_speed
from anabranch.protocol.measured import read_runs
from anabranch.protocol.merge import merge, uncovered_reason
from anabranch.protocol.publish import Publish, new_id
from anabranch.protocol.state import Accepted, State, main_only_hours
from batch_layer.plan import plan_acceptance_of_empty

NOW = datetime.now(UTC)
LONG_AGO = NOW - timedelta(days=9)
FIRST = hour_of(NOW - timedelta(days=10))
H = [shift(FIRST, i) for i in range(6)]
CUTS = [Cut("t", {0: (3 * i, 3 * i + 3)}) for i in range(6)]
SPEED = {i: [(H[i], 0, 3 * i + o) for o in range(3)] for i in range(3)}


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """Hours 0 and 1 accepted nine days ago, 2 sealed, 3 open; a dead letter in hour 0."""
    sealed = {H[i]: CUTS[i] for i in range(3)}
    made = new_lake(tmp_path, timeline=Timeline(FIRST, H[3], {0: 9}, sealed=sealed))
    letters = (waiting_speed(made.stage_dead([(H[0], 0, 2)], "speed"), NOW),)
    made.serve([r for hour in SPEED.values() for r in hour], {0: 9}, dead_letters=letters)
    made.roll()
    for i in (0, 1):
        accept(made, i)
    return made


def accept(lake: StreamLake, i: int, at: datetime = LONG_AGO) -> None:
    timeline = lake.state().timeline
    rest = replace(timeline, sealed={h: c for h, c in timeline.sealed.items() if h != H[i]})
    row = ledger.decision(H[i], "accepted", 1, CUTS[i], at, served="batch")
    accepted, rows = Accepted(1, CUTS[i]), lake.stage(SPEED[i])
    publish = lake.accept(rows, H[i], accepted, timeline=rest, decisions=(row,))
    lake.land(publish)
    lake.ledger.record([row])


def job(lake: StreamLake) -> Job:
    return Job(new_environment(lake.folder), lake.stream, lake.lake, Broker().adapter)


def maintain(lake: StreamLake, **values: Any) -> Maintained:
    return maintenance.maintain(job(lake), datetime.now(UTC), **values)


def files(lake: StreamLake) -> set[str]:
    return {str(p) for p in (lake.folder / "warehouse").rglob("*") if p.is_file()}


def age(paths: set[str], days: float = 9) -> None:
    then = (NOW - timedelta(days=days)).timestamp()
    for path in paths:
        os.utime(path, (then, then))


def paths_of(staged: Staged) -> set[str]:
    return {f.file_path.removeprefix("file://") for f in staged.files}


def all_readable(lake: StreamLake) -> bool:
    """Whether every file that any snapshot of any table refers to is there."""
    names = (lake.name, lake.stream.dead_letters_table, lake.stream.hours_table)
    named = {path for name in names for path in references(lake.lake.load(name))}
    return {path.removeprefix("file://") for path in named} <= files(lake)


def orphan(lake: StreamLake) -> Staged:
    """An attempt that was given up."""
    staged = lake.stage([(H[3], 0, 9)])
    lake.lake.discard(lake.name, staged)
    return staged


def waiting_letters(lake: StreamLake) -> Staged:
    """A dead letter that is staged and named, and not published."""
    staged = lake.stage_dead([(H[3], 0, 9)], "speed")
    letters = (waiting_speed(staged, NOW),)
    changes = (Change("speed"), Change("main"))
    lake.change(*changes, dead_letters=letters)
    return staged


# Orphans


def test_only_unreferenced_files_are_deleted_after_their_age(lake: StreamLake) -> None:
    state = lake.state()
    tag = Tag("kept", state.heads["main"], 86_400_000)
    lake.change(Change("speed"), timeline=state.timeline, tags=(tag,))
    left = paths_of(orphan(lake))
    stray = Path(lake.table().location().removeprefix("file://")) / "metadata" / "left-m0.avro"
    stray.write_bytes(b"a refused publish's manifest")
    foreign = stray.with_name("notes.txt")
    foreign.write_text("not a file of any writer")
    age(files(lake))
    before, rows = files(lake), {b: lake.rows(b) for b in ("main", "batch")}
    planned = maintain(lake, dry_run=True)
    assert files(lake) == before
    done = maintain(lake)
    assert {f.path for f in done.orphans[lake.name]} == {f.path for f in planned.orphans[lake.name]}
    gone = before - files(lake)
    assert left | {str(stray)} <= gone
    assert foreign.exists()
    assert all_readable(lake)
    assert {b: lake.rows(b) for b in ("main", "batch")} == rows
    assert lake.table().scan(snapshot_id=tag.snapshot_id).to_arrow().num_rows == 9
    deleted = {f.path.removeprefix("file://") for fs in done.orphans.values() for f in fs}
    assert not deleted & files(lake)
    assert not any(maintain(lake).orphans.values()), "run again, it finds more"


def test_a_publisher_paused_before_an_orphan_run_is_refused(lake: StreamLake) -> None:
    """A file that is rolled up is named by no snapshot until its commit."""
    left = orphan(lake)
    # Nothing is left to expire, so that the head moves for the orphans alone.
    maintain(lake)
    age(paths_of(left))
    state = lake.state()
    assert paths_of(left) <= files(lake)
    assert maintain(lake).orphans[lake.name]
    assert not paths_of(left) & files(lake)
    paused = Publish(new_id(), (Change("speed", left.files, rewrites=True),), state.timeline)
    assert lake.publish(paused, state) is Outcome.REFUSED
    assert all_readable(lake)


@pytest.mark.parametrize(
    "paused_at", [Step.LEDGER_PREPARED, Step.COMMIT_PREPARED], ids=["ledger", "dead letters"]
)
def test_a_process_paused_before_a_commit_to_the_other_tables_names_no_missing_file(
    lake: StreamLake, monkeypatch: pytest.MonkeyPatch, paused_at: Step
) -> None:
    """The hazard: no snapshot knows the files of a commit under way, and no head moves."""
    waiting_letters(lake)
    maintain(lake)
    paused: list[int] = []

    def reached(step: Step) -> None:
        if step is paused_at and not paused:
            paused.append(len(files(lake)))
            age(files(lake))
            done = maintain(lake)
            paused.append(sum(map(len, done.orphans.values())))

    monkeypatch.setattr(lakes_module, "reach", reached)
    if paused_at is Step.LEDGER_PREPARED:
        row = ledger.decision(H[3], "sealed", 0, CUTS[3], NOW, "late")
        assert lake.ledger.record([row]) == {"late"}
    else:
        lake.roll()
        assert (H[3], 0, 9) in lake.dead("main")
    assert paused[1:] and paused[1] > 0, "the hazard did not happen"
    assert all_readable(lake)
    late = {"late"} if paused_at is Step.LEDGER_PREPARED else set()
    assert {r.decision_id for r in lake.ledger.history()} >= late


def test_a_publisher_paused_before_an_orphan_run_names_no_letter(lake: StreamLake) -> None:
    """The hazard: a micro-batch of dead letters has no file of rows: none is an orphan."""
    # Nothing is left to expire, so that the head moves for the orphans alone.
    maintain(lake)
    staged, table = lake.stage_dead([(H[3], 0, 9)], "speed"), lake.stream.dead_letters_table
    letters = (waiting_speed(staged, NOW),)
    lake.lake.discard(table, staged)
    age(paths_of(staged))
    state = lake.state()
    done = maintain(lake)
    assert {f.path for f in done.orphans[table]} and not done.orphans[lake.name]
    assert not paths_of(staged) & files(lake)
    changes = (Change("speed"), Change("main"))
    paused = Publish(new_id(), changes, state.timeline, dead_letters=letters)
    assert lake.publish(paused, state) is Outcome.REFUSED


def test_a_file_written_a_second_ago_is_spared(lake: StreamLake) -> None:
    """The hazard: a writer that is at work has files that no snapshot refers to yet."""
    young, old = paths_of(orphan(lake)), paths_of(orphan(lake))
    age(files(lake) - young)
    maintain(lake)
    assert young <= files(lake)
    assert not old & files(lake)


def test_staged_files_of_a_paused_publisher_are_spared(lake: StreamLake) -> None:
    paused, state = lake.stage([(H[3], 0, 9)]), lake.state()
    publish = lake.speed(paused, {0: 10}, state)
    age(files(lake))
    assert maintain(lake).speed_hours == (H[0], H[1])
    assert find_staged(lake.table(), paused.wap_id) is not None
    assert paths_of(paused) <= files(lake)
    # It was decided on heads that maintenance has moved.
    assert lake.publish(publish, state) is Outcome.REFUSED
    lake.land(lake.speed(paused, {0: 10}))
    assert lake.rows("main")[-1] == (H[3], 0, 9)
    assert all_readable(lake)


def test_dead_letters_that_a_property_names_as_pending_are_spared(lake: StreamLake) -> None:
    staged = waiting_letters(lake)
    lake.lake.discard(lake.stream.dead_letters_table, staged)
    age(files(lake))
    maintain(lake)
    assert paths_of(staged) <= files(lake)


def test_the_files_of_other_tables_in_and_beside_the_folder_are_spared(lake: StreamLake) -> None:
    """The hazard: one location is the beginning of another, as text or as a folder."""
    location = lake.table().location()
    letters = lake.lake.load(lake.stream.dead_letters_table)
    assert letters.location().startswith(location), "the hazard did not happen"
    others = [
        f"{location}2", f"{location}/data/inner", f"{location}/inner", f"{location}/metadata/inner",
    ]  # fmt: skip
    schema = table_schemas.rows_schema(lake.stream)
    for i, where in enumerate(others):
        made = lake.lake.catalog.create_table(f"games.other{i}", schema, location=where)
        made.append(made.scan().to_arrow())
    folders = [Path(w.removeprefix("file://")) for w in others]
    mine = {str(p) for folder in folders for p in folder.rglob("*") if p.is_file()}
    left = paths_of(orphan(lake))
    age(files(lake))
    maintain(lake)
    assert len(mine) > 8
    assert mine <= files(lake)
    assert not left & files(lake)


def place(lake: StreamLake, name: str, **properties: str) -> None:
    with lake.lake.load(name).transaction() as tx:
        tx.set_properties({f"write.{key.replace('_', '.')}": v for key, v in properties.items()})


@pytest.mark.parametrize("of", ["data_path", "metadata_path"])
def test_another_tables_folder_is_left_alone(lake: StreamLake, of: str) -> None:
    """The hazard: its files have the names that this table's writers give theirs."""
    folder = f"file://{lake.folder}/warehouse/shared"
    schema = table_schemas.rows_schema(lake.stream)
    lake.lake.catalog.create_namespace("far.away")
    spec = lake.table().spec()
    other = lake.lake.catalog.create_table("far.away.other", schema, partition_spec=spec)
    for name in (lake.name, "far.away.other"):
        place(lake, name, **{of: folder})
    other.refresh()
    [row] = lake.table().scan().to_arrow().slice(0, 1).to_pylist()
    other.append(pa.Table.from_pylist([row], schema=schema_to_pyarrow(schema)))
    left = paths_of(orphan(lake))
    age(files(lake))
    found = r"found that table far\.away\.other writes in file:.*/shared"
    with pytest.raises(Refused, match=found):
        end.find_unreferenced(job(lake), [lake.name], NOW)
    with pytest.raises(Refused, match="nothing is deleted"):
        maintain(lake)
    assert left <= files(lake)
    lake.lake.catalog.drop_table("far.away.other")
    maintain(lake)
    assert not left & files(lake)


def test_objects_of_tables_that_share_a_folder_have_the_tables_name(lake: StreamLake) -> None:
    folder, names = f"{lake.folder}/warehouse/shared", (lake.name, lake.stream.dead_letters_table)
    for name in names:
        place(lake, name, data_path=f"file://{folder}", **{"object-storage_enabled": "true"})
    part = f"event_date=2026-11-21/ingest_hour={H[0]}/a.parquet"
    hashed = f"{folder}/0101/0110/1001/10110010"
    mine, theirs = Path(f"{hashed}/games/events/{part}"), Path(f"{hashed}/games/other/{part}")
    plain = Path(f"{hashed}/{part}")
    for path in (mine, theirs, plain):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    age(files(lake) | {str(mine), str(theirs), str(plain)})
    maintain(lake)
    assert [path.exists() for path in (mine, theirs, plain)] == [False, True, True]


def test_a_file_published_late_is_spared(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    late, real = orphan(lake), end.list_table
    age(files(lake))

    def list_table(*args: Any) -> list[Stored]:
        stored = real(*args)
        if paths_of(late) & {f.path.removeprefix("file://") for f in stored}:
            lake.land(replace(lake.speed(late, {0: 10}), staged={}))
        return stored

    monkeypatch.setattr(end, "list_table", list_table)
    maintain(lake)
    assert lake.rows("main")[-1] == (H[3], 0, 9), "the hazard did not happen"
    assert all_readable(lake)


def test_nothing_is_deleted_when_paths_disagree() -> None:
    stored = [Stored("s3://other/a.parquet", 1, LONG_AGO)]
    found = r"expected some of 1 files to be referenced, found none, first s3://other/a"
    with pytest.raises(Refused, match=found):
        plan_orphans(stored, {"s3://bucket/a.parquet"}, NOW)
    assert plan_orphans([], {"s3://bucket/a.parquet"}, NOW) == ([], [])


def test_a_path_is_the_same_however_a_writer_spells_it() -> None:
    assert len({same_file(p) for p in ("file:///w/a", "file:/w/a", "/w/a")}) == 1
    assert same_file("s3a://b/a") == same_file("s3://b/a") == "b/a"
    assert same_file("s3://b/hour=2026:03/a") == "b/hour=2026:03/a"
    assert same_file("/w/a:b") == "w/a:b"
    # Files and versions of a path that is not on S3 are looked for on the disk.
    assert bucket_and_key("s3a://b/a/data/") == bucket_and_key("s3://b/a/data/") == ("b", "a/data/")
    assert bucket_and_key("file:///s3a/a") is None and bucket_and_key("s3n://b/a") is None


# Old hours of the speed layer


def state_of(**values: Any) -> State:
    given: dict[str, Any] = {"accepted": {H[i]: Accepted(1, CUTS[i]) for i in range(4)}}
    timeline = Timeline(FIRST, H[5], {0: 15}, sealed={H[4]: CUTS[4]})
    timeline = replace(timeline, **values.pop("timeline", {}))
    return new_state(timeline, {0: 15}, **(given | values))


SINCE = dict.fromkeys(H, LONG_AGO)
WEEK_AGO = NOW - timedelta(days=7)


def drop(
    state: State, have: tuple[str, ...] = tuple(H), **since: datetime
) -> tuple[tuple[str, ...], Timeline]:
    return plan_drop(state, have, SINCE | since, WEEK_AGO)


def test_only_hours_that_batch_has_served_for_long_are_dropped_and_not_named_as_skipped() -> None:
    dropped, timeline = drop(state_of())
    assert dropped == tuple(H[:4])
    assert (timeline.covered_from, timeline.kept, timeline.skipped) == (H[4], (), ())
    assert [timeline.is_skipped(h) for h in H] == [True] * 4 + [False] * 2
    state = state_of(timeline={"skipped": (H[1], H[4])})
    _, timeline = drop(state, (H[0], H[2], H[3], H[4]))
    assert timeline.skipped == (H[4],)
    assert [h for h in H if timeline.is_skipped(h)] == H[:5]


def test_chosen_young_and_unaccepted_hours_are_kept() -> None:
    accepted = {H[i]: Accepted(1, CUTS[i]) for i in (0, 2, 3)}
    sealed = {H[1]: CUTS[1], H[4]: CUTS[4]}
    state = state_of(
        accepted=accepted, overrides={H[0]: "speed"}, timeline={"sealed": sealed}
    )  # fmt: skip
    dropped, timeline = drop(state, **{H[2]: NOW + timedelta(days=1)})
    assert dropped == (H[3],)
    assert timeline.kept == (H[0], H[1], H[2])
    assert [h for h in H if timeline.is_skipped(h)] == [H[3]]
    # Of these the ledger has no acceptance.
    assert plan_drop(state_of(), H, {}, NOW + timedelta(days=99)) == ((), state_of().timeline)


def test_dropping_continues_where_it_ended() -> None:
    accepted = {H[i]: Accepted(1, CUTS[i]) for i in range(4)}
    first, timeline = drop(state_of(), tuple(H[:2]))
    state = replace(state_of(accepted=accepted), timeline=timeline)
    second, timeline = drop(state, tuple(H[2:4]))
    assert (first, second) == (tuple(H[:2]), tuple(H[2:4]))
    assert [h for h in H if timeline.is_skipped(h)] == H[:4]
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_dropped_hours_leave_speed_alone_and_count_as_open(lake: StreamLake) -> None:
    main, dead = lake.rows("main"), lake.dead("main")
    assert maintain(lake).speed_hours == (H[0], H[1])
    assert (lake.rows("speed"), lake.rows("main")) == (SPEED[2], main)
    assert (lake.dead("speed"), lake.dead("main")) == ([], dead)
    state = lake.state()
    assert state.is_merged
    assert uncovered_reason(state, "speed", H[0]) == "the speed layer skipped it, wholly or in part"
    assert uncovered_reason(state, "speed", H[2]) is None
    assert merge(lake.lake, lake.stream, everything=True).swaps == []
    with pytest.raises(Refused, match="batch keeps serving it"):
        serve_hour(lake.publisher, H[0], "speed", "why")
    with lake.unmoved():
        assert maintain(lake).speed_hours == ()


def test_hours_are_dropped_in_commits(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: one commit for all of a day, which is overtaken for as long as it takes."""
    monkeypatch.setattr(maintenance, "_HOURS_A_COMMIT", 1)
    before = len(lake.table().snapshots())
    assert maintain(lake).speed_hours == (H[0], H[1])
    # A commit of two branches for each hour.
    assert len(lake.table().snapshots()) == before + 2 * 2
    assert lake.rows("speed") == SPEED[2]
    assert lake.rows("main") == [r for hour in SPEED.values() for r in hour]


def test_a_drop_that_fails_stops_nothing(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(*_: object, **__: object) -> None:
        raise Transient("maintain: expected a publish, found refusals")

    path = Path(orphan(lake).files[0].file_path.removeprefix("file://"))
    os.utime(path, (0, 0))
    monkeypatch.setattr(maintenance, "_drop_some", overtaken)
    with pytest.raises(Transient, match="found refusals"):
        maintain(lake)
    assert not path.exists(), "an orphan waits for the drop of hours"


def test_an_hour_chosen_for_the_speed_layer_keeps_its_files(lake: StreamLake) -> None:
    serve_hour(lake.publisher, H[0], "speed", "why")
    age(files(lake))
    assert maintain(lake).speed_hours == (H[1],)
    assert lake.rows("speed") == [*SPEED[0], *SPEED[2]]
    assert lake.rows("main") == [*SPEED[0], *SPEED[1], *SPEED[2]]
    assert all_readable(lake)


def test_hours_accepted_a_moment_ago_keep_theirs(lake: StreamLake) -> None:
    accept(lake, 2, NOW)
    assert maintain(lake).speed_hours == (H[0], H[1])
    assert uncovered_reason(lake.state(), "speed", H[2]) is None


# Snapshots


def test_the_other_snapshots_expire_too(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry.plan_expiry, "__defaults__", (5,))
    monkeypatch.setattr(maintenance, "SNAPSHOTS_KEPT", 5)
    monkeypatch.setattr(ledger_files, "SNAPSHOTS_KEPT", 5)
    # Too few manifests for a merge, whose snapshot a dry run cannot count.
    for _ in range(5):
        lake.ledger.record([ledger.decision(H[2], "refused", 1, CUTS[2], NOW)])
    rows = len(lake.ledger.history())
    assert len(lake.lake.load(lake.stream.hours_table).snapshots()) == 7
    expired = maintain(lake, dry_run=True).expired
    assert maintain(lake).expired == expired
    assert expired[lake.stream.hours_table] == 2
    assert len(lake.lake.load(lake.stream.hours_table).snapshots()) == 5
    assert len(lake.ledger.history()) == rows
    assert lake.dead("main") == [(H[0], 0, 2)]


def test_snapshots_of_the_archive_expire(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: the commit that expires a snapshot adds one, so there is always one to expire."""
    monkeypatch.setattr(expiry.plan_expiry, "__defaults__", (5,))
    monkeypatch.setattr(maintenance, "_HOURS_A_COMMIT", 1)
    name, stream = lake.add_archive(), new_stream(archive={"raw": "2 days"})
    kept = hour_of(NOW)
    staged = stage(lake.lake, name, [record(hour, 0, 0) for hour in (H[0], H[1], kept)])
    add_snapshots(lake.lake, name, 9, staged.files)
    before = snapshots(lake.lake, name)
    limit_commits(monkeypatch, 6)
    done = maintenance.maintain(replace(job(lake), stream=stream), datetime.now(UTC))
    assert rows(lake.lake, name, "main") == [(kept, 0, 0)]
    assert len(before - snapshots(lake.lake, name)) >= 5
    assert done.expired[name] >= 5


def test_hours_of_main_alone_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiry.plan_expiry, "__defaults__", (1,))
    hours = [shift(H[0], i) for i in range(3)]
    sealed = dict.fromkeys(hours, Cut("t", {0: (0, 0)}))
    lake = new_lake(tmp_path, timeline=Timeline(H[0], shift(hours[-1], 1), {0: 0}, sealed=sealed))
    for hour in hours:
        publish = plan_acceptance_of_empty(lake.state(), [hour], f"of {hour}", NOW)
        assert publish is not None and lake.publish(publish) is Outcome.LANDED
    before = lake.state()
    assert main_only_hours(before.branch_properties) == tuple(hours)
    with lake.unmoved():
        maintain(lake, dry_run=True)
    maintain(lake)
    after = lake.state()
    assert main_only_hours(after.branch_properties) == ()
    assert after.accepted == before.accepted and {*after.accepted} == {*hours}
    assert all(after.heads[branch] != before.heads[branch] for branch in BRANCHES)


# Its records


def test_a_run_records_its_steps_and_a_dry_run_none(lake: StreamLake) -> None:
    left = paths_of(orphan(lake))
    age(files(lake))
    maintain(lake, dry_run=True)
    assert read_runs(lake.table().properties) == ()
    young = paths_of(orphan(lake))
    done, (run,) = maintain(lake), read_runs(lake.table().properties)
    rows = run.tables[lake.name]
    assert (run.speed_hours, run.is_complete) == (2, True)
    assert rows.orphans.files == len(done.orphans[lake.name])
    assert rows.orphans.bytes == sum(f.size for f in done.orphans[lake.name]) > 0
    assert left <= {f.path.removeprefix("file://") for f in done.orphans[lake.name]}
    assert rows.spared.files >= len(young) and rows.spared.bytes > 0
    again = maintain(lake)
    runs = read_runs(lake.table().properties)
    assert [r.speed_hours for r in runs] == [len(again.speed_hours), 2]


def test_a_run_records_each_failed_step(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise Transient("list s3://bucket: expected an answer, found none")

    maintain(lake)
    monkeypatch.setattr(end, "list_table", away)
    accept(lake, 2)
    with pytest.raises(Transient, match="found none"):
        maintain(lake)
    newest, before = read_runs(lake.table().properties)
    assert dict(newest.failed) == {"orphans": "list s3://bucket: expected an answer, found none"}
    assert newest.speed_hours == 1 and before.is_complete
    view = read_maintenance(job(lake), lake.state(), NOW)
    assert (view.last, view.complete) == (newest, before)
    assert "found none; the last complete run ended at" in last_run_words(view)


def test_waiting_and_growing_items_are_read_from_the_tables(lake: StreamLake) -> None:
    waiting_letters(lake)
    view = read_maintenance(job(lake), lake.state(), NOW)
    assert view.last is None and last_run_words(view) == "no run recorded"
    assert view.speed_files == {H[2]: 1}
    assert view.letters_wait_since == NOW
    names = (lake.name, lake.stream.dead_letters_table, lake.stream.hours_table)
    tables = {name: view.tables[name] for name in names}
    assert [t.rows for t in tables.values()] == [9, 1, 2]
    metadata = Path(lake.table().metadata_location.removeprefix("file://"))
    assert tables[lake.name].metadata_bytes == metadata.stat().st_size
    for name, table in tables.items():
        loaded = lake.lake.load(name)
        assert table.snapshots == len(loaded.snapshots())
        assert table.files == len(loaded.inspect.data_files())
    rows, heads = lake.table(), lake.state().heads.values()
    snapshots = [rows.metadata.snapshot_by_id(head) for head in heads]
    manifests = {m.manifest_path for s in snapshots if s for m in s.manifests(rows.io)}
    assert tables[lake.name].manifests == len(manifests)
    expirable = {name: t.expirable for name, t in view.tables.items()}
    assert expirable == maintain(lake, dry_run=True).expired
    # Published, while the table of rows still names them: its next publish forgets them.
    lake.roll()
    assert lake.state().dead_letters
    assert read_maintenance(job(lake), lake.state(), NOW).letters_wait_since is None


def test_a_missing_table_hides_none(lake: StreamLake, capsys: pytest.CaptureFixture[str]) -> None:
    lacking = lake.stream.dead_letters_table
    lake.lake.catalog.drop_table(lacking)
    view = read_maintenance(job(lake), lake.state(), NOW)
    assert set(view.tables) == {lake.name, lake.stream.hours_table}
    assert (view.speed_files, view.rows) == ({H[2]: 1}, {"speed": 3, "batch": 6})
    why = f"table {lacking}: expected it to exist, found none; run `anabranch apply`"
    assert dict(view.unread) == {lacking: why}
    assert view.as_dict()["unread"] == view.unread
    print_text(maintenance_text(view))
    assert f"could not read {lacking}: table {lacking}: expected" in capsys.readouterr().out


# The command


def test_what_the_command_removed(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.job.open_job", lambda stream, conf: job(lake))
    orphan(lake)
    age(files(lake))
    report = json.loads(said("maintain", "events", "--dry-run", "--output", "json"))
    assert (report["dry_run"], report["last"]) == (True, None)
    assert report["speed_hours"] == [H[0], H[1]]
    orphans = report["orphans"]["games.events"]
    assert orphans["files"] >= 1 and orphans["bytes"] > 0
    assert report["tables"]["games.events"]["rows"] == 9
    done = said("maintain", "events")
    assert f"events: speed rows dropped of hours: {H[0]}, {H[1]}" in done
    assert "orphan files deleted" in done
    assert all_readable(lake)
    reported = said("maintain", "events", "--dry-run")
    assert "last run: all steps completed at " in reported and "metadata bytes" in reported
