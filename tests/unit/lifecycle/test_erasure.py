"""Erasure: records with some values leave every branch, whatever is killed; the account closes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from brokers import Broker
from conf_folders import said
from erasure_scan import scan
from killed import kill_at
from lakes import DDL, FIRST, new_environment, new_lake, new_state, record, stage
from people import ARCHIVED, LETTERS, NAMES, NEXT, NOW, ORDER, People, job_of
from pydantic import SecretStr
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.common.errors import ConfigurationError, PositionError
from anabranch.common.fail_points import Step
from anabranch.config.columns import parse_columns
from anabranch.config.environment import ErasureKeys, Masking
from anabranch.config.select import parse_select
from anabranch.iceberg.files import local_path
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.snapshots import heads
from anabranch.job import Job
from anabranch.lifecycle.erasure import end, letters, rows, run
from anabranch.lifecycle.erasure.rows import Found
from anabranch.lifecycle.erasure.search import Values
from anabranch.lifecycle.erasure.status import read_statuses, status_lines
from anabranch.lifecycle.maintenance import maintain
from anabranch.offsets import hours, position
from anabranch.protocol import apply, dead_letters, erasure
from anabranch.protocol.archive import removed_at
from anabranch.protocol.erasure import load_filter
from anabranch.protocol.publish import new_id
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.registers import Erasure, Erasures
from anabranch.protocol.retention import plan_expire
from anabranch.protocol.state import Accepted
from serving_layer.changes import Token, poll


@dataclass
class Starts(Broker):
    """A topic whose log begins later."""

    start: int = 0

    def log_starts(self, topic: position.Topic) -> dict[int, int]:
        return dict.fromkeys(topic.partitions, self.start)


def job_in(folder: Path, records: int = 12) -> Job:
    return job_of(new_environment(folder), Lake(new_environment(folder)), records)


def erase_in(folder: Path, order: run.ErasureRequest = ORDER, records: int = 12) -> None:
    """The command in a process of its own."""
    job = job_in(folder, records)
    run.erase(job, Publisher(job.lake, job.stream), order)


def maintain_later(folder: Path) -> None:
    """Maintenance three days later, in a process of its own."""
    maintain(job_in(folder), datetime.now(UTC) + timedelta(days=3))


@pytest.fixture
def people(tmp_path: Path) -> People:
    return People(tmp_path)


ERASED = {value for o, value in ARCHIVED.items() if o not in (1, 3, 5)}


def stored_bytes(folder: Path) -> set[bytes]:
    """Every value of bytes in any Parquet file, whether a snapshot refers to it or not."""
    found = set[bytes]()
    for path in folder.rglob("*.parquet"):
        table = pq.ParquetFile(path).read()
        for name in table.column_names:
            found |= {value for value in table[name].to_pylist() if isinstance(value, bytes)}
    return found


@pytest.mark.parametrize("at_once", [1, 32])
def test_the_archive_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(rows, "FILES_A_COMMIT", at_once)
    people = People(tmp_path, archive=True)
    assert people.archived == ARCHIVED
    done = people.erase(replace(ORDER, until=timedelta(0)))
    assert (done.left, done.removed.rows, done.removed.dead) == (None, 4, 2)
    assert people.archived == {o: ARCHIVED[o] for o in (1, 3, 5)}
    of_archive = people.lake.lake.load(people.lake.stream.archive_table)
    assert removed_at(of_archive) is not None, "its snapshots from before expire after a day"
    # The replaced files of the archive are named until storage no longer has them.
    [status] = read_statuses(people.job, datetime.now(UTC))
    before = [path for path in _replaced(people) if "events_archive" in path]
    assert len(set(before)) == 2 and not status.is_certificate
    assert people.erase().removed == Found()
    # The hazard: storage has the bytes. At the deadline, no file has them.
    assert stored_bytes(tmp_path) >= ERASED
    maintain_later(tmp_path)
    left = stored_bytes(tmp_path)
    assert not left & ERASED and left >= {ARCHIVED[o] for o in (1, 3, 5)}
    assert read_statuses(people.job, datetime.now(UTC))[0].is_certificate


def test_files_archived_meanwhile_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    people, search, searched = People(tmp_path, archive=True), letters.archived_places, list[int]()

    def meanwhile(job: Job, table: Table, files: Sequence[DataFile], *of: Any) -> Any:
        found = search(job, table, files, *of)
        searched.append(len(files))
        if len(searched) == 1:
            late = {8: b'{"id": "anna", "late": 1}', 9: b'{"id": "bert", "late": 1}'}
            people.archive([8, 9], late)
        return found

    monkeypatch.setattr(letters, "archived_places", meanwhile)
    people.erase()
    assert searched[:2] == [2, 1]
    kept = {o: ARCHIVED[o] for o in (1, 3, 5)}
    assert people.archived == kept | {9: b'{"id": "bert", "late": 1}'}


def test_archived_places_are_those_of_words_and_of_rows_before_the_request(tmp_path: Path) -> None:
    """Only the row at a record's offset shows whose record it is if the record is not text."""
    people = People(tmp_path, archive=True)
    people.archive([0, 1], {0: b"\x00", 1: b"\x01"})
    table = people.lake.lake.load(people.lake.stream.archive_table)
    files = list(letters.archive_files(table).values())
    assert len(files) == 3
    before = Erasure("e", "id", NOW, NOW, people.lake.state().timeline.since, "t", {0: 7})
    found = letters.archived_places(people.job, table, files, before, Values.of("id", {"anna"}))
    # Offset 7 came after the request; 5 has the value within a longer word.
    assert sorted(map(sorted, found.values())) == [[(0, 0)], [(0, 0), (0, 2)], [(0, 4), (0, 6)]]
    got = letters.archived_places(people.job, table, files, before, Values.of("id", {"dora"}))
    assert got == {}


