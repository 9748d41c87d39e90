"""A stream's columns: the DDL of its configuration, parsed without a JVM."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sqlglot.exp import DataType

_SIMPLE = {
    "TEXT": "string",
    "VARCHAR": "string",
    "STRING": "string",
    "INT": "int",
    "BIGINT": "bigint",
    "SMALLINT": "int",
    "TINYINT": "int",
    "FLOAT": "float",
    "DOUBLE": "double",
    "BOOLEAN": "boolean",
    "DATE": "date",
    "TIMESTAMP": "timestamp",
    "TIMESTAMPTZ": "timestamp",
    "TIMESTAMPLTZ": "timestamp",
    "BINARY": "binary",
}
_TYPES = sorted({*_SIMPLE, "DECIMAL", "ARRAY", "MAP", "STRUCT"})
_WORDS = frozenset(
    (*_TYPES, "NUMERIC", "DEC", "INTEGER", "LONG", "SHORT", "BYTE", "REAL", "BOOL", "NOT", "NULL")
)
_TYPE_WORDS = re.compile("(?:^|(?<=[<,:]))[a-z]+(?=[<(,>]|$)")
_NO_NAMES = re.compile("(?<=[<,])(not|select)(?=:)", re.IGNORECASE)
NO_COLUMNS = "expected columns such as 'id STRING NOT NULL, at TIMESTAMP'"
MOST_DIGITS = 38
"""Maximum precision of a DECIMAL in Iceberg and Spark."""

ROW = ""
"""The first name in the path of a field of a change's row, with Debezium's envelope. No field that
a file names is empty."""


@dataclass(frozen=True)
class Notation:
    """How a column's values are written, at every level; empty: as the format does.

    `unit`: TIMESTAMPs are numbers of seconds, millis, micros or nanos, DATEs of days, since 1970.
    `pattern`: times are text of this form (`anabranch.config.schema`). `decimal`: numbers may
    be text with this decimal sign; `base64`: DECIMALs are Base64 of the unscaled number's bytes,
    big-endian.
    """

    unit: str = ""
    pattern: str = ""
    decimal: str = ""


@dataclass(frozen=True)
class Column:
    """One column. `type` is Spark's simple string (`bigint`, `decimal(10,2)`, `array<string>`),
    lower case. A column that `rescues` has, as JSON, a record's fields that have no column.
    `path`: the names that lead to its field in a record, if not its own name."""

    name: str
    type: str
    nullable: bool
    rescues: bool = False
    path: tuple[str, ...] = ()
    notation: Notation = Notation()

    @property
    def field(self) -> tuple[str, ...]:
        """The names that lead to the column's field in a record."""
        return self.path or (self.name,)

    @property
    def definition(self) -> object:
        """The column's field and notation as plain data; its name if the file has no more."""
        if not self.path and self.notation == Notation():
            return self.name
        written = {key: value for key, value in vars(self.notation).items() if value}
        return {"from": list(self.field), **written}


RESCUED = Column("rescued", "string", True, rescues=True)
"""The column that `unknown: rescue` adds to a stream."""


def parse_columns(ddl: object) -> tuple[Column, ...]:
    """Parse Spark DDL (`a STRING NOT NULL, b INT`). Raises ValueError with what was expected and
    found.

    Integers narrower than 32 bits become INT, the narrowest integer type of Iceberg.
    """
    if not isinstance(ddl, str) or not ddl.strip():
        raise ValueError(f"{NO_COLUMNS}, found {ddl!r}")
    return _parse(ddl)


# The streams of a family share their columns.
@lru_cache(1_000)
def _parse(ddl: str) -> tuple[Column, ...]:
    import sqlglot
    from sqlglot import exp

    try:
        parsed = sqlglot.parse_one(f"CREATE TABLE t ({ddl})", dialect="spark")
    except sqlglot.errors.SqlglotError as error:
        raise ValueError(
            _explain(ddl) or f"expected Spark DDL, found {ddl!r} ({str(error).splitlines()[0]})"
        ) from None
    definitions = list(parsed.this.expressions) if isinstance(parsed.this, exp.Schema) else []
    columns = []
    for definition in definitions:
        if not isinstance(definition, exp.ColumnDef) or definition.args.get("kind") is None:
            raise ValueError(f"expected 'name TYPE', found {definition.sql(dialect='spark')!r}")
        name = column_name(definition.name)
        required = any(
            isinstance(c.kind, exp.NotNullColumnConstraint) and not c.kind.args.get("allow_null")
            for c in definition.args.get("constraints") or []
        )
        try:
            columns.append(Column(name, _simple(definition.args["kind"]), not required))
        except ValueError as error:
            raise ValueError(f"column {name}: {error}") from None
    if not columns:
        raise ValueError(f"expected at least one column, found {ddl!r}")
    _require_once("column", [column.name for column in columns])
    return tuple(columns)


