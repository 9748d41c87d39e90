"""Stage micro-batches of many streams in one Spark job: each worker splits its records by topic.

One job reads all topics, so that Spark plans and schedules once for any number of streams. Files
and errors are per stream: a failure of one stream does not affect the others' files.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.common.errors import Transient, Unexpected
from anabranch.records import INPUT
from speed_layer.fast_staging import (
    REPORT,
    REPORT_SCHEMA,
    Certain,
    CertainTask,
    TaskSpec,
    certain_from,
)

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyspark.sql import DataFrame

    from anabranch.offsets.hours import HourRange
    from speed_layer.micro_batch import PreparedBatch

_REPORT = f"topic STRING, {REPORT}, error STRING"
_REPORT_SCHEMA = pa.schema([("topic", pa.string()), *REPORT_SCHEMA, ("error", pa.string())])
_LONGEST_ERROR = 2_000


def stage_group(
    frame: DataFrame, prepared: Mapping[str, PreparedBatch]
) -> dict[str, Certain | Exception]:
    """Write the good records of `frame` (Kafka's columns) in tasks, by topic. Readers do not see
    the rows.

    `prepared` has an entry for each topic of the frame. Returns by topic the files and the records
    left, or the error that a worker raised for that topic. Raises Spark's errors, which affect all
    topics.
    """
    parts = {topic: (one.spec, tuple(one.plan.hours)) for topic, one in prepared.items()}
    columns = frame.selectExpr("topic", *INPUT)
    reports = columns.mapInArrow(_task(parts), _REPORT).collect()
    by_topic: dict[str, list[Any]] = {topic: [] for topic in prepared}
    for row in reports:
        by_topic[row.topic].append(row)
    staged: dict[str, Certain | Exception] = {}
    for topic, rows in by_topic.items():
        one = prepared[topic]
        # One failed task of a topic: its other tasks' files lack records, so none of them is
        # published.
        if (error := next((row.error for row in rows if row.error), None)) is not None:
            staged[topic] = Transient(
                f"stage {one.attempt}: a worker failed with records of topic {topic}: {error}"
            )
            continue
        try:
            staged[topic] = certain_from(rows, one.decided.state.table, one.attempt, one.began)
        except Unexpected as failure:
            staged[topic] = failure
    return staged


def hours_of(partition: int, offsets: pa.Array, hours: Sequence[HourRange]) -> pa.Array:
    """Return the ingest hour of each offset of a partition, as `anabranch.records.assign_hours`
    assigns it. Pure. Raises ValueError for an offset after the last of `hours`, and for ends that
    decrease."""
    closed = [entry for entry in hours if entry.ends is not None]
    if not closed:
        return pa.repeat(hours[-1].hour, len(offsets))
    ends = [entry.ends.get(partition, 0) for entry in closed if entry.ends is not None]
    names = [entry.hour for entry in hours]
    # In hours that contradict each other, the search below would find one of several hours.
    for hour, end, previous in zip(names[1:], ends[1:], ends, strict=False):
        if end < previous:
            raise ValueError(
                f"hours: {hour}: expected an end of at least {previous} for partition {partition}, "
                f"found {end}"
            )
    # An offset's hour is the first whose end is above it. Its index is the number of ends at or
    # below the offset.
    places = np.searchsorted(np.asarray(ends), offsets.to_numpy(), side="right")
    # An offset after the last decided hour has no hour, and must not get the last one.
    if len(places) and places.max() >= len(names):
        at = offsets[int(places.argmax())].as_py()
        raise ValueError(
            f"partition {partition}, offset {at}: expected an offset of the hours {names[0]} to "
            f"{names[-1]}"
        )
    return pa.array(names).take(pa.array(places))


def runs_of(batch: pa.RecordBatch) -> Iterator[tuple[str, int, pa.RecordBatch]]:
    """Split a batch into slices of one topic and partition each, in order, without copies."""
    if not len(batch):
        return
    topic = pc.run_end_encode(batch.column("topic"))
    partition = pc.run_end_encode(batch.column("partition"))
    ends = sorted({*topic.run_ends.to_pylist(), *partition.run_ends.to_pylist()})
    start = 0
    for end in ends:
        piece = batch.slice(start, end - start)
        yield piece.column("topic")[0].as_py(), piece.column("partition")[0].as_py(), piece
        start = end


@dataclass
class _Topic:
    """A task's records of one topic: their writer, and its report or error."""

    task: CertainTask
    hours: tuple[HourRange, ...]
    report: list[dict[str, object]] = field(default_factory=list)
    error: str | None = None

    def read(self, partition: int, batch: pa.RecordBatch) -> None:
        hour = hours_of(partition, batch.column("offset"), self.hours)
        self.task.read(batch.drop_columns(["topic"]).append_column("ingest_hour", hour))

    def end(self) -> None:
        self.report = self.task.end()


def _task(
    parts: Mapping[str, tuple[TaskSpec, tuple[HourRange, ...]]],
) -> Callable[..., Iterable[pa.RecordBatch]]:

    def run(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        topics: dict[str, _Topic] = {}
        shared: list[FileIO] = []
        for batch in batches:
            for topic, partition, piece in runs_of(batch):
                if (one := topics.get(topic)) is None:
                    spec, hours = parts[topic]
                    target = replace(spec.target, io=_shared(spec.target.io, shared))
                    one = topics[topic] = _Topic(CertainTask(replace(spec, target=target)), hours)
                _attempt(one, partial(one.read, partition, piece))
        for one in topics.values():
            _attempt(one, one.end)
        yield pa.RecordBatch.from_pylist(list(_rows(topics)), schema=_REPORT_SCHEMA)

    return run


def _attempt(one: _Topic, step: Callable[[], None]) -> None:
    """Run a step of one topic. Keep its error for the report, so that the other topics continue."""
    if one.error is None:
        try:
            step()
        except Exception:
            one.error = traceback.format_exc()[-_LONGEST_ERROR:]


def _shared(io: FileIO, known: list[FileIO]) -> FileIO:
    """Return an equal `io` that another topic uses already, else `io`: opening a connection takes
    longer than writing a small file."""
    same = next(
        (other for other in known if type(other) is type(io) and other.properties == io.properties),
        None,
    )
    if same is None:
        known.append(io)
    return same or io


def _rows(topics: Mapping[str, _Topic]) -> Iterator[dict[str, object]]:
    for topic, one in topics.items():
        if one.error is not None:
            yield {"topic": topic, "error": one.error}
        else:
            yield from (row | {"topic": topic} for row in one.report)
