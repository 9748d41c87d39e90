"""Lost and late answers of catalogs over HTTP: each compares something else on arrival."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from foreign_programs import expire_all
from glue import REGION, Glue, running_glue
from lakes import FIRST, StreamLake, new_lake
from rest_stand_in import Rest, running_rest

from anabranch.common.errors import Transient
from anabranch.iceberg import commits, expiry, snapshot_writer, snapshots

ROWS = [(FIRST, 0, o) for o in range(3)]
# The number of requests that a client sends for one commit by itself.
ASKED = {"glue": 2, "rest": 1}

Server = Glue | Rest


@pytest.fixture(params=["glue", "rest"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def server(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "anyone")
    with running_glue() if kind == "glue" else running_rest(tmp_path) as running:
        yield running


@pytest.fixture
def lake(kind: str, server: Server, tmp_path: Path) -> StreamLake:
    if kind == "glue":
        made = new_lake(tmp_path, type="glue", properties={"glue.endpoint": server.url})
        # PyIceberg 0.12 takes no `glue.max-retries`, and its ten tries last a minute.
        patient = Config(retries={"total_max_attempts": ASKED["glue"], "mode": "standard"})
        client = boto3.client("glue", REGION, endpoint_url=server.url, config=patient)
        made.lake.catalog.glue = client  # type: ignore[attr-defined]
        return made
    return new_lake(tmp_path, type="rest", uri=server.url)


@contextmanager
def arriving(lake: StreamLake, server: Server, looks: int | None) -> Iterator[None]:
    """Release the commits that the server holds after `looks` loads of the table, or at the end."""
    real, left = lake.lake.load, [looks]

    def load(name: str) -> Any:
        table = real(name)
        if server.held and left[0] is not None:
            left[0] -= 1
            if left[0] <= 0:
                server.release()
        return table

    lake.lake.load = load  # type: ignore[method-assign]
    try:
        yield
    finally:
        lake.lake.load = real  # type: ignore[method-assign]
        server.release()


def readable(lake: StreamLake) -> bool:
    table = lake.table()
    paths = snapshots.reachable(table, [snapshots.head(table, b) for b in snapshots.BRANCHES])
    return all(Path(path.removeprefix("file://")).exists() for path in paths)


@pytest.mark.parametrize("looks", [1, 2, None])
def test_a_publish_that_lands_late_is_refused_only_when_it_cannot_land_any_more(
    lake: StreamLake, server: Server, kind: str, looks: int | None
) -> None:
    staged = lake.stage(ROWS)
    publish = lake.speed(staged, {0: 3})
    server.hold = ASKED[kind]
    with arriving(lake, server, looks):
        outcome = lake.publish(publish)
    assert server.hold == 0, "the hazard did not happen"
    assert server.landed + server.refused == ASKED[kind], "the hazard did not happen"
    assert (outcome is commits.Outcome.LANDED) == (server.landed == 1)
    if looks == 1:
        assert outcome is commits.Outcome.LANDED
    assert looks is not None or outcome is commits.Outcome.REFUSED
    if outcome is commits.Outcome.REFUSED:
        assert lake.rows("main") == []
        again = lake.publish(lake.speed(staged, {0: 3}))
        assert again is commits.Outcome.LANDED, "its manifests are still there"
    assert lake.rows("main") == lake.rows("speed") == ROWS
    assert lake.state().position.offsets == {0: 3}
    assert readable(lake)


def test_others_stage_meanwhile_and_it_lands(lake: StreamLake, kind: str) -> None:
    """The hazard: a stage moves no head. It ends a request to Glue, and none to a REST catalog."""
    staged, state = lake.stage(ROWS), lake.state()
    other = lake.stage([(FIRST, 0, 9)])
    assert lake.state().heads == state.heads
    outcome = lake.publish(lake.speed(staged, {0: 3}, state), state)
    assert outcome is (commits.Outcome.LANDED if lake.rows("main") else commits.Outcome.REFUSED)
    if outcome is commits.Outcome.REFUSED:
        lake.land(lake.speed(staged, {0: 3}))
    assert lake.rows("main") == ROWS
    assert snapshots.find_staged(lake.table(), other.wap_id) is not None


def test_a_publish_whose_staged_rows_another_program_expired_is_refused(lake: StreamLake) -> None:
    """The hazard: an expiry moves no head, and deletes files of it after the publish names them."""
    staged, state = lake.stage(ROWS), lake.state()
    deletes = expire_all(lake)
    assert {f.file_path for f in staged.files} <= set(deletes), "the hazard did not happen"
    assert lake.publish(lake.speed(staged, {0: 3}, state), state) is commits.Outcome.REFUSED
    assert (lake.rows("main"), lake.state().position.offsets) == ([], {0: 0})
    lake.serve(ROWS, {0: 3})
    snapshot_writer.delete_quietly(lake.table(), deletes)
    assert lake.rows("main") == lake.rows("speed") == ROWS
    assert not [name for name in lake.table().metadata.refs if name.startswith(snapshots.STAGED)]


@pytest.mark.parametrize("others", [1, pytest.param(6, marks=pytest.mark.full)])
def test_a_publisher_that_is_answered_after_many_publishes_of_others_deletes_nothing(
    lake: StreamLake, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """The hazard: the answer is that another commit was first, which was its own, now expired."""
    monkeypatch.setattr(expiry.plan_expiry, "__defaults__", (4,))
    staged, state = lake.stage(ROWS), lake.state()
    publish, real = lake.speed(staged, {0: 3}, state), lake.lake.catalog.commit_table

    def asked_again(*request: Any) -> Any:
        lake.lake.catalog.commit_table = real  # type: ignore[method-assign]
        real(*request)
        for _ in range(others):
            lake.move("speed")
            lake.move("main")
        return real(*request)

    lake.lake.catalog.commit_table = asked_again  # type: ignore[method-assign]
    if others == 1:
        lake.land(publish, state)
    else:
        with pytest.raises(Transient, match="expected to learn whether it landed"):
            lake.publish(publish, state)
        assert not snapshots.has_landed(lake.table(), publish.id), "the hazard did not happen"
    assert lake.rows("main") == lake.rows("speed") == ROWS
    assert readable(lake)


def test_a_refused_publish_leaves_its_manifests_to_maintenance(lake: StreamLake) -> None:
    staged = [lake.stage([(FIRST, 0, offset)]) for offset in (0, 1)]
    state = lake.state()
    lake.land(lake.speed(staged[0], {0: 1}, state), state)
    found = lake.publish(lake.speed(staged[1], {0: 2}, state), state, lake.again())
    assert found is commits.Outcome.REFUSED
    assert lake.rows("main") == [(FIRST, 0, 0)]
    assert readable(lake)
