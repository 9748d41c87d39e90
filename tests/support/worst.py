"""The worst values of 1 MB for each expression that reads a record: they backtrack, nest or grow.

Each may take time in proportion to its length; quadratic time would be an hour for a megabyte.
"""

from hostile import Case

SIZE = 1_000_000
# Verdicts: a code, and text in it.
DECIMAL = ("wrong_type", "decimal(10,2)")
NO_TIME = ("unreadable_timestamp", "at")
LONG_TIME = ("wrong_type", "at")
NO_DAY = ("unreadable_timestamp", "day")
NO_JSON = ("malformed_json", "")
GOOD = (None, "")
NO_CSV = ("malformed_csv", "")

# 1e-99999999
EXPONENT = "1\\u0065\\u002d" + "\\u0039" * 8

JSON_DDL = (
    "id STRING NOT NULL, at TIMESTAMP, day DATE, n INT, total BIGINT, amount DOUBLE, price "
    "DECIMAL(10,2), raw BINARY, ok BOOLEAN, tags ARRAY<STRING>, days MAP<STRING, DATE>, nested "
    "STRUCT<at: TIMESTAMP, cost: DECIMAL(10,2)>"
)
ARRAYS_DDL = "id STRING NOT NULL, prices ARRAY<DECIMAL(10,2)>, costs MAP<STRING, DECIMAL(10,2)>"
CSV_DDL = (
    "id STRING NOT NULL, at TIMESTAMP, day DATE, n INT, total BIGINT, amount DOUBLE, price "
    "DECIMAL(10,2), raw BINARY, ok BOOLEAN"
)


def event(fields: str) -> bytes:
    return ('{"id":"a",' + fields + "}").encode()


