"""Errors, by what the caller should do next, and redaction of the secrets that this process knows,
in errors and logs of any library.

Each error has the exit code of the command that it ends: 1 refused or a failed check, 2 wrong usage
or configuration, 70 unexpected (EX_SOFTWARE of sysexits.h), 75 transient, try again (EX_TEMPFAIL).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from shlex import quote

_SHORTEST = 6
_KNOWN: set[str] = set()


def remember(secrets: Iterable[str]) -> None:
    """Redact these texts from now on, except short ones, which could match any message."""
    _KNOWN.update(secret for secret in secrets if len(secret) >= _SHORTEST)


def redact(text: str) -> str:
    """Replace known secrets in a text with `***`."""
    for secret in sorted(_KNOWN, key=len, reverse=True):
        text = text.replace(secret, "***")
    return text


_FIRST = (70, 2, 1, 75)


def combined_exit_code(codes: Iterable[int]) -> int:
    """Return the exit code of a command over many streams: 0 if all are 0, else the first of 70, 2,
    1 and 75 among them. Pure."""
    found = set(codes) - {0}
    return next((code for code in _FIRST if code in found), max(found, default=0))


class AnabranchError(Exception):
    """The base of this project's errors: expected and found, and what to do next."""

    exit_code = 1

    def __str__(self) -> str:
        return redact(super().__str__())


class Terminal(AnabranchError):
    """An error that a retry does not fix: an operator has to act first."""


class ConfigurationError(Terminal):
    """An invalid file, key or argument."""

    exit_code = 2


class CodecMissing(ConfigurationError):
    """Kafka's client cannot decompress a batch: the package of its codec is not installed."""


class MissingRight(ConfigurationError):
    """The brokers denied an operation to the user; `command` grants the right."""

    def __init__(self, message: str, command: str = "") -> None:
        super().__init__(message)
        self.command = command


class NotOffered(ConfigurationError):
    """The object store has no such operation: S3 Tables' buckets list and delete nothing."""


class NoTopicIds(ConfigurationError):
    """The brokers give topics no ids, so a recreated topic looks like the previous one."""


class MetadataGone(ConfigurationError):
    """The catalog names a metadata file that storage does not have; or, if `is_damaged`, one that
    cannot be read, perhaps of a later format."""

    def __init__(self, message: str, is_damaged: bool = False) -> None:
        super().__init__(message)
        self.is_damaged = is_damaged


class FileGone(ConfigurationError):
    """A table names a file that storage does not have, or not whole."""


class TableMissing(Terminal):
    """A stream's table does not exist: before `anabranch apply`."""


class Refused(Terminal):
    """A request would break a guarantee of the table and was refused; nothing was changed."""


class PositionError(Terminal):
    """Kafka and the table's position contradict each other (topic recreated, offsets lost)."""


class Unexpected(Terminal):
    """An unexpected error: by its type a retry does not help, or several attempts ended alike."""

    exit_code = 70


class JvmGone(Terminal):
    """Spark's JVM ended under the job: a restart of the process helps, a retry in it does not."""

    exit_code = 75


class Transient(AnabranchError):
    """A service did not answer, or another process was first: the same call may succeed later."""

    exit_code = 75


class ColumnsChanged(Transient):
    """The table took up columns of its subject: the next attempt reads the records with them."""


class NoAnswer(Transient):
    """A service did not answer within the time limit: another request would wait as long again."""


class NotYet(Transient):
    """A condition is not met yet, so an immediate retry does not help."""


class Unexplained(Transient):
    """An error whose type and text do not show whether it may pass: retried a few times only.

    A job then raises Unexpected. A command does not retry it, and the same command may succeed
    later.
    """


@contextmanager
def installed(doing: str, expected: str, package: str) -> Iterator[None]:
    """Raise ConfigurationError if a module that is imported within the block is not installed;
    `package` has it."""
    try:
        yield
    except ImportError as error:
        raise ConfigurationError(
            f"{doing}: expected {expected}, found no {error.name}; run `pip install "
            f"{quote(package)}`"
        ) from error
