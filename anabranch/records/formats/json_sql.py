"""JSON text as typed columns, in Spark SQL: values, whether the whole text was read, and times from
text.

Writes SQL, not Column objects: building hundreds of those costs a second for each micro-batch.

How JSON becomes columns:

- Fields are found by exact name; fields that the schema does not have are ignored.
- STRING takes a JSON string, and any other JSON value as its text (`1.50` arrives as `1.5`).
- INT and BIGINT take JSON integers in range; FLOAT and DOUBLE JSON numbers in range; BOOLEAN `true`
  and `false`; DECIMAL a number, also in quotes, rounded half up to its scale; BINARY a string in
  Base64. Anything else is `wrong_type`, never null: a number in quotes, `3.5` for INT, `1e999` for
  DOUBLE.
- TIMESTAMP takes ISO 8601 in years 1 to 9999 (`2026-11-21T03:04:05.678+01:00`, `T` or a blank,
  fraction optional, digits after the sixth dropped), in UTC if no zone is given. DATE takes
  `2026-11-21`.
- An object that names a field twice is `duplicate_key`; inside nested values the last one counts.
- A DECIMAL whose exponent has more than three digits is `wrong_type`; so is one in quotes of more
  than 10,000 digits. If DECIMALs are inside arrays or maps, so is a record whose other texts look
  like such a number.
- A number of more than 1,000 digits is `malformed_json`: no reader takes a reasonable time for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from unicodedata import category

from pyspark.sql import types as T

from anabranch.records.checks import in_the_calendar

MAX_DIGITS = 10_000
"""Maximum digits of a DECIMAL in quotes; Java takes time quadratic in their number. Without quotes
the maximum is 1,000."""

MOST_COLONS = 2_000
"""Maximum colons that are counted: a value with as many is not taken for ordinary."""

MAX_DEPTH = 100
"""Maximum nesting of objects and arrays; deeper is `too_deep`."""

# A cast from binary to text neither copies nor validates.
TEXT = "CAST(value AS STRING)"


def _rows_of_digits() -> Iterator[str]:
    """Yield Unicode's decimal digits as patterns of their hexadecimal codes, one for each row of 16
    codes."""
    codes = [f"{code:04x}" for code in range(0x10000) if category(chr(code)) == "Nd"]
    for row, codes_of_row in groupby(codes, lambda code: code[:3]):
        yield f"{row}[{''.join(code[3] for code in codes_of_row)}]"


# Regular expressions of Java; none contains a quote, so that r'...' is their SQL.
_TIMESTAMP = r"^(?!0000)\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(\.\d{1,9})?(Z|[+-]\d{2}(:?\d{2})?)?$"
_DATE = r"^(?!0000)\d{4}-\d{2}-\d{2}$"
# Digits, points and signs for Java's BigDecimal, unescaped or in an escape of JSON.
_ESCAPED_DIGIT = rf"\\u(?i:{'|'.join(_rows_of_digits())})"
_DIGIT = rf"(?:\p{{Nd}}|{_ESCAPED_DIGIT})"
_DIGIT_OR_POINT = rf"(?:[\p{{Nd}}.]|\\u002[eE]|{_ESCAPED_DIGIT})"
_SIGN = r"(?:[+-]|\\u002[bBdD])"
# A number, or text that could be one, whose exponent has more than three digits; or one in quotes
# with too many digits. Possessive, and it starts only where no such text precedes it: so no part of
# a text is scanned repeatedly.
_HUGE = (
    rf"(?<![\w\p{{Nd}}.+-])(?:{_SIGN}?+{_DIGIT_OR_POINT}++(?:[eE]|\\u00[46]5){_SIGN}?+{_DIGIT}{{4,}}+(?![\w\p{{Nd}}.+-])"
    rf"|(?<=\x22){_SIGN}?+{_DIGIT_OR_POINT}{{{MAX_DIGITS + 1}}}+)"
)
_ZONE = r"(Z|[+-]\d{2}(:?\d{2})?)$"


def has_huge_number(types: Mapping[str, T.DataType]) -> str | None:
    """Return SQL for whether a value may contain a DECIMAL with too many digits, or with an
    exponent of more than three digits; None without a column of that type.

    Such a value must not be parsed: Java takes minutes for the division that rounds `1e-99999999`
    to a column's scale, and an hour for a megabyte of digits.
    """
    names, anywhere = set[str](), False
    for name, kind in types.items():
        decimals, loose = _decimals(name, kind)
        names |= decimals
        anywhere |= loose
    if not names and not anywhere:
        return None
    if anywhere:
        return f"{TEXT} RLIKE r'{_HUGE}'"
    # By the field's name; or, if names may be escaped, by the number alone. Possessive: otherwise
    # each of two adjacent runs of blanks would be tried with every part of the other.
    named = rf"\x22({'|'.join(sorted(names))})\x22\s*+:\s*+(?:\x22\s*+)?+{_HUGE}"
    return rf"({TEXT} RLIKE r'{named}' OR (contains({TEXT}, r'\u') AND {TEXT} RLIKE r'{_HUGE}'))"


def _decimals(name: str, kind: T.DataType) -> tuple[set[str], bool]:
    """Return the names of DECIMAL fields, and whether there are DECIMALs without a field name of
    their own."""
    if isinstance(kind, T.DecimalType):
        return {name}, False
    if isinstance(kind, T.StructType):
        inside = [_decimals(f.name, f.dataType) for f in kind.fields]
        return {n for names, _ in inside for n in names}, any(loose for _, loose in inside)
    if isinstance(kind, (T.ArrayType, T.MapType)):
        names, loose = _decimals(
            "", kind.elementType if isinstance(kind, T.ArrayType) else kind.valueType
        )
        return names - {""}, loose or "" in names
    return set(), False


def is_plain() -> str:
    """Return SQL for whether a value is UTF-8 without escapes that begins with `{` and ends with
    its only `}`. Never null.

    Nothing can follow an object that is read from such a text, and none of its characters is
    escaped. A search for a byte costs a tenth of a regular expression.
    """
    parts = (
        f"startswith({TEXT}, '{{')",
        f"endswith({TEXT}, '}}')",
        f"NOT contains({TEXT}, r'\\')",
        "NOT contains(CAST(substring(value, 1, octet_length(value) - 1) AS STRING), '}')",
        f"is_valid_utf8({TEXT})",
    )
    return f"coalesce({' AND '.join(parts)}, false)"


def colons(text: str) -> str:
    """Return SQL for the number of colons in a text, counted up to MOST_COLONS."""
    return f"size(split({text}, ':', {MOST_COLONS + 1})) - 1"


def other_colons(names: Iterable[str]) -> str:
    """Return SQL for the number of a plain value's colons beyond one for each field that was read
    as `_value`. It subtracts, because Spark takes unbounded memory to order the terms of a sum of
    twenty."""
    return f"_colons{''.join(f' - CAST(_value.`{name}` IS NOT NULL AS INT)' for name in names)}"


def is_ordinary(shape: T.StructType, times: Collection[str]) -> str:
    """Return SQL for whether a plain value, read as `_value`, is an object with only the shape's
    fields, none twice. Never null.

    One of the value's colons belongs to each field that was read, and the others (`_others`) to the
    texts that were read. If there are no more, there is no other field. A null field cannot be
    distinguished from a missing one, so a value with one is not ordinary. The texts named by
    `times`, which always have colons, are counted first.
    """
    texts = [f.name for f in shape.fields if isinstance(f.dataType, T.StringType)]
    is_enough = ["_others <= 0"]
    for names in ([name for name in texts if name in times], texts):
        if names:
            joined = ", ".join(["''", *(raw(name) for name in names)])
            is_enough.append(f"_others <= {colons(f'concat_ws({joined})')}")
    return f"coalesce(_colons < {MOST_COLONS} AND ({' OR '.join(is_enough)}), false)"


def parse(shape: T.StructType, depth: int = MAX_DEPTH, unless: str | None = None) -> str:
    """Return SQL that parses `{"m": [{"#": <hash>}, <value>, {"#": <hash>}]}`, with the value's own
    hash, or `{"m": [<value>]}` if `_plain`.

    Spark's parser stops at the end of the first object and ignores what follows. No value can
    contain its own hash, so a value that closes the wrapper early, or adds to it, is detected: `m`
    no longer has these three elements.
    """
    mark = "'{\"#\":', _hash, '}'"
    element = T.StructType([*shape.fields, T.StructField("#", T.StringType())])
    schema = T.StructType(
        [T.StructField("m", T.ArrayType(element)), T.StructField("corrupt", T.StringType())]
    )
    options = {
        "mode": "PERMISSIVE",
        "columnNameOfCorruptRecord": "corrupt",
        "allowNonNumericNumbers": "false",
        "allowSingleQuotes": "false",
        "timeZone": "UTC",
        "maxNestingDepth": str(depth + 2),  # with the two levels of the wrapper
    }
    pairs = ", ".join(f"'{key}', '{value}'" for key, value in options.items())
    marked = f"concat('{{\"m\":[', {mark}, ',', {TEXT}, ',', {mark}, ']}}')"
    wrapped = f"IF(_plain, concat('{{\"m\":[', {TEXT}, ']}}'), {marked})"
    guarded = f"IF({unless}, NULL, {wrapped})" if unless is not None else wrapped
    return f"from_json({guarded}, '{ddl(schema)}', map({pairs}))"


def ddl(schema: T.StructType) -> str:
    return ", ".join(f"`{f.name}` {_sql_type(f.dataType)}" for f in schema.fields)


def _sql_type(kind: T.DataType) -> str:
    if isinstance(kind, T.StructType):
        return (
            "struct<" + ",".join(f"`{f.name}`:{_sql_type(f.dataType)}" for f in kind.fields) + ">"
        )
    if isinstance(kind, T.ArrayType):
        return f"array<{_sql_type(kind.elementType)}>"
    if isinstance(kind, T.MapType):
        return f"map<{_sql_type(kind.keyType)},{_sql_type(kind.valueType)}>"
    return kind.simpleString()


def intact(parsed: str) -> str:
    """Return SQL for whether the value was read as one JSON value of the expected shape, with
    nothing left over. Never null."""
    is_marked = (
        f"size({parsed}.m) = 3 AND get({parsed}.m, 0).`#` = _hash AND get({parsed}.m, 2).`#` = "
        "_hash"
    )
    return (
        f"coalesce({parsed}.corrupt IS NULL AND IF(_plain, size({parsed}.m) = 1, {is_marked}), "
        "false)"
    )


def value(parsed: str) -> str:
    """Return SQL for the value in the parsed wrapper."""
    return f"get({parsed}.m, IF(_plain, 0, 1))"


def raw(name: str) -> str:
    return f"_value.`{name}`"


def as_read(kind: T.DataType) -> T.DataType:
    """Return the type with which the parser reads: text for dates and timestamps, because the
    parser's own conversion is too lenient."""
    if isinstance(kind, (T.TimestampType, T.DateType)):
        return T.StringType()
    if isinstance(kind, T.ArrayType):
        return T.ArrayType(as_read(kind.elementType))
    if isinstance(kind, T.MapType):
        return T.MapType(kind.keyType, as_read(kind.valueType))
    if isinstance(kind, T.StructType):
        return T.StructType([T.StructField(f.name, as_read(f.dataType)) for f in kind.fields])
    return kind


