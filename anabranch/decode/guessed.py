"""Guess a column, its type and notation, from values of a field.

Guesses are wide rather than narrow: a value that does not fit makes its record a dead letter. Times
and decimals are guessed only where each value reads as one by the decoders' own rules. STRING takes
whatever varies, as its text.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache

from anabranch.config.columns import MOST_DIGITS, Notation
from anabranch.config.plain import NAME
from anabranch.config.schema import parse_pattern
from anabranch.decode import values
from anabranch.decode.notations import PER_SECOND, moment
from anabranch.decode.values import Unreadable

_DEEPEST, _MOST_FIELDS, _MOST_ITEMS, _LONGEST_TYPE = 12, 100, 100_000, 20_000
# Numbers of seconds in the years 2000 to 2099. With other units no number is in two ranges.
_FIRST_SECOND, _LAST_SECOND = 946_684_800, 4_102_444_800
_NEAR_S = 86_400
# A field with numbers that are times, not spans of it: a word of its name, in snake case.
_TIME_WORDS = re.compile(
    r"(?:^|_)(?:\w*(?:time|date|stamp|epoch)|ts|at|when|since|until|created|updated|modified|start|"
    r"end|expires|exp|iat|nbf)(?:$|_)"
)
_SPAN_WORDS = re.compile(
    r"(?:response|request|connect|connection|elapsed|processing|execution|wait|run|up|down|life|"
    r"cpu|byte|load|total|idle|busy|read|write|query|over|round_?trip|trip)_?times?(?:$|_)"
)
_ID_WORDS = re.compile(r"(?:^|_)(?:id|uuid|guid|key|number|no|nr|seq|sequence|version)$")
_LABEL_WORDS = re.compile(r"(?i:labels|annotations|tags|attributes|dimensions|headers)$")
_OF_ONE_LABEL = frozenset(("key", "name", "value"))
_CLOCK = re.compile(
    r"(?<![0-9])(?P<hour>[0-9]{1,2}):[0-9]{2}(?P<second>:[0-9]{2})?(?P<fraction>[.,][0-9]{1,9})?"
    r"(?P<noon> ?[AaPp][Mm])?"
)
_DATES = (
    *("%Y/%m/%d", "%Y-%m-%d", "%Y.%m.%d", "%d.%m.%Y", "%d/%b/%Y", "%d-%b-%Y", "%d %b %Y"),
    *("%d %B %Y", "%b %d %Y", "%b %d, %Y", "%B %d, %Y", "%a, %d %b %Y", "%d/%m/%Y", "%m/%d/%Y"),
    *("%d-%m-%Y", "%m-%d-%Y", "%d.%m.%y", "%d/%m/%y", "%m/%d/%y", "%y/%m/%d"),
)
_WHOLE = (
    *("%a %b %d %H:%M:%S %Y", "%a %b %d %H:%M:%S %z %Y", "%a %b %d %H:%M:%S UTC %Y"),
    *("%Y%m%dT%H%M%S%z", "%Y%m%dT%H%M%S"),
)
# Dates that may be versions.
_OF_POINTS = ("%d.%m.%y", "%Y.%m.%d")
_PADDED = re.compile(r"[0-9]{2,4}\.[0-9]{2}\.[0-9]{2}")
_VERSION = re.compile(r"version$|(?:^|_)ver$")
_DIGITS_ALONE = {14: "%Y%m%d%H%M%S", 8: "%Y%m%d"}
_LONGEST_TIME, _SHORTEST_CODE = 40, 5
_WHOLE_NUMBER = re.compile("-?[0-9]+")
_COMMA = re.compile(r"-?(?:0|[1-9][0-9]*)(?:,[0-9]+)?")


_NONE = Notation()


@dataclass(frozen=True)
class Guess:
    """A column's type, in lower case, and notation. `note`: what a person must decide."""

    type: str
    notation: Notation = _NONE
    note: str = ""


