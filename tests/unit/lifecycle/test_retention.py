"""Retention: hours leave every branch after their time, and the account of each stays."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from accepted_hours import confirm
from brokers import Broker
from killed import kill_at
from lakes import StreamLake, new_environment, new_lake, new_state, new_stream
from named_files import named_file

from anabranch.cli.render.changes import promise_lines
from anabranch.common.errors import Refused
from anabranch.common.fail_points import Step
from anabranch.iceberg import admin, clock, manifests, snapshots
from anabranch.iceberg.commits import Change, Commit, Outcome
from anabranch.iceberg.lake import Lake
from anabranch.job import Job
from anabranch.lifecycle import maintenance, retention
from anabranch.lifecycle.maintenance import Maintained
from anabranch.offsets.hours import Cut, Timeline, end_of, hour_of, hours_between, shift, start_of
from anabranch.offsets.position import Position
from anabranch.operations.audit import audit
from anabranch.operations.reports.explain import explain
from anabranch.protocol import deliveries, ledger
from anabranch.protocol.acts import hold, serve_hour
from anabranch.protocol.apply import plan_rows, restore_ledger
from anabranch.protocol.dead_letters import waiting_speed
from anabranch.protocol.decisions import decisions
from anabranch.protocol.deliveries import Delivery
from anabranch.protocol.ledger_row import HourAccount
from anabranch.protocol.measured import Size
from anabranch.protocol.merge import merge
from anabranch.protocol.publish import new_id
from anabranch.protocol.registers import EXPIRED, Erasure, Erasures, Expired, Hold, Holds
from anabranch.protocol.retention import (
    Overdue,
    find_overdue,
    is_kept,
    plan_due,
    plan_ledger_start,
    require_kept,
)
from anabranch.protocol.state import Accepted, Confirmed, State, accepted_properties
from serving_layer.changes import Token, poll
from serving_layer.egress import undelivered_hours
from serving_layer.reader import Reader
from serving_layer.reader.selection import Revision, Selection

pytestmark = pytest.mark.usefixtures("steady_hour")
LEDGER_STEPS = [Step.EXPIRE_LEDGER_DECIDED, Step.EXPIRE_LEDGER_LANDED]
NOW = datetime.now(UTC).replace(minute=30, second=0, microsecond=0)
ROWS = 1000
ACCOUNT = HourAccount(offsets=ROWS, good=ROWS, dead=0, duplicate=0, gap=0, gaps={})


class Past:
    """Accepted hours, the last of which ended an hour ago. Each `every`th has one small file."""

    def __init__(
        self, folder: Path, hours: int, keep: Any = "30 days", at_once: int = 240, every: int = 1
    ) -> None:
        now = hour_of(datetime.now(UTC))
        self.first = shift(now, -hours)
        self.hours = hours_between(self.first, now)
        self.every = every
        self.lake = new_lake(folder, timeline=Timeline(self.first, self.first, {0: 0}))
        self.configure(keep=keep)
        self.location = self.lake.table().location()
        for begin in range(0, hours, at_once):
            self._accept(self.hours[begin : begin + at_once])

    def configure(self, **values: Any) -> None:
        """Change the stream's file."""
        self.lake = replace(self.lake, stream=new_stream(**values))

    def cut(self, hour: str) -> Cut:
        n = self.hours.index(hour)
        return Cut("t", {0: (n * ROWS, (n + 1) * ROWS)})

    def _accept(self, hours: Sequence[str]) -> None:
        state = self.lake.state()
        cuts = {h: self.cut(h) for h in hours}
        some = [(n, h) for n, h in enumerate(hours) if n % self.every == 0]
        files = tuple(self.write(h, 400 + n % 7) for n, h in some)
        accepted = accepted_properties(state, {h: Accepted(1, cut) for h, cut in cuts.items()})
        batch = Change("batch", files, properties=accepted)
        changes = (Change("speed"), batch, Change("main", files))
        end = cuts[hours[-1]].ends
        timeline = replace(state.timeline, open=shift(hours[-1], 1), start=end)
        self.lake.change(*changes, timeline=timeline, position=Position("t", end), state=state)
        said: dict[str, Any] = {"served": "batch", "account": ACCOUNT}
        rows = (ledger.decision(h, "accepted", 1, cuts[h], end_of(h), **said) for h in hours)
        self.lake.ledger.record(rows)

    def write(self, hour: str, size: int) -> Any:
        """A file of an hour, of so many bytes, as old as the hour."""
        file = named_file(self.location, hour, start_of(hour).date())
        file[5] = size
        path = Path(file.file_path.removeprefix("file://"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
        os.utime(path, (end_of(hour).timestamp(),) * 2)
        return file

    @property
    def job(self) -> Job:
        lake = self.lake
        return Job(new_environment(lake.folder), lake.stream, lake.lake, Broker().adapter)

    def maintain(self, later: timedelta = timedelta(0), dry_run: bool = False) -> Maintained:
        with at(self.lake.lake, later):
            now = datetime.now(UTC) + later
            publisher = self.lake.publisher
            if not dry_run:
                publisher.recover()
            return maintenance.maintain(self.job, now, dry_run, publisher)

    def data(self) -> dict[str, int]:
        folder = self.lake.folder / "warehouse"
        files = [p for p in folder.rglob("*.parquet") if "/events/data/" in str(p)]
        return {str(p): p.stat().st_size for p in files}

    def hours_of(self, branch: str) -> list[str]:
        return sorted(manifests.content_by_hour(self.lake.table(), branch))


@contextmanager
def at(lake: Lake, later: timedelta) -> Iterator[None]:
    """Inside, commits are stamped so much later."""
    lake.__dict__["clock"] = clock.Clock(None, lambda: datetime.now(UTC) + later, time.monotonic)
    yield


# Every eighth hour of a year has a file, and so a manifest, which each maintenance reads.
@pytest.mark.parametrize(
    ("days", "kept", "every"), [(3, 2, 1), pytest.param(365, 30, 8, marks=pytest.mark.full)]
)
def test_a_past_of_hours_leaves_and_frees_the_bytes_that_the_dry_run_promised(
    tmp_path: Path, days: int, kept: int, every: int
) -> None:  # fmt: skip
    past = Past(tmp_path, 24 * days, f"{kept} days", every=every)
    due = [h for h in past.hours if end_of(h) + timedelta(days=kept) <= datetime.now(UTC)]
    assert len(due) in (24 * (days - kept), 24 * (days - kept) - 1)
    sizes = past.data()
    promised = past.maintain(dry_run=True).rows
    filled = past.hours[::every]
    assert promised.hours == tuple(due) and past.hours_of("main") == filled
    assert promised.promise is not None and promised.promise.gone_at is not None
    commits, cpu = list[tuple[str, ...]](), list[float]()
    real = retention._expire_some

    def recorded(*given: Any) -> Any:
        used = time.process_time()
        hours, left = real(*given)
        cpu.append(time.process_time() - used)
        commits.append(hours)
        return hours, left

    # By metadata alone: no data file is one that Parquet's reader could open.
    with mock.patch.object(retention, "_expire_some", recorded):
        assert past.maintain().rows.hours == tuple(due)
    # A bounded number of hours in each commit, none of them in two, and one look behind the last.
    at_most = retention._HOURS_A_COMMIT
    assert commits == [*(tuple(due[i : i + at_most]) for i in range(0, len(due), at_most)), ()]
    print(
        f"{len(due)} hours in {len(commits) - 1} commits, {max(cpu):.2f} CPU s at most, "
        f"{sum(cpu):.1f} in all"
    )
    # The files are there as long as the earlier snapshots are: a hundred, or all of a day.
    early = {path: size for path, size in sizes.items() if path not in past.data()}
    assert (len(early) > 0) == (days == 365) and {hour_in(path) for path in early} <= set(due)
    assert all(past.hours_of(b) == [h for h in filled if h > due[-1]] for b in ("main", "batch"))
    # From here on no other hour is due.
    past.configure(keep="60 days")
    still = past.maintain(timedelta(hours=23), dry_run=True).rows
    assert not still.hours and still.promise is not None
    assert still.promise.stored.bytes + sum(early.values()) == promised.promise.stored.bytes
    assert not still.promise.leaving.files
    past.maintain(timedelta(hours=25))
    left = past.data()
    found = {path for path in sizes if path not in left}
    assert found == {p for p in sizes if hour_in(p) in set(due)}
    assert sum(sizes.values()) - sum(left.values()) == promised.promise.stored.bytes
    assert past.maintain(timedelta(hours=26), dry_run=True).rows.promise.stored.files == 0  # type: ignore[union-attr]
    rows = ledger.newest(past.lake.ledger.history())
    assert {h for h, row in rows.items() if row.decision == "expired"} == set(due)
    assert rows[due[0]].good == ROWS and rows[due[0]].revision == 1
    assert rows[due[0]].cut == past.cut(due[0])


def hour_in(path: str) -> str:
    return path.partition("ingest_hour=")[2].partition("/")[0]


def due_hours(state: State, now: datetime) -> tuple[str, ...]:
    return plan_due(state, timedelta(days=2), now, 1, {}).leaving


FIRST = "2026-11-01T00"
H = [shift(FIRST, i) for i in range(100)]
LATER = start_of(H[60]) + timedelta(days=2)


def accepted_state(**values: Any) -> State:
    """A hundred accepted hours, the newest of which are remembered one by one."""
    timeline = Timeline(FIRST, shift(H[-1], 1), {0: 100}, sealed=values.pop("sealed", {}))
    accepted = {h: Accepted(1, Cut("t", {0: (i, i + 1)})) for i, h in enumerate(H) if i >= 50}
    given = {"accepted": accepted, "settled_before": H[50]} | values
    return new_state(timeline, {0: 100}, **given)


def test_hours_leave_once_they_ended_long_enough_ago_were_accepted_and_delivered() -> None:
    assert due_hours(accepted_state(), LATER) == tuple(H[:60])
    assert due_hours(accepted_state(), LATER - timedelta(seconds=1)) == tuple(H[:59])
    gaps = accepted_state(expired=Expired(H[20], ((H[3], H[4]),)))
    assert due_hours(gaps, LATER) == (H[3], H[4], *H[20:60])
    assert plan_due(accepted_state(), None, LATER, 1, {}).leaving == ()
    waiting = {H[10]: Cut("t", {0: (10, 11)})}
    due = plan_due(accepted_state(sealed=waiting), timedelta(days=2), LATER, 2, {})
    looks = f"hour {H[10]}, which is not accepted yet, looks for duplicates in it"
    assert due.kept == {H[10]: "it is not accepted", H[9]: looks, H[8]: looks}
    assert due.leaving == tuple(h for h in H[:60] if h not in due.kept)
    undelivered = {"export": {H[5]}, "feed": {H[5], H[99]}}
    due = plan_due(accepted_state(), timedelta(days=2), LATER, 1, undelivered)
    assert due.kept == {H[5]: "egress has not delivered it to export, feed"}
    never = plan_due(accepted_state(), timedelta(days=2), LATER, 1, {"export": None})
    assert never.leaving == () and len(never.kept) == 60


def test_an_hour_stays_while_a_publish_of_it_is_incomplete() -> None:
    row = ledger.decision(H[3], "accepted", 1, None, LATER, "row")
    item = {"id": "letters", "at": "", "layer": "batch", "hour": H[4], "revision": 1, "paths": []}
    accepted = {H[55]: Accepted(1, Cut("t", {0: (55, 56)}), unread=(H[54],))}
    state = accepted_state(decisions=(row,), dead_letters=(item,))
    state = replace(state, accepted=state.accepted | accepted)
    assert set(H[:60]) - set(due_hours(state, LATER)) == {H[3], H[4], H[54], H[55]}
    confirmed = Confirmed(frozenset({"row"}), frozenset({"letters"}))
    done = plan_due(state, timedelta(days=2), LATER, 1, {}, confirmed).leaving
    assert set(H[:60]) - set(done) == {H[54], H[55]}


def test_expired_hours_are_recorded_as_spans() -> None:
    expired = Expired().plus(H[:5], FIRST, LATER).plus(H[8:10], FIRST, LATER)
    assert [h for h in H if h in expired] == [*H[:5], *H[8:10]]
    assert expired.kept == ((H[5], H[7]),)
    assert (Expired().count(FIRST), expired.count(FIRST)) == (0, 7)
    assert Expired.from_properties({EXPIRED: expired.to_json()}) == expired
    later = expired.plus([H[6]], FIRST, LATER)
    assert later.kept == ((H[5], H[5]), (H[7], H[7])) and H[6] in later
    # Of branches the one that says most counts, whichever was set back.
    said = [{}, {EXPIRED: expired.to_json()}, {EXPIRED: later.to_json()}]
    assert Expired.of_branches(said) == Expired.of_branches(said[::-1]) == later


def test_hours_are_overdue_a_day_after_their_time_unless_an_operator_holds_them() -> None:
    keep, day = timedelta(days=2), timedelta(days=1)
    assert find_overdue(accepted_state(expired=Expired(H[60])), keep, LATER + day, 1) is None
    almost = accepted_state(expired=Expired(H[58]))
    assert find_overdue(almost, keep, LATER + day, 1) == Overdue(2, H[58], None)
    assert find_overdue(accepted_state(), keep, start_of(H[0]) + keep, 1) is None
    assert find_overdue(accepted_state(), None, LATER + day, 1) is None
    held = Holds((Hold(H[0], H[8], "ann@ops", LATER, "case"),))
    state = accepted_state(holds=held, sealed={H[10]: Cut("t", {0: (10, 11)})})
    why = f"hour {H[10]}, which is not accepted yet, looks for duplicates in it"
    assert find_overdue(state, keep, LATER + day, 1) == Overdue(51, H[9], why)


def test_what_would_need_the_rows_of_an_expired_hour_is_refused() -> None:
    state = accepted_state(expired=Expired(H[20], ()))
    assert is_kept(state, H[20]) and not is_kept(state, H[20], 1) and is_kept(state, H[21], 1)
    found = f"hour {H[3]}: expected rows that are kept, found that they have expired"
    with pytest.raises(Refused, match=found):
        require_kept(state, H[3])
    with pytest.raises(Refused, match="its duplicates cannot be found any more"):
        require_kept(state, H[21], 2)
    require_kept(state, H[22], 2)


@pytest.fixture
def past(tmp_path: Path) -> Past:
    """Two days and a bit, of which rows are kept for two days."""
    return Past(tmp_path, 48 + 8, "2 days")


def expired_of(past: Past) -> list[str]:
    return [h for h in past.hours if past.lake.state().is_expired(h)]


def test_what_is_said_of_an_expired_hour(past: Past) -> None:
    before = past.lake.state().branch_properties["main"]["anabranch.complete-through"]
    gone = past.maintain().rows.hours
    assert len(gone) in (7, 8) and expired_of(past) == list(gone)
    state = past.lake.state()
    assert state.branch_properties["main"]["anabranch.complete-through"] == before == past.hours[-1]
    assert not {
        h for b in snapshots.BRANCHES for h in manifests.files_by_hour(state.table, b) if h in gone
    }
    facts = explain(past.job, gone[0], datetime.now(UTC))
    assert (facts.state, facts.revision, facts.counts.good) == ("expired", 1, ROWS)
    assert (facts.rebuild, facts.query) == (None, None)
    accepted, _ = decisions(past.lake.lake, past.lake.stream, gone[0])
    assert (accepted.query, accepted.readable) == (None, "no: its rows have expired (keep.rows)")
    reader = Reader(past.lake.lake, {past.lake.name: past.lake.stream})
    query, kept = f"SELECT * FROM {past.lake.name}", Selection(revision=Revision(gone[0], 1))
    found = "to be readable, found: no: its rows have expired"
    with pytest.raises(Refused, match=found), reader.query(query, kept) as answer:
        answer.rows.read_all()
    history = past.lake.ledger.history([gone[0]])
    expired = [(row.decision, row.reason) for row in history][-1]
    assert expired == ("expired", "kept for 2 days (keep.rows)")
    # Consumers that begin now are given the hours that are left.
    assert [change.hour for change in poll(past.job, Token("events"))] == past.hours[len(gone) :]
    with pytest.raises(Refused, match="have expired"):
        serve_hour(past.lake.publisher, gone[0], "speed", "test")
    # Twice is once.
    assert past.maintain().rows.hours == ()
    assert len(past.lake.ledger.history([gone[0]])) == len(history)


def test_the_audit_recounts_no_expired_hour_and_finds_one_that_came_back(past: Past) -> None:
    gone = past.maintain().rows.hours
    # The files of this lake are no Parquet: the hours that are left are none of this test's.
    report = audit(past.job, (gone[0], gone[-1]), False)
    assert report.agrees and report.expired == len(gone) and report.hours == ()
    state = past.lake.state()
    back = Change("batch", (past.write(gone[1], 400),)), Change("main", (past.write(gone[2], 400),))
    past.lake.change(*back, state=state)
    found = audit(past.job, (gone[0], gone[-1]), False).disagreements
    assert [(d.hour, d.what) for d in found] == [(gone[1], "batch"), (gone[2], "main")]
    # What came back leaves again, and the ledger says nothing new.
    past.maintain()
    assert audit(past.job, (gone[0], gone[-1]), False).agrees
    assert len([r for r in past.lake.ledger.history([gone[1]]) if r.decision == "expired"]) == 1


@pytest.mark.parametrize("branch", ["main", "batch"])
def test_a_branch_that_is_set_back_brings_no_hour_back(past: Past, branch: str) -> None:
    before = past.lake.state().heads[branch]
    gone = past.maintain().rows.hours
    past.lake.set_back(branch, before)
    # The hazard: the branch has the rows again.
    assert set(gone) <= set(past.hours_of(branch))
    assert expired_of(past) == list(gone)
    merge(past.lake.lake, past.lake.stream)
    assert not set(gone) & set(past.hours_of("main"))
    past.maintain()
    assert not set(gone) & {h for b in snapshots.BRANCHES for h in past.hours_of(b)}
    assert past.hours_of("main") == past.hours[len(gone) :]


def test_an_hour_given_to_speed_leaves_with_its_override(past: Past) -> None:
    state, hour = past.lake.state(), past.hours[3]
    files = (past.write(hour, 300),)
    past.lake.change(Change("speed", files), Change("main"), state=state)
    publisher = past.lake.publisher
    serve_hour(publisher, hour, "speed", "test")
    assert list(manifests.files_by_hour(past.lake.table(), "main")[hour]) == [files[0].file_path]
    gone = past.maintain().rows.hours
    assert hour in gone and past.lake.state().overrides == {}
    assert not [b for b in snapshots.BRANCHES if hour in past.hours_of(b)]


def test_a_tag_holds_what_has_expired_until_its_age_ends(past: Past) -> None:
    table = past.lake.table()
    table.manage_snapshots().create_tag(past.lake.state().heads["main"], "audit-2026").commit()
    gone = past.maintain().rows.hours
    past.configure(keep="60 days")
    promise = past.maintain(timedelta(hours=25), dry_run=True).rows.promise
    assert promise is not None and promise.gone_at is None
    held = {holder.name: holder for holder in promise.holders}
    assert held["tag audit-2026"].until is None and held["tag audit-2026"].size == promise.stored
    assert promise.stored.files == len(gone)
    past.maintain(timedelta(hours=25))
    assert {h for p in past.data() if (h := hour_in(p)) in gone} == set(gone)
    past.lake.table().manage_snapshots().remove_tag("audit-2026").commit()
    past.maintain(timedelta(hours=26))
    assert not {h for p in past.data() if (h := hour_in(p)) in gone}


def test_hours_wait_for_egress(past: Past) -> None:
    target = {"name": "export", "root": f"file://{past.lake.folder}/export"}
    past.configure(keep="2 days", egress=[target])
    stream = past.lake.stream
    name, schema = stream.egress_table, deliveries.DELIVERIES_SCHEMA
    admin.create(past.lake.lake, name, schema, (), admin.TABLE_PROPERTIES)
    assert undelivered_hours(past.job, stream.egress[0]) is None
    assert past.maintain().rows.hours == ()
    tokens = {change.hour: change.token for change in poll(past.job, Token("events"))}
    last = past.hours[4]
    delivery = Delivery("d", last, "export", "place", 1, "batch", 1, 1, 1, tokens[last], NOW)
    deliveries.record(past.lake.lake, name, delivery)
    rows = past.maintain().rows
    assert rows.hours == tuple(past.hours[:5])
    assert set(rows.kept.values()) == {"egress has not delivered it to export"}


def expire(folder: Path, keep: Any = "2 days") -> None:
    """Maintain the stream of a folder that another process has made."""
    environment = new_environment(folder)
    lake = StreamLake(folder, Lake(environment), new_stream(keep=keep), environment)
    job = Job(environment, lake.stream, lake.lake, Broker().adapter)
    publisher = lake.publisher
    publisher.recover()
    maintenance.maintain(job, datetime.now(UTC), False, publisher)


QUARTERS = {"rows": "2 days", "dead_letters": "2 days", "ledger": "2 days"}
DAYS = 95  # of which a quarter of a year begins in the first 93


def quarter_of(past: Past) -> str:
    """The first hour of the newest quarter that began more than two days ago."""
    past_ones = [h for h in past.hours if end_of(h) + timedelta(days=2) < datetime.now(UTC)]
    return max(h for h in past_ones if h[5:] in QUARTERS_BEGIN)


QUARTERS_BEGIN = [f"{month:02}-01T00" for month in (1, 4, 7, 10)]


def ledger_hours(past: Past) -> set[str]:
    return {row.hour for row in past.lake.ledger.history()}


def test_whole_quarters_leave_the_ledger_and_stay_known(tmp_path: Path) -> None:
    past = Past(tmp_path, 24 * DAYS, QUARTERS, every=24)
    start = quarter_of(past)
    changes = list(poll(past.job, Token("events")))
    behind = Token.decode(changes[0].token)  # Its row leaves.
    level = Token.decode(changes[-1].token)
    with_dead_letters(past, [past.hours[3]])
    hold(past.lake.publisher, past.hours[5], past.hours[5], "case 7")
    assert past.maintain().ledger.before is None and ledger_hours(past) == set(past.hours)
    hold(past.lake.publisher, past.hours[5], past.hours[5], "closed", release=True)
    # Until the next publish, the decision that the last hour has expired waits on its branch.
    assert past.maintain(timedelta(minutes=1)).ledger.before is None
    confirm(past.lake)
    promised = past.maintain(timedelta(minutes=1), dry_run=True).ledger
    assert promised.before == start and ledger_hours(past) == set(past.hours)
    assert past.maintain(timedelta(minutes=2)).ledger == promised and promised.size.files > 0
    left = [h for h in past.hours if h >= start]
    assert ledger_hours(past) == set(left)
    # Twice is once, and no process writes a row again.
    assert past.maintain(timedelta(minutes=3)).ledger == retention.LedgerExpired()
    assert ledger_hours(past) == set(left)
    # Consumers go on, and get what is left.
    state = past.lake.state()
    assert list(poll(past.job, level)) == []
    kept = [h for h in past.hours if h not in state.expired]
    assert [change.hour for change in poll(past.job, behind)] == kept and kept[0] > start
    assert restore_ledger(past.lake.lake, past.lake.stream) == 0
    assert audit(past.job, (past.hours[0], past.hours[5]), False).agrees
    assert state.branch_properties["main"]["anabranch.complete-through"] == past.hours[-1]
    back = (Change("main", (past.write(past.hours[2], 400),)),)
    past.lake.change(*back, state=state)
    found = audit(past.job, (past.hours[0], past.hours[5]), False).disagreements
    assert [d.hour for d in found] == [past.hours[2]]
    facts = explain(past.job, past.hours[4], datetime.now(UTC))
    assert (facts.state, facts.counts.good) == ("expired", None)


def test_maintenance_killed_while_the_ledger_expires_is_continued(tmp_path: Path) -> None:
    past = Past(tmp_path, 24 * DAYS, QUARTERS, every=240)
    start = quarter_of(past)
    for step in LEDGER_STEPS:
        kill_at(step.label, expire, past.lake.folder, QUARTERS)
        # The hazard: nothing has left the ledger, or the quarters have.
        left = start if step is Step.EXPIRE_LEDGER_LANDED else past.hours[0]
        assert min(ledger_hours(past)) == left
    expire(past.lake.folder, QUARTERS)
    assert ledger_hours(past) == {h for h in past.hours if h >= start}


def test_the_request_of_an_erasure_keeps_its_quarter_in_the_ledger() -> None:
    now, asked = start_of("2028-01-05T00"), start_of("2027-05-05T00")
    state = accepted_state(expired=Expired("2027-12-01T00"))
    assert plan_ledger_start(state, (), timedelta(days=30), now) == "2027-10-01T00"
    erasure = Erasure("e", "id", asked, asked, "2027-05-05T00", "t", {})
    state = replace(state, erasures=Erasures((erasure,)))
    assert plan_ledger_start(state, (), timedelta(days=30), now) == "2027-04-01T00"


def test_a_ledger_that_is_lost_is_restored_with_its_expired_hours() -> None:
    state = accepted_state(expired=Expired(H[20], ((H[3], H[3]),)))
    rows = ledger.newest(plan_rows(state, (), dict.fromkeys(H, 7), {}, NOW))
    assert [rows[h].decision for h in (H[2], H[3], H[19], H[20])] == [
        "expired", "accepted", "expired", "accepted",
    ]  # fmt: skip
    assert [rows[h].good for h in (H[2], H[3])] == [None, 7]
    assert min(r.hour for r in plan_rows(state, (), {}, {}, NOW, H[19])) == H[19]


STEPS = [
    Step.EXPIRE_DECIDED, Step.COMMIT_PREPARED, Step.COMMIT_LANDED, Step.EXPIRE_PUBLISHED,
    Step.EXPIRE_RECORDED,
]  # fmt: skip
LETTERS_STEPS = [Step.EXPIRE_LETTERS_DECIDED, Step.EXPIRE_LETTERS_PUBLISHED]


def test_every_step_of_expiry_is_killed_at() -> None:
    killed_at = {*STEPS, *LETTERS_STEPS, *LEDGER_STEPS}
    assert {step for step in Step if step.label.startswith("expire.")} <= killed_at


@pytest.mark.parametrize("step", LETTERS_STEPS, ids=lambda step: step.label)
def test_maintenance_killed_while_letters_expire_is_continued(past: Past, step: Step) -> None:
    hours = [past.hours[1], past.hours[2], past.hours[40]]
    with_dead_letters(past, hours)
    past.configure(keep={"dead_letters": "2 days"})
    kill_at(step.label, expire, past.lake.folder, {"dead_letters": "2 days"})
    # The hazard: the dead letters of all due hours have left, or of none.
    left = [h for h, _, _ in past.lake.dead("main")]
    assert left == (hours[2:] if step is Step.EXPIRE_LETTERS_PUBLISHED else hours)
    expire(past.lake.folder, {"dead_letters": "2 days"})
    assert [h for h, _, _ in past.lake.dead("main")] == hours[2:]


def with_dead_letters(past: Past, hours: Sequence[str]) -> None:
    """One dead letter of each hour, as the batch layer publishes them."""
    staged = past.lake.stage_dead([(h, 0, past.cut(h).ranges[0][0]) for h in hours], "batch")
    table = past.lake.lake.load(past.lake.stream.dead_letters_table)
    changes = (Change("batch", staged.files), Change("main", staged.files))
    commit = Commit(new_id(), snapshots.heads(table), changes)
    assert past.lake.lake.commit(table, commit) is Outcome.LANDED


def test_dead_letters_leave_after_their_own_time_and_come_back_by_no_publish(past: Past) -> None:
    hours = [past.hours[1], past.hours[2], past.hours[40]]
    with_dead_letters(past, hours)
    past.configure(keep={"dead_letters": "2 days"})
    hold(past.lake.publisher, hours[1], hours[1], "case 7")
    promised = past.maintain(dry_run=True).letters
    assert promised.hours == (hours[0],) and promised.promise is not None
    assert promised.promise.leaving.files == 1
    gone = past.maintain()
    assert gone.letters.hours == (hours[0],) and gone.rows.hours == ()
    assert gone.letters.kept[hours[1]].endswith("case 7")
    assert past.lake.dead("main") == past.lake.dead("batch")
    assert [h for h, _, _ in past.lake.dead("main")] == hours[1:]
    # A publish names dead letters of the hour and of another, as a restatement may.
    late = [(h, 0, past.cut(h).ranges[0][0] + 1) for h in (hours[0], hours[2])]
    letters = (waiting_speed(past.lake.stage_dead(late, "speed"), NOW),)
    past.lake.change(Change("speed"), Change("main"), dead_letters=letters)
    past.lake.roll()
    assert [h for h, _, _ in past.lake.dead("speed")] == [hours[2]]
    assert past.maintain().letters.hours == ()


def test_dead_letters_of_a_branch_that_is_set_back_leave_again(past: Past) -> None:
    with_dead_letters(past, past.hours[1:3])
    name = past.lake.stream.dead_letters_table
    before = snapshots.heads(past.lake.lake.load(name))["batch"]
    past.configure(keep={"dead_letters": "2 days"})
    assert past.maintain().letters.hours == tuple(past.hours[1:3])
    past.lake.set_back("batch", before, name)
    # The hazard: later hours are due too, and have no dead letters.
    assert [h for h, _, _ in past.lake.dead("batch")] == past.hours[1:3]
    assert past.maintain().letters.hours == tuple(past.hours[1:3])
    assert past.lake.dead("batch") == []
    assert past.maintain().letters.hours == ()


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.label)
def test_maintenance_killed_in_the_middle_of_expiry_is_continued(past: Past, step: Step) -> None:
    due = [h for h in past.hours if end_of(h) + timedelta(days=2) <= datetime.now(UTC)]
    for _ in range(2):
        if expired_of(past):
            break
        kill_at(step.label, expire, past.lake.folder)
        # The hazard: it died with the hours expired, or not; never with some of their rows.
        lands = step not in (Step.EXPIRE_DECIDED, Step.COMMIT_PREPARED)
        assert expired_of(past) == (due if lands else [])
        for branch in ("main", "batch"):
            assert past.hours_of(branch) == past.hours[len(due) if lands else 0 :]
    expire(past.lake.folder)
    assert expired_of(past) == due and past.hours_of("main") == past.hours[len(due) :]
    rows = past.lake.ledger.history(due)
    assert sorted(r.hour for r in rows if r.decision == "expired") == due


def test_a_promise_in_words(recorded: Callable[[Any], None]) -> None:
    until = datetime(2026, 11, 21, tzinfo=UTC)
    holders = [retention.Holder("tag main-x", until, Size(2, 30))]
    promise = retention.Promise(Size(1, 10), Size(2, 30), holders, until, True)
    recorded([*promise_lines(promise)])
    holders = [retention.Holder("tag mine", None, Size(2, 30))]
    endless = replace(promise, holders=holders, gone_at=None, versions=None)
    recorded([*promise_lines(endless)])


def test_a_duration_alone_is_that_of_rows_and_dead_letters() -> None:
    alone = {"rows": "30 days", "dead_letters": "30 days"}
    assert new_stream(keep="30 days").keep == new_stream(keep=alone).keep
    assert new_stream(keep={"rows": "10 years"}).keep.rows == timedelta(days=3650)
    assert new_stream().keep.rows is None and new_stream(keep="for ever").keep.rows is None
