"""What can go wrong, by what the caller should do next.

Every error carries the exit code of the command that it ends: 1 refused, or a check failed, 2 wrong
usage or configuration, 70 unexpected (sysexits.h's EX_SOFTWARE), 75 transient (try again;
EX_TEMPFAIL).
"""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.common.redaction import redact

_FIRST = (70, 2, 1, 75)


def combined_exit_code(codes: Iterable[int]) -> int:
    """The exit code of a command over many streams: 0 when each is done, else the first of 70, 2, 1
    and 75 that one has. Pure."""
    found = set(codes) - {0}
    return next((code for code in _FIRST if code in found), max(found, default=0))


class AnabranchError(Exception):
    """The one base of every error of ours; the message says what was expected, found, and what to
    do next."""

    exit_code = 1

    def __str__(self) -> str:
        return redact(super().__str__())


class Terminal(AnabranchError):
    """Trying again changes nothing: an operator has to act first."""


class ConfigurationError(Terminal):
    """A file, key or argument is not what it has to be."""

    exit_code = 2


class CodecMissing(ConfigurationError):
    """Kafka's client cannot decompress a batch: the package of its codec is not installed."""


class MissingRight(ConfigurationError):
    """The brokers refused what the user may not do; `command` grants it."""

    def __init__(self, message: str, command: str = "") -> None:
        super().__init__(message)
        self.command = command


class NoTopicIds(ConfigurationError):
    """The brokers give topics no ids, so a recreated topic cannot be distinguished from the
    previous one."""


class MetadataGone(ConfigurationError):
    """The catalog names a metadata file that storage does not have."""


class Refused(Terminal):
    """A decision of the protocol: the request would break a guarantee of the table, so nothing was
    changed."""


class PositionError(Terminal):
    """Kafka and the table's position contradict each other (topic recreated, offsets lost)."""


class Unexpected(Terminal):
    """An unexpected error: by its type a retry does not help, or several attempts ended alike."""

    exit_code = 70


class JvmGone(Terminal):
    """Spark's JVM ended under the job: no other try of this process brings it back, another start
    does."""

    exit_code = 75


class Transient(AnabranchError):
    """A service did not answer, or another process was first: the same call may succeed later."""

    exit_code = 75


class ColumnsChanged(Transient):
    """The table took up columns of its subject meanwhile: the next try reads the records by the
    table's columns."""


class NoAnswer(Transient):
    """A service said nothing for as long as it was waited for: another way to ask it would wait as
    long again."""


class NotYet(Transient):
    """The condition holds only later, so an immediate retry does not help."""


class Unexplained(Transient):
    """An error whose type and words say nothing of whether it may pass: tried again a few times,
    never for ever.

    A job that has tried says so as Unexpected; of a command that tries once, the same may succeed
    later.
    """
