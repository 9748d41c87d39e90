"""The hours that the batch job works on: waiting hours, and accepted hours to restate."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from anabranch.job import Job
from anabranch.protocol import dead_letters, ledger
from anabranch.protocol.retention import is_kept
from anabranch.protocol.state import State
from anabranch.protocol.topic_change import gone_from_kafka
from batch_layer import refusals
from batch_layer.plan import plan_recheck, waiting_hours
from batch_layer.rebuild import RebuildRequest, Result

LOG = logging.getLogger(__name__)


def waiting(job: Job, state: State) -> list[str]:
    """Return the sealed hours that are not accepted, oldest first. Leaves out refused hours that
    Kafka lost: a rebuild would refuse them again."""
    hours, topic_id, sealed = waiting_hours(state), state.position.topic_id, state.timeline.sealed
    gone = [h for h in hours if gone_from_kafka(state.timeline, topic_id, h, sealed[h])]
    rows = ledger.newest(job.ledger.history(gone, ledger.BULKY))
    refused = {h for h, row in rows.items() if row.decision == "refused"}
    return [h for h in hours if h not in refused]


def unchanged_refusals(job: Job, state: State, candidates: Sequence[str]) -> list[Result]:
    """Return the refusals among `candidates` whose inputs have not changed; these hours are not
    rebuilt."""
    if not candidates:
        return []
    now, name = job.lake.clock.now(), job.stream.name
    rows = job.ledger.history(candidates)
    results = []
    for hour in (h for h in candidates if h in state.timeline.sealed):
        refusal = refusals.last_refusal(rows, hour)
        basis = refusals.current_basis(job.stream, state, hour, state.timeline.sealed[hour])
        if refusal is None or not refusals.is_still_valid(refusal, basis, now):
            continue
        LOG.warning(
            "stream %s: still refused, inputs unchanged hour=%s reason=%s; to rebuild it now: "
            "anabranch batch %s --hour %s",
            name,
            hour,
            refusal.reason,
            name,
            hour,
        )
        results.append(Result(hour, "refused", refusal.revision, refusal.reason, refusal))
    return results


def with_lost_dead_letters(job: Job, state: State) -> dict[str, RebuildRequest]:
    """Return a request to restate each accepted hour whose dead letters were lost before they were
    published. Leaves out hours whose restatement was refused."""
    lookback = job.stream.lookback_hours
    found = dead_letters.lost_hours(job.lake, job.stream, state)
    lost = {h: revision for h, revision in found.items() if is_kept(state, h, lookback)}
    why = {
        h: f"the dead letters of revision {revision} were lost"
        for h, revision in sorted(lost.items())
    }
    return _restatements(job, state, why)


def with_lost_files(job: Job, state: State, why: Mapping[str, str]) -> dict[str, RebuildRequest]:
    """Return a request to restate each accepted hour that lost a file (`why`). Leaves out hours
    whose restatement was refused."""
    lookback = job.stream.lookback_hours
    kept = {
        h: w for h, w in sorted(why.items()) if h in state.accepted and is_kept(state, h, lookback)
    }
    return _restatements(job, state, kept)


def to_recheck(job: Job, state: State) -> dict[str, RebuildRequest]:
    """Return a request to restate each accepted hour whose look-back the speed layer has read
    completely since. Leaves out hours whose restatement was refused."""
    read = "duplicates rechecked: the speed layer has now read"
    why = {h: f"{read} {', '.join(unread)} completely" for h, unread in plan_recheck(state).items()}
    return _restatements(job, state, why)


def _restatements(job: Job, state: State, why: Mapping[str, str]) -> dict[str, RebuildRequest]:
    rows = job.ledger.history(why, ledger.BULKY) if why else []
    refused = {(row.hour, row.revision) for row in rows if row.decision == "refused"}
    accepted = {h: state.accepted[h] for h in why}
    return {
        h: RebuildRequest(True, accepted[h].by_choice, reason)
        for h, reason in why.items()
        if (h, accepted[h].revision + 1) not in refused
    }
