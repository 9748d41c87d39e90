"""The changes of a stream: a consumer has the rows of `main`, whatever happens in between."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from accepted_hours import HOURS, accept, confirm, cut, erase, expire, four_hours, lost_commits
from budget import budget
from conf_folders import said
from hypothesis import given, settings
from hypothesis import strategies as st
from lakes import FIRST, StreamLake, new_state
from proofs import NOW
from proofs import job as job_of

from anabranch.cli.render.changes import change_words
from anabranch.common.errors import ConfigurationError
from anabranch.common.output import plain
from anabranch.iceberg import admin
from anabranch.iceberg.manifests import files_of
from anabranch.offsets.hours import Timeline, shift
from anabranch.protocol import acts, apply, ledger
from anabranch.protocol.ledger_row import Kind, Layer, LedgerRow
from anabranch.protocol.state import Accepted, State
from serving_layer import changes
from serving_layer import changes as feed
from serving_layer.changes import Content, Cursor, Token


def row(
    hour: str, kind: Kind, revision: int, id: str, served: Layer = "batch", at: datetime = NOW
) -> LedgerRow:
    return ledger.decision(hour, kind, revision, cut(hour), at, id, served=served)


@dataclass
class Stream:
    """The content that `main` serves of each hour, the ledger, and what waits for it."""

    served: dict[str, Content] = field(default_factory=dict)
    erasures: dict[str, int] = field(default_factory=dict)
    rows: list[LedgerRow] = field(default_factory=list)
    waiting: list[LedgerRow] = field(default_factory=list)
    overrides: dict[str, Layer] = field(default_factory=dict)
    decisions: int = 0

    def decide(self, hour: str, kind: Kind) -> None:
        self.decisions += 1
        now = self.served[hour]
        self.waiting.append(row(hour, kind, now.revision, f"d{self.decisions}", now.layer))

    def accept(self, hour: str) -> None:
        before = self.served.get(hour, Content(0, "batch"))
        self.served[hour] = Content(before.revision + 1, self.overrides.get(hour, "batch"))
        self.decide(hour, "accepted")

    def serve(self, hour: str, layer: Layer) -> None:
        """An hour that waits for its acceptance may be given away too."""
        self.overrides[hour] = layer
        if (now := self.served.get(hour)) is not None:
            self.served[hour] = replace(now, layer=layer)
            self.decide(hour, "served")
        else:
            self.decisions += 1
            self.waiting.append(row(hour, "served", 0, f"d{self.decisions}", layer))

    def erase(self, hour: str, of_rows: bool = True) -> None:
        """Rows of an hour, or only dead letters."""
        self.decisions += 1
        revision = self.served[hour].revision if hour in self.served else 0
        part = {"id": f"e{self.decisions}", "rows": int(of_rows), "dead": int(not of_rows)}
        id = f"d{self.decisions}"
        self.waiting.append(ledger.decision(hour, "erased", revision, None, NOW, id, erasure=part))
        if of_rows:
            self.erasures[hour] = self.erasures.get(hour, 0) + 1

    @property
    def contents(self) -> dict[str, tuple[Content, int]]:
        """Return the content that a consumer of every complete hour has."""
        return {hour: (one, self.erasures.get(hour, 0)) for hour, one in self.served.items()}

    def record(self) -> None:
        """Write new decisions to the ledger in one append; they wait until the next publish."""
        known = {r.decision_id for r in self.rows}
        sequence = len(self.rows) + 1
        new = [replace(r, sequence=sequence) for r in self.waiting if r.decision_id not in known]
        self.rows += sorted(new, key=lambda r: (r.recorded_at, r.hour, r.decision_id))

    def confirm(self) -> None:
        known = {r.decision_id for r in self.rows}
        self.waiting = [r for r in self.waiting if r.decision_id not in known]

    @property
    def state(self) -> State:
        accepted = {h: Accepted(c.revision, cut(h)) for h, c in self.served.items()}
        sealed = {h: cut(h) for h in HOURS if h not in accepted}
        timeline = Timeline(FIRST, shift(HOURS[-1], 1), {0: 40}, sealed=sealed)
        given = {"accepted": accepted, "decisions": tuple(self.waiting)}
        return new_state(timeline, {0: 40}, overrides=dict(self.overrides), **given)

    def poll(self, token: Token, at_once: int) -> Iterator[changes.PlannedChange]:
        """Yield changes as `changes.poll` does, over values."""
        new = changes.rows_after(self.rows, token.cursor)
        assert new is not None
        todo, ids = changes.newest_of_each(new, token.first), {r.decision_id for r in self.rows}
        erased = changes.erasures_of(new)
        while True:
            for one in changes.plan_changes(self.state, token, todo, ids, at_once, erased):
                yield one
                token = Token.decode(one.token.encode())
            todo = todo[at_once:]
            if not todo:
                return


STEPS = st.one_of(
    st.tuples(st.just("accept"), st.sampled_from(HOURS)),
    st.tuples(st.just("serve"), st.sampled_from(HOURS), st.sampled_from(["speed", "batch"])),
    st.tuples(st.just("erase"), st.sampled_from(HOURS), st.booleans()),
    st.tuples(st.just("record")),
    st.tuples(st.just("confirm")),
    st.tuples(st.just("killed after"), st.integers(0, 2)),
    st.tuples(st.just("follow")),
)


@settings(max_examples=budget(150, 400))
@given(st.lists(STEPS, max_size=30), st.integers(1, 3))
def test_a_consumer_has_mains_rows_after_every_poll(steps: list[Any], at_once: int) -> None:
    """It holds through restatements, overrides, erasures, late rows, and kills between any."""
    world, token, held = Stream(), Token("events"), dict[str, tuple[Content, int]]()
    for step, *arguments in [*steps, ("follow",)]:
        if step in ("killed after", "follow"):
            given = list(islice(world.poll(token, at_once), arguments[0] if arguments else None))
            assert len({g.hour for g in given}) == len(given), "only the newest of an hour is given"
            for one in given:
                held[one.hour] = world.contents[one.hour]
                assert replace(one.content, erased="") == world.served[one.hour]
                token = Token.decode(one.token.encode())
            if step == "follow":
                assert held == world.contents
                # Nothing is given twice by a follower that lives.
                assert not list(world.poll(token, at_once))
        else:
            getattr(world, step)(*arguments)


def test_restatements_between_two_polls_are_one_change_and_hours_before_the_first_none() -> None:
    world, token = Stream(), Token("events")
    world.accept(FIRST)
    world.record()
    (first,) = world.poll(token, 9)
    world.accept(FIRST)
    world.accept(FIRST)
    world.record()
    (second,) = world.poll(first.token, 9)
    assert second.content == Content(3, "batch")
    before = (Content(1, "batch"), world.rows[0])
    assert changes.replaced(first.token, world.rows, {"d2", "d3"}) == {FIRST: before}
    world = Stream()
    for hour in HOURS[:3]:
        world.accept(hour)
    world.record()
    given = list(world.poll(Token("events", first=HOURS[1]), 9))
    assert [g.hour for g in given] == HOURS[1:3]
    world.accept(FIRST)
    assert not list(world.poll(given[-1].token, 9))


def test_a_decision_that_waits_for_its_row_is_given_once() -> None:
    world, token = Stream(), Token("events")
    world.accept(FIRST)
    (one,) = world.poll(token, 9)
    assert one.token.ahead == {FIRST: Content(1, "batch")}
    for step in (world.record, world.confirm):
        step()
        assert not list(world.poll(one.token, 9))
    # Recorded by then: a later token says nothing of it any more.
    world.accept(HOURS[1])
    world.record()
    world.confirm()
    (two,) = world.poll(one.token, 9)
    assert (two.hour, two.token.ahead) == (HOURS[1], {})


def test_an_erasure_is_given_once_and_names_what_it_replaces() -> None:
    """The hazard: revision and layer stay, so only the erasure's row distinguishes the contents."""
    world, token = Stream(), Token("events")
    world.accept(FIRST)
    (one,) = world.poll(token, 9)
    world.erase(FIRST)
    world.erase(FIRST, of_rows=False)
    for step in (None, world.record, world.confirm):
        if step is not None:
            step()
        (two,) = world.poll(one.token, 9)
        assert (two.content.revision, two.erasures) == (1, ("e2",))
        assert not list(world.poll(two.token, 9))
    before = (Content(1, "batch"), world.rows[0])
    assert changes.replaced(one.token, world.rows, {"d2", "d3"}) == {FIRST: before}
    assert changes.replaced(two.token, world.rows, set()) == {FIRST: (two.content, world.rows[1])}


