"""kill -9 at every `Step`, twice in a row; and the answer of a publish lost, before and after it landed.

Each test sends records, runs the real command into the step, proves that it got there, sends more,
does it again, starts once more as an operator would, and compares exactly.
"""

import json
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pytest
from commands import run, run_into
from expectations import entry
from running import publishes
from world import Make, Record, World, event, past_hour

from anabranch.common.fail_points import Step
from anabranch.iceberg import ledger_files
from anabranch.iceberg.commits import Change
from anabranch.offsets.hours import start_of
from anabranch.protocol import ledger
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.publish import Publish, new_id, to_commit
from serving_layer.reader import Reader
from serving_layer.reader.selection import Selection
from serving_layer.views import fill_status


@dataclass(frozen=True)
class Case:
    """A step, the how many-th time (`after`: of that one), and whether the rows are published."""

    step: Step
    lands: bool
    number: int = 1
    after: Step | None = None

    @property
    def fail_at(self) -> str:
        last = f"{self.step.label}:{self.number}"
        return last if self.after is None else f"{self.after.label},{last}"

    def __str__(self) -> str:
        return self.fail_at


LOST = Step.COMMIT_REQUEST_LOST
COMMIT = [
    Case(Step.COMMIT_PREPARED, False),
    Case(Step.COMMIT_REQUEST_LOST, True),
    Case(Step.COMMIT_ANSWER_LOST, True),
    Case(Step.COMMIT_LANDED, True),
]
SPEED = [
    Case(Step.SPEED_RECOVERED, False),
    Case(Step.SPEED_DECIDED, False),
    Case(Step.SPEED_ROWS_STAGED, False),
    Case(Step.SPEED_STAGED, False),
    *COMMIT,
    Case(Step.COMMIT_DOUBTED, False, after=LOST),
    Case(Step.COMMIT_FENCED, False, after=LOST),
    Case(Step.SPEED_PUBLISHED, True),
    # The second commit is that of the dead letters.
    *(Case(case.step, True, 2) for case in COMMIT),
    Case(Step.SPEED_DEAD_LETTERS, True),
    Case(Step.SPEED_OFFSETS_COMMITTED, True),
]
# From the second micro-batch on, each is staged while the one before it is being published.
AHEAD = [
    Step.SPEED_DECIDED, Step.SPEED_STAGED, Step.COMMIT_PREPARED, Step.COMMIT_LANDED,
    Step.SPEED_PUBLISHED, Step.SPEED_OFFSETS_COMMITTED,
]  # fmt: skip
# The rows are published long before; what lands is the roll-up of their files.
ROLLUP = [Case(Step.ROLLUP_WRITTEN, False), *COMMIT, Case(Step.ROLLUP_PUBLISHED, True)]
SKIP = [Case(Step.SPEED_SKIPPED, True)]
SEAL = [
    Case(Step.SEAL_DECIDED, False),
    *COMMIT,
    Case(Step.SEAL_PUBLISHED, True),
    Case(Step.LEDGER_PREPARED, True),
    Case(Step.LEDGER_APPENDED, True),
    Case(Step.SEAL_RECORDED, True),
]
ARCHIVING = [
    Case(Step.ARCHIVE_STAGED, False),
    # The first commit is that of the archive.
    Case(Step.COMMIT_PREPARED, False),
    Case(Step.COMMIT_ANSWER_LOST, True),
    Case(Step.COMMIT_LANDED, True),
    Case(Step.ARCHIVE_PUBLISHED, True),
]
BATCH = [
    Case(Step.BATCH_DECODED, False),
    Case(Step.BATCH_ROWS_STAGED, False),
    Case(Step.BATCH_STAGED, False),
    Case(Step.BATCH_BALANCED, False),
    Case(Step.BATCH_CHECKED, False),
    # The hours are sealed beforehand, so the first commit is that of the rows, the second that of
    # the dead letters.
    *COMMIT,
    Case(Step.COMMIT_DOUBTED, False, after=LOST),
    Case(Step.COMMIT_FENCED, False, after=LOST),
    Case(Step.BATCH_PUBLISHED, True),
    Case(Step.COMMIT_LANDED, True, 2),
    Case(Step.BATCH_DEAD_LETTERS, True),
    Case(Step.LEDGER_PREPARED, True),
    Case(Step.LEDGER_APPENDED, True),
    Case(Step.BATCH_RECORDED, True),
]
# The hours are accepted and recorded by then. Where in a commit:
# tests/unit/serving_layer/test_views.py.
FILL = [
    Case(Step.VIEW_COMPUTED, False),
    Case(Step.VIEW_WRITTEN, False),
    Case(Step.VIEW_FILLED, True),
]
EMPTY = [Case(Step.BATCH_EMPTY_ACCEPTED, True)]
REFUSE = [Case(Step.BATCH_REFUSED, False)]
MERGE = [
    Case(Step.MERGE_PLANNED, False),
    Case(Step.COMMIT_PREPARED, False),
    Case(Step.COMMIT_ANSWER_LOST, True),
    Case(Step.MERGE_PUBLISHED, True),
]

