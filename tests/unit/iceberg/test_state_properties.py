"""A branch's state is small in every snapshot: long values are in table properties, once."""

import json
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
from lakes import StreamLake, new_lake, new_state
from named_files import named_files
from pyiceberg.table import Table
from pyiceberg.table.update import SetPropertiesUpdate

from anabranch.common.errors import Terminal
from anabranch.common.json_values import to_json
from anabranch.iceberg import admin, expiry, snapshots, state_properties
from anabranch.iceberg.commits import Change, Outcome, Tag
from anabranch.iceberg.files import references
from anabranch.iceberg.prepare import prepare
from anabranch.iceberg.snapshots import CONTENT, MERGED
from anabranch.iceberg.state_properties import STATE
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.offsets.position import Offsets, Position
from anabranch.protocol import ledger
from anabranch.protocol.dead_letters import DONE
from anabranch.protocol.ledger_row import Account, HourAccount
from anabranch.protocol.measured import MEASURED
from anabranch.protocol.publish import Publish, new_id, to_commit
from anabranch.protocol.state import (
    ACCEPTED,
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
    """Return the offsets at the start of an hour, which pack like real ones: ten digits, uneven."""
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
    said = summary.additional_properties
    return len(json.dumps({k: v for k, v in said.items() if k.startswith("anabranch.")}))


def publish(lake: StreamLake, position: Position | None = None, **values: Any) -> Table:
    """A publish of the speed layer that changes nothing but what is given."""
    changes = values.pop("changes", (Change("speed"), Change("main")))
    lake.change(*changes, position=position, **values)
    return lake.table()


def state_of(table: Table) -> dict[str, str]:
    """The table properties that contain state."""
    return {k: v for k, v in table.properties.items() if k.startswith(STATE)}


def forget_what_was_read() -> None:
    """Clear the cache, as in another process."""
    state_properties._READ.clear()


@pytest.fixture
def long(tmp_path: Path) -> StreamLake:
    """A stream whose timeline is too long for a snapshot."""
    lake = new_lake(tmp_path, 12, Timeline(FIRST, FIRST, offsets_at(0, 12)))
    ends = {h: c.ends for h, c in cuts_of(100, 12).items()}
    publish(lake, timeline=replace(lake.state().timeline, boundaries=ends))
    return lake


# Limits


@pytest.mark.parametrize(
    ("hours", "partitions"),
    [
        (744, 12), pytest.param(8_760, 12, marks=pytest.mark.full), (744, 100), (48, 500),
        (48, 1_000), (1, 3_000),
    ],
)  # fmt: skip
def test_waiting_hours_leave_a_snapshot_small(tmp_path: Path, hours: int, partitions: int) -> None:
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
def test_sealed_hours_leave_a_snapshot_small(tmp_path: Path, hours: int, partitions: int) -> None:
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
def test_a_batch_year_leaves_a_snapshot_small(tmp_path: Path, hours: int, partitions: int) -> None:
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
    folder = f"{long.table().location()}/data/ingest_hour={FIRST}"
    paths = [f"{folder}/{new_id()}.parquet" for _ in range(1_000)]
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
        ranges = {"0": [10 * i, 10 * i + 7]}
        entry = {
            "at": str(i),
            "class": "retention",
            "ranges": ranges,
            "hours": [shift(FIRST, i // 6)],
        }
        said = {"speed": {LOST: lost_entries(state, [entry])}}
        state = replace(state, branch_properties=state.branch_properties | said)
    entries = json.loads(state.branch_properties["speed"][LOST])
    counts = [e.get("offsets", e["ranges"]["0"][1] - e["ranges"]["0"][0]) for e in entries]
    assert sum(counts) == 7 * 1_000, "a loss is no longer reported"
    assert len(entries) <= 167 + REMEMBERED_LOSSES
    assert (entries[0]["hours"], entries[0]["offsets"]) == ([FIRST], 42)
    assert entries[0]["ranges"] == {"0": [0, 57]}
    table = publish(long, changes=(Change("speed", properties={LOST: json.dumps(entries)}),))
    assert sizes(table)["speed"] <= ALLOWED


def test_old_losses_of_hours_that_are_accepted_are_left_to_the_ledger() -> None:
    hours = [shift(FIRST, i) for i in range(REMEMBERED_LOSSES + 2)]
    entries = [
        {"at": str(i), "class": "retention", "ranges": {"0": [i, i + 1]}, "hours": [hour]}
        for i, hour in enumerate(hours)
    ]
    state = new_state(
        Timeline(FIRST, shift(FIRST, 999), {0: 999}),
        accepted={FIRST: Accepted(1, Cut("t", {0: (0, 1)}))},
        branch_properties={"speed": {LOST: json.dumps(entries)}},
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
    of_each = dict.fromkeys(range(partitions), Account(100_000, 99_990, 1, 9, {}))
    account = HourAccount(partitions=of_each)
    row = ledger.decision(FIRST, "accepted", 1, cuts[FIRST], NOW, served="batch", account=account)
    path = f"{lake.table().location()}/data/ingest_hour={FIRST}/{new_id()}.parquet"
    letters = {
        "id": new_id(), "at": NOW.isoformat(), "layer": "batch", "hour": FIRST, "revision": 1,
        "paths": [path],
    }  # fmt: skip
    changes = (Change("batch", properties=accepted), Change("main"))
    publish(lake, changes=changes, decisions=(row,), dead_letters=(letters,))
    state, keep = [], expiry.plan_expiry.__defaults__[0]  # type: ignore[index]
    for i in range(4):
        files = named_files(lake, last, 1)
        at = Position(TOPIC, offsets_at(REMEMBERED_HOURS + i, partitions))
        head = lake.state().heads["main"]
        tag = Tag(f"main-2026-11-2{i}T00", head, 604_800_000)
        changes = (Change("speed", files), Change("main", files))
        table = publish(lake, at, changes=changes, tags=(tag,))
        state.append(state_of(table).keys())
        content = Path(table.metadata_location.removeprefix("file://")).read_text()
    assert state[1:] == state[:1] * 3, "properties are written with every micro-batch"
    last_ones = json.loads(content)["snapshots"][-4:]
    snapshot = max(len(json.dumps(s, separators=(",", ":"))) for s in last_ones)
    tag_bytes, log_bytes, past_bytes = 150, 70, 200
    whole = (keep + 168) * (snapshot + log_bytes) + 168 * tag_bytes + 100 * past_bytes
    assert whole + state_of_a_week(partitions) <= most


def state_of_a_week(partitions: int) -> int:
    """The bytes of `main`'s properties at each hour of a week: one is accepted, one forgotten."""
    cuts = cuts_of(REMEMBERED_HOURS + 168, partitions)
    hours = list(cuts)
    needed: dict[str, str] = {}
    for i in range(168):
        remembered = {h: to_json(Accepted(1, cuts[h])) for h in hours[i : i + REMEMBERED_HOURS]}
        at, covered = i + REMEMBERED_HOURS, hours[i + REMEMBERED_HOURS - 24]
        timeline = Timeline(
            FIRST, shift(FIRST, at), offsets_at(at, partitions), covered_from=covered
        )
        accepted = json.dumps(remembered, separators=(",", ":"))
        said = {ACCEPTED: accepted, TIMELINE: timeline.to_json()}
        needed |= state_properties.plan_summary(said, {})[1]
    return sum(len(k) + len(v) + len('"":"",') for k, v in needed.items())


def test_dead_letters_of_each_micro_batch_set_no_property(long: StreamLake) -> None:
    before, waits = state_of(long.table()), frozenset[str]()
    for i in range(3):
        path = f"{long.table().location()}/{i}"
        letters = {"id": f"{i}", "at": NOW.isoformat(), "layer": "speed", "paths": [path]}
        at, confirmed = Position(TOPIC, offsets_at(i, 12)), Confirmed(letters=waits)
        publish(long, at, dead_letters=(letters,), confirmed=confirmed)
        waits = frozenset({f"{i}"})
        assert long.state().dead_letters == (letters,)
    assert state_of(long.table()) == before


# Place and lifetime of the properties


def test_values_that_change_with_every_publish_are_in_the_snapshot() -> None:
    """The hazard: properties for each micro-batch and branch. The module names these words."""
    own = {POSITION, CONTENT, MERGED, MEASURED, DEAD_LETTERS, DONE, snapshots.PUBLISH_ID}
    own |= {COMPLETE_THROUGH, FRESH_THROUGH}
    assert own == set(state_properties._SUMMARY_LIMITS)


@pytest.mark.parametrize("seed", range(20))
def test_any_state_of_a_branch_is_read_back_unchanged(long: StreamLake, seed: int) -> None:
    drawn = random.Random(seed)
    hours = cuts_of(drawn.randrange(1, 60), drawn.randrange(1, 300))
    objects: dict[str, Any] = {
        ACCEPTED: {h: to_json(Accepted(1, c)) for h, c in hours.items()},
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
    table = Table("t", metadata, "", long.table().io, long.table().catalog)
    forget_what_was_read()
    assert state_properties.load_all(table, summary) == said
    unused = state_properties.plan_unused({**needed, STATE + "0" * 16: "x"}, {}, [summary])
    assert unused == (STATE + "0" * 16,)


@pytest.mark.parametrize(
    ("hours", "partitions"), [pytest.param(8_760, 12, marks=pytest.mark.full), (744, 100)]
)
def test_an_hour_more_of_a_long_backlog_changes_few_properties(hours: int, partitions: int) -> None:
    """The hazard: each of a hundred snapshots of a backlog needs a megabyte of its own."""
    cuts = list(cuts_of(hours + 1, partitions).items())
    said = (
        json.dumps({h: to_json(Accepted(1, c)) for h, c in some}, separators=(",", ":"))
        for some in (cuts[:-1], cuts[1:])
    )
    one, more = (state_properties.plan_summary({ACCEPTED: text}, {})[1] for text in said)
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


def test_removed_files_refuse_a_publish(long: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: a publish says again what an older snapshot said, so it sets no property; before
    it lands, another commit expires that snapshot and removes the property."""
    older = long.state().timeline
    publish(long, timeline=replace(older, skipped=tuple(shift(FIRST, i) for i in range(200))))
    state = long.state()
    again = to_commit(state, Publish(new_id(), (Change("speed"), Change("main")), older), NOW)
    updates = prepare(state.table, replace(again, expire=()), NOW).updates
    properties = [u.updates for u in updates if isinstance(u, SetPropertiesUpdate)]
    assert not [k for updated in properties for k in updated if STATE in k]
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
    foreign = {"owner": "x", "anabranch.turn.1": "{}"}
    long.table().transaction().set_properties(foreign).commit_transaction()
    long.move("batch")
    properties = long.table().properties
    assert (properties["owner"], properties["anabranch.turn.1"]) == ("x", "{}")


def test_an_idle_stream_is_read_after_every_unreferenced_file_is_deleted(long: StreamLake) -> None:
    """Iceberg's remove_orphan_files leaves only metadata, manifest lists, manifests and data."""
    before = long.state()
    table = long.table()
    named = {p.removeprefix("file://") for p in references(table)}
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
    found = rf"expected its property {key}, .*; the state of main, speed is lost: set the prop"
    with pytest.raises(Terminal, match=found):
        long.state()


def test_a_lost_branch_begins_again_with_the_state_of_main(long: StreamLake) -> None:
    before = long.state()
    long.table().manage_snapshots().remove_branch("speed").commit()
    assert admin.add_branches(long.lake, long.name, {}) == ["speed"]
    forget_what_was_read()
    assert long.state().timeline == before.timeline


def test_the_first_publish_time_of_a_position_is_read(long: StreamLake) -> None:
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
        return cast(Table, table), {state_properties._ROOT: digest}

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
