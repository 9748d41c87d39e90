"""The audit: recount accepted hours, one by one, in data files and Kafka."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pyiceberg.manifest import DataFile
from pyiceberg.table import Table

from anabranch.common.errors import FileGone
from anabranch.common.logs import Progress
from anabranch.iceberg.files import LostFile, find_lost_files, require_manifests
from anabranch.iceberg.ledger_files import Span
from anabranch.iceberg.manifests import files_by_hour
from anabranch.job import Job
from anabranch.offsets.hours import IMPORTED, Cut, hours_between, shift
from anabranch.offsets.position import Offsets, Ranges, Topic, clip
from anabranch.operations.audit.checks import (
    Audited,
    AuditReport,
    Disagreement,
    build_report,
    built_again,
    check_adjacent_cuts,
    check_expired,
)
from anabranch.operations.audit.count import Codes, FileCounts, count_files, recount
from anabranch.protocol import ledger
from anabranch.protocol.erasure import UNSERVED
from anabranch.protocol.ledger_row import LedgerRow
from anabranch.protocol.retention import is_kept, letters_expired
from anabranch.protocol.state import State
from anabranch.protocol.topic_change import gone_from_kafka
from serving_layer.layer_diff import has_same_rows, open_comparison

LOG = logging.getLogger(__name__)

_Files = Mapping[str, Mapping[str, "DataFile"]]


@dataclass(frozen=True)
class _Lake:
    """One load of both tables and the ledger: state, newest ledger rows, and files by hour.
    `erased`: the result of `_erased`."""

    state: State
    letters: Table
    rows: Mapping[str, LedgerRow]
    main: _Files
    batch: _Files
    speed: _Files
    dead: _Files
    erased: frozenset[str]


def audit(job: Job, hours: tuple[str, str] | None, with_kafka: bool) -> AuditReport:
    """Audit the accepted hours in `hours`, or all. Raises FileGone if a manifest is lost, Transient
    when the lake or Kafka is unreachable."""
    for name in (job.stream.table, job.stream.dead_letters_table):
        require_manifests(job.lake.load(name))
    lake = _load(job, hours)
    known = {h for h in lake.rows if _is_accepted(lake, h)} | set(lake.state.accepted)
    # An expired hour may reappear after the ledger has dropped its row.
    known |= {h for h in (*lake.main, *lake.batch) if lake.state.is_expired(h)}
    wanted = sorted(h for h in known if hours is None or hours[0] <= h <= hours[1])
    expired = [h for h in wanted if lake.state.is_expired(h)]
    chosen = [h for h in wanted if not lake.state.is_expired(h)]
    topic = job.kafka.describe(job.stream.topic, lake.state.position) if with_kafka else None
    sizes = tuple(cut.offsets if (cut := _cut(lake, hour)) is not None else 0 for hour in chosen)
    audited = []
    progress = Progress(LOG, f"audit {job.stream.name}", "hours", sizes=sizes, contents="offsets")
    for hour in chosen:
        audited.append(_audit(job, lake, hour, topic, with_kafka, progress))
        progress.step()
    more = check_adjacent_cuts(
        {h: c for h in known if (c := _cut(lake, h)) is not None}, lake.state.timeline
    )
    more = [d for d in more if hours is None or hours[0] <= d.hour <= hours[1]]
    more += check_expired(expired, lake.rows, {"main": lake.main, "batch": lake.batch})
    more += _lost(job, lake, hours, {path for one in audited for path in one.gone})
    return build_report(
        job.stream.name, audited, [*more, *(_unknown(lake) if hours is None else [])], len(expired)
    )


def _load(job: Job, hours: tuple[str, str] | None) -> _Lake:
    # Start one hour earlier, because each cut is compared with the previous one.
    span = Span(shift(hours[0], -1), hours[1]) if hours is not None else None
    rows, state = job.ledger.history_and_state(job.stream.table, span)
    letters = job.lake.load(job.stream.dead_letters_table)
    newest = ledger.newest(rows)
    main, batch, speed = (files_by_hour(state.table, b) for b in ("main", "batch", "speed"))
    return _Lake(
        state, letters, newest, main, batch, speed, files_by_hour(letters, "main"), _erased(rows)
    )


def _lost(
    job: Job, lake: _Lake, hours: tuple[str, str] | None, known: Collection[str]
) -> list[Disagreement]:
    """Return a disagreement for each served file that storage lacks, except those in `known`."""
    lost = find_lost(job, lake.state, None if hours is None else hours_between(*hours))
    for one in lost.unserved:
        LOG.warning(
            "audit: a file of the speed layer is gone, the batch layer serves its hour "
            "hour=%s file=%s",
            one.hour,
            one.path,
        )
    return [
        Disagreement(
            one.hour,
            None,
            "storage",
            f"the data file {one.words}",
            f"none{built_again(one.hour, lake.state.is_accepted(one.hour))}",
        )
        for one in lost.served
        if one.path not in known
    ]


@dataclass(frozen=True)
class Lost:
    """Lost files of both tables: those that readers of `main` or a layer need, and those of the
    speed layer in hours that the batch layer serves."""

    served: tuple[LostFile, ...] = ()
    unserved: tuple[LostFile, ...] = ()


def find_lost(job: Job, state: State, hours: Collection[str] | None = None) -> Lost:
    """Look for lost files on every branch, in `hours` or all. Raises Transient, Terminal."""
    tables = (state.table, job.lake.load(job.stream.dead_letters_table))
    lost = [one for table in tables for one in find_lost_files(table, hours)]

    def is_served(one: LostFile) -> bool:
        return one.branches != ("speed",) or state.served_by(one.hour) == "speed"

    return Lost(
        tuple(one for one in lost if is_served(one)),
        tuple(one for one in lost if not is_served(one)),
    )


def _erased(rows: Sequence[LedgerRow]) -> frozenset[str]:
    """Return the hours with rows erased since acceptance. `rows`: oldest first. Pure."""
    erased = set[str]()
    for row in rows:
        if row.decision == "accepted":
            erased.discard(row.hour)
        elif row.decision == "erased" and not (row.erasure or {}).get(UNSERVED):
            erased.add(row.hour)
    return frozenset(erased)


def _is_accepted(lake: _Lake, hour: str) -> bool:
    return lake.rows[hour].decision == "accepted" or lake.state.is_accepted(hour)


def _cut(lake: _Lake, hour: str) -> Cut | None:
    """Return the table's cut of the hour, else the ledger's, if any."""
    return lake.state.cuts.get(hour) or (lake.rows[hour].cut if hour in lake.rows else None)


def _audit(
    job: Job, lake: _Lake, hour: str, topic: Topic | None, with_kafka: bool, progress: Progress
) -> Audited:
    state, row = lake.state, lake.rows.get(hour)
    cut = _cut(lake, hour) or Cut("", {})
    # Step 1: the files.
    by_source = {
        "rows": lake.main.get(hour, {}).values(),
        "batch": lake.batch.get(hour, {}).values(),
    }
    counted = count_files(state.table, hour, cut.ranges, by_source)
    counted |= count_files(
        lake.letters, hour, cut.ranges, {"dead": lake.dead.get(hour, {}).values()}
    )
    # Step 2: Kafka.
    reason = kafka_unavailable_reason(state, hour, cut, topic) if with_kafka else "not asked"
    codes, there = dict[int, Codes](), Ranges()
    if reason is None and topic is not None:
        codes, there = _read(job, topic, cut, progress)
        reason = None if there or not cut.offsets else "Kafka's retention deleted all of it"
    partitions = recount(cut.ranges, counted, there, codes)
    # Step 3: compare rows that the batch layer removed with the rows that they repeat.
    served = state.served_by(hour)
    wanted = (lake.batch if served == "batch" else lake.speed).get(hour, {})
    have = lake.main.get(hour, {})
    foreign, absent = len(set(have) - set(wanted)), len(set(wanted) - set(have))
    gone = dict(sorted((path, found) for c in counted.values() for path, found in c.gone.items()))
    if foreign and absent and not gone and has_same_rows(state.table, hour, "main", served):
        LOG.info(
            "audit: another program replaced files on main with the same rows hour=%s files=%d "
            "replaced=%d",
            hour,
            foreign,
            absent,
        )
        foreign = absent = 0
    accepted = state.accepted.get(hour)
    return Audited(
        hour=hour,
        served=served,
        accepted=state.is_accepted(hour),
        revision=accepted.revision if accepted is not None else 0,
        cut=state.cuts.get(hour),
        row=row,
        partitions=partitions,
        foreign=foreign,
        absent=absent,
        gone=gone,
        unrepeated=_unrepeated(job, lake, hour, row, counted),
        lookback=job.stream.lookback_hours,
        kafka=reason,
        letters_expired=hour in letters_expired(lake.letters),
        was_erased=hour in lake.erased,
    )


def kafka_unavailable_reason(state: State, hour: str, cut: Cut, topic: Topic | None) -> str | None:
    """Return why the hour cannot be read from Kafka; None if it can. Pure."""
    if cut.topic_id == IMPORTED:
        return "the hour was imported"
    if topic is None:
        return "the topic does not exist"
    if topic.id != cut.topic_id and cut.offsets:
        return "the topic was recreated since"
    gone = gone_from_kafka(state.timeline, state.position.topic_id, hour, cut)
    return "its log was restarted since" if gone else None


def _read(job: Job, topic: Topic, cut: Cut, progress: Progress) -> tuple[dict[int, Codes], Ranges]:
    """Return the part of the cut that Kafka's log had throughout, and the class of its offsets."""
    before = clip_to_log(cut.ranges, job.kafka.log_starts(topic), job.kafka.stable_ends(topic))
    codes = {}
    for p, (start, end) in before.items():
        codes[p] = job.kafka.classify(topic.name, p, start, end)
        progress.part(end - start)
    # Read the log starts again: retention may have deleted records in the meantime.
    ends = {p: end for p, (_, end) in before.items()}
    there = clip_to_log(before, job.kafka.log_starts(topic), ends)
    return {p: codes[p][start - before[p][0] :] for p, (start, _) in there.items()}, there


