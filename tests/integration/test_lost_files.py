"""A data file that the table names is gone from storage: rebuilds go on, and make up for it."""

import pytest
from commands import call
from world import Make, World, event, past_hour, spread

from anabranch.iceberg.files import delete_files
from anabranch.iceberg.manifests import files_by_branch
from anabranch.offsets.hours import start_of
from anabranch.operations.audit import audit, find_lost


def two_hours(world: Make, **stream: object) -> tuple[World, str, str]:
    """Two ended hours of 20 and 10 records, an event in both, all read by the speed layer."""
    one = world(**stream)
    first, second = past_hour(2), past_hour(1)
    one.topic()
    one.send(spread(first, 20, "a"))
    again = start_of(second)
    one.serve([*spread(second, 10, "b"), (0, again, event("a-3", again))])
    return one, first, second


def lose(one: World, branch: str, hour: str, at_most: int = 100) -> list[str]:
    table = one.lake.load(one.job.stream.table)
    paths = sorted(files_by_branch(table)[branch][hour])[:at_most]
    assert paths
    delete_files(table.io, paths)
    return paths


def exact(one: World) -> None:
    """`main` has each event once, from its first record."""
    assert one.contents() == [r for r in one.acknowledged() if r != repeated(one)]
    assert audit(one.job, None, with_kafka=True).disagreements == []


def repeated(one: World) -> tuple[int, int, str]:
    return one.sent[-1].partition, one.sent[-1].offset, "a-3"


def test_a_lost_file_of_an_accepted_hour_is_made_up_for(world: Make) -> None:
    one, first, _ = two_hours(world)
    assert [r.decision for r in one.batch()] == ["accepted", "accepted"]
    [path] = lose(one, "batch", first)
    found = audit(one.job, None, with_kafka=False).disagreements
    assert [d.message for d in found if path in d.message and d.hour == first]
    asked = call(one, "query", f"SELECT count(player) FROM {one.job.stream.table}", expect=2)
    assert path.rpartition("/")[2] in asked and "anabranch audit" in asked
    remedy = f"anabranch batch {one.name} --hour {first} --restate"
    findings = call(one, "doctor", one.name, expect=1)
    assert path in findings and remedy in findings
    [result] = one.batch(first, restate=True)
    assert (result.decision, result.revision) == ("accepted", 2)
    assert path in (result.reason or "")
    exact(one)


def test_a_lost_file_of_the_speed_layer_stops_no_hour(world: Make) -> None:
    one, first, _ = two_hours(world)
    paths = lose(one, "speed", first)
    results = one.batch()
    assert [r.decision for r in results] == ["accepted", "accepted"]
    assert paths[0] in (results[0].reason or "")
    diff = results[0].account.diff
    assert diff is not None and diff.missing == diff.unread
    # The batch layer serves the hour: the speed layer's lost file is named, and no disagreement.
    assert audit(one.job, None, with_kafka=True).disagreements == []
    lost = find_lost(one.job, one.state)
    assert (lost.served, {one.path for one in lost.unserved}) == ((), {*paths})
    assert one.contents() == [r for r in one.acknowledged() if r != repeated(one)]


def test_a_lost_file_of_the_look_back_is_made_up_for_by_the_same_run(world: Make) -> None:
    one, first, second = two_hours(world)
    assert [r.decision for r in one.batch(first)] == ["accepted"]
    [path] = lose(one, "batch", first)
    results = one.batch()
    decided = [(r.hour, r.decision, r.revision) for r in results]
    assert decided == [(first, "accepted", 2), (second, "accepted", 1)]
    assert path in (results[0].reason or "")
    exact(one)


@pytest.mark.full
def test_a_lost_file_whose_records_kafka_has_deleted_refuses_only_its_hour(world: Make) -> None:
    one, first, second = two_hours(world)
    [path] = lose(one, "speed", first, 1)
    one.delete_records({0: 10, 1: 10})
    refused, accepted = one.batch()
    assert (refused.hour, refused.decision) == (first, "refused")
    for word in (path, "restore", "--accept"):
        assert word in (refused.reason or "")
    assert (accepted.hour, accepted.decision) == (second, "accepted")
    [again] = one.batch(first, accept=True, why="the file cannot be restored")
    assert again.decision == "accepted"
    kept, sent = set(one.contents()), set(one.acknowledged())
    assert kept < sent and {r for r in sent if r[1] >= 10} - {repeated(one)} <= kept
