"""Row-level reports of an hour: differences between the layers, and records removed as
duplicates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from anabranch.common.errors import Refused
from anabranch.job import Job
from anabranch.offsets.hours import Cut
from anabranch.protocol import ledger, merge
from anabranch.protocol.ledger_row import Diff, HourAccount, LedgerRow
from anabranch.protocol.state import State, load_state
from serving_layer.layer_diff import Repeated, Sample, open_comparison, unexplained_counts


@dataclass(frozen=True)
class HourDifference:
    """The comparison of speed with batch for an hour, now and at its acceptance. `uncovered`: why
    the speed layer does not cover the whole hour now; None if it does."""

    stream: str
    hour: str
    speed_rows: int
    batch_rows: int
    diff: Diff
    unexplained: Mapping[str, int]
    uncovered: str | None
    when_accepted: Diff | None
    samples: Sequence[Sample]


@dataclass(frozen=True)
class HourDuplicates:
    """The records of an hour that the batch layer removed as duplicates. `counted`: their number in
    the ledger; `found`: their number now; `listed`: the length of `duplicates`. `untold`: why
    `counted` and `found` differ; None if they are equal."""

    stream: str
    hour: str
    counted: int | None
    found: int
    listed: int
    untold: str | None
    duplicates: Sequence[Repeated]


def difference(job: Job, hour: str, each: int) -> HourDifference:
    """Compare speed with batch for an accepted hour: counts, and the first `each` rows of every
    kind of difference. Raises Refused for an hour that is not accepted, Transient when the lake is
    unreachable."""
    state = load_state(job.lake, job.stream.table)
    row = _accepted_row(job, state, hour)
    cut = state.cuts.get(hour) or (row.cut if row is not None else None) or Cut("", {})
    unread = merge.unread_ranges(state, hour, cut)
    with open_comparison(
        state.table, hour, job.stream.key, job.stream.lookback_hours
    ) as comparison:
        counted, samples = comparison.compare(unread, each)
    now, account = replace(counted.diff, sample=None), row or HourAccount()
    return HourDifference(
        stream=job.stream.name,
        hour=hour,
        speed_rows=counted.speed_rows,
        batch_rows=counted.speed_rows - now.extra - now.duplicate + now.missing,
        diff=now,
        unexplained=unexplained_counts(now, account.gaps),
        uncovered=merge.uncovered_reason(state, "speed", hour),
        when_accepted=replace(account.diff, sample=None) if account.diff is not None else None,
        samples=tuple(samples),
    )


def duplicates(job: Job, hour: str, limit: int) -> HourDuplicates:
    """Return the first `limit` records of an accepted hour that the batch layer removed, each with
    the row that it repeats. Raises Refused for an hour that is not accepted, Transient when the
    lake is unreachable."""
    state = load_state(job.lake, job.stream.table)
    row = _accepted_row(job, state, hour)
    with open_comparison(
        state.table, hour, job.stream.key, job.stream.lookback_hours
    ) as comparison:
        number, listed = comparison.repeated(limit)
    counted = row.duplicate if row is not None else None
    return HourDuplicates(
        stream=job.stream.name,
        hour=hour,
        counted=counted,
        found=number,
        listed=len(listed),
        untold=not_found_reason(state, hour, counted, number),
        duplicates=listed,
    )


def not_found_reason(state: State, hour: str, counted: int | None, number: int) -> str | None:
    """Return why the ledger's count of duplicates and the number found differ; None if they are
    equal. Pure."""
    if counted is None:
        return "the ledger has no count: its row was restored from the branches"
    if counted == number:
        return None
    if number > counted:
        return (
            f"{number - counted} more than the ledger counts: rows missing from batch that are "
            "not duplicates"
        )
    left = f"{counted - number} cannot be found"
    if (uncovered := speed_rows_reason(state, hour)) is not None:
        return f"{left}: they are found in the speed layer's rows, and {uncovered}"
    return f"{left}: the rows that they repeat are no longer in the hour or its look-back"


def speed_rows_reason(state: State, hour: str) -> str | None:
    """Return why the speed layer does not cover an hour, as text; None if it does. Pure."""
    timeline = state.timeline
    if timeline.is_skipped(hour) and hour not in timeline.skipped:
        return "those of the hour were deleted (`anabranch maintain`)"
    return merge.uncovered_reason(state, "speed", hour)


def _accepted_row(job: Job, state: State, hour: str) -> LedgerRow | None:
    """Return the ledger's newest row of an accepted hour, if any. Raises Refused for an hour that
    is not accepted."""
    rows = ledger.newest(job.ledger.history([hour]))
    if not state.is_accepted(hour):
        raise Refused(
            f"hour {hour}: expected it to be accepted, found no rows of the batch layer; "
            f"`anabranch explain {job.stream.name} {hour}` explains it"
        )
    return rows.get(hour)
