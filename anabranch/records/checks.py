"""Checks: why a record cannot become a row, in Spark SQL. The first true condition gives code and
text.

A format's own checks come first (`anabranch.records.formats`), then those of every format: required
columns, event time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from anabranch.config import EventTime, Stream

FIRST_MICROS, LAST_MICROS = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999 (UTC), in microseconds since 1970; dates of every reader include them."""

HOUR_MICROS = 3_600_000_000

_FOUND_LENGTH = 80
_CLOCK = (
    (86_400, 3_600),
    (3_600, 60),
    (60, 1),
)  # hours, minutes, seconds: the unit above and the unit, in seconds
_NO_VERDICT = "CAST(NULL AS STRUCT<code: STRING, text: STRING>)"


@dataclass(frozen=True)
class Check:
    """A reason why a value cannot become a row, in Spark SQL: a condition, and the verdict (see the
    function `error`) if it is true."""

    test: str
    error: str


def error(code: str, text: str) -> str:
    """Return SQL for a verdict with this code; `text` is SQL."""
    return f"struct('{code}' AS code, {text} AS text)"


def expected_found(expected: str, text: str) -> str:
    """Return SQL for `expected …, found …`; `text` is SQL for the value found, shortened."""
    return f"concat('{expected}, found ', coalesce(substring({text}, 1, {_FOUND_LENGTH}), 'null'))"


def literal(text: str) -> str:
    """Return a text as an SQL literal, with single quotes as double ones, and with nothing that
    Spark takes for a variable."""
    return "r'" + text.replace("'", '"').replace("${", "$ {") + "'"


def opaque(sql: str) -> str:
    """Wrap `sql` so that Spark's optimizer takes it for non-deterministic and leaves it in place.

    The optimizer then pushes no filter on it down, where every value would be parsed twice, and
    derives no constraints from it: a value that depends on twenty columns has a million.
    """
    return f"IF(spark_partition_id() < 0, NULL, {sql})"


def utc(moment: str) -> str:
    """Return SQL for a timestamp as text in UTC, to the second, independent of the session's
    zone."""
    seconds = f"unix_seconds({moment})"
    clock = [
        f"lpad(CAST(pmod({seconds}, {whole}) div {part} AS STRING), 2, '0')"
        for whole, part in _CLOCK
    ]
    return f"concat({utc_date(moment)}, 'T', concat_ws(':', {', '.join(clock)}), 'Z')"


def utc_date(moment: str) -> str:
    """Return SQL for the UTC date of a timestamp, independent of the session's time zone."""
    seconds = f"unix_seconds({moment})"
    return f"date_from_unix_date(CAST(({seconds} - pmod({seconds}, 86400)) div 86400 AS INT))"


def in_the_calendar(at: str) -> str:
    """Return SQL for whether microseconds since 1970 are in the years 1 to 9999."""
    # Not BETWEEN: Spark plans an extra column for it, which is computed in all branches.
    return f"({at} >= {FIRST_MICROS}L AND {at} <= {LAST_MICROS}L)"


@dataclass(frozen=True)
class Verdict:
    """The result of the checks of a record, as Spark SQL: whether one of them is true, and the
    error of the first, a struct of code and text, or null. `error` costs much more than `is_dead`,
    and few records need it."""

    is_dead: str
    error: str


def judge(
    stream: Stream, checks: Sequence[Check], shown: Callable[[str], str], last: Sequence[Check] = ()
) -> Verdict:
    """Return the verdict on a record by the format's checks, then the stream's, then `last`."""
    every = [
        *checks,
        *(
            Check(
                f"`_row_{c.name}` IS NULL",
                error(
                    "missing_required",
                    f"'{c.name}: expected {c.type} NOT NULL, found null or no such field'",
                ),
            )
            for c in stream.record_columns
            if not c.nullable
        ),
        *(_judge_event_time(stream.event_time, shown) if stream.event_time is not None else ()),
        *last,
    ]
    if not every:
        return Verdict("false", _NO_VERDICT)
    holds = " ".join(f"WHEN {check.test} THEN true" for check in every)
    errors = " ".join(f"WHEN {check.test} THEN {check.error}" for check in every)
    return Verdict(f"CASE {holds} ELSE false END", f"CASE {errors} END")


def _judge_event_time(bounds: EventTime, shown: Callable[[str], str]) -> Iterator[Check]:
    """Yield checks of the event time. Bounds are measured from the start and end of the ingest
    hour, so every rebuild gives the same verdict."""
    at = f"unix_micros(`_row_{bounds.column}`)"
    text = expected_found(
        f"{bounds.column}: expected a time near the ingest hour", shown(bounds.column)
    )
    verdict = error("event_time_out_of_bounds", text)
    # Spark could write a date outside these years, but no other program could read or publish it.
    yield Check(f"NOT {in_the_calendar(at)}", verdict)
    if bounds.past is not None:
        yield Check(f"{at} < _hour_start - {micros(bounds.past)}L", verdict)
    if bounds.future is not None:
        yield Check(f"{at} > _hour_start + {HOUR_MICROS + micros(bounds.future)}L", verdict)


def micros(delta: timedelta) -> int:
    return delta // timedelta(microseconds=1)
