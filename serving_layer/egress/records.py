"""The records of an hour in a topic: keys, values, what takes former ones away, and how far they were sent. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, TypeVar

from anabranch.errors import ConfigurationError, Transient
from anabranch.hours import Cut
from anabranch.output import plain
from anabranch.protocol.deliveries import Delivery
from anabranch.protocol.ledger_row import LedgerRow
from serving_layer.changes.plan import is_change
from serving_layer.egress.hour import Hour

T = TypeVar("T")

# Kafka's own limit (`offset.metadata.max.bytes`).
LONGEST = 4096


@dataclass(frozen=True)
class At:
    """How far an hour of this content was sent: up to this place, included, in the order of partition and offset."""

    hour: str
    source: str
    partition: int
    offset: int


@dataclass(frozen=True)
class Position:
    """What a transaction says of its sender: the last hour that is whole in the topic, and of the one after it, where a
    transaction is not its last, how far it was sent."""

    place: str
    done: Delivery | None = None
    at: At | None = None

    def encode(self) -> str:
        """Raises Transient when it is longer than Kafka takes: a token is, while many decisions wait for their row."""
        text = json.dumps(plain(asdict(self)), separators=(",", ":"))
        if len(text.encode()) > LONGEST:
            raise Transient(
                f"deliver hour {self.done.hour if self.done else ''}: expected a position of {LONGEST} bytes at most, "
                f"found {len(text)}: decisions wait to be recorded; run `anabranch merge STREAM`, then again"
            )
        return text

    @staticmethod
    def decode(text: str) -> Position:
        """Raises ConfigurationError for what `encode` did not write."""
        try:
            data: dict[str, Any] = json.loads(text)
            done, at = data["done"], data["at"]
            if done is not None:
                done["delivered_at"] = datetime.fromisoformat(done["delivered_at"])
            return Position(
                data["place"], Delivery(**done) if done is not None else None, At(**at) if at is not None else None
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"egress: expected a position of its own in the group's offsets, found {text[:80]!r}; if nobody needs "
                "them, delete the group"
            ) from error


def key_of(topic_id: str, partition: int, offset: int) -> bytes:
    """The identity of a record, which it has for ever."""
    return f"{topic_id}:{partition}:{offset}".encode()


def value_of(row: Mapping[str, Any]) -> bytes:
    """A row as JSON, in the words of `--output json`."""
    return json.dumps(plain(row), ensure_ascii=False, separators=(",", ":")).encode()


def may_have_been_otherwise(hour: Hour, rows: Iterable[LedgerRow]) -> bool:
    """Whether another content of the hour may have been delivered before this one, of all decisions about it."""
    changed = {row.decision_id for row in rows if is_change(row)}
    return hour.revision > 1 or hour.served != "batch" or len(changed) > 1


def places(rows: Iterable[Mapping[str, Any]], cut: Cut | None) -> Iterator[tuple[int, int, Mapping[str, Any] | None]]:
    """Each row with its partition and offset, in that order; and, where a cut is given, every other place of it with
    none. `rows` come in that order too."""
    waiting = iter(rows)
    row = next(waiting, None)
    for partition, (start, end) in sorted(cut.ranges.items()) if cut is not None else ():
        for offset in range(start, end):
            if row is not None and (row["kafka_partition"], row["kafka_offset"]) == (partition, offset):
                yield partition, offset, row
                row = next(waiting, None)
            else:
                yield partition, offset, None
    while row is not None:
        yield row["kafka_partition"], row["kafka_offset"], row
        row = next(waiting, None)


def chunks(items: Iterable[T], size: int) -> Iterator[tuple[list[T], bool]]:
    """The items, so many at a time, and whether they are the last; of nothing, nothing once, as the last."""
    chunk: list[T] = []
    for item in items:
        if len(chunk) == size:
            yield chunk, False
            chunk = []
        chunk.append(item)
    yield chunk, True
