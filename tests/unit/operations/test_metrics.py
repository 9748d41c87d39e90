"""Metrics: what Prometheus' own parser reads of them."""

import math
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conf_folders import write_environment, write_stream
from pages import browser, folder_of, named, new_page
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from proofs import job, new_proof
from report_hours import kafka
from starlette.testclient import TestClient
from waiting import wait_for

from anabranch import config
from anabranch.common.counters import COMMITS, CPU, REFUSED, RETRIES, S3_BYTES, S3_REQUESTS
from anabranch.iceberg.clock import Clock
from anabranch.job import Job, StreamFolder
from anabranch.operations.page.app import Page, Settings
from anabranch.operations.reports import maintenance, metrics, reading, status
from anabranch.operations.reports.reading import Failure, Readings, TimedValue, open_reader
from anabranch.operations.reports.status import Lag, StreamStatus
from anabranch.protocol import measured
from anabranch.protocol.ledger_row import HourShare, UnknownField, UnknownFields
from anabranch.protocol.measured import BOUNDS, COMMIT, PUBLISH, STAGE, Durations, Measured, Size
from anabranch.protocol.retention import Overdue

ROOT = Path(__file__).parents[3]
NOW = datetime(2026, 11, 21, 3, tzinfo=UTC)
_MANY = tuple(UnknownField(f"f{i}", 1, (0, 1), (0, 1)) for i in range(40))
VIEW = StreamStatus(
    stream="events", topic="events", topic_id="t", topic_recreated=False, late=None, to_seal=[],
    position={0: 93, 1: 50}, position_since=NOW - timedelta(seconds=90), lag=Lag(7, {0: 7, 1: 0}),
    last_publish={"speed": NOW, "batch": None, "main": NOW}, waiting_since=NOW - timedelta(seconds=90),
    first_hour="2026-11-20T22", open_hour="2026-11-21T02", newest_accepted="2026-11-20T23",
    accepted_at=NOW - timedelta(hours=2, minutes=50), complete_through="2026-11-20T23",
    backlog=["2026-11-21T00", "2026-11-21T01"], refused=["2026-11-21T01"],
    hours={"2026-11-21T00": "speed", "2026-11-21T01": "speed", "2026-11-20T23": "batch"},
    unexplained={"2026-11-20T23": {"missing": 2}, "2026-11-20T22": {"missing": 1, "changed": 4}},
    dead_letters=11, too_many_dead=["2026-11-21T02"], conflicts={"2026-11-21T00": 2, "2026-11-21T01": 3},
    dead_shares={"2026-11-21T01": HourShare(1, 9), "2026-11-21T02": HourShare(30, 40)},
    lost={"2026-11-20T23": 5}, retention=timedelta(days=7),
    unknown=UnknownFields(4, (UnknownField('col\n"our', 3, (0, 1), (0, 7)), *_MANY), 900),
)  # fmt: skip


CONTENT = maintenance.MainContent(
    dead_letters={"2026-11-21T02": {"malformed": 3, "missing_required": 1}},
    measured={
        "speed": Measured(
            {measured.READABLE: Durations(12.5, {0.5: 3, 5: 1, math.inf: 1}), STAGE: Durations(1, {1: 1})},
            {
                (RETRIES, "kafka"): 2, (S3_REQUESTS, "GetObject"): 7, (S3_BYTES, "written"): 4096,
                (COMMITS, ""): 12, (CPU, ""): 1500,
            },
        ),
        "batch": Measured(
            dict.fromkeys((STAGE, PUBLISH, COMMIT), Durations(80, {120: 1})), {(REFUSED, ""): 1}
        ),
    },
)  # fmt: skip


AT = NOW - timedelta(hours=2)
DONE = measured.MaintenanceRun(
    AT, AT, 3, {"events": measured.MaintainedTable(7, 2, Size(4, 500), Size(1, 20))}
)
MAINTENANCE = maintenance.Maintenance(
    runs=(replace(DONE, ended=NOW, failed={"ledger": "others were first"}), DONE),
    rows={"speed": 9, "batch": 91},
    tables={"events": maintenance.TableGrowth(9000, 40, 3, 12, 80, 100, 6)},
    speed_files={"2026-11-21T00": 31},
    letters_wait_since=NOW - timedelta(seconds=30),
    unread={"per_minute": "none"},
)


READ = Readings(NOW, replace(VIEW, overdue=Overdue(3, "2026-11-20T22", None)), CONTENT, MAINTENANCE)


def scraped(
    readings: Readings | None, slo: config.Slo | None = None, group: str | None = None
) -> metrics.ScrapedStream:
    as_of = readings.at if readings is not None else NOW - timedelta(hours=1)
    return metrics.ScrapedStream(slo or config.Slo(), group, as_of, readings)


class Fixed(Collector):
    def __init__(self, **streams: metrics.ScrapedStream) -> None:
        self._streams = streams

    def collect(self) -> list[Metric]:
        return list(metrics.metrics_of(self._streams))


