"""What a branch says stays small in every snapshot, whatever waits: what is long stands in a side file."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker
from lakes import StreamLake, new_environment, new_lake, new_state
from named_files import named_files
from pyiceberg.table import Table

from anabranch.errors import Terminal
from anabranch.hours import Cut, Timeline, shift
from anabranch.job import Job
from anabranch.position import Offsets, Position
from anabranch.protocol import ledger
from anabranch.protocol.dead_letters import DONE
from anabranch.protocol.ledger_row import Account, HourAccount
from anabranch.protocol.measured import MEASURED
from anabranch.protocol.publish import Publish, new_id, to_commit
from anabranch.protocol.state import (
    ACCEPTED,
    CONTENT,
    DEAD_LETTERS,
    LOST,
    MERGED,
    POSITION,
    REMEMBERED_HOURS,
    REMEMBERED_LOSSES,
    TIMELINE,
    Accepted,
    accepted_properties,
    load_state,
    lost_entries,
    read_state,
)
from anabranch.protocol.watermarks import COMPLETE_THROUGH, FRESH_THROUGH
from anabranch.table import admin, orphans, register, side_files, snapshots
from anabranch.table.commits import Change, Outcome, Tag
from anabranch.table.prepare import prepare
from serving_layer import maintenance
from serving_layer.merge import merge

FIRST = "2025-11-21T00"
TOPIC = "sGxWg7BPQGCxLYLVTZZ5zg"
NOW = datetime(2026, 11, 21, 1, tzinfo=UTC)
ALLOWED = 64 * 1024


def offsets_at(hour: int, partitions: int) -> Offsets:
    """Where an hour begins: offsets of ten digits whose steps differ, so that they pack as real ones do."""
    drawn = random.Random(hour)
    return {p: 1_000_000_000 + 100_000 * hour + drawn.randrange(30_000) for p in range(partitions)}


def cuts_of(hours: int, partitions: int) -> dict[str, Cut]:
    at = [offsets_at(i, partitions) for i in range(hours + 1)]
    return {shift(FIRST, i): Cut(TOPIC, {p: (at[i][p], at[i + 1][p]) for p in range(partitions)}) for i in range(hours)}


def sizes(table: Table) -> dict[str, int]:
    """By branch, the bytes of what its head says itself."""
    return {b: said_bytes(table, b) for b in snapshots.BRANCHES}


def said_bytes(table: Table, branch: str) -> int:
    summary = snapshots.head(table, branch).summary
    assert summary is not None
    return len(json.dumps({k: v for k, v in summary.additional_properties.items() if k.startswith("anabranch.")}))


def publish(lake: StreamLake, position: Position | None = None, **values: Any) -> Table:
    """A publish of the speed layer that changes nothing but what is given."""
    state = lake.state()
    changes = values.pop("changes", (Change("speed"), Change("main")))
    made = Publish(new_id(), changes, values.pop("timeline", state.timeline), position, **values)
    assert lake.publish(made, state) is Outcome.LANDED
    return lake.table()


def side_files_of(lake: StreamLake) -> dict[str, Path]:
    folder = Path(lake.table().location().removeprefix("file://")) / "metadata"
    return {p.name: p for p in folder.glob(f"*{side_files.SUFFIX}")}


def forget_what_was_read() -> None:
    """As another process sees it."""
    side_files._READ.clear()


@pytest.fixture
def long(tmp_path: Path) -> StreamLake:
    """A stream whose timeline is too long for a snapshot."""
    cuts = cuts_of(100, 12)
    return said_long(new_lake(tmp_path, 12, Timeline(FIRST, FIRST, offsets_at(0, 12))), cuts)


def said_long(lake: StreamLake, cuts: dict[str, Cut]) -> StreamLake:
    ends = {h: c.ends for h, c in cuts.items()}
    publish(lake, timeline=replace(lake.state().timeline, boundaries=ends))
    return lake


# What is allowed


@pytest.mark.parametrize(
    ("hours", "partitions"), [(744, 12), (8_760, 12), (744, 100), (48, 500), (48, 1_000), (1, 3_000)]
)
def test_however_many_hours_wait_to_be_sealed_a_snapshot_stays_small(
    tmp_path: Path, hours: int, partitions: int
) -> None:
    lake = new_lake(tmp_path, partitions, Timeline(FIRST, FIRST, offsets_at(0, partitions)))
    assert max(sizes(lake.table()).values()) <= ALLOWED
    ends = {h: c.ends for h, c in cuts_of(hours, partitions).items()}
    timeline = Timeline(FIRST, FIRST, offsets_at(0, partitions), boundaries=ends)
    table = publish(lake, Position(TOPIC, offsets_at(1, partitions)), timeline=timeline)
    assert max(sizes(table).values()) <= ALLOWED
    # Another process reads what was meant.
    forget_what_was_read()
    state = lake.state()
    assert state.timeline == timeline
    assert state.position == Position(TOPIC, offsets_at(1, partitions))


@pytest.mark.parametrize(("hours", "partitions"), [(744, 12), (744, 100)])
def test_hours_that_are_sealed_and_wait_leave_a_snapshot_small(tmp_path: Path, hours: int, partitions: int) -> None:
    lake = new_lake(tmp_path, partitions=partitions, timeline=Timeline(FIRST, FIRST, {0: 0}))
    cuts = cuts_of(hours, partitions)
    timeline = Timeline(FIRST, shift(FIRST, hours), offsets_at(hours, partitions), sealed=cuts)
    rows = tuple(ledger.decision(h, "sealed", 0, c, NOW, served="speed") for h, c in cuts.items())
    table = publish(lake, timeline=timeline, decisions=rows)
    assert max(sizes(table).values()) <= ALLOWED
    forget_what_was_read()
    state = lake.state()
    assert state.cuts == cuts
    assert [d.hour for d in state.decisions] == list(cuts)


@pytest.mark.parametrize(("hours", "partitions"), [(8_760, 12), (744, 100)])
def test_a_batch_layer_alone_for_a_year_leaves_a_snapshot_small(tmp_path: Path, hours: int, partitions: int) -> None:
    """No hour is forgotten before the speed layer is past it."""
    opened = Timeline(FIRST, shift(FIRST, hours), offsets_at(hours, partitions))
    lake = new_lake(tmp_path, partitions=partitions, timeline=opened)
    accepted = {h: Accepted(1, c) for h, c in cuts_of(hours, partitions).items()}
    properties = accepted_properties(lake.state(), accepted)
    table = publish(lake, changes=(Change("batch", properties=properties), Change("main")))
    assert max(sizes(table).values()) <= ALLOWED
    forget_what_was_read()
    assert lake.state().accepted == accepted


def test_dead_letters_in_many_files_leave_a_snapshot_small(long: StreamLake) -> None:
    paths = [f"{long.table().location()}/data/ingest_hour={FIRST}/{new_id()}.parquet" for _ in range(1_000)]
    letters = {"id": "waits", "at": NOW.isoformat(), "layer": "speed", "paths": paths}
    table = publish(long, dead_letters=(letters,))
    assert max(sizes(table).values()) <= ALLOWED
    forget_what_was_read()
    assert long.state().dead_letters == (letters,)
    publish(long, confirmed=frozenset({"waits"}))
    assert long.state().dead_letters == ()


def test_losses_for_weeks_leave_a_snapshot_small(long: StreamLake) -> None:
    state = long.state()
    for i in range(1_000):
        hour = shift(FIRST, i // 6)
        entry = {"at": str(i), "class": "retention", "ranges": {"0": [10 * i, 10 * i + 7]}, "hours": [hour]}
        state = replace(
            state, branch_properties=state.branch_properties | {"speed": {LOST: lost_entries(state, [entry])}}
        )
    entries = json.loads(state.branch_properties["speed"][LOST])
    counts = [e.get("offsets", e["ranges"]["0"][1] - e["ranges"]["0"][0]) for e in entries]
    assert sum(counts) == 7 * 1_000, "a loss is not told any more"
    assert len(entries) <= 167 + REMEMBERED_LOSSES
    assert (entries[0]["hours"], entries[0]["offsets"], entries[0]["ranges"]) == ([FIRST], 42, {"0": [0, 57]})
    table = publish(long, changes=(Change("speed", properties={LOST: json.dumps(entries)}),))
    assert sizes(table)["speed"] <= ALLOWED


def test_old_losses_of_hours_that_are_accepted_are_left_to_the_ledger() -> None:
    entries = [
        {"at": str(i), "class": "retention", "ranges": {"0": [i, i + 1]}, "hours": [shift(FIRST, i)]}
        for i in range(REMEMBERED_LOSSES + 2)
    ]
    properties = {"speed": {LOST: json.dumps(entries)}}
    timeline = Timeline(FIRST, shift(FIRST, 999), {0: 999})
    state = new_state(timeline, accepted={FIRST: Accepted(1, Cut("t", {0: (0, 1)}))}, branch_properties=properties)
    kept = [e["hours"] for e in json.loads(lost_entries(state, []))]
    assert kept == [e["hours"] for e in entries[1:]], "only that of the accepted hour is left out"


@pytest.mark.parametrize(("partitions", "most"), [(12, 400_000), (100, 1_000_000)])
def test_in_health_the_metadata_stays_small(tmp_path: Path, partitions: int, most: int) -> None:
    """48 hours remembered, a tag of `main` for each hour of a week, as many snapshots as a publish keeps, and the batch
    layer's dead letters and decisions of the last hour waiting. Each snapshot adds the same, so few are made."""
    cuts = cuts_of(REMEMBERED_HOURS, partitions)
    last = shift(FIRST, REMEMBERED_HOURS)
    opened = Timeline(FIRST, last, offsets_at(REMEMBERED_HOURS, partitions))
    lake = new_lake(tmp_path, partitions=partitions, timeline=opened)
    accepted = accepted_properties(lake.state(), {h: Accepted(1, c) for h, c in cuts.items()})
    account = HourAccount(partitions={p: Account(100_000, 99_990, 1, 9, {}) for p in range(partitions)})
    row = ledger.decision(FIRST, "accepted", 1, cuts[FIRST], NOW, served="batch", account=account)
    path = f"{lake.table().location()}/data/ingest_hour={FIRST}/{new_id()}.parquet"
    letters = {
        "id": new_id(), "at": NOW.isoformat(), "layer": "batch", "hour": FIRST, "revision": 1, "paths": [path],
    }  # fmt: skip
    publish(
        lake, changes=(Change("batch", properties=accepted), Change("main")), decisions=(row,), dead_letters=(letters,)
    )  # fmt: skip
    written, keep = [], snapshots.plan_expiry.__defaults__[0]  # type: ignore[index]
    for i in range(4):
        files = named_files(lake, last, 1)
        at = Position(TOPIC, offsets_at(REMEMBERED_HOURS + i, partitions))
        head = lake.state().heads["main"]
        tag = Tag(f"main-2026-11-2{i}T00", head, 604_800_000)
        before = set(side_files_of(lake))
        table = publish(lake, at, changes=(Change("speed", files), Change("main", files)), tags=(tag,))
        written.append(len(set(side_files_of(lake)) - before))
        content = Path(table.metadata_location.removeprefix("file://")).read_text()
    snapshot = max(len(json.dumps(s, separators=(",", ":"))) for s in json.loads(content)["snapshots"][-4:])
    tag_bytes, log_bytes, past_bytes = 150, 70, 200
    whole = (keep + 168) * (snapshot + log_bytes) + 168 * tag_bytes + 100 * past_bytes
    assert whole <= most
    assert written[1:] == [0, 0, 0], "a file is written with every micro-batch"


