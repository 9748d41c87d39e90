"""JSON text as typed columns, in Spark SQL: values, whether all of the text was read, and times
from text.

Writes SQL, not Column objects: building hundreds of those costs a micro-batch a second.

How JSON becomes columns:

- Fields are found by exact name; fields that the schema does not have are ignored.
- STRING takes a JSON string, and any other JSON value as its text (`1.50` arrives as `1.5`).
- INT and BIGINT take JSON integers in range; FLOAT and DOUBLE JSON numbers in range; BOOLEAN `true`
  and `false`; DECIMAL a number, also in quotes, rounded half up to its scale; BINARY a string in
  Base64. Anything else is `wrong_type`, never null: a number in quotes, `3.5` for INT, `1e999` for
  DOUBLE.
- TIMESTAMP takes ISO 8601 in years 1 to 9999 (`2026-11-21T03:04:05.678+01:00`, `T` or a blank,
  fraction optional, its digits after the sixth dropped), UTC where no zone is given. DATE takes
  `2026-11-21`.
- An object that names a field twice is `duplicate_key`; inside nested values the last one counts.
- A DECIMAL whose exponent has more than three digits is `wrong_type`; so is one in quotes of more
  than 10,000 digits. Where DECIMALs are inside arrays or maps, so is a record whose other texts
  look like such a number.
- A number of more than 1,000 digits is `malformed_json`: nothing reads it in reasonable time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from unicodedata import category

from pyspark.sql import types as T

from anabranch.records.checks import in_the_calendar

MAX_DIGITS = 10_000
"""How many digits a DECIMAL in quotes may have; Java takes time as their square. Without quotes it
is 1,000."""

MOST_COLONS = 2_000
"""How many colons are counted: a value with as many is not known to be ordinary, whatever it is."""

MAX_DEPTH = 100
"""How deep objects and arrays may be nested; deeper is `too_deep`."""

# A cast of a binary to text copies nothing and checks nothing.
TEXT = "CAST(value AS STRING)"


def _rows_of_digits() -> Iterator[str]:
    """The characters that Unicode calls decimal digits, by their code as an escape has it, in
    ranges of one row."""
    codes = [f"{code:04x}" for code in range(0x10000) if category(chr(code)) == "Nd"]
    for row, codes_of_row in groupby(codes, lambda code: code[:3]):
        yield f"{row}[{''.join(code[3] for code in codes_of_row)}]"


# Regular expressions of Java; none holds a quote, so that r'...' is their SQL.
_TIMESTAMP = r"^(?!0000)\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}(\.\d{1,9})?(Z|[+-]\d{2}(:?\d{2})?)?$"
_DATE = r"^(?!0000)\d{4}-\d{2}-\d{2}$"
# What Java's BigDecimal takes for a digit, a point or a sign, as it is or in an escape of JSON.
_ESCAPED_DIGIT = rf"\\u(?i:{'|'.join(_rows_of_digits())})"
_DIGIT = rf"(?:\p{{Nd}}|{_ESCAPED_DIGIT})"
_DIGIT_OR_POINT = rf"(?:[\p{{Nd}}.]|\\u002[eE]|{_ESCAPED_DIGIT})"
_SIGN = r"(?:[+-]|\\u002[bBdD])"
# A number, or text that could be one, whose exponent has more than three digits; or in quotes, one
# of too many digits. Possessive, and begun only where none goes on already: so no part of a text is
# looked at again and again.
_HUGE = (
    rf"(?<![\w\p{{Nd}}.+-])(?:{_SIGN}?+{_DIGIT_OR_POINT}++(?:[eE]|\\u00[46]5){_SIGN}?+{_DIGIT}{{4,}}+(?![\w\p{{Nd}}.+-])"
    rf"|(?<=\x22){_SIGN}?+{_DIGIT_OR_POINT}{{{MAX_DIGITS + 1}}}+)"
)
_ZONE = r"(Z|[+-]\d{2}(:?\d{2})?)$"


def monstrous(types: Mapping[str, T.DataType]) -> str | None:
    """Whether a value may hold a DECIMAL of endless digits, or an exponent of more than three; None
    without a column of that type.

    Java rounds `1e-99999999` to a column's scale by a division that takes minutes, and reads a
    megabyte of digits in an hour, so it must not come to that.
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
    # By its name; or, where names may be written in escapes, by its looks.
    # Possessive: of two runs of blanks, with nothing between them, each would be tried with every
    # part of the other.
    named = rf"\x22({'|'.join(sorted(names))})\x22\s*+:\s*+(?:\x22\s*+)?+{_HUGE}"
    return rf"({TEXT} RLIKE r'{named}' OR (contains({TEXT}, r'\u') AND {TEXT} RLIKE r'{_HUGE}'))"