# Reached by a process that records a decision in a ledger of many files.
LEDGER = [Case(Step.LEDGER_MERGE_PREPARED, False), Case(Step.LEDGER_MERGED, True)]

MAINTAIN = [
    Case(Step.MAINTAIN_DROPPED, True),
    Case(Step.MAINTAIN_EXPIRED, True),
    Case(Step.MAINTAIN_LISTED, True),
    Case(Step.MAINTAIN_DELETED, True),
    Case(Step.COMMIT_PREPARED, False),
    Case(Step.COMMIT_ANSWER_LOST, True),
    Case(Step.COMMIT_LANDED, True),
]


# They need no JVM: tests/unit/serving_layer/test_egress.py and
# tests/integration/test_egress_targets.py kill at each.
EGRESS = {step for step in Step if step.label.startswith("egress.")}
# Nor do these: tests/unit/lifecycle/test_retention.py.
EXPIRE = {step for step in Step if step.label.startswith("expire.")}
# Nor do these: tests/unit/lifecycle/test_erasure.py.
ERASE = {step for step in Step if step.label.startswith("erase.")} | {
    Step.MAINTAIN_ENDED, Step.MAINTAIN_VERSIONS_DELETED,
}  # fmt: skip
# Nor do these: in tests/unit/lifecycle test_retention_holds.py, test_importing.py and
# test_importing_undo.py; tests/unit/protocol/test_topic_change.py.
OTHERS = {s for s in Step if s.label.startswith(("hold.", "import.", "undo.", "adopt."))}


def test_every_step_has_a_case() -> None:
    cases = [
        *SPEED, *ROLLUP, *SKIP, *SEAL, *BATCH, *ARCHIVING, *FILL, *EMPTY, *REFUSE, *MERGE, *LEDGER,
        *MAINTAIN,
    ]  # fmt: skip
    assert {case.step for case in cases} == set(Step) - EGRESS - EXPIRE - ERASE - OTHERS


def send(one: World, at: datetime, prefix: str) -> None:
    """Eight good records, one that repeats the first, one that is no JSON."""
    good = [(i % 2, at, event(f"{prefix}-{i}", at, level=i)) for i in range(8)]
    one.send([*good, good[0], (1, at, b"{broken " + prefix.encode())])


def send_hour(one: World, ago: int) -> None:
    send(one, start_of(past_hour(ago)).replace(minute=20), f"h{ago}")


def is_good(record: Record) -> bool:
    return not (record.value or b"").startswith(b"{broken")


def assert_exact(one: World, duplicates: bool) -> None:
    """`main` and dead letters are what Kafka acknowledged, with or without its duplicates."""
    expected, seen = [], set()
    for record in filter(is_good, one.sent):
        name = json.loads(record.value or b"")["event_id"]
        if duplicates or name not in seen:
            expected.append((record.partition, record.offset, name))
        seen.add(name)
    assert one.contents() == sorted(expected)
    dead = [(r.partition, r.offset, r.value) for r in one.sent if not is_good(r)]
    assert one.dead_records() == sorted(dead)


def decisions(one: World) -> Counter[tuple[str, str]]:
    return Counter((row.hour, row.decision) for row in one.job.ledger.history())


@pytest.fixture
def one(world: Make) -> World:
    return world(partitions=2)


