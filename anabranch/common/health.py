"""The health file of a speed job: the job writes it, `anabranch health` reads it.

The job notes each publish, and each trigger that found nothing to read, so an idle topic is
healthy. A process of many streams stays healthy while one of them is set aside; the file names that
stream. A clean stop deletes the file: a start that finds one counts as a restart. While the job
runs, it holds a lock on `FILE.lock`, which the kernel releases when the process ends.

Times are of the machine's clock. A clock that is set forward makes the job unhealthy until its next
trigger.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType

from anabranch.common.errors import ConfigurationError
from anabranch.common.json_values import parse
from anabranch.common.temporary import locked

LOG = logging.getLogger(__name__)

# A job is unhealthy without progress for PATIENCE and two triggers, or after MOST_RESTARTS restarts
# within RESTART_WINDOW.
PATIENCE = timedelta(minutes=5)
MOST_RESTARTS = 2
RESTART_WINDOW = timedelta(minutes=15)
_LOCK_SECONDS = 10.0
_WRITE_EVERY = 1.0


@dataclass(frozen=True)
class HealthRecord:
    """The file's content; times are seconds since 1970. `progress` is None until this process has
    published, or found nothing to read."""

    started: float
    trigger: float
    progress: float | None = None
    restarts: tuple[float, ...] = ()
    set_aside: Mapping[str, str] = field(default_factory=dict)
    """The errors that an operator has to correct, by stream of a process of many."""


NoteProgress = Callable[..., None]
"""`Health.note_progress`, or a function that does nothing if no health file was requested."""


def find_fault(
    record: HealthRecord | None,
    is_running: bool,
    now: float,
    within: float | None = None,
    ignore_restarts: bool = False,
) -> str | None:
    """Return why the job is unhealthy, None for a healthy one. `within` is the limit without
    progress in seconds, by default PATIENCE and two triggers. Pure."""
    if record is None:
        return "expected a health file, found none: the job has not started, or was stopped"
    if not is_running:
        return "expected a running job, found that its process has ended"
    if record.progress is None:
        return (
            f"expected a trigger that ended, found none in {now - record.started:.0f} s since the "
            "start"
        )
    limit = PATIENCE.total_seconds() + 2 * record.trigger if within is None else within
    if (quiet := now - record.progress) > limit:
        return (
            f"expected a publish or an idle trigger within {limit:.0f} s, found none for "
            f"{quiet:.0f} s"
        )
    recent = _recent(record.restarts, now)
    if len(recent) >= MOST_RESTARTS and not ignore_restarts:
        minutes = RESTART_WINDOW.total_seconds() / 60
        return (
            f"expected fewer than {MOST_RESTARTS} restarts within {minutes:.0f} minutes, found "
            f"{len(recent)}"
        )
    return None


def record_start(previous: HealthRecord | None, trigger: float, now: float) -> HealthRecord:
    """Return the record of a starting process. `previous`: of one that stopped uncleanly. Pure."""
    if previous is None:
        return HealthRecord(now, trigger)
    return HealthRecord(now, trigger, None, (*_recent(previous.restarts, now), now))


def _recent(restarts: tuple[float, ...], now: float) -> tuple[float, ...]:
    return tuple(at for at in restarts if now - at <= RESTART_WINDOW.total_seconds())


def read_record(file: Path) -> HealthRecord | None:
    """Read the health file; None if there is none. Raises ConfigurationError for another file."""
    try:
        return parse(HealthRecord, file.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"{file}: expected the health file of a speed job (anabranch speed --health FILE), "
            f"found: {str(error)[:300]}"
        ) from error


def is_running(file: Path) -> bool:
    """Return whether a process has the file's lock."""
    try:
        with _lock_of(file).open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


class Health:
    """The writer of this process's health file, at most once a second."""

    def __init__(self, file: Path, record: HealthRecord, clock: Callable[[], float]) -> None:
        self._file, self._record, self._clock = file, record, clock
        self._can_write = True
        self._write()

    def note_progress(self, set_aside: Mapping[str, str] = MappingProxyType({})) -> None:
        """Note that something was published or that a trigger found nothing to read. `set_aside` is
        that of HealthRecord."""
        now = self._clock()
        last = self._record.progress
        if (
            last is None
            or not 0 <= now - last < _WRITE_EVERY
            or self._record.set_aside != set_aside
        ):
            self._record = replace(self._record, progress=now, set_aside=dict(set_aside))
            self._write()

    def _write(self) -> None:
        part = self._file.with_name(f"{self._file.name}.part")
        try:
            part.write_text(json.dumps(asdict(self._record)), encoding="utf-8")
            part.replace(self._file)
            self._can_write = True
        except OSError as error:
            # The job goes on: rows matter more, and `anabranch health` finds the old record.
            if self._can_write:
                LOG.warning("health file %s: cannot be written: %s", self._file, error)
            self._can_write = False


@contextmanager
def health_file(
    file: Path | None, trigger: timedelta, clock: Callable[[], float] = time.time
) -> Iterator[NoteProgress]:
    """Yield a function that notes the job's progress in `file`; without a file it does nothing.

    The file is deleted when the job ends without an exception, so the next start is no restart.
    Raises ConfigurationError if the folder is not writable, and Transient if another job has the
    file's lock.
    """
    if file is None:
        yield lambda *_: None
        return
    if not os.access(file.parent, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"--health {file}: expected a folder that this user may write, found {file.parent}"
        )
    with locked(_lock_of(file), _LOCK_SECONDS):
        health = Health(
            file, record_start(read_record(file), trigger.total_seconds(), clock()), clock
        )
        yield health.note_progress
        file.unlink(missing_ok=True)


def _lock_of(file: Path) -> Path:
    return file.with_name(f"{file.name}.lock")
