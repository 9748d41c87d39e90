"""Dead letters follow the rows' publish: rolled forward by any process once, each in one place."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from brokers import Broker
from foreign_programs import expire_all
from lakes import FIRST, StreamLake, at_next_commit, new_lake, new_state, waiting

from anabranch.iceberg import commits, manifests, staging
from anabranch.iceberg.snapshots import STAGED, Staged, find_staged, staged_snapshot
from anabranch.job import Job
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol import dead_letters, ledger, ledger_row
from anabranch.protocol.dead_letters import discard, lost_hours, remembered_ids, waiting_batch
from anabranch.protocol.state import DEAD_LETTERS, OVERRIDES, Accepted, Confirmed, State
from batch_layer import plan, rebuild, stream_run

SECOND = shift(FIRST, 1)
CUT = Cut("t", {0: (0, 10)})
NOW = datetime(2026, 11, 21, 1, tzinfo=UTC)
D = [(FIRST, 0, 7), (FIRST, 0, 8)]


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    return new_lake(tmp_path, timeline=Timeline(FIRST, SECOND, {0: 10}, sealed={FIRST: CUT}))


def speed_said(lake: StreamLake, staged: Staged, at: datetime = NOW) -> State:
    """A publish of the speed layer's rows that names `staged`; the process dies after it."""
    item = dead_letters.waiting_speed(staged, at)
    lake.change(commits.Change("speed"), commits.Change("main"), dead_letters=(item,))
    return lake.state()


def batch_said(lake: StreamLake, staged: Staged | None, revision: int, at: datetime = NOW) -> State:
    letters = (waiting_batch(staged, FIRST, revision, at),)
    rows, accepted = lake.stage([(FIRST, 0, 0)]), Accepted(revision, CUT)
    lake.land(lake.accept(rows, FIRST, accepted, dead_letters=letters))
    return lake.state()


def test_a_crash_between_the_two_publishes_is_rolled_forward_once(lake: StreamLake) -> None:
    staged = lake.stage_dead(D, "speed")
    state = speed_said(lake, staged)
    assert lake.dead("main") == [], "the hazard did not happen"
    assert lake.roll(state) == {staged.wap_id}
    for again in (state, lake.state()):
        assert lake.roll(again) == {staged.wap_id}
    assert [lake.dead(b) for b in ("speed", "main", "batch")] == [D, D, []]
    # Once a publish confirms it, it waits no longer.
    confirmed = Confirmed(letters=frozenset({staged.wap_id}))
    lake.change(commits.Change("speed"), commits.Change("main"), confirmed=confirmed)
    assert [waiting(lake.state(), b, DEAD_LETTERS) for b in ("speed", "main")] == [[], []]


def test_two_processes_that_roll_forward_at_once_publish_once(lake: StreamLake) -> None:
    staged = lake.stage_dead(D, "speed")
    state, theirs, found = speed_said(lake, staged), lake.again(), list[frozenset[str]]()
    name = lake.stream.dead_letters_table
    at_next_commit(lake.lake, lambda: found.append(dead_letters.roll_forward(theirs, name, state)))
    assert [lake.roll(state), *found] == [{staged.wap_id}] * 2
    assert lake.dead("main") == D


def test_a_decision_is_recorded_though_dead_letters_have_its_id(lake: StreamLake) -> None:
    """The hazard: the job dies after an hour without dead letters, whose empty set has the
    decision's id; what recovers takes the decision for recorded."""
    rows = lake.stage([(FIRST, 0, 0)])
    letters = (waiting_batch(None, FIRST, 1, NOW, f"{rows.wap_id}-{FIRST}"),)
    rebuilt = plan.Rebuilt(FIRST, Accepted(1, CUT), rows, letters, ledger_row.HourAccount())
    lake.land(plan.plan_publish(lake.state(), [rebuilt], NOW))
    ids = {row.decision_id for row in lake.state().decisions}
    assert ids == {letters[0]["id"]}, "the hazard did not happen"
    lake.publisher.recover()
    assert [(row.hour, row.decision) for row in lake.ledger.history()] == [(FIRST, "accepted")]


def test_an_accepted_hours_dead_letters_replace_those_of_the_speed_layer(lake: StreamLake) -> None:
    lake.roll(speed_said(lake, lake.stage_dead(D, "speed")))
    lake.roll(batch_said(lake, lake.stage_dead([*D, (FIRST, 0, 9)], "batch"), 1))
    assert lake.dead("speed") == D
    assert lake.dead("main") == lake.dead("batch") == [*D, (FIRST, 0, 9)]


