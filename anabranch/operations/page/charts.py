"""Charts of the last day, as SVG without styles or scripts; a table shows the same numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from anabranch.operations.reports.measured_day import MeasuredSpan, sum_durations
from anabranch.operations.reports.status import HourSummary
from anabranch.protocol.measured import BOUNDS, Durations

WIDTH, HEIGHT = 720, 160
LEFT = 70
_BOTTOM, _TOP = 24, 10
_FLOOR, _ROOM = HEIGHT - _BOTTOM, HEIGHT - _TOP - _BOTTOM
DAY = timedelta(hours=24)
_NAMED_HOURS = 6  # hours between labels

PARTS = ("stage", "publish", "commit")
"""The parts of a micro-batch's time, from the bottom up."""


@dataclass(frozen=True)
class Bar:
    """An hour's bar; `value` is None for an hour without counts."""

    hour: str
    value: float | None
    x: float
    y: float
    width: float
    height: float
    is_named: bool


@dataclass(frozen=True)
class Chart:
    """Bars over time, and the labels of the vertical axis as (label, y)."""

    bars: Sequence[Bar]
    axis: Sequence[tuple[str, float]]


@dataclass(frozen=True)
class Line:
    """A step line; its name is also its CSS class."""

    name: str
    path: str


@dataclass(frozen=True)
class Box:
    part: str
    title: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Row:
    since: datetime
    until: datetime
    count: int
    values: Sequence[str]


@dataclass(frozen=True)
class TimeChart:
    """Lines or boxes over the last day; labels of both axes are (label, position). `summary`
    describes the chart in a sentence."""

    summary: str
    axis: Sequence[tuple[str, float]]
    hours: Sequence[tuple[str, float]]
    rows: Sequence[Row]
    lines: Sequence[Line] = ()
    boxes: Sequence[Box] = ()


def throughput(day: Sequence[HourSummary]) -> Chart | None:
    """Return offsets per second by sealed hour, from the ledger's counts; None without counts.
    Pure."""
    rates = [
        (view.hour, view.counts.offsets / 3600 if view.counts.offsets is not None else None)
        for view in day
    ]
    known = [rate for _, rate in rates if rate is not None]
    if not known:
        return None
    highest = max(known) or 1.0
    step = (WIDTH - LEFT) / len(rates)
    bars = []
    for i, (hour, rate) in enumerate(rates):
        height = _ROOM * (rate or 0) / highest
        x = LEFT + step * i
        bars.append(
            Bar(
                hour,
                rate,
                round(x + 1, 1),
                round(_FLOOR - height, 1),
                round(max(1.0, step - 2), 1),
                round(height, 1),
                i % _NAMED_HOURS == 0,
            )
        )
    return Chart(bars, _linear_axis(highest, rate_words))


def freshness(
    spans: Sequence[MeasuredSpan], promised: timedelta | None, now: datetime
) -> TimeChart | None:
    """Return the median and 99th percentile of the time until micro-batches were readable, rounded
    up to histogram bounds, with the promised freshness; None for a day without micro-batches.
    Pure."""
    known = [span for span in spans if span.readable.count]
    if not known:
        return None
    halves = [_quantile(span.readable, 0.5) for span in known]
    most = [_quantile(span.readable, 0.99) for span in known]
    limit = [promised.total_seconds()] if promised is not None else []
    low = max((b for b in BOUNDS if b < min([*halves, *limit])), default=BOUNDS[0] / 2)
    high = min(b for b in (*BOUNDS[:-1], max([*most, *limit])) if b >= max([*most, *limit]))

    def y(seconds: float) -> float:
        return round(_FLOOR - _ROOM * math.log(seconds / low) / math.log(high / low), 1)

    lines = [Line("promised", f"M{LEFT} {y(seconds)}H{WIDTH}") for seconds in limit]
    lines += [
        Line("half", _steps(known, halves, y, now)),
        Line("most", _steps(known, most, y, now)),
    ]
    shown = [b for b in BOUNDS if low <= b <= high]
    axis = [(seconds_words(b), y(b)) for b in shown[:: -max(1, math.ceil(len(shown) / 6))]]
    rows = [
        Row(
            span.since,
            span.until,
            span.readable.count,
            (_within(span.readable, 0.5), _within(span.readable, 0.99)),
        )
        for span in known
    ]
    all_of_it = sum_durations(span.readable for span in known)
    summary = (
        f"Of {all_of_it.count:,} micro-batches half were readable {_after(all_of_it, 0.5)}, 99 of "
        f"100 {_after(all_of_it, 0.99)}"
        if all_of_it.count > 1
        else f"1 micro-batch, readable {_after(all_of_it, 0.5)}"
    )
    summary += f"; the promise is {seconds_words(limit[0])}." if limit else "."
    return TimeChart(summary, axis, _hours(now), rows, lines=lines)


