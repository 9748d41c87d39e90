"""Records that arrive whole and make no sense: dead letters, other records with the same key."""

import json
from datetime import timedelta

import pytest
from click.testing import CliRunner
from commands import call
from run_books import printed, words
from world import SCHEMA, Make, World, event, past_hour, spread

from anabranch.cli import main
from anabranch.offsets.hours import start_of
from anabranch.operations.reports import dead_letters, status
from batch_layer.job import exit_code


def test_an_hour_of_letters_is_refused(world: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A column of a wrong first type: every record is a dead letter."""
    one, hour = world(partitions=1), past_hour(1)
    at = start_of(hour)
    wrong = [
        (0, at + timedelta(seconds=i), json.dumps({"event_id": f"e{i}", "event_time": i}).encode())
        for i in range(30)
    ]
    one.serve([*spread(hour, 10, "good", partitions=1), *wrong])

    # The hour is not accepted: the share in `main` is counted.
    assert f"run `anabranch dead-letters {one.name}`" in caplog.text
    view = status.status(one.job)
    assert view.too_many_dead == [hour]
    assert view.dead_shares[hour].words == "30 of 40 records (75 %)"
    share = next(h.dead_share for h in status.hours(one.job) if h.hour == hour)
    assert share == view.dead_shares[hour]

    [result] = [r for r in one.batch() if r.hour == hour]
    assert result.decision == "refused"
    assert result.reason == (
        "dead letters: expected at most 5 % of 40 records, found 30 (75 %); most often "
        "wrong_type: event_time: expected timestamp (the first: partition 0, offset 10)"
    )
    assert [row["event_id"] for row in one.rows()] == [f"good-{i}" for i in range(10)]
    assert status.status(one.job).too_many_dead == [hour]
    assert exit_code([result], [hour]) == 1
    assert "stream.dead-letters" in call(one, "doctor", one.name, expect=1)

    [result] = one.batch(hour, accept=True, why="the producer is known")
    assert result.decision == "accepted"
    assert (len(one.rows()), len(one.dead())) == (10, 30)
    assert status.status(one.job).too_many_dead == []
    share = next(h.dead_share for h in status.hours(one.job) if h.hour == hour)
    assert share is not None and share.words == "30 of 40 records (75 %)"


def test_the_share_that_is_allowed_is_configured(world: Make) -> None:
    one, hour = world(quality={"max_dead": "75 %"}, partitions=1), past_hour(1)
    at = start_of(hour)
    one.begin([*spread(hour, 10, "e", partitions=1), *((0, at, b"no") for _ in range(31))])
    [result] = [r for r in one.batch() if r.hour == hour]
    assert result.decision == "refused"
    one.reconfigure(quality={"max_dead": "76 %"})
    [result] = [r for r in one.batch() if r.hour == hour]
    assert result.decision == "accepted"
    one.reconfigure(quality={"max_dead": "0 %"})
    [result] = one.batch(hour, restate=True)
    assert result.decision == "refused"


def send_readings(one: World, hour: str) -> None:
    """60 different records of two devices, whose column `level` is the event's number, and an
    empty text for 40 of them; and one that was sent twice."""
    at = start_of(hour)
    values = [
        (0, at + timedelta(minutes=i), event("m", at, player=str(i) if i < 20 else "", amount=i))
        for i in range(59)
    ]
    one.send([*values, values[0]])


def test_other_records_with_the_same_key_refuse_the_hour(world: Make) -> None:
    """A key with a column that is empty in most records: 38 of 59 different ones would be gone."""
    one, hour = world(key=["event_id", "player"], partitions=1), past_hour(1)
    send_readings(one, hour)
    one.serve()

    [result] = [r for r in one.batch() if r.hour == hour]
    account = result.account
    assert (result.decision, account.duplicate, account.conflicts) == ("refused", 39, 38)
    assert result.reason == (
        "duplicates by event_id, player with other content: expected at most 1 % of 60 records, "
        "found 38 (63.3 %); correct `key`, or accept that they are dropped"
    )
    assert len(one.rows()) == 60
    assert status.status(one.job).conflicts == {hour: 38}

    [result] = one.batch(hour, accept=True, why="the last reading does not matter")
    assert (result.decision, result.account.duplicate) == ("accepted", 39)
    assert len(one.rows()) == 21
    output = call(one, "explain", one.name, hour)
    assert "39 were removed as duplicates, 38 of them with OTHER CONTENT" in output, output
    found = dead_letters.compare(one.job, hour, 0, 50).duplicates
    assert (found.counted, found.found) == (39, 39)
    assert [d.is_equal for d in found.duplicates].count(True) == 1
    assert "stream.conflicts" in call(one, "doctor", one.name, expect=None)

    # With the right key, a restatement has them all.
    one.reconfigure(key=["event_id", "amount"])
    [result] = one.batch(hour, restate=True)
    assert (result.account.good, result.account.duplicate, result.account.conflicts) == (59, 1, 0)


def test_a_stream_without_a_key_has_no_duplicates(world: Make) -> None:
    one, hours = world(key="none", partitions=1), [past_hour(2), past_hour(1)]
    for hour in hours:
        send_readings(one, hour)
    one.serve()
    results = {r.hour: r for r in one.batch() if r.hour in hours}
    assert [(r.decision, r.account.duplicate) for r in results.values()] == [("accepted", 0)] * 2
    assert one.contents() == one.acknowledged()
    [result] = one.batch(hours[0], restate=True)
    assert (result.decision, result.account.good) == ("accepted", 60)
    assert one.contents() == one.acknowledged()
    assert dead_letters.compare(one.job, hours[1], 0, 5).duplicates.found == 0
    call(one, "audit", one.name)


def test_a_duplicate_of_the_look_back_is_compared_with_the_row_that_is_served(world: Make) -> None:
    """One that was sent again in the next hour, one with another value, after a new column."""
    one, hours = world(quality={"max_conflicts": "0 %"}, partitions=1), [past_hour(2), past_hour(1)]
    at = start_of(hours[0])
    again, other = event("again", at), event("other", at, level=1)
    later = start_of(hours[1])
    one.send([(0, at, again), (0, at, other)])
    one.serve([(0, later, again), (0, later, event("other", at, level=2))])
    one.batch(hours[0])
    one.evolve(schema=f"{SCHEMA}, added STRING")
    [result] = one.batch(hours[1])
    account = result.account
    assert (result.decision, account.duplicate, account.conflicts) == ("refused", 2, 1)
    [result] = one.batch(hours[1], accept=True, why="known")
    assert (result.decision, result.account.good, result.account.conflicts) == ("accepted", 0, 1)


def test_a_wrong_first_type_is_corrected_and_a_stream_dropped(world: Make) -> None:
    """A column that is a number in every record, and a TIMESTAMP in the stream's first file."""
    wrong = SCHEMA.replace("level INT", "level TIMESTAMP NOT NULL")
    one, hour = world(schema=wrong, partitions=1), past_hour(1)
    at = start_of(hour)
    values = [(0, at + timedelta(seconds=i), event(f"e{i}", at, level=i + 0.5)) for i in range(25)]
    one.serve(values)
    [result] = [r for r in one.batch() if r.hour == hour]
    assert result.decision == "refused" and one.rows() == []

    one.reconfigure(schema=SCHEMA.replace("level INT", "level DOUBLE NOT NULL"))
    assert one.apply() == [
        f"changed column level of {one.name}.events from timestamp to double: no row had a value "
        "of it"
    ]
    one.send([(0, at + timedelta(minutes=1), event("late", at, level=99.5))])
    one.speed()
    assert [row["level"] for row in one.rows()] == [99.5]
    [result] = one.batch(hour)
    assert (result.decision, result.account.good, result.account.dead) == ("accepted", 25, 0)
    # The speed layer has them as dead letters: both comparisons say so, and it is no alarm.
    found = dead_letters.compare(one.job, hour, 1, 0).difference
    assert (found.diff.missing, found.diff.missing_dead, found.unexplained) == (25, 25, {})
    assert found.when_accepted == found.diff
    assert sorted(row["level"] for row in one.rows() if row["ingest_hour"] == hour) == [
        i + 0.5 for i in range(25)
    ]

    drop = words(printed("anabranch drop STREAM", STREAM=one.name))
    command = [*drop, "--conf", str(one.folder)]
    declined = CliRunner().invoke(main, command, input="another\n")
    assert declined.exit_code == 2 and "nothing was dropped" in declined.output
    done = CliRunner().invoke(main, command, input=f"{one.name}\n")
    assert done.exit_code == 0, done.output
    assert not one.lake.exists(one.job.stream.table)
    # A new stream begins again, in the same place.
    one.reopen()
    assert f"created table {one.name}.events" in one.apply()
    one.speed()
    assert len(one.rows()) == 26
