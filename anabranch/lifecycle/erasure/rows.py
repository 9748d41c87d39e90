"""Erase rows: replace their files on every branch, some hours at a time. The other steps of an
erasure share the size of a commit, and the ledger rows of hours."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table

from anabranch.common.errors import Transient
from anabranch.common.fail_points import Step, reach
from anabranch.iceberg.manifests import files_by_branch, hours_on_branches, paths_by_hour
from anabranch.iceberg.rewriting import rewrite_kept
from anabranch.iceberg.snapshot_writer import delete_quietly
from anabranch.job import Job
from anabranch.lifecycle.erasure.end import replaced_files
from anabranch.lifecycle.erasure.search import (
    Covered,
    Place,
    Values,
    column_of,
    covered_of,
    erased_mask,
    find_rows,
)
from anabranch.protocol import erasure, ledger
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.publish import Decision, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.registers import Erasure
from anabranch.protocol.state import State, load_state

LOG = logging.getLogger(__name__)

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
    """Record files with erased records that no branch of the rows has in the ledger, by hour."""

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


_HOURS_AT_ONCE = 240


@dataclass(frozen=True)
class Found:
    """Numbers of files, rows and dead letters with the values on any branch, and their hours.
    `held`: the hours among them that an operator holds."""

    hours: tuple[str, ...] = ()
    files: int = 0
    rows: int = 0
    dead: int = 0
    held: tuple[str, ...] = ()

    def plus(self, other: Found) -> Found:
        """Return the sum with `other`, which has no file and no dead letter in common."""
        hours = tuple(sorted({*self.hours, *other.hours}))
        return Found(
            hours, self.files + other.files, self.rows + other.rows, self.dead + other.dead
        )


def hours_in_parts(table: Table) -> Iterator[list[str]]:
    """Yield lists of the hours with files on any branch, oldest first."""
    hours = sorted(hours_on_branches(table))
    for begin in range(0, len(hours), _HOURS_AT_ONCE):
        yield hours[begin : begin + _HOURS_AT_ONCE]


def erase_rows(job: Job, publisher: Publisher, one: Erasure, values: Values) -> Found:
    removed = Found()
    for part in hours_in_parts(job.lake.load(job.stream.table)):
        for _ in range(ATTEMPTS):
            state = load_state(job.lake, job.stream.table)
            files = erasure.by_path(files_by_branch(state.table, part))
            found = sorted(find_rows(state, one, values, files.values()).items())
            if not found:
                break
            for begin in range(0, len(found), FILES_A_COMMIT):
                some = dict(found[begin : begin + FILES_A_COMMIT])
                removed = removed.plus(
                    _rewrite_rows(job, publisher, one, values, some, state, files)
                )
        else:
            raise Transient(
                f"erase records of {job.stream.name}: expected the files of hours {part[0]} to "
                f"{part[-1]} to stay in one of {ATTEMPTS} attempts, found others each time; "
                "run the command again"
            )
    return removed


def _rewrite_rows(
    job: Job,
    publisher: Publisher,
    one: Erasure,
    values: Values,
    found: Mapping[str, Mapping[int, int]],
    state: State,
    files: Mapping[str, DataFile],
) -> Found:
    """Replace the files of `found` on every branch in one commit; replace none if a file left all
    branches meanwhile. `files`: files of the table in `state` by path."""
    stream, began, schema = job.stream, job.lake.clock.now(), state.table.schema()
    paths = paths_by_hour(state.table, [files[path] for path in found])
    written: dict[str, DataFile | None] = {}

    def decide(state: State) -> Decision[Found]:
        there, current = files_by_branch(state.table, paths), state.erasures[one.id]
        # A branch that was set back has files again whose rows the accounts do not count any more.
        rows = _rows_erased(state, there, found)
        known = _replaced_before(job, state, current, paths)
        of_account = _rows_erased(
            state, there, {path: counts for path, counts in found.items() if path not in known}
        )
        decisions = decisions_of(job, state, current, of_account, {}, paths)
        now = job.lake.clock.now()
        publish = erasure.plan_rewrite(
            state, current, written, there, decisions, new_id(), began, now
        )
        reach(Step.ERASE_DECIDED)
        counted = sum(sum(counts.values()) for counts in rows.values())
        return Decision(state, publish, Found(tuple(sorted(paths)), len(written), counted))

    for path in sorted(found):
        covered = covered_of(state, one, files[path])
        written[path] = rewrite_kept(
            state.table, files[path], partial(_kept_mask, schema, values, covered)
        )
    reach(Step.ERASE_WRITTEN)
    published = publisher.run_merged(decide, f"erase records of {stream.name}")
    if published.landed is None:
        delete_quietly(state.table, [f.file_path for f in written.values() if f is not None])
        return Found()
    reach(Step.ERASE_PUBLISHED)
    publisher.record_decisions(published.state)
    done = published.result
    LOG.info(
        "stream %s: erased rows erasure=%s rows=%d files=%d hours=%d first=%s",
        stream.name,
        one.id,
        done.rows,
        done.files,
        len(done.hours),
        done.hours[0],
    )
    return done


def _kept_mask(
    schema: Schema, values: Values, covered: Covered, batch: pa.RecordBatch
) -> pa.BooleanArray:
    name = column_of(batch.schema, schema, values.column)
    if name is None:
        return pa.repeat(True, len(batch))
    return pc.invert(pc.fill_null(erased_mask(batch, name, values, covered), False))


def _replaced_before(job: Job, state: State, one: Erasure, hours: Collection[str]) -> set[str]:
    """Return the files of some hours that the erasure has already replaced and counted."""
    history = job.ledger.history(set(hours))
    rows = [row for hour in hours for row in ledger.with_waiting(state, hour, history)]
    return replaced_files(
        (row for row in rows if not (row.erasure or {}).get(erasure.UNSERVED)), one
    )


def _rows_erased(
    state: State, there: Mapping[str, erasure.Files], found: Mapping[str, Mapping[int, int]]
) -> dict[str, dict[int, int]]:
    """Return the numbers of rows that each hour's account loses, by hour and partition. Only rows
    of the layer with the hour's account count."""
    rows: dict[str, dict[int, int]] = {}
    for hour in {h for files in there.values() for h in files}:
        own = there["batch" if state.is_accepted(hour) else "speed"].get(hour, {})
        counts = Counter[int]()
        for path in own:
            counts.update(found.get(path, {}))
        rows[hour] = dict(counts)
    return rows
