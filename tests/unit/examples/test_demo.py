"""The demo without a service: the bytes of an event from its row, the speed layer's progress."""

import json
from datetime import UTC, datetime, timedelta

from demo import audit
from demo.__main__ import rest_of

from anabranch.dev.producers.events import generate

NOW = datetime(2026, 11, 21, 4, tzinfo=UTC)


def test_an_event_of_the_game_is_encoded_from_its_row_to_the_byte() -> None:
    all_sent = generate(2_000, 3, NOW - timedelta(hours=2), NOW, True)
    sent = [record for record in all_sent if record.kind != "malformed"]
    assert any(r.kind == "late" for r in sent)
    for record in sent:
        assert record.value is not None
        event = json.loads(record.value)
        row = dict.fromkeys(("level", "amount")) | event
        row["event_time"] = datetime.fromisoformat(event["event_time"])
        assert audit.game_event_as_sent(row) == record.value


def test_the_part_of_each_hour_that_is_not_read_yet() -> None:
    by_hour = {"2026-11-21T01": {0: (0, 10), 1: (0, 5)}, "2026-11-21T02": {0: (10, 20), 1: (5, 5)}}
    assert rest_of(by_hour, {0: 10, 1: 5}) == [
        ("2026-11-21T01", by_hour["2026-11-21T01"], {}),
        ("2026-11-21T02", by_hour["2026-11-21T02"], {0: (10, 20)}),
    ]
    assert [rest for _, _, rest in rest_of(by_hour, {0: 12})] == [{1: (0, 5)}, {0: (12, 20)}]
