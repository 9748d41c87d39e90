"""`select:` of a stream's file: the table's columns, computed from a record. Independent of the
JVM.

An expression is Spark SQL with the functions below. All of them are deterministic and raise no
error for any value with ANSI mode off: a record must not stop a job. Excluded are regular
expressions, which can exhaust the stack; functions whose result grows with a number in a record or
with the product of two lengths; date arithmetic, which overflows; and functions of the current
time. `anabranch.records.selected` checks expressions that depend on types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from anabranch.config.base import repeated_name
from anabranch.config.columns import RESCUED, Column, parse_columns
from anabranch.config.plain import NAME

if TYPE_CHECKING:
    from sqlglot.tokens import Token

Kind = Literal["field", "sql", "hash", "truncate", "kafka", "header"]

_FUNCTIONS = """
    lower upper initcap trim ltrim rtrim btrim length char_length character_length octet_length
    bit_length substring substr left right concat concat_ws translate reverse instr locate position
    startswith endswith contains ascii
    md5 sha sha1 sha2 crc32 xxhash64 hash base64 hex unhex
    coalesce nullif nvl nvl2 ifnull if isnull isnotnull isnan nanvl greatest least
    abs sign signum floor ceil ceiling round bround sqrt cbrt exp ln log10 log2 pow power mod pmod
    degrees radians array_size array_contains array_join map_contains_key get
    unix_seconds unix_millis unix_micros unix_date date_trunc year quarter month day
    dayofmonth dayofweek weekday dayofyear weekofyear hour minute second datediff last_day
