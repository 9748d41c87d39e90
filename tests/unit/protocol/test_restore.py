"""Lost and recreated state: a branch begins at `main`, hours stay accepted, the ledger returns."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker
from lakes import FIRST, StreamLake, new_environment, new_lake, new_state

from anabranch.common import json_values
from anabranch.common.errors import FileGone, Terminal
from anabranch.iceberg.commits import Change, Commit, Outcome
from anabranch.iceberg.files import delete_files, find_lost_files
from anabranch.iceberg.prepare import plan_fence
from anabranch.iceberg.snapshots import BRANCHES, CONTENT, MERGED, head
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol import apply as tables
from anabranch.protocol import ledger
from anabranch.protocol.apply import WHY, plan_rows, restore_ledger
from anabranch.protocol.merge import merge
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import (
    ACCEPTED,
    OVERRIDES,
    REMEMBERED_HOURS,
    SETTLED,
    Accepted,
    State,
    accepted_properties,
    read_accepted,
)
from batch_layer import plan

H = [shift(FIRST, i) for i in range(4)]
CUTS = [Cut("t", {0: (3 * i, 3 * i + 3)}) for i in range(4)]
# The speed layer has one row more of each hour: what the batch layer leaves out as a duplicate.
SPEED = {i: [(H[i], 0, 3 * i + o) for o in range(3)] for i in range(3)}
BATCH = {i: SPEED[i][:2] for i in range(3)}
NOW = datetime.now(UTC)
BATCH_ONLY = Change("batch")


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """Hours 0 and 1 accepted, 2 sealed, 3 open; all published by the speed layer."""
    sealed = {H[i]: CUTS[i] for i in range(3)}
    made = new_lake(tmp_path, timeline=Timeline(FIRST, H[3], {0: 9}, sealed=sealed))
    made.serve([r for rows in SPEED.values() for r in rows], {0: 9})
    for i in (0, 1):
        accept(made, i)
    return made


def accept(lake: StreamLake, i: int, revision: int = 1) -> None:
    timeline = lake.state().timeline
    rest = replace(timeline, sealed={h: c for h, c in timeline.sealed.items() if h != H[i]})
    lake.land(lake.accept(lake.stage(BATCH[i]), H[i], Accepted(revision, CUTS[i]), timeline=rest))


def said(state: State) -> tuple[Any, ...]:
    return state.timeline, state.accepted, state.overrides


def drop(lake: StreamLake, branch: str) -> None:
    lake.table().manage_snapshots().remove_branch(branch).commit()


def apply(lake: StreamLake) -> list[str]:
    return tables.apply(new_environment(lake.folder), lake.stream, lake.lake, Broker().adapter)


def seal_empty(lake: StreamLake) -> Timeline:
    """Seal hour 3 without records, and accept it; the timeline before it is accepted."""
    before = lake.state().timeline
    sealed = before.sealed | {H[3]: Cut("t", {0: (9, 9)})}
    timeline = replace(before, open=shift(H[3], 1), start={0: 9}, sealed=sealed)
    lake.change(Change("main"), timeline=timeline)
    publish = plan.plan_acceptance_of_empty(lake.state(), [H[3]], "empty", NOW)
    assert publish is not None and lake.publish(publish) is Outcome.LANDED
    return timeline


def give_to_speed(lake: StreamLake, i: int) -> None:
    """An override, and the swap that goes with it."""
    lake.change(Change("main", properties={OVERRIDES: json.dumps({H[i]: "speed"})}))
    merge(lake.lake, lake.stream, everything=True)


MAIN = [*BATCH[0], *BATCH[1], *SPEED[2]]


# A branch


def test_hours_accepted_stay_accepted_when_the_batch_branch_is_dropped(lake: StreamLake) -> None:
    """The hazard: without them the hours are the speed layer's, their rows in `main` too."""
    before = lake.state()
    assert lake.rows("main") == MAIN
    drop(lake, "batch")
    assert "created branch batch of games.events" in apply(lake)
    assert said(lake.state()) == said(before)
    assert lake.state().settled_before == before.settled_before
    assert merge(lake.lake, lake.stream, everything=True).swaps == []
    assert lake.rows("main") == MAIN
    assert lake.state().is_merged
    accept(lake, 2)
    assert lake.state().accepted == before.accepted | {H[2]: Accepted(1, CUTS[2])}
    assert lake.rows("main") == [*BATCH[0], *BATCH[1], *BATCH[2]]
    assert lake.rows("batch") == lake.rows("main")


