"""The ledger is lost or set back during an erasure: all stops, and the same command repairs it."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from accepted_hours import confirm
from brokers import Broker
from conf_folders import said
from lakes import FIRST
from people import LETTERS, NEXT, ORDER, People, job_of
from run_books import printed

from anabranch.common.errors import Terminal
from anabranch.lifecycle.erasure import run
from anabranch.lifecycle.erasure.status import read_statuses
from anabranch.lifecycle.maintenance import maintain
from anabranch.operations.doctor import streams
from anabranch.operations.finding import Issue
from anabranch.operations.reports.status import status
from anabranch.protocol import apply, erasure
from anabranch.protocol.erasure import HourFilter, load_filter
from anabranch.protocol.publisher import Publisher

RANGES: Any = {FIRST: {0: (0, 8)}}


@pytest.fixture
def people(tmp_path: Path) -> People:
    return People(tmp_path)


def drop(people: People) -> None:
    people.lake.lake.catalog.drop_table(people.lake.stream.hours_table)
    apply.apply(people.job.environment, people.lake.stream, people.lake.lake, people.job.kafka)


def set_back_to(decision: str) -> Callable[[People], None]:
    """Set the ledger back to its first snapshot with such a row."""

    def set_back(people: People) -> None:
        name = people.lake.stream.hours_table
        table = people.lake.lake.load(name)
        ids = [s.snapshot_id for s in table.snapshots()]
        decisions = (table.scan(snapshot_id=id).to_arrow()["decision"].to_pylist() for id in ids)
        wanted = next(id for id, found in zip(ids, decisions, strict=True) if decision in found)
        people.lake.set_back("main", wanted, name)

    return set_back


LOST = pytest.mark.parametrize(
    "lose",
    [drop, set_back_to("accepted"), set_back_to("erasing")],
    ids=("dropped", "before the request", "after the request"),
)


def erase_and(people: People, lose: Callable[[People], None], **order: Any) -> None:
    people.erase(replace(ORDER, **order))
    people.lake.publisher.recover()
    confirm(people.lake)
    lose(people)
    erasure._REQUESTS.clear()


def filter_of(people: People) -> tuple[HourFilter, ...]:
    job, state = people.job, people.lake.state()
    return load_filter(job.environment, job.stream, job.ledger, state, "t", RANGES)


@LOST
def test_the_command_repairs_a_lost_erasure(people: People, lose: Callable[[People], None]) -> None:
    erase_and(people, lose)
    with pytest.raises(Terminal, match="run `anabranch erase` with the same values"):
        filter_of(people)
    [status] = read_statuses(people.job, datetime.now(UTC))
    assert "the ledger lost its rows" in status.left[0] and not status.is_certificate
    done = people.erase()
    assert (done.left, done.erasure.done is not None) == (None, True)
    # Former snapshots of the dead letters still have them.
    assert filter_of(people)[0].places == {(0, 4), (0, 6)}
    [status] = read_statuses(people.job, datetime.now(UTC), scan=True)
    assert (status.values, status.scanned, status.dead_letters) == (1, 0, 2)
    # Of rows whose files only former snapshots have.
    assert (status.hours, status.is_certificate) == ([FIRST, NEXT], False)
    # Twice is once.
    heads = people.lake.state().heads
    people.erase()
    assert people.lake.state().heads == heads


def test_run_book_repairs(people: People, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    erase_and(people, drop)
    monkeypatch.setattr("anabranch.job.open_job", lambda *_: people.job)
    values = tmp_path / "values.txt"
    values.write_text("anna\n")
    given = {"STREAM": "events", "COLUMN": "id", "FILE": str(values), "TEXT": "again"}
    command = printed("anabranch erase STREAM --by COLUMN --values FILE --why TEXT", **given)
    said(*command.split()[1:])
    assert filter_of(people) is not None


@LOST
def test_a_repaired_erasures_copies_end(people: People, lose: Callable[[People], None]) -> None:
    table = people.lake.table()
    table.manage_snapshots().create_tag(table.metadata.refs["main"].snapshot_id, "audit").commit()
    erase_and(people, lose, until=timedelta(0))
    people.erase(replace(ORDER, until=timedelta(0)))
    later = datetime.now(UTC) + timedelta(days=3)
    maintain(people.job, later)
    assert "audit" not in people.lake.table().metadata.refs
    assert read_statuses(people.job, later)[0].is_certificate


@LOST
def test_places_without_rows_withhold_it(people: People, lose: Callable[[People], None]) -> None:
    """A rebuild from Kafka brings the dead letter back, and the next run removes it."""

    def lose_both(people: People) -> None:
        lose(people)
        maintain(people.job, datetime.now(UTC) + timedelta(days=9))

    erase_and(people, lose_both)
    done = people.erase()
    assert done.erasure.done is None and "the ledger lost the places" in (done.left or "")
    assert filter_of(people)[0].places == frozenset()
    [status] = read_statuses(people.job, datetime.now(UTC))
    assert any("the ledger lost the places" in line for line in status.left)
    people._speed([(NEXT, 12)], 13, people._dead(LETTERS[2:], "speed"))
    people.lake.publisher.recover()
    assert people.erase().removed.dead == 1
    assert people.letters("speed") == []
    assert filter_of(people)[0].places == {(0, 6)}
    job = job_of(people.lake.environment, people.lake.lake)
    kafka = replace_starts(job, 12)
    done = run.erase(kafka, Publisher(kafka.lake, kafka.stream), ORDER)
    assert (done.left, done.erasure.done is not None) == (None, True)


def replace_starts(job: Any, start: int) -> Any:
    from test_erasure import Starts

    return replace(job, kafka=Starts(log={0: [0] * 13}, start=start).adapter)


def test_the_doctor_names_an_erasure_that_is_not_done(people: People) -> None:
    job = replace(people.job, kafka=Broker(log={0: [0] * 12}, undecided=3).adapter)
    erased = run.erase(job, Publisher(job.lake, job.stream), ORDER).erasure
    assert erased.done is None
    state = people.lake.state()
    assert streams.unfinished(state, erased.at + timedelta(hours=23)) == ()
    late = streams.unfinished(state, erased.at + timedelta(hours=25))
    found = streams.findings(job.stream, streams.StreamFacts(status(job), {}, unfinished=late))
    [finding] = [finding for finding in found if finding.check is Issue.ERASURE]
    assert finding.subject == f"events {erased.id}"
    assert finding.remedy == printed("anabranch erasures STREAM", STREAM="events")
