"""The merger: `main` becomes what the layers say by swaps, and never loses an hour's rows."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from lakes import FIRST, StreamLake, new_lake, new_state

from anabranch.iceberg import commits, snapshots
from anabranch.iceberg.manifests import files_by_hour
from anabranch.offsets.hours import Adoption, Cut, Timeline, shift
from anabranch.protocol import ledger_row, sealing
from anabranch.protocol.merge import (
    Swap,
    merge,
    needs_merge,
    plan_merge,
    uncovered_reason,
    unread_ranges,
)
from anabranch.protocol.publish import Publish, to_commit
from anabranch.protocol.state import OVERRIDES, Accepted, State
from serving_layer.layer_diff import to_difference
from speed_layer.plan import Next, StagedBatch, plan_micro_batch, plan_publish

NOW = datetime(2026, 11, 21, 1, 30, tzinfo=UTC)
H0, H1, H2 = FIRST, shift(FIRST, 1), shift(FIRST, 2)
CUT0, CUT1 = Cut("t", {0: (0, 3)}), Cut("t", {0: (3, 5)})
TIMELINE = Timeline(H0, H2, {0: 5}, sealed={H1: CUT1})
SPEED, BATCH = {H0: ["s0"], H1: ["s1"]}, {H0: ["b0"]}


def state_of(**values: Any) -> State:
    given: dict[str, Any] = {"accepted": {H0: Accepted(1, CUT0)}}
    timeline, offsets = values.pop("timeline", TIMELINE), values.pop("offsets", {0: 5})
    return new_state(timeline, offsets, **(given | values))


def plan(state: State, *branches: dict[str, list[str]]) -> Any:
    files = ({h: {p: p for p in paths} for h, paths in b.items()} for b in branches)
    return plan_merge(state, *files)


def after(main: dict[str, list[str]], swaps: list[Swap]) -> dict[str, list[str]]:
    content = {h: set(paths) for h, paths in main.items()}
    for swap in swaps:
        if swap.refused is None:
            content[swap.hour] = (content.get(swap.hour, set()) - set(swap.remove)) | set(swap.add)
    return {h: sorted(paths) for h, paths in sorted(content.items()) if paths}


@pytest.mark.parametrize(
    "main",
    [
        {}, {H0: ["s0"], H1: ["s1"]}, {H0: ["b0", "s0"], H1: ["b1"]}, {H0: ["b0"]},
        {H2: ["x"], H1: ["s1"]},
    ],
)  # fmt: skip
def test_a_merge_makes_main_equal_whatever_it_contained(main: dict[str, list[str]]) -> None:
    swaps = plan(state_of(), main, SPEED, BATCH)
    merged = after(main, swaps)
    assert merged == {H0: ["b0"], H1: ["s1"]}
    assert plan(state_of(), merged, SPEED, BATCH) == []
    assert [s.hour for s in swaps] == sorted(s.hour for s in swaps)


def test_a_swap_touches_only_the_files_that_differ() -> None:
    (swap,) = plan(state_of(), {H0: ["b0", "s0"], H1: ["s1"]}, SPEED, {H0: ["b0", "b9"]})
    assert swap == Swap(H0, "batch", ("b9",), ("s0",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "layer", "reason"),
    [
        ({"overrides": {H0: "speed"}, "offsets": {0: 2}}, "speed", "the speed layer has not read it to its end"),
        ({"overrides": {H0: "speed"}, "timeline": replace(TIMELINE, skipped=(H0,))}, "speed", "the speed layer skipped it, wholly or in part"),
        ({"overrides": {H0: "speed"}}, "speed", None),
    ],
)  # fmt: skip
def test_an_hour_is_never_given_to_a_speed_layer_that_does_not_cover_it(
    values: dict[str, Any], layer: ledger_row.Layer, reason: str | None
) -> None:
    state = state_of(**values)
    assert uncovered_reason(state, layer, H0) == reason
    main = {H0: ["b0"], H1: ["s1"]}
    (swap,) = plan(state, main, SPEED, BATCH)
    assert swap.refused == (f"not swapped to {layer}: {reason}" if reason else None)
    assert after(main, [swap])[H0] == (["b0"] if reason else ["s0"])


def test_an_accepted_hour_without_rows_and_a_forgotten_one_are_the_batch_layers() -> None:
    assert after({H0: ["s0"]}, plan(state_of(), {H0: ["s0"]}, {H0: ["s0"]}, {})) == {}
    state = state_of(accepted={}, settled_before=H1)
    assert plan(state, {H0: ["b0"], H1: ["s1"]}, SPEED, BATCH) == []
    assert uncovered_reason(state, "batch", H0) is None


# On a real lake


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """Hour 0 accepted, hour 1 of the speed layer, `main` right."""
    made = new_lake(tmp_path, timeline=TIMELINE)
    made.serve([(H0, 0, 0), (H0, 0, 1), (H1, 0, 3)], {0: 5})
    made.land(made.accept(made.stage([(H0, 0, 0)]), H0, Accepted(1, CUT0)))
    return made


RIGHT = [(H0, 0, 0), (H1, 0, 3)]


def say(lake: StreamLake, overrides: dict[str, str]) -> None:
    lake.change(commits.Change("main", properties={OVERRIDES: json.dumps(overrides)}))


def swaps(lake: StreamLake, **how: bool) -> list[Swap]:
    return merge(lake.lake, lake.stream, **({"everything": True} | how)).swaps


def wreck(lake: StreamLake) -> None:
    """Take all that `main` holds, as a restored branch may."""
    hours = files_by_hour(lake.table(), "main").values()
    lake.change(commits.Change("main", remove=tuple(f for files in hours for f in files.values())))


def test_a_wrong_main_is_restored_in_one_publish_without_new_files(lake: StreamLake) -> None:
    assert lake.rows("main") == RIGHT
    files = files_by_hour(lake.table(), "main")
    wreck(lake)
    assert lake.rows("main") == [], "the hazard did not happen"
    before = lake.state().heads
    assert [s.hour for s in swaps(lake)] == [H0, H1]
    assert lake.rows("main") == RIGHT
    found = {h: set(f) for h, f in files_by_hour(lake.table(), "main").items()}
    assert found == {h: set(f) for h, f in files.items()}
    after = lake.state()
    expected = {"main": False, "speed": True, "batch": True}
    assert {b: after.heads[b] == before[b] for b in before} == expected
    assert after.is_merged


def test_merging_again_and_a_dry_run_change_nothing(lake: StreamLake) -> None:
    with lake.unmoved():
        assert swaps(lake, everything=False) == swaps(lake) == []
    wreck(lake)
    with lake.unmoved():
        assert [s.hour for s in swaps(lake, dry_run=True)] == [H0, H1]


def test_rows_that_a_merge_kept_are_not_published_a_second_time(tmp_path: Path) -> None:
    """The hazard: speed is set back, `main` keeps the hour's rows, and they are read again."""
    lake = new_lake(tmp_path, timeline=Timeline(H0, H1, {0: 2}, sealed={H0: Cut("t", {0: (0, 2)})}))
    before, rows = lake.state().heads["speed"], [(H0, 0, 0), (H0, 0, 1)]
    lake.serve(rows, {0: 2})
    lake.set_back("speed", before)
    assert needs_merge(lake.state()), "the hazard did not happen"
    merge(lake.lake, lake.stream)
    assert lake.rows("main") == rows
    assert lake.state().retained_hours == (H0,)
    for offset in (0, 1):
        assert not needs_merge(lake.state())
        staged, ranges = lake.stage([rows[offset]]), {0: (offset, offset + 1)}
        batch, state = StagedBatch("t", {H0: ranges}, staged, None), lake.state()
        decided = sealing.ResolvedState(state, state.position, state.timeline, NOW)
        plan = plan_micro_batch(decided, ranges, batch, lake.lake.clock.now())
        assert plan.next is Next.PUBLISH
        hours = {f.file_path: H0 for f in staged.files}
        lake.land(plan_publish(decided, plan, batch, hours), state)
        assert lake.rows("main") == rows, "published a second time"
    merge(lake.lake, lake.stream)
    state = lake.state()
    assert lake.rows("main") == lake.rows("speed") == rows
    assert state.retained_hours == ()
    assert files_by_hour(state.table, "main") == files_by_hour(state.table, "speed")