def test_proven_has_accepted_hours_alone_whatever_batch_was_made_from(lake: StreamLake) -> None:
    """The hazard: a branch made from `main` has rows of the speed layer; `proven` moves later."""
    assert lake.rows("proven") == [*BATCH[0], *BATCH[1]]
    give_to_speed(lake, 1)
    assert lake.rows("proven") == [*BATCH[0], *BATCH[1]], "accepted, whichever layer main has"
    drop(lake, "batch")
    apply(lake)
    assert lake.rows("batch") == [*BATCH[0], *SPEED[1], *SPEED[2]], "the hazard did not happen"
    merge(lake.lake, lake.stream, everything=True)
    # An empty commit, as after a lost answer.
    state = lake.state()
    fence = replace(plan_fence(state.table, Commit("lost", state.heads, ())), changes=(BATCH_ONLY,))
    assert lake.lake.commit(state.table, fence) is Outcome.LANDED
    assert lake.rows("proven") == [*BATCH[0], *BATCH[1]]
    accept(lake, 2)
    assert lake.rows("proven") == lake.rows("batch") == [*BATCH[0], *BATCH[2]]
    accept(lake, 1)
    assert lake.rows("proven") == lake.rows("main") == [*BATCH[0], *BATCH[1], *BATCH[2]]
    # Once dropped, it is made by the next acceptance.
    drop(lake, "proven")
    accept(lake, 2, revision=2)
    assert lake.rows("proven") == lake.rows("main")


def test_a_main_that_was_dropped_is_set_to_its_newest_publish(lake: StreamLake) -> None:
    """The hazard: begun as an empty branch, it has the newest timeline, which begins now."""
    before = lake.state()
    for load in (lake.table, lake.letters):
        load().manage_snapshots().remove_branch("main").commit()
        assert load().current_snapshot() is None
    drop(lake, "batch")
    assert apply(lake)[:2] == [f"created branch {b} of games.events" for b in ("main", "batch")]
    state = lake.state()
    assert (said(state), state.position) == (said(before), before.position)
    assert state.heads["main"] == before.heads["main"] and lake.rows("main") == MAIN
    accept(lake, 2)
    assert lake.rows("main") == [*BATCH[0], *BATCH[1], *BATCH[2]]


@pytest.mark.parametrize("branch", BRANCHES)
def test_a_branch_without_its_manifest_is_made_again(lake: StreamLake, branch: str) -> None:
    table = lake.table()
    paths = {b: [m.manifest_path for m in head(table, b).manifests(table.io)] for b in BRANCHES}
    gone = paths[branch][0]
    delete_files(table.io, [gone])
    with pytest.raises(FileGone, match=f"the manifests of .*{branch}.*, found none of {gone};"):
        find_lost_files(lake.table())
    named = [b for b in BRANCHES if gone in paths[b]]
    if "main" in named:
        lake.set_back("main", head(table, "speed").snapshot_id)
    for other in {*named} - {"main"}:
        drop(lake, other)
    apply(lake)
    merge(lake.lake, lake.stream, everything=True)
    assert find_lost_files(lake.table()) == []
    # The run-book's last step: hours that have the speed layer's rows are restated.
    for i in (0, 1) if "main" in named else ():
        accept(lake, i, 2)
    assert lake.rows("main") == MAIN


def test_a_dropped_main_without_its_tag_is_not_created_empty(lake: StreamLake) -> None:
    drop(lake, "main")
    lake.table().manage_snapshots().remove_tag("published-main").commit()
    with pytest.raises(Terminal, match="expected branch main or tag published-main, found neither"):
        apply(lake)
    assert "main" not in lake.table().metadata.refs


