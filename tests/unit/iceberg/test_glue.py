"""Publishes to AWS Glue, whose client asks again by itself; moto compares versions as Glue."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from glue import Glue, running_glue
from lakes import FIRST, StreamLake, new_lake
from shared_keys import shared_keys

from anabranch.common.errors import Transient
from anabranch.iceberg import admin
from anabranch.iceberg.commits import Change, Outcome
from anabranch.iceberg.register import register
from anabranch.iceberg.state_properties import STATE
from anabranch.offsets.hours import shift
from anabranch.protocol.publish_queue import Turn


@pytest.fixture
def glue() -> Iterator[Glue]:
    with running_glue() as server:
        yield server


@pytest.fixture
def lake(glue: Glue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StreamLake:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "anyone")
    return new_lake(tmp_path, type="glue", properties={"glue.endpoint": glue.url})


def test_a_stale_publisher_is_refused_before_its_request(lake: StreamLake, glue: Glue) -> None:
    staged = [lake.stage([(FIRST, 0, offset)]) for offset in (0, 1)]
    state = lake.state()
    lake.land(lake.speed(staged[0], {0: 1}, state), state)
    updates = len(glue.updates)
    found = lake.publish(lake.speed(staged[1], {0: 2}, state), state, lake.again())
    assert found is Outcome.REFUSED
    assert len(glue.updates) == updates
    assert lake.rows("main") == [(FIRST, 0, 0)]


def test_one_of_two_concurrent_publishers_lands(lake: StreamLake, glue: Glue) -> None:
    staged = [lake.stage([(FIRST, 0, offset)]) for offset in (0, 1)]
    state = lake.state()
    both = threading.Barrier(2)
    glue.before = lambda: both.wait(30) and None
    outcomes: list[Outcome] = []

    def publish(i: int) -> None:
        outcomes.append(lake.publish(lake.speed(staged[i], {0: i + 1}, state), state, lake.again()))

    threads = [threading.Thread(target=publish, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    glue.before = lambda: None
    # The hazard: both had looked before either asked, and asked with the same version.
    assert glue.refused == 1
    assert glue.updates[-1]["VersionId"] == glue.updates[-2]["VersionId"]
    assert sorted(outcomes, key=str) == [Outcome.LANDED, Outcome.REFUSED]
    [row] = lake.rows("main")
    # The refused one left a metadata file of the same number, and took its manifests away: not by
    # it is a table registered that the catalog has lost.
    landed = lake.table()
    version = landed.metadata_location.rpartition("/")[2][:5]
    folder = Path(landed.location().removeprefix("file://"))
    assert len(list(folder.glob(f"metadata/{version}-*.json"))) == 2
    admin.forget(lake.lake, lake.name)
    messages = register(lake.lake, lake.name, landed.schema())
    assert messages[-1] == f"registered table {lake.name} by {landed.metadata_location}"
    assert lake.rows("main") == [row]


def test_a_publish_repeated_by_the_client_landed_once(lake: StreamLake, glue: Glue) -> None:
    staged = lake.stage([(FIRST, 0, 0)])
    glue.lose = 1
    lake.land(lake.speed(staged, {0: 1}))
    # The hazard: the answer to the repetition was that another commit was first.
    assert (glue.lose, glue.refused) == (0, 1)
    assert lake.rows("main") == lake.rows("speed") == [(FIRST, 0, 0)]
    assert lake.state().position.offsets == {0: 1}


def test_properties_of_the_metadata_alone_stay_out_of_glue(lake: StreamLake, glue: Glue) -> None:
    """The hazard: Glue limits a request's size, and PyIceberg takes nothing out of its record."""
    state = lake.state()
    timeline = replace(state.timeline, skipped=tuple(shift(FIRST, i) for i in range(300)))
    turn = Turn("1", 1, 10.0)
    lake.table().transaction().set_properties(turn.to_properties()).commit_transaction()
    lake.change(Change("speed"), Change("main"), timeline=timeline, state=state)
    held = lake.table().properties
    assert any(k.startswith(STATE) for k in held)
    assert any(k.startswith("anabranch.turn") for k in held)
    parameters = glue.updates[-1]["TableInput"]["Parameters"]
    assert not [k for k in parameters if k.startswith((STATE, "anabranch.turn"))]
    assert parameters["write.wap.enabled"] == "true"
    assert lake.state().timeline == timeline


def test_keys_that_were_renewed_are_used_at_the_next_request(
    glue: Glue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renew = shared_keys(tmp_path, monkeypatch, "a", "b")
    renew("first")
    lake = new_lake(tmp_path, type="glue", properties={"glue.endpoint": glue.url})
    staged = lake.stage([(FIRST, 0, 0)])
    state = lake.state()
    glue.expired.add("first")
    with pytest.raises(Transient, match="; renew the temporary keys of Glue; "):
        lake.state()
    renew("second")
    lake.land(lake.speed(staged, {0: 1}, state), state)
    assert lake.rows("main") == [(FIRST, 0, 0)]
    # What keeps our properties out of Glue's record is not lost with the first client.
    parameters = glue.updates[-1]["TableInput"]["Parameters"]
    assert not [k for k in parameters if k.startswith((STATE, "anabranch.turn"))]


def test_the_tables_of_every_database_are_listed(lake: StreamLake) -> None:
    lake.lake.catalog.create_namespace("other", {"location": f"file://{lake.folder}/other"})
    lake.lake.catalog.create_table("other.one", lake.table().schema())
    names = {".".join(table.name()) for table in lake.lake.every_table()}
    assert names == {"other.one", lake.name, *lake.stream.branched_tables, lake.stream.hours_table}
