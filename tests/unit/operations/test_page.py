"""The status page: it says what the views say, as of when it says, to those who may read it."""

import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import time_machine
from conf_folders import said, write_environment, write_stream
from lakes import StreamLake
from pages import browser, five_years, folder_of, named, new_page, parsed, show, stand_still
from proofs import HOUR, NEXT, job, new_proof
from report_hours import LATER, a_full_hour, an_expired_hour, an_old_hour, kafka, nothing_yet
from servers import serving
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from test_metrics import NOW as STATUS_NOW
from test_metrics import VIEW
from waiting import wait_for

from anabranch.cli import main
from anabranch.common.errors import ConfigurationError, Transient
from anabranch.job import Job
from anabranch.offsets.hours import hour_of, shift
from anabranch.operations.page import app, hour_view, streams
from anabranch.operations.page.app import Page, allowed_hosts, split_commands
from anabranch.operations.reports import dead_letters, explain, status
from anabranch.operations.reports.maintenance import read_maintenance
from anabranch.operations.reports.reading import (
    BackgroundReader,
    Failure,
    OnDemand,
    Readings,
    TimedValue,
    rest_after,
)
from anabranch.operations.reports.status import Lag
from anabranch.protocol.ledger_row import HourShare, UnknownField, UnknownFields
from anabranch.protocol.retention import Overdue
from anabranch.protocol.state import load_state

PATIENCE = timedelta(minutes=10)
DEADLINE, EVERY = timedelta(seconds=30), timedelta(seconds=10)


@pytest.fixture
def still() -> Iterator[None]:
    with time_machine.travel(LATER, tick=False):
        yield


def full_job(folder: Path, make: Callable[[StreamLake], None] = a_full_hour) -> Job:
    one = new_proof(folder)
    make(one)
    stand_still(one.lake)
    return replace(job(one), kafka=kafka())


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A stream with an hour of every kind of report. Nothing changes it."""
    with time_machine.travel(LATER, tick=False):
        return full_job(tmp_path_factory.mktemp("full"))


@pytest.fixture
def page(full: Job, still: None) -> Page:
    return read_page(full)


def read_page(*jobs: Job) -> Page:
    made = new_page(*jobs)
    for reader in made.readers.values():
        reader.refresh()
    return made


def shown(client: TestClient, path: str, until: str = "") -> str:
    """A page's text, once it contains `until`: reports on demand may come a moment later."""
    deadline = time.monotonic() + 30
    while True:
        answer = client.get(path)
        assert answer.status_code == 200, answer.text
        text = parsed(answer.text).text
        if until in text:
            return text
        assert time.monotonic() < deadline, f"expected {until!r} within 30 s, found: {text}"


def test_the_streams_table_equals_status(page: Page) -> None:
    text = shown(browser(page), "/")
    assert "1 stream, 1 to look at: events differs." in text
    # Freshness, lag and duplicates: 5 offsets wait since 02:00, and no hour waits for batch.
    rows = f"anabranch explain events {NEXT} --rows"
    assert f"events ≠ differs 1,800 5 1 2026-11-21 02:30:00 {NEXT} 0 {rows}" in text
    expected = "layers, found 1 missing, 1 extra, 1 changed: anabranch explain"
    assert expected in shown(browser(page), "/streams/events")


AS_OF = datetime(2026, 11, 21, 15, 42, 10, tzinfo=UTC)


def test_the_groups_table_says_how_far_each_group_is_and_who_holds_it_back(full: Job) -> None:
    late, far = shift(hour_of(AS_OF), -3), shift(hour_of(AS_OF), -1)
    jobs = {name: named(full, name, "small") for name in ("a", "b", "c")} | {"d": named(full, "d")}
    made, of_a, of_d = new_page(*jobs.values()), five_years("a", AS_OF), five_years("d", AS_OF)
    show(made, AS_OF, of_a, five_years("b", AS_OF, complete_through=late), of_d)
    text = shown(browser(made), "/")
    assert "complete through not known , behind: b, not read: c group small" in text
    show(made, AS_OF, five_years("c", AS_OF))
    text = shown(browser(made), "/")
    assert f"complete through {late}, behind: b group small" in text
    show(made, AS_OF, five_years("b", AS_OF))
    assert f"complete through {far} group small" in shown(browser(made), "/")
    # A file that is wrong may be of any group.
    made._followed.folder = folder_of(*jobs.values(), e=ConfigurationError("streams/e.yaml: wrong"))
    made.follow()
    text = shown(browser(made), "/")
    assert "; complete through not known , not read: e group small" in text
    show(no_group := new_page(jobs["d"]), AS_OF, of_d)
    assert "group" not in shown(browser(no_group), "/").partition("Freshness:")[0]


