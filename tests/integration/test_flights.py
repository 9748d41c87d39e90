"""A stream that is not the example: real flights, with nothing but what its own configuration file
says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from queries import run_query
from world import World, past_hour

from anabranch.common.output import plain
from anabranch.dev.audit import audit
from anabranch.dev.demo import flights
from anabranch.dev.producers import flights_data
from anabranch.offsets.hours import start_of
from anabranch.operations.reports import status as views

STREAMS = Path(__file__).parents[2] / "conf" / "streams"
FLIGHTS = 2_000


def _flights_world(world: Callable[..., World]) -> World:
    """The shipped stream under names of its own."""
    shipped = yaml.safe_load((STREAMS / "flights.yaml").read_text())
    suite = shipped.pop("expectations")
    one = world(**{key: value for key, value in shipped.items() if key not in ("topic", "table")})
    shutil.copy(STREAMS / suite, one.folder / "streams" / suite)
    one.configure(expectations=suite)
    one.reopen()
    return one


@pytest.mark.full
def test_real_flights_go_through_both_layers_and_answer_a_question(
    world: Callable[..., World],
) -> None:
    one = _flights_world(world)
    # They fill the two hours before the last one, whose grace has passed whenever this runs.
    sent = flights_data.send(
        one.job.environment.kafka, one.name, limit=FLIGHTS, hours=2, until=start_of(past_hour(1))
    )
    assert (sent.acknowledged, sent.failed) == (FLIGHTS, 0)
    assert list(sent.by_hour()) == [past_hour(3), past_hour(2)]
    one.apply()

    one.speed()

    by_speed = audit(one.job, sent.acks, flights.as_sent_of(one.job.stream))
    assert by_speed.is_exact, by_speed.sentences()
    assert (by_speed.rows, by_speed.dead) == (FLIGHTS, 0)

    # The hour before this one holds no flight; it is sealed too unless its grace is still running.
    results = {r.hour: r for r in one.batch()}

    assert {results[past_hour(ago)].decision for ago in (3, 2)} == {"accepted"}
    by_batch = audit(one.job, sent.acks, flights.as_sent_of(one.job.stream))
    assert by_batch.is_exact, by_batch.sentences()
    assert by_batch.rows == FLIGHTS
    hours = {h["hour"]: h for h in plain(views.hours(one.job))}
    for ago in (3, 2):
        hour = hours[past_hour(ago)]
        assert (hour["served"], hour["revision"]) == ("batch", 1)
        assert hour["diff"] == {"missing": 0, "extra": 0, "changed": 0}
        assert hour["quality"] == {"passed": True, "failed": []}
    table = one.job.stream.table
    answer = run_query(
        f"SELECT carrier, count(*) AS flights, count(arr_delay) AS landed FROM {table} GROUP BY "
        "ALL ORDER BY carrier",
        {table: one.lake.load(table)},
        catalog=one.lake.catalog_name,
    ).to_pylist()
    events = list(flights_data.flights(FLIGHTS))
    assert answer == [
        {
            "carrier": carrier,
            "flights": sum(e["carrier"] == carrier for e in events),
            "landed": sum(e["carrier"] == carrier and e["arr_delay"] is not None for e in events),
        }
        for carrier in sorted({str(e["carrier"]) for e in events})
    ]