def test_a_publish_blind_to_a_moved_branch_does_not_mark_it(lake: StreamLake) -> None:
    """The hazard: empty hours are accepted over a branch set back, and none repairs `main`."""
    state = replace(lake.state(), content={"speed": "set back", "batch": ""})
    publish = Publish("id", (commits.Change("batch"), commits.Change("main")), state.timeline)
    _, main = to_commit(state, publish, NOW).changes
    assert snapshots.MERGED not in main.properties
    _, main = to_commit(state, replace(publish, merges=True), NOW).changes
    assert json.loads(main.properties[snapshots.MERGED]) == state.content


def test_an_override_is_merged_and_lifted(lake: StreamLake) -> None:
    say(lake, {H0: "speed"})
    swaps(lake)
    assert lake.rows("main") == [(H0, 0, 0), (H0, 0, 1), (H1, 0, 3)]
    say(lake, {})
    swaps(lake)
    assert lake.rows("main") == RIGHT
    # One that the layer does not cover leaves the hour whole.
    say(lake, {H1: "batch"})
    (swap,) = swaps(lake)
    assert swap.refused == "not swapped to batch: the batch layer has not accepted it"
    assert lake.rows("main") == RIGHT


def test_a_branch_that_moved_without_main_is_noticed_and_merged(lake: StreamLake) -> None:
    """A restored branch: its content is not what `main` was made from."""
    staged, table = lake.stage([(H1, 0, 4)]), lake.table()
    tx = table.transaction()
    said = lake.state().branch_properties["speed"]
    properties = said | dict.fromkeys(("anabranch.publish", "anabranch.content"), "restored")
    update = tx.update_snapshot(branch="speed", snapshot_properties=properties).fast_append()
    update.append_data_file(staged.files[0])
    update.commit()
    lake.lake.catalog.commit_table(table, tuple(tx._requirements), tuple(tx._updates))
    assert not lake.state().is_merged
    assert [s.hour for s in swaps(lake, everything=False)] == [H1]
    assert lake.rows("main") == [*RIGHT, (H1, 0, 4)]
    assert lake.state().is_merged


