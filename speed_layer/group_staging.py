"""Stage micro-batches of many streams in one Spark job: each worker splits its records by topic.

One job reads all topics, so that Spark plans and schedules once for any number of streams. Files
and errors are per stream: a failure of one stream does not affect the others' files.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from anabranch.common.errors import Transient, Unexpected
from anabranch.records import INPUT
from anabranch.records.staged import (
    REPORT,
    Certain,
    CertainTask,
    TaskReport,
    TaskSpec,
    certain_from,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from speed_layer.micro_batch import PreparedBatch

_REPORT = f"topic STRING, {REPORT}, error STRING"
_REPORT_SCHEMA = pa.schema(
    [("topic", pa.string()), ("report", pa.binary()), ("error", pa.string())]
)
_LONGEST_ERROR = 2_000


def stage_group(
    frame: DataFrame, prepared: Mapping[str, PreparedBatch]
) -> dict[str, Certain | Exception]:
    """Write the records of `frame` (Kafka's columns) in tasks, by topic. Readers do not see them.

    `prepared` has an entry for each topic of the frame. Returns by topic the files, or the error
    that a worker raised for that topic. Raises Spark's errors, which affect all topics.
    """
    parts = {topic: one.spec for topic, one in prepared.items()}
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
            done = [TaskReport.of(bytes(row.report)) for row in rows]
            staged[topic] = certain_from(done, one.tables, one.attempt, one.began)
        except Unexpected as failure:
            staged[topic] = failure
    return staged


def runs_of(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Split a batch into slices of one topic each, in order, without copies."""
    start = 0
    topic = pc.run_end_encode(batch.column("topic"))
    for end, name in zip(topic.run_ends.to_pylist(), topic.values.to_pylist(), strict=True):
        yield name, batch.slice(start, end - start)
        start = end


@dataclass
class _Topic:
    """A task's records of one topic: their writer, and its report or error."""

    task: CertainTask
    report: TaskReport = field(default_factory=TaskReport)
    error: str | None = None

    def end(self) -> None:
        self.report = self.task.end()


def _task(parts: Mapping[str, TaskSpec]) -> Callable[..., Iterable[pa.RecordBatch]]:

    def run(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        topics: dict[str, _Topic] = {}
        for batch in batches:
            for topic, piece in runs_of(batch):
                if (one := topics.get(topic)) is None:
                    one = topics[topic] = _Topic(CertainTask(parts[topic]))
                _attempt(one, partial(one.task.read, piece.drop_columns(["topic"])))
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


def _rows(topics: Mapping[str, _Topic]) -> Iterator[dict[str, object]]:
    for topic, one in topics.items():
        if one.error is not None:
            yield {"topic": topic, "error": one.error}
        else:
            yield {"topic": topic, "report": one.report.as_bytes()}
