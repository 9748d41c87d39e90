"""Erasure of many values beside both layers, with kills: after the deadline no byte of the tables has
one, no rebuild brings one back, and all else is exact."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from budget import budget
from commands import ROOT, Command, run, run_into
from erasure_scan import scan
from expectations import entry
from stored_rows import exported_rows, stored_rows
from world import ERASURE, Make, World, event, past_hour

from anabranch.common.fail_points import Step
from anabranch.lifecycle.erasure.search import Values
from anabranch.lifecycle.erasure.status import read_statuses
from anabranch.lifecycle.maintenance import maintain
from anabranch.offsets.hours import start_of
from anabranch.operations.audit import audit
from anabranch.protocol import ledger

HOURS = budget(4, 100)
VALUES = 10 * HOURS
# Both layers are killed at one in so many steps.
EVERY = budget(7, 1)
GONE = frozenset(f"gone-{n}" for n in range(VALUES))
ERASED = re.compile("gone-")
# In the order in which a command reaches them.
ARCHIVE = [Step.ERASE_ARCHIVE_WRITTEN, Step.ERASE_ARCHIVE_PUBLISHED]
# Reached only where hours have expired; test_erasure.py kills at them.
FORMER = [Step.ERASE_FORMER_FOUND, Step.ERASE_FORMER_RECORDED]
STEPS = [step for step in Step if step.label.startswith("erase.") and step not in ARCHIVE + FORMER]
STEPS[2:2] = ARCHIVE
VIEWS = {"per_player": {"window": "1 hour", "group": ["player"], "aggregates": {"events": "count"}}}


def send_hour(one: World, number: int, hour: str) -> None:
    """Records of an hour: of erased people and of others, some too old, some not JSON."""
    records = []
    for n in range(30):
        player = f"gone-{(10 * number + n) % VALUES}" if n < 20 else f"kept-{n}"
        at = start_of(hour) + timedelta(minutes=n)
        of = at - timedelta(days=9) if n in (3, 23) else at
        records.append((n % 2, at, event(f"{hour}-{n}", of, player=player, level=n)))
    at = start_of(hour) + timedelta(minutes=59)
    records.append((0, at, f'{{"event_id": "broken", "player": "gone-{number}", '.encode()))
    records.append((1, at, b'{"event_id": "broken", "player": "kept-0", '))
    one.send(records)


def expected(one: World) -> list[tuple[int, int, str]]:
    """Every good record that Kafka acknowledged, but those of erased people."""
    good = [(r, json.loads(r.value)) for r in one.sent if r.value and r.value.endswith(b"}")]
    kept = [(r, v) for r, v in good if v.get("player") not in GONE]
    return sorted((r.partition, r.offset, v["event_id"]) for r, v in kept)


def restarted(one: World, before: Command | None, *arguments: str) -> Command:
    """A command in the place of one that is killed."""
    if before is not None:
        before.kill()
    return Command(one, arguments, {}, ROOT, "")


@pytest.mark.timeout(budget(3600, 9000))
def test_many_values_are_erased_beside_both_layers_and_kills(world: Make, tmp_path: Path) -> None:
    one = world(archive={"raw": "for ever"}, views=VIEWS)
    folder = f"exports/{one.name}"
    one.set_environment(erasure=ERASURE)
    one.configure(
        event_time={"column": "event_time", "past": "1 day", "future": "1 hour"},
        egress=[{"name": "export", "root": f"s3://tests/{folder}"}],
    )
    # The ledger and its reasons have no value of these rows.
    kept = entry("expect_column_values_to_match_regex", column="player", regex="^kept")
    one.expect(kept | {"severity": "warning"})
    one.topic()
    hours = [past_hour(ago) for ago in range(HOURS, 0, -1)]
    for number, hour in enumerate(hours):
        send_hour(one, number, hour)
    one.serve()
    assert {r.decision for r in one.batch(*hours[: HOURS // 2])} == {"accepted"}
    run(one, "egress", one.name)
    # The hazard: everything has them.
    assert ERASED.search(stored_rows(one)) and ERASED.search(exported_rows(one, "tests", folder))
    values = tmp_path / "values.txt"
    values.write_text("\n".join(sorted(GONE)))
    erase = ("erase", one.name, "--by", "player", "--values", str(values), "--why", "case 4711")
    speed = batch = None
    try:
        for number, step in enumerate(STEPS):
            # Both layers are killed at any moment, and start again.
            if number % EVERY == 0:
                speed = restarted(one, speed, "speed", one.name)
                batch = restarted(one, batch, "batch", one.name)
            run_into(one, step.label, *erase)
            if number == 4:
                one.batch(hours[0], restate=True)
            if number == 8:
                # Records that were too old are accepted now.
                bounds = {"column": "event_time", "past": "30 days", "future": "1 hour"}
                one.reconfigure(event_time=bounds)
                one.replay()
        assert "done on every branch" in run(one, *erase)
    finally:
        for command in (speed, batch):
            if command is not None:
                command.kill()
    one.batch()
    # A rebuild of every hour from Kafka, which has all records, brings none back.
    assert {r.decision for r in one.batch(*hours, restate=True)} == {"accepted"}
    assert one.contents() == expected(one)
    assert {json.loads(d["value"][:-2] + b"}")["player"] for d in one.dead()} == {"kept-0"}
    for hour, row in ledger.newest(one.job.ledger.history(hours)).items():
        counts = (row.good, row.dead, row.duplicate, row.gap, row.erased)
        assert (row.decision, sum(n or 0 for n in counts)) == ("accepted", row.offsets), hour
        assert (row.good, row.dead, row.erased) == (10, 1, 21), hour
    assert audit(one.job, None, True).agrees
    run(one, "egress", one.name)
    exported = exported_rows(one, "tests", folder)
    assert "kept-20" in exported and not ERASED.search(exported)

    found = Values.of("player", GONE)
    # The hazard: former snapshots, tags and files have them until the deadline.
    assert scan(one.job, found).hits and ERASED.search(stored_rows(one))
    later = datetime.now(UTC) + timedelta(days=31)
    maintain(one.job, later)
    assert scan(one.job, found).hits == () and not ERASED.search(stored_rows(one))
    # The archive still has the others.
    assert len(one.rows("main", one.job.stream.archive_table)) == 11 * HOURS
    [status] = read_statuses(one.job, later)
    assert status.is_certificate
    assert one.contents() == expected(one)
