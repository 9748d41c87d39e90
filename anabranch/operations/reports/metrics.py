"""Prometheus metrics of the streams' status and the jobs' measurements, labelled by stream. Streams
are read in parallel with one time limit below the scrape timeout, so a stream that hangs does not
block the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import accumulate
from typing import TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from anabranch.common.counters import COMMITS, CPU, REFUSED, RETRIES, S3_BYTES, S3_REQUESTS
from anabranch.common.errors import AnabranchError
from anabranch.common.output import text as text_of
from anabranch.common.remote_errors import SERVICES
from anabranch.config import Slo
from anabranch.job import Job, StreamFolder, groups_of
from anabranch.offsets.hours import end_of, start_of
from anabranch.offsets.position import Offsets
from anabranch.operations.reports import status
from anabranch.operations.reports.content import NEWEST_HOURS, ContentReader, MainContent
from anabranch.operations.reports.maintenance import (
    HOURS_SHOWN,
    Maintenance,
    TableGrowth,
    read_maintenance,
)
from anabranch.operations.reports.reading import FollowedStreams, TimedValue, utc_now
from anabranch.operations.reports.status import StreamStatus
from anabranch.protocol.ledger_row import Layer
from anabranch.protocol.maintained import MaintainedTable
from anabranch.protocol.measured import (
    BOUNDS,
    COMMIT,
    PUBLISH,
    READABLE,
    STAGE,
    Durations,
    Measured,
)
from anabranch.protocol.watermarks import complete_through_all

ANSWER_WITHIN = timedelta(seconds=6)
"""Below the scrape timeout of 25 s in `deploy/prometheus/prometheus.yml`."""

T = TypeVar("T")

NAMES = 20
"""Maximum number of unknown fields of a stream that have their own metric."""

Values = Mapping[tuple[str, ...], float]
"""One stream's values, by labels other than the stream."""


@dataclass(frozen=True)
class StreamReadings:
    status: StreamStatus
    content: MainContent
    maintenance: Maintenance = field(default_factory=Maintenance)


@dataclass(frozen=True)
class ScrapedStream:
    """A stream in a scrape: its promised times, its newest reading, and whether this scrape read
    it."""

    slo: Slo
    reading: TimedValue[StreamReadings]
    is_up: bool
    group: str | None = None


class Streams(Collector):
    """A collector that reads Kafka and the lake at each scrape, within a time limit. A stream that
    fails, times out or has an invalid file has `anabranch_up` 0, the time of its newest reading,
    its promised times, and no other metric. A stream that hangs uses one thread: later scrapes wait
    for the same answer. Each scrape covers the streams that `folder` has at its time."""

    def __init__(self, folder: StreamFolder, within: timedelta = ANSWER_WITHIN) -> None:
        self._within = within.total_seconds()
        self._alone = threading.Lock()
        self._followed = FollowedStreams(folder, "metrics of stream", _opened)

    def collect(self) -> Iterable[Metric]:
        deadline = time.monotonic() + self._within
        with self._alone:
            before = self._followed.current
            self._followed.update()
            streams, groups = self._followed.current, dict(self._followed.folder.groups)
            for name, one in streams.items():
                # Unless a read is in progress.
                if one is not before.get(name) or one.reader.answered.is_set():
                    one.reader.answered.clear()
                    threading.Thread(target=one.reader.refresh, daemon=True).start()
        answers = {}
        for name, one in streams.items():
            in_time = one.reader.answered.wait(max(0.0, deadline - time.monotonic()))
            reading = one.reader.reading
            is_up = in_time and reading.failure is None
            slo = Slo() if isinstance(one.job, AnabranchError) else one.job.stream.slo
            answers[name] = ScrapedStream(slo, reading, is_up, groups[name])
        return list(metrics_of(answers, utc_now()))

    def close(self) -> None:
        """Close the connections, including those of a stream that hangs."""
        for one in self._followed.current.values():
            one.close()


def _opened(job: Job) -> Callable[[], StreamReadings]:
    return partial(_read, job, ContentReader(job))


def _read(job: Job, content: ContentReader) -> StreamReadings:
    return StreamReadings(
        status.status(job), content.read(utc_now()), read_maintenance(job, utc_now())
    )