@pytest.mark.parametrize("case", SPEED, ids=str)
def test_speed(one: World, case: Case) -> None:
    one.apply()
    for attempt in ("first", "second"):
        send(one, datetime.now(UTC), attempt)
        run_into(one, case.fail_at, "speed", one.name, "--available-now")
        # The hazard: a micro-batch is published completely, or not at all.
        # The second time, the first commit may be that of the first time's dead letters, and its
        # rows still to come.
        possible = {"first": {1}, "second": {1, 2}}[attempt] if case.lands else {0}
        assert len(publishes(one, "speed")) in possible
    one.speed()
    assert_exact(one, duplicates=True)
    assert len(publishes(one, "main")) == (2 if case.lands else 1)
    assert one.state.dead_letters == () or one.state.position.offsets == {0: 10, 1: 10}


@pytest.mark.parametrize("case", SPEED, ids=str)
def test_speed_of_many_streams(one: World, world: Make, case: Case) -> None:
    """One process publishes two streams, and is killed where one of them reaches the step."""
    both = (one, world(beside=one))
    both[1].topic()
    for each in both:
        each.apply()
    for attempt in ("first", "second"):
        for each in both:
            send(each, datetime.now(UTC), attempt)
        run_into(one, case.fail_at, "speed", "--all", "--available-now")
        # The hazard: a stream's micro-batch is published completely, or not at all.
        positions = [tuple(each.state.position.offsets.values()) for each in both]
        assert set(positions) <= {(0, 0), (5, 5), (10, 10)}
        if attempt == "first" and case.lands and case.number == 1:
            assert (5, 5) in positions
    run(one, "speed", "--all", "--available-now")
    for each in both:
        assert each.state.position.offsets == {0: 10, 1: 10}
        assert_exact(each, duplicates=True)


@pytest.mark.parametrize("step", AHEAD, ids=lambda s: s.label)
def test_speed_between_two_micro_batches_under_way(one: World, step: Step) -> None:
    """One is being published, and the next is staged or about to be."""
    one.evolve(speed={"max_offsets_per_trigger": 3})
    for attempt in ("first", "second"):
        send(one, datetime.now(UTC), attempt)
    run_into(one, f"{step.label}:3", "speed", one.name, "--available-now")
    # The hazard: some of them are published, and others are not.
    assert 0 < sum(one.state.position.offsets.values()) < 20
    one.speed()
    assert_exact(one, duplicates=True)
    assert one.state.position.offsets == {0: 10, 1: 10}


@pytest.mark.parametrize("case", ROLLUP, ids=str)
def test_rollup(one: World, case: Case) -> None:
    one.evolve(speed={"max_offsets_per_trigger": 2})
    send(one, datetime.now(UTC), "first")
    send(one, datetime.now(UTC), "second")
    one.speed()
    position, many = one.state.position, len(one.files())
    assert many >= 10
    for _ in range(2):
        if len(one.files()) < many:
            break
        run_into(one, case.fail_at, "speed", one.name, "--available-now")
        # The hazard: the files are written, and either none is in its place or all are.
        assert (len(one.files()) < many) == case.lands
        assert_exact(one, duplicates=True)
    run(one, "speed", one.name, "--available-now")
    assert len(one.files()) == len(one.files("speed")) <= many - 7
    assert_exact(one, duplicates=True)
    assert one.state.position == position


@pytest.mark.parametrize("case", SKIP, ids=str)
def test_coming_back(one: World, case: Case) -> None:
    for ago in (3, 2, 1):
        send_hour(one, ago)
    send(one, datetime.now(UTC), "now")
    one.apply()
    one.batch()
    run_into(one, case.fail_at, "speed", one.name, "--available-now")
    assert set(one.state.timeline.skipped) == {past_hour(ago) for ago in (3, 2, 1)}
    run(one, "speed", one.name, "--available-now")
    names = Counter(name.split("-")[0] for _, _, name in one.contents())
    # The batch layer dropped the duplicates of its hours, the running hour has its one.
    assert names == {"h3": 8, "h2": 8, "h1": 8, "now": 9}


@pytest.mark.parametrize("case", SEAL, ids=str)
def test_seal(one: World, case: Case) -> None:
    send_hour(one, 2)
    send_hour(one, 1)
    one.apply()
    for _ in range(2):
        if case.lands and one.state.is_sealed(past_hour(1)):
            break
        run_into(one, case.fail_at, "batch", one.name, "--seal-only")
        assert one.state.is_sealed(past_hour(1)) == case.lands
    run(one, "batch", one.name, "--seal-only")
    assert decisions(one) == {(past_hour(2), "sealed"): 1, (past_hour(1), "sealed"): 1}
    sealed = {hour: cut.offsets for hour, cut in one.state.timeline.sealed.items()}
    assert sealed == {past_hour(2): 10, past_hour(1): 10}


