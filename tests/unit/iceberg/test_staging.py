"""Staged rows are published only while no program can have deleted their files."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lakes import FIRST, StreamLake, new_lake
from no_spark import NO_SPARK

from anabranch.common.errors import JvmGone, Transient
from anabranch.common.fail_points import Step
from anabranch.iceberg import lake
from anabranch.iceberg.clock import Clock
from anabranch.iceberg.commits import Change, Commit, Outcome
from anabranch.iceberg.expiry import expired_tags, plan_expiry
from anabranch.iceberg.lake import PREPARED_WITHIN
from anabranch.iceberg.snapshots import READING, find_staged, heads
from anabranch.iceberg.staging import NAMED_WITHIN, WITHIN, count_deaths, held_snapshots, stage
from anabranch.job import Job
from anabranch.kafka.client import KafkaAdapter
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol.publish import new_id
from anabranch.protocol.state import State
from batch_layer.rebuild import Rebuilder, RebuildRequest, Result


class Frame:
    """Stands where Spark writes a frame: a staged snapshot of one row, after so much time."""

    def __init__(self, lake: StreamLake, takes: timedelta) -> None:
        self._lake, self._takes = lake, takes
        self._now = datetime.now(UTC)
        self._said: dict[str, str] = {}
        # Of a machine that slept: all its clocks go on.
        lake.lake.__dict__["clock"] = Clock(None, lambda: self._now, lambda: self._now.timestamp())
        conf = SimpleNamespace(set=self._said.__setitem__, unset=self._said.pop)
        self.sparkSession = SimpleNamespace(conf=conf)

    def writeTo(self, table: str) -> Any:
        writer = SimpleNamespace(append=self._append)
        writer.option = lambda *_: writer
        return writer

    def _append(self) -> None:
        self._lake.stage([(FIRST, 0, 0)], self._said["spark.wap.id"])
        self._now += self._takes


def test_files_that_took_too_long_to_stage_are_staged_again(tmp_path: Path) -> None:
    """The hazard: a process sleeps for days between files and their snapshot, and orphan removal
    takes them: no head moves, and what is published then lacks its files."""
    lake = new_lake(tmp_path)
    late: Any = Frame(lake, WITHIN + timedelta(seconds=1))
    with pytest.raises(Transient, match="orphan removal may have deleted its files"):
        stage(late, lake.lake, "lake", lake.name, "late")
    assert find_staged(lake.table(), "late") is None
    in_time: Any = Frame(lake, WITHIN)
    assert stage(in_time, lake.lake, "lake", lake.name, "in time").rows == 1


def test_it_is_noticed_before_the_youngest_orphan_is_deleted() -> None:
    from pydantic import ValidationError

    from anabranch.config import Maintain

    assert timedelta(days=1) > WITHIN
    least_age_of_others = timedelta(hours=1)
    assert least_age_of_others > NAMED_WITHIN + PREPARED_WITHIN
    with pytest.raises(ValidationError):
        Maintain(orphans_after=timedelta(hours=23))


# Snapshots that a rebuild reads outlive concurrent publishes of the speed layer.

HOUR = "2026-11-21T00"


def publish_and_expire(one: StreamLake, offset: int) -> None:
    """Publish and expire as the speed layer does, from its own catalog, with two snapshots kept."""
    one.serve([(HOUR, 0, offset)], {0: offset + 1})
    other = one.again()
    table = other.load(one.name)
    expire = plan_expiry(table, None, datetime.now(UTC), keep=2)
    commit = Commit(new_id(), heads(table), (Change("speed"), Change("main")), expire=expire)
    assert other.commit(table, commit) is Outcome.LANDED


def snapshots(one: StreamLake) -> set[int]:
    return {s.snapshot_id for s in one.table().snapshots()}


def reading(one: StreamLake) -> list[str]:
    return [name for name in one.table().metadata.refs if name.startswith(READING)]


def test_the_heads_that_a_rebuild_reads_are_not_expired_while_it_runs(tmp_path: Path) -> None:
    one = new_lake(tmp_path)
    publish_and_expire(one, 0)
    read = set(one.state().heads.values())
    # Without a hold the heads soon expire, which proves the race.
    lost = set(one.state().heads.values())
    publish_and_expire(one, 1)
    publish_and_expire(one, 2)
    assert not lost <= snapshots(one)
    expired = pytest.raises(Transient, match="found it expired meanwhile; try again")
    with expired, held_snapshots(one.lake, one.name, read):
        raise AssertionError("never entered")

    read = set(one.state().heads.values())
    with held_snapshots(one.lake, one.name, read):
        for offset in range(3, 6):
            publish_and_expire(one, offset)
        assert read <= snapshots(one) and len(reading(one)) == len(read)
    assert not reading(one)
    publish_and_expire(one, 6)
    assert not read <= snapshots(one)


def test_a_rebuild_holds_its_first_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed = {HOUR: Cut("t", {0: (0, 9)})}
    one = new_lake(tmp_path, timeline=Timeline(HOUR, shift(HOUR, 1), {0: 9}, sealed=sealed))
    publish_and_expire(one, 0)

    def build(
        self: Rebuilder, state: State, hour: str, cut: Cut, before: int, order: RebuildRequest
    ) -> Result:
        """Replace the passes over an hour, which need Spark."""
        for offset in range(1, 4):
            publish_and_expire(one, offset)
        assert set(state.heads.values()) <= snapshots(one)
        return Result(hour, "unchanged", before)

    monkeypatch.setattr(Rebuilder, "_rebuild", build)
    job = Job(one.environment, one.stream, one.lake, KafkaAdapter(one.environment.kafka))
    assert Rebuilder(job, NO_SPARK).rebuild(HOUR) == Result(HOUR, "unchanged", 0)
    assert not reading(one)


def test_a_publish_that_was_decided_before_a_hold_lands_after_it(tmp_path: Path) -> None:
    one = new_lake(tmp_path)
    staged = one.stage([(HOUR, 0, 0)])
    state = one.state()
    publish = one.speed(staged, {0: 1}, state)
    with held_snapshots(one.lake, one.name, state.heads.values()):
        one.land(publish, state)
    assert one.rows("main") == [(HOUR, 0, 0)]


def test_tags_of_a_killed_rebuild_are_dropped_at_their_age(tmp_path: Path) -> None:
    one = new_lake(tmp_path)
    held = held_snapshots(one.lake, one.name, one.state().heads.values())
    held.__enter__()
    now = one.table().metadata.last_updated_ms / 1000
    assert not expired_tags(one.table(), datetime.fromtimestamp(now + 3600, UTC))
    dropped = expired_tags(one.table(), datetime.fromtimestamp(now + 86_400, UTC))
    assert set(dropped) == set(reading(one)) != set()
    held.__exit__(None, None, None)
    assert not reading(one)


def test_reads_that_died_are_counted_by_what_they_read(tmp_path: Path) -> None:
    one = new_lake(tmp_path)
    snapshots = one.state().heads.values()
    for _ in range(2):
        with pytest.raises(JvmGone), held_snapshots(one.lake, one.name, snapshots, HOUR):
            raise JvmGone
        # An error that does not end the process is no death.
        with pytest.raises(ValueError), held_snapshots(one.lake, one.name, snapshots, HOUR):
            raise ValueError
        with held_snapshots(one.lake, one.name, snapshots, HOUR):
            pass
    assert count_deaths(one.table(), HOUR) == 2
    assert count_deaths(one.table(), "2026-11-20T13") == 0


def test_no_fail_point_is_a_rebuilds_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: tests that kill the batch layer at its publish would kill it at its tags."""
    one, reached = new_lake(tmp_path), list[Step]()
    publish_and_expire(one, 0)
    monkeypatch.setattr(lake, "reach", reached.append)
    with held_snapshots(one.lake, one.name, set(one.state().heads.values())):
        assert reading(one)
    assert reached == []
    publish_and_expire(one, 1)
    assert reached[:4] == [
        Step.COMMIT_PREPARED, Step.COMMIT_REQUEST_LOST, Step.COMMIT_ANSWER_LOST, Step.COMMIT_LANDED,
    ]  # fmt: skip
