"""Output of all commands, for people and for scripts.

Text goes through rich on a terminal of any width; piped, it is plain, one row a line. Values are
never truncated. JSON keeps the order of its keys. In both, times are ISO 8601 (UTC as `Z`).
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel
from rich.cells import cell_len

from anabranch.common.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.text import Text as RichText

ResultFormat = Literal["table", "csv", "spreadsheet", "json", "parquet"]
# Beginnings of a formula, also after blanks that a spreadsheet skips.
_QUOTE, _TO_QUOTE = '"', re.compile('[",\r\n]')
_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")

# rich omits colours for NO_COLOR and for terminals without colours.
_STYLES = {
    "accepted": "green",
    "passed": "green",
    "ready": "green",
    "refused": "red",
    "failed": "red",
    "error": "red",
    "warning": "yellow",
    "sealed": "yellow",
}


def plain(value: object) -> Any:
    """Convert a value to JSON types.

    Times become ISO 8601 text, durations seconds, whole decimals integers, other decimals text,
    bytes base64 text, NaN and infinities text, models and dataclasses objects (by `as_dict` if they
    have one), sets sorted lists. Raises TypeError for any other type.
    """
    match value:
        case Enum():
            return plain(value.value)
        case None | bool() | int() | str():
            return value
        case float():
            return (
                value
                if math.isfinite(value)
                else "NaN"
                if math.isnan(value)
                else f"{value}".replace("inf", "Infinity")
            )
        case datetime():
            return _iso(value)
        case date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case Decimal():
            return (
                int(value) if value.is_finite() and value.as_tuple().exponent == 0 else str(value)
            )
        case bytes() | bytearray() | memoryview():
            return base64.b64encode(value).decode("ascii")
        case Path():
            return str(value)
        case BaseModel():
            return plain(value.model_dump())
        case Mapping():
            return {
                key if isinstance(key, str) else text(key): plain(item)
                for key, item in value.items()
            }
        case AbstractSet():
            return sorted((plain(item) for item in value), key=str)
        case pa.MonthDayNano():
            return {"months": value.months, "days": value.days, "nanoseconds": value.nanoseconds}
        case list() | tuple():
            return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if (as_dict := getattr(value, "as_dict", None)) is not None:
            return plain(as_dict())
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    raise TypeError(
        f"output: expected a value that JSON can represent, found {type(value).__name__}"
    )


def text(value: object) -> str:
    """Convert a value to a line: empty for None, JSON for nested ones, controls escaped."""
    if value is None:
        return ""
    simple = plain(value)
    line = simple if isinstance(simple, str) else json.dumps(simple, ensure_ascii=False)
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line
    )


def name_text(name: str) -> str:
    """Convert a name that a producer chose to a line without backticks: a text between them is
    shown as a command to run."""
    return text(name).replace("`", "'")


def _json(value: object, ensure_ascii: bool = False) -> str:
    """Return indented JSON without a newline at the end."""
    return json.dumps(plain(value), indent=2, ensure_ascii=ensure_ascii)


def print_json(value: object) -> None:
    """Print one JSON document to standard output."""
    is_utf8 = sys.stdout.encoding.lower() in ("utf-8", "utf8")
    sys.stdout.write(_json(value, not is_utf8) + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table to standard output. On a terminal it has lines and colours, or a block of lines
    for each row if it is too wide; piped, it is aligned plain text."""
    cells = [list(row) for row in rows]
    if sys.stdout.isatty():
        _print_rich(columns, cells)
    else:
        sys.stdout.write(_aligned(columns, cells))
        sys.stdout.flush()


