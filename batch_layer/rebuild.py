"""Rebuilding an hour: read its cut again, prove the account, and publish it; or refuse, and change nothing.

1. Read exactly the cut's offset ranges and decode them as the speed layer does.
2. Drop duplicates and stage rows and dead letters.
3. Close the balance over the staged files.
4. Compare with the speed layer.
5. Run the quality gate on the staged rows.
6. Publish to `batch` and `main`, then the ledger and the dead letters.

An account that does not close is never published. What the stream's rules object to (a class of gaps, the quality gate)
refuses the hour too, unless an operator accepts it, for a reason that the ledger keeps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.version import __version__ as SPARK_VERSION

from anabranch.common.errors import AnabranchError, Transient
from anabranch.common.fail_points import Step, reach
from anabranch.common.logs import fields
from anabranch.iceberg.reading_tags import held_snapshots
from anabranch.iceberg.snapshots import content_by_hour, files_by_hour, has_landed
from anabranch.job import Job
from anabranch.offsets import hours
from anabranch.offsets.hours import Cut
from anabranch.protocol import coverage, dead_letters, ledger, merge
from anabranch.protocol.apply import require_columns
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.ledger_row import HourAccount, Layer, RunFacts
from anabranch.protocol.measured import PUBLISH, STAGE, Meter
from anabranch.protocol.publish import Again, Decision, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.sealing import require_sealed
from anabranch.protocol.state import Accepted, State, load_state
from anabranch.protocol.topic_change import gone_from_kafka
from anabranch.spark.session import explain_spark, explained
from batch_layer import refusals
from batch_layer.build import Built, HourBuilder
from batch_layer.plan import (
    ACCEPTED_AT_ONCE,
    EMPTY,
    PublishCheck,
    Rebuilt,
    acceptance_reason,
    check_publish,
    fingerprint,
    may_yet_be_served,
    plan_acceptance_of_empty,
    plan_again,
    plan_publish,
    revision_now,
    waiting_hours,
)
from batch_layer.sources import KAFKA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from anabranch.common.progress import Progress
    from anabranch.config import Stream

LOG = logging.getLogger(__name__)

_ATTEMPTS = 3


@dataclass(frozen=True)
class Result:
    """What became of an hour, and its account as far as it was counted; `served` of an hour without records."""

    hour: str
    decision: str
    revision: int
    reason: str | None = None
    account: HourAccount = field(default_factory=HourAccount)
    served: Layer | None = None

    @property
    def refused(self) -> bool:
        return self.decision == "refused"


@dataclass(frozen=True)
class RebuildRequest:
    """What is to be done with an hour, and why. `accept`: publish it in spite of what the stream's rules object to."""

    restate: bool = False
    accept: bool = False
    why: str | None = None


class _Moved(Exception):
    """What `main` serves in the look-back changed after duplicates were dropped against it: drop them again."""


_BY_ITSELF = RebuildRequest()


