"""Kafka to one served table by two arms, record by record as Kafka acknowledged them."""

import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from demo.story import poll
from expectations import entry
from pyspark.sql import DataFrame
from world import SAME, Make, World, event, past_hour, spread

from anabranch.common.errors import ConfigurationError, Transient
from anabranch.kafka.source import read_ranges
from anabranch.offsets.position import RangeRelation, Ranges, classify, size
from anabranch.protocol import publish_queue, sealing
from speed_layer.micro_batch import MicroBatches


@pytest.fixture
def three_hours(world: Make) -> World:
    """Three past hours of 40 records each and 10 of the running one, nothing read yet."""
    one = world(partitions=2)
    for ago in (3, 2, 1):
        one.send(spread(past_hour(ago), 40, f"h{ago}"))
    now = datetime.now(UTC)
    one.begin([(i % 2, now, event(f"now-{i}", now)) for i in range(10)])
    return one


def test_speed_serves_and_batch_takes_over_hour_by_hour(three_hours: World) -> None:
    one = three_hours
    one.speed()
    assert one.contents() == one.acknowledged()
    assert Counter(r["ingest_hour"] for r in one.rows())[past_hour(2)] == 40

    decided = [(r.hour, r.decision, r.revision) for r in one.batch()]
    assert decided == [(past_hour(ago), "accepted", 1) for ago in (3, 2, 1)]
    assert one.contents() == one.acknowledged()
    *by_hour, running = one.hours()
    assert (running["hour"], running["state"], running["served"]) == (past_hour(0), "open", "speed")
    counts = {"offsets": 40, "good": 40, "dead": 0, "duplicate": 0, "gap": 0}
    assert [(h["served"], h["counts"]) for h in by_hour] == [("batch", counts)] * 3
    assert all(h["diff"].items() >= SAME.items() for h in by_hour)
    # Run again: nothing waits, nothing changes.
    heads = one.state.heads
    assert one.batch() == []
    assert one.state.heads == heads


def test_batch_alone_serves_what_speed_never_saw_until_it_is_back(three_hours: World) -> None:
    one = three_hours
    assert [r.decision for r in one.batch()] == ["accepted"] * 3
    by_hour = Counter(r["ingest_hour"] for r in one.rows())
    assert by_hour == {past_hour(ago): 40 for ago in (3, 2, 1)}

    one.speed()

    assert one.contents() == one.acknowledged()
    # Speed skipped what batch serves: it holds the running hour alone, and says so.
    assert {r["event_id"].split("-")[0] for r in one.rows("speed")} == {"now"}
    assert set(one.state.timeline.skipped) == {past_hour(ago) for ago in (3, 2, 1)}


def test_a_refused_hour_between_accepted_ones_is_read_by_speed(world: Make) -> None:
    one = world(partitions=2)
    one.send(spread(past_hour(3), 20, "a"))
    one.send(spread(past_hour(2), 20, "bad"))
    one.begin(spread(past_hour(1), 20, "c"))
    one.expect(entry("expect_column_values_to_match_regex", column="event_id", regex="^[ac]-"))

    decisions = {past_hour(3): "accepted", past_hour(2): "refused", past_hour(1): "accepted"}
    assert [(r.hour, r.decision) for r in one.batch()] == [*decisions.items()]
    assert {r["event_id"].split("-")[0] for r in one.rows()} == {"a", "c"}

    one.speed()

    assert one.contents() == one.acknowledged()
    refused = next(h for h in one.hours() if h["hour"] == past_hour(2))
    assert (refused["state"], refused["served"]) == ("refused", "speed")
    assert "expect_column_values_to_match_regex" in refused["reason"]
    # The operator fixes the rule; the hour lands, and the rows are the same.
    one.expect(entry("expect_column_values_to_not_be_null", column="event_id"))
    assert [(r.hour, r.decision) for r in one.batch()] == [(past_hour(2), "accepted")]
    assert one.contents() == one.acknowledged()


