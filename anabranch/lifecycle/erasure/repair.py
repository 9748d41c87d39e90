"""Files with erased records that only former snapshots have, and the repair of erasures whose rows
the ledger lost: another program dropped it, or set it back."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from anabranch.common.remote_errors import lake_errors
from anabranch.iceberg.hour_files import files_by_branch, paths_by_hour
from anabranch.iceberg.manifests import hour_of_file, list_manifests, read_entries
from anabranch.iceberg.snapshots import heads
from anabranch.job import Job
from anabranch.lifecycle.erasure.letters import letters_of, record_places
from anabranch.lifecycle.erasure.payloads import Payloads
from anabranch.lifecycle.erasure.search import Values, find_letters, find_places
from anabranch.offsets.hours import hour_of
from anabranch.protocol import erasure, ledger
from anabranch.protocol.acts import Act, act_now
from anabranch.protocol.erased import Erasure
from anabranch.protocol.erasure import by_path
from anabranch.protocol.erasure_filter import Key, keys_of, source_of
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.publish import Decision, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import State, load_state

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table


def find_former(
    job: Job, state: State, one: Erasure, values: Values, known: Collection[str]
) -> dict[str, set[str]]:
    """Return the paths of files with erased records that only former snapshots and tags reference,
    since their hour has expired or was rebuilt without the records: files of rows, dead letters and
    archived records by hour, except for hours in `known`. Raises Transient."""
    lake, stream = job.lake, job.stream
    rows, payloads = list_former(state.table, known), Payloads(job.environment, stream)
    with_values: Collection[str] = find_places(state, one, values, rows)
    found = paths_by_hour(state.table, [f for f in rows if f.file_path in with_values])
    for table in (
        lake.load(name)
        for name in (stream.dead_letters_table, stream.archive_table)
        if lake.exists(name)
    ):
        records = list_former(table, known)
        with_values = find_letters(payloads, table, one, values, records)
        for hour, paths in paths_by_hour(
            table, [f for f in records if f.file_path in with_values]
        ).items():
            found.setdefault(hour, set()).update(paths)
    return found


def list_former(table: Table, known: Collection[str]) -> list[DataFile]:
    """Return the files that snapshots have and no branch has, except for hours in `known`. Raises
    Transient."""
    with lake_errors(f"read the manifests of {'.'.join(table.name())}"):
        current = {
            m.manifest.manifest_path
            for id in heads(table).values()
            if (head := table.snapshot_by_id(id)) is not None
            for m in list_manifests(table, head)[0]
        }
        listed = (m for snapshot in table.snapshots() for m in list_manifests(table, snapshot)[0])
        others = {m.manifest.manifest_path: m.manifest for m in listed if m.hour not in known}
        entries = read_entries(
            table.io, [manifest for path, manifest in others.items() if path not in current]
        )
        files = {e.data_file.file_path: e.data_file for of_manifest in entries for e in of_manifest}
    files = {path: f for path, f in files.items() if hour_of_file(table, f) not in known}
    hours = {hour_of_file(table, f) for f in files.values()}
    live = by_path(files_by_branch(table, hours)) if hours else {}
    return [f for path, f in sorted(files.items()) if path not in live]


LOG = logging.getLogger(__name__)


def request_row(
    job: Job, one: Erasure, key: Key, hashes: Sequence[str], why: str, act: Act
) -> LedgerRow:
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