def converted(read: str, kind: T.DataType, level: int = 0) -> str:
    """Return SQL that converts a value of type `as_read` to the type itself; text that cannot be
    read becomes null."""
    if as_read(kind) == kind:
        return read
    if isinstance(kind, T.DateType):
        return f"IF({read} RLIKE r'{_DATE}', try_cast({read} AS DATE), NULL)"
    if isinstance(kind, T.TimestampType):
        # The zone is always explicit, so the session's is never used.
        zoned = f"IF(endswith({read}, 'Z') OR {read} RLIKE r'{_ZONE}', {read}, concat({read}, 'Z'))"
        at = f"try_cast({zoned} AS TIMESTAMP)"
        # Only on the first and last day can the zone lead outside the years.
        edge = f"startswith({read}, '0001-01-01') OR startswith({read}, '9999-12-31')"
        inside = in_the_calendar(f"unix_micros({at})")
        return f"IF({read} RLIKE r'{_TIMESTAMP}' AND (NOT ({edge}) OR {inside}), {at}, NULL)"
    item = f"x{level}"
    if isinstance(kind, T.ArrayType):
        return f"transform({read}, {item} -> {converted(item, kind.elementType, level + 1)})"
    if isinstance(kind, T.MapType):
        return (
            f"transform_values({read}, (k{level}, {item}) -> "
            f"{converted(item, kind.valueType, level + 1)})"
        )
    assert isinstance(kind, T.StructType)
    fields = ", ".join(
        f"'{f.name}', {converted(f'{read}.`{f.name}`', f.dataType, level)}" for f in kind.fields
    )
    return f"IF({read} IS NULL, NULL, named_struct({fields}))"


def unreadable(read: str, kind: T.DataType, level: int = 0) -> str:
    """Return SQL for whether a value that the parser accepted is not of its type; empty if that
    cannot happen."""
    item = f"y{level}"
    if isinstance(kind, (T.FloatType, T.DoubleType)):
        return f"abs({read}) = double('Infinity')"
    if isinstance(kind, (T.TimestampType, T.DateType)):
        return f"({read} IS NOT NULL AND {converted(read, kind)} IS NULL)"
    if isinstance(kind, T.StructType):
        parts = [unreadable(f"{read}.`{f.name}`", f.dataType, level) for f in kind.fields]
        return " OR ".join(f"coalesce({part}, false)" for part in parts if part)
    if isinstance(kind, (T.ArrayType, T.MapType)):
        inner = unreadable(
            item, kind.elementType if isinstance(kind, T.ArrayType) else kind.valueType, level + 1
        )
        items = read if isinstance(kind, T.ArrayType) else f"map_values({read})"
        return f"exists({items}, {item} -> coalesce({inner}, false))" if inner else ""
    return ""
