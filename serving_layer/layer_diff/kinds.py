"""The difference between the two layers for one hour: row by row on (partition, offset), by a hash
of the content.

`KIND` defines the kind of a row once, in SQL that both Spark and DuckDB read: the batch job
compares in Spark, `anabranch explain --rows` in DuckDB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anabranch.protocol.ledger_row import Diff

SAMPLE = 5

# Columns: `speed` and `batch` (hash of the content, null without a row), `removed` (batch dropped
# the record as a duplicate) and `unread` (the speed layer's rows do not account for the offset).
KIND = """CASE
    WHEN speed IS NULL AND unread THEN 'unread'
    WHEN speed IS NULL THEN 'missing'
    WHEN batch IS NULL AND coalesce(removed, false) THEN 'duplicate'
    WHEN batch IS NULL THEN 'extra'
    WHEN speed <> batch THEN 'changed'
    ELSE 'same'
END"""
# The kinds in samples, in their order: unexplained kinds first.
SHOWN = ("changed", "extra", "missing", "unread")

# Classes of gaps: offsets that Kafka once had and the batch layer could no longer read.
_GONE = ("compacted", "retention")


@dataclass(frozen=True)
class Difference:
    """The number of speed's rows, and their difference from batch."""

    speed_rows: int
    diff: Diff


def to_difference(counts: Mapping[str, int], sample: Sequence[dict[str, Any]]) -> Difference:
    """Return the difference, from the number of rows of each `KIND`. Pure."""
    of = {
        kind: counts.get(kind, 0)
        for kind in ("missing", "unread", "extra", "changed", "duplicate", "same")
    }
    speed_rows = of["extra"] + of["changed"] + of["duplicate"] + of["same"]
    diff = Diff(
        missing=of["missing"] + of["unread"],
        extra=of["extra"],
        changed=of["changed"],
        duplicate=of["duplicate"],
        unread=of["unread"],
        sample=tuple(sample),
    )
    return Difference(speed_rows, diff)


def unexplained_counts(
    diff: Diff | None, gaps: Mapping[str, int] | None, covered: bool
) -> dict[str, int]:
    """Return the unexplained counts of a ledger's `diff`, by kind; empty if all are explained.
    Pure. Duplicates that batch removed are not a difference. Missing rows are explained by offsets
    that the speed layer had not read at the time. For a ledger row without that count, `covered`
    decides: whether the speed layer's rows account for the whole hour now. Extra rows are explained
    by offsets that Kafka no longer had for the batch layer. Changed content is never explained."""
    if diff is None:
        return {}
    unread = diff.unread
    if unread is None:
        unread = 0 if covered else diff.missing
    gone = sum((gaps or {}).get(name, 0) for name in _GONE)
    left = {"missing": diff.missing - unread, "extra": diff.extra - gone, "changed": diff.changed}
    return {kind: n for kind, n in left.items() if n > 0}
