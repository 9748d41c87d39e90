"""At full size: hours of 3,600 micro-batches, a year of hours, all publishers at once.

Data files are only named, since what is tested is what every publish reads and writes of the
table's metadata; the decisions and commits are the product's own. Counts are asserted and never
times. `make test-suite WHAT=scale`.
"""

import multiprocessing
import time
from datetime import UTC, datetime, timedelta
from functools import partial
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
from named_files import ROWS
from scale import Cost, ScaledStream, measured, median_of
from waiting import wait_for

from anabranch.iceberg.commits import Change, Outcome
from anabranch.iceberg.manifests import content_by_hour, files_of
from anabranch.offsets.hours import hour_of, shift
from anabranch.protocol.publish import Decision, Publish, new_id, run

FIRST = hour_of(datetime.now(UTC) - timedelta(days=30))
# What a publish of the speed layer may read and write, whatever there is: lists, manifests to
# merge, metadata.
MOST_REQUESTS = 60
MOST_MANIFESTS = 60


@pytest.mark.timeout(3000)
def test_an_hour_of_3600_micro_batches_costs_each_the_same(tmp_path: Path) -> None:
    stream = ScaledStream.create(tmp_path, FIRST)
    most_requests = most_manifests = 0
    for number in range(3600):
        with measured() as cost:
            assert stream.micro_batch(FIRST, dates=3) is Outcome.LANDED
        most_requests = max(most_requests, cost.requests)
        if number % 50 == 0:
            most = max(stream.manifests("main"), stream.manifests("speed"))
            most_manifests = max(most_manifests, most)
    assert most_requests <= MOST_REQUESTS
    assert most_manifests <= MOST_MANIFESTS
    assert len(set(stream.files("main"))) == len(stream.files("main")) == 3600 * 3
    assert stream.metadata_bytes() <= 400_000
    stream.micro_batch(shift(FIRST, 1))
    stream.seal([FIRST])
    staged = stream.stage(FIRST)
    with measured() as cost:
        assert stream.accept(FIRST, staged) == 1
    assert cost.read["manifest"] == 0, "the swap looked at files"
    assert cost.requests <= MOST_REQUESTS
    table = stream.lake.table()
    assert len(files_of(table, "main", FIRST)) == len(files_of(table, "batch", FIRST)) == 2
    assert content_by_hour(table, "speed", (FIRST,))[FIRST].rows == 3600 * 3 * ROWS


@pytest.mark.timeout(3000)
def test_a_year_of_hours_costs_a_publish_as_much_as_a_day(tmp_path: Path) -> None:
    """Requests of a micro-batch, an acceptance and an hour's plan, after a day and after a year.

    Now and then, once in eight hours, a publish merges eight manifests of old hours: so the usual
    ones of some hours are compared, and the largest is bounded.
    """
    requests = {}
    # The past was made two days at a time, by few publishes. Those of recent hours merge what these
    # have left: every manifest once more, since the table has just got four times the files.
    recent, settling, hours = 480, 5, 7
    for name, count in (("day", 24), ("year", 8760)):
        first = hour_of(datetime.now(UTC) - timedelta(hours=count + settling + hours + 1))
        stream = ScaledStream.create(tmp_path / name, first)
        stream.past(first, old := max(0, count - recent))
        stream.past(shift(first, old), count - old, at_once=2)
        # The snapshots of the past are all as young as the others, so none of them expires.
        past_bytes = stream.metadata_bytes()
        costs: dict[str, list[Cost]] = {"micro-batch": [], "acceptance": [], "plan": []}
        for running in (shift(first, count + number) for number in range(settling + hours)):
            for _ in range(30):
                stream.micro_batch(running)
            with measured() as cost:
                stream.micro_batch(running)
            costs["micro-batch"].append(cost)
            stream.micro_batch(shift(running, 1))
            stream.seal([running])
            staged = stream.stage(running)
            with measured() as cost:
                assert stream.accept(running, staged) == 1
            costs["acceptance"].append(cost)
            with measured() as cost:
                assert len(files_of(stream.lake.table(), "main", shift(running, -1))) == 2
            costs["plan"].append(cost)
        assert max(cost.requests for each in costs.values() for cost in each) <= MOST_REQUESTS, name
        requests[name] = [median_of(each[settling:]).requests for each in costs.values()]
        assert stream.metadata_bytes() - past_bytes <= 400_000, name
        # Those of recent hours, and for the others about the square root of their files.
        assert stream.manifests("main") <= 135, name
    pairs = zip(requests["day"], requests["year"], strict=True)
    assert all(year <= 1.2 * day + 2 for day, year in pairs), requests


