"""Query: an analyst's SQL over the serving tables, with DuckDB and nothing downloaded.

No table holds a delete file, so the planned data files are the table: they are given to DuckDB as a PyArrow dataset,
which keeps projection and filter push-down, and read through the table's own file system and credentials.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from anabranch.errors import AnabranchError, ConfigurationError, Transient
from anabranch.table.snapshots import find_snapshot
from serving_layer.query.datasets import columns_only, connected, dataset, is_reading_failure, quoted

if TYPE_CHECKING:
    from pyiceberg.table import Table

_READING = frozenset({"SELECT", "EXPLAIN", "MULTI"})  # MULTI is what PIVOT becomes
_BUILT_IN = frozenset({"memory", "system", "temp"})  # DuckDB's own catalogs


def run_query(sql: str, tables: Mapping[str, Table], *, catalog: str = "lake", at: str | None = None) -> pa.Table:
    """Run one reading statement over `tables` (`schema.table` -> table) and return its whole result.

    A table is known to the SQL as `schema.table` and as `catalog.schema.table`; only tables that the SQL mentions are
    taken from the mapping, so it may load them lazily. Each is read at the snapshot that its object holds, or at the
    tag, branch or snapshot id that `at` names, which each table of the SQL then must have. Times are aware UTC. The SQL
    reaches no file, no network and no setting, and what it writes is refused. A column name that comes twice gets a
    number (`id`, `id_1`).

    Raises ConfigurationError for SQL that DuckDB does not accept (with its message) and for an `at` that a table lacks,
    Refused for a table that has delete files, Transient when a data file could not be read, and what loading a table
    raises; all that only for tables that the SQL reads.
    """
    with _session(catalog) as connection:
        statement = _single_reading(connection, sql)
        mentioned = [name for name in tables if _mentions(sql, name)]
        absent: dict[str, AnabranchError] = {}
        for name in mentioned or tables:
            try:
                table = tables[name]
                snapshot_id = find_snapshot(table, at) if at is not None and mentioned else None
                source = dataset(name, table, snapshot_id) if mentioned else columns_only(table)
            except AnabranchError as error:
                # Such as another stream's, that is not applied yet: whether the SQL needs it, DuckDB will say.
                absent[name] = error
                continue
            _register(connection, catalog, name, source)
        _lock(connection)
        try:
            return _distinctly_named(connection.sql(statement).to_arrow_table())
        except duckdb.Error as error:
            if is_reading_failure(error):
                raise Transient(f"query: expected to read every data file, found: {error} (run it again)") from error
            if isinstance(error, duckdb.CatalogException):
                lacking = str(error).partition(" does not exist")[0]
                for name, why in absent.items():
                    if _mentions(lacking, name):
                        raise why from error
            known = ", ".join(sorted(tables)) or "none"
            hint = f"\nknown tables: {known}" if isinstance(error, duckdb.CatalogException) else ""
            raise ConfigurationError(f"query: {error}{hint}") from error


@contextmanager
def _session(catalog: str) -> Iterator[duckdb.DuckDBPyConnection]:
    with connected() as connection:
        if catalog.lower() not in _BUILT_IN:
            connection.execute(f"ATTACH ':memory:' AS {quoted(catalog)}")
            connection.execute(f"USE {quoted(catalog)}")
        yield connection


def _lock(connection: duckdb.DuckDBPyConnection) -> None:
    """From here on the SQL decides: no file, network, extension or Python variable is within its reach."""
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
        raise ConfigurationError(f"query: expected a statement that reads, such as SELECT, found {kind}")
    return str(statements[0].query)


def _mentions(sql: str, name: str) -> bool:
    """Whether the SQL may read the table: its last name stands there as a word. To say yes too often is harmless."""
    last = name.rpartition(".")[2]
    return re.search(rf"(?<!\w){re.escape(last)}(?!\w)", sql, re.IGNORECASE) is not None


def _register(connection: duckdb.DuckDBPyConnection, catalog: str, name: str, dataset: ds.Dataset) -> None:
    schema, _, table = name.rpartition(".")
    connection.register(name, dataset)  # as one identifier with a dot in it, where nobody else looks
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS {quoted(schema)}")
    connection.execute(f"CREATE VIEW {quoted(schema)}.{quoted(table)} AS SELECT * FROM temp.main.{quoted(name)}")


def _distinctly_named(result: pa.Table) -> pa.Table:
    names: list[str] = []
    for name in result.column_names:
        candidates = (name, *(f"{name}_{number}" for number in range(1, len(result.column_names))))
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return result.rename_columns(names)
