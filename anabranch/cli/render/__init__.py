"""Print reports, as text or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from anabranch.common.output import plain, print_json, print_table


def print_result(value: object, lines: Iterable[str], output: str) -> None:
    """Print a result to standard output: a JSON document, or lines of text."""
    if output == "json":
        print_json(value)
        return
    for line in lines:
        print(line)


def print_rows(
    value: object, columns: Sequence[str], rows: Iterable[Sequence[object]], output: str
) -> None:
    """Print a result to standard output: a JSON document, or a table."""
    if output == "json":
        print_json(value)
    else:
        print_table(columns, rows)


def print_text(line: str, output: str) -> None:
    """Print a line of text; nothing with JSON output."""
    if output == "text":
        print(line)


def print_event(value: object, words: str, output: str) -> None:
    """Print one of many results as a line, a JSON object or text, and flush."""
    print(json.dumps(plain(value)) if output == "json" else words, flush=True)
