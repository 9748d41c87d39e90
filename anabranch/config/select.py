"""`select:` of a stream's file: the table's columns, each a field of a record or computed from it.

An expression is SQL of DuckDB over the fields and Kafka's metadata. It has the same value in every
process and at any time: DuckDB's catalogue states which functions are deterministic. Functions are
refused whose work or result is not bounded by the size of the record, since one record must not
stop a job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from anabranch.config.base import repeated_name
from anabranch.config.columns import RESCUED, Column, parse_columns
from anabranch.config.plain import NAME

if TYPE_CHECKING:
    import duckdb

Kind = Literal["field", "sql", "hash", "truncate", "kafka", "header"]

KAFKA: Mapping[str, str] = {
    "key": "binary",
    "headers": "array<struct<key:string,value:binary>>",
    "topic": "string",
}
"""The values of `kafka`, with the types of their columns."""

KAFKA_NAMES: Mapping[str, str] = {
    "kafka_key": "binary",
    "kafka_topic": "string",
    "kafka_partition": "int",
    "kafka_offset": "bigint",
    "kafka_timestamp": "timestamp",
    "kafka_headers": "map<string,binary>",
}
"""Kafka's metadata in expressions, with their types."""

# DuckDB's catalogue calls the first line deterministic. In the others, a number in the record or a
# product of two lengths determines the work. The last line takes any aggregate, some by chance.
_REFUSED = """
    age current_localtime current_localtimestamp
    repeat lpad rpad range generate_series list_resize array_resize bar printf format bitstring
    to_base reduce list_reduce array_reduce levenshtein damerau_levenshtein editdist3 jaccard
    jaro_similarity jaro_winkler_similarity
    list_aggr list_aggregate array_aggr array_aggregate aggregate
"""
REFUSED_FUNCTIONS = frozenset(re.findall(r"\w+", _REFUSED))
"""Functions that an expression may not call, although DuckDB calls them deterministic."""

_MACROS = frozenset({"nullif", "split_part", "if", "fdiv", "fmod", "days_in_month", "date_add"})
_EXPRESSIONS = "BETWEEN CASE CAST COLLATE COMPARISON CONJUNCTION CONSTANT LAMBDA OPERATOR TYPE"
_NODES = frozenset(re.findall(r"\w+", _EXPRESSIONS))
_UNITS = ("day", "hour", "minute", "second")
_INTEGERS = frozenset(
    f"{sign}{size}INT" for sign in ("", "U") for size in ("TINY", "SMALL", "BIG", "HUGE")
) | {"INTEGER", "UINTEGER"}
# Types with one text for each value.
_HASHED = _INTEGERS | {"VARCHAR", "BLOB", "DATE", "BOOLEAN"}
_TIMES = frozenset({"TIMESTAMP", "TIMESTAMP_S", "TIMESTAMP_MS", "TIMESTAMP_NS"})
_EXACT_CONVERSIONS = {
    "INTEGER": _INTEGERS,
    "BIGINT": _INTEGERS,
    "DOUBLE": frozenset({"FLOAT"}),
    "VARCHAR": frozenset({"JSON"}),
    "TIMESTAMP WITH TIME ZONE": _TIMES,
}
"""Types that are converted to the declared type: exactly, or the record is a dead letter."""


@dataclass(frozen=True)
class SelectedColumn:
    """A column of the table.

    `sql` is SQL of DuckDB over the fields and `KAFKA_NAMES`, of the column's type; for `hash`, the
    text or bytes to hash; for `header`, the header's name; for `field`, the field. `fields` are the
    fields that it reads. `masks`: the column is hashed with the configured secret. `source` is the
    file's definition of the column, as JSON.
    """

    name: str
    kind: Kind
    sql: str
    fields: tuple[str, ...]
    type: str
    nullable: bool
    source: str = ""

    @property
    def masks(self) -> bool:
        return self.kind == "hash"

    @property
    def column(self) -> Column:
        return Column(self.name, self.type, self.nullable)


def parse_select(value: object, fields: Sequence[Column]) -> tuple[SelectedColumn, ...]:
    """Parse `select` of a file into the table's columns; records have these `fields`. Raises
    ValueError with the column, what was expected and what was found."""
    if not isinstance(value, list) or not value:
        raise ValueError(
            "expected a list of columns, such as [event_id, {player: player_id}], found "
            f"{value!r}"
        )
    record = _Record(fields)
    selected = []
    for item in value:
        name, source = (item, item) if isinstance(item, str) else _named(item)
        if not NAME.fullmatch(name):
            raise ValueError(
                f"expected a column name of letters, digits and underscores, found {name!r}"
            )
        try:
            kind, sql, used, column = _parse(name, source, record)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        definition = json.dumps(source, sort_keys=True)
        selected.append(
            SelectedColumn(name, kind, sql, used, column.type, column.nullable, definition)
        )
    if repeated := repeated_name(s.name for s in selected):
        raise ValueError(
            f"expected each column once, found {repeated!r} twice (case does not count)"
        )
    if any(s.name.lower() == RESCUED.name for s in selected):
        raise ValueError(f"expected names other than {RESCUED.name}, found it")
    return tuple(selected)