STRING = Guess("string")
_VARIES, _ROUNDS = "values vary in type", "rounds what has more digits"
_CUT = "digits below a microsecond are cut"
_MORE_DIGITS = re.compile("[.,][0-9]{6}[0-9]*[1-9]")
# A type that is no name of a STRUCT's field.
_TIMES = re.compile(r"(?:^|[<,:])(?:timestamp|date)(?=[,>]|$)")


def guess(found: Sequence[object], name: str = "", stamps: Sequence[int] = ()) -> Guess | None:
    """Return a guess for values of a field as JSON has them, numbers perhaps Decimals; None if all
    are null. Numbers are times if the field's `name` is of a time, or they are near the `stamps` of
    the records (milliseconds since 1970). Pure."""
    one = _guess(found, name, (min(stamps), max(stamps)) if stamps else None, False, 0)
    return STRING if one is not None and len(one.type) > _LONGEST_TYPE else one


def guess_type(found: Sequence[object]) -> str | None:
    """Return a type, in upper case, for values of a field that a column without a notation reads;
    None if all are null. Objects are STRING: few values do not have all their fields. Pure."""
    one = _guess(found, "", None, True, 0)
    if one is None:
        return None
    return "STRING" if re.search("struct|map", one.type) else one.type.upper()


def guess_text(
    texts: Sequence[str | None], name: str = "", stamps: Sequence[int] = ()
) -> Guess | None:
    """Return a guess for fields of CSV, where all values are text. Pure."""
    given = [text for text in texts if text is not None]
    if not given:
        return None
    if all(text in ("true", "false") for text in given):
        return Guess("boolean")
    if all(map(values.NUMBER.fullmatch, given)):
        if all(map(_WHOLE_NUMBER.fullmatch, given)):
            found = guess([int(text) for text in given], name, stamps)
            if found is not None and found.type == "bigint" and _are_codes(given):
                return Guess("string", note="numbers of one length, perhaps codes; else BIGINT")
            return found
        if _is_code(name):
            return Guess("string", note="numbers with a point, perhaps codes; else DECIMAL(p,s)")
        return guess([Decimal(text) for text in given], name, stamps)
    return guess(given, name, stamps)


def _is_code(name: str) -> bool:
    """Return whether a name is of what is no amount: of two spellings of a number, it has both."""
    return bool(_ID_WORDS.search(snake(name)) or _VERSION.search(snake(name)))


def _are_codes(texts: Sequence[str]) -> bool:
    """Return whether numbers may be codes, of which others have leading zeros."""
    lengths = {len(text) for text in texts}
    return len(lengths) == 1 and lengths.pop() >= _SHORTEST_CODE


def group_digits(texts: Sequence[str], sign: str) -> bool:
    """Return whether a sign in numbers may group digits: each time three follow. Pure."""
    some = [text for text in texts if sign in text]
    pattern = re.compile(rf"-?[1-9][0-9]{{0,2}}{re.escape(sign)}[0-9]{{3}}")
    return bool(some) and all(map(pattern.fullmatch, some))


def combine(one: str | None, other: str | None) -> str | None:
    """Return a type, in upper case, for values of both types; None is the type of null. Pure."""
    if one is None or other is None or one == other:
        return one or other
    return "DOUBLE" if {one, other} == {"BIGINT", "DOUBLE"} else "STRING"


Span = tuple[int, int] | None