class Rebuilder:
    """Rebuilds hours of one stream, one at a time; `parent` and `root` are the scheduler's runs that it is part of, for
    the ledger."""

    def __init__(self, job: Job, spark: SparkSession, parent: str | None = None, root: str | None = None) -> None:
        self._job, self._spark = job, spark
        self._parent, self._root = parent, root
        self._stream: Stream = job.stream
        self._hours = HourBuilder(job, spark)
        self.publisher = Publisher(job.lake, job.stream)
        self._meter = Meter("batch")
        # By hour, the publish that an earlier try of this run began, and what it says when it landed.
        self._begun: dict[str, tuple[str, Result]] = {}

    def beside(self, progress: Progress) -> AbstractContextManager[None]:
        """While it is entered, `progress` says which pass over its hour a rebuild is at."""
        return self._hours.passes.beside(progress)

    def load(self) -> State:
        """The state as it is now."""
        return load_state(self._job.lake, self._stream.table)

    def waiting(self, state: State) -> list[str]:
        """The sealed hours that are not accepted, oldest first; not those that Kafka lost and that are refused for it,
        since trying again changes nothing."""
        waiting = waiting_hours(state)
        gone = [
            h for h in waiting if gone_from_kafka(state.timeline, state.position.topic_id, h, state.timeline.sealed[h])
        ]
        rows = ledger.newest(self._job.ledger.history(gone, ledger.BULKY))
        refused = {h for h, row in rows.items() if row.decision == "refused"}
        return [h for h in waiting if h not in refused]

    def standing(self, state: State, candidates: Sequence[str]) -> list[Result]:
        """The refusals, of `candidates`, that stand: nothing that they rest on has changed, so nothing is built."""
        if not candidates:
            return []
        now = self._job.lake.clock.now()
        rows = self._job.ledger.history(candidates)
        results = []
        for hour in (h for h in candidates if h in state.timeline.sealed):
            refusal = refusals.last_refusal(rows, hour)
            if refusal is None or not refusals.stands(refusal, self._basis(state, hour), now):
                continue
            LOG.warning(
                "stream %s: hour %s stays refused, nothing that it rests on has changed: %s; to rebuild it now: "
                "anabranch batch %s --hour %s",
                self._stream.name,
                hour,
                refusal.reason,
                self._stream.name,
                hour,
            )
            results.append(Result(hour, "refused", refusal.revision, refusal.reason, refusal))
        return results

    def _basis(self, state: State, hour: str, cut: Cut | None = None) -> str:
        suite = refusals.read_suite(self._stream)
        return refusals.refusal_basis(self._stream, suite, state, hour, cut or state.timeline.sealed[hour])

    def lost(self, state: State) -> dict[str, RebuildRequest]:
        """The accepted hours whose dead letters were lost before they were published, and how to restate each; not
        those whose restatement was refused, since trying again changes nothing."""
        lost = dead_letters.lost_hours(self._job.lake, self._stream, state)
        why = {h: f"the dead letters of revision {revision} were lost" for h, revision in sorted(lost.items())}
        return self._restatements(state, why)

    def again(self, state: State) -> dict[str, RebuildRequest]:
        """The accepted hours whose look-back the speed layer has read to its end since, and how to restate each; not
        those whose restatement was refused, since trying again changes nothing."""
        why = {h: _said_of_unread(unread) for h, unread in plan_again(state).items()}
        return self._restatements(state, why)

    def _restatements(self, state: State, why: Mapping[str, str]) -> dict[str, RebuildRequest]:
        rows = self._job.ledger.history(why, ledger.BULKY) if why else []
        refused = {(row.hour, row.revision) for row in rows if row.decision == "refused"}
        accepted = {h: state.accepted[h] for h in why}
        return {
            h: RebuildRequest(True, accepted[h].by_choice, reason)
            for h, reason in why.items()
            if (h, accepted[h].revision + 1) not in refused
        }

    def accept_empty(self, candidates: Sequence[str]) -> list[Result]:
        """Accept hours without records, in commits of bounded size."""

        def decide() -> Decision[None]:
            state, now = load_state(self._job.lake, self._stream.table), self._job.lake.clock.now()
            return Decision(state, plan_acceptance_of_empty(state, candidates, new_id(), now, self._run(now)), None)

        doing, results = f"accept empty hours of {self._stream.name}", list[Result]()
        while (landed := self.publisher.run(decide, doing).landed) is not None:
            reach(Step.BATCH_EMPTY_ACCEPTED)
            self.publisher.record_decisions(landed.state)
            results += [Result(row.hour, "accepted", 1, None, EMPTY, "batch") for row in landed.publish.decisions]
            if len(landed.publish.decisions) < ACCEPTED_AT_ONCE:
                break
        return results

    def repairable(self) -> dict[str, int]:
        """By accepted hour, how many of its dead letters would be rows by the stream as it is now."""
        state = self.load()
        with explained(self._spark, "read the dead letters"):
            return {h: n for h, n in self._hours.repairable().items() if state.is_accepted(h)}

    def rebuild(self, hour: str, order: RebuildRequest = _BY_ITSELF) -> Result:
        """Rebuild one sealed hour. An accepted hour is left alone unless it is to be restated.

        A refusal is a result and is in the ledger, once for each reason; nothing else has changed. Raises Transient,
        PositionError.
        """
        state = self.load()
        require_sealed(state, self._stream, hour)
        require_columns(state.table, self._stream)
        if hour in self._begun and has_landed(state.table, self._begun[hour][0]):
            # Its answer, or what follows it, was lost; another restatement would be one too many.
            self.publisher.recover()
            return self._begun.pop(hour)[1]
        accepted = self._job.ledger.accepted(state, hour)
        before = accepted.revision if accepted is not None else 0
        if state.is_accepted(hour) and not order.restate:
            return Result(hour, "unchanged", before, "already accepted; --restate publishes a new revision")
        cut = accepted.cut if accepted is not None else state.cuts[hour]
        if cut.offsets == 0:
            return next(iter(self.accept_empty([hour])), Result(hour, "unchanged", before, "it holds no records"))
        if not before and (gone := gone_from_kafka(state.timeline, state.position.topic_id, hour, cut)):
            run_facts = self._run(self._job.lake.clock.now())
            return self._refuse(state, hour, cut, before, gone, HourAccount(run=run_facts))
        LOG.info("stream %s: rebuilding hour %s: %d offsets", self._stream.name, hour, cut.offsets)
        for _ in range(_ATTEMPTS):
            try:
                # What the speed layer publishes meanwhile expires snapshots, and the build reads these until its end.
                with fields(hour=hour), held_snapshots(self._job.lake, self._stream.table, state.heads.values()):
                    return self._rebuild(state, hour, cut, before, order)
            except _Moved:
                LOG.info(
                    "stream %s: hour %s: the look-back changed; dropping duplicates again", self._stream.name, hour
                )
                state = self.load()
            except AnabranchError:
                raise
            except Exception as error:
                # Also a lost executor, which takes its part of the decoded hour with it. Nothing is published.
                raise explain_spark(self._spark, f"rebuild hour {hour}", error) from error
        raise Transient(f"hour {hour}: expected the look-back to hold still once in {_ATTEMPTS} attempts; try again")

    def _run(self, began: datetime) -> RunFacts:
        """How a decision is reached for which nothing is staged."""
        return RunFacts(began, parent=self._parent, root=self._root)

    def _since(self, began: datetime, built: Built) -> Built:
        """The same, and how it came about."""
        size = sum(file.file_size_in_bytes for file in built.rows.files)
        run = replace(self._run(began), spark=SPARK_VERSION, files=len(built.rows.files), bytes=size)
        return replace(built, account=replace(built.account, run=run))

    def _rebuild(self, state: State, hour: str, cut: Cut, before: int, order: RebuildRequest) -> Result:
        began = self._job.lake.clock.now()
        first = self._since(began, self._hours.build(hour, cut, before, state))
        built = [first]
        try:
            if not _refusals(first, order.accept):
                state, following = self._following(first, state)
                built += [self._since(began, b) for b in following]
            if refusals := _refusals(first, order.accept) + [
                f"{b.hour}, decided again: {refusal}"
                for b in built[1:]
                for refusal in _refusals(b, state.accepted[b.hour].by_choice)
            ]:
                self._discard(built)
                return self._refuse(state, hour, cut, before, "; ".join(refusals), first.account)
            # Step 6: publish.
            reasons = {hour: acceptance_reason(first.objections, order.accept, order.why)}
            reasons |= {b.hour: acceptance_reason(b.objections, True, f"decided again after {hour}") for b in built[1:]}
            return self._publish(built, reasons, state)
        except _Moved:
            self._discard(built)
            raise

    def _following(self, first: Built, state: State) -> tuple[State, list[Built]]:
        """The accepted hours after it that have to drop, or to take back, events because of it, oldest first; and the
        state in which they are remembered one by one, however long ago they were accepted."""
        after = self._after(first.hour, first.hour, state)
        if not after or state.overrides.get(first.hour) == "speed":
            return state, []
        # What `main` serves of it now is not what an hour has seen that was accepted while it was being read.
        seen_whole = all(h not in state.accepted or first.hour not in state.accepted[h].unread for h in after)
        if seen_whole and not self._hours.changes_events(first, state):
            return state, []
        together, last, hour = {first.hour: first}, first.hour, hours.shift(first.hour, 1)
        while hour <= hours.shift(last, self._stream.batch.lookback_hours):
            state = self._job.ledger.remembering(state, [hour])
            accepted = state.accepted.get(hour)
            if accepted is not None and accepted.cut.offsets:
                again = self._hours.decide_again(hour, accepted.cut, accepted.revision, state, together)
                if again is not None:
                    LOG.info("stream %s: hour %s is decided again after %s", self._stream.name, hour, first.hour)
                    together[hour], last = again, hour
            hour = hours.shift(hour, 1)
        return state, list(together.values())[1:]

    def _after(self, first: str, last: str, state: State) -> list[str]:
        """The accepted hours behind `first` that look back on one up to `last`."""
        behind = hours.shift(last, self._stream.batch.lookback_hours + 1)
        return [h for h in hours.hours_between(hours.shift(first, 1), behind) if state.is_accepted(h)]

    def _unread(self, built: Sequence[Built], state: State) -> frozenset[str]:
        """The hours of their look-back of which `main` has yet to get rows."""
        around = {h for b in built for h in self._hours.lookback(b.hour)}
        return coverage.unread_hours(state, around - {b.hour for b in built})

    def _surroundings(self, built: Sequence[Built], state: State, unread: frozenset[str]) -> frozenset[str]:
        """What `main` serves of the hours that duplicates were dropped against, when those of `unread` were not all
        there yet, and of those that were left as they are; and how far the speed layer has read where that matters."""
        rebuilt = {b.hour for b in built}
        around = {h for b in built for h in self._hours.lookback(b.hour)}
        around = (around | set(self._after(built[0].hour, max(rebuilt), state))) - rebuilt
        by_batch = {h for h in around if state.served_by(h) == "batch"}
        files = files_by_hour(state.table, "main", by_batch)
        content = content_by_hour(state.table, "main", around - by_batch)
        read = may_yet_be_served(state, {b.hour: (b.cut, b.account.gaps) for b in built})
        return fingerprint(state, around, files, {h: c.rows for h, c in content.items()}, unread) | read

    def _refuse(self, seen: State, hour: str, cut: Cut, before: int, reason: str, account: HourAccount) -> Result:
        """Record a refusal that was decided by the state `seen`, unless the ledger says the same already."""
        reach(Step.BATCH_REFUSED)
        now, basis = self._job.lake.clock.now(), self._basis(seen, hour, cut)
        refusal = refusals.last_refusal(self._job.ledger.history([hour]), hour)
        if refusals.should_record(refusal, basis, before + 1, reason, now):
            state = self.load()
            served, id = state.served_by(hour), refusals.decision_id(new_id(), basis)
            row = ledger.decision(
                hour, "refused", before + 1, cut, now, id, reason=reason, served=served, account=account
            )
            self._job.ledger.record([row])
        LOG.error("stream %s: hour %s refused: %s", self._stream.name, hour, reason)
        return Result(hour, "refused", before + 1, reason, account)

    def _publish(self, built: Sequence[Built], reasons: Mapping[str, str | None], seen: State) -> Result:
        lake, stream, hour = self._job.lake, self._stream, built[0].hour
        unread = self._unread(built, seen)
        surroundings = self._surroundings(built, seen, unread)
        ready = time.monotonic()

        def decide() -> Decision[int] | Again:
            state = load_state(lake, stream.table)
            require_columns(state.table, stream)
            # One of them may have been restated since, and others have let it be forgotten again.
            state = Ledger(lake, stream.hours_table).remembering(state, [b.hour for b in built])
            around = self._surroundings(built, state, unread)
            for b in built:
                verdict = check_publish(state, b.hour, b.cut, b.before, b.rows.wap_id, around, surroundings)
                if verdict is PublishCheck.OVERTAKEN and b is built[0]:
                    return Decision(state, None, revision_now(state, hour, b.before))
                if verdict is PublishCheck.UNSEALED:
                    raise Transient(
                        f"hour {b.hour}: expected it to be sealed, found its seal gone: branch speed was set back; "
                        "try again"
                    )
                if verdict is PublishCheck.GONE:
                    raise Transient(f"hour {b.hour}: expected its staged snapshot, found it gone; try again")
                if verdict is PublishCheck.MERGE:
                    merge.merge(lake, stream)
                    return Again.AGAIN
                if verdict in (PublishCheck.MOVED, PublishCheck.OVERTAKEN):
                    raise _Moved
            now = lake.clock.now()
            rebuilt = [
                Rebuilt(
                    b.hour,
                    Accepted(b.before + 1, b.cut, bool(b.objections), self._unread_by(b, unread)),
                    b.rows,
                    letters=(
                        dead_letters.waiting_batch(b.dead, b.hour, b.before + 1, now, f"{b.rows.wap_id}-{b.hour}"),
                    ),
                    account=b.account,
                    reason=reasons[b.hour],
                )
                for b in built
            ]
            seconds = [*((STAGE, b.seconds) for b in built), (PUBLISH, time.monotonic() - ready)]
            measured = self._meter.tell(state.branch_properties["main"], seconds)
            return Decision(state, plan_publish(state, rebuilt, now, measured), built[0].before + 1)

        result = Result(hour, "accepted", built[0].before + 1, reasons[hour], built[0].account)
        self._begun[hour] = (built[0].rows.wap_id, result)
        published = self.publisher.run(decide, f"hour {hour} of {stream.name}")
        if published.landed is None:
            self._discard(built)
            revision = published.result
            return Result(hour, "unchanged", revision, f"another run was first: revision {revision} is accepted")
        self._meter.landed(published.landed.seconds)
        reach(Step.BATCH_PUBLISHED)
        self.publisher.record_decisions(published.state)
        reach(Step.BATCH_RECORDED)
        self.publisher.publish_dead_letters(published.state)
        reach(Step.BATCH_DEAD_LETTERS)
        # All of it is done: what is asked of the hour from here on is another restatement.
        del self._begun[hour]
        for b in built:
            LOG.info(
                "stream %s: hour %s accepted as revision %d: %d rows, %d dead, %d duplicate, %d in gaps",
                stream.name,
                b.hour,
                b.before + 1,
                b.account.good,
                b.account.dead,
                b.account.duplicate,
                b.account.gap,
            )
            if filled := {name: n for name, n in (b.account.sources or {}).items() if n and name != KAFKA}:
                LOG.warning(
                    "stream %s: hour %s: Kafka did not give %d records that the table has; filled from: %s",
                    stream.name,
                    b.hour,
                    sum(filled.values()),
                    ", ".join(f"{n} {name}" for name, n in filled.items()),
                )
            if missing := self._unread_by(b, unread):
                LOG.warning(
                    "stream %s: hour %s: the speed layer has yet to read %s, which it serves; a run after that decides "
                    "the hour again, so that no event of both is kept twice",
                    stream.name,
                    b.hour,
                    ", ".join(missing),
                )
        return result

    def _unread_by(self, built: Built, unread: frozenset[str]) -> tuple[str, ...]:
        return tuple(h for h in self._hours.lookback(built.hour) if h in unread)

    def _discard(self, built: Sequence[Built]) -> None:
        for b in built:
            self._job.lake.discard(self._stream.table, b.rows)
            if b.dead is not None:
                dead_letters.discard(self._job.lake, self._stream, b.dead)


def _said_of_unread(hours: Sequence[str]) -> str:
    ends = "its end" if len(hours) == 1 else "their ends"
    return f"decided again: the speed layer has read {', '.join(hours)} to {ends} since"


def _refusals(built: Built, accept: bool) -> list[str]:
    """Why the hour may not be published; an operator may overrule the stream's rules, not the account."""
    return [*built.problems, *([] if accept else built.objections)]
