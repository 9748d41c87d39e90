"""Prometheus metrics of the streams' status and the jobs' measurements, labelled by stream. Streams
are read in parallel with one time limit below the scrape timeout, so a stream that hangs does not
block the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from anabranch.common.counters import COMMITS, CPU, REFUSED, RETRIES, S3_BYTES, S3_REQUESTS
from anabranch.common.errors import AnabranchError
from anabranch.common.output import text as text_of
from anabranch.common.remote_errors import SERVICES
from anabranch.config import Slo
from anabranch.job import Job, group_of, groups_of
from anabranch.offsets.hours import end_of, start_of
from anabranch.offsets.position import Offsets
from anabranch.operations.reports import status
from anabranch.operations.reports.content import NEWEST_HOURS, Content, ContentReader
from anabranch.operations.reports.maintenance import HOURS_SHOWN, Maintenance, TableGrowth, read_maintenance
from anabranch.operations.reports.reading import Reader, Reading, utc_now
from anabranch.operations.reports.status import StreamStatus
from anabranch.protocol.ledger_row import Layer
from anabranch.protocol.maintained import MaintainedFolder, MaintainedTable
from anabranch.protocol.measured import BOUNDS, COMMIT, PUBLISH, READABLE, STAGE, Durations, Measured
from anabranch.protocol.watermarks import complete_through_all

ANSWER_WITHIN = timedelta(seconds=6)
"""Below the scrape timeout of 25 s in `deploy/prometheus/prometheus.yml`."""

NAMES = 20
"""Maximum number of unknown fields with a metric of their own."""

Values = Mapping[tuple[str, ...], float]
"""One stream's values, by labels other than the stream."""


@dataclass(frozen=True)
class Known:
    """One reading of a stream."""

    status: StreamStatus
    content: Content
    maintenance: Maintenance = field(default_factory=Maintenance)


@dataclass(frozen=True)
class Answer:
    """A stream in a scrape: its promise, its newest reading, and whether the reading is of this
    scrape."""

    slo: Slo
    reading: Reading[Known]
    is_up: bool
    group: str | None = None


Found = Callable[[], Mapping[str, Job | AnabranchError]]
"""The current streams: each with its job, or with the error in its file."""


@dataclass(frozen=True)
class _Asked:
    """A stream to read. `answered` is set when the newest request was answered."""

    job: Job | AnabranchError
    slo: Slo
    reader: Reader[Known]
    answered: threading.Event

    def ask(self) -> None:
        """Start to read the stream, unless a reading is under way."""
        if not self.answered.is_set():
            return
        self.answered.clear()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            self.reader.refresh()
        finally:
            self.answered.set()


class Streams(Collector):
    """Reads Kafka and the lake at each scrape, within a time limit. A stream that fails, times out
    or has an invalid file has `anabranch_up` 0 and the age of its newest reading, and no other
    metric. A stream that hangs uses one thread: later scrapes wait for the same answer. With
    `found`, each scrape covers the streams that exist at its time.
    """

    def __init__(self, jobs: Sequence[Job] = (), within: timedelta = ANSWER_WITHIN, found: Found | None = None) -> None:
        self._found = found or (lambda: {job.stream.name: job for job in jobs})
        self._within = within.total_seconds()
        self._alone = threading.Lock()
        self._asked: dict[str, _Asked] = {}

    def collect(self) -> Iterable[Metric]:
        deadline = time.monotonic() + self._within
        with self._alone:
            self._follow()
            streams = dict(self._asked)
            for asked in streams.values():
                asked.ask()
        answers = {}
        for name, asked in streams.items():
            in_time = asked.answered.wait(max(0.0, deadline - time.monotonic()))
            reading = asked.reader.reading
            is_up = in_time and reading.failure is None
            answers[name] = Answer(asked.slo, reading, is_up, group_of(asked.job))
        return list(metrics_of(answers, utc_now()))

    def close(self) -> None:
        """Close the connections, including those of a stream that hangs."""
        for asked in self._asked.values():
            _close(asked.job)

    def _follow(self) -> None:
        """Update the streams; a changed file gets a new job."""
        before, found = self._asked, self._found()
        self._asked = {
            name: old if (old := before.get(name)) is not None and old.job is job else _asked(name, job)
            for name, job in found.items()
        }
        for name, old in before.items():
            if self._asked.get(name) is not old and old.answered.is_set():
                _close(old.job)