def test_a_stream_shows_its_maintenance_and_growth(page: Page, full: Job) -> None:
    text = shown(browser(page), "/streams/events")
    assert "No run recorded: anabranch maintain events" in text
    state = load_state(full.lake, full.stream.table)
    rows = read_maintenance(full, state, LATER).tables["games.events"]
    sizes = f"{rows.metadata_bytes / 1e3:.1f} kB {rows.snapshots} {rows.expirable} {rows.tags}"
    assert f"games.events {sizes}" in text
    view = five_years("events", AS_OF, refused_restatements=[HOUR, NEXT])

    def after(**maintenance: Any) -> str:
        show(page, AS_OF, replace(view, maintenance=replace(view.maintenance, **maintenance)))
        return shown(browser(page), "/streams/events")

    assert "The last run completed all steps at 2026-11-21 02:41:07" in after()
    assert f"Restatement refused 2 {HOUR} {NEXT} Dead letters" in after()
    assert (
        "failed: orphans: list s3://lake/games: expected an answer, found none. No recorded run "
        "was complete" in after(runs=view.maintenance.runs[-1:])
    )
    name = "games.events_per_minute"
    assert f"{name} not read: table {name}: none" in after(unread={name: f"table {name}: none"})


def test_the_hours_page_equals_explain_history_diff_duplicates_and_dead_letters(page: Page) -> None:
    text = shown(browser(page), f"/streams/events/hours/{NEXT}", "Dead letters malformed")
    for part in (
        f"{NEXT} of events is accepted as revision 2; the batch layer serves it",
        "of 6 offsets 2 became rows",
        "✓ It closes : the terms are all of the 6 offsets.",
        "gap: aborted 1",
        "✕ The gate failed.",
        "failed expect_column_values_to_not_be_null column n critical [null] n: expected to not "
        "be null, found 1 of 4",
        "warning expect_column_values_to_not_be_null",
        "refused 3 batch 3 1 quality: again",
        "2 records have such fields. anabranch check events --drift prints the commands that add them. "
        "The most frequent, of 5 names",
        r'colour 2 STRING "aaaa" partition 0, offset 4 <b>\x1b 1 partition 0, offset 7',
        "no longer: its tag has expired",
        "branch main 2 1 branch speed 4 1 branch batch 2 1",
        "Speed (4 rows) against batch (2 rows)",
        "≠ Nothing explains 1 extra, 1 changed.",
        "changed: partition 0, offset 7 Column Speed Batch n 1 2",
        "1 counted by the ledger, 1 found now, 1 listed.",
        f"0 5 id 0-2 hour {HOUR} , partition 0, offset 2",
        "malformed: 1",
        "null { (1 bytes)",
        f"anabranch batch events --hour {NEXT} --restate",
    ):
        assert part in text, f"expected {part!r} in: {text}"
    served = shown(browser(page), f"/streams/events/hours/{HOUR}", "Dead letters None.")
    assert f"anabranch override events {HOUR} --layer auto --why TEXT removes it" in served
    assert "the rule is wrong" in served


