"""A stream whose schema evolves: old and new rows for every reader, and rebuilt hours."""

import json
from datetime import datetime
from typing import Any

import pytest
from queries import run_query
from running import speed_running
from waiting import wait_for
from world import SAME, Make, World, event, past_hour

from anabranch.common.errors import Refused, Terminal
from anabranch.offsets.hours import start_of
from anabranch.protocol import apply, sealing
from anabranch.protocol.state import load_state
from anabranch.spark.session import LazySpark
from batch_layer.rebuild import Rebuilder, Result

BIG = 2**40
EARLIER = (
    "event_id STRING NOT NULL, player STRING NOT NULL, event_time TIMESTAMP NOT NULL, level INT, "
    "ratio FLOAT, price DECIMAL(6,2), place STRUCT<x: INT>, scores ARRAY<INT>, bonus MAP<STRING, "
    "INT>, items ARRAY<STRUCT<n: INT>>"
)
LATER = (
    "event_id STRING NOT NULL, player STRING, event_time TIMESTAMP NOT NULL, level BIGINT, ratio "
    "DOUBLE, price DECIMAL(9,2), place STRUCT<name: STRING, x: BIGINT>, scores ARRAY<BIGINT>, "
    "bonus MAP<STRING, BIGINT>, items ARRAY<STRUCT<n: BIGINT, of: STRING>>, colour STRING, home "
    "STRUCT<city: STRING>"
)
# What the producer sends from the beginning, whatever the stream's schema takes of it.
FULL: dict[str, Any] = {
    "player": "p", "level": 1, "ratio": 0.1, "price": 1.5, "place": {"x": 2, "name": "here"},
    "scores": [1, 2], "bonus": {"k": 3}, "items": [{"n": 4, "of": "gold"}], "colour": "red",
    "home": {"city": "Ulm"},
}  # fmt: skip


def records(hour: str, prefix: str) -> list[tuple[int, datetime, bytes]]:
    """Three records that EARLIER takes, and three that LATER alone does."""
    at = start_of(hour)
    good = [event(f"{prefix}-{i}", at, **FULL) for i in range(3)]
    later = [
        event(f"{prefix}-level", at, **FULL | {"level": BIG}),
        event(f"{prefix}-items", at, **FULL | {"items": [{"n": BIG}]}),
        event(f"{prefix}-nobody", at, **FULL | {"player": None}),
    ]
    return [(0, at, value) for value in (*good, *later)]


def diff(result: Result) -> dict[str, int]:
    return {k: getattr(result.account.diff, k) for k in ("missing", "extra", "changed")}


def readings(one: World) -> list[list[dict[str, Any]]]:
    """The rows of `main` as PyIceberg, DuckDB and Spark read them."""
    name = one.job.stream.table
    spark = one.spark.table(f"lake.{name}").selectExpr(
        "to_json(struct(*), map('ignoreNullFields', 'false')) AS row"
    )
    by_spark = [json.loads(row["row"]) for row in spark.collect()]
    table = one.lake.load(name)
    others = [
        table.scan().to_arrow().to_pylist(),
        run_query(f"SELECT * FROM {name}", {name: table}).to_pylist(),
    ]
    results = []
    for rows in (by_spark, *others):
        plain = [r | {"bonus": dict(r["bonus"]), "price": float(r["price"])} for r in rows]
        results.append([{k: r[k] for k in FULL} | {"id": r["event_id"]} for r in plain])
    return [sorted(rows, key=lambda r: str(r["id"])) for rows in results]


