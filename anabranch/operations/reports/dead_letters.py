"""Report of a stream's dead letters: counts by reason, and samples of each with their bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

import duckdb

from anabranch.job import Job
from anabranch.offsets.hours import hours_between, shift
from serving_layer.query.datasets import connected, plan_files, reading_failures

if TYPE_CHECKING:
    from pyiceberg.table import Table

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
    """Return the dead letters in `main`, of a range of hours or all: by reason, most frequent
    first, each reason with its first `each` samples. Raises Transient when the lake is
    unreachable."""
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
    samples: dict[str, list[Letter]] = {}
    for row in rows:
        samples.setdefault(row["error_code"], []).append(_letter(row))
    return [
        Reason(c["error_code"], c["n"], c["first"], c["last"], samples.get(c["error_code"], []))
        for c in counts
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
