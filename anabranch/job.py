"""The start and end of every job: arguments, connections, logging, and the exit code."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from anabranch import config, family_streams
from anabranch.common.errors import AnabranchError, ConfigurationError
from anabranch.common.logs import configure_logging
from anabranch.common.remote_errors import classify_unexpected
from anabranch.config import FamilyMember, Members, Stream
from anabranch.family_streams import FamilyStreams
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.owner import open_lake
from anabranch.kafka.client import KafkaAdapter
from anabranch.protocol.ledger import Ledger
from anabranch.subjects.follow import (
    TABLES_POLL_S,
    ColumnsFollower,
    SubjectReader,
    with_table_columns,
)

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A job's stream and its connections, which are opened at first use. `creates_tables`: the
    speed layer creates the stream's tables, as its family requests."""

    environment: config.Environment
    stream: config.Stream
    lake: Lake
    kafka: KafkaAdapter
    creates_tables: bool = False

    @classmethod
    def connect(
        cls,
        environment: config.Environment,
        stream: config.Stream,
        *,
        catalog: Lake | None = None,
        kafka: KafkaAdapter | None = None,
    ) -> Job:
        """Return the job of a stream, with its own connections or the given ones. A stream whose
        file has no columns gets those of its table. Raises ConfigurationError, and Transient for a
        stream whose columns are in its table."""
        lake = open_lake(environment, stream, shared=catalog)
        return cls(
            environment,
            with_table_columns(stream, lake),
            lake,
            kafka or KafkaAdapter(environment.kafka),
        )

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.lake, self.stream.hours_table)


def groups_of(groups: Mapping[str, str | None]) -> dict[str, list[str]]:
    """Return the names of each group's streams, sorted by group, from each stream's group. A stream
    whose group cannot be read counts for every group. Pure."""
    named = sorted({group for group in groups.values() if group not in (None, config.UNREADABLE)})
    return {
        group: [
            name for name, own_group in groups.items() if own_group in (group, config.UNREADABLE)
        ]
        for group in named
    }


def open_job(stream: str, conf: str | None) -> Job:
    """Read the configuration and prepare the connections. Raises ConfigurationError, Transient."""
    environment = config.load_environment(conf)
    return Job.connect(environment, family_streams.load_stream(environment, stream, conf))


def open_jobs(
    conf: str | None, names: Sequence[str] | None, group: str | None, every: bool
) -> tuple[config.Environment, list[Job], dict[str, AnabranchError]]:
    """Return the environment, the jobs of the selected streams, which share one client of the
    catalog, and errors by stream: of its file, or why its columns are unknown. Families contribute
    only streams with tables. Raises ConfigurationError like `config.select_streams`, and with
    families Terminal and Transient."""
    environment = config.load_environment(conf)
    members = partial(family_streams.members_with_tables, environment, conf)
    selected = config.select_streams(conf, names or (), group, every, members)
    shared = Lake(environment)
    jobs, failed = [], dict[str, AnabranchError](config.broken(selected))
    for stream in config.loaded(selected):
        try:
            jobs.append(Job.connect(environment, stream, catalog=shared))
        except AnabranchError as error:
            failed[stream.name] = error
    return environment, jobs, failed


