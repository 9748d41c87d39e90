"""A publisher of one stream: it finishes the incomplete work of earlier publishers, commits
decisions, and completes each publish.

Decisions and dead letters of a publish wait on the branches until they are in the ledger and in the
dead letters table. A publisher keeps the ids that it has found there; its next publish removes them
from the branches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import TypeVar

from anabranch.config import Stream
from anabranch.iceberg.lake import Lake
from anabranch.protocol import dead_letters, merge, publish
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.publish import Again, Decision, Landed, Publish, Published
from anabranch.protocol.state import NOTHING_CONFIRMED, Confirmed, State, load_state

T = TypeVar("T")


class Publisher:
    """A publisher to the table of one stream. For one thread at a time."""

    def __init__(self, lake: Lake, stream: Stream) -> None:
        self.lake, self.stream = lake, stream
        self.ledger = Ledger(lake, stream.hours_table)
        self._confirmed = NOTHING_CONFIRMED

    @property
    def confirmed(self) -> Confirmed:
        """The entries found written, which the next publish removes from the branches."""
        return self._confirmed

    def recover(self, state: State | None = None) -> State:
        """Finish the incomplete work of an earlier publisher of either layer: the merge, dead
        letters, ledger rows. Returns the state that the job continues from. A caller that has just
        loaded it passes `state` to avoid another load. Raises Transient.
        """
        if state is None or merge.needs_merge(state):
            state = merge.merge(self.lake, self.stream).state
        self.finish(state)
        return state

    def run(
        self, decide: Callable[[], Decision[T] | Again], what: str, take_turns: bool = True
    ) -> Published[T]:
        """Run `anabranch.protocol.publish.run`; its publish removes confirmed entries."""

        def confirming() -> Decision[T] | Again:
            decision = decide()
            if isinstance(decision, Again) or decision.publish is None:
                return decision
            return replace(decision, publish=self._confirming(decision.publish))

        published = publish.run(self.lake, self.stream.table, confirming, what, take_turns)
        if published.landed is not None:
            self._confirmed = NOTHING_CONFIRMED
        return published

    def run_merged(self, decide: Callable[[State], Decision[T]], what: str) -> Published[T]:
        """Do as `run`; merge `main` first if needed, and call `decide` with the loaded state."""

        def merged() -> Decision[T] | Again:
            state = load_state(self.lake, self.stream.table)
            if merge.needs_merge(state):
                merge.merge(self.lake, self.stream)
                return Again.AGAIN
            return decide(state)

        return self.run(merged, what)

    def land(self, state: State, planned: Publish, now: datetime) -> Landed | None:
        """Commit one publish over the heads of `state`; return None if it is refused."""
        landed = publish.land(self.lake, state, self._confirming(planned), now)
        if landed is not None:
            self._confirmed = NOTHING_CONFIRMED
        return landed

    def finish(self, state: State) -> None:
        """Publish the dead letters and write the ledger rows that wait in `state`. Raises
        Transient."""
        self.publish_dead_letters(state)
        self.record_decisions(state)

    def record_decisions(self, state: State) -> None:
        """Write the decisions that wait in `state` to the ledger. Raises Transient."""
        self._confirmed |= Confirmed(self.ledger.record_waiting(state, self._confirmed.decisions))

    def publish_dead_letters(self, state: State) -> None:
        """Publish the dead letters that wait in `state`. Raises Transient."""
        done = dead_letters.roll_forward(self.lake, self.stream.dead_letters_table, state)
        self._confirmed |= Confirmed(letters=done)

    def _confirming(self, planned: Publish) -> Publish:
        # Only entries that were found written: an entry that is removed earlier would be lost if
        # its row is not in the ledger.
        return replace(planned, confirmed=self._confirmed)
