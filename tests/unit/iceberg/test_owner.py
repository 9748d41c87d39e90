"""A table belongs to one stream: every other one is refused before anything is read or changed."""

from pathlib import Path

import pytest
from brokers import Broker
from lakes import new_environment, new_stream
from pyiceberg.table.update import SetPropertiesUpdate

from anabranch.common.errors import ConfigurationError
from anabranch.config import Stream
from anabranch.config.columns import parse_columns
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.owner import OWNER, AnotherStreamsTable, Owner, open_lake, read_owner
from anabranch.offsets.position import Position
from anabranch.operations.doctor.tables import failed
from anabranch.operations.doctor.tables import read as examine_tables
from anabranch.operations.finding import Issue
from anabranch.protocol import apply as tables
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import load_state
from anabranch.protocol.topic_change import adopt

MINE, OTHER = new_stream(), new_stream(name="refunds", topic="refunds")


def apply(
    folder: Path, stream: Stream, broker: Broker, renamed_from: str | None = None
) -> list[str]:
    environment = new_environment(folder)
    lake = open_lake(environment, stream, renamed_from)
    return tables.apply(environment, stream, lake, broker.adapter)


def test_apply_writes_the_stream_and_refuses_another_file(tmp_path: Path) -> None:
    """The hazard: both publish into it in turn, each with the offsets of its own topic."""
    apply(tmp_path, MINE, Broker())
    lake = Lake(new_environment(tmp_path))
    before = lake.load(MINE.table)
    assert read_owner(before) == Owner("events", "events", "cluster")
    names = r"streams/refunds.yaml: table games.events: .* belongs to stream events \(streams/events.yaml, topic events\)"
    with pytest.raises(AnotherStreamsTable, match=names) as refused:
        apply(tmp_path, OTHER, Broker(id="r"))
    assert refused.value.exit_code == 2
    assert lake.load(MINE.table).metadata_location == before.metadata_location
    assert apply(tmp_path, MINE, Broker()) == []


def locations(folder: Path) -> dict[str, str]:
    """The metadata of every table, which each change replaces."""
    lake = Lake(new_environment(folder))
    names = [f"games.{name}" for (_, name) in lake.catalog.list_tables("games")]
    return {name: lake.load(name).metadata_location for name in names}


def with_all_tables(stream: Stream) -> Stream:
    columns = parse_columns("id STRING NOT NULL, at TIMESTAMP, n INT")
    view = {"daily": {"window": "1 hour", "aggregates": {"n": "count"}}}
    return new_stream(
        name=stream.name, topic=stream.topic, table=stream.table, columns=columns,
        event_time={"column": "at"}, views=view, archive={"raw": "30 days"},
    )  # fmt: skip


BESIDE = ["events_hours", "events_dead_letters", "events_daily_partials", "events_archive"]


@pytest.mark.parametrize("name", BESIDE)
def test_a_table_beside_another_streams_is_no_streams_table(tmp_path: Path, name: str) -> None:
    """The hazard: `apply` made the stream its owner, and asked to put the missing columns back."""
    apply(tmp_path, with_all_tables(MINE), Broker())
    before = locations(tmp_path)
    taken = new_stream(name="refunds", topic="refunds", table=f"games.{name}")
    found = rf"games\.{name}: expected a stream's table .*, found none"
    with pytest.raises(AnotherStreamsTable, match=found):
        apply(tmp_path, taken, Broker(id="r"))
    assert locations(tmp_path) == before


@pytest.mark.parametrize("name", BESIDE)
def test_a_streams_table_is_no_table_beside_anothers(tmp_path: Path, name: str) -> None:
    """The hazard: `apply` added a view's columns to it."""
    taken = new_stream(name="refunds", topic="refunds", table=f"games.{name}")
    apply(tmp_path, taken, Broker(id="r"))
    before = locations(tmp_path)
    found = rf"games\.{name}: .* found the table of stream refunds"
    with pytest.raises(AnotherStreamsTable, match=found):
        apply(tmp_path, with_all_tables(MINE), Broker())
    assert locations(tmp_path) == before