def test_erased_records_leave_every_branch_and_the_account_closes(people: People) -> None:
    assert (people.names("main").count("anna"), len(people.letters("speed"))) == (4, 3)
    done = people.erase()
    assert (done.removed.rows, done.removed.dead, done.removed.hours) == (4, 2, (FIRST, NEXT))
    assert done.left is None and done.erasure.done is not None
    for branch in ("speed", "batch", "main"):
        assert "anna" not in people.names(branch)
    assert people.names("main") == ["bert", "bert", "carl", "carl"]
    assert people.letters("speed") == [b"annabel"]
    row = people.account(FIRST)
    assert (row.decision, row.good, row.erased) == ("accepted", 2, 2)
    assert [(p.good, p.erased, p.total) for p in row.partitions.values()] == [(2, 2, 8)]
    # Twice is once.
    again = people.erase()
    assert (again.erasure.id, again.removed) == (done.erasure.id, Found())


def test_dead_letters_of_an_accepted_hour_leave_its_account(tmp_path: Path) -> None:
    people = People(tmp_path, LETTERS)
    people.erase()
    for branch in ("speed", "batch", "main"):
        assert people.letters(branch) == [b"annabel"]
    row = people.account(FIRST)
    assert (row.good, row.dead, row.erased) == (2, 1, 4)
    assert [(p.good, p.dead, p.erased, p.total) for p in row.partitions.values()] == [(2, 1, 4, 8)]


def test_an_hour_may_have_many_files(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "FILES_A_COMMIT", 1)
    monkeypatch.setattr(rows, "ATTEMPTS", 2)
    done = people.erase()
    assert (done.removed.rows, done.removed.files) == (4, 3)
    assert not [b for b in ("speed", "batch", "main") if "anna" in people.names(b)]


