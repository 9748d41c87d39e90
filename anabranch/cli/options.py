"""Options that the commands share, and opening of a stream."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from anabranch.common.errors import AnabranchError, Unexpected
from anabranch.common.redaction import redact

if TYPE_CHECKING:
    from datetime import timedelta

    from anabranch.job import Job


def duration(text: str) -> timedelta:
    """Parse a duration such as `5 minutes`, as in the configuration. Raises BadParameter."""
    from anabranch.config.plain import parse_duration

    try:
        return parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def hour(text: str) -> str:
    """Return an hour such as `2026-11-21T03` unchanged. Raises ConfigurationError for anything
    else."""
    from anabranch.offsets import hours

    hours.start_of(text)
    return text


def hours(text: str) -> tuple[str, str]:
    """Return the first and the last hour of `A..B`, or of one hour. Raises ConfigurationError for
    anything else."""
    from anabranch.offsets.hours import span_of

    return span_of(text)


DURATION, HOUR, HOURS = duration, hour, hours
"""Types of options and arguments; help shows the function's name."""


def _streams(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete stream names from the configuration folder, for a shell."""
    from anabranch.config import stream_names

    return [
        name for name in stream_names(context.params.get("conf")) if name.startswith(incomplete)
    ]


stream_argument = click.argument("stream", shell_complete=_streams)
"""STREAM, with shell completion."""


@dataclass(frozen=True)
class StreamSelection:
    """The streams that a command line names: by name, by group, or all."""

    streams: tuple[str, ...]
    group: str | None
    every: bool

    def one(self) -> str | None:
        """Return the stream if one is named, None for several, a group or all. Raises UsageError
        unless exactly one way to select is used."""
        if [bool(self.streams), self.group is not None, self.every].count(True) != 1:
            raise click.UsageError("expected STREAM, or --group NAME, or --all; give one of them")
        return self.streams[0] if len(self.streams) == 1 else None

    def or_every(self) -> StreamSelection:
        """Return this selection, or one of all streams if it is empty."""
        return replace(self, every=self.every or not (self.streams or self.group))


def selection(command: Callable[..., None]) -> Callable[..., None]:
    """Add STREAM…, `--group` and `--all` to a command, which takes them as its first argument, a
    `StreamSelection`."""

    @wraps(command)
    def with_selection(
        streams: tuple[str, ...], group: str | None, every: bool, **values: Any
    ) -> None:
        command(StreamSelection(streams, group, every), **values)

    for decorate in (
        click.option(
            "--all", "every", is_flag=True, help="Every stream of the configuration folder."
        ),
        click.option("--group", metavar="NAME", help="Every stream whose file has `group: NAME`."),
        click.argument("streams", nargs=-1, metavar="[STREAM]...", shell_complete=_streams),
    ):
        with_selection = decorate(with_selection)
    return with_selection


class Failures:
    """The errors of a command's streams. An error of one stream is printed, and does not stop the
    others."""

    def __init__(self) -> None:
        self.errors: dict[str, AnabranchError] = {}

    @contextmanager
    def catching(self, stream: str) -> Iterator[None]:
        """Catch, print and keep an exception as the stream's error."""
        try:
            yield
        except Exception as error:
            explained = self.errors[stream] = (
                error if isinstance(error, AnabranchError) else explain(error)
            )
            click.echo(f"anabranch: {stream}: {explained}", err=True)

    def views(self) -> list[dict[str, str]]:
        """Return each failed stream with its error, for JSON output."""
        return [{"stream": name, "error": str(error)} for name, error in self.errors.items()]

    def end(self) -> None:
        """Exit with the code of the first failed stream, if one failed."""
        if self.errors:
            sys.exit(next(iter(self.errors.values())).exit_code)


def explain(error: Exception) -> AnabranchError:
    """Convert any exception to an AnabranchError; print the traceback of an unexpected one."""
    import traceback

    from anabranch.common.remote_errors import classify_unexpected

    explained = classify_unexpected("run the command", error)
    if explained.exit_code == Unexpected.exit_code:
        click.echo(redact("".join(traceback.format_exception(error))), err=True, nl=False)
    return explained


output_option = click.option(
    "--output", type=click.Choice(["text", "json"]), default="text", help="Output format."
)
conf_option = click.option(
    "--conf", metavar="DIR", help="Configuration folder (ANABRANCH_CONF, else conf)."
)
master_option = click.option(
    "--master",
    metavar="URL",
    help="Spark master, such as spark://host:7077 (default: spark.master of the configuration).",
)


def options(command: Callable[..., None]) -> Callable[..., None]:
    """Add `--output` and `--conf` to a command."""
    return conf_option(output_option(command))


def open_stream(stream: str, conf: str | None) -> Job:
    """Configure logging to standard error, and open a stream's job. Raises ConfigurationError."""
    from anabranch.common.logs import configure_logging
    from anabranch.job import open_job

    configure_logging()
    return open_job(stream, conf)
