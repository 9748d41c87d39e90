"""The command that serves the status page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from anabranch.cli.options import DURATION, conf_folder, conf_option

if TYPE_CHECKING:
    from datetime import timedelta


@click.command()
@click.argument("streams", nargs=-1)
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=8090,
    show_default=True,
    help="The port to listen at.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen at.")
@click.option(
    "--behind-proxy", is_flag=True, help="A reverse proxy terminates TLS and authenticates users."
)
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Host name of the page that requests may have. [repeatable]",
)
@click.option(
    "--refresh", type=DURATION, default="10 seconds", show_default=True, help="Interval of reads."
)
@click.option(
    "--deadline",
    type=DURATION,
    default="30 seconds",
    show_default=True,
    help="Time after which an answer is overdue.",
)
@click.option(
    "--late-after",
    type=DURATION,
    default="10 minutes",
    show_default=True,
    help="Longest time without progress of the position while offsets wait.",
)
@conf_option
def page(
    streams: tuple[str, ...],
    port: int,
    host: str,
    behind_proxy: bool,
    allow_host: tuple[str, ...],
    refresh: timedelta,
    deadline: timedelta,
    late_after: timedelta,
) -> None:
    """Serve the status page, and /metrics for Prometheus.

    \b
    anabranch page --port 8090

    Shows the state of all streams, or of STREAMS, a calendar of their hours, and the details of
    each hour. It only reads. Only this machine can connect to it, unless --behind-proxy is given.
    Runs until stopped, and follows stream files that are added, changed or removed, and topics of
    families.
    """
    from anabranch.common.errors import ConfigurationError
    from anabranch.common.logs import configure_logging
    from anabranch.job import StreamFolder

    try:
        from anabranch.operations.page.app import Page, Settings
        from anabranch.operations.page.server import allowed_hosts, listen, run
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"page: expected Starlette, uvicorn and Jinja2, found no {error.name}; run `pip "
            "install 'anabranch[page]'`"
        ) from error

    hosts = allowed_hosts(host, allow_host, behind_proxy)
    configure_logging()
    app = Page(StreamFolder(conf_folder(), streams), Settings(refresh, deadline, late_after))
    with listen(host, port) as socket:
        click.echo(f"serving http://{f'[{host}]' if ':' in host else host}:{port}/", err=True)
        run(app.app(hosts), socket)
