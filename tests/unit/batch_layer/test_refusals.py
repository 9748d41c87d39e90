"""When a refused hour is rebuilt by itself, and when its refusal is said again."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from lakes import new_state, new_stream

from anabranch import config
from anabranch.offsets.hours import Cut, Timeline
from anabranch.protocol import ledger
from anabranch.protocol.ledger_row import Kind, LedgerRow
from anabranch.protocol.state import Accepted, State
from batch_layer import plan
from batch_layer.plan import (
    REBUILD_AFTER,
    is_still_valid,
    last_refusal,
    refusal_basis,
    should_record,
)

HOUR, BEFORE, AFTER = "2026-11-21T03", "2026-11-21T02", "2026-11-21T04"
FAR = "2026-11-20T20"
CUT = Cut("t", {0: (10, 20)})
NOW = datetime(2026, 11, 21, 5, tzinfo=UTC)
STREAM = new_stream()


def state(**values: Any) -> State:
    return new_state(Timeline(FAR, AFTER, {0: 20}), {0: 25}, **values)


def basis(
    stream: config.Stream = STREAM, suite: bytes = b"", at: State | None = None, cut: Cut = CUT
) -> str:
    return refusal_basis(stream, suite, at or state(), HOUR, cut)


def test_nothing_changed_is_the_same_basis() -> None:
    assert basis() == basis(new_stream(), at=state())
    # Of no account for how an hour is judged.
    assert basis() == basis(new_stream(speed={"trigger": "9 seconds"}, airflow={"owner": "me"}))
    assert basis() == basis(at=state(accepted={FAR: Accepted(1, CUT)}))


@pytest.mark.parametrize(
    "changed",
    [
        basis(new_stream(batch={"allow_gaps": ["retention"]})),
        basis(new_stream(event_time=None, start="latest")),
        basis(suite=b"expectations: []"),
        basis(cut=Cut("t", {0: (10, 21)})),
        basis(cut=Cut("other", {0: (10, 20)})),
        basis(at=state(accepted={BEFORE: Accepted(1, CUT)})),
        basis(at=state(accepted={BEFORE: Accepted(2, CUT)})),
        basis(at=state(accepted={AFTER: Accepted(1, CUT)})),
        basis(at=state(overrides={BEFORE: "speed"})),
        basis(at=replace(state(), position=replace(state().position, offsets={0: 15}))),
    ],
)
def test_a_verdict_contains_its_inputs(changed: str) -> None:
    assert changed != basis()


def test_another_version_of_the_code_is_another_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    before = basis()
    monkeypatch.setattr(plan, "VERSION", "9.9.9")
    assert basis() != before


def row(kind: Kind, id: str | None = None) -> LedgerRow:
    return ledger.decision(
        HOUR, kind, 1, CUT, NOW, id or plan.decision_id("id", basis()), reason="no"
    )


def test_a_refusal_is_valid_while_its_inputs_are_unchanged_and_for_a_day() -> None:
    refusal = row("refused")
    assert is_still_valid(refusal, basis(), NOW + REBUILD_AFTER - timedelta(seconds=1))
    assert not is_still_valid(refusal, basis(), NOW + REBUILD_AFTER)
    assert not is_still_valid(refusal, basis(suite=b"another"), NOW)
    assert not is_still_valid(None, basis(), NOW)


def test_a_refusal_is_written_again_only_if_it_changed() -> None:
    refusal = row("refused")
    assert not should_record(refusal, basis(), 1, "no", NOW)
    assert should_record(refusal, basis(), 1, "another reason", NOW)
    assert should_record(refusal, basis(), 2, "no", NOW)
    assert should_record(refusal, basis(suite=b"another"), 1, "no", NOW)
    assert should_record(refusal, basis(), 1, "no", NOW + REBUILD_AFTER)
    assert should_record(None, basis(), 1, "no", NOW)


def test_the_newest_decision_decides_whether_an_hour_is_refused() -> None:
    sealed, refused, accepted, served = (
        row("sealed"), row("refused"), row("accepted"), row("served"),
    )  # fmt: skip
    assert last_refusal([sealed, refused], HOUR) is refused
    assert last_refusal([sealed, refused, served], HOUR) is refused
    assert last_refusal([sealed, accepted, refused], HOUR) is refused
    assert last_refusal([refused, accepted], HOUR) is None
    assert last_refusal([sealed], HOUR) is None
    assert last_refusal([sealed, refused], BEFORE) is None
