"""Commits of other programs on our branches: nightly maintenance, statements that change rows."""

import os
import random
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest
from foreign_programs import commit, expire_all, rewrite, write_alone
from lakes import FIRST, Row, StreamLake, new_lake
from pyiceberg.manifest import DataFile
from pyiceberg.table import Transaction
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.table.update import AssertTableUUID

from anabranch.common.errors import Terminal
from anabranch.iceberg import admin, foreign, snapshots
from anabranch.iceberg.commits import Change, Commit, Outcome
from anabranch.iceberg.files import references
from anabranch.iceberg.prepare import set_ref
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.offsets.position import Position
from anabranch.protocol.acts import serve_hour
from anabranch.protocol.merge import merge
from anabranch.protocol.publish import Publish, new_id, to_commit
from anabranch.protocol.state import Accepted

NEXT = shift(FIRST, 1)
ROWS: list[Row] = [(FIRST, 0, 0), (FIRST, 0, 1), (NEXT, 0, 2)]


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """Two hours of three micro-batches; the first is accepted, then given to the speed layer."""
    lake = new_lake(tmp_path, timeline=Timeline(FIRST, FIRST, {0: 0}))
    for i, row in enumerate(ROWS):
        lake.serve([row], {0: i + 1})
    sealed = Timeline(FIRST, NEXT, {0: 2}, boundaries={FIRST: {0: 2}})
    first = Accepted(1, Cut("t", {0: (0, 2)}))
    lake.land(lake.accept(lake.stage(ROWS[:2]), FIRST, first, timeline=sealed))
    serve_hour(lake.publisher, FIRST, "speed", "a test")
    assert lake.state().overrides == {FIRST: "speed"}
    return lake


def goes_on(lake: StreamLake) -> None:
    """Both layers and the operator go on, and `main` is exact."""
    state = lake.state()
    assert (state.overrides, state.position.offsets) == ({FIRST: "speed"}, {0: 3})
    lake.serve([(NEXT, 0, 3)], {0: 4})
    rows = [*ROWS, (NEXT, 0, 3)]
    assert lake.rows("main") == lake.rows("speed") == rows
    serve_hour(lake.publisher, FIRST, "auto", "a test")
    assert lake.state().served_by(FIRST) == "batch"
    later = Timeline(FIRST, shift(FIRST, 2), {0: 4}, boundaries={NEXT: {0: 4}})
    second = Accepted(1, Cut("t", {0: (2, 4)}))
    lake.land(lake.accept(lake.stage(rows[2:]), NEXT, second, timeline=later))
    merge(lake.lake, lake.stream, everything=True)
    assert lake.rows("main") == lake.rows("batch") == rows


