"""Fields that the schema does not know: counted, and taken up as `check --drift` says."""

from typing import Any

import pytest
import yaml
from commands import call, shown
from run_books import printed, words
from world import Make, event, past_hour

from anabranch.common.errors import Refused
from anabranch.offsets.hours import start_of
from anabranch.protocol.ledger_row import UnknownField, UnknownFields


def drifted(hour: str) -> list[tuple[int, Any, bytes | None]]:
    at = start_of(hour)
    values = [
        event("plain", at, player="p", level=1),
        event("null", at, player=None),
        event("red", at, colour="red", level=2),
        event("both", at, colour="blue", **{"size\n": 1.5, "gone": None}),
        b'{"event_id": "bad", "colour": "none"}',
    ]
    return [(0, at, value) for value in values]


def test_unknown_fields_are_counted_and_proposed(world: Make) -> None:
    one, hour = world(partitions=1), past_hour(1)
    one.begin(drifted(hour))
    [accepted] = one.batch(hour)
    # A record that is dead is no row that lacks a field.
    assert (accepted.decision, accepted.account.good, accepted.account.dead) == ("accepted", 4, 1)
    colour = UnknownField("colour", 2, (0, 2), (0, 3), '"aaa"', "STRING")
    gone = UnknownField("gone", 1, (0, 3), (0, 3), "null", None)
    size = UnknownField("size\n", 1, (0, 3), (0, 3), "9.9", "DOUBLE")
    assert one.decision(hour).unknown == UnknownFields(2, (colour, gone, size))
    explained = call(one, "explain", one.name, hour)
    assert "2 records with fields that the schema does not know: colour" in explained

    said = call(one, *words(printed("anabranch check STREAM --drift", STREAM=one.name)))
    [schema] = [line for line in said.splitlines() if line.startswith("schema: ")]
    assert r"size\n" in said and "letters, digits and underscores" in said
    reported = shown(one, "check", one.name, "--drift")
    assert [f["name"] for f in reported["fields"] if f["obstacle"]] == ["size\n"]
    one.reconfigure(**yaml.safe_load(schema))
    verbs = {tuple(command.split()[:2]) for command in reported["commands"]}
    assert verbs <= {("anabranch", "apply"), ("anabranch", "batch")}
    assert reported["restate"] == [hour]
    assert reported["commands"][0] == f"anabranch apply {one.name}"
    one.apply()
    # A field that is now in the schema is still missing from the hour, until it is restated.
    assert shown(one, "check", one.name, "--drift")["restate"] == [hour]
    [restated] = one.batch(hour, restate=True)
    assert (restated.decision, restated.revision) == ("accepted", 2)
    assert {r["event_id"]: r["colour"] for r in one.rows()} == {
        "plain": None, "null": None, "red": "red", "both": "blue",
    }  # fmt: skip
    assert [f["name"] for f in shown(one, "check", one.name, "--drift")["fields"]] == ["size\n"]


@pytest.mark.full
def test_a_stream_that_ignores_them_counts_none(world: Make) -> None:
    one, hour = world(unknown="ignore", partitions=1), past_hour(1)
    at = start_of(hour)
    # Of a record, the first 200 names in their order are counted.
    many = {f"z{i:03}": i for i in range(300)}
    hostile = {'it\'s \\ "q"': 1, "a\n\x07`b": 2}
    long = hostile | {"n" * 40_000: 3}
    fields = {"many": long | many, "long": long, "hostile": hostile}
    one.begin([(0, at, event(name, at, **of)) for name, of in fields.items()])
    one.batch(hour)
    assert one.decision(hour).unknown is None
    one.reconfigure(unknown="count")
    one.batch(hour, restate=True)
    unknown = one.decision(hour).unknown
    assert unknown is not None
    assert (unknown.records, len(unknown.fields), unknown.others) == (3, 50, 150)
    assert {f.name: (f.records, f.type) for f in unknown.fields[:3]} == {
        "it's \\ \"q\"": (3, "BIGINT"), "a\n\x07`b": (3, "BIGINT"), "n" * 100: (2, None),
    }  # fmt: skip
    reported = call(one, "check", one.name, "--drift")
    assert "\x07" not in reported and "too long" in reported and "n" * 101 not in reported
    assert call(one, "explain", one.name, hour).count("\x07") == 0


