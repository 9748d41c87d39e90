"""Print decisions on hours, and operators' acts."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.common.output import print_json, print_table
from anabranch.operations.reports.acts import ActRecord, hours_words, outcome_words
from anabranch.protocol.counts import COUNTS
from anabranch.protocol.decisions import DecisionFacts, changed_words


def print_history(
    stream: str, hour: str | None, decisions: Sequence[DecisionFacts], output: str
) -> None:
    if output == "json":
        print_json(decisions)
        return
    if not decisions:
        print(f"{stream}: the ledger has no decision{f' about hour {hour}' if hour else ''} yet")
        return
    columns = ("hour", "at", "decision", "revision", "served", *COUNTS, "changed", "reason")
    print_table(columns, [_cells(decision) for decision in decisions])
    for decision in decisions:
        if decision.readable is None or (decision.tag is None and decision.query is not None):
            continue
        print(
            f"hour {decision.hour}, revision {decision.revision}: can be read: {decision.readable}"
        )
        if decision.query is not None:
            print(f"  {decision.query}")


def _cells(decision: DecisionFacts) -> list[object]:
    is_restated = decision.decision == "accepted" and decision.revision > 1
    changed = changed_words(decision.changed) if is_restated else ""
    return [
        decision.hour,
        f"{decision.at:%F %T}",
        decision.decision,
        decision.revision or "",
        decision.served,
        *decision.counts.cells,
        changed,
        decision.reason,
    ]


def print_acts(stream: str, acts: Sequence[ActRecord], output: str) -> None:
    if output == "json":
        print_json(acts)
        return
    if not acts:
        print(f"{stream}: the ledger has no operator's act yet")
        return
    columns = ("at", "act", "user", "host", "hours", "led to", "why")
    print_table(columns, [_act_cells(act) for act in acts])


def _act_cells(act: ActRecord) -> list[object]:
    return [
        f"{act.at:%F %T}",
        act.act,
        act.user,
        act.host,
        hours_words(act),
        outcome_words(act),
        act.why,
    ]