def test_a_token_is_short_and_a_snapshots_begins_before_whatever_it_may_lack() -> None:
    times = [NOW + timedelta(hours=n) for n in range(len(HOURS))]
    decided = [row(h, "accepted", 1, f"d{n}", at=times[n]) for n, h in enumerate(HOURS)]
    rows = [replace(one, sequence=n) for n, one in enumerate(decided, 1)]
    late = replace(row(FIRST, "served", 1, "late", at=NOW), sequence=9)
    token = changes.token_at("events", [*rows, late], NOW + timedelta(hours=2, minutes=1))
    assert token.cursor == Cursor.at(rows[1])
    assert changes.token_at("events", rows, NOW).cursor is None
    assert changes.token_at("events", rows, NOW + timedelta(days=1)).cursor == Cursor.at(rows[-1])
    ahead = {FIRST: Content(2, "speed", "ba9876543210")}
    other = Token("events", FIRST, Cursor(7, "0123456789ab"), ahead)
    text = other.encode()
    assert Token.decode(text) == other
    assert text.isascii() and text.isprintable() and not {" ", '"', "'", "$"} & set(text)
    assert len(text) < 200
    for broken in ("ab1.", "ab1.e30", text[:-9], "ab1.%%%", "ab1.bnVsbA"):
        with pytest.raises(ConfigurationError, match="expected a complete token"):
            Token.decode(broken)


