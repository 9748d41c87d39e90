"""The choice of Java's compilers for a batch job, by the number of waiting offsets."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from anabranch.common.errors import AnabranchError
from anabranch.job import Job
from anabranch.kafka.client import KafkaAdapter
from anabranch.offsets.hours import hours_between, shift
from anabranch.offsets.position import ranges_between, size
from anabranch.protocol.state import load_state
from anabranch.spark.java import FIRST_COMPILER
from batch_layer.plan import waiting_hours

# Above these numbers of offsets the second compiler saves more time than it takes
# (decision 61).
_MOST_BY_SPARK = 500_000
_MOST_BY_WORKERS = 2_000_000


def java_options(jobs: Iterable[Job], kafka: KafkaAdapter, span: tuple[str, str] | None) -> str:
    """Return options of the driver's Java for the offsets that the jobs' streams have to read;
    empty if one does not answer. The job itself reports errors. `kafka` is not shared with other
    threads, which may use the jobs' own clients meanwhile."""
    shares = accumulate(share_of(job, kafka, span) for job in jobs)
    try:
        return FIRST_COMPILER if all(share <= 1 for share in shares) else ""
    except AnabranchError:
        return ""


def share_of(job: Job, kafka: KafkaAdapter, span: tuple[str, str] | None) -> float:
    """Return the most offsets that a job has to read, in the hours of `span` or in all waiting ones
    including the open hour, as a share of the number from which the second compiler pays. Raises
    Transient if Kafka or the lake is unreachable, Refused for an accepted hour that the ledger does
    not have."""
    state = load_state(job.lake, job.stream.table)
    chosen = waiting_hours(state) if span is None else hours_between(span[0], shift(span[1], 1))
    cuts = job.ledger.remembering(state, chosen).cuts
    offsets = sum(cuts[h].offsets for h in chosen if h in cuts)
    if span is None or span[1] >= state.timeline.open:
        topic = kafka.describe(job.stream.topic)
        ends = kafka.stable_ends(topic) if topic is not None else {}
        offsets += size(ranges_between(state.timeline.start, ends))
    return offsets / (_MOST_BY_WORKERS if job.stream.archive is None else _MOST_BY_SPARK)
