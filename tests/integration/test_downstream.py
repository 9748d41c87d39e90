"""The promises to those downstream of `main`, and a consumer that follows it."""

import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from commands import call, shown
from page_consumer import code_of_page, complete, consumed, consumer
from pyiceberg.table.snapshots import Snapshot
from running import speed_running
from waiting import wait_for
from world import Make, Record, World, event, past_hour, spread

from anabranch.protocol import acts
from anabranch.protocol.watermarks import Watermarks
from serving_layer.changes import changes


def promised(one: World) -> Watermarks:
    return Watermarks.from_properties(one.lake.load(one.job.stream.table).properties)


@pytest.mark.full
def test_a_killed_consumer_equals_the_table(world: Make, tmp_path: Path) -> None:
    one, own = world(), tmp_path / "own.db"
    older, newer = past_hour(2), past_hour(1)
    one.topic()
    for hour in (older, newer):
        one.send(spread(hour, 20, hour))
    # An event twice: the batch layer drops one of them, and the speed layer serves both.
    one.begin([(0, datetime.now(UTC), event(f"{newer}-0", datetime.now(UTC)))])
    before = datetime.now(UTC)
    one.speed()
    fresh = promised(one).fresh_through
    assert fresh is not None
    assert before <= fresh <= datetime.now(UTC)
    assert promised(one).complete_through is None

    with consumer(one, own):
        one.batch(older)
        hours = [(older, 1, "batch")]
        wait_for(lambda: consumed(own) == (hours, complete(one)), "the first hour")
        assert promised(one).complete_through == older
    # Without a consumer: another hour, two restatements, and an hour that is given to the speed
    # layer.
    one.batch(newer)
    one.batch(older, restate=True)
    one.batch(older, restate=True)
    acts.serve_hour(one.publisher, newer, "speed", "a test")
    assert promised(one).complete_through == newer
    with consumer(one, own):
        hours = [(older, 3, "batch"), (newer, 1, "speed")]
        wait_for(lambda: consumed(own) == (hours, complete(one)), "the changes while it was down")
        acts.serve_hour(one.publisher, newer, "auto", "a test")
        hours = [(older, 3, "batch"), (newer, 1, "batch")]
        wait_for(lambda: consumed(own) == (hours, complete(one)), "the hour given back")

    # The page's own code, which keeps the token in the target's snapshots.
    catalog = one.job.environment.catalog.name
    source, target = f"{catalog}.{one.job.stream.table}", f"{catalog}.{one.name}.copy"
    one.spark.table(source).limit(0).writeTo(target).partitionedBy("ingest_hour").create()
    code: dict[str, Any] = {}
    exec(compile(code_of_page("## Spark"), "docs/how-to/follow-changes.md", "exec"), code)
    for _ in range(2):
        code["follow"](one.spark, one.name, source, target, str(one.folder))
        copied = one.spark.table(target).collect()
        places = sorted((r.kafka_partition, r.kafka_offset, r.event_id) for r in copied)
        assert places == complete(one)
    assert len(one.lake.load(f"{one.name}.copy").metadata.snapshots) == 3, (
        "created, and one for each hour"
    )

    # The same from the command line, and without Spark or the consumer's tokens.
    printed = call(one, "changes", one.name, "--output", "json")
    lines = [json.loads(line) for line in printed.splitlines()]
    assert [(c["hour"], c["revision"], c["served"], c["rows"]) for c in lines] == [
        (older, 3, "batch", 20), (newer, 1, "batch", 20)
    ]  # fmt: skip
    assert not list(changes(one.name, lines[-1]["token"], conf=str(one.folder)))
    # Records of the next thirty days may contain an event of today.
    assert shown(one, "complete", one.name, "--event-time", older[:10], expect=1)["accepted"] == 2


def stated(snapshot: Snapshot) -> datetime | None:
    assert snapshot.summary is not None
    return Watermarks.from_properties(snapshot.summary.additional_properties).fresh_through


def stamped(snapshot: Snapshot) -> datetime:
    return datetime.fromtimestamp(snapshot.timestamp_ms / 1000, UTC)


def test_records_acknowledged_before_fresh_through_are_in_main(world: Make) -> None:
    one = world(create=2)
    acknowledged: list[tuple[datetime, Record]] = []

    def send(count: int, name: str) -> None:
        one.send_now(count, name)
        acknowledged.extend((datetime.now(UTC), record) for record in one.sent[-count:])

    def publishes() -> list[Snapshot]:
        """Return the publishes of main, in order."""
        snapshots = one.lake.load(one.job.stream.table).metadata.snapshots
        summed = [(s, s.summary.additional_properties) for s in snapshots if s.summary]
        of_main = [s for s, properties in summed if "anabranch.merged" in properties]
        return sorted(of_main, key=lambda s: s.sequence_number or 0)

    def moved_at_rest() -> bool:
        """A publish knows whether anything came after the one before; of the first two it may."""
        send(1, f"at-rest-{len(acknowledged)}")
        wait_for(lambda: one.published == len(acknowledged), "a record to be published")
        landed = publishes()[1:]
        return any((stated(s) or before) > stamped(b) for b, s in itertools.pairwise(landed))

    before = datetime.now(UTC)
    with speed_running(one):
        for burst in range(6):
            send(5, f"quick-{burst}")
        wait_for(lambda: one.published == len(acknowledged), "all bursts to be published")
        wait_for(moved_at_rest, "the moment to move while nothing arrives")

    table = one.lake.load(one.job.stream.table)
    moments = set()
    for snapshot in publishes():
        if (fresh := stated(snapshot)) is None:
            continue
        moments.add(fresh)
        rows = table.scan(snapshot_id=snapshot.snapshot_id).to_arrow().to_pylist()
        held = {(r["kafka_partition"], r["kafka_offset"]) for r in rows}
        assert {(r.partition, r.offset) for at, r in acknowledged if at < fresh} <= held
    assert len(moments) >= 3
    assert max(moments) > acknowledged[0][0], "records were acknowledged before it"
