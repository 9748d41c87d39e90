"""The command that posts what a webhook's receiver missed."""

from __future__ import annotations

import click

from anabranch.cli.options import open_stream, options, stream_argument


@click.command()
@stream_argument
@click.option("--skip", is_flag=True, help="Post nothing of what waits, now or ever.")
@options
def webhook(stream: str, skip: bool, conf: str | None, output: str) -> None:
    """Post changes that the webhook's receiver missed.

    Posts each change of an hour's state to `webhook:` of the stream's file, in order.

    One line (with --output json one object) for each that it took, at once. Jobs post what they change themselves:
    this is for what a receiver missed. Exit code 75 when it does not take one, which waits with all behind it.
    """
    from anabranch.cli.render import print_event, print_text
    from anabranch.operations.notifications.webhook import Notifier

    job = open_stream(stream, conf)
    notifier = Notifier(job)
    if skip:
        notifier.skip()
        print_text(f"{stream}: what waited is not posted", output)
        return
    posted = 0
    for one in notifier.post():
        posted += 1
        print_event(vars(one), f"{one.hour}  {one.event}  revision {one.revision}  {one.id}", output)
    if not posted:
        print_text(f"{stream}: nothing to post", output)
