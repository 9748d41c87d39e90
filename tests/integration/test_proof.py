"""An hour proves itself: the sent records are known exactly, and every report agrees."""

import shlex
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from commands import call, shown
from starlette.testclient import TestClient
from waiting import wait_for
from world import SAME, Make, World, event, past_hour, spread

from anabranch.iceberg.commits import Change, Outcome
from anabranch.iceberg.manifests import files_of
from anabranch.offsets.hours import start_of
from anabranch.operations.page.app import Page, Settings
from anabranch.protocol import ledger
from anabranch.protocol.ledger_row import Diff, HourAccount
from anabranch.protocol.publish import Publish, new_id, to_commit

GOOD, DUPLICATE, MALFORMED, ABORTED, CONTROL = 5, 2, 2, 3, 3
OFFSETS = GOOD + DUPLICATE + MALFORMED + ABORTED + CONTROL


def known(world: Make) -> World:
    """Two past hours in one partition, read by both layers. The older one is 4 good records. The
    newer one is, in three transactions: 4 good and a late one; 3 that are aborted; 2 malformed, a
    repetition of its own and one of the older hour. Each transaction ends with a control record."""
    one = world(partitions=1)
    hour = past_hour(1)
    before = spread(past_hour(2), 4, "before", partitions=1)
    good = spread(hour, 4, "e", partitions=1)
    at = good[-1][1]
    late = event("late", start_of(hour) - timedelta(days=9))
    one.send(before)
    transactions: list[tuple[bool, list[bytes | None]]] = [
        (True, [*(v for _, _, v in good), late]),
        (False, [event(f"aborted-{i}", at) for i in range(ABORTED)]),
        (True, [b"{not json", None, good[1][2], before[2][2]]),
    ]
    one.send_transactions(*((done, [(0, at, v) for v in values]) for done, values in transactions))
    one.apply()
    assert one.use_whole_log(hour, {past_hour(2): {0: 4}}) == {0: 4 + OFFSETS}
    one.speed()
    assert [r.decision for r in one.batch()] == ["accepted", "accepted"]
    return one


def said_by_every_view(one: World, hour: str) -> None:
    counts = {
        "offsets": OFFSETS, "good": GOOD, "dead": MALFORMED, "duplicate": DUPLICATE,
        "gap": ABORTED + CONTROL,
    }  # fmt: skip

    assert next(h for h in shown(one, "hours", one.name) if h["hour"] == hour)["counts"] == counts
    assert shown(one, "status", one.name)["unexplained"] == {}

    facts = shown(one, "explain", one.name, hour)
    assert (facts["state"], facts["served"], facts["counts"]) == ("accepted", "batch", counts)
    assert facts["gaps"] == {"aborted": ABORTED, "control": CONTROL}
    assert facts["layers"]["speed"]["rows"] == GOOD + DUPLICATE
    text = call(one, "explain", one.name, hour)
    assert f"of {OFFSETS} offsets {GOOD} became rows, {MALFORMED} are dead letters" in text
    assert f"{DUPLICATE} were removed as duplicates" in text
    assert f"{ABORTED + CONTROL} are gaps ({ABORTED} aborted, {CONTROL} control)" in text

    audited = shown(one, "audit", one.name)
    assert audited["agrees"]
    assert [h["kafka"] for h in audited["hours"]] == ["whole", "whole"]
    of_kafka = {"held": [4, 4 + OFFSETS], "given": GOOD + MALFORMED + DUPLICATE}
    of_kafka |= {"kept_nowhere": DUPLICATE, "not_given": 0}
    assert audited["hours"][1]["partitions"]["0"] == {
        "cut": [4, 4 + OFFSETS], "rows": GOOD, "batch": GOOD, "dead": MALFORMED, "twice": 0,
        "outside": 0, "misplaced": 0, "kafka": of_kafka,
    }  # fmt: skip
    assert "ledger, files and Kafka agree" in call(one, "audit", one.name)

    # Offsets: 4 to 8 good, 9 control, 10 to 12 aborted, 13 control, 14 and 15 malformed, 16 and 17
    # repeat.
    rows = shown(one, "explain", one.name, hour, "--rows")
    repeated = rows["duplicates"]
    assert repeated["counted"] == repeated["found"] == DUPLICATE and repeated["untold"] is None
    assert [(d["offset"], d["key"]["event_id"], d["repeats"]) for d in repeated["duplicates"]] == [
        (16, "e-1", {"hour": hour, "partition": 0, "offset": 5}),
        (17, "before-2", {"hour": past_hour(2), "partition": 0, "offset": 2}),
    ]
    differing = rows["difference"]
    none = dict.fromkeys(("unread", "missing_dead", "extra_dead"), 0)
    assert differing["diff"] == SAME | none | {"duplicate": DUPLICATE}
    assert differing["when_accepted"] == differing["diff"], "Spark and DuckDB judge alike"
    letters = shown(one, "dead-letters", one.name, "--hours", hour)
    assert [(r["reason"], r["count"], r["samples"][0]["value"]) for r in letters["reasons"]] == [
        ("malformed_json", 1, "{not json"), ("null_value", 1, None),
    ]  # fmt: skip
    decisions = shown(one, "history", one.name, "--hour", hour)
    assert [(d["decision"], d["revision"]) for d in decisions] == [("sealed", 0), ("accepted", 1)]

    said_by_page(one, hour)


