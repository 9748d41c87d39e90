"""The columns of streams with `schema: registry`, read from their tables and from the schema
registry. Changes of subjects are taken up while jobs run: the table gets the columns, and jobs read
its columns again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from pyiceberg.schema import Schema
from pyiceberg.table import Table

from anabranch.common.deadline import Note, TimedRead, ask_all
from anabranch.common.errors import AnabranchError, ConfigurationError, NotYet, Refused, Transient
from anabranch.common.remote_errors import explain
from anabranch.config import Environment, Stream
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.register import register
from anabranch.iceberg.schema_evolution import evolve, plan_evolution
from anabranch.iceberg.table_schemas import rows_columns
from anabranch.kafka.schema_registry import SchemaRegistryClient, SubjectVersion, open_registry
from anabranch.subjects.plan import plan_columns, table_columns
from anabranch.subjects.schemas import read_descriptors


@dataclass(frozen=True)
class Planned:
    """A stream with the columns that `apply` gives its table, and descriptions of the changes."""

    stream: Stream
    changes: tuple[str, ...] = ()


def with_table_columns(stream: Stream, lake: Lake) -> Stream:
    """Return the stream with the columns of its table. A stream with columns in its file is
    returned unchanged; one without a table still lacks columns. Raises ConfigurationError for
    columns that contradict the file, Transient."""
    if not stream.lacks_columns or not lake.exists(stream.table):
        return stream
    return with_columns_of(stream, lake.load(stream.table))


def with_columns_of(stream: Stream, table: Table) -> Stream:
    """Return a stream with `schema: registry` with the columns of this state of its table; any
    other stream unchanged. Raises ConfigurationError for columns that contradict the file."""
    if stream.subject_schema is None:
        return stream
    return stream.with_columns(table_columns(table.schema()))


def register_table(stream: Stream, lake: Lake) -> list[str]:
    """Register the table of a stream with `schema: registry` if storage has it and the catalog has
    lost it, so that a version of its subject is planned over its columns. Return descriptions of
    the changes; none for any other stream.

    Raises ConfigurationError if no metadata file is usable, Transient.
    """
    if not stream.lacks_columns:
        return []
    return register(lake, stream.table, rows_columns(stream).schema)


def plan_table(environment: Environment, stream: Stream, lake: Lake) -> Planned:
    """Plan a subject's latest version as `plan_version`; a stream with columns in its file is
    unchanged. Raises ConfigurationError for a descriptor file that cannot read it."""
    if stream.format.descriptor is not None:
        read_descriptors(stream)
    if stream.subject_schema is None:
        return Planned(stream)
    return plan_version(stream, open_registry(environment, stream).latest(stream.subject), lake)


def plan_version(stream: Stream, version: SubjectVersion | None, lake: Lake) -> Planned:
    """Plan the columns of a stream's table for a version of its subject. Changes nothing.

    Without a version a table keeps its columns. Raises Refused, with the field, for a version that
    the table cannot take up; NotYet for a new table without a subject; ConfigurationError,
    Transient.
    """
    have = lake.load(stream.table).schema() if lake.exists(stream.table) else None
    if version is None:
        if have is None:
            raise NotYet(
                f"stream {stream.name}: expected subject {stream.subject} in the schema registry, "
                "found none; register its schema, or name the subject: `format: {type: ..., "
                "subject: ...}`"
            )
        return Planned(stream.with_columns(table_columns(have)))
    planned = stream.with_columns(plan_columns(stream, version, have))
    return Planned(
        planned, _changes(planned, have, f"subject {version.subject} version {version.version}")
    )


def _changes(stream: Stream, have: Schema | None, source: str) -> tuple[str, ...]:
    if have is None:
        return (f"{source}: new table {stream.table} with {stream.ddl}",)
    changes = plan_evolution(stream.table, have, rows_columns(stream))
    return tuple(f"{source}: {change.plan_words(stream.table)}" for change in changes)


LOG = logging.getLogger(__name__)

POLL_S = 10.0
"""Seconds between readings of subjects."""

TABLES_POLL_S = 60.0
"""Seconds between readings of tables, in processes that only report."""

WAIT_S, _ROUND_S = 6.0, 30.0
_TABLE_S = 600.0
_AT_ONCE = 8

Read = Callable[[Stream, Lake], Stream]


@dataclass(frozen=True)
class _TakenUp:
    """A stream's columns: of which file and version of its subject, and read when."""

    file: Stream
    version: SubjectVersion | None
    found: Stream
    at: float


