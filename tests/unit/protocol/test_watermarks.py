"""Promises of a publish to downstream readers: complete through an hour, fresh through a time."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lakes import FIRST, StreamLake, new_lake, new_state, new_stream

from anabranch.cli.render.hours import event_time_text
from anabranch.cli.report import print_text
from anabranch.common.errors import ConfigurationError
from anabranch.config import EventTime
from anabranch.iceberg import commits, snapshots
from anabranch.offsets.hours import Adoption, Cut, Timeline, end_of, hours_between, shift, start_of
from anabranch.protocol import watermarks
from anabranch.protocol.state import Accepted, State
from anabranch.protocol.watermarks import COMPLETE_THROUGH, FRESH_THROUGH, Watermarks, completeness

NOTHING = Watermarks()


def at(n: int) -> str:
    return shift(FIRST, n)


def cut(n: int) -> Cut:
    """Return the cut of hour n: ten offsets of one partition."""
    return Cut("t", {0: (10 * n, 10 * n + 10)})


def sealed_state(
    hours: int, accepted: Iterable[int] = (), position: int = 0, **values: Any
) -> State:
    """`hours` sealed hours, of which some are accepted, and a position."""
    done = set(accepted)
    given = values.pop("timeline", {})
    timeline = Timeline(
        FIRST, at(hours), {0: 10 * hours},
        sealed={at(n): cut(n) for n in range(hours) if n not in done}, **given,
    )  # fmt: skip
    by_hour = {at(n): Accepted(1, cut(n)) for n in done}
    return new_state(timeline, {0: position}, accepted=by_hour, **values)


@settings(max_examples=200)
@given(st.integers(0, 12), st.data())
def test_complete_equals_counting_from_the_first_hour(hours: int, data: st.DataObject) -> None:
    """Hours before `settled_before` are forgotten; those that wait again are sealed."""
    done = data.draw(st.sets(st.integers(0, hours - 1))) if hours else set()
    settled = at(data.draw(st.integers(0, hours)))
    state = sealed_state(hours, done, settled_before=settled)
    newest = {hour: accepted for hour, accepted in state.accepted.items() if hour >= settled}
    state = replace(state, accepted=newest)
    counted = None
    for hour in hours_between(state.timeline.first, state.timeline.open):
        if not state.is_accepted(hour):
            break
        counted = hour
    assert watermarks.complete_through(state) == counted


def fresh(state: State, **values: Any) -> datetime | None:
    given: dict[str, Any] = {"before": NOTHING, "is_merged": True}
    return watermarks.plan_watermarks(state, **(given | values)).fresh_through


WORD = {"read_until": end_of(at(3)) + timedelta(minutes=12)}
BEFORE = {"before": Watermarks(None, end_of(at(2)))}
ENDS = sealed_state(1, position=20, timeline={"boundaries": {at(1): {0: 20}, at(2): {0: 30}}})
TWO = replace(ENDS, position=replace(ENDS.position, offsets={0: 20, 1: 5}))
DROPPED = {"covered_from": at(4), "kept": (at(2),)}


def all_read(skipped: int | None = None, accepted: Iterable[int] = (), **values: Any) -> State:
    skips = {} if skipped is None else {"skipped": (at(skipped),)}
    return sealed_state(4, accepted, 45, timeline=skips, **values)


FRESH: dict[str, tuple[State, dict[str, Any], datetime | None]] = {
    "position": (sealed_state(3, position=25), {}, end_of(at(1))),
    "accepted ahead of it": (sealed_state(4, accepted=[2, 3], position=20), {}, end_of(at(3))),
    "up to an hour of neither": (sealed_state(4, accepted=[0, 3], position=19), {}, end_of(at(0))),
    "no hour": (sealed_state(0), {}, None),
    "ends that are decided, not sealed": (ENDS, {}, end_of(at(1))),
    "another partition's end is not known": (TWO, {}, end_of(at(0))),
    "the speed layer's statement": (all_read(), WORD, WORD["read_until"]),
    "an hour lacks skipped offsets": (all_read(2), WORD, end_of(at(1))),
    "an accepted hour lacks none": (all_read(2, accepted=[2]), WORD, WORD["read_until"]),
    "the running hour lacks some": (all_read(4), WORD, end_of(at(3))),
    # What the speed layer reads of it is its own until it covers the hour.
    "a merge kept an hour": (all_read(retained_hours=(at(2),)), WORD, end_of(at(1))),
    "a merge kept the running hour": (all_read(retained_hours=(at(4),)), WORD, end_of(at(3))),
    "a waiting hour's speed rows were dropped": (
        sealed_state(6, accepted=[0, 1, 4], position=60, timeline=DROPPED), {}, end_of(at(2)),
    ),
    "a promise is kept": (sealed_state(4, position=10), BEFORE, end_of(at(2))),
    "a newer promise": (sealed_state(4, position=40), BEFORE, end_of(at(3))),
    "main is not merged": (
        sealed_state(4, position=40), {**BEFORE, "is_merged": False}, end_of(at(2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("state", "given", "expected"), FRESH.values(), ids=FRESH)
def test_fresh_is_the_end_of_the_complete_hours_of_main(
    state: State, given: dict[str, Any], expected: datetime | None
) -> None:
    assert fresh(state, **given) == expected


def test_the_hour_in_which_a_log_was_given_up_ends_with_the_one_after_it() -> None:
    """The hazard: sealed before its end on the clock; what came later is of the next hour."""
    adoption = Adoption(at(2), "old", {0: 0})
    given_up = sealed_state(3, accepted=[0, 1, 2], timeline={"adoptions": (adoption,)})
    assert fresh(given_up) == end_of(at(1))
    timeline = replace(given_up.timeline, open=at(4), sealed={at(3): Cut("t", {0: (0, 5)})})
    position = replace(given_up.position, offsets={0: 5})
    assert fresh(replace(given_up, timeline=timeline, position=position)) == end_of(at(3))


def test_engines_can_read_the_properties() -> None:
    moment = datetime(2026, 11, 21, 3, 12, 45, 123_999, UTC)
    said = Watermarks("2026-11-21T02", moment).to_properties()
    assert said == {COMPLETE_THROUGH: "2026-11-21T02", FRESH_THROUGH: "2026-11-21T03:12:45.123Z"}
    found = Watermarks.from_properties(said)
    assert found == Watermarks("2026-11-21T02", moment.replace(microsecond=123_000))
    assert NOTHING.to_properties() == {}
    assert Watermarks.from_properties({COMPLETE_THROUGH: "", FRESH_THROUGH: ""}) == NOTHING


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    timeline = Timeline(FIRST, at(2), {0: 20}, sealed={at(n): cut(n) for n in range(2)})
    return new_lake(tmp_path, timeline=timeline)


def stated(lake: StreamLake) -> tuple[Watermarks, Watermarks]:
    """Return the watermarks in the table's properties and in the snapshot at the head of `main`."""
    table = lake.table()
    summary = snapshots.head(table, "main").summary
    assert summary is not None
    both = (table.properties, summary.additional_properties)
    of_table, of_main = map(Watermarks.from_properties, both)
    return of_table, of_main


