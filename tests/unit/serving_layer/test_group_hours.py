"""One hour of a group: its tag on each table, and what is read as of it, with real tables."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result
from conf_folders import write_environment
from hypothesis import given, settings
from hypothesis import strategies as st
from lakes import DDL, FIRST, Row, StreamLake, new_lake

import anabranch
from anabranch.cli import main
from anabranch.common.errors import AnabranchError, ConfigurationError, Refused, Transient
from anabranch.iceberg.commits import Change, Commit, Outcome
from anabranch.iceberg.expiry import plan_expiry
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.snapshots import heads
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.protocol import group_hours
from anabranch.protocol.group_hours import (
    GroupedStream,
    group_tag,
    plan_hours,
    tag_hours,
    tagged_hours,
)
from anabranch.protocol.ledger_row import HourAccount
from anabranch.protocol.publish import Publish, new_id, to_commit
from anabranch.protocol.state import Accepted
from anabranch.protocol.watermarks import Watermarks
from batch_layer.plan import Rebuilt, plan_publish

H = [shift(FIRST, n) for n in range(4)]
GROUP = "small"
NAMES = ("orders", "refunds")


def cut(hour: str) -> Cut:
    n = H.index(hour)
    return Cut("t", {0: (10 * n, 10 * n + 10)})


def rows_of(hour: str, count: int = 10) -> list[Row]:
    return [(hour, 0, offset) for offset in range(*cut(hour).ranges[0])][:count]


def accept(one: StreamLake, hour: str, count: int = 10) -> None:
    """The batch layer publishes the next revision of an hour, with so many of its rows."""
    staged, now = one.stage(rows_of(hour, count)), datetime.now(UTC)
    state = one.state()
    before = state.accepted.get(hour)
    rebuilt = Rebuilt(
        hour, Accepted(before.revision + 1 if before else 1, cut(hour)), staged, (), HourAccount()
    )
    assert one.publish(plan_publish(state, [rebuilt], now), state) is Outcome.LANDED


@pytest.fixture
def group(tmp_path: Path) -> dict[str, StreamLake]:
    """Two streams with four sealed hours that the speed layer has read, and 5 rows of the running
    hour."""
    (tmp_path / "streams").mkdir()
    made = {}
    for name in NAMES:
        timeline = Timeline(H[0], shift(H[-1], 1), {0: 40}, sealed={hour: cut(hour) for hour in H})
        made[name] = new_lake(tmp_path, timeline=timeline, name=name)
        rows = [
            *(row for hour in H for row in rows_of(hour)),
            *((shift(H[-1], 1), 0, 40 + n) for n in range(5)),
        ]
        assert (
            made[name].publish(made[name].speed(made[name].stage(rows), {0: 45})) is Outcome.LANDED
        )
        write(made[name])
    write_environment(tmp_path)
    return made


def write(one: StreamLake, **values: object) -> None:
    name = one.stream.name
    of = {"group": GROUP, "topic": name, "table": one.name, "schema": DDL, "key": "id"} | values
    (one.folder / "streams" / f"{name}.yaml").write_text(yaml.safe_dump(of))


def tag(group: dict[str, StreamLake]) -> tuple[Result, dict[str, object]]:
    folder = group["orders"].folder
    arguments = [
        "complete",
        "--group",
        GROUP,
        "--tag",
        "--output",
        "json",
        "--conf",
        str(folder),
    ]
    done = CliRunner().invoke(main, arguments)
    return done, json.loads(done.stdout)


def tags(one: StreamLake) -> dict[str, int]:
    refs = one.table().metadata.refs
    return {hour: refs[name].snapshot_id for name, hour in tagged_hours(one.table(), GROUP).items()}


def read(group: dict[str, StreamLake], hour: str) -> dict[str, list[Row]]:
    opened = anabranch.open(group=GROUP, hour=hour, conf=group["orders"].folder)
    columns = ["ingest_hour", "kafka_partition", "kafka_offset"]
    return {
        name: sorted(tuple(row.values()) for row in table.arrow(columns=columns).to_pylist())
        for name, table in opened.items()
    }


def expected(*hours: str) -> list[Row]:
    return [row for hour in hours for row in rows_of(hour)]


def test_an_hour_is_tagged_once_every_stream_has_it_and_read_as_of_it(
    group: dict[str, StreamLake],
) -> None:
    orders, refunds = group.values()
    for hour in H[:3]:
        accept(orders, hour)
    done, view = tag(group)
    # The other stream is late: nothing is complete, and nothing is tagged.
    assert (done.exit_code, view["complete_through"], view["tagged"]) == (1, None, [])
    assert tags(orders) == tags(refunds) == {}
    with pytest.raises(Refused, match=r"stream refunds: expected tag .* complete through no hour"):
        read(group, H[0])
    accept(refunds, H[0])
    accept(refunds, H[1])
    with pytest.raises(Refused, match=r"run `anabranch complete --group small --tag`"):
        read(group, H[0])
    heads_before = [heads(one.table()) for one in group.values()]
    done, view = tag(group)
    assert (done.exit_code, view["complete_through"], view["tagged"]) == (0, H[1], [H[0], H[1]])
    assert [heads(one.table()) for one in group.values()] == heads_before
    assert list(tags(orders)) == list(tags(refunds)) == H[:2]
    # Neither the speed layer's rows nor the hours after it, whatever is accepted by now.
    accept(refunds, H[2])
    assert read(group, H[0]) == dict.fromkeys(NAMES, expected(H[0]))
    assert read(group, H[1]) == dict.fromkeys(NAMES, expected(H[0], H[1]))
    with pytest.raises(
        Refused, match=r"stream orders: expected tag .*, found the stream complete and not tagged"
    ):
        read(group, H[2])
    before = {name: tags(one) for name, one in group.items()}
    assert tag(group)[1]["tagged"] == [H[2]]
    # A tag that is there stays, and another call finds nothing to do.
    assert {
        name: {hour: tags(one)[hour] for hour in H[:2]} for name, one in group.items()
    } == before
    assert tag(group)[1]["tagged"] == []


def test_a_restated_hour_moves_its_tag_and_later_ones_in_the_same_commit(
    group: dict[str, StreamLake],
) -> None:
    orders, refunds = group.values()
    for one in (orders, refunds):
        for hour in H[:3]:
            accept(one, hour)
    tag(group)
    before = tags(orders), tags(refunds)
    ends = {name: end_of_tag(orders, name) for name in (group_tag(GROUP, h) for h in H[:3])}
    opened = anabranch.open(group=GROUP, hour=H[2], conf=orders.folder)
    assert opened["orders"].arrow().num_rows == 30
    accept(orders, H[1], count=7)
    [moved] = {heads(orders.table())["batch"]}
    assert tags(orders) == {H[0]: before[0][H[0]], H[1]: moved, H[2]: moved}
    assert tags(refunds) == before[1]
    assert {name: end_of_tag(orders, name) for name in ends} == ends
    # An opened group returns no other rows; opened again it has the restated ones.
    with pytest.raises(
        Refused, match="found that an hour up to it was restated meanwhile; open the group again"
    ):
        opened["orders"].arrow()
    assert opened["refunds"].arrow().num_rows == 30
    assert read(group, H[2])["orders"] == [*expected(H[0]), *rows_of(H[1], 7), *expected(H[2])]
    assert read(group, H[0])["orders"] == expected(H[0])


def end_of_tag(one: StreamLake, name: str) -> int:
    """When a tag ends, in ms since the epoch."""
    metadata = one.table().metadata
    ref = metadata.refs[name]
    snapshot = metadata.snapshot_by_id(ref.snapshot_id)
    assert snapshot is not None and ref.max_ref_age_ms is not None
    return snapshot.timestamp_ms + ref.max_ref_age_ms


def test_an_hour_restated_between_the_reading_and_the_tag_is_not_tagged_as_it_was(
    group: dict[str, StreamLake],
) -> None:
    orders, refunds = group.values()
    for one in (orders, refunds):
        accept(one, H[0])
    # The state that the tag would rest on, and then a restatement, which finds no tag to move.
    members = [GroupedStream(one.again(), one.stream, one.state()) for one in group.values()]
    accept(orders, H[0], count=4)
    assert tag_hours(GROUP, H[0], members) == [H[0]]
    assert tags(orders) == {H[0]: heads(orders.table())["batch"]}
    assert read(group, H[0]) == {"orders": rows_of(H[0], 4), "refunds": expected(H[0])}


def test_a_tag_that_a_killed_call_set_on_one_table_alone_is_completed(
    group: dict[str, StreamLake], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, refunds = group.values()
    for one in (orders, refunds):
        accept(one, H[0])
    land: Callable[..., Outcome] = Lake.commit

    def fails(lake: Lake, table: object, commit: Commit) -> Outcome:
        if commit.tags and "refunds" in str(table):
            raise Transient("the catalog is down")
        return land(lake, table, commit)

    monkeypatch.setattr(Lake, "commit", fails)
    members = [GroupedStream(one.again(), one.stream, one.state()) for one in group.values()]
    with pytest.raises(Transient, match="down"):
        tag_hours(GROUP, H[0], members)
    monkeypatch.undo()
    assert (list(tags(orders)), tags(refunds)) == ([H[0]], {})
    with pytest.raises(Refused, match="stream refunds"):
        read(group, H[0])
    assert tag(group)[1]["tagged"] == [H[0]]
    assert read(group, H[0]) == dict.fromkeys(NAMES, expected(H[0]))


def test_a_tagged_hour_outlives_a_hundred_publishes_and_ends_with_its_age(
    group: dict[str, StreamLake], monkeypatch: pytest.MonkeyPatch
) -> None:
    orders, refunds = group.values()
    write(orders, maintain={"group_hours": "2 hours"})
    for one in (orders, refunds):
        accept(one, H[0])
    tag(group)
    for one in (orders, refunds):
        accept(one, H[1])
    table = orders.table()
    expire = plan_expiry(table, None, datetime.now(UTC), keep=1)
    assert expire
    orders.lake.commit(table, Commit(new_id(), {}, (), expire=expire))
    assert read(group, H[0])["orders"] == expected(H[0])
    tag(group)
    # The next publish after its age drops it; the other stream keeps it for three days.
    state, later = orders.state(), datetime.now(UTC) + timedelta(hours=3)
    publish = Publish(new_id(), (Change("speed"),), state.timeline)
    assert orders.lake.commit(state.table, to_commit(state, publish, later)) is Outcome.LANDED
    assert (tags(orders), list(tags(refunds))) == ({}, H[:2])
    accept(orders, H[2])
    accept(refunds, H[2])
    tag(group)
    assert list(tags(orders)) == H[1:3]
    with pytest.raises(ConfigurationError, match=f"found tags since {H[1]}: older ones expired"):
        read(group, H[0])


@settings(deadline=None)
@given(
    through=st.integers(0, 60),
    first=st.integers(0, 60),
    tagged=st.sets(st.integers(0, 60), max_size=4),
    at_most=st.integers(1, 10),
)
def test_tagged_are_the_newest_complete_hours_that_have_no_tag(
    through: int, first: int, tagged: set[int], at_most: int
) -> None:
    def hour(n: int) -> str:
        return shift(FIRST, n)

    wanted = [n for n in range(first, through + 1) if n > max(tagged, default=-1)][-at_most:]
    wanted = [n for n in wanted if n > through - at_most]
    assert plan_hours(hour(through), map(hour, tagged), hour(first), at_most) == list(
        map(hour, wanted)
    )


def test_what_a_group_gives_is_a_stream_reader(group: dict[str, StreamLake]) -> None:
    orders, refunds = group.values()
    for one in (orders, refunds):
        accept(one, H[0])
    tag(group)
    opened = anabranch.open(group=GROUP, hour=H[0], conf=orders.folder)
    assert list(opened) == list(NAMES)
    table = opened["orders"]
    assert (len(table.pandas()), table.duckdb(columns=["n"]).aggregate("count(*)").fetchall()) == (
        10,
        [(10,)],
    )
    assert table.dataset().count_rows() == 10
    assert table.arrow(hours=H[1]).num_rows == 0
    assert table.watermarks() == Watermarks(H[0])
    assert [(hour.hour, hour.layer, hour.revision) for hour in table.provenance().hours] == [
        (H[0], "batch", 1)
    ]


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ({"group": GROUP}, "open: expected a stream"),
        ({"hour": H[0]}, "open: expected a stream"),
        ({"group": GROUP, "hour": H[0], "as_of": "main"}, "open: expected a stream"),
        ({"group": GROUP, "hour": "yesterday"}, "expected a UTC hour"),
        ({"group": "other", "hour": H[0]}, "known groups: small"),
    ],
)
def test_another_combination_is_an_error(
    group: dict[str, StreamLake], wanted: dict[str, str], error: str
) -> None:
    with pytest.raises(ConfigurationError, match=error):
        anabranch.open(**wanted, conf=group["orders"].folder)


def test_a_name_of_no_stream_names_those_of_the_group(group: dict[str, StreamLake]) -> None:
    for one in group.values():
        accept(one, H[0])
    tag(group)
    opened = anabranch.open(group=GROUP, hour=H[0], conf=group["orders"].folder)
    with pytest.raises(
        ConfigurationError, match=r"one of its streams \(orders, refunds\), found 'payments'"
    ):
        opened["payments"]


def test_a_broken_file_of_the_group_leaves_the_hour_unknown(group: dict[str, StreamLake]) -> None:
    for one in group.values():
        accept(one, H[0])
    write(group["refunds"], key="nothing")
    done, view = tag(group)
    assert (done.exit_code, view["complete_through"], view["tagged"]) == (2, None, [])
    assert tags(group["orders"]) == {}
    with pytest.raises(AnabranchError, match=r"refunds.yaml: key"):
        read(group, H[0])


def test_only_a_groups_hours_are_tagged(group: dict[str, StreamLake]) -> None:
    done = CliRunner().invoke(main, ["complete", "--tag", "--conf", str(group["orders"].folder)])
    assert done.exit_code == 2 and "--tag: expected --group NAME" in done.output
    assert group_hours.group_tag("a-b", H[0]) == f"group-a-b-{H[0]}"
