"""The archive: what Kafka gave, once, from which hours are rebuilt when Kafka has them no more."""

import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from expectations import entry
from stored_rows import stored_rows
from world import ERASURE, SCHEMA, Make, World, event, past_hour

from anabranch.iceberg.manifests import files_by_hour
from anabranch.lifecycle.maintenance import maintain
from anabranch.offsets.hours import start_of
from anabranch.operations.audit import audit
from anabranch.protocol.acts import hold
from anabranch.protocol.ledger_row import LedgerRow

ARCHIVE: dict[str, Any] = {"raw": "30 days"}
BRANCHES = ("speed", "batch", "main")


def archived(one: World) -> list[tuple[int, int, bytes | None, bytes | None]]:
    """The content of the archive."""
    rows = one.rows("main", one.job.stream.archive_table)
    return [(r["kafka_partition"], r["kafka_offset"], r["key"], r["value"]) for r in rows]


def sent(one: World, *hours: str) -> list[tuple[int, int, bytes | None, bytes | None]]:
    """Return the records of some hours that Kafka acknowledged."""
    ids = tuple(f'{{"event_id": "{hour}'.encode() for hour in hours)
    of = [r for r in one.sent if r.value is not None and r.value.startswith(ids)]
    return sorted((r.partition, r.offset, b"k", r.value) for r in of)


def send_hour(one: World, hour: str) -> None:
    """Eight good records with a field beside the schema, a duplicate, and one that is dead."""
    at = start_of(hour)
    good = []
    for n in range(8):
        value = event(f"{hour}-{n}", at, player=f"p{n % 3}", score=n, level=n)
        good.append((n % 2, at + timedelta(minutes=n), value))
    broken = b'{"event_id": "' + hour.encode() + b'-broken", "player": "p1", '
    one.send([*good, good[0], (1, at + timedelta(minutes=20), broken)])


def counts(row: LedgerRow) -> tuple[int | None, ...]:
    return row.good, row.dead, row.duplicate, row.gap


@pytest.mark.full
def test_an_hour_is_rebuilt_from_its_bytes_when_kafka_has_it_no_more(world: Make) -> None:
    first, second = past_hour(2), past_hour(1)
    one = world(archive=ARCHIVE)
    one.expect(entry("expect_column_values_to_be_between", column="level", max_value=3))
    one.topic()
    send_hour(one, first)
    send_hour(one, second)
    one.apply()
    # Refused hours are archived too.
    assert {r.hour: r.decision for r in one.batch()} == {first: "refused", second: "refused"}
    assert archived(one) == sent(one, first, second)
    one.reconfigure(expectations=None)
    assert one.batch(first)[0].decision == "accepted"
    before = one.account(first)
    assert (before.sources, counts(before)) == ({"kafka": 10}, (8, 1, 1, 0))
    # Read again, and not archived again.
    assert one.batch(first, restate=True)[0].decision == "accepted"
    assert archived(one) == sent(one, first, second)

    one.evolve(schema=f"{SCHEMA}, score INT")
    one.delete_records(one.ends)
    # The hazard: rows lack the field, and Kafka has no record of either hour.
    assert {r.get("score") for r in one.rows()} == {None}
    assert [r.decision for r in one.batch(first, restate=True)] == ["accepted"]
    assert [r.decision for r in one.batch(second)] == ["accepted"]
    for hour in (first, second):
        row = one.account(hour)
        assert (row.sources, counts(row)) == ({"archive": 10}, (8, 1, 1, 0))
    assert sorted(r["score"] for r in one.rows()) == sorted([*range(8)] * 2)
    assert Counter(d["ingest_hour"] for d in one.dead()) == {first: 1, second: 1}
    assert audit(one.job, None, True).disagreements == []
    assert archived(one) == sent(one, first, second)


def test_hours_leave_the_archive_unless_held(world: Make) -> None:
    old, held, kept = past_hour(60), past_hour(55), past_hour(1)
    one = world(archive={"raw": "2 days"}, partitions=2)
    for hour in (old, held, kept):
        send_hour(one, hour)
    one.apply()
    one.batch()
    assert archived(one) == sent(one, old, held, kept)
    hold(one.publisher, held, held, "case 1")
    done = maintain(one.job, datetime.now(UTC), False)
    assert one.job.stream.archive_table in done.expired
    assert archived(one) == sent(one, held, kept)
    # Nothing of the rows or the account goes with it.
    assert len(one.rows()) == 24 and counts(one.account(old)) == (8, 1, 1, 0)


ESCAPED = r"\u00701"
ERASED = re.compile(r"\bp1\b|u00701")


@pytest.mark.full
def test_erased_records_leave_the_archive_and_come_back_by_nothing(world: Make) -> None:
    hour = past_hour(1)
    one = world(archive=ARCHIVE)
    one.set_environment(erasure=ERASURE)
    one.topic()
    send_hour(one, hour)
    # A column has the value, its bytes have it not: the row shows which record it is of. And a
    # duplicate.
    late = start_of(hour) + timedelta(minutes=50)
    escaped = event(f"{hour}-escaped", start_of(hour), player="p1").replace(
        b'"p1"', f'"{ESCAPED}"'.encode()
    )
    again = next(r.value for r in one.sent if r.value is not None and b'"p1"' in r.value)
    one.serve([(0, late, escaped), (0, late, again)])
    assert [r.decision for r in one.batch()] == ["accepted"]

    def left() -> list[Any]:
        rows = [(b, r["event_id"]) for b in BRANCHES for r in one.rows(b) if r["player"] == "p1"]
        return rows + [v for *_, v in archived(one) if v is not None and ERASED.search(v.decode())]

    # The hazard: on each branch and in the archive, there with a dead letter, and escaped.
    assert len(left()) == 5 + 4 + 4 + 6 and ESCAPED.encode() in b"".join(
        v or b"" for *_, v in archived(one)
    )
    done = one.erase("p1", timedelta(0))
    assert (done.left, left()) == (None, [])
    rebuilt = 5, 0, 0, 7
    # Kafka still has them, then only the archive has the others.
    for source in ("kafka", "archive"):
        assert [r.decision for r in one.batch(hour, restate=True)] == ["accepted"]
        row = one.account(hour)
        assert left() == [] and row.sources is not None and source in row.sources
        # A duplicate of an erased record is counted as erased.
        assert (row.good, row.dead, row.gap, (row.duplicate or 0) + (row.erased or 0)) == rebuilt
        if source == "kafka":
            one.delete_records(one.ends)
    # The files that had them are named until storage has none of them.
    table = one.lake.load(one.job.stream.archive_table)
    now_there = {path for of in files_by_hour(table, "main").values() for path in of}
    erasures = [row.erasure for row in one.job.ledger.history([hour]) if row.erasure]
    files = {file for erasure in erasures for file in erasure.get("files", ())}
    assert {f for f in files if "_archive" in f} and not now_there & files
    # The hazard: storage has the bytes. After the deadline no file of any table has them.
    assert ERASED.search(stored_rows(one))
    maintain(one.job, datetime.now(UTC) + timedelta(days=3), False)
    assert ERASED.search(stored_rows(one)) is None and archived(one)
    # The archive has the hour: what its bytes do not show stays erased.
    assert one.state.erasures.all
