"""Status of hours and streams: the streams of a configuration folder with their states, and the
position of a consumer that continues in a topic after a snapshot of `main`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

from anabranch import config
from anabranch.common.deadline import KAFKA, LAKE, Note
from anabranch.common.errors import PositionError
from anabranch.config import Stream
from anabranch.iceberg.manifests import HourContent, content_by_hour
from anabranch.iceberg.snapshots import head, heads, last_publish, made_at, published_since, total
from anabranch.job import Job
from anabranch.offsets import hours as hour_words
from anabranch.offsets.position import Offsets, Ranges, Topic, size, to_keys
from anabranch.operations.finding import Finding, Issue, error, warning
from anabranch.operations.reports.maintenance import Maintenance, last_run_words, running_hour
from anabranch.protocol import ledger, watermarks
from anabranch.protocol.ledger import Ledger
from anabranch.protocol.ledger_row import (
    Counts,
    Diff,
    Entries,
    HourAccount,
    HourShare,
    Layer,
    LedgerRow,
    UnknownFields,
    is_too_many,
    ranges_of,
    unexplained_counts,
)
from anabranch.protocol.measured import MEASURED, read_measured, read_runs
from anabranch.protocol.merge import plan_seam, state_at
from anabranch.protocol.registers import Expired, Hold
from anabranch.protocol.retention import Overdue, find_overdue
from anabranch.protocol.state import POSITION, State, check_log_end, check_topic, load_state

if TYPE_CHECKING:
    from pyiceberg.table import Table

    from serving_layer.views import FilledView

# Time for an operator to fix a refused hour before Kafka deletes its records.
SPARE = timedelta(days=1)

# As deploy/prometheus/alerts.yml.
_MAINTAINED_WITHIN = timedelta(days=2)

MAY_WAIT = 2
"""Number of hours that may wait for sealing or rebuilding without an alert
(deploy/prometheus/alerts.yml)."""


@dataclass(frozen=True)
class GateSummary:
    """The quality gate's result for an hour; `passed` is None before the gate ran."""

    passed: bool | None = None
    failed: Entries = ()


@dataclass(frozen=True)
class HourSummary:
    """An hour's values from the table and from the ledger's newest row. `dead_share`: from the
    newest account, else from what `main` has of the hour so far."""

    hour: str
    state: str
    revision: int
    served: Layer
    cut: Ranges | None
    counts: Counts
    speed_rows: int | None
    diff: Diff | None
    quality: GateSummary
    reason: str | None
    dead_share: HourShare | None = None


@dataclass(frozen=True)
class Lag:
    """Offsets that `main` lacks, in total and by partition."""

    offsets: int
    partitions: Offsets


