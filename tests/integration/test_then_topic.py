"""Rows of `main`, then its topic, from a real broker: transactions, dead letters and erasures at the
seam, while the layers go on."""

import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime

from commands import call
from world import World, event, past_hour, spread

import anabranch
from anabranch.lifecycle.erasure.run import ErasureRequest, erase
from anabranch.protocol.publisher import Publisher

Make = Callable[..., World]
GONE = "p3"


def test_each_record_is_once_in_the_rows_or_after_them(world: Make) -> None:
    one = world()
    one.set_environment(erasure={"key": "a key of the tests, and of no other"})
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
    one.send(
        [
            (0, now, event("gone", now, player=GONE)),
            (1, now, b'{"event_id": "broken", '),
            (1, now, event("a-1", now)),
        ]
    )
    erase(
        one.job,
        Publisher(one.lake, one.job.stream),
        ErasureRequest("player", frozenset({GONE}), "case 4711"),
    )
    after = [(0, now, event("later", now, player=GONE))]
    one.send(after)

    table = anabranch.open(one.name, conf=one.folder)
    reading = table.then_topic()
    # Rows that are published meanwhile are not read again.
    one.speed()
    rows = Counter(
        (p, o, id)
        for batch in reading
        for p, o, id in zip(
            *(batch[name].to_pylist() for name in ("kafka_partition", "kafka_offset", "event_id")),
            strict=True,
        )
    )
    good = [(r, json.loads(r.value or b"")) for r in one.sent if (r.value or b"").endswith(b"}")]
    kept = {
        (r.partition, r.offset, v["event_id"])
        for r, v in good
        if v.get("player") != GONE or v["event_id"] == "later"
    }
    assert rows == dict.fromkeys(kept, 1)
    assert (reading.counts.rows, reading.counts.dead, reading.counts.erased) == (7, 1, 1)
    assert [row["value"] for t in reading.letters for row in t.to_pylist()] == [
        b'{"event_id": "broken", '
    ]
    # The rows that the speed layer has published since are those of the topic.
    assert Counter(one.contents()) == rows
    assert before != reading.snapshot_id
    count = f"SELECT count(*) AS n FROM {one.job.stream.table}"
    answer = call(one, "query", count, "--live")
    assert f"{len(kept)}\n" in answer and "then 0 records of the topic" in answer
