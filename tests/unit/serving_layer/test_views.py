"""Views equal a GROUP BY over `main` at any moment, whatever is filled, killed or restated."""

import json
import os
import random
import signal
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import proofs
import pytest
from budget import budget
from conf_folders import said, write_environment, write_stream
from hypothesis import given
from hypothesis import strategies as st
from killed import run_armed
from lakes import (
    StreamLake,
    add_snapshots,
    content,
    copied_lake,
    limit_commits,
    new_environment,
    new_state,
    new_stream,
    snapshots,
    tables_of,
)
from proofs import event, job, stage_rows
from scale import measured

from anabranch.common.errors import ConfigurationError, Terminal
from anabranch.common.fail_points import Step
from anabranch.config import EventTime, Stream, View
from anabranch.iceberg import admin, commits, expiry, schema_evolution, table_schemas
from anabranch.iceberg.file_io import write_files
from anabranch.iceberg.lake import Lake
from anabranch.iceberg.snapshots import head, heads
from anabranch.lifecycle.maintenance import maintain
from anabranch.offsets.hours import Cut, Timeline, hours_between, shift, start_of
from anabranch.offsets.position import Position
from anabranch.protocol import acts, apply, merge, watermarks
from anabranch.protocol import state as state_module
from anabranch.protocol.ledger import Acceptance
from anabranch.protocol.ledger_row import HourAccount
from anabranch.protocol.partials import digest_of
from anabranch.protocol.state import Accepted, Confirmed, State
from batch_layer.plan import Rebuilt, plan_publish
from serving_layer import views as filling
from serving_layer.reader import Reader, StreamTable
from serving_layer.reader.selection import Selection
from serving_layer.views import compute, estimate, fill, partial_hours, plan_known, sketch

FIRST = "2026-11-21T00"
DDL = (
    "id STRING NOT NULL, at TIMESTAMP, country STRING, amount DECIMAL(10,2), n BIGINT, ratio DOUBLE"
)
NOW = Selection()
SEED = int(os.environ.get("ANABRANCH_WINDOWS_SEED", "1"))
PAST, FUTURE = timedelta(hours=2), timedelta(minutes=30)
PER_MINUTE = {
    "window": "5 minutes",
    "group": "country",
    "aggregates": {
        "events": "count", "named": "count(country)", "spent": "sum(amount)", "whole": "sum(n)",
        "least": "min(amount)", "last": "max(at)", "mean": "average(amount)",
        "ratios": "sum(ratio)", "who": "approx_distinct(id)", "numbers": "approx_distinct(n)",
    },
}  # fmt: skip
PER_90_MINUTES = {"window": "90 minutes", "aggregates": {"total": "sum(n)"}}


def with_views(**views: Any) -> Stream:
    bounds = EventTime(column="at", past=PAST, future=FUTURE)
    return new_stream(schema=DDL, event_time=bounds, views=views)


def new_lake(folder: Path, stream: Stream) -> StreamLake:
    tables = tables_of(stream, Timeline(FIRST, FIRST, {0: 0}), Position("t", {0: 0}))
    return copied_lake(folder, stream, tables)