@dataclass(frozen=True)
class StreamStatus:
    """The state of a stream.

    `unreadable`: why both jobs refuse to read the topic; None if they read it, or never did.
    `late`: why the speed layer is late; None if it is not, or was not checked. `newest_accepted`:
    the newest accepted hour; `accepted_at`: its first acceptance, if the ledger has it;
    `complete_through`: the last hour that is accepted together with all earlier ones; all None
    without an accepted hour. `waiting_since`: the Kafka timestamp of the oldest record that `main`
    lacks, never earlier than the freshness of `main`; None if it lacks none. `retention`: the
    topic's retention time; None if unlimited. `unknown`: the unknown fields of the newest accepted
    hour; None if not counted. `refused_restatements`: accepted hours whose newest restatement was
    refused, until one is accepted or an operator sets the serving layer. `holds`: the hours that
    operators keep beyond their time. `overrides`: the layer that an operator chose, by hour.
    `expired`: the hours whose rows have expired (`expired_hours` counts them). `overdue`: the hours
    that should have expired. `unmaintained`: how the last maintenance ended, if none completed for
    two days. `hours`: the sealed hours that the table lists individually; all older ones are
    accepted and served by batch. `speed_has_begun`: whether the speed layer ever published.
    `newest_counts`: those of the newest accepted hour, if the ledger has them. `dead_shares`: the
    dead letters of the hours that are not accepted, as counted by a refused build, else in `main`;
    hours without records are absent. `too_many_dead`: those hours among them that have more than
    `quality.max_dead`. `conflicts`: the duplicates with other content, of the newest accepted hour
    and of those that are not accepted. `views`: how far each view is precomputed, if asked for.
    """

    stream: str
    topic: str
    topic_id: str
    topic_recreated: bool
    position: Offsets
    position_since: datetime
    late: str | None
    lag: Lag
    last_publish: Mapping[str, datetime | None]
    first_hour: str
    open_hour: str
    newest_accepted: str | None
    accepted_at: datetime | None
    complete_through: str | None
    waiting_since: datetime | None
    to_seal: Sequence[str]
    backlog: Sequence[str]
    refused: Sequence[str]
    hours: Mapping[str, Layer]
    unexplained: Mapping[str, Mapping[str, int]]
    dead_letters: int
    lost: Mapping[str, int]
    retention: timedelta | None = None
    unknown: UnknownFields | None = None
    refused_restatements: Sequence[str] = ()
    holds: Sequence[Hold] = ()
    expired: Expired = field(default_factory=Expired)
    overdue: Overdue | None = None
    speed_has_begun: bool = True
    newest_counts: Counts | None = None
    dead_shares: Mapping[str, HourShare] = field(default_factory=dict)
    too_many_dead: Sequence[str] = ()
    conflicts: Mapping[str, int] = field(default_factory=dict)
    views: Sequence[FilledView] = ()
    topic_missing: bool = False
    unreadable: str | None = None
    unmaintained: str | None = None
    overrides: Mapping[str, Layer] = field(default_factory=dict)

    @property
    def is_batch_only(self) -> bool:
        """Whether only the batch layer has read the stream."""
        return not self.speed_has_begun and self.newest_accepted is not None

    @property
    def is_new(self) -> bool:
        """Whether records wait, and neither layer has begun."""
        return not self.speed_has_begun and self.newest_accepted is None and self.lag.offsets > 0

    @property
    def running_dead_share(self) -> HourShare | None:
        """The dead letters of the newest hour with records that is not accepted."""
        return self.dead_shares[max(self.dead_shares)] if self.dead_shares else None

    @property
    def undecided(self) -> list[str]:
        """The ended hours that are neither accepted nor refused, oldest first."""
        refused = {*self.refused}
        return [hour for hour in (*self.backlog, *self.to_seal) if hour not in refused]

    @property
    def is_behind(self) -> bool:
        """Whether the batch layer is behind: one hour whose rebuild fails each time is enough."""
        running = hour_words.shift(self.open_hour, len(self.to_seal))
        return any(hour_words.shift(hour, MAY_WAIT) < running for hour in self.undecided)

    @property
    def expired_hours(self) -> int:
        return self.expired.count(self.first_hour)


def hours(job: Job) -> list[HourSummary]:
    """Return every hour from the first to the running one, oldest first: the values of the ledger's
    newest row, with state and serving layer from the table."""
    state = load_state(job.lake, job.stream.table)
    now = datetime.now(UTC)
    rows = job.ledger.history(without=("partitions", "sources"))
    shares = dead_shares(state, job.lake.load(job.stream.dead_letters_table), now)
    return hour_rows(state, rows, now, shares)


def dead_shares(state: State, letters: Table, now: datetime) -> dict[str, HourShare]:
    """Return the dead letters of the hours that have records in `main` and are not accepted, oldest
    first. `letters`: the table of dead letters."""
    after = hour_words.shift(running_hour(state, now), 1)
    hours = {
        *(h for h in state.timeline.sealed if not state.is_accepted(h)),
        *hour_words.hours_between(state.timeline.open, after),
    }
    rows, dead = (content_by_hour(table, "main", hours) for table in (state.table, letters))
    none = HourContent(0, 0)
    counts = {h: (dead.get(h, none).rows, rows.get(h, none).rows) for h in sorted(hours)}
    return {h: HourShare(d, d + r) for h, (d, r) in counts.items() if d + r}


