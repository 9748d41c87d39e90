"""Dead letters lost between the rows' publish and theirs: made up for, by files or Kafka."""

from collections.abc import Callable
from typing import Any

import pytest
from world import Make, World, event, past_hour

from anabranch.common.errors import Unexpected
from anabranch.iceberg.files import delete_files
from anabranch.iceberg.snapshots import find_staged
from anabranch.offsets.hours import start_of
from anabranch.protocol import dead_letters


class Died(RuntimeError):
    pass


def waiting(one: World, monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> dict[str, Any]:
    """Run into the end of the process between the two publishes; returns what waits then."""
    real = dead_letters.roll_forward

    def dies(lake: Any, name: str, state: Any) -> Any:
        if state.dead_letters:
            raise Died
        return real(lake, name, state)

    # A fault that nothing explains is tried a few times, and ends the run.
    with monkeypatch.context() as patched, pytest.raises((Died, Unexpected)):
        patched.setattr(dead_letters, "roll_forward", dies)
        run()
    [item] = one.state.dead_letters
    assert one.dead() == [], "the hazard did not happen"
    staged = find_staged(one.lake.load(one.job.stream.dead_letters_table), item["id"])
    assert staged is not None
    # A bucket that was restored, or a hand: no code of ours does it.
    one.lake.discard(one.job.stream.dead_letters_table, staged)
    return item


def hour_of_ten(one: World) -> str:
    """Eight good records, two that are none; `main` has to hold the eight."""
    hour = past_hour(1)
    at = start_of(hour)
    one.topic(1)
    one.send([(0, at, event(f"e-{i}", at)) for i in range(8)])
    one.begin([(0, at, b"{broken"), (0, at, b"{broken too")])
    return hour


def exact(one: World) -> None:
    assert one.dead_records() == [(0, 8, b"{broken"), (0, 9, b"{broken too")]
    assert one.offsets() == [(0, o) for o in range(8)]


@pytest.mark.full
def test_letters_are_published_from_files(world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = world()
    hour = hour_of_ten(one)
    waiting(one, monkeypatch, lambda: one.batch(hour))
    assert one.batch() == []
    exact(one)
    # As any of them: readers leave files out by what manifests say, and the hour is restated.
    table, of_hour = one.job.stream.dead_letters_table, f"ingest_hour = '{hour}'"
    assert one.lake.load(table).scan(row_filter=of_hour).to_arrow().num_rows == 2
    assert one.spark.table(f"lake.{table}").where(of_hour).count() == 2
    assert [(r.decision, r.revision) for r in one.batch(hour, restate=True)] == [("accepted", 2)]
    exact(one)


def test_an_hour_whose_dead_letters_were_lost_is_restated_by_the_next_run(
    world: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = world()
    hour = hour_of_ten(one)
    item = waiting(one, monkeypatch, lambda: one.batch(hour))
    delete_files(one.lake.load(one.job.stream.dead_letters_table).io, item["paths"])
    one.speed()
    assert f"restates hour {hour} at its next run" in caplog.text
    assert one.dead() == []
    [result] = one.batch()
    assert (result.hour, result.decision, result.revision, result.reason) == (
        hour, "accepted", 2, "the dead letters of revision 1 were lost",
    )  # fmt: skip
    exact(one)
    assert one.batch() == []