"""
FUNCTIONS = frozenset(re.findall(r"\w+", _FUNCTIONS))
"""The functions that an expression may call."""

KAFKA: Mapping[str, str] = {
    "key": "binary",
    "headers": "array<struct<key:string,value:binary>>",
    "topic": "string",
}
"""The values of `kafka`, with the types of their columns."""

_NAMES = ("kafka_key", "kafka_topic", "kafka_partition", "kafka_offset", "kafka_timestamp")
_WORDS = frozenset(
    re.split(" ", "AND OR NOT IS NULL TRUE FALSE IN BETWEEN CASE WHEN THEN ELSE END DIV")
)
_CASTS = ("CAST", "TRY_CAST")
_CASES = ("LOWER", "UPPER")
_CAST_TYPES = frozenset(
    re.split(" ", "STRING INT INTEGER BIGINT LONG FLOAT DOUBLE BOOLEAN DATE BINARY DECIMAL")
)
_MARKS = frozenset(re.split(" ", "( ) [ ] , . + - * / % = == != <> < > <= >= <=> || &"))
_UNITS = ("day", "hour", "minute", "second")
_SIMPLE = re.compile(
    r"(string|int|bigint|float|double|boolean|date|timestamp|binary|decimal\(\d+,\d+\))"
)


@dataclass(frozen=True)
class SelectedColumn:
    """A column of the table.

    `sql` is Spark SQL over a record's Kafka metadata and its fields as `_row_<field>`; in
    expressions, timestamps and dates are `_at_<field>`, null outside the calendar. For `hash` it
    gives the bytes to hash. `fields` are the fields that it reads. `masks`: the column is hashed
    with the configured secret. `is_checked`: Spark checks whether the expression has the
    declared type. `source` is the file's definition of the column, as JSON.
    """

    name: str
    kind: Kind
    sql: str
    fields: tuple[str, ...]
    type: str
    nullable: bool
    is_checked: bool = False
    source: str = ""

    @property
    def masks(self) -> bool:
        return self.kind == "hash"

    @property
    def column(self) -> Column:
        return Column(self.name, self.type, self.nullable)


@dataclass(frozen=True)
class _Expression:
    sql: str
    fields: tuple[str, ...]


def parse_select(value: object, fields: Sequence[Column]) -> tuple[SelectedColumn, ...]:
    """Parse `select` of a file into the table's columns; records have these `fields`. Raises
    ValueError with the column, what was expected and what was found."""
    if not isinstance(value, list) or not value:
        raise ValueError(
            "expected a list of columns, such as [event_id, {player: player_id}], found "
            f"{value!r}"
        )
    by_name = {column.name: column for column in fields}
    selected = []
    for item in value:
        name, source = (item, item) if isinstance(item, str) else _named(item)
        if not NAME.fullmatch(name):
            raise ValueError(
                f"expected a column name of letters, digits and underscores, found {name!r}"
            )
        try:
            one = _parse(name, source, by_name)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        selected.append(replace(one, source=json.dumps(source, sort_keys=True)))
    if repeated := repeated_name(s.name for s in selected):
        raise ValueError(
            f"expected each column once, found {repeated!r} twice (case does not count)"
        )
    if any(s.name.lower() == RESCUED.name for s in selected):
        raise ValueError(f"expected names other than {RESCUED.name}, found it")
    return tuple(selected)


def _named(item: object) -> tuple[str, Any]:
    if not isinstance(item, dict) or len(item) != 1:
        raise ValueError(
            f"expected a name, or one name with what the column is made of, found {item!r}"
        )
    [(name, source)] = item.items()
    return str(name), source


def _parse(name: str, source: object, fields: Mapping[str, Column]) -> SelectedColumn:
    if isinstance(source, str):
        if source not in fields:
            raise ValueError(
                f"expected a field of the schema, found {source!r}; an expression is {{sql: …, "
                "type: …}"
            )
        field = fields[source]
        return SelectedColumn(
            name, "field", f"`_row_{source}`", (source,), field.type, field.nullable
        )
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
            return _parse_sql(name, source, fields)
        case "hash":
            return _parse_hash(name, source["hash"], fields)
        case "truncate":
            return _parse_truncate(name, source, fields)
        case "kafka":
            return _parse_kafka(name, source)
        case _:
            return _parse_header(name, source["header"])


def _parse_sql(
    name: str, source: Mapping[str, Any], fields: Mapping[str, Column]
) -> SelectedColumn:
    expression = parse_expression(source["sql"], fields)
    kind = source.get("type")
    try:
        [column] = parse_columns(f"{name} {kind}")
    except ValueError as error:
        raise ValueError(f"type: {error}") from None
    if not _SIMPLE.fullmatch(column.type) or not column.nullable:
        raise ValueError(
            f"type: expected a type without fields, elements and NOT NULL, found {kind!r}"
        )
    return SelectedColumn(
        name, "sql", f"({expression.sql})", expression.fields, column.type, True, is_checked=True
    )


def _parse_hash(name: str, text: object, fields: Mapping[str, Column]) -> SelectedColumn:
    expression = parse_expression(text, fields)
    field = _only_field(expression, fields)
    if field is not None and field.type not in (
        "string",
        "binary",
        "int",
        "bigint",
        "date",
        "boolean",
    ):
        raise ValueError(
            "hash: expected a STRING, BINARY, INT, BIGINT, DATE or BOOLEAN, found "
            f"{field.type.upper()}"
        )
    as_bytes = f"CAST(CAST(({expression.sql}) AS STRING) AS BINARY)"
    return SelectedColumn(name, "hash", as_bytes, expression.fields, "string", True)


def _parse_truncate(
    name: str, source: Mapping[str, Any], fields: Mapping[str, Column]
) -> SelectedColumn:
    text, to = source["truncate"], source.get("to")
    expression = parse_expression(text, fields)
    field = _only_field(expression, fields)
    if isinstance(to, int) and not isinstance(to, bool):
        if field is not None and field.type != "string":
            raise ValueError(
                f"to: expected one of {', '.join(_UNITS)} for a {field.type.upper()}, found {to!r}"
            )
        if not 0 < to < 2**31:
            raise ValueError(f"to: expected a number of characters, found {to!r}")
        sql = f"substring(CAST(({expression.sql}) AS STRING), 1, {to})"
        return SelectedColumn(name, "truncate", as_text(sql), expression.fields, "string", True)
    if field is None or field.type != "timestamp" or to not in _UNITS:
        raise ValueError(
            "to: expected a number of characters, or for a TIMESTAMP of the schema one of "
            f"{', '.join(_UNITS)}, found {to!r}"
        )
    sql = f"date_trunc('{to}', {expression.sql})"
    return SelectedColumn(name, "truncate", sql, expression.fields, "timestamp", True)


def _only_field(expression: _Expression, fields: Mapping[str, Column]) -> Column | None:
    """Return the field if the expression is a field's name and nothing else."""
    used = [fields[name] for name in expression.fields]
    return next((field for field in used if expression.sql.strip() == field_sql(field)), None)