def hour_rows(
    state: State,
    history: Sequence[LedgerRow],
    now: datetime,
    shares: Mapping[str, HourShare] | None = None,
) -> list[HourSummary]:
    """Return the hours' summaries, from the table's state and all rows of the ledger. An hour
    without a row has only the table's values. `shares`: from `dead_shares`. Pure."""
    rows = ledger.newest(history)
    why = {row.hour: row.reason for row in history if row.decision == "served"}
    refused = ledger.open_refusals(row for row in history if row.decision != "served")
    timeline = state.timeline
    known = {
        *rows,
        *hour_words.hours_between(timeline.first, hour_words.shift(running_hour(state, now), 1)),
    }
    return [
        _hour(state, h, rows.get(h), why.get(h), refused.get(h), (shares or {}).get(h))
        for h in sorted(known)
    ]


def _hour(
    state: State,
    hour: str,
    row: LedgerRow | None,
    why: str | None,
    refused: LedgerRow | None,
    share: HourShare | None,
) -> HourSummary:
    accepted = state.accepted.get(hour)
    cut = state.cuts.get(hour) or (row.cut if row is not None else None)
    account = row or HourAccount()
    diff, quality = account.diff, account.quality
    reason = row.reason if row is not None else None
    if accepted is not None and refused is not None:
        # All other values belong to the accepted revision.
        reason = f"its restatement as revision {refused.revision} was refused: {refused.reason}"
    return HourSummary(
        hour=hour,
        state=_state_of(state, hour, row),
        revision=accepted.revision
        if accepted is not None
        else row.revision
        if row is not None
        else 0,
        served=state.served_by(hour),
        cut=ranges_of(cut),
        counts=Counts.of(account),
        speed_rows=account.speed_rows,
        diff=replace(diff, sample=None) if diff is not None else None,
        quality=GateSummary(quality.passed, quality.failed)
        if quality is not None
        else GateSummary(),
        reason=_reason(state.overrides.get(hour), why, reason),
        dead_share=HourShare.of(account) or share,
    )


def _state_of(state: State, hour: str, row: LedgerRow | None) -> str:
    if hour >= state.timeline.open:
        return "open"
    if state.is_accepted(hour):
        return "expired" if state.is_expired(hour) else "accepted"
    return "refused" if row is not None and row.decision == "refused" else "sealed"


def _reason(override: str | None, why: str | None, reason: str | None) -> str | None:
    if override is None:
        return reason
    chosen = f"served by {override} by choice: {why or 'the reason is not in the ledger'}"
    return f"{chosen}; {reason}" if reason else chosen


def status(
    job: Job, late_after: timedelta | None = None, note: Note = lambda waits_for: None
) -> StreamStatus:
    """Return the state of the stream; with `late_after`, also whether the speed layer is late.
    Calls `note` with the service to be waited for. Raises Transient when Kafka or the lake is
    unreachable."""
    found = status_of(job, load_state(job.lake, job.stream.table), late_after, note)
    if not job.stream.views:
        return found
    from serving_layer.views import fill_status

    note(LAKE)
    return replace(found, views=fill_status(job.lake, job.stream))


