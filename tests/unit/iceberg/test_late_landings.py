"""Publishes whose answer is lost and that land whenever they like: what became of them is never
guessed.

The catalog's client is cut off from its request, which a test lets land after the n-th look at the
table: as a gateway does that gave up waiting for a catalog behind it. What it requires is compared
when it lands, as a REST catalog does.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from brokers import Broker
from killed import kill_at
from lakes import FIRST, StreamLake, at_next_commit, new_environment, new_lake, new_stream
from no_spark import NO_SPARK
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import CommitTableResponse

from anabranch.common.errors import AnabranchError, ConfigurationError, MissingRight, Transient
from anabranch.common.fail_points import Step
from anabranch.iceberg import admin, expiry, prepare, snapshots
from anabranch.iceberg import lake as lake_module
from anabranch.iceberg.commits import Change, Commit, Outcome
from anabranch.iceberg.lake import Lake
from anabranch.job import Job
from anabranch.offsets.hours import Cut, Timeline, hour_of, shift
from anabranch.protocol import dead_letters, ledger, ledger_row
from anabranch.protocol.publish import new_id, to_commit
from anabranch.protocol.state import read_state
from batch_layer import build, rebuild
from speed_layer.micro_batch import MicroBatches
from speed_layer.plan import StagedBatch

ROWS = [(FIRST, 0, o) for o in range(3)]
NOW = datetime(2026, 11, 21, tzinfo=UTC)


def unreadable(_: str) -> Exception:
    """Return the error of an answer with status 200 whose body was cut off."""
    try:
        CommitTableResponse.model_validate_json('{"metadata-location": "s3://')
    except ValueError as error:
        return error
    raise AssertionError


@dataclass
class CutOff:
    """Requests that a client was cut off from; `landed` and `refused` say what became of them."""

    waiting: list[tuple[Any, ...]] = field(default_factory=list)
    landed: int = 0
    refused: int = 0


@contextmanager
def cut_off(
    one: StreamLake,
    table: str | None = None,
    looks: int | None = 1,
    times: int = 1,
    error: Callable[[str], Exception] = OSError,
) -> Iterator[CutOff]:
    """The next `times` requests to commit to a table end with `error`; each lands after `looks`
    loads of the table, or at the end of the `with` for None."""
    catalog, name = one.lake.catalog, table or one.name
    real_commit, real_load, requests, left = (
        catalog.commit_table, one.lake.load, CutOff(), [times, looks],
    )  # fmt: skip

    def land() -> None:
        while requests.waiting:
            try:
                real_commit(*requests.waiting.pop(0))
                requests.landed += 1
            except CommitFailedException:
                requests.refused += 1

    def commit_table(target: Any, requirements: Any, updates: Any) -> Any:
        # A stage requires nothing but the table.
        if ".".join(target.name()) != name or not left[0] or len(requirements) == 1:
            return real_commit(target, requirements, updates)
        left[0] -= 1  # type: ignore[operator]
        requests.waiting.append((target, requirements, updates))
        raise error("connection reset by peer")

    def load(identifier: str) -> Any:
        loaded = real_load(identifier)
        if identifier == name and requests.waiting and left[1] is not None:
            left[1] -= 1
            if left[1] <= 0:
                land()
        return loaded

    catalog.commit_table, one.lake.load = commit_table, load  # type: ignore[method-assign]
    try:
        yield requests
    finally:
        catalog.commit_table, one.lake.load = real_commit, real_load  # type: ignore[method-assign]
        land()


def readable(one: StreamLake, name: str | None = None) -> bool:
    """Whether every manifest and file of the three branches is there."""
    table = one.lake.load(name or one.name)
    paths = snapshots.reachable(table, [snapshots.head(table, b) for b in snapshots.BRANCHES])
    return all(Path(path.removeprefix("file://")).exists() for path in paths)


# What the outcome of a publish is


@pytest.mark.parametrize("error", [ConnectionError, TimeoutError, unreadable])
def test_a_late_publish_has_landed(lake: StreamLake, error: Callable[[str], Exception]) -> None:
    staged = lake.stage(ROWS)
    with cut_off(lake, error=error) as late:
        outcome = lake.publish(lake.speed(staged, {0: 3}))
    assert (late.landed, late.refused) == (1, 0), "the hazard did not happen"
    assert outcome is Outcome.LANDED
    assert lake.rows("main") == lake.rows("speed") == ROWS
    assert readable(lake)


def test_a_publish_is_refused_only_when_it_cannot_land_any_more(lake: StreamLake) -> None:
    staged, before = lake.stage(ROWS), lake.state()
    with cut_off(lake, looks=None) as late:
        outcome = lake.publish(lake.speed(staged, {0: 3}))
        assert lake.state().heads != before.heads
    assert outcome is Outcome.REFUSED
    assert (late.landed, late.refused) == (0, 1), "its request comes at last, and must not land"
    assert lake.rows("main") == []
    assert lake.publish(lake.speed(staged, {0: 3})) is Outcome.LANDED, "decided again, it lands"
    assert lake.rows("main") == ROWS


@pytest.mark.parametrize("newest", snapshots.BRANCHES)
def test_the_empty_publish_changes_no_state(lake: StreamLake, newest: str) -> None:
    """The hazard: the newest publish says which hours there are, and one in the way is newer."""
    for branch in (*(b for b in snapshots.BRANCHES if b != newest), newest):
        state = lake.state()
        later = Timeline(state.timeline.first, shift(state.timeline.open, 1), {0: 0})
        lake.change(Change(branch), timeline=later, state=state)
    before, staged = lake.state(), lake.stage(ROWS)
    with cut_off(lake, looks=None):
        assert lake.publish(lake.speed(staged, {0: 3})) is Outcome.REFUSED
    after = lake.state()
    assert [b for b in snapshots.BRANCHES if after.heads[b] != before.heads[b]] == [newest]
    assert (after.timeline, after.branch_properties) == (before.timeline, before.branch_properties)
    assert after.is_merged == before.is_merged


@pytest.mark.parametrize("error", [OSError, unreadable])
@pytest.mark.parametrize("looks", [1, 2, 3, None])
def test_the_fencing_publish_may_land_late_as_well(
    lake: StreamLake, looks: int | None, error: Callable[[str], Exception]
) -> None:
    staged = lake.stage(ROWS)
    with cut_off(lake, looks=looks, times=3, error=error) as late:
        outcome = lake.publish(lake.speed(staged, {0: 3}))
    assert late.landed + late.refused >= 2, "the hazard did not happen"
    assert outcome is (Outcome.LANDED if lake.rows("main") else Outcome.REFUSED)
    assert lake.rows("main") == lake.rows("speed") == (ROWS if outcome is Outcome.LANDED else [])


def test_another_publishers_commit_settles_the_outcome_too(lake: StreamLake) -> None:
    staged, state = lake.stage(ROWS), lake.state()

    def overtaken() -> None:
        lake.move("batch")
        raise TimeoutError("read timed out")

    at_next_commit(lake.lake, overtaken)
    assert lake.publish(lake.speed(staged, {0: 3}, state), state) is Outcome.REFUSED
    after = lake.state().heads
    moved = [b for b in snapshots.BRANCHES if after[b] != state.heads[b]]
    assert moved == ["batch"], "nothing was in the way of what could not land"


def test_an_unknown_outcome_keeps_all(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: others publish more than snapshots are kept, before the answer is looked for."""
    monkeypatch.setattr(expiry.plan_expiry, "__defaults__", (4,))
    staged, state = lake.stage(ROWS), lake.state()
    publish = lake.speed(staged, {0: 3}, state)

    def answer_that_another_was_first() -> None:
        for branch in ("speed", "main") * 6:
            lake.move(branch)
        raise CommitFailedException("repeated by the client, and another commit was first")

    at_next_commit(lake.lake, after=answer_that_another_was_first)
    catalog = lake.environment.catalog.model_copy(update={"type": "rest"})
    lake.lake.environment = lake.environment.model_copy(update={"catalog": catalog})
    with pytest.raises(Transient, match="expected to learn whether it landed"):
        lake.publish(publish, state)
    assert not snapshots.has_landed(lake.table(), publish.id), "the hazard did not happen"
    assert lake.rows("main") == ROWS
    assert readable(lake)


