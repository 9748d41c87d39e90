"""Options that the commands share, and opening of a stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

import click

from anabranch.common.errors import AnabranchError, ConfigurationError, Unexpected, redact

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
    """Return an hour such as `2026-11-21T03` unchanged. Raises ConfigurationError otherwise."""
    from anabranch.offsets.hours import start_of

    start_of(text)
    return hours(text)[0]


def hours(text: str) -> tuple[str, str]:
    """Return the first and last hour of `A..B`, or of an hour. Raises ConfigurationError."""
    from anabranch.offsets.hours import end_of, span_of

    span = span_of(text)
    try:
        end_of(span[1])
    except OverflowError:
        raise ConfigurationError(f"hour: expected one that ends, found {span[1]}") from None
    return span


DURATION, HOUR, HOURS = duration, hour, hours
"""Types of options and arguments; help shows the function's name."""


def _streams(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete stream names from the configuration folder, for a shell."""
    from anabranch.config import stream_names

    return [name for name in stream_names(context.meta.get(_CONF)) if name.startswith(incomplete)]


stream_argument = click.argument("stream", shell_complete=_streams)
"""STREAM, with shell completion."""


@dataclass(frozen=True)
class StreamSelection:
    """The streams that a command line selects: by name, by group, or all. `one`: the only stream
    that it names; None otherwise, also if the group or the folder has one stream."""

    streams: tuple[str, ...]
    group: str | None
    every: bool

    @property
    def one(self) -> str | None:
        return self.streams[0] if len(self.streams) == 1 else None


def _selecting(command: Callable[..., None], expected: str) -> Callable[..., None]:
    @wraps(command)
    def with_selection(
        streams: tuple[str, ...], group: str | None, every: bool | None = None, **values: Any
    ) -> None:
        if every is None:
            every = not streams and group is None
        if [bool(streams), group is not None, every].count(True) != 1:
            raise click.UsageError(f"expected {expected}; give one of them")
        command(StreamSelection(streams, group, every), **values)

    group = click.option(
        "--group", metavar="NAME", help="Every stream whose file has `group: NAME`."
    )
    streams = click.argument("streams", nargs=-1, metavar="[STREAM]...", shell_complete=_streams)
    return group(streams(with_selection))


def all_streams(command: Callable[..., None]) -> Callable[..., None]:
    """Add STREAM… and `--group` to a command, as a `StreamSelection`: all if none is named."""
    return _selecting(command, "STREAM, or --group NAME")


def named_streams(command: Callable[..., None]) -> Callable[..., None]:
    """Like `all_streams`, for a command that changes the streams: all only with `--all`."""
    every = click.option(
        "--all", "every", is_flag=True, help="Every stream of the configuration folder."
    )
    return every(_selecting(command, "STREAM, or --group NAME, or --all"))


def explain(error: Exception) -> AnabranchError:
    """Return an exception as an AnabranchError; print the traceback of an unexpected one."""
    if isinstance(error, AnabranchError):
        return error
    import traceback

    from anabranch.common.remote_errors import classify_unexpected

    explained = classify_unexpected("run the command", error)
    if explained.exit_code == Unexpected.exit_code:
        click.echo(redact("".join(traceback.format_exception(error))), err=True, nl=False)
    return explained


_CONF, _OUTPUT = "anabranch.conf", "anabranch.output"


def _keep(key: str) -> Callable[[click.Context, click.Parameter, str | None], None]:
    def keep(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
        context.meta[key] = value

    return keep


output_option = click.option(
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=False,
    expose_value=False,
    callback=_keep(_OUTPUT),
    help="Output format.",
)
conf_option = click.option(
    "--conf",
    metavar="DIR",
    expose_value=False,
    callback=_keep(_CONF),
    help="Configuration folder (ANABRANCH_CONF, else conf).",
)
master_option = click.option(
    "--master",
    metavar="URL",
    help="Spark master, such as spark://host:7077 (default: spark.master of the configuration).",
)


def conf_folder() -> str | None:
    """Return the command line's `--conf`."""
    folder: str | None = click.get_current_context().meta[_CONF]
    return folder


def output_format() -> str:
    """Return the command line's `--output`: `text` or `json`."""
    output: str = click.get_current_context().meta[_OUTPUT]
    return output


def open_stream(stream: str) -> Job:
    """Configure logging to standard error, and open a stream's job, until the command ends. Raises
    ConfigurationError."""
    from anabranch.common.logs import configure_logging
    from anabranch.job import open_job

    configure_logging()
    job = open_job(stream, conf_folder())
    click.get_current_context().call_on_close(job.kafka.close)
    return job
