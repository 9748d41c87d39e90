"""The ingest hour of a record, by its partition and offset."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from anabranch.offsets.hours import HourRange


def assign_hours(batch: pa.RecordBatch, hours: Sequence[HourRange]) -> pa.RecordBatch:
    """Return the batch with `ingest_hour`: the first of `hours` (oldest first, `check_hours`) whose
    end for the record's partition is above its offset.

    A partition that an hour's `ends` lacks was added later and has no record in that hour. The hour
    with `ends=None` comes last and takes the rest. Without it, a record outside all hours raises
    ValueError. Pure.
    """
    names = [entry.hour for entry in hours]
    closed = [entry.ends for entry in hours if entry.ends is not None]
    partitions, offsets = (batch.column(name).to_numpy() for name in ("partition", "offset"))
    places = np.zeros(len(batch), np.int64)
    for p in np.unique(partitions):
        of = partitions == p
        # An offset's hour is the first whose end is above it. Its index is the number of ends at or
        # below the offset: ends never decrease.
        ends = np.asarray([entry.get(int(p), 0) for entry in closed], np.int64)
        places[of] = np.searchsorted(ends, offsets[of], side="right")
    # An offset after the last decided hour has no hour, and must not get the last one: it would be
    # in another hour than in the batch layer's cut.
    if len(places) and places.max() >= len(names):
        at = int(places.argmax())
        raise ValueError(
            f"partition {partitions[at]}, offset {offsets[at]}: expected an offset of the hours "
            f"{names[0]} to {names[-1]}"
        )
    return batch.append_column("ingest_hour", pa.array(names).take(pa.array(places)))


def check_hours(hours: Sequence[HourRange]) -> tuple[HourRange, ...]:
    """Return the hours. Raises ValueError for none, or hours that contradict each other."""
    if not hours:
        raise ValueError("hours: expected at least one, found none")
    known: dict[int, int] = {}
    previous = ""
    for i, entry in enumerate(hours):
        if entry.hour <= previous:
            raise ValueError(f"hours: expected oldest first, found {entry.hour} after {previous}")
        if entry.ends is None:
            if i != len(hours) - 1:
                raise ValueError(f"hours: expected only the last without ends, found {entry.hour}")
            continue
        for partition, end in known.items():
            if entry.ends.get(partition, -1) < end:
                raise ValueError(
                    f"hours: {entry.hour}: expected an end of at least {end} for partition "
                    f"{partition}, found {entry.ends.get(partition)}"
                )
        known |= entry.ends
        previous = entry.hour
    return tuple(hours)
