"""The command line: one verb for each action. Commands import slow modules in their bodies."""

from __future__ import annotations

import gc
import logging
import os
import sys
from typing import Any, NoReturn

import click

from anabranch.cli import dev, docs, hours, jobs, lifecycle, operate, read, reports
from anabranch.cli.options import explain
from anabranch.cli.report import print_error
from anabranch.common import process
from anabranch.common.version import VERSION

SECTIONS = {
    "Set up": ("init", "docs", "dev", "doctor", "draft", "check", "apply"),
    "Run": ("speed", "batch", "egress", "maintain"),
    "Look": (
        "status",
        "hours",
        "history",
        "explain",
        "complete",
        "dead-letters",
        "check --drift",
        "audit",
        "erasures",
        "page",
    ),
    "Read the data": ("query", "changes"),
    "Operate": ("adopt", "override", "dead-letters --replay", "hold", "erase", "import", "drop"),
    "Deploy and repair": ("jars", "pack", "health", "merge"),
}
"""The commands as `--help` groups them, in the order in which they are needed."""


class Commands(click.Group):
    """The root group. Prints an error as one line and exits with its code."""

    sections = SECTIONS

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section. A command that `SECTIONS` lacks is not listed."""
        names = [name for section in self.sections.values() for name in section]
        width = max(map(len, names))
        for title, section in self.sections.items():
            # Names are padded, so that the columns of all sections align.
            rows = [(name.ljust(width), self.summary(ctx, name)) for name in section]
            with formatter.section(title):
                formatter.write_dl(rows)

    def summary(self, context: click.Context, name: str) -> str:
        """Return what a command does, or an option of one such as `dead-letters --replay`."""
        name, _, option = name.partition(" ")
        command = self.commands[name]
        if not option:
            return command.get_short_help_str(limit=1000)
        [found] = [p for p in command.get_params(context) if option in p.opts]
        return (found.get_help_record(context) or ("", ""))[1]

    def main(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().main(*args, **kwargs)
        except Exception as error:
            explained = explain(error)
            print_error(explained)
            sys.exit(explained.exit_code)


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True}
)
@click.version_option(VERSION, prog_name="anabranch")
def main() -> None:
    """Kafka to one exact Iceberg table through two arms.

    Exit codes: 0 done, 1 refused, or a check failed, 2 wrong usage or configuration, 70 unexpected,
    75 transient (try again).

    Completion: eval "$(_ANABRANCH_COMPLETE=bash_source anabranch)"; also zsh_source, fish_source.
    """


def run() -> NoReturn:
    """Run the command of this process, and end the process with the command's exit code.

    Flushes logs and output, and skips the interpreter's cleanup: it would free the libraries'
    objects one by one, which takes a fifth of the command's time.
    """
    gc.set_threshold(*process.COLLECT_AFTER)
    process.import_pandas_late()
    process.open_streams()
    try:
        main()
        code = 0
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        code = ended.code or 0
    logging.shutdown()
    # The reader of a pipe may have exited (`anabranch hours | head`). As in click, the exit code is
    # then 1, since some output was not written.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            code = code or 1
    os._exit(code)


main.add_command(dev.dev)
for module in (docs, hours, jobs, lifecycle, operate, read, reports):
    for command in vars(module).values():
        if isinstance(command, click.Command):
            main.add_command(command)