def write_result(
    result: pa.RecordBatchReader,
    fmt: ResultFormat,
    out: Path | None = None,
    limit: int | None = None,
) -> bool:
    """Write a query's result to `out` or standard output, batch by batch; a table collects its rows
    first. `limit` is for a table on standard output: return whether it left out rows.

    CSV has a header, an empty field for null, JSON for nested values, and texts unchanged;
    `spreadsheet` escapes texts that would run as a formula. JSON is a list of objects; Parquet is
    compressed with zstd. A file is replaced only when the new one is complete. Raises
    ConfigurationError for Parquet on a terminal, for a file that cannot be written and for values
    without a form there, and the errors of reading the result.
    """
    if out is not None:
        with _replacing(out) as sink:
            _write(result, fmt, sink)
    elif fmt == "table":
        rows = list(islice(_rows(result), limit + 1 if limit is not None else None))
        print_table(result.schema.names, rows[:limit])
        return limit is not None and len(rows) > limit
    elif fmt == "parquet":
        if sys.stdout.isatty():
            raise ConfigurationError(
                "query: expected a file or a pipe for Parquet, found a terminal (name a file)"
            )
        # Parquet's writer asks for its position, which a pipe does not have.
        with tempfile.TemporaryFile(prefix="anabranch-query-") as file:
            _write(result, fmt, file)
            file.seek(0)
            sys.stdout.flush()
            shutil.copyfileobj(file, sys.stdout.buffer)
            sys.stdout.buffer.flush()
    else:
        sys.stdout.flush()
        _write(result, fmt, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    return False


@contextmanager
def _replacing(out: Path) -> Iterator[IO[bytes]]:
    """Yield a file that replaces `out` once it is complete; write a device directly."""
    # Of this query alone: two of a schedule that overlap would write into one file.
    part = (
        out.with_name(f".{out.name}.{uuid4().hex[:8]}")
        if out.is_file() or not out.exists()
        else out
    )
    try:
        with part.open("wb") as sink:
            yield sink
        if part != out:
            part.replace(out)
    except OSError as error:
        raise ConfigurationError(
            f"query: expected to write {out}, found: {error.strerror or error}"
        ) from error
    finally:
        if part != out:
            part.unlink(missing_ok=True)


def _write(result: pa.RecordBatchReader, fmt: ResultFormat, sink: IO[bytes]) -> None:
    names = result.schema.names
    if fmt == "parquet":
        with _shown_as("Parquet"):
            writer = pq.ParquetWriter(sink, result.schema, compression="zstd")
        with writer:
            for batch in result:
                writer.write_batch(batch)
    elif fmt == "json":
        separator = "[\n"
        for row in _rows(result):
            entry = textwrap.indent(_json(dict(zip(names, row, strict=True))), "  ")
            sink.write(f"{separator}{entry}".encode())
            separator = ",\n"
        sink.write(b"[]\n" if separator == "[\n" else b"\n]\n")
    elif fmt == "table":
        sink.write(_aligned(names, [list(row) for row in _rows(result)]).encode())
    else:
        field = _spreadsheet_field if fmt == "spreadsheet" else _csv_field
        for row in chain([names], _rows(result)):
            sink.write(_csv_line([field(value) for value in row]).encode())


def _csv_line(fields: Sequence[str]) -> str:
    """Format a line of CSV. Python's writer does not quote a lone carriage return, a line end."""
    quoted = [f'"{f.replace(_QUOTE, 2 * _QUOTE)}"' if _TO_QUOTE.search(f) else f for f in fields]
    return ",".join(quoted if quoted != [""] else ['""']) + "\n"


def _rows(result: pa.RecordBatchReader) -> Iterator[tuple[object, ...]]:
    """Yield rows as tuples, so that columns of the same name stay separate."""
    for batch in result:
        columns = []
        for field, column in zip(batch.schema, batch.columns, strict=True):
            with _shown_as(f"column {field.name}: {field.type}"):
                columns.append(column.to_pylist(maps_as_pydicts="strict"))
        yield from zip(*columns, strict=True)


@contextmanager
def _shown_as(what: str) -> Iterator[None]:
    """Raise ConfigurationError for values that the output cannot represent, such as a time after
    the year 9999."""
    try:
        yield
    except (ArithmeticError, TypeError, ValueError, KeyError, NotImplementedError) as error:
        raise ConfigurationError(
            f"query: {what}: expected values that the output can represent, found: {error}; CAST "
            "them to VARCHAR"
        ) from error


def _csv_field(value: object) -> str:
    simple = plain(value)
    if simple is None:
        return ""
    return simple if isinstance(simple, str) else json.dumps(simple, ensure_ascii=False)


def _spreadsheet_field(value: object) -> str:
    """Format a CSV field, with an apostrophe before text that a spreadsheet would run as a formula
    (OWASP, CSV injection). Numbers stay numbers."""
    field = _csv_field(value)
    return f"'{field}" if isinstance(value, str | bytes) and field.startswith(_FORMULAS) else field


def _iso(value: datetime) -> str:
    if value.tzinfo is None:
        return value.isoformat()
    return value.astimezone(UTC).isoformat().removesuffix("+00:00") + "Z"


def _is_numeric(rows: Sequence[Sequence[object]], column: int) -> bool:
    values = [row[column] for row in rows if row[column] not in (None, "")]
    return bool(values) and all(
        isinstance(v, int | float | Decimal) and not isinstance(v, bool) for v in values
    )


def _texts(
    columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> tuple[list[list[str]], list[int]]:
    """Return the texts of a table, its header first, and the width of each column."""
    lines = [[text(value) for value in row] for row in (columns, *rows)]
    return lines, [max(cell_len(line[i]) for line in lines) for i in range(len(columns))]


def _aligned(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines, widths = _texts(columns, rows)
    lines.insert(1, ["-" * width for width in widths])
    right = [_is_numeric(rows, i) for i in range(len(columns))]
    shown = []
    for line in lines:
        padded = []
        for value, width, to_right in zip(line, widths, right, strict=True):
            space = " " * (width - cell_len(value))
            padded.append(space + value if to_right else value + space)
        shown.append("  ".join(padded).rstrip())
    return "\n".join(shown) + "\n"


def _print_rich(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table if it fits the terminal; else each row as names and values in wrapped lines."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    table = Table(header_style="bold")
    for i, name in enumerate(columns):
        justify: Literal["left", "right"] = "right" if _is_numeric(rows, i) else "left"
        table.add_column(Text(text(name)), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*(_styled(text(value)) for value in row))
    if _fits(columns, rows, console.width):
        console.print(table)
        return
    firsts = [text(row[0]) for row in rows]
    # A unique first column becomes the heading of each row's fields.
    headed = len({*firsts}) == len(rows)
    for first, row in zip(firsts, rows, strict=True):
        pairs = [(text(name), text(value)) for name, value in zip(columns, row, strict=True)]
        lines = list(_packed([pair for pair in pairs[headed:] if pair[1]], console.width - 2))
        if headed:
            lines.insert(0, Text(first, style="bold"))
        for i, line in enumerate(lines):
            for piece in line.wrap(console, console.width - 2, overflow="fold"):
                console.print(Text("  " if i else "").append_text(piece))


def _fits(columns: Sequence[str], rows: Sequence[Sequence[object]], width: int) -> bool:
    """Return whether a table fits, with the last column folded to a third of the width. Pure."""
    _, widths = _texts(columns, rows)
    return sum(widths[:-1]) + min(widths[-1], width // 3) + 3 * len(widths) + 1 <= width


def _packed(pairs: Sequence[tuple[str, str]], width: int) -> Iterator[RichText]:
    """Pack names and values into lines of at most `width` cells."""
    from rich.text import Text

    line = Text()
    for name, value in pairs:
        piece = Text.assemble((name, "dim"), " ", _styled(value))
        if line.cell_len and line.cell_len + 2 + piece.cell_len > width:
            yield line
            line = Text()
        line.append_text(Text("  ") if line.cell_len else Text()).append_text(piece)
    yield line


def _styled(value: str) -> RichText:
    """Colour the text if it is a known status."""
    from rich.text import Text

    return Text(value, style=_STYLES.get(value, ""))