def _decimals(name: str, kind: T.DataType) -> tuple[set[str], bool]:
    """The names of fields that are DECIMAL, and whether there are others without a name of their
    own."""
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
    """Whether a value is UTF-8 without escapes that begins with `{` and ends with the only `}` that
    it has. Never null.

    Nothing can follow an object that is read from such a text, and none of its characters is
    escaped. To search for a byte costs a tenth of a regular expression.
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
    """How many colons a text has; none is looked for behind MOST_COLONS of them."""
    return f"size(split({text}, ':', {MOST_COLONS + 1})) - 1"


def other_colons(names: Iterable[str]) -> str:
    """The number of a plain value's colons that do not follow the names of the fields that were
    read as `_value`. By subtractions: Spark takes memory without end to bring a sum of twenty terms
    into one of its possible orders."""
    return f"_colons{''.join(f' - CAST(_value.`{name}` IS NOT NULL AS INT)' for name in names)}"


def is_ordinary(shape: T.StructType, times: Collection[str]) -> str:
    """Whether a plain value, read as `_value`, is an object of the shape's fields alone, none
    twice. Never null.

    Of the value's colons one belongs to each field that was read, and others (`_others`) to the
    texts that were read. Where there are no more, there is no other field. A field that is null is
    not known from one that is missing, so a value with one is not ordinary. The texts named by
    `times`, which always have colons, are looked at first.
    """
    texts = [f.name for f in shape.fields if isinstance(f.dataType, T.StringType)]
    is_enough = ["_others <= 0"]
    for names in ([name for name in texts if name in times], texts):
        if names:
            joined = ", ".join(["''", *(raw(name) for name in names)])
            is_enough.append(f"_others <= {colons(f'concat_ws({joined})')}")
    return f"coalesce(_colons < {MOST_COLONS} AND ({' OR '.join(is_enough)}), false)"


def parse(shape: T.StructType, depth: int = MAX_DEPTH, unless: str | None = None) -> str:
    """Read `{"m": [{"#": <hash>}, <value>, {"#": <hash>}]}`, the hash being the value's own; `{"m":
    [<value>]}` where `_plain` holds.

    Spark's parser stops at the end of the first object and never sees what follows it. No value can
    name its own hash, so whatever closes the wrapper early, or adds to it, shows: `m` is no longer
    these three elements.
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
        "maxNestingDepth": str(depth + 2),  # the wrapper is two levels of its own
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
    """Whether the value was read as one JSON value of the expected shape, nothing left over. Never
    null."""
    is_marked = (
        f"size({parsed}.m) = 3 AND get({parsed}.m, 0).`#` = _hash AND get({parsed}.m, 2).`#` = "
        "_hash"
    )
    return (
        f"coalesce({parsed}.corrupt IS NULL AND IF(_plain, size({parsed}.m) = 1, {is_marked}), "
        "false)"
    )


def value(parsed: str) -> str:
    """The value itself, of what was read with its wrapper."""
    return f"get({parsed}.m, IF(_plain, 0, 1))"


def raw(name: str) -> str:
    return f"_value.`{name}`"


def as_read(kind: T.DataType) -> T.DataType:
    """What the parser reads for a type: text for dates and timestamps, whose own reading is too
    lenient."""
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
    """From what `_as_read` gave to the type itself; text that cannot be read becomes null."""
    if as_read(kind) == kind:
        return read
    if isinstance(kind, T.DateType):
        return f"IF({read} RLIKE r'{_DATE}', try_cast({read} AS DATE), NULL)"
    if isinstance(kind, T.TimestampType):
        # The zone is always written out, so the session's own never counts.
        zoned = f"IF(endswith({read}, 'Z') OR {read} RLIKE r'{_ZONE}', {read}, concat({read}, 'Z'))"
        at = f"try_cast({zoned} AS TIMESTAMP)"
        # Only on the first day and the last can the zone lead out of the years.
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
    """Whether a value that the parser let pass is not of its type after all; empty where that
    cannot be."""
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
