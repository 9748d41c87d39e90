"""Print what commands return.

A command returns its result as a `Report`: a view for JSON, and the text of the view. Text is a
generator, which runs only if text is printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, Generic, NamedTuple, TypeVar

import click

from anabranch.cli.options import conf_option, output_format, output_option
from anabranch.common.errors import AnabranchError

V = TypeVar("V", covariant=True)


class Table(NamedTuple):
    """A table within a text."""

    columns: Sequence[str]
    rows: Iterable[Sequence[object]]


def table_of(rows: Iterable[Mapping[str, object]]) -> Table:
    """Return the table of rows, each by column."""
    cells = list(rows)
    return Table([*cells[0]] if cells else (), [list(row.values()) for row in cells])


Text = Iterable[str | Table]


@dataclass(frozen=True)
class Report(Generic[V]):
    """The result of a command. `key`: the view's name in a list of streams; None if the view names
    its stream. `errors` are printed after it; the first, or `exit_code`, is the exit code."""

    view: V
    text: Text
    exit_code: int = 0
    errors: Sequence[AnabranchError] = ()
    key: str | None = None


@dataclass(frozen=True)
class Event(Report[V]):
    """One of many results: in JSON, an object on one line."""


@dataclass(frozen=True)
class StreamReports:
    """The report or the error of each stream, as they end: texts one after the other, or one list
    of JSON objects. `errors`: because of which streams of families may be missing."""

    of_streams: Iterable[tuple[str, Report[Any] | AnabranchError]]
    errors: Sequence[AnabranchError] = ()


Result = Report[Any] | StreamReports | Iterable[Report[Any]]


def report(command: Callable[..., Result]) -> Callable[..., None]:
    """Add `--output` and `--conf` to a command, print its reports, and exit with their code."""
    return conf_option(local_report(command))


def local_report(command: Callable[..., Result]) -> Callable[..., None]:
    """Like `report`, for a command that reads no configuration."""

    @wraps(command)
    def reporting(*values: Any, **options: Any) -> None:
        if code := show(command(*values, **options)):
            sys.exit(code)

    return output_option(reporting)


def show(result: Result) -> int:
    """Print a command's result. Return its exit code."""
    if isinstance(result, StreamReports):
        return _show_streams(result)
    codes = [_show_one(one) for one in ([result] if isinstance(result, Report) else result)]
    return next(filter(None, codes), 0)


def _show_one(one: Report[Any]) -> int:
    if output_format() != "json":
        print_text(one.text)
    elif isinstance(one, Event):
        from anabranch.common.output import plain

        print(json.dumps(plain(one.view)), flush=True)
    else:
        from anabranch.common.output import print_json

        print_json(one.view)
    for error in one.errors:
        print_error(error)
    return one.errors[0].exit_code if one.errors else one.exit_code


def _show_streams(reports: StreamReports) -> int:
    from anabranch.common.output import plain, print_json

    objects: list[Mapping[str, object]] = []
    errors, codes = list(reports.errors), []
    for stream, found in reports.of_streams:
        if isinstance(found, AnabranchError):
            errors.append(found)
            objects.append({"stream": stream, "error": str(found)})
            print_error(found, stream)
            continue
        codes.append(found.exit_code)
        for error in found.errors:
            errors.append(error)
            print_error(error, stream)
        if output_format() == "json":
            view = plain(found.view)
            objects.append(view if found.key is None else {"stream": stream, found.key: view})
        else:
            print_text(found.text if found.key is None else (f"{stream}:", *found.text))
    if output_format() == "json":
        print_json(objects)
    for error in reports.errors:
        print_error(error)
    return errors[0].exit_code if errors else next(filter(None, codes), 0)


def print_text(text: Text) -> None:
    """Print lines and tables to standard output, and flush."""
    from anabranch.common.output import print_table

    for part in text:
        if not isinstance(part, Table):
            print(part)
        elif part.columns:
            print_table(*part)
    sys.stdout.flush()


def print_error(error: AnabranchError, stream: str | None = None) -> None:
    """Print an error to standard error, with its stream unless the message begins with it."""
    subject = "" if stream is None or str(error).startswith(f"stream {stream}:") else f"{stream}: "
    click.echo(f"anabranch: {subject}{error}", err=True)
