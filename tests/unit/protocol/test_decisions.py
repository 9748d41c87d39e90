"""Revisions: what changed between them, and whether the one that was replaced can still be read."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import proofs
import pytest
from lakes import StreamLake, decide
from proofs import CUT, HOUR, NEXT, NOW, event, job, read, record
from pyiceberg.table import Table
from queries import run_query

from anabranch.cli.render.hours import history_text
from anabranch.cli.report import print_text
from anabranch.common.errors import ConfigurationError
from anabranch.iceberg import commits, lake
from anabranch.job import Job
from anabranch.offsets.hours import Cut
from anabranch.operations.audit import audit
from anabranch.operations.reports.explain import explain
from anabranch.protocol import acts, state
from anabranch.protocol import decisions as protocol_decisions
from anabranch.protocol.ledger_row import Kind, LedgerRow
from serving_layer.reader.selection import find_snapshot


def rebuild(one: StreamLake, revision: int, rows: list[dict[str, Any]], **values: Any) -> None:
    proofs.rebuild(one, NEXT, CUT, revision, rows, **values)


def recorded(one: StreamLake, hour: str) -> list[protocol_decisions.DecisionFacts]:
    return protocol_decisions.decisions(job(one).lake, job(one).stream, hour)


def n_of(one: StreamLake, at: str) -> list[int]:
    table = run_query(f"SELECT n FROM {one.name} ORDER BY 1", {one.name: one.table()}, as_of=at)
    values: list[int] = table["n"].to_pylist()
    return values


def test_a_replaced_revision_is_read_by_its_tag(one: StreamLake) -> None:
    rebuild(one, 1, [event(0, 4, n=1)])
    rebuild(one, 2, [event(0, 4, n=2), event(0, 5, n=3)])
    again = "decided again after 2026-11-21T00"
    rebuild(one, 3, [event(0, 4, n=4)], gap=1, gaps={"control": 1}, reason=again)
    first, second, third = recorded(one, NEXT)
    assert [d.tag for d in (first, second, third)] == [f"{NEXT}-r1", f"{NEXT}-r2", None]
    assert second.changed == {"good": [1, 2]}
    assert third.changed == {"good": [2, 1], "gap": [0, 1], "gaps": [{}, {"control": 1}]}
    sql = f"SELECT * FROM games.events WHERE ingest_hour = '{NEXT}'"
    assert first.query == f'anabranch query "{sql}" --as-of {NEXT}-r1'
    assert first.readable.startswith("by its tag until ")
    assert third.readable == "it is the newest revision"
    reasons = [None, "restated (`anabranch batch --restate`)", again]
    assert [d.reason for d in (first, second, third)] == reasons
    assert [n_of(one, at) for at in (f"{NEXT}-r1", f"{NEXT}-r2", "main")] == [[1], [2, 3], [4]]


def test_a_revision_replaced_under_speed_is_read_by_its_tag(one: StreamLake) -> None:
    """The hazard: `main` showed the speed layer's rows, so a tag of it is not the revision's."""
    read(one, [event(0, 4, n=1), event(0, 5, n=9, id="0-4")], {0: 10})
    rebuild(one, 1, [event(0, 4, n=1)])
    acts.serve_hour(one.publisher, NEXT, "speed", "the rule is wrong")
    rebuild(one, 2, [event(0, 4, n=2)])
    first = next(d for d in recorded(one, NEXT) if (d.decision, d.revision) == ("accepted", 1))
    assert n_of(one, "main") == [1, 9], "the hazard did not happen"
    assert n_of(one, f"{NEXT}-r1") == [1]
    assert first.readable.startswith("by its tag until ")


def row(kind: Kind, revision: int, hour: str = NEXT, **values: Any) -> LedgerRow:
    return decide(hour, kind, revision, None, NOW, **values)


def test_a_missing_or_moved_tag_is_reported() -> None:
    rows = [row("accepted", 1, good=3), row("accepted", 2, good=3)]
    (first, _) = protocol_decisions.history_rows("games.events", rows, {})
    assert (first.query, first.readable) == (None, "no longer: its tag has expired")
    tag = protocol_decisions.Tagged(f"{NEXT}-r1", 7, 2, datetime(2026, 11, 28, tzinfo=UTC))
    (first, _) = protocol_decisions.history_rows("games.events", rows, {tag.name: tag})
    assert (first.query, first.readable) == (None, "no: its tag shows 2 rows, the revision had 3")


def _revisions_of_history(of: Job) -> list[int]:
    return [d.revision for d in protocol_decisions.decisions(of.lake, of.stream, NEXT)]


def _revisions_of_explain(of: Job) -> list[int]:
    facts = explain(of, NEXT, NOW)
    assert [facts.accepted_at, facts.counts.good] == [NOW, 6]
    return [decision.revision for decision in facts.revisions]


def _revisions_of_audit(of: Job) -> list[int]:
    report = audit(of, None, with_kafka=False)
    [hour] = report.hours
    assert report.agrees
    assert hour.row is not None
    return [hour.row.revision]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize(
    "revisions", [_revisions_of_history, _revisions_of_explain, _revisions_of_audit]
)
def test_a_decision_recorded_and_confirmed_during_a_report_is_in_the_report(
    one: StreamLake, revisions: Callable[[Job], list[int]], before: bool
) -> None:
    """Just before or after the first load of the rows' table, an hour is accepted, its row is
    recorded, and the next publish removes the decision from the branches."""
    done: list[bool] = []

    def accept_and_confirm() -> None:
        rebuild(one, 1, [event(0, offset) for offset in range(4, 10)])
        confirmed = state.Confirmed(frozenset(row.decision_id for row in one.state().decisions))
        one.change(commits.Change("batch"), commits.Change("main"), confirmed=confirmed)
        done.append(one.state().decisions == ())

    class Slow(lake.Lake):
        def load(self, name: str) -> Table:
            if name != one.name or done:
                return super().load(name)
            if before:
                accept_and_confirm()
            table = super().load(name)
            if not before:
                accept_and_confirm()
            return table

    assert revisions(replace(job(one), lake=Slow(one.environment))) == [1]
    assert done == [True]


def test_every_decision_is_listed_hour_by_hour_and_its_changes_in_words() -> None:
    rows = [
        row("sealed", 0, hour=HOUR), row("sealed", 0), row("accepted", 1, hour=HOUR, good=1),
        row("refused", 1, reason="quality: no"), row("accepted", 1, good=2, sources={"kafka": 2}),
        row("refused", 2, reason="quality: again"),
    ]  # fmt: skip
    decisions = protocol_decisions.history_rows("games.events", rows, {})
    assert [(d.hour, d.decision, d.revision, d.reason) for d in decisions] == [
        (r.hour, r.decision, r.revision, r.reason) for r in [rows[i] for i in (0, 2, 1, 3, 4, 5)]
    ]
    assert decisions[4].sources == {"kafka": 2}
    # A refused restatement replaced nothing: the revision before it is the newest.
    assert decisions[4].readable == "it is the newest revision"
    # Changes in words.
    before = row("accepted", 1, good=40, gaps={"control": 1})
    after = row("accepted", 2, good=41, gaps={}, dead=0)
    changed = protocol_decisions.changed_values(before, after)
    expected = 'good 40 to 41 (+1), gaps {"control": 1} to {}'
    assert protocol_decisions.changed_words(changed) == expected
    assert protocol_decisions.changed_words({}) == "no count changed"


def test_the_text_shows_the_command(one: StreamLake, capsys: pytest.CaptureFixture[str]) -> None:
    rebuild(one, 1, [event(0, 4, n=1)])
    rebuild(one, 2, [event(0, 4, n=2)])
    print_text(history_text("events", NEXT, recorded(one, NEXT)))
    output = capsys.readouterr().out
    assert f"hour {NEXT}, revision 1: can be read: by its tag until " in output
    assert f"--as-of {NEXT}-r1\n" in output
    assert "no count changed" in output
    print_text(history_text("events", HOUR, recorded(one, HOUR)))
    assert f"no decision about hour {HOUR} yet" in capsys.readouterr().out
    # An empty hour has no rows at its tag.
    record(one, decide(HOUR, "accepted", 1, Cut("t", {}), NOW, served="batch", good=0))
    (decision,) = recorded(one, HOUR)
    assert decision.readable == "it is the newest revision"


def test_only_columns_of_a_table_can_be_queried(one: StreamLake) -> None:
    read(one, [event(0, 4, n=1)], {0: 5})
    earlier = one.state().heads["main"]
    read(one, [event(0, 5, n=2)], {0: 6})
    assert n_of(one, str(earlier)) == [1]
    assert n_of(one, "speed") == [1, 2]
    assert n_of(one, "batch") == []
    for at in ("2026-11-21T00-r1", "12", "staging "):
        found = r"expected a tag, a branch, a snapshot's id or a time.*known: batch, main"
        with pytest.raises(ConfigurationError, match=found):
            find_snapshot(one.table(), at)
    # A table that lacks the tag is not silently read as it is now.
    tables = {name: one.lake.load(name) for name in (one.name, one.stream.hours_table)}
    with pytest.raises(ConfigurationError, match=r"table games\.events_hours: expected a tag"):
        sql = f"SELECT * FROM {one.name} JOIN {one.stream.hours_table} ON true"
        run_query(sql, tables, as_of=str(earlier))