def test_an_accepted_hour_without_dead_letters_empties_it(lake: StreamLake) -> None:
    lake.roll(speed_said(lake, lake.stage_dead([*D, (SECOND, 0, 12)], "speed")))
    lake.roll(batch_said(lake, None, 1))
    assert lake.dead("main") == [(SECOND, 0, 12)]
    lake.roll()
    assert lake.dead("main") == [(SECOND, 0, 12)]


def test_a_revision_that_was_replaced_is_passed_over(lake: StreamLake) -> None:
    batch_said(lake, lake.stage_dead(D, "batch"), 1)
    state = batch_said(lake, lake.stage_dead(D[:1], "batch"), 2, NOW + timedelta(minutes=1))
    assert len(state.dead_letters) == 2
    assert len(lake.roll(state)) == 2
    assert lake.dead("main") == lake.dead("batch") == D[:1]


def test_late_letters_of_a_now_accepted_hour_go_to_speed(lake: StreamLake) -> None:
    """The hazard: a publisher by the state before the acceptance writes each offset twice."""
    stale = speed_said(lake, lake.stage_dead(D, "speed"))
    accepted = batch_said(lake, lake.stage_dead(D, "batch"), 1, NOW - timedelta(minutes=1))
    only_batch = [item for item in accepted.dead_letters if item["layer"] == "batch"]
    lake.roll(State(**(vars(accepted) | {"dead_letters": tuple(only_batch)})))
    assert lake.dead("main") == D
    lake.roll(stale)
    assert lake.dead("main") == lake.dead("speed") == D


def test_an_hour_given_to_speed_keeps_its_dead_letters(lake: StreamLake) -> None:
    lake.roll(speed_said(lake, lake.stage_dead(D, "speed")))
    lake.change(commits.Change("main", properties={OVERRIDES: json.dumps({FIRST: "speed"})}))
    lake.roll(batch_said(lake, lake.stage_dead(D[:1], "batch"), 1))
    assert lake.dead("main") == D
    assert lake.dead("batch") == D[:1]


# Batches that wait, however long, and batches that are gone all the same


@pytest.mark.parametrize("served", ["speed", "batch"])
def test_only_the_swap_of_the_layer_that_serves_the_hour_is_due(served: str) -> None:
    swaps = (
        dead_letters.waiting_served(FIRST, "speed", NOW),
        dead_letters.waiting_served(FIRST, "batch", NOW),
    )
    timeline = Timeline(FIRST, SECOND, {0: 10}, sealed={FIRST: CUT})
    state = new_state(timeline, dead_letters=swaps, overrides={FIRST: served})
    assert [dead_letters.is_due(state, swap) for swap in swaps] == [
        served == "speed",
        served == "batch",
    ]


def age(lake: StreamLake, name: str, by: timedelta) -> None:
    """Make a table's snapshots older, as the clock does by itself."""
    path = Path(lake.lake.load(name).metadata_location.removeprefix("file://"))
    metadata = json.loads(path.read_text())
    for snapshot in (*metadata["snapshots"], *metadata["snapshot-log"]):
        snapshot["timestamp-ms"] -= int(by.total_seconds() * 1000)
    metadata["last-updated-ms"] -= int(by.total_seconds() * 1000)
    path.write_text(json.dumps(metadata))


def named(lake: StreamLake, protected: bool = True) -> tuple[Staged, State]:
    """Dead letters that a publish of the speed layer names."""
    staged = lake.stage_dead(D, "speed", protected=protected)
    return staged, speed_said(lake, staged)


def forget_staged(lake: StreamLake, staged: Staged) -> None:
    """Delete the snapshot although a publish names it, which our code no longer does."""
    lake.lake.discard(lake.stream.dead_letters_table, staged)
    assert find_staged(lake.letters(), staged.wap_id) is None


def delete(*paths: str) -> None:
    for path in paths:
        Path(path.removeprefix("file://")).unlink()


@pytest.mark.parametrize("days", [0, 2, 400])
def test_two_sets_that_wait_outlive_any_pause(lake: StreamLake, days: int) -> None:
    """The hazard: the publish of the first expires what is staged for more than a day."""
    staged = [lake.stage_dead([row], "speed") for row in D]
    for one in staged:
        speed_said(lake, one)
    age(lake, lake.stream.dead_letters_table, timedelta(days=days))
    abandoned = lake.stage_dead(D, "speed")
    age(lake, lake.stream.dead_letters_table, timedelta(days=2))
    publisher = lake.publisher
    publisher.recover()
    assert publisher.confirmed.letters == {one.wap_id for one in staged}
    assert lake.dead("main") == lake.dead("speed") == D
    # Snapshots that no publish names are abandoned after a day, as before.
    assert find_staged(lake.letters(), abandoned.wap_id) is None