@pytest.mark.parametrize("case", BATCH, ids=str)
def test_batch(one: World, case: Case) -> None:
    send_hour(one, 2)
    send_hour(one, 1)
    one.apply()
    run(one, "batch", one.name, "--seal-only")
    if case.step in (Step.COMMIT_REQUEST_LOST, Step.COMMIT_ANSWER_LOST):
        # It lives on, and ends.
        run_into(one, case.fail_at, "batch", one.name)
    else:
        for attempt in (1, 2):
            run_into(one, case.fail_at, "batch", one.name)
            # The hazard: an hour is there whole, or not at all.
            served = Counter(row["ingest_hour"] for row in one.rows())
            # The second time, it may be reached by what was left over from the first time's hour.
            both = [past_hour(2)], [past_hour(2), past_hour(1)]
            possible = both[:attempt] if case.lands else ([],)
            assert served in [dict.fromkeys(accepted, 8) for accepted in possible]
    one.batch()
    assert_exact(one, duplicates=False)
    assert len(publishes(one, "main")) == 2
    hours = [past_hour(2), past_hour(1)]
    assert decisions(one) == {(h, d): 1 for h in hours for d in ("sealed", "accepted")}
    counts = {"offsets": 10, "good": 8, "dead": 1, "duplicate": 1, "gap": 0}
    found = [(h["hour"], h["revision"], h["counts"]) for h in one.hours() if h["hour"] in hours]
    assert found == [(hour, 1, counts) for hour in hours]


@pytest.mark.parametrize("case", ARCHIVING, ids=str)
def test_archiving(one: World, case: Case) -> None:
    one.reconfigure(archive={"raw": "30 days"})
    send_hour(one, 2)
    send_hour(one, 1)
    one.apply()
    run(one, "batch", one.name, "--seal-only")
    run_into(one, case.fail_at, "batch", one.name)
    if case.step is not Step.COMMIT_ANSWER_LOST:
        # The hazard: the archive has an hour whose rows are not there, or not even that.
        assert (len(archived(one)), one.rows()) == (10 if case.lands else 0, [])
        run_into(one, case.fail_at, "batch", one.name)
    one.batch()
    assert_exact(one, duplicates=False)
    assert Counter(archived(one)) == Counter((r.partition, r.offset) for r in one.sent)


def archived(one: World) -> list[tuple[int, int]]:
    rows = one.rows("main", one.job.stream.archive_table)
    return [(r["kafka_partition"], r["kafka_offset"]) for r in rows]


@pytest.mark.parametrize("case", FILL, ids=str)
def test_filling_views(one: World, case: Case) -> None:
    """Killed behind a first and a restated acceptance: the view is the GROUP BY all the time."""
    aggregates = {"events": "count", "who": "approx_distinct(event_id)"}
    view = {"window": "5 minutes", "group": ["level"], "aggregates": aggregates}
    one.reconfigure(views={"per_level": view})
    send_hour(one, 1)
    one.apply()
    send(one, datetime.now(UTC), "now")
    one.speed()
    for restate in ((), ("--restate", "--hour", past_hour(1))):
        run_into(one, case.fail_at, "batch", one.name, *restate)
        # The hazard: the hour is accepted, and its partials are there or not.
        assert one.state.is_accepted(past_hour(1))
        assert (past_hour(1) in fill_status(one.lake, one.job.stream)[0].lacking) != case.lands
        assert_view(one)
    run(one, "batch", one.name)
    assert fill_status(one.lake, one.job.stream)[0].lacking == ()
    assert_view(one)