def metrics_of(answers: Mapping[str, ScrapedStream], now: datetime) -> Iterator[Metric]:
    yield _gauge(
        "up", "Whether the stream's table and topic answered in time.", answers, lambda a: a.is_up
    )
    text = "Time of the newest reading of the stream that succeeded."
    yield _gauge("answered_timestamp_seconds", text, answers, lambda a: _timestamp(a.reading.as_of))
    text = "Promised time until main has a record that Kafka acknowledged: slo.fresh."
    yield _gauge("slo_fresh_seconds", text, answers, lambda a: _seconds(a.slo.fresh))
    text = (
        "Promised time from an hour's end until it and all earlier hours are accepted: "
        "slo.complete."
    )
    yield _gauge("slo_complete_seconds", text, answers, lambda a: _seconds(a.slo.complete))
    yield from _group_metrics(answers, now)
    read = {name: answer.reading.value for name, answer in answers.items() if answer.is_up}
    known = {name: one for name, one in read.items() if one is not None}
    yield from _status_metrics({name: one.status for name, one in known.items()}, now)
    yield from _content_metrics({name: one.content for name, one in known.items()})
    yield from _maintenance_metrics({name: one.maintenance for name, one in known.items()}, now)
    yield from _measured_metrics({name: one.content.measured for name, one in known.items()})


def _status_metrics(views: Mapping[str, StreamStatus], now: datetime) -> Iterator[Metric]:
    def gauge(
        name: str, text: str, values: Callable[[StreamStatus], Values | float | None], *labels: str
    ) -> Metric:
        return _gauge(name, text, views, values, *labels)

    text = "The next offset that the speed layer will publish."
    yield gauge("position_offsets", text, lambda v: _by_partition(v.position), "partition")
    text = "Offsets that the speed layer has not published."
    yield gauge("lag_offsets", text, lambda v: _by_partition(v.lag.partitions), "partition")
    yield gauge(
        "last_publish_timestamp_seconds",
        "Time of the last publish to a branch.",
        _publishes,
        "branch",
    )
    text = "Time since the speed layer's position moved last."
    yield gauge("position_age_seconds", text, lambda v: _seconds(now - v.position_since))
    text = "Age of the oldest acknowledged record that main lacks; 0 when it lacks none."
    yield gauge("freshness_seconds", text, lambda v: status.freshness_seconds(v, now))
    text = "Time since the end of the oldest hour that is not complete; 0 before its end."
    yield gauge("completeness_seconds", text, lambda v: status.completeness_seconds(v, now))
    text = "Time from the end of the newest accepted hour until its first acceptance."
    yield gauge("acceptance_seconds", text, _acceptance)
    yield gauge(
        "hours_to_seal", "Hours that have ended and are not sealed.", lambda v: len(v.to_seal)
    )
    yield gauge(
        "hours_waiting", "Hours that are sealed and not accepted.", lambda v: len(v.backlog)
    )
    yield gauge(
        "hours_refused",
        "Sealed hours that were refused and are not accepted.",
        lambda v: len(v.refused),
    )
    text = "Accepted hours whose newest restatement was refused."
    yield gauge("restatements_refused", text, lambda v: len(v.refused_restatements))
    yield gauge(
        "hours_served",
        "Sealed hours that the table lists individually, by serving layer.",
        _served,
        "layer",
    )
    yield gauge("expired_hours", "Hours whose rows have expired.", lambda v: v.expired_hours)
    text = (
        "Hours that are kept a day or more beyond keep.rows, without those that an operator keeps."
    )
    yield gauge("overdue_hours", text, lambda v: v.overdue.hours if v.overdue is not None else 0)
    yield gauge(
        "holds", "Spans of hours that operators keep beyond their time.", lambda v: len(v.holds)
    )
    yield gauge(
        "topic_recreated",
        "Whether the topic was deleted and recreated.",
        lambda v: v.topic_recreated,
    )
    yield gauge(
        "retention_seconds",
        "Retention time of the topic; absent when unlimited.",
        lambda v: _seconds(v.retention),
    )
    yield gauge("dead_letters", "Dead letters in main.", lambda v: v.dead_letters)
    yield gauge(
        "lost_offsets", "Offsets that retention deleted unread.", lambda v: sum(v.lost.values())
    )
    text = "Rows with an unexplained difference between the layers."
    yield gauge("difference_unexplained_rows", text, _unexplained, "kind")
    text = "Records of the newest accepted hour with fields that the schema does not know."
    yield gauge(
        "unknown_records", text, lambda v: v.unknown.records if v.unknown is not None else None
    )
    text = (
        f"Records of the newest accepted hour with this unknown field; the {NAMES} most frequent "
        "names."
    )
    yield gauge("unknown_fields", text, _unknown_fields, "name")


