"""Recovery: whoever starts finishes what an earlier publisher, of either layer, left half done."""

from __future__ import annotations

from anabranch import dead_letters, ledger
from anabranch.config import Stream
from anabranch.lake import Lake
from anabranch.state import load_state
from serving_layer import merger


def recover(lake: Lake, stream: Stream) -> frozenset[str]:
    """Merge, publish the dead letters that a rows' publish named, and write the ledger rows that are missing.

    Returns the ids of what waited and is done now; the next publish drops them from its branches. Raises Transient.
    """
    merger.merge(lake, stream)
    state = load_state(lake, stream.table)
    published = dead_letters.roll_forward(lake, stream.dead_letters_table, state)
    return published | ledger.record_waiting(lake, stream.hours_table, state)
