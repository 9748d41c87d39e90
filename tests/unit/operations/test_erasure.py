"""Erasure: records with some values of a column leave every branch, whatever is killed, and the account closes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from brokers import Broker
from click.testing import CliRunner
from killed import kill_at
from lakes import FIRST, new_environment, new_lake, new_stream, stage
from pydantic import SecretStr
from pyiceberg.io.pyarrow import schema_to_pyarrow

from anabranch.cli import main
from anabranch.common.errors import ConfigurationError
from anabranch.common.fail_points import Step
from anabranch.config.environment import Erasure as ErasureKeys
from anabranch.iceberg.commits import Outcome
from anabranch.iceberg.lake import Lake
from anabranch.job import Job
from anabranch.offsets.hours import Cut, Timeline, shift
from anabranch.offsets.position import Topic
from anabranch.operations.erasure import run
from anabranch.operations.erasure.search import find_words, forms_of
from anabranch.operations.erasure.status import read_statuses, status_lines
from anabranch.protocol import ledger
from anabranch.protocol.dead_letters import waiting_batch, waiting_speed
from anabranch.protocol.erased import Erasure, Erasures
from anabranch.protocol.erasure_filter import load_filter
from anabranch.protocol.ledger_row import Account, HourAccount
from anabranch.protocol.publisher import Publisher
from anabranch.protocol.state import Accepted

NEXT = shift(FIRST, 1)
CUT = Cut("t", {0: (0, 8)})
NOW = datetime(2026, 11, 21, 5, tzinfo=UTC)
ORDER = run.Order("id", frozenset({"anna"}), "case 4711")
NAMES = ("anna", "bert", "anna", "carl")
Letters = Sequence[tuple[str, int, bytes]]
LETTERS: Letters = ((FIRST, 4, b'{"id": "anna", '), (FIRST, 5, b"annabel"), (FIRST, 6, b"x anna y"))


class People:
    """A stream of people: an hour that both layers have, the next one that only the speed layer has, and dead
    letters."""

    def __init__(self, folder: Path, of_batch: Letters = ()) -> None:
        timeline = Timeline(FIRST, NEXT, {0: 8}, sealed={FIRST: CUT})
        self.lake = new_lake(folder, timeline=timeline)
        lake = self.lake
        dead = self._dead(LETTERS, "speed")
        self._speed([(FIRST, o) for o in range(4)], 8, dead)
        self._speed([(NEXT, 8 + o) for o in range(4)], 12, None)
        self._accept(of_batch)
        Publisher(lake.lake, lake.stream).recover()

    def _rows(self, rows: list[tuple[str, int]]) -> Any:
        schema = schema_to_pyarrow(self.lake.table().schema())
        values = [
            {
                "id": NAMES[o % 4], "n": o, "kafka_partition": 0, "kafka_offset": o, "kafka_timestamp": NOW,
                "ingest_hour": hour, "event_date": date(2026, 11, 21),
            }
            for hour, o in rows
        ]  # fmt: skip
        return stage(self.lake.lake, self.lake.name, pa.Table.from_pylist(values, schema=schema))

    def _dead(self, letters: Letters, layer: str) -> Any:
        name = self.lake.stream.dead_letters_table
        schema = schema_to_pyarrow(self.lake.lake.load(name).schema())
        values = [
            {
                "topic_id": "t", "kafka_partition": 0, "kafka_offset": o, "ingest_hour": hour, "value": value,
                "error_code": "malformed_json", "layer": layer,
            }
            for hour, o, value in letters
        ]  # fmt: skip
        return stage(self.lake.lake, name, pa.Table.from_pylist(values, schema=schema), protected=True)

    def _speed(self, rows: list[tuple[str, int]], end: int, dead: Any) -> None:
        staged = self._rows(rows)
        letters = {"dead_letters": (waiting_speed(dead, NOW),)} if dead is not None else {}
        assert self.lake.publish(self.lake.speed(staged, {0: end}, **letters)) is Outcome.LANDED

    def _accept(self, letters: Letters) -> None:
        staged, dead = self._rows([(FIRST, o) for o in range(4)]), self._dead(letters, "batch") if letters else None
        state = self.lake.state()
        waiting = state.dead_letters if dead is None else (*state.dead_letters, waiting_batch(dead, FIRST, 1, NOW))
        partitions = {0: Account(8, 4, 3, 0, {"control": 1})}
        account = HourAccount(offsets=8, good=4, dead=3, duplicate=0, gap=1, gaps={"control": 1}, partitions=partitions)
        row = ledger.decision(FIRST, "accepted", 1, CUT, NOW, served="batch", account=account)
        accepted = self.lake.accept(
            staged, FIRST, Accepted(1, CUT), state, decisions=(row,), timeline=replace(state.timeline, sealed={}),
            dead_letters=waiting,
        )  # fmt: skip
        assert self.lake.publish(accepted, state) is Outcome.LANDED

    @property
    def job(self) -> Job:
        return job_of(self.lake.folder, self.lake.lake)

    def erase(self, order: run.Order = ORDER) -> run.Erased:
        return run.erase(self.job, Publisher(self.lake.lake, self.lake.stream), order)

    def names(self, branch: str) -> list[str]:
        table = self.lake.table()
        rows = table.scan(snapshot_id=table.metadata.refs[branch].snapshot_id).to_arrow()
        return sorted(rows["id"].to_pylist())

    def letters(self, branch: str) -> list[bytes]:
        table = self.lake.lake.load(self.lake.stream.dead_letters_table)
        rows = table.scan(snapshot_id=table.metadata.refs[branch].snapshot_id).to_arrow()
        return sorted(rows["value"].to_pylist())

    def account(self, hour: str) -> Any:
        return ledger.newest(self.lake.ledger.history([hour])).get(hour)


@dataclass
class Starts(Broker):
    """A topic whose log begins later."""

    start: int = 0

    def log_starts(self, topic: Topic) -> dict[int, int]:
        return dict.fromkeys(topic.partitions, self.start)


def job_of(folder: Path, lake: Lake) -> Job:
    keyed = new_environment(folder).model_copy(update={"erasure": ErasureKeys(key=SecretStr("a key of unit tests"))})
    return Job(keyed, new_stream(), lake, Broker(log={0: [0] * 12}).adapter)


def erase_in(folder: Path) -> None:
    """The command in a process of its own."""
    job = job_of(folder, Lake(new_environment(folder)))
    run.erase(job, Publisher(job.lake, job.stream), ORDER)


@pytest.fixture
def people(tmp_path: Path) -> People:
    return People(tmp_path)


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
    assert (again.erasure.id, again.removed) == (done.erasure.id, run.Found())


def test_dead_letters_of_an_accepted_hour_leave_its_account(tmp_path: Path) -> None:
    people = People(tmp_path, LETTERS)
    people.erase()
    for branch in ("speed", "batch", "main"):
        assert people.letters(branch) == [b"annabel"]
    row = people.account(FIRST)
    assert (row.good, row.dead, row.erased) == (2, 1, 4)
    assert [(p.good, p.dead, p.erased, p.total) for p in row.partitions.values()] == [(2, 1, 4, 8)]


def test_an_hour_may_have_more_files_than_commits_are_tried(people: People, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_FILES_A_COMMIT", 1)
    monkeypatch.setattr(run, "_ATTEMPTS", 2)
    done = people.erase()
    assert (done.removed.rows, done.removed.files) == (4, 3)
    assert "anna" not in {name for branch in ("speed", "batch", "main") for name in people.names(branch)}


STEPS = [step for step in Step if step.label.startswith("erase.")]
QUICK = (Step.ERASE_PUBLISHED, Step.ERASE_PLACES_PUBLISHED)


@pytest.mark.parametrize(
    "step",
    [pytest.param(step, marks=() if step in QUICK else pytest.mark.full, id=step.label) for step in STEPS],
)
def test_an_erasure_that_is_killed_is_continued_by_the_same_command(people: People, step: Step) -> None:
    kill_at(step.label, erase_in, people.lake.folder)
    done = people.erase()
    assert done.erasure.done is not None
    assert people.names("main") == ["bert", "bert", "carl", "carl"]
    assert people.letters("speed") == [b"annabel"]
    row = people.account(FIRST)
    assert (row.good, row.erased) == (2, 2)
    erased = [r.erasure or {} for r in people.lake.ledger.history() if r.decision == "erased"]
    assert sum(e["rows"] for e in erased) == 4 and sum(e["dead"] for e in erased) == 2


def test_the_status_names_what_still_has_erased_records(people: People) -> None:
    done = people.erase()
    [status] = read_statuses(people.job, datetime.now(UTC), scan=True)
    assert (status.id, status.values, status.rows, status.dead_letters, status.scanned) == (
        done.erasure.id, 1, 4, 2, 0,
    )  # fmt: skip
    assert status.by is not None and status.by.why == "case 4711"
    assert not status.is_certificate
    assert [holder.name for holder in status.holders] == ["former snapshots", "former snapshots"]
    assert any("replaced files are stored; referred to by former snapshots until" in line for line in status.left)
    for path in people.lake.folder.rglob("*.parquet"):
        if any(str(path).endswith(Path(p).name) for p in _replaced(people)):
            path.unlink()
    [status] = read_statuses(people.job, datetime.now(UTC))
    assert status.is_certificate
    assert status_lines(status)[-1].strip().startswith("nothing is left; done")


def _replaced(people: People) -> list[str]:
    rows = people.lake.ledger.history()
    return [path for row in rows if row.erasure is not None for path in row.erasure["files"]]


def test_what_an_order_needs(people: People) -> None:
    with pytest.raises(ConfigurationError, match="expected a column of type STRING, INT or BIGINT, found date"):
        people.erase(replace(ORDER, column="event_date"))
    with pytest.raises(ConfigurationError, match="expected 1 to 100,000 values"):
        people.erase(replace(ORDER, values=frozenset()))
    job = replace(people.job, environment=new_environment(people.lake.folder))
    with pytest.raises(ConfigurationError, match=r"erasure\.key: expected a secret"):
        run.erase(job, Publisher(job.lake, job.stream), ORDER)
    assert people.lake.state().erasures == Erasures()


def test_a_dry_run_counts_and_changes_nothing(people: People) -> None:
    heads = people.lake.state().heads
    found = run.find(people.job, ORDER)
    assert (found.rows, found.dead, found.hours) == (4, 2, (FIRST, NEXT))
    assert people.lake.state().heads == heads
    assert run.find(people.job, replace(ORDER, values=frozenset({"dora"}))) == run.Found()


def test_the_command(people: People, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("anabranch.cli.operate.open_stream", lambda *_: people.job)
    values = tmp_path / "values.txt"
    values.write_text("anna\n\n")
    given = ["erase", "events", "--by", "id", "--values", str(values), "--why", "case 4711"]
    call = CliRunner().invoke
    assert "would erase 4 rows and 2 dead letters of 2 hours" in call(main, [*given, "--dry-run"]).output
    assert "removed 4 rows and 2 dead letters" in call(main, given, catch_exceptions=False).output
    status = call(main, ["erase", "events", "--status", "--verify"], catch_exceptions=False)
    assert (status.exit_code, "a scan of every branch found 0 rows" in status.output) == (1, True)
    assert call(main, ["erase", "events"]).exit_code == 2


def test_a_layer_leaves_out_values_and_places(people: People) -> None:
    people.erase()
    job, state = people.job, people.lake.state()
    ranges: Any = {FIRST: {0: (0, 8)}, NEXT: {0: (8, 20)}}
    left_out = load_filter(job.environment, job.ledger, state, "t", ranges)
    assert left_out is not None
    first, second = left_out.hours
    assert (first.places, second.places) == ({(0, 4), (0, 6)}, frozenset())
    assert [(v.column, v.ranges, v.matches("anna"), v.matches("bert")) for v in (*first.values, *second.values)] == [
        ("id", {0: (0, 8)}, True, False), ("id", {0: (8, 12)}, True, False),
    ]  # fmt: skip
    # A micro-batch of later records is staged as ever.
    assert load_filter(job.environment, job.ledger, state, "t", {NEXT: {0: (12, 20)}}) is None
    assert not state.erasures.marks(NEXT, "t", {0: (12, 20)})


def test_a_key_that_is_missing(people: People) -> None:
    people.erase()
    job, state, key = people.job, people.lake.state(), SecretStr("another key of tests")
    ranges: Any = {FIRST: {0: (0, 8)}}
    changed = job.environment.model_copy(update={"erasure": ErasureKeys(key=key)})
    with pytest.raises(ConfigurationError, match=r"add the former key to `erasure\.former_keys`"):
        load_filter(changed, job.ledger, state, "t", ranges)
    assert job.environment.erasure is not None
    both = changed.model_copy(update={"erasure": ErasureKeys(key=key, former_keys=(job.environment.erasure.key,))})
    left_out = load_filter(both, job.ledger, state, "t", ranges)
    assert left_out is not None and left_out.hours[0].values[0].matches("anna")


@pytest.mark.parametrize(
    ("payload", "is_found"),
    [
        (b'{"id": "anna"}', True), (b"anna", True), (b"annabel", False), (b"joanna", False), (b"anna_1", False),
        (b"x-anna-y", True), (b"ann", False),
    ],
)  # fmt: skip
def test_a_payload_has_a_value_as_a_whole_word(payload: bytes, is_found: bool) -> None:
    assert find_words([b"other", payload, b"last"], forms_of("anna")) == ({1} if is_found else set())


def test_a_payload_may_escape_a_value() -> None:
    assert find_words([b'{"id": "\\u00e9va"}', "éva".encode(), b"eva"], forms_of("éva")) == {0, 1}


@pytest.mark.parametrize(
    ("start", "days", "is_over"), [(12, 31, True), (11, 31, False), (12, 29, False)], ids=("over", "in Kafka", "early")
)
def test_an_erasure_is_forgotten_once_kafka_has_none_of_its_records(
    people: People, start: int, days: int, is_over: bool
) -> None:
    one = people.erase().erasure
    job = replace(people.job, kafka=Starts(log={0: [0] * 12}, start=start).adapter)
    forgotten = run.forget(job, Publisher(job.lake, job.stream), datetime.now(UTC) + timedelta(days=days))
    assert (forgotten, people.lake.state().erasures.of(one.id) is None) == (int(is_over), is_over)


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
def test_an_erasure_is_of_the_records_before_its_request(
    hour: str, topic_id: str, ranges: Any, covered: Any
) -> None:  # fmt: skip
    assert ONE.covered(hour, topic_id, ranges) == covered


def test_the_furthest_state_of_an_erasure_counts() -> None:
    further = replace(ONE, places=1, changed=NOW)
    done, other = replace(further, done=NOW), replace(ONE, id="f")
    branches = [{"anabranch.erasures": Erasures((one,)).to_json()} for one in (done, ONE, further)]
    branches.append({"anabranch.erasures": Erasures((other,)).to_json()})
    assert Erasures.of_branches(branches).all == (done, other)
    assert Erasures.of_branches([{}]) == Erasures()