_DURATIONS = {
    READABLE: (
        "Time from the timestamp of a micro-batch's oldest record to the commit that made it "
        "readable."
    ),
    STAGE: "Time to stage a micro-batch (speed), or to read, stage and check an hour (batch).",
    PUBLISH: (
        "Time from staged rows to their commit, including the publish queue and refused commits."
    ),
    COMMIT: "Time of a publish's commit, without the last publish of a job that ended.",
}
# Label, known label values and help text of each counter. Known values start at 0, because PromQL's
# increase() does not see a counter's first value.
_COUNTS: dict[str, tuple[str | None, tuple[str, ...], str]] = {
    RETRIES: ("service", SERVICES, "Retried failures of jobs, by the service that failed."),
    REFUSED: (
        None,
        ("",),
        "Publishes that were planned again because another commit landed first.",
    ),
    COMMITS: (None, ("",), "Commits of jobs to the stream's tables."),
    S3_BYTES: (
        "direction",
        ("read", "written"),
        "Bytes that jobs read from S3 and wrote to it, without reads of Spark's JVM.",
    ),
    S3_REQUESTS: (
        "operation",
        (),
        "S3 requests of the jobs' Python, without those of Spark's JVM.",
    ),
}


_CPU_TEXT = "CPU time of jobs of one stream on their own machine, without executors on others."


def _content_metrics(contents: Mapping[str, MainContent]) -> Iterator[Metric]:
    text = "Rows in main, by the layer that wrote them."
    yield _gauge(
        "rows", text, contents, lambda c: {(layer,): n for layer, n in c.rows.items()}, "layer"
    )
    text = "in main of the hour that receives records."
    yield _gauge("running_hour_rows", f"Rows {text}", contents, lambda c: c.running.rows)
    yield _gauge("running_hour_files", f"Files {text}", contents, lambda c: c.running.files)
    yield _gauge(
        "running_hour_bytes", f"Bytes of the files {text}", contents, lambda c: c.running.bytes
    )
    text = f"Dead letters in main of the {NEWEST_HOURS} newest hours, by reason."
    yield _gauge("hour_dead_letters", text, contents, _dead_letters, "hour", "reason")


_TABLE_GAUGES: tuple[tuple[str, str, Callable[[TableGrowth], int]], ...] = (
    (
        "metadata_bytes",
        "Size of the table's current metadata file in bytes.",
        lambda t: t.metadata_bytes,
    ),
    ("snapshots", "Snapshots of the table.", lambda t: t.snapshots),
    ("tags", "Tags of the table: replaced revisions, and main once an hour.", lambda t: t.tags),
    ("manifests", "Manifests of the table's branches.", lambda t: t.manifests),
    ("data_files", "Data files of main.", lambda t: t.files),
    ("records", "Rows of main.", lambda t: t.rows),
    (
        "expirable_snapshots",
        "Snapshots and tags that the next maintenance expires.",
        lambda t: t.expirable,
    ),
)
_LAST_RUN_GAUGES: tuple[tuple[str, str, Callable[[MaintainedTable], int]], ...] = (
    ("expired_snapshots", "Snapshots and tags that the last run expired.", lambda t: t.expired),
    ("merged_files", "Files saved by merging in the last run.", lambda t: t.merged),
    ("deleted_files", "Unreferenced files that the last run deleted.", lambda t: t.orphans.files),
    (
        "deleted_bytes",
        "Bytes of the unreferenced files that the last run deleted.",
        lambda t: t.orphans.bytes,
    ),
    (
        "spared_files",
        "Unreferenced files that the last run kept for their age.",
        lambda t: t.spared.files,
    ),
    ("spared_bytes", "Bytes of the unreferenced files that it kept.", lambda t: t.spared.bytes),
)