def assert_view(one: World) -> None:
    """The view has what a GROUP BY of its rows in `main` has."""
    stream = one.job.stream
    names = (stream.table, stream.hours_table, *map(stream.partials_table, stream.views))
    [view] = stream.views
    sql = f"SELECT window_start, level, events, who FROM {stream.view_table(view)} ORDER BY ALL"
    with Reader(one.lake, dict.fromkeys(names, stream)).query(sql, Selection()) as answer:
        found = [tuple(row.values()) for row in answer.rows.read_all().to_pylist()]
    groups: dict[tuple[datetime, int], list[str]] = defaultdict(list)
    for row in one.rows():
        start = datetime.fromtimestamp(row["event_time"].timestamp() // 300 * 300, UTC)
        groups[start, row["level"]].append(row["event_id"])
    assert found == [(*key, len(ids), len(set(ids))) for key, ids in sorted(groups.items())]


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_empty_hours(one: World, case: Case) -> None:
    send_hour(one, 3)
    one.apply()
    run_into(one, case.fail_at, "batch", one.name)
    assert one.state.is_accepted(past_hour(2)) and one.state.is_accepted(past_hour(1))
    run(one, "batch", one.name)
    assert_exact(one, duplicates=False)
    expected = [(past_hour(ago), d) for ago in (3, 2, 1) for d in ("sealed", "accepted")]
    assert decisions(one) == dict.fromkeys(expected, 1)


@pytest.mark.parametrize("case", REFUSE, ids=str)
def test_refusal(one: World, case: Case) -> None:
    send_hour(one, 1)
    one.apply()
    one.expect(entry("expect_column_values_to_be_between", column="level", max_value=3))
    one.speed()
    served = one.contents()
    for _ in range(2):
        run_into(one, case.fail_at, "batch", one.name)
        assert (past_hour(1), "refused") not in decisions(one)
    run(one, "batch", one.name, expect=1)
    assert decisions(one)[past_hour(1), "refused"] == 1
    assert one.contents() == served


@pytest.mark.parametrize("case", MERGE, ids=str)
def test_merge(one: World, case: Case) -> None:
    send_hour(one, 2)
    send_hour(one, 1)
    one.serve()
    one.batch(past_hour(2))
    right = one.contents()
    damage(one)
    for _ in range(2):
        if one.contents() == right:
            break
        run_into(one, case.fail_at, "merge", one.name)
        assert (one.contents() == right) == case.lands
    run(one, "merge", one.name)
    assert one.contents() == right


@pytest.mark.parametrize("case", LEDGER, ids=str)
def test_merging_the_ledger(one: World, case: Case) -> None:
    send_hour(one, 1)
    one.apply()
    name = one.job.stream.hours_table
    for ago in range(40, 40 - ledger_files.MANY_APPENDS, -1):
        row = ledger.decision(past_hour(ago), "sealed", 0, None, datetime.now(UTC))
        one.lake.append(
            name,
            lambda table, row=row: ledger._to_arrow([row], table.metadata.next_sequence_number()),
        )
    before = Ledger(one.lake, name).history()
    run_into(one, case.fail_at, "batch", one.name, "--seal-only")
    # The hazard: the files are compacted, or are not; no row changed.
    files = list(one.lake.load(name).scan().plan_files())
    assert (len(files) < ledger_files.MANY_APPENDS) == case.lands
    run(one, "batch", one.name, "--seal-only")
    run(one, "maintain", one.name)
    after = Ledger(one.lake, name).history()
    assert after[: len(before)] == before
    assert [(row.hour, row.decision) for row in after[len(before) :]] == [(past_hour(1), "sealed")]


@pytest.mark.parametrize("case", MAINTAIN, ids=str)
def test_maintain(one: World, case: Case) -> None:
    send_hour(one, 2)
    send_hour(one, 1)
    one.serve()
    one.batch(past_hour(2))
    one.configure(maintain={"speed_hours": "0 seconds"})
    right = one.contents()
    dead = one.dead_offsets()
    for _ in range(2):
        dropped = {row["ingest_hour"] for row in one.rows("speed")} == {past_hour(1)}
        if dropped and case.step.label.startswith("commit."):
            break
        run_into(one, case.fail_at, "maintain", one.name)
        # The hazard: it died with the hour dropped, or not.
        assert ({row["ingest_hour"] for row in one.rows("speed")} == {past_hour(1)}) == case.lands
        assert one.contents() == right
    run(one, "maintain", one.name)
    assert {row["ingest_hour"] for row in one.rows("speed")} == {past_hour(1)}
    assert one.contents() == right
    assert one.dead_offsets() == dead
    assert one.spark.table(f"lake.{one.job.stream.table}").count() == len(right)


def damage(one: World) -> None:
    """`main` without its rows, as after a wrong hand."""
    state = one.state
    tasks = state.table.scan(snapshot_id=state.heads["main"]).plan_files()
    files: tuple[Any, ...] = tuple(task.file for task in tasks)
    publish = Publish(new_id(), (Change("main", remove=files),), state.timeline)
    one.lake.commit(state.table, to_commit(state, publish, datetime.now(UTC)))
    assert one.rows() == []
