"""The state of a branch stays small in every snapshot: long values are in table properties,
once."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
from brokers import Broker
from lakes import StreamLake, new_environment, new_lake, new_state
from named_files import named_files
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import SetPropertiesUpdate

from anabranch.common.errors import Terminal
from anabranch.iceberg import (
    admin,
    expiry,
    orphans,
    register,
    side_files,
    snapshots,
    state_properties,
)
from anabranch.iceberg.commits import Change, Outcome, Tag
from anabranch.iceberg.prepare import prepare
from anabranch.iceberg.snapshots import MERGED
from anabranch.iceberg.state_properties import STATE
from anabranch.job import Job
from anabranch.lifecycle import maintenance
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.offsets.position import Offsets, Position
from anabranch.protocol import apply, ledger
from anabranch.protocol.dead_letters import DONE
from anabranch.protocol.ledger_row import Account, HourAccount
from anabranch.protocol.measured import MEASURED
from anabranch.protocol.merge import merge
from anabranch.protocol.publish import Publish, new_id, to_commit
from anabranch.protocol.state import (
    ACCEPTED,
    CONTENT,
    DEAD_LETTERS,
    LOST,
    POSITION,
    REMEMBERED_HOURS,
    REMEMBERED_LOSSES,
    TIMELINE,
    Accepted,
    Confirmed,
    accepted_properties,
    lost_entries,
)
from anabranch.protocol.watermarks import COMPLETE_THROUGH, FRESH_THROUGH

FIRST = "2025-11-21T00"
TOPIC = "sGxWg7BPQGCxLYLVTZZ5zg"
NOW = datetime(2026, 11, 21, 1, tzinfo=UTC)
ALLOWED = 64 * 1024


def offsets_at(hour: int, partitions: int) -> Offsets:
    """Return the offsets at the start of an hour. They have ten digits and differing steps, so that
    they pack like real ones."""
    drawn = random.Random(hour)
    return {p: 1_000_000_000 + 100_000 * hour + drawn.randrange(30_000) for p in range(partitions)}


def cuts_of(hours: int, partitions: int) -> dict[str, Cut]:
    at = [offsets_at(i, partitions) for i in range(hours + 1)]
    return {
        shift(FIRST, i): Cut(TOPIC, {p: (at[i][p], at[i + 1][p]) for p in range(partitions)})
        for i in range(hours)
    }


def sizes(table: Table) -> dict[str, int]:
    """Return the bytes of the properties in the head snapshot itself, by branch."""
    return {b: said_bytes(table, b) for b in snapshots.BRANCHES}


def said_bytes(table: Table, branch: str) -> int:
    summary = snapshots.head(table, branch).summary
    assert summary is not None
    return len(
        json.dumps(
            {k: v for k, v in summary.additional_properties.items() if k.startswith("anabranch.")}
        )
    )


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


def state_of(table: Table) -> dict[str, str]:
    """The table properties that contain state."""
    return {k: v for k, v in table.properties.items() if k.startswith(STATE)}


def summary_with_a_side_file(
    table: Table, branch: str, properties: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Write what versions before table properties wrote: an immutable file, reused while the
    branch's content is unchanged."""
    before = snapshots.last_publish(table, branch)
    own = snapshots._own_properties(before) if before is not None else {}
    itself, aside = state_properties.plan_split(properties, state_properties.load_all(table, own))
    if not aside:
        return itself, {}
    name = state_properties.side_file_of(own)
    if name is None or side_files.read(table, name) != aside:
        content = zlib.compress(json.dumps(aside, sort_keys=True).encode())
        name = f"{new_id()}-{hashlib.sha256(content).hexdigest()[:16]}{side_files.SUFFIX}"
        with table.io.new_output(side_files.path_of(table, name)).create() as stream:
            stream.write(content)
    return itself | side_files.reference(name, TIMELINE in aside), {}


def forget_what_was_read() -> None:
    """Clear the cache, as in another process."""
    state_properties._READ.clear()


@pytest.fixture
def long(tmp_path: Path) -> StreamLake:
    """A stream whose timeline is too long for a snapshot."""
    cuts = cuts_of(100, 12)
    return said_long(new_lake(tmp_path, 12, Timeline(FIRST, FIRST, offsets_at(0, 12))), cuts)


