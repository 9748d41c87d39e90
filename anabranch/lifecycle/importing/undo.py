"""`anabranch import --undo`: take imported hours back, the oldest first, while nothing rests on
them (`anabranch.protocol.imported`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from anabranch.common.errors import Refused
from anabranch.common.fail_points import Step, reach
from anabranch.iceberg.ledger_files import Span
from anabranch.iceberg.manifests import content_by_hour
from anabranch.job import Job
from anabranch.offsets.hours import shift
from anabranch.protocol import deliveries, ledger
from anabranch.protocol.imported import UNUSED_COLUMNS, imported_hours, plan_undo, undo_refusal
from anabranch.protocol.ledger_row import LedgerRow, act_now
from anabranch.protocol.publish import Decision, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import State, load_state

LOG = logging.getLogger(__name__)

# The most hours of one commit, whose ledger rows wait in properties of two branches.
_HOURS_A_COMMIT = 1_000


@dataclass(frozen=True)
class Undone:
    """The imported hours that were taken back, oldest first, and the number of their rows."""

    hours: tuple[str, ...] = ()
    rows: int = 0


def plan(job: Job) -> Undone:
    """Return what `undo` would take back now. Raises the errors of `undo`."""
    state = load_state(job.lake, job.stream.table)
    hours = imported_hours(state)
    if hours:
        _newest(job, state, hours)
    return Undone(tuple(hours), _count(state, hours))


def undo(job: Job, publisher: Publisher, why: str | None) -> Undone:
    """Take all imported hours back; the table is then as before the import, which can be repeated.

    Idempotent: the next run continues a killed one. Raises Refused, with what rests on the hours:
    a delivery, a later hour without duplicates of their rows, a hold, or expiry. Raises Transient.
    """
    act, done = act_now("undo", why), Undone()

    def decide(state: State) -> Decision[Undone]:
        hours = imported_hours(state)
        if not hours:
            return Decision(state, None, Undone())
        rows, some = _newest(job, state, hours), hours[:_HOURS_A_COMMIT]
        publish = plan_undo(state, some, rows, new_id(), job.lake.clock.now(), act)
        reach(Step.UNDO_DECIDED)
        return Decision(state, publish, Undone(tuple(some), _count(state, some)))

    publisher.recover()
    while True:
        published = publisher.run_merged(decide, f"undo the import of {job.stream.name}")
        if published.landed is None:
            return done
        reach(Step.UNDO_PUBLISHED)
        publisher.record_decisions(published.state)
        some = published.result
        done = Undone((*done.hours, *some.hours), done.rows + some.rows)
        LOG.info(
            "stream %s: took imported hours back count=%d first=%s last=%s rows=%d",
            job.stream.name,
            len(some.hours),
            some.hours[0],
            some.hours[-1],
            some.rows,
        )


def _newest(job: Job, state: State, hours: list[str]) -> dict[str, LedgerRow]:
    """Return the newest decision about each of the imported `hours`. Raises Refused if anything
    rests on them, Transient."""
    lookback = job.stream.lookback_hours
    span = Span(shift(hours[0], -1), shift(hours[-1], lookback))
    rows = ledger.recorded_and_waiting(job.ledger.history(span, UNUSED_COLUMNS), state)
    newest = ledger.newest(rows)
    before = newest.get(shift(hours[0], -1))
    # An undo that has begun is finished: the change of an hour corrects a delivery since then.
    is_begun = before is not None and before.decision == "undone"
    delivered = {} if is_begun else deliveries.targets_of(job.lake, job.stream.egress_table, span)
    if (found := undo_refusal(state, rows, delivered, lookback)) is not None:
        raise Refused(
            f"undo the import of {job.stream.name}: expected imported hours on which nothing "
            f"rests, found that {found}; they stay: to correct them, import into a new stream"
        )
    return newest


def _count(state: State, hours: list[str]) -> int:
    content = content_by_hour(state.table, "main", hours)
    return sum(content[hour].rows for hour in hours if hour in content)
