"""Lineage: the ledger's decisions as runs of OpenLineage, one for each hour that was accepted or
refused; and the scheduler's run that started one, as OpenLineage's clients write it:
NAMESPACE/JOB/RUN ID.
"""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID


class ParentRun(NamedTuple):
    namespace: str
    job: str
    run_id: str


def parse_run(text: str) -> ParentRun:
    """Parse NAMESPACE/JOB/RUN ID; a namespace may contain slashes. Raises ValueError."""
    parts = text.rsplit("/", 2)
    try:
        run = ParentRun(parts[0], parts[1], str(UUID(parts[2])))
    except (IndexError, ValueError):
        run = ParentRun("", "", "")
    if not (run.namespace and run.job):
        raise ValueError(f"expected NAMESPACE/JOB/RUN ID, the id a UUID, found {text!r}")
    return run
