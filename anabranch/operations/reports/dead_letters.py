"""Row-level reports: a stream's dead letters, their counts by reason, and samples of each with
their bytes; differences between the layers of an hour, and records removed as duplicates."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

import duckdb
from pyiceberg.table import Table

from anabranch.common.arrays import grouped
from anabranch.common.errors import Refused
from anabranch.iceberg.manifests import files_of
from anabranch.iceberg.rewriting import RowReader
from anabranch.job import Job
from anabranch.offsets.hours import Cut, hours_between, shift
from anabranch.protocol import ledger, merge
from anabranch.protocol.ledger_row import Diff, HourAccount, LedgerRow, unexplained_counts
from anabranch.protocol.state import State, load_state
from anabranch.records.hashes import PLACE
from serving_layer.layer_diff import Repeated, Sample, open_comparison
from serving_layer.query.datasets import connected, plan_files, reading_failures

_KEPT = 2000  # maximum characters of a key or value


@dataclass(frozen=True)
class Letter:
    """A dead letter: its partition and offset, its error, and its bytes as text."""

    hour: str
    partition: int
    offset: int
    timestamp: datetime | None
    text: str | None
    key: str | None
    value: str | None
    value_bytes: int | None


@dataclass(frozen=True)
class Reason:
    """The dead letters of one error code, with the first ones as samples."""

    reason: str
    count: int
    first_hour: str
    last_hour: str
    samples: Sequence[Letter]


@dataclass(frozen=True)
class DeadLetters:
    """The dead letters of a stream. `hours`: the first and last hour; None for all hours."""

    stream: str
    hours: tuple[str, str] | None
    dead: int
    reasons: Sequence[Reason]


def letters(job: Job, hours: tuple[str, str] | None, each: int) -> DeadLetters:
    """Return the dead letters in `main`, of a range of hours or all, by reason, most frequent
    first, with its first `each` samples. Raises Transient without the lake."""
    table = job.lake.load(job.stream.dead_letters_table)
    wanted = hours_between(hours[0], shift(hours[1], 1)) if hours is not None else None
    reasons = read(table, wanted, each)
    return DeadLetters(job.stream.name, hours, sum(reason.count for reason in reasons), reasons)


def read(table: Table, hours: Collection[str] | None, each: int) -> list[Reason]:
    """Return the reasons in a loaded table, for a range of hours or all, with samples in order of
    hour, partition and offset. Raises Transient when a data file cannot be read."""
    failures = reading_failures("dead letters: expected to read every data file")
    with connected() as connection, failures:
        files = plan_files(".".join(table.name()), table, hours=hours)
        connection.register("letters", files.dataset())
        counts = _ask(
            connection,
            "SELECT error_code, count(*) AS n, min(ingest_hour) AS first, max(ingest_hour) AS "
            "last FROM letters GROUP BY error_code ORDER BY n DESC, error_code",
        )
        places = _ask(
            connection,
            "SELECT error_code, ingest_hour, kafka_partition, kafka_offset FROM letters "
            "QUALIFY row_number() OVER (PARTITION BY error_code ORDER BY ingest_hour, "
            f"kafka_partition, kafka_offset) <= {each}",
        )
        # Values may be large: read only those of the samples.
        where = " OR ".join(
            f"(ingest_hour = '{p['ingest_hour']}' AND kafka_partition = {p['kafka_partition']} "
            f"AND kafka_offset = {p['kafka_offset']})"
            for p in places
        )
        rows = _ask(
            connection,
            "SELECT error_code, error_text, ingest_hour, kafka_partition, kafka_offset, "
            f"kafka_timestamp, key, value FROM letters WHERE {where or 'false'} ORDER BY "
            "ingest_hour, kafka_partition, kafka_offset",
        )
    samples = grouped(rows, lambda row: row["error_code"])
    return [
        Reason(code, c["n"], c["first"], c["last"], [*map(_letter, samples.get(code, ()))])
        for code, c in ((c["error_code"], c) for c in counts)
    ]


def _ask(connection: duckdb.DuckDBPyConnection, sql: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = connection.sql(sql).to_arrow_table().to_pylist()
    return rows


def _letter(row: Mapping[str, Any]) -> Letter:
    return Letter(
        hour=row["ingest_hour"],
        partition=row["kafka_partition"],
        offset=row["kafka_offset"],
        timestamp=row["kafka_timestamp"],
        text=row["error_text"],
        key=shown(row["key"], _KEPT),
        value=shown(row["value"], _KEPT),
        value_bytes=len(row["value"]) if row["value"] is not None else None,
    )


def shown(data: bytes | None, longest: int) -> str | None:
    """Return bytes as text for display, shortened after `longest` characters; bytes that are not
    valid UTF-8 appear as `\\xff`. Pure."""
    if data is None:
        return None
    # A UTF-8 character has at most four bytes, so a character cut by this slice is never displayed.
    line = data[: 4 * longest + 4].decode("utf-8", errors="backslashreplace")
    return line if len(line) <= longest else line[:longest] + "…"


@dataclass(frozen=True)
class HourDifference:
    """The comparison of speed with batch for an hour, now and at its acceptance. `uncovered`: why
    the speed layer does not cover the whole hour now; None if it does."""

    stream: str
    hour: str
    speed_rows: int
    batch_rows: int
    diff: Diff
    unexplained: Mapping[str, int]
    uncovered: str | None
    when_accepted: Diff | None
    samples: Sequence[Sample]


@dataclass(frozen=True)
class HourDuplicates:
    """The records of an hour that the batch layer removed as duplicates. `counted`: their number in
    the ledger; `found`: their number now; `listed`: the length of `duplicates`. `untold`: why
    `counted` and `found` differ; None if they are equal."""

    stream: str
    hour: str
    counted: int | None
    found: int
    listed: int
    untold: str | None
    duplicates: Sequence[Repeated]


class Compared(NamedTuple):
    difference: HourDifference
    duplicates: HourDuplicates


def compare(job: Job, hour: str, each: int, limit: int) -> Compared:
    """Compare speed with batch for an accepted hour: counts, and the first `each` rows of each
    kind; and the first `limit` records that batch removed, each with the row that it repeats.
    Raises Refused for another hour, Transient without the lake."""
    state, stream = load_state(job.lake, job.stream.table), job.stream
    row = _accepted_row(job, state, hour)
    cut = state.cuts.get(hour) or (row.cut if row is not None else None) or Cut("", {})
    unread = merge.unread_ranges(state, hour, cut)
    letters = job.lake.load(stream.dead_letters_table)
    files = [file for layer in ("speed", "batch") for file in files_of(letters, layer, hour)]
    with open_comparison(state.table, hour, stream.key, stream.lookback_hours) as comparison:
        with reading_failures("dead letters: expected to read every data file"):
            places = RowReader.of(letters).read(files, PLACE).read_all()
        compared, samples = comparison.compare(places, unread, each)
        found, listed = comparison.repeated(limit)
    now, account = replace(compared.diff, sample=None), row or HourAccount()
    difference = HourDifference(
        stream=stream.name,
        hour=hour,
        speed_rows=compared.speed_rows,
        batch_rows=compared.speed_rows - now.extra - now.duplicate + now.missing,
        diff=now,
        unexplained=unexplained_counts(now, account.gaps),
        uncovered=merge.uncovered_reason(state, "speed", hour),
        when_accepted=replace(account.diff, sample=None) if account.diff is not None else None,
        samples=tuple(samples),
    )
    duplicates = HourDuplicates(
        stream=stream.name,
        hour=hour,
        counted=account.duplicate,
        found=found,
        listed=len(listed),
        untold=not_found_reason(state, hour, account.duplicate, found),
        duplicates=listed,
    )
    return Compared(difference, duplicates)


def not_found_reason(state: State, hour: str, counted: int | None, number: int) -> str | None:
    """Return why the ledger's count of duplicates differs from the found one, if it does. Pure."""
    if counted is None:
        return "the ledger has no count: its row was restored from the branches"
    if counted == number:
        return None
    if number > counted:
        return (
            f"{number - counted} more than the ledger counts: rows missing from batch that are "
            "not duplicates"
        )
    left = f"{counted - number} cannot be found"
    if (uncovered := speed_rows_reason(state, hour)) is not None:
        return f"{left}: they are found in the speed layer's rows, and {uncovered}"
    return f"{left}: the rows that they repeat are no longer in the hour or its look-back"


def speed_rows_reason(state: State, hour: str) -> str | None:
    """Return why the speed layer does not cover an hour, as text; None if it does. Pure."""
    timeline = state.timeline
    if timeline.is_skipped(hour) and hour not in timeline.skipped:
        return "those of the hour were deleted (`anabranch maintain`)"
    return merge.uncovered_reason(state, "speed", hour)


def _accepted_row(job: Job, state: State, hour: str) -> LedgerRow | None:
    """Return the newest ledger row of an accepted hour, if any. Raises Refused for another."""
    rows = ledger.newest(job.ledger.history([hour]))
    if not state.is_accepted(hour):
        raise Refused(
            f"hour {hour}: expected it to be accepted, found no rows of the batch layer; "
            f"`anabranch explain {job.stream.name} {hour}` explains it"
        )
    return rows.get(hour)
