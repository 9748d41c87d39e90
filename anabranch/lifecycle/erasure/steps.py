"""Helpers of all steps of an erasure: the size of a commit, and the ledger rows of hours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from anabranch.job import Job
from anabranch.lifecycle.erasure.search import Place
from anabranch.protocol import erasure, ledger
from anabranch.protocol.erased import Erasure
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.publish import Decision, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import State

FILES_A_COMMIT = 32
"""The number of files that one commit replaces: few enough to be written well before the commit's
deadline."""

ATTEMPTS = 20
"""The attempts of a step when other processes change its input meanwhile."""


def decisions_of(
    job: Job,
    state: State,
    one: Erasure,
    rows: Mapping[str, Mapping[int, int]],
    dead: Mapping[str, Collection[Place]],
    paths: Mapping[str, Collection[str]],
    accepted: Mapping[str, Collection[Place]] | None = None,
) -> list[LedgerRow]:
    """Return the ledger rows of an erasure for some hours. By hour: `rows` has the erased rows by
    partition, `dead` the erased dead letters, `paths` the replaced files, and `accepted` the dead
    letters of the batch layer."""
    now, decided = job.lake.clock.now(), list[LedgerRow]()
    history = job.ledger.history({*rows, *dead})
    for hour in sorted({*rows, *dead}):
        row = ledger.newest(ledger.with_waiting(state, hour, history)).get(hour)
        before = row if row is not None and state.is_accepted(hour) else None
        places = dead.get(hour, ())
        # An accepted hour has the batch layer's account.
        of_dead = dict(Counter(p for p, o in places if (p, o) in (accepted or {}).get(hour, ())))
        counts = rows.get(hour, {})
        decided.append(
            ledger.decision(
                hour,
                "erased",
                before.revision if before is not None else 0,
                None,
                now,
                account=erasure.plan_account(before, counts, of_dead),
                erasure=erasure.erased_of_hour(one, counts, places, paths.get(hour, ())),
            )
        )
    return decided


def record_unserved(
    job: Job, publisher: Publisher, one: Erasure, paths: Mapping[str, Collection[str]]
) -> None:
    """Record files with erased records that are on no branch of the rows' table in the ledger, by
    hour."""

    def decide(state: State) -> Decision[None]:
        current = state.erasures[one.id]
        decisions = decisions_of(job, state, current, {hour: {} for hour in paths}, {}, paths)
        return Decision(
            state,
            erasure.plan_unserved(state, current, decisions, new_id(), job.lake.clock.now()),
            None,
        )

    published = publisher.run_merged(decide, f"erase records of {job.stream.name}")
    publisher.record_decisions(published.state)