def _guess(found: Sequence[object], name: str, span: Span, plain: bool, depth: int) -> Guess | None:
    given = [value for value in found if value is not None]
    if not given:
        return None
    kinds = {dict if isinstance(value, Mapping) else type(value) for value in given}
    if kinds == {bool}:
        return Guess("boolean")
    if kinds <= {int, float, Decimal}:
        return _of_numbers(given, name, span, plain)
    if kinds == {str}:
        return _of_texts(given, name, span, plain)
    if depth < _DEEPEST and kinds == {list}:
        items = [item for value in given for item in value]  # type: ignore[attr-defined]
        item = _guess(items[:_MOST_ITEMS], name, span, plain, depth + 1) or STRING
        return replace(item, type=f"array<{item.type}>")
    if depth < _DEEPEST and kinds == {dict}:
        return _of_objects(given, name, span, plain, depth)  # type: ignore[arg-type]
    return STRING if kinds in ({list}, {dict}) else Guess("string", note=_VARIES)


def _of_numbers(given: Sequence[object], name: str, span: Span, plain: bool) -> Guess:
    numbers = [n if isinstance(n, Decimal) else Decimal(str(n)) for n in given]
    if not plain and (unit := _unit(numbers, name, span)):
        return _of_unit(unit)
    is_whole = all(isinstance(n, int) for n in given)
    if is_whole and all(-(2**63) <= n < 2**63 for n in numbers):
        return Guess("bigint", note=_looks_like_time(numbers))
    if not is_whole and all(Decimal(repr(float(n))) == n for n in numbers):
        is_money = all(n == n.quantize(Decimal("0.01")) for n in numbers if abs(n) < 10**12)
        return Guess("double", note="or DECIMAL(12,2), if an amount" if is_money else "")
    return Guess(kind) if (kind := _decimal(numbers)) else STRING


def _decimal(numbers: Sequence[Decimal]) -> str:
    """Return the DECIMAL of all digits of numbers; empty if they are too many."""
    if not all(n.is_finite() and -MOST_DIGITS <= n.adjusted() < MOST_DIGITS for n in numbers):
        return ""
    scale = max(0, *(-int(n.as_tuple().exponent) for n in numbers))
    whole = max(0, *(n.adjusted() + 1 for n in numbers))
    if whole + scale > MOST_DIGITS:
        return ""
    return f"decimal({18 if whole + scale <= 12 else MOST_DIGITS},{scale})"


def _fixed(texts: Sequence[str]) -> Guess | None:
    """Return a DECIMAL for texts with the same number of digits after the point, two or more: of
    one digit are versions too."""
    scales = {len(text.partition(".")[2]) for text in texts}
    if len(scales) == 1 and min(scales) > 1 and all(map(values.NUMBER.fullmatch, texts)):
        kind = _decimal([Decimal(text) for text in texts])
        return Guess(kind, note=_ROUNDS) if kind else None
    return None


def _unit(numbers: Sequence[Decimal], name: str, span: Span) -> str:
    """Return the unit of numbers that are times; empty if they are not, or may be others."""
    unit = _unit_by_size(numbers)
    if not unit:
        return ""
    is_near = False
    # A number made from the time, such as an order's, is an identity and no time.
    if span is not None and not _ID_WORDS.search(snake(name)):
        first, last = (Decimal(ms) / 1000 for ms in span)
        seconds = [n / PER_SECOND[unit] for n in numbers]
        is_near = first - _NEAR_S <= min(seconds) and max(seconds) <= last + _NEAR_S
    return unit if is_near or _is_time(name) else ""


def _is_time(name: str) -> bool:
    words = snake(name)
    return _TIME_WORDS.search(words) is not None and _SPAN_WORDS.search(words) is None


def _unit_by_size(numbers: Sequence[Decimal]) -> str:
    # Zero is 1970 in every unit, and no time for many producers.
    some = [n for n in numbers if n]
    for unit, per_second in PER_SECOND.items():
        if some and all(_FIRST_SECOND * per_second <= n <= _LAST_SECOND * per_second for n in some):
            return unit
    return ""


def _of_unit(unit: str) -> Guess:
    note = f"{_CUT}; BIGINT has all" if unit == "nanos" else ""
    return Guess("timestamp", Notation(unit=unit), note)


