"""A stream's columns: the DDL of its configuration as values, without a JVM."""

from __future__ import annotations

import re
from dataclasses import dataclass

_SIMPLE = {
    "TEXT": "string", "VARCHAR": "string", "STRING": "string", "INT": "int", "BIGINT": "bigint", "SMALLINT": "int",
    "TINYINT": "int", "FLOAT": "float", "DOUBLE": "double", "BOOLEAN": "boolean", "DATE": "date",
    "TIMESTAMP": "timestamp", "TIMESTAMPTZ": "timestamp", "TIMESTAMPLTZ": "timestamp", "BINARY": "binary",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """One column. `type` is Spark's simple string (`bigint`, `decimal(10,2)`, `array<string>`), lower case. One that
    `rescues` is no field of a record's: it holds those that no other column is for, as JSON."""

    name: str
    type: str
    nullable: bool
    rescues: bool = False


RESCUED = Column("rescued", "string", True, rescues=True)
"""What `unknown: rescue` adds to a stream's columns."""


def parse_columns(ddl: object) -> tuple[Column, ...]:
    """Spark DDL (`a STRING NOT NULL, b INT`) -> columns. Raises ValueError with what was expected and found.

    Integers narrower than 32 bits widen to INT, which is the narrowest that Iceberg has.
    """
    import sqlglot
    from sqlglot import exp

    if not isinstance(ddl, str) or not ddl.strip():
        raise ValueError(f"expected columns such as 'id STRING NOT NULL, at TIMESTAMP', found {ddl!r}")
    try:
        parsed = sqlglot.parse_one(f"CREATE TABLE t ({ddl})", dialect="spark")
    except sqlglot.errors.SqlglotError as error:
        raise ValueError(f"expected Spark DDL, found {ddl!r} ({str(error).splitlines()[0]})") from error
    definitions = list(parsed.this.expressions) if isinstance(parsed.this, exp.Schema) else []
    columns = []
    for definition in definitions:
        if not isinstance(definition, exp.ColumnDef) or definition.args.get("kind") is None:
            raise ValueError(f"expected 'name TYPE', found {definition.sql(dialect='spark')!r}")
        name = _name(definition.name)
        required = any(
            isinstance(c.kind, exp.NotNullColumnConstraint) and not c.kind.args.get("allow_null")
            for c in definition.args.get("constraints") or []
        )
        columns.append(Column(name, _simple(definition.args["kind"]), not required))
    if not columns:
        raise ValueError(f"expected at least one column, found {ddl!r}")
    names = [c.name.lower() for c in columns]
    if repeated := {n for n in names if names.count(n) > 1}:
        raise ValueError(f"expected each column once, found {sorted(repeated)[0]!r} twice (case does not count)")
    return tuple(columns)


def _name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(f"expected a column name of letters, digits and underscores, found {name!r}")
    return name


def _simple(kind: object) -> str:
    from sqlglot import exp

    if not isinstance(kind, exp.DataType):
        raise ValueError(f"expected a type, found {kind}")
    name = kind.this.name
    inner = kind.expressions
    if name == "ARRAY":
        return f"array<{_simple(inner[0])}>"
    if name == "MAP":
        return f"map<{_simple(inner[0])},{_simple(inner[1])}>"
    if name == "STRUCT":
        fields = ",".join(f"{_name(field.name)}:{_simple(field.args['kind'])}" for field in inner)
        return f"struct<{fields}>"
    if name == "DECIMAL":
        precision, scale = [int(p.name) for p in inner] + [10, 0][len(inner) :]
        return f"decimal({precision},{scale})"
    if name not in _SIMPLE:
        known = ", ".join(sorted({*_SIMPLE.values(), "decimal", "array", "map", "struct"}))
        raise ValueError(f"expected one of the types {known}, found {kind.sql(dialect='spark')}")
    return _SIMPLE[name]
