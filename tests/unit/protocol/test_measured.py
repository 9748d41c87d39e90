"""Measurements of jobs: totals in a property of `main`, and their content for the metrics."""

import json
import math
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
from accepted_hours import HOURS, accept, four_hours
from lakes import FIRST, StreamLake, new_lake
from proofs import bury
from waiting import wait_for

from anabranch import job
from anabranch.common import counters
from anabranch.common.counters import COMMITS, CPU, REFUSED, RETRIES, S3_REQUESTS, TALLY, Tally
from anabranch.iceberg import commits, snapshots
from anabranch.offsets.hours import start_of
from anabranch.operations.reports import maintenance
from anabranch.protocol import measured, watermarks
from anabranch.protocol.measured import COMMIT, MAINTAINED, MEASURED, READABLE, STAGE, Meter, Size
from speed_layer import plan

NOW = start_of(FIRST) + timedelta(minutes=1)


def reported(
    meter: Meter, main: dict[str, str], *seconds: tuple[str, float]
) -> dict[str, measured.Measured]:
    main |= meter.to_properties(main, seconds)
    return dict(measured.read_measured(main[MEASURED]))


def test_a_publish_contains_the_measurements_since_the_last_one_that_landed() -> None:
    tally, main = Tally(), dict[str, str]()
    tally.count(RETRIES, "s3", 99)
    # The 99 retries belong to an earlier job in the same process.
    speed, batch = Meter("speed", tally), Meter("batch", Tally())
    tally.count(RETRIES, "s3", 2)
    refused = speed.to_properties(dict(main), [(STAGE, 0.4)])
    # Refused: the table has none of it, and the next publish has all of it.
    tally.count(REFUSED)
    found = reported(speed, main, (STAGE, 0.4))["speed"]
    assert found.counts == {(RETRIES, "s3"): 2, (REFUSED, ""): 1}
    assert found.durations == {STAGE: measured.Durations(0.4, {0.5: 1})}
    assert measured.read_measured(refused[MEASURED])["speed"].counts == {(RETRIES, "s3"): 2}
    speed.landed(0.2)
    tally.count(RETRIES, "kafka")
    reported(batch, main, (STAGE, 90))
    both = reported(speed, main, (STAGE, 3.5), (STAGE, 1e9), (STAGE, -1))
    assert both["speed"].counts == {(RETRIES, "s3"): 2, (REFUSED, ""): 1, (RETRIES, "kafka"): 1}
    assert both["speed"].durations[STAGE].counts == {0.1: 1, 0.5: 1, 5: 1, math.inf: 1}
    assert both["speed"].durations[COMMIT] == measured.Durations(0.2, {0.25: 1})
    assert both["batch"].durations[STAGE].sum == 90


def test_a_streams_threads_count_into_its_own_tally_and_the_processs() -> None:
    before, one, other = TALLY.totals(), Tally(), Tally()
    with counters.counting(one):
        TALLY.count(S3_REQUESTS, "GetObject", 2)
        with counters.counting(other):
            TALLY.count(S3_REQUESTS, "GetObject", 5)
        # A thread that it starts belongs to no stream, unless it is of a stream's pool.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(TALLY.count, S3_REQUESTS, "PutObject").result()
        with ThreadPoolExecutor(1, initializer=counters.count_into, initargs=(one,)) as pool:
            pool.submit(TALLY.count, COMMITS).result()
    TALLY.count(S3_REQUESTS, "GetObject")
    assert one.totals() == {(S3_REQUESTS, "GetObject"): 2, (COMMITS, ""): 1}
    assert other.totals() == {(S3_REQUESTS, "GetObject"): 5}
    counted = TALLY.totals() - before
    assert (counted[S3_REQUESTS, "GetObject"], counted[S3_REQUESTS, "PutObject"]) == (8, 1)
    assert counted[COMMITS, ""] == 1


def cpu_in_all() -> int:
    """The CPU time of this process, its ended children, and others that tests left running."""
    running = psutil.Process().children(recursive=True)
    return round(1000 * (sum(os.times()[:4]) + sum(map(measured._seconds, running))))