TWO = Fixed(
    events=scraped(READ, config.Slo(fresh=timedelta(seconds=10), complete=timedelta(minutes=90))),
    away=scraped(None, config.Slo(complete=timedelta(hours=2))),
)


def _values(collector: Collector, of_histograms: bool = False) -> dict[tuple[str, ...], float]:
    """Return the values of histograms, or of the others, by name and labels in order of name."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    chosen = (family for family in families if (family.type == "histogram") is of_histograms)
    return {
        (s.name.removeprefix("anabranch_"), *(s.labels[label] for label in sorted(s.labels))): s.value
        for family in chosen
        for s in family.samples
    }  # fmt: skip


def test_prometheus_reads_every_stream_and_which_is_down(recorded: Callable[[Any], None]) -> None:
    recorded({" ".join(key): value for key, value in _values(TWO).items()})


def test_durations_are_histograms_as_prometheus_counts_them() -> None:
    values = _values(TWO, of_histograms=True)
    readable = {key[2]: n for key, n in values.items() if key[0] == "readable_after_seconds_bucket"}
    assert len(readable) == len(BOUNDS)
    assert (readable["0.25"], readable["0.5"], readable["3.0"], readable["5.0"]) == (0, 3, 3, 4)
    assert readable["+Inf"] == 5
    assert values["readable_after_seconds_sum", "speed", "events"] == 12.5
    assert readable["7200.0"] == 4
    assert values["readable_after_seconds_count", "speed", "events"] == 5
    assert values["stage_seconds_count", "batch", "events"] == 1
    assert not [key for key in values if "away" in key]


@pytest.mark.parametrize(
    "file", ["deploy/grafana/dashboards/anabranch.json", "deploy/prometheus/alerts.yml"]
)
def test_dashboards_and_alerts_use_existing_metrics(file: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    asked = set(re.findall(r"\banabranch_\w+(?=[{\[)> ])", text))
    given = {f"anabranch_{key[0]}" for key in (*_values(TWO), *_values(TWO, of_histograms=True))}
    assert len(asked) > 5 and asked <= given


@pytest.mark.parametrize(
    ("begun", "newest", "is_exported"),
    [(True, "2026-11-20T23", True), (False, None, True), (False, "2026-11-20T23", False)],
)
def test_no_speed_layer_is_late_where_only_the_batch_layer_runs(
    begun: bool, newest: str | None, is_exported: bool
) -> None:
    status = replace(VIEW, speed_has_begun=begun, newest_accepted=newest)
    [position_age] = [
        one
        for one in Fixed(events=scraped(replace(READ, status=status))).collect()
        if one.name == "anabranch_position_age_seconds"
    ]
    assert bool(position_age.samples) == is_exported


def test_nothing_that_waits_is_late_whatever_its_age() -> None:
    assert status.freshness_seconds(replace(VIEW, waiting_since=None), NOW) == 0
    assert status.freshness_seconds(replace(VIEW, waiting_since=NOW + timedelta(days=1)), NOW) == 0
    running = replace(VIEW, complete_through="2026-11-21T02")
    assert status.completeness_seconds(running, NOW) == 0
    assert status.completeness_seconds(replace(VIEW, complete_through=None), NOW) == 4 * 3600


def test_a_scrape_of_the_page_reads_nothing_and_shows_the_newest_readings(tmp_path: Path) -> None:
    now = NOW + timedelta(seconds=20)
    made = new_page(*jobs_of(tmp_path, "events", "away", "hangs", "new"), now=lambda: now)
    stale = NOW - timedelta(hours=1)
    failed = Failure(NOW, "describe topic away: none")
    made.readers["events"].reading = TimedValue(READ, NOW)
    made.readers["away"].reading = TimedValue(READ, stale, failed)
    waits = TimedValue(READ, stale, asking_since=NOW - timedelta(seconds=11))
    made.readers["hangs"].reading = waits
    values = _values(made)
    up = {key[1]: n for key, n in values.items() if key[0] == "up"}
    assert up == {"events": 1, "away": 0, "hangs": 0, "new": 0}
    answered = {key[1]: n for key, n in values.items() if key[0] == "answered_timestamp_seconds"}
    late = stale.timestamp()
    assert answered == {"events": NOW.timestamp(), "away": late, "hangs": late}
    # As of the reading, 20 s ago.
    assert values["freshness_seconds", "events"] == 90
    assert {key[-1] for key in values if key[0] == "dead_letters"} == {"events"}
    text = browser(made).get("/metrics")
    assert (text.status_code, text.headers["content-type"].split(";")[0]) == (200, "text/plain")
    assert 'anabranch_up{stream="events"} 1.0' in text.text


def test_a_silent_broker_delays_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream has one thread: the one that waits for the broker is asked once."""
    asked: list[threading.Thread] = []
    answers = threading.Event()

    def status_of(job: Job, state: object, late_after: timedelta) -> StreamStatus:
        if job.stream.name == "hangs":
            asked.append(threading.current_thread())
            assert answers.wait(60)
        return VIEW

    monkeypatch.setattr(status, "status_of", status_of)
    made = Page(folder_of(*jobs_of(tmp_path, "hangs", "events")), Settings(timedelta(seconds=0.05)))
    with TestClient(made.app(["testserver"])) as client:
        wait_for(lambda: asked, "the stream that hangs to be asked")
        for _ in range(3):
            wait_for(lambda: 'anabranch_up{stream="events"} 1.0' in client.get("/metrics").text, "")
            assert 'anabranch_up{stream="hangs"} 0.0' in client.get("/metrics").text
        assert len(asked) == 1 and asked[0].is_alive()
        answers.set()


