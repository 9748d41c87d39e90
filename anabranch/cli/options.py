"""What a stream's commands share: options, and opening the stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from anabranch.job import Job


def _streams(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """Complete stream names from the configuration folder, for a shell."""
    from anabranch.config import stream_names

    return [name for name in stream_names(context.params.get("conf")) if name.startswith(incomplete)]


def stream_argument(required: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """STREAM, with shell completion."""
    return click.argument("stream", required=required, shell_complete=_streams)


def selection(command: Callable[..., None]) -> Callable[..., None]:
    """STREAM…, `--group` and `--all`; `select` gives the streams that they name."""
    for decorate in (
        click.option("--all", "every", is_flag=True, help="Every stream of the configuration folder."),
        click.option("--group", metavar="NAME", help="Every stream whose file has `group: NAME`."),
        click.argument("streams", nargs=-1, metavar="[STREAM]...", shell_complete=_streams),
    ):
        command = decorate(command)
    return command


def all_streams(conf: str | None) -> list[str]:
    """The streams of a configuration folder. Raises ConfigurationError if there are none, or if two name one table."""
    from anabranch import config
    from anabranch.common.errors import ConfigurationError

    if names := list(config.stream_names(conf)):
        config.require_different_tables(conf)
        return names
    raise ConfigurationError(
        f"{config.resolve_folder(conf)}/streams: expected a stream's file, found none; `anabranch init` writes examples"
    )


def options(command: Callable[..., None]) -> Callable[..., None]:
    """`--output` and `--conf`."""
    command = click.option("--output", type=click.Choice(["text", "json"]), default="text", help="Output format.")(
        command
    )
    return click.option("--conf", metavar="DIR", help="Configuration folder (ANABRANCH_CONF, else conf).")(command)


def open_stream(stream: str, conf: str | None) -> Job:
    """Open a stream's job, and log to standard error. Raises ConfigurationError."""
    from anabranch.common.logs import configure_logging
    from anabranch.job import open_job

    configure_logging()
    return open_job(stream, conf)


def master_option(command: Callable[..., None]) -> Callable[..., None]:
    """`--master`, for commands that run a Spark job."""
    text = "Spark master, such as spark://host:7077 (default: spark.master of the configuration)."
    return click.option("--master", metavar="URL", help=text)(command)