def _asked(name: str, job: Job | AnabranchError) -> _Asked:
    answered = threading.Event()
    answered.set()
    what = f"metrics of stream {name}"
    if isinstance(job, AnabranchError):
        return _Asked(job, Slo(), Reader(what, partial(_refuse, job)), answered)
    return _Asked(job, job.stream.slo, Reader(what, partial(_read, job, ContentReader(job))), answered)


def _close(job: Job | AnabranchError) -> None:
    if isinstance(job, Job):
        job.kafka.close_quietly()


def _refuse(error: AnabranchError) -> Known:
    raise error


def _read(job: Job, content: ContentReader) -> Known:
    return Known(status.status(job), content.read(utc_now()), read_maintenance(job, utc_now()))


def metrics_of(answers: Mapping[str, Answer], now: datetime) -> Iterator[Metric]:
    """The metrics of the streams. Pure."""
    up: dict[str, Values] = {name: {(): answer.is_up} for name, answer in answers.items()}
    yield _gauge("up", "Whether the stream's table and topic answered in time.", (), up)
    asked = {name: at.timestamp() for name, answer in answers.items() if (at := answer.reading.as_of) is not None}
    text = "Time of the newest reading of the stream that succeeded."
    yield _gauge("answered_timestamp_seconds", text, (), {name: {(): at} for name, at in asked.items()})
    for key, text in (
        ("fresh", "Promised time until main has a record that Kafka acknowledged: slo.fresh."),
        ("complete", "Promised time from an hour's end until it and all earlier hours are accepted: slo.complete."),
    ):
        promised = {name: getattr(answer.slo, key) for name, answer in answers.items()}
        promises: dict[str, Values] = {
            name: {(): span.total_seconds()} for name, span in promised.items() if span is not None
        }
        yield _gauge(f"slo_{key}_seconds", text, (), promises)
    yield from _group_metrics(answers, now)
    read = {name: answer.reading.value for name, answer in answers.items() if answer.is_up}
    maintained = {name: known.maintenance for name, known in read.items() if known is not None}
    contents = {name: known.content for name, known in read.items() if known is not None}
    known = {name: known.status for name, known in read.items() if known is not None}
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
        ("last_publish_timestamp_seconds", "Time of the last publish to a branch.", ("branch",), _publishes),
        (
            "position_age_seconds",
            "Time since the speed layer's position moved last.",
            (),
            lambda v: {(): (now - v.position_since).total_seconds()},
        ),
        (
            "freshness_seconds",
            "Age of the oldest acknowledged record that main lacks; 0 when it lacks none.",
            (),
            lambda v: {(): status.freshness_seconds(v, now)},
        ),
        (
            "completeness_seconds",
            "Time since the end of the oldest hour that is not complete; 0 before its end.",
            (),
            lambda v: {(): status.completeness_seconds(v, now)},
        ),
        (
            "acceptance_seconds",
            "Time from the end of the newest accepted hour until its first acceptance.",
            (),
            _acceptance,
        ),
        ("hours_to_seal", "Hours that have ended and are not sealed.", (), lambda v: {(): len(v.to_seal)}),
        ("hours_waiting", "Hours that are sealed and not accepted.", (), lambda v: {(): len(v.backlog)}),
        ("hours_refused", "Sealed hours that were refused and are not accepted.", (), lambda v: {(): len(v.refused)}),
        (
            "restatements_refused",
            "Accepted hours whose newest restatement was refused.",
            (),
            lambda v: {(): len(v.refused_restatements)},
        ),
        (
            "hours_served",
            "Sealed hours that the table lists individually, by serving layer.",
            ("layer",),
            _served,
        ),
        ("expired_hours", "Hours whose rows have expired.", (), lambda v: {(): v.expired_hours}),
        (
            "overdue_hours",
            "Hours that are kept a day or more beyond keep.rows, without those that an operator keeps.",
            (),
            lambda v: {(): v.overdue.hours if v.overdue is not None else 0},
        ),
        ("holds", "Spans of hours that operators keep beyond their time.", (), lambda v: {(): len(v.holds)}),
        (
            "topic_recreated",
            "Whether the topic was deleted and recreated.",
            (),
            lambda v: {(): v.topic_recreated},
        ),
        (
            "retention_seconds",
            "Retention time of the topic; absent when unlimited.",
            (),
            lambda v: {(): v.retention.total_seconds()} if v.retention is not None else {},
        ),
        ("dead_letters", "Dead letters in main.", (), lambda v: {(): v.dead_letters}),
        ("lost_offsets", "Offsets that retention deleted unread.", (), lambda v: {(): sum(v.lost.values())}),
        (
            "difference_unexplained_rows",
            "Rows with an unexplained difference between the layers.",
            ("kind",),
            _unexplained,
        ),
        (
            "unknown_records",
            "Records of the newest accepted hour with fields that the schema does not know.",
            (),
            lambda v: {(): v.unknown.records} if v.unknown is not None else {},
        ),
        (
            "unknown_fields",
            f"Records of the newest accepted hour with this unknown field; the {NAMES} most frequent names.",
            ("name",),
            lambda v: (
                {(text_of(f.name),): f.records for f in v.unknown.fields[:NAMES]} if v.unknown is not None else {}
            ),
        ),
    )
    for name, text, labels, values in gauges:
        yield _gauge(name, text, labels, {stream: values(view) for stream, view in known.items()})
    yield from _content_metrics(contents)
    yield from _maintenance_metrics(maintained, now)
    yield from _measured_metrics({name: content.measured for name, content in contents.items()})