def status_of(
    job: Job, state: State, late_after: timedelta | None = None, note: Note = lambda waits_for: None
) -> StreamStatus:
    now = datetime.now(UTC)
    note(KAFKA)
    # To confirm that a topic is missing takes as long as the answer of several streams may.
    topic = job.kafka.describe(job.stream.topic, confirmed=False)
    ends = job.kafka.stable_ends(topic) if topic is not None else {}
    starts = _lacking_from(state)
    lag = {p: (starts.get(p, 0), e) for p, e in ends.items()}
    backlog = sorted(h for h in state.timeline.sealed if not state.is_accepted(h))
    ended = hour_words.hours_between(state.timeline.open, hour_words.hour_of(now))
    name = job.stream.hours_table
    note(LAKE)
    # Read only the ledger rows that the report needs.
    newest, first = newest_accepted(state), state.timeline.first
    maintained = Maintenance(read_runs(state.table.properties))
    wanted = {
        *backlog,
        *([first] if maintained.complete is None else []),
        *Ledger(job.lake, name).remarkable_hours(),
        *([newest] if newest is not None else []),
    }
    decisions = Ledger(job.lake, name).history(wanted)
    rows = ledger.newest(decisions)
    unread = {p: (s, e) for p, (s, e) in lag.items() if s < e}
    has_begun = _has_speed_begun(state)
    # Where only the batch layer runs, records of the running hour are not late, unless promised.
    may_be_late = has_begun or newest is None or job.stream.slo.fresh is not None
    unreadable = _why_unreadable(state, topic, ends, job.stream.topic)
    since = published_since(state.table, "speed", POSITION)
    publishes = {branch: last_publish(state.table, branch) for branch in ("speed", "batch", "main")}
    letters = job.lake.load(job.stream.dead_letters_table)
    shares, most_dead = dead_shares(state, letters, now), job.stream.quality.max_dead
    counted = {hour: HourShare.of(rows[hour]) for hour in backlog if hour in rows}
    shares |= {hour: share for hour, share in counted.items() if share is not None}
    note(KAFKA)
    waiting = (
        _waiting_since(job, topic, unread, state, now) if topic is not None and unread else None
    )
    return StreamStatus(
        stream=job.stream.name,
        topic=job.stream.topic,
        topic_id=state.position.topic_id,
        topic_recreated=topic is not None and state.position.topic_id not in ("", topic.id),
        topic_missing=topic is None,
        position=dict(sorted(state.position.offsets.items())),
        position_since=since,
        speed_has_begun=has_begun,
        unreadable=unreadable,
        late=unreadable
        or (late_reason(size(lag), since, waiting, late_after, now) if may_be_late else None)
        if late_after is not None
        else None,
        lag=Lag(size(lag), {p: max(0, e - s) for p, (s, e) in sorted(lag.items())}),
        last_publish={b: made_at(s) if s is not None else None for b, s in publishes.items()},
        first_hour=state.timeline.first,
        open_hour=state.timeline.open,
        newest_accepted=newest,
        accepted_at=min(
            (r.recorded_at for r in decisions if (r.hour, r.decision) == (newest, "accepted")),
            default=None,
        ),
        complete_through=watermarks.complete_through(state),
        waiting_since=waiting,
        to_seal=ended,
        backlog=backlog,
        refused=[h for h in backlog if h in rows and rows[h].decision == "refused"],
        refused_restatements=sorted(
            h for h in ledger.open_refusals(decisions) if state.is_accepted(h)
        ),
        hours={h: state.served_by(h) for h in sorted({*state.accepted, *state.timeline.sealed})},
        unexplained=unexplained(rows),
        dead_letters=total(head(letters, "main"), "records"),
        lost={h: n for h, row in rows.items() if (n := (row.gaps or {}).get("retention"))},
        retention=job.kafka.retention(topic.name) if topic is not None else None,
        unknown=rows[newest].unknown if newest in rows else None,
        newest_counts=Counts.of(rows[newest]) if newest in rows else None,
        holds=state.holds.holds,
        overrides=dict(sorted(state.overrides.items())),
        expired=state.expired,
        overdue=find_overdue(state, job.stream.keep.rows, now, job.stream.lookback_hours),
        unmaintained=_why_unmaintained(maintained, decisions, now),
        dead_shares=shares,
        conflicts={h: n for h in (*backlog, newest) if h in rows and (n := rows[h].conflicts)},
        too_many_dead=[h for h, s in shares.items() if is_too_many(s.dead, s.records, most_dead)],
    )