def test_two_speed_layers_publish_each_offset_once(three_hours: World) -> None:
    one = three_hours
    arms = [MicroBatches(one.job) for _ in range(2)]
    ends = one.ends
    read = {p: (0, e) for p, e in ends.items()}
    half = {p: (0, e // 2) for p, e in ends.items()}

    frame = _reader(one)
    assert arms[0].publish(frame(half), half) == sum(e for _, e in half.values())
    # The hazard: the second arm believes that nothing is published, and its range overlaps.
    assert classify(read, one.state.position.offsets) is RangeRelation.OVERLAPPING
    assert arms[1].publish(frame(read), read) == sum(e - e // 2 for e in ends.values())
    assert arms[0].publish(frame(read), read) == 0
    assert one.contents() == one.acknowledged()


def test_no_checkpoint_is_needed_between_two_runs(
    three_hours: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = three_hours
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    written: list[bool] = []
    remove = shutil.rmtree

    def removed(folder: Path, **options: Any) -> None:
        written.append((folder / "content" / "offsets").is_dir())
        remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", removed)
    one.speed()
    assert (written, list(temporary.iterdir())) == ([True], [])
    now = datetime.now(UTC)
    one.send([(0, now, event(f"later-{i}", now)) for i in range(5)])
    # Each run writes its checkpoint into a temporary folder and leaves nothing: the second starts
    # from the table.
    one.speed()
    one.speed()
    assert (len(written), list(temporary.iterdir())) == (3, [])
    assert one.contents() == one.acknowledged()


def test_a_seal_during_a_micro_batch_makes_it_decide_again(three_hours: World) -> None:
    one = three_hours
    job = one.job
    arm, ends = MicroBatches(one.job), one.ends
    ranges = {p: (0, e) for p, e in ends.items()}

    def sealed_meanwhile() -> DataFrame:
        sealing.seal(one.publisher, job.kafka)
        return read_ranges(one.spark, job.environment.kafka, one.name, ranges)

    arm.publish(sealed_meanwhile, ranges)
    assert one.contents() == one.acknowledged()
    for hour, cut in one.state.timeline.sealed.items():
        rows = [r for r in one.rows() if r["ingest_hour"] == hour]
        assert len(rows) == cut.offsets
        for row in rows:
            start, end = cut.ranges[row["kafka_partition"]]
            assert start <= row["kafka_offset"] < end


def test_a_micro_batch_is_staged_while_another_is_published(three_hours: World) -> None:
    one = three_hours
    job, table = one.job, one.job.stream.table
    arm, ends = MicroBatches(one.job), one.ends
    pieces = [{p: (e * i // 3, e * (i + 1) // 3) for p, e in ends.items()} for i in range(3)]
    sizes = [size(piece) for piece in pieces]
    read = _reader(one)

    # The decision for the first is needed to stage the others.
    assert arm.submit(read(pieces[0]), pieces[0]) == sizes[0]
    turn = publish_queue.join_queue(job.lake, table, "another publisher", 60.0)
    assert turn is not None
    assert arm.submit(read(pieces[1]), pieces[1]) == 0
    begun = threading.Event()

    def third() -> DataFrame:
        # The hazard: the second waits, and its rows are not published.
        assert one.state.position.offsets == {p: e for p, (_, e) in pieces[0].items()}
        begun.set()
        return read(pieces[2])()

    with ThreadPoolExecutor(1) as pool:
        handed = pool.submit(arm.submit, third, pieces[2])
        assert begun.wait(300)
        publish_queue.remove_turn(job.lake, table, turn.id)
        assert handed.result(120) == sizes[1]
    assert arm.wait() == sizes[2]
    arm.close()
    assert one.contents() == one.acknowledged()


def test_early_rows_are_staged_again_behind_another_publisher(three_hours: World) -> None:
    one = three_hours
    arm, rival, ends = MicroBatches(one.job), MicroBatches(one.job), one.ends
    first = {p: (0, e // 3) for p, e in ends.items()}
    rest = {p: (e // 3, e) for p, e in ends.items()}
    half = {p: (e // 3, e // 2) for p, e in ends.items()}
    read, calls = _reader(one), list[None]()

    def beside_the_rival() -> DataFrame:
        if not calls:
            assert rival.publish(read(half), half) == size(half)
        calls.append(None)
        return read(rest)()

    arm.submit(read(first), first)
    published = arm.submit(beside_the_rival, rest)
    assert published == 0, "the hazard did not happen: it was not staged ahead"
    assert arm.wait() == size(rest) - size(half)
    assert len(calls) == 2, "expected what was staged ahead to be staged again"
    arm.close()
    assert one.contents() == one.acknowledged()


def test_the_error_of_a_publish_is_raised_by_the_next_call(three_hours: World) -> None:
    one = three_hours
    arm, ends = MicroBatches(one.job), one.ends
    first, gap, rest = (
        {p: (e * i // 6, e * (i + 1) // 6) for p, e in ends.items()} for i in (0, 2, 3)
    )
    read = _reader(one)
    arm.submit(read(first), first)
    before = one.state.position
    arm.submit(read(gap), gap)
    poll(lambda: arm.has_failed or None, "the publish behind a gap to fail", 60)
    with pytest.raises(Transient, match="restarting from the table"):
        arm.submit(read(rest), rest)
    assert (arm.wait(), arm.has_failed, one.state.position) == (0, False, before)
    arm.close()


def _reader(one: World) -> Callable[[Ranges], Callable[[], DataFrame]]:
    return lambda ranges: (
        lambda: read_ranges(one.spark, one.job.environment.kafka, one.name, ranges)
    )


def test_an_hour_that_has_not_ended_or_never_was_is_not_rebuilt(three_hours: World) -> None:
    one = three_hours
    with pytest.raises(Transient, match="can be sealed from"):
        one.batch(past_hour(0))
    with pytest.raises(ConfigurationError, match="where stream"):
        one.batch(past_hour(50))