@pytest.mark.parametrize("make", [a_full_hour, an_old_hour, nothing_yet, an_expired_hour])
def test_the_calendar_agrees_with_hours_on_every_hour(
    make: Callable[[StreamLake], None], tmp_path: Path, still: None
) -> None:
    one = full_job(tmp_path, make)
    view = status.status(one, PATIENCE)
    days = hour_view.calendar_month(view, None, LATER).days
    cells = [c for day in days for c in day.cells if c is not None]
    # `hours` says open of an hour that has ended, as long as it is not sealed.
    by_calendar = [(c.hour, "open" if c.state == "ended" else c.state, c.layer) for c in cells]
    assert by_calendar == [(h.hour, h.state, h.served) for h in status.hours(one)]
    assert {c.letter for c in cells} <= set("AXRSEO")


def test_the_page_shows_expired_and_held_hours(tmp_path: Path, still: None) -> None:
    page = read_page(full_job(tmp_path, an_expired_hour))
    client, [reader] = browser(page), page.readers.values()
    text = shown(client, "/streams/events")
    assert f"Expired hours 1 Kept by operators {NEXT}: kept by " in text and "case 7" in text
    assert reader.reading.value is not None
    days = hour_view.calendar_month(reader.reading.value.status, None, LATER).days
    cells = {c.hour: c for day in days for c in day.cells if c is not None}
    assert (cells[HOUR].letter, cells[HOUR].mark, cells[HOUR].attention) == ("X", "", False)
    assert cells[HOUR].label == f"{HOUR}: expired"
    assert cells[NEXT].is_held and not cells[HOUR].is_held and cells[NEXT].label.endswith("case 7")
    assert f'aria-label="{HOUR}: expired">X</a>' in client.get("/streams/events").text


def test_a_calendar_is_grouped_by_month_and_marks_hours_to_look_at() -> None:
    view = replace(VIEW, first_hour="2025-12-30T05", backlog=["2026-11-21T00", "2026-11-21T01"])
    month = hour_view.calendar_month(view, None, STATUS_NOW)
    assert (month.month, month.earlier, month.later) == ("2026-11", "2026-10", None)
    assert len(month.days) == 21
    last = [c for c in month.days[-1].cells if c is not None]
    assert [(c.letter, c.mark, c.attention) for c in last] == [
        ("S", "△", False), ("R", "△", False), ("E", "△", False), ("O", "△", False),
    ]  # fmt: skip
    lost = month.days[-2].cells[23]
    assert lost is not None and lost.attention
    assert lost.label == (
        "2026-11-20T23: accepted, served by batch; nothing explains 2 missing; 5 offsets lost to "
        "retention"
    )
    found = [(year, [(month, n) for month, n in months if n]) for year, months in month.years]
    assert found == [("2026", [("2026-11", 4)]), ("2025", [])]
    first = hour_view.calendar_month(view, "2025-12", STATUS_NOW)
    assert [c.hour if c else None for c in first.days[0].cells][4:6] == [None, "2025-12-30T05"]
    assert (first.earlier, first.later) == (None, "2026-01")
    assert [d.date for d in first.days] == ["2025-12-30", "2025-12-31"]
    assert hour_view.calendar_month(view, "1999-01", STATUS_NOW).month == "2025-12"
    assert hour_view.calendar_month(view, "2999-01", STATUS_NOW).month == "2026-11"
    for wrong in ("2026-1", "2026-13", "x"):
        with pytest.raises(ConfigurationError, match="expected a month such as 2026-11"):
            hour_view.month_of(wrong)


