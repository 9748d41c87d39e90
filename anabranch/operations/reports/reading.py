"""The streams' reports, read periodically in background threads for the status page and the
metrics: each with its time and, if it is old, the reason. The time is taken before the read starts,
so a value is at least as new as its time."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Generic, NoReturn, TypeVar

from anabranch.common.errors import AnabranchError, TableMissing, Transient
from anabranch.common.remote_errors import asked_service, classify_unexpected
from anabranch.job import Job, StreamFolder
from anabranch.operations.reports import acts, status
from anabranch.operations.reports.acts import ActRecord
from anabranch.operations.reports.maintenance import (
    ContentReader,
    MainContent,
    Maintenance,
    read_maintenance,
)
from anabranch.operations.reports.status import StreamStatus
from anabranch.protocol.state import load_state

LOG = logging.getLogger(__name__)

T = TypeVar("T")
Key = tuple[str, ...]
"""Key of a value read on demand; the first element is the stream's name."""
# A reader spends at most a fifth of its time reading; the longest pause (s) lets a reader that once
# hung retry soon.
_REST = 4
_LONGEST_REST = 30.0
# Maximum number of queued reads; a further read starts with a later request.
_WAITING = 16
_ACTS = 20  # newest acts read


@dataclass(frozen=True)
class Readings:
    """The reports of a stream at one state of its table, read at a time: its status, the content of
    `main`, its maintenance, and operators' newest acts (newest first)."""

    at: datetime
    status: StreamStatus
    content: MainContent = field(default_factory=MainContent)
    maintenance: Maintenance = field(default_factory=Maintenance)
    acts: Sequence[ActRecord] = ()


def open_reader(
    job: Job, late_after: timedelta, now: Callable[[], datetime]
) -> Callable[[], Readings]:
    """Return a function that reads a stream's reports. It raises Transient when Kafka or the lake
    is unreachable or this machine's clock is wrong, and is not thread-safe."""
    content = ContentReader(job)
    patience = status.late_after(job.stream, late_after)

    def read() -> Readings:
        state, at = load_state(job.lake, job.stream.table), now()
        # By a slow clock, no hour has ended and no record is old: all would be in order.
        job.lake.clock.now(state.table.metadata.last_updated_ms)
        return Readings(
            at,
            status.status_of(job, state, patience),
            content.read(state, at),
            read_maintenance(job, state, at),
            acts.acts(job)[: -_ACTS - 1 : -1],
        )

    return read


@dataclass(frozen=True)
class Failure:
    """A failed attempt: its start and its reason. `service`: the service that did not answer, if
    any; `is_new`: the stream's table does not exist yet."""

    at: datetime
    reason: str
    service: str | None = None
    is_new: bool = False


@dataclass(frozen=True)
class TimedValue(Generic[T]):
    """A value with its time. `failure`: the failure of the newest attempt; `asking_since`: the
    start of an attempt in progress."""

    value: T | None = None
    as_of: datetime | None = None
    failure: Failure | None = None
    asking_since: datetime | None = None

    def why_old(self, now: datetime, deadline: timedelta, every: timedelta) -> str | None:
        """Return why there is no newer value, or no value; None if the value is as new as the
        period `every` allows, or the first read is in progress. An attempt that takes longer than
        `deadline` counts as hanging. Pure."""
        asking = self.asking_since
        if asking is not None and now - asking > deadline:
            return (
                f"no answer since {asking:%H:%M:%S} UTC, {(now - asking).total_seconds():.0f} s ago"
            )
        if self.failure is not None:
            return f"the attempt of {self.failure.at:%H:%M:%S} UTC failed: {self.failure.reason}"
        # Two reads that just meet the deadline, and the pause between them.
        if self.as_of is not None and now - self.as_of > (_REST + 2) * deadline + every:
            return "no reading attempted since"
        return None

    def is_due(self, now: datetime, fresh_for: timedelta) -> bool:
        """Return whether to read again: the newest attempt is older than `fresh_for`. Pure."""
        attempts = filter(None, (self.as_of, self.failure.at if self.failure else None))
        return all(now - at > fresh_for for at in attempts)


def utc_now() -> datetime:
    return datetime.now(UTC)


class BackgroundReader(Generic[T]):
    """A reader of one value, in one thread at a time. Any thread may use `reading`."""

    def __init__(
        self, name: str, read: Callable[[], T], now: Callable[[], datetime] = utc_now
    ) -> None:
        self._name, self._read, self._now = name, read, now
        self.reading: TimedValue[T] = TimedValue()

    def refresh(self) -> None:
        """Read the value; keep the previous one after a failure."""
        self.reading = replace(self.reading, asking_since=(asked := self._now()))
        try:
            self.reading = TimedValue(self._read(), asked)
        except Exception as error:
            known = (
                error
                if isinstance(error, AnabranchError)
                else classify_unexpected(self._name, error)
            )
            LOG.warning("%s: reading failed: %s", self._name, known)
            service = asked_service(known) if isinstance(known, Transient) else None
            failure = Failure(asked, str(known), service, isinstance(known, TableMissing))
            self.reading = replace(self.reading, failure=failure, asking_since=None)


