"""The form of a time as text, in the directives of Python's strptime. Pure.

Stricter than strptime: a blank is a blank, digits are ASCII, and a number next to another one has
all its digits. `%f` takes up to nine digits. Without `%z` a time is in UTC.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_MONTHS = (
    *("January", "February", "March", "April", "May", "June", "July", "August", "September"),
    *("October", "November", "December"),
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_TWO = "[0-9]{2}"
# Numbers that may have one digit, unless a number is next to them.
_SHORT = {"m": "[0-9]{1,2}", "d": "(?: [0-9]|[0-9]{1,2})"} | dict.fromkeys("HIMS", "[0-9]{1,2}")
_FORMS = {
    "Y": "[0-9]{4}",
    **dict.fromkeys("ymdHIMS", _TWO),
    "f": "[0-9]{1,9}",
    "z": "Z|[+-][0-9]{2}(?::?[0-9]{2})?",
    "p": "(?i:AM|PM)",
    "b": f"(?i:{'|'.join(name[:3] for name in _MONTHS)})",
    "B": f"(?i:{'|'.join(_MONTHS)})",
    "a": f"(?i:{'|'.join(name[:3] for name in _DAYS)})",
    "A": f"(?i:{'|'.join(_DAYS)})",
}
_NUMBERS = frozenset("YymdHIMSf")
_CLOCK = frozenset("HIMSfzp")
_MONTH_OF = {name[:3].upper(): f"{i:02}" for i, name in enumerate(_MONTHS, 1)}
_NEEDED = (("Y", "y"), ("m", "b", "B"), ("d",))


@dataclass(frozen=True)
class TimePattern:
    """`has_clock`: it has more than a day."""

    _text: re.Pattern[str]
    has_clock: bool

    def iso(self, text: str) -> str | None:
        """Return a text of this form as ISO 8601, a day if the pattern has no clock; None for any
        other text. The result may be no time: `2026-02-30`."""
        match = self._text.fullmatch(text)
        if match is None:
            return None
        part = match.groupdict()
        year = part.get("Y") or f"{19 if part['y'] >= '69' else 20}{part['y']}"
        month = part.get("m") or _MONTH_OF[(part.get("b") or part.get("B") or "")[:3].upper()]
        day = f"{year}-{month:0>2}-{part['d'].strip():0>2}"
        if not self.has_clock:
            return day
        hour = part.get("H", "00")
        if "I" in part:
            if not 1 <= int(part["I"]) <= 12:
                return None
            hour = str(int(part["I"]) % 12 + 12 * (part["p"].upper() == "PM"))
        clock = f"{hour:0>2}:{part.get('M', '00'):0>2}:{part.get('S', '00'):0>2}"
        zone = part.get("z", "Z").replace(":", "")
        zone = zone if zone == "Z" else f"{zone[:3]}:{zone[3:] or '00'}"
        return f"{day}T{clock}.{part.get('f', '0')[:6]}{zone}"


@lru_cache(maxsize=256)
def parse_pattern(pattern: str) -> TimePattern:
    """Raises ValueError, with what was expected and found."""
    pieces = re.findall(r"%.?|[^%]", pattern, re.DOTALL)
    names = [piece[1:] if piece[0] == "%" and piece != "%%" else "" for piece in pieces]
    known = ", ".join(f"%{name}" for name in _FORMS)
    for name, piece in zip(names, pieces, strict=True):
        if piece[0] == "%" and piece != "%%" and name not in _FORMS:
            raise ValueError(f"expected the directives {known}, found {piece}")
        if name and names.count(name) > 1:
            raise ValueError(f"expected each directive once, found %{name} twice")
    for choice in _NEEDED:
        if len(set(choice) & set(names)) != 1:
            raise ValueError(
                f"expected one of {', '.join(f'%{name}' for name in choice)}, found {pattern!r}"
            )
    if ("I" in names) != ("p" in names) or {"H", "I"} <= set(names):
        raise ValueError(f"expected %H, or %I with %p, found {pattern!r}")
    if set(names) & _CLOCK and not {"H", "I"} & set(names):
        raise ValueError(f"expected %H or %I beside minutes and zone, found {pattern!r}")
    text = ""
    for i, (name, piece) in enumerate(zip(names, pieces, strict=True)):
        beside = {names[i - 1] if i else "", names[i + 1] if i + 1 < len(names) else ""}
        is_free = not beside & _NUMBERS and not _is_digit(pieces, i)
        form = _SHORT[name] if is_free and name in _SHORT else _FORMS.get(name, "")
        text += f"(?P<{name}>{form})" if name else re.escape(piece[-1])
    return TimePattern(re.compile(text), bool(set(names) & _CLOCK))


def _is_digit(pieces: list[str], i: int) -> bool:
    """Return whether a literal digit is next to a piece."""
    return any(pieces[at].isdigit() for at in (i - 1, i + 1) if 0 <= at < len(pieces))
