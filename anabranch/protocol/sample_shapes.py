"""The shape of an unknown field's value, without its contents: the ledger stores it, and the value
may be a secret."""

from __future__ import annotations

import re

# A JSON string, which may be truncated, and whether it is a key; or a digit of a number.
_PART = re.compile(r'"((?:\\.|[^"\\])*)("?)(\s*:)?|[0-9]', re.DOTALL)
# A character of a JSON string, with its escape.
_CHARACTER = re.compile(r"\\u[0-9a-fA-F]{4}|\\.|[^\\]", re.DOTALL)


def shape_of(sample: str) -> str:
    """Replace each letter of a value in a JSON text by `a` or `A` and each digit by `9`:
    `"2026-11-21T03Z"` becomes `"9999-99-99A99A"`. Names of fields, true, false and null stay.
    Idempotent. Pure."""
    return _PART.sub(_masked, sample)


def _masked(part: re.Match[str]) -> str:
    text, end, colon = part.groups()
    if text is None:
        return "9"
    if colon is not None:
        return part.group()
    return f'"{_CHARACTER.sub(lambda c: _class(c.group()), text)}{end}'


def _class(character: str) -> str:
    if len(character) == 6:
        return "a"
    if len(character) == 2 or not character.isalnum():
        return character
    return "9" if character.isdigit() else "A" if character.isupper() else "a"
