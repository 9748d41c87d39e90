"""The records of an hour in a topic: keys, values, tombstones, and the position of the sender.
Pure."""

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
    """The last place of an hour of this content that was sent, in the order of partition and
    offset."""

    hour: str
    source: str
    partition: int
    offset: int


@dataclass(frozen=True)
class SenderPosition:
    """The position of the sender, stored with each transaction: the last complete hour in the
    topic, and, between the transactions of the next hour, the last place sent of it."""

    place: str
    done: Delivery | None = None
    at: At | None = None

    def encode(self) -> str:
        """Raises Transient when it is longer than Kafka accepts, as with a token while many
        decisions wait for their rows."""
        text = json.dumps(plain(asdict(self)), separators=(",", ":"))
        if len(text.encode()) > LONGEST:
            raise Transient(
                f"deliver hour {self.done.hour if self.done else ''}: expected a position of "
                f"{LONGEST} bytes at most, found {len(text)}: decisions wait to be recorded; run "
                "`anabranch merge STREAM`, then again"
            )
        return text

    @staticmethod
    def decode(text: str) -> SenderPosition:
        """Raises ConfigurationError for what `encode` did not write."""
        try:
            data: dict[str, Any] = json.loads(text)
            done, at = data["done"], data["at"]
            if done is not None:
                done["delivered_at"] = datetime.fromisoformat(done["delivered_at"])
            return SenderPosition(
                data["place"],
                Delivery(**done) if done is not None else None,
                At(**at) if at is not None else None,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                "egress: expected a position of its own in the group's offsets, found "
                f"{text[:80]!r}; if they are not needed, delete the group"
            ) from error


@dataclass(frozen=True)
class Identity:
    """The identity of the records of an hour: the topic's id, partition and offset. `replaced`: as
    in `Timeline.replaced_before`. If Kafka lost a record and assigned its offset to another, the
    later one's key also contains the number of such losses."""

    topic_id: str
    replaced: Sequence[tuple[Mapping[int, int], Mapping[int, int]]] = ()

    def key_of(self, partition: int, offset: int) -> bytes:
        """The permanent identity of a record."""
        times = sum(
            begins.get(partition, 0) <= offset < ends.get(partition, 0)
            for begins, ends in self.replaced
        )
        again = f"~{times}" if times else ""
        return f"{self.topic_id}{again}:{partition}:{offset}".encode()


def value_of(row: Mapping[str, Any]) -> bytes:
    return json.dumps(plain(row), ensure_ascii=False, separators=(",", ":")).encode()


def places(
    rows: Iterable[Mapping[str, Any]], cut: Cut
) -> Iterator[tuple[int, int, Mapping[str, Any] | None]]:
    """Each row with its partition and offset, in that order, and every other place of the cut
    without a row, since an earlier delivery that the table does not remember may have sent one.
    `rows` are in that order too."""
    waiting = iter(rows)
    row = next(waiting, None)
    for partition, (start, end) in sorted(cut.ranges.items()):
        for offset in range(start, end):
            if row is not None and (row["kafka_partition"], row["kafka_offset"]) == (
                partition,
                offset,
            ):
                yield partition, offset, row
                row = next(waiting, None)
            else:
                yield partition, offset, None
    while row is not None:
        yield row["kafka_partition"], row["kafka_offset"], row
        row = next(waiting, None)


def chunks(items: Iterable[T], size: int) -> Iterator[tuple[list[T], bool]]:
    """The items in chunks of this size, each with whether it is the last; one empty chunk for no
    items."""
    chunk: list[T] = []
    for item in items:
        if len(chunk) == size:
            yield chunk, False
            chunk = []
        chunk.append(item)
    yield chunk, True
