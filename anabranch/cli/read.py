"""Commands that read the data: queries and changes."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from anabranch.cli.options import DURATION, conf_folder, conf_option, open_stream, stream_argument
from anabranch.cli.report import Event, Report, print_text, report

if TYPE_CHECKING:
    from datetime import timedelta

    from serving_layer.changes import HourChange
    from serving_layer.reader.topic_tail import TopicTail


LOG = logging.getLogger(__name__)

_SHOWN_ROWS = 200


@click.command()
@click.argument("sql")
@click.option(
    "--output",
    type=click.Choice(["table", "csv", "spreadsheet", "json", "parquet"]),
    default="table",
    help="Output format; spreadsheet: CSV without formulas.",
)
@click.option("--out", metavar="FILE", help="Write to this file.")
@click.option(
    "--limit",
    metavar="N",
    type=click.IntRange(0),
    help="Maximum number of rows of a table; 0: all.  [default: 200 on a terminal, else all]",
)
@click.option(
    "--as-of",
    metavar="NAME|TIME",
    help="Read as of a tag, branch, snapshot id or time (UTC) of every table.",
)
@click.option(
    "--live", is_flag=True, help="Also records of the topics that the tables do not have yet."
)
@click.option("--only-accepted", is_flag=True, help="Only rows of hours served by the batch layer.")
@click.option(
    "--revision", metavar="N", type=click.IntRange(1), help="Only rows of this revision of --hour."
)
@click.option("--hour", metavar="HOUR", help="Hour of --revision.")
@click.option("--explain", is_flag=True, help="Print the columns, files and bytes that were read.")
@click.option(
    "--provenance", is_flag=True, help="Print the hours read, and whether they are complete."
)
@conf_option
def query(
    sql: str,
    output: Literal["table", "csv", "spreadsheet", "json", "parquet"],
    out: str | None,
    limit: int | None,
    as_of: str | None,
    live: bool,
    only_accepted: bool,
    revision: int | None,
    hour: str | None,
    explain: bool,
    provenance: bool,
) -> None:
    """Run SQL (DuckDB) over the tables and their views.

    \b
    anabranch query "SELECT count(*) FROM games.game_events"
    anabranch query "FROM games.game_events" --as-of main-2026-11-21T03 --out rows.csv --output csv

    --as-of reads the tables as they were, as long as the snapshot is kept; tags keep it for a week
    (`main-<hour>` is the table when that hour was sealed). --revision reads one accepted revision
    of an hour, also a replaced one; `anabranch history STREAM` lists them. --live adds the records
    of each topic after the offsets of its table, to the topic's end, and the number that are dead
    letters. --live, --explain and --provenance print below a table, and to standard error for other
    formats.
    """
    from contextlib import redirect_stdout

    from anabranch.cli.render.rows import opened_text, provenance_text, tail_text
    from anabranch.common.logs import Progress, configure_logging
    from anabranch.common.output import write_result
    from serving_layer.query.datasets import opened
    from serving_layer.reader import open_reader
    from serving_layer.reader.selection import Revision, Selection

    if (revision is None) != (hour is None):
        raise click.UsageError("expected --revision N and --hour HOUR together")
    chosen = Revision(hour, revision) if hour is not None and revision is not None else None
    selection = Selection(as_of, only_accepted, chosen)
    configure_logging()
    reader = open_reader(conf_folder())

    shown = (limit if limit is not None else _SHOWN_ROWS if sys.stdout.isatty() else 0) or None
    tails: list[TopicTail] | None = [] if live else None
    with reader.query(sql, selection, Progress(LOG, "query", "files"), tails) as answer:
        if write_result(answer.rows, output, Path(out) if out else None, shown):
            click.echo(
                f"the first {shown} rows; --limit 0 shows all, --out FILE writes all", err=True
            )
    with redirect_stdout(sys.stdout if output == "table" else sys.stderr):
        print_text(line for tail in tails or () for line in tail_text(tail))
        if explain:
            print_text(opened_text(opened(answer.files)))
        if provenance:
            print_text(provenance_text(reader.provenance(answer, selection)))


@click.command()
@stream_argument
@click.option(
    "--since", metavar="HOUR|SNAPSHOT|TOKEN", help="Where to continue; default: from the beginning."
)
@click.option("--follow", is_flag=True, help="Keep waiting for changes until stopped.")
@click.option("--every", type=DURATION, default="5 seconds", help="Interval of --follow.")
@report
def changes(
    stream: str, since: str | None, follow: bool, every: timedelta
) -> Iterator[Report[HourChange]]:
    """List completed, restated and erased hours in order.

    \b
    anabranch changes game_events --since 2026-11-21T03 --follow --output json

    For consumers that follow the table. Prints one line for each change (one object with --output
    json): hour, kind, revision, layer, snapshot, rows, added and removed files, erasures, and a
    token to continue from. SINCE is such a token; or an hour to start from; or a snapshot of main,
    by id or tag, that the consumer has copied. An hour's rows replace all rows that the consumer
    has of it.
    """
    from anabranch.cli.render.changes import change_words
    from serving_layer import changes as feed

    job = open_stream(stream)
    token = feed.start_from(job, since)
    # An interrupt is the normal end of --follow.
    with suppress(KeyboardInterrupt):
        for change in feed.follow(job, token, every) if follow else feed.poll(job, token):
            yield Event(change, [change_words(change)])