@pytest.fixture
def lake(tmp_path: Path) -> StreamLake:
    """Four sealed hours, of which the speed layer has ten offsets each."""
    return four_hours(tmp_path)


def in_main(lake: StreamLake) -> dict[str, list[str]]:
    """Return the files of each complete hour in `main`."""
    state = lake.state()
    complete = [hour for hour in HOURS if state.is_accepted(hour)]
    return {h: sorted(f.file_path for f in files_of(state.table, "main", h)) for h in complete}


@pytest.mark.parametrize("seed", [1, 2])
def test_a_follower_of_real_tables_equals_them_always(lake: StreamLake, seed: int) -> None:
    """Restated, erased, given away and back, expired, recorded late; killed anywhere."""
    dice, job = random.Random(seed), job_of(lake)
    held, replays = dict[str, list[str]](), 0
    token: str | None = None
    steps = ["accept", "accept", "late", "serve", "confirm", "expire", "erase", "erase"]
    for _ in range(14):
        hour, step = dice.choice(HOURS), dice.choice(steps)
        if step in ("accept", "late"):
            accept(lake, hour, dice.randint(1, 9), record=step == "accept")
        elif step == "serve":
            acts.serve_hour(lake.publisher, hour, dice.choice(["speed", "auto"]), "a test")
        elif step == "confirm":
            confirm(lake)
        elif step == "erase":
            # A row of each content of the hour, which may have been erased before.
            erase(lake, cut(hour).ranges[0][0] + dice.randint(0, 3))
        else:
            expire(lake)
        killed_after = dice.choice([None, None, 0, 1])
        for change in islice(feed.poll(job, feed.start_from(job, token)), killed_after):
            replays += held.get(change.hour) == list(change.added) and change.removed == ()
            if change.removed is not None and change.hour in held:
                assert set(change.removed) <= set(held[change.hour])
                kept = set(held[change.hour]) - set(change.removed)
                assert set(change.added) | kept == set(in_main(lake)[change.hour])
            held[change.hour] = in_main(lake)[change.hour]
            assert change.snapshot == lake.state().heads["main"]
            token = change.token
        if killed_after is None:
            assert held == in_main(lake)
            assert not list(feed.poll(job, feed.start_from(job, token)))
    for change in feed.poll(job, feed.start_from(job, token)):
        held[change.hour] = in_main(lake)[change.hour]
    assert held == in_main(lake)