def json_cases() -> dict[str, Case]:
    """Return values for `JSON_DDL`, each with the code of its verdict and text in it."""
    digits, blanks, pairs = "1" * SIZE, " " * SIZE, "\\ud83d\\ude00" * (SIZE // 12)
    open_text = b'{"x":' + b"[]" * 101 + b'"' + b'\\"' * (SIZE // 2)
    days = '"k":"2026-02-28",' * (SIZE // 17)
    return {
        "blanks before a DECIMAL": (event('"price":' + blanks + "1"), None, ""),
        "blanks around a colon": (event('"price"' + blanks + ":" + blanks + "1"), None, ""),
        "blanks inside a quoted DECIMAL": (event('"price":"' + blanks + '1"'), *DECIMAL),
        "escaped quotes in an open text after brackets": (open_text, *NO_JSON),
        "blanks and no DECIMAL": (event('"price":' + blanks + '"'), "malformed_json", ""),
        "names of a DECIMAL": (event('"x":{' + '"price" :' * (SIZE // 9) + "1}"), *NO_JSON),
        "digits in a quoted DECIMAL": (event('"price":"' + digits + '"'), *DECIMAL),
        "digits behind the point": (event('"price":"0.' + digits + '"'), *DECIMAL),
        "digits in a nested DECIMAL": (event('"nested":{"cost":"' + digits + '"}'), *DECIMAL),
        "zeros before a quoted DECIMAL": (event('"price":"' + "0" * SIZE + '1"'), *DECIMAL),
        "digits in another script": (event('"price":"' + "\u0661" * (SIZE // 2) + '"'), *DECIMAL),
        "digits in escapes": (event('"price":"' + "\\u0031" * (SIZE // 6) + '"'), *DECIMAL),
        "an exponent in escapes": (event('"price":"' + EXPONENT + '"'), *DECIMAL),
        "an exponent in another script": (event('"price":"1e-' + "\u0669" * 8 + '"'), *DECIMAL),
        "a sign in an escape": (event('"price":"1E\\u002B3"'), None, ""),
        "1 MB of other escapes": (event('"x":"' + "\\u4e2d" * (SIZE // 6) + '"'), *GOOD),
        "digits in another field": (event('"x":' + '"' + "1x" + digits + '"'), None, ""),
        "an exponent of digits": (event('"price":"1e' + digits + '"'), *DECIMAL),
        "an exponent and a letter": (event('"price":"1e' + digits + 'x"'), "wrong_type", "price"),
        "points and digits": (event('"price":"' + "1." * (SIZE // 2) + '"'), *DECIMAL),
        "numbers in an escaped text": (event('"x":"\\u0041' + "1e1 " * (SIZE // 4) + '"'), *GOOD),
        "signs": (event('"x":"\\u0041' + "+-" * (SIZE // 2) + '"'), None, ""),
        "digits for DOUBLE": (event('"amount":"' + digits + '"'), "wrong_type", "amount"),
        "digits for INT": (event('"n":"' + digits + '"'), "wrong_type", "n"),
        "digits for TIMESTAMP": (event('"at":"' + digits + '"'), "wrong_type", "at"),
        "fractions for TIMESTAMP": (event('"at":"' + "1." * (SIZE // 2) + '"'), *NO_TIME),
        "exponents for TIMESTAMP": (event('"at":"1.' + "1" * SIZE + "e" + digits + 'x"'), *NO_TIME),
        "brackets for TIMESTAMP": (event('"at":"[' + "\\n" * (SIZE // 2) + '"'), *LONG_TIME),
        "a long fraction": (event('"at":"2026-11-21T03:00:00.' + digits + 'Z"'), *NO_TIME),
        "zones": (event('"at":"2026-11-21T03:00:00' + "+01:00" * (SIZE // 6) + '"'), *NO_TIME),
        "dates for DATE": (event('"day":"' + "2026-11-21" * (SIZE // 10) + '"'), *NO_DAY),
        "times in a map": (event('"days":{' + days + '"k":"2026-02-30"}'), "wrong_type", "days"),
        "Base64": (event('"raw":"' + "QUJD" * (SIZE // 4) + '"'), None, ""),
        "Base64 left open": (event('"raw":"' + "QUJD" * (SIZE // 4) + '!"'), "wrong_type", "raw"),
        "backslashes": (event('"x":"' + "\\\\" * (SIZE // 2) + '"'), None, ""),
        "escapes of backslashes": (event('"x":"' + "\\u005c" * (SIZE // 6) + '"'), None, ""),
        "pairs of surrogates": (event('"x":"' + pairs + '"'), None, ""),
        "reversed at the end": (event('"x":"' + pairs + '\\ude00"'), "lone_surrogate", ""),
        "other names": (event(",".join(f'"f{i}":1' for i in range(SIZE // 10))), None, ""),
        "one name again and again": (event(",".join(['"x":1'] * (SIZE // 6))), None, ""),
        "items": (event('"tags":[' + ",".join(['""'] * (SIZE // 3)) + "]"), None, ""),
        "blanks before an array": ((" " * SIZE + "[]").encode(), "not_an_object", ""),
        "blanks before a letter": ((" " * SIZE + "x").encode(), "malformed_json", ""),
        "blanks before an object": ((" " * SIZE).encode() + event('"n":1'), None, ""),
        "digits alone": (digits.encode(), "not_an_object", ""),
    }


def arrays_cases() -> dict[str, Case]:
    """Return values for `ARRAYS_DDL`: a DECIMAL without its own name is searched everywhere."""
    digits = "1" * SIZE
    return {
        "digits of an array": (event('"prices":["' + digits + '"]'), *DECIMAL),
        "digits of a map": (event('"costs":{"k":"-' + digits + '"}'), *DECIMAL),
        "digits in escapes": (event('"prices":["-' + "\\u0661" * (SIZE // 6) + '"]'), *DECIMAL),
        "an exponent in escapes": (event('"prices":["1e\\u002d' + "\\u0039" * 8 + '"]'), *DECIMAL),
        "numbers": (event('"prices":[' + ",".join(["1.25"] * (SIZE // 5)) + "]"), None, ""),
        "numbers in a text": (event('"x":"' + "1e1 " * (SIZE // 4) + '"'), None, ""),
        "other escapes": (event('"x":"' + "\\u4e2d" * (SIZE // 6) + '"'), None, ""),
        "signs": (event('"x":"' + "+-" * (SIZE // 2) + '"'), None, ""),
        "points": (event('"x":".' + "1 ." * (SIZE // 3) + '"'), None, ""),
        "an exponent without an end": (event('"x":"1e' + digits + 'x"'), None, ""),
    }


def csv_cases() -> dict[str, Case]:
    """Return lines for `CSV_DDL`."""
    digits, rest = "1" * SIZE, "," * 8

    def field(place: int, text: str) -> bytes:
        return ",".join(["a", *(text if place == i else "" for i in range(1, 9))]).encode()

    return {
        "delimiters": (("a" + "," * SIZE).encode(), "wrong_field_count", "9"),
        "quoted fields": (('"a"' + ',""' * (SIZE // 3)).encode(), "wrong_field_count", "9"),
        "doubled quotes": (('"' + '""' * (SIZE // 2) + '"' + rest).encode(), None, ""),
        "doubled quotes left open": (('"' + '""' * (SIZE // 2) + rest).encode(), *NO_CSV),
        "quotes out of place": (('a"' * (SIZE // 2) + rest).encode(), "malformed_csv", ""),
        "a quote after each delimiter": ((',"a' * (SIZE // 3)).encode(), "malformed_csv", ""),
        "quotes and text": (('"a"b' * (SIZE // 4)).encode(), "malformed_csv", ""),
        "line breaks": (("a" + rest + "\r\n" * (SIZE // 2)).encode(), "malformed_csv", ""),
        "line breaks alone": (("\r\n" * (SIZE // 2)).encode(), "malformed_csv", ""),
        "line breaks in quotes": (('"' + "\r\n" * (SIZE // 2) + '"' + rest).encode(), None, ""),
        "a long text": (("a" * SIZE + rest).encode(), None, ""),
        "digits for TIMESTAMP": (field(1, digits), "unreadable_timestamp", "at"),
        "digits for DATE": (field(2, digits), "unreadable_timestamp", "day"),
        "digits for INT": (field(3, digits), "wrong_type", "n"),
        "digits for BIGINT": (field(4, "-" + digits), "wrong_type", "total"),
        "digits for DOUBLE": (field(5, digits + "." + digits + "e"), "wrong_type", "amount"),
        "digits for DECIMAL": (field(6, "0." + digits), "wrong_type", "price"),
        "Base64": (field(7, "QUJD" * (SIZE // 4)), None, ""),
        "Base64 left open": (field(7, "QUJD" * (SIZE // 4) + "!"), "wrong_type", "raw"),
        "digits for BOOLEAN": (field(8, digits), "wrong_type", "ok"),
    }
