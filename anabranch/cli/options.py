"""What the commands of a stream share: their options, and the job that they work on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from anabranch.job import Job


def _streams(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The streams that a configuration folder has files of, as a shell completes their names."""
    from anabranch.config import stream_names

    return [name for name in stream_names(context.params.get("conf")) if name.startswith(incomplete)]


def stream_argument(required: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """STREAM, which a shell completes."""
    return click.argument("stream", required=required, shell_complete=_streams)


def all_streams(conf: str | None) -> list[str]:
    """The streams that a configuration folder has files of. Raises ConfigurationError for none, and for two files that
    name one table."""
    from anabranch import config
    from anabranch.common.errors import ConfigurationError

    if names := list(config.stream_names(conf)):
        config.require_different_tables(conf)
        return names
    raise ConfigurationError(
        f"{config.resolve_folder(conf)}/streams: expected at least one stream's file, found none; `anabranch init` "
        "writes some to begin with"
    )


def options(command: Callable[..., None]) -> Callable[..., None]:
    """`--output` and `--conf`."""
    command = click.option("--output", type=click.Choice(["text", "json"]), default="text", help="How to print.")(
        command
    )
    return click.option("--conf", metavar="DIR", help="Configuration folder (ANABRANCH_CONF, else conf).")(command)


def open_stream(stream: str, conf: str | None) -> Job:
    """The job of a stream, with its log on standard error. Raises ConfigurationError."""
    from anabranch.common.logs import configure_logging
    from anabranch.job import open_job

    configure_logging()
    return open_job(stream, conf)


def master_option(command: Callable[..., None]) -> Callable[..., None]:
    """`--master`, of the commands that become a Spark job."""
    text = "Where Spark runs, such as spark://host:7077 (default: spark.master of the configuration)."
    return click.option("--master", metavar="URL", help=text)(command)