def test_dead_letters_of_each_micro_batch_write_no_file(long: StreamLake) -> None:
    before, waits = set(side_files_of(long)), frozenset[str]()
    for i in range(3):
        letters = {"id": f"{i}", "at": NOW.isoformat(), "layer": "speed", "paths": [f"{long.table().location()}/{i}"]}
        publish(long, Position(TOPIC, offsets_at(i, 12)), dead_letters=(letters,), confirmed=waits)
        waits = frozenset({f"{i}"})
        assert long.state().dead_letters == (letters,)
    assert set(side_files_of(long)) == before


# What a file is, and who finds it


def test_what_changes_with_every_publish_stands_in_the_snapshot() -> None:
    """The hazard: a file for each micro-batch and branch. The module names the properties by their words."""
    own = {POSITION, CONTENT, MERGED, MEASURED, DEAD_LETTERS, DONE, snapshots.PUBLISH_ID}
    own |= {COMPLETE_THROUGH, FRESH_THROUGH}
    assert own == set(side_files._ITSELF)
    assert side_files._TIMELINE == TIMELINE


def test_a_program_that_knows_no_side_files_stops_at_the_timeline(long: StreamLake) -> None:
    """The hazard: without one on `speed` it would take the timeline of a branch that was published to before."""
    summary = snapshots.head(long.table(), "speed").summary
    assert summary is not None
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(summary.additional_properties[TIMELINE])


