"""The command that posts what a webhook's receiver missed."""

from __future__ import annotations

import json
import sys

import click

from anabranch.cli.options import open_stream, options, stream_argument


@click.command()
@stream_argument()
@click.option("--skip", is_flag=True, help="Post nothing of what waits, now or ever.")
@options
def webhook(stream: str, skip: bool, conf: str | None, output: str) -> None:
    """Post changes that the webhook's receiver missed.

    Posts each change of an hour's state to `webhook:` of the stream's file, in order.

    One line (with --output json one object) for each that it took, at once. Jobs post what they change themselves:
    this is for what a receiver missed. Exit code 75 when it does not take one, which waits with all behind it.
    """
    from anabranch.operations.notifications.webhook import Notifier

    job = open_stream(stream, conf)
    notifier = Notifier(job)
    if skip:
        notifier.skip()
        if output == "text":
            click.echo(f"{stream}: what waited is not posted")
        return
    posted = 0
    for one in notifier.post():
        posted += 1
        words = f"{one.hour}  {one.event}  revision {one.revision}  {one.id}"
        click.echo(json.dumps(vars(one)) if output == "json" else words)
        sys.stdout.flush()
    if output == "text" and not posted:
        click.echo(f"{stream}: nothing to post")