def test_a_streams_state_is_that_of_its_worst_finding() -> None:
    share, shift_open = {HOUR: HourShare(30, 40)}, partial(shift, VIEW.open_hour)
    calm = replace(VIEW, unexplained={}, lost={}, refused=[], backlog=[], too_many_dead=[])
    soon = {"retention": timedelta(hours=26)}
    assert [
        (streams.classify_stream(view, STATUS_NOW).word, word)
        for view, word in (
            (replace(VIEW, topic_missing=True), "no topic"),
            (replace(VIEW, topic_recreated=True, unreadable="another id"), "recreated"),
            (replace(VIEW, unreadable="Kafka lost records"), "log cut off"),
            (replace(VIEW, late="5 offsets wait"), "differs"),
            # What may not wait is hidden by nothing that may, such as a loss of a year ago.
            (replace(VIEW, unexplained={}, late="5 offsets wait", **soon), "late"),
            (replace(VIEW, unexplained={}, **soon), "retention near"),
            (replace(VIEW, unexplained={}), "refused"),
            (replace(calm, refused_restatements=[HOUR]), "refused"),
            (replace(calm, dead_shares=share, too_many_dead=[HOUR]), "dead letters"),
            (replace(calm, backlog=[shift_open(-3)], lost={HOUR: 1}), "waiting"),
            (replace(calm, unmaintained="no run recorded", lost={HOUR: 1}), "maintenance"),
            (replace(calm, overdue=Overdue(3, HOUR, None), lost={HOUR: 1}), "overdue"),
            (replace(calm, lost={HOUR: 1}), "lost offsets"),
            (replace(calm, speed_has_begun=False, newest_accepted=None, late="7", **soon), "new"),
            (replace(calm, speed_has_begun=False), "in order"),
            (
                replace(calm, speed_has_begun=False, newest_accepted=None, lag=Lag(0, {})),
                "in order",
            ),
            (replace(calm, backlog=[shift_open(-2), shift_open(-1)]), "in order"),
            (calm, "in order"),
        )
        if streams.classify_stream(view, STATUS_NOW).word != word
    ] == []


@pytest.mark.parametrize(("took", "rests"), [(0.1, 10), (5, 20), (60, 30)])
def test_a_slow_stream_is_polled_less_often(took: float, rests: float) -> None:
    assert rest_after(took, timedelta(seconds=10)) == rests


def test_every_command_that_a_page_shows_is_one(tmp_path: Path, still: None) -> None:
    shown = []
    for i, make in enumerate((a_full_hour, an_old_hour, nothing_yet)):
        one = full_job(tmp_path / str(i), make)
        for hour in (HOUR, NEXT, "2026-11-21T02", "2026-11-21T09"):
            facts = hour_view.read_record(one, hour, LATER).facts
            for each in (facts, replace(facts, merged=False, kept=False)):
                for _, text in explain.explain_sentences(each):
                    shown += [line for line, is_one in split_commands(text) if is_one]
    names = {"audit", "batch", "check", "dead-letters", "explain", "merge", "override", "query"}
    assert {line.split()[1] for line in shown} == names
    for line in shown:
        name, *arguments = shlex.split(line)
        assert name == "anabranch"
        command = main.get_command(None, arguments[0])  # type: ignore[arg-type]
        assert command is not None, line
        # Parsed as it would be, and not run.
        command.make_context(arguments[0], arguments[1:])


def test_an_unknown_field_is_shown_beside_other_problems(full: Job, still: None) -> None:
    names = ["`season`", "<b>\x1b[31m", "c", "d"]  # what producers choose is no command
    unknown = UnknownFields(9, tuple(UnknownField(name, 3, (0, 1), (0, 9)) for name in names))
    made = new_page(full)
    reader = made.readers["events"]
    read = reader._read

    def after(**status: Any) -> str:
        reader._read = lambda: replace(view := read(), status=replace(view.status, **status))
        reader.refresh()
        return shown(browser(made), "/streams/events")

    assert "does not know" not in after(unknown=None)
    text = after(unknown=unknown)
    reported = r"does not know 'season', <b>\x1b[31m, c and 1 more: anabranch check events --drift"
    assert reported in text and "≠ differs" in text
    assert "<b>" not in browser(made).get("/streams/events").text
    after(unknown=unknown, unexplained={}, lost={}, refused_restatements=())
    text = shown(browser(made), "/")
    assert "in order" in text and "anabranch check events --drift" in text


class Clock:
    def __init__(self) -> None:
        self.now = LATER

    def __call__(self) -> datetime:
        return self.now


