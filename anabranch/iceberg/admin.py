"""Creation, registration and changes of tables: only `anabranch apply` makes them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence

from pyiceberg.exceptions import (
    NamespaceAlreadyExistsError,
    TableAlreadyExistsError,
    ValidationError,
)
from pyiceberg.io import FileIO
from pyiceberg.schema import Schema
from pyiceberg.table import StaticTable, Table, Transaction
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.table.update import AssertRefSnapshotId, TableRequirement, TableUpdate

from anabranch.common.errors import ConfigurationError, Terminal, Transient
from anabranch.common.remote_errors import explain, explained_errors, lake_errors
from anabranch.iceberg.catalog_settings import namespace_properties
from anabranch.iceberg.commits import Outcome
from anabranch.iceberg.lake import Lake, until_landed
from anabranch.iceberg.parquet_writer import spec_of
from anabranch.iceberg.prepare import set_ref
from anabranch.iceberg.private_api import requirements_of, table_of, updates_of
from anabranch.iceberg.snapshots import BRANCHES, PROVEN, PUBLISH_ID, PUBLISHED, STAGING
from anabranch.iceberg.state_properties import plan_summary

LOG = logging.getLogger(__name__)

TABLE_PROPERTIES = {
    "format-version": "2",
    "write.wap.enabled": "true",
    "write.parquet.compression-codec": "zstd",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    # For Spark's staging, which requires no head. A publish never retries this way.
    "commit.retry.num-retries": "30",
    "commit.retry.min-wait-ms": "50",
    "commit.retry.max-wait-ms": "2000",
    # Spark stages dead letters with `main` as parent; it must not rewrite main's manifests.
    "commit.manifest-merge.enabled": "false",
}


def create(
    lake: Lake,
    name: str,
    schema: Schema,
    partition_by: Iterable[str],
    properties: Mapping[str, str],
    location: str | None = None,
) -> bool:
    """Create a table and its namespace, partitioned by the fields `partition_by`. Return False if
    the table exists. Raises Transient or ConfigurationError."""
    # Check first: PyIceberg writes a metadata file before it finds that the table exists.
    if lake.exists(name):
        return False
    lake.clock.now()
    _ensure_namespace(lake, name)
    spec = spec_of(schema, partition_by)
    try:
        lake.catalog.create_table(name, schema, location, spec, properties=dict(properties))
    except TableAlreadyExistsError:
        return False
    except Exception as error:
        raise explain(f"create table {name}", error) from error
    return True


def new_place(
    lake: Lake, name: str, schema: Schema, location: str | None = None
) -> tuple[str, FileIO]:
    """Return the location at which the catalog would create a table, and the access to files there.
    Creates only its namespace. Raises Transient."""
    _ensure_namespace(lake, name)
    with explained_errors(f"get the location of a new table {name}"):
        staged = lake.catalog.create_table_transaction(name, schema, location)
        return str(staged.table_metadata.location), table_of(staged).io


def register(lake: Lake, name: str, metadata_file: str) -> None:
    """Register a table in the catalog with one of its metadata files. Raises Transient."""
    _ensure_namespace(lake, name)
    with explained_errors(f"register table {name} by {metadata_file}"):
        lake.catalog.register_table(name, metadata_file)


def forget(lake: Lake, name: str) -> None:
    """Remove a table from the catalog; its files stay. Raises Transient."""
    with explained_errors(f"remove table {name} from the catalog"):
        lake.catalog.drop_table(name)


def try_to_write(lake: Lake) -> None:
    """Take a commit's lock in an SQL catalog, by an update of no rows that is rolled back. This
    shows whether the user may write and whether another process has the lock. Does nothing with
    other catalogs. Raises ConfigurationError or Transient."""
    if lake.environment.catalog.type != "sql":
        return
    from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
    from sqlalchemy import false, update

    assert isinstance(lake.catalog, SqlCatalog)
    doing = "try to write to the catalog"
    with explained_errors(doing), lake.catalog.engine.connect() as connection:
        connection.execute(update(IcebergTables).where(false()).values(metadata_location=None))
        connection.rollback()


def read_metadata(io: FileIO, metadata_file: str) -> Table:
    """Return the table of a metadata file, without the catalog. Raises OSError, ValueError."""
    try:
        return StaticTable.from_metadata(metadata_file, io.properties)
    except ValidationError as error:
        raise ValueError(f"no metadata of a table: {error}") from error


def change_table(
    lake: Lake,
    name: str,
    what: str,
    write: Callable[[Table, Transaction], Iterable[TableRequirement] | None],
) -> None:
    """Commit the changes that `write` adds to a transaction on a fresh load of the table; retry if
    another process was first. `write` may return further requirements of the commit. `what` names
    the change. Without changes there is no commit. Raises Transient if other commits come first for
    a quarter of a minute, or the answer is lost.
    """

    def plan(table: Table) -> tuple[Sequence[TableRequirement], Sequence[TableUpdate]]:
        tx = Transaction(table)
        also = write(table, tx) or ()
        return (*requirements_of(tx), *also), updates_of(tx)

    commit_updates(lake, name, what, plan)


def commit_updates(
    lake: Lake,
    name: str,
    what: str,
    plan: Callable[[Table], tuple[Sequence[TableRequirement], Sequence[TableUpdate]]],
) -> None:
    """Commit what `plan` returns for a fresh load, as `change_table`. Raises Transient."""
    doing = f"change the {what} of {name}"

    def attempt() -> Outcome:
        table = lake.load(name)
        requirements, updates = plan(table)
        if not updates:
            return Outcome.LANDED
        lake.clock.now(table.metadata.last_updated_ms)
        return lake.request(table, requirements, updates, doing)

    until_landed(doing, attempt)


def add_branches(lake: Lake, name: str, properties: Mapping[str, str]) -> list[str]:
    """Create missing branches; return their names. A table without a snapshot gets an empty one
    with `properties`; later, a missing branch starts at main's head, and `main` at its newest
    publish. Raises Terminal if that is not known, Transient."""
    table = lake.load(name)
    tx, refs = Transaction(table), table.metadata.refs
    made = [b for b in (*BRANCHES, STAGING) if b not in refs]
    if not made:
        return []
    lake.clock.now(table.metadata.last_updated_ms)
    is_new = not refs
    if is_new:
        with lake_errors(f"write the first snapshot of {name}"):
            first, needed = plan_summary({**properties, PUBLISH_ID: uuid.uuid4().hex}, {})
            tx.set_properties(needed)
            tx.update_snapshot(snapshot_properties=first).fast_append().commit()
        refs = tx.table_metadata.refs
    if (origin := refs.get("main", refs.get(f"{PUBLISHED}main"))) is None:
        raise Terminal(
            f"table {name}: expected branch main or tag {PUBLISHED}main, found neither; set main "
            "to its last snapshot, which an earlier metadata file of the table names, then run it "
            "again: an empty main would begin a new stream"
        )
    head = origin.snapshot_id
    updates = list(updates_of(tx))
    requirements: list[TableRequirement] = []
    for branch in made:
        # In a table without a snapshot, PyIceberg can require only that main does not exist, which
        # suffices.
        if branch == "main" or not is_new:
            # Another `apply` may have created the branch, and a job moved it since: to set it to
            # the head of `main` would drop its publishes.
            requirements.append(AssertRefSnapshotId(ref=branch, snapshot_id=None))
        if branch != "main" or not is_new:
            updates.append(set_ref(branch, head, SnapshotRefType.BRANCH))
        if branch != STAGING:
            updates.append(set_ref(PUBLISHED + branch, head, SnapshotRefType.TAG))
    # Of a stream's rows alone: other tables have no state.
    if is_new and properties:
        updates.append(set_ref(PROVEN, head, SnapshotRefType.BRANCH))
    doing = f"create branches of {name}"
    if lake.request(table, requirements, updates, doing) is Outcome.REFUSED:
        raise Transient(f"{doing}: another process was first; run it again")
    # Before any row is staged: a catalog that ignores branches would show none of the two layers,
    # or the rows of an unfinished publish.
    if lost := [b for b in made if b not in lake.load(name).metadata.refs]:
        raise ConfigurationError(
            f"{doing}: expected catalog {lake.catalog_name} to keep them, found that it accepted "
            f"the commit and has no {', '.join(lost)}: it ignores branches, as Nessie's does; use "
            "a catalog of docs/how-to/deploy/services.md, and drop the table there, which is empty"
        )
    return made


def _ensure_namespace(lake: Lake, name: str) -> None:
    namespace = name.rsplit(".", 1)[0]
    try:
        lake.catalog.create_namespace(namespace, namespace_properties(lake.environment.catalog))
    except NamespaceAlreadyExistsError:
        LOG.debug("namespace %s exists", namespace)
    except Exception as error:
        # If two clients create it at once, an SQL catalog's unique key refuses one of them.
        with explained_errors(f"look for namespace {namespace}"):
            exists = lake.catalog.namespace_exists(namespace)
        if not exists:
            raise explain(f"create namespace {namespace}", error) from error