def _parse_kafka(name: str, source: Mapping[str, Any]) -> SelectedColumn:
    what, kind = source["kafka"], source.get("type")
    if what not in KAFKA:
        raise ValueError(f"kafka: expected one of {', '.join(KAFKA)}, found {what!r}")
    if kind is not None and (what != "key" or str(kind).lower() not in ("string", "binary")):
        raise ValueError(f"type: expected none, or STRING or BINARY of the key, found {kind!r}")
    if what == "key" and str(kind).lower() == "string":
        return SelectedColumn(name, "kafka", as_text("kafka_key"), (), "string", True)
    return SelectedColumn(name, "kafka", f"kafka_{what}", (), KAFKA[what], True)


def _parse_header(name: str, header: object) -> SelectedColumn:
    if (
        not isinstance(header, str)
        or not header
        or "'" in header
        or "\\" in header
        or "${" in header
    ):
        raise ValueError(
            "header: expected the name of a header, without quotes and backslashes, found "
            f"{header!r}"
        )
    value = f"element_at(filter(kafka_headers, h -> h.key = '{header}'), -1).value"
    last = f"IF(exists(kafka_headers, h -> h.key = '{header}'), {value}, NULL)"
    return SelectedColumn(name, "header", as_text(last), (), "string", True)


def as_text(sql: str) -> str:
    """Return SQL that converts bytes or text to text; null if it is not UTF-8, which Parquet
    readers refuse."""
    return f"try_validate_utf8(CAST(({sql}) AS STRING))"


def parse_expression(text: object, fields: Mapping[str, Column]) -> _Expression:
    """Parse an expression and replace its fields (`field_sql`). Raises ValueError for anything but
    the allowed words, functions and names."""
    import sqlglot
    from sqlglot import exp

    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"expected an expression of Spark SQL, found {text!r}")
    if wrong := next(
        (mark for mark in ("\\", '"', "--", "/*", "${", ";", "`") if mark in text), None
    ):
        raise ValueError(f"expected an expression without {wrong!r}, found {text!r}")
    try:
        tokens = sqlglot.tokenize(text, read="spark")
        parsed = sqlglot.parse_one(text, dialect="spark")
    except sqlglot.errors.SqlglotError as error:
        found = f"{text!r} ({str(error).splitlines()[0]})"
        raise ValueError(f"expected an expression of Spark SQL, found {found}") from None
    if not isinstance(parsed, exp.Expression) or parsed.find(
        exp.Star, exp.Query, exp.Alias, exp.Window, exp.Lambda
    ):
        raise ValueError(f"expected one expression, found {text!r}")
    return _with_fields(text, tokens, fields)


def _with_fields(text: str, tokens: Sequence[Token], fields: Mapping[str, Column]) -> _Expression:
    pieces, used, at = [], dict[str, None](), 0
    names = {name.lower(): name for name in fields}
    before, after = _insertions(text, tokens)
    for i, (token, field) in enumerate(_checked_tokens(text, tokens, names)):
        word = text[token.start : token.end + 1]
        if field is not None:
            used[field] = None
            word = field_sql(fields[field])
        pieces += [text[at : token.start], before.get(i, ""), word, after.get(i, "")]
        at = token.end + 1
    return _Expression("".join([*pieces, text[at:]]), tuple(used))


