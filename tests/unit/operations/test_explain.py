"""An hour in sentences: true in every state that an hour may be in."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import proofs
import pytest
from lakes import StreamLake, decide, new_state, new_stream
from proofs import BEFORE, CUT, HOUR, NEXT, NOW, accept, event, job, new_proof, read, record, spoil
from report_hours import an_expired_hour

from anabranch.offsets.hours import Adoption, Cut, Timeline, shift
from anabranch.operations.reports import explain
from anabranch.protocol import acts, ledger, ledger_row
from anabranch.protocol.state import Accepted

OPEN = shift(HOUR, 2)
LATER = NOW + timedelta(days=1)
Recorded = Callable[[Any], None]
NONE_LEFT_OUT = {"dead": 0, "duplicate": 0, "gap": 0, "gaps": {}}


@pytest.fixture
def one(tmp_path: Path) -> StreamLake:
    """Two sealed hours, both read by the speed layer, the first accepted by the batch layer."""
    made = new_proof(tmp_path)
    record(made, ledger.decision(HOUR, "sealed", 0, BEFORE, NOW, served="speed"))
    record(made, ledger.decision(NEXT, "sealed", 0, CUT, NOW, served="speed"))
    rows = [event(0, o, HOUR) for o in range(4)]
    read(made, [*rows, *(event(0, o) for o in range(4, 8))], {0: 10})
    diff = {"missing": 0, "extra": 0, "changed": 0, "duplicate": 1, "unread": 0, "sample": []}
    quality = {"passed": True, "failed": [], "warnings": [], "evaluated": 3}
    counts = {"good": 3, "duplicate": 1, "gap": 0, "gaps": {}, "speed_rows": 4}
    accept(made, HOUR, BEFORE, rows[:3], **counts, diff=diff, quality=quality)
    return made


def sentences_of(one: StreamLake, hour: str, now: datetime = NOW) -> dict[str, str]:
    """The sentences by subject; of several with one subject, all of them."""
    sentences: dict[str, str] = {}
    for subject, text in explain.explain_sentences(explain.explain(job(one), hour, now)):
        sentences[subject] = f"{sentences[subject]}\n{text}" if subject in sentences else text
    return sentences


def test_an_accepted_hour_and_one_that_waits(one: StreamLake, recorded: Recorded) -> None:
    recorded(sentences_of(one, HOUR))
    recorded(sentences_of(one, NEXT))


def test_a_refused_hour(one: StreamLake, recorded: Recorded) -> None:
    quality = {"passed": False, "failed": [{"type": "x"}], "evaluated": 1}
    given = {"good": 6, "reason": "quality: no", "quality": quality, "served": "speed"}
    for at in (NOW, LATER):
        record(one, decide(NEXT, "refused", 1, CUT, at, **given, **NONE_LEFT_OUT))
    recorded(sentences_of(one, NEXT))


def test_an_hour_refused_first_and_accepted_now(one: StreamLake, recorded: Recorded) -> None:
    refused = {"served": "speed", "reason": "quality: no", "good": 6, "dead": 0}
    record(one, decide(NEXT, "refused", 1, CUT, NOW, **refused))
    accept(one, NEXT, CUT, [event(0, o) for o in range(4, 10)])
    recorded(sentences_of(one, NEXT))


def test_a_balance_that_does_not_close_is_shouted(one: StreamLake, recorded: Recorded) -> None:
    given = {"reason": "the balance", "good": 5, "dead": 0, "duplicate": 0, "gap": 0}
    record(one, decide(NEXT, "refused", 1, CUT, NOW, **given))
    recorded(sentences_of(one, NEXT))


def test_a_restated_hour_and_a_refused_restatement(one: StreamLake, recorded: Recorded) -> None:
    """The account is of what is served, not of what was refused."""
    rows = [event(0, o, HOUR) for o in range(4)]
    accept(one, HOUR, BEFORE, rows, revision=2, reason="decided again after x")
    refused = {"served": "batch", "reason": "quality: no", "good": 1, "dead": 0}
    record(one, decide(HOUR, "refused", 3, BEFORE, LATER, **refused))
    recorded(sentences_of(one, HOUR))


def test_an_hour_whose_look_back_has_expired_cannot_be_rebuilt(tmp_path: Path) -> None:
    """The hazard: its restatement is refused, whatever the operator does."""
    made = new_proof(tmp_path)
    an_expired_hour(made)
    text = sentences_of(made, NEXT)["rebuild"]
    assert text == "it cannot be rebuilt: rows of its look-back have expired (keep.rows)"


def test_an_hour_accepted_by_an_operator_and_from_several_sources(recorded: Recorded) -> None:
    sources = {"kafka": 3, "speed": 1, "accepted": 0, "dead_letters": 0}
    reason = "accepted by an operator: known"
    given = {"good": 4, "sources": sources, "served": "batch", "reason": reason}
    facts = _facts([decide(HOUR, "accepted", 1, BEFORE, NOW, **given, **NONE_LEFT_OUT)])
    recorded(dict(explain.explain_sentences(facts)))


def test_an_accepted_hour_with_erased_records(recorded: Recorded) -> None:
    accepted = decide(HOUR, "accepted", 1, BEFORE, NOW, served="batch", good=4, **NONE_LEFT_OUT)
    facts = _facts([accepted, decide(HOUR, "erased", 1, None, LATER, good=3, dead=0, erased=1)])
    recorded(dict(explain.explain_sentences(facts)))
    assert (facts.accepted_at, facts.revision) == (NOW, 1)


def test_a_restatement_after_an_erasure_has_its_own_account() -> None:
    diff = {"missing": 1, "extra": 0, "changed": 0, "duplicate": 0, "unread": 0, "sample": []}
    given = {"served": "batch", "good": 4, **NONE_LEFT_OUT}
    accepted = decide(HOUR, "accepted", 1, BEFORE, NOW, diff=diff, **given)
    erased = decide(HOUR, "erased", 1, None, LATER, good=3, dead=0, erased=1)
    restated = decide(HOUR, "accepted", 2, BEFORE, LATER, **given)
    refused = decide(HOUR, "refused", 3, BEFORE, LATER, good=1, dead=0, reason="quality: no")
    facts = _facts([accepted, erased, restated, refused], accepted={HOUR: Accepted(2, BEFORE)})
    assert (facts.counts.good, facts.counts.erased, facts.diff) == (4, None, None)


def test_an_overridden_hour(one: StreamLake) -> None:
    acts.serve_hour(one.publisher, HOUR, "speed", "the rule is wrong")
    sentences = sentences_of(one, HOUR)
    assert sentences["hour"].endswith("is accepted as revision 1; the speed layer serves it")
    assert ", by choice: the rule is wrong; `anabranch override events" in sentences["served"]
    assert "main serves 4 rows" in sentences["layers"]
    acts.serve_hour(one.publisher, HOUR, "auto", "mended")
    assert "by choice" not in sentences_of(one, HOUR)["served"]


def test_an_open_an_ended_and_a_coming_hour(one: StreamLake, recorded: Recorded) -> None:
    proofs.bury(one, [(OPEN, 0, 10)])
    running, ended = (datetime(2026, 11, 21, h, 30, tzinfo=UTC) for h in (2, 3))
    for hour, at in ((OPEN, running), (OPEN, ended), ("2026-11-21T09", running)):
        recorded(sentences_of(one, hour, at))
    recorded(sentences_of(one, shift(HOUR, -1)))


def test_a_main_of_no_serving_layer_is_shouted(one: StreamLake, recorded: Recorded) -> None:
    assert explain.explain(job(one), HOUR, NOW).merged
    spoil(one, remove_hour=HOUR)
    recorded(sentences_of(one, HOUR))


TIMELINE = Timeline(HOUR, OPEN, {0: 10}, sealed={HOUR: BEFORE, NEXT: CUT})


def _facts(rows: list[ledger_row.LedgerRow], hour: str = HOUR, **values: Any) -> explain.HourFacts:
    given = {"accepted": {HOUR: Accepted(1, BEFORE)}} | values
    state = new_state(given.pop("timeline", TIMELINE), {0: 10}, **given)
    files = {"main": {"a": 3, "b": 1}, "speed": {}, "batch": {"a": 3, "b": 1}}
    return explain.hour_facts(new_stream(), state, hour, rows, files, {}, NOW)


def test_an_empty_hour(recorded: Recorded) -> None:
    cut = Cut("t", {0: (4, 4)})
    row = decide(HOUR, "accepted", 1, cut, NOW, served="batch", good=0, **NONE_LEFT_OUT)
    facts = _facts([row], accepted={HOUR: Accepted(1, cut)}, timeline=replace(TIMELINE, sealed={}))
    recorded(dict(explain.explain_sentences(facts)))


ADOPTED = replace(TIMELINE, adoptions=(Adoption(NEXT, "former", {0: 0}),))


@pytest.mark.parametrize(
    ("hour", "values"),
    [
        (NEXT, {"timeline": ADOPTED}),
        (HOUR, {"timeline": ADOPTED, "accepted": {HOUR: Accepted(1, Cut("former", {0: (0, 4)}))}}),
        (HOUR, {}),
        (HOUR, {"timeline": replace(TIMELINE, skipped=(HOUR,))}),
        (HOUR, {"timeline": replace(TIMELINE, covered_from=NEXT)}),
    ],
    ids=[
        "kafka lost it", "kafka lost it once accepted", "the ledger lost it", "skipped", "dropped",
    ],
)  # fmt: skip
def test_an_hour_that_lost_something(hour: str, values: dict[str, Any], recorded: Recorded) -> None:
    facts = _facts([], hour, **values)
    recorded(dict(explain.explain_sentences(facts)) | {"to rebuild": facts.rebuild})


def test_an_unexplained_error_is_logged_as_an_error(recorded: Recorded) -> None:
    diff = {"missing": 3, "extra": 0, "changed": 1, "duplicate": 0, "unread": 2, "sample": []}
    given = {"served": "batch", "good": 4, "diff": diff, "speed_rows": 1, "gaps": {}}
    facts = _facts([decide(HOUR, "accepted", 1, BEFORE, NOW, **given)])
    assert facts.unexplained == {"missing": 1, "changed": 1}
    recorded(dict(explain.explain_sentences(facts)))


def test_a_decision_that_waits_on_its_branch_counts(one: StreamLake) -> None:
    row = decide(NEXT, "accepted", 1, CUT, NOW, served="batch", good=1, dead=0)
    publish = one.accept(proofs.stage_rows(one, [event(0, 4)]), NEXT, Accepted(1, CUT))
    one.publish(replace(publish, decisions=(row,)))
    assert sentences_of(one, NEXT)["account"] == "of 6 offsets 1 became rows"


def test_since_when_a_layer_serves() -> None:
    def at(hour: int) -> datetime:
        return datetime(2026, 11, 21, hour, tzinfo=UTC)

    past: list[tuple[ledger_row.Kind, ledger_row.Layer]] = [
        ("sealed", "speed"), ("accepted", "batch"), ("served", "speed"), ("served", "batch"),
        ("accepted", "batch"),
    ]  # fmt: skip
    decided = enumerate(past, 1)
    rows = [ledger.decision(HOUR, kind, 1, None, at(h), served=by) for h, (kind, by) in decided]
    assert explain.served_since(rows[:1], "speed") is None
    assert explain.served_since(rows[:2], "batch") == at(2)
    assert explain.served_since(rows[:3], "speed") == at(3)
    assert explain.served_since(rows, "batch") == at(4)
    # The ledger does not know of the change.
    assert explain.served_since(rows[:2], "speed") is None


def test_the_open_hour_after_an_adoption_may_lie_ahead() -> None:
    state = new_state(replace(TIMELINE, open="2026-11-21T04"))
    assert explain.classify_hour(state, "2026-11-21T04", False, NOW) == "open"
    assert explain.classify_hour(state, "2026-11-21T05", False, NOW) == "not begun"
