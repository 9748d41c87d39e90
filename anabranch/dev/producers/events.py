"""Seeded, realistic events of the stream `game_events`, and an account of their sends.

Pure: no clock, no Kafka. The same arguments give the same bytes on every machine. Players are
skewed (a few play most of the time), `level` is set on `level_up` only and `amount` on `purchase`
only.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal, NamedTuple

Kind = Literal["good", "late", "duplicate", "malformed"]
KINDS: tuple[Kind, ...] = ("good", "late", "duplicate", "malformed")
MALFORMED = (
    "truncated",
    "not_json",
    "missing_field",
    "wrong_type",
    "null_value",
    "invalid_utf8",
    "epoch_time",
    "future_time",
)

# One late event, one duplicate and one malformed record in each whole block of this many events.
BLOCK = 100
_HOUR = 3_600_000
_DAY = 24 * _HOUR
_PLAYERS = 5_000
_TYPES = ("session_start", "session_end", *("level_up",) * 4, "purchase", *("achievement",) * 2)
_GAMES = ("castle_rush", "star_miners", "puzzle_garden", "night_racers", "dungeon_tales")
_PLATFORMS = ("android", "android", "ios", "ios", "pc", "console")
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_PRICES = (0.99, 0.99, 0.99, 1.99, 1.99, 2.99, 4.99, 4.99, 9.99, 19.99, 49.99, 99.99)


class ProducerRecord(NamedTuple):
    """A record to send; kinds `good` and `late` are originals. `timestamp_ms`: its CreateTime."""

    kind: Kind
    key: bytes | None
    value: bytes | None
    timestamp_ms: int


class Ack(NamedTuple):
    """One acknowledged record. `sha256`: the hash of its value, None for a null value."""

    partition: int
    offset: int
    kind: Kind
    sha256: str | None
    timestamp_ms: int


@dataclass
class Sent:
    """The account of one run: `sent` by kind, each acknowledged record, and the number of failed
    sends.

    A failed send was not acknowledged. The topic may still contain its record, if only the response
    was lost.
    """

    topic: str
    sent: Counter[Kind] = field(default_factory=Counter)
    acks: list[Ack] = field(default_factory=list)
    failed: int = 0
    first_error: str | None = None
    on_ack: Callable[[Ack], None] | None = field(default=None, repr=False, compare=False)
    """Called with each acknowledged record."""

    @property
    def acknowledged(self) -> int:
        return len(self.acks)

    def acknowledge(self, ack: Ack) -> None:
        self.acks.append(ack)
        if self.on_ack is not None:
            self.on_ack(ack)

    def fail(self, error: object) -> None:
        self.failed += 1
        self.first_error = self.first_error or f"{type(error).__name__}: {error}"

    def by_hour(self) -> dict[str, dict[Kind, int]]:
        """Return the acknowledged records by hour of the Kafka timestamp and kind, oldest first."""
        counts = Counter((ack.timestamp_ms // _HOUR, ack.kind) for ack in self.acks)
        hours = sorted({hour for hour, _ in counts})
        return {
            f"{datetime.fromtimestamp(hour * 3600, UTC):%Y-%m-%dT%H}": {
                kind: counts[hour, kind] for kind in KINDS
            }
            for hour in hours
        }


def sha256(value: bytes | None) -> str | None:
    """Return the hex digest of a record's value; None for a null value."""
    return None if value is None else hashlib.sha256(value).hexdigest()


def expected(events: int, dirty: bool) -> dict[Kind, int]:
    """Return how many records of each kind `generate` makes. `good + late == events`; the other two
    kinds are additional."""
    each = events // BLOCK if dirty else 0
    return {"good": events - each, "late": each, "duplicate": each, "malformed": each}