@dataclass
class Story:
    """A random stream: its records, their hours, and the accepted revision of each."""

    one: StreamLake
    dice: random.Random
    offset: int = 0
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    cuts: dict[str, Cut] = field(default_factory=dict)
    revisions: Counter[str] = field(default_factory=Counter)
    happened: Counter[str] = field(default_factory=Counter)

    @property
    def open(self) -> str:
        return self.one.state().timeline.open

    def step(self, moment: int) -> None:
        first = 3 * (self.receive, self.seal, self.accept)
        opening = (*first, self.fill_late, self.receive, self.fill, self.give)
        actions = {
            self.receive: 4, self.seal: 2, self.accept: 4, self.restate: 2, self.fill: 2,
            self.fill_late: 2, self.give: 1,
        }  # fmt: skip
        [drawn] = self.dice.choices(list(actions), list(actions.values()))
        action = opening[moment] if moment < len(opening) else drawn
        if action() is not None:
            self.happened[action.__name__] += 1

    def receive(self) -> bool:
        """The speed layer publishes some rows, of event times that the bounds allow, or of none."""
        hour, dice = self.open, self.dice
        earliest = start_of(hour) - PAST
        span = PAST + timedelta(hours=1) + FUTURE
        rows = []
        for _ in range(dice.randrange(1, 9)):
            at = earliest + dice.randrange(int(span.total_seconds()) + 1) * timedelta(seconds=1)
            cents = dice.randrange(-500, 500)
            values = {
                "at": dice.choice((at, at, at, at, None)), "country": dice.choice(("de", "fr", None)),
                "amount": dice.choice((Decimal(cents) / 100, None)), "event_date": at.date(),
                "n": dice.choice((2**63 - 1, -5, 7, None)), "ratio": dice.choice((0.25, 1.5, None)),
            }  # fmt: skip
            rows.append(event(0, self.offset, hour, **values))
            self.offset += 1
        self.rows[hour] += rows
        proofs.read(self.one, rows, {0: self.offset})
        return True

    def seal(self) -> bool:
        state = self.one.state()
        before, hour = state.timeline, state.timeline.open
        self.cuts[hour] = Cut("t", {0: (before.start[0], self.offset)})
        sealed, start = before.sealed | {hour: self.cuts[hour]}, {0: self.offset}
        timeline = replace(before, open=shift(hour, 1), start=start, sealed=sealed)
        self.one.change(commits.Change("speed"), timeline=timeline, state=state)
        return True

    def accept(self) -> bool | None:
        waiting = [h for h in self.cuts if not self.revisions[h]]
        return self._rebuild(self.dice.choice(waiting)) if waiting else None

    def restate(self) -> bool | None:
        accepted = [h for h in self.cuts if self.revisions[h]]
        return self._rebuild(self.dice.choice(accepted)) if accepted else None

    def _rebuild(self, hour: str) -> bool:
        """The batch layer publishes an hour, perhaps without repeated rows, and may be killed."""
        rows = [row for row in self.rows[hour] if self.dice.random() < 0.8]
        state = self.one.state()
        self.revisions[hour] += 1
        counts = HourAccount(good=len(rows), dead=0, duplicate=0, gap=0, gaps={}, speed_rows=0)
        accepted = Accepted(self.revisions[hour], self.cuts[hour])
        built = Rebuilt(hour, accepted, stage_rows(self.one, rows), (), counts, None)
        state = self.one.state()
        is_confirmed = self.dice.random() < 0.5
        ids = frozenset(row.decision_id for row in state.decisions if is_confirmed)
        if ids:
            self.one.ledger.record_waiting(state)
        publish = replace(plan_publish(state, [built], datetime.now(UTC)), confirmed=Confirmed(ids))
        self.one.land(publish, state)
        if self.dice.random() < 0.7:
            self.one.ledger.record_waiting(self.one.state())
        else:
            self.happened["killed before the ledger"] += 1
        return True

    def fill(self) -> bool:
        """All views, or the first of them, by a process that is killed then."""
        views = self.one.stream.views
        for view in views[: self.dice.randrange(1, len(views) + 1)]:
            fill(self.one.lake, self.one.stream, view)
        return True

    def fill_late(self) -> bool | None:
        """A process was paused with partials, while an hour was restated and filled by another."""
        lake, stream = self.one.lake, self.one.stream
        view, state = self.dice.choice(stream.views), self.one.state()
        hours = partial_hours(lake, stream, view, state)
        if not hours.lacking:
            return None
        partials = compute(stream, view, state, hours, hours.lacking)
        self.restate()
        if self.dice.random() < 0.5:
            fill(lake, stream, view)
            assert not filling._replace(lake, stream, view, hours, partials)
        else:
            assert filling._replace(lake, stream, view, hours, partials)
        return True

    def give(self) -> bool | None:
        """An operator gives an hour to a layer."""
        hours = [h for h in self.cuts if self.revisions[h]]
        if hours:
            layer = self.dice.choice(("speed", "auto", "auto"))
            acts.serve_hour(self.one.publisher, self.dice.choice(hours), layer, "a test")
        return True if hours else None


