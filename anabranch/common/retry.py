"""Retry policy of both jobs for transient errors. Refused publishes
(`anabranch.protocol.publish.run`) and requests repeated within seconds
(`anabranch.common.attempts`) do not use it.

Pauses are capped exponential back-off with full jitter (random between zero and the cap, so that
jobs that failed together do not retry together). Each failure is one log line, and the
configuration limits the time. Unexplained errors are retried a few times only, whatever the
configuration says.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_any,
    stop_before_delay,
    stop_when_event_set,
)
from tenacity.nap import sleep_using_event
from tenacity.retry import retry_if_not_exception_type
from tenacity.stop import stop_never
from tenacity.wait import wait_random_exponential

from anabranch.common.counters import RETRIES, TALLY
from anabranch.common.errors import AnabranchError, NotYet, Transient, Unexpected, Unexplained
from anabranch.common.remote_errors import asked_service, explain

LOG = logging.getLogger(__name__)

FIRST_PAUSE = timedelta(seconds=1)
LONGEST_PAUSE = timedelta(seconds=30)
# The number of unexplained failures, without progress between them, that ends a job.
UNEXPLAINED_TRIES = 5

T = TypeVar("T")


@dataclass(frozen=True)
class Retry:
    """How long to retry (`limit`, None: for ever) and the event that ends a pause early (`stop`).

    `setting` is the configuration key that messages name. `pause` replaces the sleep of a pause: it
    returns after the given seconds or when `stop` is set.
    """

    limit: timedelta | None
    setting: str
    stop: threading.Event
    longest_pause: timedelta = LONGEST_PAUSE
    pause: Callable[[float, threading.Event], None] | None = None

    def call(
        self, what: str, action: Callable[[], T], progress: Callable[[], int] = lambda: 0
    ) -> T:
        """Return the result of `action`, retried after each Transient except NotYet; other errors
        of ours are raised at once. Errors of libraries are converted by
        `anabranch.common.remote_errors.explain`.

        If `progress` changed since the previous failure, pauses, limit and the count of unexplained
        failures restart. Raises the last Transient once `stop` is set, or when the next attempt
        would come after the limit; Unexpected after UNEXPLAINED_TRIES unexplained failures,
        whatever else failed between them.
        """
        seen, unexplained = progress(), 0

        def after(state: RetryCallState) -> None:
            nonlocal seen, unexplained
            if (now := progress()) != seen:
                seen, unexplained = now, 0
                assert state.outcome_timestamp is not None
                state.attempt_number, state.start_time = 1, state.outcome_timestamp
            unexplained += _is_unexplained(state)

        def too_often(state: RetryCallState) -> bool:
            return _is_unexplained(state) and unexplained >= UNEXPLAINED_TRIES

        def before_sleep(state: RetryCallState) -> None:
            assert state.outcome is not None
            pause = state.upcoming_sleep
            until = "no time limit"
            if self.limit is not None and state.outcome_timestamp is not None:
                left = self.limit.total_seconds() - (state.outcome_timestamp - state.start_time)
                until = f"until {datetime.now(UTC) + timedelta(seconds=left):%T} UTC"
            if _is_unexplained(state):
                until = f"unexplained {unexplained} of {UNEXPLAINED_TRIES}, {until}"
            error, number = state.outcome.exception(), state.attempt_number
            assert error is not None
            TALLY.count(RETRIES, asked_service(error))
            LOG.warning(
                "%s: try %d failed: %s; try %d in %.1f s (%s; %s)",
                what,
                number,
                error,
                number + 1,
                pause,
                until,
                self.setting,
            )

        ended = stop_any(
            stop_when_event_set(self.stop),
            stop_before_delay(self.limit) if self.limit is not None else stop_never,
        )
        policy = Retrying(
            retry=retry_if_exception_type(Transient) & retry_if_not_exception_type(NotYet),
            wait=wait_random_exponential(
                multiplier=FIRST_PAUSE.total_seconds(), max=self.longest_pause
            ),
            stop=lambda state: bool(ended(state)) or too_often(state),
            sleep=self._sleep,
            after=after,
            before_sleep=before_sleep,
            retry_error_callback=self._given_up(what),
        )
        result: T = policy(self._unless_stopped(what, action))
        return result

    def _sleep(self, seconds: float) -> None:
        if self.pause is None:
            sleep_using_event(self.stop)(seconds)
        else:
            self.pause(seconds, self.stop)

    def _unless_stopped(self, what: str, action: Callable[[], T]) -> Callable[[], T]:
        def tried() -> T:
            # No attempt follows a pause that `stop` ended.
            if self.stop.is_set():
                raise Transient(f"{what}: stop requested; nothing is lost, run it again")
            try:
                return action()
            except AnabranchError:
                raise
            except Exception as error:
                raise explain(what, error) from error

        return tried

    def _given_up(self, what: str) -> Callable[[RetryCallState], None]:
        def raise_last(state: RetryCallState) -> None:
            assert state.outcome is not None
            error = state.outcome.exception()
            assert isinstance(error, Transient)
            if self.stop.is_set():
                # Errors caused by the stop are of no importance: the next start goes on.
                if isinstance(error, Unexplained):
                    raise Transient(str(error)) from error
                raise error
            if isinstance(error, Unexplained):
                raise Unexpected(
                    f"{what}: given up after {state.attempt_number} tries, of unknown cause; "
                    f"published rows are not affected; the last error: {error}"
                ) from error
            raise Transient(
                f"{what}: given up after {state.attempt_number} tries within {self.limit} "
                f"({self.setting}): {error}"
            ) from error

        return raise_last


def _is_unexplained(state: RetryCallState) -> bool:
    return state.outcome is not None and isinstance(state.outcome.exception(), Unexplained)