def test_opening_the_table_of_another_stream_is_refused(tmp_path: Path) -> None:
    apply(tmp_path, MINE, Broker())
    environment = new_environment(tmp_path)
    lake = open_lake(environment, OTHER)
    for use in (
        lambda: load_state(lake, OTHER.table),
        lambda: Publisher(lake, OTHER).recover(),
        lambda: adopt(Publisher(lake, OTHER), Broker(id="r").adapter),
        lambda: examine_tables(environment, OTHER, Lake(environment)),
    ):
        with pytest.raises(AnotherStreamsTable, match="belongs to stream events"):
            use()
    assert load_state(open_lake(environment, MINE), MINE.table).position == Position("t", {0: 0})


def test_the_doctor_proposes_no_command_for_anothers_table(tmp_path: Path) -> None:
    """The hazard: it proposed `adopt`, which takes the table from the other stream, and `apply`."""
    apply(tmp_path, MINE, Broker())
    environment = new_environment(tmp_path)
    with pytest.raises(AnotherStreamsTable) as refused:
        examine_tables(environment, OTHER, Lake(environment))
    finding = failed(OTHER, refused.value)
    assert finding is not None
    assert finding.check == Issue.ANOTHER_STREAMS_TABLE
    assert finding.remedy == "another `table:` in streams/refunds.yaml"


@pytest.mark.parametrize(
    ("owner", "found"),
    [
        ('{"stream": "events", "topic": "events", "cluster_id": "cluster"}', "none"),
        ('{"format": 2, "owners": ["events"]}', "2"),
    ],
)
def test_another_format_is_refused_unchanged(tmp_path: Path, owner: str, found: str) -> None:
    apply(tmp_path, MINE, Broker())
    environment = new_environment(tmp_path)
    lake = Lake(environment)
    set_owner = SetPropertiesUpdate(updates={OWNER: owner})
    lake.catalog.commit_table(lake.load(MINE.table), (), (set_owner,))
    before, lake = locations(tmp_path), open_lake(environment, MINE)
    sentence = (
        f"table games.events: expected format 1 of Anabranch's tables, found {found}, of another "
        "version; nothing was changed: install the version that wrote it"
    )
    for use in (
        lambda: load_state(lake, MINE.table),
        lambda: Publisher(lake, MINE).recover(),
        lambda: adopt(Publisher(lake, MINE), Broker().adapter),
        lambda: apply(tmp_path, MINE, Broker()),
        lambda: examine_tables(environment, MINE, Lake(environment)),
    ):
        with pytest.raises(ConfigurationError) as refused:
            use()
        assert (str(refused.value), refused.value.exit_code) == (sentence, 2)
    assert locations(tmp_path) == before


def test_a_streams_file_is_renamed(tmp_path: Path) -> None:
    apply(tmp_path, MINE, Broker())
    renamed = MINE.model_copy(update={"name": "orders"})
    with pytest.raises(AnotherStreamsTable, match="--renamed-from"):
        apply(tmp_path, renamed, Broker())
    with pytest.raises(AnotherStreamsTable, match="belongs to stream events"):
        apply(tmp_path, renamed, Broker(), renamed_from="others")
    with pytest.raises(AnotherStreamsTable, match="found a position of topic id t"):
        apply(tmp_path, OTHER, Broker(id="r"), renamed_from="events")
    words = "table games.events belongs to stream orders now, and belonged to stream events"
    assert words in apply(tmp_path, renamed, Broker(), renamed_from="events")
    assert apply(tmp_path, renamed, Broker()) == []
    with pytest.raises(AnotherStreamsTable, match="belongs to stream orders"):
        apply(tmp_path, MINE, Broker())


def test_adopting_another_topic_writes_it_into_the_table(tmp_path: Path) -> None:
    apply(tmp_path, MINE, Broker())
    lake = open_lake(new_environment(tmp_path), MINE)
    moved = MINE.model_copy(update={"topic": "events_2"})
    assert adopt(Publisher(lake, moved), Broker(id="t2").adapter) is not None
    assert read_owner(lake.load(MINE.table)) == Owner("events", "events_2", "cluster")
