"""The reason why a consumer does not receive an offset, from the record batches of the log.

A consumer silently skips control records, records of aborted transactions and records removed by
the log cleaner. The batches show the reason: a control batch has a flag in its header, a fetch with
READ_COMMITTED lists the aborted transactions (KIP-98), and compaction removes records from a batch,
or whole batches.

Only batches around missing offsets are fetched, some at a time: time grows with the bytes fetched,
memory does not.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from kafka import TopicPartition, errors
from kafka.admin import OffsetSpec
from kafka.protocol.consumer import FetchRequest
from kafka.protocol.consumer.offsets import IsolationLevel
from kafka.record import MemoryRecords
from kafka.record.util import decode_varint

from anabranch.common.errors import Terminal, Transient

if TYPE_CHECKING:
    from numpy.typing import NDArray

CONTROL, ABORTED, COMPACTED, RETENTION, PRESENT = CLASSES = (
    "control",
    "aborted",
    "compacted",
    "retention",
    "present",
)
CODES = {name: code for code, name in enumerate(CLASSES, 1)}

# Fetch sizes in bytes; a fetch returns at least one whole batch. The small one is for a missing
# offset that is far from the next.
_SMALL, _LARGE = 16 << 10, 4 << 20
# From version 13 on, requests name topics by id only; kafka-python 3.0.12 does not support it.
_NEWEST_FETCH = 12
_TRIES, _PAUSE_S = 30, 0.5
_NO_SESSION = {"session_id": 0, "session_epoch": -1}
_CONTROL_KEY = struct.Struct(">hh")
_ABORT = 0


@dataclass(frozen=True)
class Missing:
    """Offsets of one partition without a record in a read: `start + i` if `mask[i]` is True."""

    start: int
    mask: NDArray[np.bool_]

    @property
    def count(self) -> int:
        return int(np.count_nonzero(self.mask))


@dataclass(frozen=True)
class Explanation:
    """Numbers of missing offsets by class. `present_at` are the first ranges of class `present`:
    records that the log contains and a consumer should receive. `codes` has the class of each
    offset from the first missing one on (`CODES`), 0 for an offset that is not missing."""

    counts: Mapping[str, int]
    present_at: tuple[tuple[int, int], ...] = ()
    codes: NDArray[np.uint8] = field(
        default_factory=lambda: np.zeros(0, np.uint8), compare=False, repr=False
    )


@dataclass(frozen=True)
class Fetched:
    """Record batches of a partition, beginning with the batch that contains an offset, or with the
    first after it.

    `aborted` are (producer id, first offset) of the aborted transactions among them. Offsets below
    `log_start` cannot be fetched; offsets from `stable_end` on are not fetched.
    """

    records: bytes = b""
    aborted: tuple[tuple[int, int], ...] = ()
    log_start: int = 0
    stable_end: int = 0


Fetch = Callable[[int, int], Fetched]
"""Fetches batches, given the first offset and the approximate size in bytes."""


@dataclass
class _Explained:
    """The class of each missing offset; 0 if not read yet."""

    missing: Missing
    codes: NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        self.codes = np.zeros(len(self.missing.mask), np.uint8)

    def next_from(self, offset: int) -> int | None:
        """Return the first missing offset at or after this one, or None."""
        at = max(0, offset - self.missing.start)
        found = int(np.argmax(self.missing.mask[at:])) if at < len(self.missing.mask) else 0
        return self.missing.start + at + found if self._any(at + found, at + found + 1) else None

    def _any(self, low: int, high: int) -> bool:
        return bool(self.missing.mask[low:high].any())

    def has_missing(self, start: int, end: int) -> bool:
        """Return whether any offset of the range is missing."""
        return end > self.missing.start and self._any(
            max(0, start - self.missing.start), end - self.missing.start
        )

    def mark(self, start: int, end: int, name: str) -> None:
        """Assign a class to the missing offsets of the range."""
        if end > self.missing.start:
            part = slice(max(0, start - self.missing.start), end - self.missing.start)
            self.codes[part][self.missing.mask[part]] = CODES[name]

    def explanation(self) -> Explanation:
        counts = {name: int(np.count_nonzero(self.codes == code)) for name, code in CODES.items()}
        present_at = spans(self.codes == CODES[PRESENT], self.missing.start)
        return Explanation({name: n for name, n in counts.items() if n}, present_at, self.codes)


def spans(mask: NDArray[Any], start: int, at_most: int = 3) -> tuple[tuple[int, int], ...]:
    """Return the first half-open ranges of set offsets; the mask begins at `start`. Pure."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    pairs = edges.reshape(-1, 2)[:at_most] + start
    return tuple((int(low), int(high)) for low, high in pairs)


