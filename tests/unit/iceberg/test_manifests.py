"""Manifests by hour on a real lake: their number and content, and which a change touches."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from budget import budget
from hypothesis import given, settings
from hypothesis import strategies as st
from lakes import FIRST, StreamLake
from named_files import named_files, publish_files
from pyiceberg.io.pyarrow import PyArrowFile
from pyiceberg.manifest import DataFile, ManifestEntryStatus
from pyiceberg.table.snapshots import Operation

from anabranch.iceberg.commits import Change, Commit, Outcome
from anabranch.iceberg.manifests import (
    Slot,
    content_by_hour,
    files_by_hour,
    files_of,
    hours_apart,
    list_manifests,
    plan_merges,
)
from anabranch.iceberg.snapshots import BRANCHES, PUBLISH_ID, head, heads
from anabranch.offsets.hours import shift
from anabranch.protocol.publish import new_id

NEXT = shift(FIRST, 1)


def commit(lake: StreamLake, *changes: Change) -> None:
    table = lake.table()
    assert lake.lake.commit(table, Commit(new_id(), heads(table), changes)) is Outcome.LANDED


@contextmanager
def appending(lake: StreamLake, branch: str) -> Iterator[Any]:
    """A publish whose manifest PyIceberg writes, as it was before one manifest per hour."""
    said = {PUBLISH_ID: new_id()}
    with lake.table().transaction() as tx, tx.update_snapshot(said, branch).fast_append() as append:
        yield append


def paths(lake: StreamLake, branch: str) -> list[str]:
    """A branch's live files as any reader of Iceberg plans them; one may be there twice."""
    table = lake.table()
    planned = table.scan(snapshot_id=heads(table)[branch]).plan_files()
    return sorted(task.file.file_path for task in planned)


def names(files: tuple[DataFile, ...]) -> list[str]:
    return sorted(f.file_path for f in files)


def manifests(lake: StreamLake, branch: str) -> set[str]:
    table = lake.table()
    return {m.manifest.manifest_path for m in list_manifests(table, head(table, branch))[0]}


@contextmanager
def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """The files opened for reading, by kind."""
    opened: Counter[str] = Counter()
    real = PyArrowFile.open

    def open_(self: PyArrowFile, seekable: bool = True) -> object:
        name = self.location.rsplit("/", 1)[-1]
        kind = "manifest" if name.endswith(".avro") else "other"
        opened["list" if name.startswith("snap-") else kind] += 1
        return real(self, seekable)

    with monkeypatch.context() as patch:
        patch.setattr(PyArrowFile, "open", open_)
        yield opened


def test_an_hour_of_micro_batches_has_few_manifests_and_all_files(lake: StreamLake) -> None:
    made: list[DataFile] = []
    most, batches = 0, budget(60, 200)
    for _ in range(batches):
        files = named_files(lake, FIRST, 1)
        publish_files(lake, FIRST, files)
        made += files
        most = max(most, len(manifests(lake, "main")))
    assert paths(lake, "main") == paths(lake, "speed") == names(tuple(made))
    assert most <= 3 * 8, "an hour leaves a manifest for each micro-batch"
    assert manifests(lake, "main") == manifests(lake, "speed"), "each manifest is written once"
    table = lake.table()
    summary = head(table, "main").summary
    assert summary is not None
    assert summary["total-data-files"] == str(batches)
    assert summary["total-records"] == str(batches * 1000)