def said_long(lake: StreamLake, cuts: dict[str, Cut]) -> StreamLake:
    ends = {h: c.ends for h, c in cuts.items()}
    publish(lake, timeline=replace(lake.state().timeline, boundaries=ends))
    return lake


# Limits


@pytest.mark.parametrize(
    ("hours", "partitions"),
    [
        (744, 12),
        pytest.param(8_760, 12, marks=pytest.mark.full),
        (744, 100),
        (48, 500),
        (48, 1_000),
        (1, 3_000),
    ],
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


@pytest.mark.parametrize(
    ("hours", "partitions"), [(744, 12), pytest.param(744, 100, marks=pytest.mark.full)]
)
def test_hours_that_are_sealed_and_wait_leave_a_snapshot_small(
    tmp_path: Path, hours: int, partitions: int
) -> None:
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


@pytest.mark.parametrize(
    ("hours", "partitions"), [pytest.param(8_760, 12, marks=pytest.mark.full), (744, 100)]
)
def test_a_batch_layer_alone_for_a_year_leaves_a_snapshot_small(
    tmp_path: Path, hours: int, partitions: int
) -> None:
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
    paths = [
        f"{long.table().location()}/data/ingest_hour={FIRST}/{new_id()}.parquet"
        for _ in range(1_000)
    ]
    letters = {"id": "waits", "at": NOW.isoformat(), "layer": "speed", "paths": paths}
    table = publish(long, dead_letters=(letters,))
    assert max(sizes(table).values()) <= ALLOWED
    forget_what_was_read()
    assert long.state().dead_letters == (letters,)
    publish(long, confirmed=Confirmed(letters=frozenset({"waits"})))
    assert long.state().dead_letters == ()


def test_losses_for_weeks_leave_a_snapshot_small(long: StreamLake) -> None:
    state = long.state()
    for i in range(1_000):
        hour = shift(FIRST, i // 6)
        entry = {
            "at": str(i),
            "class": "retention",
            "ranges": {"0": [10 * i, 10 * i + 7]},
            "hours": [hour],
        }
        state = replace(
            state,
            branch_properties=state.branch_properties
            | {"speed": {LOST: lost_entries(state, [entry])}},
        )
    entries = json.loads(state.branch_properties["speed"][LOST])
    counts = [e.get("offsets", e["ranges"]["0"][1] - e["ranges"]["0"][0]) for e in entries]
    assert sum(counts) == 7 * 1_000, "a loss is no longer reported"
    assert len(entries) <= 167 + REMEMBERED_LOSSES
    assert (entries[0]["hours"], entries[0]["offsets"], entries[0]["ranges"]) == (
        [FIRST],
        42,
        {"0": [0, 57]},
    )
    table = publish(long, changes=(Change("speed", properties={LOST: json.dumps(entries)}),))
    assert sizes(table)["speed"] <= ALLOWED


def test_old_losses_of_hours_that_are_accepted_are_left_to_the_ledger() -> None:
    entries = [
        {
            "at": str(i),
            "class": "retention",
            "ranges": {"0": [i, i + 1]},
            "hours": [shift(FIRST, i)],
        }
        for i in range(REMEMBERED_LOSSES + 2)
    ]
    properties = {"speed": {LOST: json.dumps(entries)}}
    timeline = Timeline(FIRST, shift(FIRST, 999), {0: 999})
    state = new_state(
        timeline, accepted={FIRST: Accepted(1, Cut("t", {0: (0, 1)}))}, branch_properties=properties
    )
    kept = [e["hours"] for e in json.loads(lost_entries(state, []))]
    assert kept == [e["hours"] for e in entries[1:]], "only that of the accepted hour is left out"


@pytest.mark.parametrize(
    ("partitions", "most"), [(12, 600_000), pytest.param(100, 1_100_000, marks=pytest.mark.full)]
)
def test_in_health_the_metadata_stays_small(tmp_path: Path, partitions: int, most: int) -> None:
    """48 hours remembered, a tag of `main` for each hour of a week, as many snapshots as a publish
    keeps, and the batch layer's dead letters and decisions of the last hour waiting. Each snapshot
    adds the same, so few are made."""
    cuts = cuts_of(REMEMBERED_HOURS, partitions)
    last = shift(FIRST, REMEMBERED_HOURS)
    opened = Timeline(FIRST, last, offsets_at(REMEMBERED_HOURS, partitions))
    lake = new_lake(tmp_path, partitions=partitions, timeline=opened)
    accepted = accepted_properties(lake.state(), {h: Accepted(1, c) for h, c in cuts.items()})
    account = HourAccount(
        partitions={p: Account(100_000, 99_990, 1, 9, {}) for p in range(partitions)}
    )
    row = ledger.decision(FIRST, "accepted", 1, cuts[FIRST], NOW, served="batch", account=account)
    path = f"{lake.table().location()}/data/ingest_hour={FIRST}/{new_id()}.parquet"
    letters = {
        "id": new_id(),
        "at": NOW.isoformat(),
        "layer": "batch",
        "hour": FIRST,
        "revision": 1,
        "paths": [path],
    }
    publish(
        lake,
        changes=(Change("batch", properties=accepted), Change("main")),
        decisions=(row,),
        dead_letters=(letters,),
    )
    state, keep = [], expiry.plan_expiry.__defaults__[0]  # type: ignore[index]
    for i in range(4):
        files = named_files(lake, last, 1)
        at = Position(TOPIC, offsets_at(REMEMBERED_HOURS + i, partitions))
        head = lake.state().heads["main"]
        tag = Tag(f"main-2026-11-2{i}T00", head, 604_800_000)
        table = publish(
            lake, at, changes=(Change("speed", files), Change("main", files)), tags=(tag,)
        )
        state.append(state_of(table).keys())
        content = Path(table.metadata_location.removeprefix("file://")).read_text()
    assert state[1:] == state[:1] * 3, "properties are written with every micro-batch"
    snapshot = max(
        len(json.dumps(s, separators=(",", ":"))) for s in json.loads(content)["snapshots"][-4:]
    )
    tag_bytes, log_bytes, past_bytes = 150, 70, 200
    whole = (keep + 168) * (snapshot + log_bytes) + 168 * tag_bytes + 100 * past_bytes
    assert whole + state_of_a_week(partitions) <= most


def state_of_a_week(partitions: int) -> int:
    """The bytes of the properties of `main` at each hour of a week: every hour another is accepted,
    and another is forgotten."""
    cuts = cuts_of(REMEMBERED_HOURS + 168, partitions)
    hours = list(cuts)
    needed: dict[str, str] = {}
    for i in range(168):
        remembered = {h: Accepted(1, cuts[h]).as_dict() for h in hours[i : i + REMEMBERED_HOURS]}
        at = i + REMEMBERED_HOURS
        timeline = Timeline(
            FIRST, shift(FIRST, at), offsets_at(at, partitions), covered_from=hours[at - 24]
        )
        accepted = json.dumps(remembered, separators=(",", ":"))
        needed |= state_properties.plan_summary(
            {ACCEPTED: accepted, TIMELINE: timeline.to_json()}, {}
        )[1]
    return sum(len(k) + len(v) + len('"":"",') for k, v in needed.items())


def test_dead_letters_of_each_micro_batch_set_no_property(long: StreamLake) -> None:
    before, waits = state_of(long.table()), frozenset[str]()
    for i in range(3):
        letters = {
            "id": f"{i}",
            "at": NOW.isoformat(),
            "layer": "speed",
            "paths": [f"{long.table().location()}/{i}"],
        }
        publish(
            long,
            Position(TOPIC, offsets_at(i, 12)),
            dead_letters=(letters,),
            confirmed=Confirmed(letters=waits),
        )
        waits = frozenset({f"{i}"})
        assert long.state().dead_letters == (letters,)
    assert state_of(long.table()) == before


# Place and lifetime of the properties


def test_values_that_change_with_every_publish_are_in_the_snapshot() -> None:
    """The hazard: properties for each micro-batch and branch. The module names what a branch says
    by its words."""
    own = {POSITION, CONTENT, MERGED, MEASURED, DEAD_LETTERS, DONE, snapshots.PUBLISH_ID}
    own |= {COMPLETE_THROUGH, FRESH_THROUGH}
    assert own == set(state_properties._SUMMARY_LIMITS)
    assert side_files.TIMELINE == TIMELINE


def test_a_version_without_side_files_stops_at_the_timeline(long: StreamLake) -> None:
    """The hazard: without one on `speed` it would take the timeline of a branch that was published
    to before."""
    summary = snapshots.head(long.table(), "speed").summary
    assert summary is not None
    with pytest.raises(ValueError, match="Expecting value"):
        json.loads(summary.additional_properties[TIMELINE])


@pytest.mark.parametrize("has_timeline", [True, False])
def test_a_version_with_side_files_alone_fails_on_a_file_name_with_the_reason(
    long: StreamLake, has_timeline: bool
) -> None:
    """Reads as those versions read a snapshot's properties. A table without hours has no timeline
    to stop at."""
    text = json.dumps({"x": [str(i) for i in range(1_000)]})
    summary, _ = state_properties.plan_summary({TIMELINE if has_timeline else LOST: text}, {})
    name = next(summary[k] for k in (TIMELINE, "anabranch.side-file") if k in summary)
    with pytest.raises(
        side_files.SideFileGone,
        match=r"metadata/state-in-table-properties-needs-a-newer-anabranch/",
    ):
        side_files.read(long.table(), name.removeprefix("side-file:"))


@pytest.mark.parametrize("seed", range(20))
def test_any_state_of_a_branch_is_read_back_unchanged(long: StreamLake, seed: int) -> None:
    drawn = random.Random(seed)
    hours = cuts_of(drawn.randrange(1, 60), drawn.randrange(1, 300))
    objects: dict[str, Any] = {
        ACCEPTED: {h: Accepted(1, c).as_dict() for h, c in hours.items()},
        TIMELINE: {"start": 1, "boundaries": {h: {"0": 1} for h in hours}, "sealed": {}},
        LOST: [{"why": 'a\tb\n{"2026-11-21T00":{ }' * drawn.randrange(300), "ünïcode": "\u2028"}],
        "anabranch.overrides": {FIRST: "speed", shift(FIRST, 1): {}},
    }
    separators = drawn.choice([(",", ":"), (", ", ": ")])
    said = {
        k: json.dumps(v, separators=separators, ensure_ascii=drawn.random() < 0.5)
        for k, v in objects.items()
    }
    said["anabranch.settled-before"] = FIRST
    summary, needed = state_properties.plan_summary(said, {})
    assert all(len(value) <= state_properties.LONGEST for value in needed.values())
    metadata = long.table().metadata.model_copy(update={"properties": needed})
    table = replace_metadata(long.table(), metadata)
    forget_what_was_read()
    assert state_properties.load_all(table, summary) == said
    unused = state_properties.plan_unused({**needed, STATE + "0" * 16: "x"}, {}, [summary])
    assert unused == (STATE + "0" * 16,)


def replace_metadata(table: Table, metadata: TableMetadata) -> Table:
    return Table(table.name(), metadata, table.metadata_location, table.io, table.catalog)


@pytest.mark.parametrize(
    ("hours", "partitions"), [pytest.param(8_760, 12, marks=pytest.mark.full), (744, 100)]
)
def test_an_hour_more_of_a_long_backlog_changes_few_properties(hours: int, partitions: int) -> None:
    """The hazard: each of a hundred remembered snapshots of a backlog needs a megabyte of its
    own."""
    cuts = cuts_of(hours + 1, partitions)
    one, more = (
        state_properties.plan_summary(
            {
                ACCEPTED: json.dumps(
                    {h: Accepted(1, c).as_dict() for h, c in some.items()}, separators=(",", ":")
                )
            },
            {},
        )[1]
        for some in (dict(list(cuts.items())[:-1]), dict(list(cuts.items())[1:]))
    )
    assert sum(len(v) for k, v in more.items() if k not in one) <= 20_000


def test_a_property_is_kept_while_a_remembered_snapshot_needs_it_and_removed_in_the_commit_that_expires_it(
    long: StreamLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    tagged = long.state().heads["main"]
    first = state_of(long.table()).keys()
    was = long.state()
    other = replace(was.timeline, skipped=tuple(shift(FIRST, i) for i in range(200)))
    publish(long, timeline=other, tags=(Tag("kept", tagged, 3_600_000_000),))
    long.move("batch")
    monkeypatch.setattr(expiry.plan_expiry, "__defaults__", (0,))
    long.move("batch")
    long.move("batch")
    held = state_of(long.table()).keys()
    assert first <= held, "expected the state of the tagged snapshot to stay"
    forget_what_was_read()
    assert snapshots.snapshot_properties(long.table(), tagged)[TIMELINE] == was.timeline.to_json()
    assert long.state().timeline == other
    long.table().manage_snapshots().remove_tag("kept").commit()
    long.move("batch")
    long.move("batch")
    now = state_of(long.table()).keys()
    assert first - now, "expected what only the expired snapshot needed to be removed"
    forget_what_was_read()
    assert long.state().timeline == other


def test_a_commit_that_requires_no_heads_removes_no_property(long: StreamLake) -> None:
    """The hazard: it was decided on a table that a publish has changed since, whose snapshot needs
    the property again; the publish did not set it, since the table had it."""
    long.table().transaction().set_properties({STATE + "f" * 16: "unused"}).commit_transaction()
    staged = long.stage([(FIRST, 0, 7)])
    long.lake.discard(long.name, staged)
    assert STATE + "f" * 16 in state_of(long.table())
    long.move("batch")
    assert STATE + "f" * 16 not in state_of(long.table())


def test_a_publish_that_needs_files_that_maintenance_removes_is_refused(
    long: StreamLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hazard: a publish says again what an older snapshot said, so it sets no property; before
    it lands, another commit expires that snapshot and removes the property."""
    older = long.state().timeline
    publish(long, timeline=replace(older, skipped=tuple(shift(FIRST, i) for i in range(200))))
    state = long.state()
    again = to_commit(state, Publish(new_id(), (Change("speed"), Change("main")), older), NOW)
    updates = prepare(state.table, replace(again, expire=()), NOW).updates
    assert not [
        u
        for u in updates
        if isinstance(u, SetPropertiesUpdate) and any(STATE in k for k in u.updates)
    ]
    before = state_of(state.table).keys()
    monkeypatch.setattr(expiry.plan_expiry, "__defaults__", (0,))
    for _ in range(3):
        long.move("batch")
    assert before - state_of(long.table()).keys(), "the hazard did not happen"
    assert long.lake.commit(state.table, again) is Outcome.REFUSED
    publish(long, timeline=older)
    forget_what_was_read()
    assert long.state().timeline == older


def test_foreign_properties_and_those_of_turns_stay(long: StreamLake) -> None:
    long.table().transaction().set_properties(
        {"owner": "x", "anabranch.turn.1": "{}"}
    ).commit_transaction()
    long.move("batch")
    properties = long.table().properties
    assert (properties["owner"], properties["anabranch.turn.1"]) == ("x", "{}")


def test_an_idle_stream_is_read_after_every_unreferenced_file_is_deleted(
    long: StreamLake,
) -> None:
    """Iceberg's own remove_orphan_files leaves only metadata, manifest lists, manifests and data
    files."""
    before = long.state()
    table = long.table()
    named = {p.removeprefix("file://") for p in orphans.references(table)}
    for path in Path(table.location().removeprefix("file://")).rglob("*"):
        if path.is_file() and str(path) not in named:
            path.unlink()
    forget_what_was_read()
    assert (long.state().timeline, long.state().accepted) == (before.timeline, before.accepted)


@pytest.mark.parametrize("value", [None, "zlib:nonsense", "another's"])
def test_a_missing_or_foreign_property_is_refused(long: StreamLake, value: str | None) -> None:
    key = min(state_of(long.table()))
    with long.table().transaction() as tx:
        tx.remove_properties(key) if value is None else tx.set_properties({key: value})
    forget_what_was_read()
    with pytest.raises(
        Terminal,
        match=rf"expected its property {key}, .*; the state of main, speed is lost: set the prop",
    ):
        long.state()


def test_a_lost_branch_begins_again_with_the_state_of_main(long: StreamLake) -> None:
    before = long.state()
    long.table().manage_snapshots().remove_branch("speed").commit()
    assert admin.add_branches(long.lake, long.name, {}) == ["speed"]
    forget_what_was_read()
    assert long.state().timeline == before.timeline


# Tables of versions before


def test_a_table_of_before_there_were_side_files_is_read_and_published_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = new_lake(tmp_path, partitions=12, timeline=Timeline(FIRST, FIRST, offsets_at(0, 12)))
    cuts = cuts_of(60, 12)
    accepted = {ACCEPTED: json.dumps({h: Accepted(2, c).as_dict() for h, c in cuts.items()})}
    old = {**accepted, TIMELINE: Timeline(FIRST, shift(FIRST, 60), offsets_at(60, 12)).to_json()}
    with monkeypatch.context() as patched:
        patched.setattr(
            "anabranch.iceberg.prepare.summary_of",
            lambda table, branch, properties: (dict(properties), {}),
        )
        state = lake.state()
        packed = {**old, ACCEPTED: state_properties.pack(old[ACCEPTED])}  # as `main` said it
        changes = (
            Change("speed", properties=old),
            Change("batch", properties=old),
            Change("main", properties=packed),
        )
        commit = to_commit(
            state, Publish(new_id(), changes, Timeline.from_json(old[TIMELINE])), NOW
        )
        assert lake.lake.commit(state.table, commit) is Outcome.LANDED
    assert not state_of(lake.table()), "the hazard did not happen"
    was = lake.state()
    assert (len(was.accepted), was.timeline.open) == (60, shift(FIRST, 60))
    changes = (Change("speed"), Change("batch"), Change("main"))
    assert (
        max(sizes(publish(lake, Position(TOPIC, offsets_at(60, 12)), changes=changes)).values())
        <= 1_000
    )
    forget_what_was_read()
    now = lake.state()
    assert (now.accepted, now.timeline, now.branch_properties["main"][ACCEPTED]) == (
        was.accepted,
        was.timeline,
        old[ACCEPTED],
    )


@pytest.fixture
def with_side_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StreamLake:
    """A stream of a version that kept its state in side files; its newest publishes were to `batch`
    and `main`."""
    lake = new_lake(tmp_path, 12, Timeline(FIRST, FIRST, offsets_at(0, 12)))
    with monkeypatch.context() as patched:
        patched.setattr("anabranch.iceberg.prepare.summary_of", summary_with_a_side_file)
        said_long(lake, cuts_of(100, 12))
        publish(lake, Position(TOPIC, offsets_at(1, 12)))
        publish(
            lake,
            changes=(Change("batch", properties={LOST: json.dumps(["x"] * 9)}), Change("main")),
        )
    assert len(side_files_of(lake)) >= 2
    assert not state_of(lake.table())
    return lake


def test_a_table_with_side_files_is_read_and_moves_over_with_its_next_publish(
    with_side_files: StreamLake,
) -> None:
    lake = with_side_files
    forget_what_was_read()
    was = lake.state()
    changes = (Change("speed"), Change("batch"), Change("main"))
    table = publish(lake, changes=changes)
    assert state_of(table)
    for path in side_files_of(lake).values():
        path.unlink()
    forget_what_was_read()
    now = lake.state()
    assert (now.timeline, now.accepted, now.position) == (was.timeline, was.accepted, was.position)


def test_apply_moves_every_branch_over(with_side_files: StreamLake) -> None:
    lake = with_side_files
    was = lake.state()
    done = apply.guard_state(lake.lake, lake.stream)
    assert done == [f"protected the state of {lake.name} against other programs' maintenance"]
    assert apply.guard_state(lake.lake, lake.stream) == []
    for path in side_files_of(lake).values():
        path.unlink()
    forget_what_was_read()
    assert lake.state().timeline == was.timeline


def test_orphan_removal_spares_side_files_that_a_remembered_snapshot_names(
    with_side_files: StreamLake,
) -> None:
    lake = with_side_files
    publish(lake, changes=(Change("speed"), Change("batch"), Change("main")))
    names = (
        state_properties.side_file_of(snapshots._own_properties(s))
        for s in lake.table().snapshots()
    )
    named = {n for n in names if n is not None}
    assert named == set(side_files_of(lake))
    folder = next(iter(side_files_of(lake).values())).parent
    (folder / f"{new_id()}-0123456789abcdef{side_files.SUFFIX}").write_bytes(
        b"of a commit that never landed"
    )
    old = (NOW - timedelta(days=9)).timestamp()
    for path in side_files_of(lake).values():
        os.utime(path, (old, old))
    environment = new_environment(lake.folder)
    maintenance.maintain(
        Job(environment, lake.stream, lake.lake, Broker().adapter), datetime.now(UTC)
    )
    assert set(side_files_of(lake)) == named


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"")])
@pytest.mark.parametrize("branch", ["speed", "batch"])
def test_a_branch_without_its_side_file_is_recreated_from_main(
    with_side_files: StreamLake, branch: str, damage: Callable[[Path], None]
) -> None:
    lake = with_side_files
    before = lake.state()
    name = named_by(lake.table(), branch)
    assert name != named_by(lake.table(), "main")
    damage(side_files_of(lake)[name])
    forget_what_was_read()
    with pytest.raises(
        Terminal,
        match=rf"{name}.*the state of {branch} is lost: .*drop branch {branch}, then run `anabran",
    ):
        lake.state()
    lake.table().manage_snapshots().remove_branch(branch).commit()
    assert admin.add_branches(lake.lake, lake.name, {}) == [branch]
    assert (lake.state().timeline, lake.state().position) == (before.timeline, before.position)


def test_main_without_its_side_file_is_set_back_and_merged(
    with_side_files: StreamLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake, hour = with_side_files, shift(FIRST, 100)
    back = lake.state().heads["main"]
    other = replace(lake.state().timeline, skipped=tuple(shift(FIRST, i) for i in range(200)))
    rows = lake.stage([(hour, 0, 7)])
    changes = (Change("speed", rows.files), Change("main", rows.files))
    with monkeypatch.context() as patched:
        patched.setattr("anabranch.iceberg.prepare.summary_of", summary_with_a_side_file)
        publish(lake, Position(TOPIC, offsets_at(2, 12)), timeline=other, changes=changes)
    side_files_of(lake)[named_by(lake.table(), "main")].unlink()
    forget_what_was_read()
    with pytest.raises(
        Terminal,
        match=rf"the state of main is lost: .*roll main back to snapshot {back} of \S+, which is "
        r"complete, then run `anabranch merge STREAM`",
    ):
        lake.state()
    lake.table().manage_snapshots().rollback_to_snapshot(back).commit()
    merge(lake.lake, lake.stream)
    assert lake.rows("main") == lake.rows("speed") == [(hour, 0, 7)]
    assert (lake.state().timeline, lake.state().is_merged) == (other, True)


def test_without_a_side_file_the_error_names_the_remaining_state(
    with_side_files: StreamLake,
) -> None:
    for path in side_files_of(with_side_files).values():
        path.unlink()
    forget_what_was_read()
    # The first snapshot, which `apply` made, was short enough to contain its own state.
    with pytest.raises(
        Terminal,
        match=r"the state of main, speed, batch is lost: .*roll main back to snapshot \d+ of",
    ):
        with_side_files.state()


def named_by(table: Table, branch: str) -> str:
    name = side_files.named(snapshots._own_properties(snapshots.head(table, branch)))
    assert name is not None
    return name


def test_a_metadata_file_without_its_side_file_is_not_registered(
    with_side_files: StreamLake,
) -> None:
    table = with_side_files.table()
    location = table.location()
    listed = {str(p).lstrip("/") for p in Path(location.removeprefix("file://")).rglob("*")}
    assert register._why_not(table, location, listed) is None
    assert ".anabranch, found none" in str(
        register._why_not(table, location, {p for p in listed if not p.endswith(side_files.SUFFIX)})
    )


def test_the_first_publish_time_of_a_position_is_read_in_any_form(long: StreamLake) -> None:
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


def test_threads_read_more_states_than_a_process_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream of a speed process publishes in a thread of its own, and has several states. Here
    another thread may run after each instruction of the cache."""
    monkeypatch.setattr(state_properties, "_REMEMBERED", 12)
    forget_what_was_read()
    threads, states = 8, 200

    def stored(number: int) -> tuple[Table, dict[str, str]]:
        text = f"{TIMELINE} {number}"
        digest = state_properties._digest(text)
        properties = {STATE + digest: state_properties.pack(text)}
        table = SimpleNamespace(metadata=SimpleNamespace(properties=properties))
        name = state_properties._IN_PROPERTIES + digest
        return cast(Table, table), side_files.reference(name, True)

    known = [stored(number) for number in range(states)]

    def let_others_run(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is not state_properties._read.__code__:
            return None
        frame.f_trace_opcodes = True
        time.sleep(0)
        return let_others_run

    def read(first: int) -> None:
        sys.settrace(let_others_run)
        try:
            for number in range(first, states, threads):
                assert state_properties.load_all(*known[number]) == {TIMELINE: str(number)}
        finally:
            sys.settrace(None)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, range(threads)))