def _why_unreadable(state: State, topic: Topic | None, ends: Offsets, name: str) -> str | None:
    """Return why a job ends that reads the topic, if the stream has read it before. Pure."""
    if not state.position.topic_id:
        return None
    try:
        check_log_end(check_topic(state.position, topic, name), ends, name)
    except PositionError as error:
        return str(error)
    return None


def _why_unmaintained(
    found: Maintenance, decisions: Iterable[LedgerRow], now: datetime
) -> str | None:
    """Return how the last run of maintenance ended, if none completed in time: of a stream without
    one, since the oldest decision, as its first hour may be much older. Pure."""
    since = found.complete.ended if found.complete else None
    since = since or min((row.recorded_at for row in decisions), default=now)
    return last_run_words(found) if now - since > _MAINTAINED_WITHIN else None


def _has_speed_begun(state: State) -> bool:
    """Return whether the speed layer ever published: it measures its publishes. The position alone
    does not say it, since the batch layer moves the start of the open hour past it."""
    moved = any(n > state.timeline.start.get(p, 0) for p, n in state.position.offsets.items())
    return moved or "speed" in read_measured(state.branch_properties["main"].get(MEASURED))


def _lacking_from(state: State) -> Offsets:
    """Return the offsets from which on `main` lacks records: the speed layer's position, or the end
    of the last hour that is complete, where the batch layer read further."""
    position = state.position
    complete = state.cuts.get(watermarks.complete_through(state) or "")
    if complete is None or not state.is_merged or position.topic_id not in ("", complete.topic_id):
        return position.offsets
    ends = complete.ends
    return {p: max(position.offsets.get(p, 0), ends.get(p, 0)) for p in {*position.offsets, *ends}}


def _waiting_since(
    job: Job, topic: Topic, unread: Ranges, state: State, now: datetime
) -> datetime | None:
    starts, ends = {p: s for p, (s, _) in unread.items()}, {p: e for p, (_, e) in unread.items()}
    fresh_through = watermarks.Watermarks.from_properties(state.table.properties).fresh_through
    # Count an older record as received at the end of the fresh hours.
    low = fresh_through if fresh_through is not None else hour_words.start_of(state.timeline.first)
    oldest = job.kafka.oldest_stamp(
        topic, starts, ends, int(low.timestamp() * 1000), int(now.timestamp() * 1000)
    )
    return watermarks.waiting_since([oldest] if oldest is not None else [], fresh_through, now)


def freshness_seconds(view: StreamStatus, as_of: datetime) -> float:
    """Return the age of the oldest acknowledged record that `main` lacks; 0 if it lacks none, so an
    idle stream is not late. Pure."""
    if view.waiting_since is not None:
        return max(0.0, (as_of - view.waiting_since).total_seconds())
    return 0.0


def completeness_seconds(view: StreamStatus, as_of: datetime) -> float:
    """Return the time since the end of the oldest incomplete hour; 0 before its end. Pure."""
    complete = view.complete_through
    oldest = hour_words.shift(complete, 1) if complete is not None else view.first_hour
    return max(0.0, (as_of - hour_words.end_of(oldest)).total_seconds())


def retention_reason(view: StreamStatus, as_of: datetime) -> str | None:
    """Return why Kafka may delete records before their hour is accepted, or None. It may if the
    retention is less than a day longer than the age of the oldest hour that is not accepted.
    Pure."""
    waits = timedelta(seconds=round(completeness_seconds(view, as_of))) + timedelta(hours=1)
    if view.retention is None or view.retention >= waits + SPARE:
        return None
    return (
        f"Kafka keeps records for {view.retention}, and the oldest hour that is not accepted "
        f"began {waits} ago"
    )


