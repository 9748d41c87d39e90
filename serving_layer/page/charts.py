"""Charts of the last day, as SVG without styles or scripts of its own; the numbers stand beside them as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving_layer.views.status import HourSummary

WIDTH, HEIGHT = 720, 160
_LEFT, _BOTTOM, _TOP = 70, 24, 10


@dataclass(frozen=True)
class Bar:
    """An hour's bar; `value` is None where nothing was counted."""

    hour: str
    value: float | None
    x: float
    y: float
    width: float
    height: float
    is_named: bool


@dataclass(frozen=True)
class Chart:
    """Bars over time, and the marks of the upright axis: (label, y)."""

    bars: Sequence[Bar]
    axis: Sequence[tuple[str, float]]


def throughput(day: Sequence[HourSummary]) -> Chart | None:
    """Offsets a second by sealed hour, as the ledger counted them; None while it has counted none. Pure."""
    rates = [(view.hour, view.counts.offsets / 3600 if view.counts.offsets is not None else None) for view in day]
    known = [rate for _, rate in rates if rate is not None]
    if not known:
        return None
    highest = max(known) or 1.0
    step, room = (WIDTH - _LEFT) / len(rates), HEIGHT - _TOP - _BOTTOM
    bars = []
    for i, (hour, rate) in enumerate(rates):
        height = room * (rate or 0) / highest
        x = _LEFT + step * i
        bars.append(
            Bar(hour, rate, round(x + 1, 1), round(HEIGHT - _BOTTOM - height, 1), round(max(1.0, step - 2), 1),
                round(height, 1), i % 6 == 0)
        )  # fmt: skip
    axis = [(rate_words(highest * part), round(HEIGHT - _BOTTOM - room * part, 1)) for part in (0, 0.5, 1)]
    return Chart(bars, axis)


def rate_words(rate: float) -> str:
    """A rate with three digits or so. Pure."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