_DURATIONS = {
    READABLE: "Time from the timestamp of a micro-batch's oldest record to the commit that made it readable.",
    STAGE: "Time to stage a micro-batch (speed), or to read, stage and check an hour (batch).",
    PUBLISH: "Time from staged rows to their commit, including the publish queue and refused commits.",
    COMMIT: "Time of a publish's commit, without the last publish of a job that ended.",
}
# Each with its label and the values that are known: they begin at 0, since PromQL's increase() does not see a counter's
# first value.
_COUNTS: dict[str, tuple[str | None, tuple[str, ...], str]] = {
    RETRIES: ("service", SERVICES, "Retried failures of jobs, by the service that failed."),
    REFUSED: (None, ("",), "Publishes that were planned again because another commit landed first."),
    COMMITS: (None, ("",), "Commits of jobs to the stream's tables."),
    S3_BYTES: (
        "direction",
        ("read", "written"),
        "Bytes that jobs read from S3 and wrote to it, without reads of Spark's JVM.",
    ),
    S3_REQUESTS: ("operation", (), "S3 requests of the jobs' Python, without those of Spark's JVM."),
}


_CPU_TEXT = "CPU time of jobs of one stream on their own machine, without executors on others."


def _content_metrics(contents: Mapping[str, Content]) -> Iterator[Metric]:
    rows: dict[str, Values] = {name: {(k,): n for k, n in c.rows.items()} for name, c in contents.items()}
    yield _gauge("rows", "Rows in main, by the layer that wrote them.", ("layer",), rows)
    for key, text in (("rows", "Rows"), ("files", "Files"), ("bytes", "Bytes of the files")):
        running: dict[str, Values] = {name: {(): getattr(c.running, key)} for name, c in contents.items()}
        yield _gauge(f"running_hour_{key}", f"{text} in main of the hour that receives records.", (), running)
    reasons: dict[str, Values] = {
        name: {(hour, reason): n for hour, of_hour in c.dead_letters.items() for reason, n in of_hour.items()}
        for name, c in contents.items()
    }
    text = f"Dead letters in main of the {NEWEST_HOURS} newest hours, by reason."
    yield _gauge("hour_dead_letters", text, ("hour", "reason"), reasons)