class FollowedJob:
    """A stream's job, whose columns follow its subject in the registry (`schema: registry`)."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._columns = ColumnsFollower(SubjectReader(job.environment).read)

    def current(self) -> Job:
        """Return the job with its table's current columns: the same object until they change. The
        first call waits for the registry and the catalog."""
        name, file = self._job.stream.name, self._job.stream.without_columns()
        found = self._columns.follow({name: (file, self._job.lake)})[name]
        if isinstance(found, Stream) and found.columns != self._job.stream.columns:
            self._job = replace(self._job, stream=found)
        return self._job


class StreamFolder:
    """The jobs of a configuration folder's streams, of the named streams, or of a group, by the
    current files and, for families, the current topics.

    Streams with `schema: registry` have the columns of their tables, which with `takes_up` follow
    their subjects. The environment is read once, at the start, and all jobs share one client of its
    catalog. If two files name the same table, the running stream, else the first one by name, keeps
    it, and the other has the error. Raises ConfigurationError for a group without streams, only at
    the start. A file that is wrong, and a family's topic that cannot be a stream, is logged.
    """

    def __init__(
        self,
        conf: str | None,
        names: Sequence[str] = (),
        group: str | None = None,
        takes_up: bool = False,
    ) -> None:
        self._conf, self._named, self._group = conf, tuple(names), group
        self._environment = config.load_environment(conf)
        self._catalog = Lake(self._environment)
        self._families = FamilyStreams(self._environment, conf)
        self._columns = (
            ColumnsFollower(SubjectReader(self._environment).read)
            if takes_up
            else ColumnsFollower(with_table_columns, TABLES_POLL_S)
        )
        self._read: dict[str, tuple[object, Stream | ConfigurationError, Lake | None]] = {}
        self._jobs: dict[str, Job] = {}
        self.groups: dict[str, str | None] = {}
        """The group of each stream at the last `jobs` call, also of streams whose file is wrong;
        UNREADABLE if the file cannot be read and never could."""
        self.families: dict[str, str] = {}
        """The family of each of its streams at the last `jobs` call."""
        self._seen: set[str] = set()
        self._shared: dict[str, ConfigurationError] = {}
        if group is not None:
            config.select_streams(conf, group=group)
        self.jobs()

    @property
    def environment(self) -> config.Environment:
        return self._environment

    def jobs(self) -> dict[str, Job | AnabranchError]:
        """Return each stream's job, the same object until its file or columns change, or an error:
        of the file, or why its columns are unknown. Omits streams whose file has been deleted, or
        that no longer belong to a family."""
        has_own_files = bool(self._named) and {*self._named} <= {*config.stream_names(self._conf)}
        members = {} if has_own_files else self._families.members()
        names = (
            [name for name in self._named if not self._is_gone(name, members)]
            if self._named
            else (*config.stream_names(self._conf), *members)
        )
        self._read = {name: self._current(name, members.get(name)) for name in names}
        self._shared = self._find_shared(members)
        files = {
            n: (s, lake)
            for n, (_, s, lake) in self._read.items()
            if isinstance(s, Stream) and lake is not None
        }
        streams = {**self._columns.follow(files), **self._shared}
        found: dict[str, Job | AnabranchError] = {}
        for name, (_, own, lake) in self._read.items():
            one = streams.get(name, own)
            if isinstance(one, Stream):
                assert lake is not None
                found[name] = self._job(one, lake, name in members and members[name].creates)
            else:
                found[name] = one
        self._jobs = {name: job for name, job in found.items() if isinstance(job, Job)}
        self._seen |= self._jobs.keys()
        if not self._named:
            found |= self._families.broken
        self.families = {name: member.family for name, member in members.items()}
        self.groups = {
            name: self._group_of(name, one, members.get(name)) for name, one in found.items()
        }
        if self._group is None:
            return found
        return {
            name: one
            for name, one in found.items()
            if self.groups[name] in (self._group, config.UNREADABLE)
        }

    def _is_gone(self, name: str, members: Members) -> bool:
        """Return True if a named stream that existed exists no longer. While Kafka or the catalog
        does not answer, a family may still have it."""
        has_file = config.stream_file_stamp(name, self._conf) is not None
        return (
            name in self._seen
            and not has_file
            and name not in members
            and not self._families.unanswered
        )

    def _find_shared(self, members: Members) -> dict[str, ConfigurationError]:
        """Return an error for each stream whose file names another stream's table."""
        own = [
            s
            for name, (_, s, _) in self._read.items()
            if name not in members and isinstance(s, Stream)
        ]
        shared = config.shared_tables(
            sorted(own, key=lambda s: s.name not in self._jobs), self._conf
        )
        for name in shared.keys() - self._shared.keys():
            LOG.warning("stream %s: file ignored: %s", name, shared[name])
        return shared

    def _job(self, stream: Stream, lake: Lake, creates: bool) -> Job:
        known = self._jobs.get(stream.name)
        if known is not None and (known.stream, known.lake, known.creates_tables) == (
            stream,
            lake,
            creates,
        ):
            return known
        return Job(self._environment, stream, lake, KafkaAdapter(self._environment.kafka), creates)

    def _group_of(
        self, name: str, found: Job | AnabranchError, member: FamilyMember | None
    ) -> str | None:
        """Return a stream's group: of its file, else its previous one, or UNREADABLE."""
        if isinstance(found, Job):
            return found.stream.group
        group = member.group if member is not None else config.group_in_file(name, self._conf)
        return self.groups.get(name, group) if group == config.UNREADABLE else group

    def _current(
        self, name: str, member: FamilyMember | None
    ) -> tuple[object, Stream | ConfigurationError, Lake | None]:
        """Return a stamp of the stream's file, its stream or error, and its catalog."""
        known = self._read.get(name)
        stamp = (
            config.stream_file_stamp(name, self._conf)
            if member is None
            else (member.found, member.creates)
        )
        is_known = known is not None and known[0] == stamp
        if known is not None and is_known and isinstance(known[1], Stream):
            return known
        try:
            stream = config.load_stream(name, self._conf) if member is None else _stream_of(member)
        except ConfigurationError as error:
            # Read again each time: what the file lacks may be in another file, which has no stamp.
            if known is not None and is_known and str(known[1]) == str(error):
                return known
            LOG.warning("stream %s: file ignored: %s", name, error)
            return stamp, error, None
        LOG.info("stream %s: file loaded", name)
        return stamp, stream, open_lake(self._environment, stream, shared=self._catalog)


def _stream_of(member: FamilyMember) -> config.Stream:
    if isinstance(member.found, ConfigurationError):
        raise member.found
    return member.found


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that both spark-submit entries share; `stream` is a list."""
    arguments = argparse.ArgumentParser(description=description)
    chosen = arguments.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--stream", action="append", help="a stream's name, once for each stream")
    chosen.add_argument("--group", help="every stream whose file has `group: NAME`")
    chosen.add_argument(
        "--all", action="store_true", help="every stream of the configuration folder"
    )
    arguments.add_argument(
        "--conf", default=None, help="the configuration folder (default: ANABRANCH_CONF, else conf)"
    )
    arguments.add_argument(
        "--output", choices=("text", "json"), default="text", help="how to print and log"
    )
    return arguments


def main(run: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> None:
    """Run a job and end the process with its exit code. Log an error of ours as one line, without a
    traceback.

    Other errors are classified as everywhere, and unexpected ones are logged with their traceback.
    They never end the process with exit code 1, which means *refused*.
    """
    configure_logging(as_json="json" in arguments)
    try:
        code = run(arguments)
    except AnabranchError as error:
        LOG.error("%s", error)
        code = error.exit_code
    except Exception as error:
        explained = classify_unexpected("run the job", error)
        LOG.error("%s", explained, exc_info=not isinstance(explained, ConfigurationError))
        code = explained.exit_code
    sys.stdout.flush()
    sys.exit(code)