# Explained and unexplained differences of the layers, on values only.

HOUR, NEXT = FIRST, shift(FIRST, 1)
CUT = Cut("t", {0: (0, 10), 1: (4, 8)})
DIFF_TIMELINE = Timeline(HOUR, shift(FIRST, 2), {0: 10, 1: 8}, sealed={HOUR: CUT})


def diff(
    missing: int = 0, extra: int = 0, changed: int = 0, duplicate: int = 0, unread: int = 0
) -> ledger_row.Diff:
    return ledger_row.Diff(missing, extra, changed, duplicate, unread, ())


@pytest.mark.parametrize(
    ("difference", "gaps", "left"),
    [
        (None, None, {}),
        (diff(unread=0, duplicate=7), {}, {}),
        # Missing: only as far as the speed layer had not read, when it was compared.
        (diff(missing=5, unread=5), {}, {}),
        (diff(missing=5, unread=3), {}, {"missing": 2}),
        (diff(missing=5, unread=0), {}, {"missing": 5}),
        # Extra: only where Kafka no longer gave the offsets.
        (diff(extra=2, unread=0), {}, {"extra": 2}),
        (diff(extra=2, unread=0), {"control": 9, "aborted": 9}, {"extra": 2}),
        (diff(extra=2, unread=0), {"retention": 1, "compacted": 1}, {}),
        (diff(extra=2, unread=0), {"retention": 1}, {"extra": 1}),
        # Both: where the layer without the row has a dead letter, and no further.
        (replace(diff(missing=5, unread=1), missing_dead=4), {}, {}),
        (replace(diff(missing=5, extra=3), missing_dead=4), {}, {"missing": 1, "extra": 3}),
        (replace(diff(missing=5, extra=3), extra_dead=2), {}, {"missing": 5, "extra": 1}),
        # Other content: never, whatever else is wrong with the hour.
        (diff(changed=1, unread=0), {"retention": 9}, {"changed": 1}),
        (diff(missing=1, extra=1, changed=1, unread=0), None, {"missing": 1, "extra": 1, "changed": 1}),
    ],
)  # fmt: skip
def test_the_explanations_of_a_difference(
    difference: ledger_row.Diff | None, gaps: dict[str, int] | None, left: dict[str, int]
) -> None:
    assert ledger_row.unexplained_counts(difference, gaps) == left


SKIPPED = replace(DIFF_TIMELINE, skipped=(HOUR,))
DROPPED = replace(DIFF_TIMELINE, covered_from=NEXT)
ADOPTED = replace(DIFF_TIMELINE, adoptions=(Adoption(HOUR, "former", {0: 0, 1: 0}),))


@pytest.mark.parametrize(
    ("timeline", "offsets", "hour", "unread"),
    [
        pytest.param(DIFF_TIMELINE, {0: 10, 1: 8}, HOUR, {}, id="read to its end"),
        pytest.param(DIFF_TIMELINE, {0: 7, 1: 8}, HOUR, {0: (7, 10)}, id="behind the position"),
        pytest.param(DIFF_TIMELINE, {0: 99}, HOUR, {1: (4, 8)}, id="a partition without a position"),
        pytest.param(SKIPPED, {0: 99, 1: 99}, HOUR, CUT.ranges, id="jumped over"),
        pytest.param(DROPPED, {0: 99, 1: 99}, HOUR, CUT.ranges, id="dropped"),
        pytest.param(replace(DROPPED, kept=(HOUR,)), {0: 99, 1: 99}, HOUR, {}, id="dropped before it"),
        pytest.param(ADOPTED, {0: 0, 1: 0}, HOUR, {}, id="of a log before this one"),
        pytest.param(ADOPTED, {0: 0, 1: 0}, NEXT, CUT.ranges, id="after an adoption"),
    ],
)  # fmt: skip
def test_unread_offsets_of_an_hour(
    timeline: Timeline, offsets: Any, hour: str, unread: Any
) -> None:
    assert unread_ranges(new_state(timeline, offsets), hour, CUT) == unread


def test_unread_rows_are_missing_rows_and_duplicates_are_the_speed_layers() -> None:
    difference = to_difference(
        {
            "missing": 1, "unread": 2, "duplicate": 4, "same": 8, "extra": 16, "changed": 32,
            "missing_dead": 64, "extra_dead": 128,
        },
        [],
    )  # fmt: skip
    assert difference.diff == ledger_row.Diff(
        missing=3 + 64, extra=16 + 128, changed=32, duplicate=4, unread=2, sample=(),
        missing_dead=64, extra_dead=128,
    )  # fmt: skip
    assert difference.speed_rows == 4 + 8 + 16 + 32 + 128
    assert difference.batch_rows == 1 + 2 + 8 + 32 + 64