def test_an_unreachable_lake_is_unknown(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lake_module, "_RETRIES_WITHIN_SECONDS", 0.2)
    staged = lake.stage(ROWS)
    with (
        cut_off(lake, looks=None, times=1000) as late,
        pytest.raises(Transient, match="nothing is deleted, try again"),
    ):
        lake.publish(lake.speed(staged, {0: 3}))
    assert late.landed == 1, "it landed after all"
    assert lake.rows("main") == ROWS
    assert readable(lake)


def test_a_missing_right_is_reported_and_not_retried_forever(lake: StreamLake) -> None:
    staged = lake.stage(ROWS)

    def commit_table(*_: Any) -> Any:
        raise PermissionError("AccessDenied: not authorized to perform: glue:UpdateTable")

    lake.lake.catalog.commit_table = commit_table  # type: ignore[method-assign]
    with pytest.raises(ConfigurationError, match="check the keys"):
        lake.publish(lake.speed(staged, {0: 3}))


def test_a_commit_without_a_snapshot_is_retried(lake: StreamLake) -> None:
    commit = Commit(new_id(), {}, (), set_properties={"anabranch.a": "1"})
    before = lake.state().heads
    for looks in (1, None):
        with cut_off(lake, looks=looks):
            assert lake.lake.commit(lake.table(), commit) is Outcome.REFUSED
        assert lake.table().properties["anabranch.a"] == "1"
    assert lake.lake.commit(lake.table(), commit) is Outcome.LANDED
    assert lake.state().heads == before


