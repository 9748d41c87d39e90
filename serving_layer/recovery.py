"""Recovery: whoever starts finishes what an earlier publisher, of either layer, left half done."""

from __future__ import annotations

from anabranch.config import Stream
from anabranch.protocol import dead_letters, ledger
from anabranch.protocol.state import load_state
from anabranch.table.lake import Lake
from serving_layer import merge


def recover(lake: Lake, stream: Stream) -> frozenset[str]:
    """Merge, publish the dead letters that a rows' publish named, and write the ledger rows that are missing.

    Returns the ids of what waited and is done now; the next publish drops them from its branches. Raises Transient.
    """
    merge.merge(lake, stream)
    state = load_state(lake, stream.table)
    published = dead_letters.roll_forward(lake, stream.dead_letters_table, state)
    return published | ledger.record_waiting(lake, stream.hours_table, state)
