"""The records that the benchmarks send: their columns, their bytes, and their topics."""

from __future__ import annotations

import hashlib
import io
import json
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, partial

import fastavro
from confluent_kafka import KafkaException, Message, Producer
from protos import HEAD, type_of

from anabranch import config
from anabranch.kafka.client import create_topic
from anabranch.offsets.hours import start_of

PARTITIONS = 4
_EVENT = (
    "event_id STRING NOT NULL, event_type STRING, game STRING, player_id STRING, event_time "
    "TIMESTAMP NOT NULL, level INT, amount DOUBLE, platform STRING, payload STRING"
)
_KINDS = ("session_start", "session_end", "level_up", "purchase", "achievement")
_TEXTS = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(997)]


@dataclass(frozen=True)
class Registered:
    """A registered schema: the URL of the registry, and the schema's id."""

    url: str
    id: int


@dataclass(frozen=True)
class Shape:
    """Records of one kind. `schema`: as in a stream's file; every shape has a column `event_time`.

    The values are JSON objects; with an Avro schema that is `registered`, Confluent's wire format;
    with `proto` messages of that file's type Event; with `csv` lines. Each `broken`-th is cut off.
    `select`: of the stream's file.
    """

    name: str
    schema: str
    fields: Callable[[int], dict[str, object]]
    avro: str = ""
    registered: Registered | None = None
    proto: str = ""
    csv: bool = False
    broken: int = 0
    select: tuple[object, ...] = ()

    def value(self, number: int, at: float) -> bytes:
        """Return the value of a record by its number, with an event time in seconds since 1970."""
        event = {"event_id": f"{self.name}-{number}", **self.fields(number)}
        if self.proto:
            event["event_time"] = datetime.fromtimestamp(at, UTC)
            message: bytes = type_of(self.proto, "shop.Event")(**event).SerializeToString()
            return message
        if self.csv:
            event["event_time"] = _iso_time(at)
            return ",".join(str(event[c.split(" ")[0]]) for c in self.schema.split(", ")).encode()
        if not self.avro:
            value = json.dumps(event | {"event_time": _iso_time(at)}).encode()
            return value[:-1] if self.broken and number % self.broken == 0 else value
        assert self.registered is not None
        out = io.BytesIO(b"\0" + self.registered.id.to_bytes(4, "big"))
        out.seek(0, io.SEEK_END)
        fastavro.schemaless_writer(
            out, _parsed(self.avro), event | {"event_time": datetime.fromtimestamp(at, UTC)}
        )
        return out.getvalue()


@cache
def _parsed(schema: str) -> fastavro.types.Schema:
    return fastavro.parse_schema(json.loads(schema))


def _event(payload: int, i: int) -> dict[str, object]:
    text = _TEXTS[i % 997]
    return {
        "event_type": _KINDS[i % 5],
        "game": f"g{i % 40}",
        "player_id": f"p{i * 7919 % 100_000}",
        "level": i % 90,
        "amount": i % 1000 / 7,
        "platform": "ios",
        "payload": (text * (payload // 64 + 1))[:payload],
    }


def _wide(i: int) -> dict[str, object]:
    text = _TEXTS[i % 997][:8]
    kinds: tuple[object, ...] = (text, i % 1000, i % 1000 / 8, i % 2 == 0)
    return {f"c{n}": kinds[n % 4] for n in range(198)}


def _nested(i: int) -> dict[str, object]:
    text = _TEXTS[i % 997]
    return {
        "customer": {"id": f"c{i % 100_000}", "country": text[:2]},
        "items": [
            {"sku": text[n : n + 8], "price": (i % 1000 + n) / 4, "n": n} for n in range(i % 4)
        ],
        "labels": {"a": text[:4], "b": text[4:12]},
        "total": i % 100_000 / 100,
    }


def _avro(ddl: str) -> str:
    """Return the Avro schema of columns."""
    kinds = {"STRING": "string", "INT": "int", "DOUBLE": "double"}
    at = {"type": "long", "logicalType": "timestamp-micros"}
    fields = []
    for column in ddl.split(", "):
        name, kind, *required = column.split(" ")
        one = at if kind == "TIMESTAMP" else kinds[kind]
        fields.append({"name": name, "type": one if required else ["null", one]})
    return json.dumps({"type": "record", "name": "event", "fields": fields})


_PROTO = HEAD + (
    "message Event { string event_id = 1; optional string event_type = 2; "
    "optional string game = 3; optional string player_id = 4; "
    "google.protobuf.Timestamp event_time = 5; optional int32 level = 6; "
    "optional double amount = 7; optional string platform = 8; optional string payload = 9; }"
)
_WIDE = ", ".join(f"c{n} {('STRING', 'INT', 'DOUBLE', 'BOOLEAN')[n % 4]}" for n in range(198))
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("json_440", _EVENT, partial(_event, 192)),
        Shape("avro", _EVENT, partial(_event, 192), _avro(_EVENT)),
        Shape("csv", _EVENT, partial(_event, 192), csv=True),
        Shape("protobuf", _EVENT, partial(_event, 192), proto=_PROTO),
        Shape("json_broken", _EVENT, partial(_event, 192), broken=50),
        Shape(
            "json_nested",
            "event_id STRING NOT NULL, event_time TIMESTAMP NOT NULL, customer STRUCT<id: STRING, "
            "country: STRING>, items ARRAY<STRUCT<sku: STRING, price: DECIMAL(10,2), n: INT>>, "
            "labels MAP<STRING, STRING>, total DECIMAL(12,2)",
            _nested,
        ),
        Shape(
            "json_select",
            _EVENT,
            partial(_event, 192),
            select=(
                "event_id",
                "event_time",
                "event_type",
                "game",
                "player_id",
                "level",
                {"cents": {"sql": "(amount * 100)::BIGINT", "type": "BIGINT"}},
                {"os": {"sql": "upper(platform)", "type": "STRING"}},
                {"digits": {"sql": "regexp_extract(payload, '[0-9]+')", "type": "STRING"}},
                "payload",
            ),
        ),
        Shape("json_2k", _EVENT, partial(_event, 1750)),
        Shape(
            "json_200_columns",
            f"event_id STRING NOT NULL, event_time TIMESTAMP NOT NULL, {_WIDE}",
            _wide,
        ),
    )
}


