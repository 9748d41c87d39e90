"""The ledger: append-only, in its own order, each decision once from any number of writers."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from lakes import FIRST, StreamLake, at_next_commit, decide, lose_answer
from pyiceberg.table import Table

from anabranch.common.errors import Transient
from anabranch.iceberg import lake as lake_module
from anabranch.iceberg.commits import Change
from anabranch.offsets.hours import Cut, shift
from anabranch.protocol import ledger
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.ledger_row import Kind, LedgerRow
from anabranch.protocol.state import Confirmed

NOW = datetime(2026, 11, 21, 1, tzinfo=UTC)
CUT = Cut("t", {0: (0, 10), 1: (3, 3)})


def test_a_decision_is_read_back_unchanged(lake: StreamLake) -> None:
    quality = {"passed": True, "failed": []}
    facts = {"good": 8, "dead": 1, "gaps": {"control": 1}, "quality": quality, "served": "batch"}
    row = decide(FIRST, "accepted", 2, CUT, NOW, **facts)
    assert lake.ledger.record([row]) == {row.decision_id}
    (stored,) = lake.ledger.history()
    assert stored == replace(row, sequence=stored.sequence)


def test_a_row_lost_in_a_crash_is_restored_once_from_properties(lake: StreamLake) -> None:
    row = ledger.decision(FIRST, "sealed", 0, CUT, NOW)
    lake.change(Change("speed"), decisions=(row,))
    assert lake.ledger.history() == [], "the hazard did not happen"
    confirmed = lake.ledger.record(lake.state().decisions)
    assert confirmed == {row.decision_id}
    assert lake.ledger.record(lake.state().decisions) == confirmed
    assert [r.decision_id for r in lake.ledger.history()] == [row.decision_id]
    lake.change(Change("speed"), confirmed=Confirmed(confirmed))
    assert lake.state().decisions == ()
    assert lake.ledger.record([]) == frozenset()


def test_a_row_that_two_processes_restore_at_once_is_written_once(lake: StreamLake) -> None:
    row, other = (ledger.decision(FIRST, "sealed", 0, CUT, NOW) for _ in range(2))
    theirs, found = Ledger(lake.again(), lake.stream.hours_table), list[frozenset[str]]()
    at_next_commit(lake.lake, lambda: found.append(theirs.record([row])))
    assert lake.ledger.record([row, other]) == {row.decision_id, other.decision_id}
    assert found == [{row.decision_id}]
    assert [r.decision_id for r in lake.ledger.history()] == [row.decision_id, other.decision_id]


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_append_whose_answer_is_lost_lands_once(lake: StreamLake, when: str) -> None:
    row = ledger.decision(FIRST, "sealed", 0, CUT, NOW)
    at_next_commit(lake.lake, **{when: lose_answer})
    assert lake.ledger.record([row]) == {row.decision_id}
    assert [r.decision_id for r in lake.ledger.history()] == [row.decision_id]


def test_concurrent_appends_keep_a_strict_order_independent_of_clocks(lake: StreamLake) -> None:
    lakes = [lake.again(), lake.again()]

    def write(who: int) -> None:
        for i in range(4):
            # The second one's clock is an hour behind, and runs backwards.
            at = NOW + timedelta(seconds=i) if who == 0 else NOW - timedelta(hours=1, seconds=i)
            row = ledger.decision(shift(FIRST, i), "sealed", who, CUT, at)
            Ledger(lakes[who], lake.stream.hours_table).record([row])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(write, (0, 1))) == [None, None]
    rows = lake.ledger.history()
    sequences = [r.sequence for r in rows]
    assert sequences == sorted(set(sequences)), "two appends share a place in the order"
    for who in (0, 1):
        assert [r.hour for r in rows if r.revision == who] == [shift(FIRST, i) for i in range(4)]


def test_an_append_never_first_ends(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_module, "_LANDS_WITHIN_SECONDS", 0.2)
    rival = lake.again()

    def rows(table: Table) -> pa.Table:
        sealed = ledger.decision(FIRST, "sealed", 0, CUT, NOW)
        Ledger(rival, lake.stream.hours_table).record([sealed])
        refused = ledger.decision(FIRST, "refused", 1, CUT, NOW)
        return ledger._to_arrow([refused], table.metadata.next_sequence_number())

    found = r"append to games\.events_hours: expected a commit to land within"
    with pytest.raises(Transient, match=found):
        lake.lake.append(lake.stream.hours_table, rows)
    assert {r.decision for r in lake.ledger.history()} == {"sealed"}


def row(decision: Kind, revision: int = 1, hour: str = FIRST, **values: Any) -> LedgerRow:
    return decide(hour, decision, revision, None, NOW, **values)


SEALED = row("sealed", revision=0, served="speed", offsets=10)
ACCEPTED = row("accepted", good=9, served="batch")
REFUSED = row("refused", reason="gap")
REFUSED_AGAIN = row("refused", revision=2, reason="gap", good=3, served="batch")
ACCEPTED_AGAIN = row("accepted", revision=2, good=10)
SERVED = row("served", served="speed", reason="why")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([SEALED], {"decision": "sealed", "served": "speed", "offsets": 10}),
        (
            [SEALED, ACCEPTED],
            {"decision": "accepted", "served": "batch", "offsets": 10, "good": 9, "revision": 1},
        ),
        ([SEALED, REFUSED, ACCEPTED], {"decision": "accepted", "reason": None, "good": 9}),
        (
            [SEALED, ACCEPTED, REFUSED_AGAIN],
            {"decision": "accepted", "revision": 1, "good": 9, "reason": "gap", "served": "batch"},
        ),
        (
            [ACCEPTED, REFUSED_AGAIN, ACCEPTED_AGAIN],
            {"decision": "accepted", "revision": 2, "good": 10, "reason": None},
        ),
        ([SEALED, row("refused", reason="a"), REFUSED], {"decision": "refused", "reason": "gap"}),
        ([ACCEPTED, SERVED], {"decision": "accepted", "served": "speed"}),
        ([SEALED, SERVED], {"decision": "sealed", "revision": 0, "offsets": 10}),
        ([SEALED, REFUSED, SERVED], {"decision": "refused", "reason": "gap"}),
        ([ACCEPTED, SEALED], {"decision": "accepted", "revision": 1}),
    ],
)
def test_the_newest_decision_on_an_hour(rows: list[LedgerRow], expected: dict[str, Any]) -> None:
    newest = ledger.newest(rows)[FIRST]
    assert {key: getattr(newest, key) for key in expected} == expected


def test_hours_come_oldest_first() -> None:
    later = row("sealed", hour=shift(FIRST, 1))
    assert list(ledger.newest([later, SEALED])) == [FIRST, shift(FIRST, 1)]


def test_a_refused_restatement_of_an_hour_that_has_expired_is_not_open() -> None:
    """It can never be restated; a gap or a difference keeps the hour in the reports."""
    refused = row("refused", revision=2, reason="gap", gaps={"retention": 1})
    assert set(ledger.open_refusals([ACCEPTED, refused])) == {FIRST}
    assert not ledger.open_refusals([ACCEPTED, refused, row("expired")])
