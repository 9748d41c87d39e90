"""Query: an analyst's SQL over the serving tables, with DuckDB and nothing downloaded.

No table holds a delete file, so the planned data files are the table: they are given to DuckDB as a PyArrow dataset,
which keeps projection and filter push-down, and read through the table's own file system and credentials.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from anabranch.errors import ConfigurationError, Refused, Transient

if TYPE_CHECKING:
    from pyiceberg.table import FileScanTask, Table

_READING = frozenset({"SELECT", "EXPLAIN", "MULTI"})  # MULTI is what PIVOT becomes
_SECONDS = {"hour": 3600, "day": 86400}
_BUILT_IN = frozenset({"memory", "system", "temp"})  # DuckDB's own catalogs


def run_query(sql: str, tables: Mapping[str, Table], *, catalog: str = "lake") -> pa.Table:
    """Run one reading statement over `tables` (`schema.table` -> table) and return its whole result.

    A table is known to the SQL as `schema.table` and as `catalog.schema.table`; only tables that the SQL mentions are
    taken from the mapping, so it may load them lazily. Each is read at the snapshot that its object holds. Times are
    aware UTC. The SQL reaches no file, no network and no setting, and what it writes is refused. A column name that
    comes twice gets a number (`id`, `id_1`).

    Raises ConfigurationError for SQL that DuckDB does not accept (with its message), Refused for a table that has
    delete files, Transient when a data file could not be read.
    """
    with _session(catalog) as connection:
        statement = _single_reading(connection, sql)
        mentioned = [name for name in tables if _mentions(sql, name)]
        for name in mentioned or tables:
            table = tables[name]
            _register(connection, catalog, name, _dataset(name, table) if mentioned else _columns_only(table))
        _lock(connection)
        try:
            return _distinctly_named(connection.sql(statement).to_arrow_table())
        except duckdb.Error as error:
            if _is_reading_failure(error):
                raise Transient(f"query: expected to read every data file, found: {error} (run it again)") from error
            known = ", ".join(sorted(tables)) or "none"
            hint = f"\nknown tables: {known}" if isinstance(error, duckdb.CatalogException) else ""
            raise ConfigurationError(f"query: {error}{hint}") from error


@contextmanager
def _session(catalog: str) -> Iterator[duckdb.DuckDBPyConnection]:
    with tempfile.TemporaryDirectory(prefix="anabranch-query-") as folder:
        connection = duckdb.connect(":memory:")
        try:
            connection.execute("SET TimeZone = 'UTC'")
            connection.execute(f"SET temp_directory = '{folder}'")  # larger than memory: spill here, gone afterwards
            if catalog.lower() not in _BUILT_IN:
                connection.execute(f"ATTACH ':memory:' AS {_quoted(catalog)}")
                connection.execute(f"USE {_quoted(catalog)}")
            yield connection
        finally:
            connection.close()


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
    connection.execute(f"CREATE SCHEMA IF NOT EXISTS {_quoted(schema)}")
    connection.execute(f"CREATE VIEW {_quoted(schema)}.{_quoted(table)} AS SELECT * FROM temp.main.{_quoted(name)}")


def _quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


def _columns_only(table: Table) -> ds.Dataset:
    return ds.dataset(table.schema().as_arrow().empty_table())


def _dataset(name: str, table: Table) -> ds.Dataset:
    """The table's files as one dataset of its current columns: a column that a file lacks is null, types widen."""
    try:
        tasks = list(table.scan().plan_files())
    except OSError as error:
        raise Transient(f"query: expected the manifests of {name}, found: {error} (run it again)") from error
    if with_deletes := [task.file.file_path for task in tasks if task.delete_files]:
        raise Refused(
            f"query: expected {name} to hold no delete files, found some for {with_deletes[0]}; "
            "only another writer adds them: read the table with an Iceberg engine, then rewrite its files"
        )
    if not tasks:
        return _columns_only(table)
    if not _readable_by_name(table):
        # PyIceberg reads by field id: right for a renamed column too, but the whole table goes through memory.
        return ds.dataset(table.scan().to_arrow())
    columns = table.schema().as_arrow()
    file_io: Any = table.io
    schemes = {file_io.parse_location(task.file.file_path, file_io.properties)[:2] for task in tasks}
    if len(schemes) != 1:
        raise Refused(f"query: expected the files of {name} in one place, found {sorted(map('://'.join, schemes))}")
    file_system = file_io.fs_by_scheme(*schemes.pop())
    parquet = ds.ParquetFileFormat()
    fragments = [
        parquet.make_fragment(
            file_io.parse_location(task.file.file_path, file_io.properties)[2],
            file_system,
            partition_expression=_known_of(table, task, columns),
            file_size=task.file.file_size_in_bytes,  # spares a request for each file
        )
        for task in tasks
    ]
    return ds.FileSystemDataset(fragments, columns, parquet, file_system)


def _readable_by_name(table: Table) -> bool:
    """Whether every column, nested ones too, has kept one name and one field id over all of the table's schemas."""
    pairs = {
        (schema.find_field(column).field_id, column)
        for schema in table.schemas().values()
        for column in schema.column_names
    }
    return len({field_id for field_id, _ in pairs}) == len(pairs) == len({column for _, column in pairs})


def _known_of(table: Table, task: FileScanTask, columns: pa.Schema) -> pc.Expression | None:
    """What the file's partition says of its rows, so that a filter skips the file without opening it."""
    spec = table.specs()[task.file.spec_id]
    known = None
    for position, field in enumerate(spec.fields):
        value = task.file.partition[position]
        column = table.schema().find_column_name(field.source_id)
        if value is None or column is None or column not in columns.names:
            continue
        kind, transform = columns.field(column).type, str(field.transform)
        if transform == "identity":
            says = pc.field(column) == pa.scalar(value, kind)
        elif transform in _SECONDS and pa.types.is_timestamp(kind):
            micros = _SECONDS[transform] * 1_000_000
            start, end = pa.scalar(value * micros, kind), pa.scalar((value + 1) * micros, kind)
            says = (pc.field(column) >= start) & (pc.field(column) < end)
        else:
            continue
        known = says if known is None else known & says
    return known


def _distinctly_named(result: pa.Table) -> pa.Table:
    names: list[str] = []
    for name in result.column_names:
        candidates = (name, *(f"{name}_{number}" for number in range(1, len(result.column_names))))
        names.append(next(candidate for candidate in candidates if candidate not in names))
    return result.rename_columns(names)


def _is_reading_failure(error: duckdb.Error) -> bool:
    """DuckDB wraps what PyArrow raises while the rows flow; its text is all that is left of it."""
    return isinstance(error, duckdb.IOException) or "reading the stream registered as" in str(error).partition("\n")[0]