def test_a_table_of_before_there_were_side_files_is_read_and_published_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = new_lake(tmp_path, partitions=12, timeline=Timeline(FIRST, FIRST, offsets_at(0, 12)))
    cuts = cuts_of(60, 12)
    accepted = {ACCEPTED: json.dumps({h: Accepted(2, c).as_dict() for h, c in cuts.items()})}
    old = {**accepted, TIMELINE: Timeline(FIRST, shift(FIRST, 60), offsets_at(60, 12)).to_json()}
    with monkeypatch.context() as patched:
        patched.setattr(side_files, "set_aside", lambda table, properties, before: dict(properties))
        state = lake.state()
        packed = {**old, ACCEPTED: side_files.pack(old[ACCEPTED])}  # as `main` said it
        changes = (Change("speed", properties=old), Change("batch", properties=old), Change("main", properties=packed))
        commit = to_commit(state, Publish(new_id(), changes, Timeline.from_json(old[TIMELINE])), NOW)
        assert lake.lake.commit(state.table, commit) is Outcome.LANDED
    assert not side_files_of(lake), "the hazard did not happen"
    was = lake.state()
    assert (len(was.accepted), was.timeline.open) == (60, shift(FIRST, 60))
    changes = (Change("speed"), Change("batch"), Change("main"))
    assert max(sizes(publish(lake, Position(TOPIC, offsets_at(60, 12)), changes=changes)).values()) <= 1_000
    forget_what_was_read()
    now = lake.state()
    assert (now.accepted, now.timeline, now.branch_properties["main"][ACCEPTED]) == (
        was.accepted,
        was.timeline,
        old[ACCEPTED],
    )


