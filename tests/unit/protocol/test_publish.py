"""The publish protocol on a real lake: landed, refused, unknown, and what each leaves behind."""

import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlparse

import pytest
from lakes import FIRST, StreamLake, at_next_commit, lose_answer, waiting
from pyiceberg.table.refs import SnapshotRefType

from anabranch.common.errors import Terminal, Transient
from anabranch.iceberg import admin, expiry, manifests, snapshots
from anabranch.iceberg.commits import Change, Commit, Outcome, Tag
from anabranch.iceberg.snapshots import STAGING, Staged
from anabranch.offsets.hours import Cut
from anabranch.protocol import ledger, publish_queue
from anabranch.protocol import publish as publish_module
from anabranch.protocol.publish import Again, Decision, Publish, new_id, run, to_commit
from anabranch.protocol.state import (
    DECISIONS,
    POSITION,
    TURN,
    Accepted,
    Confirmed,
    State,
    load_state,
)

ROWS = [(FIRST, 0, o) for o in range(3)]
MORE = [(FIRST, 0, o) for o in range(3, 5)]
BRANCHES = ("main", "speed", "batch")
NOW = datetime.now(UTC)


def commit_of(state: State, branch: str, at: datetime = NOW, expire: Iterable[int] = ()) -> Commit:
    """A publish without rows, that expires snapshots."""
    commit = to_commit(state, Publish(new_id(), (Change(branch),), state.timeline), at)
    return replace(commit, expire=(*commit.expire, *expire))


def log_of(lake: StreamLake) -> tuple[dict[str, int], set[int]]:
    table = lake.table()
    return snapshots.heads(table), {s.snapshot_id for s in table.snapshots()}


def test_rows_and_position_become_visible_in_one_commit_on_two_branches(lake: StreamLake) -> None:
    before = lake.table().metadata_location
    staged = lake.stage(ROWS)
    assert staged.parent_id == lake.state().heads["main"]
    assert [lake.rows(b) for b in BRANCHES] == [[], [], []]
    staged_at = lake.table().metadata_location
    lake.land(lake.speed(staged, {0: 3}))
    assert (lake.rows("speed"), lake.rows("main"), lake.rows("batch")) == (ROWS, ROWS, [])
    assert lake.state().position.offsets == {0: 3}
    log = [entry.metadata_file for entry in lake.table().metadata.metadata_log]
    assert log[-2:] == [before, staged_at], "expected one commit to stage and one to publish"


@pytest.mark.parametrize("moved", BRANCHES)
def test_a_moved_head_of_any_branch_refuses_it_all(lake: StreamLake, moved: str) -> None:
    staged = lake.stage(ROWS)
    state = lake.state()
    publish = lake.speed(staged, {0: 3}, state)
    lake.move(moved)
    files, before = lake.metadata_files(), log_of(lake)
    assert lake.publish(publish, state) is Outcome.REFUSED
    assert log_of(lake) == before
    assert lake.metadata_files() == files, "a refused publish leaves its manifests behind"
    assert lake.rows("main") == []
    assert lake.publish(lake.speed(staged, {0: 3})) is Outcome.LANDED, "decided again, it lands"
    assert lake.rows("main") == ROWS


@pytest.mark.parametrize("moved", BRANCHES)
def test_a_head_set_back_refuses_though_no_snapshot_is_new(lake: StreamLake, moved: str) -> None:
    """The hazard: a rollback adds no snapshot, so only the heads that a commit requires show it."""
    staged, before = lake.stage(ROWS), lake.state().heads[moved]
    lake.move(moved)
    state = lake.state()
    publish = lake.speed(staged, {0: 3}, state)
    lake.set_back(moved, before)
    assert lake.state().heads[moved] == before, "the hazard did not happen"
    assert lake.publish(publish, state) is Outcome.REFUSED
    assert [lake.rows(b) for b in BRANCHES] == [[], [], []]


def test_a_refused_swap_that_replaces_files_leaves_nothing(lake: StreamLake) -> None:
    lake.serve(ROWS, {0: 3})
    staged, accepted, state = lake.stage(ROWS), Accepted(1, Cut("t", {0: (0, 3)})), lake.state()
    publish = lake.accept(staged, FIRST, accepted, state)
    lake.move("speed")
    files = lake.metadata_files()
    assert lake.publish(publish, state) is Outcome.REFUSED
    assert lake.metadata_files() == files
    lake.land(lake.accept(staged, FIRST, accepted))
    assert [lake.rows(b) for b in BRANCHES] == [ROWS] * 3
    (main,) = manifests.files_of(lake.table(), "main", FIRST)
    assert main.file_path == staged.files[0].file_path


