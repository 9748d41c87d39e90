"""Run steps on one lake with one version of the code: `python version_steps.py FOLDER FIRST_HOUR
STEP...`.

The version is the first one on PYTHONPATH, with its own tests/unit. Prints the state of the tables
as JSON.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from brokers import Broker
from lakes import StreamLake, new_environment, new_lake, new_stream

import anabranch
from anabranch.iceberg.commits import Change, Outcome
from anabranch.iceberg.lake import Lake
from anabranch.job import Job
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol import apply, ledger
from anabranch.protocol.dead_letters import waiting_batch, waiting_speed
from anabranch.protocol.publish import Publish
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import Accepted
from batch_layer.plan import empty_hours, waiting_hours
from batch_layer.rebuild import Rebuilder

# The earlier version has maintenance in the package of operations.
_HAS_LIFECYCLE = importlib.util.find_spec("anabranch.lifecycle") is not None
maintenance = importlib.import_module(
    "anabranch.lifecycle.maintenance" if _HAS_LIFECYCLE else "anabranch.operations.maintenance"
)


class Steps:
    """Steps on three sealed hours of three offsets each; the last offset of each hour is a dead
    letter."""

    def __init__(self, folder: Path, first: str) -> None:
        self.folder, self.hours = folder, [shift(first, i) for i in range(4)]
        self.cuts = [Cut("t", {0: (3 * i, 3 * i + 3)}) for i in range(3)]
        environment, stream = new_environment(folder), new_stream()
        self.lake = StreamLake(folder, Lake(environment), stream, environment)

    def create(self) -> None:
        sealed = dict(zip(self.hours, self.cuts, strict=False))
        new_lake(
            self.folder, timeline=Timeline(self.hours[0], self.hours[3], {0: 9}, sealed=sealed)
        )

    def apply(self) -> None:
        apply.apply(self.lake.environment, self.lake.stream, self.lake.lake, Broker().adapter)

    def speed(self, i: int) -> None:
        """Publish an hour's rows and dead letter as the speed layer does."""
        hour, now = self.hours[i], datetime.now(UTC)
        rows = self.lake.stage([(hour, 0, 3 * i), (hour, 0, 3 * i + 1)])
        letters = (waiting_speed(self.lake.stage_dead([(hour, 0, 3 * i + 2)], "speed"), now),)
        assert (
            self.lake.publish(self.lake.speed(rows, {0: 3 * i + 3}, dead_letters=letters))
            is Outcome.LANDED
        )
        Publisher(self.lake.lake, self.lake.stream).recover()

    def accept(self, i: int) -> None:
        """Accept an hour as the batch layer does, with a decision of nine days ago, so that
        maintenance drops the speed layer's rows."""
        hour, long_ago = self.hours[i], datetime.now(UTC) - timedelta(days=9)
        timeline = self.lake.state().timeline
        rest = replace(timeline, sealed={h: c for h, c in timeline.sealed.items() if h != hour})
        row = ledger.decision(hour, "accepted", 1, self.cuts[i], long_ago, served="batch")
        dead = self.lake.stage_dead([(hour, 0, 3 * i + 2)], "batch")
        publish = self.lake.accept(
            self.lake.stage([(hour, 0, 3 * i), (hour, 0, 3 * i + 1)]),
            hour,
            Accepted(1, self.cuts[i]),
            timeline=rest,
            decisions=(row,),
            dead_letters=(waiting_batch(dead, hour, 1, long_ago),),
        )
        assert self.lake.publish(publish) is Outcome.LANDED
        Publisher(self.lake.lake, self.lake.stream).recover()

    def idle(self, i: int) -> None:
        """Seal an hour without records after the three, and accept all waiting empty hours."""
        state, at = self.lake.state(), {0: 9}
        hour = shift(self.hours[3], i)
        sealed = state.timeline.sealed | {hour: Cut("t", {0: (9, 9)})}
        timeline = replace(state.timeline, open=shift(hour, 1), start=at, sealed=sealed)
        assert (
            self.lake.publish(Publish(f"seal-{hour}", (Change("speed"),), timeline))
            is Outcome.LANDED
        )
        state = self.lake.state()
        job = Job(self.lake.environment, self.lake.stream, self.lake.lake, Broker().adapter)
        Rebuilder(job, None).accept_empty(empty_hours(state, waiting_hours(state)))  # type: ignore[arg-type]

    def maintain(self) -> None:
        lake = self.lake
        maintenance.maintain(
            Job(lake.environment, lake.stream, lake.lake, Broker().adapter), datetime.now(UTC)
        )

    def state(self) -> dict[str, Any]:
        state, lake = self.lake.state(), self.lake
        return {
            "rows": {branch: lake.rows(branch) for branch in ("main", "speed", "batch")},
            "dead": {branch: lake.dead(branch) for branch in ("main", "speed", "batch")},
            "offsets": state.position.offsets,
            "accepted": {hour: asdict(accepted) for hour, accepted in state.accepted.items()},
            "ledger": [
                (row.hour, row.decision, row.revision, row.decision_id)
                for row in lake.ledger.history()
            ],
        }


if __name__ == "__main__":
    steps = Steps(Path(sys.argv[1]), sys.argv[2])
    for step in sys.argv[3:]:
        name, *numbers = step.split(":")
        getattr(steps, name)(*map(int, numbers))
    print(json.dumps({"code": str(Path(anabranch.__file__).parents[1])} | steps.state()))
