"""Each decoder of text that others may write answers any text with an error of its own, or with its
value for "not ours": never with another exception, and never with a name outside its folder."""

import base64
import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from anabranch.common import errors, health
from anabranch.common.json_values import parse, read_property, to_json
from anabranch.iceberg import files, other_tables
from anabranch.iceberg.owner import FORMAT, Owner
from anabranch.offsets.hours import Cut, Timeline
from anabranch.offsets.position import Position
from anabranch.protocol import ledger, publish_queue, registers, state
from anabranch.protocol.measured import MAINTAINED, read_measured, read_runs
from anabranch.subjects.columns import NotAColumn, avro_fields, json_schema_fields
from serving_layer.changes import PREFIX, Token
from serving_layer.egress.folder import Manifest
from serving_layer.egress.hour import SenderPosition

TIME = "2026-11-20T13:00:00+00:00"
FILE = "2026-11-20T13-r1-5f0c1e9277ab01cd-00000.parquet"
DELIVERY = {
    "delivery_id": "a", "hour": "2026-11-20T13", "target": "t", "place": "p", "revision": 1,
    "served": "batch", "snapshot_id": 1, "rows": 1, "files": 1, "token": "t", "delivered_at": TIME,
}  # fmt: skip
MANIFEST = {
    "stream": "s", "hour": "2026-11-20T13", "revision": 1, "served": "batch", "snapshot": 1,
    "sequence": 1, "source": "a", "rows": 1, "files": [{"name": FILE, "rows": 1, "bytes": 1}],
    "delivery": "5f0c1e92", "version": 1,
}  # fmt: skip
AVRO = {
    "type": "record", "name": "r", "namespace": "n",
    "fields": [
        {"name": "a", "type": {"type": "fixed", "name": "f", "size": 4}},
        {"name": "b", "type": ["null", {"type": "enum", "name": "e", "symbols": ["x"]}]},
        {"name": "c", "type": {"type": "array", "items": {"type": "map", "values": "int"}}},
        {"name": "d", "type": {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}},
    ],
}  # fmt: skip
JSON_SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": ["null", "string"], "format": "date"},
        "b": {"type": "array", "items": {"$ref": "#/$defs/x"}},
        "c": {"anyOf": [{"type": "null"}, {"enum": ["x", "y"]}]},
        "d": {"type": "object", "additionalProperties": {"const": 5}},
        "e": {"type": "object", "properties": {"f": {"type": "integer"}}},
    },
    "$defs": {"x": {"type": "number"}},
}


def read_token(text: str) -> object:
    return Token.decode(PREFIX + base64.urlsafe_b64encode(text.encode()).decode())


@dataclass(frozen=True)
class Decoder:
    """`good`: a value that the decoder accepts; `is_other`: the result for text of others."""

    decode: Callable[[str], object]
    good: Any
    is_other: Callable[[Any], bool] = lambda _: False


HOUR = "2026-11-20T13"
CUT = Cut("t", {0: (1, 5)})
AT = datetime(2026, 11, 20, 13, tzinfo=UTC)
ERASURE = registers.Erasure("i", "c", AT, AT, HOUR, "t", {0: 5}, 1, HOUR, {HOUR: 1}, False, AT, AT)
SENT = {"hour": "h", "source": "s", "partition": 0, "offset": 1}
HOLD = registers.Hold(HOUR, HOUR, "u", AT, "w")


def stored(key: str, read: Callable[[dict[str, str]], object], good: Any) -> Decoder:
    """A property of the tables, whose value for "not ours" is empty."""
    return Decoder(lambda text: read({key: text}), good, is_empty)


def value_of(key: str, read: Callable[[str], object], good: Any, *missing: str) -> Decoder:
    """A property that is refused, unless a `missing` one has a value."""
    of_others = is_empty if missing else lambda _: False
    return Decoder(lambda text: read_property({key: text}, key, read, *missing), good, of_others)


def is_empty(found: object) -> bool:
    return found in ([], {}, ({}, {}), registers.Holds(), registers.Expired(), registers.Erasures())


# State that publishes write to properties of the tables, which other programs can set.
# State that publishes write to properties of the tables, which other programs can set.
STORED = {
    "position": value_of(state.POSITION, Position.from_json, {"topic_id": "t", "partitions": {"0": 5}}),
    "timeline": value_of(
        state.TIMELINE, Timeline.from_json,
        json.loads(Timeline(HOUR, HOUR, {0: 1}, {HOUR: {0: 5}}, {HOUR: CUT}).to_json()),
    ),
    "accepted hours": stored(
        state.ACCEPTED, lambda p: state.read_accepted({"batch": p, "main": {}}),
        {HOUR: to_json(state.Accepted(1, CUT, True, (HOUR,)))},
    ),
    "waiting decisions": stored(
        state.DECISIONS, lambda p: [*map(state.waiting_row, state.read_waiting(p, state.DECISIONS))],
        [ledger.decision(HOUR, "accepted", 1, CUT, AT, "i").as_waiting()],
    ),
    "waiting dead letters": stored(
        state.DEAD_LETTERS, lambda p: state.read_waiting(p, state.DEAD_LETTERS),
        [{"id": "i", "at": TIME, "layer": "speed", "paths": ["p"]}],
    ),
    "expired hours": stored(
        registers.EXPIRED, registers.Expired.from_properties,
        json.loads(registers.Expired(HOUR, ((HOUR, HOUR),), AT).to_json()),
    ),
    "holds": stored(
        registers.HOLDS, registers.Holds.from_properties,
        json.loads(registers.Holds((HOLD,), AT).to_json()),
    ),
    "erasures": stored(
        registers.ERASURES, registers.Erasures.from_properties,
        json.loads(registers.Erasures((ERASURE,)).to_json()),
    ),
    "measurements": Decoder(
        read_measured, {"speed": {"seconds": {"stage": [1.5, {"1": 2}]}, "counts": {"a": {"b": 1}}}}, is_empty,
    ),
    "owner": Decoder(Owner.from_json, {"stream": "s", "topic": "t", "cluster_id": "c", "format": FORMAT}),
    "folders": value_of(files.FOLDERS, partial(parse, list[str]), ["s3://b/f"], "[]"),
}  # fmt: skip
LEDGER = {
    "cut": {"0": [1, 5]},
    "gaps": {"control": 1},
    "diff": {"missing": 1, "extra": 0, "changed": 0, "duplicate": 0, "unread": 0, "sample": [{}]},
    "quality": {"passed": True, "failed": [{"type": "x"}], "suite": "s"},
    "partitions": {"0": {"offsets": 1, "good": 1, "dead": 0, "duplicate": 0, "gaps": {"control": 1}}},
    "sources": {"kafka": 1},
    "run": {"began": TIME, "files": 1, "parent": "p"},
    "unknown": {"records": 1, "fields": [{"name": "f", "records": 1, "first": [0, 1], "last": [0, 1]}]},
    "act": {"name": "override", "user": "u", "host": "h", "at": TIME, "why": "w"},
    "erasure": {"id": "i", "places": [[0, 1]]},
    "imported": {"source": "s", "rows": 1},
}  # fmt: skip


