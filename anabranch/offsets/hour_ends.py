"""The end of an hour in a partition's log, even if some records have a wrong timestamp, and the
partition with the oldest unread record. Pure: the caller fetches the windows.

Kafka's time index returns the first record with a timestamp at or after a given time, so a single
record with a timestamp in the future is its answer for every time up to that timestamp. The answer
is therefore checked: the majority of timestamps in a *window*, the first records that a consumer
receives from an offset on, shows whether that part of the log was received before a time or after
it. If the answer is wrong, a bisection finds the end after it. If further answers of the index
confirm it, no window is fetched, which matters for large records. A timestamp before Kafka's first
release, or later than the clock of the calling process, is not usable.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum

from anabranch.offsets.position import Offsets, Stamped

Window = tuple[Stamped, ...]
Search = Generator[int, Window, int | None]
FirstLater = Callable[[Mapping[int, Stamped]], Mapping[int, Stamped | None]]
"""Return, by partition, the first record with a later timestamp than the given one; empty if
fetching records is cheaper."""

WINDOW = 15
"""Records of a window: enough that a few wrong timestamps are not the majority."""
WITNESSES = 3
REACH = timedelta(days=31)
"""The longest time by which fewer than `WITNESSES` records may be older than the others."""

_BISECTIONS = 64
_KAFKA_BEGAN = int(datetime(2011, 1, 1, tzinfo=UTC).timestamp() * 1000)


class Side(Enum):
    """The relation of a window to a time."""

    EARLIER = "most of it was received before"
    LATER = "at least half of it was received then or later"
    NOTHING = "no timestamp is usable"


def millis(when: datetime) -> int:
    """Return a time as a Kafka timestamp: milliseconds since the epoch."""
    return int(when.timestamp() * 1000)


def _usable(stamp: int, now: int) -> bool:
    return _KAFKA_BEGAN <= stamp <= now


def side_of(window: Sequence[Stamped], moment: int, now: int) -> Side:
    usable = [r.timestamp_ms for r in window if _usable(r.timestamp_ms, now)]
    later = sum(stamp >= moment for stamp in usable)
    if not usable:
        return Side.NOTHING
    return Side.LATER if 2 * later >= len(usable) else Side.EARLIER


def plan_split(records: Sequence[Stamped], moment: int, now: int) -> int | None:
    """Return the offset of the first record received at `moment` or later; None if all were
    received earlier.

    The split has the fewest records on its wrong side. Of equal splits, it is the one whose records
    on the wrong side are furthest from the moment, since their timestamps are the wrong ones.
    """
    usable = [r for r in records if _usable(r.timestamp_ms, now)]
    early = [r.timestamp_ms for r in usable if r.timestamp_ms < moment]
    wrong, distance = len(early), sum(moment - stamp for stamp in early)
    best: tuple[int, int] | None = None
    split = None
    for record in usable:
        away = abs(record.timestamp_ms - moment)
        if record.timestamp_ms < moment:
            wrong, distance = wrong - 1, distance - away
            continue
        if best is None or (wrong, -distance) < best:
            best, split = (wrong, -distance), record.offset
        wrong, distance = wrong + 1, distance + away
    return split if best is not None and best <= (wrong, -distance) else None


def find_confirmed_ends(
    answers: Mapping[int, Stamped], ends: Offsets, now: int, first_later: FirstLater
) -> dict[int, int]:
    """Return, by partition, the answers of the time index for a moment that the index alone
    confirms: `find_end` would return the same offsets. Fetches no record.

    The index returns the first record with a timestamp above a given one. If that is the next
    record each time, timestamps rise from the answer on, so all these records are later than the
    moment. Once they are more than half of a window, no other split of the window leaves fewer
    records on the wrong side.
    """
    confirmed: dict[int, int] = {}
    rising = {p: (answer, 1) for p, answer in answers.items() if _usable(answer.timestamp_ms, now)}
    while rising:
        for p, (_, count) in list(rising.items()):
            if 2 * count > min(WINDOW, ends[p] - answers[p].offset):
                confirmed[p] = answers[p].offset
                del rising[p]
        asked, rising = rising, {}
        for p, record in first_later({p: last for p, (last, _) in asked.items()}).items():
            last, count = asked[p]
            follows = record is not None and record.offset == last.offset + 1 < ends[p]
            if record is not None and follows and _usable(record.timestamp_ms, now):
                rising[p] = (record, count + 1)
    return confirmed


def find_end(moment: int, low: int, end: int, now: int, seen: Mapping[int, Window]) -> Search:
    """Return the offset in `[low, end)` from which on the log was received at `moment` or later;
    None if all of it was received earlier.

    Yields each offset whose window it needs; the caller sends the window. `seen` are the windows
    that are already known, by offset. Offsets without a usable timestamp count as earlier.
    """
    left = yield low
    if side_of(left, moment, now) is Side.LATER:
        return plan_split(left, moment, now)
    # Windows from `high` on are unusable or later; `later` is the offset of the first later one.
    high, later = end, None
    for offset in sorted(o for o in seen if low < o < end):
        side = side_of(seen[offset], moment, now)
        if side is Side.LATER:
            high = later = offset
            break
        if side is Side.EARLIER:
            low, left = offset, seen[offset]
    # No window remains to be fetched once the left one reaches `high`.
    for _ in range(_BISECTIONS):
        if len(left) < WINDOW or left[-1].offset >= high - 1:
            break
        middle = (left[-1].offset + high) // 2
        at, window = yield from _first_usable(middle, high, now)
        side = side_of(window, moment, now)
        if side is Side.EARLIER:
            low, left = at, window
        else:
            high = middle
            later = at if side is Side.LATER else later
    right = (yield later) if later is not None else ()
    split = plan_split((*(r for r in left if r.offset < high), *right), moment, now)
    return later if split is None else split


def _first_usable(start: int, high: int, now: int) -> Generator[int, Window, tuple[int, Window]]:
    """Return the first offset from `start` on whose window has usable timestamps below `high`, and
    the window; an empty one if there is none. Skips unusable stretches in growing steps, then
    bisects. The window is whole: cut at `high`, one wrong record could decide it (decision 11)."""
    window = yield start
    if _is_usable(window, high, now) or not window:
        return start, window
    unusable, step = start, WINDOW
    ahead = window[-1].offset + 1
    while ahead < high:
        window = yield ahead
        if not window or _is_usable(window, high, now):
            break
        unusable, ahead, step = ahead, window[-1].offset + step, 2 * step
    usable_from = min(ahead, high)
    while usable_from - unusable > WINDOW:
        middle = (unusable + usable_from) // 2
        window = yield middle
        if not window or _is_usable(window, high, now):
            usable_from = middle
        else:
            unusable = middle
    return usable_from, (yield usable_from) if usable_from < high else ()


def _is_usable(window: Window, high: int, now: int) -> bool:
    return any(r.offset < high and _usable(r.timestamp_ms, now) for r in window)


def find_ends(
    searches: Mapping[int, Search],
    fetch: Callable[[Offsets], Mapping[int, Window]],
    remember: Callable[[int, int, Window], object],
) -> dict[int, int | None]:
    """Run the searches of all partitions side by side: each `fetch` returns one window for each.

    Returns the result of each search. Calls `remember` with the partition, offset and records of
    each window that is full and so cannot change any more.
    """
    wants: Offsets = {p: next(search) for p, search in searches.items()}
    ends: dict[int, int | None] = {}
    while wants:
        windows = fetch(wants)
        offsets, wants = wants, {}
        for p, offset in offsets.items():
            window = windows.get(p, ())
            if len(window) == WINDOW:
                remember(p, offset, window)
            try:
                wants[p] = searches[p].send(window)
            except StopIteration as stopped:
                ends[p] = stopped.value
    return ends


def plan_oldest(window: Sequence[Stamped], now: int) -> Stamped | None:
    """Return the oldest record of a partition's first window that may open an hour; None without a
    usable timestamp.

    Timestamps more than `REACH` before the `WITNESSES`-th oldest one do not count, so that a wrong
    one opens no years of hours. With fewer records the limit is `REACH` before `now`; if all are
    older, the newest counts as received at the limit.
    """
    usable = sorted(
        (r for r in window if _usable(r.timestamp_ms, now)), key=lambda r: r.timestamp_ms
    )
    anchor = usable[WITNESSES - 1].timestamp_ms if len(usable) >= WITNESSES else now
    reach = anchor - REACH // timedelta(milliseconds=1)
    if usable and usable[-1].timestamp_ms < reach:
        return Stamped(usable[-1].offset, reach)
    return next((r for r in usable if r.timestamp_ms >= reach), None)


MOST_FETCHED = 8
"""The most partitions whose records are fetched."""
PRECISION_MS = 1_000

FirstFrom = Callable[[Mapping[int, int]], Mapping[int, Stamped | None]]
"""Return, by partition, the earliest record with this timestamp (milliseconds) or a later one; None
if there is none."""


def find_oldest(starts: Offsets, low: int, high: int, first_from: FirstFrom) -> frozenset[int]:
    """Return at most MOST_FETCHED partitions, one of which has the oldest record at its offset of
    `starts`. If more partitions are about as old, the oldest is exact to PRECISION_MS. Calls
    `first_from` some twenty times; pure otherwise.

    A fetch returns a whole batch of a partition, and only one batch a response if records are
    large: with 500 partitions of 1 MB records, that is 500 requests and 500 MB. Kafka's time index
    answers for all partitions at once.

    `low` and `high` are the bounds of the search, in milliseconds: no record is later than `high`,
    and records older than `low` count as equally old. If timestamps do not rise with offsets, a
    partition may seem younger than it is.
    """
    left = set(starts)
    while len(left) > MOST_FETCHED and high - low > PRECISION_MS:
        middle = (low + high) // 2
        found = first_from(dict.fromkeys(sorted(left), middle))
        # The first record from `middle` on comes after the next record, so the latter is older.
        older = {p for p in left if (record := found.get(p)) is None or record.offset > starts[p]}
        if older:
            left, high = older, middle
        else:
            low = middle
    return frozenset(sorted(left)[:MOST_FETCHED])