def _require_once(what: str, names: Iterable[str]) -> None:
    repeated = [name for name, count in Counter(map(str.lower, names)).items() if count > 1]
    if repeated:
        raise ValueError(
            f"expected each {what} once, found {min(repeated)!r} twice (case does not count)"
        )


def require_column(
    key: str, columns: Iterable[Column], name: str, types: Collection[str] = (), use: str = ""
) -> Column:
    """Return the column that a key names, of one of `types` (all, if empty), written without the
    digits of a DECIMAL. Raises ValueError, which adds `use` to the types."""
    column = next((column for column in columns if column.name == name), None)
    if column is None:
        raise ValueError(f"{key}: expected a column of the schema, found {name!r}")
    if types and column.type.partition("(")[0] not in types:
        expected = f"a column of type {', '.join(types).upper()}{use}"
        raise ValueError(f"{key}: expected {expected}, found {name} {column.type.upper()}")
    return column


def columns_ddl(columns: Iterable[Column]) -> str:
    """Return the columns as Spark DDL. Pure."""
    return ", ".join(f"{column.name} {type_ddl(column)}" for column in columns)


def type_ddl(column: Column) -> str:
    """Return a column's type as in Spark DDL."""
    # Field names in a STRUCT keep their case; two are no names of DDL.
    kind = _NO_NAMES.sub(r"`\1`", _TYPE_WORDS.sub(lambda word: word[0].upper(), column.type))
    return kind if column.nullable else f"{kind} NOT NULL"


def _explain(ddl: str) -> str | None:
    """Return a message with a misspelt type's column and the closest type; else None."""
    for column in _split(ddl):
        name, _, kind = column.strip().replace("`", "").partition(" ")
        # Field names in a STRUCT precede a colon.
        for word in re.findall(r"[A-Za-z_]\w*(?!\w|\s*:)", kind.partition("COMMENT")[0]):
            if word.upper() not in _WORDS and (near := get_close_matches(word.upper(), _TYPES, 1)):
                return f"column {name}: unknown type {word!r}, did you mean {near[0]}?"
    return None


def parts_of(kind: str) -> tuple[str, list[str]]:
    """Return the name and the parts of a column's type (`Column.type`): `map<string,int>` is map,
    of string and int; the parts of a struct are `name:type`."""
    match = re.fullmatch(r"(\w+)(?:[<(](.*)[>)])?", kind)
    assert match is not None, kind
    return match[1], _split(match[2]) if match[2] else []


def _split(ddl: str) -> list[str]:
    """Split DDL, or the parts of a type, at the commas outside of brackets."""
    columns, depth = [""], 0
    for character in ddl:
        depth += (character in "<(") - (character in ">)")
        if character == "," and depth == 0:
            columns.append("")
        else:
            columns[-1] += character
    return columns


def column_name(name: str) -> str:
    """Raises ValueError for a name that no column can have."""
    try:
        return _name(name)
    except ValueError as error:
        example = f"{{type: TYPE, from: {name!r}}}"
        raise ValueError(f"{error}; choose one, and read the field by `{example}`") from None


def _name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError(
            f"expected a column name of letters, digits and underscores, found {name!r}"
        )
    return name


def _simple(kind: object) -> str:
    from sqlglot import exp

    if not isinstance(kind, exp.DataType):
        raise ValueError(f"expected a type, found {kind}")
    name = kind.this.name
    inner = kind.expressions
    if name == "ARRAY":
        if len(inner) != 1:
            raise _refused("ARRAY<TYPE>", kind)
        return f"array<{_simple(inner[0])}>"
    if name == "MAP":
        if len(inner) != 2:
            raise _refused("MAP<TYPE, TYPE>", kind)
        return f"map<{_simple(inner[0])},{_simple(inner[1])}>"
    if name == "STRUCT":
        if not inner:
            raise _refused("STRUCT<name: TYPE, ...>", kind)
        # Spark's SQL names neither of two.
        _require_once("field of a STRUCT", [field.name for field in inner])
        fields = ",".join(f"{_name(field.name)}:{_simple(field.args['kind'])}" for field in inner)
        return f"struct<{fields}>"
    if name == "DECIMAL":
        return _decimal(kind)
    if name not in _SIMPLE:
        known = ", ".join(sorted({*_SIMPLE.values(), "decimal", "array", "map", "struct"}))
        raise _refused(f"one of the types {known}", kind)
    return _SIMPLE[name]


def _decimal(kind: DataType) -> str:
    parameters = [parameter.name for parameter in kind.expressions]
    if len(parameters) <= 2 and all(text.isdecimal() for text in parameters):
        precision, scale = [int(text) for text in parameters] + [10, 0][len(parameters) :]
        if 1 <= precision <= MOST_DIGITS and 0 <= scale <= precision:
            return f"decimal({precision},{scale})"
    raise _refused(f"DECIMAL(p,s) with p from 1 to {MOST_DIGITS} and s from 0 to p", kind)


def _refused(expected: str, kind: DataType) -> ValueError:
    return ValueError(f"expected {expected}, found {kind.sql(dialect='spark')}")