def main_rows(one: StreamLake) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = content(one.lake, one.name).to_pylist()
    return rows


def grouped(one: StreamLake, view: View) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The view by Python's GROUP BY over `main`; completeness by asking for each window."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    width = int(view.window.total_seconds())
    for row in main_rows(one):
        at = row["at"]
        begun = at.timestamp() // width * width if at is not None else None
        start = datetime.fromtimestamp(begun, UTC) if begun is not None else None
        groups[start, *(row[name] for name in view.group)].append(row)
    state = one.state()
    return {key: aggregated(one.stream, view, state, key, rows) for key, rows in groups.items()}


def aggregated(
    stream: Stream, view: View, state: State, key: tuple[Any, ...], rows: list[dict[str, Any]]
) -> dict[str, Any]:
    result = dict(zip(("window_start", *view.group), key, strict=True))
    for aggregate in view.aggregates:
        name = aggregate.column
        values = [row[name] for row in rows if row[name] is not None] if name is not None else rows
        calculate = {
            "count": lambda v: len(v),
            "sum": lambda v: sum(v) if v else None,
            "min": lambda v: min(v, default=None),
            "max": lambda v: max(v, default=None),
            "average": lambda v: float(sum(v)) / len(v) if v else None,
            # Of so few values a sketch is exact.
            "approx_distinct": lambda v: len(set(v)),
        }
        result[aggregate.name] = calculate[aggregate.function](values)
    start = key[0]
    result |= {"complete": False, "late": 0}
    if start is not None:
        assert stream.event_time is not None
        end = start + view.window
        first, last = watermarks.plan_hours(stream.event_time, start, end)
        assert first is not None
        assert last is not None
        hours = hours_between(max(first, state.timeline.first), shift(last, 1))
        result["complete"] = all(state.is_accepted(h) for h in hours)
        result["late"] = sum(start_of(row["ingest_hour"]) >= end for row in rows)
    return result


def reader(one: StreamLake) -> Reader:
    stream = one.stream
    views = map(stream.partials_table, stream.views)
    names = (stream.table, stream.dead_letters_table, stream.hours_table, *views)
    return Reader(one.lake, dict.fromkeys(names, stream))


def read(
    one: StreamLake, view: View, selection: Selection = NOW
) -> dict[tuple[Any, ...], dict[str, Any]]:
    with reader(one).query(f"SELECT * FROM {one.stream.view_table(view)}", selection) as answer:
        rows = answer.rows.read_all().to_pylist()
    keyed = {(row["window_start"], *(row[name] for name in view.group)): row for row in rows}
    assert len(keyed) == len(rows), "one row for each window and group"
    return keyed