def _speed_layer(
    folder: str, first: str, hours: int, a_batch: int, count: Synchronized, stop: Event
) -> None:
    """Publishes `a_batch` micro-batches an hour, then goes on in the last one until stopped."""
    stream = ScaledStream.open(Path(folder))
    while not stop.is_set():
        hour = shift(first, min(hours, count.value // a_batch))
        if stream.micro_batch(hour) is Outcome.LANDED:
            count.value += 1


def _batch_layer(
    folder: str, first: str, hours: int, a_batch: int, count: Synchronized, tries: Synchronized
) -> None:
    """Seals and accepts each hour once the speed layer is past it."""
    stream = ScaledStream.open(Path(folder))
    for number in range(hours):
        is_behind = partial(lambda ends: count.value > ends, (number + 1) * a_batch)
        wait_for(is_behind, f"hour {number} to end", 900, pause=0.2)
        stream.seal([shift(first, number)])
        tries.value = max(tries.value, stream.accept(shift(first, number)))


def _maintenance(folder: str, stop: Event, landed: Synchronized) -> None:
    """Drops the speed layer's files of accepted hours, all but the newest, again and again."""
    stream = ScaledStream.open(Path(folder))

    def decide() -> Decision[None]:
        state = stream.lake.state()
        have = [h for h in content_by_hour(state.table, "speed") if state.is_accepted(h)][:-1]
        changes = (Change("speed", clear=tuple(have)), Change("main"))
        return Decision(state, Publish(new_id(), changes, state.timeline), None)

    while not stop.is_set():
        run(stream.lake.lake, stream.lake.name, decide, "maintain", take_turns=True)
        landed.value += 1
        time.sleep(1)


@pytest.mark.timeout(3000)
def test_both_layers_and_maintenance_at_once_each_land_and_nothing_is_lost(tmp_path: Path) -> None:
    """The speed layer publishes as fast as it can, which leaves no pause between two heads."""
    hours, a_batch = 3, 300
    stream = ScaledStream.create(tmp_path, FIRST)
    context = multiprocessing.get_context("spawn")
    count, tries, landed = (context.Value("i", 0) for _ in range(3))
    stop = context.Event()
    folder = str(tmp_path)
    actors = (
        (_speed_layer, (folder, FIRST, hours, a_batch, count, stop)),
        (_batch_layer, (folder, FIRST, hours, a_batch, count, tries)),
        (_maintenance, (folder, stop, landed)),
    )
    processes = [context.Process(target=actor, args=args) for actor, args in actors]
    for process in processes:
        process.start()
    try:
        processes[1].join(2400)
        assert processes[1].exitcode == 0, "the batch layer did not get through beside the others"
    finally:
        stop.set()
        for process in processes:
            process.join(120)
            process.kill()
    assert landed.value > 0
    table, state = stream.lake.table(), stream.lake.state()
    content = content_by_hour(table, "main")
    for number in range(hours):
        assert state.is_accepted(shift(FIRST, number))
        assert content[shift(FIRST, number)].rows == 2 * ROWS
    last = shift(FIRST, hours)
    assert content[last].rows == (count.value - hours * a_batch) * ROWS
    assert content_by_hour(table, "speed")[last].rows == content[last].rows
    assert state.position.offsets[0] == count.value * 1000
    assert len(stream.files("main")) == len(set(stream.files("main")))