def test_an_hour_is_swapped_files_unseen(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: a swap that reads a manifest for each micro-batch is always overtaken by one."""
    for hour in (FIRST, NEXT):
        for _ in range(20):
            publish_files(lake, hour, named_files(lake, hour, 3, dates=3))
    kept = names(files_of(lake.table(), "main", NEXT))
    new = named_files(lake, FIRST, 2)
    with counted_reads(monkeypatch) as opened:
        commit(lake, Change("batch", new, clear=(FIRST,)), Change("main", new, clear=(FIRST,)))
    assert opened["manifest"] == 0 and opened["list"] == 2, opened
    assert paths(lake, "main") == sorted([*names(new), *kept])
    assert paths(lake, "batch") == names(new)
    assert manifests(lake, "batch") <= manifests(lake, "main")
    summary = head(lake.table(), "main").summary
    assert summary is not None and summary.operation is Operation.OVERWRITE
    assert (summary["deleted-data-files"], summary["added-data-files"]) == ("180", "2")
    assert summary["total-data-files"] == str(180 + 2)


def test_an_hour_is_taken_files_unseen(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_files(lake, FIRST, named_files(lake, FIRST, 5))
    by_speed = names(files_of(lake.table(), "speed", FIRST))
    new = named_files(lake, FIRST, 2)
    commit(lake, Change("batch", new, clear=(FIRST,)), Change("main", new, clear=(FIRST,)))
    with counted_reads(monkeypatch) as opened:
        commit(lake, Change("main", copy={FIRST: "speed"}))
    assert opened["manifest"] == 0
    assert paths(lake, "main") == by_speed
    commit(lake, Change("main", copy={FIRST: "batch"}))
    assert paths(lake, "main") == names(new)
    commit(lake, Change("main", copy={FIRST: "speed", NEXT: "speed"}))
    assert paths(lake, "main") == by_speed, "an hour that the other branch has nothing of leaves"


def test_a_manifest_of_several_hours_loses_one_and_keeps_the_others(lake: StreamLake) -> None:
    """Hazard: one manifest has the files of two hours, as `rewrite_manifests` writes it."""
    first, second = named_files(lake, FIRST, 3), named_files(lake, NEXT, 4)
    with appending(lake, "main") as append:
        for f in (*first, *second):
            append.append_data_file(f)
    assert {m.hour for m in list_manifests(lake.table(), head(lake.table(), "main"))[0]} == {None}
    assert content_by_hour(lake.table(), "main")[FIRST].rows == 3000
    commit(lake, Change("speed", copy={FIRST: "main"}))
    assert paths(lake, "speed") == names(first)
    commit(lake, Change("main", clear=(FIRST,)))
    assert paths(lake, "main") == names(second)


def test_removing_files_reports_a_missing_one(lake: StreamLake) -> None:
    batches = [named_files(lake, hour, 2) for hour in (FIRST, NEXT) for _ in range(6)]
    for hour, files in zip([FIRST] * 6 + [NEXT] * 6, batches, strict=True):
        publish_files(lake, hour, files)
    gone = tuple(files[0] for files in batches)
    new = named_files(lake, FIRST, 1)
    changes = tuple(Change(b, new, gone, rewrites=True) for b in ("speed", "main"))
    commit(lake, *changes)
    left = sorted([f[1].file_path for f in batches] + names(new))
    assert paths(lake, "main") == paths(lake, "speed") == left
    assert manifests(lake, "main") == manifests(lake, "speed")
    before = lake.metadata_files()
    with pytest.raises(ValueError, match=r"expected to remove .* found none"):
        commit(lake, *changes)
    assert lake.metadata_files() == before


def test_merged_entries_keep_their_snapshot_and_number(lake: StreamLake) -> None:
    """Readers that follow the snapshots of `main` rely on this."""
    by_path = {}
    for _ in range(30):
        files = named_files(lake, FIRST, 1)
        publish_files(lake, FIRST, files)
        snapshot = head(lake.table(), "main")
        by_path[files[0].file_path] = (snapshot.snapshot_id, snapshot.sequence_number)
    table = lake.table()
    for branch in ("main", "speed"):
        for manifest in head(table, branch).manifests(table.io):
            for entry in manifest.fetch_manifest_entry(table.io):
                origin = (entry.snapshot_id, entry.sequence_number)
                assert origin == by_path[entry.data_file.file_path], branch
                assert entry.file_sequence_number == entry.sequence_number
            assert manifest.sequence_number <= (head(table, branch).sequence_number or 0)
    newest = head(table, "main")
    entries = [e for m in newest.manifests(table.io) for e in m.fetch_manifest_entry(table.io)]
    of_newest = [
        e for e in entries
        if e.status == ManifestEntryStatus.ADDED and e.snapshot_id == newest.snapshot_id
    ]  # fmt: skip
    expected = {path for path, (id, _) in by_path.items() if id == newest.snapshot_id}
    assert {e.data_file.file_path for e in of_newest} == expected


def test_an_old_branch_of_many_manifests_is_merged_step_by_step(lake: StreamLake) -> None:
    made: list[DataFile] = []
    for _ in range(100):
        with appending(lake, "speed") as append:
            made.append(named_files(lake, FIRST, 1)[0])
            append.append_data_file(made[-1])
    assert len(manifests(lake, "speed")) == 100
    commit(lake, Change("main", copy={FIRST: "speed"}))
    for _ in range(3):
        made += named_files(lake, FIRST, 1)
        publish_files(lake, FIRST, (made[-1],))
    assert len(manifests(lake, "main")) <= 24
    assert paths(lake, "main") == paths(lake, "speed") == names(tuple(made))


def test_years_of_hours_leave_few_manifests_and_can_be_swapped(lake: StreamLake) -> None:
    hours = [shift(FIRST, i) for i in range(budget(80, 120))]
    files = {h: named_files(lake, h, 1) for h in hours}
    for h in hours:
        commit(lake, Change("batch", files[h], clear=(h,)), Change("main", files[h], clear=(h,)))
    assert len(manifests(lake, "main")) <= 24 + 3 * 8
    assert paths(lake, "main") == sorted(f.file_path for fs in files.values() for f in fs)
    old = hours[3]
    files[old] = named_files(lake, old, 1)
    new = files[old]
    commit(lake, Change("batch", new, clear=(old,)), Change("main", new, clear=(old,)))
    expected = sorted(f.file_path for fs in files.values() for f in fs)
    assert paths(lake, "main") == paths(lake, "batch") == expected
    assert names(files_of(lake.table(), "main", old)) == names(files[old])
    assert set(files_by_hour(lake.table(), "main", {hours[5], hours[-1]})) == {hours[5], hours[-1]}
    assert hours_apart(lake.table(), "main", "batch") == set()
    assert hours_apart(lake.table(), "main", "speed") == set(hours)


@pytest.mark.parametrize("seed", range(3))
def test_random_changes_leave_each_branch_with_just_its_files(lake: StreamLake, seed: int) -> None:
    """Against a plain model: branch -> hour -> files."""
    chance = random.Random(seed)
    hours = [shift(FIRST, i) for i in range(4)]
    model: dict[str, dict[str, list[DataFile]]] = {b: {h: [] for h in hours} for b in BRANCHES}
    for _ in range(40):
        changes = []
        before = {b: {h: list(fs) for h, fs in of.items()} for b, of in model.items()}
        shared = named_files(lake, chance.choice(hours), chance.randint(1, 3))
        for branch in chance.sample(BRANCHES, chance.randint(1, 3)):
            mine = model[branch]
            cleared = tuple(chance.sample(hours, chance.randint(0, 2)))
            others = [b for b in BRANCHES if b != branch]
            copied = {h: chance.choice(others) for h in hours if chance.random() < 0.2}
            there = [f for h in hours if h not in (*cleared, *copied) for f in before[branch][h]]
            removed = tuple(chance.sample(there, min(len(there), chance.randint(0, 2))))
            for h in cleared:
                mine[h] = []
            for h, origin in copied.items():
                mine[h] = list(before[origin][h])
            for h in hours:
                mine[h] = [f for f in mine[h] if h in copied or f not in removed]
            add = shared if not any(f in mine[h] for f in shared for h in hours) else ()
            for f in add:
                mine[str(f.partition[1])].append(f)
            changes.append(Change(branch, add, removed, clear=cleared, copy=copied))
        commit(lake, *changes)
        for branch in BRANCHES:
            found = paths(lake, branch)
            assert found == sorted(f.file_path for fs in model[branch].values() for f in fs)


hour = st.integers(0, 60).map(lambda i: shift(FIRST, i))
slot = st.tuples(hour, st.integers(0, 3), st.integers(1, 5000), st.booleans())


@settings(max_examples=300)
@given(st.lists(slot, max_size=80))
def test_merged_manifests_have_each_entry_once(drawn: list[tuple[str, int, int, bool]]) -> None:
    slots = [
        Slot(str(i), 0, shift(last, -back), last, files, touched)
        for i, (last, back, files, touched) in enumerate(drawn)
    ]
    groups = plan_merges(slots)
    merged = [s.key for group in groups for s in group]
    assert len(merged) == len(set(merged))
    newest = sorted({s.last for s in slots})[-24:]
    for group in groups:
        assert len(group) > 1
        if any(s.last in newest for s in group):
            assert {(s.first, s.last) for s in group} == {(group[0].last, group[0].last)}
        assert sum(s.files for s in group) <= 64 * 511


def merged(slots: list[Slot], number: int) -> list[Slot]:
    """The manifests after a commit that merges these."""
    for group in plan_merges(slots):
        slots = [s for s in slots if s not in group]
        first, last = min(s.first for s in group), max(s.last for s in group)
        files = sum(s.files for s in group)
        slots.append(Slot(f"m{number}-{first}", 0, first, last, files))
    return [replace(s, touched=False) for s in slots]


def test_merging_comes_to_an_end() -> None:
    hours = [shift(FIRST, i % 100) for i in range(1000)]
    slots = [Slot(str(i), 0, h, h, 1 + i % 600) for i, h in enumerate(hours)]
    for number in range(1000):
        if not plan_merges(slots):
            break
        slots = merged(slots, number)
    assert not plan_merges(slots)
    assert sum(s.files for s in slots) == sum(1 + i % 600 for i in range(1000))


@pytest.mark.parametrize("files", [2, 30])
def test_a_reader_of_an_old_hour_opens_one_manifest(files: int) -> None:
    slots: list[Slot] = []
    for number, h in enumerate(hours := [shift(FIRST, i) for i in range(1500)]):
        slots = merged([*slots, Slot(h, 0, h, h, files, touched=True)], number)
    assert len(slots) <= 3 * (1500 * files) ** 0.5
    middle = hours[700]
    # Restated: the swap has left a manifest without it.
    [home] = [s for s in slots if s.first <= middle <= s.last]
    rest = replace(home, key="rest", files=home.files - files)
    slots = merged([s for s in slots if s != home] + [rest], 1500)
    slots = merged([*slots, Slot("new", 0, middle, middle, files, touched=True)], 1501)
    for h in hours:
        [opened] = [s for s in slots if s.first <= h <= s.last]
        assert opened.files <= max(128, 2 * (1500 * files) ** 0.5)
    assert sum(s.files for s in slots) == 1500 * files
