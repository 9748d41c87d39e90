"""The command that sends lineage again."""

from __future__ import annotations

import click

from anabranch.cli.options import HOUR, open_stream, options, stream_argument


@click.command()
@stream_argument
@click.option("--since", type=HOUR, help="Of this hour (UTC) and all after it; default: of all.")
@click.option("--print", "as_events", is_flag=True, help="Print the events, one a line, without sending.")
@options
def lineage(stream: str, since: str | None, as_events: bool, conf: str | None, output: str) -> None:
    """Send OpenLineage events of the ledger again.

    Sends every accepted and refused revision in the ledger to `lineage.url`.

    The batch job sends events as it goes; this command sends what was missed. An event sent again is of the same run.
    """
    from anabranch.cli.render import print_event, print_text
    from anabranch.common.errors import ConfigurationError
    from anabranch.operations.notifications.lineage import reporting

    job = open_stream(stream, conf)
    settings = job.environment.lineage
    if not (settings.url or as_events):
        raise ConfigurationError(
            "lineage.url: expected the address of a receiver in anabranch.yaml (as it ships: OPENLINEAGE_URL), found "
            "none; --print shows the events"
        )
    subject = reporting.subject_of(job)
    from openlineage.client.serde import Serde

    from anabranch.operations.notifications.lineage.receiver import Receiver

    receiver = Receiver(settings) if not as_events else None
    sent = 0
    for row in reporting.decisions_since(job, since):
        run, events = reporting.run_events(subject, row)
        sent += 1
        if receiver is not None:
            receiver.send(events)
            state = {"hour": row.hour, "revision": row.revision, "decision": row.decision, "run": run.id}
            print_event(state, f"{row.hour}  revision {row.revision}  {row.decision}  run {run.id}", output)
        else:
            for event in events:
                print_event(None, Serde.to_json(event), "text")
    if not sent and not as_events:
        print_text(f"{stream}: nothing to send: no hour was accepted or refused{' since' if since else ''}", output)