@dataclass(frozen=True)
class FollowedStream:
    """A stream with its reader. `job` is another object once the stream's file has changed."""

    job: Job | AnabranchError
    reader: BackgroundReader[Readings]
    dropped: threading.Event = field(default_factory=threading.Event)


class FollowedStreams:
    """The streams of a folder, each read periodically by a thread of its own, so that a stream that
    hangs does not delay the others. The reader of an invalid file raises the file's error. `opened`
    returns the function that reads a stream's job. No thread runs before `start`."""

    def __init__(
        self,
        folder: StreamFolder,
        opened: Callable[[Job], Callable[[], Readings]],
        every: timedelta,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.folder, self._opened, self._every, self._now = folder, opened, every, now
        self.current: Mapping[str, FollowedStream] = {}
        self._started, self._stopped = False, threading.Event()
        self.follow()

    def start(self, followed: Callable[[Collection[str]], object]) -> None:
        """Read until `stop`. Calls `followed` with the names of streams that changed or left."""
        self._started = True
        self._run(list(self.current.values()))
        threading.Thread(target=self._follow, args=(followed,), daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        for stream in self.current.values():
            stream.dropped.set()

    def follow(self) -> list[str]:
        """Take the folder's current streams. A stream whose file changed gets a new reader, which
        keeps the reading of the former one. Return the names of those that changed or left."""
        before, current = self.current, dict[str, FollowedStream]()
        for name, job in self.folder.jobs().items():
            known = before.get(name)
            if known is None or known.job is not job:
                read = self._opened(job) if isinstance(job, Job) else partial(_raise, job)
                reader = BackgroundReader(f"stream {name}", read, self._now)
                if known is not None:
                    reader.reading = replace(known.reader.reading, asking_since=None)
                known = FollowedStream(job, reader)
            current[name] = known
        self.current = current
        changed = [name for name, old in before.items() if current.get(name) is not old]
        for name in changed:
            before[name].dropped.set()
        if self._started:
            self._run([new for name, new in current.items() if before.get(name) is not new])
        return changed

    def _follow(self, followed: Callable[[Collection[str]], object]) -> None:
        while not self._stopped.wait(self._every.total_seconds()):
            try:
                followed(self.follow())
            except Exception as error:
                LOG.warning(
                    "%s; trying again in %s",
                    classify_unexpected("follow the streams", error),
                    self._every,
                )

    def _run(self, streams: Sequence[FollowedStream]) -> None:
        # First reads are spread over the period.
        for number, stream in enumerate(streams if not self._stopped.is_set() else ()):
            delay = self._every.total_seconds() * number / len(streams)
            threading.Thread(target=self._read, args=(stream, delay), daemon=True).start()

    def _read(self, stream: FollowedStream, pause: float) -> None:
        """Read until the stream is dropped, then close its connections."""
        while not stream.dropped.wait(pause):
            began = time.monotonic()
            stream.reader.refresh()
            pause = rest_after(time.monotonic() - began, self._every)
        if isinstance(stream.job, Job):
            stream.job.kafka.close()


def _raise(error: AnabranchError) -> NoReturn:
    raise error


def rest_after(seconds: float, every: timedelta) -> float:
    """Return the pause in seconds after a read that took `seconds`. Pure."""
    return max(every.total_seconds(), min(_REST * seconds, _LONGEST_REST))


class OnDemand(Generic[T]):
    """Values read on request by at most two threads, and cached for later requests."""

    def __init__(
        self, fresh_for: timedelta, most: int = 200, now: Callable[[], datetime] = utc_now
    ) -> None:
        self._fresh_for, self._most, self._now = fresh_for, most, now
        self._readers: OrderedDict[Key, BackgroundReader[T]] = OrderedDict()
        self._lock = threading.Lock()
        self._running: dict[Key, Future[None]] = {}
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="page")

    def get(self, key: Key, read: Callable[[], T], patience: timedelta) -> TimedValue[T]:
        """Return the reading of `key` after waiting at most `patience`; it has no value if none was
        read by then."""
        with self._lock:
            reader = self._readers.setdefault(key, BackgroundReader(str(key), read, self._now))
            self._readers.move_to_end(key)
            while len(self._readers) > self._most:
                self._readers.popitem(last=False)
            self._running = {k: one for k, one in self._running.items() if not one.done()}
            running = self._running.get(key)
            has_room = running is None and len(self._running) < _WAITING
            begins = has_room and reader.reading.is_due(self._now(), self._fresh_for)
            if begins:
                running = self._running[key] = self._workers.submit(reader.refresh)
        if running is not None and (begins or reader.reading.value is None):
            wait([running], patience.total_seconds())
        return reader.reading

    def forget(self, stream: str) -> None:
        """Discard the stream's values: the next request reads them again."""
        with self._lock:
            for key in [key for key in self._readers if key[0] == stream]:
                del self._readers[key]

    def stop(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
