"""Promises without an age are kept for hours that the branches no longer remember."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from brokers import Broker
from lakes import FIRST, Row, StreamLake, new_lake
from no_spark import NO_SPARK, Hours

from anabranch.iceberg.commits import Change
from anabranch.job import Job
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol import ledger, state
from anabranch.protocol.dead_letters import is_due, waiting_batch
from anabranch.protocol.ledger_row import HourAccount
from anabranch.protocol.state import Accepted, Confirmed, State
from batch_layer.build import Built
from batch_layer.plan import Rebuilt, acceptance_reason, plan_publish
from batch_layer.rebuild import Rebuilder, RebuildRequest, Result

HOURS = 5
H = [shift(FIRST, i) for i in range(HOURS)]
CUTS = {h: Cut("t", {0: (10 * i, 10 * i + 10)}) for i, h in enumerate(H)}
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StreamLake:
    """Hours of which the batch layer remembers two; the speed layer is past all of them."""
    monkeypatch.setattr(state, "REMEMBERED_HOURS", 2)
    opened = Timeline(FIRST, shift(H[-1], 1), {0: 10 * HOURS}, sealed=dict(CUTS))
    made = new_lake(tmp_path, timeline=opened)
    made.serve([], {0: 10 * HOURS})
    return made


def accept(
    lake: StreamLake,
    i: int,
    offsets: list[int],
    dead: list[int],
    revision: int = 1,
    reason: str | None = None,
) -> None:
    """Publish an hour and its ledger row as the batch layer does, but for its dead letters."""
    rows = lake.stage([(H[i], 0, o) for o in offsets])
    staged = lake.stage_dead([(H[i], 0, o) for o in dead], "batch") if dead else None
    state = lake.state()
    letters = (waiting_batch(staged, H[i], revision, NOW),)
    rebuilt = Rebuilt(H[i], Accepted(revision, CUTS[H[i]]), rows, letters, HourAccount(), reason)
    confirmed = Confirmed(lake.ledger.record_waiting(state), lake.roll())
    # The tag of a replaced revision ends a week after the publish.
    publish = replace(plan_publish(state, [rebuilt], datetime.now(UTC)), confirmed=confirmed)
    lake.land(publish, state)
    lake.ledger.record_waiting(lake.state())


def settle(lake: StreamLake) -> None:
    """A publish of a process that has seen all waiting decisions published."""
    confirmed = Confirmed(lake.ledger.record_waiting(lake.state()), lake.roll())
    properties = state.accepted_properties(lake.state(), {})
    lake.change(Change("batch", properties=properties), Change("main"), confirmed=confirmed)


def accept_all(lake: StreamLake, but: tuple[int, ...] = ()) -> None:
    for i in sorted({*range(HOURS)} - {*but}):
        accept(lake, i, [10 * i, 10 * i + 1, 10 * i + 2], [10 * i + 7, 10 * i + 8])
    settle(lake)
    settle(lake)


def of_hour(rows: list[Row], i: int) -> list[int]:
    return [o for h, _, o in rows if h == H[i]]


def rebuilder(lake: StreamLake) -> tuple[Rebuilder, Hours]:
    job = Job(lake.environment, lake.stream, lake.lake, Broker().adapter)
    made, built = Rebuilder(job, NO_SPARK), Hours(lake)
    made._hours = built  # type: ignore[assignment]
    return made, built


def test_an_offset_of_a_forgotten_hour_is_a_row_or_a_letter(lake: StreamLake) -> None:
    """The hazard: the hour is forgotten again; its dead letters are taken for replaced ones."""
    accept_all(lake, but=(3, 4))
    assert H[0] not in lake.state().accepted, "the hazard did not happen"
    accept(lake, 0, [0, 1, 2, 7], [8], revision=2)
    # The process stands still; others accept hours and restate, and never get to its dead letters.
    for i in (3, 4):
        lake.land(lake.accept(lake.stage([(H[i], 0, 10 * i)]), H[i], Accepted(1, CUTS[H[i]])))
    assert H[0] in lake.state().accepted, "an hour whose dead letters wait was forgotten"
    lake.roll()
    assert (of_hour(lake.rows("main"), 0), of_hour(lake.dead("main"), 0)) == ([0, 1, 2, 7], [8])
    settle(lake)
    settle(lake)
    why = "an hour of which nothing waits is remembered for ever"
    assert H[0] not in lake.state().accepted, why


def test_dead_letters_that_the_rows_no_longer_name_are_left_alone(lake: StreamLake) -> None:
    """The hazard: a process that slept for days publishes once more what was done long ago."""
    accept_all(lake)
    accept(lake, 0, [0, 1, 2, 7], [8], revision=2)
    stale = lake.state()
    settle(lake)
    settle(lake)
    found = [is_due(lake.state(), item) for item in stale.dead_letters]
    assert found == [False] * len(stale.dead_letters)
    before = lake.letters().metadata_location
    lake.roll(stale)
    assert lake.letters().metadata_location == before


def test_the_hour_after_a_forgotten_one_is_decided_again(lake: StreamLake) -> None:
    accept_all(lake)
    assert not {H[0], H[1]} & set(lake.state().accepted), "the hazard did not happen"
    ours, hours = rebuilder(lake)
    built = hours.build(H[0], CUTS[H[0]], 1, lake.state())
    known, following = ours._recheck_following(built, lake.state())
    assert [(b.hour, b.before, b.cut) for b in following][:1] == [(H[1], 1, CUTS[H[1]])]
    assert known.accepted[H[1]] == Accepted(1, CUTS[H[1]])
    result = restate(ours, 0)
    assert (result.decision, result.revision) == ("accepted", 2)
    newest = ledger.newest(lake.ledger.history())
    assert [newest[h].revision for h in H[:2]] == [2, 2]
    assert newest[H[1]].reason == f"decided again after {H[0]}"


def test_the_hour_after_one_that_is_accepted_late_is_decided_again(lake: StreamLake) -> None:
    accept_all(lake, but=(0,))
    assert H[1] not in lake.state().accepted, "the hazard did not happen"
    ours, hours = rebuilder(lake)
    result = ours._rebuild(ours.load(), H[0], CUTS[H[0]], 0, RebuildRequest())
    assert (result.decision, result.revision) == ("accepted", 1)
    assert hours.again[0] == H[1]


def restate(rebuilder: Rebuilder, i: int) -> Result:
    return rebuilder._rebuild(rebuilder.load(), H[i], CUTS[H[i]], 1, RebuildRequest(restate=True))


def test_the_second_restatement_of_a_forgotten_hour_finds_the_first(lake: StreamLake) -> None:
    """The hazard: both make revision 2: the first is forgotten before the second looks."""
    accept_all(lake)
    mine, hours = rebuilder(lake)
    build = hours.build

    def meanwhile(hour: str, cut: Cut, before: int, state: State) -> Built:
        hours.build = build  # type: ignore[method-assign]
        made = build(hour, cut, before, state)
        assert restate(rebuilder(lake)[0], 3).revision == 2
        settle(lake)
        accept(lake, 0, [0, 1], [8], revision=2)
        settle(lake)
        settle(lake)
        assert H[0] not in lake.state().accepted, "the hazard did not happen"
        return made

    hours.build = meanwhile  # type: ignore[method-assign]
    result = restate(mine, 0)
    assert (result.decision, result.revision) == ("unchanged", 2)
    assert of_hour(lake.rows("main"), 0) == [0, 1]


def test_the_ledger_has_an_operators_acceptance_of_a_forgotten_hour(lake: StreamLake) -> None:
    """The hazard: decided again, it would be refused for what the operator had accepted."""
    reason = acceptance_reason(["quality: too few"], True, "known")
    for i in range(HOURS):
        accept(lake, i, [10 * i], [], reason=None if i else reason)
    settle(lake)
    settle(lake)
    state = lake.ledger.remembering(lake.state(), H[:2])
    assert [state.accepted[h].by_choice for h in H[:2]] == [True, False]
