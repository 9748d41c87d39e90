"""The records of an hour in a topic: keys, values, tombstones, and the sender's position. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from anabranch.common.errors import ConfigurationError, Transient
from anabranch.common.json_values import parse
from anabranch.common.output import plain
from anabranch.offsets.hours import Cut
from anabranch.protocol.deliveries import Delivery

T = TypeVar("T")

# Bytes: Kafka's default limit (`offset.metadata.max.bytes`).
MAX_POSITION_BYTES = 4096


@dataclass(frozen=True)
class LastPlace:
    """The last place that was sent of an hour with this content, in the order of partition and
    offset."""

    hour: str
    source: str
    partition: int
    offset: int


@dataclass(frozen=True)
class SenderPosition:
    """The sender's position, stored with each transaction. `done`: the last complete hour in the
    topic. `at`: between the transactions of the next hour, its last place that was sent."""

    place: str
    done: Delivery | None = None
    at: LastPlace | None = None

    def encode(self) -> str:
        """Return the position as text. Raises Transient if it is longer than Kafka accepts, as with
        a token while many decisions wait for their rows."""
        text = json.dumps(plain(asdict(self)), separators=(",", ":"))
        if len(text.encode()) > MAX_POSITION_BYTES:
            raise Transient(
                f"deliver hour {self.done.hour if self.done else ''}: expected a position of "
                f"{MAX_POSITION_BYTES} bytes at most, found {len(text)}: decisions wait to be "
                "recorded; run `anabranch merge STREAM`, then again"
            )
        return text

    @staticmethod
    def decode(text: str) -> SenderPosition:
        """Return the position. Raises ConfigurationError for text that `encode` did not write."""
        try:
            return parse(SenderPosition, text)
        except ValueError as error:
            raise ConfigurationError(
                "egress: expected a position of its own in the group's offsets, found "
                f"{text[:80]!r}; if they are not needed, delete the group"
            ) from error


@dataclass(frozen=True)
class Identity:
    """The identity of the records of an hour: the topic's id, partition and offset. `replaced`: as
    in `Timeline.replaced_before`. If Kafka lost a record and assigned its offset to another one,
    the key of the later one also contains the number of such losses."""

    topic_id: str
    replaced: Sequence[tuple[Mapping[int, int], Mapping[int, int]]] = ()

    def key_of(self, partition: int, offset: int) -> bytes:
        """Return the permanent identity of a record."""
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
    """Yield each row with its partition and offset, in that order, and every other place of the cut
    without a row, because an earlier delivery that the table does not remember may have sent one.
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


def chunks(
    items: Iterable[T], at_most: int, max_bytes: int, size_of: Callable[[T], int]
) -> Iterator[tuple[list[T], bool]]:
    """Yield the items in chunks of at most `at_most` items and `max_bytes` bytes, each with whether
    it is the last. A single item may be larger. Yields one empty chunk if there are no items."""
    chunk: list[T] = []
    chunk_bytes = 0
    for item in items:
        size = size_of(item)
        if chunk and (len(chunk) == at_most or chunk_bytes + size > max_bytes):
            yield chunk, False
            chunk, chunk_bytes = [], 0
        chunk.append(item)
        chunk_bytes += size
    yield chunk, True
