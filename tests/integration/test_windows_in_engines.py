"""A view in Spark, DuckDB and Python, beside a GROUP BY over `main` by Spark's own windows."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from commands import shown
from world import Make, Value, World, event, past_hour

import anabranch
from anabranch.offsets.hours import start_of
from serving_layer.views import fill_status

SCHEMA = (
    "event_id STRING NOT NULL, player STRING, event_time TIMESTAMP NOT NULL, level INT, price "
    "DECIMAL(12,2)"
)
VIEWS = {
    "per_minute": {
        "window": "5 minutes",
        "group": ["player"],
        "aggregates": {
            "events": "count", "levels": "count(level)", "spent": "sum(price)",
            "climbed": "sum(level)", "least": "min(price)", "highest": "max(level)",
            "middle": "average(level)", "who": "approx_distinct(event_id)",
            "steps": "approx_distinct(level)",
        },
    }
}  # fmt: skip
DIRECT = """
    SELECT window(event_time, '5 minutes').start AS window_start, player, count(*) AS events, count(level) AS levels,
        sum(price) AS spent, sum(level) AS climbed, min(price) AS least, max(level) AS highest, avg(level) AS middle,
        count(DISTINCT event_id) AS who, count(DISTINCT level) AS steps
    FROM lake.{table} GROUP BY 1, 2
"""


def records(hour: str, prefix: str) -> list[Value]:
    """Events of an hour, every fifth up to two days late, on both sides of windows' ends."""
    values = []
    for i in range(60):
        at = start_of(hour) + timedelta(minutes=i)
        happened = at - timedelta(hours=i % 48, microseconds=i % 2) if i % 5 == 0 else at
        player, level = f"p{i % 3}" if i % 7 else None, i if i % 4 else None
        value = event(f"{prefix}-{i}", happened, player=player, level=level, price=i * 1000.25)
        values.append((i % 2, at, value))
    return values


def keyed(rows: list[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    found = {(row["window_start"], row["player"]): row for row in rows}
    assert len(found) == len(rows)
    return found


@pytest.mark.full
def test_a_view_is_the_same_in_every_engine(world: Make) -> None:
    one, hours = world(schema=SCHEMA, views=VIEWS, partitions=2), [past_hour(2), past_hour(1)]
    for hour in hours:
        one.send(records(hour, hour))
    changes = one.apply()
    assert f"created table {one.job.stream.table}_per_minute_partials" in changes
    one.speed()
    assert [r.decision for r in one.batch()] == ["accepted"] * 2
    [view] = fill_status(one.lake, one.job.stream)
    assert (view.filled, view.lacking) == (2, ())
    one.send_now(20, "now")
    one.speed()
    check(one)
    # The hour is restated under a rule that makes its late records dead letters.
    one.reconfigure(event_time={"column": "event_time", "past": "3 hours", "future": "1 hour"})
    before = len(one.rows())
    assert [r.revision for r in one.batch(hours[0], restate=True)] == [2]
    assert len(one.rows()) < before
    rows = check(one)
    assert {row["complete"] for row in rows} == {True, False}
    assert sum(row["late"] for row in rows) > 0
    assert one.apply() == []


def check(one: World) -> list[dict[str, Any]]:
    """Ask every engine; the rows of the view."""
    table, conf = one.job.stream.table, str(one.folder)
    handle = anabranch.open(one.name, conf=conf).view("per_minute")
    python: list[dict[str, Any]] = handle.arrow().to_pylist()
    rows = keyed(python)
    assert keyed(handle.duckdb().to_arrow_table().to_pylist()) == rows
    assert keyed(handle.spark(one.spark).toArrow().to_pylist()) == rows
    reported = shown(one, "query", f"SELECT * FROM {table}_per_minute")
    assert {
        (datetime.fromisoformat(r["window_start"]).astimezone(UTC), r["player"], r["events"])
        for r in reported
    } == {(start, player, row["events"]) for (start, player), row in rows.items()}
    direct = keyed(one.spark.sql(DIRECT.format(table=table)).toArrow().to_pylist())
    assert {
        key: {k: v for k, v in row.items() if k not in ("complete", "late")}
        for key, row in rows.items()
    } == direct
    return python