def test_hours_of_both_schemas_are_read_and_rebuilt(world: Make) -> None:
    one = world(schema=EARLIER, create=1)
    accepted, served = past_hour(2), past_hour(1)
    one.send([*records(accepted, "a"), *records(served, "b")])
    one.speed()
    assert [r.decision for r in one.batch(accepted)] == ["accepted"]
    assert one.ids() == ["a-0", "a-1", "a-2", "b-0", "b-1", "b-2"]
    assert len(one.dead()) == 6

    one.reconfigure(schema=LATER)
    changes = one.apply()
    assert len(changes) == 12 and one.apply() == []
    # The hazard: Spark reads a snapshot with the columns of its own time.
    head = one.state.heads["speed"]
    then = one.spark.sql(f"SELECT * FROM lake.{one.job.stream.table} VERSION AS OF {head}")
    assert "colour" not in then.columns
    for rows in readings(one):
        assert [r["level"] for r in rows] == [1] * 6
        assert rows[0]["ratio"] == pytest.approx(0.1, rel=1e-6)
        assert rows[0]["place"] == {"x": 2, "name": None}
        assert rows[0]["items"] == [{"n": 4, "of": None}]
        assert (rows[0]["colour"], rows[0]["home"]) == (None, None)

    # Records that were dead only by the earlier types are missing in the speed layer; nothing else
    # is a difference.
    results = [*one.batch(accepted, restate=True), *one.batch(served)]
    counted = [(r.decision, r.revision, r.account.good, r.account.dead) for r in results]
    assert counted == [("accepted", 2, 6, 0), ("accepted", 1, 6, 0)]
    assert [diff(r) for r in results] == [SAME | {"missing": 3}] * 2
    assert one.contents() == one.acknowledged()
    assert one.dead() == []
    for rows in readings(one):
        full = {r["id"]: r for r in rows}
        assert full["a-1"] == FULL | {"id": "a-1"} and full["b-1"] == FULL | {"id": "b-1"}
        assert full["a-level"]["level"] == BIG and full["b-nobody"]["player"] is None
        assert full["b-items"]["items"] == [{"n": BIG, "of": None}]

    # The speed layer's own rows still are as they were written; new ones come beside them.
    now = datetime.now(start_of(served).tzinfo)
    one.send([(0, now, event("new", now, **FULL | {"level": BIG}))])
    one.speed()
    by_speed = {r["event_id"]: (r["colour"], r["level"]) for r in one.rows("speed")}
    assert (by_speed["a-0"][0], by_speed["new"]) == (None, ("red", BIG))
    assert one.contents() == one.acknowledged()


def test_a_speed_job_stops_where_apply_evolves_its_table(world: Make) -> None:
    one = world(create=2)
    one.send_now(20, "before")
    stopped = r"expected column .*; run `anabranch apply .* nothing is lost"
    with pytest.raises(Terminal, match=stopped), speed_running(one) as job:
        one.await_published(20)
        schema = str(one.job.stream.ddl).replace("level INT", "level BIGINT")
        one.reconfigure(schema=f"{schema}, colour STRING")
        assert len(one.apply()) == 2
        now = datetime.now(start_of(past_hour(0)).tzinfo)
        new = {"level": BIG, "colour": "red"}
        one.send([(i % 2, now, event(f"after-{i}", now, **new)) for i in range(20)])
        wait_for(lambda: job._failure is not None, "the job to find the table changed")
    assert one.published == 20
    one.speed()
    assert one.contents() == one.acknowledged()
    levels = {(r["event_id"].split("-")[0], r["level"], r["colour"]) for r in one.rows()}
    assert levels == {("before", None, None), ("after", BIG, "red")}


@pytest.mark.full
def test_an_hour_built_while_apply_evolves_is_not_published(world: Make) -> None:
    one = world(partitions=1)
    hour = past_hour(1)
    one.serve([(0, start_of(hour), event("e", start_of(hour), colour="red"))])
    sealing.seal(one.publisher, one.kafka)
    rebuilder = Rebuilder(one.job, LazySpark.of(one.spark))
    state = one.state
    built = rebuilder._hours.build(hour, state.cuts[hour], 0, state)
    one.evolve(schema=f"{one.job.stream.ddl}, colour STRING")
    with pytest.raises(Terminal, match="expected column colour none, found string"):
        rebuilder._publish([built], {hour: None}, state)
    assert not load_state(one.lake, one.job.stream.table).is_accepted(hour)
    assert [r.decision for r in one.batch(hour)] == ["accepted"]
    assert [r["colour"] for r in one.rows()] == ["red"]


