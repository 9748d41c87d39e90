"""Metrics: what Prometheus' own parser reads of them."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conf_folders import write_environment
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from waiting import wait_for

from anabranch import config
from anabranch.common.counters import COMMITS, CPU, REFUSED, RETRIES, S3_BYTES, S3_REQUESTS
from anabranch.common.errors import ConfigurationError
from anabranch.common.remote_errors import SERVICES
from anabranch.config import Slo
from anabranch.job import Job, StreamFolder
from anabranch.kafka.client import KafkaAdapter
from anabranch.operations.reports import metrics, status
from anabranch.operations.reports.content import ContentReader, MainContent, RunningHour
from anabranch.operations.reports.maintenance import Maintenance, TableGrowth
from anabranch.operations.reports.metrics import (
    NAMES,
    ScrapedStream,
    StreamReadings,
    Streams,
    metrics_of,
)
from anabranch.operations.reports.reading import TimedValue
from anabranch.operations.reports.status import Lag, StreamStatus
from anabranch.protocol.expired import Expired
from anabranch.protocol.holds import Hold
from anabranch.protocol.ledger_row import UnknownField, UnknownFields
from anabranch.protocol.maintained import MaintainedFolder, MaintainedTable, MaintenanceRun, Size
from anabranch.protocol.measured import (
    BOUNDS,
    COMMIT,
    PUBLISH,
    READABLE,
    STAGE,
    Durations,
    Measured,
)
from anabranch.protocol.retention import Overdue

ROOT = Path(__file__).parents[3]
NOW = datetime(2026, 11, 21, 3, tzinfo=UTC)
_MANY = tuple(UnknownField(f"f{i}", 1, (0, 1), (0, 1)) for i in range(40))
VIEW = StreamStatus(
    stream="events",
    topic="events",
    topic_id="t",
    topic_recreated=False,
    position={0: 93, 1: 50},
    position_since=NOW - timedelta(seconds=90),
    late=None,
    lag=Lag(7, {0: 7, 1: 0}),
    last_publish={"speed": NOW, "batch": None, "main": NOW},
    first_hour="2026-11-20T22",
    open_hour="2026-11-21T02",
    newest_accepted="2026-11-20T23",
    accepted_at=NOW - timedelta(hours=2, minutes=50),
    complete_through="2026-11-20T23",
    waiting_since=NOW - timedelta(seconds=90),
    to_seal=[],
    backlog=["2026-11-21T00", "2026-11-21T01"],
    refused=["2026-11-21T01"],
    hours={"2026-11-21T00": "speed", "2026-11-21T01": "speed", "2026-11-20T23": "batch"},
    unexplained={"2026-11-20T23": {"missing": 2}, "2026-11-20T22": {"missing": 1, "changed": 4}},
    dead_letters=11,
    lost={"2026-11-20T23": 5},
    retention=timedelta(days=7),
    unknown=UnknownFields(4, (UnknownField('col\n"our', 3, (0, 1), (0, 7)), *_MANY), 900),
)


CONTENT = MainContent(
    rows={"speed": 9, "batch": 91},
    running=RunningHour(4, 2, 1000),
    dead_letters={"2026-11-21T02": {"malformed": 3, "missing_required": 1}},
    measured={
        "speed": Measured(
            {READABLE: Durations(12.5, {0.5: 3, 5: 1, math.inf: 1}), STAGE: Durations(1, {1: 1})},
            {
                (RETRIES, "kafka"): 2,
                (S3_REQUESTS, "GetObject"): 7,
                (S3_BYTES, "written"): 4096,
                (COMMITS, ""): 12,
                (CPU, ""): 1500,
            },
        ),
        "batch": Measured(
            dict.fromkeys((STAGE, PUBLISH, COMMIT), Durations(80, {120: 1})), {(REFUSED, ""): 1}
        ),
    },
)


AT = NOW - timedelta(hours=2)
DONE = MaintenanceRun(
    AT, AT, 3, {"events": MaintainedTable(7, 2, Size(4, 500), Size(1, 20))}, {"orphans": 1.5},
    folders={"logs": MaintainedFolder(Size(5, 50))},
)  # fmt: skip
MAINTENANCE = Maintenance(
    runs=(replace(DONE, ended=NOW, failed={"ledger": "others were first"}), DONE),
    tables={"events": TableGrowth(9000, 40, 3, 12, 80, 100, 6)},
    speed_files={"2026-11-21T00": 31},
    oldest_dead_letter="2026-11-20T23",
    letters_wait_since=NOW - timedelta(seconds=30),
    unread={"per_minute": "none"},
)


class _Fixed(Collector):
    def collect(self) -> list[Metric]:
        promise = Slo(fresh=timedelta(seconds=10), complete=timedelta(minutes=90))
        kept: dict[str, Any] = {
            "holds": (Hold("2026-11-20T23", "2026-11-20T23", "ann@ops", NOW, "case 7"),)
        }
        kept |= {"expired": Expired("2026-11-20T23"), "overdue": Overdue(3, "2026-11-20T22", None)}
        known = StreamReadings(replace(VIEW, **kept), CONTENT, MAINTENANCE)
        away = ScrapedStream(
            Slo(complete=timedelta(hours=2)),
            TimedValue(known, NOW - timedelta(hours=1)),
            is_up=False,
        )
        return list(
            metrics_of(
                {"events": ScrapedStream(promise, TimedValue(known, NOW), True), "away": away}, NOW
            )
        )


def _values(collector: Collector, of_histograms: bool = False) -> dict[tuple[str, ...], float]:
    """Return the values of histograms, or of all other metrics, by name and labels in the order of
    the labels' names."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return {
        (
            sample.name.removeprefix("anabranch_"),
            *(sample.labels[name] for name in sorted(sample.labels)),
        ): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if (family.type == "histogram") is of_histograms
    }


