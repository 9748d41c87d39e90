"""A run of the batch layer over one stream: seal, then rebuild the hours that wait, or restate
repairable ones.

Each step is retried for up to `RETRY_FOR`. In a job of many streams, work needs one of the
stream's turns (`Turns`): the number of concurrent hours, and whose hour is next.

Each stream has a thread, which works only while it has a turn. The next turn goes to the stream
that had the fewest, and among these to the one with the oldest hour: a stream with a long backlog
delays another by one hour at most. A small hour takes one of `at_once` places; a large hour takes
more, by its size, and waits until they are free. A stream that waits before a retry gives its
places back.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import TypeVar

from anabranch.common.errors import AnabranchError, Unexpected
from anabranch.common.logs import Progress
from anabranch.common.retry import Retry
from anabranch.job import Job
from anabranch.protocol import dead_letters, ledger
from anabranch.protocol.ledger_row import act_now
from anabranch.protocol.retention import is_kept
from anabranch.protocol.sealing import require_ended, require_sealed
from anabranch.protocol.state import State
from anabranch.protocol.topic_change import gone_from_kafka
from anabranch.spark.session import LazySpark
from batch_layer import plan
from batch_layer.plan import empty_hours, plan_recheck, waiting_hours
from batch_layer.rebuild import Rebuilder, RebuildRequest, Result
from serving_layer.views import try_fill

OFFSETS_OF_A_PLACE = 250_000
"""The number of offsets per place that an hour takes."""


def places(offsets: int | None, at_once: int) -> int:
    """Return the number of places, at most `at_once`, that an hour of `offsets` offsets takes: all
    if the number is unknown. Pure."""
    if offsets is None:
        return at_once
    return max(1, min(at_once, -(-offsets // OFFSETS_OF_A_PLACE)))


class Turns:
    """The places of a job. Each has a Spark session, since an hour's settings are those of its
    session. `open_session` is called for each place that is used, at most `at_once` times."""

    def __init__(self, at_once: int, open_session: Callable[[], LazySpark]) -> None:
        self.at_once = at_once
        self._open = open_session
        self._free = at_once
        self._sessions: list[LazySpark] = []
        self._waiting: list[tuple[int, str, int]] = []
        self._arrivals = itertools.count()
        self._changed = threading.Condition()

    def take(self, turns_had: int, hour: str, number: int) -> LazySpark:
        """Wait for `number` places. Streams with fewer turns than `turns_had` go first, then those
        with as many turns and an older hour. Return the session of a place."""
        ticket = (turns_had, hour, next(self._arrivals))
        with self._changed:
            heapq.heappush(self._waiting, ticket)
            self._changed.wait_for(lambda: self._waiting[0] == ticket and self._free >= number)
            heapq.heappop(self._waiting)
            self._free -= number
            session = self._sessions.pop() if self._sessions else None
            self._changed.notify_all()
        return session if session is not None else self._open()

    def give_back(self, session: LazySpark, number: int) -> None:
        with self._changed:
            self._sessions.append(session)
            self._free += number
            self._changed.notify_all()


class StreamTurns:
    """One stream's turns, for its thread. `use` gets the session at each turn's start."""

    def __init__(self, turns: Turns, use: Callable[[LazySpark], None]) -> None:
        self._turns, self._use = turns, use
        self._turns_had = 0
        self._now: tuple[LazySpark, str, int] | None = None

    @contextmanager
    def take(self, hour: str = "", offsets: int | None = 0) -> Iterator[None]:
        """Take a turn for an hour of `offsets` (None: unknown), or for the work around hours."""
        self._begin(hour, places(offsets, self._turns.at_once))
        try:
            yield
        finally:
            self._end()

    def pause(self, seconds: float, stop: threading.Event) -> None:
        """Wait for `seconds` or for `stop`, without a place. Within a turn, take the places again
        afterwards."""
        if self._now is None:
            stop.wait(seconds)
            return
        _, hour, number = self._now
        self._end()
        try:
            stop.wait(seconds)
        finally:
            self._begin(hour, number)

    def _begin(self, hour: str, number: int) -> None:
        session = self._turns.take(self._turns_had, hour, number)
        self._now = (session, hour, number)
        self._turns_had += 1
        self._use(session)

    def _end(self) -> None:
        if self._now is not None:
            session, _, number = self._now
            self._now = None
            self._turns.give_back(session, number)


def find_waiting(job: Job, state: State) -> list[str]:
    """Return the sealed hours that are not accepted, oldest first. Leaves out refused hours that
    Kafka lost: a rebuild would refuse them again."""
    hours, topic_id, sealed = waiting_hours(state), state.position.topic_id, state.timeline.sealed
    gone = [h for h in hours if gone_from_kafka(state.timeline, topic_id, h, sealed[h])]
    rows = ledger.newest(job.ledger.history(gone, ledger.BULKY))
    refused = {h for h, row in rows.items() if row.decision == "refused"}
    return [h for h in hours if h not in refused]


def unchanged_refusals(job: Job, state: State, candidates: Sequence[str]) -> list[Result]:
    """Return the refusals among `candidates` whose inputs have not changed."""
    if not candidates:
        return []
    now, name = job.lake.clock.now(), job.stream.name
    rows = job.ledger.history(candidates)
    results = []
    for hour in (h for h in candidates if h in state.timeline.sealed):
        refusal = plan.last_refusal(rows, hour)
        basis = plan.current_basis(job.stream, state, hour, state.timeline.sealed[hour])
        if refusal is None or not plan.is_still_valid(refusal, basis, now):
            continue
        LOG.warning(
            "stream %s: still refused, inputs unchanged hour=%s reason=%s; to rebuild it now: "
            "anabranch batch %s --hour %s",
            name,
            hour,
            refusal.reason,
            name,
            hour,
        )
        results.append(Result(hour, "refused", refusal.revision, refusal.reason, refusal))
    return results


def with_losses(job: Job, state: State, files: Mapping[str, str]) -> dict[str, RebuildRequest]:
    """Return a request to restate each accepted hour that lost a file (by hour, why), or whose dead
    letters were lost before they were published. Leaves out hours whose restatement was refused."""
    lookback = job.stream.lookback_hours
    lost = dead_letters.lost_hours(job.lake, job.stream, state)
    why = {h: f"the dead letters of revision {n} were lost" for h, n in lost.items()} | dict(files)
    kept = (h for h in sorted(why) if h in state.accepted and is_kept(state, h, lookback))
    return _restatements(job, state, {h: why[h] for h in kept})


def to_recheck(job: Job, state: State) -> dict[str, RebuildRequest]:
    """Return a request to restate each accepted hour whose look-back the speed layer has read
    completely since. Leaves out hours whose restatement was refused."""
    read = "duplicates rechecked: the speed layer has now read"
    why = {h: f"{read} {', '.join(unread)} completely" for h, unread in plan_recheck(state).items()}
    return _restatements(job, state, why)


def _restatements(job: Job, state: State, why: Mapping[str, str]) -> dict[str, RebuildRequest]:
    rows = job.ledger.history(why, ledger.BULKY) if why else []
    refused = {(row.hour, row.revision) for row in rows if row.decision == "refused"}
    accepted = {h: state.accepted[h] for h in why}
    return {
        h: RebuildRequest(True, accepted[h].by_choice, reason)
        for h, reason in why.items()
        if (h, accepted[h].revision + 1) not in refused
    }


LOG = logging.getLogger(__name__)

# The next run goes on with the same hours, so a longer time gains nothing.
RETRY_FOR = timedelta(minutes=15)

T = TypeVar("T")


class StreamRun:
    """One run over a stream. `turns`: the stream's turns in a job of many streams; None if the
    stream has the job to itself.

    Every method raises Transient when its time is over or `stop` is set. `results` has the results
    so far, also after a method raised.
    """

    def __init__(
        self,
        job: Job,
        rebuilder: Rebuilder,
        stop: threading.Event | None = None,
        turns: StreamTurns | None = None,
    ) -> None:
        self._job, self._rebuilder, self._turns = job, rebuilder, turns
        self._stop = stop or threading.Event()
        pause = turns.pause if turns is not None else None
        self._retry = Retry(RETRY_FOR, self._stop, pause=pause)
        self._name = f"stream {job.stream.name}"
        self.results: list[Result] = []
        self._broken: list[Unexpected] = []

    def rebuild(
        self, hours: Collection[str] | None, request: RebuildRequest, backlog: int = 0
    ) -> list[Result]:
        """Seal, then rebuild the named `hours`, or all that wait. Before named hours, rebuild up to
        `backlog` earlier ones that wait.

        A refused hour that waits is rebuilt once an input of its refusal has changed, and once a
        day. At the end, accepted hours are restated if their dead letters were lost or their
        look-back was incomplete; their results do not affect named hours. An hour that fails
        unexpectedly does not block others: Unexpected is raised at the end. Finally the stream's
        views are filled, where possible. Raises NotYet, before sealing, for an hour that has not
        ended. Hours before the stream's first raise ConfigurationError, but are a result in a job
        of many streams.
        """
        if hours is not None:
            self._rebuild_named(sorted(hours), request, backlog)
            if self._broken:
                raise _combined(self._broken)
        else:
            self._rebuild_waiting(request)
        self._restate_incomplete()
        with self._turn():
            try_fill(self._job.lake, self._rebuilder.stream)
        if self._broken and hours is None:
            raise _combined(self._broken)
        return sorted(self.results, key=lambda result: result.hour)

    def replay(self, hours: Collection[str] | None, why: str | None = None) -> list[Result]:
        """Restate the accepted hours (or only `hours`) with dead letters that decode now.

        Leaves out hours whose look-back has expired: their restatement is refused.
        """
        with self._turn():
            state = self._call(self._rebuilder.publisher.recover)
            act = act_now("replay", why)
            found = self._call(self._rebuilder.repairable)
        lookback = self._job.stream.lookback_hours
        repairable = {h: n for h, n in found.items() if hours is None or h in hours}
        if left := [h for h in repairable if not is_kept(state, h, lookback)]:
            LOG.warning(
                "%s: not replayed, their look-back has expired hours=%s", self._name, ",".join(left)
            )
            repairable = {h: n for h, n in repairable.items() if h not in left}
        with self._progress("replay", len(repairable)) as progress:
            for h, number in repairable.items():
                decode = f"dead letters replayed: {number} decode now"
                request = RebuildRequest(
                    restate=True, why=f"{decode}; {why}" if why else decode, act=act
                )
                self._attempt(h, request, state)
                progress.step()
        with self._turn():
            try_fill(self._job.lake, self._rebuilder.stream)
        if self._broken:
            raise _combined(self._broken)
        return self.results

    def _rebuild_named(self, named: list[str], request: RebuildRequest, backlog: int) -> None:
        with self._turn():
            self._call(lambda: require_ended(self._job.stream, self._job.lake, named))
            sealed = self._seal(None if backlog else named)
            if self._turns is not None:
                first = sealed.timeline.first
                why = f"stream {self._job.stream.name} begins with hour {first}"
                self.results += [Result(h, "before the first", 0, why) for h in named if h < first]
                named = [h for h in named if h >= first]
            for h in named:
                require_sealed(sealed, self._job.stream, h)
            state = self._recover(sealed)
        if backlog and named:
            self._rebuild_backlog(state, named[0], backlog)
        decided = {result.hour for result in self.results}
        named = [h for h in named if h not in decided]
        with self._progress("", len(named)) as progress:
            for h in named:
                self._attempt(h, request, state)
                progress.step()

    def _rebuild_backlog(self, state: State, before: str, at_most: int) -> None:
        """Rebuild hours before `before` that wait, oldest first. An error ends this, not the job:
        these hours wait on, and the named ones are not delayed."""
        try:
            with self._turn():
                waiting = [
                    h for h in self._call(lambda: find_waiting(self._job, state)) if h < before
                ]
                refused = {
                    result.hour
                    for result in self._call(lambda: unchanged_refusals(self._job, state, waiting))
                }
            for h in [h for h in waiting if h not in refused][:at_most]:
                self._rebuild_hour(h, RebuildRequest(), state)
        except AnabranchError as error:
            LOG.error("%s: earlier hours wait: %s", self._name, error)

    def _rebuild_waiting(self, request: RebuildRequest) -> None:
        with self._turn():
            # Recover before the first rebuild: the merge, dead letters and ledger rows that a crash
            # prevented are completed, so no hour is built beside an incomplete publish.
            state = self._recover(self._seal(None))
            waiting = self._call(lambda: find_waiting(self._job, state))
            if empty := empty_hours(state, waiting):
                self.results += self._call(lambda: self._rebuilder.accept_empty(empty))
                state = self._call(self._rebuilder.load)
            self.results += self._call(lambda: unchanged_refusals(self._job, state, waiting))
        decided = {result.hour for result in self.results}
        # Another run may have accepted some of them since.
        remaining = [h for h in waiting if h not in decided and h in state.timeline.sealed]
        sizes = tuple(state.timeline.sealed[h].offsets for h in remaining)
        with self._progress("", len(remaining), sizes) as progress:
            for h in remaining:
                self._attempt(h, request, state)
                progress.step()

    def _seal(self, candidates: Collection[str] | None) -> State:
        """Seal ended hours, and accept the empty ones among the candidates (None: all)."""
        sealed = self._call(lambda: self._rebuilder.seal(candidates)).state
        self.results += self._rebuilder.accepted_with_seal
        return sealed

    def _recover(self, state: State) -> State:
        """Complete what an earlier run left unfinished. Return the resulting state."""
        return self._call(lambda: self._rebuilder.publisher.recover(state))

    def _restate_incomplete(self) -> None:
        """Restate hours that lost dead letters or files, then those of incomplete look-back."""
        with self._turn():
            state = self._call(self._rebuilder.load)
            lost = self._call(lambda: with_losses(self._job, state, self._rebuilder.without_files))
            self._rebuilder.without_files.clear()
        for h, request in lost.items():
            self._attempt(h, request, state)
        with self._turn():
            if lost:
                state = self._call(self._rebuilder.load)
            incomplete = self._call(lambda: to_recheck(self._job, state))
        for h, request in incomplete.items():
            self._attempt(h, request, state)

    def _attempt(self, hour: str, request: RebuildRequest, state: State) -> None:
        """Rebuild an hour. Keep an unexpected error for the end: the other hours continue."""
        try:
            self._rebuild_hour(hour, request, state)
        except Unexpected as error:
            LOG.error("%s: hour %s: %s", self._name, hour, error)
            self._broken.append(error)

    def _rebuild_hour(self, hour: str, request: RebuildRequest, state: State) -> None:
        offsets = state.cuts[hour].offsets if hour in state.cuts else None
        with self._turn(hour, offsets):
            self.results.append(
                self._call(lambda: self._rebuilder.rebuild(hour, request), f"hour {hour}")
            )

    def _call(self, action: Callable[[], T], what: str = "") -> T:
        return self._retry.call(f"{self._name}: {what}" if what else self._name, action)

    def _turn(self, hour: str = "", offsets: int | None = 0) -> AbstractContextManager[None]:
        return nullcontext() if self._turns is None else self._turns.take(hour, offsets)

    @contextmanager
    def _progress(self, doing: str, hours: int, sizes: tuple[int, ...] = ()) -> Iterator[Progress]:
        """Log progress over hours; without passes in a job of many streams, which logs its own."""
        name = f"{self._name}: {doing}" if doing else self._name
        progress = Progress(LOG, name, "hours", hours, sizes, "offsets" if sizes else "")
        if self._turns is not None:
            yield progress
            return
        with self._rebuilder.show_on(progress):
            yield progress


def _combined(broken: Sequence[Unexpected]) -> Unexpected:
    if len(broken) == 1:
        return broken[0]
    more = Unexpected(f"{broken[0]} (and {len(broken) - 1} more hours, in the lines above)")
    more.__cause__ = broken[0]
    return more