def test_a_dropped_staging_branch_is_named_and_created_again(lake: StreamLake) -> None:
    """It never moves, so it is the first branch that exceeds a maximum age of refs."""
    files = lake.stage(BATCH[2]).files
    assert tables.is_created(lake.lake, lake.stream)
    drop(lake, "staging")
    found = "expected branch staging, found none; run `anabranch apply`"
    with pytest.raises(Terminal, match=found):
        lake.lake.stage(lake.name, new_id(), files)
    assert not tables.is_created(lake.lake, lake.stream)
    assert apply(lake)[0] == "created branch staging of games.events"
    assert lake.lake.stage(lake.name, new_id(), files).rows == len(BATCH[2])


def test_an_hour_given_to_speed_is_not_on_a_new_batch_branch(lake: StreamLake) -> None:
    """The hazard: `main` holds the speed layer's rows, so the new branch does; no proof."""
    give_to_speed(lake, 1)
    served = [*BATCH[0], *SPEED[1], *SPEED[2]]
    assert lake.rows("main") == served
    drop(lake, "batch")
    apply(lake)
    assert lake.rows("batch") == served, "the hazard did not happen"
    for _ in range(2):
        state = lake.state()
        assert set(state.accepted) == {H[0]}
        assert not state.is_accepted(H[1])
        assert state.timeline.sealed == {H[1]: CUTS[1], H[2]: CUTS[2]}, "it waits for a rebuild"
        # The lifted override gives it to no other layer; and a publish in between loses no state.
        lake.change(Change("main", properties={OVERRIDES: "{}"}), timeline=state.timeline)
        merge(lake.lake, lake.stream, everything=True)
        assert lake.rows("main") == served
    accept(lake, 1)
    assert lake.state().is_accepted(H[1])
    assert lake.rows("main") == [*BATCH[0], *BATCH[1], *SPEED[2]]


def test_a_batch_branch_that_was_set_back_rebuilds_what_it_lost(lake: StreamLake) -> None:
    before = lake.state().heads["batch"]
    accept(lake, 2)
    lake.set_back("batch", before)
    state = lake.state()
    assert set(state.accepted) == {H[0], H[1]}
    assert state.timeline.sealed == {H[2]: CUTS[2]}


def test_a_main_set_back_loses_rows_for_a_time_and_no_decision(lake: StreamLake) -> None:
    accept(lake, 2)
    back = lake.state().heads["main"]
    give_to_speed(lake, 1)
    seal_empty(lake)
    before, rows = lake.state(), lake.rows("main")
    lake.table().manage_snapshots().rollback_to_snapshot(back).commit()
    assert lake.rows("main") != rows
    state = lake.state()
    assert said(state) == said(before)
    assert [row.hour for row in state.decisions] == [H[3]], "it waits for the ledger"
    # A publish in between, or an empty one as a fence, loses no decision and merges nothing.
    fence = plan_fence(lake.table(), Commit("lost", state.heads, (Change("main"),)))
    assert lake.lake.land(lake.table(), fence) is not None
    assert lake.state().timeline == before.timeline
    lake.change(Change("speed"), Change("main"), timeline=state.timeline)
    assert not lake.state().is_merged
    merge(lake.lake, lake.stream)
    assert lake.rows("main") == rows
    assert said(lake.state()) == said(before)
    assert lake.state().is_merged


def test_an_accepted_hour_that_an_old_version_seals_is_accepted(lake: StreamLake) -> None:
    # It writes the hour as one that waits.
    lake.change(Change("speed"), timeline=seal_empty(lake))
    assert lake.state().timeline.sealed == {H[2]: CUTS[2]}
    assert lake.state().is_accepted(H[3])


def test_a_batch_branch_dropped_before_all_has_accepted_nothing(tmp_path: Path) -> None:
    lake = new_lake(tmp_path)
    lake.serve([(FIRST, 0, 0)], {0: 1})
    drop(lake, "batch")
    apply(lake)
    assert lake.state().accepted == {}
    assert lake.state().timeline.sealed == {}


def branch_properties(accepted: dict[str, int], **values: Any) -> dict[str, str]:
    hours = {h: json_values.to_json(Accepted(r, CUTS[H.index(h)])) for h, r in accepted.items()}
    return {ACCEPTED: json.dumps(hours)} | values