def said_by_page(one: World, hour: str) -> None:
    """The status page of a real stream, its own threads running, says it too."""
    folder: Any = SimpleNamespace(jobs=lambda: {one.name: one.job}, groups={}, families={})
    page = Page(folder, Settings(every=timedelta(seconds=1)))
    with TestClient(page.app(["localhost"]), base_url="http://localhost") as client:

        def find(path: str, *parts: str) -> None:
            def missing() -> list[str]:
                text = client.get(path).text
                return [part for part in parts if part not in text]

            wait_for(lambda: not missing(), f"{path} to have {missing()}", 60, 0.1)

        find("/", "in order", f'href="/streams/{one.name}/hours/{hour}"')
        find(f"/streams/{one.name}?month={hour[:7]}", f"{hour}: accepted, served by batch")
        find(
            f"/streams/{one.name}/hours/{hour}", "It closes", f"all of the {OFFSETS} offsets",
            "gap: aborted", "Nothing is left unexplained",
            f"{DUPLICATE} counted by the ledger, {DUPLICATE} found now", "event_id e-1",
            "malformed_json: 1", "{not json", "null_value: 1",
        )  # fmt: skip


def test_every_report_shows_sent_spoiled_and_replaced_records(world: Make) -> None:
    one, hour = known(world), past_hour(1)
    said_by_every_view(one, hour)
    name = one.job.stream.table
    rows = one.contents()
    # A restatement; the revision before it is read by the command that `history` prints.
    assert [(r.decision, r.revision) for r in one.batch(hour, restate=True)] == [("accepted", 2)]
    first = next(d for d in shown(one, "history", one.name, "--hour", hour) if d["revision"] == 1)
    command = shlex.split(first["query"])
    assert command[-2:] == ["--as-of", f"{hour}-r1"]
    was = shown(one, *command[1:])
    found = sorted((r["kafka_partition"], r["kafka_offset"], r["event_id"]) for r in was)
    assert found == [r for r in rows if r[1] >= 4]
    assert first["query"] in call(one, "explain", one.name, hour)
    assert shown(one, "audit", one.name)["agrees"]

    # A wrong hand takes the hour out of main.
    state = one.state
    gone = Change("main", remove=files_of(state.table, "main", hour))
    damage = to_commit(state, Publish(new_id(), (gone,), state.timeline), datetime.now(UTC))
    assert one.lake.commit(state.table, damage) is Outcome.LANDED
    output = call(one, "audit", one.name, "--hours", hour, expect=1)
    in_main = f"rows of main: expected {GOOD}, as in the ledger, found 0 offsets"
    nowhere = f"the duplicates, found {GOOD + DUPLICATE} (partition 0: offsets 4 to 8, 16 to 17)"
    assert f"hour {hour}: {in_main}" in output and nowhere in output
    call(one, "merge", one.name)
    assert one.contents() == rows
    assert shown(one, "audit", one.name)["agrees"]

    # A ledger that speaks of a difference that nothing explains.
    accepted = one.state.accepted[hour]
    unlike = Diff(missing=1, extra=0, changed=2, duplicate=2, unread=0, sample=())
    account = HourAccount(diff=unlike)
    lie = ledger.decision(
        hour, "accepted", 2, accepted.cut, datetime.now(UTC), served="batch", account=account
    )
    one.job.ledger.record([lie])
    unexplained = shown(one, "status", one.name, expect=1)["unexplained"]
    assert unexplained == {hour: {"missing": 1, "changed": 2}}
    said = call(one, "status", one.name, expect=1)
    assert f"{hour}: expected only explained differences between the layers, found 1" in said
    # The table itself is as it was.
    said = call(one, "explain", one.name, hour, "--rows")
    assert said.endswith("all differences are explained\n")
    lines = call(one, "query", f"SELECT * FROM {name}", "--output", "csv").splitlines()
    assert len(lines) == len(rows) + 1
