"""Rows of `main`, then its topic: transactions, dead letters and erasures at the seam."""

import json
from collections import Counter
from datetime import UTC, datetime

from commands import call
from world import ERASURE, Make, event, past_hour, spread

import anabranch

GONE = "p3"


def test_each_record_is_once_in_the_rows_or_after_them(world: Make) -> None:
    one = world()
    one.set_environment(erasure=ERASURE)
    one.topic()
    hours = past_hour(2), past_hour(1)
    for hour, prefix in zip(hours, "ab", strict=True):
        one.send(spread(hour, 14, prefix))
    one.serve()
    assert [r.decision for r in one.batch(hours[0])] == ["accepted"]
    before = one.state.heads["main"]
    now = datetime.now(UTC)
    values = [(0, now, event(f"t-{i}", now)) for i in range(5)]
    one.send_transactions((False, values), (True, values))
    gone = (0, now, event("gone", now, player=GONE))
    one.send([gone, (1, now, b'{"event_id": "broken", '), (1, now, event("a-1", now))])
    one.erase(GONE)
    after = [(0, now, event("later", now, player=GONE))]
    one.send(after)

    table = anabranch.open(one.name, conf=one.folder)
    reading = table.then_topic()
    # Rows that are published meanwhile are not read again.
    one.speed()
    columns = ("kafka_partition", "kafka_offset", "event_id")
    read = (zip(*(batch[name].to_pylist() for name in columns), strict=True) for batch in reading)
    rows = Counter(row for batch in read for row in batch)
    good = [(r, json.loads(r.value or b"")) for r in one.sent if (r.value or b"").endswith(b"}")]
    kept = {
        (r.partition, r.offset, v["event_id"])
        for r, v in good
        if v.get("player") != GONE or v["event_id"] == "later"
    }
    assert rows == dict.fromkeys(kept, 1)
    assert (reading.counts.rows, reading.counts.dead, reading.counts.erased) == (7, 1, 1)
    letters = [row["value"] for t in reading.letters for row in t.to_pylist()]
    assert letters == [b'{"event_id": "broken", ']
    # The rows that the speed layer has published since are those of the topic.
    assert Counter(one.contents()) == rows
    assert before != reading.snapshot_id
    count = f"SELECT count(*) AS n FROM {one.job.stream.table}"
    answer = call(one, "query", count, "--live")
    assert f"{len(kept)}\n" in answer and "then 0 records of the topic" in answer