FORMER = (Step.ERASE_FORMER_FOUND, Step.ERASE_FORMER_RECORDED)
STEPS = [step for step in Step if step.label.startswith("erase.") and step not in FORMER]
QUICK = (Step.ERASE_ARCHIVE_PUBLISHED, Step.ERASE_PUBLISHED, Step.ERASE_PLACES_PUBLISHED)


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(step, marks=() if step in QUICK else pytest.mark.full, id=step.label)
        for step in STEPS
    ],
)
def test_a_killed_erasure_is_continued(people: People, step: Step, tmp_path: Path) -> None:
    if "archive" in step.label:
        folder = tmp_path / "with-archive"
        folder.mkdir()
        people = People(folder, archive=True)
    kill_at(step.label, erase_in, people.lake.folder)
    done = people.erase()
    if "archive" in step.label:
        assert people.archived == {o: ARCHIVED[o] for o in (1, 3, 5)}
    assert done.erasure.done is not None
    assert people.names("main") == ["bert", "bert", "carl", "carl"]
    assert people.letters("speed") == [b"annabel"]
    row = people.account(FIRST)
    assert (row.good, row.erased) == (2, 2)
    erased = [r.erasure or {} for r in people.lake.ledger.history() if r.decision == "erased"]
    assert sum(e["rows"] for e in erased) == 4 and sum(e["dead"] for e in erased) == 2


AGAIN = (Step.ERASE_REQUESTED, Step.ERASE_RECORDED, Step.ERASE_PUBLISHED, Step.ERASE_FOUND_NOTHING)


@pytest.mark.parametrize("step", [pytest.param(step, id=step.label) for step in AGAIN])
def test_a_killed_request_again_is_continued(people: People, step: Step) -> None:
    people.erase()
    people._speed([(NEXT, 12 + o) for o in range(4)], 16, None)
    again = (people.lake.folder, replace(ORDER, again=True), 16)
    kill_at(step.label, erase_in, *again)
    erase_in(*again)
    # It is the second request, not a third one.
    done = [one.done is not None for one in people.lake.state().erasures.all]
    assert (done, people.names("main").count("anna")) == ([True, True], 0)
    erased = [r.erasure or {} for r in people.lake.ledger.history() if r.decision == "erased"]
    assert sum(e["rows"] for e in erased) == 6


def expire_with_a_tag(people: People) -> None:
    """The first hour expires, and a tag without an end has its rows."""
    table = people.lake.table()
    table.manage_snapshots().create_tag(table.metadata.refs["main"].snapshot_id, "audit").commit()
    state = people.lake.state()
    now = datetime.now(UTC)
    expired = plan_expire(state, [FIRST], (), {FIRST: 1}, "kept for 1 days", new_id(), now)
    people.lake.land(expired, state)


OF_FORMER = run.ErasureRequest("n", frozenset({"0"}), "case 4711", timedelta(days=2))


@pytest.mark.parametrize("step", [pytest.param(step, id=step.label) for step in FORMER])
def test_a_killed_erasure_names_files_of_former_snapshots(people: People, step: Step) -> None:
    expire_with_a_tag(people)
    kill_at(step.label, erase_in, people.lake.folder, OF_FORMER)
    done = people.erase(OF_FORMER)
    assert done.erasure.done is not None
    [status] = read_statuses(people.job, datetime.now(UTC))
    assert (status.hours, status.is_certificate) == ([FIRST], False)
    assert len([row for row in people.lake.ledger.history() if row.decision == "erased"]) == 1


def test_the_status_names_what_still_has_erased_records(people: People) -> None:
    done = people.erase()
    [status] = read_statuses(people.job, datetime.now(UTC), scan=True)
    assert (status.id, status.values, status.rows, status.dead_letters, status.scanned) == (
        done.erasure.id, 1, 4, 2, 0,
    )  # fmt: skip
    assert status.by is not None and status.by.why == "case 4711"
    assert not status.is_certificate
    assert [holder.name for holder in status.holders] == ["former snapshots", "former snapshots"]
    left = "replaced files are stored; referred to by former snapshots until"
    assert any(left in line for line in status.left)
    for path in people.lake.folder.rglob("*.parquet"):
        if any(str(path).endswith(Path(p).name) for p in _replaced(people)):
            path.unlink()
    [status] = read_statuses(people.job, datetime.now(UTC))
    assert status.is_certificate
    assert status_lines(status)[-1].strip().startswith("nothing is left; done")


