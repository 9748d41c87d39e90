"""Hours beside expired ones: they are replayed, decided again, and compared with them."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from accepted_hours import HOURS, accept, cut, four_hours
from brokers import Broker
from lakes import FIRST, StreamLake, new_lake
from no_spark import NO_SPARK, Hours
from proofs import NOW

from anabranch.common.errors import Refused, Unexpected
from anabranch.job import Job
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol import ledger, ledger_row, sealing
from anabranch.protocol.publish import new_id
from anabranch.protocol.retention import plan_expire
from batch_layer import archive, stream_run
from batch_layer.balance import Balance, Counted
from batch_layer.build import Built, HourBuilder
from batch_layer.rebuild import Rebuilder, RebuildRequest, Result

NO_DIFF = ledger_row.Diff(0, 0, 0, 0, 0)


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """Four accepted hours."""
    made = four_hours(tmp_path)
    for hour in HOURS:
        accept(made, hour, 10)
    return made


def expire(lake: StreamLake, hour: str) -> None:
    state = lake.state()
    lake.land(plan_expire(state, [hour], HOURS, {hour: 1}, "kept for 2 days", new_id(), NOW), state)
    lake.ledger.record_waiting(lake.state())


def job_of(lake: StreamLake) -> Job:
    return Job(lake.environment, lake.stream, lake.lake, Broker(log={0: [0] * 40}).adapter)


def rebuilder(lake: StreamLake, repairable: Mapping[str, int]) -> tuple[Rebuilder, Hours]:
    made, hours = Rebuilder(job_of(lake), NO_SPARK), Hours(lake)
    hours.reader = SimpleNamespace(repairable=lambda: dict(repairable))
    made._hours = cast(Any, hours)
    return made, hours


def test_a_replay_leaves_out_hours_whose_look_back_has_expired(lake: StreamLake) -> None:
    expire(lake, HOURS[0])
    made, _ = rebuilder(lake, {HOURS[1]: 1, HOURS[2]: 1})
    with pytest.raises(Refused, match="its duplicates cannot be found any more"):
        made.rebuild(HOURS[1], RebuildRequest(restate=True))
    results = stream_run.StreamRun(made._job, made).replay(None)
    assert [(r.hour, r.decision, r.revision) for r in results] == [(HOURS[2], "accepted", 2)]


def test_a_replay_passes_a_failed_hour(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    made, hours = rebuilder(lake, {HOURS[1]: 1, HOURS[3]: 1})
    build = hours.build

    def fail(hour: str, *given: Any) -> Built:
        if hour == HOURS[1]:
            raise Unexpected("decode in a worker: found other rows")
        return build(hour, *given)

    monkeypatch.setattr(hours, "build", fail)
    run = stream_run.StreamRun(made._job, made)
    with pytest.raises(Unexpected, match="found other rows"):
        run.replay(None)
    assert [(r.hour, r.decision, r.revision) for r in run.results] == [(HOURS[3], "accepted", 2)]


def test_an_expired_hour_is_not_decided_again(lake: StreamLake) -> None:
    """The hazard: the held hours before it could not be restated."""
    expire(lake, HOURS[2])
    made, hours = rebuilder(lake, {})
    result = made.rebuild(HOURS[0], RebuildRequest(restate=True))
    assert (result.decision, result.revision) == ("accepted", 2)
    assert hours.again == [HOURS[1]]


def test_row_counts_of_expired_hours_are_compared(lake: StreamLake) -> None:
    day = [shift(HOURS[3], -24 * n) for n in range(4)]
    account = ledger_row.HourAccount(offsets=10, good=10, dead=0, duplicate=0, gap=0, gaps={})
    for hour in day[1:]:
        rows = [ledger.decision(hour, "accepted", 1, cut(HOURS[0]), NOW, new_id(), account=account)]
        if hour == day[3]:
            rows.append(ledger.decision(hour, "expired", 1, None, NOW, new_id()))
        lake.ledger.record(rows)
    builder = HourBuilder(job_of(lake), NO_SPARK, archive.LostFiles(job_of(lake)))
    balance = Balance(cut(HOURS[3]), Counted(), Counted(), {}, {})
    found = builder._row_count_baseline(HOURS[3], balance, NO_DIFF, lake.state()).previous(3)
    assert found == [10] * 3


# The hours that wait: those of a run over all of them, and those before a named hour.

H0, H1, H2 = (shift(FIRST, i) for i in range(3))
CUTS = {H0: Cut("t", {0: (0, 10)}), H1: Cut("t", {0: (10, 10)}), H2: Cut("t", {0: (10, 20)})}


def test_an_hour_accepted_meanwhile_is_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = new_lake(tmp_path, timeline=Timeline(H0, shift(H2, 1), {0: 20}, sealed=dict(CUTS)))
    lake.serve([], {0: 20})
    job = Job(lake.environment, lake.stream, lake.lake, Broker(log={0: [0] * 20}).adapter)
    made = Rebuilder(job, NO_SPARK)
    accept_empty, rebuilt = made.accept_empty, list[str]()

    def meanwhile(hours: list[str]) -> list[Result]:
        accept(lake, H0, 10)
        return accept_empty(hours)

    def rebuild(hour: str, request: RebuildRequest) -> Result:
        rebuilt.append(hour)
        return Result(hour, "accepted", 1)

    monkeypatch.setattr(made, "seal", lambda _: sealing.Sealed((), lake.state()))
    monkeypatch.setattr(made, "accept_empty", meanwhile)
    monkeypatch.setattr(made, "rebuild", rebuild)
    results = stream_run.StreamRun(job, made).rebuild(None, RebuildRequest())
    assert H0 in lake.state().accepted, "the race did not take place"
    assert ([r.hour for r in results], rebuilt) == ([H1, H2], [H2])


@pytest.mark.parametrize(
    ("backlog", "fails", "rebuilt"),
    [(0, None, [H2]), (1, None, [H0, H2]), (9, None, [H0, H1, H2]), (9, H0, [H0, H2])],
)
def test_a_named_hour_is_rebuilt_after_the_earlier_ones_that_wait_oldest_first(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    backlog: int,
    fails: str | None,
    rebuilt: list[str],
) -> None:
    """Hours that a paused scheduler left behind; one that fails does not delay the named hour."""
    cuts = CUTS | {H1: Cut("t", {0: (10, 15)}), H2: Cut("t", {0: (15, 20)})}
    lake = new_lake(tmp_path, timeline=Timeline(H0, shift(H2, 1), {0: 20}, sealed=cuts))
    lake.serve([], {0: 20})
    job = Job(lake.environment, lake.stream, lake.lake, Broker(log={0: [0] * 20}).adapter)
    made, done = Rebuilder(job, NO_SPARK), list[str]()

    def rebuild(hour: str, request: RebuildRequest) -> Result:
        done.append(hour)
        assert request == RebuildRequest(restate=hour == H2)
        if hour == fails:
            raise Refused(f"hour {hour}: a look-back has expired")
        return Result(hour, "accepted", 1)

    monkeypatch.setattr("batch_layer.stream_run.require_ended", lambda *_: None)
    monkeypatch.setattr(made, "seal", lambda _: sealing.Sealed((), lake.state()))
    monkeypatch.setattr(made, "rebuild", rebuild)
    stream_run.StreamRun(job, made).rebuild({H2}, RebuildRequest(restate=True), backlog)
    assert done == rebuilt
    assert ("earlier hours wait: " in caplog.text) == (fails is not None)