def test_prometheus_reads_every_stream_and_an_unreachable_one_is_down() -> None:
    assert _values(_Fixed()) == {
        ("up", "events"): 1,
        ("up", "away"): 0,
        ("answered_timestamp_seconds", "events"): NOW.timestamp(),
        ("answered_timestamp_seconds", "away"): NOW.timestamp() - 3600,
        ("slo_fresh_seconds", "events"): 10,
        ("slo_complete_seconds", "events"): 5400,
        ("slo_complete_seconds", "away"): 7200,
        ("freshness_seconds", "events"): 90,
        ("completeness_seconds", "events"): 7200,
        ("acceptance_seconds", "events"): 600,
        ("position_offsets", "0", "events"): 93,
        ("position_offsets", "1", "events"): 50,
        ("lag_offsets", "0", "events"): 7,
        ("lag_offsets", "1", "events"): 0,
        ("last_publish_timestamp_seconds", "main", "events"): NOW.timestamp(),
        ("last_publish_timestamp_seconds", "speed", "events"): NOW.timestamp(),
        ("position_age_seconds", "events"): 90,
        ("hours_to_seal", "events"): 0,
        ("hours_waiting", "events"): 2,
        ("hours_refused", "events"): 1,
        ("restatements_refused", "events"): 0,
        ("hours_served", "speed", "events"): 2,
        ("hours_served", "batch", "events"): 1,
        ("expired_hours", "events"): 1,
        ("overdue_hours", "events"): 3,
        ("holds", "events"): 1,
        ("topic_recreated", "events"): 0,
        ("unknown_records", "events"): 4,
        ("unknown_fields", r'col\n"our', "events"): 3,
        **{("unknown_fields", f"f{i}", "events"): 1 for i in range(NAMES - 1)},
        ("retention_seconds", "events"): 7 * 86400,
        ("dead_letters", "events"): 11,
        ("lost_offsets", "events"): 5,
        ("difference_unexplained_rows", "missing", "events"): 3,
        ("difference_unexplained_rows", "extra", "events"): 0,
        ("difference_unexplained_rows", "changed", "events"): 4,
        ("rows", "speed", "events"): 9,
        ("rows", "batch", "events"): 91,
        ("running_hour_rows", "events"): 4,
        ("running_hour_files", "events"): 2,
        ("running_hour_bytes", "events"): 1000,
        ("hour_dead_letters", "2026-11-21T02", "malformed", "events"): 3,
        ("hour_dead_letters", "2026-11-21T02", "missing_required", "events"): 1,
        **{
            ("retries_total", layer, name, "events"): 0
            for layer in ("speed", "batch")
            for name in SERVICES
        },
        ("retries_total", "speed", "kafka", "events"): 2,
        ("refused_publishes_total", "speed", "events"): 0,
        ("refused_publishes_total", "batch", "events"): 1,
        ("s3_requests_total", "speed", "GetObject", "events"): 7,
        ("s3_bytes_total", "read", "speed", "events"): 0,
        ("s3_bytes_total", "written", "speed", "events"): 4096,
        ("s3_bytes_total", "read", "batch", "events"): 0,
        ("s3_bytes_total", "written", "batch", "events"): 0,
        ("commits_total", "speed", "events"): 12,
        ("commits_total", "batch", "events"): 0,
        ("cpu_seconds_total", "speed", "events"): 1.5,
        ("maintained_timestamp_seconds", "events"): AT.timestamp(),
        ("maintenance_failed", "events"): 1,
        ("maintenance_dropped_hours", "events"): 3,
        ("maintenance_seconds", "orphans", "events"): 1.5,
        ("maintenance_expired_snapshots", "events", "events"): 7,
        ("maintenance_merged_files", "events", "events"): 2,
        ("maintenance_deleted_files", "events", "events"): 4,
        ("maintenance_deleted_bytes", "events", "events"): 500,
        ("maintenance_spared_files", "events", "events"): 1,
        ("maintenance_spared_bytes", "events", "events"): 20,
        ("folder_deleted_files", "logs", "events"): 5,
        ("folder_deleted_bytes", "logs", "events"): 50,
        ("table_metadata_bytes", "events", "events"): 9000,
        ("table_snapshots", "events", "events"): 40,
        ("table_tags", "events", "events"): 3,
        ("table_manifests", "events", "events"): 12,
        ("table_data_files", "events", "events"): 80,
        ("table_records", "events", "events"): 100,
        ("table_unread", "events", "events"): 0,
        ("table_unread", "events", "per_minute"): 1,
        ("table_expirable_snapshots", "events", "events"): 6,
        ("hour_speed_files", "2026-11-21T00", "events"): 31,
        ("oldest_dead_letter_age_seconds", "events"): 4 * 3600,
        ("dead_letters_wait_seconds", "events"): 30,
    }