def test_at_the_deadline_tags_snapshots_and_files_end(people: People) -> None:
    """The hazard: a tag without an end, day-old snapshots, files younger than three days."""
    table = people.lake.table()
    table.manage_snapshots().create_tag(table.metadata.refs["main"].snapshot_id, "audit").commit()
    people.erase(replace(ORDER, until=timedelta(days=2)))
    [status] = read_statuses(people.job, datetime.now(UTC))
    held = {(holder.name, holder.until) for holder in status.holders}
    assert held > {("tag audit", status.until)}
    maintain(people.job, datetime.now(UTC) + timedelta(days=1, hours=23))
    assert "audit" in people.lake.table().metadata.refs
    assert any(b"anna" in path.read_bytes() for path in people.lake.folder.rglob("*.parquet"))

    maintain(people.job, datetime.now(UTC) + timedelta(days=2, hours=1))
    assert "audit" not in people.lake.table().metadata.refs
    assert not [path for path in _replaced(people) if local_path(path).exists()]
    [status] = read_statuses(people.job, datetime.now(UTC))
    assert (status.holders, status.files, status.left) == ([], 0, [])
    assert status.is_certificate


@pytest.mark.parametrize("moves", [False, True])
def test_a_branch_of_another_program_is_named_and_stays(
    people: People, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    if moves:
        monkeypatch.setattr(end, "MAX_CLOCK_SKEW", timedelta(0))
    table = people.lake.table()
    main = table.metadata.refs["main"].snapshot_id
    table.manage_snapshots().create_branch(main, "theirs").commit()
    people.erase(replace(ORDER, until=timedelta(0)))
    if moves:
        before = people.lake.state().erasures.changed
        moved = people.lake.foreign_commit("theirs")
        made = people.lake.table().snapshot_by_id(moved)
        assert made is not None and before is not None
        assert made.timestamp_ms > before.timestamp() * 1000
    later = datetime.now(UTC) + timedelta(days=3)
    maintain(people.job, later)
    [status] = read_statuses(people.job, later)
    assert [(holder.name, holder.until) for holder in status.holders] == [("branch theirs", None)]
    of_others = "branch theirs: `anabranch maintain` drops no branch of another program; drop it"
    assert of_others in status.left
    people.lake.table().manage_snapshots().remove_branch("theirs").commit()
    maintain(people.job, later)
    assert read_statuses(people.job, later)[0].is_certificate


def test_a_branch_set_back_is_named_and_searched_again(people: People) -> None:
    before = people.lake.table().metadata.refs["batch"].snapshot_id
    people.erase()
    account = people.account(FIRST)
    people.lake.set_back("batch", before)
    [status] = read_statuses(people.job, datetime.now(UTC))
    found = "branch batch of games.events was set back and has 1 replaced files again: run"
    assert status.left[0].startswith(found)
    assert (people.erase().removed.rows, people.names("batch").count("anna")) == (2, 0)
    assert people.names("main").count("anna") == 0
    row = people.account(FIRST)
    assert (row.good, row.erased) == (account.good, account.erased)
    assert row.partitions == account.partitions
    assert "set back" not in read_statuses(people.job, datetime.now(UTC))[0].left[0]


@pytest.mark.parametrize(
    "step", [Step.MAINTAIN_ENDED, Step.MAINTAIN_VERSIONS_DELETED], ids=lambda step: step.label
)
def test_the_end_of_an_erasure_is_continued_after_a_kill(people: People, step: Step) -> None:
    people.erase(replace(ORDER, until=timedelta(0)))
    kill_at(step.label, maintain_later, people.lake.folder)
    maintain_later(people.lake.folder)
    assert read_statuses(people.job, datetime.now(UTC))[0].is_certificate


def _replaced(people: People) -> list[str]:
    rows = people.lake.ledger.history()
    return [path for row in rows if row.erasure is not None for path in row.erasure["files"]]


def test_what_an_order_needs_and_whole_numbers_as_the_column_has_them(people: People) -> None:
    found = "expected a column of type STRING, INT or BIGINT, found date"
    with pytest.raises(ConfigurationError, match=found):
        people.erase(replace(ORDER, column="event_date"))
    with pytest.raises(ConfigurationError, match="expected 1 to 100,000 values"):
        people.erase(replace(ORDER, values=frozenset()))
    job = replace(people.job, environment=new_environment(people.lake.folder))
    with pytest.raises(ConfigurationError, match=r"erasure\.key: expected a secret"):
        run.erase(job, Publisher(job.lake, job.stream), ORDER)
    assert people.lake.state().erasures == Erasures()
    for value in ("--5", "007", "+7", "7.0", " 7", "x", "-0", "٣"):
        found = "expected whole numbers without leading zeros, such as 4711"
        with pytest.raises(ConfigurationError, match=found):
            people.erase(run.ErasureRequest("n", frozenset({"8", value}), "case 4711"))
    with pytest.raises(ConfigurationError, match=r"for column n, found 'x' and 1 others"):
        scan(people.job, Values.of("n", {"x", "y", "8"}))
    assert people.lake.state().erasures == Erasures()
    done = people.erase(run.ErasureRequest("n", frozenset({"8", "-8", "0"}), "case 4711"))
    assert done.removed.rows == 2


def test_records_that_arrived_since_are_erased_by_a_request_again(people: People) -> None:
    first = people.erase()
    people._speed([(NEXT, 12 + o) for o in range(4)], 16, None)
    job = job_of(people.lake.environment, people.lake.lake, records=16)
    publisher, again = Publisher(job.lake, job.stream), replace(ORDER, again=True)
    same = run.erase(job, publisher, ORDER)
    assert (same.erasure.id, same.was_done) == (first.erasure.id, True)
    assert people.names("main").count("anna") == 2
    second = run.erase(job, publisher, again)
    assert (second.removed.rows, second.was_done) == (2, False)
    assert people.names("main").count("anna") == 0
    assert second.erasure.id != first.erasure.id
    # The newer request is now the one that continues.
    assert run.erase(job, publisher, ORDER).erasure.id == second.erasure.id
    ids = {status.id for status in read_statuses(job, datetime.now(UTC))}
    assert ids == {first.erasure.id, second.erasure.id}


def test_an_erasure_that_is_not_done_goes_on_under_a_new_key(people: People) -> None:
    behind = replace(people.job, kafka=Broker(log={0: [0] * 13}).adapter)
    first = run.erase(behind, Publisher(behind.lake, behind.stream), ORDER)
    assert first.erasure.done is None and people.job.environment.erasure is not None
    former = people.job.environment.erasure.key
    keys = ErasureKeys(key=(SecretStr("another key of tests"), *former))
    job = replace(behind, environment=behind.environment.model_copy(update={"erasure": keys}))
    people._speed([(NEXT, 12)], 13, None)
    done = run.erase(job, Publisher(job.lake, job.stream), ORDER)
    assert (done.erasure.id, done.erasure.done is not None) == (first.erasure.id, True)
    # Once it is done, the same values under the new key are a new erasure.
    assert run.erase(job, Publisher(job.lake, job.stream), ORDER).erasure.id != first.erasure.id


def test_a_topic_that_was_made_again_is_adopted_first(people: People) -> None:
    """The old topic's records were accepted before the request, and no erasure would cover them."""
    job = replace(people.job, kafka=Broker("u", log={0: [0]}).adapter)
    with pytest.raises(PositionError, match="anabranch adopt"):
        run.erase(job, Publisher(job.lake, job.stream), ORDER)
    assert people.lake.state().erasures == Erasures()
    gone = replace(people.job, kafka=Broker(None).adapter)
    assert run.erase(gone, Publisher(job.lake, job.stream), ORDER).erasure.ends == {0: 12}


def test_records_of_open_transactions_were_accepted_before_the_request(people: People) -> None:
    job = replace(people.job, kafka=Broker(log={0: [0] * 12}, undecided=3).adapter)
    done = run.erase(job, Publisher(job.lake, job.stream), ORDER)
    assert done.erasure.ends == {0: 15}
    assert done.erasure.done is None and "are yet to be read" in (done.left or "")


def test_an_erasure_of_a_stream_that_has_read_nothing_is_of_what_kafka_has() -> None:
    opened, before = hours.Timeline(FIRST, FIRST, {}), position.Position("", {})
    waiting = new_state(opened, position=before, erasures=Erasures((ONE,)))
    assert not erasure.is_read(waiting, ONE)
    over = replace(waiting, erasures=Erasures((replace(ONE, done=NOW),)))
    assert erasure.plan_forget(over, {0: 9}, {"e"}, "id", NOW + timedelta(days=31)) is None
    assert erasure.is_read(replace(waiting, position=position.Position("t", {0: 10})), ONE)
    assert erasure.is_read(replace(waiting, position=position.Position("u", {})), ONE)


def test_letters_leave_in_several_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "FILES_A_COMMIT", 1)
    people, plan, planned = People(tmp_path, LETTERS), erasure.plan_letters, list[int]()

    def left_meanwhile(table: Table, state: Any, rewritten: Any, *of: Any) -> Any:
        planned.append(len(rewritten))
        return plan(table, state, rewritten, *of) if len(planned) > 1 else None

    monkeypatch.setattr(erasure, "plan_letters", left_meanwhile)
    assert people.erase().removed.dead == 2
    assert planned == [1, 1, 1]
    assert all(people.letters(branch) == [b"annabel"] for branch in ("speed", "batch", "main"))


