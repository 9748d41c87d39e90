"""Query the serving tables with an analyst's SQL, using DuckDB and without a download. Tables have
no delete files, so the planned data files are the table. DuckDB gets them as a PyArrow dataset,
which keeps projection and filter push-down, and reads them through the table's own file system and
credentials."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from uuid import uuid4

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
from pyiceberg.table import Table

from anabranch.common.errors import AnabranchError, ConfigurationError
from anabranch.common.logs import Progress
from anabranch.common.temporary import process_folder
from serving_layer.query.datasets import (
    TableFiles,
    columns_only,
    connected,
    listed,
    plan_files,
    quoted,
    quoted_table,
    reading_failures,
)

_READING = frozenset({"SELECT", "EXPLAIN", "MULTI"})  # PIVOT becomes MULTI
_BUILT_IN = frozenset({"memory", "system", "temp"})  # DuckDB's own catalogs
_BATCH_ROWS = 65_536


@dataclass(frozen=True)
class Selected:
    """The rows of a table that a query sees, from the table object's snapshot or `snapshot_id`, for
    all ingest hours or `hours`."""

    snapshot_id: int | None = None
    hours: Collection[str] | None = None


@dataclass(frozen=True)
class Derived:
    """A view under a table's name: SQL over `files` and `others`, named by `source`."""

    sql: str
    files: Mapping[str, TableFiles]
    others: Mapping[str, ds.Dataset] = field(default_factory=dict)
    add_functions: Callable[[duckdb.DuckDBPyConnection], None] | None = None
    """A function that registers functions that DuckDB lacks."""

    def columns_only(self) -> ds.Dataset:
        """Return a dataset with the view's columns and no rows; no data file is opened."""
        connection = _own_connection()
        self.register(connection)
        return ds.dataset(connection.sql(f"SELECT * FROM ({self.sql}) LIMIT 0").to_arrow_table())

    def register(
        self, connection: duckdb.DuckDBPyConnection, progress: Progress | None = None
    ) -> None:
        """Register the files and functions of the SQL with a connection."""
        for name, planned in self.files.items():
            connection.register(name, planned.dataset(progress))
        for name, dataset in self.others.items():
            connection.register(name, dataset)
        if self.add_functions is not None:
            self.add_functions(connection)


@dataclass(frozen=True)
class SelectedRows:
    """The rows of a table that a query sees, under the name of the table."""

    name: str
    table: Table
    select: Callable[[], Selected] = Selected
    """A function that returns the rows that a query sees. Raises AnabranchError."""
    read: Callable[[], Derived] | None = None
    """A function that reads the rows that a query sees in place of these."""

    def columns_only(self) -> ds.Dataset:
        return columns_only(self.table)

    def files(self) -> TableFiles:
        """Return the files of the rows. Raises Refused, Transient, and as `select`."""
        selected = self.select()
        return plan_files(self.name, self.table, selected.snapshot_id, selected.hours)

    def derived(self) -> Derived:
        if self.read is not None:
            return self.read()
        return Derived(f"SELECT * FROM {source(self.name)}", {self.name: self.files()})


Source = Callable[[], SelectedRows | Derived]
"""A function that loads a table, or pins the files of a view. Raises AnabranchError."""


def source(name: str) -> str:
    """Return the SQL name of files that are registered under `name`."""
    return f"temp.main.{quoted(name)}"


@dataclass(frozen=True)
class Answer:
    """A query's rows as a stream, to be read once, and the files of each table that it reads; their
    `scans` list the opened files."""

    rows: pa.RecordBatchReader
    files: Sequence[TableFiles]


@contextmanager
def open_query(
    sql: str,
    tables: Mapping[str, Source],
    *,
    catalog: str = "lake",
    unlisted: Collection[str] = (),
    progress: Progress | None = None,
) -> Iterator[Answer]:
    """Run one reading statement over tables and views, by `schema.table`, and yield the answer. At
    most a batch of result rows is in memory.

    The SQL may name a table `schema.table` or `catalog.schema.table`. Only the sources of tables
    that the SQL mentions are called; of all tables if it mentions none. SHOW TABLES and errors do
    not list tables in `unlisted`; the SQL may name them. Times are aware UTC. Only the columns that
    the SQL needs are read, and files that cannot contain a matching row are skipped. The SQL cannot
    access files, the network or settings, and statements that write are refused. A column name that
    occurs twice gets a number (`id`, `id_1`). `progress` counts the files read.

    Raises, also while the rows are read, ConfigurationError for SQL that DuckDB does not accept
    (with its message), Refused for a table that has delete files, Transient when a data file cannot
    be read, and the errors of a source; all only for tables that the SQL reads.
    """
    with _session(catalog) as connection:
        statement = _single_reading(connection, sql)
        mentioned = [name for name in tables if _mentions(sql, name)]
        shown = [name for name in tables if name not in unlisted]
        files: list[TableFiles] = []
        absent: dict[str, AnabranchError] = {}
        for name in mentioned or shown:
            try:
                found = tables[name]()
                if not mentioned:
                    # One identifier with a dot in it, which no other name collides with. A name
                    # that the SQL composes would have no rows, so that a scan is refused.
                    connection.register(name, listed(found.columns_only().schema))
                    _create_view(connection, name, f"SELECT * FROM {source(name)}")
                    continue
                derived = found.derived() if isinstance(found, SelectedRows) else found
                derived.register(connection, progress)
            except AnabranchError as error:
                # For example a table of another stream that is not applied yet: DuckDB reports
                # whether the SQL needs it.
                absent[name] = error
                continue
            _create_view(connection, name, derived.sql)
            files += derived.files.values()
        _lock(connection)
        explained = partial(_explained, tables=shown, absent=absent)
        with explained():
            rows = connection.sql(statement).to_arrow_reader(_BATCH_ROWS)
        yield Answer(_checked(rows, explained), files)