def test_durations_are_histograms_as_prometheus_counts_them() -> None:
    values = _values(_Fixed(), of_histograms=True)
    readable = {key[2]: n for key, n in values.items() if key[0] == "readable_after_seconds_bucket"}
    assert len(readable) == len(BOUNDS)
    assert (
        readable["0.25"],
        readable["0.5"],
        readable["3.0"],
        readable["5.0"],
        readable["+Inf"],
    ) == (0, 3, 3, 4, 5)
    assert (values["readable_after_seconds_sum", "speed", "events"], readable["7200.0"]) == (
        12.5,
        4,
    )
    assert values["readable_after_seconds_count", "speed", "events"] == 5
    assert values["stage_seconds_count", "batch", "events"] == 1
    assert not [key for key in values if "away" in key]


@pytest.mark.parametrize(
    "file", ["deploy/grafana/dashboards/anabranch.json", "deploy/prometheus/alerts.yml"]
)
def test_dashboards_and_alerts_use_existing_metrics(file: str) -> None:
    asked = set(
        re.findall(r"\banabranch_\w+(?=[{\[)> ])", (ROOT / file).read_text(encoding="utf-8"))
    )
    given = {
        f"anabranch_{key[0]}"
        for key in (*_values(_Fixed()), *_values(_Fixed(), of_histograms=True))
    }
    assert len(asked) > 5 and asked <= given


