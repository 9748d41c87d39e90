"""Commands that send accepted hours, and events about hours, to other systems."""

from __future__ import annotations

import sys
from contextlib import closing

import click

from anabranch.cli.options import HOUR, open_stream, options, stream_argument


@click.command()
@stream_argument
@click.option("--target", metavar="NAME", help="Deliver to this target only.")
@click.option(
    "--redeliver", is_flag=True, help="Deliver every accepted hour again, as after a restore."
)
@click.option("--why", metavar="TEXT", help="Reason for --redeliver, for the ledger.")
@options
def egress(
    stream: str, target: str | None, redeliver: bool, why: str | None, conf: str | None, output: str
) -> None:
    """Deliver accepted hours to a stream's targets.

    Ends when each target of the stream's file (`egress:`) has all hours. Prints one line (one
    object with --output json) for each delivered hour. The next run delivers hours accepted or
    restated since, and continues after an interruption. A failed target does not block the others;
    the exit code is then that of the first failure.
    """
    from anabranch.cli.render import print_text
    from anabranch.cli.render.changes import print_delivery
    from serving_layer import egress as serving_egress

    if why and not redeliver:
        raise click.UsageError("--why: expected --redeliver with it, found none")
    job = open_stream(stream, conf)
    done = []
    with closing(job.kafka):
        targets = serving_egress.targets_of(job, target)
        if redeliver:
            serving_egress.record_redelivery(job, targets, why)
        for one in serving_egress.egress(job, targets, redeliver):
            done.append(one)
            print_delivery(one, output)
    if not done:
        print_text(f"{stream}: nothing to deliver", output)
    if failed := [one for one in done if isinstance(one, serving_egress.Failed)]:
        sys.exit(failed[0].error.exit_code)


@click.command()
@stream_argument
@click.option("--since", type=HOUR, help="First hour to send (UTC); default: all hours.")
@click.option(
    "--print", "as_events", is_flag=True, help="Print the events, one a line, without sending."
)
@options
def lineage(stream: str, since: str | None, as_events: bool, conf: str | None, output: str) -> None:
    """Send OpenLineage events of the ledger again.

    Sends every accepted and refused revision in the ledger to `lineage.url`.

    The batch job sends events while it runs; this command sends those that a receiver missed. An
    event that is sent again has the same run id.
    """
    from anabranch.cli.render import print_event, print_text
    from anabranch.common.errors import ConfigurationError
    from anabranch.notifications.lineage import reporting

    job = open_stream(stream, conf)
    settings = job.environment.lineage
    if not (settings.url or as_events):
        raise ConfigurationError(
            "lineage.url: expected the address of a receiver in anabranch.yaml (as it ships: "
            "OPENLINEAGE_URL), found none; --print shows the events"
        )
    subject = reporting.subject_of(job)
    from openlineage.client.serde import Serde

    from anabranch.notifications.lineage.receiver import Receiver

    receiver = Receiver(settings) if not as_events else None
    sent = 0
    for row in reporting.decisions_since(job, since):
        run, events = reporting.run_events(subject, row)
        sent += 1
        if receiver is not None:
            receiver.send(events)
            state = {
                "hour": row.hour,
                "revision": row.revision,
                "decision": row.decision,
                "run": run.id,
            }
            print_event(
                state, f"{row.hour}  revision {row.revision}  {row.decision}  run {run.id}", output
            )
        else:
            for event in events:
                print_event(None, Serde.to_json(event), "text")
    if not sent and not as_events:
        print_text(
            f"{stream}: nothing to send: no hour was accepted or "
            f"refused{' since' if since else ''}",
            output,
        )