def _group_metrics(answers: Mapping[str, ScrapedStream], now: datetime) -> Iterator[Metric]:
    """Yield the completeness of each group whose streams were all read. Pure."""
    through = GaugeMetricFamily(
        "anabranch_group_complete_through_timestamp_seconds",
        "End of the last hour that is accepted, with all earlier ones, in every stream of the "
        "group.",
        labels=("group",),
    )
    seconds = GaugeMetricFamily(
        "anabranch_group_completeness_seconds",
        "Time since the end of the oldest hour that is not complete in every stream of the group; "
        "0 before its end.",
        labels=("group",),
    )
    for group, names in groups_of({name: answer.group for name, answer in answers.items()}).items():
        members = [answers[name] for name in names]
        known = [
            answer.reading.value.status
            for answer in members
            if answer.is_up and answer.reading.value is not None
        ]
        if len(known) < len(members):
            continue
        seconds.add_metric((group,), max(status.completeness_seconds(view, now) for view in known))
        if (hour := complete_through_all([view.complete_through for view in known])) is not None:
            through.add_metric((group,), end_of(hour).timestamp())
    yield from (through, seconds)


def _maintenance_metrics(maintained: Mapping[str, Maintenance], now: datetime) -> Iterator[Metric]:
    last = {name: m.last for name, m in maintained.items() if m.last is not None}
    text = "Time of the last maintenance run that completed all steps."
    complete = {name: m.complete for name, m in maintained.items() if m.complete is not None}
    yield _gauge("maintained_timestamp_seconds", text, complete, lambda run: _timestamp(run.ended))
    text = "Whether a step of the last run failed."
    yield _gauge("maintenance_failed", text, last, lambda run: not run.is_complete)
    text = "Duration of the last run, by step."
    yield _gauge(
        "maintenance_seconds",
        text,
        last,
        lambda run: {(s,): n for s, n in run.seconds.items()},
        "step",
    )
    text = "Hours that the last run dropped from the speed branch."
    yield _gauge("maintenance_dropped_hours", text, last, lambda run: run.speed_hours)
    tables = {name: run.tables for name, run in last.items()}
    for key, text, of_run in _LAST_RUN_GAUGES:
        yield _gauge(f"maintenance_{key}", text, tables, partial(_by_name, of_run), "table")
    text = "of killed processes that the last run deleted from temporary folders."
    folders = {name: run.folders for name, run in last.items()}
    files, size = (
        partial(_by_name, lambda f: f.gone.files),
        partial(_by_name, lambda f: f.gone.bytes),
    )
    yield _gauge("folder_deleted_files", f"Files {text}", folders, files, "folder")
    yield _gauge("folder_deleted_bytes", f"Bytes of files {text}", folders, size, "folder")
    grown = {name: m.tables for name, m in maintained.items()}
    for key, text, of_table in _TABLE_GAUGES:
        yield _gauge(f"table_{key}", text, grown, partial(_by_name, of_table), "table")
    text = "Whether the table could not be read, such as before `apply`."
    yield _gauge("table_unread", text, maintained, _unread, "table")
    text = f"Speed files in main by hour, for the {HOURS_SHOWN} hours with the most."
    yield _gauge(
        "hour_speed_files",
        text,
        maintained,
        lambda m: {(h,): n for h, n in m.speed_files.items()},
        "hour",
    )
    text = "Time since the first hour with dead letters began."
    oldest = {
        name: m.oldest_dead_letter
        for name, m in maintained.items()
        if m.oldest_dead_letter is not None
    }
    yield _gauge(
        "oldest_dead_letter_age_seconds", text, oldest, lambda hour: _seconds(now - start_of(hour))
    )
    text = "Time that dead letters have been pending; 0 when none are."
    yield _gauge(
        "dead_letters_wait_seconds",
        text,
        maintained,
        lambda m: _seconds(now - (m.letters_wait_since or now)),
    )


