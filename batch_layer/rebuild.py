"""Rebuild an hour: read its cut again, prove the account, and publish it; or refuse it and change
nothing.

1. Read exactly the cut's offset ranges and decode them as the speed layer does.
2. Drop duplicates and stage rows and dead letters.
3. Close the balance over the staged files.
4. Compare with the speed layer.
5. Run the quality gate on the staged rows.
6. Decide again later accepted hours whose duplicates the hour changes.
7. Refuse, or publish to `batch` and `main` in one commit.
8. Complete: publish the dead letters, then write the ledger.

An account that does not close is never published. Objections of the stream's rules (a class of
gaps, the quality gate) refuse the hour too, unless an operator accepts it with a reason, which the
ledger stores.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime

from pyiceberg.table import Table
from pyspark.version import __version__ as SPARK_VERSION

from anabranch.common.counters import TALLY, Tally
from anabranch.common.errors import Transient
from anabranch.common.fail_points import Step, reach
from anabranch.common.logs import Progress, fields
from anabranch.config import Stream
from anabranch.iceberg.file_io import count_written
from anabranch.iceberg.files import reports_missing_file
from anabranch.iceberg.manifests import content_by_hour, files_by_hour
from anabranch.iceberg.snapshots import has_landed
from anabranch.iceberg.staging import WITHIN, held_snapshots
from anabranch.job import Job
from anabranch.kafka.source import is_out_of_memory
from anabranch.offsets import hours
from anabranch.offsets.hours import Cut
from anabranch.protocol import dead_letters, ledger, merge
from anabranch.protocol.apply import require_columns
from anabranch.protocol.erasure import marks_of
from anabranch.protocol.imported import require_of_kafka
from anabranch.protocol.ledger_row import Act, HourAccount, Layer, RunFacts
from anabranch.protocol.measured import PUBLISH, STAGE, Meter
from anabranch.protocol.publish import Again, Decision, Landed, Publish, new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.retention import require_kept
from anabranch.protocol.sealing import Sealed, require_sealed, seal
from anabranch.protocol.state import Accepted, State, load_state
from anabranch.protocol.topic_change import gone_from_kafka
from anabranch.spark.session import LazySpark
from anabranch.subjects.follow import with_columns_of
from batch_layer import plan
from batch_layer.archive import LostFiles
from batch_layer.build import Built, HourBuilder
from batch_layer.sources import KAFKA

LOG = logging.getLogger(__name__)

_ATTEMPTS = 3


@dataclass(frozen=True)
class Result:
    """The decision on an hour, its account so far; `served` for an hour without records."""

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
    """The treatment of an hour, and its reason. `accept`: despite the stream's rules' objections.
    `act`: the operator's, None if the batch layer does it by itself."""

    restate: bool = False
    accept: bool = False
    why: str | None = None
    act: Act | None = None


_DEFAULT_REQUEST = RebuildRequest()


def accepted_empty(hour: str) -> Result:
    """Return the result of an hour without records. Pure."""
    return Result(hour, "accepted", 1, None, plan.EMPTY, "batch")