def test_the_content_of_a_change(lake: StreamLake) -> None:
    job = job_of(lake)
    accept(lake, FIRST, 3)
    (first,) = feed.poll(job, feed.start_from(job, None))
    assert (first.hour, first.revision, first.served) == (FIRST, 1, "batch")
    assert (first.rows, first.replaces) == (3, None)
    assert (len(first.added), first.removed) == (1, ())

    accept(lake, FIRST, 4)
    accept(lake, FIRST, 5)
    (second,) = feed.poll(job, feed.start_from(job, first.token))
    assert (second.revision, second.rows, second.replaces, second.removed) == (3, 5, 1, first.added)
    printed = plain(second)
    keys = "hour kind revision served snapshot rows replaces files erasures token"
    assert list(printed) == keys.split()
    assert (first.kind, second.kind, printed["kind"]) == ("completed", "replaced", "replaced")
    assert printed["erasures"] == []
    assert printed["files"] == {"added": list(second.added), "removed": list(first.added)}
    assert "revision 3 instead of 1  batch  5 rows  +1 -1 files" in change_words(second)

    expire(lake)
    accept(lake, FIRST, 6)
    expire(lake)
    (third,) = feed.poll(job, feed.start_from(job, second.token))
    assert (third.replaces, third.removed) == (3, None)

    acts.serve_hour(lake.publisher, FIRST, "speed", "a test")
    (fourth,) = feed.poll(job, feed.start_from(job, third.token))
    assert (fourth.served, fourth.revision, fourth.rows) == ("speed", 4, 10)
    assert fourth.removed == third.added


def test_the_content_of_an_erasure(lake: StreamLake) -> None:
    """A token from before an erasure gets the affected hours again, without erased rows."""
    job = job_of(lake)
    accept(lake, FIRST, 3)
    accept(lake, HOURS[1], 3)
    before = list(feed.poll(job, feed.start_from(job, None)))
    done = erase(lake, 1)
    (one,) = feed.poll(job, feed.start_from(job, before[-1].token))
    assert (one.hour, one.kind, one.revision, one.replaces, one.rows) == (FIRST, "erased", 1, 1, 2)
    assert (one.erasures, one.removed) == ((done.erasure.id,), before[0].added)
    # Two erasures between two polls are both named; the files are relative to those given before.
    accept(lake, HOURS[2], 3)
    more = {erase(lake, 2).erasure.id, erase(lake, 0, 20).erasure.id}
    two, three = feed.poll(job, feed.start_from(job, one.token))
    assert (two.hour, two.kind, set(two.erasures), two.rows) == (FIRST, "erased", more, 0)
    assert two.removed == one.added
    assert (three.hour, three.kind, three.erasures, three.rows) == (HOURS[2], "completed", (), 2)
    assert f"+0 -1 files  erased by {', '.join(two.erasures)}  snapshot" in change_words(two)
    # An hour that is not complete is given without them once it is.
    erase(lake, 31)
    assert not list(feed.poll(job, feed.start_from(job, three.token)))
    accept(lake, HOURS[3], 2)
    (four,) = feed.poll(job, feed.start_from(job, three.token))
    assert (four.hour, four.kind) == (HOURS[3], "completed")