def test_a_view_is_a_group_by_always(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # So that hours are forgotten within some steps.
    monkeypatch.setattr(state_module, "REMEMBERED_HOURS", 2)
    monkeypatch.setattr(filling, "_HOURS_A_COMMIT", 2)
    stream = with_views(per_minute=PER_MINUTE, per_90_minutes=PER_90_MINUTES)
    story = Story(new_lake(tmp_path, stream), random.Random(SEED))
    print(f"ANABRANCH_WINDOWS_SEED={SEED}")
    for moment in range(budget(40, 110)):
        story.step(moment)
        view = stream.views[moment % 2]
        assert read(story.one, view) == grouped(story.one, view), (moment, story.happened)
        hours = partial_hours(story.one.lake, stream, view, story.one.state())
        forgotten = hours.taken - story.one.state().accepted.keys()
        story.happened["read from partials"] += bool(hours.taken)
        story.happened["partials and rows of accepted hours"] += bool(hours.taken and hours.lacking)
        story.happened["forgotten hours read from partials"] += bool(forgotten)
    # The hazards happened.
    assert min(story.happened.values()) > 0 and len(story.happened) == 11


def new_story(folder: Path, **views: Any) -> Story:
    """A lake with three accepted hours that are not filled, and a running one."""
    of_views = with_views(**(views or {"per_minute": PER_MINUTE}))
    story = Story(new_lake(folder, of_views), random.Random(7))
    for _ in range(3):
        story.receive()
        story.seal()
        story.accept()
    story.one.ledger.record_waiting(story.one.state())
    story.receive()
    return story


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return new_story(tmp_path)


@pytest.fixture
def one(story: Story) -> StreamLake:
    return story.one


@pytest.fixture
def view(one: StreamLake) -> View:
    return one.stream.views[0]


def taken(one: StreamLake) -> set[str]:
    return set(partial_hours(one.lake, one.stream, one.stream.views[0], one.state()).taken)


FILLING = [
    *(step for step in Step if step.label.startswith("view.")),
    Step.COMMIT_ANSWER_LOST,
    Step.COMMIT_LANDED,
    *(pytest.param(step, marks=pytest.mark.full) for step in (Step.COMMIT_PREPARED, Step.COMMIT_REQUEST_LOST)),
]  # fmt: skip


def _fill_into(folder: Path, stream: Stream) -> None:
    filling._HOURS_A_COMMIT = 1
    fill(Lake(new_environment(folder)), stream, stream.views[0])


def fill_into(one: StreamLake, step: Step, number: int) -> None:
    """Fill in another process, an hour in a commit; the step kills it, or lets it live."""
    code = run_armed(f"{step.label}:{number}", _fill_into, one.folder, one.stream)
    assert code == (-signal.SIGKILL if step.dies else 0)


@pytest.mark.parametrize("step", FILLING, ids=lambda step: step.label)
def test_a_process_killed_while_filling_leaves_true_views(story: Story, step: Step) -> None:
    """Killed in the second of three hours, and twice in one that was restated."""
    one, [view] = story.one, story.one.stream.views
    fill_into(one, step, 2)
    landed = step in (Step.COMMIT_LANDED, Step.VIEW_FILLED)
    # The hazard: some hours are filled, others are not.
    assert len(taken(one)) == (1 + landed if step.dies else 3)
    assert read(one, view) == grouped(one, view)
    fill(one.lake, one.stream, view)
    story.restate()
    story.receive()
    for _ in range(1 if landed or not step.dies else 2):
        fill_into(one, step, 1)
        assert len(taken(one)) == (2 + landed if step.dies else 3)
        assert read(one, view) == grouped(one, view)
    fill(one.lake, one.stream, view)
    assert len(taken(one)) == 3 and read(one, view) == grouped(one, view)


def test_a_changed_definition_is_computed_again(one: StreamLake, view: View) -> None:
    fill(one.lake, one.stream, view)
    for changed in (
        PER_MINUTE | {"window": "7 minutes"},
        PER_MINUTE | {"group": ["country", "n"]},
        PER_MINUTE | {"aggregates": {"events": "count", "most": "max(ratio)"}},
    ):
        other = replace(one, stream=with_views(per_minute=changed))
        [view] = other.stream.views
        assert taken(other) == set() and read(other, view) == grouped(other, view)
        wanted = table_schemas.partials_schema(other.stream, view)
        name = one.stream.partials_table(view)
        lacks = {*wanted.column_names} - {*one.lake.load(name).schema().column_names}
        if lacks:
            with pytest.raises(Terminal, match="run `anabranch apply events`"):
                fill(other.lake, other.stream, view)
            apply.evolve(one.lake, name, schema_evolution.Columns(wanted, ""))
        assert fill(other.lake, other.stream, view) == 3 and len(taken(other)) == 3
        assert read(other, view) == grouped(other, view)
    aggregates = {"spent_in_all": "sum(amount)", **PER_MINUTE["aggregates"]}  # type: ignore[dict-item]
    renamed = PER_MINUTE | {"aggregates": aggregates}
    before, after = with_views(per_minute=PER_MINUTE), with_views(per_minute=renamed)
    why = "made of the same partials"
    assert before.definition(before.views[0]) == after.definition(after.views[0]), why


def test_a_branch_set_back_and_restated_is_not_what_it_was(story: Story, view: View) -> None:
    """The second revision 2 of an hour has other rows than the first, and the same number."""
    one = story.one
    story.cuts = {FIRST: story.cuts[FIRST]}
    before = heads(one.table())["batch"]
    story.restate()
    one.ledger.record_waiting(one.state())
    fill(one.lake, one.stream, view)
    assert FIRST in taken(one)
    one.set_back("batch", before)
    assert taken(one) == set(), "main is not made from its branches as they are"
    assert read(one, view) == grouped(one, view)
    merge.merge(one.lake, one.stream)
    story.revisions[FIRST] = 1
    story.rows[FIRST] *= 2
    story.restate()
    one.ledger.record_waiting(one.state())
    assert one.state().accepted[FIRST].revision == 2
    assert taken(one) == {shift(FIRST, 1), shift(FIRST, 2)}
    assert read(one, view) == grouped(one, view)
    assert fill(one.lake, one.stream, view) == 1 and FIRST in taken(one)
    assert read(one, view) == grouped(one, view)


def test_several_acceptances_of_a_revision_are_ambiguous() -> None:
    timeline = Timeline(FIRST, shift(FIRST, 3), {})
    remembered = Accepted(2, Cut("t", {}))
    state = new_state(timeline, accepted={FIRST: remembered}, settled_before=shift(FIRST, 3))
    forgotten, again = shift(FIRST, 1), shift(FIRST, 2)
    said = [
        Acceptance(FIRST, 1, "a"), Acceptance(FIRST, 2, "b"), Acceptance(forgotten, 1, "c"),
        Acceptance(again, 1, "d"), Acceptance(again, 2, "e"),
    ]  # fmt: skip
    assert plan_known(state, said, [FIRST, forgotten, again]) == {FIRST: "b", forgotten: "c"}
    assert plan_known(state, [*said, Acceptance(FIRST, 2, "f")], [FIRST]) == {}


def test_sums_are_exact_and_an_overflow_is_an_error(tmp_path: Path) -> None:
    sums = {"window": "1 day", "aggregates": {"whole": "sum(n)", "mean": "average(n)"}}
    story = new_story(tmp_path, sums=sums)
    one, [view] = story.one, story.one.stream.views
    total = sum(row["n"] or 0 for row in main_rows(one))
    assert total > 2**63
    fill(one.lake, one.stream, view)
    assert sum(row["whole"] or 0 for row in read(one, view).values()) == total

    wide = "id STRING NOT NULL, at TIMESTAMP, n DECIMAL(38,0)"
    bounds = EventTime(column="at", past=PAST, future=FUTURE)
    views = {"sums": {"window": "1 day", "aggregates": {"whole": "sum(n)"}}}
    stream = new_stream(schema=wide, event_time=bounds, views=views)
    other, most = new_lake(tmp_path / "wide", stream), Decimal(10**38 - 1)
    proofs.read(other, [event(0, o, FIRST, at=start_of(FIRST), n=most) for o in range(2)], {0: 2})
    with pytest.raises((ConfigurationError, Terminal), match="Overflow"):
        read(other, other.stream.views[0])


def test_an_hour_without_records_is_filled_once(story: Story, view: View) -> None:
    story.seal()
    story.seal()
    story.rows.clear()
    story.accept()
    story.accept()
    assert fill(story.one.lake, story.one.stream, view) == 5
    assert fill(story.one.lake, story.one.stream, view) == 0
    assert read(story.one, view) == grouped(story.one, view)


def test_as_of_a_snapshot_and_of_accepted_hours_alone(story: Story, view: View) -> None:
    one = story.one
    before, at = read(one, view), heads(one.table())["main"]
    fill(one.lake, one.stream, view)
    story.receive()
    assert read(one, view) != before
    assert read(one, view, Selection(as_of=str(at))) == before
    accepted = read(one, view, Selection(only_accepted=True))
    rows = [row for row in main_rows(one) if row["ingest_hour"] <= shift(FIRST, 2)]
    assert sum(row["events"] for row in accepted.values()) == len(rows)


def test_a_handle_reads_partials_of_accepted_hours_alone(one: StreamLake, view: View) -> None:
    handle = StreamTable(reader(one), one.stream, Selection())
    shown = handle.view("per_minute")
    rows = len(read(one, view))
    assert shown.arrow().num_rows == rows and len(shown.pandas()) == rows
    assert shown.duckdb().aggregate("count(*)").fetchall() == [(rows,)]
    assert shown.arrow(where="events > 1000").num_rows == 0
    found = r"one of its views \(per_minute\), found 'hourly'"
    with pytest.raises(ConfigurationError, match=found):
        handle.view("hourly")
    query = f"FROM {one.stream.view_table(view)}"
    with pytest.raises(ConfigurationError, match="leave --live out, or query the table"):
        reader(one).query(query, Selection(), tails=[]).__enter__()
    assert taken(one) == set() and fill(one.lake, one.stream, view) == 3
    hours = {shift(FIRST, n) for n in range(3)}
    assert taken(one) == hours
    sql = f"SELECT sum(events) FROM {one.stream.view_table(view)}"
    with reader(one).query(sql, Selection()) as answer:
        answer.rows.read_all()
    opened = {p.name: {file for scan in p.scans for file in scan.files} for p in answer.files}
    by_hour = {name: {f.partition[-1] for f in files} for name, files in opened.items()}
    assert by_hour == {one.stream.partials_table(view): hours, one.name: {shift(FIRST, 3)}}
    assert fill(one.lake, one.stream, view) == 0, "filled again, there is nothing to do"


@given(st.data())
def test_a_window_is_complete_when_all_its_hours_are_accepted(data: st.DataObject) -> None:
    past = timedelta(minutes=data.draw(st.integers(0, 400)))
    future = data.draw(st.none() | st.integers(0, 200).map(lambda m: timedelta(minutes=m)))
    bounds = EventTime(column="at", past=past, future=future)
    waiting = data.draw(st.sets(st.sampled_from(hours_between(FIRST, shift(FIRST, 12)))))
    timeline = Timeline(FIRST, shift(FIRST, 12), {}, sealed={h: Cut("t", {}) for h in waiting})
    state = new_state(timeline, settled_before=shift(FIRST, 12))
    start = start_of(FIRST) + timedelta(minutes=data.draw(st.integers(-600, 900)))
    end = start + timedelta(minutes=data.draw(st.integers(1, 200)))
    first, last = watermarks.plan_hours(bounds, start, end)
    assert last is not None
    asked = hours_between(max(first or FIRST, FIRST), shift(last, 1))
    spans = watermarks.plan_open_spans(bounds, state)
    assert spans is not None
    touched = any(end > begin and (until is None or start <= until) for begin, until in spans)
    assert touched != all(state.is_accepted(h) for h in asked)
    assert all(a[1] is not None and a[1] < b[0] for a, b in pairwise(spans))
    assert watermarks.plan_open_spans(EventTime(column="at"), state) is None


def test_sketches_and_digests_do_not_depend_on_the_parts() -> None:
    values = [f"plä-{i}" for i in range(40_000)]
    parts = [sketch(values[begin : begin + 9_000]) for begin in range(0, 40_000, 8_000)]
    assert abs(estimate(parts) - 40_000) < 40_000 * 0.05
    assert estimate(parts) == estimate([*parts, *parts]), "what came twice changes nothing"
    assert estimate([sketch([1, 2, 3]), sketch([3, 4]), sketch([])]) == 4
    found = digest_of(["s3://a/x/1.parquet", "s3://a/y/2.parquet"])
    assert found == digest_of(["file:///b/2.parquet", "b/1.parquet"])
    assert digest_of(["1.parquet"]) != digest_of(["1.parquet", "2.parquet"])


def test_maintenance_removes_unreferenced_files_of_views_alone(one: StreamLake, view: View) -> None:
    hours = partial_hours(one.lake, one.stream, view, one.state())
    computed = compute(one.stream, view, one.state(), hours, hours.lacking)
    never_named = write_files(hours.partials, computed, {})
    fill(one.lake, one.stream, view)
    before = read(one, view)
    done = maintain(job(one), datetime.now(UTC) + timedelta(days=4))
    name = one.stream.partials_table(view)
    orphans = {file.path.rpartition("/")[2] for file in done.orphans[name]}
    assert orphans >= {file.file_path.rpartition("/")[2] for file in never_named}
    assert name in done.expired
    assert len(taken(one)) == 3 and read(one, view) == before


def test_few_snapshots_of_partials_stay(one: StreamLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hazard: the commit that expires a snapshot adds one, so there is always one to expire."""
    [view] = one.stream.views
    fill(one.lake, one.stream, view)
    name, partials = one.stream.partials_table(view), read(one, view)
    add_snapshots(one.lake, name, 9)
    before = snapshots(one.lake, name)
    monkeypatch.setattr(expiry.plan_expiry, "__defaults__", (5,))
    limit_commits(monkeypatch, 6)
    expired = maintain(job(one), datetime.now(UTC)).expired[name]
    assert expired == len(before - snapshots(one.lake, name)) > 0
    assert read(one, view) == partials and len(taken(one)) == 3


def test_a_query_opens_each_manifest_once_and_files_decide_where_the_ledger_does_not(
    one: StreamLake, view: View
) -> None:
    fill(one.lake, one.stream, view)
    partials = one.lake.load(one.stream.partials_table(view))
    there = {m.manifest_path for m in head(partials, "main").manifests(partials.io)}
    with measured() as cost:
        rows = read(one, view)
    assert rows and len(taken(one)) == 3
    of_rows = 1  # of the hour that is not accepted
    assert cost.read["manifest"] == len(there) + of_rows
    one.lake.catalog.drop_table(one.stream.hours_table)
    admin.create(one.lake, one.stream.hours_table, apply.LEDGER_SCHEMA, (), admin.TABLE_PROPERTIES)
    assert len(taken(one)) == 3


def test_a_filler_that_waited_over_orphan_removal_is_refused(one: StreamLake, view: View) -> None:
    """Its files are gone by then."""
    hours = partial_hours(one.lake, one.stream, view, one.state())
    write_files(hours.partials, compute(one.stream, view, one.state(), hours, hours.lacking), {})
    maintain(job(one), datetime.now(UTC) + timedelta(days=4))
    partials = compute(one.stream, view, one.state(), hours, hours.lacking)
    assert not filling._replace(one.lake, one.stream, view, hours, partials)


def test_the_progress_of_views_and_the_shells_tables(one: StreamLake, tmp_path: Path) -> None:
    write_environment(tmp_path)
    bounds = {"column": "at", "past": "2 hours", "future": "30 minutes"}
    views = {"per_minute": PER_MINUTE}
    write_stream(tmp_path, "events", schema=DDL, views=views, event_time=bounds)

    def ask(*arguments: str, expect: int = 0) -> str:
        return said("query", *arguments, "--conf", str(tmp_path), expect=expect)

    lacking = tuple(shift(FIRST, n) for n in range(3))
    status = filling.FilledView("per_minute", f"{one.name}_per_minute", 0, lacking)
    assert filling.fill_status(one.lake, one.stream) == [status]
    filling.try_fill(one.lake, one.stream)
    assert filling.fill_status(one.lake, one.stream) == [replace(status, filled=3, lacking=())]

    shown = {row["name"] for row in json.loads(ask("SHOW TABLES", "--output", "json"))}
    names = ("events", "events_hours", "events_dead_letters", "events_per_minute")
    assert shown == {f"games.{name}" for name in names}
    listed = json.loads(ask("SHOW ALL TABLES", "--output", "json"))
    [columns] = [row["column_names"] for row in listed if row["name"] == "events_per_minute"]
    assert "window_start" in columns and "events" in columns
    assert not any("partials" in row["name"] for row in listed)
    missing = ask("SELECT * FROM games.nothing", expect=2)
    assert "games.events_per_minute" in missing and "partials" not in missing
    counting = f"SELECT count(*) AS n FROM {one.name}_per_minute_partials"
    [counted] = json.loads(ask(counting, "--output", "json"))
    assert counted["n"] > 0
    sql = "SELECT sum(events)::INT AS n FROM games.events_per_minute"
    assert json.loads(ask(sql, "--output", "json")) == [{"n": len(main_rows(one))}]
    assert one.name in ask(sql, "--provenance")
    assert "games.events_per_minute_partials" in ask(sql, "--explain")
    refused = ask(sql, "--revision", "1", "--hour", FIRST, expect=2)
    assert "only the table's rows are kept by revision" in refused