def test_two_publishers_of_the_same_range_never_both_land(lake: StreamLake) -> None:
    """The hazard: a client's own retry replays a stale decision, and the rows are there twice."""
    first, second = lake.stage(ROWS), lake.stage(ROWS)
    other, state = lake.again(), lake.state()
    theirs = load_state(other, lake.name)
    lake.land(lake.speed(first, {0: 3}, state), state)
    assert lake.publish(lake.speed(second, {0: 3}, theirs), theirs, other) is Outcome.REFUSED
    assert lake.rows("main") == ROWS


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_answer_lost_is_looked_up_in_the_table(lake: StreamLake, when: str) -> None:
    staged = lake.stage(ROWS)
    publish, landed = lake.speed(staged, {0: 3}), when == "after"
    at_next_commit(lake.lake, **{when: lose_answer})
    assert lake.publish(publish) is (Outcome.LANDED if landed else Outcome.REFUSED)
    assert lake.rows("main") == (ROWS if landed else [])
    if not landed:
        why = "its manifests are still there"
        assert lake.publish(lake.speed(staged, {0: 3})) is Outcome.LANDED, why
    assert lake.rows("speed") == ROWS


def test_a_publish_with_a_lost_answer_is_found_behind_newer_publishes(lake: StreamLake) -> None:
    publish, state = lake.speed(lake.stage(ROWS), {0: 3}), lake.state()

    def overtaken() -> None:
        lake.move("speed")
        raise TimeoutError("read timed out")

    at_next_commit(lake.lake, after=overtaken)
    lake.land(publish, state)


def test_every_publish_keeps_the_state_of_a_branch(lake: StreamLake) -> None:
    lake.change(Change("main", properties={"anabranch.a": "1"}))
    lake.serve(ROWS, {0: 3})
    lake.move("batch")
    lake.move("speed")
    properties = lake.state().branch_properties
    assert properties["main"]["anabranch.a"] == "1"
    assert "anabranch.a" not in properties["speed"] | properties["batch"]
    assert lake.state().position.offsets == {0: 3}


def test_a_head_that_is_no_publish_is_skipped(lake: StreamLake) -> None:
    """The hazard: `rewrite_manifests` and other engines leave heads without our properties."""
    lake.serve(ROWS, {0: 3})
    for branch in ("speed", "main", "speed"):
        lake.foreign_commit(branch)
    head = snapshots.head(lake.table(), "speed")
    assert head.summary is not None
    assert head.summary.get(POSITION) is None, "the hazard did not happen"
    assert lake.state().position.offsets == {0: 3}
    assert lake.state().is_merged
    lake.serve(MORE, {0: 5})
    assert lake.state().position.offsets == {0: 5}


def test_a_dropped_speed_branch_begins_where_its_rows_end(lake: StreamLake) -> None:
    """The hazard: made again from `main` at the first position, it publishes every row twice."""
    lake.serve(ROWS, {0: 3})
    lake.move("main")
    lake.table().manage_snapshots().remove_branch("speed").commit()
    found = r"table games.events: expected branch speed, found none; run `anabranch apply`"
    with pytest.raises(Terminal, match=found):
        lake.state()
    assert admin.add_branches(lake.lake, lake.name, {}) == ["speed"]
    assert lake.rows("speed") == ROWS
    assert lake.state().position.offsets == {0: 3}


# Expiry


def test_a_publish_expires_published_snapshots_and_retains_waiting_ones(lake: StreamLake) -> None:
    mine, waits = lake.stage(ROWS), lake.stage(MORE)
    lake.land(lake.speed(mine, {0: 3}))
    table = lake.table()
    why = "its rows are published: it has done its work"
    assert table.metadata.snapshot_by_id(mine.snapshot_id) is None, why
    assert snapshots.find_staged(table, waits.wap_id) == waits
    assert waits.parent_id is not None
    assert table.metadata.snapshot_by_id(waits.parent_id) is not None


def test_the_newest_snapshots_stay_beside_heads_tags_and_parents(lake: StreamLake) -> None:
    waits = lake.stage(MORE)
    assert waits.parent_id is not None
    for branch in BRANCHES:
        lake.move(branch)
    tag = Tag("kept", lake.state().heads["speed"], 3_600_000)
    lake.change(Change("speed"), tags=(tag,))
    for _ in range(4):
        lake.move("speed")
    table = lake.table()
    line = [s.snapshot_id for s in table.snapshots() if s.snapshot_id != waits.snapshot_id]
    kept = {*line[-2:], tag.snapshot_id, waits.parent_id, *snapshots.heads(table).values()}
    assert len(kept) == 6
    removed = expiry.plan_expiry(table, None, NOW, keep=2)
    assert set(removed) == set(line) - kept
    assert len(removed) == 3


