"""Decisions that wait in a branch's properties: tables contain them, and other versions of the code
read them."""

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from anabranch.common.json_values import from_json
from anabranch.common.version import VERSION
from anabranch.offsets.hours import Cut
from anabranch.protocol import ledger
from anabranch.protocol.ledger_row import (
    Account,
    Diff,
    HourAccount,
    LedgerRow,
    QualityResult,
    RunFacts,
)

NOW = datetime(2026, 11, 21, 2, tzinfo=UTC)
CUT = Cut("t", {10: (1, 1), 0: (3, 9)})
ACCOUNT = HourAccount(
    good=3,
    dead=1,
    duplicate=1,
    gap=1,
    gaps={"control": 1},
    partitions={0: Account(6, 3, 1, 1, {"control": 1})},
    sources={"kafka": 5},
    speed_rows=4,
    diff=Diff(1, 0, 0, 1, 1, ({"kind": "unread", "partition": 0, "offset": 8},)),
    quality=QualityResult(
        True, (), (), 1, "events", ({"type": "expect_x", "kwargs": {}, "severity": "critical"},)
    ),
)
BEGIN = (
    '{"id": "i", "at": "2026-11-21T02:00:00+00:00", "hour": "2026-11-21T00", "decision": "%s", '
    f'"revision": %d, "code_version": "{VERSION}"'
)
ITS_CUT = ', "topic_id": "t", "cut": {"0": [3, 9], "10": [1, 1]}, "offsets": 6'


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (
            ledger.decision("2026-11-21T00", "sealed", 0, CUT, NOW, "i", served="speed"),
            BEGIN % ("sealed", 0) + ITS_CUT + ', "served": "speed", "publish": "p"}',
        ),
        (
            ledger.decision(
                "2026-11-21T00", "served", 2, None, NOW, "i", served="batch", reason="why"
            ),
            BEGIN % ("served", 2) + ', "served": "batch", "reason": "why", "publish": "p"}',
        ),
        (
            ledger.decision(
                "2026-11-21T00", "accepted", 1, CUT, NOW, "i", served="batch", account=ACCOUNT
            ),
            BEGIN % ("accepted", 1)
            + ITS_CUT
            + (
                ', "served": "batch", "good": 3, "dead": 1, "duplicate": 1, "gap": 1, "gaps": '
                '{"control": 1}, "partitions": {"0": {"offsets": 6, "good": 3, "dead": 1, '
                '"duplicate": 1, "gaps": {"control": 1}}}, "sources": {"kafka": 5}, "speed_rows": '
                '4, "diff": {"missing": 1, "extra": 0, "changed": 0, "duplicate": 1, "unread": 1, '
                '"sample": [{"kind": "unread", "partition": 0, "offset": 8}]}, "quality": '
                '{"passed": true, "failed": [], "warnings": [], "evaluated": 1, "suite": '
                '"events", "met": [{"type": "expect_x", "kwargs": {}, "severity": "critical"}], '
                '"not_applicable": []}, "reason": null, "publish": "p"}'
            ),
        ),
    ],
)
def test_a_decision_waits_as_json_and_comes_back(row: LedgerRow, text: str) -> None:
    waiting = replace(row, publish="p")
    assert json.dumps(waiting.as_waiting()) == text
    assert LedgerRow.from_waiting(json.loads(text)) == waiting


@pytest.mark.parametrize(
    "run",
    [RunFacts(NOW), RunFacts(NOW, "4.1.3", 2, 4321, "team/a/dag.task/019a", "team/a/dag/019b")],
)
def test_how_a_decision_came_about_waits_with_it_and_is_in_the_ledger(run: RunFacts) -> None:
    row = ledger.decision(
        "2026-11-21T00", "accepted", 1, CUT, NOW, "i", account=replace(ACCOUNT, run=run)
    )
    assert LedgerRow.from_waiting(json.loads(json.dumps(row.as_waiting()))) == row
    columns = json.loads(json.dumps(row.as_columns()["run"]))
    assert columns["began"] == NOW.isoformat() and None not in columns.values()
    assert from_json(RunFacts, columns) == run