def _insertions(text: str, tokens: Sequence[Token]) -> tuple[dict[int, str], dict[int, str]]:
    """Return the SQL to insert before and after tokens, by index, around calls that are otherwise
    unsafe or not deterministic.

    A cast to STRING is validated as UTF-8: functions read beyond the end of text that is cut within
    a character. LOWER and UPPER get a collation, which makes them independent of Java's locale.
    """
    words = [text[token.start : token.end + 1].upper() for token in tokens]
    before, after, is_open = dict[int, str](), dict[int, str](), list[int]()
    for i, word in enumerate(words):
        if word == "(":
            is_open.append(i)
        if word != ")" or not is_open:
            continue
        begin = is_open.pop()
        name = words[begin - 1] if begin else ""
        if name in _CASTS and words[i - 2 : i] == ["AS", "STRING"]:
            before[begin - 1], after[i] = "try_validate_utf8(", ")"
        elif name in _CASES:
            before[begin - 1], after[begin] = "collate(", "collate("
            before[i], after[i] = ", 'UNICODE')", ", 'UTF8_BINARY')"
    return before, after


def field_sql(field: Column) -> str:
    """Return the SQL name of a field in an expression."""
    return f"`_{'at' if is_time(field) else 'row'}_{field.name}`"


def is_time(field: Column) -> bool:
    """Return whether expressions see the field only within the calendar."""
    return field.type in ("timestamp", "date")


def _checked_tokens(
    text: str, tokens: Sequence[Token], fields: Mapping[str, str]
) -> Iterator[tuple[Token, str | None]]:
    """Yield each token with the field that it names, if any. Raises ValueError for a token that is
    not allowed."""
    casts: list[bool] = []
    for i, token in enumerate(tokens):
        word = text[token.start : token.end + 1]
        before = text[tokens[i - 1].start : tokens[i - 1].end + 1] if i else ""
        after = text[tokens[i + 1].start : tokens[i + 1].end + 1] if i + 1 < len(tokens) else ""
        if word == "(":
            casts.append(before.upper() in _CASTS)
        elif word == ")" and casts:
            casts.pop()
        field = None
        if NAME.fullmatch(word):
            in_cast = bool(casts) and casts[-1]
            field = _name(word, before, after, in_cast, fields)
        elif not (
            word in _MARKS
            or re.fullmatch(r"'[^']*'|[Xx]'[0-9A-Fa-f]*'|\d+(\.\d+)?([eE][+-]?\d+)?", word)
        ):
            raise ValueError(
                f"expected an expression of names, functions, numbers and texts, found {word!r}"
            )
        yield token, field


def _name(
    word: str, before: str, after: str, in_cast: bool, fields: Mapping[str, str]
) -> str | None:
    """Return the field that a word names, if any. Raises ValueError for a word that is not
    allowed."""
    upper = word.upper()
    if in_cast and (upper == "AS" or (before.upper() == "AS" and upper in _CAST_TYPES)):
        return None
    if before.upper() == "AS":
        raise ValueError(
            f"expected a cast to one of {', '.join(sorted(_CAST_TYPES))}, found {word}"
        )
    if after == "(":
        if upper in _WORDS or upper in _CASTS or word.lower() in FUNCTIONS:
            return None
        raise ValueError(
            f"expected one of the functions {', '.join(sorted(FUNCTIONS))}, found {word!r}"
        )
    if before == ".":
        return None
    if upper in _WORDS or word.lower() in _NAMES:
        return None
    if upper == "DATE" and after.startswith("'"):
        return None
    if (field := fields.get(word.lower())) is not None:
        return field
    raise ValueError(
        f"expected a field of the schema or one of {', '.join(_NAMES)}, found {word!r}"
    )