def clip_to_log(ranges: Ranges, starts: Offsets, ends: Offsets) -> Ranges:
    """Return the part of the ranges that is in the log, without empty ranges. Pure."""
    return clip(ranges, {p: (s, ends.get(p, 0)) for p, s in starts.items()})


def _unrepeated(
    job: Job, lake: _Lake, hour: str, row: LedgerRow | None, counted: Mapping[str, FileCounts]
) -> int | None:
    """Return how many removed rows repeat no other row, without those that Kafka did not return;
    None if not checked: only hours with duplicates, where a loss could go unnoticed."""
    if row is None or not row.duplicate or counted["batch"].gone or hour not in lake.speed:
        return None
    stream = job.stream
    if not is_kept(lake.state, hour, stream.lookback_hours):
        return None  # The rows that some of them repeat have expired.
    extra = row.diff.extra if row.diff is not None else 0
    compare = open_comparison(lake.state.table, hour, stream.key, stream.lookback_hours)
    try:
        with compare as compared:
            return max(0, compared.unrepeated() - extra)
    except FileGone:
        return None  # `_lost` names it.


def _unknown(lake: _Lake) -> Sequence[Disagreement]:
    """Return a disagreement for each hour of `main` from before the stream began."""
    timeline = lake.state.timeline
    return [
        Disagreement(
            h,
            None,
            "main",
            f"rows of hours from {timeline.first} on",
            f"{len(files)} files of this one",
        )
        for h, files in sorted(lake.main.items())
        if h < timeline.first
    ]
