"""The page's charts of what micro-batches measured: from the snapshots that the table remembers to
lines and boxes."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import foreign_programs
import pytest
import time_machine
from accepted_hours import expire
from lakes import FIRST, StreamLake, new_lake
from pages import browser, five_years, new_page, parsed, show
from proofs import job, new_proof

from anabranch.common.counters import S3_REQUESTS, Tally
from anabranch.iceberg.commits import Change, Outcome
from anabranch.offsets.hours import start_of
from anabranch.operations.page import charts
from anabranch.operations.reports.measured_day import (
    Mark,
    MeasuredSpan,
    measured_spans,
    plan_spans,
    read_cost,
)
from anabranch.protocol.measured import READABLE, STAGE, Durations, Measured, Meter
from anabranch.protocol.publish import Publish, new_id, new_tag

NOW = datetime(2026, 11, 21, 15, 30, tzinfo=UTC)
NOTHING = Durations()


def span(
    hours_ago: float, readable: Durations, long: float = 1, **parts: Durations
) -> MeasuredSpan:
    since = NOW - timedelta(hours=hours_ago)
    given = {"stage": NOTHING, "publish": NOTHING, "commit": NOTHING} | parts
    return MeasuredSpan(since, since + timedelta(hours=long), readable, **given)


def reported(at: float, seconds: float, n: int) -> Mark:
    durations = Durations(seconds * n, {seconds: n})
    return Mark(NOW - timedelta(hours=at), Measured({READABLE: durations, STAGE: durations}))


def test_a_span_contains_its_events_also_where_a_table_was_recreated() -> None:
    marks = [reported(30, 2, 100), reported(23, 2, 130), reported(22, 2, 130), reported(21, 2, 7)]
    spans = plan_spans(marks, NOW - timedelta(hours=24))
    assert [(s.since, s.readable.count) for s in spans] == [
        (NOW - timedelta(hours=24), 30),
        (NOW - timedelta(hours=23), 0),
        (NOW - timedelta(hours=22), 7),
    ]
    assert spans[0].commit == NOTHING


def test_old_measurements_are_read_from_tagged_snapshots_after_expiry(tmp_path: Path) -> None:
    meter = Meter("speed", Tally())
    with time_machine.travel(start_of(FIRST), tick=False) as clock:
        one = new_lake(tmp_path)
        for hour in range(3):
            for quarter in range(4):
                clock.shift(timedelta(minutes=15))
                # A process of its own: none believes time that is set while it runs.
                publish_measured(
                    replace(one, lake=one.again()),
                    meter,
                    tagged=f"main-h{hour}" if quarter == 3 else None,
                )
        expire(replace(one, lake=one.again()))
        now = datetime.now(UTC)
        spans = measured_spans(one.table(), now - timedelta(hours=24))
    assert [s.readable.count for s in spans] == [4, 4]
    # The publish after a commit reports it.
    assert [(s.stage.sum, s.commit.count) for s in spans] == [(pytest.approx(1.6), 4)] * 2
    assert (spans[-1].until - spans[0].since) == timedelta(hours=2)


def test_snapshots_of_another_program_have_no_totals(tmp_path: Path) -> None:
    tally = Tally()
    meter, quarter = Meter("speed", tally), timedelta(minutes=15)
    with time_machine.travel(start_of(FIRST), tick=False) as clock:
        one = new_lake(tmp_path)
        for number in range(3):
            clock.shift(quarter)
            tally.count(S3_REQUESTS, "PutObject", 7)
            publish_measured(replace(one, lake=one.again()), meter, tagged=None)
            if number == 1:
                clock.shift(quarter)
                foreign_programs.rewrite(replace(one, lake=one.again()), "main", [])
        now = datetime.now(UTC)
        spans = measured_spans(one.table(), now - timedelta(hours=24))
        cost = read_cost(one.table(), now - quarter)
    assert [s.readable.count for s in spans] == [1, 1, 1]
    assert cost is not None
    assert (cost.since, cost.s3_requests) == (now - 2 * quarter, {"PutObject": 7})


def publish_measured(one: StreamLake, meter: Meter, tagged: str | None) -> None:
    state = one.state()
    said = meter.to_properties(state.branch_properties["main"], [(READABLE, 1.5), (STAGE, 0.4)])
    changes = (Change("speed"), Change("main", properties=said))
    publish = Publish(new_id(), changes, state.timeline, state.position)
    assert one.publish(publish, state) is Outcome.LANDED
    meter.landed(0.2)
    if tagged is not None:
        state = one.state()
        tag = new_tag(state, tagged, "main", datetime.now(UTC))
        assert (
            one.publish(Publish(new_id(), (Change("speed"),), state.timeline, tags=(tag,)), state)
            is Outcome.LANDED
        )


def test_lines_are_level_in_a_span_and_broken_where_nothing_was_measured() -> None:
    half = Durations(20, {2.0: 9, 60.0: 1})
    spans = [span(6, half), span(5, half), span(4, NOTHING), span(3, Durations(9e9, {math.inf: 1}))]
    chart = charts.freshness(spans, timedelta(seconds=10), NOW)
    assert chart is not None
    lines = {line.name: line.path for line in chart.lines}
    assert lines.keys() == {"half", "most", "promised"}
    assert len(re.findall("M", lines["half"])) == 2
    # The first two spans meet at one height; values beyond all bounds are drawn at the highest.
    assert re.fullmatch(r"M557\.5 (\S+?)H584\.6V\1H611\.7M638\.8 10\.0H665\.8", lines["half"])
    heights = [float(y) for y in re.findall(r"M\S+ ([\d.]+)", lines["most"])]
    assert heights[0] > heights[1] == 10
    assert chart.summary == (
        "Of 21 micro-batches half were readable within 2 s, 99 of 100 after more than 2 h; the "
        "promise is 10 s."
    )
    assert [row.values for row in chart.rows] == [("2 s", "1 min")] * 2 + [
        ("more than 2 h", "more than 2 h")
    ]
    assert charts.freshness([span(3, NOTHING)], None, NOW) is None


@pytest.mark.parametrize(
    "promised", [None, timedelta(seconds=1), timedelta(seconds=15), timedelta(hours=9)]
)
@pytest.mark.parametrize("bound", [0.1, 2, 7200, math.inf])
def test_all_points_are_within_the_chart(bound: float, promised: timedelta | None) -> None:
    chart = charts.freshness([span(2, Durations(1, {bound: 3}))], promised, NOW)
    assert chart is not None and chart.axis
    places = [
        float(y) for line in chart.lines for y in re.findall(r"(?:M\S+ |V)([\d.]+)", line.path)
    ]
    assert all(10 <= y <= charts.HEIGHT - 24 for y in [*places, *(y for _, y in chart.axis)])


def test_a_micro_batchs_time_is_stacked_by_phase() -> None:
    parts = {
        "stage": Durations(30, {1: 30}),
        "publish": Durations(15, {1: 30}),
        "commit": Durations(6, {0.25: 30}),
    }
    chart = charts.micro_batches([span(2, NOTHING, **parts), span(1, NOTHING)], NOW)
    assert chart is not None
    assert [box.part for box in chart.boxes] == ["stage", "publish", "commit"]
    tops = [(box.y, box.height) for box in chart.boxes]
    assert tops[0][0] + tops[0][1] == charts.HEIGHT - 24 and tops[-1][0] == 10
    assert all(
        above[0] + above[1] == pytest.approx(below[0], abs=0.2) for below, above in pairwise(tops)
    )
    assert (
        chart.summary
        == "A micro-batch took 1.7 s on average: stage 1 s, publish 0.5 s, commit 0.2 s."
    )
    assert chart.boxes[1].title == "13:30 to 14:30: publish 0.5 s"
    assert charts.micro_batches([span(1, Durations(1, {1: 1}))], NOW) is None


def test_the_page_has_the_data_of_the_charts_as_text(tmp_path: Path) -> None:
    page = new_page(job(new_proof(tmp_path)), now=lambda: NOW)
    show(page, NOW, five_years("events", NOW))
    html = parsed(browser(page).get("/streams/events").text)
    assert "99 of 100 within 5 s; the promise is 10 s." in html.text
    pictures = [svg for svg in html.all("svg") if svg.get("role") == "img"]
    named = {attributes.get("id") for _, attributes in html.elements}
    assert len(pictures) == 3
    assert all(
        {svg["aria-labelledby"], svg.get("aria-describedby") or svg["aria-labelledby"]} <= named
        for svg in pictures
    )
    assert len([tag for tag, _ in html.elements if tag == "details"]) == 3
    assert html.text.count("2026-11-21 14:30:00") >= 2
    show(page, NOW, replace(five_years("events", NOW), measured=()))
    assert "No micro-batch was measured" in parsed(browser(page).get("/streams/events").text).text


def test_times_have_few_digits() -> None:
    seconds = (0.0, 0.123, 0.5, 9.96, 42.4, 60, 90, 5400, math.inf)
    assert [charts.seconds_words(s) for s in seconds] == [
        "0 s", "0.12 s", "0.5 s", "10 s", "42 s", "1 min", "1.5 min", "1.5 h", "more than 2 h",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("highest", "marks"),
    [
        (1.13, ["0", "0.5", "1"]),
        (9.9, ["0", "2", "4", "6", "8"]),
        (0.02, ["0", "0.01", "0.02"]),
        (1.0, ["0", "0.5", "1"]),
    ],
)
def test_an_axis_has_round_numbers(highest: float, marks: list[str]) -> None:
    axis = charts._linear_axis(highest, charts.rate_words)
    assert [words for words, _ in axis] == marks
    assert axis[0][1] == charts._FLOOR and min(y for _, y in axis) >= charts._FLOOR - charts._ROOM