def test_the_table_shows_the_outcome_of_a_commit(lake: StreamLake) -> None:
    state = lake.state()
    publish = to_commit(state, lake.speed(lake.stage(ROWS), {0: 3}, state), NOW)

    def fate() -> prepare.CommitFate:
        return prepare.classify_commit(lake.table(), publish)

    assert fate() is prepare.CommitFate.OPEN
    lake.move("batch")
    assert fate() is prepare.CommitFate.NEVER
    lake.move("main")
    lake.move("speed")
    assert fate() is prepare.CommitFate.NEVER
    again = to_commit(lake.state(), lake.speed(lake.stage(ROWS), {0: 3}), NOW)
    assert lake.lake.commit(lake.table(), again) is Outcome.LANDED
    assert prepare.classify_commit(lake.table(), again) is prepare.CommitFate.LANDED


# Any publisher: no file or snapshot of an attempt is discarded while it may land


def ten_records() -> Broker:
    return Broker(log={0: [0] * 10})


def micro_batches(one: StreamLake, hour: str, kafka: Broker | None = None) -> MicroBatches:
    """The speed layer's publisher; what Spark would stage is staged without it."""
    kafka = kafka or ten_records()
    made = cast(Any, MicroBatches(Job(one.environment, one.stream, one.lake, kafka.adapter)))

    def staged(_: object, plan: Any, decided: object) -> StagedBatch:
        rows = one.stage([(hour, 0, o) for o in range(9)])
        return StagedBatch("t", plan.by_hour, rows, one.stage_dead([(hour, 0, 9)], "speed"))

    made._stage = staged
    return cast(MicroBatches, made)


@pytest.mark.parametrize("looks", [1, 2, None])
def test_a_late_micro_batch_keeps_its_dead_letters(tmp_path: Path, looks: int | None) -> None:
    """The hazard: decided again it finds its offsets published, and discards the dead letters."""
    hour = hour_of(datetime.now(UTC))
    one = new_lake(tmp_path, timeline=Timeline(hour, hour, {0: 0}))
    batches = micro_batches(one, hour)
    with cut_off(one, looks=looks) as late:
        batches.publish(cast(Any, lambda: None), {0: (0, 10)})
    assert late.landed + late.refused == 1, "the hazard did not happen"
    for _ in range(2):
        one.publisher.recover()
    assert one.state().position.offsets == {0: 10}
    assert one.rows("main") == [(hour, 0, o) for o in range(9)]
    assert one.dead("main") == [(hour, 0, 9)]