def explain_missing(fetch: Fetch, missing: Missing) -> Explanation:
    """Classify the missing offsets of a partition, all of them below its last stable offset.

    Raises Transient if the last stable offset is at or below one of them.
    """
    explained, size = _Explained(missing), _SMALL
    at = explained.next_from(missing.start)
    while at is not None:
        fetched = fetch(at, size)
        if fetched.log_start > at:
            explained.mark(at, fetched.log_start, RETENTION)
            at = explained.next_from(fetched.log_start)
            continue
        reached = _read(explained, fetched, at)
        if reached is None:
            # No batch is left from here up to the last stable offset.
            if fetched.stable_end <= at:
                raise Transient(
                    f"read record batches from offset {at} on: expected that offset to be "
                    f"decided, found the last stable offset at {fetched.stable_end}; try again"
                )
            reached = fetched.stable_end
            explained.mark(at, reached, COMPACTED)
        following = explained.next_from(reached)
        # A larger fetch contains several missing offsets if the next one is about as near as this
        # fetch was long.
        is_near = following is not None and following - reached <= 2 * (reached - at)
        size = min(2 * size, _LARGE) if is_near else _SMALL
        at = following
    return explained.explanation()


def _read(explained: _Explained, fetched: Fetched, at: int) -> int | None:
    """Classify the missing offsets covered by a fetch from `at`. Return the offset after its last
    whole batch; None if it has no whole batch. Raises Terminal for a batch before format 2."""
    reached: int | None = None
    for batch, kind in classified_batches(fetched, at):
        start = at if reached is None else reached
        first, end = batch.base_offset, batch.next_offset
        if start < first:
            explained.mark(start, first, COMPACTED)
        reached = max(start, end)
        # A batch may begin with records before the log's start, which are marked already.
        first = max(first, start)
        if not explained.has_missing(first, end):
            continue
        if kind is not None:
            explained.mark(first, end, kind)
        elif batch.records_count == end - batch.base_offset:
            explained.mark(first, end, PRESENT)
        else:
            # The batch lacks records that the log cleaner removed.
            explained.mark(first, end, COMPACTED)
            for offset in _record_offsets(batch):
                if offset >= first:
                    explained.mark(offset, offset + 1, PRESENT)
    return reached


def classified_batches(fetched: Fetched, at: int) -> Iterator[tuple[Any, str | None]]:
    """Yield the whole batches of a fetch from offset `at`, each with the class of its offsets:
    CONTROL or ABORTED; None if a consumer receives its records. The last fetched batch may be
    truncated. Raises Terminal for a batch before format 2."""
    waiting = sorted(fetched.aborted, key=lambda transaction: transaction[1], reverse=True)
    aborting: set[int] = set()
    parsed = MemoryRecords(fetched.records)
    while (batch := parsed.next_batch()) is not None:
        if batch.magic < 2:
            # It has no base offset and no flags, so the class of an offset before it is unknown.
            raise Terminal(
                f"read record batches from offset {at} on: expected message format 2, of Kafka "
                f"0.11 and newer, found format {batch.magic}: copy the topic to a new one, and "
                "read that"
            )
        if batch.is_transactional:
            while waiting and waiting[-1][1] < batch.next_offset:
                aborting.add(waiting.pop()[0])
        if batch.is_control_batch:
            yield batch, CONTROL
            if _is_abort(batch):
                aborting.discard(batch.producer_id)
        else:
            is_aborted = batch.is_transactional and batch.producer_id in aborting
            yield batch, ABORTED if is_aborted else None
        at = max(at, batch.next_offset)