def test_nothing_that_waits_is_late_whatever_its_age() -> None:
    assert status.freshness_seconds(replace(VIEW, waiting_since=None), NOW) == 0
    assert status.freshness_seconds(replace(VIEW, waiting_since=NOW + timedelta(days=1)), NOW) == 0
    running = replace(VIEW, complete_through="2026-11-21T02")
    assert status.completeness_seconds(running, NOW) == 0
    assert status.completeness_seconds(replace(VIEW, complete_through=None), NOW) == 4 * 3600


@pytest.fixture
def black_hole() -> Iterator[str]:
    """A broker that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_a_silent_broker_delays_no_scrape_and_no_other_stream(
    black_hole: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The adapter gives up after twice this time.
    monkeypatch.setattr("anabranch.kafka.client._BOOTSTRAP_MS", 3_500)
    adapter = KafkaAdapter(config.Kafka(bootstrap_servers=black_hole))
    asked: list[threading.Thread] = []

    def read(job: Any) -> StreamStatus:
        if job.stream.name == "hangs":
            asked.append(threading.current_thread())
            adapter.describe("hangs")
        return VIEW

    monkeypatch.setattr(status, "status", read)
    monkeypatch.setattr(ContentReader, "read", lambda reader, now: CONTENT)
    monkeypatch.setattr(metrics, "read_maintenance", lambda job, now: MAINTENANCE)
    jobs: Any = {
        name: SimpleNamespace(stream=SimpleNamespace(name=name, slo=Slo(), group=None))
        for name in ("hangs", "events")
    }
    folder: Any = SimpleNamespace(jobs=lambda: jobs, groups=dict.fromkeys(jobs))
    streams = Streams(folder, within=timedelta(seconds=1))
    for _ in range(3):
        values = _values(streams)
        assert (values["up", "hangs"], values["up", "events"]) == (0, 1)
        assert ("answered_timestamp_seconds", "hangs") not in values
        assert values["lag_offsets", "0", "events"] == 7
    # Three scrapes, and one thread: the later ones waited for the first one's answer.
    assert len(asked) == 1 and asked[0].is_alive()
    asked[0].join(60)
    assert not asked[0].is_alive(), "expected the adapter to give up within a minute"
    adapter.close()


def test_a_stream_that_hangs_is_closed_after_its_read_once_its_file_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, closed = threading.Event(), threading.Event()

    def read(job: Any) -> StreamStatus:
        assert job is changed or answers.wait(30)
        return VIEW

    def job(close: Callable[[], None]) -> Any:
        kafka: Any = SimpleNamespace(close=close)
        return Job(None, SimpleNamespace(name="events", slo=Slo(), group=None), None, kafka)  # type: ignore[arg-type]

    monkeypatch.setattr(status, "status", read)
    monkeypatch.setattr(ContentReader, "read", lambda reader, now: CONTENT)
    monkeypatch.setattr(metrics, "read_maintenance", lambda job, now: MAINTENANCE)
    jobs, changed = {"events": job(closed.set)}, job(lambda: None)
    folder: Any = SimpleNamespace(jobs=lambda: jobs, groups={"events": None})
    streams = Streams(folder, within=timedelta(seconds=0.2))
    assert _values(streams)["up", "events"] == 0
    jobs = {"events": changed}
    wait_for(lambda: _values(streams)["up", "events"] == 1, "the stream of the changed file")
    assert not closed.is_set()
    answers.set()
    assert closed.wait(30), "expected the connections of the old file to be closed"


def test_streams_files_are_taken_up_between_scrapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "status", lambda job: VIEW)
    monkeypatch.setattr(ContentReader, "read", lambda reader, now: CONTENT)
    monkeypatch.setattr(metrics, "read_maintenance", lambda job, now: MAINTENANCE)
    write_environment(tmp_path)

    def write(name: str, **changes: object) -> None:
        file = {
            "topic": name,
            "table": f"games.{name}",
            "schema": "id STRING NOT NULL",
            "key": "id",
        } | changes
        (tmp_path / "streams" / f"{name}.yaml").write_text(json.dumps(file))

    write("events")
    streams = Streams(StreamFolder(str(tmp_path)))
    assert {key: value for key, value in _values(streams).items() if key[0] == "up"} == {
        ("up", "events"): 1
    }
    same = streams._followed.current["events"]
    write("clicks", slo={"fresh": "10 seconds"})
    values = _values(streams)
    assert (
        values["up", "events"],
        values["up", "clicks"],
        values["slo_fresh_seconds", "clicks"],
    ) == (1, 1, 10)
    write("clicks", slo={"fresh": "2 minutes"})
    assert _values(streams)["slo_fresh_seconds", "clicks"] == 120
    write("clicks", slo={"fresh": "soon"})
    values = _values(streams)
    assert (values["up", "events"], values["up", "clicks"]) == (1, 0)
    (tmp_path / "streams" / "clicks.yaml").unlink()
    assert ("up", "clicks") not in _values(streams)
    assert streams._followed.current["events"] is same, (
        "a stream whose file did not change keeps its connection"
    )
    # A wrong file hides the completeness of its own group.
    write("events", group="a")
    write("clicks", group="b")
    assert {key[1] for key in _values(streams) if key[0] == "group_completeness_seconds"} == {
        "a",
        "b",
    }
    write("clicks", group="b", slo={"fresh": "soon"})
    assert {key[1] for key in _values(streams) if key[0] == "group_completeness_seconds"} == {"a"}
    (tmp_path / "streams" / "clicks.yaml").unlink()
    write("events", key="missing")
    with pytest.raises(ConfigurationError, match="key: expected a column"):
        StreamFolder(str(tmp_path))


def _of_groups(**answers: ScrapedStream) -> dict[tuple[str, ...], float]:
    class Fixed(Collector):
        def collect(self) -> list[Metric]:
            return list(metrics_of(answers, NOW))

    return {
        labels: value
        for labels, value in _values(Fixed()).items()
        if labels[0].startswith("group_")
    }


def test_a_group_is_as_complete_as_its_last_stream_and_absent_while_one_does_not_answer() -> None:
    def answer(
        through: str | None, group: str | None = "small", is_up: bool = True
    ) -> ScrapedStream:
        view = replace(VIEW, complete_through=through)
        return ScrapedStream(
            Slo(), TimedValue(StreamReadings(view, CONTENT, MAINTENANCE), NOW), is_up, group
        )

    far, late = answer("2026-11-21T02"), answer("2026-11-20T23")
    ended = datetime(2026, 11, 21, tzinfo=UTC)
    assert _of_groups(a=far, b=late, c=answer(None, None)) == {
        ("group_complete_through_timestamp_seconds", "small"): ended.timestamp(),
        ("group_completeness_seconds", "small"): (NOW - ended - timedelta(hours=1)).total_seconds(),
    }
    assert _of_groups(a=far, b=answer(None)) == {("group_completeness_seconds", "small"): 4 * 3600}
    assert _of_groups(a=far, b=replace(late, is_up=False)) == {}
    # A file that is wrong may be of any group.
    broken = ScrapedStream(Slo(), TimedValue(), False, config.UNREADABLE)
    assert _of_groups(a=far, b=broken) == {}
    assert _of_groups(a=answer("2026-11-21T02", None), b=broken) == {}
