"""The hours that wait: those of a run over all of them, and those before a named hour."""

from pathlib import Path

import pytest
from accepted_hours import accept
from brokers import Broker
from lakes import FIRST, new_lake
from no_spark import NO_SPARK

from anabranch.common.errors import Refused
from anabranch.job import Job
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol.sealing import Sealed
from batch_layer.rebuild import Rebuilder, RebuildRequest, Result
from batch_layer.stream_run import StreamRun

H0, H1, H2 = (shift(FIRST, i) for i in range(3))
CUTS = {H0: Cut("t", {0: (0, 10)}), H1: Cut("t", {0: (10, 10)}), H2: Cut("t", {0: (10, 20)})}


def test_an_hour_accepted_meanwhile_is_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = new_lake(tmp_path, timeline=Timeline(H0, shift(H2, 1), {0: 20}, sealed=dict(CUTS)))
    lake.land(lake.speed(lake.stage([]), {0: 20}))
    job = Job(lake.environment, lake.stream, lake.lake, Broker(log={0: [0] * 20}).adapter)
    made = Rebuilder(job, NO_SPARK)
    accept_empty, rebuilt = made.accept_empty, list[str]()

    def meanwhile(hours: list[str]) -> list[Result]:
        accept(lake, H0, 10)
        return accept_empty(hours)

    def rebuild(hour: str, request: RebuildRequest) -> Result:
        rebuilt.append(hour)
        return Result(hour, "accepted", 1)

    monkeypatch.setattr(made, "seal", lambda _: Sealed((), lake.state()))
    monkeypatch.setattr(made, "accept_empty", meanwhile)
    monkeypatch.setattr(made, "rebuild", rebuild)
    results = StreamRun(job, made).rebuild(None, RebuildRequest())
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
    lake.land(lake.speed(lake.stage([]), {0: 20}))
    job = Job(lake.environment, lake.stream, lake.lake, Broker(log={0: [0] * 20}).adapter)
    made, done = Rebuilder(job, NO_SPARK), list[str]()

    def rebuild(hour: str, request: RebuildRequest) -> Result:
        done.append(hour)
        assert request == RebuildRequest(restate=hour == H2)
        if hour == fails:
            raise Refused(f"hour {hour}: a look-back has expired")
        return Result(hour, "accepted", 1)

    monkeypatch.setattr("batch_layer.stream_run.require_ended", lambda *_: None)
    monkeypatch.setattr(made, "seal", lambda _: Sealed((), lake.state()))
    monkeypatch.setattr(made, "rebuild", rebuild)
    StreamRun(job, made).rebuild({H2}, RebuildRequest(restate=True), backlog)
    assert done == rebuilt
    assert ("earlier hours wait: " in caplog.text) == (fails is not None)