_OF_TABLES: tuple[tuple[str, str, Callable[[TableGrowth], int]], ...] = (
    ("metadata_bytes", "Size of the table's current metadata file in bytes.", lambda t: t.metadata_bytes),
    ("snapshots", "Snapshots of the table.", lambda t: t.snapshots),
    ("tags", "Tags of the table: replaced revisions, and main once an hour.", lambda t: t.tags),
    ("manifests", "Manifests of the table's branches.", lambda t: t.manifests),
    ("data_files", "Data files of main.", lambda t: t.files),
    ("records", "Rows of main.", lambda t: t.rows),
    ("expirable_snapshots", "Snapshots and tags that the next maintenance expires.", lambda t: t.expirable),
)
_OF_LAST_RUN: tuple[tuple[str, str, Callable[[MaintainedTable], int]], ...] = (
    ("expired_snapshots", "Snapshots and tags that the last run expired.", lambda t: t.expired),
    ("merged_files", "Files saved by merging in the last run.", lambda t: t.merged),
    ("deleted_files", "Unreferenced files that the last run deleted.", lambda t: t.orphans.files),
    ("deleted_bytes", "Bytes of the unreferenced files that the last run deleted.", lambda t: t.orphans.bytes),
    ("spared_files", "Unreferenced files that the last run kept for their age.", lambda t: t.spared.files),
    ("spared_bytes", "Bytes of the unreferenced files that it kept.", lambda t: t.spared.bytes),
)

_OF_FOLDERS: tuple[tuple[str, str, Callable[[MaintainedFolder], int]], ...] = (
    (
        "deleted_files",
        "Files of killed processes that the last run deleted from temporary folders.",
        lambda f: f.gone.files,
    ),
    (
        "deleted_bytes",
        "Bytes of files of killed processes that the last run deleted from temporary folders.",
        lambda f: f.gone.bytes,
    ),
)


def _group_metrics(answers: Mapping[str, Answer], now: datetime) -> Iterator[Metric]:
    """Completeness of each group whose streams all answered. Pure."""
    through = GaugeMetricFamily(
        "anabranch_group_complete_through_timestamp_seconds",
        "End of the last hour that is accepted, with all earlier ones, in every stream of the group.",
        labels=("group",),
    )
    seconds = GaugeMetricFamily(
        "anabranch_group_completeness_seconds",
        "Time since the end of the oldest hour that is not complete in every stream of the group; 0 before its end.",
        labels=("group",),
    )
    for group, names in groups_of({name: answer.group for name, answer in answers.items()}).items():
        members = [answers[name] for name in names]
        known = [answer.reading.value.status for answer in members if answer.is_up and answer.reading.value is not None]
        if len(known) < len(members):
            continue
        seconds.add_metric((group,), max(status.completeness_seconds(view, now) for view in known))
        if (hour := complete_through_all([view.complete_through for view in known])) is not None:
            through.add_metric((group,), end_of(hour).timestamp())
    yield from (through, seconds)