def faults(view: StreamStatus) -> Iterator[Finding]:
    """Yield the faults of a stream's state, the most urgent first. Pure."""
    name, maintain = view.stream, f"anabranch maintain {view.stream}"
    if view.topic_missing:
        found, remedy = view.unreadable or "none", f"anabranch doctor {name}"
        yield error(Issue.TOPIC_MISSING, name, f"topic {view.topic}", found, remedy)
    elif view.unreadable is not None:
        expected = f"topic {view.topic} with the id {view.topic_id} and what was read of it"
        remedy = f"anabranch adopt {name}"
        yield error(Issue.TOPIC_RECREATED, name, expected, view.unreadable, remedy)
    for hour, left in view.unexplained.items():
        where, remedy = f"{name} {hour}", f"anabranch explain {name} {hour} --rows"
        expected = "only explained differences between the layers"
        yield error(Issue.UNEXPLAINED, where, expected, unexplained_words(left), remedy)
    if view.late and view.unreadable is None and not view.is_new:
        expected = "a speed layer without lag"
        yield warning(Issue.LATE, name, expected, view.late, f"anabranch speed {name}")
    for hour in view.refused:
        of_hour = f"{name} {hour}", "an accepted hour", "refused"
        yield warning(Issue.REFUSED, *of_hour, f"anabranch explain {name} {hour}")
    for hour in view.refused_restatements:
        found = "refused; the previous revision is served"
        of_hour = f"{name} {hour}", "an accepted restatement", found
        yield warning(Issue.REFUSED, *of_hour, f"anabranch explain {name} {hour}")
    for hour in view.too_many_dead:
        expected, found = "dead letters within quality.max_dead", view.dead_shares[hour].words
        remedy = f"anabranch dead-letters {name} --hours {hour}"
        yield error(Issue.DEAD_LETTERS, f"{name} {hour}", expected, found, remedy)
    if view.is_behind and not view.is_new:
        expected = f"no hour waiting for the batch layer for more than {MAY_WAIT} hours"
        found = f"{len(view.undecided)} waiting, from {view.undecided[0]} on"
        yield warning(Issue.BACKLOG, name, expected, found, f"anabranch batch {name}")
    if view.unmaintained is not None:
        expected = "maintenance of all steps each day"
        yield warning(Issue.MAINTENANCE, name, expected, view.unmaintained, maintain)
    if view.overdue is not None:
        expected = "hours to expire within a day after keep.rows"
        remedy = maintain if view.overdue.reason is None else f"{maintain} --dry-run"
        yield warning(Issue.OVERDUE, name, expected, overdue_words(view.overdue), remedy)
    for hour, count in view.conflicts.items():
        expected = "duplicates with the content of the row that they repeat"
        where, remedy = f"{name} {hour}", f"anabranch explain {name} {hour} --rows"
        yield warning(Issue.CONFLICTS, where, expected, f"{count:,} with other content", remedy)


def newest_accepted(state: State) -> str | None:
    hour = hour_words.shift(state.timeline.open, -1)
    while hour >= state.timeline.first and not state.is_accepted(hour):
        hour = hour_words.shift(hour, -1)
    return hour if hour >= state.timeline.first else None


def late_reason(
    lag: int, since: datetime, waiting_since: datetime | None, late_after: timedelta, now: datetime
) -> str | None:
    """Return why the speed layer is late, or None. It is late if a record has waited and the
    position has not moved for longer than `late_after`. `since`: the time of the last move;
    `waiting_since`: the time of the oldest waiting record. Pure."""
    if waiting_since is None or min(now - since, now - waiting_since) <= late_after:
        return None
    waits, still = (
        timedelta(seconds=round((now - at).total_seconds())) for at in (waiting_since, since)
    )
    return f"{lag} offsets wait, the oldest for {waits}, and the position has not moved for {still}"


def late_after(stream: Stream, otherwise: timedelta = timedelta(minutes=10)) -> timedelta:
    """Return the time after which a stream's speed layer is late: the shorter of `slo.fresh` and
    `otherwise`. Pure."""
    promised = stream.slo.fresh
    return min(promised, otherwise) if promised is not None else otherwise


def unexplained(rows: Mapping[str, LedgerRow]) -> dict[str, dict[str, int]]:
    """Return unexplained differences of the layers by hour, from the ledger's newest rows. Pure."""
    by_hour = {hour: unexplained_counts(row.diff, row.gaps) for hour, row in rows.items()}
    return {hour: left for hour, left in sorted(by_hour.items()) if left}