_SETTINGS = {
    # Times without a zone are in UTC on every machine.
    "TimeZone": "UTC",
    # Expressions over a batch of records need little; more is an error of a record.
    "memory_limit": "1GB",
    "temp_directory": "",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "enable_external_access": "false",
    "lock_configuration": "true",
}

_Parsed = tuple[Kind, str, tuple[str, ...], Column]


class _Record:
    """A record's fields and Kafka's metadata, as expressions see them."""

    def __init__(self, fields: Sequence[Column]) -> None:
        self.fields = {column.name: column for column in fields}
        self._names = {name.lower(): name for name in self.fields}

    def parse(self, text: object) -> tuple[str, tuple[str, ...], str]:
        """Return an expression in brackets, its fields, and DuckDB's type. Raises ValueError."""
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"expected an expression of SQL, found {text!r}")
        # A field's name alone may be a word of SQL.
        if (field := self._names.get(text.strip().lower())) is not None:
            text = f'"{field}"'
        # In brackets with a line of their own, neither a comment nor a second expression ends them.
        sql = f"({text}\n)"
        parsed = connection().execute("SELECT json_serialize_sql(?)", [f"SELECT {sql}"])
        tree = json.loads(parsed.fetchall()[0][0])
        if tree["error"]:
            raise ValueError(
                f"expected an expression of SQL, found {text!r} ({tree['error_message']}; a name "
                "that is a word of SQL needs double quotes)"
            )
        nodes = [s["node"] for s in tree["statements"]]
        if len(nodes) != 1 or len(nodes[0].get("select_list", ())) != 1:
            raise ValueError(f"expected one expression, found {text!r}")
        used = dict.fromkeys(self._used(nodes[0]["select_list"], frozenset()))
        kind = self._type(sql)
        return sql, tuple(name for name in used if name in self.fields), kind

    def _type(self, sql: str) -> str:
        import duckdb

        known = {c.name: c.type for c in self.fields.values()} | dict(KAFKA_NAMES)
        record = ", ".join(f'NULL::{duckdb_type(kind)} AS "{name}"' for name, kind in known.items())
        try:
            bound = connection().sql(f"SELECT {sql} FROM (SELECT {record})")
        except duckdb.Error as error:
            raise ValueError(f"expected an expression over the record, found: {error}") from None
        return str(bound.types[0])

    def _used(self, node: Any, parameters: frozenset[str]) -> Iterator[str]:
        """Yield the names that an expression reads. Raises ValueError for anything that is not a
        deterministic function of one record."""
        if isinstance(node, list):
            for one in node:
                yield from self._used(one, parameters)
            return
        if not isinstance(node, dict):
            return
        kind = node.get("class")
        if kind == "COLUMN_REF":
            name = node["column_names"][0].lower()
            if name in parameters:
                return
            if name not in self._names and name not in KAFKA_NAMES:
                raise ValueError(
                    f"expected a field of the schema or one of {', '.join(KAFKA_NAMES)}, found "
                    f"{node['column_names'][0]!r}"
                )
            yield self._names.get(name, name)
            return
        if kind == "FUNCTION":
            if (name := node["function_name"].lower()) not in functions():
                raise ValueError(
                    "expected functions with one value for a record, whose work its size bounds, "
                    f"found {name!r}"
                )
        elif kind == "LAMBDA" and node["syntax_type"] == "LAMBDA_KEYWORD":
            # `a -> b` is parsed as a lambda too, and is JSON's arrow: its names are fields.
            parameters |= {*_parameters(node["lhs"])}
        elif kind is not None and kind not in _NODES:
            raise ValueError(f"expected an expression over one record, found {kind.lower()}")
        for inner in node.values():
            yield from self._used(inner, parameters)


