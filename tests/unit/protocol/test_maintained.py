"""The table records the runs of maintenance: bounded, and each run, also beside other commits."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from lakes import StreamLake, new_lake

from anabranch.iceberg.commits import Outcome
from anabranch.iceberg.snapshots import heads
from anabranch.protocol.measured import (
    KEPT,
    MAINTAINED,
    MaintainedTable,
    MaintenanceRun,
    Size,
    newest_complete,
    plan_record,
    read_runs,
    record_run,
)

AT = datetime(2026, 11, 21, 2, 40, tzinfo=UTC)
RUN = MaintenanceRun(
    AT,
    AT + timedelta(seconds=9),
    24,
    {
        "games.events": MaintainedTable(96, 0, Size(3, 4096), Size(1, 10)),
        "games.events_hours": MaintainedTable(5, 31),
    },
)


def run(minutes: int, **failed: str) -> MaintenanceRun:
    return replace(
        RUN,
        began=AT + timedelta(minutes=minutes),
        ended=AT + timedelta(minutes=minutes),
        failed=failed,
    )


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> StreamLake:
    return new_lake(tmp_path_factory.mktemp("lake"))


def test_a_run_is_recorded_unchanged_and_no_head_moves(lake: StreamLake) -> None:
    before = heads(lake.table())
    record_run(lake.lake, lake.name, RUN)
    assert read_runs(lake.table().properties)[0] == RUN
    assert RUN.whole == MaintainedTable(101, 31, Size(3, 4096), Size(1, 10))
    assert heads(lake.table()) == before


def test_two_runs_that_end_together_are_both_recorded(lake: StreamLake) -> None:
    table = lake.table()
    first, second = run(10), run(10, orphans="expected an answer, found none")
    for id, ended in (("a", first), ("b", second)):
        assert lake.lake.commit(table, plan_record(table.properties, id, ended)) is Outcome.LANDED
    assert {first.to_json(), second.to_json()} <= {
        r.to_json() for r in read_runs(lake.table().properties)
    }


def test_the_newest_are_kept_and_the_newest_that_did_all_its_steps(lake: StreamLake) -> None:
    whole = run(20)
    record_run(lake.lake, lake.name, whole)
    for minute in range(21, 21 + 2 * KEPT):
        record_run(lake.lake, lake.name, run(minute, **{"speed hours": "x" * 10_000}))
    properties = lake.table().properties
    reported = {key: text for key, text in properties.items() if key.startswith(MAINTAINED)}
    runs = read_runs(properties)
    assert len(runs) == KEPT + 1 and newest_complete(runs) == whole == runs[-1]
    assert [r.ended for r in runs] == sorted((r.ended for r in runs), reverse=True)
    assert sum(map(len, reported.values())) < 12_000, "a metadata file grows by it"


def test_records_of_another_version_are_ignored_and_removed_by_the_next_run() -> None:
    properties = {
        f"{MAINTAINED}.old": '{"by": "a version to come"}',
        f"{MAINTAINED}.bad": "{",
        "comment": "games",
    }
    assert read_runs(properties) == ()
    commit = plan_record(properties, "new", RUN)
    assert set(commit.remove_properties) == {f"{MAINTAINED}.old", f"{MAINTAINED}.bad"}
