"""The places of an hour in its topic, for targets that hold records one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from anabranch.hours import Cut
from anabranch.protocol import ledger
from anabranch.protocol.state import load_state
from serving_layer.egress.hour import Hour
from serving_layer.egress.records import may_have_been_otherwise

if TYPE_CHECKING:
    import pyarrow as pa

    from anabranch.job import Job


def cut_of(job: Job, hour: Hour) -> tuple[Cut, bool]:
    """The hour's places, which never change, and whether it may have had other rows. Raises Refused when nothing
    says its cut any more."""
    lake, stream = job.lake, job.stream
    state = load_state(lake, stream.table)
    accepted = ledger.accepted(lake, stream.hours_table, state, hour.name)
    cut = accepted.cut if accepted is not None else Cut("", {})
    rows = ledger.history(lake, stream.hours_table, [hour.name], ledger.BULKY)
    waiting = [row for row in state.decisions if row.hour == hour.name]
    return cut, may_have_been_otherwise(hour, [*rows, *waiting])


def rows_of(batches: Iterable[pa.RecordBatch]) -> Iterator[Mapping[str, Any]]:
    """The rows of batches, one by one."""
    for batch in batches:
        yield from batch.to_pylist(maps_as_pydicts="strict")
