"""A topic in memory that answers as the Kafka adapter does, with a hook between two questions."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import cast

from anabranch.kafka.client import KafkaAdapter
from anabranch.offsets.position import Position, Stamped, Topic


@dataclass
class Broker:
    """`log` holds the records' timestamps (milliseconds) by partition. `id` None: no such topic.
    `undecided`: records of open transactions behind them, in each partition."""

    id: str | None = "t"
    log: dict[int, list[int]] = field(default_factory=lambda: {0: []})
    after_describe: list[Callable[[], None]] = field(default_factory=list)
    undecided: int = 0

    @property
    def adapter(self) -> KafkaAdapter:
        return cast("KafkaAdapter", self)

    def describe(
        self, name: str, expected: Position | None = None, confirmed: bool = True
    ) -> Topic | None:
        topic = Topic(name, self.id, tuple(sorted(self.log))) if self.id is not None else None
        if self.after_describe:
            self.after_describe.pop(0)()
        return topic

    def decided(self, partition: int) -> list[int]:
        """The timestamps of the records that no open transaction holds back."""
        return self.log[partition]

    def cluster_id(self) -> str:
        return "cluster"

    def retention(self, topic: str) -> timedelta | None:
        return None

    def log_starts(self, topic: Topic) -> dict[int, int]:
        return dict.fromkeys(topic.partitions, 0)

    def stable_ends(self, topic: Topic, reached: dict[int, int] | None = None) -> dict[int, int]:
        return {p: len(self.decided(p)) for p in topic.partitions}

    def accepted_ends(self, topic: Topic, reached: dict[int, int] | None = None) -> dict[int, int]:
        return {p: len(self.log[p]) + self.undecided for p in topic.partitions}

    def first_from(self, topic: Topic, when: datetime) -> dict[int, Stamped | None]:
        return self._first(dict.fromkeys(topic.partitions, int(when.timestamp() * 1000)))

    def first_later(self, topic: Topic, records: dict[int, Stamped]) -> dict[int, Stamped | None]:
        return self._first({p: record.timestamp_ms + 1 for p, record in records.items()})

    def _first(self, times: dict[int, int]) -> dict[int, Stamped | None]:
        """The first record of each partition that is stamped at or after a time."""
        return {
            p: next((Stamped(o, ts) for o, ts in enumerate(self.decided(p)) if ts >= at), None)
            for p, at in times.items()
        }

    def stamps_from(
        self, topic: Topic, starts: dict[int, int], ends: dict[int, int], count: int
    ) -> dict[int, tuple[Stamped, ...]]:
        return {
            p: tuple(
                Stamped(o, ts) for o, ts in enumerate(self.decided(p)) if start <= o < ends[p]
            )[:count]
            for p, start in starts.items()
        }

    def oldest_stamp(
        self, topic: Topic, starts: dict[int, int], ends: dict[int, int], low: int, high: int
    ) -> int | None:
        first = self.stamps_from(topic, starts, ends, 1).values()
        return min((s.timestamp_ms for stamps in first for s in stamps), default=None)

    def commit_lag(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass
