"""Two of a kind at once, and one that hangs at the worst step while another takes over."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

import pytest
from commands import paused_at, run, started
from world import Make, World, past_hour, spread

from anabranch.common.fail_points import Step


@pytest.fixture
def one(world: Make) -> World:
    one = world(speed={"trigger": "1 second", "max_offsets_per_trigger": 300}, create=2)
    return one


@contextmanager
def sending(one: World, every: float = 0.05) -> Iterator[None]:
    """Events that come in all the time."""
    stop = threading.Event()

    def go() -> None:
        number = 0
        while not stop.wait(every):
            one.send_now(10, f"live{number}")
            number += 1

    thread = threading.Thread(target=go, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)


def test_two_speed_jobs_at_once_publish_each_offset_once(one: World) -> None:
    with (
        sending(one),
        started(one, "speed", one.name) as first,
        started(one, "speed", one.name) as second,
    ):
        for command in (first, second):
            command.until(
                lambda c=command: " published " in c.log, "each of the two to publish once", 240
            )  # type: ignore[misc]
        before = one.published
        first.until(lambda: one.published > before + 500, "both to go on together")
    both = first.log + second.log
    # The hazard: they were in each other's way.
    signs = ("publish refused", "skipped published offsets", "the position moved back")
    assert any(sign in both for sign in signs)
    one.speed()
    assert one.contents() == one.acknowledged()


@pytest.mark.parametrize(
    "step", [Step.SPEED_DECIDED, Step.SPEED_STAGED, Step.COMMIT_PREPARED], ids=lambda s: s.label
)
def test_a_hung_speed_job_publishes_nothing_twice(one: World, step: Step) -> None:
    one.send_now(300, "before")
    with paused_at(one, step, "speed", one.name) as hung:
        assert one.published == 0
        one.speed()
        one.send_now(200, "meanwhile")
        one.speed()
        # The hazard: another publisher publishes all offsets of the hung one.
        assert one.published == 500
        hung.resume()
        one.send_now(100, "after")
        hung.until(lambda: one.published == 600, "the job to go on from the table's position")
        assert hung.terminate() == 0
        log = hung.log
    signs = ("skipped published offsets", "publish refused", "restarting from the table")
    assert any(sign in log for sign in signs)
    assert one.contents() == one.acknowledged()


def test_a_publisher_paused_stages_again(world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from anabranch.iceberg import expiry
    from anabranch.protocol import publish

    one = world(create=2)
    one.leave_writing_to_spark()
    one.send_now(50, "before")
    real = expiry.plan_expiry
    with paused_at(one, Step.COMMIT_PREPARED, "speed", one.name) as hung:
        summed = [(s, s.summary) for s in one.state.table.snapshots() if s.summary]
        staged = [s for s, summary in summed if "wap.id" in summary.additional_properties]
        assert staged
        # A day later, as the next publisher sees it: what waits is given up.
        tomorrow = staged[0].timestamp_ms / 1000 + 2 * 86_400
        then = datetime.fromtimestamp(tomorrow, UTC)
        monkeypatch.setattr(publish, "plan_expiry", lambda t, p, _, **kw: real(t, p, then, **kw))
        one.speed()
        # The hazard: its staged snapshot is missing.
        assert one.state.table.metadata.snapshot_by_id(staged[0].snapshot_id) is None
        monkeypatch.undo()
        hung.resume()
        one.send_now(50, "after")
        hung.until(lambda: one.published == 100, "the job to go on from the table's position")
    assert one.contents() == one.acknowledged()


def test_two_batch_runs_of_one_hour_make_one_revision(one: World) -> None:
    hour = past_hour(1)
    one.send(spread(hour, 40, "e"))
    with paused_at(one, Step.BATCH_CHECKED, "batch", one.name) as hung:
        assert not one.state.is_accepted(hour)
        run(one, "batch", one.name)
        heads = one.state.heads
        # The hazard: the first has staged and checked the same hour, and goes on to publish it.
        hung.resume()
        assert hung.wait() == 0
        assert "another run published first" in hung.log
    assert one.state.heads == heads
    rows = one.job.ledger.history()
    assert Counter(r.decision for r in rows if r.hour == hour) == {"sealed": 1, "accepted": 1}
    assert one.contents() == one.acknowledged()


def test_a_batch_run_that_hangs_while_its_hour_is_restated_does_not_undo_it(one: World) -> None:
    hour = past_hour(1)
    one.send(spread(hour, 40, "e"))
    one.batch(hour)
    restate = ("batch", one.name, "--hour", hour, "--restate")
    with paused_at(one, Step.COMMIT_PREPARED, *restate) as hung:
        run(one, *restate)
        assert one.state.accepted[hour].revision == 2
        hung.resume()
        assert hung.wait() == 0
    assert one.state.accepted[hour].revision == 2
    assert one.contents() == one.acknowledged()


def test_a_batch_publish_lands_against_a_fast_speed_layer(one: World) -> None:
    hour = past_hour(1)
    one.send(spread(hour, 40, "e"))
    one.speed()
    with sending(one), started(one, "speed", one.name) as speed:
        speed.until(lambda: one.published > 100, "the speed layer to publish")
        began = time.monotonic()
        run(one, "batch", one.name)
        assert one.state.is_accepted(hour), f"not accepted after {time.monotonic() - began:.0f} s"
        before = one.published
        speed.until(lambda: one.published > before, "the speed layer to go on")
        assert speed.terminate() == 0
    one.speed()
    assert one.contents() == one.acknowledged()
