"""The streams' status as Prometheus reads it: gauges, each with the stream as its label."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from anabranch.errors import AnabranchError
from anabranch.job import Job
from anabranch.position import Offsets
from serving_layer.views import status
from serving_layer.views.status import StreamStatus

LOG = logging.getLogger(__name__)

Values = Mapping[tuple[str, ...], float]
"""Of one stream, by the labels beside the stream's."""


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
        views: dict[str, StreamStatus | None] = {}
        for job in self._jobs:
            try:
                views[job.stream.name] = status.status(job)
            except AnabranchError as error:
                LOG.warning("stream %s: no metrics: %s", job.stream.name, error)
                views[job.stream.name] = None
        return metrics_of(views, datetime.now(UTC))


def metrics_of(views: Mapping[str, StreamStatus | None], now: datetime) -> Iterator[Metric]:
    """The metrics of the streams' statuses, None for one that could not be asked. Pure."""
    up: dict[str, Values] = {name: {(): view is not None} for name, view in views.items()}
    yield _gauge("up", "Whether the stream's table and topic could be asked.", (), up)
    known = {name: view for name, view in views.items() if view is not None}
    gauges: tuple[tuple[str, str, tuple[str, ...], Callable[[StreamStatus], Values]], ...] = (
        (
            "position_offsets",
            "The next offset that the speed layer will publish.",
            ("partition",),
            lambda v: _by_partition(v.position),
        ),
        (
            "lag_offsets",
            "Offsets that the speed layer has not published.",
            ("partition",),
            lambda v: _by_partition(v.lag.partitions),
        ),
        ("last_publish_timestamp_seconds", "When a branch was last published to.", ("branch",), _publishes),
        (
            "position_age_seconds",
            "How long the speed layer's position has stood still.",
            (),
            lambda v: {(): (now - v.position_since).total_seconds()},
        ),
        ("hours_to_seal", "Hours that have ended and are not sealed.", (), lambda v: {(): len(v.to_seal)}),
        ("hours_waiting", "Hours that are sealed and not accepted.", (), lambda v: {(): len(v.backlog)}),
        ("hours_refused", "Of those, hours that were refused.", (), lambda v: {(): len(v.refused)}),
        (
            "hours_served",
            "Sealed hours that are remembered one by one, by the layer that serves them.",
            ("layer",),
            _served,
        ),
        ("dead_letters", "Dead letters that main serves.", (), lambda v: {(): v.dead_letters}),
        ("lost_offsets", "Offsets that retention took and nobody holds.", (), lambda v: {(): sum(v.lost.values())}),
        (
            "difference_unexplained_rows",
            "Rows in which the layers differ and nothing explains it.",
            ("kind",),
            _unexplained,
        ),
    )
    for name, text, labels, values in gauges:
        yield _gauge(name, text, labels, {stream: values(view) for stream, view in known.items()})


def _gauge(name: str, text: str, labels: Sequence[str], values: Mapping[str, Values]) -> Metric:
    gauge = GaugeMetricFamily(f"anabranch_{name}", text, labels=("stream", *labels))
    for stream, of_stream in values.items():
        for given, value in of_stream.items():
            gauge.add_metric((stream, *given), float(value))
    return gauge


def _by_partition(offsets: Offsets) -> Values:
    return {(str(partition),): offset for partition, offset in offsets.items()}


def _publishes(view: StreamStatus) -> Values:
    return {(branch,): at.timestamp() for branch, at in view.last_publish.items() if at is not None}


def _served(view: StreamStatus) -> Values:
    served = list(view.hours.values())
    return {(layer,): served.count(layer) for layer in ("speed", "batch")}


def _unexplained(view: StreamStatus) -> Values:
    hours = view.unexplained.values()
    return {(kind,): sum(hour.get(kind, 0) for hour in hours) for kind in ("missing", "extra", "changed")}