@pytest.mark.parametrize("branch", snapshots.BRANCHES)
def test_a_compaction_by_another_program_is_accepted(
    lake: StreamLake, branch: str, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(lake, branch)
    goes_on(lake)
    [message] = [m for m in caplog.messages if "of another program" in m]
    assert f"branch {branch} has commits of another program (replace," in message
    assert "its rows are the same, continuing" in message


@pytest.mark.parametrize("branch", snapshots.BRANCHES)
def test_a_branchs_state_survives_compaction_and_expiry(lake: StreamLake, branch: str) -> None:
    """The hazard: of a foreign head and its ancestors `expire_snapshots` keeps the silent head."""
    before = lake.state()
    rewrite(lake, branch)
    rewrite(lake, branch)
    expire_all(lake)
    assert not snapshots.is_publish(snapshots.ancestors_to_last_publish(lake.table(), branch)[-1])
    state = lake.state()
    assert state.branch_properties == before.branch_properties
    assert (state.accepted, state.timeline) == (before.accepted, before.timeline)
    assert state.is_merged == before.is_merged
    goes_on(lake)


def test_a_night_of_maintenance_on_every_branch(lake: StreamLake) -> None:
    for _ in range(2):
        for branch in snapshots.BRANCHES:
            rewrite(lake, branch)
        expire_all(lake)
    goes_on(lake)


def inserted(lake: StreamLake, branch: str) -> int:
    files = write_alone(lake, [(NEXT, 0, 99)])
    tx = Transaction(lake.table())
    with tx.update_snapshot(branch=branch).fast_append() as append:
        for file in files:
            append.append_data_file(file)
    commit(lake, *tx._updates)
    return snapshots.heads(lake.table())[branch]


def updated(lake: StreamLake, branch: str) -> int:
    return rewrite(lake, branch, rewrites=False)


def deleted(lake: StreamLake, branch: str) -> int:
    return rewrite(lake, branch, rows=ROWS[1:], rewrites=False)


def rewritten_wrongly(lake: StreamLake, branch: str) -> int:
    return rewrite(lake, branch, rows=ROWS[1:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (inserted, r"whose operation is append \(1 files added, 0 removed\)"),
        (updated, r"whose operation is overwrite \(2 files added, 3 removed\)"),
        (deleted, "whose operation is overwrite"),
        (rewritten_wrongly, rf"which changed the rows of 1 hours \(hour {FIRST}: expected 2 rows, found 1\)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("branch", ["main", "speed"])
@pytest.mark.parametrize("then", [lambda lake, branch: None, rewrite])
def test_a_program_that_changed_rows_is_named_with_the_remedy(
    lake: StreamLake,
    branch: str,
    change: Callable[[StreamLake, str], int],
    words: str,
    then: Callable[[StreamLake, str], object],
) -> None:
    base = lake.table().metadata.refs[branch].snapshot_id
    id = change(lake, branch)
    newest = then(lake, branch) or id
    heads = snapshots.heads(lake.table())
    staged = lake.stage([(NEXT, 0, 3)])
    expected = (
        f"expected branch {branch} to have the rows of its newest publish, found snapshot "
        f"{newest} of another program"
    )
    with pytest.raises(Terminal, match=f"{expected}, {words}.*roll it back .* {base}"):
        lake.publish(lake.speed(staged, {0: 4}))
    assert snapshots.heads(lake.table()) == heads, "it published"
    commit(lake, set_ref(branch, base, SnapshotRefType.BRANCH))
    goes_on(lake)


def test_rows_changed_behind_expired_snapshots_are_found(lake: StreamLake) -> None:
    base = lake.table().metadata.refs["main"].snapshot_id
    inserted(lake, "main")
    rewrite(lake, "main")
    expire_all(lake)
    found = rf"hour {NEXT}: expected 1 rows, found 2\).*set_current_snapshot.* {base}"
    with pytest.raises(Terminal, match=found):
        lake.move("speed")
    commit(lake, set_ref("main", base, SnapshotRefType.BRANCH))
    goes_on(lake)


def test_dead_letters_are_audited_too(lake: StreamLake) -> None:
    name = lake.stream.dead_letters_table
    staged = lake.stage_dead([(FIRST, 0, 5)], "speed")
    table = lake.lake.load(name)
    tx = Transaction(table)
    with tx.update_snapshot(branch="main").fast_append() as append:
        append.append_data_file(staged.files[0])
    whole = (AssertTableUUID(uuid=table.metadata.table_uuid),)
    lake.lake.catalog.commit_table(table, whole, tuple(tx._updates))
    table = lake.lake.load(name)
    found = "expected branch main to have the rows of its newest publish"
    with pytest.raises(Terminal, match=found):
        lake.lake.commit(table, Commit(new_id(), snapshots.heads(table), (Change("speed"),)))


def test_a_head_is_checked_once(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite(lake, "main")
    lake.move("speed")
    monkeypatch.setattr(foreign, "_changed", None)  # read with every publish
    lake.move("speed")


def test_the_tag_of_a_publish_moves_with_each(lake: StreamLake) -> None:
    for _ in range(3):
        lake.move("speed")
    refs = lake.table().metadata.refs
    for branch in snapshots.BRANCHES:
        assert refs[snapshots.PUBLISHED + branch].snapshot_id == refs[branch].snapshot_id
    published = {name for name in refs if name.startswith(snapshots.PUBLISHED)}
    assert published == {snapshots.PUBLISHED + branch for branch in snapshots.BRANCHES}


class Sleeps:
    """A clock between decision and commit, while another program removes orphans."""

    def __init__(self, asleep: timedelta, files: Iterable[DataFile]) -> None:
        self._times = [datetime.now(UTC), datetime.now(UTC) + asleep]
        self._files = list(files)

    def now(self, *_: int) -> datetime:
        if len(self._times) == 1:
            for file in self._files:
                Path(file.file_path.removeprefix("file://")).unlink()
            return self._times[0]
        return self._times.pop(0)


# The last one: its clock was set back, so the age of its files is unknown.
@pytest.mark.parametrize("spared", [timedelta(days=1), timedelta(hours=1), -timedelta(hours=1)])
def test_a_publisher_that_slept_while_another_program_removed_orphans_names_no_missing_file(
    lake: StreamLake, monkeypatch: pytest.MonkeyPatch, spared: timedelta
) -> None:
    """The hazard: the removal moves no head, the commit lands, `main` names files that are gone."""

    def publish_after(asleep: timedelta) -> Outcome:
        files, state = write_alone(lake, [(NEXT, 0, 3)]), lake.state()
        changes = (Change("speed", files), Change("main", files))
        made = Publish(new_id(), changes, state.timeline, Position("t", {0: 4}))
        commit = to_commit(state, made, datetime.now(UTC))
        monkeypatch.setitem(lake.lake.__dict__, "clock", Sleeps(asleep, files))
        try:
            return lake.lake.commit(state.table, commit)
        finally:
            del lake.lake.__dict__["clock"]

    heads = snapshots.heads(lake.table())
    assert publish_after(spared) is Outcome.REFUSED
    assert snapshots.heads(lake.table()) == heads
    goes_on(lake)
    monkeypatch.setattr("anabranch.iceberg.lake.PREPARED_WITHIN", timedelta(days=2))
    assert publish_after(spared) is Outcome.LANDED, "the hazard did not happen"
    with pytest.raises(FileNotFoundError):
        lake.rows("main")


def test_a_recreated_branch_has_the_tag_of_its_new_beginning(lake: StreamLake) -> None:
    """The hazard: the tag of a branch that was dropped counts for the new one."""
    lake.table().manage_snapshots().remove_branch("speed").commit()
    assert admin.add_branches(lake.lake, lake.name, {}) == ["speed"]
    refs = lake.table().metadata.refs
    tagged = refs[snapshots.PUBLISHED + "speed"].snapshot_id
    assert tagged == refs["speed"].snapshot_id == refs["main"].snapshot_id


def remove_orphans(lake: StreamLake) -> None:
    """Every file below the table that its metadata does not name: `remove_orphan_files`, no age."""
    table = lake.table()
    named = {path.removeprefix("file://") for path in references(table)}
    for path in Path(table.location().removeprefix("file://")).rglob("*"):
        if path.is_file() and str(path) not in named:
            path.unlink()


def set_and_unset(lake: StreamLake) -> None:
    lake.table().transaction().set_properties({"team": "platform"}).commit_transaction()
    lake.table().transaction().remove_properties("team").commit_transaction()


@pytest.mark.parametrize("moves", [False, True])
def test_operations_of_other_programs_at_random(lake: StreamLake, moves: bool) -> None:
    seed = int(os.environ.get("FOREIGN_SEED", random.randrange(1_000_000)))
    print(f"FOREIGN_SEED={seed}")
    dice, rows = random.Random(seed), list(ROWS)
    operations: list[Callable[[], object]] = [
        *(partial(rewrite, lake, branch) for branch in snapshots.BRANCHES),
        *(partial(lake.foreign_commit, branch) for branch in snapshots.BRANCHES),
        *[partial(act, lake) for act in (expire_all, remove_orphans, set_and_unset)] * 2,
    ]
    for _ in range(12):
        dice.choice(operations)()
        if moves and dice.random() < 0.5:
            rows.append((NEXT, 0, len(rows)))
            lake.serve(rows[-1:], {0: len(rows)})
        assert lake.rows("main") == lake.rows("speed") == rows
        assert lake.rows("batch") == ROWS[:2]
        assert lake.state().overrides == {FIRST: "speed"}
    accept = lake.accept(lake.stage(ROWS[:2]), FIRST, Accepted(2, Cut("t", {0: (0, 2)})))
    lake.land(accept)
    serve_hour(lake.publisher, FIRST, "auto", "a test")
    merge(lake.lake, lake.stream, everything=True)
    assert (lake.rows("main"), lake.rows("batch")) == (rows, ROWS[:2])
    remove_orphans(lake)
    assert lake.rows("main") == rows
