"""Hostile records: wrong values that producers send, each with its expected verdict."""

from datetime import datetime, timedelta

DDL = (
    "id STRING NOT NULL, at TIMESTAMP NOT NULL, level INT, total BIGINT, amount DOUBLE, ok "
    "BOOLEAN, price DECIMAL(10,2), day DATE, small FLOAT, raw BINARY, tags ARRAY<STRING>, scores "
    "MAP<STRING, DOUBLE>, nested STRUCT<at: TIMESTAMP, n: INT, days: ARRAY<DATE>>"
)
EVENT_TIME = {"column": "at", "past": "30 days", "future": "1 hour"}

# Verdicts: a code, and text in it.
DECIMAL = ("wrong_type", "price: expected decimal(10,2)")
YESTERDAY = ("unreadable_timestamp", "at: expected timestamp, found yest")
NO_TIME = ("unreadable_timestamp", "at")
OUT_OF_BOUNDS = ("event_time_out_of_bounds", "at")
NESTED = ("wrong_type", "nested")
GOOD = (None, "")

# The record's value, the code of its verdict (None: it is good), and text in the verdict.
Case = tuple[bytes | None, str | None, str]


def cases(start: datetime) -> dict[str, Case]:
    """Return all cases by name, for `DDL`, `EVENT_TIME` and the hour that begins at `start`."""
    plain = f'"at":"{_written(start + timedelta(minutes=10))}"'

    def event(extra: str = "", at: str = plain) -> bytes:
        return ('{"id":"a",' + at + ("," + extra if extra else "") + "}").encode()

    days = '["2026-11-21","2026-02-30"]'

    def stamped(moment: datetime) -> bytes:
        return event(at=f'"at":"{_written(moment)}"')

    deep = b'{"id":"a",' + plain.encode() + b',"x":' + b"[" * 98 + b"]" * 98 + b"}"
    by_name: dict[str, Case] = {
        "plain": (event(), None, ""),
        "unknown field": (event('"other":{"x":[1,2]}'), None, ""),
        "blanks around": (b" \n" + event() + b"\r\n\t", None, ""),
        "64 levels": (event('"x":' + "[" * 64 + "]" * 64), None, ""),
        "99 levels": (deep, None, ""),
        "null value": (None, "null_value", ""),
        "empty": (b"", "empty_value", ""),
        "blank": (b" \n\t", "empty_value", ""),
        "latin-1": ('{"id":"é"}'.encode("latin-1"), "invalid_utf8", ""),
        "overlong": (b'{"id":"\xc0\x80"}', "invalid_utf8", ""),
        "surrogate bytes": (b'{"id":"\xed\xa0\x80"}', "invalid_utf8", ""),
        "random bytes": (bytes(range(256)), "invalid_utf8", ""),
        "byte order mark": (b"\xef\xbb\xbf" + event(), None, ""),
        "two byte order marks": (b"\xef\xbb\xbf" * 2 + event(), "malformed_json", ""),
        "truncated": (event()[:-1], "malformed_json", ""),
        "truncated in a string": (b'{"id":"a', "malformed_json", ""),
        "trailing garbage": (event() + b" xyz", "malformed_json", ""),
        "trailing brace": (event() + b"}", "malformed_json", ""),
        "trailing brackets": (event() + b"]}", "malformed_json", ""),
        "two objects": (event() + event(), "malformed_json", ""),
        "two objects, a line each": (event() + b"\n" + event(), "malformed_json", ""),
        "two objects with a comma": (event() + b"," + event(), "malformed_json", ""),
        "trailing field": (event() + b',"m":[{"id":"b"}]', "malformed_json", ""),
        "closes the array": (event() + b'],"m":[' + event(), "malformed_json", ""),
        "forged wrapper": (event() + b',{"#":1}],"m":[{"#":1},' + event(), "malformed_json", ""),
        "single quotes": (event().replace(b'"', b"'"), "malformed_json", ""),
        "comma at the end": (event()[:-1] + b",}", "malformed_json", ""),
        "no quotes": (b"{id:1}", "malformed_json", ""),
        "a comment": (event() + b" // hi", "malformed_json", ""),
        "leading zero": (event('"level":01'), "malformed_json", ""),
        "bare NaN": (event('"amount":NaN'), "malformed_json", ""),
        "bare Infinity": (event('"amount":-Infinity'), "malformed_json", ""),
        "control character": (event('"x":"a\tb"'), "malformed_json", ""),
        "not JSON": (b"hello", "malformed_json", ""),
        "101 levels": (b'{"x":' + b"[" * 100 + b"]" * 100 + b"}", "too_deep", "100"),
        "2,000 levels": (event('"x":' + "[" * 2000 + "]" * 2000), "too_deep", "100"),
        "2,000 levels in a column": (event('"tags":' + "[" * 2000 + "]" * 2000), "too_deep", "100"),
        "array": (b"[" + event() + b"]", "not_an_object", ""),
        "number": (b"5", "not_an_object", ""),
        "string": (b'"{}"', "not_an_object", ""),
        "null": (b"null", "not_an_object", ""),
        "field twice": (event('"level":"x","level":2'), None, ""),
        "field twice, the last one wrong": (event('"level":2,"level":"x"'), "wrong_type", "level"),
        "field twice, escaped": (event('"level":"x","l\\u0065vel":2'), None, ""),
        "unknown field twice": (event('"x":1,"x":2'), None, ""),
        "lone surrogate": (event('"x":"\\ud800"'), "lone_surrogate", ""),
        "lone low surrogate": (event('"x":"a\\udc00"'), "lone_surrogate", ""),
        "reversed surrogates": (event('"x":"\\ude00\\ud83d"'), "lone_surrogate", ""),
        "pair of surrogates": (event('"x":"\\ud83d\\ude00"'), None, ""),
        "escaped backslash": (event('"x":"\\\\ud800"'), None, ""),
        "text for INT": (event('"level":"abc"'), "wrong_type", "level: expected int, found abc"),
        "quoted number for INT": (event('"level":"5"'), "wrong_type", "level"),
        "empty text for INT": (event('"level":""'), "wrong_type", "level"),
        "fraction for INT": (event('"level":3.5'), "wrong_type", "level"),
        "1e99 for INT": (event('"level":1e99'), "wrong_type", "level"),
        "boolean for INT": (event('"level":true'), "wrong_type", "level"),
        "out of INT's range": (event('"level":2147483648'), "wrong_type", "level"),
        "INT's smallest": (event('"level":-2147483648'), None, ""),
        "out of BIGINT's range": (event('"total":9223372036854775808'), "wrong_type", "total"),
        "BIGINT's largest": (event('"total":9223372036854775807'), None, ""),
        "text for DOUBLE": (event('"amount":"1.5"'), "wrong_type", "amount"),
        "quoted NaN for DOUBLE": (event('"amount":"NaN"'), "wrong_type", "amount"),
        "quoted Infinity for DOUBLE": (event('"amount":"Infinity"'), "wrong_type", "amount"),
        "1e999 for DOUBLE": (event('"amount":1e999'), "wrong_type", "amount"),
        "1e39 for FLOAT": (event('"small":1e39'), "wrong_type", "small"),
        "integer for DOUBLE": (event('"amount":5'), None, ""),
        "text for BOOLEAN": (event('"ok":"true"'), "wrong_type", "ok"),
        "number for BOOLEAN": (event('"ok":1'), "wrong_type", "ok"),
        "too large for DECIMAL": (event('"price":123456789.01'), "wrong_type", "price"),
        "DECIMAL near nothing": (event('"price":1e-99999999'), *DECIMAL),
        "DECIMAL far beyond": (event('"price" : -1.5E+0099999999'), *DECIMAL),
        "quoted DECIMAL near nothing": (event('"price":"1e-99999999"'), *DECIMAL),
        "escaped DECIMAL near nothing": (event('"pr\\u0069ce":1e-99999999'), *DECIMAL),
        "DECIMAL near nothing enough": (event('"price":1e-999'), None, ""),
        "near nothing in an unknown field": (event('"x":1e-99999999,"y":["2e99999"]'), None, ""),
        "text that looks like a number": (event('"player":"3e12345678"'), None, ""),
        "not Base64": (event('"raw":"!!"'), "wrong_type", "raw"),
        "object for ARRAY": (event('"tags":{}'), "wrong_type", "tags"),
        "text for MAP": (event('"scores":"x"'), "wrong_type", "scores"),
        "1e999 in a MAP": (event('"scores":{"x":1e999}'), "wrong_type", "scores"),
        "text in a nested INT": (event('"nested":{"n":"x"}'), "wrong_type", ""),
        "nested time unreadable": (event('"nested":{"at":"noon"}'), "wrong_type", "nested"),
        "nested date unreadable": (event(f'"nested":{{"days":{days}}}'), *NESTED),
        "nested number for a time": (event('"nested":{"at":5}'), "wrong_type", "nested"),
        "number for DATE": (event('"day":20261121'), "wrong_type", "day"),
        "no such day": (event('"day":"2026-02-30"'), "unreadable_timestamp", "day"),
        "number for TIMESTAMP": (event(at='"at":1795230000'), "wrong_type", "at"),
        "object for TIMESTAMP": (event(at='"at":{}'), "wrong_type", "at"),
        "text for TIMESTAMP": (event(at='"at":"yesterday"'), *YESTERDAY),
        "date for TIMESTAMP": (event(at='"at":"2026-11-21"'), "unreadable_timestamp", "at"),
        "only a time": (event(at='"at":"T03:00"'), "unreadable_timestamp", "at"),
        "named zone": (event(at='"at":"2026-11-21T03:00:00 Europe/Berlin"'), *NO_TIME),
        "no seconds": (event(at='"at":"2026-11-21T03:00Z"'), "unreadable_timestamp", "at"),
        "month 13": (event(at='"at":"2026-13-21T03:00:00Z"'), "unreadable_timestamp", "at"),
        "zone of 60 minutes": (event(at='"at":"2026-11-21T03:00:00+00:60"'), *NO_TIME),
        "hour 25": (event(at='"at":"2026-11-21T25:00:00Z"'), "unreadable_timestamp", "at"),
        "year 0": (event(at='"at":"0000-11-21T03:00:00Z"'), "unreadable_timestamp", "at"),
        "year 10000": (event(at='"at":"10000-11-21T03:00:00Z"'), "unreadable_timestamp", "at"),
        "before year 1 in UTC": (event(at='"at":"0001-01-01T00:00:00+01:00"'), *NO_TIME),
        "year 1": (event(at='"at":"0001-01-01T00:00:00Z"'), "event_time_out_of_bounds", "at"),
        "year 9999": (event(at='"at":"9999-12-31T23:59:59.999999Z"'), *OUT_OF_BOUNDS),
        "30 days ago": (stamped(start - timedelta(days=30)), *GOOD),
        "a microsecond more": (stamped(start - timedelta(days=30, microseconds=1)), *OUT_OF_BOUNDS),
        "an hour ahead": (stamped(start + timedelta(hours=2)), *GOOD),
        "a microsecond on": (stamped(start + timedelta(hours=2, microseconds=1)), *OUT_OF_BOUNDS),
        "no such field": (b'{"id":"a"}', "missing_required", "at: expected timestamp NOT NULL"),
        "null in NOT NULL": (event().replace(b'"a"', b"null"), "missing_required", "id"),
        "empty object": (b"{}", "missing_required", "id"),
        "other case of a name": (event().replace(b'"id"', b'"ID"'), "missing_required", "id"),
        "1 MB string": (event('"x":"' + "a" * 1_000_000 + '"'), None, ""),
        "1 MB of backslashes": (event('"x":"' + "\\\\" * 500_000 + '\\u0041"'), None, ""),
        "1 MB of brackets": (b"[" * 1_000_000, "not_an_object", ""),
        "1 MB of objects": (b'{"a":' * 200_000, "too_deep", ""),
        "1 MB of blanks": (b" " * 1_000_000, "empty_value", ""),
        "1 MB for INT": (event('"level":"' + "a" * 1_000_000 + '"'), "wrong_type", "level"),
        "1 MB of digits": (event('"level":' + "1" * 1_000_000), "wrong_type", "level"),
        "1 MB of blanks before a DECIMAL": (event('"price":' + " " * 1_000_000 + "1"), None, ""),
        "1 MB of digits for DECIMAL": (event('"price":"' + "1" * 1_000_000 + '"'), *DECIMAL),
        "escaped exponent for DECIMAL": (event('"price":"1\\u0065-99999999"'), *DECIMAL),
        "escaped sign for DECIMAL": (event('"price":"1E\\u002B3"'), None, ""),
        "1 MB for TIMESTAMP": (event(at='"at":"' + "1" * 1_000_000 + '"'), "wrong_type", "at"),
    }
    return {
        name: (value and value.replace(b'"id":"a"', b'"id":"a%d"' % i, 1), code, words)
        for i, (name, (value, code, words)) in enumerate(by_name.items())
    }


def _written(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")