def _measured_metrics(measured: Mapping[str, Mapping[Layer, Measured]]) -> Iterator[Metric]:
    by_layer = [
        (name, layer, m) for name, layers in measured.items() for layer, m in layers.items()
    ]
    for key, text in _DURATIONS.items():
        name = "readable_after_seconds" if key == READABLE else f"{key}_seconds"
        histogram = HistogramMetricFamily(f"anabranch_{name}", text, labels=("stream", "layer"))
        for stream, layer, m in by_layer:
            if (durations := m.durations.get(key)) is not None:
                histogram.add_metric((stream, layer), _buckets(durations), durations.sum)
        yield histogram
    for key, (label, known, text) in _COUNTS.items():
        labels = ("stream", "layer") if label is None else ("stream", "layer", label)
        counter = CounterMetricFamily(f"anabranch_{key}", text, labels=labels)
        for stream, layer, m in by_layer:
            counts = dict.fromkeys(known, 0) | {
                value: n for (of, value), n in m.counts.items() if of == key
            }
            for value, n in counts.items():
                counter.add_metric((stream, layer) if label is None else (stream, layer, value), n)
        yield counter
    cpu = CounterMetricFamily("anabranch_cpu_seconds", _CPU_TEXT, labels=("stream", "layer"))
    for stream, layer, m in by_layer:
        if (ms := m.counts.get((CPU, ""))) is not None:
            cpu.add_metric((stream, layer), ms / 1000)
    yield cpu


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    """Return cumulative buckets, as Prometheus expects them."""
    within = accumulate(durations.counts.get(bound, 0) for bound in BOUNDS)
    return [
        (str(float(bound)).replace("inf", "+Inf"), n)
        for bound, n in zip(BOUNDS, within, strict=True)
    ]


def _gauge(
    name: str,
    text: str,
    by_stream: Mapping[str, T],
    values: Callable[[T], Values | float | None],
    *labels: str,
) -> Metric:
    """Return a gauge of each stream: a value by labels, or a single value; no sample for None."""
    gauge = GaugeMetricFamily(f"anabranch_{name}", text, labels=("stream", *labels))
    for stream, one in by_stream.items():
        found = values(one)
        by_label = found if isinstance(found, Mapping) else {} if found is None else {(): found}
        for given, value in by_label.items():
            gauge.add_metric((stream, *given), float(value))
    return gauge


def _seconds(span: timedelta | None) -> float | None:
    return span.total_seconds() if span is not None else None


def _timestamp(at: datetime | None) -> float | None:
    return at.timestamp() if at is not None else None


def _by_name(value: Callable[[T], float], items: Mapping[str, T]) -> Values:
    return {(name,): value(one) for name, one in items.items()}


def _unread(maintenance: Maintenance) -> Values:
    return {
        (table,): table in maintenance.unread
        for table in (*maintenance.tables, *maintenance.unread)
    }


def _dead_letters(content: MainContent) -> Values:
    return {
        (hour, reason): n
        for hour, of_hour in content.dead_letters.items()
        for reason, n in of_hour.items()
    }


def _unknown_fields(view: StreamStatus) -> Values:
    fields = view.unknown.fields[:NAMES] if view.unknown is not None else ()
    return {(text_of(field.name),): field.records for field in fields}


def _by_partition(offsets: Offsets) -> Values:
    return {(str(partition),): offset for partition, offset in offsets.items()}


def _publishes(view: StreamStatus) -> Values:
    return {(branch,): at.timestamp() for branch, at in view.last_publish.items() if at is not None}


def _acceptance(view: StreamStatus) -> float | None:
    hour, at = view.newest_accepted, view.accepted_at
    return _seconds(at - end_of(hour)) if hour is not None and at is not None else None


def _served(view: StreamStatus) -> Values:
    served = list(view.hours.values())
    return {(layer,): served.count(layer) for layer in ("speed", "batch")}


def _unexplained(view: StreamStatus) -> Values:
    hours = view.unexplained.values()
    return {
        (kind,): sum(hour.get(kind, 0) for hour in hours)
        for kind in ("missing", "extra", "changed")
    }
