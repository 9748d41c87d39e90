"""Prometheus metrics of the streams' readings: `ALWAYS`, `GROUPS` and `READ` are all of them.

Ages are as of the reading, not of the scrape: nothing is known about the time in between, and a
freshness that grew meanwhile would break a promise of a few seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Generic, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from anabranch.common.counters import COMMITS, CPU, REFUSED, RETRIES, S3_BYTES, S3_REQUESTS
from anabranch.common.output import text as text_of
from anabranch.common.remote_errors import SERVICES
from anabranch.config import Slo
from anabranch.job import groups_of
from anabranch.offsets.hours import end_of
from anabranch.offsets.position import Offsets
from anabranch.operations.reports import status
from anabranch.operations.reports.maintenance import HOURS_SHOWN, NEWEST_HOURS, TableGrowth
from anabranch.operations.reports.reading import Readings
from anabranch.protocol.measured import BOUNDS, COMMIT, PUBLISH, READABLE, STAGE, Durations
from anabranch.protocol.watermarks import complete_through_all

NAMES = 20
"""Maximum number of unknown fields of a stream that have their own metric."""

T = TypeVar("T")
Family = type[GaugeMetricFamily] | type[CounterMetricFamily] | type[HistogramMetricFamily]
Values = Mapping[tuple[str, ...], float | Durations]
"""One stream's or group's values, by the other labels."""


@dataclass(frozen=True)
class ScrapedStream:
    """A stream at a scrape: its promised times, the time of its newest reading, and that reading if
    none is overdue or failed since."""

    slo: Slo
    group: str | None
    as_of: datetime | None
    readings: Readings | None


@dataclass(frozen=True)
class Row(Generic[T]):
    """A metric without its prefix `anabranch_`. `value`: one, or by `labels`; None: no sample."""

    name: str
    text: str
    value: Callable[[T], Values | float | None]
    labels: tuple[str, ...] = ()
    family: Family = GaugeMetricFamily


def metrics_of(streams: Mapping[str, ScrapedStream]) -> Iterator[Metric]:
    """Yield all metrics; of a stream without readings only `ALWAYS`, and no group. Pure."""
    read = {name: one.readings for name, one in streams.items() if one.readings is not None}
    groups = {
        group: [read[name] for name in names]
        for group, names in groups_of({name: one.group for name, one in streams.items()}).items()
        if read.keys() >= {*names}
    }
    yield from (_family(row, "stream", streams) for row in ALWAYS)
    yield from (_family(row, "group", groups) for row in GROUPS)
    yield from (_family(row, "stream", read) for row in READ)


def _family(row: Row[T], label: str, items: Mapping[str, T]) -> Metric:
    family = row.family(f"anabranch_{row.name}", row.text, labels=(label, *row.labels))
    add: Callable[..., None] = family.add_metric
    for name, item in items.items():
        found = row.value(item)
        values: Values = (
            found if isinstance(found, Mapping) else {} if found is None else {(): found}
        )
        for labels, value in values.items():
            if isinstance(value, Durations):
                add((name, *labels), _buckets(value), value.sum)
            else:
                add((name, *labels), float(value))
    return family


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    """Return cumulative buckets, as Prometheus expects them."""
    within = accumulate(durations.counts.get(bound, 0) for bound in BOUNDS)
    return [
        (str(float(bound)).replace("inf", "+Inf"), n)
        for bound, n in zip(BOUNDS, within, strict=True)
    ]


def _seconds(span: timedelta | None) -> float | None:
    return span.total_seconds() if span is not None else None


def _timestamp(at: datetime | None) -> float | None:
    return at.timestamp() if at is not None else None


def _age(r: Readings, at: datetime | None) -> float | None:
    return max(0.0, (r.at - at).total_seconds()) if at is not None else None


def _by_partition(offsets: Offsets) -> Values:
    return {(str(partition),): offset for partition, offset in offsets.items()}


def _complete_through(members: Sequence[Readings]) -> float | None:
    hour = complete_through_all([r.status.complete_through for r in members])
    return end_of(hour).timestamp() if hour is not None else None


def _last_publish(r: Readings) -> Values:
    return {
        (branch,): at.timestamp() for branch, at in r.status.last_publish.items() if at is not None
    }


def _acceptance(r: Readings) -> float | None:
    hour, at = r.status.newest_accepted, r.status.accepted_at
    return (at - end_of(hour)).total_seconds() if hour is not None and at is not None else None


def _served(r: Readings) -> Values:
    served = list(r.status.hours.values())
    return {(layer,): served.count(layer) for layer in ("speed", "batch")}


def _unexplained(r: Readings) -> Values:
    hours = r.status.unexplained.values()
    return {
        (kind,): sum(hour.get(kind, 0) for hour in hours)
        for kind in ("missing", "extra", "changed")
    }


def _unknown_fields(r: Readings) -> Values:
    fields = r.status.unknown.fields[:NAMES] if r.status.unknown is not None else ()
    return {(text_of(field.name),): field.records for field in fields}


def _dead_ratio(r: Readings) -> float | None:
    share = r.status.running_dead_share
    return share.share if share is not None else None


def _hour_dead_letters(r: Readings) -> Values:
    return {
        (hour, reason): n
        for hour, of_hour in r.content.dead_letters.items()
        for reason, n in of_hour.items()
    }


def _durations(key: str) -> Callable[[Readings], Values]:
    return lambda r: {
        (layer,): measured.durations[key]
        for layer, measured in r.content.measured.items()
        if key in measured.durations
    }


def _counts(key: str, *known: str, of_one: int = 1) -> Callable[[Readings], Values]:
    """Return the counts by layer and label, `of_one` of them as one. Those of `known` labels begin
    at 0, because PromQL's increase() does not see a counter's first value."""

    def by_layer(r: Readings) -> Values:
        found: dict[tuple[str, ...], float] = {}
        for layer, measured in r.content.measured.items():
            counts = {label: n for (name, label), n in measured.counts.items() if name == key}
            for label, n in (dict.fromkeys(known, 0) | counts).items():
                found[(layer, label) if label else (layer,)] = n / of_one
        return found

    return by_layer


def _table(value: Callable[[TableGrowth], int]) -> Callable[[Readings], Values]:
    return lambda r: {(name,): value(of) for name, of in r.maintenance.tables.items()}


def _unread(r: Readings) -> Values:
    unread = r.maintenance.unread
    return {(name,): name in unread for name in (*r.maintenance.tables, *unread)}


ALWAYS: tuple[Row[ScrapedStream], ...] = (
    Row(
        "up",
        "Whether the newest reading of the stream's table and topic succeeded in time.",
        lambda s: s.readings is not None,
    ),
    Row(
        "answered_timestamp_seconds",
        "Time of the newest reading that succeeded.",
        lambda s: _timestamp(s.as_of),
    ),
    Row(
        "slo_fresh_seconds",
        "Promised time until main has a record that Kafka acknowledged: slo.fresh.",
        lambda s: _seconds(s.slo.fresh),
    ),
    Row(
        "slo_complete_seconds",
        "Promised time from an hour's end until it and all earlier ones are accepted.",
        lambda s: _seconds(s.slo.complete),
    ),
)
"""Metrics of every stream."""

GROUPS: tuple[Row[Sequence[Readings]], ...] = (
    Row(
        "group_complete_through_timestamp_seconds",
        "End of the last hour that is accepted, with all earlier ones, in every stream.",
        _complete_through,
    ),
    Row(
        "group_completeness_seconds",
        "Time since the end of the oldest hour that is not complete in every stream.",
        lambda members: max(status.completeness_seconds(r.status, r.at) for r in members),
    ),
)
"""Metrics of a group whose streams were all read."""

_LAYER = ("layer",)
_TABLE = ("table",)
READ: tuple[Row[Readings], ...] = (
    Row(
        "position_offsets",
        "The next offset that the speed layer will publish.",
        lambda r: _by_partition(r.status.position),
        ("partition",),
    ),
    Row(
        "lag_offsets",
        "Offsets that main lacks.",
        lambda r: _by_partition(r.status.lag.partitions),
        ("partition",),
    ),
    Row(
        "last_publish_timestamp_seconds",
        "Time of the last publish to a branch.",
        _last_publish,
        ("branch",),
    ),
    Row(
        "position_age_seconds",
        "Time since the speed layer's position moved last; absent if only batch jobs run.",
        lambda r: None if r.status.is_batch_only else _age(r, r.status.position_since),
    ),
    Row(
        "freshness_seconds",
        "Age of the oldest acknowledged record that main lacks; 0 when it lacks none.",
        lambda r: status.freshness_seconds(r.status, r.at),
    ),
    Row(
        "completeness_seconds",
        "Time since the end of the oldest hour that is not complete; 0 before its end.",
        lambda r: status.completeness_seconds(r.status, r.at),
    ),
    Row(
        "acceptance_seconds",
        "Time from the end of the newest accepted hour until its first acceptance.",
        _acceptance,
    ),
    Row("hours_to_seal", "Ended hours that are not sealed.", lambda r: len(r.status.to_seal)),
    Row("hours_waiting", "Sealed hours that are not accepted.", lambda r: len(r.status.backlog)),
    Row("hours_refused", "Refused hours, not accepted since.", lambda r: len(r.status.refused)),
    Row(
        "restatements_refused",
        "Accepted hours whose newest restatement was refused.",
        lambda r: len(r.status.refused_restatements),
    ),
    Row(
        "hours_served",
        "Sealed hours that the table lists individually, by serving layer.",
        _served,
        _LAYER,
    ),
    Row(
        "overdue_hours",
        "Hours a day or more beyond keep.rows, without those that an operator keeps.",
        lambda r: r.status.overdue.hours if r.status.overdue is not None else 0,
    ),
    Row(
        "topic_recreated",
        "Whether jobs refuse to read the topic: recreated, missing, or its log lost its end.",
        lambda r: r.status.unreadable is not None,
    ),
    Row(
        "retention_seconds",
        "Retention time of the topic; absent when unlimited.",
        lambda r: _seconds(r.status.retention),
    ),
    Row("dead_letters", "Dead letters in main.", lambda r: r.status.dead_letters),
    Row(
        "dead_letters_ratio",
        "Share of dead letters, 0 to 1, in the newest hour with records that is not accepted.",
        _dead_ratio,
    ),
    Row(
        "hours_with_too_many_dead_letters",
        "Hours that are not accepted and have more dead letters than quality.max_dead.",
        lambda r: len(r.status.too_many_dead),
    ),
    Row(
        "conflicts",
        "Duplicates with other content, of the newest accepted hour and those not accepted.",
        lambda r: sum(r.status.conflicts.values()),
    ),
    Row(
        "lost_offsets",
        "Offsets that retention deleted unread.",
        lambda r: sum(r.status.lost.values()),
    ),
    Row(
        "difference_unexplained_rows",
        "Rows with an unexplained difference between the layers.",
        _unexplained,
        ("kind",),
    ),
    Row(
        "unknown_fields",
        f"Records of the newest accepted hour with an unknown field, the {NAMES} most frequent.",
        _unknown_fields,
        ("name",),
    ),
    Row(
        "rows",
        "Rows in main, by the layer that wrote them.",
        lambda r: {(layer,): n for layer, n in r.maintenance.rows.items()},
        _LAYER,
    ),
    Row(
        "hour_dead_letters",
        f"Dead letters in main of the {NEWEST_HOURS} newest hours, by reason.",
        _hour_dead_letters,
        ("hour", "reason"),
    ),
    Row(
        "maintained_timestamp_seconds",
        "Time of the last maintenance run that completed all steps.",
        lambda r: _timestamp(run.ended) if (run := r.maintenance.complete) is not None else None,
    ),
    Row(
        "maintenance_failed",
        "Whether a step of the last run failed.",
        lambda r: not run.is_complete if (run := r.maintenance.last) is not None else None,
    ),
    Row(
        "maintenance_spared_files",
        "Unreferenced files that the last run kept for their age.",
        lambda r: {(name,): size.files for name, size in r.maintenance.spared.items()},
        _TABLE,
    ),
    Row(
        "table_metadata_bytes",
        "Size of the table's current metadata file in bytes.",
        _table(lambda t: t.metadata_bytes),
        _TABLE,
    ),
    Row("table_snapshots", "Snapshots of the table.", _table(lambda t: t.snapshots), _TABLE),
    Row(
        "table_expirable_snapshots",
        "Snapshots and tags that the next maintenance expires.",
        _table(lambda t: t.expirable),
        _TABLE,
    ),
    Row(
        "table_unread",
        "Whether the table could not be read, such as before `apply`.",
        _unread,
        _TABLE,
    ),
    Row(
        "hour_speed_files",
        f"Speed files in main by hour, for the {HOURS_SHOWN} hours with the most.",
        lambda r: {(hour,): n for hour, n in r.maintenance.speed_files.items()},
        ("hour",),
    ),
    Row(
        "dead_letters_wait_seconds",
        "Time that dead letters have been pending; 0 when none are.",
        lambda r: _age(r, r.maintenance.letters_wait_since) or 0.0,
    ),
    Row(
        "readable_after_seconds",
        "Time from a micro-batch's oldest record to the commit that made it readable.",
        _durations(READABLE),
        _LAYER,
        HistogramMetricFamily,
    ),
    Row(
        "stage_seconds",
        "Time to stage a micro-batch (speed), or to read, stage and check an hour (batch).",
        _durations(STAGE),
        _LAYER,
        HistogramMetricFamily,
    ),
    Row(
        "publish_seconds",
        "Time from staged rows to their commit, with the publish queue and refused commits.",
        _durations(PUBLISH),
        _LAYER,
        HistogramMetricFamily,
    ),
    Row(
        "commit_seconds",
        "Time of a publish's commit, without the last publish of a job that ended.",
        _durations(COMMIT),
        _LAYER,
        HistogramMetricFamily,
    ),
    Row(
        "retries",
        "Retried failures of jobs, by the service that failed.",
        _counts(RETRIES, *SERVICES),
        ("layer", "service"),
        CounterMetricFamily,
    ),
    Row(
        "refused_publishes",
        "Publishes that were planned again because another commit landed first.",
        _counts(REFUSED, ""),
        _LAYER,
        CounterMetricFamily,
    ),
    Row(
        "commits",
        "Commits of jobs to the stream's tables.",
        _counts(COMMITS, ""),
        _LAYER,
        CounterMetricFamily,
    ),
    Row(
        "s3_bytes",
        "Bytes that jobs read from S3 and wrote to it, without reads of Spark's JVM.",
        _counts(S3_BYTES, "read", "written"),
        ("layer", "direction"),
        CounterMetricFamily,
    ),
    Row(
        "s3_requests",
        "S3 requests of the jobs' Python, without those of Spark's JVM.",
        _counts(S3_REQUESTS),
        ("layer", "operation"),
        CounterMetricFamily,
    ),
    Row(
        "cpu_seconds",
        "CPU time of jobs of one stream on their own machine, without executors on others.",
        _counts(CPU, of_one=1000),
        _LAYER,
        CounterMetricFamily,
    ),
)
"""Metrics of a stream whose newest reading succeeded in time."""
