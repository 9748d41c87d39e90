"""The choice of Java's compilers for a batch job, by the number of waiting offsets."""

from __future__ import annotations

from collections.abc import Collection

from anabranch.common.deadline import KAFKA, LAKE, Note
from anabranch.common.errors import AnabranchError
from anabranch.job import Job
from anabranch.offsets.hours import hours_between, shift
from anabranch.offsets.position import ranges_between, size
from anabranch.protocol.state import load_state
from anabranch.spark.java import FIRST_COMPILER
from batch_layer.plan import waiting_hours

# Above these numbers of offsets the second compiler saves more time than it takes
# (decision 61).
_MOST_BY_SPARK = 500_000
_MOST_BY_WORKERS = 2_000_000


def java_options(shares: Collection[float | AnabranchError]) -> str:
    """Return options of the driver's Java, from its streams' shares (`share_of`) or the errors in
    reading them. Pure."""
    known = [share for share in shares if not isinstance(share, AnabranchError)]
    return FIRST_COMPILER if len(known) == len(shares) and sum(known) <= 1 else ""


def share_of(job: Job, note: Note, span: tuple[str, str] | None) -> float:
    """Return the most offsets that a job has to read, in the hours of `span` or in all waiting ones
    including the open hour, as a share of the number from which the second compiler pays. Raises
    Transient if Kafka or the lake is unreachable, Refused for an accepted hour that the ledger does
    not have."""
    note(LAKE)
    state = load_state(job.lake, job.stream.table)
    chosen = waiting_hours(state) if span is None else hours_between(span[0], shift(span[1], 1))
    cuts = job.ledger.remembering(state, chosen).cuts
    offsets = sum(cuts[h].offsets for h in chosen if h in cuts)
    if span is None or span[1] >= state.timeline.open:
        note(KAFKA)
        topic = job.kafka.describe(job.stream.topic)
        ends = job.kafka.stable_ends(topic) if topic is not None else {}
        offsets += size(ranges_between(state.timeline.start, ends))
    return offsets / (_MOST_BY_WORKERS if job.stream.archive is None else _MOST_BY_SPARK)