class SubjectReader:
    """Makes tables take up their subjects' latest versions. Reads a table if its subject's version
    changed, and every ten minutes: an idle stream costs the store no requests."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._registry: SchemaRegistryClient | None = None
        self._taken_up: dict[str, _TakenUp] = {}
        self._logged: dict[str, str] = {}

    def read(self, stream: Stream, lake: Lake) -> Stream:
        """Change a stream's table by the latest version of its subject, and return the stream with
        the table's columns.

        If the version cannot be taken up, or the registry does not answer or refuses, the table
        keeps its columns, and the error is logged once. A stream with columns in its file is
        returned unchanged. A stream without a table gets the columns that `apply` would give it.
        Raises ConfigurationError for columns that contradict the file, Transient, and for a stream
        without a table the errors of `plan_version`.
        """
        if stream.subject_schema is None:
            return stream
        known = self._taken_up.get(stream.name)
        known = known if known is not None and known.file == stream else None
        try:
            version = self._latest(stream)
            if (
                known is not None
                and known.version == version
                and time.monotonic() - known.at < _TABLE_S
            ):
                return known.found
            planned = plan_version(stream, version, lake)
        except (Refused, Transient, ConfigurationError) as error:
            found = known.found if known is not None and isinstance(error, Transient) else None
            return self._continue(stream, lake, error, found)
        self._logged.pop(stream.name, None)
        if not lake.exists(stream.table):
            return planned.stream
        if planned.changes:
            for change in evolve(lake, stream.table, rows_columns(planned.stream)):
                LOG.info("stream %s: %s", stream.name, change)
        return self._keep(
            stream, version, with_table_columns(stream, lake) if planned.changes else planned.stream
        )

    def _latest(self, stream: Stream) -> SubjectVersion | None:
        self._registry = self._registry or open_registry(self._environment, stream)
        return self._registry.latest(stream.subject)

    def _continue(
        self, stream: Stream, lake: Lake, error: AnabranchError, found: Stream | None
    ) -> Stream:
        """Return the stream with the columns that it has. Raises the error if it has none."""
        found = found or with_table_columns(stream, lake)
        if found.lacks_columns:
            raise error
        if self._logged.get(stream.name) != str(error):
            self._logged[stream.name] = str(error)
            LOG.warning(
                "stream %s: subject not taken up, continuing with the table's columns: %s",
                stream.name,
                error,
            )
        return found

    def _keep(self, stream: Stream, version: SubjectVersion | None, found: Stream) -> Stream:
        self._taken_up[stream.name] = _TakenUp(stream, version, found, time.monotonic())
        return found


def take_up(environment: Environment, stream: Stream, lake: Lake) -> Stream:
    """Read once as `SubjectReader.read`."""
    return SubjectReader(environment).read(stream, lake)


@dataclass(frozen=True)
class _Known:
    """The result of reading a stream: by which file, and its columns or why there are none."""

    file: Stream
    found: Stream | AnabranchError


class ColumnsFollower:
    """The columns of streams with `schema: registry`, read by `read` every `every` seconds, by
    default `POLL_S`.

    Only the first call waits for the registry or the catalog, at most `WAIT_S`. A stream keeps
    columns that were read while they cannot be read again.
    """

    def __init__(self, read: Read, every: float | None = None) -> None:
        self._read, self._every = read, POLL_S if every is None else every
        self._lock = threading.Lock()
        self._known: dict[str, _Known] = {}
        self._reading: TimedRead[bool] | None = None
        self._began = float("-inf")

    def follow(
        self, streams: Mapping[str, tuple[Stream, Lake]]
    ) -> dict[str, Stream | AnabranchError]:
        """Return each stream with its columns, or why they are unknown, by name."""
        with self._lock:
            wanted = {name: one for name, one in streams.items() if one[0].lacks_columns}
            is_first, is_new = (
                self._began == float("-inf"),
                any(map(self._is_new, (s for s, _ in wanted.values()))),
            )
            is_due = is_new or time.monotonic() - self._began >= self._every
            if wanted and is_due and (self._reading is None or self._reading.has_ended):
                self._began = time.monotonic()
                self._reading = TimedRead(
                    "the columns of subjects", partial(self._read_all, wanted), WAIT_S, "read"
                )
                if is_first:
                    self._reading.wait()
            return {name: self._found(stream) for name, (stream, _) in streams.items()}

    def _is_new(self, stream: Stream) -> bool:
        known = self._known.get(stream.name)
        return known is None or known.file != stream

    def _found(self, stream: Stream) -> Stream | AnabranchError:
        if not stream.lacks_columns:
            return stream
        known = self._known.get(stream.name)
        if known is None or (known.file != stream and isinstance(known.found, AnabranchError)):
            return NotYet(
                f"stream {stream.name}: expected its columns, found that its table is still being "
                "read; try again in a few seconds"
            )
        return known.found

    def _read_all(self, wanted: Mapping[str, tuple[Stream, Lake]]) -> bool:
        asks = {
            name: partial(self._read_one, stream, lake) for name, (stream, lake) in wanted.items()
        }
        for name, answer in ask_all(asks, _ROUND_S, _AT_ONCE, "read the columns of stream").items():
            if isinstance(answer, AnabranchError):
                self._keep(wanted[name][0], answer)
        return True

    def _read_one(self, stream: Stream, lake: Lake, note: Note) -> bool:
        """Read a stream's columns and keep the result at once: another stream may hang."""
        note("the catalog or the schema registry")
        try:
            self._keep(stream, self._read(stream, lake))
        except Exception as error:
            self._keep(stream, explain(f"read the columns of stream {stream.name}", error))
        return True

    def _keep(self, stream: Stream, found: Stream | AnabranchError) -> None:
        known = self._known.get(stream.name)
        is_known = known is not None and isinstance(known.found, Stream)
        if (
            isinstance(found, AnabranchError)
            and is_known
            and (isinstance(found, Transient) or not self._is_new(stream))
        ):
            LOG.warning(
                "stream %s: columns not read, continuing with those known: %s", stream.name, found
            )
            return
        self._known[stream.name] = _Known(stream, found)
