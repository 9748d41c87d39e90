"""Print operators' acts."""

from __future__ import annotations

from collections.abc import Sequence

from anabranch.common.output import print_json, print_table
from anabranch.operations.reports.acts import ActRecord, hours_words, outcome_words


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
    return [f"{act.at:%F %T}", act.act, act.user, act.host, hours_words(act), outcome_words(act), act.why]