def test_a_side_file_is_used_again_while_what_it_says_stays(long: StreamLake) -> None:
    before = set(side_files_of(long))
    assert before
    for i in range(3):
        publish(long, Position(TOPIC, offsets_at(i, 12)))
    assert set(side_files_of(long)) == before
    open_hour = replace(long.state().timeline, boundaries={})
    publish(long, timeline=replace(open_hour, skipped=tuple(shift(FIRST, i) for i in range(100))))
    assert len(set(side_files_of(long)) - before) == 2, "one for each branch that says something else now"


def test_a_side_file_that_no_head_names_is_not_used_again(long: StreamLake) -> None:
    """The hazard: an orphan that happens to say the same is deleted between the commit's preparation and its end."""
    old, other = long.state().timeline, Timeline(FIRST, FIRST, {}, skipped=tuple(shift(FIRST, i) for i in range(200)))
    publish(long, timeline=other)
    before = set(side_files_of(long))
    publish(long, timeline=old)
    assert len(set(side_files_of(long)) - before) == 2


def test_a_refused_commit_leaves_an_orphan_and_changes_nothing(long: StreamLake) -> None:
    state = long.state()
    other = replace(state.timeline, skipped=tuple(shift(FIRST, i) for i in range(200)))
    commit = to_commit(state, Publish(new_id(), (Change("speed"), Change("main")), other), NOW)
    prepare(state.table, commit, NOW)
    long.move("speed")
    assert long.lake.commit(state.table, commit) is Outcome.REFUSED
    assert long.state().timeline == state.timeline


def test_orphan_removal_spares_what_any_kept_snapshot_names(long: StreamLake) -> None:
    tagged = long.state().heads["speed"]
    tag = Tag("kept", tagged, 3_600_000_000)
    other = replace(long.state().timeline, skipped=tuple(shift(FIRST, i) for i in range(200)))
    publish(long, timeline=other, tags=(tag,))
    refused = Publish(new_id(), (Change("main"),), long.state().timeline)
    prepare(long.table(), to_commit(long.state(), refused, NOW), NOW)
    lost = replace(other, skipped=other.skipped[1:])
    prepare(long.table(), to_commit(long.state(), Publish(new_id(), (Change("speed"),), lost), NOW), NOW)
    named = {n for s in long.table().snapshots() if (n := side_files.named(snapshots._own_properties(s)))}
    assert len(named) == 4
    assert len(side_files_of(long)) == 5, "expected the file of a commit that was never made"
    old = (NOW - timedelta(days=9)).timestamp()
    for path in side_files_of(long).values():
        os.utime(path, (old, old))
    environment = new_environment(long.folder)
    assert {Path(p).name for p in orphans.references(long.table())} >= named
    maintenance.maintain(Job(environment, long.stream, long.lake, Broker().adapter), datetime.now(UTC))
    assert set(side_files_of(long)) == named
    forget_what_was_read()
    assert long.state().timeline == other
    was = read_state(long.table())
    assert was.timeline == other