def test_a_page_shows_its_time_and_why_it_is_not_newer(full: Job, still: None) -> None:
    clock, away = Clock(), threading.Event()
    made = new_page(full, now=clock)
    reader, client = made.readers["events"], browser(made)
    assert "… not read yet" in shown(client, "/streams/events")
    assert "events … not read yet unknown" in shown(client, "/")
    # That it is being read is no fault.
    assert 'class="old"' not in client.get("/streams/events").text

    reader.refresh()
    assert "as of 2026-11-21 02:30:00" in shown(client, "/streams/events")

    def fails() -> None:
        raise Transient("describe topic events: KafkaTimeoutError (transient, try again)")

    good, reader._read = reader._read, fails  # type: ignore[assignment]
    clock.now += timedelta(minutes=1)
    reader.refresh()
    text = shown(client, "/streams/events")
    failed = "60 s old: the attempt of 02:31:00 UTC failed: describe topic events"
    assert f"as of 2026-11-21 02:30:00 {failed}" in text
    assert "✕ away 60 s old" in (text := shown(client, "/"))
    assert "anabranch doctor events" in text and "failed" not in text
    assert 'title="differs at the last reading"' in client.get("/").text

    # One that hangs: the last answer stays, with its age.
    def hangs() -> None:
        assert away.wait(30)
        raise Transient("gone")

    reader._read = hangs  # type: ignore[assignment]
    thread = threading.Thread(target=reader.refresh)
    thread.start()
    wait_for(lambda: reader.reading.asking_since is not None, "the reader to ask", 30)
    clock.now += timedelta(seconds=29)
    assert "no answer since" not in shown(client, "/")
    clock.now += timedelta(seconds=2)
    text = shown(client, "/streams/events")
    assert "as of 2026-11-21 02:30:00 91 s old: no answer since 02:31:00 UTC, 31 s ago" in text
    away.set()
    thread.join()

    reader._read = good
    reader.refresh()
    assert " s old" not in shown(client, "/")
    assert "as of 2026-11-21 02:31:31" in shown(client, "/streams/events")


def test_a_stream_that_hangs_is_closed_after_its_read_once_its_file_changed(full: Job) -> None:
    begun, answers, closed = threading.Event(), threading.Event(), threading.Event()
    made = new_page(replace(full, kafka=SimpleNamespace(close=closed.set)))  # type: ignore[arg-type]
    reader = made.readers["events"]

    def hangs() -> None:
        begun.set()
        assert answers.wait(30)
        raise Transient("gone")

    reader._read = hangs  # type: ignore[assignment]
    stream = made._followed.current["events"]
    thread = threading.Thread(target=made._followed._read, args=(stream, 0.0))
    thread.start()
    assert begun.wait(30)
    made._followed.folder = folder_of(full)
    made.follow()
    assert not closed.is_set()
    answers.set()
    thread.join()
    assert closed.is_set()


def test_a_reader_that_is_dead_is_noticed() -> None:
    reading = TimedValue("value", LATER)
    assert reading.why_old(LATER + timedelta(seconds=190), DEADLINE, EVERY) is None
    found = reading.why_old(LATER + timedelta(seconds=191), DEADLINE, EVERY)
    assert found == "no reading attempted since"


def test_a_reading_has_a_timestamp_from_before_its_request() -> None:
    clock = Clock()

    def read() -> str:
        clock.now += timedelta(seconds=20)
        return "value"

    reader = BackgroundReader("one", read, clock)
    reader.refresh()
    assert reader.reading == TimedValue("value", LATER)


def test_a_stream_that_has_no_table_is_new_and_the_others_are_shown(full: Job, still: None) -> None:
    none = full.stream.model_copy(update={"name": "broken", "table": "games.none"})
    made = read_page(full, replace(full, stream=none))
    text = shown(browser(made), "/")
    assert "2 streams, 1 to look at: events differs." in text
    assert "broken ○ new" in text and "anabranch apply broken" in text
    text = shown(browser(made), "/streams/broken")
    assert "table games.none: expected it to exist, found none; run anabranch apply" in text
    # The last answer of one that failed since stays, and is not shown as its current state.
    calm = replace(VIEW, unexplained={}, lost={}, refused=[], backlog=[], too_many_dead=[])
    failed = TimedValue(Readings(LATER, calm), LATER, Failure(LATER, "away"))
    line = streams.stream_line("events", failed, failed.why_old(LATER, DEADLINE, EVERY))
    assert (line.lag, line.condition.word) == (7, "away")
    assert line.condition.why == "in order at the last reading"
    assert line.condition.command == "anabranch doctor events"
    # A table that is gone since is no new stream.
    gone = TimedValue(Readings(LATER, calm), LATER, Failure(LATER, "expected it", is_new=True))
    condition = streams.stream_line("events", gone, gone.why_old(LATER, DEADLINE, EVERY)).condition
    assert (condition.word, condition.is_wrong) == ("away", True)
    line = streams.stream_line("broken", made.readers["broken"].reading, "away")
    assert (line.lag, line.freshness, line.condition.word) == (None, None, "new")


