"""Values read periodically in background threads, each with its time and, if it is old, the reason.
The time is taken before the read starts, so a value is at least as new as its time."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Generic, NoReturn, TypeVar

from anabranch.common.errors import AnabranchError
from anabranch.common.remote_errors import classify_unexpected
from anabranch.job import Job, StreamFolder

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


@dataclass(frozen=True)
class Failure:
    """A failed attempt: its start and its reason."""

    at: datetime
    reason: str


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
        """Return whether to read again: no read is in progress, and the newest attempt is older
        than `fresh_for`. Pure."""
        attempts = [
            at for at in (self.as_of, self.failure.at if self.failure else None) if at is not None
        ]
        return self.asking_since is None and (not attempts or now - max(attempts) > fresh_for)


def utc_now() -> datetime:
    return datetime.now(UTC)


class BackgroundReader(Generic[T]):
    """A reader of one value. Any thread may access `reading`, the newest result; only one `refresh`
    runs at a time."""

    def __init__(
        self, name: str, read: Callable[[], T], now: Callable[[], datetime] = utc_now
    ) -> None:
        self._name, self._read, self._now = name, read, now
        self._lock = threading.Lock()
        self._close: Callable[[], None] | None = None
        self.reading: TimedValue[T] = TimedValue()
        self.answered = threading.Event()

    def refresh(self) -> None:
        """Read the value; keep the previous one after a failure. Does nothing while another thread
        reads, and after `end`."""
        if self._close is not None or not self._lock.acquire(blocking=False):
            return
        try:
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
                self.reading = replace(
                    self.reading, failure=Failure(asked, str(known)), asking_since=None
                )
        finally:
            self._lock.release()
            self.answered.set()
            self._close_ended()

    def end(self, close: Callable[[], None]) -> None:
        """Read no more; call `close` once no read is in progress."""
        self._close = close
        self._close_ended()

    def _close_ended(self) -> None:
        if self._close is not None and self._lock.acquire(blocking=False):
            self._close()
            self._lock.release()


@dataclass(frozen=True)
class FollowedStream(Generic[T]):
    """A stream with its reader. `job` is another object once the stream's file has changed."""

    job: Job | AnabranchError
    reader: BackgroundReader[T]

    def close(self) -> None:
        """Close the stream's connections, also while a read is in progress."""
        if isinstance(self.job, Job):
            self.job.kafka.close()


class FollowedStreams(Generic[T]):
    """The streams of a folder, each with a reader of its own; that of an invalid file raises the
    file's error. `opened` returns the function that reads a stream's job."""

    def __init__(
        self,
        folder: StreamFolder,
        what: str,
        opened: Callable[[Job], Callable[[], T]],
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        self.folder, self._what, self._opened, self._now = folder, what, opened, now
        self.current: Mapping[str, FollowedStream[T]] = {}

    def update(self, keep: bool = False) -> dict[str, FollowedStream[T]]:
        """Take the folder's current streams. A stream whose file changed gets a new reader, which
        with `keep` has the reading of the former one. Return the dropped streams, whose connections
        are closed once no read is in progress."""
        before, current = self.current, dict[str, FollowedStream[T]]()
        for name, job in self.folder.jobs().items():
            old = before.get(name)
            if old is None or old.job is not job:
                reader = BackgroundReader(f"{self._what} {name}", self._read_of(job), self._now)
                if old is not None and keep:
                    reader.reading = replace(old.reader.reading, asking_since=None)
                old = FollowedStream(job, reader)
            current[name] = old
        self.current = current
        dropped = {name: old for name, old in before.items() if current.get(name) is not old}
        for old in dropped.values():
            old.reader.end(old.close)
        return dropped

    def _read_of(self, job: Job | AnabranchError) -> Callable[[], T]:
        if isinstance(job, AnabranchError):
            return partial(_raise, job)
        return self._opened(job)


def _raise(error: AnabranchError) -> NoReturn:
    raise error


class Background(Generic[T]):
    """Periodic reading, with a thread for each reader. A reader that hangs does not block the
    others."""

    def __init__(self, every: timedelta) -> None:
        self._every = every
        self._stopped = threading.Event()
        self._dropped: dict[BackgroundReader[T], threading.Event] = {}

    def start(self, readers: Sequence[BackgroundReader[T]]) -> None:
        """Start the readers, their first reads spread over the period."""
        for number, reader in enumerate(readers if not self._stopped.is_set() else ()):
            delay = self._every.total_seconds() * number / len(readers) if number else 0
            self._dropped[reader] = threading.Event()
            threading.Thread(
                target=self._run, args=(reader, self._dropped[reader], delay), daemon=True
            ).start()

    def drop(self, reader: BackgroundReader[T]) -> None:
        """Stop a reader; a read in progress continues."""
        if (dropped := self._dropped.pop(reader, None)) is not None:
            dropped.set()

    def stop(self) -> None:
        self._stopped.set()
        for reader in list(self._dropped):
            self.drop(reader)

    def each(self, action: Callable[[], object]) -> None:
        """Run an action periodically, in its own thread, until `stop`."""

        def run() -> None:
            while not self._stopped.wait(self._every.total_seconds()):
                try:
                    action()
                except Exception as error:
                    LOG.warning(
                        "%s; trying again in %s",
                        classify_unexpected("follow the streams", error),
                        self._every,
                    )

        threading.Thread(target=run, daemon=True).start()

    def _run(self, reader: BackgroundReader[T], dropped: threading.Event, delay: float) -> None:
        pause = delay
        while not dropped.wait(pause):
            began = time.monotonic()
            reader.refresh()
            pause = rest_after(time.monotonic() - began, self._every)


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
        self._waiting: set[Key] = set()
        self._workers = ThreadPoolExecutor(2, thread_name_prefix="page")

    def get(self, key: Key, read: Callable[[], T], patience: timedelta) -> TimedValue[T]:
        """Return the reading of `key` after waiting at most `patience`; it has no value if none was
        read by then."""
        with self._lock:
            reader = self._readers.setdefault(key, BackgroundReader(str(key), read, self._now))
            self._readers.move_to_end(key)
            while len(self._readers) > self._most:
                self._readers.popitem(last=False)
            has_room = key not in self._waiting and len(self._waiting) < _WAITING
            begins = has_room and reader.reading.is_due(self._now(), self._fresh_for)
            if begins:
                self._waiting.add(key)
                reader.answered.clear()
        if begins:
            self._workers.submit(self._refresh, key, reader)
        if reader.reading.value is None or begins:
            reader.answered.wait(patience.total_seconds())
        return reader.reading

    def forget(self, stream: str) -> None:
        """Discard the stream's values: the next request reads them again."""
        with self._lock:
            for key in [key for key in self._readers if key[0] == stream]:
                del self._readers[key]

    def _refresh(self, key: Key, reader: BackgroundReader[T]) -> None:
        try:
            reader.refresh()
        finally:
            with self._lock:
                self._waiting.discard(key)

    def stop(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
