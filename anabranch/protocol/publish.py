"""The publish protocol: decide on a fresh load, commit, and decide again after a refusal. `run` is
the only loop.

Rows are staged before a publish: files, and one snapshot that no branch refers to
(`anabranch.iceberg.staging`). The batch layer stages before the loop, the speed layer inside its
first decision, which assigns the hours.

A publish that is not worth an immediate second attempt (a compaction, a position moved past hours
of the batch layer) is decided and landed once; its caller loads and decides again.
"""

from __future__ import annotations

import json
import logging
import random
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import Enum
from functools import cached_property
from typing import Any, Generic, TypeVar

from pyiceberg.table import Table

from anabranch.common.counters import REFUSED, TALLY
from anabranch.common.errors import Transient
from anabranch.iceberg.commits import Change, Commit, Tag
from anabranch.iceberg.expiry import expired_tags, plan_expiry
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.snapshots import CONTENT, MERGED, head, is_recreated
from anabranch.offsets.hours import Timeline, hour_of, hours_between, shift
from anabranch.offsets.position import Position
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.publish_queue import QueueEntry, queue_entry
from anabranch.protocol.state import (
    ACCEPTED,
    DEAD_LETTERS,
    DECISIONS,
    NOTHING_CONFIRMED,
    POSITION,
    SETTLED,
    TIMELINE,
    Confirmed,
    State,
    plan_after,
    read_state,
    read_waiting,
)
from anabranch.protocol.watermarks import Watermarks, plan_watermarks

LOG = logging.getLogger(__name__)

T = TypeVar("T")

# Tags of replaced revisions and the hourly tags of `main` expire after a week.
TAG_AGE = timedelta(days=7)


@dataclass(frozen=True)
class Publish:
    """The contents of a commit. `changes` have the properties of the decision; `to_commit` adds the
    rest.

    `confirmed`: the waiting decisions and dead letters that were found written; the publish removes
    them from its branches. `anabranch.protocol.publisher` sets them. `read_until`: a time at which
    `position` was at or after the log's end. `staged`: the staged snapshots whose files it adds, by
    attempt.
    """

    id: str
    changes: tuple[Change, ...]
    timeline: Timeline
    position: Position | None = None
    decisions: tuple[LedgerRow, ...] = ()
    dead_letters: tuple[Mapping[str, Any], ...] = ()
    confirmed: Confirmed = NOTHING_CONFIRMED
    tags: tuple[Tag, ...] = ()
    remove_properties: tuple[str, ...] = ()
    merges: bool = False
    read_until: datetime | None = None
    set_properties: Mapping[str, str] = field(default_factory=dict)
    staged: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Landed:
    """A landed publish, the table that the catalog returned, and the commit's seconds."""

    publish: Publish
    table: Table
    seconds: float

    @cached_property
    def state(self) -> State:
        """The state after the publish, without another load. The next decision loads its own."""
        return read_state(self.table)


class Again(Enum):
    """The result of a decision that staged, merged or waited first: load and decide again."""

    AGAIN = 0


@dataclass(frozen=True)
class Decision(Generic[T]):
    """A publish over the heads of `state` (None: nothing left to do), and a result."""

    state: State
    publish: Publish | None
    result: T


@dataclass(frozen=True)
class Published(Generic[T]):
    """The last decision of a `run`, and the landed publish; None if nothing was left to do."""

    decision: Decision[T]
    landed: Landed | None

    @property
    def result(self) -> T:
        return self.decision.result

    @property
    def state(self) -> State:
        """The state at the end of the run."""
        return self.landed.state if self.landed is not None else self.decision.state


def new_id() -> str:
    """Return a new id for an attempt; also the `spark.wap.id` of its staged snapshot."""
    return uuid.uuid4().hex


