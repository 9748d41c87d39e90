"""Take up a subject's changes while jobs run: the table gets the columns, and jobs read its columns
again."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from anabranch.common.deadline import Note, TimedRead, ask_all
from anabranch.common.errors import AnabranchError, ConfigurationError, NotYet, Refused, Transient
from anabranch.common.remote_errors import explain
from anabranch.config import Environment, Stream
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.schema_evolution import evolve
from anabranch.iceberg.table_schemas import rows_columns
from anabranch.kafka.schema_registry import SchemaRegistryClient, SubjectVersion, open_registry
from anabranch.subjects.resolve import plan_version, with_table_columns

LOG = logging.getLogger(__name__)

POLL_S = 10.0
"""How often subjects are read."""

TABLES_POLL_S = 60.0
"""How often tables are read by processes that only report."""

WAIT_S, _ROUND_S = 6.0, 30.0
_TABLE_S = 600.0
_AT_ONCE = 8

Read = Callable[[Stream, Lake], Stream]


@dataclass(frozen=True)
class _TakenUp:
    """What a stream has of a version of its subject: by which file, its columns, and when its table
    was read."""

    file: Stream
    version: SubjectVersion | None
    found: Stream
    at: float


class SubjectReader:
    """Has tables take up the latest versions of their subjects. Reads a table where its subject has
    another version than the last time, and every ten minutes, since an idle stream is to cost no
    requests to the store."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._registry: SchemaRegistryClient | None = None
        self._taken_up: dict[str, _TakenUp] = {}
        self._logged: dict[str, str] = {}

    def read(self, stream: Stream, lake: Lake) -> Stream:
        """Change a stream's table by the latest version of its subject, and return the stream with
        the table's columns.

        A version that cannot be taken up, and a registry that does not answer or refuses, change
        nothing: the error is logged once, and the columns are those that the table has. A stream
        whose file has columns stays as it is. One without a table gets the columns that `apply`
        would give it. Raises ConfigurationError for columns that contradict the file, Transient; of
        a stream without a table also what `plan_version` raises.
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
        """The stream with the columns that it has. Raises the error where it has none."""
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
    """As `SubjectReader.read`, once."""
    return SubjectReader(environment).read(stream, lake)


@dataclass(frozen=True)
class _Known:
    """A stream as it was read: by which file, and its columns or why there are none."""

    file: Stream
    found: Stream | AnabranchError


class ColumnsFollower:
    """The columns of streams with `schema: registry`, as `read` finds them by now, every `every`
    seconds (`POLL_S` without it).

    Calls do not wait for the registry or the catalog, but for the first one: `WAIT_S` at most. A
    stream whose columns were read keeps them while they cannot be read again.
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
        """By name: each stream with its columns, or why they are unknown."""
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
        """Keep what is found at once: another stream may hang."""
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