def _parameters(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for one in node:
            yield from _parameters(one)
    elif isinstance(node, dict):
        if node.get("class") == "COLUMN_REF":
            yield node["column_names"][0].lower()
        for inner in node.values():
            yield from _parameters(inner)


@lru_cache(maxsize=1)
def _database() -> duckdb.DuckDBPyConnection:
    import duckdb

    database = duckdb.connect(config={"threads": 1, "python_enable_replacements": False})
    for name, value in _SETTINGS.items():
        database.execute(f"SET GLOBAL {name} = '{value}'")
    return database


def connection() -> duckdb.DuckDBPyConnection:
    """Return a connection for expressions: without access to files, in UTC."""
    return _database().cursor()


@lru_cache(maxsize=1)
def functions() -> frozenset[str]:
    """Return the functions and operators that an expression may call: the scalar ones that DuckDB
    calls deterministic, without `REFUSED_FUNCTIONS`."""
    rows = connection().execute(
        "SELECT function_name, function_type, stability FROM duckdb_functions()"
    )
    allowed, refused = set[str](), set(REFUSED_FUNCTIONS)
    for name, kind, stability in rows.fetchall():
        if kind == "macro":
            # DuckDB states no stability of macros; those of its system tables read settings.
            if name.startswith(("list_", "array_", "map_contains")) or name in _MACROS:
                allowed.add(name)
        elif kind == "scalar" and stability == "CONSISTENT" and not name.startswith("__internal"):
            allowed.add(name)
        else:
            refused.add(name)
    return frozenset(allowed - refused)


def duckdb_type(kind: str) -> str:
    """Return DuckDB's name of a column's type."""
    import sqlglot

    return str(sqlglot.exp.DataType.build(kind, dialect="spark").sql(dialect="duckdb"))


def _named(item: object) -> tuple[str, Any]:
    if not isinstance(item, dict) or len(item) != 1:
        raise ValueError(
            f"expected a name, or one name with what the column is made of, found {item!r}"
        )
    [(name, source)] = item.items()
    return str(name), source


def _parse(name: str, source: object, record: _Record) -> _Parsed:
    if isinstance(source, str):
        if source not in record.fields:
            raise ValueError(
                f"expected a field of the schema, found {source!r}; an expression is {{sql: …, "
                "type: …}"
            )
        return "field", source, (source,), record.fields[source]
    if not isinstance(source, dict):
        raise ValueError(f"expected a field's name or a mapping, found {source!r}")
    kinds = [kind for kind in ("sql", "hash", "truncate", "kafka", "header") if kind in source]
    if len(kinds) != 1:
        raise ValueError(
            "expected one of sql, hash, truncate, kafka and header, found "
            f"{', '.join(source) or 'none'}"
        )
    more = {"sql": {"type"}, "truncate": {"to"}, "kafka": {"type"}}.get(kinds[0], set())
    if other := sorted({*source} - {kinds[0]} - more):
        raise ValueError(f"expected {', '.join([kinds[0], *sorted(more)])}, found {other[0]!r}")
    match kinds[0]:
        case "sql":
            return _parse_sql(name, source, record)
        case "hash":
            return _parse_hash(name, source["hash"], record)
        case "truncate":
            return _parse_truncate(name, source, record)
        case "kafka":
            return _parse_kafka(name, source)
        case _:
            return _parse_header(name, source["header"])


def _parse_sql(name: str, source: Mapping[str, Any], record: _Record) -> _Parsed:
    sql, used, found = record.parse(source["sql"])
    kind = source.get("type")
    try:
        [column] = parse_columns(f"{name} {kind}")
    except ValueError as error:
        raise ValueError(f"type: {error}") from None
    if not column.nullable:
        raise ValueError(f"type: expected a type without NOT NULL, found {kind!r}")
    declared = duckdb_type(column.type)
    expected = str(connection().sql(f"SELECT NULL::{declared}").types[0])
    if found != expected and found not in _EXACT_CONVERSIONS.get(expected, ()):
        raise ValueError(
            f"expected an expression of type {column.type.upper()}, found {found}; change its "
            f"type, or convert it: CAST(... AS {declared})"
        )
    return "sql", f"{sql}::{declared}", used, column


def _parse_hash(name: str, text: object, record: _Record) -> _Parsed:
    sql, used, found = record.parse(text)
    if found not in _HASHED:
        raise ValueError(
            f"hash: expected a STRING, BINARY, INT, BIGINT, DATE or BOOLEAN, found {found}"
        )
    return "hash", sql if found == "BLOB" else f"{sql}::VARCHAR", used, Column(name, "string", True)


def _parse_truncate(name: str, source: Mapping[str, Any], record: _Record) -> _Parsed:
    sql, used, found = record.parse(source["truncate"])
    to = source.get("to")
    if found == "VARCHAR" and isinstance(to, int) and not isinstance(to, bool):
        if not 0 < to < 2**31:
            raise ValueError(f"to: expected a number of characters, found {to!r}")
        return "truncate", f"substring({sql}, 1, {to})", used, Column(name, "string", True)
    if found not in _TIMES | {"TIMESTAMP WITH TIME ZONE"} or to not in _UNITS:
        raise ValueError(
            "to: expected a number of characters of a STRING, or for a TIMESTAMP one of "
            f"{', '.join(_UNITS)}, found {to!r} for {found}"
        )
    truncated = f"date_trunc('{to}', {sql})::TIMESTAMPTZ"
    return "truncate", truncated, used, Column(name, "timestamp", True)


def _parse_kafka(name: str, source: Mapping[str, Any]) -> _Parsed:
    what, kind = source["kafka"], source.get("type")
    if what not in KAFKA:
        raise ValueError(f"kafka: expected one of {', '.join(KAFKA)}, found {what!r}")
    if kind is not None and (what != "key" or str(kind).lower() not in ("string", "binary")):
        raise ValueError(f"type: expected none, or STRING or BINARY of the key, found {kind!r}")
    type = "string" if str(kind).lower() == "string" else KAFKA[what]
    return "kafka", what, (), Column(name, type, True)


def _parse_header(name: str, header: object) -> _Parsed:
    if not isinstance(header, str) or not header:
        raise ValueError(f"header: expected the name of a header, found {header!r}")
    return "header", header, (), Column(name, "string", True)