def test_a_service_that_is_away_is_one_line_and_groups_and_families_are_folded(full: Job) -> None:
    names = [f"topic_{i:02}" for i in range(30)]
    jobs = [named(full, name, "small" if name < "topic_10" else None) for name in names]
    made = new_page(*jobs, now=lambda: AS_OF)
    made._followed.folder.families = dict.fromkeys(names[10:20], "topics")
    for name, reader in made.readers.items():
        why = f"describe topic {name} at b:9092: KafkaTimeoutError (transient, try again)"
        held = five_years(name, AS_OF)
        reader.reading = TimedValue(held, AS_OF, Failure(AS_OF, why, "kafka"))
    client = browser(made)
    html = parsed(client.get("/").text)
    assert html.text.count("KafkaTimeoutError") == 1
    assert "Kafka does not answer to 30 streams : anabranch doctor" in html.text
    folded = [("section-group-small", False), ("section-family-topics", False)]
    assert [(d["id"], "open" in d) for d in html.all("details")] == folded
    assert len(html.all("tr")) == 3 + 30
    # Another cause in a group unfolds it.
    made.readers["topic_03"].reading = TimedValue(five_years("topic_03", AS_OF, late="5"), AS_OF)
    made.readers["topic_04"].reading = TimedValue(five_years("topic_04", AS_OF), AS_OF)
    html = parsed(client.get("/").text)
    assert ["open" in d for d in html.all("details")] == [True, False]
    assert "Kafka does not answer to 28 streams" in html.text
    # Streams that fail by themselves lack no service.
    for name in ("topic_05", "topic_06"):
        own = Failure(AS_OF, "another program changed its state")
        made.readers[name].reading = TimedValue(five_years(name, AS_OF), AS_OF, own)
    text = parsed(client.get("/").text).text
    assert "Kafka does not answer to 26 streams" in text and text.count("does not answer") == 1
    found = parsed(client.get("/?name=c_0&wrong=on").text)
    assert len(found.all("tr")) == 1 + 9 and "9 shown" in found.text
    assert parsed(client.get("/?name=<b>").text).all("b") == []


def test_a_read_on_demand_is_shared_and_repeated_once_it_is_old() -> None:
    clock, reads = Clock(), list[int]()
    cache = OnDemand[int](timedelta(seconds=10), most=2, now=clock)

    def get(key: str) -> int | None:
        return cache.get((key,), lambda: reads.append(1) or len(reads), timedelta(seconds=30)).value

    assert [get("a"), get("a"), get("b")] == [1, 1, 2]
    clock.now += timedelta(seconds=11)
    assert [get("a"), get("a")] == [3, 3]
    assert [get("c"), get("b")] == [4, 5], "c took the place of b, which was asked for longest ago"
    cache.forget("b")
    # Reports of a stream whose file has changed are read again.
    assert [get("c"), get("b")] == [4, 6]
    cache.stop()


HOUR_PATHS = (f"/streams/events/hours/{NEXT}", f"/streams/events/hours/{shift(HOUR, 99)}")
PATHS = ("/", "/streams/events", *HOUR_PATHS)


@pytest.mark.parametrize(
    "path", [*PATHS, "/nope", "/static/page.js", "/streams/events/hours/2026-11-21T99"]
)
def test_every_answer_has_strict_headers(page: Page, path: str) -> None:
    headers = browser(page).get(path).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", PATHS)
