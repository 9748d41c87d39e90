"""The one place that speaks PyIceberg's catalog: tables, branches, staged files, and the commit of a publish.

A commit (`anabranch.commits`) lands whole, is refused whole, or its answer is lost; `Lake.commit` tells which, and
never repeats a decision by itself.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property

import pyarrow as pa
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NamespaceAlreadyExistsError,
    NoSuchTableError,
    TableAlreadyExistsError,
    ValidationError,
    ValidationException,
)
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import CommitTableResponse, StaticTable, Table, Transaction
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.table.update import (
    AssertRefSnapshotId,
    AssertTableUUID,
    TableRequirement,
)
from pyiceberg.table.update.schema import UpdateSchema
from pyiceberg.transforms import IdentityTransform

from anabranch.catalogs import catalog_properties
from anabranch.commits import Commit, Outcome, prepare, set_ref
from anabranch.config import Environment
from anabranch.errors import MetadataGone, Terminal, Transient
from anabranch.fail_points import Step, reach
from anabranch.neighbours import asked, explain, said_by
from anabranch.side_files import set_aside
from anabranch.snapshot_writer import delete_quietly
from anabranch.snapshots import BRANCHES, PUBLISH_ID, STAGING, Staged, has_landed

LOG = logging.getLogger(__name__)

TABLE_PROPERTIES = {
    "format-version": "2",
    "write.wap.enabled": "true",
    "write.parquet.compression-codec": "zstd",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    # For Spark's staging, which rests on no decision; a publish never uses it.
    "commit.retry.num-retries": "30",
    "commit.retry.min-wait-ms": "50",
    "commit.retry.max-wait-ms": "2000",
}


# How a REST catalog's server says, with the status of a table that does not exist, that a metadata file is not there.
_NO_FILE = "Location does not exist"

# How PyIceberg says, as a plain ValueError, that somebody else changed the table first.
_OVERTAKEN = ("Cannot add snapshot with sequence number", "Snapshot with snapshot id")


class Lake:
    """The catalog and its tables. Reads are always fresh: nothing is cached between calls but the connection."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    @cached_property
    def catalog(self) -> Catalog:
        catalog = self._environment.catalog
        try:
            return load_catalog(catalog.name, **catalog_properties(self._environment))
        except Exception as error:
            raise explain(f"open catalog {catalog.name} ({catalog.type})", error) from error

    def load(self, name: str) -> Table:
        """A table as it is now. Raises Terminal when it does not exist, MetadataGone when storage lacks what the
        catalog names, ConfigurationError for keys or rights that are wrong, Transient when the lake does not answer."""
        table = self._find(name)
        if table is None:
            raise Terminal(f"table {name}: expected it to exist, found none; run `anabranch apply`")
        return table

    def _find(self, name: str) -> Table | None:
        gone = None
        while True:
            try:
                return self.catalog.load_table(name)
            except (Terminal, Transient):
                raise
            except Exception as error:
                found = said_by(error)
                if not (isinstance(error, FileNotFoundError) or _NO_FILE in found):
                    if isinstance(error, NoSuchTableError):
                        return None
                    raise explain(f"load table {name}", error) from error
                # Asked twice: the first may have been overtaken by publishes that deleted the file since.
                if gone == found:
                    raise MetadataGone(
                        f"table {name}: expected the metadata file that the catalog names, found {found}; if the "
                        "bucket was restored to an earlier time, stop the stream's jobs and run `anabranch apply "
                        "STREAM --register`, which takes the newest metadata file that is there"
                    ) from error
                gone = found

    @property
    def catalog_name(self) -> str:
        return self._environment.catalog.name

    def tables(self, names: Iterable[str]) -> Mapping[str, Table]:
        """Tables by name, each loaded when it is first asked for."""
        return _Tables(self, tuple(names))

    def exists(self, name: str) -> bool:
        """Whether the catalog knows a table. Raises like `load`."""
        return self._find(name) is not None

    def create(self, name: str, schema: Schema, partition_by: Iterable[str], properties: Mapping[str, str]) -> bool:
        """Create a table and its namespace; True if it was created. Partitioned by identity of the columns named."""
        # Asked first: PyIceberg writes a metadata file before it finds that the table is there.
        if self.exists(name):
            return False
        self._ensure_namespace(name)
        spec = _partitioned(schema, partition_by)
        try:
            self.catalog.create_table(name, schema, partition_spec=spec, properties=dict(properties))
        except TableAlreadyExistsError:
            return False
        except Exception as error:
            raise explain(f"create table {name}", error) from error
        return True

    def new_location(self, name: str, schema: Schema) -> str:
        """Where a table that does not exist would be created: the catalog's word. Nothing is created but its
        namespace. Raises Transient."""
        self._ensure_namespace(name)
        try:
            return str(self.catalog.create_table_transaction(name, schema).table_metadata.location)
        except Exception as error:
            raise explain(f"ask where table {name} would be", error) from error

    def register(self, name: str, metadata_file: str) -> None:
        """Make the catalog know a table that it does not, by one of its metadata files. Raises Transient."""
        self._ensure_namespace(name)
        try:
            self.catalog.register_table(name, metadata_file)
        except Exception as error:
            raise explain(f"register table {name} by {metadata_file}", error) from error

    def forget(self, name: str) -> None:
        """Take a table out of the catalog, and no file with it. Raises Transient."""
        try:
            self.catalog.drop_table(name)
        except Exception as error:
            raise explain(f"take table {name} out of the catalog", error) from error

    def read_metadata(self, metadata_file: str) -> Table:
        """A table as one of its metadata files has it, whatever the catalog knows. Raises OSError, ValueError."""
        try:
            return StaticTable.from_metadata(metadata_file, catalog_properties(self._environment))
        except ValidationError as error:
            raise ValueError(f"no metadata of a table: {error}") from error

    def _ensure_namespace(self, name: str) -> None:
        namespace = name.rsplit(".", 1)[0]
        try:
            self.catalog.create_namespace(namespace)
        except NamespaceAlreadyExistsError:
            LOG.debug("namespace %s is there", namespace)
        except Exception as error:
            raise explain(f"create namespace {namespace}", error) from error

    def change_schema(self, name: str, write: Callable[[Table, UpdateSchema], None]) -> None:
        """One commit of what `write` puts into the schema of the table as it is; asked again when somebody else was
        first. Nothing to change is no commit. Raises Transient when ten attempts are refused or the answer is lost.
        """
        for _ in range(10):
            table = self.load(name)
            tx = Transaction(table)
            with tx.update_schema() as update:
                write(table, update)
            if not tx._updates:
                return
            requirements = (AssertTableUUID(uuid=table.metadata.table_uuid), *tx._requirements)
            try:
                landed = self.catalog.commit_table(table, requirements, tuple(tx._updates))
                _delete_old_metadata(table, landed)
                return
            except CommitFailedException as error:
                LOG.debug("change of the schema of %s refused: %s", name, error)
            except Exception as error:
                raise explain(f"change the schema of {name}", error) from error
        raise Transient(f"change the schema of {name}: expected to be first once in ten attempts; run it again")

    def add_branches(self, name: str, properties: Mapping[str, str]) -> list[str]:
        """Make sure that all branches exist; returns those made. A table without a snapshot gets its first, empty one,
        which carries `properties`; a branch that is missing later begins at `main`."""
        table = self.load(name)
        tx = Transaction(table)
        made = [b for b in (*BRANCHES, STAGING) if b not in table.metadata.refs]
        if not made:
            return []
        if table.current_snapshot() is None:
            with asked(f"write the first snapshot of {name}"):
                first = set_aside(table, {**properties, PUBLISH_ID: uuid.uuid4().hex}, {})
                tx.update_snapshot(snapshot_properties=first).fast_append().commit()
        head = tx.table_metadata.refs["main"].snapshot_id
        updates = list(tx._updates)
        requirements: list[TableRequirement] = [AssertTableUUID(uuid=table.metadata.table_uuid)]
        for branch in made:
            # PyIceberg refuses to look for another branch in a table without a snapshot; main's absence says enough.
            if branch == "main" or "main" not in made:
                requirements.append(AssertRefSnapshotId(ref=branch, snapshot_id=None))
            if branch != "main":
                updates.append(set_ref(branch, head, SnapshotRefType.BRANCH))
        try:
            self.catalog.commit_table(table, tuple(requirements), tuple(updates))
        except CommitFailedException as error:
            raise Transient(f"create branches of {name}: somebody else was first ({error}); run it again") from error
        except Exception as error:
            raise explain(f"create branches of {name}", error) from error
        return made

    def commit(self, table: Table, commit: Commit) -> Outcome:
        """Make `commit` land, or find that it is refused because a head moved. Never replays.

        When the answer is lost, or may be one to the client's own repetition, the table is loaded again until it says
        whether a snapshot carries the commit's id.
        Raises Transient when the table cannot be read for half a minute, with the outcome still unknown.
        """
        prepared = prepare(table, commit)
        # A transaction of PyIceberg keeps one requirement of each type, so it would watch one branch only.
        requirements: tuple[TableRequirement, ...] = (
            AssertTableUUID(uuid=table.metadata.table_uuid),
            *(AssertRefSnapshotId(ref=ref, snapshot_id=id) for ref, id in commit.heads.items()),
        )
        reach(Step.COMMIT_PREPARED)
        try:
            reach(Step.COMMIT_REQUEST_LOST)
            landed = self.catalog.commit_table(table, requirements, prepared.updates)
            reach(Step.COMMIT_ANSWER_LOST)
            reach(Step.COMMIT_LANDED)
            _delete_old_metadata(table, landed)
            return Outcome.LANDED
        except (CommitFailedException, ValidationException) as error:
            LOG.debug("commit %s of %s refused: %s", commit.id, table.name(), error)
            # A client over HTTP asks again by itself, and is then told that somebody else was first: that was itself.
            if self._environment.catalog.type != "sql" and self._resolve(table, commit.id) is Outcome.LANDED:
                LOG.warning("commit %s of %s had landed, and was asked for again", commit.id, table.name())
                return Outcome.LANDED
        except ValueError as error:
            # Another commit took the sequence number between this decision and its publish, or discarded what this one
            # would have expired.
            if not any(text in str(error) for text in _OVERTAKEN):
                raise
            LOG.debug("commit %s of %s refused: %s", commit.id, table.name(), error)
        except Exception as error:
            LOG.warning(
                "commit %s of %s: the answer was lost (%s); looking at the table",
                commit.id,
                table.name(),
                said_by(error),
            )
            outcome = self._resolve(table, commit.id)
            said = "had landed" if outcome is Outcome.LANDED else "had not landed"
            LOG.warning("commit %s of %s %s", commit.id, table.name(), said)
            return outcome
        delete_quietly(table, prepared.written)
        return Outcome.REFUSED

    def append(self, name: str, rows: Callable[[int], pa.Table | None]) -> None:
        """Append to a plain table (the ledger). `rows` gets the sequence number that the commit will have, and is asked
        again when somebody else was first; None is nothing to append. Raises Transient when ten attempts are refused.
        """
        for _ in range(10):
            table = self.load(name)
            current = table.current_snapshot()
            found = rows(table.metadata.next_sequence_number())
            if found is None:
                return
            if lacking := [c for c in found.column_names if c not in table.schema().column_names]:
                raise Terminal(f"table {name}: expected column {lacking[0]}, found none; run `anabranch apply`")
            tx = Transaction(table)
            commit_id = uuid.uuid4().hex
            with asked(f"write rows of {name}"):
                tx.append(found, snapshot_properties={PUBLISH_ID: commit_id})
            requirements: tuple[TableRequirement, ...] = (
                AssertTableUUID(uuid=table.metadata.table_uuid),
                AssertRefSnapshotId(ref="main", snapshot_id=current.snapshot_id if current else None),
            )
            reach(Step.LEDGER_PREPARED)
            try:
                landed = self.catalog.commit_table(table, requirements, tuple(tx._updates))
                reach(Step.LEDGER_APPENDED)
                _delete_old_metadata(table, landed)
                return
            except CommitFailedException as error:
                LOG.debug("append to %s refused: %s", name, error)
            except Exception as error:
                LOG.warning("append to %s: the answer was lost (%s)", name, said_by(error))
                if self._resolve(table, commit_id) is Outcome.LANDED:
                    return
        raise Transient(f"append to {name}: expected to be first once in ten attempts, found others were; try again")

    def discard(self, name: str, staged: Staged) -> None:
        """Forget a staged snapshot that its own publisher will not publish; its files become orphans."""
        table = self.load(name)
        if table.metadata.snapshot_by_id(staged.snapshot_id) is not None:
            self.commit(table, Commit(uuid.uuid4().hex, {}, (), expire=(staged.snapshot_id,)))

    def _resolve(self, table: Table, commit_id: str) -> Outcome:
        deadline = time.monotonic() + 30
        pause = 0.1
        while True:
            try:
                fresh = self.load(".".join(table.name()))
            except Transient:
                if time.monotonic() > deadline:
                    raise
                time.sleep(pause)
                pause = min(2.0, pause * 2)
                continue
            return Outcome.LANDED if has_landed(fresh, commit_id) else Outcome.REFUSED


def _partitioned(schema: Schema, by: Iterable[str]) -> PartitionSpec:
    return PartitionSpec(
        *(
            PartitionField(schema.find_field(column).field_id, 1000 + i, IdentityTransform(), column)
            for i, column in enumerate(by)
        )
    )


def _delete_old_metadata(before: Table, landed: CommitTableResponse) -> None:
    """Delete the metadata files that a commit dropped from the log, as `write.metadata.delete-after-commit.enabled`
    promises: the catalog alone does not. What is left over by a failure is an orphan."""
    kept = {entry.metadata_file for entry in landed.metadata.metadata_log}
    delete_quietly(before, [e.metadata_file for e in before.metadata.metadata_log if e.metadata_file not in kept])


class _Tables(Mapping[str, Table]):
    def __init__(self, lake: Lake, names: tuple[str, ...]) -> None:
        self._lake, self._names = lake, names
        self._loaded: dict[str, Table] = {}

    def __getitem__(self, name: str) -> Table:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._loaded:
            self._loaded[name] = self._lake.load(name)
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