def test_archived_records_alone_are_no_change(tmp_path: Path) -> None:
    people = People(tmp_path, archive=True)
    [change] = poll(people.job, Token("events"))
    done = people.erase(replace(ORDER, values=frozenset({"again"})))
    assert 7 not in people.archived and done.removed == Found()
    assert not list(poll(people.job, Token.decode(change.token)))


def test_files_that_nothing_refers_to_withhold_the_certificate(people: People) -> None:
    """The hazard: a compaction replaced the only file with the values; its snapshots expired."""
    source = people.files("main")[0]
    source.with_name("compacted-before.parquet").write_bytes(source.read_bytes())
    assert people.erase(replace(ORDER, values=frozenset({"nobody"}))).removed == Found()
    [status] = read_statuses(people.job, datetime.now(UTC))
    [left] = status.left
    assert left.startswith("1 files from before ")
    assert "that nothing refers to are stored; `anabranch maintain`" in left
    maintain(people.job, datetime.now(UTC) + timedelta(days=4))
    assert not source.with_name("compacted-before.parquet").exists()
    assert read_statuses(people.job, datetime.now(UTC))[0].is_certificate


def test_files_that_former_snapshots_alone_have_end_with_the_erasure(people: People) -> None:
    """The hazard: the hour has expired, and a tag without an end has it."""
    expire_with_a_tag(people)
    assert people.names("main") == sorted(NAMES)
    # Only the expired hour had the value.
    done = people.erase(OF_FORMER)
    assert done.removed == Found() and done.erasure.done is not None
    [status] = read_statuses(people.job, datetime.now(UTC))
    assert (status.hours, status.is_certificate) == ([FIRST], False)
    assert "tag audit" in {holder.name for holder in status.holders}
    assert people.account(FIRST).decision == "expired"
    later = datetime.now(UTC) + timedelta(days=2, hours=1)
    maintain(people.job, later)
    assert "audit" not in people.lake.table().metadata.refs
    assert scan(people.job, Values.of("n", {"0"})).hits == ()
    assert read_statuses(people.job, later)[0].is_certificate
    # Twice is once.
    again = run.ErasureRequest("n", frozenset({"0"}), "case 4711")
    with people.lake.unmoved():
        assert people.erase(again).removed == Found()