def test_no_process_discards_files_that_a_publish_names(lake: StreamLake) -> None:
    staged, state = named(lake)
    other = lake.stage_dead(D[:1], "speed")
    for one in (staged, other):
        discard(lake.lake, lake.stream, one)
    assert find_staged(lake.letters(), staged.wap_id) is not None
    assert find_staged(lake.letters(), other.wap_id) is None
    assert lake.roll(state) == {staged.wap_id}
    assert lake.dead("main") == D


def test_files_replace_a_missing_snapshot(lake: StreamLake) -> None:
    staged, state = named(lake)
    forget_staged(lake, staged)
    for again in (state, lake.state()):
        assert lake.roll(again) == {staged.wap_id}
    assert lake.dead("main") == lake.dead("speed") == D
    # The files are as they were staged, including the values by which readers skip files.
    table = lake.letters()
    files = manifests.files_of(table, "main", FIRST)
    same = ("record_count", "partition", "file_size_in_bytes", "lower_bounds", "upper_bounds")
    for file, before in zip(files, staged.files, strict=True):
        assert file.file_path == before.file_path.replace(".parquet", "-copy.parquet")
        assert [getattr(file, name) for name in same] == [getattr(before, name) for name in same]
    assert manifests.files_of(table, "main", SECOND) == ()


