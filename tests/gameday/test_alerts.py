"""Every alert that no fault of tests/gameday/game-day.md shows: its cause is there, and a real
Prometheus fires it."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from day import ALERTS, SECONDS, Day, running_day
from demo.live import Live
from demo.story import poll
from game_day_page import FILE, skeletons
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient

from anabranch.dev.producers.produce import STREAM, produce_events
from anabranch.iceberg.commits import Change, Outcome
from anabranch.iceberg.hour_files import files_of
from anabranch.offsets import hours
from anabranch.protocol.maintained import MaintenanceRun, record_run
from anabranch.protocol.publish import Publish, new_id, to_commit
from anabranch.protocol.state import load_state

PAST_HOURS = 4
LOST = 20


class Causes:
    """Failures that the game day does not play."""

    def __init__(self, day: Day) -> None:
        self.day, self.job = day, day.job
        self.until = hours.start_of(hours.hour_of(datetime.now(UTC) - self.job.stream.batch.grace))
        self.caused: set[str] = set()

    def await_alerts(self, *names: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Each fires, and not before its cause was there."""

        def all_fire() -> bool | None:
            meanwhile()
            return True if self.day.alerts().keys() >= {*names} else None

        poll(all_fire, f"{', '.join(names)} to fire", SECONDS)
        self.caused |= {*names}

    def require_silent(self, *names: str) -> None:
        assert not self.day.alerts().keys() & {*names}

    def no_reader_runs(self) -> None:
        """Hours of records that no layer reads, of which Kafka drops the first."""
        sent = produce_events(
            self.job.environment.kafka,
            self.job.stream.topic,
            events=400 * PAST_HOURS,
            hours=PAST_HOURS,
            until=self.until,
            partitions=3,
        )
        assert sent.failed == 0
        self.day.space.run("apply", STREAM, show=False)
        self.day.watch()
        kafka = KafkaAdminClient(bootstrap_servers=self.job.environment.kafka.bootstrap_servers)
        try:
            kafka.delete_records({TopicPartition(self.job.stream.topic, 0): LOST})
        finally:
            kafka.close()
        self.await_alerts("AnabranchFreshBudgetBurnsFast", "AnabranchFreshBudgetBurns")

    def no_rebuild_runs(self) -> None:
        self.require_silent("AnabranchHourLate", "AnabranchOffsetsLost")
        self.day.space.set_stream(STREAM, speed={"lost_offsets": "continue"})
        self.day.space.run("speed", STREAM, "--available-now", show=False)
        self.await_alerts("AnabranchHourLate")

    def a_hand_in_the_speed_branch(self) -> None:
        """The rows of an hour go from the speed branch and main, which say that they have them;
        then all is rebuilt."""
        self.require_silent("AnabranchLayersDiffer")
        spoiled = hours.shift(hours.hour_of(self.until), -1)
        state = load_state(self.job.lake, self.job.stream.table)
        gone = [
            Change(branch, remove=files_of(state.table, branch, spoiled))
            for branch in ("speed", "main")
        ]
        assert all(change.remove for change in gone)
        damage = to_commit(state, Publish(new_id(), (*gone,), state.timeline), datetime.now(UTC))
        assert self.job.lake.commit(state.table, damage) is Outcome.LANDED
        self.day.shell(f"anabranch batch {STREAM}", codes=(0, 1))
        self.await_alerts("AnabranchLayersDiffer", "AnabranchOffsetsLost")

    def no_maintenance_runs(self) -> None:
        self.require_silent("AnabranchMaintenanceLate")
        long_ago = datetime.now(UTC) - timedelta(days=2, minutes=1)
        record_run(self.job.lake, self.job.stream.table, MaintenanceRun(long_ago, long_ago))
        self.await_alerts("AnabranchMaintenanceLate")
        self.day.shell(f"anabranch maintain {STREAM}")
        poll(
            lambda: True if "AnabranchMaintenanceLate" not in self.day.alerts() else None,
            "maintenance to be in time",
            SECONDS,
        )

    def a_store_that_comes_and_goes(self) -> None:
        self.require_silent("AnabranchRetrying")
        running = self.day.start_speed()
        live, next_cut = Live(self.job, 10, 7), 0.0

        def cut() -> None:
            nonlocal next_cut
            running.require_alive()
            if time.monotonic() > next_cut:
                self.day.s3.cut()
                # Longer than the pause between two micro-batches, so that each cut is noticed.
                time.sleep(3)
                self.day.s3.restore()
                next_cut = time.monotonic() + 4

        try:
            with live.running():
                self.await_alerts("AnabranchRetrying", meanwhile=cut)
        finally:
            running.terminate()

    def no_exporter(self) -> None:
        self.require_silent("AnabranchMetricsAway")
        self.day.servers["page"].terminate()
        self.await_alerts("AnabranchMetricsAway")


@pytest.mark.timeout(2400)
def test_each_alert_that_the_game_day_does_not_show_fires_for_its_cause(tmp_path: Path) -> None:
    rules = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    played = skeletons(FILE.read_text(encoding="utf-8"))
    shown = {name for _, places, _ in played for where, name in places if where == "alert"}
    with running_day(tmp_path) as day:
        one = Causes(day)
        one.no_reader_runs()
        one.no_rebuild_runs()
        one.a_hand_in_the_speed_branch()
        one.no_maintenance_runs()
        one.a_store_that_comes_and_goes()
        one.no_exporter()
    assert one.caused | shown == {rule["alert"] for group in rules for rule in group["rules"]}
