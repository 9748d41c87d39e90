"""Decode cases: values with the code of their verdict and a text in it."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from kafka_batches import START, micros, new_batch

from anabranch.config import EventTime
from anabranch.config.schema import parse_schema
from anabranch.decode import Decoded, Decoder, DecodeSpec

Case = tuple[bytes | None, str | None, str]


def spec_of(
    schema: str | Mapping[str, Any], form: str = "json", event_time: Any = None, **more: Any
) -> DecodeSpec:
    """The columns of a DDL or of the long form."""
    bounds = EventTime.model_validate(event_time) if event_time is not None else None
    return DecodeSpec(parse_schema(schema), bounds, form, **more)


def as_sent(value: object) -> bytes | None:
    """A value; one that is neither bytes nor None, as JSON."""
    return value if isinstance(value, bytes | None) else json.dumps(value).encode()


def decoded(spec: DecodeSpec, values: Sequence[object], **given: Any) -> Decoded:
    given = {"stamps": [micros(START)] * len(values), **given}
    return Decoder(spec).decode(new_batch([*map(as_sent, values)], **given))


def codes(result: Decoded) -> dict[int, str]:
    return {i: code for i, (code, _) in result.errors.items()}


def changed(value: bytes, dice: random.Random, start: int = 0) -> bytes:
    """One to three bytes from `start` on replaced, removed or inserted."""
    new = bytearray(value)
    for _ in range(dice.randrange(1, 4)):
        place = dice.randrange(start, max(len(new), start + 1))
        chosen = dice.choice((0, 1, 2, 3, 0x7F, 0x80, 0x81, 0xFF))
        flipped = bytes(old ^ 8 for old in new[place : place + 1])
        new[place : place + dice.randrange(2)] = dice.choice((b"", bytes([chosen]), flipped))
    return bytes(new)


def expect(spec: DecodeSpec, cases: Mapping[str, Case]) -> Decoded:
    """Decode all cases at once and each alone: each has its verdict."""
    result = decoded(spec, [value for value, _, _ in cases.values()])
    wrong = {}
    for i, (name, (value, code, words)) in enumerate(cases.items()):
        found, text = result.errors.get(i, (None, ""))
        alone = decoded(spec, [value]).errors.get(0, (None, ""))
        if found != code or words not in text or alone != (found, text):
            wrong[name] = (code, words, found, text, alone)
    assert not wrong
    return result
