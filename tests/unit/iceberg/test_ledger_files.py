"""The ledger's files: read by hour, few whatever was appended, merged without a changed row."""

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from data_files import record_data_file_reads
from killed import kill_at
from lakes import StreamLake, at_next_commit, decide, lose_answer, new_environment
from pyiceberg.expressions import EqualTo
from pyiceberg.table import Table, Transaction
from pyiceberg.table.snapshots import Operation

from anabranch.common.errors import Transient
from anabranch.iceberg import commits, ledger_files
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.ledger_files import File, PerFile, Span, plan_fold, plan_merge, tiered
from anabranch.iceberg.snapshots import PUBLISH_ID
from anabranch.offsets.hours import Cut, shift
from anabranch.protocol import ledger, ledger_row
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.publish import new_id

FIRST = "2024-01-01T00"
NOW = datetime(2026, 11, 21, 1, tzinfo=UTC)
CUT = Cut("t", {0: (0, 10), 1: (3, 3)})


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data files that are read from now on."""
    return record_data_file_reads(monkeypatch)


def at(day: int, hour: int = 0) -> str:
    return shift(FIRST, 24 * day + hour)


def sealed(*hours: str) -> list[ledger_row.LedgerRow]:
    return [ledger.decision(hour, "sealed", 0, CUT, NOW, reason=new_id()) for hour in hours]


def append_as_before(lake: StreamLake, rows: list[ledger_row.LedgerRow]) -> None:
    """One append as before files were merged: a file, a manifest, an id alone in its summary."""
    table = loaded(lake)
    tx = Transaction(table)
    frame = ledger._to_arrow(rows, table.metadata.next_sequence_number())
    tx.append(frame, snapshot_properties={PUBLISH_ID: new_id()})
    lake.lake.catalog.commit_table(table, tuple(tx._requirements), tuple(tx._updates))


def append_as_now(lake: StreamLake, rows: list[ledger_row.LedgerRow]) -> None:
    name = lake.stream.hours_table
    lake.lake.append(name, lambda t: ledger._to_arrow(rows, t.metadata.next_sequence_number()))


def loaded(lake: StreamLake) -> Table:
    return lake.again().load(lake.stream.hours_table)


def files(lake: StreamLake) -> list[str]:
    return [task.file.file_path for task in loaded(lake).scan().plan_files()]


def manifests(lake: StreamLake) -> int:
    table = loaded(lake)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return len(snapshot.manifests(table.io))


def history(lake: StreamLake, *arguments: Any) -> list[ledger_row.LedgerRow]:
    return Ledger(lake.again(), lake.stream.hours_table).history(*arguments)


def merge(lake: StreamLake, idle: bool = False) -> commits.Outcome | None:
    return lake.lake.merge_files(lake.stream.hours_table, idle)


def merge_all(lake: StreamLake, idle: bool = False) -> None:
    for _ in range(100):
        if merge(lake, idle) is None:
            return
    raise AssertionError("expected merging to end within 100 steps")


# Reads


@pytest.fixture
def years(lake: StreamLake) -> StreamLake:
    """A ledger of two years: a row for each day, a file for each quarter."""
    days = [at(d) for d in range(730)]
    for quarter in sorted({ledger_files.bucket_of(hour) for hour in days}):
        append_as_now(lake, sealed(*(h for h in days if ledger_files.bucket_of(h) == quarter)))
    assert len(files(lake)) == 8
    return lake


def test_a_record_opens_only_files_that_may_contain_its_hour(
    years: StreamLake, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = years.stream.hours_table
    new, late = sealed(at(731), at(100, 5))
    assert Ledger(years.lake, name).record([new]) == {new.decision_id}
    assert opened == [], "the snapshots name what was appended lately"
    assert Ledger(years.lake, name).record([late]) == {late.decision_id}
    assert len(set(opened)) == 1
    opened.clear()
    # In another process, that has read none of them.
    monkeypatch.setattr(ledger, "_IDS", PerFile(("decision_id",), ledger._ids))
    assert Ledger(years.lake, name).record([new, late]) == {new.decision_id, late.decision_id}
    assert opened == []
    assert len(history(years)) == 732


def test_rows_of_no_snapshot_are_read_from_files(lake: StreamLake, opened: list[str]) -> None:
    name, hours = lake.stream.hours_table, [at(0, h) for h in range(25)]
    many = sealed(*hours)
    of_before, of_now = sealed(at(1, 2), at(1, 3))
    for recorded in (many, [of_before]):
        append = append_as_before if recorded == [of_before] else append_as_now
        append(lake, recorded)
        opened.clear()
        assert Ledger(lake.again(), name).record(recorded) == {row.decision_id for row in recorded}
        assert len(set(opened)) == 1
    found = Ledger(lake.again(), name).record([of_now, *many])
    assert found == {row.decision_id for row in (of_now, *many)}
    shown = sorted(row.decision_id for row in history(lake))
    assert shown == sorted(r.decision_id for r in (*many, of_before, of_now))


def test_a_row_that_another_program_deleted_is_written_again(lake: StreamLake) -> None:
    name, (one, other) = lake.stream.hours_table, sealed(at(0), at(1))
    Ledger(lake.lake, name).record([one])
    Ledger(lake.lake, name).record([other])
    loaded(lake).delete(EqualTo(term="hour", value=at(0)))
    assert [row.hour for row in history(lake)] == [at(1)]
    assert Ledger(lake.again(), name).record([one, other]) == {one.decision_id, other.decision_id}
    assert [row.decision_id for row in history(lake)] == [other.decision_id, one.decision_id]


def test_a_row_of_an_expired_snapshot_is_found(lake: StreamLake, opened: list[str]) -> None:
    name = lake.stream.hours_table
    first, *rest = sealed(*(at(0, h) for h in range(4)))
    for row in (first, *rest):
        append_as_now(lake, [row])
    table = loaded(lake)
    found = ledger_files.newest_ids(table)
    assert found == ({row.decision_id for row in (first, *rest)}, ledger_files._BEGINNING)
    expired = [s.snapshot_id for s in table.snapshots()[:-2]]
    table.maintenance.expire_snapshots().by_ids(expired).commit()
    ids, since = ledger_files.newest_ids(loaded(lake))
    assert ids == {row.decision_id for row in rest[-2:]}
    assert since > first.recorded_at
    opened.clear()
    shown = Ledger(lake.again(), name).record([first, *rest])
    assert shown == {row.decision_id for row in (first, *rest)}
    assert len(set(opened)) == 2, "of those that are named none is read"
    assert len(history(lake)) == 4


def test_a_newer_decision_is_not_looked_for(lake: StreamLake, opened: list[str]) -> None:
    name, (old,) = lake.stream.hours_table, sealed(at(0))
    append_as_before(lake, [old])
    _, since = ledger_files.newest_ids(loaded(lake))
    later = (since + timedelta(hours=hours) for hours in (3, 1))
    new, nearly = (ledger.decision(at(0), "accepted", 1, CUT, now) for now in later)
    opened.clear()
    assert Ledger(lake.again(), name).record([new]) == {new.decision_id}
    assert opened == []
    assert Ledger(lake.again(), name).record([nearly]) == {nearly.decision_id}
    assert opened != [], "clocks may be apart"
    assert len(history(lake)) == 3


def test_a_history_opens_only_files_of_its_hours(years: StreamLake, opened: list[str]) -> None:
    for hours, expected, number in (
        ([at(200)], [at(200)], 1),
        ({at(729), at(0)}, [at(0), at(729)], 2),
        (Span(at(80), at(100)), [at(d) for d in range(80, 101)], 2),
        (Span(at(731), at(900)), [], 0),
        ([at(200, 1)], [], 1),
        ([], [], 0),
        (None, [at(d) for d in range(730)], 8),
    ):
        opened.clear()
        assert [row.hour for row in history(years, hours)] == expected
        assert len(set(opened)) == number, hours


def test_a_history_omits_columns_that_are_not_requested(lake: StreamLake) -> None:
    append_as_now(lake, sealed(at(0)))
    (row,) = history(lake, [at(0)], ledger.BULKY)
    assert row.hour == at(0)
    assert [getattr(row, name) for name in ledger.BULKY] == [None] * len(ledger.BULKY)


def test_only_losses_of_old_hours_are_read(lake: StreamLake, opened: list[str]) -> None:
    name = lake.stream.hours_table
    clean = {"missing": 4, "extra": 0, "changed": 0, "duplicate": 2, "unread": 4, "sample": []}
    differing = [clean | d for d in ({"unread": 3}, {"extra": 1}, {"missing": 5}, {"changed": 1})]
    facts = [
        {"diff": clean, "gaps": {}}, *({"diff": d} for d in differing),
        {"gaps": {"retention": 7}}, {"gaps": {"control": 7}}, {},
    ]  # fmt: skip
    rows = [decide(at(day), "accepted", 1, CUT, NOW, **said) for day, said in enumerate(facts)]
    append_as_now(lake, rows[:4])
    append_as_now(lake, rows[4:])
    assert Ledger(lake.lake, name).remarkable_hours() == {at(day) for day in (1, 2, 3, 4, 5)}
    append_as_now(lake, sealed(at(8)))
    opened.clear()
    assert Ledger(lake.lake, name).remarkable_hours() == {at(day) for day in (1, 2, 3, 4, 5)}
    assert len(set(opened)) == 1, "a file that was read before was read again"


# Merges


def test_records_leave_few_files_manifests_and_snapshots(lake: StreamLake) -> None:
    rows = sealed(*(at(0, i) for i in range(70)))
    for i, row in enumerate(rows):
        assert lake.ledger.record([row]) == {row.decision_id}
        if i + 2 == ledger_files.MANY_APPENDS:
            assert len(files(lake)) == manifests(lake) == i + 1, "a day's appends merge nothing"
        if i % 10 == 9:
            assert len(files(lake)) <= ledger_files.MANY_APPENDS + 3
            assert manifests(lake) <= ledger_files.MANY_APPENDS + 3
            wanted = ledger_files.SNAPSHOTS_KEPT + ledger_files.MANY_APPENDS + 2
            assert len(loaded(lake).snapshots()) <= wanted
    assert len(loaded(lake).snapshots()) > ledger_files.SNAPSHOTS_KEPT, "no snapshot was expired"
    decisions = history(lake)
    assert [row.decision_id for row in decisions] == [row.decision_id for row in rows]
    assert sorted({row.sequence for row in decisions}) == [row.sequence for row in decisions]
    assert all(row.reason == expected.reason for row, expected in zip(decisions, rows, strict=True))


def test_a_ledger_that_was_never_merged_is_merged_without_changes_of_rows(lake: StreamLake) -> None:
    # Rows of one commit have one moment; an old hour is restated; a commit spans two quarters.
    for i in range(24):
        hours = [at(85, i), at(85, i)] if i != 20 else [at(3), at(200), at(4), at(91)]
        append_as_before(lake, sealed(*hours))
    before = history(lake)
    assert (len(files(lake)), manifests(lake)) == (24, 24), "the hazard did not happen"
    merge_all(lake)
    assert history(lake) == before
    assert manifests(lake) <= 4
    merge_all(lake, idle=True)
    # The first quarter's, the second's and the third's.
    assert len(files(lake)) == 3
    assert history(lake) == before
    row = sealed(at(85))[0]
    append_as_before(lake, [row])
    found = [r.decision_id for r in history(lake)]
    assert found == [*(r.decision_id for r in before), row.decision_id]


def test_manifests_are_merged_in_steps(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_files, "_MOST_MANIFESTS", 12)
    for i in range(20):
        append_as_before(lake, sealed(at(0, i)))
    before = history(lake)
    assert merge(lake) is commits.Outcome.LANDED
    assert (len(files(lake)), manifests(lake)) == (20, 9)
    merge_all(lake)
    assert manifests(lake) <= 3
    assert history(lake) == before


def test_merging_is_no_change_for_incremental_readers(lake: StreamLake) -> None:
    for i in range(16):
        append_as_now(lake, sealed(at(0, i)))
    assert merge(lake) is commits.Outcome.LANDED
    snapshot = loaded(lake).current_snapshot()
    assert snapshot is not None
    assert snapshot.summary is not None
    assert snapshot.summary.operation is Operation.REPLACE
    assert (snapshot.summary["total-records"], snapshot.summary["total-data-files"]) == ("16", "1")


@pytest.fixture
def many(lake: StreamLake) -> StreamLake:
    for i in range(17):
        append_as_now(lake, sealed(at(0, i)))
    return lake


def test_a_merge_that_an_append_was_before_is_refused_and_loses_no_row(many: StreamLake) -> None:
    before, row = history(many), sealed(at(1))[0]

    other = Ledger(many.again(), many.stream.hours_table)
    at_next_commit(many.lake, lambda: other.record([row]))
    assert merge(many) is commits.Outcome.REFUSED
    expected = [*(r.decision_id for r in before), row.decision_id]
    assert [r.decision_id for r in history(many)] == expected
    merge_all(many)
    assert [r.decision_id for r in history(many)] == expected
    assert len(files(many)) < 16


def test_an_append_that_follows_a_merge_is_retried(many: StreamLake) -> None:
    before, row = history(many), sealed(at(1))[0]

    merged, other = list[commits.Outcome | None](), many.again()
    name = many.stream.hours_table
    at_next_commit(many.lake, lambda: merged.append(other.merge_files(name)))
    assert (many.ledger.record([row]), merged) == ({row.decision_id}, [commits.Outcome.LANDED])
    found = [r.decision_id for r in history(many)]
    assert found == [*(r.decision_id for r in before), row.decision_id]
    assert len(files(many)) <= 2


@pytest.mark.parametrize("lands", [True, False])
def test_a_merge_whose_answer_is_lost_changes_nothing(many: StreamLake, lands: bool) -> None:
    before = history(many)
    at_next_commit(many.lake, **{"after" if lands else "before": lose_answer})
    assert merge(many) is commits.Outcome.REFUSED
    assert history(many) == before
    assert len(files(many)) == (1 if lands else 17)
    merge_all(many)
    assert history(many) == before


def _merge(folder: Path, table: str) -> None:
    Lake(new_environment(folder)).merge_files(table)


@pytest.mark.parametrize(("step", "number"), [("ledger.merge-prepared", 17), ("ledger.merged", 1)])
def test_a_merge_that_is_killed_changes_no_row(many: StreamLake, step: str, number: int) -> None:
    before = history(many)
    kill_at(step, _merge, many.folder, many.stream.hours_table)
    assert len(files(many)) == number
    assert history(many) == before
    merge_all(many)
    assert len(files(many)) == 1
    assert history(many) == before


def test_a_failed_merge_fails_no_record(many: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    def merge_files(*args: Any) -> commits.Outcome | None:
        raise Transient("read rows: SlowDown")

    monkeypatch.setattr(many.lake, "merge_files", merge_files)
    row = sealed(at(1))[0]
    assert many.ledger.record([row]) == {row.decision_id}


def test_many_decisions_in_few_commits(lake: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_AT_ONCE", 10)
    rows = sealed(*(at(day) for day in range(25)))
    assert lake.ledger.record(rows) == {row.decision_id for row in rows}
    assert len(files(lake)) == 3
    assert [row.decision_id for row in history(lake)] == [row.decision_id for row in rows]


# Plans


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ([], 0), ([1] * 15, 0), ([1] * 16, 16), ([1] * 15 + [32], 16), ([1] * 16 + [33], 16),
        ([2] * 16 + [32, 64, 128], 19), ([2] * 16 + [32, 65], 17), ([2] * 16 + [8_161], 16),
        ([7_000, 8_000], 0),
    ],
)  # fmt: skip
def test_many_files_of_about_one_size_are_merged_once(sizes: list[int], count: int) -> None:
    assert tiered(sizes, 16, 32, 8_192) == count


def of(bucket: str, rows: int, last: str | None = None) -> File:
    hour = f"{bucket}-05T00"
    return File(new_id(), rows, hour, last or hour)


@pytest.mark.parametrize(
    ("files", "idle", "rows"),
    [
        ([of("2024-01", 1)] * 15, False, []),
        ([of("2024-01", 1)] * 16, False, [1] * 16),
        # Of several quarters: split.
        ([of("2024-01", 5, "2024-04-01T00"), of("2024-05", 1)], False, [5]),
        # A quarter that is over is one file, and gets a late row only with others or at leisure.
        ([of("2024-01", 1000), of("2024-02", 200), of("2024-05", 1)], False, [200, 1000]),
        ([of("2024-01", 1000), of("2024-02", 1), of("2024-05", 1)], False, []),
        ([of("2024-01", 1000), of("2024-02", 1), of("2024-05", 1)], True, [1, 1000]),
        ([of("2024-01", 1000), *[of("2024-02", 1)] * 3, of("2024-05", 1)], False, []),
        ([of("2024-01", 1000), *[of("2024-02", 1)] * 4, of("2024-05", 1)], False, [1] * 4),
        ([of("2024-01", 1000), of("2024-02", 31), of("2024-05", 1)], False, []),
        ([of("2024-01", 5000), of("2024-02", 4000), of("2024-05", 1)], True, []),
    ],
)
def test_manifests_that_are_merged(files: list[File], idle: bool, rows: list[int]) -> None:
    assert [f.rows for f in plan_merge(files, idle)] == rows


def test_small_manifests_are_merged_with_those_that_change() -> None:
    counts = {f"m{i}": 1 for i in range(7)}
    assert plan_fold(counts) == ()
    assert plan_fold(counts | {"m7": 1}) == tuple(f"m{i}" for i in range(8))
    # One that is large, of which no entry goes, stays.
    assert plan_fold({"large": 40, "a": 1, "b": 2}, ["b"]) == ("b", "a")


@pytest.mark.parametrize("late", [False, True])
def test_ten_years_of_rows_are_in_few_files_and_were_written_a_few_times(late: bool) -> None:
    files: dict[str, File] = {}
    written = 0

    def merge_planned(idle: bool = False) -> None:
        nonlocal written
        while chosen := plan_merge(files.values(), idle):
            assert len({f.bucket for f in chosen}) == 1
            for f in chosen:
                del files[f.path]
            rows = sum(f.rows for f in chosen)
            one = File(new_id(), rows, min(f.first for f in chosen), max(f.last for f in chosen))
            files[one.path] = one
            written += rows

    # Two rows an hour, a file for four hours; `late`: a day's last file is about a year ago.
    for i in range(0, 87_600, 4):
        hour = shift(FIRST, i - 8_760 if late and i % 24 == 20 and i > 8_760 else i)
        file = File(new_id(), 8, hour, hour)
        files[file.path] = file
        if i % 64 == 0:
            merge_planned()
    if late:
        merge_planned(idle=True)
    assert sum(f.rows for f in files.values()) == 2 * 87_600
    by_quarter = Counter(f.bucket for f in files.values())
    assert max(by_quarter.values()) <= 25
    assert len(files) <= (80 if late else 45) + 25
    assert written <= 12 * 2 * 87_600
