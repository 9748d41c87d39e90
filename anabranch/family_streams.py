"""The streams of families: one for each matching topic in Kafka, and for each member's table in the
catalog.

A member whose topic is gone stays a stream: its table names the stream and the topic
(`anabranch.stream`). So do all members while Kafka does not answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from anabranch import config
from anabranch.common.deadline import TimedRead
from anabranch.common.errors import AnabranchError, ConfigurationError, Terminal, Unexplained
from anabranch.config import Environment, Family, FamilyMember, Members, Selected, Stream
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.owner import read_owner
from anabranch.kafka.client import KafkaAdapter

LOG = logging.getLogger(__name__)

POLL_S = 10.0
"""Interval at which the topics are listed, in seconds."""

KAFKA_S, WAIT_S = 3.0, 6.0
"""Maximum time that a caller waits for Kafka, and for Kafka and the catalog together, in
seconds."""


class FamilyStreams:
    """The streams of a configuration folder's families, by the current files and topics.

    A new topic becomes a member within `POLL_S`. A member stays while its family's file matches its
    topic. If Kafka or the catalog does not answer, nothing changes: the error is logged and is in
    `unanswered`. If a family's file is wrong or empty for the moment, its members are those of the
    previous file.
    """

    def __init__(
        self, environment: Environment, conf: str | Path | None = None, every: float = POLL_S
    ) -> None:
        self._conf, self._every = conf, every
        self._kafka, self._lake = KafkaAdapter(environment.kafka), Lake(environment)
        self._lock = threading.Lock()
        self._began = float("-inf")
        self._reading: TimedRead[bool] | None = None
        self._listing: TimedRead[frozenset[str]] | None = None
        self._topics: frozenset[str] | None = None
        self._known: dict[str, str] = {}
        self._read_at: object = None
        self._families: dict[str, Family] = {}
        self._members: Members = {}
        self.unanswered: list[AnabranchError] = []
        self.broken: Mapping[str, ConfigurationError] = {}
        """The error of a family's file, by family."""

    def members(self) -> Members:
        """Return the members by name. The first call waits for Kafka and the catalog, `WAIT_S` at
        most. Later calls never wait; they start another read once `every` seconds have passed."""
        with self._lock:
            names = config.family_names(self._conf)
            if not (names or self._emptied(names)):
                self.broken, self.unanswered = {}, []
                self._members, self._read_at = {}, None
                return self._members
            is_first = self._began == float("-inf")
            if self._reading is not None and self._reading.has_ended:
                self._end(self._reading)
            if self._reading is None and time.monotonic() - self._began >= self._every:
                self._began = time.monotonic()
                self._reading = TimedRead("the streams of families", self._read, WAIT_S, "list")
            if is_first and self._reading is not None:
                self._end(self._reading)
            return self._members

    def select(
        self, names: Collection[str] = (), group: str | None = None, every: bool = False
    ) -> Selected:
        """Return the selected streams, including those of families; see `config.select_streams`."""
        return config.select_streams(self._conf, names, group, every, self.members)

    @property
    def read_members(self) -> Members:
        """The members read by the last call; empty before the first."""
        return self._members

    def close(self) -> None:
        """Close the connection to Kafka."""
        self._kafka.close()

    def _end(self, reading: TimedRead[bool]) -> None:
        facts = reading.facts()
        if isinstance(facts, AnabranchError):
            self.unanswered = [facts]
            LOG.warning("families: topics or tables not read error=%s", facts)
        if reading.has_ended:
            self._reading = None

    def _read(self) -> bool:
        unanswered = []
        topics = self._list_topics()
        if isinstance(topics, AnabranchError):
            unanswered.append(topics)
        else:
            self._topics = topics
        own = config.stream_names(self._conf)
        names = sorted({*config.family_names(self._conf), *self._families})
        stamps = [config.stream_file_stamp(name, self._conf) for name in (*names, *own)]
        read_at = (names, own, stamps, self._topics)
        if not unanswered and read_at == self._read_at:
            return True
        read = config.load_families(self._conf)
        read |= self._emptied(read)
        self.broken = {
            n: error for n, error in read.items() if isinstance(error, ConfigurationError)
        }
        kept = {name: family for name, family in self._families.items() if name in self.broken}
        self._families = kept | {
            name: family for name, family in read.items() if isinstance(family, Family)
        }
        families = [self._families[name] for name in read if name in self._families]
        streams = config.loaded(config.select_streams(self._conf, own)) if own else []
        found = config.expand(families, self._topics or (), streams, self._known)
        unread: Members = {}
        try:
            tables = {table for stream in (*streams, *_streams(found)) for table in stream.tables}
            known, unread = read_known(self._lake, families, tables)
            self._known = known | self._known
        except AnabranchError as error:
            unanswered.append(error)
        members = config.expand(families, self._topics or (), streams, self._known)
        if self._topics is None:
            # It is unknown whether a topic is gone.
            members = {name: replace(member, is_gone=False) for name, member in members.items()}
        members = {**members, **unread}
        self._report(members, unanswered)
        self._known |= {stream.name: stream.topic for stream in _streams(members)}
        self._members, self.unanswered = members, unanswered
        self._read_at = None if unanswered or unread else read_at
        return True

    def _emptied(self, found: Collection[str]) -> dict[str, ConfigurationError]:
        """Return the errors, by family, of files that are now neither a stream's nor among the
        families that were `found`. Only one look at the folder decides: an editor empties a file
        and writes it, and by two looks its family would have no file."""
        errors = {}
        for name in self._families.keys() - set(found):
            if config.stream_file_stamp(name, self._conf) is None:
                continue
            try:
                config.load_stream(name, self._conf)
            except ConfigurationError as error:
                errors[name] = error
        return errors

    def _list_topics(self) -> frozenset[str] | AnabranchError:
        """Return the cluster's topics. While a call hangs, the next does not start a second one."""
        if self._listing is None:
            self._listing = TimedRead(
                "the topics of families", self._kafka.topic_names, KAFKA_S, "list"
            )
        topics = self._listing.facts()
        if self._listing.has_ended:
            self._listing = None
        return topics

    def _report(self, members: Members, unanswered: Iterable[AnabranchError]) -> None:
        for error in unanswered:
            LOG.warning("families: topics or tables not read error=%s", error)
        for name, member in members.items():
            before = self._members.get(name)
            if before == member or (before is not None and str(before.found) == str(member.found)):
                continue
            family, topic = member.family, member.topic
            if isinstance(member.found, ConfigurationError):
                LOG.warning(
                    "family %s: topic cannot be a stream topic=%s error=%s",
                    family,
                    topic,
                    member.found,
                )
            elif member.is_gone:
                LOG.warning(
                    "family %s: topic is gone, its stream and tables stay topic=%s stream=%s",
                    family,
                    topic,
                    name,
                )
            elif name not in self._known:
                LOG.info(
                    "family %s: new stream topic=%s stream=%s table=%s",
                    family,
                    topic,
                    name,
                    member.found.table,
                )