def test_the_command(people: People, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("anabranch.job.open_job", lambda *_: people.job)
    values = tmp_path / "values.txt"
    # An editor on Windows writes this.
    values.write_bytes(b"\xef\xbb\xbfanna\r\n\r\n")
    given = ["erase", "events", "--by", "id", "--values", str(values), "--why", "case 4711"]
    assert run.find(people.job, replace(ORDER, values=frozenset({"dora"}))) == Found()
    with people.lake.unmoved():
        assert "would erase 4 rows and 2 dead letters of 2 hours" in said(*given, "--dry-run")
    assert "removed 4 rows and 2 dead letters" in said(*given)
    found = said("erasures", "events", "--verify", expect=1)
    assert "a scan of every branch found 0 rows" in found
    said("erase", "events", expect=2)
    values.write_text("anna\n", encoding="utf-16")
    assert "expected a file in UTF-8" in said(*given, expect=2)
    again = said(*given[:5], "-", *given[6:], input=b"\xef\xbb\xbfanna\n")
    assert "removed 0 rows" in again and "--again erases those since" in again


def test_a_layer_leaves_out_values_and_places_by_the_key_of_the_request(people: People) -> None:
    people.erase()
    job, state = people.job, people.lake.state()
    ranges: Any = {FIRST: {0: (0, 8)}, NEXT: {0: (8, 20)}}
    first, second = load_filter(job.environment, job.stream, job.ledger, state, "t", ranges)
    assert (first.places, second.places) == ({(0, 4), (0, 6)}, frozenset())
    values = (*first.values, *second.values)
    found = [(v.column, v.ranges, v.matches("anna"), v.matches("bert")) for v in values]
    assert found == [("id", {0: (0, 8)}, True, False), ("id", {0: (8, 12)}, True, False)]
    # A micro-batch of later records is staged as ever.
    found = load_filter(job.environment, job.stream, job.ledger, state, "t", {NEXT: {0: (12, 20)}})
    assert found == ()
    assert not state.erasures.marks(NEXT, "t", {0: (12, 20)})
    key, ranges = SecretStr("another key of tests"), {FIRST: {0: (0, 8)}}
    changed = job.environment.model_copy(update={"erasure": ErasureKeys(key=(key,))})
    with pytest.raises(ConfigurationError, match=r"add the former key to `erasure\.key`"):
        load_filter(changed, job.stream, job.ledger, state, "t", ranges)
    assert job.environment.erasure is not None
    keys = ErasureKeys(key=(key, *job.environment.erasure.key))
    both = changed.model_copy(update={"erasure": keys})
    both_left_out = load_filter(both, job.stream, job.ledger, state, "t", ranges)
    assert both_left_out[0].values[0].matches("anna")


def made_of(job: Job, source: object, secret: str | None = None) -> Job:
    """The job with another source of the column `id`."""
    fields = parse_columns(DDL)
    select = parse_select([{"id": source}, "n"], fields)
    stream = job.stream.model_copy(update={"select": select, "fields": fields})
    masking = Masking(secret=SecretStr(secret)) if secret is not None else Masking()
    environment = job.environment.model_copy(update={"masking": masking})
    return replace(job, stream=stream, environment=environment)


def test_another_source_of_the_column_brings_no_erased_record_back(people: People) -> None:
    people.erase()
    job, state = people.job, people.lake.state()
    ranges: Any = {FIRST: {0: (0, 8)}}

    def load(job: Job, of: Any = ranges) -> object:
        return load_filter(job.environment, job.stream, job.ledger, state, "t", of)

    assert load(job) and load(made_of(job, "id"))
    lower = made_of(job, {"sql": "lower(id)", "type": "STRING"})
    before = heads(people.lake.table())
    found = r'select: id: expected "id", as when erasure \w+ was requested, found {"sql": "lower\(id\)".*; restore it until'
    with pytest.raises(ConfigurationError, match=found):
        load(lower)
    with pytest.raises(ConfigurationError, match=found):
        apply.apply(lower.environment, lower.stream, lower.lake, lower.kafka)
    assert heads(people.lake.table()) == before
    # Records that arrived since are of no erasure.
    assert load(lower, {NEXT: {0: (12, 20)}}) == ()


def test_another_secret_of_a_hashed_column_brings_no_erased_record_back(people: People) -> None:
    job = made_of(people.job, {"hash": "id"}, "a secret of a hashed column")
    run.erase(job, Publisher(job.lake, job.stream), replace(ORDER, values=frozenset({"0af3"})))
    state, ranges = people.lake.state(), {FIRST: {0: (0, 8)}}
    assert load_filter(job.environment, job.stream, job.ledger, state, "t", ranges)
    other = made_of(job, {"hash": "id"}, "another secret of the column")
    found = r'expected {"hash": "id"} by secret \w{16}, as .*, found {"hash"'
    with pytest.raises(ConfigurationError, match=found):
        load_filter(other.environment, other.stream, other.ledger, state, "t", ranges)


@pytest.mark.parametrize(
    ("start", "days", "is_finished", "is_over"),
    [(12, 31, True, True), (11, 31, True, False), (12, 29, True, False), (12, 31, False, False)],
    ids=("over", "in Kafka", "early", "something is left"),
)
def test_an_erasure_is_forgotten_once_kafka_has_none_of_its_records(
    people: People, start: int, days: int, is_finished: bool, is_over: bool
) -> None:
    one = people.erase().erasure
    job = replace(people.job, kafka=Starts(log={0: [0] * 12}, start=start).adapter)
    later = datetime.now(UTC) + timedelta(days=days)
    publisher, done = Publisher(job.lake, job.stream), {one.id} if is_finished else set()
    forgotten = end.forget(job, publisher, done, later)
    assert (forgotten, people.lake.state().erasures.of(one.id) is None) == (int(is_over), is_over)


@pytest.mark.parametrize(
    ("hour", "is_over"), [(FIRST, False), (NEXT, True)], ids=("before", "after")
)
def test_an_erasure_is_kept_with_the_archive(people: People, hour: str, is_over: bool) -> None:
    """A record whose bytes show no value would be a row again, from the archive."""
    state, one = people.lake.state(), people.erase().erasure
    accepted = {NEXT: Accepted(1, hours.Cut("t", {0: (12, 20)}))}
    state = replace(people.lake.state(), accepted=people.lake.state().accepted | accepted)
    plan = partial(erasure.plan_forget, state, {0: 12}, {one.id}, "id", NOW + timedelta(days=400))
    assert plan() is not None
    assert (plan([hour]) is not None) == is_over
    # An hour about which nothing is known may contain any of its records.
    assert plan([hours.shift(NEXT, 1)]) is None


ONE = Erasure("e", "id", NOW, NOW + timedelta(days=30), NEXT, "t", {0: 10})


@pytest.mark.parametrize(
    ("hour", "topic_id", "ranges", "covered"),
    [
        (NEXT, "t", {0: (5, 20)}, {0: (5, 10)}),
        (NEXT, "t", {0: (10, 20), 1: (0, 4)}, {}),
        (NEXT, "u", {0: (5, 20)}, {}),
        (FIRST, "u", {0: (5, 20), 1: (3, 3)}, {0: (5, 20)}),
    ],
)
def test_an_erasure_is_of_the_past(hour: str, topic_id: str, ranges: Any, covered: Any) -> None:
    assert ONE.covered(hour, topic_id, ranges) == covered


def test_an_erasure_is_of_every_partition_of_a_log_that_was_left(tmp_path: Path) -> None:
    """The hazard: the topic was made again with fewer partitions, and adopted."""
    left = hours.Adoption(FIRST, "old", {0: 0})
    lake = new_lake(tmp_path, timeline=hours.Timeline(FIRST, NEXT, {0: 0}, adoptions=(left,)))
    code = {"topic_id": "old", "layer": "speed", "error_code": "malformed_json"}
    letter = record(FIRST, 7, 1, b"7-0 and more", **code)
    dead = stage(lake.lake, lake.stream.dead_letters_table, [letter], protected=True)
    staged = lake.stage([(FIRST, 7, 0), (FIRST, 0, 0)])
    lake.land(lake.speed(staged, {0: 0}, dead_letters=(dead_letters.waiting_speed(dead, NOW),)))
    job = job_of(lake.environment, lake.lake, records=0)
    order = run.ErasureRequest("id", frozenset({"7-0"}), "case 4711")
    done = run.erase(job, Publisher(job.lake, job.stream), order)
    assert (done.removed.rows, done.removed.dead, done.left) == (1, 1, None)
    assert lake.rows("main") == [(FIRST, 0, 0)] and not lake.dead("speed")


def test_the_furthest_state_of_an_erasure_counts() -> None:
    further = replace(ONE, places={FIRST: 1}, changed=NOW)
    done, other = replace(further, done=NOW), replace(ONE, id="f")
    branches = [{"anabranch.erasures": Erasures((one,)).to_json()} for one in (done, ONE, further)]
    branches.append({"anabranch.erasures": Erasures((other,)).to_json()})
    assert Erasures.of_branches(branches).all == (done, other)
    assert Erasures.of_branches([{}]) == Erasures()
