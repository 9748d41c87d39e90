"""Whether all events of a day are there, by the stream's bounds."""

from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lakes import new_state, new_stream

from anabranch.cli.render.hours import event_time_text
from anabranch.cli.report import print_text
from anabranch.common.errors import ConfigurationError
from anabranch.config import EventTime
from anabranch.config.columns import parse_columns
from anabranch.offsets.hours import Cut, Timeline, hours_between, shift, start_of
from anabranch.protocol.state import State
from anabranch.protocol.watermarks import (
    completeness,
    parse_event_time,
    plan_hours,
    plan_open_spans,
)

DAY = "2026-11-20"


def bounded(**bounds: Any) -> Any:
    ddl = "id STRING NOT NULL, at TIMESTAMP NOT NULL"
    event_time = EventTime(column="at", **bounds)
    return new_stream(schema=ddl, columns=parse_columns(ddl), event_time=event_time)


def sealed_to(hour: str, waiting: tuple[str, ...] = (), first: str = "2026-11-01T00") -> State:
    """Every hour before `hour` is accepted, but for those that wait."""
    timeline = Timeline(first, hour, {}, sealed={h: Cut("t", {}) for h in waiting})
    return new_state(timeline, settled_before=hour)


def test_open_spans_are_planned_from_the_last_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: each read of a view looks at every hour since the stream began."""
    state = sealed_to("2026-11-21T00", ("2026-11-20T03",), first="2020-01-01T00")
    asked, is_accepted = list[str](), State.is_accepted

    def counted(self: State, hour: str) -> bool:
        asked.append(hour)
        return is_accepted(self, hour)

    monkeypatch.setattr(State, "is_accepted", counted)
    hour = timedelta(hours=1)
    spans = plan_open_spans(EventTime(column="at", past=hour, future=hour), state)
    waits, opened = start_of("2026-11-20T03"), start_of("2026-11-21T00")
    assert spans == [(waits - hour, waits + 2 * hour), (opened - hour, None)]
    assert asked == ["2026-11-20T03"]


@given(
    st.datetimes(datetime(2026, 11, 19), datetime(2026, 11, 22)),
    st.integers(0, 200),
    st.integers(0, 100),
    st.integers(0, 96),
)
def test_hours_whose_bounds_touch_the_day(at: datetime, past: int, future: int, ago: int) -> None:
    """An hour takes an event from `past` minutes before its start to `future` minutes after its
    end."""
    bounds = EventTime(column="at", past=timedelta(minutes=past), future=timedelta(minutes=future))
    start, end = parse_event_time(DAY)
    first, last = plan_hours(bounds, start, end)
    assert first is not None
    assert last is not None
    hour = shift("2026-11-22T12", -ago)
    begin = start_of(hour).replace(tzinfo=None)
    takes = begin - timedelta(minutes=past) <= at <= begin + timedelta(hours=1, minutes=future)
    if takes and start.replace(tzinfo=None) <= at < end.replace(tzinfo=None):
        assert first <= hour <= last
    # And no hour is named for nothing.
    for edge in (first, last):
        begin = start_of(edge)
        assert begin - timedelta(minutes=past) < end
        assert begin + timedelta(hours=1, minutes=future) >= start


def test_a_day_is_complete_once_all_hours_that_can_contain_its_events_are_accepted() -> None:
    stream = bounded(past="2 days", future="1 hour")
    done = completeness(stream, sealed_to("2026-11-23T00"), DAY)
    assert (done.first, done.last, done.complete) == ("2026-11-19T22", "2026-11-22T23", True)
    assert (done.accepted, done.open) == (
        len(hours_between("2026-11-19T22", "2026-11-23T00")),
        None,
    )

    early = completeness(stream, sealed_to("2026-11-22T23"), DAY)
    assert (early.complete, early.waiting, early.open) == (False, [], "2026-11-22T23")
    assert early.complete_at == start_of("2026-11-23T00")

    refused = completeness(
        stream, sealed_to("2026-12-01T00", ("2026-11-21T07", "2026-11-25T00")), DAY
    )
    assert (refused.complete, refused.waiting, refused.open) == (False, ["2026-11-21T07"], None)


def test_an_hour_of_event_time_and_a_day_before_the_stream_began() -> None:
    stream = bounded(past="1 hour", future="0 seconds")
    one = completeness(stream, sealed_to("2026-11-20T15"), "2026-11-20T13")
    assert (one.first, one.last, one.complete) == ("2026-11-20T12", "2026-11-20T14", True)
    before = completeness(stream, sealed_to("2026-11-21T00", first="2026-11-20T23"), "2026-11-18")
    assert (before.complete, before.accepted, before.open) == (True, 0, None)
    future = completeness(stream, sealed_to("2026-11-20T15"), "2026-11-25")
    assert (future.complete, future.accepted, future.open) == (False, 0, "2026-11-24T23")


def test_without_bounds_nothing_is_ever_complete(capsys: pytest.CaptureFixture[str]) -> None:
    view = completeness(bounded(), sealed_to("2026-11-23T00"), DAY)
    assert (view.complete, view.first) == (False, "2026-11-01T00")
    assert (view.last, view.complete_at) == (None, None)
    print_text(event_time_text(view))
    assert "no event_time.past" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="expected `event_time:` in its file"):
        completeness(new_stream(), sealed_to("2026-11-23T00"), DAY)
    for text in ("20.11.2026", "2026-11-20T1", "2026-13-01"):
        with pytest.raises(ConfigurationError, match="expected a UTC"):
            completeness(bounded(), sealed_to("2026-11-23T00"), text)
    for text in ("9999-12-31", "9999-12-31T23", "9999-12-30", "0001-01-01"):
        with pytest.raises(ConfigurationError, match="expected a time whose ingest hours are in"):
            completeness(bounded(past="1 day", future="1 hour"), sealed_to("2026-11-23T00"), text)
