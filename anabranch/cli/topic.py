"""Commands that read a topic's newest records, before a stream has tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from anabranch.cli import many
from anabranch.cli.options import StreamSelection, all_streams, conf_folder, explain
from anabranch.cli.report import Report, Result, StreamReports, report
from anabranch.common.deadline import KAFKA
from anabranch.common.errors import AnabranchError

if TYPE_CHECKING:
    from anabranch.common.deadline import Note
    from anabranch.job import Job
    from anabranch.operations.check import Check
    from anabranch.operations.draft import Draft
    from anabranch.operations.reports.drift import SchemaDrift


@click.command()
@click.argument("topic")
@click.option("--write", is_flag=True, help="Write the files to the configuration folder.")
@report
def draft(topic: str, write: bool) -> StreamReports:
    """Print a stream's file for a topic, from its records.

    \b
    anabranch draft shop.orders
    anabranch draft 'shop[.].*' --write

    Reads the newest 1,000 records, the oldest 200, and the subject in the schema registry. TOPIC
    may be a regular expression for whole names. Comments list what you must decide; types are wide
    where the records leave a doubt. --write keeps files that exist, with an error.
    """
    from anabranch import config
    from anabranch.common.logs import configure_logging
    from anabranch.config.plain import resolve_folder
    from anabranch.kafka.client import KafkaAdapter
    from anabranch.operations import draft as drafting

    configure_logging()
    folder = resolve_folder(conf_folder())
    environment = config.load_environment(folder)

    def drafted() -> Iterator[tuple[str, Report[Draft] | AnabranchError]]:
        with KafkaAdapter(environment.kafka) as kafka:
            topics = drafting.topics_of(kafka, topic)
            for of, name in drafting.names_of(topics).items():
                try:
                    found = drafting.draft(environment, folder, kafka, name, of)
                    lines = found.file.splitlines()
                    if write:
                        lines = [f"wrote {drafting.write(folder, found)}"]
                except Exception as error:
                    yield of, explain(error)
                    continue
                between = ["---"] if len(topics) > 1 and not write else []
                yield of, Report(found, [*between, *lines])

    return StreamReports(drafted())


@click.command()
@all_streams
@click.option(
    "--records",
    "count",
    metavar="N",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Number of records, spread over the partitions.",
)
@click.option("--drift", is_flag=True, help="Instead list fields that the schema lacks.")
@report
def check(chosen: StreamSelection, count: int, drift: bool) -> Result:
    """Decode the newest records by the stream's file.

    \b
    anabranch check orders
    anabranch check game_events --drift

    Prints how many would be rows, dead letters and duplicates, each reason with its first record,
    and the first rows. Needs no tables, reads no more than these records, and writes nothing. The
    exit code is 1 when more are dead letters than `quality.max_dead` of the stream's file, more are
    duplicates with other content than `quality.max_conflicts`, or no record has the key or a column
    that a field nearly names.

    The batch layer counts fields that the schema lacks by name with each hour (`unknown: count` in
    the stream's file). --drift prints the number of records with each, samples, a guessed type, the
    stream's new `schema:`, and the commands to run: `apply`, and the restatement of each hour that
    Kafka still has.
    """
    if drift:
        return many.run_streams(chosen, _drift)

    from anabranch.cli.render.rows import check_text
    from anabranch.operations import check as checking
    from anabranch.subjects.follow import plan_table

    def ready(job: Job, note: Note) -> None:
        note(KAFKA)
        # To confirm that a topic is missing takes as long as an answer may.
        job.kafka.describe(job.stream.topic, confirmed=False)

    def work(job: Job) -> Report[Check]:
        # As `apply` would: a subject may have columns that the table does not have yet.
        stream = plan_table(job.environment, job.stream.without_columns(), job.lake).stream
        found = checking.check(job.environment, stream, job.kafka, count)
        return Report(found, check_text(found), exit_code=bool(found.objections))

    return many.run_streams(chosen, work, ready)


def _drift(job: Job) -> Report[SchemaDrift]:
    from anabranch.cli.render.rows import drift_text
    from anabranch.operations.reports import drift

    view = drift.drift(job)
    return Report(view, drift_text(view))