def test_a_page_whose_machine_has_a_wrong_clock_shows_no_stream_in_order(tmp_path: Path) -> None:
    """The hazard: by a slow clock, no hour has ended and no record waits for long."""
    one = new_proof(tmp_path)
    one.lake.__dict__["clock"] = Clock(lambda: datetime.now(UTC) + timedelta(hours=2))
    page = new_page(replace(job(one), kafka=kafka()))
    page.readers["events"].refresh()
    reading = page.readers["events"].reading
    assert reading.value is None and reading.failure is not None
    assert "set this machine's clock (NTP)" in reading.failure.reason


def test_a_reading_loads_the_state_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [one] = jobs_of(tmp_path, "events")
    loads: list[object] = []
    load = reading.load_state
    for module in (reading, status):
        monkeypatch.setattr(module, "load_state", lambda *a: loads.append(a) or load(*a))
    read = open_reader(one, timedelta(minutes=10), lambda: NOW)
    assert read().status.stream == "events"
    assert len(loads) == 1


def test_stream_files_are_taken_up(tmp_path: Path) -> None:
    write_environment(tmp_path)
    write = partial(write_stream, tmp_path)

    def values() -> dict[tuple[str, ...], float]:
        made.follow()
        for name, reader in made.readers.items():
            if isinstance(made._followed.current[name].job, Job):
                reader.reading = TimedValue(READ, NOW)
            else:
                reader.refresh()
        return _values(made)

    write("events")
    made = Page(StreamFolder(str(tmp_path)), Settings(), lambda: NOW)
    assert {key: n for key, n in values().items() if key[0] == "up"} == {("up", "events"): 1}
    same = made.readers["events"]
    write("clicks", slo={"fresh": "10 seconds"})
    assert values()["slo_fresh_seconds", "clicks"] == 10
    write("clicks", slo={"fresh": "2 minutes"})
    assert values()["slo_fresh_seconds", "clicks"] == 120
    write("clicks", slo={"fresh": "soon"})
    found = values()
    assert (found["up", "events"], found["up", "clicks"]) == (1, 0)
    (tmp_path / "streams" / "clicks.yaml").unlink()
    assert ("up", "clicks") not in values()
    assert made.readers["events"] is same, "a stream whose file is the same keeps its connection"
    # A wrong file hides the completeness of its own group.
    write("events", group="a")
    write("clicks", group="b")
    assert {key[1] for key in values() if key[0] == "group_completeness_seconds"} == {"a", "b"}
    write("clicks", group="b", slo={"fresh": "soon"})
    assert {key[1] for key in values() if key[0] == "group_completeness_seconds"} == {"a"}
    (tmp_path / "streams" / "clicks.yaml").unlink()
    write("events", key="missing")
    write("clicks")
    # Nor does it keep the page from starting.
    made = Page(StreamFolder(str(tmp_path)), Settings(), lambda: NOW)
    found = values()
    assert (found["up", "events"], found["up", "clicks"]) == (0, 1)


def jobs_of(folder: Path, *names: str) -> list[Job]:
    one = replace(job(new_proof(folder)), kafka=kafka())
    return [named(one, name) for name in names]


def _of_groups(**streams: metrics.ScrapedStream) -> dict[tuple[str, ...], float]:
    found = _values(Fixed(**streams))
    return {labels: value for labels, value in found.items() if labels[0].startswith("group_")}


def test_a_group_is_as_complete_as_its_last_stream_and_absent_while_one_does_not_answer() -> None:
    def answer(through: str | None, group: str | None = "small") -> metrics.ScrapedStream:
        view = replace(VIEW, complete_through=through)
        return scraped(Readings(NOW, view, CONTENT, MAINTENANCE), group=group)

    far, late = answer("2026-11-21T02"), answer("2026-11-20T23")
    ended = datetime(2026, 11, 21, tzinfo=UTC)
    took = (NOW - ended - timedelta(hours=1)).total_seconds()
    assert _of_groups(a=far, b=late, c=answer(None, None)) == {
        ("group_complete_through_timestamp_seconds", "small"): ended.timestamp(),
        ("group_completeness_seconds", "small"): took,
    }
    assert _of_groups(a=far, b=answer(None)) == {("group_completeness_seconds", "small"): 4 * 3600}
    assert _of_groups(a=far, b=scraped(None, group="small")) == {}
    # A file that is wrong may be of any group.
    broken = scraped(None, group=config.UNREADABLE)
    assert _of_groups(a=far, b=broken) == {}
    assert _of_groups(a=answer("2026-11-21T02", None), b=broken) == {}