@pytest.mark.full
def test_a_widened_key_still_drops_duplicates_of_the_hour_before(world: Make) -> None:
    schema = "n INT NOT NULL, event_id STRING NOT NULL, event_time TIMESTAMP NOT NULL"
    one = world(schema=schema, key="n", partitions=1)
    first, second = past_hour(2), past_hour(1)
    one.send([(0, start_of(first), event(f"a-{n}", start_of(first), n=n)) for n in (1, 2)])
    one.begin([(0, start_of(second), event(f"b-{n}", start_of(second), n=n)) for n in (2, 3)])
    assert [r.decision for r in one.batch(first)] == ["accepted"]
    one.reconfigure(schema=schema.replace("n INT", "n BIGINT"))
    assert one.apply() == [f"widened column n of {one.job.stream.table} from int to bigint"]
    (result,) = one.batch(second)
    assert (result.decision, result.account.good, result.account.duplicate) == ("accepted", 1, 1)
    (result,) = one.batch(first, restate=True)
    assert (result.decision, result.revision) == ("accepted", 2)
    assert one.ids() == ["a-1", "a-2", "b-3"]


@pytest.mark.full
def test_a_rolled_back_file_works_with_a_newer_table(world: Make) -> None:
    one = world(schema=EARLIER, create=1)
    one.reconfigure(schema=LATER)
    assert len(one.apply()) == 12
    first, second = past_hour(2), past_hour(1)
    # The second hour is not read yet, but it is cut.
    one.send([*records(first, "a"), *records(second, "b")])
    assert [r.decision for r in one.batch(first)] == ["accepted"]
    # The older file is put back: every job ends, and says what to run; what it says is so.
    one.reconfigure(schema=EARLIER)
    ahead = f"`anabranch apply {one.name} --rolled-back` leaves the table ahead"
    for run in (one.speed, one.batch):
        with pytest.raises(Terminal, match=ahead):
            run()
    with pytest.raises(Refused, match=ahead):
        one.apply()
    job = one.job
    changes = apply.apply(job.environment, job.stream, one.lake, one.kafka, rolled_back=True)
    assert len(changes) == 1 and "ahead of the stream's file in" in changes[0] and one.apply() == []
    one.speed()
    [result] = one.batch(second)
    assert (result.decision, result.account.good, result.account.dead, diff(result)) == (
        "accepted", 3, 3, SAME,
    )  # fmt: skip
    assert sorted(r["event_id"] for r in one.rows() if r["event_id"].startswith("a-")) == [
        "a-0", "a-1", "a-2", "a-items", "a-level", "a-nobody",
    ]  # fmt: skip
    for rows in readings(one):
        full = {r["id"]: r for r in rows}
        assert full["a-1"] == FULL | {"id": "a-1"}
        place, items = {"x": 2, "name": None}, [{"n": 4, "of": None}]
        old = {"colour": None, "home": None, "place": place, "items": items}
        assert full["b-1"] == FULL | old | {"id": "b-1", "ratio": pytest.approx(0.1, rel=1e-6)}
    # And forward again: rows written in between are like any older row, and an hour is restated.
    one.reconfigure(schema=LATER)
    assert one.apply() == [f"{one.job.stream.table} is no longer ahead of the stream's file"]
    one.speed()
    assert [(r.decision, r.revision) for r in one.batch(second, restate=True)] == [("accepted", 2)]
    assert one.contents() == one.acknowledged()
    for rows in readings(one):
        assert {r["id"]: r for r in rows}["b-1"] == FULL | {"id": "b-1"}
