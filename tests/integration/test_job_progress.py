"""The signs of progress of a running speed job."""

from unittest.mock import patch

from running import speed_running
from waiting import wait_for
from world import Make

from anabranch.common.errors import Transient
from speed_layer.micro_batch import MicroBatches


def test_idle_triggers_are_progress_and_failures_are_not(world: Make) -> None:
    one, noted = world(speed={"trigger": "1 second"}, create=2), list[int]()
    with speed_running(one, lambda: noted.append(one.published)):
        wait_for(lambda: len(noted) >= 3, "an idle topic to count as progress")
        one.send_now(40, "a")
        wait_for(lambda: noted[-1] == 40, "a publish to count as progress")
    failed: list[int] = []

    def fail(*_: object) -> None:
        failed.append(1)
        raise Transient("expected to stage, found that it fails on purpose")

    noted.clear()
    one.send_now(40, "b")
    with (
        patch.object(MicroBatches, "_stage_readable", fail),
        patch.object(MicroBatches, "_stage_ahead", fail),
        speed_running(one, lambda: noted.append(1)),
    ):
        wait_for(lambda: len(failed) >= 2, "two tries to fail")
    assert not noted