def _looks_like_time(numbers: Sequence[Decimal]) -> str:
    unit = _unit_by_size(numbers)
    return (
        f"perhaps times: {{type: TIMESTAMP, unit: {unit}}}" if unit not in ("", "seconds") else ""
    )


def _of_texts(given: Sequence[object], name: str, span: Span, plain: bool) -> Guess:
    texts = [str(text) for text in given]
    # The next version may be another text.
    if max(map(len, texts)) > 1_000 or not all(texts) or _VERSION.search(snake(name)):
        return STRING
    for kind in ("timestamp", "date"):
        if _read(texts, kind, Notation()):
            has_zone = kind == "date" or all(
                re.search("(Z|[+-][0-9:]{2,6})$", t[10:]) for t in texts
            )
            return Guess(kind, note="" if plain else _note(texts, has_zone))
    if plain:
        return STRING
    if all(map(values.NUMBER.fullmatch, texts)):
        if unit := _unit([Decimal(text) for text in texts], name, span):
            return _of_unit(unit)
        note = 'numbers in text, perhaps {type: BIGINT, decimal: "."}'
        if not all(map(values.INTEGER.fullmatch, texts)):
            fixed = None if _is_code(name) else _fixed(texts)
            return fixed or Guess("string", note="numbers in text, perhaps DECIMAL(p,s)")
        if not (pattern := _of_digits(texts, name)):
            return Guess("string", note=note)
        return _of_pattern([pattern], texts) or Guess("string", note=note)
    if not _is_code(name) and all(map(_COMMA.fullmatch, texts)):
        if group_digits(texts, ","):
            return Guess("string", note="the comma may group digits, or be the decimal sign")
        kind = _decimal([Decimal(text.replace(",", ".")) for text in texts])
        return Guess(kind, Notation(decimal=","), _ROUNDS) if kind else STRING
    found = _of_pattern(_patterns(texts[0]), texts) or STRING
    if found.notation.pattern in _OF_POINTS and not (
        all(map(_PADDED.fullmatch, texts)) and (len(set(texts)) > 1 or _is_time(name))
    ):
        return Guess("string", note="perhaps dates, or versions")
    return found


def _of_digits(texts: Sequence[str], name: str) -> str:
    lengths = {len(text) for text in texts}
    if len(lengths) > 1 or not _is_time(name):
        return ""
    return _DIGITS_ALONE.get(lengths.pop(), "")


def _of_pattern(patterns: Sequence[str], texts: Sequence[str]) -> Guess | None:
    """Return a time by the pattern that reads all texts; STRING if two read them as different
    times, None if none does."""
    found: dict[tuple[object, ...], str] = {}
    for pattern in patterns:
        kind = "timestamp" if parse_pattern(pattern).has_clock else "date"
        if _read(texts, kind, Notation(pattern=pattern)):
            # 11/11 is one day by both, and tomorrow is not.
            of = pattern.find("%d") < pattern.find("%m"), *map(parse_pattern(pattern).iso, texts)
            found.setdefault(of, pattern)
    if not found:
        return None
    if len(found) > 1:
        choices = " or ".join(found.values())
        return Guess("string", note=f"perhaps times, of the form {choices}")
    [pattern] = found.values()
    clock = parse_pattern(pattern).has_clock
    has_zone = not clock or "%z" in pattern or pattern.endswith(("UTC", "GMT"))
    kind = "timestamp" if clock else "date"
    return Guess(kind, Notation(pattern=pattern), _note(texts, has_zone))


def _note(texts: Sequence[str], has_zone: bool) -> str:
    """Return what times lose or assume."""
    is_cut = any(map(_MORE_DIGITS.search, texts))
    notes = [f"{_CUT}; STRING has all"] if is_cut else []
    return "; ".join(notes if has_zone else [*notes, "without a zone: UTC"])


def _read(texts: Sequence[str], kind: str, notation: Notation) -> bool:
    try:
        for text in texts:
            moment(text, values.SIMPLE[kind], notation)
    except Unreadable:
        return False
    return True