def new_tag(state: State, name: str, branch: str, now: datetime) -> Tag:
    """Return a tag of a branch's head that expires TAG_AGE after `now`. Iceberg counts the age from
    the snapshot's timestamp."""
    made = head(state.table, branch)
    # An idle branch's head may be older than TAG_AGE, so its tag would expire at once.
    age = int(now.timestamp() * 1000) - made.timestamp_ms + int(TAG_AGE.total_seconds() * 1000)
    return Tag(name, made.snapshot_id, age)


def to_commit(state: State, publish: Publish, now: datetime) -> Commit:
    """Return the commit of a publish: the properties of each branch, the watermarks of `main`,
    expiry, and the three heads that it requires. Pure."""
    publish = _without_unproven(state, publish, now)
    content = dict(state.content)
    # `main` records these ids when it is merged. Without them, a `main` that was rolled back would
    # count as merged and keep fewer rows than its layers.
    content |= {
        c.branch: publish.id for c in publish.changes if c.branch != "main" and c.changes_rows
    }
    merged = any(c.branch == "main" for c in publish.changes)
    promised = _watermarks(state, publish)
    changes = []
    by_batch = {
        k: v for c in publish.changes if c.branch == "batch" for k, v in c.properties.items()
    }
    for change in publish.changes:
        properties = dict(change.properties) | {TIMELINE: publish.timeline.to_json()}
        if change.branch == "main":
            properties |= promised
            # A lost batch branch is recreated from `main`, and its accepted hours stay accepted.
            properties |= {SETTLED: by_batch[SETTLED]} if SETTLED in by_batch else {}
            properties |= {ACCEPTED: by_batch[ACCEPTED]} if ACCEPTED in by_batch else {}
        # Otherwise a branch moved without `main`, and this publish does not merge it.
        if change.branch == "main" and (publish.merges or state.is_merged):
            properties[MERGED] = json.dumps(content, sort_keys=True)
        if change.branch != "main":
            properties[CONTENT] = content[change.branch]
        # On `main` too: a lost speed branch is recreated from it, at the end of its rows.
        if change.branch != "batch" and publish.position is not None:
            properties[POSITION] = publish.position.to_json()
        before = state.branch_properties[change.branch]
        decisions = [replace(row, publish=publish.id).as_waiting() for row in publish.decisions]
        confirmed = publish.confirmed
        for key, new, done in (
            (DECISIONS, decisions, confirmed.decisions),
            (DEAD_LETTERS, publish.dead_letters, confirmed.letters),
        ):
            waiting = [i for i in read_waiting(before, key) if i["id"] not in done]
            properties[key] = json.dumps([*waiting, *new], default=str)
        changes.append(replace(change, properties=properties))
    if not merged and content != state.content:
        raise ValueError("a publish that changes rows of a layer has to contain main's changes")
    gone = expired_tags(state.table, now)
    return Commit(
        id=publish.id,
        # Decision 1: all three heads. Without one of them, a publish would land over rows, hours or
        # a position that its decision did not see.
        heads=state.heads,
        changes=tuple(changes),
        tags=publish.tags,
        drop_tags=gone,
        expire=plan_expiry(state.table, publish.id, now, gone_before=state.removed_at),
        staged=publish.staged,
        set_properties={**publish.set_properties, **promised},
        remove_properties=publish.remove_properties,
    )


def _without_unproven(state: State, publish: Publish, now: datetime) -> Publish:
    """Return the publish; of the first one to a `batch` that was recreated from `main`, it also
    removes the rows of hours that are not accepted from `batch`. Pure."""
    if not is_recreated(state.branch_properties["batch"]):
        return publish
    after = plan_after(state, publish.changes, publish.timeline, publish.position)
    running = max([hour_of(now), *(shift(hour, 1) for hour in after.timeline.boundaries)])
    unproven = (*after.unaccepted, *hours_between(after.timeline.open, shift(running, 1)))

    def cleared(change: Change) -> Change:
        if change.branch != "batch":
            return change
        # Decision 68: `proven` moves to this snapshot.
        gone = {*change.clear, *(h for h in unproven if h not in change.copy)}
        return replace(change, clear=tuple(sorted(gone)), rewrites=False)

    return replace(publish, changes=tuple(map(cleared, publish.changes)))


