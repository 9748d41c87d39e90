"""What kafka-python returns, as values of ours. Pure."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

from anabranch.common.errors import NoTopicIds, Transient
from anabranch.offsets.position import Topic

LARGE_FETCH = 4 << 20
"""The most bytes of a partition to fetch at once."""

LONGEST_MS = 10**13
"""A time of centuries: longer ones do not fit a timedelta."""

# The id of a topic at brokers that give topics none.
_NO_TOPIC_ID = uuid.UUID(int=0)


def topic_of(entry: Mapping[str, Any]) -> Topic:
    """A topic from kafka-python's description. Raises NoTopicIds."""
    partitions = tuple(sorted(p["partition_index"] for p in entry["partitions"]))
    return Topic(entry["name"], topic_id(entry["name"], entry.get("topic_id")), partitions)


def topic_id(topic: str, raw: Any) -> str:
    """Kafka's own text form of a topic id: 22 characters of URL-safe base64. Raises NoTopicIds
    where there is none."""
    value = (
        uuid.UUID(bytes=raw)
        if isinstance(raw, bytes)
        else uuid.UUID(str(raw))
        if raw
        else _NO_TOPIC_ID
    )
    if value == _NO_TOPIC_ID:
        raise NoTopicIds(
            f"topic {topic}: expected an id from the brokers (KIP-516), found none; without ids a "
            "recreated topic looks like the one before it, and its first records would be "
            "skipped: run Kafka 2.8 or newer, with an inter.broker.protocol.version of 2.8 or "
            "newer"
        )
    return base64.urlsafe_b64encode(value.bytes).decode().rstrip("=")


def bytes_of(record: Any) -> int:
    return int(record.serialized_key_size) + int(record.serialized_value_size)


def plan_fetch_bytes(now: int, sizes: Sequence[int], count: int) -> int:
    """How many bytes of each partition to fetch at once, to have `count` records of each, by the
    sizes of some. Pure.

    A response gives one batch whatever its size, and of all other partitions only what fits
    (KIP-74): with less, each record would take a request.
    """
    needed = 2 * count * sum(sizes) // len(sizes) if sizes else 0
    return max(now, min(needed, LARGE_FETCH))


def retention_of(milliseconds: int) -> timedelta | None:
    return timedelta(milliseconds=min(milliseconds, LONGEST_MS)) if milliseconds >= 0 else None


def config_value(configs: Any, topic: str, key: str) -> Any:
    """The value of one key in kafka-python's description, whose shape is nested dicts or lists by
    version."""
    for item in mappings(configs):
        if key in item:
            value = item[key]
            return value.get("value", value) if isinstance(value, Mapping) else value
        if item.get("name") == key:
            return item.get("value")
    raise Transient(
        f"describe the configuration of topic {topic}: expected {key}, found none; try again"
    )


def mappings(answer: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping of an answer, at whatever depth."""
    stack: list[Any] = [answer]
    while stack:
        item = stack.pop()
        if isinstance(item, Mapping):
            yield item
            stack.extend(item.values())
        elif isinstance(item, Iterable) and not isinstance(item, (str, bytes)):
            stack.extend(item)