def test_a_side_file_that_is_gone_is_named_with_the_remedy(long: StreamLake) -> None:
    for path in side_files_of(long).values():
        path.unlink()
    forget_what_was_read()
    with pytest.raises(side_files.SideFileGone, match=r"expected .*\.anabranch, found none; bring the file back from"):
        long.state()


def test_a_damaged_side_file_is_not_believed(long: StreamLake) -> None:
    for path in side_files_of(long).values():
        path.write_bytes(b"")
    forget_what_was_read()
    with pytest.raises(Terminal, match="as it was written, found 0 bytes"):
        long.state()


def test_a_side_file_that_went_with_its_table_version_is_read_of_the_newer_one(
    long: StreamLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: a process that slept between loading the table and reading the file ends for good."""
    stale, before = long.table(), side_files_of(long)
    other = replace(long.state().timeline, skipped=tuple(shift(FIRST, i) for i in range(200)))
    publish(long, timeline=other)
    for path in before.values():
        path.unlink()
    forget_what_was_read()
    answers = [stale, long.table()]
    monkeypatch.setattr(long.lake, "load", lambda name: answers.pop(0))
    assert load_state(long.lake, long.name).timeline == other


def test_a_branch_that_is_lost_begins_again_with_what_main_says(long: StreamLake) -> None:
    before = long.state()
    long.table().manage_snapshots().remove_branch("speed").commit()
    assert admin.add_branches(long.lake, long.name, {}) == ["speed"]
    forget_what_was_read()
    assert long.state().timeline == before.timeline


@pytest.mark.parametrize("branch", ["speed", "batch"])
def test_a_branch_whose_side_file_is_gone_is_brought_back(long: StreamLake, branch: str) -> None:
    publish(long, changes=(Change("batch"), Change("main")))
    before = long.state()
    name = named_by(long.table(), branch)
    assert name != named_by(long.table(), "main")
    side_files_of(long)[name].unlink()
    forget_what_was_read()
    with pytest.raises(side_files.SideFileGone, match=name):
        long.state()
    long.table().manage_snapshots().remove_branch(branch).commit()
    assert admin.add_branches(long.lake, long.name, {}) == [branch]
    assert (long.state().timeline, long.state().position) == (before.timeline, before.position)


def test_main_whose_side_file_is_gone_is_set_back_and_merged(long: StreamLake) -> None:
    hour = shift(FIRST, 100)
    publish(long, Position(TOPIC, offsets_at(1, 12)))
    back = long.state().heads["main"]
    other = replace(long.state().timeline, skipped=tuple(shift(FIRST, i) for i in range(200)))
    rows = long.stage([(hour, 0, 7)])
    changes = (Change("speed", rows.files), Change("main", rows.files))
    publish(long, Position(TOPIC, offsets_at(2, 12)), timeline=other, changes=changes)
    side_files_of(long)[named_by(long.table(), "main")].unlink()
    forget_what_was_read()
    with pytest.raises(side_files.SideFileGone):
        long.state()
    long.table().manage_snapshots().rollback_to_snapshot(back).commit()
    merge(long.lake, long.stream)
    assert long.rows("main") == long.rows("speed") == [(hour, 0, 7)]
    assert (long.state().timeline, long.state().is_merged) == (other, True)


def named_by(table: Table, branch: str) -> str:
    name = side_files.named(snapshots._own_properties(snapshots.head(table, branch)))
    assert name is not None
    return name


def test_a_metadata_file_whose_side_file_is_gone_is_not_registered(long: StreamLake) -> None:
    table = long.table()
    location = table.location()
    listed = {str(p).lstrip("/") for p in Path(location.removeprefix("file://")).rglob("*")}
    assert register._why_not(table, location, listed) is None
    assert ".anabranch, found none" in str(
        register._why_not(table, location, {p for p in listed if not p.endswith(side_files.SUFFIX)})
    )


def test_when_a_position_was_published_first_is_known_in_any_form(long: StreamLake) -> None:
    """Older snapshots say it in full, newer ones packed."""
    publish(long, Position(TOPIC, offsets_at(0, 12)))
    since = snapshots.published_since(long.table(), "speed", POSITION)
    for _ in range(3):
        publish(long)
    assert snapshots.published_since(long.table(), "speed", POSITION) == since


def test_a_state_that_did_not_change_is_parsed_once(long: StreamLake) -> None:
    one, other = long.state(), long.state()
    assert one.timeline is other.timeline
    assert one.timeline.to_json() is other.timeline.to_json()
