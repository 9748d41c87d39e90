"""The places of an hour in its topic, for targets that store single records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from anabranch.job import Job
from anabranch.offsets.hours import Cut
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.state import load_state
from serving_layer.egress.hour import Hour
from serving_layer.egress.records import Identity


def cut_of(job: Job, hour: Hour) -> tuple[Cut, Identity]:
    """The hour's places, which never change, and the identity of their records. Raises Refused when
    its cut is no longer known."""
    lake, stream = job.lake, job.stream
    state = load_state(lake, stream.table)
    accepted = Ledger(lake, stream.hours_table).accepted(state, hour.name)
    cut = accepted.cut if accepted is not None else Cut("", {})
    return cut, Identity(cut.topic_id, state.timeline.replaced_before(hour.name, cut.topic_id))


def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[Mapping[str, Any]]:
    """The rows of batches, one by one."""
    for batch in batches:
        yield from batch.to_pylist(maps_as_pydicts="strict")
