"""The tables of a group as of one hour: `anabranch.open(group="small", hour="2026-11-21T03")`.

Kafka's time determines the ingest hours of every topic, so the same hour of all streams is a
consistent cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pyiceberg.table import Table

from anabranch import config, family_streams
from anabranch.common.errors import ConfigurationError, Refused
from anabranch.config import Environment, Stream
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.owner import open_lake
from anabranch.offsets.hours import start_of
from anabranch.protocol.group_hours import group_tag, tagged_hours
from anabranch.protocol.state import read_state
from anabranch.protocol.watermarks import complete_through
from anabranch.subjects.resolve import with_table_columns
from serving_layer.reader import Reader
from serving_layer.reader.handle import StreamTable
from serving_layer.reader.selection import GroupHour, Selection

_AT_ONCE = 16


@dataclass(frozen=True)
class GroupTables(Mapping[str, StreamTable]):
    """The tables of a group by stream name, each with exactly the accepted rows of the hours up to
    `hour`.

    Every read uses the snapshots with which the group was opened. When an hour up to `hour` is
    restated, its tag moves: a read then raises Refused, and never returns rows that differ from
    those of earlier reads; open the group again.
    """

    group: str
    hour: str
    tables: Mapping[str, StreamTable]

    def __getitem__(self, stream: str) -> StreamTable:
        """Return a stream's table. Raises ConfigurationError for a name that is not a stream of the
        group."""
        if stream not in self.tables:
            known = ", ".join(self.tables)
            raise ConfigurationError(
                f"group {self.group}: expected one of its streams ({known}), found {stream!r}"
            )
        return self.tables[stream]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)


def open_group(group: str, hour: str, *, conf: str | Path | None = None) -> GroupTables:
    """Return the tables of a group as of an hour. Raises ConfigurationError for an invalid group or
    hour, for an invalid file of one of its streams, and for an hour whose tag has expired; Refused
    for an hour that is not complete, or not tagged yet; Transient."""
    start_of(hour)
    environment = config.load_environment(conf)
    selected = config.select_streams(
        conf, group=group, members=lambda: family_streams.members_with_tables(environment, conf)
    )
    for error in config.broken(selected).values():
        raise error
    shared, streams = Lake(environment), config.loaded(selected)
    with ThreadPoolExecutor(_AT_ONCE, "open") as threads:
        opened = list(
            threads.map(lambda stream: _open(environment, stream, shared, group, hour), streams)
        )
    # Report a late stream first: it is why the others have no tag.
    for missing in sorted(
        (o for o in opened if isinstance(o, _Untagged)), key=lambda o: not o.is_late
    ):
        raise missing.error
    return GroupTables(
        group, hour, {o.stream.name: o for o in opened if isinstance(o, StreamTable)}
    )


@dataclass(frozen=True)
class _Untagged:
    """The error of a table without the tag. `is_late`: the stream is not complete through the
    hour."""

    error: ConfigurationError | Refused
    is_late: bool = False


def _open(
    environment: Environment, stream: Stream, shared: Lake, group: str, hour: str
) -> StreamTable | _Untagged:
    lake = open_lake(environment, stream, shared=shared)
    stream = with_table_columns(stream, lake)
    table = lake.load(stream.table)
    name = group_tag(group, hour)
    ref = table.metadata.refs.get(name)
    if ref is None:
        return _why_untagged(stream, table, group, hour)
    selection = Selection(through=GroupHour(hour, name, ref.snapshot_id))
    return StreamTable(Reader(lake, {stream.table: stream}), stream, selection)


def _why_untagged(stream: Stream, table: Table, group: str, hour: str) -> _Untagged:
    what = (
        f"group {group}, hour {hour}, stream {stream.name}: expected tag {group_tag(group, hour)} "
        f"on {stream.table}"
    )
    through, tagged = complete_through(read_state(table)), list(tagged_hours(table, group).values())
    if through is None or through < hour:
        found = (
            f"found the stream complete through {through or 'no hour'}; wait for its batch layer"
        )
        return _Untagged(Refused(f"{what}, {found}"), is_late=True)
    if tagged and hour < tagged[0]:
        found = (
            f"found tags since {tagged[0]}: older ones expired after maintain.group_hours; open a "
            "newer hour"
        )
        return _Untagged(ConfigurationError(f"{what}, {found}"))
    remedy = (
        "once every stream of the group is complete, run `anabranch complete --group "
        f"{group} --tag`"
    )
    found = f"found the stream complete and not tagged; {remedy}"
    return _Untagged(Refused(f"{what}, {found}"))