def test_the_way_back_to_the_last_publish_survives_expiry(lake: StreamLake) -> None:
    """The hazard: a snapshot between a foreign head and the last publish goes, with its state."""
    lake.serve(ROWS, {0: 3})
    lake.foreign_commit("main")
    lake.foreign_commit("main")
    state = lake.state()
    properties = state.branch_properties["main"]
    assert properties
    commit = commit_of(state, "speed")
    commit = replace(commit, expire=expiry.plan_expiry(state.table, commit.id, NOW, keep=1))
    assert lake.lake.commit(state.table, commit) is Outcome.LANDED
    assert lake.state().branch_properties["main"] == properties


def test_about_a_hundred_snapshots_stay(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert expiry.plan_expiry.__defaults__ == (100,)
    monkeypatch.setattr(expiry.plan_expiry, "__defaults__", (10,))
    for _ in range(15):
        lake.move("speed")
    assert 10 <= len(lake.table().snapshots()) <= 12


def test_staged_rows_of_a_day_ago_are_given_up(lake: StreamLake) -> None:
    staged = lake.stage(ROWS).snapshot_id
    for hours in (23, 25):
        given_up = expiry.plan_expiry(lake.table(), None, NOW + timedelta(hours=hours))
        assert (staged in given_up) == (hours == 25)


def test_a_publisher_paused_across_anothers_expiry_is_refused(lake: StreamLake) -> None:
    """The hazard: its staged files are gone, yet the heads that it watches look as before."""
    paused = lake.stage(ROWS)
    state = lake.state()
    publish = lake.speed(paused, {0: 3}, state)
    theirs = load_state(lake.again(), lake.name)
    commit = commit_of(theirs, "batch", expire=[paused.snapshot_id])
    assert lake.lake.commit(theirs.table, commit) is Outcome.LANDED
    assert snapshots.find_staged(lake.table(), paused.wap_id) is None, "the hazard did not happen"
    assert lake.publish(publish, state) is Outcome.REFUSED
    assert lake.rows("main") == []


def test_expiring_a_snapshot_that_was_discarded_meanwhile_is_refused(lake: StreamLake) -> None:
    abandoned, mine = lake.stage(MORE), lake.stage(ROWS)
    state = lake.state()
    commit = to_commit(state, lake.speed(mine, {0: 3}, state), NOW)
    commit = replace(commit, expire=(*commit.expire, abandoned.snapshot_id))
    lake.lake.discard(lake.name, abandoned)
    assert lake.lake.commit(state.table, commit) is Outcome.REFUSED
    lake.land(lake.speed(mine, {0: 3}))
    assert lake.rows("main") == ROWS


def test_a_discarded_attempt_is_gone_and_moves_no_head(lake: StreamLake) -> None:
    staged = lake.stage(ROWS)
    with lake.unmoved():
        lake.lake.discard(lake.name, staged)
        assert snapshots.find_staged(lake.table(), staged.wap_id) is None
        lake.lake.discard(lake.name, staged)
    # Two staged snapshots with one id are refused.
    lake.stage(ROWS, "same")
    with pytest.raises(Terminal, match="expected one staged snapshot same, found 2"):
        lake.stage(ROWS, "same")


def test_metadata_files_that_fell_out_of_the_log_are_deleted(lake: StreamLake) -> None:
    """The hazard: each publish leaves a whole metadata file behind."""
    for _ in range(25):
        lake.move("speed")
    table = lake.table()
    log = {entry.metadata_file.rpartition("/")[2] for entry in table.metadata.metadata_log}
    assert len(log) == 20, "the hazard did not happen"
    folder = Path(urlparse(table.location()).path) / "metadata"
    names = {p.name for p in folder.glob("*.metadata.json")}
    assert names == log | {table.metadata_location.rpartition("/")[2]}


# Tags


def test_a_tag_keeps_its_snapshot_readable_and_ends_with_its_age(lake: StreamLake) -> None:
    lake.serve(ROWS, {0: 3})
    lake.change(Change("speed"), tags=(Tag("main-then", lake.state().heads["main"], 60_000),))
    lake.serve(MORE, {0: 5})
    ref = lake.table().metadata.refs["main-then"]
    assert ref.snapshot_ref_type == SnapshotRefType.TAG
    assert lake.table().scan(snapshot_id=ref.snapshot_id).to_arrow().num_rows == 3
    state = lake.state()
    assert expiry.expired_tags(state.table, NOW) == ()
    commit = commit_of(state, "speed", (datetime.now(UTC) + timedelta(seconds=61)))
    assert commit.drop_tags == ("main-then",)
    assert lake.lake.commit(state.table, commit) is Outcome.LANDED
    tags = {snapshots.PUBLISHED + branch for branch in BRANCHES}
    assert set(lake.table().metadata.refs) == {*BRANCHES, STAGING, snapshots.PROVEN, *tags}


# What a decision may and must say


def test_a_publish_that_changes_a_layers_rows_must_state_the_new_main(lake: StreamLake) -> None:
    with pytest.raises(ValueError, match="has to contain main's changes"):
        lake.change(Change("speed", lake.stage(ROWS).files))
    # And `main` records its sources.
    assert lake.state().is_merged
    staged = lake.stage(ROWS)
    lake.land(lake.speed(staged, {0: 3}))
    state = lake.state()
    assert state.is_merged
    assert state.content == {"speed": staged.wap_id, "batch": ""}
    lake.move("speed")
    assert lake.state().is_merged, "a publish without rows leaves nothing to merge"
    assert not replace(state, content={"speed": "other", "batch": ""}).is_merged


def test_decisions_wait_on_the_branch_until_they_are_confirmed(lake: StreamLake) -> None:
    for i in ("a", "b"):
        row = ledger.decision(FIRST, "sealed", 0, None, NOW, i)
        lake.change(Change("speed"), decisions=(row,))
    assert waiting(lake.state(), "speed", DECISIONS) == ["a", "b"]
    lake.move("speed")
    assert [row.decision_id for row in lake.state().decisions] == ["a", "b"]
    lake.change(Change("speed"), confirmed=Confirmed(frozenset({"a"})))
    assert [row.decision_id for row in lake.state().decisions] == ["b"]


# run, and turns


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish_module.random, "uniform", lambda low, high: 0.0)