def micro_batches(spans: Sequence[MeasuredSpan], now: datetime) -> TimeChart | None:
    """Return the average duration of a micro-batch by step; None for a day without micro-batches.
    Pure."""
    known = [span for span in spans if span.stage.count]
    if not known:
        return None
    means = [tuple(_mean(getattr(span, part)) for part in PARTS) for span in known]
    highest = max(map(sum, means)) or 1.0
    boxes = []
    for span, parts in zip(known, means, strict=True):
        left, right, floor = _x(span.since, now), _x(span.until, now), float(_FLOOR)
        for part, mean in zip(PARTS, parts, strict=True):
            height = _ROOM * mean / highest
            floor -= height
            title = f"{_clock(span)}: {part} {seconds_words(mean)}"
            width = round(max(1.0, right - left - 1), 1)
            boxes.append(Box(part, title, left, round(floor, 1), width, round(height, 1)))
    rows = [
        Row(
            span.since,
            span.until,
            span.stage.count,
            [*map(seconds_words, parts), _within(span.stage, 0.99)],
        )
        for span, parts in zip(known, means, strict=True)
    ]
    total = {part: _mean(sum_durations(getattr(span, part) for span in known)) for part in PARTS}
    words = ", ".join(f"{part} {seconds_words(mean)}" for part, mean in total.items())
    return TimeChart(
        f"A micro-batch took {seconds_words(sum(total.values()))} on average: {words}.",
        _linear_axis(highest, seconds_words),
        _hours(now),
        rows,
        boxes=boxes,
    )


def rate_words(rate: float) -> str:
    """Return a rate with about three digits. Pure."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def seconds_words(seconds: float) -> str:
    """Return a duration with about three digits. Pure."""
    if math.isinf(seconds):
        return f"more than {seconds_words(BOUNDS[-2])}"
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _mean(durations: Durations) -> float:
    return durations.sum / durations.count if durations.count else 0.0


def _quantile(durations: Durations, share: float) -> float:
    """Return the quantile's bound for drawing: at most the highest finite bound."""
    return min(durations.quantile(share) or 0.0, BOUNDS[-2])


def _within(durations: Durations, share: float) -> str:
    return seconds_words(durations.quantile(share) or 0.0)


def _after(durations: Durations, share: float) -> str:
    """Return the quantile as text with its preposition: `within 2 s`, or `after more than 2 h`."""
    words = _within(durations, share)
    return f"after {words}" if words.startswith("more") else f"within {words}"


def _clock(span: MeasuredSpan) -> str:
    return f"{span.since:%H:%M} to {span.until:%H:%M}"


def _x(at: datetime, now: datetime) -> float:
    part = 1 - (now - at) / DAY
    return round(LEFT + (WIDTH - LEFT) * min(1.0, max(0.0, part)), 1)


def _hours(now: datetime) -> list[tuple[str, float]]:
    """Return the labels of the time axis, each at the start of its hour."""
    first = now.replace(minute=0, second=0, microsecond=0)
    hours = [first - timedelta(hours=back) for back in range(24)]
    return [(f"{hour:%d %H:%M}", _x(hour, now)) for hour in hours if hour.hour % _NAMED_HOURS == 0]


def _steps(
    spans: Sequence[MeasuredSpan],
    values: Sequence[float],
    y: Callable[[float], float],
    now: datetime,
) -> str:
    """Return the path of a step line, with gaps between spans that do not touch."""
    path, end = "", None
    for span, value in zip(spans, values, strict=True):
        path += f"V{y(value)}" if end == span.since else f"M{_x(span.since, now)} {y(value)}"
        path, end = f"{path}H{_x(span.until, now)}", span.until
    return path


def _linear_axis(highest: float, words: Callable[[float], str]) -> list[tuple[str, float]]:
    """Return labels at round numbers, from 0 to the highest value."""
    unit = 10 ** math.floor(math.log10(highest / 2))
    step = unit * max(factor for factor in (1, 2, 5) if unit * factor <= highest / 2)
    marks = [step * i for i in range(math.floor(highest / step + 1e-9) + 1)]
    return [(words(mark), round(_FLOOR - _ROOM * mark / highest, 1)) for mark in marks]
