"""The command that delivers accepted hours to other systems."""

from __future__ import annotations

import sys

import click

from anabranch.cli.options import open_stream, options, stream_argument


@click.command()
@stream_argument
@click.option("--target", metavar="NAME", help="Deliver to this target only.")
@click.option("--redeliver", is_flag=True, help="Deliver every accepted hour again, as after a restore.")
@click.option("--why", metavar="TEXT", help="Reason for --redeliver, for the ledger.")
@options
def egress(stream: str, target: str | None, redeliver: bool, why: str | None, conf: str | None, output: str) -> None:
    """Deliver accepted hours to a stream's targets.

    Ends when each target of the stream's file (`egress:`) has all hours. Prints one line (one object with --output
    json) for each delivered hour. The next run delivers hours accepted or restated since, and continues after an
    interruption. A failed target does not block the others; the exit code is then that of the first failure.
    """
    from anabranch.cli.render import print_text
    from anabranch.cli.render.deliveries import print_delivery
    from serving_layer import egress as room

    if why and not redeliver:
        raise click.UsageError("--why: expected --redeliver with it, found none")
    job = open_stream(stream, conf)
    failed: list[room.Failed] = []
    try:
        delivered = 0
        targets = room.targets_of(job, target)
        if redeliver:
            room.record_redelivery(job, targets, why)
        for one in room.egress(job, targets, redeliver):
            if isinstance(one, room.Failed):
                failed.append(one)
            else:
                delivered += 1
            print_delivery(one, output)
        if not (delivered or failed):
            print_text(f"{stream}: nothing to deliver", output)
    finally:
        job.kafka.close()
    if failed:
        sys.exit(failed[0].error.exit_code)