def test_a_page_needs_nothing_from_elsewhere_and_nothing_inline(page: Page, path: str) -> None:
    client = browser(page)
    if "hours" in path:
        shown(client, path, "Dead letters")
    html = parsed(client.get(path).text)
    for tag, attributes in html.elements:
        inline = {name for name in attributes if name == "style" or name.startswith("on")}
        assert not inline, (tag, attributes)
        for value in (attributes.get(name) or "#" for name in ("href", "src", "action")):
            assert value.startswith(("/", "?", "#")) and not value.startswith("//"), value
    assert [script.get("src") for script in html.all("script")] == ["/static/page.js"]
    assert html.all("style") == []
    # What a screen reader goes by.
    ids = [attributes["id"] for _, attributes in html.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert len(html.all("table")) == len(html.all("caption"))
    assert all(cell.get("scope") in ("row", "col") for cell in html.all("th"))
    assert [len(html.all(tag)) for tag in ("main", "header", "footer", "h1")] == [1, 1, 1, 1]
    named = [v for _, a in html.elements for v in (a.get("aria-labelledby") or "").split()]
    assert set(named) <= set(ids)
    assert html.all("html")[0]["lang"] == "en"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *((host, 200) for host in ("localhost:8090", "127.0.0.1:8090", "[::1]:8090", "STATUS.example.com")),
        *((host, 400) for host in ("", "10.0.0.7", "evil.example.com", "localhost.evil.example.com")),
        ("127.0.0.1.evil.example.com:8090", 400),
    ],
)  # fmt: skip
def test_a_name_bound_to_us_is_not_answered(page: Page, host: str, status: int) -> None:
    for path in ("/", "/static/page.js", "/metrics", "/nope"):
        expected = 404 if status == 200 and path == "/nope" else status
        assert browser(page).get(path, headers={"Host": host}).status_code == expected


@pytest.mark.parametrize(
    "path", ["/", "/streams/events", f"/streams/events/hours/{NEXT}", "/static/page.js", "/metrics"]
)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_the_page_only_reads(page: Page, path: str, method: str) -> None:
    assert browser(page).request(method, path).status_code == 405


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nope", "Not Found"),
        ("/streams/none", "expected one of the streams events, found 'none'"),
        ("/streams/events/hours/2026-11-21T3", "expected a UTC hour such as 2026-11-21T03, found '2026-11-21T3'"),
        ("/streams/events?month=<b>", "expected a month such as 2026-11, found '<b>'"),
        ("/streams/events/hours/9999-12-31T23", "date value out of range"),
        ("/static/app.py", "Not Found"),
    ],
)  # fmt: skip
def test_a_missing_item_is_named(page: Page, path: str, message: str) -> None:
    answer = browser(page).get(path)
    assert answer.status_code == 404
    assert message in parsed(answer.text).text
    assert "<b>" not in answer.text


def test_an_error_page_has_no_details_and_the_same_headers(page: Page) -> None:
    page.readers["events"].reading = "secret of the page"  # type: ignore[assignment]
    answer = browser(page).get("/")
    assert (answer.status_code, answer.headers["x-content-type-options"]) == (500, "nosniff")
    assert "The page failed; see its log." in answer.text and "secret" not in answer.text


def test_values_of_records_cannot_become_markup(page: Page, full: Job) -> None:
    found = dead_letters.letters(full, (NEXT, NEXT), 1)
    value, key = "<script>alert(1)</script>", '"><img src=x onerror=y>'
    evil = replace(found.reasons[0].samples[0], value=value, key=key)
    rows = replace(found, reasons=[replace(found.reasons[0], samples=[evil])])
    held = hour_view.HourRows(rows, dead_letters.compare(full, NEXT, 1, 1), None)
    page._rows.get(("events", NEXT), lambda: held, timedelta(seconds=30))
    html = parsed(browser(page).get(f"/streams/events/hours/{NEXT}").text)
    assert [script.get("src") for script in html.all("script")] == ["/static/page.js"]
    assert html.all("img") == [] and "<script>alert(1)</script>" in html.text


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "status.example.com"])
def test_more_than_this_machine_is_let_in_by_a_proxy_alone(host: str) -> None:
    with pytest.raises(ConfigurationError, match="expected --behind-proxy"):
        allowed_hosts(host, (), False)
    own = f"[{host}]" if ":" in host else host
    assert own in allowed_hosts(host, (), True)
    assert allowed_hosts("::1", ("page",), False)[-1] == "page"
    with pytest.raises(ConfigurationError, match=r"expected a host name, found '\*'"):
        allowed_hosts(host, ("*",), True)