def fill(bootstrap_servers: str, shape: Shape, records: int) -> int:
    """Create the shape's topic, send `records` records as fast as possible, and return their bytes.
    Raises KafkaException unless all are acknowledged."""
    create(bootstrap_servers, shape)
    producer, failed, size = _producer(bootstrap_servers, 100), [], 0
    now = time.time()
    for i in range(records):
        value = shape.value(i, now)
        size += len(value)
        _send(
            producer, shape.name, i, value, lambda error, _: failed.append(error) if error else None
        )
    _flush(producer, failed)
    return size


def fill_hour(
    bootstrap_servers: str,
    shape: Shape,
    records: int,
    hour: str,
    first: int = 0,
    is_new: bool = True,
) -> None:
    """Send records with timestamps over one hour. One in a thousand repeats another's event, one in
    five thousand is a dead letter. They are numbered from `first`, a multiple of 5,000. Creates the
    topic if `first` is 0 and it `is_new`."""
    if first == 0 and is_new:
        create(bootstrap_servers, shape)
    producer, failed = _producer(bootstrap_servers, 100), []
    start = start_of(hour).timestamp()
    for i in range(first, first + records):
        at = start + 3600 * (i - first) / records
        value = shape.value(i - 500 if i % 1000 == 999 else i, at)
        if i % 5000 == 77:
            value = value[:-1]
        _send(
            producer,
            shape.name,
            i,
            value,
            lambda error, _: failed.append(error) if error else None,
            at,
        )
    _flush(producer, failed)


def acknowledged_at(
    bootstrap_servers: str,
    shapes: list[Shape],
    rate: int,
    stop: threading.Event,
    unsure: Collection[str] = (),
    linger_ms: int = 20,
    pause: float = 0.002,
) -> Iterator[tuple[str, int, int, float]]:
    """Send `rate` records per second of each shape to its topic until `stop`. Yield topic,
    partition, offset and time of each acknowledgement. Records of topics in `unsure` may fail.
    `pause`: the longest one (s) while no record is due."""
    acknowledged: list[tuple[str, int, int, float]] = []
    failed: list[object] = []

    def delivered(error: object, message: Message) -> None:
        if error:
            failed.extend([] if message.topic() in unsure else [error])
        else:
            acknowledged.append(
                (message.topic(), message.partition(), message.offset(), time.time())
            )

    producer, began, sent = _producer(bootstrap_servers, linger_ms), time.time(), 0
    while not stop.is_set():
        now = time.time()
        due = min(int((now - began) * rate * len(shapes)) - sent, 500)
        for i in range(sent, sent + due):
            shape = shapes[i % len(shapes)]
            # librdkafka refuses a record at once if it knows that the topic is gone.
            with suppress(KafkaException) if shape.name in unsure else nullcontext():
                _send(producer, shape.name, i, shape.value(i, now), delivered)
        sent += due
        producer.poll(0 if due else pause)
        taken, acknowledged[:] = acknowledged[:], []
        yield from taken
    _flush(producer, failed)
    yield from acknowledged


def create(bootstrap_servers: str, shape: Shape) -> None:
    """Create the shape's topic."""
    create_topic(config.Kafka(bootstrap_servers=bootstrap_servers), shape.name, PARTITIONS)


def _producer(bootstrap_servers: str, linger_ms: int) -> Producer:
    return Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "compression.type": "zstd",
            "linger.ms": linger_ms,
            "batch.size": 1_000_000,
            "queue.buffering.max.messages": 500_000,
            "acks": "all",
            "enable.idempotence": True,
        }
    )


def _send(
    producer: Producer,
    topic: str,
    number: int,
    value: bytes,
    delivered: Callable[..., None],
    at: float | None = None,
) -> None:
    stamp = {} if at is None else {"timestamp": int(at * 1000)}
    while True:
        try:
            producer.produce(
                topic, value, key=b"p%d" % (number % 100_000), on_delivery=delivered, **stamp
            )
        except BufferError:
            producer.poll(0.1)
        else:
            break
    if number % 1000 == 0:
        producer.poll(0)


def _flush(producer: Producer, failed: list[object]) -> None:
    if left := producer.flush(120):
        raise KafkaException(
            f"expected every record to be acknowledged, found {left} without an answer"
        )
    if failed:
        raise KafkaException(f"expected every record to be acknowledged, found {failed[0]}")


def _iso_time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")
