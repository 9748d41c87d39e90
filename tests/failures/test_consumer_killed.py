"""A consumer of the changes, killed twenty times while hours change hands in every way."""

import random
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from expectations import entry
from page_consumer import complete, consumed, consumer
from waiting import wait_for
from world import Make, World, event, past_hour, spread

from anabranch.protocol import acts, topic_change
from anabranch.protocol.topic_change import StartChoice

KILLS = 20
SEED = 7
_LOG = """
CREATE TABLE hours (hour PRIMARY KEY, revision, served, token);
CREATE TABLE seen (token PRIMARY KEY, hour, revision);
CREATE TRIGGER each_once AFTER INSERT ON hours
BEGIN SELECT RAISE(ABORT, 'twice') FROM seen WHERE token = new.token;
INSERT INTO seen VALUES (new.token, new.hour, new.revision); END;
"""


def seen(own: Path) -> list[tuple[str, int]]:
    """Each hour and revision that the consumer has had, in order."""
    with closing(sqlite3.connect(own, timeout=30)) as connection:
        return connection.execute("SELECT hour, revision FROM seen ORDER BY rowid").fetchall()


@contextmanager
def killed_again_and_again(one: World, own: Path) -> Iterator[Callable[[], int]]:
    """A consumer beside the `with`: started, killed wherever it is, started again; how often."""
    dice, stop, kills, failed = random.Random(SEED), threading.Event(), 0, list[BaseException]()

    def go() -> None:
        nonlocal kills
        try:
            while not stop.is_set():
                with consumer(one, own):
                    stop.wait(dice.uniform(0, 6))
                kills += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=go, daemon=True)
    thread.start()

    def killed() -> int:
        assert not failed, failed
        return kills

    try:
        yield killed
    finally:
        stop.set()
        thread.join(60)


@pytest.mark.timeout(900)
def test_a_consumer_killed_20_times_is_exact(world: Make, tmp_path: Path) -> None:
    one, own = world(), tmp_path / "own.db"
    level = entry("expect_column_values_to_be_between", column="level", max_value=500)
    one.expect(level | {"severity": "critical"})
    with closing(sqlite3.connect(own)) as connection:
        connection.executescript(_LOG)
    dice, hours = random.Random(SEED), [past_hour(ago) for ago in (5, 4, 3, 2, 1)]
    one.topic()
    refused = hours[2]
    for hour in hours:
        one.send(spread(hour, 200, hour))
        if hour == refused:
            at = datetime.fromisoformat(f"{hour}:59:59+00:00")
            one.send([(0, at, event("too-high", at, level=9_999))])
    one.serve()

    def serve(hour: str) -> None:
        acts.serve_hour(one.publisher, hour, dice.choice(["speed", "auto"]), "a test")

    with killed_again_and_again(one, own) as killed:
        decided = {r.hour: r.decision for r in one.batch()}
        assert [h for h, decision in decided.items() if decision == "refused"] == [refused]
        for hour in (hours[0], hours[4], hours[0]):
            assert [r.decision for r in one.batch(hour, restate=True)] == ["accepted"]
            serve(hours[1])
        [accepted] = one.batch(refused, accept=True, why="it is right")
        assert accepted.decision == "accepted"
        one.delete_topic()
        one.topic(3)
        now = datetime.now(UTC)
        one.send([(i % 3, now, event(f"new-{i}", now)) for i in range(9)])
        begin = StartChoice("earliest")
        assert topic_change.adopt(one.publisher, one.kafka, begin) is not None
        one.speed()
        deadline = time.monotonic() + 300
        while killed() < KILLS or len(seen(own)) <= len(hours):
            found = f"expected {KILLS} kills and a change, found {killed()} and {seen(own)}"
            assert time.monotonic() < deadline, found
            serve(dice.choice(hours))
            time.sleep(0.5)
    state = one.state
    served = [(h, a.revision, state.served_by(h)) for h, a in sorted(state.accepted.items())]
    # Both: the last change may give an hour to the other layer, with the same rows.
    with consumer(one, own):
        wait_for(lambda: consumed(own) == (served, complete(one)), "the consumer to have all hours")
    assert len(state.accepted) == len(hours)
    # No token came twice, or the consumer would have ended; of each hour no revision after a newer
    # one.
    for hour in hours:
        assert (had := [revision for h, revision in seen(own) if h == hour]) == sorted(had)