def test_a_processs_cpu_time_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    burn = [sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass\ninput()"]
    monkeypatch.setattr(measured, "_EVERY_SECONDS", 0.0)
    meter, main = Meter("batch"), dict[str, str]()
    before = cpu_in_all()
    reported(meter, main)
    meter.landed(0.1)
    first = measured.read_measured(main[MEASURED])["batch"].counts[CPU, ""]

    def now() -> int:
        return reported(meter, dict(main))["batch"].counts[CPU, ""]

    with subprocess.Popen(burn, stdin=subprocess.PIPE) as child:
        wait_for(lambda: now() >= first + 300, "the child's CPU time", 30)
        assert child.poll() is None
        child.communicate(b"\n")
    # A child that has ended stays counted, and is not counted again.
    after = reported(meter, main)["batch"].counts[CPU, ""]
    assert first + 300 <= after <= first + cpu_in_all() - before + 150
    # A stream of many in a process has none of it.
    assert (CPU, "") not in reported(Meter("speed", Tally()), {})["speed"].counts


def test_cpu_time_is_counted_once_and_not_at_each_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = "import time\nwhile time.process_time() < 0.4: pass"  # the kernel counts ticks
    monkeypatch.setattr(measured, "_counted", 0)
    monkeypatch.setattr(measured, "_at", float("-inf"))
    before = TALLY.totals()[CPU, ""]
    measured.count_cpu()
    counted = TALLY.totals()[CPU, ""]
    assert 0 < counted - before <= measured.cpu_ms()
    subprocess.run([sys.executable, "-c", busy], check=True)
    measured.count_cpu()
    assert TALLY.totals()[CPU, ""] == counted
    monkeypatch.setattr(measured, "_at", float("-inf"))
    measured.count_cpu()
    assert TALLY.totals()[CPU, ""] - counted >= 300


def test_however_long_a_stream_runs_the_property_stays_short() -> None:
    main: dict[str, str] = {}
    for layer in ("speed", "batch"):
        tally = Tally()
        meter = Meter(layer, tally)  # type: ignore[arg-type]
        for service in ("kafka", "s3", "catalog", "registry", "other"):
            tally.count(RETRIES, service, 10**9)
        for name in (READABLE, STAGE, "publish", COMMIT):
            reported(meter, main, *[(name, bound) for bound in measured.BOUNDS[:-1]])
    assert len(main[MEASURED]) < 2_500


@pytest.mark.parametrize(
    ("ago", "fresh", "waited"),
    [(10, None, 10), (10, 40, 10), (3600, 30, 30), (-60, None, 0)],
    ids=["the first publish", "since", "stamped long ago", "stamped ahead"],
)
def test_the_oldest_rows_wait(one: StreamLake, ago: int, fresh: int | None, waited: float) -> None:
    # The rows are stamped with the first moment of the day.
    rows, now = one.stage([(FIRST, 0, 0)]), start_of(FIRST) + timedelta(seconds=ago)
    stamp = None if fresh is None else (now - timedelta(seconds=fresh)).isoformat()
    main = {watermarks.FRESH_THROUGH: stamp} if stamp else {}
    state = replace(one.state(), branch_properties={"main": main})
    hours = {f.file_path: FIRST for f in rows.files}
    assert plan.readable_after(state, plan.StagedBatch("t", {}, rows, None), hours, now) == waited
    # No row is for `main`: readers have the hour from the batch layer, or the batch has no rows.
    served = replace(state, overrides={FIRST: "batch"})
    assert plan.readable_after(served, plan.StagedBatch("t", {}, rows, None), hours, now) is None
    assert (
        plan.readable_after(state, plan.StagedBatch("t", {}, one.stage([]), None), {}, now) is None
    )


def reader(one: StreamLake) -> maintenance.ContentReader:
    return maintenance.ContentReader(job.Job(one.environment, one.stream, one.lake, None))  # type: ignore[arg-type]


def test_files_of_main_by_layer_and_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = four_hours(tmp_path)
    running = "2026-11-21T04"
    one.publish(one.speed(one.stage([(running, 0, 40), (running, 0, 41)]), {0: 42}))
    bury(one, [(running, 0, 90), (running, 0, 91)], ["main"])
    bury(one, [(HOURS[3], 0, 92), (HOURS[0], 0, 93)], ["main"])
    for hour in HOURS[:2]:
        accept(one, hour, 10)
    asked = reader(one)
    found = asked.read(one.state(), start_of(running) + timedelta(minutes=5))
    # Dead letters are those of the newest hours only.
    assert found.dead_letters == {running: {"malformed": 2}, HOURS[3]: {"malformed": 1}}
    # No file is read twice.
    monkeypatch.setattr(maintenance, "_reasons", None)
    assert asked.read(one.state(), start_of(running) + timedelta(minutes=6)) == found


def test_an_hour_of_more_dead_letters_than_one_reading_opens_is_left_to_the_next(
    one: StreamLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for offset in range(3):
        bury(one, [(FIRST, 0, offset)], ["main"])
    monkeypatch.setattr(maintenance, "_OPENED", 2)
    asked = reader(one)
    assert asked.read(one.state(), NOW).dead_letters == {}
    assert asked.read(one.state(), NOW).dead_letters == {FIRST: {"malformed": 3}}


def test_every_publish_contains_the_measurements(tmp_path: Path) -> None:
    one = four_hours(tmp_path)
    state = one.state()
    said = Meter("speed", Tally()).to_properties(state.branch_properties["main"], [(READABLE, 1.5)])
    changes = (commits.Change("speed"), commits.Change("main", properties=said))
    one.change(*changes, position=state.position, state=state)
    accept(one, HOURS[0], 10)
    one.move("main")
    one.move("speed")
    found = json.loads(snapshots.branch_properties(one.table(), "main")[MEASURED])["speed"][
        "seconds"
    ]
    assert found == {READABLE: [1.5, {"2": 1}]}
    shown = reader(one).read(one.state(), NOW).measured["speed"].durations[READABLE]
    assert shown == measured.Durations(1.5, {2: 1})


# The table records the runs of maintenance: bounded, and each run, also beside other commits.

AT = datetime(2026, 11, 21, 2, 40, tzinfo=UTC)
EVENTS = measured.MaintainedTable(96, 0, Size(3, 4096), Size(1, 10))
TABLES = {"games.events": EVENTS, "games.events_hours": measured.MaintainedTable(5, 31)}
RUN = measured.MaintenanceRun(AT, AT + timedelta(seconds=9), 24, TABLES)


def run(minutes: int, **failed: str) -> measured.MaintenanceRun:
    at = AT + timedelta(minutes=minutes)
    return replace(RUN, began=at, ended=at, failed=failed)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> StreamLake:
    return new_lake(tmp_path_factory.mktemp("lake"))


def test_a_run_is_recorded_unchanged_and_no_head_moves(lake: StreamLake) -> None:
    before = snapshots.heads(lake.table())
    measured.record_run(lake.lake, lake.name, RUN)
    assert measured.read_runs(lake.table().properties)[0] == RUN
    assert RUN.whole == measured.MaintainedTable(101, 31, Size(3, 4096), Size(1, 10))
    assert snapshots.heads(lake.table()) == before


def test_two_runs_that_end_together_are_both_recorded(lake: StreamLake) -> None:
    table = lake.table()
    first, second = run(10), run(10, orphans="expected an answer, found none")
    for id, ended in (("a", first), ("b", second)):
        assert (
            lake.lake.commit(table, measured.plan_record(table.properties, id, ended))
            is commits.Outcome.LANDED
        )
    found = {first.to_json(), second.to_json()}
    assert found <= {r.to_json() for r in measured.read_runs(lake.table().properties)}


def test_the_newest_are_kept_and_the_newest_that_did_all_its_steps(lake: StreamLake) -> None:
    whole = run(20)
    measured.record_run(lake.lake, lake.name, whole)
    for minute in range(21, 21 + 2 * measured.KEPT):
        measured.record_run(lake.lake, lake.name, run(minute, **{"speed hours": "x" * 10_000}))
    properties = lake.table().properties
    runs, texts = (
        measured.read_runs(properties),
        [properties[k] for k in properties if k.startswith(MAINTAINED)],
    )
    assert len(runs) == measured.KEPT + 1 and measured.newest_complete(runs) == whole == runs[-1]
    assert [r.ended for r in runs] == sorted((r.ended for r in runs), reverse=True)
    assert sum(map(len, texts)) < 12_000, "a metadata file grows by it"


def test_records_of_another_version_are_ignored_and_removed_by_the_next_run() -> None:
    old = {f"{MAINTAINED}.old": '{"by": "a version to come"}', f"{MAINTAINED}.bad": "{"}
    properties = old | {"comment": "games"}
    assert measured.read_runs(properties) == ()
    commit = measured.plan_record(properties, "new", RUN)
    assert set(commit.remove_properties) == {f"{MAINTAINED}.old", f"{MAINTAINED}.bad"}