def generate(
    events: int, seed: int, start: datetime, end: datetime, dirty: bool
) -> Iterator[ProducerRecord]:
    """Generate `events` originals with ascending Kafka timestamps that are spread evenly over
    [start, end). Uses bounded memory.

    An original's event time is up to three seconds before its Kafka timestamp. With `dirty`, each
    whole block of 100 originals has one `late` original (event time one to three days before), one
    `duplicate` (the same bytes, at most a minute later), and one `malformed` record (the sorts of
    `MALFORMED` in turn). If the events are at most ten minutes apart, the duplicate of a block that
    contains an hour's end follows in the next hour.

    Event ids are unique within a run, and differ between runs with different arguments. Raises
    ValueError for an empty or naive interval.
    """
    if start.tzinfo is None or end.tzinfo is None or end <= start:
        raise ValueError(f"expected aware times with start before end, found {start} and {end}")
    first, last = _millis(start), _millis(end)
    span = last - first
    step = span / max(events, 1)

    def stamp(index: int) -> int:
        return first + index * span // events

    crossings: dict[int, int] = {}
    if step <= 600_000:
        for hour_end in range(first - first % _HOUR + _HOUR, last, _HOUR):
            after = -(
                -(hour_end - first) * events // span
            )  # the first event stamped at or after hour_end
            if 0 < after < events:
                crossings.setdefault((after - 1) // BLOCK, after - 1)
    run = _run(seed, events, first, last)
    return _records(events, seed, run, stamp, dirty, crossings, int(min(40, 60_000 / step)))


def generate_live(
    events: int | None, seed: int, start: datetime, clock: Callable[[], int], dirty: bool
) -> Iterator[ProducerRecord]:
    """Generate records as `generate`, each with a timestamp of `clock` (milliseconds) when it is
    taken; endless if `events` is None.

    `start` only makes the event ids differ between runs.
    """
    latest = 0

    def stamp(_: int) -> int:
        nonlocal latest
        latest = max(latest, clock())  # a clock that steps back must not reorder Kafka timestamps
        return latest

    return _records(events, seed, _run(seed, events or 0, _millis(start), 0), stamp, dirty, {}, 40)


def _records(
    events: int | None,
    seed: int,
    run: str,
    stamp: Callable[[int], int],
    dirty: bool,
    crossings: Mapping[int, int],
    longest_delay: int,
) -> Iterator[ProducerRecord]:
    """Generate the records. `crossings`: the last event before an hour's end, by block.
    `longest_delay`: of a duplicate, in originals."""
    play = random.Random(f"play {seed}")
    dirt = random.Random(f"dirt {seed}")
    retries: list[
        tuple[int, int, ProducerRecord]
    ] = []  # (the original to follow, original, record), a heap
    late = duplicate = malformed = -1
    index = at = 0
    while events is None or index < events:
        block, within = divmod(index, BLOCK)
        if within == 0:
            late = duplicate = malformed = -1
            if dirty and (events is None or index + BLOCK <= events):
                late, duplicate, malformed = (index + n for n in dirt.sample(range(BLOCK), 3))
                if block in crossings:
                    late, malformed = (
                        duplicate if n == crossings[block] else n for n in (late, malformed)
                    )
                    duplicate = crossings[block]
        at = stamp(index)
        age = dirt.randrange(_DAY, 3 * _DAY) if index == late else int(dirt.random() * 3_000)
        event = {"event_id": f"{run}-{index:08x}"} | _event(play, _iso(at - age))
        key = str(event["player_id"]).encode()
        record = ProducerRecord("late" if index == late else "good", key, _json(event), at)
        yield record
        if index == duplicate:
            delay = (
                1
                if crossings.get(block) == index
                else dirt.randint(min(1, longest_delay), longest_delay)
            )
            heapq.heappush(retries, (index + delay, index, record))
        if index == malformed:
            number = block % len(MALFORMED)
            yield _malformed(
                MALFORMED[number], event | {"event_id": f"{run}-m{block:07x}"}, key, at
            )
        while retries and retries[0][0] <= index:
            yield heapq.heappop(retries)[2]._replace(kind="duplicate", timestamp_ms=at)
        index += 1
    while retries:
        yield heapq.heappop(retries)[2]._replace(kind="duplicate", timestamp_ms=at)


def _event(rng: random.Random, event_time: str) -> dict[str, object]:
    player, kind = int(_PLAYERS * rng.random() ** 3), rng.choice(_TYPES)
    event: dict[str, object] = {
        "event_type": kind,
        "game": _GAMES[int(len(_GAMES) * rng.random() ** 2)],
        "player_id": f"p{player}",
        "event_time": event_time,
        "platform": _PLATFORMS[player % len(_PLATFORMS)],
    }
    if kind == "level_up":
        event["level"] = rng.randint(2, 50)
    elif kind == "purchase":
        event["amount"] = rng.choice(_PRICES)
    return event


def _malformed(sort: str, event: dict[str, object], key: bytes, at: int) -> ProducerRecord:
    """Return a record that cannot become a row of game_events."""
    value: bytes | None
    match sort:
        case "truncated":
            value = _json(event)[:-25]
        case "not_json":
            return ProducerRecord(
                "malformed", None, b"<html><body>502 Bad Gateway %d</body></html>" % at, at
            )
        case "missing_field":
            value = _json({name: content for name, content in event.items() if name != "player_id"})
        case "wrong_type":
            value = _json(event | {"level": "twelve"})
        case "null_value":
            value = None
        case "invalid_utf8":
            value = _json(event | {"player_id": "p?"}).replace(b'"p?"', b'"p\xff\xfe"')
        case "epoch_time":
            value = _json(event | {"event_time": "1970-01-01T00:00:00.000Z"})
        case _:
            value = _json(event | {"event_time": "2999-12-31T23:59:59.000Z"})
    return ProducerRecord("malformed", key, value, at)


def _run(*arguments: int) -> str:
    return hashlib.sha256(repr(arguments).encode()).hexdigest()[:12]


def _json(event: Mapping[str, object]) -> bytes:
    return _encode(event).encode()


def _iso(millis: int) -> str:
    return datetime.fromtimestamp(millis / 1000, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def _millis(when: datetime) -> int:
    return round(when.timestamp() * 1000)
