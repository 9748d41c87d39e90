"""A model rebuild's reading of an hour, as `HourReader` does it, and its account."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from small_world import TOPIC, Lake, Row, World

from anabranch.offsets.hours import Cut
from anabranch.offsets.position import Offsets, Ranges, Topic, size, trim
from anabranch.protocol import erasure, ledger, topic_change
from anabranch.protocol.ledger_row import Account, Layer
from anabranch.protocol.state import State
from batch_layer import balance
from batch_layer.balance import Balance, Counted


@dataclass(frozen=True)
class Read:
    """An hour's records by the rules of now, and their account."""

    good: list[Row]
    dead: list[Row]
    balance: Balance


def read_hour(world: World, lake: Lake, hour: str, cut: Cut, before: int) -> Read | None:
    """Each record of the cut in any source, over revision `before`; None of another log."""
    timeline, topic_id = lake.state.timeline, lake.state.position.topic_id
    gone = topic_change.gone_from_kafka(timeline, topic_id, hour, cut) is not None
    starts = world.kafka.log_starts(Topic(TOPIC, cut.topic_id, ()))
    there = {} if gone else trim(cut.ranges, starts)
    if size(there) and (world.kafka.id != cut.topic_id or not world.kafka.holds(there)):
        return None
    read = world.kafka.read(there)
    good = [row for row in read if row[2] not in world.kafka.malformed]
    dead = [row for row in read if row[2] in world.kafka.malformed]
    # Each offset from the first that holds it: Kafka, the accepted revision, the speed layer.
    stored: Offsets = {}
    branches: tuple[Layer, ...] = ("batch", "speed") if lake.state.is_accepted(hour) else ("speed",)
    for branch in branches if balance.has_missing(cut.ranges, _by_partition([*read])) else ():
        rows, letters = _rows(lake, branch, hour), _rows(world.letters, branch, hour)
        if branch == "batch":
            stored = _by_partition([*rows, *letters])
        places = {row[:2] for row in (*good, *dead)}
        good += [row for row in rows if _is_in(row, cut.ranges) and row[:2] not in places]
        places = {row[:2] for row in (*good, *dead)}
        for row in (row for row in letters if _is_in(row, cut.ranges) and row[:2] not in places):
            # Its bytes are decoded again; a row was judged when it was accepted.
            (dead if row[2] in world.kafka.malformed else good).append(row)
    all_of, state = (*good, *dead), lake.state
    erased = [row for row in all_of if is_left_out(world, state, hour, cut.topic_id, row)]
    good, dead = ([row for row in of if row not in erased] for of in (good, dead))
    # Offsets in no source: before the log's start, or of the class that its batches show.
    held = {row[:2] for row in (*good, *dead, *erased)}
    spans = cut.ranges.items()
    missing = {p: {o for o in range(s, e) if (p, o) not in held} for p, (s, e) in spans}
    in_kafka = {p: {o for o in of if _is_in((p, o, 0), there)} for p, of in missing.items()}
    lost = {p: n for p, offsets in missing.items() if (n := len(offsets - in_kafka[p]))}
    seen: dict[str, Offsets] = {}
    for p, offsets in in_kafka.items():
        for name, counts in world.kafka.look(p, offsets).items():
            seen[name] = balance.plus(seen.get(name, {}), counts)
    accounts: Mapping[int, Account] = {}
    if world.letters is not None:
        accounts = ledger.partitions_before(lake.state, hour, world.recorded(hour))
    gaps = balance.classify_gaps({p: len(offsets) for p, offsets in in_kafka.items()}, seen)
    read_again = _by_partition(erased)
    left_out, lost, gaps = balance.classify_erased(lost, gaps, accounts, read_again)
    duplicate, gaps = balance.classify_unheld(lost, gaps, accounts, stored, {})
    account = Balance(
        cut, _counted(good, cut.ranges), _counted(dead, cut.ranges), duplicate, gaps,
        erased=balance.plus(read_again, left_out),
    )  # fmt: skip
    assert not (problems := account.problems()), problems
    return Read(good, dead, account)


def is_left_out(world: World, state: State, hour: str, topic_id: str, row: Row) -> bool:
    """Whether a layer that stages by a state leaves a record out as erased: by its value, which is
    not found in a malformed one; or by its place, which the ledger has or is about to get."""
    covering = state.erasures.covering(hour, topic_id, {row[0]: (row[1], row[1] + 1)})
    if not covering or row[2] not in world.kafka.personal:
        return False
    if row[2] not in world.kafka.malformed:
        return True
    rows = ledger.with_waiting(state, hour, world.recorded(hour))
    return row[:2] in erasure.places_of(rows).get(hour, ())


def given(world: World, cut: Cut) -> Offsets:
    """Return how many records of a cut Kafka gives, by partition."""
    starts = world.kafka.log_starts(Topic(TOPIC, cut.topic_id, ()))
    there = trim(cut.ranges, starts)
    is_there = world.kafka.id == cut.topic_id and world.kafka.holds(there)
    return _by_partition([*world.kafka.read(there)]) if is_there else {}


def _rows(lake: Lake | None, branch: Layer, hour: str) -> list[Row]:
    return [row for f in lake.files_of(branch, hour) for row in f.rows] if lake is not None else []


def _is_in(row: Row, ranges: Ranges) -> bool:
    start, end = ranges.get(row[0], (0, 0))
    return start <= row[1] < end


def _by_partition(rows: list[Row]) -> Offsets:
    return dict(Counter(row[0] for row in rows))


def _counted(rows: list[Row], ranges: Ranges) -> Counted:
    """Count rows as `counting.count` counts staged files."""
    inside = {row[:2] for row in rows if _is_in(row, ranges)}
    outside = sum(not _is_in(row, ranges) for row in rows)
    return Counted(dict(Counter(p for p, _ in inside)), len(rows), outside)
