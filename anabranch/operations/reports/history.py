"""The history of hours: each decision, its changes, and how to read the replaced revision."""

from __future__ import annotations

from anabranch.job import Job
from anabranch.protocol.decisions import DecisionFacts, decisions


def history(job: Job, hour: str | None) -> list[DecisionFacts]:
    """Every decision about one hour or all, by hour, oldest first, with its changes and how to read
    the replaced revision. Raises Transient when the lake is unreachable."""
    return decisions(job.lake, job.stream, hour)