def open_relation(derived: Derived) -> duckdb.DuckDBPyRelation:
    """Return a view's rows as a relation of its own connection, in UTC, which lives as long as the
    relations derived from it. Raises Refused, Transient."""
    connection = _own_connection()
    derived.register(connection)
    return connection.sql(derived.sql)


def _own_connection() -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(":memory:")
    connection.execute("SET TimeZone = 'UTC'")
    connection.execute(f"SET temp_directory = '{process_folder('query')}/{uuid4().hex}'")
    return connection


@contextmanager
def _explained(tables: Sequence[str], absent: Mapping[str, AnabranchError]) -> Iterator[None]:
    """Raise DuckDB's errors as AnabranchError."""
    try:
        with reading_failures("query: expected to read every data file"):
            yield
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        if isinstance(error, duckdb.CatalogException):
            lacking = str(error).partition(" does not exist")[0]
            for name, why in absent.items():
                if _mentions(lacking, name):
                    raise why from error
        known = ", ".join(sorted(tables)) or "none"
        hint = f"\nknown tables: {known}" if isinstance(error, duckdb.CatalogException) else ""
        raise ConfigurationError(f"query: {error}{hint}") from error


def _checked(
    rows: pa.RecordBatchReader, explained: Callable[[], AbstractContextManager[None]]
) -> pa.RecordBatchReader:
    """Return the same rows with distinct column names, raising Anabranch's errors."""
    names = _distinct_names(rows.schema.names)
    schema = pa.schema(
        [column.with_name(name) for column, name in zip(rows.schema, names, strict=True)]
    )

    def batches() -> Iterator[pa.RecordBatch]:
        with explained():
            for batch in rows:
                yield batch.rename_columns(names)

    return pa.RecordBatchReader.from_batches(schema, batches())


@contextmanager
def _session(catalog: str) -> Iterator[duckdb.DuckDBPyConnection]:
    with connected() as connection:
        if catalog.lower() not in _BUILT_IN:
            connection.execute(f"ATTACH ':memory:' AS {quoted(catalog)}")
            connection.execute(f"USE {quoted(catalog)}")
        yield connection


def _lock(connection: duckdb.DuckDBPyConnection) -> None:
    """Lock the connection before the user's SQL: no files, network, extensions, variables."""
    for setting in (
        "enable_external_access = false",
        "python_enable_replacements = false",
        "autoinstall_known_extensions = false",
        "autoload_known_extensions = false",
        "lock_configuration = true",
    ):
        connection.execute(f"SET {setting}")


def _single_reading(connection: duckdb.DuckDBPyConnection, sql: str) -> str:
    try:
        statements = connection.extract_statements(sql)
    except duckdb.Error as error:
        raise ConfigurationError(f"query: {error}") from error
    if len(statements) != 1:
        raise ConfigurationError(f"query: expected one statement, found {len(statements)}")
    kind = statements[0].type.name
    if kind not in _READING:
        raise ConfigurationError(
            f"query: expected a statement that reads, such as SELECT, found {kind}"
        )
    return str(statements[0].query)


def _mentions(sql: str, name: str) -> bool:
    """Return whether SQL may read the table: its name occurs. A false positive is harmless."""
    last = name.rpartition(".")[2]
    return re.search(rf"(?<!\w){re.escape(last)}(?!\w)", sql, re.IGNORECASE) is not None


def _create_view(connection: duckdb.DuckDBPyConnection, name: str, sql: str) -> None:
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted(name.rpartition('.')[0])}")
    connection.execute(f"CREATE VIEW {quoted_table(name)} AS {sql}")


def _distinct_names(given: Sequence[str]) -> list[str]:
    names: list[str] = []
    for name in given:
        candidates = (name, *(f"{name}_{number}" for number in range(1, len(given))))
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return names
