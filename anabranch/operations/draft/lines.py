"""Lines of logs that a draft takes apart with `select`; a part that a line lacks is null."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """A form of lines: their expression, the SQL and type of each part, and the event's time."""

    name: str
    line: re.Pattern[str]
    parts: dict[str, tuple[str, str]]
    time: str = ""


def _part(pattern: str, kind: str = "STRING") -> tuple[str, str]:
    text = f"nullif(regexp_extract(value, '{pattern}', 1), '')"
    if kind != "STRING":
        text = f"TRY_CAST({text} AS {'TIMESTAMPTZ' if kind == 'TIMESTAMP' else kind})"
    return text, kind


_ACCESS = r'\S+ \S+ .*?\[\d\d/[A-Z][a-z]{2}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4}\] "'
_TIME = r"^\W{0,2}(\d{4}[-/]\d\d[-/]\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z| ?[+-]\d\d:?\d\d)?)"
FORMS = (
    Form(
        "an access log",
        re.compile(_ACCESS),
        {
            "client": _part(r"^(\S+)"),
            "user_name": _part(r"^\S+ \S+ (.*?) \["),
            "ts": (
                r"try_strptime(regexp_extract(value, '\[(.*?)\]', 1), '%d/%b/%Y:%H:%M:%S %z')",
                "TIMESTAMP",
            ),
            "method": _part(r'\] "([A-Z]+) '),
            "path": _part(r'\] "[A-Z]+ (\S+)'),
            "status": _part(r'" (\d{3}) ', "INT"),
            "bytes": _part(r'" \d{3} (\d+)', "BIGINT"),
            "referer": _part(r'" \d{3} \S+ "(.*?)"'),
            "agent": _part(r'" \d{3} \S+ ".*?" "(.*?)"'),
        },
        "ts",
    ),
    Form(
        "syslog (RFC 5424)",
        re.compile(r"<\d{1,3}>\d \S+ \S+ \S+ \S+ \S+ "),
        {
            "priority": _part(r"^<(\d+)>", "INT"),
            "ts": _part(r"^<\d+>\d+ (\S+)", "TIMESTAMP"),
            "host": _part(r"^<\d+>\d+ \S+ (\S+)"),
            "app": _part(r"^<\d+>\d+ \S+ \S+ (\S+)"),
        },
        "ts",
    ),
    Form(
        "syslog (RFC 3164), whose times have no year",
        re.compile(r"(?:<\d{1,3}>)?[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \S+ "),
        {
            "priority": _part(r"^<(\d+)>", "INT"),
            "time_text": _part(r"^(?:<\d+>)?(\w{3} [ \d]\d \S+) "),
            "host": _part(r"^(?:<\d+>)?\w{3} [ \d]\d \S+ (\S+)"),
            "program": _part(r"^(?:<\d+>)?\w{3} [ \d]\d \S+ \S+ ([^:\[ ]+)"),
        },
    ),
    Form(
        "a log that begin with a time, UTC without a zone",
        # The name of a zone would not be read.
        re.compile(rf"{_TIME}[\])]? (?!(?!GMT)[A-Z]{{1,3}}T\b).*[A-Za-z]"),
        {
            "ts": (
                f"TRY_CAST(regexp_replace(translate(regexp_extract(value, '{_TIME}', 1), ',/', "
                r"'.-'), ' ([+-])', '\1') AS TIMESTAMPTZ)",
                "TIMESTAMP",
            ),
        },
        "ts",
    ),
)


def form_of(lines: Sequence[str]) -> Form | None:
    """Return the form of most lines; None if they have none of these."""
    for form in FORMS:
        if _are(form.line, lines):
            return form
    return None


def _are(pattern: re.Pattern[str], lines: Sequence[str]) -> bool:
    return 2 * sum(pattern.match(line) is not None for line in lines) >= len(lines)