def test_run_decides_again_after_a_decision_that_did_something_first(lake: StreamLake) -> None:
    staged: list[Staged] = []

    def decide() -> Decision[None] | Again:
        if not staged:
            staged.append(lake.stage(ROWS))
            return Again.AGAIN
        return Decision(lake.state(), lake.speed(staged[0], {0: 3}), None)

    assert run(lake.lake, lake.name, decide, "test").landed is not None
    assert lake.rows("main") == ROWS
    # It ends when nothing is left to do.
    before = log_of(lake)
    found = run(lake.lake, lake.name, lambda: Decision(lake.state(), None, None), "test").landed
    assert found is None
    assert log_of(lake) == before


def test_run_without_turns_has_no_end(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    staged, left = lake.stage(ROWS), list(range(publish_queue.REFUSALS + 1))

    def decide() -> Decision[None]:
        state = lake.state()
        if left:
            left.pop()
            lake.move("speed")
        return Decision(state, lake.speed(staged, {0: 3}, state), None)

    # The module's own name, not time.sleep: threads of other tests may sleep.
    own = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: pytest.fail("it paused"))
    monkeypatch.setattr(publish_module, "time", own)
    assert run(lake.lake, lake.name, decide, "test", timeout=timedelta(0)).landed is not None
    assert lake.rows("main") == ROWS
    assert not [key for key in lake.table().properties if key.startswith(TURN)]


@pytest.mark.usefixtures("no_pause")
def test_run_with_turns_ends_in_time_whatever_its_decisions_do_first(lake: StreamLake) -> None:
    with pytest.raises(Transient, match="expected a publish within 0:00:01, found 0 refusals"):
        within: Any = {"take_turns": True, "timeout": timedelta(seconds=1)}
        run(lake.lake, lake.name, lambda: Again.AGAIN, "test", **within)


@pytest.mark.usefixtures("no_pause")
def test_run_with_turns_pauses_as_before(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause that doubles with each refusal is no number from the 1,030th on."""
    staged, refusals, land = lake.stage(ROWS), iter(range(1100)), publish_module.land

    def refuse_first(*arguments: Any) -> Any:
        return None if next(refusals, None) is not None else land(*arguments)

    monkeypatch.setattr(publish_module, "land", refuse_first)
    state = lake.state()
    decision = Decision(state, lake.speed(staged, {0: 3}, state), None)
    published = run(lake.lake, lake.name, lambda: decision, "test", take_turns=True)
    assert published.landed is not None and next(refusals, None) is None
    assert lake.rows("main") == ROWS
