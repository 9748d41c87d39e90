"""The command that delivers accepted hours to other systems."""

from __future__ import annotations

from collections.abc import Iterator

import click

from anabranch.cli.options import open_stream, output_format, stream_argument
from anabranch.cli.report import Event, Report, report


@click.command()
@stream_argument
@click.option("--target", metavar="NAME", help="Deliver to this target only.")
@click.option(
    "--redeliver", is_flag=True, help="Deliver every accepted hour again, as after a restore."
)
@click.option("--why", metavar="TEXT", help="Reason for --redeliver, for the ledger.")
@report
def egress(
    stream: str, target: str | None, redeliver: bool, why: str | None
) -> Iterator[Report[object]]:
    """Deliver accepted hours to a stream's targets.

    \b
    anabranch egress game_events --target reports

    Ends when each target of the stream's file (`egress:`) has all hours. Prints one line (one
    object with --output json) for each delivered hour. The next run delivers hours accepted or
    restated since, and continues after an interruption. A failed target does not block the others;
    the exit code is then that of the first failure.
    """
    from anabranch.cli.render.changes import delivery_words
    from serving_layer import egress as serving_egress

    if why and not redeliver:
        raise click.UsageError("--why: expected --redeliver with it, found none")
    job = open_stream(stream)
    targets = serving_egress.targets_of(job, target)
    if redeliver:
        serving_egress.record_redelivery(job, targets, why)
    is_current = True
    for one in serving_egress.egress(job, targets, redeliver):
        is_current = False
        if isinstance(one, serving_egress.Failed):
            view: object = {"target": one.target, "failed": str(one.error)}
            yield Event(view, [delivery_words(one)], exit_code=one.error.exit_code)
        else:
            yield Event(vars(one), [delivery_words(one)])
    if is_current and output_format() == "text":
        yield Event(None, [f"{stream}: nothing to deliver"])
