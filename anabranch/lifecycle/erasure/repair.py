"""Repair erasures whose rows the ledger lost: another program dropped it, or set it back."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from anabranch.job import Job
from anabranch.lifecycle.erasure.former import list_former
from anabranch.lifecycle.erasure.letters import letters_of, record_places
from anabranch.lifecycle.erasure.payloads import Payloads
from anabranch.lifecycle.erasure.search import Values, find_letters
from anabranch.offsets.hours import hour_of
from anabranch.protocol import erasure, ledger
from anabranch.protocol.acts import Act, act_now
from anabranch.protocol.erased import Erasure
from anabranch.protocol.erasure_filter import keys_of, source_of
from anabranch.protocol.keyed_hashes import Key
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.publish import Decision, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import State, load_state

LOG = logging.getLogger(__name__)


def request_row(
    job: Job, one: Erasure, key: Key, hashes: Sequence[str], why: str, act: Act
) -> LedgerRow:
    """Return the ledger's row of a request."""
    recorded = {
        "id": one.id,
        "column": one.column,
        "key": key.id,
        "until": one.until.isoformat(),
        "hashes": list(hashes),
        "source": source_of(job.environment, job.stream, one.column),
    }
    hour = hour_of(one.at)
    id = f"{one.id}-{hour}"
    return ledger.decision(
        hour, "erasing", 0, None, one.at, id, reason=why, act=act, erasure=recorded
    )


def repair(job: Job, publisher: Publisher, values: Values, why: str) -> None:
    """Record again what the ledger lost of the erasures of these values: the request, and the
    places of dead letters that former snapshots have. Such an erasure is not done any more.
    Idempotent. Raises Transient."""
    state = load_state(job.lake, job.stream.table)
    for key in keys_of(job.environment).values():
        hashes, number = key.hashes(values.column, values.texts), 0
        while (one := state.erasures.of(key.id_of(values.column, hashes, number))) is not None:
            number += 1
            if is_lacking(job, state, one):
                _record_places(job, publisher, one, values)
                _expect_recorded(job, publisher, one)
                # The last step: a run that was killed before it is repeated.
                row = request_row(job, one, key, hashes, why, act_now("erase", why))
                job.ledger.record([row])


def is_lacking(job: Job, state: State, one: Erasure) -> bool:
    """Whether the ledger lost rows about an erasure. Raises Transient."""
    requests = job.ledger.requests({hour_of(one.at)})
    if one.id not in {row.erasure["id"] for row in requests if row.erasure is not None}:
        return True
    rows = _rows(job, state)
    return erasure.lacks_rows(rows, one) or erasure.lacks_places(rows, one)


def _record_places(job: Job, publisher: Publisher, one: Erasure, values: Values) -> None:
    table = job.lake.load(job.stream.dead_letters_table)
    files = {f.file_path: f for f in list_former(table, ())}
    payloads = Payloads(job.environment, job.stream)
    found = find_letters(payloads, table, one, values, list(files.values()))
    record_places(job, publisher, one, letters_of(table, found, files))


def _expect_recorded(job: Job, publisher: Publisher, one: Erasure) -> None:
    def decide() -> Decision[bool]:
        state = load_state(job.lake, job.stream.table)
        rows = _rows(job, state)
        is_lost = erasure.lacks_places(rows, one)
        publish = erasure.plan_repair(state, state.erasures[one.id], rows, is_lost, new_id())
        return Decision(state, publish, is_lost)

    is_lost = publisher.run(decide, f"repair erasure {one.id}").result
    LOG.warning("stream %s: repaired erasure=%s lost=%s", job.stream.name, one.id, is_lost)


def _rows(job: Job, state: State) -> list[LedgerRow]:
    return [*job.ledger.history(None, ledger.BULKY_EXCEPT_ERASURE), *state.decisions]