@pytest.mark.parametrize(
    ("failure", "tries", "warnings"),
    [(MissingRight("no READ of the group"), 1, 1), (ConfigurationError("no"), 2, 0)],
)
def test_offsets_for_lag_monitors_that_cannot_be_committed_end_no_job(
    tmp_path: Path,
    failure: AnabranchError,
    tries: int,
    warnings: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried = []

    class Refusing(Broker):
        def commit_lag(self, *_: object) -> None:
            tried.append(1)
            raise failure

    hour = hour_of(datetime.now(UTC))
    one = new_lake(tmp_path, timeline=Timeline(hour, hour, {0: 0}))
    batches = cast(Any, micro_batches(one, hour, Refusing(log={0: [0] * 10})))
    batches._stage = lambda _, plan, decided: StagedBatch("t", plan.by_hour, one.stage([]), None)
    with caplog.at_level(logging.WARNING):
        batches.publish(cast(Any, lambda: None), {0: (0, 5)})
        batches.publish(cast(Any, lambda: None), {0: (5, 10)})
    assert one.state().position.offsets == {0: 10}
    assert len(tried) == tries
    assert [r.levelname for r in caplog.records].count("WARNING") == warnings


@pytest.mark.parametrize("looks", [1, 2, None])
def test_an_hour_that_lands_late_keeps_its_dead_letters(tmp_path: Path, looks: int | None) -> None:
    """The hazard: decided again it was overtaken by another run, which was itself."""
    cut = Cut("t", {0: (0, 10)})
    opened = Timeline(FIRST, shift(FIRST, 1), {0: 10}, sealed={FIRST: cut})
    one = new_lake(tmp_path, timeline=opened)
    values = {"lake": one.lake, "stream": one.stream, "environment": one.environment}
    values["ledger"] = one.ledger
    job = SimpleNamespace(**values, kafka=ten_records())
    rebuilder = cast(Any, rebuild.Rebuilder(cast(Any, job), NO_SPARK))
    rebuilder._hours = SimpleNamespace(lookback=lambda hour: [])
    rows = one.stage([(FIRST, 0, o) for o in range(9)])
    counts = ledger_row.HourAccount(good=9, dead=1, duplicate=0, gap=0)
    built = build.Built(FIRST, cut, 0, rows, one.stage_dead([(FIRST, 0, 9)], "batch"), counts)
    state = one.state()
    with cut_off(one, looks=looks) as late:
        result = rebuilder._publish([built], {FIRST: None}, state)
    assert late.landed + late.refused == 1, "the hazard did not happen"
    assert (result.decision, result.revision) == ("accepted", 1)
    one.publisher.recover()
    assert one.rows("main") == [(FIRST, 0, o) for o in range(9)]
    assert one.dead("main") == one.dead("batch") == [(FIRST, 0, 9)]


@pytest.mark.parametrize("looks", [1, 2, None])
def test_dead_letters_that_land_late_are_there_once(lake: StreamLake, looks: int | None) -> None:
    staged = lake.stage_dead([(FIRST, 0, 7)], "speed")
    letters = dead_letters.waiting_speed(staged, NOW)
    lake.change(Change("speed"), Change("main"), dead_letters=(letters,))
    name = lake.stream.dead_letters_table
    with cut_off(lake, name, looks) as late:
        assert dead_letters.roll_forward(lake.lake, name, lake.state()) == {staged.wap_id}
    assert late.landed + late.refused == 1, "the hazard did not happen"
    assert lake.dead("main") == lake.dead("speed") == [(FIRST, 0, 7)]
    assert readable(lake, name)


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("looks", [1, 2, 3, None])
def test_a_late_ledger_row_is_there_once(lake: StreamLake, looks: int | None, begun: bool) -> None:
    name = lake.stream.hours_table
    row = ledger.decision(FIRST, "sealed", 0, None, NOW)
    if begun:
        ledger.Ledger(lake.lake, name).record([ledger.decision(FIRST, "refused", 1, None, NOW)])
    with cut_off(lake, name, looks) as late:
        assert ledger.Ledger(lake.lake, name).record([row]) == {row.decision_id}
    assert late.landed + late.refused == 1, "the hazard did not happen"
    ids = [r.decision_id for r in ledger.Ledger(lake.lake, name).history()]
    assert ids.count(row.decision_id) == 1
    assert len(ids) == 1 + begun


@pytest.mark.parametrize("looks", [1, None])
def test_a_schema_that_changes_late_changes_once(lake: StreamLake, looks: int | None) -> None:
    from pyiceberg.types import StringType

    def add(table: Any, tx: Any) -> None:
        if "colour" not in table.schema().column_names:
            with tx.update_schema() as update:
                update.add_column("colour", StringType())

    with cut_off(lake, looks=looks) as late, pytest.raises(Transient):
        admin.change_table(lake.lake, lake.name, "schema", add)
    admin.change_table(lake.lake, lake.name, "schema", add)
    assert late.landed + late.refused == 1
    assert lake.table().schema().column_names.count("colour") == 1
    assert len(lake.table().metadata.schemas) == 2


@pytest.mark.parametrize("looks", [1, None])
def test_branches_that_are_made_late_begin_once(tmp_path: Path, looks: int | None) -> None:
    one = new_lake(tmp_path)
    with one.table().manage_snapshots() as manage:
        manage.remove_branch("batch")
    with cut_off(one, looks=looks), pytest.raises(Transient):
        admin.add_branches(one.lake, one.name, {})
    admin.add_branches(one.lake, one.name, {})
    assert set(snapshots.heads(one.table())) == set(snapshots.BRANCHES)
    assert read_state(one.table()).position.offsets == {0: 0}


def _publish(folder: Path) -> None:
    environment = new_environment(folder)
    one = StreamLake(folder, Lake(environment), new_stream(), environment)
    one.publish(one.speed(snapshots.find_staged(one.table(), "mine"), {0: 3}))


@pytest.mark.parametrize("step", [Step.COMMIT_DOUBTED, Step.COMMIT_FENCED])
def test_a_process_that_dies_early_needs_no_repair(lake: StreamLake, step: Step) -> None:
    staged, before = lake.stage(ROWS, "mine"), lake.state()
    kill_at(f"{Step.COMMIT_REQUEST_LOST.label},{step.label}", _publish, lake.folder)
    assert (lake.state().heads != before.heads) == (step is Step.COMMIT_FENCED)
    assert lake.rows("main") == []
    lake.land(lake.speed(staged, {0: 3}))
    assert lake.rows("main") == ROWS
