"""Which of Java's compilers a batch job uses, by how many offsets wait for it."""

from __future__ import annotations

from collections.abc import Iterable

from anabranch.common.deadline import Note
from anabranch.job import Job
from anabranch.offsets.hours import hours_between, shift
from anabranch.operations.reports.status import KAFKA, LAKE
from anabranch.protocol.state import State, load_state

FIRST_COMPILER = ["-XX:TieredStopAtLevel=1", "-XX:ReservedCodeCacheSize=240m"]
"""Options of a Java that lives for a minute: its second compiler takes more CPU time than it saves. Without the size,
the first one has 48 MB for its code, which Spark fills, and the JVM compiles evicted code again."""

# From so many offsets on, the second compiler saves more than it takes, as measured:
# docs/decisions/0061-first-compiler-for-few-offsets.md
_MOST_BY_SPARK = 500_000
_MOST_BY_WORKERS = 2_000_000


def java_options(shares: Iterable[float | None]) -> list[str]:
    """Options of the driver's Java by its streams' shares (`share_of`), None where one is unknown. Pure."""
    known = list(shares)
    return FIRST_COMPILER if None not in known and sum(s for s in known if s is not None) <= 1 else []


def share_of(job: Job, note: Note, span: tuple[str, str] | None) -> float:
    """The offsets that a job of the hours of `span`, or of all that wait, has to read at most, those of the open hour
    among them, as a share of those from which on the second compiler pays. Raises Transient when Kafka or the lake is
    unreachable, Refused for an accepted hour that the ledger does not have."""
    note(LAKE)
    state = load_state(job.lake, job.stream.table)
    chosen = _chosen(state, span)
    cuts = job.ledger.remembering(state, chosen).cuts
    offsets = sum(cuts[h].offsets for h in chosen if h in cuts)
    if span is None or span[1] >= state.timeline.open:
        note(KAFKA)
        topic = job.kafka.describe(job.stream.topic)
        ends = job.kafka.stable_ends(topic) if topic is not None else {}
        offsets += sum(max(0, end - state.timeline.start.get(p, 0)) for p, end in ends.items())
    stream = job.stream
    by_workers = stream.batch.decoder == "workers" and stream.format.type == "json" and stream.archive is None
    return offsets / (_MOST_BY_WORKERS if by_workers else _MOST_BY_SPARK)


def _chosen(state: State, span: tuple[str, str] | None) -> list[str]:
    if span is None:
        return [h for h in state.timeline.sealed if not state.is_accepted(h)]
    return list(hours_between(span[0], shift(span[1], 1)))