def read_known(
    lake: Lake, families: Collection[Family], tables: Collection[str]
) -> tuple[dict[str, str], Members]:
    """Return the topics, by stream, of members with a table in the catalog that is not in `tables`;
    and, by table, a member with the error for each table that may be one and cannot be read. Raises
    Terminal, Transient if the catalog or the store does not answer."""
    known: dict[str, str] = {}
    unread: dict[str, FamilyMember] = {}
    endings = frozenset[str]().union(*(family.side_tables for family in families))
    for family in families:
        names = lake.table_names(family.namespace)
        for name in sorted(names - set(tables)):
            if not family.may_have(name) or _is_side_table(name, names, endings):
                continue
            try:
                table = lake.find(name)
                owner = read_owner(table) if table is not None else None
            except (Terminal, Unexplained) as error:
                message = (
                    f"{family.file.path}: table {name} may belong to a stream of this family: "
                    f"{error}"
                )
                unread[name] = FamilyMember(
                    family.name, family.group, "", ConfigurationError(message)
                )
                continue
            if (
                owner is not None
                and family.matches(owner.topic)
                and family.stream_name(owner.topic) == owner.stream
            ):
                known[owner.stream] = owner.topic
    return known, unread


def _is_side_table(table: str, names: Collection[str], endings: Collection[str]) -> bool:
    """Return whether a table accompanies another stream's, as its ledger does."""
    return any(table.endswith(end) and table.removesuffix(end) in names for end in endings)


def members_with_tables(environment: Environment, conf: str | Path | None = None) -> Members:
    """Return the members with a table by name, from the catalog alone, for programs that do not
    need the topics; and, by table, an error for each table that may be a member's and cannot be
    read. Raises Terminal, Transient."""
    families = [
        family for family in config.load_families(conf).values() if isinstance(family, Family)
    ]
    if not families:
        return {}
    own = config.stream_names(conf)
    streams = config.loaded(config.select_streams(conf, own)) if own else []
    known, unread = read_known(
        Lake(environment), families, {table for stream in streams for table in stream.tables}
    )
    for member in unread.values():
        LOG.warning("family %s: %s", member.family, member.found)
    return {**config.expand(families, known.values(), streams, known), **unread}


def streams_with_tables(
    environment: Environment, conf: str | Path | None = None
) -> dict[str, Stream]:
    """Return the families' streams with a table, by name. Raises like `members_with_tables`."""
    return {stream.name: stream for stream in _streams(members_with_tables(environment, conf))}


def load_stream(environment: Environment, name: str, conf: str | Path | None = None) -> Stream:
    """Return the stream of this name, of a file or family. Raises ConfigurationError, Transient."""
    if name in config.stream_names(conf) or not config.family_names(conf):
        return config.load_stream(name, conf)
    [found] = select_streams(environment, conf, [name]).values()
    if isinstance(found, ConfigurationError):
        raise found
    return found


def select_streams(
    environment: Environment,
    conf: str | Path | None = None,
    names: Collection[str] = (),
    group: str | None = None,
    every: bool = False,
    unanswered: list[AnabranchError] | None = None,
) -> Selected:
    """Return the selected streams, including those of families; see `config.select_streams`.

    If Kafka or the catalog does not answer, a family may have streams that are not known. The error
    is added to `unanswered`; without it, it is raised: Transient.
    """
    families = FamilyStreams(environment, conf)
    try:
        try:
            selected = families.select(names, group, every)
        except ConfigurationError:
            if families.unanswered and names:
                raise families.unanswered[0] from None  # the name may be of a family
            raise
        if families.unanswered and not names:
            if unanswered is None:
                raise families.unanswered[0]
            unanswered.extend(families.unanswered)
        return selected
    finally:
        families.close()


def _streams(members: Mapping[str, FamilyMember]) -> list[Stream]:
    return [member.found for member in members.values() if isinstance(member.found, Stream)]
