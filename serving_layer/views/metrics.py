"""The streams' status as Prometheus reads it: gauges, each with the stream as its label."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from anabranch.errors import AnabranchError
from anabranch.job import Job
from serving_layer.views import status

LOG = logging.getLogger(__name__)


class Streams(Collector):
    """Asks Kafka and the lake anew at each scrape, one scrape after the other.

    A stream that cannot be asked is `anabranch_up` 0, and nothing else.
    """

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs
        self._alone = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        with self._alone:
            return list(self._collect())

    def _collect(self) -> Iterable[Metric]:
        views: dict[str, Mapping[str, Any] | None] = {}
        for job in self._jobs:
            try:
                views[job.stream.name] = status.status(job)
            except AnabranchError as error:
                LOG.warning("stream %s: no metrics: %s", job.stream.name, error)
                views[job.stream.name] = None
        return metrics_of(views, datetime.now(UTC))


def metrics_of(views: Mapping[str, Mapping[str, Any] | None], now: datetime) -> Iterator[Metric]:
    """The metrics of the streams' statuses, None for one that could not be asked. Pure."""
    yield _gauge("up", "Whether the stream's table and topic could be asked.", (), views, lambda v: {(): v is not None})
    told = {name: view for name, view in views.items() if view is not None}
    for name, text, labels, values in (
        (
            "position_offsets",
            "The next offset that the speed layer will publish.",
            ("partition",),
            lambda v: {(partition,): offset for partition, offset in v["position"].items()},
        ),
        ("lag_offsets", "Offsets that the speed layer has not published.", ("partition",), _lag),
        ("last_publish_timestamp_seconds", "When a branch was last published to.", ("branch",), _publishes),
        (
            "position_age_seconds",
            "How long the speed layer's position has stood still.",
            (),
            lambda v: {(): (now - datetime.fromisoformat(v["position_since"])).total_seconds()},
        ),
        ("hours_to_seal", "Hours that have ended and are not sealed.", (), lambda v: {(): len(v["to_seal"])}),
        ("hours_waiting", "Hours that are sealed and not accepted.", (), lambda v: {(): len(v["backlog"])}),
        ("hours_refused", "Of those, hours that were refused.", (), lambda v: {(): len(v["refused"])}),
        (
            "hours_served",
            "Sealed hours that are remembered one by one, by the layer that serves them.",
            ("layer",),
            _served,
        ),
        ("dead_letters", "Dead letters that main serves.", (), lambda v: {(): v["dead_letters"]}),
        ("lost_offsets", "Offsets that retention took and nobody holds.", (), lambda v: {(): sum(v["lost"].values())}),
        (
            "difference_unexplained_rows",
            "Rows in which the layers differ and nothing explains it.",
            ("kind",),
            _unexplained,
        ),
    ):
        yield _gauge(name, text, labels, told, values)


def _gauge(name: str, text: str, labels: Sequence[str], views: Mapping[str, Any], values: Any) -> Metric:
    gauge = GaugeMetricFamily(f"anabranch_{name}", text, labels=("stream", *labels))
    for stream, view in views.items():
        for given, value in values(view).items():
            gauge.add_metric((stream, *given), float(value))
    return gauge


def _lag(view: Mapping[str, Any]) -> dict[tuple[str, ...], float]:
    return {(partition,): offsets for partition, offsets in view["lag"]["partitions"].items()}


def _publishes(view: Mapping[str, Any]) -> dict[tuple[str, ...], float]:
    return {(b,): datetime.fromisoformat(at).timestamp() for b, at in view["last_publish"].items() if at is not None}


def _served(view: Mapping[str, Any]) -> dict[tuple[str, ...], float]:
    served = list(view["hours"].values())
    return {(layer,): served.count(layer) for layer in ("speed", "batch")}


def _unexplained(view: Mapping[str, Any]) -> dict[tuple[str, ...], float]:
    hours = view["unexplained"].values()
    return {(kind,): sum(hour.get(kind, 0) for hour in hours) for kind in ("missing", "extra", "changed")}