def _record_offsets(batch: Any) -> set[int]:
    """Return the offsets of a batch's records without decoding keys, values and headers."""
    iter(batch)  # decompresses the batch
    buffer, at, offsets = batch._buffer, batch._pos, set[int]()
    for _ in range(batch.records_count):
        length, at = decode_varint(buffer, at)
        _, stamp_at = at, at + 1  # after the attributes
        _, delta_at = decode_varint(buffer, stamp_at)
        delta, _ = decode_varint(buffer, delta_at)
        offsets.add(batch.base_offset + delta)
        at += length
    return offsets


def _is_abort(batch: Any) -> bool:
    """Return whether a control batch, which is never compressed, aborts a transaction."""
    if not batch.is_transactional or not batch.records_count:
        return False
    [record] = list(batch)
    return bool(_CONTROL_KEY.unpack(record.key)[1] == _ABORT)


def fetch_batches(
    admin: Any, nodes: dict[int, int], topic: str, partition: int, offset: int, size: int, rack: str
) -> Fetched:
    """Fetch once over an admin client's connections: from the replica that the partition's leader
    prefers for a rack (KIP-392), as consumers do, else from the leader. `nodes` caches their node
    ids by partition.

    Raises kafka-python's errors, also if the leader gives no batches in 30 requests.
    """
    fetched: Fetched = admin._manager.run(
        _fetch, admin, nodes, TopicPartition(topic, partition), offset, size, rack
    )
    return fetched


async def _fetch(
    admin: Any, nodes: dict[int, int], tp: Any, offset: int, size: int, rack: str
) -> Fetched:
    kind: Any = errors.NoError
    for _ in range(_TRIES):
        if tp.partition not in nodes:
            [nodes[tp.partition]] = await admin._async_get_leader_for_partitions({tp})
        response = await admin._manager.send(
            _request(tp, offset, size, rack), node_id=nodes[tp.partition]
        )
        if not response.responses:
            # A quota throttles this client: the broker answers without the partition, and reads no
            # request of it for this time (KIP-219).
            kind = errors.ThrottlingQuotaExceededError
            await admin._net.sleep(max(_PAUSE_S, response.throttle_time_ms / 1000))
            continue
        [answer] = [
            partition for of_topic in response.responses for partition in of_topic.partitions
        ]
        if answer.preferred_read_replica >= 0:
            nodes[tp.partition] = answer.preferred_read_replica
            continue
        kind = errors.for_code(answer.error_code)
        if kind is errors.OffsetOutOfRangeError:
            starts = await admin._async_list_partition_offsets({tp: OffsetSpec.EARLIEST})
            if starts[tp].offset > offset:
                return Fetched(log_start=starts[tp].offset)
        # A follower may not know yet that an offset is decided: its leader does.
        if kind is errors.NoError and not (rack and answer.last_stable_offset <= offset):
            aborted = tuple(
                (t.producer_id, t.first_offset) for t in answer.aborted_transactions or ()
            )
            return Fetched(
                bytes(answer.records or b""),
                aborted,
                answer.log_start_offset or 0,
                answer.last_stable_offset,
            )
        if not (kind.retriable or kind in (errors.NoError, errors.OffsetOutOfRangeError)):
            break
        del nodes[tp.partition]
        rack = ""
        await admin._net.sleep(_PAUSE_S)
    raise kind(f"fetch from offset {offset} of {tp}")


def _request(tp: Any, offset: int, size: int, rack: str) -> Any:
    partition = FetchRequest.FetchTopic.FetchPartition(
        partition=tp.partition,
        current_leader_epoch=-1,
        fetch_offset=offset,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=size,
    )
    return FetchRequest(
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=max(size, _LARGE),
        isolation_level=IsolationLevel.READ_COMMITTED,
        **_NO_SESSION,
        topics=[FetchRequest.FetchTopic(topic=tp.topic, partitions=[partition])],
        forgotten_topics_data=[],
        rack_id=rack,
        min_version=4,
        max_version=_NEWEST_FETCH,
    )