def test_a_new_ledger_gives_every_hour(lake: StreamLake, caplog: pytest.LogCaptureFixture) -> None:
    job = job_of(lake)
    for hour in HOURS[:2]:
        accept(lake, hour, 2)
    *_, last = feed.poll(job, feed.start_from(job, None))
    confirm(lake)
    lake.lake.catalog.drop_table(lake.stream.hours_table)
    name = lake.stream.hours_table
    admin.create(lake.lake, name, apply.LEDGER_SCHEMA, (), admin.TABLE_PROPERTIES)
    apply.restore_ledger(lake.lake, lake.stream)
    assert [c.hour for c in feed.poll(job, feed.start_from(job, last.token))] == HOURS[:2]
    assert "was recreated" in caplog.text


def test_a_token_of_a_lost_ledger_gives_every_hour_again(lake: StreamLake, tmp_path: Path) -> None:
    """Catalog and bucket were restored to an earlier time; an egress position is in Kafka."""
    accept(lake, FIRST, 2)
    confirm(lake)
    with lost_commits(tmp_path):
        accept(lake, FIRST, 3)
        confirm(lake)
        *_, last = feed.poll(job_of(lake), feed.start_from(job_of(lake), None))
    restored = replace(lake, lake=lake.again())
    for hour in (HOURS[1], HOURS[2]):
        job = job_of(restored)
        assert FIRST in [c.hour for c in feed.poll(job, Token.decode(last.token))]
        accept(restored, hour, 2)
        confirm(restored)


def test_an_hour_is_pending_until_its_change_is_consumed(lake: StreamLake) -> None:
    """The hazard: a decision of the ledger waits on the branches of an idle stream for ever and
    counts as a change: an hour that every target got never left."""
    job, hour = job_of(lake), HOURS[1]
    token = Token(job.stream.name)
    for recorded in (True, False):
        assert feed.pending_hours(job, token) == set()
        accept(lake, hour, 9, record=recorded)
        assert feed.pending_hours(job, token) == {hour}
        [change] = feed.poll(job, token)
        token = Token.decode(change.token)
    # Given before its row was written: the row is behind the token; the hour was given.
    assert feed.pending_hours(job, token) == {hour}
    assert list(feed.poll(job, token)) == []
    lake.ledger.record_waiting(lake.state())
    accept(lake, hour, 8)
    [change] = feed.poll(job, token)
    assert lake.state().decisions
    assert feed.pending_hours(job, Token.decode(change.token)) == set()


def test_since_states_its_formats_and_nothing_is_given_until_main_is_merged(
    lake: StreamLake,
) -> None:
    job = job_of(lake)
    accept(lake, FIRST, 2)
    accept(lake, HOURS[2], 2)
    assert [c.hour for c in feed.poll(job, feed.start_from(job, HOURS[1]))] == [HOURS[2]]
    head = str(lake.state().heads["main"])
    # Decided by a clock of long ago: the snapshot holds it all.
    assert not list(feed.poll(job, feed.start_from(job, head)))
    found = "expected a tag, a branch, a snapshot's id or a time"
    with pytest.raises(ConfigurationError, match=found):
        feed.start_from(job, "yesterday")
    with pytest.raises(ConfigurationError, match=r"expected a UTC hour such as .*2026-11-31T05"):
        feed.start_from(job, "2026-11-31T05")
    found = "expected a token of stream events, found one of others"
    with pytest.raises(ConfigurationError, match=found):
        feed.start_from(job, Token("others").encode())
    assert "expected a duration" in said("changes", "events", "--every", "soon", expect=2)
    table = lake.table()
    before = table.metadata.snapshot_by_id(lake.state().heads["main"])
    assert before is not None and before.parent_snapshot_id is not None
    table.manage_snapshots().create_branch(before.parent_snapshot_id, "main").commit()
    assert not list(feed.poll(job, feed.start_from(job, None)))
