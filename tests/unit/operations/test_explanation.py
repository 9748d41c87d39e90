"""An hour in sentences: true in every state that an hour may be in."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from lakes import StreamLake, decide, new_state, new_stream
from proofs import (
    BEFORE,
    CUT,
    HOUR,
    NEXT,
    NOW,
    accept,
    event,
    job,
    new_proof,
    read,
    record,
    spoil,
    stage_rows,
)

from anabranch.offsets.hours import Adoption, Cut, Timeline, shift
from anabranch.operations.reports import explain
from anabranch.operations.reports.explain import (
    HourFacts,
    classify_hour,
    explain_sentences,
    hour_facts,
    served_since,
)
from anabranch.protocol import acts, ledger
from anabranch.protocol.ledger_row import Kind, Layer, LedgerRow
from anabranch.protocol.state import Accepted

OPEN = shift(HOUR, 2)
LATER = NOW + timedelta(days=1)
NONE_LEFT_OUT = {"dead": 0, "duplicate": 0, "gap": 0, "gaps": {}}


@pytest.fixture
def one(tmp_path: Path) -> StreamLake:
    """Two sealed hours; the speed layer has read both, and the batch layer has accepted the
    first."""
    made = new_proof(tmp_path)
    record(made, ledger.decision(HOUR, "sealed", 0, BEFORE, NOW, served="speed"))
    record(made, ledger.decision(NEXT, "sealed", 0, CUT, NOW, served="speed"))
    rows = [event(0, o, HOUR) for o in range(4)]
    read(made, [*rows, *(event(0, o) for o in range(4, 8))], {0: 10})
    diff = {"missing": 0, "extra": 0, "changed": 0, "duplicate": 1, "unread": 0, "sample": []}
    quality = {"passed": True, "failed": [], "warnings": [], "evaluated": 3}
    counts = {
        "good": 3,
        "duplicate": 1,
        "gap": 0,
        "gaps": {},
        "speed_rows": 4,
        "diff": diff,
        "quality": quality,
    }
    accept(made, HOUR, BEFORE, rows[:3], **counts)
    return made


def sentences_of(one: StreamLake, hour: str, now: datetime = NOW) -> dict[str, str]:
    """The sentences by subject; of several with one subject, all of them."""
    sentences: dict[str, str] = {}
    for subject, text in explain_sentences(explain.explain(job(one), hour, now)):
        sentences[subject] = f"{sentences[subject]}\n{text}" if subject in sentences else text
    return sentences


def test_an_accepted_hour(one: StreamLake) -> None:
    assert sentences_of(one, HOUR) == {
        "hour": f"{HOUR} of events is accepted as revision 1; the batch layer serves it",
        "sealed": "at 2026-11-21 02:00:00 UTC: 4 offsets of topic id t: partition 0 [0, 4)",
        "layers": "speed has 4 rows in 1 file, batch has 3 rows in 1 file, main serves 3 rows in 1 file",
        "account": (
            "of 4 offsets 3 became rows, 1 were removed as duplicates (`anabranch explain "
            f"events {HOUR} --rows`)"
        ),
        "checks": (
            "the balance closes (3 + 0 + 1 + 0 = 4 of 4 offsets); the quality gate passed (3 "
            "expectations); compared with 4 rows of speed: 0 missing, 0 extra, 0 changed"
        ),
        "served": "by batch since 2026-11-21 02:00:00 UTC, by the rule: the batch layer has accepted it",
        "revision": "1 at 2026-11-21 02:00:00 UTC",
        "query": f"`anabranch query \"SELECT * FROM games.events WHERE ingest_hour = '{HOUR}'\"`",
        "rebuild": f"`anabranch batch events --hour {HOUR} --restate`",
        "audit": f"`anabranch audit events --hours {HOUR}`",
    }


def test_a_sealed_hour_that_waits(one: StreamLake) -> None:
    sentences = sentences_of(one, NEXT)
    assert (
        sentences["hour"]
        == f"{NEXT} of events is sealed and waits for the batch layer; the speed layer serves it"
    )
    assert (
        sentences["layers"]
        == "speed has 4 rows in 1 file, batch has no rows, main serves 4 rows in 1 file"
    )
    assert sentences["served"] == "by speed, by the rule: the batch layer has not accepted it"
    assert sentences["rebuild"] == f"`anabranch batch events --hour {NEXT}`"
    assert not {"account", "checks", "revision", "refused", "audit"} & set(sentences)


def test_a_refused_hour(one: StreamLake) -> None:
    for at in (NOW, LATER):
        record(
            one,
            decide(
                NEXT,
                "refused",
                1,
                CUT,
                at,
                served="speed",
                reason="quality: no",
                good=6,
                dead=0,
                duplicate=0,
                gap=0,
                gaps={},
                quality={"passed": False, "failed": [{"type": "x"}], "evaluated": 1},
            ),
        )
    sentences = sentences_of(one, NEXT)
    assert sentences["hour"] == f"{NEXT} of events is refused; the speed layer still serves it"
    assert sentences["refused"] == "at 2026-11-22 02:00:00 UTC (refusal 2): quality: no"
    assert sentences["account"] == "in the build that was refused, of 6 offsets 6 became rows"
    assert "the quality gate failed (1 expectation), critical: x" in sentences["checks"]
    assert sentences["rebuild"].startswith(
        "fix the cause of the refusal, then `anabranch batch events --hour "
    )


def test_an_hour_that_was_refused_first_and_is_accepted_now(one: StreamLake) -> None:
    record(
        one,
        decide(NEXT, "refused", 1, CUT, NOW, served="speed", reason="quality: no", good=6, dead=0),
    )
    accept(one, NEXT, CUT, [event(0, o) for o in range(4, 10)])
    sentences = sentences_of(one, NEXT)
    expected = f"{NEXT} of events is accepted as revision 1; the batch layer serves it"
    assert sentences["hour"] == expected
    assert "refused" not in sentences


def test_a_balance_that_does_not_close_is_shouted(one: StreamLake) -> None:
    record(
        one,
        decide(
            NEXT, "refused", 1, CUT, NOW, reason="the balance", good=5, dead=0, duplicate=0, gap=0
        ),
    )
    assert (
        sentences_of(one, NEXT)["checks"]
        == "the balance does NOT close (5 + 0 + 0 + 0 = 5 of 6 offsets)"
    )


def test_a_restated_hour_and_a_refused_restatement(one: StreamLake) -> None:
    accept(
        one,
        HOUR,
        BEFORE,
        [event(0, o, HOUR) for o in range(4)],
        revision=2,
        reason="decided again after x",
    )
    record(
        one,
        decide(
            HOUR, "refused", 3, BEFORE, LATER, served="batch", reason="quality: no", good=1, dead=0
        ),
    )
    sentences = sentences_of(one, HOUR)
    assert sentences["hour"].endswith("is accepted as revision 2; the batch layer serves it")
    assert sentences["refused"] == (
        "a restatement (revision 3) at 2026-11-22 02:00:00 UTC: quality: no; revision 2 stays"
    )
    assert sentences["account"] == "of 4 offsets 4 became rows", (
        "of what is served, not of what was refused"
    )
    first, second = sentences["revision"].splitlines()
    assert first == "1 at 2026-11-21 02:00:00 UTC; can be read: no longer: its tag has expired"
    assert second.startswith(
        "2 at 2026-11-21 02:00:00 UTC, decided again after x: good 3 to 4 (+1), duplicate 1 to 0 "
        "(-1)"
    )
    assert sentences["served"].startswith("by batch since 2026-11-21 02:00:00 UTC")


def test_an_hour_accepted_by_an_operator_and_from_several_sources(one: StreamLake) -> None:
    sources = {"kafka": 3, "speed": 1, "accepted": 0, "dead_letters": 0}
    counts = {"good": 4, "dead": 0, "duplicate": 0, "gap": 0, "gaps": {}, "sources": sources}
    reason = "accepted by an operator: known"
    facts = _facts(
        [decide(HOUR, "accepted", 1, BEFORE, NOW, served="batch", reason=reason, **counts)]
    )
    sentences = dict(explain_sentences(facts))
    assert (
        sentences["account"]
        == "of 4 offsets 4 became rows; 3 read from Kafka, 1 read from the speed layer"
    )
    assert sentences["revision"] == "1 at 2026-11-21 02:00:00 UTC, accepted by an operator: known"


def test_an_accepted_hour_with_erased_records(one: StreamLake) -> None:
    facts = _facts(
        [
            decide(HOUR, "accepted", 1, BEFORE, NOW, served="batch", good=4, **NONE_LEFT_OUT),
            decide(HOUR, "erased", 1, None, LATER, good=3, dead=0, erased=1),
        ]
    )
    sentences = dict(explain_sentences(facts))
    assert (
        sentences["account"]
        == "of 4 offsets 3 became rows, 1 were erased (`anabranch erasures events`)"
    )
    assert sentences["checks"] == "the balance closes (3 + 0 + 0 + 0 + 1 = 4 of 4 offsets)"
    assert (facts.accepted_at, facts.revision) == (NOW, 1)


def test_a_restatement_after_an_erasure_has_its_own_account(one: StreamLake) -> None:
    diff = {"missing": 1, "extra": 0, "changed": 0, "duplicate": 0, "unread": 0, "sample": []}
    accepted = decide(
        HOUR, "accepted", 1, BEFORE, NOW, served="batch", good=4, diff=diff, **NONE_LEFT_OUT
    )
    erased = decide(HOUR, "erased", 1, None, LATER, good=3, dead=0, erased=1)
    restated = decide(HOUR, "accepted", 2, BEFORE, LATER, served="batch", good=4, **NONE_LEFT_OUT)
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


def test_an_open_an_ended_and_a_coming_hour(one: StreamLake) -> None:
    running, ended = (datetime(2026, 11, 21, h, 30, tzinfo=UTC) for h in (2, 3))
    sentences = sentences_of(one, OPEN, running)
    assert (
        sentences["hour"]
        == f"{OPEN} of events is open: it still receives records, and the speed layer serves them"
    )
    assert (
        sentences["seal"]
        == "it can be sealed from 2026-11-21 03:02:00 UTC on, by any run of the batch layer"
    )
    assert "rebuild" not in sentences
    sentences = sentences_of(one, OPEN, ended)
    assert sentences["hour"].startswith(f"{OPEN} of events has ended and is not sealed yet")
    assert sentences["rebuild"] == f"`anabranch batch events --hour {OPEN}`"
    coming = "2026-11-21T09"
    assert sentences_of(one, coming, running) == {
        "hour": f"{coming} of events has not begun; the open hour is {OPEN}"
    }


def test_an_hour_before_the_first(one: StreamLake) -> None:
    before = shift(HOUR, -1)
    assert sentences_of(one, before) == {
        "hour": (
            f"{before} of events is before {HOUR}, where the stream begins; earlier records of "
            f"Kafka belong to {HOUR}"
        )
    }


def test_a_main_that_is_not_the_serving_layers_is_shouted(one: StreamLake) -> None:
    assert explain.explain(job(one), HOUR, NOW).merged
    spoil(one, remove_hour=HOUR)
    assert (
        "but main does NOT contain the batch layer's files: `anabranch merge events` repairs it"
        in sentences_of(one, HOUR)["served"]
    )


TIMELINE = Timeline(HOUR, OPEN, {0: 10}, sealed={HOUR: BEFORE, NEXT: CUT})


def _facts(rows: list[LedgerRow], hour: str = HOUR, **values: Any) -> HourFacts:
    given = {"accepted": {HOUR: Accepted(1, BEFORE)}} | values
    state = new_state(given.pop("timeline", TIMELINE), {0: 10}, **given)
    files = {"main": {"a": 3, "b": 1}, "speed": {}, "batch": {"a": 3, "b": 1}}
    return hour_facts(new_stream(), state, hour, rows, files, {}, NOW)


def test_an_empty_hour() -> None:
    cut = Cut("t", {0: (4, 4)})
    row = decide(
        HOUR, "accepted", 1, cut, NOW, served="batch", good=0, dead=0, duplicate=0, gap=0, gaps={}
    )
    facts = _facts([row], accepted={HOUR: Accepted(1, cut)}, timeline=replace(TIMELINE, sealed={}))
    sentences = dict(explain_sentences(facts))
    assert sentences["sealed"] == "at a time that is not in the ledger, without records"
    assert sentences["rebuild"] == "nothing to rebuild: it has no records"
    assert not {"account", "checks"} & set(sentences)


def test_an_hour_that_kafka_lost_is_reported_as_final() -> None:
    adopted = replace(TIMELINE, adoptions=(Adoption(NEXT, "former", {0: 0}),))
    facts = _facts([], NEXT, timeline=adopted)
    sentences = dict(explain_sentences(facts))
    assert sentences["rebuild"].startswith(
        "it cannot be rebuilt: Kafka no longer has it: the log of topic id former"
    )
    assert facts.rebuild is None


def test_an_accepted_hour_that_kafka_lost_is_rebuilt_from_the_table() -> None:
    adopted = replace(TIMELINE, adoptions=(Adoption(NEXT, "former", {0: 0}),))
    former = Cut("former", {0: (0, 4)})
    sentences = dict(
        explain_sentences(_facts([], timeline=adopted, accepted={HOUR: Accepted(1, former)}))
    )
    assert sentences["rebuild"].startswith(
        f"`anabranch batch events --hour {HOUR} --restate`, from the rows and dead letters in the "
        "table: Kafka no longer has it"
    )


def test_an_hour_that_the_ledger_lost() -> None:
    sentences = dict(explain_sentences(_facts([])))
    assert sentences["hour"].endswith("is accepted as revision 1; the batch layer serves it")
    assert sentences["sealed"].startswith("at a time that is not in the ledger: 4 offsets")
    assert sentences["account"] == "the ledger has no counts"
    assert sentences["served"] == "by batch, by the rule: the batch layer has accepted it"


def test_missing_and_unread_rows_of_the_speed_layer() -> None:
    skipped = _facts([], timeline=replace(TIMELINE, skipped=(HOUR,)))
    assert (
        "speed does not cover the whole hour: the speed layer skipped it"
        in dict(explain_sentences(skipped))["layers"]
    )
    dropped = _facts([], timeline=replace(TIMELINE, covered_from=NEXT))
    assert (
        "those of the hour were deleted (`anabranch maintain`)"
        in dict(explain_sentences(dropped))["layers"]
    )


def test_an_unexplained_error_is_logged_as_an_error() -> None:
    diff = {"missing": 3, "extra": 0, "changed": 1, "duplicate": 0, "unread": 2, "sample": []}
    row = decide(
        HOUR, "accepted", 1, BEFORE, NOW, served="batch", good=4, diff=diff, speed_rows=1, gaps={}
    )
    facts = _facts([row])
    assert facts.unexplained == {"missing": 1, "changed": 1}
    assert dict(explain_sentences(facts))["checks"] == (
        "compared with 1 rows of speed: 3 missing (2 of them not read by the speed layer at that time), 0 extra, 1 "
        f"changed; NOTHING EXPLAINS 1 missing, 1 changed: `anabranch explain events {HOUR} --rows`"
    )


def test_a_decision_that_waits_on_its_branch_counts(one: StreamLake) -> None:
    row = decide(NEXT, "accepted", 1, CUT, NOW, served="batch", good=1, dead=0)
    publish = one.accept(stage_rows(one, [event(0, 4)]), NEXT, Accepted(1, CUT))
    one.publish(replace(publish, decisions=(row,)))
    assert sentences_of(one, NEXT)["account"] == "of 6 offsets 1 became rows"


def test_since_when_a_layer_serves() -> None:
    def row(kind: Kind, served: Layer, hour: int) -> LedgerRow:
        return ledger.decision(
            HOUR, kind, 1, None, datetime(2026, 11, 21, hour, tzinfo=UTC), served=served
        )

    rows = [
        row("sealed", "speed", 1),
        row("accepted", "batch", 2),
        row("served", "speed", 3),
        row("served", "batch", 4),
        row("accepted", "batch", 5),
    ]
    assert served_since(rows[:1], "speed") is None
    assert served_since(rows[:2], "batch") == datetime(2026, 11, 21, 2, tzinfo=UTC)
    assert served_since(rows[:3], "speed") == datetime(2026, 11, 21, 3, tzinfo=UTC)
    assert served_since(rows, "batch") == datetime(2026, 11, 21, 4, tzinfo=UTC)
    # The ledger does not know of the change.
    assert served_since(rows[:2], "speed") is None


def test_the_open_hour_after_an_adoption_may_lie_ahead() -> None:
    state = new_state(replace(TIMELINE, open="2026-11-21T04"))
    assert classify_hour(state, "2026-11-21T04", False, NOW) == "open"
    assert classify_hour(state, "2026-11-21T05", False, NOW) == "not begun"
