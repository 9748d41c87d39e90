"""The jobs' cost, from the snapshots that the table remembers."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import foreign_programs
import time_machine
from accepted_hours import expire
from lakes import FIRST, StreamLake, new_lake

from anabranch.common.counters import S3_REQUESTS, Tally
from anabranch.iceberg.commits import Change, Outcome
from anabranch.offsets.hours import start_of
from anabranch.operations.reports.cost import read_cost
from anabranch.protocol.measured import READABLE, STAGE, Meter
from anabranch.protocol.publish import Publish, new_id, new_tag

QUARTER = timedelta(minutes=15)


def test_an_old_cost_is_read_from_tagged_snapshots_after_expiry(tmp_path: Path) -> None:
    tally = Tally()
    meter = Meter("speed", tally)
    with time_machine.travel(start_of(FIRST), tick=False) as clock:
        one = new_lake(tmp_path)
        for hour in range(3):
            for quarter in range(4):
                clock.shift(QUARTER)
                tally.count(S3_REQUESTS, "PutObject", 7)
                # A process of its own: none believes time that is set while it runs.
                publish_measured(
                    replace(one, lake=one.again()),
                    meter,
                    tagged=f"main-h{hour}" if quarter == 3 else None,
                )
        expire(replace(one, lake=one.again()))
        cost = read_cost(one.table(), datetime.now(UTC) - timedelta(hours=1))
    assert cost is not None
    assert (cost.until - cost.since, cost.s3_requests) == (
        timedelta(hours=1),
        {"PutObject": 4 * 7},
    )


def test_snapshots_of_another_program_have_no_totals(tmp_path: Path) -> None:
    tally = Tally()
    meter = Meter("speed", tally)
    with time_machine.travel(start_of(FIRST), tick=False) as clock:
        one = new_lake(tmp_path)
        for number in range(3):
            clock.shift(QUARTER)
            tally.count(S3_REQUESTS, "PutObject", 7)
            publish_measured(replace(one, lake=one.again()), meter, tagged=None)
            if number == 1:
                clock.shift(QUARTER)
                foreign_programs.rewrite(replace(one, lake=one.again()), "main", [])
        now = datetime.now(UTC)
        cost = read_cost(one.table(), now - QUARTER)
    assert cost is not None
    assert (cost.since, cost.s3_requests) == (now - 2 * QUARTER, {"PutObject": 7})


def publish_measured(one: StreamLake, meter: Meter, tagged: str | None) -> None:
    state = one.state()
    said = meter.to_properties(state.branch_properties["main"], [(READABLE, 1.5), (STAGE, 0.4)])
    changes = (Change("speed"), Change("main", properties=said))
    publish = Publish(new_id(), changes, state.timeline, state.position)
    assert one.publish(publish, state) is Outcome.LANDED
    meter.landed(0.2)
    if tagged is not None:
        state = one.state()
        tag = new_tag(state, tagged, "main", datetime.now(UTC))
        assert (
            one.publish(Publish(new_id(), (Change("speed"),), state.timeline, tags=(tag,)), state)
            is Outcome.LANDED
        )
