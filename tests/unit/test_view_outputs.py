"""What the views print, byte for byte: scripts read the JSON, and its keys are a contract.

`view_outputs.txt` holds it. After a change that is meant, run this file with `ANABRANCH_WRITE_VIEWS=1`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import time_machine
from lakes import StreamLake, decide
from prometheus_client import CollectorRegistry, generate_latest
from proofs import BEFORE, CUT, HOUR, NEXT, NOW, accept, bury, event, job, new_proof, read, record, stage_rows

from anabranch.iceberg.commits import Change, Outcome
from anabranch.job import Job
from anabranch.offsets.position import Stamped, Topic
from anabranch.operations.audit import audit
from anabranch.operations.audit.checks import print_audit
from anabranch.operations.reports import dead_letters, diff, explain, history, metrics, status
from anabranch.operations.reports.explain_text import print_explanation
from anabranch.protocol import override
from anabranch.protocol.publish import Publish, new_id
from anabranch.protocol.state import Accepted, load_state

GOLDEN = Path(__file__).with_name("view_outputs.txt")
LATER = NOW + timedelta(minutes=30)

_FAILED = {
    "type": "expect_column_values_to_not_be_null", "kwargs": {"column": "n"}, "severity": "critical",
    "observed": [None], "unexpected_count": 1, "element_count": 4,
    "rows": [{"partition": 0, "offset": 4, "values": {"n": None}}],
    "message": "n: expected to not be null, found 1 of 4 rows otherwise",
}  # fmt: skip
_QUALITY = {
    "passed": False, "failed": [_FAILED], "warnings": [_FAILED | {"severity": "warning"}], "evaluated": 3,
    "suite": "events", "met": [{"type": "expect_column_to_exist", "kwargs": {"column": "n"}, "severity": "critical"}],
    "not_applicable": [{"type": "expect_column_to_exist", "reason": "nothing is known"}],
}  # fmt: skip
ACCOUNT = {
    "offsets": 6, "good": 3, "dead": 1, "duplicate": 1, "gap": 1, "gaps": {"control": 1},
    "partitions": {
        "0": {"offsets": 6, "good": 3, "dead": 1, "duplicate": 1, "gaps": {"control": 1}},
        "1": {"offsets": 0, "good": 0, "dead": 0, "duplicate": 0, "gaps": {}},
    },
    "sources": {"kafka": 4, "speed": 1},
    "speed_rows": 5,
    "diff": {
        "missing": 2, "extra": 1, "changed": 1, "duplicate": 1, "unread": 1,
        "sample": [{"kind": "changed", "partition": 0, "offset": 7}],
    },
    "quality": _QUALITY,
    "unknown": {
        "records": 2, "others": 3,
        "fields": [
            {"name": "colour", "records": 2, "first": [0, 4], "last": [0, 7], "sample": '"blue"', "type": "STRING"},
            {"name": "<b>\x1b", "records": 1, "first": [0, 7], "last": [0, 7]},
        ],
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def still() -> Iterator[None]:
    """Time stands still, whoever asks: also PyIceberg, which stamps the table."""
    with time_machine.travel(LATER, tick=False):
        yield


def kafka() -> Any:
    return SimpleNamespace(
        describe=lambda name, expected=None: Topic(name, "t", (0, 1)),
        stable_ends=lambda topic: {0: 12, 1: 3},
        retention=lambda topic: timedelta(days=7),
        stamps_from=lambda topic, starts, ends, count: {
            p: (Stamped(o, int(NOW.timestamp() * 1000)),) for p, o in starts.items()
        },
    )


def sealed(one: StreamLake) -> None:
    record(one, decide(HOUR, "sealed", 0, BEFORE, NOW, "a", served="speed"))
    record(one, decide(NEXT, "sealed", 0, CUT, NOW, "b", served="speed", reason="sealed by adopting topic id t"))


def accepted(one: StreamLake, rows: list[dict[str, Any]], revision: int, **facts: Any) -> None:
    """Of NEXT; its dead letter is at offset 6."""
    assert one.publish(one.accept(stage_rows(one, rows), NEXT, Accepted(revision, CUT))) is Outcome.LANDED
    record(one, decide(NEXT, "accepted", revision, CUT, NOW, served="batch", **facts))


def a_full_hour(one: StreamLake) -> None:
    """Every column is told of; a restatement is refused; another decision still waits on its branch."""
    sealed(one)
    before = [event(0, o, HOUR) for o in range(4)]
    speed = [event(0, 4), event(0, 5, id="0-2"), event(0, 7, n=1), event(0, 8)]
    read(one, [*before, *speed], {0: 10})
    accept(one, HOUR, BEFORE, before, snapshot_id=5, sources={"kafka": 4})
    record(one, decide(NEXT, "refused", 1, CUT, NOW, "c", served="speed", reason="quality: no", **ACCOUNT))
    rows = [event(0, 4), event(0, 7, n=2), event(0, 9)]
    accepted(one, rows, 1, snapshot_id=6, reason="accepted by choice: yes", **ACCOUNT)
    bury(one, [(NEXT, 0, 6)])
    more = {"good": 2, "gap": 2, "gaps": {"control": 1, "aborted": 1}, "sources": {"kafka": 4}}
    accepted(one, rows[:2], 2, **(ACCOUNT | more))
    record(one, decide(NEXT, "refused", 3, CUT, LATER, "d", served="batch", reason="quality: again", **ACCOUNT))
    override.serve_hour(one.lake, one.stream, HOUR, "speed", "the rule is wrong")
    waits = decide(HOUR, "served", 1, BEFORE, LATER, "e", served="speed", reason="still")
    state = one.state()
    assert (
        one.publish(Publish(new_id(), (Change("main"),), state.timeline, decisions=(waits,)), state) is Outcome.LANDED
    )


def an_old_hour(one: StreamLake) -> None:
    """Rows of a ledger of before some columns were told of; an hour that is refused, and one that is lost in part."""
    sealed(one)
    read(one, [event(0, o, HOUR) for o in range(4)], {0: 7})
    old = {"diff": {"missing": 2, "extra": 0, "changed": 1}, "quality": {"passed": True, "failed": []}, "speed_rows": 4}
    accept(one, HOUR, BEFORE, [event(0, o, HOUR) for o in range(4)], duplicate=2, **old)
    lost = {"good": 4, "dead": 0, "duplicate": 0, "gap": 2, "gaps": {"retention": 2}}
    record(one, decide(NEXT, "refused", 1, CUT, NOW, "c", served="speed", reason="gaps", **lost))
    record(one, decide(NEXT, "refused", 1, CUT, LATER, "d", served="speed", reason="gaps again"))


def nothing_yet(one: StreamLake) -> None:
    """No row of the ledger at all."""


def printed(job: Job) -> Iterator[tuple[str, Any, Callable[[Any, str], None]]]:
    """Every view, and what prints it."""
    yield "hours", status.hours(job), status.print_hours
    yield "status", status.status(job, timedelta(seconds=1)), status.print_status
    for hour in (None, NEXT):
        yield f"history {hour}", history.history(job, hour), partial(history.print_history, "events", hour)
    for hour in ("2026-11-20T23", HOUR, NEXT, "2026-11-21T02", "2026-11-21T09"):
        yield f"explain {hour}", explain.explain(job, hour, LATER), print_explanation
    for hours in (None, (HOUR, HOUR)):
        yield f"dead letters {hours}", dead_letters.letters(job, hours, 3), dead_letters.print_letters
    yield "audit", audit(job, None, with_kafka=False), print_audit
    accepted = load_state(job.lake, job.stream.table).is_accepted
    for hour in filter(accepted, (HOUR, NEXT)):
        yield f"diff {hour}", diff.difference(job, hour, 2), diff.print_difference
        yield f"duplicates {hour}", diff.duplicates(job, hour, 9), diff.print_duplicates


def metrics_text(job: Job) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics.Streams([job]))
    return generate_latest(registry).decode()


def test_the_views_print_what_they_always_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for made in (a_full_hour, an_old_hour, nothing_yet):
        one = new_proof(tmp_path / made.__name__)
        made(one)
        of = replace(job(one), kafka=kafka())
        for name, view, show in printed(of):
            for output in ("json", "text"):
                capsys.readouterr()
                show(view, output)
                shown.append(f"==== {made.__name__}: {name}, {output}\n{capsys.readouterr().out}")
        shown.append(f"==== {made.__name__}: metrics\n{metrics_text(of)}")
    text = re.sub(r'"code_version": ".*?"', '"code_version": "<version>"', "".join(shown))
    text = re.sub(r"(_metadata_bytes\{.*\}) .*", r"\1 <bytes>", text)
    if os.environ.get("ANABRANCH_WRITE_VIEWS"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")
