"""An hour whose look-back the speed layer has yet to read: accepted, and then decided again."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from brokers import Broker
from lakes import FIRST, StreamLake, new_environment, new_lake, new_state
from no_spark import NO_SPARK, Hours

from anabranch.common.json_values import dump, parse
from anabranch.job import Job
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol import ledger, ledger_row, state
from anabranch.protocol.merge import unread_hours
from anabranch.protocol.state import Accepted, State, accepted_properties
from batch_layer import rebuild, stream_run
from batch_layer.build import Built
from batch_layer.plan import fingerprint, plan_recheck

H0, H1, H2 = (shift(FIRST, i) for i in range(3))
CUTS = {H0: Cut("t", {0: (0, 10)}), H1: Cut("t", {0: (10, 20)}), H2: Cut("t", {0: (20, 30)})}
TIMELINE = Timeline(H0, shift(H2, 1), {0: 30}, sealed=dict(CUTS))
NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


class WholeHours(Hours):
    """Builds hours of all records, which change no event; `meanwhile` happens in each build."""

    def __init__(self, lake: StreamLake, meanwhile: Callable[[], None] = lambda: None) -> None:
        super().__init__(lake)
        self.meanwhile, self.built = meanwhile, list[str]()

    def build(self, hour: str, cut: Cut, before: int, state: State) -> Built:
        self.built.append(hour)
        rows = self._lake.stage([(hour, 0, o) for o in range(*cut.ranges[0])])
        self.meanwhile()
        account = ledger_row.HourAccount(good=10, dead=0, duplicate=0, gap=0)
        return Built(hour, cut, before, rows, None, account)

    def changes_events(self, built: Built, state: State) -> bool:
        return False

    def recheck_duplicates(
        self, hour: str, cut: Cut, before: int, state: State, together: object
    ) -> Built | None:
        self.again.append(hour)
        return None


def rebuilder(
    lake: StreamLake, meanwhile: Callable[[], None] = lambda: None
) -> tuple[rebuild.Rebuilder, WholeHours]:
    job = Job(new_environment(lake.folder), lake.stream, lake.lake, Broker().adapter)
    made, hours = rebuild.Rebuilder(job, NO_SPARK), WholeHours(lake, meanwhile)
    made._hours = hours  # type: ignore[assignment]
    return made, hours


def read(lake: StreamLake, upto: int) -> None:
    """A micro-batch of the speed layer from its position to `upto`, each offset under its hour."""
    start = lake.state().position.offsets[0]
    rows = [(h, 0, o) for h, c in CUTS.items() for o in range(*c.ranges[0]) if start <= o < upto]
    lake.serve(rows, {0: upto})


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """Three sealed hours: the first is refused, and the speed layer, which serves it, amid it."""
    made = new_lake(tmp_path, timeline=TIMELINE)
    read(made, 4)
    return made


def test_an_hour_is_accepted_while_speed_works_off_its_look_back(lake: StreamLake) -> None:
    """The hazard: each micro-batch changes what duplicates are judged by; it is built for ever."""
    made, hours = rebuilder(lake, lambda: read(lake, lake.state().position.offsets[0] + 1))
    result = made.rebuild(H1)
    assert (result.decision, result.revision, hours.built) == ("accepted", 1, [H1])
    assert lake.state().position.offsets == {0: 5}, "the hazard did not happen"
    assert lake.state().accepted[H1] == Accepted(1, CUTS[H1], unread=(H0,))


def test_it_is_decided_again_by_the_next_run_once_its_look_back_is_read(lake: StreamLake) -> None:
    made, hours = rebuilder(lake)
    made.rebuild(H1)
    assert stream_run.to_recheck(made._job, lake.state()) == {}, "not before"
    read(lake, 10)
    why = f"duplicates rechecked: the speed layer has now read {H0} completely"
    found = stream_run.to_recheck(made._job, lake.state())
    assert found == {H1: rebuild.RebuildRequest(restate=True, why=why)}
    hours.built.clear()
    result = made.rebuild(H1, found[H1])
    assert (result.decision, result.revision, result.reason) == ("accepted", 2, why)
    assert hours.built == [H1]
    assert lake.state().accepted[H1] == Accepted(2, CUTS[H1])
    assert stream_run.to_recheck(made._job, lake.state()) == {}


def test_a_refused_restatement_is_not_tried_by_every_run(lake: StreamLake) -> None:
    made, _ = rebuilder(lake)
    made.rebuild(H1)
    read(lake, 10)
    lake.ledger.record([ledger.decision(H1, "refused", 2, CUTS[H1], NOW, "id", reason="no")])
    assert stream_run.to_recheck(made._job, lake.state()) == {}


def test_an_hour_accepted_by_choice_stays_so(lake: StreamLake) -> None:
    made, hours = rebuilder(lake)
    real = hours.build
    hours.build = lambda *given: replace(real(*given), objections=("too few",))  # type: ignore[method-assign]
    made.rebuild(H1, rebuild.RebuildRequest(accept=True, why="known"))
    read(lake, 10)
    assert stream_run.to_recheck(made._job, lake.state())[H1].accept


def test_accepting_the_hour_before_decides_it_again_in_the_same_publish(lake: StreamLake) -> None:
    """The hazard: the speed layer has read the rest, so no state shows what the hour never saw."""
    made, hours = rebuilder(lake)
    made.rebuild(H1)
    read(lake, 10)
    made.rebuild(H0)
    assert hours.again == [H1]
    # It keeps the same rows, and rests on all of its look-back now.
    assert lake.state().accepted == {H0: Accepted(1, CUTS[H0]), H1: Accepted(1, CUTS[H1])}
    assert stream_run.to_recheck(made._job, lake.state()) == {}


def a_late_row(lake: StreamLake) -> None:
    lake.serve([(H0, 0, 99)], {0: 10})


def an_acceptance(lake: StreamLake) -> None:
    staged = lake.stage([(H0, 0, o) for o in range(10)])
    rest = replace(lake.state().timeline, sealed={H1: CUTS[H1], H2: CUTS[H2]})
    lake.land(lake.accept(staged, H0, Accepted(1, CUTS[H0]), timeline=rest))


@pytest.mark.parametrize(("upto", "change"), [(10, a_late_row), (4, an_acceptance)])
def test_what_happens_to_a_look_back_meanwhile_is_noticed(
    lake: StreamLake, upto: int, change: Callable[[StreamLake], None]
) -> None:
    """Rows that come where none are awaited are compared: the hour is built again, and holds."""
    read(lake, upto)
    left = [change]
    made, hours = rebuilder(lake, lambda: left.pop()(lake) if left else None)
    assert made.rebuild(H1).decision == "accepted"
    assert hours.built == [H1, H1]
    assert lake.state().accepted[H1].unread == ()


# Which hours more is to come of


def of(offset: int, timeline: Timeline = TIMELINE, **values: Any) -> State:
    return new_state(timeline, {0: offset}, **values)


def test_unread_hours_of_the_speed_layer_alone_may_grow() -> None:
    assert unread_hours(of(4), [H0]) == {H0}
    assert unread_hours(of(0), [H0, H1]) == {H0, H1}
    assert unread_hours(of(10), [H0, H1]) == {H1}
    assert unread_hours(of(10), [H0]) == set()
    accepted = {H0: Accepted(1, CUTS[H0])}
    assert unread_hours(of(4, accepted=accepted), [H0]) == set(), "batch serves it"
    assert unread_hours(of(4, accepted=accepted, overrides={H0: "speed"}), [H0]) == {H0}
    assert unread_hours(of(4, replace(TIMELINE, skipped=(H0,))), [H0]) == set(), "jumped over"
    assert unread_hours(of(4), [shift(H0, -1)]) == set(), "before the stream began"


def test_an_hour_is_rechecked_once_it_has_seen_all_and_its_fingerprint_omits_row_counts() -> None:
    accepted = {H2: Accepted(1, CUTS[H2], unread=(H0, H1))}
    assert plan_recheck(of(4, accepted=accepted)) == {}
    assert plan_recheck(of(10, accepted=accepted)) == {}
    assert plan_recheck(of(20, accepted=accepted)) == {H2: (H0, H1)}
    found = fingerprint(of(4), [H0], {}, {H0: 4}, {H0})
    assert found == fingerprint(of(5), [H0], {}, {H0: 5}, {H0})
    assert fingerprint(of(4), [H0], {}, {H0: 4}) != fingerprint(of(5), [H0], {}, {H0: 5})
    served = fingerprint(of(10, accepted={H0: Accepted(1, CUTS[H0])}), [H0], {H0: ["f"]}, {}, {H0})
    assert fingerprint(of(4), [H0], {}, {H0: 4}, {H0}) != served


def test_an_hour_to_be_decided_again_stays_in_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: the ledger does not say what a forgotten hour had not seen."""
    monkeypatch.setattr(state, "REMEMBERED_HOURS", 1)
    timeline = replace(TIMELINE, sealed={})
    accepted = {H0: Accepted(1, CUTS[H0], unread=(shift(H0, -1),)), H1: Accepted(1, CUTS[H1])}
    before = of(30, timeline, accepted=accepted, branch_properties={})
    properties = accepted_properties(before, {H2: Accepted(1, CUTS[H2])})
    assert H0 in properties[state.ACCEPTED] and H1 not in properties[state.ACCEPTED]
    one = Accepted(3, CUTS[H0], True, (H1, H2))
    assert parse(Accepted, dump(one)) == one
    assert "unread" not in dump(Accepted(1, CUTS[H0]))
