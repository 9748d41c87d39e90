"""Decode cases: values with the code of their verdict and a text in it."""

from collections.abc import Mapping
from typing import Any

from kafka_batches import START, micros, new_batch

from anabranch.config import EventTime
from anabranch.config.columns import parse_columns
from anabranch.decode import Decoded, Decoder, DecodeSpec

Case = tuple[bytes | None, str | None, str]


def spec_of(ddl: str, form: str = "json", event_time: Any = None, **more: Any) -> DecodeSpec:
    bounds = EventTime.model_validate(event_time) if event_time is not None else None
    return DecodeSpec(parse_columns(ddl), bounds, form, **more)


def decoded(spec: DecodeSpec, values: list[bytes | None], **given: Any) -> Decoded:
    given = {"stamps": [micros(START)] * len(values), **given}
    return Decoder(spec).decode(new_batch(values, **given))


def expect(spec: DecodeSpec, cases: Mapping[str, Case]) -> Decoded:
    """Decode all cases at once and each alone: each has its verdict."""
    values = [value for value, _, _ in cases.values()]
    result = decoded(spec, values)
    wrong = {}
    for i, (name, (value, code, words)) in enumerate(cases.items()):
        found, text = result.errors.get(i, (None, ""))
        alone = decoded(spec, [value]).errors.get(0, (None, ""))
        if found != code or words not in text or alone != (found, text):
            wrong[name] = (code, words, found, text, alone)
    assert not wrong
    return result
