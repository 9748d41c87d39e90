"""The records of an hour in a topic: keys, values, what takes former ones away, and how far they were sent. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, TypeVar

from anabranch.common.errors import ConfigurationError, Transient
from anabranch.common.output import plain
from anabranch.offsets.hours import Cut
from anabranch.protocol.deliveries import Delivery

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


@dataclass(frozen=True)
class Identity:
    """What identifies the records of an hour: the topic's id, partition and offset. `replaced` is as
    `Timeline.replaced_before` has it: an offset whose record Kafka lost, and gave to another one, identifies neither
    alone, so the later one's key also says how often that happened."""

    topic_id: str
    replaced: Sequence[tuple[Mapping[int, int], Mapping[int, int]]] = ()

    def key_of(self, partition: int, offset: int) -> bytes:
        """The identity of a record, which it has for ever."""
        times = sum(begins.get(partition, 0) <= offset < ends.get(partition, 0) for begins, ends in self.replaced)
        again = f"~{times}" if times else ""
        return f"{self.topic_id}{again}:{partition}:{offset}".encode()


def value_of(row: Mapping[str, Any]) -> bytes:
    """A row as JSON, in the words of `--output json`."""
    return json.dumps(plain(row), ensure_ascii=False, separators=(",", ":")).encode()


def places(rows: Iterable[Mapping[str, Any]], cut: Cut) -> Iterator[tuple[int, int, Mapping[str, Any] | None]]:
    """Each row with its partition and offset, in that order; and every other place of the cut with none, since a row
    of it may have been delivered that is none any more, by a past that the table does not remember. `rows` come in
    that order too."""
    waiting = iter(rows)
    row = next(waiting, None)
    for partition, (start, end) in sorted(cut.ranges.items()):
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