def test_every_publish_states_them_in_its_own_commit(lake: StreamLake) -> None:
    before = len(lake.table().metadata.snapshots)
    word = end_of(at(1)) + timedelta(minutes=1)
    rows = lake.stage([(at(0), 0, 3), (at(1), 0, 12), (at(2), 0, 21)])
    lake.land(lake.speed(rows, {0: 22}, read_until=word))
    assert stated(lake) == (Watermarks(None, word), Watermarks(None, word))

    state = lake.state()
    hour = lake.stage([(at(0), 0, 3)])
    sealed = replace(state.timeline, sealed={at(1): cut(1)})
    lake.land(lake.accept(hour, at(0), Accepted(1, cut(0)), timeline=sealed))
    assert stated(lake) == (Watermarks(at(0), word), Watermarks(at(0), word))

    # A seal changes no row of main: the table alone says what it adds.
    state = lake.state()
    cuts = {at(1): cut(1), at(2): Cut("t", {0: (20, 22)})}
    ended = replace(state.timeline, open=at(3), start={0: 22}, sealed=cuts)
    lake.change(commits.Change("speed"), timeline=ended, state=state)
    assert stated(lake) == (Watermarks(at(0), end_of(at(2))), Watermarks(at(0), word))
    # Two snapshots each, and one for the seal; staged snapshots are dropped by their publish.
    assert len(lake.table().metadata.snapshots) == before + 5


def test_a_withdrawn_promise_is_empty(lake: StreamLake) -> None:
    """An operator set `batch` back: its hours wait again."""
    back = lake.state().heads["batch"]
    staged = lake.stage([(at(0), 0, 3)])
    sealed = replace(lake.state().timeline, sealed={at(1): cut(1)})
    lake.land(lake.accept(staged, at(0), Accepted(1, cut(0)), timeline=sealed))
    assert stated(lake)[0].complete_through == at(0)

    lake.set_back("batch", back)
    lake.move("main")
    assert stated(lake)[0].complete_through is None
    assert lake.table().properties[COMPLETE_THROUGH] == ""


# Whether all events of a day are there, by the stream's bounds.

DAY = "2026-11-20"


def bounded(**bounds: Any) -> Any:
    ddl = "id STRING NOT NULL, at TIMESTAMP NOT NULL"
    return new_stream(schema=ddl, event_time=EventTime(column="at", **bounds))


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
    spans = watermarks.plan_open_spans(EventTime(column="at", past=hour, future=hour), state)
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
    """An hour takes events from `past` minutes before its start to `future` after its end."""
    bounds = EventTime(column="at", past=timedelta(minutes=past), future=timedelta(minutes=future))
    start, end = watermarks.parse_event_time(DAY)
    first, last = watermarks.plan_hours(bounds, start, end)
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
    hours = hours_between("2026-11-19T22", "2026-11-23T00")
    assert (done.accepted, done.open) == (len(hours), None)

    early = completeness(stream, sealed_to("2026-11-22T23"), DAY)
    assert (early.complete, early.waiting, early.open) == (False, [], "2026-11-22T23")
    assert early.complete_at == start_of("2026-11-23T00")

    waits = sealed_to("2026-12-01T00", ("2026-11-21T07", "2026-11-25T00"))
    refused = completeness(stream, waits, DAY)
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
