"""The catalog and its tables: loading tables, and landing the commits that the protocol decided.
`anabranch.iceberg.admin` creates and changes tables.

A commit (`anabranch.iceberg.commits`) lands completely, is refused completely, or its answer is
lost. `Lake.commit` returns the outcome and never repeats a decision.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from threading import Lock
from typing import Literal, TypeVar

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchNamespaceError,
    NoSuchTableError,
    ValidationException,
)
from pyiceberg.manifest import DataFile
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.update import (
    AssertCurrentSchemaId,
    AssertRefSnapshotId,
    AssertTableUUID,
    TableRequirement,
    TableUpdate,
)
from pyiceberg.typedef import Identifier

from anabranch.common.counters import COMMITS, TALLY
from anabranch.common.errors import MetadataGone, TableMissing, Terminal, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.common.logs import note
from anabranch.common.remote_errors import explain, explained_errors, lake_errors, one_line
from anabranch.common.retry import attempts, doubling, jitter
from anabranch.config import Environment
from anabranch.iceberg import ledger_files, pyiceberg_fixes
from anabranch.iceberg.catalog_settings import (
    PATIENCE_SECONDS,
    catalog_properties,
    keep_state_out_of_glue,
)
from anabranch.iceberg.clock import Clock, is_within, store_clock
from anabranch.iceberg.commits import Commit, Outcome
from anabranch.iceberg.file_io import with_renewed_keys
from anabranch.iceberg.foreign import check_foreign_commits, require_writable
from anabranch.iceberg.prepare import (
    CommitFate,
    classify_commit,
    plan_fence,
    prepare,
    prepare_stage,
)
from anabranch.iceberg.s3 import shared_files
from anabranch.iceberg.snapshot_writer import delete_quietly
from anabranch.iceberg.snapshots import Staged, find_staged, has_landed

LOG = logging.getLogger(__name__)

T = TypeVar("T")


# A REST catalog's message for a missing metadata file; its status is that of a missing table.
_NO_FILE = "Location does not exist"
# PyIceberg's error for a metadata file that is cut off, empty, or of another kind.
_NO_METADATA = "for TableMetadataWrapper"

# The message of SQLite and PostgreSQL for a CREATE TABLE after another client's. An SQL catalog has
# two tables.
_MADE_MEANWHILE = "already exists"
_CATALOG_TABLES = 2

# PyIceberg's messages in a plain ValueError after another process changed the table first.
_OVERTAKEN = (
    "Cannot add snapshot with sequence number",
    "Snapshot with snapshot id",
    "to unknown snapshot",
)

# A commit is sent within this time of its decision, or decided again. So its files are too young
# for orphan removal; other programs' orphan removal moves no head that would refuse the commit.
PREPARED_WITHIN = timedelta(minutes=20)

# The limits for retries of a refused request, and for reads after a lost answer.
_LANDS_WITHIN_SECONDS = 15.0
_RETRIES_WITHIN_SECONDS = 30.0

pyiceberg_fixes.share_parts()
pyiceberg_fixes.share_metadata()
pyiceberg_fixes.read_summaries_directly()
pyiceberg_fixes.share_readers()
pyiceberg_fixes.share_writers()
pyiceberg_fixes.write_one_block()
pyiceberg_fixes.bound_texts()
pyiceberg_fixes.name_damaged_files()


def _load_catalog(name: str, properties: Mapping[str, str]) -> Catalog:
    """Open PyIceberg's catalog; retry while another client creates a new one's tables."""
    for _ in range(_CATALOG_TABLES):
        try:
            return load_catalog(name, **properties)
        except Exception as error:
            if _MADE_MEANWHILE not in str(error):
                raise
    return load_catalog(name, **properties)


class _Forgotten(Transient):
    """The table no longer shows the outcome of a commit."""


class Overtaken(Transient):
    """Other commits came first in each attempt."""


@dataclass(frozen=True)
class Refused:
    """The catalog refused a request: it has changed nothing and never will."""

    error: Exception


@dataclass(frozen=True)
class Unknown:
    """A request may have landed, or may land at any later time. `refused`: the catalog refused it,
    or a repetition of it by an HTTP client."""

    error: Exception
    refused: bool = False


def until_landed(what: str, attempt: Callable[[], T | Literal[Outcome.REFUSED]]) -> T:
    """Return the result of the first attempt that is not refused; each loads the table and decides
    again. Raises Overtaken, naming `what`, if others come first for a quarter of a minute."""
    for _ in attempts(jitter(0.1), _LANDS_WITHIN_SECONDS):
        if (result := attempt()) is not Outcome.REFUSED:
            return result
    raise Overtaken(
        f"{what}: expected a commit to land within {_LANDS_WITHIN_SECONDS:.0f} s, found that other "
        "commits were first each time; try again"
    )


def _skip(_: Step) -> None:
    """Do nothing, in place of a fail point."""


class Lake:
    """The catalog and its tables. Reads are always fresh: only the connection and the parsed
    contents of metadata files are cached between calls.

    `require` is called with the name and table of each load, and raises for a table that must not
    be used. `shared`: another lake of the same environment, whose connections and clock are used.
    """

    def __init__(
        self,
        environment: Environment,
        require: Callable[[str, Table], None] | None = None,
        shared: Lake | None = None,
    ) -> None:
        self.environment = environment
        self._require = require
        self._shared = shared
        self._opened: tuple[tuple[tuple[int, int], ...], Catalog] | None = None
        self._opening = Lock()

    @property
    def catalog(self) -> Catalog:
        """PyIceberg's catalog. For Glue, opened again once AWS's shared credential files have
        changed: a client keeps the keys that it read first. Raises as `load`."""
        if self._shared is not None:
            return self._shared.catalog
        keys = shared_files() if self.environment.catalog.type == "glue" else ()
        if self._opened is not None and self._opened[0] == keys:
            return self._opened[1]
        # Threads that share this lake open the catalog once. A thread that waits for a silent
        # server does not block the others for longer.
        is_alone = self._opening.acquire(timeout=PATIENCE_SECONDS)
        try:
            if self._opened is None or self._opened[0] != keys:
                self._opened = keys, self._open()
            return self._opened[1]
        finally:
            if is_alone:
                self._opening.release()

    def _open(self) -> Catalog:
        catalog = self.environment.catalog
        try:
            opened = _load_catalog(catalog.name, catalog_properties(self.environment))
            if catalog.type == "glue":
                keep_state_out_of_glue(opened)
            return opened
        except Exception as error:
            reason = f"{one_line(error)}; check catalog.uri: `anabranch doctor` examines it"
            raise explain(f"open catalog {catalog.name} ({catalog.type})", error, reason) from error

    @cached_property
    def clock(self) -> Clock:
        """The clock of the commits' timestamps; every commit reads it."""
        return self._shared.clock if self._shared is not None else store_clock(self.environment)

    def load(self, name: str) -> Table:
        """Return the current table. Raises Terminal if it is missing, MetadataGone if its metadata
        file is, ConfigurationError for wrong keys or rights, Transient without an answer."""
        table = self.find(name)
        if table is None:
            raise TableMissing(
                f"table {name}: expected it to exist, found none; run `anabranch apply`"
            )
        # Decision 37: in each load, so that no command can omit it. Two streams in one table would
        # move each other's position to another topic's offsets.
        if self._require is not None:
            self._require(name, table)
        return table

    def find(self, name: str) -> Table | None:
        """Return the current table, of any owner; None without it. Raises as `load`."""
        # PyIceberg raises a bare ValueError for a name without a namespace.
        if "." not in name:
            return None
        gone = None
        while True:
            try:
                return with_renewed_keys(self.catalog.load_table(name))
            except (Terminal, Transient):
                raise
            except Exception as error:
                message = one_line(error)
                is_damaged = _NO_METADATA in message
                is_gone = isinstance(error, FileNotFoundError) or _NO_FILE in message
                if not (is_gone or is_damaged):
                    if isinstance(error, NoSuchTableError):
                        return None
                    raise explain(f"load table {name}", error) from error
                # Try twice: publishes may have deleted the first metadata file since.
                if gone == message:
                    raise MetadataGone(
                        f"table {name}: expected the metadata file that the catalog names, found "
                        f"{message}; if the bucket was restored to an earlier time, stop the "
                        "stream's jobs and run `anabranch apply STREAM --register`, which takes "
                        "the newest available metadata file",
                        is_damaged,
                    ) from error
                gone = message

    @property
    def catalog_name(self) -> str:
        return self.environment.catalog.name

    def exists(self, name: str) -> bool:
        """Return whether the catalog has a table. Raises as `load`."""
        return self.find(name) is not None

    def table_names(self, namespace: str) -> set[str]:
        """Return the tables of a namespace, as `namespace.table`; empty if it does not exist.
        Raises Transient if the catalog does not answer."""
        with explained_errors(f"list the tables of {namespace}"), suppress(NoSuchNamespaceError):
            return {".".join(identifier) for identifier in self.catalog.list_tables(namespace)}
        return set()

    def every_table(self) -> Iterator[Table]:
        """Yield every table of the catalog that has its metadata file. Raises as `load`, for a
        damaged file too."""
        known, namespaces = set[Identifier](), list[Identifier](self._namespaces(()))
        while namespaces:
            if (namespace := namespaces.pop()) not in known:
                known.add(namespace)
                namespaces += self._namespaces(namespace)
                for name in sorted(self.table_names(".".join(namespace))):
                    try:
                        table = self.find(name)
                    except MetadataGone as error:
                        # A table that another program can read is in use: without its files,
                        # maintenance of another table would delete them as orphans.
                        if error.is_damaged:
                            raise
                        continue
                    if table is not None:
                        yield table

    def _namespaces(self, within: Identifier) -> list[Identifier]:
        doing = "list the namespaces of the catalog"
        with explained_errors(doing), suppress(NoSuchNamespaceError):
            return self.catalog.list_namespaces(within)
        return []

    def commit(self, table: Table, commit: Commit) -> Outcome:
        """Send `commit` as `land`; return only the outcome."""
        return Outcome.REFUSED if self.land(table, commit) is None else Outcome.LANDED

    def land(self, table: Table, commit: Commit) -> Table | None:
        """Send `commit` once. Return the table with it, or None if it was refused because a head or
        the schema moved, and cannot land any more. If the answer is lost, or may answer a retry by
        the HTTP client, the table decides. A commit without changes leaves no snapshot to recognise
        it by; after a lost answer send it again. Raises Transient if the outcome stays unknown: no
        file of the commit may be deleted then. Raises Terminal if another program changed rows of a
        branch.
        """
        require_writable(table)
        if commit.changes:
            # Decision 38: rows that another program inserted or deleted would otherwise be carried
            # into this publish as if they were accounted for.
            check_foreign_commits(table)
        # Read the clock before the manifests are written: from here on they are unreferenced, and
        # orphan removal judges them by their age.
        began = self.clock.now(table.metadata.last_updated_ms)
        prepared = prepare(table, commit, began)
        # Tags of a rebuild's reads move no branch, and the fail points are those of publishes.
        at = reach if commit.changes else _skip
        at(Step.COMMIT_PREPARED)
        note(publish=commit.id)
        if (
            # Decision 38: other programs' orphan removal moves no head, so no requirement refuses a
            # commit that names files which it deleted. Only their age excludes it.
            commit.heads
            and not is_within(
                PREPARED_WITHIN, began, now := self.clock.now(table.metadata.last_updated_ms)
            )
        ):
            LOG.warning(
                "commit %s of %s: expected to send it within %s, found %s; deciding again, since "
                "orphan removal may have deleted its files",
                commit.id,
                table.name(),
                PREPARED_WITHIN,
                now - began,
            )
            delete_quietly(table, prepared.written)
            return None
        answer = self.send(
            table,
            (
                AssertCurrentSchemaId(current_schema_id=table.metadata.current_schema_id),
                *_require_heads(commit),
            ),
            prepared.updates,
            at,
        )
        match answer:
            case Table():
                at(Step.COMMIT_LANDED)
                refs = answer.metadata.refs
                note(snapshots={c.branch: refs[c.branch].snapshot_id for c in commit.changes})
                return answer
            case Unknown(error, refused):
                (LOG.debug if refused else LOG.warning)(
                    "commit %s of %s: %s, checking the table: %s",
                    commit.id,
                    table.name(),
                    "refused" if refused else "answer lost",
                    one_line(error),
                )
                # Decision 12: without an answer the commit may still land. To count it as refused
                # would publish its rows twice, and to delete its files would leave `main` with
                # missing ones.
                if (settled := self._settle(table, commit, refused)) is not None or not refused:
                    return settled
            case Refused(error):
                LOG.debug("commit %s of %s refused: %s", commit.id, table.name(), error)
        # The catalog refused, so no snapshot will ever refer to the written files. After a lost
        # answer, maintenance deletes them.
        delete_quietly(table, prepared.written)
        return None

    def send(
        self,
        table: Table,
        requirements: Iterable[TableRequirement],
        updates: Iterable[TableUpdate],
        at: Callable[[Step], None] = _skip,
    ) -> Table | Refused | Unknown:
        """Send one request that changes a table, if it is still the loaded one and meets the
        requirements. Return the table after it, or why there is none. `at` reaches fail points.

        Decision 1: one request, without a retry. A repetition over new heads would publish the rows
        of an outdated decision.
        """
        required = (AssertTableUUID(uuid=table.metadata.table_uuid), *requirements)
        try:
            at(Step.COMMIT_REQUEST_LOST)
            landed = self.catalog.commit_table(table, required, tuple(updates))
            at(Step.COMMIT_ANSWER_LOST)
        except (CommitFailedException, ValidationException) as error:
            # An HTTP client may retry a request, and this may be the refusal of the retry.
            is_certain = self.environment.catalog.type == "sql"
            return Refused(error) if is_certain else Unknown(error, refused=True)
        except Exception as error:
            # A subclass of ValueError is an unreadable answer: the request may have landed.
            if type(error) is not ValueError:
                return Unknown(error)
            # Since the decision, another commit took the sequence number, or expired a snapshot
            # that this commit expires or has staged: found before the request was sent.
            if not any(text in str(error) for text in _OVERTAKEN):
                raise
            return Refused(error)
        TALLY.count(COMMITS)
        delete_old_metadata(table, landed)
        after = landed.metadata, landed.metadata_location
        return Table(table.name(), *after, table.io, table.catalog)

    def request(
        self,
        table: Table,
        requirements: Iterable[TableRequirement],
        updates: Iterable[TableUpdate],
        doing: str,
    ) -> Outcome:
        """Send a request whose repetition has the same effect. Raises Transient for a lost
        answer."""
        answer = self.send(table, requirements, updates)
        if isinstance(answer, Table):
            return Outcome.LANDED
        if isinstance(answer, Unknown) and not answer.refused:
            raise explain(doing, answer.error) from answer.error
        LOG.debug("%s: refused: %s", doing, answer.error)
        return Outcome.REFUSED

    def stage(
        self, name: str, wap_id: str, files: Sequence[DataFile], *, protected: bool = False
    ) -> Staged:
        """Add files in one snapshot that no branch points to, under a new `wap_id`; no reader sees
        their rows. `protected`: the same commit makes a branch of it, so that other programs do not
        expire it.

        It requires no head, so a refused attempt is repeated on a fresh load of the table. If the
        answer is lost, the table decides. Raises Transient if the table does not have the snapshot;
        orphan removal deletes the files then.
        """

        def attempt() -> Staged | Literal[Outcome.REFUSED] | None:
            table = self.load(name)
            require_writable(table)
            prepared = prepare_stage(
                table, wap_id, files, self.clock.now(table.metadata.last_updated_ms), protected
            )
            schema = AssertCurrentSchemaId(current_schema_id=table.metadata.current_schema_id)
            answer = self.send(table, (schema,), prepared.updates)
            if isinstance(answer, Table):
                return find_staged(answer, wap_id)
            LOG.info("stage %s in %s: not landed: %s", wap_id, name, one_line(answer.error))
            if isinstance(answer, Unknown):
                staged = find_staged(self._reload(name), wap_id)
                # It may still land, and a reader of its snapshot needs its manifests.
                if staged is not None or not answer.refused:
                    return staged
            delete_quietly(table, prepared.written)
            return Outcome.REFUSED

        staged = until_landed(f"stage {wap_id} in {name}", attempt)
        if staged is None:
            raise Transient(
                f"stage {wap_id} in {name}: expected its snapshot, found none; try again"
            )
        return staged

    def commit_until_landed(
        self, name: str, what: str, plan: Callable[[Table], Commit | None]
    ) -> Commit | None:
        """Commit the result of `plan` for a fresh load of a table; load and plan again after each
        refusal.

        Return the commit that landed, or None once `plan` returns None. Raises Overtaken, naming
        `what`, if other commits come first for a quarter of a minute.
        """

        def attempt() -> Commit | Literal[Outcome.REFUSED] | None:
            table = self.load(name)
            commit = plan(table)
            if commit is None or self.commit(table, commit) is Outcome.LANDED:
                return commit
            return Outcome.REFUSED

        return until_landed(f"{what}: table {name}", attempt)

    def _settle(self, table: Table, commit: Commit, refused: bool) -> Table | None:
        """Settle a commit that may have landed or may still land: return the table with it, or None
        if it cannot land any more. `refused`: the catalog refused it. While it may still land, move
        a head that it requires, so that it has landed before or never will. Raises Transient if the
        outcome is unknown after half a minute, or can no longer be known.
        """
        # No snapshot shows whether it landed; the caller sends it again, with the same effect.
        if not commit.changes:
            return None
        name = ".".join(table.name())
        last_error = "nothing"
        for _ in attempts(doubling(0.05, 2.0), _RETRIES_WITHIN_SECONDS):
            try:
                fresh = self.load(name)
                fate = classify_commit(fresh, commit)
                # Decision 12: a commit that `main` contains may look refused once its snapshot is
                # gone, and its files would be deleted under it.
                if fate is CommitFate.FORGOTTEN:
                    raise _Forgotten(
                        f"commit {commit.id} of {name}: expected to learn whether it landed, "
                        "found that later publishes have removed the snapshots that show it; "
                        "nothing is deleted, restart from the table"
                    )
                # Glue compares a version that has changed since: no retry of this request can land.
                if fate is CommitFate.OPEN and refused and self.environment.catalog.type == "glue":
                    fate = CommitFate.NEVER
                # Decision 12: no time to wait is certainly enough. The empty commit moves a head
                # that the open one requires, so it cannot land after this process has decided
                # again.
                if fate is CommitFate.OPEN and self._fence(fresh, plan_fence(fresh, commit)):
                    fate = CommitFate.NEVER
                if fate is not CommitFate.OPEN:
                    landed = fate is CommitFate.LANDED
                    (LOG.debug if refused and not landed else LOG.warning)(
                        "commit %s of %s %s",
                        commit.id,
                        table.name(),
                        "had landed" if landed else "had not landed, and cannot land any more",
                    )
                    return fresh if landed else None
            except _Forgotten:
                raise
            except Transient as error:
                last_error = str(error)
        raise Transient(
            f"commit {commit.id} of {name}: expected to learn whether it landed, found "
            f"{last_error}; nothing is deleted, try again"
        )

    def _fence(self, table: Table, fence: Commit) -> bool:
        """Send an empty commit that prevents another from landing; return whether it landed. Raises
        Transient if that is unknown."""
        updates = prepare(table, fence, self.clock.now(table.metadata.last_updated_ms)).updates
        reach(Step.COMMIT_DOUBTED)
        doing = f"move a head of {'.'.join(table.name())}"
        if self.request(table, _require_heads(fence), updates, doing) is Outcome.REFUSED:
            return False
        reach(Step.COMMIT_FENCED)
        return True

    def append(self, name: str, rows: Callable[[Table], pa.Table | None]) -> Table:
        """Append to a plain table (the ledger); return it with the new rows. `rows` gets the table
        that the commit requires; the commit takes its next sequence number. `rows` returns None for
        nothing to append, and is called again if another process was first. Raises Overtaken as
        `commit_until_landed`.
        """

        def attempt() -> Table | Literal[Outcome.REFUSED]:
            table = self.load(name)
            # Again for each attempt: another process may have written the same rows meanwhile, and
            # they would be in the ledger twice.
            new_rows = rows(table)
            if new_rows is None:
                return table
            self.clock.now(table.metadata.last_updated_ms)
            commit_id = uuid.uuid4().hex
            with lake_errors(f"write rows of {name}"):
                updates = ledger_files.append(table, new_rows, commit_id)
            reach(Step.LEDGER_PREPARED)
            answer = self.send(table, _require_main(table), updates)
            if isinstance(answer, Table):
                reach(Step.LEDGER_APPENDED)
                return answer
            LOG.info("append to %s: not landed: %s", name, one_line(answer.error))
            # If it still lands, the next attempt is refused or finds its rows: both require the
            # same head.
            if isinstance(answer, Unknown) and has_landed(fresh := self._reload(name), commit_id):
                return fresh
            return Outcome.REFUSED

        return until_landed(f"append to {name}", attempt)

    def merge_files(self, name: str, idle: bool = False) -> Outcome | None:
        """Merge some files of a plain table (the ledger), in one bounded step that changes no row;
        None if there are none to merge. REFUSED: it may have landed or not; the next step checks
        again. Raises Transient if the lake does not answer.
        """
        return self._step(
            name,
            "merge files",
            lambda table: ledger_files.merge(table, uuid.uuid4().hex, idle),
            (Step.LEDGER_MERGE_PREPARED, Step.LEDGER_MERGED),
        )

    def expire_files(self, name: str, hour: str) -> Outcome | None:
        """Remove the files of a plain table (the ledger) with only rows of hours before `hour`;
        otherwise as `merge_files`.
        """
        return self._step(
            name,
            "expire files",
            lambda table: ledger_files.expire(table, hour, uuid.uuid4().hex),
            (Step.EXPIRE_LEDGER_DECIDED, Step.EXPIRE_LEDGER_LANDED),
        )

    def _step(
        self,
        name: str,
        what: str,
        plan: Callable[[Table], tuple[TableUpdate, ...]],
        steps: tuple[Step, Step],
    ) -> Outcome | None:
        table = self.load(name)
        self.clock.now(table.metadata.last_updated_ms)
        with lake_errors(f"{what} of {name}"):
            updates = plan(table)
        if not updates:
            return None
        reach(steps[0])
        answer = self.send(table, _require_main(table), updates)
        if isinstance(answer, Table):
            reach(steps[1])
            return Outcome.LANDED
        LOG.debug("ledger %s: %s postponed: %s", name, what, one_line(answer.error))
        return Outcome.REFUSED

    def touch(self, name: str) -> None:
        """Move the head of a plain table (the ledger) without changing rows. Raises Transient."""

        def attempt() -> Literal[Outcome.LANDED, Outcome.REFUSED]:
            table = self.load(name)
            self.clock.now(table.metadata.last_updated_ms)
            with lake_errors(f"move the head of {name}"):
                updates = ledger_files.touch(table, uuid.uuid4().hex)
            answer = self.send(table, _require_main(table), updates)
            return Outcome.LANDED if isinstance(answer, Table) else Outcome.REFUSED

        until_landed(f"move the head of {name}", attempt)

    def discard(self, name: str, staged: Staged) -> None:
        """Expire a staged snapshot that its publisher does not use; its files become orphans."""
        table = self.load(name)
        if table.metadata.snapshot_by_id(staged.snapshot_id) is not None:
            self.commit(table, Commit(uuid.uuid4().hex, {}, (), expire=(staged.snapshot_id,)))

    def _reload(self, name: str) -> Table:
        """Load a table; retry for half a minute. Raises Transient."""
        last: Transient | None = None
        for _ in attempts(doubling(0.1, 2.0), _RETRIES_WITHIN_SECONDS):
            try:
                return self.load(name)
            except Transient as error:
                last = error
        assert last is not None
        raise last


def _require_heads(commit: Commit) -> tuple[TableRequirement, ...]:
    """Return the requirements of a commit's heads. PyIceberg's transaction has one requirement of
    each type, so it would check one branch."""
    return tuple(AssertRefSnapshotId(ref=ref, snapshot_id=id) for ref, id in commit.heads.items())


def _require_main(table: Table) -> tuple[TableRequirement, ...]:
    """Return the requirement that a plain table is unchanged."""
    current = table.current_snapshot()
    return (AssertRefSnapshotId(ref="main", snapshot_id=current.snapshot_id if current else None),)


def delete_old_metadata(before: Table, landed: CommitTableResponse) -> None:
    """Delete the metadata files that a commit dropped from the log
    (`write.metadata.delete-after-commit.enabled`), since the catalog does not. After a failure they
    are orphans."""
    kept = {entry.metadata_file for entry in landed.metadata.metadata_log}
    delete_quietly(
        before,
        [e.metadata_file for e in before.metadata.metadata_log if e.metadata_file not in kept],
    )