def test_clients_that_send_half_a_request_block_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than requests may be handled at once: others are answered meanwhile, and they
    are disconnected, also after a whole request."""
    monkeypatch.setattr(app, "_REQUEST_WITHIN_S", 2.0)
    whole = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with app.listen("127.0.0.1", 0) as at, served(at):
        address = at.getsockname()
        slow = [socket.create_connection(address)]
        slow[0].sendall(whole)
        assert slow[0].recv(12) == b"HTTP/1.1 200"
        slow[0].sendall(whole[:20])
        for _ in range(300):
            slow.append(socket.create_connection(address))
            slow[-1].sendall(whole[:20])
        with urlopen(f"http://127.0.0.1:{address[1]}/", timeout=10) as answer:
            assert answer.status == 200
        for one in slow:
            one.settimeout(30)
            with suppress(ConnectionResetError):
                while one.recv(1000):
                    pass
            one.close()


@contextmanager
def served(at: socket.socket) -> Iterator[None]:
    made = app.server(Starlette(routes=[Route("/", lambda request: PlainTextResponse("ok"))]))
    thread = threading.Thread(target=made.run, kwargs={"sockets": [at]})
    thread.start()
    try:
        yield
    finally:
        made.should_exit = True
        thread.join()


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "anabranch.operations.page.app", raising=False)
    assert "found no uvicorn; run `pip install 'anabranch[page]'`" in said("page", expect=2)


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    """Kafka is down and the table does not exist: the page shows both, and answers."""
    conf = tmp_path / "conf"
    write_environment(conf, tmp_path)
    write_stream(conf, "events")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = said("page", "--conf", str(conf), "--port", str(port), expect=2)
        assert f"expected to listen at 127.0.0.1:{port}" in refused

    def text(path: str = "") -> str:
        try:
            with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=10) as answer:
                return parsed(answer.read().decode()).text
        except HTTPError as error:
            return str(error)

    def shows(expected: str) -> None:
        wait_for(lambda: expected in text("streams/clicks"), expected, 120)

    def answers() -> bool:
        shown = text()
        return "events \u25cb new" in shown and "anabranch apply events" in shown

    command = [
        sys.executable, "-m", "anabranch.cli", "page", "--conf", str(conf), "--port", str(port),
    ]  # fmt: skip
    with serving([*command, "--refresh", "1 second"], tmp_path / "log", answers) as process:
        write_stream(conf, "clicks")
        shows("table games.clicks: expected it to exist")
        write_stream(conf, "clicks", table="games.taps")
        shows("table games.taps: expected it to exist")
        (conf / "streams" / "clicks.yaml").write_text("topic: 1")
        shows("clicks.yaml: schema: expected columns")
        (conf / "streams" / "clicks.yaml").unlink()
        wait_for(lambda: "clicks" not in text(), "the stream to be gone", 120)
        assert "events \u25cb new" in text()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    assert f"serving http://127.0.0.1:{port}/" in (tmp_path / "log").read_text()


def test_an_hours_neighbours_are_hours_of_the_stream(page: Page) -> None:
    client = browser(page)
    first, running = page.readers["events"].reading.value.status.first_hour, "2026-11-21T02"  # type: ignore[union-attr]
    for hour, before, after in ((first, False, True), (NEXT, True, True), (running, True, False)):
        links = parsed(client.get(f"/streams/events/hours/{hour}").text).all("a")
        found = {link.get("id") for link in links} & {"before", "after"}
        expected = {name for name, is_there in (("before", before), ("after", after)) if is_there}
        assert found == expected, hour
