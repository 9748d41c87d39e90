"""A run over the hours that wait, while another run accepts one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from accepted_hours import accept
from brokers import Broker
from lakes import FIRST, new_lake

from anabranch.iceberg.commits import Outcome
from anabranch.job import Job
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol.sealing import Sealed
from batch_layer.rebuild import Rebuilder, RebuildRequest, Result
from batch_layer.stream_run import StreamRun

H0, H1, H2 = (shift(FIRST, i) for i in range(3))
CUTS = {H0: Cut("t", {0: (0, 10)}), H1: Cut("t", {0: (10, 10)}), H2: Cut("t", {0: (10, 20)})}


def test_an_hour_that_another_run_accepts_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = new_lake(tmp_path, timeline=Timeline(H0, shift(H2, 1), {0: 20}, sealed=dict(CUTS)))
    assert lake.publish(lake.speed(lake.stage([]), {0: 20})) is Outcome.LANDED
    job = Job(lake.environment, lake.stream, lake.lake, Broker(log={0: [0] * 20}).adapter)
    made = Rebuilder(job, cast(Any, None))
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