def _watermarks(state: State, publish: Publish) -> dict[str, str]:
    """Return the watermarks of `main` after the publish, empty if they no longer apply."""
    after = plan_after(state, publish.changes, publish.timeline, publish.position)
    before = Watermarks.from_properties(state.branch_properties["main"])
    promised = plan_watermarks(after, before, publish.merges or state.is_merged, publish.read_until)
    return dict.fromkeys(before.to_properties(), "") | promised.to_properties()


def land(
    lake: Lake, state: State, publish: Publish, now: datetime, entry: QueueEntry | None = None
) -> Landed | None:
    """Commit the publish over the heads of `state` and remove `entry` from the queue: step 3 of
    `run`.

    Returns None if the commit is refused: a head moved, and the caller has to load and decide
    again. Raises Transient if the outcome stays unknown.
    """
    commit = to_commit(state, publish, now)
    if entry is not None:
        commit = entry.with_removal(state.table.properties, commit)
    began = time.monotonic()
    table = lake.land(state.table, commit)
    return Landed(publish, table, time.monotonic() - began) if table is not None else None


def run(
    lake: Lake,
    table_name: str,
    decide: Callable[[], Decision[T] | Again],
    what: str,
    take_turns: bool = False,
    timeout: timedelta = timedelta(minutes=10),
) -> Published[T]:
    """Commit the publish that `decide` returns; after each refusal, call `decide` again.

    1. Decide: `decide` loads the state itself and checks the staged rows. It returns a publish, or
       no publish if nothing is left to do, or `Again` if it did something else first.
    2. Wait: if other publishers are first in the queue, wait for them, then decide again.
    3. Land: one commit (`land`) moves all branches of the publish, requires the heads that step 1
       read, and removes this publisher's turn.
    4. Refused: a head moved. Join the queue if refusals repeat, pause, and continue with step 1.

    With `take_turns`, join the publish queue if refusals repeat, wait for the publishers before it
    (`anabranch.protocol.publish_queue`), and pause after each refusal; raises Transient after
    `timeout`, with nothing published. Without it, retry at once until the commit lands: the speed
    layer waits for the queue inside its decision.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    refusals = 0
    # The context removes the turn on every exit: decision 8. A turn that is left over delays all
    # other publishers until its timeout.
    with queue_entry(lake, table_name, what, take_turns) as entry:
        began = time.monotonic()
        while True:
            if take_turns and time.monotonic() > deadline:
                raise Transient(
                    f"{what}: expected a publish within {timeout}, found {refusals} refusals; try "
                    "again"
                )
            # Step 1: decide. A repeated decision needs a new load: to send the same publish again
            # over new heads would publish offsets a second time that another publisher published
            # meanwhile.
            decision = decide()
            if isinstance(decision, Again):
                continue
            state, publish = decision.state, decision.publish
            if publish is None:
                return Published(decision, None)
            # Step 2: wait. The heads have moved during the wait, so the decision is made again.
            if entry.wait_for_others(state.table.properties, deadline):
                began = time.monotonic()
                continue
            # Step 3: land. `Lake.land` sends the commit once, and returns None only if it cannot
            # land any more (decision 12); else the next decision would publish the rows again.
            if (landed := land(lake, state, publish, lake.clock.now(), entry)) is not None:
                entry.landed()
                return Published(decision, landed)
            # Step 4: refused, nothing is published.
            refusals += 1
            TALLY.count(REFUSED)
            LOG.info(
                "%s: publish refused because a head of %s moved; deciding again refusals=%d",
                what,
                table_name,
                refusals,
            )
            entry.refused(time.monotonic() - began)
            if take_turns:
                time.sleep(random.uniform(0, min(0.5, 0.02 * 2 ** min(refusals, 5))))
            began = time.monotonic()