def _maintenance_metrics(maintained: Mapping[str, Maintenance], now: datetime) -> Iterator[Metric]:
    last = {name: m.last for name, m in maintained.items() if m.last is not None}
    complete = {name: m.complete for name, m in maintained.items() if m.complete is not None}
    at: dict[str, Values] = {name: {(): run.ended.timestamp()} for name, run in complete.items()}
    yield _gauge("maintained_timestamp_seconds", "Time of the last maintenance run that completed all steps.", (), at)
    failed: dict[str, Values] = {name: {(): not run.is_complete} for name, run in last.items()}
    yield _gauge("maintenance_failed", "Whether a step of the last run failed.", (), failed)
    seconds: dict[str, Values] = {name: {(s,): n for s, n in run.seconds.items()} for name, run in last.items()}
    yield _gauge("maintenance_seconds", "Duration of the last run, by step.", ("step",), seconds)
    hours: dict[str, Values] = {name: {(): run.speed_hours} for name, run in last.items()}
    yield _gauge("maintenance_dropped_hours", "Hours that the last run dropped from the speed branch.", (), hours)
    for key, text, of_run in _OF_LAST_RUN:
        done: dict[str, Values] = {
            name: {(table,): of_run(t) for table, t in run.tables.items()} for name, run in last.items()
        }
        yield _gauge(f"maintenance_{key}", text, ("table",), done)
    for key, text, of_folder in _OF_FOLDERS:
        deleted: dict[str, Values] = {
            name: {(folder,): of_folder(f) for folder, f in run.folders.items()} for name, run in last.items()
        }
        yield _gauge(f"folder_{key}", text, ("folder",), deleted)
    for key, text, of_table in _OF_TABLES:
        grown: dict[str, Values] = {
            name: {(table,): of_table(t) for table, t in m.tables.items()} for name, m in maintained.items()
        }
        yield _gauge(f"table_{key}", text, ("table",), grown)
    known: dict[str, Values] = {
        name: {(t,): t in m.unread for t in (*m.tables, *m.unread)} for name, m in maintained.items()
    }
    yield _gauge("table_unread", "Whether the table could not be read, such as before `apply`.", ("table",), known)
    files: dict[str, Values] = {name: {(h,): n for h, n in m.speed_files.items()} for name, m in maintained.items()}
    text = f"Speed files in main by hour, for the {HOURS_SHOWN} hours with the most."
    yield _gauge("hour_speed_files", text, ("hour",), files)
    oldest: dict[str, Values] = {
        name: {(): (now - start_of(m.oldest_dead_letter)).total_seconds()}
        for name, m in maintained.items()
        if m.oldest_dead_letter is not None
    }
    yield _gauge("oldest_dead_letter_age_seconds", "Time since the first hour with dead letters began.", (), oldest)
    waits: dict[str, Values] = {
        name: {(): (now - m.letters_wait_since).total_seconds() if m.letters_wait_since is not None else 0}
        for name, m in maintained.items()
    }
    text = "Time that dead letters have been pending; 0 when none are."
    yield _gauge("dead_letters_wait_seconds", text, (), waits)


def _measured_metrics(measured: Mapping[str, Mapping[Layer, Measured]]) -> Iterator[Metric]:
    by_layer = [(name, layer, m) for name, layers in measured.items() for layer, m in layers.items()]
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
            counts = dict.fromkeys(known, 0) | {value: n for (of, value), n in m.counts.items() if of == key}
            for value, n in counts.items():
                counter.add_metric((stream, layer) if label is None else (stream, layer, value), n)
        yield counter
    cpu = CounterMetricFamily("anabranch_cpu_seconds", _CPU_TEXT, labels=("stream", "layer"))
    for stream, layer, m in by_layer:
        if (ms := m.counts.get((CPU, ""))) is not None:
            cpu.add_metric((stream, layer), ms / 1000)
    yield cpu


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    """Cumulative buckets, as Prometheus expects them."""
    within = accumulate(durations.counts.get(bound, 0) for bound in BOUNDS)
    return [(str(float(bound)).replace("inf", "+Inf"), n) for bound, n in zip(BOUNDS, within, strict=True)]


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


def _acceptance(view: StreamStatus) -> Values:
    hour, at = view.newest_accepted, view.accepted_at
    return {(): (at - end_of(hour)).total_seconds()} if hour is not None and at is not None else {}


def _served(view: StreamStatus) -> Values:
    served = list(view.hours.values())
    return {(layer,): served.count(layer) for layer in ("speed", "batch")}


def _unexplained(view: StreamStatus) -> Values:
    hours = view.unexplained.values()
    return {(kind,): sum(hour.get(kind, 0) for hour in hours) for kind in ("missing", "extra", "changed")}