@lru_cache(maxsize=4_096)
def _patterns(text: str) -> tuple[str, ...]:
    """Return the patterns that may be those of a text."""
    if not 6 <= len(text) <= _LONGEST_TIME or sum(c.isdigit() for c in text) < 4:
        return ()
    whole = [pattern for pattern in _WHOLE if _is(text, pattern)]
    clock = _CLOCK.search(text)
    if clock is None:
        return (*whole, *(pattern for pattern in _DATES if _is(text, pattern)))
    before, after = text[: clock.start()], text[clock.end() :]
    form = "%I" if clock["noon"] else "%H"
    form += ":%M" + (":%S" if clock["second"] else "")
    form += f"{clock['fraction'][0]}%f" if clock["fraction"] else ""
    form += clock["noon"][:-2] + "%p" if clock["noon"] else ""
    # A day's own text ends with a letter or a digit.
    day = re.sub(r"(?:[^0-9A-Za-z]+|(?<=[0-9])T)$", "", before)
    join = before[len(day) :]
    blank = " " if after.startswith(" ") else ""
    zone = after if after in ("", " UTC", " GMT") else f"{blank}%z"
    dates = [pattern for pattern in _DATES if _is(day, pattern)]
    return (*whole, *(f"{date}{join}{form}{zone}" for date in dates))


def _is(text: str, pattern: str) -> bool:
    return parse_pattern(pattern).iso(text) is not None


def _of_objects(
    given: Sequence[Mapping[str, object]], name: str, span: Span, plain: bool, depth: int
) -> Guess:
    counts = Counter(key for value in given for key in value)
    names = list(counts)
    is_struct = 0 < len(names) <= _MOST_FIELDS and are_names(names)
    # Names that few objects share are values themselves.
    is_varied = len(names) > 3 and 4 * counts.total() < len(names) * len(given)
    # The next object may have other labels.
    has_labels = _LABEL_WORDS.search(name) and not {*map(str.lower, names)} <= _OF_ONE_LABEL
    if names and has_labels and _are_texts(given):
        return Guess("map<string,string>")
    if names and (not is_struct or is_varied):
        items = [item for value in given for item in value.values()]
        item = _guess(items[:_MOST_ITEMS], name, span, plain, depth + 1) or STRING
        if item.note != _VARIES:
            return replace(item, type=f"map<string,{item.type}>")
    if not is_struct:
        return STRING

    def guessed(plain: bool) -> dict[str, Guess]:
        columns = {key: [value.get(key) for value in given] for key in names}
        return {
            key: _guess(column, key, span, plain, depth + 1) or STRING
            for key, column in columns.items()
        }

    parts = guessed(plain)
    if (notation := common_notation(parts.values())) is None:
        # A column has one notation, at all levels.
        parts, notation = guessed(True), Notation()
    return Guess(f"struct<{','.join(f'{key}:{of.type}' for key, of in parts.items())}>", notation)


def _are_texts(given: Sequence[Mapping[str, object]]) -> bool:
    return all(isinstance(item, str | None) for value in given for item in value.values())


def are_names(names: Collection[str]) -> bool:
    """Return whether names can be those of a STRUCT's fields."""
    return all(map(NAME.fullmatch, names)) and len({name.lower() for name in names}) == len(names)


def common_notation(parts: Collection[Guess]) -> Notation | None:
    """Return the notation of all parts; None if their times differ in it."""
    times = {replace(part.notation, decimal="") for part in parts if _TIMES.search(part.type)}
    signs = {part.notation.decimal for part in parts} - {""}
    if len(times) > 1 or len(signs) > 1:
        return None
    return replace(times.pop() if times else Notation(), decimal=signs.pop() if signs else "")


def snake(name: str) -> str:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return re.sub(r"[^0-9a-zA-Z]+", "_", words).lower()
