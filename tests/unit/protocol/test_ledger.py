"""The ledger: append-only, in its own order, each decision once from any number of writers; and its
rows, which wait in a branch's properties, for other versions of the code too."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from lakes import FIRST, StreamLake, at_next_commit, decide, lose_answer
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.common import errors, json_values, version
from anabranch.config.stream import Quality
from anabranch.iceberg import lake as lake_module
from anabranch.iceberg.commits import Change
from anabranch.offsets.hours import Cut, shift
from anabranch.protocol import dead_letters, ledger, ledger_row, state
from anabranch.protocol.ledger_row import Account, HourAccount, HourShare, Kind, LedgerRow, RunFacts
from speed_layer.reading_note import DeadShare

NOW = datetime(2026, 11, 21, 2, tzinfo=UTC)
CUT = Cut("t", {10: (1, 1), 0: (3, 9)})


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
    lake.change(Change("speed"), confirmed=state.Confirmed(confirmed))
    assert lake.state().decisions == ()
    assert lake.ledger.record([]) == frozenset()


def test_a_row_that_two_processes_restore_at_once_is_written_once(lake: StreamLake) -> None:
    row, other = (ledger.decision(FIRST, "sealed", 0, CUT, NOW) for _ in range(2))
    theirs, found = ledger.Ledger(lake.again(), lake.stream.hours_table), list[frozenset[str]]()
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
            ledger.Ledger(lakes[who], lake.stream.hours_table).record([row])

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
        ledger.Ledger(rival, lake.stream.hours_table).record([sealed])
        refused = ledger.decision(FIRST, "refused", 1, CUT, NOW)
        return ledger._to_arrow([refused], table.metadata.next_sequence_number())

    found = r"append to games\.events_hours: expected a commit to land within"
    with pytest.raises(errors.Transient, match=found):
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


def test_hours_come_oldest_first_and_an_expired_ones_refused_restatement_is_not_open() -> None:
    later = row("sealed", hour=shift(FIRST, 1))
    assert list(ledger.newest([later, SEALED])) == [FIRST, shift(FIRST, 1)]
    # It can never be restated; a gap or a difference keeps the hour in the reports.
    refused = row("refused", revision=2, reason="gap", gaps={"retention": 1})
    assert set(ledger.open_refusals([ACCEPTED, refused])) == {FIRST}
    assert not ledger.open_refusals([ACCEPTED, refused, row("expired")])


# Decisions that wait

ACCOUNT = HourAccount(
    good=3, dead=1, duplicate=1, gap=1, gaps={"control": 1},
    partitions={0: Account(6, 3, 1, 1, {"control": 1})}, sources={"kafka": 5}, speed_rows=4,
    diff=ledger_row.Diff(1, 0, 0, 1, 1, ({"kind": "unread", "partition": 0, "offset": 8},)),
    quality=ledger_row.QualityResult(True, (), (), 1, "events", ({"type": "expect_x", "kwargs": {}, "severity": "critical"},)),
)  # fmt: skip


@pytest.mark.parametrize(
    ("decision", "revision", "cut", "facts"),
    [
        ("sealed", 0, CUT, {"served": "speed"}),
        ("served", 2, None, {"served": "batch", "reason": "why"}),
        ("accepted", 1, CUT, {"served": "batch", "account": ACCOUNT}),
    ],
    ids=["sealed", "served", "accepted"],
)
def test_a_decision_waits_as_json_and_comes_back(
    decision: Kind, revision: int, cut: Cut | None, facts: dict[str, Any], recorded: Any
) -> None:
    row = ledger.decision(FIRST, decision, revision, cut, NOW, "i", **facts)
    waiting = replace(row, publish="p")
    text = json.loads(json.dumps(waiting.as_waiting()))
    assert LedgerRow.from_waiting(text) == waiting
    assert text.pop("code_version") == version.VERSION
    recorded(text)


@pytest.mark.parametrize(
    "run",
    [RunFacts(NOW), RunFacts(NOW, "4.1.3", 2, 4321, "team/a/dag.task/019a", "team/a/dag/019b")],
)
def test_how_a_decision_came_about_waits_with_it_and_is_in_the_ledger(run: RunFacts) -> None:
    account = replace(ACCOUNT, run=run)
    row = ledger.decision("2026-11-21T00", "accepted", 1, CUT, NOW, "i", account=account)
    assert LedgerRow.from_waiting(json.loads(json.dumps(row.as_waiting()))) == row
    columns = json.loads(json.dumps(row.as_columns()["run"]))
    assert columns["began"] == NOW.isoformat() and None not in columns.values()
    assert json_values.from_json(RunFacts, columns) == run


# Which shares of dead letters a stream allows, and their most frequent reason.


@pytest.mark.parametrize(
    ("count", "records", "most", "expected"),
    [
        (0, 0, 0.05, False), (0, 10, 0.0, False), (19, 19, 0.05, False), (20, 20, 0.05, True),
        (20, 400, 0.05, False), (21, 400, 0.05, True), (1, 1_000_000, 0.0, True),
        (38_094, 38_094, 1.0, False),
    ],
)  # fmt: skip
def test_too_many_by_share_and_20(count: int, records: int, most: float, expected: bool) -> None:
    assert ledger_row.is_too_many(count, records, most) is expected
    assert (ledger_row.objection("dead letters", count, records, most) is not None) is expected


def test_the_objection_says_what_was_expected_and_found() -> None:
    assert ledger_row.objection("dead letters", 38_094, 38_095, 0.05) == (
        "dead letters: expected at most 5 % of 38,095 records, found 38,094 (more than 99.9 %)"
    )
    assert [ledger_row.percent(n) for n in (0, 0.0002, 0.005, 0.5, 1)] == [
        "0 %", "less than 0.1 %", "0.5 %", "50 %", "100 %",
    ]  # fmt: skip
    # The share of an account counts what was read.
    account = HourAccount(offsets=12, good=5, dead=3, duplicate=2, gap=1, erased=1)
    assert HourShare.of(account) == HourShare(3, 10)
    assert HourShare.of(HourAccount()) is None
    assert HourShare.of(HourAccount(offsets=3, good=0, dead=0, duplicate=0, gap=3)) is None


def letters(folder: Path, *texts: tuple[str, str]) -> DataFile:
    """A file of dead letters with these codes and texts, at offsets from 5 on."""
    path = folder / f"{len(texts)}.parquet"
    columns = {
        "error_code": [code for code, _ in texts], "error_text": [text for _, text in texts],
        "kafka_partition": [0] * len(texts), "kafka_offset": list(range(5, 5 + len(texts))),
    }  # fmt: skip
    pq.write_table(pa.table(columns), path)
    return DataFile.from_args(file_path=f"file://{path}", record_count=len(texts))


def test_the_most_frequent_reason_has_no_value_of_a_record(tmp_path: Path) -> None:
    one = letters(tmp_path, ("malformed_json", "expected one JSON object, found text"))
    texts = ("found 1732230000.5", "found secret, found again")
    other = letters(tmp_path, *(("wrong_type", f"ts: expected timestamp, {t}") for t in texts))
    expected = "wrong_type: ts: expected timestamp (the first: partition 0, offset 5)"
    assert dead_letters.frequent_reason(PyArrowFileIO(), [one, other]) == expected
    assert dead_letters.frequent_reason(PyArrowFileIO(), []) is None


def test_the_speed_layer_warns_at_the_limit_and_each_time_the_number_has_doubled(
    lake: StreamLake, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    share = DeadShare(lake.lake, lake.stream)
    file = letters(tmp_path, *[("wrong_type", "n: expected int, found x")] * 8)

    def warned() -> int:
        return sum(r.levelno == logging.WARNING for r in caplog.records)

    # 16 are fewer than 20; 24 and 48 are too many, and 32 and 40 say nothing new.
    for at, expected in enumerate((0, 0, 1, 1, 1, 2)):
        share.published(FIRST, 2, [file])
        assert warned() == expected, at
    assert "wrong_type: n: expected int (the first: partition 0, offset 5)" in caplog.text
    assert f"anabranch dead-letters {lake.stream.name}" in caplog.text
    # Another hour begins at zero, and an hour with few dead letters has no warning.
    share.published("2026-11-21T01", 2, [file])
    share.published("2026-11-21T02", 2_000, [file] * 3)
    assert warned() == 2
    allowed = lake.stream.model_copy(update={"quality": Quality(max_dead="100 %")})
    DeadShare(lake.lake, allowed).published(FIRST, 0, [file] * 3)
    assert warned() == 2
    # An unreadable file stops none.
    gone = DataFile.from_args(file_path=f"file://{tmp_path}/gone.parquet", record_count=40)
    DeadShare(lake.lake, lake.stream).published(FIRST, 0, [gone])
    assert "most often unknown: " in caplog.text
