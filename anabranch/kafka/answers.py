"""Conversion of kafka-python's answers to plain values. Pure."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from anabranch.common.errors import NoTopicIds, Transient
from anabranch.offsets.position import Topic

LARGE_FETCH = 4 << 20
"""The most bytes of a partition to fetch at once."""

LONGEST_MS = 10**13
"""The longest time reported, three centuries: Kafka's longest do not fit a timedelta."""

# The topic id of brokers without topic ids.
_NO_TOPIC_ID = uuid.UUID(int=0)


def topic_of(entry: Mapping[str, Any]) -> Topic:
    """Return a topic from kafka-python's description. Raises NoTopicIds."""
    partitions = tuple(sorted(p["partition_index"] for p in entry["partitions"]))
    return Topic(entry["name"], topic_id(entry["name"], entry.get("topic_id")), partitions)


def topic_id(topic: str, raw: Any) -> str:
    """Return Kafka's text form of a topic id: 22 characters of URL-safe base64. Raises NoTopicIds
    if there is none."""
    value = uuid.UUID(str(raw)) if raw else _NO_TOPIC_ID
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
    """Return the fetch size in bytes of each partition for `count` records of each, estimated from
    the `sizes` of some: at least `now`, otherwise at most LARGE_FETCH. Pure.

    A response has at least one batch of any size, and other partitions only as far as they fit
    (KIP-74): with a smaller fetch size, each record would take a request.
    """
    needed = 2 * count * sum(sizes) // len(sizes) if sizes else 0
    return max(now, min(needed, LARGE_FETCH))


def retention_of(milliseconds: int) -> timedelta | None:
    return timedelta(milliseconds=min(milliseconds, LONGEST_MS)) if milliseconds >= 0 else None


def config_value(configs: Mapping[str, Any], topic: str, key: str) -> Any:
    """Return the value of one key in kafka-python's description of topics. Raises Transient if the
    key is missing."""
    found = configs.get("topic", {}).get(topic, {})
    if key not in found:
        raise Transient(
            f"describe the configuration of topic {topic}: expected {key}, found none; try again"
        )
    return found[key]["value"]
