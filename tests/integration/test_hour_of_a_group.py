"""One hour of a group, by the command and from Python, over streams whose batch layers are not
equally far."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from world import World, event, hours_of_now, past_hour, spread

import anabranch
from anabranch.cli import main
from anabranch.common.errors import Refused
from anabranch.offsets.hours import start_of

OLDER, NEWER = past_hour(2), past_hour(1)
hours_of_each_test = hours_of_now(globals(), OLDER=2, NEWER=1)


def complete_through(one: World) -> tuple[int, dict[str, Any]]:
    arguments = [
        "complete",
        "--group",
        "small",
        "--tag",
        "--output",
        "json",
        "--conf",
        str(one.folder),
    ]
    done = CliRunner().invoke(main, arguments)
    return done.exit_code, json.loads(done.stdout)


def read(hour: str, one: World) -> dict[str, list[str]]:
    opened = anabranch.open(group="small", hour=hour, conf=one.folder)
    return {
        name: sorted(table.arrow(columns=["event_id"])["event_id"].to_pylist())
        for name, table in opened.items()
    }


@pytest.mark.full
def test_a_group_is_read_as_of_an_hour_once_its_late_stream_has_it(
    world: Callable[..., World],
) -> None:
    early = world(group="small")
    late = world(beside=early, group="small")
    sent = {
        one.name: {h: [f"{one.name}-{h}-{i}" for i in range(8)] for h in (OLDER, NEWER)}
        for one in (early, late)
    }
    for one in (early, late):
        one.topic()
        for hour in (OLDER, NEWER):
            # The first record comes twice: the speed layer serves both, the accepted hour has one.
            again = (0, start_of(hour), event(f"{one.name}-{hour}-0", start_of(hour)))
            one.send([again, *spread(hour, 8, f"{one.name}-{hour}")])
        one.apply()
        one.speed()
    early.batch()
    assert complete_through(early) == (
        1,
        {
            "complete_through": None,
            "streams": {early.name: NEWER, late.name: None},
            "errors": {},
            "tagged": [],
        },
    )
    with pytest.raises(Refused, match=f"stream {late.name}: .* complete through no hour"):
        read(OLDER, early)

    late.batch(OLDER)
    code, view = complete_through(early)
    assert (code, view["complete_through"], view["tagged"]) == (0, OLDER, [OLDER])
    # Of the early stream neither the newer hour, which is accepted; of the late one nothing of the
    # speed layer.
    assert read(OLDER, early) == {name: sorted(hours[OLDER]) for name, hours in sent.items()}
    with pytest.raises(Refused, match=f"stream {late.name}: .* complete through {OLDER}"):
        read(NEWER, early)

    late.batch()
    assert complete_through(early)[1]["tagged"] == [NEWER]
    every = {name: sorted([*hours[OLDER], *hours[NEWER]]) for name, hours in sent.items()}
    assert read(NEWER, early) == every
    opened = anabranch.open(group="small", hour=NEWER, conf=early.folder)
    late.batch(OLDER, restate=True, why="a test")
    with pytest.raises(
        Refused, match="an hour up to it was restated meanwhile; open the group again"
    ):
        opened[late.name].arrow()
    assert read(NEWER, early) == every
    # Another engine reads the tag.
    for one in (early, late):
        query = f"""SELECT event_id FROM lake.{one.job.stream.table} VERSION AS OF 'group-small-{OLDER}'
            WHERE ingest_hour <= '{OLDER}'"""
        assert sorted(row.event_id for row in one.spark.sql(query).collect()) == sorted(
            sent[one.name][OLDER]
        )
