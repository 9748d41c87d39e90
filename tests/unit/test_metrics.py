"""Metrics: what Prometheus' own parser reads of them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from serving_layer.views.metrics import metrics_of
from serving_layer.views.status import Lag, StreamStatus

NOW = datetime(2026, 11, 21, 3, tzinfo=UTC)
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
    complete_through="2026-11-20T23",
    to_seal=[],
    backlog=["2026-11-21T00", "2026-11-21T01"],
    refused=["2026-11-21T01"],
    hours={"2026-11-21T00": "speed", "2026-11-21T01": "speed", "2026-11-20T23": "batch"},
    unexplained={"2026-11-20T23": {"missing": 2}, "2026-11-20T22": {"missing": 1, "changed": 4}},
    dead_letters=11,
    lost={"2026-11-20T23": 5},
)


class _Fixed(Collector):
    def collect(self) -> list[Metric]:
        return list(metrics_of({"events": VIEW, "away": None}, NOW))


def test_prometheus_reads_every_stream_and_a_stream_that_is_away_is_down() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Fixed())
    values = {
        (sample.name.removeprefix("anabranch_"), *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }
    assert values == {
        ("up", "events"): 1, ("up", "away"): 0,
        ("position_offsets", "0", "events"): 93, ("position_offsets", "1", "events"): 50,
        ("lag_offsets", "0", "events"): 7, ("lag_offsets", "1", "events"): 0,
        ("last_publish_timestamp_seconds", "main", "events"): NOW.timestamp(),
        ("last_publish_timestamp_seconds", "speed", "events"): NOW.timestamp(),
        ("position_age_seconds", "events"): 90,
        ("hours_to_seal", "events"): 0, ("hours_waiting", "events"): 2, ("hours_refused", "events"): 1,
        ("hours_served", "speed", "events"): 2, ("hours_served", "batch", "events"): 1,
        ("dead_letters", "events"): 11,
        ("lost_offsets", "events"): 5,
        ("difference_unexplained_rows", "missing", "events"): 3,
        ("difference_unexplained_rows", "extra", "events"): 0,
        ("difference_unexplained_rows", "changed", "events"): 4,
    }  # fmt: skip
