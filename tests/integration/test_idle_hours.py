"""What an hour without records costs: its requests to S3, in a process of its own each hour."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest
from world import World, past_hour, spread

from anabranch.common.counters import S3_REQUESTS, TALLY
from anabranch.job import open_job
from batch_layer.many_streams import run_stream
from batch_layer.rebuild import RebuildRequest

IDLE = 6
MOST = 21
"""Requests of an hour, the deletion of two old files of metadata included."""
ORDER = RebuildRequest()


def requests() -> Counter[str]:
    return Counter({label: n for (name, label), n in TALLY.totals().items() if name == S3_REQUESTS})


@pytest.mark.full
def test_an_hour_without_records_is_accepted_by_few_requests(world: Callable[..., World]) -> None:
    one = world(batch={"grace": f"{IDLE + 1} hours", "lookback_hours": 1})
    one.topic()
    one.send(spread(past_hour(IDLE + 2), 4, "before"))
    one.apply()
    one.batch()
    costs = []
    for ago in range(IDLE, 0, -1):
        hour = past_hour(ago + 1)
        one.configure(batch={"grace": f"{ago} hours", "lookback_hours": 1})
        before = requests()
        job = open_job(one.name, str(one.folder))
        outcome = run_stream(job, one.spark, lambda run: run.rebuild(None, ORDER), threading.Event())
        costs.append(requests() - before)
        assert [(r.hour, r.decision) for r in outcome.results] == [(hour, "accepted")]
    # One commit of the stream's table and one of its ledger.
    assert [cost["PutObject"] for cost in costs] == [8] * IDLE
    assert max(cost.total() for cost in costs) <= MOST, costs
