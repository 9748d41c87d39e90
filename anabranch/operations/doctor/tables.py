"""Check a stream's tables: existence, branches, columns and properties."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pyiceberg.table import Table

from anabranch.common.errors import (
    AnabranchError,
    ConfigurationError,
    MetadataGone,
    Refused,
    Terminal,
    Transient,
)
from anabranch.config import Environment, Stream
from anabranch.iceberg import admin
from anabranch.iceberg.foreign import SUPPORTED, operation_of, unsupported_feature
from anabranch.iceberg.foreign_columns import find_foreign_changes, published_schema
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.owner import AnotherStreamsTable, open_lake
from anabranch.iceberg.snapshots import BRANCHES, STAGING, is_publish, made_at
from anabranch.operations.doctor.kafka import Unread
from anabranch.operations.finding import Finding, Issue, error, info, warning
from anabranch.protocol.apply import require_columns
from anabranch.protocol.state import State, load_state
from anabranch.subjects.follow import with_table_columns


@dataclass(frozen=True)
class PropertyDrift:
    """A table property that differs from the value that `apply` set; `found`: None if missing."""

    table: str
    key: str
    expected: str
    found: str | None


@dataclass(frozen=True)
class TableFacts:
    """Facts about a stream's tables. `branches`: missing branches as (table, branch). `columns`:
    how the table's columns differ from the stream's file, as text; `apply_refuses`: to change them.
    `unread`: None if the table has no state yet. `optimizers`: signs of another program that
    maintains a table, as (table, sign).
    `ref_ages`: by table, the age in milliseconds at which `expire_snapshots` drops its branches.
    `features`: features that our writers do not support, as (table, feature)."""

    missing: tuple[str, ...] = ()
    branches: tuple[tuple[str, str], ...] = ()
    columns: str | None = None
    apply_refuses: bool = False
    drifts: tuple[PropertyDrift, ...] = ()
    optimizers: tuple[tuple[str, str], ...] = ()
    ref_ages: tuple[tuple[str, str], ...] = ()
    unread: Unread | None = None
    features: tuple[tuple[str, str], ...] = ()


def read(environment: Environment, stream: Stream, catalog: Lake) -> TableFacts:
    """Read the metadata of the tables. Raises MetadataGone, ConfigurationError, Transient."""
    lake = open_lake(environment, stream, shared=catalog)
    names = _table_names(stream)
    missing = tuple(name for name in names if not lake.exists(name))
    tables = {name: lake.load(name) for name in names if name not in missing}
    # The format version is a field of the metadata, not a property.
    wanted = {
        key: value for key, value in admin.TABLE_PROPERTIES.items() if key != "format-version"
    }
    facts = TableFacts(
        missing=missing,
        branches=tuple(
            (name, branch)
            for name, table in tables.items()
            if name not in stream.plain_tables
            for branch in (*BRANCHES, STAGING)
            if branch not in table.metadata.refs
        ),
        drifts=tuple(
            PropertyDrift(name, key, value, table.properties.get(key))
            for name, table in tables.items()
            for key, value in wanted.items()
            if table.properties.get(key) != value
        ),
        optimizers=tuple(
            (name, shown) for name, table in tables.items() for shown in find_optimizers(table)
        ),
        features=tuple(
            (n, feature) for n, t in tables.items() if (feature := unsupported_feature(t))
        ),
        ref_ages=tuple(
            (n, age) for n, t in tables.items() if (age := t.properties.get(_REF_AGE)) is not None
        ),
    )
    if stream.table not in tables:
        return facts
    try:
        require_columns(tables[stream.table], with_table_columns(stream, lake))
        for name, table in tables.items():
            wanted_fields = published_schema(table) or table.schema()
            for change in find_foreign_changes(table, wanted_fields)[:1]:
                raise Terminal(f"{change.words(name)}")
    except ConfigurationError:
        # An unsupported feature is a separate finding.
        return facts
    except Terminal as differs:
        refuses = isinstance(differs.__cause__, Refused)
        facts = replace(facts, columns=str(differs), apply_refuses=refuses)
    try:
        return replace(facts, unread=find_unread(load_state(lake, stream.table)))
    except Transient:
        raise
    except AnabranchError:
        # A missing branch is a separate finding.
        return facts


_REF_AGE = "history.expire.max-ref-age-ms"
# Settings of services that expire snapshots, compact files and remove orphans on their own.
_OPTIMIZERS = (
    "history.expire.",
    "self-optimizing.",
    "optimizer.",
    "table-expire.",
    "clean-orphan-file.",
)
_S3_TABLES = "--table-s3"


def find_optimizers(table: Table) -> list[str]:
    """Return signs of another program that maintains a table, as text. A service's optimizer
    without settings in the table (AWS Glue) is only visible after its first commit. Pure."""
    keys = sorted(k for k in table.properties if k.startswith(_OPTIMIZERS) and k != _REF_AGE)
    shown = [f"its property {key}" for key in keys]
    if _S3_TABLES in table.location().removeprefix("s3://").partition("/")[0]:
        shown.append("its bucket is an S3 Tables bucket")
    replaced = [
        made_at(s) for s in table.snapshots() if operation_of(s) == "replace" and not is_publish(s)
    ]
    if replaced:
        newest = f"{max(replaced):%Y-%m-%d %H:%M} UTC"
        shown.append(
            f"{len(replaced)} snapshots that rewrote files or manifests, the newest of {newest}"
        )
    return shown


def find_unread(state: State) -> Unread:
    """Return the start of the records that the batch layer has not read yet. Pure."""
    timeline = state.timeline
    hour = min((h for h in timeline.sealed if not state.is_accepted(h)), default=None)
    if hour is None:
        return Unread(timeline.open, timeline.start)
    return Unread(hour, {p: start for p, (start, _) in timeline.sealed[hour].ranges.items()})


def failed(stream: Stream, failure: AnabranchError) -> Finding | None:
    """Return the finding of a failed request; None if the catalog's or S3's check has it. Pure."""
    if isinstance(failure, AnotherStreamsTable):
        # No command: every command for this stream is refused.
        remedy = f"another `table:` in streams/{stream.name}.yaml"
        return error(
            Issue.ANOTHER_STREAMS_TABLE,
            stream.table,
            f"a table of stream {stream.name}",
            str(failure),
            remedy,
        )
    if not isinstance(failure, MetadataGone):
        return None
    return error(
        Issue.METADATA_GONE,
        stream.table,
        "the metadata file that the catalog names",
        str(failure),
        f"anabranch apply {stream.name} --register",
    )


def _table_names(stream: Stream) -> tuple[str, ...]:
    archive = (stream.archive_table,) if stream.archive is not None else ()
    return (stream.table, stream.dead_letters_table, *archive, *stream.plain_tables)


def findings(catalog: str, stream: Stream, facts: TableFacts) -> Iterator[Finding]:
    """Return the findings. `catalog`: the catalog's name in Spark. Pure."""
    apply = f"anabranch apply {stream.name}"
    if len(facts.missing) == len(_table_names(stream)):
        yield info(Issue.NOT_APPLIED, stream.name, "the stream's tables", "none of them yet", apply)
        return
    for name in facts.missing:
        yield error(Issue.TABLE_MISSING, name, "a table", "none", apply)
    for name, branch in facts.branches:
        yield error(Issue.BRANCH_MISSING, name, f"branch {branch}", "none", apply)
    for name, feature in facts.features:
        yield error(
            Issue.FORMAT,
            name,
            SUPPORTED,
            f"{feature}, which another program set",
            f"{apply}, whose error has the way back",
        )
    if facts.columns is not None:
        in_file = f"`schema:` of streams/{stream.name}.yaml, as the end of `found` has it"
        remedy = in_file if facts.apply_refuses else apply
        expected = "the columns of the stream's file"
        yield error(Issue.COLUMNS, stream.table, expected, facts.columns, remedy)
    for drift in facts.drifts:
        remedy = (
            f"ALTER TABLE {catalog}.{drift.table} SET TBLPROPERTIES ('{drift.key}' = "
            f"'{drift.expected}')"
        )
        found = "none" if drift.found is None else drift.found
        make_finding = error if drift.key == "write.wap.enabled" else warning
        yield make_finding(
            Issue.PROPERTIES, drift.table, f"{drift.key}={drift.expected}", found, remedy
        )
    for name, age in facts.ref_ages:
        remedy = f"ALTER TABLE {catalog}.{name} UNSET TBLPROPERTIES ('{_REF_AGE}')"
        yield error(
            Issue.REF_AGE, name, "branches without a maximum age", f"{_REF_AGE}={age}", remedy
        )
    for name in dict.fromkeys(name for name, _ in facts.optimizers):
        found = "; ".join(shown for of, shown in facts.optimizers if of == name)
        remedy = (
            "configure it not to delete files younger than a day (docs/runbooks.md, "
            "`tables.optimizer`)"
        )
        yield info(Issue.OPTIMIZER, name, "only `anabranch maintain` to maintain it", found, remedy)
