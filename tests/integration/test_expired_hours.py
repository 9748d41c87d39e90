"""Hours that expire while both layers work: all promises stay true."""

from collections import Counter
from typing import Any

import pytest
from commands import call
from world import Make, World, past_hour, spread

import anabranch
from anabranch.common.errors import Refused
from anabranch.iceberg.s3 import open_store
from anabranch.operations.audit import audit
from anabranch.operations.reports.status import status
from serving_layer.changes import Token, poll

VIEWS = {"per_player": {"window": "1 hour", "group": ["player"], "aggregates": {"events": "count"}}}


def exported(one: World) -> set[tuple[str, int]]:
    listed = open_store(one.job.environment.s3).list_objects("tests", f"exports/{one.name}/")
    return {(key, size) for key, size, _ in listed}


def test_hours_expire_and_all_reports_stay_true(world: Make) -> None:
    older, old, kept, now = (past_hour(ago) for ago in (52, 51, 2, 0))
    one = world(keep="2 days", views=VIEWS)
    one.reconfigure(egress=[{"name": "export", "root": f"s3://tests/exports/{one.name}"}])
    one.topic()
    for hour in (older, old, kept):
        records = spread(hour, 6, hour)
        one.send([*records, records[0], (1, records[-1][1], b"{not json")])
    one.serve()
    results = one.batch()
    assert {r.decision for r in results} == {"accepted"}
    assert {older, old, kept} <= {r.hour for r in results}
    one.send_now(4, "now")
    one.speed()
    rows, letters, state = one.contents(), one.dead(), one.state
    complete = state.branch_properties["main"]["anabranch.complete-through"]
    consumed = Token.decode(list(poll(one.job, Token(one.name)))[-1].token)

    # A target that has yet to get an hour keeps it.
    assert "kept beyond their time" in call(one, "maintain", one.name)
    assert one.contents() == rows
    call(one, "egress", one.name)
    delivered = exported(one)
    assert older in call(one, "maintain", one.name, "--dry-run") and one.contents() == rows
    call(one, "maintain", one.name)

    # The hazard: rows and dead letters of the old hours are on no branch, those of the others are
    # exact.
    def of(hours: set[str], found: list[dict[str, Any]]) -> list[tuple[int, int]]:
        return sorted(
            (r["kafka_partition"], r["kafka_offset"]) for r in found if r["ingest_hour"] in hours
        )

    for branch in ("main", "batch", "speed"):
        assert of({older, old}, one.rows(branch)) == of({older, old}, one.dead(branch)) == []
    assert of({kept}, one.dead()) == of({kept}, letters) and len(of({kept}, letters)) == 1
    assert len(of({kept}, one.rows())) == 6 and len(of({now}, one.rows())) == 4
    # The account: each hour's row of the ledger is that of its acceptance, and promises do not move
    # back.
    newest = [one.decision(hour) for hour in (older, old, kept)]
    assert [(r.decision, r.good, r.dead, r.duplicate) for r in newest] == [
        ("expired", 6, 1, 1), ("expired", 6, 1, 1), ("accepted", 6, 1, 1),
    ]  # fmt: skip
    assert one.state.branch_properties["main"]["anabranch.complete-through"] == complete
    states = {h["hour"]: h["state"] for h in one.hours()}
    states_of = [states[hour] for hour in (older, old, kept, now)]
    assert states_of == ["expired", "expired", "accepted", "open"]
    assert status(one.job).expired_hours == sum(state == "expired" for state in states.values())
    report = audit(one.job, None, with_kafka=True)
    assert report.agrees and report.expired >= 2, report.disagreements
    # Downstream: views are of what is left, consumers and targets keep what they have.
    view, counted = (
        anabranch.open(one.name, conf=str(one.folder)).view("per_player"),
        Counter[Any](),
    )
    for row in view.arrow().to_pylist():
        counted[row["player"]] += row["events"]
    assert counted == Counter(row["player"] for row in one.rows())
    assert list(poll(one.job, consumed)) == []
    assert old not in {change.hour for change in poll(one.job, Token(one.name))}
    call(one, "egress", one.name)
    assert exported(one) == delivered

    # Both layers go on; an expired hour comes back by neither, though Kafka still has its records.
    with pytest.raises(Refused, match="have expired"):
        one.batch(old, restate=True)
    assert [r.decision for r in one.batch(kept, restate=True)] == ["accepted"]
    one.send_now(3, "later")
    one.speed()
    assert {r["ingest_hour"] for r in one.rows()} == {kept, now}
    assert len(of({now}, one.rows())) == 7 and len(of({kept}, one.rows())) == 6
    assert audit(one.job, None, with_kafka=True).agrees