@pytest.mark.full
def test_rescued_fields_move_to_their_column(world: Make) -> None:
    one, hour, later = world(partitions=1), past_hour(2), past_hour(1)
    one.send(drifted(hour))
    at = start_of(later)
    odd = {i: {"size": {"w": [1.5, None]}} for i in (3, 7)}
    one.begin([(0, at, event(f"{later}-{i}", at, **odd.get(i, {}))) for i in range(9)])
    one.batch(hour)
    one.reconfigure(unknown="rescue")
    # The batch layer's rows lack the column until an hour is restated; both layers write it from
    # now on.
    one.serve()

    def rescued() -> dict[str, str]:
        found = {r["event_id"].removeprefix(f"{later}-"): r["rescued"] for r in one.rows()}
        return {name: text for name, text in found.items() if text is not None}

    # Values are as they were sent.
    of_later = dict.fromkeys("37", '{"size":{"w": [1.5, null]}}')
    assert rescued() == of_later
    [accepted] = one.batch(later)
    # The layers agree to the byte.
    diff = accepted.account.diff
    assert diff is not None and (diff.missing, diff.extra, diff.changed) == (0, 0, 0)
    [restated] = one.batch(hour, restate=True)
    of_hour = {"red": '{"colour":"red"}', "both": '{"colour":"blue","gone":null,"size\\n":1.5}'}
    assert (restated.decision, rescued()) == ("accepted", of_later | of_hour)
    unknown = one.decision(hour).unknown
    assert unknown is not None
    assert [f.name for f in unknown.fields] == ["colour", "gone", "size\n"]

    # An added field is in its column, and in no other.
    one.evolve(schema=one.job.stream.ddl + ", colour STRING, gone STRING")
    one.batch(hour, restate=True)
    assert rescued() == of_later | {"both": '{"size\\n":1.5}'}
    assert {r["colour"] for r in one.rows()} == {None, "red", "blue"}
    one.reconfigure(unknown="count")
    with pytest.raises(Refused, match="rescued"):
        one.apply()
    one.evolve(schema=one.job.stream.ddl + ", rescued STRING")
    one.batch(hour, restate=True)
    assert rescued() == of_later


@pytest.mark.full
def test_a_refused_field_makes_a_dead_letter_until_it_is_known(world: Make) -> None:
    one, hour = world(unknown="refuse", partitions=1), past_hour(1)
    one.serve(drifted(hour))
    letters = {r["kafka_offset"]: (r["error_code"], r["error_text"]) for r in one.dead()}
    assert {offset: code for offset, (code, _) in letters.items()} == {
        2: "unknown_field", 3: "unknown_field", 4: "missing_required",
    }  # fmt: skip
    assert letters[2][1] == "expected no fields beside those of the schema, found colour"
    [accepted] = one.batch(hour)
    assert (accepted.account.good, accepted.account.dead) == (2, 3)
    unknown = one.decision(hour).unknown
    # Those that only an unknown field keeps from being rows are counted.
    assert unknown is not None and [(f.name, f.records) for f in unknown.fields] == [
        ("colour", 2), ("gone", 1), ("size\n", 1),
    ]  # fmt: skip
    one.evolve(schema=one.job.stream.ddl + ", colour STRING")
    one.replay()
    colours = {r["event_id"]: r["colour"] for r in one.rows()}
    assert colours == {"plain": None, "null": None, "red": "red"}
    codes = {r["kafka_offset"]: r["error_code"] for r in one.dead()}
    assert codes == {3: "unknown_field", 4: "missing_required"}