def read(batch: dict[str, str], main: dict[str, str]) -> tuple[dict[str, Accepted], set[str]]:
    accepted, waiting = read_accepted({"speed": {}, "batch": batch, "main": main})
    return accepted, set(waiting)


def test_the_batch_branch_counts_and_its_forgotten_hours_are_not_lost() -> None:
    main = branch_properties({H[0]: 1, H[1]: 1, H[2]: 1})
    batch = branch_properties({H[2]: 2}, **{SETTLED: H[2], CONTENT: "c"})
    assert read(batch, main) == ({H[2]: Accepted(2, CUTS[2])}, set())
    older = branch_properties({H[0]: 1}, **{SETTLED: H[0], CONTENT: "c"})
    assert read(older, main) == ({H[0]: Accepted(1, CUTS[0])}, {H[1], H[2]})
    # An override does not apply to a branch recreated before it.
    both = branch_properties({H[0]: 1}, **{MERGED: "{}"})
    main = both | {OVERRIDES: json.dumps({H[0]: "speed"})}
    assert read(both, main) == ({H[0]: Accepted(1, CUTS[0])}, set())


def test_an_hour_given_to_the_speed_layer_is_never_forgotten() -> None:
    hours = [shift(FIRST, i) for i in range(REMEMBERED_HOURS + 3)]
    timeline = Timeline(FIRST, shift(hours[-1], 1), {0: 1})
    accepted = {h: Accepted(1, Cut("t", {0: (0, 1)})) for h in hours}
    state = new_state(timeline, {0: 1}, accepted=accepted, overrides={hours[1]: "speed"})
    kept = json.loads(accepted_properties(state, {})[ACCEPTED])
    assert hours[1] in kept
    assert sorted(set(hours) - set(kept)) == [hours[0], hours[2]]
    assert accepted_properties(state, {})[SETTLED] == hours[3]


# The ledger


def test_a_dropped_ledger_is_written_again_from_the_branches(lake: StreamLake) -> None:
    lake.lake.catalog.drop_table(lake.stream.hours_table)
    name = lake.stream.hours_table
    assert apply(lake) == [
        f"created table {name}",
        f"restored 3 rows of {name} from the state on the branches: it had none of these hours",
    ]
    rows = lake.ledger.history()
    assert [(r.hour, r.decision, r.revision, r.served, r.good, r.dead) for r in rows] == [
        (H[0], "accepted", 1, "batch", 2, 0), (H[1], "accepted", 1, "batch", 2, 0),
        (H[2], "sealed", 0, "speed", None, None),
    ]  # fmt: skip
    assert [r.cut for r in rows] == CUTS[:3]
    assert {r.reason for r in rows} == {WHY}
    assert len(lake.ledger.history()) == 3


def test_a_waiting_decision_has_more_detail_than_a_restored_one(lake: StreamLake) -> None:
    row = ledger.decision(H[2], "refused", 1, CUTS[2], NOW, reason="the gate")
    lake.change(Change("speed"), decisions=(row,))
    assert restore_ledger(lake.lake, lake.stream) == 2
    assert ledger.newest(lake.ledger.history())[H[2]].reason == "the gate"


def test_two_processes_that_restore_at_once_write_each_row_once(lake: StreamLake) -> None:
    state, other = lake.state(), lake.again()
    first, second = (plan_rows(state, (), {}, {}, NOW) for _ in range(2))
    lake.ledger.record(first)
    ledger.Ledger(other, lake.stream.hours_table).record(second)
    assert len(lake.ledger.history()) == 3


def test_a_forgotten_hour_is_restored_as_accepted_without_its_cut() -> None:
    accepted = {H[1]: Accepted(4, CUTS[1])}
    state = new_state(Timeline(H[0], H[2], {0: 6}), {0: 6}, accepted=accepted, settled_before=H[1])
    rows = plan_rows(state, (), {H[0]: 7}, {}, NOW)
    assert [(r.hour, r.decision, r.revision, r.good, r.cut) for r in rows] == [
        (H[0], "accepted", 1, 7, None), (H[1], "accepted", 4, 0, CUTS[1]),
    ]  # fmt: skip