def unexplained_words(left: Mapping[str, int]) -> str:
    """Return unexplained differences as text: `3 missing, 1 changed`. Pure."""
    return ", ".join(f"{n} {kind}" for kind, n in left.items())


def overdue_words(overdue: Overdue) -> str:
    """Return the hours that should have expired as text. Pure."""
    why = f": {overdue.reason}" if overdue.reason is not None else ""
    return (
        f"{overdue.hours} hours are kept a day or more beyond keep.rows, from {overdue.oldest} "
        f"on{why}"
    )


StreamState = Literal["ready", "new", "gone", "broken", "unknown"]


@dataclass(frozen=True)
class StreamSummary:
    """A stream as its file declares it. `state`: `ready` (its table exists), `new` (before
    `anabranch apply`), `gone` (Kafka no longer has the topic), `broken` (its file is invalid) or
    `unknown` (the catalog did not answer). `error`: the reason for the last three. `family`: the
    stream's family, if any."""

    stream: str
    family: str | None
    group: str | None
    topic: str | None
    table: str | None
    state: StreamState
    error: str | None


def summarize(
    selected: config.Selected,
    groups: Mapping[str, str | None],
    tables: Collection[str] | str,
    members: config.Members,
) -> list[StreamSummary]:
    """Return a summary of each stream. `groups`: the group of each stream with an invalid file;
    `tables`: the catalog's tables, or why they could not be listed; `members`: the streams of
    families. Pure."""
    made = []
    for name, found in selected.items():
        member = members.get(name)
        family = member.family if member is not None else None
        if isinstance(found, config.ConfigurationError):
            group, topic = (
                (member.group, member.topic) if member is not None else (groups.get(name), None)
            )
            made.append(StreamSummary(name, family, group, topic, None, "broken", str(found)))
            continue
        state: StreamState = "new"
        error = None
        if isinstance(tables, str):
            state, error = "unknown", tables
        elif member is not None and member.is_gone:
            state, error = (
                "gone",
                f"Kafka no longer has topic {found.topic}; the stream and its tables stay",
            )
        elif found.table in tables:
            state = "ready"
        made.append(
            StreamSummary(name, family, found.group, found.topic, found.table, state, error)
        )
    return made


@dataclass(frozen=True)
class ConsumerPosition:
    """The first offset of each partition that a snapshot of `main` does not account for. `again`:
    the number of offsets after it that the snapshot accounts for all the same, since an earlier
    hour waits to be accepted."""

    stream: str
    topic: str
    topic_id: str
    snapshot_id: int
    offsets: Offsets
    again: int

    def as_spark(self) -> dict[str, dict[str, int]]:
        """Return `startingOffsets` of Spark's Kafka source."""
        return {self.topic: to_keys(self.offsets)}

    def as_csv(self) -> list[str]:
        """Return the lines of a file for `kafka-consumer-groups --reset-offsets --from-file`."""
        return [f"{self.topic},{p},{o}" for p, o in sorted(self.offsets.items())]


def position_of(job: Job) -> ConsumerPosition:
    """Return the position after the current snapshot. Partitions that the stream has not read yet
    begin at 0. Raises PositionError for a recreated topic, Refused as `plan_seam`, Transient."""
    table = job.lake.load(job.stream.table)
    at = heads(table)["main"]
    state = state_at(table, at)
    topic = job.kafka.describe(job.stream.topic, state.position)
    position = check_topic(state.position, topic, job.stream.topic)
    seam = plan_seam(state, at)
    lowest = dict.fromkeys(position.offsets, 0) | seam.lowest
    waiting = sum(size(part) for _, part in seam.waiting)
    between = {p: (o, seam.start.get(p, o)) for p, o in lowest.items()}
    return ConsumerPosition(
        job.stream.name, job.stream.topic, position.topic_id, at, lowest, size(between) - waiting
    )