def test_another_programs_expiry_spares_dead_letters_that_wait(lake: StreamLake) -> None:
    name = lake.stream.dead_letters_table
    for offset in (10, 11):
        lake.roll(speed_said(lake, lake.stage_dead([(SECOND, 0, offset)], "speed")))
    staged, state = named(lake)
    deletes = expire_all(lake, name)
    assert deletes, "the hazard did not happen"
    assert find_staged(lake.lake.load(name), staged.wap_id) is not None
    delete(*deletes)
    assert lake.roll(state) >= {staged.wap_id}
    assert lake.dead("main") == lake.dead("speed") == [*D, (SECOND, 0, 10), (SECOND, 0, 11)]
    assert not [ref for ref in lake.lake.load(name).metadata.refs if ref.startswith(STAGED)]


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_files_about_to_be_deleted_are_published_as_copies(
    lake: StreamLake, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The hazard: an expiry deletes the files of what it expired, a while after its commit, and a
    publish between the two names them. The branch that protects what is staged was dropped."""
    (staged, state), real, name = named(lake, False), lake.lake.land, lake.stream.dead_letters_table
    deletes = expire_all(lake, name) if when == "before" else []

    def land(*given: Any) -> Any:
        deletes.extend(() if deletes else expire_all(lake, name))
        return real(*given)

    monkeypatch.setattr(lake.lake, "land", land)
    for _ in range(2):
        assert lake.roll(state) == {staged.wap_id}
    assert {f.file_path for f in staged.files} <= set(deletes), "the hazard did not happen"
    delete(*deletes)
    assert lake.roll() == {staged.wap_id}
    assert lake.dead("main") == lake.dead("speed") == D


@pytest.mark.parametrize("took", [staging.NAMED_WITHIN, -staging.NAMED_WITHIN])
def test_copies_of_unknown_age_are_made_again(
    lake: StreamLake, monkeypatch: pytest.MonkeyPatch, took: timedelta
) -> None:
    """The hazard: the process slept while it copied: orphan removal may have deleted it."""
    (staged, state), land, times = named(lake, False), lake.lake.land, list[datetime]()
    expire_all(lake, lake.stream.dead_letters_table)
    first, read = datetime.now(UTC), list[int]()

    def now(*_: int) -> datetime:
        times.append(first + (took * 1.1 if len(times) == 1 else timedelta()))
        return times[-1]

    def landed(*given: Any) -> Any:
        read.append(len(times))
        return land(*given)

    monkeypatch.setitem(lake.lake.__dict__, "clock", SimpleNamespace(now=now))
    monkeypatch.setattr(lake.lake, "land", landed)
    assert lake.roll(state) == {staged.wap_id}
    assert read == [4], "expected a second attempt, with an age that is known"
    assert lake.dead("main") == D


def test_files_replace_missing_manifests_too(lake: StreamLake) -> None:
    staged, state = named(lake)
    table = lake.letters()
    snapshot = staged_snapshot(table, staged.wap_id)
    assert snapshot is not None
    own = [m for m in snapshot.manifests(table.io) if m.added_snapshot_id == staged.snapshot_id]
    delete(*(m.manifest_path for m in own))
    assert lake.roll(state) == {staged.wap_id}
    assert lake.dead("main") == D


def test_published_files_need_a_record(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: a branch remembers so many ids, and a publish names a set for longer."""
    staged, state = named(lake)
    assert lake.roll(state) == {staged.wap_id}
    monkeypatch.setattr(dead_letters, "DONE", "anabranch.forgotten")
    assert find_staged(lake.letters(), staged.wap_id) is None
    assert lake.roll(state) == {staged.wap_id}
    assert lake.dead("main") == lake.dead("speed") == D
    # What waits is remembered as done while it waits.
    ids = [str(i) for i in range(300)]
    assert remembered_ids(ids, "new", frozenset()) == [*ids[101:], "new"]
    assert remembered_ids(ids, "new", frozenset({"7", "250"})) == ["7", *ids[101:], "new"]


def test_missing_files_block_none(lake: StreamLake, caplog: pytest.LogCaptureFixture) -> None:
    lost, _ = named(lake)
    kept = lake.stage_dead([(FIRST, 0, 9)], "speed")
    speed_said(lake, kept, NOW + timedelta(minutes=1))
    forget_staged(lake, lost)
    delete(*(f.file_path for f in lost.files))
    for _ in range(3):
        publisher = lake.publisher
        publisher.recover()
        assert publisher.confirmed.letters == {lost.wap_id, kept.wap_id}
    assert lake.dead("main") == lake.dead("speed") == [(FIRST, 0, 9)]
    [message] = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert f"dead letters {lost.wap_id}" in message
    assert "when it rebuilds their hours" in message
    # Follow the message.
    found = lake.stage_dead([*D, (FIRST, 0, 9)], "batch")
    lake.roll(batch_said(lake, found, 1, NOW + timedelta(minutes=2)))
    assert lake.dead("main") == [*D, (FIRST, 0, 9)]
    assert lost_hours(lake.lake, lake.stream, lake.state()) == {}


def test_an_hour_that_lacks_files(lake: StreamLake, caplog: pytest.LogCaptureFixture) -> None:
    lake.roll(speed_said(lake, lake.stage_dead(D, "speed")))
    staged = lake.stage_dead(D, "batch")
    batch_said(lake, staged, 1)
    forget_staged(lake, staged)
    delete(*(f.file_path for f in staged.files))
    for _ in range(2):
        lake.publisher.recover()
    assert lake.dead("main") == lake.dead("batch") == [], "one may be a row by now"
    [message] = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
    assert f"restates hour {FIRST} at its next run" in message
    assert lost_hours(lake.lake, lake.stream, lake.state()) == {FIRST: 1}
    job = Job(lake.environment, lake.stream, lake.lake, Broker().adapter)
    why = "the dead letters of revision 1 were lost"
    expected = {FIRST: rebuild.RebuildRequest(restate=True, accept=False, why=why)}
    assert stream_run.with_losses(job, lake.state(), {}) == expected
    # A lost file is another reason, of accepted hours alone.
    gone = {FIRST: "file f is gone", SECOND: "file g is gone"}
    lost = stream_run.with_losses(job, lake.state(), gone)
    assert {hour: order.why for hour, order in lost.items()} == {FIRST: "file f is gone"}
    lake.ledger.record([ledger.decision(FIRST, "refused", 2, CUT, NOW, reason="no")])
    assert stream_run.with_losses(job, lake.state(), {}) == {}, "tried once"
    lake.roll(batch_said(lake, lake.stage_dead(D, "batch"), 2, NOW + timedelta(minutes=1)))
    assert lost_hours(lake.lake, lake.stream, lake.state()) == {}
    assert lake.dead("main") == lake.dead("batch") == D


def test_for_hours_without_records_the_table_of_dead_letters_is_not_loaded(tmp_path: Path) -> None:
    empty = Timeline(FIRST, SECOND, {0: 10}, sealed={FIRST: Cut("t", {0: (10, 10)})})
    lake = new_lake(tmp_path, timeline=empty)
    publish = plan.plan_acceptance_of_empty(lake.state(), [FIRST], "empty", NOW)
    assert publish is not None and lake.publish(publish) is commits.Outcome.LANDED
    lake.lake.catalog.drop_table(lake.stream.dead_letters_table)
    assert lost_hours(lake.lake, lake.stream, lake.state()) == {}
    lake.publisher.finish(lake.state())


def test_the_remaining_files_of_an_hour_are_published(lake: StreamLake) -> None:
    one, two = lake.stage_dead(D[:1], "batch"), lake.stage_dead(D[1:], "batch")
    state = batch_said(lake, Staged("both", 0, None, (*one.files, *two.files)), 1)
    delete(two.files[0].file_path)
    assert lake.roll(state) == {"both"}
    assert lake.dead("main") == lake.dead("batch") == D[:1]
    assert lost_hours(lake.lake, lake.stream, lake.state()) == {FIRST: 1}
