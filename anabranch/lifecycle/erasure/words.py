"""Find erased values in the bytes of records, in one pass over the bytes for all values."""

from __future__ import annotations

import html
import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator

_RUN = re.compile(r"\w+")
_RUN_OR_MARK = re.compile(r"\w+|\W", re.DOTALL)
# A byte that no text has.
_CONTROL = re.compile(rb"[\0-\x08\x0b\x0c\x0e-\x1f\x7f]")
# A registry's frame has zero bytes before a text in UTF-8.
_FRAME = 5
# JSON nested in JSON strings is escaped again.
_MOST_ESCAPES = 3
_ESCAPES = re.compile(rb"((?:\\u[0-9a-fA-F]{4})+)|\\(.)", re.DOTALL)
_CONTROLS = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def normal_forms(values: Iterable[str]) -> frozenset[str]:
    """Return values in each form that Unicode has for the same text, composed and decomposed (UAX
    15): writers on macOS decompose accents."""
    texts, normal = frozenset(values), unicodedata.normalize
    return frozenset(f for text in texts for f in (text, normal("NFC", text), normal("NFD", text)))


class Words:
    """Values to find in bytes of any format. The time does not grow with the number of values.

    Bytes have a value as a whole word: no letter, digit or underscore of any alphabet is next to
    it. Escapes of JSON and XML and the doubled quotes of CSV count as their characters. Bytes that
    are not UTF-8 are also read as JSON in UTF-16 or UTF-32, and as Windows-1252. They also have a
    value that follows its length in bytes, as in Avro and Protobuf: there the bytes of the length
    and of the next field may be letters too.
    """

    def __init__(self, values: Iterable[str]) -> None:
        self._values = frozenset(value for value in values if value)
        self._runs = _RUN if all(map(_RUN.search, self._values)) else _RUN_OR_MARK
        others = [value for value in self._values if not value.isascii()]
        self._others = (
            self if len(others) == len(self._values) else Words(others) if others else None
        )
        # By a value's first run of letters: the length before it, and that of the value. Where the
        # value is a whole word, this is a run of the text too.
        self._shapes: dict[str, set[tuple[int, int]]] = {}
        for value in self._values:
            run = _RUN.search(value) or _RUN_OR_MARK.match(value)
            assert run is not None
            self._shapes.setdefault(run[0], set()).add((run.start(), len(value)))
        self._sized = _Sized(self._values, is_text=False)
        self._sized_in_text = _Sized(self._values, is_text=True)

    def are_in(self, payload: bytes) -> bool:
        """Return whether the bytes have one of the values."""
        if not _is_binary(payload):
            return self._sized_in_text.is_in(payload) or self._is_spelled(payload)
        encoding, others = json.detect_encoding(payload), self._others
        is_wide = encoding.startswith(("utf-16", "utf-32")) and b"\0" in payload[_FRAME:]
        return (
            self._sized.is_in(payload)
            or self._is_spelled(payload)
            or (is_wide and self._is_spelled(payload.decode(encoding, "replace").encode()))
            # All encodings have the same bytes for ASCII.
            or (
                others is not None
                and others._is_spelled(payload.decode("cp1252", "replace").encode())
            )
        )

    def _is_spelled(self, payload: bytes) -> bool:
        return any(
            self._has_word(spelled.decode(errors="surrogateescape"))
            for spelled in spellings(payload)
        )

    def _has_word(self, text: str) -> bool:
        if self._shapes.keys().isdisjoint(self._runs.findall(text)):
            return False
        return any(
            start >= 0
            and text[start : start + length] in self._values
            and not _is_letter(text, start - 1)
            and not _is_letter(text, start + length)
            for run in self._runs.finditer(text)
            for before, length in self._shapes.get(run[0], ())
            for start in (run.start() - before,)
        )


class _Sized:
    """Values that follow their length in bytes. `is_text`: only lengths that are a letter or digit.
    In a text the quote before a longer value would be the length of a shorter one, and before
    other characters the value is a word."""

    def __init__(self, values: Collection[str], is_text: bool) -> None:
        self._values = frozenset(value.encode() for value in values)
        self._lengths: dict[bytes, set[int]] = {}
        for length in set(map(len, self._values)):
            # Protobuf's lengths; Avro's are signed.
            for written in (_varint(length), _varint(2 * length)):
                if not is_text or written.isalnum() or written == b"_":
                    self._lengths.setdefault(written, set()).add(length)
        short = b"".join(re.escape(one) for one in self._lengths if len(one) == 1)
        forms = [b"[" + short + b"]"] if short else []
        if any(len(one) > 1 for one in self._lengths):
            forms.append(rb"[\x80-\xff]{1,4}[\0-\x7f]")
        # Looks ahead: values may overlap.
        self._written = re.compile(b"(?=(" + b"|".join(forms) + b"))") if forms else None

    def is_in(self, payload: bytes) -> bool:
        return self._written is not None and any(
            payload[written.end(1) : written.end(1) + length] in self._values
            for written in self._written.finditer(payload)
            for length in self._lengths.get(written[1], ())
        )


def _varint(number: int) -> bytes:
    rest = number >> 7
    return bytes([number & 0x7F | 0x80]) + _varint(rest) if rest else bytes([number])


def _is_binary(payload: bytes) -> bool:
    if _CONTROL.search(payload):
        return True
    try:
        payload.decode()
    except UnicodeDecodeError:
        return True
    return False


def _is_letter(text: str, at: int) -> bool:
    if not 0 <= at < len(text):
        return False
    # A combining mark is a part of the letter before it.
    return bool(_RUN.match(text[at])) or unicodedata.category(text[at]).startswith("M")


def spellings(payload: bytes) -> Iterator[bytes]:
    """Yield a payload, the payload with CSV's doubled quotes as one, with XML's references decoded,
    and with JSON escapes decoded once or more often (RFC 8259, section 7)."""
    yield payload
    if b"&" in payload:
        text = payload.decode(errors="surrogateescape")
        yield html.unescape(text).encode(errors="surrogateescape")
    if b'""' in payload:
        yield payload.replace(b'""', b'"')
    for _ in range(_MOST_ESCAPES):
        if b"\\" not in payload:
            return
        payload = _ESCAPES.sub(_unescaped, payload)
        yield payload


def _unescaped(found: re.Match[bytes]) -> bytes:
    units, short = found.groups()
    if units is None:
        return _CONTROLS.get(short, short)
    return (
        bytes.fromhex(units.replace(b"\\u", b"").decode()).decode("utf-16-be", "replace").encode()
    )
