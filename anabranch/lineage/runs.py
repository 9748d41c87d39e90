"""A decision of the ledger as a run: its id, its times, its account. Pure. The id of an accepted
revision is derived from the table, the hour and the revision, so a run that is sent again keeps its
id. Each refusal is a separate run, because the same revision may be accepted later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from openlineage.client.facet_v2 import data_quality_assertions_dataset as quality_facet
from openlineage.client.uuid import generate_static_uuid

from anabranch.lineage.parents import ParentRun, parse_run
from anabranch.offsets.hours import start_of
from anabranch.offsets.position import ranges_to_keys
from anabranch.protocol.counts import Counts, accounted
from anabranch.protocol.ledger_row import LedgerRow, QualityResult


@dataclass(frozen=True)
class HourRun:
    """A run of an hour and its ledger row. `error` is why the hour was not accepted."""

    id: str
    hour: str
    began: datetime
    ended: datetime
    error: str | None
    row: LedgerRow
    parent: ParentRun | None
    root: ParentRun | None


def run_of(table_uuid: str, row: LedgerRow) -> HourRun:
    name = f"{table_uuid}.{row.hour}.{row.revision}"
    refused = row.decision == "refused"
    run = row.run
    began = run.began if run is not None else row.recorded_at
    return HourRun(
        id=_run_id(row.hour, f"{name}.{row.decision_id}" if refused else name),
        hour=row.hour,
        began=min(began, row.recorded_at),
        ended=row.recorded_at,
        error=(row.reason or "refused") if refused else None,
        row=row,
        parent=_parsed_run(run.parent if run is not None else None),
        root=_parsed_run(run.root if run is not None else None),
    )


def _run_id(hour: str, name: str) -> str:
    return str(generate_static_uuid(start_of(hour), name.encode()))


def _parsed_run(text: str | None) -> ParentRun | None:
    return parse_run(text) if text is not None else None


def hour_facts(run: HourRun) -> dict[str, Any]:
    """Return our own facet, described in `AnabranchHourRunFacet.json`."""
    row = run.row
    cut, diff = row.cut, row.diff
    facts = {
        "hour": row.hour,
        "decision": row.decision,
        "revision": row.revision,
        "served": row.served,
        "reason": row.reason,
        "topicId": cut.topic_id if cut is not None else None,
        "offsetRanges": ranges_to_keys(cut.ranges) if cut is not None else None,
        "balance": _balance(row),
        "sources": dict(row.sources) if row.sources is not None else None,
        "speedRows": row.speed_rows,
        "difference": diff.as_dict() | {"sample": None} if diff is not None else None,
    }
    return _without_nulls(facts)


def _balance(row: LedgerRow) -> dict[str, Any] | None:
    counts = Counts.of(row)
    # A restored ledger may lack some of them; the facet requires all.
    if None in counts.cells:
        return None
    return counts.as_dict() | {"gaps": dict(row.gaps or {})}


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: _without_nulls(v) if isinstance(v, dict) else list(v) if isinstance(v, tuple) else v
        for k, v in value.items()
        if v is not None
    }


_SEVERITIES = {"critical": "error", "warning": "warn"}


def assertions_of(row: LedgerRow) -> list[quality_facet.Assertion]:
    """Return the checks of an hour: the balance, then the expectations of the quality gate."""
    found = []
    if row.offsets is not None and (total := accounted(row)) is not None:
        is_closed = total == row.offsets
        found.append(
            _assertion("balance", is_closed, "error", expected=str(row.offsets), actual=str(total))
        )
    quality = row.quality or QualityResult(True)
    found += [_entry_assertion(entry, True) for entry in quality.met]
    found += [_entry_assertion(entry, False) for entry in (*quality.failed, *quality.warnings)]
    return found


def _assertion(
    type: str, success: bool, severity: str, **other: str | None
) -> quality_facet.Assertion:
    return quality_facet.Assertion(
        assertion=type, success=success, severity=severity, name=type, params=None, **other
    )


def _entry_assertion(entry: Mapping[str, Any], met: bool) -> quality_facet.Assertion:
    kwargs = dict(entry.get("kwargs") or {})
    column = kwargs.pop("column", None)
    severity = str(entry.get("severity", "critical"))
    return _assertion(
        str(entry["type"]),
        met,
        _SEVERITIES.get(severity, severity),
        column=str(column) if column is not None else None,
        expected=", ".join(f"{k}: {v}" for k, v in kwargs.items()) or None,
        actual=_actual(entry),
        description=entry.get("message"),
    )


def _actual(entry: Mapping[str, Any]) -> str | None:
    count, elements = entry.get("unexpected_count"), entry.get("element_count")
    if count is not None:
        if elements is not None:
            return f"{count} of {elements} rows otherwise"
        return f"{count} rows do not meet it"
    observed = entry.get("observed")
    return str(observed) if observed is not None else None