def of_ledger(column: str) -> Callable[[str], object]:
    """Reads a JSON column of the ledger, whose table other programs can write."""
    return lambda text: ledger._from_arrow(pa.table({"topic_id": ["t"], column: [text]}))


def lacks(column: str) -> Callable[[Any], bool]:
    return lambda found: not getattr(found[0], column, None) or found[0].cut == Cut("t", {})


DECODERS: dict[str, Decoder] = {
    **STORED,
    **{f"ledger, {name}": Decoder(of_ledger(name), good, lacks(name)) for name, good in LEDGER.items()},
    "manifest": Decoder(lambda text: Manifest.decode("path", text.encode()), MANIFEST),
    "position of the sender": Decoder(SenderPosition.decode, {"place": "p", "done": DELIVERY, "at": SENT}),
    "token": Decoder(read_token, {"s": "s", "f": "h", "c": [1, "d"], "a": {"h": [1, "batch", "e"]}}),
    "queue": Decoder(
        lambda text: publish_queue.read_queue({f"{publish_queue.TURN}id": text}),
        {"number": 1, "bound": 1.0, "what": "", "by": "", "asked_at": ""},
        lambda found: found[0].bound == publish_queue.MALFORMED_BOUND,
    ),
    "maintenance": Decoder(
        lambda text: read_runs({f"{MAINTAINED}.id": text}),
        {"began": TIME, "ended": TIME, "speed_hours": 1, "seconds": {"a": 1.0}},
        lambda found: found == (),
    ),
    "log of a file sink": Decoder(
        lambda text: other_tables.read_log(["0", "1"], lambda name: f"v1\n{text}", "folder"),
        {"path": "file:/x/part-0", "size": 1, "action": "add"},
        lambda found: found.entries == (),
    ),
    "Avro schema": Decoder(avro_fields, AVRO),
    "JSON Schema": Decoder(json_schema_fields, JSON_SCHEMA),
}  # fmt: skip
REFUSED = (errors.AnabranchError, NotAColumn)

TEXTS = {
    "brackets": "[" * 100_000, "objects": '{"a":' * 100_000,
    "closed brackets": "[" * 100_000 + "]" * 100_000, "a number of 100,000 digits": "9" * 100_000,
    "nothing": "", "no JSON": "x", "a path": '"../../x"', "zero": "0", "null": "null",
    "Infinity": "Infinity", "an empty list": "[]", "an empty object": "{}",
    "a surrogate": '"\\ud800"',
}  # fmt: skip
VALUES = [
    None, -1, 1.5, float("inf"), float("nan"), 10**400, True, "", "../../../etc/passwd",
    "/etc/passwd", f"../{FILE}", f"{FILE}/..", f"sub/{FILE}", f"{FILE}\n", "\0", [], [[]], ["../x"],
    {}, {"a": {}},
]  # fmt: skip


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    yield ()
    items = value.items() if isinstance(value, dict) else ()
    for key, item in enumerate(value) if isinstance(value, list) else items:
        yield from ((key, *rest) for rest in places(item))


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    made = deepcopy(value)
    at = made
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = new
    return made


def test_each_json_column_of_the_ledger_is_here() -> None:
    assert LEDGER.keys() == {*ledger._JSON}


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_what_was_written_is_read(decoder: Decoder) -> None:
    assert not decoder.is_other(decoder.decode(json.dumps(decoder.good)))


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_other_text_is_refused(decoder: Decoder, text: str) -> None:
    try:
        found = decoder.decode(text)
    except REFUSED as error:
        assert len(str(error)) < 1_000
        return
    assert decoder.is_other(found)


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_another_value_at_any_place_raises_no_other_exception(decoder: Decoder) -> None:
    for place in places(decoder.good):
        for value in VALUES:
            text = json.dumps(changed(decoder.good, place, value))
            try:
                found = decoder.decode(text)
            except REFUSED:
                continue
            except Exception as error:
                raise AssertionError(f"{place}: {text[:300]}") from error
            if isinstance(found, Manifest):
                assert found.names <= {FILE}, text


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_health_file_of_others_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "health"
    file.write_text(text)
    with pytest.raises(errors.AnabranchError, match="expected the health file of a speed job"):
        health.read_record(file)
