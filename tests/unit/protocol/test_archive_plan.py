"""Each record is archived once, also with two writers, and beside an erasure or an expiry."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from lakes import FIRST, Row, StreamLake, new_lake, record, rows, stage

from anabranch.iceberg.commits import Outcome
from anabranch.iceberg.manifests import files_by_hour
from anabranch.iceberg.snapshots import Staged
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol import archive, erasure
from anabranch.protocol.publish import new_id
from anabranch.protocol.registers import Erasure, Expired, Hold, Holds
from anabranch.protocol.state import State
from batch_layer.archive import land_archive

SECOND = shift(FIRST, 1)
CUT = Cut("t", {0: (0, 10)})
NOW = datetime(2026, 11, 21, 2, tzinfo=UTC)
RECORDS = [(FIRST, 0, 0), (FIRST, 0, 1)]


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    made = new_lake(tmp_path, timeline=Timeline(FIRST, SECOND, {0: 10}, sealed={FIRST: CUT}))
    made.add_archive()
    return made


def staged(lake: StreamLake, records: list[Row]) -> Staged:
    return stage(lake.lake, lake.stream.archive_table, [record(*one) for one in records])


def land(
    lake: StreamLake,
    one: Staged,
    hour: str = FIRST,
    state: State | None = None,
    had: tuple[str, ...] = (),
) -> bool:
    return land_archive(lake.lake, lake.stream, one, had, hour, CUT, state or lake.state())


def archived(lake: StreamLake) -> list[Row]:
    return rows(lake.lake, lake.stream.archive_table, "main")


def record_erasure(lake: StreamLake) -> None:
    """Record an erasure in the branches, as `anabranch erase` does before the archive's head."""
    since, until = lake.state().timeline.since, NOW + timedelta(days=30)
    one = Erasure("e", "n", NOW, until, since, "t", {0: 10})
    publish = erasure.plan_request(lake.state(), one, new_id())
    assert publish is not None and lake.publish(publish) is Outcome.LANDED


def move_head(lake: StreamLake) -> None:
    table = lake.lake.load(lake.stream.archive_table)
    files = {path: f for of in files_by_hour(table, "main").values() for path, f in of.items()}
    commit = archive.plan_searched(table, files, files, new_id(), NOW)
    assert commit is not None and lake.lake.commit(table, commit) is Outcome.LANDED


def test_of_two_writers_of_an_hour_one_lands_others_go_on(lake: StreamLake) -> None:
    one, other, later = (staged(lake, records) for records in (RECORDS, RECORDS, [(SECOND, 0, 10)]))
    assert land(lake, later, SECOND)
    assert land(lake, one)
    # The second writer looked for the hour's records before the first writer's arrived.
    assert not land(lake, other)
    assert archived(lake) == [*RECORDS, (SECOND, 0, 10)]
    files = files_by_hour(lake.lake.load(lake.stream.archive_table), "main")[FIRST]
    assert land(lake, staged(lake, [(FIRST, 0, 2)]), had=tuple(files))
    assert archived(lake) == [*RECORDS, (FIRST, 0, 2), (SECOND, 0, 10)]


def test_records_that_were_read_before_an_erasure_are_not_archived(lake: StreamLake) -> None:
    before, one = lake.state(), staged(lake, RECORDS)
    record_erasure(lake)
    assert not land(lake, one, state=before)
    assert land(lake, one) and archived(lake) == RECORDS


def test_an_erasure_between_a_writers_look_and_its_commit_refuses_it(lake: StreamLake) -> None:
    one = staged(lake, RECORDS)
    table = lake.lake.load(lake.stream.archive_table)
    is_current = archive.is_current(lake.state(), lake.state(), FIRST, CUT)
    commit = archive.plan_archive(table, one, (), (), is_current, NOW)
    assert commit is not None
    record_erasure(lake)
    move_head(lake)
    assert lake.lake.commit(table, commit) is Outcome.REFUSED
    assert archived(lake) == []


def test_hours_leave_when_they_are_old_and_not_held_or_have_expired(lake: StreamLake) -> None:
    state, late = lake.state(), NOW + timedelta(days=2)
    third = shift(FIRST, 2)
    expected = (FIRST, SECOND)
    assert archive.plan_due(state, {FIRST, SECOND, third}, timedelta(days=2), late) == expected
    held = replace(state, holds=Holds((Hold(FIRST, FIRST, "somebody", NOW, "case 1"),)))
    assert archive.plan_due(held, {FIRST, SECOND, third}, timedelta(days=2), late) == (SECOND,)
    assert archive.plan_due(state, {FIRST}, None, late) == ()
    expired = replace(held, expired=Expired(SECOND, (), NOW))
    assert archive.plan_due(expired, {FIRST, SECOND}, None, late) == (FIRST,)
    # One that has expired is not archived again.
    gone = replace(state, expired=Expired(SECOND, (), NOW))
    assert gone.is_expired(FIRST) and not archive.is_current(state, gone, FIRST, CUT)


def test_files_that_left_meanwhile_or_are_too_old_are_written_again(lake: StreamLake) -> None:
    assert land(lake, staged(lake, RECORDS))
    table = lake.lake.load(lake.stream.archive_table)
    [(path, file)] = files_by_hour(table, "main")[FIRST].items()
    there = {"main": {FIRST: {path: file}}}
    plan = partial(erasure.plan_letters, table, lake.state(), {path: None})
    assert plan({"main": {}}, new_id(), NOW, NOW) is None
    assert plan(there, new_id(), NOW - timedelta(hours=1), NOW) is None
    assert archive.plan_searched(table, {path}, (), new_id(), NOW) is None
    now = datetime.now(UTC)
    commit = plan(there, new_id(), now, now, archive.removed_now(now))
    assert commit is not None and lake.lake.commit(table, commit) is Outcome.LANDED
    after = lake.lake.load(lake.stream.archive_table)
    assert archived(lake) == [] and archive.removed_at(after) == now
    # Snapshots that have the records stay for a day.
    assert archive.plan_remove(after, (), new_id(), now) is None
    later = archive.plan_remove(after, (), new_id(), now + timedelta(days=2))
    assert later is not None and later.expire