class Rebuilder:
    """The rebuilder of one stream's hours, one at a time. `parent` and `root`: the scheduler's
    runs, for the ledger. `tally`: the stream's own counts, in a job of many streams."""

    def __init__(
        self,
        job: Job,
        spark: LazySpark,
        parent: str | None = None,
        root: str | None = None,
        tally: Tally = TALLY,
    ) -> None:
        self._job, self._spark = job, spark
        self._parent, self._root = parent, root
        self._stream: Stream = job.stream
        self._lost = LostFiles(job)
        self._hours = HourBuilder(job, spark, self._lost)
        self.publisher = Publisher(job.lake, job.stream)
        self._meter = Meter("batch", tally)
        self.accepted_with_seal: list[Result] = []
        # Hours whose rows are incomplete, with the reason: a file of theirs is gone.
        self.without_files: dict[str, str] = {}
        # The publish that an earlier attempt of this run began, and its result if it landed, by
        # hour.
        self._begun: dict[str, tuple[str, Result]] = {}

    def use(self, spark: LazySpark) -> None:
        """Continue with another session of the same Spark."""
        self._spark = spark
        self._hours.use(spark)

    def show_on(self, progress: Progress) -> AbstractContextManager[None]:
        """Show the pass of the running rebuild on `progress`."""
        return self._hours.passes.show_on(progress)

    def load(self) -> State:
        return load_state(self._job.lake, self._stream.table)

    def seal(self, candidates: Collection[str] | None) -> Sealed:
        """Seal ended hours. Each commit also accepts the sealed hours that are empty and in
        `candidates` (None: all), and adds them to `accepted_with_seal`."""

        def extend(state: State, publish: Publish) -> Publish:
            now = self._job.lake.clock.now()
            measured = self._meter.to_properties(state.branch_properties["main"], [])
            return plan.plan_seal_with_acceptance(
                state, publish, candidates, now, self._run_facts(now), measured
            )

        def landed(landed: Landed) -> None:
            accepted = [row.hour for row in landed.publish.decisions if row.decision == "accepted"]
            if accepted:
                reach(Step.BATCH_EMPTY_ACCEPTED)
                self._meter.landed(landed.seconds)
                self.accepted_with_seal += map(accepted_empty, accepted)

        return seal(self.publisher, self._job.kafka, extend, landed)

    def accept_empty(self, candidates: Sequence[str]) -> list[Result]:
        """Accept hours without records, in commits of bounded size."""

        def decide() -> Decision[None]:
            state, now = load_state(self._job.lake, self._stream.table), self._job.lake.clock.now()
            measured = self._meter.to_properties(state.branch_properties["main"], [])
            run = self._run_facts(now)
            return Decision(
                state,
                plan.plan_acceptance_of_empty(state, candidates, new_id(), now, run, measured),
                None,
            )

        doing, results = f"accept empty hours of {self._stream.name}", list[Result]()
        while (landed := self.publisher.run(decide, doing).landed) is not None:
            reach(Step.BATCH_EMPTY_ACCEPTED)
            self._meter.landed(landed.seconds)
            self.publisher.record_decisions(landed.state)
            results += [accepted_empty(row.hour) for row in landed.publish.decisions]
            if len(landed.publish.decisions) < plan.ACCEPTED_AT_ONCE:
                break
        return results

    def repairable(self) -> dict[str, int]:
        """Return the number of dead letters that decode now, by accepted hour."""
        state = self.load()
        self._follow_columns(state.table)
        with self._spark.explained("read the dead letters"):
            found = self._hours.reader.repairable()
        return {h: n for h, n in found.items() if state.is_accepted(h) and not state.is_expired(h)}

    def rebuild(self, hour: str, request: RebuildRequest = _DEFAULT_REQUEST) -> Result:
        """Rebuild one sealed hour. An accepted hour is skipped unless `request` restates it.

        A refusal is a result. The ledger records it once for each reason; nothing else changes.
        Raises Refused if the hour or an hour of a restatement's look-back has expired; Transient,
        PositionError.
        """
        state = self.load()
        require_sealed(state, self._stream, hour)
        self._follow_columns(state.table)
        require_columns(state.table, self._stream)
        if hour in self._begun and has_landed(state.table, self._begun[hour][0]):
            # The answer or a later step of this publish was lost. Do not restate the hour again.
            self.publisher.recover()
            return self._begun.pop(hour)[1]
        accepted = self._job.ledger.accepted(state, hour)
        before = accepted.revision if accepted is not None else 0
        if state.is_accepted(hour) and not request.restate:
            return Result(
                hour, "unchanged", before, "already accepted; --restate publishes a new revision"
            )
        # Decision 56: Kafka never had the records of an imported hour, so a rebuild would publish
        # it empty.
        require_of_kafka(state, hour)
        self._require_kept(state, hour, before)
        # The cut of the accepted revision: offsets between two cuts would be in two hours or in
        # none.
        cut = accepted.cut if accepted is not None else state.cuts[hour]
        if cut.offsets == 0:
            return next(
                iter(self.accept_empty([hour])),
                Result(hour, "unchanged", before, "it has no records"),
            )
        # An hour of another log, or below a restart of the log: Kafka has other records at its
        # offsets, and they would be published as this hour's.
        if not before and (
            gone := gone_from_kafka(state.timeline, state.position.topic_id, hour, cut)
        ):
            run_facts = self._run_facts(self._job.lake.clock.now())
            return self._refuse(
                state, hour, cut, before, gone, HourAccount(run=run_facts), request.act
            )
        LOG.info("stream %s: rebuilding hour=%s offsets=%d", self._stream.name, hour, cut.offsets)
        for _ in range(_ATTEMPTS):
            try:
                result = self._rebuild_without_lost(state, hour, cut, before, request)
            finally:
                self._lost.release()
            if result is not None:
                return result
            LOG.info(
                "stream %s: look-back changed, dropping duplicates again hour=%s",
                self._stream.name,
                hour,
            )
            state = self.load()
            self._require_kept(state, hour, before)
        raise Transient(
            f"hour {hour}: expected an unchanged look-back in one of {_ATTEMPTS} attempts, found "
            "changes in each; run it again"
        )

    def _rebuild_without_lost(
        self, state: State, hour: str, cut: Cut, before: int, request: RebuildRequest
    ) -> Result | None:
        """Build and publish as `_rebuild`; again without the files that storage has lost."""
        while True:
            try:
                # The speed layer's publishes expire snapshots. Keep these until the build has read
                # them.
                with (
                    fields(hour=hour),
                    held_snapshots(self._job.lake, self._stream.table, state.heads.values(), hour),
                    # For example a lost executor, with its part of the decoded hour. Nothing is
                    # published.
                    self._spark.explained(f"rebuild hour {hour}"),
                ):
                    return self._rebuild(state, hour, cut, before, request)
            except Transient as error:
                if is_out_of_memory(error):
                    self._hours.reader.out_of_memory[hour] += 1
                if not (reports_missing_file(error) and self._find_lost(state, hour)):
                    raise

    def _find_lost(self, state: State, hour: str) -> bool:
        """Look for lost files for a rebuild of `hour`; return whether there are more now."""
        later = [h for h in state.accepted if h > hour]
        found = self._lost.find(state, {hour, *self._hours.lookback(hour), *later})
        for one in found:
            # The rows of another branch are not served, or are decoded again with the hour.
            if {"batch", "main"} & {*one.branches} and one.hour != hour:
                self.without_files[one.hour] = f"file {one.path} is gone"
        return bool(found)

    @property
    def stream(self) -> Stream:
        """The stream, with the columns with which the last hour was read."""
        return self._stream

    def _follow_columns(self, table: Table) -> None:
        """Use the table's current columns, for a stream whose columns follow its subject."""
        stream = with_columns_of(self._stream, table)
        if stream.columns != self._stream.columns:
            LOG.info("stream %s: columns changed", stream.name)
            self._stream, self._job = stream, replace(self._job, stream=stream)
            self._hours.follow(self._job)

    def _require_kept(self, state: State, hour: str, before: int) -> None:
        """Raise Refused for an expired hour, or a restatement that cannot find duplicates again."""
        require_kept(state, hour, self._stream.lookback_hours if before else 0)

    def _run_facts(self, began: datetime) -> RunFacts:
        """Return the run facts of a decision without staged rows."""
        return RunFacts(began, parent=self._parent, root=self._root)

    def _with_run_facts(self, began: datetime, built: Built) -> Built:
        """Return the hour with its run facts, and count the bytes written."""
        count_written((file.file_path, file.file_size_in_bytes) for file in built.rows.files)
        size = sum(file.file_size_in_bytes for file in built.rows.files)
        run = replace(
            self._run_facts(began),
            spark=SPARK_VERSION if self._spark.opened is not None else None,
            files=len(built.rows.files),
            bytes=size,
        )
        return replace(built, account=replace(built.account, run=run))

    def _rebuild(
        self, state: State, hour: str, cut: Cut, before: int, request: RebuildRequest
    ) -> Result | None:
        """Build and publish, or refuse; None if the look-back changed after duplicates were dropped
        against it."""
        began = self._job.lake.clock.now()
        # Steps 1 to 5 (`HourBuilder`).
        first = self._with_run_facts(began, self._hours.build(hour, cut, before, state))
        built = [first]
        # Step 6: decide again the accepted hours whose look-back has this hour. Decision 16: else
        # an event of this hour that one of them has too would stay in two accepted hours.
        if not _refusals(first, request.accept):
            state, following = self._recheck_following(first, state)
            built += [self._with_run_facts(began, b) for b in following]
        # Step 7: refuse, or publish. One refusal refuses all hours: published alone, the hour would
        # leave events twice, or drop them in both hours.
        reasons_to_refuse = _refusals(first, request.accept)
        for b in built[1:]:
            by_choice = state.accepted[b.hour].by_choice
            reasons_to_refuse += [
                f"{b.hour}, decided again: {refusal}" for refusal in _refusals(b, by_choice)
            ]
        if reasons_to_refuse:
            self._discard(built)
            return self._refuse(
                state, hour, cut, before, "; ".join(reasons_to_refuse), first.account, request.act
            )
        lost = [f"without {one.words}: it is gone" for one in self._lost.of_hour(hour)]
        reason = request.why or "; ".join(lost) or None
        reasons = {hour: plan.acceptance_reason(first.objections, request.accept, reason)}
        why = f"decided again after {hour}"
        reasons |= {b.hour: plan.acceptance_reason(b.objections, True, why) for b in built[1:]}
        act = plan.act_to_record(request.act, before, first.objections, request.accept)
        return self._publish(built, reasons, state, act)

    def _recheck_following(self, first: Built, state: State) -> tuple[State, list[Built]]:
        """Rebuild the later accepted hours that must drop or restore events because of `first`,
        oldest first. Also return a state that lists them, however long ago they were accepted."""
        listed = state.accepted
        # An hour without records has no event to drop or restore.
        after = [
            h
            for h in self._accepted_after(first.hour, first.hour, state)
            if h not in listed or listed[h].cut.offsets
        ]
        if not after or state.overrides.get(first.hour) == "speed":
            return state, []
        # An hour accepted while the speed layer was still reading `first` was not checked against
        # all of its rows.
        seen_whole = all(h not in listed or first.hour not in listed[h].unread for h in after)
        if seen_whole and not self._hours.changes_events(first, state):
            return state, []
        together, last, hour = {first.hour: first}, first.hour, hours.shift(first.hour, 1)
        while hour <= hours.shift(last, self._stream.lookback_hours):
            state = self._job.ledger.remembering(state, [hour])
            accepted = state.accepted.get(hour)
            if accepted is not None and accepted.cut.offsets and not state.is_expired(hour):
                again = self._hours.recheck_duplicates(
                    hour, accepted.cut, accepted.revision, state, together
                )
                if again is not None:
                    # Decision 50: without the expired rows of its look-back, their duplicates would
                    # return as rows.
                    self._require_kept(state, hour, accepted.revision)
                    LOG.info(
                        "stream %s: rechecking duplicates hour=%s after=%s",
                        self._stream.name,
                        hour,
                        first.hour,
                    )
                    together[hour], last = again, hour
            hour = hours.shift(hour, 1)
        return state, list(together.values())[1:]

    def _accepted_after(self, first: str, last: str, state: State) -> list[str]:
        """Return the accepted hours after `first` whose look-back includes an hour up to `last`."""
        behind = hours.shift(last, self._stream.lookback_hours + 1)
        after = hours.hours_between(hours.shift(first, 1), behind)
        return [h for h in after if state.is_accepted(h) and not state.is_expired(h)]

    def _unread_lookback(self, built: Sequence[Built], state: State) -> frozenset[str]:
        """Return the hours of their look-back that `main` does not serve completely yet."""
        around = {h for b in built for h in self._hours.lookback(b.hour)}
        return merge.unread_hours(state, around - {b.hour for b in built})

    def _surroundings(
        self, built: Sequence[Built], state: State, unread: frozenset[str]
    ) -> frozenset[str]:
        """Return a fingerprint of the rows that `main` serves in the hours around them, of the
        speed layer's progress, and of the erasures that were applied.

        Around: the hours that duplicates were dropped against (hours in `unread` were incomplete),
        and the later hours that were not rebuilt.
        """
        rebuilt = {b.hour for b in built}
        around = {h for b in built for h in self._hours.lookback(b.hour)}
        around = (around | set(self._accepted_after(built[0].hour, max(rebuilt), state))) - rebuilt
        by_batch = {h for h in around if state.served_by(h) == "batch"}
        files = files_by_hour(state.table, "main", by_batch)
        content = content_by_hour(state.table, "main", around - by_batch)
        # Decision 41: the speed layer may publish records that Kafka has deleted since the read. An
        # hour that counts them as gaps would take them from `main`.
        read = plan.may_yet_be_served(state, {b.hour: (b.cut, b.account.gaps) for b in built})
        # Decision 51: rows that were staged before an erasure's request would bring erased records
        # back.
        read = read.union(*(marks_of(state, b.hour, b.cut) for b in built))
        return (
            plan.fingerprint(state, around, files, {h: c.rows for h, c in content.items()}, unread)
            | read
        )

    def _refuse(
        self,
        seen: State,
        hour: str,
        cut: Cut,
        before: int,
        reason: str,
        account: HourAccount,
        act: Act | None,
    ) -> Result:
        """Record a refusal decided by the state `seen`, unless the ledger has it already."""
        reach(Step.BATCH_REFUSED)
        now, basis = (
            self._job.lake.clock.now(),
            plan.current_basis(self._stream, seen, hour, cut),
        )
        refusal = plan.last_refusal(self._job.ledger.history([hour]), hour)
        if plan.should_record(refusal, basis, before + 1, reason, now):
            state = self.load()
            served, id = state.served_by(hour), plan.decision_id(new_id(), basis)
            row = ledger.decision(
                hour,
                "refused",
                before + 1,
                cut,
                now,
                id,
                reason=reason,
                served=served,
                account=account,
                act=act,
            )
            self._job.ledger.record([row])
        LOG.error("stream %s: refused hour=%s reason=%s", self._stream.name, hour, reason)
        return Result(hour, "refused", before + 1, reason, account)

    def _publish(
        self,
        built: Sequence[Built],
        reasons: Mapping[str, str | None],
        seen: State,
        act: Act | None = None,
    ) -> Result | None:
        """Publish the hours together; discard them and return None if the look-back changed."""
        lake, stream, hour = self._job.lake, self._stream, built[0].hour
        unread = self._unread_lookback(built, seen)
        surroundings = self._surroundings(built, seen, unread)
        ready = time.monotonic()

        def decide() -> Decision[int | None] | Again:
            state = load_state(lake, stream.table)
            require_columns(state.table, stream)
            # Another run may have restated one of the hours since, and the state may no longer list
            # it.
            state = self._job.ledger.remembering(state, [b.hour for b in built])
            # Compare the look-back of the fresh state with the one that duplicates were dropped
            # against. If it changed, an event may be in two hours, or in none.
            around, now = self._surroundings(built, state, unread), lake.clock.now()
            for b in built:
                verdict = plan.check_publish(
                    state, b.hour, b.cut, b.before, b.rows.wap_id, around, surroundings, now
                )
                if verdict is plan.PublishCheck.EXPIRED:
                    self._discard(built)
                    require_kept(state, b.hour)
                if verdict is plan.PublishCheck.OVERTAKEN and b is built[0]:
                    return Decision(state, None, plan.revision_now(state, hour, b.before))
                if verdict is plan.PublishCheck.UNSEALED:
                    raise Transient(
                        f"hour {b.hour}: expected it to be sealed, found no seal; branch speed "
                        "was set back; run it again"
                    )
                if verdict is plan.PublishCheck.GONE:
                    raise Transient(
                        f"hour {b.hour}: expected a staged snapshot of the last {WITHIN}, found "
                        "none; run it again"
                    )
                if verdict is plan.PublishCheck.MERGE:
                    merge.merge(lake, stream)
                    return Again.AGAIN
                if verdict in (plan.PublishCheck.MOVED, plan.PublishCheck.OVERTAKEN):
                    return Decision(state, None, None)
            rebuilt = [
                plan.Rebuilt(
                    b.hour,
                    Accepted(b.before + 1, b.cut, bool(b.objections), self._unread_by(b, unread)),
                    b.rows,
                    letters=(
                        dead_letters.waiting_batch(
                            b.dead, b.hour, b.before + 1, now, f"{b.rows.wap_id}-{b.hour}"
                        ),
                    ),
                    account=b.account,
                    reason=reasons[b.hour],
                    act=act,
                )
                for b in built
            ]
            seconds = [*((STAGE, b.seconds) for b in built), (PUBLISH, time.monotonic() - ready)]
            measured = self._meter.to_properties(state.branch_properties["main"], seconds)
            return Decision(
                state, plan.plan_publish(state, rebuilt, now, measured), built[0].before + 1
            )

        result = Result(hour, "accepted", built[0].before + 1, reasons[hour], built[0].account)
        # Before the request: if its answer is lost, the next attempt of this run recognises the
        # publish by this id and does not restate the hour.
        self._begun[hour] = (built[0].rows.wap_id, result)
        # Step 7: all hours in one commit, so `main` never has an event in both of two hours that
        # were decided together, or in none.
        published = self.publisher.run(decide, f"hour {hour} of {stream.name}")
        if published.landed is None:
            self._discard(built)
            if (revision := published.result) is None:
                return None
            reason = f"another run published first: revision {revision} is accepted"
            return Result(hour, "unchanged", revision, reason)
        self._meter.landed(published.landed.seconds)
        # Step 8: complete. After a crash the branches still name the dead letters and decisions.
        reach(Step.BATCH_PUBLISHED)
        self.publisher.publish_dead_letters(published.state)
        reach(Step.BATCH_DEAD_LETTERS)
        self.publisher.record_decisions(published.state)
        reach(Step.BATCH_RECORDED)
        # All steps are done, so the next request for this hour is another restatement.
        del self._begun[hour]
        for b in built:
            self._log_accepted(b, unread)
        return result

    def _log_accepted(self, b: Built, unread: frozenset[str]) -> None:
        name = self._stream.name
        LOG.info(
            "stream %s: accepted hour=%s revision=%d rows=%d dead_letters=%d duplicates=%d gaps=%d",
            name,
            b.hour,
            b.before + 1,
            b.account.good,
            b.account.dead,
            b.account.duplicate,
            b.account.gap,
        )
        if filled := {
            name: n for name, n in (b.account.sources or {}).items() if n and name != KAFKA
        }:
            LOG.warning(
                "stream %s: records missing in Kafka, filled from the table hour=%s count=%d "
                "sources=%s",
                name,
                b.hour,
                sum(filled.values()),
                ",".join(f"{name}:{n}" for name, n in filled.items()),
            )
        if b.account.conflicts:
            LOG.warning(
                "stream %s: records with the key of another record and other content were dropped "
                "as duplicates hour=%s count=%d; `anabranch explain %s %s --rows` lists them",
                name,
                b.hour,
                b.account.conflicts,
                name,
                b.hour,
            )
        if missing := self._unread_by(b, unread):
            LOG.warning(
                "stream %s: speed layer has not read all of the look-back, duplicates are "
                "rechecked later hour=%s unread=%s",
                name,
                b.hour,
                ",".join(missing),
            )

    def _unread_by(self, built: Built, unread: frozenset[str]) -> tuple[str, ...]:
        return tuple(h for h in self._hours.lookback(built.hour) if h in unread)

    def _discard(self, built: Sequence[Built]) -> None:
        for b in built:
            self._job.lake.discard(self._stream.table, b.rows)
            if b.dead is not None:
                dead_letters.discard(self._job.lake, self._stream, b.dead)


def _refusals(built: Built, accept: bool) -> list[str]:
    """Return why the hour may not be published. An operator may overrule rules, not the account."""
    return [*built.problems, *([] if accept else built.objections)]
