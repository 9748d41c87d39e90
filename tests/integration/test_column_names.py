"""Columns of a stream whose names are also words of the batch layer."""

from world import SCHEMA, Make, event, past_hour

from anabranch.offsets.hours import start_of


def test_a_column_named_source_keeps_its_values_in_both_layers(world: Make) -> None:
    one, at = world(schema=f"{SCHEMA}, source STRING", partitions=2), start_of(past_hour(1))
    one.send([(0, at, event("first", at, source="web")), (1, at, event("second", at))])
    one.serve([(1, at, b"{broken")])
    by_speed = sorted((r["event_id"], r["source"]) for r in one.rows())
    assert by_speed == [("first", "web"), ("second", None)]
    assert [r.decision for r in one.batch()] == ["accepted"]
    assert sorted((r["event_id"], r["source"]) for r in one.rows()) == by_speed
    [accepted] = [row for row in one.job.ledger.history() if row.decision == "accepted"]
    assert accepted.sources == {"kafka": 3}
