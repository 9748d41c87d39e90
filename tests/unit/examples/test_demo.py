"""Decisions of the demo without a service: the bytes of an event from its row, and the progress of
the speed layer."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from demo import audit
from demo.__main__ import rest_of
from demo.story import Story, poll

from anabranch.common.errors import Transient
from anabranch.dev.producers.events import generate

NOW = datetime(2026, 11, 21, 4, tzinfo=UTC)


def test_an_event_of_the_game_is_encoded_from_its_row_to_the_byte() -> None:
    sent = [
        r for r in generate(2_000, 3, NOW - timedelta(hours=2), NOW, True) if r.kind != "malformed"
    ]
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


def test_poll_repeats_until_there_is_an_answer() -> None:
    answers = iter([None, None, 0])
    assert poll(lambda: next(answers), "an answer", 10) == 0


def test_the_error_of_poll_names_the_awaited_condition() -> None:
    with pytest.raises(Transient, match="expected the sun to rise within 0 s"):
        poll(lambda: None, "the sun to rise", 0)


def test_a_brief_story_leaves_out_details_and_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("demo.story._SAY_EVERY_SECONDS", 0.0)
    for is_brief in (False, True):
        story = Story(is_brief)
        story.step("A step")
        story.say("a result")
        story.detail("a detail")
        with story.awaiting("a service") as report:
            report("1 s")
    full, brief = capsys.readouterr().out.split("A step")[1:]
    assert "a result" in full and "a detail" in full and "a service: 1 s" in full
    assert "a result" in brief and "a detail" not in brief and "a service" not in brief
